"""Rules of initialization: what they mean, what is drawn by them, what theory makes of them, where results name them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
from test_theory import config as wide_config
from test_theory import deviation, distinct
from transformers import AutoModelForCausalLM

import probes
from probes import Initialization, InputError, born, fresh
from probes.figures.jacobian import rests_on
from probes.models.fresh import initialization_of
from probes.models.huggingface import HuggingFaceView
from probes.models.initialization import ASSUMED, KINDS, PUBLISHED
from probes.models.view import View, weights_hash
from probes.results.dataset import combine
from probes.studies.study import Settings, described, study
from probes.theory.kernel import second_moment, second_moment_from_config
from toy.model import Architecture, initial
from toy.view import Toy

# Of the 2,048 weights of a k matrix and three blocks of them, 1 / sqrt(2 n) = 0.9 %; four of those.
DRAWN = 0.036
# Each kind has its own, so that none can be taken for another.
ODD = {kind: 0.03 * 1.3**n for n, kind in enumerate(KINDS)}
TOKENS = torch.arange(5, 25)[None]


def odd(**others: float) -> Initialization:
    return Initialization("odd", "given", "these tests", **(ODD | others))


def matrices(seen: View) -> dict[str, torch.Tensor]:
    """All fresh matrices of a kind together, by kind."""
    assert isinstance(seen, HuggingFaceView)
    model, found = seen._model, {}
    found["embedding"] = model.get_input_embeddings().weight
    if model.get_output_embeddings().weight is not found["embedding"]:
        found["unembedding"] = model.get_output_embeddings().weight
    if seen._family.learned is not None:
        found["positions"] = getattr(model.get_decoder(), seen._family.learned).weight
    parts = [seen.parts(layer) for layer in range(seen.spec.blocks)]
    for kind in ("q", "k", "v", "o", "gate", "up", "down"):
        linear = [getattr(one, kind) for one in parts]
        if linear[0] is not None:
            found[kind] = torch.stack([one.weight for one in linear])
    return {kind: weight.detach() for kind, weight in found.items()}


# ----------------------------------------------------------------------------------------------------------- what is drawn


@pytest.mark.parametrize("name", families.FAMILIES)
def test_every_kind_of_matrix_has_the_deviation_of_the_rule(name):
    made = families.FAMILIES[name]()
    drawn, plain = fresh(made, 3, initialization=odd()), fresh(made, 3)
    own = initialization_of(made)
    found, before = matrices(drawn), matrices(plain)
    parameters, originals = (list(one._model.parameters()) for one in (drawn, plain))  # type: ignore[attr-defined]
    there = sum(weight.numel() for weight in parameters if weight.ndim > 1)
    assert sum(weight.numel() for weight in found.values()) == there  # none was forgotten
    for kind, weight in found.items():
        assert float(weight.std()) == pytest.approx(ODD[kind], rel=DRAWN), kind
        # The seed's own noise, in the rule's scale; float32.
        torch.testing.assert_close(weight, before[kind] * (ODD[kind] / getattr(own, kind)), rtol=1e-6, atol=0)
    for one, other in zip(parameters, originals, strict=True):
        assert one.ndim > 1 or torch.equal(one, other)  # biases and norms


@pytest.mark.parametrize("name", families.FAMILIES)
def test_the_configurations_own_rule_is_what_transformers_draws(name):
    made = families.FAMILIES[name]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        expected = weights_hash(AutoModelForCausalLM.from_config(made, dtype=torch.float32).parameters())
    assert fresh(made, 2).identity.weights == expected
    assert fresh(made, 2, initialization="config").identity.weights == expected
    assert fresh(made, 2, initialization=initialization_of(made)).identity.weights == expected
    assert fresh(made, 2, initialization=0.3).identity.weights != expected


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox"])
def test_both_backends_and_all_ways_to_ask_draw_the_same(name):
    made = families.FAMILIES[name]()
    model = families.build(made)
    ours, theirs = probes.load(model), probes.load(model, "transformer_lens")
    rule: dict[str, Any] = {"initialization": "smollm2-135m"}
    drawn = [fresh(made, 1, **rule), ours.reinitialized(1, **rule), theirs.reinitialized(1, **rule)]
    drawn.append(probes.swapped(ours, "zero").original.reinitialized(1, **rule))
    assert len({one.identity.weights for one in drawn}) == 1
    assert len({one.identity.initialization for one in drawn}) == 1
    profiles = [probes.jacobian(one, TOKENS).sensitivity.values for one in (drawn[1], drawn[2])]
    np.testing.assert_allclose(*profiles, rtol=1e-4)  # float32, two engines
    swapped = probes.swapped(ours, "zero").reinitialized(1, **rule)
    assert swapped.identity.initialization == drawn[0].identity.initialization
    bare = theirs.reinitialized(1, positional=False, **rule)
    assert bare.identity.weights == ours.reinitialized(1, positional=False, **rule).identity.weights


def test_a_uniform_deviation_is_the_same_as_a_configuration_with_that_range():
    made = families.FAMILIES["llama"]()
    for given in ("0.05", "1/20", 0.05):
        one = matrices(fresh(made, 4, initialization=given))
        other = matrices(fresh(made.to_dict() | {"initializer_range": 0.05}, 4))
        for kind, weight in one.items():
            torch.testing.assert_close(weight, other[kind], rtol=1e-6, atol=0)  # float32


def test_toys_have_no_other_rule():
    shape = Architecture(blocks=1, heads=1, width=4, length=6, vocabulary=8)
    toy = Toy(shape, initial(shape, 0))
    assert toy.reinitialized(1, initialization="config").identity.initialization is None
    with pytest.raises(InputError, match=r"initialization '0.1' is no rule for a toy"):
        toy.reinitialized(1, initialization=0.1)


# ------------------------------------------------------------------------------------------------------ what rules mean


def test_published_rules():
    """As the sources have them, for the models that they were published for."""
    smollm2 = PUBLISHED["smollm2-135m"].scheme(30, 576)
    assert smollm2 == dict.fromkeys(KINDS, 1 / 24) | dict.fromkeys(("o", "down"), 1 / (24 * math.sqrt(60)))
    assert smollm2["q"] == pytest.approx(576**-0.5)
    assert PUBLISHED["smollm2-360m"].scheme(32, 960)["up"] == pytest.approx(960**-0.5, rel=1e-3)  # rounded there
    assert PUBLISHED["smollm2-1.7b"].scheme(24, 2048)["down"] == 0.02 / math.sqrt(48)
    assert PUBLISHED["qwen2.5"].scheme(24, 896) == dict.fromkeys(KINDS, 0.02)
    pythia = PUBLISHED["pythia"].scheme(12, 768)
    assert (pythia["embedding"], pythia["o"]) == (math.sqrt(2 / (5 * 768)), 2 / 12 / math.sqrt(768))
    # What transformers draws for GPT-2 differs from the published program in the positions alone.
    made = wide_config("gpt2", width=64, blocks=3)
    published, own = (initialization_of(made, rule) for rule in ("gpt2", "config"))
    for kind in KINDS:
        assert getattr(published, kind) == pytest.approx(0.01 if kind == "positions" else getattr(own, kind)), kind


def test_a_rule_of_another_model_may_be_asked_for_and_keeps_its_name():
    made = families.FAMILIES["qwen2"]()
    rule = initialization_of(made, "smollm2-135m")
    assert rule.down == 1 / 24 / math.sqrt(2 * families.BLOCKS)
    assert str(rule).startswith("smollm2-135m (published: huggingface/smollm, config_smollm2_135M.yaml")


def test_what_rules_are_called(tmp_path):
    made = families.FAMILIES["llama"]()  # 0.5
    assert str(initialization_of(made)) == "initializer_range 0.5 of the config"
    assert str(initialization_of(made, "1/24")) == "uniform 1/24"
    assert str(initialization_of(made, 0.03)) == "uniform 0.03"
    assert str(initialization_of(made, odd())) == "odd"
    told = wide_config("llama", width=64, blocks=1)
    assert str(initialization_of(told)) == "initializer_range 0.02 of the config, also transformers' default"
    depth = "initializer_range 0.5 of the config; output and down projections divided by sqrt(2L)"
    assert str(initialization_of(families.FAMILIES["gpt2"]())) == depth


def unsaid(tmp_path: Path) -> Path:
    """A checkpoint whose config.json holds no initializer range."""
    folder = tmp_path / "unsaid"
    families.build(wide_config("llama", width=32, blocks=1)).save_pretrained(folder)
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del fields["initializer_range"]
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return folder


def test_a_default_that_nobody_published_is_named_as_one(tmp_path):
    folder = unsaid(tmp_path)
    said = "initializer_range 0.02, transformers' default: the config names none"
    view = probes.load(folder)
    described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for drawn in (view.reinitialized(0), fresh(folder), fresh(described), fresh(json.loads(view.identity.config))):
        assert drawn.identity.initialization == said
    for source in (view, folder, described, fresh(folder)):
        assert born(source).initialization == said
    assert view.identity.initialization is None
    # Somebody who sets it has said so.
    stated = json.loads(view.identity.config) | {"initializer_range": 0.1}
    assert stated[ASSUMED]
    assert fresh(stated).identity.initialization == "initializer_range 0.1 of the config"
    model = families.build(wide_config("llama", width=32, blocks=1))
    model.config.initializer_range = 0.0  # transformers then draws as if nothing were said
    assert probes.load(model).reinitialized(0).identity.initialization == said


@pytest.mark.parametrize(
    "rule", ["smollm2", "SmolLM2-135M", "", "default", "0.02x", "1/2/3", "1/", "1/0", True, "0,02"]
)
def test_unknown_rules_are_refused_with_the_list_of_them(rule, unchecked):
    for function in (fresh, born, lambda c, initialization: Settings(initialization=initialization)):
        with pytest.raises(InputError) as raised:
            function(families.FAMILIES["llama"](), initialization=rule)
        message = str(raised.value)
        assert "\n" not in message
        assert (
            f"initialization '{rule}' is no rule; give config, a deviation as 0.02 or 1/24, or a published" in message
        )
        assert all(name in message for name in PUBLISHED)


@pytest.mark.parametrize("rule", ["0", "-0.02", "-1/24", "nan", "inf", "1e-12", "1e3", 0.0, float("nan"), -1])
def test_numbers_that_are_no_deviations_are_refused(rule):
    with pytest.raises(InputError, match=r"'uniform .* has deviation .* from 1e-06 to 10, as 0.02 or 1/24") as caught:
        fresh(families.FAMILIES["llama"](), initialization=rule)
    assert "\n" not in str(caught.value)


def test_a_rule_of_ones_own_is_held_to_the_same():
    with pytest.raises(InputError, match=r"'odd' has deviation -1 \(gate\)"):
        odd(gate=-1.0)


# --------------------------------------------------------------------------------------------------------------- theory


@pytest.mark.parametrize("name", families.FAMILIES)
def test_what_theory_takes_is_what_was_drawn(name):
    made = families.FAMILIES[name]()
    birth, drawn = born(made, initialization=odd()), fresh(made, 3, initialization=odd())
    found = matrices(drawn)
    for kind in ("v", "o", "gate", "up", "down"):
        expected = getattr(birth, kind)
        assert (expected is None) == (kind not in found)
        assert expected is None or float(found[kind].std()) == pytest.approx(expected, rel=DRAWN)
    embedded = drawn.embed(TOKENS)[0]
    assert float(embedded.std()) == pytest.approx((birth.embedding**2 + birth.positions**2) ** 0.5, rel=DRAWN)
    again = born(drawn)  # a fresh view knows its rule
    assert replace(again, activation=torch.relu) == replace(birth, activation=torch.relu)
    assert born(drawn, initialization="config").v == initialization_of(made).v
    assert birth.initialization == "odd"


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_theory_predicts_models_drawn_by_a_rule_of_many_deviations(name):
    made, length = wide_config(name, width=128, blocks=3), 32
    # Feed-forwards and values several times the usual, narrow queries and keys: patterns are uniform.
    rule = odd(embedding=0.1, positions=0.03, q=0.01, k=0.02, v=0.09, o=0.04, gate=0.1, up=0.07, down=0.03)
    drawn = [(fresh(made, seed, initialization=rule), distinct(length, seed)) for seed in range(6)]
    measured = np.mean([probes.jacobian(*one).sensitivity.values[0] for one in drawn], 0)
    kernel = np.mean([second_moment(*one).sensitivity.values[0] for one in drawn], 0)
    alone = second_moment_from_config(made, length, initialization=rule)
    assert deviation(kernel, measured) < 0.04  # O(1/d)
    # A single draw is off by 5 to 15 %: the mean of six.
    assert deviation(alone.sensitivity.values, measured) < 0.06
    assert deviation(second_moment_from_config(made, length).sensitivity.values, measured) > 0.2
    assert alone.attrs["initialization"] == "odd"
    np.testing.assert_array_equal(
        second_moment_from_config(drawn[0][0], length).sensitivity.values, alone.sensitivity.values
    )


def test_the_score_path_feels_queries_and_keys():
    made, length = wide_config("llama", width=128, blocks=4), 40
    rule = odd(embedding=0.05, q=0.12, k=0.06, v=0.06, o=0.03, gate=0.06, up=0.06, down=0.03)  # logits of order one
    seen, tokens = fresh(made, 0, initialization=rule), distinct(length, 0)
    measured = probes.jacobian(seen, tokens).sensitivity.values[0]
    scores = second_moment(seen, tokens, attention="measured", score_path=True).sensitivity.values[0]
    assert deviation(scores, measured) < 0.06
    assert deviation(second_moment(seen, tokens, attention="measured").sensitivity.values[0], measured) > 0.1


def test_a_birth_has_its_rule_already():
    with pytest.raises(InputError, match="changes nothing in a Birth"):
        born(born(families.FAMILIES["llama"]()), initialization="0.02")


# -------------------------------------------------------------------------------------------------------------- results


def test_results_say_what_fresh_weights_were_drawn_from():
    model = probes.load(families.model("llama"))
    drawn = [model.reinitialized(seed, initialization="1/24") for seed in range(2)]
    runs = [probes.jacobian(one, TOKENS, method="scalar").assign_attrs(seed=n) for n, one in enumerate(drawn)]
    assert [run.attrs["initialization"] for run in runs] == ["uniform 1/24"] * 2
    own = probes.jacobian(model, TOKENS, method="scalar")
    assert "initialization" not in own.attrs
    assert "fresh weights: uniform 1/24;" in "; ".join(rests_on({"a": combine([own, *runs])}))
    assert "fresh weights" not in "; ".join(rests_on({"a": own}))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "ape"
    families.model("llama").save_pretrained(folder)
    families.tokenizer("prepended").save_pretrained(folder)
    (folder / "text.txt").write_text(" ".join(f"w{3 + 7 * n % 120}" for n in range(300)), encoding="utf-8")
    return folder


def settings(checkpoint: Path, **changes: Any) -> Settings:
    small: dict[str, Any] = {"seeds": 1, "prompts": 1, "length": 12, "products": 8}
    small |= {"text": str(checkpoint / "text.txt"), "initialization": "smollm2-135m"}
    return Settings(**small | changes)


@pytest.mark.slow
def test_a_study_draws_by_the_rule_and_its_figure_and_table_say_so(checkpoint, tmp_path):
    theories = ("uniform", "config")
    result = study([str(checkpoint)], tmp_path, settings(checkpoint, theories=theories), name="theory")["ape"]
    twin = probes.load(checkpoint).reinitialized(0, initialization="smollm2-135m")
    assert str(result["weights"].sel(condition="init", seed=0).values) == twin.identity.weights
    said = str(result["initialization"].sel(condition="init", seed=0).values)
    assert said == twin.identity.initialization
    assert str(result["initialization"].sel(condition="pretrained", seed=0).values) == ""
    alone = second_moment_from_config(twin, tokens=torch.from_numpy(result["tokens"].values))
    for condition in ("init", "pretrained"):  # the configuration's prediction is of fresh weights beside both
        found = result["theory_config"].sel(condition=condition, seed=0).values
        np.testing.assert_allclose(found, alone.sensitivity.values, rtol=1e-6)
    assert described({"ape": result}).endswith(f" Fresh weights: {said}.")
    assert f"fresh weights: {said};" in "; ".join(rests_on({"ape": result}))
    picture = (tmp_path / "theory.svg").read_text(encoding="utf-8")
    assert "fresh weights: smollm2-135m" in picture


class Stop(Exception):
    """Pulls the plug."""


def test_an_unfinished_study_by_another_rule_is_refused(checkpoint, tmp_path):
    def advance(running: str, done: float, total: float) -> None:
        if running == "ape init 0":
            raise Stop

    with pytest.raises(Stop):
        study([str(checkpoint)], tmp_path, settings(checkpoint), advance=advance)
    for other in ("config", "1/24"):
        with pytest.raises(InputError, match="unfinished study with other initialization;"):
            study([str(checkpoint)], tmp_path, settings(checkpoint, initialization=other))


def test_a_rule_that_nothing_is_drawn_by_is_refused(checkpoint):
    trained: Any = {"conditions": ("pretrained",)}
    with pytest.raises(InputError, match="initialization 'smollm2-135m' has no use without fresh weights; add init"):
        settings(checkpoint, **trained)
    settings(checkpoint, **trained, theories=("config",))
    settings(checkpoint, **trained, initialization="config")


def test_inspection_divides_by_fresh_weights_of_the_rule(checkpoint):
    model, text = probes.load(checkpoint), " ".join(f"w{n}" for n in range(5, 17))
    given: Any = {"method": "exact", "seeds": 1}
    plain, ruled = probes.inspect(model, text, **given), probes.inspect(model, text, initialization="0.02", **given)
    assert plain.attrs["initialization"] == "initializer_range 0.5 of the config"
    assert ruled.attrs["initialization"] == "uniform 0.02"
    assert not np.allclose(plain["baseline"], ruled["baseline"], rtol=0.1)
    with pytest.raises(InputError, match=r"initialization '0.02' has no use with baseline text; leave it out"):
        probes.inspect(model, text, baseline="text", initialization="0.02")
