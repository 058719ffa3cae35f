"""Both adapters against the models' own outputs, hooks and gradients, on every family."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import families
import numpy as np
import pytest
import torch
from families import BLOCKS, FAMILIES, HEAD_DIM, HEADS, KV_HEADS, VOCABULARY, WIDTH, WINDOW, attention, blocks
from fingerprint import difference, fingerprint
from measured import BACKENDS, EVERY
from torch import Tensor, nn
from transformers import (
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

import probes
from probes.errors import InputError
from probes.models.huggingface import HuggingFaceView
from probes.models.lens import LensView, boot
from probes.models.view import Edit, View, causal_mask

# float32's rounding (6e-8), amplified by three blocks whose weights are twenty times wider than a real model's: 1e-5 of a
# tensor's scale is seen, and 3e-4 behind a softmax of logits around 60. A missing soft-cap, rotation or window costs 1e-1
# and more.
NOISE = 1e-3

LENGTH = 12  # longer than the windows
IDS = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(5))
GROUPED, COMMON = families._GROUPED, families._COMMON
UNCAPPED: dict[str, Any] = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": WINDOW}
UPPER: dict[str, Any] = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}

# What the families' default configurations leave out.
VARIANTS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama, heads of another width": lambda: LlamaConfig(**GROUPED, head_dim=24),
    "llama, biases": lambda: LlamaConfig(**GROUPED, attention_bias=True, mlp_bias=True),
    "llama, tied embeddings": lambda: LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "llama, yarn": lambda: LlamaConfig(**GROUPED, rope_parameters=families.YARN),
    "mistral, no window": lambda: MistralConfig(**GROUPED, sliding_window=None),
    "qwen2, windows above block 0": lambda: Qwen2Config(**GROUPED, **UPPER),
    "gemma2, no caps": lambda: Gemma2Config(**GROUPED, head_dim=HEAD_DIM, **UNCAPPED),
    "gpt2, scale by block": lambda: GPT2Config(**families.GPT2, scale_attn_by_inverse_layer_idx=True),
    "gpt_neox, one after the other, fully rotated": lambda: GPTNeoXConfig(
        **COMMON, use_parallel_residual=False, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}
    ),
}


@cache
def _original(name: str) -> PreTrainedModel:
    """The caller's model: with eager attention, which returns its patterns."""
    made = families.build((FAMILIES | VARIANTS)[name]())
    made.set_attn_implementation("eager")
    return made


def original(name: str) -> PreTrainedModel:
    """A copy for each caller: tests may change what they get."""
    return copy.deepcopy(_original(name))


@cache
def outputs(name: str) -> Any:
    with torch.no_grad():
        return original(name)(IDS, output_hidden_states=True, output_attentions=True, use_cache=False)


@cache
def view(name: str, backend: Any) -> Any:
    return probes.load(original(name), backend, tokenizer=families.tokenizer())


def output_projection(block: Any) -> Any:
    module = attention(block)
    return next(getattr(module, name) for name in ("o_proj", "c_proj", "dense") if hasattr(module, name))


def close(a: Tensor, b: Tensor, noise: float = NOISE) -> bool:
    """Whether the largest difference is within the noise floor, in units of b's own spread."""
    return a.shape == b.shape and bool((a - b).abs().max() <= noise * b.std())


def again(seen: View, a: Tensor, b: Tensor) -> bool:
    """Equal; but for rounding where gradients are kept for learned sink logits, which no kernel does."""
    return close(a, b) if seen.spec.sink_logits else torch.equal(a, b)


# ------------------------------------------------------------------------------------------------ what a model is


