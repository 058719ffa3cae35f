"""What all experiments read results with: headlines, the statements judged by them, tables and curves.

A headline of an experiment is an array [..., seed] of numbers by run (`probes.measure.Headline`; one that is a `ratio` is
averaged by its logarithm). From the headlines follow the tables, and most statements: the mean over runs at every place
lies on one side of a bound by Student's t (`state`), or grows from place to place by Welch's (`rises`). What a result has
not is a `KeyError`, as xarray raises it: then the statement is not measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise, product
from typing import Any, NamedTuple, TypeVar

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from probes.charts import CYCLE, Series, curves
from probes.claims.claim import Claim
from probes.claims.ledger import Source
from probes.claims.rules import LISTED, SURE, Lacks, Test, Told, above, below, every, near, range_told, told
from probes.headlines import array_of
from probes.headlines import places as names_of
from probes.measure import Headline
from probes.results.gate import TRAINED
from probes.results.statistics import Interval, between_runs, over_runs
from probes.results.tables import Table

OVER_RUNS = "by the 95 % interval over runs"
WELCH = "by the 95 % interval of Welch's t over runs"
LOGARITHM = " of its logarithm"
TINY = float(np.finfo(np.float64).tiny)
Part = TypeVar("Part", xr.Dataset, xr.DataArray)
Known = TypeVar("Known")


def setting(ds: xr.Dataset, name: str) -> Any:
    """A setting that a result was made with."""
    return json.loads(ds.attrs["settings"])[name]


def known(find: Callable[..., Known], *of: Any) -> Known | None:
    """What a function gives, None where the result lacks what it reads."""
    with suppress(KeyError):
        return find(*of)


def need(*conditions: Any) -> None:
    """Raise `Lacks` unless all of these are something."""
    if not all(conditions):
        raise Lacks


def places(values: Part, *dims: str) -> Iterator[tuple[tuple[Any, ...], Part]]:
    """(labels, values there) along these dimensions, the last one's fastest."""
    for labels in product(*(values.coords[dim].values.tolist() for dim in dims)):
        yield labels, values.sel(dict(zip(dims, labels, strict=True)))


# -- statements


def judge(source: Source, ds: xr.Dataset, done: xr.Dataset | None = None) -> list[Claim]:
    """Judge a result by the statements of a source, whose functions give `Told`.

    `done` is the part of the result that counts where some toys have not learnt their task: what only the others tell is
    "not trained".
    """
    claims = []
    for stated in source.statements:
        tell = partial(stated.function, **stated.given)
        words, test = known(tell, ds if done is None else done) or ("-", None)
        verdict = test(SURE) if callable(test) else test
        if words == "-" and done is not None and known(tell, ds) is not None:
            words, verdict = "only toys that have not learnt their task", "not trained"
        claims.append(stated.statement.judged(words, verdict))
    return claims


def learnt(ds: xr.Dataset, accuracy: xr.DataArray) -> xr.Dataset:
    """The part of a result that counts: of toys whose accuracies [..., seed] have `TRAINED` or more as their lower end."""
    given: Any = {"input_core_dims": [["seed"]], "vectorize": True, "output_dtypes": [float]}
    kinds = xr.apply_ufunc(lambda runs: over_runs(runs).low, accuracy, **given)
    of_toys = [name for name, values in ds.items() if {*kinds.dims} <= {*values.dims}]
    return ds.assign(ds[of_toys].where(kinds >= TRAINED))


def means(values: xr.DataArray) -> dict[str, Interval]:
    """Means over runs by place, in words, of values [..., seed]; places without any run are left out.

    Raises:
        Lacks: there is no run at all.
    """
    return _by_place(over_runs, values)


