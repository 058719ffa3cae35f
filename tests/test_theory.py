"""The second-moment theory: its steps against slow twins and random draws, and what it refuses."""

from __future__ import annotations

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
from fresh_models import config
from measured import by_readout, close, drawn_tokens, error, parts_of, randn, refused
from measured import view as cached
from scipy.integrate import dblquad
from torch import Tensor
from torch.nn import functional
from transformers import MistralConfig

import probes
from probes import theory
from probes.models.huggingface import HuggingFaceView
from probes.models.linear import LinearizedBlock
from probes.models.view import Trace
from probes.theory.block import MeasuredBlock, Moments, gaussian_moments, spread_uniformly

second_moment: Any = theory.second_moment
second_moment_from_config: Any = theory.second_moment_from_config

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


@cache
def twins_profiles(name: str, kind: str, readout: str) -> np.ndarray:
    """sqrt(G_jj) below every block, [layer, position], the twin's steps one after the other."""
    seen = view(name)
    trace: Trace = seen.trace(seen.embed(some_tokens()))
    last = trace.residual[-1][0, -1]
    top = by_readout(seen, last, readout)
    gram, radial = torch.zeros(LENGTH, LENGTH, dtype=torch.float64), torch.zeros(LENGTH, dtype=torch.float64)
    gram[-1, -1] = top.pow(2).sum() / families.WIDTH
    radial[-1] = (top @ last).pow(2).sum() / (last @ last)
    found = []
    measured, scores = KINDS[kind]
    for layer in reversed(range(families.BLOCKS)):
        parts, stream = parts_of(seen, layer), trace.residual[layer][0]
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


def test_moments_are_those_of_a_plane_integral():
    got, rho = gaussian_moments(functional.silu, SPREADS, CORRELATED), correlations()
    for i, k in ((0, 1), (0, 2), (1, 2)):
        r = float(rho[i, k])

        def integral(f: Callable[[float], float], i: int = i, k: int = k, r: float = r) -> float:
            def density(y: float, x: float) -> float:
                a, b = float(SPREADS[i]) * x, float(SPREADS[k]) * (r * x + math.sqrt(1 - r * r) * y)
                return f(a) * f(b) * math.exp(-(x * x + y * y) / 2) / (2 * math.pi)

            return dblquad(density, -8, 8, -8, 8, epsabs=1e-7, epsrel=1e-7)[0]

        assert float(got[0][i, k]) == pytest.approx(integral(lambda x: x / (1 + math.exp(-x))), rel=1e-4, abs=1e-6)
        assert float(got[1][i, k]) == pytest.approx(integral(silu_slope), rel=1e-3, abs=1e-6)


# --------------------------------------------------------------------------------------------------------- conduct


def test_beyond_a_windows_reach_all_is_exactly_zero():
    made = MistralConfig(**families._GROUPED, sliding_window=4)  # three blocks: 3 * 3 positions back
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


@pytest.mark.parametrize("kind", ["uniform", "measured, scores"])
def test_dtypes_agree_on_a_pretrained_model(kind):
    models = {dtype: probes.load("tiny-qwen2", dtype=dtype, device="cpu") for dtype in ("float64", "float32")}
    tokens = probes.prompts(models["float64"], n=1, length=24)
    got = {dtype: second_moment(model, tokens, **options(kind)).sensitivity for dtype, model in models.items()}
    close(got["float32"], got["float64"], 1e-4)  # 6e-8 through six blocks
    rounded = second_moment(probes.load("tiny-qwen2", dtype="bfloat16", device="cpu"), tokens, **options(kind))
    close(rounded.sensitivity, got["float64"], 0.1)  # 4e-3 in every operation of the recorded pass


def test_the_result_says_what_made_it():
    given: dict[str, Any] = {"attention": "measured", "score_path": True, "readout": "normed"}
    got = second_moment(view("llama"), some_tokens(2), **given, from_layer="all")
    expected = {"measurement": "second_moment", **given, "query": LENGTH - 1, "from_layer": "all"}
    assert json.loads(got.attrs["options"]) == expected
    assert got.layer.values.tolist() == list(range(families.BLOCKS))
    told = json.loads(second_moment_from_config(config("mistral", blocks=2), 7).attrs["options"])
    assert (told["length"], told["spec"]["windows"]) == (7, [32, 32])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"score_path": True}, "score_path=True needs the patterns themselves"),
        ({"attention": "exact"}, "attention 'exact' does not exist; use uniform, measured"),
        ({"query": LENGTH}, f"query {LENGTH} is outside the prompt"),
    ],
)
def test_wrong_options_are_refused(given, says, unchecked):
    with refused(says):
        second_moment(view("llama"), **{"tokens": some_tokens()} | given)


def test_blocks_that_cannot_be_taken_apart_or_do_something_else_are_refused_by_name(monkeypatch):
    lens = cached("llama", "transformer_lens")
    for layer in (0, 2):
        with refused(f"block {layer} of 'in-memory llama' \\(transformer_lens\\) cannot be taken apart"):
            second_moment(lens, some_tokens(), from_layer=layer)
    model = families.model("llama")
    model.model.layers[1].register_forward_hook(lambda module, args, output: output)
    seen = HuggingFaceView(model)
    with refused("block 1 of 'in-memory llama' \\(transformers\\) cannot be taken apart"):
        second_moment(seen, some_tokens())
    assert second_moment(seen, some_tokens(), from_layer=2).sensitivity.values.any()  # block 1 is below
    seen = HuggingFaceView(families.model("llama"))
    known: Any = seen.parts
    monkeypatch.setattr(
        seen, "parts", lambda layer: replace(known(layer), scale=known(layer).scale * (1 + (layer == 1)))
    )
    with refused("block 1 of 'in-memory llama' does not do what its parts say"):
        second_moment(seen, some_tokens())
