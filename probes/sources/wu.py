"""[Wu], arXiv 2502.01951 (ICML 2025): what it says about language models; theorems and toys are with the toy experiments."""

from __future__ import annotations

import math

import numpy as np
import xarray as xr

from ..claims import Judged, Statement
from ..studies.collected import Collected
from ..studies.tables import number
from .judging import COMMANDS, Stated, Told, having, in_each, map_command, places, stated

SOURCE = "[Wu]"
STATED: Stated = []


@stated(
    Statement(
        "wu-first-token-sink-pretrained",
        f"{SOURCE} K.4",
        "By the metric of [Wu] the sink of causal language models is the first token.",
        "the fraction of queries with a weight above 0.2 is highest at position 0, in every model",
        model="bundled models, pretrained",
        command=COMMANDS["sinks"],
    ),
    STATED,
)
def _first(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        over = ds["over_tau_of_model"]
        if 0 not in over["key"].values or over.size < 2:
            return "-", None
        own, most = float(over.sel(key=0)), float(over.sel(key=over["key"] != 0).max())
        return f"{number(own, '.4f')} at 0, others at most {number(most, '.4f')}", own > most

    return in_each(having(collected["sinks"], "over_tau_of_model"), judge)


def _primacy(collected: Collected, **where: object) -> dict[float, dict[int, float]]:
    """By logit scale and depth."""
    found: dict[float, dict[int, float]] = {}
    for row in places(collected, **where):
        found.setdefault(row["strength"], {})[int(row["blocks"])] = row.shape.primacy
    return {strength: dict(sorted(depths.items())) for strength, depths in found.items() if len(depths) > 1}


@stated(
    Statement(
        "wu-primacy-grows-with-depth",
        f"{SOURCE} Thm 4.1, read on models with residual streams",
        "The deeper the model, the more a causal mask favours the beginning.",
        "primacy of fresh models rises at every step of depth, at the map's smallest logit scale",
        model="fresh models of several depths",
        command=COMMANDS["map"],
    ),
    STATED,
)
def _deeper(collected: Collected) -> Judged | None:
    found = _primacy(collected, group="depth")
    if not found:
        return None
    depths = found[min(found)]
    said = ", ".join(f"{number(one)} at {n} blocks" for n, one in depths.items())
    rising = bool(np.all(np.diff(list(depths.values())) > 0))
    return Judged(f"primacy {said}", rising, "fresh models of several depths", map_command(collected))


@stated(
    Statement(
        "wu-depth-does-not-undo-logits",
        f"{SOURCE} Thm 4.1, read on models with residual streams",
        "The deeper the model, the more a causal mask favours the beginning, whatever the attention logits.",
        "primacy of fresh models rises from the least to the largest depth at every logit scale of the map",
        model="fresh models of several depths",
        command=COMMANDS["map"],
    ),
    STATED,
)
def _at_any_scale(collected: Collected) -> Judged | None:
    found = _primacy(collected, group="depth")
    if not found:
        return None
    ends = {strength: (depths[min(depths)], depths[max(depths)]) for strength, depths in sorted(found.items())}
    said = "; ".join(f"d σ² = {strength:.2g}: {number(a)} to {number(b)}" for strength, (a, b) in ends.items())
    rising = all(b > a for a, b in ends.values())
    return Judged(f"primacy {said}", rising, "fresh models of several depths", map_command(collected))


@stated(
    Statement(
        "wu-window-slows",
        f"{SOURCE} Thm 4.2, read on models with residual streams",
        "The smaller the sliding window, the slower the beginning gains with depth.",
        "at equal depth primacy of fresh models is larger under the wider window, and largest without, at every logit scale",
        model="fresh models with and without window",
        command=COMMANDS["map"],
    ),
    STATED,
)
def _slows(collected: Collected) -> Judged | None:
    same = ("strength", "width", "blocks", "length", "residual_scale")
    windowed = [row for row in places(collected) if row["window"]]
    found: dict[float, dict[float, float]] = {}
    for row in places(collected):
        if any(all(row[size] == one[size] for size in same) for one in windowed) and row["rope"] and not row["name"]:
            found.setdefault(row["strength"], {})[row["window"] or math.inf] = row.shape.primacy
    found = {strength: dict(sorted(by_width.items())) for strength, by_width in found.items() if len(by_width) > 1}
    if not found:
        return None
    said = "; ".join(
        f"d σ² = {strength:.2g}: "
        + ", ".join(f"{number(one)} ({'no window' if math.isinf(w) else f'{w:g}'})" for w, one in by_width.items())
        for strength, by_width in sorted(found.items())
    )
    rising = all(bool(np.all(np.diff(list(by_width.values())) > 0)) for by_width in found.values())
    return Judged(f"primacy {said}", rising, "fresh models with and without window", map_command(collected))
