"""What a result of retrieval says: published curves and the variant nearest to each, tables and statements of [Liu-7]."""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xarray as xr

from probes.claims.claim import Claim, read_statements
from probes.claims.rules import SURE, above, below, between, every, nothing, range_told, told
from probes.results.curves import spearman
from probes.results.statistics import Interval, over_runs
from probes.results.tables import Table, number

from .retrieval import CURVE_POINTS, above_least
from .rules import NOT_THERE, Judged, Rule, by_parts, decided, each_above, has, judge, over_each, over_told, setting

STATEMENTS = read_statements(Path(__file__).with_name("retrieval.toml"))
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


def variants(ds: xr.Dataset) -> list[Variant]:
    """All of a result."""
    return [Variant(int(r), int(f)) for r, f in product(ds["residual"].values, ds["feed_forward"].values)]


def losses(ds: xr.Dataset, layers: int, width: int, variant: Variant) -> xr.DataArray | None:
    """`loss [seed, target]` of one kind of model; None where the result has none."""
    wanted = {"layers": layers, "width": width, **variant._asdict()}
    return ds["loss"].sel(wanted) if has(ds, **wanted) else None


def _of(ds: xr.Dataset, layers: int | list[int], width: int, variant: Variant) -> xr.Dataset:
    return ds.sel(layers=layers, width=width, **variant._asdict())


def published(ds: xr.Dataset, layers: int, width: int) -> xr.DataArray | None:
    """A published curve at the result's targets; None for a curve that was not, or a result of another task."""
    curve = PUBLISHED.get((layers, width))
    if curve is None or {setting(ds, "vocabulary"), setting(ds, "context")} != {PUBLISHED_SIZE}:
        return None
    targets = ds["target"].values
    return xr.DataArray([curve[k] for k in targets], dims="target", coords={"target": targets})


def nearest(ds: xr.Dataset, layers: int, width: int) -> Nearest | None:
    """Which variant a published curve is of, as far as it can be told; None where there is nothing to compare."""
    curve, found = published(ds, layers, width), []
    for variant in variants(ds):
        loss = losses(ds, layers, width, variant)
        if curve is not None and loss is not None:
            rms = float(np.sqrt(((loss.median("seed") - curve) ** 2).mean()))
            found.append(Nearest(variant, rms, loss, curve))
    return min(found, key=lambda one: one.rms) if found else None


def tables(ds: xr.Dataset) -> list[Table]:
    """Losses by target; how far training got; published curves, their nearest variant and what seeds say of single runs."""
    targets = [str(k) for k in ds["target"].values]
    rows, converged = [], []
    for layers, width, variant in product(ds["layers"].values, ds["width"].values, variants(ds)):
        loss = losses(ds, layers, width, variant)
        assert loss is not None
        cells = [range_told(one, ".2f") for one in loss.transpose("target", "seed")]
        rows.append([str(layers), str(width), str(variant), *cells])
        still = falling(_of(ds, layers, width, variant)["curve"])
        names = [f"{k}: {int(n)}" for k, n in zip(targets, still.sum("seed").values, strict=True) if n]
        converged.append(
            [str(layers), str(width), str(variant), f"{int(still.sum())} of {still.size}", ", ".join(names) or "-"]
        )
    readers = [[str(one.reader.values), *(number(x, ".3f") for x in one.values)] for one in ds["limit"]]
    columns = ("layers", "width", "variant", *(f"k = {k}" for k in targets))
    found = [
        Table("Loss by target, nats: median over seeds (range)", columns, rows),
        Table(
            "Least loss of a reader who knows nothing, the bag of tokens, or it and the last token",
            ("reader", *columns[3:]),
            readers,
        ),
        Table(
            f"Not converged: models whose loss still fell by more than {STILL:g} in the last quarter",
            ("layers", "width", "variant", "models", "by target"),
            converged,
        ),
    ]
    against = [row for key in PUBLISHED if (row := _against(ds, *key)) is not None]
    if against:
        found.append(
            Table(
                "Published curves, the variant nearest to each, and what its seeds say about single runs",
                (
                    "layers",
                    "width",
                    "nearest variant",
                    "rms of the medians",
                    f"medians within {AGREES:g}",
                    "published within the seeds' range",
                    "range of the seeds, median (largest)",
                    "published steps between neighbours, median",
                    "single runs that order neighbours as published",
                ),
                against,
            )
        )
    return found


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


