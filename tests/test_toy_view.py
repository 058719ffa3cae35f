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
import torch
from test_toy_model import LOOKS, MASKS, OTHERS, POSITIONS, moved, named, side_by_side, switches_of, tolerance
from torch import Tensor

import probes
from probes.errors import InputError
from probes.measures.attention import column_statistics, columns, run_watched
from probes.measures.sink_sums import uniform_alpha
from probes.models.linear import LinearizedBlock
from probes.models.view import Attention, Edit, View
from toy.model import Architecture, Switches, forward, initial
from toy.tasks import Copying, InContext
from toy.train import Run, Trained, train
from toy.view import Toy

BLOCKS, HEADS, WIDTH, LENGTH, VOCABULARY = 2, 2, 4, 12, 9
EXACT = 1e-11  # float64, sums in another order
TOKENS = torch.randint(VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(5))
# Windows and prefixes of this file's longer prompts.
LOOKS_LONG: list[dict[str, Any]] = [look | {name: 4 for name in ("window", "prefix") if name in look} for look in LOOKS]
CAUSAL = [look for look in LOOKS_LONG if look["mask"] in ("causal", "window")]
AHEAD = [look for look in LOOKS_LONG if look["mask"] in ("prefix", "full")]
STANDARD: dict[str, Any] = {"feed_forward": True, "norm": "rms"}
BANDS, LAGS = [(3, 6), (7, 11)], (1, 2)


def architecture(**switches: Any) -> Architecture:
    plain: dict[str, Any] = {"blocks": BLOCKS, "heads": HEADS, "width": WIDTH, "length": LENGTH}
    plain |= {"vocabulary": VOCABULARY, "outputs": VOCABULARY}
    return Architecture(**(plain | switches))


def made(seed: int = 0, **switches: Any) -> Toy:
    """A toy in float64 whose attention is far from uniform."""
    a = architecture(**switches)
    return Toy(a, moved(a, seed))


def twin(toy: Toy, prompt: Tensor) -> tuple[list[Tensor], Tensor]:
    return reference.toy_pass(toy.architecture, {name: w[0] for name, w in toy._weights.items()}, prompt)


def logits(toy: Toy, tokens: Tensor) -> Tensor:
    return toy.unembed(toy.norm(toy.residual(toy.embed(tokens))))


def close(found: Any, expected: Any, noise: float = EXACT) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=noise, atol=noise)


def snapshot(toy: Toy) -> tuple[str, dict[str, Tensor]]:
    own = {name: tensor.clone() for name, tensor in toy._weights.items()}
    assert not any(tensor.requires_grad for tensor in toy._weights.values())
    return toy.identity.weights, own


# --------------------------------------------------------------------------------------------- against toy.model


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("look", LOOKS_LONG, ids=named)
def test_logits_are_those_of_the_trained_pass(look, residual):
    for n, other in enumerate(OTHERS[::3]):
        toy = made(n, **look, residual=residual, **other)
        a, weights = toy.architecture, side_by_side([moved(toy.architecture, n)])
        expected = forward(a, weights, switches_of(a), TOKENS[None])[0]
        close(logits(toy, TOKENS)[:, -1], expected, 1e-6 if look["positional"] == "decay" else EXACT)  # of float32


@pytest.mark.parametrize("length", [1, 3, 4, 5, LENGTH])
@pytest.mark.parametrize("look", LOOKS_LONG, ids=named)
def test_streams_of_shorter_prompts_are_the_twin_s(look, length):
    toy = made(norm="layer", feed_forward=True, **look)
    prompt = TOKENS[0, :length]
    streams, expected = twin(toy, prompt)
    trace = toy.trace(toy.embed(prompt[None]))
    noise = max(EXACT, tolerance(toy.architecture))
    assert len(trace.residual) == BLOCKS + 1
    for found, stream in zip(trace.residual, streams, strict=True):
        close(found[0], stream, noise)
    close(logits(toy, prompt[None])[0, -1], expected, noise)


@pytest.mark.parametrize("look", LOOKS_LONG, ids=named)
def test_patterns_are_the_masks_own(look):
    toy = made(**look)
    for layer, attention in enumerate(toy.trace(toy.embed(TOKENS), attention=True).attention):
        assert attention.window == toy.spec.windows[layer]
        assert attention.prefix == toy.spec.prefix
        pattern = attention.pattern()
        seen = [
            [reference.looks_at(i, j, attention.window, attention.prefix) for j in range(LENGTH)] for i in range(LENGTH)
        ]
        assert torch.equal(pattern > 0, torch.tensor(seen).expand_as(pattern))
        assert attention.output is not None
        close(pattern.sum(-1), np.ones(pattern.shape[:-1]))
        close(attention.output, pattern @ attention.value)


