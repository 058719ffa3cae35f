"""Tests of intervals, and who counts for which population: on known answers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from scipy.stats import norm, t, ttest_ind

from probes.claims.evidence import fresh, parameters, real, runs_of
from probes.claims.readings import of_profiles, over_training, prompted
from probes.claims.rules import SURE, above, below, between, every, listed, near, nothing, some, sure
from probes.results.folder import Collected
from probes.results.statistics import Interval, between_runs, over_runs, units
from probes.results.ushape import shape_of

SMOLLM2 = {"hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152}
TINY = {"hidden_size": 144, "num_hidden_layers": 6, "vocab_size": 2048}


def test_an_interval_on_one_side_decides():
    for found, verdict in (
        (Interval(1.5, 1.1, 2), "holds"),
        (Interval(0.7, 0.5, 0.9), "does not hold"),
        (Interval(1, 0.9, 1.1), "undecided"),
        (Interval(1.5, math.nan, math.nan), "undecided"),
        (Interval(math.nan, math.nan, math.nan), "not measured"),
        (Interval(1, 1, 1), "does not hold"),  # strictly above
    ):
        assert above(found, 1)(SURE) == verdict
        assert below(Interval(-found.value, -found.high, -found.low), -1)(SURE) == verdict
    assert between(Interval(1, 1, 2), 1, 2)(SURE) == "holds"  # ends belong to it


@pytest.mark.parametrize(
    ("number", "low", "high", "verdict"),
    [
        *((0.4, 0.31, 0.49, "holds"), (0.4, 0.29, 0.4, "undecided"), (0.4, 0.6, 0.7, "does not hold")),
        *((0.99, 0.985, 0.995, "holds"), (0.99, 0.97, 0.99, "undecided"), (0.99, 0.9, 0.95, "does not hold")),
        (0.99, 0.999, 1.001, "holds"),
    ],
)
def test_a_number_is_met_within_a_quarter_and_a_correlation_within_a_hundredth(number, low, high, verdict):
    assert near(Interval(low, low, high), number, correlation=number > 0.9)(SURE) == verdict


def test_nothing_there_takes_the_90_percent_interval():
    margin = 0.3
    wide = margin * float(norm.ppf(0.975) / norm.ppf(0.95)) * 0.999  # 95 % reaches beyond the margin, 90 % just not
    assert nothing(Interval(0.0, -wide, wide), margin)(SURE) == "holds"
    assert nothing(Interval(0.0, -1.01 * wide, 1.01 * wide), margin)(SURE) == "undecided"
    assert nothing(Interval(0.5, 0.4, 0.6), margin)(SURE) == "does not hold"
    assert nothing(Interval(0.35, 0.295, 0.405), margin)(SURE) == "undecided"


def test_in_every_model_and_in_some_where_a_failure_among_several_has_to_be_the_surer():
    yes, no, open_ = sure(True), sure(False), above(Interval(0, -1, 1), 0)
    in_every = {"holds": ([yes, yes], [sure(None), yes]), "undecided": ([yes, open_],), "does not hold": ([open_, no],)}
    assert all(every(tests)(SURE) == verdict for verdict, several in in_every.items() for tests in several)
    in_some = {"holds": [open_, yes], "undecided": [no, open_], "does not hold": [no, no], "not measured": [sure(None)]}
    assert all(some(tests)(SURE) == verdict for verdict, tests in in_some.items())
    assert every([])(SURE) == "not measured"
    needed = float(norm.ppf(1 - 0.025 / 5) / norm.ppf(0.975))  # at level 1 - 0.05 / 5, of an interval that reaches 1
    for off, verdict in ((0.99 * needed, "undecided"), (1.01 * needed, "does not hold")):
        found = Interval(-off, -off - 1, -off + 1)
        assert above(found, 0)(SURE) == "does not hold"
        assert every([*[above(Interval(5, 4, 6), 0)] * 4, above(found, 0)])(SURE) == verdict


def test_intervals_over_runs_are_student_s_at_any_level_and_welch_s_of_three_of_each():
    values = np.array([1.0, 2.0, 4.0, 5.0])
    reach = t.ppf(0.995, 3) * values.std(ddof=1) / 2
    assert over_runs(values).at(0.99) == pytest.approx((3 - reach, 3 + reach))
    low, high = Interval(2.0, 0.0, 1.0).at(0.99)  # an estimate that its resamples do not reach
    assert (low < 0, high) == (True, 1.0)
    a, b = [1.0, 1.2, 0.9, 1.4], [2.0, 2.6, 1.9]
    assert over_training(a, b)[1:3] == pytest.approx(tuple(ttest_ind(a, b, equal_var=False).confidence_interval()))
    assert between_runs([1.0, 1.0], [2.0, 2.0])[:3] == (-1, -1, -1)
    assert all(
        math.isnan(found.low) for found in (between_runs(a, b[:1]), over_training(a[:2]), over_training(a, b[:2]))
    )
    assert over_training(a)[:3] == over_runs(a)[:3]


def test_only_large_pretrained_models_decide_about_language_models():
    assert parameters(SMOLLM2) == pytest.approx(134.5e6, rel=0.1)
    assert parameters({"n_embd": 768, "n_layer": 12, "vocab_size": 50257}) == pytest.approx(124e6, rel=0.01)

    def result(config: dict[str, int], condition: str, value: float) -> xr.Dataset:
        attrs = {"config": json.dumps(config), "condition": condition, "command": "headwater sinks x"}
        return xr.Dataset({"value": value}, attrs=attrs)

    def tell(ds: xr.Dataset) -> Any:
        return f"{float(ds['value']):g}", bool(ds["value"] > 0)

    of = {"smol": result(SMOLLM2, "pretrained", 1), "tiny": result(TINY, "pretrained", -1)}
    of |= {"fresh": result(SMOLLM2, "init", -1), "other": xr.Dataset(attrs={"config": json.dumps(SMOLLM2)})}
    collected = Collected(Path(), {"sinks": of})
    told = ("smol: 1", "holds", "smol", "headwater sinks x", "tiny: -1; fresh: -1")  # the other lacks the value
    assert real("sinks").judge(collected, tell) == told
    everywhere = fresh("sinks").judge(collected, tell)
    assert everywhere is not None
    assert everywhere[1:3] == ("does not hold", "smol, tiny, fresh")
    alone = Collected(Path(), {"sinks": {"tiny": of["tiny"]}})
    assert real("sinks").judge(alone, tell) == ("-", "not measured", "", "", "tiny: -1")
    assert real("leakage").judge(collected, tell) is real("sinks", only=["gone"]).judge(collected, tell) is None


def test_runs_are_the_bundled_model_and_its_other_seeds():
    of = {"leakage": ("tiny-llama", "tiny-llama-ntk"), "controlled/leakage": ("runs/tiny-llama-seed1", "tiny-llama-x")}
    collected = Collected(Path(), {kind: dict.fromkeys(names, xr.Dataset()) for kind, names in of.items()})
    assert list(runs_of(collected, "leakage", "tiny-llama")) == ["tiny-llama", "runs/tiny-llama-seed1"]


def profile(prompts: int, seeds: int, condition: str) -> xr.Dataset:
    """Profiles that fall from `first` to 1, every prompt with a scale and a noise of its own; two prompts a document."""
    random = np.random.default_rng(0)
    curve = 1 + 9 * np.exp(-np.arange(64) / 2)
    noise = np.repeat(random.normal(0, 0.1, (seeds, prompts // 2, 1, 64)), 2, axis=2).reshape(seeds, prompts, 64)
    values = curve * np.exp(noise + random.normal(0, 2, (seeds, prompts, 1)))
    coords = {"condition": [condition], "seed": range(seeds), "document": ("prompt", np.arange(prompts) // 2)}
    return xr.Dataset({"sensitivity": (("condition", "seed", "prompt", "position"), values[None])}, coords)


def test_a_number_of_a_profile_has_documents_as_units():
    ds, exact = profile(24, 1, "pretrained"), shape_of(1 + 9 * np.exp(-np.arange(64) / 2)).primacy

    def primacy(ds: xr.Dataset, condition: str) -> Interval:
        return of_profiles(lambda curve: math.log(shape_of(curve).primacy), units(ds), prompted(ds, condition))

    found, alone = primacy(ds, "pretrained"), primacy(ds.drop_vars("document"), "pretrained")
    assert found.freedom == 11
    assert found.low < math.log(exact) < found.high  # a prompt's own scale moves no geometric mean's shape
    assert alone.high - alone.low < found.high - found.low
    assert primacy(profile(4, 3, "init"), "init").freedom == 2  # fresh models are units themselves
    with pytest.raises(KeyError, match="condition"):
        prompted(ds, "init")


def test_many_numbers_are_told_as_a_range():
    assert listed([0.5] * 8 + [1.0], ".1f") == "0.5 (0.5 to 1.0 in 9 heads)"
    assert listed([0.5] * 8, ".1f") == ", ".join(["0.5"] * 8)
