"""What the rules of all sources share: tests of an interval, one verdict for several models, who counts for what.

A rule asks for intervals, and a `Test` says what an interval means at a level of confidence. A statement **holds** where
the whole 95 % interval lies on its side, **does not hold** where it lies on the other, and is **undecided** otherwise. A
statement about models in general holds if it holds in each model by that model's own 95 % interval, and fails if it fails
in one of m at level 1 - 0.05/m (`every`); "in some model" is the reverse (`some`). A number is met within a quarter of
it, a correlation within 0.01 (`near`). "There is nothing" holds where the 90 % interval lies within margins fixed
beforehand (`nothing`).

Each population (`probes.claims.claim.Population`) has its own evidence. Fresh weights of any model decide about
initialization (`in_each`, `on_map`). Language models that others trained, of `LARGE` parameters and more, decide about
pretrained ones (`in_real`); the numbers of small ones stand beside them as `tiny`. Three or more runs of each of our
controlled models decide about an ingredient of training (`trained`, `in_runs`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import PurePath
from typing import Any, TypeAlias

import numpy as np
import xarray as xr

from ..results.curves import estimate
from ..results.folder import Collected
from ..results.statistics import Interval, between_runs, over_runs
from ..results.tables import interval, variance
from ..results.tables import range_told as range_told
from .claim import Judged, Verdict, verdict_of

Results: TypeAlias = Mapping[str, xr.Dataset]
Groups: TypeAlias = Mapping[str, Mapping[str, xr.Dataset]]  # several results of each model, by kind
Test: TypeAlias = Callable[[float], Verdict]  # at a level of confidence
Tested: TypeAlias = Test | bool | None  # a bool where no interval is needed; None: nothing is known
Told: TypeAlias = tuple[str, Tested]  # of one model: what was measured, and its test
Summed: TypeAlias = tuple[str, Sequence[Tested]]  # of runs: what was measured, and the tests that all have to hold
Tell: TypeAlias = Callable[..., Any]  # gives `Told` of one model, place or group of runs; None where it is no case

SURE = 0.95
QUARTER, HUNDREDTH = 0.25, 0.01  # how far from a published number, from a published correlation
MOST, HALF = 0.9, 0.5  # of heads
LARGE = 100_000_000  # parameters of a language model that counts as one
RUNS = 3  # of controlled training, at the least
CONTROLLED = ("tiny-llama-ntk", "tiny-llama", "tiny-mistral-window")  # in [Ruscio]'s order
LISTED = 8  # numbers that a reader takes in one by one
# Families whose feed-forward has two matrices; all others are gated and have three.
UNGATED = ("gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "phi", "falcon", "bloom", "starcoder2")


# --------------------------------------------------------------------------------------------------------------- tests


def between(found: Interval, low: float | int, high: float | int) -> Test:
    """Holds where the interval lies within [low, high], fails where it lies outside."""

    def test(level: float) -> Verdict:
        if math.isnan(found.value):
            return "not measured"
        least, most = found.at(level)
        if low <= least and most <= high:
            return "holds"
        return "does not hold" if most < low or least > high else "undecided"

    return test


def above(found: Interval, threshold: float | int) -> Test:
    """Holds where the whole interval lies above, fails where none of it does."""
    return between(found, math.nextafter(threshold, math.inf), math.inf)


def below(found: Interval, threshold: float | int) -> Test:
    """The reverse."""
    return between(found, -math.inf, math.nextafter(threshold, -math.inf))


def near(found: Interval, published: float, *, correlation: bool = False) -> Test:
    """Within a quarter of a number, or 0.01 of a correlation."""
    if not correlation:
        return between(found, published - abs(QUARTER * published), published + abs(QUARTER * published))
    low, high = published - HUNDREDTH, published + HUNDREDTH
    # An interval's end may lie beyond what a correlation can be.
    return between(found, -math.inf if low <= -1 else low, math.inf if high >= 1 else high)


def nothing(found: Interval, margin: float) -> Test:
    """Equivalence by two one-sided tests: at 95 % the 90 % interval lies within the margin."""
    inside = between(found, -margin, margin)

    def test(level: float) -> Verdict:
        if inside(2 * level - 1) == "holds":
            return "holds"
        return "undecided" if inside(level) == "holds" else inside(level)

    return test


def sure(holds: bool | None) -> Test:
    """A test without an interval, such as bits that are compared. None: nothing is known."""
    return lambda level: "not measured" if holds is None else verdict_of(holds)


def in_most(of_heads: np.ndarray) -> Test:
    """Holds in nine tenths or more of the heads, fails in under half; a model's heads are no sample."""
    share = float(np.mean(of_heads)) if of_heads.size else math.nan
    return lambda level: "holds" if share >= MOST else "does not hold" if share < HALF else "undecided"


