"""Models split by accelerate give what they give whole, bit for bit, and stay as they are.

On the CPU the same kernels run on the same numbers, wherever those waited. Blocks "on disk" are read when they run; "cpu"
is at once main memory and the device where everything runs. Several devices are stood in for by `devices.NamedDevices`;
tests marked `gpu` have real ones.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import accelerate
import devices
import families
import pytest
import torch
import xarray as xr
from families import BLOCKS, FAMILIES, VOCABULARY
from torch import Tensor, nn
from transformers import PreTrainedModel
from typer.testing import CliRunner

import probes
from probes.__main__ import app
from probes.errors import InputError
from probes.models import split
from probes.models.huggingface import HuggingFaceView
from probes.models.view import Edit, View

IDS = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(5))
TEXT = torch.randint(3, 500, (3, 24), generator=torch.Generator().manual_seed(6))
MAPS: dict[str, Mapping[str, str]] = {
    "some blocks": {"": "cpu", "model.layers.1": "disk", "model.layers.2": "disk", "model.layers.5": "disk"},
    "everything": {"": "disk"},
    "within a block": {"": "cpu", "model.layers.0.self_attn": "disk", "model.norm": "disk", "lm_head": "disk"},
}


@cache
def whole() -> View:
    return probes.load("tiny-llama")


@cache
def divided(name: str) -> HuggingFaceView:
    made = probes.load("tiny-llama", device_map=MAPS[name])
    assert isinstance(made, HuggingFaceView)
    return made


def names_in(model: nn.Module) -> tuple[str, str, list[str]]:
    """(the list of blocks, the head, what else there is): modules of a causal language model."""
    root, body = next(iter(model.named_children()))
    children = dict(body.named_children())
    blocks = next(name for name, child in children.items() if isinstance(child, nn.ModuleList))
    head = next(name for name, _ in model.named_children() if name != root)
    return f"{root}.{blocks}", head, [f"{root}.{name}" for name in children if name != blocks]


def map_of(model: nn.Module, places: list[str], rest: str, head: str) -> dict[str, str]:
    blocks, last, others = names_in(model)
    of_blocks = {f"{blocks}.{at}": place for at, place in enumerate(places)}
    return of_blocks | {last: head} | dict.fromkeys(others, rest)


def dispatch(model: Any, places: Mapping[str, str], main: str = "cpu", folder: Path | None = None) -> Any:
    with split.quiet():
        accelerate.dispatch_model(
            model, dict(places), main, offload_dir=folder, skip_keys=model._skip_keys_device_placement
        )
    return model


def on_disk(family: str, folder: Path, *, rest: str = "cpu") -> Any:
    """A family's model, dispatched in memory: block 0 there, the others on disk, embeddings and norm as `rest` says."""
    model = families.model(family)
    return dispatch(model, map_of(model, ["cpu", "disk", "disk"], rest, rest), folder=folder)


def same(a: Any, b: Any) -> bool:
    """Equal data, tensors bit for bit."""
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
    if hasattr(a, "__dataclass_fields__"):
        return all(same(getattr(a, name), getattr(b, name)) for name in a.__dataclass_fields__)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) if isinstance(a, nn.Module) or callable(a) else a == b


# ------------------------------------------------------------------------------------------------ every family


def double(tensor: Tensor) -> Tensor:
    return 2 * tensor


def facts(view: View) -> dict[str, Any]:
    """What a view says of itself and of a pass, with edits and without."""
    embeddings = view.embed(IDS)
    seen: list[Any] = []
    with view.watching(lambda layer, attention: seen.append((layer, attention))):
        last = view.residual(embeddings)
    leaf = embeddings.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(view.norm(view.residual(leaf)).square().sum(), leaf)
    edits = [Edit(site, layer, double) for site in ("residual", "query", "key", "value") for layer in (0, 2)]
    trace, edited = view.trace(embeddings, attention=True), view.trace(embeddings, edits=edits)
    with torch.no_grad():
        again = tuple(block(stream) for block, stream in zip(trace.blocks, trace.residual, strict=False))
    return {
        "embeddings": embeddings,
        "streams": trace.residual,
        "edited": edited.residual,
        "blocks": again,
        "rotary": trace.rotary,
        "attention": trace.attention,
        "watched": tuple(seen),
        "last": last.detach(),
        "gradient": gradient,
        "logits": view.unembed(view.norm(last)).detach(),
        "parts": tuple(view.parts(layer) for layer in range(view.spec.blocks)),
        "output": tuple(view.output_weights(layer) for layer in range(view.spec.blocks)),
        "weights": view.identity.weights,
        "identity": view.identity,
    }


