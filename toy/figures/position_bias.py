"""Position bias by depth, positional encoding and training data: gaps, accuracy by position, both over training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullLocator

from probes.figures.style import BLACK, BLUE, DPI, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION, WIDEST
from probes.results.gate import TRAINED

from ..experiments.position_bias import ITEMS, PAIRS
from ..experiments.position_bias_claims import BLIND, FEWEST, kinds, over_seeds
from ..tasks import InContext
from .sheet import entry, files, grid, ranged, sheet

PAIR_COLORS = dict(zip(PAIRS, (BLUE, ORANGE, SKY), strict=True))
ENCODINGS = {  # in full, short, and how lines of it look
    "none": ("no encoding", "none", BLACK),
    "decay": ("decay mask", "decay", VERMILLION),
    "rope": ("RoPE", "RoPE", GREEN),
    "sinusoidal": ("sinusoidal", "sin", PURPLE),
}
TRAININGS = {
    "unbiased": "anywhere",
    "first": "first",
    "middle": "middle",
    "last": "last",
    "first-and-last": "first or last",
}
DIAMOND: Any = {"marker": "D", "color": BLACK, "markerfacecolor": "white"}
COURSE_PAIR = "first-last"  # the one whose gap is drawn over training
PANEL, NARROWEST = 1.85, 7.0  # inches across: a panel, and a figure with its small print
# A reader who names any label of the context is right by choice of the item, or because another item has the same label.
ANY_LABEL = 1 / ITEMS + (1 - 1 / ITEMS) / InContext.labels


def position_bias_figure(
    ds: xr.Dataset, *, at: Mapping[str, str] | None = None, path: str | Path | None = None
) -> Figure:
    """Gap bars of three pairs of items, a column per training data.

    Models of several depths have a row per positional encoding and a group of bars per depth; models of one depth a single
    row and a group per encoding. Bars are means over seeds with intervals as `over_seeds` gives them; where models with
    a residual stream were trained too, diamonds are theirs.

    Args:
        ds: result of the experiment `position-bias`.
        at: which kind of data and mask, as {scale, data, mask}; the first trained unless told.
        path: where to save; see `save_figure`.
    """
    world, at = _chosen(ds, at)
    trainings, encodings = _names(world, "training"), _names(world, "positional")
    depths = world["depth"].values.tolist()
    by_depth = len(depths) > 1
    rows: list[str | None] = [*encodings] if by_depth else [None]
    bars, marks = _residuals(world)
    note = "above 0: the earlier item is believed"
    if bars == "on":
        note += "; models with a residual stream"
    elif marks is None:
        note += "; models without residual stream"
    depth = [] if by_depth else [f"{depths[0]} blocks"]
    width = max(NARROWEST, PANEL * len(trainings) + 0.8)
    size = width, 1.45 * len(rows) + (1.4 if by_depth else 2.1)
    with sheet(ds, size, [note, *depth, _about_seeds(world), _kind(at)], dpi=_dpi(width), path=path) as figure:
        cells = figure.subplots(len(rows), len(trainings), sharex=by_depth, sharey=True, squeeze=False)
        for row, line in zip(rows, cells, strict=True):
            for training, cell in zip(trainings, line, strict=True):
                panel = world["gap"].sel(training=training)
                if row is None:
                    groups = [name for name in encodings if bool(panel.sel(positional=name).notnull().any())]
                    shown = panel.sel(positional=groups).isel(depth=0).transpose("positional", ...)
                    labels = [ENCODINGS[name][1] for name in groups]
                else:
                    shown = panel.sel(positional=row).transpose("depth", ...)
                    labels = [str(depth) for depth in depths]
                _bars(cell, shown, labels, bars, marks)
        names = ["" if row is None else f"{ENCODINGS[row][0]}\n" for row in rows]
        _labels(cells, trainings, [f"{name}accuracy gap" for name in names], "blocks" if by_depth else "encoding")
        handles: list[Patch | Line2D] = [
            Patch(color=color, label=pair.replace("-", " against ")) for pair, color in PAIR_COLORS.items()
        ]
        if marks is not None:
            handles.append(entry("with residual stream", linestyle="", markersize=4, **DIAMOND))
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    return figure


def position_bias_curves_figure(
    ds: xr.Dataset, *, at: Mapping[str, str] | None = None, path: str | Path | None = None
) -> Figure:
    """Accuracy by the item with the answer, and the gap of first against last over training; a column per training data.

    Both have a row per depth; lines are medians over seeds, shades the range of the full ones.

    Args:
        ds: result of the experiment `position-bias`.
        at: which kind of data and mask, as {scale, data, mask}; the first trained unless told.
        path: where to save; see `save_figure`.
    """
    world, at = _chosen(ds, at)
    trainings, encodings = _names(world, "training"), _names(world, "positional")
    depths = world["depth"].values.tolist()
    residuals = _names(world, "residual")
    shades = ", shaded for full lines" if len(residuals) > 1 else ""
    facts = [f"medians over seeds and their range{shades}" if world.sizes["seed"] > 1 else "one seed: no range"]
    facts += ["models with a residual stream"] * (residuals == ["on"])
    width = max(NARROWEST, PANEL * len(trainings) + 0.8)
    size = width, 2 * 1.4 * len(depths) + 1.5
    with sheet(ds, size, [*facts, _kind(at)], dpi=_dpi(width), path=path) as figure:
        upper, lower = figure.subfigures(2, 1, squeeze=False)[:, 0]
        for part, variable, dim in ((upper, "accuracy_by_position", "position"), (lower, "course_gap", "step")):
            cells = part.subplots(len(depths), len(trainings), sharex=True, sharey=True, squeeze=False)
            values = world[variable]
            if "pair" in values.dims:
                values = values.sel(pair=COURSE_PAIR)
            for depth, line in zip(depths, cells, strict=True):
                for training, cell in zip(trainings, line, strict=True):
                    _lines(cell, values.sel(depth=depth, training=training), dim, encodings)
                    if dim == "position":
                        cell.axhline(ANY_LABEL, color=GREY, linewidth=0.8, linestyle=":")
                        cell.set_xticks([0, ITEMS // 2, ITEMS - 1])
                    else:
                        cell.axhline(0, color=BLACK, linewidth=0.6)
                        _step_axis(cell, world["step"].values)
            what, along = (
                ("accuracy", "item with the answer") if dim == "position" else ("gap first-last", "training step")
            )
            _labels(cells, trainings, [f"{depth} blocks\n{what}" for depth in depths], along)
        handles = [entry(ENCODINGS[name][0], color=ENCODINGS[name][2], linewidth=1.6) for name in encodings]
        if len(residuals) > 1:
            handles.append(entry("with residual stream", color=GREY, linewidth=1.3, linestyle="--"))
        handles.append(entry("any label of the context", color=GREY, linewidth=0.8, linestyle=":"))
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles) if width > 8 else 4)
    return figure


def position_bias_learning_figure(
    ds: xr.Dataset, *, at: Mapping[str, str] | None = None, path: str | Path | None = None
) -> Figure:
    """Accuracy on novel classes and the last block's weight on right labels over training: a line per seed.

    A column per positional encoding, two rows per depth; models trained on unbiased data, or on the first kind there is.

    Args:
        ds: result of the experiment `position-bias`.
        at: which kind of data and mask, as {scale, data, mask}; the first trained unless told.
        path: where to save; see `save_figure`.
    """
    world, at = _chosen(ds, at)
    encodings, training, depths = _names(world, "positional"), _names(world, "training")[0], world["depth"].values
    world = world.sel(training=training)
    size = max(NARROWEST, PANEL * len(encodings) + 0.8), 2 * 1.4 * len(depths) + 1.5
    notes = [f"answers {TRAININGS[training]}; a line per seed", _kind(at)]
    with sheet(ds, size, notes, dpi=_dpi(size[0]), path=path) as figure:
        cells = figure.subplots(2 * len(depths), len(encodings), sharex=True, sharey="row", squeeze=False)
        even = InContext.burst / (2 * ITEMS + 1)
        for (row, depth), (column, name) in product(enumerate(depths), enumerate(encodings)):
            one = world.sel(depth=depth, positional=name)
            on = one["course_match"].sel(layer=depth - 1, part="label")
            for cell, values, lines in zip(
                cells[2 * row : 2 * row + 2, column],
                (one["course_novel"], on),
                ((TRAINED, BLIND), (even,)),
                strict=True,
            ):
                for residual in world["residual"].values:
                    look: Any = {
                        "color": ENCODINGS[name][2],
                        "linewidth": 1.1,
                        "marker": "." if on.step.size < 2 else "",
                    }
                    curves = values.sel(residual=residual).transpose("step", "seed")
                    cell.plot(values["step"], curves, linestyle="--" if residual == "on" else "-", **look)
                for line, style in zip(lines, ("-", ":") if len(lines) > 1 else (":",), strict=True):
                    cell.axhline(line, color=GREY, linewidth=0.8, linestyle=style)
                grid(cell)
                _step_axis(cell, world["step"].values)
        for cell, name in zip(cells[0], encodings, strict=True):
            cell.set_title(ENCODINGS[name][0], fontsize=9)
        for row, depth in enumerate(depths):
            cells[2 * row, 0].set(ylabel=f"{depth} blocks\naccuracy", ylim=(0, 1.02))
            cells[2 * row + 1, 0].set(ylabel="weight on\nright labels", ylim=(0, None))
        for cell in cells[-1]:
            cell.set_xlabel("training step")
        handles = [entry("without residual stream", color=GREY), entry("with it", color=GREY, linestyle="--")]
        handles += [entry(f"gate, {TRAINED:g}", color=GREY, linewidth=0.8)]
        handles += [entry("blind to content", color=GREY, linewidth=0.8, linestyle=":")]
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    return figure


def _chosen(ds: xr.Dataset, at: Mapping[str, str] | None) -> tuple[xr.Dataset, dict[str, str]]:
    """The models of one kind, and of which."""
    at = dict(at or kinds(ds)[0])
    return ds.sel(at), at


def _names(world: xr.Dataset, dim: str) -> list[str]:
    """Values of a dimension of which something was trained."""
    return [str(name) for name in world[dim].values if bool(world["gap"].sel({dim: name}).notnull().any())]


def _residuals(world: xr.Dataset) -> tuple[str, str | None]:
    """Whose gaps are bars, and whose are diamonds."""
    names = _names(world, "residual")
    return ("off", "on" if "on" in names else None) if "off" in names else ("on", None)


def _bars(cell: Axes, gap: xr.DataArray, labels: Sequence[str], bars: str, marks: str | None) -> None:
    """Groups along the first dimension of [group, residual, seed, pair], a bar per pair."""
    each = 0.8 / len(PAIRS)
    for (g, of_group), (p, (pair, color)) in product(enumerate(gap), enumerate(PAIR_COLORS.items())):
        x = g + (p - 1) * each
        value, low, high = over_seeds(of_group.sel(residual=bars, pair=pair).values)
        if np.isfinite(value):
            cell.bar(x, value, width=each * 0.92, color=color, linewidth=0)
            cell.vlines(x, low, high, color=BLACK, linewidth=0.9)
        if marks is not None:
            value, low, high = over_seeds(of_group.sel(residual=marks, pair=pair).values)
            if np.isfinite(value):
                cell.vlines(x + each * 0.24, low, high, color=GREY, linewidth=0.8)
                cell.plot(x + each * 0.24, value, markersize=3, mew=0.8, **DIAMOND)
    cell.axhline(0, color=BLACK, linewidth=0.7)
    grid(cell)
    if not bool(gap.notnull().any()):
        cell.text(0.5, 0.55, "not trained", transform=cell.transAxes, ha="center", fontsize=7.5, color=GREY)
    cell.set(xticks=range(len(labels)), xticklabels=labels, xlim=(-0.6, len(labels) - 0.4))


def _lines(cell: Axes, values: xr.DataArray, dim: str, encodings: Sequence[str]) -> None:
    """A line per encoding and residual switch, along `dim`."""
    x = values[dim].values
    for name, residual in product(encodings, values["residual"].values):
        curves = values.sel(positional=name, residual=residual).transpose("seed", dim).values
        if np.isfinite(curves).any():
            full = values.sizes["residual"] == 1 or residual == "off"
            look: Any = {"color": ENCODINGS[name][2], "linewidth": 1.2, "marker": "." if x.size < 2 else ""}
            if full:
                ranged(cell, x, curves, alpha=0.15, **look)
            else:
                cell.plot(x, np.median(curves, 0), linestyle="--", **look)
    grid(cell)


def _step_axis(cell: Axes, steps: np.ndarray) -> None:
    """Logarithmic; decades are labelled, or both ends where there is no more than one."""
    if steps.size > 1:
        cell.set_xscale("log")
    if steps[-1] < 100 * steps[0]:
        cell.set_xticks(sorted({int(steps[0]), int(steps[-1])}))
    cell.xaxis.set_major_formatter(FuncFormatter(_thousands))
    cell.xaxis.set_minor_locator(NullLocator())


def _labels(cells: Any, trainings: Sequence[str], rows: Sequence[str], along: str) -> None:
    """Above the columns, beside the rows and below."""
    for cell, training in zip(cells[0], trainings, strict=True):
        cell.set_title(f"answers {TRAININGS[training]}", fontsize=9)
    for cell, row in zip(cells[:, 0], rows, strict=True):
        cell.set_ylabel(row)
    for cell in cells[-1]:
        cell.set_xlabel(along)


def _about_seeds(world: xr.Dataset) -> str:
    seeds = world.sizes["seed"]
    if seeds == 1:
        return "one seed: no intervals"
    return f"means over {seeds} seeds" + (", 95 % t intervals" if seeds >= FEWEST else " and their range")


def _kind(at: Mapping[str, str]) -> str:
    data = "Gaussian data" if at["data"] == "gaussian" else "fixed-vocabulary data"
    drawn = "1/sqrt(d), as in the paper's text" if at["scale"] == "text" else "1/d, as in its program"
    return f"{data}, components of standard deviation {drawn}; mask: {at['mask']}"


def _thousands(value: float, _: object) -> str:
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"


def _dpi(width: float) -> int:
    return min(DPI, int(WIDEST / width))


def draw(ds: xr.Dataset, path: Path) -> list[Path]:
    """All figures; the first kind of data under `path` itself, any others with their names added to it."""
    written: list[Path] = []
    for n, at in enumerate(kinds(ds)):
        base = path if n == 0 else path.with_name("-".join((path.name, *at.values())))
        curves = base.with_name(f"{base.name}-curves")
        position_bias_figure(ds, at=at, path=base)
        position_bias_curves_figure(ds, at=at, path=curves)
        written += [*files(base), *files(curves)]
        if "course_novel" in ds:
            learning = base.with_name(f"{base.name}-learning")
            position_bias_learning_figure(ds, at=at, path=learning)
            written += files(learning)
    return written
