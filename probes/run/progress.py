"""How far work has come.

A measure calls `progress(done, total)`, in the unit that it counts its work in (`Tally`). What runs measures calls
`advance(label, done, total)` for each unit of a command, after it has announced the units that are to come. `Course` is
such an `advance`.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

Progress: TypeAlias = Callable[[float, float], None]  # (done, in all)
Advance: TypeAlias = Callable[[str, float, float], None]  # (which unit is running, done, in all)


class Tally:
    """Counts work and tells `progress`, if there is one. The total grows where more is done than was expected.

    `per`: calls per unit of the total.
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
    """An `Advance` that adds up how much is done of the units that were announced.

    A unit that was not announced is followed alone.
    """

    def __init__(self) -> None:
        self.units: dict[str, float] = {}  # how much of each is done
        self._announced = False

    def expect(self, labels: Iterable[str]) -> None:
        """The units that begin now."""
        self.units, self._announced = dict.fromkeys(labels, 0.0), True

    def __call__(self, label: str, done: float | int, total: float | int) -> None:
        """So much of a unit is done, in a total of its own."""
        share = done / total if total else 1.0
        if label not in self.units and not self._announced:
            self.units = {label: share}
        elif label in self.units:
            self.units[label] = max(share, self.units[label])

    @property
    def done(self) -> float:
        """The share of all units that is done."""
        return sum(self.units.values()) / len(self.units) if self.units else 0.0


class Part(Course):
    """Hears of the units of one measure of several, which to `advance` are one unit, called `label`."""

    def __init__(self, advance: Advance | None, label: str) -> None:
        super().__init__()
        self._advance, self._label = advance, label

    def __call__(self, label: str, done: float | int, total: float | int) -> None:
        super().__call__(label, done, total)
        if self._advance is not None:
            self._advance(self._label, self.done, 1.0)
