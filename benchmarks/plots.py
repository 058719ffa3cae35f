"""The page's figures, from rows alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attention
import jacobian
import matplotlib
import numpy as np
import scaling
from harness import Rows, Settings, middle, quartiles
from machine import MIB
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from probes.figures.palette import BLACK, BLUE, CYCLE, FAINT, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION
from probes.figures.style import DPI, STYLE, log_axis
from probes.run.files import atomic

# How each contender is drawn and called: ours in blue and green, the plain pass in black.
LOOKS = {
    "plain": (BLACK, "plain pass"),
    "sinks": (BLUE, "probes.sinks, 8 keys"),
    "sinks all": (SKY, 'probes.sinks, keys="all"'),
    "eager": (VERMILLION, "output_attentions=True"),
    "cache": (PURPLE, "TransformerLens, run_with_cache"),
    "hooks": (ORANGE, "TransformerLens, hooks"),
    "nnsight": (GREEN, "nnsight"),
    "exact": (BLUE, "ours, exact"),
    "sketch": (SKY, "ours, sketch of 64"),
    "auto": (GREEN, "ours, sketch to 2 %"),
    "replicated 8": (VERMILLION, "prompt repeated 8 times"),
    "replicated 32": (ORANGE, "prompt repeated 32 times"),
    "jacrev": (PURPLE, "torch.func.jacrev"),
    "lens": (GREY, "TransformerLens's lens, per block"),
}
GRID: dict[str, Any] = {"color": FAINT, "linewidth": 0.6}
LEGEND: dict[str, Any] = {"loc": "outside right upper", "fontsize": 8}


def draw(folder: Path, rows: Rows, settings: Settings, cases: Mapping[str, Any]) -> None:
    """One PNG for each of the cases that have one."""
    drawn = {"jacobian": jacobian_figure, "attention": attention_figure, "scaling": scaling_figure}
    with matplotlib.rc_context(STYLE):
        for name in cases:
            figure = drawn[name](rows, settings) if name in drawn else None
            if figure is not None:
                with atomic(folder / settings.figure(name)) as temporary:
                    figure.savefig(temporary, format="png", dpi=DPI)


def _doublings(cell: Axes, at: list[int]) -> None:
    """A logarithmic axis of abscissas with these values and no others; 4k for 4,096."""
    cell.set_xscale("log", base=2)
    cell.xaxis.set_major_locator(FixedLocator(at))
    cell.xaxis.set_major_formatter(lambda x, _: f"{x / 1024:,.0f}k" if x >= 1024 else f"{x:,.0f}")
    cell.xaxis.set_minor_locator(NullLocator())
    cell.grid(axis="y", **GRID)


def jacobian_figure(rows: Rows, settings: Settings) -> Figure | None:
    """Time of every way against our exact one, by size."""
    (job,) = jacobian.jobs(settings)
    found = rows.of(job)
    if not found:
        return None
    names = [name for name in jacobian.NAMES if any(name in row["seconds"] for row in found.values())]
    figure = Figure(figsize=(6.8, 0.9 + 0.23 * len(names) * len(found)), layout="constrained")
    cell, step = figure.add_subplot(), len(names) + 1.2
    for n, row in enumerate(found.values()):
        for k, name in enumerate(names):
            if name not in row["seconds"]:
                continue
            each, (color, label) = jacobian.against_exact(name, row), LOOKS[name]
            y, value = n * step + k, middle(each)
            cell.barh(y, value, 0.82, color=color, label=label if n == 0 else None)
            if len(each) > 2:
                cell.hlines(y, *quartiles(each), color=BLACK, linewidth=1)
            cell.text(value, y, f"  {value:.2f}", va="center", fontsize=7, color=BLACK)
    cell.axvline(1, color=BLACK, linewidth=0.8)
    middles = np.arange(len(found)) * step + (len(names) - 1) / 2
    cell.set_yticks(middles, [label.replace(", T", "\nT") for label in found])
    cell.invert_yaxis()
    cell.margins(x=0.1)
    cell.set_xlabel("time / time of our exact Jacobian")
    cell.tick_params(axis="y", length=0)
    cell.grid(axis="x", **GRID)
    cell.set_axisbelow(True)
    figure.legend(**LEGEND)
    return figure


def attention_figure(rows: Rows, settings: Settings) -> Figure | None:
    """Time against a plain pass, and peak memory, over the prompt's length; an X where a contender did not survive."""
    shapes = {shape: attention.by_contender(rows, settings, shape) for shape in attention.shapes(settings)}
    shapes = {shape: found for shape, found in shapes.items() if found}
    if not shapes:
        return None
    figure = Figure(figsize=(8.6, 3.1 * len(shapes)), layout="constrained")
    handles: dict[str, Any] = {}
    every = figure.subplots(len(shapes), 2, squeeze=False)
    for cells, (shape, found) in zip(every, shapes.items(), strict=True):
        for name, one in found.items():
            survived, (color, label) = attention.lived(one), LOOKS[name]
            if not survived:
                continue
            times = [middle(attention.relative(row)) for row in survived.values()]
            sizes = [max(row["above"], MIB) / MIB for row in survived.values()]
            for cell, values in zip(cells, (None if name == "plain" else times, sizes), strict=True):
                if values is None:
                    continue
                (line,) = cell.plot(list(survived), values, color=color, marker="o", markersize=3.5, linewidth=1.4)
                handles.setdefault(label, line)
                for length in set(one) - set(survived):
                    cell.plot([length], [values[-1]], marker="x", color=color, markersize=6, linestyle="")
                    ends = [max(survived), length]
                    cell.plot(ends, [values[-1]] * 2, color=color, linewidth=0.8, linestyle=":")
        cells[0].axhline(1, color=BLACK, linewidth=0.8)
        cells[0].set_ylabel("time / plain pass")
        cells[1].set_ylabel("peak memory above the model, MiB")
        log_axis(cells[1])
        for cell in cells:
            _doublings(cell, attention.lengths(settings))
            cell.set_xlabel("T (1k: 1,024)")
            cell.set_title(shape if len(shapes) > 1 else "", fontsize=9)
    figure.legend(handles.values(), handles.keys(), title="x: did not survive", **LEGEND)
    return figure


