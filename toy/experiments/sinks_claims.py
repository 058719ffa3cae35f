"""What a result of sinks says: its table, and the statements of [Wu] K.4."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import xarray as xr

from probes.claims.claim import Claim
from probes.results.tables import Table, number

from .position_bias_claims import PASSED, gate_told, learnt_by_kind, scaled
from .rules import Judged, at, by_parts, decided, each_above, judge, need, over_told, places
from .sinks import DIMS

__all__ = ["PASSED", "claims", "kinds", "tables"]
TOYS = ("scale", "depth", "residual")


def kinds(ds: xr.Dataset) -> list[dict[str, Any]]:
    """What was trained under each mask, as {scale, depth, residual}."""
    return [dict(zip(TOYS, labels, strict=True)) for labels, _ in places(ds, *TOYS)]


def tables(ds: xr.Dataset) -> list[Table]:
    """The metric of the first token and of the highest other one, per model; medians over seeds."""
    rows = []
    for labels, one in places(ds, *TOYS, "mask"):
        sink, fresh = (one[name].median("seed").values for name in ("sink", "fresh"))
        alpha = one["alpha"].mean("layer").median("seed").values
        other = 1 + int(sink[1:].argmax())
        ends = (number(one[name].median("seed"), ".2f") for name in ("training_loss", "accuracy"))
        first = (number(values[0], ".3f") for values in (sink, fresh, one["uniform"].values, alpha))
        rows.append([*map(str, labels), *first, f"{sink[other]:.3f} at {other}", *ends])
    columns = ("first token", "before training", "even weights", "alpha [Gu]", "highest other", "loss", "accuracy")
    return [Table("Sink metric, medians over seeds", (*TOYS, "mask", *columns), rows)]


def claims(ds: xr.Dataset) -> list[Claim]:
    """The statements, for each scale and depth by itself, without residual stream where that was trained."""
    residual = "off" if "off" in ds["residual"].values else str(ds["residual"].values[0])
    toys = [{"toys": toy, "scaled": scaled(toy["scale"])} | toy for toy in kinds(ds) if toy["residual"] == residual]
    # Who fails on the classes of training fails on novel ones: where a result lacks those, nobody passes.
    novel = "novel_accuracy" in ds
    accuracy = ds["novel_accuracy" if novel else "accuracy"].transpose(*DIMS)
    states = learnt_by_kind(accuracy)
    states = states if novel else states.where(states != "trained", "partly trained")
    told = gate_told(accuracy, states, "novel classes" if novel else "classes of training")
    return judge(__name__, ds, lists={"kind_of_toy": toys}, done=ds.where(states == "trained"), untrained=told)


def size_of(mask: str) -> int:
    """N of window-N and prefix-N, 0 of other masks."""
    return int(mask.partition("-")[2] or 0)


def under(ds: xr.Dataset, toys: dict[str, Any], kind: str) -> dict[str, xr.Dataset]:
    """What was trained under each mask of a kind (causal, window-N or prefix-N), by N; lacks where nothing was."""
    masks = sorted((mask for mask in map(str, ds["mask"].values) if mask.startswith(kind)), key=size_of)
    found = {mask: at(ds, **toys, mask=mask).transpose("seed", "position", ...) for mask in masks}
    found = {mask: one for mask, one in found.items() if bool(one["sink"].notnull().any())}
    need(found)
    return found


def first_is_largest(ds: xr.Dataset, toys: dict[str, Any], masks: str) -> Judged:
    """The metric at the first token is above that of every other, under each mask of a kind."""
    found = []
    for mask, one in under(ds, toys, masks).items():
        own, other = one["sink"].isel(position=0), one["sink"].isel(position=slice(1, None)).max("position")
        fresh = float(one["fresh"].isel(position=0).mean())
        said = f"{mask}: {_told(own)} at 0 (before training {fresh:.3f}), highest other {_told(other)}"
        found.append((said, each_above(own - other)))
    return by_parts(found)


def made_by_training(ds: xr.Dataset, toys: dict[str, Any]) -> Judged:
    """Fresh weights give the first token less."""
    one = under(ds, toys, "causal")["causal"].isel(position=0)
    even = float(one["uniform"].mean())
    told = f"{_told(one['sink'])} at 0; before training {_told(one['fresh'])}, even weights {even:.3f}"
    return decided(told, each_above(one["sink"] - one["fresh"]))


def weaker_with_window(ds: xr.Dataset, toys: dict[str, Any]) -> Judged:
    """The metric at the first token rises with the window."""
    found = {mask: one.isel(position=0) for mask, one in under(ds, toys, "window").items()}
    need(len(found) > 1)
    told = [
        f"{mask}: {_told(one['sink'])} (alpha {float(one['alpha'].mean()):.3f}, "
        f"even weights {float(one['uniform'].mean()):.3f})"
        for mask, one in found.items()
    ]
    sinks = [one["sink"] for one in found.values()]
    return decided("; ".join(told), *(each_above(wide - narrow) for narrow, wide in pairwise(sinks)))


def shared_by_prefix(ds: xr.Dataset, toys: dict[str, Any]) -> Judged:
    """Every token of a prefix has a higher metric than any after it."""
    found = []
    for mask, one in under(ds, toys, "prefix").items():
        inside, outside = slice(size_of(mask)), slice(size_of(mask), None)
        least, after = (
            one["sink"].isel(position=inside).min("position"),
            one["sink"].isel(position=outside).max("position"),
        )
        said = f"{mask}: lowest of the prefix {_told(least)}, highest after it {_told(after)}"
        found.append((said, each_above(least - after)))
    return by_parts(found)


def _told(values: xr.DataArray) -> str:
    return over_told(values, ".3f")
