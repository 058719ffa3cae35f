"""What a result of retrieval says: published curves, tables and statements of [Liu-7]."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from probes.claims.claim import Claim
from probes.claims.rules import SURE, above, below, between, every, nothing, range_told
from probes.results.curves import spearman
from probes.results.statistics import Interval, between_runs, over_runs
from probes.results.tables import Table, interval, number

from .retrieval import STILL, architecture, fall, fresh_profile
from .rules import Judged, at, decided, each_above, judge, known, need, over_each, over_told, places, setting


class Kind(NamedTuple):
    """Models that differ in seed and target alone."""

    layers: int
    width: int
    residual: int = 0
    feed_forward: int = 0

    @property
    def variant(self) -> str:
        """The stream's structure, in words."""
        parts = (
            "residual" if self.residual else "no residual",
            "feed-forward" if self.feed_forward else "no feed-forward",
        )
        return ", ".join(parts)

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
NORMAL = 1.96  # standard errors to either end of a 95 % interval over sequences
BREAKS = 0.1  # nats; what a plateau that is broken falls by at least: some five times what its targets differ by
MOST = 0.5  # of a curve's roughness
WIDEST_SAID = 3  # of the targets at which seeds differ, in a sentence


def kinds(ds: xr.Dataset) -> list[Kind]:
    """All of a result."""
    names = ("layers", "width", "residual", "feed_forward")
    return [Kind(*of) for of in product(*(ds[name].values.tolist() for name in names))]


def of_kind(ds: xr.Dataset, kind: Kind) -> xr.Dataset:
    """One kind of model."""
    return at(ds, **kind._asdict())


def softmax(ds: xr.Dataset) -> bool:
    """Whether a result's models have softmax attention, as those of the source do, and all of earlier versions."""
    return json.loads(ds.attrs["settings"]).get("attention", "softmax") == "softmax"


def published(ds: xr.Dataset, kind: Kind) -> xr.DataArray:
    """The published curve [target]; lacks where there is none for this task."""
    of_size = {setting(ds, "vocabulary"), setting(ds, "context")} == {PUBLISHED_SIZE}
    need(kind in PUBLISHED, of_size, softmax(ds))
    targets = ds["target"].values
    return xr.DataArray([PUBLISHED[kind][k] for k in targets], {"target": targets}, "target")


def falling(ds: xr.Dataset) -> xr.DataArray:
    """Whether the loss of a model still falls."""
    found = ds["fall"] if "fall" in ds else ds["curve"].isel(step=0, drop=True).copy(data=fall(ds["curve"].values))
    return found > STILL


def tables(ds: xr.Dataset) -> list[Table]:
    """Losses by target; how far training got; published curves and what seeds say of single runs; roughness."""
    targets = [str(k) for k in ds["target"].values]
    rows, converged = [], []
    for kind in kinds(ds):
        one, names = of_kind(ds, kind), [str(kind.layers), str(kind.width), kind.variant]
        rows.append([*names, *(range_told(loss, ".2f") for loss in one["loss"].transpose("target", "seed"))])
        converged.append([*names, *_converged(one)])
    readers = [[reader, *(number(x, ".3f") for x in one.values)] for (reader,), one in places(ds["limit"], "reader")]
    head, by_target = ("layers", "width", "variant"), [f"k = {k}" for k in targets]
    found = [
        Table("Loss by target, nats: median over seeds (range)", (*head, *by_target), rows),
        Table(
            "Least loss of a reader who knows nothing, the bag of tokens, or it and the last token",
            ("reader", *by_target),
            readers,
        ),
        Table(
            f"Trained on, with more steps: models whose loss still fell by more than {STILL:g} nats in the last quarter",
            (
                *head,
                "trained on",
                "change of their loss, nats: median (range)",
                "longest, steps",
                "still falling, by target",
            ),
            converged,
        ),
    ]
    if len(targets) > 2 and softmax(ds):  # probes read no other attention
        columns = (*head, "profile of fresh weights", "nearness to the end", "profile, the last token left out")
        found.append(
            Table("What orders the targets: rank correlation of -loss over k, mean over seeds", columns, ordered(ds))
        )
    against = [_against(kind, one) for kind in PUBLISHED if (one := known(spread, ds, kind)) is not None]
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
    still = falling(ds)
    fallen = [f"{k}: {int(n)}" for (k,), n in places(still.sum("seed"), "target") if n]
    if "trained" not in ds:
        return ["-", "-", "-", ", ".join(fallen) or "-"]
    more = (ds["trained"] > setting(ds, "steps")).values
    change = (ds["loss"] - ds["loss_first"]).values[more]
    told = range_told(change, "+.2f") if change.size else "-"
    return [f"{more.sum()} of {more.size}", told, f"{int(ds['trained'].max()):,}", ", ".join(fallen) or "-"]


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


