"""One block's step of the second-moment theory: what it does to G, going down. The derivation is in `kernel`.

`Moments` carries the two things that go from block to block: G, [T, T], G_ik = E tr(J_i J_k^T) / d for the Jacobians J_i of
the readout with respect to the stream at i, and S, [T], the part of G_ii that belongs to the stream's own direction.
`MeasuredBlock` takes its coefficients from a block and a recorded stream, `BornBlock` from the distribution that fresh
weights are drawn from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..models.feedforward import value_and_slope
from ..models.linear import LinearizedBlock, Normalized, softmax
from ..models.view import Attention, Birth, sees
from ..run.memory import block_numbers, own_memory, share_of, shares
from ..run.precision import precise
from .score_path import HeadWeights, ScorePath

Patterns = Literal["uniform", "measured"]

QUADRATURE = 120  # Gauss-Hermite nodes; twice as many change a GELU's or SiLU's moments by less than 1e-12
ROUTED = 256, 1 << 20  # least draws of a router, and numbers in all of them: moments are then within 1 to 5 %
ANGLES = 17  # between what two positions read, from 0 to 90 degrees
TERMS = 40  # of Hermite's series; at correlation 1 the rest is below 1e-6 of a SiLU's or GELU's second moment


@dataclass
class Moments:
    """The state of the recursion between two steps."""

    gram: Float[Tensor, "position position"]
    radial: Float[Tensor, " position"]

    @classmethod
    def at_readout(cls, rows: Float[Tensor, "direction d"], residual: Float[Tensor, "position d"]) -> Moments:
        """At the top: `rows` are the derivative of the readout with respect to the last position's stream."""
        length, width = residual.shape
        gram = rows.new_zeros(length, length)
        radial = rows.new_zeros(length)
        gram[-1, -1] = rows.pow(2).sum() / width
        radial[-1] = (rows @ _direction(residual[-1].to(rows))).pow(2).sum()
        return cls(gram, radial)

    def past(self, above: Tensor, below: Tensor) -> Tensor:
        """S for the direction of the stream `below` a branch, from S and G at the stream `above` it.

        The branch does not see that direction, its norm takes it out; the direction above has turned by what the branch
        added.
        """
        above, below = above.to(self.radial), below.to(self.radial)
        cosine = (_direction(above) * _direction(below)).sum(-1).pow(2)
        return cosine * self.radial + (1 - cosine) * self.gram.diagonal()


