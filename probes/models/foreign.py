"""Modules that compute in a way of their own: other packages', quantized ones, a caller's.

What their weights say is not known, so that blocks with them stay whole, and are differentiated as they run. Two things
could then go wrong without a word, and are looked for: a module that changes what it holds as it runs, the caller's with
it, and one that gives back no derivative, or torch's stand-in for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..errors import InputError, reason
from .linear import OUTPUT_TOLERANCE
from .pointwise import close
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
    """Within it, whoever differentiates a module that is not known and gives back no derivative hears of it.

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
def check_passes(
    copied: Callable[[], Callable[[Tensor], Tensor]], embeddings: Float[Tensor, "1 position d"], model: str, module: str
) -> None:
    """Refuse a model whose passes change what later passes, or those of another copy of it, give for one prompt.

    On the CPU the same numbers come out bit for bit. Kernels of other devices may add in another order each time.

    Args:
        copied: makes a copy of the caller's model, and gives its pass from the embeddings on.
        embeddings: the prompt.
        model, module: what is refused, and what in it is not known, for the message.
    """
    passes = []
    try:
        for _ in range(2):
            run = copied()
            passes += [run(embeddings) for _ in range(2)]
    except torch.OutOfMemoryError:
        raise
    except UNRUN as error:
        raise InputError(f"{model} does not run here ({module}: {reason(error)}); give it unquantized") from None
    first, tolerance = passes[0], 0.0 if embeddings.device.type == "cpu" else OUTPUT_TOLERANCE[embeddings.dtype]
    if first.isfinite().all() and not all(close(one, first, tolerance) for one in passes):
        raise InputError(
            f"{model} gives another output in each pass of one prompt ({module}): its modules change weights, or what they "
            "keep beside them, as they run; load it anew, unquantized"
        )
