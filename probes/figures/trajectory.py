"""Position 0 as a closed system: its stream through the blocks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .blocks import layer_axis
from .steady import steady
from .style import (
    BLACK,
    BLUE,
    FAINT,
    GREEN,
    GREY,
    LARGEST,
    STYLE,
    VERMILLION,
    Style,
    coinciding,
    facts,
    handle,
    log_axis,
    of_coinciding,
    option,
    panels,
    results_of,
    save_figure,
    side_legend,
    small_print,
)

NEEDS = {
    "norm_first": ("first", "layer"),
    "norm_others": ("first", "layer"),
    "top_ratio": ("first", "layer", "rank"),
    "cosine": ("place", "layer"),
    "later_difference": ("first", "layer"),
}
FIRSTS = {
    "bos": Style("BOS at position 0", VERMILLION, "-", 3),
    "id": Style("one id at position 0", VERMILLION, "-", 3),
    "text": Style("text at position 0", BLUE, "-", 4),
}
PLACES = {
    "position 0": Style("at position 0", BLACK, "-", 4),
    "position 1 behind BOS": Style("at 1 behind BOS", GREEN, (0, (4, 1.5)), 3),
}
WITH_BOS = Style("at 0, with BOS's own", VERMILLION, (0, (1, 1.3)), 5)
MASSIVE = {100.0: ":", 1000.0: "-"}  # multiples of the median, by which [Sun] and its relatives for tiny models count


def trajectory_figure(results: xr.Dataset | Mapping[str, xr.Dataset], *, path: str | Path | None = None) -> Figure:
    """How the stream at position 0 grows, which dimensions carry it, and how soon different tokens become alike there.

    One column per model, all over blocks. From above: norms at position 0 and elsewhere; the five largest dimensions at
    position 0 against the median magnitude; cosines of streams that started from different tokens, bands over the pairs.

    Args:
        results: results of `trajectory`, by the model's name; or one of them.
        path: where to save; see `save_figure`.

    Raises:
        InputError: no results, or one of another probe.
    """
    results = {name: steady(ds) for name, ds in results_of(results, "trajectory", NEEDS).items()}
    with matplotlib.rc_context(STYLE):
        heights = {"norm": 1.9, "top": 1.9, "cosine": 1.9}
        figure, width, cells, sides = panels(list(results), heights, side=1.75)
        for column, ds in enumerate(results.values()):
            _norms(cells["norm"][column], ds)
            _top(cells["top"][column], ds)
            _cosines(cells["cosine"][column], ds)
            for row in heights:
                layer_axis(cells[row][column], ds["layer"].values, "stream that block reads" if row == "cosine" else "")
                cells[row][column].grid(axis="y", color=FAINT, linewidth=0.6)
                cells[row][column].set_axisbelow(True)
        log_axis(cells["norm"][0], cut=False)
        log_axis(cells["top"][0], cut=False)
        cells["cosine"][0].set_ylim(top=1.03)
        firsts = [first for first in FIRSTS if any(first in ds["first"].values for ds in results.values())]
        norms = [handle(style, style.label) for first in firsts for style in (FIRSTS[first], _elsewhere(first))]
        tops = [handle(FIRSTS[first], FIRSTS[first].label) for first in firsts]
        places = [PLACES[place] for place in PLACES if any(place in ds["place"].values for ds in results.values())]
        with_bos = any(np.isfinite(ds["cosine_with_bos"].values).any() for ds in results.values())
        cosines = [handle(style, style.label) for style in [*places, *[WITH_BOS] * with_bos]]
        signs = [
            sign
            for row, shown in zip(cells.values(), (norms, tops, cosines), strict=True)
            for sign in coinciding(row, shown)
        ]
        lines = [handle(Style("", GREY, line, 1), f"{factor:,.0f} medians") for factor, line in MASSIVE.items()]
        side_legend(sides["norm"], norms)
        side_legend(sides["top"], [*tops, *lines])
        side_legend(sides["cosine"], cosines, "tokens alone")
        cells["norm"][0].set_ylabel(r"norm $\|h\|_2$")
        cells["top"][0].set_ylabel("largest $|h|$ at 0 / median")
        cells["cosine"][0].set_ylabel("cosine of pairs")
        small_print(figure, [*facts(results), *_explained(results), *of_coinciding(signs)], width)
        if path is not None:
            save_figure(figure, path, dpi=int(figure.dpi), largest=LARGEST)
    return figure


def _elsewhere(first: str) -> Style:
    style = FIRSTS[first]
    return style._replace(label=f"{style.label.removesuffix(' at position 0')}, elsewhere", line="--")


def _norms(cell: Axes, ds: xr.Dataset) -> None:
    for first in map(str, ds["first"].values):
        for name, style in (("norm_first", FIRSTS[first]), ("norm_others", _elsewhere(first))):
            _curve(cell, ds, ds[name].sel(first=first).values, style, _width(ds, first))


def _top(cell: Axes, ds: xr.Dataset) -> None:
    for first in map(str, ds["first"].values):
        ratios, width = ds["top_ratio"].sel(first=first).values, _width(ds, first)
        _curve(cell, ds, ratios[:, 0], FIRSTS[first], width)
        for rank in range(1, ratios.shape[1]):
            _curve(cell, ds, ratios[:, rank], FIRSTS[first]._replace(label=""), width / 2, alpha=0.55)
    for factor, line in MASSIVE.items():
        cell.axhline(factor, color=GREY, linestyle=line, linewidth=0.9, zorder=1)


def _width(ds: xr.Dataset, first: str) -> float:
    """Curves with BOS lie below those without, wide enough to be seen there where the two are the same."""
    return 1.3 if first == "text" or ds.sizes["first"] == 1 else 2.6


def _curve(cell: Axes, ds: xr.Dataset, values: np.ndarray, style: Style, width: float, **look: Any) -> None:
    label = style.label or "_"  # a label with this in front is in no legend
    look |= {"color": style.color, "linestyle": style.line, "linewidth": width, "zorder": style.order, "label": label}
    cell.plot(ds["layer"].values, values, **look)


def _cosines(cell: Axes, ds: xr.Dataset) -> None:
    x = ds["layer"].values
    for place in ds["place"].values:
        style, at = PLACES[str(place)], ds.sel(place=place)
        low, high = at["cosine_low"].values, at["cosine_high"].values
        cell.fill_between(x, low, high, color=style.color, alpha=0.15, linewidth=0)
        _curve(cell, ds, at["cosine"].values, style, 1.4)
    _curve(cell, ds, ds["cosine_with_bos"].values, WITH_BOS, 1.4)


def _explained(results: Mapping[str, xr.Dataset]) -> list[str]:
    moved = max(float(ds["later_difference"].max()) for ds in results.values())
    starts = dict.fromkeys(option(ds, "starts") for ds in results.values())
    return [
        f"largest change at position 0 by other text behind it: {moved:g}",
        f"{' / '.join(map(str, starts))} tokens; band: 5 to 95 % of pairs",
        "elsewhere: median; thin: the next four dimensions; the last stream is what the final norm reads",
    ]
