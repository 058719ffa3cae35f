"""What acts on every position by itself in a block, with its derivative: norms, rotations, activations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .view import Norm


class Normalized:
    """A norm at a recorded stream: output, and the derivative's transpose with the weight left to the caller."""

    def __init__(self, norm: Norm, stream: Tensor) -> None:
        self.layer = norm.kind == "layer"
        self.weight = norm.weight
        centred = stream - stream.mean(-1, keepdim=True) if self.layer else stream
        self.inverse = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + norm.eps)  # [B, T, 1]
        self.unit = centred * self.inverse  # [B, T, d]
        self.output = self.unit * norm.weight if norm.bias is None else self.unit * norm.weight + norm.bias

    def add_pullback(self, total: Tensor, weighted: Tensor, rows: slice | Tensor = slice(None)) -> None:
        """total += ((g - unit <g, unit>/d [- mean g]) / rms), g the cotangent of `unit`; `weighted` is overwritten."""
        unit, inverse = self.unit[:, rows], self.inverse[:, rows]
        if self.layer:
            weighted -= weighted.mean(-1, keepdim=True)
        along = torch.linalg.vecdot(weighted, unit).unsqueeze(-1).mul_(inverse).div_(-unit.shape[-1])
        total.addcmul_(weighted, inverse).addcmul_(along, unit)

    def pushed(self, tangent: Tensor, rows: slice | Tensor | tuple[slice, slice | Tensor] = slice(None)) -> Tensor:
        """The derivative applied to tangents of the stream, the weight left to the caller; a new tensor."""
        where = (slice(None), *rows) if isinstance(rows, tuple) else (slice(None), rows)
        unit, inverse = self.unit[where], self.inverse[where]
        if self.layer:
            tangent = tangent - tangent.mean(-1, keepdim=True)
        along = torch.linalg.vecdot(tangent, unit).unsqueeze(-1).div_(-unit.shape[-1])
        return torch.addcmul(tangent, along, unit).mul_(inverse)

    def pullback(self, cotangent: Tensor, rows: slice = slice(None)) -> Tensor:
        """The whole derivative's transpose, weight included, into a new tensor."""
        total = torch.zeros_like(cotangent)
        self.add_pullback(total, cotangent * self.weight, rows)
        return total


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """Rotate the leading `cos.shape[-1]` features of x [..., T, c] as transformers does; `back` is the transpose."""
    width = cos.shape[-1]
    half = width // 2
    first, second = x[..., :half], x[..., half:width]
    out = torch.empty_like(x)
    if back:
        torch.mul(first, cos[..., :half], out=out[..., :half]).addcmul_(second, sin[..., half:])
        torch.mul(second, cos[..., half:], out=out[..., half:width]).addcmul_(first, sin[..., :half], value=-1)
    else:
        torch.mul(first, cos[..., :half], out=out[..., :half]).addcmul_(second, sin[..., :half], value=-1)
        torch.mul(second, cos[..., half:], out=out[..., half:width]).addcmul_(first, sin[..., half:])
    out[..., width:] = x[..., width:]
    return out


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Largest difference against the largest value; false for anything not finite."""
    return bool((a - b).abs().max() <= tolerance * b.abs().max())


def value_and_slope(activation: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """An elementwise function and its derivative at x, whatever the function."""
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        value = activation(leaf)
        (slope,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), slope
