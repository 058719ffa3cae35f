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

from .errors import InputError
from .files import atomic
from .summary import Profile, band, profiles

BLUE, VERMILLION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
PURPLE, SKY, BLACK, YELLOW = "#CC79A7", "#56B4E9", "#000000", "#F0E442"
CYCLE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)  # for models in one panel; yellow is unreadable on white

DECADES = 4  # what the axis spans at most: the rim of a sliding window's reach fades to nothing and is cut off
CHARACTERS = 17  # of small print per inch
DPI = 180  # a two-column figure stays sharp at full page width and below 300 kB
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
        handles = _overlay_legend(curves) if overlay else _condition_legend(curves)
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


def save_figure(figure: Figure, path: str | Path) -> tuple[Path, Path]:
    """Save as PNG and SVG next to each other; whatever suffix `path` has is replaced. Returns both paths.

    Raises:
        InputError: the folder cannot be written to.
    """
    path = Path(path)
    base = path.with_suffix("") if path.suffix in (".png", ".svg") else path
    saved = base.with_name(base.name + ".png"), base.with_name(base.name + ".svg")
    with matplotlib.rc_context(STYLE):
        with atomic(saved[0]) as temporary:
            figure.savefig(temporary, format="png", dpi=DPI)
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
    cell.plot(x[[0, -1]], positive[[0, -1]], "o", color=style.color, markersize=3.6, zorder=style.order, clip_on=False)


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
    inches = [0.065 * len(str(handle.get_label())) + 0.6 for handle in handles]
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
    lengths, prompts, methods, dtypes = {}, {}, {}, {}
    for ds in results.values():
        lengths[ds.sizes["position"]] = prompts[ds.sizes["prompt"]] = None
        dtypes.update(dict.fromkeys(_recorded(ds, "dtype")))
        for options in map(json.loads, _recorded(ds, "options")):
            method, products = options.get("method"), options.get("products")
            if method is not None:
                methods[f"{method}, {products} products" if method == "sketch" and products else str(method)] = None
    facts = [f"T = {' / '.join(map(str, lengths))}", f"{' / '.join(map(str, prompts))} prompts"]
    facts += [" / ".join(methods)] * bool(methods) + [" / ".join(dtypes)] * bool(dtypes)
    facts += [
        "line: root mean square over prompts, geometric mean over seeds",
        "band: smallest to largest seed, or two standard errors of a single estimate",
    ]
    return textwrap.fill("; ".join(facts), width=int(width * CHARACTERS), break_on_hyphens=False)


def _recorded(ds: xr.Dataset, name: str) -> list[str]:
    """The values of an attribute, which is a coordinate of the runs where they differ (`results.combine`)."""
    if name in ds.attrs:
        return [str(ds.attrs[name])]
    return [value for value in dict.fromkeys(map(str, ds[name].values.flat)) if value] if name in ds.coords else []