def test_spec_and_identity():
    toy = made(mask="window", window=4, positional="decay", decay=0.2)
    spec = toy.spec
    assert isinstance(toy, View)
    assert (spec.family, spec.blocks, spec.heads, spec.kv_heads, spec.head_dim) == ("toy", BLOCKS, HEADS, HEADS, 2)
    assert (spec.width, spec.vocabulary, spec.max_length, spec.initializer_range) == (WIDTH, VOCABULARY, LENGTH, None)
    assert (spec.windows, spec.positional, spec.prefix) == ((4,) * BLOCKS, ("none",) * BLOCKS, None)
    assert made(mask="prefix", prefix=3).spec.prefix == 3
    assert made(mask="full").spec.prefix == LENGTH
    kinds = [made(**position).spec.positional[0] for position in POSITIONS]
    assert kinds == ["none", "learned", "learned", "rope", "none"]
    assert (toy.tokenizer, toy.bos, str(toy.device), toy.dtype) == (None, None, "cpu", torch.float64)

    identity = Toy(toy.architecture, initial(toy.architecture, 0), name="mine", bos=3).identity
    assert (identity.name, identity.revision, identity.condition) == ("mine", None, "pretrained")
    assert (identity.backend, identity.dtype, identity.device) == ("toy", "float32", "cpu")
    assert json.loads(identity.config) == json.loads(json.dumps(toy.architecture.described()))
    weights = initial(toy.architecture, 0)
    digests = sorted(
        hashlib.sha256(f"{w.dtype} {tuple(w.shape)}\n".encode() + w.numpy().tobytes()).digest()
        for w in weights.values()
    )
    assert identity.weights == hashlib.sha256(b"".join(digests)).hexdigest()
    weights["0.q"][0, 0] += 1
    assert Toy(toy.architecture, weights).identity.weights != identity.weights
    assert Toy(toy.architecture, weights, bos=0).bos == 0


# ---------------------------------------------------------------------------------------------- the view's promises


@pytest.mark.parametrize("other", [{}, STANDARD, {"residual": False, "output_projection": False, "norm": "layer"}])
@pytest.mark.parametrize("look", LOOKS_LONG, ids=named)
def test_blocks_put_together_are_the_pass(look, other):
    toy = made(**look, **other)
    embeddings = toy.embed(TOKENS[:1])
    trace = toy.trace(embeddings, attention=True)
    stream = embeddings.clone().requires_grad_()
    start = stream
    for layer, block in enumerate(trace.blocks):
        assert torch.equal(trace.residual[layer], stream)
        stream = block(stream)
    assert torch.equal(trace.residual[-1], stream)
    assert not any(one.requires_grad for one in (*trace.residual, *(a.query for a in trace.attention)))
    source = embeddings.clone().requires_grad_()
    assert torch.equal(toy.residual(source), stream)
    slope = torch.randn(stream.shape, generator=torch.Generator().manual_seed(1)).double()
    for one, two in zip(
        torch.autograd.grad((stream * slope).sum(), start),
        torch.autograd.grad((toy.residual(source) * slope).sum(), source),
        strict=True,
    ):
        close(one, two)
    # Any number of prompts, each as alone.
    many = torch.cat([trace.residual[1], 2 * trace.residual[1], trace.residual[1] - 1])
    close(trace.blocks[1](many)[1:2], trace.blocks[1](many[1:2]))
    assert (trace.rotary[0] is not None) == (look["positional"] == "rope")


@pytest.mark.parametrize("look", LOOKS_LONG, ids=named)
def test_slopes_are_those_of_the_twin(look):
    toy = made(**look, **STANDARD)
    embeddings = toy.embed(TOKENS[:1])
    direction = torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(2)).double()
    source = embeddings.clone().requires_grad_()
    (slope,) = torch.autograd.grad(toy.residual(source).sin().sum(), source)
    step = 1e-5
    ahead, behind = (toy.residual(embeddings + sign * step * direction).sin().sum() for sign in (1, -1))
    assert float((slope * direction).sum()) == pytest.approx(float((ahead - behind) / (2 * step)), rel=1e-6, abs=1e-7)


