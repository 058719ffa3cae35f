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

from .palette import BLACK, FAINT, GREY, depth_color
from .series import Curve
from .style import (
    DECADES,
    LARGEST,
    STYLE,
    coinciding,
    log_axis,
    of_coinciding,
    panels,
    points,
    save_figure,
    side_legend,
    small_print,
    spread,
)

OUTLIER = 30  # times what three quarters of the blocks stay below; a block beyond it would press all others to a line
MANY = 12  # blocks; more leave no room for marks beside each other, and are drawn as lines with bands
SHADE = 0.2  # of a band
Limits = tuple[float, float] | None


def draw(cell: Axes, curves: Iterable[Curve], *, log: bool = False, limits: Limits = None, image: bool = False) -> None:
    """Draw each curve by its kind.

    Args:
        cell: where.
        curves: stacked upwards and downwards from 0 if they are bars.
        log: what is not above zero has no place on the axis.
        limits: of points; see `points`.
        image: lines and bands become an image in an SVG, which stays small.
    """
    above: Any = 0.0
    below: Any = 0.0
    for curve in curves:
        color = curve.style.color
        look: dict[str, Any] = {"color": color, "zorder": curve.style.order}
        if curve.kind == "line":
            _line(cell, curve, log=log, image=image)
        elif curve.kind == "points":
            interval = None if curve.low is None or curve.high is None else (curve.low, curve.high)
            look = {"marker": curve.style.marker, "filled": curve.filled, "limits": limits}
            points(cell, curve.x, curve.y, interval, color=color, **look)
        elif curve.kind == "level":
            cell.axhline(curve.y[0], linestyle=curve.style.line, linewidth=curve.width, alpha=curve.alpha, **look)
        elif curve.kind == "steps":
            cell.hlines(curve.y, curve.x - 0.42, curve.x + 0.42, color=color, linewidth=curve.width, alpha=curve.alpha)
        else:
            width = 0.8 if len(curve.x) <= MANY else 1.0  # of many blocks a gap would be all there is to see of them
            bottom = np.where(curve.y < 0, below, above)
            cell.bar(curve.x, curve.y, width, bottom, color=color, linewidth=0, antialiased=False)
            above, below = above + np.maximum(curve.y, 0), below + np.minimum(curve.y, 0)


def _line(cell: Axes, curve: Curve, *, log: bool, image: bool) -> None:
    look: dict[str, Any] = {"color": curve.style.color, "rasterized": image}
    y = np.where(curve.y > 0, curve.y, np.nan) if log else curve.y
    if curve.low is not None and curve.high is not None:
        where = np.isfinite(y) if log else None
        band = {"alpha": SHADE, "linewidth": 0, "zorder": curve.style.order - 2}
        cell.fill_between(curve.x, curve.low, curve.high, where=where, **look, **band)  # pyright: ignore
    look |= {"alpha": curve.alpha, "zorder": curve.style.order}
    if curve.marked:
        face = curve.style.color if curve.filled else "none"
        look |= {"marker": curve.style.marker, "markersize": curve.marked, "markerfacecolor": face}
    cell.plot(curve.x, y, linestyle=curve.style.line, linewidth=curve.width, label=curve.label or "_", **look)
    if curve.ends:
        size = 7 if curve.ends == "_" else max(3.6, 1.8 + curve.width)
        look = {"color": curve.style.color, "zorder": curve.style.order, "rasterized": image}
        cell.plot(curve.x[[0, -1]], y[[0, -1]], curve.ends, markersize=size, **look)


def by_fraction(curves: Iterable[Curve]) -> list[Curve]:
    """Curves over positions, over the position fraction j / (T - 1)."""
    return [replace(curve, x=curve.x / (len(curve.x) - 1)) for curve in curves]


def side_by_side(curves: Sequence[Curve]) -> list[Curve]:
    """Points that share their places along the axis, moved beside each other."""
    return [replace(one, x=one.x + shift) for shift, one in zip(spread(len(curves)), curves, strict=True)]


def along_blocks(curves: Sequence[Curve]) -> list[Curve]:
    """Quantities by block: marks with their intervals side by side where blocks are few, else lines in bands."""
    if not curves or len(curves[0].x) <= MANY:
        return side_by_side(curves)
    return [
        replace(curve, kind="line", style=curve.style._replace(line="-" if curve.filled else "--", order=3 + n))
        for n, curve in enumerate(curves)
    ]


