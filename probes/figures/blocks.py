"""Quantities by block, drawn so that models of 6 and of 80 blocks can be read alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from .style import GREY, depth_color, mark, points, spread

OUTLIER = 30  # times what three quarters of the blocks stay below; a block beyond it would press all others to a line
MANY = 12  # blocks; more leave no room for marks beside each other, and are drawn as lines with bands


class Series(NamedTuple):
    """A quantity by block; where it has an interval, both of its ends [block]."""

    values: np.ndarray  # [block]
    interval: tuple[np.ndarray, np.ndarray] | None
    color: str
    marker: str = "o"
    filled: bool = True  # hollow marks, dashed lines otherwise


def along_blocks(cell: Axes, layers: np.ndarray, rows: Sequence[Series]) -> None:
    """Quantities by block: marks with their intervals side by side where blocks are few, else lines in bands."""
    if len(layers) <= MANY:
        for shift, row in zip(spread(len(rows)), rows, strict=True):
            look: Any = {"color": row.color, "marker": row.marker, "filled": row.filled}
            points(cell, layers + shift, row.values, row.interval, **look)
        return
    for order, row in enumerate(rows):
        if row.interval is not None:
            cell.fill_between(layers, *row.interval, color=row.color, alpha=0.2, linewidth=0, zorder=1)
        line = "-" if row.filled else "--"
        cell.plot(layers, row.values, line, color=row.color, linewidth=1.3, zorder=3 + order)


def in_view(cells: Sequence[Axes], parts: Sequence[xr.DataArray]) -> None:
    """Let the common vertical axis of `cells` follow most blocks, and name the blocks that go far beyond them.

    What is named is the height of a block's stack: all its positive parts, or all its negative ones.

    Args:
        cells: with the same vertical axis.
        parts: what is drawn in each, [part, layer]; parts may be stacked.
    """
    sizes = [np.maximum(x.clip(min=0).values.sum(0), -x.clip(max=0).values.sum(0)) for x in parts]
    usual = OUTLIER * np.nanquantile(np.concatenate(sizes), 0.75)
    beyond = [(size > usual) & (usual > 0) for size in sizes]
    if not any(one.any() for one in beyond):
        return
    within = [size[~one & np.isfinite(size)] for size, one in zip(sizes, beyond, strict=True)]
    limit = 1.1 * np.max(np.concatenate(within), initial=0)
    cells[0].set_ylim(-limit, limit)
    for cell, x, size, one in zip(cells, parts, sizes, beyond, strict=True):
        named = [f"block {layer} ({value:.3g})" for layer, value in zip(x["layer"].values[one], size[one], strict=True)]
        if named:
            text = f"beyond the axis: {', '.join(named[:3])}" + f" and {len(named) - 3} more" * (len(named) > 3)
            cell.text(1, 1.01, text, transform=cell.transAxes, ha="right", va="bottom", fontsize=6.5, color=GREY)


def layer_axis(cell: Axes, layers: np.ndarray, label: str = "block") -> None:
    """Blocks (or streams between them) along the horizontal axis, as many labelled as there is room for."""
    step = max(1, -(-len(layers) // 8))
    cell.set_xticks(layers[::step], [str(layer) for layer in layers[::step]])
    cell.set_xlim(float(layers[0]) - 0.6, float(layers[-1]) + 0.6)
    cell.set_xlabel(label)


def depth_legend(blocks: int) -> list[Line2D]:
    """Entries for lines of `depth_color`: all blocks where they are few, else some, the first and the last among them."""
    shown = sorted(set(np.linspace(0, blocks - 1, 6).round().astype(int).tolist()))
    return [Line2D([], [], color=depth_color(n, blocks), linewidth=1.6, label=f"block {n}") for n in shown]


def block_entry(
    label: str, color: str, results: Mapping[str, xr.Dataset], marker: str = "o", *, filled: bool = True
) -> Line2D:
    """A legend's entry for what `along_blocks` draws: a mark, a line, or both if models of both kinds are there."""
    entry = mark(label, marker, color, filled=filled)
    sizes = [ds.sizes["layer"] for ds in results.values()]
    if max(sizes) > MANY:
        entry.set(linestyle="-" if filled else "--", linewidth=1.6, marker=marker if min(sizes) <= MANY else "")
    return entry
