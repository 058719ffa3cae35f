"""How much absolute position leaks into attention patterns, and from where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ..leakage import resolved
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
    layer_axis,
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
SHARES = (-1.0, 2.0)  # of a total; of one within its noise they lie anywhere, and the axis ends here


def leakage_figure(results: xr.Dataset | Mapping[str, xr.Dataset], *, path: str | Path | None = None) -> Figure:
    """How much attention depends on where the query stands, by block, and what share of it each source has, by band.

    One column per model. From above: the log form of the earliest band by block, the four parts as bars (they add up to the
    total, and each but a variance may be negative), the total and the residual component with their intervals, sampling
    noise as grey lines; the weight
    form's Shapley values by block with intervals; both forms' shares of each source over the whole model, by query band.

    Args:
        results: results of `leakage`, by the model's name; or one of them.
        path: where to save; see `save_figure`.

    Raises:
        InputError: no results, or one of another probe.
    """
    results = results_of(results, "leakage", NEEDS)
    with matplotlib.rc_context(STYLE):
        heights = {"log": 2.0, "weight": 1.7, "log_share": 1.6, "weight_share": 1.6}
        figure, width, cells, sides = panels(list(results), heights, side=1.6, own=("weight",))
        for column, ds in enumerate(results.values()):
            _log_form(cells["log"][column], ds)
            _weight_form(cells["weight"][column], ds)
            _shares(cells["log_share"][column], ds, "log", ("mask", "residual"))  # there is no spread in the log form
            _shares(cells["weight_share"][column], ds, "weight", tuple(SOURCES))
        noise = Line2D([], [], color=GREY, linewidth=2.2, alpha=0.6, label="sampling noise")
        parts = [Patch(color=color, label=part) for part, color in PARTS.items()]
        alone = mark("residual component", "D", ORANGE)
        side_legend(sides["log"], [mark("total", "o", BLACK), alone, *parts, noise], "log form")
        sources = [Patch(color=color, label=name) for name, color in SOURCES.items()]
        side_legend(sides["weight"], sources, "weight form")
        marks = [mark(name, "o", color) for name, color in SOURCES.items()]
        side_legend(sides["log_share"], marks[:2], "shares, log form")
        side_legend(sides["weight_share"], marks, "shares, weight form")
        cells["log"][0].set_ylabel("leakage (nat²)")
        cells["weight"][0].set_ylabel("leakage (weight²)")
        cells["log_share"][0].set_ylabel("share of total")
        cells["weight_share"][0].set_ylabel("share of total")
        small_print(figure, [*facts(results), *_explained()], width)
        if path is not None:
            save_figure(figure, path, dpi=int(figure.dpi), largest=LARGEST)
    return figure


def _bars(
    cell: Axes, layers: np.ndarray, values: xr.DataArray, names: Mapping[str, str], dim: str
) -> dict[str, np.ndarray]:
    """One bar per name and block, side by side; where each name's stand."""
    each = 0.8 / len(names)
    places = {name: layers + (n - (len(names) - 1) / 2) * each for n, name in enumerate(names)}
    for name, color in names.items():
        cell.bar(places[name], values.sel({dim: name}).values, width=each * 0.92, color=color, linewidth=0)
    return places


def _interval(ds: xr.Dataset, name: str, **at: str) -> tuple[np.ndarray, np.ndarray] | None:
    if f"{name}_low" not in ds:
        return None
    low, high = (ds[f"{name}_{end}"].sel(at).values for end in ("low", "high"))
    return low, high


def _log_form(cell: Axes, ds: xr.Dataset) -> None:
    ds = ds.isel(band=0)
    layers = ds["layer"].values
    _bars(cell, layers, ds["log_form_by_block"], PARTS, "part")
    noise = ds["log_noise"].mean("head").values
    alone = ds["log_stream_by_block"].values
    cell.hlines(noise, layers - 0.42, layers + 0.42, color=GREY, linewidth=2.2, alpha=0.6)
    total = ds["log_form_by_block"].sel(part="total").values
    points(cell, layers, total, _interval(ds, "log_form_by_block", part="total"), color=BLACK)
    points(cell, layers + 0.12, alone, _interval(ds, "log_stream_by_block"), color=ORANGE, marker="D")
    cell.axhline(0, color=BLACK, linewidth=0.7)
    layer_axis(cell, layers, f"block, queries {ds['band'].values}")


def _weight_form(cell: Axes, ds: xr.Dataset) -> None:
    ds = ds.isel(band=0)
    layers = ds["layer"].values
    places = _bars(cell, layers, ds["weight_source_by_block"], SOURCES, "source")
    for source, x in places.items():
        interval = _interval(ds, "weight_source_by_block", source=source)
        if interval is not None:
            cell.vlines(x, *interval, color=BLACK, linewidth=0.8)
    cell.axhline(0, color=BLACK, linewidth=0.7)
    layer_axis(cell, layers, f"block, queries {ds['band'].values}")


def _shares(cell: Axes, ds: xr.Dataset, form: str, sources: Sequence[str]) -> None:
    bands = np.arange(ds.sizes["band"], dtype=float)
    name = f"{form}_share_of_model"
    shown = np.array([resolved(ds, form, str(band)) for band in ds["band"].values])
    for n, source in enumerate(sources):
        x = bands + 0.2 * (n - (len(sources) - 1) / 2)
        values, interval = ds[name].sel(source=source).values, _interval(ds, name, source=source)
        points(cell, x, np.where(shown, values, np.nan), interval, color=SOURCES[source], limits=SHARES)
    for band in bands[~shown | np.isnan(ds[name].values).all(0)]:
        cell.text(band, 0.06, "no total", ha="center", va="bottom", fontsize=6.5, color=GREY)
    for share in (0, 1):
        cell.axhline(share, color=BLACK if share == 0 else GREY, linewidth=0.7, zorder=1)
    band_axis(cell, ds["band"].values)


def _explained() -> list[str]:
    return [
        "bars: means over heads",
        "those of the log form add up to the total",
        "intervals: 95 %, bootstrap over prompts",
        "sampling noise: what an uncorrected variance would add",
        f"shares of the whole model; arrowheads: beyond {SHARES[0]:g} or {SHARES[1]:g}; pale: the interval says nothing; "
        "no total: its interval is not above 0, or the null check fails",
    ]
