"""What flows through values and through scores, against twins that hold the pattern constant by themselves."""

import json
from functools import cache
from typing import Any

import families
import numpy as np
import pytest
import reference
import torch
from measured import BACKENDS, LAYER_NORM, by_readout, close, drawn_tokens, parts_of
from measured import view as cached

from probes import jacobian

PATHWAYS = ("total", "value", "score")
LENGTH = 11  # longer than the window of 8
TOKENS = drawn_tokens(1, LENGTH)
# transformers computes RMS norms in float32 even in float64 models (6e-8), the twin does not; three blocks of wide weights
# amplify that by about a hundred, and the score path, a difference of two larger Jacobians, by ten more.
TWIN = {name: 1e-10 if name in LAYER_NORM else 2e-4 for name in families.FAMILIES}


def view(name: str, backend: str = "transformers") -> Any:
    return cached(name, backend, "float64")


@cache
def twin(name: str, readout: str = "residual", query: int = LENGTH - 1, layer: int = 0) -> dict[str, np.ndarray]:
    """||J_j||_F / sqrt(d) of every pathway, by autograd through the twin's blocks, positions after the query left out."""
    seen = view(name)
    trace = seen.trace(seen.embed(TOKENS[:, : query + 1]))
    parts = [parts_of(seen, at) for at in range(layer, families.BLOCKS)]
    top = by_readout(seen, trace.residual[-1][0, -1], readout)
    norms = reference.pathway_norms(parts, trace.rotary[layer:], trace.residual[layer][0], top)
    return {pathway: (values / families.WIDTH**0.5).numpy() for pathway, values in norms.items()}


@pytest.mark.parametrize("name", families.FAMILIES)
@pytest.mark.parametrize("engine", ["parts", "autograd"])
def test_every_pathway_is_the_twins(name, engine):
    expected = twin(name)
    assert (expected["score"] > 1e-3 * expected["total"])[1:].all()  # there is something to get wrong
    # One engine takes every layer at once, the other block 0 alone.
    from_layer = "all" if engine == "parts" else 0
    for pathway in PATHWAYS:
        got = jacobian(view(name), TOKENS, pathway=pathway, engine=engine, from_layer=from_layer)
        found = got.sensitivity[0] if from_layer == 0 else got.sensitivity[0, 0]
        close(found, expected[pathway], TWIN[name])
        assert json.loads(got.attrs["options"])["pathway"] == pathway
        assert got.attrs["engine"] == engine
        assert not got.stderr.any()
        if from_layer == "all" and name in ("qwen3", "gpt_neox"):
            for layer in range(1, families.BLOCKS):
                close(got.sensitivity[0, layer], twin(name, layer=layer)[pathway], TWIN[name])


@pytest.mark.parametrize(
    ("name", "readout", "engine"),
    [("gemma2", "logits", "parts"), ("mistral", "residual", "parts"), ("gpt2", "normed", "autograd")],
)
def test_other_readouts_of_an_earlier_query_are_the_twins_and_later_positions_are_zero(name, readout, engine):
    for pathway in PATHWAYS:
        got = jacobian(view(name), TOKENS, pathway=pathway, query=6, readout=readout, engine=engine).sensitivity[0]
        close(got[:7], twin(name, readout, 6)[pathway], max(TWIN[name], 1e-7))  # square roots of eigenvalues
        assert not got[7:].any()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_transformer_lens_gives_the_same(name):
    for pathway in PATHWAYS:
        got = jacobian(view(name, BACKENDS[1]), TOKENS, pathway=pathway)
        assert got.attrs["engine"] == "autograd"
        # A bridge's eager attention takes its softmax in float32, GPT-2's as Llama's.
        close(got.sensitivity[0], twin(name)[pathway], 1e-3)


def test_a_sketch_of_all_directions_is_exact():
    got = jacobian(view("gpt2"), TOKENS, method="sketch", products=500, pathway="all")
    assert got.sensitivity.dims == ("pathway", "prompt", "position")
    for pathway in PATHWAYS:
        alone = jacobian(view("gpt2"), TOKENS, pathway=pathway)
        close(got.sensitivity.sel(pathway=pathway), alone.sensitivity, 1e-9)  # rounding
    assert not got.stderr.any()


@pytest.mark.parametrize("engine", ["parts", "autograd"])
def test_scalar_is_one_row_of_the_pathway(engine):
    seen, tokens = view("gpt2"), TOKENS
    x = seen.embed(tokens)[0]
    parts, rotary = [parts_of(seen, layer) for layer in range(families.BLOCKS)], seen.trace(x[None]).rotary
    expected = reference.pathway_norms(parts, rotary, x, torch.ones(1, families.WIDTH, dtype=torch.float64))
    for pathway in PATHWAYS:
        got = jacobian(seen, tokens, method="scalar", pathway=pathway, engine=engine).sensitivity[0]
        close(got, expected[pathway] / families.WIDTH**0.5, TWIN["gpt2"])
