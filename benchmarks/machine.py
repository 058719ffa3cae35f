"""What the benchmarks share: a description of the machine, what it can do at best, fair timing, and peak memory."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import resource
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from probes.run.hardware import processor

MIB, GIB = 1 << 20, 1 << 30
WARM_COUNTS = 12.0  # seconds of a first round from which on warming up hardly shows, so that it is one of the rounds
TRIAD_NUMBERS = 1 << 25  # 128 MiB each of three arrays: more than caches hold
GEMM_SIZE = 2048


def describe(device: str) -> str:
    """One line: processor or GPU, threads, versions."""
    cuda = device.startswith("cuda")
    name = torch.cuda.get_device_name(device) if cuda else f"{processor()}, {torch.get_num_threads()} threads"
    return f"{name}; torch {torch.__version__}, Python {platform.python_version()}"


def identity(device: str) -> dict[str, Any]:
    """What two runs must have in common for their numbers to stand in one table."""
    found: dict[str, Any] = {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu",
    }
    return found | {name: version(name) for name in ("torch", "transformers", "transformer-lens")}


def installed(package: str) -> str | None:
    """The version of a package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# ------------------------------------------------------------------------------------------------------------- time


def synchronize(device: str) -> None:
    """Wait for the device, so that a clock read afterwards means something."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], object], device: str) -> float:
    """Seconds of one call on the wall."""
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - began


def turns(
    calls: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    device: str,
    spend: float = float("inf"),
    first: Mapping[str, float] | None = None,
) -> dict[str, list[float]]:
    """Seconds of each call in every round; calls take turns, so that drift of a shared machine hits all alike.

    Args:
        calls: by name, in the order in which they are run.
        rounds: wanted.
        device: whose queue is waited for.
        spend: seconds within which rounds are begun, by the time that the first took; at least one is made.
        first: seconds of a round already run. Without it one is run here. It warms up, and counts only where it is long.
    """
    warm = {name: seconds_of(call, device) for name, call in calls.items()} if first is None else dict(first)
    each = sum(warm.values())
    counts = each >= WARM_COUNTS
    found: dict[str, list[float]] = {name: [warm[name]] if counts else [] for name in calls}
    left = rounds if spend == float("inf") else max(1, min(rounds, int(spend / max(each, 1e-9))))
    for _ in range(left - counts):
        for name, call in calls.items():
            found[name].append(seconds_of(call, device))
    return found


# ----------------------------------------------------------------------------------------------------- what is possible


def gemm(size: int, dtype: torch.dtype, device: str) -> tuple[Callable[[], object], float]:
    """(a square matrix product to time, its floating-point operations)."""
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out), 2.0 * size**3


def triad(device: str) -> tuple[Callable[[], object], float]:
    """(a = b + 2 c over arrays that no cache holds, the bytes that this reads and writes)."""
    b, c = (torch.ones(TRIAD_NUMBERS, device=device) for _ in range(2))
    out = torch.empty_like(b)
    return lambda: torch.add(b, c, alpha=2, out=out), 3.0 * 4 * TRIAD_NUMBERS


# ------------------------------------------------------------------------------------------------------------- memory


class Memory:
    """Peak above the level at construction, in bytes: resident memory (Linux), or what torch allocated on the device."""

    def __init__(self, device: str) -> None:
        self.cuda = device.startswith("cuda")
        self.device = device
        gc.collect()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(device)
            self.level = torch.cuda.memory_allocated(device)
            return
        ctypes.CDLL(None).malloc_trim(0)  # memory freed and kept would be used again unseen
        Path("/proc/self/clear_refs").write_text("5")  # makes the peak begin here
        self.level = status("VmRSS")

    def above(self) -> int:
        """The peak since construction, less the level."""
        peak = torch.cuda.max_memory_allocated(self.device) if self.cuda else status("VmHWM")
        return max(0, peak - self.level)

    def limit(self, size: int) -> None:
        """Let this process have `size` bytes in all, from now on."""
        if self.cuda:
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, size / total), self.device)
        else:  # address space is counted, of which libraries take more than they use
            allowed = status("VmSize") + max(0, size - status("VmRSS"))
            _, most = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (allowed, most))


def status(name: str, process: int | str = "self") -> int:
    """A size from /proc/PROCESS/status, in bytes."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


def available(device: str) -> int:
    """Bytes that may be had now."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    found = int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
    group = Path("/sys/fs/cgroup/memory.max")
    given = group.read_text().strip() if group.exists() else "max"
    return found if given == "max" else min(found, int(given))


def out_of_memory(error: BaseException) -> str | None:
    """What an allocation asked for, in words, if the error is a failed one; else None."""
    text = str(error)
    if not isinstance(error, MemoryError) and "memory" not in text:
        return None
    wanted = next((int(word) for word in text.split() if word.isdigit() and int(word) > MIB), None)
    return "" if wanted is None else f"asked for {wanted / GIB:.2g} GiB at once"
