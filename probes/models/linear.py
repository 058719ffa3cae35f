"""One block, linearized at a recorded stream: products with its Jacobian, for many directions at once.

For a block y = f(x), J = df/dx, and cotangents G [K, B, T, d] `vjp` gives G J for all K directions in one pass. Two ways:

`LinearizedBlock` writes the derivative out over the block's parts (norms, projections, attention, feed-forward). The
forward quantities are computed once per prompt and shared by all directions, the directions are folded into the rows of
every matrix product, and all that remains besides products are a few passes over the cotangents. Patterns are remade per
band of queries, so that nothing of size T x T outlives its band, and keys no query of the band can see are left out. They
come from the softmax itself: where key biases make logits of 1,000 (Qwen2.5), a kept log-sum-exp leaves four digits. Per
direction: T P multiply-adds for P weights of the block, and 4 H c per visible key of each query.

`AutogradBlock` differentiates the model's own module, the stream repeated K times (as jacobian-lens does, but block by
block): slower, and right for whatever the module does.

A cotangent that is zero outside some query rows is passed as those rows only (at the top, a single one).

With `frozen` the patterns are held constant, as if they were weights: what flows through values alone (the value
path of `probes.theory.kernel`). Nothing then goes back through queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ..run.memory import share_of
from ..run.precision import wide
from .feedforward import affine, feed_forward, stacked
from .view import Linear, Norm, Parts, sees

# Queries per band: bounds memory at B H band K T numbers, and skips what lies above the diagonal for T much above it.
QUERY_BAND = 64
# The forward pass as taken apart may differ from the model's own by rounding only: transformers computes RMS norms in
# float32 even in float64 models, hence the third number.
OUTPUT_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float64: 1e-4, torch.float16: 2e-2}


class Normalized:
    """A norm at a recorded stream: output, and the derivative's transpose with the weight left to the caller.

    Heads' vectors [B, H, T, c] may have a norm of their own each, or one over all heads' features, whose weight is H c long.
    Without a norm (`absent`) the output is the stream as it is.
    """

    def __init__(self, norm: Norm | None, stream: Tensor) -> None:
        self.absent, self.unit, self.output = norm is None, stream, stream
        self.inverse, self.weight = torch.ones_like(stream[..., :1]), stream.new_ones(stream.shape[-1])
        if norm is None:
            return
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
        if self.absent:
            total += weighted
            return
        unit, inverse = self.unit[:, rows], self.inverse[:, rows]
        if self.layer:
            weighted -= weighted.mean(-1, keepdim=True)
        along = torch.linalg.vecdot(wide(weighted), wide(unit)).unsqueeze(-1)
        along = along if len(self.over) == 1 else along.sum(-3, keepdim=True)  # over all heads where the norm is
        along = along.div_(-self.size).to(weighted.dtype).mul_(inverse)
        total.addcmul_(weighted, inverse).addcmul_(along, unit)

    def pullback(self, cotangent: Tensor, rows: slice = slice(None)) -> Tensor:
        """The whole derivative's transpose, weight included, into a new tensor; without a norm what is given."""
        if self.absent:
            return cotangent
        total = torch.zeros_like(cotangent)
        self.add_pullback(total, cotangent * self.weight, rows)
        return total


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """Rotate the leading `cos.shape[-1]` features of x [..., T, c] as transformers does; `back` is the transpose."""
    width = cos.shape[-1]
    half = width // 2
    first, second = x[..., :half], x[..., half:width]
    out = torch.empty_like(x)
    near, far, sign = (sin[..., half:], sin[..., :half], 1) if back else (sin[..., :half], sin[..., half:], -1)
    torch.mul(first, cos[..., :half], out=out[..., :half]).addcmul_(second, near, value=sign)
    torch.mul(second, cos[..., half:], out=out[..., half:width]).addcmul_(first, far, value=-sign)
    out[..., width:] = x[..., width:]
    return out


