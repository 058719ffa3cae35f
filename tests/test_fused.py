"""Attention with its log-sum-exp against full patterns in float64, written out query by query."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import reference
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from probes.models import fused
from probes.models.fused import attend, query_blocks
from probes.models.view import Attention, contentless_patterns

HEADS, HEAD = 2, 16
CAP = 4.0  # logits here have a spread of 3: most are bent
SLOPES = torch.tensor([0.5, 0.0625], dtype=torch.float64)
ROUGH_EXP = 1e-4  # the CPU's kernel takes exponentials of 16-bit inputs to 14 bits: measured, 6e-5 of a log-sum-exp
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
KINDS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 8},
    "softcap": {"softcap": CAP},
    "slopes": {"slopes": SLOPES},
    "softcap, slopes and window": {"softcap": CAP, "slopes": SLOPES, "window": 8},
    "prefix": {"prefix": 8},
    "full": {"prefix": 10_000},
    "prefix and window": {"prefix": 5, "window": 8},
    "softcap, slopes and prefix": {"softcap": CAP, "slopes": SLOPES, "prefix": 8},
}


def drawn(
    length: int,
    *,
    prompts: int = 2,
    heads: int = HEADS,
    head: int = HEAD,
    dtype: torch.dtype = torch.float64,
    spread: float = 1.7,
    seed: int = 0,
    **more: Any,
) -> Attention:
    """Normal queries, keys and values; logits have the standard deviation `spread` squared."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(prompts, heads, length, head, generator=generator).double() for _ in range(3))
    given: dict[str, Any] = {"softcap": None, "window": None} | more
    return Attention((spread * query).to(dtype), (spread * key).to(dtype), value.to(dtype), head**-0.5, **given)


def logits_of(attention: Attention) -> Tensor:
    """The twin's, of exactly the numbers that are given, in float64 on the CPU."""
    q, k = (x.detach().cpu().double() for x in (attention.query, attention.key))
    return twin_logits(q, k, attention)


def twin_logits(query: Tensor, key: Tensor, attention: Attention) -> Tensor:
    """Of these queries and keys, under the mask, soft-cap and slopes of `attention`."""
    slopes = None if attention.slopes is None else attention.slopes.cpu()
    more: dict[str, Any] = {"softcap": attention.softcap, "window": attention.window, "slopes": slopes}
    if attention.prefix is None:
        return reference.attention_logits(query, key, attention.scale, **more)
    return reference.masked_logits(query, key, attention.scale, **more, prefix=attention.prefix)


def keys_of(attention: Attention, start: int, stop: int) -> tuple[int, int]:
    """The first key that queries from `start` to `stop` see, and the last one plus 1, found by asking for each."""
    window, prefix, length = attention.window, attention.prefix, attention.query.shape[-2]
    seen = [j for j in range(length) for i in range(start, stop) if reference.looks_at(i, j, window, prefix)]
    return min(seen), max(seen) + 1


def rounding(attention: Attention) -> float:
    """Of logits, for queries and keys taken as they are: eps of float32 or better times the products that are summed.

    An error e of a logit is a factor exp(e) of a weight, so that this is the relative error of patterns, too. bfloat16
    is multiplied exactly in float32, but see `ROUGH_EXP`.
    """
    eps = torch.finfo(torch.promote_types(attention.query.dtype, torch.float32)).eps
    q, k = (x.detach().double().abs() for x in (attention.query, attention.key))
    largest = float((q @ k.transpose(-1, -2)).max()) * attention.scale
    slopes = 0.0 if attention.slopes is None else float(attention.slopes.max()) * attention.query.shape[-2]
    rough = ROUGH_EXP if attention.query.dtype in (torch.bfloat16, torch.float16) else 0.0
    return 4 * eps * (1 + largest + slopes) + rough


def same(found: Tensor | None, expected: Tensor, noise: float) -> None:
    """Equal within `noise`, of values above 1 relative to them; devices and dtypes aside."""
    assert found is not None
    torch.testing.assert_close(found.detach().cpu().double(), expected.double(), rtol=noise, atol=noise)


# -------------------------------------------------------------------------------------------------------- attend


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 7, 8, 9, 40])  # below, at and above the window
def test_output_and_log_sum_exp(kind, length, dtype, monkeypatch):
    monkeypatch.setattr(fused, "BAND", 16)  # bands of 16: one, or three with the last one short
    monkeypatch.setattr(fused.query_blocks, "__kwdefaults__", {"numbers": 300})
    given = drawn(length, dtype=dtype, **KINDS[kind])
    logits, noise = logits_of(given), rounding(given)
    plain, full = attend(given), attend(given, normalizer=True)
    assert plain.normalizer is None
    assert full.query is given.query
    assert full.output is not None
    assert full.normalizer is not None
    same(full.normalizer, logits.logsumexp(-1), noise)
    assert full.normalizer.dtype == torch.promote_types(dtype, torch.float32)
    # bfloat16: weights are rounded to 8 bits before they meet the values, and so is the sum.
    slack = 2**-6 if dtype == torch.bfloat16 else noise * HEAD
    for found in (plain.output, full.output):
        assert found is not None
        assert found.dtype == dtype
        same(found, logits.softmax(-1) @ given.value.double(), slack)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("length", "window"),
    [
        (500, 8),  # a single band, shorter than BAND
        (1100, 8),  # three bands, far above the window
        (1300, 600),  # windows above BAND: bands as wide as the window
        (600, 599),
        (600, 600),  # the window hides nothing
        (600, 5000),
    ],
)
def test_windows_in_bands_of_their_real_width(length, window, dtype):
    assert fused.BAND == 512
    given = drawn(length, prompts=1, heads=1, dtype=dtype, window=window)
    logits, noise = logits_of(given), rounding(given)
    found = attend(given, normalizer=True)
    same(found.normalizer, logits.logsumexp(-1), noise)
    slack = 2**-6 if dtype == torch.bfloat16 else noise * HEAD
    same(found.output, logits.softmax(-1) @ given.value.double(), slack)


