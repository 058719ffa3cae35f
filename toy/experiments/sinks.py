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

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from probes.claims.claim import Claim, Statement
from probes.claims.rules import SURE, Test, every
from probes.errors import InputError
from probes.measures.sinks import TAU
from probes.results.dataset import dataset
from probes.results.tables import Table, number

from ..model import (
    Architecture,
    Switches,
    Weights,
    embedded,
    initial,
    joined,
    logit_bias,
    normed,
    rotated,
    split,
    times,
    written,
)
from ..tasks import Drawn
from ..train import Trained, stacked
from . import position_bias
from .experiment import Work, each_above, over_told
from .position_bias import (
    CHUNK,
    NOT_THERE,
    OVER_RUNS,
    PASSED,
    Case,
    Judged,
    accuracies,
    gate_told,
    generator_of,
    learnt_by_kind,
    scaled,
)

DIMS = ("scale", "depth", "mask", "residual", "seed")
METRIC = "sink metric (fraction of queries that give a position a weight above tau)"
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
        return position_bias.Settings(
            depths=self.depths,
            positional=("none",),
            residual=self.residual,
            training=("unbiased",),
            data=("gaussian",),
            scales=self.scales,
            masks=self.masks,
            seeds=self.seeds,
            steps=self.steps,
            width=self.width,
            batch=self.batch,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
        )


QUICK = Settings(
    masks=("causal", "window-5", "window-9", "prefix-4"), scales=("text",), seeds=2, steps=500, sequences=2_000
)


def measure(settings: Settings, work: Work) -> xr.Dataset:
    """Train the models and look at their patterns.

    Returns:
        `sink [..., position]`, `over_tau [..., layer, position]`, `alpha [..., layer, position]`, and `fresh [...,
        position]`, `sink` before training, over the dimensions of `DIMS`; `uniform [mask, position]`; `pattern [..., layer,
        query, key]` of the first sequence and seed; `training_loss` (mean over the last hundredth of training), `accuracy`
        on those sequences, `novel_accuracy` on as many of novel classes. NaN: blocks that a model does not have.
    """
    s, training = settings, settings.training()
    coords: dict[str, Any] = {
        "scale": s.scales,
        "depth": s.depths,
        "mask": s.masks,
        "residual": s.residual,
        "seed": tuple(range(s.seeds)),
    }
    length, layers = 2 * position_bias.ITEMS + 1, max(s.depths)
    grid = tuple(len(coords[dim]) for dim in DIMS)
    over = np.full((*grid, layers, length), np.nan, np.float32)
    alpha, fresh = np.full_like(over, np.nan), np.full_like(over, np.nan)
    pattern = np.full((*grid[:-1], layers, length, length), np.nan, np.float32)
    losses, accuracy, novel = (np.full(grid, np.nan, np.float32) for _ in range(3))

    for part, models in position_bias.trained(training, position_bias.cases(training), (), work):
        for case, model in zip(part, models, strict=True):
            place = tuple(coords[dim].index(getattr(case, dim)) for dim in DIMS)
            drawn, unseen = _sequences(case, training, s.sequences, work.device)
            looks = [_one(model, work.device), _one(replace(model, weights=_fresh(model)), work.device)]
            over[(*place, slice(case.depth))], alpha[(*place, slice(case.depth))] = metrics(
                *looks[0], drawn.inputs[0], s.tau
            )
            fresh[(*place, slice(case.depth))], _ = metrics(*looks[1], drawn.inputs[0], s.tau)
            losses[place] = float(model.losses[-max(1, round(LAST_STEPS * s.steps)) :].mean())
            for found, those in ((accuracy, drawn), (novel, unseen)):
                found[place] = accuracies([(model.run.architecture, model.weights)], those, work.device)[0]
            if case.seed == 0:
                for layer, a in enumerate(patterns(*looks[0], drawn.inputs[0][None, :1])):
                    pattern[(*place[:-1], layer)] = a[0, 0, 0].cpu()
    uniform = [uniform_sink(architecture_of(training, mask), s.tau) for mask in s.masks]

    share = {"units": "1"}
    over_name = f"fraction of the queries that see the position with a weight > {s.tau:g}"
    by_layer = (*DIMS, "layer", "position")
    return dataset(
        {
            "sink": (
                (*DIMS, "position"),
                np.nanmean(over, -2),
                {"long_name": f"{over_name}, mean over blocks"} | share,
            ),
            "over_tau": (by_layer, over, {"long_name": over_name} | share),
            "alpha": (by_layer, alpha, {"long_name": "mean weight over the queries from the position on"} | share),
            "fresh": (
                (*DIMS, "position"),
                np.nanmean(fresh, -2),
                {"long_name": f"{over_name}, before training"} | share,
            ),
            "uniform": (
                ("mask", "position"),
                np.stack(uniform),
                {"long_name": f"{over_name}, of even weights"} | share,
            ),
            "pattern": (
                (*DIMS[:-1], "layer", "query", "key"),
                pattern,
                {"long_name": "attention of the first sequence, seed 0"} | share,
            ),
            "training_loss": (DIMS, losses, {"long_name": "loss at the end of training", "units": "nat"}),
            "accuracy": (
                DIMS,
                accuracy,
                {"long_name": "accuracy on unbiased sequences of the training's classes"} | share,
            ),
            "novel_accuracy": (DIMS, novel, {"long_name": "accuracy on unbiased sequences of novel classes"} | share),
        },
        coords={name: list(values) for name, values in coords.items()}
        | {
            "layer": np.arange(layers),
            "position": (("position",), np.arange(length), {"long_name": "position of the key", "units": "1"}),
            "query": np.arange(length),
            "key": np.arange(length),
        },
    )


