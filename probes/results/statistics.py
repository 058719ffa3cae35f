"""Intervals: what is resampled, and how the ends are found (`docs/results.md`, "Intervals").

A result's coordinate `document [prompt]` says which prompts belong together. `resampling` and `ends` draw documents again,
`jackknifed` leaves them out; `Interval.at` gives other levels. `over_runs` is Student's t over runs, `one_more` where
another run lies, `between_runs` Welch's of two groups. Two results are compared by `paired` where they share their units:
what a unit does to both alike cancels. Else by `apart`: half-widths add in quadrature, to each side those that reach that
way [Zou and Donner, Statistics in Medicine 27 (2008), 1693]. Sources: Efron and Tibshirani, An Introduction to the
Bootstrap, chapters 11 to 13; of `holm`: Holm, Scandinavian Journal of Statistics 6 (1979), 65.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float, Int, Num
from scipy.stats import t as student

INTERVAL = (2.5, 97.5)  # percentiles


class Interval(NamedTuple):
    """An estimate and the ends of its 95 % interval; ends are NaN where nothing tells."""

    value: float
    low: float
    high: float
    freedom: float = np.inf  # degrees of Student's t; of resampling, where the normal's quantiles serve

    def at(self, level: float) -> tuple[float, float]:
        """The ends at another level of confidence: either side widened by the ratio of the distribution's quantiles.

        Exact for Student's t. Of a bootstrap results keep the 95 % ends alone: what lies beyond is taken as normal.
        """
        ratio = _quantile((1 + level) / 2, self.freedom) / _quantile(INTERVAL[1] / 100, self.freedom)
        middle = float(np.clip(self.value, self.low, self.high))  # a resampled estimate can lie outside of its interval
        return float(middle - ratio * (middle - self.low)), float(middle + ratio * (self.high - middle))


@cache  # the same few numbers, for thousands of places
def _quantile(share: float, freedom: float | int) -> float:
    return float(student.ppf(share, freedom))


def units(ds: xr.Dataset) -> Int[np.ndarray, " prompt"]:
    """The number of each prompt's unit: its document, or the prompt itself where there is none or one alone.

    Of lists of keys and values (`context`) their `couples`.
    """
    if "context" in ds.dims:
        return couples(ds)
    return numbered(ds["document"].values) if "document" in ds.coords else np.arange(ds.sizes["prompt"])


def couples(ds: xr.Dataset, along: str = "context") -> Int[np.ndarray, " _"]:
    """The couple that each list belongs to: each of the two is the other's control."""
    return np.asarray(ds[along].values // 2)


def numbered(documents: Sequence[str] | np.ndarray) -> Int[np.ndarray, " prompt"]:
    """Documents by number, in the order of their first prompts; every prompt its own where there is a single document."""
    _, first, number = np.unique(np.asarray(documents), return_index=True, return_inverse=True)
    if len(first) < 2:
        return np.arange(len(number))
    return np.argsort(np.argsort(first))[number]


def unit_of(prompts: int, documents: Sequence[str] | None) -> Int[np.ndarray, " prompt"]:
    """What the first prompts are resampled by: documents, else themselves."""
    return np.arange(prompts) if documents is None else numbered(documents[:prompts])


def resampling(
    prompts: int, draws: int, seed: int, halves: Sequence[slice] | None = None, documents: Sequence[str] | None = None
) -> Int[np.ndarray, "resample prompt"]:
    """How often each prompt counts: first once each, then in `draws` resamples of the documents within each half.

    A half whose prompts are all of one document has its prompts drawn. The weights of a resample sum to about the number
    of prompts: exactly where documents have as many prompts each.
    """
    random = np.random.default_rng(seed)
    drawn = np.ones((1 + draws, prompts), dtype=np.int16)
    for half in halves or (slice(0, prompts),):
        size = half.stop - half.start
        unit = unit_of(size, None if documents is None else documents[half])
        count = int(unit.max(initial=-1)) + 1
        drawn[1:, half] = random.multinomial(count, np.full(count, 1 / count), size=draws)[:, unit]
    return drawn


def ends(resamples: Float[np.ndarray, "resample ..."]) -> tuple[np.ndarray, np.ndarray]:
    """Low and high end over the resamples [1:] of estimates [0]; NaN where an estimate is, or where all resamples are."""
    known = ~np.isnan(resamples[0]) & ~np.isnan(resamples[1:]).all(0)
    found = np.full((2, *resamples.shape[1:]), np.nan)
    if known.any():
        drawn = resamples[1:, known]  # a copy
        percentile = np.nanpercentile if np.isnan(drawn).any() else np.percentile  # the same six times as fast
        found[:, known] = percentile(drawn, INTERVAL, axis=0, overwrite_input=True)
    return np.asarray(found[0]), np.asarray(found[1])


def jackknife(
    estimate: Callable[[np.ndarray], Any], values: Num[np.ndarray, "prompt ..."], unit: Int[np.ndarray, " prompt"]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Estimates from prompts, of any shape, with the low and high ends of their intervals over units.

    Ends are NaN for a single unit, and where an estimate is not finite.

    Args:
        estimate: of values [prompt, ...], for any choice of prompts; for a ratio give its logarithm.
        values: of every prompt.
        unit: its unit's number.
    """
    whole, names = np.asarray(estimate(values), dtype=np.float64), np.unique(unit)
    count, known = len(names), np.isfinite(whole)
    reach = np.full(whole.shape, np.nan)
    if count > 1 and known.any():
        reach[known] = student.ppf(INTERVAL[1] / 100, count - 1) * spread(estimate, values, unit)[known]
    return whole, np.asarray(whole - reach), np.asarray(whole + reach)


def jackknifed(
    estimate: Callable[[np.ndarray], float], values: Num[np.ndarray, "prompt ..."], unit: Int[np.ndarray, " prompt"]
) -> Interval:
    """`jackknife` of one number."""
    return Interval(*(float(x) for x in jackknife(estimate, values, unit)))._replace(freedom=freedom(unit))


def freedom(unit: Int[np.ndarray, " prompt"]) -> float:
    """Of the jackknife over these units."""
    return float(len(np.unique(unit)) - 1) or np.inf


def holm(found: Interval, freedom: float | np.ndarray, level: float = 0.05) -> Bool[np.ndarray, "..."]:
    """Which of these estimates differ from 0 at a level for all of them together [Holm]; what has no interval does not.

    The intervals are of 95 %, by Student's t with these degrees of freedom, of all or of each.
    """
    value, low, high = (np.asarray(x, dtype=np.float64) for x in found[:3])
    with np.errstate(divide="ignore", invalid="ignore"):
        t = value / ((high - low) / 2) * student.ppf(INTERVAL[1] / 100, freedom)
    p = 2 * student.sf(np.abs(t), freedom)
    known = np.flatnonzero(~np.isnan(p))
    order = known[np.argsort(p.ravel()[known])]
    passed = p.ravel()[order] <= level / np.arange(len(order), 0, -1)
    differs = np.zeros(p.size, dtype=bool)
    differs[order[: int(np.logical_and.accumulate(passed).sum())]] = True
    return differs.reshape(p.shape)


def jackknife_of_two(
    estimate: Callable[[np.ndarray, np.ndarray], Any],
    one: tuple[np.ndarray, np.ndarray],
    other: tuple[np.ndarray, np.ndarray],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`jackknife` of a number of two independent samples: of each with the other held, half-widths in quadrature.

    Args:
        estimate: of values [sample, ...] of the one and of the other.
        one, other: values [sample, ...] and the number of each one's unit [sample]; a side of a single unit leaves no ends.
    """
    whole, _, first = jackknife(lambda some: estimate(some, other[0]), *one)
    _, _, second = jackknife(lambda some: estimate(one[0], some), *other)
    reach = np.hypot(first - whole, second - whole)
    return whole, np.asarray(whole - reach), np.asarray(whole + reach)


def spread(
    estimate: Callable[[np.ndarray], Any], values: Num[np.ndarray, "prompt ..."], unit: Int[np.ndarray, " prompt"]
) -> np.ndarray:
    """The jackknife's standard errors over two units or more of estimates of any shape; arguments as in `jackknife`."""
    names = np.unique(unit)
    without = np.stack([np.asarray(estimate(values[unit != name]), dtype=np.float64) for name in names])
    with np.errstate(invalid="ignore"):  # of an estimate that is not finite there is none
        return np.asarray(np.sqrt((len(names) - 1) / len(names) * np.sum((without - without.mean(0)) ** 2, axis=0)))


def over_runs(values: Sequence[float] | np.ndarray) -> Interval:
    """Mean over runs with Student's t; no interval for a single run, NaN for none."""
    known = np.asarray(values, dtype=np.float64)
    known = known[np.isfinite(known)]
    if len(known) < 2:
        return Interval(float(known[0]) if len(known) else np.nan, np.nan, np.nan)
    reach = _quantile(INTERVAL[1] / 100, len(known) - 1) * known.std(ddof=1) / np.sqrt(len(known))
    return Interval(float(known.mean()), float(known.mean() - reach), float(known.mean() + reach), len(known) - 1)


def one_more(mean: Interval) -> Interval:
    """The prediction interval of one more run, from `over_runs` of n: mean +- t s sqrt(1 + 1 / n)."""
    wider = (mean.freedom + 2) ** 0.5  # n + 1
    return mean._replace(
        low=mean.value - wider * (mean.value - mean.low), high=mean.value + wider * (mean.high - mean.value)
    )


def paired(
    estimate: Callable[[np.ndarray], float], one: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]
) -> Interval:
    """`estimate` of the other minus that of the one, with its interval over the units that both have.

    Args:
        estimate: of values [prompt, ...], as in `jackknifed`.
        one, other: values [prompt, ...] and the number of each prompt's unit [prompt]; numbers mean the same in both.
    """
    count = len(one[0])

    def difference(chosen: np.ndarray) -> float:
        first, second = one[0][chosen[chosen < count]], other[0][chosen[chosen >= count] - count]
        return float(estimate(second)) - float(estimate(first))

    whole = np.concatenate([one[1], other[1]])
    return jackknifed(difference, np.arange(len(whole)), whole)


def apart(one: Interval, other: Interval) -> Interval:
    """The other minus the one, two independent estimates; without ends where either has none."""
    change = float(other.value) - float(one.value)
    if not np.isfinite(change):
        return Interval(change, np.nan, np.nan)
    down = float(np.hypot(other.value - other.low, one.high - one.value))
    up = float(np.hypot(other.high - other.value, one.value - one.low))
    return Interval(change, change - down, change + up)


def between_runs(some: Sequence[float] | np.ndarray, others: Sequence[float] | np.ndarray) -> Interval:
    """Difference of two groups' means over runs, with Welch's t; no interval where a group has a single run."""
    one, other = over_runs(some), over_runs(others)
    difference = one.value - other.value
    if not (one.freedom < np.inf and other.freedom < np.inf):
        return Interval(difference, np.nan, np.nan)
    errors = np.array([np.var(known, ddof=1) / len(known) for known in (some, others)])
    whole = float(errors.sum())
    if not whole:
        return Interval(difference, difference, difference, one.freedom + other.freedom)
    freedom = whole**2 / float(errors[0] ** 2 / one.freedom + errors[1] ** 2 / other.freedom)
    reach = float(student.ppf(INTERVAL[1] / 100, freedom)) * whole**0.5
    return Interval(difference, difference - reach, difference + reach, freedom)
