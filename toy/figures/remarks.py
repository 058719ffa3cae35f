"""Positions along one axis and models of width 1, by kernel; learning rates by a token's share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from probes.figures.style import BLUE, GREEN, VERMILLION

from ..experiments.rules import setting
from .sheet import barred, entry, files, grid, sheet, wanted

COLORS = (BLUE, VERMILLION, GREEN)
LOSSES = {"share_loss": "as drawn", "even_loss": "all tokens alike"}
WIDTH = 9.0
LEAST = 1e-12  # of a relative perplexity; smaller ones are drawn at the edge
OFF = 0.12  # by which the learning rates' marks stand apart


def remarks_figure(ds: xr.Dataset, *, path: str | Path | None = None) -> Figure:
    """(perplexity - 1) / V of every case, and losses against the power of a token's share.

    Args:
        ds: a result of `headwater toy remarks`.
        path: where to save; see `save_figure`.

    Raises:
        InputError: the result is another one.
    """
    wanted(ds, {"relative", "share_loss"} <= set(ds), "cases and shares", "remarks")
    notes = [
        f"marks: median of {ds.sizes['seed']} seeds on fresh sequences, bars: their range; below {LEAST:g} at the edge",
        f"left: V = {setting(ds, 'vocabulary')}, {setting(ds, 'steps'):,} steps",
        f"right: V = {setting(ds, 'share_vocabulary')}, width 2, {setting(ds, 'share_steps'):,} steps",
    ]
    rates = ds["learning_rate"].values
    with sheet(ds, (WIDTH, 3.7), notes, dpi=140, path=path) as figure:
        cells: Any = figure.subplots(1, 3, width_ratios=(1.5, 1, 1))
        _cases(cells[0], ds)
        for cell, (name, said) in zip(cells[1:], LOSSES.items(), strict=True):
            x = np.arange(ds.sizes["by_share"])
            for n, color in enumerate(COLORS[: len(rates)]):
                values = ds[name].isel(learning_rate=n).transpose("seed", "by_share").values
                barred(
                    cell,
                    x + OFF * (2 * n - len(rates) + 1),
                    values,
                    color,
                    bar=1.2,
                    linestyle="",
                    marker="o",
                    markersize=4,
                )
            cell.set_xticks(x, [f"{power:g}" for power in ds["by_share"].values])
            cell.set(xlabel="power of the share", ylabel=f"loss, {said} (nats)", xlim=(-0.5, len(x) - 0.5))
            cell.set_ylim(bottom=0)
            grid(cell)
        handles = [
            entry(f"rate {rate:g}", color=color, linestyle="", marker="o", markersize=4)
            for rate, color in zip(rates, COLORS, strict=False)
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    return figure


def _cases(cell: Axes, ds: xr.Dataset) -> None:
    names = [str(name) for name in ds["case"].values]
    for n, color in enumerate(COLORS[: ds.sizes["learning_rate"]]):
        relative = ds["relative"].isel(learning_rate=n).transpose("case", "seed").clip(LEAST)
        for row, values in enumerate(relative.values):
            y = row + OFF * (2 * n - ds.sizes["learning_rate"] + 1)
            cell.hlines(y, values.min(), values.max(), color=color, linewidth=1.2)
            cell.plot(np.median(values), y, linestyle="", marker="o", markersize=4, color=color)
    cell.set_xscale("log")
    cell.set_yticks(range(len(names)), [name.replace(" with ", "\nwith ") for name in names], fontsize=7)
    cell.set_xlim(left=LEAST)
    cell.set_ylim(len(names) - 0.5, -0.5)
    cell.set_xlabel("(perplexity - 1) / V")
    grid(cell, "both")


def draw(ds: xr.Dataset, path: Path) -> list[Path]:
    """PATH.png and PATH.svg."""
    remarks_figure(ds, path=path)
    return files(path)
