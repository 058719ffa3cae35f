"""What algebra says about every model, whatever its weights: symmetries and causality, in float64."""

from copy import deepcopy
from functools import partial
from typing import Any

import families
import numpy as np
import pytest
import torch
from measured import close

import probes

HEADS, C, LENGTH = families.HEADS, families.HEAD_DIM, 10
TOKENS = torch.randint(families.VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(1))
MODEL: Any = families.model("llama", dtype=torch.float64)
same = partial(close, rtol=1e-9, atol=1e-10)  # sums in another order


def sensitivity(model: Any, tokens: torch.Tensor = TOKENS[:1], **options: Any) -> np.ndarray:
    return probes.jacobian(model, tokens, **options)["sensitivity"].values


@torch.no_grad()
def test_heads_in_another_order_give_results_in_that_order():
    """Key-value groups, and within them the queries' heads, change places."""
    model, heads, groups = deepcopy(MODEL), [3, 2, 0, 1], [1, 0]

    def rows(picked: list[int]) -> torch.Tensor:
        return (torch.tensor(picked)[:, None] * C + torch.arange(C)).flatten()

    for attention in map(families.attention, families.blocks(model)):
        for reader, order in ((attention.q_proj, heads), (attention.k_proj, groups), (attention.v_proj, groups)):
            reader.weight.copy_(reader.weight[rows(order)].clone())
        attention.o_proj.weight.copy_(attention.o_proj.weight[:, rows(heads)].clone())
    same(sensitivity(model), sensitivity(MODEL))
    before, after = (probes.sinks(m, TOKENS, reacts="mean") for m in (MODEL, model))
    for name in ("alpha", "attends", "reads", "reacts", "value_norm", "key_norm", "over_tau"):
        same(after[name], before[name].isel(head=heads))
    same(after["sink_rate"], before["sink_rate"])
    options: dict[str, Any] = {"bands": ((3, 5), (6, 9)), "lags": (1, 2), "bootstrap": 0}
    before, after = (probes.leakage(m, TOKENS, **options) for m in (MODEL, model))
    for name in ("log_form", "position_share", "parties"):
        same(after[name], before[name].isel(head=heads))


@pytest.mark.parametrize("query", [0, 4, LENGTH - 1])
def test_nothing_comes_from_later_positions(query):
    found = sensitivity(MODEL, query=query, pathway="all")  # [pathway, prompt, position]
    assert np.all(found[..., query + 1 :] == 0)
    assert np.all(found[0, ..., : query + 1] > 0)
    other = TOKENS[:1].clone()
    other[:, query + 1 :] = 7
    assert np.array_equal(sensitivity(MODEL, other, query=query, pathway="all"), found)


@torch.no_grad()
def test_blocks_that_write_nothing_pass_on_what_they_read():
    model = deepcopy(MODEL)
    for block in families.blocks(model):
        block.self_attn.o_proj.weight.zero_()
        block.mlp.down_proj.weight.zero_()
    assert np.array_equal(sensitivity(model, TOKENS), np.eye(LENGTH)[[-1] * len(TOKENS)])
