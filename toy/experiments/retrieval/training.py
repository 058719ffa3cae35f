"""The retrieval models: their settings, training, losses on fresh sequences, and what no reader gets below."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, cast

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch.nn import functional

from probes.errors import InputError
from probes.measures.jacobian import jacobian

from ...model import Architecture, AttentionSwitch, initial
from ...tasks import Copying
from ...train import Run, Schedule, Trained, logits
from ...view import Toy
from ..experiment import Work
from ..sweep import Measure, Part, axes, each, each_at_least, each_distinct, sweep

CURVE_POINTS = 20  # of a training curve: means over so many equal parts of the training
STILL = 0.05  # nats; what a loss that has converged does not fall by in the last quarter of the training
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
    rounds: int = 2  # of training anew those that have not converged, with twice the steps each time
    learning_rate: float = 1e-2
    schedule: str = "cosine"
    batch: int = 128
    attention: str = "softmax"  # or sigmoid, relu: what becomes of the lost middle where weights do not sum to 1
    sequences: int = 16_384  # fresh ones for the final loss; its standard error is then 0.006 nats at most

    def __post_init__(self) -> None:
        each_distinct(self, "layers", "width", "residual", "feed_forward", "target")
        each_at_least(self, 1, "seeds", "sequences", "batch")
        each_at_least(self, 2, "vocabulary", "context")
        each_at_least(self, CURVE_POINTS, "steps")
        each_at_least(self, 0, "rounds")
        if beyond := [k for k in self.target if not 0 <= k < self.context]:
            raise InputError(f"target {beyond[0]} is no position of {self.context}; give from 0 to {self.context - 1}")
        if self.seeds == 1:
            self.runs()  # architectures, rates and schedules refuse what cannot be
        else:
            replace(self, seeds=1)  # of any number of seeds, one says it all

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
    layers: int, width: int, residual: bool, feed_forward: bool, tokens: int, length: int, attention: str = "softmax"
) -> Architecture:
    """Of one kind of model, for sequences of so many tokens of so many kinds."""
    sizes: dict[str, Any] = {
        "blocks": layers,
        "width": width,
        "length": length,
        "vocabulary": tokens,
        "outputs": tokens,
    }
    how = cast(AttentionSwitch, attention)
    return Architecture(**sizes, residual=residual, feed_forward=feed_forward, attention=how)


def fresh_profile(kind: Architecture, seed: int) -> Float[np.ndarray, " position"]:
    """Sensitivity of the last position's stream to every token before any training, rms over `PROFILED` sequences."""
    draw = torch.Generator().manual_seed(TEST_SEED)
    tokens = torch.randint(kind.outputs, (PROFILED, kind.length), generator=draw)
    found = jacobian(Toy(kind, initial(kind, seed)), tokens, method="exact")["sensitivity"].values
    return np.sqrt((found**2).mean(0))


QUICK = Settings((1, 2), (2, 10), (False,), (False,), 2, (0, 1, 4, 8, 9), steps=1500, rounds=0, sequences=4096)


def measure(settings: Settings, work: Work) -> xr.Dataset:
    """Train every model of the grid and give its loss on fresh sequences.

    Returns:
        `loss [layers, width, residual, feed_forward, seed, target]` and `loss_error` alike, in nats: mean over the same
        fresh sequences for all models, and its standard error, after a model's last training; `fall`, what the training
        loss fell by in the last quarter of that, and `trained`, its steps; `loss_first`, the loss after the first
        training, and `curve [..., step]`: the training loss of that, mean over the steps up to `step` from the one before;
        `limit [reader, target]`: what no reader of that kind gets below (`limits`).
    """
    s, runs = settings, settings.runs()
    values = trained_once(runs, s.steps, s, work)
    values |= {"loss_first": values["loss"].copy(), "trained": np.full(len(runs), s.steps)}
    for times in (2**n for n in range(1, s.rounds + 1)):
        if not (still := np.flatnonzero(values["fall"] > STILL)).size:
            break
        again = trained_once([runs[i] for i in still.tolist()], s.steps * times, s, work, f" {times} times")
        values["trained"][still] = s.steps * times
        for name in ("loss", "loss_error", "fall"):
            values[name][still] = again[name]
    readers = limits(s.vocabulary, s.context)
    single = np.float32
    measures = {
        "loss": Measure("loss on fresh sequences", "nat", dtype=single),
        "loss_error": Measure("standard error of the loss", "nat", dtype=single),
        "loss_first": Measure("loss on fresh sequences after the first training", "nat", dtype=single),
        "fall": Measure("fall of the training loss in the last quarter of the last training", "nat", dtype=single),
        "trained": Measure("steps of the last training", dtype=np.int32),
        "curve": Measure("training loss, mean over the steps up to this one", "nat", ("step",), single),
    }
    known = [((reader,), {"limit": [least[k] for k in s.target]}) for reader, least in readers.items()]
    return sweep(
        axes(s, *DIMS) | {"step": _ends(s.steps)[1:], "reader": list(readers)},
        Part(DIMS, measures, each(s.cells(), **values)),
        Part(("reader",), {"limit": Measure("least loss of a reader of this kind", "nat", ("target",))}, known),
        attrs={"task": "the token at position target, of uniform random ones", "positional": "none", "mask": "causal"},
    )


def trained_once(runs: Sequence[Run], steps: int, s: Settings, work: Work, label: str = "") -> dict[str, np.ndarray]:
    """Train every run for so many steps: its losses, its curve, and what that falls by in the last quarter."""
    models = work.train(f"retrieval{label}", runs, steps)
    losses, errors = evaluate(models, s.sequences, work)
    curves = np.stack([curve(model) for model in models])
    return {
        "loss": losses,
        "loss_error": errors,
        "curve": curves,
        "fall": curves[:, -1 - CURVE_POINTS // 4] - curves[:, -1],
    }


def curve(model: Trained) -> Float[np.ndarray, " step"]:
    """The training loss, mean over each of `CURVE_POINTS` equal parts, nats."""
    return np.array([float(model.losses[a:b].mean()) for a, b in pairwise(_ends(len(model.losses)))])


def _ends(steps: int) -> np.ndarray:
    return np.linspace(0, steps, CURVE_POINTS + 1).round().astype(int)


def evaluate(trained: Sequence[Trained], sequences: int, work: Work) -> tuple[np.ndarray, np.ndarray]:
    """(loss, its standard error) of every model on the same fresh sequences, in nats."""
    task: Any = trained[0].run.task
    inputs = replace(task, batch=sequences).draw(None, torch.Generator().manual_seed(TEST_SEED), 1).inputs[0]
    by_shape: dict[Architecture, list[int]] = {}
    for i, model in enumerate(trained):
        by_shape.setdefault(model.run.architecture.shape, []).append(i)
    losses, errors, done = np.empty(len(trained)), np.empty(len(trained)), 0
    for members in by_shape.values():
        models = [trained[i] for i in members]
        where = torch.tensor([cast(Copying, model.run.task).target for model in models])
        found = []
        for some in inputs.split(TEST_CHUNK):
            out = logits(models, some).flatten(0, 1)
            answers = some.T[where].flatten()
            found.append(functional.cross_entropy(out, answers, reduction="none").view(len(members), -1))
        each = torch.cat(found, 1).double()
        losses[members] = each.mean(1).numpy()
        errors[members] = (each.std(1, correction=0) / math.sqrt(each.shape[1])).numpy()
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