def _by_place(estimate: Callable[..., Interval], *groups: xr.DataArray) -> dict[str, Interval]:
    """An estimate of groups of runs at every place where all have some; their places are those of the first."""
    dims = [*(dim for dim in groups[0].dims if dim != "seed"), "seed"]
    of_each = [group.transpose(*dims).values.reshape(-1, group.sizes["seed"]) for group in groups]
    names = names_of(groups[0].transpose(*dims).isel(seed=0, drop=True))
    runs = [[of[np.isfinite(of)] for of in here] for here in zip(*of_each, strict=True)]
    found = {name: estimate(*here) for name, here in zip(names, runs, strict=True) if all(of.size for of in here)}
    need(found)
    return found


def each(values: xr.DataArray, test: Callable[..., Test], *than: float, **look: Any) -> Told:
    """Whether the means over runs of values [..., seed] pass a test at every place; raises as `means`."""
    return tell(means(values), test, *than, **look)


def versus(one: xr.DataArray, other: xr.DataArray, test: Callable[..., Test], *than: float, **look: Any) -> Told:
    """The same of what the one's runs have more than the other's, which are different runs."""
    return tell(_by_place(between_runs, one, other), test, *than, **look)


def tell(found: Mapping[str, Interval], test: Callable[..., Test], *than: float, **look: Any) -> Told:
    """Whether all these intervals pass a test, and what they are in words; `look` as for `told`."""
    tests = [test(interval, *than) for interval in found.values()]
    if len(found) > LISTED:
        form = look.get("form", ".3g")
        ends = [look.get("change", float)(interval.value) for interval in found.values()]
        return f"means {range_told(ends, form)} at {len(found)} places", every(tests)
    return "; ".join(f"{name} {told(interval, **look)}".strip() for name, interval in found.items()), every(tests)


def together(parts: Mapping[str, Told], of: Callable[[list[Any]], Test] = every) -> Told:
    """What several parts of a result say, by name, and whether all of them hold (or some).

    Raises:
        Lacks: there is none.
    """
    need(parts)
    return "; ".join(f"{name}: {words}" for name, (words, _) in parts.items()), of([test for _, test in parts.values()])


def mean(values: xr.DataArray | np.ndarray, form: str = ".3g", **look: Any) -> str:
    """The mean over all runs with its interval, in words."""
    return told(over_runs(np.ravel(values)), form, **look)


# -- statements that read a headline


class Bound(NamedTuple):
    """On which side of what an interval has to lie."""

    words: str  # behind the headline's name
    test: Callable[..., Test]
    than: tuple[float, ...]


def over(least: float) -> Bound:
    """The whole interval lies above."""
    return Bound(f"lies above {least:g}", above, (float(least),))


def under(most: float) -> Bound:
    """The whole interval lies below."""
    return Bound(f"lies below {most:g}", below, (float(most),))


def around(value: float) -> Bound:
    """The whole interval lies within a quarter of a number."""
    return Bound(f"lies within a quarter of {value:g}", near, (float(value),))


def state(
    source: Source,
    name: str,
    claim: str,
    headline: Headline,
    bound: Bound,
    at: Mapping[str, Any] | None = None,
    *,
    more: str = "",
    **fields: Any,
) -> None:
    """State that a headline's means over runs lie on this side of a bound, at every place.

    Args:
        source: that says it; `fields` are those of its statement.
        name: the statement's id behind the source's prefix.
        claim: one sentence that can be read alone.
        headline: what decides.
        bound: where it has to lie, a ratio's not in logarithms.
        at: the places, if not all.
        more: of the rule, at its end.
    """
    where = f" ({_words(at)})" if at else ""
    rule = f"{headline.name}{where} {bound.words}, {OVER_RUNS}{LOGARITHM * headline.ratio}{more}"
    than = tuple(map(math.log, bound.than)) if headline.ratio else bound.than

    def judged(ds: xr.Dataset) -> Told:
        return each(of_runs(headline, ds, at), bound.test, *than, **_look(headline))

    source(name, fields.pop("where", ""), claim, rule=rule, **fields)(judged)


