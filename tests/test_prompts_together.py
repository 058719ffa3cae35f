"""Prompts and questions that go through a device together: twice as many take no more operations, nor reads by the host.

That the numbers are those of one prompt after the other is what `test_second_device` compares.
"""

from collections.abc import Callable
from typing import Any

import families
import numpy as np
import pytest
import torch
from sim import ONE, Launched, Simulated

import probes
from probes.measures.consequences import consequences
from probes.models.view import View
from probes.models.words import intervention

LENGTH = 16


def tokens(prompts: int) -> torch.Tensor:
    drawn = torch.from_numpy(np.random.default_rng(4).integers(3, families.VOCABULARY, (prompts, LENGTH)))
    drawn[:, 0] = 0
    return drawn


def changed(name: str) -> Callable[[View, int], Any]:
    """Losses under an intervention whose means are taken over the prompts."""
    return lambda view, count: consequences(intervention(name).on(view, tokens(count)), tokens(count), view)


MEASURES: dict[str, Callable[[View, int], Any]] = {
    "retrieval": lambda view, count: probes.retrieval(view, pairs=4, digits=3, contexts=count),
    "decode": lambda view, count: probes.decode(view, tokens(count), erase=()),
    "losses, erased": lambda view, count: consequences(
        probes.erased(view, reference=tokens(count)), tokens(count), view
    ),
    "evictions and joint removal": lambda view, count: probes.sinks(
        view, tokens(count), keys=(0,), effect=0, evict=(0, 1), keep=(4,)
    ),
    "leakage": lambda view, count: probes.leakage(view, tokens(count), lags=(1, 2), bootstrap=5, fresh=0),
    "trajectory": lambda view, count: probes.trajectory(view, tokens(count), starts=4),
    **{f"losses, {name}": changed(name) for name in ("mean@1", "held-log-z", "random:keys")},
}


@pytest.mark.parametrize("measure", MEASURES)
def test_more_prompts_take_no_more_operations(measure):
    tokenizer, found = probes.load("tiny-llama").tokenizer, []
    model = families.build(families.small("llama", vocab_size=len(tokenizer), max_position_embeddings=128))
    with Simulated():
        view = probes.load(model, tokenizer=tokenizer, device=str(ONE))
        for count in (8, 8, 16):
            with Launched() as launches:
                MEASURES[measure](view, count)
            found.append((launches.operations, launches.reads))
    assert found[2][0] <= 1.02 * found[1][0]
    assert found[2][1] <= found[1][1]