def test_rotations_are_given_as_they_act():
    toy = made(positional="rope")
    trace = toy.trace(toy.embed(TOKENS[:1, :5]), attention=True)
    cos, sin = trace.rotary[1] or (None, None)
    assert cos is not None
    assert sin is not None
    assert cos.shape == sin.shape == (5, 2)
    close(cos[:, 0], [math.cos(t) for t in range(5)], 1e-6)  # a head's one pair, at wavelength 2 pi
    close(sin[:, 1], [math.sin(t) for t in range(5)], 1e-6)
    q = (trace.residual[0] @ toy._weights["0.q"][0])[0].unflatten(-1, (HEADS, 2)).transpose(0, 1)
    turned = torch.stack(
        [q[..., 0] * cos[:, 0] - q[..., 1] * sin[:, 0], q[..., 1] * cos[:, 0] + q[..., 0] * sin[:, 0]], -1
    )
    close(trace.attention[0].query[0], turned)


@pytest.mark.parametrize("site", ["query", "key", "value", "residual"])
@pytest.mark.parametrize("look", [LOOKS_LONG[0], LOOKS_LONG[3], AHEAD[0]], ids=named)
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
    else:
        for name in ("query", "key", "value"):
            factor = 2 if name == site else 1
            assert torch.equal(getattr(trace.attention[1], name), factor * getattr(plain.attention[1], name))
        # Recorded blocks keep the edits of the pass, whatever the stream.
        assert torch.equal(trace.blocks[1](trace.residual[1]), trace.residual[2])
        assert not torch.allclose(plain.blocks[1](trace.residual[1]), trace.residual[2])


@pytest.mark.usefixtures("unchecked")
def test_edits_that_cannot_be_made():
    toy = made()
    for edit, said in (
        (Edit("query", 2, torch.neg), "edit of block 2: the model has blocks 0 to 1"),
        (
            Edit("outputs", 0, torch.neg),
            "edit site 'outputs' does not exist; use residual, query, key, value or output",
        ),  # type: ignore[arg-type]
    ):
        with pytest.raises(InputError, match=said):
            toy.residual(toy.embed(TOKENS), edits=[edit])
        with pytest.raises(InputError, match=said):
            toy.trace(toy.embed(TOKENS), edits=[edit])


@pytest.mark.parametrize("look", LOOKS_LONG, ids=named)
def test_watchers_see_every_block_with_its_log_sum_exp(look):
    toy = made(**look)
    embeddings, found = toy.embed(TOKENS), []

    def watch(layer: int, attention: Attention) -> None:
        found.append(layer)
        assert attention.output is not None
        assert attention.normalizer is not None
        assert not attention.query.requires_grad
        close(attention.normalizer, attention.logits().logsumexp(-1))
        close(columns(attention, range(LENGTH)), attention.pattern())

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


def test_a_block_that_attends_elsewhere_does_not_go_unnoticed():
    class Deaf(Toy):
        def _mixed(self, query: Tensor, key: Tensor, value: Tensor, attended: Any, *, normalizer: bool) -> Tensor:
            return value  # as a family that runs its attention past the listener

    a = architecture()
    toy = Deaf(a, moved(a))
    embeddings = toy.embed(TOKENS[:1])
    with pytest.raises(RuntimeError, match="site 'attention' of block 0 never fired"), toy.watching(lambda *_: None):
        toy.residual(embeddings)
    with pytest.raises(RuntimeError, match="site 'attention' of block 0 never fired"):
        toy.trace(embeddings, attention=True)


def test_what_heads_write_and_final_norms():
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
        own = {name: w[0] for name, w in toy._weights.items()}
        expected = torch.stack([reference.toy_head(toy.architecture, own, row) for row in rows.flatten(0, 1)])
        close(toy.unembed(rows).flatten(0, 1), expected)
        close(toy.unembed(rows[0, 0]), expected[0])


def test_ids_that_no_class_stands_for_are_never_predicted():
    fewer = made(outputs=5)
    found = logits(fewer, TOKENS)
    assert found.shape == (4, LENGTH, VOCABULARY)
    assert bool((found[..., 5:] == -math.inf).all())
    assert bool(found[..., :5].isfinite().all())


