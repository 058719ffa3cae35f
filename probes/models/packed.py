"""Checkpoints that come with the package: weights compressed, bit for bit what was trained; step 0 is drawn from its seed.

Such a folder holds config and tokenizer as transformers writes them, `packed.json`, and for its checkpoints
`NAME.safetensors.xz`: "model" is the last, the others are its steps. tiny-llama's last is not compressed: its folder is one
that transformers itself reads. `packed.json` has the SHA-256 of every checkpoint's safetensors file, and the seed that the
one without a file is drawn from.
"""

from __future__ import annotations

import hashlib
import lzma
from pathlib import Path

from safetensors.torch import load, save
from torch import Tensor

from ..errors import InputError
from .checkpoint import WEIGHTS, read_object

PACKED, LAST = "packed.json", "model"


def packed(folder: Path) -> list[str] | None:
    """The steps that a packed folder holds beside its last checkpoint; None for any other folder."""
    if not (folder / PACKED).is_file():
        return None
    return [name for name in read_object(folder / PACKED)["sha256"] if name != LAST]


def unpacked(folder: Path, name: str, step: str | None) -> dict[str, Tensor] | None:
    """The tensors of a packed folder's checkpoint; None where the folder itself holds them as transformers reads them.

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
