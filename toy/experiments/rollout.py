"""Where averaging alone takes the attention of several layers: theorems 4.1 to 4.7 of [Wu] on toys' own patterns.

`P(t) = A(t) ... A(0)` of a toy without residual stream, feed-forward or norm's help is what its states are mixed out of. All
theorems are about any patterns, so that they are tried on three kinds: fresh toys whose logits have a chosen standard
deviation in the first block, toys trained here on `tasks.Copying`, and toys without content, whose logits are the
positional encoding's alone up to a little noise. What a theorem needs to know of patterns is measured: eps is
the smallest visible entry of all blocks, B the largest deviation of a logit from the theorem's form (up to a constant per
query, which no pattern sees). The theory's side is `probes.theory.rollout`.

- 4.1 to 4.3: `P(z_i >= j)` of every sequence, query and block is compared with its bound; `violations` counts where it
  lies above, beyond rounding.
- 4.4 and 4.6, the lemmas: every entry of every pattern between its bounds, which are those of one layer's rollout.
- 4.5 and 4.7: every entry of every rollout between its bounds, and the distance at which the last query's rollout, a mean
  over sequences, is largest. `path_peaks` is that of the products of the decays alone, before rows are normalized: for
  decay it is the theorem's own x* = t / (e^m - 1); for RoPE paths of one length weigh differently, and it lies beyond
  the theorem's, whose constants hide that.

For RoPE the toys of 4.7 use one plane alone, of angle theta per token, and read one vector again and again: logits are
`turning cos((i-j) theta)`, hence c = turning / 2 in the lemma's `c (i-j)^2 theta^2`. Values are the identity: the next block
reads the like.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from probes.claims.claim import Claim, Statement, Verdict
from probes.claims.rules import QUARTER, SURE, between, every, range_told
from probes.errors import InputError
from probes.results.dataset import dataset
from probes.results.tables import Table, number
from probes.theory.rollout import (
    Bounds,
    causal_bound,
    decay_bounds,
    decay_peak,
    prefix_bounds,
    rollout,
    rope_bounds,
    rope_peak,
    visible,
    window_bound,
)

from ..checks import at_least
from ..model import THETA, Architecture, Mask, PositionalSwitch, initial
from ..tasks import Copying
from ..train import Run, seed_of
from ..view import Toy
from .experiment import Work, each_above, over_each

ROUNDING = 1e-9  # relative, of sums and products of positive float64 numbers, after dozens of them
TINY = float(np.finfo(np.float64).tiny)
PATHS = ("decay_paths", "rope_paths")  # what no toy enters, and no seed
INPUT_BLOCK = -2  # of data: no step of training draws it
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

    def __post_init__(self) -> None:
        for name in ("seeds", "sequences", "layers", "peak_layers", "trained_steps", "batch"):
            at_least(name, getattr(self, name), 1)
        for name in ("length", "peak_length"):
            at_least(name, getattr(self, name), 3)
        for name, least in (("windows", 2), ("prefixes", 1), ("trained_blocks", 1)):
            for value in getattr(self, name):
                at_least(name, value, least)
                if name != "trained_blocks" and value > self.length:
                    raise InputError(f"{name}={value} does not fit {self.length} positions; give at most {self.length}")
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


class Look(NamedTuple):
    """A toy's attention on several sequences, lowest layer first, float64."""

    logits: Float[np.ndarray, "sequence layer query key"]  # with decay; minus infinity where the query does not look
    patterns: Float[np.ndarray, "sequence layer query key"]


# ------------------------------------------------------------------------------------------------------------ measuring


def measure(settings: Settings, work: Work) -> xr.Dataset:
    """Roll out everything; dims and meanings are in the variables' own names."""
    s = settings
    found = _limits(s, work) | _decays(s, work) | _turns(s, work)
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
    }
    used = {dim for variable in found.values() for dim in variable[0]}
    return dataset(found, coords={name: value for name, value in coords.items() if name in used})


def _sources(s: Settings) -> list[str]:
    return [f"fresh, logits {scale:g}" for scale in s.scales] + [f"trained, {n} blocks" for n in s.trained_blocks]