def every(tests: Iterable[Tested]) -> Test:
    """All have to hold; those not measured do not count."""
    return _several(tests, of_all="holds", of_one="does not hold")


def some(tests: Iterable[Tested]) -> Test:
    """One has to hold; those not measured do not count."""
    return _several(tests, of_all="does not hold", of_one="holds")


def _several(tests: Iterable[Tested], of_all: Verdict, of_one: Verdict) -> Test:
    """`of_all` where all tests give it; `of_one` where one of m does at level 1 - (1 - level) / m."""
    each = [one if callable(one) else sure(one) for one in tests]

    def test(level: float) -> Verdict:
        known = [one for one in each if one(level) != "not measured"]
        if not known:
            return "not measured"
        if all(one(level) == of_all for one in known):
            return of_all
        stricter = 1 - (1 - level) / len(known)
        return of_one if any(one(stricter) == of_one for one in known) else "undecided"

    return test


def never_refuted(test: Test) -> Test:
    """Undecided where it does not hold."""
    return lambda level: "undecided" if test(level) == "does not hold" else test(level)


# ------------------------------------------------------------------------------------------------------- who counts


def one_verdict(found: Mapping[str, Told], model: str, command: str) -> Judged | None:
    """The verdict over all models or places, since the statement has to hold in each; None without any."""
    said = "; ".join(f"{name}: {told}" for name, (told, _) in found.items())
    return Judged(said, every(test for _, test in found.values())(SURE), model, command) if found else None


def in_each(results: Mapping[str, xr.Dataset | Mapping[str, xr.Dataset]], tell: Tell) -> Judged | None:
    """The verdict over all models that are a case, of any size, by one result or several of each. None without any."""
    found = {name: said for name, one in results.items() if (said := tell(one))}
    groups = [_group(results[name]) for name in found]
    kinds = dict.fromkeys(kind for group in groups for kind in group)
    used = (group[kind] for kind in kinds for group in groups if kind in group)
    return one_verdict(found, ", ".join(found), commands(used))


def _group(one: xr.Dataset | Mapping[str, xr.Dataset]) -> Mapping[str, xr.Dataset]:
    return {"": one} if isinstance(one, xr.Dataset) else one


def in_real(results: Results | Groups, tell: Tell) -> Judged | None:
    """The verdict over language models; what small ones say stands beside it and decides nothing."""
    large = {name: any(map(is_real, _group(one).values())) for name, one in results.items()}
    found, beside = (
        in_each({name: results[name] for name in large if large[name] == real}, tell) for real in (True, False)
    )
    return (found or Judged("-", "not measured", "", ""))._replace(tiny=beside.measured) if beside else found


def judging(condition: str) -> Callable[..., Judged | None]:
    """Who counts for "init" and for "pretrained"."""
    return in_each if condition == "init" else in_real


@dataclass(frozen=True)
class Combined:
    """A rule made of `judge`, which says what counts, and `tell`, which says what one of these shows.

    Each of them is given the parameters that it names.
    """

    judge: Callable[..., Judged | None]  # of `Collected`, `tell` and parameters of its own
    tell: Tell

    def __call__(self, collected: Collected, **given: Any) -> Judged | None:
        return self.judge(collected, partial(self.tell, **named(self.tell, given)), **named(self.judge, given))


