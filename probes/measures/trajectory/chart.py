"""How the stream at position 0 is drawn."""

from __future__ import annotations

from collections.abc import Mapping

import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...charts import (
    BLUE,
    DASHED,
    GREEN,
    INK,
    VERMILLION,
    Panel,
    Series,
    block_axis,
    curves,
    level,
    panels,
)

FIRSTS = {
    "bos": ("BOS", VERMILLION),
    "id": ("the prompts' one id", VERMILLION),
    "text": ("text", BLUE),
}  # at position 0
PLACES = {"position 0": ("at position 0", INK), "position 1 behind BOS": ("at position 1, behind BOS", GREEN)}
MASSIVE = 1000.0  # medians, [Sun]'s threshold
CAPTION = (
    "Dashed: the same at other positions, median. Cosines: each token alone at its position; bands hold 5 to 95 % of "
    "pairs. The last stream is what the final norm reads."
)


def chart(results: Mapping[str, xr.Dataset]) -> Figure:
    """How the stream at position 0 grows, how soon different tokens become alike there, and which dimension carries it."""
    rows = [
        Panel("norm of the residual stream", _norms),
        Panel("cosine of streams that started from different tokens", _cosines, share=True),
        Panel("largest dimension at position 0, in medians of all", _largest),
    ]
    return panels(results, rows, CAPTION)


def _norms(cell: Axes, ds: xr.Dataset) -> None:
    for first in map(str, ds["first"].values):
        (name, color), at, x = FIRSTS[first], ds.sel(first=first), ds["layer"]
        here = Series(f"at position 0: {name}", at["norm_first"], color, x=x)
        there = Series(f"elsewhere, {name} at 0", at["norm_others"], color, x=x, line=DASHED)
        curves(cell, [there, here], log=True, decades=None)
    _streams(cell, ds)


def _cosines(cell: Axes, ds: xr.Dataset) -> None:
    x = ds["layer"]
    for place in map(str, ds["place"].values):
        (name, color), at = PLACES[place], ds.sel(place=place)
        curves(cell, [Series(name, at["cosine"], color, at["cosine_low"], at["cosine_high"], x=x)])
    _streams(cell, ds)


def _largest(cell: Axes, ds: xr.Dataset) -> None:
    for first in map(str, ds["first"].values):
        (name, color), at = FIRSTS[first], ds.sel(first=first)
        curves(cell, [Series(name, at["top_ratio"].isel(rank=0), color, x=ds["layer"])], log=True, decades=None)
    level(cell, MASSIVE, "massive: 1,000 medians")
    _streams(cell, ds)


def _streams(cell: Axes, ds: xr.Dataset) -> None:
    block_axis(cell, ds["layer"].values, "block that reads the stream")
