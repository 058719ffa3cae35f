"""Where averaging alone takes the attention of several layers: theorems 4.1 to 4.7 of [Wu] on toys' own patterns.

In a toy without residual stream and feed-forward `P(t) = A(t) ... A(0)` says which inputs its states are mixtures of. The
theorems hold for any patterns, so three kinds are tried: fresh toys whose logits have a chosen standard deviation in the
first block, toys trained here on `tasks.Copying`, and toys without content, whose logits come from the positional encoding
alone, up to a little noise. What a theorem assumes of patterns is measured: eps is the smallest visible entry of all
blocks, B the largest deviation of a logit from the theorem's form (up to a constant per query, which no pattern sees).

- 4.1 to 4.3: `P(z_i >= j)` of every sequence, query and block is compared with its bound; `violations` counts where it
  lies above, beyond rounding.
- 4.4 and 4.6, the lemmas: every entry of every pattern between its bounds, which are those of one layer's rollout.
- 4.5 and 4.7: every entry of every rollout between its bounds, and the distance at which the last query's rollout, a mean
  over sequences, is largest. `path_peaks` is that of the products of the decays alone, before rows are normalized: for
  decay it is the theorem's own x* = t / (e^m - 1); for RoPE paths of one length weigh differently, and it lies beyond
  the theorem's, whose constants hide that.

For RoPE the toys of 4.7 use one plane alone, of angle theta per token, and read one vector again and again: logits are
`turning cos((i-j) theta)`, hence c = turning / 2 in the lemma's `c (i-j)^2 theta^2`. Values are the identity: the next block
reads the like. The toys of several planes are the same with queries and keys of drawn directions, in all planes or in the
slow ones, which turn by half a circle at most over the text; "aligned" ones have keys that point where queries do.

Attention other than softmax: fresh causal toys with it, as they are, and with every row of their patterns divided by its
sum. The toys have norms, which undo any factor of a row: both have the same streams, and differ in what their rollouts say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from probes.errors import InputError
from probes.theory.rollout import Bounds, decay_bounds, rope_bounds, turned_bounds

from ...checks import above_zero, one_of
from ...model import THETA, Architecture, AttentionSwitch, initial
from ...tasks import Copying
from ...train import Run, seed_of
from ...view import Toy
from .. import settings
from ..experiment import Work
from ..sweep import Cells, Measure, Part, filled, sweep
from .bounds import SUMMED, beyond_first, check, decays_hold, directions, look_at, path_peaks
from .chart import charts as charts
from .statements import claims as claims
from .statements import tables as tables

INPUT_BLOCK, DIRECTION_BLOCK = -2, -3  # of data: no step of training draws them
LOGIT_SD = 1 / 3  # of fresh toys reading inputs of unit size: entries of W_Q and W_K have variance 1 / (3 d)
Switches = Mapping[str, Any]  # of an architecture


def cases(s: Settings) -> dict[str, Switches]:
    """All masks and encodings of the settings, by their names in the result."""
    return {
        "causal": {},
        **{f"window {w}": {"mask": "window", "window": w} for w in s.windows},
        **{f"prefix {k}": {"mask": "prefix", "prefix": k} for k in s.prefixes},
        **{f"decay {m:g}": {"positional": "decay", "decay": m} for m in s.decays},
        "rope": {"positional": "rope"},
    }


@dataclass(frozen=True)
class Settings(settings.Settings):
    """Sizes; the theorems have none of their own. Standard deviations and `turning` are in nats."""

    LEAST: ClassVar = {
        **dict.fromkeys(("scales", "peak_scales", "noises", "decays", "peak_decays", "planes"), 0),
        "windows": 2,
        "length": 3,
        "peak_length": 3,
        "target": -math.inf,
    }
    CHOICES: ClassVar = {
        "turned": ("slow aligned", "all aligned", "slow random", "all random"),
        "others": ("sigmoid", "relu"),
    }
    length: int = 17  # that of [Wu]'s toys
    layers: int = 24  # of fresh toys: a window of 3 crosses the text three times
    width: int = 32
    seeds: int = 5
    sequences: int = 16
    scales: tuple[float, ...] = (0.1, 1.0, 3.0)  # standard deviation of fresh toys' logits
    windows: tuple[int, ...] = (2, 3, 5, 9, 13)
    prefixes: tuple[int, ...] = (1, 2, 4, 6)
    decays: tuple[float, ...] = (0.1, 0.2231, 1.0)  # -ln 0.8 is that of [Wu]'s toys
    trained_blocks: tuple[int, ...] = (2, 4)
    trained_cases: tuple[str, ...] = ("causal", "window 5", "prefix 2", "decay 0.2231", "rope")
    trained_width: int = 16
    trained_steps: int = 2000
    target: int = -3  # the token that trained toys copy
    vocabulary: int = 10
    learning_rate: float = 1e-2
    batch: int = 128
    peak_length: int = 128  # several times the distance of most peaks: the beginning gathers mass of its own
    peak_layers: int = 8
    peak_decays: tuple[float, ...] = (0.1, 0.2, 0.5, 1.0)
    peak_scales: tuple[float, ...] = (0.01, 1.0)  # next to no content, and some
    peak_width: int = 64
    planes: tuple[int, ...] = (13, 15, 17, 19)  # of RoPE: theta = 10,000^(-2 plane / peak_width) per token
    turning: float = 50.0
    noises: tuple[float, ...] = (0.001, 0.02)  # of the inputs beside the common vector, per component
    turned: tuple[str, ...] = ("slow aligned", "all aligned", "slow random", "all random")  # several planes
    others: tuple[str, ...] = ("sigmoid", "relu")  # in place of softmax

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("windows", "prefixes"):
            if (largest := max(getattr(self, name))) > self.length:
                raise InputError(f"{name}={largest} does not fit {self.length} positions; give at most {self.length}")
        if (largest := max(self.planes)) >= (most := self.peak_width // 2):
            raise InputError(f"planes={largest} is no plane of {self.peak_width} dimensions; give 0 to {most - 1}")
        above_zero("turning", self.turning)
        for name in self.trained_cases:
            one_of("trained_cases", name, tuple(cases(self)))


QUICK = Settings(
    layers=16,
    seeds=2,
    sequences=8,
    scales=(0.1, 1.0),
    windows=(3, 5, 9),
    prefixes=(2, 4),
    decays=(0.2231,),
    trained_blocks=(2,),
    trained_cases=("causal", "window 5", "decay 0.2231"),
    trained_steps=300,
    peak_decays=(0.2, 0.5, 1.0),
    planes=(13, 15, 17),
)


def measure(s: Settings, work: Work) -> xr.Dataset:
    """Roll out everything; the variables' own names say what they mean."""
    coords: dict[str, Any] = {
        "case": list(cases(s)),
        "source": [*map(_fresh_source, s.scales), *map(_trained_source, s.trained_blocks)],
        "seed": list(range(s.seeds)),
        "layer": list(range(max(s.layers, *s.trained_blocks))),
        "key": list(range(s.length)),
        "peak_layer": list(range(s.peak_layers)),
        "distance": list(range(s.peak_length)),
        "decay": list(s.peak_decays),
        "scale": list(s.peak_scales),
        "theta": [theta(s, plane) for plane in s.planes],
        "noise": list(s.noises),
        "turned": list(s.turned),
        "attention": [f"{name}{rows}" for name in s.others for rows in ("", SUMMED)],
    }
    decays = {"decay": s.peak_decays, "scale": s.peak_scales, "seed": range(s.seeds)}
    one_plane = {"theta": coords["theta"], "noise": s.noises, "seed": range(s.seeds)}
    planes = {"turned": s.turned, "noise": s.noises, "seed": range(s.seeds)}
    x = np.arange(s.peak_length)
    falls = {m: m * x for m in s.peak_decays}
    turns = {angle: s.turning * (1 - np.cos(x * angle)) for angle in coords["theta"]}  # itself, not the lemma's square
    return sweep(
        coords,
        _limits(s, work),
        _by_distance(work, "decay", decays, partial(_decaying, s), counts="decay_peak"),
        _paths(s, "decay", "decay", falls),
        _by_distance(work, "rope", one_plane, partial(_one_plane, s)),
        _paths(s, "rope", "theta", turns),
        _by_distance(work, "planes", planes, partial(_planes, s)),
        _others(s, work),
    )