def _limits(s: Settings, work: Work) -> dict[str, tuple[Any, ...]]:
    """Theorems 4.1 to 4.3, and 4.5's bounds, on fresh and trained toys under every mask and encoding."""
    sources, named = _sources(s), cases(s)
    if not sources:
        return {}
    deepest = max(s.layers, *s.trained_blocks, 1)
    size = (len(named), len(sources), s.seeds)
    last = np.full((*size, deepest, s.length), np.nan)
    outside, bound, share = (np.full((*size, deepest), np.nan) for _ in range(3))
    eps, loss = np.full(size, np.nan), np.full(size, np.nan)
    violations, checked = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    lemma, entries = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    trained = _trained(s, named, work)
    total, done = float(np.prod(size)), 0
    for c, case in enumerate(named):
        for n, source in enumerate(sources):
            for seed in range(s.seeds):
                if n < len(s.scales):
                    toy, inputs = _fresh(s, case, s.scales[n], seed)
                elif (source, case.name, seed) in trained:
                    toy, inputs, loss[c, n, seed] = trained[source, case.name, seed]
                else:
                    continue
                look = look_at(toy, inputs)
                depth = look.patterns.shape[1]
                products = np.stack([rollout(one) for one in look.patterns])
                at = (c, n, seed)
                last[at][:depth] = products[:, :, -1].mean(0)
                limit = check(case, look, products)
                violations[at], checked[at], eps[at] = limit.violations, limit.checked, limit.eps
                outside[at][:depth], bound[at][:depth], share[at][:depth] = limit.outside, limit.bound, limit.share
                if case.decay is not None:
                    m = case.decay
                    shape = m * np.arange(s.length)
                    decayed = decays_hold(look, products, shape, lambda t, B, m=m: decay_bounds(s.length, t, m, B))
                    lemma[at], entries[at] = decayed.violations, decayed.checked
                done += 1
                work.advance("rollouts", float(done), total)
    dims = ("case", "source", "seed")
    found: dict[str, tuple[Any, ...]] = {
        "last": (
            (*dims, "layer", "key"),
            last.astype(np.float32),
            {"long_name": "P(z_i = key) of the last query after layer + 1 layers, mean over sequences", "units": "1"},
        ),
        "outside": (
            (*dims, "layer"),
            outside,
            {"long_name": "P(z_i >= K) of the last query (K = 1 without a prefix), mean over sequences", "units": "1"},
        ),
        "outside_bound": (
            (*dims, "layer"),
            bound,
            {"long_name": "the theorem's bound of it with each sequence's own eps, mean over sequences", "units": "1"},
        ),
        "share": (
            (*dims, "layer"),
            share,
            {"long_name": "least P(z_i = j) of the first K tokens, over queries and sequences", "units": "1"},
        ),
        "eps": (dims, eps, {"long_name": "smallest visible entry of all patterns", "units": "1"}),
        "violations": (dims, violations, {"long_name": "chances beyond their bound, 4.1 to 4.3", "units": "1"}),
        "checked": (dims, checked, {"long_name": "chances compared with their bound", "units": "1"}),
        "decay_violations": (dims, lemma, {"long_name": "entries beyond 4.4's and 4.5's bounds", "units": "1"}),
        "decay_checked": (dims, entries, {"long_name": "entries compared with 4.4's and 4.5's bounds", "units": "1"}),
    }
    if s.trained_blocks:
        found["loss"] = (dims, loss, {"long_name": "training loss of trained toys, last 100 steps", "units": "nat"})
    return found


def _decays(s: Settings, work: Work) -> dict[str, tuple[Any, ...]]:
    """4.4 and 4.5: the last query's rollout by distance, with logits next to none and of order 1."""
    if not (s.peak_decays and s.peak_scales):
        return {}
    size = (len(s.peak_decays), len(s.peak_scales), s.seeds)
    curves = np.full((*size, s.peak_layers, s.peak_length), np.nan)
    spread = np.full(size, np.nan)
    violations, checked = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    done = 0
    for d, m in enumerate(s.peak_decays):
        for n, scale in enumerate(s.peak_scales):
            for seed in range(s.seeds):
                architecture = _architecture(s, Case("", positional="decay", decay=m), s.peak_length, s.peak_layers)
                toy, inputs = _random(architecture, scale, seed, s.sequences)
                look = look_at(toy, inputs)
                products = np.stack([rollout(one) for one in look.patterns])
                curves[d, n, seed] = products[:, :, -1, ::-1].mean(0)
                held = decays_hold(
                    look,
                    products,
                    m * np.arange(s.peak_length),
                    lambda t, B, m=m: decay_bounds(s.peak_length, t, m, B),
                )
                violations[d, n, seed], checked[d, n, seed], spread[d, n, seed] = held
                done += 1
                work.advance("decay", float(done), float(np.prod(size)))
    dims = ("decay", "scale", "seed")
    paths = [path_peaks(m * np.arange(s.peak_length), s.peak_layers) for m in s.peak_decays]
    return {
        "decay_curve": (
            (*dims, "peak_layer", "distance"),
            curves.astype(np.float32),
            {"long_name": "rollout of the last query by distance, mean over sequences", "units": "1"},
        ),
        "decay_paths": (
            ("decay", "peak_layer"),
            np.array(paths),
            {"long_name": "distance at which products of decays, not normalized, are largest", "units": "token"},
        ),
        "decay_spread": (dims, spread, {"long_name": "B, what content adds to a logit at most", "units": "nat"}),
        "decay_peak_violations": (dims, violations, {"long_name": "entries beyond their bounds", "units": "1"}),
        "decay_peak_checked": (dims, checked, {"long_name": "entries compared with their bounds", "units": "1"}),
    }


