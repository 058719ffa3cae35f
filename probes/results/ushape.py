"""The U-shape of a profile: what its numbers are, and which positions count as which.

A profile is a curve over positions, how much the last one, the query, depends on each. `middle` is the median over the
middle half, and four numbers are ratios to it: `first`, position 0; `primacy`, the mean over the `ARM` positions behind it;
`recency`, the mean over the `ARM` positions before the query; `last`, the query's own position, whose input the residual
stream carries there. Below 68 positions the two arms are shorter, T/4 - 1 each. The trough is where the smoothed curve is
lowest. `numbers` gives these of a curve, and everything that prints them takes it: `shape_of` for one curve, `shape_over`
for the geometric mean of many, with intervals; `probes.shape` is the latter of a result.

One prompt, looked at token by token (`probes.inspect`), is divided into parts instead: position 0 is the sink, and the
recency part is as long as the profile is high (`parts_of`).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import xarray as xr
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from ..errors import InputError
from .curves import Profile, band, by_condition, deviation, smooth
from .dataset import check_prompts, options_of
from .statistics import Interval, ends, freedom, jackknife, resampling, spread, units

ARM = 16  # positions of primacy, and of recency
NUMBERS = ("first", "primacy", "recency", "last", "middle")
PARTS = ("sink", "rest", "recency")
RECENCY = 2.0  # how far a profile stands above its middle in the recency part
SHORTEST = 8  # positions below which a curve has no middle to speak of

Number: TypeAlias = Any  # a float of one curve, an `Interval` of many


class Shape(NamedTuple):
    """How much the ends of a curve stand out from its middle: of one curve numbers, of many their mean's with intervals.

    Ratios are NaN where the middle is 0, as where a window cuts it off.
    """

    first: Number  # position 0 / middle
    primacy: Number  # mean over positions 1 to `arm` / middle
    recency: Number  # mean over the `arm` positions before the last one / middle
    last: Number  # the last position / middle
    middle: Number  # median over positions T/4 <= j < 3T/4, in the curve's unit
    trough: int  # position of the minimum of the smoothed curve
    trough_fraction: Number  # trough / (T - 1)
    arm: int  # 16; T/4 - 1 below T = 68


def shape_of(curve: ArrayLike) -> Shape:
    """The shape of one curve [position]; NaN but for the trough where it is shorter than 8."""
    values = np.asarray(curve, dtype=np.float64)
    trough = int(np.argmin(smooth(values)))
    fraction = trough / max(1, len(values) - 1)
    return Shape(**numbers(values), trough=trough, trough_fraction=fraction, arm=arm(len(values)))


def shape_over(
    logs: Float[np.ndarray, "sample other position"], unit: Int[np.ndarray, " sample"], *, bootstrap: int = 0
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
    lowest = Interval(float(fraction[0]), low, high)
    found = intervals(log_numbers, logs, unit)
    return Shape(**found, trough=int(places[0]), trough_fraction=lowest, arm=arm(logs.shape[-1]))


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


def arm(length: int) -> int:
    """How many positions primacy takes, and how many recency: all of them lie outside the middle half."""
    return max(0, min(ARM, length // 4 - 1))


def middle_of(curve: Float[np.ndarray, " position"]) -> float:
    """The median over positions T/4 <= j < 3T/4."""
    length = len(curve)
    return float(np.median(curve[math.ceil(length / 4) : math.ceil(3 * length / 4)]))


def numbers(curve: Float[np.ndarray, " position"]) -> dict[str, float]:
    """The `NUMBERS` of `shape_of`; NaN where a curve is too short for a middle, ratios NaN where the middle is 0."""
    length = len(curve)
    if length < SHORTEST:
        return dict.fromkeys(NUMBERS, math.nan)
    near, middle = arm(length), middle_of(curve)
    ends = curve[0], np.mean(curve[1 : 1 + near]), np.mean(curve[-1 - near : -1]), curve[-1]
    ratios = [float(end) / middle if middle > 0 else math.nan for end in ends]
    return dict(zip(NUMBERS, (*ratios, middle), strict=True))


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


Curves = Float[np.ndarray, "seed prompt position"]


def elasticities(ds: xr.Dataset, variable: str = "elasticity") -> dict[str, Curves]:
    """Elasticities by condition, up to the query; of several pathways or layers none.

    `variable` may be "elasticity_normed", or one [..., prompt, position] in the unit of the sensitivity, a theory's: it is
    then brought to the elasticity's unit. A result made before there were elasticities gives its sensitivities: shapes are
    the same, sizes of two conditions then compare units.
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
    if not variable.startswith("elasticity") and comparable(ds):
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


def shape(ds: xr.Dataset, condition: str | None = None, variable: str = "elasticity") -> Shape:
    """The U-shape of a profile as `headwater jacobian` prints it: of the geometric mean, with 95 % intervals over documents.

    Args:
        ds: a result of `jacobian`, or of a theory. Prompts are units where its coordinate `document` names none.
        condition: "init" or "pretrained", as the result calls them; needed where it has several.
        variable: "elasticity", or "elasticity_normed", after the final norm, where the result holds it.

    Raises:
        InputError: no such profile, several to choose from, or one that is shorter than 8 positions.
    """
    check_prompts(ds)
    found = shapes(ds, variable)
    if condition not in found and (condition is not None or len(found) != 1):
        raise InputError(
            f"condition={condition}, and the result has profiles of {', '.join(found) or 'none'}; name one"
        )
    chosen = next(iter(found.values())) if condition is None else found[condition]
    if math.isnan(chosen.middle.value):
        raise InputError(f"fewer than {SHORTEST} positions up to the query have no middle to compare with; give more")
    return chosen


def shapes(ds: xr.Dataset, variable: str = "elasticity") -> dict[str, Shape]:
    """`shape` of every condition; NaN for profiles that are too short."""
    found = elasticities(ds, variable)
    return {condition: shape_over(_logs(values), units(ds)) for condition, values in found.items()}


def change(
    ds: xr.Dataset, before: str = "init", after: str = "pretrained", variable: str = "elasticity"
) -> dict[str, Interval]:
    """How many times each of `NUMBERS` is in `after` what it is in `before`, prompts paired; empty where one is missing."""
    found = elasticities(ds, variable) if comparable(ds) else {}
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
