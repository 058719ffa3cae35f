"""Blocks linearized from their parts, against slow twins in plain float64 and against the model's own modules."""

import families
import pytest
import reference
import torch
from measured import LAYER_NORM, error, linearized, parts_of, randn
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from probes.models import linear
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


def tokens(prompts: int, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(families.VOCABULARY, (prompts, length), generator=generator)


def traced(name: str, prompts: int, length: int = LENGTH) -> tuple[HuggingFaceView, Trace]:
    view = HuggingFaceView(families.model(name, dtype=torch.float64))
    return view, view.trace(view.embed(tokens(prompts, length)))


# ---------------------------------------------------------------------------------------------- against the twin


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


@pytest.mark.parametrize("name", [*families.FAMILIES, "qwen3_moe, weights of all experts"])
def test_jvp_is_the_adjoint_of_vjp(name, monkeypatch):
    view, trace = traced(name, prompts=2)
    tangent, cotangent = randn(3, 2, LENGTH, families.WIDTH, seed=1), randn(2, 2, LENGTH, families.WIDTH, seed=2)
    for layer, band in ((0, 5), (1, 128)):
        monkeypatch.setattr(linear, "QUERY_BAND", band)
        made, before = linearized(view, trace, layer), tangent.clone()
        for frozen in (False, True):
            ahead = torch.einsum("kbtd,nbtd->kn", made.jvp(tangent, frozen=frozen), cotangent)
            back = torch.einsum("kbtd,nbtd->kn", tangent, made.vjp(cotangent, frozen=frozen))
            assert error(ahead, back) < ROUNDING
        torch.testing.assert_close(tangent, before, rtol=0, atol=0)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_own_jvp_is_what_reaches_one_position_by_its_own_path_and_through_attention(name):
    view, trace = traced(name, prompts=1)
    row = LENGTH - 1
    stream, attended = (trace.residual[0][0].clone().requires_grad_() for _ in range(2))
    output = reference.block(parts_of(view, 0), stream, trace.rotary[0], attended)[row]
    positions = torch.tensor([0, 2, 5, 7, row])
    own, entering = randn(3, 1, 1, families.WIDTH, seed=1), randn(3, 1, 5, families.WIDTH, seed=2)
    got = linearized(view, trace, 0).own_jvp(own, entering, row, positions)
    cotangent = randn(families.WIDTH, seed=3)
    through, past = torch.autograd.grad(output, (attended, stream), cotangent)
    assert not past[:row].any()  # the twin's other path stays at its position
    expected = entering[:, 0].flatten(1) @ through[positions].flatten() + own[:, 0, 0] @ (through + past)[row]
    assert error(got[:, 0, 0] @ cotangent, expected) < ROUNDING


# ------------------------------------------------------------------------------------- against the model's modules


@pytest.mark.parametrize("name", families.FAMILIES)
def test_both_engines_linearize_the_models_own_block(name):
    view, trace = traced(name, prompts=1)
    cotangent, tangent = randn(4, 1, LENGTH, families.WIDTH), randn(3, 1, LENGTH, families.WIDTH, seed=7)
    for layer in range(families.BLOCKS):
        own, made = AutogradBlock(trace.blocks[layer], trace.residual[layer]), linearized(view, trace, layer)
        assert error(made.output, trace.residual[layer + 1]) < OWN[name]
        assert error(made.vjp(cotangent), own.vjp(cotangent)) < OWN[name]
        rows = cotangent[:, :, :2]
        assert error(made.vjp(rows, first=LENGTH - 2), own.vjp(rows, first=LENGTH - 2)) < OWN[name]
    # A central difference is off by the square of its step times a third derivative, large at these weights; clamped
    # activations have kinks besides.
    assert error(own.jvp(tangent), made.jvp(tangent)) < (5e-2 if name == "gpt_oss" else 3e-2)
    assert not own.jvp(torch.zeros_like(tangent)).any()
    with pytest.raises(ValueError, match="one by one"):
        AutogradBlock(trace.blocks[0], trace.residual[0].expand(2, -1, -1)).vjp(cotangent)


def test_patterns_keep_their_digits_at_logits_of_a_thousand():
    """As Qwen2.5's key biases make them. Logits are then rounded to 3e-5 each; a log-sum-exp as large made it 1.5e-4."""
    model = families.model("qwen2")
    with torch.no_grad():
        for name in ("q_proj", "k_proj"):
            model.get_parameter(f"model.layers.0.self_attn.{name}.bias").fill_(20)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        view = HuggingFaceView(model.double() if dtype == torch.float64 else model)
        block = linearized(view, view.trace(view.embed(tokens(1))), 0)
        assert (block.query @ block.key.repeat_interleave(block.groups, 1).mT).max() > 1000
        gradients.append(block.vjp(randn(2, 1, LENGTH, families.WIDTH, seed=1).to(dtype)).double())
    assert error(*gradients) < 5e-5


@pytest.mark.parametrize(
    ("name", "band"),
    [*((name, 128) for name in ("llama", "mistral", "gemma2", "gpt_neox", "gpt_oss")), ("mistral", 5), ("gpt2", 5)],
)
def test_flops_are_those_performed(name, band, monkeypatch):
    monkeypatch.setattr(linear, "QUERY_BAND", band)
    length = 20
    view, trace = traced(name, prompts=1, length=length)
    made, parts = linearized(view, trace, 0), parts_of(view, 0)

    def performed(call) -> float:
        """Per direction: what does not grow with their number (a band's logits) is shared by all."""
        counts = []
        for directions in (2, 7):
            with FlopCounterMode(display=False) as counter:
                call(directions)
            counts.append(counter.get_total_flops())
        return (counts[1] - counts[0]) / 5

    for rows in (length, 1):
        got = performed(lambda k, rows=rows: made.vjp(randn(k, 1, rows, families.WIDTH), first=length - rows))
        assert got == linear.flops(parts, length=length, rows=rows)
    positions = torch.tensor([0, 9, length - 1])
    got = performed(
        lambda k: made.own_jvp(randn(k, 1, 1, families.WIDTH), randn(k, 1, 3, families.WIDTH), length - 1, positions)
    )
    assert got == linear.own_flops(parts, length=length, positions=3 if parts.window is None else 1)
