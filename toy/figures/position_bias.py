"""Position bias by encoding, training data, mask and depth: gaps, accuracy by position, both over training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

from probes.charts import save
from probes.figures.style import BLACK, BLUE, DPI, FADED, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION, WIDEST
from probes.results.gate import TRAINED

from ..experiments import sinks_claims
from ..experiments.learnt import BLIND, ENCODINGS, STREAMS, gate
from ..experiments.position_bias import ITEMS, PAIRS
from ..experiments.position_bias_claims import FEWEST, over_seeds
from ..experiments.rules import places
from ..tasks import InContext
from .sheet import entry, files, grid, ranged, sheet

PAIR_COLORS = dict(zip(PAIRS, (BLUE, ORANGE, SKY), strict=True))
COLORS = {"none": BLACK, "decay": VERMILLION, "rope": GREEN, "sinusoidal": PURPLE}
TRAININGS = {
    "unbiased": "anywhere",
    "first": "first",
    "middle": "middle",
    "last": "last",
    "first-and-last": "first or last",
}
DIAMOND: Any = {"marker": "D", "color": BLACK, "markerfacecolor": "white"}
COURSE_PAIR = "first-last"  # the one whose gap is drawn over training
WORLD = ("scale", "data")
COURSES = ("causal", "full")  # the masks whose curves are drawn
SMALL = 6.5  # points of the names of masks
PANEL, NARROWEST = 1.85, 7.0  # inches across: a panel, and a figure with its small print
# A reader who names any label of the context is right by choice of the item, or because another item has the same label.
ANY_LABEL = 1 / ITEMS + (1 - 1 / ITEMS) / InContext.labels


def position_bias_figure(
    ds: xr.Dataset, *, at: Mapping[str, str] | None = None, path: str | Path | None = None
) -> Figure:
    """Gap bars of three pairs of items: a row per positional encoding, a column per training data, masks side by side.

    Masks are the causal and the full one, each in all its depths; where neither was trained those that were. Bars are means
    over seeds with intervals as `over_seeds` gives them, pale where toys do not pass the gate; diamonds are of toys with the
    other residual switch.

    Args:
        ds: result of the experiment `position-bias`.
        at: which data, as {scale, data}; the first trained unless told.
        path: where to save; see `save_figure`.
    """
    world, at = _chosen(ds, at)
    masks = _names(world, "mask")
    wide = [mask for mask in masks if mask in COURSES] or masks
    rows = [(name, wide) for name in _names(world, "positional")]
    return _gaps(ds, world, at, rows, _names(world, "training"), path)


def position_bias_masks_figure(
    ds: xr.Dataset, *, at: Mapping[str, str] | None = None, path: str | Path | None = None
) -> Figure:
    """Gap bars under every mask, without encoding, after unbiased training; bars and arguments as those of the other."""
    world, at = _chosen(ds, at)
    rows = [("none", _names(world.sel(positional="none"), "mask"))]
    return _gaps(ds, world, at, rows, ["unbiased"], path)


def _gaps(
    ds: xr.Dataset,
    world: xr.Dataset,
    at: Mapping[str, str],
    rows: Sequence[tuple[str, list[str]]],
    trainings: Sequence[str],
    path: str | Path | None,
) -> Figure:
    """A row for each (encoding, masks), a column for each training."""
    passed, depths = (gate(ds)[1] == "trained").sel(at), world["depth"].values.tolist()
    bars, marks = _residuals(world)
    notes = [f"above 0: the earlier item decides; {STREAMS[bars]}; {_about_seeds(world)}", _kind(at)]
    width = max(NARROWEST, PANEL * len(trainings) + 0.8)
    pale = False
    with sheet(ds, (width, 1.45 * len(rows) + 1.6), notes, dpi=_dpi(width), path=path) as figure:
        cells = figure.subplots(len(rows), len(trainings), sharey=True, squeeze=False)
        for (name, masks), line in zip(rows, cells, strict=True):
            for training, cell in zip(trainings, line, strict=True):
                place = {"positional": name, "training": training}
                panel = world["gap"].sel(place)
                kinds = [{"mask": mask, "depth": depth} for mask, depth in product(masks, depths)]
                kinds = [kind for kind in kinds if bool(panel.sel(kind).notnull().any())]
                learnt = [passed.sel(place | kind) for kind in kinds]
                pale |= not all(bool(one.sel(residual=bars)) for one in learnt)
                labels = [_group(kind, len(depths) > 1) for kind in kinds]
                _bars(cell, [panel.sel(kind) for kind in kinds], labels, learnt, bars, marks)
        _labels(cells, trainings, [f"{ENCODINGS[name]}\naccuracy gap" for name, _ in rows], "")
        handles: list[Patch | Line2D] = [
            Patch(color=color, label=pair.replace("-", " against ")) for pair, color in PAIR_COLORS.items()
        ]
        if pale:
            handles.append(Patch(color=GREY, alpha=FADED, label="has not learnt to retrieve"))
        if marks is not None:
            handles.append(entry(STREAMS[marks], linestyle="", markersize=4, **DIAMOND))
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles) if width > 8 else 3)
    return figure


def _group(kind: Mapping[str, Any], deep: bool) -> str:
    """Below a group of bars."""
    return kind["mask"].replace("-", "\n") + f"\n{kind['depth']} blocks" * deep


def position_bias_curves_figure(ds: xr.Dataset, *, at: Mapping[str, str], path: str | Path | None = None) -> Figure:
    """Accuracy by the item with the answer, and the gap of first against last over training; a column per training data.

    Both have a row per depth; lines are medians over seeds, shades the range of the full ones.

    Args:
        ds: result of the experiment `position-bias`.
        at: which data and mask, as {scale, data, mask}.
        path: where to save; see `save_figure`.
    """
    world, at = _chosen(ds, at)
    trainings, encodings = _names(world, "training"), _names(world, "positional")
    depths = world["depth"].values.tolist()
    residuals = _names(world, "residual")
    world = world.sel(residual=residuals)
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
                    panel = values.sel(depth=depth, training=training)
                    _lines(cell, panel, dim, encodings)
                    if panel.isnull().all():
                        _not_trained(cell)
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
        handles = [entry(ENCODINGS[name], color=COLORS[name], linewidth=1.6) for name in encodings]
        if len(residuals) > 1:
            handles.append(entry("with residual stream", color=GREY, linewidth=1.3, linestyle="--"))
        handles.append(entry("any label of the context", color=GREY, linewidth=0.8, linestyle=":"))
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles) if width > 8 else 4)
    return figure


def position_bias_learning_figure(ds: xr.Dataset, *, at: Mapping[str, str], path: str | Path | None = None) -> Figure:
    """Accuracy on novel classes and the last block's weight on right labels over training: a line per seed.

    A column per positional encoding, two rows per depth; models trained on unbiased data, or on the first kind there is.

    Args:
        ds: result of the experiment `position-bias`.
        at: which data and mask, as {scale, data, mask}.
        path: where to save; see `save_figure`.
    """
    world, at = _chosen(ds, at)
    encodings, training, depths = _names(world, "positional"), _names(world, "training")[0], world["depth"].values
    residuals, dashes = _names(world, "residual"), {"off": "-", "on": "--"}
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
                for residual in residuals:
                    look: Any = {
                        "color": COLORS[name],
                        "linewidth": 1.1,
                        "marker": "." if on.step.size < 2 else "",
                    }
                    curves = values.sel(residual=residual).transpose("step", "seed")
                    cell.plot(values["step"], curves, linestyle=dashes[residual], **look)
                for line, style in zip(lines, ("-", ":") if len(lines) > 1 else (":",), strict=True):
                    cell.axhline(line, color=GREY, linewidth=0.8, linestyle=style)
                grid(cell)
                _step_axis(cell, world["step"].values)
        for cell, name in zip(cells[0], encodings, strict=True):
            cell.set_title(ENCODINGS[name], fontsize=9)
        for row, depth in enumerate(depths):
            cells[2 * row, 0].set(ylabel=f"{depth} blocks\naccuracy", ylim=(0, 1.02))
            cells[2 * row + 1, 0].set(ylabel="weight on\nright labels", ylim=(0, None))
        for cell in cells[-1]:
            cell.set_xlabel("training step")
        handles = [entry(STREAMS[name], color=GREY, linestyle=dashes[name]) for name in residuals]
        handles += [entry(f"gate, {TRAINED:g}", color=GREY, linewidth=0.8)]
        handles += [entry("blind to content, or even weights", color=GREY, linewidth=0.8, linestyle=":")]
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles) if size[0] > 8 else 2)
    return figure


def _chosen(ds: xr.Dataset, at: Mapping[str, str] | None) -> tuple[xr.Dataset, dict[str, str]]:
    """The models of one kind, and of which."""
    at = dict(at or dict(zip(WORLD, _worlds(ds)[0][0], strict=True)))
    world = ds.sel(at)
    there = world["gap"].notnull()
    some = {dim: there.any([other for other in there.dims if other != dim]).values for dim in ("depth", "seed")}
    return world.isel({dim: np.flatnonzero(kept) for dim, kept in some.items()}), at


def _worlds(ds: xr.Dataset) -> list[tuple[tuple[str, str], xr.Dataset]]:
    """Scales and data of which something was trained, each with its models."""
    return [(labels, one) for labels, one in places(ds, *WORLD) if bool(one["gap"].notnull().any())]


def _names(world: xr.Dataset, dim: str) -> list[str]:
    """Values of a dimension of which something was trained."""
    return [str(name) for name in world[dim].values if bool(world["gap"].sel({dim: name}).notnull().any())]


def _residuals(world: xr.Dataset) -> tuple[str, str | None]:
    """Whose gaps are bars, and whose are diamonds: the residual switch with more models comes first."""
    many = {name: int(world["gap"].sel(residual=name).notnull().sum()) for name in _names(world, "residual")}
    first, *other = sorted(many, key=lambda name: -many[name])
    return first, next(iter(other), None)


def _bars(
    cell: Axes,
    gaps: Sequence[xr.DataArray],
    labels: Sequence[str],
    learnt: Sequence[xr.DataArray],
    bars: str,
    marks: str | None,
) -> None:
    """A group for each [residual, seed, pair], a bar per pair; pale where the toys [residual] have not learnt."""
    each = 0.8 / len(PAIRS)
    for (g, of_group), (p, (pair, color)) in product(enumerate(gaps), enumerate(PAIR_COLORS.items())):
        x = g + (p - 1) * each
        shade = {switch: 1 if bool(learnt[g].sel(residual=switch)) else FADED for switch in (bars, marks) if switch}
        value, low, high = over_seeds(of_group.sel(residual=bars, pair=pair).values)
        if np.isfinite(value):
            cell.bar(x, value, width=each * 0.92, color=color, edgecolor=color, linewidth=0.8, alpha=shade[bars])
            cell.vlines(x, low, high, color=BLACK, linewidth=0.9)
        if marks is not None:
            value, low, high = over_seeds(of_group.sel(residual=marks, pair=pair).values)
            if np.isfinite(value):
                cell.vlines(x + each * 0.24, low, high, color=GREY, linewidth=0.8, alpha=shade[marks])
                cell.plot(x + each * 0.24, value, markersize=3, mew=0.8, alpha=shade[marks], **DIAMOND)
    cell.axhline(0, color=BLACK, linewidth=0.7)
    grid(cell)
    if not gaps:
        _not_trained(cell)
    cell.set(xticks=range(len(labels)), xlim=(-0.6, max(len(labels), 1) - 0.4))
    cell.set_xticklabels(labels, fontsize=SMALL)


def _not_trained(cell: Axes) -> None:
    cell.text(0.5, 0.58, "not trained", transform=cell.transAxes, ha="center", fontsize=7.5, color=GREY)


def _lines(cell: Axes, values: xr.DataArray, dim: str, encodings: Sequence[str]) -> None:
    """A line per encoding and residual switch, along `dim`."""
    x = values[dim].values
    for name, residual in product(encodings, values["residual"].values):
        curves = values.sel(positional=name, residual=residual).transpose("seed", dim).values
        curves = curves[np.isfinite(curves).any(1)]  # other settings may have more seeds
        if len(curves):
            full = values.sizes["residual"] == 1 or residual == "off"
            look: Any = {"color": COLORS[name], "linewidth": 1.2, "marker": "." if x.size < 2 else ""}
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
    seeds = world["gap"].isel(pair=0).notnull().sum("seed").values
    fewest, most = int(seeds[seeds > 0].min()), int(seeds.max())
    if most == 1:
        return "one seed: no intervals"
    told = f"means over {'up to ' * (fewest < most)}{most} seeds"
    if most < FEWEST:
        return f"{told} and their range"
    return f"{told}, 95 % t intervals" + f" (the range where there are fewer than {FEWEST})" * (fewest < FEWEST)


def _kind(at: Mapping[str, str]) -> str:
    data = "Gaussian data" if at["data"] == "gaussian" else "fixed-vocabulary data"
    drawn = "1/sqrt(d)" if at["scale"] == "text" else "1/d"
    return f"{data}, components of deviation {drawn}" + (f"; {at['mask']} mask" if "mask" in at else "")


def _thousands(value: float, _: object) -> str:
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"


def _dpi(width: float) -> int:
    return min(DPI, int(WIDEST / width))


def draw(ds: xr.Dataset, path: Path) -> list[Path]:
    """All figures; the first kind of data under `path` itself, any others with their names added to it."""
    written: list[Path] = []

    def add(figure: Callable[..., Figure], at: Mapping[str, str], *names: str) -> None:
        base = path.with_name("-".join((path.name, *names)))
        figure(ds, at=at, path=base)
        written.extend(files(base))

    for n, (labels, one) in enumerate(_worlds(ds)):
        at, names = {"scale": labels[0], "data": labels[1]}, labels if n else ()
        add(position_bias_figure, at, *names)
        masks = _names(one, "mask")
        if {*masks} - {*COURSES} and "unbiased" in _names(one, "training"):
            add(position_bias_masks_figure, at, *names, "masks")
        for mask in [mask for mask in masks if mask in COURSES] or masks[:1]:
            own = names if mask == "causal" else (*names, mask)
            add(position_bias_curves_figure, at | {"mask": mask}, *own, "curves")
            if "course_novel" in ds:
                add(position_bias_learning_figure, at | {"mask": mask}, *own, "learning")
    sinks = {path.with_name(f"{path.name}-sinks{end}"): figure for end, figure in sinks_claims.charts(ds).items()}
    return [*written, *(file for base, figure in sinks.items() for file in save(figure, base))]
