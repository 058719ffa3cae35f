"""Rollout where the rows of attention do not sum to 1: sigmoid or ReLU in place of softmax.

Notation as in `rollout`; A(t)_ij >= 0 is the weight of position j for query i, whatever its row sums to. Rows of the
product P(t) = A(t) ... A(0) do not sum to 1 either; what is compared is each position's share of its row. The theorems
of [Wu] are about walks, that is about rows that sum to 1; the paper remarks that other attention need not take all mass
to the first token. What follows is ours.

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

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from scipy.special import gammaln, logsumexp

from ..errors import InputError
from .cesaro import at_least


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


def even_shares(length: int, t: int) -> Float[np.ndarray, " distance"]:
    """C(t+x, x) / C(t+T, t+1): the last query's shares by distance x after t + 1 causal layers of equal weights.

    Raises:
        InputError: a number is out of its range.

    Source: ours.
    """
    at_least("length", length, 1)
    at_least("t", t, 0)
    x = np.arange(length)
    paths = gammaln(t + x + 1) - gammaln(x + 1) - gammaln(t + 1)
    return np.exp(paths - np.asarray(logsumexp(paths)))
