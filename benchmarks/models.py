"""Random models that the benchmarks run on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 1000  # small, so that embeddings and logits hide nothing
HEAD_WIDTH = 64
SIGMA = 0.04  # weights twice as wide as usual, for patterns that are not uniform

# Shapes of Qwen2.5; their vocabulary is left small, since no probe measured here unembeds.
QWEN: dict[str, dict[str, int]] = {
    "0.5B": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "7B": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
}


def llama(
    width: int,
    blocks: int,
    length: int,
    *,
    heads: int | None = None,
    vocabulary: int = VOCABULARY,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> LlamaForCausalLM:
    """A random Llama for prompts of up to `length` tokens; feed-forwards 11/4 of the width, as usual."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=blocks,
        num_attention_heads=heads or width // HEAD_WIDTH,
        num_key_value_heads=heads or width // HEAD_WIDTH,
        max_position_embeddings=max(4096, length),
        initializer_range=SIGMA,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = LlamaForCausalLM(config)
    return model.to(device, dtype).eval().requires_grad_(False)


def qwen(size: str, length: int, *, device: str) -> Qwen2ForCausalLM:
    """A random model of Qwen2.5's shape, in bfloat16, made on the device itself."""
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=VOCABULARY, max_position_embeddings=length, **QWEN[size])
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model: Any = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def made(point: dict[str, Any], device: str) -> Any:
    """The model of a point: `size` names a shape of Qwen2.5; else `width`, `blocks` and perhaps `heads` make a Llama."""
    if "size" in point:
        return qwen(point["size"], point["length"], device=device)
    return llama(point["width"], point["blocks"], point["length"], heads=point.get("heads"), device=device)


def random_tokens(prompts: int, length: int, *, vocabulary: int = VOCABULARY, device: str = "cpu") -> Tensor:
    """Ids [prompt, position]; the first is 0 everywhere, since leakage wants one first token."""
    tokens = torch.randint(vocabulary, (prompts, length), generator=torch.Generator().manual_seed(1))
    tokens[:, 0] = 0
    return tokens.to(device)