def _turns(s: Settings, work: Work) -> dict[str, tuple[Any, ...]]:
    """4.6 and 4.7: the same with RoPE, of one plane, on inputs that are nearly the same vector."""
    if not (s.planes and s.noises):
        return {}
    size = (len(s.planes), len(s.noises), s.seeds)
    curves = np.full((*size, s.peak_layers, s.peak_length), np.nan)
    spread = np.full(size, np.nan)
    violations, checked = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    c, done = s.turning / 2, 0
    x = np.arange(s.peak_length)
    for p, plane in enumerate(s.planes):
        angle = theta(s, plane)
        for n, noise in enumerate(s.noises):
            for seed in range(s.seeds):
                toy, inputs = _turning(s, plane, noise, seed)
                look = look_at(toy, inputs)
                products = np.stack([rollout(one) for one in look.patterns])
                curves[p, n, seed] = products[:, :, -1, ::-1].mean(0)
                held = decays_hold(
                    look,
                    products,
                    c * (x * angle) ** 2,
                    lambda t, B, angle=angle: rope_bounds(s.peak_length, t, c, angle, B),
                )
                violations[p, n, seed], checked[p, n, seed], spread[p, n, seed] = held
                done += 1
                work.advance("RoPE", float(done), float(np.prod(size)))
    dims = ("theta", "noise", "seed")
    # What a logit really loses, 1 - cos; the lemma has its square instead.
    paths = [path_peaks(s.turning * (1 - np.cos(x * theta(s, plane))), s.peak_layers) for plane in s.planes]
    return {
        "rope_curve": (
            (*dims, "peak_layer", "distance"),
            curves.astype(np.float32),
            {"long_name": "rollout of the last query by distance, mean over sequences", "units": "1"},
        ),
        "rope_paths": (
            ("theta", "peak_layer"),
            np.array(paths),
            {"long_name": "distance at which products of decays, not normalized, are largest", "units": "token"},
        ),
        "rope_spread": (dims, spread, {"long_name": "B, a logit's largest deviation from the lemma", "units": "nat"}),
        "rope_violations": (dims, violations, {"long_name": "entries beyond their bounds", "units": "1"}),
        "rope_checked": (dims, checked, {"long_name": "entries compared with their bounds", "units": "1"}),
    }


# ----------------------------------------------------------------------------------------------------- toys and patterns


def look_at(toy: Toy, inputs: Tensor) -> Look:
    """Logits and patterns of a toy of one head on token ids [sequence, T], or vectors [sequence, T, d]."""
    embeddings = toy.embed(inputs) if inputs.dtype == torch.long else toy.placed(inputs)
    attention = toy.trace(embeddings, attention=True).attention
    logits = torch.stack([one.logits()[:, 0] for one in attention], 1)
    return Look(logits.numpy(), logits.softmax(-1).numpy())


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
    return _random(_architecture(s, case, s.length, s.layers), scale, seed, s.sequences)


def _random(architecture: Architecture, scale: float, seed: int, sequences: int) -> tuple[Toy, Tensor]:
    """A fresh toy whose first block's logits have this standard deviation, and normal inputs, the same for every case."""
    weights = {name: tensor.double() for name, tensor in initial(architecture, seed).items()}
    for layer in range(architecture.blocks):
        weights[f"{layer}.q"] *= scale / LOGIT_SD
    generator = torch.Generator().manual_seed(seed_of(seed, INPUT_BLOCK))
    size = (sequences, architecture.length, architecture.width)
    return Toy(architecture, weights), torch.randn(size, generator=generator, dtype=torch.float64)


def _turning(s: Settings, plane: int, noise: float, seed: int) -> tuple[Toy, Tensor]:
    """A toy with RoPE that turns one plane, reads one vector with noise, and hands on what it reads."""
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
    size = (s.turning * s.peak_width**0.5) ** 0.5  # of query and key
    for layer in range(s.peak_layers):
        weights[f"{layer}.q"][0, plane] = size
        weights[f"{layer}.k"][0, plane] = size
        weights[f"{layer}.v"] += torch.eye(s.peak_width, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed_of(seed, INPUT_BLOCK))
    inputs = torch.randn((s.sequences, s.peak_length, s.peak_width), generator=generator, dtype=torch.float64) * noise
    inputs[..., 0] += 1
    return Toy(architecture, weights), inputs


def _trained(s: Settings, named: list[Case], work: Work) -> Mapping[tuple[str, str, int], tuple[Toy, Tensor, float]]:
    """By source, case and seed: a trained toy, sequences for it, and its last loss."""
    found = {}
    for blocks in s.trained_blocks:
        runs, keys = [], []
        for case in (case for case in named if case.name in s.trained_cases):
            for seed in range(s.seeds):
                architecture = Architecture(
                    blocks=blocks,
                    width=s.trained_width,
                    length=s.length,
                    vocabulary=s.vocabulary,
                    outputs=s.vocabulary,
                    residual=False,
                    **case.switches,
                )
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


# ------------------------------------------------------------------------------------------------------------ theorems


class Limit(NamedTuple):
    """Theorem 4.1, 4.2 or 4.3 against a toy's rollouts."""

    violations: int
    checked: int
    eps: float  # smallest visible entry of all sequences
    outside: Float[np.ndarray, " layer"]  # P(z_i >= K) of the last query, mean over sequences
    bound: Float[np.ndarray, " layer"]
    share: Float[np.ndarray, " layer"]  # least P(z_i = j), j < K, over queries and sequences


