"""Sensitivity by input position, with predictions beside it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..errors import InputError
from ..results.curves import Profile, band, profiles
from ..results.dataset import drawn_from, number_types, quickly, recorded
from ..results.profiles import comparable, mean_profiles
from .style import (
    CHARACTERS,
    CYCLE,
    DPI,
    LARGEST,
    STYLE,
    THEORIES,
    Style,
    coinciding,
    condition_legend,
    condition_style,
    handle,
    legend_columns,
    log_axis,
    of_coinciding,
    position_axis,
    save_figure,
    seeds_note,
    short,
)

IN_JACOBIAN_FIGURE = ("score_path", "values")  # of theories; the others would crowd it


def jacobian_figure(
    results: xr.Dataset | Mapping[str, xr.Dataset], *, overlay: bool = False, path: str | Path | None = None
) -> Figure:
    """Sensitivity by input position, one panel per model, on a shared logarithmic axis.

    Lines are geometric means over prompts and seeds of the scale-free sensitivity (`probes.results.profiles`), so that
    conditions can be compared. Of several seeds the band reaches from the smallest to the largest. Around a single run
    it is two standard errors over documents. Dots mark the first and the last position, which a line alone hides
    against the frame. Zeros (out of a sliding window's reach) are left out.

    Args:
        results: results of `jacobian`, single or combined, by the model's name; or one of them.
        overlay: all models in one panel, a colour each; conditions differ in line style.
        path: where to save; see `save_figure`.

    Raises:
        InputError: no results, or one without sensitivities above zero.
    """
    if isinstance(results, xr.Dataset):
        results = {short(str(results.attrs.get("model", "model"))): results}
    if not results:
        raise InputError("no results to draw; give at least one")
    curves = {name: mean_profiles(ds) for name, ds in results.items()}
    for name, found in curves.items():
        if not any(np.any(profile.mean > 0) for runs in found.values() for profile in runs):
            raise InputError(f"the result of '{name}' has no sensitivity above zero; there is nothing to draw")

    with matplotlib.rc_context(STYLE):
        panels = 1 if overlay else len(curves)
        columns = panels if panels <= 3 else 2 if panels == 4 else 3
        rows = -(-panels // columns)
        width = max(6.2, 3.3 * columns + 0.4)
        handles = _overlay_legend(curves) if overlay else condition_legend(curves) + _baseline_legend(results, curves)
        in_row = legend_columns(handles, width)
        height = 2.6 * rows + 0.9 + 0.18 * -(-len(handles) // in_row)
        figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
        axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        cells = list(axes.flat)
        for cell in cells[panels:]:
            cell.set_visible(False)
        for index, (name, found) in enumerate(curves.items()):
            cell = cells[0 if overlay else index]
            for condition, runs in found.items():
                style = condition_style(condition)
                if overlay:
                    style = style._replace(color=CYCLE[index % len(CYCLE)], line=_overlay_line(condition))
                if overlay:
                    draw_curve(cell, runs, style)
                    continue
                draw_curve(cell, runs, style, style.label + seeds_note(curves, condition))
                for theory in theories_in(results[name], IN_JACOBIAN_FIGURE):
                    told = band([run.mean for run in mean_profiles(results[name], f"theory_{theory}")[condition]])
                    draw_theory(cell, told.centre, _baseline(theory, condition))
            if not overlay:
                cell.set_title(name)
        for index, cell in enumerate(cells[:panels]):
            position_axis(cell, below=index + columns >= panels)
            if index % columns == 0:
                cell.set_ylabel(sensitivity_label(results))
        log_axis(cells[0])
        signs = [] if overlay else coinciding(cells[:panels], handles)
        figure.legend(handles=handles, loc="outside upper center", ncols=in_row)
        more = [*of_coinciding(signs), *_without_kernel(results)]
        figure.supxlabel(caption(results, width, more), fontsize=7, color="#555555")
        if path is not None:
            save_figure(figure, path, largest=LARGEST)
    return figure


def sensitivity_label(results: Mapping[str, xr.Dataset]) -> str:
    """Of the axis of `mean_profiles`."""
    free = all(map(comparable, results.values()))
    return r"sensitivity  $\|J_j\|_F\,/\,\sqrt{d}$" + r"$\,\cdot\,$rms$(x)\,/\,$rms$(h)$" * free


def draw_curve(cell: Axes, runs: Sequence[Profile], style: Style, label: str = "_") -> None:
    """One condition: line, band, and dots at the ends; `label` is of the line."""
    means = np.stack([run.mean for run in runs])  # [seed, position]
    x = np.linspace(0, 1, means.shape[1])
    centre, low, high = band(means)
    positive = np.where(centre > 0, centre, np.nan)
    if len(runs) == 1:  # as the axis has it: errors of logarithms
        reach = np.exp(2 * runs[0].stderr / positive)
        low, high = positive / reach, positive * reach
    shaded = {"color": style.color, "alpha": 0.22, "linewidth": 0, "zorder": style.order - 2}
    cell.fill_between(x, low, high, where=centre > 0, **shaded)
    cell.plot(x, positive, color=style.color, linestyle=style.line, linewidth=1.3, zorder=style.order, label=label)
    cell.plot(x[[0, -1]], positive[[0, -1]], "o", color=style.color, markersize=3.6, zorder=style.order)


def theories_in(ds: xr.Dataset, wanted: Sequence[str]) -> list[str]:
    return [name for name in wanted if f"theory_{name}" in ds]


def theory_curve(ds: xr.Dataset, name: str, condition: str) -> np.ndarray:
    """A theory's curve [position] for one condition: over prompts and seeds as the measured ones."""
    if name == "cesaro":
        return ds[f"theory_{name}"].sel(condition=condition).values
    return band([profile.mean for profile in profiles(ds, f"theory_{name}")[condition]]).centre


def theory_style(theory: str, condition: str) -> Style:
    """How a theory is drawn beside a condition's curve: in black where it predicts, in the curve's colour as a baseline."""
    style = THEORIES[theory]
    return style._replace(color=condition_style(condition).color) if condition == "pretrained" else style


def draw_theory(cell: Axes, curve: np.ndarray, style: Style) -> None:
    x = np.linspace(0, 1, len(curve))
    shown = np.where(curve > 0, curve, np.nan)
    cell.plot(x, shown, color=style.color, linestyle=style.line, linewidth=1.2, zorder=style.order, label=style.label)
    cell.plot(x[[0, -1]], shown[[0, -1]], "_", color=style.color, markersize=7, zorder=style.order)


def _baseline_legend(
    results: Mapping[str, xr.Dataset], curves: Mapping[str, Mapping[str, Sequence[Profile]]]
) -> list[Line2D]:
    """Theories in the figure of the Jacobian: predictions of fresh models, baselines of trained ones."""
    handles = []
    for theory in dict.fromkeys(t for ds in results.values() for t in theories_in(ds, IN_JACOBIAN_FIGURE)):
        conditions = {c for name, found in curves.items() if f"theory_{theory}" in results[name] for c in found}
        for trained in (False, True):
            chosen = {c for c in conditions if (c == "pretrained") is trained}
            if chosen:
                style = _baseline(theory, min(chosen))
                handles.append(handle(style, style.label))
    return handles


def _baseline(theory: str, condition: str) -> Style:
    """How a theory is drawn and called in the figure of the Jacobian."""
    style = theory_style(theory, condition)
    return style._replace(
        label=style.label + (" of the trained weights" if condition == "pretrained" else ", predicted")
    )


def _without_kernel(results: Mapping[str, xr.Dataset]) -> list[str]:
    """Why a curve of theory is missing, which jacobian adds where blocks can be taken apart."""
    backends = {backend for ds in results.values() for backend in recorded(ds, "backend")}
    kernel = any(theories_in(ds, IN_JACOBIAN_FIGURE) for ds in results.values())
    return ["no kernel: theory takes transformers' blocks apart, not TransformerLens's"] * (
        "transformer_lens" in backends and not kernel
    )


def _overlay_legend(curves: Mapping[str, Mapping[str, Sequence[Profile]]]) -> list[Line2D]:
    handles = [
        Line2D([], [], color=CYCLE[i % len(CYCLE)], linewidth=4, solid_capstyle="butt", label=name)
        for i, name in enumerate(curves)
    ]
    conditions = dict.fromkeys(condition for found in curves.values() for condition in found)
    return handles + [
        Line2D([], [], color="#555555", linestyle=_overlay_line(c), linewidth=1.3, label=condition_style(c).label)
        for c in conditions
    ]


def _overlay_line(condition: str) -> Any:
    return {"pretrained": "-", "init": "--", "init-nope": ":"}.get(condition, "-.")


LINES = (
    "line: geometric mean over prompts and seeds",
    "band: smallest to largest seed, or two standard errors over documents of a single run",
)


def caption(
    results: Mapping[str, xr.Dataset], width: float, more: Sequence[str] = (), lines: Sequence[str] = LINES
) -> str:
    """What the figure rests on, its `lines`, and `more`; values that differ between results are all given."""
    lengths, prompts, methods, dtypes, places = {}, {}, {}, {}, {}
    for ds in results.values():
        lengths[ds.sizes["position"]] = prompts[ds.sizes["prompt"]] = None
        dtypes.update(dict.fromkeys(number_types(ds)))
        for options in map(json.loads, recorded(ds, "options")):
            method, products = options.get("method"), options.get("products")
            if method is not None:
                methods[f"{method}, {products} products" if method == "sketch" and products else str(method)] = None
            places.update(dict.fromkeys(_place(options, ds.sizes["position"])))
    facts = [*quickly(results.values()), f"T = {' / '.join(map(str, lengths))}"]
    facts += [f"{' / '.join(map(str, prompts))} prompt{'s' * (list(prompts) != [1])}"]
    facts += [" / ".join(methods)] * bool(methods) + [" / ".join(dtypes)] * bool(dtypes)
    facts += [*places]
    facts += [f"fresh weights: {drawn_from(results)}"] * bool(drawn_from(results))
    facts += [
        *lines,
        *more,
    ]
    return textwrap.fill("; ".join(facts), width=int(width * CHARACTERS), break_on_hyphens=False)


def _place(options: Mapping[str, Any], length: int) -> list[str]:
    """What was read out and by which paths, where it is not the usual."""
    found = []
    if options.get("readout", "residual") != "residual":
        found.append(f"readout: {options['readout']}")
    if options.get("pathway", "total") not in ("total", "all"):
        found.append(f"{options['pathway']} path")
    if options.get("query", length - 1) != length - 1:
        found.append(f"query at {options['query']}")
    if options.get("from_layer", 0) != 0:
        found.append(f"from block {options['from_layer']}")
    return found
