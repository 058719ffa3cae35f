"""Patterns and rollouts of a toy against theorems 4.1 to 4.7 of [Wu], entry by entry; and rollouts of other attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from probes.theory.rollout import Bounds, causal_bound, prefix_bounds, rollout, turned_loss, visible, window_bound
from probes.theory.unnormalized import shares

from ...model import Architecture, Switches
from ...view import Toy
from ..in_context import patterns

ROUNDING = 1e-9  # relative, of sums and products of positive float64 numbers, after dozens of them
TINY = float(np.finfo(np.float64).tiny)
SUMMED = ", rows sum to 1"  # behind the name of an attention: its rows were divided by their sums
Rollouts = Float[np.ndarray, "sequence layer query key"]


class Look(NamedTuple):
    """A toy's attention on several sequences, lowest layer first, float64."""

    logits: Float[np.ndarray, "sequence layer query key"]  # with decay; minus infinity where the query does not look
    patterns: Float[np.ndarray, "sequence layer query key"]

    def rollouts(self) -> Rollouts:
        """The products of the patterns up to each layer."""
        return np.stack([rollout(one) for one in self.patterns])


def look_at(toy: Toy, inputs: Tensor) -> Look:
    """Logits and patterns of a toy of one head on token ids [sequence, T], or vectors [sequence, T, d]."""
    embeddings = toy.embed(inputs) if inputs.dtype == torch.long else toy.placed(inputs)
    attention = toy.trace(embeddings, attention=True).attention
    logits = torch.stack([one.logits()[:, 0] for one in attention], 1)
    return Look(logits.numpy(), logits.softmax(-1).numpy())


class Limit(NamedTuple):
    """Theorem 4.1, 4.2 or 4.3 against a toy's rollouts; the fields are variables of the result."""

    violations: int
    checked: int
    eps: float
    outside: Float[np.ndarray, " layer"]
    outside_bound: Float[np.ndarray, " layer"]
    share: Float[np.ndarray, " layer"]


def check(window: int | None, prefix: int | None, look: Look, products: Rollouts) -> Limit:
    """Every P(z_i >= j), and every share of a prefix, against its bound with the sequence's own eps.

    Args:
        window: of the mask, in tokens, if it has one.
        prefix: of the mask, in tokens, if it has one.
        look: of the toy.
        products: its rollouts.
    """
    layers, length = look.patterns.shape[1:3]
    seen = visible(length, window=window, prefix=prefix)
    first = prefix or 1
    violations = checked = 0
    smallest, outside, bounds = [], [], []
    for one, product in zip(look.patterns, products, strict=True):
        # No entry is zero; one that float64 took for zero makes every bound 1.
        eps = max(float(one[:, seen].min()), TINY)
        if window is not None:
            bound = window_bound(length, layers, eps, window)
        elif prefix is not None:
            bound = prefix_bounds(length, layers, eps, prefix).outside
            inside = product[..., :prefix]
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


def decays_hold(look: Look, products: Rollouts, lost: np.ndarray, bounds: Callable[[int, float], Bounds]) -> Held:
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


def directions(
    kind: str, angles: Float[np.ndarray, " plane"], length: int, turning: float, generator: torch.Generator
) -> tuple[Float[Tensor, " d"], Float[Tensor, " d"], Float[np.ndarray, " distance"]]:
    """(query, key, what a logit loses by distance) of drawn directions in several planes of RoPE.

    Args:
        kind: "slow" (planes that turn by half a circle at most over the text) or "all", and "aligned" or "random".
        angles: radians per token, of all planes.
        length: of the text.
        turning: the planes' strengths together, nats.
        generator: what is drawn in a plane does not depend on the kind.
    """
    which, how = kind.split()
    real, imaginary = torch.randn(2, 2, len(angles), generator=generator, dtype=torch.float64)
    drawn = torch.complex(real, imaginary) * torch.tensor((angles * (length - 1) <= math.pi) | (which == "all"))
    query, key = drawn[0], drawn[0 if how == "aligned" else 1]
    scale = (2 * len(angles)) ** -0.5  # of logits
    factor = (turning / (scale * float((query.abs() * key.abs()).sum()))) ** 0.5
    query, key = query * factor, key * factor
    loss = turned_loss(length, (query.abs() * key.abs()).numpy() * scale, angles, (query.angle() - key.angle()).numpy())
    return torch.cat([query.real, query.imag]), torch.cat([key.real, key.imag]), loss


def beyond_first(
    architecture: Architecture, weights: Mapping[str, Tensor], inputs: Float[Tensor, "sequence T d"]
) -> dict[str, tuple[Float[np.ndarray, " layer"], Float[np.ndarray, " layer"]]]:
    """By "" and `SUMMED`, of a float64 toy of one head: (share beyond the first token of the last query's row, mean over
    the sequences where anything arrives; sequences where nothing does).
    """
    switches = Switches.of([architecture])
    switches = replace(switches, bias=switches.bias.double(), keep=switches.keep.double())
    blocks = patterns(architecture, {name: x[None] for name, x in weights.items()}, switches, inputs[None])
    own = torch.stack([one[0, :, 0] for one in blocks], 1).numpy()  # [sequence, layer, query, key]
    sums, found = own.sum(-1, keepdims=True), {}
    for rows, these in (("", own), (SUMMED, own / np.where(sums > 0, sums, 1))):
        last = np.stack([shares(one)[:, -1] for one in these])  # [sequence, layer, key]
        arrives = last.sum(-1) > 0
        beyond = last[..., 1:].sum((0, -1)) / np.maximum(arrives.sum(0), 1)
        found[rows] = np.where(arrives.any(0), beyond, np.nan), 1 - arrives.mean(0)
    return found
