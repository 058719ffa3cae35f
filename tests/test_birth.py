"""What fresh weights are drawn from, against fresh weights."""

from __future__ import annotations

import json
import math
from typing import Any

import families
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import BloomConfig, GPT2Config, GPTNeoXConfig, LlamaConfig, PreTrainedConfig

import probes
from probes import InputError
from probes.models.huggingface import HuggingFaceView
from probes.models.load import CHECKPOINTS, born, fresh
from probes.models.view import Birth, Norm, Parts, View

IDS = torch.arange(families.VOCABULARY - 1)[None, : families.MAX_LENGTH - 1]
# Of 6144 weights of a matrix and three blocks of them, 1 / sqrt(2 n) = 0.5 %; five of those.
DRAWN = 0.03


def config(name: str, sigma: float = 0.03) -> PreTrainedConfig:
    """Tiny, at a width that is no other default's."""
    made = families.FAMILIES[name]()
    made.initializer_range = sigma
    return made


def every_part(seen: View) -> list[Parts]:
    found = [seen.parts(layer) for layer in range(seen.spec.blocks)]
    assert all(found)
    return found  # type: ignore[return-value]


def norms(parts: Parts) -> list[Norm]:
    optional = (parts.q_norm, parts.k_norm, parts.post_attention_norm, parts.post_mlp_norm)
    return [parts.attention_norm, parts.mlp_norm, *(norm for norm in optional if norm is not None)]


def same(a: Birth, b: Birth) -> None:
    for field in Birth.__dataclass_fields__:
        one, other = getattr(a, field), getattr(b, field)
        assert type(one) is type(other) if field == "activation" else one == other, field


# ------------------------------------------------------------------------------------------------- against weights


@pytest.mark.parametrize("name", families.FAMILIES)
def test_deviations_are_those_of_fresh_weights(name):
    made = config(name)
    birth, seen = born(made), fresh(made, 3)
    parts = every_part(seen)
    for site in ("v", "o", "gate", "up", "down"):
        expected = getattr(birth, site)
        matrices = [getattr(one, site) for one in parts]
        if expected is None:
            assert matrices == [None] * families.BLOCKS
            continue
        weights = torch.stack([matrix.weight for matrix in matrices]).detach()
        assert float(weights.std()) == pytest.approx(expected, rel=DRAWN), site
        assert float(weights.mean().abs()) < 5 * expected / weights.numel() ** 0.5
        assert all(matrix.bias is None or not matrix.bias.any() for matrix in matrices)
    for one in parts:
        assert all(linear.bias is None or not linear.bias.any() for linear in (one.q, one.k))
        for norm in norms(one):
            assert (norm.weight == 1).all()
            assert norm.bias is None or not norm.bias.any()
            assert (norm.kind, norm.eps) == (birth.norm, birth.eps)
        assert one.parallel == birth.parallel
        assert (one.post_attention_norm is not None, one.post_mlp_norm is not None) == (birth.post_norm,) * 2
        assert one.down.weight.shape[1] == birth.features
    assert birth.spec == seen.spec


@pytest.mark.parametrize("name", families.FAMILIES)
def test_embeddings_are_as_block_0_reads_them(name):
    made = config(name)
    birth, seen = born(made), fresh(made, 3)
    embedded = seen.embed(IDS)[0]
    variance = birth.embedding**2 + birth.positions**2
    assert float(embedded.std()) == pytest.approx(variance**0.5, rel=DRAWN)
    if name == "gpt2":
        # The same token at every position: what differs is the positions' share.
        repeated = seen.embed(torch.full_like(IDS, 7))[0]
        assert float((repeated - repeated.mean(0)).std()) == pytest.approx(birth.positions, rel=DRAWN)
    else:
        assert birth.positions == 0
        assert torch.equal(seen.embed(torch.full_like(IDS, 7))[0, 0], seen.embed(torch.full_like(IDS, 7))[0, -1])
    if name in ("gemma", "gemma2"):
        assert birth.embedding == pytest.approx(0.03 * families.WIDTH**0.5)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_activations_are_the_models(name):
    made = config(name)
    grid = torch.linspace(-6, 6, 301)
    for one in every_part(fresh(made)):
        assert torch.equal(born(made).activation(grid), one.activation(grid))


def test_gemma_2_reads_its_activation_where_the_model_does():
    made = config("gemma2")
    made.hidden_activation = "relu"
    grid = torch.linspace(-1, 1, 5)
    assert torch.equal(born(made).activation(grid), grid.clamp_min(0))
    (one, *_) = every_part(fresh(made))
    assert torch.equal(one.activation(grid), grid.clamp_min(0))