def spread(ds: xr.Dataset, layers: int, width: int) -> Spread | None:
    """None where there is no published curve, or a single seed."""
    near = nearest(ds, layers, width)
    if near is None or near.loss.sizes["seed"] < 2:
        return None
    loss, curve = near.loss.transpose("seed", "target").values, near.published.values
    k = near.published["target"].values
    pairs = [n for n in np.argsort(k)[:-1] if k[n] + 1 in k and curve[n] != curve[list(k).index(k[n] + 1)]]
    steps, right = [], []
    for n in pairs:
        m = list(k).index(k[n] + 1)
        steps.append(curve[m] - curve[n])
        right.append(np.mean(np.sign(loss[:, None, m] - loss[None, :, n]) == np.sign(steps[-1])))
    low, high = loss.min(0) - AGREES, loss.max(0) + AGREES
    return Spread(
        near,
        int(np.sum(np.abs(np.median(loss, 0) - curve) <= AGREES)),
        int(np.sum((curve >= low) & (curve <= high))),
        near.loss.max("seed") - near.loss.min("seed"),
        np.array(steps),
        float(np.mean(right)) if right else math.nan,
    )


def _against(ds: xr.Dataset, layers: int, width: int) -> list[str] | None:
    found = spread(ds, layers, width)
    if found is None:
        return None
    near, targets = found.near, found.ranges.sizes["target"]
    at = int(found.ranges["target"][int(np.argmax(found.ranges.values))])
    return [
        str(layers),
        str(width),
        str(near.variant),
        number(near.rms, ".3f"),
        f"{found.agree} of {targets}",
        f"{found.inside} of {targets}",
        f"{number(found.ranges.median(), '.2f')} ({number(found.ranges.max(), '.2f')} at k = {at})",
        number(np.median(np.abs(found.steps)) if found.steps.size else math.nan, ".2f"),
        number(found.ordered, ".0%"),
    ]


def claims(ds: xr.Dataset) -> list[Claim]:
    """Statements of [Liu-7] about its curves, each for the variant nearest to the curve it is about."""
    rules: dict[str, Rule] = {"one-layer-blind": _blind}
    for layers, width in PUBLISHED:
        for where in ("before-last", "last"):
            rules[f"depth-{layers}-width-{width}-{where}"] = partial(_curve, layers=layers, width=width, where=where)
    for width in (2, 10):
        rules |= {
            f"two-layers-see-order-width-{width}": partial(_beats_blind, width=width),
            f"primacy-width-{width}": partial(_primacy, width=width),
            f"lost-in-the-middle-width-{width}": partial(_middle, width=width),
            f"three-layers-as-two-width-{width}": partial(_deeper, width=width),
        }
    without, with_stream, with_both = (Variant(*v) for v in ((0, 0), (1, 0), (1, 1)))
    rules |= {
        "residual-breaks-plateau": partial(_breaks, before=without, after=with_stream),
        "feed-forward-breaks-plateau": partial(_breaks, before=with_stream, after=with_both),
        "spiky": _spiky,
        "single-runs": _single_runs,
    }
    return judge(ds, STATEMENTS, {f"liu7-retrieval-{name}": rule for name, rule in rules.items()})


