"""How many operations a device is asked for: few for each block, no more for longer prompts; nothing is read in between.

On a GPU each operation takes some 10 microseconds of the host, and a number that the host reads waits for all before it.
Heads are thin, so that prompts can be long.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from sim import ONE, Launched, Simulated
from transformers import Qwen2Config, Qwen2ForCausalLM

import probes
from probes.models.view import View
from probes.theory.kernel import second_moment

HEADS, WIDTH = 2, 16


def view(blocks: int, length: int) -> View:
    sizes: dict[str, Any] = {"num_attention_heads": HEADS, "num_key_value_heads": 1, "num_hidden_layers": blocks}
    sizes |= {"hidden_size": WIDTH, "intermediate_size": 24, "vocab_size": 50, "max_position_embeddings": length}
    return probes.load(Qwen2ForCausalLM(Qwen2Config(**sizes)).eval(), device=str(ONE))


# By name: the call, the most operations for a block, and two lengths. Attention is written out there (11 operations where
# CUDA has one kernel), and of the Jacobian's some 130 hold the first prompt's block against the model's own.
CALLS: dict[str, tuple[Callable[..., Any], int, tuple[int, int]]] = {
    "sinks, 8 keys": (partial(probes.sinks, keys=tuple(range(8))), 90, (1024, 4096)),
    "sinks, all keys": (partial(probes.sinks, keys="all"), 110, (1024, 4096)),
    "jacobian, sketch": (partial(probes.jacobian, method="sketch", products=12, beside=True), 270, (128, 512)),
    "jacobian, exact": (partial(probes.jacobian, method="exact"), 150, (128, 512)),
    "theory": (partial(second_moment, attention="measured", score_path=True), 320, (128, 512)),
}


@pytest.mark.parametrize("name", CALLS)
def test_operations_of_a_block(name):
    call, most, lengths = CALLS[name]
    of_blocks = []
    for length in lengths:
        found = []
        for blocks in (1, 2):
            with Simulated():
                model, tokens = view(blocks, length), torch.zeros(1, length, dtype=torch.int64)
                call(model, tokens[:, :8])  # what is made once
                with Launched() as launches:
                    call(model, tokens)
            found.append(torch.tensor([launches.operations, launches.reads]))
        of_blocks.append((found[1] - found[0]).tolist())
    (shorter, _), (longer, reads) = of_blocks
    assert 0 < longer <= min(most, shorter)
    assert reads == 0
