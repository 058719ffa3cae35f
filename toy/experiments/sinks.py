"""Attention sinks of trained toys, by mask [Wu, K.4]: causal, full, sliding windows, prefixes.

The models of `position_bias` that were trained on unbiased data read unbiased sequences of their own classes. The metric of
a key is the share of the queries that see it which give it a weight above tau, as `over_tau` of `probes.sinks`; the sink is
its mean over blocks. `alpha` [Gu] beside it is the mean weight over the queries at and after the key.

What the metric says without any sink: query i spreads evenly over i + 1 keys, so that with 17 positions and tau = 0.2 four
queries (0 to 3) count for key 0, three for key 1, two for key 2. `uniform_sink` is that number under a mask, `fresh` the
metric of the same models before training. In a window of 5 even weights are 0.2 themselves: whether they count is decided by
noise, which `fresh` shows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probes.run.precision import precise

from ..model import Architecture, Switches, Weights, initial, logit_bias
from ..train import Trained
from .in_context import CHUNK, generator_of, patterns, stacked_on


def looked_at(model: Trained, n: int, tau: float, device: torch.device) -> dict[str, np.ndarray]:
    """`over_tau`, `alpha [layer, key]` and `fresh [key]` of a model on n sequences; `pattern [layer, query, key]` of seed 0.

    The sequences are unbiased and the same for all models of one world.
    """
    run = model.run
    task: Any = replace(run.task, batch=n)  # pyright: ignore[reportCallIssue, reportArgumentType]
    inputs = task.draw(task.world(run.seed, device), generator_of(device, "sinks", run.seed), 1).inputs[0]
    look, before = (
        (run.architecture, stacked_on([weights], device), Switches.of([run.architecture], device))
        for weights in (model.weights, initial(run.architecture, run.seed))
    )
    over, alpha = metrics(*look, inputs, tau)
    found = {"over_tau": over, "alpha": alpha, "fresh": metrics(*before, inputs, tau)[0].mean(0)}
    if run.seed == 0:
        found["pattern"] = np.stack([a[0, 0, 0].cpu().numpy() for a in patterns(*look, inputs[None, :1])])
    return found


def metrics(
    architecture: Architecture, weights: Weights, switches: Switches, inputs: Tensor, tau: float
) -> tuple[np.ndarray, np.ndarray]:
    """Of one model (E = 1) on sequences [B, T(, d)]: the fraction of queries over tau, and alpha.

    Each is [layer, key], the mean over sequences and heads.
    """
    a = architecture
    seen = torch.isfinite(logit_bias(a)).to(inputs.device)  # [query, key]
    later = torch.ones_like(seen).tril()  # alpha counts the queries from the key on, whether or not they see it
    place = precise(inputs.device)
    over, weight = (torch.zeros(a.blocks, a.length, dtype=torch.float64, device=place) for _ in range(2))
    each = max(1, CHUNK[inputs.device.type] // (a.length * (a.width + a.heads * a.length)))
    with torch.no_grad():
        for some in inputs.split(each):
            for layer, pattern in enumerate(patterns(a, weights, switches, some[None])):
                over[layer] += (pattern > tau).sum((0, 1, 2, 3)).to(place)
                weight[layer] += (pattern * later).sum((0, 1, 2, 3)).to(place)
    many = len(inputs) * a.heads
    over, weight = (x / (many * of.sum(0).to(place)) for x, of in ((over, seen), (weight, later)))
    return over.cpu().numpy(), weight.cpu().numpy()


def uniform_sink(architecture: Architecture, tau: float) -> np.ndarray:
    """The metric [key] of queries that spread evenly over the keys they see."""
    seen = torch.isfinite(logit_bias(architecture)).double()
    over = (seen / seen.sum(1, keepdim=True) > tau).sum(0)
    return (over / seen.sum(0)).numpy()
