"""GGUF files of tiny random models, written with the `gguf` package as llama.cpp's converter writes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import families
import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

import probes

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "gemma2")
BYTES = [*map(chr, range(33, 127)), "Ġ", "Ċ"]  # printable ASCII, space and newline, as byte-level BPE has them
MERGES = ("t h", "th e", "Ġ the", "i n", "a n", "1 2", "Ġ a")
WHOLE = "wxyz"  # a token that no merges lead to
TOKENS = ["<s>", "</s>", "<unk>", *BYTES, *(merge.replace(" ", "") for merge in MERGES), WHOLE]
TOKENS += [f"<extra{i}>" for i in range(families.VOCABULARY - len(TOKENS))]
CONTROL, NORMAL, UNUSED = 3, 1, 5  # the format's kinds of tokens
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
REMOVED: Any = object()
IDS = torch.arange(3, 103)[None]  # far enough for slow rotations to show


def original(name: str, **changed: Any) -> PreTrainedModel:
    """The model that is written: of a family, with fields of its configuration changed."""
    config = families.FAMILIES[name]()
    if name == "gemma2":
        changed = {"query_pre_attn_scalar": families.HEAD_DIM} | changed
    for field, value in changed.items():
        setattr(config, field, value)
    return families.build(type(config)(**config.to_dict()))


def write(
    path: Path,
    model: PreTrainedModel,
    *,
    kind: str = "F32",
    keys: Mapping[str, Any] = MappingProxyType({}),
    tensors: Mapping[str, Any] = MappingProxyType({}),
    architecture: str | None = None,
    sentencepiece: bool = False,
) -> Path:
    """Write a model of a family in `ARCHITECTURES`, its matrices of one type.

    `keys` and `tensors` are more of them, or in the place of what there is; `REMOVED` leaves one out. Keys without a dot at
    the beginning belong to the architecture: "rope.freq_base".
    """
    name = model.config.model_type
    architecture = architecture or {"mistral": "llama"}.get(name, name)
    writer = gguf.GGUFWriter(path, architecture)
    found = {f"{architecture}.{key}": value for key, value in _keys(model.config).items()}
    found |= _sentencepiece() if sentencepiece else BYTE_LEVEL
    own = (f"{architecture}.", "tokenizer.", "general.", "split.")
    found |= {key if key.startswith(own) else f"{architecture}.{key}": value for key, value in keys.items()}
    for key, value in found.items():
        if value is not REMOVED:
            _add(writer, key, value)
    arrays = {name: tensor.detach().numpy() for name, tensor in stored(model).items()} | dict(tensors)
    for name, array in arrays.items():
        if array is REMOVED:
            continue
        array = np.ascontiguousarray(array, np.float32)
        wanted = gguf.GGMLQuantizationType[kind]
        if kind == "F32" or array.ndim < 2:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quantize(array, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The model's tensors under the names and in the order of entries that llama.cpp has them."""
    config, name = model.config, model.config.model_type
    kind = {"mistral": "llama"}.get(name, name)
    number = next(number for number, known in gguf.MODEL_ARCH_NAMES.items() if known == kind)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    found = {}
    for own, tensor in model.state_dict().items():
        if own == "lm_head.weight" and config.tie_word_embeddings:
            continue
        new = names.get_name(own, try_suffixes=(".weight", ".bias"))
        assert new is not None, own
        found[new] = _as_stored(own, tensor, config)
    return found


def _as_stored(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    kind = config.model_type
    if kind in ("llama", "mistral") and (".q_proj." in name or ".k_proj." in name):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
    if kind == "gemma2" and name.endswith("norm.weight"):
        return tensor + 1
    return tensor


def _keys(config: Any) -> dict[str, Any]:
    """The architecture's keys that llama.cpp writes for this family."""
    kind = config.model_type
    found = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": 96,
        "attention.head_count": config.num_attention_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
    }
    found["attention.head_count_kv"] = config.num_key_value_heads
    found["rope.freq_base"] = float(config.rope_parameters["rope_theta"])
    if kind in ("qwen3", "gemma2"):
        found |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if kind in ("mistral", "gemma2"):
        found["attention.sliding_window"] = config.sliding_window
    if kind in ("llama", "mistral"):
        found |= {"vocab_size": config.vocab_size, "rope.dimension_count": config.head_dim}
    caps = ("attn_logit_softcapping", "final_logit_softcapping") if kind == "gemma2" else ()
    return found | {cap: getattr(config, cap) for cap in caps}


_KINDS = [CONTROL if n < 3 else UNUSED if "extra" in token else NORMAL for n, token in enumerate(TOKENS)]
BYTE_LEVEL: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": _KINDS,
    "tokenizer.ggml.merges": list(MERGES),
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.add_bos_token": False,
}


def _sentencepiece() -> dict[str, Any]:
    words = ["<unk>", "<s>", "</s>", *map(chr, range(97, 123)), "▁", "▁t", "▁th", "th", "he", "the", "▁the"]
    words += [f"<extra{i}>" for i in range(families.VOCABULARY - len(words))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.scores": [-float(i) for i in range(len(words))],
        "tokenizer.ggml.token_type": [2, CONTROL, CONTROL, *[NORMAL] * (len(words) - 3)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def llama3_factors(original: int, base: float = 10_000.0) -> np.ndarray:
    """What Llama 3 divides its frequencies by, from the definition: nothing for short waves, 4 for long ones."""
    found = []
    for i in range(families.HEAD_DIM // 2):
        wave = 2 * math.pi * base ** (2 * i / families.HEAD_DIM)
        smooth = min(max((original / wave - 1) / (4 - 1), 0), 1)
        found.append(1 / ((1 - smooth) / 4 + smooth))
    return np.array(found, np.float32)


def read(path: Path | str, **options: Any) -> Any:
    """`probes.load`, whose view is looked into."""
    return probes.load(path, **options)


def same(a: Any, b: Any) -> bool:
    """Up to the rounding of numbers that a file keeps in float32, such as the norms' epsilon."""
    a, b = (seen.residual(seen.embed(IDS)).detach() for seen in (a, b))
    return bool((a - b).abs().max() <= 1e-4 * b.abs().max())


def cut(seen: Any, text: str) -> list[str]:
    return seen.tokenizer.convert_ids_to_tokens(seen.tokenizer(text, add_special_tokens=False).input_ids)


refused = partial(families.refused, probes.load)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    adds.get(type(value), writer.add_array)(key, value)  # type: ignore[operator]
