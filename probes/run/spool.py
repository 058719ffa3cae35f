"""Tensors put aside in a memory-mapped file, so that memory does not grow with the number of prompts.

What has to see many prompts before it can go on (leakage subtracts means over prompts) puts their streams, queries and keys
aside between its passes. A few MiB of them stay in memory. The rest goes to a file without a name, which the system removes
when the process ends in whatever way. Room in it is reserved before it is written: on a full disk a write to memory that
stands for a file would end the process without a word.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Hashable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from .memory import available, own_memory
from .resume import kept_folder

HELD = 1 << 24  # bytes of one spool that stay in memory
GPU_SHARE = 8  # of a GPU's free memory one spool may hold one part in so many: a file is far away from there


class Spool(MutableMapping[Hashable, Tensor]):
    """A mapping of names to tensors, most of them in a file; what is read is as it was written, on its device.

    Tensors come back without history, contiguous whether they were in memory or not, so that products of them have the
    same last digits either way.

    Args:
        held: bytes that stay in memory.
        folder: where the file is; the folder of the unfinished work, or the system's for temporary files, unless given.

    Raises:
        InputError: there is no room for the file.
    """

    def __init__(self, held: int = HELD, folder: Path | None = None) -> None:
        self._folder = folder or kept_folder() or Path(tempfile.gettempdir())
        # A tensor, or where in the file it is and an empty one of that kind.
        self._entries: dict[Hashable, Tensor | tuple[int, Tensor]] = {}
        self._free = self._held = held
        self._file: Any = None
        self._end = 0

    @classmethod
    def beside(cls, device: torch.device) -> Spool:
        """One for tensors of this device."""
        return cls(available(device) // GPU_SHARE if own_memory(device) else HELD)

    def __setitem__(self, name: Hashable, tensor: Tensor) -> None:
        tensor, entry = tensor.detach().contiguous(), self._entries.get(name)
        size, kind = tensor.nbytes, (tensor.shape, tensor.dtype)
        self._free += entry.nbytes if isinstance(entry, Tensor) else 0
        if not isinstance(entry, tuple) or (entry[1].shape, entry[1].dtype) != kind:
            if size <= self._free:
                self._free -= size
                # A slice would keep all that it is a slice of.
                self._entries[name] = tensor.clone() if tensor.untyped_storage().nbytes() > size else tensor
                return
            # The shape, type and device of a tensor in no memory: the strides are all zero.
            empty = torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
            self._entries[name] = entry = self._reserve(size), empty
        self._mapped(entry[0], size).copy_(tensor.reshape(-1).view(torch.uint8))

    def __getitem__(self, name: Hashable) -> Tensor:
        entry = self._entries[name]
        if isinstance(entry, Tensor):
            return entry
        start, kind = entry
        tensor = torch.empty(kind.shape, dtype=kind.dtype)
        tensor.view(-1).view(torch.uint8).copy_(self._mapped(start, kind.numel() * kind.itemsize))
        return tensor.to(kind.device)

    def __delitem__(self, name: Hashable) -> None:
        entry = self._entries.pop(name)
        self._free += entry.nbytes if isinstance(entry, Tensor) else 0

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Nothing is in it any more, and the file is empty."""
        self._entries.clear()
        self._free, self._end = self._held, 0
        if self._file is not None:
            self._file.truncate(0)

    def close(self) -> None:
        """The same, and the file is gone."""
        self.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reserve(self, size: int) -> int:
        """Make the file so much longer, on the disk, too; where that begins."""
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (it lives as long as this does)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file.fileno(), self._end, size)
            else:  # macOS
                self._file.seek(self._end)
                self._file.write(bytes(size))
                self._file.flush()
        except OSError as error:
            raise InputError(
                f"no room for temporary files in '{self._folder}' ({error.strerror or error}); make room, or take fewer "
                "prompts"
            ) from None
        self._end += size
        return self._end - size

    def _mapped(self, start: int, size: int) -> Tensor:
        """Bytes of the file as a tensor [size] on the CPU."""
        return torch.from_numpy(np.memmap(self._file, np.uint8, "r+", start, (size,)))
