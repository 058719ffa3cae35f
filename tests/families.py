"""Tiny random models of every supported family, made from configurations: nothing is downloaded.

Weights are drawn wide (standard deviation 0.5) and biases and norm weights are moved off their zeros and ones: at 0.02
all attention is uniform, and a missing soft-cap, a wrong rotation or a forgotten bias would go unseen.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from probes.errors import InputError
from probes.models.families import FAMILIES as ROWS

VOCABULARY, WIDTH, BLOCKS, HEADS, KV_HEADS, HEAD_DIM = 128, 64, 3, 4, 2, 16
WINDOW = 8
MAX_LENGTH = 128
Bos: TypeAlias = Literal["prepended", "dedicated", "end", "none"]
SPREAD = 0.2  # of what is added to biases and norm weights

_COMMON: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": BLOCKS}
_COMMON |= {"num_attention_heads": HEADS, "intermediate_size": 96, "max_position_embeddings": MAX_LENGTH}
_COMMON |= {"initializer_range": 0.5, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
_GROUPED: dict[str, Any] = _COMMON | {"num_key_value_heads": KV_HEADS}
GPT2: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": BLOCKS, "n_head": HEADS}
GPT2 |= {"n_inner": 96, "n_positions": MAX_LENGTH, "initializer_range": 0.5, "bos_token_id": 1, "eos_token_id": 1}
USUAL: dict[str, dict[str, Any]] = {"gpt2": GPT2, "gpt_neox": _COMMON}  # all others: _GROUPED

# What a family's small model has beside these sizes, so that everything its row says makes a difference.
_NARROW: dict[str, Any] = {"head_dim": HEAD_DIM}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
# A scale that is not the head's width, which a wrong one would take.
_GEMMA: dict[str, Any] = _NARROW | {"query_pre_attn_scalar": 24, "sliding_window": WINDOW}
SPECIAL: dict[str, dict[str, Any]] = {
    "qwen3": _NARROW,
    "qwen3_moe": _NARROW
    | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "olmo3": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "ministral": _NARROW
    | {"sliding_window": WINDOW, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "phi3": {"partial_rotary_factor": 0.75},
    "gemma3_text": _GEMMA | {"sliding_window_pattern": 2, "final_logit_softcapping": 3.0},
    "mistral": {"sliding_window": WINDOW},
    "gemma": _NARROW,
    "gpt_oss": _NARROW
    | {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}
    | {"rope_parameters": _YARN | {"truncate": False}},
    "gemma2": _GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
}

# Families whose blocks run whole (see `test_hybrids`): hybrids of runs that attend once, the second with a layer behind its
# attention, and latent attention.
_RUNS = ["linear_attention", "full_attention", "linear_attention", "full_attention", "linear_attention"]
_HYBRID: dict[str, Any] = _NARROW | {"num_hidden_layers": len(_RUNS), "layer_types": _RUNS}
_HYBRID |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
_HYBRID |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
_SHARED = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 40,
}
_LATENT: dict[str, Any] = {"num_key_value_heads": HEADS, "q_lora_rank": 24, "kv_lora_rank": 16, "v_head_dim": 12}
_LATENT |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "first_k_dense_replace": 1, "moe_intermediate_size": 40}
_LATENT |= {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
SPECIAL |= {"qwen3_next": _HYBRID | _SHARED, "qwen3_5_text": _HYBRID, "qwen3_5_moe_text": _HYBRID | _SHARED}
SPECIAL |= dict.fromkeys(("deepseek_v2", "deepseek_v3"), _LATENT)
WHOLE = [name for name, row in ROWS.items() if row.parts is None]


def small(name: str, **more: Any) -> PreTrainedConfig:
    """A row's small configuration, with these fields besides."""
    return CONFIG_MAPPING[name](**USUAL.get(name, _GROUPED) | SPECIAL.get(name, {}) | more)


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    name: partial(small, name) for name, row in ROWS.items() if row.parts is not None
}

