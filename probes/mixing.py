"""Theories that see a transformer as a product of row-stochastic matrices: what averaging alone makes of position.

Positions are 0-based, T tokens, L blocks. Row i of a block's matrix says out of which positions the state at i is
mixed; a row of the product says which input positions a state of the top is mixed out of. Everything is numpy in
float64, and no model is needed.

Uniform attention, [Chowdhury], arXiv 2603.10123. Without content, attention at i averages over all it sees: the Cesàro
matrix M_ij = 1 / (i + 1) for j <= i, or 1 / min(i + 1, w) for i - w < j <= i under a sliding window w. A residual
stream of share 1 - alpha makes N = (1 - alpha) I + alpha M of it, and the influence of position j on the query is
entry j of row `query` of N^L. `cesaro_row` pulls that row down block by block: (r M)_j = sum_{i >= j} r_i / (i + 1) is
a running sum from the end.

For T -> infinity, with x in (0, 1] the place as a fraction of the text, one averaging multiplies x by a uniform number.
After k of them -ln x is a sum of k standard exponentials, a Gamma(k) variable, so that x has the density
(ln 1/x)^(k-1) / (k-1)!, and the mass below b is Q(k, ln 1/b), the regularized upper incomplete gamma function. k is L
without residuals and binomial (L, alpha) with them; k = 0, no averaging at all, is a point mass (1 - alpha)^L at x = 1.

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
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from numpy.typing import ArrayLike
from scipy.optimize import minimize_scalar
from scipy.special import expit, gammainc, gammaln, logsumexp, xlogy

from .errors import InputError
from .summary import rms_log_error

Windows = int | None | Sequence[int | None]  # one for all blocks, or one per block, lowest block first; None: causal

ROW_SUM = 1e-4  # how far the sum of a pattern's row may be from 1: beyond float32's rounding, below half precision's
LOGITS = np.linspace(-32, 32, 257)  # of alpha, where the fit looks first: from 1e-14 to 1 - 1e-14, dense at both ends
WORST = 1e4  # stands for an infinite log error in the fit; logarithms of float64 differ by less than 1,500


class CesaroFit(NamedTuple):
    """The uniform-attention curve that is nearest to a measured one in shape."""

    alpha: float  # the share of attention in every block, in (0, 1]; no unit
    error: float  # root mean square over the compared positions of ln(curve / profile)
    curve: Float[np.ndarray, " position"]  # the theory's row, scaled to the measured profile and in its unit


class PrefixBounds(NamedTuple):
    """What Theorem 4.3 leaves outside a prefix, and what it gives to it. Probabilities."""

    outside: Float[np.ndarray, "layer key"]  # P(z_i >= key) is at most this after layer + 1 layers; 1 inside the prefix
    share: float  # P(z_i = j) is at least this for every token j of the prefix, after any number of layers


class Bounds(NamedTuple):
    """What an entry of the rollout lies between, by distance i - j. Probabilities, both [distance]."""

    low: Float[np.ndarray, " distance"]
    high: Float[np.ndarray, " distance"]


# -------------------------------------------------------------------------------------- uniform attention, [Chowdhury]


def cesaro_row(
    length: int, blocks: int, *, alpha: float = 1.0, window: Windows = None, query: int = -1
) -> Float[np.ndarray, " position"]:
    """The influence of every position on the query under uniform causal attention: a row of N^L, which sums to 1.

    Every entry is exact up to the rounding of float64 relative to itself, however small it is (below 1e-308 it may be
    zero): nothing is subtracted on the way. Takes O(L T) time and O(T) memory. Positions after the query, and those no
    window reaches, hold exactly 0.

    Args:
        length: T, tokens.
        blocks: L; 0 gives the query alone.
        alpha: the share of attention, from 0 (residual stream only) to 1 (attention only), the same in every block.
        window: positions a query sees, itself included; or one such number (or None) per block, lowest block first.
        query: the position that is influenced, counted from the end if negative.

    Raises:
        InputError: a number is out of its range, or there are not as many windows as blocks.

    Source: [Chowdhury], arXiv 2603.10123, iterated Cesàro matrix with residuals; windows are added here.
    """
    _least("length", length, 1)
    _least("blocks", blocks, 0)
    _share(alpha)
    widths = _widths(window, blocks)
    row = np.zeros(length)
    seen = row[: _position(query, length) + 1]  # all a causal model can draw on
    seen[-1] = 1.0
    for width in reversed(widths):
        seen[:] = _mix(seen, width, alpha)
    return row


def cesaro_density(x: int | float | ArrayLike, blocks: int, *, alpha: float = 1.0) -> Float[np.ndarray, "*x"]:
    """The continuous part of the limit's influence density, per unit of x; of the shape of x.

    sum_{k=1..L} C(L, k) (1-alpha)^(L-k) alpha^k (ln 1/x)^(k-1) / (k-1)!, in logarithms. At x = 0 it is infinite if
    L > 1 and alpha > 0, at x = 1 the k = 1 term is left. It integrates to 1 - `cesaro_point_mass`.

    Do not sample it at positions j / T to get a predicted curve. After 24 averagings half of all mass lies below
    x = e^-23.7, far nearer to the beginning than the first token of any real text, and a sum of samples misses it:
    `cesaro_bins` gives masses of whole tokens.

    Args:
        x: places as fractions of the text, from 0 (beginning) to 1 (the query).
        blocks: L, 1 or more.
        alpha: the share of attention, from 0 to 1.

    Raises:
        InputError: a number is out of its range.

    Source: [Chowdhury], arXiv 2603.10123, influence density of the continuous limit, without and with residuals.
    """
    place = np.asarray(x, dtype=np.float64)
    if not np.all((place >= 0) & (place <= 1)):
        wrong = place[~((place >= 0) & (place <= 1))].flat[0]
        raise InputError(f"x is {wrong}; give fractions of the text, from 0 to 1")
    k, weight = _averagings(blocks, alpha)
    if not len(k):
        return np.zeros_like(place)
    depth = _depth(place)[..., None]
    # logsumexp and exp make numpy scalars of a single place, which are no arrays:
    return np.asarray(np.exp(logsumexp(weight + xlogy(k - 1, depth) - gammaln(k), axis=-1)))


def cesaro_point_mass(blocks: int, alpha: float) -> float:
    """(1 - alpha)^L: the influence that never left the query, a point mass at x = 1 of the continuous limit.

    Raises:
        InputError: a number is out of its range.

    Source: [Chowdhury], arXiv 2603.10123, the recency term of the density with residuals.
    """
    _least("blocks", blocks, 1)
    _share(alpha)
    return (1.0 - alpha) ** blocks


def cesaro_bins(length: int, blocks: int, *, alpha: float = 1.0) -> Float[np.ndarray, " position"]:
    """The continuous limit's mass in [j/T, (j+1)/T] for every j, the point mass in the last one; sums to 1.

    Differences of P = 1 - Q(k, ln 1/x), which vanishes at x = 1: small masses near the query keep their digits. Point
    samples of the density would lose nearly all mass of a deep model, see `cesaro_density`.

    Args:
        length: T, the number of bins.
        blocks: L, 1 or more.
        alpha: the share of attention, from 0 to 1.

    Raises:
        InputError: a number is out of its range.

    Source: [Chowdhury], arXiv 2603.10123, the same density; its integral over a bin is ours.
    """
    _least("length", length, 1)
    depth = _depth(np.arange(length + 1) / length)
    mass = np.zeros(length)
    for k, weight in zip(*_averagings(blocks, alpha), strict=True):
        mass -= math.exp(weight) * np.diff(gammainc(k, depth))
    mass[-1] += cesaro_point_mass(blocks, alpha)
    return mass


def fit_alpha(profile: ArrayLike, blocks: int, *, window: Windows = None, query: int = -1) -> CesaroFit:
    """The share of attention whose `cesaro_row`, times a free constant, is nearest to a measured curve [position].

    Nearest by root mean square log error, over positions up to the query where the profile and the theory are both
    positive: what lies beyond the windows' reach has no logarithm and does not count. The error may have several
    minima; alpha is looked for on a fine grid, dense near 0 and 1, and every minimum of the grid is refined. A model
    without residuals, alpha = 1, is one of the candidates.

    Args:
        profile: sensitivities in any unit, zero or more; values after the query are ignored.
        blocks: L, 1 or more.
        window: as in `cesaro_row`.
        query: the position the sensitivities are of, counted from the end if negative.

    Raises:
        InputError: the profile is not one-dimensional, has values that are negative or not finite, or shares fewer than
            3 positive positions with the theory (two say little about a shape); or as in `cesaro_row`.

    Source: the curves are [Chowdhury]'s, arXiv 2603.10123; fitting alpha is ours.
    """
    measured = np.asarray(profile, dtype=np.float64)
    if measured.ndim != 1 or not len(measured):
        raise InputError(f"the profile has shape {list(measured.shape)}; give one dimension, [position]")
    good = np.isfinite(measured) & (measured >= 0)
    if not np.all(good):
        at = int(np.argmin(good))
        raise InputError(f"the profile has the value {measured[at]} at position {at}; give finite ones, zero or more")
    _least("blocks", blocks, 1)

    def row(alpha: float) -> Float[np.ndarray, " position"]:
        return cesaro_row(len(measured), blocks, alpha=alpha, window=window, query=query)

    used = (measured > 0) & (row(0.5) > 0)  # where the theory is zero does not depend on alpha within (0, 1]
    if used.sum() < 3:
        raise InputError(
            f"the profile and the theory are both positive at {used.sum()} positions; give a profile with at least 3"
        )

    def error(alpha: float) -> float:
        return min(rms_log_error(row(alpha)[used], measured[used], free_scale=True), WORST)

    grid = [error(float(alpha)) for alpha in expit(LOGITS)]
    found = [(error(1.0), 1.0), *zip(grid, expit(LOGITS).tolist(), strict=True)]
    for at in range(1, len(grid) - 1):
        if grid[at] <= min(grid[at - 1], grid[at + 1]):
            bounds = (LOGITS[at - 1], LOGITS[at + 1])
            best: Any = minimize_scalar(
                lambda logit: error(float(expit(logit))), bounds=bounds, method="bounded", options={"xatol": 1e-9}
            )
            found.append((float(best.fun), float(expit(best.x))))
    least, alpha = min(found)
    curve = row(alpha)
    scale = math.exp(np.mean(np.log(measured[used]) - np.log(curve[used])))
    return CesaroFit(alpha, least, scale * curve)


def _mix(row: Float[np.ndarray, " seen"], window: int | None, alpha: float) -> Float[np.ndarray, " seen"]:
    """`row` N: the row after one more block below."""
    size = len(row)
    width = size if window is None else min(window, size)
    share = row / np.minimum(np.arange(1, size + 1), width)
    return (1 - alpha) * row + alpha * _sums_ahead(share, width)


def _sums_ahead(values: Float[np.ndarray, " seen"], width: int) -> Float[np.ndarray, " seen"]:
    """The sum of `width` values from each position on, fewer at the end.

    Differences of one running sum would drown small entries in the rounding of large ones. A stretch of `width` values
    is instead the end of one chunk of that size and the beginning of the next, each a running sum of its own.
    """
    chunks = -(-len(values) // width) + 1
    grid = np.zeros((chunks, width))
    grid.flat[: len(values)] = values
    sums = np.cumsum(grid[:-1, ::-1], axis=1)[:, ::-1].copy()
    sums[:, 1:] += np.cumsum(grid[1:, :-1], axis=1)
    return sums.ravel()[: len(values)]


def _averagings(blocks: int, alpha: float) -> tuple[Float[np.ndarray, " k"], Float[np.ndarray, " k"]]:
    """How many blocks average, from 1 on, and the log of each number's chance; chances of zero are left out."""
    _least("blocks", blocks, 1)
    _share(alpha)
    k = np.arange(1.0, blocks + 1)
    ways = gammaln(blocks + 1) - gammaln(k + 1) - gammaln(blocks - k + 1)
    weight = ways + xlogy(blocks - k, 1 - alpha) + xlogy(k, alpha)
    possible = weight > -math.inf
    return k[possible], weight[possible]


