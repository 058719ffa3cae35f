"""Loss of retrieving the token at one position, against that position [Liu-7].

Ten random tokens, and a model of its own for each position k that is trained to predict the k-th of them behind the last
one; no positional encoding, one causal head. What a model cannot know shows as a loss that stays up: the post's curves are
single runs, here each point has several seeds. Settings that the post does not give (residual stream, feed-forward,
optimizer) are dimensions, or have a value whose choice is written beside it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import NamedTuple, cast

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch.nn import functional

from probes.claims.claim import Claim, Statement
from probes.claims.rules import SURE, above, below, between, every, nothing, range_told, told
from probes.errors import InputError
from probes.results.curves import spearman
from probes.results.dataset import dataset
from probes.results.statistics import Interval, over_runs
from probes.results.tables import Table, number

from ..model import Architecture
from ..tasks import Copying
from ..train import Run, Schedule, Trained, logits
from .experiment import Work
from .rules import each_above, over_each, over_told

CURVE_POINTS = 20  # of a training curve: means over so many equal parts of the training
SMOOTH = 50  # steps; spikes are looked for in means over so many
TEST_SEED = 2**32  # of the fresh sequences; runs have smaller ones
TEST_CHUNK = 2048  # sequences evaluated at a time

# Read off [Liu-7]'s figures (no statement there of residuals, feed-forward or optimizer): loss by target, ten of ten tokens.
PUBLISHED: dict[tuple[int, int], tuple[float, ...]] = {  # by (layers, width)
    (1, 2): (2.19, 2.19, 2.19, 2.19, 2.19, 2.19, 2.19, 2.19, 2.19, 0.00),
    (2, 2): (1.13, 2.06, 2.15, 2.18, 2.19, 2.19, 2.19, 2.19, 2.19, 0.00),
    (2, 10): (0.00, 1.65, 1.88, 1.97, 1.95, 1.95, 1.98, 2.00, 1.96, 0.00),
}
PUBLISHED_SIZE = 10  # its vocabulary and its context

SOURCE = "[Liu-7]"
RETRIEVED = 0.05  # nats; a loss below it counts as 0.00, which is what can be told from a figure's axis up to 2.3
AGREES = 0.05  # nats; so near counts as the published value, for the same reason
NORMAL = 1.96  # standard errors to either end of a 95 % interval over sequences
BREAKS = 0.1  # nats; what a plateau that is broken falls by at least: some five times what its targets differ by
WIDEST_SAID = 3  # of the targets at which seeds differ, in a sentence
SPIKE = 0.1  # nats; a loss so far above its least is a spike: ten times the deviation of a mean over `SMOOTH` steps
STILL = 0.05  # nats; what a loss that has converged does not fall by in the last quarter of the training


@dataclass(frozen=True)
class Settings:
    """The published setting: ten tokens of ten, depths 1 to 3, widths 2 and 10.

    "Trained to convergence", says the post, and neither optimizer nor steps: Adam here, batch 128, a rate that falls along
    half a cosine. Five seeds stand where the post has one run.
    """

    layers: tuple[int, ...] = (1, 2, 3)
    width: tuple[int, ...] = (2, 10)
    residual: tuple[bool, ...] = (False, True)
    feed_forward: tuple[bool, ...] = (False, True)
    seeds: int = 5
    target: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
    vocabulary: int = 10
    context: int = 10
    steps: int = 5000
    learning_rate: float = 1e-2
    schedule: str = "cosine"
    batch: int = 128
    sequences: int = 16_384  # fresh ones for the final loss; its standard error is then 0.006 nats at most

    def __post_init__(self) -> None:
        for name in ("layers", "width", "residual", "feed_forward", "target"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise InputError(f"{name}={','.join(map(str, values)) or 'nothing'}; give one or more different values")
        for name, least in (("seeds", 1), ("steps", CURVE_POINTS), ("sequences", 1), ("batch", 1)):
            if getattr(self, name) < least:
                raise InputError(f"{name}={getattr(self, name)} is too few; give at least {least}")
        for name, least in (("vocabulary", 2), ("context", 2)):
            if getattr(self, name) < least:
                raise InputError(f"{name}={getattr(self, name)} leaves nothing to retrieve; give at least {least}")
        beyond = [k for k in self.target if not 0 <= k < self.context]
        if beyond:
            raise InputError(f"target {beyond[0]} is no position of {self.context}; give from 0 to {self.context - 1}")
        self.runs()  # architectures, rates and schedules refuse what cannot be

    def runs(self) -> list[Run]:
        """All models, in the order of `loss`'s dimensions."""
        return [
            Run(
                Architecture(
                    blocks=layers,
                    width=width,
                    length=self.context,
                    vocabulary=self.vocabulary,
                    outputs=self.vocabulary,
                    residual=residual,
                    feed_forward=feed_forward,
                ),
                Copying(self.vocabulary, self.context, target, self.batch),
                seed=seed,
                learning_rate=self.learning_rate,
                schedule=cast(Schedule, self.schedule),
            )
            for layers, width, residual, feed_forward, seed, target in product(
                self.layers, self.width, self.residual, self.feed_forward, range(self.seeds), self.target
            )
        ]