def _blind(ds: xr.Dataset) -> Judged:
    """Every one-layer model of the result, all widths and variants, seeds and steps aside."""
    if 1 not in ds["layers"].values or not _before_last(ds).size:
        return NOT_THERE
    here = ds.sel(layers=1, target=_before_last(ds))
    limit = float(here["limit"].sel(reader="bag and last").max())
    reach = NORMAL * here["loss_error"].values
    found = [Interval(x, x - off, x + off) for x, off in zip(here["loss"].values.ravel(), reach.ravel(), strict=True)]
    measured = (
        f"least loss of {here['loss'].size} models {float(here['loss'].min()):.2f}, "
        f"median {float(here['loss'].median()):.2f}; a reader blind to order gets {limit:.3f}"
    )
    return decided(measured, *(above(one, limit - AGREES) for one in found))


def _curve(ds: xr.Dataset, *, layers: int, width: int, where: str) -> Judged:
    """The published numbers, at k <= 8 or at the last token."""
    near, chosen = nearest(ds, layers, width), _before_last(ds) if where == "before-last" else _last(ds)
    if near is None or not chosen.size:
        return NOT_THERE
    loss, curve = near.loss.sel(target=chosen), near.published.sel(target=chosen)
    ends = [(over_runs(loss.sel(target=k).values), float(curve.sel(target=k))) for k in chosen]
    verdict = every([between(run, x - AGREES, x + AGREES) for run, x in ends])(SURE)
    # One target that is off refutes; agreement needs all of them.
    missing = where == "before-last" and chosen.size < PUBLISHED_SIZE - 1
    said = "; ".join(f"{int(k)}: {_over_seeds(loss.sel(target=k))}" for k in chosen)
    return Judged(f"{said} ({near.variant})", "undecided" if verdict == "holds" and missing else verdict)


def _beats_blind(ds: xr.Dataset, *, width: int) -> Judged:
    near = nearest(ds, 2, width)
    if near is None or 0 not in ds["target"].values:
        return NOT_THERE
    loss, limit = near.loss.sel(target=0), float(ds["limit"].sel(reader="bag and last", target=0))
    measured = f"{_over_seeds(loss)}; no 1-layer model gets below {limit:.2f} ({near.variant})"
    return decided(measured, below(over_runs(loss.values), limit))


def _primacy(ds: xr.Dataset, *, width: int) -> Judged:
    near, k = nearest(ds, 2, width), _before_last(ds)
    if near is None or k.size < 3 or 0 not in k:
        return NOT_THERE
        return said.judged()
    loss = near.loss.sel(target=k).transpose("seed", "target")
    others = loss.sel(target=k[1:]).min("target")
    rho = np.array([spearman(k.astype(float), run) for run in loss.values])
    measured = (
        f"{_over_seeds(loss.sel(target=0))} at k = 0, least after it {_over_seeds(others)}, Spearman of loss and k "
        f"{over_told(rho, '.2f')} over {k.size} targets ({near.variant})"
    )
    return decided(measured, each_above(others - loss.sel(target=0)), above(over_runs(rho), 0))


def _middle(ds: xr.Dataset, *, width: int) -> Judged:
    near, last, middle = nearest(ds, 2, width), _last(ds), _before_last(ds)[1:]
    if near is None or not last.size or not middle.size or 0 not in ds["target"].values:
        return NOT_THERE
        return said.judged()
    ends = near.loss.sel(target=[0, int(last[0])])
    between_them = near.loss.sel(target=middle).min("target")
    first, final = (_over_seeds(ends.isel(target=n)) for n in (0, 1))
    measured = f"first {first}, last {final}, least between {_over_seeds(between_them)} ({near.variant})"
    return decided(measured, each_above(between_them - ends))


def _deeper(ds: xr.Dataset, *, width: int) -> Judged:
    """By equivalence, target by target."""
    near = nearest(ds, 2, width)
    deep = None if near is None else losses(ds, 3, width, near.variant)
    if near is None or deep is None:
        return NOT_THERE
    more, k = (deep - near.loss).transpose("target", "seed"), ds["target"].values
    still = falling(_of(ds, [2, 3], width, near.variant)["curve"])
    verdict = every([nothing(one, AGREES) for one in over_each(more)])(SURE)
    measured = (
        f"{'; '.join(f'{n}: {_over_seeds(more.sel(target=n))}' for n in k)} ({near.variant}; {int(still.sum())} of "
        f"{still.size} models not converged)"
    )
    return Judged(measured, "undecided" if verdict == "holds" and k.size < PUBLISHED_SIZE else verdict)


