"""Two results of one measure, headline by headline: base and instruct, two checkpoints, two texts.

Every headline is taken of both, and B is held against A: a ratio for sizes, by its logarithm, a difference for shares,
counts, cosines and places. How its interval is found, the table names (`docs/probes/compare.md`). `own` intervals are of
numbers that results hold no values by prompt of, or that jump, as a place does.
"""

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import xarray as xr
from jaxtyping import Int

from .errors import InputError, plural
from .headlines import Number, numbers
from .measure import Measure, measure_of, questions
from .results.dataset import Result, number_types, opened, options_of, recorded, stored
from .results.statistics import Interval, apart, jackknifed, paired, units
from .results.tables import Report, Table, interval, number

COLUMNS = ("number", "of", "A", "B", "B against A", "interval")
SETTINGS = ("text_source", "condition", "first_policy", "backend", "initialization", "headwater")  # attributes
# Options that decide no number: what is resampled and drawn, and the name of the measurement.
ASIDE = ("measurement", "seed", "bootstrap", "documents")

Unit: TypeAlias = Int[np.ndarray, " _"]  # of each prompt; two results have as many as they like


class Row(NamedTuple):
    """One number in both results."""

    name: str
    of: str  # condition, band, replacement, ...
    a: float
    b: float
    ratio: bool  # whether `change` is B / A; else B - A
    change: Interval
    how: str  # "by prompt", "by document", "unpaired", "own", or "none"


@dataclass(frozen=True)
class Comparison:
    """Two results of one measure, A and B."""

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


def compare_results(a: Result, b: Result) -> Comparison:
    """Hold one result against another of the same measure: every headline with the interval of its change.

    Args:
        a: a result of any measure, single or combined; or the path of its file.
        b: another one, over prompts of the same length; differences are B - A, ratios B / A.

    Returns:
        Comparison with `rows` (name, of, a, b, ratio, change, how), `paired`, which says what is paired with what, and
        `remarks`: settings that differ, and numbers that only one of them has. Places (conditions, replacements, bands) are
        compared like with like.

    Raises:
        InputError: another measure or none, other lengths, no number in common; no result, a file that cannot be read, or
            the same file twice.

    Source: science of the measurement, section 8.
    """
    paths = [Path(x) for x in (a, b) if isinstance(x, (str, os.PathLike))]
    a, b = opened(a), opened(b)
    if len(paths) == 2 and os.path.samefile(*map(stored, paths)):
        raise InputError(f"'{paths[0]}' and '{paths[1]}' are the same file; give two results")
    measure = _measure(a, b)
    lengths = [ds.sizes.get("position") for ds in (a, b)]  # lists have none: their ends and middles are compared
    if lengths[0] != lengths[1]:
        raise InputError(f"prompts of A have {lengths[0]} tokens, those of B {lengths[1]}; measure both at one length")
    remarks = differing(a, b)
    every = [{(n.name, n.where): n for n in numbers(measure, ds)} for ds in (a, b)]
    how, *unit = pairing(a, b)
    rows = []
    for key in (key for key in every[0] if key in every[1]):
        rows.append(_row(every[0][key], every[1][key], how, *unit))
    if not rows:
        raise InputError("the results have no number in common; measure both with the same options")
    for letter, some, others in (("A", *every), ("B", *reversed(every))):
        alone = [f"{name} ({of})" if of else name for name, of in some if (name, of) not in others]
        remarks += [f"only in {letter}, or known only there: {', '.join(alone)}"] if alone else []
    return Comparison(measure.name, (_named(a), _named(b)), rows, _said(how, a, *unit), remarks)


def _measure(a: xr.Dataset, b: xr.Dataset) -> Measure:
    one, other = measure_of(a), measure_of(b)
    if one is None or other is None:
        kind = options_of(a if one is None else b).get("measurement", "another kind")
        raise InputError(f"a result of {kind} holds no numbers to compare; give two of {', '.join(questions())}")
    if one is not other:
        raise InputError(f"A is a result of {one.name}, B of {other.name}; compare two results of one measure")
    return one