def _fresh_source(scale: float) -> str:
    return f"fresh, logits {scale:g}"


def _trained_source(blocks: int) -> str:
    return f"trained, {blocks} blocks"


def _counted(work: Work, label: str, cells: Iterable[Any]) -> Iterator[Any]:
    """The cells one after the other; how many are done is shown."""
    every = list(cells)
    for done, cell in enumerate(every, start=1):
        yield cell
        work.advance(label, float(done), float(len(every)))


def _limits(s: Settings, work: Work) -> Part:
    """Theorems 4.1 to 4.3, and 4.5's bounds, on fresh and trained toys under every mask and encoding."""
    layers, last = ("layer",), "P(z_i = key) of the last query after layer + 1 layers, mean over sequences"
    outside = "P(z_i >= K) of the last query (K = 1 without a prefix), mean over sequences"
    bound = "the theorem's bound of it with each sequence's own eps, mean over sequences"
    measures = {
        "last": Measure(last, "1", ("layer", "key"), np.float32),
        "outside": Measure(outside, "1", layers),
        "outside_bound": Measure(bound, "1", layers),
        "share": Measure("least P(z_i = j) of the first K tokens, over queries and sequences", "1", layers),
        "eps": Measure("smallest visible entry of all patterns"),
        "violations": Measure("chances beyond their bound, 4.1 to 4.3", dtype=np.int64),
        "checked": Measure("chances compared with their bound", dtype=np.int64),
        "decay_violations": Measure("entries beyond 4.4's and 4.5's bounds", dtype=np.int64),
        "decay_checked": Measure("entries compared with 4.4's and 4.5's bounds", dtype=np.int64),
        "loss": Measure("training loss of trained toys, last 100 steps", "nat"),
    }

    def found() -> Cells:
        trained = _trained(s, work)
        scales = {_fresh_source(scale): scale for scale in s.scales}
        sources = [*scales, *map(_trained_source, s.trained_blocks)]
        cells = [cell for cell in product(cases(s), sources, range(s.seeds)) if cell[1] in scales or cell in trained]
        for case, source, seed in _counted(work, "rollouts", cells):
            switches = cases(s)[case]
            if source in scales:
                architecture = _architecture(s, switches, s.length, s.layers)
                (toy, inputs), loss = _fresh(architecture, s.sequences, scales[source], seed), math.nan
            else:
                toy, inputs, loss = trained[case, source, seed]
            look = look_at(toy, inputs)
            products = look.rollouts()
            limit = check(switches.get("window"), switches.get("prefix"), look, products)
            beyond = compared = 0
            if "decay" in switches:
                walk = _with_decay(toy, inputs, switches["decay"], s.length)
                beyond, compared, _ = decays_hold(look, products, walk.lost, walk.bounds)
            values = {"last": products[:, :, -1].mean(0), "decay_violations": beyond, "decay_checked": compared}
            yield (case, source, seed), values | limit._asdict() | {"loss": loss}

    return Part(("case", "source", "seed"), measures, found())


