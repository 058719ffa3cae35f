"""What a result of retrieval says: published curves and the variant nearest to each, tables and statements of [Liu-7]."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from probes.claims.claim import Claim
from probes.claims.rules import SURE, above, below, between, every, nothing, range_told, told
from probes.results.curves import spearman
from probes.results.statistics import Interval, over_runs
from probes.results.tables import Table, interval, number

from .retrieval import CURVE_POINTS, above_least, architecture, fresh_profile
from .retrieval import SMOOTH as SMOOTH
from .retrieval import SPIKE as SPIKE
from .rules import Judged, at, by_parts, decided, each_above, judge, known, need, over_each, over_told, places, setting

# Read off [Liu-7]'s figures (no statement there of residuals, feed-forward or optimizer): loss by target, ten of ten tokens.
PUBLISHED: dict[tuple[int, int], tuple[float, ...]] = {  # by (layers, width)
    (1, 2): (2.19, 2.19, 2.19, 2.19, 2.19, 2.19, 2.19, 2.19, 2.19, 0.00),
    (2, 2): (1.13, 2.06, 2.15, 2.18, 2.19, 2.19, 2.19, 2.19, 2.19, 0.00),
    (2, 10): (0.00, 1.65, 1.88, 1.97, 1.95, 1.95, 1.98, 2.00, 1.96, 0.00),
}
PUBLISHED_SIZE = 10  # its vocabulary and its context

AGREES = 0.05  # nats; so near counts as the published value, for the same reason
NORMAL = 1.96  # standard errors to either end of a 95 % interval over sequences
BREAKS = 0.1  # nats; what a plateau that is broken falls by at least: some five times what its targets differ by
WIDEST_SAID = 3  # of the targets at which seeds differ, in a sentence
STILL = 0.05  # nats; what a loss that has converged does not fall by in the last quarter of the training


class Variant(NamedTuple):
    """A stream's structure, which [Liu-7] does not state."""

    residual: int
    feed_forward: int

    def __str__(self) -> str:
        return f"{'residual' if self.residual else 'no residual'}, {'' if self.feed_forward else 'no '}feed-forward"


class Nearest(NamedTuple):
    """The variant whose medians over seeds are nearest to a published curve, by the root mean square over targets."""

    variant: Variant
    rms: float  # nats
    loss: xr.DataArray  # [seed, target]
    published: xr.DataArray  # [target]


def softmax(ds: xr.Dataset) -> bool:
    """Whether a result's models have softmax attention, as those of the source do, and all of earlier versions."""
    return json.loads(ds.attrs["settings"]).get("attention", "softmax") == "softmax"


def variants(ds: xr.Dataset) -> list[Variant]:
    """All of a result."""
    return [
        Variant(*switches) for switches in product(ds["residual"].values.tolist(), ds["feed_forward"].values.tolist())
    ]


def of_kind(ds: xr.Dataset, layers: int, width: int, variant: Variant) -> xr.Dataset:
    """One kind of model."""
    return at(ds, layers=layers, width=width, **variant._asdict())


def nearest(ds: xr.Dataset, layers: int, width: int) -> Nearest:
    """Which variant a published curve is of, as far as it can be told; lacks where there is nothing to compare."""
    of_size = {setting(ds, "vocabulary"), setting(ds, "context")} == {PUBLISHED_SIZE}
    need((layers, width) in PUBLISHED, of_size, softmax(ds))
    targets = ds["target"].values
    curve = xr.DataArray([PUBLISHED[layers, width][k] for k in targets], {"target": targets}, "target")
    found = []
    for variant in variants(ds):
        loss = of_kind(ds, layers, width, variant)["loss"]
        rms = float(np.sqrt(((loss.median("seed") - curve) ** 2).mean()))
        found.append(Nearest(variant, rms, loss, curve))
    return min(found, key=lambda one: one.rms)


