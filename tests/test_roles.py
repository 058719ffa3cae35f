"""Roles of heads at the sink, what is sure of them, and what their reading does: twins, hooks and known answers."""

import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import families
import numpy as np
import pytest
import reference_heads
import torch
from measured import LAYER_NORM, TOKENS, behind, close, drawn_tokens, known_model, known_tokens, recorded, view
from torch import Tensor

import probes
from probes.measures.sinks import sinks
from probes.measures.sinks.roles import MEDIANS, ROLES, assigned, role_names, role_shares, sensitivity_rows
from probes.models.swap import swapped
from probes.models.view import View
from probes.results.statistics import Interval, jackknifed


def expected(model: View, tokens: Any, other: View) -> dict[str, np.ndarray]:
    """Sizes of every prompt [prompt, layer, head], entry by entry in float64."""
    found: dict[str, list[float]] = {}
    for prompt, own, after in zip(tokens, recorded(model, tokens), recorded(other, tokens), strict=True):
        streams = model.trace(model.embed(prompt[None])).residual
        for layer, head in np.ndindex(families.BLOCKS, families.HEADS):
            (pattern, value), (new, moved) = (
                (x["patterns"][layer][head], x["values"][layer][head]) for x in (own, after)
            )
            weights, window = model.output_weights(layer)[head].double(), model.spec.windows[layer]
            stream, swap = streams[layer][0].double(), new.double() @ moved @ weights
            learned = own["learned"][layer][head]
            norm = behind(model, own, layer)
            sizes = reference_heads.written_beside(
                pattern.double(), value @ weights, stream, window, swap, learned, norm
            )
            for name, size in sizes.items():
                found.setdefault(name, []).append(size)
    return {name: np.reshape(sizes, (len(tokens), families.BLOCKS, families.HEADS)) for name, sizes in found.items()}


@pytest.mark.parametrize("name", families.FAMILIES)
def test_sizes_equal_full_patterns_in_float64(name):
    model = view(name, dtype="float64")
    found, truth = sinks(model, TOKENS, reacts="mean"), expected(model, TOKENS, swapped(model, "mean"))
    for size, each in truth.items():
        close(found[size], np.sqrt(np.mean(each**2, 0)), 1e-10, 1e-13)
        close(found[f"{size}_by_prompt"], each, 1e-6)
    for size in ("attends", "reacts"):
        close(found[size], found[f"{size}_by_prompt"].mean("prompt"), 1e-5)
    if name in ("gemma2", "olmo2", "gpt2"):
        other = sinks(view(name, "transformer_lens"), TOKENS, reacts="mean")
        for size in truth:
            close(other[size], found[size], 1e-3)


# -------------------------------------------------------------------------------------------------- known answers


def role(found: Any) -> str:
    return str(role_names(found)[0, 0])


def test_a_head_without_a_value_at_0_parks():
    """Its output is (1 - A_i0) of what it would be, and nothing comes from position 0."""
    model = known_model(sink_value=[0, 0, 0, 0], text_value=[0, 0, 5, 0], sharp=8.0)
    found = sinks(model, known_tokens(64), effect=True)
    weights = 1 / (1 + np.arange(1, 64) * np.exp(-8.0))
    close(found.alpha[:, 0, 0, 0], (1 + weights.sum()) / 64, 1e-5)
    assert (role(found), found.written.item()) == ("parks", 0)
    assert (found.reads.item(), found.effect.item(), found.loss_change.item()) == (0, 0, 0)
    own = np.sqrt(np.sum(weights * (1 - weights) ** 2) / np.sum(weights))
    assert found.output_own.item() == pytest.approx(own, rel=1e-4)
    assert found.output.item() == pytest.approx(np.sqrt(np.mean(25 * (1 - weights) ** 2)), rel=1e-4)  # |x_i| = 1
    # 1 - A_i0 is 0 in float32: what it would write elsewhere is known all the same.
    found = sinks(known_model(sink_value=[0, 0.05, 0, 0], text_value=[0, 0, 5, 0], sharp=300.0), known_tokens(64))
    assert found.attends.item() == 1
    assert found.output_own.item() == pytest.approx(0.01, rel=1e-4)
    # Alone in its block it is the median itself.
    assert (role(found), found.reads.item(), found.written_median.item()) == ("reads", *[pytest.approx(1)] * 2)


@torch.no_grad()
def test_a_stream_of_zeros_has_no_size_beside_it():
    model: Any = known_model(sink_value=[0, 2, 0, 0], text_value=[0, 0, 1, 0], sharp=8.0)
    model._model.get_input_embeddings().weight[2] = 0
    found = sinks(model, known_tokens(8))
    close(found.written_by_prompt[1], 0, 0)
    assert found.written_by_prompt[0].item() > 0


