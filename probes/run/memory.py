"""What memory there is, tensors put aside in files, and work in smaller blocks where memory runs out (`Retry`)."""

import ctypes
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from torch import Tensor

from ..errors import InputError

_parts: ContextVar[int] = ContextVar("headwater_parts", default=1)


@contextmanager
def in_parts(parts: int) -> Iterator[None]:
    """Inside, blocks of queries are so many times smaller, and `shares` gives so many pieces."""
    token = _parts.set(parts)
    try:
        yield
    finally:
        _parts.reset(token)


def parts() -> int:
    """How many times smaller than usual blocks are made now; 1 outside `in_parts`."""
    return _parts.get()


def share_of(count: int) -> int:
    """How many of `count` are worked on at once: all or, within `in_parts`, so many times fewer; at least one."""
    return max(1, -(-count // _parts.get()))


def shares(count: int) -> Iterator[slice]:
    """`count` heads, keys or positions that may be worked on apart: all at once or, within `in_parts`, piece by piece."""
    size = share_of(count)
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


Made = TypeVar("Made")
MOST_PARTS = 64  # of a block of 8 MiB, 128 KiB: smaller ones save nothing that would be seen beside a prompt's streams


def own_memory(device: torch.device) -> Any:
    """PyTorch's module of a kind of device that has memory of its own (`torch.cuda`); None where it is the machine's."""
    module = getattr(torch, device.type, None)
    return module if hasattr(module, "mem_get_info") else None


def available(device: torch.device) -> int:
    """Bytes that may be had now: of the GPU, or of this process by the machine, its group and its limits."""
    own = own_memory(device)
    if own is not None:
        free, _ = own.mem_get_info(device)
        if not hasattr(own, "memory_stats_as_nested_dict"):
            return free + own.memory_reserved(device) - own.memory_allocated(device)
        # Of CUDA's: the functions for one number spell out a hundred others first, which takes as long as many operations.
        bytes_ = own.memory_stats_as_nested_dict(device)
        reserved, allocated = (bytes_.get(f"{kind}_bytes") for kind in ("reserved", "allocated"))
        return free + (reserved["all"]["current"] - allocated["all"]["current"] if reserved else 0)
    total, process, group = psutil.virtual_memory().available, psutil.Process(), Path("/sys/fs/cgroup")
    most = (group / "memory.max").read_text().strip() if (group / "memory.max").exists() else "max"
    if most.isdigit():
        total = min(total, int(most) - int((group / "memory.current").read_text()))
    if hasattr(psutil, "RLIMIT_AS"):
        limit, _ = process.rlimit(psutil.RLIMIT_AS)
        total = total if limit == psutil.RLIM_INFINITY else min(total, limit - process.memory_info().vms)
    return max(0, total)


CPU_NUMBERS = 1 << 21  # of a block: 8 MiB in float32, near a core's cache
ONE_THREAD = (1 << 15) - 1  # of an operation, from which on PyTorch divides it
LARGEST = 1 << 30  # of a block on any device: some kernels count a tensor's numbers in 31 bits
BLOCK_SHARE = 1 / 16  # of a device's free memory, for a block: some four tensors of its size exist at once
PROMPT_SHARE = 1 / 4  # of a device's free memory, for the streams of prompts that go through a model together
# Of a prompt on its way through a model, by position and width: its stream, a feed-forward four times as wide, and heads'
# queries, keys, values and outputs, each of them once more while the next is made.
PROMPT_NUMBERS = 24


def block_numbers(device: torch.device) -> int:
    """How many numbers of a temporary tensor are worked on at once.

    A processor works from its cache. On a device with memory of its own each operation is launched by itself, which takes as
    long as some million numbers: there a block is as large as the memory that is free allows.
    """
    if own_memory(device) is None:
        return CPU_NUMBERS
    return min(LARGEST, max(CPU_NUMBERS, int(BLOCK_SHARE * available(device)) // 4))


def piece_numbers(device: torch.device) -> int:
    """How many numbers there are in a piece of what is worked off piece by piece, with a few temporary tensors of its size.

    On a processor so few that PyTorch leaves them to the thread that asks: they are in its cache, and no piece waits until
    another thread is awake, which takes milliseconds where the machine is busy.
    """
    return ONE_THREAD if own_memory(device) is None else block_numbers(device) // 8


def prompts_at_once(model: Any, length: int, beside: int = 0) -> int:
    """How many prompts of `length` positions go through a model (any view) together, fewer within `in_parts`.

    One on a processor, which is busy with one; on a device with memory of its own as many as there is room for.

    `beside`: float32 numbers that a caller keeps for each prompt, beside its streams.
    """
    if own_memory(model.device) is None:
        return 1
    numbers = PROMPT_NUMBERS * model.spec.width * length + beside
    return share_of(max(1, int(PROMPT_SHARE * available(model.device)) // (4 * numbers)))


def batches(prompts: Sequence[int], model: Any, length: int, beside: int = 0) -> Iterator[list[int]]:
    """The prompts of these numbers, as many at a time as go through a model together when it is their turn."""
    start = 0
    while start < len(prompts):
        some = list(prompts[start : start + prompts_at_once(model, length, beside)])
        yield some
        start += len(some)


def aside(tensor: Tensor, folder: Path | None = None) -> Tensor:
    """The numbers of a tensor, contiguous and without history, where they take no memory that others need.

    That is a file whose name goes as soon as it is mapped into the machine's memory: the system drops its pages when it
    needs room, and frees the file with the tensor or the process. On a GPU a tensor stays while half of the memory is free.

    The file is in `folder`; in the system's folder for temporary files unless given.
    """
    tensor, own = tensor.detach().contiguous(), own_memory(tensor.device)
    if own is not None and available(tensor.device) > own.mem_get_info(tensor.device)[1] // 2:
        return tensor.clone()  # a slice would keep all that it is a slice of
    folder = folder or Path(tempfile.gettempdir())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(tensor.cpu().reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
            return torch.from_file(file.name, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
    except (OSError, RuntimeError) as error:  # more mappings than the system allows are a RuntimeError
        why = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise InputError(
            f"no room for temporary files in '{folder}' ({why}); make room, or take fewer prompts"
        ) from None


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory has run out, on whatever device."""
    from accelerate.utils.memory import should_reduce_batch_size  # not above: few need it, and it takes long to import

    return isinstance(error, MemoryError) or (isinstance(error, Exception) and should_reduce_batch_size(error))


class Retry:
    """Work on prompts in whole blocks while memory suffices, in smaller ones from the prompt on at which it ran out.

    What becomes smaller are blocks of queries, and pieces of whatever goes over heads, keys or positions by
    `shares`. Numbers differ by the rounding of sums that are taken in another order, and only there.

    `what`: what a line of error calls one of them, as in "a prompt of 64 positions of 'tiny-llama'". `report` has a count
    `done`, set back when work is begun anew.
    """

    def __init__(self, what: str, report: Any = None) -> None:
        self.what, self.report = what, report
        self.parts = 1

    def __call__(self, work: Callable[[], Made]) -> Made:
        """What `work()` gives; begun anew with blocks half as large as often as memory runs out."""
        before = getattr(self.report, "done", None)
        while True:
            try:
                with in_parts(self.parts):
                    return work()
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                if self.parts == MOST_PARTS:
                    raise InputError(
                        f"{self.what} does not fit into memory, even in the smallest blocks; give a shorter length, "
                        "dtype bfloat16, or a device map"
                    ) from None
            # Not before the error is gone: its traceback holds what the attempt had made.
            _release()
            self.parts *= 2
            if self.report is not None:
                self.report.done = before


def trim() -> None:
    """Give the system back what the C library keeps of freed memory, where it can (glibc).

    Work of several stages with tensors of other sizes each leaves holes of the size of the largest stage.
    """
    library: Any = ctypes.CDLL(None) if os.name == "posix" else None
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def _release() -> None:
    """Give back what an attempt has left: to the allocators, and of a GPU to the device."""
    from accelerate.utils.memory import clear_device_cache

    clear_device_cache(garbage_collection=True)
