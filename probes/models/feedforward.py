"""A block's feed-forward, linearized at recorded normed streams n: plain, gated, or routed to experts.

A routed one (gpt-oss, Qwen3-MoE) sends each position to the k experts of largest router logits l_e = R_e n and gives
F = sum_e w_e E_e(n). Which experts these are is constant almost everywhere, so that the derivative has the routing held:

    dF = sum_e w_e dE_e + sum_e (w_e E_e - m_e F) dl_e,

m = w where the softmax is over the chosen experts, and all experts' probabilities where it is over all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from .pointwise import value_and_slope
from .view import Linear, Parts, Router


@runtime_checkable
class FeedForward(Protocol):
    """What a linearized block and the theory ask of it. Cotangents and tangents are [K, B, rows, d]."""

    output: Float[Tensor, "batch position d"]  # before any norm on it

    def pullback(self, cotangent: Tensor, rows: slice) -> Tensor:
        """Cotangents of the norm's unit streams at these positions, from those of the output; a new tensor."""
        ...

    def pushed(self, tangent: Tensor, rows: slice) -> Tensor:
        """Tangents of the output, from those of the norm's unit streams."""
        ...

    def terms(self, post: Tensor | None) -> Iterator[tuple[Tensor | None, Tensor, Tensor]]:
        """(positions or None for all, a [n, f], s [f]) of the first prompt: tr(F_i F_k^T) = sum of s_f a_if a_kf.

        The sum runs over the terms, in each of which the two positions must be. Products of two independent weights are
        left out, whose mean is zero. `post` is the weight of a norm on the output.
        """
        ...


def affine(linear: Linear, x: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, linear.weight, linear.bias)


def first_of(parts: Parts) -> list[Tensor]:
    """The matrices that the feed-forward begins with."""
    return [linear.weight for linear in (parts.gate, parts.up) if linear is not None]


def feed_forward(parts: Parts, normed: Tensor, folded: Tensor) -> FeedForward:
    """The block's; `folded` holds its first matrices with the norm's weight in them, where it is not routed."""
    return Dense(parts, normed, folded) if parts.router is None else Routed(parts, parts.router, normed)


class Dense:
    """Of one set of weights, at normed streams [..., d]; `folded`: its first matrices, stacked, for derivatives."""

    def __init__(self, parts: Parts, normed: Tensor, folded: Tensor) -> None:
        self.down, self.first = parts.down.weight, folded.chunk(len(first_of(parts)))
        up = affine(parts.up, normed)
        if parts.gate is None:
            hidden, slope = value_and_slope(parts.activation, up)
            self.slopes: tuple[Tensor, ...] = (slope,)
        else:
            hidden, slope = value_and_slope(parts.activation, affine(parts.gate, normed))
            up, steep = (up, None) if parts.up_activation is None else value_and_slope(parts.up_activation, up)
            # Derivatives of hidden * up by gate and by up.
            self.slopes = (slope * up, hidden if steep is None else hidden * steep)
            hidden = hidden * up
        self.output = affine(parts.down, hidden)

    def pullback(self, cotangent: Tensor, rows: slice) -> Tensor:
        return _pulled(self, [slope[:, rows] for slope in self.slopes], cotangent)

    def pushed(self, tangent: Tensor, rows: slice) -> Tensor:
        return _pushed(self, [slope[:, rows] for slope in self.slopes], tangent)

    def terms(self, post: Tensor | None) -> Iterator[tuple[Tensor | None, Tensor, Tensor]]:
        for slope, strength in zip(self.slopes, _strengths(self, post), strict=True):
            yield None, slope[0], strength


def _pulled(made: Dense, slopes: Sequence[Tensor], cotangent: Tensor) -> Tensor:
    d_hidden = cotangent @ made.down
    # One product after the other: both cotangents side by side would be written and read once more.
    gated = (d_hidden * slopes[0]) @ made.first[0] if len(slopes) == 2 else 0
    return (d_hidden.mul_(slopes[-1]) @ made.first[-1]).add_(gated)


def _pushed(made: Dense, slopes: Sequence[Tensor], tangent: Tensor) -> Tensor:
    hidden = (tangent @ made.first[0].T).mul_(slopes[0])
    if len(slopes) == 2:
        hidden.addcmul_(tangent @ made.first[1].T, slopes[1])
    return hidden @ made.down.T


def _strengths(made: Dense, post: Tensor | None) -> list[Tensor]:
    """|W_down,f|^2 |W_first,f|^2 of each first matrix, [f], in at least float32."""
    exact = torch.promote_types(made.down.dtype, torch.float32)
    down = made.down if post is None else made.down * post[:, None]
    out = torch.linalg.vector_norm(down.to(exact), dim=0).square()
    return [out * torch.linalg.vector_norm(first.to(exact), dim=1).square() for first in made.first]


