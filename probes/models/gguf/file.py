"""A GGUF file as a folder in transformers' format: dequantized once, kept in the cache, read from there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

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
def converted(
    header: Header,
    provenance: str,
    *,
    given: Mapping[str, Any] | None,
    dtype: torch.dtype,
    tokenizer: bool,
    lasting: bool,
) -> Iterator[Path]:
    """The folder: from the cache, else made, kept there, and without one that can be written a temporary one.

    Args:
        header, provenance: of the file.
        given: fields of a config.json that says what the file leaves unsaid.
        dtype: of the weights.
        tokenizer: whether to make the file's own.
        lasting: refuse a temporary folder, for models that read weights from it later.

    Raises:
        InputError: the file cannot be followed, or there is no room for what it holds.
    """
    config = config_of(header, given)
    name = "gguf-" + cache.key(
        {
            "file": json.loads(provenance)["sha256"],
            "config": None if given is None else config.to_dict(),
            "dtype": str(dtype),
            "tokenizer": tokenizer,
            "layout": LAYOUT,
            "versions": {reader: version(reader) for reader in READERS},
        }
    )
    folder = cache.kept(name)
    if folder is not None:
        yield folder
        return
    names = checked_names(header, config)
    own = tokenizer_of(header) if tokenizer else None
    tensors = read_tensors(header, config, names, dtype)

    def write(folder: Path) -> None:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        config.to_json_file(folder / CONFIG, use_diff=False)
        if own is not None:
            own.save_pretrained(folder)

    with cache.made(name, write, header.refuse, lasting=lasting) as place:
        tensors.clear()  # a model is read from the folder next: not both at once
        yield place
