"""Tests of intervals, and who counts for which population: on known answers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from scipy.stats import norm, t, ttest_ind
from transformers import AutoConfig, AutoModelForCausalLM

from probes.claims import rules
from probes.claims.readings import of_profile
from probes.claims.rules import SURE, above, below, every, in_each, in_real, some, sure
from probes.results.folder import Collected
from probes.results.statistics import Interval, between_runs, over_runs
from probes.results.ushape import shape_of

SMOLLM2 = {"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9}
SMOLLM2 |= {"num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_inner": None}
TINY = SMOLLM2 | {"hidden_size": 144, "num_hidden_layers": 6, "intermediate_size": 352, "vocab_size": 2048}
NOTHING = Interval(math.nan, math.nan, math.nan)


def result(config: dict | None = None, condition: str = "pretrained", value: float = 1.0) -> xr.Dataset:
    attrs = {"config": json.dumps(config or {}), "condition": condition, "command": "headwater sinks x"}
    return xr.Dataset({"value": value}, attrs=attrs)


def test_an_interval_on_one_side_decides():
    for found, verdict in (
        (Interval(1.5, 1.1, 2), "holds"),
        (Interval(0.7, 0.5, 0.9), "does not hold"),
        (Interval(1, 0.9, 1.1), "undecided"),
        (Interval(1.5, math.nan, math.nan), "undecided"),
        (NOTHING, "not measured"),
        (Interval(1, 1, 1), "does not hold"),  # strictly above
    ):
        assert above(found, 1)(SURE) == verdict
        assert below(Interval(-found.value, -found.high, -found.low), -1)(SURE) == verdict
    assert rules.between(Interval(1, 1, 2), 1, 2)(SURE) == "holds"  # ends belong to it


def test_a_number_is_met_within_a_quarter_and_a_correlation_within_a_hundredth():
    for number, ends in (
        (0.4, {(0.31, 0.49): "holds", (0.29, 0.4): "undecided", (0.6, 0.7): "does not hold"}),
        (0.99, {(0.985, 0.995): "holds", (0.97, 0.99): "undecided", (0.9, 0.95): "does not hold"}),
        (0.99, {(0.999, 1.001): "holds"}),
    ):
        for (low, high), verdict in ends.items():
            assert rules.near(Interval(low, low, high), number, correlation=number > 0.9)(SURE) == verdict


def test_nothing_there_takes_the_90_percent_interval():
    margin = 0.3
    wide = margin * float(norm.ppf(0.975) / norm.ppf(0.95)) * 0.999  # 95 % reaches beyond the margin, 90 % just not
    assert wide > margin
    assert rules.nothing(Interval(0.0, -wide, wide), margin)(SURE) == "holds"
    assert rules.nothing(Interval(0.0, -1.01 * wide, 1.01 * wide), margin)(SURE) == "undecided"
    assert rules.nothing(Interval(0.5, 0.4, 0.6), margin)(SURE) == "does not hold"
    assert rules.nothing(Interval(0.35, 0.295, 0.405), margin)(SURE) == "undecided"


def test_in_every_model_and_in_some():
    yes, no, open_ = (sure(True), sure(False), above(Interval(0, -1, 1), 0))
    assert every([yes, yes])(SURE) == "holds"
    assert every([yes, open_])(SURE) == "undecided"
    assert every([open_, no])(SURE) == "does not hold"
    assert some([no, open_])(SURE) == "undecided"
    assert some([open_, yes])(SURE) == "holds"
    assert some([no, no])(SURE) == "does not hold"
    assert every([sure(None), yes])(SURE) == "holds"  # nobody knows of the first
    assert every([])(SURE) == some([sure(None)])(SURE) == "not measured"


def test_a_failure_among_several_has_to_be_the_surer():
    reach = 1.0  # of the 95 % interval
    needed = reach * float(norm.ppf(1 - 0.025 / 5) / norm.ppf(0.975))  # at level 1 - 0.05 / 5
    holding = [above(Interval(5, 4, 6), 0)] * 4
    for off, verdict in ((0.99 * needed, "undecided"), (1.01 * needed, "does not hold")):
        found = Interval(-off, -off - reach, -off + reach)
        assert above(found, 0)(SURE) == "does not hold"
        assert every([*holding, above(found, 0)])(SURE) == verdict
        assert some([below(found, 0), *[above(Interval(-5, -6, -4), 0)] * 4])(SURE) == (
            "holds" if verdict == "does not hold" else "undecided"
        )


def test_intervals_at_other_levels_are_student_s_own():
    values = np.array([1.0, 2.0, 4.0, 5.0])
    found = over_runs(values)
    reach = t.ppf(0.995, 3) * values.std(ddof=1) / 2
    assert found.at(0.99) == pytest.approx((3 - reach, 3 + reach))
    assert found.at(0.95) == pytest.approx(found[1:3])
    low, high = Interval(2.0, 0.0, 1.0).at(0.99)  # an estimate that its resamples do not reach
    assert low < 0
    assert high == 1.0


def test_the_difference_of_runs_is_welch_s_and_takes_three_of_each():
    a, b = [1.0, 1.2, 0.9, 1.4], [2.0, 2.6, 1.9]
    low, high = ttest_ind(a, b, equal_var=False).confidence_interval()
    assert rules.over_training(a, b)[1:3] == pytest.approx((low, high))
    assert math.isnan(between_runs(a, b[:1]).low)
    assert between_runs([1.0, 1.0], [2.0, 2.0])[:3] == (-1, -1, -1)
    for groups in ([a[:2]], [a, b[:2]]):
        assert math.isnan(rules.over_training(*groups).low)
    assert rules.over_training(a)[:3] == over_runs(a)[:3]


def test_parameters_are_those_of_the_model_cards_and_those_that_transformers_makes():
    assert rules.parameters(SMOLLM2) == pytest.approx(134.5e6, rel=1e-3)
    assert rules.parameters(GPT2) == pytest.approx(124e6, rel=1e-2)
    assert rules.parameters({}) == 0
    for config in (TINY, GPT2 | {"n_embd": 96, "n_layer": 2, "vocab_size": 500, "n_positions": 16}):
        options = {key: value for key, value in config.items() if key != "model_type"}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(str(config["model_type"]), **options))
        matrices = {id(p): p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "wpe" not in name}
        assert rules.parameters(config) == sum(matrices.values())


def test_only_large_pretrained_models_decide_about_language_models():
    results = {"smol": result(SMOLLM2), "tiny": result(TINY, value=-1), "fresh": result(SMOLLM2, "init", -1)}
    judge = lambda ds: (f"{float(ds['value']):g}", bool(ds["value"] > 0))  # noqa: E731
    found = in_real(results, judge)
    assert found == ("smol: 1", "holds", "smol", "headwater sinks x", "tiny: -1; fresh: -1")
    found = in_each(results, judge)
    assert found is not None
    assert (found.verdict, found.model) == ("does not hold", "smol, tiny, fresh")
    assert in_real({"tiny": result(TINY)}, judge) == ("-", "not measured", "", "", "tiny: 1")
    assert in_real({}, judge) is in_each({}, judge) is None


def test_runs_are_the_bundled_model_and_its_other_seeds():
    own, others = ("tiny-llama", "tiny-llama-ntk"), ("runs/tiny-llama-seed1", "runs/tiny-llama-ntk-seed1")
    kinds = {"leakage": dict.fromkeys(own, result()), "controlled/leakage": dict.fromkeys(others, result())}
    found = rules.runs(Collected(Path(), kinds), "leakage", "tiny-llama")
    assert list(found) == ["tiny-llama", "runs/tiny-llama-seed1"]


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
    found = of_profile(ds, "pretrained", lambda curve: math.log(shape_of(curve).primacy))
    assert found.freedom == 11
    assert found.low < math.log(exact) < found.high  # a prompt's own scale moves no geometric mean's shape
    alone = of_profile(ds.drop_vars("document"), "pretrained", lambda curve: math.log(shape_of(curve).primacy))
    assert alone.high - alone.low < found.high - found.low
    assert math.isnan(of_profile(ds, "init", np.mean).value)
    fresh = of_profile(profile(4, 3, "init"), "init", lambda curve: math.log(shape_of(curve).primacy))
    assert fresh.freedom == 2  # fresh models are units themselves


def test_a_range_is_no_interval():
    assert rules.range_told([3.0, math.nan, 1.0, 2.0]) == "2 (1 to 3)"
    assert rules.range_told(np.array([[0.5]]), ".1f") == "0.5"
    assert rules.range_told([math.inf]) == "-"
    assert rules.listed([0.5] * 8 + [1.0], ".1f") == "0.5 (0.5 to 1.0 in 9 heads)"
    assert rules.listed([0.5] * 8, ".1f") == ", ".join(["0.5"] * 8)
