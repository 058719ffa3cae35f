"""What flows through values and through scores, against twins that hold the pattern constant by themselves."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import cache
from typing import Any

import families
import numpy as np
import pytest
import reference
import torch
from torch import Tensor

import probes
from probes import InputError
from probes import jacobian as checked_jacobian
from probes.models.huggingface import HuggingFaceView
from probes.models.view import Edit, Parts, Trace, View

jacobian: Any = inspect.unwrap(checked_jacobian)  # as users call it: no type checks ahead of our own messages
PATHWAYS = ("total", "value", "score")
BACKENDS = ("transformers", "transformer_lens")
LENGTH = 11  # longer than the window of 8
LAYER_NORM = ("gpt2", "gpt_neox")
# transformers computes RMS norms in float32 even in float64 models (6e-8), the twin does not; three blocks of wide weights
# amplify that by about a hundred, and the score path, a difference of two larger Jacobians, by ten more.
TWIN = {name: 1e-10 if name in LAYER_NORM else 2e-4 for name in families.FAMILIES}


def some_tokens(prompts: int = 1, length: int = LENGTH, seed: int = 5) -> Tensor:
    return torch.randint(families.VOCABULARY, (prompts, length), generator=torch.Generator().manual_seed(seed))


@cache
def view(name: str) -> HuggingFaceView:
    return HuggingFaceView(families.model(name, dtype=torch.float64))


def close(got: Any, expected: Any, tolerance: float) -> None:
    """Relative per position, so that small sensitivities count as much as large ones."""
    np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=tolerance, atol=0)


def taken_apart(seen: View, layer: int) -> Parts:
    parts = seen.parts(layer)
    assert parts is not None
    return parts


@cache
def twin(name: str, readout: str = "residual", query: int = LENGTH - 1, layer: int = 0) -> dict[str, np.ndarray]:
    """||J_j||_F / sqrt(d) of every pathway, by autograd through the twin's blocks, positions after the query left out."""
    seen = view(name)
    trace = seen.trace(seen.embed(some_tokens()[:, : query + 1]))
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "residual": lambda x: x,
        "normed": seen.norm,
        "logits": lambda x: seen.unembed(seen.norm(x)),
    }
    top = torch.autograd.functional.jacobian(functions[readout], trace.residual[-1][0, -1])
    assert isinstance(top, Tensor)
    parts = [taken_apart(seen, at) for at in range(layer, families.BLOCKS)]
    norms = reference.pathway_norms(parts, trace.rotary[layer:], trace.residual[layer][0], top.detach())
    return {pathway: (values / families.WIDTH**0.5).numpy() for pathway, values in norms.items()}


# ------------------------------------------------------------------------------------------------------ exact


@pytest.mark.parametrize("name", families.FAMILIES)
@pytest.mark.parametrize("engine", ["parts", "autograd"])
def test_every_pathway_is_the_twins(name, engine):
    expected = twin(name)
    assert (expected["score"] > 1e-3 * expected["total"])[1:].all()  # there is something to get wrong
    for pathway in PATHWAYS:
        got = jacobian(view(name), some_tokens(), pathway=pathway, engine=engine)
        close(got.sensitivity[0], expected[pathway], TWIN[name])
        assert json.loads(got.attrs["options"])["pathway"] == pathway
        assert got.attrs["engine"] == engine
        assert got.products.values.tolist() == [families.WIDTH]  # "score" pulls each back twice, and counts it once
        assert not got.stderr.any()


def test_total_is_what_is_measured_unless_another_pathway_is_asked_for():
    got = jacobian(view("llama"), some_tokens())
    assert json.loads(got.attrs["options"])["pathway"] == "total"
    close(got.sensitivity, jacobian(view("llama"), some_tokens(), pathway="total").sensitivity, 0)


