"""Hub ids without a hub: what the cache holds, and a hub that does not answer."""

import shutil
import socket

import families
import huggingface_hub

import probes
from probes.models import named
from probes.models.load import CHECKPOINTS


def test_hub_ids_come_from_the_cache_and_a_hub_that_does_not_answer_is_named(tmp_path, monkeypatch):
    def cached(name: str, *without: str) -> str:
        folder = tmp_path / f"models--me--{name}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs/main").write_text("a" * 40)
        shutil.copytree(CHECKPOINTS / "tiny-llama", folder / "snapshots" / ("a" * 40), ignore=lambda *_: without)
        return f"me/{name}"

    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes every call and answers none
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for constant, value in (("ENDPOINT", endpoint), ("HF_HUB_CACHE", str(tmp_path)), ("HF_HUB_OFFLINE", False)):
            monkeypatch.setattr(huggingface_hub.constants, constant, value)
        monkeypatch.setattr(named, "PATIENCE", 2)
        view, plain = probes.load(cached("whole")), probes.load("tiny-llama")
        assert (view.identity.name, view.identity.revision, view.bos) == ("me/whole", "a" * 40, 0)
        assert view.identity.weights == plain.identity.weights
        assert probes.load(cached("dumb", "tokenizer.json")).tokenizer is None
        thin = cached("thin", "model.safetensors"), "is in the local cache without its weights"
        for name, says in (thin, ("me/no", "is not in the local cache")):
            line = families.refused(probes.load, name)
            assert f"'{name}' {says} and the hub cannot be reached (ReadTimeout)" in line
