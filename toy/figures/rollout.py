"""Rollouts of toys' attention against the bounds and peaks of theorems of [Wu]; several planes; other attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from probes.figures.style import CYCLE, GREY, ORANGE, depth_color
from probes.theory.rollout import turned_bounds

from ..experiments.rollout_bounds import SUMMED
from ..experiments.rollout_claims import crossing, decay_stars, even_beyond, fresh, learnt, peaks, rope_stars
from . import masks
from .sheet import barred, entry, files, sheet, wanted

WIDTH, HEIGHT, DPI = 13.2, 6.6, 110
DASHED: Any = (0, (4, 1.5))
DOTTED: Any = (0, (1, 1.3))
MARKERS = "os^D"
ROOM = 0.3  # of the text: a peak further back leaves its curve no room
PLANES_LEAST = 1e-12  # of that of several planes, whose lower bounds go on
LEAST = 1e-6  # of the axes of masses: what is left below says the same


def rollout_figure(ds: xr.Dataset, *, path: str | Path | None = None) -> Figure:
    """Masks and attention other than softmax above; decay, its peaks, RoPE's peaks and several planes of RoPE below.

    Trained toys that failed at their task are left out. Panels of what the result does not hold stay empty.

    Args:
        ds: a result of `headwater toy rollout`.
        path: where to save; see `save_figure`.

    Raises:
        InputError: the result is another one.
    """
    ds = learnt(ds)
    limits, decays, turns = ("outside" in ds and bool(fresh(ds)), "decay_curve" in ds, "rope_curve" in ds)
    wanted(ds, "outside" in ds or decays or turns, "rollouts", "rollout")
    note = "lines: median over seeds; marks: median, bars: range; in 4.3 the lower edge is 1e-6 or less"
    with sheet(ds, (WIDTH, HEIGHT), [note], dpi=DPI, path=path) as figure:
        cells: Any = figure.subplots(2, 4)
        panels = [
            (limits, _causal),
            (limits, _windows),
            (limits, _prefixes),
            ("gone" in ds and bool(fresh(ds)), _other_attention),
            (decays, _by_distance),
            (decays, _decay_peaks),
            (turns, _rope_peaks),
            ("planes_curve" in ds, _planes),
        ]
        for cell, (there, draw) in zip(cells.flat, panels, strict=True):
            if there:
                draw(cell, ds)
            else:
                cell.axis("off")
    return figure


def _mass_axis(cell: Axes, ds: xr.Dataset, layers: int) -> None:
    cell.set(yscale="log", ylim=(LEAST, 2.5), xlim=(0.5, layers + 0.5), xlabel="layers")


def _course(ds: xr.Dataset, name: str, case: str, source: str) -> np.ndarray:
    """Median over seeds of a mass by layer, as far as the source has layers; empty if none of its toys learnt."""
    values = ds[name].sel(case=case, source=source).transpose("seed", "layer").values
    runs = values[np.isfinite(values).any(1)]
    return np.median(runs[:, np.isfinite(runs).all(0)], 0) if len(runs) else runs.ravel()


def _causal(cell: Axes, ds: xr.Dataset) -> None:
    """Mass beyond the first token by layer, every source, with its bound."""
    if "causal" not in ds["case"].values:
        cell.axis("off")
        return
    trained = [str(x) for x in ds["source"].values if str(x) not in fresh(ds)]
    most = 1
    for n, source in enumerate([*fresh(ds), *trained]):
        course = _course(ds, "outside", "causal", source)
        if not course.size:
            continue
        color = CYCLE[n % len(CYCLE)]
        x = np.arange(1, len(course) + 1)
        most = max(most, len(course))
        own = source in trained
        look: Any = {"marker": "o", "markersize": 4} if own else {}
        cell.plot(x, course, color=color, linewidth=1.5, label=source, zorder=3 + own, **look)
        if not own:
            cell.plot(x, _course(ds, "outside_bound", "causal", source), color=color, linewidth=1, linestyle=DASHED)
    cell.plot([], [], color=GREY, linewidth=1, linestyle=DASHED, label="its bound")
    _mass_axis(cell, ds, most)
    cell.legend(loc="lower left", fontsize=7.5)
    cell.set(ylabel="mass beyond the first token", title="4.1: causal mask")


def _windows(cell: Axes, ds: xr.Dataset) -> None:
    """The same by window, for logits next to none."""
    source = fresh(ds)[0]
    widths = sorted(int(str(case).split()[1]) for case in ds["case"].values if str(case).startswith("window"))
    cases: list[tuple[str, str]] = [(f"window {w}", f"w = {w}, {crossing(ds, w)} to cross") for w in widths]
    if "causal" in ds["case"].values:
        cases.append(("causal", "causal"))
    layers = 1
    for n, (case, label) in enumerate(cases):
        course = _course(ds, "outside", case, source)
        layers = max(layers, len(course))
        color = depth_color(n, len(cases))
        x = np.arange(1, len(course) + 1)
        cell.plot(x, course, color=color, linewidth=1.5, label=label)
        cell.plot(x, _course(ds, "outside_bound", case, source), color=color, linewidth=0.9, linestyle=DASHED)
    _mass_axis(cell, ds, layers)
    cell.legend(loc="lower left", fontsize=7.5)
    cell.set(ylabel="mass beyond the first token", title=f"4.2: windows ({source})")


def _prefixes(cell: Axes, ds: xr.Dataset) -> None:
    """Where the last query's mass is in the end, by key, for logits next to none and the largest."""
    sources = list(dict.fromkeys([fresh(ds)[0], fresh(ds)[-1]]))
    names = [str(case) for case in ds["case"].values if str(case).startswith("prefix")]
    layer = int(np.flatnonzero(np.isfinite(ds["outside"].sel(source=sources[0]).values).any((0, 1)))[-1])
    last = 1
    handles = []
    for n, case in enumerate(names):
        k, color = int(case.split()[1]), CYCLE[n % len(CYCLE)]
        last = max(last, k)
        handles.append(_dot(f"K = {k}", color))
        for m, source in enumerate(sources):
            values = ds["last"].sel(case=case, source=source).isel(layer=layer).transpose("seed", "key").values
            values = np.maximum(values[:, : k + 1], LEAST)  # the first key outside, too
            x = np.arange(values.shape[1]) + 0.13 * (n - (len(names) - 1) / 2) + 0.05 * m
            barred(cell, x, values, color, bar=0.9, **_dotted(m, color))
    handles += [_dot(source, GREY, m) for m, source in enumerate(sources)]
    cell.set(yscale="log", ylim=(LEAST / 1.6, 40), yticks=[10.0**n for n in range(-6, 1)], xticks=range(last + 1))
    cell.legend(handles=handles, loc="upper right", fontsize=7, ncols=2, columnspacing=1)
    cell.set(xlabel="key", ylabel=f"$P(z = j)$ after {layer + 1} layers", title="4.3: prefixes and the key after")


