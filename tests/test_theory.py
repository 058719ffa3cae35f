"""The second-moment theory: its steps against slow twins and random draws, its predictions against measured Jacobians."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import families
import numpy as np
import pytest
import reference_theory
import torch
import transformers
from blocks import random_parts
from scipy.integrate import dblquad
from torch import Tensor
from torch.nn import functional

import probes
from probes import InputError, theory
from probes.models.huggingface import HuggingFaceView
from probes.models.linear import LinearizedBlock
from probes.models.load import fresh
from probes.models.view import Parts, Trace, View
from probes.theory.block import MeasuredBlock, Moments, gaussian_moments, spread_uniformly

second_moment: Any = theory.second_moment
second_moment_from_config: Any = theory.second_moment_from_config

LENGTH = 9  # longer than the window of 8
KINDS = {"uniform": (False, False), "measured": (True, False), "measured, scores": (True, True)}  # (measured, scores)
# Twin and code do the same sums in float64 in another order: rounding (1e-16) times a few thousand terms.
ROUNDING = 1e-11


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def some_tokens(prompts: int = 1, length: int = LENGTH, seed: int = 5) -> Tensor:
    return torch.randint(families.VOCABULARY, (prompts, length), generator=torch.Generator().manual_seed(seed))


@cache
def view(name: str) -> HuggingFaceView:
    return HuggingFaceView(families.model(name, dtype=torch.float64))


def taken_apart(seen: View, layer: int) -> Parts:
    parts = seen.parts(layer)
    assert parts is not None
    return parts


def options(kind: str) -> dict[str, Any]:
    measured, scores = KINDS[kind]
    return {"attention": "measured" if measured else "uniform", "score_path": scores}


def error(got: Tensor, expected: Tensor) -> float:
    """Largest difference against the largest value."""
    assert got.shape == expected.shape
    return float((got - expected).abs().max() / expected.abs().max())


def close(got: Any, expected: Any, tolerance: float) -> None:
    """Relative per position; zeros must be zeros."""
    np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=tolerance, atol=0)


# ------------------------------------------------------------------------------------------- one step, against the twin


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_blocks_step_is_the_twins(name, kind):
    seen = view(name)
    trace = seen.trace(seen.embed(some_tokens()))
    rows = randn(LENGTH, 2 * LENGTH, seed=1)
    gram, radial = rows @ rows.T, randn(LENGTH, seed=2).abs()  # nothing that would hide one behind the other
    for layer in (0, 1) if name == "gemma2" else (1,):  # one with a window, one without
        parts, rotary, stream = taken_apart(seen, layer), trace.rotary[layer], trace.residual[layer]
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


@cache
def twins_profiles(name: str, kind: str, readout: str) -> np.ndarray:
    """sqrt(G_jj) below every block, [layer, position], the twin's steps one after the other."""
    seen = view(name)
    trace: Trace = seen.trace(seen.embed(some_tokens()))
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "residual": lambda x: x,
        "normed": seen.norm,
        "logits": lambda x: seen.unembed(seen.norm(x)),
    }
    last = trace.residual[-1][0, -1]
    top = torch.autograd.functional.jacobian(functions[readout], last)
    assert isinstance(top, Tensor)
    gram, radial = torch.zeros(LENGTH, LENGTH, dtype=torch.float64), torch.zeros(LENGTH, dtype=torch.float64)
    gram[-1, -1] = top.pow(2).sum() / families.WIDTH
    radial[-1] = (top @ last).pow(2).sum() / (last @ last)
    found = []
    measured, scores = KINDS[kind]
    for layer in reversed(range(families.BLOCKS)):
        parts, stream = taken_apart(seen, layer), trace.residual[layer][0]
        gram, radial = reference_theory.second_moment_step(
            parts, stream, trace.rotary[layer], gram, radial, measured=measured, scores=scores
        )
        found.append(gram.diagonal().sqrt())
    return torch.stack(found[::-1]).detach().numpy()


