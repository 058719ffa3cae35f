"""The transformers configuration that a GGUF file implies, key by key.

transformers' own reader takes few of a file's keys and silently drops the others: RoPE scaling, windows, soft-caps,
head sizes. Here every key of the architecture is followed by name, known to change nothing, or refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from ...errors import InputError, reason
from ..families import check_sizes, spec_of
from ..initialization import ASSUMED
from .header import Header

# A configuration's field by the file's key, without its architecture.
FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "feed_forward_length": "intermediate_size",
        "context_length": "max_position_embeddings",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    }
)
# Of all Gemma-2, where the file does not say.
CAPS: Mapping[str, float] = MappingProxyType({"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0})
GEMMA2_WINDOW = 4096
GEMMA2_27B = 46  # the one with so many blocks has logits scaled by its width per head, not by the head's own
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2")
LLAMAS = ("llama",)  # also of Mistral: a window makes it one
# Keys that are followed although no field has their name.
ROTATING = (
    *("vocab_size", "attention.value_length", "attention.sliding_window", "rope.dimension_count", "rope.freq_base"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
)
IDLE = ("rope.scaling.finetuned", "tensor_data_layout")  # keys that change nothing
# Keys that change nothing at these values.
NEUTRAL = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.causal": True,
    "use_parallel_residual": False,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
}
TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}

ROPE_FACTORS = "rope_freqs.weight"  # what each rotation's frequency is divided by
# The rest of Llama 3.1's and 3.2's RoPE scaling, of which a file keeps what comes out
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ROUNDING = 1e-4  # relative: a file keeps factors in float32, and their ratios are taken in it again
LARGEST = 2**31  # of a size


def config_of(header: Header) -> Any:
    """The configuration of a GGUF file.

    Raises:
        InputError: an architecture or key that is not supported, or a key with a value that no model has.
    """
    from transformers import AutoConfig

    if header.architecture not in ARCHITECTURES:
        raise header.refuse(
            f"has the architecture '{header.architecture!s:.40}', which is not read; give the checkpoint's own folder "
            f"(read are {', '.join(ARCHITECTURES)})"
        )
    stated = _Stated(header)
    fields = _fields(stated)
    try:
        config = AutoConfig.for_model(**fields)
        check_sizes(config)
    except Exception as error:  # transformers checks fields with errors of several libraries
        raise header.refuse(
            f"describes no {fields['model_type']} model ({reason(error)}); convert the model again"
        ) from None
    window, windows = stated.values.get("attention.sliding_window"), set(spec_of(config).windows)
    beyond = windows == {None} and window is not None and window >= config.max_position_embeddings
    if window is not None and window not in windows and not beyond:
        raise stated.wrong(
            "attention.sliding_window", "which blocks have it is not said; give the checkpoint's own folder"
        )
    config.tie_word_embeddings = "output.weight" not in header.tensors
    setattr(config, ASSUMED, True)  # a GGUF file holds no deviation of fresh weights
    return config


class _Stated:
    """The keys of the file's architecture."""

    def __init__(self, header: Header) -> None:
        self.header, self.kind = header, header.architecture
        prefix = f"{self.kind}."
        self.values = {key.removeprefix(prefix): v for key, v in header.values.items() if key.startswith(prefix)}
        followed = (*FIELDS, *ROTATING, *IDLE, *(CAPS if self.kind == "gemma2" else ()))
        for key, value in sorted(self.values.items()):
            if key not in followed and (key not in NEUTRAL or value != NEUTRAL[key]):  # it may change what is computed
                raise self.wrong(key, "headwater does not know how to follow it; give the checkpoint's own folder")

    def number(self, key: str, default: float | int | None = None, *, least: float = 0.0, whole: bool = False) -> Any:
        """A number of at least `least`.

        Raises:
            InputError: it is none, or not there and without a default.
        """
        value: Any = self.values.get(key, default)
        if value is None:
            raise self.header.refuse(f"does not state {self.kind}.{key}; convert the model again")
        alike = isinstance(value, list) and len(set(value)) == 1  # one per block
        value = value[0] if alike else value
        kind, most = (int, LARGEST) if whole else (int | float, math.inf)
        if isinstance(value, bool) or not isinstance(value, kind) or not least <= value < most:
            raise self.wrong(key, f"{'a whole number of at least 1' if whole else 'another number'} belongs there")
        return value if whole else float(value)

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        return self.number(key, default, least=1.0, whole=True)

    def wrong(self, key: str, why: str) -> InputError:
        return self.header.refuse(f"states {self.kind}.{key}={self.values.get(key)!s:.40}; {why}")


