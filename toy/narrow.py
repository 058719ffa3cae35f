"""The pass of `toy.model` for narrow heads, laid out so that no operation's innermost dimension is a narrow one.

A head of two dimensions over ten positions makes thousands of matrix products of four multiplications each, and softmaxes
over rows of ten numbers; calls and row ends then cost more than the arithmetic. Here the batch is innermost: streams are
`[E, d, T, B]`, logits `[E H, T, T, B]`. Projections are one product `[out, in] x [in, T B]` per model, and attention goes by
elementwise products over whole batches, one per dimension of the head. Ids become columns of one-hot vectors, so that the
embedding and its gradient are products, too.

Same weights, same numbers up to rounding (tests/test_toy_model.py); `benchmarks/toys.py` gives both rates.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from .model import HEAD_LAYERS, NORM_EPS, Architecture, Switches, Weights

WIDEST = 16  # dimensions of a head up to which this layout is the faster one on a CPU


def suits(architecture: Architecture) -> bool:
    """Whether this layout is the one to train models of this shape in."""
    return architecture.vocabulary is not None and architecture.head_dim <= WIDEST


def one_hot(ids: Int[Tensor, "stream batch position"], vocabulary: int) -> Float[Tensor, "stream V position_batch"]:
    """What `forward` reads: a column per token, positions outer, sequences inner."""
    columns = ids.transpose(1, 2).flatten(1)[:, None]
    return torch.zeros(len(ids), vocabulary, columns.shape[-1], device=ids.device).scatter_(1, columns, 1.0)


def forward(
    architecture: Architecture, weights: Weights, switches: Switches, inputs: Float[Tensor, "model V position_batch"]
) -> Float[Tensor, "model outputs batch"]:
    """The head's logits at the last position, the batch innermost; arguments as in `model.forward`, ids as columns."""
    a = architecture
    x = weights["embedding"].mT @ inputs
    x = x.unflatten(-1, (a.length, -1))  # [E, d, T, B]
    if "positions" in weights:
        x = x + weights["positions"].mT[..., None]
    if switches.added is not None:
        x = x + switches.added[:, 0].mT[..., None]
    for layer in range(a.blocks - 1):
        x = _block(a, weights, switches, layer, x)
    x = _last_block(a, weights, switches, x)
    return _head(a, weights, _normed(a, weights, "norm", x))[:, :, 0]


def _block(a: Architecture, weights: Weights, switches: Switches, layer: int, x: Tensor) -> Tensor:
    n = _normed(a, weights, f"{layer}.attention_norm", x)
    fused = torch.cat([weights[f"{layer}.{name}"] for name in "qkv"], -1)
    q, k, v = (y.unflatten(1, (a.heads, -1)) for y in _times(fused, n).chunk(3, 1))  # each [E, H, c, T, B]
    q, k = (_rotated(switches, y) for y in (q, k))
    bias = switches.bias[:, 0, ..., None].expand(-1, a.heads, -1, -1, -1).flatten(0, 1)  # [E H, T, T, 1]
    mixed: Any = _Attend.apply(q.flatten(0, 1) * a.head_dim**-0.5, k.flatten(0, 1), v.flatten(0, 1), bias)
    return _written(a, weights, switches, layer, x, mixed.reshape(x.shape))


def _last_block(a: Architecture, weights: Weights, switches: Switches, x: Tensor) -> Float[Tensor, "model d 1 batch"]:
    layer = a.blocks - 1
    n = _normed(a, weights, f"{layer}.attention_norm", x)
    q = _times(weights[f"{layer}.q"], n[:, :, -1:]).unflatten(1, (a.heads, -1)) * a.head_dim**-0.5  # [E, H, c, 1, B]
    if switches.cos is None:
        asked = _by_head(a, weights[f"{layer}.k"]) @ q[..., 0, :]  # [E, H, d, B]
        logits = (asked[..., None, :] * n[:, None]).sum(2)  # [E, H, T, B]
    else:
        k = _rotated(switches, _times(weights[f"{layer}.k"], n).unflatten(1, (a.heads, -1)))
        logits = (_rotated(switches, q, last=True) * k).sum(2)
    pattern = (logits + switches.bias[:, 0, :, -1, :, None]).softmax(2)
    read = _by_head(a, weights[f"{layer}.v"]).mT @ (pattern[:, :, None] * n[:, None]).sum(3)  # [E, H, c, B]
    return _written(a, weights, switches, layer, x[:, :, -1:], read.flatten(1, 2)[:, :, None])


