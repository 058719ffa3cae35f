"""How long a command still takes, as measured on what it has done: units of work, their sizes, and a clock.

Nothing is guessed of the machine. Units are weighed against each other beforehand (`expect`): conditions of a model cost
alike, models by the operations of a pass. Seconds per size are what the work of the same study took so far, before it has
begun what all studies together took; loading and drawing between them are counted apart.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Advance: TypeAlias = Callable[[str, float, float], None]  # (what is running, done, in all)

TOLD_AFTER = 2.0  # seconds; how long shorter work takes is seen soon enough
TOLD_SHARE = 0.05  # of work that does not go prompt by prompt, after which its time is said


def announce(advance: Advance | None, sizes: Mapping[str, float]) -> None:
    """Say what is coming, with sizes relative to each other, to those who want to know; size 0 takes a unit back."""
    expect: Any = getattr(advance, "expect", None)
    if expect is not None:
        expect(sizes)


class Course:
    """Hears which units are expected and how far each is, and knows what is left; an `Advance`.

    A unit that nobody expected is followed alone, from the moment it is first heard of.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.sizes: dict[str, float] = {}
        self._shares: dict[str, float] = {}
        self._clock, self._began, self._before = clock, clock(), 0.0
        self._expected, self._heard = False, self._began
        self._seconds: defaultdict[str, float] = defaultdict(float)  # of measuring, by study
        self._between: list[float] = []  # seconds without any measuring, before each study but the first

    def expect(self, sizes: Mapping[str, float]) -> None:
        """Units that are coming; the clock runs from the first time on."""
        now = self._clock()
        if not self._expected:
            self._expected, self._began, self.sizes = True, now, {}
        elif self._seconds:
            self._between.append(now - self._heard)
        self._heard = now
        self.sizes = {label: size for label, size in {**self.sizes, **sizes}.items() if size > 0}

    def __call__(self, label: str, done: float | int, total: float | int) -> None:
        """So much of a unit is done, in a total of its own."""
        share, now = done / total if total else 1.0, self._clock()
        if label in self.sizes:
            self._seconds[_study(label)] += now - self._heard
            self._shares[label] = max(share, self._shares.get(label, 0.0))
        elif not self._expected and share < 1:
            self.sizes, self._shares = {label: 1.0}, {label: share}
            self._began, self._before = now, share
            self._seconds.clear()
        self._heard = now

    def share(self, label: str) -> float:
        """Of a unit, how much is done."""
        return self._shares.get(label, 0.0)

    @property
    def done(self) -> float:
        """Of all units, how much is done."""
        whole = sum(self.sizes.values())
        return sum(size * self.share(label) for label, size in self.sizes.items()) / whole if whole else 0.0

    @property
    def spent(self) -> float:
        """Seconds since it began."""
        return self._clock() - self._began

    @property
    def left(self) -> float | None:
        """Seconds until all is done; None before anything is."""
        done: defaultdict[str, float] = defaultdict(float)
        for label, size in self.sizes.items():
            done[_study(label)] += size * (self.share(label) - self._before)
        begun = [study for study, size in done.items() if size > 0]
        if not begun:
            return None
        pace = sum(self._seconds[study] for study in begun) / sum(done[study] for study in begun)
        paces = {study: self._seconds[study] / done[study] for study in begun}
        left = sum(
            size * (1 - self.share(label)) * paces.get(_study(label), pace) for label, size in self.sizes.items()
        )
        between = sum(self._between) / len(self._between) if self._between else 0.0
        return left + between * (len(done) - len(begun))


def _study(label: str) -> str:
    """What a label is a unit of, as `Within` writes it; all units of a study alone are of one."""
    study, colon, _ = label.partition(": ")
    return study if colon else ""


class Within:
    """A study's part of a larger course: its labels begin with its kind; what it expects replaces the study as a whole.

    `told` hears once, in one line, what the first of so many `prompts` took and how long the whole still takes; where the
    work does not go prompt by prompt, `prompts` is None, and it hears that of the first twentieth.
    """

    def __init__(
        self,
        advance: Advance | None,
        kind: str,
        whole: str,
        *,
        prompts: int | None = None,
        told: Callable[[str], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._advance, self._kind, self._whole = advance, kind, whole
        self._prompts, self._told, self._clock, self._began = prompts, told, clock, clock()

    def _called(self, label: str) -> str:
        return f"{self._kind}: {label.replace(f' {self._kind}', '', 1)}"

    def expect(self, sizes: Mapping[str, float]) -> None:
        """As `Course.expect`."""
        self._began = self._clock()
        announce(self._advance, {self._whole: 0.0} | {self._called(label): size for label, size in sizes.items()})

    def __call__(self, label: str, done: float | int, total: float | int) -> None:
        if self._advance is None:
            return
        self._advance(self._called(label), done, total)
        share, left = done / total if total else 1.0, getattr(self._advance, "left", None)
        spent = self._clock() - self._began
        if self._told is None or left is None or share < (1 / self._prompts if self._prompts else TOLD_SHARE):
            return
        if left and spent >= TOLD_AFTER:
            count = int(share * self._prompts) if self._prompts else 0
            part = f"{share:.0%} of it" if not count else "first prompt" if count == 1 else f"first {count} prompts"
            self._told(f"{self._kind}: {part} took {duration(spent)}; the whole report about {duration(left)} more")
        self._told = None


def duration(seconds: float) -> str:
    """Rounded: "8 s", "4 min", "2.0 h"."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