def claims(ds: xr.Dataset) -> list[Claim]:
    """Statements of [Liu-7] about its curves."""
    curves: list[dict[str, Any]] = []
    for kind, curve in PUBLISHED.items():
        *before, last = (f"{loss:.2f}" for loss in curve)
        told = f"{', '.join(before)} at k = 0 to 8" if len(set(before)) > 1 else f"{before[0]} at every k <= 8"
        parts = ["a residual stream"] * kind.residual + ["a feed-forward"] * kind.feed_forward
        these = f"{kind.layers} layer{'s' if kind.layers > 1 else ''} of width {kind.width}"
        these += f" with {' and '.join(parts)}" * bool(parts) + (" have" if kind.layers > 1 else " has")
        name = (
            f"depth-{kind.layers}-width-{kind.width}"
            + "-residual" * kind.residual
            + "-feed-forward" * kind.feed_forward
        )
        curves.append({"models": kind, "name": name, "these": these, "before": told, "last": last})
    found = judge(__name__, ds, lists={"curve": curves, "width": [{"width": width} for width in (2, 10)]})
    return found if softmax(ds) else [replace(claim, measured="-", verdict="not measured") for claim in found]


def one_layer_blind(ds: xr.Dataset) -> Judged:
    """Every one-layer model of the result, all widths and variants, seeds and steps aside."""
    k = _targets(ds, "before-last")
    here = at(ds, layers=1).sel(target=k)
    limit, loss = float(here["limit"].sel(reader="bag and last").max()), here["loss"].values.ravel()
    reach = NORMAL * here["loss_error"].values.ravel()
    measured = (
        f"least loss of {loss.size} models {loss.min():.2f}, "
        f"median {float(here['loss'].median()):.2f}; a reader blind to order gets {limit:.3f}"
    )
    found = (Interval(x, x - off, x + off) for x, off in zip(loss, reach, strict=True))
    return decided(measured, *(above(one, limit - AGREES) for one in found))


def as_published(ds: xr.Dataset, models: Kind, where: str) -> Judged:
    """The published numbers, at k <= 8 or at the last token."""
    chosen, read, loss = _targets(ds, where), published(ds, models), of_kind(ds, models)["loss"]
    ends = [(over_runs(loss.sel(target=k).values), float(read.sel(target=k))) for k in chosen]
    verdict = every([between(run, x - AGREES, x + AGREES) for run, x in ends])(SURE)
    # One target that is off refutes; agreement needs all of them.
    missing = where == "before-last" and chosen.size < PUBLISHED_SIZE - 1
    said = "; ".join(f"{int(k)}: {_over_seeds(loss.sel(target=k))}" for k in chosen)
    return Judged(said, "undecided" if verdict == "holds" and missing else verdict)


def beats_blind(ds: xr.Dataset, width: int) -> Judged:
    """Two layers know more of the first token than any single one can."""
    loss, limit = _loss(ds, 2, width, target=0), float(at(ds["limit"], reader="bag and last", target=0))
    measured = f"{_over_seeds(loss)}; no 1-layer model gets below {limit:.2f}"
    return decided(measured, below(over_runs(loss.values), limit))


def primacy(ds: xr.Dataset, width: int) -> Judged:
    """The first token is the easiest, and the loss grows with k."""
    k = _targets(ds, "before-last")
    need(k.size >= 3, 0 in k)
    loss = _loss(ds, 2, width, target=k).transpose("seed", "target")
    first, others = loss.sel(target=0), loss.sel(target=k[1:]).min("target")
    rho = np.array([spearman(k.astype(float), run) for run in loss.values])
    measured = (
        f"{_over_seeds(first)} at k = 0, least after it {_over_seeds(others)}, Spearman of loss and k "
        f"{over_told(rho, '.2f')} over {k.size} targets"
    )
    return decided(measured, each_above(others - first), above(over_runs(rho), 0))


