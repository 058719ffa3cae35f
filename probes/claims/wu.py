"""[Wu], arXiv 2502.01951 (ICML 2025): what it says about language models; theorems and toys are with the toy experiments."""

from __future__ import annotations

import math
from itertools import pairwise

import xarray as xr

from ..results.collected import Collected
from ..results.tables import number
from .claim import Judged
from .rules import QUARTER, Source, Stated, Told, above, every, having, in_real, on_map, places, roughly, sure

STATED: Stated = []
of_source = Source("wu", "[Wu]", STATED)
DEPTHS = "fresh models of several depths"


@of_source(
    "first-token-sink-pretrained",
    "K.4",
    "By the metric of [Wu] the sink of causal language models is the first token.",
    "the fraction of queries with a weight above 0.2 is highest at position 0, in every model; a ratio to the "
    "next of less than "
    "a quarter tells nothing (no interval is kept)",
    "pretrained",
    "sinks",
)
def _first(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        over = ds["over_tau_of_model"]
        if 0 not in over["key"].values or over.size < 2:
            return "-", None
        own, most = float(over.sel(key=0)), float(over.sel(key=over["key"] != 0).max())
        said = f"{number(own, '.4f')} at 0, others at most {number(most, '.4f')}"
        if min(own, most) <= 0:
            return said, own > most
        return said, above(roughly(own / most, QUARTER), 0)

    return in_real(having(collected["sinks"], "over_tau_of_model"), judge)


def _primacy(collected: Collected, **where: object) -> dict[float, dict[int, float]]:
    """By logit scale and depth."""
    found: dict[float, dict[int, float]] = {}
    for row in places(collected, **where):
        found.setdefault(row["strength"], {})[int(row["blocks"])] = row.shape.primacy
    several = {strength: dict(sorted(depths.items())) for strength, depths in found.items() if len(depths) > 1}
    return dict(sorted(several.items()))


def _depths_told(depths: dict[int, float]) -> str:
    return "primacy " + ", ".join(f"{number(one)} at {n} blocks" for n, one in depths.items())


def _deepest(depths: dict[int, float]) -> Told:
    return _depths_told(depths), above(roughly(depths[max(depths)] / depths[min(depths)]), 0)


@of_source(
    "primacy-grows-with-depth",
    "Thm 4.1, read on models with residual streams",
    "The deeper the model, the more a causal mask favours the beginning.",
    "primacy of fresh models, known within a tenth, is larger at the largest depth than at the least, at the map's smallest "
    "logit scale",
    "initialization",
    "map",
    kind="ours",
    model=DEPTHS,
)
def _deeper(collected: Collected) -> Judged | None:
    found = _primacy(collected, group="depth")
    first = {f"d σ² = {strength:.2g}": _deepest(depths) for strength, depths in list(found.items())[:1]}
    return on_map(collected, first, DEPTHS)


@of_source(
    "depth-does-not-undo-logits",
    "Thm 4.1, read on models with residual streams",
    "The deeper the model, the more a causal mask favours the beginning, whatever the attention logits.",
    "primacy of fresh models, known within a tenth, is larger at the largest depth than at the least, at every "
    "logit scale of "
    "the map",
    "initialization",
    "map",
    kind="ours",
    model=DEPTHS,
)
def _at_any_scale(collected: Collected) -> Judged | None:
    found = _primacy(collected, group="depth")
    return on_map(collected, {f"d σ² = {strength:.2g}": _deepest(depths) for strength, depths in found.items()}, DEPTHS)


@of_source(
    "window-slows",
    "Thm 4.2, read on models with residual streams",
    "The smaller the sliding window, the slower the beginning gains with depth.",
    "at equal depth primacy of fresh models, known within a tenth, is larger under the wider window, and largest "
    "without, at "
    "every logit scale",
    "initialization",
    "map",
    kind="ours",
    model="fresh models with and without window",
)
def _slows(collected: Collected) -> Judged | None:
    same = ("strength", "width", "blocks", "length", "residual_scale")
    windowed = [row for row in places(collected) if row["window"]]
    by_strength: dict[float, dict[float, float]] = {}
    for row in places(collected):
        if any(all(row[size] == one[size] for size in same) for one in windowed) and row["rope"] and not row["name"]:
            by_strength.setdefault(row["strength"], {})[row["window"] or math.inf] = row.shape.primacy
    found: dict[str, Told] = {}
    for strength, by_width in sorted(by_strength.items()):
        if len(by_width) > 1:
            ordered = sorted(by_width.items())
            said = ", ".join(f"{number(one)} ({'no window' if math.isinf(w) else f'{w:g}'})" for w, one in ordered)
            # A window that cuts the beginning off has primacy 0: less than any other.
            rising = [above(roughly(b / a), 0) if a > 0 else sure(b > 0) for (_, a), (_, b) in pairwise(ordered)]
            found[f"d σ² = {strength:.2g}"] = f"primacy {said}", every(rising)
    return on_map(collected, found, "fresh models with and without window")