def check(case: Case, look: Look, products: Float[np.ndarray, "sequence layer query key"]) -> Limit:
    """Every P(z_i >= j), and every share of a prefix, against its bound with the sequence's own eps."""
    layers, length = look.patterns.shape[1:3]
    seen = visible(length, window=case.window, prefix=case.prefix)
    first = case.prefix or 1
    violations = checked = 0
    smallest, outside, bounds = [], [], []
    for one, product in zip(look.patterns, products, strict=True):
        # No entry is zero; one that float64 took for zero makes every bound 1.
        eps = max(float(one[:, seen].min()), TINY)
        if case.window is not None:
            bound = window_bound(length, layers, eps, case.window)
        elif case.prefix is not None:
            bound = prefix_bounds(length, layers, eps, case.prefix).outside
            inside = product[..., : case.prefix]
            violations += int((inside < eps * (1 - ROUNDING)).sum())
            checked += inside.size
        else:
            bound = causal_bound(length, layers, eps)
        at_or_above = product[..., ::-1].cumsum(-1)[..., ::-1]  # [layer, query, key]
        violations += int((at_or_above > bound[:, None] * (1 + ROUNDING)).sum())
        checked += at_or_above.size
        smallest.append(eps)
        outside.append(at_or_above[:, -1, first] if first < length else np.zeros(layers))
        bounds.append(bound[:, first] if first < length else np.zeros(layers))
    share = products[..., :first].min((0, 2, 3))
    return Limit(violations, checked, min(smallest), np.mean(outside, 0), np.mean(bounds, 0), share)


class Held(NamedTuple):
    """A lemma and its theorem against a toy's patterns and rollouts."""

    violations: int
    checked: int
    spread: float  # B in nats, the largest of all sequences


def decays_hold(look: Look, products: Float[np.ndarray, "sequence layer query key"], lost: Any, bounds: Any) -> Held:
    """Every entry of every pattern and rollout against its bounds, with the sequence's own B.

    Args:
        look: of a causal toy.
        products: its rollouts.
        lost: what a logit loses by distance, nats, [T].
        bounds: (t, B) -> `Bounds` by distance, for t = 0 the lemma's.
    """
    layers, length = products.shape[1:3]
    i, j = np.tril_indices(length)
    violations = checked = 0
    spreads = []
    for logits, pattern, product in zip(look.logits, look.patterns, products, strict=True):
        rest = logits + lost[np.abs(np.arange(length)[:, None] - np.arange(length))]
        seen = np.isfinite(rest)
        span = np.where(seen, rest, -np.inf).max(-1) - np.where(seen, rest, np.inf).min(-1)
        spread = float(span.max()) / 2
        spreads.append(spread)
        for t in range(layers):
            theorem, lemma = bounds(t, spread), bounds(0, spread)
            violations += _beyond(product[t][i, j], theorem, i - j) + _beyond(pattern[t][i, j], lemma, i - j)
            checked += 2 * len(i)
    return Held(violations, checked, max(spreads))


def _beyond(entries: np.ndarray, bounds: Bounds, distance: np.ndarray) -> int:
    low, high = (end[distance] for end in bounds)
    return int(((entries < low * (1 - ROUNDING)) | (entries > high * (1 + ROUNDING))).sum())


def path_peaks(lost: Float[np.ndarray, " distance"], layers: int) -> list[int]:
    """Distance at which the sum over paths of e^-(what their steps lose) is largest, after 1 to `layers` layers.

    Rows are not normalized, and a path may go as far as `lost` knows. The smaller one of equal distances.
    """
    step = np.exp(-np.asarray(lost, dtype=np.float64))
    found, curve = [], step
    for layer in range(layers):
        if layer:
            curve = np.convolve(curve, step)[: len(step)]
            curve = curve / curve.max()
        found.append(int(np.argmax(curve > (1 - ROUNDING) * curve.max())))
    return found


# ------------------------------------------------------------------------------------------------------------ reporting

SOURCE = "[Wu]"
BELOW, FLOOR = 0.5, 1e-9  # masses between which a rate is fitted: after the start, before rounding
CONVERGED = 0.05  # mass that is left when "all" has gone
STEADY = 1.5  # factor within which the rates of two halves of a course are one: exponential
INSIDE = 0.5  # of the text, up to which a peak is looked at: beyond, the beginning of the text gathers mass of its own
EXACT = 1  # token that a peak may be off: two distances are equally good where x* is a whole number


def fresh(ds: xr.Dataset) -> list[str]:
    """Sources that are fresh toys, small logits first."""
    return [str(x) for x in ds["source"].values if str(x).startswith("fresh")] if "source" in ds else []


def rates(outside: np.ndarray, *, part: slice = slice(None)) -> float:
    """Exponential rate per layer of a mass [layer], by least squares of its logarithm; NaN for fewer than three layers.

    `part` of the layers whose mass is between `FLOOR` and `BELOW`.
    """
    layers = np.flatnonzero((outside < BELOW) & (outside > FLOOR))[part]
    if len(layers) < 3:
        return math.nan
    return float(-np.polyfit(layers, np.log(outside[layers]), 1)[0])


