"""Tensors put aside in a file, so that memory does not grow with the number of prompts.

What has to see many prompts before it can go on (leakage subtracts means over prompts) puts their streams, queries and keys
aside between its passes. A few MiB of them stay in memory; what is more goes to a file that has no name, which the system
removes when the process ends in whatever way. The system keeps the file in memory that nobody else needs.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Hashable, Iterator, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from .memory import available
from .resume import kept_folder

HELD = 1 << 24  # bytes of one spool that stay in memory
GPU_SHARE = 8  # of a GPU's free memory one spool may hold one part in so many: a file is far away from there


class _Place(NamedTuple):
    start: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


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
        self._memory: dict[Hashable, Tensor] = {}
        self._places: dict[Hashable, _Place] = {}
        self._free = self._held = held
        self._file: Any = None
        self._end = 0

    @classmethod
    def beside(cls, device: torch.device) -> Spool:
        """One for tensors of this device."""
        return cls(available(device) // GPU_SHARE if device.type == "cuda" else HELD)

    def __setitem__(self, name: Hashable, tensor: Tensor) -> None:
        tensor = tensor.detach().contiguous()
        size, place = tensor.nbytes, self._places.get(name)
        if place is not None and (place.shape, place.dtype) == (tensor.shape, tensor.dtype):
            self._write(tensor, place.start)
            return
        if name in self:
            del self[name]
        if size <= self._free:
            self._free -= size
            # A slice would keep all that it is a slice of.
            self._memory[name] = tensor.clone() if tensor.untyped_storage().nbytes() > size else tensor
            return
        self._write(tensor, self._end)
        self._places[name] = _Place(self._end, tensor.shape, tensor.dtype, tensor.device)
        self._end += size

    def __getitem__(self, name: Hashable) -> Tensor:
        if name in self._memory:
            return self._memory[name]
        place = self._places[name]
        tensor = torch.empty(place.shape, dtype=place.dtype)
        into, at = _bytes_of(tensor), place.start
        while into:
            read = os.preadv(self._file.fileno(), [into], at)
            if not read:
                raise RuntimeError(f"the temporary file in '{self._folder}' is shorter than what was written to it")
            into, at = into[read:], at + read
        return tensor.to(place.device)

    def __delitem__(self, name: Hashable) -> None:
        if name in self._memory:
            self._free += self._memory.pop(name).nbytes
        else:
            del self._places[name]

    def __iter__(self) -> Iterator[Hashable]:
        yield from (*self._memory, *self._places)

    def __len__(self) -> int:
        return len(self._memory) + len(self._places)

    def clear(self) -> None:
        """Nothing is in it any more, and the file is empty."""
        self._memory.clear()
        self._places.clear()
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

    def _write(self, tensor: Tensor, at: int) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (it lives as long as this does)
            left = _bytes_of(tensor.cpu())
            while left:
                written = os.pwrite(self._file.fileno(), left, at)
                left, at = left[written:], at + written
        except OSError as error:
            raise InputError(
                f"no room for temporary files in '{self._folder}' ({error.strerror or error}); make room, or take fewer "
                "prompts"
            ) from None


def _bytes_of(tensor: Tensor) -> Any:
    """The memory of a contiguous tensor on the CPU."""
    numbers: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(numbers) if tensor.numel() else b""
