"""Curves drawn by matplotlib: one at a time, a panel of them, and figures of one column per model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from .palette import BLACK, FAINT, depth_color
from .series import Curve
from .style import (
    DECADES,
    DPI,
    LARGEST,
    STYLE,
    WIDEST,
    blank,
    coinciding,
    log_axis,
    of_coinciding,
    save_figure,
    side_legend,
    small_print,
    spread,
)

MANY = 12  # blocks; more leave no room for marks beside each other, and are drawn as lines with bands
SHADE = 0.2  # of a band
TICKS = 0.3  # inches beside a panel for what stands along its axis
Limits = tuple[float, float] | None


def draw(cell: Axes, curves: Iterable[Curve], *, log: bool = False, limits: Limits = None, image: bool = False) -> None:
    """Draw each curve by its kind.

    Args:
        cell: where.
        curves: stacked upwards and downwards from 0 if they are bars.
        log: what is not above zero has no place on the axis.
        limits: of points; see `_points`.
        image: lines and bands become an image in an SVG, which stays small.
    """
    above: Any = 0.0
    below: Any = 0.0
    for curve in curves:
        look: dict[str, Any] = {"color": curve.style.color, "linewidth": curve.width, "alpha": curve.alpha}
        if curve.kind == "line":
            _line(cell, curve, look, log=log, image=image)
        elif curve.kind == "points":
            _points(cell, curve, limits)
        elif curve.kind == "level":
            cell.axhline(curve.y[0], linestyle=curve.style.line, zorder=curve.style.order, **look)
        elif curve.kind == "steps":
            cell.hlines(curve.y, curve.x - 0.42, curve.x + 0.42, **look)
        else:
            width = 0.8 if len(curve.x) <= MANY else 1.0  # of many blocks a gap would be all there is to see of them
            bottom = np.where(curve.y < 0, below, above)
            cell.bar(curve.x, curve.y, width, bottom, color=curve.style.color, linewidth=0, antialiased=False)
            above, below = above + np.maximum(curve.y, 0), below + np.minimum(curve.y, 0)


def _line(cell: Axes, curve: Curve, look: dict[str, Any], *, log: bool, image: bool) -> None:
    color, order = curve.style.color, curve.style.order
    y = np.where(curve.y > 0, curve.y, np.nan) if log else curve.y
    if curve.low is not None and curve.high is not None:
        where: Any = np.isfinite(y) if log else None
        band: dict[str, Any] = {"color": color, "alpha": SHADE, "linewidth": 0, "zorder": order - 2}
        cell.fill_between(curve.x, curve.low, curve.high, where=where, rasterized=image, **band)
    if curve.marked:
        face = color if curve.filled else "none"
        look |= {"marker": curve.style.marker, "markersize": curve.marked, "markerfacecolor": face}
    label = curve.label or "_"
    cell.plot(curve.x, y, linestyle=curve.style.line, label=label, zorder=order, rasterized=image, **look)
    if curve.ends:
        size, ends = 7 if curve.ends == "_" else max(3.6, 1.8 + curve.width), [0, -1]
        cell.plot(curve.x[ends], y[ends], curve.ends, color=color, markersize=size, zorder=order, rasterized=image)


def _points(cell: Axes, curve: Curve, limits: Limits) -> None:
    """Values with their intervals; NaN is left out.

    Values beyond `limits` are arrowheads at the edge, ends of intervals small ones. An interval that reaches beyond both
    limits says nothing: it is left out, and its value is pale.
    """
    x, values, color = curve.x, curve.y, curve.style.color
    low, high = limits or (-np.inf, np.inf)
    seen, vague = np.isfinite(values), np.zeros(len(values), dtype=bool)
    look: dict[str, Any] = {"linestyle": "", "color": color}

    def arrowheads(at: np.ndarray, chosen: np.ndarray, edge: float, marker: str, **more: Any) -> None:
        if np.any(cut := chosen & ((at < low) if marker == "v" else (at > high))):
            cell.plot(x[cut], np.full(x[cut].shape, edge), marker=marker, clip_on=False, **look, **more)

    if curve.low is not None and curve.high is not None:
        vague = (curve.low < low) & (curve.high > high)
        sure = seen & ~vague
        bottom, top = (np.clip(end[sure], low, high) for end in (curve.low, curve.high))
        cell.vlines(x[sure], bottom, top, color=color, linewidth=0.9)
        arrowheads(curve.low, sure, low, "v", markersize=2.5)
        arrowheads(curve.high, sure, high, "^", markersize=2.5)
    face = color if curve.filled else "none"
    for chosen, alpha in ((seen & ~vague, 1.0), (seen & vague, 0.35)):
        given: dict[str, Any] = {"alpha": alpha, "markerfacecolor": face, "markersize": 4}
        inside = chosen & (values >= low) & (values <= high)
        if np.any(inside):
            cell.plot(x[inside], values[inside], marker=curve.style.marker, **look, **given)
        arrowheads(values, chosen, low, "v", **given)
        arrowheads(values, chosen, high, "^", **given)


def by_fraction(curves: Iterable[Curve]) -> list[Curve]:
    """Curves over positions, over the position fraction j / (T - 1)."""
    return [replace(curve, x=curve.x / (len(curve.x) - 1)) for curve in curves]


def along_blocks(curves: Sequence[Curve]) -> list[Curve]:
    """Quantities by block: marks with their intervals side by side where blocks are few, else lines in bands."""
    if not curves or len(curves[0].x) <= MANY:
        return [replace(one, x=one.x + shift) for shift, one in zip(spread(len(curves)), curves, strict=True)]
    return [
        replace(curve, kind="line", style=curve.style._replace(line="-" if curve.filled else "--", order=3 + n))
        for n, curve in enumerate(curves)
    ]


def entries(curves: Iterable[Curve]) -> list[Any]:
    """A legend's entries for the labels of curves, in their order; of both kinds where some are marks and some lines."""
    found: dict[str, Any] = {}
    for curve in (curve for curve in curves if curve.label):
        color = curve.style.color
        if curve.kind == "bars":
            found[curve.label] = Patch(color=color, label=curve.label)
            continue
        marker = curve.style.marker if curve.kind == "points" or curve.marked else ""
        line: Any = "" if curve.kind == "points" else "-" if curve.kind == "steps" else curve.style.line
        if (known := found.get(curve.label)) is not None:  # as of models of other sizes
            had = {"None": ""}
            marker = marker or had.get(known.get_marker(), known.get_marker())
            line = line or had.get(known.get_linestyle(), known.get_linestyle())
        look: dict[str, Any] = {"linewidth": max(1.6, min(curve.width, 3.5)), "alpha": curve.alpha, "markersize": 4.5}
        look |= {"color": color, "markerfacecolor": color if curve.filled else "none"}
        found[curve.label] = Line2D([], [], linestyle=line, marker=marker, label=curve.label, **look)
    return list(found.values())


