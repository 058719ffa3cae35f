"""Configurations of models wide enough for a prediction of their fresh weights, and how far off it is."""

from typing import Any

import families
import numpy as np
import torch
import transformers
from torch import Tensor


def config(name: str, *, width: int = 128, blocks: int = 6, sigma: float = 0.02) -> Any:
    """Four heads of queries, two of keys; vocabulary 1024, 256 positions, windows of 32."""
    if name == "gpt2":
        sizes = {"n_embd": width, "n_layer": blocks, "n_head": 4, "n_inner": 3 * width, "n_positions": 256}
    else:
        sizes = {"hidden_size": width, "num_hidden_layers": blocks, "num_attention_heads": 4}
        sizes |= {"intermediate_size": 3 * width, "max_position_embeddings": 256, "pad_token_id": None}
        sizes |= {"num_key_value_heads": 2} if name != "gpt_neox" else {}
        sizes |= {"head_dim": width // 4} if "head_dim" in families.SPECIAL.get(name, {}) else {}
        sizes |= {"sliding_window": 32} if name in ("mistral", "gemma2", "gemma3_text", "olmo3", "gpt_oss") else {}
        if name == "qwen3_moe":
            sizes |= {"num_experts": 8, "moe_intermediate_size": width, "num_experts_per_tok": 2}
            sizes |= {"norm_topk_prob": True}
        if name == "gpt_oss":
            sizes |= {"num_local_experts": 8, "num_experts_per_tok": 2}
            sizes |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    common = {"vocab_size": 1024, "initializer_range": sigma, "bos_token_id": 0, "eos_token_id": 1}
    return transformers.AutoConfig.for_model(name, **common, **sizes)


def distinct(length: int, seed: int) -> Tensor:
    return torch.randperm(1024, generator=torch.Generator().manual_seed(seed))[None, :length]


def deviation(predicted: Any, measured: np.ndarray) -> float:
    """Mean over positions of |predicted / measured - 1|; both zero at the same positions."""
    predicted = np.asarray(predicted)
    assert ((predicted == 0) == (measured == 0)).all()
    seen = measured > 0
    return float(np.abs(predicted[seen] / measured[seen] - 1).mean())
