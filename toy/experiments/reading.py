"""What all experiments read results with: headlines, the statements judged by them, tables and curves.

A headline of an experiment is an array [..., seed] of numbers by run (`probes.measure.Headline`; one that is a `ratio` is
averaged by its logarithm). From the headlines follow the tables, and most statements: the mean over runs at every place
lies on one side of a bound by Student's t (`lies`), or grows from place to place by Welch's (`grows`). A published run is
held against the prediction interval of one more run (`as_drawn`). What a result has
not is a `KeyError`, as xarray raises it: then the statement is not measured.
"""

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
from probes.claims.rules import (
    LISTED,
    SURE,
    Lacks,
    Test,
    Told,
    above,
    below,
    between,
    drawn,
    every,
    near,
    nothing,
    range_told,
    told,
)
from probes.headlines import array_of
from probes.headlines import places as names_of
from probes.measure import Headline
from probes.results.gate import TRAINED
from probes.results.statistics import Interval, between_runs, one_more, over_runs
from probes.results.tables import Table, interval

OVER_RUNS = "by the 95 % interval over runs"
ONE_RUN = "at every place: the source has one run"
WELCH = "by the 95 % interval of Welch's t over runs"
LONG = 24  # rows of a table
LOGARITHM = " of its logarithm"
TINY = float(np.finfo(np.float64).tiny)
Part = TypeVar("Part", xr.Dataset, xr.DataArray)
Known = TypeVar("Known")


