"""The effect of what a head takes from position 0, against hooks on the model itself, and on models of known answer."""

from __future__ import annotations

from typing import Any

import families
import numpy as np
import pytest
import torch
from made_toys import TOKENS as TOY_TOKENS
from made_toys import made
from measured import BACKENDS, LAYER_NORM, TOKENS, close, known_model, known_tokens, recorded, sinks, view
from torch import Tensor, nn

import probes
from probes.measures.sinks.roles import role_names
from probes.models.families import FAMILIES
from probes.models.view import Edit

HEADS = [(layer, head) for layer in range(families.BLOCKS) for head in range(families.HEADS)]


def log_p(model: Any, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens[None], use_cache=False).logits[0].double().log_softmax(-1)


def hooked(original: Any, layer: int, term: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities of the model with `term` [T, H c] taken from what its output projection reads."""
    family = FAMILIES[original.config.model_type]
    attention = getattr(getattr(original.get_decoder(), family.blocks)[layer], family.attention)

    def subtract(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0] - term.to(args[0]).reshape(args[0].shape), *args[1:])

    handle = getattr(attention, family.output).register_forward_pre_hook(subtract)
    try:
        return log_p(original, tokens)
    finally:
        handle.remove()


@torch.no_grad()
def expected(name: str) -> dict[str, np.ndarray]:
    """Of every prompt and head: the model run once more, whole, and divergence and loss entry by entry."""
    original: Any = families.model(name).double().eval()
    found = {what: np.zeros((len(TOKENS), families.BLOCKS, families.HEADS)) for what in ("effect", "loss_change")}
    for n, run in enumerate(recorded(view(name, dtype="float64"), TOKENS)):
        plain, length = log_p(original, TOKENS[n]), TOKENS.shape[1]
        for layer, head in HEADS:
            values = run["values"][layer]
            term = torch.zeros(length, families.HEADS, values.shape[-1], dtype=torch.float64)
            for i in range(1, length):
                term[i, head] = run["patterns"][layer][head][i, 0] * values[head, 0]
            changed = hooked(original, layer, term.flatten(1), TOKENS[n])
            assert torch.equal(changed[0], plain[0])
            kl = [(plain[i].exp() * (plain[i] - changed[i])).sum().item() for i in range(1, length)]
            following = [int(TOKENS[n, i + 1]) for i in range(1, length - 1)]
            loss = [(plain[i, t] - changed[i, t]).item() for i, t in enumerate(following, 1)]
            found["effect"][n, layer, head] = sum(kl) / len(kl)
            found["loss_change"][n, layer, head] = sum(loss) / len(loss)
    return found


@pytest.mark.parametrize("name", families.FAMILIES)
def test_effects_are_those_of_hooks_on_the_model_in_float64(name):
    found, truth = sinks(view(name, dtype="float64"), TOKENS, effect=True), expected(name)
    # RMS norms of transformers compute in float32: a batch of heads may round otherwise than a prompt alone.
    noise = 1e-10 if name in LAYER_NORM else 1e-6
    for what, each in truth.items():
        close(found[what], each.mean(0), noise, noise)
        close(found[f"{what}_by_prompt"], each, 1e-5, 1e-6)
    assert float(found.effect.min()) > 1e-4  # there is something to agree on


@pytest.mark.parametrize("name", ["gemma2", "gpt_neox"])
def test_both_backends(name):
    one, other = (sinks(view(name, backend), TOKENS[:1], effect="all") for backend in BACKENDS)
    for what in ("effect", "loss_change"):
        close(other[what], one[what], 1e-3, 1e-5)


def test_a_toy_with_a_prefix_of_inputs_that_see_each_other():
    toy = made(mask="prefix", prefix=4)
    found = sinks(toy, TOY_TOKENS, effect=True)
    plain = toy.unembed(toy.norm(toy.residual(toy.embed(TOY_TOKENS)))).log_softmax(-1)[:, 1:]
    trace = toy.trace(toy.embed(TOY_TOKENS), attention=True)
    term = trace.attention[1].pattern()[:, 0, 1:, :1] * trace.attention[1].value[:, 0, :1]

    def without(output: Tensor) -> Tensor:
        output = output.clone()
        output[:, 0, 1:] -= term
        return output

    removed = [Edit("output", 1, without)]
    changed = toy.unembed(toy.norm(toy.residual(toy.embed(TOY_TOKENS), edits=removed))).log_softmax(-1)[:, 1:]
    close(found.effect[1, 0], (plain.exp() * (plain - changed)).sum(-1).mean(), 1e-10)


# --------------------------------------------------------------------------------------------------- known answers


def test_a_head_without_a_value_at_0_has_no_effect():
    found = sinks(known_model(sink_value=[0] * 4, text_value=[0, 0, 5, 0], sharp=8.0), known_tokens(32), effect=True)
    assert (found.effect.item(), found.loss_change.item()) == (0, 0)
    assert role_names(found) == "parks"


def test_a_head_that_copies_what_stands_at_0_has_one():
    """No feed-forward and a plain norm: the effect is in closed form."""
    model: Any = known_model(sink_value=[0, 0, 6, 0], text_value=[0, 0, 0, 0], sharp=300.0)
    block = model._model.get_decoder().layers[0]
    with torch.no_grad():
        block.mlp.down_proj.weight.zero_()
        model._model.lm_head.weight.copy_(torch.eye(4))
    found = sinks(model, known_tokens(32), effect=True)
    before, after = torch.tensor([0.0, 1, 6, 0]).double(), torch.tensor([0.0, 1, 0, 0]).double()
    p, q = ((2 * x / x.norm()).log_softmax(-1) for x in (before, after))  # the norm makes vectors 2 long
    assert found.effect.item() == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-5)
    # The first prompt's next token is 1, the second's 2.
    assert found.loss_change.item() == pytest.approx(float(sum(p[t] - q[t] for t in (1, 2)) / 2), rel=1e-5)
    assert role_names(found) == "reads"


# ------------------------------------------------------------------------------------------------------ some of all


def test_the_first_heads_on_the_first_prompts():
    model = view("qwen2", dtype="float64")
    whole = sinks(model, TOKENS, effect=10**6)
    assert whole.effect.notnull().all()
    found = sinks(model, TOKENS, effect=3, effect_prompts=2)
    first = np.argsort(-whole.written.values, axis=None)[:3]
    measured = np.isfinite(found.effect.values)
    assert np.flatnonzero(measured).tolist() == sorted(first)
    assert np.isnan(found.effect_by_prompt[2]).all()
    each = found.effect_by_prompt.values[:2, measured]
    close(each, whole.effect_by_prompt.values[:2, measured], 1e-5)
    close(found.effect.values[measured], each.mean(0), 1e-5)
    assert (found.effect_low.values[measured] <= found.effect.values[measured]).all()
    assert (found.effect.values[measured] <= found.effect_high.values[measured]).all()


def test_small_batches_and_few_logits_at_once_change_nothing(monkeypatch):
    model = view("llama", dtype="float64")
    whole = sinks(model, TOKENS, effect=True)
    monkeypatch.setattr(probes.measures.sinks.effect, "ROWS", 1)
    monkeypatch.setattr(probes.measures.sinks.effect, "LOGITS_AT_ONCE", 1)
    close(sinks(model, TOKENS, effect=True).effect, whole.effect, 1e-6)
