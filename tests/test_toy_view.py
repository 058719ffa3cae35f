"""A toy as a view: the pass of toy.model, the view's own promises, and every probe on toys of every kind."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import reference
import reference_toys
import torch
from made_toys import (
    AHEAD,
    BLOCKS,
    CAUSAL,
    HEADS,
    LENGTH,
    LOOKS,
    OTHERS,
    POSITIONS,
    TOKENS,
    VOCABULARY,
    WIDTH,
    architecture,
    made,
    named,
    tolerance,
)
from torch import Tensor

import probes
from probes.errors import InputError
from probes.measures.attention import columns, run_watched
from probes.measures.sink_sums import uniform_alpha
from probes.models.linear import LinearizedBlock
from probes.models.view import Attention, Edit, View
from toy.model import Architecture, Switches, forward, initial
from toy.tasks import Copying, InContext
from toy.train import Run, train
from toy.view import Toy

EXACT = 1e-11  # float64, sums in another order
STANDARD: dict[str, Any] = {"feed_forward": True, "norm": "rms"}
BANDS, LAGS = [(3, 6), (7, 11)], (1, 2)


def logits(toy: Toy, tokens: Tensor) -> Tensor:
    return toy.unembed(toy.norm(toy.residual(toy.embed(tokens))))


def close(found: Any, expected: Any, noise: float = EXACT) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=noise, atol=noise)


def own_weights(toy: Toy) -> dict[str, Tensor]:
    return {name: w[0] for name, w in toy._weights.items()}


# ----------------------------------------------------------------------------------------------- against the slow twin


@pytest.mark.parametrize("look", LOOKS, ids=named)
def test_streams_and_logits_are_the_twin_s_at_every_length(look):
    for n, other in enumerate(OTHERS[::3]):
        toy, length = made(n, **look, **other), (1, 3, 4, 5, LENGTH)[n % 5]
        prompt, noise = TOKENS[0, :length], max(EXACT, tolerance(toy.architecture))
        streams, expected = reference_toys.toy_pass(toy.architecture, own_weights(toy), prompt)
        trace = toy.trace(toy.embed(prompt[None]))
        assert len(trace.residual) == BLOCKS + 1
        for found, stream in zip(trace.residual, streams, strict=True):
            close(found[0], stream, noise)
        close(logits(toy, prompt[None])[0, -1], expected, noise)
        single = Toy(toy.architecture, {name: w.float() for name, w in own_weights(toy).items()})
        found = logits(single, prompt[None])
        assert single.dtype == found.dtype == torch.float32
        close(found, logits(toy, prompt[None]), 1e-3)


def test_spec_and_identity():
    toy = made(mask="window", window=4, positional="decay", decay=0.2)
    spec = toy.spec
    assert isinstance(toy, View)
    assert (spec.family, spec.blocks, spec.heads, spec.kv_heads, spec.head_dim) == ("toy", BLOCKS, HEADS, HEADS, 2)
    assert (spec.width, spec.vocabulary, spec.max_length, spec.initializer_range) == (WIDTH, VOCABULARY, LENGTH, None)
    assert (spec.windows, spec.positional, spec.prefix) == ((4,) * BLOCKS, ("none",) * BLOCKS, None)
    assert (made(mask="prefix", prefix=3).spec.prefix, made(mask="full").spec.prefix) == (3, LENGTH)
    kinds = [made(**position).spec.positional[0] for position in POSITIONS]
    assert kinds == ["none", "learned", "learned", "rope", "none"]
    assert (toy.tokenizer, toy.bos, str(toy.device), toy.dtype) == (None, None, "cpu", torch.float64)

    weights = initial(toy.architecture, 0)
    identity = Toy(toy.architecture, weights, name="mine", bos=3).identity
    assert (identity.name, identity.revision, identity.condition) == ("mine", None, "pretrained")
    assert (identity.backend, identity.dtype, identity.device) == ("toy", "float32", "cpu")
    assert json.loads(identity.config) == json.loads(json.dumps(toy.architecture.described()))
    said = [f"{w.dtype} {tuple(w.shape)}\n".encode() + w.numpy().tobytes() for w in weights.values()]
    digests = sorted(hashlib.sha256(one).digest() for one in said)
    assert identity.weights == hashlib.sha256(b"".join(digests)).hexdigest()
    weights["0.q"][0, 0] += 1
    assert Toy(toy.architecture, weights).identity.weights != identity.weights
    assert Toy(toy.architecture, weights, bos=0).bos == 0


# ---------------------------------------------------------------------------------------------- the view's promises


@pytest.mark.parametrize("look", LOOKS, ids=named)
def test_blocks_put_together_are_the_pass(look):
    for other in ({}, STANDARD, {"residual": False, "output_projection": False, "norm": "layer"}):
        toy = made(**look, **other)
        embeddings = toy.embed(TOKENS[:1])
        trace = toy.trace(embeddings, attention=True)
        stream = start = embeddings.clone().requires_grad_()
        for layer, block in enumerate(trace.blocks):
            assert torch.equal(trace.residual[layer], stream)
            stream = block(stream)
        source = embeddings.clone().requires_grad_()
        assert torch.equal(trace.residual[-1], stream)
        assert torch.equal(toy.residual(source), stream)
        assert not any(one.requires_grad for one in (*trace.residual, *(a.query for a in trace.attention)))
        direction = torch.randn(stream.shape, generator=torch.Generator().manual_seed(1)).double()
        (by_block,) = torch.autograd.grad(stream.sin().sum(), start)
        (slope,) = torch.autograd.grad(toy.residual(source).sin().sum(), source)
        close(slope, by_block)
        ahead, behind = (toy.residual(embeddings + step * direction).sin().sum() for step in (1e-5, -1e-5))
        assert float((slope * direction).sum()) == pytest.approx(float((ahead - behind) / 2e-5), rel=1e-6, abs=1e-7)
        # Any number of prompts, each as alone.
        many = torch.cat([trace.residual[1], 2 * trace.residual[1], trace.residual[1] - 1])
        close(trace.blocks[1](many)[1:2], trace.blocks[1](many[1:2]))
        assert (trace.rotary[0] is not None) == (look["positional"] == "rope")


def test_rotations_are_given_as_they_act():
    toy = made(positional="rope")
    trace = toy.trace(toy.embed(TOKENS[:1, :5]), attention=True)
    cos, sin = trace.rotary[1] or (torch.empty(0), torch.empty(0))
    assert cos.shape == sin.shape == (5, 2)
    close(cos[:, 0], [math.cos(t) for t in range(5)], 1e-6)  # a head's one pair, at wavelength 2 pi
    close(sin[:, 1], [math.sin(t) for t in range(5)], 1e-6)
    q = (trace.residual[0] @ toy._weights["0.q"][0])[0].unflatten(-1, (HEADS, 2)).transpose(0, 1)
    first, second = q.unbind(-1)
    turned = torch.stack([first * cos[:, 0] - second * sin[:, 0], second * cos[:, 0] + first * sin[:, 0]], -1)
    close(trace.attention[0].query[0], turned)


@pytest.mark.parametrize("site", ["query", "key", "value", "output", "residual"])
@pytest.mark.parametrize("look", [LOOKS[0], LOOKS[3], AHEAD[0]], ids=named)
def test_edits_act(site, look):
    toy = made(**look)
    embeddings, seen = toy.embed(TOKENS[:1]), []

    def double(x: Tensor) -> Tensor:
        seen.append(x.shape)
        return 2 * x

    edit = [Edit(site, 1, double)]
    trace = toy.trace(embeddings, attention=True, edits=edit)
    plain = toy.trace(embeddings, attention=True)
    assert seen == [(1, LENGTH, WIDTH) if site == "residual" else (1, HEADS, LENGTH, 2)]
    close(trace.residual[-1], toy.residual(embeddings, edits=edit), 0)
    assert not torch.allclose(trace.residual[-1], plain.residual[-1])
    assert torch.equal(trace.attention[0].key, plain.attention[0].key)
    if site == "residual":
        assert torch.equal(trace.residual[1], 2 * plain.residual[1])
        assert torch.equal(trace.residual[-1], plain.blocks[1](2 * plain.residual[1]))
        return
    for name in ("query", "key", "value"):
        factor = 2 if name == site else 1
        assert torch.equal(getattr(trace.attention[1], name), factor * getattr(plain.attention[1], name))
    # Recorded blocks keep the edits of the pass, whatever the stream.
    assert torch.equal(trace.blocks[1](trace.residual[1]), trace.residual[2])
    if site in ("value", "output"):  # what a head writes is linear in both
        written = plain.residual[2] - plain.residual[1]
        close(trace.residual[2] - trace.residual[1], 2 * written)


@pytest.mark.parametrize("look", LOOKS, ids=named)
def test_attention_is_the_mask_s_own_and_watchers_see_it(look):
    toy = made(**look)
    embeddings, found = toy.embed(TOKENS), []

    def watch(layer: int, attention: Attention) -> None:
        found.append(layer)
        assert attention.output is not None
        assert attention.normalizer is not None
        assert not attention.query.requires_grad
        assert (attention.window, attention.prefix) == (toy.spec.windows[layer], toy.spec.prefix)
        pattern, at = attention.pattern(), range(LENGTH)
        seen = [[reference.looks_at(i, j, attention.window, attention.prefix) for j in at] for i in at]
        assert torch.equal(pattern > 0, torch.tensor(seen).expand_as(pattern))
        close(attention.output, pattern @ attention.value)
        close(attention.normalizer, attention.logits().logsumexp(-1))
        close(columns(attention, at), pattern)
        close(pattern.sum(-1), np.ones(pattern.shape[:-1]))

    run_watched(toy, embeddings, watch)
    assert found == [0, 1]
    with toy.watching(watch):
        toy.residual(embeddings.clone().requires_grad_())
        blocks = toy.trace(embeddings).blocks
        assert found == [0, 1] * 3
        blocks[1](embeddings)
    assert found == [*[0, 1] * 3, 1]
    blocks[0](embeddings)  # nobody watches any more
    assert len(found) == 7


def test_only_the_innermost_watcher_is_called():
    toy, other = made(), made(seed=1)
    embeddings, found = toy.embed(TOKENS[:1]), []

    def interrupt(layer: int, attention: Attention) -> None:
        raise InterruptedError

    with toy.watching(lambda layer, _: found.append(("outer", layer))):
        with toy.watching(lambda layer, _: found.append(("inner", layer))):
            toy.residual(embeddings)
            other.residual(embeddings)  # another view's passes are its own
        toy.residual(embeddings)
        with pytest.raises(InterruptedError), toy.watching(interrupt):
            toy.residual(embeddings)
        toy.residual(embeddings)
    assert found == [(name, layer) for name in ("inner", "outer", "outer") for layer in (0, 1)]


def test_what_heads_write_and_what_is_read_out():
    for projected in (True, False):
        toy = made(output_projection=projected, norm="layer", feed_forward=False)
        trace = toy.trace(toy.embed(TOKENS), attention=True)
        for layer, attention in enumerate(trace.attention):
            written = torch.einsum("bhtc,hcd->btd", attention.pattern() @ attention.value, toy.output_weights(layer))
            close(trace.residual[layer + 1] - trace.residual[layer], written)
        rows = trace.residual[-1]
        w, b = (toy._weights[name][0] for name in ("norm", "norm.bias"))
        close(toy.norm(rows), torch.nn.functional.layer_norm(rows, (WIDTH,), w, b, 1e-5))
        close(toy.norm(rows[1, 3]), toy.norm(rows)[1, 3])
    rows = torch.randn(2, 3, WIDTH).double()
    assert torch.equal(made().norm(rows), rows)
    for head in ("linear", "mlp"):
        toy = made(head=head)
        expected = [reference_toys.toy_head(toy.architecture, own_weights(toy), row) for row in rows.flatten(0, 1)]
        close(toy.unembed(rows).flatten(0, 1), torch.stack(expected))
        close(toy.unembed(rows[0, 0]), expected[0])
    found = logits(made(outputs=5), TOKENS)  # ids that no class stands for are never predicted
    assert found.shape == (4, LENGTH, VOCABULARY)
    assert bool((found[..., 5:] == -math.inf).all())
    assert bool(found[..., :5].isfinite().all())


@pytest.mark.parametrize("look", LOOKS, ids=named)
def test_parts_are_given_where_they_say_it_all(look):
    for other in OTHERS:
        toy = made(**look, **other)
        said = other["norm"] != "none" and other["feed_forward"] and other["residual"] and other["output_projection"]
        trace = toy.trace(toy.embed(TOKENS[:1]))
        for layer in range(BLOCKS):
            parts = toy.parts(layer)
            assert (parts is not None) == (said and toy.spec.prefix is None)
            if parts is not None:
                block = LinearizedBlock(parts, trace.residual[layer], trace.rotary[layer])
                close(block.output, trace.residual[layer + 1])
                assert parts.q.weight.data_ptr() == toy._weights[f"{layer}.q"].data_ptr()  # the model's own


# ---------------------------------------------------------------------------------------------------- starting afresh


def test_fresh_weights_are_those_of_their_seed():
    toy = made(positional="rope", norm="rms")
    fresh = toy.reinitialized(3)
    assert (fresh.identity.condition, fresh.identity.config) == ("init", toy.identity.config)
    assert (fresh.dtype, fresh.identity.name) == (torch.float64, "toy")
    for name, tensor in initial(toy.architecture, 3).items():
        assert torch.equal(fresh._weights[name][0], tensor.double())
    assert fresh.identity.weights != toy.reinitialized(4).identity.weights


@pytest.mark.parametrize("look", LOOKS, ids=named)
def test_without_positional_encoding_none_reaches_the_blocks(look):
    toy = made(**look).reinitialized(2, positional=False)
    plain = {name: value for name, value in look.items() if name != "decay"} | {"positional": "none"}
    weights = {name: w for name, w in own_weights(toy).items() if name != "positions"}
    assert toy.identity.condition == "init-nope"
    assert toy.identity.config == made(**look).identity.config
    assert torch.equal(logits(toy, TOKENS), logits(Toy(architecture(**plain), weights), TOKENS))
    assert toy.trace(toy.embed(TOKENS)).rotary == (None,) * BLOCKS
    if look["positional"] == "learned":
        assert not toy._weights["positions"].any()
    assert torch.equal(logits(toy.reinitialized(2), TOKENS), logits(made(**look).reinitialized(2), TOKENS))


# --------------------------------------------------------------------------------------------------------- from training


def test_a_trained_toy_of_tokens():
    task = Copying(vocabulary=VOCABULARY, length=LENGTH, target=-2, batch=8)
    (one,) = train([Run(architecture(positional="learned"), task, seed=3)], 2)
    toy = Toy.of(one)
    assert (toy.identity.name, toy.identity.condition) == ("toy of copying", "pretrained")
    assert Toy.of(one, name="mine").identity.name == "mine"
    batched = {name: tensor[None] for name, tensor in one.weights.items()}
    expected = forward(one.run.architecture, batched, Switches.of([one.run.architecture]), TOKENS[None])[0]
    close(logits(toy, TOKENS)[:, -1], expected, 1e-5)


@pytest.mark.parametrize("data", ["gaussian", "fixed"])
def test_a_trained_toy_of_vectors_has_ids_for_classes_and_labels(data):
    task = InContext(items=4, width=8, classes=6, labels=3, burst=2, data=data, batch=8)
    a = Architecture(
        blocks=2, width=8, length=task.length, vocabulary=None, outputs=3, output_projection=False, head="mlp"
    )
    (one,) = train([Run(a, task, seed=3)], 2)
    toy, world = Toy.of(one), task.world(3, "cpu")
    assert toy.spec.vocabulary == 9
    ids = torch.tensor([[4, 6, 1, 8, 4, 6, 1, 8, 1]])
    items = world.means[[4, 1, 4, 1, 1]]
    if data == "gaussian":
        items = items / math.sqrt(1 + task.eps**2)
    else:
        items = (items + task.anisotropy * world.common) / math.sqrt(1 + task.anisotropy**2)
    vectors = torch.zeros(1, 9, 8)
    vectors[0, 0::2] = items
    vectors[0, 1::2] = world.labels[[0, 2, 0, 2]]
    close(toy.embed(ids), vectors, 1e-6)
    assert torch.equal(toy.placed(vectors), vectors)
    found = logits(toy, ids)
    assert found.shape == (1, 9, 9)
    assert bool((found[..., :6] == -math.inf).all())
    close(found[0, -1, 6:], reference_toys.toy_pass(a, one.weights, vectors[0])[1], 1e-5)
    # What ids stand for enters the hash, and stays with fresh weights.
    assert toy.identity.weights != Toy(a, one.weights).identity.weights
    assert torch.equal(toy.reinitialized(0).embed(ids), toy.embed(ids))
    # With a position's own vector, where there are any.
    learned = replace(a, positional="learned")
    placed = Toy(learned, initial(learned, 0), table=torch.zeros(5, 8))
    assert torch.equal(placed.embed(ids[:, :4] % 5)[0], initial(learned, 0)["positions"][:4])

    ds = probes.bos_swap(toy, ids.expand(4, -1).contiguous(), lags=(1,), bands=[(2, 8)], bootstrap=2, products=4)
    loss = ds.loss_before.values
    assert np.isnan(loss[1::2]).all()  # an item comes next, which the head does not know
    row = logits(toy, ids)[0, 2]
    assert loss[2] == pytest.approx(float(row.logsumexp(-1) - row[8]), rel=1e-5)
    change = (ds.loss_after - ds.loss_before).values[2:-1:2]
    assert float(ds.loss_change_of_model) == pytest.approx(change.mean(), rel=1e-9)


# --------------------------------------------------------------------------------------------------------------- refusals

WORDS, VECTORS = architecture(), architecture(vocabulary=None)
LEARNED = architecture(positional="learned")
OWN, PLACES = initial(WORDS, 0), initial(LEARNED, 0)
LONG = torch.zeros(1, LENGTH + 1, dtype=torch.long)
CAUSAL_ALONE = "lets every query see a prefix of 4 positions, and leakage is split for causal masks alone"
AHEAD_OF = made(mask="prefix", prefix=4)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Toy(WORDS, PLACES), "weight 'positions' has shape [12, 4], its architecture wants None"),
        (lambda: Toy(LEARNED, OWN), "weight 'positions' has shape None, its architecture wants [12, 4]"),
        (lambda: Toy(WORDS, OWN | {"0.q": OWN["0.q"][None]}), "weight '0.q' has shape [1, 4, 4], its architecture wants"),
        (lambda: Toy(WORDS, OWN | {"0.q": OWN["0.q"].double()}), "weights are float32 on cpu, float64 on cpu; give all"),
        (lambda: Toy(WORDS, OWN, table=torch.zeros(9, 4)), "the toy has a vocabulary of 9; leave table out"),
        *(
            (lambda size=size: Toy(VECTORS, initial(VECTORS, 0), table=torch.zeros(size)), "give vectors [id, 4], at least")
            for size in ((9, 3), (8, 4), (9,))
        ),
        (lambda: Toy(WORDS, OWN, bos=-1), "bos=-1 is no token id; ids run from 0 to 8"),
        (lambda: Toy(WORDS, OWN, bos=9), "bos=9 is no token id"),
        (lambda: Toy(VECTORS, initial(VECTORS, 0)).embed(TOKENS), "no token ids; give it table=, or vectors to `placed`"),
        (lambda: Toy(WORDS, OWN).placed(torch.zeros(1, 3, 4)), "reads token ids, not vectors; give them to `embed`"),
        (lambda: made().embed(LONG), "prompts have 13 positions, 'toy' was made for 12; give from 1 to 12"),
        (lambda: made().residual(torch.zeros(1, 13, WIDTH).double()), "prompts have 13 positions, 'toy' was made for 12"),
        (lambda: made().trace(torch.zeros(1, 3, 5).double()), "have shape [1, 3, 5]; 'toy' takes [prompt, position, 4]"),
        (lambda: probes.sinks(made(), LONG), "tokens have 13 positions, toy was made for 12"),
        (lambda: made().trace(made().embed(TOKENS), edits=[Edit("query", 2, torch.neg)]), "the model has blocks 0 to 1"),
        (lambda: probes.leakage(AHEAD_OF, TOKENS, bands=BANDS, lags=LAGS), CAUSAL_ALONE),
        (lambda: probes.bos_swap(AHEAD_OF, TOKENS, bands=BANDS, lags=LAGS), CAUSAL_ALONE),
        (lambda: probes.theory.second_moment(made(), TOKENS), "cannot be taken apart"),
        (lambda: probes.theory.second_moment(made(mask="full", **STANDARD), TOKENS), "cannot be taken apart"),
        (lambda: probes.load(architecture()), "a transformers model, a TransformerBridge or a view"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(call, said):
    with pytest.raises(InputError) as refused:
        call()
    assert said in str(refused.value)


# ---------------------------------------------------------------------------------------------------------------- Jacobian


def brute_force(toy: Toy, prompt: Tensor, query: int, readout: str, edits: list[Edit] | None = None) -> Tensor:
    """||J_j||_F / sqrt(d) for every position of the prompt, one output at a time."""
    source = toy.embed(prompt[None]).clone().requires_grad_()
    out = toy.residual(source, edits=edits or [])[0, query]
    if readout != "residual":
        out = toy.norm(out)
    if readout == "logits":
        out = toy.unembed(out)
        out = out[out.isfinite()]
    return reference.jacobian_norms(out, source) / WIDTH**0.5


@pytest.mark.parametrize("look", LOOKS, ids=named)
def test_exact_jacobians_are_brute_force(look):
    others: list[dict[str, Any]] = [{}, STANDARD, {"residual": False, "head": "mlp", "norm": "layer"}]
    for n, other in enumerate(others):
        toy, query = made(**look, **other), (-1, 1, 6)[(n + LOOKS.index(look)) % 3]
        ds = probes.jacobian(toy, TOKENS[:1], query=query)
        close(ds.sensitivity[0], brute_force(toy, TOKENS[0], query, "residual"), 1e-9)
        for readout in ("normed", "logits") if query == 1 else ():
            ds = probes.jacobian(toy, TOKENS[:1], query=query, readout=readout)
            # Through a square root of eigenvalues, where logits are read out.
            close(ds.sensitivity[0], brute_force(toy, TOKENS[0], query, readout), 1e-6 if readout == "logits" else 1e-9)
            assert ds.attrs["engine"] == ("parts" if toy.parts(0) is not None else "autograd")
        felt = (ds.sensitivity.values > 0).any(0)
        at, prefix = query % LENGTH, toy.spec.prefix or 0
        assert not felt[max(at + 1, prefix) :].any()
        assert felt[at + 1 : prefix].all()  # later positions of a prefix do matter


@pytest.mark.parametrize("look", [CAUSAL[3], *AHEAD[::3]], ids=named)
def test_pathways_of_toys(look):
    toy = made(**look)
    ds = probes.jacobian(toy, TOKENS[:1], query=2, pathway="all")
    cut = [Edit(site, layer, Tensor.detach) for layer in range(BLOCKS) for site in ("query", "key")]
    close(ds.sensitivity.sel(pathway="value")[0], brute_force(toy, TOKENS[0], 2, "residual", cut), 1e-9)
    close(ds.sensitivity.sel(pathway="total")[0], brute_force(toy, TOKENS[0], 2, "residual"), 1e-9)
    assert float(ds.sensitivity.sel(pathway="score").max()) > 0


def test_sketches_under_a_prefix_are_within_their_error():
    toy = made(width=24, mask="prefix", prefix=5, positional="rope")
    exact = probes.jacobian(toy, TOKENS[:1], query=3).sensitivity.values[0]
    ds = probes.jacobian(toy, TOKENS[:1].expand(60, -1).contiguous(), query=3, method="sketch", products=12)
    there = exact > 0
    assert there.sum() == 5
    covered = (np.abs(ds.sensitivity - exact) <= 1.96 * ds.stderr).values[:, there].mean()
    assert 0.85 <= covered <= 1
    whole = probes.jacobian(toy, TOKENS[:1], query=3, method="sketch", products=24)
    close(whole.sensitivity[0], exact, 1e-9)


# ------------------------------------------------------------------------------------------------------- attention's probes


@pytest.mark.parametrize("look", LOOKS, ids=named)
def test_sinks_are_those_of_patterns_written_out(look):
    toy = made(**look, output_projection=False)
    every = [toy.trace(toy.embed(prompt[None]), attention=True).attention for prompt in TOKENS]
    patterns = [[attention.pattern()[0] for attention in one] for one in every]
    truth = reference.sinks_of_keys(patterns, toy.spec.windows, toy.spec.prefix, threshold=0.3, tau=0.2)
    whole = probes.sinks(toy, TOKENS, keys="all")
    some = probes.sinks(toy, TOKENS, keys=(5, 0, 2))
    for found, of in ((whole.alpha, truth["alpha"].mean(0)), (some.alpha, truth["alpha"][..., [5, 0, 2]])):
        close(found, of)
    for name in ("over_tau", "sink_rate", "uniform"):
        close(whole[name], truth[name])
        close(some[name], truth[name][..., [5, 0, 2]])
    assert 0 < float(whole.over_tau.mean()) < 1
    # Reading, over the queries from 1 on that see position 0.
    seeing = range(1, LENGTH if toy.spec.prefix or toy.architecture.window is None else toy.architecture.window)
    for layer in range(BLOCKS):
        weights = torch.stack([p[layer][:, list(seeing), 0] for p in patterns], 1)  # [H, prompt, query]
        close(whole.attends[layer], weights.mean((1, 2)))
        values = torch.stack([one[layer].value[0] for one in every], 1)  # [H, prompt, T, c]
        read = weights[..., None] * values[:, :, :1]
        out = torch.stack([p[layer][:, list(seeing)] for p in patterns], 1) @ values
        close(whole.reads[layer], (read.pow(2).sum((1, 2, 3)) / out.pow(2).sum((1, 2, 3))).sqrt())


@pytest.mark.parametrize("look", [CAUSAL[0], CAUSAL[5], *AHEAD[::3]], ids=named)
def test_reactions_and_pictures_of_toys(look):
    toy = made(**look)
    ds = probes.sinks(toy, TOKENS, reacts="zero", pictures=2)
    other = probes.swapped(toy, "zero")
    end = LENGTH if toy.architecture.window is None else toy.architecture.window
    traces = [view.trace(view.embed(TOKENS), attention=True).attention for view in (toy, other)]
    for layer in range(BLOCKS):
        before, after = (attention[layer].pattern() for attention in traces)
        apart = (before - after)[:, :, 2:end, 1:].abs().sum(-1) / 2
        close(ds.reacts[layer], apart.mean((0, 2)))
    for picture in range(2):
        at = ds.isel(picture=picture)
        close(at.pattern, traces[0][int(at.picture_layer)].pattern()[0, int(at.picture_head)], 1e-6)


def test_pictures_of_a_prefix_beyond_their_edge():
    toy = made(length=150, mask="prefix", prefix=140)
    tokens = torch.randint(VOCABULARY, (1, 150), generator=torch.Generator().manual_seed(1))
    ds = probes.sinks(toy, tokens, pictures=1)
    attention = toy.trace(toy.embed(tokens), attention=True).attention
    own = attention[int(ds.picture_layer[0])].pattern()[0, int(ds.picture_head[0])]
    close(ds.pattern[0], own[:128, :128], 1e-6)


@pytest.mark.parametrize("look", LOOKS[::4], ids=named)
def test_position_0_is_closed_under_a_causal_mask_alone(look):
    toy = made(**look)
    ds = probes.trajectory(toy, TOKENS, starts=5)
    later = ds.later_difference.values[0]
    assert later[0] == 0
    mixed = torch.cat([TOKENS[:, :1], TOKENS.roll(-1, 0)[:, 1:]], 1)
    streams, others = (torch.stack(toy.trace(toy.embed(tokens)).residual)[:, :, 0] for tokens in (TOKENS, mixed))
    close(later, (streams - others).abs().amax((1, 2)))
    assert (later[1:] > 1e-3).all() if toy.spec.prefix else not later.any()
    every = [reference_toys.toy_pass(toy.architecture, own_weights(toy), prompt)[0] for prompt in TOKENS]
    close(ds.norm[0], np.sqrt(np.mean([[s.norm(dim=-1).pow(2) for s in streams] for streams in every], 0)), 1e-6)


# ------------------------------------------------------------------------------------------------------- left as they were


@pytest.mark.parametrize("look", [CAUSAL[1], AHEAD[0], AHEAD[-1]], ids=named)
def test_no_probe_changes_the_toy(look):
    toy = made(**look, **STANDARD)
    assert probes.load(toy) is toy
    name, weights = toy.identity.weights, {name: tensor.clone() for name, tensor in toy._weights.items()}
    before, state = logits(toy, TOKENS), copy.deepcopy({k: v for k, v in vars(toy).items() if k != "_weights"})
    probes.jacobian(toy, TOKENS, method="sketch", products=3, pathway="all", query=3)
    probes.sinks(toy, TOKENS, keys="all", reacts="mean", pictures=1)
    probes.trajectory(toy, TOKENS, starts=3)
    probes.swapped(toy, "mean").embed(TOKENS)
    if toy.spec.prefix is None:
        probes.leakage(toy, TOKENS, bands=BANDS, lags=LAGS, bootstrap=2)
        probes.bos_swap(toy, TOKENS, bands=BANDS, lags=LAGS, bootstrap=2, products=3)
        probes.theory.second_moment(toy, TOKENS)
    assert set(vars(toy)) == {*state, "_weights"}
    assert all(torch.equal(toy._weights[key], weights[key]) for key in weights)
    assert not any(tensor.requires_grad for tensor in toy._weights.values())
    assert Toy(toy.architecture, own_weights(toy)).identity.weights == name
    assert torch.equal(logits(toy, TOKENS), before)


def test_uniform_attention_under_every_mask():
    for window in (None, 1, 4, 20):
        for prefix in (None, 1, 3, 11, 40):
            found = uniform_alpha(LENGTH, range(LENGTH), window, prefix)
            flat = [[torch.zeros(1, LENGTH, LENGTH)]]
            close(found, reference.sinks_of_keys(flat, [window], prefix, threshold=0.3, tau=0.2)["uniform"][0])
