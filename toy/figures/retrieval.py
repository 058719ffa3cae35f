"""Loss of retrieving one position's token, by position: one panel per width and variant."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from probes.figures.style import BLACK, BLUE, CYCLE, GREEN, GREY, VERMILLION

from ..experiments.retrieval_claims import Kind, of_kind, published
from ..experiments.rules import known
from .sheet import entry, files, grid, ranged, sheet, wanted

COLORS = {1: VERMILLION, 2: BLUE, 3: GREEN}
DASHES: Any = {1: "-", 2: (0, (5, 1.2)), 3: (0, (4, 1, 1, 1))}  # lines can be told apart without colour
DOTTED: Any = (0, (1, 1.4))
EACH, HEIGHT = 2.35, 2.35  # inches of a panel
MARGIN = 0.7
DPI = 140


def retrieval_figure(ds: xr.Dataset, *, path: str | Path | None = None) -> Figure:
    """Loss against the position asked for, one line per depth: median over seeds, band from the least to the largest.

    Rows are widths, columns variants of stream and feed-forward. Thin dotted lines are the best of the seeds, which no
    single run promises; grey lines what a reader gets who has seen nothing, or all tokens but not their order; rings the
    published values of [Liu-7].

    Args:
        ds: a result of `headwater toy retrieval`.
        path: where to save; see `save_figure`.

    Raises:
        InputError: the result is another one.
    """
    there = {"loss", "limit"} <= set(ds) and "feed_forward" in ds["loss"].dims
    wanted(ds, there, "loss by target", "retrieval")
    widths = [int(w) for w in ds["width"].values]
    columns = list(product(ds["residual"].values.tolist(), ds["feed_forward"].values.tolist()))
    wide = max(EACH * len(columns) + MARGIN, 5.6)
    notes = [
        f"lines: median of {ds.sizes['seed']} seeds on fresh sequences, bands: their range",
        "published: single runs, read off the figures of [Liu-7]",
    ]
    with sheet(ds, (wide, HEIGHT * len(widths) + 1.15), notes, dpi=DPI, path=path) as figure:
        cells: Any = figure.subplots(len(widths), len(columns), sharex=True, sharey=True, squeeze=False)
        for (row, width), (column, parts) in product(enumerate(widths), enumerate(columns)):
            cell = cells[row, column]
            _panel(cell, ds, width, parts)
            if row == 0:
                variant = Kind(1, width, *parts).variant
                cell.set_title(variant.replace(", ", ",\n") if len(columns) > 1 else variant)
            if row == len(widths) - 1:
                cell.set_xlabel("position asked for, k")
            if column == 0:
                cell.set_ylabel(f"width {width}\nloss (nats)")
        _name_limits(cells[0, -1], ds)
        figure.legend(handles=_handles(ds), loc="outside upper center", ncols=3 if wide < 8 else 6, columnspacing=1.2)
    return figure


def _panel(cell: Axes, ds: xr.Dataset, width: int, parts: tuple[int, int]) -> None:
    targets = ds["target"].values
    order = np.argsort(targets)
    for reader in ("nothing", "bag and last"):
        cell.plot(targets[order], ds["limit"].sel(reader=reader).values[order], color=GREY, linewidth=0.9, zorder=1)
    for layers in (int(n) for n in ds["layers"].values):
        kind = Kind(layers, width, *parts)
        loss = of_kind(ds, kind)["loss"].transpose("seed", "target").values[:, order]
        look: Any = {
            "linestyle": DASHES.get(layers, "-"),
            "linewidth": 1.5,
            "zorder": 4,
            "marker": "o",
            "markersize": 2.6,
        }
        color = _color(layers)
        ranged(cell, targets[order], loss, color, alpha=0.18, band={"zorder": 2}, **look)
        cell.plot(targets[order], loss.min(0), color=color, linestyle=DOTTED, linewidth=0.9, zorder=3)
        if (read := known(published, ds, kind)) is not None:
            cell.plot(targets, read.values, "o", mec=color, mfc="none", markersize=6.5, mew=1.1, zorder=6)
    cell.set(
        xticks=targets,
        xlim=(float(targets.min()) - 0.4, float(targets.max()) + 0.4),
        ylim=(-0.08, max(2.5, 1.06 * float(ds["limit"].max()))),
    )
    grid(cell)


def _name_limits(cell: Axes, ds: xr.Dataset) -> None:
    """Beside the upper right panel, where the lines end."""
    ends: Any = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "fontsize": 7.5, "color": GREY}
    nothing = float(ds["limit"].sel(reader="nothing")[0])
    blind = float(ds["limit"].sel(reader="bag and last").max())
    cell.annotate(f"knows nothing\n{nothing:.2f}", (1, nothing), (3, -4), **ends)
    cell.annotate(f"blind to order\n{blind:.2f}", (1, blind), (3, -8), **ends)


def _handles(ds: xr.Dataset) -> list[Any]:
    found: list[Any] = []
    for layers in (int(n) for n in ds["layers"].values):
        look: Any = {"color": _color(layers), "linestyle": DASHES.get(layers, "-")}
        found.append(entry(f"{layers} layer{'s' if layers > 1 else ''}", linewidth=1.6, **look))
    found.append(Patch(color=GREY, alpha=0.3, linewidth=0, label="range over seeds"))
    found.append(entry("best of the seeds", color=BLACK, linestyle=DOTTED, linewidth=1))
    ring: Any = {"color": BLACK, "linestyle": "", "marker": "o", "mfc": "none", "markersize": 6.5, "mew": 1.1}
    return [*found, entry("published", **ring)]


def _color(layers: int) -> str:
    return COLORS.get(layers, CYCLE[(layers + 2) % len(CYCLE)])


def draw(ds: xr.Dataset, path: Path) -> list[Path]:
    """PATH.png and PATH.svg."""
    retrieval_figure(ds, path=path)
    return files(path)
