"""A toy as a view: the pass of toy.model, the view's own promises, and every probe on toys of every kind."""

import json
import math

import made_toys as toys
import pytest
import reference
import reference_toys
import torch
from commands import bad_input
from made_toys import LENGTH, LOOKS, TOKENS, architecture, close, logits, made, named, own
from torch import Tensor

from probes.measures.attention import run_watched
from probes.models.identity import weights_hash
from probes.models.linear import LinearizedBlock
from probes.models.view import Attention, Edit, View
from toy.model import initial
from toy.view import Toy


@pytest.mark.parametrize("look", LOOKS, ids=named)
def test_streams_and_logits_are_the_twin_s_at_every_length(look):
    for n, other in enumerate(toys.OTHERS[::3]):
        toy, length = made(n, **look, **other), (1, 3, 4, 5, LENGTH)[n % 5]
        prompt, noise = TOKENS[0, :length], max(toys.NOISE, toys.tolerance(toy.architecture))
        streams, expected = reference_toys.toy_pass(toy.architecture, own(toy), prompt)
        trace = toy.trace(toy.embed(prompt[None]))
        for found, stream in zip(trace.residual, streams, strict=True):
            close(found[0], stream, noise)
            assert not found.requires_grad
        assert (trace.rotary[0] is not None) == (look["positional"] == "rope")
        close(logits(toy, prompt[None])[0, -1], expected, noise)


def test_spec_and_identity():
    toy = made(mask="window", window=4, positional="decay", decay=0.2)
    spec = toy.spec
    assert isinstance(toy, View)
    assert (spec.family, spec.blocks, spec.heads, spec.kv_heads, spec.head_dim) == ("toy", 2, 2, 2, 2)
    assert (spec.width, spec.vocabulary, spec.max_length, spec.initializer_range) == (4, 9, LENGTH, None)
    assert (spec.windows, spec.positional, spec.prefix) == ((4, 4), ("none", "none"), None)
    assert (made(mask="prefix", prefix=3).spec.prefix, made(mask="full").spec.prefix) == (3, LENGTH)
    kinds = [made(**position).spec.positional[0] for position in toys.POSITIONS]
    assert kinds == ["none", "learned", "learned", "rope", "none"]
    identity = Toy(toy.architecture, weights := initial(toy.architecture, 0), name="mine", bos=0).identity
    assert (identity.name, identity.condition, identity.dtype) == ("mine", "pretrained", "float32")
    assert json.loads(identity.config) == json.loads(json.dumps(vars(toy.architecture)))
    assert identity.weights == weights_hash(weights.items())


@pytest.mark.parametrize("site", ["query", "key", "value", "output", "residual"])
@pytest.mark.parametrize("look", [LOOKS[0], LOOKS[3], toys.AHEAD[0]], ids=named)
def test_edits_act(site, look):
    toy = made(**look)
    embeddings, seen = toy.embed(TOKENS[:1]), []

    def double(x: Tensor) -> Tensor:
        seen.append(x.shape)
        return 2 * x

    edit = [Edit(site, 1, double)]
    trace = toy.trace(embeddings, attention=True, edits=edit)
    plain = toy.trace(embeddings, attention=True)
    assert seen == [(1, LENGTH, toys.WIDTH) if site == "residual" else (1, toys.HEADS, LENGTH, 2)]
    close(trace.residual[-1], toy.residual(embeddings, edits=edit), 0)
    assert torch.equal(trace.attention[0].key, plain.attention[0].key)
    if site == "residual":
        assert torch.equal(trace.residual[1], 2 * plain.residual[1])
        assert torch.equal(trace.residual[-1], plain.blocks[1](2 * plain.residual[1]))
        return
    for name in ("query", "key", "value"):
        factor = 2 if name == site else 1
        assert torch.equal(getattr(trace.attention[1], name), factor * getattr(plain.attention[1], name))
    assert torch.equal(trace.blocks[1](trace.residual[1]), trace.residual[2])  # blocks keep the edits of the pass
    if site in ("value", "output"):  # what a head writes is linear in both
        close(trace.residual[2] - trace.residual[1], 2 * (plain.residual[2] - plain.residual[1]))


