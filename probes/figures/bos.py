"""What another embedding at position 0 takes away: leakage, sinks, loss, sensitivity."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from .blocks import MANY, Series, along_blocks, block_entry, layer_axis
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
    coinciding,
    facts,
    log_axis,
    mark,
    numeral,
    of_coinciding,
    option,
    panels,
    points,
    position_axis,
    results_of,
    save_figure,
    side_legend,
    small_print,
    spread,
    thinned,
)

EARLY = 32  # queries before it are early, to [Ruscio]
MOST, EXACT = 40, 8  # places along the loss: a single position of few prompts is noise
PUBLISHED = 0.4  # [Ruscio], of the residual component at early queries
REMOVED = (-1.0, 1.0)  # where the axis ends: at all of it, and at twice as much as before
SMALL = 0.1  # nats; the axis of the loss is linear below: first positions lose a hundred times what later ones do
HIGHEST = 3.0  # times the largest sensitivity before: a norm of a zero vector is as steep as its epsilon allows
MOST_MARKED, MOST_POINTS = 128, 1500  # dots and points of curves in an SVG; those of more are an image
PALE = "#bbbbbb"
COLORS = {"mean": BLUE, "zero": VERMILLION, "random": GREEN}  # of replacements; token ids take what is left
OTHERS = (ORANGE, PURPLE, SKY)
NEEDS = {
    "removed_of_model": ("replacement", "band"),
    "residual_before_of_model": ("replacement", "band"),
    "residual_after_of_model": ("replacement", "band"),
    "alpha_before": ("replacement", "layer", "head"),
    "alpha_after": ("replacement", "layer", "head"),
    "loss_change": ("replacement", "position"),
    "sensitivity_before": ("replacement", "position"),
    "sensitivity_after": ("replacement", "position"),
}


def bos_figure(results: xr.Dataset | Mapping[str, xr.Dataset], *, path: str | Path | None = None) -> Figure:
    """How much of the residual component a swap at position 0 removes, and what it does to all else; a column per model.

    From above: the fraction of the residual component removed, by query band, with [Ruscio]'s 40 % for early queries; that
    source before and after; the change of every head's mean weight on position 0; the change of the next-token loss by
    position; sensitivity by input position before and after. A colour per replacement.

    Args:
        results: results of `bos_swap`, of one replacement or of several along `replacement`, by the model's name; or one
            of them.
        path: where to save; see `save_figure`.

    Raises:
        InputError: no results, or one of another probe.
    """
    given = {"": results} if isinstance(results, xr.Dataset) else results
    several = {name: _of_several(ds) for name, ds in given.items()}
    results = results_of(several[""] if isinstance(results, xr.Dataset) else several, "bos-swap", NEEDS)
    colors = _colors(results)
    with matplotlib.rc_context(STYLE):
        heights = {"removed": 1.8, "residual": 1.7, "alpha": 1.6, "loss": 1.7, "sensitivity": 1.8}
        figure, width, cells, sides = panels(list(results), heights, side=1.6, own=("residual",))
        curves = sum(ds["sensitivity_after"].size for ds in results.values())
        highest = HIGHEST * max(float(ds["sensitivity_before"].max()) for ds in results.values())
        for column, ds in enumerate(results.values()):
            _removed(cells["removed"][column], ds, colors)
            _residual(cells["residual"][column], ds, colors)
            _alpha(cells["alpha"][column], ds, colors)
            _loss(cells["loss"][column], ds, colors, rasterized=curves > MOST_POINTS)
            _sensitivity(cells["sensitivity"][column], ds, colors, highest, rasterized=curves > MOST_POINTS)
        log_axis(cells["sensitivity"][0])
        marks = [mark(_label(replacement), "o", color) for replacement, color in colors.items()]
        losses, profiles = (
            [Line2D([], [], color=color, linewidth=1.5, label=_label(name)) for name, color in colors.items()]
            for _ in range(2)
        )
        profiles.insert(0, Line2D([], [], color=PALE, linewidth=2.6, label="before"))
        signs = coinciding(cells["loss"], losses) + coinciding(cells["sensitivity"], profiles)
        left_in = (
            [mark("constant sink left in", "o", BLACK, filled=False)] if any(map(_told_apart, results.values())) else []
        )
        published = Line2D([], [], color=GREY, linestyle="--", linewidth=1.1, label="[Ruscio], early")
        side_legend(sides["removed"], [*marks, *left_in, published], "position 0 becomes")
        side_legend(sides["residual"], [mark("before", "D", BLACK), *marks, *left_in])
        heads = [block_entry(_label(replacement), color, results) for replacement, color in colors.items()]
        side_legend(sides["alpha"], heads)
        side_legend(sides["loss"], losses)
        side_legend(sides["sensitivity"], profiles)
        cells["removed"][0].set_ylabel("share removed")
        cells["residual"][0].set_ylabel("residual\ncomponent (nat²)")
        cells["alpha"][0].set_ylabel(r"change of $\alpha_0$")
        cells["loss"][0].set_ylabel("change of loss (nat)")
        cells["sensitivity"][0].set_ylabel(r"$\|J_j\|_F\,/\,\sqrt{d}$")
        small_print(figure, [*facts(results), *_explained(results), *of_coinciding(signs)], width)
        if path is not None:
            save_figure(figure, path, dpi=int(figure.dpi), largest=LARGEST)
    return figure


def _of_several(ds: xr.Dataset) -> xr.Dataset:
    """With the dimension `replacement` in front, of length one where the result is of a single one."""
    if "replacement" in ds.dims or "replacement" not in ds.attrs:
        return ds
    found = ds.drop_vars("tokens", errors="ignore").expand_dims(replacement=[str(ds.attrs["replacement"])])
    return found.assign_attrs({name: value for name, value in ds.attrs.items() if name != "replacement"})


def _colors(results: Mapping[str, xr.Dataset]) -> dict[str, str]:
    """Of all replacements in the results, in their order."""
    found = dict.fromkeys(str(name) for ds in results.values() for name in ds["replacement"].values)
    others = [name for name in found if name not in COLORS]
    return {name: COLORS.get(name) or OTHERS[others.index(name) % len(OTHERS)] for name in found}


def _label(replacement: str) -> str:
    return f"token {replacement}" if replacement.isdigit() else replacement


def _interval(ds: xr.Dataset, name: str) -> tuple[np.ndarray, np.ndarray] | None:
    return (ds[f"{name}_low"].values, ds[f"{name}_high"].values) if f"{name}_low" in ds else None


def _told_apart(ds: xr.Dataset) -> bool:
    """Whether the result knows the constant sink (see `probes.leakage`)."""
    return "removed_steady_of_model" in ds


def _variants(ds: xr.Dataset) -> list[tuple[str, bool, float]]:
    """What stands in names of variables without and with the constant sink; whether marks are filled; where they stand."""
    return [("_steady", True, -0.03), ("", False, 0.03)] if _told_apart(ds) else [("", True, 0.0)]


def _removed(cell: Axes, ds: xr.Dataset, colors: Mapping[str, str]) -> None:
    bands = np.arange(ds.sizes["band"], dtype=float)
    variants = _variants(ds)
    headline = f"removed{variants[0][0]}_of_model"
    for component, filled, beside in reversed(variants):
        name = f"removed{component}_of_model"
        for shift, replacement in zip(spread(ds.sizes["replacement"]), ds["replacement"].values, strict=True):
            at = ds.sel(replacement=replacement)
            look: Any = {"color": colors[str(replacement)], "filled": filled, "limits": REMOVED}
            points(cell, bands + shift + beside, at[name].values, _interval(at, name), **look)
    for band in bands[np.isnan(ds[headline].values).all(0)]:
        cell.text(band, 0.06, "none", ha="center", va="bottom", fontsize=6.5, color=GREY)
    early = bands[ds["band_first"].values < EARLY]
    cell.hlines(np.full(early.shape, PUBLISHED), early - 0.45, early + 0.45, color=GREY, linestyle="--", linewidth=1.1)
    cell.axhline(0, color=BLACK, linewidth=0.7, zorder=1)
    cell.set_ylim(REMOVED[0] - 0.08, REMOVED[1] + 0.08)
    band_axis(cell, ds["band"].values)


def _residual(cell: Axes, ds: xr.Dataset, colors: Mapping[str, str]) -> None:
    bands = np.arange(ds.sizes["band"], dtype=float)
    before, *others = spread(1 + ds.sizes["replacement"])
    for component, filled, beside in _variants(ds):
        name, at = f"residual{component}_before_of_model", ds.isel(replacement=0)
        look: Any = {"color": BLACK, "marker": "D", "filled": filled}
        points(cell, bands + before + beside, at[name].values, _interval(at, name), **look)
        name = f"residual{component}_after_of_model"
        for shift, replacement in zip(others, ds["replacement"].values, strict=True):
            at, color = ds.sel(replacement=replacement), colors[str(replacement)]
            points(cell, bands + shift + beside, at[name].values, _interval(at, name), color=color, filled=filled)
    cell.axhline(0, color=BLACK, linewidth=0.7, zorder=1)
    band_axis(cell, ds["band"].values)


def _alpha(cell: Axes, ds: xr.Dataset, colors: Mapping[str, str]) -> None:
    """A dot per head while blocks are few; of more blocks their heads' median in a band over all heads."""
    layers = ds["layer"].values
    change = (ds["alpha_after"] - ds["alpha_before"]).transpose("replacement", "layer", "head").values
    named = list(zip([colors[str(name)] for name in ds["replacement"].values], change, strict=True))
    if len(layers) > MANY:
        rows = [Series(np.median(heads, 1), (heads.min(1), heads.max(1)), color) for color, heads in named]
        along_blocks(cell, layers, rows)
    else:
        for shift, (color, heads) in zip(spread(len(named)), named, strict=True):
            x = np.repeat(layers + shift, heads.shape[1])
            look: Any = {"markersize": 2.6, "alpha": 0.8, "rasterized": heads.size > MOST_MARKED}
            cell.plot(x, heads.ravel(), "o", color=color, **look)
    cell.axhline(0, color=BLACK, linewidth=0.7, zorder=1)
    layer_axis(cell, layers)


