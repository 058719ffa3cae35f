"""Profiles that compare conditions: scale-free sensitivity, geometric means over prompts, intervals over documents.

`||dh/dx||` of two conditions compares units, since rms(x) and rms(h) grow in training. The elasticity
`||J_j||_F / sqrt(d) * rms(x) / rms(h)` has none. Trained profiles are heavy-tailed over prompts: a root mean square hangs on
a few of them, so that conditions are compared by geometric means (comparisons with the second-moment kernel, which predicts
a mean square, keep `curves.profiles`). Where a window cuts a position off, it is 0 in every prompt and stays 0.

Numbers of a profile, all from the mean profile: `first` (mean over the first 5 % of positions), `middle` (median of the
middle half), `last`, their ratios `primacy`, `primacy behind 0` (position 0 left out) and `recency`. Their intervals are
jackknifed over documents or runs, by logarithms (`statistics.jackknifed`). The trough is a place and jumps: it is resampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import xarray as xr
from jaxtyping import Float, Int

from .curves import Profile, band, by_condition, deviation
from .dataset import options_of
from .statistics import Interval, jackknifed, spread, units
from .ushape import NUMBERS, numbers

Curves = Float[np.ndarray, "seed prompt position"]


def elasticities(ds: xr.Dataset, variable: str = "elasticity") -> dict[str, Curves]:
    """Elasticities by condition, up to the query; of several pathways or layers none.

    `variable` may be another of the result's [..., prompt, position] in the unit of the sensitivity, a theory's: it is then
    brought to the elasticity's unit. A result made before there were elasticities gives its sensitivities: shapes are the
    same, sizes of two conditions then compare units.
    """
    if not comparable(ds):
        variable = variable.replace("elasticity", "sensitivity")
    if variable not in ds or not {"prompt", "position"} <= set(ds[variable].dims):
        return {}
    ds = by_condition(ds, "sensitivity")
    if set(ds[variable].dims) != {"condition", "seed", "prompt", "position"}:
        return {}
    end = int(options_of(ds).get("query", ds.sizes["position"] - 1)) + 1
    values = ds[variable].transpose("condition", "seed", "prompt", "position").values.astype(np.float64)
    if variable != "elasticity" and comparable(ds):
        values = values * _unit(ds)
    known = {
        str(name): runs[~np.isnan(runs).all((1, 2))]
        for name, runs in zip(ds["condition"].values, values[..., :end], strict=True)
    }
    return {condition: runs for condition, runs in known.items() if len(runs)}


def typical(values: Float[np.ndarray, "*seed prompt position"]) -> Float[np.ndarray, " position"]:
    """Geometric mean over prompts, and over seeds where there are several; 0 where a value is."""
    return band(values.reshape(-1, values.shape[-1])).centre


def comparable(ds: xr.Dataset) -> bool:
    """Whether the sizes of two conditions can be compared: whether the result holds elasticities."""
    return "elasticity" in ds


def mean_profiles(ds: xr.Dataset, variable: str = "elasticity") -> dict[str, list[Profile]]:
    """By condition, one per seed: the geometric mean over prompts, its standard error over documents, and the spread.

    The standard error is of the logarithm, times the mean; NaN for a single document, 0 where the profile is.
    """
    unit = units(ds) if "prompt" in ds.sizes else np.zeros(0)
    found: dict[str, list[Profile]] = {}
    for condition, runs in elasticities(ds, variable).items():
        for values in runs:
            mean = typical(values)
            seen = mean > 0
            error = np.where(seen, np.nan, 0.0)
            if len(set(unit.tolist())) > 1:
                error[seen] = mean[seen] * spread(lambda some: some.mean(0), np.log(values[:, seen]), unit)
            found.setdefault(condition, []).append(Profile(mean, error, deviation(values)))
    return found


def shape(ds: xr.Dataset, condition: str) -> dict[str, Interval]:
    """`NUMBERS` of one condition with their 95 % intervals over documents; empty where it was not measured."""
    values = elasticities(ds).get(condition)
    return {} if values is None else ranged(values.swapaxes(0, 1), units(ds))


def ranged(values: Float[np.ndarray, "sample other position"], unit: Int[np.ndarray, " sample"]) -> dict[str, Interval]:
    """`NUMBERS` of the mean over samples (prompts or runs) and all others, with 95 % intervals over the samples' units."""
    return {name: _ratio(partial(_log, name), values, unit) for name in NUMBERS}


def change(ds: xr.Dataset, before: str = "init", after: str = "pretrained") -> dict[str, Interval]:
    """How many times each of `NUMBERS` is in `after` what it is in `before`, prompts paired; empty where one is missing."""
    found = elasticities(ds) if comparable(ds) else {}
    if before not in found or after not in found:
        return {}
    seeds = len(found[before])
    both = np.concatenate([found[before], found[after]]).swapaxes(0, 1)

    def grown(name: str, values: np.ndarray) -> float:
        return _log(name, values[:, seeds:]) - _log(name, values[:, :seeds])

    return {name: _ratio(partial(grown, name), both, units(ds)) for name in NUMBERS}


def _log(name: str, values: Float[np.ndarray, "sample other position"]) -> float:
    found = numbers(typical(values))[name]
    return math.log(found) if found > 0 else math.nan


def _ratio(estimate: Callable[[np.ndarray], float], values: np.ndarray, unit: np.ndarray) -> Interval:
    found = jackknifed(estimate, values, unit)
    return Interval(*(math.exp(one) for one in found[:3]))._replace(freedom=found.freedom)


def _unit(ds: xr.Dataset) -> Float[np.ndarray, "condition seed prompt 1"]:
    """rms(x) / rms(h) of every prompt, from the two forms of its sensitivity."""
    order = ("condition", "seed", "prompt", "position")
    raw, free = (
        ds[name].transpose(*order).values.astype(np.float64).sum(-1, keepdims=True)
        for name in ("sensitivity", "elasticity")
    )
    return free / np.where(raw > 0, raw, np.nan)