class Walk(NamedTuple):
    """A toy whose logits fall with distance, and its inputs."""

    toy: Toy
    inputs: Tensor
    lost: np.ndarray  # nats by distance, by the lemma
    bounds: Callable[[int, float], Bounds]  # (t, B)


def _with_decay(toy: Toy, inputs: Tensor, m: float, length: int) -> Walk:
    return Walk(toy, inputs, m * np.arange(length), lambda t, B: decay_bounds(length, t, m, B))


def _decaying(s: Settings, m: float, scale: float, seed: int) -> Walk:
    """4.4 and 4.5."""
    architecture = _architecture(s, {"positional": "decay", "decay": m}, s.peak_length, s.peak_layers)
    return _with_decay(*_fresh(architecture, s.sequences, scale, seed), m, s.peak_length)


def _one_plane(s: Settings, angle: float, noise: float, seed: int) -> Walk:
    """4.6 and 4.7: RoPE of one plane, on inputs that are nearly the same vector."""
    c, length = s.turning / 2, s.peak_length
    vector = torch.zeros(s.peak_width, dtype=torch.float64)
    vector[{theta(s, plane): plane for plane in s.planes}[angle]] = (s.turning * s.peak_width**0.5) ** 0.5
    lost = c * (np.arange(length) * angle) ** 2
    return Walk(*_turning(s, vector, vector, noise, seed), lost, lambda t, B: rope_bounds(length, t, c, angle, B))


