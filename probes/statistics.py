"""Intervals: who is resampled, and how the ends are found.

**The unit** is what is independent: documents for text, since windows of one document are alike; runs for toys and
controlled training. A result's coordinate `document [prompt]` says which prompts belong together; where it is missing, or
names one document alone, prompts count as units, and intervals are then too narrow by what prompts of a document share.

Two ways, both for 95 %:

- **Resampling** (`resampling`, `ends`): documents are drawn again with replacement, within each half where a measure
  correlates two halves, and percentiles of the estimate are taken. For numbers that are sums over prompts and dear to
  compute again.
- **Jackknife** (`jackknifed`): the estimate without each document in turn, and Student's t with one degree of freedom less
  than there are documents. For smooth numbers of few units, of which percentiles of the bootstrap make intervals that are
  too narrow. Ratios are taken by their logarithms, whose distribution is the more symmetric one.

`over_runs` is Student's t over runs. Source: Efron and Tibshirani, An Introduction to the Bootstrap, chapters 11 to 13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Float, Int
from scipy.stats import t as student

INTERVAL = (2.5, 97.5)  # percentiles


class Interval(NamedTuple):
    """An estimate and the ends of its 95 % interval; ends are NaN where nothing tells."""

    value: float
    low: float
    high: float


def units(ds: xr.Dataset) -> Int[np.ndarray, " prompt"]:
    """The number of each prompt's unit: its document, or the prompt itself where there is none or one alone."""
    count = ds.sizes["prompt"]
    if "document" not in ds.coords:
        return np.arange(count)
    return numbered(ds["document"].values)


def numbered(documents: Sequence[str] | np.ndarray) -> Int[np.ndarray, " prompt"]:
    """Documents by number, in the order of their first prompts; every prompt its own where there is a single document."""
    _, first, number = np.unique(np.asarray(documents), return_index=True, return_inverse=True)
    if len(first) < 2:
        return np.arange(len(number))
    return np.argsort(np.argsort(first))[number]


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
        unit = np.arange(size) if documents is None else numbered(documents[half])
        count = int(unit.max(initial=-1)) + 1
        drawn[1:, half] = random.multinomial(count, np.full(count, 1 / count), size=draws)[:, unit]
    return drawn


def ends(resamples: Float[np.ndarray, "resample ..."]) -> tuple[np.ndarray, np.ndarray]:
    """Low and high end over the resamples [1:] of estimates [0]; NaN where an estimate is NaN or nothing was resampled."""
    known = ~np.isnan(resamples[0])
    found = np.full((2, *resamples.shape[1:]), np.nan)
    if len(resamples) > 1:
        found[:, known] = np.nanpercentile(resamples[1:, known], INTERVAL, axis=0)
    return np.asarray(found[0]), np.asarray(found[1])


def jackknifed(
    estimate: Callable[[np.ndarray], float], values: Float[np.ndarray, "prompt ..."], unit: Int[np.ndarray, " prompt"]
) -> Interval:
    """An estimate from prompts, with its interval over units; no interval for a single unit.

    Args:
        estimate: of values [prompt, ...], for any choice of prompts; for a ratio give its logarithm.
        values: of every prompt.
        unit: its unit's number.
    """
    whole, names = estimate(values), np.unique(unit)
    count = len(names)
    if count < 2 or not np.isfinite(whole):
        return Interval(whole, np.nan, np.nan)
    without = np.array([estimate(values[unit != name]) for name in names])
    spread = np.sqrt((count - 1) / count * np.sum((without - without.mean()) ** 2))
    reach = float(student.ppf(INTERVAL[1] / 100, count - 1)) * float(spread)
    return Interval(whole, whole - reach, whole + reach)


def over_runs(values: Sequence[float] | np.ndarray) -> Interval:
    """Mean over runs with Student's t; no interval for a single run, NaN for none."""
    known = np.asarray(values, dtype=np.float64)
    known = known[np.isfinite(known)]
    if len(known) < 2:
        return Interval(float(known[0]) if len(known) else np.nan, np.nan, np.nan)
    reach = student.ppf(INTERVAL[1] / 100, len(known) - 1) * known.std(ddof=1) / np.sqrt(len(known))
    return Interval(float(known.mean()), float(known.mean() - reach), float(known.mean() + reach))
