"""What acts on every position by itself in a block, with its derivative: norms, rotations, activations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..run.precision import wide
from .view import Norm


class Normalized:
    """A norm at a recorded stream: output, and the derivative's transpose with the weight left to the caller.

    Heads' vectors [B, H, T, c] may have a norm of their own each, or one over all heads' features, whose weight is H c long.
    """

    def __init__(self, norm: Norm, stream: Tensor) -> None:
        self.layer = norm.kind == "layer"
        self.over: tuple[int, ...] = (-1,) if norm.weight.numel() == stream.shape[-1] else (-3, -1)
        self.weight = norm.weight if len(self.over) == 1 else norm.weight.view(-1, 1, stream.shape[-1])
        self.size = norm.weight.numel()
        centred = stream - stream.mean(-1, keepdim=True) if self.layer else stream
        inverse = torch.rsqrt(wide(centred).pow(2).mean(self.over, keepdim=True) + norm.eps)
        self.inverse = inverse.to(stream.dtype)  # [B, T, 1] or [B, H or 1, T, 1]
        self.unit = (centred * inverse).to(stream.dtype)  # [B, T, d]
        self.output = self.unit * self.weight if norm.bias is None else self.unit * self.weight + norm.bias

    def add_pullback(self, total: Tensor, weighted: Tensor, rows: slice | Tensor = slice(None)) -> None:
        """total += ((g - unit <g, unit>/d [- mean g]) / rms), g the cotangent of `unit`; `weighted` is overwritten."""
        unit, inverse = self.unit[:, rows], self.inverse[:, rows]
        if self.layer:
            weighted -= weighted.mean(-1, keepdim=True)
        along = torch.linalg.vecdot(wide(weighted), wide(unit)).unsqueeze(-1)
        along = along if len(self.over) == 1 else along.sum(-3, keepdim=True)  # over all heads where the norm is
        along = along.div_(-self.size).to(weighted.dtype).mul_(inverse)
        total.addcmul_(weighted, inverse).addcmul_(along, unit)

    def pullback(self, cotangent: Tensor, rows: slice = slice(None)) -> Tensor:
        """The whole derivative's transpose, weight included, into a new tensor."""
        total = torch.zeros_like(cotangent)
        self.add_pullback(total, cotangent * self.weight, rows)
        return total


class Bare(Normalized):
    """No norm: the stream as it is, where a block has none before a branch."""

    def __init__(self, stream: Tensor) -> None:
        self.unit = self.output = stream
        self.inverse = torch.ones_like(stream[..., :1])

    def add_pullback(self, total: Tensor, weighted: Tensor, rows: slice | Tensor = slice(None)) -> None:
        total += weighted


def normed(norm: Norm | None, stream: Tensor) -> Normalized:
    """The norm at that stream, or what stands for none."""
    return Bare(stream) if norm is None else Normalized(norm, stream)


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
