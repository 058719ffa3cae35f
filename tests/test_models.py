"""Both adapters against the models' own outputs, hooks and gradients, on every family."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from functools import cache
from typing import Any

import families
import numpy as np
import pytest
import torch
from families import BLOCKS, FAMILIES, HEAD_DIM, HEADS, KV_HEADS, VOCABULARY, WIDTH, WINDOW
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

BACKENDS = ("transformers", "transformer_lens")
EVERY = [(name, backend) for name in FAMILIES for backend in BACKENDS]

# float32's rounding (6e-8), amplified by three blocks whose weights are twenty times wider than a real model's: 1e-5 of a
# tensor's scale is seen, and 3e-4 behind a softmax of logits around 60. A missing soft-cap, rotation or window costs 1e-1
# and more.
NOISE = 1e-3

LENGTH = 12  # longer than the windows
IDS = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(5))


def grouped(**changes: Any) -> dict[str, Any]:
    return families._GROUPED | changes


# What the families' default configurations leave out.
VARIANTS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama, heads of another width": lambda: LlamaConfig(**grouped(), head_dim=24),
    "llama, biases": lambda: LlamaConfig(**grouped(), attention_bias=True, mlp_bias=True),
    "llama, tied embeddings": lambda: LlamaConfig(**grouped(), tie_word_embeddings=True),
    "llama, yarn": lambda: LlamaConfig(
        **grouped(),
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "mistral, no window": lambda: MistralConfig(**grouped(), sliding_window=None),
    "qwen2, windows above block 0": lambda: Qwen2Config(
        **grouped(), use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "gemma2, no caps": lambda: Gemma2Config(
        **grouped(), head_dim=HEAD_DIM, attn_logit_softcapping=None, final_logit_softcapping=None, sliding_window=WINDOW
    ),
    "gpt2, scale by block": lambda: GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=BLOCKS,
        n_head=HEADS,
        initializer_range=0.5,
        scale_attn_by_inverse_layer_idx=True,
        bos_token_id=1,
        eos_token_id=1,
    ),
    "gpt_neox, one after the other, fully rotated": lambda: GPTNeoXConfig(
        **families._COMMON, use_parallel_residual=False, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}
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


def decoder(model: Any) -> Any:
    return model.get_decoder()


def blocks(model: Any) -> Any:
    return next(child for child in decoder(model).children() if isinstance(child, nn.ModuleList))


def attention(block: Any) -> Any:
    return next(getattr(block, name) for name in ("self_attn", "attn", "attention") if hasattr(block, name))


def output_projection(block: Any) -> Any:
    module = attention(block)
    return next(getattr(module, name) for name in ("o_proj", "c_proj", "dense") if hasattr(module, name))


def final_norm(model: Any) -> Any:
    found = decoder(model)
    return next(getattr(found, name) for name in ("norm", "ln_f", "final_layer_norm") if hasattr(found, name))


def close(a: Tensor, b: Tensor, noise: float = NOISE) -> bool:
    """Whether the largest difference is within the noise floor, in units of b's own spread."""
    return a.shape == b.shape and bool((a - b).abs().max() <= noise * b.std())


# ------------------------------------------------------------------------------------------------ what a model is


@pytest.mark.parametrize(("name", "backend"), EVERY)
def test_spec_and_identity(name, backend):
    seen = view(name, backend)
    assert isinstance(seen, View)
    assert isinstance(seen, HuggingFaceView if backend == "transformers" else LensView)
    spec = seen.spec
    assert (spec.family, spec.blocks, spec.heads, spec.width) == (name, BLOCKS, HEADS, WIDTH)
    assert spec.kv_heads == (HEADS if name in ("gpt2", "gpt_neox") else KV_HEADS)
    assert (spec.head_dim, spec.vocabulary) == (HEAD_DIM, VOCABULARY)
    assert (spec.max_length, spec.initializer_range) == (families.MAX_LENGTH, 0.5)
    assert spec.positional == (("learned",) if name == "gpt2" else ("rope",)) * BLOCKS
    windows = {"mistral": (WINDOW, WINDOW, WINDOW), "gemma2": (WINDOW, None, WINDOW)}
    assert spec.windows == windows.get(name, (None, None, None))
    made = seen.identity
    assert (made.name, made.revision, made.condition) == (f"in-memory {name}", None, "pretrained")
    assert (made.backend, made.dtype, made.device) == (backend, "float32", "cpu")
    assert f'"model_type": "{name}"' in made.config


