"""The five sentences: their numbers are those of the results, and they say what was not measured."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from drawn import leakage_result, result, several

from probes.claims.claim import Claim
from probes.report.answer import Naming, _changed, _ends, leading, over, sentences
from probes.results.curves import three_digits
from probes.results.dataset import combine
from probes.results.folder import Collected
from probes.results.profiles import shape
from probes.results.statistics import Interval
from probes.results.tables import variance
from probes.results.ushape import shape_of

SAID = {"id": "a", "source": "[X]", "claim": "it is so", "rule": "above 1", "population": "pretrained"}
CLAIM = Claim(**SAID, published="1", measured="2", verdict="holds", model="ape", command="headwater x")


def born(*, zeros: int = 0) -> xr.Dataset:
    ds = combine([result("pretrained", 0, zeros=zeros), *(result("init", seed, zeros=zeros) for seed in range(3))])
    return ds.assign_attrs(options='{"query": 63}')


def leaking(total: float = 0.3, residual: float = -0.25) -> xr.Dataset:
    ds = leakage_result().assign_attrs(options='{"lags": [1, 2, 8]}')
    shares = np.array([[1 - residual] * 2, [residual] * 2, [0] * 2])
    for end, by in (("", 0), ("_low", -0.01), ("_high", 0.01)):
        ds[f"log_form_of_model{end}"][0] = total + by
        ds[f"log_share_of_model{end}"] = ("source", "band"), shares + by
        ds[f"log_sink_by_block{end}"] = ds[f"log_stream_by_block{end}"] * 0
    return ds


def closed(difference: float) -> xr.Dataset:
    return xr.Dataset({"later_difference": (("first", "layer"), np.full((1, 2), difference))})


def told(claims=(CLAIM,), **kinds: dict[str, xr.Dataset]) -> list[str]:
    return sentences(Collected(Path(), {kind.replace("_", "-"): found for kind, found in kinds.items()}), list(claims))


def real(ds: xr.Dataset) -> xr.Dataset:
    """The result as one of a large language model."""
    size = {"hidden_size": 4096, "num_hidden_layers": 30, "num_attention_heads": 32, "vocab_size": 49152}
    return ds.assign_attrs(config=json.dumps(size), condition="pretrained")


def test_there_are_five_and_nothing_is_claimed_of_nothing():
    found = told(claims=())
    assert len(found) == 5
    for sentence, command in zip(found, ("leakage", "bos-swap", "jacobian", "jacobian"), strict=False):
        assert f"headwater {command} MODEL" in sentence
        assert "not measured here" in sentence
    assert found[4] == "No statement of a source was judged."


def test_real_models_alone_speak_where_there_are_any():
    found = {"ape": born(), "bee": real(born())}
    assert list(leading(found)) == ["bee"]
    assert list(leading({"ape": born()})) == ["ape"]
    _, _, birth, training, _ = told(jacobian=found)
    assert "output of bee depends" in birth
    assert "output of this model depends" in training


def test_profiles_and_the_theory_s_error_are_those_of_the_results():
    ds = born()
    _, _, birth, training, _ = told(jacobian={"ape": ds})
    for condition, said in (("init", birth), ("pretrained", training)):
        for name in ("primacy", "recency"):
            value, low, high, _ = getattr(shape(ds, condition), name)
            assert f"{three_digits(value)} [{three_digits(low)}, {three_digits(high)}] times as strongly" in said
    assert "theory" not in birth
    assert "Compared with initialization" not in training  # no elasticities, no comparison
    ds["theory_score_path"] = ds["sensitivity"] * 1.1
    assert "predicts the whole profile to 10.0 % (mean relative error over positions)" in told(jacobian={"ape": ds})[2]


def test_what_training_did_is_said():
    one = result("init", 0)
    one["elasticity"] = one["sensitivity"]
    for scale, says in (
        (4.0, "rises to 4 [4, 4] times what it was"),
        (0.25, "falls to 0.25 [0.25, 0.25] of what it was"),
    ):
        trained = one.assign(elasticity=one["elasticity"] * scale).assign_attrs(condition="pretrained")
        said = told(jacobian={"ape": combine([trained, one]).assign_attrs(options='{"query": 63}')})[3]
        assert f"middle {says}" in said
        assert "primacy is 1 [1, 1] times what it was (no sure change)" in said


def test_models_that_went_different_ways_are_not_said_to_agree():
    fell, rose = Interval(0.5, 0.4, 0.6), Interval(2.0, 1.5, 3.0)
    assert _changed([fell, rose]) == "is 0.5 and 2 times what it was (a fall and a rise)"
    many = [fell, rose, fell, Interval(1.0, 0.5, 2.0)]
    assert _changed(many) == "is 0.5–2 times what it was (a fall in 2, a rise in 1, no sure change in 1)"
    assert _changed([rose]) == "rises to 2 [1.5, 3] times what it was"


def test_a_strong_and_a_weak_u_are_told_apart():
    shape, last = shape_of(range(8)), Interval(9.0, 8.0, 10.0)
    strong = shape._replace(primacy=Interval(3.0, 2.5, 4.0), recency=last)
    weak = shape._replace(primacy=Interval(1.6, 1.3, 4.0), recency=last)
    for shapes, says in (
        ({"ape": strong}, "(recency): a strong U."),
        ({"ape": weak}, "(recency): a weak U."),
        ({"ape": strong, "bee": weak}, "(recency): a strong U and a weak U."),
        ({"ape": weak._replace(recency=Interval(2.0, 1.0, 4.0))}, "not clearly a U"),
    ):
        assert says in _ends(shapes, Naming())


def test_a_window_that_does_not_reach_is_left_out():
    _, _, birth, _, _ = told(jacobian={"ape": born(), "bee": born(zeros=60)})
    assert "output of ape depends" in birth
    _, _, birth, _, _ = told(jacobian={"bee": born(zeros=60)})
    assert birth == "At initialization no model's attention reaches back from the last position to the first."


def test_sources():
    one = leaking().assign(null_uniform=("band", [0.117, 0.05]))
    said = told(leakage={"ape": one})[0]
    median = float(np.median(one["log_form_by_block"].sel(part="total", band="9-31")))
    assert f"by 0.3 [0.29, 0.31] nat² (queries 9-31; median block {median:.3g}). Uniform attention" in said
    assert "The causal mask accounts for 125 % [124, 126], the residual stream for -25 % [-26, -24]." in said
    halved = {str(name).replace("log", "steady"): one[name] * 0.5 for name in one if "log_share" in str(name)}
    said = told(leakage={"ape": one.assign(halved)})[0]
    assert "mask accounts for 62 % [62, 63], the residual stream for -12 % [-13, -12], if the constant" in said
    both = told(leakage={"ape": one, "bee": leaking(0.4, 0.5)})[0]
    assert "by 0.3 and 0.4 nat²" in both
    assert "accounts for 125 and 50 %, the residual stream for -25 and 50 %." in both
    noise = told(leakage={"ape": leaking(0.005)})[0]  # which is not divided
    assert noise == "Absolute position in attention patterns is within noise here: it takes more prompts."


def test_position_zero():
    swap = several("mean", 17)
    for at, rates in (("before", [0.5, 0.1, 0.3]), ("after", [0.0, 0.2, 0.1])):
        swap[f"sink_rate_{at}"] = ("replacement", "layer"), [rates] * 2
    role = np.array([[0, 1, 2], [3, 3, 3]])
    heads = ("layer", "head")
    roles = xr.Dataset(
        {
            "has_role": (("role", *heads), role == np.arange(4).reshape(4, 1, 1)),
            "sink_rate_of_model": ("key", [0.3, 0.0]),
            "attends": (heads, [[0.9, 0.4, 0.1], [0.0, 0.2, 0.3]]),
            "output_own": (heads, [[0.2, 0.4, 0.9], [1.0, 1.0, 1.0]]),
        },
        coords={"role": ["reads", "parks", "reacts", "ignores"]},
    )
    said = told(bos_swap={"ape": swap}, sinks={"ape": roles}, trajectory={"ape": closed(0.0)})[1]
    ends = [three_digits(float(swap[f"residual_{when}_of_model"].values[0, 0])) for when in ("before", "after")]
    for part in (
        "Position 0 is an attention sink in 30 % of the heads of ape (sink rate of [Gu], T not kept). 2 of 6 heads",
        "the median one of these writes 30 % of what it would write with position 0 hidden. 1 reads it",
        "size from it), and 1 parks there",
        "Its own residual stream is the same whatever text follows, bit for bit, as under any causal mask.",
        "the mean embedding at position 0 of this model the sink rate goes from 30 % to 10 % (T = 64), and what the",
    ):
        assert part in said
    assert re.search(rf"leak, V\(X\), from {ends[0]}[^;]* nat² to {ends[1]}[^;]* nat²", said)
    other = told(trajectory={"ape": closed(0.1), "bee": closed(0.0)})[1]
    assert other == "Its own residual stream is the same whatever text follows, bit for bit in 1 of 2 models."


def test_a_variance_within_noise_is_no_number():
    assert variance(0.2, 0.1, 0.3) == "0.2 [0.1, 0.3]"
    assert variance(0.1, -0.1, 0.3) == "within noise [-0.1, 0.3]"
    assert variance(-0.2, -0.3, -0.1) == "within noise [-0.3, -0.1]"
    assert (variance(-0.137), variance(0.137)) == ("within noise", "0.137")
    swap = several("mean", 17)
    for at in ("before", "after"):
        swap[f"sink_rate_{at}"] = ("replacement", "layer"), np.full((2, 3), 0.3)
    for end, value in (("", -0.137), ("_low", -0.2), ("_high", 0.1)):
        swap[f"residual_after_of_model{end}"] = swap["residual_after_of_model"] * 0 + value
        swap[f"residual_before_of_model{end}"] = swap["residual_before_of_model"] * 0 + value + 1
    assert told(bos_swap={"ape": swap})[1].endswith(
        "V(X), from 0.863 [0.8, 1.1] nat² to within noise [-0.2, 0.1] nat²."
    )
    sure = swap.copy()
    for end in ("", "_low", "_high"):
        sure[f"residual_after_of_model{end}"] = swap[f"residual_before_of_model{end}"]
    assert "nat² to 0.863 [0.8, 1.1] (within noise in 1 of 2) nat²." in told(bos_swap={"ape": swap, "bee": sure})[1]


def test_claims_are_counted_by_population_and_verdict():
    more: Any = [
        *({"verdict": "does not hold"}, {"verdict": "undecided"}, {"verdict": "not measured"}, {}),
        *({"population": "initialization"}, {"population": "controlled"}, {"kind": "ours"}),
    ]
    said = told(claims=[CLAIM, *(replace(CLAIM, id=f"x-{n}", **changes) for n, changes in enumerate(more))])[4]
    assert said == (
        "Of 6 statements that the sources publish: of 1 about models at initialization 1 holds, 0 do not hold, 0 undecided; "
        "of 5 about pretrained language models 2 hold, 1 does not hold, 1 undecided; 1 could not be judged on these results."
        " Apart from these, 1 are about what one ingredient of training causes."
    )
    none = told(claims=[replace(CLAIM, id=f"x-{n}", verdict="not measured") for n in range(3)])[4]
    assert none == "Of 3 statements that the sources publish, none could be judged on these results."


def test_few_models_are_listed_in_their_order_and_more_are_a_range():
    assert over([2.0, 1.0]) == "2 and 1"
    assert over([1.0001, 1.0]) == "1"
    assert over([0.5, -0.25, -0.001], ".0%") == "50, -25 and 0 %"
    assert over([2.0, 3.0, 1.0, 1.5]) == "1–3"
    assert over([0.5, 0.2, 0.3, -0.25], ".0%") == "-25 to 50 %"
