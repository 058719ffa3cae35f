"""Sensitivity by input position, with predictions beside it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..errors import InputError
from ..results.dataset import drawn_from, number_types, quickly, recorded
from ..results.profiles import comparable
from .draw import by_fraction, draw, entries
from .palette import LINES, THEORIES, condition_style, model_colors
from .series import MEASURED, Curve, profiles_with
from .style import (
    CHARACTERS,
    DPI,
    LARGEST,
    STYLE,
    coinciding,
    legend_columns,
    log_axis,
    of_coinciding,
    position_axis,
    save_figure,
    short,
)

IN_JACOBIAN_FIGURE = ("score_path", "values")  # of theories; the others would crowd it
LINES_SAID = (
    "line: geometric mean over prompts and seeds",
    "band: smallest to largest seed, or two standard errors over documents of a single run",
)


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
    theories = () if overlay else IN_JACOBIAN_FIGURE
    curves = with_names({name: by_fraction(profiles_with(ds, theories)) for name, ds in results.items()})
    for name, found in curves.items():
        if not any(np.any(curve.y > 0) for curve in found):
            raise InputError(f"the result of '{name}' has no sensitivity above zero; there is nothing to draw")
    groups = {"": _in_one_panel(curves)} if overlay else curves
    columns = len(groups) if len(groups) <= 3 else 2 if len(groups) == 4 else 3
    rows, width = -(-len(groups) // columns), max(6.2, 3.3 * columns + 0.4)
    with matplotlib.rc_context(STYLE):
        handles = _overlay_legend(curves) if overlay else entries(_in_order(curves))
        in_row = legend_columns(handles, width)
        height = 2.6 * rows + 0.9 + 0.18 * -(-len(handles) // in_row)
        figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
        cells = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
        for cell in cells[len(groups) :]:
            cell.set_visible(False)
        for index, (cell, (name, found)) in enumerate(zip(cells, groups.items(), strict=False)):
            draw(cell, found, log=True)
            cell.set_title(name)
            position_axis(cell, below=index + columns >= len(groups))
            if index % columns == 0:
                cell.set_ylabel(sensitivity_label(results))
        log_axis(cells[0])
        signs = [] if overlay else coinciding(cells[: len(groups)], handles)
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


def theories_in(ds: xr.Dataset, wanted: Sequence[str]) -> list[str]:
    return [name for name in wanted if f"theory_{name}" in ds]


def with_names(curves: Mapping[str, Sequence[Curve]]) -> dict[str, list[Curve]]:
    """Profiles and theories with their labels: how many seeds a condition has, and whether a theory predicts it."""
    seeds: dict[str, set[int]] = {}
    for curve in (one for found in curves.values() for one in found if one.of["curve"] == MEASURED):
        seeds.setdefault(curve.of["condition"], set()).add(curve.count)

    def called(curve: Curve) -> Curve:
        condition, label = curve.of["condition"], curve.style.label
        if curve.of["curve"] != MEASURED:
            label += " of the trained weights" if condition == "pretrained" else ", predicted"
            return replace(curve, label=label, ends="_", width=1.2)
        counts = sorted(seeds[condition])
        label += f" ({'/'.join(map(str, counts))} seeds)" * (counts[-1] > 1)
        return replace(curve, label=label, ends="o")

    return {name: list(map(called, found)) for name, found in curves.items()}


def _in_order(curves: Mapping[str, Sequence[Curve]]) -> list[Curve]:
    """Conditions first, then theories, predictions before baselines."""
    every = [curve for found in curves.values() for curve in found]
    order = {MEASURED: 0} | {theory: 1 + n for n, theory in enumerate(THEORIES)}
    return sorted(every, key=lambda one: (order[one.of["curve"]], bool(order[one.of["curve"]]) and _trained(one)))


def _trained(curve: Curve) -> bool:
    return curve.of["condition"] == "pretrained"


def _in_one_panel(curves: Mapping[str, Sequence[Curve]]) -> list[Curve]:
    """Models by colour, conditions by line."""
    colors = model_colors(curves)

    def look(name: str, curve: Curve) -> Curve:
        line = LINES[condition_style(curve.of["condition"]).dash]
        return replace(curve, style=curve.style._replace(color=colors[name], line=line), label="")

    return [look(name, curve) for name, found in curves.items() for curve in found]


def _overlay_legend(curves: Mapping[str, Sequence[Curve]]) -> list[Line2D]:
    models = [
        Line2D([], [], color=color, linewidth=4, solid_capstyle="butt", label=name)
        for name, color in model_colors(curves).items()
    ]
    conditions = dict.fromkeys(curve.of["condition"] for found in curves.values() for curve in found)
    styles = map(condition_style, conditions)
    return models + [
        Line2D([], [], color="#555555", linestyle=LINES[style.dash], linewidth=1.3, label=style.label)
        for style in styles
    ]


def _without_kernel(results: Mapping[str, xr.Dataset]) -> list[str]:
    """Why a curve of theory is missing, which jacobian adds where blocks can be taken apart."""
    backends = {backend for ds in results.values() for backend in recorded(ds, "backend")}
    kernel = any(theories_in(ds, IN_JACOBIAN_FIGURE) for ds in results.values())
    return ["no kernel: theory takes transformers' blocks apart, not TransformerLens's"] * (
        "transformer_lens" in backends and not kernel
    )


def rests_on(
    results: Mapping[str, xr.Dataset], more: Sequence[str] = (), lines: Sequence[str] = LINES_SAID
) -> list[str]:
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
    return [*facts, *lines, *more]


def caption(results: Mapping[str, xr.Dataset], width: float, more: Sequence[str] = ()) -> str:
    """`rests_on` as text of so many inches."""
    return textwrap.fill("; ".join(rests_on(results, more)), width=int(width * CHARACTERS), break_on_hyphens=False)


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
