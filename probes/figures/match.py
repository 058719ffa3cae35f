"""Toys beside a model: profiles over the position fraction, at initialization and after training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from ..charts import FRESH, GREEN, ORANGE, PURPLE, THEORY, TRAINED, Series, curves, position_axis, save, sheet
from ..measures.agreement import averaged, fractions, taken_at
from ..measures.match_result import MATCHED, fewest_points, samples, toys_learnt
from .style import results_of

NEEDS = {
    "model_sensitivity": ("state", "seed", "prompt", "position"),
    "toy_uniform": ("variant", "training", "point"),
}
MODELS = 2  # rows; four panels are what a figure shows
WIDE = 7.0  # decades of an axis: a window's models and toys are that far apart
TITLES = {"init": "at initialization", "pretrained": "after training"}
# What is drawn in each state of a model beside it: as in `match_result.others_of`, with words, colour and line.
BESIDE = {
    "init": (
        ((MATCHED, "init"), Series("fresh toys", (), GREEN)),
        (("theory", "kernel"), Series("second-moment kernel", (), THEORY, line=":")),
        (("theory", "cesaro"), Series("N^L", (), THEORY, line="--", width=1.0)),
    ),
    "pretrained": (
        ((MATCHED, "retrieval"), Series("retrieval toys", (), ORANGE, marker="o")),
        ((MATCHED, "in-context"), Series("in-context toys", (), PURPLE, marker="o")),
        (("theory", "kernel"), Series("second-moment kernel", (), THEORY, line=":")),
    ),
}
CAPTION = (
    "Elasticity, geometric means over prompts and seeds, each curve over its own geometric mean: a toy's unit is its own. "
    "Trained toys are drawn where they pass the gate."
)


def match_figure(results: xr.Dataset | Mapping[str, xr.Dataset], *, path: str | Path | None = None) -> Figure:
    """Elasticity of models and of the toys that match them over the position fraction, and theory; one row per model.

    Args:
        results: results of `match`, by the model's name, the first two of which are drawn; or one of them.
        path: where to save, as PNG and SVG.

    Raises:
        InputError: no results, or one of another study.
    """
    shown = list(results_of(results, "match", NEEDS).items())[:MODELS]
    figure, cells = sheet(len(shown), len(TITLES), height=2.5, caption=CAPTION)
    for row, (name, ds) in zip(cells, shown, strict=True):
        for cell, (state, title) in zip(row, TITLES.items(), strict=True):
            curves(cell, profiles(ds, state), log=True, decades=WIDE)
            position_axis(cell)
            cell.set_title(f"{name}\n{title}", fontsize=9)  # in one line long names leave the sheet
        row[0].set_ylabel("sensitivity (scale free)")
    if path is not None:
        save(figure, path)
    return figure


def profiles(ds: xr.Dataset, state: str) -> list[Series]:
    """The model in a state, matched toys that do their task, and theory; each over its mean where all are above zero."""
    model = ("model", state), Series("model", (), FRESH if state == "init" else TRAINED)
    lines: list[tuple[Series, np.ndarray]] = []
    for of, look in (model, *BESIDE[state]):
        values = samples(ds, "sensitivity", of, state)
        if values is not None and toys_learnt(ds, *of) == "trained":
            lines.append((look, averaged(values)))
    coarse = np.stack([taken_at(curve, min(fewest_points(ds), len(curve))) for _, curve in lines])
    common = np.all(coarse > 0, 0)
    means = np.exp(np.log(coarse[:, common]).mean(1)) if common.any() else np.ones(len(lines))
    return [
        replace(look, y=curve / mean, x=fractions(len(curve))) for (look, curve), mean in zip(lines, means, strict=True)
    ]
