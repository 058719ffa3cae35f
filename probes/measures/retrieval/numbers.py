"""What a result of `retrieval` says: whether recall is a U in depth, and what the mechanism tells of it.

What the numbers are stands on the measure's page (`docs/probes/retrieval.md`). Intervals are the jackknife's over couples of
contexts, each of which is the other's control. That of a share of exact answers lies between 0 and 1; where all answers are
alike it is what so many couples leave open (Clopper and Pearson). Of the mechanism there are none from fewer than `FEWEST`
couples; `context` is on profiles.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import xarray as xr

from ...results.statistics import Interval, couples, jackknifed
from ...results.ushape import SHORTEST, middle_of, shape_over
from .context import PROFILES, SLOPES, UNKNOWN, crosswise, follows, reliability, slopes

TROUGHS = 1000  # resamples for where recall is lowest
SLOPE = "slope on the log norm of "
SHIFTS = ("p under shifts", "deviation under shifts")  # of `ShiftNull`


class Recall(NamedTuple):
    """How recall depends on depth; intervals over couples of contexts."""

    exact: Interval  # share of exact answers
    gain: Interval  # nat, mean
    first: Interval  # the first pair against the middle half, ratio of probabilities
    last: Interval  # the last pair against it
    trough: Interval  # where recall is least, from 0 to 1


def shape(ds: xr.Dataset) -> Recall:
    """The U-shape of a result of `retrieval`; NaN for the U of fewer than 8 depths."""
    unit = couples(ds)
    exact, gain = (jackknifed(lambda some: float(some.mean()), ds[name].values, unit) for name in ("exact", "gain"))
    surely = 1 - 0.025 ** (1 / len(np.unique(unit)))  # as often as an end is left open where all answers are alike
    low, high = (1 - surely, surely) if exact.value in (0, 1) else (exact.low, exact.high)
    exact = exact._replace(low=max(0.0, low if exact.value else 0.0), high=min(1.0, high if exact.value < 1 else 1.0))
    curve = shape_over(ds["log_p"].values[:, None], unit, bootstrap=TROUGHS)
    lowest = curve.trough_fraction if ds.sizes["depth"] >= SHORTEST else UNKNOWN
    return Recall(exact, gain, curve.first, curve.last, lowest)


def edges(ds: xr.Dataset, name: str) -> tuple[Interval, Interval]:
    """How much better the first pair and the last one are recalled than the middle half, by `log_p` or `exact`.

    Differences of means over contexts, the middle's the median over its depths; NaN for fewer than 8 depths.
    """

    def better(end: int) -> Interval:
        def difference(some: np.ndarray) -> float:
            curve = some.mean(0)
            return float(curve[end] - middle_of(curve))

        return jackknifed(difference, ds[name].values, couples(ds)) if ds.sizes["depth"] >= SHORTEST else UNKNOWN

    return better(0), better(-1)


def statements(ds: xr.Dataset) -> dict[str, Interval]:
    """All that a result of `retrieval` with a mechanism says, by name; profiles that it lacks are left out."""
    found = {}
    for name in (name for name in PROFILES if name in ds or name == "log_distance"):
        rho, null = follows(ds, name)
        said = (
            f"{'' if name == 'log_distance' else 'partial '}rank correlation over depth of gain with {PROFILES[name]}"
        )
        alone = {f"{said}, {of}": UNKNOWN._replace(value=value) for of, value in zip(SHIFTS, null, strict=True)}
        found |= {said: rho} | alone
    if "norm_profile" in ds:
        found["the same, gain of half of the lists with the norm behind the other half"] = UNKNOWN._replace(
            value=crosswise(ds)
        )
        for name, said in {"gain": "gain", "norm_profile": PROFILES["norm_profile"]}.items():
            found[f"reliability of what is left of {said}"] = UNKNOWN._replace(value=reliability(ds, name))
        found |= {SLOPE + SLOPES[name]: of for name, of in slopes([ds]).items()}
    return found
