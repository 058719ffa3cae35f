"""Sensitivity by input position, with predictions beside it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..errors import InputError
from ..results.dataset import drawn_from, recorded
from ..results.profiles import comparable
from .draw import by_fraction, draw, entries
from .palette import LINES, THEORIES, condition_style, model_colors
from .series import MEASURED, Curve, having, profiles_with
from .style import (
    DPI,
    LARGEST,
    STYLE,
    blank,
    by_name,
    coinciding,
    facts,
    legend_columns,
    log_axis,
    of_coinciding,
    position_axis,
    save_figure,
    small_print,
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
    results = by_name(results)
    if not results:
        raise InputError("no results to draw; give at least one")
    theories = () if overlay else IN_JACOBIAN_FIGURE
    groups = with_names({name: by_fraction(profiles_with(ds, theories)) for name, ds in results.items()})
    for name, found in groups.items():
        if not any(np.any(curve.y > 0) for curve in found):
            raise InputError(f"the result of '{name}' has no sensitivity above zero; there is nothing to draw")
    handles = entries(_in_order(one for found in groups.values() for one in found))
    if overlay:
        together, handles = _in_one_panel(groups)
        groups = {"": together}
    columns = len(groups) if len(groups) <= 3 else 2 if len(groups) == 4 else 3
    rows, width = -(-len(groups) // columns), max(6.2, 3.3 * columns + 0.4)
    with matplotlib.rc_context(STYLE):
        in_row = legend_columns(handles, width)
        height = 2.6 * rows + 0.9 + 0.18 * -(-len(handles) // in_row)
        figure = blank((width, height), DPI)
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
        small_print(figure, rests_on(results, [*of_coinciding(signs), *_without_kernel(results)]))
        if path is not None:
            save_figure(figure, path, largest=LARGEST)
    return figure


def _without_kernel(results: Mapping[str, xr.Dataset]) -> list[str]:
    """Why a curve of theory is missing, which jacobian adds where blocks can be taken apart."""
    backends = {backend for ds in results.values() for backend in recorded(ds, "backend")}
    kernel = any(theories_in(ds, IN_JACOBIAN_FIGURE) for ds in results.values())
    return ["no kernel: theory takes transformers' blocks apart, not TransformerLens's"] * (
        "transformer_lens" in backends and not kernel
    )


def sensitivity_label(results: Mapping[str, xr.Dataset]) -> str:
    """Of the axis of `profiles.profiles`."""
    free = all(map(comparable, results.values()))
    return r"sensitivity  $\|J_j\|_F\,/\,\sqrt{d}$" + r"$\,\cdot\,$rms$(x)\,/\,$rms$(h)$" * free


def theories_in(ds: xr.Dataset, wanted: Iterable[str]) -> bool:
    """Whether a result has any of these theories."""
    return any(f"theory_{name}" in ds for name in wanted)


def with_names(curves: Mapping[str, Sequence[Curve]]) -> dict[str, list[Curve]]:
    """Profiles and theories with their labels: how many seeds a condition has, and whether a theory predicts it."""
    measured = [one for found in curves.values() for one in found if one.of["curve"] == MEASURED]

    def called(curve: Curve) -> Curve:
        condition, label = curve.of["condition"], curve.style.label
        if curve.of["curve"] != MEASURED:
            label += " of the trained weights" if condition == "pretrained" else ", predicted"
            return replace(curve, label=label, ends="_", width=1.2)
        counts = sorted({one.count for one in having(measured, condition=condition)})
        label += f" ({'/'.join(map(str, counts))} seeds)" * (counts[-1] > 1)
        return replace(curve, label=label, ends="o")

    return {name: list(map(called, found)) for name, found in curves.items()}


def _in_order(curves: Iterable[Curve]) -> list[Curve]:
    """Conditions first, then theories, predictions before baselines."""
    order = [MEASURED, *THEORIES]
    return sorted(
        curves,
        key=lambda one: (
            order.index(one.of["curve"]),
            one.of["curve"] != MEASURED and one.of["condition"] == "pretrained",
        ),
    )


def _in_one_panel(curves: Mapping[str, Sequence[Curve]]) -> tuple[list[Curve], list[Line2D]]:
    """Curves with models by colour and conditions by line, and the legend of both."""
    colors, styles = model_colors(curves), {}
    found = []
    for name, own in curves.items():
        for curve in own:
            style = styles.setdefault(curve.of["condition"], condition_style(curve.of["condition"]))
            look = curve.style._replace(color=colors[name], line=LINES[style.dash])
            found.append(replace(curve, style=look, label=""))
    thick: dict[str, Any] = {"linewidth": 4, "solid_capstyle": "butt"}
    models = [Line2D([], [], color=color, label=name, **thick) for name, color in colors.items()]
    look = {"color": "#555555", "linewidth": 1.3}
    conditions = [Line2D([], [], linestyle=LINES[one.dash], label=one.label, **look) for one in styles.values()]
    return found, [*models, *conditions]


def rests_on(
    results: Mapping[str, xr.Dataset], more: Sequence[str] = (), lines: Sequence[str] = LINES_SAID
) -> list[str]:
    """What the figure rests on, its `lines`, and `more`; values that differ between results are all given."""
    methods, places = [], {}
    for ds in results.values():
        for options in map(json.loads, recorded(ds, "options")):
            method, products = options.get("method"), options.get("products")
            if method is not None:
                methods.append(f"{method}, {products} products" if method == "sketch" and products else str(method))
            places.update(dict.fromkeys(_place(options, ds.sizes["position"])))
    fresh = [f"fresh weights: {drawn_from(results)}"] * bool(drawn_from(results))
    return [*facts(results, methods), *places, *fresh, *lines, *more]


def _place(options: Mapping[str, Any], length: int) -> list[str]:
    """What was read out and by which paths, where it is not the usual."""
    usual = {
        "readout": (("residual",), "readout: {}"),
        "pathway": (("total", "all"), "{} path"),
        "query": ((length - 1,), "query at {}"),
        "from_layer": ((0,), "from block {}"),
    }
    return [
        form.format(options[name])
        for name, (values, form) in usual.items()
        if options.get(name, values[0]) not in values
    ]
