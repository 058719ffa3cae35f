"""Chains of elementwise operations on cotangents [..., K, d], in one pass over memory where there are kernels for it.

On a GPU a pass over the cotangents of all directions takes as long as a good part of a matrix product, and where numbers of
a position are spread over the directions, PyTorch's operations read and write at half of memory's speed.
"""

from functools import cache

import torch
from torch import Tensor

LEAST = 1 << 23  # numbers; of fewer, a pass takes no longer than the host needs to launch a kernel of ours


@cache
def kernels_there() -> bool:
    """Whether Triton builds kernels here: it may be missing, or the C compiler and Python's headers that it needs.

    Older cards than those of capability 8.0, which it is made for, have less shared memory than tiles may take.
    """
    try:
        if torch.cuda.get_device_capability() < (8, 0):
            return False
        from .kernels import scale

        scale(torch.ones(1, 1, device="cuda"), torch.ones(1, device="cuda"))
    except Exception:  # whatever it is, PyTorch's operations do the same
        return False
    return True


def _fused(*tensors: Tensor) -> bool:
    """Whether kernels know these, and it is worth while: on CUDA, contiguous, of no more than float32, the first large."""
    first = tensors[0]
    known = first.device.type == "cuda" and first.dtype != torch.float64 and first.numel() >= LEAST
    return known and kernels_there() and all(x.is_contiguous() and x.dtype == first.dtype for x in tensors)


def scaled(x: Tensor, *by: Tensor) -> list[Tensor]:
    """x [..., K, d] times each of `by` [..., d]; the last is written over `x`."""
    if _fused(x, *by):
        from .kernels import scale

        return scale(x, *by)
    return [*(x * one.unsqueeze(-2) for one in by[:-1]), x.mul_(by[-1].unsqueeze(-2))]


def along(total: Tensor, weighted: Tensor, unit: Tensor, inverse: Tensor, out: Tensor | None) -> Tensor | None:
    """total + (g - unit <g, unit>/d) inverse for cotangents g [B, T, K, d], where a kernel knows them; else None."""
    if not _fused(total, weighted, unit, inverse, *([] if out is None else [out])):
        return None
    from .kernels import project

    return project(total, weighted, unit, inverse, torch.empty_like(total) if out is None else out)


def grouped(d_mixed: Tensor, mix: Tensor, size: int) -> Tensor:
    """Cotangents [B, rows, K, H c] of heads' outputs `mix` [B, G, rows, H/G, c] as [B, G, rows, H/G, K, size].

    Behind c come their products with the outputs, for all columns together, where `size` is larger.
    """
    (batch, kv, rows, groups, c), count = mix.shape, d_mixed.shape[2]
    mix, made = mix.contiguous(), d_mixed.new_empty(batch, kv, rows, groups, count, size)
    if size > c and _fused(d_mixed, mix):
        from .kernels import group

        return group(d_mixed, mix, made)
    made[..., :c] = d_mixed.unflatten(-1, (kv, groups, c)).permute(0, 3, 1, 4, 2, 5)
    if size > c:
        made[..., c:] = made[..., :c] @ mix.unsqueeze(-1)
    return made


def turned_back(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> bool:
    """Whether a kernel has rotated x [B, G, rows, H/G, K, c] back by angles [rows, rotated] into `out` [B, rows, K, H c]."""
    known = _fused(x, cos, sin) and out.stride(-1) == 1 and out.stride(0) == out.stride(1) * out.shape[1]
    if known and out.stride(1) == out.stride(2) * out.shape[2]:
        from .kernels import turn_back

        turn_back(x, cos, sin, out)
        return True
    return False