def tables(ds: xr.Dataset) -> list[Table]:
    """Losses by target; how far training got; published curves, their nearest variant and what seeds say of single runs."""
    targets = [str(k) for k in ds["target"].values]
    rows, converged = [], []
    for layers, width, variant in product(ds["layers"].values, ds["width"].values, variants(ds)):
        one, names = of_kind(ds, layers, width, variant), [str(layers), str(width), str(variant)]
        rows.append([*names, *(range_told(loss, ".2f") for loss in one["loss"].transpose("target", "seed"))])
        still = falling(one["curve"])
        where = [f"{k}: {int(n)}" for k, n in zip(targets, still.sum("seed").values, strict=True) if n]
        converged.append([*names, f"{int(still.sum())} of {still.size}", ", ".join(where) or "-"])
    readers = [[reader, *(number(x, ".3f") for x in one.values)] for (reader,), one in places(ds["limit"], "reader")]
    kind, by_target = ("layers", "width", "variant"), [f"k = {k}" for k in targets]
    found = [
        Table("Loss by target, nats: median over seeds (range)", (*kind, *by_target), rows),
        Table(
            "Least loss of a reader who knows nothing, the bag of tokens, or it and the last token",
            ("reader", *by_target),
            readers,
        ),
        Table(
            f"Not converged: models whose loss still fell by more than {STILL:g} in the last quarter",
            (*kind, "models", "by target"),
            converged,
        ),
    ]
    if len(targets) > 2:
        columns = (*kind, "profile of fresh weights", "nearness to the end", "profile, the last token left out")
        found.append(
            Table("What orders the targets: rank correlation of -loss over k, mean over seeds", columns, ordered(ds))
        )
    against = [_against(key, one) for key in PUBLISHED if (one := known(spread, ds, *key)) is not None]
    if against:
        columns = (
            *("layers", "width", "nearest variant", "rms of the medians", f"medians within {AGREES:g}"),
            *("published within the seeds' range", "range of the seeds, median (largest)"),
            *("published steps between neighbours, median", "single runs that order neighbours as published"),
        )
        title = "Published curves, the variant nearest to each, and what its seeds say about single runs"
        found.append(Table(title, columns, against))
    return found


def ordered(ds: xr.Dataset) -> list[list[str]]:
    """What the loss by target follows in every kind of model, and in all of two layers or more; intervals over seeds.

    The profile is that of the weights that the seed's models were trained from.
    """
    sizes, targets, rows, deep = [setting(ds, name) for name in ("vocabulary", "context")], ds["target"].values, [], []
    for layers, width, variant in product(ds["layers"].values.tolist(), ds["width"].values.tolist(), variants(ds)):
        kind = architecture(layers, width, *map(bool, variant), *sizes)
        by_seed = []
        for seed, loss in zip(
            ds["seed"].values.tolist(), of_kind(ds, layers, width, variant)["loss"].values, strict=True
        ):
            profile, inner = fresh_profile(kind, seed)[targets], targets < sizes[1] - 1
            pairs = (profile, -loss), (targets, -loss), (profile[inner], -loss[inner])
            by_seed.append([spearman(*pair) for pair in pairs])
        deep += [by_seed] * (layers > 1)
        rows.append([str(layers), str(width), str(variant), *map(_over_seeds_of, zip(*by_seed, strict=True))])
    if deep:
        every = np.mean(deep, axis=0)
        rows.append(["2 or more", "all", "all", *map(_over_seeds_of, every.T)])
    return rows


def _over_seeds_of(values: Any) -> str:
    return interval(*over_runs(values)[:3], form=".2f")


