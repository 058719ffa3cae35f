"""Attention sinks and the heads that read position 0."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ..measures.roles import role_names, withheld
from .draw import MANY, Row, depth_legend, ruled, saved_grid
from .palette import BLACK, BLUE, GREY, NORMS, PALE, ROLES, WEIGHTS, Style, depth_color
from .series import Curve, key_curves
from .style import facts, mark, option, results_of, side_legend, thinned

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
    every = list(results.values())
    blocks = max(ds.sizes["layer"] for ds in every)
    many = sum(ds.sizes["layer"] for ds in every) > MOST_LINES
    height, depths = min(3.6, max(1.6, 0.13 * blocks + 0.8)), depth_legend(blocks)
    rates = partial(_rates, **{name: option(every[0], name) for name in ("threshold", "tau")})
    rows = {
        "heads": Row("block", height, None, _head_axis, own=True),
        "alpha": Row(r"mean weight $\alpha_k$", 1.7, _alphas, _key_axis, log=True, image=many, more=depths),
        "rate": Row("share that is a sink", 1.5, rates, _rate_axis, image=many),
        "ratio": Row("norm, 0 / rest", 1.7, _ratios, _ratio_axis, "0 / rest", log=True),
    }
    if any("pattern" in ds for ds in every):
        off: Any = lambda cell, _: cell.axis("off")  # noqa: E731
        rows["pattern"] = Row("", 2.1 if len(results) == 1 else 1.7, None, off, own=True)

    def finish(figure: Figure, cells: dict[str, list[Axes]], sides: dict[str, Axes]) -> None:
        darkest = max(0.3, *(np.nanmax(np.nan_to_num(ds["attends"].values)) for ds in every))
        across = max(ds.sizes["head"] for ds in every)
        each = (figure.get_figwidth() - 0.5 - 2 * SIDE) / len(results) / across
        # Marks leave most of a cell to be seen; of few heads the cells have room for values and outlines.
        dot = float(np.clip(0.36 * 72 * min(height / blocks, each), 1, 4))
        dot = dot if max(ds["attends"].size for ds in every) > MOST_WRITTEN else None
        images = [_heads(cell, ds, darkest, dot) for cell, ds in zip(cells["heads"], every, strict=True)]
        bar = figure.colorbar(images[0], cax=sides["heads"].inset_axes((0.02, 0.02, 0.07, 0.66)))
        bar.set_label("weight on 0")
        if marks := _role_legend(every, dotted=dot is not None):
            side_legend(sides["heads"], marks, loc="upper left")
        for cell, ds in zip(cells.get("pattern", ()), every, strict=False):
            _pictures(cell, ds, 3 if len(results) <= NARROW else 2, _shown(every))

    texts = [*facts(results), *_explained(results)]
    return saved_grid(results, rows, texts, side=SIDE, path=path, finish=finish)


def _shown(every: Sequence[xr.Dataset]) -> int:
    """Positions in a picture."""
    held = max((ds.sizes["picture_key"] for ds in every if "pattern" in ds), default=0)
    return min(held, POSITIONS if len(every) > 1 else 2 * POSITIONS)


def _role_legend(every: Sequence[xr.Dataset], *, dotted: bool) -> list[Any]:
    """Entries for roles that some head has."""
    there = {str(role) for ds in every for role in role_names(ds).flat}
    outline: dict[str, Any] = {"facecolor": "none", "linewidth": 1.4}
    colors = {role: color for role, color in ROLES.items() if role in there}
    return [
        mark(role, "o", color) if dotted else Patch(edgecolor=color, label=role, **outline)
        for role, color in colors.items()
    ]


def _heads(cell: Axes, ds: xr.Dataset, darkest: float, dot: float | None) -> AxesImage:
    attends, roles = ds["attends"].values, role_names(ds)
    image = cell.imshow(attends, cmap=WEIGHTS, vmin=0, vmax=darkest, aspect="auto", interpolation="none")
    for role, color in ROLES.items():
        places = np.argwhere(roles == role)[:, ::-1]  # [head, block]
        if dot is not None and places.size:
            look: Any = {"markersize": dot, "markeredgewidth": 0, "rasterized": len(places) > MOST_DOTS}
            cell.plot(*places.T, "o", color=color, **look)
        elif places.size:
            corners = places[:, None] + 0.46 * np.array([(-1, -1), (1, -1), (1, 1), (-1, 1), (-1, -1)])
            codes = np.tile([Path.MOVETO, *[Path.LINETO] * 3, Path.CLOSEPOLY], len(places))
            outlines = Path(corners.reshape(-1, 2), codes)  # all in one, which an SVG says briefly
            cell.add_patch(PathPatch(outlines, fill=False, edgecolor=color, linewidth=1.4))
    for (layer, head), value in np.ndenumerate(attends) if dot is None else ():
        text = "" if np.isnan(value) else f"{value:.2f}".removeprefix("0")
        color = "white" if value > 0.6 * darkest else BLACK
        cell.text(head, layer, text, ha="center", va="center", fontsize=7, color=color)
    cell.spines[:].set_visible(False)
    cell.tick_params(length=0)
    return image


def _head_axis(cell: Axes, ds: xr.Dataset) -> None:
    cell.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    cell.yaxis.set_major_locator(MaxNLocator(8, integer=True))
    roles = role_names(ds)
    said = f"{np.sum(roles == 'sink-reading'):,} of {roles.size:,} sink-reading"
    if withheld(ds):
        said = "roles withheld (a norm follows)"
    elif "has_role" in ds:
        said = ", ".join(f"{np.sum(roles == f'{role}s'):,} {role}" for role in ("read", "park", "react"))
    cell.set_xlabel(f"head\n{said}")
    cell.set_ylabel("block")


def _alphas(ds: xr.Dataset) -> list[Curve]:
    """Mean weight on keys by block, and of uniform attention, once per window."""
    alpha = ds["alpha"].mean([dim for dim in ds["alpha"].dims if dim not in ("layer", "key")]).values
    keys, alpha, uniform = thinned(ds["key"].values, alpha, ds["uniform"].values)
    width = 1.1 if len(alpha) <= MANY else 0.7
    found = [Curve(keys, y, Style("", depth_color(n, len(alpha))), width=width) for n, y in enumerate(alpha)]
    dashed = Style("uniform", GREY, "--", 5)
    return found + [Curve(keys, y, dashed, label="uniform", width=1.2) for y in np.unique(uniform, axis=0)]


def _rates(ds: xr.Dataset, threshold: Any, tau: Any) -> list[Curve]:
    """The share of heads for which a key is a sink: of the model, by block; [Wu]'s share of weights."""
    curves = key_curves(ds)
    of_model = [curves[name].y for name in ("sink_rate_of_model", "over_tau_of_model")]
    keys, by_block, rate, over = thinned(ds["key"].values, ds["sink_rate"].values, *of_model)
    marked = 4.0 if keys.size <= FEW_KEYS else 0.0
    every = Style("the same, by block", PALE, "-", 1)
    model, wu = Style(rf"$\alpha_k$ > {threshold} [Gu]", BLACK), Style(rf"$A_{{ik}}$ > {tau} [Wu]", BLUE, marker="s")
    return [
        *(Curve(keys, y, every, label=every.label, width=0.9) for y in by_block),
        Curve(keys, rate, model, label=model.label, width=1.1, marked=marked),
        Curve(keys, over, wu, label=wu.label, width=0.9, marked=marked, filled=False),
    ]