@pytest.mark.parametrize("look", LOOKS_LONG, ids=named)
@pytest.mark.parametrize("norm", ["none", "rms", "layer"])
def test_parts_are_given_where_they_say_it_all(look, norm):
    for feed_forward, residual, projected in (
        (True, True, True),
        (False, True, True),
        (True, False, True),
        (True, True, False),
    ):
        toy = made(**look, norm=norm, feed_forward=feed_forward, residual=residual, output_projection=projected)
        whole = norm != "none" and feed_forward and residual and projected and toy.spec.prefix is None
        for layer in range(BLOCKS):
            assert (toy.parts(layer) is not None) == whole
        if not whole:
            continue
        trace = toy.trace(toy.embed(TOKENS[:1]))
        for layer in range(BLOCKS):
            parts = toy.parts(layer)
            assert parts is not None
            block = LinearizedBlock(parts, trace.residual[layer], trace.rotary[layer])
            close(block.output, trace.residual[layer + 1])
            assert parts.q.weight.data_ptr() == toy._weights[f"{layer}.q"].data_ptr()  # the model's own


def test_float32_is_float64_within_rounding():
    for look in LOOKS_LONG:
        a = architecture(**look, **STANDARD)
        fine = moved(a)
        coarse = Toy(a, {name: tensor.float() for name, tensor in fine.items()})
        assert coarse.dtype == torch.float32
        found, expected = logits(coarse, TOKENS), logits(Toy(a, fine), TOKENS)
        assert found.dtype == torch.float32
        close(found, expected, 1e-4)


# ---------------------------------------------------------------------------------------------------- starting afresh


def test_fresh_weights_are_those_of_their_seed():
    toy = made(positional="rope", norm="rms")
    fresh = toy.reinitialized(3)
    assert (fresh.identity.condition, fresh.identity.config) == ("init", toy.identity.config)
    assert (fresh.dtype, fresh.identity.name) == (torch.float64, "toy")
    for name, tensor in initial(toy.architecture, 3).items():
        assert torch.equal(fresh._weights[name][0], tensor.double())
    assert fresh.identity.weights != toy.reinitialized(4).identity.weights


@pytest.mark.parametrize("look", LOOKS_LONG, ids=named)
def test_without_positional_encoding_none_reaches_the_blocks(look):
    toy = made(**look).reinitialized(2, positional=False)
    plain = {name: value for name, value in look.items() if name != "decay"} | {"positional": "none"}
    weights = {name: w[0] for name, w in toy._weights.items() if name != "positions"}
    expected = Toy(architecture(**plain), weights)
    assert toy.identity.condition == "init-nope"
    assert toy.identity.config == made(**look).identity.config
    assert torch.equal(logits(toy, TOKENS), logits(expected, TOKENS))
    assert toy.trace(toy.embed(TOKENS)).rotary == (None,) * BLOCKS
    if look["positional"] == "learned":
        assert not toy._weights["positions"].any()
    again = toy.reinitialized(2)
    with_positions = made(**look).reinitialized(2)
    assert torch.equal(logits(again, TOKENS), logits(with_positions, TOKENS))


# --------------------------------------------------------------------------------------------------------- from training


def trained(a: Architecture, task: Any, steps: int = 2) -> Trained:
    return train([Run(a, task, seed=3)], steps)[0]


def test_a_trained_toy_of_tokens():
    task = Copying(vocabulary=VOCABULARY, length=LENGTH, target=-2, batch=8)
    one = trained(architecture(positional="learned"), task)
    toy = Toy.of(one)
    assert toy.identity.name == "toy of copying"
    assert toy.identity.condition == "pretrained"
    batched = {name: tensor[None] for name, tensor in one.weights.items()}
    expected = forward(one.run.architecture, batched, Switches.of([one.run.architecture]), TOKENS[None])[0]
    close(logits(toy, TOKENS)[:, -1], expected, 1e-5)
    assert Toy.of(one, name="mine").identity.name == "mine"