QUICK = Settings(
    layers=(1, 2), residual=(False,), feed_forward=(False,), seeds=2, target=(0, 1, 4, 8, 9), steps=1500, sequences=4096
)


def measure(settings: Settings, work: Work) -> xr.Dataset:
    """Train every model of the grid and give its loss on fresh sequences.

    Returns:
        `loss [layers, width, residual, feed_forward, seed, target]` and `loss_error` alike, in nats: mean over the same
        fresh sequences for all models, and its standard error; `curve [..., target, step]`: training loss, mean over the
        steps up to `step` from the one before; `spiky [..., target]`: share of the training, in means over `SMOOTH` steps,
        that is `above_least`; `limit [reader, target]`: what no reader of that kind gets below (`limits`).
    """
    runs = settings.runs()
    trained = work.train("retrieval", runs, settings.steps)
    dims = ("layers", "width", "residual", "feed_forward", "seed", "target")
    shape = tuple(len(getattr(settings, d)) if d != "seed" else settings.seeds for d in dims)
    losses, errors = evaluate(trained, settings, work)
    ends = np.linspace(0, settings.steps, CURVE_POINTS + 1).round().astype(int)
    parts = [torch.stack([model.losses[start:end].mean() for model in trained]) for start, end in pairwise(ends)]
    smooth = [model.losses.unfold(0, min(SMOOTH, settings.steps), 1).mean(-1).numpy() for model in trained]
    readers = limits(settings.vocabulary, settings.context)
    return dataset(
        {
            "loss": (dims, losses.reshape(shape), {"long_name": "loss on fresh sequences", "units": "nat"}),
            "loss_error": (dims, errors.reshape(shape), {"long_name": "standard error of the loss", "units": "nat"}),
            "curve": (
                (*dims, "step"),
                torch.stack(parts, -1).reshape(*shape, CURVE_POINTS),
                {"long_name": "training loss, mean over the steps up to this one", "units": "nat"},
            ),
            "spiky": (
                dims,
                np.reshape([above_least(one).mean() for one in smooth], shape).astype(np.float32),
                {"long_name": f"share of training {SPIKE:g} nats above the least loss so far", "units": "1"},
            ),
            "limit": (
                ("reader", "target"),
                np.array([[found[k] for k in settings.target] for found in readers.values()]),
                {"long_name": "least loss of a reader of this kind", "units": "nat"},
            ),
        },
        coords={
            "layers": list(settings.layers),
            "width": list(settings.width),
            "residual": np.array(settings.residual, dtype=np.int8),
            "feed_forward": np.array(settings.feed_forward, dtype=np.int8),
            "seed": np.arange(settings.seeds),
            "target": list(settings.target),
            "step": ends[1:],
            "reader": list(readers),
        },
        attrs={"task": "the token at position target, of uniform random ones", "positional": "none", "mask": "causal"},
    )