@pytest.mark.parametrize("name", FAMILIES)
def test_both_backends_have_the_same_weights_hash_and_config(name):
    first, second = (view(name, backend).identity for backend in BACKENDS)
    assert first.weights == second.weights
    assert first.config == second.config


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox"])
def test_one_changed_number_changes_the_weights_hash(name, backend):
    model = families.model(name)
    before = probes.load(model, backend).identity.weights
    assert before == probes.load(families.model(name), backend).identity.weights
    query = next(p for n, p in model.named_parameters() if "q_proj" in n or "c_attn" in n or "query_key_value" in n)
    with torch.no_grad():
        query.view(-1)[7] += 1e-3
    assert probes.load(model, backend).identity.weights != before


def test_a_bridge_s_own_projections_enter_the_weights_hash():
    # A bridge of fused projections runs copies of them; a lens user may change these.
    bridge: Any = boot(families.model("gpt2"), "gpt2")
    before = probes.load(bridge).identity.weights
    with torch.no_grad():
        bridge.blocks[0].attn.q.original_component.weight[0, 0] += 1
    assert probes.load(bridge).identity.weights != before


@pytest.mark.parametrize("backend", BACKENDS)
def test_unsupported_families_are_refused(backend):
    bloom = families.build(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2))
    with pytest.raises(InputError, match="'bloom' is not supported; supported families: llama, mistral"):
        probes.load(bloom, backend)


# --------------------------------------------------------------------------------------------- what passes through


@pytest.mark.parametrize(("name", "backend"), [*EVERY, *((v, b) for v in VARIANTS for b in BACKENDS)])
def test_streams_and_logits_are_the_model_s_own(name, backend):
    seen, own = view(name, backend), outputs(name)
    embeddings = seen.embed(IDS)
    trace = seen.trace(embeddings)
    assert torch.equal(embeddings, own.hidden_states[0])
    assert len(trace.residual) == BLOCKS + 1
    for stream, expected in zip(trace.residual, own.hidden_states[:-1], strict=False):
        assert close(stream, expected)
    normed = seen.norm(trace.residual[-1])
    assert close(normed, own.hidden_states[-1])  # transformers gives the last one after the norm
    assert close(seen.unembed(normed), own.logits)
    assert torch.equal(seen.residual(embeddings), trace.residual[-1])
    for layer, block in enumerate(trace.blocks):
        assert close(block(trace.residual[layer]), trace.residual[layer + 1])
    assert trace.attention == ()


@pytest.mark.parametrize(("name", "backend"), [*EVERY, *((v, b) for v in VARIANTS for b in BACKENDS)])
def test_recorded_attention_is_what_the_model_attends_with(name, backend):
    seen, own = view(name, backend), outputs(name)
    trace = seen.trace(seen.embed(IDS), attention=True)
    assert len(trace.attention) == BLOCKS
    for layer, found in enumerate(trace.attention):
        assert found.query.shape == found.key.shape == found.value.shape
        assert found.query.shape[:3] == (2, HEADS, LENGTH)
        assert found.window == seen.spec.windows[layer]
        pattern = found.pattern()
        assert close(pattern, own.attentions[layer])
        allowed = causal_mask(LENGTH, found.window)
        assert not pattern[..., ~allowed].any()
        if found.window is not None:
            assert int(allowed.sum(-1).max()) == found.window == WINDOW
        # The values: mixed by the pattern and projected, they are what the model's attention adds to the stream.
        model = original(name)
        block = blocks(model)[layer]
        added: list[Tensor] = []
        handle = output_projection(block).register_forward_hook(lambda module, args, out, to=added: to.append(out))
        with torch.no_grad():
            block_input = own.hidden_states[layer]
            model(IDS, use_cache=False)
            mixed = (pattern @ found.value).transpose(1, 2).flatten(2)
            projected = output_projection(block)(mixed)
        handle.remove()
        assert close(projected, added[0]), (layer, block_input.shape)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "rotated"), [("llama", 16), ("gpt_neox", 4), ("gpt2", 0)])
