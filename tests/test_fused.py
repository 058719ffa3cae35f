"""Attention with its log-sum-exp against full patterns in float64, written out query by query."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from patterns import (
    DTYPES,
    HEAD,
    HEADS,
    KINDS,
    drawn,
    keys_of,
    logits_of,
    rounding,
    same,
    sums_of,
    twin_logits,
    weights_of,
)
from sim import Memory
from torch import Tensor

from probes.models import fused
from probes.models.fused import attend, query_blocks
from probes.run.memory import CPU_NUMBERS


def full(given: Any) -> Any:
    return attend(given, normalizer=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_output_log_sum_exp_logits_and_patterns(kind, dtype, monkeypatch):
    monkeypatch.setattr(fused.query_blocks, "__kwdefaults__", {"numbers": 300})
    for length in (1, 7, 8, 9, 40):  # below, at and above the window
        given = drawn(length, dtype=dtype, **KINDS[kind])
        logits, noise = logits_of(given), rounding(given)
        plain, both = attend(given), full(given)
        assert plain.normalizer is None
        assert both.query is given.query
        same(both.normalizer, sums_of(logits, given), noise)
        assert both.normalizer.dtype == torch.promote_types(dtype, torch.float32)
        # bfloat16: weights are rounded to 8 bits before they meet the values, and so is the sum.
        slack = 2**-6 if dtype == torch.bfloat16 else noise * HEAD
        for output in (plain.output, both.output):
            assert output.dtype == dtype
            same(output, weights_of(logits, given) @ given.value.double(), slack)
    given = drawn(20, dtype=dtype, **KINDS[kind])
    expected, noise = logits_of(given), rounding(given)
    pattern = given.pattern()
    assert pattern.dtype == dtype
    same(pattern, weights_of(expected, given), 2**-8 if dtype == torch.bfloat16 else noise)
    for start, stop in ((0, 1), (0, 9), (8, 9), (13, 20), (0, 20)):
        first, last = given.first_key(start), given.last_key(stop)
        assert (first, last) == keys_of(given, start, stop)
        same(given.logits(start, stop), expected[:, :, start:stop, first:last], noise)


def test_logits_near_a_hundred_and_half_precision():
    given = drawn(40, dtype=torch.float32, spread=6.0)  # nothing overflows; errors are eps |s| of a weight
    assert logits_of(given).nan_to_num(0, neginf=0).abs().max() > 100
    for one in (given, drawn(20, dtype=torch.float16)):  # of which no kernel on the CPU gives a log-sum-exp
        same(full(one).normalizer, logits_of(one).logsumexp(-1), rounding(one))


@pytest.mark.parametrize("kind", ["causal", "window"])
def test_memory_in_any_order(kind):
    """The operators underneath take the last dimension for dense; edits may return anything."""
    given = drawn(24, dtype=torch.float32, **KINDS[kind])
    expected = full(given)
    for name in ("query", "key", "value"):
        found = full(replace(given, **{name: getattr(given, name).mT.contiguous().mT}))
        same(found.output, expected.output, 1e-6)  # the same numbers, the same sums
        same(found.normalizer, expected.normalizer, 1e-6)
    ones = replace(given, value=given.value.new_ones(1).expand_as(given.value))
    same(full(ones).output, torch.ones(given.value.shape), 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_plain_pattern_s(kind, monkeypatch):
    monkeypatch.setattr(fused.query_blocks, "__kwdefaults__", {"numbers": 300})
    made = drawn(40, prompts=1, **KINDS[kind])
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(made.value.shape, generator=generator, dtype=torch.float64)
    row = torch.randn(made.value.shape[:-1], generator=generator, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in (made.query, made.key, made.value)]
    given, logits = replace(made, query=leaves[0], key=leaves[1], value=leaves[2]), twin_logits(*leaves[:2], made)
    plain, sums = ((weights_of(logits, made) @ leaves[2]) * weight).sum(), (sums_of(logits, made) * row).sum()
    for normalizer in (False, True):
        found: Any = attend(given, normalizer=normalizer)
        total = (found.output * weight).sum() + ((found.normalizer * row).sum() if normalizer else 0)
        twin = torch.autograd.grad(plain + sums * normalizer, leaves, retain_graph=True)
        for gradient, expected in zip(torch.autograd.grad(total, leaves), twin, strict=True):
            assert expected.abs().max() > 0.1
            torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-11)  # float64 in another order


def test_a_prefix_of_one_key_or_a_window_of_all_is_the_causal_mask_bit_for_bit():
    given = drawn(40, dtype=torch.float32)
    others: tuple[dict[str, Any], ...] = ({"prefix": 1}, {"window": 40, "prefix": 1}, {"window": 40})
    for other in others:
        found = full(replace(given, **other))
        assert torch.equal(found.output, full(given).output)
        assert torch.equal(found.normalizer, full(given).normalizer)
        assert torch.equal(found.pattern(), given.pattern())


@pytest.mark.parametrize("prefix", [None, 1, 20, 149, 1000])
@pytest.mark.parametrize("window", [None, 8, 100])
def test_blocks_of_queries_fill_their_budget_and_no_more(window, prefix):
    given = drawn(150, window=window, prefix=prefix)
    for numbers, expected in ((1, 150), (7, None), (500, None), (4000, None), (10**9, 1)):
        found = list(query_blocks(given, numbers=numbers))
        assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
        assert found[-1][1] == 150
        assert expected in (None, len(found))
        for start, stop in found:
            assert given.logits(start, stop).numel() <= numbers or stop == start + 1
            assert stop == 150 or given.logits(start, stop + 1).numel() > numbers


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_as_large_as_one_head_s_pattern(kind):
    length, heads = 2048, 8
    more = {name: x.repeat(heads // HEADS) if isinstance(x, Tensor) else x for name, x in KINDS[kind].items()}
    given = drawn(length, prompts=1, heads=heads, dtype=torch.float32, **more)
    with Memory() as memory:
        full(given)
    learned = 0 if given.sink is None else heads * length  # each row's
    largest = memory.largest / given.query.itemsize
    assert given.query.numel() <= largest <= max(CPU_NUMBERS + learned, given.query.numel()) < length**2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize(("length", "window"), [(1, None), (33, None), (333, None), (300, 150)])
@pytest.mark.parametrize("head", [12, 16, 64, 256])  # 12: no kernel takes it
def test_kernels_on_a_gpu(length, window, dtype, head):
    given = drawn(length, head=head, dtype=dtype, window=window)
    there = replace(given, **{name: getattr(given, name).cuda() for name in ("query", "key", "value")})
    found, logits = full(there), logits_of(given)
    assert found.normalizer.shape == given.query.shape[:-1]
    # Float32 products go through three of TF32 there, and sums in another order: a few bits more.
    same(found.normalizer, logits.logsumexp(-1), 8 * rounding(given))
    slack = 2**-6 if dtype.itemsize == 2 else 8 * head * rounding(given)
    for output in (found.output, attend(there).output):
        same(output, logits.softmax(-1) @ given.value.double(), slack)
