"""Curves over positions: smoothing, agreement of two curves, means over prompts, bands over seeds."""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import xarray as xr
from jaxtyping import Float
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike
from scipy.stats import rankdata, wasserstein_distance

from ..errors import InputError

ESTIMATE = ("value", "low", "high")  # the coordinate `estimate`: a number and the ends of its 95 % interval
SMOOTHED = 0.05  # about the share of positions in the smoothing window


class Profile(NamedTuple):
    """One curve out of many prompts; all three [position], in the unit of the sensitivity."""

    mean: Float[np.ndarray, " position"]  # root of the mean square over prompts
    stderr: Float[np.ndarray, " position"]  # of `mean`, from estimating on these very prompts; zero where exact
    spread: Float[np.ndarray, " position"]  # standard deviation between prompts; NaN for a single one


class ShiftNull(NamedTuple):
    """What a rank correlation of two smooth curves is by chance; NaN where a curve is constant."""

    p: float  # share of all shifts whose correlation is as far from 0, the one of no shift among them
    spread: float  # root mean square of the correlations under the other shifts


class Band(NamedTuple):
    """Several curves as one; all three [position]."""

    centre: Float[np.ndarray, " position"]  # geometric mean
    low: Float[np.ndarray, " position"]
    high: Float[np.ndarray, " position"]


def smooth(curves: ArrayLike) -> Float[np.ndarray, "*some position"]:
    """Moving average of curves [..., position] over an odd number of positions, about 5 % of them.

    Towards the ends the window shrinks on both sides alike, down to the value itself: an average to one side only would
    move the minimum of a sloping curve.
    """
    values = np.asarray(curves, dtype=np.float64)
    half = int(SMOOTHED * values.shape[-1] / 2)
    inner = sliding_window_view(values, 2 * half + 1, axis=-1).mean(-1)
    first = [values[..., : 2 * r + 1].mean(-1, keepdims=True) for r in range(half)]
    last = [values[..., -2 * r - 1 :].mean(-1, keepdims=True) for r in reversed(range(half))]
    return np.concatenate([*first, inner, *last], axis=-1)


def smooth_between(curve: ArrayLike) -> Float[np.ndarray, " position"]:
    """`smooth` between the ends, which stay as they are: they stand out, and averages would smear them."""
    values = np.asarray(curve, dtype=np.float64)
    return values if len(values) < 3 else np.concatenate([values[:1], smooth(values[1:-1]), values[-1:]])


def spearman(a: ArrayLike, b: ArrayLike) -> float:
    """Spearman's rank correlation; ties share their mean rank. NaN where a curve is constant."""
    x, y = _pair(a, b)
    ranks = np.stack([rankdata(x), rankdata(y)])
    ranks -= ranks.mean(axis=1, keepdims=True)
    scale = math.sqrt(np.sum(ranks[0] ** 2) * np.sum(ranks[1] ** 2))
    return float(ranks[0] @ ranks[1]) / scale if scale > 0 else math.nan


Correlation: TypeAlias = Callable[[np.ndarray, np.ndarray], float]


def shifted(a: ArrayLike, b: ArrayLike, of: Correlation = spearman) -> Float[np.ndarray, " shift"]:
    """Correlations of a curve with the shifts of another one, which have its smoothness but no relation to the first.

    The other curve of N points is joined to its mirror image, a circle of 2 N points without a jump, and turned by every
    number of them. (Without the mirror a curve that does not end where it began has a jump that its shifts move inside:
    of two random walks of 36 points 15 % are then "related" at p <= 0.05; with it 4 %, as of 12 and of 72.)
    """
    x, y = _pair(a, b)
    circle = np.concatenate([y, y[::-1]])
    found = np.array([of(x, np.roll(circle, shift)[: len(x)]) for shift in range(len(circle))])
    found[1:] = np.nan_to_num(found[1:])  # a shift may be constant
    return found


def shift_null(a: ArrayLike, b: ArrayLike, of: Correlation = spearman) -> ShiftNull:
    """What `shifted` says of chance."""
    found = shifted(a, b, of)
    if np.isnan(found[0]):
        return ShiftNull(math.nan, math.nan)
    as_far = np.abs(found) >= abs(found[0]) - 1e-12  # rounding
    return ShiftNull(float(as_far.mean()), float(np.sqrt(np.mean(found[1:] ** 2))))


def rms_log_error(a: ArrayLike, b: ArrayLike, *, free_scale: bool = False) -> float:
    """Root mean square over positions of `ln(a / b)` of curves of zero or more; 0.1 is an error of about 10 %.

    With `free_scale` the constant factor that makes it smallest is removed first (shapes are compared). Positions where
    both are zero agree; where only one is, the error is infinite.
    """
    x, y = _pair(a, b)
    if np.any((x == 0) != (y == 0)):
        return math.inf
    log = np.zeros(len(x))
    np.log(x, out=log, where=x > 0)
    log[y > 0] -= np.log(y[y > 0])
    if free_scale and np.any(x > 0):
        log[x > 0] -= log[x > 0].mean()
    return math.sqrt(np.mean(log**2))


def relative_error(predicted: ArrayLike, measured: ArrayLike) -> float:
    """Mean over positions of `|predicted / measured - 1|`, over positions where `measured` is not zero.

    Infinite where something is predicted for a position that has nothing; NaN where either is NaN or nothing is measured.

    Raises:
        InputError: the curves differ in length or have fewer than 2 points.
    """
    x, y = _pair(predicted, measured, finite=False)
    if np.any((y == 0) & (x > 0)):
        return math.inf
    seen = y != 0
    return float(np.mean(np.abs(x[seen] / y[seen] - 1))) if np.any(seen) else math.nan