def above_least(curve: Float[np.ndarray, "*model step"]) -> Bool[np.ndarray, "*model step"]:
    """Where a loss, nats, is more than `SPIKE` above its least so far."""
    return curve > np.minimum.accumulate(curve, -1) + SPIKE


def evaluate(trained: Sequence[Trained], settings: Settings, work: Work) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, its standard error) of every model on the same fresh sequences, in nats."""
    task = Copying(settings.vocabulary, settings.context, batch=settings.sequences)
    inputs = task.draw(None, torch.Generator().manual_seed(TEST_SEED), 1).inputs[0]
    by_shape: dict[Architecture, list[int]] = {}
    for i, model in enumerate(trained):
        by_shape.setdefault(model.run.architecture.shape, []).append(i)
    losses, errors, done = torch.empty(len(trained)), torch.empty(len(trained)), 0
    for members in by_shape.values():
        models = [trained[i] for i in members]
        where = torch.tensor([settings.target[i % len(settings.target)] for i in members])
        found = []
        for some in inputs.split(TEST_CHUNK):
            out = logits(models, some).flatten(0, 1)
            answers = some.T[where].flatten()
            found.append(functional.cross_entropy(out, answers, reduction="none").view(len(members), -1))
        each = torch.cat(found, 1).double()
        losses[members] = each.mean(1).float()
        errors[members] = (each.std(1, correction=0) / math.sqrt(each.shape[1])).float()
        done += len(members)
        work.advance("fresh sequences", float(done), float(len(trained)))
    return losses, errors


def limits(vocabulary: int, context: int) -> dict[str, list[float]]:
    """Least losses in nats by target, of readers who know the sequence but for something.

    "nothing": has not seen it, `ln V`. "bag of all": sees which tokens there are and how often, not where, as uniform
    attention does that cannot tell the last token apart. "bag and last": the same of the tokens before the last one, and
    that one apart; one causal layer without positional encoding knows no more, of whatever width. A token that stands
    `count` times among n has probability count / n, so that the loss is `E log(n / count)`, with `count - 1` binomial
    (n - 1, 1/V).
    """
    others = bag(vocabulary, context - 1)
    return {
        "nothing": [math.log(vocabulary)] * context,
        "bag of all": [bag(vocabulary, context)] * context,
        "bag and last": [others] * (context - 1) + [0.0],
    }


def bag(vocabulary: int, n: int) -> float:
    """`E log(n / count)`, nats: what is unknown of one of n uniform tokens to whom knows them all but not their order."""
    p = 1 / vocabulary
    terms = (math.comb(n - 1, c) * p**c * (1 - p) ** (n - 1 - c) * math.log(n / (1 + c)) for c in range(n))
    return math.fsum(terms)


# ------------------------------------------------------------------------------------------------ what results say


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
    wanted = {"layers": layers, "width": width, "residual": variant.residual, "feed_forward": variant.feed_forward}
    if any(value not in ds[name].values for name, value in wanted.items()):
        return None
    return ds["loss"].sel(wanted)


def _of(ds: xr.Dataset, layers: int | list[int], width: int, variant: Variant) -> xr.Dataset:
    return ds.sel(layers=layers, width=width, residual=variant.residual, feed_forward=variant.feed_forward)


def published(ds: xr.Dataset, layers: int, width: int) -> xr.DataArray | None:
    """A published curve at the result's targets; None for a curve that was not, or a result of another task."""
    settings = json.loads(ds.attrs["settings"])
    curve = PUBLISHED.get((layers, width))
    if curve is None or (settings["vocabulary"], settings["context"]) != (PUBLISHED_SIZE, PUBLISHED_SIZE):
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
    found = [_blind(ds)]
    for layers, width in PUBLISHED:
        found += _curve(ds, layers, width)
    for width in (2, 10):
        found += [_beats_blind(ds, width), _primacy(ds, width), _middle(ds, width), _deeper(ds, width)]
    without, with_stream, with_both = (Variant(*v) for v in ((0, 0), (1, 0), (1, 1)))
    found += [
        _breaks(ds, "residual", "residual streams break", without, with_stream),
        _breaks(ds, "feed-forward", "a feed-forward beside residual streams breaks", with_stream, with_both),
    ]
    return [*found, _spiky(ds), _single_runs(ds)]