def _key_axis(cell: Axes, ds: xr.Dataset) -> None:
    if ds.sizes["key"] > FEW_KEYS:
        cell.set_xscale("symlog", linthresh=1)
        cell.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        cell.set_xticks(ds["key"].values)
    cell.set_xlabel("key position $k$")
    ruled(cell)


def _rate_axis(cell: Axes, ds: xr.Dataset) -> None:
    _key_axis(cell, ds)
    cell.set_ylim(bottom=-0.03 * cell.get_ylim()[1])


def _ratios(ds: xr.Dataset) -> list[Curve]:
    """Norms at position 0 against elsewhere over the mean weight: of every head, or of groups of heads."""
    attends, reading = ds["attends"].values, np.isin(role_names(ds), ("reads", "sink-reading"))
    found = []
    for name, style in NORMS.items():
        norms = ds[f"{name}_norm"]
        ratio = norms.sel(place="sink").values / norms.sel(place="rest").values
        if attends.size <= MOST_MARKED:
            bare = style._replace(line="")
            found.append(Curve(attends[~reading], ratio[~reading], bare, marked=3.6, filled=False))
            found.append(Curve(attends[reading], ratio[reading], bare, label=style.label, marked=3.6))
            continue
        order = np.argsort(attends, axis=None, kind="stable")
        groups = [(attends.flat[group], ratio.flat[group]) for group in np.array_split(order, GROUPS)]
        x = np.array([np.median(weights) for weights, _ in groups])
        low, middle, high = np.array([np.nanquantile(ratios, (0.25, 0.5, 0.75)) for _, ratios in groups]).T
        found.append(Curve(x, middle, style, low, high, label=style.label, width=1.1, marked=3.6))
    return found


