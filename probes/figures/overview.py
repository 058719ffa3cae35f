"""The report's first picture: where each model's sense of position comes from, from the profile down to position 0."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..errors import InputError
from ..results.curves import band, estimate, smooth_between
from ..results.profiles import mean_profiles
from .jacobian import sensitivity_label, theories_in
from .style import (
    BLACK,
    BLUE,
    FAINT,
    GREY,
    LARGEST,
    ORANGE,
    STYLE,
    THEORIES,
    VERMILLION,
    coinciding,
    condition_style,
    facts,
    handle,
    log_axis,
    mark,
    of_coinciding,
    panels,
    position_axis,
    save_figure,
    side_legend,
    small_print,
)

Results = Mapping[str, xr.Dataset]

CALLED = {"init": "at initialization", "pretrained": "pretrained"}  # conditions
PREDICTED = "predicted"
MOST = 4  # models side by side; more are told in the small print
# What stands along the lower row's axis: label, colour, filled, and whose number it is.
ROWS = (
    ("mask, constant sink", BLUE, True),
    ("residual stream", VERMILLION, True),
    ("together", BLACK, True),
    ("residual alone", ORANGE, True),
    ("... position 0 swapped", ORANGE, False),
)


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
    with matplotlib.rc_context(STYLE):
        figure, width, cells, sides = panels(names, {"profile": 2.3, "sources": 1.9}, side=1.75)
        kernel = False
        for column, name in enumerate(names):
            kernel |= _profile(cells["profile"][column], sensitivity[name])
            _sources(cells["sources"][column], leakage.get(name), swaps.get(name))
        log_axis(cells["profile"][0])
        cells["profile"][0].set_ylabel(sensitivity_label(_only(sensitivity, names)))
        cells["sources"][0].set_ylabel("absolute position in\nlog-attention (nat²)")
        lines = [handle(condition_style(condition), text) for condition, text in CALLED.items()]
        if kernel:
            lines.insert(1, handle(THEORIES["score_path"], PREDICTED))
        signs = coinciding(cells["profile"], lines)
        side_legend(sides["profile"], lines)
        side_legend(sides["sources"], [_entry(*row) for row in ROWS])
        texts = [f"above: {', '.join(facts(_only(sensitivity, names)))}", *of_coinciding(signs)]
        texts += _explained(leakage, swaps, names)
        if len(sensitivity) > MOST:
            texts.append(f"the first {MOST} of {len(sensitivity)} models")
        small_print(figure, texts, width)
        if path is not None:
            save_figure(figure, path, dpi=int(figure.dpi), largest=LARGEST)
    return figure


def _entry(label: str, color: str, filled: bool) -> Line2D:
    return mark(label, "o", color, filled=filled)


def _profile(cell: Axes, ds: xr.Dataset) -> bool:
    """One model's profiles; whether a prediction is among them."""
    predicted = False
    for condition, runs in mean_profiles(ds).items():
        style = condition_style(condition)
        curve = band([run.mean for run in runs]).centre
        x = np.linspace(0, 1, len(curve))
        shown = np.where(curve > 0, curve, np.nan)
        if condition == "pretrained":
            cell.plot(x, shown, color=style.color, linewidth=0.7, alpha=0.35)
            shown = np.where(curve > 0, smooth_between(curve), np.nan)
        name = CALLED.get(condition, "_")
        cell.plot(x, shown, color=style.color, linestyle=style.line, linewidth=1.7, zorder=style.order, label=name)
        cell.plot(x[[0, -1]], shown[[0, -1]], "o", color=style.color, markersize=3.8, zorder=style.order)
        if condition == "init" and theories_in(ds, ("score_path",)):
            theory = THEORIES["score_path"]
            told = band([run.mean for run in mean_profiles(ds, "theory_score_path")[condition]]).centre
            told = np.where(told > 0, told, np.nan)
            given = {"color": theory.color, "linestyle": theory.line, "zorder": theory.order, "label": PREDICTED}
            cell.plot(x, told, linewidth=1.2, **given)
            predicted = True
    position_axis(cell, below=True)
    return predicted


def _sources(cell: Axes, leakage: xr.Dataset | None, swap: xr.Dataset | None) -> None:
    """Early queries' leakage by source, and its residual component before and after the swap."""
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
    cell.axhline(0, color=GREY, linewidth=0.8)
    for place, (one, (_, color, filled)) in enumerate(zip(found, ROWS, strict=True)):
        if one is None:
            continue
        value, low, high = one
        cell.vlines(place, low, high, color=color, linewidth=1.3)
        if place < 3:  # what adds up is drawn from zero
            cell.vlines(place, 0, value, color=color, linewidth=7, alpha=0.3)
        cell.plot(place, value, "o", color=color, markerfacecolor=color if filled else "white", markersize=5.5)
    cell.axvline(2.5, color=FAINT, linewidth=0.8)
    cell.set_xlim(-0.6, len(ROWS) - 0.4)
    cell.set_xticks([])
    cell.grid(axis="y", color=FAINT, linewidth=0.6)
    cell.set_axisbelow(True)
    if all(one is None for one in found):
        cell.text(0.5, 0.5, "not measured", transform=cell.transAxes, ha="center", va="center", color=GREY)


def _only(results: Results, names: list[str]) -> dict[str, xr.Dataset]:
    return {name: results[name] for name in names if name in results}


def _explained(leakage: Results, swaps: Results, names: list[str]) -> list[str]:
    texts = []
    leaks, swapped = _only(leakage, names), _only(swaps, names)
    if leaks:
        bands = dict.fromkeys(str(ds["band"].values[0]) for ds in leaks.values())
        texts.append(f"below: queries {' / '.join(bands)}, {', '.join(facts(leaks))}, Shapley values and their sum")
    if swapped:
        put = dict.fromkeys(map(_replacement, swapped.values()))
        texts.append(f"residual alone: V(X), {', '.join(facts(swapped))}, swapped for: {' / '.join(put)}")
    return [*texts, "95 % intervals over documents"] if texts else []


def _replacement(swap: xr.Dataset) -> str:
    return str(swap["replacement"].values[0] if "replacement" in swap.dims else swap.attrs.get("replacement", "?"))
