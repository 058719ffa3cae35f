"""The second-moment theory: its steps against slow twins and random draws, and what it refuses."""

import json
from dataclasses import replace
from typing import Any

import families
import pytest
import reference_theory
import torch
from measured import by_readout, close, drawn_tokens, error, parts_of, randn, refused
from measured import view as cached
from torch import Tensor

import probes
from probes import theory
from probes.models.huggingface import HuggingFaceView
from probes.models.linear import LinearizedBlock
from probes.theory.block import MeasuredBlock, Moments, gaussian_moments

second_moment: Any = theory.second_moment

LENGTH = 9  # longer than the window of 8
KINDS = {"uniform": (False, False), "measured": (True, False), "measured, scores": (True, True)}  # (measured, scores)
# Twin and code do the same sums in float64 in another order: rounding (1e-16) times a few thousand terms.
ROUNDING = 1e-11


def some_tokens(prompts: int = 1, length: int = LENGTH) -> Tensor:
    return drawn_tokens(prompts, length)


def view(name: str) -> Any:
    return cached(name, dtype="float64")


def options(kind: str) -> dict[str, Any]:
    measured, scores = KINDS[kind]
    return {"attention": "measured" if measured else "uniform", "score_path": scores}


# ------------------------------------------------------------------------------------------- one step, against the twin


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_blocks_step_is_the_twins(name, kind):
    seen = view(name)
    trace = seen.trace(seen.embed(some_tokens()))
    rows = randn(LENGTH, 2 * LENGTH, seed=1)
    gram, radial = rows @ rows.T, randn(LENGTH, seed=2).abs()  # nothing that would hide one behind the other
    for layer in (0, 1) if len(set(seen.spec.windows)) > 1 else (1,):  # one with a window, one without
        parts, rotary, stream = parts_of(seen, layer), trace.rotary[layer], trace.residual[layer]
        measured, scores = KINDS[kind]
        expected = reference_theory.second_moment_step(
            parts, stream[0], rotary, gram, radial, measured=measured, scores=scores
        )
        with torch.no_grad():
            block = LinearizedBlock(parts, stream, rotary)
            got = MeasuredBlock(block, block.output[0], **options(kind)).down(Moments(gram, radial))
        assert error(got.gram, expected[0].detach()) < ROUNDING
        assert error(got.gram.diagonal(), expected[0].detach().diagonal()) < ROUNDING
        assert error(got.radial, expected[1].detach()) < ROUNDING


# The dataset holds float32 (6e-8); transformers computes RMS norms in float32 even in float64 models, so that the recorded
# stream above a block differs from the twin's by 1e-7, and wide weights amplify that.
@pytest.mark.parametrize(
    ("name", "kind", "readout"),
    [
        ("gpt_neox", "uniform", "residual"),
        ("gpt2", "measured, scores", "normed"),
        ("gemma2", "measured, scores", "logits"),
    ],
)
def test_a_whole_models_profile_is_the_twins_from_every_block(name, kind, readout):
    seen, tokens = view(name), some_tokens()
    trace = seen.trace(seen.embed(tokens))
    last = trace.residual[-1][0, -1]
    top = by_readout(seen, last, readout)
    gram, radial = torch.zeros(LENGTH, LENGTH, dtype=torch.float64), torch.zeros(LENGTH, dtype=torch.float64)
    gram[-1, -1] = top.pow(2).sum() / families.WIDTH
    radial[-1] = (top @ last).pow(2).sum() / (last @ last)
    every = second_moment(seen, tokens, from_layer="all", readout=readout, **options(kind)).sensitivity
    assert every.dims == ("prompt", "layer", "position")
    measured, scores = KINDS[kind]
    for layer in reversed(range(families.BLOCKS)):
        parts, stream = parts_of(seen, layer), trace.residual[layer][0]
        gram, radial = reference_theory.second_moment_step(
            parts, stream, trace.rotary[layer], gram, radial, measured=measured, scores=scores
        )
        close(every[0, layer], gram.diagonal().sqrt().detach(), 1e-5)
        alone = second_moment(seen, tokens, from_layer=layer, readout=readout, **options(kind)).sensitivity
        close(alone, every[:, layer], 0)


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])  # one branch after the other, and both from the same stream
def test_rollout_multiplies_the_patterns_and_strengths_that_transformers_has(name):
    model, tokens, strengths, written = families.model(name, dtype=torch.float64), some_tokens(2), [], []
    for block in families.blocks(model):
        families.attention(block).register_forward_hook(lambda _, read, wrote: written.append(wrote[0]))
        block.register_forward_hook(
            lambda _, read, wrote: strengths.append((read[0].norm(dim=-1), written[-1].norm(dim=-1)))
        )
    model.set_attn_implementation("eager")
    with torch.no_grad():
        patterns = [heads.mean(1) for heads in model(tokens, output_attentions=True).attentions]
    uniform = torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.float64))
    found = {kind: second_moment(view(name), tokens, **options(kind)) for kind in ("measured", "uniform")}
    for n in range(2):
        shares = [(added[n] / (stream[n] + added[n])).mean().item() for stream, added in strengths]
        close(found["uniform"].strength[n], torch.tensor(shares), 1e-6)  # RMS norms are float32's in transformers
        for kind, of in (("measured", patterns), ("uniform", [(uniform / uniform.sum(1, keepdim=True))[None]] * 3)):
            product = torch.eye(LENGTH, dtype=torch.float64)
            for share, pattern in zip(shares, of, strict=True):
                product = ((1 - share) * torch.eye(LENGTH) + share * pattern[min(n, len(pattern) - 1)]) @ product
            close(found[kind].rollout[n], product[-1], 1e-5)  # so is the softmax of GPT-NeoX


