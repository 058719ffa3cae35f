"""How much absolute position leaks into attention patterns, and from where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..measures.leakage import overflow, within_bound
from .draw import Row, along_blocks, band_axis, layer_axis, outliers, saved_grid, zero_line
from .palette import BLACK, GREY, PARTS, Style
from .series import (
    STREAM_LEFT_IN,
    TOTAL,
    Curve,
    having,
    log_form_curves,
    null_curves,
    share_curves,
    weight_form_curves,
)
from .style import facts, mark, results_of

NEEDS = {
    "log_form_by_block": ("part", "layer", "band"),
    "log_form_of_model": ("part", "band"),
    "weight_form_of_model": ("cell", "band"),
    "log_noise_by_block": ("layer", "band"),
    "log_stream_by_block": ("layer", "band"),
    "weight_source_by_block": ("source", "layer", "band"),
    "weight_share_of_model": ("source", "band"),
    "log_share_of_model": ("source", "band"),
}
FOLLOWED = {"parts": "log_form_by_block", "weight form": "weight_source_by_block"}  # by axes that follow most blocks
SHARES = (-1.0, 2.0)  # of a total; of one within its noise they lie anywhere, and the axis ends here
NOISE = Style("sampling noise", GREY)


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
    results = {name: within_bound(ds) for name, ds in results_of(results, "leakage", NEEDS).items()}
    left_in = [mark(STREAM_LEFT_IN, "o", BLACK, filled=False)]
    left_in *= any("steady_stream_by_block" in ds for ds in results.values())
    part_axis, weight_axis = (partial(_block_axis, follows=name) for name in FOLLOWED.values())
    beyond = [f"{name}: {said}" for name, ds in results.items() if (said := _beyond(ds, FOLLOWED))]

    def shares(title: str, *forms: str, more: Sequence[Any] = ()) -> Row:
        curves, axis = partial(_shares, forms=forms), partial(_share_axis, forms=forms)
        return Row("share of total", 1.5, curves, axis, title, limits=SHARES, more=more)

    rows = {
        "log": Row("leakage (nat²)", 2.7, _log_form, _block_axis, "log form", own=True),
        "parts": Row("parts (nat²)", 1.7, _parts, part_axis, "parts of the total", own=True),
        "weight": Row("leakage (weight²)", 1.7, _weight_form, weight_axis, "weight form", own=True),
        "log_share": shares("shares, log form", "steady", "log", more=left_in),
        "weight_share": shares("shares, weight form", "weight"),
    }
    return saved_grid(results, rows, [*facts(results), *beyond, *_explained()], side=1.9, path=path)


def _log_form(ds: xr.Dataset) -> list[Curve]:
    early = ds.isel(band=0)
    curves, noise = log_form_curves(early), early["log_noise_by_block"].values
    look: dict[str, Any] = {"kind": "steps", "label": NOISE.label, "width": 2.2, "alpha": 0.6}
    shown = [curve for part in (TOTAL, "steady", "log") for curve in having(curves, part=part)]
    return [Curve(early["layer"].values, noise, NOISE, **look), *along_blocks(shown), *null_curves(early)]


def _parts(ds: xr.Dataset) -> list[Curve]:
    curves = log_form_curves(ds.isel(band=0))
    return [replace(curve, kind="bars") for part in PARTS for curve in having(curves, part=part)]


def _weight_form(ds: xr.Dataset) -> list[Curve]:
    return along_blocks(weight_form_curves(ds.isel(band=0)))


def _shares(ds: xr.Dataset, forms: Sequence[str]) -> list[Curve]:
    """Of each source, beside each other; a second form, with the constant sink left in, is hollow."""
    forms = [form for form in forms if f"{form}_share_of_model" in ds]
    curves = [
        replace(curve, filled=form == forms[0], label=curve.label * (form == forms[0]))
        for form in forms
        for curve in share_curves(ds, form)
    ]
    curves.sort(key=lambda curve: curve.of["source"])
    shifts = 0.2 * (np.arange(len(curves)) - (len(curves) - 1) / 2)
    return [replace(curve, x=curve.x + shift) for shift, curve in zip(shifts, curves, strict=True)]


def _block_axis(cell: Axes, ds: xr.Dataset, follows: str | None = None) -> None:
    """Blocks; the vertical axis follows most of the blocks of the variable named."""
    zero_line(cell)
    layer_axis(cell, ds["layer"].values, f"block, queries {ds['band'].values[0]}")
    if follows is not None and (limit := outliers(_stacked(ds, follows))[0]):
        cell.set_ylim(-limit, limit)


def _stacked(ds: xr.Dataset, name: str) -> xr.DataArray:
    """[part, layer], or of sources, which are lines, how far each reaches with its interval, [source, layer]."""
    early = ds.isel(band=0)
    if "part" in early[name].dims:
        return early[name].sel(part=list(PARTS))
    low, high = (abs(early.get(f"{name}_{end}", early[name])) for end in ("low", "high"))
    return low.where(low > high, high)


def _beyond(ds: xr.Dataset, follows: Mapping[str, str]) -> str:
    """What is not to be seen of a result, and why."""
    said = [
        f"beyond the axis of {what}: {told}"
        for what, name in follows.items()
        if (told := outliers(_stacked(ds, name))[1])
    ]
    none = ", ".join(map(str, ds["layer"].values[overflow(ds).isel(band=0)]))
    said += [f"no weight form in block {none}: variances above 1/4, which no weight can have"] * bool(none)
    return ", ".join(said)


def _share_axis(cell: Axes, ds: xr.Dataset, forms: Sequence[str]) -> None:
    """Bands, and where there is no total to have a share of."""
    curves = next(curves for form in forms if (curves := share_curves(ds, form)))
    for band in np.flatnonzero(np.isnan([curve.y for curve in curves]).all(0)).tolist():
        cell.text(band, 0.06, "no total", ha="center", va="bottom", fontsize=6.5, color=GREY)
    band_axis(cell, ds["band"].values)
    cell.axhline(1, color=GREY, linewidth=0.7, zorder=1)


def _explained() -> list[str]:
    return [
        "by block: means over heads",
        "intervals and bands: 95 %, bootstrap over documents",
        "parts: stacked from 0 upwards and downwards, their sum is the total; every model has its own scale",
        "sampling noise: what an uncorrected variance would add",
        "constant sink: position 0's logit as far as it is the same for all queries; with the mask, left in with the "
        "residual stream; parts have it left in",
        "nulls: of the whole model; shuffled labels: 97.5 % quantile",
        f"shares of the whole model; arrowheads: beyond {SHARES[0]:g} or {SHARES[1]:g}; pale: the interval says nothing; "
        "no total: its interval is not above 0, or the null check fails",
    ]
