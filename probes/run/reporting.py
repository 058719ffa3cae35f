"""How far a call has come: `progress(done, total)`, in the unit that the call counts its work in."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[float, float], None]  # (done, in all)


class Report:
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
