"""Rules for [Gu], arXiv 2410.10781, "When Attention Sink Emerges in Language Models"."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import xarray as xr

from ..results.curves import three_digits
from ..results.dataset import options_of
from ..results.folder import Collected
from ..results.statistics import Interval, jackknifed, units
from ..results.tables import number
from .claim import Judged, verdict_of
from .readings import roughly
from .rules import (
    QUARTER,
    RUNS,
    Results,
    Summed,
    Tell,
    Test,
    Told,
    above,
    below,
    combinator,
    estimated,
    every,
    having,
    in_most,
    in_real,
    in_runs,
    listed,
    near,
    of_models,
    of_runs,
    over_training,
    told,
)

INPUTS = {"sinks": "prose", "code/sinks": "code", "chat/sinks": "under the chat template"}  # by kind of result
STEP = re.compile(r"(?:.*/)?(?P<model>[^/@]+)[@/]step(?P<step>\d+)")


def _measured(results: Results) -> dict[str, xr.Dataset]:
    """Results that hold position 0's sink, beside others'."""
    return {name: ds for name, ds in having(results, "sink_rate_of_model", "alpha").items() if 0 in ds["key"].values}


of_sinks = partial(of_models, "sinks", among=_measured)


def _over_documents(values: xr.DataArray, ds: xr.Dataset, tell: Callable[[np.ndarray], float]) -> Interval:
    """`tell` of means over prompts [key] of alpha or of what is made from it; no interval where prompts were not kept."""
    by_key = values.mean([dim for dim in values.dims if dim not in ("prompt", "key")])
    if "prompt" not in by_key.dims:
        return Interval(tell(by_key.values), math.nan, math.nan)
    whole = by_key.transpose("prompt", "key").values
    return jackknifed(lambda some: tell(some.mean(0)), whole, units(ds))


def _sinks(ds: xr.Dataset) -> xr.DataArray:
    """1 where a head of a prompt has its sink at a key."""
    return (ds["alpha"] > float(options_of(ds).get("threshold", 0.3))).astype(float)


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


@of_sinks()
def sink_rate(ds: xr.Dataset, rate: float, length: int) -> Told:
    """Whether a model's sink rate is near the published one, in percent, at the published length."""
    own_length = ds.sizes.get("position", 0)
    own = _rate(ds)
    said = f"{told(own, '.1f', lambda one: 100 * one)} % at T = {own_length}"
    if own_length != length:
        return f"{said}, published at T = {length}", None
    return said, near(own, rate / 100)


# ---------------------------------------------------------------------------------------------------------- universality


@of_sinks()
def sinks_in_small_models(ds: xr.Dataset, there: float) -> Told:
    rate = _rate(ds)
    return told(rate, ".3f"), above(rate, there)


@of_sinks()
def no_meaning_needed(ds: xr.Dataset, there: float) -> Told | None:
    return sinks_in_small_models.tell(ds, there) if ds.attrs.get("first_policy") != "bos" else None


def sinks_with_various_inputs(collected: Collected, there: float) -> Judged | None:
    results = {said: _measured(collected[kind]) for kind, said in INPUTS.items()}
    of_each = {
        name: {said: found[name] for said, found in results.items() if name in found}
        for name in dict.fromkeys(name for found in results.values() for name in found)
    }

    def tell(inputs: Results) -> Told:
        rates = {said: _rate(ds) for said, ds in inputs.items()}
        said = ", ".join(f"{kind} {told(rate, '.3f')}" for kind, rate in rates.items())
        return said, every(above(rate, there) for rate in rates.values())

    return in_real({name: inputs for name, inputs in of_each.items() if len(inputs) > 1}, tell)


@of_sinks("uniform")
def first_token_above_uniform(ds: xr.Dataset) -> Told:
    even = float(ds["uniform"].mean("layer").sel(key=0))
    own = _over_documents(ds["alpha"].sel(key=[0]), ds, lambda alpha: float(alpha[0]))
    return f"{told(own, '.3f')} (uniform {number(even, '.3f')})", above(own, even)


@of_sinks()
def first_token_alone(ds: xr.Dataset, there: float) -> Told:
    own, most, ahead = _first(ds, _sinks(ds) if "prompt" in ds["alpha"].dims else ds["sink_rate_of_model"])
    said = f"{number(own, '.3f')}, others at most {number(most, '.3f')}"
    return said, None if math.isnan(most) or max(own, most) < there else above(ahead, 0)


@of_models("all-keys/sinks", "token_excess")
def no_token_collects(ds: xr.Dataset, limit: float) -> Told | None:
    there = ds["token_excess"].where(ds["token_id"] >= 0)
    if there.isnull().all():
        return None
    most = there.argmax(["layer", "collector"])
    at = ds.isel(most)
    said = (
        f"'{at['collector_token'].item()}' in block {at['layer'].item()}: {told(estimated(at, 'token_excess'), '.3f')}"
    )
    each = [estimated(ds.isel(layer=a, collector=b), "token_excess") for a, b in np.argwhere(there.notnull().values)]
    return f"most at {said}", every(below(one, limit) for one in each)


# ------------------------------------------------------------------------------------------------------------- emergence