def _dotted(m: int, color: str) -> Any:
    """How marks of the first, full, and of the other source look."""
    face = color if m == 0 else "white"
    return {"marker": "os"[m], "linestyle": "", "markersize": 4.5, "markerfacecolor": face}


def _dot(label: str, color: str, m: int = 0) -> Line2D:
    return entry(label, color=color, **_dotted(m, color))


def _by_distance(cell: Axes, ds: xr.Dataset) -> None:
    """Rollouts over distance for one decay, with the theorem's curve, both as shares of their largest value."""
    # The slowest decay whose peaks stay away from the beginning of the text, where mass gathers anyway.
    inside = np.flatnonzero(decay_stars(ds)[:, -1] < ROOM * ds.sizes["distance"])
    chosen = int(inside[np.argmin(ds["decay"].values[inside])]) if len(inside) else int(np.argmax(ds["decay"].values))
    m = float(ds["decay"].values[chosen])
    curves = ds["decay_curve"].isel(decay=chosen, scale=0).median("seed").transpose("peak_layer", "distance").values
    stars = decay_stars(ds)[chosen]
    layers = len(curves)
    x = ds["distance"].values
    shown = [t for t in (1, 3, 5, 7) if t < layers] or [0]
    reach = min(len(x), int(3.2 * max(stars[shown[-1]], 4)))
    for t in shown:
        color = depth_color(t, layers)
        curve = curves[t] / curves[t].max()
        cell.plot(x[:reach], curve[:reach], color=color, linewidth=1.6, label=f"t = {t}")
        logs = np.array([sum(np.log1p(t / k) for k in range(1, d + 1)) - m * d for d in range(reach)])
        cell.plot(x[:reach], np.exp(logs - logs.max()), color=ORANGE, linewidth=1, linestyle=DASHED, zorder=4)
        cell.plot([stars[t]], [1.045], marker="v", markersize=5, color=color, linestyle="", clip_on=False)
    cell.plot([], [], color=ORANGE, linewidth=1, linestyle=DASHED, label=r"$\binom{t+x}{x}e^{-xm}$")
    cell.plot([], [], marker="v", color=GREY, linestyle="", markersize=5, label="$x^*$")
    cell.set_ylim(0, 1.08)
    cell.legend(loc="upper right", fontsize=7.5)
    cell.set(
        xlabel="distance $x$ (tokens)",
        ylabel="rollout, share of its largest",
        title=f"4.5: decay m = {m:g}, logits {float(ds['scale'].values[0]):g}",
    )