def test_gpt_2_writes_to_the_stream_more_quietly_the_deeper_it_is():
    deep = GPT2Config(
        vocab_size=64, n_embd=64, n_layer=8, n_head=4, initializer_range=0.1, bos_token_id=1, eos_token_id=1
    )
    birth = born(deep)
    assert birth.o == birth.down == pytest.approx(0.1 / math.sqrt(16))
    assert birth.v == birth.up == birth.embedding == birth.positions == 0.1
    assert birth.features == 4 * 64  # unless n_inner says otherwise
    weights = torch.stack([one.o.weight for one in every_part(fresh(deep))]).detach()
    assert float(weights.std()) == pytest.approx(birth.o, rel=DRAWN)


def test_gpt_neox_may_put_its_branches_one_after_the_other():
    for parallel in (True, False):
        made = GPTNeoXConfig(**families._COMMON, use_parallel_residual=parallel)
        assert born(made).parallel == every_part(fresh(made))[0].parallel == parallel


# --------------------------------------------------------------------------------------------------------- sources


@pytest.mark.parametrize("name", families.FAMILIES)
def test_every_source_says_the_same(name, tmp_path):
    made = config(name)
    expected = born(made)
    folder = tmp_path / "small"
    families.build(made).save_pretrained(folder)
    described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    lone = tmp_path / "anything.json"
    lone.write_text(json.dumps(described), encoding="utf-8")
    for source in (
        made.to_dict(),
        described,
        folder,
        str(folder),
        folder / "config.json",
        lone,
        str(lone),
        fresh(made),
    ):
        same(born(source), expected)
    same(born(probes.load(families.build(made), "transformer_lens")), expected)


def test_bundled_names_work_from_anywhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in probes.bundled():
        birth = born(name)
        assert birth.spec == probes.load(name, device="cpu").spec
        same(born(CHECKPOINTS / name), birth)


def test_the_source_stays_as_it_is():
    made = config("llama")
    before, described = made.to_dict(), made.to_dict()
    fresh(made, 1)
    fresh(described, 1)
    born(described)
    assert made.to_dict() == before == described


def refused(source: Any, unwanted: Any = None) -> str:
    messages = []
    for function in (born, fresh):
        with pytest.raises(InputError) as caught:
            function(source)
        messages.append(str(caught.value))
        assert "\n" not in messages[-1]
    assert messages[0] == messages[1]
    return messages[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "cannot be read (JSONDecodeError)"),
        ("", "cannot be read (JSONDecodeError)"),
        (b"\xff\xfe\x00", "cannot be read (UnicodeDecodeError)"),
        ("[1, 2]", "cannot read a list as a config"),
        ("{}", "names no model_type"),
        ('{"model_type": 3}', "names no model_type"),
        ('{"model_type": null}', "names no model_type"),
        ('{"model_type": "bloom"}', "model type 'bloom' is not supported; supported families: llama, mistral"),
        ('{"model_type": "no-such-type"}', "model type 'no-such-type' is not supported"),
    ],
)
def test_spoilt_files_are_refused(text, says, tmp_path):
    file = tmp_path / "config.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert says in refused(file)
    assert says in refused(tmp_path)


def test_files_that_are_not_there_are_refused(tmp_path):
    for source in (tmp_path / "none.json", str(tmp_path / "none"), tmp_path, "", "tiny-lama", "owner/name"):
        message = refused(source)
        assert f"config '{source}' cannot be read (" in message
        assert "tiny-llama" in message


@pytest.mark.parametrize("source", [3, None, [1, 2], torch.nn.Linear(2, 2)])
def test_things_that_are_no_configurations_are_refused(source):
    assert f"cannot read a {type(source).__name__} as a config" in refused(source)


def test_other_families_are_refused():
    assert "model type 'bloom' is not supported" in refused(
        BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)
    )
    assert "model type 'bloom' is not supported" in refused({"model_type": "bloom"})


# ----------------------------------------------------------------------------------------------------- fresh models