@pytest.mark.parametrize("data", ["gaussian", "fixed"])
def test_a_trained_toy_of_vectors_has_ids_for_classes_and_labels(data):
    task = InContext(items=4, width=8, classes=6, labels=3, burst=2, data=data, batch=8)
    a = Architecture(
        blocks=2, width=8, length=task.length, vocabulary=None, outputs=3, output_projection=False, head="mlp"
    )
    one = trained(a, task)
    toy, world = Toy.of(one), task.world(3, "cpu")
    assert toy.spec.vocabulary == 9
    ids = torch.tensor([[4, 6, 1, 8, 4, 6, 1, 8, 1]])
    items = torch.stack([world.means[n] for n in (4, 1, 4, 1, 1)])
    if data == "gaussian":
        items = items / math.sqrt(1 + task.eps**2)
    else:
        items = (items + task.anisotropy * world.common) / math.sqrt(1 + task.anisotropy**2)
    vectors = torch.zeros(1, 9, 8)
    vectors[0, 0::2] = items
    vectors[0, 1::2] = world.labels[torch.tensor([0, 2, 0, 2])]
    close(toy.embed(ids), vectors, 1e-6)
    assert torch.equal(toy.placed(vectors), vectors)
    found = logits(toy, ids)
    assert found.shape == (1, 9, 9)
    assert bool((found[..., :6] == -math.inf).all())
    close(found[0, -1, 6:], reference.toy_pass(a, one.weights, vectors[0])[1], 1e-5)
    # What ids stand for enters the hash, and stays with fresh weights.
    assert toy.identity.weights != Toy(a, one.weights).identity.weights
    fresh = toy.reinitialized(0)
    assert torch.equal(fresh.embed(ids), toy.embed(ids))
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


def test_weights_that_are_not_the_architecture_s():
    a = architecture(positional="learned")
    weights = initial(a, 0)
    cases = {
        "weight 'positions' has shape [12, 4], its architecture wants None": (architecture(), weights),
        "weight 'positions' has shape None, its architecture wants [12, 4]": (
            a,
            {name: w for name, w in weights.items() if name != "positions"},
        ),
        "weight '0.q' has shape [1, 4, 4], its architecture wants [4, 4]": (a, weights | {"0.q": weights["0.q"][None]}),
        "weights are float32 on cpu, float64 on cpu; give all in one dtype": (
            a,
            weights | {"0.q": weights["0.q"].double()},
        ),
    }
    for said, (architecture_, given) in cases.items():
        with pytest.raises(InputError) as refused:
            Toy(architecture_, given)
        assert said in str(refused.value)


def test_tables_and_ids_that_do_not_fit():
    words, vectors = architecture(), architecture(vocabulary=None)
    own = initial(vectors, 0)
    with pytest.raises(InputError, match="the toy has a vocabulary of 9; leave table out"):
        Toy(words, initial(words, 0), table=torch.zeros(9, 4))
    for table in (torch.zeros(9, 3), torch.zeros(8, 4), torch.zeros(9)):
        with pytest.raises(InputError, match=r"give vectors \[id, 4\], at least the 9 classes"):
            Toy(vectors, own, table=table)
    for bos in (-1, 9):
        with pytest.raises(InputError, match=f"bos={bos} is no token id; ids run from 0 to 8"):
            Toy(words, initial(words, 0), bos=bos)
    bare = Toy(vectors, own)
    assert bare.spec.vocabulary == 0
    with pytest.raises(InputError, match="reads vectors and has no token ids; give it table=, or vectors to `placed`"):
        bare.embed(TOKENS)
    with pytest.raises(InputError, match="reads token ids, not vectors; give them to `embed`"):
        Toy(words, initial(words, 0)).placed(torch.zeros(1, 3, 4))


def test_prompts_that_do_not_fit():
    toy = made()
    long = torch.zeros(1, LENGTH + 1, dtype=torch.long)
    for call in (lambda: toy.embed(long), lambda: toy.residual(torch.zeros(1, LENGTH + 1, WIDTH).double())):
        with pytest.raises(InputError, match="prompts have 13 positions, 'toy' was made for 12; give from 1 to 12"):
            call()
    with pytest.raises(InputError, match=r"embeddings have shape \[1, 3, 5\]; 'toy' takes \[prompt, position, 4\]"):
        toy.trace(torch.zeros(1, 3, 5).double())
    with pytest.raises(InputError, match="tokens have 13 positions, toy was made for 12"):
        probes.sinks(toy, long)


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


@pytest.mark.parametrize("query", [-1, 1, 6])
@pytest.mark.parametrize("other", [{}, STANDARD, {"residual": False, "head": "mlp", "norm": "layer"}])
@pytest.mark.parametrize("look", LOOKS_LONG, ids=named)
def test_exact_jacobians_are_brute_force(look, other, query):
    toy = made(**look, **other)
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
    if prefix > at + 1:
        assert felt[at + 1 : prefix].all()  # later positions of the prefix do matter