@pytest.mark.parametrize("name", ["gemma2", "gpt_neox"])
@pytest.mark.parametrize("readout", ["normed", "logits"])
def test_other_readouts_are_the_twins(name, readout):
    for pathway in PATHWAYS:
        got = jacobian(view(name), some_tokens(), pathway=pathway, readout=readout)
        close(
            got.sensitivity[0], twin(name, readout)[pathway], max(TWIN[name], 1e-7)
        )  # 1e-7: square roots of eigenvalues


@pytest.mark.parametrize("name", ["mistral", "gpt2"])
@pytest.mark.parametrize("engine", ["parts", "autograd"])
def test_an_earlier_query_is_the_twins_and_later_positions_are_zero(name, engine):
    for pathway in PATHWAYS:
        got = jacobian(view(name), some_tokens(), pathway=pathway, query=6, engine=engine).sensitivity[0]
        close(got[:7], twin(name, query=6)[pathway], TWIN[name])
        assert not got[7:].any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "gpt_neox"])
@pytest.mark.parametrize("engine", ["parts", "autograd"])
def test_every_layer_is_the_twins(name, engine):
    for pathway in PATHWAYS:
        every = jacobian(view(name), some_tokens(), pathway=pathway, from_layer="all", engine=engine)
        for layer in range(families.BLOCKS):
            close(every.sensitivity[0, layer], twin(name, layer=layer)[pathway], TWIN[name])
        alone = jacobian(view(name), some_tokens(), pathway=pathway, from_layer=1, engine=engine)
        close(every.sensitivity[:, 1], alone.sensitivity, 1e-9)  # rounding, of the same sums


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox"])
def test_transformer_lens_gives_the_same(name):
    lens = probes.load(families.model(name, dtype=torch.float64), "transformer_lens", tokenizer=families.tokenizer())
    for pathway in PATHWAYS:
        got = jacobian(lens, some_tokens(), pathway=pathway)
        assert got.attrs["engine"] == "autograd"
        # A bridge's eager attention takes its softmax in float32, GPT-2's as Llama's.
        close(got.sensitivity[0], twin(name)[pathway], 1e-3)


@pytest.mark.slow
def test_a_pretrained_model_through_its_own_modules():
    model = probes.load("tiny-llama", dtype="float64", device="cpu")
    tokens = probes.prompts(model, n=1, length=24)
    x = model.embed(tokens).requires_grad_()
    sites: tuple[Any, ...] = ("query", "key")
    cut = [Edit(site, layer, Tensor.detach) for layer in range(model.spec.blocks) for site in sites]
    rows = {}
    for pathway, edits in {"total": [], "value": cut}.items():
        output = model.residual(x, edits=edits)[0, -1]
        rows[pathway] = torch.stack([torch.autograd.grad(o, x, retain_graph=True)[0][0] for o in output])
    rows["score"] = rows["total"] - rows["value"]
    for pathway, row in rows.items():
        expected = (row.pow(2).sum((0, 2)) / model.spec.width).sqrt()
        for engine in ("parts", "autograd") if pathway == "score" else ("parts",):
            got = jacobian(model, tokens, pathway=pathway, engine=engine)
            close(got.sensitivity[0], expected, 1e-4)  # float32 RMS norms (6e-8) in six blocks; scores are a difference


# ------------------------------------------------------------------------------------------------------ identities


def without_queries(name: str) -> HuggingFaceView:
    """The family's model with logits that are zero whatever is read."""
    model: Any = families.model(name, dtype=torch.float64)
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            if "q_proj" in label:
                parameter.zero_()
            if "c_attn.weight" in label:  # [input, q and k and v side by side]
                parameter[:, : families.WIDTH] = 0
            if "c_attn.bias" in label:
                parameter[: families.WIDTH] = 0
    return HuggingFaceView(model)


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gpt2"])
@pytest.mark.parametrize("engine", ["parts", "autograd"])
def test_without_queries_all_is_value(name, engine):
    seen = without_queries(name)
    total, value, score = (
        jacobian(seen, some_tokens(), pathway=pathway, engine=engine).sensitivity for pathway in PATHWAYS
    )
    close(value, total, 1e-12)  # zeros are added in another order
    assert (score < 1e-12 * total).all()


