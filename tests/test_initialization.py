"""Fresh weights: what rules of initialization mean, what they draw, what theory takes of them, where results name them."""

import json
import math
from dataclasses import replace
from typing import Any

import families
import pytest
import torch
from families import BLOCKS, DIFFERENT, FAMILIES
from measured import backends
from transformers import AutoModelForCausalLM, BloomConfig

import probes
from probes import Initialization, born, fresh
from probes.measures.jacobian import Options
from probes.models.fresh import initialization_of
from probes.models.huggingface import HuggingFaceView
from probes.models.identity import weights_hash
from probes.models.initialization import ASSUMED, KINDS, PUBLISHED, published
from probes.models.load import CHECKPOINTS
from probes.models.view import Birth, Norm, Parts, View
from toy.model import Architecture, initial
from toy.view import Toy

# Of the 2,048 weights of a k matrix and three blocks of them, 1 / sqrt(2 n) = 0.9 %; four of those. Routers have fewer.
DRAWN = 0.036
# Each kind has its own, so that none can be taken for another.
ODD = {kind: 0.03 * 1.3**n for n, kind in enumerate(KINDS)}
odd = Initialization("odd", **ODD)
IDS = torch.arange(families.VOCABULARY - 1)[None, : families.MAX_LENGTH - 1]


def every_part(seen: View) -> list[Parts]:
    found = [seen.parts(layer) for layer in range(seen.spec.blocks)]
    assert all(found)
    return found  # type: ignore[return-value]


def matrices(seen: View) -> dict[str, torch.Tensor]:
    """All fresh matrices of a kind together, by kind."""
    assert isinstance(seen, HuggingFaceView)
    model = seen._model
    found, head = {"embedding": model.get_input_embeddings().weight}, model.get_output_embeddings().weight
    if head is not found["embedding"]:
        found["unembedding"] = head
    if seen._family.learned is not None:
        found["positions"] = getattr(model.get_decoder(), seen._family.learned).weight
    for kind, name in (*((kind, kind) for kind in ("q", "k", "v", "o", "gate", "up", "down")), ("router", "routing")):
        linear = [getattr(one, name) for one in every_part(seen)]
        if linear[0] is not None:
            found[kind] = torch.stack([one.weight for one in linear])
    return {kind: weight.detach() for kind, weight in found.items()}


def same(a: Birth, b: Birth) -> None:
    assert type(a.activation) is type(b.activation)
    assert replace(a, activation=b.activation, up_activation=b.up_activation) == b


# ----------------------------------------------------------------------------------------------------------- what is drawn


@pytest.mark.parametrize("name", FAMILIES)
def test_every_kind_of_matrix_has_the_deviation_of_the_rule(name):
    made = FAMILIES[name]()
    drawn, plain = fresh(made, 3, initialization=odd), fresh(made, 3)
    own, birth = initialization_of(made), born(made, initialization=odd)
    found, before = matrices(drawn), matrices(plain)
    parameters, originals = (list(one._model.parameters()) for one in (drawn, plain))  # type: ignore[attr-defined]
    named = drawn._model.named_parameters()  # type: ignore[attr-defined]
    there = sum(weight.numel() for name, weight in named if weight.ndim > 1 and not name.endswith("_bias"))
    assert sum(weight.numel() for weight in found.values()) == there  # none was forgotten
    for kind, weight in found.items():
        as_drawn = {"router": "up"}.get(kind, kind)
        assert float(weight.std()) == pytest.approx(ODD[as_drawn], rel=max(DRAWN, (8 / weight.numel()) ** 0.5)), kind
        assert float(weight.mean().abs()) < 5 * ODD[as_drawn] / weight.numel() ** 0.5
        # The seed's own noise, in the rule's scale; float32.
        torch.testing.assert_close(weight, before[kind] * (ODD[as_drawn] / getattr(own, as_drawn)), rtol=1e-6, atol=0)
    for one, other in zip(parameters, originals, strict=True):
        assert one.ndim > 1 or torch.equal(one, other)  # biases and norms
    # And all of this is what theory takes:
    assert (birth.spec, birth.initialization) == (drawn.spec, "odd")
    for kind in ("v", "o", "gate", "up", "down"):
        assert getattr(birth, kind) == (ODD[kind] if kind in found else None)
    for parts in every_part(drawn):
        for linear in (parts.q, parts.k, parts.v, parts.o, parts.gate, parts.up, parts.down):
            assert linear is None or linear.bias is None or not linear.bias.any()
        for norm in (one for one in vars(parts).values() if isinstance(one, Norm)):
            assert (norm.weight == 1).all()
            assert norm.bias is None or not norm.bias.any()
            assert (norm.kind, norm.eps) == (birth.norm, birth.eps)
    # The embeddings as block 0 reads them; where positions are learned, the same token differs by position.
    assert float(drawn.embed(IDS).std()) == pytest.approx((birth.embedding**2 + birth.positions**2) ** 0.5, rel=DRAWN)
    assert birth.embedding == pytest.approx(ODD["embedding"] * (families.WIDTH**0.5 if "gemma" in name else 1))
    repeated = drawn.embed(torch.full_like(IDS, 7))[0]
    assert float((repeated - repeated.mean(0)).std()) == pytest.approx(birth.positions, rel=DRAWN, abs=1e-7)
    assert birth.positions == (ODD["positions"] if name == "gpt2" else 0)
    same(born(drawn), birth)  # a fresh view knows its rule
    assert born(drawn, initialization="config").v == own.v


