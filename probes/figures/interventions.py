"""What interventions at position 0 do to attention, against what they do to behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from ..models.intervene import WAYS, intervention
from .draw import Row, saved_grid, zero_line
from .layout import NAME
from .palette import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILLION, Style
from .series import Curve
from .style import facts, numeral

EXPLAINED = (
    "named where there is room, all of them in the table: what@block:part*dose; @block: from which block on; dotted: sink "
    "rate before; KL from the model as it is; intervals: 95 %, bootstrap over documents, of recall over couples of lists"
)
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
        "kl": Row(
            "KL, next token (nat)",
            2.6,
            partial(intervention_points, of="kl_of_model"),
            partial(_scaled, of="kl_of_model", linear=1e-2),
            own=True,
        ),
        "loss": Row(
            "change of loss (nat)",
            2.2,
            partial(intervention_points, of="loss_change_of_model"),
            partial(_scaled, of="loss_change_of_model", linear=0.01),
            own=True,
        ),
    }
    if all("recall_log_p_change" in ds for ds in results.values()):
        row = Row(
            "change of recall,\nlog p (nat)",
            2.2,
            partial(intervention_points, of="recall_log_p_change"),
            partial(_scaled, of="recall_log_p_change", linear=1.0),
            own=True,
        )
        rows["recall"] = row
    return saved_grid(results, rows, [*facts(results), EXPLAINED], side=1.75, each=3.4, path=path)


def intervention_points(ds: xr.Dataset, of: str) -> list[Curve]:
    """A variable by the sink rate after each intervention, kind by kind; `of["names"]` says which point is which."""
    names = [str(name) for name in ds["replacement"].values]
    x = ds["sink_rate_after"].mean("layer").values
    ends = [ds[f"{of}_{end}"].values if f"{of}_{end}" in ds else None for end in ("low", "high")]
    found = []
    for kind, style in KINDS.items():
        at = [n for n, name in enumerate(names) if kind_of(name) == kind]
        if at:
            low, high = (None if end is None else end[at] for end in ends)
            look: dict[str, Any] = {"label": style.label, "filled": kind != "dose"}
            look["of"] = {"names": [names[n] for n in at]}
            found.append(Curve(x[at], ds[of].values[at], style, low, high, "points", **look))
    return found


def _named(cell: Axes, ds: xr.Dataset, of: str) -> None:
    """Names beside the points where there is room; the table has all of them."""
    before = float(ds["sink_rate_before"].mean())
    cell.axvline(before, color=GREY, linewidth=0.9, linestyle=":")
    points = np.column_stack([ds["sink_rate_after"].mean("layer").values, ds[of].values])
    look: Any = {"textcoords": "offset points", "fontsize": 6, "color": "#333333", "gid": NAME, "in_layout": False}
    for name, point in zip(map(str, ds["replacement"].values), points, strict=True):
        if np.isfinite(point).all():
            cell.annotate(name, point, (0, 0), **look)
    cell.set_xlabel("sink rate of position 0, after")


def _scaled(cell: Axes, ds: xr.Dataset, of: str, linear: float) -> None:
    """An axis that is linear up to `linear`, and logarithmic beyond it; below 0 only as far as there are values."""
    zero_line(cell)
    cell.margins(y=0.1)
    cell.set_yscale("symlog", linthresh=linear, linscale=0.5)
    cell.yaxis.set_major_formatter(FuncFormatter(lambda value, _: numeral(value)))
    if np.nanmin(ds[of].values) > -linear:
        cell.set_ylim(bottom=-linear / 2)
    _named(cell, ds, of)