def _written(a: Architecture, weights: Weights, switches: Switches, layer: int, x: Tensor, mixed: Tensor) -> Tensor:
    x = x * switches.keep + (_times(weights[f"{layer}.o"], mixed) if f"{layer}.o" in weights else mixed)
    if not a.feed_forward:
        return x
    n = _normed(a, weights, f"{layer}.mlp_norm", x)
    inner = functional.gelu(_affine(weights, f"{layer}.up", n))
    return x * switches.keep + _affine(weights, f"{layer}.down", inner)


def _head(a: Architecture, weights: Weights, x: Tensor) -> Tensor:
    if a.head == "mlp":
        for n in range(HEAD_LAYERS):
            x = _affine(weights, f"head.{n}", x).relu()
        return _affine(weights, "unembedding", x)
    return _times(weights["unembedding"], x)


def _normed(a: Architecture, weights: Weights, name: str, x: Tensor) -> Tensor:
    if a.norm == "none":
        return x
    if a.norm == "layer":
        x = x - x.mean(1, keepdim=True)
    x = x * (x.pow(2).mean(1, keepdim=True) + NORM_EPS).rsqrt() * weights[name][..., None, None]
    return x + weights[f"{name}.bias"][..., None, None] if a.norm == "layer" else x


def _times(matrix: Float[Tensor, "model inputs outputs"], x: Float[Tensor, "model inputs position batch"]) -> Tensor:
    return (matrix.mT @ x.flatten(2)).unflatten(-1, x.shape[2:])


def _affine(weights: Weights, name: str, x: Tensor) -> Tensor:
    return _times(weights[name], x) + weights[f"{name}.bias"][..., None, None]


def _by_head(a: Architecture, matrix: Float[Tensor, "model d d"]) -> Float[Tensor, "model head d c"]:
    return matrix.unflatten(-1, (a.heads, a.head_dim)).transpose(1, 2)


def _rotated(switches: Switches, x: Float[Tensor, "model head c position batch"], *, last: bool = False) -> Tensor:
    if switches.cos is None or switches.sin is None:
        return x
    cos, sin = (y[:, 0].mT[..., None] for y in (switches.cos, switches.sin))  # [E, 1, c, T, 1]
    if last:
        cos, sin = cos[..., -1:, :], sin[..., -1:, :]
    first, second = x.chunk(2, 2)
    return x * cos + torch.cat([-second, first], 2) * sin


class _Attend(torch.autograd.Function):
    """softmax(q k + bias) v over `[model, c, T, B]`, one elementwise product per dimension; no gradient for the bias.

    Written out because autograd would keep a T x T x B tensor per dimension of the head.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        logits = torch.addcmul(bias, q[:, 0, :, None], k[:, 0, None])  # [model, query, key, B]
        for c in range(1, q.shape[1]):
            logits.addcmul_(q[:, c, :, None], k[:, c, None])
        pattern = torch.softmax(logits, 2)
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        for c in range(v.shape[1]):
            torch.sum(torch.mul(pattern, v[:, c, None], out=logits), 2, out=out[:, c])
        ctx.save_for_backward(q, k, v, pattern)
        return out

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        (slope,) = slopes
        q, k, v, pattern = ctx.saved_tensors
        by_weight = slope[:, 0, :, None] * v[:, 0, None]
        for c in range(1, q.shape[1]):
            by_weight.addcmul_(slope[:, c, :, None], v[:, c, None])
        # The softmax's own: A (dA - sum_j A dA).
        by_logit = pattern * (by_weight - (pattern * by_weight).sum(2, keepdim=True))
        to_q, to_k, to_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        for c in range(q.shape[1]):
            torch.sum(torch.mul(pattern, slope[:, c, :, None], out=by_weight), 1, out=to_v[:, c])
            torch.sum(torch.mul(by_logit, k[:, c, None], out=by_weight), 2, out=to_q[:, c])
            torch.sum(torch.mul(by_logit, q[:, c, :, None], out=by_weight), 1, out=to_k[:, c])
        return to_q, to_k, to_v, None
