"""Toys beside a model: every curve on the position fraction, what ingredients make, and the sources of leakage."""

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

from ..measures.matched import elastic, toys_learnt
from .draw import Row, ruled, saved_grid
from .palette import GREY, TOY_SOURCES, VARIANTS
from .series import MATCHED, Curve, beside, having, over_means
from .style import position_axis, results_of

NEEDS = {
    "model_sensitivity": ("state", "seed", "prompt", "position"),
    "toy_alpha": ("variant", "training", "toy_seed", "toy_prompt", "point"),
}
MOST = 130  # points of a curve that are drawn
SHARES = (-1.0, 2.0)  # shares of leakage that are drawn; beyond there are arrows
WIDE = 7  # decades of an axis: a window's models and toys are that far apart
SIZES: Any = {"side": 1.9, "each": 3.0, "widest": 2000}  # inches of legends and of a panel; pixels
# Whose shares of leakage are drawn.
HOLDERS: dict[str, tuple[str, dict[str, str]]] = {
    "init": ("model", {"state": "init"}),
    "trained": ("model", {"state": "pretrained"}),
    "toy, init": ("toy", {"variant": MATCHED, "training": "init"}),
    "retrieval": ("toy", {"variant": MATCHED, "training": "retrieval"}),
}


def match_figure(results: xr.Dataset | Mapping[str, xr.Dataset], *, path: str | Path | None = None) -> Figure:
    """Model and toys through the same probes, one column per model, over the position fraction.

    From above: sensitivity at initialization, with theory; sensitivity after training, with the kernel alone; mean weight
    on a position against uniform attention; sensitivity with the mean embedding at position 0 against without; shares of
    leakage by source; toys that lack one ingredient, at initialization and trained on retrieval. Sensitivities are divided
    by their geometric mean where all of a panel are above zero: a toy's unit is its own. Toys' curves have a mark per
    position where a model's stands beside them.

    Args:
        results: results of `match`, by the model's name; or one of them.
        path: where to save; see `save_figure`.

    Raises:
        InputError: no results, or one of another study.
    """
    found = results_of(results, "match", NEEDS)
    free: dict[str, Any] = {"axis": _positions, "log": True, "own": True, "decades": WIDE}
    rows = {
        "init": Row("sensitivity, init\n(scale free)", 2.0, partial(_sensitivities, state="init"), **free),
        "trained": Row("sensitivity, trained\n(scale free)", 2.0, partial(_sensitivities, state="pretrained"), **free),
        "alpha": Row("alpha / uniform", 1.8, partial(_ratios, quantity="alpha"), _ones, "mean weight [Gu]", log=True),
        "swap": Row(
            "sensitivity,\nswapped / not",
            1.8,
            partial(_ratios, quantity="swap"),
            _ones,
            "mean embedding at 0",
            log=True,
        ),
        "leakage": Row("share of leakage", 1.8, _shares, _share_axis, "early queries, log form", limits=SHARES),
    }
    if any(ds.sizes["variant"] > 1 for ds in found.values()):
        rows["without"] = Row("toys at init\n(scale free)", 1.8, partial(_variants, training="init"), **free)
        rows["taught"] = Row("retrieval toys\n(scale free)", 1.8, partial(_variants, training="retrieval"), **free)
    return saved_grid(found, rows, _said(found), path=path, **SIZES)


def _sensitivities(ds: xr.Dataset, state: str) -> list[Curve]:
    """The model in a state, matched toys and theory."""
    curves = beside(ds, "sensitivity")
    trainings = ("init", "grown") if state == "init" else ("retrieval", "in-context")
    theories = ("kernel", "cesaro") if state == "init" else ("kernel",)
    found = having(curves, kind="model", which=state)
    for training in trainings:
        found += map(_marked, having(curves, variant=MATCHED, which=training))
    for theory in theories:
        found += having(curves, kind="theory", which=theory, state=state)
    return list(map(_coarse, over_means(found, ds.sizes["point"])))


