"""Caches of the first and the last keys: against decoding token by token with a real cache."""

from itertools import product
from typing import Any

import families
import numpy as np
import pytest
import torch
from measured import close, drawn_tokens, known_model, known_tokens, refused, view
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from probes.headlines import numbers
from probes.measures.sinks import MEASURE, sinks
from probes.models import fused
from probes.models.evict import evicted

TOKENS = drawn_tokens(3, 24)
# Of logits that reach tens; cosines and sines are float32 in transformers, and a rotation is known no better.
NEAR = 1e-5


def decoded(model: Any, tokens: Tensor, first: int, last: int, *, renumbered: bool, value_0: bool = True) -> Tensor:
    """Log probabilities [position, id], token by token, from caches of which keys, or the value of key 0, are dropped.

    Keys are cached before rotation, and rotated to their place in the text, or in the cache as it is now.
    """
    decoder = model.get_decoder()
    caches: list[list[tuple[int, Tensor, Tensor]]] = [[] for _ in decoder.layers]
    found = []

    def rotated(x: Tensor, at: int) -> Tensor:  # [H, c]
        cos, sin = decoder.rotary_emb(x, torch.tensor([[at]]))
        return apply_rotary_pos_emb(x[None, :, None], x[None, :, None], cos, sin)[0][0, :, 0]

    for i, token in enumerate(tokens):
        stream = decoder.embed_tokens(token)
        for block, cache in zip(decoder.layers, caches, strict=True):
            own, normed = block.self_attn, block.input_layernorm(stream)
            q, k, v = (p(normed).view(-1, own.head_dim) for p in (own.q_proj, own.k_proj, own.v_proj))
            cache.append((i, k, v))
            if len(cache) > first + last:
                del cache[first]
                cache[0] = cache[0] if value_0 else (0, cache[0][1], 0 * v)
            places = range(len(cache)) if renumbered else [at for at, _, _ in cache]
            heads = []
            for head in range(len(q)):
                group = head // own.num_key_value_groups
                query = rotated(q, places[-1])[head]
                logits = [
                    query @ rotated(key, at)[group] * own.scaling for at, (_, key, _) in zip(places, cache, strict=True)
                ]
                weights = torch.stack(logits).softmax(0)
                heads.append(sum(weight * value[group] for weight, (_, _, value) in zip(weights, cache, strict=True)))
            stream = stream + own.o_proj(torch.cat(heads))
            stream = stream + block.mlp(block.post_attention_layernorm(stream))
        found.append(model.lm_head(decoder.norm(stream)).log_softmax(-1))
    return torch.stack(found)


def test_loss_and_divergence_are_those_of_a_cache_that_drops_keys_token_by_token(monkeypatch):
    monkeypatch.setattr(fused, "block_numbers", lambda _: 200)  # so few queries at a time that keys can be left out
    model, seen = families.model("llama", dtype=torch.float64), view("llama", dtype="float64")
    found = sinks(seen, TOKENS[:2], evict=(0, 2, 1), keep=(5, 22))
    truth = np.zeros((3, 2, 2, 2))  # first_keys, numbering, cache, (loss change, KL), of last_keys 5; of no value last
    with torch.no_grad():
        for tokens in TOKENS[:2]:
            own = decoded(model, tokens, 0, 99, renumbered=False)[:-1]
            for (a, first), b in product(enumerate((0, 2, 1)), (0, 1)):
                other = decoded(model, tokens, first, 5, renumbered=b == 1, value_0=first != 1)[:-1]
                change = (own - other).gather(-1, tokens[1:, None])[:, 0]
                kl = (own.exp() * (own - other)).sum(-1)
                for d, some in enumerate((slice(1, first + 5), slice(first + 5, None))):
                    truth[a, b, d] += [float(x[some].mean()) / 2 for x in (change, kl)]
    at = found.sel(last_keys=5)
    close(np.stack([at.evict_loss_change[:2], at.evict_kl[:2]], -1), truth[:2], NEAR, NEAR)
    close(np.stack([at.evict_value_loss_change, at.evict_value_kl], -1), truth[2], NEAR, NEAR)
    by_cache = at.sel(numbering="cache", cache="cut")
    told = {one.where: one.interval.value for one in numbers(MEASURE, found) if "lost keys" in one.name}
    worth = float(by_cache.evict_value_loss_change - by_cache.evict_loss_change[2])
    assert told["by the value of key 0 alone, last 5"] == pytest.approx(worth, rel=1e-4)
    for n, name in enumerate(("without key 0", "with the first 2 keys", "with key 0")):
        assert told[f"{name}, last 5"] == pytest.approx(by_cache.evict_loss_change[n].item(), rel=1e-4)
    # 2 + 22 keys are all that a prompt has: bit for bit the model as it is, and no position has lost any.
    whole = found.sel(first_keys=2, last_keys=22)
    assert (whole.evict_kl.sel(cache="whole") == 0).all()
    assert (whole.evict_loss_change.sel(cache="whole") == 0).all()
    assert whole.evict_kl.sel(cache="cut").isnull().all()
    close(found.evict_kl_by_prompt.mean("prompt"), found.evict_kl, 1e-6)  # kept in float32
    assert (found.evict_kl_low.sel(last_keys=5, cache="cut") >= 0).all()


