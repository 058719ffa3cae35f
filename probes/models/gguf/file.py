"""A GGUF file as a folder in transformers' format: dequantized once, kept in the cache, read from there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file

from .. import cache
from ..checkpoint import CONFIG, WEIGHTS
from .config import config_of
from .header import Header
from .tensors import checked_names, read_tensors
from .tokenizer import tokenizer_of

LAYOUT = 1  # of the folders written here; to be raised with whatever changes what is in them
READERS = ("gguf", "safetensors", "tokenizers", "torch", "transformers")  # whose versions may change what comes out


@contextmanager
def converted(header: Header, provenance: str, *, dtype: torch.dtype, tokenizer: bool, lasting: bool) -> Iterator[Path]:
    """The folder: from the cache, else made, kept there, and without one that can be written a temporary one.

    Args:
        header, provenance: of the file.
        dtype: of the weights.
        tokenizer: whether to make the file's own.
        lasting: refuse a temporary folder, for models that read weights from it later.

    Raises:
        InputError: the file cannot be followed, or there is no room for what it holds.
    """
    made_by = {reader: version(reader) for reader in READERS} | {"layout": LAYOUT}
    parts = {"file": json.loads(provenance)["sha256"], "dtype": str(dtype), "tokenizer": tokenizer} | made_by
    name = f"gguf-{cache.key(parts)}"
    folder = cache.kept(name)
    if folder is not None:
        yield folder
        return
    config = config_of(header)
    names = checked_names(header, config)
    written = tokenizer_of(header) if tokenizer else None
    tensors = read_tensors(header, config, names, dtype)

    def write(folder: Path) -> None:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        config.to_json_file(folder / CONFIG, use_diff=False)
        if written is not None:
            written.save_pretrained(folder)

    with cache.made(name, write, header.refuse, lasting=lasting) as folder:
        tensors.clear()  # a model is read from the folder next: not both at once
        yield folder
