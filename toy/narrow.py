r"""The pass of `toy.model` for narrow heads, laid out so that no operation's innermost dimension is a narrow one.

A head of two dimensions over ten positions makes thousands of matrix products of four multiplications each, and softmaxes
over rows of ten numbers. Calls and row ends then cost more than the arithmetic. Here the batch is innermost: streams are
`[E, d, T, B]`, logits `[E H, T, T, B]`. A projection is one product `[out, in] x [in, T B]` per model. Attention is made of
elementwise products over whole batches, one per dimension of the head. Ids become columns of one-hot vectors, so that the
embedding and its gradient are products, too.

The weights are the same, and so are the numbers up to rounding (tests/test_toy_model.py); trained weights therefore differ
in their last bits from those of the plain pass. CPU time per training step, plain pass over this one, on one core: 2.4, 3.3
and 4.0 for fifty retrieval models of width 2 and 1, 2 and 3 blocks; 1.5 to 1.8 at width 10; 1.1 to 1.7 for the toys of
`petroglyph` and `previous_token`; but 0.5 to 0.7 for `rollout`'s, of width 16, and 0.7 to 0.9 for `matching`'s, which have
several heads. `WIDEST = 0` turns it off:

    python -c "import time, torch; torch.set_num_threads(1); from toy import narrow; from toy.train import *; \
        from toy.tasks import Copying; narrow.WIDEST = 16; a = Architecture(blocks=2, width=2); \
        runs = [Run(a, Copying(target=k), s) for s in range(5) for k in range(10)]; \
        t = time.process_time(); train(runs, 100); print(time.process_time() - t)"
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from .model import HEAD_LAYERS, NORM_EPS, Architecture, Switches, Weights, by_head

FEW = 1 << 16  # logits up to which a CPU computes attention at once: 256 KiB, a quarter of a core's cache
WIDEST = 16  # dimensions of a head up to which this layout is used


def suits(architecture: Architecture) -> bool:
    """Whether this layout is the one to train models of this shape in."""
    return architecture.vocabulary is not None and architecture.head_dim <= WIDEST


def one_hot(ids: Int[Tensor, "stream batch position"], vocabulary: int) -> Float[Tensor, "stream V position_batch"]:
    """What `forward` reads: a column per token, positions outer, sequences inner."""
    columns = ids.transpose(1, 2).flatten(1)[:, None]
    return torch.zeros(len(ids), vocabulary, columns.shape[-1], device=ids.device).scatter_(1, columns, 1.0)


def forward(
    architecture: Architecture,
    weights: Weights,
    switches: Switches,
    inputs: Float[Tensor, "stream V position_batch"],
    counts: Sequence[int],
) -> Float[Tensor, "model outputs batch"]:
    """The head's logits at the last position, the batch innermost; arguments as in `model.forward`, ids as columns.

    The first `counts[0]` models read the first stream, the next `counts[1]` the second, and so on.
    """
    a = architecture
    # Models that read the same take part in one product, their embeddings under one another.
    table = weights["embedding"].mT  # [E, d, V]
    if len(set(counts)) == 1:
        x = table.reshape(len(inputs), -1, table.shape[2]) @ inputs
    else:
        parts = zip(table.split(list(counts)), inputs, strict=True)
        x = torch.cat([part.flatten(0, 1) @ stream for part, stream in parts])
    x = x.view(len(table), a.width, a.length, -1)  # [E, d, T, B]
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
    wq, wk, wv = (weights[f"{layer}.{name}"] for name in "qkv")
    fused = torch.cat([wq * a.head_dim**-0.5, wk, wv], -1)
    q, k, v = (y.unflatten(1, (a.heads, -1)) for y in _times(fused, n).chunk(3, 1))  # each [E, H, c, T, B]
    q, k = (_rotated(switches, y) for y in (q, k))
    mixed: Any = _Attend.apply(q, k, v, switches.bias[:, 0, ..., None])
    return _written(a, weights, switches, layer, x, mixed.flatten(1, 2))


def _last_block(a: Architecture, weights: Weights, switches: Switches, x: Tensor) -> Float[Tensor, "model d 1 batch"]:
    layer = a.blocks - 1
    n = _normed(a, weights, f"{layer}.attention_norm", x)
    q = _times(weights[f"{layer}.q"] * a.head_dim**-0.5, n[:, :, -1:]).unflatten(1, (a.heads, -1))  # [E, H, c, 1, B]
    seen = n[:, None].expand(-1, a.heads, -1, -1, -1)  # [E, H, d, T, B]
    bias = switches.bias[:, 0, :, -1:, :, None]
    if switches.cos is None:
        asked = by_head(a, weights[f"{layer}.k"]) @ q[..., 0, :]  # [E, H, d, B]
        mixed: Any = _Attend.apply(asked[..., None, :], seen, seen, bias)
        mixed = mixed[..., 0, :]
    else:
        k = _rotated(switches, _times(weights[f"{layer}.k"], n).unflatten(1, (a.heads, -1)))
        logits = (_rotated(switches, q, last=True) * k).sum(2)  # [E, H, T, B]
        pattern = (logits + bias[:, :, 0]).softmax(2)
        mixed = (pattern[:, :, None] * seen).sum(3)
    read = by_head(a, weights[f"{layer}.v"]).mT @ mixed  # [E, H, c, B]
    return _written(a, weights, switches, layer, x[:, :, -1:], read.flatten(1, 2)[:, :, None])


def _written(a: Architecture, weights: Weights, switches: Switches, layer: int, x: Tensor, mixed: Tensor) -> Tensor:
    x = x * switches.keep + (_times(weights[f"{layer}.o"], mixed) if f"{layer}.o" in weights else mixed)
    if not a.feed_forward:
        return x
    n = _normed(a, weights, f"{layer}.mlp_norm", x)
    inner = functional.gelu(_affine(weights, f"{layer}.up", n))
    return x * switches.keep + _affine(weights, f"{layer}.down", inner)


def _head(a: Architecture, weights: Weights, x: Tensor) -> Tensor:
    if a.head == "linear":
        return _times(weights["unembedding"], x)
    for n in range(HEAD_LAYERS):
        x = _affine(weights, f"head.{n}", x).relu()
    return _affine(weights, "unembedding", x)


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


def _rotated(switches: Switches, x: Float[Tensor, "model head c position batch"], *, last: bool = False) -> Tensor:
    if switches.cos is None or switches.sin is None:
        return x
    cos, sin = (y[:, 0].mT[..., None] for y in (switches.cos, switches.sin))  # [E, 1, c, T, 1]
    if last:
        cos, sin = cos[..., -1:, :], sin[..., -1:, :]
    first, second = x.chunk(2, 2)
    return x * cos + torch.cat([-second, first], 2) * sin


class _Attend(torch.autograd.Function):
    """softmax(q k + bias) v, for queries `[E, H, c, Q, B]` and keys and values `[E, H, c, T, B]`; no gradient for the bias.

    Many models go query by query against the keys that any of them shows it: temporary tensors then stay in the cache, and
    under a causal mask half of the products are not computed at all. For few models, and on a GPU, calls cost more than that
    saves, and all queries go at once. Autograd would keep a T x T x B tensor per dimension of the head either way.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        ctx.seen = _seen(bias, q)
        out, patterns = _at_once(q, k, v, bias) if ctx.seen is None else _by_query(q, k, v, bias, ctx.seen)
        ctx.save_for_backward(q, k, v, out, *patterns)
        return out

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, *patterns = ctx.saved_tensors
        slope = slopes[0].contiguous()
        # The softmax's own is A (dA - sum_j A dA), and sum_j A dA = sum_j A (slope v) = slope out.
        less = (slope * out).sum(2).neg_()  # [E, H, Q, B]
        return *(_at_once_back if ctx.seen is None else _by_query_back)(q, k, v, slope, less, patterns), None


