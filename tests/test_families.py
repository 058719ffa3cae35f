"""What holds of every family, by the rows of `probes.models.families`: a row of your own is tested by naming it.

    python -m pytest tests/test_families.py tests/test_linear.py -k my_family

A row's small model is made of `families.small(name)`, with random weights, drawn wide (standard deviation 0.5).
`families.SPECIAL` says what the configuration has beside the usual sizes, `families.VARIANTS` what small models leave out.
Blocks linearized from their parts are in `test_linear`.
"""

import itertools
import sys
from dataclasses import replace
from functools import cache, partial
from typing import Any

import families
import pytest
import torch
from families import BLOCKS, FAMILIES, HEAD_DIM, HEADS, KV_HEADS, VARIANTS, VOCABULARY, WIDTH, WINDOW, attention, blocks
from measured import BACKENDS, BOTH, BRUTE, EVERY, backends, brute, brute_model, drawn_tokens
from measured import close as near
from torch import Tensor, nn
from transformers import PreTrainedModel

import probes
from probes.models.families import FAMILIES as ROWS
from probes.models.huggingface import HuggingFaceView
from probes.models.identity import weights_hash
from probes.models.lens import LensView, boot
from probes.models.view import Edit, View, sees

LENGTH = 12  # longer than the windows
IDS = drawn_tokens(2, LENGTH, least=3)
# float32's rounding (6e-8), amplified by three blocks whose weights are twenty times wider than a real model's: 1e-5 of a
# tensor's scale is seen, and 3e-4 behind a softmax of logits around 60. A missing soft-cap, rotation or window costs 1e-1
# and more.
NOISE = 1e-3


def original(name: str) -> PreTrainedModel:
    """The caller's model: with eager attention, which returns its patterns."""
    made = families.model(name)
    made.set_attn_implementation("eager")
    return made


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
    assert close(seen.residual(embeddings), trace.residual[-1])
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
            allowed = sees(torch.arange(LENGTH)[:, None], torch.arange(LENGTH), found.window)
            assert not pattern[..., ~allowed].any()
            assert found.window is None or int(allowed.sum(-1).max()) == found.window == WINDOW
            # The values: mixed by the pattern and projected, they are what the model's attention adds to the stream.
            weights, bias = seen.output_weights(layer), output_projection(blocks(model)[layer]).bias
            written = torch.einsum("bhtc,hcd->btd", pattern @ found.value, weights)
            assert close(written if bias is None else written + bias, added[layer])
            assert not weights.requires_grad


def test_output_weights_are_what_the_projection_computes():
    model: Any = families.model("llama", dtype=torch.float64)
    projection = blocks(model)[1].self_attn.o_proj
    projection.register_forward_hook(lambda module, args, out: 3 * out)  # as an adapter may
    expected = 3 * projection.weight.detach().T.unflatten(0, (HEADS, HEAD_DIM))
    near(probes.load(model).output_weights(1), expected, 0, 1e-12)


def edited_head(tensor: Tensor) -> Tensor:
    """Turns head 1 around at position 7."""
    tensor = tensor.clone()
    tensor[:, 1, 7] *= -0.5
    return tensor


def edited_attention(
    eager: Any, site: str, layer: int, module: Any, query: Any, key: Any, value: Any, *more: Any, **named: Any
) -> Any:
    """What transformers' models call, of changed queries, keys or values."""
    given = {"query": query, "key": key, "value": value}
    if module.layer_idx == layer and site in given:
        given[site] = edited_head(given[site])
    return eager(module, *given.values(), *more, **named)