# -------------------------------------------------------------------------------------------- one column per model


@dataclass(frozen=True)
class Row:
    """One quantity of every model: what its panels show, declared."""

    label: str  # of the vertical axis
    height: float  # inches
    # Of a result, or by model's name; None where `finish` draws.
    curves: Callable[[xr.Dataset], Sequence[Curve]] | Mapping[str, Sequence[Curve]] | None
    axis: Callable[[Axes, xr.Dataset], Any]  # of positions, blocks, bands, ...; and what else is drawn
    title: str | None = None  # of the legend
    log: bool = False
    decades: int | None = DECADES  # that a logarithmic axis spans at most
    own: bool = False  # every panel has its own vertical axis
    limits: Limits = None  # of points, and of the axis, which reaches a little further
    image: bool = False
    more: Sequence[Any] = ()  # entries of the legend that no curve has


def grid(
    results: Mapping[str, xr.Dataset],
    rows: Mapping[str, Row],
    texts: Sequence[str],
    *,
    side: float,
    each: float | None = None,
) -> tuple[Figure, dict[str, list[Axes]], dict[str, Axes]]:
    """A figure of one column per model and one row per quantity, legends to the right, small print below.

    Args:
        results: by the model's name.
        rows: by name; they share their vertical axis, except those with `own` ones.
        texts: of the small print.
        side: width of the legends, inches.
        each: width of a panel, inches; by the number of models if not given.

    Returns:
        The figure, the panels of each row, and the room for each row's legend. To be called under `STYLE`.
    """
    columns = len(results)
    each = each or (3.6 if columns == 1 else 2.6 if columns <= 3 else 2.1)
    width, heights = (each + TICKS) * columns + side + 0.4, [row.height for row in rows.values()]
    size = width, sum(heights) + 0.6
    figure = blank(size, min(DPI, int(WIDEST / width)))
    ratios = {"width_ratios": [*[each] * columns, side], "height_ratios": heights}
    specs = figure.add_gridspec(len(rows), columns + 1, **ratios)
    cells: dict[str, list[Axes]] = {name: [] for name in rows}
    sides = {}
    for n, (name, row) in enumerate(rows.items()):
        for column in range(columns):
            shared = cells[name][0] if column and not row.own else None
            cell = figure.add_subplot(specs[n, column], sharey=shared)
            if shared is not None:
                cell.tick_params(labelleft=False)
                cell.tick_params(which="minor", left=False)
            cells[name].append(cell)
        sides[name] = figure.add_subplot(specs[n, columns])
        sides[name].axis("off")
    for name, cell in zip(results, next(iter(cells.values())), strict=True):
        cell.set_title(name)
    signs: list[str] = []
    for name, row in rows.items():
        shown: list[Curve] = []
        for cell, (model, ds) in zip(cells[name], results.items(), strict=True):
            curves = row.curves(ds) if callable(row.curves) else (row.curves or {}).get(model, ())
            draw(cell, curves, log=row.log, limits=row.limits, image=row.image)
            row.axis(cell, ds)
            shown += curves
        for cell in cells[name] if row.own else cells[name][:1]:
            if row.log:
                log_axis(cell, row.decades)
            if row.limits is not None:
                margin = 0.04 * (row.limits[1] - row.limits[0])
                cell.set_ylim(row.limits[0] - margin, row.limits[1] + margin)
        cells[name][0].set_ylabel(row.label)
        handles = [*entries(shown), *row.more]
        lines = [one for one in handles if isinstance(one, Line2D) and one.get_linestyle() != "None"]
        signs += coinciding(cells[name], lines)
        if handles:
            side_legend(sides[name], handles, row.title)
    small_print(figure, [*texts, *of_coinciding(signs)])
    return figure, cells, sides


