"""A block's feed-forward, linearized at what it reads: one for all positions, or experts among which a router chooses.

Both answer the same three questions: the output, products with the Jacobian, and the kernel of the
second-moment theory. They read the normed stream, and their derivatives are those by the norm's unit, its weight included.

With experts, position i gets sum_e w_ie y_e(n_i) over the experts that its router chooses. The choice is held: it changes
only where two experts tie, so that this is the derivative almost everywhere. The weights w are differentiated. With logits
l = R n and q the softmax that the weights are taken from (over all experts, or over those chosen),

    dw_e = w_e (dl_e - sum_f q_f dl_f),        dy_i = sum_e w_ie dy_e + sum_e y_e dw_ie.

For the theory, matrices of different experts, and the router's, are independent with mean zero. Two positions have in common
what they send through the same expert:

    tr(F_i F_k^T) = sum_e w_ie w_ke tr(F_e,i F_e,k^T) + <y_ie, y_ke> <grad w_ie, grad w_ke>.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from ..run.memory import block_numbers, shares
from .passes import scaled
from .view import Linear, Norm, Parts, Routing


def value_and_slope(activation: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """An elementwise function and its derivative at x, whatever the function."""
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        value = activation(leaf)
        (slope,) = torch.autograd.grad(value, leaf, torch.ones_like(value))
    return value.detach(), slope


def feed_forward(parts: Parts, normed: Float[Tensor, "batch position d"]) -> Dense | Routed:
    """What a block has."""
    return Dense(parts, normed) if parts.routing is None else Routed(parts, parts.routing, normed)


@torch.no_grad()
def stacked(norm: Norm | None, *first: Linear) -> Float[Tensor, "features d"]:
    """First matrices of a branch, one above the other, the weight of the norm before it folded in."""
    matrices = torch.cat([linear.weight for linear in first])
    return matrices if norm is None else matrices * norm.weight


def affine(linear: Linear, x: Tensor, expert: int | None = None) -> Tensor:
    """x W^T + b; of one expert, where there are several."""
    weight, bias = linear.weight, linear.bias
    if expert is not None:
        weight, bias = weight[expert], None if bias is None else bias[expert]
    return functional.linear(x, weight, bias)


def _inner(parts: Parts, read: Tensor, expert: int | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Hidden features of what is read, and their derivatives by gate and up, or by up alone."""
    up = affine(parts.up, read, expert)
    if parts.gate is None:
        hidden, slope = value_and_slope(parts.activation, up)
        return hidden, (slope,)
    hidden, slope = value_and_slope(parts.activation, affine(parts.gate, read, expert))
    if parts.up_activation is None:
        return hidden * up, (slope * up, hidden)
    up, steep = value_and_slope(parts.up_activation, up)
    return hidden * up, (slope * up, hidden * steep)


def _spread(slopes: tuple[Tensor, ...], strengths: Tensor) -> Tensor:
    """sum_f strength_f a_if a_kf, over gate and up."""
    total = slopes[0].new_zeros(len(slopes[0]), len(slopes[0]))
    for slope, strength in zip(slopes, strengths, strict=True):
        for rows in shares(len(slope)):
            total[rows] += (slope[rows] * strength) @ slope.T
    return total