def _loss(cell: Axes, ds: xr.Dataset, colors: Mapping[str, str], *, rasterized: bool) -> None:
    for name in ds["replacement"].values:
        at, color = ds.sel(replacement=name).isel(position=slice(0, -1)), colors[str(name)]
        x, change = thinned(at["position"].values + 1.0, at["loss_change"].values, most=MOST, exact=EXACT)
        cell.plot(x, change, color=color, linewidth=1.1, label=_label(str(name)))
        if "loss_change_low" in ds:
            ends = at["loss_change_low"].values, at["loss_change_high"].values
            _, low, high = thinned(at["position"].values + 1.0, *ends, most=MOST, exact=EXACT)
            cell.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0, rasterized=rasterized)
    cell.axhline(0, color=BLACK, linewidth=0.7, zorder=1)
    cell.set_yscale("symlog", linthresh=SMALL, linscale=0.6)
    cell.set_xscale("log")
    for axis in (cell.xaxis, cell.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: numeral(value)))
    cell.set_xlabel("query position + 1")


def _sensitivity(cell: Axes, ds: xr.Dataset, colors: Mapping[str, str], highest: float, *, rasterized: bool) -> None:
    x = ds["position"].values / (ds.sizes["position"] - 1)
    before = ds["sensitivity_before"].isel(replacement=0).values
    after = [
        (ds["sensitivity_after"].sel(replacement=name).values, colors[str(name)], 0.8, _label(str(name)))
        for name in ds["replacement"].values
    ]
    for curve, color, width, label in ((before, PALE, 2.6, "before"), *after):
        shown = np.where((curve > 0) & (curve <= highest), curve, np.nan)
        # All or none: an SVG joins images that follow each other.
        cell.plot(x, shown, color=color, linewidth=width, rasterized=rasterized, label=label)
        cell.plot(x[[0, -1]], shown[[0, -1]], "o", color=color, markersize=1.8 + width, rasterized=rasterized)
        beyond = x[curve > highest]
        if beyond.size:
            arrow: Any = {"color": color, "markersize": 3.5, "clip_on": False, "rasterized": rasterized}
            cell.plot(beyond, np.full(beyond.shape, highest), "^", **arrow)
    position_axis(cell, below=True)


def _explained(results: Mapping[str, xr.Dataset]) -> list[str]:
    profiles = dict.fromkeys(option(ds, "profile_prompts") for ds in results.values())
    many = [ds.sizes["layer"] > MANY for ds in results.values()]
    heads = ["a dot per head"] * (not all(many)) + [
        f"line, band of over {MANY} blocks: median and all of the heads"
    ] * any(many)
    return [
        "removed: 1 - after / before of the residual component V(X), mean over blocks and heads",
        "constant sink: position 0's logit as far as it is the same for all queries; counts with the mask, or, left in, "
        "with the residual stream",
        f"arrowheads: beyond {REMOVED[0]:g} or {REMOVED[1]:g}; pale: an interval beyond both; none: not above 0 before",
        "intervals and bands: 95 %, paired bootstrap over documents, in the loss means over bins of neighbours",
        *heads,
        f"sensitivity: rms over {' / '.join(map(str, profiles))} prompt{'s' * (list(profiles) != [1])}; "
        f"beyond {HIGHEST:g} times the largest before: arrowhead",
    ]