# The dataset holds float32 (6e-8); transformers computes RMS norms in float32 even in float64 models, so that the recorded
# stream above a block differs from the twin's by 1e-7, and wide weights amplify that.
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gemma2", "gpt_neox"])
def test_a_whole_models_profile_is_the_twins_from_every_block(name, kind):
    every = second_moment(view(name), some_tokens(), from_layer="all", **options(kind))
    expected = twins_profiles(name, kind, "residual")
    assert every.sensitivity.dims == ("prompt", "layer", "position")
    close(every.sensitivity[0], expected, 1e-5)
    for layer in range(families.BLOCKS):
        alone = second_moment(view(name), some_tokens(), from_layer=layer, **options(kind))
        assert alone.sensitivity.dims == ("prompt", "position")
        close(alone.sensitivity, every.sensitivity[:, layer], 0)


@pytest.mark.parametrize(("name", "readout"), [("gemma2", "logits"), ("gpt2", "normed")])
def test_other_readouts_are_the_twins(name, readout):
    got = second_moment(view(name), some_tokens(), readout=readout, attention="measured", score_path=True)
    close(got.sensitivity[0], twins_profiles(name, "measured, scores", readout)[0], 1e-5)


# --------------------------------------------------------------------------- one step, against draws: none of its formulas

DRAW_WIDTH, DRAW_FEATURES, DRAW_LENGTH, DRAWS = 40, 60, 6, 200


def over_draws(
    logits: float, *kinds: str, gated: bool = True, frozen: bool = False, leaning: float = 0.0, spread: float = 0.25
) -> dict[str, Moments]:
    """E of G and S below a block over draws of its weights and of cotangents above it: "pulled" back, and as predicted.

    Cotangents have a known Gram matrix; with `leaning` they have that much more of the stream's own direction.
    """
    width, length = DRAW_WIDTH, DRAW_LENGTH
    generator = torch.Generator().manual_seed(3)
    sizes = torch.linspace(0.7, 1.6, length, dtype=torch.float64)[:, None]
    stream = (randn(length, width, seed=4) + 0.7 * randn(1, width, seed=5)) * sizes
    mixing = torch.rand(length, length, generator=generator, dtype=torch.float64).tril() + 0.5 * torch.eye(length)
    unit = stream / stream.norm(dim=-1, keepdim=True)
    grams: dict[str, list[Tensor]] = {kind: [] for kind in ("pulled", *kinds)}
    radials: dict[str, list[Tensor]] = {kind: [] for kind in ("pulled", *kinds)}
    for _ in range(DRAWS):
        parts = random_parts(generator, width, DRAW_FEATURES, logits=logits, sigma=spread, gated=gated)
        block = LinearizedBlock(parts, stream[None], None)
        normal = torch.randn(length, width, width, generator=generator, dtype=torch.float64) / width**0.5
        cotangent = torch.einsum("ti,ikd->tkd", mixing, normal)
        gram = mixing @ mixing.T
        radial = gram.diagonal().clone()
        if leaning:
            above = block.output[0] / block.output[0].norm(dim=-1, keepdim=True)
            along = leaning * torch.randn(length, width, generator=generator, dtype=torch.float64) / width**0.5
            cotangent += along[:, :, None] * above[:, None, :]
            gram = gram + torch.eye(length, dtype=torch.float64) * leaning**2 / width
            radial = radial + leaning**2
        pulled = block.vjp(cotangent.transpose(0, 1)[:, None], frozen=frozen)[:, 0]  # [direction, position, d]
        grams["pulled"].append(torch.einsum("kid,kjd->ij", pulled, pulled) / width)
        radials["pulled"].append((pulled * unit).sum(-1).pow(2).sum(0))
        for kind in kinds:
            predicted = MeasuredBlock(block, block.output[0], **options(kind)).down(Moments(gram, radial))
            grams[kind].append(predicted.gram)
            radials[kind].append(predicted.radial)
    return {kind: Moments(torch.stack(grams[kind]).mean(0), torch.stack(radials[kind]).mean(0)) for kind in grams}


