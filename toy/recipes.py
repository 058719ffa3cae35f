"""Recipes of tiny models of one shape: four bundled ones, each unlike `tiny-llama` in the one thing it is named for, and two
that differ in learned sink logits.

The shape fits all that is bundled, four trained models and three steps of one, compressed, in 12 MB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CONTEXT = 256  # long enough for a middle that is neither primacy nor recency, short enough for two CPU cores
VOCABULARY = 1024  # at about 3 characters a token, 256 tokens are some 800 characters: several functions of code

SHAPE: dict[str, Any] = dict(
    hidden_size=128,
    intermediate_size=256,  # twice the width, not 8/3: seven checkpoints have to fit in 12 MB
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=CONTEXT,
    vocab_size=VOCABULARY,
    tie_word_embeddings=True,
)


@dataclass(frozen=True)
class Recipe:
    """One model: what to build, whether windows start with BOS, and which steps to keep."""

    model_type: str
    difference: str  # for the model card
    bos: bool = True
    config: Mapping[str, Any] = field(default_factory=dict)
    keep_steps: tuple[int, ...] = (0,)
    bundled: bool = True


# gpt-oss's attention in tiny-llama: no window, no biases, the usual RoPE, and one expert, which is a plain feed-forward
# (of gpt-oss's kind, clamped). Its window has to be a number, which no block uses.
SINK_LOGITS: dict[str, Any] = dict(
    head_dim=32,
    attention_bias=False,
    sliding_window=CONTEXT,
    layer_types=["full_attention"] * SHAPE["num_hidden_layers"],
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    num_local_experts=1,
    num_experts_per_tok=1,
)

RECIPES: Mapping[str, Recipe] = {
    "tiny-llama": Recipe(
        "llama",
        "standard RoPE, BOS first in every window; the model the others are compared with",
        keep_steps=(0, 100, 300, 1000),  # before, during and after the loss's first fall
    ),
    "tiny-llama-ntk": Recipe(
        "llama",
        "RoPE scaled by wavelength (llama3 type): long wavelengths stretched 8 times, short ones kept",
        config={
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": CONTEXT // 8,
            }
        },
    ),
    "tiny-mistral-window": Recipe(
        "mistral",
        "sliding-window attention over the last 32 positions, an eighth of the context, in every block",
        config={"sliding_window": CONTEXT // 8},
    ),
    "tiny-qwen2": Recipe(
        "qwen2",
        "no BOS, as in Qwen2 checkpoints: position 0 holds ordinary text (and q, k, v have biases, zero at step 0)",
        bos=False,
    ),
    "tiny-sink-logits": Recipe(
        "gpt_oss",
        "learned sink logits in every head, beside tiny-no-sink-logits, which differs in nothing else",
        config=SINK_LOGITS,
        keep_steps=(0, 100, 300, 1000),
        bundled=False,
    ),
    "tiny-no-sink-logits": Recipe(
        "gpt_oss",
        "no learned sink logits (held where they weigh nothing), beside tiny-sink-logits, which differs in nothing else",
        config=SINK_LOGITS | {"sink_logits": False},
        keep_steps=(0, 100, 300, 1000),
        bundled=False,
    ),
}


def recipe_config(recipe: Recipe) -> Any:
    """The recipe's transformers config."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[recipe.model_type](**(SHAPE | dict(recipe.config)))
