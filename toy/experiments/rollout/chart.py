"""The figures of rollout: where the mass goes, peaks under decay and RoPE, and masks as graphs as in Fig. 1 of [Wu]."""

from __future__ import annotations

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

from ..rules import places, ranged
from .bounds import SUMMED
from .tables import crossing, decay_stars, even_beyond, fresh, learnt, peaks, rope_stars

LEAST = 1e-6  # of the axes of masses: what is left below says the same
TITLE = "Rollouts of attention against the theorems' bounds and peaks"
CAPTION = (
    "Medians over seeds and ranges. Masses: dashed lines are bounds. Peaks: lines are products of the decays alone (under "
    "decay the theorem's x*), dotted lines the theorem's curve."
)


def charts(ds: xr.Dataset) -> dict[str, Figure]:
    """Theorems 4.1, 4.2, 4.5 and 4.7 on fresh toys with the smallest logits or noise, and the graphs of the masks."""
    ds = learnt(ds)
    rows = [
        Panel("mass beyond the first token, causal mask", _masses, height=2.7),
        Panel("mass beyond the first token, windows", _windows, height=2.7),
        Panel("distance of the peak under decay", _decay_peaks, height=2.7),
        Panel("distance of the peak with RoPE", _rope_peaks, height=2.7),
    ]
    there = ["outside" in ds and bool(fresh(ds))] * 2 + ["decay_curve" in ds, "rope_curve" in ds]
    main = panels({TITLE: ds}, [row for row, known in zip(rows, there, strict=True) if known], CAPTION)
    return {"": main, "-masks": _graphs()}


def _median(ds: xr.Dataset, name: str, **where: str) -> np.ndarray:
    """Median over seeds by layer."""
    return ds[name].sel(where).median("seed").values


def _mass_axis(cell: Axes, layers: int) -> None:
    cell.set(ylim=(LEAST, 2), xlabel="layers", xlim=(0, layers))


def _masses(cell: Axes, ds: xr.Dataset) -> None:
    """Causal toys by the size of their logits, and attention whose rows do not sum to 1."""
    x = np.arange(1, ds.sizes["layer"] + 1)
    least = fresh(ds)[0]
    series = [
        Series("bound", _median(ds, "outside_bound", case="causal", source=least), BLUE, x=x, line=DASHED, width=1.0)
    ]
    for source, color in zip(fresh(ds), CYCLE, strict=False):
        series.append(Series(source, _median(ds, "outside", case="causal", source=source), color, x=x))
    if "beyond" in ds and "sigmoid" in ds["attention"].values:
        even = even_beyond(ds)
        series.append(
            Series(
                "sigmoid", _median(ds, "beyond", attention="sigmoid", source=least), ORANGE, x=x, width=3.0, alpha=0.6
            )
        )
        series.append(Series("equal weights", even, GREY, x=x[: len(even)], line=DOTTED))
        summed = _median(ds, "beyond", attention=f"sigmoid{SUMMED}", source=least)
        series.append(Series(f"sigmoid{SUMMED}", summed, ORANGE, x=x, line=DASHED))
    curves(cell, series, log=True, decades=None)
    _mass_axis(cell, len(x))


def _windows(cell: Axes, ds: xr.Dataset) -> None:
    """The same by window, for the smallest logits."""
    x, source = np.arange(1, ds.sizes["layer"] + 1), fresh(ds)[0]
    widths = sorted(int(case.split()[1]) for case in ds["case"].values.tolist() if case.startswith("window"))
    cases = {f"window {w}": f"window of {w}: {crossing(ds, w)} layers cross the text" for w in widths} | {
        "causal": "causal"
    }
    series = []
    for n, (case, label) in enumerate(cases.items()):
        color = to_hex(depth_color(n, len(cases)))
        series.append(Series(label, _median(ds, "outside", case=case, source=source), color, x=x))
        series.append(
            Series("", _median(ds, "outside_bound", case=case, source=source), color, x=x, line=DASHED, width=0.8)
        )
    curves(cell, series, log=True, decades=None)
    _mass_axis(cell, len(x))


def _decay_peaks(cell: Axes, ds: xr.Dataset) -> None:
    found = peaks(ds, "decay_curve").isel(scale=0).transpose("decay", "seed", "peak_layer")
    _peaks(cell, found, decay_stars(ds), None, "{:g} nats per token")


def _rope_peaks(cell: Axes, ds: xr.Dataset) -> None:
    found = peaks(ds, "rope_curve").isel(noise=0).transpose("theta", "seed", "peak_layer")
    _peaks(cell, found, ds["rope_paths"].values, rope_stars(ds), "{:.2g} rad per token")


def _peaks(cell: Axes, found: xr.DataArray, paths: np.ndarray, stars: np.ndarray | None, label: str) -> None:
    """Measured peaks [value, seed, layer] by layer, with lines [value, layer]."""
    x = found["peak_layer"].values
    for n, ((value,), seeds) in enumerate(places(found, str(found.dims[0]))):
        color = CYCLE[n]
        series = [Series(label.format(value), paths[n], color, x=x, width=1.0)]
        series += [Series("", stars[n], color, x=x, line=DOTTED, width=1.0)] if stars is not None else []
        curves(cell, [*series, ranged("", seeds, color, x=x, line="")])
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