def entries(curves: Iterable[Curve]) -> list[Any]:
    """A legend's entries for the labels of curves, in their order; of both kinds where some are marks and some lines."""
    found: dict[str, Any] = {}
    for curve in curves:
        if not curve.label:
            continue
        color = curve.style.color
        look: dict[str, Any] = {"linestyle": "", "marker": ""}
        if curve.kind == "bars":
            found[curve.label] = Patch(color=color, label=curve.label)
            continue
        if curve.kind == "points" or curve.marked:
            look["marker"] = curve.style.marker
        if curve.kind != "points":
            look["linestyle"] = "-" if curve.kind == "steps" else curve.style.line
        if (known := found.get(curve.label)) is not None:  # as of models of other sizes
            look = {key: value or getattr(known, f"get_{key}")() for key, value in look.items()}
            look = {key: "" if value == "None" else value for key, value in look.items()}
        width: dict[str, Any] = {"linewidth": max(1.6, min(curve.width, 3.5)), "alpha": curve.alpha, "markersize": 4.5}
        face = color if curve.filled else "none"
        found[curve.label] = Line2D([], [], color=color, markerfacecolor=face, label=curve.label, **look, **width)
    return list(found.values())


# -------------------------------------------------------------------------------------------- one column per model


@dataclass(frozen=True)
class Row:
    """One quantity of every model: what its panels show, declared."""

    label: str  # of the vertical axis
    height: float  # inches
    curves: Callable[[xr.Dataset], Sequence[Curve]] | Mapping[str, Sequence[Curve]]  # of a result, or by model's name
    axis: Callable[[Axes, xr.Dataset], Any]  # of positions, blocks, bands, ...; and what else is drawn
    title: str | None = None  # of the legend
    log: bool = False
    decades: int | None = DECADES  # that a logarithmic axis spans at most
    own: bool = False  # every panel has its own vertical axis
    limits: Limits = None  # of points, and of the axis, which reaches a little further
    image: bool = False
    more: Sequence[Any] = ()  # entries of the legend that no curve has


def grid(
    results: Mapping[str, xr.Dataset], rows: Mapping[str, Row], texts: Sequence[str], **sizes: Any
) -> tuple[Figure, dict[str, list[Axes]], dict[str, Axes]]:
    """A figure of one column per model and one row per quantity, legends to the right, small print below.

    Args:
        results: by the model's name.
        rows: by name.
        texts: of the small print.
        sizes: `side` and others of `panels`.

    Returns:
        The figure, the panels of each row, and the room for each row's legend. To be called under `STYLE`.
    """
    own = [name for name, row in rows.items() if row.own]
    heights = {name: row.height for name, row in rows.items()}
    figure, width, cells, sides = panels(list(results), heights, own=own, **sizes)
    signs: list[str] = []
    for name, row in rows.items():
        shown = []
        for cell, (model, ds) in zip(cells[name], results.items(), strict=True):
            curves = row.curves(ds) if callable(row.curves) else row.curves[model]
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
        signs += coinciding(cells[name], [one for one in handles if _is_line(one)])
        if handles:
            side_legend(sides[name], handles, row.title)
    small_print(figure, [*texts, *of_coinciding(signs)], width)
    return figure, cells, sides


def _is_line(entry: Any) -> bool:
    return isinstance(entry, Line2D) and entry.get_linestyle() != "None"


def saved_grid(
    results: Mapping[str, xr.Dataset],
    rows: Mapping[str, Row],
    texts: Sequence[str],
    *,
    path: str | Path | None,
    **sizes: Any,
) -> Figure:
    """`grid`, saved if there is a path."""
    with matplotlib.rc_context(STYLE):
        figure, _, _ = grid(results, rows, texts, **sizes)
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


def depth_legend(blocks: int) -> list[Line2D]:
    """Entries for lines of `depth_color`: all blocks where they are few, else some, the first and the last among them."""
    shown = sorted(set(np.linspace(0, blocks - 1, 6).round().astype(int).tolist()))
    return [Line2D([], [], color=depth_color(n, blocks), linewidth=1.6, label=f"block {n}") for n in shown]


def in_view(cell: Axes, parts: xr.DataArray) -> None:
    """Let the vertical axis follow most blocks, and name the blocks that go far beyond them.

    What is named is the height of a block's stack: all its positive parts, or all its negative ones.

    Args:
        cell: which has the parts, that may be stacked.
        parts: [part, layer].
    """
    size = np.maximum(parts.clip(min=0).values.sum(0), -parts.clip(max=0).values.sum(0))
    usual = OUTLIER * np.nanquantile(size, 0.75)
    beyond = (size > usual) & (usual > 0)
    if not beyond.any():
        return
    limit = 1.1 * np.max(size[~beyond & np.isfinite(size)], initial=0)
    cell.set_ylim(-limit, limit)
    shown = zip(parts["layer"].values[beyond], size[beyond], strict=True)
    named = [f"block {layer} ({value:.3g})" for layer, value in shown]
    text = f"beyond the axis: {', '.join(named[:3])}" + f" and {len(named) - 3} more" * (len(named) > 3)
    cell.text(1, 1.01, text, transform=cell.transAxes, ha="right", va="bottom", fontsize=6.5, color=GREY)