def _planes(s: Settings, kind: str, noise: float, seed: int) -> Walk:
    """RoPE in several planes, against `turned_bounds`."""
    angles = np.array([theta(s, plane) for plane in range(s.peak_width // 2)])
    generator = torch.Generator().manual_seed(seed_of(seed, DIRECTION_BLOCK))
    query, key, lost = directions(kind, angles, s.peak_length, s.turning, generator)
    return Walk(*_turning(s, query, key, noise, seed), lost, partial(turned_bounds, lost))


def _by_distance(
    work: Work, name: str, axes: Mapping[str, Sequence[Any]], walk_of: Callable[..., Walk], counts: str = ""
) -> Part:
    """The last query's rollout by distance, against its bounds.

    Args:
        work: whom to tell.
        name: of the variables; `counts`, if given, of those that count.
        axes: what walks depend on, with their values.
        walk_of: makes the walk at a place.
    """
    counts = counts or name
    spread = (
        "B, what content adds to a logit at most"
        if name == "decay"
        else "B, a logit's largest deviation from the lemma"
    )
    measures = {
        f"{name}_curve": Measure(
            "rollout of the last query by distance, mean over sequences", "1", ("peak_layer", "distance"), np.float32
        ),
        f"{name}_spread": Measure(spread, "nat"),
        f"{counts}_violations": Measure("entries beyond their bounds", dtype=np.int64),
        f"{counts}_checked": Measure("entries compared with their bounds", dtype=np.int64),
    }
    if drawn := "turned" in axes:  # directions are drawn, and with them what logits lose
        measures[f"{name}_lost"] = Measure("what a logit loses by distance", "nat", ("distance",))

    def found() -> Cells:
        for cell in _counted(work, name, product(*axes.values())):
            walk = walk_of(*cell)
            look = look_at(walk.toy, walk.inputs)
            products = look.rollouts()
            held = decays_hold(look, products, walk.lost, walk.bounds)
            values = [products[:, :, -1, ::-1].mean(0), held.spread, held.violations, held.checked, walk.lost]
            yield cell, dict(zip(measures, values, strict=drawn))

    return Part(tuple(axes), measures, found())


def _paths(s: Settings, name: str, axis: str, lost: Mapping[float, np.ndarray]) -> Part:
    """Where products of decays alone are largest, by what a logit loses with distance."""
    text = "distance at which products of decays, not normalized, are largest"
    measures = {f"{name}_paths": Measure(text, "token", ("peak_layer",), np.int64)}
    peaks = [path_peaks(by_distance, s.peak_layers) for by_distance in lost.values()]
    return Part((axis,), measures, filled([(value,) for value in lost], **{f"{name}_paths": peaks}))


def _others(s: Settings, work: Work) -> Part:
    """Rollouts of causal toys whose attention is not softmax."""
    text = "share beyond the first token of the last query's row, mean over sequences where anything arrives"
    measures = {
        "beyond": Measure(text, "1", ("layer",)),
        "gone": Measure("sequences of which nothing arrives at the last query", "1", ("layer",)),
    }

    def found() -> Cells:
        for name, scale, seed in _counted(work, "other attention", product(s.others, s.scales, range(s.seeds))):
            architecture = replace(_architecture(s, {}, s.length, s.layers), attention=cast(AttentionSwitch, name))
            weights, inputs = _fresh_weights(architecture, s.sequences, scale, seed)
            for rows, values in beyond_first(architecture, weights, inputs).items():
                yield (f"{name}{rows}", _fresh_source(scale), seed), dict(zip(measures, values, strict=True))

    return Part(("attention", "source", "seed"), measures, found())


def theta(s: Settings, plane: int) -> float:
    """Radians per token of a plane, as `model.rotation` has them."""
    return THETA ** (-2 * plane / s.peak_width)


def _architecture(s: Settings, switches: Switches, length: int, layers: int) -> Architecture:
    """Attention alone: no residual stream, no feed-forward; the norm keeps logits from vanishing with depth."""
    sizes = {"blocks": layers, "width": s.width, "length": length}
    return Architecture(**sizes, vocabulary=None, outputs=1, residual=False, norm="rms", **switches)


def _drawn(seed: int, *size: int) -> Tensor:
    """Normal inputs, the same for every case."""
    generator = torch.Generator().manual_seed(seed_of(seed, INPUT_BLOCK))
    return torch.randn(size, generator=generator, dtype=torch.float64)


def _fresh(architecture: Architecture, sequences: int, scale: float, seed: int) -> tuple[Toy, Tensor]:
    """A fresh toy whose first block's logits have this standard deviation, and inputs."""
    weights, inputs = _fresh_weights(architecture, sequences, scale, seed)
    return Toy(architecture, weights), inputs


def _fresh_weights(a: Architecture, sequences: int, scale: float, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    weights = {name: tensor.double() for name, tensor in initial(a, seed).items()}
    for layer in range(a.blocks):
        weights[f"{layer}.q"] *= scale / LOGIT_SD
    return weights, _drawn(seed, sequences, a.length, a.width)


def _turning(s: Settings, query: Tensor, key: Tensor, noise: float, seed: int) -> tuple[Toy, Tensor]:
    """A toy with RoPE that reads one vector with noise, makes this query and key of it, and hands on what it reads."""
    sizes = {"blocks": s.peak_layers, "width": s.peak_width, "length": s.peak_length}
    switches: Switches = {"residual": False, "positional": "rope", "output_projection": False}
    architecture = Architecture(**sizes, vocabulary=None, outputs=1, **switches)
    weights = {name: torch.zeros_like(tensor).double() for name, tensor in initial(architecture, seed).items()}
    for layer in range(s.peak_layers):
        weights[f"{layer}.q"][0], weights[f"{layer}.k"][0] = query, key
        weights[f"{layer}.v"] += torch.eye(s.peak_width, dtype=torch.float64)
    inputs = _drawn(seed, s.sequences, s.peak_length, s.peak_width) * noise
    inputs[..., 0] += 1
    return Toy(architecture, weights), inputs


def _trained(s: Settings, work: Work) -> dict[tuple[str, str, int], tuple[Toy, Tensor, float]]:
    """By case, source and seed: a trained toy, sequences for it, and its last loss."""
    toys = {}
    sizes = {"width": s.trained_width, "length": s.length, "vocabulary": s.vocabulary, "outputs": s.vocabulary}
    task = Copying(s.vocabulary, s.length, s.target, s.batch)
    for blocks in s.trained_blocks:
        chosen = product([name for name in cases(s) if name in s.trained_cases], range(s.seeds))
        runs = {}
        for name, seed in chosen:
            architecture = Architecture(blocks=blocks, residual=False, **sizes, **cases(s)[name])
            runs[name, seed] = Run(architecture, task, seed=seed, learning_rate=s.learning_rate)
        trained = work.train(f"blocks {blocks}", list(runs.values()), s.trained_steps)
        for (name, seed), model in zip(runs, trained, strict=True):
            toy = Toy(model.run.architecture, {key: tensor.double() for key, tensor in model.weights.items()})
            generator = torch.Generator().manual_seed(seed_of(seed, INPUT_BLOCK))
            ids = torch.randint(s.vocabulary, (s.sequences, s.length), generator=generator)
            toys[name, _trained_source(blocks), seed] = toy, ids, float(model.losses[-100:].mean())
    return toys
