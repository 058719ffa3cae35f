"""How long a command still takes, as measured on what it has done: units of work, their sizes, and a clock.

Nothing is guessed of the machine. Units are weighed against each other beforehand (`expect`): conditions of a model cost
alike, models by the operations of a pass. A second per size is what the work done so far took.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Advance: TypeAlias = Callable[[str, float, float], None]  # (what is running, done, in all)


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
        self._expected = False

    def expect(self, sizes: Mapping[str, float]) -> None:
        """Units that are coming; the clock runs from the first time on."""
        if not self._expected:
            self._expected, self._began, self.sizes = True, self._clock(), {}
        self.sizes = {label: size for label, size in {**self.sizes, **sizes}.items() if size > 0}

    def __call__(self, label: str, done: float | int, total: float | int) -> None:
        """So much of a unit is done, in a total of its own."""
        share = done / total if total else 1.0
        if label in self.sizes:
            self._shares[label] = max(share, self._shares.get(label, 0.0))
        elif not self._expected and share < 1:
            self.sizes, self._shares = {label: 1.0}, {label: share}
            self._began, self._before = self._clock(), share

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
        done = self.done
        return self.spent * (1 - done) / (done - self._before) if done > self._before else None


class Within:
    """A study's part of a larger course: its labels begin with its kind; what it expects replaces the study as a whole."""

    def __init__(self, advance: Advance | None, kind: str, whole: str) -> None:
        self._advance, self._kind, self._whole = advance, kind, whole

    def _called(self, label: str) -> str:
        return label if self._kind in label else f"{self._kind}: {label}"

    def expect(self, sizes: Mapping[str, float]) -> None:
        """As `Course.expect`."""
        announce(self._advance, {self._whole: 0.0} | {self._called(label): size for label, size in sizes.items()})

    def __call__(self, label: str, done: float | int, total: float | int) -> None:
        if self._advance is not None:
            self._advance(self._called(label), done, total)


def duration(seconds: float) -> str:
    """Rounded: "8 s", "4 min", "2.0 h"."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
