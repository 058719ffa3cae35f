"""How much memory the probes take, known before they begin, and what to do where it runs out (`Room`).

Counted are the numbers that live at one time, at the moment when most do, from the shapes of the model: width d, heads H,
key heads G of width c, feed-forward f (twice, where it has a gate), T positions, L blocks, K directions at once. The counts
follow `probes.linear` line by line; `benchmarks/planner.py` holds them against measured peaks.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from .errors import InputError
from .linear import QUERY_BAND
from .models.fused import in_parts
from .models.view import View

Made = TypeVar("Made")

CPU_ROWS = 4096  # rows of a matrix product; with fewer, patterns are remade for too few directions from T = 1,024 on
KEPT_SHARE = 0.5  # of the memory there is, for a prompt's blocks; above it they are made again for every chunk
CHUNK_SHARE = 0.25  # of a GPU's, for the directions on their way
MOST_PARTS = 64  # of a block of 8 MiB, 128 KiB: smaller ones save nothing that would be seen beside a prompt's streams


@dataclass(frozen=True)
class Pace:
    """Directions at once, and whether a prompt's linearized blocks are kept."""

    chunk: int
    keep: bool


@dataclass(frozen=True)
class Sizes:
    """Of one block, in numbers per position; and of the model."""

    width: int
    heads: int
    queries: int  # H c
    keys: int  # G c
    features: int
    gated: bool
    parallel: bool
    blocks: int
    itemsize: int
    apart: bool  # whether the blocks can be taken apart
    softcap: bool
    wide: bool  # norms per head (q and k)
    post_norm: bool

    @classmethod
    def of(cls, model: View) -> Sizes:
        """The model's, from its first block."""
        spec, parts = model.spec, model.parts(0)
        return cls(
            width=spec.width,
            heads=spec.heads,
            queries=spec.heads * spec.head_dim,
            keys=spec.kv_heads * spec.head_dim,
            features=4 * spec.width if parts is None else parts.down.weight.shape[1],
            gated=parts is None or parts.gate is not None,
            parallel=parts is not None and parts.parallel,
            blocks=spec.blocks,
            itemsize=model.dtype.itemsize,
            apart=parts is not None,
            softcap=parts is not None and parts.softcap is not None,
            wide=parts is not None and parts.q_norm is not None,
            post_norm=parts is not None and parts.post_attention_norm is not None,
        )

    @property
    def first(self) -> int:
        """Features of the feed-forward's first products: gate and up."""
        return self.features * (2 if self.gated else 1)

    def folded(self) -> int:
        """Bytes of one block's stacked matrices, the norms folded in."""
        return (self.first + self.queries + 2 * self.keys) * self.width * self.itemsize

    def linearized(self, length: int) -> int:
        """Bytes of one block, linearized at a prompt, while it is kept.

        Norms' units and outputs (4 d), the stream in the middle and after (2 d), queries and what attention gave (2 H c),
        keys and values, the feed-forward's slopes.
        """
        row = 6 * self.width + 2 * self.queries + 2 * self.keys + self.first
        row += (self.queries + self.keys) * 2 * self.wide + 4 * self.width * self.post_norm
        return row * length * self.itemsize

    def making(self, length: int) -> int:
        """Bytes beside it while it is made: the feed-forward's products, their slopes and gradients, before all is done."""
        mlp = (4 if self.gated else 3) * self.features
        band = 2 * self.heads * min(QUERY_BAND, length)  # logits and pattern of one band against all keys
        return max(mlp, self.queries + 2 * self.keys + band) * length * self.itemsize

    def product(self, length: int) -> int:
        """Bytes of one direction on its way through one block, at the moment when most is alive.

        In attention: the cotangents above and in the middle (2 d), those of the feed-forward's first products and hidden
        (f and `first`), of heads' outputs (twice, once by head), of q, k, v (as they are, rotated, and side by side),
        and of a band's pattern, twice.
        """
        projected = self.queries + 2 * self.keys
        band = 2 * self.heads * min(QUERY_BAND, length)
        attention = self.features + self.first + 2 * self.queries + 2 * projected + band
        return (3 * self.width + attention) * length * self.itemsize


def paced(model: View, length: int, lowest: int = 0) -> Pace:
    """How a Jacobian is taken of a prompt of so many positions: full-rate products on a CPU, bounded memory on a GPU."""
    sizes = Sizes.of(model)
    free = available(model.device)
    blocks = sizes.blocks - lowest
    keep = not model.offloaded and blocks * sizes.linearized(length) <= KEPT_SHARE * free
    if model.device.type != "cuda":
        return Pace(max(1, CPU_ROWS // length), keep)
    chunk = int(CHUNK_SHARE * free) // (sizes.product(length) if sizes.apart else 1 << 28)
    return Pace(max(1, min(sizes.width, chunk)), keep)


def available(device: torch.device) -> int:
    """Bytes that may be had now: of the GPU, or of this process by the machine, its group and its limits."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    found = _kibibytes(Path("/proc/meminfo"), "MemAvailable")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if found is None else found
    group = Path("/sys/fs/cgroup/memory.max")
    given = group.read_text().strip() if group.exists() else "max"
    if given.isdigit():
        used = Path("/sys/fs/cgroup/memory.current")
        total = min(total, int(given) - (int(used.read_text()) if used.exists() else 0))
    limit = _address_space()
    if limit is not None:
        total = min(total, limit - (_kibibytes(Path("/proc/self/status"), "VmSize") or 0))
    return max(0, total)


def weights_of(model: View) -> int:
    """Bytes of the weights behind a view, where it has any to show."""
    held: Any = getattr(model, "original", model)
    module = getattr(held, "_model", None)
    return 0 if module is None else sum(p.numel() * p.element_size() for p in module.parameters())


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory has run out, on whatever device."""
    from accelerate.utils.memory import should_reduce_batch_size  # not above: few need it, and it takes long to import

    return isinstance(error, MemoryError) or (isinstance(error, Exception) and should_reduce_batch_size(error))


class Room:
    """Work on prompts in whole blocks while memory suffices, in smaller ones from the prompt on at which it ran out.

    What becomes smaller are blocks of queries, and pieces of whatever goes over heads, keys or positions by
    `models.fused.shares`. Numbers differ by the rounding of sums that are taken in another order, and only there.

    Args:
        model: whose prompts they are.
        length: positions of one.
        report: has a count `done`, set back when work is begun anew.
    """

    def __init__(self, model: View, length: int, report: Any = None) -> None:
        self.model, self.length, self.report = model, length, report
        self.parts = 1

    def __call__(self, work: Callable[[], Made]) -> Made:
        """What `work()` gives; begun anew with blocks half as large as often as memory runs out.

        Raises:
            InputError: it runs out with the smallest, too.
        """
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
                        f"a prompt of {self.length} positions of '{self.model.identity.name}' does not fit into memory, "
                        "even in the smallest blocks; give a shorter length, dtype bfloat16, or a device map"
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


def _address_space() -> int | None:
    """The limit of this process's address space, where the system has such limits and there is one."""
    try:
        import resource
    except ImportError:
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def _kibibytes(file: Path, name: str) -> int | None:
    """A line of a file of the kernel's, in bytes."""
    lines: Any = file.read_text().splitlines() if file.exists() else []
    line = next((x for x in lines if x.startswith(f"{name}:")), None)
    return None if line is None else int(line.split()[1]) * 1024