@pytest.mark.parametrize("engine", ["parts", "autograd"])
def test_the_first_position_has_no_choice_and_so_no_scores(engine):
    seen = view("llama")
    total, score = (
        jacobian(seen, some_tokens(), pathway=pathway, query=0, engine=engine).sensitivity[0, 0]
        for pathway in ("total", "score")
    )
    assert total > 0
    assert score < 1e-10 * total  # softmax of one logit: rounding of wide weights


def test_blocks_in_parts_and_blocks_by_autograd_go_together():
    model: Any = families.model("gpt_neox", dtype=torch.float64)
    model.gpt_neox.layers[1].register_forward_hook(lambda module, args, output: 2 * output)
    seen = HuggingFaceView(model)
    for pathway in PATHWAYS:
        with pytest.warns(UserWarning, match="engine autograd for block 1"):
            mixed = jacobian(seen, some_tokens(), pathway=pathway)
        assert mixed.attrs["engine"] == "autograd+parts"
        own = jacobian(seen, some_tokens(), pathway=pathway, engine="autograd")
        close(mixed.sensitivity, own.sensitivity, TWIN["gpt_neox"])


# ------------------------------------------------------------------------------------------------------ estimates


@pytest.mark.parametrize("pathway", PATHWAYS)
@pytest.mark.parametrize("products", [families.WIDTH, 500])
def test_a_sketch_of_all_directions_is_exact(pathway, products):
    got = jacobian(view("gpt2"), some_tokens(), method="sketch", products=products, pathway=pathway)
    close(got.sensitivity, jacobian(view("gpt2"), some_tokens(), pathway=pathway).sensitivity, 1e-9)  # rounding
    assert not got.stderr.any()


@pytest.mark.slow
@pytest.mark.parametrize(("pathway", "products"), [("value", 10), ("score", 10), ("score", 48)])  # 48: with a basis
def test_squared_sketches_are_unbiased(pathway, products):
    seen, tokens, seeds = view("gpt2"), some_tokens(length=24), 40
    exact = jacobian(seen, tokens, pathway=pathway).sensitivity.values[0]
    repeated = tokens.expand(seeds, -1).contiguous()
    got = jacobian(seen, repeated, method="sketch", products=products, pathway=pathway)
    assert bool(got.basis_products.all()) == (products == 48)
    squared = got.sensitivity.values**2
    deviation = (squared.mean(0) - exact**2) / (squared.std(0, ddof=1) / seeds**0.5)
    assert np.abs(deviation).max() < 4
    # Standard errors that claim 95 %: positions of one draw err alike, so that a few percent either way are chance.
    covered = (np.abs(got.sensitivity.values - exact) <= 1.96 * got.stderr.values).mean()
    assert 0.85 < covered <= 1


@pytest.mark.parametrize("engine", ["parts", "autograd"])
def test_scalar_is_one_row_of_the_pathway(engine):
    seen, tokens = view("gpt2"), some_tokens()
    x = seen.embed(tokens)[0]
    parts, rotary = [taken_apart(seen, layer) for layer in range(families.BLOCKS)], seen.trace(x[None]).rotary
    expected = reference.pathway_norms(parts, rotary, x, torch.ones(1, families.WIDTH, dtype=torch.float64))
    for pathway in PATHWAYS:
        got = jacobian(seen, tokens, method="scalar", pathway=pathway, engine=engine).sensitivity[0]
        close(got, expected[pathway] / families.WIDTH**0.5, TWIN["gpt2"])


# --------------------------------------------------------------------------------------------------------- conduct


