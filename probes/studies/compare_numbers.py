"""A result's numbers, those that its measurement's own tables show, each with what its interval can be found from.

For comparing two results: `probes.studies.compare`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import xarray as xr
from jaxtyping import Float

from ..errors import InputError
from ..results.curves import estimate
from ..results.dataset import options_of
from ..results.statistics import Interval

Values: TypeAlias = Float[np.ndarray, "prompt ..."]


@dataclass(frozen=True)
class Sample:
    """A number that is estimated from values of prompts."""

    values: Values
    estimate: Callable[[np.ndarray], float]  # of values [prompt, ...], for any choice of prompts
    # Where it jumps: of values and of how often each prompt counts [resample, prompt], its value in every resample.
    resampled: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None


@dataclass(frozen=True)
class Number:
    """One of a result's numbers: with prompts' values, or with the interval that the result holds (NaN: none)."""

    value: Sample | Interval
    size: bool = False  # a positive size, compared by its ratio


def measurement(ds: xr.Dataset) -> str:
    """What a result is of, as its command is called.

    Raises:
        InputError: nothing that is compared.
    """
    named = str(options_of(ds).get("measurement", "another kind"))
    kind = named.replace("_", "-")
    if kind not in MEASUREMENTS or not ("position" in ds.sizes or kind == "retrieval"):
        raise InputError(f"a result of {kind} holds no numbers to compare; give two of {', '.join(MEASUREMENTS)}")
    return kind


Found: TypeAlias = Iterator[tuple[tuple[str, str], Number]]  # (of, name), number


def _of_bos_swap(ds: xr.Dataset) -> Found:
    """What every replacement removes, the constant sink included or taken out, and what it does to sinks and behaviour."""
    names = {"removed": "removed_of_model", "removed, no constant sink": "removed_steady_of_model"}
    several = "replacement" in ds.dims
    for replacement in map(str, ds["replacement"].values if several else [ds.attrs.get("replacement", "")]):
        at = ds.sel(replacement=replacement) if several else ds
        for band in map(str, ds["band"].values):
            for said in (one for one, name in names.items() if name in ds):
                yield (f"{replacement}, band {band}", said), Number(_own(at, names[said], band=band))
        yield (replacement, "sink rate, after"), Number(alone(at["sink_rate_after"].mean()))
        yield (replacement, "loss change"), Number(_own(at, "loss_change_of_model"))
        if "kl_of_model" in ds:
            yield (replacement, "KL"), Number(_own(at, "kl_of_model"), size=True)
        yield from _of_recall(replacement, at)


def _of_recall(of: str, ds: xr.Dataset) -> Found:
    """What a change of the model does to recall, where it was measured."""
    for said, name in {"log p": "recall_log_p_change", "exact": "recall_exact_change"}.items():
        if name in ds:
            yield (of, f"recall, {said}, change"), Number(_own(ds, name))


MEASUREMENTS: dict[str, Callable[[xr.Dataset], Found]] = {
    "bos-swap": _of_bos_swap,
}


def _mean(values: np.ndarray) -> float:
    return float(values.mean())


def alone(value: Any) -> Interval:
    """A number without an interval."""
    return Interval(float(value), math.nan, math.nan)


def _own(ds: xr.Dataset, name: str, **where: object) -> Interval:
    return Interval(*estimate(ds, name, **where))