# ----------------------------------------------------------------------------------------------------- pieces


def test_moments_in_closed_form():
    normed = torch.tensor([[1.0, 0.3, -0.6], [0.3, 0.5, 0.1], [-0.6, 0.1, 2.0]], dtype=torch.float64)
    spreads, lengths = torch.tensor([0.4, 1.0, 2.2], dtype=torch.float64), normed.diagonal().sqrt()
    covariance = normed / torch.outer(lengths, lengths) * torch.outer(spreads, spreads)
    values, slopes = gaussian_moments(lambda x: x**2, spreads, normed)
    assert error(values, torch.outer(spreads, spreads) ** 2 + 2 * covariance**2) < 1e-12
    assert error(slopes, 4 * covariance) < 1e-12
    # E exp(a) exp(b) takes all terms of the series.
    expected = (torch.outer(spreads.pow(2).exp(), spreads.pow(2).exp()).sqrt()) * covariance.exp()
    for moment in gaussian_moments(torch.exp, spreads, normed):
        assert error(moment, expected) < 1e-9


# --------------------------------------------------------------------------------------------------------- conduct


def test_a_query_before_the_end_is_that_of_the_shorter_prompt():
    seen, tokens = view("gemma2"), some_tokens(2)
    for query in (5, -4):
        at = query % LENGTH
        got = second_moment(seen, tokens, query=query, attention="measured", score_path=True)
        assert not got.sensitivity[:, at + 1 :].any()
        assert json.loads(got.attrs["options"])["query"] == at
        alone = second_moment(seen, tokens[:, : at + 1], attention="measured", score_path=True)
        close(got.sensitivity[:, : at + 1], alone.sensitivity, 1e-6)  # float32, sums in another order


def test_dtypes_agree_on_a_pretrained_model():
    models = {
        dtype: probes.load("tiny-qwen2", dtype=dtype, device="cpu") for dtype in ("float64", "float32", "bfloat16")
    }
    tokens = probes.prompts(models["float64"], n=1, length=24)
    wide, *others = (second_moment(m, tokens, **options("measured, scores")).sensitivity for m in models.values())
    close(others[0], wide, 1e-4)  # 6e-8 through six blocks
    close(others[1], wide, 0.1)  # 4e-3 in every operation of the recorded pass


def test_what_is_no_theory_s_is_refused(monkeypatch):
    with refused("score_path=True needs the patterns themselves"):
        second_moment(view("llama"), some_tokens(), score_path=True)
    with refused("block 2 of 'in-memory llama' \\(transformer_lens\\) cannot be taken apart"):
        second_moment(cached("llama", "transformer_lens"), some_tokens(), from_layer=2)
    seen = HuggingFaceView(families.model("llama"))
    known: Any = seen.parts
    monkeypatch.setattr(
        seen, "parts", lambda layer: replace(known(layer), scale=known(layer).scale * (1 + (layer == 1)))
    )
    with refused("block 1 of 'in-memory llama' does not do what its parts say"):
        second_moment(seen, some_tokens())
