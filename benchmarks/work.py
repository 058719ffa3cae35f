"""What a probe has to do: floating-point operations of its matrix products, by formula and as counted; bytes as counted.

Formulas follow the probes' texts, block by block: P weights, F = H c features of queries, T positions, N prompts. A causal
kernel is charged for what a query sees, T (T + 1) / 2 pairs, logits made block by block for the rectangles that are made.

Counted bytes are those of every operation's inputs and outputs, as if no cache held anything from one to the next; views
cost nothing. Real traffic is less wherever a tensor fits a cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry

from probes.measures.leakage import LAGS
from probes.measures.samples import LOGITS_AT_ONCE, blocks_of, chunks_of
from probes.measures.sinks import FIRST_KEYS
from probes.measures.trajectory import STARTS
from probes.models.fused import query_blocks
from probes.models.linear import flops
from probes.models.view import Attention, Parts, View

aten: Any = torch.ops.aten


def _parts(view: View) -> list[Parts]:
    found = [view.parts(layer) for layer in range(view.spec.blocks)]
    known = [parts for parts in found if parts is not None]
    if len(known) < len(found):
        raise ValueError(f"blocks of '{view.identity.name}' are not taken apart; their operations are not known")
    return known


def weights_of(parts: Parts) -> int:
    """Numbers in a block's matrices."""
    linear = (parts.q, parts.k, parts.v, parts.o, parts.gate, parts.up, parts.down)
    return sum(one.weight.numel() for one in linear if one is not None)


def forward(view: View, length: int) -> float:
    """One pass over one prompt, without unembedding."""
    features = view.spec.heads * view.spec.head_dim
    pairs = length * (length + 1) / 2
    return sum(2.0 * length * weights_of(parts) + 4.0 * features * pairs for parts in _parts(view))


def jacobian(view: View, prompts: int, length: int, products: float) -> float:
    """`products` pulled back per prompt, and what comes before: the pass, every block linearized, the first prompt's check.

    The check holds one product of every block against autograd's, which is two passes forward and backward at full length.
    """
    parts = _parts(view)
    product = sum(flops(one, length=length, rows=1 if one is parts[-1] else None) for one in parts)
    once = 2 * forward(view, length)
    check = sum(flops(one, length=length) for one in parts) + 2.5 * forward(view, length)
    return prompts * (products * product + once) + check


def sinks(view: View, prompts: int, length: int, keys: int | str = len(FIRST_KEYS)) -> float:
    """The pass; columns of chosen keys, or every pattern once more with its sums; quadratic forms of what is written."""
    spec = view.spec
    heads, c = spec.heads, spec.head_dim
    extra = 6.0 * heads * length * c * c + 2.0 * heads * length * c
    extra += 2.0 * heads * length**2 * c  # every head attends anew with position 0 hidden
    if keys == "all":
        made = _pattern_pairs(heads, length)
        extra += 2.0 * heads * (length * c + made * c + 2 * made)
    else:
        extra += 2.0 * heads * length * c * int(keys)
    # Output weights are read by giving the projection an identity, then each head's Gram matrix is made; once.
    grams = 2.0 * (heads * c) ** 2 * spec.width + 2.0 * heads * c * c * spec.width
    return prompts * (forward(view, length) + spec.blocks * extra) + spec.blocks * grams


def _pattern_pairs(heads: int, length: int) -> int:
    """Pairs of (query, key) in the blocks of queries that a causal pattern is made in."""
    nothing = torch.empty(1, heads, length, 1, device="meta")
    attention = Attention(query=nothing, key=nothing, value=nothing, scale=1.0, softcap=None, window=None)
    return sum((stop - start) * stop for start, stop in query_blocks(attention))


def trajectory(view: View, prompts: int, length: int) -> float:
    """Every prompt once, if all begin alike (a single one twice); its first token alone, the starts and their cosines."""
    starts = STARTS * forward(view, 1) + 2.0 * STARTS**2 * view.spec.width * (view.spec.blocks + 1)
    behind = 0.0 if view.bos is None else STARTS * forward(view, 2) + forward(view, 1)
    return max(2, prompts) * forward(view, length) + prompts * forward(view, 1) + starts + behind


def leakage(view: View, prompts: int, length: int) -> float:
    """The pass, and logits: for their means by lag, and to be made Toeplitz, three times where they are not held."""
    spec = view.spec
    found = forward(view, length)
    for half in chunks_of(prompts, length):
        counts = [chunk.stop - chunk.start for chunk in half]
        blocks, held = blocks_of(counts, spec.heads, max(LAGS) + 1, length)
        again = sum((end - start) * end for start, end in blocks) * (1 if held else 3)
        for count in counts:
            step = max(1, LOGITS_AT_ONCE // (count * spec.heads * length))
            by_lag = sum((end - start) * end for start, end in ranges(1, length, step))
            logits = 2.0 * spec.heads * spec.head_dim * (by_lag + again)
            found += count * (forward(view, length) + spec.blocks * logits)
    return found


def ranges(first: int, stop: int, step: int) -> list[tuple[int, int]]:
    """(start, end) of blocks of queries."""
    return [(start, min(start + step, stop)) for start in range(first, stop, step)]


# ----------------------------------------------------------------------------------------------------------- counting


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
