"""GGUF files: read within bounds, checked, and converted to a model of transformers."""

from contextlib import suppress
from pathlib import Path

import torch

from ...run.files import what_is

MAGIC, SUFFIX = b"GGUF", ".gguf"
CPU = torch.device("cpu")


def is_gguf(path: Path) -> bool:
    """Whether an existing file is to be read as GGUF: by its name, whatever it holds, else by its first bytes."""
    if what_is(path) != "file" or path.suffix.lower() == SUFFIX:
        return what_is(path) == "file"
    with suppress(OSError), path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC
    return False
