"""Models split by accelerate give what they give whole, bit for bit, and stay as they are.

Blocks "on disk" are read when they run; "cpu" is at once main memory and the device where everything runs. Several devices
are simulated (`sim`).
"""

import re
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import accelerate
import families
import pytest
import torch
import xarray as xr
from families import DIFFERENT, FAMILIES, VOCABULARY
from fingerprint import difference, fingerprint
from measured import watched
from sim import ONE, OTHER, Simulated
from torch import Tensor, nn

import probes
from probes.models import split
from probes.models.huggingface import HuggingFaceView
from probes.models.view import Edit, View

IDS = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(5))
PARTS = ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head")
SOME_ON_DISK = {f"model.layers.{n}": "disk" if n in (1, 2, 5) else "cpu" for n in range(6)}
MAPS: dict[str, Mapping[str, str]] = {
    "some blocks": dict.fromkeys(PARTS, "cpu") | SOME_ON_DISK,
    "everything": {"": "disk"},
    "within a block": dict.fromkeys((*PARTS, *(f"model.layers.{n}" for n in range(1, 6))), "cpu")
    | {"model.norm": "disk", "model.layers.0.self_attn": "disk"}
    | {f"model.layers.0.{name}": "cpu" for name in ("mlp", "input_layernorm", "post_attention_layernorm")},
}


@cache
def whole() -> View:
    return probes.load("tiny-llama")


def map_of(model: nn.Module, places: list[Any], rest: Any, head: Any) -> dict[str, Any]:
    """A map of a causal language model: places by block, one for what else the decoder has, and the head's."""
    (root, body), (last, _) = model.named_children()
    found = {last: head}
    for name, child in body.named_children():
        if isinstance(child, nn.ModuleList):
            found |= {f"{root}.{name}.{at}": place for at, place in enumerate(places)}
        else:
            found[f"{root}.{name}"] = rest
    return found


def dispatch(model: Any, places: Mapping[str, Any], main: Any = "cpu", folder: Path | None = None) -> Any:
    skip = model._skip_keys_device_placement
    accelerate.dispatch_model(model, dict(places), main, offload_dir=folder, skip_keys=skip)
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


def facts(view: View) -> dict[str, Any]:
    """What a view says of itself and of a pass, with edits and without."""
    embeddings = view.embed(IDS)
    leaf = embeddings.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(view.norm(view.residual(leaf)).square().sum(), leaf)
    edits = [Edit(site, layer, lambda x: 2 * x) for site in ("residual", "query", "key", "value") for layer in (0, 2)]
    trace = view.trace(embeddings, attention=True)
    with torch.no_grad():
        again = tuple(block(stream) for block, stream in zip(trace.blocks, trace.residual, strict=False))
    layers = range(view.spec.blocks)
    return {
        "embeddings": embeddings,
        "trace": trace,
        "edited": view.trace(embeddings, edits=edits),
        "blocks": again,
        "watched": tuple(watched(view, embeddings)),
        "gradient": gradient,
        "logits": view.unembed(view.norm(trace.residual[-1])).detach(),
        "parts": tuple(map(view.parts, layers)),
        "output": tuple(map(view.output_weights, layers)),
        "norms": tuple(map(view.output_norm, layers)),
        "identity": view.identity,
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_family_on_disk_is_the_family(family, tmp_path):
    expected = facts(probes.load(families.model(family)))
    for rest in ("cpu", "disk") if family in ("gpt2", "gemma2") else ("cpu",):
        view = probes.load(on_disk(family, tmp_path / rest, rest=rest))
        found = facts(view)
        assert view.offloaded
        for name, value in expected.items():
            assert same(value, found[name]), name
        assert all(part is not None for part in found["parts"])


@pytest.mark.parametrize("family", DIFFERENT)
def test_family_over_several_devices_is_the_family(family):
    """Block 1 is on another device, the weights of block 2 wait in main memory. The whole model is on one device."""
    with Simulated():
        model = families.model(family)
        head = str(ONE if model.all_tied_weights_keys else OTHER)
        places = map_of(model, [str(ONE), str(OTHER), "cpu"], str(ONE), head)
        whole = probes.load(families.model(family), device=str(ONE))
        view = HuggingFaceView(dispatch(model, places, str(ONE)))
        assert (view.device, view.offloaded) == (ONE, True)
        expected, found = facts(whole), facts(view)
        kernels = [probes.jacobian(one, IDS[:1], engine="parts").sensitivity for one in (view, whole)]
        caches = [probes.sinks(one, IDS, evict=(1,), keep=(4,)).drop_attrs() for one in (view, whole)]
    assert found["logits"].device == ONE
    for name, value in expected.items():
        assert same(value, found[name]), name
    assert kernels[0].equals(kernels[1])
    xr.testing.assert_identical(*caches)


@pytest.mark.parametrize("name", MAPS)
def test_a_map_changes_neither_provenance_nor_numbers(name):
    view = probes.load("tiny-llama", device_map=MAPS[name])
    assert view.identity == whole().identity
    for probe in (partial(probes.sinks, reacts="mean"), partial(probes.jacobian, pathway="all")):
        found, expected = (probe(model, IDS[:1]).drop_attrs(deep=False) for model in (view, whole()))
        xr.testing.assert_identical(found, expected)
    again = probes.load(view._model)  # type: ignore[attr-defined]  # accelerate makes new parameters in every pass
    assert again.identity.weights == whole().identity.weights


def test_policies_and_dtypes(tmp_path):
    for memory, disk in (("2MiB", True), (1 << 30, False)):
        view: Any = probes.load(
            "tiny-llama", device_map="auto", max_memory={"cpu": memory}, offload_folder=tmp_path / "off"
        )
        assert split.is_split(view._model) == view.offloaded == disk
        assert not disk or "disk" in view._model.hf_device_map.values()
        assert view.identity == whole().identity
        assert same(view.residual(view.embed(IDS)), whole().residual(whole().embed(IDS)))
    for name, options in (("tiny-llama", {"dtype": "bfloat16"}), ("tiny-llama@step100", {"offload_folder": tmp_path})):
        view = probes.load(name, device_map=MAPS["some blocks"], **options)
        expected = probes.load(name, dtype=options.get("dtype", "auto"), device="cpu")
        assert view.offloaded
        assert view.identity == expected.identity
        assert same(view.residual(view.embed(IDS)), expected.residual(expected.embed(IDS)))


def test_bad_placement_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"device_map": "everywhere"}, "'tiny-llama' cannot be loaded .* but found everywhere"),
        ({"device_map": "auto", "max_memory": {"cpu": "much"}}, "'tiny-llama' cannot be loaded .*`size`"),
        ({"offload_folder": "off"}, "goes with a device_map"),
        ({"device_map": {"model": "cpu", "lm_head": "disk"}, "offload_folder": "off"}, "parts lm_head.weight"),
        ({"device_map": "auto", "device": "cpu"}, "does not go with device 'cpu'"),
        ({"device_map": "auto", "backend": "transformer_lens"}, "does not go with backend transformer_lens"),
    ]
    for options, message in refusals:
        assert re.search(message, families.refused(probes.load, "tiny-llama", **options))