def wasserstein(a: ArrayLike, b: ArrayLike) -> float:
    """Wasserstein distance of two curves as distributions over positions, which go from 0 to 1; each is scaled to sum 1.

    Source: as arXiv 2602.16837 compares predicted with measured profiles.
    """
    x, y = _pair(a, b)
    at = np.linspace(0, 1, len(x))
    return float(wasserstein_distance(at, at, x, y))


def rms_profile(sensitivity: ArrayLike, stderr: ArrayLike | None = None) -> Profile:
    """Root mean square over prompts of a sensitivity [prompt, position], `sqrt(mean_p s_pj^2)`: what the kernel predicts.

    For what a profile is like take `probes.shape`, whose mean does not hang on a few prompts. Errors of different prompts
    are independent, hence `stderr_j = sqrt(sum_p (s_pj e_pj)^2) / (P mean_j)` with `e` the standard errors of `s`.

    Raises:
        InputError: the sensitivity is not [prompt, position], or empty.
    """
    values = np.asarray(sensitivity, dtype=np.float64)
    errors = np.zeros_like(values) if stderr is None else np.asarray(stderr, dtype=np.float64)
    if values.ndim != 2 or values.size == 0:
        raise InputError(f"sensitivity has shape {list(values.shape)}; give [prompt, position], at least one of each")
    mean = np.sqrt(np.mean(values**2, axis=0))
    numerator = np.sqrt(np.sum((values * errors) ** 2, axis=0)) / len(values)
    error = np.divide(numerator, mean, out=np.zeros_like(mean), where=mean != 0)
    return Profile(mean, error, deviation(values))


def deviation(values: Float[np.ndarray, "prompt position"]) -> Float[np.ndarray, " position"]:
    """The standard deviation between prompts; NaN for a single one."""
    return np.std(values, axis=0, ddof=1) if len(values) > 1 else np.full_like(values[0], np.nan)


def band(curves: ArrayLike) -> Band:
    """Geometric mean, minimum and maximum of curves [seed, position]; those that are all NaN (no such run) do not count."""
    values = np.asarray(curves, dtype=np.float64)
    values = values[~np.all(np.isnan(values), axis=1)]
    with np.errstate(divide="ignore"):  # one zero makes the geometric mean zero, which exp(-inf) is
        centre = np.exp(np.mean(np.log(values), axis=0))
    return Band(centre, values.min(axis=0), values.max(axis=0))


def rms_profiles(ds: xr.Dataset, variable: str = "sensitivity") -> dict[str, list[Profile]]:
    """`rms_profile` of a result of `jacobian`, single or combined: by condition, one per seed, in the result's order.

    `variable` may be another of its variables [..., prompt, position]; standard errors are those of the sensitivity alone.
    """
    ds = by_condition(ds, variable)
    names = [variable, "stderr"] if variable == "sensitivity" and "stderr" in ds else [variable]
    found: dict[str, list[Profile]] = {}
    for condition in ds["condition"].values:
        for index in range(ds.sizes["seed"]):
            run = ds.sel(condition=condition).isel(seed=index)
            curves = [run[name].transpose("prompt", "position").values for name in names]
            if not np.all(np.isnan(curves[0])):
                found.setdefault(str(condition), []).append(rms_profile(*curves))
    return found


def by_condition(ds: xr.Dataset, variable: str) -> xr.Dataset:
    """A result of `jacobian` with the dimensions condition and seed, also where it is of one condition or a single run."""
    named = ds.coords.get("condition", ds.attrs.get("condition", "pretrained"))
    whole = {"condition": str(getattr(named, "values", named)), "seed": 0}
    missing = {name: [value] for name, value in whole.items() if name not in ds[variable].dims}
    return ds.drop_vars(list(missing), errors="ignore").expand_dims(missing) if missing else ds


def estimate(ds: xr.Dataset, name: str, **where: object) -> tuple[float, float, float]:
    """A variable at a place with the interval that `NAME_low` and `NAME_high` hold; NaN where there is none."""
    found = (ds[one].sel(where) if one in ds else math.nan for one in (name, f"{name}_low", f"{name}_high"))
    value, low, high = map(float, found)
    return value, low, high


def with_interval(ds: xr.Dataset, name: str) -> xr.DataArray:
    """A variable with the dimension `estimate`: value, low, high; the ends are NaN where the result holds none."""
    value = ds[name]
    parts = [value, *(ds.get(f"{name}_{end}", xr.full_like(value, math.nan, dtype=float)) for end in ("low", "high"))]
    return xr.concat(parts, xr.Variable("estimate", list(ESTIMATE)), coords="minimal", compat="override")


def three_digits(value: float) -> str:
    """Three significant digits; thousands as they are read, "25,100"."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if 1e3 <= abs(rounded) < 1e6 else f"{value:.3g}"


def _pair(
    a: ArrayLike, b: ArrayLike, *, finite: bool = True
) -> tuple[Float[np.ndarray, " position"], Float[np.ndarray, " position"]]:
    x, y = (np.asarray(curve, dtype=np.float64) for curve in (a, b))
    if len(x) != len(y) or len(x) < 2:
        raise InputError(f"the curves have {len(x)} and {len(y)} points; compare curves of one length, at least 2")
    if finite and not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise InputError("a curve holds what is not finite; give a number at every position")
    return x, y
