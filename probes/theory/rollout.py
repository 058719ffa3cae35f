"""Rollout: what a product of attention patterns makes of position, and the bounds on it of [Wu].

Positions are 0-based, T tokens, L blocks. Row i of a block's matrix says which positions the state at i is mixed
from; a row of the product says which input positions a state of the top is mixed from. Everything is numpy in
float64, and no model is needed.

Any patterns, no residuals, [Wu], arXiv 2502.01951 (ICML 2025). P(t) = A(t) ... A(0) has at i, j the chance P(z_i = j)
that a walk from i, which takes one step per layer from the top down, ends at j. Let every visible entry be eps or more.

- Theorem 4.1, causal mask. A walk at k >= j sees all j positions below j and so falls below j with chance j eps or
  more; it never comes back up. Hence P(z_i >= j) <= (1 - j eps)^(t+1) after t + 1 layers: all mass goes to token 0.
- Theorem 4.2, window w >= 2. Every position comes to each of those below it within m = ceil((T-1) / (w-1)) steps of at
  most w - 1 (resting is a step), along a path of probability eps^m or more. Hence
  P(z_i >= j) <= (1 - j eps^m)^floor((t+1) / m).
- Theorem 4.3, prefix mask. The K tokens of the prefix are seen by every query, those of the prefix included. For
  j >= K the argument of 4.1 holds as it stands; and whatever the walk did before, its last step takes it to a given
  token of the prefix with chance eps or more.
- Theorem 4.5, decay mask: logits l_ij - (i-j) m with |l_ij| <= B. By Lemma 4.4 an entry lies between
  e^{-2B} e^{-(i-j)m} / Z and e^{2B} e^{-(i-j)m}, with Z = sum_{k<T} e^{-km}. A path's steps add up to its distance x,
  so every path weighs e^{-xm}; paths that never rise number C(t+x, x), the ways to write x as t + 1 steps of zero or
  more. Hence P = Theta(C(t+x, x) e^{-xm}). From x to x + 1 the curve grows by (t+x+1) / (x+1) e^{-m}, which is 1 or
  more just as long as x + 1 <= t / (e^m - 1).
- Theorem 4.7, RoPE. By Lemma 4.6 entries decay like e^{-r (i-j)^2}, r = c theta^2, as long as turns are small. Paths of
  one distance then weigh differently: their squared steps add up to between x^2 / (t+1), all equal, and x^2, one step.
  The constants of the paper's Theta(C(t+x, x) e^{-r x^2}) hence hide up to e^{r x^2 t / (t+1)}, which is bounded since
  T is fixed, but no constant: for t > 0 the true curve decays more slowly than the theorem's, and peaks where that one
  does or further back.
- RoPE in several planes (the paper's App. I; this bound is ours). Plane p turns by theta_p per token. If query and key
  are s_p long there (the product of their lengths, scaled as logits are) and phi_p apart, a logit loses
  f(x) = sum_p s_p (cos phi_p - cos(x theta_p + phi_p)) over the distance x. With a and b the least and the largest
  f(x) / x^2 of all x from 1 to T-1, a path of squared steps S loses between a S and b S, and S is x^2 / (t+1) to x^2.
  Hence P lies between C(t+x, x) e^{-b x^2} and C(t+x, x) e^{-a x^2 / (t+1)} times the constants of one plane; where a or b
  is negative, S takes its other end. The bound holds for any angles, but it decays only if a > 0: no distance may have a
  larger logit than distance 0. Aligned planes, phi_p = 0, have that, as 1 - cos is never negative: then b is at most
  sum_p s_p theta_p^2 / 2, and planes within one turn, (T-1) theta_p < 2 pi, keep a above 0. Faster planes add to b alone.
  An angle adds s_p sin(phi_p) sin(x theta_p), which is linear in x: it has to be small beside theta_p, or positive.
  Queries and keys of random directions do not have that.

Rows of attention that do not sum to 1, sigmoid or ReLU in place of softmax. A(t)_ij >= 0 is the weight of position j for
query i, whatever its row sums to. Rows of the product P(t) do not sum to 1 either; what is compared is each position's share
of its row. The theorems are about walks, that is about rows that sum to 1; the paper remarks that other attention need not
take all mass to the first token. What follows is ours.

- Let s_j(t) be the sum of row j of P(t). The shares after layer t are those of the patterns
  A_ij s_j(t-1) / sum_k A_ik s_k(t-1), whose rows do sum to 1: a position weighs the more, the more has reached it. Under
  softmax all s are 1, and nothing changes. Under a causal mask the first token reads only itself, so that s_0(t) is the
  product of its weights A_00, while others collect: the least entry of those patterns may fall with depth, and
  Theorem 4.1 then has no eps to stand on.
- Equal weights below and on the diagonal, as of a sigmoid at logits 0: P is that weight's power times the number of paths
  C(t+x, x), and token 0 has the share (t+1) / (t+T) of the last query. The rest, (T-1) / (t+T), goes like 1 / t and not
  exponentially.
- One pattern in every layer, lower triangular and positive: its diagonal has its eigenvalues, and the largest, at m, wins.
  Shares converge to the left eigenvector of m, which has no entry above m and has some at every position up to it. So all
  mass goes to the first token only if no other weighs itself more. Softmax does that, A_00 being 1, and a sigmoid does not.
- Rows divided by their sums are patterns as those of softmax: with a least entry above zero Theorem 4.1 holds. ReLU has no
  such entry: it takes edges out of the mask, and a query whose keys are all below zero receives nothing.
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from numpy.typing import ArrayLike
from scipy.special import gammaln, logsumexp

from ..errors import InputError
from .cesaro import at_least, check_share

ROW_SUM = 1e-4  # how far the sum of a pattern's row may be from 1: beyond float32's rounding, below half precision's


class Bounds(NamedTuple):
    """What an entry of the rollout lies between, by distance i - j. Probabilities, both [distance]."""

    low: Float[np.ndarray, " distance"]
    high: Float[np.ndarray, " distance"]


# ------------------------------------------------------------------------------------------------- any patterns, [Wu]


def visible(length: int, *, window: int | None = None, prefix: int | None = None) -> Bool[np.ndarray, "query key"]:
    """Which keys a query sees: those up to itself; of them the last `window`; also all of the first `prefix`.

    Raises:
        InputError: a number is out of its range.

    Source: [Wu], arXiv 2502.01951, the masks of Theorems 4.1, 4.2 and 4.3.
    """
    at_least("length", length, 1)
    back = np.arange(length)[:, None] - np.arange(length)
    mask = back >= 0
    if window is not None:
        at_least("window", window, 1)
        mask &= back < window
    if prefix is not None:
        if not 1 <= prefix <= length:
            raise InputError(f"prefix is {prefix} for {length} tokens; give from 1 to {length}")
        mask[:, :prefix] = True
    return mask


def rollout(
    patterns: Float[np.ndarray, "layer query key"], *, alpha: float | None = None
) -> Float[np.ndarray, "layer query key"]:
    """All partial products of a model's attention patterns, lowest layer first: entry t is A(t) ... A(0).

    Args:
        patterns: one row-stochastic matrix per layer (a model's heads averaged, say).
        alpha: if given, every factor is (1 - alpha) I + alpha A: residual streams of share 1 - alpha are counted.

    Raises:
        InputError: the patterns are not [layer, position, position], have negative entries, or rows whose sum is off 1
            by more than 1e-4; or alpha is not from 0 to 1.

    Source: [Wu], arXiv 2502.01951, P(t) of its theorems; with alpha [Chowdhury]'s N, arXiv 2603.10123.
    """
    factors = np.asarray(patterns, dtype=np.float64)
    if factors.ndim != 3 or factors.shape[1] != factors.shape[2] or not factors.size:
        raise InputError(
            f"patterns have shape {list(factors.shape)}; give [layer, query, key], as many keys as queries"
        )
    sums = factors.sum(axis=2)
    wrong = ~(np.all(factors >= 0, axis=2) & (np.abs(sums - 1) <= ROW_SUM))  # NaN is wrong, too
    if wrong.any():
        layer, query = (int(index) for index in np.argwhere(wrong)[0])
        raise InputError(
            f"row {query} of layer {layer} has entries from {factors[layer, query].min():g} and sum "
            f"{sums[layer, query]:g}; give patterns whose rows are probabilities"
        )
    if alpha is not None:
        check_share(alpha)
        factors = (1 - alpha) * np.eye(factors.shape[1]) + alpha * factors
    products = np.empty_like(factors)
    products[0] = factors[0]
    for layer in range(1, len(factors)):
        products[layer] = factors[layer] @ products[layer - 1]
    return products


def causal_bound(length: int, layers: int, eps: float) -> Float[np.ndarray, "layer key"]:
    """(1 - j eps)^(t+1): what P(z_i >= j), hence P(z_i = j), is at most after t + 1 layers of causal attention, any i.

    With a prefix of K tokens that every query sees the same holds for j >= K, and P(z_i = j) is eps or more for j < K.

    Args:
        length: T, tokens.
        layers: rows of the result; row t is for t + 1 layers.
        eps: what every entry on or below the diagonal of every pattern is at least; at most 1 / T.

    Raises:
        InputError: a number is out of its range.

    Source: [Wu], arXiv 2502.01951, Theorems 4.1 and 4.3, with their constants.
    """
    return window_bound(length, layers, eps, max(length, 2))


def window_bound(length: int, layers: int, eps: float, window: int) -> Float[np.ndarray, "layer key"]:
    """(1 - j eps^m)^floor((t+1)/m), m = ceil((T-1)/(w-1)): the same as `causal_bound`, under a sliding window.

    Args:
        length: T, tokens.
        layers: rows of the result; row t is for t + 1 layers.
        eps: what every visible entry of every pattern is at least; at most 1 / min(T, w).
        window: w, the positions a query sees, itself included; 2 or more, for a query has to see beyond itself.

    Raises:
        InputError: a number is out of its range.

    Source: [Wu], arXiv 2502.01951, Theorem 4.2, with its constant.
    """
    at_least("length", length, 1)
    at_least("layers", layers, 1)
    at_least("window", window, 2)
    seen, crossing = min(length, window), max(1, -(-(length - 1) // (window - 1)))
    if not 0 < eps <= (1 + ROW_SUM) / seen:
        raise InputError(f"eps is {eps}; give the smallest visible entry, above 0 and at most 1/{seen}: rows sum to 1")
    falls, times = np.arange(length) * eps**crossing, np.arange(1, layers + 1) // crossing
    return np.maximum(1 - falls, 0.0) ** times[:, None]  # where eps was rounded up, a chance just below zero is zero


def decay_rollout(distance: int | float | ArrayLike, t: int, m: float) -> Float[np.ndarray, "*distance"]:
    """C(t+x, x) e^{-xm}, the shape over the distance x = i - j that t + 1 layers of a decay mask have up to constants.

    No probability: it counts paths, and goes beyond 1. Of the shape of `distance`, which is in tokens.

    Raises:
        InputError: a number is out of its range.

    Source: [Wu], arXiv 2502.01951, Theorem 4.5.
    """
    _rate("m", m)
    x = np.asarray(distance, dtype=np.float64)
    if not np.all(np.isfinite(x) & (x >= 0)):
        raise InputError(f"distance is {x[~(np.isfinite(x) & (x >= 0))].flat[0]}; give tokens, 0 or more")
    with np.errstate(over="ignore"):  # more paths than float64 can count are infinitely many
        return np.asarray(np.exp(_paths(x, t) - x * m))


def decay_bounds(length: int, t: int, m: float, B: float) -> Bounds:
    """What entry i, j of a rollout of t + 1 decay-masked layers lies between, for distances i - j from 0 to T - 1.

    (e^{-2B} / Z)^(t+1) and e^{2B(t+1)} times `decay_rollout`, with Z = sum_{k<T} e^{-km}; never above 1.

    Args:
        length: T, tokens.
        t: index of the top layer, the lowest being 0.
        m: what a logit loses per token of distance, 0 or more.
        B: what the rest of a logit is at most, either way.

    Raises:
        InputError: a number is out of its range.

    Source: [Wu], arXiv 2502.01951, Lemma 4.4 and Theorem 4.5, with their constants.
    """
    at_least("length", length, 1)
    _rate("m", m)
    loss = np.arange(length) * m
    return _bounds(loss, loss, loss, t, B)


def decay_peak(t: int, m: float) -> float:
    """t / (e^m - 1), in tokens: the floor of it is the distance at which `decay_rollout` is largest.

    If it is a whole number, the distance before is just as good. Without decay, m = 0, the curve never falls: infinite.

    Raises:
        InputError: a number is out of its range.

    Source: [Wu], arXiv 2502.01951, from the curve of Theorem 4.5.
    """
    at_least("t", t, 0)
    _rate("m", m)
    return t * math.exp(-m) / -math.expm1(-m) if m > 0 else math.inf


def turned_loss(
    length: int, strength: ArrayLike, theta: ArrayLike, phase: ArrayLike = 0.0
) -> Float[np.ndarray, " distance"]:
    """sum_p s_p (cos phi_p - cos(x theta_p + phi_p)), nats that RoPE takes off a logit, for distances x from 0 to T - 1.

    Args:
        length: T, tokens.
        strength: s_p, the lengths of query and key in a plane, multiplied and scaled as logits are. Nats, 0 or more.
        theta: radians per token by which the plane turns.
        phase: phi_p, radians from the key to the query in the plane, before they are turned.

    Source: ours, for App. I of [Wu], arXiv 2502.01951.
    """
    planes = np.broadcast_arrays(*(np.atleast_1d(one) for one in (strength, theta, phase)))
    size, angle, apart = (one[:, None] for one in planes)
    return (size * (np.cos(apart) - np.cos(angle * np.arange(length) + apart))).sum(0)


def turned_rates(loss: Float[np.ndarray, " distance"]) -> tuple[float, float]:
    """The least and the largest f(x) / x^2 of a loss by distance, x from 1 on, nats per squared token; 0 for one token."""
    rates = loss[1:] / np.arange(1, len(loss)) ** 2
    return (float(rates.min()), float(rates.max())) if len(rates) else (0.0, 0.0)


def turned_bounds(loss: Float[np.ndarray, " distance"], t: int, B: float) -> Bounds:
    """What entry i, j of a rollout of t + 1 layers with logits l_ij - f(i-j), |l_ij| <= B, lies between.

    One plane is the case f(x) = c theta^2 x^2 of Theorem 4.7: with r = c theta^2 and Z = sum_{k<T} e^{-r k^2},
    (e^{-2B} / Z)^(t+1) C(t+x, x) e^{-r x^2}, as the squared steps of a path add up to x^2 at most; and
    e^{2B(t+1)} C(t+x, x) e^{-r x^2 / (t+1)}, as they add up to x^2 / (t+1) at least; never above 1. The module's text has
    the derivation for several planes and what it needs.

    Args:
        loss: f by distance, as of `turned_loss`; 0 at distance 0.
        t: index of the top layer, the lowest being 0.
        B: what the rest of a logit is at most, either way.

    Raises:
        InputError: a number is out of its range.

    Source: [Wu], arXiv 2502.01951, Lemma 4.6 and Theorem 4.7; the upper bound's exponent and several planes (App. I) are
    ours.
    """
    low, high = turned_rates(loss)
    squares = np.arange(len(loss), dtype=np.float64) ** 2
    most, least = (squares * rate / (t + 1 if spread else 1) for rate, spread in ((high, high < 0), (low, low > 0)))
    return _bounds(most, least, loss, t, B)


def rope_peak(t: int, c: float, theta: float, length: int) -> int:
    """The distance from 0 to T - 1 at which C(t+x, x) e^{-c x^2 theta^2} is largest, the larger one of two equal. Tokens.

    `c` is what a logit loses per squared radian of turn, `theta` radians per token of the plane that turns. The product of
    the decays themselves, without logits or normalizers, peaks there or further back: a path's weight is the curve's times
    e^{2 r (sum of products of two steps)}, and one more unit of distance only adds to that sum.

    Raises:
        InputError: a number is out of its range.

    Source: [Wu], arXiv 2502.01951, from the curve of Theorem 4.7.
    """
    at_least("length", length, 1)
    at_least("t", t, 0)
    _rate("c", c)
    x = np.arange(length - 1, dtype=np.float64)
    # The growth from x to x + 1 falls with x, so that the curve rises as often as it is 1 or more.
    return int(np.sum(np.log1p(t / (x + 1)) >= c * theta**2 * (2 * x + 1)))


def shares(weights: Float[np.ndarray, "layer query key"]) -> Float[np.ndarray, "layer query key"]:
    """Rows of all partial products, each divided by its sum, lowest layer first; zeros where nothing reaches a query.

    Args:
        weights: one matrix per layer, entries 0 or more, rows of any sum.

    Raises:
        InputError: the weights are not [layer, position, position], or some are negative or not finite.

    Source: ours; for rows that sum to 1, P(t) of [Wu], arXiv 2502.01951.
    """
    factors = np.asarray(weights, dtype=np.float64)
    if factors.ndim != 3 or factors.shape[1] != factors.shape[2] or not factors.size:
        raise InputError(f"weights have shape {list(factors.shape)}; give [layer, query, key], as many keys as queries")
    if not (np.isfinite(factors) & (factors >= 0)).all():
        raise InputError("some weights are negative or not finite; give numbers, 0 or more")
    reached, below, found = np.zeros(factors.shape[1]), np.eye(factors.shape[1]), np.empty_like(factors)
    with np.errstate(divide="ignore"):
        logs = np.log(factors)
    for layer, weight in enumerate(logs):
        paths = weight + reached  # by logarithms: products of many layers leave float64's range
        reached = np.asarray(logsumexp(paths, axis=1))
        pattern = np.exp(paths - np.where(np.isfinite(reached), reached, 0.0)[:, None])
        found[layer] = below = pattern @ below
    return found


def _paths(distance: Float[np.ndarray, "*x"], t: int) -> Float[np.ndarray, "*x"]:
    """ln C(t+x, x): ways to go down x positions in t + 1 steps of zero or more."""
    at_least("t", t, 0)
    return np.asarray(gammaln(t + distance + 1) - gammaln(distance + 1) - gammaln(t + 1))


def _bounds(
    most: Float[np.ndarray, " x"], least: Float[np.ndarray, " x"], step: Float[np.ndarray, " x"], t: int, B: float
) -> Bounds:
    """Bounds from what the logits of a path lose by its distance, at most and at least, and those of one step."""
    _rate("B", B)
    paths, layers = _paths(np.arange(len(step), dtype=np.float64), t), t + 1
    low = paths - most - layers * (2 * B + np.asarray(logsumexp(-step)))
    high = paths - least + layers * 2 * B
    return Bounds(np.exp(low), np.exp(np.minimum(high, 0.0)))


def _rate(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise InputError(f"{name} is {value}; give a finite number, 0 or more")
