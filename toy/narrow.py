r"""The pass of `toy.model` for the retrieval models, laid out so that no operation's innermost dimension is a narrow one.

A head of two dimensions over ten positions makes thousands of matrix products of four multiplications each, and softmaxes
over rows of ten numbers. Calls and row ends then cost more than the arithmetic. Here the batch is innermost: streams are
`[E, d, T, B]`, logits `[E, T, T, B]`. A projection is one product `[out, in] x [in, T B]` per model. Attention is made of
elementwise products over whole batches, one per dimension. Ids become columns of one-hot vectors, so that the embedding and
its gradient are products, too.

The weights are the same, and so are the numbers up to rounding (tests/test_toy_model.py); trained weights therefore differ
in their last bits from those of the plain pass. It is used where it trains at least about twice as fast (`suits`): CPU time
of fifty models, plain pass over this one, 1 to 3 blocks, one thread: 3.5 to 6.6 at width 2, 2.2 to 2.4 at width 10, with a
feed-forward 3.5 to 5.0 and 1.8 to 1.9. Elsewhere it gained less (1.1 at `previous_token`'s models) or lost (0.5 to 0.7 at
`rollout`'s, of width 16). `benchmarks/toys.py` of commit ad91f96 measured it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from .model import Architecture, Switches, Weights

FEW = 1 << 16  # logits up to which a CPU computes attention at once: 256 KiB, a quarter of a core's cache
WIDEST = 10  # dimensions up to which this layout is used


def suits(architecture: Architecture) -> bool:
    """Whether this layout is the one to train the model in; the switches that it does not know are those asked for here."""
    a = architecture
    asked = (a.heads, a.positional, a.norm, a.output_projection, a.head, a.attention, a.kernel, a.readout)
    plain = asked == (1, "none", "none", True, "linear", "softmax", "inner", "inner")
    return plain and a.vocabulary is not None and a.width <= WIDEST


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
    bias, scale = switches.bias[:, 0, 0, ..., None], a.width**-0.5  # [E, T, T, 1]
    for layer in range(a.blocks - 1):
        wq, wk, wv = (weights[f"{layer}.{name}"] for name in "qkv")
        mixed: Any = _Attend.apply(*_times(torch.cat([wq * scale, wk, wv], -1), x).chunk(3, 1), bias)
        x = _written(a, weights, switches, layer, x, mixed)
    layer = a.blocks - 1  # which computes one query, and neither keys nor values
    q = _times(weights[f"{layer}.q"] * scale, x[:, :, -1:])
    asked = weights[f"{layer}.k"] @ q[..., 0, :]  # [E, d, B]
    seen = x.view_as(x)  # its gradients as keys and as values are added before those of other uses of x
    mixed = _Attend.apply(asked[..., None, :], seen, seen, bias[:, -1:])
    x = _written(a, weights, switches, layer, x[:, :, -1:], _times(weights[f"{layer}.v"], mixed))
    return _times(weights["unembedding"], x)[:, :, 0]


def _written(a: Architecture, weights: Weights, switches: Switches, layer: int, x: Tensor, mixed: Tensor) -> Tensor:
    x = x * switches.keep + _times(weights[f"{layer}.o"], mixed)
    if not a.feed_forward:
        return x
    inner = functional.gelu(_affine(weights, f"{layer}.up", x))
    return x * switches.keep + _affine(weights, f"{layer}.down", inner)


def _times(matrix: Float[Tensor, "model inputs outputs"], x: Float[Tensor, "model inputs position batch"]) -> Tensor:
    return (matrix.mT @ x.flatten(2)).unflatten(-1, x.shape[2:])


def _affine(weights: Weights, name: str, x: Tensor) -> Tensor:
    return _times(weights[name], x) + weights[f"{name}.bias"][..., None, None]


class _Attend(torch.autograd.Function):
    """softmax(q k + bias) v, for queries `[E, c, Q, B]` and keys and values `[E, c, T, B]`; no gradient for the bias.

    Many models go query by query against the keys that any of them shows it: temporary tensors then stay in the cache, and
    under a causal mask half of the products are not computed at all. For few models, and on a GPU, calls cost more than that
    saves, and all queries go at once. Autograd would keep a T x T x B tensor per dimension either way.
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
        less = (slope * out).sum(1).neg_()  # [E, Q, B]
        return *(_at_once_back if ctx.seen is None else _by_query_back)(q, k, v, slope, less, patterns), None