def test_every_other_dtype_gets_a_log_sum_exp():
    given = drawn(20, dtype=torch.float16)  # no kernel on the CPU gives one
    found = attend(given, normalizer=True)
    same(found.normalizer, logits_of(given).logsumexp(-1), rounding(given))


@pytest.mark.parametrize("kind", ["causal", "window"])
def test_memory_in_any_order(kind):
    """The operators underneath take the last dimension for dense; edits may return anything."""
    given = drawn(24, dtype=torch.float32, **KINDS[kind])
    expected = attend(given, normalizer=True)
    assert expected.output is not None
    assert expected.normalizer is not None

    def turned(x: Tensor) -> Tensor:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)

    for name in ("query", "key", "value"):
        found = attend(replace(given, **{name: turned(getattr(given, name))}), normalizer=True)
        same(found.output, expected.output, 1e-6)  # the same numbers, the same sums
        same(found.normalizer, expected.normalizer, 1e-6)
    ones = replace(given, value=given.value.new_ones(1).expand_as(given.value))
    same(attend(ones, normalizer=True).output, torch.ones(given.value.shape), 1e-6)


def test_logits_near_a_hundred():
    """Nothing overflows, and errors are what float32 makes of such logits: eps |s| of a weight."""
    given = drawn(40, dtype=torch.float32, spread=6.0)
    logits = logits_of(given)
    assert logits[logits.isfinite()].abs().max() > 100
    found = attend(given, normalizer=True)
    same(found.normalizer, logits.logsumexp(-1), rounding(given))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("normalizer", [False, True])
def test_gradients_are_the_plain_pattern_s(kind, normalizer, monkeypatch):
    monkeypatch.setattr(fused, "BAND", 16)
    monkeypatch.setattr(fused.query_blocks, "__kwdefaults__", {"numbers": 300})
    made = drawn(40, prompts=1, **KINDS[kind])
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(made.value.shape, generator=generator, dtype=torch.float64)
    row = torch.randn(made.value.shape[:-1], generator=generator, dtype=torch.float64) * normalizer
    leaves = [x.clone().requires_grad_() for x in (made.query, made.key, made.value)]
    given = replace(made, query=leaves[0], key=leaves[1], value=leaves[2])
    found = attend(given, normalizer=normalizer)
    assert found.output is not None
    total = (found.output * weight).sum()
    if normalizer:
        assert found.normalizer is not None
        total = total + (found.normalizer * row).sum()
    gradients = torch.autograd.grad(total, leaves)

    logits = twin_logits(leaves[0], leaves[1], made)
    twin = ((logits.softmax(-1) @ leaves[2]) * weight).sum() + (logits.logsumexp(-1) * row).sum()
    for gradient, expected in zip(gradients, torch.autograd.grad(twin, leaves), strict=True):
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-11)  # float64 in another order


def test_one_of_three_may_want_gradients():
    given = drawn(12, prompts=1)
    value = given.value.clone().requires_grad_()
    found = attend(replace(given, value=value), normalizer=True)
    assert found.output is not None
    (gradient,) = torch.autograd.grad(found.output.sum(), value)
    torch.testing.assert_close(gradient, logits_of(given).softmax(-1).sum(-2)[..., None].expand_as(gradient))
    with torch.no_grad():
        plain = attend(replace(given, value=value), normalizer=True)
    assert plain.output is not None
    assert not plain.output.requires_grad


# ------------------------------------------------------------------------------------------------- patterns


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_patterns_of_attention(kind, dtype):
    given = drawn(20, dtype=dtype, **KINDS[kind])
    expected, noise = logits_of(given), rounding(given)
    same(given.logits(), expected, noise)
    pattern = given.pattern()
    assert pattern.dtype == dtype
    same(pattern, expected.softmax(-1), 2**-8 if dtype == torch.bfloat16 else noise)
    for start, stop in ((0, 1), (0, 9), (8, 9), (13, 20), (19, 20)):
        first, last = given.first_key(start), given.last_key(stop)
        assert (first, last) == keys_of(given, start, stop)
        same(given.logits(start, stop), expected[:, :, start:stop, first:last], noise)


