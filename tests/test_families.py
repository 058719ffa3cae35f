"""What holds of every family, by the rows of `probes.models.families`: a row of your own is tested by naming it.

    python -m pytest tests/test_families.py tests/test_linear.py -k my_family

A row's small model is made of `families.small(name)`, with random weights, drawn wide (standard deviation 0.5).
`families.SPECIAL` says what the configuration has beside the usual sizes, `families.VARIANTS` what small models leave out.
Blocks linearized from their parts are in `test_linear`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import families
import pytest
import torch
from commands import call
from families import BLOCKS, FAMILIES, HEAD_DIM, HEADS, KV_HEADS, VARIANTS, VOCABULARY, WIDTH, WINDOW, attention, blocks
from measured import (
    BACKENDS,
    BOTH,
    BRUTE,
    EVERY,
    backends,
    brute,
    brute_model,
    drawn_tokens,
)
from measured import close as near
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedModel

import probes
from probes.models.families import FAMILIES as ROWS
from probes.models.families import REFUSED
from probes.models.huggingface import HuggingFaceView
from probes.models.lens import LensView
from probes.models.masks import causal_mask
from probes.models.swap import swapped
from probes.models.view import Edit, View

LENGTH = 12  # longer than the windows
IDS = drawn_tokens(2, LENGTH, least=3)
# float32's rounding (6e-8), amplified by three blocks whose weights are twenty times wider than a real model's: 1e-5 of a
# tensor's scale is seen, and 3e-4 behind a softmax of logits around 60. A missing soft-cap, rotation or window costs 1e-1
# and more.
NOISE = 1e-3


@cache
def _original(name: str) -> PreTrainedModel:
    """The caller's model: with eager attention, which returns its patterns."""
    made = families.model(name)
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


def close(a: Tensor, b: Tensor, noise: float = NOISE) -> bool:
    """Whether the largest difference is within the noise floor, in units of b's own spread."""
    return a.shape == b.shape and bool((a - b).abs().max() <= noise * b.std())


def again(seen: View, a: Tensor, b: Tensor) -> bool:
    """Equal; but for rounding where gradients are kept for learned sink logits, which no kernel does."""
    return close(a, b) if seen.spec.sink_logits else torch.equal(a, b)


# ------------------------------------------------------------------------------------------------------ what a model is


_FIRST_AND_LAST = dict.fromkeys(("gemma2", "gemma3_text", "olmo3", "gpt_oss"), (WINDOW, None, WINDOW))
WINDOWS = {"mistral": (WINDOW, WINDOW, WINDOW), "ministral": (None, WINDOW, None), **_FIRST_AND_LAST}
POSITIONAL = {"gpt2": ("learned",) * BLOCKS, "smollm3": ("rope", "none", "rope")}


@pytest.mark.parametrize("name", FAMILIES)
def test_spec_identity_and_parts(name):
    both = [view(name, backend) for backend in backends(name)]
    for seen, backend, kind in zip(both, BACKENDS, (HuggingFaceView, LensView), strict=False):
        assert type(seen) is kind
        assert isinstance(seen, View)
        spec = seen.spec
        assert (spec.family, spec.blocks, spec.heads, spec.width) == (name, BLOCKS, HEADS, WIDTH)
        assert spec.kv_heads == (HEADS if name in ("gpt2", "gpt_neox") else KV_HEADS)
        assert (spec.head_dim, spec.vocabulary) == (HEAD_DIM, VOCABULARY)
        assert (spec.max_length, spec.initializer_range) == (families.MAX_LENGTH, 0.5)
        assert spec.positional == POSITIONAL.get(name, ("rope",) * BLOCKS)
        assert spec.windows == WINDOWS.get(name, (None,) * BLOCKS)
        made = seen.identity
        assert (made.name, made.revision, made.condition) == (f"in-memory {name}", None, "pretrained")
        assert (made.backend, made.dtype, made.device) == (backend, "float32", "cpu")
        assert f'"model_type": "{name}"' in made.config
        assert (made.weights, made.config) == (both[0].identity.weights, both[0].identity.config)
    parts = both[0].parts(1)
    assert (parts.window, parts.head_dim) == (both[0].spec.windows[1], HEAD_DIM)
    assert both[-1].parts(1) is None or len(both) == 1


def output_projection(block: Any) -> Any:
    module = attention(block)
    return next(getattr(module, name) for name in ("o_proj", "c_proj", "dense") if hasattr(module, name))


# -------------------------------------------------------------------------------------------------- what passes through


@pytest.mark.parametrize(("name", "backend"), [*EVERY, *((v, b) for v in VARIANTS for b in backends(v))])
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