def offloaded(folder: Path, how: str) -> Any:
    """A llama that accelerate has put on disk or in main memory, by a map or as a whole."""
    if how == "map":
        return on_disk("llama", folder)
    model: Any = families.model("llama")
    return accelerate.cpu_offload(model) if how == "main memory" else accelerate.disk_offload(model, str(folder))


@pytest.mark.parametrize("how", ["map", "main memory", "disk"])
def test_split_in_memory_gives_the_same_and_stays_as_it_was(how, tmp_path):
    model: Any = offloaded(tmp_path, how)
    with torch.no_grad():
        before = model(IDS).logits
    expected = fingerprint(model)
    whole, view = probes.load(families.model("llama")), probes.load(model)
    with pytest.raises(ZeroDivisionError):
        view.residual(view.embed(IDS), edits=[Edit("query", 1, lambda query: query / (1 // 0))])
    for one, other in ((view, whole), (view.reinitialized(1), whole.reinitialized(1))):
        assert one.identity == other.identity
        assert probes.jacobian(one, IDS).sensitivity.equals(probes.jacobian(other, IDS).sensitivity)
    assert difference(expected, fingerprint(model)) == []
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, before)
    copied: Any = view._model  # type: ignore[attr-defined]
    theirs = {id(thing) for module in model.modules() for thing in (module, *split.hooks(module))}
    for module in copied.modules():
        assert theirs.isdisjoint(map(id, (module, *split.hooks(module))))
        if "_hf_hook" in vars(module):
            assert vars(module)["forward"].args == (module,)
            assert vars(module)["_old_forward"].__self__ is module


def test_lost_offload_folder_is_named(tmp_path):
    model = on_disk("llama", tmp_path / "off")
    for file in (tmp_path / "off").glob("*.dat"):
        file.unlink()
    assert re.search("offloaded weight 'model.layers.1.* [(]FileNotFoundError[)]", families.refused(probes.load, model))


def test_what_would_move_a_split_model_is_refused(tmp_path):
    model = on_disk("llama", tmp_path)
    for name, value, message in (
        ("dtype", "float64", "is neither moved nor cast to cpu, torch.float64"),
        ("backend", "transformer_lens", "split by accelerate, which TransformerLens"),
        ("device_map", "auto", "does not go with a model in memory"),
    ):
        assert message in families.refused(probes.load, model, **{name: value})
    assert probes.load(model, device="cpu", dtype="float32").device == torch.device("cpu")  # where it is already