@dataclass(frozen=True)
class _Expert:
    """One expert at the positions that it was chosen at."""

    number: int
    prompts: Tensor  # [n]
    positions: Tensor
    slot: Tensor  # which of the k chosen ones it is there
    made: Dense  # its slopes times its weights w_e


class Routed:
    """Of the experts that each position chose; `normed` is [B, T, d]."""

    def __init__(self, parts: Parts, router: Router, normed: Tensor) -> None:
        self.router, self.scale, self.count = router, parts.mlp_norm.weight, len(router.linear.weight)
        self.weights, self.chosen, self.mean = routing(router, normed)
        self.given = normed.new_zeros(*self.chosen.shape, normed.shape[-1])  # [B, T, k, d]: the chosen experts' outputs
        self.experts = []
        for number in self.chosen.unique().tolist():
            prompts, positions, slot = (self.chosen == number).nonzero(as_tuple=True)
            own = expert_of(parts, number)
            made = Dense(own, normed[prompts, positions], torch.cat(first_of(own)))
            self.given[prompts, positions, slot] = made.output
            weight = self.weights[prompts, positions, slot, None]
            made.slopes = tuple(slope * weight for slope in made.slopes)
            self.experts.append(_Expert(number, prompts, positions, slot, made))
        self.output = (self.given * self.weights[..., None]).sum(-2)

    def _at(self, rows: slice) -> Iterator[tuple[_Expert, Tensor, Tensor, list[Tensor]]]:
        """(expert, its prompts, its positions counted from the first row, its slopes there)."""
        for one in self.experts:
            at = (one.positions >= rows.start) & (one.positions < rows.stop)
            yield one, one.prompts[at], one.positions[at] - rows.start, [slope[at] for slope in one.made.slopes]

    def pullback(self, cotangent: Tensor, rows: slice) -> Tensor:
        felt = torch.einsum("kbrd,brid->kbri", cotangent, self.given[:, rows]) * self.weights[:, rows]
        d_logits = -self.mean[:, rows] * felt.sum(-1, keepdim=True)
        d_logits.scatter_add_(-1, self.chosen[:, rows].expand_as(felt), felt)
        d_normed = d_logits @ self.router.linear.weight
        for one, prompts, positions, slopes in self._at(rows):
            d_normed[:, prompts, positions] += _pulled(one.made, slopes, cotangent[:, prompts, positions])
        return d_normed.mul_(self.scale)

    def pushed(self, tangent: Tensor, rows: slice) -> Tensor:
        tangent = tangent * self.scale
        d_logits = tangent @ self.router.linear.weight.T
        common = (self.mean[:, rows] * d_logits).sum(-1, keepdim=True)
        own = d_logits.gather(-1, self.chosen[:, rows].expand(len(tangent), -1, -1, -1)) - common
        output = torch.einsum("kbri,brid->kbrd", own * self.weights[:, rows], self.given[:, rows])
        for one, prompts, positions, slopes in self._at(rows):
            output[:, prompts, positions] += _pushed(one.made, slopes, tangent[:, prompts, positions])
        return output

    def terms(self, post: Tensor | None) -> Iterator[tuple[Tensor | None, Tensor, Tensor]]:
        for one in self.experts:
            made = Dense.__new__(Dense)
            made.down, made.first = one.made.down, tuple(first * self.scale for first in one.made.first)
            at = one.prompts == 0
            for slope, strength in zip(one.made.slopes, _strengths(made, post), strict=True):
                yield one.positions[at], slope[at], strength
        lengths = (self.router.linear.weight * self.scale).square().sum(-1)  # |R_e|^2
        post = torch.ones_like(self.scale) if post is None else post
        for number, length in enumerate(lengths):
            own = (self.chosen[0] == number) * self.weights[0]  # [T, k]
            along = (own[..., None] * self.given[0]).sum(-2) - self.mean[0, :, number, None] * self.output[0]
            reached = along.any(-1).nonzero()[:, 0]  # w_e E_e - m_e F
            yield reached, along[reached], length * post.square()


def expert_of(parts: Parts, number: int) -> Parts:
    """The parts with one expert's feed-forward."""

    def one(linear: Linear | None) -> Linear | None:
        bias = None if linear is None or linear.bias is None else linear.bias[number]
        return None if linear is None else Linear(linear.weight[number], bias)

    own = {name: one(getattr(parts, name)) for name in ("gate", "up", "down")}
    return replace(parts, **own, router=None)


def routing(router: Router, normed: Float[Tensor, "*rows d"]) -> tuple[Tensor, Tensor, Tensor]:
    """(weights [*rows, k], experts [*rows, k], m [*rows, E]): see the module's text."""
    logits = affine(router.linear, normed)
    largest, chosen = logits.topk(router.chosen, -1)
    if router.renormalized:
        weights = largest.softmax(-1)
        return weights, chosen, torch.zeros_like(logits).scatter(-1, chosen, weights)
    every = logits.softmax(-1)
    return every.gather(-1, chosen), chosen, every