def _spiky(ds: xr.Dataset) -> Judged:
    found = []
    for layers, width in PUBLISHED:
        if (near := nearest(ds, layers, width)) is None:
            continue
        here = _of(ds, layers, width, near.variant)
        in_means = here["curve"].copy(data=above_least(here["curve"].values)).mean("step")
        share = over_runs(here.get("spiky", in_means).mean("target").values)
        said = f"{_named(layers, width)}: {told(share, '.2%')} of the training ({near.variant})"
        found.append((said, above(share, 0)))
    judged = by_parts(found)
    if "spiky" in ds or not found:
        return judged
    # Means over many steps hide spikes.
    verdict = "undecided" if judged.verdict == "does not hold" else judged.verdict
    return Judged(f"{judged.measured}; in means over {int(ds['step'][0])} steps", verdict)


def _breaks(ds: xr.Dataset, *, before: Variant, after: Variant) -> Judged:
    """Whether the mean over the targets between first and last falls by more than `BREAKS`."""
    middle = _before_last(ds)[1:]
    pair = [loss for variant in (before, after) if (loss := losses(ds, 3, 10, variant)) is not None]
    if len(pair) < 2 or not middle.size:
        return NOT_THERE
    one, other = (loss.sel(target=middle).mean("target") for loss in pair)
    measured = f"mean over k = {middle[0]} to {middle[-1]}: {_over_seeds(one)} to {_over_seeds(other)}"
    return decided(measured, each_above(one - other, BREAKS))


def _single_runs(ds: xr.Dataset) -> Judged:
    """What the spread of the seeds says of curves of one run per target."""
    found = [one for key in PUBLISHED if (one := spread(ds, *key)) is not None]
    agree = all(float(one.ranges.max()) <= AGREES for one in found)
    return Judged(spread_sentence(ds), agree) if found else NOT_THERE


def spread_sentence(ds: xr.Dataset) -> str:
    """What the seeds' spread says about the published single runs, in words; empty without published curves or seeds."""
    said = []
    for (layers, width), one in ((key, spread(ds, *key)) for key in PUBLISHED):
        if one is None:
            continue
        loss, targets = one.near.loss, one.ranges.sizes["target"]
        order = np.argsort(-one.ranges.values)[:WIDEST_SAID]
        wide = [int(one.ranges["target"][n]) for n in order if one.ranges.values[n] > AGREES]
        ends = [f"{k} ({float(loss.sel(target=k).min()):.2f} to {float(loss.sel(target=k).max()):.2f})" for k in wide]
        differing = int((one.ranges > AGREES).sum())
        moved = f"differ by more than {AGREES:g} at {differing} of {targets} targets, most at k = {', '.join(ends)}"
        said.append(
            f"{_named(layers, width)} ({one.near.variant}): the published value is within "
            f"the range of {loss.sizes['seed']} seeds at {one.inside} of {targets} targets; the seeds "
            + (moved if differing else f"agree within {AGREES:g} everywhere")
            + (
                f"; two single runs order neighbours as published in {one.ordered:.0%} of pairs"
                if one.steps.size
                else ""
            )
        )
    return ". ".join(said)


def _named(layers: int, width: int) -> str:
    return f"{layers} layer{'s' if layers > 1 else ''}, width {width}"


def _before_last(ds: xr.Dataset) -> np.ndarray:
    """The result's targets before the last position, rising."""
    k = np.sort(ds["target"].values)
    return k[k < setting(ds, "context") - 1]


def _last(ds: xr.Dataset) -> np.ndarray:
    k = ds["target"].values
    return k[k == setting(ds, "context") - 1]


def _over_seeds(values: xr.DataArray) -> str:
    return over_told(values, ".2f")
