"""Blocks linearized from their parts, against slow twins in plain float64 and against the model's own modules."""

import families
import pytest
import reference
import torch
from measured import LAYER_NORM, drawn_tokens, error, linearized, parts_of, randn

from probes.models import linear, passes
from probes.models.huggingface import HuggingFaceView
from probes.models.linear import AutogradBlock
from probes.models.view import Trace

LENGTH = 12  # longer than the window of 8
BANDS = [3, 5, 128]  # ends inside a band, on its edge with another remainder, one band for all
# Twin and code do the same sums in float64, in another order: rounding (1e-16) times a few thousand terms and the size of
# what cancels, in models whose weights are fifty times the usual.
ROUNDING = 1e-10
# transformers computes RMS norms in float32 even in float64 models (6e-8), and a block amplifies that.
OWN = {name: 1e-11 if name in LAYER_NORM else 2e-5 for name in families.FAMILIES}


def traced(name: str, prompts: int) -> tuple[HuggingFaceView, Trace]:
    view = HuggingFaceView(families.model(name, dtype=torch.float64))
    return view, view.trace(view.embed(drawn_tokens(prompts, LENGTH)))


@pytest.mark.parametrize("name", [*families.FAMILIES, "qwen3_moe, weights of all experts"])
def test_output_and_slope_are_the_twins_for_several_prompts_rows_and_bands(name, monkeypatch):
    view, trace = traced(name, prompts=2)
    for layer in (0, 1):  # Gemma-2: one with a window, one without
        stream, rotary = trace.residual[layer].clone().requires_grad_(), trace.rotary[layer]
        output = torch.stack([reference.block(parts_of(view, layer), one, rotary) for one in stream])
        for band, (first, rows) in zip(BANDS, [(None, LENGTH), (4, 5), (LENGTH - 1, 1)], strict=True):
            monkeypatch.setattr(linear, "QUERY_BAND", band)
            made = linearized(view, trace, layer)
            assert error(made.output, output.detach()) < ROUNDING
            cotangent = randn(3, 2, rows, families.WIDTH, seed=layer)
            read = output[:, first or 0 :][:, :rows]
            expected = [torch.autograd.grad(read, stream, one, retain_graph=True)[0] for one in cotangent]
            before = cotangent.clone()
            assert error(made.vjp(cotangent, first=first), torch.stack(expected)) < ROUNDING
            torch.testing.assert_close(cotangent, before, rtol=0, atol=0)  # what is given stays as it is


@pytest.mark.parametrize("name", families.FAMILIES)
def test_both_engines_linearize_the_models_own_block(name):
    view, trace = traced(name, prompts=1)
    cotangent = randn(4, 1, LENGTH, families.WIDTH)
    for layer in range(families.BLOCKS):
        own, made = AutogradBlock(trace.blocks[layer], trace.residual[layer]), linearized(view, trace, layer)
        assert error(made.output, trace.residual[layer + 1]) < OWN[name]
        assert error(made.vjp(cotangent), own.vjp(cotangent)) < OWN[name]
        rows = cotangent[:, :, :2]
        assert error(made.vjp(rows, first=LENGTH - 2), own.vjp(rows, first=LENGTH - 2)) < OWN[name]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen2", "gpt_neox", "olmo2"])
def test_kernels_give_what_operations_one_by_one_give(name, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(passes, "LEAST", 0)
    view = HuggingFaceView(families.model(name, dtype=torch.float32).to("cuda"))
    block = linearized(view, view.trace(view.embed(drawn_tokens(1, LENGTH).to("cuda"))), 0)
    for count, first, rows in [(70, None, LENGTH), (3, LENGTH - 2, 2)]:
        cotangent = randn(count, 1, rows, families.WIDTH).to("cuda", torch.float32)
        with monkeypatch.context() as patch:
            patch.setattr(passes, "kernels_there", lambda: False)
            expected = block.vjp(cotangent, first)
        assert error(block.vjp(cotangent, first), expected) < 1e-5  # float32 in another order


def test_patterns_keep_their_digits_at_logits_of_a_thousand():
    """As Qwen2.5's key biases make them. Logits are then rounded to 3e-5 each; a log-sum-exp as large made it 1.5e-4."""
    model = families.model("qwen2")
    with torch.no_grad():
        for name in ("q_proj", "k_proj"):
            model.get_parameter(f"model.layers.0.self_attn.{name}.bias").fill_(20)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        view = HuggingFaceView(model.double() if dtype == torch.float64 else model)
        block = linearized(view, view.trace(view.embed(drawn_tokens(1, LENGTH))), 0)
        assert (block.query @ block.key.repeat_interleave(block.groups, 1).mT).max() > 1000
        gradients.append(block.vjp(randn(2, 1, LENGTH, families.WIDTH, seed=1).to(dtype)).double())
    assert error(*gradients) < 5e-5
