"""Columns, diagonals and blocks of patterns against full patterns in float64; watching, in every family and backend."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import families
import pytest
import reference
import torch
from families import BLOCKS, FAMILIES, HEAD_DIM, HEADS, VOCABULARY, WIDTH
from test_fused import CAP, DTYPES, KINDS, SLOPES, drawn, keys_of, logits_of, rounding, same
from torch import Tensor, nn

import probes
from probes.errors import InputError
from probes.measures.attention import (
    by_layer,
    column_statistics,
    columns,
    completed,
    diagonals,
    normalizers,
    outputs,
    pairs,
    pattern_blocks,
    run_watched,
)
from probes.models import fused
from probes.models.fused import attend
from probes.models.view import Attention, Edit

BACKENDS = ("transformers", "transformer_lens")
EVERY = [(name, backend) for name in FAMILIES for backend in BACKENDS]
LENGTH = 24  # three windows
IDS = torch.randint(3, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(7))
EAGER = 1e-4  # see test_watched_attention_is_the_eager_pattern; seen: 2e-5
NUMBERS = 300  # weights per block of queries: small prompts go in several blocks, too


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bands of 16 queries and blocks of a few."""
    monkeypatch.setattr(fused, "BAND", 16)
    monkeypatch.setattr(fused.query_blocks, "__kwdefaults__", {"numbers": NUMBERS})


# ------------------------------------------------------------------------------------------------ pieces of patterns


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_kernel", [False, True])
def test_columns_diagonals_and_pairs(kind, dtype, with_kernel):
    given = drawn(LENGTH, dtype=dtype, **KINDS[kind])
    given = attend(given, normalizer=True) if with_kernel else given
    logits, noise = logits_of(given), rounding(given)
    pattern = logits.softmax(-1)
    chosen = [0, 3, 3, 17, LENGTH - 1]
    found = columns(given, chosen)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    same(found, pattern[..., chosen], noise)
    assert not found[pattern[..., chosen] == 0].any()  # exactly
    same(columns(given, range(LENGTH)), pattern, noise)
    assert columns(given, []).shape == (2, 2, LENGTH, 0)

    lags = [0, 1, 7, 8, LENGTH - 1, LENGTH, LENGTH + 5]
    if given.prefix is not None:  # there is something ahead
        lags += [-1, -7, 1 - LENGTH, -LENGTH, -LENGTH - 5]
    along = diagonals(given, lags)
    assert along.dtype == found.dtype
    for n, lag in enumerate(lags):
        for i in range(LENGTH):
            there = 0 <= i - lag < LENGTH
            expected = logits[..., i, i - lag] if there else torch.full((2, 2), float("-inf")).double()
            same(along[..., n, i], expected, noise)

    queries, keys = [5, 23, 0, 3, 20], [5, 2, 0, 4, 13]
    for i, j in ((queries, keys), (torch.tensor(queries), torch.tensor(keys))):
        same(pairs(given, i, j), logits[..., queries, keys], noise)
    assert pairs(given, [], []).shape == (2, 2, 0)


def test_diagonals_beyond_the_prompt_alone():
    given = drawn(4)
    found = diagonals(given, [4, 9])
    assert found.shape == (2, 2, 2, 4)
    assert found.dtype == torch.float64
    assert bool((found == float("-inf")).all())
    with pytest.raises(InputError, match="lag -2 looks ahead of the query, which sees nothing there; give lags from 0"):
        diagonals(given, [1, -2])