def test_queries_and_keys_are_recorded_after_rotation(name, rotated, backend):
    """Against the formula: dimensions i and i + r/2 are turned by t * 10000^(-2i/r)."""

    def turned(x: Tensor) -> Tensor:  # [B, H, T, c]
        if not rotated:
            return x
        angle = torch.arange(LENGTH)[:, None] * 10000.0 ** (-torch.arange(0, rotated, 2) / rotated)
        a, b, rest = x[..., : rotated // 2], x[..., rotated // 2 : rotated], x[..., rotated:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest], -1)

    model = original(name)
    module = attention(blocks(model)[1])
    caught: dict[str, Tensor] = {}
    names = ("q_proj", "k_proj", "c_attn", "query_key_value")
    points = [(point, getattr(module, point)) for point in names if hasattr(module, point)]
    handles = [
        part.register_forward_hook(lambda module, args, out, point=point: caught.update({point: out}))
        for point, part in points
    ]
    with torch.no_grad():
        model(IDS, use_cache=False)
    for handle in handles:
        handle.remove()
    if name == "llama":
        query, key = (caught[point].unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for point in ("q_proj", "k_proj"))
        key = key.repeat_interleave(HEADS // KV_HEADS, 1)
    elif name == "gpt2":
        query, key, _ = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in caught["c_attn"].chunk(3, -1))
    else:
        query, key, _ = caught["query_key_value"].unflatten(-1, (HEADS, -1)).transpose(1, 2).chunk(3, -1)
    seen = view(name, backend)
    found = seen.trace(seen.embed(IDS), attention=True).attention[1]
    assert close(found.query, turned(query))
    assert close(found.key, turned(key))


@pytest.mark.parametrize("length", [HEADS, KV_HEADS, 1, LENGTH])
@pytest.mark.parametrize("name", FAMILIES)
def test_backends_agree(name, length):
    # Lengths equal to the number of heads, too: which axis is which may not be told from sizes.
    first, second = (view(name, backend) for backend in BACKENDS)
    ids = IDS[:, :length]
    embeddings = first.embed(ids)
    assert torch.equal(embeddings, second.embed(ids))
    a, b = first.trace(embeddings, attention=True), second.trace(embeddings, attention=True)
    for stream, other in zip(a.residual, b.residual, strict=True):
        assert close(other, stream)
    for one, two in zip(a.attention, b.attention, strict=True):
        assert close(two.query, one.query)
        assert close(two.key, one.key)
        assert close(two.value, one.value)
        assert (two.softcap, two.window) == (one.softcap, one.window)
        assert two.scale == pytest.approx(one.scale, rel=1e-12)
    for pair, other in zip(a.rotary, b.rotary, strict=True):
        assert (pair is None) == (other is None) == (name == "gpt2")
        if pair is not None and other is not None:
            assert torch.equal(pair[0], other[0])
            assert torch.equal(pair[1], other[1])


@pytest.mark.parametrize(("name", "backend"), EVERY)
def test_gradients_are_the_model_s_own(name, backend):
    model = original(name)
    weight = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(2))
    start = outputs(name).hidden_states[0].clone().requires_grad_()
    last: list[Tensor] = []

    def inject(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return ((start, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": start})

    handles = [
        blocks(model)[0].register_forward_pre_hook(inject, with_kwargs=True),
        final_norm(model).register_forward_pre_hook(lambda module, args: last.append(args[0])),
    ]
    model(IDS, use_cache=False)
    for handle in handles:
        handle.remove()
    (own,) = torch.autograd.grad((last[0] * weight).sum(), start)

    seen = view(name, backend)
    given = seen.embed(IDS).requires_grad_()
    (gradient,) = torch.autograd.grad((seen.residual(given) * weight).sum(), given)
    assert own[:, 0].abs().max() > 0
    assert close(gradient, own)
    logits = seen.unembed(seen.norm(seen.residual(given)))
    assert torch.autograd.grad(logits[0, -1, 3], given)[0].abs().max() > 0


# ------------------------------------------------------------------------------------------------------- edits


def edited_head(head: int, position: int) -> Callable[[Tensor], Tensor]:
    """Turns one head around at one position; commutes with rotation, so a hook before it does the same."""

    def function(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[:, head, position] *= -0.5
        return tensor

    return function


def hook_heads(name: str, module: Any, site: str, head: int, position: int) -> Any:
    """The same by a forward hook on the projection of the caller's model."""
    which = ("query", "key", "value").index(site)
    at = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
    if name == "gpt2":
        point, at = module.c_attn, slice(which * WIDTH + at.start, which * WIDTH + at.stop)
    elif name == "gpt_neox":
        first = (3 * head + which) * HEAD_DIM
        point, at = module.query_key_value, slice(first, first + HEAD_DIM)
    elif name == "qwen3" and site != "value":  # normed per head before rotation
        point = module.q_norm if site == "query" else module.k_norm

        def scale(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            output = output.clone()
            output[:, position, head] *= -0.5
            return output

        return point.register_forward_hook(scale)
    else:
        point = getattr(module, f"{site[0]}_proj")

    def scale_flat(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        output = output.clone()
        output[:, position, at] *= -0.5
        return output

    return point.register_forward_hook(scale_flat)


@pytest.mark.parametrize(("name", "backend"), EVERY)
def test_edits_do_what_a_hook_would(name, backend):
    model, seen = original(name), view(name, backend)
    embeddings = seen.embed(IDS)
    plain = seen.trace(embeddings).residual[-1]
    shift = torch.linspace(-1, 1, WIDTH)

    def change(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (args[0] + shift, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": kwargs["hidden_states"] + shift}

    def hooks(site: str, layer: int) -> Any:
        block = blocks(model)[layer]
        if site == "residual":
            return block.register_forward_pre_hook(change, with_kwargs=True)
        return hook_heads(name, attention(block), site, 1, 7)

    for site in ("residual", "query", "key", "value"):
        for layer in (0, 2):
            function = (lambda x: x + shift) if site == "residual" else edited_head(1, 7)
            edits = [Edit(site, layer, function)]
            result = seen.residual(embeddings, edits=edits)
            handle = hooks(site, layer)
            with torch.no_grad():
                normed = model(IDS, output_hidden_states=True, use_cache=False).hidden_states[-1]
            handle.remove()
            assert close(seen.norm(result), normed), (site, layer)
            assert not close(result, plain), (site, layer)
            # Once each, whatever else is recorded.
            assert torch.equal(seen.trace(embeddings, edits=edits).residual[-1], result)
            assert torch.equal(seen.trace(embeddings, edits=edits, attention=True).residual[-1], result)


@pytest.mark.parametrize(("name", "backend"), EVERY)
def test_edits_that_change_nothing_change_nothing_exactly(name, backend):
    seen = view(name, backend)
    embeddings = seen.embed(IDS)
    plain = seen.residual(embeddings)
    called: list[tuple[str, torch.Size]] = []

    def identity(site: str) -> Callable[[Tensor], Tensor]:
        return lambda x: (called.append((site, x.shape)), x)[1]

    edits = [Edit(site, 1, identity(site)) for site in ("residual", "query", "key", "value", "output")]
    assert torch.equal(seen.residual(embeddings, edits=edits), plain)
    heads, kv = seen.spec.heads, seen.spec.kv_heads
    assert sorted(called) == sorted(
        [
            ("residual", (2, LENGTH, WIDTH)),
            ("query", (2, heads, LENGTH, HEAD_DIM)),
            ("key", (2, kv, LENGTH, HEAD_DIM)),
            ("value", (2, kv, LENGTH, HEAD_DIM)),
            ("output", (2, heads, LENGTH, HEAD_DIM)),
        ]
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_edits_of_one_site_act_in_order_and_gradients_pass_them(backend):
    seen = view("llama", backend)
    given = seen.embed(IDS).requires_grad_()
    twice = [Edit("value", 1, lambda x: x + 1), Edit("value", 1, lambda x: x * 3)]
    once = [Edit("value", 1, lambda x: (x + 1) * 3)]
    result = seen.residual(given, edits=twice)
    assert torch.equal(result, seen.residual(given, edits=once))
    cut = seen.residual(given, edits=[Edit("residual", 2, torch.Tensor.detach)])
    assert not cut.requires_grad or not torch.autograd.grad(cut.sum(), given, allow_unused=True)[0]
    recorded = seen.trace(given, attention=True, edits=once).attention[1].value
    plain = seen.trace(given, attention=True).attention[1].value
    assert torch.equal(recorded, (plain + 1) * 3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_edits_that_name_nothing_are_refused(backend, unchecked):
    seen = view("llama", backend)
    embeddings = seen.embed(IDS)
    for layer in (-1, BLOCKS):
        with pytest.raises(InputError, match=f"edit of block {layer}: the model has blocks 0 to {BLOCKS - 1}"):
            seen.residual(embeddings, edits=[Edit("key", layer, lambda x: x)])
        with pytest.raises(InputError, match=f"edit of block {layer}"):
            seen.trace(embeddings, edits=[Edit("residual", layer, lambda x: x)])
    site: Any = "keys"
    with pytest.raises(InputError, match="edit site 'keys' does not exist; use residual, query, key, value or output"):
        seen.residual(embeddings, edits=[Edit(site, 0, lambda x: x)])


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


def state(model: nn.Module) -> dict[str, Any]:
    """Everything a caller could notice."""

    def digest(tensor: Tensor) -> str:
        return hashlib.sha256(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()

    config: Any = getattr(model, "config", None) or getattr(model, "original_model").config  # noqa: B009
    return {
        "parameters": {
            name: (digest(p), p.data_ptr(), p.requires_grad, p.grad) for name, p in model.named_parameters()
        },
        "buffers": {name: digest(b) for name, b in model.named_buffers()},
        "modules": {
            name: (type(m), id(m), m.training, len(m._forward_hooks), len(m._forward_pre_hooks), sorted(vars(m)))
            for name, m in model.named_modules()
        },
        "config": (config.to_json_string(), config._attn_implementation),
    }


def use(seen: Any) -> Tensor:
    """Everything a view can do, an edit function that raises included; the last residual stream."""
    embeddings = seen.embed(IDS)
    seen.trace(embeddings, attention=True)
    given = embeddings.clone().requires_grad_()
    torch.autograd.grad(seen.residual(given).sum(), given)
    for site in ("residual", "query", "key", "value"):

        def fail(tensor: Tensor) -> Tensor:
            raise ZeroDivisionError

        for call in (seen.residual, seen.trace):
            with pytest.raises(ZeroDivisionError):
                call(embeddings, edits=[Edit(site, 1, fail)])
    assert seen.identity.weights
    assert seen.bos in (None, 0)
    seen.parts(0)
    seen.reinitialized(0, positional=False).residual(embeddings)
    return seen.residual(embeddings)


@pytest.mark.parametrize(("name", "backend"), EVERY)
def test_the_caller_s_model_stays_as_it_is(name, backend):
    model = families.model(name).train()
    model.set_attn_implementation("eager")
    next(model.parameters()).requires_grad_(False)
    tokenizer = families.tokenizer("end")
    before = state(model)
    known = (tokenizer.special_tokens_map, len(tokenizer), tokenizer.padding_side, tokenizer("w5").input_ids)
    seen = probes.load(model, backend, tokenizer=tokenizer)
    first = seen.residual(seen.embed(IDS))
    assert torch.equal(use(seen), first)  # nothing is left over from errors either
    assert state(model) == before
    assert (tokenizer.special_tokens_map, len(tokenizer), tokenizer.padding_side, tokenizer("w5").input_ids) == known
    assert seen.tokenizer is tokenizer


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "gpt_neox"])
def test_a_bridge_given_stays_as_it_is(name):
    bridge: Any = boot(families.model(name), name)
    heard: list[int] = []
    bridge.blocks[1].hook_in.add_hook(lambda tensor, hook: heard.append(1))
    before = state(bridge)
    seen = probes.load(bridge, tokenizer=families.tokenizer())
    assert isinstance(seen, LensView)
    use(seen)
    assert state(bridge) == before
    assert seen.identity.backend == "transformer_lens"
    own = view(name, "transformers")
    assert close(seen.residual(own.embed(IDS)), own.residual(own.embed(IDS)))


def test_a_bridge_in_another_dtype_is_a_copy():
    bridge: Any = boot(families.model("gemma"), "gemma")
    before = state(bridge)
    narrow = probes.load(bridge, dtype="bfloat16")
    assert narrow.residual(narrow.embed(IDS)).dtype == torch.bfloat16
    assert narrow.identity.dtype == "bfloat16"
    assert state(bridge) == before


def test_a_bridge_s_hooks_are_measured_with():
    bridge: Any = boot(families.model("llama"), "llama")
    plain = probes.load(bridge)
    embeddings = plain.embed(IDS)
    expected = plain.residual(embeddings, edits=[Edit("value", 1, torch.zeros_like)])
    bridge.blocks[1].attn.v.hook_out.add_hook(lambda tensor, hook: tensor * 0)
    hooked = probes.load(bridge)
    assert close(hooked.residual(embeddings), expected)


def test_a_bridge_with_folded_weights_is_refused(tmp_path):
    bridge: Any = boot(families.model("llama"), "llama")
    bridge.enable_compatibility_mode()
    with pytest.raises(InputError, match="compatibility mode"):
        probes.load(bridge)


def test_bridges_booted_by_transformer_lens_itself(tmp_path):
    from transformer_lens.model_bridge import TransformerBridge

    families.tokenizer("end").save_pretrained(tmp_path)
    from transformers import AutoTokenizer

    bridge = TransformerBridge.boot_transformers(
        str(tmp_path), hf_model=families.model("llama"), tokenizer=AutoTokenizer.from_pretrained(tmp_path), device="cpu"
    )
    seen = probes.load(bridge)
    own = view("llama", "transformers")
    assert close(seen.residual(own.embed(IDS)), own.residual(own.embed(IDS)))
    assert seen.tokenizer is not None
    assert seen.bos is None  # TransformerLens makes every tokenizer prepend; that says nothing about the training
    assert seen.reinitialized(0).bos is None


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


def rng_states() -> tuple[Any, ...]:
    # Not Python's own, from which beartype draws which items of a list it checks.
    return torch.get_rng_state().tolist(), str(np.random.get_state())  # noqa: NPY002


@pytest.mark.parametrize("name", FAMILIES)
def test_fresh_weights_follow_from_the_seed_alone(name):
    model = families.model(name)
    before, numbers = state(model), rng_states()
    seen = probes.load(model, tokenizer=families.tokenizer(), revision="r1")
    twin = seen.reinitialized(0)
    assert isinstance(twin, HuggingFaceView)
    hashes = {twin.identity.weights, seen.identity.weights, seen.reinitialized(1).identity.weights}
    assert len(hashes) == 3
    torch.manual_seed(77)
    again = probes.load(model, "transformer_lens").reinitialized(0)
    assert isinstance(again, LensView)
    assert again.identity.weights == twin.identity.weights
    lens = view(name, "transformer_lens")  # made here where no test before it asked for one
    torch.manual_seed(77)
    untouched = rng_states()[0]
    seen.reinitialized(3)
    lens.reinitialized(3)
    assert rng_states()[0] == untouched
    assert rng_states()[1:] == numbers[1:]
    assert state(model) == before
    for made in (twin, again):
        assert made.identity.condition == "init"
        assert made.identity.config == seen.identity.config
        assert made.spec == seen.spec
    assert (twin.identity.name, twin.identity.revision) == (seen.identity.name, "r1")
    assert twin.tokenizer is seen.tokenizer
    assert close(again.residual(twin.embed(IDS)), twin.residual(twin.embed(IDS)))
    # As the configuration has it: drawn 0.5 wide, norms and biases at rest.
    assert twin.embed(IDS).std() > 0.3


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_fresh_weights_are_drawn_once_for_all_dtypes(dtype):
    model = families.model("llama")
    twin = probes.load(model).reinitialized(0)
    other = probes.load(model, dtype=dtype).reinitialized(0)
    assert str(other.dtype) == f"torch.{dtype}"
    assert other.identity.dtype == dtype
    assert torch.equal(other.embed(IDS), twin.embed(IDS).to(other.dtype))
    for first, second in zip(twin._model.parameters(), other._model.parameters(), strict=True):  # type: ignore[attr-defined]
        assert torch.equal(first.to(second.dtype), second)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rotations_are_not_rounded_with_the_weights(backend):
    """Frequencies in bfloat16 would be off by up to 0.4 %: half a radian at position 127."""
    model = families.model("llama")
    ids = torch.arange(families.MAX_LENGTH)[None]
    wide = probes.load(model)
    expected = wide.trace(wide.embed(ids)).rotary[0]
    narrow = probes.load(model, backend, dtype="bfloat16")
    for seen in (narrow, narrow.reinitialized(0)):
        pair = seen.trace(seen.embed(ids)).rotary[0]
        assert pair is not None
        assert expected is not None
        assert torch.equal(pair[0], expected[0].bfloat16())
        assert torch.equal(pair[1], expected[1].bfloat16())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), EVERY)
def test_without_positions_attention_sees_tokens_only(name, backend):
    seen = view(name, backend)
    twin, rotated = seen.reinitialized(0, positional=False), seen.reinitialized(0)
    assert twin.identity.condition == "init-nope"
    ids = IDS[:1, :6].repeat(1, 2)  # every token twice, six positions apart
    embeddings = twin.embed(ids)
    assert torch.equal(embeddings[:, :6], embeddings[:, 6:])
    found = twin.trace(embeddings, attention=True)
    first = found.attention[0]
    for tensor in (first.query, first.key, first.value):
        assert close(tensor[:, :, :6], tensor[:, :, 6:])
    # In block 0, the last position attends to a set: the order of those before it makes no difference.
    order = torch.randperm(5, generator=torch.Generator().manual_seed(1))
    ids, shuffled = IDS[:1, :6], torch.cat([IDS[:1, order], IDS[:1, 5:6]], 1)
    before, after = (twin.trace(twin.embed(x)).residual[1][0, -1] for x in (ids, shuffled))
    assert close(after, before)
    before, after = (rotated.trace(rotated.embed(x)).residual[1][0, -1] for x in (ids, shuffled))
    assert not close(after, before)
    if name != "gpt2":
        for pair in found.rotary:
            assert pair is not None
            assert torch.equal(pair[1], torch.zeros_like(pair[1]))
            assert close(pair[0], torch.ones_like(pair[0]) + 0 * pair[0]) or (pair[0] - 1).abs().max() < 1e-6
    else:  # weights are the same but for the zeroed positions
        table = dict(rotated._model.named_parameters())
        zeroed = [n for n, p in twin._model.named_parameters() if not torch.equal(p, table[n])]
        assert len(zeroed) == 1
        assert "wpe" in zeroed[0] or "pos" in zeroed[0]
        assert not dict(twin._model.named_parameters())[zeroed[0]].any()
    again = twin.reinitialized(0)
    assert again.identity.condition == "init"
    assert again.identity.weights == rotated.identity.weights


def test_without_positions_yarn_s_scaling_of_logits_stays():
    seen = view("llama, yarn", "transformers")
    twin = seen.reinitialized(0, positional=False)
    (cos, sin), (own, turned) = (x.trace(x.embed(IDS)).rotary[0] for x in (twin, seen))
    factor = (own**2 + turned**2).sqrt()
    assert (factor - 1.1386294).abs().max() < 1e-5  # 0.1 ln 4 + 1
    assert (cos - factor).abs().max() < 1e-6
    assert not sin.any()


# ---------------------------------------------------------------------------------------------------------- BOS


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kind", "bos"), [("prepended", 0), ("dedicated", None), ("end", None), ("none", None)])
def test_bos_is_what_training_put_first(kind, bos, backend):
    model = families.model("llama")
    seen = probes.load(model, backend, tokenizer=families.tokenizer(kind))
    assert seen.bos == bos
    assert seen.reinitialized(0).bos == bos
    assert probes.load(model, backend).bos is None


# -------------------------------------------------------------------------------------------------- taking apart


@pytest.mark.parametrize("name", FAMILIES)
def test_parts_of_both_backends(name):
    parts = view(name, "transformers").parts(1)
    assert parts is not None
    assert parts.window == view(name, "transformers").spec.windows[1]
    assert parts.head_dim == HEAD_DIM
    assert view(name, "transformer_lens").parts(1) is None