def softmax(logits: Tensor, sink: Tensor | None) -> Tensor:
    """Weights; those of learned sink logits, which broadcast to the rows and read nothing, are left out."""
    if sink is None:
        return logits.softmax(-1)
    learned = sink.to(logits).expand(*logits.shape[:-1], 1)
    return torch.cat([logits, learned], -1).softmax(-1)[..., :-1]


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Largest difference against the largest value; false for anything not finite."""
    return bool((a - b).abs().max() <= tolerance * b.abs().max())


@dataclass
class AutogradBlock:
    """The block's own module, differentiated by autograd for one prompt.

    `frozen_block` is the same function with its patterns held constant; only `vjp(..., frozen=True)` needs it.
    """

    block: Callable[[Tensor], Tensor]
    stream: Float[Tensor, "1 position d"]
    frozen_block: Callable[[Tensor], Tensor] | None = None

    def vjp(self, cotangent: Tensor, first: int | None = None, *, frozen: bool = False) -> Tensor:
        block = self.frozen_block if frozen else self.block
        assert block is not None
        repeated = self.stream.expand(cotangent.shape[0], -1, -1).detach().clone().requires_grad_()
        with torch.enable_grad():
            output = block(repeated)
            if first is not None:
                output = output[:, first : first + cotangent.shape[2]]
            (gradient,) = torch.autograd.grad(output, repeated, cotangent[:, 0])
        return gradient[:, None]


class LinearizedBlock:
    """A block's derivative from its parts. `output` is the block's own output, to be held against the recorded one.

    Args:
        parts: the block, taken apart.
        stream: what it read, [B, T, d].
        rotary: (cos, sin), each [T, rotated], or None.
    """

    @torch.no_grad()
    def __init__(self, parts: Parts, stream: Tensor, rotary: tuple[Tensor, Tensor] | None) -> None:
        self.parts, self.stream, self.rotary = parts, stream, rotary
        self.qkv = stacked(parts.attention_norm, parts.q, parts.k, parts.v)  # [projected, d]
        self.stream_norm = Normalized(parts.attention_norm, stream)
        n1 = self.stream_norm.output

        def split(linear: Linear) -> Tensor:  # [B, heads, T, c]
            return affine(linear, n1).unflatten(-1, (-1, parts.head_dim)).transpose(1, 2)

        self.q_norm, self.k_norm = Normalized(parts.q_norm, split(parts.q)), Normalized(parts.k_norm, split(parts.k))
        q, k = self.q_norm.output, self.k_norm.output
        self.value = split(parts.v)
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        self.query, self.key = q * parts.scale, k  # the scale rides on the query from here on
        self.groups = q.shape[1] // k.shape[1]
        self.mixed = mixed = self._attend()  # [B, H, T, c]
        self.post_attention = Normalized(parts.post_attention_norm, affine(parts.o, mixed.transpose(1, 2).flatten(2)))
        self.middle = middle = stream + self.post_attention.output  # after attention
        self.mlp_norm = Normalized(parts.mlp_norm, stream if parts.parallel else middle)
        self.feed_forward = feed_forward(parts, self.mlp_norm.output)
        self.post_mlp = Normalized(parts.post_mlp_norm, self.feed_forward.output)
        self.output = middle + self.post_mlp.output

    def gives(self, after: Tensor) -> bool:
        """Is `after`, the stream that the model itself had after this block, what came out here, rounding aside?"""
        return close(self.output, after, OUTPUT_TOLERANCE[after.dtype])

    # -- attention, band by band; grouped heads stay grouped: [B, G, H/G, ...] against keys [B, G, 1, ...]

    def _grouped(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, self.groups))

    def _bands(self, length: int, first: int = 0, rows: int | None = None) -> list[tuple[slice, slice]]:
        """(queries, the keys any of them can see), for queries from `first` on."""
        end, band = length if rows is None else first + rows, share_of(QUERY_BAND)
        bands = []
        for at in range(first, end, band):
            stop = min(at + band, end)
            start = 0 if self.parts.window is None else max(0, at - self.parts.window + 1)
            bands.append((slice(at, stop), slice(start, stop)))
        return bands

    def _logits(self, queries: slice, keys: slice) -> tuple[Tensor, Tensor | None]:
        """Masked logits [B, G, H/G, queries, keys] of one band and, under a soft-cap, their slope."""
        query, key = self._grouped(self.query)[..., queries, :], self.key[:, :, None, keys]
        logits, slope = query @ key.transpose(-1, -2), None
        if self.parts.softcap is not None:
            squashed = torch.tanh(logits / self.parts.softcap)
            slope = 1 - squashed**2
            logits = squashed * self.parts.softcap
        i = torch.arange(queries.start, queries.stop, device=logits.device)[:, None]
        j = torch.arange(keys.start, keys.stop, device=logits.device)[None, :]
        if self.parts.slopes is not None:
            logits = logits - self.parts.slopes.view(-1, self.groups, 1, 1) * (i - j)
        return logits.masked_fill_(~sees(i, j, self.parts.window), float("-inf")), slope

    def _pattern(self, logits: Tensor) -> Tensor:
        """Weights of a band's logits; with a learned sink logit, which reads nothing, rows sum to less than 1."""
        sink = self.parts.sink
        return softmax(logits, None if sink is None else sink.view(-1, self.groups, 1, 1))

    def _attend(self) -> Tensor:
        outputs = []
        for queries, keys in self._bands(self.query.shape[2]):
            logits, _ = self._logits(queries, keys)
            outputs.append(self._pattern(logits) @ self.value[:, :, None, keys])
        return torch.cat(outputs, -2).flatten(1, 2)

    def _attention_pullback(self, d_mixed: Tensor, first: int, frozen: bool) -> Tensor:
        """Cotangents of q, k, v before bias, [K, B, T, (H + 2 G) c], from those of the heads' outputs [K, B, rows, H c].

        Per head: dP = dO V^T, dS = P (dP - <dO, O>), dQ = dS K, dK = dS^T Q, dV = P^T dO. With `frozen`, dP counts as
        zero and dV alone is returned, [K, B, T, G c].
        """
        count, batch, rows, _ = d_mixed.shape
        _, heads, length, c = self.query.shape
        kv = heads // self.groups
        # Directions go next to the query rows, so that one product per head serves them all.
        d_out = d_mixed.unflatten(-1, (kv, self.groups, c)).permute(1, 3, 4, 2, 0, 5).contiguous()  # [B,G,g,rows,K,c]
        dv = d_out.new_zeros(batch, kv, length, count * c)
        dq, dk, inner = dv, dv, dv  # not used where the pattern is constant
        if not frozen:
            gone = self._grouped(self.mixed)[..., first : first + rows, :]
            inner = torch.einsum("bghrkc,bghrc->bghrk", d_out, gone)
            dq = d_out.new_zeros(batch, kv, self.groups, length, count, c)
            dk = torch.zeros_like(dv)
        for queries, keys in self._bands(length, first, rows):
            at = slice(queries.start - first, queries.stop - first)
            n, m = queries.stop - queries.start, keys.stop - keys.start
            logits, slope = self._logits(queries, keys)
            pattern = self._pattern(logits)  # [B, G, g, n, m]
            out = d_out[..., at, :, :]
            # All heads of a group write to the same keys: their query rows are stacked into one contraction.
            stacked = out.reshape(batch, kv, self.groups * n, count * c)
            dv[:, :, keys] += pattern.flatten(2, 3).transpose(-1, -2) @ stacked
            if frozen:
                continue
            ds = out.reshape(batch, kv, self.groups * n * count, c) @ self.value[:, :, keys].transpose(-1, -2)
            ds = ds.view(batch, kv, self.groups, n, count, m)
            ds -= inner[..., at, :, None]
            ds *= (pattern if slope is None else pattern * slope).unsqueeze(-2)
            flat = ds.view(batch, kv, self.groups * n * count, m)
            dq[..., queries, :, :] = (flat @ self.key[:, :, keys]).view(batch, kv, self.groups, n, count, c)
            query = self._grouped(self.query)[..., queries, :].reshape(batch, kv, self.groups * n, c)
            # dK[j, k, c] = sum over stacked rows of dS[row, k, j] Q[row, c]
            by_direction = ds.view(batch, kv, self.groups * n, count * m).transpose(-1, -2) @ query
            dk[:, :, keys] += by_direction.view(batch, kv, count, m, c).transpose(2, 3).reshape(batch, kv, m, count * c)
        dv = dv.view(batch, kv, length, count, c).permute(3, 0, 1, 2, 4)  # [K, B, G, T, c]
        if frozen:
            return dv.transpose(2, 3).flatten(3)
        dq *= self.parts.scale
        dq = dq.flatten(1, 2).permute(3, 0, 1, 2, 4)  # [K, B, H, T, c]
        dk = dk.view(batch, kv, length, count, c).permute(3, 0, 1, 2, 4)
        if self.rotary is not None:
            dq, dk = rotate(dq, *self.rotary, back=True), rotate(dk, *self.rotary, back=True)
        dq, dk = self.q_norm.pullback(dq), self.k_norm.pullback(dk)
        return torch.cat([x.transpose(2, 3).flatten(3) for x in (dq, dk, dv)], -1)

    # -- the whole block

    @torch.no_grad()
    def vjp(
        self, cotangent: Float[Tensor, "k batch rows d"], first: int | None = None, *, frozen: bool = False
    ) -> Float[Tensor, "k batch position d"]:
        """G J for cotangents on all positions, or on the rows from position `first` on."""
        length = self.query.shape[2]
        start = 0 if first is None else first
        rows = slice(start, start + cotangent.shape[2])
        middle, d_normed, d_attention = self._to_inputs(cotangent, rows, frozen)
        if rows.stop - rows.start == length:
            total = middle
        else:
            total = middle.new_zeros(*middle.shape[:2], length, middle.shape[-1])
            total[:, :, rows] = middle
        self.stream_norm.add_pullback(total, d_attention @ self.qkv[-d_attention.shape[-1] :])
        if self.parts.parallel:
            self.mlp_norm.add_pullback(total[:, :, rows], d_normed, rows)
        return total

    def _to_inputs(self, cotangent: Tensor, rows: slice, frozen: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Cotangents of the stream after attention, of what the feed-forward reads, and of attention's first products.

        The last at all positions, of values alone if `frozen`; the others on the given rows.
        """
        parts = self.parts
        d_normed = self.feed_forward.pullback(self.post_mlp.pullback(cotangent, rows), rows)
        middle = cotangent.clone()
        if not parts.parallel:
            self.mlp_norm.add_pullback(middle, d_normed, rows)
        d_branch = self.post_attention.pullback(middle, rows)
        return middle, d_normed, self._attention_pullback(d_branch @ parts.o.weight, rows.start, frozen)
