"""Hub ids, against a server of the hub's protocol."""

import json
import re
import shutil
from dataclasses import replace
from threading import Thread

import commands
import families
import gguf_files
import huggingface_hub
import numpy as np
import pytest
import torch
from hub import Hub, tag

import probes
from probes.models import named
from probes.results.dataset import load


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models and texts as they lie in repositories."""
    folder = families.checkpoints(tmp_path_factory.mktemp("hub"), tiny=("llama", "prepended"))
    (folder / "tiny/pytorch_model.bin").write_bytes(b"a pickle")
    for name, seed, size in (("step100", 1, "5GB"), ("sharded", 0, "50KB")):
        shutil.copytree(folder / "tiny", folder / name, ignore=shutil.ignore_patterns("model.safetensors"))
        families.model("llama", seed=seed).save_pretrained(folder / name, max_shard_size=size)
    for name in ("gguf", "texts"):
        (folder / name).mkdir()
    gguf_files.write(folder / "gguf/tiny.gguf", gguf_files.original("llama"), kind="Q8_0")
    lines = [json.dumps({"text": " ".join(f"w{(i + j) % 90 + 3}" for j in range(60))}) for i in range(300)]
    (folder / "texts/train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture
def hub(folder, tmp_path, monkeypatch):
    """A hub with these, and nothing in the cache."""
    owned = {"tiny": "tiny", "sharded": "sharded", "gguf": "gguf", "gated": "tiny", "bare": "texts"}
    found = {f"models/me/{name}": {"main": folder / own} for name, own in owned.items()}
    found |= {"datasets/me/texts": {"main": folder / "texts"}}
    found["models/me/tiny"]["step100"] = folder / "step100"
    with Hub(found) as hub:
        Thread(target=hub.serve_forever, args=(0.05,)).start()
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        settings = {"ENDPOINT": hub.endpoint, "HUGGINGFACE_CO_URL_TEMPLATE": template}
        for constant, value in (settings | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": False}).items():
            monkeypatch.setattr(huggingface_hub.constants, constant, value)
        yield hub
        hub.shutdown()


def fetched(hub):
    """The files that were fetched since this was last asked."""
    asked, hub.asked[:] = list(hub.asked), []
    return sorted(line.rpartition("/")[2] for line in asked if line.startswith(("GET /me/", "GET /blob")))


def test_hub_ids_give_the_numbers_of_their_folders_and_no_file_is_fetched_twice(hub, folder):
    step, seen = tag("me/tinystep100"), set()
    cases = {"me/tiny": "tiny", "me/tiny@step100": "step100", f"me/tiny@{step}": "step100", "me/sharded": "sharded"}
    for name, own in (cases | {"me/gguf:tiny.gguf": "gguf/tiny.gguf"}).items():
        view, plain = probes.load(name), probes.load(folder / own)
        assert torch.equal(*(one.residual(one.embed(torch.arange(3, 40)[None])) for one in (view, plain)))
        repository, commit = re.split("[:@]", name)[0], step if "@" in name else tag(f"{name.partition(':')[0]}main")
        described = {"name": name.partition("@")[0], "revision": commit}
        assert (view.identity, view.first_ids) == (replace(plain.identity, **described), plain.first_ids)
        files = [path for path in (folder / own.partition("/")[0]).iterdir() if path.suffix != ".bin"]
        new = {(repository, path.name, path.read_bytes()) for path in files} - seen
        assert fetched(hub) == sorted(path for _, path, _ in new)
        seen |= new
        probes.load(name)
        assert hub.asked == []


def test_what_the_hub_does_not_give_is_refused(hub):
    for name, says in (
        ("none", "is no folder here, and no model on the hub, or private; check the name, or log in (hf auth login"),
        ("gated", "is gated; accept its terms on its page on the hub, and log in"),
        ("gguf", "has no model*.safetensors; give me/gguf:tiny.gguf"),
        ("gguf:q2.gguf", "has no q2.gguf; give me/gguf:tiny.gguf"),
        ("bare", "has no model*.safetensors; convert its weights to *.safetensors"),
        ("tiny@step7", "has no revision 'step7'; look up its branches and tags"),
    ):
        assert f"'me/{re.split('[:@]', name)[0]}' {says}" in families.refused(probes.load, f"me/{name}")
    assert fetched(hub) == []


def test_broken_transfers_are_resumed_and_nothing_half_written_is_left(hub, folder, tmp_path, monkeypatch):
    hub.breaks = 99  # more than the hub's client tries
    assert "'me/tiny' is not in the local cache, or not all of it, and can" in families.refused(probes.load, "me/tiny")
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".safetensors", ".incomplete")]
    monkeypatch.setattr(named, "PATIENCE", 0.2)
    hub.slow = 1
    assert "and cannot be fetched (timed out); check the network" in families.refused(probes.load, "me/tiny")
    hub.slow, hub.breaks = 0.1, 1
    fetched(hub)
    assert probes.load("me/tiny").identity.weights == probes.load(folder / "tiny").identity.weights
    assert fetched(hub) == ["model.safetensors"] * 2  # both halves


def test_commands_take_models_and_texts_from_the_hub(hub, folder, tmp_path):
    given = f"sinks me/tiny me/tiny@step100 --dataset me/texts --length 32 --prompts 4 --out {tmp_path}".split()
    environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    commands.program("-m", "probes", *given, **environment)
    assert not [*tmp_path.rglob("*.jsonl")]  # streamed
    for name, revision, own in (("me-tiny", "main", "tiny"), ("me-tiny@step100", "step100", "step100")):
        ds, view = load(tmp_path / f"sinks-{name}.nc"), probes.load(folder / own)
        alone = probes.sinks(view, probes.prompts(view, dataset=str(folder / "texts"), n=4, length=32))
        assert np.array_equal(ds.alpha, alone.alpha)
        assert ds.attrs["revision"] == tag(f"me/tiny{revision}")
