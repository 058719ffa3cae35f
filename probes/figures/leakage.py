"""How much absolute position leaks into attention patterns, and from where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ..measures.leakage import resolved
from .blocks import MANY, Series, along_blocks, block_entry, in_view, layer_axis
from .style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    LARGEST,
    ORANGE,
    PURPLE,
    SKY,
    STYLE,
    VERMILLION,
    band_axis,
    facts,
    mark,
    panels,
    points,
    results_of,
    save_figure,
    side_legend,
    small_print,
)

NEEDS = {
    "log_form_by_block": ("part", "layer", "band"),
    "log_form_of_model": ("part", "band"),
    "weight_form_of_model": ("cell", "band"),
    "log_noise": ("layer", "head", "band"),
    "log_stream_by_block": ("layer", "band"),
    "weight_source_by_block": ("source", "layer", "band"),
    "weight_share_of_model": ("source", "band"),
    "log_share_of_model": ("source", "band"),
}
PARTS = {"logits": SKY, "mask": BLUE, "denominator": VERMILLION, "covariance": PURPLE}
SOURCES = {"mask": BLUE, "residual": VERMILLION, "spread": GREEN}
# Nulls of the total, with their lines; the two that lie upon each other at most births can both be seen.
NULLS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "null_fresh": ("total of fresh weights", GREEN, {"linewidth": 3.5, "alpha": 0.35}),
    "null_uniform": ("of uniform attention", BLUE, {"linewidth": 1.1, "linestyle": ":"}),
    "null_shuffled": ("of shuffled labels", PURPLE, {"linewidth": 1.1, "linestyle": "--"}),
}
LEFT_IN = "constant sink left in"
SHARES = (-1.0, 2.0)  # of a total; of one within its noise they lie anywhere, and the axis ends here


def leakage_figure(results: xr.Dataset | Mapping[str, xr.Dataset], *, path: str | Path | None = None) -> Figure:
    """How much attention depends on where the query stands, by block, and what share of it each source has, by band.

    One column per model. From above: the log form of the earliest band by block, total and residual component with their
    intervals, sampling noise in grey, nulls of the total as lines; its four parts, stacked upwards and, where they are
    negative, downwards, so that they add up to the total; the weight form's Shapley values by block with intervals; both
    forms' shares of each source over the whole model, by query band. Position 0's constant logit counts with the mask;
    hollow marks leave it in the residual stream, as parts do. Of older results, which do not tell it apart, it is left in.
    Models of many blocks have lines in bands instead of marks with intervals.

    Args:
        results: results of `leakage`, by the model's name; or one of them.
        path: where to save; see `save_figure`.

    Raises:
        InputError: no results, or one of another probe.
    """
    results = results_of(results, "leakage", NEEDS)
    with matplotlib.rc_context(STYLE):
        heights = {"log": 2.3, "parts": 1.5, "weight": 1.7, "log_share": 1.5, "weight_share": 1.5}
        figure, width, cells, sides = panels(list(results), heights, side=1.6, own=("weight",))
        for column, ds in enumerate(results.values()):
            early = ds.isel(band=0)
            _log_form(cells["log"][column], early)
            _parts(cells["parts"][column], early)
            _weight_form(cells["weight"][column], early)
            in_view([cells["weight"][column]], [early["weight_source_by_block"]])
            _shares(cells["log_share"][column], ds, "log", ("mask", "residual"))  # there is no spread in the log form
            _shares(cells["weight_share"][column], ds, "weight", tuple(SOURCES))
        stacked = [ds.isel(band=0)["log_form_by_block"].sel(part=list(PARTS)) for ds in results.values()]
        in_view(cells["parts"], stacked)
        noise = Line2D([], [], color=GREY, linewidth=2.2, alpha=0.6, label="sampling noise")
        total = block_entry("total", BLACK, results)
        alone = [block_entry("residual component", ORANGE, results, "D")]
        sources_left_in = []
        if any("steady_stream_by_block" in ds for ds in results.values()):
            alone.append(block_entry(LEFT_IN, ORANGE, results, "D", filled=False))
            sources_left_in.append(mark(LEFT_IN, "o", BLACK, filled=False))
        there = [null for null in NULLS if any(null in ds for ds in results.values())]
        nulls = [Line2D([], [], label=NULLS[null][0], color=NULLS[null][1], **NULLS[null][2]) for null in there]
        side_legend(sides["log"], [total, *alone, noise, *nulls], "log form")
        side_legend(
            sides["parts"], [Patch(color=color, label=part) for part, color in PARTS.items()], "parts of the total"
        )
        sources = [block_entry(name, color, results) for name, color in SOURCES.items()]
        side_legend(sides["weight"], sources, "weight form")
        marks = [mark(name, "o", color) for name, color in SOURCES.items()]
        side_legend(sides["log_share"], [*marks[:2], *sources_left_in], "shares, log form")
        side_legend(sides["weight_share"], marks, "shares, weight form")
        cells["log"][0].set_ylabel("leakage (nat²)")
        cells["parts"][0].set_ylabel("parts (nat²)")
        cells["weight"][0].set_ylabel("leakage (weight²)")
        cells["log_share"][0].set_ylabel("share of total")
        cells["weight_share"][0].set_ylabel("share of total")
        small_print(figure, [*facts(results), *_explained()], width)
        if path is not None:
            save_figure(figure, path, dpi=int(figure.dpi), largest=LARGEST)
    return figure


def _interval(ds: xr.Dataset, name: str, **at: str) -> tuple[np.ndarray, np.ndarray] | None:
    if f"{name}_low" not in ds:
        return None
    low, high = (ds[f"{name}_{end}"].sel(at).values for end in ("low", "high"))
    return low, high


def _log_form(cell: Axes, early: xr.Dataset) -> None:
    layers, name = early["layer"].values, "log_form_by_block"
    noise = early["log_noise"].mean("head").values
    cell.hlines(noise, layers - 0.42, layers + 0.42, color=GREY, linewidth=2.2, alpha=0.6)
    total = Series(early[name].sel(part="total").values, _interval(early, name, part="total"), BLACK)
    alone = [
        Series(early[stream].values, _interval(early, stream), ORANGE, "D", filled)
        for stream, filled in _variants(early, "log", "{}_stream_by_block")
    ]
    for null, (_, color, look) in NULLS.items():
        if null in early:
            cell.axhline(float(early[null]), color=color, zorder=1, **look)
    along_blocks(cell, layers, [total, *alone])
    _block_axis(cell, early)


def _variants(ds: xr.Dataset, form: str, name: str) -> list[tuple[str, bool]]:
    """Variables to draw, and whether their marks are filled: of the log form without and with the constant sink."""
    steady, own = name.format("steady"), name.format(form)
    return [(steady, True), (own, False)] if form == "log" and steady in ds else [(own, True)]


def _parts(cell: Axes, early: xr.Dataset) -> None:
    layers = early["layer"].values
    above, below = np.zeros(len(layers)), np.zeros(len(layers))
    for part, color in PARTS.items():
        values = early["log_form_by_block"].sel(part=part).values
        bottom = np.where(values < 0, below, above)
        # Of many blocks no gap, which would be all there is to see of them.
        cell.bar(
            layers, values, 0.8 if len(layers) <= MANY else 1.0, bottom, color=color, linewidth=0, antialiased=False
        )
        above, below = above + np.maximum(values, 0), below + np.minimum(values, 0)
    _block_axis(cell, early)


def _weight_form(cell: Axes, early: xr.Dataset) -> None:
    name = "weight_source_by_block"
    rows = [
        Series(early[name].sel(source=source).values, _interval(early, name, source=source), color)
        for source, color in SOURCES.items()
    ]
    along_blocks(cell, early["layer"].values, rows)
    _block_axis(cell, early)


def _block_axis(cell: Axes, early: xr.Dataset) -> None:
    cell.axhline(0, color=BLACK, linewidth=0.7)
    layer_axis(cell, early["layer"].values, f"block, queries {early['band'].values}")


def _shares(cell: Axes, ds: xr.Dataset, form: str, sources: Sequence[str]) -> None:
    bands = np.arange(ds.sizes["band"], dtype=float)
    variants = _variants(ds, form, "{}_share_of_model")
    shown = np.array([resolved(ds, form, str(band)) for band in ds["band"].values])
    drawn = [(source, *variant) for source in sources for variant in variants]
    for n, (source, name, filled) in enumerate(drawn):
        x = bands + 0.2 * (n - (len(drawn) - 1) / 2)
        values, interval = ds[name].sel(source=source).values, _interval(ds, name, source=source)
        look: Any = {"color": SOURCES[source], "filled": filled, "limits": SHARES}
        points(cell, x, np.where(shown, values, np.nan), interval, **look)
    for band in bands[~shown | np.isnan(ds[variants[0][0]].values).all(0)]:
        cell.text(band, 0.06, "no total", ha="center", va="bottom", fontsize=6.5, color=GREY)
    for share in (0, 1):
        cell.axhline(share, color=BLACK if share == 0 else GREY, linewidth=0.7, zorder=1)
    band_axis(cell, ds["band"].values)


def _explained() -> list[str]:
    return [
        "by block: means over heads",
        "intervals and bands: 95 %, bootstrap over documents",
        "parts: stacked from 0 upwards and downwards, their sum is the total",
        "sampling noise: what an uncorrected variance would add",
        "constant sink: position 0's logit as far as it is the same for all queries; with the mask, left in with the "
        "residual stream; parts have it left in",
        "nulls: of the whole model; shuffled labels: 97.5 % quantile",
        f"shares of the whole model; arrowheads: beyond {SHARES[0]:g} or {SHARES[1]:g}; pale: the interval says nothing; "
        "no total: its interval is not above 0, or the null check fails",
    ]
