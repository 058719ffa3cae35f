"""Loss of retrieving one position's token, by position: one panel per width and variant."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from probes.errors import InputError
from probes.figures.style import (
    BLACK,
    BLUE,
    CYCLE,
    FAINT,
    GREEN,
    GREY,
    LARGEST,
    STYLE,
    VERMILLION,
    save_figure,
    small_print,
)

from ..experiments.experiment import in_short
from ..experiments.retrieval_claims import PUBLISHED, Variant, losses, nearest, variants

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
    published values of [Liu-7], in the panel of the variant that they are nearest to.

    Args:
        ds: a result of `headwater toy retrieval`.
        path: where to save; see `save_figure`.

    Raises:
        InputError: the result is another one.
    """
    if "loss" not in ds or "limit" not in ds or "feed_forward" not in ds["loss"].dims:
        raise InputError("the result has no loss by target; give one of headwater toy retrieval")
    widths, columns = [int(w) for w in ds["width"].values], variants(ds)
    near = {key: found.variant for key in PUBLISHED if (found := nearest(ds, *key)) is not None}
    wide = max(EACH * len(columns) + MARGIN, 5.6)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(wide, HEIGHT * len(widths) + 1.15), dpi=DPI, layout="constrained")
        cells: Any = figure.subplots(len(widths), len(columns), sharex=True, sharey=True, squeeze=False)
        for (row, width), (column, variant) in product(enumerate(widths), enumerate(columns)):
            cell = cells[row, column]
            _panel(cell, ds, width, variant, near)
            if row == 0:
                cell.set_title(str(variant).replace(", ", ",\n") if len(columns) > 1 else str(variant))
            if row == len(widths) - 1:
                cell.set_xlabel("position asked for, k")
            if column == 0:
                cell.set_ylabel(f"width {width}\nloss (nats)")
        _name_limits(cells[0, -1], ds)
        figure.legend(
            handles=_handles(ds, near), loc="outside upper center", ncols=3 if wide < 8 else 6, columnspacing=1.2
        )
        seeds = ds.sizes["seed"]
        notes = [
            f"lines: median of {seeds} seeds on fresh sequences, bands: their range",
            "published: single runs read off [Liu-7], shown where the variant is nearest to them",
            in_short(ds),
        ]
        small_print(figure, notes, wide)
        if path is not None:
            save_figure(figure, path, dpi=DPI, largest=LARGEST)
    return figure


def _panel(cell: Axes, ds: xr.Dataset, width: int, variant: Variant, near: dict[tuple[int, int], Variant]) -> None:
    targets = ds["target"].values
    order = np.argsort(targets)
    for reader in ("nothing", "bag and last"):
        cell.plot(targets[order], ds["limit"].sel(reader=reader).values[order], color=GREY, linewidth=0.9, zorder=1)
    for layers in (int(n) for n in ds["layers"].values):
        loss = losses(ds, layers, width, variant)
        if loss is None:
            continue
        loss, color = loss.transpose("seed", "target").values[:, order], _color(layers)
        cell.fill_between(targets[order], loss.min(0), loss.max(0), color=color, alpha=0.18, linewidth=0, zorder=2)
        given: Any = {"color": color, "linestyle": DASHES.get(layers, "-"), "linewidth": 1.5, "zorder": 4}
        cell.plot(targets[order], np.median(loss, 0), marker="o", markersize=2.6, **given)
        cell.plot(targets[order], loss.min(0), color=color, linestyle=DOTTED, linewidth=0.9, zorder=3)
        if near.get((layers, width)) == variant:
            found = nearest(ds, layers, width)
            assert found is not None
            cell.plot(targets, found.published.values, "o", mec=color, mfc="none", markersize=6.5, mew=1.1, zorder=6)
    cell.set_xticks(targets)
    cell.set_xlim(float(targets.min()) - 0.4, float(targets.max()) + 0.4)
    cell.set_ylim(-0.08, max(2.5, 1.06 * float(ds["limit"].max())))
    cell.grid(axis="y", color=FAINT, linewidth=0.6)
    cell.set_axisbelow(True)


def _name_limits(cell: Axes, ds: xr.Dataset) -> None:
    """Beside the upper right panel, where the lines end."""
    ends: Any = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "fontsize": 7.5, "color": GREY}
    nothing = float(ds["limit"].sel(reader="nothing")[0])
    blind = float(ds["limit"].sel(reader="bag and last").max())
    cell.annotate(f"knows nothing\n{nothing:.2f}", (1, nothing), (3, -4), **ends)
    cell.annotate(f"blind to order\n{blind:.2f}", (1, blind), (3, -8), **ends)


def _handles(ds: xr.Dataset, near: dict[tuple[int, int], Variant]) -> list[Any]:
    found: list[Any] = []
    for layers in (int(n) for n in ds["layers"].values):
        look: Any = {"color": _color(layers), "linestyle": DASHES.get(layers, "-")}
        found.append(Line2D([], [], linewidth=1.6, label=f"{layers} layer{'s' if layers > 1 else ''}", **look))
    found.append(Patch(color=GREY, alpha=0.3, linewidth=0, label="range over seeds"))
    found.append(Line2D([], [], color=BLACK, linestyle=DOTTED, linewidth=1, label="best of the seeds"))
    if near:
        found.append(
            Line2D(
                [], [], color=BLACK, linestyle="", marker="o", mfc="none", markersize=6.5, mew=1.1, label="published"
            )
        )
    return found


def _color(layers: int) -> str:
    return COLORS.get(layers, CYCLE[(layers + 2) % len(CYCLE)])


def draw(ds: xr.Dataset, path: Path) -> list[Path]:
    """PATH.png and PATH.svg."""
    retrieval_figure(ds, path=path)
    return [path.with_suffix(suffix) for suffix in (".png", ".svg")]