@pytest.mark.parametrize("name", FAMILIES)
def test_the_configuration_s_own_rule_is_what_transformers_draws(name):
    made = FAMILIES[name]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        expected = weights_hash(AutoModelForCausalLM.from_config(made, dtype=torch.float32).state_dict().items())
    before = torch.get_rng_state()
    seen = fresh(made, 2)
    assert seen.identity.weights == fresh(made, 2, initialization=initialization_of(made)).identity.weights == expected
    assert torch.equal(torch.get_rng_state(), before)
    assert (seen.dtype, seen.tokenizer, seen.identity.condition) == (torch.float32, None, "init")
    for other in (fresh(made, 2, initialization=0.3), fresh(made, 5)):
        assert other.identity.weights != expected
    bare = fresh(made, 2, positional=False).identity
    assert (bare.condition, bare.weights == expected) == ("init-nope", name != "gpt2")


@pytest.mark.parametrize("name", DIFFERENT)
def test_both_backends_draw_the_same_and_a_residual_scale_is_on_what_writes_to_the_stream_alone(name):
    made = FAMILIES[name]()
    rule: dict[str, Any] = {"initialization": "smollm2-135m"}
    both = [probes.load(families.build(made), backend) for backend in backends(name)]
    for positional in (True, False):
        drawn = [fresh(made, 1, positional=positional, **rule)]
        drawn += [one.reinitialized(1, positional=positional, **rule) for one in both]
        assert len({(one.identity.weights, one.identity.initialization) for one in drawn}) == 1
    before, after = matrices(fresh(made, 2)), matrices(fresh(made, 2, residual_scale=0.5))
    for kind, weight in before.items():
        assert torch.equal(after[kind], (0.5 if kind in ("o", "down") else 1) * weight), kind


def test_what_a_configuration_changes():
    """As the configuration says it; by which names, differs by family."""
    both = [born(families.small("gpt_neox", use_parallel_residual=on)).parallel for on in (True, False)]
    assert both == [True, False]
    olmo, gemma, routed, oss = (born(FAMILIES[name]()) for name in ("olmo2", "gemma2", "qwen3_moe", "gpt_oss"))
    assert (olmo.pre_norm, olmo.spec.post_norm, gemma.pre_norm, gemma.spec.post_norm) == (False, True, True, True)
    assert (routed.experts, routed.chosen, routed.among_chosen, routed.features) == (6, 2, True, 40)
    assert (oss.experts, oss.chosen, oss.among_chosen, oss.gate) == (4, 2, True, 0.5)
    grid = torch.linspace(-10, 10, 5)
    assert torch.equal(oss.up_activation(grid), grid.clamp(-7, 7) + 1)  # type: ignore[misc]
    made: Any = families.small("gemma2", hidden_activation="relu")
    assert torch.equal(born(made).activation(grid), grid.clamp_min(0))
    deep = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 64, "n_layer": 8, "n_head": 4, "initializer_range": 0.1}
    birth = born(deep)  # GPT-2 writes to the stream more quietly the deeper it is
    assert birth.o == birth.down == pytest.approx(0.1 / math.sqrt(16))
    assert birth.v == birth.up == birth.embedding == birth.positions == 0.1
    assert birth.features == 4 * 64  # unless n_inner says otherwise
    expected = matrices(fresh(FAMILIES["llama"]().to_dict() | {"initializer_range": 0.1}))
    for given in ("0.1", "1/10", 0.1):
        found = matrices(fresh(FAMILIES["llama"](), initialization=given))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)  # float32


def test_toys_have_no_other_rule():
    shape = Architecture(blocks=1, heads=1, width=4, length=6, vocabulary=8)
    toy = Toy(shape, initial(shape, 0))
    assert toy.reinitialized(1, initialization="config").identity.initialization is None
    assert "'0.1' is no rule for a toy" in families.refused(toy.reinitialized, 1, initialization=0.1)


# ------------------------------------------------------------------------------------------------------ what rules mean