def test_every_number_of_first_keys_is_a_headline_with_and_without_the_cache_of_one():
    found = sinks(view("llama"), TOKENS, evict=(0, 4), keep=(5,))
    told = [(one.where, one.interval.value) for one in numbers(MEASURE, found) if "lost keys" in one.name]
    each = found.evict_loss_change.sel(last_keys=5, cache="cut", numbering="cache").fillna(
        found.evict_loss_change.sel(last_keys=5, cache="cut", numbering="text")
    )
    assert [where for where, _ in told] == ["without key 0, last 5", "with the first 4 keys, last 5"]
    np.testing.assert_allclose([value for _, value in told], each, rtol=1e-4)


def test_keys_that_a_block_of_queries_has_lost_are_not_computed():
    model = evicted(view("llama"), 2, 5)
    found = model.trace(model.embed(TOKENS), attention=True).attention
    assert [one.kept_keys(16, 18).tolist() for one in found] == [[0, 1, *range(12, 18)]] * model.spec.blocks


@torch.no_grad()
def test_what_the_value_of_key_0_is_worth_in_closed_form():
    """Of 1 + 3 keys the first has the weight a; it writes u, the others write t, and the head reads the stream out."""
    model: Any = known_model(sink_value=[0, 0, 3, 0], text_value=[0, 0, 0, 2], sharp=2.0)
    model._model.get_decoder().layers[0].mlp.down_proj.weight.zero_()
    model._model.lm_head.weight.copy_(torch.eye(4))

    def log_p(first: Any, others: Any) -> Tensor:  # [query, id]; the norm makes vectors 2 long
        stream = torch.stack(torch.broadcast_tensors(*map(torch.as_tensor, (0.0, 1.0, 3 * first, 2 * others))), -1)
        return (2 * stream / stream.norm(dim=-1, keepdim=True)).double().log_softmax(-1)

    found = sinks(model, known_tokens(10), evict=(0, 1), keep=(3,)).sel(cache="cut", last_keys=3, numbering="text")
    a = np.exp(2) / (np.exp(2) + 3)
    whole = np.exp(2) / (np.exp(2) + np.arange(4, 9))  # of the queries that have lost keys
    p = log_p(whole, 1 - whole)
    for kl, q in ((found.evict_kl[1], log_p(a, 1 - a)), (found.evict_value_kl, log_p(0.0, 1 - a))):
        assert kl.item() == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4)


def test_what_has_positions_of_the_text_alone():
    for name in ("gpt2", "mistral"):  # learned positions; a window of its own, and a cache narrower than that
        found = sinks(view(name), TOKENS, evict=(0, 1), keep=(4,))
        assert found.evict_kl.sel(numbering="cache").isnull().all()
        assert (found.evict_kl.sel(numbering="text", cache="cut") > 0).all()
        with refused("cannot be numbered anew", "number positions by the text"):
            model = view(name)
            evicted(model, 1, 4, renumbered=True).residual(model.embed(TOKENS))