def _decay_peaks(cell: Axes, ds: xr.Dataset) -> None:
    """Measured against predicted peaks by depth."""
    found = peaks(ds, "decay_curve").transpose("decay", "scale", "seed", "peak_layer").values
    stars = decay_stars(ds)
    t = ds["peak_layer"].values
    for n, m in enumerate(ds["decay"].values):
        color = CYCLE[n % len(CYCLE)]
        cell.plot(t, stars[n], color=color, linewidth=1, label=f"m = {m:g}")
        _peak_marks(cell, t, found[n], color)
    handles = [entry("$\\lfloor t/(e^m-1) \\rfloor$", color=GREY, linewidth=1), *cell.get_legend_handles_labels()[0]]
    handles += [_scale_mark(k, f"measured, logits {scale:g}") for k, scale in enumerate(ds["scale"].values)]
    cell.legend(handles=handles, loc="upper left", fontsize=7.5)
    _peak_axis(cell, t)
    cell.set_title("4.5: peaks under decay")


def _rope_peaks(cell: Axes, ds: xr.Dataset) -> None:
    """Measured peaks by depth, with the theorem's curve's and those of the products of decays."""
    found = peaks(ds, "rope_curve").transpose("theta", "noise", "seed", "peak_layer").values
    stars, paths = rope_stars(ds), ds["rope_paths"].transpose("theta", "peak_layer").values
    t = ds["peak_layer"].values
    handles = []
    for n, angle in enumerate(ds["theta"].values):
        color = CYCLE[n % len(CYCLE)]
        cell.plot(t, stars[n], color=color, linewidth=1, linestyle=DOTTED)
        cell.plot(t, paths[n], color=color, linewidth=1)
        _peak_marks(cell, t, found[n], color)
        handles.append(entry(f"$\\theta_1$ = {angle:.2g}", color=color, linewidth=1))
    handles.append(entry("theorem's curve", color=GREY, linewidth=1, linestyle=DOTTED))
    handles.append(entry("products of decays", color=GREY, linewidth=1))
    handles += [_scale_mark(k, f"measured, noise {noise:g}") for k, noise in enumerate(ds["noise"].values)]
    cell.legend(handles=handles, loc="upper left", fontsize=7, ncols=2, columnspacing=1)
    _peak_axis(cell, t)
    cell.set_title("4.7: peaks with RoPE")


