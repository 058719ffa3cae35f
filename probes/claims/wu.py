"""[Wu], arXiv 2502.01951 (ICML 2025), on language models; its theorems and toys are with the toy experiments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice, pairwise

import xarray as xr

from ..results.tables import number
from ..results.theory_map import Row
from .evidence import places, real
from .ledger import Source
from .readings import alike, courses, roughly, strength_told
from .rules import QUARTER, Told, above, every

wu = Source("[Wu]", "wu", places(), kind="ours")


@wu(
    "first-token-sink-pretrained",
    "K.4",
    "By the metric of [Wu] the sink of causal language models is the first token.",
    rule="the fraction of queries with a weight above 0.2 is highest at position 0, in every model; a ratio to the next of "
    "less than a quarter tells nothing (no interval is kept)",
    kind="published",
    needs=real("sinks", "over_tau_of_model"),
)
def _(ds: xr.Dataset) -> Told:
    over = ds["over_tau_of_model"]
    if 0 not in over["key"].values or over.size < 2:
        return "-", None
    first, most = float(over.sel(key=0)), float(over.sel(key=over["key"] != 0).max())
    words = f"{number(first, '.4f')} at 0, others at most {number(most, '.4f')}"
    return words, above(roughly(first / most, QUARTER), 0) if min(first, most) > 0 else first > most


@wu(
    "primacy-grows-with-depth",
    "Thm 4.1, read on models with residual streams",
    "The deeper the model, the more a causal mask favours the beginning.",
    rule="primacy of fresh models, known within a tenth, is larger at the largest depth than at the least, at the map's "
    "smallest logit scale",
    needs=places("fresh models of several depths", group="depth"),
    scales=1,
)
@wu(
    "depth-does-not-undo-logits",
    "Thm 4.1, read on models with residual streams",
    "The deeper the model, the more a causal mask favours the beginning, whatever the attention logits.",
    rule="primacy of fresh models, known within a tenth, is larger at the largest depth than at the least, at every logit "
    "scale of the map",
    needs=places("fresh models of several depths", group="depth"),
)
def _(rows: Sequence[Row], scales: int | None = None) -> dict[str, Told]:
    return {
        strength_told(strength): (
            "primacy " + ", ".join(f"{number(primacy)} at {n} blocks" for n, primacy in depths.items()),
            above(roughly(depths[max(depths)] / depths[min(depths)]), 0),
        )
        for strength, depths in islice(courses(rows, "blocks", lambda row: row.shape.primacy).items(), scales)
    }


@wu(
    "window-slows",
    "Thm 4.2, read on models with residual streams",
    "The smaller the sliding window, the slower the beginning gains with depth.",
    rule="at equal depth primacy of fresh models, known within a tenth, is larger under the wider window, and largest "
    "without, at every logit scale",
    needs=places("fresh models with and without window"),
)
def _(rows: Sequence[Row]) -> dict[str, Told]:
    windowed = [row for row in rows if row["window"]]
    comparable = [row for row in rows if row["rope"] and not row["name"] and alike(row, windowed, "window", "name")]
    found: dict[str, Told] = {}
    by_window = courses(comparable, lambda row: row["window"] or math.inf, lambda row: row.shape.primacy)
    for strength, widths in by_window.items():
        words = ", ".join(f"{number(x)} ({'no window' if math.isinf(w) else f'{w:g}'})" for w, x in widths.items())
        # A window that cuts the beginning off has primacy 0: less than any other.
        rising = [above(roughly(b / a), 0) if a > 0 else b > 0 for a, b in pairwise(widths.values())]
        found[strength_told(strength)] = f"primacy {words}", every(rising)
    return found
