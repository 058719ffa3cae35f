"""What a machine computes on: its devices, and what they are called."""

import platform
from pathlib import Path
from typing import Any

import torch

from ..errors import InputError, reason

UNUSABLE = (RuntimeError, AssertionError, NotImplementedError, TypeError)  # what `reached` raises


def devices() -> list[str]:
    """The devices of this machine by name, those of its accelerator (CUDA, MPS, XPU, ...) first: cuda:0, cuda:1, cpu."""
    found = torch.accelerator.current_accelerator(check_available=True)
    count = 0 if found is None else torch.accelerator.device_count()
    return [*(f"{found.type}:{n}" for n in range(count) if found is not None), "cpu"]


def reached(device: Any) -> torch.device:
    """A device with its index ("cuda" is where a model on "cuda:0" is), once it holds values, as "meta" does not."""
    probe = torch.zeros(1, device=torch.device(device))
    probe.item()
    return probe.device


def named(device: str) -> torch.device:
    """The device of a name, as `reached`."""
    try:
        return reached(device)
    except UNUSABLE as error:
        raise InputError(
            f"device '{device}' cannot be used ({reason(error)}); give {', '.join(devices())} or auto"
        ) from None


def hardware(device: torch.device) -> str:
    """The kind of machine, in words."""
    if device.type != "cpu":
        module: Any = getattr(torch, device.type, None)
        return module.get_device_name(device) if hasattr(module, "get_device_name") else f"{device.type}, {processor()}"
    threads = torch.get_num_threads()
    return f"CPU ({processor()}), {threads} thread{'s' if threads > 1 else ''}, float32"


def processor() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
