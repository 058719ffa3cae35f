"""What a result of sinks says: its table, and the statements of [Wu] K.4."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import xarray as xr

from probes.claims.claim import Claim, read_statements
from probes.results.tables import Table, number

from .position_bias_claims import PASSED, gate_told, learnt_by_kind, scaled
from .rules import NOT_THERE, Judged, Rule, by_parts, decided, each_above, over_told
from .sinks import DIMS

STATEMENTS = read_statements(Path(__file__).with_name("sinks.toml"))


def kinds(ds: xr.Dataset) -> list[dict[str, Any]]:
    """What was trained under each mask, as {scale, depth, residual}."""
    dims = ("scale", "depth", "residual")
    values = product(*(ds[dim].values.tolist() for dim in dims))
    return [dict(zip(dims, names, strict=True)) for names in values]


def tables(ds: xr.Dataset) -> list[Table]:
    """The metric of the first token and of the highest other one, per model; medians over seeds."""
    rows = []
    for at in kinds(ds):
        for mask in ds["mask"].values:
            one = ds.sel(at).sel(mask=mask)
            sink, fresh = (one[name].median("seed").values for name in ("sink", "fresh"))
            other = 1 + int(sink[1:].argmax())
            alpha = one["alpha"].mean("layer").median("seed").values
            rows.append(
                [
                    *(str(at[dim]) for dim in ("scale", "depth", "residual")),
                    str(mask),
                    *(number(values[0], ".3f") for values in (sink, fresh, one["uniform"].values, alpha)),
                    f"{sink[other]:.3f} at {other}",
                    number(one["training_loss"].median("seed"), ".2f"),
                    number(one["accuracy"].median("seed"), ".2f"),
                ]
            )
    columns = ("scale", "depth", "residual", "mask", "first token", "before training", "even weights", "alpha [Gu]")
    return [Table("Sink metric, medians over seeds", (*columns, "highest other", "loss", "accuracy"), rows)]


def claims(ds: xr.Dataset) -> list[Claim]:
    """The statements, for each scale and depth by itself, without residual stream where that was trained."""
    residual = "off" if "off" in ds["residual"].values else str(ds["residual"].values[0])
    states, failed = _gate(ds)
    done = ds.where(states == "trained")
    rules: dict[str, Rule] = {
        "wu-toy-sink-first-token": partial(_first, kind="causal"),
        "wu-toy-sink-made-by-training": _emerges,
        "wu-toy-sink-first-token-window": partial(_first, kind="window"),
        "wu-toy-sink-weaker-with-window": _weaker,
        "wu-toy-sink-shared-by-prefix": _shared,
    }
    found = []
    for at, (name, rule) in product(kinds(ds), rules.items()):
        if at["residual"] != residual:
            continue
        said, where = STATEMENTS[name], f"({at['depth']} blocks, {scaled(at['scale'])})."
        judged = rule(done.sel(at))
        if judged is NOT_THERE and rule(ds.sel(at)) is not NOT_THERE:
            judged = Judged(failed, "not trained")
        identity = {"id": f"{name}-{at['scale']}-{at['depth']}", "claim": said.claim.format(where=where)}
        found.append(replace(said, rule=f"{said.rule}. {PASSED}", **identity).judged(*judged))
    return found


def _gate(ds: xr.Dataset) -> tuple[xr.DataArray, str]:
    """What each kind of toy has learnt, and on what accuracy.

    Who fails on the classes of training fails on novel ones: where a result lacks those, nobody passes.
    """
    novel = "novel_accuracy" in ds
    accuracy = ds["novel_accuracy" if novel else "accuracy"].transpose(*DIMS)
    states = learnt_by_kind(accuracy)
    states = states if novel else states.where(states != "trained", "partly trained")
    return states, gate_told(accuracy, states, "novel classes" if novel else "classes of training")


def _of_kind(ds: xr.Dataset, kind: str) -> list[str]:
    """Masks that were trained of a kind (causal, window-N or prefix-N), by N."""
    names = [str(mask) for mask in ds["mask"].values if str(mask).startswith(kind)]
    return sorted(names, key=size_of)


def size_of(mask: str) -> int:
    """N of window-N and prefix-N, 0 of other masks."""
    return int(mask.partition("-")[2] or 0)


def _there(one: xr.Dataset, masks: list[str]) -> list[xr.DataArray]:
    """The metric [seed, position] under each of these masks that was trained."""
    known = [one["sink"].sel(mask=mask).transpose("seed", "position") for mask in masks if mask in one["mask"].values]
    return [sink for sink in known if bool(sink.notnull().any())]


def _first(one: xr.Dataset, *, kind: str) -> Judged:
    """Whether the metric at the first token is above that of every other, under each mask of a kind."""
    found = []
    for sink in _there(one, _of_kind(one, kind)):
        own, other = sink.isel(position=0), sink.isel(position=slice(1, None)).max("position")
        fresh = float(one["fresh"].sel(mask=sink["mask"], position=0).mean())
        said = f"{_told(own)} at 0 (before training {fresh:.3f}), highest other {_told(other)}"
        found.append((f"{sink['mask'].item()}: {said}", each_above(own - other)))
    return by_parts(found)


def _emerges(one: xr.Dataset) -> Judged:
    if not (there := _there(one, ["causal"])):
        return NOT_THERE
    sink, fresh = there[0].isel(position=0), one["fresh"].sel(mask="causal", position=0)
    even = float(one["uniform"].sel(mask="causal", position=0).mean())
    return decided(
        f"{_told(sink)} at 0; before training {_told(fresh)}, even weights {even:.3f}", each_above(sink - fresh)
    )


def _weaker(one: xr.Dataset) -> Judged:
    sinks = [sink.isel(position=0) for sink in _there(one, _of_kind(one, "window"))]
    if len(sinks) < 2:
        return NOT_THERE
    told = []
    for sink in sinks:
        at = {"mask": sink["mask"], "position": 0}
        alpha, even = float(one["alpha"].sel(at).mean()), float(one["uniform"].sel(at).mean())
        told.append(f"{sink['mask'].item()}: {_told(sink)} (alpha {alpha:.3f}, even weights {even:.3f})")
    return decided("; ".join(told), *(each_above(wide - narrow) for narrow, wide in pairwise(sinks)))


def _shared(one: xr.Dataset) -> Judged:
    found = []
    for sink in _there(one, _of_kind(one, "prefix")):
        k = size_of(str(sink["mask"].item()))
        least, after = sink.isel(position=slice(k)).min("position"), sink.isel(position=slice(k, None)).max("position")
        said = f"{sink['mask'].item()}: lowest of the prefix {_told(least)}, highest after it {_told(after)}"
        found.append((said, each_above(least - after)))
    return by_parts(found)


def _told(values: xr.DataArray) -> str:
    return over_told(values, ".3f")