def patterns(architecture: Architecture, weights: Weights, switches: Switches, inputs: Tensor) -> Iterator[Tensor]:
    """Attention of every block in turn, [E, B, H, query, key]; arguments as of `model.forward`."""
    a = architecture
    x = embedded(weights, switches, inputs)
    for layer in range(a.blocks):
        n = normed(a, weights, f"{layer}.attention_norm", x)
        q, k, v = (split(a, times(n, weights[f"{layer}.{name}"])) for name in "qkv")
        q, k = (rotated(switches, y) for y in (q, k))
        pattern = ((q * a.head_dim**-0.5) @ k.transpose(-1, -2) + switches.bias).softmax(-1)
        yield pattern
        if layer + 1 < a.blocks:
            x = written(a, weights, switches, layer, x, joined(pattern @ v))


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
    weights = {name: tensor.to(device) for name, tensor in stacked([model.weights]).items()}
    return model.run.architecture, weights, Switches.of([model.run.architecture], device)


def _fresh(model: Trained) -> dict[str, Tensor]:
    return initial(model.run.architecture, model.run.seed)


def tables(ds: xr.Dataset) -> list[Table]:
    """The metric of the first token and of the highest other one, per model; medians over seeds."""
    rows = []
    for at in kinds(ds):
        for mask in ds["mask"].values:
            one = ds.sel(at).sel(mask=mask)
            sink, fresh = (one[name].median("seed").values for name in ("sink", "fresh"))
            other = 1 + int(sink[1:].argmax())
            alpha = one["alpha"].mean("layer").median("seed").values
            rows.append(
                [
                    *(str(at[dim]) for dim in ("scale", "depth", "residual")),
                    str(mask),
                    *(number(values[0], ".3f") for values in (sink, fresh, one["uniform"].values, alpha)),
                    f"{sink[other]:.3f} at {other}",
                    number(one["training_loss"].median("seed"), ".2f"),
                    number(one["accuracy"].median("seed"), ".2f"),
                ]
            )
    columns = ("scale", "depth", "residual", "mask", "first token", "before training", "even weights", "alpha [Gu]")
    return [Table("Sink metric, medians over seeds", (*columns, "highest other", "loss", "accuracy"), rows)]


def claims(ds: xr.Dataset) -> list[Claim]:
    """The statements, for each scale and depth by itself, without residual stream where that was trained."""
    residual = "off" if "off" in ds["residual"].values else str(ds["residual"].values[0])
    states, failed = _gate(ds)
    done = ds.where(states == "trained")
    first, rest = f"the {METRIC} at the first token", f"that of every other, {OVER_RUNS}"
    found = []
    for at in kinds(ds):
        if at["residual"] != residual:
            continue
        where = f"({at['depth']} blocks, {scaled(at['scale'])})."
        for name, published, rule, judge in (
            (
                "first-token",
                "In toys under a causal mask the sink is the first token",
                f"{first} is above {rest}",
                lambda one: _first(one, ["causal"]),
            ),
            (
                "made-by-training",
                "The sink of toys under a causal mask, their first token, is made by training: fresh weights give less",
                f"{first} rises in training, {OVER_RUNS}",
                _emerges,
            ),
            (
                "first-token-window",
                "In toys under sliding windows the first token is the sink as well",
                f"{first} is above {rest}, under every window",
                lambda one: _first(one, _of_kind(one, "window")),
            ),
            (
                "weaker-with-window",
                "The smaller a toy's sliding window, the weaker the sink at the first token",
                f"{first} rises with every wider window, {OVER_RUNS}",
                _weaker,
            ),
            (
                "shared-by-prefix",
                "In toys under a prefix mask all tokens of the prefix are sinks",
                f"the least {METRIC} within the prefix is above the highest after it, {OVER_RUNS}, for every prefix",
                _shared,
            ),
        ):
            own = name == "made-by-training"
            said = Statement(
                f"wu-toy-sink-{name}-{at['scale']}-{at['depth']}",
                "[Wu] K.4, read on" if own else "[Wu] K.4",
                f"{published} {where}",
                f"{rule}. {PASSED}",
                kind="ours" if own else "published",
            )
            told = judge(done.sel(at))
            if told is NOT_THERE and judge(ds.sel(at)) is not NOT_THERE:
                told = Judged(failed, "not trained")
            found.append(said.judged(*told))
    return found


