"""Where the U-shape at birth holds: the map of fresh models in six panels."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from ..errors import InputError
from ..results.curves import smooth
from ..results.theory_map import Row, rows, usual_places
from .style import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    STYLE,
    THEORIES,
    VERMILLION,
    log_axis,
    position_axis,
    save_figure,
)

DEPTH_COLORS = {4: SKY, 8: GREEN, 12: BLUE, 16: ORANGE, 32: VERMILLION}
STRENGTH_COLORS = (BLUE, GREEN, ORANGE, VERMILLION)
STRENGTH = r"$d\,\sigma^2$"
MODEL_MARKERS = {"*": 8.0, "D": 5.0, "s": 5.0}  # and their sizes, for the usual models in the map's order
DOTTED: Any = (0, (1, 1.3))
FAINTEST = 0.02  # a window's primacy; what is less is drawn there as an arrow
MAP_DPI = 120  # a wide figure with many marks stays below 300 kB


def map_figure(ds: xr.Dataset, *, path: str | Path | None = None) -> Figure:
    """Where the U-shape at birth holds, from a map of `atlas`: six panels over d sigma^2, depth, length and the rest.

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
    usual = usual_places(ds)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.5, 6.9), dpi=MAP_DPI, layout="constrained")
        halves: Any = figure.subfigures(2, 1)  # the long labels of f leave the row above alone
        upper, lower = halves
        profiles_, primacy, recency = upper.subplots(1, 3)
        errors, lengths, others = lower.subplots(1, 3)
        _map_profiles(profiles_, usual)
        _map_ends(primacy, ds, "primacy", "b")
        _map_ends(recency, ds, "recency", "c")
        _map_errors(errors, usual, rows(ds, group="model"))
        _map_lengths(lengths, [*usual, *rows(ds, group="length")], float(ds.attrs["factor"]))
        _map_others(others, usual, ds)
        base = usual[0]
        facts = (
            f"{base['blocks']} blocks, width {base['width']} and T = {base['length']} unless moved; {ds.attrs['seeds']} "
            f"fresh models each; sketch, {ds.attrs['products']} products; float32; random tokens; marks and solid lines: "
            "measured; dotted, and the models' marks in d: second-moment kernel with score path, no fitted parameter; "
            f"a: smoothed over 5 % of positions; grey: factor {ds.attrs['factor']:g} above the middle (d: 5 %); σ: "
            "initializer range"
        )
        lower.supxlabel(textwrap.fill(facts, width=170), fontsize=7, color="#555555")
        if path is not None:
            save_figure(figure, path, dpi=MAP_DPI)
    return figure


def _map_profiles(cell: Axes, usual: Sequence[Row]) -> None:
    cell.set_title("a  fresh models' profiles", loc="left")
    chosen = [row for row in usual if row["strength"] in (0.05, 0.36, 1.0, 2.0)] or usual
    for row, color in zip(chosen, STRENGTH_COLORS, strict=False):
        for name, line, shade in (("measured", "-", color), ("score_path", DOTTED, BLACK)):
            curve = smooth(row[name]) / row.shape.middle
            label = f"{STRENGTH} = {row['strength']:g}" if name == "measured" else None
            x = np.linspace(0, 1, len(curve))
            cell.plot(x, np.where(curve > 0, curve, np.nan), color=shade, linestyle=line, linewidth=1.2, label=label)
            cell.plot(x[[0, -1]], curve[[0, -1]], "o" if name == "measured" else "_", color=shade, markersize=3.6)
    position_axis(cell, below=True)
    log_axis(cell)
    cell.set_ylabel("sensitivity / middle")
    cell.legend(loc="upper center", handlelength=1.4)


def _map_ends(cell: Axes, ds: xr.Dataset, end: str, letter: str) -> None:
    cell.set_title(f"{letter}  {end} against {STRENGTH}", loc="left")
    for blocks in sorted({int(row["blocks"]) for row in rows(ds, group="depth")}):
        places = sorted(rows(ds, group="depth", blocks=blocks), key=lambda row: row["strength"])
        color = DEPTH_COLORS.get(blocks, PURPLE)
        _map_marks(cell, places, "strength", end, color, f"{blocks} blocks")
    for row, (marker, size) in zip(rows(ds, group="model"), MODEL_MARKERS.items(), strict=False):
        label = f"{row['name']} ({row['blocks']} blocks, T = {row['length']})"
        cell.plot([row["strength"]], [getattr(row.shape, end)], marker, color=BLACK, markersize=size, label=label)
    _strength_axis(cell)
    log_axis(cell)
    cell.set_ylim(bottom=0.9)
    cell.axhline(float(ds.attrs["factor"]), color="#777777", linewidth=0.8)
    cell.set_ylabel(f"{end}: end / middle")
    # Depths are explained in b, models in c.
    handles, labels = cell.get_legend_handles_labels()
    shown = [i for i, label in enumerate(labels) if label.endswith("blocks") == (letter == "b")]
    corner = "upper right" if letter == "b" else "lower left"
    place = {"bbox_to_anchor": (0, 0.25)} if letter == "c" else {}
    cell.legend(
        [handles[i] for i in shown], [labels[i] for i in shown], loc=corner, fontsize=7.5, handletextpad=0.2, **place
    )


