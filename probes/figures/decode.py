"""What the stream says of position, and what erasing it does."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .draw import Row, layer_axis, ruled, saved_grid, zero_line
from .palette import VERMILLION, Style
from .series import Curve, decoded_curves
from .style import facts, option, results_of

NEEDS = {"r2": ("layer",), "r2_shuffled": ("layer",), "loss_change": ("erasure",), "kl": ("erasure",)}
ERASED = {
    "kl": "KL (nat)",
    "loss_change": "change of loss (nat)",
    "residual_change": "change of V(X) (nat²)",
    "recall_log_p_change": "change of recall,\nlog p (nat)",
}


def decode_figure(results: xr.Dataset | Mapping[str, xr.Dataset], *, path: str | Path | None = None) -> Figure:
    """R^2 of log(1 + i) over layers, and below what each erasure does, a column per model; intervals are 95 %.

    Args:
        results: results of `decode`, by the model's name; or one of them.
        path: where to save; see `save_figure`.

    Raises:
        InputError: no results, or one of another probe.
    """
    results = results_of(results, "decode", NEEDS)
    rows = {"r2": Row("R² of log(1 + i)", 1.9, decoded_curves, _layers)}
    for name, said in ERASED.items():
        if all(name in ds for ds in results.values()):
            rows[name] = Row(said, 1.3, partial(_points, name=name), _erasures, own=True)
    return saved_grid(results, rows, [*facts(results), *_explained(results)], side=1.75, path=path)


def _layers(cell: Axes, ds: xr.Dataset) -> None:
    layer_axis(cell, ds["layer"].values, "stream that block reads")
    ruled(cell)


def _points(ds: xr.Dataset, name: str) -> list[Curve]:
    at = np.arange(ds.sizes["erasure"], dtype=float)
    low, high = (ds[f"{name}_{end}"].values for end in ("low", "high"))
    return [Curve(at, ds[name].values, Style("", VERMILLION, "", 4), low, high, "points")]


def _erasures(cell: Axes, ds: xr.Dataset) -> None:
    zero_line(cell)
    names = [str(name) for name in ds["erasure"].values]
    cell.set_xticks(range(len(names)), names)
    cell.set_xlim(-0.6, len(names) - 0.4)


def _explained(results: Mapping[str, xr.Dataset]) -> list[str]:
    ds = next(iter(results.values()))
    where = "every block" if option(ds, "layer") is None else f"block {option(ds, 'layer')}"
    return [
        f"means: the {option(ds, 'rank')} leading directions of the position means erased at {where}; permuted: the "
        "same of permuted positions; random: as many drawn ones; direction: least-squares erasure of log(1 + i)",
        "documents held out; 95 % over documents, of recall over couples of lists",
    ]
