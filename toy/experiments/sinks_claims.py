"""What a result of position-bias says of attention sinks: their table, and the statements of [Wu] K.4."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from probes.charts import CYCLE, DASHED, DOTTED, GREY, Series, curves, pictures, sheet
from probes.claims.claim import Claim, Verdict
from probes.claims.ledger import Source
from probes.claims.rules import SURE, every
from probes.results.tables import Table, number

from .learnt import PASSED, by_stream, gate, name_of, scaled
from .position_bias.training import architecture_of
from .rules import (
    OVER_RUNS,
    Judged,
    at,
    by_parts,
    decided,
    each_above,
    judged,
    need,
    over_told,
    places,
    ranged,
    setting,
)
from .sinks import uniform_sink

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


METRIC = "sink metric (fraction of queries that give a position a weight above tau)"
FIRST = f"the {METRIC} at the first token is above that of every other, {OVER_RUNS}"
RISES = (
    f"the {METRIC} at the first token rises with every wider window, {OVER_RUNS}, and so does alpha of [Gu]; undecided "
    "where the two disagree, since the metric divides by the queries that see the token, and alpha by all"
)
SHARED = f"the least {METRIC} within the prefix is above the highest after it, {OVER_RUNS}, for every prefix"


def claims(ds: xr.Dataset, **shared: Any) -> list[Claim]:
    """The statements, for each scale and depth by itself; `shared` as in `rules.verdicts`."""
    wu: Any = Source("[Wu] K.4", "wu-toy-sink")
    for (scale, depth), _ in places(ds["gap"], "scale", "depth"):
        of, toys = replace(wu, suffix=f"{scale}-{depth}"), {"scale": scale, "depth": depth}
        where = f"({depth} blocks, {scaled(scale)})."
        causal, window, prefix = ({"mask": mask, **toys} for mask in ("causal", "window", "prefix"))
        claim = f"In toys under a causal mask the sink is the first token {where}"
        of("first-token", "", claim, rule=f"{FIRST}. {PASSED}", **causal)(first_is_largest)
        made = "The sink of toys under a causal mask, their first token, is made by training: fresh weights give less"
        rule = f"the {METRIC} at the first token rises in training, {OVER_RUNS}. {PASSED}"
        ours = replace(of, name="[Wu] K.4, read on", kind="ours")
        ours("made-by-training", "", f"{made} {where}", rule=rule, **causal)(made_by_training)
        claim = f"In toys under sliding windows the first token is the sink as well {where}"
        of("first-token-window", "", claim, rule=f"{FIRST}, under every window. {PASSED}", **window)(first_is_largest)
        claim = f"The smaller a toy's sliding window, the weaker the sink at the first token {where}"
        of("weaker-with-window", "", claim, rule=f"{RISES}. {PASSED}", **window)(weaker_with_window)
        claim = f"In toys under a prefix mask all tokens of the prefix are sinks {where}"
        of("shared-by-prefix", "", claim, rule=f"{SHARED}. {PASSED}", **prefix)(shared_by_prefix)
    return judged(wu, ds, **shared)


# -- charts

CAPTION = (
    "{}, medians of {} seeds and their range: share of the queries that see a key which give it more than {:g}. Dotted: "
    "even weights. Patterns: the last block, one sequence."
)


def charts(ds: xr.Dataset) -> dict[str, Figure]:
    """The metric along keys by mask, of every kind of toys without encoding on Gaussian data; the first has no suffix."""
    chosen = [kind for kind in kinds(ds) if (kind["positional"], kind["data"]) == ("none", "gaussian")]
    ends = [f"-{of['scale']}-{of['depth']}{'-residual' * (of['residual'] == 'on')}" for of in chosen]
    return {end * (n > 0): _chart(ds, of) for n, (end, of) in enumerate(zip(ends, chosen, strict=True))}


def _chart(ds: xr.Dataset, of: dict[str, Any]) -> Figure:
    """The metric along keys under the causal mask before and after training, under windows, under prefixes; patterns."""
    by_mask, learnt = masks_of(ds, of), gate(ds)[1].sel(of | {"training": "unbiased"})
    seeds = next(iter(by_mask.values())).sizes["seed"]
    groups: dict[str, dict[str, xr.Dataset]] = {}
    for mask in sorted(by_mask, key=lambda name: (name != "causal", name.partition("-")[0] == "prefix", size_of(name))):
        if mask != "full":
            groups.setdefault(mask.partition("-")[0], {})[mask] = by_mask[mask]
    rows = -(-(len(groups) + 1) // 2)
    figure, cells = sheet(rows, 2, caption=CAPTION.format(name_of(of), seeds, setting(ds, "tau")))
    for cell, shown in zip(cells.flat, groups.values(), strict=False):
        for (mask, models), color in zip(shown.items(), CYCLE, strict=False):
            below = ", below the gate" * (str(learnt.sel(mask=mask).item()) != "trained")
            curves(cell, [ranged(mask.replace("-", " ") + below, models["sink"].transpose("seed", "key"), color)])
            curves(cell, [Series("", models["even"].values, color, line=DOTTED, width=0.9)])
            if mask == "causal":
                curves(cell, [ranged("before training", models["fresh"].transpose("seed", "key"), GREY, line=DASHED)])
        cell.set(xlabel="key", ylabel="sink metric", xticks=range(0, ds.sizes["key"], 4))
    few = {mask: models for shown in groups.values() for mask, models in [*shown.items()][:1]}
    last = [models["pattern"].isel(seed=0, layer=-1).values for models in few.values()]
    pictures(cells.flat[len(groups)], last, [mask.replace("-", " ") for mask in few])
    for cell in cells.flat[len(groups) + 1 :]:
        cell.set_visible(False)
    return figure


def _told(values: xr.DataArray) -> str:
    return over_told(values, ".3f")
