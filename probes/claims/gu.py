"""[Gu], arXiv 2410.10781, "When Attention Sink Emerges in Language Models"."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial

import numpy as np
import xarray as xr

from ..results.collected import Collected
from ..results.curves import three_digits
from ..results.statistics import Interval, jackknifed, units
from ..results.tables import number
from .claim import Judged
from .rules import (
    CONTROLLED,
    QUARTER,
    RUNS,
    SURE,
    Results,
    Source,
    Stated,
    Test,
    Told,
    above,
    below,
    commands,
    every,
    having,
    in_most,
    in_real,
    listed,
    measuring,
    near,
    options,
    over_training,
    roughly,
    runs,
    told,
    training,
    with_bos,
)

STATED: Stated = []
of_source = Source("gu", "[Gu]", STATED)

PUBLISHED = {  # Table 1: sink rate in percent, natural text, 64 tokens
    "gpt2-xl": ("openai-community/gpt2-xl", 77.00),
    "mistral-7b": ("mistralai/Mistral-7B-v0.1", 97.49),
    "llama2-7b": ("meta-llama/Llama-2-7b-hf", 92.47),
    "llama2-13b": ("meta-llama/Llama-2-13b-hf", 91.69),
    "llama3-8b": ("meta-llama/Meta-Llama-3-8B", 99.02),
}
PUBLISHED_LENGTH = 64
EMERGES = (1000, 2000)  # steps between which the sink of the published 60M models emerges
THERE = 0.01  # sink rate from which on a sink is there: ours
SMALLER = 0.5  # of the others' norm, below which values are "much smaller": ours
LARGER = 2.0  # of the others' norm, above which a stream is "significantly larger": ours
INPUTS = {"": "prose", "code": "code", "chat": "under the chat template"}  # by variant
STEP = re.compile(r"(?:.*/)?(?P<model>[^/@]+)[@/]step(?P<step>\d+)")
_, PLAIN, WINDOW = CONTROLLED
STEPS = "--reacts off --pictures 0 --prompts 16"


def _measured(results: Results) -> dict[str, xr.Dataset]:
    """Results that hold position 0's sink, beside others'."""
    return {name: ds for name, ds in having(results, "sink_rate_of_model", "alpha").items() if 0 in ds["key"].values}


def _over_documents(values: xr.DataArray, ds: xr.Dataset, tell: Callable[[np.ndarray], float]) -> Interval:
    """`tell` of means over prompts [key] of alpha or of what is made from it; no interval where prompts were not kept."""
    by_key = values.mean([dim for dim in values.dims if dim not in ("prompt", "key")])
    if "prompt" not in by_key.dims:
        return Interval(tell(by_key.values), math.nan, math.nan)
    whole = by_key.transpose("prompt", "key").values
    return jackknifed(lambda some: tell(some.mean(0)), whole, units(ds))


def _sinks(ds: xr.Dataset) -> xr.DataArray:
    """1 where a head of a prompt has its sink at a key."""
    return (ds["alpha"] > float(options(ds).get("threshold", 0.3))).astype(float)


def _rate(ds: xr.Dataset) -> Interval:
    """Sink rate of position 0 with its interval over documents."""
    if "prompt" not in ds["alpha"].dims:
        return Interval(float(ds["sink_rate_of_model"].sel(key=0)), math.nan, math.nan)
    return _over_documents(_sinks(ds).sel(key=[0]), ds, lambda rates: float(rates[0]))


def _first(ds: xr.Dataset, values: xr.DataArray) -> tuple[float, float, Interval]:
    """Position 0's number, the largest of the others', and the difference; NaN without others."""
    at = int(np.flatnonzero(ds["key"].values == 0)[0])

    def ahead(by_key: np.ndarray) -> float:
        others = np.delete(by_key, at)
        return float(by_key[at] - others.max()) if len(others) else math.nan

    by_key = values.mean([dim for dim in values.dims if dim != "key"]).values
    found = _over_documents(values, ds, ahead)
    return float(by_key[at]), float(by_key[at]) - found.value, found


# -------------------------------------------------------------------------------------------------------- published models


def _table(model: str, published: float, collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        length = ds["tokens"].sizes["position"] if "tokens" in ds else 0
        rate = _rate(ds)
        said = f"{told(rate, '.1f', lambda one: 100 * one)} % at T = {length}"
        if length != PUBLISHED_LENGTH:
            return f"{said}, published at T = {PUBLISHED_LENGTH}", None
        return said, near(rate, published / 100)

    return in_real({name: ds for name, ds in _measured(collected["sinks"]).items() if name == model}, judge)


for _id, (_model, _percent) in PUBLISHED.items():
    of_source(
        f"sink-rate-{_id}",
        "Table 1",
        f"In {_model.partition('/')[2]} the first token is a sink in most heads.",
        f"sink rate (threshold 0.3, T = {PUBLISHED_LENGTH}) within a quarter of the published one",
        "pretrained",
        f"headwater sinks {_model} --prompts 100 --length {PUBLISHED_LENGTH} --out runs/{_id}",
        published=f"{_percent:.2f} %",
        model=_model,
    )(partial(_table, _model, _percent))


# ---------------------------------------------------------------------------------------------------------- universality


def _there(ds: xr.Dataset) -> Told:
    rate = _rate(ds)
    return told(rate, ".3f"), above(rate, THERE)


@of_source(
    "sinks-in-small-models",
    "3.4, Fig. 4",
    "Attention sinks exist in all auto-regressive language models, even in small ones.",
    f"sink rate of position 0 (threshold 0.3) above {THERE:g} in every model",
    "pretrained",
    "sinks",
)
def _universal(collected: Collected) -> Judged | None:
    return in_real(_measured(collected["sinks"]), _there)


@of_source(
    "sinks-with-various-inputs",
    "abstract",
    "Attention sinks exist whatever the input is.",
    f"sink rate of position 0 above {THERE:g} on prose, on code and under the chat template, in every model; two kinds of "
    "input at least",
    "pretrained",
    " && ".join([measuring("sinks"), measuring("sinks", more="--text code", variant="code")]),
)
def _inputs(collected: Collected) -> Judged | None:
    kinds = {said: _measured(collected[f"{variant}/sinks" if variant else "sinks"]) for variant, said in INPUTS.items()}
    by_name: dict[str, dict[str, Interval]] = {}
    for kind, results in kinds.items():
        for name, ds in results.items():
            by_name.setdefault(name, {})[kind] = _rate(ds)
    several = {name: found for name, found in by_name.items() if len(found) > 1}
    one = {name: ds for results in kinds.values() for name, ds in results.items() if name in several}
    by_ds = {id(ds): several[name] for name, ds in one.items()}

    def judge(ds: xr.Dataset) -> Told:
        found = by_ds[id(ds)]
        return ", ".join(f"{kind} {told(rate, '.3f')}" for kind, rate in found.items()), every(
            [above(rate, THERE) for rate in found.values()]
        )

    judged = in_real(one, judge)
    return judged and judged._replace(
        command=commands(ds for results in kinds.values() for name, ds in results.items() if name in judged.model)
    )


@of_source(
    "first-token-above-uniform",
    "abstract",
    "Language models give the first token significant attention.",
    "alpha (mean weight) of position 0, mean over blocks and heads, is above that of uniform attention under the same masks "
    "in every model",
    "pretrained",
    "sinks",
)
def _above_uniform(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        even = float(ds["uniform"].mean("layer").sel(key=0))
        own = _over_documents(ds["alpha"].sel(key=[0]), ds, lambda alpha: float(alpha[0]))
        return f"{told(own, '.3f')} (uniform {number(even, '.3f')})", above(own, even)

    return in_real(having(_measured(collected["sinks"]), "uniform"), judge)


@of_source(
    "first-token-alone",
    "3.1",
    "The attention sink is the first token, and no other.",
    "in every model with a sink, no other of the first positions (0 to 7 unless measured otherwise) has a sink rate as "
    "high as position 0",
    "pretrained",
    "sinks",
)
def _alone(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        own, most, ahead = _first(ds, _sinks(ds) if "prompt" in ds["alpha"].dims else ds["sink_rate_of_model"])
        said = f"{number(own, '.3f')}, others at most {number(most, '.3f')}"
        return said, None if math.isnan(most) or max(own, most) < THERE else above(ahead, 0)

    return in_real(_measured(collected["sinks"]), judge)


@of_source(
    "no-meaning-needed",
    "abstract",
    "The first token is a sink whatever it means, BOS or not.",
    f"sink rate of position 0 above {THERE:g} in every model without a BOS",
    "pretrained",
    "sinks",
)
def _without_bos(collected: Collected) -> Judged | None:
    found = _measured(collected["sinks"])
    return in_real({name: ds for name, ds in found.items() if name not in with_bos(found)}, _there)


# ------------------------------------------------------------------------------------------------------------- emergence


def _courses(collected: Collected) -> dict[str, dict[float, xr.Dataset]]:
    """Results by run and step; the end of training, whose step a name does not say, is infinity."""
    found: dict[str, dict[float, xr.Dataset]] = {}
    for name, ds in _measured({**collected["steps"], **collected["controlled/steps"]}).items():
        match = STEP.fullmatch(name)
        model, step = (match["model"], float(match["step"])) if match else (name.rpartition("/")[2], math.inf)
        found.setdefault(model, {})[step] = ds
    return {model: dict(sorted(steps.items())) for model, steps in found.items() if len(steps) > 1 and 0 in steps}


def _step_told(step: float) -> str:
    return "the end" if math.isinf(step) else f"step {step:,.0f}"


def _over_courses(collected: Collected, test: Test) -> Judged | None:
    courses = _courses(collected)
    if not courses:
        return None
    said = "; ".join(
        f"{model}: " + ", ".join(f"{_rate(ds).value:.3f} at {_step_told(step)}" for step, ds in steps.items())
        for model, steps in courses.items()
    )
    used = [ds for steps in courses.values() for ds in steps.values()]
    return Judged(said, test(SURE), f"{', '.join(courses)} over training", commands(used))


_train = training([PLAIN], "steps", STEPS, ("/step0", "/step100", "/step300", "/step1000", ""))


@of_source(
    "emerges-in-training",
    "section 4",
    "Attention sinks are not there at initialization; they emerge in training.",
    f"sink rate of position 0 below {THERE:g} at step 0 and above {THERE:g} at the last step, Student's t over "
    f"{RUNS} runs or "
    "more",
    "controlled",
    _train,
    model=f"{PLAIN} over its training",
)
def _emerges(collected: Collected) -> Judged | None:
    courses = list(_courses(collected).values())
    first, last = ([_rate(list(steps.values())[at]).value for steps in courses] for at in (0, -1))
    both = [below(over_training(first), THERE), above(over_training(last), THERE)] if courses else []
    return _over_courses(collected, every(both))


@of_source(
    "emerges-when",
    "Fig. 4",
    "The attention sink emerges between 1,000 and 2,000 steps of training.",
    f"in each of {RUNS} runs or more the steps measured around the first sink rate of {THERE:g} lie within these; "
    "in none, for "
    "it not to hold",
    "controlled",
    _train,
    published="1,000 to 2,000 steps",
    model=f"{PLAIN} over its training",
)
def _when(collected: Collected) -> Judged | None:
    def within(steps: dict[float, xr.Dataset]) -> bool | None:
        rates = {step: _rate(ds).value for step, ds in steps.items()}
        first = next((step for step, rate in rates.items() if rate >= THERE), math.inf)
        last = max((step for step in rates if step < first), default=0.0)
        if EMERGES[0] <= last and first <= EMERGES[1]:
            return True
        return False if last >= EMERGES[1] or first <= EMERGES[0] else None

    found = [within(steps) for steps in _courses(collected).values()]
    agreed = found[0] if len(found) >= RUNS and len(set(found)) == 1 else None
    return _over_courses(
        collected, lambda level: "undecided" if agreed is None else "holds" if agreed else "does not hold"
    )


# ------------------------------------------------------------------------------------------------ keys, values and streams


def _norms(collected: Collected) -> dict[str, xr.Dataset]:
    return having(collected["sinks"], "value_norm", "key_norm", "attends", "reads", "selected")


def _attending(ds: xr.Dataset) -> np.ndarray:
    return ds["selected"].sel(rule="attends").values.astype(bool)


def _in_sinks(name: str, limit: float, ds: xr.Dataset) -> Told:
    found = (ds[name].sel(place="sink") / ds[name].sel(place="rest")).values[_attending(ds)]
    if not len(found):
        return "no head attends", None
    return f"{listed(found)} of the others'", in_most(found < limit)


_most = "in nine tenths of the heads with a mean weight on position 0 above 0.3; in under half, for it not to hold"
for _id, _claim, _name, _below in (
    ("values-small", "Values of the sink are much smaller than those of other tokens.", "value_norm", SMALLER),
    ("keys-small", "Keys of the sink are smaller than those of other tokens.", "key_norm", 1.0),
):
    of_source(
        _id,
        "3.1, Fig. 2",
        _claim,
        f"the {_name.partition('_')[0]}'s norm at position 0 is below {_below:g} times the mean of the others "
        f"{_most}, in every "
        "model",
        "pretrained",
        "sinks",
    )(lambda collected, name=_name, limit=_below: in_real(_norms(collected), partial(_in_sinks, name, limit)))


@of_source(
    "stores-attention",
    "abstract",
    "Sinks store extra attention without contributing to the value computation, as key biases would.",
    f"position 0's share of the output's size is smaller than its weight {_most}, in every model",
    "pretrained",
    "sinks",
)
def _stores(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        weight, share = ds["attends"].values[_attending(ds)], ds["reads"].values[_attending(ds)]
        if not len(weight):
            return "no head attends", None
        return f"weight {listed(weight)}; share {listed(share)}", in_most(share < weight)

    return in_real(_norms(collected), judge)


@of_source(
    "stream-of-sink-large",
    "3.1",
    "From some block on the first token's hidden state is significantly larger than the others'.",
    f"the norm at position 0, known within a quarter, is above {LARGER:g} times the others' in some block of "
    "every model, that "
    "position being the model's own first token",
    "pretrained",
    "trajectory",
)
def _large(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        ratio = (ds["norm_first"] / ds["norm_others"]).isel(first=0).values
        at = int(np.argmax(ratio))
        return f"{ratio[at]:.1f} times before block {at}", above(roughly(float(ratio[at]), QUARTER), math.log(LARGER))

    return in_real(having(collected["trajectory"], "norm_first", "norm_others"), judge)


@of_source(
    "massive-activations",
    "3.1, after [Sun]",
    "The first token has massive activations.",
    "in every model some dimension at position 0 exceeds 100 and is above 1,000 medians in some block",
    "pretrained",
    "trajectory",
)
def _massive(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        own = ds.isel(first=0)
        count = float(own["massive"].isel(rule=0).max())
        largest = three_digits(float(own["top_ratio"].max()))
        return f"{count:g} dimension{'s' * (count != 1)}, largest {largest} medians", count > 0

    return in_real(having(collected["trajectory"], "massive", "top_ratio"), judge)


# ---------------------------------------------------------------------------------------------------------------- windows


def _of_training(collected: Collected, *models: str) -> list[dict[str, xr.Dataset]]:
    """The runs of each of these models; none where one has none."""
    found = [_measured(runs(collected, "sinks", model)) for model in models]
    return found if all(found) else []


@of_source(
    "window-absolute-first",
    "section 6, Fig. 6",
    "Under sliding-window attention the sink is the absolute first token.",
    "alpha (mean weight) against that of uniform attention is above 1 at position 0 and higher there than at every other "
    f"position measured, Student's t over {RUNS} runs or more",
    "controlled",
    training([WINDOW], "sinks"),
    model=WINDOW,
)
def _absolute(collected: Collected) -> Judged | None:
    found = [having(one, "uniform") for one in _of_training(collected, WINDOW)]
    if not found or not found[0]:
        return None
    own, most = [], []
    for ds in found[0].values():
        first, others, _ = _first(ds, ds["alpha"] / ds["uniform"].mean("layer"))
        own.append(first)
        most.append(others)
    ahead = over_training([a - b for a, b in zip(own, most, strict=True)])
    said = f"{listed(own)} times uniform at 0, others at most {listed(most)}"
    verdict = every([above(over_training(own), 1), above(ahead, 0)])(SURE)
    return Judged(said, verdict, ", ".join(found[0]), commands(found[0].values()))


@of_source(
    "window-prevents",
    "section 6, Fig. 6",
    "Small windows prevent the emergence of attention sinks.",
    f"sink rate of position 0 below {THERE:g} with a window of 32 ({WINDOW}), above {THERE:g} without ({PLAIN}), "
    "Student's t "
    f"over {RUNS} runs or more of each",
    "controlled",
    training([PLAIN, WINDOW], "sinks"),
    model=f"{PLAIN}, {WINDOW}",
)
def _prevents(collected: Collected) -> Judged | None:
    found = _of_training(collected, PLAIN, WINDOW)
    if not found:
        return None
    rates = [[_rate(ds).value for ds in one.values()] for one in found]
    plain, narrow = map(over_training, rates)
    said = "; ".join(f"{name} {listed(one, '.3f')}" for name, one in zip((PLAIN, WINDOW), rates, strict=True))
    verdict = every([above(plain, THERE), below(narrow, THERE)])(SURE)
    return Judged(said, verdict, f"{PLAIN}, {WINDOW}", commands(ds for one in found for ds in one.values()))