@pytest.mark.parametrize("look", [CAUSAL[3], *AHEAD[::3]], ids=named)
def test_pathways_of_toys(look):
    toy = made(**look)
    ds = probes.jacobian(toy, TOKENS[:1], query=2, pathway="all")
    cut = [Edit(site, layer, Tensor.detach) for layer in range(BLOCKS) for site in ("query", "key")]
    close(ds.sensitivity.sel(pathway="value")[0], brute_force(toy, TOKENS[0], 2, "residual", cut), 1e-9)
    close(ds.sensitivity.sel(pathway="total")[0], brute_force(toy, TOKENS[0], 2, "residual"), 1e-9)
    assert float(ds.sensitivity.sel(pathway="score").max()) > 0


@pytest.mark.parametrize("look", [{"mask": "causal"}, {"mask": "prefix", "prefix": 5, "positional": "rope"}], ids=str)
def test_sketches_of_toys_are_within_their_error(look):
    a = architecture(width=24, heads=2, **({"positional": "none"} | look))
    toy = Toy(a, moved(a))
    many = TOKENS[:1].expand(60, -1).contiguous()
    exact = probes.jacobian(toy, TOKENS[:1], query=3).sensitivity.values[0]
    ds = probes.jacobian(toy, many, query=3, method="sketch", products=12)
    there = exact > 0
    assert there.sum() == max(4, toy.spec.prefix or 0)
    covered = (np.abs(ds.sensitivity - exact) <= 1.96 * ds.stderr).values[:, there].mean()
    assert 0.85 <= covered <= 1
    close((ds.sensitivity**2).mean("prompt").values[there], exact[there] ** 2, 0.1)
    whole = probes.jacobian(toy, TOKENS[:1], query=3, method="sketch", products=24)
    close(whole.sensitivity[0], exact, 1e-9)


# ------------------------------------------------------------------------------------------------------- attention's probes


@pytest.mark.parametrize("look", LOOKS_LONG, ids=named)
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
    for layer in range(BLOCKS):
        moved_by = torch.zeros(HEADS).double()
        for prompt in TOKENS:
            before, after = (
                view.trace(view.embed(prompt[None]), attention=True).attention[layer].pattern()[0]
                for view in (toy, other)
            )
            moved_by += (before - after)[:, 2:end, 1:].abs().sum((1, 2)) / 2 / (end - 2) / len(TOKENS)
        close(ds.reacts[layer], moved_by)
    trace = toy.trace(toy.embed(TOKENS[:1]), attention=True)
    for picture in range(2):
        at = ds.isel(picture=picture)
        close(at.pattern, trace.attention[int(at.picture_layer)].pattern()[0, int(at.picture_head)], 1e-6)


def test_pictures_of_a_prefix_beyond_their_edge():
    a = architecture(length=150, mask="prefix", prefix=140)
    toy, tokens = Toy(a, moved(a)), torch.randint(VOCABULARY, (1, 150), generator=torch.Generator().manual_seed(1))
    ds = probes.sinks(toy, tokens, pictures=1)
    trace = toy.trace(toy.embed(tokens), attention=True)
    own = trace.attention[int(ds.picture_layer[0])].pattern()[0, int(ds.picture_head[0])]
    close(ds.pattern[0], own[:128, :128], 1e-6)


def test_one_key_for_everyone_is_the_causal_mask_bit_for_bit():
    """The first key is seen by all queries as it is: nothing may differ between the two masks."""
    others: list[dict[str, Any]] = [{}, {"positional": "rope"}]
    for other in others:
        causal, prefix = made(**other), made(mask="prefix", prefix=1, **other)
        for run in (
            lambda toy: probes.sinks(toy, TOKENS, keys="all", reacts="zero").drop_vars("tokens"),
            lambda toy: probes.sinks(toy, TOKENS).drop_vars("tokens"),
            lambda toy: probes.jacobian(toy, TOKENS, query=5).drop_vars("tokens"),
            lambda toy: probes.trajectory(toy, TOKENS, starts=4).drop_vars("tokens"),
        ):
            one, two = run(causal), run(prefix)
            for name in one.data_vars:
                np.testing.assert_array_equal(one[name].values, two[name].values)


