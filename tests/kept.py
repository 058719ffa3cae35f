"""What a folder holds of unfinished work, as tests look at it."""

import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import xarray as xr

from probes.results.dataset import from_bytes
from probes.run.resume import RESULT, Stores


def files(folder: Path) -> list[Path]:
    """The files of unfinished work."""
    return sorted(folder.rglob("*.sqlite"))


def units(folder: Path) -> dict[str, bool]:
    """By label whether a unit is done; those with neither a piece nor a result are not there."""
    found: dict[str, bool] = {}
    for file in files(folder):
        with suppress(sqlite3.OperationalError):  # a process has just made the file
            for label, piece in rows(file, "SELECT DISTINCT label, piece FROM arrays"):
                found[label] = found.get(label, False) or piece == RESULT
    return found


def result(folder: Path, kind: str, label: str) -> xr.Dataset:
    """The result of a unit that is done."""
    (read,) = Stores(folder / "unfinished" / kind).readers(label, [RESULT])
    return from_bytes(read()[RESULT].tobytes())


def written(folder: Path) -> dict[tuple[str, str], int]:
    """By unit and file the place of its result in the file, which another writing would change."""
    query = "SELECT label, max(rowid) FROM arrays WHERE piece = ? GROUP BY label"
    return {(label, file.name): row for file in files(folder) for label, row in rows(file, query, RESULT)}


def pieces(file: Path) -> list[str]:
    """The names of pieces in a file, in the order in which they were written."""
    return [name for (name,) in rows(file, "SELECT piece FROM arrays GROUP BY piece ORDER BY min(rowid)")]


def rows(file: Path, statement: str, *values: object) -> list[tuple]:
    """What a statement gives of a file; changes are kept."""
    connection = sqlite3.connect(file)
    with connection:
        found = connection.execute(statement, values).fetchall()
    connection.close()
    return found


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
