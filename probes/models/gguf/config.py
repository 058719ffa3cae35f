"""The transformers configuration that a GGUF file implies, key by key, and the check of a given one against the file.

transformers' own reader takes few of a file's keys and silently drops the others: RoPE scaling, windows, soft-caps,
head sizes. Here every key of the architecture is applied, known to change nothing, or refused by its name. A configuration
given beside the file must agree with what the file states, and says what the file does not: the window of a Mistral, the
deviation of fresh weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from ...errors import InputError, reason
from ..checkpoint import check_fields
from ..families import spec_of
from ..initialization import ASSUMED
from .header import Header

ROPE_FACTORS = "rope_freqs.weight"  # what each rotation's frequency is divided by
# Keys that change nothing at these values, and those that change nothing at any.
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
IDLE = ("rope.scaling.finetuned", "rope.scaling.original_context_length", "tensor_data_layout")
ROUNDING = 1e-5  # relative: a file keeps numbers in float32 that a config writes in decimals
# The rest of Llama 3.1's and 3.2's RoPE scaling, of which a file keeps what comes out
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GEMMA2_27B = 46  # blocks: the one Gemma-2 whose logits are scaled by its width per head, not by the head's own
GEMMA2_WINDOW, GEMMA2_SOFTCAP, GEMMA2_FINAL_SOFTCAP = 4096, 50.0, 30.0  # of all Gemma-2, where the file does not say
LARGEST = 2**31 - 1  # of a size
REQUIRED = object()


class _Stated:
    """The keys of the file's architecture; remembers which were never read."""

    def __init__(self, header: Header) -> None:
        self.header = header
        prefix = f"{header.architecture}."
        self.values = {key.removeprefix(prefix): v for key, v in header.values.items() if key.startswith(prefix)}
        self.left = dict(self.values)

    def take(self, name: str, default: Any = None) -> Any:
        self.left.pop(name, None)
        found = self.values.get(name, default)
        if found is REQUIRED:
            raise self.header.refuse(f"does not state {self.header.architecture}.{name}; convert the model again")
        return found

    def whole(self, name: str, default: Any = REQUIRED) -> Any:
        found = self.take(name, default)
        if found is default:
            return found
        if isinstance(found, list) and len(set(found)) == 1:  # one per block, all alike
            found = found[0]
        if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found <= LARGEST:
            raise self.wrong(name, "a whole number of at least 1 belongs there")
        return found

    def number(self, name: str, default: Any = REQUIRED, *, least: float = 0.0) -> Any:
        found = self.take(name, default)
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not least <= found < math.inf:
            raise self.wrong(name, "another number belongs there")
        return float(found)

    def wrong(self, name: str, why: str) -> InputError:
        return self.header.refuse(f"states {self.header.architecture}.{name}={self.values.get(name)!s:.40}; {why}")

    def check_left(self) -> None:
        """Refuse the first unknown key: it may change what the model computes."""
        for name, value in sorted(self.left.items()):
            if name not in IDLE and (name not in NEUTRAL or value != NEUTRAL[name]):
                raise self.wrong(name, "headwater does not know how to follow it; give the checkpoint's own folder")


