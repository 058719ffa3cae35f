"""Learned sink logits (gpt-oss): heads of known share, what they do to every measurement, and what experts share."""

from dataclasses import replace
from typing import Any

import families
import numpy as np
import pytest
import torch
from measured import TOKENS, close, drawn_tokens

import probes
from probes.measures.sinks import sinks
from probes.models.huggingface import HuggingFaceView
from probes.theory.block import routing_moments
from toy.recipes import RECIPES, recipe_config


def with_sinks(value: float) -> Any:
    """gpt-oss whose learned logits are one number."""
    model: Any = families.model("gpt_oss", dtype=torch.float64)
    with torch.no_grad():
        for block in families.blocks(model):
            block.self_attn.sinks.fill_(value)
    return HuggingFaceView(model)  # `load` takes no weights that are not finite


def test_a_logit_of_minus_infinity_is_none():
    silent = with_sinks(float("-inf"))
    for attention in silent.trace(silent.embed(TOKENS), attention=True).attention:
        close(attention.pattern().sum(-1), 1, 0, 1e-12)
    close(sinks(silent, TOKENS).sink_logit_share, 0, 0, 1e-12)


def test_a_large_logit_takes_everything():
    found = sinks(with_sinks(1e3), TOKENS, reacts="mean")
    for name, expected in (("sink_logit_share", 1), ("sink_logit_share_high", 1), ("alpha", 0), ("reacts", 0)):
        close(found[name], expected, 0, 1e-6)


def test_shares_of_equal_logits_are_those_of_one_more_key():
    """All logits 0, the learned one log 3: it takes 3 / (3 + i + 1) at query i."""
    seen, length = with_sinks(float(np.log(3))), 30
    with torch.no_grad():
        for block in seen._blocks:
            block.self_attn.q_proj.weight.zero_()
            block.self_attn.q_proj.bias.zero_()
    tokens = drawn_tokens(4, length)
    found = sinks(seen, tokens, keys=(0, 2))
    for layer, window in enumerate(seen.spec.windows):
        visible = np.minimum(np.arange(length) + 1, window or length)
        close(found.sink_logit_share[layer], np.mean(3 / (3 + visible[1:])), 1e-9)
        sees = np.arange(length) < (window or length)
        close(found.alpha[:, layer, :, 0], np.mean(sees / (3 + visible)), 1e-9)
    log_z = np.log(3 + np.arange(length) + 1.0)
    leaks = probes.leakage(seen, tokens, bands=[(9, 29)], lags=(1, 2), bootstrap=0, fresh=0)
    # Equal logits: all is the mask's, the learned logit in its denominators.
    close(leaks.log_form.sel(part=["total", "mask"])[:, 1, :, 0], np.var(log_z[9:30]), 1e-6)
    close(leaks.parties.sel(party="stream")[:, 1], 0, 0, 1e-9)


def test_keys_at_position_0_share_their_attention_with_learned_logits():
    says = r"part 'keys': position 0 .* shares its attention with .* learned sink logits, and would not keep its stream"
    with pytest.raises(probes.InputError, match=says):
        probes.swapped(with_sinks(0.5), "mean", part="keys")


def test_a_config_without_learned_logits_has_heads_without():
    with_, none = (recipe_config(RECIPES[name]) for name in ("tiny-sink-logits", "tiny-no-sink-logits"))
    seen, other = probes.fresh(none, seed=1), probes.fresh(with_, seed=1)
    assert (seen.spec.sink_logits, other.spec.sink_logits) == (False, True)
    tokens = drawn_tokens(1, 40)
    for attention in seen.trace(seen.embed(tokens), attention=True).attention:
        close(attention.pattern().sum(-1), 1, 1e-5)
    assert "sink_logit_share" not in sinks(seen, tokens)
    close(sinks(other, tokens).sink_logit_share, np.mean(1 / (np.arange(1, 40) + 2)), 0.1)  # logits near 0
    predicted = [probes.theory.second_moment_from_config(one, 40).sensitivity.values for one in (with_, none)]
    assert predicted[0][0] < 0.9 * predicted[1][0]  # less of position 0 is read


def test_what_two_positions_share_of_their_experts():
    normed = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)

    def moments(chosen: int, deviation: float) -> tuple[torch.Tensor, torch.Tensor]:
        made = probes.born(families.small("gpt_oss", num_experts_per_tok=chosen))
        return routing_moments(replace(made, router=deviation), normed)

    shared, turned = moments(1, 0.1)
    close(shared, [[1, 1, 0.25], [1, 1, 0.25], [0.25, 0.25, 1]], 0, 0.03)  # one of four, drawn apart
    close(turned, 0, 0, 1e-12)  # a weight of 1 that cannot change
    shared, turned = moments(4, 1e-9)
    close(shared, 0.25, 1e-6)  # all four alike
    close(turned.diagonal(), 0.25 * 0.75, 1e-6)


def test_float64_runs_though_grouped_products_do_not():
    model: Any = families.model("gpt_oss")
    model.set_experts_implementation("grouped_mm")
    wide, own = probes.load(model, dtype="float64"), probes.load(model)
    close(wide.residual(wide.embed(TOKENS)).detach(), own.residual(own.embed(TOKENS)).detach(), 1e-2, 1e-2)