@pytest.mark.parametrize("look", CAUSAL, ids=named)
def test_leakage_is_that_of_the_toy_s_own_logits(look):
    toy = made(**look)
    tokens = torch.randint(VOCABULARY, (6, LENGTH), generator=torch.Generator().manual_seed(2))
    ds = probes.leakage(toy, tokens, bands=BANDS, lags=LAGS, bootstrap=0)
    trace = toy.trace(toy.embed(tokens), attention=True)
    parts = ("total", "logits", "mask", "denominator", "covariance")
    for layer in range(BLOCKS):
        for head in range(HEADS):
            expected = reference.leakage(trace.attention[layer].logits()[:, head], *BANDS[1], LAGS)
            found = ds.sel(layer=layer, head=head).isel(band=1)
            close(found.log_form, [expected[part] for part in parts], 1e-8)
            close(found.log_source[:2], [expected["log mask"], expected["log residual"]], 1e-8)
            close(found.weight_source[:2], [expected["weight mask"], expected["weight residual"]], 1e-8)


@pytest.mark.parametrize("look", AHEAD, ids=named)
def test_leakage_needs_a_causal_mask(look):
    toy = made(**look)
    said = f"lets every query see a prefix of {toy.spec.prefix} positions, and leakage is split for causal masks alone"
    for call in (
        lambda: probes.leakage(toy, TOKENS, bands=BANDS, lags=LAGS),
        lambda: probes.bos_swap(toy, TOKENS, bands=BANDS, lags=LAGS),
    ):
        with pytest.raises(InputError, match=said):
            call()


@pytest.mark.parametrize("look", CAUSAL[1::2], ids=named)
def test_swaps_before_and_after(look):
    toy = made(**look)
    ds = probes.bos_swap(toy, TOKENS, replacement=3, bands=BANDS, lags=LAGS, bootstrap=4, products=4, profile_prompts=2)
    other = torch.cat([torch.full((4, 1), 3), TOKENS[:, 1:]], 1)
    for when, tokens in (("before", TOKENS), ("after", other)):
        expected = [
            reference.next_token_losses(rows.tolist(), ids.tolist())
            for rows, ids in zip(logits(toy, tokens), TOKENS, strict=True)
        ]
        close(ds[f"loss_{when}"][:-1], np.mean(expected, 0))
        close(ds[f"alpha_{when}"], probes.sinks(toy, tokens, keys=(0,)).alpha.isel(key=0).mean("prompt"))
        exact = [brute_force(toy, prompt, -1, "residual").numpy() for prompt in tokens[:2]]
        close(ds[f"sensitivity_{when}"], np.sqrt(np.mean(np.square(exact), 0)), 1e-9)
        leak = probes.leakage(toy, tokens, bands=BANDS, lags=LAGS, bootstrap=0)
        close(ds[f"leakage_{when}"], leak.log_form_by_block)


@pytest.mark.parametrize("replacement", ["mean", "zero", "random", 4])
def test_swapped_toys_are_views_of_their_own(replacement):
    toy = made(mask="prefix", prefix=4, positional="learned")
    other = probes.swapped(toy, replacement)
    assert isinstance(other, View)
    before, after = toy.embed(TOKENS), other.embed(TOKENS)
    assert torch.equal(before[:, 1:], after[:, 1:])
    expected = {
        "mean": toy._weights["embedding"][0].mean(0) + toy._weights["positions"][0, 0],
        "zero": torch.zeros(WIDTH).double(),
        4: toy._weights["embedding"][0, 4] + toy._weights["positions"][0, 0],
    }
    if replacement in expected:
        close(after[:, 0], expected[replacement].expand(4, -1))
    else:
        close(after[:, 0].norm(dim=-1), before[:, 0].norm(dim=-1))
    assert torch.equal(other.residual(after), toy.residual(after))


