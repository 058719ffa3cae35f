"""The figures of position-bias: gaps of three pairs of items by encoding, depth, mask and training data; sinks by mask."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from probes.charts import BLUE, CYCLE, DASHED, DOTTED, GREY, ORANGE, SKY, Series, curves, dots, sheet
from probes.measures.sinks import TAU

from ..reading import courses, known, learnt, places, ranged
from .statements import PAIRS, STREAMS, even_of, sink, size_of

COLORS = dict(zip(PAIRS, (BLUE, ORANGE, SKY), strict=True))
ENCODINGS = {"none": "no encoding", "decay": "decay mask", "rope": "RoPE", "sinusoidal": "sinusoidal"}
PALE = 0.4
ROW, PANEL = 0.3, 3.6  # inches of a kind of models, and of a panel
GAPS = (
    "Accuracy where the earlier of two identical items is right, less that where the later is: above 0 the earlier decides; "
    "medians and ranges of seeds. Pale: has not learnt to retrieve. Models {}."
)
SINKS = (
    "{}, medians of {} seeds and their range: share of the queries that see a key which give it more than {:g}. Dotted: "
    "even weights."
)


def charts(ds: xr.Dataset) -> dict[str, Figure]:
    """Gaps after unbiased training under a causal mask, under other masks, and after biased training; sinks by mask.

    Of Gaussian data at the first scale, if there are any, and of the residual switch that more models have.
    """
    first, done = (of["gap"].isel(scale=0, data=0) for of in (ds, learnt(ds, ds["novel_accuracy"])))
    many = first.notnull().sum([dim for dim in first.dims if dim != "residual"])
    residual = str(ds["residual"].values[int(many.values.argmax())])
    dims, panels = ("training", "mask", "positional", "depth"), defaultdict(list)
    for of, here in places(first.sel(residual=residual), *dims):
        if here.notnull().any():
            kind = dict(zip(dims, of, strict=True))
            answers = f"answers {'anywhere' if kind['training'] == 'unbiased' else 'at certain items'}, causal mask"
            panels[answers if kind["mask"] == "causal" else "other masks"].append(kind)
    size = {"height": 0.7 + ROW * max(map(len, panels.values())), "width": PANEL * len(panels)}
    figure, (cells,) = sheet(1, len(panels), caption=GAPS.format(STREAMS[residual]), **size)
    for cell, (title, kinds) in zip(cells, panels.items(), strict=True):
        for pale, part in ((False, done), (True, first)):
            series = []
            for pair, color in COLORS.items():
                name = pair.replace("-", " against ") if cell is cells[-1] and not pale else ""
                runs = np.array([part.sel({"residual": residual, "pair": pair} | kind).values for kind in kinds])
                series.append(ranged(name, runs.T, color, alpha=PALE if pale else 1.0))
            dots(cell, [_kind(kind) for kind in kinds], series, limits=(-1.0, 1.0))
        cell.set_title(title, fontsize=9)
    sinks = known(_sinks, ds.sel(residual=residual))
    return {"": figure} | ({"-sinks": sinks} if sinks else {})


def _kind(kind: Mapping[str, Any]) -> str:
    """A kind of models in words."""
    mask = "" if kind["mask"] == "causal" else f"{kind['mask'].replace('-', ' of ')} mask"
    answers = "" if kind["training"] == "unbiased" else f"answers {kind['training'].replace('-and-', ' or ')}"
    return ", ".join(filter(None, (mask, ENCODINGS[kind["positional"]], answers, f"{kind['depth']} blocks")))


def _sinks(ds: xr.Dataset) -> Figure | None:
    """The metric along keys under the causal mask before and after training, under windows, under prefixes.

    Of the toys without encoding on Gaussian data, of the first scale and depth.
    """
    of = ds.isel(scale=0, depth=0).sel(training="unbiased", data="gaussian", positional="none")
    of = of.sel(mask=of["mask"] != "full").dropna("mask", how="all", subset=["fresh"])
    groups: dict[str, dict[str, str]] = {}
    for mask in sorted(map(str, of["mask"].values), key=lambda mask: (mask != "causal", mask[0] == "p", size_of(mask))):
        groups.setdefault(mask.partition("-")[0], {})[mask] = mask.replace("-", " ")
    if not groups:
        return None
    name = f"{STREAMS[str(of['residual'].values)].capitalize()}, {of['depth'].values} blocks"
    seeds = int(of["fresh"].notnull().any(("mask", "key")).sum())
    figure, cells = sheet(-(-len(groups) // 2), 2, caption=SINKS.format(name, seeds, TAU))
    for cell, names in zip(cells.flat, groups.values(), strict=False):
        courses(cell, sink(of), "key", "mask", names)
        for mask, color in zip(names, CYCLE, strict=False):
            curves(cell, [Series("", even_of(of, [mask])[0], color, line=DOTTED, width=0.9)])
        if "causal" in names:
            before = of["fresh"].sel(mask="causal").dropna("seed").transpose("seed", "key")
            curves(cell, [ranged("before training", before, GREY, line=DASHED)])
        cell.set(xlabel="key", ylabel="sink metric", xticks=range(0, of.sizes["key"], 4))
    for cell in cells.flat[len(groups) :]:
        cell.set_visible(False)
    return figure