@pytest.mark.parametrize("name", FAMILIES)
def test_spec_identity_and_parts(name):
    both = [view(name, backend) for backend in BACKENDS]
    assert [type(seen) for seen in both] == [HuggingFaceView, LensView]
    for seen, backend in zip(both, BACKENDS, strict=True):
        assert isinstance(seen, View)
        spec = seen.spec
        assert (spec.family, spec.blocks, spec.heads, spec.width) == (name, BLOCKS, HEADS, WIDTH)
        assert spec.kv_heads == (HEADS if name in ("gpt2", "gpt_neox") else KV_HEADS)
        assert (spec.head_dim, spec.vocabulary) == (HEAD_DIM, VOCABULARY)
        assert (spec.max_length, spec.initializer_range) == (families.MAX_LENGTH, 0.5)
        assert spec.positional == (("learned",) if name == "gpt2" else ("rope",)) * BLOCKS
        windows = {"mistral": (WINDOW, WINDOW, WINDOW), **dict.fromkeys(("gemma2", "gpt_oss"), (WINDOW, None, WINDOW))}
        assert spec.windows == windows.get(name, (None, None, None))
        made = seen.identity
        assert (made.name, made.revision, made.condition) == (f"in-memory {name}", None, "pretrained")
        assert (made.backend, made.dtype, made.device) == (backend, "float32", "cpu")
        assert f'"model_type": "{name}"' in made.config
        assert (made.weights, made.config) == (both[0].identity.weights, both[0].identity.config)
    parts, none = (seen.parts(1) for seen in both)
    assert (parts.window, parts.head_dim, none) == (both[0].spec.windows[1], HEAD_DIM, None)


@pytest.mark.parametrize(
    ("name", "backend"), [("llama", BACKENDS[0]), ("gpt2", BACKENDS[1]), ("gpt_neox", BACKENDS[1])]
)
def test_one_changed_number_changes_the_weights_hash(name, backend):
    model = families.model(name)
    before = view(name, backend).identity.weights
    query = next(p for n, p in model.named_parameters() if "q_proj" in n or "c_attn" in n or "query_key_value" in n)
    bridge: Any = boot(families.model(name), name)  # one of fused projections runs copies of them, which may be changed
    with torch.no_grad():
        query.view(-1)[7] += 1e-3
        bridge.blocks[0].attn.q.original_component.weight[0, 0] += 1
    assert before not in (probes.load(model, backend).identity.weights, probes.load(bridge).identity.weights)


@pytest.mark.parametrize("backend", BACKENDS)
def test_unsupported_families_are_refused(backend):
    bloom = families.build(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2))
    says = "'bloom' is not supported; supported families: llama, mistral"
    assert says in families.refused(probes.load, bloom, backend)


# --------------------------------------------------------------------------------------------- what passes through


@pytest.mark.parametrize(("name", "backend"), [*EVERY, *((v, b) for v in VARIANTS for b in BACKENDS)])
def test_streams_logits_and_attention_are_the_model_s_own(name, backend):
    seen, own = view(name, backend), outputs(name)
    embeddings = seen.embed(IDS)
    plain, trace = seen.trace(embeddings), seen.trace(embeddings, attention=True)
    assert plain.attention == ()
    assert torch.equal(embeddings, own.hidden_states[0])
    assert len(trace.residual) == len(trace.attention) + 1 == BLOCKS + 1
    for stream, other, expected in zip(trace.residual, plain.residual, own.hidden_states[:-1], strict=False):
        assert torch.equal(stream, other)
        assert close(stream, expected)
    normed = seen.norm(trace.residual[-1])
    assert close(normed, own.hidden_states[-1])  # transformers gives the last one after the norm
    assert close(seen.unembed(normed), own.logits)
    assert again(seen, seen.residual(embeddings), trace.residual[-1])
    model = original(name)
    added: list[Tensor] = []
    for block in blocks(model):
        output_projection(block).register_forward_hook(lambda module, args, out: added.append(out))
    with torch.no_grad():
        model(IDS, use_cache=False)
        for layer, found in enumerate(trace.attention):
            assert close(trace.blocks[layer](trace.residual[layer]), trace.residual[layer + 1])
            assert found.query.shape == found.key.shape == found.value.shape
            assert found.query.shape[:3] == (2, HEADS, LENGTH)
            assert found.window == seen.spec.windows[layer]
            pattern = found.pattern()
            assert close(pattern, own.attentions[layer])
            allowed = causal_mask(LENGTH, found.window)
            assert not pattern[..., ~allowed].any()
            assert found.window is None or int(allowed.sum(-1).max()) == found.window == WINDOW
            # The values: mixed by the pattern and projected, they are what the model's attention adds to the stream.
            mixed = (pattern @ found.value).transpose(1, 2).flatten(2)
            assert close(output_projection(blocks(model)[layer])(mixed), added[layer])


