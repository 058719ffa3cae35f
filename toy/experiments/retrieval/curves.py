"""What a result of retrieval shows: published curves, tables and the chart."""

from __future__ import annotations

import json
import math
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from probes.charts import BLUE, GREEN, GREY, VERMILLION, Series, curves, level, sheet
from probes.claims.rules import range_told
from probes.results.curves import spearman
from probes.results.statistics import over_runs
from probes.results.tables import Table, interval, number

from ..rules import at, known, need, places, ranged, setting
from .training import STILL, architecture, fresh_profile


class Kind(NamedTuple):
    """Models that differ in seed and target alone."""

    layers: int
    width: int
    residual: int = 0
    feed_forward: int = 0

    @property
    def variant(self) -> str:
        """The stream's structure, in words."""
        return ", ".join(["no " * (not self.residual) + "residual", "no " * (not self.feed_forward) + "feed-forward"])

    def __str__(self) -> str:
        ends = ["residual"] * self.residual + ["feed-forward"] * self.feed_forward
        return ", ".join([f"{self.layers} layer{'s' if self.layers > 1 else ''}", f"width {self.width}", *ends])


# Read off [Liu-7]'s figures: loss by target, ten of ten tokens. Residual stream and feed-forward as their titles say.
PUBLISHED: dict[Kind, tuple[float, ...]] = {
    Kind(1, 2): (2.19, 2.19, 2.19, 2.19, 2.19, 2.19, 2.19, 2.19, 2.19, 0.00),
    Kind(2, 2): (1.13, 2.06, 2.15, 2.18, 2.19, 2.19, 2.19, 2.19, 2.19, 0.00),
    Kind(2, 10): (0.00, 1.65, 1.88, 1.97, 1.95, 1.95, 1.98, 2.00, 1.96, 0.00),
    Kind(3, 2): (0.03, 2.05, 2.23, 2.25, 2.24, 2.25, 2.25, 2.24, 2.24, 1.64),
    Kind(3, 10): (0.00, 1.56, 1.91, 2.00, 2.00, 2.05, 2.09, 2.11, 2.20, 1.62),
    Kind(3, 10, 1): (0.00, 0.06, 0.95, 1.22, 1.68, 1.71, 1.78, 1.56, 0.55, 0.00),
    Kind(3, 10, 1, 1): (0.00, 0.05, 0.14, 0.29, 0.32, 1.51, 0.92, 0.04, 0.00, 0.00),
}
PUBLISHED_SIZE = 10  # its vocabulary and its context

AGREES = 0.05  # nats; so near counts as the published value, for the same reason


def kinds(ds: xr.Dataset) -> list[Kind]:
    """All of a result."""
    return [Kind(*of) for of in product(*(ds[name].values.tolist() for name in Kind._fields))]


def of_kind(ds: xr.Dataset, kind: Kind) -> xr.Dataset:
    """One kind of model."""
    return at(ds, **kind._asdict())


def softmax(ds: xr.Dataset) -> bool:
    """Whether a result's models have softmax attention, as those of the source do."""
    return json.loads(ds.attrs["settings"]).get("attention", "softmax") == "softmax"


def published(ds: xr.Dataset, kind: Kind) -> xr.DataArray:
    """The published curve [target]; lacks where there is none for this task."""
    need(kind in PUBLISHED, softmax(ds), {setting(ds, "vocabulary"), setting(ds, "context")} == {PUBLISHED_SIZE})
    targets = ds["target"].values
    return xr.DataArray([PUBLISHED[kind][k] for k in targets], {"target": targets}, "target")


# -- tables


