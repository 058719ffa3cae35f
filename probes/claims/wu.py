"""Rules for [Wu], arXiv 2502.01951 (ICML 2025), on language models; its theorems and toys are with the toy experiments."""

from __future__ import annotations

import math
from itertools import islice, pairwise

import xarray as xr

from ..results.folder import Collected
from ..results.tables import number
from .claim import Judged
from .readings import alike, courses, on_map, places, primacy_by_depth, roughly, strength_told
from .rules import QUARTER, Told, above, every, of_models


@of_models("sinks", "over_tau_of_model")
def first_token_sink_pretrained(ds: xr.Dataset) -> Told:
    over = ds["over_tau_of_model"]
    if 0 not in over["key"].values or over.size < 2:
        return "-", None
    own, most = float(over.sel(key=0)), float(over.sel(key=over["key"] != 0).max())
    said = f"{number(own, '.4f')} at 0, others at most {number(most, '.4f')}"
    if min(own, most) <= 0:
        return said, own > most
    return said, above(roughly(own / most, QUARTER), 0)


def primacy_grows(collected: Collected, smallest: bool) -> Judged | None:
    """From the least to the largest depth, at the smallest logit scale or at all."""
    found: dict[str, Told] = {}
    for strength, depths in islice(primacy_by_depth(collected).items(), 1 if smallest else None):
        said = ", ".join(f"{number(one)} at {n} blocks" for n, one in depths.items())
        grown = above(roughly(depths[max(depths)] / depths[min(depths)]), 0)
        found[strength_told(strength)] = f"primacy {said}", grown
    return on_map(collected, found, "fresh models of several depths")


def window_slows(collected: Collected) -> Judged | None:
    windowed = [row for row in places(collected) if row["window"]]
    there = [row for row in places(collected, rope=True, name="") if alike(row, windowed, "window", "name")]
    found: dict[str, Told] = {}
    for strength, widths in courses(
        there, lambda row: row["window"] or math.inf, lambda row: row.shape.primacy
    ).items():
        said = ", ".join(f"{number(one)} ({'no window' if math.isinf(w) else f'{w:g}'})" for w, one in widths.items())
        # A window that cuts the beginning off has primacy 0: less than any other.
        rising = [above(roughly(b / a), 0) if a > 0 else b > 0 for a, b in pairwise(widths.values())]
        found[strength_told(strength)] = f"primacy {said}", every(rising)
    return on_map(collected, found, "fresh models with and without window")
