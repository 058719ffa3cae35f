"""Attention as watchers see it while a model runs: once per block, as recorded and edited, with nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import families
import pytest
import torch
from families import BLOCKS, WIDTH
from measured import BACKENDS, SOME, drawn_tokens, hooks_of, watched
from measured import view as cached
from patterns import logits_of, same

import probes
from probes.measures.attention import normalizers
from probes.models.view import Attention, Edit

LENGTH = 24  # three windows
IDS = drawn_tokens(3, LENGTH, least=3, seed=7)


def view(name: str, backend: str) -> Any:
    return cached(name, backend, "float64")


@pytest.mark.parametrize(("name", "backend"), SOME)
def test_every_block_is_seen_once_and_nothing_is_left(name, backend):
    model = families.model(name, dtype=torch.float64)
    seen: Any = probes.load(model, backend)
    embeddings = seen.embed(IDS)
    plain = seen.residual(embeddings)
    before, outer = hooks_of(seen._model), hooks_of(model)  # in its first pass a bridge sets hooks of its own
    for call in (seen.residual, seen.trace, lambda given: seen.trace(given, attention=True)):
        found: list[int] = []
        with seen.watching(lambda layer, attention, found=found: found.append(layer)):
            call(embeddings)
            call(embeddings)
        call(embeddings)  # nobody watches any more
        assert found == 2 * list(range(BLOCKS))
    with seen.watching(lambda layer, attention: None):
        same(seen.residual(embeddings), plain, 1e-9)  # the kernel that gives the log-sum-exp, too, may be another
    assert torch.equal(seen.residual(embeddings), plain)
    assert hooks_of(seen._model) == before
    assert hooks_of(model) == outer


@pytest.mark.parametrize(("name", "backend"), SOME)
def test_the_watcher_sees_what_was_recorded_and_edited(name, backend):
    seen = view(name, backend)
    embeddings, sites = seen.embed(IDS[:1]), ("query", "key", "value")
    for site in sites:
        edits = [Edit(site, 1, lambda x: -2 * x)]
        trace = seen.trace(embeddings, attention=True, edits=edits)
        found = dict(watched(seen, embeddings, edits=edits))
        plain = dict(watched(seen, embeddings))
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
        if found[1].output is not None:  # what the kernel gave is of the edited ones
            logits = logits_of(found[1])
            same(found[1].output, logits.softmax(-1) @ found[1].value, 1e-9)
            same(normalizers(found[1]), logits.logsumexp(-1), 1e-9)


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


@pytest.mark.parametrize(("name", "backend"), [("llama", "transformer_lens"), ("gpt_neox", "transformers")])
def test_a_watcher_that_raises_leaves_the_model_usable(name, backend):
    seen = view(name, backend)
    embeddings = seen.embed(IDS)
    plain, before = seen.residual(embeddings), hooks_of(seen._model)
    trace = seen.trace(embeddings[:1])

    def fail(layer: int, attention: Attention) -> None:
        if layer == 1:
            raise ZeroDivisionError

    for call, given in ((seen.residual, embeddings), (seen.trace, embeddings), (trace.blocks[1], trace.residual[1])):
        with pytest.raises(ZeroDivisionError), seen.watching(fail):
            call(given)
        assert hooks_of(seen._model) == before
        call(given)
    assert torch.equal(seen.residual(embeddings), plain)
    assert [layer for layer, _ in watched(seen, embeddings)] == list(range(BLOCKS))


def test_watched_passes_are_differentiable():
    """The log-sum-exp then comes from logits written out: kernels give none together with a graph."""
    seen = view("mistral", "transformers")
    given = seen.embed(IDS).requires_grad_()
    (expected,) = torch.autograd.grad(seen.residual(given).sum(), given)
    found: list[Attention] = []
    with seen.watching(lambda layer, attention: found.append(attention)):
        (gradient,) = torch.autograd.grad(seen.residual(given).sum(), given)
    same(gradient, expected, 1e-9)
    for attention in found:
        assert not normalizers(attention).requires_grad
        same(normalizers(attention), logits_of(attention).logsumexp(-1), 1e-9)
