"""Where averaging alone takes the attention of several layers: theorems 4.1 to 4.7 of [Wu] on fresh toys' own patterns.

What is compared with what stands in `docs/probes/match.md`, "Rollouts".

For RoPE the toys of 4.7 use one plane alone, of angle theta per token, and read one vector again and again: logits are
`TURNING cos((i-j) theta)`, hence c = TURNING / 2 in the lemma's `c (i-j)^2 theta^2`. Values are the identity: the next block
reads the like. The toys of several planes are the same with queries and keys of drawn directions, in all planes or in the
slow ones, which turn by half a circle at most over the text; "aligned" ones have keys that point where queries do.

Attention other than softmax: fresh causal toys with it, as they are, and with every row of their patterns divided by its
sum. The toys have norms, which undo any factor of a row: both have the same streams, and differ in what their rollouts say.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from probes.errors import InputError
from probes.theory.rollout import (
    Bounds,
    causal_bound,
    decay_bounds,
    rollout,
    shares,
    turned_bounds,
    turned_loss,
    visible,
    window_bound,
)

from .. import checks
from ..model import THETA, Architecture, Switches, initial
from ..train import seed_of
from .experiment import Work
from .in_context import patterns
from .sweep import Measure, computed, sweep

ROUNDING = 1e-9  # relative, of sums and products of positive float64 numbers, after dozens of them
TINY = float(np.finfo(np.float64).tiny)
SUMMED = ", rows sum to 1"  # behind the name of an attention: its rows were divided by their sums
WIDTH, PEAK_WIDTH = 32, 64  # of toys, and of those whose logits turn in planes
INPUT_BLOCK, DIRECTION_BLOCK = -2, -3  # of data: no step of training draws them
LOGIT_SD = 1 / 3  # of fresh toys reading inputs of unit size: entries of W_Q and W_K have variance 1 / (3 d)
TURNING = 50.0  # nats, the strengths of all planes together
Patterns: TypeAlias = Float[np.ndarray, "sequence layer query key"]
BoundsAt: TypeAlias = Callable[[int, float], Bounds]  # (t, B) -> bounds by distance, for t = 0 the lemma's
PEAK_SCALES = (0.01, 1.0)  # of logits under decay: next to no content, and some
NOISES = (0.001, 0.02)  # of the inputs beside the common vector, per component
TURNED = ("slow aligned", "all aligned", "slow random", "all random")  # several planes
OTHERS = ("sigmoid", f"sigmoid{SUMMED}", "relu", f"relu{SUMMED}")  # in place of softmax


@dataclass(frozen=True)
class Settings(checks.Settings):
    """Sizes; the theorems have none of their own."""

    LEAST: ClassVar = {
        **dict.fromkeys(("scales", "decays", "peak_decays", "planes"), 0),
        "windows": 2,
        "length": 3,
        "peak_length": 3,
    }
    length: int = 17  # that of [Wu]'s toys
    layers: int = 24  # a window of 3 crosses the text three times
    seeds: int = 5
    sequences: int = 16
    scales: tuple[float, ...] = (0.1, 1.0, 3.0)  # standard deviation of logits
    windows: tuple[int, ...] = (2, 3, 5, 9, 13)
    prefixes: tuple[int, ...] = (1, 2, 4, 6)
    decays: tuple[float, ...] = (0.1, 0.2231, 1.0)  # -ln 0.8 is that of [Wu]'s toys
    peak_length: int = 128  # several times the distance of most peaks: the beginning gathers mass of its own
    peak_layers: int = 8
    peak_decays: tuple[float, ...] = (0.1, 0.2, 0.5, 1.0)
    planes: tuple[int, ...] = (13, 15, 17, 19)  # of RoPE

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("windows", "prefixes"):
            if (largest := max(getattr(self, name))) > self.length:
                raise InputError(f"{name}={largest} does not fit {self.length} positions; give at most {self.length}")
        if (largest := max(self.planes)) >= (most := PEAK_WIDTH // 2):
            raise InputError(f"planes={largest} is no plane of {PEAK_WIDTH} dimensions; give 0 to {most - 1}")

    def cases(self) -> dict[str, dict[str, Any]]:
        """The switches of all masks and encodings, by their names in the result."""
        return {
            "causal": {},
            **{f"window {w}": {"mask": "window", "window": w} for w in self.windows},
            **{f"prefix {k}": {"mask": "prefix", "prefix": k} for k in self.prefixes},
            **{f"decay {m:g}": {"positional": "decay", "decay": m} for m in self.decays},
            "rope": {"positional": "rope"},
        }


QUICK = Settings(
    layers=16, seeds=2, sequences=6, scales=(0.1, 1.0), windows=(3, 5, 9), prefixes=(2, 4), decays=(0.2231,)
)


def counts(name: str = "") -> dict[str, Measure]:
    """The variables that say how many numbers are beyond their bounds, and how many were compared."""
    texts = {"violations": "numbers beyond their bounds", "checked": "numbers compared with their bounds"}
    return {f"{name}{what}": Measure(text, dtype=np.int64) for what, text in texts.items()}


LIMITS = {
    "outside": Measure("P(z_i >= K) of the last query (K = 1 without a prefix), mean over sequences", "1", ("layer",)),
    "outside_bound": Measure("its bound with each sequence's own eps, mean over sequences", "1", ("layer",)),
    "share": Measure("least P(z_i = j) of the first K tokens, over queries and sequences", "1", ("layer",)),
    "eps": Measure("smallest visible entry of all patterns"),
    **counts(),
    **counts("decay_"),
}
CURVE = Measure(
    "rollout of the last query by distance, mean over sequences", "1", ("peak_layer", "distance"), np.float32
)
REACHED = {
    "beyond": Measure(
        "share beyond the first token of the last query's row, mean over sequences where anything arrives",
        "1",
        ("layer",),
    ),
    "gone": Measure("sequences of which nothing arrives at the last query", "1", ("layer",)),
}
COUNTS = {"decay": "decay_peak_", "rope": "rope_", "planes": "planes_"}


def measure(s: Settings, work: Work) -> xr.Dataset:
    """Roll out everything; the variables' own names say what they mean."""
    scales, cases = {f"fresh, logits {scale:g}": scale for scale in s.scales}, s.cases()
    coords: dict[str, Any] = {
        "case": [*cases],
        "source": [*scales],
        "seed": [*range(s.seeds)],
        "layer": [*range(s.layers)],
        "peak_layer": [*range(s.peak_layers)],
        "distance": [*range(s.peak_length)],
        "decay": [*s.peak_decays],
        "scale": [*PEAK_SCALES],
        "noise": [*NOISES],
        "theta": angles()[[*s.planes]].tolist(),
        "turned": [*TURNED],
        "attention": [*OTHERS],
    }

    def toy(source: str, seed: int, **switches: Any) -> Attending:
        return fresh(s.length, s.layers, s.sequences, scales[source], seed, **switches)

    def limit(case: str, source: str, seed: int) -> dict[str, Any]:
        patterns = toy(source, seed, **cases[case]).patterns()
        products = products_of(patterns)
        found = limits(patterns, products, cases[case].get("window"), cases[case].get("prefix"))
        if m := cases[case].get("decay"):
            found |= beyond_bounds("decay_", patterns, products, *falling(s.length, m))
        return found

    def reached(attention: str, source: str, seed: int) -> dict[str, Any]:
        name = attention.removesuffix(SUMMED)
        return beyond_first(toy(source, seed, attention=name).patterns(), summed=name != attention)

    def walked(name: str, toy: Attending, lost: np.ndarray, bounds: BoundsAt) -> dict[str, Any]:
        patterns = toy.patterns()
        products = products_of(patterns)
        last = products[:, :, -1, ::-1].mean(0)
        return {f"{name}_curve": last} | beyond_bounds(COUNTS[name], patterns, products, lost, bounds)

    walks: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
        "decay": (("decay", "scale", "seed"), decaying),
        "rope": (("theta", "noise", "seed"), in_one_plane),
        "planes": (("turned", "noise", "seed"), in_planes),
    }
    parts = [computed(work, "rollouts", coords, ("case", "source", "seed"), LIMITS, limit)]
    for name, (axes, walk) in walks.items():
        measures = {f"{name}_curve": CURVE} | counts(COUNTS[name])
        parts.append(computed(work, name, coords, axes, measures, lambda *at, n=name, of=walk: walked(n, *of(s, *at))))
    parts.append(computed(work, "other attention", coords, ("attention", "source", "seed"), REACHED, reached))
    return sweep(coords, *parts)


