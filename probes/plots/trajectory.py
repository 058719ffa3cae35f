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
    facts,
    handle,
    layer_axis,
    log_axis,
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
    "bos": Style("BOS at position 0", VERMILLION, "-", 4),
    "id": Style("one id at position 0", VERMILLION, "-", 4),
    "text": Style("text at position 0", BLUE, "-", 3),
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
        log_axis(cells["norm"][0])
        log_axis(cells["top"][0])
        firsts = [first for first in FIRSTS if any(first in ds["first"].values for ds in results.values())]
        shown = [handle(FIRSTS[first], FIRSTS[first].label) for first in firsts]
        others = [handle(FIRSTS[first]._replace(line="--"), "elsewhere, median") for first in firsts]
        side_legend(sides["norm"], [x for pair in zip(shown, others, strict=True) for x in pair])
        lines = [handle(Style("", GREY, line, 1), f"{factor:,.0f} medians") for factor, line in MASSIVE.items()]
        side_legend(sides["top"], [*shown, *lines])
        places = [place for place in PLACES if any(place in ds["place"].values for ds in results.values())]
        with_bos = any(np.isfinite(ds["cosine_with_bos"].values).any() for ds in results.values())
        side_legend(
            sides["cosine"],
            [*(handle(PLACES[p], PLACES[p].label) for p in places), *[handle(WITH_BOS, WITH_BOS.label)] * with_bos],
            "tokens alone",
        )
        cells["cosine"][0].set_ylim(top=1.03)
        cells["norm"][0].set_ylabel(r"norm $\|h\|_2$")
        cells["top"][0].set_ylabel("largest $|h|$ at 0 / median")
        cells["cosine"][0].set_ylabel("cosine of pairs")
        small_print(figure, [*facts(results), *_explained(results)], width)
        if path is not None:
            save_figure(figure, path, dpi=int(figure.dpi), largest=LARGEST)
    return figure


def _norms(cell: Axes, ds: xr.Dataset) -> None:
    for first in ds["first"].values:
        style, at = FIRSTS[str(first)], ds.sel(first=first)
        for name, line, width in (("norm_first", "-", 1.4), ("norm_others", "--", 1.1)):
            cell.plot(
                ds["layer"].values,
                at[name].values,
                color=style.color,
                linestyle=line,
                linewidth=width,
                zorder=style.order,
            )


def _top(cell: Axes, ds: xr.Dataset) -> None:
    for first in ds["first"].values:
        style, ratios = FIRSTS[str(first)], ds["top_ratio"].sel(first=first).values
        for rank in range(ratios.shape[1]):
            look: Any = {"linewidth": 1.4, "alpha": 1.0} if rank == 0 else {"linewidth": 0.7, "alpha": 0.55}
            cell.plot(ds["layer"].values, ratios[:, rank], color=style.color, zorder=style.order, **look)
    for factor, line in MASSIVE.items():
        cell.axhline(factor, color=GREY, linestyle=line, linewidth=0.9, zorder=1)


def _cosines(cell: Axes, ds: xr.Dataset) -> None:
    x = ds["layer"].values
    for place in ds["place"].values:
        style, at = PLACES[str(place)], ds.sel(place=place)
        low, high = at["cosine_low"].values, at["cosine_high"].values
        cell.fill_between(x, low, high, color=style.color, alpha=0.15, linewidth=0)
        cell.plot(x, at["cosine"].values, color=style.color, linestyle=style.line, linewidth=1.4, zorder=style.order)
    with_bos = ds["cosine_with_bos"].values
    cell.plot(x, with_bos, color=WITH_BOS.color, linestyle=WITH_BOS.line, linewidth=1.4, zorder=WITH_BOS.order)


def _explained(results: Mapping[str, xr.Dataset]) -> list[str]:
    moved = max(float(ds["later_difference"].max()) for ds in results.values())
    starts = dict.fromkeys(option(ds, "starts") for ds in results.values())
    return [
        f"largest change at position 0 by other text behind it: {moved:g}",
        f"{' / '.join(map(str, starts))} tokens; band: 5 to 95 % of pairs",
        "thin: the next four dimensions; the last stream is what the final norm reads",
    ]