def _ratio_axis(cell: Axes, _: xr.Dataset) -> None:
    cell.axhline(1, color=GREY, linewidth=0.8, zorder=1)
    cell.set_xlim(left=0)
    cell.set_xlabel("mean weight on 0")


def _pictures(cell: Axes, ds: xr.Dataset, most: int, positions: int) -> None:
    """The room of `cell` is filled with pictures."""
    if "pattern" not in ds:
        return
    shades = matplotlib.colormaps[WEIGHTS].resampled(SHADES)
    for n, pattern in enumerate(ds["pattern"].values[:most, :positions, :positions]):
        picture = cell.inset_axes((n / most + 0.05, 0.24, 1 / most - 0.07, 0.58))
        picture.imshow(pattern, cmap=shades, norm=PowerNorm(0.5, 0, 1), interpolation="none")
        ticks: Sequence[int] = (0, len(pattern) // 2, len(pattern) - 1)
        picture.set_xticks(ticks)
        picture.set_yticks(ticks if n == 0 else [])
        picture.tick_params(length=2, pad=1, labelsize=6.5)
        picture.spines[:].set_visible(False)
        layer, head = (int(ds[f"picture_{name}"].values[n]) for name in ("layer", "head"))
        picture.set_title(f"block {layer}\nhead {head}", fontsize=6.5, pad=2)
        picture.set_xlabel("key", fontsize=7, labelpad=1)
        picture.set_ylabel("query" * (n == 0), fontsize=7, labelpad=1)


def _explained(results: Mapping[str, xr.Dataset]) -> list[str]:
    every = list(results.values())
    positions, names = _shown(every), ("attends", "reads", "large", "small")
    attends, reads, large, small = (every[0].attrs.get(f"{name}_threshold") for name in names)
    many = [one["attends"].size > MOST_MARKED for one in every]
    filled = " (filled)" * (not all(many))
    rules = [f"sink-reading{filled}: mean weight on 0 > {attends} and output read from 0 > {reads}"]
    rules *= not all(map(withheld, every))
    if any("has_role" in one for one in every):
        rules = [
            f"reads{filled}: takes from 0 more than {large} of the stream's size",
            f"parks: mean weight on 0 > {attends}, output under {small} of its own with 0 hidden",
        ]
    medians = f"norms of over {MOST_MARKED} heads: medians and quartiles of {GROUPS} equal groups, by mean weight on 0"
    pictures = (
        f"pictures: patterns of the heads that rank first, first {positions} positions of a prompt, "
        "shade: square root of the weight"
    )
    return [
        *rules,
        *dict.fromkeys(filter(None, map(withheld, every))),
        "alpha: mean over prompts and heads; grey dashes: uniform attention at the same T and window",
        *[medians] * any(many),
        *["distant keys: means of bins"] * any(ds.sizes["key"] > FEW_KEYS for ds in every),
        *[pictures] * bool(positions),
    ]