# ------------------------------------------------------------------------------------------------------ what is sure


SURELY = {name: (0.05, 0.04, 0.06) for name in ("reads", "written_median", "reacts", "reacts_output")}
SURELY |= {"attends": (0.9, 0.8, 1.0), "output_own": (0.8, 0.7, 0.9)}
READS = {"reads": (0.5, 0.4, 0.6), "written_median": (2.0, 1.5, 2.5)}
PARKS = {"output_own": (0.1, 0.05, 0.2)}


def given(changed: dict[str, tuple[float, float, float]]) -> tuple[str, bool]:
    """The role of a head with these numbers and intervals, and whether it is sure."""
    made: Any = {name: Interval(*(np.array([[x]]) for x in ends)) for name, ends in (SURELY | changed).items()}  # type: ignore[arg-type]
    roles, known = assigned(made)
    (role,) = (name for name, has in zip(ROLES, roles[:, 0, 0], strict=True) if has)
    return role, bool(known.item())


@pytest.mark.parametrize(
    ("changed", "is_role", "sure"),
    [
        ({}, "ignores", True),
        (READS, "reads", True),
        (READS | {"reads": (0.5, 0.2, 0.6)}, "reads", False),
        (READS | {"written_median": (1.1, 0.9, 1.3)}, "reads", False),
        (PARKS, "parks", True),
        (PARKS | {"attends": (0.4, 0.2, 0.6)}, "parks", False),
        (PARKS | READS | {"written_median": (0.95, 0.9, 1.1)}, "parks", False),
        (PARKS | READS | {"reads": (0.25, 0.2, 0.35), "written_median": (0.5, 0.4, 0.6)}, "parks", True),
        ({"output_own": (0.4, 0.2, 0.6)}, "ignores", False),
        ({"output_own": (0.4, 0.2, 0.6), "attends": (0.1, 0.0, 0.2)}, "ignores", True),
        ({"reads": (0.05, math.nan, math.nan), "written_median": (2.0, 1.5, 2.5)}, "ignores", False),
        ({"reacts": (0.2, 0.15, 0.3)}, "reacts", True),
        ({"reacts_output": (0.2, 0.05, 0.3)}, "reacts", False),
    ],
)
def test_roles_and_whether_they_are_sure(changed, is_role, sure):
    assert given(changed) == (is_role, sure)


def test_shares_of_roles_are_those_of_resampled_documents():
    """Ten heads at the edge: half of the documents have them read, the other half not."""
    one, model = np.ones((8, 1, 10)), view("llama")
    reads = np.stack([np.arange(8)[:, None, None] % 2 * one * np.linspace(0.01, 0.4, 10), one], 1)
    found = {"attends": one, "output_own": one, "reads": reads, "written_median": np.stack([one, one], 1)}
    share = role_shares(found, None)
    assert share.value[0] == np.mean(np.linspace(0.01, 0.4, 10) / 2 > 0.3**2)
    assert 0 <= share.low[0] < share.value[0] < share.high[0] < 1
    assert share.value.sum() == pytest.approx(1)
    same = role_shares(found, ["a"] * 4 + ["b"] * 4)  # two documents that do the same
    assert same.low[0] == same.value[0] == same.high[0]
    ds = sinks(model, drawn_tokens(6))
    close(ds.role_share, ds.has_role.mean(("layer", "head")), 1e-12)
    assert (ds.role_share_low <= ds.role_share).all()
    assert np.isnan(sinks(model, TOKENS[:1]).role_share_low).all()
    for share, *counted in sensitivity_rows(ds):
        as_large = [ds.written >= of * ds.output.median("head") for of in MEDIANS]
        assert counted == [str(int(((ds.reads > float(share)) & each).sum())) for each in as_large]


def test_intervals_are_over_documents():
    model, tokens = view("llama"), drawn_tokens(6)
    plain, found = sinks(model, tokens), sinks(model, tokens, documents=["a", "a", "b", "b", "c", "c"])
    unit = np.array([0, 0, 1, 1, 2, 2])
    for layer, head in np.ndindex(families.BLOCKS, families.HEADS):
        each = plain.written_by_prompt.values[:, layer, head].astype(float)
        ends = jackknifed(lambda x: float(np.sqrt(np.mean(x**2))), each, unit)
        at = {"layer": layer, "head": head}
        close([found.written_low[at], found.written_high[at]], [max(0, ends.low), ends.high], 1e-4, 1e-7)
    assert np.array_equal(found.written, plain.written)
    assert not sinks(model, tokens[:1]).role_sure.any()  # of a single prompt


