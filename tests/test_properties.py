"""What algebra says about every model, whatever its weights: symmetries, causality, scales.

Each test changes the weights of a small random model in a way whose effect on a measurement is known exactly, and measures
before and after, in float64.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import families
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, PreTrainedModel

import probes

WIDTH, HEADS, GROUPS, C, BLOCKS, WORDS, LENGTH, WINDOW = 16, 4, 2, 4, 2, 24, 10, 3
SMALL: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": C,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
TOKENS = torch.randint(WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(1))
ONE = TOKENS[:1]
SAME = 1e-9  # float64, sums in another order
# Where norms see other numbers: an RMSNorm of transformers computes in float32, and two blocks amplify that.
ROUNDED = 1e-5
bounded = settings(max_examples=5, derandomize=True, deadline=None, database=None)


def llama(**changed: Any) -> Any:
    return families.build(LlamaConfig(**SMALL | changed), dtype=torch.float64)


@cache
def original() -> Any:
    """Not to be changed; `changed` makes copies."""
    return llama()


def changed(model: PreTrainedModel, change: Any) -> Any:
    """A copy whose state dictionary `change` has edited in place, a block's weights as `name` of `blocks(...)`."""
    twin = deepcopy(model)
    with torch.no_grad():
        change(twin)
    return twin


def sensitivity(model: Any, tokens: Tensor = ONE, **options: Any) -> np.ndarray:
    return probes.jacobian(probes.load(model, device="cpu"), tokens, **options)["sensitivity"].values


def close(found: np.ndarray, expected: np.ndarray, tolerance: float = SAME) -> None:
    """Equal up to `tolerance` of each value and of the largest."""
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * float(np.abs(expected).max()) / 10)


def rotation(size: int, seed: int) -> Tensor:
    drawn = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.linalg.qr(drawn)[0]


# ------------------------------------------------------------------------------------------------------- symmetries

heads_in_another_order = st.tuples(st.permutations(range(GROUPS)), st.permutations(range(HEADS // GROUPS)))


def with_heads(order: tuple[list[int], list[int]]) -> tuple[Any, list[int]]:
    """The model with its key-value groups, and the query heads of each, in another order; the order of its heads."""
    groups, within = order
    shared = HEADS // GROUPS
    heads = [group * shared + one for group in groups for one in within]

    def rows(picked: list[int]) -> Tensor:
        return (torch.tensor(picked)[:, None] * C + torch.arange(C)).flatten()

    def change(model: Any) -> None:
        for block in model.model.layers:
            attention = block.self_attn
            for reader, order in ((attention.q_proj, heads), (attention.k_proj, groups), (attention.v_proj, groups)):
                reader.weight.copy_(reader.weight[rows(order)].clone())
            attention.o_proj.weight.copy_(attention.o_proj.weight[:, rows(heads)].clone())

    return changed(original(), change), heads


@bounded
@given(heads_in_another_order)
def test_heads_in_another_order_give_results_in_that_order(order):
    model, heads = with_heads(order)
    close(sensitivity(model), sensitivity(original()))
    before, after = (probes.sinks(probes.load(m, device="cpu"), TOKENS, reacts="mean") for m in (original(), model))
    for name in ("alpha", "attends", "reads", "reacts", "value_norm", "key_norm", "over_tau"):
        close(after[name].values, before[name].isel(head=heads).values)
    close(after["sink_rate"].values, before["sink_rate"].values)
    given_: dict[str, Any] = {"bands": ((3, 5), (6, 9)), "lags": (1, 2), "bootstrap": 0}
    before, after = (probes.leakage(probes.load(m, device="cpu"), TOKENS, **given_) for m in (original(), model))
    for name in ("log_form", "log_source", "weight_form"):
        close(after[name].values, before[name].isel(head=heads).values)


def turned(basis: Tensor) -> Any:
    """The model with `basis @ x` in the place of every stream x; norm weights, which are no rotation, folded in first."""

    def change(model: Any) -> None:
        for block in model.model.layers:
            attention, mlp = block.self_attn, block.mlp
            for norm, readers in (
                (block.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (block.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
            ):
                for reader in readers:
                    reader.weight.copy_((reader.weight * norm.weight) @ basis.T)
                norm.weight.fill_(1.0)
            for writer in (attention.o_proj, mlp.down_proj):
                writer.weight.copy_(basis @ writer.weight)
        model.lm_head.weight.copy_((model.lm_head.weight * model.model.norm.weight) @ basis.T)
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight @ basis.T)

    return changed(original(), change)


@pytest.mark.parametrize(("seed", "permuted"), [(0, False), (1, True)])
def test_another_basis_of_the_residual_stream_changes_nothing(seed, permuted):
    order = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(seed))
    model = turned(torch.eye(WIDTH, dtype=torch.float64)[order] if permuted else rotation(WIDTH, seed))
    asked: tuple[dict[str, Any], ...] = ({"pathway": "all"}, {"readout": "logits"})
    for options in asked:
        close(sensitivity(model, **options), sensitivity(original(), **options), ROUNDED)


# -------------------------------------------------------------------------------------------------------- causality


@bounded
@given(st.integers(0, LENGTH - 1), st.integers(0, 100))
def test_nothing_comes_from_later_positions(query, seed):
    found = sensitivity(original(), query=query, pathway="all")  # [pathway, prompt, position]
    assert np.all(found[..., query + 1 :] == 0)
    assert np.all(found[0, ..., : query + 1] > 0)
    other = ONE.clone()
    other[:, query + 1 :] = torch.randint(WORDS, (1, LENGTH - query - 1), generator=torch.Generator().manual_seed(seed))
    assert np.array_equal(sensitivity(original(), other, query=query, pathway="all"), found)


@pytest.mark.parametrize(("window", "blocks"), [(1, 2), (2, 1), (WINDOW, 2)])
def test_a_window_reaches_back_so_far_and_no_further(window, blocks):
    config = MistralConfig(**SMALL | {"num_hidden_layers": blocks, "sliding_window": window})
    found = sensitivity(families.build(config, dtype=torch.float64))[0]
    reach = blocks * (window - 1)
    assert np.all(found[: LENGTH - 1 - reach] == 0)
    assert np.all(found[LENGTH - 1 - reach :] > 0)


# ----------------------------------------------------------------------------------------------------------- scales

factors = st.sampled_from([0.125, 0.3, 3.0, 16.0])


def scaled(model: Any, **factors: float) -> Any:
    """The model with the weights of these modules multiplied, in every block where they are in blocks."""

    def change(twin: Any) -> None:
        for name, module in twin.named_modules():
            factor = factors.get(name.rpartition(".")[2])
            if factor is not None:
                module.weight.mul_(factor)

    return changed(model, change)


def test_blocks_that_write_nothing_pass_on_what_they_read():
    found = sensitivity(scaled(original(), o_proj=0.0, down_proj=0.0), TOKENS)
    assert np.array_equal(found, np.eye(LENGTH)[[-1] * len(TOKENS)])


@bounded
@given(factors)
def test_a_norm_takes_the_scale_of_the_stream_away(factor):
    """Embeddings and all that blocks write times c: streams times c, the same normed, so J is the same and J normed 1/c."""
    model = llama(rms_norm_eps=1e-30)  # the one term that knows the scale
    larger = scaled(model, embed_tokens=factor, o_proj=factor, down_proj=factor)
    close(sensitivity(larger), sensitivity(model), ROUNDED)
    for readout in ("normed", "logits"):
        close(sensitivity(larger, readout=readout), sensitivity(model, readout=readout) / factor, ROUNDED)
