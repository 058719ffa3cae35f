"""[Gu], arXiv 2410.10781, "When Attention Sink Emerges in Language Models"."""

from __future__ import annotations

import math
import re
from functools import partial

import numpy as np
import xarray as xr

from ..claims import Judged, Statement
from ..studies.collected import Collected
from ..studies.tables import CONTROLLED, interval, number
from ..summary import three_digits
from .judging import (
    COMMANDS,
    DRAWS,
    ENDS,
    Results,
    Stated,
    Told,
    commands,
    decided,
    having,
    in_each,
    listed,
    options,
    stated,
    window,
    with_bos,
)

SOURCE = "[Gu]"
STATED: Stated = []

PUBLISHED = {  # Table 1: sink rate in percent, natural text, 64 tokens
    "gpt2-xl": ("openai-community/gpt2-xl", 77.00),
    "mistral-7b": ("mistralai/Mistral-7B-v0.1", 97.49),
    "llama2-7b": ("meta-llama/Llama-2-7b-hf", 92.47),
    "llama2-13b": ("meta-llama/Llama-2-13b-hf", 91.69),
    "llama3-8b": ("meta-llama/Meta-Llama-3-8B", 99.02),
}
PUBLISHED_LENGTH = 64
POINTS = 5.0  # percentage points within which a rate agrees: other texts, other windows
EMERGES = (1000, 2000)  # steps between which the sink of the published 60M models emerges
THERE = 0.01  # sink rate from which on a sink is there
SMALLER = 0.5  # of the others' norm, below which values are "much smaller"
LARGER = 2.0  # of the others' norm, above which a stream is "significantly larger"
STEP = re.compile(r"(?P<model>.+)@step(?P<step>\d+)")
_, PLAIN, WINDOW = CONTROLLED


def _measured(collected: Collected) -> dict[str, xr.Dataset]:
    """Results that hold position 0's sink, beside others'."""
    return {
        name: ds for name, ds in having(collected["sinks"], "sink_rate_of_model", "alpha").items() if _has_first(ds)
    }


def _has_first(ds: xr.Dataset) -> bool:
    return 0 in ds["key"].values


def _alpha(ds: xr.Dataset) -> xr.DataArray:
    """[key], mean over all else."""
    return ds["alpha"].mean([dim for dim in ds["alpha"].dims if dim != "key"])


def _rate(ds: xr.Dataset) -> tuple[float, float, float]:
    """Sink rate of position 0 with its bootstrap interval over prompts; NaN ends where prompts were not kept apart."""
    value = float(ds["sink_rate_of_model"].sel(key=0))
    if "prompt" not in ds["alpha"].dims or ds.sizes["prompt"] < 2:
        return value, math.nan, math.nan
    alpha = ds["alpha"].sel(key=0)
    sinks = (
        (alpha > float(options(ds).get("threshold", 0.3))).mean([dim for dim in alpha.dims if dim != "prompt"]).values
    )
    drawn = np.random.default_rng(0).integers(len(sinks), size=(DRAWS, len(sinks)))
    low, high = np.percentile(sinks[drawn].mean(1), ENDS)
    return value, float(low), float(high)


# -------------------------------------------------------------------------------------------------------- published models