def off_by(found: dict[str, Moments], kind: str) -> tuple[float, float, float]:
    """Largest differences: of G relative to sqrt(G_ii G_jj), of its diagonal, of S."""
    expected, predicted = found["pulled"], found[kind]
    scale = expected.gram.diagonal().sqrt()
    relative = (predicted.gram - expected.gram) / (scale[:, None] * scale[None, :])
    radial = predicted.radial / expected.radial - 1
    return float(relative.abs().max()), float(relative.diagonal().abs().max()), float(radial.abs().max())


# What is left out is O(1/d): 2.5 % at width 40, and somewhat more where G grows a hundredfold in one block, as here at the
# first position. The draws' own error is 1 % (2 % with S).
LEFT_OUT = 0.06


@pytest.mark.parametrize("gated", [True, False])
def test_the_expectation_over_draws_with_uniform_patterns(gated):
    found = over_draws(0.02, "uniform", gated=gated)
    assert found["pulled"].gram.diagonal().max() > 10  # the block does something
    gram, _, radial = off_by(found, "uniform")
    assert gram < LEFT_OUT
    assert radial < LEFT_OUT


@pytest.mark.slow
@pytest.mark.parametrize("gated", [True, False])
def test_the_expectation_over_draws_at_logits_of_order_one(gated):
    through_values = over_draws(0.25, "measured", "uniform", gated=gated, frozen=True)
    assert off_by(through_values, "measured")[0] < LEFT_OUT
    assert off_by(through_values, "uniform")[0] > 3 * LEFT_OUT
    # Of the score path the diagonal is what is promised: off it, the gain is left out.
    through_all = over_draws(0.25, "measured, scores", "measured", gated=gated)
    assert off_by(through_all, "measured, scores")[1] < LEFT_OUT
    assert off_by(through_all, "measured")[1] > 3 * LEFT_OUT


@pytest.mark.slow
def test_the_expectation_over_draws_of_cotangents_that_lean_towards_the_stream():
    found = over_draws(0.25, "measured, scores", leaning=2.0, spread=0.15)
    _, diagonal, radial = off_by(found, "measured, scores")
    assert diagonal < LEFT_OUT
    assert radial < LEFT_OUT
    assert (found["pulled"].radial / found["pulled"].gram.diagonal() - 1).abs().max() > 0.3  # S is no copy of G here


# ----------------------------------------------------------------------------------------------------- pieces


@pytest.mark.parametrize("window", [None, 1, 3, 12, 40])
def test_uniform_spreading_is_the_dense_product(window):
    length = 12
    rows, lone = randn(length, length), torch.zeros(length, length, dtype=torch.float64)
    lone[-1, -1] = 1
    pattern = torch.zeros(length, length, dtype=torch.float64)
    for i in range(length):
        first = 0 if window is None else max(0, i - window + 1)
        pattern[i, first : i + 1] = 1 / (i + 1 - first)
    for gram in (rows @ rows.T, lone):
        expected = pattern.T @ gram @ pattern
        found = spread_uniformly(gram, window)
        assert error(found, expected) < 1e-14
        assert torch.equal(found == 0, expected == 0)  # exactly where nothing arrives
        assert error(spread_uniformly(gram.float(), window).double(), expected) < 1e-6  # float32 in and out


CORRELATED = torch.tensor([[1.0, 0.3, -0.6], [0.3, 0.5, 0.1], [-0.6, 0.1, 2.0]], dtype=torch.float64)
SPREADS = torch.tensor([0.4, 1.0, 2.2], dtype=torch.float64)


def correlations() -> Tensor:
    lengths = CORRELATED.diagonal().sqrt()
    return CORRELATED / (lengths[:, None] * lengths[None, :])


def test_moments_in_closed_form():
    rho, s = correlations(), SPREADS[:, None] * SPREADS[None, :]
    values, slopes = gaussian_moments(lambda x: x, SPREADS, CORRELATED)
    assert error(values, s * rho) < 1e-12
    assert error(slopes, torch.ones_like(rho)) < 1e-12
    values, slopes = gaussian_moments(lambda x: x**2, SPREADS, CORRELATED)
    assert error(values, s**2 * (1 + 2 * rho**2)) < 1e-12
    assert error(slopes, 4 * s * rho) < 1e-12


def silu_slope(x: float) -> float:
    return (1 + math.exp(-x) * (1 + x)) / (1 + math.exp(-x)) ** 2