# -- toys


def angles() -> Float[np.ndarray, " plane"]:
    """Radians per token of the planes of RoPE, as `model.rotation` has them."""
    return THETA ** (-2 * np.arange(PEAK_WIDTH // 2) / PEAK_WIDTH)


class Attending(NamedTuple):
    """A toy of one head, float64, and inputs."""

    architecture: Architecture
    weights: Mapping[str, Tensor]
    inputs: Float[Tensor, "sequence position d"]

    def patterns(self) -> Patterns:
        """Of all blocks, lowest layer first."""
        a = self.architecture
        switches = Switches(*(None if x is None else x.double() for x in vars(Switches.of([a])).values()))  # type: ignore[arg-type]
        blocks = patterns(a, {name: x[None] for name, x in self.weights.items()}, switches, self.inputs[None])
        return torch.stack([one[0, :, 0] for one in blocks], 1).numpy()


def fresh(length: int, layers: int, sequences: int, scale: float, seed: int, **switches: Any) -> Attending:
    """A fresh toy whose first block's logits have this standard deviation.

    It has no residual stream and no feed-forward; the norm keeps logits from vanishing with depth.
    """
    sizes = {"blocks": layers, "width": WIDTH, "length": length}
    a = Architecture(**sizes, vocabulary=None, outputs=1, residual=False, norm="rms", **switches)
    weights = {name: tensor.double() for name, tensor in initial(a, seed).items()}
    for layer in range(layers):
        weights[f"{layer}.q"] *= scale / LOGIT_SD
    return Attending(a, weights, _drawn(seed, sequences, length, WIDTH))


def turning(s: Settings, noise: float, seed: int, query: Tensor, key: Tensor) -> Attending:
    """A toy with RoPE that reads one vector with noise, makes this query and key of it, and hands on what it reads."""
    sizes = {"blocks": s.peak_layers, "width": PEAK_WIDTH, "length": s.peak_length}
    switches: Any = {"residual": False, "positional": "rope", "output_projection": False}
    a = Architecture(**sizes, vocabulary=None, outputs=1, **switches)
    weights = {name: torch.zeros_like(tensor).double() for name, tensor in initial(a, seed).items()}
    for layer in range(s.peak_layers):
        weights[f"{layer}.q"][0], weights[f"{layer}.k"][0] = query, key
        weights[f"{layer}.v"] += torch.eye(PEAK_WIDTH, dtype=torch.float64)
    inputs = _drawn(seed, s.sequences, s.peak_length, PEAK_WIDTH) * noise
    inputs[..., 0] += 1
    return Attending(a, weights, inputs)


def _drawn(seed: int, *size: int) -> Tensor:
    """Normal inputs, the same for every case."""
    generator = torch.Generator().manual_seed(seed_of(seed, INPUT_BLOCK))
    return torch.randn(size, generator=generator, dtype=torch.float64)


Walked: TypeAlias = tuple[Attending, np.ndarray, BoundsAt]  # a toy, what its logits lose by distance (nats), the bounds


def falling(length: int, m: float) -> tuple[np.ndarray, BoundsAt]:
    """What logits lose by distance under a decay mask, nats, and its bounds."""
    return m * np.arange(length), lambda t, B: decay_bounds(length, t, m, B)


def decaying(s: Settings, m: float, scale: float, seed: int) -> Walked:
    """4.4 and 4.5."""
    toy = fresh(s.peak_length, s.peak_layers, s.sequences, scale, seed, positional="decay", decay=m)
    return toy, *falling(s.peak_length, m)


def in_one_plane(s: Settings, theta: float, noise: float, seed: int) -> Walked:
    """4.6 and 4.7, on inputs that are nearly the same vector; the lemma's square is what logits lose."""
    vector = torch.tensor(angles() == theta) * (TURNING * PEAK_WIDTH**0.5) ** 0.5
    vector = torch.cat([vector, torch.zeros_like(vector)])
    lost = TURNING / 2 * (np.arange(s.peak_length) * theta) ** 2
    return turning(s, noise, seed, vector, vector), lost, partial(turned_bounds, lost)


def in_planes(s: Settings, kind: str, noise: float, seed: int) -> Walked:
    """RoPE in several planes, against `turned_bounds`."""
    query, key, lost = directions(kind, s.peak_length, seed)
    return turning(s, noise, seed, query, key), lost, partial(turned_bounds, lost)


def directions(
    kind: str, length: int, seed: int
) -> tuple[Float[Tensor, " d"], Float[Tensor, " d"], Float[np.ndarray, " distance"]]:
    """(query, key, what a logit loses by distance) of drawn directions in several planes of RoPE.

    `kind`: "slow" (planes that turn by half a circle at most over the text) or "all", and "aligned" (keys point where
    queries do) or "random". The seed decides what is drawn in a plane, of every kind.
    """
    theta, generator = angles(), torch.Generator().manual_seed(seed_of(seed, DIRECTION_BLOCK))
    real, imaginary = torch.randn(2, 2, len(theta), generator=generator, dtype=torch.float64)
    turn = torch.tensor((theta * (length - 1) <= math.pi) | kind.startswith("all"))
    query, key = torch.complex(real, imaginary) * turn
    key = query if kind.endswith("aligned") else key
    scale = PEAK_WIDTH**-0.5  # of logits
    factor = (TURNING / (scale * float((query.abs() * key.abs()).sum()))) ** 0.5
    query, key = query * factor, key * factor
    loss = turned_loss(length, (query.abs() * key.abs()).numpy() * scale, theta, (query.angle() - key.angle()).numpy())
    return torch.cat([query.real, query.imag]), torch.cat([key.real, key.imag]), loss


# -- theorems


def products_of(these: Patterns) -> Patterns:
    """The products of the patterns up to each layer."""
    return np.stack([rollout(one) for one in these])


def limits(these: Patterns, products: Patterns, window: int | None = None, prefix: int | None = None) -> dict[str, Any]:
    """Theorem 4.1, 4.2 or 4.3, by the mask's window or prefix: every P(z_i >= j), and every share of a prefix.

    Bounds are those of each sequence's own eps. The names are those of the result's variables; `outside`,
    `outside_bound` and `share` are by layer.
    """
    layers, length = these.shape[1:3]
    seen, first = visible(length, window=window, prefix=prefix), prefix or 1
    violations = checked = 0
    smallest, outside, bounds = [], [], []
    for one, product in zip(these, products, strict=True):
        # No entry is zero; one that float64 took for zero makes every bound 1.
        eps = max(float(one[:, seen].min()), TINY)
        bound = window_bound(length, layers, eps, window) if window else causal_bound(length, layers, eps)
        at_or_above = product[..., ::-1].cumsum(-1)[..., ::-1]  # [layer, query, key]
        if prefix:
            bound[:, :prefix] = 1
            violations += int((product[..., :prefix] < eps * (1 - ROUNDING)).sum())
            checked += product[..., :prefix].size
        violations += int((at_or_above > bound[:, None] * (1 + ROUNDING)).sum())
        checked += at_or_above.size
        smallest.append(eps)
        outside.append(at_or_above[:, -1, first] if first < length else np.zeros(layers))
        bounds.append(bound[:, first] if first < length else np.zeros(layers))
    means = {"outside": np.mean(outside, 0), "outside_bound": np.mean(bounds, 0)}
    share = products[..., :first].min((0, 2, 3))
    return {"violations": violations, "checked": checked, "eps": min(smallest), "share": share} | means


def beyond_bounds(name: str, these: Patterns, products: Patterns, lost: np.ndarray, bounds: BoundsAt) -> dict[str, int]:
    """How many entries of all patterns and rollouts are beyond their bounds, and how many were compared.

    Of patterns and rollouts of a causal toy whose logits lose `lost` [T] nats by distance; `bounds` are those of a rollout,
    with each sequence's own B.
    """
    layers, length = products.shape[1:3]
    i, j = np.tril_indices(length)
    violations = 0
    for pattern, product in zip(these, products, strict=True):
        rest = np.full(pattern.shape, np.nan)  # of a logit, up to a constant per query
        rest[:, i, j] = np.log(np.maximum(pattern[:, i, j], TINY)) + lost[i - j]
        B = float((np.nanmax(rest, -1) - np.nanmin(rest, -1)).max()) / 2
        for t in range(layers):
            for entries, (low, high) in ((product[t], bounds(t, B)), (pattern[t], bounds(0, B))):
                below = entries[i, j] < low[i - j] * (1 - ROUNDING)
                violations += int((below | (entries[i, j] > high[i - j] * (1 + ROUNDING))).sum())
    return {f"{name}violations": violations, f"{name}checked": 2 * layers * len(these) * len(i)}


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


def beyond_first(own: Patterns, *, summed: bool) -> dict[str, Float[np.ndarray, " layer"]]:
    """Of weights whose rows have any sum, or (`summed`) were divided by it: what is beyond the first token.

    `beyond` is that share of the last query's row of the product, mean over the sequences where anything arrives, `gone` the
    share of sequences where nothing does.
    """
    sums = own.sum(-1, keepdims=True)
    these = own / np.where(sums > 0, sums, 1) if summed else own
    last = np.stack([shares(one)[:, -1] for one in these])  # [sequence, layer, key]
    arrives = last.sum(-1) > 0
    beyond = last[..., 1:].sum((0, -1)) / np.maximum(arrives.sum(0), 1)
    return {"beyond": np.where(arrives.any(0), beyond, np.nan), "gone": 1 - arrives.mean(0)}