def test_shared_keys_are_edited_once_and_probed_as_autograd_does():
    toy = made(heads=4, width=8, kv_heads=2, positional="rope", frequencies=(0.3,), qk_norm=True, **toys.POSTED)
    seen: list[torch.Size] = []
    embeddings, edit = toy.embed(TOKENS[:1]), Edit("key", 1, lambda x: seen.append(x.shape) or 2 * x)
    trace, plain = (toy.trace(embeddings, attention=True, edits=edits) for edits in ([edit], []))
    assert seen == [(1, 2, LENGTH, 2)]
    assert torch.equal(trace.attention[1].key, 2 * plain.attention[1].key)
    assert torch.equal(plain.attention[0].key[:, 0], plain.attention[0].key[:, 1])
    parts = toy.parts(1)
    assert parts is not None
    block = LinearizedBlock(parts, plain.residual[1], plain.rotary[1])
    slope = torch.autograd.functional.vjp(plain.blocks[1], plain.residual[1], plain.residual[0])[1]
    close(block.vjp(plain.residual[0][None])[0], slope)


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

    run_watched(toy, embeddings, watch)
    with toy.watching(watch):
        toy.residual(embeddings.clone().requires_grad_())
        blocks = toy.trace(embeddings).blocks
        blocks[1](embeddings)
    assert found == [*[0, 1] * 3, 1]
    blocks[0](embeddings)  # nobody watches any more
    assert len(found) == 7


def test_what_heads_write_and_what_is_read_out():
    for switches in ({}, {"output_projection": False}, {"post_norm": True}):
        toy = made(**switches, norm="layer", feed_forward=False)
        trace = toy.trace(toy.embed(TOKENS), attention=True)
        for layer, attention in enumerate(trace.attention):
            written = torch.einsum("bhtc,hcd->btd", attention.pattern() @ attention.value, toy.output_weights(layer))
            norm = toy.output_norm(layer)
            assert (norm is not None) == ("post_norm" in switches)
            added = written if norm is None else reference.normalized(norm[0], written + norm[1])
            close(trace.residual[layer + 1] - trace.residual[layer], added)
    found = logits(made(outputs=5), TOKENS)  # ids that no class stands for are never predicted
    assert torch.equal(found == -math.inf, (torch.arange(toys.VOCABULARY) > 4).expand_as(found))


@pytest.mark.parametrize("look", LOOKS, ids=named)
def test_parts_are_given_where_they_say_it_all(look):
    for other in toys.OTHERS:
        toy = made(**look, **other)
        said = other["norm"] != "none" and other["feed_forward"] and other["residual"] and other["output_projection"]
        trace = toy.trace(toy.embed(TOKENS[:1]))
        for layer in range(toys.BLOCKS):
            parts = toy.parts(layer)
            assert (parts is not None) == (said and toy.spec.prefix is None)
            if parts is not None:
                block = LinearizedBlock(parts, trace.residual[layer], trace.rotary[layer])
                close(block.output, trace.residual[layer + 1])
                assert parts.q.weight.data_ptr() == toy._weights[f"{layer}.q"].data_ptr()  # the model's own


@pytest.mark.parametrize("look", LOOKS, ids=named)
def test_fresh_weights_are_those_of_their_seed_and_without_positional_encoding_none_reaches_the_blocks(look):
    toy = made(**look)
    seeded, fresh = toy.reinitialized(2), toy.reinitialized(2, positional=False)
    assert [one.identity.condition for one in (seeded, fresh)] == ["init", "init-nope"]
    assert {one.identity.config for one in (seeded, fresh)} == {toy.identity.config}
    for name, tensor in initial(toy.architecture, 2).items():
        assert torch.equal(own(seeded)[name], tensor.double())
    plain = {name: value for name, value in look.items() if name != "decay"} | {"positional": "none"}
    weights = {name: w for name, w in own(fresh).items() if name != "positions"}
    assert torch.equal(logits(fresh, TOKENS), logits(Toy(architecture(**plain), weights), TOKENS))
    assert fresh.trace(fresh.embed(TOKENS)).rotary == (None,) * toys.BLOCKS
    if look["positional"] == "learned":
        assert not own(fresh)["positions"].any()
    assert torch.equal(logits(fresh.reinitialized(2), TOKENS), logits(seeded, TOKENS))


VECTORS, OWN = architecture(vocabulary=None), initial(architecture(), 0)
LONG = torch.zeros(1, LENGTH + 1, dtype=torch.long)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Toy(architecture(positional="learned"), OWN), "weight 'positions' has shape None, its architecture"),
        (lambda: Toy(architecture(attention="relu"), OWN), "probes read attention 'softmax', and the toy's is 'relu'"),
        (lambda: Toy(architecture(), OWN, bos=9), "bos=9 is no token id; ids run from 0 to 8"),
        (lambda: Toy(VECTORS, initial(VECTORS, 0)), "probes read token ids, and the toy's vocabulary is None"),
        (lambda: made().embed(LONG), "prompts have 13 positions, 'toy' was made for 12; give from 1 to 12"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(call, said):
    with bad_input(said):
        call()