def named(rule: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a rule names as parameters."""
    parts = (rule.judge, rule.tell) if isinstance(rule, Combined) else (rule,)
    return {name: values[name] for part in parts for name in signature(part).parameters if name in values}


def combinator(judge: Callable[..., Judged | None]) -> Callable[[Tell], Combined]:
    """Make a decorator that turns `tell` into a rule."""
    return partial(Combined, judge)


def of_models(kind: str, *needed: str, among: Callable[[Results], Results] = dict) -> Callable[[Tell], Combined]:
    """For what one result of a model says: of any model where the condition is "init", else of a language model.

    Args:
        kind: of the results.
        needed: variables without which a result is left out.
        among: a further choice of results. A statement about models by name needs all of them.
    """

    @combinator
    def judge(
        collected: Collected, tell: Tell, condition: str = "pretrained", only: str | Sequence[str] = ()
    ) -> Judged | None:
        there = among(having(collected[kind], *needed))
        only = [only] if isinstance(only, str) else only
        return judging(condition)({name: there[name] for name in only or there}, tell) if {*only} <= {*there} else None

    return judge


def having(results: Results, *names: str) -> dict[str, xr.Dataset]:
    """Those that hold all of these variables."""
    return {name: ds for name, ds in results.items() if all(one in ds for one in names)}


def is_real(ds: xr.Dataset) -> bool:
    """Whether a result tells of a pretrained language model of `LARGE` parameters or more."""
    conditions = ds["condition"].values if "condition" in ds.coords else [ds.attrs.get("condition")]
    return "pretrained" in conditions and parameters(config(ds)) >= LARGE


def parameters(config: Mapping[str, Any]) -> int:
    """Weights of a model's matrices by its configuration, of one routed expert; 0 where it says too little.

    Norms and biases are left out: they are less than a thousandth.
    """

    def given(*names: str) -> int:
        return next((int(config[name]) for name in names if config.get(name)), 0)

    width, blocks = given("hidden_size", "n_embd"), given("num_hidden_layers", "n_layer")
    heads, vocabulary = given("num_attention_heads", "n_head"), given("vocab_size")
    if not (width and blocks and vocabulary and heads):
        return 0
    size = given("head_dim") or width // heads
    attention = 2 * width * size * (heads + (given("num_key_value_heads") or heads))
    gated = config.get("model_type") not in UNGATED
    forward = (2 + gated) * width * (given("intermediate_size", "n_inner") or 4 * width)
    tied = config.get("tie_word_embeddings", not gated)
    return blocks * (attention + forward) + (2 - bool(tied)) * vocabulary * width


def commands(results: Iterable[xr.Dataset]) -> str:
    """The commands that made results, each once; empty where one was made from Python."""
    found = [str(ds.attrs.get("command", "")) for ds in results]
    return " && ".join(dict.fromkeys(found)) if all(found) else ""


def config(ds: xr.Dataset) -> dict[str, Any]:
    """Of the model."""
    return json.loads(str(ds.attrs.get("config", "{}")))


# ------------------------------------------------------------------------------------------------- controlled training


def runs(collected: Collected, kind: str, model: str) -> dict[str, xr.Dataset]:
    """Controlled runs of a bundled model: its own, and those of other seeds, "MODEL-seed1", under "controlled/KIND"."""
    found = {**collected[kind], **collected[f"controlled/{kind}"]}
    same = re.compile(rf"{re.escape(model)}(-seed\d+)?")
    return {name: ds for name, ds in found.items() if same.fullmatch(PurePath(name).name)}


def of_runs(kind: str, *needed: str, among: Callable[[Results], Results] = dict) -> Callable[[Tell], Combined]:
    """For what the runs of each of `models` say: words, tests that all have to hold, and perhaps what they are of.

    Arguments are those of `of_models`. A model without runs leaves nothing to judge.
    """

    @combinator
    def judge(collected: Collected, tell: Tell, models: Sequence[str]) -> Judged | None:
        found = [among(having(runs(collected, kind, model), *needed)) for model in models]
        return in_runs(found, *said) if all(found) and (said := tell(found)) else None

    return judge


def in_runs(found: Iterable[Results], said: str, tests: Iterable[Tested], model: str = "") -> Judged:
    """The verdict over controlled runs, where all tests have to hold."""
    used = [(name, ds) for one in found for name, ds in one.items()]
    model = model or ", ".join(name for name, _ in used)
    return Judged(said, every(tests)(SURE), model, commands(ds for _, ds in used))


def over_training(*groups: Sequence[float]) -> Interval:
    """Mean over one group's runs, or the difference of two groups', by Student's t; no interval below `RUNS` runs."""
    found = over_runs(groups[0]) if len(groups) == 1 else between_runs(*groups)
    enough = min(map(len, groups)) >= RUNS
    return found if enough else Interval(found.value, math.nan, math.nan)


# ----------------------------------------------------------------------------------------------------------- estimates


def estimated(ds: xr.Dataset, name: str, **where: object) -> Interval:
    """A variable at a place with the bootstrap's interval that its result holds."""
    return Interval(*estimate(ds, name, **where))


def told(found: Interval, form: str = ".3g", change: Callable[[float], float] = float) -> str:
    """In words; `change` undoes a logarithm."""
    return interval(*(change(end) for end in found[:3]), form=form)


def variances(values: Sequence[float]) -> str:
    """As `listed`, of `variance`s."""
    return listed(values, ".3g") if len(values) > LISTED else ", ".join(map(variance, values))


def listed(values: Sequence[float] | np.ndarray, form: str = ".2f") -> str:
    """A few numbers as they are; of more their median, range and count, "0.3 (0.2 to 0.5 in 12 heads)"."""
    if len(values) > LISTED:
        return f"{range_told(values, form)[:-1]} in {len(values)} heads)"
    return ", ".join(format(value, form) for value in values)
