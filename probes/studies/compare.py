"""Two results of one measurement, number by number: base and instruct, two checkpoints, two texts.

Every number that the measurement's own tables show is taken of both, and B is held against A: a ratio for sizes, by its
logarithm, a difference for shares, counts, cosines and places. The 95 % interval is found in one of four ways, which the
table names:

- `by prompt`: both results have the same tokens. A unit (a document, or a prompt where none is named) is left out of both at
  once, so that what a text does to both alike cancels.
- `by document`: the tokens differ (two tokenizers, with and without BOS), but both are windows of the same documents.
- `unpaired`: neither; two independent samples, whose half-widths add in quadrature.
- `own`: the results hold no values by prompt, but intervals of their own (leakage, bos-swap, what a mechanism says of
  recall). These are combined in the same way; that the prompts may be the same is not made use of, so that the interval is
  rather too wide.

Of `retrieval`, lists of keys and values stand in the place of prompts, and their couples are the units.

A number that has none of these stands without an interval. Jacobians are compared by their elasticity, geometric means over
prompts and seeds [section 8 of the specification]: numbers are not those of `headwater jacobian`'s table, which are of root
mean squares of the raw norm. rms(x), the elasticity's unit, is held fixed, and so are fresh weights: intervals are over
prompts. Positions that a window cuts off stay 0. The trough is a place and jumps: its interval is of the bootstrap, all
others of the jackknife (`probes.results.statistics`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import xarray as xr
from jaxtyping import Float, Int

from ..compare import Comparison as ByHeadlines
from ..compare import compare_results as by_headlines
from ..compare import comparison_report as report_of
from ..errors import InputError
from ..measure import measure_of
from ..results.dataset import Result, number_types, opened, options_of, recorded, stored
from ..results.statistics import Interval, apart, couples, ends, jackknifed, paired, resampling, units
from ..results.tables import Report, Table, interval, number
from .compare_numbers import MEASUREMENTS, Number, Sample, alone, measurement

DRAWS = 1000  # of the bootstrap
COLUMNS = ("of", "number", "A", "B", "B against A", "interval")
# Options that decide no number: what is resampled and drawn, and the name of the measurement.
ASIDE = ("measurement", "seed", "bootstrap", "documents", "pictures")

Unit: TypeAlias = Int[np.ndarray, " _"]  # [prompt]; two results have as many as they like


class Row(NamedTuple):
    """One number in both results."""

    of: str  # condition, band, replacement, ...
    name: str
    a: float
    b: float
    ratio: bool  # whether `change` is B / A; else B - A
    change: Interval
    how: str  # "by prompt", "by document", "unpaired", "own", or "none"


@dataclass(frozen=True)
class Comparison:
    """Two results of one measurement, A and B."""

    measurement: str
    models: tuple[str, str]
    rows: list[Row]
    paired: str  # a sentence
    remarks: list[str]  # settings that differ, numbers that only one of them has

    def row(self, name: str, of: str | None = None) -> Row:
        """The first row of that name; KeyError where there is none."""
        for row in self.rows:
            if row.name == name and of in (None, row.of):
                return row
        raise KeyError(name)


def compare_results(a: Result, b: Result) -> Any:
    """Hold one result against another of the same measurement: every number with the interval of its change.

    Args:
        a: a result of `probes.jacobian`, `sinks`, `trajectory`, `leakage`, `bos_swap`, `decode` or `retrieval`, single or
            combined; or the path of its file.
        b: another one, over prompts of the same length; differences are B - A, ratios B / A.

    Returns:
        Comparison with `rows` (of, name, a, b, ratio, change, how), `paired`, which says what is paired with what, and
        `remarks`: settings that differ, and numbers that only one of them has. Conditions, replacements, bands and kinds of
        first token are compared like with like; two results of one condition each are compared whichever these are.

    Raises:
        InputError: another measurement or one that is not compared, other lengths, no condition in common, no elasticity;
            no result, a file that cannot be read, or the same file twice.

    Source: science of the measurement, section 8.
    """
    paths = [Path(x) for x in (a, b) if isinstance(x, (str, os.PathLike))]
    given, a, b = (a, b), opened(a), opened(b)
    if measure_of(a) is not None:
        return by_headlines(*given)
    if len(paths) == 2 and os.path.samefile(*map(stored, paths)):
        raise InputError(f"'{paths[0]}' and '{paths[1]}' are the same file; give two results")
    kinds = [measurement(ds) for ds in (a, b)]
    if kinds[0] != kinds[1]:
        raise InputError(f"A is a result of {kinds[0]}, B of {kinds[1]}; compare two results of one measurement")
    lengths = [ds.sizes.get("position") for ds in (a, b)]  # lists have none: their ends and middles are compared
    if lengths[0] != lengths[1]:
        raise InputError(f"prompts of A have {lengths[0]} tokens, those of B {lengths[1]}; measure both at one length")
    found = [dict(MEASUREMENTS[kinds[0]](ds)) for ds in (a, b)]
    conditions = [list(dict.fromkeys(of for of, _ in one)) for one in found]
    remarks = differing(a, b)
    if kinds[0] == "jacobian" and not set(conditions[0]) & set(conditions[1]):
        if len(conditions[0]) > 1 or len(conditions[1]) > 1:
            raise InputError(
                f"A has {', '.join(conditions[0])}, B {', '.join(conditions[1])}; compare results with a condition in common"
            )
        both = " / ".join((conditions[0][0], conditions[1][0]))
        found = [{(both, name): value for (_, name), value in one.items()} for one in found]
    how, *unit = pairing(a, b)
    rows = [Row(*key, *compared(found[0][key], found[1][key], how, *unit)) for key in found[0] if key in found[1]]
    if not rows:
        raise InputError(
            "the results have no number in common; measure both with the same bands, keys and replacements"
        )
    for label, one, other in (("A", *found), ("B", *reversed(found))):
        alone = [f"{name} ({of})" for of, name in one if (of, name) not in other]
        remarks += [f"only in {label}, or known only there: {', '.join(alone)}"] if alone else []
    return Comparison(kinds[0], (_named(a), _named(b)), rows, _said(how, a, b, *unit), remarks)


def comparison_report(found: Any, names: tuple[str, str] = ("A", "B")) -> Report:
    """The table of a comparison; `names` are those of the files."""
    if isinstance(found, ByHeadlines):
        return report_of(found, names)
    rows = [
        [row.of, row.name, number(row.a), number(row.b), _change(row), row.how if _has_ends(row.change) else "none"]
        for row in found.rows
    ]
    which = "; ".join(
        f"{letter}: {model}" + ("" if name == letter else f", {name}")
        for letter, model, name in zip("AB", found.models, names, strict=True)
    )
    ways = {row.how for row in found.rows if _has_ends(row.change)}
    unknown = any(map(math.isinf, (end for row in found.rows for end in row.change[1:3])))
    said = [
        *(["?: an end is not known, so that anything may be true"] if unknown else []),
        *([found.paired] if ways - {"own"} else []),
        *(["own: independent intervals of the two results, combined in quadrature"] if "own" in ways else []),
    ]
    described = (
        f"{which}. x: ratio B / A; + and -: difference B - A; brackets: 95 % intervals."
        + (" Jacobian: elasticity, geometric means over prompts and seeds." if found.measurement == "jacobian" else "")
        + "".join(f" {line[0].upper()}{line[1:]}." for line in said)
    )
    title = f"Two results of {found.measurement} compared"
    return Report(title, described, [Table("B against A", COLUMNS, rows)], found.remarks)


def _has_ends(change: Interval) -> bool:
    return not math.isnan(change.low)


def _change(row: Any) -> str:
    if not math.isfinite(row.change.value):
        return "-"
    if row.ratio:
        return f"x {interval(*row.change[:3], form='#.3g')}"
    return interval(*row.change[:3], form="+.3g")


# ------------------------------------------------------------------------------------------------------- A against B


def pairing(a: xr.Dataset, b: xr.Dataset) -> tuple[str, Unit, Unit]:
    """How two results belong together, and each one's units; paired units have the same numbers in both."""
    same = recorded(a, "tokens_sha256") == recorded(b, "tokens_sha256")
    if all("tokens" in ds for ds in (a, b)):
        same = np.array_equal(a["tokens"], b["tokens"])
    if "context" in a.dims:
        return "by prompt" if same else "unpaired", couples(a), couples(b)
    if same:
        unit = units(a if "document" in a.coords else b)
        return "by prompt", unit, unit
    if all("document" in ds.coords for ds in (a, b)):
        names = [np.unique(ds["document"].values.astype(str)) for ds in (a, b)]
        if len(names[0]) > 1 and np.array_equal(names[0], names[1]):
            one, other = (np.searchsorted(names[0], ds["document"].values.astype(str)) for ds in (a, b))
            return "by document", one, other
    return "unpaired", units(a), units(b)


