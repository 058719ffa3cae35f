"""The U-shape of a profile: what primacy, middle, recency and trough are, and which positions count as which.

A profile is a curve over positions, how much the last one depends on each. Its beginning is the first `EDGE` of the
positions, its middle the median over the middle half, its end the last position. `primacy` is beginning / middle, `recency`
end / middle, the trough is where the smoothed curve is lowest. `shape_of` gives these of one curve, `shape_over` of the
geometric mean of many, with intervals; `probes.shape` is the latter of a result.

One prompt, looked at token by token (`probes.inspect`), is divided into parts instead: position 0 is the sink, and the
recency part is as long as the profile is high (`parts_of`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from .curves import smooth
from .statistics import Interval, ends, freedom, jackknife, resampling

EDGE = 0.05  # the share of positions that counts as the beginning
NUMBERS = ("first", "middle", "last", "primacy", "primacy_behind_0", "recency")
PARTS = ("sink", "rest", "recency")
RECENCY = 2.0  # how far a profile stands above its middle in the recency part
SHORTEST = 8  # positions below which a curve has no middle to speak of

Number: TypeAlias = Any  # a float of one curve, an `Interval` of many


class Shape(NamedTuple):
    """How much the ends of a curve stand out from its middle: of one curve numbers, of many their mean's with intervals.

    Ratios are NaN where the middle is 0, as where a window cuts it off.
    """

    first: Number  # mean over the first 5 % of positions, in the curve's unit
    middle: Number  # median over positions T/4 <= j < 3T/4
    last: Number  # the last position
    primacy: Number  # first / middle
    primacy_behind_0: Number  # the same without position 0
    recency: Number  # last / middle
    trough: int  # position of the minimum of the smoothed curve
    trough_fraction: Number  # trough / (T - 1)


def shape_of(curve: ArrayLike) -> Shape:
    """The shape of one curve [position]; NaN but for the trough where it is shorter than 8."""
    values = np.asarray(curve, dtype=np.float64)
    trough = int(np.argmin(smooth(values)))
    return Shape(**numbers(values), trough=trough, trough_fraction=trough / max(1, len(values) - 1))


def shape_over(
    logs: Float[np.ndarray, "sample other position"],
    unit: Int[np.ndarray, " sample"],
    *,
    bootstrap: int = 0,
) -> Shape:
    """The shape of the geometric mean of curves, given by their logarithms (-inf for a zero), with 95 % intervals.

    Args:
        logs: of samples (prompts or runs), each with as many others (runs or prompts).
        unit: which of the samples belong together; the jackknife leaves one out at a time, and ratios are taken by their
            logarithms.
        bootstrap: resamples of the units for the trough, which is a place and jumps; 0: it has no interval.
    """
    drawn = resampling(len(logs), bootstrap if len(np.unique(unit)) > 1 else 0, 0, documents=list(map(str, unit)))
    places = troughs(logs.mean(1), drawn.astype(np.float64))
    fraction = places / max(1, logs.shape[-1] - 1)
    low, high = (float(end[0]) for end in ends(fraction[:, None]))
    found = intervals(log_numbers, logs, unit)
    return Shape(**found, trough=int(places[0]), trough_fraction=Interval(float(fraction[0]), low, high))


def intervals(
    estimate: Callable[[np.ndarray], np.ndarray],
    logs: Float[np.ndarray, "sample other position"],
    unit: Int[np.ndarray, " sample"],
) -> dict[str, Interval]:
    """`NUMBERS` from an estimate of their logarithms, jackknifed over units."""
    found = np.exp(np.stack(jackknife(estimate, logs, unit), 1))
    return {name: Interval(*map(float, found[n]))._replace(freedom=freedom(unit)) for n, name in enumerate(NUMBERS)}


def log_numbers(logs: Float[np.ndarray, "sample other position"]) -> Float[np.ndarray, " number"]:
    """Logarithms of `NUMBERS` of the geometric mean."""
    with np.errstate(divide="ignore"):
        return np.log(list(numbers(np.exp(logs.mean((0, 1)))).values()))


def beginning(length: int) -> int:
    """How many positions count as the beginning."""
    return math.ceil(EDGE * length)


def middle_of(curve: Float[np.ndarray, " position"]) -> float:
    """The median over positions T/4 <= j < 3T/4."""
    length = len(curve)
    return float(np.median(curve[math.ceil(length / 4) : math.ceil(3 * length / 4)]))


def numbers(curve: Float[np.ndarray, " position"]) -> dict[str, float]:
    """The `NUMBERS` of `shape_of`; NaN where a curve is too short for a middle, ratios NaN where the middle is 0."""
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
    return np.argmin(smooth(curves), axis=1).astype(np.float64)


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
