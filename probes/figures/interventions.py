"""What interventions at position 0 do to attention, against what they do to behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from ..models.intervene import WAYS, intervention
from .draw import Row, saved_grid, zero_line
from .palette import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILLION, Style
from .series import Curve
from .style import facts, numeral

LEAST = 1e-4  # nats; below, the axis is linear
KINDS = {
    "embedding": Style("embedding", BLUE, "", 4, marker="o"),
    "dose": Style("part of it", BLUE, "", 4, marker="o"),
    "stream": Style("stream of a later block", GREEN, "", 4, marker="s"),
    "keys": Style("keys alone", ORANGE, "", 4, marker="^"),
    "values": Style("values alone", PURPLE, "", 4, marker="v"),
    "both": Style("keys and values", GREY, "", 4, marker="D"),
    "weights": Style("attention weights", VERMILLION, "", 4, marker="*"),
}


def kind_of(name: str) -> str:
    """Which of `KINDS` an intervention is."""
    done = intervention(name)
    if done.what in WAYS:
        return "weights"
    if done.part != "stream":
        return done.part
    return "stream" if done.layer else "embedding" if done.dose == 1 else "dose"


def interventions_figure(results: Mapping[str, xr.Dataset], *, path: str | Path | None = None) -> Figure:
    """Sink rate after each intervention against KL, change of loss and, where measured, of recall; see `bos_figure`.

    Args:
        results: results of `bos_swap` with several interventions along `replacement`, by the model's name.
        path: where to save; see `save_figure`.
    """
    rows = {
        "kl": Row("KL, next token (nat)", 2.6, partial(_points, of="kl_of_model"), _logarithmic, own=True),
        "loss": Row("change of loss (nat)", 2.2, partial(_points, of="loss_change_of_model"), _signed, own=True),
    }
    if all("recall_log_p_change" in ds for ds in results.values()):
        row = Row("change of recall,\nlog p (nat)", 2.2, partial(_points, of="recall_log_p_change"), _plain, own=True)
        rows["recall"] = row
    return saved_grid(results, rows, [*facts(results), *_explained(results)], side=1.75, path=path)


def _points(ds: xr.Dataset, of: str) -> list[Curve]:
    names = [str(name) for name in ds["replacement"].values]
    x = ds["sink_rate_after"].mean("layer").values
    ends = [ds[f"{of}_{end}"].values if f"{of}_{end}" in ds else None for end in ("low", "high")]
    found = []
    for kind, style in KINDS.items():
        at = [n for n, name in enumerate(names) if kind_of(name) == kind]
        if at:
            low, high = (None if end is None else end[at] for end in ends)
            look = {"label": style.label, "filled": kind != "dose"}
            found.append(Curve(x[at], ds[of].values[at], style, low, high, "points", **look))
    return found


def _named(cell: Axes, ds: xr.Dataset, of: str) -> None:
    """Numbers beside the points; the caption says which intervention has which."""
    before = float(ds["sink_rate_before"].mean())
    cell.axvline(before, color=GREY, linewidth=0.9, linestyle=":")
    x = ds["sink_rate_after"].mean("layer").values
    for n, (at, y) in enumerate(zip(x, ds[of].values, strict=True), start=1):
        if np.isfinite(y):
            cell.annotate(str(n), (at, y), xytext=(2.5, 2.5), textcoords="offset points", fontsize=5.5, color="#333333")
    cell.set_xlabel("sink rate of position 0, after (dotted: before)")


def _logarithmic(cell: Axes, ds: xr.Dataset) -> None:
    cell.set_yscale("symlog", linthresh=LEAST, linscale=0.4)
    cell.yaxis.set_major_formatter(FuncFormatter(lambda value, _: numeral(value)))
    _named(cell, ds, "kl_of_model")


def _signed(cell: Axes, ds: xr.Dataset) -> None:
    zero_line(cell)
    cell.set_yscale("symlog", linthresh=0.01, linscale=0.4)
    cell.yaxis.set_major_formatter(FuncFormatter(lambda value, _: numeral(value)))
    _named(cell, ds, "loss_change_of_model")


def _plain(cell: Axes, ds: xr.Dataset) -> None:
    zero_line(cell)
    cell.set_yscale("symlog", linthresh=1.0, linscale=0.8)
    cell.yaxis.set_major_formatter(FuncFormatter(lambda value, _: numeral(value)))
    _named(cell, ds, "recall_log_p_change")


def _explained(results: Mapping[str, xr.Dataset]) -> list[str]:
    said = []
    for name, ds in results.items():
        numbers = ", ".join(f"{n} {one}" for n, one in enumerate(map(str, ds["replacement"].values), start=1))
        said.append(f"{name}: {numbers}")
    return [
        *dict.fromkeys(said),
        "what@block:part*dose; @block: from which block on; KL from the model as it is; intervals: 95 %, bootstrap over "
        "documents, of recall over couples of lists",
    ]