def _gate(ds: xr.Dataset) -> tuple[xr.DataArray, str]:
    """What each kind of toy has learnt, and on what accuracy.

    Who fails on the classes of training fails on novel ones: where a result lacks those, nobody passes.
    """
    novel = "novel_accuracy" in ds
    accuracy = ds["novel_accuracy" if novel else "accuracy"].transpose(*DIMS)
    states = learnt_by_kind(accuracy)
    states = states if novel else states.where(states != "trained", "partly trained")
    return states, gate_told(accuracy, states, "novel classes" if novel else "classes of training")


def _of_kind(ds: xr.Dataset, kind: str) -> list[str]:
    """Masks that were trained, window-N or prefix-N, by N."""
    names = [str(mask) for mask in ds["mask"].values if str(mask).startswith(kind)]
    return sorted(names, key=size_of)


def size_of(mask: str) -> int:
    """N of window-N and prefix-N, 0 of other masks."""
    return int(mask.partition("-")[2] or 0)


def _there(one: xr.Dataset, masks: list[str]) -> list[xr.DataArray]:
    """The metric [seed, position] under each of these masks that was trained."""
    known = [one["sink"].sel(mask=mask).transpose("seed", "position") for mask in masks if mask in one["mask"].values]
    return [sink for sink in known if bool(sink.notnull().any())]


def _first(one: xr.Dataset, masks: list[str]) -> Judged:
    told, tests = [], []
    for sink in _there(one, masks):
        other = sink.isel(position=slice(1, None)).max("position")
        fresh = float(one["fresh"].sel(mask=sink["mask"], position=0).mean())
        own = sink.isel(position=0)
        told.append(
            f"{sink['mask'].item()}: {_told(own)} at 0 (before training {fresh:.3f}), highest other {_told(other)}"
        )
        tests.append(each_above(own - other))
    return _all(told, tests)


def _emerges(one: xr.Dataset) -> Judged:
    if not (there := _there(one, ["causal"])):
        return NOT_THERE
    sink, fresh = there[0].isel(position=0), one["fresh"].sel(mask="causal", position=0)
    even = float(one["uniform"].sel(mask="causal", position=0).mean())
    told = f"{_told(sink)} at 0; before training {_told(fresh)}, even weights {even:.3f}"
    return _all([told], [each_above(sink - fresh)])


def _weaker(one: xr.Dataset) -> Judged:
    sinks = [sink.isel(position=0) for sink in _there(one, _of_kind(one, "window"))]
    if len(sinks) < 2:
        return NOT_THERE
    told = []
    for sink in sinks:
        at = {"mask": sink["mask"], "position": 0}
        alpha, even = float(one["alpha"].sel(at).mean()), float(one["uniform"].sel(at).mean())
        told.append(f"{sink['mask'].item()}: {_told(sink)} (alpha {alpha:.3f}, even weights {even:.3f})")
    return _all(told, [each_above(wide - narrow) for narrow, wide in pairwise(sinks)])


def _shared(one: xr.Dataset) -> Judged:
    told, tests = [], []
    for sink in _there(one, _of_kind(one, "prefix")):
        k = size_of(str(sink["mask"].item()))
        least, after = sink.isel(position=slice(k)).min("position"), sink.isel(position=slice(k, None)).max("position")
        told.append(f"{sink['mask'].item()}: lowest of the prefix {_told(least)}, highest after it {_told(after)}")
        tests.append(each_above(least - after))
    return _all(told, tests)


def _all(told: list[str], tests: list[Test]) -> Judged:
    return Judged("; ".join(told), every(tests)(SURE)) if tests else NOT_THERE


def _told(values: xr.DataArray) -> str:
    return over_told(values, ".3f")


def kinds(ds: xr.Dataset) -> list[dict[str, Any]]:
    """What was trained under each mask, as {scale, depth, residual}."""
    dims = ("scale", "depth", "residual")
    values = product(*(ds[dim].values.tolist() for dim in dims))
    return [dict(zip(dims, names, strict=True)) for names in values]