@pytest.mark.parametrize("key", [-1, 12, 400])
def test_columns_outside_the_prompt_are_refused(key):
    with pytest.raises(InputError, match=f"key {key} is outside the prompt; positions run from 0 to 11"):
        columns(drawn(12), [0, key])


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("kind", KINDS)
def test_what_no_kernel_gave_is_computed(kind):
    given = drawn(LENGTH, **KINDS[kind])
    logits = logits_of(given)
    mixed = logits.softmax(-1) @ given.value
    same(normalizers(given), logits.logsumexp(-1), 1e-12)
    same(outputs(given), mixed, 1e-12)
    both = completed(given)
    same(both.normalizer, logits.logsumexp(-1), 1e-12)
    same(both.output, mixed, 1e-12)
    assert both.output is not None
    assert both.normalizer is not None
    # What is there is taken as it is.
    assert completed(both) is both
    marked = replace(both, output=both.output + 1, normalizer=both.normalizer + 1)
    assert outputs(marked) is marked.output
    assert normalizers(marked) is marked.normalizer
    half = replace(both, normalizer=None)
    assert completed(half).normalizer is not None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numbers", [1, NUMBERS, None])  # a row at a time, several blocks, all at once
def test_blocks_make_up_the_pattern(kind, dtype, numbers):
    given = drawn(LENGTH, dtype=dtype, **KINDS[kind])
    pattern, noise = logits_of(given).softmax(-1), rounding(given)
    whole, at, sizes = torch.zeros_like(pattern), 0, []
    for piece in pattern_blocks(given, numbers=numbers):
        start, stop, first, weights = piece
        assert start == at
        assert (first, piece.last) == keys_of(given, start, stop)
        whole[:, :, start:stop, first : piece.last] = weights.double()
        at = stop
        sizes.append(weights.numel())
    assert at == LENGTH
    assert len(sizes) == {1: LENGTH, None: 1}.get(numbers, len(sizes))
    if numbers == NUMBERS:
        assert 2 < len(sizes) < LENGTH
        assert max(sizes) <= NUMBERS
    same(whole, pattern, noise)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threshold", [0.05, 0.2, 0.999])
def test_sums_and_counts_of_columns(kind, dtype, threshold):
    given = drawn(LENGTH, dtype=dtype, **KINDS[kind])
    pattern, noise = logits_of(given).softmax(-1), rounding(given)
    found = column_statistics(given, threshold)
    assert found.total.dtype == found.over.dtype == torch.float64
    same(found.total, pattern.tril().sum(-2), noise)  # of the queries from the key on
    near = ((pattern - threshold).abs() <= noise * threshold).sum(-2)  # rounding may decide these either way
    assert bool(((found.over - (pattern > threshold).sum(-2)).abs() <= near).all())
    assert near.sum() <= 2
    # The same sums for a log-sum-exp that the kernel gave.
    again = column_statistics(attend(given, normalizer=True), threshold)
    assert torch.equal(again.total, found.total)


def test_a_threshold_is_exceeded_not_met():
    given = drawn(4, spread=0.0)  # uniform: 1, 1/2, 1/3, 1/4, the halves exact
    assert column_statistics(given, 0.5).over[0, 0].tolist() == [1, 0, 0, 0]
    assert column_statistics(given, 0.49).over[0, 0].tolist() == [2, 1, 0, 0]


@pytest.mark.slow
def test_a_pattern_of_thousands_of_positions_in_its_real_blocks():
    given = drawn(1500, prompts=1, heads=2, dtype=torch.float32, softcap=CAP, slopes=SLOPES)
    blocks = [(start, stop) for start, stop, *_ in pattern_blocks(given)]
    assert len(blocks) == 2  # 2 heads x 1,500^2 / 2 weights seen; blocks are rectangles
    logits = logits_of(given)
    same(column_statistics(given, 0.2).total, logits.softmax(-1).sum(-2), 10 * rounding(given))


# ------------------------------------------------------------------------------------------------------ families


@cache
def _original(name: str) -> Any:
    """Eager, which returns its patterns; in float64 they are rounded by its float32 softmax alone."""
    made = families.model(name, dtype=torch.float64)
    made.set_attn_implementation("eager")
    return made


def original(name: str) -> Any:
    """A copy for each caller: tests may change what they get."""
    return copy.deepcopy(_original(name))


@cache
def view(name: str, backend: Any) -> Any:
    return probes.load(original(name), backend)


@cache
def eager(name: str) -> Any:
    with torch.no_grad():
        return original(name)(IDS, output_attentions=True, use_cache=False).attentions


