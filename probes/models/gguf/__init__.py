"""GGUF files: read within bounds, checked, and converted to a model of transformers."""

from __future__ import annotations

from pathlib import Path

from ...run.files import what_is

MAGIC, SUFFIX = b"GGUF", ".gguf"


def is_gguf(path: str | Path) -> bool:
    """Whether an existing file is to be read as GGUF: by its first bytes, else by its name, whatever it holds."""
    if what_is(path) != "file":
        return False
    try:
        with Path(path).open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC or str(path).lower().endswith(SUFFIX)
    except OSError:
        return str(path).lower().endswith(SUFFIX)
