"""What the rules of all experiments share: means over runs, a result's settings, and statements judged by their rules."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from probes.claims.claim import Claim, Statement, Verdict
from probes.claims.rules import SURE, Test, above, every, told
from probes.results.statistics import Interval, over_runs

OVER_RUNS = "by the 95 % interval over runs"


class Judged(NamedTuple):
    """What a rule found: the numbers in words, and the verdict (None: it cannot be told)."""

    measured: str = "-"
    verdict: Verdict | bool | None = None


NOT_THERE = Judged()  # the result lacks what the rule needs
Rule = Callable[[xr.Dataset], Judged]


def judge(ds: xr.Dataset, statements: Mapping[str, Statement], rules: Mapping[str, Rule]) -> list[Claim]:
    """Judge statements by the rules that have their ids, in the order of the rules."""
    return [statements[name].judged(*rule(ds)) for name, rule in rules.items()]


def decided(measured: str, *tests: Test) -> Judged:
    """By all of these tests; nothing can be told without any."""
    return Judged(measured, every(tests)(SURE) if tests else None)


def by_parts(found: Sequence[tuple[str, Test]], *, before: str = "", between: str = "; ") -> Judged:
    """What several parts of a result say, in words, and the verdict that all of them hold."""
    if not found:
        return NOT_THERE
    return decided(before + between.join(said for said, _ in found), *(test for _, test in found))


def over_each(values: xr.DataArray) -> list[Interval]:
    """Means over runs, by Student's t, of values [..., seed], place by place; places without any run are left out."""
    places = values.transpose(..., "seed").values.reshape(-1, values.sizes["seed"])
    return [over_runs(runs) for runs in places if np.isfinite(runs).any()]


def each_above(values: xr.DataArray, threshold: float = 0.0) -> Test:
    """Whether the means over runs lie above at every place."""
    return every([above(found, threshold) for found in over_each(values)])


def over_told(values: xr.DataArray | np.ndarray, form: str = ".3g", change: Callable[[float], float] = float) -> str:
    """The mean over all runs with its interval, in words; `change` undoes a logarithm."""
    return told(over_runs(np.ravel(values)), form, change)


def setting(ds: xr.Dataset, name: str) -> Any:
    """A setting that a result was made with."""
    return json.loads(ds.attrs["settings"])[name]


def has(ds: xr.Dataset, **wanted: Any) -> bool:
    """Whether a result has these values along its dimensions; of lists all."""
    return all(dim in ds.coords and np.isin(value, ds[dim].values).all() for dim, value in wanted.items())