def _map_marks(cell: Axes, places: Sequence[Row], by: str, end: str, color: str, label: str) -> None:
    """One end of several places: measured as dots, predicted as a dotted line."""
    x = [row[by] for row in places]
    cell.plot(x, [getattr(row.shape, end) for row in places], "o", color=color, markersize=4, label=label)
    cell.plot(x, [getattr(row.predicted, end) for row in places], color=color, linestyle=DOTTED, linewidth=1.2)


def _map_errors(cell: Axes, usual: Sequence[Row], models: Sequence[Row]) -> None:
    cell.set_title("d  theories against measurement", loc="left")
    x = [row["strength"] for row in usual]
    for name, style in THEORIES.items():
        errors = [row.cesaro_error if name == "cesaro" else row.error(name) for row in usual]
        given: Any = {"color": style.color, "linestyle": style.line, "label": style.label}
        cell.plot(x, errors, marker="o", markersize=3, linewidth=1.2, **given)
    for row, (marker, size) in zip(models, MODEL_MARKERS.items(), strict=False):
        cell.plot([row["strength"]], [row.error("score_path")], marker, color=BLACK, markersize=size)
    _strength_axis(cell)
    cell.set_yscale("log")
    cell.set_ylim(top=20)  # room for the legend
    cell.set_yticks([0.01, 0.1, 1], ["1 %", "10 %", "100 %"])
    cell.axhline(0.05, color="#777777", linewidth=0.8)
    cell.set_ylabel(r"mean relative error ($N^L$: RMS log)")
    cell.legend(loc="upper left", fontsize=7, handlelength=2.4)


def _map_lengths(cell: Axes, places: Sequence[Row], factor: float) -> None:
    cell.set_title("e  primacy against prompt length", loc="left")
    strengths = sorted({row["strength"] for row in places if row["group"] == "length"})
    for strength, color in zip(strengths, (BLUE, GREEN, VERMILLION), strict=False):
        chosen = sorted((row for row in places if row["strength"] == strength), key=lambda row: row["length"])
        _map_marks(cell, chosen, "length", "primacy", color, f"{STRENGTH} = {strength:g}")
    cell.set_xscale("log", base=2)
    cell.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    log_axis(cell)
    cell.axhline(factor, color="#777777", linewidth=0.8)
    cell.set_xlabel("prompt length $T$")
    cell.set_ylabel("primacy: first 5 % / middle")
    if strengths:
        cell.legend(loc="upper left", fontsize=7.5, handletextpad=0.2)


def _map_others(cell: Axes, usual: Sequence[Row], ds: xr.Dataset) -> None:
    cell.set_title("f  the rest, moved one at a time", loc="left")
    strengths = sorted({row["strength"] for row in rows(ds, group="window")})
    colors = dict(zip(strengths, (BLUE, GREEN, VERMILLION), strict=False))
    labels: dict[str, list[Row]] = {"nothing moved": [row for row in usual if row["strength"] in strengths]}
    for group in ("no RoPE", "width", "residual", "window"):
        for row in rows(ds, group=group):
            labels.setdefault(row.label.rpartition(", d sigma")[0], []).append(row)
    for height, places in enumerate(reversed(labels.values())):
        for row in places:
            primacy, color = row.shape.primacy, colors.get(row["strength"], PURPLE)
            marker = "<" if primacy < FAINTEST else "o"
            cell.plot([max(primacy, FAINTEST)], [height + 0.12], marker, color=color, markersize=4.5)
            cell.plot([row.shape.recency], [height - 0.12], "D", color=color, markersize=3.8, fillstyle="none")
    cell.set_yticks(range(len(labels)), list(reversed(labels)))
    cell.set_xscale("log")
    cell.set_xlim(left=FAINTEST / 2)
    cell.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    cell.axvline(float(ds.attrs["factor"]), color="#777777", linewidth=0.8)
    cell.grid(axis="y", color="#dddddd", linewidth=0.6)
    cell.set_xlabel("end / middle")

    def mark(label: str, marker: str, color: str = "#555555", **more: Any) -> Line2D:
        return Line2D([], [], marker=marker, linestyle="", color=color, markersize=4.5, label=label, **more)

    handles = [mark("primacy", "o"), mark("recency", "D", fillstyle="none")]
    handles += [mark(f"{STRENGTH} = {strength:g}", "s", color) for strength, color in colors.items()]
    cell.legend(handles=handles, fontsize=7, loc="upper left", handletextpad=0.2)


def _strength_axis(cell: Axes) -> None:
    cell.set_xscale("log")
    cell.set_xticks([0.05, 0.1, 0.2, 0.5, 1, 2], ["0.05", "0.1", "0.2", "0.5", "1", "2"])
    cell.xaxis.set_minor_formatter(NullFormatter())
    cell.set_xlabel(f"{STRENGTH}, about the deviation of the logits")
