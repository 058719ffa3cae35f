"""Rules for [Liu+], arXiv 2307.03172, "Lost in the Middle".

Its accuracies in question answering over documents are not among this suite's measurements; key-value recall is.
"""

from __future__ import annotations

import xarray as xr

from ..measures.mechanism_numbers import auc, follows
from ..measures.recall_numbers import edges
from ..results.dataset import options_of
from ..results.folder import Collected
from .rules import Told, above, every, of_models, told

TRACED = "mechanism/retrieval"  # results with what answers depend on
CHANCE = 0.5
FORMS = {"exact": "+.2f", "log_p": "+.2f"}


def unmeasured(collected: Collected) -> None:
    """No result that this suite makes holds such an accuracy."""


@of_models("retrieval", "log_p", "exact")
def ends_recalled(ds: xr.Dataset, variable: str, ends: list[str]) -> Told:
    """Whether pairs at these ends ("first", "last") are recalled better than those in the middle half."""
    first, last = edges(ds, variable)
    found = {"first": first, "last": last}
    asked = options_of(ds)
    said = ", ".join(f"{end} {told(found[end], FORMS[variable])}" for end in ends)
    return f"{said} ({asked['pairs']} pairs, keys {asked['keys']})", every([above(found[end], 0) for end in ends])


@of_models(TRACED, "gain", "sensitivity")
def recall_follows(ds: xr.Dataset, profile: str) -> Told:
    """Whether gain by depth is ranked as a profile is."""
    if profile != "log_distance" and profile not in ds:
        return "-", None
    found = follows(ds, profile)
    return told(found, "+.2f"), above(found, 0)


@of_models(TRACED, "exact", "sensitivity")
def recall_predicted(ds: xr.Dataset) -> Told:
    found = auc(ds)
    return told(found, ".2f"), above(found, CHANCE)
