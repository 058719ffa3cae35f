"""What a checkpoint's folder holds: small JSON files, and weights in safetensors files, compressed in bundled ones."""

import hashlib
import json
import lzma
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load, save
from torch import Tensor

from ..errors import InputError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, ADAPTER = "config.json", "adapter_config.json"
PACKED, LAST = "packed.json", "model"


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a small file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # no UTF-8, no JSON, or none that ends
        raise InputError(f"{file} cannot be read as JSON ({type(error).__name__})") from None
    if not isinstance(value, dict):
        raise InputError(f"{file} holds a {type(value).__name__} instead of a JSON object")
    return value


def refuse_adapter(folder: Path) -> None:
    """Raises InputError where a folder holds an adapter of another model."""
    if (folder / ADAPTER).exists():
        raise InputError(
            f"{ADAPTER} makes this an adapter of another model; merge it into that model and save the result"
        )


def refuse_codes(folder: Path) -> None:
    """Raises InputError where weights are whole numbers, which transformers would read as if they were the weights."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                kind = opened.get_slice(name).get_dtype()
                if name.endswith(".weight") and kind[0] in "IU":  # leftovers such as stored masks may be of any kind
                    raise InputError(f"{name} holds whole numbers ({kind}) instead of weights")


def packed(folder: Path) -> list[str] | None:
    """The steps that a packed folder holds beside its last checkpoint; None for any other folder."""
    if not (folder / PACKED).is_file():
        return None
    return [name for name in read_object(folder / PACKED)["sha256"] if name != LAST]


def unpacked(folder: Path, name: str, step: str | None) -> dict[str, Tensor] | None:
    """The tensors of a packed folder's checkpoint; None where the folder itself holds them as transformers reads them.

    A packed folder comes with the package. It holds config and tokenizer as transformers writes them, checkpoints as
    `NAME.safetensors.xz` ("model" is the last, the others are its steps), and `packed.json`, which has the SHA-256 of every
    checkpoint's safetensors file and the seed that the one without a file, step 0, is drawn from. tiny-llama's last is not
    compressed: its folder is one that transformers itself reads.

    Raises:
        InputError: a file or this version's random numbers do not give the weights that were trained.
    """
    if step is None and (folder / WEIGHTS).is_file():
        return None
    listed, file = read_object(folder / PACKED), folder / f"{step or LAST}.safetensors.xz"
    try:
        content = lzma.decompress(file.read_bytes()) if file.is_file() else _drawn(folder, listed["seed"])
    except lzma.LZMAError:
        content = b""
    if hashlib.sha256(content).hexdigest() != listed["sha256"][step or LAST]:
        drawn = f"there is no {file.name}, and seed {listed['seed']} draws others here"
        why = f"{file.name} is damaged" if file.is_file() else drawn
        raise InputError(
            f"model '{name}{'' if step is None else f'@{step}'}' is not what was trained ({why}); install the package "
            "again, with its tested versions"
        )
    return load(content)


def _drawn(folder: Path, seed: int) -> bytes:
    from .fresh import start_of

    return save(start_of(folder, seed), metadata={"format": "pt"})
