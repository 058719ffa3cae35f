"""Order without positional encoding: the exact test beside models that learn which of two tokens stands first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from probes.figures.style import BLACK, BLUE, GREEN, GREY, ORANGE, VERMILLION, mark

from ..experiments.petroglyph import ROUNDING, Kind, fresh, kinds, trained
from ..experiments.rules import known
from .sheet import entry, files, grid, ranged, sheet, wanted

# The kinds whose training is drawn, with colour and line; the two blind ones lie on one another and must both be seen.
DRAWN: dict[Kind, tuple[str, Any]] = {
    (2, "causal", "none"): (BLUE, "-"),
    (1, "causal", "learned"): (GREEN, (0, (4, 1, 1, 1))),
    (1, "causal", "none"): (VERMILLION, "-"),
    (2, "full", "none"): (ORANGE, (0, (3, 3))),
}
WIDTH, HEIGHT = 9.6, 4.0  # inches
DPI = 150
FLOOR = 0.1  # eps; smaller changes, and none, are drawn there


def petroglyph_figure(ds: xr.Dataset, *, path: str | Path | None = None) -> Figure:
    """Left: change of the last output under permuted prefixes by kind of model; right: accuracy while training.

    Left, a dot per fresh model (every seed and variant of residual stream, feed-forward and norm) and a diamond per trained
    one, in units of float64's eps: the shaded strip is rounding. Right, the median over seeds and their range, on sequences
    and their mirror images; whoever is blind to order is right in exactly one half.

    Args:
        ds: a result of `headwater toy petroglyph`.
        path: where to save; see `save_figure`.

    Raises:
        InputError: the result is another one.
    """
    wanted(ds, "difference" in ds and "positional" in ds["difference"].dims, "permuted prefixes", "petroglyph")
    shown = [kind for kind in kinds(ds) if kind[2] == "none" or kind[:2] == (1, "causal")] or kinds(ds)
    shown.sort(key=lambda kind: (kind[2] != "none", kind[0], kind[1]))
    facts = [
        f"all {ds.attrs['permutations']} permutations of the tokens before the last one, float64",
        "which of two marked tokens stands first, on sequences and their mirror images",
        "the sources give no setting for either",
        f"lines: median of {ds.sizes['seed']} seeds, bands: their range",
    ]
    with sheet(ds, (WIDTH, HEIGHT), facts, dpi=DPI, path=path) as figure:
        cells: Any = figure.subplots(1, 2, width_ratios=[1.15, 1])
        _exact(cells[0], ds, shown)
        _training(cells[1], ds)
    return figure


def _exact(cell: Axes, ds: xr.Dataset, shown: Sequence[Kind]) -> None:
    cell.set_title("a  permuted prefixes, exact test", loc="left")
    cell.axvspan(FLOOR / 2, ROUNDING, color="#eeeeee", zorder=0)
    cell.text(ROUNDING / 2, -0.72, "rounding", color=GREY, fontsize=7.5, ha="right", va="center")
    for row, kind in enumerate(shown):
        values = np.maximum(fresh(ds, "difference", *kind).ravel(), FLOOR)
        after = known(trained, ds, "trained_difference", *kind)
        # Spread over the row in a fixed order, so that dots of one value can be counted.
        beside = row + 0.22 * np.linspace(-1, 1, values.size)[np.argsort(np.arange(values.size) * 7 % values.size)]
        cell.plot(values, beside, ".", color=_color(kind), markersize=3.2, alpha=0.75, mew=0)
        if after is not None:
            ends = np.maximum(after.values, FLOOR)
            cell.plot(ends, np.full(ends.shape, row + 0.33), "D", color=BLACK, markersize=3.4, mfc="none", mew=0.8)
    cell.set(xscale="log", xlim=(FLOOR / 2, 1e17), xticks=[1, 1e4, 1e8, 1e12, 1e16])
    cell.minorticks_off()
    cell.set(yticks=range(len(shown)), yticklabels=[_name(kind) for kind in shown], ylim=(len(shown) - 0.4, -1.05))
    grid(cell, "x")
    cell.set_xlabel("largest change of the last output (eps of the largest output)")
    handles = [mark("fresh", "o", GREY, size=3.0), mark("trained", "D", BLACK, filled=False, size=3.4)]
    cell.legend(handles=handles, loc="center", bbox_to_anchor=(0.5, 0.66), handletextpad=0.1)


def _training(cell: Axes, ds: xr.Dataset) -> None:
    cell.set_title("b  which of two tokens stands first?", loc="left")
    handles = []
    for kind, (color, line) in DRAWN.items():
        if (accuracy := known(trained, ds, "accuracy", *kind)) is None:
            continue
        values, steps = accuracy.transpose("seed", "step").values, accuracy["step"].values
        width = 2.6 if kind == (1, "causal", "none") else 1.7  # the other blind one is drawn over it
        look: Any = {"color": color, "linestyle": line, "linewidth": width}
        ranged(cell, steps, values, alpha=0.18, **look)
        handles.append(entry(_name(kind), **look))
    if not handles:
        cell.text(0.5, 0.5, "nothing trained", transform=cell.transAxes, ha="center", color=GREY)
        cell.axis("off")
        return
    cell.axhline(0.5, color=GREY, linewidth=0.9, zorder=1)
    aside: Any = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "fontsize": 7.5, "color": GREY}
    cell.annotate("blind to order: exactly 1/2", (0.02, 0.5), (0, -10), **aside)
    cell.set_xscale("symlog", linthresh=1, linscale=0.4)
    cell.set_xlim(0, float(ds["step"].max()))
    cell.minorticks_off()
    cell.set(ylim=(0.42, 1.02), xlabel="training step", ylabel="accuracy")
    grid(cell)
    cell.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, 0.98), handlelength=2.2, fontsize=7.5)


def _color(kind: Kind) -> str:
    if kind in DRAWN:
        return DRAWN[kind][0]
    return VERMILLION if kind[2] == "none" else GREEN


def _name(kind: Kind) -> str:
    layers, mask, positional = kind
    encoding = "no encoding" if positional == "none" else "RoPE" if positional == "rope" else positional
    return f"{layers} layer{'s' if layers > 1 else ''}, {mask}, {encoding}"


def draw(ds: xr.Dataset, path: Path) -> list[Path]:
    """PATH.png and PATH.svg."""
    petroglyph_figure(ds, path=path)
    return files(path)
