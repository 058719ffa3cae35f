"""Toys beside a model: profiles over the position fraction, at initialization and after training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from ..measures.match_result import TASKS, fewest_points, points_of, toys_learnt
from .draw import draw, entries
from .series import MATCHED, Curve, beside, having, over_means
from .style import (
    DPI,
    LARGEST,
    STYLE,
    blank,
    either,
    legend_columns,
    log_axis,
    position_axis,
    results_of,
    save_figure,
    small_print,
)

NEEDS = {
    "model_sensitivity": ("state", "seed", "prompt", "position"),
    "toy_uniform": ("variant", "training", "point"),
}
MOST = 130  # points of a curve that are drawn
WIDE = 7  # decades of an axis: a window's models and toys are that far apart
WIDTH, HEIGHT = 9.6, 2.5  # inches of the figure, and of a model's row
# A column for each state of the model: its title, and the toys and theories beside the model there.
COLUMNS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "init": ("at initialization", ("init",), ("kernel", "cesaro")),
    "pretrained": ("after training", ("retrieval", "in-context"), ("kernel",)),
}


def match_figure(results: xr.Dataset | Mapping[str, xr.Dataset], *, path: str | Path | None = None) -> Figure:
    """Elasticity of models and of the toys that match them over the position fraction, and theory; one row per model.

    On the left fresh weights, beside fresh toys, the second-moment kernel and N^L; on the right trained ones, beside toys
    that have learnt their task and the kernel. Every curve is divided by its geometric
    mean, where all curves of a panel are above zero: a toy's unit is its own. Trained toys have a mark at every position.
    Attention weights, swaps, leakage and toys that lack one ingredient stand in the study's table.

    Args:
        results: results of `match`, by the model's name; or one of them.
        path: where to save; see `save_figure`.

    Raises:
        InputError: no results, or one of another study.
    """
    found = results_of(results, "match", NEEDS)
    with matplotlib.rc_context(STYLE):
        figure = blank((WIDTH, HEIGHT * len(found) + 0.9), DPI)
        cells = figure.subplots(len(found), len(COLUMNS), sharex=True, squeeze=False)
        shown: list[Curve] = []
        for n, (row, (name, ds)) in enumerate(zip(cells, found.items(), strict=True), 1):
            for cell, state in zip(row, COLUMNS, strict=True):
                curves = _profiles(ds, state)
                draw(cell, curves, log=True)
                position_axis(cell, below=n == len(found))
                log_axis(cell, WIDE)
                shown += curves
            row[0].set_ylabel(f"{name}\nsensitivity (scale free)")
        for cell, (title, *_) in zip(cells[0], COLUMNS.values(), strict=True):
            cell.set_title(title)
        handles = entries(shown)
        figure.legend(handles=handles, loc="outside upper center", ncols=legend_columns(handles, WIDTH))
        small_print(figure, _said(found))
        if path is not None:
            save_figure(figure, path, largest=LARGEST)
    return figure


def _profiles(ds: xr.Dataset, state: str) -> list[Curve]:
    """The model in a state, matched toys and theory."""
    curves, (_, trainings, theories) = beside(ds, "sensitivity"), COLUMNS[state]
    found = having(curves, kind="model", which=state)
    for training in (one for one in trainings if toys_learnt(ds, MATCHED, one) == "trained"):
        marked = 3.0 if training in TASKS else 0.0
        found += [replace(one, marked=marked, width=1.0) for one in having(curves, variant=MATCHED, which=training)]
    for theory in theories:
        found += having(curves, kind="theory", which=theory, state=state)
    return list(map(_coarse, over_means(found, fewest_points(ds))))


def _coarse(curve: Curve) -> Curve:
    """Neighbours in twos, threes, ... of long curves; the ends as they are."""
    if len(curve.y) <= MOST:
        return curve
    y = np.where(curve.y > 0, curve.y, np.nan)
    inner = np.array_split(np.arange(1, len(y) - 1), MOST - 2)
    x, y = (np.array([v[0], *(v[n].mean() for n in inner), v[-1]]) for v in (curve.x, y))
    return replace(curve, x=x, y=y)


def _said(found: Mapping[str, xr.Dataset]) -> list[str]:
    first = next(iter(found.values()))
    quick = ["QUICK setting"] if any(ds.attrs.get("quick") for ds in found.values()) else []
    lengths = either(ds.sizes["position"] for ds in found.values())
    idle = [
        f"{task} toys of {', '.join(names)}"
        for task in TASKS
        if (names := [name for name, ds in found.items() if toys_learnt(ds, MATCHED, task) != "trained"])
    ]
    sizes = ", ".join(f"{points_of(first, training)} {training}" for training in map(str, first["training"].values))
    return [
        *quick,
        f"models: T = {lengths}, {first.sizes['prompt']} prompts; positions of toys: {sizes}",
        "retrieval: one toy for each position asked for, geometric mean over them",
        "curves: geometric means over prompts and seeds, over their own geometric mean",
        *([f"left out, since they do not pass the gate: {'; '.join(idle)}"] if idle else []),
    ]