def watched(seen: Any, embeddings: Tensor, **options: Any) -> list[tuple[int, Attention]]:
    found: list[tuple[int, Attention]] = []
    with seen.watching(lambda layer, attention: found.append((layer, attention))):
        seen.residual(embeddings, **options)
    return found


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
        assert attention.query.shape == attention.value.shape == (3, HEADS, LENGTH, HEAD_DIM)
        assert attention.key.shape == attention.query.shape  # grouped keys: one per query head
        assert attention.window == seen.spec.windows[layer]
        assert not attention.query.requires_grad
        same(columns(attention, range(LENGTH)), expected, EAGER)
        same(column_statistics(attention, 0.2).total, expected.sum(-2), LENGTH * EAGER)
        # Against the twin, of the queries and keys that were seen: float64's own rounding.
        logits = reference.attention_logits(
            attention.query[:1], attention.key[:1], attention.scale, softcap=attention.softcap, window=attention.window
        )
        noise = 1e-15 * float(attention.query.norm(dim=-1).max() * attention.key.norm(dim=-1).max() + 100)
        same(columns(attention, range(LENGTH))[:1], logits.softmax(-1), noise)
        same(diagonals(attention, [0, 3, 8])[:1, ..., 1, 3:], logits.diagonal(-3, -2, -1), noise)
        assert attention.normalizer is not None
        assert attention.output is not None
        same(attention.normalizer[:1], logits.logsumexp(-1), noise)
        same(attention.output[:1], logits.softmax(-1) @ attention.value[:1], 100 * noise)

    run_watched(seen, seen.embed(IDS), watch)
    assert layers == list(range(BLOCKS))
    given: list[bool] = []  # transformers' models run the kernel that gives both, so that neither is computed twice
    with seen.watching(lambda _, a: given.append(a.output is not None and a.normalizer is not None)), torch.no_grad():
        seen.residual(seen.embed(IDS))
    assert given == [backend == "transformers"] * BLOCKS


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_in_float32_and_bfloat16(name, backend):
    """At weights of the usual width, float32's columns are the eager patterns within 1e-5, as is asked for.

    In bfloat16 eager attention rounds its logits and weights to 8 bits; ours are of the queries and keys that were seen,
    whose products are exact.
    """
    config = FAMILIES[name]()
    config.initializer_range = 0.1
    made = families.build(config)
    made.set_attn_implementation("eager")
    with torch.no_grad():
        own = made(IDS, output_attentions=True, use_cache=False).attentions
    seen = probes.load(made, backend)
    largest = 0.0

    def watch(layer: int, attention: Attention) -> None:
        nonlocal largest
        same(columns(attention, range(LENGTH)), own[layer], 1e-5)
        largest = max(largest, float(own[layer][..., 1:, :].max() - own[layer][..., -1, :].min()))

    run_watched(seen, seen.embed(IDS), watch)
    assert largest > 0.3  # far from uniform

    narrow: Any = probes.load(made, backend, dtype="bfloat16")

    def watch_narrow(layer: int, attention: Attention) -> None:
        assert attention.query.dtype == torch.bfloat16
        same(columns(attention, range(LENGTH)), logits_of(attention).softmax(-1), rounding(attention))

    run_watched(narrow, narrow.embed(IDS[:1]), watch_narrow)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("name", FAMILIES)
def test_backends_agree(name):
    first, second = (view(name, backend) for backend in BACKENDS)
    embeddings = first.embed(IDS)
    for (layer, one), (other, two) in zip(watched(first, embeddings), watched(second, embeddings), strict=True):
        assert layer == other
        same(columns(two, range(8)), columns(one, range(8)), EAGER)  # the bridge runs eager attention
        same(outputs(two), outputs(one), 10 * EAGER)  # values are around 10


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mistral-window"])
def test_trained_models_in_float32(name, backend):
    model, plain = probes.load(name, backend), probes.load(name)
    tokens = torch.randint(10, model.spec.vocabulary, (1, 200), generator=torch.Generator().manual_seed(0))
    own = copy.deepcopy(plain._model)  # type: ignore[attr-defined]
    own.set_attn_implementation("eager")
    with torch.no_grad():
        expected = own(tokens, output_attentions=True, use_cache=False).attentions

    def watch(layer: int, attention: Attention) -> None:
        same(columns(attention, [0, 1, 77]), expected[layer][..., [0, 1, 77]], 1e-5)

    run_watched(model, model.embed(tokens), watch)


