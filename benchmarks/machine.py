"""What the benchmarks share: a description of the machine, its matrix-product rate, and fair timing."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch


def describe(device: str) -> str:
    """One line: processor or GPU, threads, versions."""
    if device.startswith("cuda"):
        name = torch.cuda.get_device_name(device)
    else:
        lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
        name = f"{model or platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    return f"{name}; torch {torch.__version__}, Python {platform.python_version()}"


def synchronize(device: str) -> None:
    """Wait for the device, so that a clock read afterwards means something."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def alternate(calls: Mapping[str, Callable[[], object]], *, rounds: int, device: str) -> dict[str, float]:
    """Median seconds of each call, taken in turn after one warm-up round: drift of a shared machine hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for at in range(rounds + 1):
        for name, call in calls.items():
            synchronize(device)
            began = time.perf_counter()
            call()
            synchronize(device)
            if at > 0:
                seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(times) for name, times in seconds.items()}


def gemm(size: int, dtype: torch.dtype, device: str) -> tuple[Callable[[], object], float]:
    """(a square matrix product to time, its floating-point operations)."""
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out), 2.0 * size**3
