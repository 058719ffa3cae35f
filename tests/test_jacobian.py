"""Sensitivities against brute force, finite differences and algebra; sketches against what they promise."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import reference
import torch
import xarray as xr
from torch import Tensor

import probes
from probes import InputError
from probes import jacobian as checked_jacobian
from probes.models.huggingface import HuggingFaceView
from probes.models.view import Edit, Identity, Parts, Spec, Trace, View, Watcher

STORIES = Path(__file__).parent.parent.parent / "shared" / "checkpoints" / "stories260K"
jacobian: Any = inspect.unwrap(checked_jacobian)  # as users call it: no type checks ahead of our own messages
LENGTH = 12  # longer than the window of 8
# transformers computes RMS norms and eager softmax in float32 even in float64 models (6e-8); three blocks of wide weights
# amplify that by about a hundred. GPT-2 and GPT-NeoX have LayerNorm, and their twin runs on fused attention: rounding.
LAYER_NORM = ("gpt2", "gpt_neox")
BRUTE = {name: 1e-11 if name in LAYER_NORM else 5e-5 for name in families.FAMILIES}


def some_tokens(prompts: int = 1, length: int = LENGTH, seed: int = 5) -> Tensor:
    return torch.randint(families.VOCABULARY, (prompts, length), generator=torch.Generator().manual_seed(seed))


def view(name: str, *, dtype: torch.dtype = torch.float64) -> HuggingFaceView:
    return HuggingFaceView(families.model(name, dtype=dtype))


def brute_model(name: str) -> Any:
    config = families.FAMILIES[name]()
    config._attn_implementation = "sdpa" if name in LAYER_NORM else "eager"
    return families.build(config, dtype=torch.float64)


def brute(
    model: Any, tokens: Tensor, query: int, readout: str = "residual", layer: int = 0, summed: bool = False
) -> np.ndarray:
    """Sensitivities of one prompt by autograd through the whole transformers model, one output at a time."""
    decoder = model.get_decoder()
    blocks = decoder.h if hasattr(decoder, "h") else decoder.layers
    final = next(getattr(decoder, n) for n in ("ln_f", "final_layer_norm", "norm") if hasattr(decoder, n))
    held: dict[str, Tensor] = {}

    def before_block(module: Any, args: Any, kwargs: Any) -> Any:
        held["source"] = (args[0] if args else kwargs["hidden_states"]).detach().requires_grad_()
        return ((held["source"], *args[1:]), kwargs) if args else ((), kwargs | {"hidden_states": held["source"]})

    def at_norm(module: Any, args: Any, output: Tensor) -> None:
        held["residual"], held["normed"] = args[0], output

    handles = [
        blocks[layer].register_forward_pre_hook(before_block, with_kwargs=True),
        final.register_forward_hook(at_norm),
    ]
    held["logits"] = model(tokens, use_cache=False).logits
    for handle in handles:
        handle.remove()
    outputs = held[readout][0, query]
    outputs = outputs.sum()[None] if summed else outputs
    return reference.jacobian_norms(outputs, held["source"]).numpy() / families.WIDTH**0.5


def close(got: Any, expected: Any, tolerance: float) -> None:
    """Relative per position, so that small sensitivities count as much as large ones."""
    np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=tolerance, atol=0)


# -------------------------------------------------------------------------------------------------------- exact


@pytest.mark.parametrize("name", families.FAMILIES)
@pytest.mark.parametrize("readout", ["residual", "normed", "logits"])
def test_exact_is_brute_force(name, readout):
    tokens = some_tokens()
    got = jacobian(view(name), tokens, readout=readout)
    close(got.sensitivity[0], brute(brute_model(name), tokens, LENGTH - 1, readout), BRUTE[name])
    assert not got.stderr.any()
    assert got.attrs["engine"] == "parts"
    assert got.products.values.tolist() == [families.WIDTH]


@pytest.mark.parametrize("name", ["gemma2", "gpt_neox"])
@pytest.mark.parametrize("query", [6, -3, 0])
def test_other_queries_are_brute_force_and_later_positions_exactly_zero(name, query):
    tokens, at = some_tokens(), query % LENGTH
    expected = brute(brute_model(name), tokens, at)
    assert not expected[at + 1 :].any()
    got = jacobian(view(name), tokens, query=query)
    close(got.sensitivity[0], expected, BRUTE[name])
    assert json.loads(got.attrs["options"])["query"] == at
    for method in ("sketch", "scalar"):
        late = jacobian(view(name), tokens, query=query, method=method).isel(position=slice(at + 1, None))
        assert not late.sensitivity.any()
        assert not late.stderr.any()


@pytest.mark.parametrize("name", ["mistral", "gpt2"])
def test_every_layer_is_brute_force_and_a_row_of_all(name):
    tokens = some_tokens(2)
    seen = view(name)
    every = jacobian(seen, tokens, from_layer="all")
    assert every.sensitivity.dims == ("prompt", "layer", "position")
    for layer in range(families.BLOCKS):
        alone = jacobian(seen, tokens, from_layer=layer)
        close(every.sensitivity.sel(layer=layer), alone.sensitivity, 1e-12)  # rounding alone
        expected = brute(brute_model(name), tokens[1:], LENGTH - 1, layer=layer)
        close(alone.sensitivity[1], expected, BRUTE[name])


@pytest.mark.parametrize("name", families.FAMILIES)
def test_engines_agree(name):
    tokens, seen = some_tokens(2), view(name)
    parts, autograd = (jacobian(seen, tokens, engine=engine) for engine in ("parts", "autograd"))
    assert (parts.attrs["engine"], autograd.attrs["engine"]) == ("parts", "autograd")
    close(parts.sensitivity, autograd.sensitivity, BRUTE[name])


@pytest.mark.parametrize("name", families.FAMILIES)
def test_exact_is_a_central_difference_of_the_forward_pass(name):
    seen, tokens = view(name), some_tokens()
    # Truncation falls as eps^2; what the forward pass rounds (1e-16, RMS norms 6e-8) is divided by eps. Errors of
    # different outputs and inputs are independent, so that the norm of d x d of them suffers less than each.
    eps, tolerance = (1e-5, 1e-6) if name in LAYER_NORM else (2e-4, 5e-3)
    got = jacobian(seen, tokens).sensitivity[0].values
    x = seen.embed(tokens)
    for position in (0, 5, LENGTH - 1):
        step = torch.zeros(families.WIDTH, LENGTH, families.WIDTH, dtype=torch.float64)
        step[:, position] = eps * torch.eye(families.WIDTH)
        with torch.no_grad():
            difference = (seen.residual(x + step) - seen.residual(x - step))[:, -1] / (2 * eps)
        close(got[position], torch.linalg.matrix_norm(difference) / families.WIDTH**0.5, tolerance)


def test_chunk_sizes_agree():
    seen, tokens = view("llama"), some_tokens(2)
    exact = [jacobian(seen, tokens, chunk=chunk) for chunk in (1, 3, 64)]
    sketch = [jacobian(seen, tokens, chunk=chunk, method="sketch", products=17) for chunk in (1, 3, 64)]
    for first, *others in (exact, sketch):
        for other in others:  # rounding alone; standard errors, too, count every pair of probes whatever the chunk
            close(other.sensitivity, first.sensitivity, 1e-10)
            close(other.stderr, first.stderr, 1e-9)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_transformer_lens_gives_the_same(name):
    tokens = some_tokens()
    lens = probes.load(families.model(name), "transformer_lens", tokenizer=families.tokenizer())
    got = jacobian(lens, tokens)
    assert got.attrs["engine"] == "autograd"
    # float32 here (6e-8), float64 there, through blocks that amplify
    close(got.sensitivity, jacobian(view(name), tokens).sensitivity, 5e-4)


@pytest.mark.slow
def test_dtypes_agree_on_a_pretrained_model():
    models = {name: probes.load("tiny-llama", dtype=name, device="cpu") for name in ("float64", "float32", "bfloat16")}
    tokens = probes.prompts(models["float64"], n=1, length=48)
    got = {name: jacobian(model, tokens).sensitivity.values for name, model in models.items()}
    close(got["float32"], got["float64"], 1e-4)  # 6e-8 through six blocks
    # bfloat16 rounds to 4e-3 at every operation of six blocks, forwards and back
    close(got["bfloat16"], got["float64"], 0.08)
    assert np.abs(np.log(got["bfloat16"] / got["float64"])).mean() < 0.02


# -------------------------------------------------------------------------------------- a model of known derivative


@dataclass
class LinearStack:
    """x_i -> x_i + sum_j mixing_ij W x_j, the same in every block; nothing can be taken apart."""

    mixing: Tensor
    weight: Tensor
    spec: Spec
    identity: Identity
    tokenizer: Any = None
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable
    dtype: torch.dtype = torch.float64
    offloaded: bool = False
    bos: int | None = None

    def block(self, x: Tensor) -> Tensor:
        return x + self.mixing[: x.shape[1], : x.shape[1]] @ x @ self.weight.T

    def embed(self, tokens: Tensor) -> Tensor:
        table = torch.randn(self.spec.vocabulary, self.spec.width, generator=torch.Generator().manual_seed(3))
        return table.double()[tokens]

    def trace(self, embeddings: Tensor, *, attention: bool = False, edits: Sequence[Edit] = ()) -> Trace:
        streams = [embeddings]
        for _ in range(self.spec.blocks):
            streams.append(self.block(streams[-1]))
        return Trace(tuple(streams), (self.block,) * self.spec.blocks, (None,) * self.spec.blocks)

    def residual(self, embeddings: Tensor, *, edits: Sequence[Edit] = ()) -> Tensor:
        return self.trace(embeddings).residual[-1]

    def watching(self, watcher: Watcher) -> AbstractContextManager[None]:
        return nullcontext()  # there is no attention to be seen

    def output_weights(self, layer: int) -> Tensor:
        return self.weight.T[None]  # one head, whose values are the stream itself

    def norm(self, residual: Tensor) -> Tensor:
        return 3 * residual

    def unembed(self, normed: Tensor) -> Tensor:
        return torch.cat([normed, 2 * normed[..., :1]], -1)

    def parts(self, layer: int) -> Parts | None:
        return None

    def reinitialized(self, seed: int, *, positional: bool = True, initialization: Any = "config") -> LinearStack:
        return self


@pytest.fixture
def stack() -> LinearStack:
    generator = torch.Generator().manual_seed(1)
    mixing = torch.rand(7, 7, generator=generator, dtype=torch.float64).tril()
    weight = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    spec = Spec("linear", 4, 1, 1, 5, 5, 11, ("none",) * 4, (None,) * 4, None, None)
    identity = Identity("linear", None, "pretrained", "0" * 64, "{}", "tests", "float64", "cpu")
    return LinearStack(mixing, weight, spec, identity)


def test_a_linear_model_has_its_closed_form(stack):
    tokens = torch.arange(7)[None]
    every = jacobian(stack, tokens, from_layer="all")
    assert every.attrs["engine"] == "autograd"
    for layer in range(4):
        expected = reference.linear_stack_norms(stack.mixing, stack.weight, 4 - layer) / 5**0.5
        got = jacobian(stack, tokens, from_layer=layer)
        close(got.sensitivity[0], expected, 1e-12)  # rounding alone
        close(every.sensitivity[0, layer], expected, 1e-12)
        close(jacobian(stack, tokens, from_layer=layer, readout="normed").sensitivity[0], 3 * expected, 1e-12)
    close(jacobian(stack, tokens).sensitivity, jacobian(stack, tokens, method="sketch").sensitivity, 1e-12)
    # The logits repeat the first output at twice the size: that row of J counts 1 + 4 times, all of them tripled.
    x = stack.embed(tokens).requires_grad_()
    outputs = stack.unembed(stack.norm(stack.residual(x)))[0, -1]
    logits = reference.jacobian_norms(outputs, x) / 5**0.5
    close(
        jacobian(stack, tokens, readout="logits").sensitivity[0], logits, 1e-7
    )  # through a square root of eigenvalues


# ------------------------------------------------------------------------------------------------------- sketches


@pytest.mark.parametrize("readout", ["residual", "logits"])
@pytest.mark.parametrize("products", [families.WIDTH, 1000])
def test_a_sketch_of_all_directions_is_exact(readout, products):
    seen, tokens = view("gemma2"), some_tokens()
    got = jacobian(seen, tokens, method="sketch", products=products, readout=readout)
    # eigenvectors of float64 logits' Gram matrix lose half the digits of its smallest eigenvalues
    close(got.sensitivity, jacobian(seen, tokens, readout=readout).sensitivity, 1e-7)
    assert not got.stderr.any()


@pytest.mark.parametrize(
    ("products", "readout"),
    [(6, "residual"), (48, "residual"), pytest.param(48, "logits", marks=pytest.mark.slow)],  # 6: without a basis
)
def test_squared_sketches_are_unbiased(products, readout):
    seen, tokens, seeds = view("llama", dtype=torch.float32), some_tokens(length=24), 200
    exact = jacobian(seen, tokens, readout=readout).sensitivity.values[0] ** 2
    got = jacobian(seen, tokens.expand(seeds, -1).contiguous(), method="sketch", products=products, readout=readout)
    assert bool(got.basis_products.all()) == (products == 48)
    assert (got.products <= products).all()
    squared = got.sensitivity.values**2
    deviation = (squared.mean(0) - exact) / (squared.std(0, ddof=1) / seeds**0.5)
    assert np.abs(deviation).max() < 4


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"engine": "autograd"}, {"pathway": "score"}, {"from_layer": "all"}])
def test_sketches_are_unbiased_whatever_the_basis_was_found_by(options):
    seen, tokens, seeds = view("llama", dtype=torch.float32), some_tokens(length=16), 60
    exact = jacobian(seen, tokens, **options).sensitivity.values[0] ** 2
    got = jacobian(seen, tokens.expand(seeds, -1).contiguous(), method="sketch", products=32, **options)
    assert (got.basis_products > 0).all()
    squared = got.sensitivity.values**2
    reached = exact > 1e-9 * exact.max()
    spread = squared.std(0, ddof=1)[reached] / seeds**0.5
    assert np.abs((squared.mean(0)[reached] - exact[reached]) / spread).max() < 4


def pairs_covered(model: View, *, products: int, prompts: int, seeds: int, length: int) -> float:
    """Share of (prompt, seed, position) whose 95 % interval holds the exact sensitivity."""
    tokens, covered = probes.prompts(model, n=prompts, length=length), []
    exact = jacobian(model, tokens).sensitivity.values
    for prompt, truth in zip(tokens, exact, strict=True):
        got = jacobian(model, prompt.expand(seeds, -1).contiguous(), method="sketch", products=products)
        covered.append((np.abs(got.sensitivity - truth) <= 1.96 * got.stderr).mean())
    return float(np.mean(covered))


@pytest.mark.parametrize("products", [8, pytest.param(32, marks=pytest.mark.slow)])  # without and with a basis
def test_intervals_cover_on_stories(products):
    if not STORIES.is_dir():
        pytest.skip("the checkpoint stories260K is not here")
    model = probes.load(STORIES, device="cpu")
    assert 0.90 <= pairs_covered(model, products=products, prompts=3, seeds=40, length=64) <= 0.99


@pytest.mark.slow
def test_intervals_cover_on_a_bundled_model():
    model = probes.load("tiny-llama", device="cpu")
    assert 0.90 <= pairs_covered(model, products=48, prompts=3, seeds=15, length=64) <= 0.99


@pytest.mark.parametrize("name", probes.bundled())
def test_sixty_four_products_are_within_two_percent(name):
    model = probes.load(name, device="cpu")
    tokens = probes.prompts(model, n=2, length=160)
    exact = jacobian(model, tokens).sensitivity.values
    got = jacobian(model, tokens, method="sketch").sensitivity.values
    assert (exact > 0).all()
    assert np.sqrt(((got / exact - 1) ** 2).mean()) < 0.02


@pytest.mark.slow
def test_auto_reaches_the_relative_error_asked_for():
    model, target = probes.load("tiny-llama", device="cpu"), 0.03
    tokens = probes.prompts(model, n=3, length=64)
    exact = jacobian(model, tokens).sensitivity
    got = jacobian(model, tokens, method="sketch", products="auto", relative_error=target)
    assert (got.products < model.spec.width).all()
    profile = probes.mean_profile(got.sensitivity, got.stderr)
    assert np.sqrt(((profile.stderr / profile.mean) ** 2).mean()) <= target
    # One draw, its errors alike at neighbouring positions: twice the target is allowed.
    truth = probes.mean_profile(exact).mean
    assert np.sqrt(((profile.mean / truth - 1) ** 2).mean()) < 2 * target


def test_auto_ends_with_every_direction_taken():
    seen, tokens = view("qwen2"), some_tokens(2)
    got = jacobian(seen, tokens, method="sketch", products="auto", relative_error=1e-9)
    close(got.sensitivity, jacobian(seen, tokens).sensitivity, 1e-9)
    assert not got.stderr.any()


@pytest.mark.parametrize("readout", ["residual", "normed", "logits"])
def test_scalar_is_the_product_with_ones(readout):
    tokens = some_tokens()
    got = jacobian(view("gpt2"), tokens, method="scalar", readout=readout)
    close(got.sensitivity[0], brute(brute_model("gpt2"), tokens, LENGTH - 1, readout, summed=True), BRUTE["gpt2"])
    assert np.isnan(got.stderr).all()
    assert got.products.values.tolist() == [1]


def test_pairs_that_are_not_kept_cost_precision_only(monkeypatch):
    seen, tokens = view("llama"), some_tokens()
    kept = jacobian(seen, tokens, method="sketch", products=12, chunk=4)
    monkeypatch.setattr(import_module("probes.measures.estimators"), "KEPT_BYTES", 0)
    forgotten = jacobian(seen, tokens, method="sketch", products=12, chunk=4)
    close(forgotten.sensitivity, kept.sensitivity, 1e-12)
    assert (np.abs(np.log(forgotten.stderr / kept.stderr)) < 1).all()


# ------------------------------------------------------------------------------------------------- conduct


@pytest.mark.parametrize("method", ["exact", "sketch", "scalar", "auto"])
def test_the_same_call_gives_the_same_numbers(method):
    options = {"method": "sketch", "products": "auto"} if method == "auto" else {"method": method}
    seen, tokens = view("qwen3", dtype=torch.float32), some_tokens(2)
    first, second = (jacobian(seen, tokens, **options) for _ in range(2))
    xr.testing.assert_identical(first.drop_attrs(), second.drop_attrs())
    if method == "sketch":
        other = jacobian(seen, tokens, **options, products=20, seed=1)
        assert (other.sensitivity != jacobian(seen, tokens, **options, products=20).sensitivity).any()


@pytest.mark.parametrize(
    "options", [{}, {"method": "sketch", "products": 40}, {"method": "sketch", "products": "auto"}]
)
def test_progress_is_monotone_and_ends_at_the_total(options):
    calls: list[tuple[float, float]] = []
    jacobian(view("llama"), some_tokens(2, 24), **options, progress=lambda done, total: calls.append((done, total)))
    done, total = np.array(calls).T
    assert (np.diff(done) >= 0).all()
    assert (np.diff(total) >= 0).all()
    assert (done <= total).all()
    assert done[-1] == total[-1] > 0


class Stop(Exception):
    """Raised from a progress callback."""


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("engine", ["auto", "autograd"])
def test_the_model_given_stays_as_it_is(fails, engine):
    model = families.model("llama").train()
    model.get_input_embeddings().requires_grad_(False)
    model.register_forward_hook(lambda module, args, output: None)

    def state() -> Any:
        hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()]
        weights = {key: value.numpy().tobytes() for key, value in model.state_dict().items()}
        flags = [(p.requires_grad, p.grad is None) for p in model.parameters()]
        modes = [m.training for m in model.modules()]
        return hooks, weights, flags, modes, model.config._attn_implementation, torch.get_rng_state().tolist()

    def progress(done: float, total: float) -> None:
        if fails:
            raise Stop

    before, numpys = state(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]  # noqa: NPY002
    seen = HuggingFaceView(model)
    for options in ({}, {"method": "sketch", "products": 20, "readout": "logits"}):
        if fails:
            with pytest.raises(Stop):
                jacobian(seen, some_tokens(), engine=engine, progress=progress, **options)
        else:
            jacobian(seen, some_tokens(), engine=engine, progress=progress, **options)
    assert state() == before
    assert np.random.get_state()[1].tolist() == numpys  # type: ignore[union-attr]  # noqa: NPY002
    assert torch.is_grad_enabled()


def test_a_block_changed_by_a_hook_is_measured_as_it_runs():
    model = brute_model("gpt_neox")
    model.gpt_neox.layers[1].register_forward_hook(lambda module, args, output: torch.tanh(output))
    tokens = some_tokens()
    with pytest.warns(UserWarning, match=r"engine autograd for block 1 \(forward hook"):
        got = jacobian(HuggingFaceView(model), tokens)
    assert got.attrs["engine"] == "autograd+parts"
    close(got.sensitivity[0], brute(model, tokens, LENGTH - 1), 1e-9)  # rounding where tanh is nearly flat
    with pytest.raises(InputError, match="engine 'parts' does not know"):
        jacobian(HuggingFaceView(model), tokens, engine="parts")


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
    with pytest.raises(InputError, match=r"block 1 of .* does not do what its parts say") as caught:
        jacobian(seen, tokens, engine="parts")
    assert "\n" not in str(caught.value)


GOOD = some_tokens()


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        (GOOD, {"method": "fast"}, "method 'fast' does not exist; use exact, sketch, scalar"),
        (GOOD, {"readout": "loss"}, "readout 'loss' does not exist"),
        (GOOD, {"engine": "cuda"}, "engine 'cuda' does not exist"),
        (GOOD, {"query": LENGTH}, "query 12 is outside the prompt of 12 tokens; give -12 to 11"),
        (GOOD, {"query": -LENGTH - 1}, "query -13 is outside"),
        (GOOD, {"from_layer": 3}, "from_layer 3 does not exist; the model has blocks 0 to 2"),
        (GOOD, {"from_layer": -1}, "from_layer -1 does not exist"),
        (GOOD, {"products": 32}, "products=32 goes with method 'sketch', not 'exact'"),
        (GOOD, {"method": "scalar", "products": 1}, "products=1 goes with method 'sketch'"),
        (GOOD, {"method": "sketch", "products": 1}, "products=1 is too few"),
        (GOOD, {"method": "sketch", "products": "all"}, "products"),
        (GOOD, {"method": "sketch", "products": "auto", "relative_error": 0.0}, "relative_error=0.0 cannot be reached"),
        (GOOD, {"relative_error": float("nan")}, "relative_error=nan"),
        (GOOD, {"chunk": 0}, "chunk=0 is not positive"),
        (GOOD, {"from_layer": "last"}, "from_layer"),
        ([[1, 2]], {}, "tokens are a list"),
        (GOOD.int(), {}, "tokens have dtype int32"),
        (GOOD[0], {}, r"tokens have shape \[12\]; give two dimensions"),
        (GOOD[:0], {}, "at least 1 prompt of at least 2 positions"),
        (GOOD[:, :1], {}, "at least 1 prompt of at least 2 positions"),
        (some_tokens(length=families.MAX_LENGTH + 1), {}, "was made for 128; give shorter prompts"),
        (GOOD - 200, {}, "is outside the vocabulary"),
        (GOOD + families.VOCABULARY, {}, "ids run from 0 to 127"),
    ],
)
def test_wrong_input_is_refused_in_one_line(tokens, options, message):
    with pytest.raises(InputError, match=message) as caught:
        jacobian(view("llama"), tokens, **options)
    assert "\n" not in str(caught.value)


def test_values_that_are_not_finite_are_refused():
    model = families.model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(InputError, match="not finite") as caught:
        jacobian(HuggingFaceView(model), GOOD)
    assert "\n" not in str(caught.value)