# ------------------------------------------------------------------------------------------------------ watching


def hooks_of(model: nn.Module) -> dict[str, Any]:
    return {
        name: (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks), sorted(vars(m)))
        for name, m in model.named_modules()
    }


@pytest.mark.parametrize(("name", "backend"), EVERY)
def test_every_block_is_seen_once_and_nothing_is_left(name, backend):
    model = original(name)
    seen: Any = probes.load(model, backend)
    embeddings = seen.embed(IDS)
    plain = seen.residual(embeddings)
    before, outer = hooks_of(seen._model), hooks_of(model)  # in its first pass a bridge sets hooks of its own
    for call in (seen.residual, seen.trace, lambda given: seen.trace(given, attention=True)):
        found: list[int] = []
        with seen.watching(lambda layer, attention, found=found: found.append(layer)):
            call(embeddings)
            assert found == list(range(BLOCKS))
            call(embeddings)
        assert found == 2 * list(range(BLOCKS))
        call(embeddings)  # nobody watches any more
        assert len(found) == 2 * BLOCKS
    with seen.watching(lambda layer, attention: None):
        same(seen.residual(embeddings), plain, 1e-9)  # the kernel that gives the log-sum-exp, too, may be another
    assert torch.equal(seen.residual(embeddings), plain)
    assert hooks_of(seen._model) == before
    assert hooks_of(model) == outer


@pytest.mark.parametrize(("name", "backend"), EVERY)
def test_the_watcher_sees_what_was_recorded_and_edited(name, backend):
    seen = view(name, backend)
    embeddings = seen.embed(IDS)
    sites = ("query", "key", "value")
    for site in sites:
        edits = [Edit(site, 1, lambda x: -2 * x)]
        recorded = seen.trace(embeddings, attention=True, edits=edits).attention
        found = dict(watched(seen, embeddings, edits=edits))
        plain = dict(watched(seen, embeddings))
        for layer in range(BLOCKS):
            for other in sites:
                same(getattr(found[layer], other), getattr(recorded[layer], other), 1e-9)
        same(getattr(found[1], site), -2 * getattr(plain[1], site), 1e-12)
        assert not torch.allclose(found[2].query, plain[2].query)
        if found[1].output is not None:  # what the kernel gave is of the edited ones
            logits = logits_of(found[1])
            same(found[1].output, logits.softmax(-1) @ found[1].value, 1e-9)
            same(normalizers(found[1]), logits.logsumexp(-1), 1e-9)


@pytest.mark.parametrize(("name", "backend"), EVERY)
def test_traced_blocks_can_be_watched(name, backend):
    seen = view(name, backend)
    embeddings = seen.embed(IDS[:1])
    edits = [Edit("value", 1, lambda x: -x)]
    trace = seen.trace(embeddings, attention=True, edits=edits)
    before = hooks_of(seen._model)
    for layer, block in enumerate(trace.blocks):
        found: list[tuple[int, Attention]] = []
        with seen.watching(lambda at, attention, found=found: found.append((at, attention))):
            after = block(trace.residual[layer])
            many = block(trace.residual[layer].repeat(3, 1, 1))
        same(after, trace.residual[layer + 1], 1e-9)
        assert many.shape == (3, LENGTH, WIDTH)
        assert [at for at, _ in found] == [layer, layer]
        for site in ("query", "key", "value"):
            own = getattr(trace.attention[layer], site)
            same(getattr(found[0][1], site), own, 1e-9)
            same(getattr(found[1][1], site), own.expand(3, -1, -1, -1), 1e-9)
        block(trace.residual[layer])
        assert len(found) == 2
    assert hooks_of(seen._model) == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_innermost_watcher_is_called(backend):
    seen = view("llama", backend)
    embeddings = seen.embed(IDS)
    calls: list[str] = []

    def named(name: str) -> Callable[[int, Attention], None]:
        return lambda layer, attention: calls.append(f"{name} {layer}")

    with seen.watching(named("outer")):
        seen.residual(embeddings)
        with seen.watching(named("inner")):
            seen.residual(embeddings)
        seen.residual(embeddings)
    assert calls == [f"{name} {layer}" for name in ("outer", "inner", "outer") for layer in range(BLOCKS)]


