"""What the figures of all experiments share: a sheet with small print, medians over seeds with bands, legends' entries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from probes.errors import InputError
from probes.figures.style import FAINT, LARGEST, STYLE, blank, save_figure, small_print

from ..experiments.experiment import in_short


@contextmanager
def sheet(
    ds: xr.Dataset, size: tuple[float, float], notes: Sequence[str], *, dpi: int, path: str | Path | None
) -> Iterator[Figure]:
    """A figure of this size in inches; below it these notes and how large the run was; saved if there is a path."""
    with matplotlib.rc_context(STYLE):
        figure = blank(size, dpi)
        yield figure
        small_print(figure, [*notes, in_short(ds)])
        if path is not None:
            save_figure(figure, path, dpi=dpi, largest=LARGEST)


def wanted(ds: xr.Dataset, there: bool, what: str, name: str) -> None:
    """Raise InputError unless the result is of this experiment."""
    if not there:
        raise InputError(f"the result has no {what}; give one of headwater toy {name}")


def files(path: Path) -> list[Path]:
    """What saving under a path writes."""
    return [path.with_name(f"{path.name}{suffix}") for suffix in (".png", ".svg")]


def ranged(
    cell: Axes, x: np.ndarray, values: np.ndarray, color: str, *, alpha: float, band: Any = None, **look: Any
) -> None:
    """The median of values [seed, x] as a line, and their range as a band where there are several."""
    if len(values) > 1:
        cell.fill_between(x, values.min(0), values.max(0), color=color, alpha=alpha, linewidth=0, **(band or {}))
    cell.plot(x, np.median(values, 0), color=color, **look)


def barred(cell: Axes, x: np.ndarray, values: np.ndarray, color: str, *, bar: float, **look: Any) -> None:
    """Medians of values [seed, x] as marks, and their range as bars."""
    cell.vlines(x, values.min(0), values.max(0), color=color, linewidth=bar)
    cell.plot(x, np.median(values, 0), color=color, **look)


def grid(cell: Axes, axis: Any = "y") -> None:
    """Faint lines behind everything."""
    cell.grid(axis=axis, color=FAINT, linewidth=0.6)
    cell.set_axisbelow(True)


def entry(label: str, **look: Any) -> Line2D:
    """A legend's entry."""
    return Line2D([], [], label=label, **look)
