"""Initialization against training: trained ends on initial ones, how they move, and whole profiles by checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from probes.claims.rules import told
from probes.figures.style import BLACK, CYCLE, GREY, depth_color
from probes.results.ushape import middle_of

from ..experiments.births_claims import SHOWN, Fit, regressed, with_behind
from .sheet import entry, files, grid, ranged, sheet, wanted

WIDTH = 8.6
MARKS = {"uniform": "o", "branches": "s", "flat": "D"}
COLUMNS = 3  # of profiles


def births_figure(ds: xr.Dataset, *, path: str | Path | None = None) -> Figure:
    """Trained ends of the profile against initial ones, over training, and the slope at every checkpoint, a row each.

    The third row has the primacy without position 0.

    Args:
        ds: a result of `headwater toy births`.
        path: where to save; see `save_figure`.

    Raises:
        InputError: the result is another one.
    """
    wanted(ds, "kernel" in ds and "primacy" in ds, "trained profiles by initialization", "births")
    colors = _colors(ds)
    notes = [
        "left: a mark per run, least squares over runs; middle: medians over seeds and their range",
        "right: slopes of logarithms over runs, without covariates, 95 % intervals; grey: what counts as none",
    ]
    ds = with_behind(ds)
    with sheet(ds, (WIDTH, 9.0), notes, dpi=120, path=path) as figure:
        cells: Any = figure.subplots(3, 3, width_ratios=[1.15, 1.15, 0.8])
        for row, end in zip(cells, SHOWN, strict=True):
            _against(row[0], ds, end, colors)
            _course(row[1], ds, end, colors)
            _slopes(row[2], ds, end)
        handles = [
            entry(kind, color=color, marker=MARKS[kind.rpartition("-")[0]], markersize=4)
            for kind, color in colors.items()
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=min(6, len(handles)))
    return figure


def _colors(ds: xr.Dataset) -> dict[str, str]:
    kinds = [str(kind) for kind in ds["kind"].values]
    return {kind: CYCLE[n % len(CYCLE)] for n, kind in enumerate(kinds)}


def _against(cell: Axes, ds: xr.Dataset, end: str, colors: dict[str, str]) -> None:
    first, last = ds[end].isel(step=0), ds[end].isel(step=-1)
    for kind, color in colors.items():
        mark = MARKS[kind.rpartition("-")[0]]
        cell.plot(first.sel(kind=kind), last.sel(kind=kind), linestyle="", marker=mark, color=color, markersize=4.5)
    reach = np.array([float(first.min()), float(first.max())])
    cell.plot(reach, reach, color=GREY, linewidth=0.9, linestyle=":", zorder=1)
    fit = regressed(ds, end, -1)
    if np.isfinite(fit.slope.value):
        logs = np.log(reach)
        known = np.isfinite((first * last).values)
        middle = np.log(last.values[known]).mean() - fit.slope.value * np.log(first.values[known]).mean()
        cell.plot(reach, np.exp(middle + fit.slope.value * logs), color=BLACK, linewidth=1.1, zorder=2)
    cell.set(xscale="log", yscale="log", xlabel=f"{end} at initialization", ylabel=f"{end}, trained")
    cell.set_title(_said(fit), fontsize=9)
    _plain(cell, "x", "y")


def _said(fit: Fit) -> str:
    return "" if np.isnan(fit.slope.value) else f"slope {told(fit.slope, '.2f')}"


def _course(cell: Axes, ds: xr.Dataset, end: str, colors: dict[str, str]) -> None:
    for kind, color in colors.items():
        runs = ds[end].sel(kind=kind).dropna("seed", how="all").transpose("seed", "step").values
        ranged(cell, ds["step"].values, runs, color, alpha=0.15, linewidth=1.2, marker="o", markersize=2.5)
    _steps(cell, ds)
    cell.set(yscale="log", ylabel=end)
    _plain(cell, "y")


def _slopes(cell: Axes, ds: xr.Dataset, end: str) -> None:
    cell.axhspan(-0.1, 0.1, color=GREY, alpha=0.25, linewidth=0)
    for n, step in enumerate(ds["step"].values):
        slope = regressed(ds, end, n).slope
        if n and np.isfinite(slope.value):
            cell.vlines(step, slope.low, slope.high, color=BLACK, linewidth=1.2)
            cell.plot(step, slope.value, color=BLACK, marker="o", markersize=4)
    _steps(cell, ds)
    cell.axhline(1, color=GREY, linewidth=0.9, linestyle=":")
    cell.set_ylabel(f"slope of {end}")
    grid(cell)


def _steps(cell: Axes, ds: xr.Dataset) -> None:
    steps = ds["step"].values
    cell.set_xscale("symlog", linthresh=float(steps[1]))
    cell.set_xticks(steps, [f"{int(step):,}" for step in steps], rotation=45)
    cell.minorticks_off()
    cell.set_xlabel("step")


def _plain(cell: Axes, *axes: str) -> None:
    """Numbers as they are read, on logarithmic axes."""
    for name in axes:
        axis = getattr(cell, f"{name}axis")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    grid(cell)


def births_profiles_figure(ds: xr.Dataset, *, path: str | Path | None = None) -> Figure:
    """A panel per kind of initialization: the profile over positions at every checkpoint, and theory's at step 0.

    Arguments and errors as in `births_figure`.
    """
    wanted(ds, "kernel" in ds and "primacy" in ds, "trained profiles by initialization", "births")
    kinds, steps = [str(kind) for kind in ds["kind"].values], ds["step"].values
    across = min(COLUMNS, len(kinds))
    down = -(-len(kinds) // across)
    note = "elasticity over its median in the middle half: geometric means over prompts and seeds"
    with sheet(ds, (WIDTH, 2.3 * down + 1.2), [note], dpi=150, path=path) as figure:
        cells: Any = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
        for cell, kind in zip(cells.flat, kinds, strict=False):
            for n in range(len(steps)):
                runs = ds["elasticity"].sel(kind=kind).isel(step=n).dropna("seed", how="all")
                curve = np.exp(np.log(runs.transpose("seed", ...).values).mean(0))
                cell.plot(ds["position"], _over_middle(curve), color=depth_color(n, len(steps)), linewidth=1.1)
            cell.plot(ds["position"], _over_middle(ds["kernel"].sel(kind=kind).values), color=BLACK, linestyle=":")
            cell.set(title=kind, yscale="log")
            _plain(cell, "y")
        for cell in cells[-1]:
            cell.set_xlabel("position")
        for cell in cells[:, 0]:
            cell.set_ylabel("over the middle")
        for cell in cells.flat[len(kinds) :]:
            cell.set_visible(False)
        handles = [entry(f"step {int(s):,}", color=depth_color(n, len(steps))) for n, s in enumerate(steps)]
        handles.append(entry("theory at step 0", color=BLACK, linestyle=":"))
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    return figure


def _over_middle(curve: np.ndarray) -> np.ndarray:
    return curve / middle_of(curve)


def draw(ds: xr.Dataset, path: Path) -> list[Path]:
    """PATH and PATH-profiles as .png and .svg."""
    births_figure(ds, path=path)
    profiles = path.with_name(f"{path.name}-profiles")
    births_profiles_figure(ds, path=profiles)
    return [*files(path), *files(profiles)]