def bound_rate(bound: np.ndarray) -> float:
    """Rate per layer that a bound [layer] promises."""
    known = bound[np.isfinite(bound)]
    return max(0.0, float(-np.log(max(known[-1], TINY)) / len(known))) if len(known) else math.nan


def crossing(ds: xr.Dataset, window: int) -> int:
    """ceil((N-1) / (w-1)): blocks that it takes to come from the last position to the first."""
    return -(-(ds.sizes["key"] - 1) // (window - 1))


def decay_stars(ds: xr.Dataset) -> np.ndarray:
    """floor(t / (e^m - 1)) [decay, peak_layer]; a whole x* is given with rounding's help."""
    layers = range(ds.sizes["peak_layer"])
    return np.array([[math.floor(decay_peak(t, float(m)) + ROUNDING) for t in layers] for m in ds["decay"].values])


def rope_stars(ds: xr.Dataset) -> np.ndarray:
    """Peaks of the theorem's curve [theta, peak_layer]."""
    c = float(json.loads(ds.attrs["settings"])["turning"]) / 2
    layers, length = range(ds.sizes["peak_layer"]), ds.sizes["distance"]
    return np.array([[rope_peak(t, c, float(angle), length) for t in layers] for angle in ds["theta"].values])


def peaks(ds: xr.Dataset, name: str) -> xr.DataArray:
    """Distance at which measured curves are largest."""
    return ds[name].argmax("distance")


def tables(ds: xr.Dataset) -> list[Table]:
    """All numbers, medians over seeds with their range."""
    found = [_checked_table(ds)]
    if "outside" in ds:
        found += [_limit_table(ds), *_prefix_tables(ds)]
        if "loss" in ds:
            rows = [
                [str(one["case"].values), str(one["source"].values), range_told(one)]
                for row in ds["loss"]
                for one in row
                if np.isfinite(one).any()
            ]
            found.append(Table("Trained toys: loss, nats", ("case", "source", "median (range)"), rows))
    if "decay_curve" in ds:
        found.append(_peak_table(ds, "decay_curve", "decay", "scale", decay_stars(ds), ds["decay_paths"].values))
    if "rope_curve" in ds:
        found.append(_peak_table(ds, "rope_curve", "theta", "noise", rope_stars(ds), ds["rope_paths"].values))
    return found


def _checked_table(ds: xr.Dataset) -> Table:
    rows = []
    for name, kinds in THEOREMS.items():
        if (counted := _counted(ds, kinds)) is not None:
            rows.append([name, f"{counted[1]:,}", f"{counted[0]:,}"])
    return Table("Bounds with the measured eps and B", ("theorem", "compared", "beyond"), rows)


# Which cases a theorem is about, by the beginnings of their names; 4.1's argument is about any causal mask.
THEOREMS = {
    "4.1": ("causal", "decay", "rope"),
    "4.2": ("window",),
    "4.3": ("prefix",),
    "4.4 and 4.5": "decay",
    "4.6 and 4.7": "rope",
}


def _counted(ds: xr.Dataset, kinds: tuple[str, ...] | str) -> tuple[int, int] | None:
    """(beyond, compared); None where nothing was compared."""
    if isinstance(kinds, tuple):
        if "violations" not in ds:
            return None
        chosen = [str(case) for case in ds["case"].values if str(case).startswith(kinds)]
        here = ds[["violations", "checked"]].sel(case=chosen)
        counted = int(here["violations"].sum()), int(here["checked"].sum())
    else:
        names = {"decay": ("decay_violations", "decay_peak_violations"), "rope": ("rope_violations",)}[kinds]
        pairs = [(name, name.replace("violations", "checked")) for name in names if name in ds]
        counted = sum(int(ds[one].sum()) for one, _ in pairs), sum(int(ds[other].sum()) for _, other in pairs)
    return counted if counted[1] else None


def _limit_table(ds: xr.Dataset) -> Table:
    rows = []
    for case in ds["case"].values:
        for source in ds["source"].values:
            here = ds.sel(case=case, source=source)
            if not np.isfinite(here["eps"]).any():
                continue
            last = [one[np.isfinite(one)][-1] for one in here["outside"].values if np.isfinite(one).any()]
            measured = [rates(one) for one in here["outside"].values]
            promised = [bound_rate(one) for one in here["outside_bound"].values]
            rows.append(
                [str(case), str(source), *(range_told(x) for x in (here["eps"].values, last, measured, promised))]
            )
    columns = ("case", "source", "eps", "mass beyond the first token (prefix) at the top", "rate per layer", "bound's")
    return Table("Where the mass goes: median (range) over seeds", columns, rows)


def _prefix_tables(ds: xr.Dataset) -> list[Table]:
    windows, prefixes = [], []
    for case in map(str, ds["case"].values):
        for source in fresh(ds):
            here = ds.sel(case=case, source=source)
            if case.startswith("window"):
                width = int(case.split()[1])
                measured = range_told([rates(one) for one in here["outside"].values])
                windows.append([str(width), str(crossing(ds, width)), source, measured])
            if case.startswith("prefix"):
                k = int(case.split()[1])
                top = here["last"].isel(layer=_top(here))
                shares = ", ".join(number(x, ".3f") for x in top.sel(key=range(k)).median("seed").values)
                least = here["share"].isel(layer=_top(here)).values
                prefixes.append([str(k), source, shares, range_told(least), range_told(here["eps"].values)])
    found = []
    if windows:
        columns = ("w", "ceil((N-1)/(w-1))", "source", "rate per layer")
        found.append(Table("Windows: the last query's mass beyond the first token", columns, windows))
    if prefixes:
        columns = ("K", "source", "shares of the prefix at the top", "least of any query", "eps, its bound")
        found.append(Table("Prefixes", columns, prefixes))
    return found


def _peak_table(ds: xr.Dataset, name: str, dim: str, noise: str, stars: np.ndarray, paths: np.ndarray) -> Table:
    found, rows = peaks(ds, name), []
    layers = [f"t = {int(t)}" for t in ds["peak_layer"].values]
    for n, value in enumerate(ds[dim].values):
        title = f"{dim} {value:.3g}"
        rows.append([title, "theorem's curve", *map(str, stars[n])])
        if not np.array_equal(stars[n], paths[n]):
            rows.append([title, "products of decays", *map(str, paths[n])])
        for size in ds[noise].values:
            one = found.sel({dim: value, noise: size})
            label = "logits" if noise == "scale" else "inputs' noise"
            rows.append(
                [
                    title,
                    f"measured, {label} {size:g}",
                    *(range_told(one.sel(peak_layer=t), "g") for t in one["peak_layer"]),
                ]
            )
    return Table(f"Distance of the largest share, tokens: {name.split('_')[0]}", ("", "", *layers), rows)


def _top(ds: xr.Dataset) -> int:
    """Index of the last layer that a source has."""
    known = np.isfinite(ds["outside"].values).any(tuple(range(ds["outside"].ndim - 1)))
    return int(np.flatnonzero(known)[-1])


def claims(ds: xr.Dataset) -> list[Claim]:
    """Theorems 4.1 to 4.7, their bounds on all toys and their statements on fresh ones."""
    bounds = {
        "4.1": "Under a causal mask the rollout's mass at token j and beyond is bounded: P(z_i >= j) <= "
        "(1 - j eps)^(t+1).",
        "4.2": "Under a window of w tokens the rollout's mass at token j and beyond is bounded: P(z_i >= j) <= "
        "(1 - j eps^m)^floor((t+1)/m), m = ceil((N-1)/(w-1)).",
        "4.3": "With a prefix of K tokens the rollout's mass outside it obeys the bound of the causal mask, and every "
        "share inside it is at least eps.",
        "4.4 and 4.5": "Under a decay mask of rate m attention entries go like e^-(i-j)m and rollouts like "
        "C(t+i-j, i-j) e^-(i-j)m, within the theorems' constants.",
        "4.6 and 4.7": "Under RoPE attention entries go like e^-c(i-j)^2 theta^2 and rollouts like C(t+i-j, i-j) "
        "times it, within the theorems' constants.",
    }
    found = []
    for name, text in bounds.items():
        counted = _counted(ds, THEOREMS[name])
        measured = "-" if counted is None else f"{counted[0]:,} of {counted[1]:,} numbers beyond"
        said = Statement(
            f"wu-thm-{name.replace(' ', '-')}-bound",
            f"{SOURCE} Thm {name}",
            text,
            "no number of any toy is beyond its bound, with the eps (least entry) and B (deviation of logits) "
            "measured in that toy",
        )
        found.append(said.judged(measured, None if counted is None else counted[0] == 0))
    found += [_converges(ds)]
    found += [_same_limit(ds), _slower(ds), _prefix_claim(ds), _shares_claim(ds)]
    return [*found, *_decay_claims(ds), *_rope_claims(ds)]


def _converges(ds: xr.Dataset) -> Claim:
    """Every fresh toy, however large its logits."""
    case = "causal"
    said = Statement(
        "wu-thm-4.1-limit",
        f"{SOURCE} Thm 4.1",
        "Under a causal mask all mass of the rollout goes to the first token, exponentially in depth.",
        f"in fresh toys of every logit size less than {CONVERGED:g} of the mass is beyond the first token at the top, "
        f"and the rates of both halves of its course over layers agree within a factor of {STEADY:g}, by 95 % intervals "
        "over runs",
    )
    if not fresh(ds) or case not in ds["case"].values:
        return said.judged()
    here = ds.sel(case=case, source=fresh(ds))
    courses = here["outside"].isel(layer=slice(_top(here) + 1)).values.reshape(-1, _top(here) + 1)
    whole = np.array([rates(one) for one in courses])
    half = [len(np.flatnonzero((one < BELOW) & (one > FLOOR))) // 2 for one in courses]
    ratio = np.array(
        [rates(one, part=slice(n)) / rates(one, part=slice(n, None)) for one, n in zip(courses, half, strict=True)]
    )
    left = courses[:, -1]
    measured = (
        f"mass beyond after {courses.shape[1]} layers {range_told(left)}; {range_told(whole, '.2f')} per layer, "
        f"first half's rate over second's {range_told(ratio, '.2f')}"
    )
    if not np.isfinite(ratio).all():
        return said.judged(measured)
    top = here["outside"].isel(layer=_top(here))
    steady = [between(found, 1 / STEADY, STEADY) for found in over_each(top.copy(data=ratio.reshape(top.shape)))]
    return said.judged(measured, every([each_above(-top, -CONVERGED), *steady])(SURE))


def _windows(ds: xr.Dataset) -> list[int]:
    return [int(str(case).split()[1]) for case in ds["case"].values if str(case).startswith("window")]


def _same_limit(ds: xr.Dataset) -> Claim:
    said = Statement(
        "wu-thm-4.2-limit",
        f"{SOURCE} Thm 4.2",
        "Under a sliding window the limit is that of the causal mask: all mass of the rollout goes to the first token.",
        "under every window that the toys are deep enough for, the mass beyond the first token has fallen by a tenth "
        "or more since the text was first crossed, by 95 % intervals over runs of its logarithm",
    )
    if not fresh(ds) or not _windows(ds):
        return said.judged()
    measured, tests = [], []
    for width in _windows(ds):
        here = ds["outside"].sel(case=f"window {width}", source=fresh(ds))
        top = here.isel(layer=_top(ds.sel(source=fresh(ds))))
        measured.append(f"w = {width}: {range_told(top)}")
        # What narrow windows leave after few layers says nothing about the limit: it has to be falling.
        crossed = crossing(ds, width)
        if here.sizes["layer"] > 2 * crossed:
            tests.append(each_above(xr.ufuncs.log(here.isel(layer=crossed) / top.clip(TINY)), -math.log(0.9)))
    return said.judged(
        f"mass beyond after {_top(ds.sel(source=fresh(ds))) + 1} layers {', '.join(measured)}",
        every(tests)(SURE) if tests else None,
    )


def _slower(ds: xr.Dataset) -> Claim:
    said = Statement(
        "wu-thm-4.2-rate",
        f"{SOURCE} Thm 4.2",
        "Under a sliding window of w tokens the rollout's mass goes to the first token the more slowly, the more steps "
        "ceil((N-1)/(w-1)) it takes to cross the text.",
        "the rate per layer of fresh toys is higher under every window that takes fewer steps, by 95 % intervals over "
        "runs of the difference",
    )
    found = {}
    for width in _windows(ds) if fresh(ds) else []:
        values = [rates(one) for one in ds["outside"].sel(case=f"window {width}", source=fresh(ds)[0]).values]
        if np.isfinite(values).all():
            found[width] = xr.DataArray(values, dims="seed")
    if len(found) < 2:
        return said.judged()
    shown = ", ".join(
        f"{float(rate.mean()):.3f} at {crossing(ds, width)} (w = {width})" for width, rate in found.items()
    )
    pairs = [(a, b) for a, b in itertools.pairwise(sorted(found)) if crossing(ds, a) != crossing(ds, b)]
    rising = every([each_above(found[b] - found[a]) for a, b in pairs])
    return said.judged(f"rate per layer {shown}, {fresh(ds)[0]}", rising(SURE))


def _prefix_claim(ds: xr.Dataset) -> Claim:
    said = Statement(
        "wu-thm-4.3-limit",
        f"{SOURCE} Thm 4.3",
        "With a prefix of K tokens all mass of the rollout goes to those K tokens.",
        f"in fresh toys of every logit size less than {CONVERGED:g} of the mass is outside the prefix at the top, by 95 % "
        "intervals over runs",
    )
    chosen = [str(case) for case in ds["case"].values if str(case).startswith("prefix")] if fresh(ds) else []
    if not chosen:
        return said.judged()
    here = ds.sel(case=chosen, source=fresh(ds))
    left = here["outside"].isel(layer=_top(here))
    shown = ", ".join(f"{case}: {range_told(left.sel(case=case))}" for case in chosen)
    return said.judged(f"mass outside at the top {shown}", each_above(-left, -CONVERGED)(SURE))


def _shares_claim(ds: xr.Dataset) -> Claim:
    said = Statement(
        "wu-thm-4.3-shares",
        f"{SOURCE} Thm 4.3",
        "With a prefix of K tokens each of them keeps a share of the rollout that does not vanish with depth.",
        f"the least share of a prefix token at the top is above that of the middle layer divided by {STEADY:g}, and "
        "above eps, by 95 % intervals over runs of the ratios' logarithms",
    )
    chosen = [str(case) for case in ds["case"].values if str(case).startswith("prefix")] if fresh(ds) else []
    if not chosen:
        return said.judged()
    here = ds.sel(case=chosen, source=fresh(ds))
    top = _top(here)
    least, before = here["share"].isel(layer=top), here["share"].isel(layer=top // 2)
    shown = ", ".join(f"{case}: {range_told(least.sel(case=case))}" for case in chosen)
    tests = [
        each_above(xr.ufuncs.log(least / before), -math.log(STEADY)),
        each_above(xr.ufuncs.log(least / here["eps"])),
    ]
    return said.judged(f"least share of any query at the top {shown}", every(tests)(SURE))


def _decay_claims(ds: xr.Dataset) -> list[Claim]:
    name = f"{SOURCE} Thm 4.5"
    statements = at_star, moving = [
        Statement(
            "wu-thm-4.5-peak",
            name,
            "Under a decay mask of rate m the rollout is largest at the distance x* = t / (e^m - 1), t being the "
            "depth.",
            f"peaks within the first half of the text are within {EXACT} token or a quarter of x*, by 95 % intervals over "
            "runs, at the least logits",
        ),
        Statement(
            "wu-thm-4.5-peak-moves",
            name,
            "Under a decay mask of rate m the rollout's peak moves away from the query with depth t, and comes nearer "
            "as m grows.",
            "peaks within the first half of the text do not come nearer to the query from any depth to the next, nor "
            "move away from any m to the next, by 95 % intervals over runs, at the least logits",
        ),
    ]
    if "decay_curve" not in ds:
        return [statement.judged() for statement in statements]
    stars = ds["decay_paths"].transpose("decay", "peak_layer").copy(data=decay_stars(ds))
    length = ds.sizes["distance"]
    found = peaks(ds, "decay_curve")
    looked = stars < INSIDE * length
    off = (found - stars).where(looked)
    shown = "; ".join(
        f"logits {float(scale):g}: within {EXACT} token in {float((abs(one) <= EXACT).sum() / one.notnull().sum()):.0%}, "
        f"off by {float(abs(one).max()):g} at most"
        for scale, one in zip(ds["scale"], off.transpose("scale", ...), strict=True)
    )
    least = found.isel(scale=0)
    exact = [between(one, -1, 1) for one in over_each(off.isel(scale=0) / np.maximum(EXACT, QUARTER * stars))]
    steps = least.diff("peak_layer").where(looked), -least.diff("decay", label="lower").where(looked)
    moves = [between(one, 0, math.inf) for step in steps for one in over_each(step)]
    medians = least.median("seed").transpose("decay", "peak_layer").values
    ends = (
        ", ".join(f"{medians[n, 1]:g} to {medians[n, -1]:g} at m = {m:g}" for n, m in enumerate(ds["decay"].values))
        if medians.shape[1] > 1
        else "-"
    )
    enough = all(over_each(step) for step in steps)
    return [
        at_star.judged(
            f"{int(off.isel(scale=0).notnull().sum())} peaks of each; {shown}", every(exact)(SURE) if exact else None
        ),
        moving.judged(
            f"from t = 1 to {medians.shape[1] - 1}: {ends} (medians, least logits)",
            every(moves)(SURE) if enough else None,
        ),
    ]


def _rope_claims(ds: xr.Dataset) -> list[Claim]:
    name = f"{SOURCE} Thm 4.7"
    statements = with_depth, with_angle = [
        Statement(
            "wu-thm-4.7-peak-with-depth",
            name,
            "Under RoPE the rollout's peak x* moves away from the query with depth t.",
            "the peak's distance, within the first half of the text, rises with every layer, by 95 % intervals over runs",
        ),
        Statement(
            "wu-thm-4.7-peak-with-angle",
            name,
            "Under RoPE the rollout's peak x* comes nearer to the query as the angle theta_1 grows.",
            "the peak's distance, within the first half of the text, rises with every smaller angle, from two layers on, "
            "by 95 % intervals over runs",
        ),
    ]
    if "rope_curve" not in ds:
        return [statement.judged() for statement in statements]
    order = np.argsort(-ds["theta"].values)
    found = peaks(ds, "rope_curve").isel(noise=0, theta=order).transpose("seed", "theta", "peak_layer")
    looked = ds["rope_paths"].isel(theta=order) < INSIDE * ds.sizes["distance"]
    medians, angles = found.median("seed").values, found["theta"].values
    along = ", ".join(f"{medians[n, 0]:g} to {medians[n, -1]:g} at {angle:.3g}" for n, angle in enumerate(angles))
    # Before two layers have been walked the peak is at the query itself, whatever the angle.
    farther = found.diff("theta").where(looked & looked.shift(theta=1, fill_value=False))
    steps = found.diff("peak_layer").where(looked), farther.isel(peak_layer=slice(1, None))
    at = medians.shape[1] // 2
    by_angle = ", ".join(f"{medians[n, at]:g} at {angle:.3g}" for n, angle in enumerate(angles))
    told: list[Verdict | None] = [each_above(step)(SURE) if over_each(step) else None for step in steps]
    deeper, nearer = told
    return [
        with_depth.judged(f"from t = 0 to {medians.shape[1] - 1}: {along} rad per token", deeper),
        with_angle.judged(f"at t = {at}: {by_angle} rad per token", nearer),
    ]
