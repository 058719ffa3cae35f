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
from .feedforward import affine, feed_forward, stacked
from .pointwise import Normalized, close, normed, rotate
from .view import Linear, Norm, Parts

# Queries per band: bounds memory at B H band K T numbers, and skips what lies above the diagonal for T much above it.
QUERY_BAND = 64
# The forward pass as taken apart may differ from the model's own by rounding only: transformers computes RMS norms in
# float32 even in float64 models, hence the third number.
OUTPUT_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float64: 1e-4, torch.float16: 2e-2}


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


def _normed(norm: Norm | None, x: Tensor) -> tuple[Normalized | None, Tensor]:
    made = None if norm is None else Normalized(norm, x)
    return made, x if made is None else made.output


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
        self.stream_norm = normed(parts.attention_norm, stream)
        n1 = self.stream_norm.output

        def split(linear: Linear) -> Tensor:  # [B, heads, T, c]
            return affine(linear, n1).unflatten(-1, (-1, parts.head_dim)).transpose(1, 2)

        self.q_norm, q = _normed(parts.q_norm, split(parts.q))
        self.k_norm, k = _normed(parts.k_norm, split(parts.k))
        self.value = split(parts.v)
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        self.query, self.key = q * parts.scale, k  # the scale rides on the query from here on
        self.groups = q.shape[1] // k.shape[1]
        self.mixed = mixed = self._attend()  # [B, H, T, c]
        branch = affine(parts.o, mixed.transpose(1, 2).flatten(2))
        self.post_attention, branch = _normed(parts.post_attention_norm, branch)
        self.middle = middle = stream + branch  # after attention
        self.mlp_norm = normed(parts.mlp_norm, stream if parts.parallel else middle)
        self.feed_forward = feed_forward(parts, self.mlp_norm.output)
        self.post_mlp, branch = _normed(parts.post_mlp_norm, self.feed_forward.output)
        self.output = middle + branch

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
        visible = j <= i if self.parts.window is None else (j <= i) & (j > i - self.parts.window)
        return logits.masked_fill_(~visible, float("-inf")), slope

    def _pattern(self, logits: Tensor) -> Tensor:
        """Weights of a band's logits; with a learned sink logit, which reads nothing, rows sum to less than 1."""
        if self.parts.sink is None:
            return logits.softmax(-1)
        sink = self.parts.sink.view(-1, self.groups, 1, 1).to(logits).expand(*logits.shape[:-1], 1)
        return torch.cat([logits, sink], -1).softmax(-1)[..., :-1]

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
        if self.q_norm is not None:
            dq = self.q_norm.pullback(dq)
        if self.k_norm is not None:
            dk = self.k_norm.pullback(dk)
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
        d_branch = cotangent if self.post_mlp is None else self.post_mlp.pullback(cotangent, rows)
        d_normed = self.feed_forward.pullback(d_branch, rows)
        middle = cotangent.clone()
        if not parts.parallel:
            self.mlp_norm.add_pullback(middle, d_normed, rows)
        d_branch = middle if self.post_attention is None else self.post_attention.pullback(middle, rows)
        return middle, d_normed, self._attention_pullback(d_branch @ parts.o.weight, rows.start, frozen)
