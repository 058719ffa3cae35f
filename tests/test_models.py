"""Both adapters: edits, hooks, bridges and fresh weights. `test_families` has what holds of every family."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import families
import pytest
import torch
from families import BLOCKS, FAMILIES, VOCABULARY, attention
from measured import BACKENDS
from torch import Tensor

import probes
from probes.errors import InputError
from probes.models.families import FAMILIES as ROWS
from probes.models.identity import weights_hash
from probes.models.lens import boot
from probes.models.view import Edit

# float32's rounding (6e-8), amplified by three blocks whose weights are twenty times wider than a real model's: 1e-5 of a
# tensor's scale is seen, and 3e-4 behind a softmax of logits around 60. A missing soft-cap, rotation or window costs 1e-1
# and more.
NOISE = 1e-3

LENGTH = 12  # longer than the windows
IDS = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(5))


@cache
def view(name: str, backend: Any) -> Any:
    return probes.load(families.model(name), backend, tokenizer=families.tokenizer())


def close(a: Tensor, b: Tensor, noise: float = NOISE) -> bool:
    """Whether the largest difference is within the noise floor, in units of b's own spread."""
    return a.shape == b.shape and bool((a - b).abs().max() <= noise * b.std())


# ------------------------------------------------------------------------------------------------ what a model is


@pytest.mark.parametrize("name", FAMILIES)
def test_the_weights_hash_says_which_matrix_stands_where(name):
    """Matrices of one shape exchanged, within a block (gate and up, keys and values) and between blocks."""
    model = families.model(name)
    seen: Any = probes.load(model)
    before = seen.identity.weights
    if ROWS[name].no_lens is None:
        assert probes.load(model, "transformer_lens").identity.weights == before
    shapes: dict[torch.Size, list[torch.nn.Parameter]] = {}
    for parameter in model.parameters():
        shapes.setdefault(parameter.shape, []).append(parameter)
    pairs = [pair for alike in shapes.values() for pair in itertools.pairwise(alike)]
    assert len(pairs) >= 2 * families.BLOCKS
    for a, b in pairs:
        a.data, b.data = b.data, a.data
        assert weights_hash(seen.stored()) != before
        a.data, b.data = b.data, a.data
    assert weights_hash(seen.stored()) == before


# ------------------------------------------------------------------------------------------------------- edits


@pytest.mark.parametrize("backend", BACKENDS)
def test_edits_act_in_order_gradients_pass_them_and_those_that_name_nothing_are_refused(backend, unchecked):
    seen = view("llama", backend)
    given = seen.embed(IDS).requires_grad_()
    twice = [Edit("value", 1, lambda x: x + 1), Edit("value", 1, lambda x: x * 3)]
    once = [Edit("value", 1, lambda x: (x + 1) * 3)]
    assert torch.equal(seen.residual(given, edits=twice), seen.residual(given, edits=once))
    cut = seen.residual(given, edits=[Edit("residual", 2, torch.Tensor.detach)])
    assert not cut.requires_grad or not torch.autograd.grad(cut.sum(), given, allow_unused=True)[0]
    recorded = seen.trace(given, attention=True, edits=once).attention[1].value
    plain = seen.trace(given, attention=True).attention[1].value
    assert torch.equal(recorded, (plain + 1) * 3)
    no_block = f"the model has blocks 0 to {BLOCKS - 1}"
    site: Any = "keys"
    for edit, says in (
        (Edit("key", -1, torch.neg), f"edit of block -1: {no_block}"),
        (Edit("residual", BLOCKS, torch.neg), f"edit of block {BLOCKS}: {no_block}"),
        (Edit(site, 0, torch.neg), "edit site 'keys' does not exist; use one of residual, query, key, value, "),
    ):
        for call in (seen.residual, seen.trace):
            assert says in families.refused(call, given, edits=[edit])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_site_that_never_fires_is_named(backend):
    # As in families whose attention does not go through the registered function (or, in bridges, past the hook points).
    seen: Any = probes.load(families.model("llama"), backend)
    module = attention(seen._blocks[1])
    vars(module)["forward"] = lambda hidden_states, *args, **kwargs: (hidden_states / 2, None)
    embeddings = seen.embed(IDS)
    assert torch.isfinite(seen.residual(embeddings)).all()
    assert len(seen.trace(embeddings).residual) == BLOCKS + 1
    with pytest.raises(RuntimeError, match=r"llama: site '(attention|query)' of block 1 never fired"):
        seen.trace(embeddings, attention=True)
    for site in ("query", "key", "value"):
        with pytest.raises(RuntimeError, match=r"llama: site '\w+' of block 1 never fired"):
            seen.residual(embeddings, edits=[Edit(site, 1, lambda x: x)])
    assert seen.parts(1) is None
    assert seen.residual(embeddings, edits=[Edit("residual", 1, lambda x: x)]).isfinite().all()


# ----------------------------------------------------------------------------------------------- nothing is changed


def test_a_bridge_s_hooks_are_measured_with_and_its_folded_weights_refused():
    bridge: Any = boot(families.model("llama"), "llama")
    plain = probes.load(bridge)
    embeddings = plain.embed(IDS)
    expected = plain.residual(embeddings, edits=[Edit("value", 1, torch.zeros_like)])
    bridge.blocks[1].attn.v.hook_out.add_hook(lambda tensor, hook: tensor * 0)
    assert close(probes.load(bridge).residual(embeddings), expected)
    bridge.enable_compatibility_mode()
    with pytest.raises(InputError, match="compatibility mode"):
        probes.load(bridge)


