"""Attention sinks by mask: the metric along positions, and the patterns of one sequence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from probes.figures.style import BLUE, DPI, GREY, VERMILLION, WEIGHTS, WIDEST

from ..experiments.sinks_claims import kinds
from .sheet import entry, files, grid, ranged, sheet

DARKEST = 0.5  # the weight from which on a map is as dark as it gets; even weights are 0.06
PANEL, NARROWEST = 1.4, 7.0  # inches across: a panel, and a figure with its small print
FRESH: Any = {"color": VERMILLION, "linewidth": 1.1, "linestyle": "--"}
EVEN: Any = {"color": GREY, "linewidth": 1.1, "linestyle": ":"}


def sinks_figure(ds: xr.Dataset, *, at: Mapping[str, Any] | None = None, path: str | Path | None = None) -> Figure:
    """A column per mask: the metric along positions above, the patterns of one sequence below, a row per block.

    The metric is the median over seeds and its range, with that of the same models before training and of even weights.

    Args:
        ds: result of the experiment `sinks`.
        at: which models, as {scale, depth, residual}; the first trained unless told.
        path: where to save; see `save_figure`.
    """
    at = dict(at or kinds(ds)[0])
    one = ds.sel(at)
    masks, depth, length = [str(mask) for mask in one["mask"].values], int(at["depth"]), one.sizes["position"]
    width = max(NARROWEST, PANEL * len(masks) + 1.2)
    each = (width - 1.2) / len(masks)
    seeds, tau = one.sizes["seed"], str(ds["over_tau"].attrs["long_name"]).rpartition("> ")[2]
    drawn = "1/sqrt(d), as in the paper's text" if at["scale"] == "text" else "1/d, as in its program"
    stream = "with" if at["residual"] == "on" else "without"
    facts = [
        f"metric: share of the queries that see a position with a weight above {tau}, mean over blocks",
        f"medians over {seeds} seeds and their range" if seeds > 1 else "one seed: no range",
        f"components of standard deviation {drawn}; {stream} residual stream; maps: first sequence, seed 0",
    ]
    size = width, 2.4 + each * depth + 1.0
    with sheet(ds, size, facts, dpi=min(DPI, int(WIDEST / width)), path=path) as figure:
        cells = figure.subplots(depth + 1, len(masks), squeeze=False, height_ratios=[1.9, *[each] * depth])
        image = None
        top = 1.05 * max(float(one[name].max()) for name in ("sink", "fresh", "uniform"))
        for n, (mask, column) in enumerate(zip(masks, cells.T, strict=True)):
            models = one.sel(mask=mask)
            _metric(column[0], models)
            column[0].set(title=mask.replace("-", " "), ylim=(0, top))
            for layer, cell in enumerate(column[1:]):
                image = cell.imshow(models["pattern"].sel(layer=layer).values, cmap=WEIGHTS, vmin=0, vmax=DARKEST)
                cell.set(xticks=[0, length // 2, length - 1], yticks=[0, length // 2, length - 1])
                cell.tick_params(labelleft=n == 0, labelbottom=layer == depth - 1)
                for side in ("top", "right"):
                    cell.spines[side].set_visible(True)
            column[-1].set_xlabel("key")
        cells[0, 0].set_ylabel("sink metric")
        for cell in cells[0, 1:]:
            cell.tick_params(labelleft=False)
        for layer, cell in enumerate(cells[1:, 0]):
            cell.set_ylabel(f"block {layer}\nquery")
        if image is not None:
            bar = figure.colorbar(image, ax=cells[1:].ravel().tolist(), extend="max", aspect=14 * depth, pad=0.01)
            bar.set_label("attention weight")
        handles = [
            entry("trained", color=BLUE, linewidth=1.3, marker="o", markersize=3),
            entry("before training", **FRESH),
            entry("even weights", **EVEN),
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=3)
    return figure


def _metric(cell: Axes, models: xr.Dataset) -> None:
    positions = models["position"].values
    sink, fresh = (models[name].transpose("seed", "position").values for name in ("sink", "fresh"))
    cell.plot(positions, models["uniform"].values, **EVEN)
    cell.plot(positions, np.median(fresh, 0), **FRESH)
    ranged(cell, positions, sink, BLUE, alpha=0.2, linewidth=1.3, marker="o", markersize=2.5)
    cell.set(xticks=[0, len(positions) // 2, len(positions) - 1], xlabel="position")
    grid(cell)


def draw(ds: xr.Dataset, path: Path) -> list[Path]:
    """The figure of the first models under `path` itself, those of other scales, depths or residual switches beside it."""
    written: list[Path] = []
    for n, at in enumerate(kinds(ds)):
        residual = "-residual" if at["residual"] == "on" else ""
        base = path if n == 0 else path.with_name(f"{path.name}-{at['scale']}-{at['depth']}{residual}")
        sinks_figure(ds, at=at, path=base)
        written += files(base)
    return written
