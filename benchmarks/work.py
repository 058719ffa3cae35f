"""What a probe has to do, counted while it runs: floating-point operations of its matrix products, and bytes.

Bytes are those of every operation's inputs and outputs, as if no cache held anything from one to the next; views cost
nothing. Real traffic is less wherever a tensor fits a cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry

aten: Any = torch.ops.aten


class Counting(TorchDispatchMode):
    """`bytes` that operations read and write while this is on, and `flops` of their products, by torch's own formulas.

    torch's `FlopCounterMode` has these formulas, too, but refuses gradients with respect to leaves. It costs time: what is
    counted is not to be timed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.flops = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func._overloadpacket in KNOWN:
            self.flops += KNOWN[func._overloadpacket](*args, **kwargs, out_val=found)
        view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        if not view and not func.name().startswith(("aten::empty", "aten::new_empty", "aten::detach")):
            touched = [x for x in tree_flatten((args, kwargs, found))[0] if isinstance(x, Tensor)]
            self.bytes += sum(_size(x) for x in touched)
        return found


def _size(x: Tensor) -> int:
    """Bytes; of an expanded tensor those that are there."""
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


def _causal(query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, causal: bool = False, **_: Any) -> int:
    """Operations of the fused kernel on CPU, which torch's formulas do not know; as if no hidden pair were computed."""
    batch, heads, length, c = query.shape
    pairs = length * (length + 1) // 2 if causal else length * key.shape[2]
    return 2 * batch * heads * pairs * (c + value.shape[3])


def _causal_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *more: Any, **_: Any) -> int:
    """Five products instead of two."""
    return 5 * _causal(query, key, value, 0.0, True) // 2


KNOWN: dict[Any, Any] = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: _causal,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _causal_backward,
}