def setting(ds: xr.Dataset, name: str, default: Any = None) -> Any:
    """A setting that a result was made with."""
    return json.loads(ds.attrs["settings"]).get(name, default)


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
        verdict: Any = test(SURE) if callable(test) else test
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

    Of values [..., estimate] their own intervals; of others, which are exact, intervals without width.
    """
    if "seed" in values.dims and "estimate" not in values.dims:
        return _by_place(over_runs, values)
    ends = values.transpose("estimate", ...) if "estimate" in values.dims else values.expand_dims(estimate=3)
    intervals = [Interval(*of) for of in ends.values.reshape(3, -1).T]
    found = {name: of for name, of in zip(names_of(ends[0]), intervals, strict=True) if np.isfinite(of.value)}
    need(found)
    return found


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
    bare = {"low": np.nan, "high": np.nan}  # of what has no width
    shown = {name: of if of.low < of.high else of._replace(**bare) for name, of in found.items()}
    return "; ".join(f"{name} {told(of, **look)}".strip() for name, of in shown.items()), every(tests)


def together(parts: Mapping[str, Told], of: Callable[[list[Any]], Test] = every) -> Told:
    """What several parts of a result say, by name, and whether all of them hold (or some)."""
    need(parts)
    return "; ".join(f"{name}: {words}" for name, (words, _) in parts.items()), of([test for _, test in parts.values()])


# -- statements that read a headline


class Bound(NamedTuple):
    """On which side of what an interval has to lie."""

    words: str  # behind the headline's name
    test: Callable[..., Test]
    than: tuple[float, ...]
    of: Callable[[Interval], Interval] = lambda mean: mean  # which interval, from that of the mean over runs


def over(least: float) -> Bound:
    """The whole interval lies above."""
    return Bound(f"lies above {least:g}", above, (float(least),))


def under(most: float) -> Bound:
    """The whole interval lies below."""
    return Bound(f"lies below {most:g}", below, (float(most),))


def around(value: float) -> Bound:
    """The whole interval lies within a quarter of a number."""
    return Bound(f"lies within a quarter of {value:g}", near, (float(value),))


def within(margin: float) -> Bound:
    """The whole interval lies so near to 0."""
    return Bound(f"lies within {margin:g} of 0", between, (-margin, margin))


def as_drawn(published: float, margin: float, widest: float) -> Bound:
    """A published run lies inside the prediction interval of one more run, or so near to it; undecided if that is wider."""
    words = (
        f"has {published:g} inside the 95 % prediction interval of one more run (mean +- t s sqrt(1 + 1/n)), or within"
    )
    words = f"{words} {margin:.3g} of it (undecided where that is wider than {widest:.3g}, ours)"
    return Bound(words, drawn, (float(published), float(margin), float(widest)), one_more)


def no_more(margin: float) -> Bound:
    """It is nothing, by two one-sided tests."""
    return Bound(f"lies within {margin:g} of 0 with its 90 % interval", nothing, (float(margin),))


def lacking(ds: xr.Dataset) -> Told:
    """Judges what no result has yet; the rule says what would be needed."""
    raise Lacks


class Ruled(NamedTuple):
    """A rule in words, and the function that judges by it."""

    words: str
    judged: Callable[[xr.Dataset], Told]


def lies(
    headline: Headline | Sequence[Headline], bound: Bound, at: Mapping[str, Any] | None = None, by: str = OVER_RUNS
) -> Ruled:
    """A headline's means over runs lie on this side of a bound, at every place.

    Args:
        headline: what decides; of several, all have to.
        bound: where it has to lie, a ratio's not in logarithms.
        at: the places, if not all.
        by: what decides, at the end of the rule.
    """
    several = [headline] if isinstance(headline, Headline) else headline
    names = ", and ".join(of.name for of in several)

    def judged(ds: xr.Dataset) -> Told:
        parts = {}
        for of in several:
            than = tuple(map(math.log, bound.than)) if of.ratio else bound.than
            found = {place: bound.of(mean) for place, mean in means(of_runs(of, ds, at)).items()}
            parts[of.name] = tell(found, bound.test, *than, **_look(of))
        return together(parts) if len(parts) > 1 else parts[names]

    return Ruled(f"{names}{_where(at)} {bound.words}, {by}{LOGARITHM * several[0].ratio}", judged)


def grows(headline: Headline, along: Sequence[Mapping[str, Any]], at: Mapping[str, Any] | None = None) -> Ruled:
    """A headline grows from each of these places to the next, of other runs; arguments as in `lies`."""
    steps = {f"from {_words(less)} to {_words(more)}": (less, more) for less, more in pairwise(along)}

    def judged(ds: xr.Dataset) -> Told:
        sides = {step: [of_runs(headline, ds, {**(at or {}), **of}) for of in pair] for step, pair in steps.items()}
        return together({step: versus(y, x, above, 0, **_look(headline)) for step, (x, y) in sides.items()})

    return Ruled(f"{headline.name}{_where(at)} rises {', '.join(steps)}, {WELCH}{LOGARITHM * headline.ratio}", judged)


def state(source: Source, name: str, claim: str, *rules: Ruled, **fields: Any) -> None:
    """State something that holds where all of these rules do.

    Args:
        source: that says it; `fields` are those of its statement.
        name: the statement's id behind the source's prefix.
        claim: one sentence that can be read alone.
        rules: what decides.
    """

    def judged(ds: xr.Dataset) -> Told:
        words, tests = zip(*(rule.judged(ds) for rule in rules), strict=True)
        return "; ".join(words), every(tests)

    source(name, claim=claim, rule="; ".join(rule.words for rule in rules), **fields)(judged)


def change(headline: Headline, before: Mapping[str, Any], after: Mapping[str, Any]) -> Headline:
    """What a headline has more at one place than at another, run by run."""
    name = f"{headline.name} at {_words(after)} less that at {_words(before)}, run by run"
    return Headline(name, lambda ds: headline.of(ds).sel(after, drop=True) - headline.of(ds).sel(before, drop=True))


def _words(at: Mapping[str, Any]) -> str:
    return ", ".join(f"{dim.replace('_', ' ')} {value}" for dim, value in at.items())


def _where(at: Mapping[str, Any] | None) -> str:
    return f" ({_words(at)})" if at else ""


def of_runs(headline: Headline, ds: xr.Dataset, at: Mapping[str, Any] | None = None) -> xr.DataArray:
    """A headline's values by run at some places, a ratio's logarithms."""
    values = headline.of(ds).sel(at or {}, drop=True)
    return xr.ufuncs.log(values.clip(TINY)) if headline.ratio else values


def _look(headline: Headline) -> dict[str, Any]:
    return {"form": headline.form} | ({"change": math.exp} if headline.ratio else {})


# -- tables and curves


def tables_of(headlines: Iterable[Headline], ds: xr.Dataset) -> list[Table]:
    """A table for every set of places that headlines have: medians over seeds with their range, or intervals [estimate].

    A long table of one headline has its last dimension across.
    """
    groups: dict[tuple[str, ...], dict[str, tuple[xr.DataArray, str]]] = {}
    for headline in headlines:
        values = array_of(headline, ds)
        if values is not None:
            dims = tuple(str(dim) for dim in values.dims if dim not in ("seed", "estimate"))
            groups.setdefault(dims, {})[headline.name] = values, headline.form
    return [_table(dims, columns) for dims, columns in groups.items()]


def _table(dims: Sequence[str], columns: Mapping[str, tuple[xr.DataArray, str]]) -> Table:
    """The headlines of one set of places, which are those of the first; places without any number are left out."""
    title = f"Median over seeds (range){', by ' * bool(dims)}{', '.join(dims)}".replace("_", " ")
    first = next(iter(columns.values()))[0]
    at = {dim: first[dim].values for dim in dims}
    size = [len(labels) for labels in at.values()]
    cells, there = [], []
    for of, form in columns.values():
        runs = of.sel(at).transpose(*dims, ...).values.reshape(math.prod(size), -1).astype(float)
        exact = "estimate" in of.dims
        cells.append([interval(*here, form=form) if exact else range_told(here, form) for here in runs])
        there.append(np.isfinite(runs).any(1))
    texts, kept, names = np.array(cells, object), np.any(there, 0), [*columns]
    if len(names) == 1 and len(kept) > LONG:
        *dims, across = dims
        title, names = f"{title}: {names[0]}", [label(across, value) for value in at[across].tolist()]
        texts, kept = texts.reshape(-1, len(names)).T, kept.reshape(-1, len(names)).any(1)
    places_of = product(*([x if isinstance(x, str) else f"{x:g}" for x in at[dim].tolist()] for dim in dims))
    rows = [[*place, *texts[:, n]] for n, place in enumerate(places_of) if kept[n]]
    return Table(title, (*(dim.replace("_", " ") for dim in dims), *names), rows)


def label(dim: str, value: Any) -> str:
    """A place in words: its name, or its number behind the dimension's."""
    return value if isinstance(value, str) else f"{dim.replace('_', ' ')} {value:g}"


def ranged(name: str, values: xr.DataArray | np.ndarray, color: str, **look: Any) -> Series:
    """Medians of values [seed, x], with their range as a band; what is not finite is left out."""
    runs = np.ma.masked_invalid(np.asarray(values, float))
    value, low, high = (np.ma.filled(end, np.nan) for end in (np.ma.median(runs, 0), runs.min(0), runs.max(0)))
    return Series(name, value, color, low, high, **look)


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
