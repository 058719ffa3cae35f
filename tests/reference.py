"""Slow obvious twins: each written from its formula, in plain Python or float64, to test the fast code against."""

import math
from itertools import pairwise

import torch
from torch import Tensor

from probes.models.view import Linear, Norm, Parts

# ----------------------------------------------------------------------------------------- pretraining (toy.pretrain)


def bigram_loss(training: list[int], held: list[int], *, length: int, vocabulary: int) -> float:
    """Nats per token of p(b|a) = (n_ab + k p_b) / (n_a + k), the best k of five, over side-by-side windows' targets."""
    pairs = [
        (held[start + offset], held[start + offset + 1])
        for start in range(0, len(held) - length - 1, length)
        for offset in range(length)
    ]
    losses = []
    for k in (1, 3, 10, 30, 100):
        total = 0.0
        for a, b in pairs:
            together = sum(x == a and y == b for x, y in pairwise(training))
            alone = sum(x == a for x in training[:-1])
            unigram = (sum(y == b for y in training) + 1) / (len(training) + vocabulary)
            total -= math.log((together + k * unigram) / (alone + k))
        losses.append(total / len(pairs))
    return min(losses)


# ---------------------------------------------------------------------------------------------- curves (summary)


def ushape(curve: list[float]) -> dict[str, float]:
    """The U-shape summary, term by term as science.md has it."""
    length = len(curve)
    middle = sorted(curve[j] for j in range(length) if length / 4 <= j < 3 * length / 4)
    half = len(middle) // 2
    median = middle[half] if len(middle) % 2 else (middle[half - 1] + middle[half]) / 2
    beginning = [curve[j] for j in range(length) if j < 0.05 * length]
    smoothed = []
    for j in range(length):
        reach = max(r for r in range(length) if 2 * r <= 0.05 * length and j - r >= 0 and j + r <= length - 1)
        smoothed.append(sum(curve[j - reach : j + reach + 1]) / (2 * reach + 1))
    return {
        "primacy": sum(beginning) / len(beginning) / median,
        "recency": curve[-1] / median,
        "middle": median,
        "trough": smoothed.index(min(smoothed)),
    }


def ranks(values: list[float]) -> list[float]:
    """1 for the smallest; of equal values each gets the mean of their places."""
    return [1 + sum(w < v for w in values) + (sum(w == v for w in values) - 1) / 2 for v in values]


# ------------------------------------------------------------------------------- blocks and Jacobians (linear, jacobian)


def normalized(norm: Norm, x: Tensor) -> Tensor:
    """weight * (x - mean) / rms + bias, one row at a time; the mean for LayerNorm alone."""
    rows = []
    for row in x.reshape(-1, x.shape[-1]):
        centred = row - row.sum() / len(row) if norm.kind == "layer" else row
        row = norm.weight * centred / torch.sqrt((centred**2).sum() / len(row) + norm.eps)
        rows.append(row if norm.bias is None else row + norm.bias)
    return torch.stack(rows).view_as(x)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [position, c] times each position's rotation matrix, feature f in a plane with feature f + half."""
    half, rows = cos.shape[-1] // 2, []
    for row, c, s in zip(x, cos, sin, strict=True):
        matrix = torch.eye(x.shape[-1], dtype=x.dtype)
        for f in range(half):
            matrix[f, f], matrix[f + half, f + half] = c[f], c[f + half]
            matrix[f, f + half], matrix[f + half, f] = -s[f], s[f + half]
        rows.append(matrix @ row)
    return torch.stack(rows)


def block(parts: Parts, stream: Tensor, rotary: tuple[Tensor, Tensor] | None, attended: Tensor | None = None) -> Tensor:
    """A block [position, d] -> [position, d], head by head and query by query.

    `attended` is what attention reads, the stream unless given: so that its derivative can be had apart from the rest.
    """

    def affine(linear: Linear, x: Tensor) -> Tensor:
        return x @ linear.weight.T + (0 if linear.bias is None else linear.bias)

    def rms_or_as_is(norm: Norm | None, x: Tensor) -> Tensor:
        return x if norm is None else normalized(norm, x)

    n1, c = normalized(parts.attention_norm, stream if attended is None else attended), parts.head_dim
    q, k, v = affine(parts.q, n1), affine(parts.k, n1), affine(parts.v, n1)
    heads, groups = q.shape[1] // c, q.shape[1] // k.shape[1]
    outputs = []
    for head in range(heads):
        own, shared = slice(head * c, (head + 1) * c), slice(head // groups * c, (head // groups + 1) * c)
        queries, keys = rms_or_as_is(parts.q_norm, q[:, own]), rms_or_as_is(parts.k_norm, k[:, shared])
        if rotary is not None:
            queries, keys = rotated(queries, *rotary), rotated(keys, *rotary)
        rows = []
        for i in range(len(stream)):
            seen = slice(0 if parts.window is None else max(0, i - parts.window + 1), i + 1)
            logits = parts.scale * keys[seen] @ queries[i]
            if parts.softcap is not None:
                logits = parts.softcap * torch.tanh(logits / parts.softcap)
            weights = torch.exp(logits - logits.max())
            rows.append(weights / weights.sum() @ v[seen, shared])
        outputs.append(torch.stack(rows))
    middle = stream + rms_or_as_is(parts.post_attention_norm, affine(parts.o, torch.cat(outputs, 1)))
    n2 = normalized(parts.mlp_norm, stream if parts.parallel else middle)
    hidden = affine(parts.up, n2)
    hidden = parts.activation(hidden) if parts.gate is None else parts.activation(affine(parts.gate, n2)) * hidden
    return middle + rms_or_as_is(parts.post_mlp_norm, affine(parts.down, hidden))


def jacobian_norms(outputs: Tensor, source: Tensor) -> Tensor:
    """sqrt(sum_o ||d outputs_o / d source_j||^2) for every position j of `source` [1, position, d], one o at a time."""
    total = torch.zeros(source.shape[1], dtype=torch.float64)
    for output in outputs:
        (row,) = torch.autograd.grad(output, source, retain_graph=True)
        total += row[0].double().pow(2).sum(-1)
    return total.sqrt()


def linear_stack_norms(mixing: Tensor, weight: Tensor, blocks: int) -> Tensor:
    """||J_j||_F of x_i -> x_i + sum_j mixing_ij W x_j, `blocks` times: J_j = sum_k C(L, k) (mixing^k)_{T-1, j} W^k."""
    norms = []
    for j in range(len(mixing)):
        matrix = torch.zeros_like(weight)
        for k in range(blocks + 1):
            paths = torch.linalg.matrix_power(mixing, k)[-1, j]
            matrix += math.comb(blocks, k) * paths * torch.linalg.matrix_power(weight, k)
        norms.append(torch.linalg.matrix_norm(matrix))
    return torch.stack(norms)
