"""Families whose blocks run whole, hybrids among them: numbers against transformers' eager attention, and refusals."""

from functools import cache
from itertools import product
from typing import Any

import families
import numpy as np
import pytest
import reference_heads
import torch
from families import HEADS, WHOLE, refused
from measured import brute, drawn_tokens
from torch import Tensor
from transformers import PreTrainedModel

import probes
from probes import headlines
from probes.measures import leakage, sinks
from probes.models.evict import evicted
from probes.models.identity import stored, weights_hash
from probes.models.view import Edit

LENGTH, OTHER = 14, 9  # OTHER: an id to put at position 0
IDS = drawn_tokens(6, LENGTH, least=3, first=0)
HYBRID = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
NOISE = 1e-5
LEFT_OUT = "3 of 5 layers (linear_attention) have no patterns and are left out; "
LEFT_OUT += "blocks are runs of layers that attend once, in layers 1, 3"

pytestmark = pytest.mark.filterwarnings("ignore:jacobian takes the slower engine")


def original(name: str) -> PreTrainedModel:
    made = families.build(families.small(name, initializer_range=0.3))
    made.set_attn_implementation("eager")
    return made


@cache
def view(name: str) -> Any:
    return probes.load(original(name), tokenizer=families.tokenizer())


def attending(model: Any) -> list[Any]:
    return [block.self_attn for block in families.blocks(model) if hasattr(block, "self_attn")]


@cache
def ran(name: str, first: int = 0) -> dict[str, Any]:
    """transformers' own pass with this id at position 0: patterns, and what W_O of each attention reads and gives."""
    model, read, given = original(name), list[Tensor](), list[Tensor]()
    for attention in attending(model):
        attention.o_proj.register_forward_pre_hook(lambda module, args: read.append(args[0]))
        attention.o_proj.register_forward_hook(lambda module, args, output: given.append(output))
    tokens = IDS.clone()
    tokens[:, 0] = first
    with torch.no_grad():
        own = model(tokens, output_attentions=True, output_hidden_states=True, use_cache=False)
    patterns = [pattern for pattern in own.attentions if pattern is not None]
    return {"patterns": patterns, "read": read, "given": given, "logits": own.logits, "streams": own.hidden_states}


@pytest.mark.parametrize("name", WHOLE)
def test_patterns_streams_and_logits_are_the_model_s_own(name):
    seen, own = view(name), ran(name)
    embeddings = seen.embed(IDS)
    trace = seen.trace(embeddings, attention=True)
    assert seen.spec.blocks == len(trace.attention) == len(own["patterns"]) == (2 if name in HYBRID else 3)
    begins = (0, 2) if name in HYBRID else (0, 1, 2)
    for layer, attention in enumerate(trace.attention):
        assert (attention.pattern() - own["patterns"][layer]).abs().max() < NOISE
        torch.testing.assert_close(trace.residual[layer], own["streams"][begins[layer]], rtol=NOISE, atol=10 * NOISE)
        assert torch.equal(trace.blocks[layer](trace.residual[layer]), trace.residual[layer + 1])
        mixed = attention.pattern() @ attention.value * (1 if attention.gate is None else attention.gate)
        written = torch.einsum("bhtc,hcd->btd", mixed, seen.output_weights(layer))
        torch.testing.assert_close(written, own["given"][layer], rtol=1e-4, atol=1e-4)
    logits = seen.unembed(seen.norm(trace.residual[-1]))
    torch.testing.assert_close(logits, own["logits"], rtol=1e-4, atol=1e-3)
    assert (trace.attention[0].gate is None) == (name not in HYBRID)
    assert "forward" not in vars(attending(seen.caller)[0])
    assert all(not part._forward_hooks and not hasattr(part, "gates") for part in seen.caller.modules())


@pytest.mark.parametrize("name", WHOLE)
def test_sinks_are_those_of_eager_patterns_and_of_what_w_o_reads(name):
    found, seen = probes.sinks(view(name), IDS, keys="all", reacts=OTHER), view(name)
    own, other, streams = ran(name), ran(name, OTHER), seen.trace(seen.embed(IDS)).residual
    trace = seen.trace(seen.embed(IDS), attention=True)
    for layer, head in np.ndindex(seen.spec.blocks, HEADS):
        pattern = own["patterns"][layer][:, head]
        alpha = [float(pattern[:, key:, key].mean()) for key in range(LENGTH)]
        np.testing.assert_allclose(found.alpha[layer, head], alpha, rtol=0, atol=NOISE)
        weights = seen.output_weights(layer)[head]
        read, changed = (x["read"][layer].unflatten(-1, (HEADS, -1))[:, :, head] for x in (own, other))
        attention = trace.attention[layer]
        gate = torch.ones_like(read) if attention.gate is None else attention.gate[:, head]
        of_0 = pattern[..., :1] * attention.value[:, head, :1] * gate
        hidden = pattern[..., 1:] @ attention.value[:, head, 1:] * gate / pattern[..., 1:].sum(-1, keepdim=True)
        beside, at_0 = streams[layer][:, 1:].norm(dim=-1), pattern[:, 1:, 0].double()
        taken, whole, change, elsewhere = (
            (x @ weights)[:, 1:].norm(dim=-1).double() for x in (of_0, read, read - changed, hidden)
        )
        expected = {n: (x / beside).square().mean() for n, x in (("written", taken), ("output", whole))}
        expected |= {"reads": taken.square().sum() / whole.square().sum()}
        expected |= {"reacts_output": (change / beside).square().mean()}
        for variable, square in expected.items():
            assert float(found[variable][layer, head]) == pytest.approx(float(square.sqrt()), rel=1e-3), variable
        squared = (at_0 * whole.square()).sum(-1) / (at_0 * elsewhere.square()).sum(-1)
        np.testing.assert_allclose(found.output_own_by_prompt[:, layer, head], squared.sqrt(), rtol=2e-3)


