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
from functools import partial, wraps
from pathlib import PurePath
from typing import Any, TypeAlias

import numpy as np
import xarray as xr

from ..results.collected import Collected
from ..results.curves import estimate
from ..results.statistics import Interval, between_runs, over_runs
from ..results.tables import interval
from ..results.tables import range_told as range_told
from .claim import Judged, Rule, Verdict, verdict_of

Results: TypeAlias = Mapping[str, xr.Dataset]
Test: TypeAlias = Callable[[float], Verdict]  # at a level of confidence
Tested: TypeAlias = Test | bool | None  # a bool where no interval is needed; None: nothing is known
Told: TypeAlias = tuple[str, Tested]  # of one model: what was measured, and its test

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
    return Judged(_told(found), every(test for _, test in found.values())(SURE), model, command) if found else None


def in_each(results: Results, judge: Callable[[xr.Dataset], Told]) -> Judged | None:
    """The verdict over all models, whatever their size. None without any."""
    found = {name: judge(ds) for name, ds in results.items()}
    return one_verdict(found, ", ".join(found), commands(results.values()))


def in_real(results: Results, judge: Callable[[xr.Dataset], Told]) -> Judged | None:
    """The verdict over language models; what small ones say stands beside it and decides nothing."""
    tiny = {name: judge(ds) for name, ds in results.items() if not is_real(ds)}
    beside = _told(tiny) if tiny else "-"
    found = in_each({name: ds for name, ds in results.items() if name not in tiny}, judge)
    if found is not None:
        return found._replace(tiny=beside)
    return Judged("-", "not measured", "", "", beside) if tiny else None


def judging(condition: str) -> Callable[[Results, Callable[[xr.Dataset], Told]], Judged | None]:
    """Who counts for "init" and for "pretrained"."""
    return in_each if condition == "init" else in_real


def combinator(
    judge: Callable[[Collected, Callable[..., Told]], Judged | None],
) -> Callable[[Callable[..., Told]], Rule]:
    """Make a decorator that turns `tell`, what one model or place says, into a rule; its parameters go to `tell`."""

    def rule_of(tell: Callable[..., Told]) -> Rule:
        @wraps(tell)
        def rule(collected: Collected, **given: Any) -> Judged | None:
            return judge(collected, partial(tell, **given))

        return rule

    return rule_of


def of_models(
    kind: str, *needed: str, among: Callable[[Results], Results] = dict
) -> Callable[[Callable[..., Told]], Rule]:
    """For what one result of a language model says.

    Args:
        kind: of the results.
        needed: variables without which a result is left out.
        among: a further choice of results.
    """
    return combinator(lambda collected, tell: in_real(among(having(collected[kind], *needed)), tell))


def _told(found: Mapping[str, Told]) -> str:
    return "; ".join(f"{name}: {told}" for name, (told, _) in found.items())


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


def options(ds: xr.Dataset) -> dict[str, Any]:
    """What the measurement was given."""
    return json.loads(str(ds.attrs.get("options", "{}")))


def config(ds: xr.Dataset) -> dict[str, Any]:
    """Of the model."""
    return json.loads(str(ds.attrs.get("config", "{}")))


# ------------------------------------------------------------------------------------------------- controlled training


def runs(collected: Collected, kind: str, model: str) -> dict[str, xr.Dataset]:
    """Controlled runs of a bundled model: its own, and those of other seeds, "MODEL-seed1", under "controlled/KIND"."""
    found = {**collected[kind], **collected[f"controlled/{kind}"]}
    same = re.compile(rf"{re.escape(model)}(-seed\d+)?")
    return {name: ds for name, ds in found.items() if same.fullmatch(PurePath(name).name)}


def trained(
    collected: Collected, kind: str, models: Sequence[str], among: Callable[[Results], Results]
) -> list[Results]:
    """The runs of each of these models that are `among` those asked for; none where one model has none."""
    found = [among(runs(collected, kind, model)) for model in models]
    return found if all(found) else []


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


def listed(values: Sequence[float] | np.ndarray, form: str = ".2f") -> str:
    """A few numbers as they are; of more their median, range and count, "0.3 (0.2 to 0.5 in 12 heads)"."""
    if len(values) > LISTED:
        return f"{range_told(values, form)[:-1]} in {len(values)} heads)"
    return ", ".join(format(value, form) for value in values)
