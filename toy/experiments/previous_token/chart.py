"""The figure of previous-token: perplexities, paths of the positions, W_Q W_K^T along s, widths without positions."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from probes.charts import BLUE, CYCLE, FAINT, GREY, VERMILLION, Panel, Series, curves, level, panels, words

from ..rules import known, ranged
from .tables import betting, blind_limit, main_variant, of_variant, sizes, typical_seed

NEEDS = ("perplexity", "relative", "positions", "tokens", "separation", "bilinear")


def charts(ds: xr.Dataset) -> dict[str, Figure]:
    """Of the variant of which everything was trained; positions move as in the seed of the median perplexity."""
    rows = [Panel("perplexity", _perplexities, height=2.7)]
    if all(known(of_variant, ds, name) is not None for name in NEEDS):
        rows += [Panel("second axis", _paths, height=2.7), Panel("$s W_Q W_K^T s$ (nat)", _form, height=2.7)]
    if "blind_perplexity" in ds:
        rows.append(Panel("perplexity without positions", _blind, height=2.7))
    v, (size, context) = main_variant(ds), sizes(ds)
    title = f"Naming the token before the last: {context} tokens in context, {size} in the vocabulary"
    caption = (
        f"Medians over seeds and ranges; residual stream {v.residual}, output projection {v.projection}. Embeddings of seed "
        f"{int(ds['seed'][typical_seed(ds)])}: paths of the positions (ring: start, dot: end), grey: tokens, arrow: the "
        "direction s that parts the position asked for from the others."
    )
    return {"": panels({title: ds}, rows, caption)}


def _perplexities(cell: Axes, ds: xr.Dataset) -> None:
    """By step, with what readers without positions have."""
    perplexity = of_variant(ds, "perplexity").transpose("positional", "seed", "step")[..., 1:]
    kinds = {"none": ("no positions", BLUE), "learned": ("learned positions", VERMILLION)}
    for kind, (label, color) in kinds.items():
        curves(cell, [ranged(label, perplexity.sel(positional=kind), color, x=perplexity["step"])], log=True)
    level(cell, betting(*sizes(ds))["published"], "published bound V (C-2) / (C-1)")
    level(cell, blind_limit(*sizes(ds)), "best blind to order")
    cell.set_ylim(bottom=min(cell.get_ylim()[0], 0.8 * blind_limit(*sizes(ds))))
    cell.set(xscale="log", xlabel="step")


def _paths(cell: Axes, ds: xr.Dataset) -> None:
    """Where positional embeddings went; tokens at the end; the separation direction."""
    names = ("positions", "tokens", "separation")
    positions, tokens, direction = (of_variant(ds, name).isel(seed=typical_seed(ds)) for name in names)
    e = tokens.isel(step=-1).transpose("token", "axis").values[:, :2]
    cell.plot(*e.T, ".", markersize=3.5, color=GREY)
    for n, place in enumerate(positions["position"].values[::-1]):
        path, color = positions.sel(position=place).transpose("step", "axis").values[:, :2], CYCLE[n % len(CYCLE)]
        cell.plot(*path.T, color=color, linewidth=1.1)
        cell.plot(*path[0], "o", markersize=4, color=color, markerfacecolor="white")
        cell.plot(*path[-1], "o", markersize=6, color=color)
        name = {0: "the last, which asks", -1: "the one before, asked for"}.get(int(place), f"{-place} before the last")
        words(cell, name, 1 - 0.14 * n, color, fraction=True)
    s = direction.isel(step=-1).values[:2]
    if np.isfinite(s).all():
        cell.annotate("", 0.6 * np.abs(e).max() * s, (0, 0), arrowprops={"arrowstyle": "-|>"})
    cell.axhline(0, color=FAINT, linewidth=0.8, zorder=0)
    cell.axvline(0, color=FAINT, linewidth=0.8, zorder=0)
    cell.set_aspect("equal", adjustable="datalim")
    cell.set_xlabel("first axis")


def _form(cell: Axes, ds: xr.Dataset) -> None:
    """Along training, every seed."""
    bilinear = of_variant(ds, "bilinear").transpose("seed", "step")[:, 1:]
    for seed, curve in zip(bilinear["seed"].values, bilinear.values, strict=True):
        color = VERMILLION if seed == ds["seed"][typical_seed(ds)] else BLUE
        curves(cell, [Series(f"seed {seed}", curve, color, x=bilinear["step"], width=1.1)])
    cell.axhline(0, color=GREY, linewidth=0.9)
    cell.set(xscale="log", xlabel="step")
    if np.nanmax(np.abs(bilinear)) > 1:
        cell.set_yscale("symlog", linthresh=1)


def _blind(cell: Axes, ds: xr.Dataset) -> None:
    """By width, between the published bound and the real one."""
    perplexity, readers = ds["blind_perplexity"].transpose("seed", "blind_width"), betting(*sizes(ds))
    widths = [int(width) for width in perplexity["blind_width"].values]
    curves(cell, [ranged("", perplexity, BLUE, line="")], log=True)
    level(cell, readers["published"], "V (C-2) / (C-1)")
    level(cell, readers["geometric"], "$V^{(C-2)/(C-1)}$")
    level(cell, blind_limit(*sizes(ds)), "best blind to order")
    cell.set_ylim(bottom=0.8 * blind_limit(*sizes(ds)))
    cell.set(xticks=range(len(widths)), xticklabels=widths, xlim=(-0.5, len(widths) - 0.5), xlabel="width")
