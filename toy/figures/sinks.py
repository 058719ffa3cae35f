"""Attention sinks by mask: the metric along keys, and the patterns of one sequence [Wu, Fig. 7]."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from probes.figures.style import BLUE, DPI, GREY, VERMILLION, WEIGHTS, WIDEST

from ..experiments.learnt import gate, name_of
from ..experiments.rules import setting
from ..experiments.sinks_claims import kinds, masks_of
from .sheet import entry, files, grid, ranged, sheet

DARKEST = 0.5  # the weight from which on a map is as dark as it gets; even weights are 0.06
PANEL, NARROWEST, LARGEST_MAP = 1.4, 7.0, 2.2  # inches across: a panel, a figure with its small print, a map
ALL_MAPS = 5.6  # inches down: those of all blocks
FRESH: Any = {"color": VERMILLION, "linewidth": 1.1, "linestyle": "--"}
EVEN: Any = {"color": GREY, "linewidth": 1.1, "linestyle": ":"}


def sinks_figure(ds: xr.Dataset, *, at: Mapping[str, Any] | None = None, path: str | Path | None = None) -> Figure:
    """A column per mask: the metric along keys above, the patterns of one sequence below, a row per block.

    The metric is the median over seeds and its range, with that of the same models before training and of even weights.
    Titles say which models do not pass the gate (accuracy on novel classes).

    Args:
        ds: result of the experiment `position-bias`.
        at: which models, as `kinds` has them; the first unless told.
        path: where to save; see `save_figure`.
    """
    at = dict(at or kinds(ds)[0])
    by_mask, learnt = masks_of(ds, at), gate(ds)[1]
    first = next(iter(by_mask.values()))
    masks, depth, length, seeds = list(by_mask), first.sizes["layer"], first.sizes["key"], first.sizes["seed"]
    width = max(NARROWEST, PANEL * len(masks) + 1.2)
    each = min((width - 1.2) / len(masks), LARGEST_MAP, ALL_MAPS / depth)
    facts = [
        f"{name_of(at)}; medians over {seeds} seeds and their range" if seeds > 1 else f"{name_of(at)}; one seed",
        f"metric: share of the queries that see a key which give it more than {setting(ds, 'tau'):g}; maps: one sequence",
    ]
    size = width, 2.4 + each * depth + 1.0
    with sheet(ds, size, facts, dpi=min(DPI, int(WIDEST / width)), path=path) as figure:
        cells = figure.subplots(depth + 1, len(masks), squeeze=False, height_ratios=[1.9, *[each] * depth])
        image = None
        top = 1.05 * max(float(one[name].max()) for one in by_mask.values() for name in ("sink", "fresh", "even"))
        for n, ((mask, models), column) in enumerate(zip(by_mask.items(), cells.T, strict=True)):
            _metric(column[0], models)
            passed = str(learnt.sel(at | {"mask": mask, "training": "unbiased"}).item()) == "trained"
            column[0].set(title=mask.replace("-", " ") + "\nbelow the gate" * (not passed), ylim=(0, top))
            for layer, cell in enumerate(column[1:]):
                image = cell.imshow(
                    models["pattern"].isel(seed=0, layer=layer).values, cmap=WEIGHTS, vmin=0, vmax=DARKEST
                )
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
            bar = figure.colorbar(
                image, ax=cells[1:].ravel().tolist(), extend="max", aspect=14 * depth, pad=0.01, panchor=False
            )
            bar.set_label("attention weight")
        handles = [
            entry("trained", color=BLUE, linewidth=1.3, marker="o", markersize=3),
            entry("before training", **FRESH),
            entry("even weights", **EVEN),
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=3)
    return figure


def _metric(cell: Axes, models: xr.Dataset) -> None:
    keys = models["key"].values
    sink, fresh = (models[name].transpose("seed", "key").values for name in ("sink", "fresh"))
    cell.plot(keys, models["even"].values, **EVEN)
    cell.plot(keys, np.median(fresh, 0), **FRESH)
    ranged(cell, keys, sink, BLUE, alpha=0.2, linewidth=1.3, marker="o", markersize=2.5)
    cell.set(xticks=[0, len(keys) // 2, len(keys) - 1], xlabel="key")
    grid(cell)


def draw(ds: xr.Dataset, path: Path) -> list[Path]:
    """A figure of every kind of toys without encoding, on Gaussian data, the first under `path` itself."""
    written: list[Path] = []
    chosen = [kind for kind in kinds(ds) if (kind["positional"], kind["data"]) == ("none", "gaussian")]
    for n, at in enumerate(chosen):
        residual = "-residual" if at["residual"] == "on" else ""
        base = path if n == 0 else path.with_name(f"{path.name}-{at['scale']}-{at['depth']}{residual}")
        sinks_figure(ds, at=at, path=base)
        written += files(base)
    return written