def _fields(stated: _Stated) -> dict[str, Any]:
    """The configuration's fields."""
    header, kind = stated.header, stated.kind
    if "token_embd.weight" not in header.tensors:
        raise header.refuse("has no matrix token_embd.weight; convert the model again")
    rows, width, heads = (
        header.shape("token_embd.weight")[0],
        *map(stated.size, ("embedding_length", "attention.head_count")),
    )
    head_dim = stated.size("attention.key_length", max(1, width // heads))
    sizes = f"keys have {head_dim} entries, and values of other sizes are not supported"
    follows = {
        "vocab_size": (rows, f"there are {rows:,} embeddings"),
        "attention.value_length": (head_dim, sizes),
        "rope.dimension_count": (head_dim, sizes),
    }
    for key, (value, why) in follows.items():
        if stated.size(key, value) != value:
            raise stated.wrong(key, why)
    defaults = {"attention.head_count_kv": heads, "attention.key_length": head_dim}
    fields: dict[str, Any] = {"model_type": kind, "vocab_size": rows, "rope_parameters": _rope(stated, head_dim)}
    for key, field in FIELDS.items():
        fields[field] = stated.number(key) if field == "rms_norm_eps" else stated.size(key, defaults.get(key))
    for field, name in TOKENS.items():
        token = header.values.get(f"tokenizer.ggml.{name}_token_id")
        fields[field] = token if isinstance(token, int) else None
    windowed, biased = "attention.sliding_window" in stated.values, "blk.0.attn_q.bias" in header.tensors
    if kind == "llama" and windowed:
        return fields | {"model_type": "mistral", "sliding_window": stated.size("attention.sliding_window")}
    if kind == "gemma2":
        scale = width // heads if fields["num_hidden_layers"] == GEMMA2_27B else head_dim
        caps = {cap: stated.number(cap, usual) or None for cap, usual in CAPS.items()}
        window = stated.size("attention.sliding_window", GEMMA2_WINDOW)
        return fields | caps | {"query_pre_attn_scalar": scale, "sliding_window": window}
    if kind == "qwen2":
        usual = head_dim == width // heads  # then it stands in none of Qwen2's own configurations
        return {field: value for field, value in fields.items() if field != "head_dim" or not usual}
    more = {"mlp_bias": "blk.0.ffn_gate.bias" in header.tensors} if kind == "llama" else {}
    return fields | {"attention_bias": biased} | more


def _rope(stated: _Stated, head_dim: int) -> dict[str, Any]:
    header, base = stated.header, stated.number("rope.freq_base", 10_000.0, least=1.0)
    kind = stated.values.get("rope.scaling.type", "linear")
    factor = stated.number("rope.scaling.factor", 0.0) or 1.0  # 0 says nothing
    usual = {"rope_type": "default", "rope_theta": base}
    if ROPE_FACTORS in header.tensors and stated.kind in LLAMAS:
        if kind not in ("none", "linear") or factor != 1:
            raise header.refuse(f"scales its rotations twice, by {ROPE_FACTORS} and by {kind!s:.20}; convert it again")
        return _by_frequency(header, usual, head_dim)
    if kind == "none" or (kind == "linear" and factor == 1):
        return usual
    if kind == "linear":
        return usual | {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise stated.wrong("rope.scaling.type", "linear and yarn can be followed; give the checkpoint's own folder")
    original = stated.size("rope.scaling.original_context_length", stated.size("context_length"))
    betas = {beta: stated.values.get(f"rope.scaling.yarn_{beta}") for beta in ("beta_fast", "beta_slow")}
    scaled = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    return usual | scaled | {beta: float(value) for beta, value in betas.items() if value is not None}


def _by_frequency(header: Header, usual: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Llama 3's scaling, of which the file keeps what each frequency is divided by."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    factors = torch.from_numpy(header.read(ROPE_FACTORS)).ravel()
    if (factors == 1).all():
        return usual
    scaled = usual | LLAMA3 | {"factor": float(factors.max())}
    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, rope_parameters=scaled)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = usual["rope_theta"] ** (-torch.arange(0, head_dim, 2) / head_dim)
    if len(factors) != len(plain) or not torch.allclose(plain / factors, frequencies, rtol=ROUNDING, atol=0):
        raise header.refuse(
            f"scales its rotations by {ROPE_FACTORS} in another way than Llama 3; give the checkpoint's own folder"
        )
    return scaled
