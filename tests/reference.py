"""Slow obvious twins: each written from its formula, in plain Python or float64, to test the fast code against.

Here: curves, masks and sinks of keys, blocks and their Jacobians. Those of the theory, of heads and of toys are in
`reference_theory`, `reference_heads` and `reference_toys`.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from probes.models.view import Linear, Norm, Parts, Routing


def ushape(curve: list[float]) -> dict[str, float]:
    """The U-shape summary, term by term as science.md has it."""
    length = len(curve)
    median = statistics.median(curve[j] for j in range(length) if length / 4 <= j < 3 * length / 4)
    arm = 16 if length >= 68 else max(n for n in range(length) if n <= length / 4 - 1)
    beginning, end = ([curve[j] for j in range(start, start + arm)] for start in (1, length - 1 - arm))
    smoothed = []
    for j in range(length):
        reach = max(r for r in range(length) if 2 * r <= 0.05 * length and j - r >= 0 and j + r <= length - 1)
        smoothed.append(sum(curve[j - reach : j + reach + 1]) / (2 * reach + 1))
    return {
        "first": curve[0] / median,
        "primacy": sum(beginning) / arm / median,
        "recency": sum(end) / arm / median,
        "last": curve[-1] / median,
        "middle": median,
        "trough": smoothed.index(min(smoothed)),
    }


def looks_at(i: int, j: int, window: int | None, prefix: int | None) -> bool:
    """Whether query i sees key j: any of the first `prefix` keys; else itself and the `window - 1` keys before it."""
    if prefix is not None and j < prefix:
        return True
    return j <= i and (window is None or i - j < window)


def masked_logits(
    query: Tensor,
    key: Tensor,
    scale: float,
    *,
    softcap: float | None = None,
    window: int | None = None,
    slopes: Tensor | None = None,
    prefix: int | None = None,
) -> Tensor:
    """Logits [B, H, T, T] of q, k [B, H, T, c] in full, then minus infinity entry by entry where hidden."""
    places = range(query.shape[2])
    logits = torch.einsum("bhic,bhjc->bhij", query, key) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if slopes is not None:
        logits = logits - slopes[:, None, None] * torch.tensor([[i - j for j in places] for i in places])
    hidden = torch.tensor([[not looks_at(i, j, window, prefix) for j in places] for i in places])
    return logits.masked_fill(hidden, -math.inf)


@cache
def uniform_alpha(length: int, key: int, window: int | None, prefix: int | None = None) -> float:
    """alpha of a key where every query spreads its attention evenly over what it sees."""
    seen = [sum(looks_at(i, j, window, prefix) for j in range(length)) for i in range(length)]
    return sum(1 / seen[i] for i in range(key, length) if looks_at(i, key, window, prefix)) / (length - key)


def sinks_of_keys(
    patterns: Sequence[Sequence[Tensor]],
    windows: Sequence[int | None],
    prefix: int | None,
    *,
    threshold: float,
    tau: float,
) -> dict[str, Tensor]:
    """alpha [prompt, layer, head, key] over queries i >= k, over_tau over all that see k, and what uniform patterns have."""
    prompts, blocks, (heads, length, _) = len(patterns), len(windows), patterns[0][0].shape
    alpha = torch.zeros(prompts, blocks, heads, length, dtype=torch.float64)
    over = torch.zeros(blocks, heads, length).double()
    for p, layer, h in itertools.product(range(prompts), range(blocks), range(heads)):
        a = patterns[p][layer][h].tolist()
        for k in range(length):
            seeing = [i for i in range(length) if looks_at(i, k, windows[layer], prefix)]
            alpha[p, layer, h, k] = sum(row[k] for row in a[k:]) / (length - k)
            over[layer, h, k] += sum(a[i][k] > tau for i in seeing) / len(seeing) / prompts
    rate = (alpha > threshold).double().mean((0, 2))
    uniform = [[uniform_alpha(length, k, window, prefix) for k in range(length)] for window in windows]
    return {"alpha": alpha, "over_tau": over, "sink_rate": rate, "uniform": torch.tensor(uniform, dtype=torch.float64)}


def normalized(norm: Norm | None, x: Tensor) -> Tensor:
    """weight * (x - mean) / rms + bias, one row at a time; the mean for LayerNorm alone. Without a norm x as it is."""
    if norm is None:
        return x
    rows = [norm.weight * centred(norm, row) / rms(norm, row) for row in x.reshape(-1, x.shape[-1])]
    return torch.stack(rows if norm.bias is None else [row + norm.bias for row in rows]).view_as(x)


def centred(norm: Norm, row: Tensor) -> Tensor:
    return row - row.sum() / len(row) if norm.kind == "layer" else row


def rms(norm: Norm, row: Tensor) -> Tensor:
    return torch.sqrt((centred(norm, row) ** 2).sum() / len(row) + norm.eps)


def affine(linear: Linear, x: Tensor) -> Tensor:
    return x @ linear.weight.T + (0 if linear.bias is None else linear.bias)


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


def block(
    parts: Parts,
    stream: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    attended: Tensor | None = None,
    *,
    frozen: bool = False,
) -> Tensor:
    """A block [position, d] -> [position, d], head by head and query by query.

    `attended` is what attention reads, the stream unless given: so that its derivative can be had apart from the rest.
    With `frozen` the attention weights are numbers that have no derivative.
    """
    n1, c = normalized(parts.attention_norm, stream if attended is None else attended), parts.head_dim
    q, k, v = affine(parts.q, n1), affine(parts.k, n1), affine(parts.v, n1)
    q_norm, k_norm = parts.q_norm, parts.k_norm
    if q_norm is not None and k_norm is not None and len(q_norm.weight) == q.shape[1]:  # over all heads at once
        q, k, q_norm, k_norm = normalized(q_norm, q), normalized(k_norm, k), None, None
    outputs, groups = [], q.shape[1] // k.shape[1]
    for head in range(q.shape[1] // c):
        own, shared = slice(head * c, (head + 1) * c), slice(head // groups * c, (head // groups + 1) * c)
        queries, keys = normalized(q_norm, q[:, own]), normalized(k_norm, k[:, shared])
        if rotary is not None:
            queries, keys = rotated(queries, *rotary), rotated(keys, *rotary)
        slopes = None if parts.slopes is None else parts.slopes[head : head + 1]
        more: Any = {"softcap": parts.softcap, "window": parts.window, "slopes": slopes}
        logits = masked_logits(queries[None, None], keys[None, None], parts.scale, **more)[0, 0]
        weights = logits.softmax(-1) if parts.sink is None else beside_sink(logits, parts.sink[head])
        outputs.append((weights.detach() if frozen else weights) @ v[:, shared])
    middle = stream + normalized(parts.post_attention_norm, affine(parts.o, torch.cat(outputs, 1)))
    n2 = normalized(parts.mlp_norm, stream if parts.parallel else middle)
    return middle + normalized(parts.post_mlp_norm, fed_forward(parts, n2))


def beside_sink(logits: Tensor, sink: Tensor) -> Tensor:
    """A head's weights where a learned logit stands in every denominator: exp(l_j) / (exp(s) + sum_k exp(l_k))."""
    most = torch.maximum(logits.amax(-1, keepdim=True), sink).detach()
    weights = (logits - most).exp()
    return weights / ((sink - most).exp() + weights.sum(-1, keepdim=True))