# ----------------------------------------------------------------------------------------------------------- effects


def eager(name: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """Log-probabilities on `TOKENS` in float64, by whole patterns; some heads do not read position 0."""
    config: Any = families.FAMILIES[name]()
    config._attn_implementation = "eager"
    model: Any = families.build(config, dtype=torch.float64)
    module, heads, anew = sys.modules[type(model).__module__], list[tuple[int, int]](), False
    plain = module.eager_attention_forward

    def changed(own: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        chosen = [head for layer, head in heads if layer == own.layer_idx]
        hidden = mask.expand(-1, families.HEADS, -1, -1).clone()
        hidden[:, chosen, 1:, 0] = torch.finfo(mask.dtype).min
        output, weights = plain(own, query, key, value, hidden if anew else mask, **how)
        kept = weights[:, chosen].clone()
        kept[:, :, 1:, 0] = 0
        output, value = output.clone(), value.repeat_interleave(families.HEADS // value.shape[1], 1)
        output[:, :, chosen] = (kept @ value[:, chosen]).transpose(1, 2)  # [prompt, query, head, c]
        return output, weights

    @torch.no_grad()
    def run(*of: tuple[int, int], weight: bool = False) -> Tensor:
        nonlocal heads, anew
        heads, anew = list(of), weight
        return model(TOKENS, use_cache=False).logits.log_softmax(-1)

    monkeypatch.setattr(module, "eager_attention_forward", changed)
    softmax = torch.nn.functional.softmax  # which families ask for in float32
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim=-1, dtype=None: softmax(x, dim))
    return run


@pytest.mark.parametrize("name", families.FAMILIES)
def test_effects_are_those_of_whole_patterns_in_float64(name, monkeypatch):
    found, run = sinks(view(name, dtype="float64"), TOKENS, effect=True), eager(name, monkeypatch)
    plain, every = run(), list(np.ndindex(families.BLOCKS, families.HEADS))
    # RMS norms of transformers compute in float32: a batch of heads may round otherwise than a prompt alone.
    noise = 1e-10 if name in LAYER_NORM else 1e-6

    def expected(*heads: Any, last: int | None = None, **how: Any) -> list[Tensor]:
        other = run(*heads, **how)
        assert torch.equal(other[:, 0], plain[:, 0])
        kl, change = (plain.exp() * (plain - other)).sum(-1), (plain - other)[:, :-1].gather(-1, TOKENS[:, 1:, None])
        return [kl[:, 1:last].mean(1), change[:, 1:, 0].mean(1)]

    for at in every:
        for what, each in zip(("effect", "loss_change"), expected(at), strict=True):
            close(found[what][at], each.mean(), noise, noise)
            close(found[f"{what}_by_prompt"][:, *at], each, 1e-5, 1e-6)
    assert float(found.effect.min()) > 1e-4  # there is something to agree on
    for n, removed in itertools.product((0, 1), found.removed.values):
        heads = [at for at in every if (found.attends[at] > 0.3) == (n == 0)]
        assert int(found.group_heads[n]) == len(heads)
        truth = expected(*heads, last=-1, weight=removed != "value") if heads else [math.nan] * 2
        for what, each in zip(("kl", "loss_change"), truth, strict=True):
            close(found[f"joint_{what}_by_prompt"].sel(removed=removed)[:, n], each, 1e-5, 1e-6)


def test_the_effect_of_a_head_that_copies_what_stands_at_0():
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
    assert (role(found), found.role_sure.item()) == ("reads", 1)  # of two prompts that do the same
    # All sink heads are this one, and what it would read elsewhere is nothing.
    close(found.joint_kl, [[found.effect.item()] * 2, [math.nan] * 2], 1e-5)
    assert found.group_heads.values.tolist() == [1, 0]
    assert found.loss_rises.item() == 0  # two prompts that lose differently
    assert sinks(known_model(sink_value=[0] * 4, text_value=[0] * 4), known_tokens(32), effect=0).group_heads[1] == 1


def test_some_effects_are_those_of_the_first_heads_on_the_first_prompts(monkeypatch):
    model = view("qwen2", dtype="float64")
    whole = sinks(model, TOKENS, effect=10**6)
    assert whole.effect.notnull().all()
    monkeypatch.setattr(probes.measures.sinks.effect, "ROWS", 1)  # small batches
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
