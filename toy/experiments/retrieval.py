"""Loss of retrieving the token at one position, against that position [Liu-7].

Ten random tokens, and a model of its own for each position k that is trained to predict the k-th of them behind the last
one; no positional encoding, one causal head. What a model cannot know shows as a loss that stays up: the post's curves are
single runs, here each point has several seeds. Settings that the post does not give (residual stream, feed-forward,
optimizer) are dimensions, or have a value whose choice is written beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import cast

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch.nn import functional

from probes.errors import InputError
from probes.measures.jacobian import jacobian

from ..model import Architecture, AttentionSwitch, initial
from ..tasks import Copying
from ..train import Run, Schedule, Trained, logits
from ..view import Toy
from .experiment import Work
from .sweep import Measure, Part, axes, each, each_at_least, each_distinct, sweep

CURVE_POINTS = 20  # of a training curve: means over so many equal parts of the training
SMOOTH = 50  # steps; spikes are looked for in means over so many
SPIKE = 0.1  # nats; a loss so far above its least is a spike: ten times the deviation of a mean over `SMOOTH` steps
TEST_SEED = 2**32  # of the fresh sequences; runs have smaller ones
TEST_CHUNK = 2048  # sequences evaluated at a time
PROFILED = 16  # sequences that the profile of fresh weights is taken over
DIMS = ("layers", "width", "residual", "feed_forward", "seed", "target")


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
    attention: str = "softmax"  # or sigmoid, relu: what becomes of the lost middle where weights do not sum to 1
    sequences: int = 16_384  # fresh ones for the final loss; its standard error is then 0.006 nats at most

    def __post_init__(self) -> None:
        each_distinct(self, "layers", "width", "residual", "feed_forward", "target")
        each_at_least(self, 1, "seeds", "sequences", "batch")
        each_at_least(self, CURVE_POINTS, "steps")
        for name in ("vocabulary", "context"):
            if getattr(self, name) < 2:
                raise InputError(f"{name}={getattr(self, name)} leaves nothing to retrieve; give at least 2")
        beyond = [k for k in self.target if not 0 <= k < self.context]
        if beyond:
            raise InputError(f"target {beyond[0]} is no position of {self.context}; give from 0 to {self.context - 1}")
        if self.seeds > 1:
            replace(self, seeds=1)  # of any number of seeds, one says it all
        else:
            self.runs()  # architectures, rates and schedules refuse what cannot be

    def cells(self) -> list[tuple[int, int, bool, bool, int, int]]:
        """All models, as values of `DIMS`."""
        return list(product(self.layers, self.width, self.residual, self.feed_forward, range(self.seeds), self.target))

    def runs(self) -> list[Run]:
        """The training of every cell."""
        return [
            Run(
                architecture(layers, width, residual, feed_forward, self.vocabulary, self.context, self.attention),
                Copying(self.vocabulary, self.context, target, self.batch),
                seed=seed,
                learning_rate=self.learning_rate,
                schedule=cast(Schedule, self.schedule),
            )
            for layers, width, residual, feed_forward, seed, target in self.cells()
        ]


def architecture(
    layers: int,
    width: int,
    residual: bool,
    feed_forward: bool,
    vocabulary: int,
    context: int,
    attention: str = "softmax",
) -> Architecture:
    """Of one kind of model."""
    return Architecture(
        blocks=layers,
        width=width,
        length=context,
        vocabulary=vocabulary,
        outputs=vocabulary,
        residual=residual,
        feed_forward=feed_forward,
        attention=cast(AttentionSwitch, attention),
    )


def fresh_profile(kind: Architecture, seed: int) -> Float[np.ndarray, " position"]:
    """Sensitivity of the last position's stream to every token before any training, rms over `PROFILED` sequences."""
    draw = torch.Generator().manual_seed(TEST_SEED)
    tokens = torch.randint(kind.outputs, (PROFILED, kind.length), generator=draw)
    found = jacobian(Toy(kind, initial(kind, seed)), tokens, method="exact")["sensitivity"].values
    return np.sqrt((found**2).mean(0))


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
    s = settings
    trained = work.train("retrieval", s.runs(), s.steps)
    losses, errors = evaluate(trained, s, work)
    ends = np.linspace(0, s.steps, CURVE_POINTS + 1).round().astype(int)
    curves = torch.stack([torch.stack([m.losses[a:b].mean() for m in trained]) for a, b in pairwise(ends)], -1)
    smooth = [model.losses.unfold(0, min(SMOOTH, s.steps), 1).mean(-1).numpy() for model in trained]
    spiky = [above_least(one).mean() for one in smooth]
    readers = limits(s.vocabulary, s.context)
    single = np.float32
    measures = {
        "loss": Measure("loss on fresh sequences", "nat", dtype=single),
        "loss_error": Measure("standard error of the loss", "nat", dtype=single),
        "curve": Measure("training loss, mean over the steps up to this one", "nat", ("step",), single),
        "spiky": Measure(f"share of training {SPIKE:g} nats above the least loss so far", dtype=single),
    }
    found = each(s.cells(), loss=losses, loss_error=errors, curve=curves, spiky=spiky)
    known = [((reader,), {"limit": [least[k] for k in s.target]}) for reader, least in readers.items()]
    return sweep(
        axes(s, *DIMS) | {"step": ends[1:], "reader": list(readers)},
        Part(DIMS, measures, found),
        Part(("reader",), {"limit": Measure("least loss of a reader of this kind", "nat", ("target",))}, known),
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