def _blind(ds: xr.Dataset) -> Claim:
    """Every one-layer model of the result, all widths and variants, seeds and steps aside."""
    said = Statement(
        "liu7-retrieval-one-layer-blind",
        SOURCE,
        "In the retrieval task (which token stands at position k of 10) 1 layer without positional encoding cannot "
        "tell apart the tokens before the last, so it cannot retrieve any k <= 8.",
        "the 95 % interval over sequences of every one-layer model's loss lies above that of the best reader blind to "
        f"order less {AGREES:g} nats",
    )
    if 1 not in ds["layers"].values or not _before_last(ds).size:
        return said.judged()
    here = ds.sel(layers=1, target=_before_last(ds))
    limit = float(here["limit"].sel(reader="bag and last").max())
    reach = NORMAL * here["loss_error"].values
    found = [Interval(x, x - off, x + off) for x, off in zip(here["loss"].values.ravel(), reach.ravel(), strict=True)]
    measured = (
        f"least loss of {here['loss'].size} models {float(here['loss'].min()):.2f}, "
        f"median {float(here['loss'].median()):.2f}; a reader blind to order gets {limit:.3f}"
    )
    return said.judged(measured, every([above(one, limit - AGREES) for one in found])(SURE))


def _curve(ds: xr.Dataset, layers: int, width: int) -> list[Claim]:
    """The published numbers: at k <= 8, and at the last token."""
    name = f"{layers} layer{'s' if layers > 1 else ''} of width {width} {'have' if layers > 1 else 'has'}"
    values = PUBLISHED[layers, width]
    shown = (
        "2.19 at every k <= 8"
        if len(set(values[:-1])) == 1
        else ", ".join(f"{x:.2f}" for x in values[:-1]) + " at k = 0 to 8"
    )
    statements = [
        Statement(
            f"liu7-retrieval-depth-{layers}-width-{width}-{where}",
            SOURCE,
            f"In the retrieval task (token k of 10) {name} a loss in nats of {text}.",
            f"95 % intervals over runs lie within {AGREES:g} nats of the published curve, what can be read off its "
            "figure, at all these k, in the variant nearest to it",
            text,
        )
        for where, text in (("before-last", shown), ("last", f"{values[-1]:.2f} at k = {len(values) - 1}"))
    ]
    near, found = nearest(ds, layers, width), []
    for statement, chosen in zip(statements, (_before_last(ds), _last(ds)), strict=True):
        if near is None or not chosen.size:
            found.append(statement.judged())
            continue
        loss, curve = near.loss.sel(target=chosen), near.published.sel(target=chosen)
        ends = [(over_runs(loss.sel(target=k).values), float(curve.sel(target=k))) for k in chosen]
        verdict = every([between(run, x - AGREES, x + AGREES) for run, x in ends])(SURE)
        missing = chosen.size < (len(values) - 1 if statement is statements[0] else 1)
        said = "; ".join(f"{int(k)}: {_over_seeds(loss.sel(target=k))}" for k in chosen)
        # One target that is off refutes; agreement needs all of them.
        verdict = "undecided" if verdict == "holds" and missing else verdict
        found.append(statement.judged(f"{said} ({near.variant})", verdict))
    return found


