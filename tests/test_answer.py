"""The five sentences: their numbers are those of the results, and they say what was not measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from test_plots import result
from test_plots_attention import bos_result, leakage_result, several

from probes.claims import Claim
from probes.page.answer import _changed, over, sentences
from probes.results import combine
from probes.studies.collected import Collected
from probes.summary import band, profiles, ushape

CLAIM = Claim("a", "[X]", "it is so", "1", "2", "ape", "above 1", True, "headwater x")


def born(*, zeros: int = 0) -> xr.Dataset:
    ds = combine([result("pretrained", 0, zeros=zeros), *(result("init", seed, zeros=zeros) for seed in range(3))])
    return ds.assign_attrs(options='{"query": 63}')


def leaking(total: float = 0.3, residual: float = -0.25) -> xr.Dataset:
    ds = leakage_result().assign_attrs(options='{"lags": [1, 2, 8]}')
    for end, by in (("", 0), ("_low", -0.01), ("_high", 0.01)):
        ds[f"log_form_of_model{end}"][0] = total + by
        ds[f"log_share_of_model{end}"] = (
            ("source", "band"),
            np.array([[1 - residual] * 2, [residual] * 2, [0] * 2]) + by,
        )
        ds[f"log_sink_by_block{end}"] = ds[f"log_stream_by_block{end}"] * 0
    return ds


def sinking(attend: int, both: int) -> xr.Dataset:
    selected = np.zeros((4, 2, 3), dtype=np.int8)
    selected[0].flat[:attend], selected[3].flat[:both] = 1, 1
    rules = ["attends", "reads", "reacts", "sink-reading"]
    variables = {"selected": (("rule", "layer", "head"), selected), "attends": (("layer", "head"), np.zeros((2, 3)))}
    return xr.Dataset(variables, coords={"rule": rules})


def closed(difference: float) -> xr.Dataset:
    return xr.Dataset({"later_difference": (("first", "layer"), np.full((1, 2), difference))})


def told(claims=(CLAIM,), **kinds: dict[str, xr.Dataset]) -> list[str]:
    return sentences(Collected(Path(), {kind.replace("_", "-"): found for kind, found in kinds.items()}), list(claims))


def test_there_are_five_and_nothing_is_claimed_of_nothing():
    found = told(claims=())
    assert len(found) == 5
    for sentence, command in zip(found, ("leakage", "bos-swap", "jacobian", "jacobian"), strict=False):
        assert f"headwater {command} MODEL" in sentence
        assert "not measured here" in sentence
    assert " 0 were judged on these results: 0 hold, 0 do not; the other 0 " in found[4]


def test_birth_and_training_are_the_u_shapes_of_the_results():
    ds = born()
    found = profiles(ds)
    before = ushape(band([run.mean for run in found["init"]]).centre)
    after = ushape(found["pretrained"][0].mean)
    _, _, birth, training, _ = told(jacobian={"ape": ds})
    assert f"{before.primacy:.3g} times as much as to the middle, to the last {before.recency:.3g} times" in birth
    assert "theory" not in birth
    assert f"stand {after.primacy:.3g} times above the middle and the last {after.recency:.3g} times" in training


@pytest.mark.parametrize(
    ("scale", "says"),
    [
        (1.0, "the middle stays as it was, sensitivity to the first positions stays as it was"),
        (4.0, "the middle rises 4-fold, sensitivity to the first positions rises 4-fold"),
        (0.25, "the middle falls to 0.25 of what it was"),
    ],
)
def test_what_training_did_to_each_part_is_said(scale, says):
    one = result("init", 0)
    trained = one.assign(sensitivity=one["sensitivity"] * scale).assign_attrs(condition="pretrained")
    ds = combine([trained, one]).assign_attrs(options='{"query": 63}')
    assert says in told(jacobian={"ape": ds})[3]


def test_models_that_went_different_ways_are_not_said_to_agree():
    assert _changed([0.5, 2.0]) == "becomes 0.5–2 times what it was"
    assert _changed([1.05, 0.95]) == "stays as it was"


def test_the_theory_s_error_is_said_where_it_was_measured():
    ds = born()
    ds["theory_score_path"] = ds["sensitivity"] * 1.1
    assert "gives the profile within 9.5 % (rms log error)" in told(jacobian={"ape": ds})[2]


def test_a_window_that_does_not_reach_is_counted_and_left_out():
    _, _, birth, training, _ = told(jacobian={"ape": born(), "bee": born(zeros=60)})
    assert "(in 1 of 2 models, those whose attention reaches back that far)" in birth
    assert "(in 1 of 2 models)" in training
    _, _, birth, training, _ = told(jacobian={"bee": born(zeros=60)})
    assert birth == "At birth no model's attention reaches back from the last position to the first."
    assert "not measured here on a model that reaches back" in training


def test_sources_and_their_sign():
    said = told(leakage={"ape": leaking()})[0]
    assert "(0.3 nat² in the log-weights of the tokens 1 to 8 back, queries 9-31)" in said
    assert said.endswith("it accounts for 125 %, while the residual stream takes 25 % off again in one model.")
    three = told(leakage={"ape": leaking(), "bee": leaking(0.4, 0.5), "cat": leaking(0.3, 0.005)})[0]
    assert "0.3–0.4 nat²" in three
    assert three.endswith(
        "accounts for 50–125 %, while the residual stream takes 25 % off again in 1 of 3 models, "
        "adds 50 % in 1 of 3 models, cannot be told from nothing in 1 of 3 models."
    )


def test_leakage_within_noise_is_not_divided():
    assert told(leakage={"ape": leaking(0.005)})[0] == (
        "Absolute position in attention patterns is within noise at queries 9-31: it takes more prompts."
    )


def test_position_zero():
    said = told(bos_swap={"ape": several("mean", 17)}, sinks={"ape": sinking(3, 1)}, trajectory={"ape": closed(0.0)})[1]
    assert "removes 35 % of what the residual stream does to these queries (in one model)" in said
    assert "3 of 6 heads attend to position 0, 1 of which also reads what is there" in said
    assert "bit for bit, under any text (in one model)" in said
    assert "; none of 6 heads attends to position 0" in told(sinks={"ape": sinking(0, 0)})[1]
    unknown = bos_result()
    unknown["removed_of_model_low"][0] = -np.inf
    said = told(bos_swap={"ape": unknown}, trajectory={"ape": closed(0.1), "bee": closed(0.0)})[1]
    assert said.startswith(
        "What the residual stream does to these queries is within noise before position 0 is swapped; "
    )
    assert "under any text (in 1 of 2 models)" in said


def test_claims_are_counted_by_verdict():
    claims = [CLAIM, replace(CLAIM, id="b", holds=False), replace(CLAIM, id="c", holds=None), replace(CLAIM, id="d")]
    said = told(claims=claims)[4]
    assert said.startswith("Of 4 statements (")
    assert " 3 were judged on these results: 2 hold, 1 do not; the other 1 " in said


@pytest.mark.parametrize(
    ("values", "form", "said"),
    [([2.0, 1.0], ".3g", "1–2"), ([1.0001, 1.0], ".3g", "1"), ([0.5, -0.25], ".0%", "-25 to 50 %")],
)
def test_ranges(values, form, said):
    assert over(values, form) == said
