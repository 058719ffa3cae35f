"""Where the families of transformers differ: one frozen table, and what its rows know of a block and a configuration.

A second one says how quantized layers are measured, whatever the family. The code elsewhere has no branches by family.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import InputError
from .view import Linear, Norm, Parts, PositionalEncoding, Routing, Spec

POST_NORM = "post_attention_layernorm"
RECURRENT = "linear_attention"  # transformers' name for layers without softmax attention
SINK_LOGITS = "sink_logits"  # ours, on a config of gpt-oss: false for a model that is trained without them


def _rms(module: Any, *, plus_one: bool = False) -> Norm:
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return Norm("rms", module.weight + 1 if plus_one else module.weight, None, eps)


def _layer_norm(module: nn.LayerNorm) -> Norm:
    return Norm("layer", module.weight, module.bias, module.eps)


def _linear(module: Any) -> Linear:
    return Linear(module.weight, module.bias)


def _gated(mlp: Any) -> dict[str, Any]:
    found: dict[str, Any] = {name: _linear(getattr(mlp, f"{name}_proj")) for name in ("gate", "up", "down")}
    return found | {"activation": mlp.act_fn}


def _routed(mlp: Any) -> dict[str, Any]:
    """Of experts whose matrices are stacked, gate and up in one."""
    router, experts = mlp.gate, mlp.experts
    gate, up = experts.gate_up_proj.chunk(2, 1)
    found = {"gate": Linear(gate, None), "up": Linear(up, None), "down": Linear(experts.down_proj, None)}
    return found | {
        "activation": experts.act_fn,
        "routing": Routing(router.weight, router.top_k, router.norm_topk_prob),
    }


def _llama_parts(block: Any, *, plus_one: bool = False, **others: Any) -> Parts:
    """Of Llama, and of families that differ from it in the fields given."""
    attention, mlp = block.self_attn, block.mlp
    found: dict[str, Any] = {"head_dim": attention.head_dim, "scale": attention.scaling, "o": _linear(attention.o_proj)}
    if "q" not in others:
        found |= {name: _linear(getattr(attention, f"{name}_proj")) for name in "qkv"}
    if "up" not in others:
        found |= _routed(mlp) if hasattr(mlp, "experts") else _gated(mlp)
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    found |= {name: _rms(getattr(block, norm), plus_one=plus_one) for name, norm in norms.items() if name not in others}
    if hasattr(attention, "q_norm"):  # Qwen3, Gemma 3, OLMo 2 and 3
        found |= {name: _rms(getattr(attention, name), plus_one=plus_one) for name in ("q_norm", "k_norm")}
    return Parts(**found | others)


def _olmo_parts(block: Any) -> Parts:
    """Norms on what the branches give, none on what they read."""
    return _llama_parts(
        block,
        attention_norm=None,
        mlp_norm=None,
        post_attention_norm=_rms(block.post_attention_layernorm),
        post_mlp_norm=_rms(block.post_feedforward_layernorm),
    )


def _gpt_oss_parts(block: Any) -> Parts:
    attention, experts, router = block.self_attn, block.mlp.experts, block.mlp.router
    dtype = attention.q_proj.weight.dtype  # transformers keeps norms in float32
    names = {"attention_norm": block.input_layernorm, "mlp_norm": block.post_attention_layernorm}
    norms: dict[str, Any] = {
        name: Norm("rms", norm.weight.to(dtype), None, norm.variance_epsilon) for name, norm in names.items()
    }
    # Experts store [input, output], and gate and up alternate.
    first, biases = experts.gate_up_proj.mT, experts.gate_up_proj_bias
    return _llama_parts(
        block,
        **norms,
        gate=Linear(first[:, ::2], biases[:, ::2]),
        up=Linear(first[:, 1::2], biases[:, 1::2]),
        down=Linear(experts.down_proj.mT, experts.down_proj_bias),
        activation=partial(_clamped_gate, experts.alpha, experts.limit),
        up_activation=partial(_clamped_up, experts.limit),
        routing=Routing(router.weight, router.top_k, among_chosen=True, bias=router.bias),
        sink=attention.sinks,
    )


def _clamped_gate(alpha: float, limit: float, x: Tensor) -> Tensor:
    x = x.clamp(max=limit)
    return x * torch.sigmoid(alpha * x)


def _clamped_up(limit: float, x: Tensor) -> Tensor:
    return x.clamp(-limit, limit) + 1


def _gemma2_parts(block: Any, *, capped: bool = True) -> Parts:
    return _llama_parts(
        block,
        plus_one=True,
        mlp_norm=_rms(block.pre_feedforward_layernorm, plus_one=True),
        post_attention_norm=_rms(block.post_attention_layernorm, plus_one=True),
        post_mlp_norm=_rms(block.post_feedforward_layernorm, plus_one=True),
        softcap=block.self_attn.attn_logit_softcapping if capped else None,
    )


def _phi3_parts(block: Any) -> Parts:
    """Queries, keys and values in one matrix, gate and up in another."""
    attention, mlp = block.self_attn, block.mlp
    keys = attention.num_key_value_heads * attention.head_dim
    fused = attention.qkv_proj.weight
    parts = fused.split([len(fused) - 2 * keys, keys, keys]), mlp.gate_up_proj.weight.chunk(2)
    linear: dict[str, Any] = {
        name: Linear(weight, None) for name, weight in zip(("q", "k", "v", "gate", "up"), sum(parts, ()), strict=True)
    }
    return _llama_parts(block, **linear, down=_linear(mlp.down_proj), activation=mlp.activation_fn)


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
    biases = [None] * 3 if bias is None else bias.unflatten(0, (-1, 3, attention.head_size)).unbind(1)
    linear: dict[str, Any] = {
        name: Linear(weight.flatten(0, 1), None if one is None else one.flatten())
        for (name, weight), one in zip(_gpt_neox_fused(block).items(), biases, strict=True)
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


@dataclass(frozen=True)
class Family:
    """Where a family keeps what the view needs, and the block class that `parts` knows how to take apart."""

    models: str  # by which users know it
    block: str
    parts: Callable[[Any], Parts] | None  # None: blocks run whole, by transformers' code alone
    blocks: str = "layers"
    final_norm: str = "norm"
    attention: str = "self_attn"
    output: str = "o_proj"  # of the attention
    latent: bool = False  # keys and values come of one latent vector; heads share the rotated part of their keys
    gated: bool = False  # each head's queries come with gates, which its outputs are multiplied by before W_O
    learned: str | None = None  # the embedding of absolute positions; None: they are rotated
    rotated: str | None = None  # the configuration's list of which blocks rotate (1) or have no positions at all (0)
    depth_scaled: bool = False  # transformers draws output and down projections more narrowly the deeper the model is
    root_scaled: bool = False  # embeddings are multiplied by sqrt(d) in the forward pass
    sink_logits: bool = False
    post_norm: Callable[[Any], Norm] | None = None  # of the module `POST_NORM` of a block, on attention's output
    planes: bool = False  # rotations have one cosine and sine per plane, and not one per feature
    fused: Callable[[Any], dict[str, Tensor]] = lambda block: {}  # a block's matrices of which `parts` has copies
    no_lens: str | None = None  # why TransformerLens does not run it; None: it does


_WHOLE = "its blocks run whole"
FAMILIES: MappingProxyType[str, Family] = MappingProxyType(
    {
        "llama": Family("Llama 1 to 3, SmolLM2, TinyLlama", "LlamaDecoderLayer", _llama_parts),
        "mistral": Family("Mistral 7B", "MistralDecoderLayer", _llama_parts),
        "ministral": Family("Ministral 8B", "MinistralDecoderLayer", _llama_parts, no_lens="it has no bridge for it"),
        "smollm3": Family("SmolLM3", "SmolLM3DecoderLayer", _llama_parts, rotated="no_rope_layers"),
        "qwen2": Family("Qwen2, Qwen2.5", "Qwen2DecoderLayer", _llama_parts),
        "qwen3": Family("Qwen3", "Qwen3DecoderLayer", _llama_parts),
        "qwen3_moe": Family("Qwen3-MoE", "Qwen3MoeDecoderLayer", _llama_parts),
        "olmo2": Family("OLMo 2", "Olmo2DecoderLayer", _olmo_parts, post_norm=_rms),
        "olmo3": Family("OLMo 3", "Olmo3DecoderLayer", _olmo_parts, post_norm=_rms),
        "phi3": Family("Phi-3, Phi-4", "Phi3DecoderLayer", _phi3_parts),
        "gemma": Family("Gemma", "GemmaDecoderLayer", partial(_llama_parts, plus_one=True), root_scaled=True),
        "gemma2": Family(
            "Gemma-2",
            "Gemma2DecoderLayer",
            _gemma2_parts,
            post_norm=partial(_rms, plus_one=True),
            root_scaled=True,
        ),
        "gemma3_text": Family(
            "Gemma 3 (text)",
            "Gemma3DecoderLayer",
            partial(_gemma2_parts, capped=False),  # a cap in the configuration is read by nobody
            post_norm=partial(_rms, plus_one=True),
            root_scaled=True,
        ),
        "gpt_oss": Family("gpt-oss", "GptOssDecoderLayer", _gpt_oss_parts, sink_logits=True, planes=True),
        "gpt2": Family(
            "GPT-2",
            "GPT2Block",
            _gpt2_parts,
            blocks="h",
            final_norm="ln_f",
            attention="attn",
            output="c_proj",
            learned="wpe",
            depth_scaled=True,
        ),
        "gpt_neox": Family(
            "GPT-NeoX, Pythia",
            "GPTNeoXLayer",
            _gpt_neox_parts,
            final_norm="final_layer_norm",
            attention="attention",
            output="dense",
            fused=_gpt_neox_fused,
        ),
        "qwen3_next": Family("Qwen3-Next", "Qwen3NextDecoderLayer", None, gated=True, no_lens=_WHOLE),
        "qwen3_5_text": Family("Qwen3.5 (text)", "Qwen3_5DecoderLayer", None, gated=True, no_lens=_WHOLE),
        "qwen3_5_moe_text": Family("Qwen3.5-MoE (text)", "Qwen3_5MoeDecoderLayer", None, gated=True, no_lens=_WHOLE),
        "deepseek_v2": Family("DeepSeek-V2", "DeepseekV2DecoderLayer", None, latent=True, no_lens=_WHOLE),
        "deepseek_v3": Family("DeepSeek-V3, R1", "DeepseekV3DecoderLayer", None, latent=True, no_lens=_WHOLE),
    }
)
# Of others that were looked at, why they are not there.
_STREAMS = (
    "its blocks hand on four streams, mix them themselves and read the token ids again, and a view has one stream"
)
NOT_SUPPORTED: dict[str, str] = dict.fromkeys(("gemma3n", "gemma3n_text"), _STREAMS)
NOT_SUPPORTED |= dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv"), "it has no softmax attention")
NOT_SUPPORTED |= {"deepseek_v32": "its queries see keys that an indexer chooses"}


class Quantized(NamedTuple):
    """How one kind of quantized layers is measured, in any family."""

    layers: str  # as their users know them
    measured: tuple[str, ...]  # passes alone, derivatives, theory
    why: str
    methods: tuple[str, ...] = ()  # `quant_method` of folders of which transformers makes plain weights, scales applied


_PLAIN, _CODES = ("yes", "by parts", "yes"), ("yes", "by autograd", "refused")
_CUT, _UNTRIED = ("yes", "refused", "refused"), ("not tried",) * 3
_OWN, _ROUNDED = "layers compute in a way of their own", "activations are rounded without a derivative"
QUANTIZED = (
    Quantized("GGUF files", _PLAIN, "dequantized as they are read"),
    Quantized(
        "folders in FP8, MXFP4, compressed-tensors",
        _PLAIN,
        "dequantized as they are read; activations are not rounded",
        ("fp8", "mxfp4", "compressed-tensors"),
    ),
    Quantized("compressed-tensors in memory, before a first pass", ("refused",) * 3, "that pass decompresses them"),
    Quantized("compressed-tensors in memory, W4A16, W8A16", _CODES, _OWN),
    Quantized("compressed-tensors in memory, W8A8, FP8", _CUT, _ROUNDED),
    Quantized("bitsandbytes in 8 bits, also under LoRA", _CODES, _OWN),
    Quantized("bitsandbytes in 4 bits (NF4), QLoRA", _CUT, "the kernel for processors has no derivative"),
    Quantized("torchao, weights alone in int8 or FP8", _CODES, _OWN),
    Quantized("dynamic int8 of torchao and torch", _CUT, _ROUNDED),
    Quantized("GPTQ and AWQ in 4 bits, in float32", _CODES, _OWN),
    Quantized("GPTQ and AWQ in 4 bits, in bfloat16", _CUT, "the kernel has no derivative"),
    Quantized("torchao in int4", _UNTRIED, "loads with CUDA's kernels alone"),
    Quantized("quanto, HQQ", _UNTRIED, ""),
)


def family_of(config: Any) -> Family:
    """The table's row for a configuration, or for a model type."""
    kind = config if isinstance(config, str) else config.model_type
    if kind in NOT_SUPPORTED:
        raise InputError(f"model type '{kind}' is not supported: {NOT_SUPPORTED[kind]}; give a model of another family")
    if kind not in FAMILIES:
        raise InputError(f"model type '{kind}' is not supported; supported families: {', '.join(FAMILIES)}")
    if getattr(config, "use_bidirectional_attention", False):
        raise InputError(f"this {kind} is not supported: its attention is bidirectional; give a causal model")
    if not isinstance(config, str) and "dynamic" in rope_types(config):
        raise InputError(
            f"this {kind} is not supported: its rotations depend on the longest text it has read (rope_type dynamic); give "
            "another rope_type"
        )
    return FAMILIES[kind]


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def check_sizes(config: Any) -> None:
    """Refuse sizes that transformers takes and no model can be made of."""
    for name in SIZES:
        if isinstance(value := getattr(config, name, None), int) and value < 1:
            raise InputError(f"the config has {name}={value}; give at least 1")
    heads, keys = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if heads and keys and heads % keys:
        raise InputError(f"the config has num_attention_heads={heads}, which cannot share {keys} key heads evenly")


