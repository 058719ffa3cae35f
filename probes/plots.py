"""Figures, each drawn by one function from results alone; nothing here measures.

Figures are matplotlib `Figure` objects with no pyplot state behind them, saved as PNG and SVG. Colours are Okabe and
Ito's, which colour-blind readers can tell apart; line styles repeat what colours say.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from .atlas import Row, rows, usual_places
from .errors import InputError
from .files import atomic
from .summary import Profile, band, profiles, smooth

BLUE, VERMILLION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
PURPLE, SKY, BLACK, YELLOW = "#CC79A7", "#56B4E9", "#000000", "#F0E442"
CYCLE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)  # for models in one panel; yellow is unreadable on white

DECADES = 4  # what the axis spans at most: the rim of a sliding window's reach fades to nothing and is cut off
CHARACTERS = 17  # of small print per inch
WIDEST = 1500  # pixels across a figure of many curves and columns, for 300 kB
DPI = 170  # a two-column figure stays sharp at full page width and below 300 kB
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "svg.hashsalt": "headwater",  # the same figure gives the same file
}


class Style(NamedTuple):
    """How a condition is drawn."""

    label: str
    color: str
    line: Any  # matplotlib's line style
    order: int  # higher is drawn on top


# The theories a figure may draw, in the order of its legend; `theory_` stands before their names in results.
THEORIES = {
    "score_path": Style("second-moment kernel", BLACK, (0, (1, 1.3)), 6),
    "values": Style("kernel, values only", GREEN, (0, (3, 1, 1, 1)), 5),
    "uniform": Style("kernel, uniform attention", ORANGE, (0, (4, 1.5)), 5),
    "config": Style("kernel from the config alone", SKY, (0, (6, 1.5)), 4),
    "cesaro": Style(r"$N^L$, best $\alpha$ [Chowdhury]", PURPLE, "-.", 4),
}
IN_JACOBIAN_FIGURE = ("score_path", "values")  # of theories; the others would crowd it

CONDITIONS = {
    "pretrained": Style("pretrained", VERMILLION, "-", 4),
    "init": Style("init", BLUE, "-", 3),
    "init-nope": Style("init, no positional encoding", BLACK, (0, (4, 2)), 2),
}


def jacobian_figure(
    results: xr.Dataset | Mapping[str, xr.Dataset], *, overlay: bool = False, path: str | Path | None = None
) -> Figure:
    """Sensitivity by input position, one panel per model, on a shared logarithmic axis.

    Lines are root mean squares over prompts. Of several seeds, the line is the geometric mean and the band reaches from
    the smallest to the largest. Around a single estimated run the band is two standard errors. Dots mark the first and
    the last position, which a line alone hides against the frame. Zeros (out of a sliding window's reach) are left out.

    Args:
        results: results of `jacobian`, single or combined, by the model's name; or one of them.
        overlay: all models in one panel, a colour each; conditions differ in line style.
        path: where to save; see `save_figure`.

    Raises:
        InputError: no results, or one without sensitivities above zero.
    """
    if isinstance(results, xr.Dataset):
        results = {_short(str(results.attrs.get("model", "model"))): results}
    if not results:
        raise InputError("no results to draw; give at least one")
    curves = {name: profiles(ds) for name, ds in results.items()}
    for name, found in curves.items():
        if not any(np.any(profile.mean > 0) for runs in found.values() for profile in runs):
            raise InputError(f"the result of '{name}' has no sensitivity above zero; there is nothing to draw")

    with matplotlib.rc_context(STYLE):
        panels = 1 if overlay else len(curves)
        columns = panels if panels <= 3 else 2 if panels == 4 else 3
        rows = -(-panels // columns)
        width = max(6.2, 3.3 * columns + 0.4)
        handles = _overlay_legend(curves) if overlay else _condition_legend(curves) + _baseline_legend(results, curves)
        legend_columns = _legend_columns(handles, width)
        height = 2.6 * rows + 0.9 + 0.18 * -(-len(handles) // legend_columns)
        figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
        axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        cells = list(axes.flat)
        for cell in cells[panels:]:
            cell.set_visible(False)
        for index, (name, found) in enumerate(curves.items()):
            cell = cells[0 if overlay else index]
            for condition, runs in found.items():
                style = _style(condition)
                if overlay:
                    style = style._replace(color=CYCLE[index % len(CYCLE)], line=_overlay_line(condition))
                _draw_curve(cell, runs, style)
                if not overlay:
                    for theory in _theories(results[name], IN_JACOBIAN_FIGURE):
                        _draw_theory(cell, _theory(results[name], theory, condition), _of_condition(theory, condition))
            if not overlay:
                cell.set_title(name)
        for index, cell in enumerate(cells[:panels]):
            _position_axis(cell, below=index + columns >= panels)
            if index % columns == 0:
                cell.set_ylabel(r"sensitivity  $\|J_j\|_F\,/\,\sqrt{d}$")
        _log_axis(cells[0])
        figure.legend(handles=handles, loc="outside upper center", ncols=legend_columns)
        figure.supxlabel(_caption(results, width), fontsize=7, color="#555555")
        if path is not None:
            save_figure(figure, path)
    return figure


def save_figure(figure: Figure, path: str | Path, *, dpi: int = DPI) -> tuple[Path, Path]:
    """Save as PNG and SVG next to each other; whatever suffix `path` has is replaced. Returns both paths.

    Raises:
        InputError: the folder cannot be written to.
    """
    path = Path(path)
    base = path.with_suffix("") if path.suffix in (".png", ".svg") else path
    saved = base.with_name(base.name + ".png"), base.with_name(base.name + ".svg")
    with matplotlib.rc_context(STYLE):
        with atomic(saved[0]) as temporary:
            figure.savefig(temporary, format="png", dpi=dpi)
        with atomic(saved[1]) as temporary:
            figure.savefig(temporary, format="svg", metadata={"Date": None})
    return saved


def _draw_curve(cell: Axes, runs: Sequence[Profile], style: Style) -> None:
    """One condition: line, band, and dots at the ends."""
    means = np.stack([run.mean for run in runs])  # [seed, position]
    x = np.linspace(0, 1, means.shape[1])
    centre, low, high = band(means)
    if len(runs) == 1:
        low, high = centre - 2 * runs[0].stderr, centre + 2 * runs[0].stderr
    positive = np.where(centre > 0, centre, np.nan)
    floor = np.nanmin(positive) / 10 if np.any(centre > 0) else 1.0  # where an error bar would reach zero or below
    cell.fill_between(
        x,
        np.maximum(low, floor),
        np.maximum(high, floor),
        where=centre > 0,
        color=style.color,
        alpha=0.22,
        linewidth=0,
        zorder=style.order - 2,
    )
    cell.plot(x, positive, color=style.color, linestyle=style.line, linewidth=1.3, zorder=style.order)
    cell.plot(x[[0, -1]], positive[[0, -1]], "o", color=style.color, markersize=3.6, zorder=style.order)


def _theories(ds: xr.Dataset, wanted: Sequence[str]) -> list[str]:
    return [name for name in wanted if f"theory_{name}" in ds]


def _theory(ds: xr.Dataset, name: str, condition: str) -> np.ndarray:
    """A theory's curve [position] for one condition: over prompts and seeds as the measured ones."""
    if name == "cesaro":
        return ds[f"theory_{name}"].sel(condition=condition).values
    return band([profile.mean for profile in profiles(ds, f"theory_{name}")[condition]]).centre


def _of_condition(theory: str, condition: str) -> Style:
    """How a theory is drawn beside a condition's curve: in black where it predicts, in the curve's colour as a baseline."""
    style = THEORIES[theory]
    return style._replace(color=_style(condition).color) if condition == "pretrained" else style


def _draw_theory(cell: Axes, curve: np.ndarray, style: Style) -> None:
    x = np.linspace(0, 1, len(curve))
    shown = np.where(curve > 0, curve, np.nan)
    cell.plot(x, shown, color=style.color, linestyle=style.line, linewidth=1.2, zorder=style.order)
    cell.plot(x[[0, -1]], shown[[0, -1]], "_", color=style.color, markersize=7, zorder=style.order)


def _baseline_legend(
    results: Mapping[str, xr.Dataset], curves: Mapping[str, Mapping[str, Sequence[Profile]]]
) -> list[Line2D]:
    """Theories in the figure of the Jacobian: predictions of fresh models, baselines of trained ones."""
    handles = []
    for theory in dict.fromkeys(t for ds in results.values() for t in _theories(ds, IN_JACOBIAN_FIGURE)):
        conditions = {c for name, found in curves.items() if f"theory_{theory}" in results[name] for c in found}
        style = THEORIES[theory]
        if conditions - {"pretrained"}:
            handles.append(_handle(style, style.label + ", predicted"))
        if "pretrained" in conditions:
            handles.append(_handle(_of_condition(theory, "pretrained"), style.label + " of the trained weights"))
    return handles


def _handle(style: Style, label: str) -> Line2D:
    return Line2D([], [], color=style.color, linestyle=style.line, linewidth=1.6, label=label)


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
        results = {_short(str(results.attrs.get("model", "model"))): results}
    if not results or not all(_theories(ds, tuple(THEORIES)) for ds in results.values()):
        raise InputError("no theories in the results to draw; give results of headwater theory")
    curves = {name: profiles(ds) for name, ds in results.items()}
    theories = [t for t in THEORIES if any(f"theory_{t}" in ds for ds in results.values())]
    with matplotlib.rc_context(STYLE):
        columns = len(results)
        width = max(6.2, 3.0 * columns + 0.4)
        handles = _condition_legend(curves) + [_handle(THEORIES[t], THEORIES[t].label) for t in theories]
        legend_columns = _legend_columns(handles, width)
        figure = Figure(figsize=(width, 5.0 + 0.18 * -(-len(handles) // legend_columns)), dpi=DPI, layout="constrained")
        axes = figure.subplots(2, columns, sharex=True, sharey="row", squeeze=False, height_ratios=(1.5, 1))
        for (name, found), above, below in zip(curves.items(), axes[0], axes[1], strict=True):
            above.set_title(name)
            for condition, runs in found.items():
                if condition == "init":
                    _draw_curve(above, runs, _style(condition))
                    for theory in _theories(results[name], theories):
                        _draw_theory(above, _theory(results[name], theory, condition), THEORIES[theory])
                if "theory_score_path" in results[name]:
                    kernel = _theory(results[name], "score_path", condition)
                    kernel = np.where(kernel > 0, kernel, np.nan)
                    ratios = [Profile(run.mean / kernel, run.stderr / kernel, run.spread) for run in runs]
                    _draw_curve(below, ratios, _style(condition))
            below.axhline(1, color="#555555", linewidth=0.8, zorder=1)
            _position_axis(above, below=False)
            _position_axis(below, below=True)
        axes[0, 0].set_ylabel(r"sensitivity at birth  $\|J_j\|_F\,/\,\sqrt{d}$")
        axes[1, 0].set_ylabel("measured / kernel")
        _log_axis(axes[0, 0])
        _log_axis(axes[1, 0])
        figure.legend(handles=handles, loc="outside upper center", ncols=legend_columns)
        figure.supxlabel(_caption(results, width), fontsize=7, color="#555555")
        if path is not None:
            save_figure(figure, path, dpi=min(DPI, int(WIDEST / width)))
    return figure


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
    _position_axis(cell, below=True)
    _log_axis(cell)
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
    _log_axis(cell)
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
    _log_axis(cell)
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


def _style(condition: str) -> Style:
    return CONDITIONS.get(condition, Style(condition, PURPLE, "-.", 2))


def _position_axis(cell: Axes, *, below: bool) -> None:
    cell.set_xlim(-0.02, 1.02)
    cell.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "1/4", "1/2", "3/4", "1"])
    cell.grid(axis="y", which="major", color="#dddddd", linewidth=0.6)
    cell.set_axisbelow(True)
    if below:
        cell.tick_params(labelbottom=True)
        cell.set_xlabel("input position  $j / (T-1)$")


def _log_axis(cell: Axes) -> None:
    """Label decades, and between them 2 and 5, or 2, 3 and 5, while there is room."""
    cell.set_yscale("log")
    low, high = cell.get_ylim()
    if low < high / 10**DECADES:
        low = high / 10**DECADES
        cell.set_ylim(low, high)
    decades = np.log10(high / low)
    labelled = (1, 2, 3, 5) if decades < 1.2 else (1, 2, 5) if decades < 2.2 else (1,)
    cell.yaxis.set_major_locator(LogLocator(base=10, subs=labelled))
    cell.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    cell.yaxis.set_minor_locator(LogLocator(base=10, subs=tuple(range(2, 10)), numticks=50))
    cell.yaxis.set_minor_formatter(NullFormatter())


def _condition_legend(curves: Mapping[str, Mapping[str, Sequence[Profile]]]) -> list[Line2D]:
    handles = []
    for condition in dict.fromkeys(condition for found in curves.values() for condition in found):
        style = _style(condition)
        seeds = sorted({len(found[condition]) for found in curves.values() if condition in found})
        note = f" ({'/'.join(map(str, seeds))} seeds)" if seeds[-1] > 1 else ""
        handles.append(Line2D([], [], color=style.color, linestyle=style.line, linewidth=1.6, label=style.label + note))
    return handles


def _overlay_legend(curves: Mapping[str, Mapping[str, Sequence[Profile]]]) -> list[Line2D]:
    handles = [
        Line2D([], [], color=CYCLE[i % len(CYCLE)], linewidth=4, solid_capstyle="butt", label=name)
        for i, name in enumerate(curves)
    ]
    conditions = dict.fromkeys(condition for found in curves.values() for condition in found)
    return handles + [
        Line2D([], [], color="#555555", linestyle=_overlay_line(c), linewidth=1.3, label=_style(c).label)
        for c in conditions
    ]


def _overlay_line(condition: str) -> Any:
    return {"pretrained": "-", "init": "--", "init-nope": ":"}.get(condition, "-.")


def _legend_columns(handles: Sequence[Line2D], width: float) -> int:
    """As many columns as fit side by side; matplotlib fills them one after the other."""
    inches = [0.072 * len(str(handle.get_label())) + 0.6 for handle in handles]
    for columns in range(len(inches), 1, -1):
        rows = -(-len(inches) // columns)
        if sum(max(inches[i : i + rows]) for i in range(0, len(inches), rows)) <= width:
            return columns
    return 1


def _short(name: str) -> str:
    """The last part of a hub id or a path."""
    return Path(name).name or name


def _caption(results: Mapping[str, xr.Dataset], width: float) -> str:
    """What the figure rests on; values that differ between results are all given, in their order."""
    lengths, prompts, methods, dtypes, places = {}, {}, {}, {}, {}
    for ds in results.values():
        lengths[ds.sizes["position"]] = prompts[ds.sizes["prompt"]] = None
        dtypes.update(dict.fromkeys(_recorded(ds, "dtype")))
        for options in map(json.loads, _recorded(ds, "options")):
            method, products = options.get("method"), options.get("products")
            if method is not None:
                methods[f"{method}, {products} products" if method == "sketch" and products else str(method)] = None
            places.update(dict.fromkeys(_place(options, ds.sizes["position"])))
    facts = [f"T = {' / '.join(map(str, lengths))}", f"{' / '.join(map(str, prompts))} prompts"]
    facts += [" / ".join(methods)] * bool(methods) + [" / ".join(dtypes)] * bool(dtypes)
    facts += [*places]
    facts += [
        "line: root mean square over prompts, geometric mean over seeds",
        "band: smallest to largest seed, or two standard errors of a single estimate",
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


def _recorded(ds: xr.Dataset, name: str) -> list[str]:
    """The values of an attribute, which is a coordinate of the runs where they differ (`results.combine`)."""
    if name in ds.attrs:
        return [str(ds.attrs[name])]
    return [value for value in dict.fromkeys(map(str, ds[name].values.flat)) if value] if name in ds.coords else []