def compared(one: Number, other: Number, how: str, unit: Unit, other_unit: Unit) -> tuple[Any, ...]:
    """The columns of a `Row` from `a` on."""
    if isinstance(one.value, Interval) or isinstance(other.value, Interval):
        first, second = (_point(x.value) for x in (one, other))
        lowest = [min(x.value, x.low) if not math.isnan(x.low) else x.value for x in (first, second)]
        if one.size and min(lowest) > 0:  # an interval that reaches 0 has no logarithm
            change = _exp(apart(*(Interval(*map(math.log, x[:3])) for x in (first, second))))
            return first.value, second.value, True, change, "own"
        return first.value, second.value, False, apart(first, second), "own"
    measure = _logarithm(one.value.estimate) if one.size else one.value.estimate
    mine, theirs = (one.value.values, unit), (other.value.values, other_unit)
    if one.value.resampled is not None:
        change = _jumping(one.value, other.value, how, unit, other_unit)
    elif how == "unpaired":
        change = apart(jackknifed(measure, *mine), jackknifed(measure, *theirs))
    else:
        change = paired(measure, mine, theirs)
    a, b = (float(x.estimate(x.values)) for x in (one.value, other.value))
    return a, b, one.size, _exp(change) if one.size else change, how


def _point(value: Sample | Interval) -> Interval:
    """What is known of a number by itself; a sample's own interval is of no use beside one that has no prompts."""
    return value if isinstance(value, Interval) else alone(value.estimate(value.values))


