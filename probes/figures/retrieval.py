"""Recall by depth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .draw import Row, ruled, saved_grid
from .series import mechanism_curves, recall_curves
from .style import facts, option, results_of

NEEDS = {"log_p": ("context", "depth"), "control": ("context", "depth"), "exact": ("context", "depth")}


def retrieval_figure(results: xr.Dataset | Mapping[str, xr.Dataset], *, path: str | Path | None = None) -> Figure:
    """Log probability of the value and share of exact answers over the depth of the pair, one column per model.

    Where a result has a mechanism, also what the value's log odds depend on, and through which paths.

    Args:
        results: results of `retrieval`, by the model's name; or one of them.
        path: where to save; see `save_figure`.

    Raises:
        InputError: no results, or one of another probe.
    """
    results = results_of(results, "retrieval", NEEDS)
    rows = {
        "log_p": Row("log p of the value (nat)", 1.9, lambda ds: recall_curves(ds, "log_p", "control"), _depths),
        "exact": Row("exact answers", 1.6, lambda ds: recall_curves(ds, "exact"), _shares),
    }
    if explained := any("sensitivity" in ds for ds in results.values()):
        parts, paths = ("pair", "control", "others", "position 0"), ("cut", "through_first")
        rows["exact"] = replace(rows["exact"], axis=_inner_shares)
        rows["parts"] = Row("sensitivity (nat)", 2.1, lambda ds: mechanism_curves(ds, *parts), _depths, log=True)
        rows["paths"] = Row("the pair's, by path (nat)", 1.6, lambda ds: mechanism_curves(ds, *paths), _last, log=True)
    return saved_grid(results, rows, [*facts(results), *_explained(results, explained)], side=1.75, path=path)


def _depths(cell: Axes, ds: xr.Dataset) -> None:
    cell.set_xlim(-0.02, 1.02)
    ruled(cell)


def _shares(cell: Axes, ds: xr.Dataset) -> None:
    _inner_shares(cell, ds)
    _last(cell, ds)


def _inner_shares(cell: Axes, ds: xr.Dataset) -> None:
    _depths(cell, ds)
    cell.set_ylim(-0.03, 1.03)


def _last(cell: Axes, ds: xr.Dataset) -> None:
    _depths(cell, ds)
    cell.set_xlabel("depth of the pair, first to last")


def _explained(results: Mapping[str, xr.Dataset], mechanism: bool) -> list[str]:
    asked: Any = {name: [option(ds, one) for one in ("pairs", "keys", "digits")] for name, ds in results.items()}
    rungs = "; ".join(
        f"{name}: {pairs} pairs, keys {keys}, {digits} digits" for name, (pairs, keys, digits) in asked.items()
    )
    found = [rungs, "band: 95 % over couples of contexts; without key: the same question behind another list"]
    if mechanism:
        found.append("sensitivity: of the value's log odds against other values, per relative change of embeddings")
    return found