def gelu_slope(x: float) -> float:
    return 0.5 * math.erfc(-x / 2**0.5) + x * math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


@pytest.mark.parametrize(
    ("named", "function", "slope"),
    [
        (torch.tanh, math.tanh, lambda x: 1 / math.cosh(x) ** 2),
        (functional.silu, lambda x: x / (1 + math.exp(-x)), silu_slope),
        (functional.gelu, lambda x: x * 0.5 * math.erfc(-x / 2**0.5), gelu_slope),
    ],
)
def test_moments_are_those_of_a_plane_integral(named, function, slope):
    got = gaussian_moments(named, SPREADS, CORRELATED)
    rho = correlations()
    for i, k in ((0, 1), (0, 2), (1, 2)):
        r = float(rho[i, k])

        def integral(f: Callable[[float], float], i: int = i, k: int = k, r: float = r) -> float:
            def density(y: float, x: float) -> float:
                a, b = float(SPREADS[i]) * x, float(SPREADS[k]) * (r * x + math.sqrt(1 - r * r) * y)
                return f(a) * f(b) * math.exp(-(x * x + y * y) / 2) / (2 * math.pi)

            return dblquad(density, -8, 8, -8, 8, epsabs=1e-7, epsrel=1e-7)[0]

        # The series' rest and the quadrature's: a tanh at deviation 2.2 is nearly a step.
        assert float(got[0][i, k]) == pytest.approx(integral(function), rel=1e-4, abs=1e-6)
        assert float(got[1][i, k]) == pytest.approx(integral(slope), rel=1e-3, abs=1e-6)


# ------------------------------------------------------------------------------------------------- fresh models, measured