_WHOLE = {"rope_type": "default", "rope_theta": 10000.0}
# What the small models leave out.
VARIANTS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama, heads of another width": partial(small, "llama", head_dim=24),
    "llama, biases": partial(small, "llama", attention_bias=True, mlp_bias=True),
    "llama, tied embeddings": partial(small, "llama", tie_word_embeddings=True),
    "llama, yarn": partial(small, "llama", rope_parameters=_YARN),
    "mistral, no window": partial(small, "mistral", sliding_window=None),
    "qwen2, windows above block 0": partial(
        small, "qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3_moe, weights of all experts": partial(small, "qwen3_moe", norm_topk_prob=False),
    "qwen3_moe, one block without": partial(small, "qwen3_moe", mlp_only_layers=[1]),
    "smollm3, windows without rotation": partial(small, "smollm3", use_sliding_window=True, sliding_window=WINDOW),
    "gemma2, no caps": partial(
        small, "gemma2", attn_logit_softcapping=None, final_logit_softcapping=None, query_pre_attn_scalar=256
    ),
    "gpt2, scale by block": partial(small, "gpt2", scale_attn_by_inverse_layer_idx=True),
    "gpt_neox, no biases": partial(small, "gpt_neox", attention_bias=False),
    "gpt_neox, one after the other, fully rotated": partial(
        small, "gpt_neox", use_parallel_residual=False, rope_parameters=_WHOLE
    ),
}


DIFFERENT = ("llama", "gemma2", "gpt2", "gpt_neox")  # that differ most in their modules


def model(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model of the family with weights that depend on the seed alone, in evaluation mode; drawn in float32."""
    return build((FAMILIES | VARIANTS)[name](), seed=seed, dtype=dtype)


def build(config: PreTrainedConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The same for any configuration."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        made.set_experts_implementation("eager")  # the only one in float64
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if parameter.ndim == 1 or name.endswith("_bias"):  # biases and norm weights, learned sink logits
                    parameter += SPREAD * torch.randn_like(parameter)
    return made.to(dtype).eval()


def sized(width: int, length: int, vocabulary: int, *, kind: str = "llama", **more: Any) -> PreTrainedConfig:
    """A configuration by its sizes: one block, two heads, and a feed-forward layer as wide as the stream, unless told."""
    sizes = {"hidden_size": width, "max_position_embeddings": length, "vocab_size": vocabulary}
    sizes |= {"intermediate_size": width, "num_hidden_layers": 1, "num_attention_heads": 2}
    return CONFIG_MAPPING[kind](**sizes | more)


def blocks(model: Any) -> Any:
    """The list of blocks of any family's model."""
    return next(child for child in model.get_decoder().children() if isinstance(child, torch.nn.ModuleList))


def attention(block: Any) -> Any:
    """A block's attention."""
    return next(getattr(block, name) for name in ("self_attn", "attn", "attention") if hasattr(block, name))


def tokenizer(bos: Bos = "prepended") -> PreTrainedTokenizerFast:
    """Words "w3" to "w127" have the ids 3 to 127; 0 begins texts, 1 ends them, 2 stands for everything else.

    `bos`: "prepended" as in Llama, "dedicated" but not put first by itself, "end" the end token under another name as in
    GPT-2, "none" as in Qwen.
    """
    words = {"<s>": 0, "</s>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos == "prepended":
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    begin = {"prepended": "<s>", "dedicated": "<s>", "end": "</s>", "none": None}[bos]
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token=begin, eos_token="</s>", unk_token="<unk>")


def checkpoints(folder: Path, **found: tuple[str, Bos]) -> Path:
    """Models of these families with tokenizers of these kinds, saved under their names, and a text that they can read."""
    for name, (family, bos) in found.items():
        model(family).save_pretrained(folder / name)
        tokenizer(bos).save_pretrained(folder / name)
    words = np.random.default_rng(0).integers(3, 100, 600)
    (folder / "text.txt").write_text(" ".join(f"w{word}" for word in words), encoding="utf-8")
    return folder


def refused(function: Callable[..., object], *given: Any, **options: Any) -> str:
    """What a function says against what it is given, in one line."""
    with pytest.raises(InputError) as raised:
        function(*given, **options)
    said = str(raised.value)
    assert "\n" not in said
    assert len(said) < 500
    return said