@pytest.mark.parametrize("name", FAMILIES)
def test_backends_agree(name):
    first, second = (view(name, backend) for backend in BACKENDS)
    for length in (HEADS, KV_HEADS, 1, LENGTH):  # which axis is which may not be told from sizes
        embeddings = first.embed(IDS[:, :length])
        a, b = first.trace(embeddings, attention=True), second.trace(embeddings, attention=True)
        assert all(map(close, b.residual, a.residual))
        for one, two in zip(a.attention, b.attention, strict=True):
            assert all(close(getattr(two, part), getattr(one, part)) for part in ("query", "key", "value"))
            assert (two.softcap, two.window) == (one.softcap, one.window)
            assert two.scale == pytest.approx(one.scale, rel=1e-12)
        for pair, other in zip(a.rotary, b.rotary, strict=True):
            assert (pair is None) == (other is None) == (name == "gpt2")
            assert pair is None or all(map(torch.equal, pair, other))


# ------------------------------------------------------------------------------------------------------- edits


def edited_head(tensor: Tensor) -> Tensor:
    """Turns head 1 around at position 7; commutes with rotation, so a hook before it does the same."""
    tensor = tensor.clone()
    tensor[:, 1, 7] *= -0.5
    return tensor


def hook_head(name: str, module: Any, site: str) -> Any:
    """The same by a forward hook on the projection of the caller's model."""
    which = ("query", "key", "value").index(site)
    place: tuple[Any, ...] = (slice(None), 7, slice(HEAD_DIM, 2 * HEAD_DIM))
    if name == "gpt2":
        point, place = module.c_attn, (*place[:2], slice(which * WIDTH + HEAD_DIM, which * WIDTH + 2 * HEAD_DIM))
    elif name == "gpt_neox":
        point, place = module.query_key_value, (*place[:2], slice((3 + which) * HEAD_DIM, (4 + which) * HEAD_DIM))
    elif name == "qwen3" and site != "value":  # normed per head before rotation
        point, place = (module.q_norm if site == "query" else module.k_norm), (*place[:2], 1)
    else:
        point = getattr(module, f"{site[0]}_proj")

    def scale(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        output = output.clone()
        output[place] *= -0.5
        return output

    return point.register_forward_hook(scale)


@pytest.mark.parametrize("name", FAMILIES)
def test_edits_do_what_a_hook_would(name):
    model, both = original(name), [view(name, backend) for backend in BACKENDS]
    embeddings = both[0].embed(IDS)
    shift = torch.linspace(-1, 1, WIDTH)

    def change(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (args[0] + shift, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": kwargs["hidden_states"] + shift}

    for site in ("residual", "query", "key", "value"):
        for layer in (0, 2):
            block = blocks(model)[layer]
            if site == "residual":
                handle = block.register_forward_pre_hook(change, with_kwargs=True)
            else:
                handle = hook_head(name, attention(block), site)
            with torch.no_grad():
                normed = model(IDS, output_hidden_states=True, use_cache=False).hidden_states[-1]
            handle.remove()
            edits: list[Any] = [Edit(site, layer, (lambda x: x + shift) if site == "residual" else edited_head)]
            for seen in both:
                result = seen.residual(embeddings, edits=edits)
                assert close(seen.norm(result), normed), (site, layer)
                assert not close(result, seen.residual(embeddings)), (site, layer)
                # Once each, whatever else is recorded.
                assert again(seen, seen.trace(embeddings, edits=edits).residual[-1], result)
                assert again(seen, seen.trace(embeddings, edits=edits, attention=True).residual[-1], result)


@pytest.mark.parametrize(("name", "backend"), EVERY)
def test_edits_that_change_nothing_change_nothing_exactly(name, backend):
    seen = view(name, backend)
    embeddings = seen.embed(IDS)
    called: dict[str, torch.Size] = {}

    def identity(site: str) -> Callable[[Tensor], Tensor]:
        return lambda x: (called.update({site: x.shape}), x)[1]

    edits = [Edit(site, 1, identity(site)) for site in ("residual", "query", "key", "value", "output")]
    assert torch.equal(seen.residual(embeddings, edits=edits), seen.residual(embeddings))
    heads, per_key = ((2, count, LENGTH, HEAD_DIM) for count in (seen.spec.heads, seen.spec.kv_heads))
    shapes = {"query": heads, "key": per_key, "value": per_key, "output": heads}
    assert called == {"residual": (2, LENGTH, WIDTH)} | shapes


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


def use(seen: Any) -> None:
    """Everything a view can do, an edit function that raises included; nothing is left over from errors."""
    embeddings = seen.embed(IDS)
    first = seen.residual(embeddings)
    seen.trace(embeddings, attention=True)
    for site in ("residual", "query"):
        for call in (seen.residual, seen.trace):
            with pytest.raises(ZeroDivisionError):
                call(embeddings, edits=[Edit(site, 1, lambda x: x / (1 // 0))])
    assert seen.identity.weights
    seen.parts(0)
    seen.reinitialized(0, positional=False).residual(embeddings)
    assert torch.equal(seen.residual(embeddings), first)


@pytest.mark.parametrize("name", families.DIFFERENT)
def test_the_caller_s_model_bridge_and_tokenizer_stay_as_they_are(name, unchecked):
    model, bridge = families.model(name).train(), boot(families.model(name), name)
    model.set_attn_implementation("eager")
    next(model.parameters()).requires_grad_(False)
    bridge.blocks[1].hook_in.add_hook(lambda tensor, hook: None)
    tokenizer = families.tokenizer("end")
    known = (tokenizer.special_tokens_map, len(tokenizer), tokenizer.padding_side, tokenizer("w5").input_ids)
    given: list[Any] = [model, model, bridge]
    before = [fingerprint(one) for one in given]
    own, lens, seen = (
        probes.load(one, backend, tokenizer=tokenizer)
        for one, backend in zip(given, (*BACKENDS, "transformers"), strict=True)
    )
    for one in (own, lens, seen):
        use(one)
        assert one.tokenizer is tokenizer
    assert isinstance(seen, LensView)
    assert close(seen.residual(own.embed(IDS)), own.residual(own.embed(IDS)))
    narrow = probes.load(bridge, dtype="bfloat16")
    assert narrow.residual(narrow.embed(IDS)).dtype == torch.bfloat16
    assert (seen.identity.backend, narrow.identity.dtype) == ("transformer_lens", "bfloat16")
    for was, one in zip(before, given, strict=True):
        assert set(difference(was, fingerprint(one))) <= {"random numbers"}  # TransformerLens draws some
    assert (tokenizer.special_tokens_map, len(tokenizer), tokenizer.padding_side, tokenizer("w5").input_ids) == known


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


def test_two_views_of_one_model_do_not_meet():
    model = families.model("llama")
    first, second = probes.load(model), probes.load(model)
    embeddings = first.embed(IDS)
    plain = first.residual(embeddings)

    def within(tensor: Tensor) -> Tensor:
        assert torch.equal(second.residual(embeddings), plain)  # another view's pass within an edit of this one
        return tensor * 2

    changed = first.residual(embeddings, edits=[Edit("query", 1, within)])
    assert torch.equal(changed, first.residual(embeddings, edits=[Edit("query", 1, lambda x: x * 2)]))


# ------------------------------------------------------------------------------------------------- fresh weights

DTYPES: tuple[Any, Any] = ("float64", "bfloat16")


@pytest.mark.parametrize("backend", BACKENDS)
def test_fresh_weights_follow_from_the_seed_alone_in_every_dtype(backend):
    seen: Any = probes.load(families.model("qwen3"), backend, tokenizer=families.tokenizer(), revision="r1")
    numbers = (torch.get_rng_state().tolist(), str(np.random.get_state()))  # noqa: NPY002
    twin: Any = seen.reinitialized(0)
    other, *others = (probes.load(families.model("qwen3", seed=9), backend, dtype=d) for d in ("auto", *DTYPES))
    assert (torch.get_rng_state().tolist(), str(np.random.get_state())) == numbers  # noqa: NPY002
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
