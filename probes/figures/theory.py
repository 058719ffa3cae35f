"""Measured profiles of fresh models with all theories, and measured against the kernel."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from ..errors import InputError
from ..results.curves import Profile, profiles
from .jacobian import caption, draw_curve, draw_theory, theories_in, theory_curve
from .style import (
    DPI,
    LARGEST,
    STYLE,
    THEORIES,
    WIDEST,
    coinciding,
    condition_legend,
    condition_style,
    handle,
    legend_columns,
    log_axis,
    of_coinciding,
    position_axis,
    save_figure,
    short,
)

LINES = (  # a mean square is what the kernel predicts
    "line: root mean square over prompts, geometric mean over seeds",
    "band: smallest to largest seed, or two standard errors of a single estimate",
)


def theory_figure(results: xr.Dataset | Mapping[str, xr.Dataset], *, path: str | Path | None = None) -> Figure:
    """Measured profiles of fresh models with all theories; below, measured against the kernel, at birth and trained.

    One column per model. Above: sensitivity at birth, band and line as in `jacobian_figure`, and every theory in the
    result. Below: the measured profile divided by the second-moment kernel with its score path, one where prediction is
    right; for trained weights the ratio is what training has changed.

    Args:
        results: results of a study with theories, by the model's name; or one of them.
        path: where to save; see `save_figure`.

    Raises:
        InputError: no results, or one without theories.
    """
    if isinstance(results, xr.Dataset):
        results = {short(str(results.attrs.get("model", "model"))): results}
    if not results or not all(theories_in(ds, tuple(THEORIES)) for ds in results.values()):
        raise InputError("no theories in the results to draw; give results of headwater theory")
    curves = {name: profiles(ds) for name, ds in results.items()}
    theories = [t for t in THEORIES if any(f"theory_{t}" in ds for ds in results.values())]
    with matplotlib.rc_context(STYLE):
        columns = len(results)
        width = max(6.2, 3.0 * columns + 0.4)
        handles = condition_legend(curves) + [handle(THEORIES[t], THEORIES[t].label) for t in theories]
        called = {str(one.get_color()): str(one.get_label()) for one in handles}
        in_row = legend_columns(handles, width)
        figure = Figure(figsize=(width, 5.0 + 0.18 * -(-len(handles) // in_row)), dpi=DPI, layout="constrained")
        axes = figure.subplots(2, columns, sharex=True, sharey="row", squeeze=False, height_ratios=(1.5, 1))
        for (name, found), above, below in zip(curves.items(), axes[0], axes[1], strict=True):
            above.set_title(name)
            for condition, runs in found.items():
                if condition == "init":
                    style = condition_style(condition)
                    draw_curve(above, runs, style, called[style.color])
                    for theory in theories_in(results[name], theories):
                        draw_theory(above, theory_curve(results[name], theory, condition), THEORIES[theory])
                if "theory_score_path" in results[name]:
                    kernel = theory_curve(results[name], "score_path", condition)
                    kernel = np.where(kernel > 0, kernel, np.nan)
                    ratios = [Profile(run.mean / kernel, run.stderr / kernel, run.spread) for run in runs]
                    draw_curve(below, ratios, condition_style(condition))
            below.axhline(1, color="#555555", linewidth=0.8, zorder=1)
            position_axis(above, below=False)
            position_axis(below, below=True)
        axes[0, 0].set_ylabel(r"sensitivity at birth  $\|J_j\|_F\,/\,\sqrt{d}$")
        axes[1, 0].set_ylabel("measured / kernel")
        log_axis(axes[0, 0])
        log_axis(axes[1, 0])
        signs = coinciding(list(axes[0]), handles)
        figure.legend(handles=handles, loc="outside upper center", ncols=in_row)
        figure.supxlabel(caption(results, width, of_coinciding(signs), LINES), fontsize=7, color="#555555")
        if path is not None:
            save_figure(figure, path, dpi=min(DPI, int(WIDEST / width)), largest=LARGEST)
    return figure
