"""Where the families of transformers differ: one frozen table, and what its rows know of a block and a configuration.

The code elsewhere has no branches by family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from .view import Linear, Norm, Parts, PositionalEncoding, Router, Spec

SINK_LOGITS = "sink_logits"  # ours, on a config of gpt-oss: false for a model that is trained without them


def _rms(module: Any, *, plus_one: bool = False) -> Norm:
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return Norm("rms", module.weight + 1 if plus_one else module.weight, None, eps)


def _layer_norm(module: nn.LayerNorm) -> Norm:
    return Norm("layer", module.weight, module.bias, module.eps)


def _linear(module: Any) -> Linear:
    return Linear(module.weight, module.bias)


def _llama_parts(block: Any, *, plus_one: bool = False, **others: Any) -> Parts:
    """Of Llama, and of families that differ from it in the fields given."""
    attention, mlp = block.self_attn, block.mlp
    found: dict[str, Any] = {name: _linear(getattr(attention, f"{name}_proj")) for name in "qkvo"}
    found |= {name: _linear(getattr(mlp, f"{name}_proj")) for name in ("gate", "up", "down")}
    found |= {"activation": mlp.act_fn, "head_dim": attention.head_dim, "scale": attention.scaling}
    norms = {"attention_norm": block.input_layernorm, "mlp_norm": block.post_attention_layernorm}
    found |= {name: _rms(norm, plus_one=plus_one) for name, norm in norms.items()}
    return Parts(**found | others)


def _qwen3_parts(block: Any) -> Parts:
    return _llama_parts(block, q_norm=_rms(block.self_attn.q_norm), k_norm=_rms(block.self_attn.k_norm))


def _gpt_oss_parts(block: Any) -> Parts:
    attention, experts, router = block.self_attn, block.mlp.experts, block.mlp.router
    dtype = attention.q_proj.weight.dtype  # transformers keeps norms in float32
    norms = {"attention_norm": block.input_layernorm, "mlp_norm": block.post_attention_layernorm}
    found: dict[str, Any] = {
        name: Norm("rms", n.weight.to(dtype), None, n.variance_epsilon) for name, n in norms.items()
    }
    found |= {name: _linear(getattr(attention, f"{name}_proj")) for name in "qkvo"}
    # Experts store [input, output], and gate and up alternate.
    first, biases = experts.gate_up_proj.mT, experts.gate_up_proj_bias
    return Parts(
        **found,
        gate=Linear(first[:, ::2], biases[:, ::2]),
        up=Linear(first[:, 1::2], biases[:, 1::2]),
        down=Linear(experts.down_proj.mT, experts.down_proj_bias),
        activation=partial(_clamped_gate, experts.alpha, experts.limit),
        up_activation=partial(_clamped_up, experts.limit),
        router=Router(Linear(router.weight, router.bias), router.top_k, renormalized=True),
        sink=attention.sinks,
        head_dim=attention.head_dim,
        scale=attention.scaling,
    )


def _clamped_gate(alpha: float, limit: float, x: Tensor) -> Tensor:
    x = x.clamp(max=limit)
    return x * torch.sigmoid(alpha * x)


def _clamped_up(limit: float, x: Tensor) -> Tensor:
    return x.clamp(-limit, limit) + 1


def _gpt_oss_drawn(config: Any) -> dict[str, Any]:
    limit = config.swiglu_limit
    experts = (config.num_local_experts, config.num_experts_per_tok, True)
    gate, up = partial(_clamped_gate, config.swiglu_alpha, limit), partial(_clamped_up, limit)
    return {"experts": experts, "activation": gate, "up_activation": up}


def _gemma2_parts(block: Any) -> Parts:
    return _llama_parts(
        block,
        plus_one=True,
        mlp_norm=_rms(block.pre_feedforward_layernorm, plus_one=True),
        post_attention_norm=_rms(block.post_attention_layernorm, plus_one=True),
        post_mlp_norm=_rms(block.post_feedforward_layernorm, plus_one=True),
        softcap=block.self_attn.attn_logit_softcapping,
    )


def _gpt2_parts(block: Any) -> Parts:
    attention, mlp = block.attn, block.mlp
    # Conv1D stores [input, output], and q, k, v side by side.
    weights, biases = attention.c_attn.weight.T.chunk(3), attention.c_attn.bias.chunk(3)
    scale = attention.head_dim**-0.5 if attention.scale_attn_weights else 1.0
    if attention.scale_attn_by_inverse_layer_idx:
        scale /= attention.layer_idx + 1
    return Parts(
        attention_norm=_layer_norm(block.ln_1),
        mlp_norm=_layer_norm(block.ln_2),
        q=Linear(weights[0], biases[0]),
        k=Linear(weights[1], biases[1]),
        v=Linear(weights[2], biases[2]),
        o=Linear(attention.c_proj.weight.T, attention.c_proj.bias),
        gate=None,
        up=Linear(mlp.c_fc.weight.T, mlp.c_fc.bias),
        down=Linear(mlp.c_proj.weight.T, mlp.c_proj.bias),
        activation=mlp.act,
        head_dim=attention.head_dim,
        scale=scale,
    )


def _gpt_neox_parts(block: Any) -> Parts:
    attention, mlp = block.attention, block.mlp
    bias = attention.query_key_value.bias
    biases = (
        {} if bias is None else dict(zip("qkv", bias.unflatten(0, (-1, 3, attention.head_size)).unbind(1), strict=True))
    )
    linear: dict[str, Any] = {
        name: Linear(weight.flatten(0, 1), biases[name].flatten() if biases else None)
        for name, weight in _gpt_neox_fused(block).items()
    }
    return Parts(
        **linear,
        attention_norm=_layer_norm(block.input_layernorm),
        mlp_norm=_layer_norm(block.post_attention_layernorm),
        o=_linear(attention.dense),
        gate=None,
        up=_linear(mlp.dense_h_to_4h),
        down=_linear(mlp.dense_4h_to_h),
        activation=mlp.act,
        head_dim=attention.head_size,
        scale=attention.scaling,
        parallel=block.use_parallel_residual,
    )


def _gpt_neox_fused(block: Any) -> dict[str, Tensor]:
    # Rows are grouped by head: c of q, c of k, c of v, then the next head.
    fused = block.attention.query_key_value.weight.unflatten(0, (-1, 3, block.attention.head_size))
    return dict(zip("qkv", fused.unbind(1), strict=True))


def _gpt_neox_drawn(config: Any) -> dict[str, Any]:
    plain = {"gate": None, "norm": "layer", "eps": config.layer_norm_eps}
    return plain | {"parallel": config.use_parallel_residual}


def _gpt2_drawn(config: Any) -> dict[str, Any]:
    plain = {"gate": None, "norm": "layer", "eps": config.layer_norm_epsilon}
    return plain | {"features": config.n_inner or 4 * config.n_embd, "activation": config.activation_function}


@dataclass(frozen=True)
class Family:
    """Where a family keeps what the view needs, and the block class that `parts` knows how to take apart."""

    block: str
    parts: Callable[[Any], Parts]
    blocks: str = "layers"
    final_norm: str = "norm"
    attention: str = "self_attn"
    output: str = "o_proj"  # of the attention
    positional: PositionalEncoding = "rope"
    learned: str | None = None  # the embedding of absolute positions
    drawn: Callable[[Any], dict[str, Any]] = lambda config: {}  # how the fields of `Birth` differ from Llama's
    depth_scaled: bool = False  # transformers draws output and down projections more narrowly the deeper the model is
    root_scaled: bool = False  # embeddings are multiplied by sqrt(d) in the forward pass
    sink_logits: bool = False
    planes: bool = False  # rotations have one cosine and sine per plane, and not one per feature
    fused: Callable[[Any], dict[str, Tensor]] = lambda block: {}  # a block's matrices of which `parts` has copies


FAMILIES: MappingProxyType[str, Family] = MappingProxyType(
    {
        "llama": Family("LlamaDecoderLayer", _llama_parts),
        "mistral": Family("MistralDecoderLayer", _llama_parts),
        "qwen2": Family("Qwen2DecoderLayer", _llama_parts),
        "qwen3": Family("Qwen3DecoderLayer", _qwen3_parts),
        "gemma": Family("GemmaDecoderLayer", partial(_llama_parts, plus_one=True), root_scaled=True),
        "gemma2": Family(
            "Gemma2DecoderLayer",
            _gemma2_parts,
            drawn=lambda config: {"activation": config.hidden_activation, "post_norm": True},
            root_scaled=True,
        ),
        "gpt_oss": Family("GptOssDecoderLayer", _gpt_oss_parts, drawn=_gpt_oss_drawn, sink_logits=True, planes=True),
        "gpt2": Family(
            "GPT2Block",
            _gpt2_parts,
            blocks="h",
            final_norm="ln_f",
            attention="attn",
            output="c_proj",
            positional="learned",
            learned="wpe",
            drawn=_gpt2_drawn,
            depth_scaled=True,
        ),
        "gpt_neox": Family(
            "GPTNeoXLayer",
            _gpt_neox_parts,
            final_norm="final_layer_norm",
            attention="attention",
            output="dense",
            drawn=_gpt_neox_drawn,
            fused=_gpt_neox_fused,
        ),
    }
)


def family_of(config: Any) -> Family:
    """The table's row for a configuration, or for a model type.

    Raises:
        InputError: the model type is not in the table.
    """
    kind = config if isinstance(config, str) else config.model_type
    if kind not in FAMILIES:
        raise InputError(f"model type '{kind}' is not supported; supported families: {', '.join(FAMILIES)}")
    return FAMILIES[kind]


def spec_of(config: Any) -> Spec:
    """The architecture a transformers configuration describes."""
    family = family_of(config)
    heads, blocks, width = config.num_attention_heads, config.num_hidden_layers, config.hidden_size
    head_dim = getattr(config, "head_dim", None) or width // heads
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):  # Qwen2 and Qwen3 carry the number without using it
        window = None
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * blocks
    return Spec(
        family=config.model_type,
        blocks=blocks,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        width=width,
        vocabulary=config.vocab_size,
        positional=(family.positional,) * blocks,
        windows=tuple(window if kind == "sliding_attention" else None for kind in types),
        max_length=getattr(config, "max_position_embeddings", None),
        initializer_range=getattr(config, "initializer_range", None),
        sink_logits=family.sink_logits and getattr(config, SINK_LOGITS, True),
    )
