"""Sensitivities against brute force, finite differences and algebra; sketches against what they promise."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import families
import numpy as np
import pytest
import torch
import xarray as xr
from measured import BRUTE, brute, brute_model, close, drawn_tokens, refused
from measured import view as cached

import probes
from probes import jacobian
from probes.models import pullback
from probes.models.huggingface import HuggingFaceView
from probes.models.pullback import Apart, Pace, Prompt
from probes.models.view import Parts
from probes.run.store import Store

view: Any = partial(cached, dtype="float64")
LENGTH = 12  # longer than the window of 8


def some_tokens(prompts: int = 1, length: int = LENGTH) -> Any:
    return drawn_tokens(prompts, length)


# Exact Jacobians of all families are held against autograd in `test_families`, pathways and queries in `test_pathway`.


def test_a_layer_alone_is_its_row_of_all():
    seen, tokens = view("mistral"), some_tokens(2)
    every = jacobian(seen, tokens, from_layer="all")
    assert every.sensitivity.dims == ("prompt", "layer", "position")
    alone = jacobian(seen, tokens, from_layer=1)
    close(every.sensitivity.sel(layer=1), alone.sensitivity, 1e-12)  # rounding alone
    close(alone.sensitivity[1], brute(brute_model("mistral"), tokens[1:], LENGTH - 1, layer=1), BRUTE["mistral"])
    for method in ("sketch", "scalar"):
        late = jacobian(seen, tokens, query=6, method=method).isel(position=slice(7, None))
        assert not late.sensitivity.any()
        assert not late.stderr.any()


def test_chunk_sizes_agree_and_pairs_that_are_not_kept_cost_precision_only(monkeypatch):
    seen, tokens = view("llama"), some_tokens(2)
    both: dict[str, Any] = {"beside": True}
    exact = [jacobian(seen, tokens, chunk=chunk, **both) for chunk in (1, 3, 64)]
    sketch = [jacobian(seen, tokens, chunk=chunk, method="sketch", products=17, **both) for chunk in (1, 3, 64)]
    for first, *others in (exact, sketch):
        for other in others:  # rounding alone; standard errors, too, count every pair of probes whatever the chunk
            for name in ("sensitivity", "sensitivity_normed"):
                close(other[name], first[name], 1e-10)
                close(other[name.replace("sensitivity", "stderr")], first[name.replace("sensitivity", "stderr")], 1e-9)
    kept = jacobian(seen, tokens, method="sketch", products=12, chunk=4)
    monkeypatch.setattr(import_module("probes.measures.jacobian.compute"), "KEPT_BYTES", 0)
    forgotten = jacobian(seen, tokens, method="sketch", products=12, chunk=4)
    close(forgotten.sensitivity, kept.sensitivity, 1e-12)
    assert (np.abs(np.log(forgotten.stderr / kept.stderr)) < 1).all()


def test_blocks_are_kept_while_half_of_the_memory_is_free_and_chunks_fill_the_rows_of_a_product(monkeypatch):
    seen, tokens = view("llama"), some_tokens()
    pace = Pace.of(seen, LENGTH)
    assert pace == Pace(pullback.CPU_ROWS // LENGTH, True)
    free = iter((100, 51, 50, 51))  # before the pass, then at each block
    monkeypatch.setattr(pullback, "available", lambda device: next(free))
    apart = Apart(seen, 0, "auto")
    prompt = Prompt(tokens, ["residual"], [0], apart, pace, check=False, pathway="total", query=LENGTH - 1)
    blocks = [prompt.block(layer) for layer in range(families.BLOCKS)]
    monkeypatch.setattr(pullback, "available", lambda device: 0)
    assert [prompt.block(layer) is block for layer, block in enumerate(blocks)] == [True, False, True]


def test_a_sketch_of_all_directions_is_exact():
    seen, tokens = view("gemma2"), some_tokens(2)
    got = jacobian(seen, tokens, method="sketch", readout="logits", products=families.WIDTH)
    # eigenvectors of float64 logits' Gram matrix lose half the digits of its smallest eigenvalues
    close(got.sensitivity, jacobian(seen, tokens, readout="logits").sensitivity, 1e-7)
    assert not got.stderr.any()


@pytest.mark.parametrize(
    "how", [{"products": 6, "beside": True}, {"products": 24, "beside": True}, {"readout": "logits"}]
)
def test_squared_sketches_are_unbiased(how):
    seen, tokens, seeds = view("llama", dtype="float32"), some_tokens(length=24), 200
    every = jacobian(seen, tokens, **{name: value for name, value in how.items() if name != "products"})
    got = jacobian(seen, tokens.expand(seeds, -1).contiguous(), method="sketch", **{"products": 24} | how)
    for name in ("sensitivity", "sensitivity_normed") if "beside" in how else ("sensitivity",):
        squared, exact = got[name].values ** 2, every[name].values[0] ** 2
        deviation = (squared.mean(0) - exact) / (squared.std(0, ddof=1) / seeds**0.5)
        assert np.abs(deviation).max() < 4


@pytest.mark.parametrize(
    ("name", "how"), [("gemma2", {}), ("gpt2", {"pathway": "all"}), ("llama", {"method": "scalar"})]
)
def test_what_stands_beside_is_the_readout_after_the_final_norm(name, how):
    seen, tokens = view(name), some_tokens(2)
    both, alone = jacobian(seen, tokens, **how, beside=True), jacobian(seen, tokens, **how)
    normed = jacobian(seen, tokens, **how, readout="normed")
    for variable in ("sensitivity", "stderr", "elasticity"):
        np.testing.assert_allclose(both[variable], alone[variable], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(both[f"{variable}_normed"], normed[variable], rtol=1e-9, atol=1e-12)
    with refused("beside=True goes with readout 'residual', not 'normed'"):
        jacobian(seen, tokens, readout="normed", beside=True)


# Positions of a draw go together: the share is known to 0.7 % from these 120 draws.
def test_intervals_hold_the_exact_sensitivity_as_often_as_they_say():
    model, covered = probes.load("tiny-llama", device="cpu"), []
    tokens = probes.prompts(model, n=3, length=64)
    for prompt, truth in zip(tokens, jacobian(model, tokens).sensitivity.values, strict=True):
        got = jacobian(model, prompt.expand(40, -1).contiguous(), method="sketch", products=8)
        covered.append((np.abs(got.sensitivity - truth) <= 1.96 * got.stderr).mean())
    assert 0.92 <= np.mean(covered) <= 0.98


def test_forward_products_are_those_of_the_jacobian_up_to_a_factor(monkeypatch):
    layers = [1, 2]
    monkeypatch.setattr(pullback, "MOVED", 1e-6)  # first order, of a family whose norms compute in float64
    seen, tokens = view("gpt2"), some_tokens()
    apart = Apart(seen, layers[0], "auto")
    prompt = Prompt(
        tokens[:, : LENGTH - 1],
        ["logits"],
        layers,
        apart,
        Pace(4, True),
        check=False,
        pathway="total",
        query=LENGTH - 2,
    )
    tangents = torch.randn(len(layers), 3, LENGTH - 1, seen.spec.width, dtype=torch.float64)
    every = prompt.pull(
        torch.eye(seen.spec.width, dtype=torch.float64) @ prompt.tops[0]
    )  # [layer, output, position, d]
    expected = torch.einsum("lopd,lkpd->ko", every, tangents)
    assert (torch.cosine_similarity(prompt.push(tangents) @ prompt.tops[0].T, expected) > 0.95).all()


def test_sixty_four_products_are_within_four_percent():
    model = probes.load("tiny-qwen2", device="cpu")
    tokens = probes.prompts(model, n=2, length=160)
    exact = jacobian(model, tokens).sensitivity.values
    got = jacobian(model, tokens, method="sketch").sensitivity.values
    assert np.sqrt(((got / exact - 1) ** 2).mean()) < 0.04


def test_scalar_is_the_product_with_ones():
    tokens = some_tokens()
    for readout in ("residual", "normed", "logits"):
        got = jacobian(view("gpt2"), tokens, method="scalar", readout=readout)
        close(got.sensitivity[0], brute(brute_model("gpt2"), tokens, LENGTH - 1, readout, summed=True), BRUTE["gpt2"])
        assert np.isnan(got.stderr).all()


def test_the_same_call_gives_the_same_numbers_and_progress_ends_at_the_total():
    calls: list[tuple[float, float]] = []
    seen, tokens, sketch = view("qwen3", dtype="float32"), some_tokens(2, 24), {"method": "sketch", "products": 40}
    first = jacobian(seen, tokens, **sketch, progress=lambda done, total: calls.append((done, total)))
    xr.testing.assert_identical(first.drop_attrs(), jacobian(seen, tokens, **sketch).drop_attrs())
    assert (jacobian(seen, tokens, **sketch, seed=1).sensitivity != first.sensitivity).any()
    done, total = np.array(calls).T
    assert (np.diff(done) >= 0).all()
    assert (done <= total).all()
    assert done[-1] == total[-1] == 80


@pytest.mark.parametrize("wrong", ["output", "slope"])
def test_parts_that_disagree_with_the_model_are_not_used(wrong, monkeypatch):
    seen, tokens = view("llama"), some_tokens(2)
    known, expected = seen.parts, jacobian(seen, tokens, engine="autograd")

    def parts(layer: int) -> Parts | None:
        own = known(layer)
        if layer != 1 or own is None:
            return own
        if wrong == "output":
            return replace(own, scale=1.5 * own.scale)
        return replace(own, activation=lambda x: own.activation(x).detach() + 0 * x)

    monkeypatch.setattr(seen, "parts", parts)
    got = jacobian(seen, tokens)  # both prompts, though slopes are checked on the first alone
    assert got.attrs["engine"] == "autograd+parts"
    close(got.sensitivity, expected.sensitivity, BRUTE["llama"])
    with refused("block 1 of", "does not do what its parts say"):
        jacobian(seen, tokens, engine="parts")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "fast"}, "method 'fast' does not exist; use exact, sketch, scalar"),
        ({"query": LENGTH}, "query 12 is outside the prompt of 12 tokens; give -12 to 11"),
        ({"from_layer": 3}, "from_layer 3 does not exist; the model has blocks 0 to 2"),
        ({"products": 32}, "products=32 goes with method 'sketch', not 'exact'"),
        ({"method": "sketch", "products": 1}, "products=1 is no number for a sketch"),
        ({"chunk": 0}, "chunk=0 is not positive"),
        ({"tokens": some_tokens()[0]}, r"tokens have shape \[12\]; give two dimensions"),
        ({"tokens": some_tokens() + families.VOCABULARY}, "ids run from 0 to 127"),
    ],
)
def test_wrong_input_is_refused_in_one_line(options, message):
    with refused(message):
        jacobian(view("llama"), **{"tokens": some_tokens()} | options)


def test_values_that_are_not_finite_are_refused():
    model = families.model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    with refused("not finite", "position 0"):
        jacobian(HuggingFaceView(model), some_tokens())


@pytest.mark.parametrize(("readout", "query"), [("residual", -1), ("normed", 5), ("logits", -1)])
@torch.no_grad()
def test_elasticity_is_the_sensitivity_in_units_of_input_and_output(readout, query):
    model, ids = view("llama"), some_tokens(3)
    found = jacobian(model, ids, readout=readout, query=query, from_layer="all", pathway="all")
    streams = [model.trace(model.embed(one[None])).residual for one in ids]
    at = query % LENGTH
    for layer in range(model.spec.blocks):
        size = torch.cat([one[layer][0, 1 : at + 1] for one in streams]).pow(2).mean().sqrt()
        outputs = torch.stack([one[-1][0, 1 : at + 1] for one in streams])
        outputs = outputs if readout == "residual" else model.norm(outputs)
        outputs = model.unembed(outputs) if readout == "logits" else outputs
        centred = outputs[:, -1] - outputs.mean((0, 1))
        for n in range(len(streams)):
            unit = float(size * model.spec.width**0.5 / centred[n].norm())
            own = found.isel(prompt=n, layer=layer)  # of every pathway
            close(own.elasticity, own.sensitivity * unit, 1e-4)  # RMS norms are float32's


def test_a_huge_constant_dimension_of_the_stream_changes_no_elasticity():
    tokens, found = some_tokens(3), []
    for constant in (0.0, 1e4):  # 1e4 times what the stream's other dimensions are
        model = families.model("gpt2").double()
        with torch.no_grad():
            model.transformer.h[-1].mlp.c_proj.bias[3] += constant
        found.append(jacobian(HuggingFaceView(model), tokens))
        assert (found[-1].elasticity[:, -1] > 0).all()
    close(found[1].elasticity, found[0].elasticity, 1e-8)


@pytest.mark.parametrize(
    ("how", "coarse"),
    [
        ({"method": "sketch", "products": 8}, True),
        ({"method": "sketch", "products": 8, "pathway": "value"}, True),
        ({"method": "sketch", "products": 8, "pathway": "score"}, False),  # a difference of near numbers
        ({"method": "sketch", "products": 8, "engine": "autograd"}, False),  # a whole pass is taken again
        ({"method": "sketch", "products": families.WIDTH}, False),  # exact
        ({"method": "exact"}, False),
        ({"method": "scalar"}, False),
    ],
)
def test_sketches_alone_take_tf32_and_their_pieces_are_others(how, coarse, monkeypatch, tmp_path):
    seen, asked = cached("llama"), set[str]()

    def noted(precision: str) -> Any:
        asked.add(precision)
        return nullcontext()

    monkeypatch.setattr(pullback, "products", noted)
    monkeypatch.setattr(import_module("probes.measures.jacobian.compute"), "coarse", lambda device, dtype: True)
    jacobian(seen, some_tokens(), **how, pieces=Store(tmp_path))
    assert asked == {"tf32" if coarse else "ieee"}
    monkeypatch.undo()
    jacobian(seen, some_tokens(), **how, pieces=Store(tmp_path))
    assert len(list(tmp_path.rglob("*.npz"))) == 1 + coarse