def _depth(place: Float[np.ndarray, "*x"]) -> Float[np.ndarray, "*x"]:
    """ln(1 / x), infinite at 0 and +0 at 1."""
    with np.errstate(divide="ignore"):
        return np.asarray(0.0 - np.log(place))


# ------------------------------------------------------------------------------------------------- any patterns, [Wu]


def visible(length: int, *, window: int | None = None, prefix: int | None = None) -> Bool[np.ndarray, "query key"]:
    """Which keys a query sees: those up to itself; of them the last `window`; or also all of the first `prefix`.

    Raises:
        InputError: a number is out of its range, or a window and a prefix are both given (no theorem here has both).

    Source: [Wu], arXiv 2502.01951, the masks of Theorems 4.1, 4.2 and 4.3.
    """
    _least("length", length, 1)
    back = np.arange(length)[:, None] - np.arange(length)
    mask = back >= 0
    if window is not None:
        if prefix is not None:
            raise InputError(f"a window of {window} and a prefix of {prefix} are both given; give one of them")
        _least("window", window, 1)
        mask &= back < window
    if prefix is not None:
        _prefix(prefix, length)
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
        _share(alpha)
        factors = (1 - alpha) * np.eye(factors.shape[1]) + alpha * factors
    products = np.empty_like(factors)
    products[0] = factors[0]
    for layer in range(1, len(factors)):
        products[layer] = factors[layer] @ products[layer - 1]
    return products


