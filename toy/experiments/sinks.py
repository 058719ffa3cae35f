"""Attention sinks of trained toys, by mask [Wu, K.4]: causal, sliding windows, prefixes.

The models of `position_bias`, trained on unbiased data without positional encoding, read unbiased sequences of their own
classes. The metric of a position is the fraction of the queries that see it which give it a weight above tau, as
`over_tau` of `probes.sinks`; `sink` is its mean over blocks. `alpha` [Gu] beside it is the mean weight over the queries at
and after the position.

What the metric says without any sink: query i spreads evenly over i + 1 keys, so that with 17 positions and tau = 0.2 four
queries (0 to 3) count for key 0, three for key 1, two for key 2. `uniform` is that number under each mask, `fresh` the
metric of the same models before training. In a window of 5 even weights are 0.2 themselves: whether they count is decided by
noise, which `fresh` shows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from probes.errors import InputError
from probes.measures.sinks import TAU

from ..model import Architecture, Switches, Weights, initial, logit_bias
from ..tasks import Drawn
from ..train import Trained
from . import position_bias
from .experiment import Work
from .in_context import CHUNK, accuracies, generator_of, patterns, stacked_on
from .position_bias import Case
from .sweep import Cells, Measure, Part, sweep

DIMS = ("scale", "depth", "mask", "residual", "seed")
LAST_STEPS = 0.01  # the share of training at its end over which the loss is averaged


@dataclass(frozen=True)
class Settings:
    """The grid is the full product of the lists.

    `masks`: causal, full, window-N, prefix-N. `seeds`, `steps`, `sequences`: their number.
    """

    masks: tuple[str, ...] = ("causal", "window-5", "window-9", "window-13", "prefix-2", "prefix-4", "prefix-6")
    depths: tuple[int, ...] = (2,)
    residual: tuple[str, ...] = ("off",)
    scales: tuple[str, ...] = position_bias.SCALES
    seeds: int = 5
    steps: int = 100_000
    sequences: int = 10_000
    tau: float = TAU
    width: int = 64
    batch: int = 128
    learning_rate: float = 1e-3
    weight_decay: float = 1e-6

    def __post_init__(self) -> None:
        if self.sequences < 1:
            raise InputError(f"sequences={self.sequences} is too few; give at least 1")
        if not 0 < self.tau < 1:
            raise InputError(f"tau={self.tau} is no threshold of a weight; give a number between 0 and 1")
        self.training()  # raises what it cannot be

    def training(self) -> position_bias.Settings:
        """The part of the grid of `position_bias` that is trained here."""
        own = ("sequences", "tau")
        shared = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in own}
        return position_bias.Settings(positional=("none",), training=("unbiased",), data=("gaussian",), **shared)


QUICK = Settings(
    masks=("causal", "window-5", "window-9", "prefix-4"), scales=("text",), seeds=2, steps=500, sequences=2_000
)


def measure(settings: Settings, work: Work) -> xr.Dataset:
    """Train the models and read their attention.

    Returns:
        Over `DIMS`: `over_tau`, `alpha [..., layer, position]`; `sink`, `fresh [..., position]`, means over blocks, of
        trained and of fresh weights; `training_loss`, `accuracy`, `novel_accuracy`. `uniform [mask, position]`: of even
        weights. `pattern [scale, depth, mask, residual, layer, query, key]`: of the first sequence and the first seed.
    """
    s = settings
    training, length, layers = s.training(), 2 * position_bias.ITEMS + 1, max(s.depths)
    grid = position_bias.axes_of(training)
    places = np.arange(length)
    coords = {dim: grid[dim] for dim in DIMS} | {
        "layer": np.arange(layers),
        "position": (("position",), places, {"long_name": "position of the key", "units": "1"}),
        "query": places,
        "key": places,
    }
    over, single = f"fraction of the queries that see the position with a weight > {s.tau:g}", np.float32
    by_layer = ("layer", "position")
    measures = {
        "sink": Measure(f"{over}, mean over blocks", "1", ("position",), single),
        "over_tau": Measure(over, "1", by_layer, single),
        "alpha": Measure("mean weight over the queries from the position on", "1", by_layer, single),
        "fresh": Measure(f"{over}, before training", "1", ("position",), single),
        "training_loss": Measure("loss at the end of training", "nat", dtype=single),
        "accuracy": Measure("accuracy on unbiased sequences of the training's classes", dtype=single),
        "novel_accuracy": Measure("accuracy on unbiased sequences of novel classes", dtype=single),
    }
    pattern = {"pattern": Measure("attention of the first sequence, seed 0", "1", ("layer", "query", "key"), single)}
    uniform = {"uniform": Measure(f"{over}, of even weights", dims=("position",))}
    even = [((mask,), {"uniform": uniform_sink(architecture_of(training, mask), s.tau)}) for mask in s.masks]
    seen: list[Any] = []
    return sweep(
        coords,
        Part(DIMS, measures, _measured(s, training, work, seen)),
        Part(("mask",), uniform, even),
        Part(DIMS[:-1], pattern, seen),
    )


def _measured(s: Settings, training: position_bias.Settings, work: Work, seen: list[Any]) -> Cells:
    """Model by model; patterns of the first seed go into `seen`."""
    for part, models in position_bias.trained(training, position_bias.cases(training), (), work):
        for case, model in zip(part, models, strict=True):
            place = tuple(getattr(case, dim) for dim in DIMS)
            drawn, unseen = _sequences(case, training, s.sequences, work.device)
            look, before = (_one(one, work.device) for one in (model, replace(model, weights=_fresh(model))))
            over, alpha = metrics(*look, drawn.inputs[0], s.tau)
            fresh, _ = metrics(*before, drawn.inputs[0], s.tau)
            over, fresh = (x.astype(np.float32) for x in (over, fresh))  # as stored, before means
            own, novel = (
                accuracies([(model.run.architecture, model.weights)], those, work.device)[0]
                for those in (drawn, unseen)
            )
            yield (
                place,
                {
                    "sink": over.mean(-2),
                    "over_tau": over,
                    "alpha": alpha,
                    "fresh": fresh.mean(-2),
                    "training_loss": float(model.losses[-max(1, round(LAST_STEPS * s.steps)) :].mean()),
                    "accuracy": own,
                    "novel_accuracy": novel,
                },
            )
            if case.seed == 0:
                found = [a[0, 0, 0].cpu().numpy() for a in patterns(*look, drawn.inputs[0][None, :1])]
                seen.append((place[:-1], {"pattern": np.stack(found)}))


def metrics(
    architecture: Architecture, weights: Weights, switches: Switches, inputs: Tensor, tau: float
) -> tuple[np.ndarray, np.ndarray]:
    """Of one model (E = 1) on sequences [B, T(, d)]: the fraction of queries over tau, and alpha.

    Each is [layer, key], the mean over sequences and heads.
    """
    a = architecture
    seen = torch.isfinite(logit_bias(a)).to(inputs.device)  # [query, key]
    later = torch.ones_like(seen).tril()  # alpha counts the queries from the key on, whether or not they see it
    over, weight = (torch.zeros(a.blocks, a.length, dtype=torch.float64, device=inputs.device) for _ in range(2))
    each = max(1, CHUNK[inputs.device.type] // (a.length * (a.width + a.heads * a.length)))
    with torch.no_grad():
        for some in inputs.split(each):
            for layer, pattern in enumerate(patterns(a, weights, switches, some[None])):
                over[layer] += (pattern > tau).sum((0, 1, 2, 3))
                weight[layer] += (pattern * later).sum((0, 1, 2, 3))
    many = len(inputs) * a.heads
    return (over / (many * seen.sum(0))).cpu().numpy(), (weight / (many * later.sum(0))).cpu().numpy()


def uniform_sink(architecture: Architecture, tau: float) -> np.ndarray:
    """The metric [key] of queries that spread evenly over the keys they see."""
    seen = torch.isfinite(logit_bias(architecture)).double()
    over = (seen / seen.sum(1, keepdim=True) > tau).sum(0)
    return (over / seen.sum(0)).numpy()


def architecture_of(training: position_bias.Settings, mask: str) -> Architecture:
    """Of a mask alone; depth and residual do not matter to even attention."""
    return position_bias.architecture_of(training.depths[0], mask, "none", training.residual[0], training.width)


def _sequences(case: Case, training: position_bias.Settings, n: int, device: torch.device) -> tuple[Drawn, Drawn]:
    """Unbiased sequences of the model's own classes and of novel ones, the same for all masks and depths."""
    run = position_bias.run_of(case, training)
    task: Any = replace(run.task, batch=n)  # pyright: ignore[reportArgumentType]
    world = task.world(case.seed, device)
    own = task.draw(world, generator_of(device, "sinks", case.seed), 1)
    return own, task.novel(world, generator_of(device, "novel", case.seed), n)


def _one(model: Trained, device: torch.device) -> tuple[Architecture, Weights, Switches]:
    """A model as the pass takes it."""
    return model.run.architecture, stacked_on([model.weights], device), Switches.of([model.run.architecture], device)


def _fresh(model: Trained) -> dict[str, Tensor]:
    return initial(model.run.architecture, model.run.seed)