def config_of(header: Header, given: Mapping[str, Any] | None = None) -> Any:
    """The configuration of a GGUF file.

    Args:
        header: the file's.
        given: fields of a config.json, which say what the file leaves unsaid.

    Raises:
        InputError: an architecture or key that is not supported, a key with a value that no model has, or one that
            `given` contradicts.
    """
    if header.architecture in UNREAD:
        _, why = UNREAD[header.architecture]
        raise header.refuse(
            f"has the architecture '{header.architecture}', which is not read: {why}; give the checkpoint's own folder"
        )
    if header.architecture not in ARCHITECTURES:
        raise header.refuse(
            f"has the architecture '{header.architecture:.40}', which is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    stated = _Stated(header)
    fields = _common(stated) | ARCHITECTURES[header.architecture](stated)
    stated.check_left()
    implied = _made(header, fields)
    config = implied if given is None else _agreeing(stated, implied, given)
    _check_window(stated, config)
    config.tie_word_embeddings = "output.weight" not in header.tensors  # so the file has it, whatever a config says
    if "initializer_range" not in (given or {}):
        setattr(config, ASSUMED, True)  # a GGUF file holds no deviation of fresh weights
    return config


def _made(header: Header, fields: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    try:
        check_fields(fields)
        return AutoConfig.for_model(**fields)
    except Exception as error:  # transformers checks fields with errors of several libraries
        raise header.refuse(
            f"describes no {fields['model_type']} model ({reason(error)}); convert the model again"
        ) from None


# ------------------------------------------------------------------------------------------------- what a file implies


def _common(stated: _Stated) -> dict[str, Any]:
    header = stated.header
    embeddings = header.tensors.get("token_embd.weight")
    if embeddings is None or len(embeddings.shape) != 2:
        raise header.refuse("has no matrix token_embd.weight; convert the model again")
    rows, width = embeddings.shape
    if stated.whole("vocab_size", rows) != rows:
        raise stated.wrong("vocab_size", f"there are {rows:,} embeddings")
    if stated.whole("embedding_length") != width:
        raise stated.wrong("embedding_length", f"embeddings have {width:,} entries")
    if stated.whole("block_count") > len(header.tensors):
        raise stated.wrong("block_count", f"there are {len(header.tensors)} tensors in all")
    ids = {name: header.values.get(f"tokenizer.ggml.{key}_token_id") for name, key in TOKENS}
    return {"vocab_size": rows} | {name: value if isinstance(value, int) else None for name, value in ids.items()}


TOKENS = (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding"))


def _rotary(stated: _Stated) -> dict[str, Any]:
    """What all architectures with RMS norms and rotations share."""
    width, heads = stated.whole("embedding_length"), stated.whole("attention.head_count")
    head_dim = stated.whole("attention.key_length", width // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if stated.whole(name, head_dim) != head_dim:
            raise stated.wrong(name, f"keys have {head_dim} entries, and values of other sizes are not supported")
    return {
        "model_type": stated.header.architecture,
        "hidden_size": width,
        "num_hidden_layers": stated.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": stated.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": stated.whole("feed_forward_length"),
        "max_position_embeddings": stated.whole("context_length"),
        "rms_norm_eps": stated.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(stated, head_dim),
    }


def _rope(stated: _Stated, head_dim: int) -> dict[str, Any]:
    header, base = stated.header, stated.number("rope.freq_base", 10_000.0, least=1.0)
    kind = stated.take("rope.scaling.type", "linear")
    older = stated.number("rope.scale_linear", 0.0)
    factor = stated.number("rope.scaling.factor", older) or 1.0  # 0 says nothing
    usual = {"rope_type": "default", "rope_theta": base}
    if ROPE_FACTORS in header.tensors and header.architecture in ("llama", "mistral"):
        if kind not in ("none", "linear") or factor != 1:
            raise header.refuse(f"scales its rotations twice, by {ROPE_FACTORS} and by {kind!s:.20}; convert it again")
        return _by_frequency(stated, usual, head_dim)
    if kind == "none" or (kind == "linear" and factor == 1):
        return usual
    if kind == "linear":
        return usual | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = stated.whole("rope.scaling.original_context_length", stated.whole("context_length"))
        found = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        betas = {name: stated.take(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        return usual | found | {name: float(beta) for name, beta in betas.items() if beta is not None}
    raise stated.wrong("rope.scaling.type", "linear and yarn can be followed; give the checkpoint's own folder")


def _by_frequency(stated: _Stated, usual: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Llama 3's scaling, of which the file keeps what each frequency is divided by."""
    factors, count = stated.header.numbers(ROPE_FACTORS), head_dim // 2
    if len(factors) != count or not all(0 < factor < math.inf for factor in factors):
        raise stated.header.refuse(
            f"has {len(factors)} values in {ROPE_FACTORS} that are no factors of {count} rotations"
        )
    if set(factors) == {1.0}:
        return usual
    published = usual | LLAMA3 | {"factor": max(factors)}
    if max(factors) > 1 and _same(_frequencies(published, head_dim), _frequencies(usual, head_dim, factors)):
        return published
    # Any factors at all: LongRoPE divides each frequency by its own, here by the same at every length.
    either = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0, "factor": 1.0}
    context = stated.whole("context_length")
    return usual | {"rope_type": "longrope", "original_max_position_embeddings": context} | either


def _frequencies(rope: Mapping[str, Any], head_dim: int, factors: Any = 1.0) -> torch.Tensor:
    """Angles per position of each rotation, and what the logits are scaled by."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if rope["rope_type"] == "default":
        steps = torch.arange(0, head_dim, 2) / head_dim
        return torch.cat([rope["rope_theta"] ** -steps / torch.tensor(factors), torch.ones(1)])
    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, rope_parameters=dict(rope))
    found, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    return torch.cat([found, torch.tensor([float(scale)])])


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=10 * ROUNDING, atol=0)


def _llama(stated: _Stated) -> dict[str, Any]:
    """Llama, and Mistral, which llama.cpp keeps as a Llama; a window makes it one."""
    fields, window = _rotary(stated), stated.whole("attention.sliding_window", None)
    if window is not None or stated.header.architecture == "mistral":
        return fields | {"model_type": "mistral", "sliding_window": window}
    tensors = stated.header.tensors
    return fields | {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_gate.bias" in tensors}


def _qwen(stated: _Stated) -> dict[str, Any]:
    stated.whole("attention.sliding_window", None)  # which blocks have it is not said; `_check_window` follows
    fields = _rotary(stated)
    if stated.header.architecture == "qwen3":
        return fields | {"attention_bias": "blk.0.attn_q.bias" in stated.header.tensors}
    usual = fields["head_dim"] == fields["hidden_size"] // fields["num_attention_heads"]
    return {name: value for name, value in fields.items() if name != "head_dim" or not usual}  # as Qwen2's own configs


def _gemma2(stated: _Stated) -> dict[str, Any]:
    fields = _rotary(stated)
    width, heads, head_dim = fields["hidden_size"], fields["num_attention_heads"], fields["head_dim"]
    return fields | {
        "query_pre_attn_scalar": width // heads if fields["num_hidden_layers"] == GEMMA2_27B else head_dim,
        "sliding_window": stated.whole("attention.sliding_window", GEMMA2_WINDOW),
        "attn_logit_softcapping": stated.number("attn_logit_softcapping", GEMMA2_SOFTCAP) or None,
        "final_logit_softcapping": stated.number("final_logit_softcapping", GEMMA2_FINAL_SOFTCAP) or None,
    }


def _gpt2(stated: _Stated) -> dict[str, Any]:
    width, heads = stated.whole("embedding_length"), stated.whole("attention.head_count")
    if stated.whole("attention.head_count_kv", heads) != heads or width % heads:
        raise stated.header.refuse(f"has {heads} heads, which a GPT-2 of width {width} cannot have")
    return {
        "model_type": "gpt2",
        "n_embd": width,
        "n_layer": stated.whole("block_count"),
        "n_head": heads,
        "n_inner": stated.whole("feed_forward_length"),
        "n_positions": stated.whole("context_length"),
        "layer_norm_epsilon": stated.number("attention.layer_norm_epsilon"),
    }


ARCHITECTURES: Mapping[str, Callable[[_Stated], dict[str, Any]]] = MappingProxyType(
    {"llama": _llama, "mistral": _llama, "qwen2": _qwen, "qwen3": _qwen, "gemma2": _gemma2, "gpt2": _gpt2}
)
# Of families that are supported otherwise, by architecture: the model type, and why a file of it is not read.
_ROTATED = "whether its queries and keys are stored for another order of rotation was not checked against a file"
UNREAD: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "smollm3": ("smollm3", "it does not say which blocks have no rotation"),
        "olmo2": ("olmo2", _ROTATED),
        "phi3": ("phi3", "its two lists of RoPE factors belong to two lengths, and which is meant is not said"),
        "gemma": ("gemma", "its norms' weights were not checked against a file"),
        "gemma3": ("gemma3_text", "it does not say which blocks have a window, nor by which base those rotate"),
        "qwen3moe": ("qwen3_moe", "whether weights of experts are normalized is not said"),
        "gpt-oss": ("gpt_oss", "transformers reads neither experts nor learned sink logits from it"),
        "gptneox": ("gpt_neox", "how its fused queries, keys and values are ordered was not checked against a file"),
    }
)


# -------------------------------------------------------------------------------------------- held against each other


def _agreeing(stated: _Stated, implied: Any, given: Mapping[str, Any]) -> Any:
    """The given configuration, once everything that the file states has been found in it."""
    header = stated.header
    kinds = ("llama", "mistral") if header.architecture in ("llama", "mistral") else (implied.model_type,)
    if given.get("model_type") not in kinds:
        kind = f"{given.get('model_type')!s:.40}"
        raise header.refuse(
            f"has the architecture '{header.architecture}', and config.json model_type={kind}; put the model's own there"
        )
    config = _made(header, {name: value for name, value in given.items() if name not in OF_OTHER_FILES})
    ours, theirs = spec_of(implied), spec_of(config)
    pairs = {key: (getattr(ours, name), getattr(theirs, name)) for key, name in SIZES.items()}
    pairs |= {key: (getattr(implied, name, None), getattr(config, name, None)) for key, name in NUMBERS.items()}
    for key, (stands, found) in pairs.items():
        if key in stated.values and stands is not None and not _close(stands, found):
            raise stated.wrong(key, f"config.json has {found}; put the model's own config.json there, or none")
    if hasattr(implied, "rope_parameters"):
        ropes = implied.rope_parameters, config.rope_parameters
        scaled = ropes[0]["rope_type"] != "default"  # if it is not, the config may say how to
        if not _close(ropes[0]["rope_theta"], ropes[1]["rope_theta"]) or (
            scaled and not _same(*(_frequencies(rope, ours.head_dim) for rope in ropes))
        ):
            said = [f"{rope['rope_type']}, base {rope['rope_theta']:g}" for rope in ropes]
            raise header.refuse(
                f"rotates by other angles ({said[0]}) than its config.json ({said[1]}); correct that file"
            )
    return config


OF_OTHER_FILES = ("quantization_config", "auto_map")  # of the weights that config.json was written for
SIZES = {  # fields of a spec by what the file calls them
    "block_count": "blocks",
    "embedding_length": "width",
    "attention.head_count": "heads",
    "attention.head_count_kv": "kv_heads",
    "attention.key_length": "head_dim",
    "vocab_size": "vocabulary",
}
NUMBERS = {  # and of a configuration
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


def _close(a: Any, b: Any) -> bool:
    return b is not None and abs(a - b) <= ROUNDING * abs(a)


def _check_window(stated: _Stated, config: Any) -> None:
    """Refuse a window that the file states and that the model would not have."""
    window, spec = stated.values.get("attention.sliding_window"), spec_of(config)
    if window is None or window in spec.windows or (set(spec.windows) == {None} and window >= (spec.max_length or 0)):
        return
    found = ", ".join(sorted({str(found) for found in spec.windows}))
    raise stated.wrong(
        "attention.sliding_window",
        f"windows by its configuration: {found}; put the model's own config.json beside the file",
    )
