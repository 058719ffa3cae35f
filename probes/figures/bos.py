"""What another embedding at position 0 takes away: leakage, sinks, loss, sensitivity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from .draw import MANY, Row, along_blocks, band_axis, by_fraction, layer_axis, saved_grid, zero_line
from .interventions import interventions_figure
from .palette import BLACK, GREY, PUBLISHED_STYLE, Style, replacement_colors, replacement_label
from .series import STREAM_LEFT_IN, Curve, having, loss_curves, of_several, swap_bands, swapped_profiles
from .style import by_name, either, facts, mark, numeral, option, position_axis, results_of, spread, thinned

EARLY = 32  # queries before it are early, to [Ruscio]
MOST, EXACT = 40, 8  # places along the loss: a single position of few prompts is noise
PUBLISHED = 0.4  # [Ruscio], of the residual component at early queries
REMOVED = (-1.0, 1.0)  # where the axis ends: at all of it, and at twice as much as before
SMALL = 0.1  # nats; the axis of the loss is linear below: first positions lose a hundred times what later ones do
HIGHEST = 3.0  # times the largest sensitivity before: a norm of a zero vector is as steep as its epsilon allows
MOST_MARKED, MOST_POINTS = 128, 1500  # dots and points of curves in an SVG; those of more are an image
NEEDS = {
    "removed_of_model": ("replacement", "band"),
    "residual_before_of_model": ("replacement", "band"),
    "residual_after_of_model": ("replacement", "band"),
    "alpha_before": ("replacement", "layer", "head"),
    "alpha_after": ("replacement", "layer", "head"),
    "loss_change": ("replacement", "position"),
}
MOST_COLORS = 6  # interventions; more of them are points, what each does to attention against what it does to behaviour


def bos_figure(results: xr.Dataset | Mapping[str, xr.Dataset], *, path: str | Path | None = None) -> Figure:
    """How much of the residual component a swap at position 0 removes, and what it does to all else; a column per model.

    From above: the fraction of the residual component removed, by query band, with [Ruscio]'s 40 % for early queries; that
    source before and after; the change of every head's mean weight on position 0; the change of the next-token loss by
    position; sensitivity by input position before and after. A colour per replacement. Of many, or without profiles, see
    `interventions_figure`.

    Args:
        results: results of `bos_swap`, of one replacement or of several along `replacement`, by the model's name; or one
            of them.
        path: where to save; see `save_figure`.

    Raises:
        InputError: no results, or one of another probe.
    """
    results = results_of({name: of_several(ds) for name, ds in by_name(results).items()}, "bos-swap", NEEDS)
    if any(ds.sizes["replacement"] > MOST_COLORS or "sensitivity_after" not in ds for ds in results.values()):
        return interventions_figure(results, path=path)
    colors = replacement_colors(str(name) for ds in results.values() for name in ds["replacement"].values)
    image = sum(ds["sensitivity_after"].size for ds in results.values()) > MOST_POINTS
    dots = any(ds["alpha_after"].size > MOST_MARKED * ds.sizes["replacement"] for ds in results.values())
    highest = HIGHEST * max(float(ds["sensitivity_before"].max()) for ds in results.values())
    left_in = [mark(STREAM_LEFT_IN, "o", BLACK, filled=False)]
    left_in *= any("removed_steady_of_model" in ds for ds in results.values())
    ruscio = Line2D([], [], color=PUBLISHED_STYLE.color, linestyle=PUBLISHED_STYLE.line, label=PUBLISHED_STYLE.label)

    def profile_axis(cell: Axes, ds: xr.Dataset) -> None:
        for curve in by_fraction(swapped_profiles(ds, colors)):
            beyond = curve.x[curve.y > highest]
            if beyond.size:
                look: Any = {"color": curve.style.color, "markersize": 3.5, "clip_on": False, "rasterized": image}
                cell.plot(beyond, np.full(beyond.shape, highest), "^", **look)
        position_axis(cell, below=True)

    def profiles(ds: xr.Dataset) -> list[Curve]:
        curves = by_fraction(swapped_profiles(ds, colors))
        return [replace(curve, y=np.where(curve.y <= highest, curve.y, np.nan)) for curve in curves]

    removed, residual = (partial(_bands, quantity=quantity, colors=colors) for quantity in ("removed", "residual"))
    heads, losses = partial(_heads, colors=colors), partial(_losses, colors=colors)
    given: dict[str, Any] = {"limits": REMOVED, "more": [*left_in, ruscio]}
    rows = {
        "removed": Row("share removed", 1.8, removed, _removed_axis, "position 0 becomes", **given),
        "residual": Row("residual\ncomponent (nat²)", 1.7, residual, _residual_axis, own=True, more=left_in),
        "alpha": Row(r"change of $\alpha_0$", 1.6, heads, _block_axis, image=dots),
        "loss": Row("change of loss (nat)", 1.7, losses, _loss_axis, image=image),
        "sensitivity": Row(r"$\|J_j\|_F\,/\,\sqrt{d}$", 1.8, profiles, profile_axis, log=True, image=image),
    }
    return saved_grid(results, rows, [*facts(results), *_explained(results)], side=1.6, path=path)


def _bands(ds: xr.Dataset, quantity: str, colors: Mapping[str, str]) -> list[Curve]:
    """By band, before and replacements beside each other; with the constant sink left in a little to the right, hollow."""
    curves, names = swap_bands(ds, quantity, colors), list(map(str, ds["replacement"].values))
    before = having(curves, when="before", replacement=names[0])
    order = [""] * bool(before) + names
    shifts, apart = spread(len(order)), any(not curve.filled for curve in curves)
    found = []
    for curve in (*before, *(curve for curve in curves if curve.of["when"] != "before")):
        place = 0 if curve.of["when"] == "before" else order.index(curve.of["replacement"])
        beside = (-0.03 if curve.filled else 0.03) * apart
        found.append(replace(curve, x=curve.x + shifts[place] + beside, label=curve.label * curve.filled))
    return sorted(found, key=lambda curve: curve.filled)  # filled marks lie on top


def _removed_axis(cell: Axes, ds: xr.Dataset) -> None:
    bands = np.arange(ds.sizes["band"], dtype=float)
    headline = ds["removed_steady_of_model" if "removed_steady_of_model" in ds else "removed_of_model"].values
    for band in bands[np.isnan(headline).all(0)]:
        cell.text(band, 0.06, "none", ha="center", va="bottom", fontsize=6.5, color=GREY)
    early = bands[ds["band_first"].values < EARLY]
    cell.hlines(np.full(early.shape, PUBLISHED), early - 0.45, early + 0.45, color=GREY, linestyle="--", linewidth=1.1)
    band_axis(cell, ds["band"].values)


def _residual_axis(cell: Axes, ds: xr.Dataset) -> None:
    cell.margins(y=0.25)
    band_axis(cell, ds["band"].values)


def _heads(ds: xr.Dataset, colors: Mapping[str, str]) -> list[Curve]:
    """Changes of heads' weight on position 0: a dot per head while blocks are few, else their median in a band over all."""
    x, change = ds["layer"].values, ds["alpha_after"] - ds["alpha_before"]
    found: list[Curve] = []
    for replacement, shift in zip(map(str, ds["replacement"].values), spread(ds.sizes["replacement"]), strict=True):
        heads = change.sel(replacement=replacement).transpose("layer", "head").values
        label = replacement_label(replacement)
        style = Style(label, colors[replacement], "")
        if len(x) > MANY:
            found.append(Curve(x, np.median(heads, 1), style, heads.min(1), heads.max(1), label=label))
        else:
            at = np.repeat(x + shift, heads.shape[1])
            found.append(Curve(at, heads.ravel(), style, label=label, marked=2.6, alpha=0.8))
    return along_blocks(found) if len(x) > MANY else found


