"""Columns, blocks and sums of patterns against full patterns in float64; and attention as watchers see it in a model."""

from collections.abc import Callable
from typing import Any

import families
import pytest
import torch
from families import BLOCKS, HEADS, WIDTH
from measured import BACKENDS, SOME, drawn_tokens, hooks_of, view, watched
from patterns import DTYPES, KINDS, drawn, keys_of, logits_of, rounding, same, sums_of, weights_of

import probes
from probes.measures.attention import column_statistics, columns, normalizers, outputs, pattern_blocks, run_watched
from probes.measures.leakage.samples import Course
from probes.models.fused import attend
from probes.models.view import Attention, Edit
from probes.run.memory import CPU_NUMBERS, in_parts

LENGTH = 24  # three windows
IDS = drawn_tokens(3, LENGTH, least=3, seed=7)
NUMBERS = 300  # weights per block of queries: small prompts go in several blocks, too


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_columns_and_their_sums_and_counts(kind, dtype):
    given = drawn(LENGTH, dtype=dtype, **KINDS[kind])
    pattern, noise = weights_of(logits_of(given), given), rounding(given)
    chosen = [0, 3, 3, 17, LENGTH - 1]
    with in_parts(CPU_NUMBERS // NUMBERS):
        for one in (attend(given, normalizer=True), given):
            found = columns(one, chosen)
            assert found.dtype == torch.promote_types(dtype, torch.float32)
            same(found, pattern[..., chosen], noise)
            assert not found[pattern[..., chosen] == 0].any()  # exactly
        assert columns(given, []).shape == (2, 2, LENGTH, 0)
        for threshold in (0.05, 0.2, 0.999):
            total, over = column_statistics(given, threshold)
            assert total.dtype == over.dtype == torch.float64
            same(total, pattern.tril().sum(-2), noise)  # of the queries from the key on
            near = ((pattern - threshold).abs() <= noise * threshold).sum(-2)  # rounding may decide these either way
            assert bool(((over - (pattern > threshold).sum(-2)).abs() <= near).all())
            assert near.sum() <= 2


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_make_up_the_pattern(kind):
    given = drawn(LENGTH, **KINDS[kind])
    pattern, noise = weights_of(logits_of(given), given), rounding(given)
    for numbers, least, most in ((1, LENGTH, LENGTH), (NUMBERS, 3, LENGTH - 1), (CPU_NUMBERS, 1, 1)):
        whole, at, sizes = torch.zeros_like(pattern), 0, []
        with in_parts(CPU_NUMBERS // numbers):
            blocks = list(pattern_blocks(given))
        for piece in blocks:
            start, stop, first, weights = piece
            assert start == at
            assert (first, piece.last) == keys_of(given, start, stop)
            whole[:, :, start:stop, first : piece.last] = weights
            at = stop
            sizes.append(weights.numel())
        assert at == LENGTH
        assert least <= len(sizes) <= most
        assert numbers != NUMBERS or max(sizes) <= NUMBERS
        same(whole, pattern, noise)


@pytest.mark.parametrize(("name", "backend"), SOME)
def test_leakage_takes_block_after_block_what_one_pass_gives(name, backend, monkeypatch):
    monkeypatch.setattr("probes.measures.leakage.samples.TOKENS_AT_ONCE", LENGTH)
    seen = view(name, backend, "float64")
    tokens = drawn_tokens(5, LENGTH, least=3, seed=7)  # halves of two and three
    whole, trace = dict(watched(seen, seen.embed(tokens))), seen.trace(seen.embed(tokens))
    before, course = hooks_of(seen._model), Course(seen, tokens, None)
    streams = course._streams
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


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float32, 256), (torch.float16, 24)]
)
@pytest.mark.parametrize(("length", "window"), [(1, None), (130, None), (700, 100), (333, 1)])
def test_column_sums_of_the_kernel_are_those_of_the_blocks(dtype, width, length, window, monkeypatch):
    pytest.importorskip("triton")
    random = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, length, width, generator=random).to("cuda", dtype) for _ in range(3))
    given = Attention(query, key, value, 3 / width, None, window)
    total, over = column_statistics(given, 0.2)
    monkeypatch.setattr("probes.measures.attention.kernels_there", lambda: False)
    expected, counted = column_statistics(given, 0.2)
    same(total, expected.cpu(), 1e-5)  # of sums of up to 700 weights in float32, in another order
    assert (over - counted).abs().sum() <= 2  # a weight may lie on the threshold but for rounding