def _beats_blind(ds: xr.Dataset, width: int) -> Claim:
    said = Statement(
        f"liu7-retrieval-two-layers-see-order-width-{width}",
        SOURCE,
        f"In the retrieval task (token k of 10) 2 layers of width {width} differ in kind from 1 layer: they tell "
        "positions apart (k = 0).",
        "the 95 % interval over runs of the loss at k = 0 lies below that of the best reader blind to order",
    )
    near = nearest(ds, 2, width)
    if near is None or 0 not in ds["target"].values:
        return said.judged()
    loss, limit = near.loss.sel(target=0), float(ds["limit"].sel(reader="bag and last", target=0))
    measured = f"{_over_seeds(loss)}; no 1-layer model gets below {limit:.2f} ({near.variant})"
    return said.judged(measured, below(over_runs(loss.values), limit)(SURE))


def _primacy(ds: xr.Dataset, width: int) -> Claim:
    said = Statement(
        f"liu7-retrieval-primacy-width-{width}",
        SOURCE,
        f"In the retrieval task (token k of 10) 2 layers of width {width} find the first token the easiest of those "
        "before the last, and their loss grows with k.",
        "of the losses at all k before the last that at k = 0 is the least, and their rank correlation with k is above "
        "0, by 95 % intervals over runs",
    )
    near, k = nearest(ds, 2, width), _before_last(ds)
    if near is None or k.size < 3 or 0 not in k:
        return said.judged()
    loss = near.loss.sel(target=k).transpose("seed", "target")
    others = loss.sel(target=k[1:]).min("target")
    rho = np.array([spearman(k.astype(float), run) for run in loss.values])
    measured = (
        f"{_over_seeds(loss.sel(target=0))} at k = 0, least after it {_over_seeds(others)}, Spearman of loss and k "
        f"{over_told(rho, '.2f')} over {k.size} targets ({near.variant})"
    )
    return said.judged(measured, every([each_above(others - loss.sel(target=0)), above(over_runs(rho), 0)])(SURE))


def _middle(ds: xr.Dataset, width: int) -> Claim:
    said = Statement(
        f"liu7-retrieval-lost-in-the-middle-width-{width}",
        SOURCE,
        f"In the retrieval task (token k of 10) 2 layers of width {width} are lost in the middle: the first and the "
        "last token are easier than any between.",
        "the losses of the first and of the last token are both below the least between, by 95 % intervals over runs",
    )
    near, last = nearest(ds, 2, width), _last(ds)
    middle = _before_last(ds)[1:]
    if near is None or not last.size or not middle.size or 0 not in ds["target"].values:
        return said.judged()
    ends = near.loss.sel(target=[0, int(last[0])])
    between_them = near.loss.sel(target=middle).min("target")
    first, final = (_over_seeds(ends.isel(target=n)) for n in (0, 1))
    measured = f"first {first}, last {final}, least between {_over_seeds(between_them)} ({near.variant})"
    return said.judged(measured, each_above(between_them - ends)(SURE))


def _deeper(ds: xr.Dataset, width: int) -> Claim:
    """By equivalence, target by target."""
    said = Statement(
        f"liu7-retrieval-three-layers-as-two-width-{width}",
        SOURCE,
        f"In the retrieval task (token k of 10) 3 layers of width {width} retrieve as 2 do.",
        f"at every k the loss of 3 layers less that of 2 lies within {AGREES:g} nats of 0, by the 90 % interval over runs, "
        "in the variant nearest to the published curve of 2",
    )
    near = nearest(ds, 2, width)
    deep = None if near is None else losses(ds, 3, width, near.variant)
    if near is None or deep is None:
        return said.judged()
    more, k = (deep - near.loss).transpose("target", "seed"), ds["target"].values
    still = falling(_of(ds, [2, 3], width, near.variant)["curve"])
    verdict = every([nothing(one, AGREES) for one in over_each(more)])(SURE)
    measured = (
        f"{'; '.join(f'{n}: {_over_seeds(more.sel(target=n))}' for n in k)} ({near.variant}; {int(still.sum())} of "
        f"{still.size} models not converged)"
    )
    return said.judged(measured, "undecided" if verdict == "holds" and k.size < PUBLISHED_SIZE else verdict)


