"""[Wu], arXiv 2502.01951 (ICML 2025), on language models; its theorems and toys are with the toy experiments."""

import math
from collections.abc import Sequence
from itertools import islice

import xarray as xr

from ..measures.map import Row
from ..results.tables import number
from .evidence import places, real
from .ledger import Source
from .readings import alike, courses, rising, roughly, strength_told
from .rules import QUARTER, Told, above

wu = Source("[Wu]", "wu", real("sinks"), "K.4")
depth = wu.but(
    where="Thm 4.1, read on models with residual streams",
    kind="ours",
    needs=places("fresh models of several depths", group="depth"),
)
LARGER = "primacy of fresh models, known within a tenth, rises with every larger depth, at"
HIGHEST = "the fraction of queries with a weight above 0.2 is highest at position 0, by a quarter, in every model"
WIDER = "at equal depth fresh models' primacy, known within a tenth, is larger under the wider window, at every scale"
WINDOWS = places("fresh models with and without window", rope=True)


@wu("first-token-sink-pretrained", rule=HIGHEST)
def _(ds: xr.Dataset) -> Told:
    """By the metric of [Wu] the sink of causal language models is the first token."""
    over = ds["over_tau_of_model"]
    if 0 not in over["key"].values or over.size < 2:
        return "-", None
    first, most = float(over.sel(key=0)), float(over.sel(key=over["key"] != 0).max())
    words = f"{number(first, '.4f')} at 0, others at most {number(most, '.4f')}"
    return words, above(roughly(first / most, QUARTER), 0) if min(first, most) > 0 else first > most


@depth("depth-does-not-undo-logits", rule=f"{LARGER} every logit scale of the map")
def primacy_grows(rows: Sequence[Row], scales: int | None = None) -> dict[str, Told]:
    """The deeper the model, the more a causal mask favours the beginning, whatever the attention logits."""
    return {
        strength_told(strength): (
            "primacy " + ", ".join(f"{number(primacy)} at {n} blocks" for n, primacy in depths.items()),
            rising(list(depths.values())),
        )
        for strength, depths in islice(courses(rows, "blocks").items(), scales)
    }


@depth("primacy-grows-with-depth", rule=f"{LARGER} the map's smallest logit scale")
def _(rows: Sequence[Row]) -> dict[str, Told]:
    """The deeper the model, the more a causal mask favours the beginning."""
    return primacy_grows(rows, scales=1)


@depth("window-slows", "Thm 4.2, read on models with residual streams", rule=WIDER, needs=WINDOWS)
def _(rows: Sequence[Row]) -> dict[str, Told]:
    """The smaller the sliding window, the slower the beginning gains with depth."""
    windowed = [row for row in rows if row["window"]]
    comparable = [row for row in rows if not row["name"] and alike(row, windowed, "window", "name")]
    by_place: dict[str, Told] = {}
    for strength, by_window in courses(comparable, "window").items():
        widths = dict(sorted(by_window.items(), key=lambda item: item[0] or math.inf))  # 0: no window, the widest
        words = ", ".join(f"{number(x)} ({f'{w:g}' if w else 'no window'})" for w, x in widths.items())
        by_place[strength_told(strength)] = f"primacy {words}", rising(list(widths.values()))
    return by_place
