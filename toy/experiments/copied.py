"""How models that name a token of their sequence are evaluated (`tasks.Copying`): perplexity, picks, spikes of the loss.

A relative perplexity is `(perplexity - 1) / V` over fresh sequences: `expm1` of the mean loss, in float64 from weights
trained in float32, so that a value of 1e-9 is as accurate as one of 1.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..model import Switches, forward
from ..train import Trained, seed_of, stacked

SPIKE_SMOOTH, SPIKE_RISE, FALLEN = 50, 1.0, 0.5  # steps, nats, share of a guesser's loss; see `spikes`
FRESH = seed_of(0, -1)  # of data that no step of training draws
CHUNK, TOGETHER = 4096, 8  # sequences and models evaluated at a time: float64 of 100 tokens stays below 30 MiB


def scored(
    models: Sequence[Trained], test: int, *, seed: int = FRESH
) -> tuple[Float[np.ndarray, "model sequence"], Bool[np.ndarray, "model sequence"]]:
    """(loss in nats, whether the right token was `picked`) of every model on each of `test` fresh sequences, in float64."""
    scores, picks = np.empty((len(models), test)), np.empty((len(models), test), bool)
    groups: dict[Any, list[int]] = {}
    for i, model in enumerate(models):
        task: Any = model.run.task
        groups.setdefault((model.run.architecture.shape, replace(task, batch=test)), []).append(i)
    for (shape, task), members in groups.items():
        inputs, answers = fresh(task, test, seed)
        for start, first in product(range(0, len(members), TOGETHER), range(0, test, CHUNK)):
            together, part = members[start : start + TOGETHER], slice(first, first + CHUNK)
            weights = {name: x.double() for name, x in stacked([models[i].weights for i in together]).items()}
            switches, ids = Switches.of([models[i].run.architecture for i in together]), inputs[part]
            with torch.no_grad():
                logits = forward(shape, weights, switches, ids.expand(len(together), *ids.shape))
            scores[together, part] = losses(logits, answers[part]).numpy()
            picks[together, part] = picked(logits, ids, answers[part]).numpy()
    return scores, picks


def fresh(task: Any, test: int, seed: int = FRESH) -> tuple[Int[Tensor, "sequence T"], Int[Tensor, " sequence"]]:
    """(sequences, answers) of a task that no step of training draws."""
    task = replace(task, batch=test)
    drawn = task.draw(None, torch.Generator().manual_seed(seed), 1)
    return drawn.inputs[0], task.answers(drawn)[0]


def evaluated(models: Sequence[Trained], test: int) -> tuple[Float[np.ndarray, " model"], Float[np.ndarray, " model"]]:
    """((perplexity - 1) / V, share of right picks) of every model over `test` fresh sequences."""
    scores, picks = scored(models, test)
    return np.expm1(scores.mean(1)) / [model.run.architecture.outputs for model in models], picks.mean(1)


def at_step(model: Trained, step: int) -> Trained:
    """The model with the weights that were kept at a step of its training."""
    return replace(model, weights=model.recorded[step])


def losses(logits: Float[Tensor, "model batch outputs"], answers: Tensor) -> Float[Tensor, "model batch"]:
    """-log p of the answers, small ones with all their digits: log1p of the others' odds."""
    index = answers.expand(len(logits), -1)[..., None]
    odds = logits - logits.gather(-1, index)
    largest = odds.amax(-1, keepdim=True)  # 0 where the answer leads
    others = (odds - largest).exp().scatter(-1, index, 0.0).sum(-1)
    largest = largest[..., 0]
    return torch.where(largest > 0, largest + (others + (-largest).exp()).log(), torch.log1p(others))


def picked(
    logits: Float[Tensor, "model batch outputs"], inputs: Int[Tensor, "batch T"], answers: Int[Tensor, " batch"]
) -> Bool[Tensor, "model batch"]:
    """Whether no token of its sequence has a larger logit than the right one.

    It tells order from vocabulary. A model that takes the right token for its neighbour on a circle still picks it from the
    sequence. A reader blind to order, who knows the last token alone, picks one of the `T - 1` before it by chance.
    """
    of_sequence = logits.gather(-1, inputs.expand(len(logits), -1, -1)).amax(-1)
    return logits.gather(-1, answers.expand(len(logits), -1)[..., None])[..., 0] >= of_sequence


def spikes(curve: Float[np.ndarray, " step"], outputs: int) -> list[int]:
    """Steps at which a loss spike begins.

    The losses' mean over `SPIKE_SMOOTH` steps has a floor, the lowest value so far. Once the floor is below `FALLEN` of
    log(outputs), a guesser's loss, a spike begins where the mean is above three floors, or `SPIKE_RISE` nats above the
    floor, whichever is less, and ends where it is back within half that rise: a rise is one spike however ragged, and one
    that stays is one.
    """
    if len(curve) < SPIKE_SMOOTH:
        return []
    sums = np.concatenate([[0.0], np.cumsum(curve, dtype=np.float64)])
    means = (sums[SPIKE_SMOOTH:] - sums[:-SPIKE_SMOOTH]) / SPIKE_SMOOTH
    floors = np.minimum.accumulate(means)
    rises = np.minimum(2 * floors, SPIKE_RISE)
    begun: list[int] = []
    inside = False
    for n in np.flatnonzero(floors < FALLEN * math.log(outputs)):
        if not inside and means[n] > floors[n] + rises[n]:
            begun.append(int(n) + SPIKE_SMOOTH - 1)
            inside = True
        elif inside and means[n] < floors[n] + rises[n] / 2:
            inside = False
    return begun


def bag(vocabulary: int, n: int) -> float:
    """`E log(n / count)`, nats: what is unknown of one of n uniform tokens to whom knows them all but not their order.

    The token stands `count` times among them, `count - 1` being binomial (n - 1, 1 / vocabulary).
    """
    p = 1 / vocabulary
    terms = (math.comb(n - 1, c) * p**c * (1 - p) ** (n - 1 - c) * math.log(n / (1 + c)) for c in range(n))
    return math.fsum(terms)
