"""How models of in-context retrieval are tested: what they answer, where their last position looks, their sinks.

Sinks [Wu, K.4]: models that were trained on unbiased data read unbiased sequences of their own classes. The metric of a key
is the share of the queries that see it which give it a weight above tau, as `over_tau` of `probes.sinks`; the sink is its
mean over blocks. `alpha` [Gu] beside it is the mean weight over the queries at and after the key. What the metric says
without any sink: query i spreads evenly over i + 1 keys, so that with 17 positions and tau = 0.2 four queries (0 to 3) count
for key 0, three for key 1, two for key 2. `uniform_sink` is that number under a mask, `fresh` the metric of the same models
before training. In a window of 5 even weights are 0.2 themselves: whether they count is decided by noise, which `fresh`
shows.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from probes.errors import InputError
from probes.run.memory import block_numbers, own_memory
from probes.run.precision import precise

from .. import model as toy
from ..tasks import Drawn, InContext, World
from ..train import Trained, stacked

# Numbers in a stream of a test pass: what fits the cache of a CPU, or a device that does not say how much memory it has.
CHUNK = defaultdict(lambda: 1 << 28, cpu=1 << 19)
DECAY = -math.log(0.8)  # nats per token: what is one token further off weighs 0.8 times as much [Wu, section 5]
ITEMS = 8

Model = tuple[toy.Architecture, Mapping[str, Tensor]]  # its weights without model dimension


def switches_of(mask: str) -> dict[str, Any]:
    """The fields of `Architecture` that a mask's name stands for: causal, full, window-N or prefix-N."""
    kind, _, number = mask.partition("-")
    numbered = kind in ("window", "prefix")
    if kind not in get_args(toy.Mask) or numbered != number.isdecimal() or (number and not numbered):
        raise InputError(f"mask '{mask}' is unknown; give causal, full, window-N or prefix-N")
    return {"mask": kind} | ({kind: int(number)} if numbered else {})


def architecture_of(depth: int, mask: str, positional: Any, residual: str, width: int) -> toy.Architecture:
    """The transformer of [Wu, section 5]: one head, no output projection, a ReLU head on the last position."""
    return toy.Architecture(
        blocks=depth,
        width=width,
        length=2 * ITEMS + 1,
        vocabulary=None,
        outputs=InContext.labels,
        positional=positional,
        decay=DECAY if positional == "decay" else None,
        residual=residual == "on",
        output_projection=False,
        head="mlp",
        **switches_of(mask),
    )


def copied(models: Sequence[Model], world: World, drawn: Drawn, device: torch.device) -> Float[np.ndarray, " model"]:
    """The share of one step's sequences that each model answers with a label of the context."""
    shown = drawn.inputs[0, :, 1::2]  # [n, item, d], the labels
    among = [(shown == world.labels[one][:, None]).all(-1).any(1) for one in answers(models, drawn.inputs[0], device)]
    return _shares(torch.stack(among))


def patterns(
    architecture: toy.Architecture, weights: toy.Weights, switches: toy.Switches, inputs: Tensor
) -> Iterator[Tensor]:
    """Attention of every block in turn, [E, B, H, query, key]; arguments as of `model.forward`."""
    a = architecture
    x = toy.embedded(weights, switches, inputs)
    for layer in range(a.blocks):
        q, *others = toy.queries_keys_values(a, weights, switches, layer, x)
        k, v = (toy.shared(a, part) for part in others)
        pattern = toy.weighed(a, (q * a.head_dim**-0.5) @ k.transpose(-1, -2) + switches.bias)
        yield pattern
        if layer + 1 < a.blocks:
            x = toy.written(a, weights, switches, layer, x, toy.joined(pattern @ v))