def scaling_figure(rows: Rows, settings: Settings) -> Figure | None:
    """Times over every axis, with the operations, scaled to the last point, dotted; exponents stand in the page's table."""
    jobs = [job for job in scaling.jobs(settings) if rows.of(job)]
    if not jobs:
        return None
    figure = Figure(figsize=(9.6, 3.1), layout="constrained")
    cells = figure.subplots(1, len(scaling.AXES), sharey=True)
    handles: dict[str, Any] = {}
    for cell, (axis, said) in zip(cells, scaling.AXES.items(), strict=True):
        seen: set[int] = set()
        for color, job in zip(CYCLE, jobs, strict=False):
            x, seconds, operations = scaling.curve(rows.of(job), axis)
            if len(x) < 2:
                continue
            seen |= {int(value) for value in x}
            (line,) = cell.plot(x, seconds, color=color, marker="o", markersize=3, linewidth=1.3)
            scaled = np.array(operations) * seconds[-1] / operations[-1]
            cell.plot(x, scaled, color=color, linewidth=0.9, linestyle=":")
            handles.setdefault(scaling.PROBES[job.name].replace("`", ""), line)
        _doublings(cell, sorted(value for value in seen if value.bit_count() == 1))
        cell.set(xlabel=said)
        cell.tick_params(axis="x", labelsize=8)
    log_axis(cells[0])
    cells[0].set_ylabel("seconds")
    title = "dotted: operations,\nthrough the last point"
    figure.legend(handles.values(), handles.keys(), title=title, title_fontsize=8, **LEGEND)
    return figure
