"""What the rules of all experiments share: a result's places, means over runs, and statements read and judged.

A table of `NAME.toml` is a statement, and its header the id behind the file's `prefix`. Its keys are:

- `source`, `claim`, `rule` in words, `published`, `kind`, `population`: the fields of `Statement`;
- `judge`: the name of the rule in `NAME_claims`, as `by`, or that of the header, `-` as `_`; its parameters, also words;
- `gated`: false where the rule reads toys that have not learnt their task, too;
- `each`: the name of a list; every entry makes a statement, and may hold parameters, too. Neighbours of one list take turns;
- any others: words. `{name}` in a text stands for one, or for a constant of `NAME_claims`: a threshold is written once.

Values above the first table are those of every table that does not set its own.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from inspect import signature
from itertools import groupby, product
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import xarray as xr

from probes.charts import Series
from probes.claims.claim import Claim, Statement, Verdict
from probes.claims.ledger import Source
from probes.claims.rules import SURE, Test, above, every, told
from probes.results.statistics import Interval, over_runs

OVER_RUNS = "by the 95 % interval over runs"
FIELDS = ("id", "source", "claim", "rule", "published", "kind", "population")
Part = TypeVar("Part", xr.Dataset, xr.DataArray)
Found = TypeVar("Found")


class Lacks(Exception):
    """The result has not what the rule needs: nothing was measured."""


class Values(dict[str, Any]):
    """Values by name; braces in a text are filled in with other values."""

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        return value.format_map(self) if isinstance(value, str) else value


class Judged(NamedTuple):
    """What a rule found: the numbers in words, and the verdict (None: it cannot be told)."""

    measured: str = "-"
    verdict: Verdict | bool | None = None


Rule = Callable[[xr.Dataset], Judged]
# In words, what has not learnt of what a rule with these parameters reads, "" without any. The second argument, if given,
# is what the rule finds in a result, None where that lacks; only kinds of toys that make a difference are told then.
Untrained = Callable[[Mapping[str, Any], Callable[[xr.Dataset], Judged | None] | None], str]


def judged(source: Source, ds: xr.Dataset, **how: Any) -> list[Claim]:
    """Judge a result by the statements of a source, whose rules give `Judged`; `how` as in `verdicts`.

    A parameter `gated=False` is not for the rule: it reads toys that have not learnt their task, too.
    """
    rules = []
    for stated in source.statements:
        parameters = {name: value for name, value in stated.given.items() if name != "gated"}
        rules.append((stated.statement, partial(stated.function, **parameters), stated.given.get("gated", True)))
    return verdicts(rules, ds, **how)


def judge(
    module: str, ds: xr.Dataset, *, lists: Mapping[str, Sequence[Mapping[str, Any]]] | None = None, **how: Any
) -> list[Claim]:
    """As `judged`, of the statements in a module's TOML file."""
    return verdicts(stated(import_module(module), lists or {}), ds, **how)


def verdicts(
    statements: Iterable[tuple[Statement, partial[Judged], bool]],
    ds: xr.Dataset,
    *,
    done: xr.Dataset | None = None,
    untrained: Untrained | None = None,
    command: Callable[[Mapping[str, Any]], str] | None = None,
) -> list[Claim]:
    """Judge a result by statements, each with its rule, and whether that reads only toys that do their task.

    Args:
        statements: in the order of the claims.
        ds: the result.
        done: the part of the result that counts, where some models have not learnt their task. What only the others tell is
            "not trained".
        untrained: what was measured of those that a rule leaves out.
        command: what makes the models that a rule with these parameters reads; else it is that of the whole result.
    """
    found = []
    for statement, rule, gated in statements:
        judged, some, given = Judged(), untrained if gated else None, _given(rule)
        try:
            judged = rule(done if done is not None and gated else ds)
            if some is not None and (said := some(given, partial(known, rule))):
                judged = judged._replace(measured=f"{judged.measured}. Left out: {said}")
        except Lacks:
            if some is not None:
                with suppress(Lacks):
                    rule(ds)
                    judged = Judged(some(given, None), "not trained")
        found.append(statement.judged(*judged, command=command(given) if command else ""))
    return found


def _given(rule: partial[Judged]) -> dict[str, Any]:
    """The parameters of a rule, those at their defaults among them."""
    return {name: one.default for name, one in signature(rule).parameters.items() if one.default is not one.empty}


def stated(
    module: ModuleType, lists: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Iterator[tuple[Statement, partial[Judged], bool]]:
    """The statements of an experiment, each with its rule, and whether that reads only toys that do their task."""
    read = tomllib.loads(Path(str(module.__file__).replace("_claims.py", ".toml")).read_text(encoding="utf-8"))
    tables = {header: read.pop(header) for header, table in list(read.items()) if isinstance(table, dict)}
    usual = (
        {"each": "", "prefix": "", "suffix": "", "gated": True}
        | {key: x for key, x in vars(module).items() if key.isupper()}
        | read
    )
    for name, group in groupby(tables.items(), key=lambda item: (usual | item[1])["each"]):
        given_of: Sequence[Mapping[str, Any]] = {"": [{}], **lists}[name]
        for given, (header, table) in product(given_of, list(group)):
            own = {"by": header.replace("-", "_")} | table.get("judge", {})
            values = Values(usual | table | own | dict(given) | {"id": "{prefix}" + header + "{suffix}"})
            rule = getattr(module, own.pop("by"))
            own |= {key: given[key] for key in signature(rule).parameters if key in given}
            yield (
                Statement(**{key: values[key] for key in FIELDS if key in values}),
                partial(rule, **own),
                values["gated"],
            )


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