def _sum_of_products(start: Tensor, xs: Iterable[Tensor], ys: Iterable[Tensor]) -> Tensor:
    """start + x_0 y_0 + x_1 y_1 + ..., in one tensor and in this order."""
    (x, y), *others = zip(xs, ys, strict=True)
    total = torch.addcmul(start, x, y)
    for x, y in others:
        total.addcmul_(x, y)
    return total


def _seen(bias: Float[Tensor, "model query key 1"], q: Tensor) -> list[int] | None:
    """For every query, how many keys there are up to the last that any model shows it; None: do not go by query."""
    if q.device.type != "cpu" or q[:, 0].numel() * bias.shape[2] <= FEW:
        return None
    shown = bias[..., 0].amax(0).isfinite()
    return (shown * torch.arange(1, bias.shape[2] + 1)).amax(1).tolist()


def _at_once(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(what is read, the pattern `[E, Q, T, B]` alone)."""
    logits = _sum_of_products(bias, q[..., None, :].unbind(1), k[:, :, None].unbind(1))
    pattern = logits.softmax(2)
    out = q.new_empty(q.shape)
    for c in range(v.shape[1]):
        torch.sum(torch.mul(pattern, v[:, c, None], out=logits), 2, out=out[:, c])
    return out, [pattern]


def _at_once_back(
    q: Tensor, k: Tensor, v: Tensor, slope: Tensor, less: Tensor, patterns: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    (pattern,) = patterns
    slopes, values = slope[..., None, :].unbind(1), v[:, :, None].unbind(1)
    by_logit = _sum_of_products(less[:, :, None], slopes, values).mul_(pattern)
    to_q, to_k, to_v = (x.new_empty(x.shape) for x in (q, k, v))
    product = torch.empty_like(pattern)
    for c in range(q.shape[1]):
        torch.sum(torch.mul(pattern, slope[:, c, :, None], out=product), 1, out=to_v[:, c])
        torch.sum(torch.mul(by_logit, k[:, c, None], out=product), 2, out=to_q[:, c])
        torch.sum(torch.mul(by_logit, q[:, c, :, None], out=product), 1, out=to_k[:, c])
    return to_q, to_k, to_v


def _by_query(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Sequence[int]
) -> tuple[Tensor, list[Float[Tensor, "model key batch"]]]:
    """(what is read, the pattern query by query)."""
    asked, keys = _by_query_and_dimension(q), k.unbind(1)
    out, values = q.new_zeros(q.shape), v.unbind(2)  # values: by key, [E, c, B]
    patterns = []
    for i, n in enumerate(seen):
        pattern = _sum_of_products(bias[:, i, :n], asked[i], [key[:, :n] for key in keys]).softmax(1)
        read = out[:, :, i]
        for weight, value in zip(pattern[:, None].unbind(2), values, strict=False):
            read.addcmul_(weight, value)
        patterns.append(pattern)
    return out, patterns


def _by_query_back(
    q: Tensor, k: Tensor, v: Tensor, slope: Tensor, less: Tensor, patterns: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    to_q, to_k, to_v = (x.new_zeros(x.shape) for x in (q, k, v))
    by_out, values, keys = _by_query_and_dimension(slope), v.unbind(1), k.unbind(2)
    for i, pattern in enumerate(patterns):
        n = pattern.shape[1]
        by_logit = _sum_of_products(less[:, i, None], by_out[i], [value[:, :n] for value in values])
        by_logit = by_logit.mul_(pattern)[:, None]
        to_v[:, :, :n].addcmul_(pattern[:, None], slope[:, :, i, None])
        to_k[:, :, :n].addcmul_(by_logit, q[:, :, i, None])
        to_one = to_q[:, :, i]
        for weight, key in zip(by_logit.unbind(2), keys, strict=False):
            to_one.addcmul_(weight, key)
    return to_q, to_k, to_v


def _by_query_and_dimension(x: Float[Tensor, "model c query batch"]) -> list[tuple[Tensor, ...]]:
    """[E, 1, B] each."""
    return [one[:, :, None].unbind(1) for one in x.unbind(2)]