class Dense:
    """One feed-forward for all positions, gated or plain."""

    def __init__(self, parts: Parts, normed: Tensor) -> None:
        self.down, self.first = parts.down.weight, stacked(parts.mlp_norm, *_firsts(parts))
        hidden, self.slopes = _inner(parts, normed)
        self.output = affine(parts.down, hidden)

    def pullback(self, cotangent: Tensor, rows: slice) -> Tensor:
        """From cotangents [B, rows, K, d] of the output to those of the norm's unit."""
        (width, features), count, first = self.down.shape, cotangent.shape[2], len(self.slopes)
        slopes = [slope[:, rows] for slope in self.slopes]
        if count * (first + 1) * features > (features + count) * width:
            return self._by_position(cotangent, slopes)
        d_hidden = cotangent @ self.down
        *gate, up = self.first.split(features)
        *d_gate, d_up = scaled(d_hidden, *slopes)
        d_normed = d_up @ up
        # One product after the other: both cotangents side by side would be written and read once more.
        for product in d_gate:
            d_normed.view(-1, width).addmm_(product.view(-1, features), gate[0])
        return d_normed

    def _by_position(self, cotangent: Tensor, slopes: list[Tensor]) -> Tensor:
        """The same by each position's whole Jacobian [d, d], which takes fewer multiplications for many directions.

        Between the matrix down and the first ones stand slopes alone, other ones at each position.
        """
        batch, rows, count, width = cotangent.shape
        features, flat = self.down.shape[1], cotangent.flatten(0, 1)
        by_feature = torch.stack([slope.flatten(0, 1).mT for slope in slopes], 1)  # [f, gate and up, B rows]
        first = self.first.unflatten(0, (len(slopes), features)).transpose(0, 1)  # [f, gate and up, d]
        total, most = flat.new_empty(flat.shape), max(1, block_numbers(flat.device) // (features * width))
        part = -(-len(flat) // -(-len(flat) // most))
        part = min(part + -part % 8, most)  # rows stay aligned, where there is room
        for start in range(0, len(flat), part):
            at = slice(start, start + part)
            formed = by_feature[:, :, at].mT @ first  # [f, position, d]: a product makes it in one pass
            jacobian = (self.down @ formed.flatten(1)).unflatten(1, (-1, width))
            torch.bmm(flat[at], jacobian.transpose(0, 1), out=total[at])
        return total.view(batch, rows, count, width)

    def kernel(self, scale: Tensor | None, dtype: torch.dtype) -> Float[Tensor, "position position"]:
        """E tr(F_i F_k^T) over random weights, of the first prompt; `scale` [d] multiplies the output."""
        down = self.down if scale is None else self.down * scale[:, None]
        strengths = _squares(self.first, 1, dtype).view(len(self.slopes), -1) * _squares(down, 0, dtype)
        return _spread(tuple(slope[0].to(dtype) for slope in self.slopes), strengths)


class Routed:
    """Experts, of which every position has the few that its router chooses. No matrix of an expert is copied."""

    def __init__(self, parts: Parts, routing: Routing, normed: Tensor) -> None:
        self.parts, self.routing, (batch, length, width) = parts, routing, normed.shape
        logits = functional.linear(normed, routing.weight, routing.bias)
        exact = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        weights, self.chosen = exact.topk(routing.chosen, -1)  # [B, T, k]
        if routing.among_chosen:
            weights = weights / weights.sum(-1, keepdim=True)
            exact = torch.zeros_like(exact).scatter(-1, self.chosen, weights)
        self.weights, self.softmax = weights.to(normed), exact.to(normed)
        self.norm = torch.ones_like(normed[0, 0]) if parts.mlp_norm is None else parts.mlp_norm.weight
        self.made = normed.new_zeros(batch, length, routing.chosen, width)  # the experts' outputs
        features = parts.down.weight.shape[-1]
        self.slopes = tuple(normed.new_zeros(batch, length, routing.chosen, features) for _ in _firsts(parts))
        for expert, at in self._choices(slice(None)):
            hidden, slopes = _inner(parts, normed[at[:2]], expert)
            self.made[at] = affine(parts.down, hidden, expert)
            for kept, slope in zip(self.slopes, slopes, strict=True):
                kept[at] = slope
        self.output = torch.einsum("btk,btkd->btd", self.weights, self.made)

    def _choices(self, rows: slice) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Each expert that any of the rows has chosen, and (prompts, positions among the rows, places) that did."""
        chosen = self.chosen[:, rows]
        for expert in chosen.unique().tolist():
            yield expert, torch.where(chosen == expert)

    def pullback(self, cotangent: Tensor, rows: slice) -> Tensor:
        """As `Dense.pullback`."""
        weights, softmax = self.weights[:, rows].unsqueeze(2), self.softmax[:, rows].unsqueeze(2)
        by_weight = torch.einsum("btnd,btkd->btnk", cotangent, self.made[:, rows]) * weights
        d_logits = -softmax * by_weight.sum(-1, keepdim=True)
        d_logits.scatter_add_(-1, self.chosen[:, rows].unsqueeze(2).expand_as(by_weight), by_weight)
        total = d_logits @ self.routing.weight
        for expert, at in self._choices(rows):
            weight = self.weights[:, rows][at][:, None, None]
            d_hidden = (cotangent[at[:2]] * weight) @ self.parts.down.weight[expert]  # [chosen, K, features]
            slopes = (kept[:, rows][at][:, None] for kept in self.slopes)
            pairs = zip(_firsts(self.parts), slopes, strict=True)
            total[at[:2]] += sum((d_hidden * slope) @ first.weight[expert] for first, slope in pairs)
        return total.mul_(self.norm)

    def kernel(self, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        router = (self.routing.weight * self.norm).to(dtype)
        router = router @ router.T
        made = (self.made if scale is None else self.made * scale)[0].to(dtype)
        length, softmax = len(made), self.softmax[0].to(dtype)
        total = made.new_zeros(length, length)
        for expert, (_, at, place) in self._choices(slice(None)):
            weights, down = self.weights[0, at, place].to(dtype)[:, None], self.parts.down.weight[expert]
            strengths = [_squares(first.weight[expert] * self.norm, 1, dtype) for first in _firsts(self.parts)]
            out = _squares(down if scale is None else down * scale[:, None], 0, dtype)
            slopes = tuple(kept[0, at, place].to(dtype) * weights for kept in self.slopes)
            common = _spread(slopes, torch.stack(strengths) * out)
            steps = -softmax[at]
            steps[:, expert] += 1
            steps *= weights  # the weight's derivative by the logits
            output = made[at, place]
            common += (output @ output.T) * (steps @ router @ steps.T)
            total[at[:, None], at] += common
        return total


def _firsts(parts: Parts) -> list[Linear]:
    return [parts.up] if parts.gate is None else [parts.gate, parts.up]


def _squares(matrix: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return torch.linalg.vector_norm(matrix.to(dtype), dim=dim).square()
