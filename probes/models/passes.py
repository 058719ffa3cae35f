"""Chains of elementwise operations on cotangents [..., K, d], in one pass over memory where there are kernels for it.

On a GPU a pass over the cotangents of all directions takes as long as a good part of a matrix product, and where numbers of
a position are spread over the directions, PyTorch's operations read and write at half of memory's speed.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


@cache
def _there() -> bool:
    return find_spec("triton") is not None


def _fused(*tensors: Tensor) -> bool:
    """Whether kernels know these: on CUDA, contiguous, of no more than float32."""
    first = tensors[0]
    known = first.device.type == "cuda" and first.dtype != torch.float64 and _there()
    return known and all(x.is_contiguous() and x.dtype == first.dtype for x in tensors)


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