def _other_attention(cell: Axes, ds: xr.Dataset) -> None:
    """Share beyond the first token by layer, for logits next to none, where rows do not sum to 1 and where they do."""
    source, layers = fresh(ds)[0], len(even := even_beyond(ds))
    x = np.arange(1, layers + 1)
    if "outside" in ds and "causal" in ds["case"].values:
        cell.plot(
            x, _course(ds, "outside", "causal", source)[:layers], color=GREY, linewidth=3, alpha=0.5, label="softmax"
        )
    for n, name in enumerate(map(str, ds["attention"].values)):
        here = ds[["beyond", "gone"]].sel(attention=name, source=source).transpose("seed", "layer").isel(layer=x - 1)
        arrives = (here["gone"].median("seed") < 1).values  # in some sequence of most toys
        course = np.nanmedian(here["beyond"].values[:, arrives], 0)
        summed = name.endswith(SUMMED)
        look = DASHED if summed else "-"
        cell.plot(x[arrives], course, color=CYCLE[n // 2], linewidth=1 if summed else 1.6, linestyle=look, label=name)
        if not arrives.all() and not summed:
            cell.plot(x[arrives][-1:], course[-1:], "x", color=CYCLE[n // 2], label="nothing arrives from here on")
    cell.plot(x, even, color=ORANGE, linestyle=DOTTED, linewidth=1.6, zorder=4, label="$(T-1)/(t+T)$")
    _mass_axis(cell, ds, layers)
    cell.legend(loc="lower left", fontsize=7.5)
    cell.set(ylabel="share beyond the first token", title=f"Other attention ({source})")


def _planes(cell: Axes, ds: xr.Dataset) -> None:
    """The first seed's rollouts of two layers by distance, by kind of directions, between their bounds.

    Of more layers there are so many paths that the upper bound is 1.
    """
    t = min(1, ds.sizes["peak_layer"] - 1)
    here = ds.isel(seed=0, noise=0)
    x = ds["distance"].values
    for n, kind in enumerate(map(str, ds["turned"].values)):
        one = here.sel(turned=kind)
        color = CYCLE[n % len(CYCLE)]
        cell.plot(x, one["planes_curve"].isel(peak_layer=t), color=color, linewidth=1.4, label=kind)
        for end in turned_bounds(one["planes_lost"].values, t, float(one["planes_spread"])):
            cell.plot(x, end, color=color, linewidth=0.8, linestyle=DASHED)
    cell.plot([], [], color=GREY, linewidth=0.8, linestyle=DASHED, label="bounds")
    cell.set(yscale="log", ylim=(PLANES_LEAST, 1e4), xlabel="distance $x$ (tokens)", ylabel="rollout")
    cell.legend(loc="upper right", fontsize=7.5, ncols=2, columnspacing=1)
    cell.set_title(f"RoPE in several planes, t = {t}, seed 0")


def _peak_marks(cell: Axes, t: np.ndarray, found: np.ndarray, color: str) -> None:
    """Medians over seeds with ranges, [scale, seed, layer]; the largest scale hollow."""
    for k, one in enumerate(found):
        barred(cell, t + 0.16 * (k - (len(found) - 1) / 2), one, color, bar=0.8, **_scaled(k, color))


def _scaled(k: int, color: str) -> Any:
    face = color if k == 0 else "white"
    return {"marker": MARKERS[k % 4], "linestyle": "", "markersize": 4, "markerfacecolor": face}


def _scale_mark(k: int, label: str) -> Line2D:
    return entry(label, color=GREY, **_scaled(k, GREY))


def _peak_axis(cell: Axes, t: np.ndarray) -> None:
    cell.set_xticks(t)
    high = cell.get_ylim()[1]
    cell.set(
        ylim=(-0.02 * high, 1.45 * high), xlabel="index $t$ of the top layer", ylabel="distance of the peak (tokens)"
    )


def draw(ds: xr.Dataset, path: Path) -> list[Path]:
    """PATH.png and PATH.svg, and PATH-masks of the graphs."""
    rollout_figure(ds, path=path)
    graphs = path.with_name(f"{path.name}-masks")
    masks.masks_figure(path=graphs)
    return [*files(path), *files(graphs)]
