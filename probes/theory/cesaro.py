"""Cesàro: what uniform attention alone makes of position, [Chowdhury], arXiv 2603.10123.

Positions are 0-based, T tokens, L blocks. Row i of a block's matrix says which positions the state at i is mixed from;
a row of the product says which input positions a state of the top is mixed from. Everything is in float64; no
model is needed.

Without content, attention at i averages over all it sees: the Cesàro
matrix M_ij = 1 / (i + 1) for j <= i, or 1 / min(i + 1, w) for i - w < j <= i under a sliding window w. A residual
stream of share 1 - alpha makes N = (1 - alpha) I + alpha M of it, and the influence of position j on the query is
entry j of row `query` of N^L. `cesaro_row` pulls that row down block by block: (r M)_j = sum_{i >= j} r_i / (i + 1) is
a running sum from the end.

For T -> infinity, with x in (0, 1] the place as a fraction of the text, one averaging multiplies x by a uniform number.
After k of them -ln x is a sum of k standard exponentials, a Gamma(k) variable, so that x has the density
(ln 1/x)^(k-1) / (k-1)!, and the mass below b is Q(k, ln 1/b), the regularized upper incomplete gamma function. k is L
without residuals and binomial (L, alpha) with them; k = 0, no averaging at all, is a point mass (1 - alpha)^L at x = 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike
from scipy.optimize import minimize_scalar
from scipy.special import expit, gammainc, gammaln, logsumexp, xlogy

from ..errors import InputError
from ..results.curves import rms_log_error

LOGITS = np.linspace(-32, 32, 257)  # of alpha, where the fit looks first: from 1e-14 to 1 - 1e-14, dense at both ends
WORST = 1e4  # stands for an infinite log error in the fit; logarithms of float64 differ by less than 1,500


class CesaroFit(NamedTuple):
    """The uniform-attention curve that is nearest to a measured one in shape."""

    alpha: float  # the share of attention in every block, in (0, 1]; no unit
    error: float  # root mean square over the compared positions of ln(curve / profile)
    curve: Float[np.ndarray, " position"]  # the theory's row, scaled to the measured profile and in its unit


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
    at_least("length", length, 1)
    at_least("blocks", blocks, 0)
    check_share(alpha)
    windows = list(window) if isinstance(window, Sequence) else [window] * blocks
    if len(windows) != blocks:
        raise InputError(f"there are {len(windows)} windows for {blocks} blocks; give one per block, or one for all")
    for width in windows:
        if width is not None:
            at_least("window", width, 1)
    if not -length <= query < length:
        raise InputError(f"query is {query} for {length} tokens; give from {-length} to {length - 1}")
    row = np.zeros(length)
    seen = row[: query % length + 1]  # all a causal model can draw on
    seen[-1] = 1.0
    count = np.arange(1, len(seen) + 1)
    for one in reversed(windows):
        width = min(one or len(seen), len(seen))
        seen[:] = (1 - alpha) * seen + alpha * _sums_ahead(seen / np.minimum(count, width), width)
    return row


def _sums_ahead(x: Float[np.ndarray, " n"], reach: int) -> Float[np.ndarray, " n"]:
    """Of each entry and those behind it, `reach` in all.

    The rest of the entry's own chunk and the beginning of the next: differences of running sums would leave rounding where
    the answer is zero, out of a window's reach, and drown small entries in the rounding of large ones.
    """
    chunks = np.pad(x, (0, (-len(x)) % reach + reach)).reshape(-1, reach)
    rest = chunks[:, ::-1].cumsum(1)[:, ::-1].copy()
    rest[:-1, 1:] += chunks[1:, :-1].cumsum(1)
    return rest.ravel()[: len(x)]


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
    at_least("blocks", blocks, 1)
    check_share(alpha)
    return (1.0 - alpha) ** blocks


def cesaro_bins(length: int, blocks: int, *, alpha: float = 1.0) -> Float[np.ndarray, " position"]:
    """The continuous limit's mass in [j/T, (j+1)/T] for every j, the point mass in the last one; sums to 1.

    Differences of P = 1 - Q(k, ln 1/x), which vanishes at x = 1: small masses near the query keep their digits. Point
    samples of the density would lose nearly all mass of a deep model, see `cesaro_density`.

    Args:
        length: T, the number of bins.
        blocks: L, 1 or more.
        alpha: the share of attention, from 0 to 1.

    Source: [Chowdhury], arXiv 2603.10123, the same density; its integral over a bin is ours.
    """
    at_least("length", length, 1)
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
        InputError: the profile has values that are negative or not finite, or shares fewer than 3 positive positions with
            the theory (two say little about a shape); or as in `cesaro_row`.

    Source: the curves are [Chowdhury]'s, arXiv 2603.10123; fitting alpha is ours.
    """
    measured = np.asarray(profile, dtype=np.float64)
    if measured.ndim != 1:
        raise InputError(f"the profile has shape {list(measured.shape)}; give one curve over positions")
    good = np.isfinite(measured) & (measured >= 0)
    if not np.all(good):
        at = int(np.argmin(good))
        raise InputError(f"the profile has the value {measured[at]} at position {at}; give finite ones, zero or more")
    at_least("blocks", blocks, 1)

    def row(alpha: float) -> Float[np.ndarray, " position"]:
        return cesaro_row(len(measured), blocks, alpha=alpha, window=window, query=query)

    used = (measured > 0) & (row(0.5) > 0)  # where the theory is zero does not depend on alpha within (0, 1]
    if used.sum() < 3:
        raise InputError(
            f"the profile and the theory are both positive at {used.sum()} positions; give a profile with at least 3"
        )

    def error(alpha: float) -> float:
        return min(rms_log_error(row(alpha)[used], measured[used], free_scale=True), WORST)

    grid = [error(alpha) for alpha in expit(LOGITS).tolist()]
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


def _averagings(blocks: int, alpha: float) -> tuple[Float[np.ndarray, " k"], Float[np.ndarray, " k"]]:
    """How many blocks average, from 1 on, and the log of each number's chance; chances of zero are left out."""
    at_least("blocks", blocks, 1)
    check_share(alpha)
    k = np.arange(1.0, blocks + 1)
    ways = gammaln(blocks + 1) - gammaln(k + 1) - gammaln(blocks - k + 1)
    weight = ways + xlogy(blocks - k, 1 - alpha) + xlogy(k, alpha)
    possible = weight > -math.inf
    return k[possible], weight[possible]


def _depth(place: Float[np.ndarray, "*x"]) -> Float[np.ndarray, "*x"]:
    """ln(1 / x), infinite at 0 and +0 at 1."""
    with np.errstate(divide="ignore"):
        return np.asarray(0.0 - np.log(place))


def check_share(alpha: float) -> None:
    if not 0 <= alpha <= 1:
        raise InputError(f"alpha is {alpha}; give a share of attention from 0 to 1")


Windows = int | None | Sequence[int | None]  # one for all blocks, or one per block, lowest block first; None: causal


def at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InputError(f"{name} is {value}; give at least {least}")
