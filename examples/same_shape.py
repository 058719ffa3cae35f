"""A checkpoint of a published model's shape with random weights, to try memory and time where there is no hub.

    python examples/same_shape.py qwen2.5-0.5b FOLDER

The tokenizer is that of a bundled model, so that the text is cut into more tokens than the model's own would give.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import probes

SHAPES = {
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
    },
}
TOKENIZERS = {"qwen2.5-0.5b": "tiny-qwen2", "llama-3.2-1b": "tiny-llama"}  # without BOS and with it, as the originals


def main() -> None:
    """Write the folder."""
    if len(sys.argv) != 3 or sys.argv[1] not in SHAPES:
        raise SystemExit(f"usage: python examples/same_shape.py {{{','.join(SHAPES)}}} FOLDER")
    name, folder = sys.argv[1], Path(sys.argv[2])
    if folder.exists():
        raise SystemExit(f"'{folder}' exists; give a folder that is to be made")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[name]), dtype=torch.float32)
    model.save_pretrained(folder)
    probes.load(TOKENIZERS[name]).tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
