"""What a result of `retrieval` says of recall by depth: its U-shape, its ends against its middle, what pairs make of it.

Intervals are the jackknife's over couples of contexts, each of which is the other's control (`mechanism_numbers.couples`).
That of a share of exact answers lies between 0 and 1; where all answers are alike it is what so many couples leave open
(Clopper and Pearson).

Source: ours; science of the measurement, section 11.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import xarray as xr

from ...errors import InputError
from ...results.dataset import options_of
from ...results.statistics import Interval, couples, jackknifed
from ...results.ushape import SHORTEST, beginning, middle_of, shape_over

TROUGHS = 1000  # resamples for where recall is lowest


class Recall(NamedTuple):
    """How recall depends on depth; intervals over couples of contexts."""

    exact: Interval  # share of exact answers
    log_p: Interval  # nat, mean
    gain: Interval  # nat, mean
    primacy: Interval  # the first 5 % of the pairs against the middle half, ratio of probabilities
    recency: Interval  # the last pair against it
    trough: Interval  # where recall is least, from 0 to 1


def shape(ds: xr.Dataset) -> Recall:
    """The U-shape of a result of `retrieval`; NaN for the U of fewer than 8 depths."""
    unit = couples(ds)

    def mean(name: str) -> Interval:
        return jackknifed(lambda some: float(some.mean()), ds[name].values, unit)

    exact, log_p, gain = map(mean, ("exact", "log_p", "gain"))
    surely = 1 - 0.025 ** (1 / len(np.unique(unit)))  # as often as an end is left open where all answers are alike
    low, high = (1 - surely, surely) if exact.value in (0, 1) else (exact.low, exact.high)
    exact = exact._replace(low=max(0.0, low if exact.value else 0.0), high=min(1.0, high if exact.value < 1 else 1.0))
    curve = shape_over(ds["log_p"].values[:, None], unit, bootstrap=TROUGHS)
    lowest = curve.trough_fraction if ds.sizes["depth"] >= SHORTEST else Interval(math.nan, math.nan, math.nan)
    return Recall(exact, log_p, gain, curve.primacy, curve.recency, lowest)


def edges(ds: xr.Dataset, name: str) -> tuple[Interval, Interval]:
    """How much better the first 5 % of the pairs and the last pair are recalled than the middle half, by `log_p` or `exact`.

    Differences of means over contexts, the middle's the median over its depths; NaN for fewer than 8 depths.
    """
    unit, length = couples(ds), ds.sizes["depth"]

    def better(end: slice) -> Interval:
        if length < SHORTEST:
            return Interval(math.nan, math.nan, math.nan)

        def difference(some: np.ndarray) -> float:
            curve = some.mean(0)
            return float(curve[end].mean() - middle_of(curve))

        return jackknifed(difference, ds[name].values, unit)

    return better(slice(0, beginning(length))), better(slice(-1, None))


def repeats(ds: xr.Dataset) -> Interval:
    """Correlation of a pair's `log_p` with its own in another order of the list, means of depths taken out.

    What is left to 1 is due to the order of the others and to the pair's depth where that acts on pairs differently.

    Raises:
        InputError: a result of one order, or of a part of the pairs.
    """
    orders = options_of(ds).get("orders", 1)
    if orders < 2 or ds.sizes["depth"] < options_of(ds)["pairs"]:
        raise InputError("the result has each pair in one order; measure with orders=2 or more, and all depths")
    rest = ds["log_p"].values - ds["log_p"].values.mean(0)
    by_pair = np.take_along_axis(rest, ds["pair"].values.argsort(-1), -1)
    grouped = by_pair.reshape(-1, orders, 2, by_pair.shape[-1])

    def intraclass(some: np.ndarray) -> float:
        squares = float((some**2).sum())
        return (float((some.sum(1) ** 2).sum()) - squares) / ((orders - 1) * squares)

    return jackknifed(intraclass, grouped, np.arange(len(grouped)))