def saved_grid(
    results: Mapping[str, xr.Dataset],
    rows: Mapping[str, Row],
    texts: Sequence[str],
    *,
    path: str | Path | None,
    finish: Callable[..., object] | None = None,
    **sizes: Any,
) -> Figure:
    """`grid`, with what `finish` adds to what `grid` returns, saved if there is a path."""
    with matplotlib.rc_context(STYLE):
        figure, cells, sides = grid(results, rows, texts, **sizes)
        if finish is not None:
            finish(figure, cells, sides)
        if path is not None:
            save_figure(figure, path, dpi=int(figure.dpi), largest=LARGEST)
    return figure


# ------------------------------------------------------------------------------------------------------------ axes


def layer_axis(cell: Axes, layers: np.ndarray, label: str = "block") -> None:
    """Blocks (or streams between them) along the horizontal axis, as many labelled as there is room for."""
    step = max(1, -(-len(layers) // 8))
    cell.set_xticks(layers[::step], [str(layer) for layer in layers[::step]])
    cell.set_xlim(float(layers[0]) - 0.6, float(layers[-1]) + 0.6)
    cell.set_xlabel(label)


def ruled(cell: Axes) -> None:
    """Faint horizontal lines at the ticks, behind everything."""
    cell.grid(axis="y", color=FAINT, linewidth=0.6)
    cell.set_axisbelow(True)


def zero_line(cell: Axes) -> None:
    cell.axhline(0, color=BLACK, linewidth=0.7, zorder=1)


def band_axis(cell: Axes, bands: np.ndarray) -> None:
    """Query bands along the horizontal axis, at 0, 1, 2, ..., which is drawn."""
    zero_line(cell)
    cell.set_xticks(range(bands.size), [str(band) for band in bands])
    cell.set_xlim(-0.6, bands.size - 0.4)
    cell.set_xlabel("query band")


def depth_legend(blocks: int) -> list[Line2D]:
    """Entries for lines of `depth_color`: all blocks where they are few, else some, the first and the last among them."""
    shown = sorted(set(np.linspace(0, blocks - 1, 6).round().astype(int).tolist()))
    return [Line2D([], [], color=depth_color(n, blocks), linewidth=1.6, label=f"block {n}") for n in shown]
