"""Position read off the residual stream, and what is lost without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..measures.decode import erases_nothing
from .draw import Row, layer_axis, ruled, saved_grid, zero_line
from .palette import GREY, ORANGE, VERMILLION, Style
from .series import Curve, decoded_curves
from .style import facts, results_of

NEEDS = {"r2": ("layer",), "r2_shuffled": ("layer",)}
ERASED = {
    "none": Style("nothing", GREY, "", 3, marker="D"),
    "means": Style("span of position means", VERMILLION, "", 4, marker="o"),
    "random": Style("random, same rank", GREY, "", 4, marker="s"),
    "direction": Style("direction of log(1 + i)", ORANGE, "", 4, marker="^"),
    "shuffled": Style("the same, positions shuffled", GREY, "", 4, marker="v"),
}
# By variable: the axis, and whether the model as it is stands beside the others.
OUTCOMES = {
    "loss_change": ("change of loss (nat)", False),
    "kl": ("KL, next token (nat)", False),
    "r2_last": (r"$R^2$, last layer, anew", True),
    "recall_log_p_change": ("change of recall,\nlog p (nat)", False),
    "recall_exact": ("exact answers", True),
}


def decode_figure(results: xr.Dataset | Mapping[str, xr.Dataset], *, path: str | Path | None = None) -> Figure:
    """R^2 of log(1 + i) over the layers, and what each erasure changes; one column per model.

    Below R^2, where something was erased: change of the next-token loss, KL from the model as it is, R^2 at the last layer
    by readers fitted anew, and recall, where it was measured.

    Args:
        results: results of `decode`, by the model's name; or one of them.
        path: where to save; see `save_figure`.

    Raises:
        InputError: no results, or one of another probe.
    """
    results = results_of(results, "decode", NEEDS)
    rows = {"r2": Row("$R^2$ of log(1 + i)", 1.9, decoded_curves, _layers)}
    for name, (label, beside) in OUTCOMES.items():
        if any(name in ds for ds in results.values()):
            rows[name] = Row(label, 1.5, partial(_erased, of=name, beside=beside), _places, own=True)
    said = (
        "R^2 0: a reader that knows the mean alone; erased before the blocks that are named, at every position but 0; 95 % "
        "intervals over documents, of recall over couples of lists"
    )
    return saved_grid(results, rows, [*facts(results), said], side=1.9, path=path)


def _layers(cell: Axes, ds: xr.Dataset) -> None:
    layer_axis(cell, ds["layer"].values, "layer (the stream that block l reads)")
    ruled(cell)
    zero_line(cell)


def _erased(ds: xr.Dataset, of: str, beside: bool) -> list[Curve]:
    """Points by place, those of one place side by side."""
    if of not in ds:
        return []
    places, found = _where(ds), []
    for n, (what, style) in enumerate(ERASED.items()):
        at = [k for k, name in enumerate(map(str, ds["intervention"].values)) if name.partition(" ")[0] == what]
        at = [
            k for k in at if not erases_nothing(ds.isel(intervention=k))
        ]  # it would look as if position were not used
        if not at or (what == "none" and not beside):
            continue
        named = [str(ds["intervention"].values[k]).partition(" ")[2] for k in at]
        x = np.array([-1.0 if what == "none" else places.index(one) + 0.18 * (n - 2.5) for one in named])
        values, low, high = (ds[name].values[at] for name in (of, f"{of}_low", f"{of}_high"))
        found.append(Curve(x, values, style, low, high, "points", label=style.label))
    return found


def _places(cell: Axes, ds: xr.Dataset) -> None:
    places = _where(ds) if "intervention" in ds.coords else []
    zero_line(cell)
    ruled(cell)
    labels: Sequence[str] = [*(["untouched"]), *("all blocks" if one == "all" else f"block {one}" for one in places)]
    cell.set_xticks(range(-1, len(places)), labels)
    cell.set_xlim(-1.6, len(places) - 0.4)


def _where(ds: xr.Dataset) -> list[Any]:
    """The places in which something was erased, in their order."""
    named = (str(one).partition(" ")[2] for one in ds["intervention"].values)
    return [one for one in dict.fromkeys(named) if one]
