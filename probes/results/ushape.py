"""The U-shape of a profile: what primacy, middle, recency and trough are, and which positions count as which.

A profile is a curve over positions, how much the last one depends on each. Its beginning is the first `EDGE` of the
positions, its middle the median over the middle half, its end the last position. `primacy` is beginning / middle, `recency`
end / middle, the trough is where the smoothed curve is lowest. `ushape` gives these of one curve; `numbers` gives sizes,
too, for intervals.

One prompt, looked at token by token (`probes.inspect`), is divided into parts instead: position 0 is the sink, and the
recency part is as long as the profile is high (`parts_of`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from ..errors import InputError
from .curves import one_curve, smooth, smoothed

EDGE = 0.05  # the share of positions that counts as the beginning
NUMBERS = ("first", "middle", "last", "primacy", "primacy behind 0", "recency")
PARTS = ("sink", "rest", "recency")
RECENCY = 2.0  # how far a profile stands above its middle in the recency part
SHORTEST = 8  # positions below which a curve has no middle to speak of


class UShape(NamedTuple):
    """How much the ends of a curve stand out from its middle. Ratios have no unit."""

    primacy: float  # mean over the first 5 % of positions / middle
    recency: float  # last position / middle
    middle: float  # median over positions T/4 <= j < 3T/4, in the curve's unit
    trough: int  # position of the minimum of the smoothed curve
    trough_fraction: float  # trough / (T - 1)


def ushape(profile: ArrayLike) -> UShape:
    """The U-shape summary of one sensitivity curve [position].

    Where the middle is zero (a sliding window can cut it off altogether) the ratios are infinite, or NaN for 0 / 0.

    Raises:
        InputError: the curve is not one-dimensional, is shorter than 8, or has values that are negative or not finite.
    """
    curve = one_curve(profile, "the curve")
    length = len(curve)
    if length < SHORTEST:
        raise InputError(f"a curve of {length} positions has no middle to compare with; give at least {SHORTEST}")
    if not np.all(np.isfinite(curve) & (curve >= 0)):
        at = int(np.flatnonzero(~(np.isfinite(curve) & (curve >= 0)))[0])
        raise InputError(
            f"the curve has the value {curve[at]} at position {at}; give finite sensitivities, zero or more"
        )
    middle = middle_of(curve)
    with np.errstate(divide="ignore", invalid="ignore"):
        primacy = np.mean(curve[: beginning(length)]) / middle
        recency = curve[-1] / middle
    trough = int(np.argmin(smooth(curve)))
    return UShape(float(primacy), float(recency), float(middle), trough, trough / (length - 1))


def beginning(length: int) -> int:
    """How many positions count as the beginning."""
    return math.ceil(EDGE * length)


def middle_of(curve: Float[np.ndarray, " position"]) -> float:
    """The median over positions T/4 <= j < 3T/4."""
    length = len(curve)
    return float(np.median(curve[math.ceil(length / 4) : math.ceil(3 * length / 4)]))


def numbers(curve: Float[np.ndarray, " position"]) -> dict[str, float]:
    """A profile in `NUMBERS`; NaN where it is too short for a middle, ratios NaN where the middle is 0."""
    length = len(curve)
    if length < SHORTEST:
        return dict.fromkeys(NUMBERS, math.nan)
    edge, middle, last = beginning(length), middle_of(curve), float(curve[-1])
    first, behind = float(np.mean(curve[:edge])), float(np.mean(curve[1:edge])) if edge > 1 else math.nan
    ratios = [x / middle if middle > 0 else math.nan for x in (first, behind, last)]
    return dict(zip(NUMBERS, (first, middle, last, *ratios), strict=True))


def troughs(
    logs: Float[np.ndarray, "sample position"], weights: Float[np.ndarray, "resample sample"]
) -> Float[np.ndarray, " resample"]:
    """Position of the smoothed mean curve's minimum in every resample, of the logarithms of curves (-inf for a zero)."""
    cut = np.isinf(logs).any(0)
    curves = np.exp(weights @ np.where(cut, 0.0, logs) / weights.sum(1, keepdims=True))
    curves[:, cut] = 0
    return np.argmin(smoothed(curves), axis=1).astype(np.float64)


def parts_of(profile: Float[np.ndarray, " position"]) -> np.ndarray:
    """The part of every position of a profile, one of `PARTS`.

    Position 0 is the sink. The last position is recency, and so are those right before it for as long as the profile is
    more than `RECENCY` times its median over the middle half of the positions that it reaches at all.
    """
    length = len(profile)
    start = int(np.argmax(profile > 0))  # 0 where none is
    quarter = (length - start) // 4
    high = profile[:-1] > RECENCY * np.median(profile[start + quarter : length - quarter])
    parts = np.full(length, "rest", dtype="<U7")
    parts[np.flatnonzero(~high).max(initial=0) + 1 :] = "recency"
    parts[0] = "sink"
    return parts
