"""Tables with sentences above them, as text and in files, and numbers with intervals as they are written there."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike

from ..run.files import atomic
from .curves import estimate, three_digits
from .dataset import commands_in, made_with


@dataclass(frozen=True)
class Table:
    """Rows of text under a title."""

    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]


@dataclass(frozen=True)
class Report:
    """Tables with sentences above them."""

    title: str
    described: str  # what was measured, and what the columns are
    tables: list[Table]
    lines: list[str]


def markdown(table: Table) -> list[str]:
    """The lines of a table in Markdown; what would end a cell or a row is escaped."""

    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in cells)} |"

    return [line(table.columns), f"| {' | '.join(['---'] * len(table.columns))} |", *map(line, table.rows)]


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers in ascending order, neighbours as a range: "3-9, 12"."""
    runs: list[list[int]] = []
    for one in numbers:
        if runs and one == runs[-1][-1] + 1:
            runs[-1][1:] = [one]
        else:
            runs.append([one])
    return ", ".join("-".join(map(str, run)) for run in runs)


def number(value: Any, form: str = ".3g") -> str:
    """A number as text; "-" where there is none."""
    value = float(value)
    form = form if form.startswith("+") else f"z{form}"  # no -0
    return "-" if math.isnan(value) else three_digits(value) if form == "z.3g" else format(value, form)


def interval(value: Any, low: Any = math.nan, high: Any = math.nan, form: str = ".3g") -> str:
    """A number with its interval, "0.3 [0.2, 0.4]"; alone, where it was given none; "?" where the interval has no end."""
    ends = [float(low), float(high)]
    if math.isnan(float(value)) or any(map(math.isnan, ends)):
        return number(value, form)
    if any(map(math.isinf, ends)):  # anything may be true: the number says nothing
        return "?"
    return f"{number(value, form)} [{', '.join(number(end, form) for end in ends)}]"


NOISE = "within noise"


def variance(value: Any, low: Any = math.nan, high: Any = math.nan, form: str = ".3g") -> str:
    """As `interval`, of a variance that is taken across two halves of the prompts: their noise may make it negative.

    Where it is, or its interval holds 0, it is no number, "within noise [-0.2, 0.1]".
    """
    if not (float(value) < 0 or float(low) <= 0):
        return interval(value, low, high, form)
    ends = [float(low), float(high)]
    return f"{NOISE} [{', '.join(number(end, form) for end in ends)}]" if np.isfinite(ends).all() else NOISE


def estimated(
    ds: xr.Dataset,
    name: str,
    form: str = ".3g",
    scale: float | int = 1,
    said: Callable[..., str] = interval,
    **where: object,
) -> str:
    """A result's variable at a place, `scale` times, with the interval that the result holds."""
    return said(*(scale * end for end in estimate(ds, name, **where)), form=form)


def range_told(values: ArrayLike, form: str = ".3g") -> str:
    """Median and range of what is finite, "0.3 (0.2 to 0.5)", since brackets hold intervals; "-" where nothing is."""
    known = np.asarray(values, dtype=np.float64)
    known = known[np.isfinite(known)]
    if len(known) < 2:
        return number(known[0], form) if len(known) else "-"
    middle, low, high = (number(value, form) for value in (np.median(known), known.min(), known.max()))
    return f"{middle} ({low} to {high})"


def write_report(report: Report, path: Path, command: str | None = None) -> None:
    """A report as a page in Markdown, under the command that made it: this one, if none is given."""
    command = str(made_with()["command"]) if command is None else command
    parts = [f"# {report.title}", *([_code(command)] if command else []), report.described]
    parts += [f"- {line}" for line in report.lines]
    for table in report.tables:
        parts += [f"{table.title}:", "\n".join(markdown(table))]
    with atomic(path) as temporary:
        temporary.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _code(command: str) -> str:
    """One command in its paragraph, several in a block, a line each."""
    several = commands_in(command)
    return "\n".join(["```sh", *several, "```"]) if several[1:] else f"`{command}`"
