"""Attention sinks and the heads that read position 0."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ..measures.roles import role_names
from .blocks import MANY, depth_legend
from .style import (
    BLACK,
    BLUE,
    FAINT,
    GREEN,
    GREY,
    LARGEST,
    ORANGE,
    STYLE,
    VERMILLION,
    WEIGHTS,
    depth_color,
    facts,
    log_axis,
    mark,
    option,
    panels,
    results_of,
    save_figure,
    side_legend,
    small_print,
    thinned,
)

NEEDS = {
    "attends": ("layer", "head"),
    "sink_rate": ("layer", "key"),
    "over_tau_of_model": ("key",),
    "selected": ("rule", "layer", "head"),
    "value_norm": ("layer", "head", "place"),
}
MOST_WRITTEN = 40  # cells of a heat map with their values in them, and outlines, which would hide smaller ones
SIDE = 1.45  # inches of legends
NARROW = 3  # models beside each other beyond which a column has room for two pictures instead of three
POSITIONS = 64  # in a picture; of a single model twice as many, which a narrower picture has no pixels for
SHADES = 16  # of a picture: a pattern is noise to PNG; no more shades than the eye tells apart keep it small
MOST_MARKED = 64  # heads with marks of their own; of more, medians and quartiles of as many groups as `GROUPS`
GROUPS = 10
MOST_DOTS = 400  # marked heads whose dots in an SVG are drawings; of more, an image
MOST_LINES = 40  # blocks whose lines in an SVG are drawings; of more, an image
PALE = "#aaaaaa"
# Roles that are marked; "sink-reading" in results of before there were any.
MARKED = {"reads": VERMILLION, "parks": GREEN, "sink-reading": VERMILLION}
RATIOS = {"value": ("o", BLUE), "key": ("^", ORANGE), "written": ("s", GREEN)}  # marker, colour
FEW_KEYS = 16  # up to here, every key is a mark of its own


def sinks_figure(results: xr.Dataset | Mapping[str, xr.Dataset], *, path: str | pathlib.Path | None = None) -> Figure:
    """Which heads attend to position 0, which of them read it or park there, and which keys are sinks; one column per model.

    From above: mean weight on position 0 by block and head, heads that read or park outlined or, of many, dotted; mean
    weight on each key by block against uniform attention; the share of heads for which a key is a sink; norms at position 0
    against those elsewhere, for every head or for groups of alike mean weight; patterns of the first heads in the ranking,
    if the results hold any.

    Args:
        results: results of `sinks`, by the model's name; or one of them.
        path: where to save; see `save_figure`.

    Raises:
        InputError: no results, or one of another probe.
    """
    results = results_of(results, "sinks", NEEDS)
    with matplotlib.rc_context(STYLE):
        blocks = max(ds.sizes["layer"] for ds in results.values())
        heights = {"heads": min(3.6, max(1.6, 0.13 * blocks + 0.8)), "alpha": 1.7, "rate": 1.5, "ratio": 1.7}
        pictured = any("pattern" in ds for ds in results.values())
        if pictured:
            heights["pattern"] = 1.6 if len(results) == 1 else 1.15
        figure, width, cells, sides = panels(list(results), heights, side=SIDE, own=("heads", "pattern"))
        darkest = max(0.3, *(np.nanmax(np.nan_to_num(ds["attends"].values)) for ds in results.values()))
        most = max(ds["attends"].size for ds in results.values())
        across = max(ds.sizes["head"] for ds in results.values())
        dot = None if most <= MOST_WRITTEN else _dot(heights["heads"] / blocks, (width - SIDE) / len(results) / across)
        positions = _shown(results)
        lines = sum(ds.sizes["layer"] for ds in results.values())
        image = None
        for column, ds in enumerate(results.values()):
            image = _heads(cells["heads"][column], ds, darkest, dot)
            _alpha(cells["alpha"][column], ds, rasterized=lines > MOST_LINES)
            _rate(cells["rate"][column], ds, rasterized=lines > MOST_LINES)
            _ratios(cells["ratio"][column], ds)
            if pictured:
                _pictures(cells["pattern"][column], ds, 3 if len(results) <= NARROW else 2, positions)
        assert image is not None  # there is a result
        bar = figure.colorbar(image, cax=sides["heads"].inset_axes((0.02, 0.02, 0.07, 0.66)))
        bar.set_label("weight on 0")
        shown = set().union(*(["reads", "parks"] if "has_role" in ds else ["sink-reading"] for ds in results.values()))
        named: list[Any] = [
            mark(role, "o", color)
            if dot is not None
            else Patch(facecolor="none", edgecolor=color, linewidth=1.4, label=role)
            for role, color in MARKED.items()
            if role in shown
        ]
        side_legend(sides["heads"], named, loc="upper left")
        uniform = Line2D([], [], color=GREY, linestyle="--", linewidth=1.2, label="uniform")
        side_legend(sides["alpha"], [*depth_legend(blocks), uniform])
        threshold, tau = (next((option(ds, name) for ds in results.values()), None) for name in ("threshold", "tau"))
        side_legend(
            sides["rate"],
            [
                mark(rf"$\alpha_k$ > {threshold} [Gu]", "o", BLACK),
                Line2D([], [], color=PALE, linewidth=0.9, label="the same, by block"),
                mark(rf"$A_{{ik}}$ > {tau} [Wu]", "s", BLUE, filled=False),
            ],
        )
        side_legend(
            sides["ratio"], [mark(f"|{name}|", marker, color) for name, (marker, color) in RATIOS.items()], "0 / rest"
        )
        cells["alpha"][0].set_ylabel(r"mean weight $\alpha_k$")
        cells["rate"][0].set_ylabel("share that is a sink")
        cells["ratio"][0].set_ylabel("norm, 0 / rest")
        log_axis(cells["alpha"][0])
        log_axis(cells["ratio"][0])
        cells["rate"][0].set_ylim(bottom=-0.03 * cells["rate"][0].get_ylim()[1])
        small_print(figure, [*facts(results), *_explained(results)], width)
        if path is not None:
            save_figure(figure, path, dpi=int(figure.dpi), largest=LARGEST)
    return figure


def _shown(results: Mapping[str, xr.Dataset]) -> int:
    """Positions in a picture."""
    held = max((ds.sizes["picture_key"] for ds in results.values() if "pattern" in ds), default=0)
    return min(held, POSITIONS if len(results) > 1 else 2 * POSITIONS)


def _dot(*room: float) -> float:
    """The size of a mark, in points, that leaves most of a cell of so many inches to be seen."""
    return float(np.clip(0.36 * 72 * min(room), 1, 4))


def _heads(cell: Axes, ds: xr.Dataset, darkest: float, dot: float | None) -> AxesImage:
    attends = ds["attends"].values
    image = cell.imshow(attends, cmap=WEIGHTS, vmin=0, vmax=darkest, aspect="auto", interpolation="none")
    roles = role_names(ds)
    for role, color in MARKED.items():
        places = np.argwhere(roles == role)[:, ::-1]  # [head, block]
        if dot is not None and places.size:
            look: Any = {"markersize": dot, "markeredgewidth": 0, "rasterized": len(places) > MOST_DOTS}
            cell.plot(*places.T, "o", color=color, **look)
        elif places.size:
            corners = places[:, None] + 0.46 * np.array([(-1, -1), (1, -1), (1, 1), (-1, 1), (-1, -1)])
            codes = np.tile([Path.MOVETO, *[Path.LINETO] * 3, Path.CLOSEPOLY], len(places))
            outlines = Path(corners.reshape(-1, 2), codes)  # all in one, which an SVG says briefly
            cell.add_patch(PathPatch(outlines, fill=False, edgecolor=color, linewidth=1.4))
    if dot is None:
        for (layer, head), value in np.ndenumerate(attends):
            text = "" if np.isnan(value) else f"{value:.2f}".removeprefix("0")
            color = "white" if value > 0.6 * darkest else BLACK
            cell.text(head, layer, text, ha="center", va="center", fontsize=7, color=color)
    cell.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    cell.yaxis.set_major_locator(MaxNLocator(8, integer=True))
    cell.spines[:].set_visible(False)
    cell.tick_params(length=0)
    said = f"{np.sum(roles == 'sink-reading'):,} of {roles.size:,} sink-reading"
    if "has_role" in ds:
        said = ", ".join(f"{np.sum(roles == f'{role}s'):,} {role}" for role in ("read", "park", "react"))
    cell.set_xlabel(f"head\n{said}")
    cell.set_ylabel("block")
    return image


def _alpha(cell: Axes, ds: xr.Dataset, *, rasterized: bool) -> None:
    alpha = ds["alpha"].mean([dim for dim in ds["alpha"].dims if dim not in ("layer", "key")]).values
    keys, alpha, uniform = thinned(ds["key"].values, alpha, ds["uniform"].values)
    width = 1.1 if len(alpha) <= MANY else 0.7
    for layer, curve in enumerate(alpha):
        cell.plot(keys, curve, color=depth_color(layer, len(alpha)), linewidth=width, rasterized=rasterized)
    for curve in np.unique(uniform, axis=0):  # one per window
        cell.plot(keys, curve, color=GREY, linestyle="--", linewidth=1.2, zorder=5)
    _key_axis(cell, keys)


def _rate(cell: Axes, ds: xr.Dataset, *, rasterized: bool) -> None:
    of_model = ds["sink_rate_of_model"].values, ds["over_tau_of_model"].values
    keys, by_block, rate, over = thinned(ds["key"].values, ds["sink_rate"].values, *of_model)
    few = keys.size <= FEW_KEYS
    for curve in by_block:
        cell.plot(keys, curve, color=PALE, linewidth=0.9, zorder=1, rasterized=rasterized)
    cell.plot(keys, rate, color=BLACK, linewidth=1.1, marker="o" if few else None, markersize=4)
    cell.plot(keys, over, color=BLUE, linewidth=0.9, marker="s" if few else None, markersize=4, markerfacecolor="none")
    _key_axis(cell, keys)


def _key_axis(cell: Axes, keys: np.ndarray) -> None:
    if keys.size > FEW_KEYS:
        cell.set_xscale("symlog", linthresh=1)
        cell.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        cell.set_xticks(keys)
    cell.set_xlabel("key position $k$")
    cell.grid(axis="y", color=FAINT, linewidth=0.6)
    cell.set_axisbelow(True)


def _ratios(cell: Axes, ds: xr.Dataset) -> None:
    attends = ds["attends"].values
    reading = np.isin(role_names(ds), ("reads", "sink-reading"))
    for name, (marker, color) in RATIOS.items():
        norms = ds[f"{name}_norm"]
        ratio = norms.sel(place="sink").values / norms.sel(place="rest").values
        look: Any = {"marker": marker, "color": color, "markersize": 3.6}
        if attends.size <= MOST_MARKED:
            for chosen, face in ((~reading, "none"), (reading, color)):
                cell.plot(attends[chosen], ratio[chosen], markerfacecolor=face, linestyle="", **look)
            continue
        order = np.argsort(attends, axis=None, kind="stable")
        groups = [(attends.flat[group], ratio.flat[group]) for group in np.array_split(order, GROUPS)]
        x = np.array([np.median(weights) for weights, _ in groups])
        low, middle, high = np.array([np.nanquantile(ratios, (0.25, 0.5, 0.75)) for _, ratios in groups]).T
        cell.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
        cell.plot(x, middle, linewidth=1.1, **look)
    cell.axhline(1, color=GREY, linewidth=0.8, zorder=1)
    cell.set_xlim(left=0)
    cell.set_xlabel("mean weight on 0")


def _pictures(cell: Axes, ds: xr.Dataset, most: int, positions: int) -> None:
    """The room of `cell` is filled with pictures."""
    cell.axis("off")
    if "pattern" not in ds:
        return
    shades = matplotlib.colormaps[WEIGHTS].resampled(SHADES)
    for n, pattern in enumerate(ds["pattern"].values[:most, :positions, :positions]):
        picture = cell.inset_axes((n / most + 0.01, 0.0, 1 / most - 0.02, 0.86))
        picture.imshow(pattern, cmap=shades, norm=PowerNorm(0.5, 0, 1), interpolation="none")
        picture.set_xticks([])
        picture.set_yticks([])
        picture.spines[:].set_visible(False)
        layer, head = (int(ds[f"picture_{name}"].values[n]) for name in ("layer", "head"))
        picture.set_title(f"{layer}.{head}", fontsize=8, pad=2)


def _explained(results: Mapping[str, xr.Dataset]) -> list[str]:
    ds, positions = next(iter(results.values())), _shown(results)
    attends, reads, large, small = (
        ds.attrs.get(f"{name}_threshold") for name in ("attends", "reads", "large", "small")
    )
    many = [one["attends"].size > MOST_MARKED for one in results.values()]
    filled = " (filled)" * (not all(many))
    rules = [f"sink-reading{filled}: mean weight on 0 > {attends} and output read from 0 > {reads}"]
    if "has_role" in ds:
        rules = [
            f"reads{filled}: takes from 0 more than {large} of the stream's size",
            f"parks: mean weight on 0 > {attends}, output under {small} of its own with 0 hidden",
        ]
    found = [
        *rules,
        "alpha: mean over prompts and heads; grey dashes: uniform attention at the same T and window",
    ]
    if any(many):
        found.append(
            f"norms of over {MOST_MARKED} heads: medians and quartiles of {GROUPS} equal groups, by mean weight on 0"
        )
    if any(ds.sizes["key"] > FEW_KEYS for ds in results.values()):
        found.append("distant keys: means of bins")
    if positions:
        found.append(
            f"pictures: patterns (block.head) of the first heads in the table, first {positions} positions of a prompt, "
            "shade: square root of the weight"
        )
    return found