def config(name: str, *, width: int = 128, blocks: int = 6, sigma: float = 0.02) -> Any:
    """Four heads of queries, two of keys; vocabulary 1024, 256 positions, windows of 32."""
    if name == "gpt2":
        sizes = {"n_embd": width, "n_layer": blocks, "n_head": 4, "n_inner": 3 * width, "n_positions": 256}
    else:
        sizes = {"hidden_size": width, "num_hidden_layers": blocks, "num_attention_heads": 4}
        sizes |= {"intermediate_size": 3 * width, "max_position_embeddings": 256, "pad_token_id": None}
        sizes |= {"num_key_value_heads": 2} if name != "gpt_neox" else {}
        sizes |= {"head_dim": width // 4} if name in ("qwen3", "gemma", "gemma2") else {}
        sizes |= {"sliding_window": 32} if name in ("mistral", "gemma2") else {}
    common = {"vocab_size": 1024, "initializer_range": sigma, "bos_token_id": 0, "eos_token_id": 1}
    return transformers.AutoConfig.for_model(name, **common, **sizes)


def distinct(length: int, seed: int) -> Tensor:
    return torch.randperm(1024, generator=torch.Generator().manual_seed(seed))[None, :length]


Prediction = Callable[[View, Tensor], Any]
UNIFORM: Prediction = second_moment
VALUES: Prediction = lambda seen, tokens: second_moment(seen, tokens, attention="measured")  # noqa: E731
SCORES: Prediction = lambda seen, tokens: second_moment(seen, tokens, attention="measured", score_path=True)  # noqa: E731


def measured_and_predicted(
    made: Any, length: int, *predictions: Prediction, seeds: int = 2, **how: Any
) -> tuple[np.ndarray, ...]:
    """Measured and predicted sensitivity [position], each averaged over fresh weights and prompts of distinct tokens."""
    rows = []
    for seed in range(seeds):
        seen, tokens = fresh(made, seed), distinct(length, seed)
        measured = probes.jacobian(seen, tokens, **how).sensitivity.values[0]
        rows.append([measured, *(predict(seen, tokens).sensitivity.values[0] for predict in predictions)])
    return tuple(np.array(rows).mean(0))


def deviation(predicted: Any, measured: np.ndarray) -> float:
    """Mean over positions of |predicted / measured - 1|; both zero at the same positions."""
    predicted = np.asarray(predicted)
    assert ((predicted == 0) == (measured == 0)).all()
    seen = measured > 0
    return float(np.abs(predicted[seen] / measured[seen] - 1).mean())


# O(1/d) is at width 128, small enough for every run, twice that at 256.
@pytest.mark.parametrize(
    ("name", "width", "blocks", "off"),
    [
        *((name, 128, 6, 0.04) for name in ("qwen2", "llama", "mistral", "gpt2")),
        *(pytest.param(name, 256, 12, 0.025, marks=pytest.mark.slow) for name in ("mistral", "gpt2")),
    ],
)
def test_fresh_models_are_predicted(name, width, blocks, off):
    made = config(name, width=width, blocks=blocks)
    measured, uniform, scores = measured_and_predicted(made, 48, UNIFORM, SCORES)
    from_config = second_moment_from_config(made, 48).sensitivity.values
    assert deviation(uniform, measured) < off
    assert deviation(scores, measured) < off
    # Two draws differ from their expectation by 3 to 7 %, one by 4 to 15 %: weights, not the theory. The mean over
    # twelve is met within 1 to 2 %.
    assert deviation(from_config, measured) < 0.1


@pytest.mark.parametrize("name", ["gpt_neox", "qwen3", "gemma", "gemma2"])
def test_fresh_models_of_other_families_are_predicted_with_scores(name):
    measured, values, scores = measured_and_predicted(config(name), 48, VALUES, SCORES)
    assert deviation(scores, measured) < 0.06
    if (
        name == "qwen3"
    ):  # normed queries and keys make logits of order one at initialization, whatever the weights' size
        assert deviation(values, measured) > 0.1


# d sigma^2 = 0.4 and 1.6: the score path is what wide weights need, and enough.
@pytest.mark.slow
@pytest.mark.parametrize(("sigma", "seeds"), [(0.04, 2), (0.08, 4)])
def test_wide_weights_need_the_score_path(sigma, seeds):
    made = config("qwen2", width=256, sigma=sigma)
    measured, values, scores = measured_and_predicted(made, 32, VALUES, SCORES, seeds=seeds)
    assert deviation(scores, measured) < 0.05
    if sigma == 0.08:
        assert deviation(values, measured) > 0.3


# --------------------------------------------------------------------------------------------- from the configuration


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_neox", "gemma2"])
def test_a_configurations_prediction_is_the_mean_over_fresh_weights(name):
    made, length = config(name, blocks=4), 48
    drawn = [second_moment(fresh(made, seed), distinct(length, seed)).sensitivity.values[0] for seed in range(16)]
    got = second_moment_from_config(made, length)
    # One draw is off by 5 to 15 %, the mean of sixteen by 1 to 3 %. Gemma-2's norms divide by a branch's rms, which
    # varies from draw to draw by O(1/d), and the mean of a reciprocal is above the reciprocal of the mean.
    assert deviation(got.sensitivity.values, np.mean(drawn, 0)) < (0.09 if name == "gemma2" else 0.05)


@pytest.mark.slow
def test_repeated_tokens_are_told_apart_from_new_ones():
    made, length, seeds = config("qwen2"), 48, 6
    tokens = torch.randint(4, (1, length), generator=torch.Generator().manual_seed(0))
    measured = np.mean([probes.jacobian(fresh(made, n), tokens).sensitivity.values[0] for n in range(seeds)], 0)
    new = second_moment_from_config(made, length).sensitivity.values
    repeated = second_moment_from_config(made, tokens=tokens).sensitivity.values[0]
    assert deviation(repeated, measured) < 0.1
    assert deviation(new, measured) > 1.5 * deviation(repeated, measured)


def test_only_which_tokens_are_equal_matters():
    made = config("qwen2", blocks=3)
    tokens = torch.tensor([[5, 9, 5, 7, 9, 1], [2, 3, 4, 5, 6, 7]])
    got = second_moment_from_config(made, tokens=tokens)
    assert got.sensitivity.dims == ("prompt", "position")
    assert got.tokens.values.tolist() == tokens.tolist()
    renamed = second_moment_from_config(made, tokens=(tokens + 100) % 1024, length=6)
    close(renamed.sensitivity, got.sensitivity, 0)
    close(second_moment_from_config(made, 6).sensitivity, got.sensitivity[1], 0)  # all of them different
    assert (got.sensitivity[0] != got.sensitivity[1]).all()


def test_every_source_of_a_configuration_gives_the_same():
    made = config("llama", blocks=2)
    expected = second_moment_from_config(made, 9).sensitivity
    for source in (made.to_dict(), fresh(made)):
        close(second_moment_from_config(source, 9).sensitivity, expected, 0)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "length=None is no number of positions; give at least 1, or tokens"),
        ({"length": 7.5}, "length=7.5 is no number of positions"),
        ({"length": 0}, "length=0 is no number of positions"),
        ({"length": 2000}, "2000 positions are more than the 1024 that are learned"),
        ({"length": 5, "tokens": some_tokens(length=6)}, "length=5 and prompts of 6 tokens differ; leave length out"),
        ({"tokens": torch.zeros(4, dtype=torch.int64)}, r"tokens are no ids \[prompt, position\]"),
        ({"tokens": torch.zeros(1, 4)}, r"tokens are no ids \[prompt, position\]"),
        ({"tokens": [[1, 2]]}, r"tokens are no ids \[prompt, position\]"),
        ({"length": 12, "adding": "both"}, "adding 'both' does not exist"),
    ],
)
def test_what_a_configuration_cannot_have_is_refused(given, says):
    plain = inspect.unwrap(second_moment_from_config)  # without the types' own check
    with pytest.raises(InputError, match=says):
        plain({"model_type": "gpt2", "n_layer": 1}, **given)