def tables(ds: xr.Dataset) -> list[Table]:
    """Losses by target; how far training got; published curves and what seeds say of single runs; roughness."""
    by_target, head = [f"k = {k}" for k in ds["target"].values], ("layers", "width", "variant")
    names = {kind: [str(kind.layers), str(kind.width), kind.variant] for kind in kinds(ds)}
    losses = {kind: of_kind(ds, kind)["loss"].transpose("target", "seed") for kind in names}
    rows = [[*names[kind], *(range_told(runs, ".2f") for runs in loss)] for kind, loss in losses.items()]
    readers = [[reader, *(number(x, ".3f") for x in of.values)] for (reader,), of in places(ds["limit"], "reader")]
    blind = "Least loss of a reader who knows nothing, the bag of tokens, or it and the last token"
    found = [
        Table("Loss by target, nats: median over seeds (range)", (*head, *by_target), rows),
        Table(blind, ("reader", *by_target), readers),
    ]
    if "trained" in ds:
        title = (
            f"Trained on, with more steps: models whose loss still fell by more than {STILL:g} nats in the last quarter"
        )
        change = "change of their loss, nats: median (range)"
        columns = (*head, "trained on", change, "longest, steps", "still falling, by target")
        found.append(Table(title, columns, [[*names[kind], *_converged(of_kind(ds, kind))] for kind in names]))
    if len(by_target) > 2 and softmax(ds):  # probes read no other attention
        title = "What orders the targets: rank correlation of -loss over k, mean over seeds"
        columns = (*head, "profile of fresh weights", "nearness to the end", "profile, the last token left out")
        found.append(Table(title, columns, ordered(ds)))
    against = [_against(kind, of) for kind in PUBLISHED if (of := known(spread, ds, kind)) is not None]
    if against:
        columns = (
            *("layers", "width", "variant", "rms of the medians", f"medians within {AGREES:g}"),
            *("published within the seeds' range", "range of the seeds, median (largest)"),
            *("published steps between neighbours, median", "single runs that order neighbours as published"),
            *("roughness published", "of single runs", "that seeds share"),
        )
        found.append(Table("Published curves, and what seeds say about single runs", columns, against))
    return found


def ordered(ds: xr.Dataset) -> list[list[str]]:
    """What the loss by target follows in every kind of model, and in all of two layers or more; intervals over seeds.

    The profile is that of the weights that the seed's models were trained from.
    """
    sizes, targets, rows, deep = [setting(ds, name) for name in ("vocabulary", "context")], ds["target"].values, [], []
    for kind in kinds(ds):
        shape = architecture(kind.layers, kind.width, bool(kind.residual), bool(kind.feed_forward), *sizes)
        by_seed = []
        for seed, loss in zip(ds["seed"].values.tolist(), of_kind(ds, kind)["loss"].values, strict=True):
            profile, inner = fresh_profile(shape, seed)[targets], targets < sizes[1] - 1
            pairs = (profile, -loss), (targets, -loss), (profile[inner], -loss[inner])
            by_seed.append([spearman(*pair) for pair in pairs])
        deep += [by_seed] * (kind.layers > 1)
        rows.append([str(kind.layers), str(kind.width), kind.variant, *_by_seed(by_seed)])
    return rows + ([["2 or more", "all", "all", *_by_seed(np.mean(deep, axis=0))]] if deep else [])


def _by_seed(values: Any) -> list[str]:
    """Values [seed, ...] in words."""
    return [interval(*over_runs(np.array(one))[:3], form=".2f") for one in zip(*values, strict=True)]


def _converged(ds: xr.Dataset) -> list[str]:
    """Of one kind: how many were trained on, what that changed, for how many steps, and who still falls."""
    fallen = [f"{k}: {int(n)}" for (k,), n in places((ds["fall"] > STILL).sum("seed"), "target") if n]
    more = (ds["trained"] > setting(ds, "steps")).values
    change = (ds["loss"] - ds["loss_first"]).values[more]
    said = range_told(change, "+.2f") if change.size else "-"
    return [f"{more.sum()} of {more.size}", said, f"{int(ds['trained'].max()):,}", ", ".join(fallen) or "-"]


class Spread(NamedTuple):
    """What the seeds say of a published curve's single runs."""

    loss: xr.DataArray  # [seed, target]
    rms: float  # nats; of the medians less the published values
    agree: int  # targets at which the median is within AGREES of the published value
    inside: int  # targets at which the published value is within the range of the seeds, give or take AGREES
    ranges: xr.DataArray  # [target]; largest minus smallest of the seeds
    steps: np.ndarray  # published differences between neighbouring targets that are not zero
    ordered: float  # share of pairs of single runs at those neighbours that have the published order


def spread(ds: xr.Dataset, kind: Kind) -> Spread:
    """Lacks where there is no published curve, or a single seed."""
    read, of = published(ds, kind), of_kind(ds, kind)["loss"].transpose("seed", "target")
    need(of.sizes["seed"] > 1)
    loss, curve, k = of.values, read.values, read["target"].values
    steps, right = [], []
    for n, m in pairwise(np.argsort(k)):
        if k[m] == k[n] + 1 and curve[m] != curve[n]:
            steps.append(curve[m] - curve[n])
            right.append(np.mean(np.sign(loss[:, None, m] - loss[None, :, n]) == np.sign(steps[-1])))
    off = np.median(loss, 0) - curve
    return Spread(
        of,
        float(np.sqrt(np.mean(off**2))),
        int(np.sum(np.abs(off) <= AGREES)),
        int(np.sum((curve >= loss.min(0) - AGREES) & (curve <= loss.max(0) + AGREES))),
        of.max("seed") - of.min("seed"),
        np.array(steps),
        float(np.mean(right)) if right else math.nan,
    )


