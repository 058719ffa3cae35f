"""Where the U-shape of fresh models holds: the map in six panels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from ..errors import InputError
from ..results.curves import smooth
from ..results.theory_map import Row, rows, usual_places
from .draw import by_fraction, draw, entries
from .palette import (
    BLACK,
    BLUE,
    DOTTED,
    GREEN,
    GREY,
    MODEL_MARKERS,
    PURPLE,
    STRENGTH_COLORS,
    THEORIES,
    VERMILLION,
    Style,
)
from .series import Curve, having, map_ends, places
from .style import STYLE, blank, log_axis, mark, position_axis, save_figure, small_print

STRENGTH = r"$d\,\sigma^2$"
SHOWN = (0.05, 0.36, 1.0, 2.0)  # strengths whose profiles are drawn
MOVED_COLORS = (BLUE, GREEN, VERMILLION)  # of the three strengths at which other things are moved
FAINTEST = 0.02  # a window's primacy; what is less is drawn there as an arrow
MAP_DPI = 120  # a wide figure with many marks stays below 300 kB


def map_figure(ds: xr.Dataset, *, path: str | Path | None = None) -> Figure:
    """Where the U-shape of fresh models holds, from a map of `atlas`: six panels over d sigma^2, depth, length and the rest.

    Profiles over their middle; primacy and recency against d sigma^2 by depth, with the usual models' own places; how far
    each theory is off; primacy against prompt length; what else is moved. Marks are measured, dotted lines the second-moment
    kernel with its score path, the grey line is the factor above which an end counts as standing out.

    Args:
        ds: a map, quick or whole.
        path: where to save; see `save_figure`.

    Raises:
        InputError: the result is no map.
    """
    if "place" not in ds.dims or "strength" not in ds.coords:
        raise InputError("the result is no map; give one of headwater map")
    usual, factor = usual_places(ds), float(ds.attrs["factor"])
    with matplotlib.rc_context(STYLE):
        figure = blank((10.5, 7.4), MAP_DPI)
        halves: Any = figure.subfigures(2, 1, height_ratios=(1, 1.12))  # the long labels of f leave the row above alone
        upper, lower = halves
        profiles, primacy, recency = upper.subplots(1, 3)
        spec = lower.add_gridspec(2, 3, height_ratios=(2.4, 1))
        errors = lower.add_subplot(spec[0, 0])
        lengths, others = lower.add_subplot(spec[:, 1]), lower.add_subplot(spec[:, 2])
        fitted = lower.add_subplot(spec[1, 0], sharex=errors)
        _profiles(profiles, usual)
        _ends(primacy, ds, "primacy", "b")
        _ends(recency, ds, "recency", "c")
        _errors(errors, fitted, usual, rows(ds, group="model"))
        _lengths(lengths, [*usual, *rows(ds, group="length")], factor)
        _others(others, usual, ds)
        base = usual[0]
        facts = (
            f"{base['blocks']} blocks, width {base['width']} and T = {base['length']} unless moved; {ds.attrs['seeds']} "
            f"fresh models each; sketch, {ds.attrs['products']} products; float32; random tokens; marks and solid lines: "
            "measured; dotted, and the models' marks in d: second-moment kernel with score path, no fitted parameter; "
            f"a: smoothed over 5 % of positions; grey: factor {factor:g} above the middle (d: 5 %); arrows in f: less than "
            f"{FAINTEST:g}; σ: initializer range"
        )
        small_print(lower, [facts])
        if path is not None:
            save_figure(figure, path, dpi=MAP_DPI)
    return figure


def _profiles(cell: Axes, usual: Sequence[Row]) -> None:
    cell.set_title("a  fresh models' profiles", loc="left")
    chosen, curves = [row for row in usual if row["strength"] in SHOWN] or usual, []
    for row, color in zip(chosen, STRENGTH_COLORS, strict=False):
        label = f"{STRENGTH} = {row['strength']:g}"
        measured, told = (smooth(row[name]) / row.shape.middle for name in ("measured", "score_path"))
        x = np.arange(len(measured), dtype=float)
        curves.append(Curve(x, measured, Style(label, color), label=label, width=1.2, ends="o"))
        curves.append(Curve(x, told, THEORIES["score_path"], width=1.2, ends="_"))
    draw(cell, by_fraction(curves), log=True)
    position_axis(cell, below=True)
    log_axis(cell)
    cell.set_ylabel("sensitivity / middle")
    cell.legend(handles=entries(curves), loc="upper center", handlelength=1.4)


def _ends(cell: Axes, ds: xr.Dataset, end: str, letter: str) -> None:
    cell.set_title(f"{letter}  {end} against {STRENGTH}", loc="left")
    depths = [curve for curve in map_ends(ds, end) if curve.of["places"].endswith("blocks")]
    measured = list(map(_marks, having(depths, told=False)))
    draw(cell, [*map(_dotted, having(depths, told=True)), *measured])
    models = []
    for row, (marker, size) in zip(rows(ds, group="model"), MODEL_MARKERS.items(), strict=False):
        label = f"{row['name']} ({row['blocks']} blocks, T = {row['length']})"
        cell.plot([row["strength"]], [getattr(row.shape, end)], marker, color=BLACK, markersize=size)
        models.append(mark(label, marker, BLACK, size=size))
    _strength_axis(cell)
    log_axis(cell)
    cell.set_ylim(bottom=0.9)
    cell.axhline(float(ds.attrs["factor"]), color=GREY, linewidth=0.8)
    cell.set_ylabel(f"{end}: end / middle")
    look: Any = {"fontsize": 7.5, "handletextpad": 0.2}
    if letter == "b":  # depths are explained in b, models in c
        cell.legend(handles=entries(measured), loc="upper right", **look)
    else:
        cell.legend(handles=models, loc="lower left", bbox_to_anchor=(0, 0.25), **look)


def _marks(curve: Curve) -> Curve:
    return replace(curve, style=curve.style._replace(line=""), label=curve.style.label, marked=4.0)


def _dotted(curve: Curve) -> Curve:
    return replace(curve, style=curve.style._replace(line=DOTTED), width=1.2)


def _errors(cell: Axes, fitted: Axes, usual: Sequence[Row], models: Sequence[Row]) -> None:
    """Kernels, which predict heights, above; N^L, whose scale is free and whose error is another measure, below."""
    cell.set_title("d  theories against measurement", loc="left")
    x = np.array([row["strength"] for row in usual])
    for name, style in THEORIES.items():
        errors = np.array([row.cesaro_error if name == "cesaro" else row.error(name) for row in usual])
        draw(fitted if name == "cesaro" else cell, [Curve(x, errors, style, label=style.label, width=1.2, marked=3.0)])
    for row, (marker, size) in zip(models, MODEL_MARKERS.items(), strict=False):
        cell.plot([row["strength"]], [row.error("score_path")], marker, color=BLACK, markersize=size)
    cell.set_yscale("log")
    cell.set_ylim(top=20)  # room for the legend
    cell.set_yticks([0.01, 0.1, 1], ["1 %", "10 %", "100 %"])
    cell.axhline(0.05, color=GREY, linewidth=0.8)
    cell.tick_params(labelbottom=False)
    _strength_axis(fitted)
    fitted.set_ylim(bottom=0)
    for one, label in ((cell, "mean relative error"), (fitted, "RMS log error")):
        one.set_ylabel(label)
        one.legend(loc="upper left", fontsize=7, handlelength=2.4)


def _lengths(cell: Axes, chosen: Sequence[Row], factor: float) -> None:
    cell.set_title("e  primacy against prompt length", loc="left")
    strengths = sorted({row["strength"] for row in chosen if row["group"] == "length"})
    marks = []
    for strength, color in zip(strengths, MOVED_COLORS, strict=False):
        along = sorted((row for row in chosen if row["strength"] == strength), key=lambda row: row["length"])
        style = Style(f"{STRENGTH} = {strength:g}", color)
        draw(cell, [_dotted(places(along, "primacy", style, by="length", shape="predicted"))])
        marks.append(_marks(places(along, "primacy", style, by="length")))
    draw(cell, marks)
    cell.set_xscale("log", base=2)
    cell.xaxis.set_major_formatter("{x:g}")
    log_axis(cell)
    cell.axhline(factor, color=GREY, linewidth=0.8)
    cell.set_xlabel("prompt length $T$")
    cell.set_ylabel("primacy: first 5 % / middle")
    if strengths:
        cell.legend(handles=entries(marks), loc="upper left", fontsize=7.5, handletextpad=0.2)


def _others(cell: Axes, usual: Sequence[Row], ds: xr.Dataset) -> None:
    cell.set_title("f  the rest, moved one at a time", loc="left")
    strengths = sorted({row["strength"] for row in rows(ds, group="window")})
    colors = dict(zip(strengths, MOVED_COLORS, strict=False))
    labels: dict[str, list[Row]] = {"nothing moved": [row for row in usual if row["strength"] in strengths]}
    for row in (row for group in ("no RoPE", "width", "residual", "window") for row in rows(ds, group=group)):
        labels.setdefault(row.label.rpartition(", d sigma")[0], []).append(row)
    for height, chosen in enumerate(reversed(labels.values())):
        faint = 0  # arrows stand in one place, and beside each other
        for row in chosen:
            primacy, color = row.shape.primacy, colors.get(row["strength"], PURPLE)
            marker, x = ("<", FAINTEST * 1.35**faint) if primacy < FAINTEST else ("o", primacy)
            faint += primacy < FAINTEST
            cell.plot([x], [height + 0.12], marker, color=color, markersize=4.5)
            cell.plot([row.shape.recency], [height - 0.12], "D", color=color, markersize=3.8, fillstyle="none")
    cell.set_yticks(range(len(labels)), list(reversed(labels)))
    cell.set_xscale("log")
    cell.set_xlim(left=FAINTEST / 2)
    cell.set_ylim(-0.5, len(labels) + 1.6)  # room for the legend
    cell.xaxis.set_major_formatter("{x:g}")
    cell.axvline(float(ds.attrs["factor"]), color=GREY, linewidth=0.8)
    cell.grid(axis="y", color="#dddddd", linewidth=0.6)
    cell.set_xlabel("end / middle")
    handles = [mark("primacy", "o", "#555555"), mark("recency", "D", "#555555", filled=False)]
    handles += [mark(f"{STRENGTH} = {strength:g}", "s", color) for strength, color in colors.items()]
    cell.legend(handles=handles, fontsize=7, loc="upper center", handletextpad=0.2, ncols=2)


def _strength_axis(cell: Axes) -> None:
    cell.set_xscale("log")
    cell.set_xticks([0.05, 0.1, 0.2, 0.5, 1, 2], ["0.05", "0.1", "0.2", "0.5", "1", "2"])
    cell.xaxis.set_minor_formatter(NullFormatter())
    cell.set_xlabel(f"{STRENGTH}, about the deviation of the logits")
