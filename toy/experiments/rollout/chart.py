"""The figures of rollout: where the mass goes, peaks under decay and RoPE, and masks as graphs as in Fig. 1 of [Wu]."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from probes.charts import (
    BLUE,
    CYCLE,
    DASHED,
    DOTTED,
    GREY,
    ORANGE,
    VERMILLION,
    Panel,
    Series,
    curves,
    depth_color,
    panels,
    sheet,
)
from probes.theory.rollout import centers, visible

from ..reading import courses
from .bounds import SUMMED
from .statements import crossing, decay_stars, even_beyond, fresh, learnt, peaks, rope_stars

LEAST = 1e-6  # of the axes of masses: what is left below says the same
TITLE = "Rollouts of attention against the theorems' bounds and peaks"
CAPTION = (
    "Medians over seeds and ranges. Masses: dashed lines are bounds. Peaks: lines are products of the decays alone (under "
    "decay the theorem's x*), dotted lines the theorem's curve."
)


def charts(ds: xr.Dataset) -> dict[str, Figure]:
    """Theorems 4.1, 4.2, 4.5 and 4.7 on fresh toys with the smallest logits or noise, and the graphs of the masks."""
    rows = [
        Panel("mass beyond the first token, causal mask", _masses, height=2.7),
        Panel("mass beyond the first token, windows", _windows, height=2.7),
        Panel("distance of the peak under decay", _decay_peaks, height=2.7),
        Panel("distance of the peak with RoPE", _rope_peaks, height=2.7),
    ]
    return {"": panels({TITLE: learnt(ds)}, rows, CAPTION), "-masks": _graphs()}


def _line(cell: Axes, values: xr.DataArray, name: str, color: str, **look: Any) -> None:
    """The median over seeds, by the number of layers."""
    values = values.median("seed") if "seed" in values.dims else values
    curves(cell, [Series(name, values, color, x=values["layer"] + 1, **look)], log=True, decades=None)
    cell.set(ylim=(LEAST, 2), xlabel="layers", xlim=(0, None))


def _masses(cell: Axes, ds: xr.Dataset) -> None:
    """Causal toys by the size of their logits, and attention whose rows do not sum to 1."""
    of = fresh(ds)
    causal = of.sel(case="causal") if "causal" in of["case"].values else of.isel(case=0)
    _line(cell, causal["outside_bound"].isel(source=0), "bound", BLUE, line=DASHED, width=1.0)
    for source, color in zip(of["source"].values, CYCLE, strict=False):
        _line(cell, causal["outside"].sel(source=source), str(source), color)
    if "sigmoid" in of["attention"].values:
        _line(cell, of["beyond"].sel(attention="sigmoid").isel(source=0), "sigmoid", ORANGE, width=3.0, alpha=0.6)
        _line(cell, even_beyond(ds), "equal weights", GREY, line=DOTTED)
        rows = f"sigmoid{SUMMED}"
        _line(cell, of["beyond"].sel(attention=rows).isel(source=0), rows, ORANGE, line=DASHED)


def _windows(cell: Axes, ds: xr.Dataset) -> None:
    """The same by window, for the smallest logits."""
    of = fresh(ds).isel(source=0)
    widths = sorted(int(case.split()[1]) for case in of["case"].values.tolist() if case.startswith("window"))
    cases = {f"window {w}": f"window of {w}: {crossing(ds, w)} layers cross the text" for w in widths}
    cases |= {"causal": "causal"} if "causal" in of["case"].values else {}
    for n, (case, name) in enumerate(cases.items()):
        color = to_hex(depth_color(n, len(cases)))
        _line(cell, of["outside"].sel(case=case), name, color)
        _line(cell, of["outside_bound"].sel(case=case), "", color, line=DASHED, width=0.8)


def _decay_peaks(cell: Axes, ds: xr.Dataset) -> None:
    _peaks(cell, peaks(ds, "decay").isel(scale=0), decay_stars(ds), None, "nats per token")


def _rope_peaks(cell: Axes, ds: xr.Dataset) -> None:
    _peaks(cell, peaks(ds, "rope").isel(noise=0), ds["rope_paths"], rope_stars(ds), "rad per token")


def _peaks(cell: Axes, at: xr.DataArray, paths: xr.DataArray, stars: xr.DataArray | None, unit: str) -> None:
    """Measured peaks [value, seed, peak_layer] by layer, with lines [value, peak_layer]."""
    (dim,) = {*paths.dims} - {"peak_layer"}
    x = at["peak_layer"].values
    for value, color in zip(at[dim].values, CYCLE, strict=False):
        curves(cell, [Series(f"{value:.2g} {unit}", paths.sel({dim: value}), color, x=x, width=1.0)])
        if stars is not None:
            curves(cell, [Series("", stars.sel({dim: value}), color, x=x, line=DOTTED, width=1.0)])
    courses(cell, at, "peak_layer", str(dim), dict.fromkeys(at[dim].values.tolist(), ""), line="")
    cell.set_xlabel("index t of the top layer")


TOKENS, WINDOW, PREFIX, DECAY = 6, 3, 2, 0.5  # DECAY in nats per token
BEND, SHRINK = 0.55, 7  # of an arrow, of its length; points between an arrow and the middle of its node
GRAPHS = {  # by name, [query, key]; decay hides no key: what an edge weighs is its width
    "causal": visible(TOKENS).astype(float),
    f"window of {WINDOW}": visible(TOKENS, window=WINDOW).astype(float),
    f"prefix of {PREFIX}": visible(TOKENS, prefix=PREFIX).astype(float),
    f"decay {DECAY:g}": np.tril(np.exp(-DECAY * np.abs(np.subtract.outer(np.arange(TOKENS), np.arange(TOKENS))))),
}


def _graphs() -> Figure:
    """One graph per mask: an arrow from every key to every query that sees it."""
    caption = (
        "Arrows: from a key to a query that sees it, other than itself. Red, and in the titles: center nodes, from which "
        "every token is reached along arrows. Under a full mask all are."
    )
    figure, cells = sheet(2, 2, height=1.5, caption=caption)
    for cell, (name, weights) in zip(cells.flat, GRAPHS.items(), strict=True):
        reaching = centers(weights > 0)
        for query, key in np.argwhere((weights > 0) & ~np.eye(TOKENS, dtype=bool)):
            weight, color = weights[query, key], VERMILLION if key in reaching else GREY
            ends = {"arrowstyle": "-|>", "mutation_scale": 3 + 3 * weight, "shrinkA": SHRINK, "shrinkB": SHRINK}
            look = {"linewidth": 2 * weight, "alpha": 0.75, "color": color, **ends}
            cell.add_patch(FancyArrowPatch((key, 0), (query, 0), connectionstyle=f"arc3,rad={-BEND}", **look))
        for token in range(TOKENS):
            color = VERMILLION if token in reaching else BLUE
            face, ink = (color, "white") if token in reaching else ("white", color)
            cell.plot(token, 0, "o", markersize=11, color=color, markerfacecolor=face, zorder=3)
            cell.annotate(str(token), (token, 0), ha="center", va="center", fontsize=7, color=ink)
        highest = (TOKENS - 1) * BEND / 2 + 0.3
        cell.set(xlim=(-0.6, TOKENS - 0.4), ylim=(-0.8, highest))
        cell.set_title(f"{name}: {', '.join(map(str, reaching))}", fontsize=9)
        cell.set_aspect("equal")
        cell.axis("off")
    return figure
