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
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from probes.errors import InputError
from probes.theory.rollout import Bounds, decay_bounds, rope_bounds, turned_bounds

from ..checks import one_of
from ..model import THETA, Architecture, AttentionSwitch, Mask, PositionalSwitch, initial
from ..tasks import Copying
from ..train import Run, seed_of
from ..view import Toy
from .experiment import Work
from .rollout_bounds import SUMMED, beyond_first, check, decays_hold, directions, look_at, path_peaks
from .sweep import Cells, Measure, Part, each, each_at_least, sweep

INPUT_BLOCK, DIRECTION_BLOCK = -2, -3  # of data: no step of training draws them
LOGIT_SD = 1 / 3  # of fresh toys reading inputs of unit size: entries of W_Q and W_K have variance 1 / (3 d)


class Case(NamedTuple):
    """A mask or positional encoding, and what of it a theorem asks for."""

    name: str
    mask: Mask = "causal"
    window: int | None = None
    prefix: int | None = None
    positional: PositionalSwitch = "none"
    decay: float | None = None

    @property
    def switches(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("mask", "window", "prefix", "positional", "decay")}


def cases(settings: Settings) -> list[Case]:
    """All masks and encodings of the settings, by their names in the result."""
    s = settings
    return [
        Case("causal"),
        *(Case(f"window {w}", "window", window=w) for w in s.windows),
        *(Case(f"prefix {k}", "prefix", prefix=k) for k in s.prefixes),
        *(Case(f"decay {m:g}", positional="decay", decay=m) for m in s.decays),
        *([Case("rope", positional="rope")] if s.rope else []),
    ]


@dataclass(frozen=True)
class Settings:
    """Sizes; the theorems have none of their own. T = 17 and decay -ln 0.8 are those of [Wu]'s toys."""

    length: int = 17
    layers: int = 24  # of fresh toys
    width: int = 32
    seeds: int = 5
    sequences: int = 16
    scales: tuple[float, ...] = (0.1, 1.0, 3.0)  # standard deviation of fresh toys' logits, nats
    windows: tuple[int, ...] = (2, 3, 5, 9, 13)
    prefixes: tuple[int, ...] = (1, 2, 4, 6)
    decays: tuple[float, ...] = (0.1, 0.2231, 1.0)
    rope: bool = True
    trained_blocks: tuple[int, ...] = (2, 4)
    trained_cases: tuple[str, ...] = ("causal", "window 5", "prefix 2", "decay 0.2231", "rope")
    trained_width: int = 16
    trained_steps: int = 2000
    target: int = -3  # the token that trained toys copy
    vocabulary: int = 10
    learning_rate: float = 1e-2
    batch: int = 128
    peak_length: int = 128
    peak_layers: int = 8
    peak_decays: tuple[float, ...] = (0.1, 0.2, 0.5, 1.0)
    peak_scales: tuple[float, ...] = (0.01, 1.0)
    peak_width: int = 64
    planes: tuple[int, ...] = (13, 15, 17, 19)  # of RoPE: theta = 10,000^(-2 plane / peak_width) per token
    turning: float = 50.0  # nats
    noises: tuple[float, ...] = (0.001, 0.02)  # of the inputs beside the common vector, per component
    turned: tuple[str, ...] = ("slow aligned", "all aligned", "slow random", "all random")  # several planes
    others: tuple[str, ...] = ("sigmoid", "relu")  # in place of softmax

    def __post_init__(self) -> None:
        each_at_least(self, 1, "seeds", "sequences", "layers", "peak_layers", "trained_steps", "batch")
        each_at_least(self, 3, "length", "peak_length")
        for name, least in (("windows", 2), ("prefixes", 1)):
            each_at_least(self, least, name)
            for value in getattr(self, name):
                if value > self.length:
                    raise InputError(f"{name}={value} does not fit {self.length} positions; give at most {self.length}")
        each_at_least(self, 1, "trained_blocks")
        for plane in self.planes:
            if not 0 <= plane < self.peak_width // 2:
                raise InputError(
                    f"planes={plane} is no plane of {self.peak_width} dimensions; give from 0 to "
                    f"{self.peak_width // 2 - 1}"
                )
        for name in ("scales", "peak_scales", "noises", "decays", "peak_decays"):
            for value in getattr(self, name):
                if not (math.isfinite(value) and value >= 0):
                    raise InputError(f"{name}={value} is out of range; give finite numbers, 0 or more")
        for name in self.trained_cases:
            if self.trained_blocks and name not in (known := [case.name for case in cases(self)]):
                raise InputError(f"trained_cases='{name}' is not among the cases; give some of {', '.join(known)}")
        for name, known in (("turned", Settings.turned), ("others", Settings.others)):
            for value in getattr(self, name):
                one_of(name, value, known)
        if not 0 < self.turning < math.inf:
            raise InputError(f"turning={self.turning} is out of range; give a number above 0")


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


