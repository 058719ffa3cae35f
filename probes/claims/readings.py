"""What statements read of results: estimates with intervals, numbers of profiles, places of the map of theory."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import xarray as xr

from ..measures.map import Row
from ..results.curves import by_condition, estimate
from ..results.dataset import options_of
from ..results.statistics import Interval, between_runs, jackknifed, over_runs, units
from ..results.ushape import SHORTEST, typical
from .evidence import config
from .rules import Lacks, Test, above, every

RUNS = 3  # of controlled training, at the least
OVER_RUNS = f"Student's t over {RUNS} runs or more"
TENTH = 0.1  # within which a place of the map is known
UNKNOWN = Interval(math.nan, math.nan, math.nan)


def estimated(ds: xr.Dataset, name: str, **where: object) -> Interval:
    """A variable at a place with the interval that its result holds."""
    if name not in ds:
        raise Lacks(name)
    return Interval(*estimate(ds, name, **where))


def over_documents(ds: xr.Dataset, values: xr.DataArray, of: Callable[[np.ndarray], float] = float) -> Interval:
    """A number of the means over prompts [key], or of one mean, with its interval over documents.

    No interval where prompts were not kept. Means are over all other dimensions, too.
    """
    means = values.mean([dim for dim in values.dims if dim not in ("prompt", "key")])
    if "prompt" not in means.dims:
        return Interval(of(means.values), math.nan, math.nan)
    return jackknifed(lambda chosen: of(chosen.mean(0)), means.transpose("prompt", ...).values, units(ds))


def over_training(*groups: Sequence[float]) -> Interval:
    """Mean over one group's runs, or the difference of two groups', by Student's t; no interval below `RUNS` runs."""
    estimate = over_runs(groups[0]) if len(groups) == 1 else between_runs(*groups)
    return estimate if min(map(len, groups)) >= RUNS else Interval(estimate.value, math.nan, math.nan)


# ------------------------------------------------------------------------------------------------------------ profiles


def prompted(ds: xr.Dataset, condition: str, variable: str = "sensitivity") -> list[np.ndarray]:
    """Profiles [prompt, position] up to the query, one array per seed."""
    if not {"prompt", "position"} <= set(ds[variable].dims):
        raise Lacks(variable)
    values, query = by_condition(ds, variable)[variable].sel(condition=condition), options_of(ds).get("query")
    arrays = values.transpose("seed", "prompt", "position").values[..., : None if query is None else int(query) + 1]
    if not (known := [array.astype(float) for array in arrays if not np.isnan(array).all()]):
        raise Lacks(condition)
    return known


def with_middle(ds: xr.Dataset, condition: str, variable: str = "sensitivity") -> list[np.ndarray]:
    """`prompted` of a model whose windows, if any, reach over the text, and whose profile has ends and a middle."""
    model, profiles = config(ds), prompted(ds, condition, variable)
    window = (model.get("use_sliding_window", True) and model.get("sliding_window")) or math.inf
    if window < max(values.shape[1] for values in profiles) or not any(
        values.shape[1] >= SHORTEST and np.isfinite(typical(values)).all() for values in profiles
    ):
        raise Lacks(condition)
    return profiles


def root_mean_square(values: np.ndarray) -> np.ndarray:
    """[position] of [prompt, position]."""
    return np.sqrt(np.mean(values**2, axis=0))


def of_profiles(
    tell: Callable[..., float],
    unit: np.ndarray,
    *profiles: Sequence[np.ndarray],
    mean: Callable[[np.ndarray], np.ndarray] = typical,
) -> Interval:
    """A number of mean profiles: over fresh models where there are several, else over documents.

    Args:
        tell: gives a number of the mean profiles [position], NaN where they have no such number.
        unit: of every prompt.
        profiles: [prompt, position] by seed, of each argument of `tell`.
        mean: over prompts.
    """
    by_seed = list(zip(*profiles, strict=False))
    if len(by_seed) > 1:
        return over_runs([tell(*map(mean, of_seed)) for of_seed in by_seed])
    together = np.stack(by_seed[0], axis=1)
    return jackknifed(lambda values: float(tell(*map(mean, np.moveaxis(values, 1, 0)))), together, unit)


# ----------------------------------------------------------------------------------------------------------------- map

SIZES = ("strength", "width", "blocks", "length", "residual_scale", "window", "name")


def strength_told(strength: float) -> str:
    """A logit scale."""
    return f"d σ² = {strength:.2g}"


def alike(row: Row, others: Iterable[Row], *but: str) -> bool:
    """Whether some other place has all sizes of this one but those named."""
    return any(all(row[size] == other[size] for size in SIZES if size not in but) for other in others)


def courses(
    places: Iterable[Row], size: str, value: Callable[[Row], float] = lambda row: row.shape.primacy
) -> dict[float, dict[Any, float]]:
    """By logit scale a value by another size, ascending; logit scales with one value are left out."""
    values: dict[float, dict[Any, float]] = {}
    for row in places:
        values.setdefault(row["strength"], {})[row[size]] = value(row)
    return {strength: dict(sorted(course.items())) for strength, course in sorted(values.items()) if len(course) > 1}


def roughly(value: float, share: float = TENTH) -> Interval:
    """The logarithm of a ratio that has no interval, taken as known within `share` of it.

    The map keeps the mean of each place's two fresh models alone: a tenth is more than their scatter in primacy, 4 % in
    the bundled models. A sink's sizes and [Wu]'s measure are kept as means over prompts: a quarter.
    """
    log = math.log(value) if 0 < value < math.inf else math.nan
    return Interval(log, log - math.log1p(share), log + math.log1p(share))


def rising(values: Sequence[float]) -> Test:
    """Whether every value is above the one before it. A window that cuts the beginning off has 0, less than any other."""
    return every(above(roughly(b / a), 0) if a > 0 else b > 0 for a, b in pairwise(values))
