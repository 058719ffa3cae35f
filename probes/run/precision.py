"""Float64 on devices that lack it.

Sums over positions and prompts are taken in float64. Apple's MPS, among others, has no such numbers: there, what is summed
moves to the CPU, where the sum lies.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def precise(device: torch.device) -> torch.device:
    """Where float64 numbers made on a device lie: there or, if it has none, on the CPU."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except torch.OutOfMemoryError:  # a RuntimeError, which says nothing of float64
        raise
    except (TypeError, RuntimeError):
        return torch.device("cpu")
    return device


def double(x: Tensor) -> Tensor:
    """A tensor in float64, at its device's `precise` place."""
    return x.to(precise(x.device)).double()


def wide(x: Tensor) -> Tensor:
    """A tensor in float32 at least: float16 holds no square of a number above 256, and bfloat16 three digits of it."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def total(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Its sum over some axes in float64, at its device's `precise` place."""
    return x.to(precise(x.device)).sum(dim, dtype=torch.float64)
