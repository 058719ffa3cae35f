"""The figures of position-bias: gaps of three pairs of items by encoding, depth, mask and training data; sinks by mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from probes.charts import BLUE, CYCLE, DASHED, DOTTED, GREY, ORANGE, SKY, Series, curves, dots, pictures, sheet

from ..reading import courses, known, learnt, places, ranged, setting
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
    "even weights. Patterns: the last block, one sequence."
)


def charts(ds: xr.Dataset) -> dict[str, Figure]:
    """Gaps after unbiased training under a causal mask, under other masks, and after biased training; sinks by mask.

    Of Gaussian data at the first scale, if there are any, and of the residual switch that more models have.
    """
    first = ds["gap"].isel(scale=0, data=0)
    many = first.notnull().sum([dim for dim in first.dims if dim != "residual"])
    residual = str(ds["residual"].values[int(many.values.argmax())])
    gap, done = first.sel(residual=residual), learnt(ds, ds["novel_accuracy"])["gap"].isel(scale=0, data=0)
    dims = ("training", "mask", "positional", "depth")
    kinds: list[Any] = [dict(zip(dims, of, strict=True)) for of, here in places(gap, *dims) if here.notnull().any()]
    causal = [kind["mask"] == "causal" for kind in kinds]
    free = [kind["training"] == "unbiased" for kind in kinds]
    shown = {
        "answers anywhere, causal mask": [k for k, c, f in zip(kinds, causal, free, strict=True) if c and f],
        "other masks": [k for k, c in zip(kinds, causal, strict=True) if not c],
        "answers at certain items, causal mask": [
            k for k, c, f in zip(kinds, causal, free, strict=True) if c and not f
        ],
    }
    shown = {title: of_panel for title, of_panel in shown.items() if of_panel}
    size = {"height": 0.7 + ROW * max(map(len, shown.values())), "width": PANEL * len(shown)}
    figure, (cells,) = sheet(1, len(shown), caption=GAPS.format(STREAMS[residual]), **size)
    for cell, (title, of_panel) in zip(cells, shown.items(), strict=True):
        for pale, part in ((False, done.sel(residual=residual)), (True, gap)):
            series = []
            for pair, color in COLORS.items():
                runs = np.ma.masked_invalid([part.sel(kind | {"pair": pair}).values for kind in of_panel])
                ends = (np.ma.median(runs, 1), runs.min(1), runs.max(1))
                value, low, high = (np.ma.filled(end.astype(float), np.nan) for end in ends)
                name = pair.replace("-", " against ") if cell is cells[-1] and not pale else ""
                series.append(Series(name, value, color, low, high, alpha=PALE if pale else 1.0))
            dots(cell, [_kind(kind) for kind in of_panel], series, limits=(-1.0, 1.0))
        cell.set_title(title, fontsize=9)
    return {"": figure} | {f"-sinks{end}": of for end, of in _sink_figures(ds).items()}


def _kind(kind: Mapping[str, Any]) -> str:
    """A kind of models in words."""
    mask = "" if kind["mask"] == "causal" else f"{kind['mask'].replace('-', ' of ')} mask"
    answers = "" if kind["training"] == "unbiased" else f"answers {kind['training'].replace('-and-', ' or ')}"
    return ", ".join(filter(None, (mask, ENCODINGS[kind["positional"]], answers, f"{kind['depth']} blocks")))


def _sink_figures(ds: xr.Dataset) -> dict[str, Figure]:
    """The metric along keys by mask, of every kind of toys without encoding on Gaussian data; the first has no suffix."""
    if "over_tau" not in ds or known(lambda: ds.sel(training="unbiased", data="gaussian", positional="none")) is None:
        return {}
    figures: dict[str, Figure] = {}
    here = ds.sel(training="unbiased", data="gaussian", positional="none").sel(mask=ds["mask"] != "full")
    for (scale, depth, residual), of in places(here, "scale", "depth", "residual"):
        of = of.dropna("mask", how="all", subset=["fresh"])
        if of.sizes["mask"]:
            end = f"-{scale}-{depth}{'-residual' * (residual == 'on')}"
            figures[end * bool(figures)] = _sinks(of, f"{STREAMS[residual].capitalize()}, {depth} blocks")
    return figures


def _sinks(ds: xr.Dataset, name: str) -> Figure:
    """The metric along keys under the causal mask before and after training, under windows, under prefixes; patterns."""
    groups: dict[str, dict[str, str]] = {}
    for mask in sorted(map(str, ds["mask"].values), key=lambda mask: (mask != "causal", mask[0] == "p", size_of(mask))):
        groups.setdefault(mask.partition("-")[0], {})[mask] = mask.replace("-", " ")
    seeds = int(ds["fresh"].notnull().any(("mask", "key")).sum())
    rows = -(-(len(groups) + 1) // 2)
    figure, cells = sheet(rows, 2, caption=SINKS.format(name, seeds, setting(ds, "tau")))
    for cell, names in zip(cells.flat, groups.values(), strict=False):
        courses(cell, sink(ds), "key", "mask", names)
        for mask, color in zip(names, CYCLE, strict=False):
            curves(cell, [Series("", even_of(ds, [mask])[0], color, line=DOTTED, width=0.9)])
        if "causal" in names:
            before = ds["fresh"].sel(mask="causal").dropna("seed").transpose("seed", "key")
            curves(cell, [ranged("before training", before, GREY, line=DASHED)])
        cell.set(xlabel="key", ylabel="sink metric", xticks=range(0, ds.sizes["key"], 4))
    few = [next(iter(names)) for names in groups.values()]
    layers = ds["pattern"].isel(seed=0).dropna("layer", how="all")
    if layers.sizes["layer"]:
        patterns = [layers.isel(layer=-1).sel(mask=mask).transpose("query", "key").values for mask in few]
        pictures(cells.flat[len(groups)], patterns, [mask.replace("-", " ") for mask in few])
    for cell in cells.flat[len(groups) + bool(layers.sizes["layer"]) :]:
        cell.set_visible(False)
    return figure
