"""Slow twins of the toys: a pass, what the best reader could know, walks; and of pretraining's bigram loss."""

import itertools
import math

import torch
from reference import masked_logits, normalized, rotated
from torch import Tensor

from probes.models.view import Norm
from toy.model import Architecture

# ---------------------------------------------------------------------------------------------- a toy's pass


def toy_pass(a: Architecture, weights: dict[str, Tensor], inputs: Tensor) -> tuple[list[Tensor], Tensor]:
    """(streams [position, d] that each block reads and the final norm reads; logits at the last position).

    Of one model, whose weights have no model dimension, on one sequence of ids [position] or vectors [position, d].
    """
    w = {name: tensor.double() for name, tensor in weights.items()}
    length, width = len(inputs), a.width // a.heads
    x = w["embedding"][inputs] if a.vocabulary is not None else inputs.double()
    if a.positional == "learned":
        x = x + w["positions"][:length]
    if a.positional == "sinusoidal":
        x = x + torch.stack(_turns(length, a.width), -1).roll(1, -1).flatten(1)  # sine and cosine by turns
    cos, sin = (one.repeat(1, 2) for one in _turns(length, width, a.frequencies))
    sees = {"window": a.window, "prefix": length if a.mask == "full" else a.prefix}
    streams = [x]
    for layer in range(a.blocks):
        n = _toy_norm(a, w, f"{layer}.attention_norm", x)
        mixed = []
        for head in range(a.heads):
            own = head if a.kv_heads is None else head * a.kv_heads // a.heads
            columns = {"q": head, "k": own, "v": own}
            q, k, v = (n @ w[f"{layer}.{name}"][:, c * width : (c + 1) * width] for name, c in columns.items())
            if a.qk_norm:
                q, k = (
                    w[f"{layer}.{name}_norm"] * x / (x**2).mean(-1, keepdim=True).add(1e-5).sqrt()
                    for name, x in (("q", q), ("k", k))
                )
            if a.positional == "rope":
                q, k = rotated(q, cos, sin), rotated(k, cos, sin)
            slopes = None if a.decay is None else torch.tensor([a.decay])
            logits = masked_logits(q[None, None], k[None, None], width**-0.5, slopes=slopes, **sees)
            weigh = {"softmax": lambda x: x.exp() / x.exp().sum(-1, keepdim=True), "relu": lambda x: x.clamp(min=0)}
            weigh |= {"sigmoid": lambda x: 1 / (1 + (-x).exp())}
            mixed.append(weigh[a.attention](logits[0, 0]) @ v)
        out = torch.cat(mixed, -1)
        if a.output_projection:
            out = out @ w[f"{layer}.o"]
        if a.post_norm:
            out = _toy_norm(a, w, f"{layer}.post_attention_norm", out)
        x = x + out if a.residual else out
        if a.feed_forward:
            up = _toy_norm(a, w, f"{layer}.mlp_norm", x) @ w[f"{layer}.up"] + w[f"{layer}.up.bias"]
            down = up * (1 + torch.erf(up / math.sqrt(2))) / 2 @ w[f"{layer}.down"] + w[f"{layer}.down.bias"]
            if a.post_norm:
                down = _toy_norm(a, w, f"{layer}.post_mlp_norm", down)
            x = x + down if a.residual else down
        streams.append(x)
    return streams, toy_head(a, weights, _toy_norm(a, w, "norm", x)[-1])


def _turns(length: int, width: int, rates: tuple[float, ...] | None = None) -> tuple[Tensor, Tensor]:
    """Cosines and sines [position, pair] of position * 10000^(-2 pair / width), or of other rates."""
    rate = 10_000.0 ** (-torch.arange(0, width, 2).double() / width) if rates is None else torch.tensor(rates).double()
    angles = torch.arange(length)[:, None] * rate
    return angles.cos(), angles.sin()


def toy_head(a: Architecture, weights: dict[str, Tensor], row: Tensor) -> Tensor:
    """Logits of one normed row [d]."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    for n in range(3 if a.head == "mlp" else 0):
        row = row @ w[f"head.{n}"] + w[f"head.{n}.bias"]
        row = torch.where(row > 0, row, torch.zeros_like(row))
    logits = row @ w["unembedding"]
    return logits + w["unembedding.bias"] if a.head == "mlp" else logits


def _toy_norm(a: Architecture, w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x if a.norm == "none" else normalized(Norm(a.norm, w[name], w.get(f"{name}.bias"), 1e-5), x)


# ------------------------------------------------------------------------------------------ toys: positional retrieval


def best_reader(vocabulary: int, length: int, target: int, last_apart: bool) -> float:
    """Least loss of who knows a random sequence but not its order, by going through all sequences.

    With `last_apart` the last token is known for itself. The posterior of the answer is counted, not derived.
    """
    seen: dict[object, list[int]] = {}
    for number in range(vocabulary**length):
        tokens = [number // vocabulary**place % vocabulary for place in range(length)]
        known = (tuple(sorted(tokens[:-1])), tokens[-1]) if last_apart else tuple(sorted(tokens))
        seen.setdefault(known, [0] * vocabulary)[tokens[target]] += 1
    total = sum(sum(counts) for counts in seen.values())
    return sum(n * math.log(sum(counts) / n) for counts in seen.values() for n in counts if n) / total


# ------------------------------------------------------------------------- toys: the token before the last, and rollouts


def widest_margin(points: list[list[float]], asked: int, angles: int = 20_000) -> tuple[float, list[float]]:
    """(margin, direction) along which the others lie farthest above the point `asked`; directions are tried one by one.

    A margin of zero or less means that no direction separates.
    """
    best = (-math.inf, [0.0, 0.0])
    for n in range(angles):
        angle = 2 * math.pi * n / angles
        s = [math.cos(angle), math.sin(angle)]
        along = [p[0] * s[0] + p[1] * s[1] for p in points]
        margin = min(x for j, x in enumerate(along) if j != asked) - along[asked]
        best = max(best, (margin, s))
    return best


def walk_chance(patterns: list[list[list[float]]], start: int, end: int) -> float:
    """P(z = end) of a walk from `start` that takes one step per pattern, the last pattern first, as a sum over all walks."""
    if not patterns:
        return float(start == end)
    *below, top = patterns
    return sum(chance * walk_chance(below, j, end) for j, chance in enumerate(top[start]) if chance)


def paths_weight(lost: list[float], layers: int, distance: int) -> float:
    """Sum over all ways to write `distance` as `layers` steps of zero or more of e^-(what the steps lose)."""
    if layers == 1:
        return math.exp(-lost[distance])
    return sum(math.exp(-lost[x]) * paths_weight(lost, layers - 1, distance - x) for x in range(distance + 1))


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
            together = sum(x == a and y == b for x, y in itertools.pairwise(training))
            alone = sum(x == a for x in training[:-1])
            unigram = (sum(y == b for y in training) + 1) / (len(training) + vocabulary)
            total -= math.log((together + k * unigram) / (alone + k))
        losses.append(total / len(pairs))
    return min(losses)
