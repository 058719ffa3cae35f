"""GGUF files of the families' small models, written with the `gguf` package as llama.cpp's converter writes them."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import families
import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

import probes

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text")
STORED = {"mistral": "llama", "gemma3_text": "gemma3"}  # under another name
BYTES = [*map(chr, range(33, 127)), "Ġ", "Ċ"]  # printable ASCII, space and newline, as byte-level BPE has them
MERGES = ["t h", "th e", "Ġ the", "i n", "a n", "1 2", "Ġ a"]
WHOLE = "wxyz"  # a token that no merges lead to
TOKENS = ["<s>", "</s>", "<unk>", *BYTES, *(merge.replace(" ", "") for merge in MERGES), WHOLE]
TOKENS += [f"<extra{i}>" for i in range(families.VOCABULARY - len(TOKENS))]
CONTROL, NORMAL, UNUSED = 3, 1, 5  # the format's kinds of tokens
KINDS = [CONTROL if n < 3 else UNUSED if "extra" in token else NORMAL for n, token in enumerate(TOKENS)]
BYTE_LEVEL = {"model": "gpt2", "pre": "qwen2", "tokens": TOKENS, "token_type": KINDS, "merges": MERGES}
BYTE_LEVEL |= {"bos_token_id": 0, "eos_token_id": 1, "add_bos_token": False}
WORDS = ["<unk>", "<s>", "</s>", *map(chr, range(97, 123)), "▁", "▁t", "▁th", "th", "he", "the", "▁the"]
WORDS += [f"<extra{i}>" for i in range(families.VOCABULARY - len(WORDS))]
SENTENCEPIECE = {
    "model": "llama",
    "tokens": WORDS,
    "scores": [-float(i) for i in range(len(WORDS))],
    "token_type": [2, CONTROL, CONTROL, *[NORMAL] * (len(WORDS) - 3)],
} | {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
REMOVED: Any = object()  # a key that is left out
GEMMA3 = [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]
LOCAL = {"rope_type": "default", "rope_theta": 10_000.0}
IDS = torch.arange(3, 103)[None]  # far enough for slow rotations to show


def original(name: str, **changed: Any) -> PreTrainedModel:
    """The model that is written: of a family, with fields of its configuration changed."""
    config = families.FAMILIES[name]()
    if name in ("gemma2", "gemma3_text"):
        changed = {"query_pre_attn_scalar": families.HEAD_DIM} | changed
    if name == "gemma3_text":
        changed |= {"num_hidden_layers": len(GEMMA3), "layer_types": GEMMA3}
    for field, value in changed.items():
        setattr(config, field, value)
    return families.build(type(config)(**config.to_dict()))


def write(
    path: Path,
    model: PreTrainedModel,
    *,
    kind: str = "F32",
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
    architecture: str | None = None,
    tokenizer: Mapping[str, Any] = BYTE_LEVEL,
) -> Path:
    """Write a model, its matrices of one type; `keys` and `tensors` are more of them, or in the place of what there is.

    Keys without a group of theirs at the beginning belong to the architecture: "rope.freq_base".
    """
    family = model.config.model_type
    architecture = architecture or STORED.get(family, family)
    every = stated(model.config) | {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    writer = gguf.GGUFWriter(path, architecture)
    adds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in (every | dict(keys or {})).items():
        whole = key if key.startswith(("tokenizer.", "general.", "split.")) else f"{architecture}.{key}"
        if value is not REMOVED:
            adds.get(type(value), writer.add_array)(whole, value)  # type: ignore[operator]
    for name, array in (stored(model) | dict(tensors or {})).items():
        array, wanted = np.ascontiguousarray(array, np.float32), gguf.GGMLQuantizationType[kind]
        if kind == "F32" or array.ndim < 2:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quantize(array, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stated(config: Any) -> dict[str, Any]:
    """The architecture's keys that llama.cpp writes for this family."""
    kind = config.model_type
    found = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": 96,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"]),
    }
    if kind.startswith(("qwen3", "gemma")):
        found |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if kind in ("mistral", "gemma2", "gemma3_text"):
        found["attention.sliding_window"] = config.sliding_window
    if kind in ("llama", "mistral"):
        found |= {"vocab_size": config.vocab_size, "rope.dimension_count": config.head_dim}
    caps = {cap: getattr(config, cap, None) for cap in ("attn_logit_softcapping", "final_logit_softcapping")}
    return found | {cap: value for cap, value in caps.items() if value}


def stored(model: Any) -> dict[str, Any]:
    """The model's tensors under the names and in the order of entries that llama.cpp has them."""
    config, family, found = model.config, model.config.model_type, {}
    number = next(n for n, kind in gguf.MODEL_ARCH_NAMES.items() if kind == STORED.get(family, family))
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    heads = {".q_proj.": config.num_attention_heads, ".k_proj.": config.num_key_value_heads}
    for own, tensor in model.state_dict().items():
        if own == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, count in heads.items() if family in ("llama", "mistral") else ():
            if part in own:
                tensor = tensor.unflatten(0, (count, 2, -1)).transpose(1, 2).reshape(tensor.shape)
        if family.startswith("gemma") and own.endswith("norm.weight"):
            tensor = tensor + 1
        found[names.get_name(own, try_suffixes=(".weight", ".bias"))] = tensor.numpy()
    return found


read: Any = probes.load
refused = partial(families.refused, probes.load)