def comparison_report(found: Comparison, names: tuple[str, str] = ("A", "B")) -> Report:
    """The table of a comparison; `names` are those of the files."""
    rows = [
        [row.name, row.of, number(row.a), number(row.b), _change(row), row.how if _has_ends(row.change) else "none"]
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
    described = f"{which}. x: ratio B / A; + and -: difference B - A; brackets: 95 % intervals." + "".join(
        f" {line[0].upper()}{line[1:]}." for line in said
    )
    title = f"Two results of {found.measurement} compared"
    return Report(title, described, [Table("B against A", COLUMNS, rows)], found.remarks)


def _has_ends(change: Interval) -> bool:
    return not math.isnan(change.low)


def _change(row: Row) -> str:
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
    if not {"prompt", "context"} & set(a.dims):
        nothing = np.zeros(0, dtype=int)
        return "own", nothing, nothing
    if same:
        unit = units(a if "document" in a.coords else b)
        return "by prompt", unit, unit
    if all("document" in ds.coords for ds in (a, b)):
        names = [np.unique(ds["document"].values.astype(str)) for ds in (a, b)]
        if len(names[0]) > 1 and np.array_equal(names[0], names[1]):
            one, other = (np.searchsorted(names[0], ds["document"].values.astype(str)) for ds in (a, b))
            return "by document", one, other
    return "unpaired", units(a), units(b)


def _row(one: Number, other: Number, how: str, unit: Unit, other_unit: Unit) -> Row:
    ratio = one.headline.ratio
    a, b = one.interval.value, other.interval.value
    mine, theirs = one.samples, other.samples
    if mine is None or theirs is None or one.headline.jumps:
        if ratio and min(np.fmin(*x.interval[:2]) for x in (one, other)) > 0:  # 0 has no logarithm
            logs = [Interval(*map(math.log, x.interval[:3])) for x in (one, other)]
            return Row(one.name, one.where, a, b, True, _exp(apart(*logs)), "own")
        return Row(one.name, one.where, a, b, False, apart(one.interval, other.interval), "own")
    first, second = (_logarithm(x.mean) if ratio else x.mean for x in (mine, theirs))
    if how == "unpaired":
        change = apart(jackknifed(first, mine.values, unit), jackknifed(second, theirs.values, other_unit))
    else:
        change = paired(first, (mine.values, unit), (theirs.values, other_unit))
    return Row(one.name, one.where, a, b, ratio, _exp(change) if ratio else change, how)


def _logarithm(of: Callable[[np.ndarray], float]) -> Callable[[np.ndarray], float]:
    def logarithm(values: np.ndarray) -> float:
        size = of(values)
        return math.log(size) if size > 0 else -math.inf if size == 0 else math.nan

    return logarithm


def _exp(change: Interval) -> Interval:
    """Of logarithms; infinite where the one is 0 and the other is not."""
    with np.errstate(over="ignore"):
        return Interval(*(float(np.exp(x)) for x in change[:3]))._replace(freedom=change.freedom)


def _said(how: str, a: xr.Dataset, unit: Unit, other_unit: Unit) -> str:
    whole = "lists" if "context" in a.dims else "prompts"
    one, other = (_units(of, "sets without a common pair" if whole == "lists" else "") for of in (unit, other_unit))
    if how == "by prompt":
        return f"paired by {whole[:-1]}: both have the same {len(unit)} {whole}; units are {one}"
    if how == "by document":
        return f"paired by document: other tokens of the same {plural(len(np.unique(unit)), 'document')}"
    return f"unpaired: other {whole}, {one} in A and {other} in B, taken as independent"


def _units(unit: Unit, name: str) -> str:
    """How many units there are, called by name or as the prompts of which they are made."""
    count = len(np.unique(unit))
    return f"{count} {name or ('prompts' if count == len(unit) else 'documents')}"


def differing(a: xr.Dataset, b: xr.Dataset) -> list[str]:
    """A line for each setting that differs and may make a difference of its own."""
    settings: list[dict[str, str]] = []
    for ds in (a, b):
        of_run = {name.replace("_", " "): ", ".join(recorded(ds, name)) for name in SETTINGS}
        of_run |= {"dtype": " / ".join(number_types(ds)), "prompts": str(ds.sizes.get("prompt", 0))}
        options = {name: x for name, x in options_of(ds).items() if name not in ASIDE and x is not None}
        if options.get("method") in ("exact", "scalar"):  # as many as the width, or one
            options.pop("products", None)
        same = _named(a) == _named(b)  # and yet perhaps not the same weights: fine-tuned, or quantized in memory
        of_run |= {"weights of that name": ", ".join(one[:12] for one in recorded(ds, "weights"))} if same else {}
        settings.append(of_run | {name: json.dumps(value) for name, value in options.items()})
    return [
        f"differs: {name}: {settings[0].get(name) or 'not said'} in A, {settings[1].get(name) or 'not said'} in B"
        for name in dict.fromkeys([*settings[0], *settings[1]])
        if settings[0].get(name) != settings[1].get(name)
    ]


def _named(ds: xr.Dataset) -> str:
    revision = str(ds.attrs.get("revision", "null"))
    return str(ds.attrs.get("model", "a model")) + ("" if revision == "null" else f"@{revision[:12]}")