@pytest.mark.parametrize("name", FAMILIES)
def test_edits_do_what_the_model_does_of_changed_tensors(name, monkeypatch):
    model, both = original(name), [view(name, backend) for backend in backends(name)]
    embeddings, code = both[0].embed(IDS), sys.modules[type(model).__module__]
    shift, eager = torch.linspace(-1, 1, WIDTH), code.eager_attention_forward

    def change(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (
            ((args[0] + shift, *args[1:]), kwargs)
            if args
            else ((), kwargs | {"hidden_states": kwargs["hidden_states"] + shift})
        )

    for site, layer in itertools.product(("residual", "query", "key", "value"), (0, 2)):
        monkeypatch.setattr(code, "eager_attention_forward", partial(edited_attention, eager, site, layer))
        handle = blocks(model)[layer].register_forward_pre_hook(change, with_kwargs=True)
        if site != "residual":
            handle.remove()
        with torch.no_grad():
            normed = model(IDS, output_hidden_states=True, use_cache=False).hidden_states[-1]
        handle.remove()
        edits: list[Any] = [Edit(site, layer, (lambda x: x + shift) if site == "residual" else edited_head)]
        for seen in both:
            result = seen.residual(embeddings, edits=edits)
            assert close(seen.norm(result), normed), (site, layer)
            assert not close(result, seen.residual(embeddings)), (site, layer)
            # Once each, whatever else is recorded.
            assert close(seen.trace(embeddings, edits=edits).residual[-1], result)
            assert close(seen.trace(embeddings, edits=edits, attention=True).residual[-1], result)


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


def test_variants_that_a_family_s_row_does_not_cover_are_refused():
    both_ways = families.small("gemma3_text", use_bidirectional_attention=True)
    assert "its attention is bidirectional" in families.refused(probes.born, both_ways)
    unscaled: Any = boot(families.model("gpt2"), "gpt2")
    unscaled.original_model.config.scale_attn_weights = False
    assert "scale_attn_weights=False" in families.refused(probes.load, unscaled)
    mixed: Any = families.small("qwen3_moe", mlp_only_layers=[1])
    assert "needs them in every block" in families.refused(probes.born, mixed)
    for name in set(FAMILIES) - set(BOTH):
        says = families.refused(probes.load, families.model(name), "transformer_lens")
        assert says.startswith(f"TransformerLens cannot run this {name} (")
    says = families.refused(probes.load, families.model("olmo2"), "transformer_lens", dtype="bfloat16")
    assert says.startswith("TransformerLens cannot run this olmo2 (")


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
    for a, b in pairs:
        a.data, b.data = b.data, a.data
        assert weights_hash(seen.stored()) != before
        a.data, b.data = b.data, a.data
    assert weights_hash(seen.stored()) == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_edits_act_in_order_gradients_pass_them_and_those_that_name_nothing_are_refused(backend):
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
    site: Any = "keys"
    for edit, says in (
        (Edit("key", -1, torch.neg), "edit of block -1: the model has blocks 0 to 2"),
        (Edit("residual", BLOCKS, torch.neg), "edit of block 3: the model has blocks 0 to 2"),
        (Edit(site, 0, torch.neg), "edit site 'keys' does not exist; use one of residual, query, key, value, "),
    ):
        for run in (seen.residual, seen.trace):
            assert says in families.refused(run, given, edits=[edit])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_site_that_never_fires_is_named(backend):
    # As in families whose attention does not go through the registered function (or, in bridges, past the hook points).
    seen: Any = probes.load(families.model("llama"), backend)
    module = attention(seen._blocks[1])
    vars(module)["forward"] = lambda hidden_states, *args, **kwargs: (hidden_states / 2, None)
    embeddings = seen.embed(IDS)
    seen.trace(embeddings, edits=[Edit("residual", 1, lambda x: x)])
    with pytest.raises(RuntimeError, match=r"llama: site '(attention|query)' of block 1 never fired"):
        seen.trace(embeddings, attention=True)
    for site in ("query", "key", "value"):
        with pytest.raises(RuntimeError, match=r"llama: site '\w+' of block 1 never fired"):
            seen.residual(embeddings, edits=[Edit(site, 1, lambda x: x)])
    assert seen.parts(1) is None


def test_a_bridge_s_hooks_are_measured_with_and_its_folded_weights_refused():
    bridge: Any = boot(families.model("llama"), "llama")
    plain = probes.load(bridge)
    embeddings = plain.embed(IDS)
    expected = plain.residual(embeddings, edits=[Edit("value", 1, torch.zeros_like)])
    bridge.blocks[1].attn.v.hook_out.add_hook(lambda tensor, hook: tensor * 0)
    assert close(probes.load(bridge).residual(embeddings), expected)
    bridge.enable_compatibility_mode()
    with pytest.raises(probes.InputError, match="compatibility mode"):
        probes.load(bridge)


DROPPED: dict[str, tuple[str, dict[str, Any], str]] = {
    "scale": ("gpt2", {"scale_attn_weights": False}, r"its logits are \d.*% off"),
    "cap": ("gemma3_text", {"attn_logit_softcapping": 2.0}, r"its logits are \d.*% off"),
    "hook": ("gpt2", {}, r"its logits are \d.*% off"),
}


@pytest.mark.parametrize("what", DROPPED)
def test_a_bridge_that_runs_another_model_is_refused_and_transformers_measured(what):
    name, switch, says = DROPPED[what]
    model: Any = families.build(families.small(name, **switch), dtype=torch.float64)
    if what == "hook":
        attention(blocks(model)[1]).register_forward_hook(lambda module, args, out: (out[0] / 2, out[1]))
    with pytest.raises(probes.InputError, match=says):
        probes.load(model, "transformer_lens")
    seen: Any = probes.load(model)
    with torch.no_grad():
        own = model(IDS, use_cache=False).logits
    assert close(seen.unembed(seen.norm(seen.residual(seen.embed(IDS)))), own)


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
    first = twin.trace(embeddings, attention=True).attention[0]
    for tensor in (first.query, first.key, first.value):
        assert close(tensor[:, :, :6], tensor[:, :, 6:])
    # In block 0, the last position attends to a set: the order of those before it makes no difference.
    ids, shuffled = IDS[:1, :6], IDS[:1, [3, 0, 4, 2, 1, 5]]
    for made, alike in ((twin, True), (rotated, False)):
        before, after = (made.trace(made.embed(x)).residual[1][0, -1] for x in (ids, shuffled))
        assert close(after, before) == alike
    if name == "gpt2":  # weights are the same but for the zeroed positions
        table, bare = (dict(made._model.named_parameters()) for made in (rotated, twin))
        (zeroed,) = [n for n, p in bare.items() if not torch.equal(p, table[n])]
        assert not bare[zeroed].any()
    else:
        cos, sin = twin.trace(embeddings).rotary[0]
        assert (cos - (1.1386294 if "yarn" in name else 1)).abs().max() < 1e-5  # its scaling stays: 0.1 ln 4 + 1
        assert not sin.any()
    again = twin.reinitialized(0)
    assert (again.identity.condition, again.identity.weights) == ("init", rotated.identity.weights)
