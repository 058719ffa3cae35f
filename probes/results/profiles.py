"""Profiles that compare conditions: scale-free sensitivity, geometric means over prompts, intervals over documents.

`||dh/dx||` of two conditions compares units, since rms(x) and rms(h) grow in training. The elasticity
`||J_j||_F / sqrt(d) * rms(x) / rms(h)` has none. Trained profiles are heavy-tailed over prompts: a root mean square hangs on
a few of them, so that conditions are compared by geometric means (comparisons with the second-moment kernel, which predicts
a mean square, keep `curves.rms_profiles`). Where a window cuts a position off, it is 0 in every prompt and stays 0.

`shape` gives the numbers of a mean profile (`ushape.Shape`), jackknifed over documents; every table takes them from there.
"""

from __future__ import annotations

import math

import numpy as np
import xarray as xr
from jaxtyping import Float

from ..errors import InputError
from .curves import Profile, band, by_condition, deviation
from .dataset import options_of
from .statistics import Interval, spread, units
from .ushape import SHORTEST, Shape, intervals, log_numbers, shape_over

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


def profiles(ds: xr.Dataset, variable: str = "elasticity") -> dict[str, list[Profile]]:
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


def shape(ds: xr.Dataset, condition: str | None = None) -> Shape:
    """The U-shape of a profile as `headwater jacobian` prints it: of the geometric mean, with 95 % intervals over documents.

    Args:
        ds: a result of `jacobian`, or of a theory. Prompts are units where its coordinate `document` names none.
        condition: "init" or "pretrained", as the result calls them; needed where it has several.

    Raises:
        InputError: no such profile, several to choose from, or one that is shorter than 8 positions.
    """
    found = shapes(ds)
    if condition not in found and (condition is not None or len(found) != 1):
        raise InputError(
            f"condition={condition}, and the result has profiles of {', '.join(found) or 'none'}; name one"
        )
    chosen = next(iter(found.values())) if condition is None else found[condition]
    if math.isnan(chosen.middle.value):
        raise InputError(f"fewer than {SHORTEST} positions up to the query have no middle to compare with; give more")
    return chosen


def shapes(ds: xr.Dataset) -> dict[str, Shape]:
    """`shape` of every condition; NaN for profiles that are too short."""
    return {condition: shape_over(_logs(values), units(ds)) for condition, values in elasticities(ds).items()}


def change(ds: xr.Dataset, before: str = "init", after: str = "pretrained") -> dict[str, Interval]:
    """How many times each of `NUMBERS` is in `after` what it is in `before`, prompts paired; empty where one is missing."""
    found = elasticities(ds) if comparable(ds) else {}
    if before not in found or after not in found:
        return {}
    seeds, both = len(found[before]), _logs(np.concatenate([found[before], found[after]]))

    def grown(some: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):  # nothing of nothing
            return log_numbers(some[:, seeds:]) - log_numbers(some[:, :seeds])

    return intervals(grown, both, units(ds))


def _logs(values: Curves) -> Float[np.ndarray, "prompt seed position"]:
    with np.errstate(divide="ignore"):  # a zero stays one: exp(-inf)
        return np.log(values).swapaxes(0, 1)


def _unit(ds: xr.Dataset) -> Float[np.ndarray, "condition seed prompt 1"]:
    """rms(x) / rms(h) of every prompt, from the two forms of its sensitivity."""
    order = ("condition", "seed", "prompt", "position")
    raw, free = (
        ds[name].transpose(*order).values.astype(np.float64).sum(-1, keepdims=True)
        for name in ("sensitivity", "elasticity")
    )
    return free / np.where(raw > 0, raw, np.nan)