class MeasuredBlock:
    """The step of one block, coefficients from its weights and one recorded pass.

    `after`: the stream after it, [T, d]. `attention`: "uniform" under the block's mask, or the patterns of the pass, which
    `score_path` needs. `weights`: where an earlier prompt has found them; afterwards they are there, as is `pattern`, the
    mean over heads.
    """

    def __init__(
        self,
        block: LinearizedBlock,
        after: Tensor,
        attention: Patterns,
        score_path: bool,
        weights: HeadWeights | None = None,
    ) -> None:
        self.block, self.after, self.attention, self.score_path = block, after, attention, score_path
        self.weights = weights
        self.dtype = torch.promote_types(after.dtype, torch.float32)
        parts = block.parts
        self.width, self.head_dim = after.shape[-1], parts.head_dim
        self.heads = parts.q.weight.shape[0] // self.head_dim
        self.kv = parts.k.weight.shape[0] // self.head_dim
        self.pattern: Float[Tensor, "query key"] = self.after.new_zeros(len(after), len(after), dtype=self.dtype)

    @property
    def strength(self) -> Float[Tensor, ""]:
        """How strong attention is beside the stream, |a| / (|x| + |a|), mean over positions: arXiv 2602.16837."""
        stream, added = (
            x.to(self.dtype).norm(dim=-1) for x in (self.block.stream[0], self.block.middle - self.block.stream)
        )
        return (added / (stream + added).clamp_min(torch.finfo(added.dtype).tiny)).mean()

    def mixed(self, row: Float[Tensor, " position"]) -> Float[Tensor, " position"]:
        """A row of the rollout below the block, from that above it, once `down` has seen the patterns."""
        return torch.lerp(row, row @ self.pattern, self.strength)

    @torch.no_grad()
    def down(self, moments: Moments) -> Moments:
        """Moments below the block, from those above it."""
        block, stream, middle = self.block, self.block.stream[0], self.block.middle[0]
        if block.parts.parallel:
            added = self._mlp(moments.gram).add_(self._attention(moments, self.after))
            return Moments(added.add_(moments.gram), moments.past(self.after, stream))
        between = Moments(self._mlp(moments.gram).add_(moments.gram), moments.past(self.after, middle))
        return Moments(self._attention(between, middle).add_(between.gram), between.past(middle, stream))

    def _mlp(self, gram: Tensor) -> Tensor:
        """G * K, K_ik = E tr(F_i F_k^T)/d; sums over features f, the cross terms of two features having mean zero."""
        block, post = self.block, self.block.post_mlp
        kernel = block.feed_forward.kernel(None if post.absent else post.weight, self.dtype)
        kernel = kernel if post.absent else _outer(kernel, post.inverse[0, :, 0])
        return self._through(block.mlp_norm, kernel).mul_(gram).div_(self.width)

    def _through(self, norm: Normalized, kernel: Tensor) -> Tensor:
        """What a kernel on normed streams is on the streams: tr(P_i P_k) / (d r_i r_k) of it; the same without a norm."""
        if norm.absent:
            return kernel
        layer, unit, inverse = norm.layer, norm.unit[0], norm.inverse[0, :, 0]
        unit = unit.to(self.dtype)
        overlap = (unit @ unit.T).div_(self.width)  # [T, T]; 1 on the diagonal, but for the norm's epsilon
        lengths, inverse = overlap.diagonal().clone(), inverse.to(kernel)
        for rows in shares(len(overlap)):
            left = (self.width - int(layer) - lengths[rows, None] - lengths[None, :] + overlap[rows] ** 2) / self.width
            overlap[rows] = kernel[rows] * left * inverse[rows, None] * inverse[None, :]
        return overlap

    def _attention(self, moments: Moments, above: Tensor) -> Tensor:
        """What the attention branch adds to G; `above` is the stream it is added to give."""
        block, gram = self.block, moments.gram
        radial, post = moments.radial, block.post_attention
        out = block.parts.o.weight
        if not post.absent:
            out, inverse = out * post.weight[:, None], post.inverse[0, :, 0]
            gram, radial = _outer(gram, inverse), radial * inverse.pow(2)
        out = out.to(self.dtype).unflatten(1, (self.heads, -1)).transpose(0, 1)  # [H, d, c]
        v = block.qkv[-self.kv * self.head_dim :].to(self.dtype).unflatten(0, (self.kv, -1))  # [G, c, d]
        groups = self.heads // self.kv
        if self.attention == "uniform" and block.parts.slopes is None and block.parts.sink is None:
            repeated = v.repeat_interleave(groups, 0).flatten(0, 1)  # [H c, d]
            joined = out.transpose(0, 1).flatten(1)  # [d, H c]
            strength = ((joined.T @ joined) * (repeated @ repeated.T)).sum() / self.width  # ||W_O W_V||_F^2 / d
            ((pattern,), _) = self._patterns(slice(0, 1))
            self.pattern = pattern
            return self._through(block.stream_norm, strength * (pattern.T @ gram @ pattern))
        value, score = torch.zeros_like(gram), torch.zeros_like(radial)
        path, metric = None, value
        if self.weights is None:
            self.weights = HeadWeights(block, out, self.score_path)
        if self.score_path:
            path = ScorePath(block, out, self.weights, _direction(above.to(self.dtype)), gram.diagonal(), radial)
        for heads in self._some_heads():
            pattern, slope = self._patterns(heads)
            self.pattern.add_(pattern.sum(0), alpha=1 / self.heads)
            passed = (gram @ pattern).mul_(self.weights.strengths[heads, None, None])
            value.addmm_(pattern.flatten(0, 1).T, passed.flatten(0, 1))
            if path is not None:
                own = self._keys_of(heads)
                metric = metric if heads.start % groups else path.metric(own)
                score += path.through(heads, own, pattern if slope is None else pattern.mul_(slope), metric)
        value = self._through(block.stream_norm, value)
        if path is not None:
            if not block.stream_norm.absent:
                score *= block.stream_norm.inverse[0, :, 0].to(self.dtype).pow(2)
            value.diagonal().add_(score, alpha=1 / self.width)
        return value

    def _some_heads(self) -> Iterator[slice]:
        """Heads that are worked on together: on a processor one; else all for which there is room, by their key heads."""
        device, length, at_once = self.after.device, len(self.after), 1
        if own_memory(device) is not None:
            each = length * (length + self.score_path * self.head_dim**2)
            at_once = max(
                1, share_of(block_numbers(device) // each) // (self.heads // self.kv) * (self.heads // self.kv)
            )
        for start in range(0, self.heads, at_once):
            yield slice(start, min(start + at_once, self.heads))

    def _keys_of(self, heads: slice) -> slice:
        """The key heads that these read."""
        groups = self.heads // self.kv
        return slice(heads.start // groups, (heads.stop - 1) // groups + 1)

    def _patterns(self, heads: slice) -> tuple[Float[Tensor, "h query key"], Tensor | None]:
        """Heads' patterns, and the slopes of their soft-caps if there are any; one head, or all that read some key heads."""
        block, parts, length = self.block, self.block.parts, len(self.after)
        rates, sink = (None if x is None else x[heads].to(self.dtype) for x in (parts.slopes, parts.sink))
        if self.attention == "uniform":
            device = self.after.device  # of ALiBi's slopes; without them, patterns are in float64
            at = precise(device) if rates is None else device
            return contentless_patterns(length, parts.window, rates, sink, at).to(device, self.dtype), None
        query, key = (x.to(self.dtype) for x in (block.query[:, heads], block.key[:, self._keys_of(heads)]))
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        # The scale is the query's.
        attention = Attention(query, key, key, 1.0, parts.softcap, parts.window, rates, sink=sink)
        pattern = query.new_zeros(query.shape[1], length, length)
        slope = None if parts.softcap is None else torch.ones_like(pattern)
        for rows in shares(length):
            logits, log_z = (x[0] for x in attention.weighed(rows.start, rows.stop))
            seen = slice(None), rows, slice(attention.first_key(rows.start), rows.stop)
            pattern[seen] = (logits - log_z).exp()
            if slope is not None and parts.softcap is not None:
                slope[seen] -= (logits.clamp_min(-parts.softcap) / parts.softcap) ** 2
        return pattern, slope


def contentless_patterns(
    length: int,
    window: int | None,
    slopes: Float[Tensor, " H"] | None,
    sink: Float[Tensor, " H"] | None = None,
    device: torch.device | str = "cpu",
) -> Float[Tensor, "H query key"]:
    """Patterns of logits without content: uniform over what the mask shows, one for all; under ALiBi each head's decay.

    With learned sink logits, each head's own, or one for all: the visible keys share what these leave.
    """
    at = torch.arange(length, device=device)
    queries, keys = at[:, None], at[None, :]
    rates = torch.zeros(1, dtype=torch.float64, device=device) if slopes is None else slopes.to(device)
    logits = -rates[:, None, None] * (queries - keys)
    logits = logits.masked_fill(~sees(queries, keys, window), float("-inf"))
    if sink is not None:
        logits, sink = logits.expand(len(sink), -1, -1), sink[:, None, None]
    return softmax(logits, sink)


class BornBlock:
    """The step of one block with fresh weights, known by their distribution alone; attention is uniform.

    `stream`: the covariance of what it reads, per component. Blocks differ in their windows.
    """

    def __init__(self, birth: Birth, layer: int, stream: Float[Tensor, "position position"]) -> None:
        self.birth, self.stream, spec = birth, stream, birth.spec
        features = spec.heads * spec.head_dim
        self.strength = spec.width * features * birth.o**2 * birth.v**2  # E ||W_O W_V||_F^2 / d
        learned = torch.zeros(1, dtype=torch.float64) if spec.sink_logits else None
        (self.pattern,) = contentless_patterns(len(stream), spec.windows[layer], None, learned, stream.device)
        branch = self.strength * (self.pattern @ self._normed(stream) @ self.pattern.T)
        self.attention_scale = self._post_scale(branch)
        attention = _outer(branch, self.attention_scale)
        self.middle = stream if birth.parallel else stream + attention
        branch, self.kernel = self._mlp(self._normed(self.middle))
        self.mlp_scale = self._post_scale(branch)
        self.after = stream + attention + _outer(branch, self.mlp_scale)

    def _mlp(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """(covariance of the branch's output, K on normed streams)."""
        birth, width = self.birth, self.birth.spec.width
        out = birth.features * birth.down**2  # sum over features of what one contributes to a component
        spread = (width * normed.diagonal()).sqrt()
        first = birth.up if birth.gate is None else birth.gate
        values, slopes = gaussian_moments(birth.activation, spread * first, normed)
        if birth.gate is None:
            branch, kernel = out * values, out * width * birth.up**2 * slopes
        else:
            up, steep = width * birth.up**2 * normed, torch.ones_like(normed)
            if birth.up_activation is not None:
                up, steep = gaussian_moments(birth.up_activation, spread * birth.up, normed)
            branch = out * values * up
            kernel = out * width * (birth.gate**2 * slopes * up + birth.up**2 * values * steep)
        if birth.experts is None:
            return branch, kernel
        shared, turned = routing_moments(birth, normed)
        return shared * branch, shared * kernel + width * birth.router**2 * turned * branch

    def down(self, gram: Float[Tensor, "position position"]) -> Float[Tensor, "position position"]:
        """G below the block, from G above it."""
        mlp = _outer(gram * self.kernel, self.mlp_scale * self._inverse(self.middle))
        above = gram if self.birth.parallel else gram + mlp
        attended = self.pattern.T @ _outer(above, self.attention_scale) @ self.pattern
        added = _outer(self.strength * attended, self._inverse(self.stream))
        return above + added + (mlp if self.birth.parallel else 0)

    def down_amplitudes(self, row: Float[Tensor, " position"]) -> Float[Tensor, " position"]:
        """The same step if paths added up by amplitude: every coefficient's root in its place, the addition alone changed.

        With one coefficient for all blocks and positions that is a row of N^L ([Chowdhury]).
        """
        mlp = row * self.kernel.diagonal().sqrt() * self.mlp_scale * self._inverse(self.middle)
        above = row if self.birth.parallel else row + mlp
        attended = self.pattern.T @ (above * self.attention_scale)
        added = self.strength**0.5 * attended * self._inverse(self.stream)
        return above + added + (mlp if self.birth.parallel else 0)

    def _inverse(self, covariance: Tensor) -> Tensor:
        """1 / r of the norm on what a branch reads; 1 where there is none."""
        return self._norm(covariance) if self.birth.pre_norm else torch.ones_like(covariance.diagonal())

    def _normed(self, covariance: Tensor) -> Tensor:
        return _outer(covariance, self._inverse(covariance))

    def _norm(self, covariance: Tensor) -> Tensor:
        return (covariance.diagonal() + self.birth.eps).rsqrt()

    def _post_scale(self, branch: Tensor) -> Tensor:
        """What a norm on the branch's output multiplies it by, where the family has one."""
        return self._norm(branch) if self.birth.spec.post_norm else torch.ones_like(branch.diagonal())


def born_stream(birth: Birth, length: int, tokens: Tensor | None) -> Float[Tensor, "position position"]:
    """Covariance of block 0's input, per component: equal tokens have equal embeddings, all others independent ones."""
    same = torch.eye(length, dtype=torch.float64) if tokens is None else (tokens[:, None] == tokens[None, :]).double()
    return birth.embedding**2 * same + birth.positions**2 * torch.eye(length, dtype=torch.float64)


def gaussian_moments(
    function: Callable[[Tensor], Tensor], spread: Float[Tensor, " n"], normed: Float[Tensor, "n n"]
) -> tuple[Float[Tensor, "n n"], Float[Tensor, "n n"]]:
    """E f(a) f(b) and E f'(a) f'(b) for jointly Gaussian a, b of deviations `spread` and the correlations of `normed`.

    By Hermite's series (Mehler): f(s z) = sum_n c_n(s) h_n(z) with orthonormal h_n gives
    E f(a) f(b) = sum_n c_n(s_a) c_n(s_b) rho^n.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(QUADRATURE)
    z, w = torch.from_numpy(nodes), torch.from_numpy(weights / math.sqrt(2 * math.pi))
    basis = [torch.ones_like(z), z]
    for n in range(1, TERMS - 1):
        basis.append((z * basis[n] - math.sqrt(n) * basis[n - 1]) / math.sqrt(n + 1))
    lengths = normed.diagonal().sqrt()
    correlation = (normed / (lengths[:, None] * lengths[None, :])).clamp(-1, 1)
    different, place = torch.unique(spread.double(), return_inverse=True)
    results = []
    for values in value_and_slope(function, different[:, None] * z):
        coefficients = (values @ (torch.stack(basis) * w).T)[place]  # [n, TERMS]
        total, power = torch.zeros_like(correlation), torch.ones_like(correlation)
        for c in coefficients.T:
            total += c[:, None] * c[None, :] * power
            power = power * correlation
        results.append(total)
    return results[0], results[1]


def routing_moments(birth: Birth, normed: Float[Tensor, "n n"]) -> tuple[Float[Tensor, "n n"], Float[Tensor, "n n"]]:
    """E sum_e w_ie w_ke and E sum_e grad w_ie . grad w_ke over routers, the gradients by logits, by draws of a fixed seed.

    Logits are normal; those of two positions are correlated as what they read. In between the angles drawn, interpolated.
    """
    assert birth.experts is not None
    generator = torch.Generator().manual_seed(0)
    draws = max(ROUTED[0], ROUTED[1] // birth.experts**2)
    one, other = torch.randn(2, draws, birth.experts, generator=generator, dtype=torch.float64)
    spread = birth.router * float((birth.spec.width * normed.diagonal().mean()).sqrt())
    angles, found = np.linspace(0, math.pi / 2, ANGLES), []
    first, steps = _routed(birth, spread * one)
    for angle in angles:
        second, others = _routed(birth, spread * (math.cos(angle) * one + math.sin(angle) * other))
        found.append([float((first * second).sum(-1).mean()), float((steps * others).sum((-1, -2)).mean())])
    lengths = normed.diagonal().sqrt()
    between = (normed / (lengths[:, None] * lengths[None, :])).clamp(0, 1).acos().numpy()
    shared, turned = (torch.from_numpy(np.interp(between, angles, row)) for row in np.array(found).T)
    return shared.to(normed), turned.to(normed)


def _routed(birth: Birth, logits: Float[Tensor, "n expert"]) -> tuple[Tensor, Tensor]:
    """Weights of all experts, zero for those not chosen, and their derivatives by the logits, [n, expert, expert]."""
    softmax = logits.softmax(-1)
    chosen = torch.zeros_like(softmax).scatter(-1, softmax.topk(birth.chosen, -1).indices, 1.0)
    weights = softmax * chosen
    if birth.among_chosen:
        softmax = weights = weights / weights.sum(-1, keepdim=True)
    return weights, weights[..., None] * (torch.eye(logits.shape[-1], dtype=logits.dtype) - softmax[..., None, :])


def _direction(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def _outer(kernel: Tensor, factors: Tensor) -> Tensor:
    """kernel_ik f_i f_k."""
    factors = factors.to(kernel)
    return kernel * factors[:, None] * factors[None, :]