def rope_types(config: Any) -> set[str]:
    """Rules by which a configuration makes its rotations: one, or one for each kind of block."""
    rules = getattr(config, "rope_parameters", None) or {}
    return {rule.get("rope_type", "default") for rule in (rules, *rules.values()) if isinstance(rule, Mapping)}


def _kinds(config: Any) -> list[str]:
    """What kind of layer each is, where the configuration says it."""
    return (getattr(config, "layer_types", None) or [])[: config.num_hidden_layers]


def runs_of(config: Any) -> list[range]:
    """The layers that make up each block: several where recurrent ones (linear attention) stand between softmax attention.

    A run ends with its softmax attention; recurrent layers behind the last one belong to the last run.
    """
    kinds = _kinds(config)
    if RECURRENT not in kinds:
        return [range(n, n + 1) for n in range(config.num_hidden_layers)]
    ends = [n + 1 for n, kind in enumerate(kinds) if kind != RECURRENT]
    if not ends:
        raise InputError(f"this {config.model_type} has no layer with softmax attention; give a model that has one")
    ends[-1] = len(kinds)
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def left_out(config: Any) -> str | None:
    """In words, what of a hybrid is not measured; None where all layers have softmax attention."""
    kinds = _kinds(config)
    if RECURRENT not in kinds:
        return None
    attend = ", ".join(str(n) for n, kind in enumerate(kinds) if kind != RECURRENT)
    return (
        f"{kinds.count(RECURRENT)} of {len(kinds)} layers ({RECURRENT}) have no patterns and are left out; "
        f"blocks are runs of layers that attend once, in layers {attend}"
    )


def spec_of(config: Any) -> Spec:
    """The architecture a transformers configuration describes."""
    family = family_of(config)
    runs, heads, width = runs_of(config), config.num_attention_heads, config.hidden_size
    blocks, head_dim = len(runs), getattr(config, "v_head_dim" if family.latent else "head_dim", None) or width // heads
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):  # Qwen2 and Qwen3 carry the number without using it
        window = None
    encoding: PositionalEncoding = "rope" if family.learned is None else "learned"
    encoding = "shared rope" if family.latent else encoding
    rotated = [1] * blocks if family.rotated is None else getattr(config, family.rotated)
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return Spec(
        family=config.model_type,
        blocks=blocks,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        width=width,
        vocabulary=config.vocab_size,
        positional=tuple(encoding if on else "none" for on in rotated[:blocks]),
        windows=tuple(window if "sliding_attention" in types[run[0] : run[-1] + 1] else None for run in runs),
        max_length=getattr(config, "max_position_embeddings", None),
        initializer_range=getattr(config, "initializer_range", None),
        sink_logits=family.sink_logits and getattr(config, SINK_LOGITS, True),
        post_norm=family.post_norm is not None,
        left_out=left_out(config),
    )
