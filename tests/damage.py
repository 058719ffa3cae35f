"""Damage that files of a model, texts and results can have: what is done to a working folder before a command runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

Spoil = Callable[[Path], object]
Q, LAST = "model.layers.1.self_attn.q_proj.weight", "lm_head.weight"
WEIGHTS = "model.safetensors", "small/model.safetensors"
MARKER = "somebody-else-s-code-was-run"  # no row may leave it


def edited(name: str, change: Callable[[bytes], bytes]) -> Spoil:
    """A file with its content changed."""

    def spoil(here: Path) -> None:
        (here / name).write_bytes(change((here / name).read_bytes()))

    return spoil


def tensors_are(change: Callable[[dict[str, torch.Tensor]], object]) -> Spoil:
    """Other tensors in a sound file."""

    def changed(content: bytes) -> bytes:
        tensors = load(content)
        change(tensors)
        return save(tensors, {"format": "pt"})

    return edited(WEIGHTS[1], changed)


def config_has(**changes: Any) -> Spoil:
    """Other values in config.json; those given as None are left out."""

    def changed(content: bytes) -> bytes:
        fields = json.loads(content) | changes
        return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()

    return edited("small/config.json", changed)


def file_is(name: str, content: str | bytes) -> Spoil:
    """A file with this content."""

    def spoil(here: Path) -> None:
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return spoil


def without(*names: str) -> Spoil:
    return lambda here: [(here / "small" / name).unlink() for name in names]


def index_names(file: str) -> Spoil:
    """Weights in a file of another name, and an index in which a tensor is in this one."""

    def spoil(here: Path) -> None:
        folder = here / "small"
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        index = {"metadata": {}, "weight_map": {Q: file}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return spoil


def bomb(name: str) -> Spoil:
    """A pickle of that name in the model's folder that leaves the marker when it is read."""
    return lambda here: file_is(f"small/{name}", f"cbuiltins\nopen\n(V{here / MARKER}\nVw\ntR.")(here)


def own_code(here: Path) -> None:
    """A module in the model's folder that leaves the marker when it is imported, asked for by config.json."""
    program = f"open({str(here / MARKER)!r}, 'w').close()\nfrom transformers import *\n"
    (here / "small" / "own.py").write_text(program)
    auto = {"AutoConfig": "own.LlamaConfig", "AutoModelForCausalLM": "own.LlamaForCausalLM"}
    config_has(model_type="own-kind", architectures=None, auto_map=auto)(here)