def _against(kind: Kind, found: Spread) -> list[str]:
    ranges, rough = found.ranges, known(roughness, found.loss)
    told = ["-"] * 3
    if rough is not None:
        curve = xr.DataArray([PUBLISHED[kind]], {"target": range(PUBLISHED_SIZE)}, ("seed", "target"))
        told = [number(np.abs(_bends(curve)).mean(), ".2f"), *(number(one.mean(), ".2f") for one in rough)]
    return [
        *(str(kind.layers), str(kind.width), kind.variant),
        number(found.rms, ".3f"),
        f"{found.agree} of {ranges.size}",
        f"{found.inside} of {ranges.size}",
        f"{number(ranges.median(), '.2f')} ({number(ranges.max(), '.2f')} at k = {int(ranges.idxmax())})",
        number(np.median(np.abs(found.steps)) if found.steps.size else math.nan, ".2f"),
        number(found.ordered, ".0%"),
        *told,
    ]


class Roughness(NamedTuple):
    """Of curves of the loss over k between the first token and the last: mean size of second differences, nats, by seed."""

    own: np.ndarray  # of each run
    shared: np.ndarray  # with the sign that the mean of the other seeds has: what is scatter of the seeds averages out


def roughness(loss: xr.DataArray) -> Roughness:
    """Of losses [seed, target]; lacks unless all targets and several seeds are there."""
    need(loss.sizes["seed"] > 1, loss.sizes["target"] == PUBLISHED_SIZE)
    bends = _bends(loss)
    others = bends.sum(0) - bends
    return Roughness(np.abs(bends).mean(1), (bends * np.sign(others)).mean(1))


def _bends(loss: xr.DataArray) -> np.ndarray:
    """Second differences [seed, k] at all k whose neighbours lie between first and last."""
    return np.diff(loss.sortby("target").transpose("seed", "target").values[:, 1:-1], 2, axis=1)


# -- the chart

COLORS = {1: VERMILLION, 2: BLUE, 3: GREEN}
CAPTION = "{}: medians of {} seeds on fresh sequences, and their range. Rings: single runs of [Liu-7]."


def charts(ds: xr.Dataset) -> dict[str, Figure]:
    """Loss against the position asked for, a panel for every width without residual stream and with all there is."""
    variants = list(dict.fromkeys((kind.residual, kind.feed_forward) for kind in kinds(ds)))
    parts_of = list(dict.fromkeys((variants[0], variants[-1])))
    shown: list[tuple[int, tuple[int, int]]] = [
        (w, parts) for w in ds["width"].values.tolist()[:2] for parts in parts_of
    ]
    rows = -(-len(shown) // 2)
    figure, cells = sheet(rows, min(2, len(shown)), caption=CAPTION.format("Loss by position", ds.sizes["seed"]))
    by_target = ds.sortby("target")
    x = by_target["target"].values
    for cell, (width, parts) in zip(cells.flat, shown, strict=False):
        for layers in by_target["layers"].values.tolist():
            kind, color = Kind(layers, width, *parts), COLORS.get(layers, GREY)
            loss = of_kind(by_target, kind)["loss"].transpose("seed", "target")
            curves(cell, [ranged(f"{layers} layer{'s' * (layers > 1)}", loss, color, x=x, marker="o")])
            if (read := known(published, by_target, kind)) is not None:
                curves(cell, [Series("", read.values, color, x=x, line="", marker="o", filled=False)])
        for reader, words in (("nothing", "knows nothing"), ("bag and last", "blind to order")):
            level(cell, float(ds["limit"].sel(reader=reader).max()), words)
        cell.set(xlabel="position asked for", ylabel="loss (nats)")
        cell.set_title(f"width {width}, {Kind(1, width, *parts).variant}", fontsize=9)
        cell.set_ylim(-0.08, max(2.5, 1.06 * float(ds["limit"].max())))
    return {"": figure}
