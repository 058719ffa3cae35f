"""How far work has come, and how long it still takes, as measured on what was done.

A measure calls `progress(done, total)`, in the unit that it counts its work in (`Tally`). What runs measures calls
`advance(label, done, total)` for each unit of a command, after it has announced the units that are to come. `Course` is
such an `advance`: it estimates anew, at each call, how much time is left. Nothing is guessed beforehand.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

Progress: TypeAlias = Callable[[float, float], None]  # (done, in all)
Advance: TypeAlias = Callable[[str, float, float], None]  # (which unit is running, done, in all)


class Tally:
    """Counts work and tells `progress`, if there is one. The total grows where more is done than was expected.

    Args:
        progress: what is told.
        total: how much is expected.
        per: calls per unit of the total.
    """

    def __init__(self, progress: Progress | None, total: float | int = 0.0, *, per: int = 1) -> None:
        self.progress, self.total, self.per, self.done = progress, float(total), per, 0.0

    def __call__(self, work: float | int = 1.0) -> None:
        """So much more is done, in calls."""
        self.done += work
        self.total = max(self.total, self.done / self.per)
        if self.progress is not None:
            self.progress(self.done / self.per, self.total)

    def expect(self, more: float | int) -> None:
        """So much is still to be done, in units of the total."""
        self.total = self.done / self.per + more

    def finish(self) -> None:
        """All is done, by this call, another process or an earlier run."""
        self.total = max(self.total, 1.0)
        if self.progress is not None and self.done / self.per < self.total:
            self.progress(self.total, self.total)


def part(progress: Progress | None, start: float = 0.0, stop: float = 1.0) -> Progress | None:
    """What a part of a call tells, as shares of the whole call from `start` to `stop`."""
    if progress is None:
        return None
    return lambda done, total: progress(min(start + (stop - start) * done / total, 1.0), 1.0)


def announce(advance: Advance | None, labels: Iterable[str]) -> None:
    """Say which units are coming, to those who want to know."""
    expect: Any = getattr(advance, "expect", None)
    if expect is not None:
        expect(labels)


class Course:
    """An `Advance` that knows how much is done and how much time is left, by the pace of the last half of the time.

    A unit that was not announced is followed alone, from where it is first heard of: resumed work comes in a leap.

    Args:
        alike: whether units take about the same time; otherwise each is followed alone.
        clock: in seconds.
    """

    def __init__(self, *, alike: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._alike, self._clock, self._announced = alike, clock, False
        self._begin({})

    def _begin(self, units: dict[str, float]) -> None:
        self.units = units  # how much of each is done
        self._running, self._start = "", self._clock()
        self._heard = deque([(self._start, sum(units.values()))])  # (when, how many units were done)

    def expect(self, labels: Iterable[str]) -> None:
        """The units that begin now."""
        self._announced = True
        self._begin(dict.fromkeys(labels, 0.0))

    def __call__(self, label: str, done: float | int, total: float | int) -> None:
        """So much of a unit is done, in a total of its own."""
        share = done / total if total else 1.0
        if label not in self.units:
            if self._announced or share >= 1:
                return
            self._begin({label: share})
        elif self._running not in ("", label) and not self._alike:
            self._begin(self.units)
        self._running, self.units[label] = label, max(share, self.units[label])
        now = self._clock()
        self._heard.append((now, sum(self.units.values())))
        while self._heard[1][0] <= (self._start + now) / 2 and len(self._heard) > 2:
            self._heard.popleft()

    @property
    def done(self) -> float:
        """The share that is done of all units, or of the running one where they are not alike."""
        if not self._alike:
            return self.units.get(self._running, 0.0)
        return sum(self.units.values()) / len(self.units) if self.units else 0.0

    @property
    def spent(self) -> float:
        """Seconds since it began."""
        return self._clock() - self._start

    @property
    def left(self) -> float | None:
        """Seconds until that is 1; None before anything is done."""
        (before, least), (now, most) = self._heard[0], self._heard[-1]
        if most == least:
            return None
        units = len(self.units) if self._alike else 1
        return max(0.0, units * (1 - self.done) * (now - before) / (most - least) - (self._clock() - now))


class Part(Course):
    """Hears of the units of one study of several, which to `advance` are one unit, called `label`."""

    def __init__(self, advance: Advance | None, label: str) -> None:
        super().__init__()
        self._advance, self._label = advance, label

    def __call__(self, label: str, done: float | int, total: float | int) -> None:
        super().__call__(label, done, total)
        if self._advance is not None:
            self._advance(self._label, self.done, 1.0)


def duration(seconds: float) -> str:
    """Rounded: "8 s", "4 min", "2.0 h"."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
