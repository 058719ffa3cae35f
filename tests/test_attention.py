"""Columns and blocks of patterns against full patterns in float64; and of whole models."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import families
import pytest
import torch
from families import BLOCKS, HEAD_DIM, HEADS, WIDTH
from measured import EVERY, SOME, drawn_tokens, hooks_of, watched
from patterns import DTYPES, KINDS, drawn, keys_of, logits_of, rounding, same, sums_of, weights_of
from torch import Tensor, nn

import probes
from probes.measures.attention import (
    column_statistics,
    columns,
    normalizers,
    outputs,
    pattern_blocks,
    run_watched,
)
from probes.measures.leakage.samples import Course
from probes.models import fused
from probes.models.families import FAMILIES as ROWS
from probes.models.fused import attend
from probes.models.view import Attention
from probes.run.memory import in_parts

LENGTH = 24  # three windows
IDS = drawn_tokens(3, LENGTH, least=3, seed=7)
MIXED = ("softcap, slopes and window", "prefix and window")  # kinds in which every dtype is tried
CASES = [(kind, dtype) for kind in KINDS for dtype in (DTYPES if kind in MIXED else DTYPES[:1])]
EAGER = 1e-4  # see test_watched_attention_is_the_eager_pattern; seen: 2e-5
NUMBERS = 300  # weights per block of queries: small prompts go in several blocks, too


@pytest.fixture
def pieces() -> Iterator[None]:
    """Blocks of a few queries."""
    with in_parts(fused.BLOCK_NUMBERS // NUMBERS):
        yield


# ------------------------------------------------------------------------------------------------ pieces of patterns


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_columns(kind, dtype):
    given = drawn(LENGTH, dtype=dtype, **KINDS[kind])
    pattern, noise = weights_of(logits_of(given), given), rounding(given)
    chosen = [0, 3, 3, 17, LENGTH - 1]
    for one in (attend(given, normalizer=True), given):
        found = columns(one, chosen)
        assert found.dtype == torch.promote_types(dtype, torch.float32)
        same(found, pattern[..., chosen], noise)
        assert not found[pattern[..., chosen] == 0].any()  # exactly
    same(columns(given, range(LENGTH)), pattern, noise)
    assert columns(given, []).shape == (2, 2, LENGTH, 0)


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_blocks_make_up_the_pattern(kind, dtype):
    given = drawn(LENGTH, dtype=dtype, **KINDS[kind])
    pattern, noise = weights_of(logits_of(given), given), rounding(given)
    for numbers, least, most in ((1, LENGTH, LENGTH), (NUMBERS, 3, LENGTH - 1), (fused.BLOCK_NUMBERS, 1, 1)):
        whole, at, sizes = torch.zeros_like(pattern), 0, []
        with in_parts(fused.BLOCK_NUMBERS // numbers):
            blocks = list(pattern_blocks(given))
        for piece in blocks:
            start, stop, first, weights = piece
            assert start == at
            assert (first, piece.last) == keys_of(given, start, stop)
            whole[:, :, start:stop, first : piece.last] = weights.double()
            at = stop
            sizes.append(weights.numel())
        assert at == LENGTH
        assert least <= len(sizes) <= most
        assert numbers != NUMBERS or max(sizes) <= NUMBERS
        same(whole, pattern, noise)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_sums_and_counts_of_columns(kind, dtype):
    given = drawn(LENGTH, dtype=dtype, **KINDS[kind])
    pattern, noise = weights_of(logits_of(given), given), rounding(given)
    for threshold in (0.05, 0.2, 0.999):
        total, over = column_statistics(given, threshold)
        assert total.dtype == over.dtype == torch.float64
        same(total, pattern.tril().sum(-2), noise)  # of the queries from the key on
        near = ((pattern - threshold).abs() <= noise * threshold).sum(-2)  # rounding may decide these either way
        assert bool(((over - (pattern > threshold).sum(-2)).abs() <= near).all())
        assert near.sum() <= 2


# ------------------------------------------------------------------------------------------------------ families


def original(name: str) -> Any:
    """Eager, which returns its patterns; in float64 they are rounded by its float32 softmax alone."""
    made: Any = families.model(name, dtype=torch.float64)
    made.set_attn_implementation("eager")
    return made


@cache
def view(name: str, backend: Any) -> Any:
    return probes.load(original(name), backend)


@cache
def eager(name: str) -> Any:
    with torch.no_grad():
        return original(name)(IDS, output_attentions=True, use_cache=False).attentions


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize(("name", "backend"), EVERY)
def test_watched_attention_is_the_eager_pattern(name, backend):
    """Eager attention takes its softmax in float32 even here, and RMS norms are in float32.

    At logits around 100 that is 100 eps = 6e-6 of a weight, passed on through three blocks twenty times wider than usual.
    """
    seen, own = view(name, backend), eager(name)
    layers: list[int] = []

    def watch(layer: int, attention: Attention) -> None:
        layers.append(layer)
        expected = own[layer]
        assert attention.key.shape == attention.query.shape == (3, HEADS, LENGTH, HEAD_DIM)  # a key for each query head
        assert attention.window == seen.spec.windows[layer]
        assert not attention.query.requires_grad
        same(columns(attention, range(LENGTH)), expected, EAGER)
        same(column_statistics(attention, 0.2)[0], expected.sum(-2), LENGTH * EAGER)
        # Against the twin, of the queries and keys that were seen: float64's own rounding.
        logits = logits_of(attention)[:1]
        noise = 1e-15 * float(attention.query.norm(dim=-1).max() * attention.key.norm(dim=-1).max() + 100)
        weights = weights_of(logits, attention)
        assert attention.normalizer is not None
        assert attention.output is not None
        same(attention.normalizer[:1], sums_of(logits, attention), noise)
        same(attention.output[:1], weights @ attention.value[:1], 100 * noise)

    run_watched(seen, seen.embed(IDS), watch)
    assert layers == list(range(BLOCKS))
    with torch.no_grad():  # transformers' models run the kernel that gives both, so that neither is computed twice
        kernel = [a.output is not None and a.normalizer is not None for _, a in watched(seen, seen.embed(IDS))]
    assert kernel == [backend == "transformers"] * BLOCKS


# -------------------------------------------------------------------------------------------------- output weights


@pytest.mark.parametrize(("name", "backend"), EVERY)
def test_heads_outputs_make_up_the_branch(name, backend):
    """`sum_h o_h W_O[h]` plus the bias is what the attention module gives; post-norms come after."""
    model, seen = original(name), view(name, backend)
    branches: list[Tensor] = []
    for block in families.blocks(model):
        families.attention(block).register_forward_hook(lambda module, args, out: branches.append(out[0]))
    with torch.no_grad():
        model(IDS, use_cache=False)
    for layer, attention in watched(seen, seen.embed(IDS)):
        assert seen.output_weights(layer).shape == (HEADS, HEAD_DIM, WIDTH)
        assert not seen.output_weights(layer).requires_grad
        written = torch.einsum("bhtc,hcd->btd", outputs(attention), seen.output_weights(layer))
        bias = view(name, "transformers").parts(layer).o.bias
        written = written if bias is None else written + bias
        scale = float(branches[layer].std())
        assert (written - branches[layer]).abs().max() < EAGER * scale


def test_output_weights_of_an_adapted_projection_and_in_other_dtypes():
    model: Any = families.model("llama", dtype=torch.float64)
    base = model.model.layers[1].self_attn.o_proj

    class Adapted(nn.Module):
        """A projection with an update beside it, as LoRA puts there."""

        def __init__(self) -> None:
            super().__init__()
            self.base = base
            self.update = torch.randn(base.weight.shape, generator=torch.Generator().manual_seed(4)).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + x @ self.update.T

    model.model.layers[1].self_attn.o_proj = adapted = Adapted()
    expected = (base.weight + adapted.update).detach().T.unflatten(0, (HEADS, HEAD_DIM))
    torch.testing.assert_close(probes.load(model).output_weights(1), expected, rtol=0, atol=1e-12)
    biased = families.model("gpt_neox")  # the bias must not stay in them
    wide, narrow = probes.load(biased).output_weights(0), probes.load(biased, dtype="bfloat16").output_weights(0)
    assert narrow.dtype == torch.bfloat16
    # Weight plus bias is rounded to 8 bits before the bias is subtracted again.
    assert (narrow - wide).abs().max() <= 2**-7 * (wide.abs().max() + 1)


# ------------------------------------------------------------------------------------------------------- by layer


@pytest.mark.parametrize(("name", "backend"), SOME)
def test_leakage_takes_block_after_block_what_one_pass_gives(name, backend, monkeypatch):
    monkeypatch.setattr("probes.measures.leakage.samples.TOKENS_AT_ONCE", LENGTH)
    seen, streams = view(name, backend), dict[Any, Tensor]()
    tokens = torch.cat([IDS, IDS.flip(0)])[:5]  # halves of two and three
    whole, trace = dict(watched(seen, seen.embed(tokens))), seen.trace(seen.embed(tokens))
    before, course = hooks_of(seen._model), Course(seen, tokens, streams, {})
    for layer in range(BLOCKS):
        same(torch.cat(list(streams.values())), trace.residual[layer], 1e-9)
        if layer == 1:
            assert len(list(course.through(layer))) == 5
            continue
        found = list(course.attention(layer, 1))
        parts = [torch.cat([columns(half, [0, 5]) for half in halves]) for halves in found]
        assert [part.shape[1] for part in parts] == [1] * HEADS
        assert all(half.value.isnan().all() for halves in found for half in halves)
        same(torch.cat(parts, 1), columns(whole[layer], [0, 5]), 1e-9)
    same(torch.cat(list(streams.values())), trace.residual[-1], 1e-9)
    assert hooks_of(seen._model) == before


# ------------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "backend"), SOME)
def test_on_a_gpu(name, backend, dtype):
    own = families.model(name)
    if backend == "transformer_lens" and dtype == "bfloat16" and not ROWS[name].lens_halves:
        assert "rotations are in float32" in families.refused(probes.load, own, backend, device="cuda", dtype=dtype)
        return
    model: Any = probes.load(own, backend, device="cuda", dtype=dtype)
    layers: list[int] = []

    def watch(layer: int, attention: Attention) -> None:
        layers.append(layer)
        logits, noise = logits_of(attention), 8 * rounding(attention)
        same(normalizers(attention), sums_of(logits, attention), noise)
        same(columns(attention, range(LENGTH)), weights_of(logits, attention), noise)
        same(column_statistics(attention, 0.2)[0], weights_of(logits, attention).sum(-2), noise)

    run_watched(model, model.embed(IDS.cuda()), watch)
    assert layers == list(range(BLOCKS))
