"""How long a study still takes, as measured on what it has done: its units and a clock.

Nothing is guessed: before something is measured, nothing is known. The units of a study (conditions, seeds, models) count
alike. Only the time in which one of them is measured counts: models are loaded and figures drawn in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

Advance: TypeAlias = Callable[[str, float, float], None]  # (what is running, done, in all)

TOLD_AFTER = 2.0  # seconds; how long shorter work takes is seen soon enough
TOLD_SHARE = 0.05  # of work that does not go prompt by prompt, after which its time is said


def announce(advance: Advance | None, labels: Iterable[str]) -> None:
    """Say which units are coming, to those who want to know."""
    expect: Any = getattr(advance, "expect", None)
    if expect is not None:
        expect(labels)


class Course:
    """Hears which units are expected and how far each is, and knows what is left; an `Advance`.

    A unit that nobody expected is followed alone, from the moment it is first heard of.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.units: dict[str, float] = {}  # how much of each is done
        self._clock, self._expected = clock, False
        self._begin([])

    def expect(self, labels: Iterable[str]) -> None:
        """The units of a study that begins now."""
        self._expected = True
        self._begin(labels)

    def _begin(self, labels: Iterable[str], before: float = 0.0) -> None:
        self.units, self._before, self._measuring = dict.fromkeys(labels, before), before, 0.0
        self._began = self._heard = self._clock()

    def __call__(self, label: str, done: float | int, total: float | int) -> None:
        """So much of a unit is done, in a total of its own."""
        share = done / total if total else 1.0
        if label in self.units:
            self._measuring += self._clock() - self._heard
            self.units[label] = max(share, self.units[label])
        elif not self._expected and share < 1:
            self._begin([label], share)
        self._heard = self._clock()

    def share(self, label: str) -> float:
        """Of a unit, how much is done."""
        return self.units.get(label, 0.0)

    @property
    def done(self) -> float:
        """Of all units, how much is done."""
        return sum(self.units.values()) / len(self.units) if self.units else 0.0

    @property
    def spent(self) -> float:
        """Seconds since it began."""
        return self._clock() - self._began

    @property
    def left(self) -> float | None:
        """Seconds until all is done; None before anything is."""
        done = sum(self.units.values()) - self._before
        return self._measuring / done * (len(self.units) - done - self._before) if done > 0 else None


class Within:
    """Hears of the units of one study of several; to `advance` the study is one unit, called `label`.

    `told` hears once, in one line, what the first of so many `prompts` took and how long the study still takes; where the
    work does not go prompt by prompt, `prompts` is None, and it hears that of the first twentieth.
    """

    def __init__(
        self,
        advance: Advance | None,
        label: str,
        told: Callable[[str], object],
        prompts: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._advance, self._label, self._told, self._prompts = advance, label, told, prompts
        self._course, self._said = Course(clock), False

    def expect(self, labels: Iterable[str]) -> None:
        """As `Course.expect`."""
        self._course.expect(labels)

    def __call__(self, label: str, done: float | int, total: float | int) -> None:
        course = self._course
        course(label, done, total)
        if self._advance is not None:
            self._advance(self._label, course.done, 1.0)
        share, left = course.share(label), course.left
        if self._said or not left or share < (1 / self._prompts if self._prompts else TOLD_SHARE):
            return
        self._said = True
        if course.spent >= TOLD_AFTER:
            count = int(share * self._prompts) if self._prompts else 0
            part = f"{share:.0%} of it" if not count else "first prompt" if count == 1 else f"first {count} prompts"
            self._told(f"{self._label}: {part} took {duration(course.spent)}; the study about {duration(left)} more")


def duration(seconds: float) -> str:
    """Rounded: "8 s", "4 min", "2.0 h"."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