def measure(settings: Settings, work: Work) -> xr.Dataset:
    """Roll out everything; the variables' own names say what they mean."""
    s = settings
    coords: dict[str, Any] = {
        "case": [case.name for case in cases(s)],
        "source": _sources(s),
        "seed": list(range(s.seeds)),
        "layer": list(range(max(s.layers, *s.trained_blocks, 1))),
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
    decays = _by_distance(s, work, DECAY, _decaying(s), s.peak_scales)
    turns = _by_distance(s, work, ROPE, _turning_planes(s), s.noises)
    return sweep(coords, _limits(s, work), *decays, *turns, _planes(s, work), _others(s, work))


def _sources(s: Settings) -> list[str]:
    return [_fresh_source(scale) for scale in s.scales] + [f"trained, {n} blocks" for n in s.trained_blocks]


def _fresh_source(scale: float) -> str:
    return f"fresh, logits {scale:g}"


def _limits(s: Settings, work: Work) -> Part:
    """Theorems 4.1 to 4.3, and 4.5's bounds, on fresh and trained toys under every mask and encoding."""
    layers, last = ("layer",), "P(z_i = key) of the last query after layer + 1 layers, mean over sequences"
    measures = {
        "last": Measure(last, "1", ("layer", "key"), np.float32),
        "outside": Measure("P(z_i >= K) of the last query (K = 1 without a prefix), mean over sequences", "1", layers),
        "outside_bound": Measure(
            "the theorem's bound of it with each sequence's own eps, mean over sequences", "1", layers
        ),
        "share": Measure("least P(z_i = j) of the first K tokens, over queries and sequences", "1", layers),
        "eps": Measure("smallest visible entry of all patterns"),
        "violations": Measure("chances beyond their bound, 4.1 to 4.3", dtype=np.int64),
        "checked": Measure("chances compared with their bound", dtype=np.int64),
        "decay_violations": Measure("entries beyond 4.4's and 4.5's bounds", dtype=np.int64),
        "decay_checked": Measure("entries compared with 4.4's and 4.5's bounds", dtype=np.int64),
    }
    if s.trained_blocks:
        measures["loss"] = Measure("training loss of trained toys, last 100 steps", "nat")
    return Part(("case", "source", "seed"), measures, _limited(s, work))


def _limited(s: Settings, work: Work) -> Cells:
    """What `_limits` measures, toy by toy."""
    named, sources = cases(s), _sources(s)
    trained = _trained(s, named, work)
    scales = dict(zip(sources, s.scales, strict=False))
    every = list(product(named, sources, range(s.seeds)))
    every = [
        (case, source, seed) for case, source, seed in every if source in scales or (source, case.name, seed) in trained
    ]
    for done, (case, source, seed) in enumerate(every, start=1):
        if source in scales:
            toy, inputs = _fresh(s, case, scales[source], seed)
            loss = math.nan
        else:
            toy, inputs, loss = trained[source, case.name, seed]
        look = look_at(toy, inputs)
        products = look.rollouts()
        found = check(case.window, case.prefix, look, products)._asdict() | {"last": products[:, :, -1].mean(0)}
        found |= {"decay_violations": 0, "decay_checked": 0} | ({"loss": loss} if s.trained_blocks else {})
        if (m := case.decay) is not None:
            held = decays_hold(
                look, products, m * np.arange(s.length), lambda t, B, m=m: decay_bounds(s.length, t, m, B)
            )
            found |= {"decay_violations": held.violations, "decay_checked": held.checked}
        yield (case.name, source, seed), found
        work.advance("rollouts", float(done), float(len(every)))


class Lemma(NamedTuple):
    """How a part of the result is called that follows logits by distance."""

    dims: tuple[str, str]  # how fast logits fall, and the size of what deviates
    name: str
    counts: str
    spread: str


DECAY = Lemma(("decay", "scale"), "decay", "decay_peak", "B, what content adds to a logit at most")
ROPE = Lemma(("theta", "noise"), "rope", "rope", "B, a logit's largest deviation from the lemma")


class Form(NamedTuple):
    """How logits fall with distance, by a lemma and in a toy."""

    value: float  # of its dimension in the result
    lost: np.ndarray  # nats by distance, by the lemma
    walked: np.ndarray  # nats by distance that a logit really loses
    bounds: Callable[[int, float], Bounds]
    toy: Callable[[float, int], tuple[Toy, Tensor]]  # of the size of what deviates, and the seed


def _decaying(s: Settings) -> Iterator[Form]:
    """4.4 and 4.5."""
    x = np.arange(s.peak_length)
    for m in s.peak_decays:
        architecture = _architecture(s, Case("", positional="decay", decay=m), s.peak_length, s.peak_layers)
        toy = partial(_random, architecture, s.sequences)
        yield Form(m, m * x, m * x, lambda t, B, m=m: decay_bounds(s.peak_length, t, m, B), toy)


def _turning_planes(s: Settings) -> Iterator[Form]:
    """4.6 and 4.7: RoPE of one plane, on inputs that are nearly the same vector."""
    x, c = np.arange(s.peak_length), s.turning / 2
    for plane in s.planes:
        angle = theta(s, plane)
        lost, walked = c * (x * angle) ** 2, s.turning * (1 - np.cos(x * angle))
        one = torch.zeros(s.peak_width, dtype=torch.float64)
        one[plane] = (s.turning * s.peak_width**0.5) ** 0.5
        toy = partial(_turning, s, one, one)
        yield Form(angle, lost, walked, lambda t, B, angle=angle: rope_bounds(s.peak_length, t, c, angle, B), toy)


def _by_distance(s: Settings, work: Work, lemma: Lemma, forms: Iterable[Form], sizes: Sequence[float]) -> list[Part]:
    """The last query's rollout by distance, against its bounds; and where products of decays alone are largest."""
    forms, name = list(forms), lemma.name

    def found() -> Cells:
        every = list(product(forms, sizes, range(s.seeds)))
        for n, (form, size, seed) in enumerate(every, start=1):
            look = look_at(*form.toy(size, seed))
            products = look.rollouts()
            held = decays_hold(look, products, form.lost, form.bounds)
            values = (products[:, :, -1, ::-1].mean(0), held.spread, held.violations, held.checked)
            yield (form.value, size, seed), dict(zip(measures, values, strict=True))
            work.advance(name if name == "decay" else "RoPE", float(n), float(len(every)))

    text = "rollout of the last query by distance, mean over sequences"
    measures = {
        f"{name}_curve": Measure(text, "1", ("peak_layer", "distance"), np.float32),
        f"{name}_spread": Measure(lemma.spread, "nat"),
        f"{lemma.counts}_violations": Measure("entries beyond their bounds", dtype=np.int64),
        f"{lemma.counts}_checked": Measure("entries compared with their bounds", dtype=np.int64),
    }
    text = "distance at which products of decays, not normalized, are largest"
    paths = {f"{name}_paths": Measure(text, "token", ("peak_layer",), np.int64)}
    walked = [path_peaks(form.walked, s.peak_layers) for form in forms]
    alone = each([(form.value,) for form in forms if sizes], **{f"{name}_paths": walked})
    return [Part((*lemma.dims, "seed"), measures, found()), Part(lemma.dims[:1], paths, alone)]


def _planes(s: Settings, work: Work) -> Part:
    """RoPE in several planes against `turned_bounds`."""
    angles = np.array([theta(s, plane) for plane in range(s.peak_width // 2)])

    def found() -> Cells:
        every = list(product(s.turned, s.noises, range(s.seeds)))
        for n, (kind, noise, seed) in enumerate(every, start=1):
            generator = torch.Generator().manual_seed(seed_of(seed, DIRECTION_BLOCK))
            query, key, lost = directions(kind, angles, s.peak_length, s.turning, generator)
            look = look_at(*_turning(s, query, key, noise, seed))
            held = decays_hold(look, products := look.rollouts(), lost, partial(turned_bounds, lost))
            values = (products[:, :, -1, ::-1].mean(0), lost, held.spread, held.violations, held.checked)
            yield (kind, noise, seed), dict(zip(measures, values, strict=True))
            work.advance("planes", float(n), float(len(every)))

    text = "rollout of the last query by distance, mean over sequences"
    measures = {
        "planes_curve": Measure(text, "1", ("peak_layer", "distance"), np.float32),
        "planes_lost": Measure("what a logit loses by distance", "nat", ("distance",)),
        "planes_spread": Measure(ROPE.spread, "nat"),
        "planes_violations": Measure("entries beyond their bounds", dtype=np.int64),
        "planes_checked": Measure("entries compared with their bounds", dtype=np.int64),
    }
    return Part(("turned", "noise", "seed"), measures, found())


def _others(s: Settings, work: Work) -> Part:
    """Rollouts of causal toys whose attention is not softmax."""

    def found() -> Cells:
        every = list(product(s.others, s.scales, range(s.seeds)))
        for n, (name, scale, seed) in enumerate(every, start=1):
            architecture = replace(
                _architecture(s, Case("causal"), s.length, s.layers), attention=cast(AttentionSwitch, name)
            )
            weights, inputs = _drawn_toy(architecture, s.sequences, scale, seed)
            for rows, (beyond, gone) in beyond_first(architecture, weights, inputs).items():
                yield (f"{name}{rows}", _fresh_source(scale), seed), {"beyond": beyond, "gone": gone}
            work.advance("other attention", float(n), float(len(every)))

    text = "share beyond the first token of the last query's row, mean over sequences where anything arrives"
    measures = {
        "beyond": Measure(text, "1", ("layer",)),
        "gone": Measure("sequences of which nothing arrives at the last query", "1", ("layer",)),
    }
    return Part(("attention", "source", "seed"), measures, found())


def theta(s: Settings, plane: int) -> float:
    """Radians per token of a plane, as `model.rotation` has them."""
    return THETA ** (-2 * plane / s.peak_width)


def _architecture(s: Settings, case: Case, length: int, layers: int) -> Architecture:
    """Attention alone: no residual stream, no feed-forward; the norm keeps logits from vanishing with depth."""
    return Architecture(
        blocks=layers,
        width=s.width,
        length=length,
        vocabulary=None,
        outputs=1,
        residual=False,
        norm="rms",
        **case.switches,
    )


def _fresh(s: Settings, case: Case, scale: float, seed: int) -> tuple[Toy, Tensor]:
    return _random(_architecture(s, case, s.length, s.layers), s.sequences, scale, seed)


def _drawn(seed: int, *size: int) -> Tensor:
    """Normal inputs, the same for every case."""
    generator = torch.Generator().manual_seed(seed_of(seed, INPUT_BLOCK))
    return torch.randn(size, generator=generator, dtype=torch.float64)


def _random(architecture: Architecture, sequences: int, scale: float, seed: int) -> tuple[Toy, Tensor]:
    """A fresh toy whose first block's logits have this standard deviation, and inputs."""
    weights, inputs = _drawn_toy(architecture, sequences, scale, seed)
    return Toy(architecture, weights), inputs


def _drawn_toy(architecture: Architecture, sequences: int, scale: float, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Its weights and inputs."""
    weights = {name: tensor.double() for name, tensor in initial(architecture, seed).items()}
    for layer in range(architecture.blocks):
        weights[f"{layer}.q"] *= scale / LOGIT_SD
    return weights, _drawn(seed, sequences, architecture.length, architecture.width)


def _turning(s: Settings, query: Tensor, key: Tensor, noise: float, seed: int) -> tuple[Toy, Tensor]:
    """A toy with RoPE that reads one vector with noise, makes this query and key of it, and hands on what it reads."""
    architecture = Architecture(
        blocks=s.peak_layers,
        width=s.peak_width,
        length=s.peak_length,
        vocabulary=None,
        outputs=1,
        residual=False,
        positional="rope",
        output_projection=False,
    )
    weights = {name: torch.zeros_like(tensor).double() for name, tensor in initial(architecture, seed).items()}
    for layer in range(s.peak_layers):
        weights[f"{layer}.q"][0], weights[f"{layer}.k"][0] = query, key
        weights[f"{layer}.v"] += torch.eye(s.peak_width, dtype=torch.float64)
    inputs = _drawn(seed, s.sequences, s.peak_length, s.peak_width) * noise
    inputs[..., 0] += 1
    return Toy(architecture, weights), inputs


def _trained(s: Settings, named: list[Case], work: Work) -> Mapping[tuple[str, str, int], tuple[Toy, Tensor, float]]:
    """By source, case and seed: a trained toy, sequences for it, and its last loss."""
    found = {}
    for blocks in s.trained_blocks:
        runs, keys = [], []
        for case, seed in product([case for case in named if case.name in s.trained_cases], range(s.seeds)):
            sizes = {"width": s.trained_width, "length": s.length, "vocabulary": s.vocabulary, "outputs": s.vocabulary}
            architecture = Architecture(blocks=blocks, residual=False, **sizes, **case.switches)
            task = Copying(s.vocabulary, s.length, s.target, s.batch)
            runs.append(Run(architecture, task, seed=seed, learning_rate=s.learning_rate))
            keys.append((f"trained, {blocks} blocks", case.name, seed))
        if not runs:
            continue
        for key, model in zip(keys, work.train(f"blocks {blocks}", runs, s.trained_steps), strict=True):
            toy = Toy(model.run.architecture, {name: tensor.double() for name, tensor in model.weights.items()})
            generator = torch.Generator().manual_seed(seed_of(key[2], INPUT_BLOCK))
            ids = torch.randint(s.vocabulary, (s.sequences, s.length), generator=generator)
            found[key] = toy, ids, float(model.losses[-100:].mean())
    return found
