"""The precision of numbers: float64 on devices that lack it, and calls outside of what callers have in force.

NVIDIA's GPUs multiply float32 numbers some eight times as fast in TF32. That keeps 11 bits of each factor: a product is 3e-4
of its size off. Where a measure takes it, and where sums in float64 lie, stands in `docs/scale.md`.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from typing import Any, Literal, ParamSpec, TypeVar

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
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def total(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Its sum over some axes in float64, at its device's `precise` place."""
    return x.to(precise(x.device)).sum(dim, dtype=torch.float64)


def coarse(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of such numbers are faster in TF32 there."""
    there = device.type == "cuda" and dtype == torch.float32 and torch.version.cuda is not None
    return there and torch.cuda.get_device_capability(device) >= (8, 0)


@contextmanager
def products(precision: Literal["ieee", "tf32"]) -> Iterator[None]:
    """Inside, GPUs take products of float32 numbers so, "ieee" as they are; afterwards they do what they did before.

    This is PyTorch's newer setting: its older ones (`allow_tf32`, `set_float32_matmul_precision`) refuse to be read inside.
    """
    matmul: Any = torch.backends.cuda.matmul
    before, general = matmul.fp32_precision, torch.backends.cudnn.fp32_precision  # type: ignore[attr-defined]
    matmul.fp32_precision = precision
    try:
        yield
    finally:
        # "none" follows what is set for all of CUDA, and is read as that.
        matmul.fp32_precision = "none" if before == general else before


def left(function: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """The function, which now runs outside of inference mode and autocast, on tensors that autograd can use, in float32.

    Under `torch.inference_mode()` nothing has a derivative, whatever asks for one. Under `torch.autocast` products are taken
    in 16 bits, and results of one precision meet tensors of another; where TF32 is on, float32 products keep 11 bits. All
    three are back after the call.
    """

    @wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
        with ExitStack() as contexts:
            contexts.enter_context(products("ieee"))
            if torch.is_inference_mode_enabled():
                contexts.enter_context(torch.inference_mode(False))
            for device in filter(torch.is_autocast_enabled, DEVICES):
                contexts.enter_context(torch.autocast(device, enabled=False))
            return function(*map(_normal, args), **{name: _normal(x) for name, x in kwargs.items()})  # type: ignore[arg-type]

    return call


def _normal(x: Any) -> Any:
    """Tokens made in inference mode, copied out of it."""
    return x.clone() if isinstance(x, Tensor) and x.is_inference() else x
