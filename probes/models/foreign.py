"""Modules that compute in a way of their own: other packages', quantized ones, a caller's.

What their weights say is not known, so that blocks with them stay whole, and are differentiated as they run. One that gives
back no derivative, or torch's stand-in for one, is refused as soon as somebody differentiates it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError, reason
from .structure import KNOWN, keeps_state

REPLACED = ("torch.ao.", "torch.nn.quantized")  # modules of torch's that stand in the place of its plain ones
UNRUN = (RuntimeError, TypeError, AttributeError, NotImplementedError, ImportError)  # from kernels that do not run here


def unknown(module: nn.Module) -> str | None:
    """What makes a module compute in a way that its class, if it is one of torch's or transformers', does not say."""
    kind = type(module)
    # Quantized layers are linear in another way than nn.Linear; layers of other packages are not known here.
    if (
        kind.__module__.partition(".")[0] not in (*KNOWN, "transformer_lens")
        or kind.__module__.startswith(REPLACED)
        or (isinstance(module, nn.Linear) and kind is not nn.Linear)
    ):
        return f"module '{kind.__module__}.{kind.__qualname__}' as its"
    for name, weight in module._parameters.items():
        if weight is not None and (keeps_state(weight) or not weight.is_floating_point() or weight.dtype.itemsize == 1):
            return f"'{type(weight).__module__}.{type(weight).__qualname__}' as the {name} of its"
    return None


@contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """Passes within it may be differentiated; at a module that is not known and gives back no derivative, that raises.

    What flows through the stream beside it would pass for the whole derivative; the error is an `InputError`.
    """

    def check(module: nn.Module, args: Any, output: Any) -> Tensor | None:
        given = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
        if given and isinstance(output, Tensor) and output.is_floating_point() and not _has_derivative(output, given):
            kind = type(module.weight) if type(module) is nn.Linear else type(module)
            return _Refused.apply(output.detach(), given[0], f"{kind.__module__}.{kind.__qualname__}")
        return None

    handles = [module.register_forward_hook(check) for module in model.modules() if unknown(module) is not None]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Refused(torch.autograd.Function):
    """A module's output, whose derivative by what the module was given is an error."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, given: Tensor, module: str) -> Tensor:  # type: ignore[override]
        ctx.module = module
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        raise InputError(
            f"'{ctx.module}' has no derivative, which this measurement takes; measure what needs none (sinks, leakage), or "
            "give the model unquantized"
        )


def _has_derivative(output: Tensor, given: list[Tensor]) -> bool:
    """Whether derivatives flow back to what was given: torch fills in for operators that have none, and only warns."""
    known: dict[Any, bool] = {None: False} | {x.grad_fn: True for x in given if x.grad_fn is not None}

    def flows(node: Any) -> bool:
        if node not in known:
            leaf = getattr(node, "variable", None)
            behind = any(leaf is x for x in given) or any(flows(before) for before, _ in node.next_functions)
            known[node] = behind and "NotImplemented" not in node.name()
        return known[node]

    return flows(output.grad_fn)


@torch.no_grad()
def check_runs(run: Callable[[Tensor], Tensor], embeddings: Tensor, refusal: str) -> None:
    """Refuse modules whose kernels do not run here; `refusal` begins the message.

    Raises:
        InputError: they do not.
    """
    try:
        run(embeddings)
    except torch.OutOfMemoryError:
        raise
    except UNRUN as error:
        raise InputError(f"{refusal}{reason(error)}); give it unquantized") from None
