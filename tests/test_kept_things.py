"""What callers keep on a model, and models put together in memory: measured as they are, and left alone.

References are eager patterns of transformers and its own logits, of a model that is made anew where one module stands twice.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import families
import pytest
import torch
import transformers
from families import blocks, refused
from torch import nn

import probes
from probes.run.precision import left, products

IDS = torch.randint(3, families.VOCABULARY, (4, 20), generator=torch.Generator().manual_seed(1))
NOISE = 1e-4  # of double precision through rotations and norms in float32


def agrees(model: Any, expected: Any) -> None:
    """A view of `model` gives the patterns and logits of the other, as transformers runs it."""
    for module in expected.modules():
        if hasattr(module, "config"):  # blocks of other models have other ones
            module.config._attn_implementation = "eager"
    with torch.no_grad():
        own = expected(IDS, output_attentions=True, use_cache=False)
    view: Any = probes.load(model)
    traced = view.trace(view.embed(IDS), attention=True)
    assert view.spec.blocks == len(traced.attention) == len(own.attentions)
    for found, pattern in zip(traced.attention, own.attentions, strict=True):
        assert (found.pattern() - pattern).abs().max() < NOISE
    logits = view.unembed(view.norm(view.residual(view.embed(IDS)))).detach()
    assert (logits - own.logits).abs().max() < NOISE * own.logits.std()
    found, slow = (
        probes.jacobian(model, IDS[:1], method="exact", engine=engine)["sensitivity"] for engine in ("auto", "autograd")
    )
    assert abs(found - slow).max() < NOISE * slow.max()


def test_what_is_kept_on_modules_is_left_alone(tmp_path):
    model = families.model("llama", dtype=torch.float64)
    kept = blocks(model)[1]
    handle = kept.register_forward_hook(lambda module, args, output: setattr(module, "saved", output))
    model(IDS)  # an activation with its history
    handle.remove()
    with (tmp_path / "log").open("w") as file:
        model.lock, model.local = threading.Lock(), {"own": [threading.local()]}
        kept.log, kept.mlp.drawn = file, (x for x in range(3))
        before = {name: dict(vars(module)) for name, module in model.named_modules()}
        agrees(model, families.model("llama", dtype=torch.float64))
        probes.load(model, dtype="float32").reinitialized(0)
        for name, module in model.named_modules():
            assert all(before[name][key] is value for key, value in vars(module).items())


@pytest.mark.parametrize("name", ["gpt2", "gemma3_text"])
@pytest.mark.parametrize("order", [(0, 2), (2, 0, 1)])
def test_blocks_are_those_that_the_model_runs(name, order):
    pair = [families.model(name, dtype=torch.float64) for _ in range(2)]
    for model in pair:
        listed = nn.ModuleList([blocks(model)[at] for at in order])
        setattr(model.get_decoder(), "h" if name == "gpt2" else "layers", listed)
        model.config.num_hidden_layers = len(order)
    agrees(*pair)
    seen: Any = probes.load(pair[0])
    assert seen.reinitialized(0).spec == seen.spec


def test_blocks_that_are_not_as_the_config_says_or_stand_twice_are_refused():
    for name, listed, says in (
        ("gpt_oss", (0, 1), "2 blocks where its config says 3; make num_hidden_layers"),
        ("gpt_oss", (0, 1, 0), "stands at two places of the model"),
        ("smollm3", (1, 0, 2), "rotate otherwise than no_rope_layers"),
    ):
        model: Any = families.model(name)
        model.model.layers = nn.ModuleList([model.model.layers[at] for at in listed])
        assert says in refused(probes.load, model)


@pytest.mark.parametrize("kind", ["AutoModel", "AutoModelForSequenceClassification", "no head", "deleted"])
def test_what_needs_no_logits_runs_without_a_head(kind):
    whole: Any = families.model("gpt2")
    model: Any = families.model("gpt2")
    if kind.startswith("Auto"):
        model = getattr(transformers, kind).from_config(families.small("gpt2")).eval()
        getattr(model, "transformer", model).load_state_dict(whole.get_decoder().state_dict())
    elif kind == "no head":
        model.lm_head = nn.Identity()
    else:
        del model.lm_head
    for probe in (
        lambda m: probes.sinks(m, IDS)["alpha"],
        lambda m: probes.jacobian(m, IDS[:1], readout="normed", method="sketch", products=8)["sensitivity"],
    ):
        assert probe(model).equals(probe(whole))
    for refuses in (
        partial(probes.jacobian, model, IDS, readout="logits"),
        partial(probes.inspect, model, IDS[0].tolist()),
        partial(probes.sinks, model, IDS, effect=True),
        partial(probes.decode, model, IDS.repeat(4, 1)),
        partial(probes.load, model, "transformer_lens"),
    ):
        assert "has no output head" in refused(refuses)


def test_hooks_hand_things_to_each_other_and_follow_their_caller():
    model, held, switch = families.model("llama", dtype=torch.float64), [], {"by": 1.0}
    blocks(model)[0].register_forward_hook(lambda module, args, output: held.append(output))
    blocks(model)[2].register_forward_hook(lambda module, args, output: output + switch["by"] * held.pop())
    view: Any = probes.load(model)
    for by in (1.0, -3.0):
        switch["by"] = by
        with torch.no_grad():
            expected = model(IDS).logits
        found = view.unembed(view.norm(view.residual(view.embed(IDS)))).detach()
        assert (found - expected).abs().max() < NOISE * expected.std()
    assert held == []


class Around(nn.Module):
    """What a caller puts in a module's place: it calls it, once or more often, and keeps count."""

    def __init__(self, inner: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.inner, self.times, self.calls = inner, times, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        for _ in range(self.times):
            out = self.inner(*args, **kwargs)
        return out


def around(place: str, model: Any) -> None:
    holder, _, name = f"model.layers.{place}".rpartition(".")
    inner = model.get_submodule(holder)
    setattr(inner, name, Around(getattr(inner, name)))


AROUND: dict[str, Callable[[Any], None]] = {
    "block": partial(around, "1"),
    "attention": partial(around, "1.self_attn"),
    "projection": partial(around, "1.self_attn.o_proj"),
    "one feed-forward in two blocks": lambda model: setattr(blocks(model)[1], "mlp", blocks(model)[0].mlp),
}


@pytest.mark.filterwarnings("ignore:jacobian takes the slower engine")
@pytest.mark.parametrize("how", AROUND)
def test_modules_of_a_caller_s_around_those_of_a_model(how):
    pair = [families.model("llama", dtype=torch.float64) for _ in range(2)]
    for model in pair:
        AROUND[how](model)
    agrees(*pair)
    for module in pair[0].modules():
        assert not isinstance(module, Around) or module.calls == 0


def test_blocks_that_probes_have_no_place_for_are_refused_by_number():
    for block, says in (
        (lambda own: nn.Identity(), r"block 1 is a Identity without attention"),
        (lambda own: Around(own, 2), r"block 1 attends twice in one pass"),
    ):
        model = families.model("llama")
        blocks(model)[1] = block(blocks(model)[1])
        with pytest.raises(probes.InputError, match=says):
            probes.sinks(model, IDS)


AMBIENT = (torch.inference_mode, torch.no_grad, partial(torch.autocast, "cpu", dtype=torch.bfloat16))


def state() -> tuple[object, ...]:
    autocast = (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
    return torch.is_inference_mode_enabled(), torch.is_grad_enabled(), *autocast


def measured(model: Any, tokens: torch.Tensor = IDS) -> list[Any]:
    """Numbers of passes, of both engines, of taps inside a block, of a changed model, and of fresh weights."""
    jacobian, first = partial(probes.jacobian, method="sketch", products=8), tokens[:1]
    found = [jacobian(model, first, engine=engine)["sensitivity"] for engine in ("parts", "autograd")]
    found += [probes.sinks(model, tokens)["alpha"], probes.trajectory(model, tokens, starts=4)["cosine"]]
    found += [jacobian(probes.load(model).reinitialized(0), first)["sensitivity"]]
    return [*found, probes.inspect(model, tokens[0].tolist(), seeds=1)["ratio"]]


@pytest.mark.parametrize("around", AMBIENT)
def test_numbers_are_those_outside(around):
    model = families.model("llama")
    expected = measured(model, IDS)
    with around():
        before = state()
        found = measured(model, IDS.clone())
        assert state() == before
        with pytest.raises(probes.InputError):
            probes.sinks(model, IDS[:0])
        assert state() == before
    assert all(one.equals(other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("of_all", ["none", "tf32"])
@pytest.mark.parametrize("of_products", ["none", "ieee", "tf32"])
def test_products_are_in_float32_whatever_is_set(monkeypatch, of_all, of_products):
    """And in TF32 where a measure says so; afterwards the setting is what it was, and follows what it followed."""
    general: Any = torch.backends
    matmul, found = general.cuda.matmul, list[str]()

    def fails() -> None:
        for precision in ("tf32", "ieee"):
            with products(precision):
                found.append(matmul.fp32_precision)
        raise KeyError(found.append(matmul.fp32_precision))

    before = general.fp32_precision, matmul.fp32_precision
    try:
        general.fp32_precision, matmul.fp32_precision = of_all, of_products
        now = matmul.fp32_precision
        with pytest.raises(KeyError):
            left(products("tf32")(left(fails)))()
        assert (matmul.fp32_precision, general.fp32_precision) == (now, of_all)
        assert found == ["tf32", "ieee", "ieee"]
        general.fp32_precision = "ieee"
        assert matmul.fp32_precision == ("ieee" if of_products == "none" else of_products) or of_all == of_products
    finally:
        general.fp32_precision, matmul.fp32_precision = before
    torch.get_float32_matmul_precision()  # raises where both kinds of settings were used


@pytest.mark.gpu
def test_tf32_is_where_it_is_said_to_be():
    a = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).cuda()
    exact = a.double() @ a.double()

    def error() -> float:
        return float((a @ a - exact).abs().max() / exact.abs().max())

    with products("tf32"):
        assert 1e-5 < error() < 1e-2
        assert left(error)() < 2e-6
        model, here = (probes.load(families.model("llama"), device=place) for place in ("cuda", "cpu"))
        for how, most in (({"method": "exact"}, 1e-3), ({"method": "sketch", "products": 16}, 2e-2)):
            found, expected = (probes.jacobian(one, IDS[:1], **how) for one in (model, here))
            assert abs(found["sensitivity"] / expected["sensitivity"] - 1).max() < most
            assert "TF32 in sketches" in found.attrs["float32_products"]
            assert "float32_products" not in expected.attrs


def test_weights_made_in_inference_mode_are_the_weights():
    expected = measured(families.model("llama"))
    with torch.inference_mode():
        model = families.model("llama")
        tokens = IDS.clone()
    weight = next(model.parameters())
    assert all(one.equals(other) for one, other in zip(measured(model, tokens), expected, strict=True))
    seen: Any = probes.load(model)
    assert next(seen._model.parameters()).data_ptr() == weight.data_ptr()  # not a second copy in memory
    assert next(model.parameters()) is weight
    assert weight.is_inference()