def test_published_rules():
    """As the sources have them, for the models that they were published for."""
    smollm2 = published(30, 576)["smollm2-135m"][1]
    assert smollm2 == dict.fromkeys(KINDS, 1 / 24) | dict.fromkeys(("o", "down"), 1 / (24 * math.sqrt(60)))
    assert published(32, 960)["smollm2-360m"][1]["up"] == pytest.approx(960**-0.5, rel=1e-3)  # rounded there
    assert published(24, 2048)["smollm2-1.7b"][1]["down"] == 0.02 / math.sqrt(48)
    pythia = published(12, 768)["pythia"][1]
    assert (pythia["embedding"], pythia["o"]) == (math.sqrt(2 / (5 * 768)), 2 / 12 / math.sqrt(768))
    # What transformers draws for GPT-2 differs from the published program in the positions alone.
    made = families.small("gpt2", initializer_range=0.02)
    theirs, own = (initialization_of(made, rule) for rule in ("gpt2", "config"))
    for kind in KINDS:
        assert getattr(theirs, kind) == pytest.approx(0.01 if kind == "positions" else getattr(own, kind)), kind
    # A rule may be asked for on another model, and keeps its name.
    rule = initialization_of(FAMILIES["qwen2"](), "smollm2-135m")
    assert rule.down == 1 / 24 / math.sqrt(2 * BLOCKS)
    assert str(rule).startswith("smollm2-135m (published: huggingface/smollm, config_smollm2_135M.yaml")


def test_a_default_that_nobody_published_is_named_as_one(tmp_path):
    families.build(families.small("llama", initializer_range=0.02)).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    del fields["initializer_range"]
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    said = "initializer_range 0.02, transformers' default: the config names none"
    view = probes.load(tmp_path)
    for drawn in (view.reinitialized(0), fresh(tmp_path), fresh(fields), fresh(json.loads(view.identity.config))):
        assert drawn.identity.initialization == said
    assert born(view).initialization == said
    # Somebody who sets it has said so.
    stated = json.loads(view.identity.config) | {"initializer_range": 0.1}
    assert stated[ASSUMED]
    assert fresh(stated).identity.initialization == "initializer_range 0.1 of the config"
    depth = "initializer_range 0.5 of the config; output and down projections divided by sqrt(2L)"
    assert str(initialization_of(FAMILIES["gpt2"]())) == depth


@pytest.mark.parametrize("rule", ["smollm2", "1/2/3", "1/0", True, "-1/24", "nan", "1e-12", "1e3", 0.0])
def test_unusable_rules_are_refused(rule):
    no_rule = rule in ("smollm2", "1/2/3", "1/0", True)
    says = f"({', '.join(PUBLISHED)}" if no_rule else "from 1e-06 to 10, as 0.02 or 1/24"
    for function in (fresh, born, lambda c, initialization: Options(initialization=initialization).values()):
        refused = families.refused(function, FAMILIES["llama"](), initialization=rule)
        assert refused.startswith(f"initialization '{'' if no_rule else 'uniform '}{rule}' ")
        assert says in refused
    assert "changes nothing in a Birth" in families.refused(born, born("tiny-llama"), initialization=rule)


# ----------------------------------------------------------------------------------------------------------------- sources


def test_every_source_says_the_same(tmp_path):
    config = FAMILIES["gpt2"]()
    model, folder = families.build(config), tmp_path / "small"
    model.save_pretrained(folder)  # notes dtype and class in the configuration
    before = config.to_dict()
    for source in (before, folder, str(folder / "config.json"), fresh(config), probes.load(model, "transformer_lens")):
        same(born(source), born(config))
    assert config.to_dict() == before
    same(born(CHECKPOINTS / "tiny-llama"), born("tiny-llama"))
    assert (fresh("tiny-llama").identity.name, fresh(config).identity.name) == ("tiny-llama", "in-memory gpt2")
    assert fresh("tiny-llama", 3).identity.weights == probes.load("tiny-llama").reinitialized(3).identity.weights


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("[1, 2]", "config.json' cannot be used: {} holds a list instead of a JSON object"),
        ({"n_layer": 3}, "model type 'None' is not supported; supported families: llama, m"),
        (3, "cannot read a int as a config"),
        (BloomConfig(n_layer=1), "model type 'bloom' is not supported"),
        ({"model_type": "gpt2", "n_embd": 256, "n_layer": 2}, "no model can be made of this gpt2 config (`embed_dim`"),
        ({"model_type": "gpt2", "n_layers": 4}, "a gpt2 config has no field 'n_layers'; check its spelling"),
        ({"model_type": "gpt2", "n_layer": 0}, "num_hidden_layers=0; give at least 1"),
        ({"model_type": "llama", "num_key_value_heads": 3}, "num_attention_heads=32, which cannot share 3 key heads"),
        ({"model_type": "gpt2", "initializer_range": -0.02}, "initializer_range=-0.02; give a positive number"),
    ],
)
def test_what_is_no_configuration_is_refused(config, says, tmp_path):
    file = tmp_path / "config.json"
    if isinstance(config, str):
        file.write_text(config)
        config = file
    assert says.format(file) in families.refused(fresh, config)