def _ratios(ds: xr.Dataset, quantity: str) -> list[Curve]:
    curves = beside(ds, quantity)
    toys = [curve for curve in having(curves, variant=MATCHED) if curve.of["which"] != "grown"]
    return list(map(_coarse, [*having(curves, kind="model"), *map(_marked, toys)]))


def _variants(ds: xr.Dataset, training: str) -> list[Curve]:
    """Toys that lack one ingredient, beside the matched one."""
    curves, found = beside(ds, "sensitivity"), []
    for variant, style in VARIANTS.items():
        for curve in having(curves, variant=variant, which=training):
            found.append(replace(curve, style=style, label=style.label))
    return list(map(_coarse, over_means(found, ds.sizes["point"])))


def _marked(curve: Curve) -> Curve:
    return replace(curve, marked=2.2, width=1.0)


def _coarse(curve: Curve) -> Curve:
    """Neighbours in twos, threes, ... of long curves; the ends as they are."""
    if len(curve.y) <= MOST:
        return curve
    y = np.where(curve.y > 0, curve.y, np.nan)
    inner = np.array_split(np.arange(1, len(y) - 1), MOST - 2)
    x, y = (np.array([v[0], *(v[n].mean() for n in inner), v[-1]]) for v in (curve.x, y))
    return replace(curve, x=x, y=y)


def _shares(ds: xr.Dataset) -> list[Curve]:
    """Shares of mask and residual stream in the early band, of the model and of matched toys, as means over seeds."""
    found = []
    for shift, (source, style) in zip((-0.12, 0.12), TOY_SOURCES.items(), strict=True):
        every = []
        for kind, where in HOLDERS.values():
            at = where | {"source": source}
            values = [ds[f"{kind}_leakage_share{end}"].sel(at).values for end in ("", "_low", "_high")]
            known = [one[~np.isnan(one)] for one in values]
            every.append([float(one.mean()) if one.size else np.nan for one in known])
        value, low, high = np.array(every).T
        x = np.arange(len(HOLDERS)) + shift
        found.append(Curve(x, value, style, low, high, kind="points", label=style.label))
    return found


def _share_axis(cell: Axes, _: xr.Dataset) -> None:
    cell.set_xticks(range(len(HOLDERS)), list(HOLDERS))
    cell.set_xlim(-0.6, len(HOLDERS) - 0.4)
    cell.axhline(0, color=GREY, linewidth=0.8)
    ruled(cell)


def _positions(cell: Axes, _: xr.Dataset) -> None:
    """Every row has its tick labels; what the axis is stands below the last row alone."""
    position_axis(cell, below=True)
    if not cell.get_subplotspec().is_last_row():  # pyright: ignore[reportOptionalMemberAccess]
        cell.set_xlabel("")


def _ones(cell: Axes, ds: xr.Dataset) -> None:
    cell.axhline(1, color=GREY, linewidth=0.8)
    _positions(cell, ds)


def _said(found: Mapping[str, xr.Dataset]) -> list[str]:
    first = next(iter(found.values()))
    quick = ["QUICK setting"] if any(ds.attrs.get("quick") for ds in found.values()) else []
    lengths = " / ".join(dict.fromkeys(str(ds.sizes["position"]) for ds in found.values()))
    idle = [name for name, ds in found.items() if toys_learnt(ds, MATCHED, "in-context") != "trained"]
    return [
        *quick,
        f"models: T = {lengths}, {first.sizes['prompt']} prompts; toys: {first.sizes['point']} positions, "
        "same depth, heads, mask, encoding",
        f"retrieval: one toy for each position asked for, {'geometric mean' if elastic(first) else 'rms'} over them",
        "curves: geometric means over prompts and seeds; sensitivities over their own geometric mean",
        *([f"in-context toys that are not trained, and say nothing: of {', '.join(idle)}"] if idle else []),
    ]