def _courses(collected: Collected) -> dict[str, dict[float, xr.Dataset]]:
    """Results by run and step; the end of training, whose step a name does not say, is infinity."""
    found: dict[str, dict[float, xr.Dataset]] = {}
    for name, ds in _measured({**collected["steps"], **collected["controlled/steps"]}).items():
        match = STEP.fullmatch(name)
        model, step = (match["model"], float(match["step"])) if match else (name.rpartition("/")[2], math.inf)
        found.setdefault(model, {})[step] = ds
    return {model: dict(sorted(steps.items())) for model, steps in found.items() if len(steps) > 1 and 0 in steps}


@combinator
def over_courses(collected: Collected, tell: Tell) -> Judged | None:
    """For the tests of the sink rates by step, one course for each run."""
    courses = _courses(collected)
    rates = {model: {step: _rate(ds).value for step, ds in steps.items()} for model, steps in courses.items()}
    said = "; ".join(
        f"{model}: " + ", ".join(f"{rate:.3f} at {_step_told(step)}" for step, rate in steps.items())
        for model, steps in rates.items()
    )
    used = [{f"{step}": ds for step, ds in steps.items()} for steps in courses.values()]
    names = f"{', '.join(courses)} over training"
    return in_runs(used, said, tell(list(rates.values())), names) if courses else None


def _step_told(step: float) -> str:
    return "the end" if math.isinf(step) else f"step {step:,.0f}"


@over_courses
def emerges_in_training(courses: list[dict[float, float]], there: float) -> list[Test]:
    first, last = (over_training([list(rates.values())[at] for rates in courses]) for at in (0, -1))
    return [below(first, there), above(last, there)]


@over_courses
def emerges_when(courses: list[dict[float, float]], there: float, steps: Sequence[int]) -> list[Test]:
    def within(rates: dict[float, float]) -> bool | None:
        first = next((step for step, rate in rates.items() if rate >= there), math.inf)
        last = max((step for step in rates if step < first), default=0.0)
        if steps[0] <= last and first <= steps[1]:
            return True
        return False if last >= steps[1] or first <= steps[0] else None

    found = [within(rates) for rates in courses]
    agreed = found[0] if len(found) >= RUNS and len(set(found)) == 1 else None
    return [lambda level: verdict_of(agreed)]


# ------------------------------------------------------------------------------------------------ keys, values and streams

NORMS = ("value_norm", "key_norm", "attends", "reads", "selected")


def _attending(ds: xr.Dataset) -> np.ndarray:
    return ds["selected"].sel(rule="attends").values.astype(bool)


@of_models("sinks", *NORMS)
def norm_small(ds: xr.Dataset, norm: str, limit: float) -> Told:
    found = (ds[norm].sel(place="sink") / ds[norm].sel(place="rest")).values[_attending(ds)]
    return (f"{listed(found)} of the others'", in_most(found < limit)) if len(found) else ("no head attends", None)


@of_models("sinks", *NORMS)
def stores_attention(ds: xr.Dataset) -> Told:
    weight, share = ds["attends"].values[_attending(ds)], ds["reads"].values[_attending(ds)]
    said = f"weight {listed(weight)}; share {listed(share)}"
    return (said, in_most(share < weight)) if len(weight) else ("no head attends", None)


@of_models("trajectory", "norm_first", "norm_others")
def stream_of_sink_large(ds: xr.Dataset, limit: float) -> Told:
    ratio = (ds["norm_first"] / ds["norm_others"]).isel(first=0).values
    at = int(np.argmax(ratio))
    return f"{ratio[at]:.1f} times before block {at}", above(roughly(float(ratio[at]), QUARTER), math.log(limit))


@of_models("trajectory", "massive", "top_ratio")
def massive_activations(ds: xr.Dataset) -> Told:
    own = ds.isel(first=0)
    count = float(own["massive"].isel(rule=0).max())
    largest = three_digits(float(own["top_ratio"].max()))
    return f"{count:g} dimension{'s' * (count != 1)}, largest {largest} medians", count > 0


# ---------------------------------------------------------------------------------------------------------------- windows


@of_runs("sinks", "uniform", among=_measured)
def window_absolute_first(found: list[Results]) -> Summed:
    first = [_first(ds, ds["alpha"] / ds["uniform"].mean("layer")) for ds in found[0].values()]
    own, most = [one for one, _, _ in first], [others for _, others, _ in first]
    ahead = over_training([a - b for a, b in zip(own, most, strict=True)])
    said = f"{listed(own)} times uniform at 0, others at most {listed(most)}"
    return said, [above(over_training(own), 1), above(ahead, 0)]


@of_runs("sinks", among=_measured)
def window_prevents(found: list[Results], models: Sequence[str], there: float) -> tuple[str, list[Test], str]:
    rates = [[_rate(ds).value for ds in one.values()] for one in found]
    plain, narrow = map(over_training, rates)
    said = "; ".join(f"{name} {listed(one, '.3f')}" for name, one in zip(models, rates, strict=True))
    return said, [above(plain, there), below(narrow, there)], ", ".join(models)


# ---------------------------------------------------------------------------------------------------- learned sink logits


@of_runs("sinks", among=_measured)
def learned_sink_replaces(found: list[Results], models: Sequence[str], there: float) -> tuple[str, list[Test], str]:
    learned, plain = ([_rate(ds).value for ds in one.values()] for one in found)
    shares = [float(ds["sink_logit_share"].mean()) for ds in found[0].values() if "sink_logit_share" in ds]
    said = f"{models[0]} {listed(learned, '.3f')} (weight on the learned logit {listed(shares)})"
    said += f"; {models[1]} {listed(plain, '.3f')}"
    return said, [below(over_training(learned), there), above(over_training(plain), there)], ", ".join(models)