def _block_axis(cell: Axes, ds: xr.Dataset) -> None:
    zero_line(cell)
    layer_axis(cell, ds["layer"].values)


def _losses(ds: xr.Dataset, colors: Mapping[str, str]) -> list[Curve]:
    """Means over bins of neighbours; the last position predicts nothing that is known."""
    found = []
    for curve in loss_curves(ds, colors):
        rows = [curve.y[:-1], *(end[:-1] for end in (curve.low, curve.high) if end is not None)]
        x, y, *interval = thinned(curve.x[:-1] + 1.0, *rows, most=MOST, exact=EXACT)
        low, high = interval or (None, None)
        found.append(replace(curve, x=x, y=y, low=low, high=high))
    return found


def _loss_axis(cell: Axes, _: xr.Dataset) -> None:
    zero_line(cell)
    cell.set_yscale("symlog", linthresh=SMALL, linscale=0.6)
    cell.set_xscale("log")
    for axis in (cell.xaxis, cell.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: numeral(value)))
    cell.set_xlabel("query position + 1")


def _explained(results: Mapping[str, xr.Dataset]) -> list[str]:
    profiles = either(option(ds, "profile_prompts") for ds in results.values())
    many = [ds.sizes["layer"] > MANY for ds in results.values()]
    in_bands = [f"line, band of over {MANY} blocks: median and all of the heads"] * any(many)
    return [
        "removed: 1 - after / before of the residual component V(X), mean over blocks and heads",
        "constant sink: position 0's logit as far as it is the same for all queries; counts with the mask, or, left in, "
        "with the residual stream",
        f"arrowheads: beyond {REMOVED[0]:g} or {REMOVED[1]:g}; pale, without interval: the interval reaches beyond both "
        "and says nothing; none: not above 0 before",
        "intervals and bands: 95 %, paired bootstrap over documents, in the loss means over bins of neighbours",
        *["a dot per head"] * (not all(many)),
        *in_bands,
        f"sensitivity: rms over {profiles} prompt{'s' * (profiles != '1')}; "
        f"beyond {HIGHEST:g} times the largest before: arrowhead",
    ]
