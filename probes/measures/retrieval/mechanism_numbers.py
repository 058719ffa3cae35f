"""What the mechanism tells of recall: numbers with intervals over couples of contexts, and a verdict in a word.

- Rank correlation over depth of the mean gain (all contexts of a result) with a profile: the model's own behind ordinary
  text, the one at initialization, the second-moment kernel, the norm behind the lists themselves, log distance alone (the
  logarithm of how far before the place of its prediction the value stands). Profiles stay as they are when couples are left
  out. Noise of the mean gain draws all of these towards 0. How much there is, the rank correlation of the gain of half of
  the couples with that of the other half tells (mean over splits). In simulations (36 depths, no relation) 4 to 9 % of the
  intervals exclude 0; percentiles of resampled couples do so for 18 % where there are 4 couples, and are not taken.
- AUC: of two traced questions at one depth, one answered exactly and one not, how often the pair's sensitivity is greater in
  the first (ties count half; Mann and Whitney). Nothing is fitted, so that every context counts as held out.
- Variance explained: 1 - (squared errors) / (those of the mean), all of couples that the fit of log p has not seen, by log
  distance, and what adding the logarithm of the pair's sensitivity changes; once with norms in place of sensitivities.

Verdicts. "nothing": the 90 % interval lies within a margin that was fixed beforehand (science of the measurement, section
8): 0.3 for rank correlations, and for AUC as the rank correlation 2 AUC - 1; 0.02 of the variance, above which it must not
reach, since a fit that carries over worse than none explains nothing, too. "effect": the 95 % interval lies on one side of
what nothing would give, above it for explained variance. Else "undecided". So are all with fewer than `FEWEST` couples, and
a rank correlation near 0 where the gain itself does not repeat (`RELIABLE`: of halves, by Spearman and Brown's formula).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Float

from ...results.curves import spearman
from ...results.statistics import Interval, couples, jackknife, jackknifed

RANK_MARGIN, VARIANCE_MARGIN = 0.3, 0.02
FEWEST = 6  # couples, for an interval
RELIABLE, SPLITS = 0.5, 50  # reliability of the mean gain, from which on a rank correlation near 0 says something
PROFILES = {
    "profile": "the pretrained profile",
    "profile_init": "the profile at initialization",
    "kernel": "the kernel",
    "norm_profile": "the norm behind the lists",
    "log_distance": "log distance",
}
SHOWN = {  # by what it is called: variable and part
    "pair": ("sensitivity", "pair"),
    "others": ("sensitivity", "others"),
    "position 0": ("sensitivity", "position 0"),
    "control": ("sensitivity_control", "pair"),
    "through_first": ("through_first", "pair"),
    "cut": ("cut", "pair"),
    "norm": ("norm", "pair"),
}


class Statement(NamedTuple):
    """A number, and what it says."""

    name: str
    number: Interval
    verdict: str


def statements(ds: xr.Dataset) -> list[Statement]:
    """All that a result of `retrieval` with a mechanism says; profiles that it lacks are left out."""
    gain, unit = ds["gain"].values, couples(ds)
    halves = split_halves(gain, unit)
    said = "rank correlation over depth of gain, half of the couples with the other half"
    found = [Statement(said, Interval(halves, math.nan, math.nan), "-")]
    repeats = 2 * halves / (1 + halves) >= RELIABLE if halves > -1 else False
    for name in (one for one in PROFILES if one in ds or one == "log_distance"):
        number = follows(ds, name)
        word = verdict(number, 0.0, RANK_MARGIN)
        word = word if repeats or word != "nothing" else "undecided"
        found.append(Statement(f"rank correlation over depth of gain with {PROFILES[name]}", number, word))
    number = auc(ds)
    found.append(
        Statement("AUC of the pair's sensitivity for exact answers", number, verdict(number, 0.5, RANK_MARGIN / 2))
    )
    said = "variance of log p explained by log distance"
    for name, number in explained(ds).items():
        found.append(Statement(said + name, number, verdict(number, 0.0, VARIANCE_MARGIN, above=True)))
    return found


def follows(ds: xr.Dataset, profile: str) -> Interval:
    """Rank correlation over depth of the mean gain with one of `PROFILES`, with a jackknife over couples."""
    curve = log_distance(ds) if profile == "log_distance" else ds[profile].values
    return _over_couples(lambda some: spearman(some.mean(0), curve), ds["gain"].values, couples(ds))


def verdict(number: Interval, null: float, margin: float, *, above: bool = False) -> str:
    """The number's verdict: effect, nothing or undecided; `above`: what lies below `null` is nothing, too."""
    if not (math.isfinite(number.low) and math.isfinite(number.high)):
        return "undecided"
    low, high = number.at(0.9)
    if high < null + margin and (above or low > null - margin):
        return "nothing"
    return "effect" if number.low > null or (number.high < null and not above) else "undecided"


def log_distance(ds: xr.Dataset) -> Float[np.ndarray, " depth"]:
    """Logarithm of how many tokens before the place of its prediction each value begins."""
    return np.log(ds.attrs["query"] - ds["place"].values)


def split_halves(gain: Float[np.ndarray, "context depth"], unit: np.ndarray) -> float:
    """Rank correlation over depth of the mean gain of half of the couples with that of the rest; NaN for a single one."""
    names, draw, found = np.unique(unit), np.random.default_rng(0), []
    if len(names) < 2:
        return math.nan
    for _ in range(SPLITS):
        own = np.isin(unit, draw.permutation(names)[: len(names) // 2])
        found.append(spearman(gain[own].mean(0), gain[~own].mean(0)))
    return float(np.mean(found))


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


def _over_couples(estimate: object, values: np.ndarray, unit: np.ndarray) -> Interval:
    found = jackknifed(estimate, values, unit)  # type: ignore[arg-type]
    return found if len(np.unique(unit)) >= FEWEST else found._replace(low=math.nan, high=math.nan)


def by_depth(ds: xr.Dataset, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One of `SHOWN` at the traced depths: geometric mean over contexts, low and high end over couples, [place]."""
    variable, part = SHOWN[name]
    with np.errstate(divide="ignore"):
        logs = np.log(ds[variable].sel(part=part).values)
    mean, low, high = jackknife(lambda some: some.mean(0), logs, couples(ds, "traced"))
    return np.exp(mean), np.exp(low), np.exp(high)