@pytest.mark.parametrize("look", LOOKS_LONG, ids=named)
def test_position_0_is_closed_under_a_causal_mask_alone(look):
    toy = made(**look)
    ds = probes.trajectory(toy, TOKENS, starts=5)
    later = ds.later_difference.values[0]
    assert later[0] == 0
    streams = torch.stack(toy.trace(toy.embed(TOKENS)).residual)[:, :, 0]  # [layer, prompt, d]
    mixed = torch.cat([TOKENS[:, :1], TOKENS.roll(-1, 0)[:, 1:]], 1)
    others = torch.stack(toy.trace(toy.embed(mixed)).residual)[:, :, 0]
    close(later, (streams - others).abs().amax((1, 2)))
    if toy.spec.prefix is None:
        assert not later.any()
    else:
        assert (later[1:] > 1e-3).all()
    close(ds.norm[0], np.sqrt(np.mean([[s.norm(dim=-1).pow(2) for s in twin(toy, p)[0]] for p in TOKENS], 0)), 1e-6)


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("look", [CAUSAL[0], CAUSAL[4], CAUSAL[8]], ids=named)
def test_the_theory_runs_where_there_are_parts(look, norm):
    """On a fresh toy wide enough for the theory's one assumption; profiles of single models scatter by a few percent."""
    toys = []
    a = architecture(width=64, heads=2, norm=norm, feed_forward=True, **look)
    tokens = TOKENS[:1]
    exact, predicted = [], []
    for seed in range(3):
        toys.append(Toy(a, {name: w.double() for name, w in initial(a, seed).items()}))
        exact.append(probes.jacobian(toys[-1], tokens).sensitivity.values[0])
        theory = probes.theory.second_moment(toys[-1], tokens, attention="measured", score_path=True)
        predicted.append(theory.sensitivity.values[0])
    truth, found = np.sqrt(np.mean(np.square(exact), 0)), np.sqrt(np.mean(np.square(predicted), 0))
    seen = truth > 0
    assert np.array_equal(found > 0, seen)
    assert np.abs(found[seen] / truth[seen] - 1).mean() < 0.1


def test_the_theory_says_where_it_cannot():
    for toy in (made(), made(mask="full", **STANDARD)):
        with pytest.raises(InputError, match="cannot be taken apart"):
            probes.theory.second_moment(toy, TOKENS)


# ------------------------------------------------------------------------------------------------------- left as they were


@pytest.mark.parametrize("look", [CAUSAL[1], AHEAD[0], AHEAD[-1]], ids=named)
def test_no_probe_changes_the_toy(look):
    toy = made(**look, **STANDARD)
    name, weights = snapshot(toy)
    before, state = logits(toy, TOKENS), copy.deepcopy({k: v for k, v in vars(toy).items() if k != "_weights"})
    probes.jacobian(toy, TOKENS, method="sketch", products=3, pathway="all", query=3)
    probes.sinks(toy, TOKENS, keys="all", reacts="mean", pictures=1)
    probes.trajectory(toy, TOKENS, starts=3)
    probes.swapped(toy, "mean").embed(TOKENS)
    if toy.spec.prefix is None:
        probes.leakage(toy, TOKENS, bands=BANDS, lags=LAGS, bootstrap=2)
        probes.bos_swap(toy, TOKENS, bands=BANDS, lags=LAGS, bootstrap=2, products=3)
        probes.theory.second_moment(toy, TOKENS)
    assert list(vars(toy)) == [*list(state), "_weights"] or set(vars(toy)) == {*state, "_weights"}
    assert all(torch.equal(toy._weights[key], weights[key]) for key in weights)
    assert Toy(toy.architecture, {key: w[0] for key, w in toy._weights.items()}).identity.weights == name
    assert torch.equal(logits(toy, TOKENS), before)


def test_loading_a_toy_gives_it_back():
    toy = made()
    assert probes.load(toy) is toy
    with pytest.raises(InputError, match="a transformers model, a TransformerBridge or a view"):
        probes.load(toy.architecture)


def test_statistics_of_columns_under_every_mask():
    """`total` from the key on, `over` from all that see it: from one toy's patterns of different masks."""
    for mask in MASKS:
        look: dict[str, Any] = mask | {name: 4 for name in ("window", "prefix") if name in mask}
        (first, _) = made(**look).trace(made().embed(TOKENS), attention=True).attention
        pattern, found = first.pattern(), column_statistics(first, 0.2)
        close(found.total, pattern.tril().sum(-2))
        close(found.over, (pattern > 0.2).double().sum(-2))


@pytest.mark.parametrize("window", [None, 1, 4, 20])
@pytest.mark.parametrize("prefix", [None, 1, 3, 11, 40])
def test_uniform_attention_under_every_mask(window, prefix):
    found = uniform_alpha(LENGTH, range(LENGTH), window, prefix)
    uniform = torch.zeros(1, LENGTH, LENGTH)
    truth = reference.sinks_of_keys([[uniform]], [window], prefix, threshold=0.3, tau=0.2)
    close(found, truth["uniform"][0])