@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_seed_means_the_same_weights_however_they_are_asked_for(name):
    made = config(name)
    twin = HuggingFaceView(families.build(made)).reinitialized(4)
    before = torch.get_rng_state()
    seen = fresh(made, 4)
    assert torch.equal(torch.get_rng_state(), before)
    assert seen.identity.weights == twin.identity.weights
    assert seen.identity.condition == twin.identity.condition == "init"
    assert fresh(made, 5).identity.weights != seen.identity.weights
    assert (seen.device.type, seen.dtype, seen.tokenizer) == ("cpu", torch.float32, None)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_residual_scale_is_on_what_writes_to_the_stream_alone(name):
    made = config(name)
    plain, scaled = every_part(fresh(made, 2)), every_part(fresh(made, 2, residual_scale=0.5))
    for one, other in zip(plain, scaled, strict=True):
        for site in ("q", "k", "v", "o", "gate", "up", "down"):
            before, after = getattr(one, site), getattr(other, site)
            if before is not None:
                factor = 0.5 if site in ("o", "down") else 1
                assert torch.equal(after.weight, factor * before.weight), site
    assert torch.equal(fresh(made, 2).embed(IDS), fresh(made, 2, residual_scale=0.5).embed(IDS))
    # Through the model: a smaller part of the last stream is new.
    first, second = (
        (seen.residual(x) - x).norm() / x.norm()
        for seen in (fresh(made, 2), fresh(made, 2, residual_scale=0.5))
        for x in [seen.embed(IDS)]
    )
    assert second < 0.9 * first if not born(made).post_norm else torch.isclose(first, second, rtol=0.05)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox"])
def test_without_positions_the_order_of_earlier_tokens_does_not_matter(name):
    made = config(name, sigma=0.5)  # logits far from zero: rotations would be seen
    order = torch.randperm(19, generator=torch.Generator().manual_seed(0))
    tokens = IDS[:, :20]
    shuffled = torch.cat([tokens[:, :19][:, order], tokens[:, 19:]], 1)

    def last(seen: View, ids: Tensor) -> np.ndarray:
        # After one block: in later ones, what earlier positions saw depends on the order through the causal mask.
        return seen.trace(seen.embed(ids)).residual[1][0, -1].numpy()

    without = fresh(made, 1, positional=False)
    assert without.identity.condition == "init-nope"
    np.testing.assert_allclose(
        last(without, tokens), last(without, shuffled), rtol=0, atol=2e-3
    )  # float32, wide weights
    with_ = fresh(made, 1)
    assert np.abs(last(with_, tokens) - last(with_, shuffled)).max() > 0.05
    twin = HuggingFaceView(families.build(made)).reinitialized(1, positional=False)
    assert without.identity.weights == twin.identity.weights


def test_names_and_revisions():
    assert fresh("tiny-llama").identity.name == "tiny-llama"
    assert fresh(CHECKPOINTS / "tiny-qwen2").identity.name == "tiny-qwen2"
    assert fresh(config("llama")).identity.name == "in-memory llama"
    assert fresh("tiny-llama", 3).identity.weights == probes.load("tiny-llama").reinitialized(3).identity.weights


def test_a_fresh_model_of_a_changed_configuration():
    made = LlamaConfig(**families._GROUPED)
    wide = fresh(made.to_dict() | {"num_hidden_layers": 5, "initializer_range": 0.1})
    assert wide.spec.blocks == 5
    assert float(every_part(wide)[4].up.weight.detach().std()) == pytest.approx(0.1, rel=DRAWN)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "gpt2", "n_embd": 256, "n_layer": 2}, "no model can be made of this gpt2 config .*divisible"),
        ({"model_type": "llama", "hidden_size": "wide"}, "the llama config is refused by transformers"),
        ({"model_type": "gpt2", "n_layers": 4}, "a gpt2 config has no field 'n_layers'; check its spelling"),
        ({"model_type": "llama", "n_layer": 4}, "a llama config has no field 'n_layer'"),
        ({"model_type": "gpt2", "n_layer": 0}, "num_hidden_layers=0; give at least 1"),
        ({"model_type": "llama", "num_key_value_heads": 3}, "32 query heads cannot share 3 key heads evenly"),
        ({"model_type": "gpt2", "initializer_range": -0.02}, "initializer_range=-0.02; give a positive number"),
        ({"model_type": "gpt2", "activation_function": "gleu"}, "activation 'gleu' is none of transformers'"),
    ],
)
def test_configurations_of_which_no_model_can_be_made(config, says):
    with pytest.raises(InputError, match=says) as raised:
        fresh(config)
    assert "\n" not in str(raised.value)


def test_fields_that_a_file_has_from_elsewhere_do_no_harm(tmp_path):
    made = {"model_type": "gpt2", "n_layer": 1, "n_embd": 24, "n_head": 2, "vocab_size": 50, "their_own_note": 1}
    (tmp_path / "config.json").write_text(json.dumps(made), encoding="utf-8")
    assert born(tmp_path).spec.blocks == 1
