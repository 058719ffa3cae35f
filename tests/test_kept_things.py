"""What callers keep on a model, and models put together in memory: measured as they are, and left alone.

References are eager patterns of transformers and its own logits, of a model that is made anew where one module stands twice.
"""

from __future__ import annotations

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

IDS = torch.randint(3, families.VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(1))
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


def activation(model: Any) -> None:
    """Kept with its history by a hook that is gone."""

    def hook(module: Any, args: Any, output: Any) -> None:
        module.saved = output

    handle = blocks(model)[1].register_forward_hook(hook)
    model(IDS)
    handle.remove()


def test_what_is_kept_on_modules_is_left_alone(tmp_path):
    model = families.model("llama", dtype=torch.float64)
    activation(model)
    with (tmp_path / "log").open("w") as file:
        model.lock, model.local = threading.Lock(), {"own": [threading.local()]}
        blocks(model)[0].log, blocks(model)[0].mlp.drawn = file, (x for x in range(3))
        before = {name: dict(vars(module)) for name, module in model.named_modules()}
        agrees(model, families.model("llama", dtype=torch.float64))
        probes.load(model, dtype="float32").reinitialized(0)
        for name, module in model.named_modules():
            assert all(before[name][key] is value for key, value in vars(module).items())


LISTS = {"shorter": (0, 2), "at two places": (2, 0, 2)}


@pytest.mark.parametrize("name", ["gpt2", "gemma3_text", "smollm3"])
@pytest.mark.parametrize("order", LISTS)
def test_blocks_are_those_that_the_model_runs(name, order):
    pair = [families.model(name, dtype=torch.float64) for _ in range(2)]
    for model, others in ((pair[0], [families.model(name, dtype=torch.float64)] * 4), (pair[1], None)):
        others = others or [families.model(name, dtype=torch.float64) for _ in LISTS[order]]
        listed: Any = [blocks(one)[at] for at, one in zip(LISTS[order], others, strict=False)]
        setattr(model.get_decoder(), "h" if name == "gpt2" else "layers", nn.ModuleList(listed))
    agrees(*pair)
    seen: Any = probes.load(pair[0])
    assert seen.reinitialized(0).spec == seen.spec
    assert len(blocks(pair[0])) == len(LISTS[order])
    assert pair[0].config.num_hidden_layers == families.BLOCKS


def test_one_attention_in_two_blocks_and_lists_that_do_not_run():
    pair = [families.model("llama", dtype=torch.float64) for _ in range(2)]
    for model, other in zip(pair, (pair[0], families.model("llama", dtype=torch.float64)), strict=True):
        blocks(model)[2].self_attn = blocks(other)[0].self_attn
    agrees(*pair)
    model: Any = families.model("gpt_oss")
    model.model.layers.append(model.model.layers[0])
    assert "4 blocks where its config says 3" in refused(probes.load, model)
    model.model.layers = nn.ModuleList()
    assert "0 blocks where its config says 3" in refused(probes.load, model)


@pytest.mark.parametrize("kind", ["AutoModel", "AutoModelForSequenceClassification", "no head", "deleted"])
def test_what_needs_no_logits_runs_without_a_head(kind):
    whole: Any = families.model("gpt2")
    if kind.startswith("Auto"):
        model: Any = getattr(transformers, kind).from_config(families.small("gpt2")).eval()
        (getattr(model, model.base_model_prefix) if kind != "AutoModel" else model).load_state_dict(
            whole.get_decoder().state_dict()
        )
    else:
        model = families.model("gpt2")
        setattr(model, "lm_head", nn.Identity()) if kind == "no head" else delattr(model, "lm_head")
    ids = torch.cat([IDS, IDS.flip(1)])
    for probe in (
        lambda m: probes.sinks(m, ids)["alpha"],
        lambda m: probes.jacobian(m, ids[:1], readout="normed", method="sketch", products=8)["sensitivity"],
    ):
        assert probe(model).equals(probe(whole))
    for refuses in (
        partial(probes.jacobian, model, ids, readout="logits"),
        partial(probes.inspect, model, ids[0].tolist()),
        partial(probes.sinks, model, ids, effect=True),
        partial(probes.decode, model, ids.repeat(4, 1)),
        partial(probes.load, model, "transformer_lens"),
    ):
        assert "has no output head" in refused(refuses)


# ------------------------------------------------------------------------------------- hooks, modules around modules


def test_hooks_hand_things_to_each_other_and_follow_their_caller():
    model, held, switch = families.model("llama"), [], {"by": 1.0}
    blocks(model)[0].register_forward_hook(lambda module, args, output: held.append(output))
    blocks(model)[2].register_forward_hook(lambda module, args, output: output + switch["by"] * held.pop())
    view: Any = probes.load(model)
    for by in (1.0, -3.0):
        switch["by"] = by
        with torch.no_grad():
            expected = model(IDS).logits
        found = view.unembed(view.norm(view.residual(view.embed(IDS)))).detach()
        assert (found - expected).abs().max() < 1e-3 * expected.std()
    assert held == []


class Around(nn.Module):
    """What a caller puts in a module's place: it calls it, once or more often, and keeps count."""

    def __init__(self, inner: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.inner, self.times, self.calls = inner, times, 0

    def forward(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        for _ in range(self.times):
            x = self.inner(x, *args, **kwargs) if x is not None else self.inner(*args, **kwargs)
        return x


def replaced(place: str) -> Callable[[Any], None]:
    def act(model: Any) -> None:
        block = blocks(model)[1]
        if place == "block":
            blocks(model)[1] = Around(block)
        else:
            holder = block if place == "self_attn" else block.self_attn
            setattr(holder, place, Around(getattr(holder, place)))

    return act


AROUND: dict[str, Callable[[Any], None]] = {
    "block": replaced("block"),
    "attention": replaced("self_attn"),
    "projection": replaced("o_proj"),
    "one feed-forward in two blocks": lambda model: setattr(blocks(model)[1], "mlp", blocks(model)[0].mlp),
    "Sequential": lambda model: setattr(model.model, "layers", nn.Sequential(*blocks(model))),
}


@pytest.mark.filterwarnings("ignore:jacobian takes the slower engine")
@pytest.mark.parametrize("around", AROUND)
def test_modules_of_a_caller_s_around_those_of_a_model(around):
    pair = [families.model("llama", dtype=torch.float64) for _ in range(2)]
    for model in pair:
        AROUND[around](model)
    agrees(*pair)
    for module in pair[0].modules():
        assert not isinstance(module, Around) or module.calls == 0
    agrees(nn.DataParallel(pair[0]), pair[1])


def test_blocks_that_probes_have_no_place_for_are_refused_by_number():
    for block, says in (
        (lambda own: nn.Identity(), r"block 1 is a Identity without attention"),
        (lambda own: Around(own, 2), r"block 1 attends twice in one pass"),
    ):
        model = families.model("llama")
        blocks(model)[1] = block(blocks(model)[1])
        with pytest.raises(probes.InputError, match=says):
            probes.sinks(model, IDS)
    model: Any = families.model("llama")
    listed = list(blocks(model))
    del model.model.layers
    model.model.layers = listed
    assert "put them into a torch.nn.ModuleList" in refused(probes.load, model)