# --------------------------------------------------------------------------------------------------------- conduct


def test_beyond_a_windows_reach_all_is_exactly_zero():
    made = transformers.MistralConfig(**families._GROUPED, sliding_window=4)  # three blocks: 3 * 3 positions back
    seen, length = HuggingFaceView(families.build(made, dtype=torch.float64)), 16
    tokens = some_tokens(length=length)
    exact = probes.jacobian(seen, tokens).sensitivity.values[0]
    assert (exact == 0).tolist() == [True] * (length - 10) + [False] * 10
    for kind in KINDS:
        got = second_moment(seen, tokens, **options(kind)).sensitivity.values[0]
        assert ((got == 0) == (exact == 0)).all()
    assert ((second_moment_from_config(made, length).sensitivity.values == 0) == (exact == 0)).all()


def test_a_query_before_the_end_is_that_of_the_shorter_prompt():
    seen, tokens = view("gemma2"), some_tokens(2)
    for query in (5, -4, 0):
        at = query % LENGTH
        got = second_moment(seen, tokens, query=query, attention="measured", score_path=True)
        assert not got.sensitivity[:, at + 1 :].any()
        assert json.loads(got.attrs["options"])["query"] == at
        if at:  # a prompt has two tokens at least
            alone = second_moment(seen, tokens[:, : at + 1], attention="measured", score_path=True)
            close(got.sensitivity[:, : at + 1], alone.sensitivity, 1e-6)  # float32, sums in another order


def test_prompts_do_not_know_of_each_other():
    seen, tokens, kind = view("qwen3"), some_tokens(3), "measured, scores"
    got = second_moment(seen, tokens, **options(kind))
    assert got.tokens.values.tolist() == tokens.tolist()
    for n in range(3):
        close(got.sensitivity[n], second_moment(seen, tokens[n : n + 1], **options(kind)).sensitivity[0], 0)


@pytest.mark.parametrize("kind", ["uniform", "measured, scores"])
def test_dtypes_agree_on_a_pretrained_model(kind):
    models = {dtype: probes.load("tiny-qwen2", dtype=dtype, device="cpu") for dtype in ("float64", "float32")}
    tokens = probes.prompts(models["float64"], n=1, length=24)
    got = {dtype: second_moment(model, tokens, **options(kind)).sensitivity for dtype, model in models.items()}
    close(got["float32"], got["float64"], 1e-4)  # 6e-8 through six blocks
    rounded = second_moment(probes.load("tiny-qwen2", dtype="bfloat16", device="cpu"), tokens, **options(kind))
    close(rounded.sensitivity, got["float64"], 0.1)  # 4e-3 in every operation of the recorded pass