@pytest.mark.parametrize("rest", ["cpu", "disk"])
@pytest.mark.parametrize("family", FAMILIES)
def test_family_on_disk_is_the_family(family, rest, tmp_path):
    expected = facts(probes.load(families.model(family)))
    view = probes.load(on_disk(family, tmp_path, rest=rest))
    found = facts(view)
    assert view.offloaded  # type: ignore[attr-defined]
    for name, value in expected.items():
        assert same(value, found[name]), name
    assert all(part is not None for part in found["parts"])


@pytest.mark.parametrize("family", FAMILIES)
def test_family_over_several_devices_is_the_family_and_seen_on_one(family):
    expected = facts(probes.load(families.model(family)))
    with devices.NamedDevices():
        model = families.model(family)
        head = "cpu:1" if model.all_tied_weights_keys else "cpu:2"
        view = HuggingFaceView(dispatch(model, map_of(model, ["cpu:1", "cpu:2", "cpu"], "cpu:1", head), "cpu:1"))
        assert view.device == torch.device("cpu:1")
        assert view.offloaded
        found = facts(view)
        kernel = probes.jacobian(view, IDS[:1], engine="parts").sensitivity

    def places(value: Any) -> set[torch.device]:
        if isinstance(value, Tensor):
            return {devices.lies_on(value)}
        if isinstance(value, tuple):
            return {place for x in value for place in places(x)}
        return places(tuple(vars(value).values())) if hasattr(value, "__dataclass_fields__") else set()

    assert places(tuple(found.values())) == {torch.device("cpu:1")}
    for name, value in expected.items():
        if name != "identity":
            assert same(value, found[name]), name
    assert kernel.equals(probes.jacobian(probes.load(families.model(family)), IDS[:1], engine="parts").sensitivity)


def test_named_devices_tell_operands_apart():
    with devices.NamedDevices():
        one, other = torch.ones(3, device="cpu:1"), torch.ones(3, device="cpu:2")
        assert (one.to("cpu:2") + other).device == torch.device("cpu:2")
        assert one[:1].device == nn.Parameter(one).device == torch.device("cpu:1")
        with pytest.raises(RuntimeError, match="operands lie on"):
            one + other


# ------------------------------------------------------------------------------------------------ every probe

PROBES: dict[str, Callable[[Any], xr.Dataset]] = {
    "jacobian, exact, all pathways": lambda view: probes.jacobian(view, TEXT[:1], pathway="all"),
    "jacobian, sketch, all blocks": lambda view: probes.jacobian(
        view, TEXT, method="sketch", products=12, from_layer="all", readout="normed"
    ),
    "jacobian, scalar, logits": lambda view: probes.jacobian(view, TEXT, method="scalar", readout="logits"),
    "jacobian, score by autograd": lambda view: probes.jacobian(
        view, TEXT[:1, :8], method="sketch", products=12, engine="autograd", pathway="score"
    ),
    "jacobian, value": lambda view: probes.jacobian(view, TEXT, method="sketch", products=12, pathway="value"),
    "theory": lambda view: probes.theory.second_moment(view, TEXT, score_path=True),
    "sinks": lambda view: probes.sinks(view, TEXT, reacts="mean", pictures=2),
    "trajectory": lambda view: probes.trajectory(view, TEXT, starts=4),
    "leakage": lambda view: probes.leakage(view, TEXT, bands=[(9, 20)], bootstrap=5),
    "bos_swap": lambda view: probes.bos_swap(view, TEXT, bands=[(9, 20)], bootstrap=5, profile_prompts=1, products=12),
    "jacobian at birth": lambda view: probes.jacobian(
        view.reinitialized(3, positional=False), TEXT, method="sketch", products=12
    ),
    "inspect": lambda view: probes.inspect(view, "def add(first, second):", method="sketch", products=12, seeds=1),
}


@cache
def of_whole(probe: str) -> xr.Dataset:
    return PROBES[probe](whole())


@pytest.mark.parametrize("name", ["some blocks", "everything"])
@pytest.mark.parametrize("probe", PROBES)
def test_probe_gives_the_same(probe, name):
    xr.testing.assert_identical(
        PROBES[probe](divided(name)).drop_attrs(deep=False), of_whole(probe).drop_attrs(deep=False)
    )