DROPPED: dict[str, tuple[str, dict[str, Any], str]] = {
    "scale": ("gpt2", {"scale_attn_weights": False}, "it scales logits in spite of scale_attn_weights=False"),
    "cap": ("gemma3_text", {"attn_logit_softcapping": 2.0}, "it reads attn_logit_softcapping=2.0"),
    "bias": ("gpt_neox", {"attention_bias": False}, "cannot run this gpt_neox"),
    "hook": ("gpt2", {}, r"its logits are \d.*% off"),
}


@pytest.mark.parametrize("what", DROPPED)
def test_a_bridge_that_runs_another_model_is_refused_and_transformers_measured(what):
    name, switch, says = DROPPED[what]
    model: Any = families.build(families.small(name, **switch), dtype=torch.float64)
    if what == "hook":
        attention(families.blocks(model)[1]).register_forward_hook(
            lambda module, args, output: (output[0] / 2, output[1])
        )
    with pytest.raises(InputError, match=says):
        probes.load(model, "transformer_lens")
    if what in ("scale", "cap"):  # one that the caller made
        bridge = boot(families.model(name), name)
        for key, value in switch.items():
            setattr(bridge.original_model.config, key, value)  # type: ignore[union-attr]
        with pytest.raises(InputError, match=says):
            probes.load(bridge)
    seen: Any = probes.load(model)
    traced = seen.trace(seen.embed(IDS), attention=True)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        own = model(IDS, output_attentions=True, use_cache=False)
    for found, pattern in zip(traced.attention, own.attentions, strict=True):
        assert (found.pattern() - pattern).abs().max() < NOISE
    assert close(seen.unembed(seen.norm(traced.residual[-1])), own.logits)


# ------------------------------------------------------------------------------------------------- fresh weights

DTYPES: tuple[Any, Any] = ("float64", "bfloat16")


@pytest.mark.parametrize("backend", BACKENDS)
def test_fresh_weights_follow_from_the_seed_alone_in_every_dtype(backend):
    seen: Any = probes.load(families.model("qwen3"), backend, tokenizer=families.tokenizer(), revision="r1")
    twin: Any = seen.reinitialized(0)
    other, *others = (probes.load(families.model("qwen3", seed=9), backend, dtype=d) for d in ("auto", *DTYPES))
    assert type(twin) is type(seen)
    assert len({one.identity.weights for one in (twin, seen, seen.reinitialized(1), other)}) == 4
    torch.manual_seed(77)
    assert other.reinitialized(0).identity.weights == twin.identity.weights
    own = {"weights": twin.identity.weights, "initialization": twin.identity.initialization}
    assert twin.identity == replace(seen.identity, condition="init", **own)
    assert (twin.spec, twin.tokenizer) == (seen.spec, seen.tokenizer)
    for dtype, one in zip(DTYPES, (narrow.reinitialized(0) for narrow in others), strict=True):
        assert str(one.dtype) == f"torch.{dtype}" == f"torch.{one.identity.dtype}"
        for first, second in zip(twin._model.parameters(), one._model.parameters(), strict=True):
            assert torch.equal(first.to(second.dtype), second)


@pytest.mark.parametrize(
    ("name", "backend"),
    [("llama", BACKENDS[0]), ("llama, yarn", BACKENDS[0]), ("gemma2", BACKENDS[1]), *(("gpt2", b) for b in BACKENDS)],
)
def test_without_positions_attention_sees_tokens_only(name, backend):
    seen = view(name, backend)
    twin, rotated = seen.reinitialized(0, positional=False), seen.reinitialized(0)
    assert twin.identity.condition == "init-nope"
    embeddings = twin.embed(IDS[:1, :6].repeat(1, 2))  # every token twice, six positions apart
    assert torch.equal(embeddings[:, :6], embeddings[:, 6:])
    found = twin.trace(embeddings, attention=True)
    first = found.attention[0]
    for tensor in (first.query, first.key, first.value):
        assert close(tensor[:, :, :6], tensor[:, :, 6:])
    # In block 0, the last position attends to a set: the order of those before it makes no difference.
    order = torch.randperm(5, generator=torch.Generator().manual_seed(1))
    ids, shuffled = IDS[:1, :6], torch.cat([IDS[:1, order], IDS[:1, 5:6]], 1)
    for made, alike in ((twin, True), (rotated, False)):
        before, after = (made.trace(made.embed(x)).residual[1][0, -1] for x in (ids, shuffled))
        assert close(after, before) == alike
    if name == "gpt2":  # weights are the same but for the zeroed positions
        table, bare = (dict(made._model.named_parameters()) for made in (rotated, twin))
        (zeroed,) = [n for n, p in bare.items() if not torch.equal(p, table[n])]
        assert not bare[zeroed].any()
    else:
        (cos, sin), (own, turned) = (x.trace(embeddings).rotary[0] for x in (twin, rotated))
        assert (cos - (own**2 + turned**2).sqrt()).abs().max() < 1e-6
        assert (cos - (1.1386294 if "yarn" in name else 1)).abs().max() < 1e-5  # its scaling stays: 0.1 ln 4 + 1
        assert not sin.any()
    again = twin.reinitialized(0)
    assert (again.identity.condition, again.identity.weights) == ("init", rotated.identity.weights)
