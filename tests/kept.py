"""What a folder holds of unfinished work, as tests look at it, and ways to stop what is measured."""

from collections.abc import Callable
from pathlib import Path
from typing import Any


def piece_files(folder: Path) -> list[Path]:
    """The files of all pieces and results below a folder."""
    return sorted(folder.rglob("[!.]*.npz"))


def written(folder: Path) -> dict[Path, int]:
    """By file of a finished unit when it was written."""
    return {file: file.stat().st_mtime_ns for file in piece_files(folder) if file.name == "result.npz"}


class Stop(Exception):
    """Pulls the plug."""


def stopping_at(label: str) -> Callable[[str, float, float], None]:
    """Stops a study as soon as it says that it measures this unit."""

    def advance(running: str, done: float, total: float) -> None:
        if running == label:
            raise Stop

    return advance


def interrupting(at: int) -> Callable[..., None]:
    """Progress that is interrupted, as by Ctrl-C, when it is told for that many times."""
    told: list[object] = []

    def advance(*step: object) -> None:
        told.append(step)
        if len(told) == at:
            raise KeyboardInterrupt

    return advance


def never(*_: object) -> Any:
    """Hears that something is measured, where nothing may be."""
    raise AssertionError("something was measured")


def listed(folder: Path) -> list[str]:
    """All that is below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
