"""What the rules of all experiments share: a result's places, means over runs, and statements read and judged."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from inspect import signature
from itertools import product
from typing import Any, NamedTuple, TypeVar

import numpy as np
import xarray as xr

from probes.charts import Series
from probes.claims.claim import Claim, Verdict
from probes.claims.ledger import Source
from probes.claims.rules import SURE, Test, above, every, told
from probes.results.statistics import Interval, over_runs

OVER_RUNS = "by the 95 % interval over runs"
Part = TypeVar("Part", xr.Dataset, xr.DataArray)
Found = TypeVar("Found")


class Lacks(Exception):
    """The result has not what the rule needs: nothing was measured."""


class Judged(NamedTuple):
    """What a rule found: the numbers in words, and the verdict (None: it cannot be told)."""

    measured: str = "-"
    verdict: Verdict | bool | None = None


Rule = Callable[[xr.Dataset], Judged]
# In words, what has not learnt of what a rule with these parameters reads, "" without any. The second argument, if given,
# is what the rule finds in a result, None where that lacks; only kinds of toys that make a difference are told then.
Untrained = Callable[[Mapping[str, Any], Callable[[xr.Dataset], Judged | None] | None], str]


def judged(
    source: Source, ds: xr.Dataset, *, done: xr.Dataset | None = None, untrained: Untrained | None = None
) -> list[Claim]:
    """Judge a result by the statements of a source, whose rules give `Judged`.

    A statement's parameter `gated=False` is not for its rule: that reads toys that have not learnt their task, too.

    Args:
        source: of the statements.
        ds: the result.
        done: the part of the result that counts, where some models have not learnt their task. What only the others tell is
            "not trained".
        untrained: what was measured of those that a rule leaves out.
    """
    claims = []
    for stated in source.statements:
        given = dict(stated.given)
        gated = given.pop("gated", True)
        rule: partial[Judged] = partial(stated.function, **given)
        judged, say = Judged(), untrained if gated else None
        try:
            judged = rule(done if done is not None and gated else ds)
            if say is not None and (left_out := say(_given(rule), partial(known, rule))):
                judged = judged._replace(measured=f"{judged.measured}. Left out: {left_out}")
        except Lacks:
            if say is not None:
                with suppress(Lacks):
                    rule(ds)
                    judged = Judged(say(_given(rule), None), "not trained")
        claims.append(stated.statement.judged(judged.measured, judged.verdict))
    return claims


def _given(rule: partial[Judged]) -> dict[str, Any]:
    """The parameters of a rule, those at their defaults among them."""
    return {name: one.default for name, one in signature(rule).parameters.items() if one.default is not one.empty}


def decided(measured: str, *tests: Test) -> Judged:
    """By all of these tests; nothing can be told without any."""
    return Judged(measured, every(tests)(SURE) if tests else None)


def by_parts(found: Sequence[tuple[str, Test]], *, before: str = "", between: str = "; ") -> Judged:
    """What several parts of a result say, in words, and the verdict that all of them hold."""
    need(found)
    return decided(before + between.join(said for said, _ in found), *(test for _, test in found))


def over_each(values: xr.DataArray) -> list[Interval]:
    """Means over runs, by Student's t, of values [..., seed], place by place; places without any run are left out."""
    places = values.transpose(..., "seed").values.reshape(-1, values.sizes["seed"])
    return [over_runs(runs) for runs in places[np.isfinite(places).any(1)]]


def each_above(values: xr.DataArray, threshold: float = 0.0) -> Test:
    """Whether the means over runs lie above at every place."""
    return every([above(found, threshold) for found in over_each(values)])


def over_told(values: xr.DataArray | np.ndarray, form: str = ".3g", change: Callable[[float], float] = float) -> str:
    """The mean over all runs with its interval, in words; `change` undoes a logarithm."""
    return told(over_runs(np.ravel(values)), form, change)


def setting(ds: xr.Dataset, name: str) -> Any:
    """A setting that a result was made with."""
    return json.loads(ds.attrs["settings"])[name]


def has(ds: Part, **wanted: Any) -> bool:
    """Whether a result has these values along its dimensions; of lists all."""
    return all(dim in ds.coords and np.isin(value, ds.coords[dim].values).all() for dim, value in wanted.items())


def need(*found: Any) -> None:
    """Raise `Lacks` unless all of these are something."""
    if not all(found):
        raise Lacks


def at(ds: Part, **wanted: Any) -> Part:
    """The part of a result at these values, `Lacks` where it has not all of them."""
    need(has(ds, **wanted))
    return ds.sel(wanted)


def variable(ds: xr.Dataset, name: str, **wanted: Any) -> xr.DataArray:
    """A variable at these values, `Lacks` where the result has not all of that."""
    need(name in ds)
    return at(ds[name], **wanted)


def known(find: Callable[..., Found], *of: Any) -> Found | None:
    """What is found there, None where it lacks."""
    with suppress(Lacks):
        return find(*of)


def places(values: Part, *dims: str) -> Iterator[tuple[tuple[Any, ...], Part]]:
    """(labels, values there) along these dimensions, the last one's fastest."""
    for labels in product(*(values.coords[dim].values.tolist() for dim in dims)):
        yield labels, values.sel(dict(zip(dims, labels, strict=True)))


def ranged(label: str, values: xr.DataArray | np.ndarray, color: str, **look: Any) -> Series:
    """Medians of values [seed, x], with their range as a band, for `probes.charts`."""
    values = np.asarray(values)
    return Series(label, np.median(values, 0), color, values.min(0), values.max(0), **look)