def rises(
    source: Source,
    name: str,
    claim: str,
    headline: Headline,
    along: str,
    values: Sequence[Any],
    at: Mapping[str, Any] | None = None,
    **fields: Any,
) -> None:
    """State that a headline grows from each of these places to the next, of other runs; arguments as in `state`."""
    steps = list(pairwise(values))
    where = f" ({_words(at)})" if at else ""
    course = " to ".join(map(str, values))
    rule = f"{headline.name}{where} rises with {_words({along: course})}, from each to the next, {WELCH}"

    def judged(ds: xr.Dataset) -> Told:
        sides = [[of_runs(headline, ds, {**(at or {}), along: value}) for value in step] for step in steps]
        of_steps = [versus(more, less, above, 0, **_look(headline)) for less, more in sides]
        return together({f"from {less} to {more}": told for (less, more), told in zip(steps, of_steps, strict=True)})

    rule += LOGARITHM * headline.ratio
    source(name, fields.pop("where", ""), claim, rule=rule, **fields)(judged)


def _words(at: Mapping[str, Any]) -> str:
    return ", ".join(f"{dim.replace('_', ' ')} {value}" for dim, value in at.items())


def of_runs(headline: Headline, ds: xr.Dataset, at: Mapping[str, Any] | None = None) -> xr.DataArray:
    """A headline's values by run at some places, a ratio's logarithms."""
    values = headline.of(ds).sel(at or {}, drop=True)
    return xr.ufuncs.log(values.clip(TINY)) if headline.ratio else values


def _look(headline: Headline) -> dict[str, Any]:
    return {"form": headline.form} | ({"change": math.exp} if headline.ratio else {})


# -- tables and curves


def tables_of(headlines: Iterable[Headline], ds: xr.Dataset) -> list[Table]:
    """A table for every set of places that headlines have: medians over seeds with their range."""
    groups: dict[tuple[str, ...], dict[Headline, xr.DataArray]] = {}
    for headline in headlines:
        values = array_of(headline, ds)
        if values is not None:
            groups.setdefault(tuple(str(dim) for dim in values.dims if dim != "seed"), {})[headline] = values
    found = []
    for dims, group in groups.items():
        rows = []
        first, *_ = group.values()
        for labels in product(*(first[dim].values.tolist() for dim in dims)):
            here = {headline: of.sel(dict(zip(dims, labels, strict=True))) for headline, of in group.items()}
            if any(np.isfinite(of).any() for of in here.values()):
                cells = [range_told(of.values.ravel(), headline.form) for headline, of in here.items()]
                rows.append([*(x if isinstance(x, str) else f"{x:g}" for x in labels), *cells])
        heads = [dim.replace("_", " ") for dim in dims]
        title = f"Median over seeds (range){', by ' * bool(dims)}{', '.join(heads)}"
        found.append(Table(title, (*heads, *(headline.name for headline in group)), rows))
    return found


def label(dim: str, value: Any) -> str:
    """A place in words: its name, or its number behind the dimension's."""
    return value if isinstance(value, str) else f"{dim.replace('_', ' ')} {value:g}"


def ranged(name: str, values: xr.DataArray | np.ndarray, color: str, **look: Any) -> Series:
    """Medians of values [seed, x], with their range as a band."""
    values = np.asarray(values)
    return Series(name, np.median(values, 0), color, values.min(0), values.max(0), **look)


def courses(
    cell: Axes,
    values: xr.DataArray,
    along: str,
    by: str,
    names: Mapping[Any, str] | None = None,
    *,
    colors: Sequence[str] = CYCLE,
    log: bool = False,
    **look: Any,
) -> None:
    """A curve along one dimension for each place of another, of values [seed, along, by]: medians with ranges.

    `names` chooses places and says what stands at their curves' ends.
    """
    names = names or {value: label(by, value) for value in values[by].values.tolist()}
    for (value, name), color in zip(names.items(), colors, strict=False):
        runs = values.sel({by: value}).dropna("seed", how="all").transpose("seed", along)
        if runs.size:
            curves(cell, [ranged(name, runs, color, **({"x": runs[along].values} | look))], log=log)
