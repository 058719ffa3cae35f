"""The forms: curves, quantities by block, heat maps, dots and stacked parts, each in one panel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.ticker import MaxNLocator

from .style import BLUE, DECADES, FAINT, GREY, INK, SMALL, WEIGHTS, block_axis, log_axis, words, wrapped

CATEGORY = 1.6  # inches of a category's words
Values: TypeAlias = Any  # [point], an array or a DataArray


@dataclass(frozen=True)
class Series:
    """One quantity along an axis."""

    label: str  # words at its end; "" for none
    y: Values  # [point]
    color: str = BLUE
    low: Values = None  # [point], the interval's ends
    high: Values = None
    x: Values = None  # [point]; 0, 1, 2, ... if not given
    line: Any = "-"  # matplotlib's line style; "" draws marks with their intervals
    width: float = 1.5
    marker: str = ""
    filled: bool = True
    alpha: float = 1.0

    def points(self) -> tuple[np.ndarray, np.ndarray]:
        y = np.atleast_1d(np.asarray(self.y, dtype=float))
        return (np.arange(len(y), dtype=float) if self.x is None else np.asarray(self.x, dtype=float)), y

    def interval(self) -> tuple[np.ndarray, np.ndarray] | None:
        if self.low is None or self.high is None:
            return None
        low, high = (np.atleast_1d(np.asarray(end, dtype=float)) for end in (self.low, self.high))
        return low, high


def curves(cell: Axes, series: Iterable[Series], *, log: bool = False, decades: float | None = DECADES) -> None:
    """Draw lines with their bands, or marks with their intervals, and write each label at its curve's end.

    Args:
        cell: where.
        series: what; NaN is left out, and so is what is not above zero on a logarithmic axis.
        log: the vertical axis is logarithmic.
        decades: what a logarithmic axis spans at most; None for all.
    """
    cell.autoscale(axis="y")  # where curves were drawn before
    for one in series:
        x, y = one.points()
        if log:
            y = np.where(y > 0, y, np.nan)
        look: dict[str, Any] = {"color": one.color, "alpha": one.alpha}
        if (interval := one.interval()) is not None:
            low, high = interval
            if one.line:
                where: Any = np.isfinite(y) & (low > 0) if log else None
                cell.fill_between(x, low, high, where=where, color=one.color, alpha=0.2, linewidth=0)
            else:
                cell.vlines(x, low, high, linewidth=1.1, **look)
        look |= {"marker": one.marker or ("" if one.line else "o"), "markersize": 4}
        look |= {"markerfacecolor": one.color if one.filled else "none"}
        cell.plot(x, y, linestyle=one.line, linewidth=one.width, zorder=3, **look)
        if one.label and np.isfinite(y).any():
            words(cell, one.label, float(y[np.isfinite(y)][-1]), one.color)
    if log:
        log_axis(cell, decades)
    cell.grid(axis="y", color=FAINT, linewidth=0.6)
    cell.set_axisbelow(True)


def blocks(cell: Axes, series: Sequence[Series], nulls: Sequence[Series] = (), *, log: bool = False) -> None:
    """Draw quantities by block, as lines with bands.

    Args:
        cell: where.
        series: over blocks; `x` holds their numbers where they do not begin at 0.
        nulls: what there would be without an effect, one value for all blocks, with an interval or without.
        log: the vertical axis is logarithmic.
    """
    numbers = series[0].points()[0]
    for null in nulls:
        (_, y), interval = null.points(), null.interval()
        cell.axhline(y[0], color=null.color, linestyle=null.line, linewidth=1.1, alpha=null.alpha, zorder=1)
        if interval is not None:
            cell.axhspan(interval[0][0], interval[1][0], color=null.color, alpha=0.15, linewidth=0)
        words(cell, null.label, float(y[0]), null.color)
    curves(cell, series, log=log, decades=None)
    block_axis(cell, numbers)


def heat(
    cell: Axes,
    values: Values,
    label: str,
    marks: Mapping[str, tuple[Values, str]] | None = None,
) -> None:
    """Draw a heat map of blocks by heads, its scale below it, marks on cells and their words beside it.

    Args:
        cell: where.
        values: [block, head]; NaN is left empty.
        label: of the scale.
        marks: by words, which cells [block, head] have a dot and its colour.
    """
    values = np.asarray(values, dtype=float)
    limits = Normalize(0, np.nanmax(values) or 1)
    image = cell.imshow(values, WEIGHTS, limits, aspect="auto", interpolation="none")
    for n, (name, (where, color)) in enumerate((marks or {}).items()):
        block, head = np.nonzero(np.asarray(where))
        if len(block):
            cell.plot(head, block, "o", color=color, markersize=3, markeredgewidth=0)
            words(cell, name, 1 - 0.1 * n, color, fraction=True)
    cell.spines[:].set_visible(False)
    cell.tick_params(length=0)
    for axis in (cell.xaxis, cell.yaxis):
        axis.set_major_locator(MaxNLocator(8, integer=True))
    cell.set_xlabel("head")
    bar = cell.figure.colorbar(image, ax=cell, location="bottom", shrink=0.7, aspect=30, label=label)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    bar.ax.xaxis.label.set_fontsize(SMALL)
    bar.ax.tick_params(labelsize=7, length=2)


def dots(
    cell: Axes,
    categories: Sequence[str],
    series: Sequence[Series],
    *,
    zero: bool = True,
    limits: tuple[float, float] | None = None,
) -> None:
    """Draw dots with intervals along the horizontal axis, one line per category, from the top down.

    Args:
        cell: where.
        categories: words, one for each point.
        series: `y` is the value of each category; several have a colour each.
        zero: draw the line of no effect.
        limits: how far the axis reaches; what lies beyond is an arrowhead at its edge.
    """
    low, high = limits or (-np.inf, np.inf)
    reach = 0.1 * (len(series) - 1)
    for n, one in enumerate(series):
        _, value = one.points()
        place = np.arange(len(categories)) + (2 * reach * n / (len(series) - 1) - reach if reach else 0)
        if (interval := one.interval()) is not None:
            cell.hlines(place, *np.clip(interval, low, high), color=one.color, linewidth=1.3, alpha=one.alpha)
        face = one.color if one.filled else "none"
        look: Any = {
            "color": one.color,
            "markersize": 4.5,
            "alpha": one.alpha,
            "markerfacecolor": face,
            "clip_on": False,
        }
        inside = (value >= low) & (value <= high)
        for chosen, marker in ((inside, one.marker or "o"), (value < low, "<"), (value > high, ">")):
            if chosen.any():
                cell.plot(np.clip(value[chosen], low, high), place[chosen], marker, **look)
        if one.label:
            words(cell, one.label, 1 - 0.12 * n, one.color, fraction=True)
    cell.set_yticks(range(len(categories)), [wrapped(name, CATEGORY, SMALL) for name in categories])
    cell.set_ylim(len(categories) - 0.5, -0.5)
    if limits is not None:
        cell.set_xlim(limits)
    cell.tick_params(axis="y", length=0, labelsize=SMALL)
    cell.xaxis.set_major_locator(MaxNLocator(5))
    cell.grid(axis="x", color=FAINT, linewidth=0.6)
    cell.set_axisbelow(True)
    if zero:
        cell.axvline(0, color=GREY, linewidth=0.8, zorder=1)


def stacks(cell: Axes, parts: Sequence[Series], *, limit: float | None = None) -> None:
    """Draw parts of a total as bars by block, stacked upwards and downwards from zero.

    Args:
        cell: where.
        parts: over blocks; their sum is the total.
        limit: how far the axis reaches on both sides where few blocks go far beyond all others.
    """
    numbers = parts[0].points()[0]
    above, below = np.zeros(len(numbers)), np.zeros(len(numbers))
    for n, part in enumerate(parts):
        y = np.nan_to_num(part.points()[1])
        cell.bar(numbers, y, 0.9, np.where(y < 0, below, above), color=part.color, linewidth=0)
        above, below = above + np.maximum(y, 0), below + np.minimum(y, 0)
        words(cell, part.label, 1 - 0.12 * n, part.color, fraction=True)
    if limit is not None:
        cell.set_ylim(-limit, limit)
    cell.axhline(0, color=INK, linewidth=0.7)
    block_axis(cell, numbers)