def looked_at(model: Trained, n: int, tau: float, device: torch.device) -> dict[str, np.ndarray]:
    """`over_tau`, `alpha [layer, key]` and `fresh [key]` on n unbiased sequences, the same for all of one world."""
    run = model.run
    task: Any = replace(run.task, batch=n)  # pyright: ignore[reportCallIssue, reportArgumentType]
    inputs = task.draw(task.world(run.seed, device), generator_of(device, "sinks", run.seed), 1).inputs[0]
    look, before = (
        (run.architecture, stacked_on([weights], device), toy.Switches.of([run.architecture], device))
        for weights in (model.weights, toy.initial(run.architecture, run.seed))
    )
    over, alpha = metrics(*look, inputs, tau)
    return {"over_tau": over, "alpha": alpha, "fresh": metrics(*before, inputs, tau)[0].mean(0)}


def metrics(
    architecture: toy.Architecture, weights: toy.Weights, switches: toy.Switches, inputs: Tensor, tau: float
) -> tuple[np.ndarray, np.ndarray]:
    """Of one model (E = 1) on sequences [B, T(, d)]: the fraction of queries over tau, and alpha.

    Each is [layer, key], the mean over sequences and heads.
    """
    a = architecture
    seen = torch.isfinite(toy.logit_bias(a)).to(inputs.device)  # [query, key]
    later = torch.ones_like(seen).tril()  # alpha counts the queries from the key on, whether or not they see it
    place = precise(inputs.device)
    over, weight = (torch.zeros(a.blocks, a.length, dtype=torch.float64, device=place) for _ in range(2))
    with torch.no_grad():
        for some in inputs.split(fitting(a, inputs.device)):
            for layer, pattern in enumerate(patterns(a, weights, switches, some[None])):
                over[layer] += (pattern > tau).sum((0, 1, 2, 3)).to(place)
                weight[layer] += (pattern * later).sum((0, 1, 2, 3)).to(place)
    many = len(inputs) * a.heads
    over, weight = (x / (many * of.sum(0).to(place)) for x, of in ((over, seen), (weight, later)))
    return over.cpu().numpy(), weight.cpu().numpy()


def uniform_sink(architecture: toy.Architecture, tau: float) -> np.ndarray:
    """The metric [key] of queries that spread evenly over the keys they see."""
    seen = torch.isfinite(toy.logit_bias(architecture)).double()
    over = (seen / seen.sum(1, keepdim=True) > tau).sum(0)
    return (over / seen.sum(0)).numpy()


def generator_of(device: torch.device, *what: str | int) -> torch.Generator:
    """Its own for each test set, none of them one of training's."""
    text = " ".join(map(str, ("test", *what)))
    return torch.Generator(device).manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7]))


def stacked_on(weights: Sequence[Mapping[str, Tensor]], device: torch.device) -> dict[str, Tensor]:
    """Weights of several models side by side, on the device."""
    return {name: tensor.to(device) for name, tensor in stacked(weights).items()}


def answers(models: Sequence[Model], inputs: Float[Tensor, "n T d"], device: torch.device) -> Int[Tensor, "model n"]:
    """The label that each model gives to each sequence."""
    found = []
    with torch.no_grad():
        for a, weights in models:
            look = a, stacked_on([weights], device), toy.Switches.of([a], device)
            found.append(
                torch.cat([toy.forward(*look, x[None]).argmax(-1) for x in inputs.split(fitting(a, device))], 1)
            )
    return torch.cat(found)


def fitting(a: toy.Architecture, device: torch.device) -> int:
    """Sequences of one pass of a model."""
    numbers = CHUNK[device.type] if own_memory(device) is None else block_numbers(device) // 4
    return max(1, numbers // (a.length * (a.width + a.heads * a.length)))


def accuracies(models: Sequence[Model], drawn: Drawn, device: torch.device) -> Float[np.ndarray, " model"]:
    """The share of one step's sequences that each model answers rightly."""
    return _shares(answers(models, drawn.inputs[0], device) == drawn.hidden[0])


def _shares(right: Tensor) -> Float[np.ndarray, " model"]:
    return (right.sum(1) / right.shape[1]).cpu().numpy()