class Stop(Exception):
    """Raised from a progress callback."""


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("engine", ["parts", "autograd"])
def test_the_model_given_stays_as_it_is(fails, engine):
    model = families.model("llama").train()

    def state() -> Any:
        hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()]
        weights = {key: value.numpy().tobytes() for key, value in model.state_dict().items()}
        flags = [(p.requires_grad, p.grad is None) for p in model.parameters()]
        return hooks, weights, flags, model.training, model.config._attn_implementation, torch.get_rng_state().tolist()

    def progress(done: float, total: float) -> None:
        if fails:
            raise Stop

    before, seen = state(), HuggingFaceView(model)
    plain = seen.residual(seen.embed(some_tokens()))
    if fails:
        with pytest.raises(Stop):
            jacobian(seen, some_tokens(), pathway="score", engine=engine, progress=progress)
    else:
        jacobian(seen, some_tokens(), pathway="score", engine=engine, progress=progress)
    assert state() == before
    assert torch.equal(seen.residual(seen.embed(some_tokens())), plain)  # the view is as it was, too


@pytest.mark.parametrize("pathway", ["values", "", None, "Total"])
def test_an_unknown_pathway_is_refused(pathway):
    with pytest.raises(InputError, match=r"pathway '.*' does not exist; use total, value, score") as caught:
        jacobian(view("llama"), some_tokens(), pathway=pathway)
    assert "\n" not in str(caught.value)


# ----------------------------------------------------------------------------- recorded blocks keep the pass's edits


@cache
def either(name: str, backend: Any) -> Any:
    return probes.load(families.model(name, dtype=torch.float64), backend, tokenizer=families.tokenizer())


@pytest.mark.parametrize("name", families.FAMILIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_of_a_trace_apply_its_edits(name, backend):
    seen = either(name, backend)
    embeddings = seen.embed(some_tokens())

    def turned(x: Tensor) -> Tensor:
        return -0.5 * x + 0.1

    plain = seen.trace(embeddings)
    for site in ("residual", "query", "key", "value"):
        for layers in ([1], [0, 2]) if site == "key" else ([1],):
            trace: Trace = seen.trace(embeddings, edits=[Edit(site, layer, turned) for layer in layers])
            for layer, block in enumerate(trace.blocks):
                if site == "residual" and layer + 1 in layers:
                    continue  # what is recorded next was edited once more
                stream, after = trace.residual[layer], trace.residual[layer + 1]
                # Exactly: the same operations on the same numbers.
                assert torch.equal(block(stream), after)
                unedited = plain.blocks[layer](stream)
                same = (
                    layer not in layers or site == "residual"
                )  # an edited stream is what the block is recorded to read
                assert torch.equal(unedited, after) == same, (site, layer)
    assert torch.equal(seen.trace(embeddings).blocks[1](plain.residual[1]), plain.residual[2])  # nothing is left behind


@pytest.mark.parametrize("name", families.FAMILIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_detached_queries_and_keys_make_a_block_with_constant_patterns(name, backend):
    seen, apart = either(name, backend), view(name)
    sites: tuple[Any, ...] = ("query", "key")
    trace = seen.trace(seen.embed(some_tokens()), edits=[Edit(site, 1, Tensor.detach) for site in sites])
    cotangent = torch.randn(LENGTH, families.WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def pulled(function: Callable[[Tensor], Tensor]) -> Tensor:
        stream = trace.residual[1].detach().clone().requires_grad_()
        return torch.autograd.grad(function(stream), stream, cotangent[None])[0][0]

    parts, rotary = taken_apart(apart, 1), trace.rotary[1]
    expected = pulled(lambda x: reference.block(parts, x[0], rotary, frozen=True)[None])
    through_scores = pulled(lambda x: reference.block(parts, x[0], rotary)[None])
    # float32 in RMS norms, and in a bridge's eager softmax
    noise = 1e-10 if name in LAYER_NORM and backend == "transformers" else 1e-4
    assert (pulled(trace.blocks[1]) - expected).abs().max() < noise * expected.abs().max()
    assert (through_scores - expected).abs().max() > 30 * noise * expected.abs().max()
