"""Measured profiles of fresh models with all theories, and measured against predicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..errors import InputError
from ..results.curves import Profile, rms_profiles
from .draw import Row, by_fraction, saved_grid
from .jacobian import rests_on, theories_in, with_names
from .palette import THEORIES, condition_style
from .series import MEASURED, Curve, having, profile, profiles_with
from .style import by_name, position_axis

LINES = (  # a mean square is what the kernel predicts
    "line: root mean square over prompts, geometric mean over seeds",
    "band: smallest to largest seed, or two standard errors of a single estimate",
    "middle: predicted / measured at initialization; what lies beyond a factor of 2 is beyond the frame",
)
ABOVE = ("score_path", "cesaro")  # of theories; the other kernels would lie upon the first
FRAME = (0.5, 2.0)


def theory_figure(results: xr.Dataset | Mapping[str, xr.Dataset], *, path: str | Path | None = None) -> Figure:
    """Measured profiles of fresh models with theories; every theory against measured; measured against the kernel.

    One column per model. Above: sensitivity at initialization, band and line as in `jacobian_figure`, the second-moment
    kernel with its score path and N^L. Middle: every theory in the result divided by the measured profile, one where it is
    right. Below: the measured profile divided by the second-moment kernel; for trained weights the ratio is what training
    has changed.

    Args:
        results: results of a study with theories, by the model's name; or one of them.
        path: where to save; see `save_figure`.

    Raises:
        InputError: no results, or one without theories.
    """
    results = by_name(results)
    if not results or not all(theories_in(ds, THEORIES) for ds in results.values()):
        raise InputError("no theories in the results to draw; give results of headwater theory")
    curves = {name: profiles_with(ds, tuple(THEORIES), rms_profiles) for name, ds in results.items()}
    curves = {name: _called(by_fraction(found)) for name, found in with_names(curves).items()}
    fresh = {name: having(found, condition="init") for name, found in curves.items()}
    above = {
        name: [curve for curve in found if curve.of["curve"] in (MEASURED, *ABOVE)] for name, found in fresh.items()
    }
    below = {name: _against_kernel(ds, curves[name]) for name, ds in results.items()}
    rows = {
        "above": Row("sensitivity at initialization\n" + r"$\|J_j\|_F\,/\,\sqrt{d}$", 2.5, above, _positions, log=True),
        "told": Row("predicted / measured", 1.8, {name: _told(f) for name, f in fresh.items()}, _framed, log=True),
        "ratio": Row("measured / kernel", 1.8, below, _last, log=True),
    }
    return saved_grid(results, rows, rests_on(results, lines=LINES), side=2.0, path=path)


def _called(curves: list[Curve]) -> list[Curve]:
    """Theories by their own names: here they stand beside fresh models alone."""
    return [one if one.of["curve"] == MEASURED else replace(one, label=one.style.label) for one in curves]


def _told(curves: list[Curve]) -> list[Curve]:
    """Each theory over what was measured."""
    measured = [curve for curve in curves if curve.of["curve"] == MEASURED]
    return [
        replace(curve, y=np.divide(curve.y, one.y, out=np.full(len(one.y), np.nan), where=one.y > 0), ends="")
        for one in measured
        for curve in curves
        if curve.of["curve"] != MEASURED
    ]


def _against_kernel(ds: xr.Dataset, curves: list[Curve]) -> list[Curve]:
    """The measured profile of every condition over the kernel's."""
    found = []
    for condition, runs in rms_profiles(ds).items() if "theory_score_path" in ds else ():
        (told,) = having(curves, condition=condition, curve="score_path")
        (measured,) = having(curves, condition=condition, curve=MEASURED)
        kernel = np.where(told.y > 0, told.y, np.nan)
        ratios = [Profile(run.mean / kernel, run.stderr / kernel, run.spread) for run in runs]
        one = profile(ratios, condition_style(condition), condition=condition)
        found.append(replace(one, x=measured.x, label=measured.label, ends="o"))
    return found


def _positions(cell: Axes, _: xr.Dataset) -> None:
    position_axis(cell, below=False)
    cell.tick_params(labelbottom=False)


def _framed(cell: Axes, ds: xr.Dataset) -> None:
    cell.axhline(1, color="#555555", linewidth=0.8, zorder=1)
    cell.set_ylim(*FRAME)
    _positions(cell, ds)


def _last(cell: Axes, _: xr.Dataset) -> None:
    cell.axhline(1, color="#555555", linewidth=0.8, zorder=1)
    position_axis(cell, below=True)