def _spiky(ds: xr.Dataset) -> Claim:
    said = Statement(
        "liu7-retrieval-spiky",
        SOURCE,
        "In the retrieval task (token k of 10) curves of the loss over training are spiky.",
        f"the share of the training in which the loss, a mean over {SMOOTH} steps, is more than {SPIKE:g} nats above its "
        "least so far is above 0, by the 95 % interval over runs, for every published curve; means over more steps hide "
        "spikes: that they show none leaves it undecided",
    )
    measured, tests = [], []
    for layers, width in PUBLISHED:
        near = nearest(ds, layers, width)
        if near is None:
            continue
        here = _of(ds, layers, width, near.variant)
        in_means = here["curve"].copy(data=above_least(here["curve"].values)).mean("step")
        found = over_runs(here.get("spiky", in_means).mean("target").values)
        name = f"{layers} layer{'s' if layers > 1 else ''}, width {width}"
        measured.append(f"{name}: {told(found, '.2%')} of the training ({near.variant})")
        tests.append(above(found, 0))
    if not tests:
        return said.judged()
    verdict = every(tests)(SURE)
    if "spiky" not in ds:
        measured.append(f"in means over {int(ds['step'][0])} steps")
        verdict = "undecided" if verdict == "does not hold" else verdict
    return said.judged("; ".join(measured), verdict)


def _breaks(ds: xr.Dataset, name: str, what: str, before: Variant, after: Variant) -> Claim:
    """The mean over the targets between first and last falls, by more than `BREAKS`."""
    said = Statement(
        f"liu7-retrieval-{name}-breaks-plateau",
        SOURCE,
        f"In the retrieval task (token k of 10) {what} the plateau of the loss over k (3 layers, width 10).",
        f"with it the mean loss over the targets between first and last falls by more than {BREAKS:g} nats, by the "
        "95 % interval over runs",
    )
    middle = _before_last(ds)[1:]
    pair = [losses(ds, 3, 10, variant) for variant in (before, after)]
    if pair[0] is None or pair[1] is None or not middle.size:
        return said.judged()
    one, other = (loss.sel(target=middle).mean("target") for loss in pair if loss is not None)
    measured = f"mean over k = {middle[0]} to {middle[-1]}: {_over_seeds(one)} to {_over_seeds(other)}"
    return said.judged(measured, each_above(one - other, BREAKS)(SURE))


def _single_runs(ds: xr.Dataset) -> Claim:
    """What the spread of the seeds says of curves of one run per target."""
    said = Statement(
        "liu7-retrieval-single-runs",
        SOURCE,
        "One run per target shows the curve of loss over k in the retrieval task (implied by curves of single runs).",
        f"losses of several seeds differ by at most {AGREES:g} nats at every target of every published curve",
        kind="ours",
    )
    found = {key: one for key in PUBLISHED if (one := spread(ds, *key)) is not None}
    if not found:
        return said.judged()
    return said.judged(spread_sentence(ds), all(float(one.ranges.max()) <= AGREES for one in found.values()))


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
            f"{layers} layer{'s' if layers > 1 else ''}, width {width} ({one.near.variant}): the published value is within "
            f"the range of {loss.sizes['seed']} seeds at {one.inside} of {targets} targets; the seeds "
            + (moved if differing else f"agree within {AGREES:g} everywhere")
            + (
                f"; two single runs order neighbours as published in {one.ordered:.0%} of pairs"
                if one.steps.size
                else ""
            )
        )
    return ". ".join(said)


def _before_last(ds: xr.Dataset) -> np.ndarray:
    """The result's targets before the last position, rising."""
    k = np.sort(ds["target"].values)
    return k[k < json.loads(ds.attrs["settings"])["context"] - 1]


def _last(ds: xr.Dataset) -> np.ndarray:
    k = ds["target"].values
    return k[k == json.loads(ds.attrs["settings"])["context"] - 1]


def _over_seeds(values: xr.DataArray) -> str:
    return over_told(values, ".2f")
