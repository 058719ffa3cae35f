"""Tensors put aside in a file, so that memory does not grow with the number of prompts.

What has to see many prompts before it can go on (leakage subtracts means over prompts) puts their streams, queries and keys
aside between its passes. A few MiB of them stay in memory. The rest goes to a file without a name, which the system removes
when the process ends in whatever way.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Hashable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from .memory import available, own_memory

HELD = 1 << 24  # bytes of one spool that stay in memory
GPU_SHARE = 8  # of a GPU's free memory one spool may hold one part in so many: a file is far away from there


class Spool(MutableMapping[Hashable, Tensor]):
    """A mapping of names to tensors, most of them in a file; what is read is as it was written, on its device.

    Tensors come back without history, contiguous whether they were in memory or not, so that products of them have the
    same last digits either way.

    Args:
        held: bytes that stay in memory.
        folder: where the file is; the system's folder for temporary files unless given.

    Raises:
        InputError: there is no room for the file.
    """

    def __init__(self, held: int = HELD, folder: Path | None = None) -> None:
        self._folder = folder or Path(tempfile.gettempdir())
        # A tensor, or where in the file it is and an empty one of that kind.
        self._entries: dict[Hashable, Tensor | tuple[int, Tensor]] = {}
        self._free = self._held = held
        self._file: Any = None
        self._end = 0

    @classmethod
    def beside(cls, device: torch.device, folder: Path | None = None) -> Spool:
        """One for tensors of this device."""
        return cls(available(device) // GPU_SHARE if own_memory(device) else HELD, folder)

    def __setitem__(self, name: Hashable, tensor: Tensor) -> None:
        tensor, before = tensor.detach().contiguous(), self._entries.get(name)
        size = tensor.nbytes
        if isinstance(before, Tensor):
            self._free += before.nbytes
        if not isinstance(before, tuple) and size <= self._free:
            self._free -= size
            # A slice would keep all that it is a slice of.
            self._entries[name] = tensor.clone() if tensor.untyped_storage().nbytes() > size else tensor
            return
        start = before[0] if isinstance(before, tuple) and before[1].nbytes >= size else self._end
        try:
            self._write(start, tensor)
        except OSError as error:
            why = error.strerror or error
            raise InputError(
                f"no room for temporary files in '{self._folder}' ({why}); make room, or take fewer prompts"
            ) from None
        self._end = max(self._end, start + size)
        # The shape, type and device of a tensor in no memory: the strides are all zero.
        empty = torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
        self._entries[name] = start, empty

    def __getitem__(self, name: Hashable) -> Tensor:
        entry = self._entries[name]
        if isinstance(entry, Tensor):
            return entry
        start, kind = entry
        tensor = torch.empty(kind.shape, dtype=kind.dtype)
        self._file.seek(start)
        _all_of(_bytes_of(tensor), self._file.readinto)
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

    def _write(self, start: int, tensor: Tensor) -> None:
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(buffering=0, dir=self._folder)  # noqa: SIM115 (closed by `close`)
        self._file.seek(start)
        _all_of(_bytes_of(tensor.cpu()), self._file.write)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _all_of(content: memoryview, move: Callable[[memoryview], int]) -> None:
    """Read or write all bytes; systems move 2 GiB at a time at most."""
    while len(content):
        content = content[move(content) :]