def _sum_of_products(start: Tensor, xs: Iterable[Tensor], ys: Iterable[Tensor]) -> Tensor:
    """start + x_0 y_0 + x_1 y_1 + ..., in one tensor and in this order."""
    (x, y), *others = zip(xs, ys, strict=True)
    total = torch.addcmul(start, x, y)
    for x, y in others:
        total.addcmul_(x, y)
    return total


def _seen(bias: Float[Tensor, "model 1 query key 1"], q: Tensor) -> list[int] | None:
    """For every query, how many keys there are up to the last that any model shows it; None: do not go by query."""
    if q.is_cuda or q[:, :, 0].numel() * bias.shape[3] <= FEW:
        return None
    shown = bias[:, 0, :, :, 0].amax(0).isfinite()
    return (shown * torch.arange(1, bias.shape[3] + 1)).amax(1).tolist()


def _at_once(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(what is read, the pattern `[E, H, Q, T, B]` alone)."""
    logits = _sum_of_products(bias, q[..., None, :].unbind(2), k[:, :, :, None].unbind(2))
    pattern = logits.softmax(3)
    out = q.new_empty(q.shape)
    for c in range(v.shape[2]):
        torch.sum(torch.mul(pattern, v[:, :, c, None], out=logits), 3, out=out[:, :, c])
    return out, [pattern]


def _at_once_back(
    q: Tensor, k: Tensor, v: Tensor, slope: Tensor, less: Tensor, patterns: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    (pattern,) = patterns
    slopes, values = slope[..., None, :].unbind(2), v[:, :, :, None].unbind(2)
    by_logit = _sum_of_products(less[:, :, :, None], slopes, values).mul_(pattern)
    to_q, to_k, to_v = (x.new_empty(x.shape) for x in (q, k, v))
    product = torch.empty_like(pattern)
    for c in range(q.shape[2]):
        torch.sum(torch.mul(pattern, slope[:, :, c, :, None], out=product), 2, out=to_v[:, :, c])
        torch.sum(torch.mul(by_logit, k[:, :, c, None], out=product), 3, out=to_q[:, :, c])
        torch.sum(torch.mul(by_logit, q[:, :, c, :, None], out=product), 2, out=to_k[:, :, c])
    return to_q, to_k, to_v


def _by_query(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Sequence[int]
) -> tuple[Tensor, list[Float[Tensor, "model head key batch"]]]:
    """(what is read, the pattern query by query)."""
    asked, keys = _by_query_and_dimension(q), k.unbind(2)
    out, values = q.new_zeros(q.shape), v.unbind(3)  # values: by key, [E, H, c, B]
    patterns = []
    for i, n in enumerate(seen):
        pattern = _sum_of_products(bias[:, :, i, :n], asked[i], [key[:, :, :n] for key in keys]).softmax(2)
        read = out[:, :, :, i]
        for weight, value in zip(pattern[:, :, None].unbind(3), values, strict=False):
            read.addcmul_(weight, value)
        patterns.append(pattern)
    return out, patterns


def _by_query_back(
    q: Tensor, k: Tensor, v: Tensor, slope: Tensor, less: Tensor, patterns: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    to_q, to_k, to_v = (x.new_zeros(x.shape) for x in (q, k, v))
    by_out, values, keys = _by_query_and_dimension(slope), v.unbind(2), k.unbind(3)
    for i, pattern in enumerate(patterns):
        n = pattern.shape[2]
        by_logit = _sum_of_products(less[:, :, i, None], by_out[i], [value[:, :, :n] for value in values])
        by_logit = by_logit.mul_(pattern)[:, :, None]
        to_v[:, :, :, :n].addcmul_(pattern[:, :, None], slope[:, :, :, i, None])
        to_k[:, :, :, :n].addcmul_(by_logit, q[:, :, :, i, None])
        to_one = to_q[:, :, :, i]
        for weight, key in zip(by_logit.unbind(3), keys, strict=False):
            to_one.addcmul_(weight, key)
    return to_q, to_k, to_v


def _by_query_and_dimension(x: Float[Tensor, "model head c query batch"]) -> list[tuple[Tensor, ...]]:
    """[E, H, 1, B] each."""
    return [one[:, :, :, None].unbind(2) for one in x.unbind(3)]