def _table(model: str, published: float, collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        length = ds["tokens"].sizes["position"] if "tokens" in ds else 0
        rate = tuple(100 * one for one in _rate(ds))
        said = f"{interval(*rate, form='.1f')} % at T = {length}"
        if length != PUBLISHED_LENGTH:
            return f"{said}, published at T = {PUBLISHED_LENGTH}", None
        return said, abs(rate[0] - published) <= POINTS

    return in_each({name: ds for name, ds in _measured(collected).items() if name == model}, judge)


for _id, (_model, _percent) in PUBLISHED.items():
    stated(
        Statement(
            f"gu-sink-rate-{_id}",
            f"{SOURCE} Table 1",
            f"In {_model.partition('/')[2]} the first token is a sink in most heads.",
            f"sink rate (threshold 0.3, T = {PUBLISHED_LENGTH}) within {POINTS:g} percentage points of the published one",
            published=f"{_percent:.2f} %",
            model=_model,
            command=f"headwater sinks {_model} --prompts 100 --length {PUBLISHED_LENGTH} --out runs/{_id}",
        ),
        STATED,
    )(partial(_table, _model, _percent))


# ---------------------------------------------------------------------------------------------------------- universality


@stated(
    Statement(
        "gu-sinks-in-small-models",
        f"{SOURCE} 3.4, Fig. 4",
        "Attention sinks exist in all auto-regressive language models, even in small ones.",
        f"sink rate of position 0 (threshold 0.3) at least {THERE:g} in every model",
        model="bundled models, pretrained",
        command=COMMANDS["sinks"],
    ),
    STATED,
)
def _universal(collected: Collected) -> Judged | None:
    return in_each(_measured(collected), _there)


def _there(ds: xr.Dataset) -> Told:
    rate = _rate(ds)
    return interval(*rate, form=".3f"), rate[0] >= THERE


@stated(
    Statement(
        "gu-first-token-above-uniform",
        f"{SOURCE} abstract",
        "Language models give the first token significant attention.",
        "alpha (mean weight) of position 0, mean over blocks and heads, is above that of uniform attention under the "
        "same masks in every model",
        model="bundled models, pretrained",
        command=COMMANDS["sinks"],
    ),
    STATED,
)
def _above_uniform(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        own, even = float(_alpha(ds).sel(key=0)), float(ds["uniform"].mean("layer").sel(key=0))
        return f"{number(own, '.3f')} (uniform {number(even, '.3f')})", own > even

    return in_each(having(_measured(collected), "uniform"), judge)


@stated(
    Statement(
        "gu-first-token-alone",
        f"{SOURCE} 3.1",
        "The attention sink is the first token, and no other.",
        "in every model with a sink, no other position measured has a sink rate as high as position 0",
        model="bundled models, pretrained",
        command=COMMANDS["sinks"],
    ),
    STATED,
)
def _alone(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        rates = ds["sink_rate_of_model"]
        own, others = float(rates.sel(key=0)), rates.sel(key=rates["key"] != 0)
        most = float(others.max()) if others.size else math.nan
        said = f"{number(own, '.3f')}, others at most {number(most, '.3f')}"
        return said, None if max(own, most) < THERE or math.isnan(most) else own > most

    return in_each(_measured(collected), judge)


@stated(
    Statement(
        "gu-no-meaning-needed",
        f"{SOURCE} abstract",
        "The first token is a sink whatever it means, BOS or not.",
        f"sink rate of position 0 at least {THERE:g} in every model without a BOS",
        model="bundled models without BOS",
        command=COMMANDS["sinks"],
    ),
    STATED,
)
def _without_bos(collected: Collected) -> Judged | None:
    found = _measured(collected)
    return in_each({name: ds for name, ds in found.items() if name not in with_bos(found)}, _there)


# ------------------------------------------------------------------------------------------------------------- emergence


def _courses(collected: Collected) -> dict[str, dict[float, xr.Dataset]]:
    """Results by model and step; the end of training, whose step a name does not say, is infinity."""
    found: dict[str, dict[float, xr.Dataset]] = {}
    results = {
        name: ds for name, ds in having(collected["steps"], "sink_rate_of_model", "alpha").items() if _has_first(ds)
    }
    for name, ds in results.items():
        match = STEP.fullmatch(name)
        model, step = (match["model"], float(match["step"])) if match else (name, math.inf)
        found.setdefault(model, {})[step] = ds
    return {model: dict(sorted(steps.items())) for model, steps in found.items() if len(steps) > 1 and 0 in steps}


def _step_told(step: float) -> str:
    return "the end" if math.isinf(step) else f"step {step:,.0f}"


def _course_told(steps: dict[float, xr.Dataset]) -> str:
    return ", ".join(f"{_rate(ds)[0]:.3f} at {_step_told(step)}" for step, ds in steps.items())


@stated(
    Statement(
        "gu-emerges-in-training",
        f"{SOURCE} section 4",
        "Attention sinks are not there at initialization; they emerge in training.",
        f"sink rate of position 0 below {THERE:g} at step 0 and at least {THERE:g} at the last step, in every model",
        model="tiny-llama over its training",
        command=COMMANDS["steps"],
    ),
    STATED,
)
def _emerges(collected: Collected) -> Judged | None:
    courses = _courses(collected)
    if not courses:
        return None
    said = "; ".join(f"{model}: {_course_told(steps)}" for model, steps in courses.items())
    ends = [(_rate(steps[0])[0], _rate(list(steps.values())[-1])[0]) for steps in courses.values()]
    used = [ds for steps in courses.values() for ds in steps.values()]
    return Judged(said, all(a < THERE <= b for a, b in ends), f"{', '.join(courses)} over training", commands(used))


@stated(
    Statement(
        "gu-emerges-when",
        f"{SOURCE} Fig. 4",
        "The attention sink emerges between 1,000 and 2,000 steps of training.",
        f"the steps measured around the first sink rate of {THERE:g} or more lie within these; where they only overlap with "
        "them it is not decided",
        published="1,000 to 2,000 steps",
        model="tiny-llama over its training",
        command=COMMANDS["steps"],
    ),
    STATED,
)
def _when(collected: Collected) -> Judged | None:
    said, right, used = [], [], []
    for model, steps in _courses(collected).items():
        rates = {step: _rate(ds)[0] for step, ds in steps.items()}
        used += steps.values()
        first = next((step for step, rate in rates.items() if rate >= THERE), None)
        before = [step for step in rates if first is not None and step < first]
        if first is None:
            said.append(f"{model}: not up to {_step_told(max(rates))}")
            continue
        said.append(f"{model}: {_course_told(steps)}")
        last = max(before, default=0)
        within = EMERGES[0] <= last and first <= EMERGES[1]
        apart = bool(before) and (last >= EMERGES[1] or first <= EMERGES[0])
        right.append(True if within else False if apart or not before else None)
    models = ", ".join(_courses(collected))
    return Judged("; ".join(said), decided(right), f"{models} over training", commands(used)) if said else None


# ------------------------------------------------------------------------------------------------ keys, values and streams


def _norms(collected: Collected) -> dict[str, xr.Dataset]:
    return having(collected["sinks"], "value_norm", "key_norm", "attends", "reads", "selected")


def _ratios(ds: xr.Dataset, name: str) -> np.ndarray:
    """Size at position 0 against the others, in heads that attend to it."""
    chosen = ds["selected"].sel(rule="attends").values.astype(bool)
    ratio = ds[name].sel(place="sink") / ds[name].sel(place="rest")
    return ratio.values[chosen]


def _in_sinks(name: str, below: float, ds: xr.Dataset) -> Told:
    found = _ratios(ds, name)
    if not len(found):
        return "no head attends", None
    return f"{listed(found)} of the others'", bool(np.all(found < below))


for _id, _claim, _name, _below in (
    ("values-small", "Values of the sink are much smaller than those of other tokens.", "value_norm", SMALLER),
    ("keys-small", "Keys of the sink are smaller than those of other tokens.", "key_norm", 1.0),
):
    stated(
        Statement(
            f"gu-{_id}",
            f"{SOURCE} 3.1, Fig. 2",
            _claim,
            f"the {_name.partition('_')[0]}'s norm at position 0 is below {_below:g} times the mean of the others in "
            "every head whose mean weight on position 0 is above 0.3",
            model="bundled models, pretrained",
            command=COMMANDS["sinks"],
        ),
        STATED,
    )(lambda collected, name=_name, below=_below: in_each(_norms(collected), partial(_in_sinks, name, below)))


@stated(
    Statement(
        "gu-stores-attention",
        f"{SOURCE} abstract",
        "Sinks store extra attention without contributing to the value computation, as key biases would.",
        "in every head whose mean weight on position 0 is above 0.3, position 0's share of the output's size is smaller "
        "than its weight",
        model="bundled models, pretrained",
        command=COMMANDS["sinks"],
    ),
    STATED,
)
def _stores(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        chosen = ds["selected"].sel(rule="attends").values.astype(bool)
        weight, share = ds["attends"].values[chosen], ds["reads"].values[chosen]
        if not len(weight):
            return "no head attends", None
        return f"weight {listed(weight)}; share {listed(share)}", bool(np.all(share < weight))

    return in_each(_norms(collected), judge)


@stated(
    Statement(
        "gu-stream-of-sink-large",
        f"{SOURCE} 3.1",
        "From some block on the first token's hidden state is significantly larger than the others'.",
        f"the norm at position 0 is more than {LARGER:g} times the others' in some block of every model, that position "
        "being the model's own first token",
        model="bundled models, pretrained",
        command=COMMANDS["trajectory"],
    ),
    STATED,
)
def _large(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        ratio = (ds["norm_first"] / ds["norm_others"]).isel(first=0).values
        at = int(np.argmax(ratio))
        return f"{ratio[at]:.1f} times before block {at}", bool(ratio[at] > LARGER)

    return in_each(having(collected["trajectory"], "norm_first", "norm_others"), judge)


@stated(
    Statement(
        "gu-massive-activations",
        f"{SOURCE} 3.1, after [Sun]",
        "The first token has massive activations.",
        "in every model some dimension at position 0 exceeds 100 and is above 1,000 medians in some block",
        model="bundled models, pretrained",
        command=COMMANDS["trajectory"],
    ),
    STATED,
)
def _massive(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        own = ds.isel(first=0)
        count = float(own["massive"].isel(rule=0).max())
        largest = three_digits(float(own["top_ratio"].max()))
        return f"{count:g} dimension{'s' * (count != 1)}, largest {largest} medians", count > 0

    return in_each(having(collected["trajectory"], "massive", "top_ratio"), judge)


# ---------------------------------------------------------------------------------------------------------------- windows


def _windowed(results: Results) -> dict[str, xr.Dataset]:
    return {name: ds for name, ds in results.items() if window(ds) is not None}


@stated(
    Statement(
        "gu-window-absolute-first",
        f"{SOURCE} section 6, Fig. 6",
        "Under sliding-window attention the sink is the absolute first token.",
        "alpha (mean weight) against that of uniform attention is above 1 at position 0 and higher there than at "
        "every other position measured, in every model with a window",
        model=WINDOW,
        command=COMMANDS["sinks"],
    ),
    STATED,
)
def _absolute(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        ratio = _alpha(ds) / ds["uniform"].mean("layer")
        own, others = float(ratio.sel(key=0)), ratio.sel(key=ratio["key"] != 0)
        most = float(others.max()) if others.size else math.nan
        return f"{own:.2f} times uniform at 0, others at most {number(most, '.2f')}", own > 1 and own > most

    return in_each(_windowed(having(_measured(collected), "uniform")), judge)


@stated(
    Statement(
        "gu-window-prevents",
        f"{SOURCE} section 6, Fig. 6",
        "Small windows prevent the emergence of attention sinks.",
        f"sink rate of position 0 below {THERE:g} with a window of 32 ({WINDOW}), at least {THERE:g} without ({PLAIN})",
        model=f"{PLAIN}, {WINDOW}",
        command=COMMANDS["sinks"],
    ),
    STATED,
)
def _prevents(collected: Collected) -> Judged | None:
    found = _measured(collected)
    if not {PLAIN, WINDOW} <= set(found):
        return None
    plain, narrow = (_rate(found[name]) for name in (PLAIN, WINDOW))
    said = f"{PLAIN} {interval(*plain, form='.3f')}, {WINDOW} {interval(*narrow, form='.3f')}"
    used = [found[PLAIN], found[WINDOW]]
    return Judged(said, narrow[0] < THERE <= plain[0], f"{PLAIN}, {WINDOW}", commands(used))
