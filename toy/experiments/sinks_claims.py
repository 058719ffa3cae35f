"""What a result of position-bias says of attention sinks: their table, and the statements of [Wu] K.4."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import xarray as xr

from probes.claims.claim import Claim, Verdict
from probes.claims.rules import SURE, every
from probes.results.tables import Table, number

from .learnt import PASSED, by_stream, scaled
from .position_bias import architecture_of
from .rules import Judged, at, by_parts, decided, each_above, judge, need, over_told, places, setting
from .sinks import uniform_sink

__all__ = ["PASSED", "claims", "kinds", "tables"]
KINDS = ("scale", "data", "depth", "positional", "residual")
WIDTH = 2  # of a model whose mask alone matters


def kinds(ds: xr.Dataset) -> list[dict[str, Any]]:
    """The kinds of toys whose sinks were measured, each under some masks: {scale, data, depth, positional, residual}."""
    if "over_tau" not in ds or "unbiased" not in ds["training"].values:
        return []
    found = ds["over_tau"].sel(training="unbiased").notnull().any(["mask", "seed", "layer", "key"])
    return [dict(zip(KINDS, labels, strict=True)) for labels, one in places(found, *KINDS) if one]


def masks_of(ds: xr.Dataset, kind: dict[str, Any]) -> dict[str, xr.Dataset]:
    """What was measured of a kind of toys under each mask, as [seed, layer, ...]; `even` is `uniform_sink`."""
    found, tau = at(ds, **kind, training="unbiased"), float(setting(ds, "tau"))
    found = found[[name for name in ("over_tau", "alpha", "fresh", "pattern", "novel_accuracy") if name in found]]
    by_mask = {str(mask): found.sel(mask=mask).dropna("seed", subset=["fresh"]) for mask in ds["mask"].values}
    return {
        mask: one.dropna("layer", how="all", subset=["over_tau"])
        .transpose("seed", "layer", ...)
        .assign(
            sink=one["over_tau"].mean("layer"),
            even=("key", uniform_sink(architecture_of(1, mask, "none", "off", WIDTH), tau)),
        )
        for mask, one in by_mask.items()
        if one.sizes["seed"]
    }


def tables(ds: xr.Dataset) -> list[Table]:
    """The metric of the first token and of the highest other one, per model; means over seeds."""
    rows = []
    for kind in kinds(ds):
        for mask, one in masks_of(ds, kind).items():
            sink, fresh = (one[name].mean("seed").values for name in ("sink", "fresh"))
            alpha = one["alpha"].mean(("layer", "seed")).values
            other = 1 + int(np.argmax(sink[1:]))
            accuracy = number(one["novel_accuracy"].mean("seed"), ".2f")
            first = (number(values[0], ".3f") for values in (sink, fresh, one["even"].values, alpha))
            rows.append([*map(str, kind.values()), mask, *first, f"{sink[other]:.3f} at {other}", accuracy])
    columns = ("first token", "before training", "even weights", "alpha [Gu]", "highest other", "accuracy")
    return [Table("Sink metric, means over seeds", (*KINDS, "mask", *columns), rows)] if rows else []


def claims(ds: xr.Dataset, **shared: Any) -> list[Claim]:
    """The statements, for each scale and depth by itself; `shared` as in `rules.judge`."""
    pairs = [(scale, depth) for (scale, depth), _ in places(ds["gap"], "scale", "depth")]
    toys = [{"scale": scale, "depth": depth, "scaled": scaled(scale)} for scale, depth in pairs]
    return judge(__name__, ds, lists={"kind_of_toy": toys}, **shared)


def size_of(mask: str) -> int:
    """N of window-N and prefix-N, 0 of other masks."""
    return int(mask.partition("-")[2] or 0)


def under(ds: xr.Dataset, scale: str, depth: int, mask: str, positional: str) -> dict[str, xr.Dataset]:
    """What was trained under each mask of a kind (causal, window or prefix), by N; lacks without any."""
    need("over_tau" in ds)
    which = {"scale": scale, "data": "gaussian", "depth": depth, "positional": positional}
    found = {name: one for name, one in masks_of(ds, which).items() if name.startswith(mask)}
    need(found)
    return dict(sorted(found.items(), key=lambda item: size_of(item[0])))


@by_stream
def first_is_largest(ds: xr.Dataset, scale: str, depth: int, mask: str, positional: str = "none") -> Judged:
    """The metric at the first token is above that of every other, under each mask of a kind."""
    found = []
    for name, one in under(ds, scale, depth, mask, positional).items():
        own, other = one["sink"].isel(key=0), one["sink"].isel(key=slice(1, None)).max("key")
        fresh = float(one["fresh"].isel(key=0).mean())
        said = f"{name}: {_told(own)} at 0 (before training {fresh:.3f}), highest other {_told(other)}"
        found.append((said, each_above(own - other)))
    return by_parts(found)


@by_stream
def made_by_training(ds: xr.Dataset, scale: str, depth: int, mask: str, positional: str = "none") -> Judged:
    """Fresh weights give the first token less."""
    one = under(ds, scale, depth, mask, positional)[mask].isel(key=0)
    told = f"{_told(one['sink'])} at 0; before training {_told(one['fresh'])}, even weights {float(one['even']):.3f}"
    return decided(told, each_above(one["sink"] - one["fresh"]))


@by_stream
def weaker_with_window(ds: xr.Dataset, scale: str, depth: int, mask: str, positional: str = "none") -> Judged:
    """The metric at the first token rises with the window, and alpha does."""
    found = {
        name: one.isel(key=0).assign(alpha=one["alpha"].isel(key=0).mean("layer"))
        for name, one in under(ds, scale, depth, mask, positional).items()
    }
    need(len(found) > 1)
    told = [
        f"{name}: {_told(one['sink'])} (alpha {_told(one['alpha'])}, even weights {float(one['even']):.3f})"
        for name, one in found.items()
    ]
    rises: list[Verdict] = [
        every([each_above(wide[name] - narrow[name]) for narrow, wide in pairwise(found.values())])(SURE)
        for name in ("sink", "alpha")
    ]
    return Judged("; ".join(told), rises[0] if rises[0] == rises[1] else "undecided")


@by_stream
def shared_by_prefix(ds: xr.Dataset, scale: str, depth: int, mask: str, positional: str = "none") -> Judged:
    """Every token of a prefix has a higher metric than any after it."""
    found = []
    for name, one in under(ds, scale, depth, mask, positional).items():
        inside, outside = slice(size_of(name)), slice(size_of(name), None)
        least, after = one["sink"].isel(key=inside).min("key"), one["sink"].isel(key=outside).max("key")
        said = f"{name}: lowest of the prefix {_told(least)}, highest after it {_told(after)}"
        found.append((said, each_above(least - after)))
    return by_parts(found)


def _told(values: xr.DataArray) -> str:
    return over_told(values, ".3f")