@pytest.mark.parametrize(("name", "backend"), SOME)
def test_every_block_is_seen_once_and_nothing_is_left(name, backend):
    model = families.model(name, dtype=torch.float64)
    seen: Any = probes.load(model, backend)
    embeddings = seen.embed(IDS)
    plain = seen.residual(embeddings)
    before, outer = hooks_of(seen._model), hooks_of(model)  # in its first pass a bridge sets hooks of its own

    def fail(layer: int, attention: Attention) -> None:
        if layer == 1:
            raise ZeroDivisionError

    for call in (seen.residual, seen.trace, lambda given: seen.trace(given, attention=True)):
        found: list[int] = []
        with seen.watching(lambda layer, attention, found=found: found.append(layer)):
            call(embeddings)
            call(embeddings)
        call(embeddings)  # nobody watches any more
        assert found == 2 * list(range(BLOCKS))
        with pytest.raises(ZeroDivisionError), seen.watching(fail):
            call(embeddings)
        assert hooks_of(seen._model) == before
    with seen.watching(lambda layer, attention: None):
        same(seen.residual(embeddings), plain, 1e-9)  # the kernel that gives the log-sum-exp, too, may be another
    assert torch.equal(seen.residual(embeddings), plain)
    assert hooks_of(model) == outer


@pytest.mark.parametrize(("name", "backend"), SOME)
def test_the_watcher_sees_what_was_recorded_and_edited(name, backend):
    seen: Any = view(name, backend, "float64")
    embeddings, sites = seen.embed(IDS[:1]), ("query", "key", "value")
    plain, kernel = dict(watched(seen, embeddings)), dict[int, Attention]()
    with torch.no_grad():
        run_watched(seen, embeddings, kernel.__setitem__)
    for site in sites:
        edits = [Edit(site, 1, lambda x: -2 * x)]
        trace = seen.trace(embeddings, attention=True, edits=edits)
        found = dict(watched(seen, embeddings, edits=edits))
        before = hooks_of(seen._model)  # in its first pass a bridge sets hooks of its own
        for layer, block in enumerate(trace.blocks):
            again: list[tuple[int, Attention]] = []
            with seen.watching(lambda at, attention, again=again: again.append((at, attention))):
                same(block(trace.residual[layer]), trace.residual[layer + 1], 1e-9)
                assert block(trace.residual[layer].repeat(3, 1, 1)).shape == (3, LENGTH, WIDTH)
            block(trace.residual[layer])  # nobody watches any more
            assert [at for at, _ in again] == [layer, layer]
            for other in sites:
                own = getattr(trace.attention[layer], other)
                same(getattr(found[layer], other), own, 1e-9)
                same(getattr(again[0][1], other), own, 1e-9)
                same(getattr(again[1][1], other), own.expand(3, -1, -1, -1), 1e-9)
        assert hooks_of(seen._model) == before
        same(getattr(found[1], site), -2 * getattr(plain[1], site), 1e-12)
        assert not torch.allclose(found[2].query, plain[2].query)
        for one in (found[1], kernel[1]):  # what the kernel gave is of the edited ones
            logits = logits_of(one)
            same(outputs(one), weights_of(logits, one) @ one.value, 1e-9)
            same(normalizers(one), sums_of(logits, one), 1e-9)
    # Models of transformers run the kernel that gives both, so that neither is computed twice.
    assert backend != "transformers" or all(None not in (a.output, a.normalizer) for a in kernel.values())


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_innermost_watcher_of_its_own_view_is_called(backend):
    model, calls = families.model("llama"), list[str]()
    first, second = probes.load(model, backend), probes.load(model)
    embeddings = first.embed(IDS)

    def named(name: str) -> Callable[[int, Attention], None]:
        return lambda layer, attention: calls.append(f"{name} {layer}")

    def watch(layer: int, attention: Attention) -> None:
        calls.append(f"first {layer}")
        second.residual(embeddings)  # another view's pass within this one's

    inner = [f"second {layer}" for layer in range(BLOCKS)]
    with first.watching(watch), second.watching(named("second")):
        first.residual(embeddings)
        with first.watching(named("inner")):
            first.residual(embeddings)
    outer = [call for layer in range(BLOCKS) for call in (f"first {layer}", *inner)]
    assert calls == [*outer, *(f"inner {layer}" for layer in range(BLOCKS))]


def test_watched_passes_are_differentiable():
    """The log-sum-exp then comes from logits written out: kernels give none together with a graph."""
    seen = view("mistral", "transformers", "float64")
    given = seen.embed(IDS).requires_grad_()
    (expected,) = torch.autograd.grad(seen.residual(given).sum(), given)
    found: list[Attention] = []
    with seen.watching(lambda layer, attention: found.append(attention)):
        (gradient,) = torch.autograd.grad(seen.residual(given).sum(), given)
    same(gradient, expected, 1e-9)
    for attention in found:
        assert not normalizers(attention).requires_grad
        same(normalizers(attention), logits_of(attention).logsumexp(-1), 1e-9)
