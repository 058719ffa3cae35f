"""The precision of numbers: float64 on devices that lack it, and calls outside of what callers have in force.

Sums over positions and prompts are taken in float64. Apple's MPS, among others, has no such numbers: there, what is summed
moves to the CPU, where the sum lies.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

DEVICES = ("cpu", "cuda", "mps", "xpu")  # whose autocast may be on

Given = ParamSpec("Given")
Returned = TypeVar("Returned")


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


def left(function: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """The function, which now runs outside of inference mode and autocast, on tensors that autograd can use.

    Under `torch.inference_mode()` nothing has a derivative, whatever asks for one. Under `torch.autocast` products are taken
    in 16 bits, and results of one precision meet tensors of another. Both are back after the call.
    """

    @wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
        on = [device for device in DEVICES if torch.is_autocast_enabled(device)]
        if not on and not torch.is_inference_mode_enabled():
            return function(*map(_normal, args), **{name: _normal(x) for name, x in kwargs.items()})  # type: ignore[arg-type]
        with ExitStack() as contexts:
            contexts.enter_context(torch.inference_mode(False))
            for device in on:
                contexts.enter_context(torch.autocast(device, enabled=False))
            return call(*args, **kwargs)

    return call


def _normal(x: Any) -> Any:
    """Tokens made in inference mode, copied out of it."""
    return x.clone() if isinstance(x, Tensor) and x.is_inference() else x