@pytest.mark.parametrize("name", WHOLE)
def test_leakage_is_that_of_eager_patterns(name):
    lags, band = (1, 2), (4, LENGTH - 1)
    found, seen = probes.leakage(view(name), IDS, bands=[band], lags=lags, fresh=0, bootstrap=0), view(name)
    for layer, head in product(range(seen.spec.blocks), range(HEADS)):
        logits = ran(name)["patterns"][layer][:, head].double().log()  # up to a constant of each query
        known = reference_heads.leakage(logits, *band, lags)["log_form"][0]
        ours = found.log_form.sel(part="total").isel(layer=layer, head=head, band=0)
        assert float(ours) == pytest.approx(known, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("name", WHOLE)
def test_edits_answers_and_derivatives_are_the_model_s(name):
    seen, model = view(name), original(name)
    silent: Any = attending(model)[1].o_proj
    handle = silent.register_forward_pre_hook(lambda module, args: (args[0] * 0,))
    with torch.no_grad():
        logits = model(IDS, use_cache=False).logits
        handle.remove()
        written = model.generate(IDS, max_new_tokens=3, do_sample=False, eos_token_id=None)
    edited = seen.residual(seen.embed(IDS), edits=[Edit("output", 1, torch.zeros_like)])
    torch.testing.assert_close(seen.unembed(seen.norm(edited)), logits, rtol=1e-4, atol=1e-3)
    assert np.array_equal(probes.sinks(seen, IDS, answer=3).tokens, written)
    jacobian = probes.jacobian(seen, IDS[:1], method="exact").sensitivity[0]
    np.testing.assert_allclose(jacobian, brute(original(name), IDS[:1], LENGTH - 1), rtol=1e-3)


def test_what_is_left_out_is_said_in_results_and_tables():
    found = {name: probes.sinks(view(name), IDS) for name in ("qwen3_next", "deepseek_v3")}
    assert [ds.attrs.get("unmeasured_layers") for ds in found.values()] == [LEFT_OUT, None]
    assert headlines.tables(sinks.MEASURE, found).lines[-1] == f"qwen3_next: {LEFT_OUT}."
    leaks = {"q": probes.leakage(view("qwen3_next"), IDS, fresh=0, bootstrap=20)}
    assert {row[4] for row in leakage.MEASURE.tables(leaks)[0].rows} == {"none"}
    assert "fails the check" not in leakage.MEASURE.answer(leaks)[0]


def test_what_these_families_cannot_be_asked_is_one_line():
    for name in WHOLE:
        whole, config = f"blocks of {name} run whole", families.small(name)
        assert whole in refused(probes.theory.second_moment, view(name), IDS[:1])
        assert whole in refused(probes.jacobian, view(name), IDS[:1], engine="parts")
        assert whole in refused(probes.born, config)
        if name == "qwen3_next":  # of which TransformerLens has a bridge
            assert whole in refused(probes.load, original(name), "transformer_lens")
        assert whole in refused(probes.fresh, config, residual_scale=0.5)
        assert "give initialization 'config'" in refused(view(name).reinitialized, 0, initialization="1/24")
        assert view(name).reinitialized(0, positional=False).identity.condition == "init-nope"
    cached = evicted(view("deepseek_v3"), 1, 4, renumbered=True)
    assert "cannot be numbered anew: its heads share one rotated key" in refused(probes.loss, cached, IDS)
    for name, why in (("gemma3n_text", "four streams"), ("mamba", "no softmax"), ("deepseek_v32", "indexer")):
        assert why in refused(probes.fresh, {"model_type": name})
    recurrent = families.small("qwen3_next", layer_types=["linear_attention"] * 5)
    assert "no layer with softmax attention" in refused(probes.fresh, recurrent)


@pytest.mark.parametrize("name", WHOLE)
def test_weights_are_hashed_by_the_names_that_transformers_has(name):
    seen = view(name)
    assert weights_hash(seen.stored()) == weights_hash(stored(original(name)))
    assert probes.sinks(seen, IDS).attrs["weights"]  # and the view runs on
