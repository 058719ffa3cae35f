"""Rules for [Xiao], arXiv 2309.17453, "Efficient Streaming Language Models with Attention Sinks"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import xarray as xr

from ..results.statistics import Interval, jackknifed, units
from .rules import Test, Told, above, below, estimated, every, of_models, told

NAME = "evict_loss_change"
of_caches = of_models("evict/sinks", f"{NAME}_by_prompt")


def _by_last(ds: xr.Dataset, tell: Callable[[xr.Dataset], Interval], test: Callable[[Interval], Test]) -> Told | None:
    """What is told of each number of last keys, where caches have lost keys; the test has to hold for all."""
    cut = ds.sel(cache="cut")
    found = {int(last): tell(cut.sel(last_keys=last)) for last in ds["last_keys"].values}
    said = ", ".join(f"{told(one, '.3f')} nat at {last}" for last, one in found.items())
    return said, every(test(one) for one in found.values())


def _known(ds: xr.Dataset, *first: int) -> bool:
    return set(first) <= {int(one) for one in ds["first_keys"].values}


def _apart(at: xr.Dataset, one: dict[str, Any], other: dict[str, Any], share: float = 1.0) -> Interval:
    """The other's change of loss without that share of the one's, prompt by prompt, over documents."""
    values = at[f"{NAME}_by_prompt"]
    return jackknifed(lambda some: float(some.mean()), (values.sel(other) - share * values.sel(one)).values, units(at))


@of_caches
def window_fails(ds: xr.Dataset, limit: float) -> Told | None:
    if not _known(ds, 0):
        return None
    return _by_last(ds, lambda at: estimated(at, NAME, first_keys=0, numbering="text"), lambda one: above(one, limit))


@of_caches
def compared_caches(ds: xr.Dataset, less: int, more: int, numbering: str, share: float) -> Told | None:
    if not _known(ds, less, more):
        return None
    one, other = ({"first_keys": first, "numbering": numbering} for first in (less, more))
    return _by_last(ds, lambda at: _apart(at, one, other, share), lambda found: below(found, 0))


@of_caches
def renumbering_helps(ds: xr.Dataset, more: int) -> Told | None:
    if not _known(ds, more):
        return None
    one, other = ({"first_keys": more, "numbering": by} for by in ("text", "cache"))
    return _by_last(ds, lambda at: _apart(at, one, other), lambda found: below(found, 0))