def _jumping(one: Sample, other: Sample, how: str, unit: Unit, other_unit: Unit) -> Interval:
    """The change of a number that jumps: percentiles over resamples of the units, the same ones in both where paired."""
    assert one.resampled is not None
    assert other.resampled is not None
    if min(len(np.unique(unit)), len(np.unique(other_unit))) < 2:
        return alone(other.estimate(other.values) - one.estimate(one.values))
    count = len(unit)
    if how == "unpaired":
        drawn = [_drawn(unit, 0), _drawn(other_unit, 1)]
    else:
        both = _drawn(np.concatenate([unit, other_unit]), 0)
        drawn = [both[:, :count], both[:, count:]]
    change = other.resampled(other.values, drawn[1]) - one.resampled(one.values, drawn[0])
    low, high = ends(change)
    return Interval(float(change[0]), float(low), float(high))


def _drawn(unit: Unit, seed: int) -> Float[np.ndarray, "resample prompt"]:
    return resampling(len(unit), DRAWS, seed, documents=list(map(str, unit))).astype(np.float64)


def _logarithm(of: Callable[[np.ndarray], float]) -> Callable[[np.ndarray], float]:
    def logarithm(values: np.ndarray) -> float:
        size = of(values)
        return math.log(size) if size > 0 else -math.inf if size == 0 else math.nan

    return logarithm


def _exp(change: Interval) -> Interval:
    """Of logarithms; infinite where the one is 0 and the other is not."""
    with np.errstate(over="ignore"):
        return Interval(*(float(np.exp(x)) for x in change[:3]))._replace(freedom=change.freedom)


def _said(how: str, a: xr.Dataset, b: xr.Dataset, unit: Unit, other_unit: Unit) -> str:
    counts = [_sampled(ds) for ds in (a, b)]
    count = [len(np.unique(one)) for one in (unit, other_unit)]
    if "context" in a.dims:
        same = f"paired by list: both have the same {counts[0]} lists; units are {count[0]} sets without a common pair"
        other = f"unpaired: other lists, {count[0]} sets without a common pair in A and {count[1]} in B"
        return same if how == "by prompt" else f"{other}, taken as independent"
    what = ["prompts" if n == prompts else "documents" for n, prompts in zip(count, counts, strict=True)]
    if how == "by prompt":
        return f"paired by prompt: both have the same {counts[0]} prompts; units are {count[0]} {what[0]}"
    if how == "by document":
        return f"paired by document: other tokens of the same {count[0]} documents"
    return f"unpaired: other prompts, {count[0]} {what[0]} in A and {count[1]} {what[1]} in B, taken as independent"


def differing(a: xr.Dataset, b: xr.Dataset) -> list[str]:
    """A line for each setting that differs and may make a difference of its own."""
    found: list[dict[str, str]] = []
    for ds in (a, b):
        said = {
            "text": ", ".join(recorded(ds, "text_source")),
            "dtype": " / ".join(number_types(ds)),
            "condition": ", ".join(recorded(ds, "condition")),
            "first token": ", ".join(recorded(ds, "first_policy")),
            "backend": ", ".join(recorded(ds, "backend")),
            "fresh weights": ", ".join(recorded(ds, "initialization")),
            "version of headwater": ", ".join(recorded(ds, "headwater")),
            "prompts": str(_sampled(ds)),
        }
        options = {name: value for name, value in options_of(ds).items() if name not in ASIDE}
        if options.get("method") in ("exact", "scalar"):  # as many as the width, or one
            options.pop("products", None)
        found.append(said | {name: json.dumps(value) for name, value in options.items()})
    return [
        f"differs: {name}: {found[0].get(name) or 'not said'} in A, {found[1].get(name) or 'not said'} in B"
        for name in dict.fromkeys([*found[0], *found[1]])
        if found[0].get(name) != found[1].get(name)
    ]


def _sampled(ds: xr.Dataset) -> int:
    """Prompts of a result, or lists."""
    return ds.sizes["context" if "context" in ds.dims else "prompt"]


def _named(ds: xr.Dataset) -> str:
    revision = str(ds.attrs.get("revision", "null"))
    return str(ds.attrs.get("model", "a model")) + ("" if revision == "null" else f"@{revision[:12]}")