def falling(curve: xr.DataArray) -> xr.DataArray:
    """[...] of training curves [..., step]: whether the loss still fell by more than `STILL` in the last quarter."""
    return curve.isel(step=-1 - CURVE_POINTS // 4) - curve.isel(step=-1) > STILL


class Spread(NamedTuple):
    """What the seeds of the nearest variant say of a published curve's single runs."""

    near: Nearest
    agree: int  # targets at which the median is within AGREES of the published value
    inside: int  # targets at which the published value is within the range of the seeds, give or take AGREES
    ranges: xr.DataArray  # [target]; largest minus smallest of the seeds
    steps: np.ndarray  # published differences between neighbouring targets that are not zero
    ordered: float  # share of pairs of single runs at those neighbours that have the published order


def spread(ds: xr.Dataset, layers: int, width: int) -> Spread:
    """Lacks where there is no published curve, or a single seed."""
    near = nearest(ds, layers, width)
    need(near.loss.sizes["seed"] > 1)
    loss, curve = near.loss.transpose("seed", "target").values, near.published.values
    k = near.published["target"].values
    steps, right = [], []
    for n, m in pairwise(np.argsort(k)):
        if k[m] == k[n] + 1 and curve[m] != curve[n]:
            steps.append(curve[m] - curve[n])
            right.append(np.mean(np.sign(loss[:, None, m] - loss[None, :, n]) == np.sign(steps[-1])))
    return Spread(
        near,
        int(np.sum(np.abs(np.median(loss, 0) - curve) <= AGREES)),
        int(np.sum((curve >= loss.min(0) - AGREES) & (curve <= loss.max(0) + AGREES))),
        near.loss.max("seed") - near.loss.min("seed"),
        np.array(steps),
        float(np.mean(right)) if right else math.nan,
    )


def _against(key: tuple[int, int], found: Spread) -> list[str]:
    near, ranges = found.near, found.ranges
    return [
        *map(str, (*key, near.variant)),
        number(near.rms, ".3f"),
        f"{found.agree} of {ranges.size}",
        f"{found.inside} of {ranges.size}",
        f"{number(ranges.median(), '.2f')} ({number(ranges.max(), '.2f')} at k = {int(ranges.idxmax())})",
        number(np.median(np.abs(found.steps)) if found.steps.size else math.nan, ".2f"),
        number(found.ordered, ".0%"),
    ]


def claims(ds: xr.Dataset) -> list[Claim]:
    """Statements of [Liu-7] about its curves, each for the variant nearest to the curve it is about."""
    curves: list[dict[str, Any]] = []
    for (layers, width), curve in PUBLISHED.items():
        *before, last = (f"{loss:.2f}" for loss in curve)
        told = f"{', '.join(before)} at k = 0 to 8" if len(set(before)) > 1 else f"{before[0]} at every k <= 8"
        these = f"{layers} layer{'s' if layers > 1 else ''} of width {width} {'have' if layers > 1 else 'has'}"
        curves.append({"layers": layers, "width": width, "these": these, "before": told, "last": last})
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


def as_published(ds: xr.Dataset, layers: int, width: int, where: str) -> Judged:
    """The published numbers, at k <= 8 or at the last token."""
    chosen, near = _targets(ds, where), nearest(ds, layers, width)
    ends = [(over_runs(near.loss.sel(target=k).values), float(near.published.sel(target=k))) for k in chosen]
    verdict = every([between(run, x - AGREES, x + AGREES) for run, x in ends])(SURE)
    # One target that is off refutes; agreement needs all of them.
    missing = where == "before-last" and chosen.size < PUBLISHED_SIZE - 1
    said = "; ".join(f"{int(k)}: {_over_seeds(near.loss.sel(target=k))}" for k in chosen)
    return Judged(f"{said} ({near.variant})", "undecided" if verdict == "holds" and missing else verdict)


def beats_blind(ds: xr.Dataset, width: int) -> Judged:
    """Two layers know more of the first token than any single one can."""
    near = nearest(ds, 2, width)
    loss, limit = at(near.loss, target=0), float(at(ds["limit"], reader="bag and last", target=0))
    measured = f"{_over_seeds(loss)}; no 1-layer model gets below {limit:.2f} ({near.variant})"
    return decided(measured, below(over_runs(loss.values), limit))


def primacy(ds: xr.Dataset, width: int) -> Judged:
    """The first token is the easiest, and the loss grows with k."""
    near, k = nearest(ds, 2, width), _targets(ds, "before-last")
    need(k.size >= 3, 0 in k)
    loss = near.loss.sel(target=k).transpose("seed", "target")
    first, others = loss.sel(target=0), loss.sel(target=k[1:]).min("target")
    rho = np.array([spearman(k.astype(float), run) for run in loss.values])
    measured = (
        f"{_over_seeds(first)} at k = 0, least after it {_over_seeds(others)}, Spearman of loss and k "
        f"{over_told(rho, '.2f')} over {k.size} targets ({near.variant})"
    )
    return decided(measured, each_above(others - first), above(over_runs(rho), 0))


def lost_in_the_middle(ds: xr.Dataset, width: int) -> Judged:
    """Both ends are easier than any token between."""
    near = nearest(ds, 2, width)
    ends = at(near.loss, target=[0, *_targets(ds, "last").tolist()])
    inner = near.loss.sel(target=_targets(ds, "between")).min("target")
    first, final = map(_over_seeds, ends.transpose("target", "seed"))
    measured = f"first {first}, last {final}, least between {_over_seeds(inner)} ({near.variant})"
    return decided(measured, each_above(inner - ends))


def three_as_two(ds: xr.Dataset, width: int) -> Judged:
    """By equivalence, target by target."""
    near, k = nearest(ds, 2, width), ds["target"].values
    more = (of_kind(ds, 3, width, near.variant)["loss"] - near.loss).transpose("target", "seed")
    still = falling(ds.sel(layers=[2, 3], width=width, **near.variant._asdict())["curve"])
    verdict = every([nothing(one, AGREES) for one in over_each(more)])(SURE)
    measured = (
        f"{'; '.join(f'{n}: {_over_seeds(more.sel(target=n))}' for n in k)} ({near.variant}; {int(still.sum())} of "
        f"{still.size} models not converged)"
    )
    return Judged(measured, "undecided" if verdict == "holds" and k.size < PUBLISHED_SIZE else verdict)


def spiky(ds: xr.Dataset) -> Judged:
    """Spikes at every published size, in the steps' own means where the result has them."""
    found = []
    for key in PUBLISHED:
        if (near := known(nearest, ds, *key)) is not None:
            here = of_kind(ds, *key, near.variant)
            in_means = here["curve"].copy(data=above_least(here["curve"].values)).mean("step")
            share = over_runs(here.get("spiky", in_means).mean("target").values)
            said = f"{_named(*key)}: {told(share, '.2%')} of the training ({near.variant})"
            found.append((said, above(share, 0)))
    judged = by_parts(found)
    if "spiky" in ds:
        return judged
    # Means over many steps hide spikes.
    verdict = "undecided" if judged.verdict == "does not hold" else judged.verdict
    return Judged(f"{judged.measured}; in means over {int(ds['step'][0])} steps", verdict)


def breaks(ds: xr.Dataset, before: list[int], after: list[int]) -> Judged:
    """Whether the mean over the targets between first and last falls by more than `BREAKS`."""
    middle = _targets(ds, "between")
    pair = [of_kind(ds, 3, 10, Variant(*which))["loss"] for which in (before, after)]
    one, other = (loss.sel(target=middle).mean("target") for loss in pair)
    measured = f"mean over k = {middle[0]} to {middle[-1]}: {_over_seeds(one)} to {_over_seeds(other)}"
    return decided(measured, each_above(one - other, BREAKS))


def single_runs(ds: xr.Dataset) -> Judged:
    """What the spread of the seeds says of curves of one run per target."""
    found = {key: one for key in PUBLISHED if (one := known(spread, ds, *key)) is not None}
    need(found)
    said = ". ".join(_spread_told(key, one) for key, one in found.items())
    return Judged(said, all(float(one.ranges.max()) <= AGREES for one in found.values()))


def _spread_told(key: tuple[int, int], one: Spread) -> str:
    """What the seeds' spread says about the published single runs, in words."""
    loss, targets = one.near.loss, one.ranges.size
    order = np.argsort(-one.ranges.values)[:WIDEST_SAID]
    wide = [int(one.ranges["target"][n]) for n in order if one.ranges.values[n] > AGREES]
    ends = [f"{k} ({float(loss.sel(target=k).min()):.2f} to {float(loss.sel(target=k).max()):.2f})" for k in wide]
    differing = int((one.ranges > AGREES).sum())
    moved = f"differ by more than {AGREES:g} at {differing} of {targets} targets, most at k = {', '.join(ends)}"
    return (
        f"{_named(*key)} ({one.near.variant}): the published value is within the range of {loss.sizes['seed']} seeds at "
        f"{one.inside} of {targets} targets; the seeds {moved if differing else f'agree within {AGREES:g} everywhere'}"
    ) + (f"; two single runs order neighbours as published in {one.ordered:.0%} of pairs" if one.steps.size else "")


def _named(layers: int, width: int) -> str:
    return f"{layers} layer{'s' if layers > 1 else ''}, width {width}"


def _targets(ds: xr.Dataset, part: str) -> np.ndarray:
    """The result's targets "before-last", rising, those "between" the first of them and the last position, or "last"."""
    k, last = np.sort(ds["target"].values), setting(ds, "context") - 1
    chosen = {"before-last": k[k < last], "between": k[k < last][1:], "last": k[k == last]}[part]
    need(chosen.size)
    return chosen


def _over_seeds(values: xr.DataArray) -> str:
    return over_told(values, ".2f")
