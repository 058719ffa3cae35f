"""A GGUF file as a folder in transformers' format: dequantized once, kept in the cache, read from there."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from .. import cache
from ..checkpoint import CONFIG, WEIGHTS
from .config import config_of
from .header import Header
from .tensors import check_tensors, read_tensors
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
    check_tensors(header, config)
    content = _Content(header, config, dtype, tokenizer)
    folder = cache.keep(name, content.write)
    if folder is not None:
        del content  # a model is read from the folder next: not both at once
        yield folder
        return
    if lasting:
        raise header.refuse(
            f"is dequantized to disk for a device map, and {cache.cache_folder()} cannot be written; set HEADWATER_CACHE"
        )
    with tempfile.TemporaryDirectory(prefix="headwater-") as temporary:
        try:
            content.write(Path(temporary))
        except OSError as error:
            reason = error.strerror or error
            raise header.refuse(
                f"cannot be dequantized to disk ({reason}); set HEADWATER_CACHE to a larger one"
            ) from None
        del content
        yield Path(temporary)


class _Content:
    """What the folder holds, read when it is first written."""

    def __init__(self, header: Header, config: Any, dtype: torch.dtype, tokenizer: bool) -> None:
        self._config = config
        self._tokenizer = tokenizer_of(header) if tokenizer else None
        self._tensors = read_tensors(header, config, dtype)

    def write(self, folder: Path) -> None:
        from safetensors.torch import save_file

        save_file(self._tensors, folder / WEIGHTS, metadata={"format": "pt"})
        self._config.to_json_file(folder / CONFIG, use_diff=False)
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(folder)