def lost_in_the_middle(ds: xr.Dataset, layers: int, width: int) -> Judged:
    """Both ends are easier than any token between."""
    ends = _loss(ds, layers, width, target=[0, *_targets(ds, "last").tolist()])
    inner = _loss(ds, layers, width, target=_targets(ds, "between")).min("target")
    first, final = map(_over_seeds, ends.transpose("target", "seed"))
    measured = f"first {first}, last {final}, least between {_over_seeds(inner)}"
    return decided(measured, each_above(inner - ends))


def three_as_two(ds: xr.Dataset, width: int) -> Judged:
    """By equivalence, target by target."""
    two, three = (of_kind(ds, Kind(layers, width)) for layers in (2, 3))
    more, k = (three["loss"] - two["loss"]).transpose("target", "seed"), ds["target"].values
    verdict = every([nothing(one, AGREES) for one in over_each(more)])(SURE)
    still = int(falling(two).sum() + falling(three).sum())
    said = "; ".join(f"{n}: {_over_seeds(more.sel(target=n))}" for n in k)
    measured = f"{said} ({still} of {2 * more.size} models not converged)"
    return Judged(measured, "undecided" if verdict == "holds" and k.size < PUBLISHED_SIZE else verdict)


def breaks(ds: xr.Dataset, before: list[int], after: list[int]) -> Judged:
    """Whether the mean over the targets between first and last falls by more than `BREAKS`."""
    middle = _targets(ds, "between")
    one, other = (_loss(ds, 3, 10, *which, target=middle).mean("target") for which in (before, after))
    measured = f"mean over k = {middle[0]} to {middle[-1]}: {_over_seeds(one)} to {_over_seeds(other)}"
    return decided(measured, each_above(one - other, BREAKS))


def spiky(ds: xr.Dataset) -> Judged:
    """The curve over k is rougher with residual stream and feed-forward, in what seeds share."""
    plain, spiked = (roughness(_loss(ds, 3, 10, *which)).shared for which in ((0, 0), (1, 1)))
    measured = f"{over_told(plain, '.2f')} without, {over_told(spiked, '.2f')} with both"
    return decided(measured, above(between_runs(spiked, plain), 0))


def beyond_scatter(ds: xr.Dataset) -> Judged:
    """Most of a single run's roughness is shared by the other seeds."""
    rough = roughness(_loss(ds, 3, 10, 1, 1))
    measured = f"{over_told(rough.own, '.2f')} in a single run, of which {over_told(rough.shared, '.2f')} is shared"
    return decided(measured, above(over_runs(rough.shared - MOST * rough.own), 0))


def single_runs(ds: xr.Dataset) -> Judged:
    """What the spread of the seeds says of curves of one run per target."""
    found = {kind: one for kind in PUBLISHED if (one := known(spread, ds, kind)) is not None}
    need(found)
    said = ". ".join(_spread_told(kind, one) for kind, one in found.items())
    return Judged(said, all(float(one.ranges.max()) <= AGREES for one in found.values()))


def _spread_told(kind: Kind, one: Spread) -> str:
    """What the seeds' spread says about the published single runs, in words."""
    targets = one.ranges.size
    order = np.argsort(-one.ranges.values)[:WIDEST_SAID]
    wide = [int(one.ranges["target"][n]) for n in order if one.ranges.values[n] > AGREES]
    ends = [
        f"{k} ({float(one.loss.sel(target=k).min()):.2f} to {float(one.loss.sel(target=k).max()):.2f})" for k in wide
    ]
    differing = int((one.ranges > AGREES).sum())
    moved = f"differ by more than {AGREES:g} at {differing} of {targets} targets, most at k = {', '.join(ends)}"
    return (
        f"{kind}: the published value is within the range of {one.loss.sizes['seed']} seeds at "
        f"{one.inside} of {targets} targets; the seeds {moved if differing else f'agree within {AGREES:g} everywhere'}"
    ) + (f"; two single runs order neighbours as published in {one.ordered:.0%} of pairs" if one.steps.size else "")


def _loss(ds: xr.Dataset, *kind: int, **wanted: Any) -> xr.DataArray:
    return at(of_kind(ds, Kind(*kind))["loss"], **wanted)


def _targets(ds: xr.Dataset, part: str) -> np.ndarray:
    """The result's targets "before-last", rising, those "between" the first of them and the last position, or "last"."""
    k, last = np.sort(ds["target"].values), setting(ds, "context") - 1
    chosen = {"before-last": k[k < last], "between": k[k < last][1:], "last": k[k == last]}[part]
    need(chosen.size)
    return chosen


def _over_seeds(values: xr.DataArray) -> str:
    return over_told(values, ".2f")
