"""Tokens on a circle that change places: circles, their roundness, exchanges and the loss; one exchange animated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from probes.figures.style import BLACK, BLUE, GREY, VERMILLION

from ..experiments.exchanges import SETTLED, TABLES
from ..experiments.rules import setting
from .animation import animate, plane
from .sheet import entry, files, grid, ranged, sheet, wanted

COLORS = {"constant": VERMILLION, "cosine": BLUE}
PAIR = (VERMILLION, BLUE)
WIDTH = 8.6


def exchanges_figure(ds: xr.Dataset, *, path: str | Path | None = None) -> Figure:
    """Roundness and gaps over training, exchanges per 1,000 steps, and the loss of two tokens that pass each other.

    A row per learning rate; models of the first residual setting.

    Args:
        ds: a result of `headwater toy exchanges`.
        path: where to save; see `save_figure`.

    Raises:
        InputError: the result is another one.
    """
    wanted(ds, "passing" in ds, "exchanges of tokens", "exchanges")
    residual = str(ds["residual"].values[0])
    one, rates = ds.sel(residual=residual), ds["learning_rate"].values
    note = f"residual stream {residual}; median over seeds and their range; right: after {SETTLED:.0%} of the training"
    with sheet(ds, (WIDTH, 2.0 * len(rates) + 1.3), [note], dpi=150, path=path) as figure:
        cells: Any = figure.subplots(len(rates), 4, squeeze=False, sharex="col")
        for row, rate in zip(cells, rates, strict=True):
            _row(row, one.sel(learning_rate=rate))
            row[0].set_ylabel(f"rate {rate:g}\nradius: deviation / mean")
            row[1].set_ylabel("gaps: deviation / mean")
            row[2].set_ylabel("exchanges per 1,000 steps")
            row[3].set_ylabel("loss by token (nat)")
        for cell in cells[-1, :3]:
            cell.set_xlabel("step")
        cells[-1, 3].set_xlabel("steps from the exchange")
        handles = [entry(f"{name} rate", color=COLORS[name]) for name in map(str, ds["schedule"].values)]
        handles += [
            entry("unembedding; the two tokens", color=GREY),
            entry("embedding; others", color=GREY, linestyle=":"),
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    return figure


def _row(row: Any, ds: xr.Dataset) -> None:
    x = ds["point"].values
    for name in map(str, ds["schedule"].values):
        one, color = ds.sel(schedule=name), COLORS[name]
        for cell, measure in zip(row, ("roundness", "gap_spread"), strict=False):
            for table, style in zip(TABLES, (":", "-"), strict=True):
                ranged(cell, x, one[measure].sel(table=table).values, color, alpha=0.12, linestyle=style, linewidth=1.1)
        each = one["exchanges"].values * 1000 / np.diff(x, prepend=0)
        ranged(row[2], x[1:], each[:, 1:], color, alpha=0.12, linewidth=1.1)
        for who, style in zip(ds["who"].values, ("-", ":"), strict=True):
            known = one["passing"].sel(who=who).dropna("seed")
            if known.sizes["seed"]:
                ranged(row[3], ds["lag"].values, known.values, color, alpha=0.12, linestyle=style, linewidth=1.1)
    for cell in row[:2]:
        cell.set_ylim(0, 1.5)
    row[2].set_yscale("symlog", linthresh=10)
    for cell in row:
        grid(cell)


def exchange_animation(ds: xr.Dataset, *, path: str | Path) -> Path:
    """Write an animated GIF of the unembedding's rows around the exchange that cost its two tokens most; its path.

    Raises:
        InputError: the result is another one, or the path cannot be written to.
    """
    wanted(ds, "frame_rows" in ds, "frames of an exchange", "exchanges")
    rows, steps, losses = (ds[name].values for name in ("frame_rows", "frame_step", "frame_loss"))
    pair = ds["frame_pair"].values
    reach = 1.1 * float(np.abs(rows).max())

    def picture(cell: Axes, n: int) -> None:
        plane(cell, reach)
        cell.plot(*rows[n].T, linestyle="", marker=".", markersize=3.5, color=GREY, zorder=2)
        for token, color in zip(pair, PAIR, strict=True):
            cell.plot(*rows[: n + 1, token].T, color=color, linewidth=0.8, alpha=0.5, zorder=3)
            cell.plot(*rows[n, token], marker="o", markersize=5.5, color=color, zorder=4)
        cell.set_title(f"step {int(steps[n]):,}, loss of the two {losses[n]:.1f} nat", fontsize=9, color=BLACK)

    return animate(Path(path), [(picture, n) for n in range(len(rows))], PAIR)


def exchanges_circles_figure(ds: xr.Dataset, *, path: str | Path | None = None) -> Figure:
    """The rows of the unembedding around one exchange: before, at it and after; its tokens in colour.

    Arguments and errors as in `exchanges_figure`.
    """
    wanted(ds, "frame_rows" in ds, "frames of an exchange", "exchanges")
    rows, lags, pair = ds["frame_rows"].values, ds["frame"].values, ds["frame_pair"].values
    shown = [0, len(lags) // 2, len(lags) - 1]
    note = f"first model at rate {setting(ds, 'learning_rate')[-1]:g}; the exchange that cost its two tokens most"
    with sheet(ds, (WIDTH * 0.8, 3.2), [note], dpi=150, path=path) as figure:
        cells: Any = figure.subplots(1, len(shown), sharex=True, sharey=True)
        for cell, n in zip(cells, shown, strict=True):
            plane(cell, 1.1 * float(np.abs(rows).max()))
            cell.plot(*rows[n].T, linestyle="", marker=".", markersize=3.5, color=GREY)
            for token, color in zip(pair, PAIR, strict=True):
                cell.plot(*rows[n, token], marker="o", markersize=5, color=color)
            cell.set_title(
                f"step {int(ds['frame_step'].values[n]):,}: {float(ds['frame_loss'][n]):.1f} nat", fontsize=9
            )
    return figure


def draw(ds: xr.Dataset, path: Path) -> list[Path]:
    """PATH and, where an exchange was found to show, PATH-circles as .png and .svg, PATH-one.gif."""
    exchanges_figure(ds, path=path)
    if "frame_rows" not in ds:
        return files(path)
    circles, one = path.with_name(f"{path.name}-circles"), path.with_name(f"{path.name}-one.gif")
    exchanges_circles_figure(ds, path=circles)
    return [*files(path), *files(circles), exchange_animation(ds, path=one)]