def fed_forward(parts: Parts, normed: Tensor) -> Tensor:
    """The feed-forward of normed rows [position, d]; with experts row by row and expert by expert."""
    if parts.routing is not None:
        by_row = [(row, routed(parts.routing, row)) for row in normed]
        sums: list[Any] = [sum(w * fed_forward(expert(parts, e), row) for e, w in made.items()) for row, made in by_row]
        return torch.stack(sums)
    hidden = affine(parts.up, normed)
    hidden = hidden if parts.up_activation is None else parts.up_activation(hidden)
    gated = None if parts.gate is None else parts.activation(affine(parts.gate, normed)) * hidden
    return affine(parts.down, parts.activation(hidden) if gated is None else gated)


def routed(routing: Routing, row: Tensor) -> dict[int, Tensor]:
    """The chosen experts' weights, by their numbers: those of the largest logits."""
    logits = affine(Linear(routing.weight, routing.bias), row)
    chosen = sorted(range(len(logits)), key=lambda e: -float(logits[e].detach()))[: routing.chosen]
    total = sum(logits[e].exp() for e in (chosen if routing.among_chosen else range(len(logits))))
    return {e: logits[e].exp() / total for e in chosen}


def expert(parts: Parts, number: int) -> Parts:
    """A block with one expert's feed-forward alone."""
    own = {}
    for name in ("gate", "up", "down"):
        bias = getattr(parts, name).bias
        own[name] = Linear(getattr(parts, name).weight[number], None if bias is None else bias[number])
    return replace(parts, **own, routing=None)


def jacobian_norms(outputs: Tensor, source: Tensor) -> Tensor:
    """sqrt(sum_o ||d outputs_o / d source_j||^2) for every position j of `source` [1, position, d], one o at a time."""
    total = torch.zeros(source.shape[1], dtype=torch.float64)
    for output in outputs:
        (row,) = torch.autograd.grad(output, source, retain_graph=True)
        total += row[0].double().pow(2).sum(-1)
    return total.sqrt()


def pathway_norms(
    parts: list[Parts], rotary: Sequence[tuple[Tensor, Tensor] | None], stream: Tensor, top: Tensor
) -> dict[str, Tensor]:
    """||J_j||_F for every pathway, J = top J_total or top J_value, or the difference of the two.

    `stream` [position, d] is what the first of the blocks reads, `top` [output, d] the derivative of the readout with
    respect to the last position's stream after the last one.
    """
    rows = {}
    for frozen in (False, True):
        source = stream.detach().clone().requires_grad_()
        x = source
        for one, turn in zip(parts, rotary, strict=True):
            x = block(one, x, turn, frozen=frozen)
        (rows[frozen],) = torch.autograd.grad(x[-1], source, top, is_grads_batched=True)  # [output, position, d]
    found = {"total": rows[False], "value": rows[True], "score": rows[False] - rows[True]}
    return {pathway: jacobian.pow(2).sum((0, 2)).sqrt() for pathway, jacobian in found.items()}
