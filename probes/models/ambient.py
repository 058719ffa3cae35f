"""What is in force around a call and changes numbers or forbids derivatives: left for a measurement, and back after it.

Under `torch.inference_mode()` nothing has a derivative, whatever asks for one. Under `torch.autocast` products are taken in
16 bits, and results of one precision meet tensors of another. `torch.no_grad()` is no matter: what needs gradients asks for
them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

DEVICES = ("cpu", "cuda", "mps", "xpu")  # whose autocast may be on

Given = ParamSpec("Given")
Returned = TypeVar("Returned")


def left(function: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """The function, which now runs outside of inference mode and autocast, on tensors that autograd can use."""

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