def causal_bound(length: int, layers: int, eps: float) -> Float[np.ndarray, "layer key"]:
    """(1 - j eps)^(t+1): what P(z_i >= j), hence P(z_i = j), is at most after t + 1 layers of causal attention, any i.

    Args:
        length: T, tokens.
        layers: rows of the result; row t is for t + 1 layers.
        eps: what every entry on or below the diagonal of every pattern is at least; at most 1 / T.

    Raises:
        InputError: a number is out of its range.

    Source: [Wu], arXiv 2502.01951, Theorem 4.1, with its constant.
    """
    _least("length", length, 1)
    _least("layers", layers, 1)
    _entry(eps, length)
    return _stays(np.arange(length) * eps, np.arange(1, layers + 1))


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
    _least("length", length, 1)
    _least("layers", layers, 1)
    _least("window", window, 2)
    _entry(eps, min(length, window))
    crossing = max(1, -(-(length - 1) // (window - 1)))
    return _stays(np.arange(length) * eps**crossing, np.arange(1, layers + 1) // crossing)


def prefix_bounds(length: int, layers: int, eps: float, prefix: int) -> PrefixBounds:
    """Under a prefix mask: what is at most left at or above each j outside the prefix, and the least share inside.

    Args:
        length: T, tokens.
        layers: rows of `outside`; row t is for t + 1 layers.
        eps: what every visible entry (see `visible`) of every pattern is at least; at most 1 / T.
        prefix: K, the first tokens that every query sees, from 1 to T.

    Raises:
        InputError: a number is out of its range.

    Source: [Wu], arXiv 2502.01951, Theorem 4.3, with its constants.
    """
    outside = causal_bound(length, layers, eps)
    _prefix(prefix, length)
    outside[:, :prefix] = 1.0
    return PrefixBounds(outside, float(eps))


def decay_rollout(distance: int | float | ArrayLike, t: int, m: float) -> Float[np.ndarray, "*distance"]:
    """C(t+x, x) e^{-xm}, the shape over the distance x = i - j that t + 1 layers of a decay mask have up to constants.

    No probability: it counts paths, and goes beyond 1. Of the shape of `distance`, which is in tokens.

    Raises:
        InputError: a number is out of its range.

    Source: [Wu], arXiv 2502.01951, Theorem 4.5.
    """
    _rate("m", m)
    x = _distances(distance)
    return _curve(_paths(x, t) - x * m)


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
    _least("length", length, 1)
    _rate("m", m)
    x = np.arange(length, dtype=np.float64)
    return _bounds(_paths(x, t), x * m, x * m, t + 1, B)


def decay_peak(t: int, m: float) -> float:
    """t / (e^m - 1), in tokens: the floor of it is the distance at which `decay_rollout` is largest.

    If it is a whole number, the distance before is just as good. Without decay, m = 0, the curve never falls: infinite.

    Raises:
        InputError: a number is out of its range.

    Source: [Wu], arXiv 2502.01951, from the curve of Theorem 4.5.
    """
    _least("t", t, 0)
    _rate("m", m)
    return t * math.exp(-m) / -math.expm1(-m) if m > 0 else math.inf


def rope_rollout(distance: int | float | ArrayLike, t: int, c: float, theta: float) -> Float[np.ndarray, "*distance"]:
    """C(t+x, x) e^{-c x^2 theta^2}, the theorem's shape over the distance x = i - j for t + 1 layers with RoPE.

    No probability, and of the shape of `distance`. The module's text says what the theorem's constants hide.

    Args:
        distance: i - j in tokens, 0 or more.
        t: index of the top layer, the lowest being 0.
        c: what a logit loses per squared radian of turn, 0 or more.
        theta: radians per token of the plane that turns.

    Raises:
        InputError: a number is out of its range.

    Source: [Wu], arXiv 2502.01951, Theorem 4.7.
    """
    rate = _turning(c, theta)
    x = _distances(distance)
    return _curve(_paths(x, t) - x**2 * rate)


def rope_bounds(length: int, t: int, c: float, theta: float, B: float) -> Bounds:
    """What entry i, j of a rollout of t + 1 layers with logits l_ij - c (i-j)^2 theta^2, |l_ij| <= B, lies between.

    With r = c theta^2 and Z = sum_{k<T} e^{-r k^2}, for distances x from 0 to T - 1: (e^{-2B} / Z)^(t+1) times
    `rope_rollout`, as the squared steps of a path add up to x^2 at most; and e^{2B(t+1)} C(t+x, x) e^{-r x^2 / (t+1)},
    as they add up to x^2 / (t+1) at least; never above 1. Arguments as in `rope_rollout` and `decay_bounds`.

    Raises:
        InputError: a number is out of its range.

    Source: [Wu], arXiv 2502.01951, Lemma 4.6 and Theorem 4.7; the upper bound's exponent is ours.
    """
    _least("length", length, 1)
    x = np.arange(length, dtype=np.float64)
    loss = x**2 * _turning(c, theta)
    return _bounds(_paths(x, t), loss, loss / (t + 1), t + 1, B)


def rope_peak(t: int, c: float, theta: float, length: int) -> int:
    """The distance from 0 to T - 1 at which `rope_rollout` is largest, the larger one of two that are equal. Tokens.

    The product of the decays themselves, without logits or normalizers, peaks there or further back: a path's weight
    is the curve's times e^{2 r (sum of products of two steps)}, and one more unit of distance only adds to that sum.

    Raises:
        InputError: a number is out of its range.

    Source: [Wu], arXiv 2502.01951, from the curve of Theorem 4.7.
    """
    _least("length", length, 1)
    _least("t", t, 0)
    x = np.arange(length - 1, dtype=np.float64)
    # The growth from x to x + 1 falls with x, so that the curve rises as often as it is 1 or more.
    return int(np.sum(np.log1p(t / (x + 1)) >= _turning(c, theta) * (2 * x + 1)))


def _stays(falls: Float[np.ndarray, " key"], times: np.ndarray) -> Float[np.ndarray, "layer key"]:
    """(1 - falls)^times; where eps was rounded up, a chance to stay just below zero is zero."""
    return np.maximum(1 - falls, 0.0) ** times[:, None]


def _paths(distance: Float[np.ndarray, "*x"], t: int) -> Float[np.ndarray, "*x"]:
    """ln C(t+x, x): ways to go down x positions in t + 1 steps of zero or more."""
    _least("t", t, 0)
    return np.asarray(gammaln(t + distance + 1) - gammaln(distance + 1) - gammaln(t + 1))


def _bounds(
    paths: Float[np.ndarray, " x"], most: Float[np.ndarray, " x"], least: Float[np.ndarray, " x"], layers: int, B: float
) -> Bounds:
    """Bounds from the log number of paths and what the logits of one lose by distance, at most and at least.

    A single step over the whole distance loses the most, so that `most` is what one layer's logits lose, too.
    """
    _rate("B", B)
    normalizer = float(logsumexp(-most))
    low = paths - most - layers * (2 * B + normalizer)
    high = paths - least + layers * 2 * B
    return Bounds(np.exp(low), np.exp(np.minimum(high, 0.0)))


def _curve(logs: ArrayLike) -> Float[np.ndarray, "*x"]:
    with np.errstate(over="ignore"):  # more paths than float64 can count are infinitely many
        return np.asarray(np.exp(logs))


# --------------------------------------------------------------------------------------------------------- input checks


def _least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InputError(f"{name} is {value}; give at least {least}")


def _share(alpha: float) -> None:
    if not 0 <= alpha <= 1:
        raise InputError(f"alpha is {alpha}; give a share of attention from 0 to 1")


def _rate(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise InputError(f"{name} is {value}; give a finite number, 0 or more")


def _turning(c: float, theta: float) -> float:
    """c theta^2, what a logit loses per squared token."""
    _rate("c", c)
    if not math.isfinite(theta):
        raise InputError(f"theta is {theta}; give finite radians per token")
    return c * theta**2


def _entry(eps: float, seen: int) -> None:
    if not 0 < eps <= (1 + ROW_SUM) / seen:
        raise InputError(f"eps is {eps}; give the smallest visible entry, above 0 and at most 1/{seen}: rows sum to 1")


def _prefix(prefix: int, length: int) -> None:
    if not 1 <= prefix <= length:
        raise InputError(f"prefix is {prefix} for {length} tokens; give from 1 to {length}")


def _position(query: int, length: int) -> int:
    if not -length <= query < length:
        raise InputError(f"query is {query} for {length} tokens; give from {-length} to {length - 1}")
    return query % length


def _widths(window: Windows, blocks: int) -> list[int | None]:
    widths = list(window) if isinstance(window, Sequence) else [window] * blocks
    if len(widths) != blocks:
        raise InputError(f"there are {len(widths)} windows for {blocks} blocks; give one per block, or one for all")
    for width in widths:
        if width is not None:
            _least("window", width, 1)
    return widths


def _distances(distance: int | float | ArrayLike) -> Float[np.ndarray, "*x"]:
    x = np.asarray(distance, dtype=np.float64)
    if not np.all(np.isfinite(x) & (x >= 0)):
        raise InputError(f"distance is {x[~(np.isfinite(x) & (x >= 0))].flat[0]}; give tokens, 0 or more")
    return x