@pytest.mark.parametrize("window", [None, 4])
def test_slopes_alone_are_the_patterns_without_content(window):
    """ALiBi's sign, order of heads and decay are those of the theory of random models."""
    given = drawn(30, prompts=1, slopes=SLOPES, window=window)
    blank = replace(given, query=torch.zeros_like(given.query))
    decay = contentless_patterns(30, window, SLOPES)
    torch.testing.assert_close(blank.pattern()[0], decay, rtol=1e-12, atol=0)
    found = attend(blank, normalizer=True)
    assert found.output is not None
    torch.testing.assert_close(found.output[0], decay @ given.value[0], rtol=1e-12, atol=1e-14)
    assert not torch.allclose(decay[0], decay[1])


# -------------------------------------------------------------------------------------------- blocks and memory


def test_a_prefix_of_one_key_is_the_causal_mask_bit_for_bit():
    """So is a window as long as the prompt; and what stands behind a prefix is the causal kernel's."""
    given = drawn(40, dtype=torch.float32)
    expected = attend(given, normalizer=True)
    assert expected.output is not None
    assert expected.normalizer is not None
    for other in ({"prefix": 1}, {"window": 40}, {"window": 40, "prefix": 1}):
        found = attend(replace(given, **other), normalizer=True)
        assert found.output is not None
        assert found.normalizer is not None
        assert torch.equal(found.output, expected.output)
        assert torch.equal(found.normalizer, expected.normalizer)
        assert torch.equal(replace(given, **other).pattern(), given.pattern())
    behind = attend(replace(given, prefix=9), normalizer=True)
    assert behind.output is not None
    assert behind.normalizer is not None
    assert torch.equal(behind.output[..., 9:, :], expected.output[..., 9:, :])
    assert torch.equal(behind.normalizer[..., 9:], expected.normalizer[..., 9:])
    assert not torch.allclose(behind.output[..., :8, :], expected.output[..., :8, :])


@pytest.mark.parametrize("prefix", [None, 1, 20, 149, 1000])
@pytest.mark.parametrize("window", [None, 8, 100])
@pytest.mark.parametrize("numbers", [1, 7, 500, 4000, 10**9])
def test_blocks_of_queries_fill_their_budget_and_no_more(numbers, window, prefix):
    given = drawn(150, window=window, prefix=prefix)
    found = list(query_blocks(given, numbers=numbers))
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert found[-1][1] == 150

    def size(start: int, stop: int) -> int:
        logits = given.logits(start, stop)
        return logits.numel()

    for start, stop in found:
        assert size(start, stop) <= numbers or stop == start + 1
        assert stop == 150 or size(start, stop + 1) > numbers
    if numbers == 1:
        assert len(found) == 150
    if numbers == 10**9:
        assert len(found) == 1


class Largest(TorchDispatchMode):
    """The largest tensor that any operation gives."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, Tensor) and tensor._base is None:
                self.numbers = max(self.numbers, tensor.numel())
        return made


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_as_large_as_one_head_s_pattern(kind):
    length, heads = 2048, 8
    more: dict[str, Any] = KINDS[kind] | ({"slopes": SLOPES.repeat(heads // HEADS)} if "slopes" in KINDS[kind] else {})
    given = drawn(length, prompts=1, heads=heads, dtype=torch.float32, **more)
    with Largest() as largest:
        attend(given, normalizer=True)
    # Masks of bands hold (band + window) band, of blocks rows times keys.
    assert given.query.numel() <= largest.numbers <= max(fused.BLOCK_NUMBERS, given.query.numel())
    assert largest.numbers < length**2


# ----------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize(("length", "window"), [(1, None), (33, None), (700, None), (700, 8), (1200, 600)])
@pytest.mark.parametrize("head", [12, 16, 64, 256])  # 12: no kernel takes it
def test_kernels_on_a_gpu(length, window, dtype, head):
    given = drawn(length, head=head, dtype=dtype, window=window)
    there = replace(given, **{name: getattr(given, name).cuda() for name in ("query", "key", "value")})
    found = attend(there, normalizer=True)
    assert found.normalizer is not None
    assert found.normalizer.shape == given.query.shape[:-1]
    logits = logits_of(given)
    # Float32 products go through three of TF32 there, and sums in another order: a few bits more.
    same(found.normalizer, logits.logsumexp(-1), 8 * rounding(given))
    half = dtype in (torch.bfloat16, torch.float16)
    slack = 2**-6 if half else 8 * head * rounding(given)
    for output in (found.output, attend(there).output):
        same(output, logits.softmax(-1) @ given.value.double(), slack)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_on_a_gpu(kind):
    given = drawn(100, dtype=torch.float32, **KINDS[kind])
    names = [name for name in ("query", "key", "value", "slopes") if getattr(given, name) is not None]
    there = replace(given, **{name: getattr(given, name).cuda() for name in names})
    found = attend(there, normalizer=True)
    same(found.normalizer, logits_of(given).logsumexp(-1), 8 * rounding(given))
    same(there.pattern(), logits_of(given).softmax(-1), 8 * rounding(given))
