"""The report's first picture: where each model's sense of position comes from, from the profile down to position 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..errors import InputError
from ..results.curves import estimate, smooth_between
from .draw import Row, by_fraction, ruled, saved_grid
from .jacobian import sensitivity_label
from .palette import FAINT, GREY, THEORIES
from .palette import OVERVIEW as ROWS
from .series import MEASURED, Curve, of_several, profiles_with
from .style import either, facts, mark, position_axis

Results = Mapping[str, xr.Dataset]

CALLED = {"init": "at initialization", "pretrained": "pretrained"}  # conditions
PREDICTED = "predicted"
MOST = 4  # models side by side; more are told in the small print


def overview_figure(
    sensitivity: Results, leakage: Results, swaps: Results, *, path: str | Path | None = None
) -> Figure:
    """Two rows of one column per model, at most four models.

    Above: sensitivity of the last position to every input, for fresh weights (geometric mean over seeds), as the
    second-moment kernel predicts it, and after pretraining (each position faint, moving average bold). Below: how much
    log-attention of early queries depends on where they stand: the Shapley values of the causal mask (with the constant
    part of position 0's logit) and of the residual stream, their sum, and what the residual stream does alone, before and
    after position 0 is swapped; 95 % intervals.

    Args:
        sensitivity: results of `jacobian` by the model's name.
        leakage: of `leakage`; models without one have an empty panel.
        swaps: of `bos_swap`, with one replacement or several, of which the first is drawn.
        path: where to save; see `save_figure`.

    Raises:
        InputError: no results of `jacobian`.
    """
    if not sensitivity:
        raise InputError("no results of jacobian to draw; measure them first, with headwater jacobian")
    names = list(sensitivity)[:MOST]
    shown, leaks, swapped = (
        {name: of_all[name] for name in names if name in of_all} for of_all in (sensitivity, leakage, swaps)
    )
    profiles = {name: _profile(ds) for name, ds in shown.items()}
    texts = [f"above: {', '.join(facts(shown))}", *_explained(leaks, swapped)]
    if len(sensitivity) > MOST:
        texts.append(f"the first {MOST} of {len(sensitivity)} models")
    marks = [mark(label, "o", color, filled=filled) for label, _, color, filled in ROWS]
    label = sensitivity_label(shown).replace("  ", "\n", 1)
    rows = {
        "profile": Row(label, 2.5, profiles, lambda cell, _: position_axis(cell, below=True), log=True),
        "sources": Row("absolute position in\nlog-attention (nat²)", 2.5, None, _source_axis, more=marks),
    }

    def finish(_: Figure, cells: dict[str, list[Axes]], __: dict[str, Axes]) -> None:
        for cell, name in zip(cells["sources"], shown, strict=True):
            _marks(cell, _sources(leakage.get(name), swaps.get(name)))

    each = 2.9 if len(shown) > 1 else None
    return saved_grid(shown, rows, texts, side=1.75, each=each, path=path, finish=finish)


def _profile(ds: xr.Dataset) -> list[Curve]:
    """One model's profiles; what is pretrained also as a moving average."""
    found = []
    for curve in by_fraction(profiles_with(ds, ("score_path",))):
        condition = curve.of["condition"]
        if curve.of["curve"] != MEASURED:
            if condition == "init":
                found.append(replace(curve, style=THEORIES["score_path"], label=PREDICTED, width=1.2))
            continue
        plain = replace(curve, low=None, high=None, label=CALLED.get(condition, ""), ends="o", width=1.7)
        if condition == "pretrained":
            found.append(replace(plain, label="", ends="", width=0.7, alpha=0.35))
            plain = replace(plain, y=np.where(curve.y > 0, smooth_between(curve.y), np.nan))
        found.append(plain)
    return sorted(found, key=lambda one: one.label == CALLED["pretrained"])  # the last in the legend


def _sources(leakage: xr.Dataset | None, swap: xr.Dataset | None) -> list[tuple[float, float, float] | None]:
    """Early queries' leakage by source, and its residual component before and after the swap, with intervals."""
    found: list[tuple[float, float, float] | None] = [None] * len(ROWS)
    if leakage is not None:
        early = leakage.isel(band=0)
        form = "steady" if "steady_source_of_model" in early else "log"  # older results leave the constant in
        found[0] = estimate(early, f"{form}_source_of_model", source="mask")
        found[1] = estimate(early, f"{form}_source_of_model", source="residual")
        found[2] = estimate(early, "log_form_of_model", part="total")
    if swap is not None:
        first = (swap.isel(replacement=0) if "replacement" in swap.dims else swap).isel(band=0)
        form = "residual_steady" if "residual_steady_before_of_model" in first else "residual"
        found[3], found[4] = (estimate(first, f"{form}_{when}_of_model") for when in ("before", "after"))
    return found


def _marks(cell: Axes, found: Sequence[tuple[float, float, float] | None]) -> None:
    for place, (one, (_, _, color, filled)) in enumerate(zip(found, ROWS, strict=True)):
        if one is None:
            continue
        value, low, high = one
        cell.vlines(place, low, high, color=color, linewidth=1.3)
        if place < 3:  # what adds up is drawn from zero
            cell.vlines(place, 0, value, color=color, linewidth=7, alpha=0.3)
        cell.plot(place, value, "o", color=color, markerfacecolor=color if filled else "white", markersize=5.5)
    if not any(found):
        cell.text(0.5, 0.5, "not measured", transform=cell.transAxes, ha="center", va="center", color=GREY)


def _source_axis(cell: Axes, _: xr.Dataset) -> None:
    cell.axhline(0, color=GREY, linewidth=0.8)
    cell.axvline(2.5, color=FAINT, linewidth=0.8)
    cell.set_xlim(-0.6, len(ROWS) - 0.4)
    cell.set_xticks(range(len(ROWS)), [tick for _, tick, *_ in ROWS])
    ruled(cell)


def _explained(leaks: Results, swapped: Results) -> list[str]:
    texts = []
    if leaks:
        bands = either(ds["band"].values[0] for ds in leaks.values())
        texts.append(f"below: queries {bands}, {', '.join(facts(leaks))}, Shapley values and their sum")
    if swapped:
        put = either(map(_replacement, swapped.values()))
        texts.append(f"residual alone: V(X), {', '.join(facts(swapped))}, swapped for: {put}")
    return [*texts, "95 % intervals over documents"] if texts else []


def _replacement(swap: xr.Dataset) -> str:
    several = of_several(swap)
    return str(several["replacement"].values[0]) if "replacement" in several.dims else "?"
