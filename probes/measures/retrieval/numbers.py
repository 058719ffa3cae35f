"""What a result of `retrieval` says: whether recall is a U in depth, and what the mechanism tells of it.

What the numbers are stands on the measure's page (`docs/probes/retrieval.md`). Intervals are the jackknife's over couples of
contexts, each of which is the other's control. That of a share of exact answers lies between 0 and 1; where all answers are
alike it is what so many couples leave open (Clopper and Pearson). Of the mechanism there are none from fewer than `FEWEST`
couples; `context` is on profiles. AUC counts ties half (Mann and Whitney). Variance explained is 1 - (squared errors) /
(those of the mean), all of couples that the fit of log p has not seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Float

from ...results.statistics import Interval, couples, jackknife, jackknifed
from ...results.ushape import SHORTEST, middle_of, shape_over
from .context import PROFILES, SLOPES, UNKNOWN, crosswise, follows, if_enough, log_distance, reliability, slopes

TROUGHS = 1000  # resamples for where recall is lowest
SLOPE = "slope on the log norm of "
SHIFTS = ("p under shifts", "deviation under shifts")  # of `ShiftNull`
SHOWN = {  # by what it is called: variable, part, and words
    "pair": ("sensitivity", "pair", "pair"),
    "control": ("sensitivity_control", "pair", "key not there"),
    "others": ("sensitivity", "others", "other pairs"),
    "position 0": ("sensitivity", "position 0", "position 0"),
    "through_first": ("through_first", "pair", "through attention to position 0"),
    "cut": ("cut", "pair", "all other paths"),
    "norm": ("norm", "pair", "norm"),
}


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
    if "sensitivity" not in ds:
        return found
    found["AUC of the pair's sensitivity for exact answers"] = auc(ds)
    return found | {f"variance of log p explained by log distance{more}": of for more, of in explained(ds).items()}


def auc(ds: xr.Dataset) -> Interval:
    """Of pairs of questions at one depth, with a jackknife over couples; NaN where all or none were answered."""
    exact, score = _at_places(ds, "exact"), ds["sensitivity"].sel(part="pair").values

    def estimate(some: Float[np.ndarray, "context place two"]) -> float:
        right, wrong = some[:, None, :, 0] > 0.5, some[None, :, :, 0] < 0.5
        counted = right & wrong  # [context, context, place]
        difference = some[:, None, :, 1] - some[None, :, :, 1]
        return float((np.sign(difference) / 2 + 0.5)[counted].mean()) if counted.any() else math.nan

    return _over_couples(estimate, np.stack([exact, score], -1), couples(ds, "traced"))


def explained(ds: xr.Dataset) -> dict[str, Interval]:
    """Explained variance of log p: by log distance (""), and what the pair's sensitivity, or norm, adds to it."""
    log_p, unit = _at_places(ds, "log_p"), couples(ds, "traced")
    known = ds["depth"].values.searchsorted(ds["traced_depth"].values)
    distance = np.broadcast_to(log_distance(ds)[known], log_p.shape)
    couple = np.broadcast_to(unit[:, None], log_p.shape)
    found = {}
    for name, said in {"sensitivity": "the pair's sensitivity", "norm": "the pair's norm"}.items():
        with np.errstate(divide="ignore"):  # what a window cuts off has no logarithm, and does not count
            score = np.log(ds[name].sel(part="pair").values)
        values = np.stack([couple, log_p, distance, score], -1)
        found[""] = _over_couples(lambda some: _left_out(some, 3), values, unit)
        found[f", more with {said}"] = _over_couples(lambda some: _left_out(some, 4) - _left_out(some, 3), values, unit)
    return found


def _left_out(values: Float[np.ndarray, "context place column"], columns: int) -> float:
    """Variance of column 1 explained by columns 2 to `columns`, couples (column 0) left out in turn."""
    rows = values.reshape(-1, values.shape[-1])
    rows = rows[np.isfinite(rows).all(-1)]
    errors, plain = 0.0, 0.0
    for couple in np.unique(rows[:, 0]):
        own = rows[:, 0] == couple
        if own.all():
            return math.nan
        features = np.column_stack([np.ones(len(rows)), rows[:, 2:columns]])
        fit = np.linalg.lstsq(features[~own], rows[~own, 1], rcond=None)[0]
        errors += float(np.sum((rows[own, 1] - features[own] @ fit) ** 2))
        plain += float(np.sum((rows[own, 1] - rows[~own, 1].mean()) ** 2))
    return 1 - errors / plain if plain > 0 else math.nan


def _at_places(ds: xr.Dataset, name: str) -> Float[np.ndarray, "traced place"]:
    return ds[name].sel(context=ds["traced"].values, depth=ds["traced_depth"].values).values


def _over_couples(estimate: Callable[[np.ndarray], float], values: np.ndarray, unit: np.ndarray) -> Interval:
    return if_enough(jackknifed(estimate, values, unit), unit)


def by_depth(ds: xr.Dataset, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One of `SHOWN` at the traced depths: geometric mean over contexts, low and high end over couples, [place]."""
    variable, part, _ = SHOWN[name]
    with np.errstate(divide="ignore"):
        logs = np.log(ds[variable].sel(part=part).values)
    mean, low, high = jackknife(lambda some: some.mean(0), logs, couples(ds, "traced"))
    return np.exp(mean), np.exp(low), np.exp(high)
