"""The page's first picture: how strongly models depend on every position, and what tells their attention where it stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..charts import (
    BLUE,
    DOTTED,
    FRESH,
    INK,
    ORANGE,
    THEORY,
    TRAINED,
    VERMILLION,
    Panel,
    Series,
    curves,
    dots,
    panels,
    position_axis,
)
from ..results.curves import band, estimate, smooth_between
from ..results.profiles import profiles

Results = Mapping[str, xr.Dataset]

CAPTION = (
    "Curves: how strongly the last position depends on every input. Dots: how much the log-attention of early queries "
    "varies with their own place, by what tells it to them; 95 % intervals over documents."
)
# Of `leakage`, in the panel's order: what tells attention where it stands, and how it is read.
SOURCES = {
    "causal mask and constant sink": ("source_of_model", {"source": "mask"}, BLUE),
    "residual stream": ("source_of_model", {"source": "residual"}, VERMILLION),
    "both together": ("", {"part": "total"}, INK),
}
SWAP = {"residual stream alone": "before", "the same, position 0 swapped": "after"}  # of `bos_swap`


def chart(sensitivity: Results, leakage: Results, swaps: Results) -> Figure | None:
    """Sensitivity profiles above, sources of absolute position below, for the models that have either; None of no model.

    Args:
        sensitivity: results of `jacobian` by the model's name.
        leakage: of `leakage`.
        swaps: of `bos_swap`; of several replacements the first is drawn.
    """
    names = list(dict.fromkeys([*sensitivity, *leakage]))
    if not names:
        return None
    shown = {name: xr.Dataset(attrs={"name": name}) for name in names}
    rows = []
    if sensitivity:
        rows.append(Panel("sensitivity to each position", partial(_of, sensitivity, _profile)))
    if leakage:
        rows.append(Panel("", partial(_of, leakage, partial(_sources, swaps=swaps)), height=1.9))
    return panels(shown, rows, CAPTION)


def _of(results: Results, draw: Callable[[Axes, str, xr.Dataset], object], cell: Axes, of: xr.Dataset) -> None:
    """One model's panel; empty where nothing was measured."""
    name = str(of.attrs["name"])
    if name in results:
        draw(cell, name, results[name])
    else:
        cell.set_axis_off()


def _profile(cell: Axes, name: str, ds: xr.Dataset) -> None:
    """Fresh and trained weights over the position fraction, trained ones smoothed in bold, and the kernel's prediction."""

    def drawn(variable: str, condition: str) -> np.ndarray:
        return band([run.mean for run in profiles(ds, variable)[condition]]).centre

    measured = list(profiles(ds))
    x = np.linspace(0, 1, ds.sizes["position"])
    if "init" in measured:
        curves(cell, [Series("fresh weights", drawn("sensitivity", "init"), FRESH, x=x, width=2.0)], log=True)
        if "theory_score_path" in ds:
            told = drawn("theory_score_path", "init")
            curves(cell, [Series("as predicted (dotted)", told, THEORY, x=x, line=DOTTED)], log=True)
    if "pretrained" in measured:
        trained = drawn("sensitivity", "pretrained")
        smooth = np.where(trained > 0, smooth_between(trained), np.nan)
        each = Series("", trained, TRAINED, x=x, width=0.7, alpha=0.35)
        curves(cell, [each, Series("trained weights", smooth, TRAINED, x=x, width=2.0)], log=True)
    position_axis(cell)


def _sources(cell: Axes, name: str, leakage: xr.Dataset, *, swaps: Results) -> None:
    """Shapley values of the sources for early queries, their sum, and the residual stream alone before and after a swap."""
    early = leakage.isel(band=0)
    found, colors = {}, {}
    for source, (variable, where, color) in SOURCES.items():
        found[source] = estimate(early, f"steady_{variable}" if variable else "log_form_of_model", **where)
        colors[source] = color
    if (swap := swaps.get(name)) is not None:
        first = (swap.isel(replacement=0) if "replacement" in swap.dims else swap).isel(band=0)
        for source, when in SWAP.items():
            found[source], colors[source] = estimate(first, f"residual_steady_{when}_of_model"), ORANGE
    for source in found:  # a colour each, on the line of its own words
        values = np.array([found[other] if other == source else (np.nan,) * 3 for other in found]).T
        dots(cell, list(found), [Series("", values[0], colors[source], values[1], values[2])])
    cell.set_xlabel("variance of log-attention (nat²)")