@pytest.mark.parametrize(("name", "backend"), [(n, b) for n in ("llama", "gpt_neox", "gpt2") for b in BACKENDS])
def test_a_watcher_that_raises_leaves_the_model_usable(name, backend):
    seen = view(name, backend)
    embeddings = seen.embed(IDS)
    plain, before = seen.residual(embeddings), hooks_of(seen._model)
    trace = seen.trace(embeddings[:1])

    def fail(layer: int, attention: Attention) -> None:
        if layer == 1:
            raise ZeroDivisionError

    for call in (
        lambda: seen.residual(embeddings),
        lambda: seen.trace(embeddings),
        lambda: trace.blocks[1](trace.residual[1]),
    ):
        with pytest.raises(ZeroDivisionError), seen.watching(fail):
            call()
        assert hooks_of(seen._model) == before
        call()
    assert torch.equal(seen.residual(embeddings), plain)
    assert [layer for layer, _ in watched(seen, embeddings)] == list(range(BLOCKS))
    # Raised within, caught within: still watched.
    found: list[int] = []
    with seen.watching(lambda layer, attention: found.append(layer)):
        with pytest.raises(ZeroDivisionError):
            seen.residual(embeddings, edits=[Edit("query", 1, lambda x: x / 0 if 1 // 0 else x)])
        found.clear()
        seen.residual(embeddings)
    assert found == list(range(BLOCKS))


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_that_goes_unseen_is_named(backend):
    seen: Any = probes.load(families.model("llama"), backend)
    module = seen._blocks[1].self_attn if backend == "transformers" else seen._blocks[1].attn
    vars(module)["forward"] = lambda hidden_states, *args, **kwargs: (hidden_states / 2, None)
    embeddings = seen.embed(IDS)
    assert seen.residual(embeddings).isfinite().all()
    trace = seen.trace(embeddings[:1])
    with seen.watching(lambda layer, attention: None):
        for call in (seen.residual, seen.trace, trace.blocks[1]):
            with pytest.raises(RuntimeError, match=r"llama: site '(attention|query)' of block 1 never fired"):
                call(embeddings)
        assert trace.blocks[0](embeddings).isfinite().all()
    assert seen.residual(embeddings).isfinite().all()


@pytest.mark.parametrize("pair", [(a, b) for a in BACKENDS for b in BACKENDS])
def test_two_views_are_watched_apart(pair):
    model = families.model("llama")
    first, second = (probes.load(model, backend) for backend in pair)
    embeddings = first.embed(IDS)
    calls: list[str] = []

    def watch(layer: int, attention: Attention) -> None:
        calls.append(f"first {layer}")
        second.residual(embeddings)  # another view's pass within this one's

    with first.watching(watch), second.watching(lambda layer, attention: calls.append(f"second {layer}")):
        first.residual(embeddings)
        inner = [f"second {layer}" for layer in range(BLOCKS)]
        assert calls == [call for layer in range(BLOCKS) for call in (f"first {layer}", *inner)]
        calls.clear()
        second.residual(embeddings)
        assert calls == inner
    first.residual(embeddings)
    assert calls == inner


@pytest.mark.parametrize("backend", BACKENDS)
def test_watched_passes_are_differentiable(backend):
    """The log-sum-exp then comes from logits written out: kernels give none together with a graph."""
    seen = view("mistral", backend)
    given = seen.embed(IDS).requires_grad_()
    (expected,) = torch.autograd.grad(seen.residual(given).sum(), given)
    found: list[Attention] = []
    with seen.watching(lambda layer, attention: found.append(attention)):
        (gradient,) = torch.autograd.grad(seen.residual(given).sum(), given)
    same(gradient, expected, 1e-9)
    for attention in found:
        assert not normalizers(attention).requires_grad
        same(normalizers(attention), logits_of(attention).logsumexp(-1), 1e-9)


# -------------------------------------------------------------------------------------------------- output weights


class Adapted(nn.Module):
    """A projection with a low-rank update beside it, as LoRA puts there."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        generator = torch.Generator().manual_seed(4)
        a, b = (torch.randn(shape, generator=generator) for shape in ((2, base.in_features), (base.out_features, 2)))
        self.a, self.b = nn.Parameter(a.to(base.weight)), nn.Parameter(b.to(base.weight))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


@pytest.mark.parametrize(("name", "backend"), EVERY)
def test_output_weights_are_the_block_s_own(name, backend):
    seen = view(name, backend)
    for layer in range(BLOCKS):
        parts = view(name, "transformers").parts(layer)
        found = seen.output_weights(layer)
        assert found.shape == (HEADS, HEAD_DIM, WIDTH)
        assert not found.requires_grad
        # A product with the identity, from which the bias is subtracted again: float64's rounding.
        for head in range(HEADS):
            own = parts.o.weight[:, head * HEAD_DIM : (head + 1) * HEAD_DIM].T
            torch.testing.assert_close(found[head], own.detach(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", FAMILIES)
def test_heads_outputs_make_up_the_branch(name):
    """`sum_h o_h W_O[h]` plus the bias is what the attention module gives; post-norms come after."""
    model, seen = original(name), view(name, "transformers")
    decoder = model.get_decoder()
    blocks = next(child for child in decoder.children() if isinstance(child, nn.ModuleList))
    branches: list[Tensor] = []
    names = ("self_attn", "attn", "attention")
    modules = [next(getattr(b, n) for n in names if hasattr(b, n)) for b in blocks]
    handles = [m.register_forward_hook(lambda module, args, out: branches.append(out[0])) for m in modules]
    with torch.no_grad():
        model(IDS, use_cache=False)
    for handle in handles:
        handle.remove()
    for layer, attention in watched(seen, seen.embed(IDS)):
        written = torch.einsum("bhtc,hcd->btd", outputs(attention), seen.output_weights(layer))
        bias = seen.parts(layer).o.bias
        written = written if bias is None else written + bias
        scale = float(branches[layer].std())
        assert (written - branches[layer]).abs().max() < EAGER * scale


def test_output_weights_of_an_adapted_projection():
    model: Any = families.model("llama", dtype=torch.float64)
    base = model.model.layers[1].self_attn.o_proj
    adapted = Adapted(base)
    model.model.layers[1].self_attn.o_proj = adapted
    seen = probes.load(model)
    plain = base.weight.detach().T.unflatten(0, (HEADS, HEAD_DIM))
    expected = (base.weight + adapted.b @ adapted.a).detach().T.unflatten(0, (HEADS, HEAD_DIM))
    torch.testing.assert_close(seen.output_weights(1), expected, rtol=0, atol=1e-12)
    assert (expected - plain).abs().max() > 0.1
    assert len(watched(seen, seen.embed(IDS))) == BLOCKS


def test_output_weights_in_other_dtypes():
    model = families.model("gpt_neox")  # with a bias, which must not stay in them
    wide = probes.load(model).output_weights(0)
    narrow = probes.load(model, dtype="bfloat16").output_weights(0)
    assert narrow.dtype == torch.bfloat16
    # Weight plus bias is rounded to 8 bits before the bias is subtracted again.
    assert (narrow - wide).abs().max() <= 2**-7 * (wide.abs().max() + 1)


# ------------------------------------------------------------------------------------------------------- by layer


def chunks(embeddings: torch.Tensor, size: int) -> dict[Any, torch.Tensor]:
    return dict(enumerate(embeddings.split(size)))


@pytest.mark.parametrize(
    ("name", "backend", "chunk"),
    [*((*every, 2) for every in EVERY), *(("llama", b, c) for b in BACKENDS for c in (1, 3))],
)
def test_by_layer_equals_one_pass(name, backend, chunk):
    seen = view(name, backend)
    embeddings = seen.embed(IDS)
    given = embeddings.clone()
    whole = dict(watched(seen, embeddings))
    before = hooks_of(seen._model)
    layers = []
    for layer, running in by_layer(seen, chunks(embeddings, chunk)):
        layers.append(layer)
        found = list(running)
        assert [len(part.query) for part in found] == {1: [1, 1, 1], 2: [2, 1], 3: [3]}[chunk]
        for site in ("query", "key"):
            same(torch.cat([getattr(part, site) for part in found]), getattr(whole[layer], site), 1e-9)
        log_z = [part.normalizer for part in found]
        assert all(part is not None for part in log_z)
        same(torch.cat(log_z), normalizers(whole[layer]), 1e-9)  # type: ignore[arg-type]
        same(torch.cat([columns(part, [0, 5]) for part in found]), columns(whole[layer], [0, 5]), 1e-9)
        assert all((part.window, part.softcap) == (whole[layer].window, whole[layer].softcap) for part in found)
        # Others may use the model in between, watched or not.
        assert len(watched(seen, embeddings[:1])) == BLOCKS
    assert layers == list(range(BLOCKS))
    assert torch.equal(embeddings, given)
    assert hooks_of(seen._model) == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_by_layer_holds_queries_and_keys_alone(backend):
    seen = view("llama", backend)
    for _, running in by_layer(seen, chunks(seen.embed(IDS), 1)):
        for part in running:
            assert part.output is None
            assert part.value.untyped_storage().nbytes() <= 8  # nothing of the values' size behind it
            assert part.value.isnan().all()  # and nothing to be taken for values


def test_by_layer_runs_what_nobody_asked_for():
    seen = view("llama", "transformers")
    streams = chunks(seen.embed(IDS), 2)
    trace = seen.trace(seen.embed(IDS))
    for layer, _ in by_layer(seen, streams):
        same(torch.cat(list(streams.values())), trace.residual[layer], 1e-9)
    same(torch.cat(list(streams.values())), trace.residual[-1], 1e-9)


def test_by_layer_may_be_left_halfway():
    seen = view("llama", "transformers")
    embeddings = seen.embed(IDS)
    before = hooks_of(seen._model)
    for layer, running in by_layer(seen, chunks(embeddings, 1)):
        if layer == 1:
            next(running)
            break
    assert hooks_of(seen._model) == before
    assert len(watched(seen, embeddings)) == BLOCKS


# ------------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "backend"), EVERY)
def test_on_a_gpu(name, backend, dtype):
    model: Any = probes.load(families.model(name), backend, device="cuda", dtype=dtype)
    layers = []

    def watch(layer: int, attention: Attention) -> None:
        layers.append(layer)
        logits, noise = logits_of(attention), 8 * rounding(attention)
        pattern = logits.softmax(-1)
        same(normalizers(attention), logits.logsumexp(-1), noise)
        same(columns(attention, range(LENGTH)), pattern, noise)
        same(column_statistics(attention, 0.2).total, pattern.sum(-2), noise)
        same(diagonals(attention, [1, LENGTH])[..., 0, 1:], logits.diagonal(-1, -2, -1), noise)

    run_watched(model, model.embed(IDS.cuda()), watch)
    assert layers == list(range(BLOCKS))
    for layer, found in by_layer(model, chunks(model.embed(IDS.cuda()), 2)):
        assert layer < BLOCKS
        assert [len(part.query) for part in found] == [2, 1]