# ---------------------------------------------------------------------------------------------------------------- edits


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
    elif name == "phi3":  # queries of all heads, then keys, then values
        before = HEAD_DIM * (0, HEADS, HEADS + KV_HEADS)[which]
        point, place = module.qkv_proj, (*place[:2], slice(before + HEAD_DIM, before + 2 * HEAD_DIM))
    elif site != "value" and hasattr(module, "q_norm"):  # before rotation
        point = module.q_norm if site == "query" else module.k_norm
    else:
        point = getattr(module, f"{site[0]}_proj")

    def scale(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        output = output.clone()
        if output.ndim == 4:  # each head has its norm: [B, T, H, c], in Gemma 3 [B, H, T, c]
            output[(slice(None), 7, 1) if output.shape[1] == LENGTH else (slice(None), 1, 7)] *= -0.5
        else:
            output[place] *= -0.5
        return output

    return point.register_forward_hook(scale)


@pytest.mark.parametrize("name", FAMILIES)
def test_edits_do_what_a_hook_would(name):
    model, both = original(name), [view(name, backend) for backend in backends(name)]
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


# ---------------------------------------------------------------------------------------------------------- derivatives


@pytest.mark.parametrize("name", FAMILIES)
def test_the_exact_jacobian_is_autograd_s_through_the_whole_model(name):
    tokens, seen = drawn_tokens(1, LENGTH), HuggingFaceView(families.model(name, dtype=torch.float64))
    for readout in ("residual", "normed", "logits"):
        expected = brute(brute_model(name), tokens, LENGTH - 1, readout)
        for engine in ("auto", "autograd") if readout == "residual" else ("parts",):
            got = probes.jacobian(seen, tokens, readout=readout, engine=engine)
            near(got.sensitivity[0], expected, BRUTE[name])
            assert not got.stderr.any()
            assert got.attrs["engine"] == ("autograd" if engine == "autograd" else "parts")


# ------------------------------------------------------------------------------------------------------ position 0


@pytest.mark.parametrize(("name", "backend"), EVERY)
def test_only_position_0_is_replaced_and_a_token_swapped_for_itself_changes_nothing(name, backend):
    model, tokens = view(name, backend), drawn_tokens(4, 24, least=3)
    own, before = model.embed(tokens), tokens.clone()
    for replacement in (0, 17, "mean", "zero", "random"):
        found = swapped(model, replacement).embed(tokens)
        assert torch.equal(found[:, 1:], own[:, 1:])
        assert found.dtype == own.dtype
        assert not torch.equal(found[:, 0], own[:, 0])
    assert torch.equal(tokens, before)
    for token in (0, 17):  # id 0 is an id like any other; scales and learned positions are those of the position
        other = tokens.clone()
        other[:, 0] = token
        assert torch.equal(swapped(model, token).embed(tokens), model.embed(other))
    assert not swapped(model, "zero").embed(tokens)[:, 0].any()
    same = swapped(model, int(tokens[0, 0]))
    with torch.no_grad():  # no bit is changed by a token swapped for itself
        one, other = (seen.residual(seen.embed(tokens[:1])) for seen in (model, same))
    assert torch.equal(one, other)
    assert torch.equal(same.unembed(same.norm(other)), model.unembed(model.norm(one)))


# ----------------------------------------------------------------------------------------------- what is not supported


def test_the_command_lists_what_is_supported_and_what_is_refused_and_why(monkeypatch, capsys):
    assert call(monkeypatch, "families") == 0
    shown = capsys.readouterr().out
    assert all(
        re.search(rf"^ {kind} +{re.escape(row.models)} +(yes|no: )", shown, re.MULTILINE) for kind, row in ROWS.items()
    )
    for kind, why in REFUSED.items():
        assert re.search(rf"^ {kind} +{re.escape(why)} ", shown, re.MULTILINE), kind
        assert kind in CONFIG_MAPPING
    assert "model type 'mamba' is not supported: it has no " in families.refused(probes.born, {"model_type": "mamba"})


def test_variants_that_a_family_s_row_does_not_cover_are_refused():
    both_ways = families.small("gemma3_text", use_bidirectional_attention=True)
    assert "bidirectional: there is no mask" in families.refused(probes.load, families.build(both_ways))
    mixed: Any = families.small("qwen3_moe", mlp_only_layers=[1])
    assert "needs them in every block" in families.refused(probes.born, mixed)
    for name in set(FAMILIES) - set(BOTH):
        says = f"TransformerLens cannot run this {name}: {ROWS[name].no_lens}; use backend transformers"
        assert says in families.refused(probes.load, families.model(name), "transformer_lens")
