"""Checkpoints that come with the package: weights compressed, bit for bit what was trained; step 0 is drawn from its seed.

Such a folder holds config and tokenizer as transformers writes them, `packed.json`, and for its checkpoints
`NAME.safetensors.xz`: "model" is the last, the others are its steps. tiny-llama's last is not compressed: its folder is one
that transformers itself reads. `packed.json` has the SHA-256 of every checkpoint's safetensors file, and the seed that the
one without a file is drawn from.
"""

from __future__ import annotations

import hashlib
import lzma
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save

from ..errors import InputError
from . import cache
from .checkpoint import CONFIG, WEIGHTS, read_object

PACKED, LAST = "packed.json", "model"
BESIDE = (CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def packed(folder: Path) -> list[str] | None:
    """The steps that a packed folder holds beside its last checkpoint; None for any other folder."""
    if not (folder / PACKED).is_file():
        return None
    return [name for name in read_object(folder / PACKED)["sha256"] if name != LAST]


@contextmanager
def unpacked(folder: Path, name: str, step: str | None, *, lasting: bool) -> Iterator[Path]:
    """A checkpoint of a packed folder as transformers reads it; see `cache.made` for where it is.

    Raises:
        InputError: a file or this version's random numbers do not give the weights that were trained, or there is no room.
    """
    if step is None and (folder / WEIGHTS).is_file():
        yield folder
        return
    listed = read_object(folder / PACKED)
    expected = listed["sha256"][step or LAST]

    def refuse(reason: str) -> InputError:
        return InputError(f"model '{name}{'' if step is None else f'@{step}'}' {reason}")

    def drawn() -> bytes:
        from .fresh import start_of

        return save(start_of(folder, listed["seed"]), metadata={"format": "pt"})

    def write(place: Path) -> None:
        for file in BESIDE:
            if (folder / file).is_file():
                shutil.copyfile(folder / file, place / file)
        file = folder / f"{step or LAST}.safetensors.xz"
        try:
            content = lzma.decompress(file.read_bytes()) if file.is_file() else drawn()
        except lzma.LZMAError:
            content = b""
        if hashlib.sha256(content).hexdigest() != expected:
            how = (
                f"{file.name} is damaged"
                if file.is_file()
                else f"there is no {file.name}, and seed {listed['seed']} draws others here"
            )
            raise refuse(f"is not what was trained ({how}); install the package again, with its tested versions")
        (place / WEIGHTS).write_bytes(content)

    with cache.made(f"packed-{expected[:32]}", write, refuse, lasting=lasting) as place:
        yield place