def test_the_result_says_what_made_it():
    got = second_moment(view("llama"), some_tokens(2), attention="measured", score_path=True, readout="normed")
    assert got.sensitivity.dims == ("prompt", "position")
    assert got.sensitivity.attrs["long_name"] == "predicted ||J_j||_F / sqrt(d)"
    told = json.loads(got.attrs["options"])
    expected: dict[str, Any] = {"measurement": "second_moment"}
    expected |= {"attention": "measured", "score_path": True, "readout": "normed", "query": LENGTH - 1, "from_layer": 0}
    assert told == expected
    every = second_moment(view("llama"), some_tokens(2), from_layer="all")
    assert every.layer.values.tolist() == list(range(families.BLOCKS))
    got = second_moment_from_config(config("mistral", blocks=2), 7)
    assert got.sensitivity.dims == ("position",)
    assert got.sizes["position"] == 7
    told = json.loads(got.attrs["options"])
    assert (told["measurement"], told["length"]) == ("second_moment_from_config", 7)
    assert told["spec"]["windows"] == [32, 32]
    assert got.attrs["headwater"]
    assert got.sensitivity.attrs["long_name"]


def test_progress_counts_blocks():
    calls: list[tuple[float, float]] = []
    second_moment(view("llama"), some_tokens(2), from_layer=1, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(n, 4) for n in range(1, 5)]  # two prompts, two blocks


def refused(seen: View, **given: Any) -> str:
    with pytest.raises(InputError) as caught:
        second_moment(seen, given.pop("tokens", some_tokens()), **given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_wrong_options_are_refused(unchecked):
    seen = view("llama")
    assert "score_path=True needs the patterns themselves" in refused(seen, score_path=True)
    assert "attention 'exact' does not exist; use uniform, measured" in refused(seen, attention="exact")
    assert "readout 'loss' does not exist" in refused(seen, readout="loss")
    assert f"query {LENGTH} is outside the prompt" in refused(seen, query=LENGTH)
    assert "from_layer 3 does not exist" in refused(seen, from_layer=3)
    assert "outside the vocabulary" in refused(seen, tokens=some_tokens() + families.VOCABULARY)


def test_blocks_that_cannot_be_taken_apart_are_refused_by_name():
    lens = probes.load(families.model("llama"), "transformer_lens", tokenizer=families.tokenizer())
    message = refused(lens)
    assert "block 0 of 'in-memory llama' (transformer_lens) cannot be taken apart" in message
    assert "block 2" in refused(lens, from_layer=2)
    model = families.model("llama")
    model.model.layers[1].register_forward_hook(lambda module, args, output: output)
    assert "block 1 of 'in-memory llama' (transformers) cannot be taken apart" in refused(HuggingFaceView(model))
    assert second_moment(
        HuggingFaceView(model), some_tokens(), from_layer=2
    ).sensitivity.values.any()  # block 1 is below


def test_a_block_that_does_something_else_than_its_parts_is_refused(monkeypatch):
    seen = HuggingFaceView(families.model("llama"))
    known: Any = seen.parts
    monkeypatch.setattr(
        seen, "parts", lambda layer: replace(known(layer), scale=known(layer).scale * (1 + (layer == 1)))
    )
    assert "block 1 of 'in-memory llama' does not do what its parts say" in refused(seen)


def test_amplitudes_differ_from_powers_where_paths_meet_alone():
    def both(blocks: int) -> list[np.ndarray]:
        made = config("llama", width=32, blocks=blocks)
        return [second_moment_from_config(made, 12, adding=a)["sensitivity"].values for a in ("powers", "amplitudes")]

    powers, amplitudes = both(1)
    ratio = amplitudes / powers
    np.testing.assert_allclose(ratio[:-1], ratio[0], rtol=1e-9)  # one path to each, by the same branches
    assert ratio[-1] > 1.001 * ratio[0]  # where attention joins the stream
    powers, amplitudes = both(3)
    assert np.all(amplitudes >= powers)  # no cross term of a path is negative
