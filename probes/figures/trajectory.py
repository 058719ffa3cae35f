"""Position 0 as a closed system: its residual stream through the blocks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from .draw import Row, layer_axis, ruled, saved_grid
from .palette import GREY
from .series import cosine_curves, norm_curves, top_curves
from .steady import steady
from .style import either, facts, option, results_of

NEEDS = {
    "norm_first": ("first", "layer"),
    "norm_others": ("first", "layer"),
    "top_ratio": ("first", "layer", "rank"),
    "cosine": ("place", "layer"),
    "later_difference": ("first", "layer"),
}
# Multiples of the median, by which [Sun] and its relatives for tiny models count.
MASSIVE: dict[float, Any] = {100.0: ":", 1000.0: "-"}


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
    medians = [
        Line2D([], [], color=GREY, linestyle=line, label=f"{times:,.0f} medians") for times, line in MASSIVE.items()
    ]
    rows = {
        "norm": Row(r"norm $\|h\|_2$", 1.9, norm_curves, _layers, log=True, decades=None),
        "top": Row("largest $|h|$ at 0 / median", 1.9, top_curves, _massive, log=True, decades=None, more=medians),
        "cosine": Row("cosine of pairs", 1.9, cosine_curves, _cosines, "tokens alone"),
    }
    return saved_grid(results, rows, [*facts(results), *_explained(results)], side=1.75, path=path)


def _layers(cell: Axes, ds: xr.Dataset) -> None:
    layer_axis(cell, ds["layer"].values, "")
    ruled(cell)


def _massive(cell: Axes, ds: xr.Dataset) -> None:
    for times, line in MASSIVE.items():
        cell.axhline(times, color=GREY, linestyle=line, linewidth=0.9, zorder=1)
    _layers(cell, ds)


def _cosines(cell: Axes, ds: xr.Dataset) -> None:
    _layers(cell, ds)
    cell.set_xlabel("stream that block reads")
    cell.set_ylim(top=1.03)


def _explained(results: Mapping[str, xr.Dataset]) -> list[str]:
    moved = max(float(ds["later_difference"].max()) for ds in results.values())
    starts = either(option(ds, "starts") for ds in results.values())
    return [
        f"largest change at position 0 by other text behind it: {moved:g}",
        f"{starts} tokens; band: 5 to 95 % of pairs",
        "elsewhere: median; thin: the next four dimensions; the last stream is what the final norm reads",
    ]
