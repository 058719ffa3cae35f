"""One block, linearized at a recorded stream: products with its Jacobian, for many directions at once.

For a block y = f(x), J = df/dx, and cotangents G [K, B, T, d] `vjp` gives G J for all K directions in one pass; for tangents
of the same shape `jvp` gives J G. Two ways:

`LinearizedBlock` writes the derivative out over the block's parts (norms, projections, attention, feed-forward). The
forward quantities are computed once per prompt and shared by all directions, the directions are folded into the rows of
every matrix product, and all that remains besides products are a few passes over the cotangents. Patterns are remade per
band of queries, so that nothing of size T x T outlives its band, and keys no query of the band can see are left out. They
come from the softmax itself: where key biases make logits of 1,000 (Qwen2.5), a kept log-sum-exp leaves four digits. Per
direction, forward or backward: T P multiply-adds for P weights of the block, and 4 H c per visible key of each query.

`AutogradBlock` differentiates the model's own module, the stream repeated K times (as jacobian-lens does, but block by
block): slower, and right for whatever the module does. Its `jvp` is a central difference: good enough for a sketch's basis,
where fused attention kernels have no forward mode.

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
from .feedforward import affine, feed_forward
from .pointwise import Normalized, close, normed, rotate
from .view import Linear, Norm, Parts

# Queries per band: bounds memory at B H band K T numbers, and skips what lies above the diagonal for T much above it.
QUERY_BAND = 64
# The forward pass as taken apart may differ from the model's own by rounding only: transformers computes RMS norms in
# float32 even in float64 models, hence the third number.
OUTPUT_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float64: 1e-4, torch.float16: 2e-2}
# The step of central differences against the stream's norm: about the cube root of the rounding, which in float64 models is
# float32's, since transformers computes RMS norms in it.
DIFFERENCE = {torch.float32: 3e-3, torch.float64: 3e-3, torch.bfloat16: 1e-1, torch.float16: 3e-2}


@dataclass
class AutogradBlock:
    """The block's own module, differentiated by autograd for one prompt at a time.

    `frozen_block` is the same function with its patterns held constant; only `vjp(..., frozen=True)` needs it.
    """

    block: Callable[[Tensor], Tensor]
    stream: Float[Tensor, "batch position d"]
    frozen_block: Callable[[Tensor], Tensor] | None = None

    def vjp(self, cotangent: Tensor, first: int | None = None, *, frozen: bool = False) -> Tensor:
        block = self.frozen_block if frozen else self.block
        if block is None:
            raise ValueError("no block with constant patterns was given")
        if self.stream.shape[0] != 1:
            raise ValueError("masks of a recorded pass fit one prompt; trace prompts one by one for autograd")
        repeated = self.stream.expand(cotangent.shape[0], -1, -1).detach().clone().requires_grad_()
        with torch.enable_grad():
            output = block(repeated)
            if first is not None:
                output = output[:, first : first + cotangent.shape[2]]
            (gradient,) = torch.autograd.grad(output, repeated, cotangent[:, 0])
        return gradient[:, None]

    @torch.no_grad()
    def jvp(self, tangent: Tensor, row: int | None = None, *, frozen: bool = False) -> Tensor:
        """By central differences; `frozen` changes nothing here, since differences do not involve autograd."""
        sizes = tangent[:, 0].flatten(1).norm(dim=1)[:, None, None]
        step = DIFFERENCE[tangent.dtype] * self.stream.norm() / torch.where(sizes > 0, sizes, 1)
        ahead, behind = (self.block(self.stream + sign * step * tangent[:, 0]) for sign in (1, -1))
        rows = slice(None) if row is None else slice(row, row + 1)
        return ((ahead - behind) / (2 * step))[:, None, rows]


def _normed(norm: Norm | None, x: Tensor) -> tuple[Normalized | None, Tensor]:
    made = None if norm is None else Normalized(norm, x)
    return made, x if made is None else made.output


class LinearizedBlock:
    """A block's derivative from its parts. `output` is the block's own output, to be held against the recorded one.

    Args:
        parts: the block, taken apart.
        stream: what it read, [B, T, d].
        rotary: (cos, sin), each [T, rotated], or None.
        folded: this block's `Folded.of(parts)`, if it was made before.
    """

    @torch.no_grad()
    def __init__(
        self, parts: Parts, stream: Tensor, rotary: tuple[Tensor, Tensor] | None, folded: Folded | None = None
    ) -> None:
        self.parts, self.rotary, self.folded = parts, rotary, folded or Folded.of(parts)
        self.stream = stream
        self.stream_norm = normed(parts.attention_norm, stream)
        n1 = self.stream_norm.output

        def split(linear: Linear) -> Tensor:  # [B, heads, T, c]
            return affine(linear, n1).unflatten(-1, (-1, parts.head_dim)).transpose(1, 2)

        (self.q_norm, q), (self.k_norm, k) = (
            _normed(parts.q_norm, split(parts.q)),
            _normed(parts.k_norm, split(parts.k)),
        )
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
        self.feed_forward = feed_forward(parts, self.mlp_norm.output, self.folded.mlp)
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
        self.stream_norm.add_pullback(total, d_attention @ self.folded.attention[-d_attention.shape[-1] :])
        if self.parts.parallel:
            self.mlp_norm.add_pullback(total[:, :, rows], d_normed, rows)
        return total

    @torch.no_grad()
    def jvp(
        self, tangent: Float[Tensor, "k batch position d"], row: int | None = None, *, frozen: bool = False
    ) -> Float[Tensor, "k batch rows d"]:
        """J G for tangents of the stream, at all positions or at one `row`."""
        rows = slice(0, self.query.shape[2]) if row is None else slice(row, row + 1)
        return self._forward(tangent[:, :, rows], tangent, rows, None, frozen)

    @torch.no_grad()
    def own_jvp(self, own: Tensor, entering: Tensor, row: int, positions: Tensor) -> Tensor:
        """The tangent of one position after the block, [K, B, 1, d].

        `own` is its tangent before the block; `entering` [K, B, positions, d] are further tangents at `positions`, `row`
        among them, that reach it through this block's attention alone. Costs one row of the feed-forward, one query's
        attention and the projections at `positions`: see `own_flops`.
        """
        if self.parts.window is not None:  # what this block does not see
            seen = positions > row - self.parts.window
            entering, positions = entering[:, :, seen], positions[seen]
        read = entering.clone()
        read[:, :, positions == row] += own
        return self._forward(own, read, slice(row, row + 1), positions, False)

    def _forward(self, own: Tensor, read: Tensor, rows: slice, positions: Tensor | None, frozen: bool) -> Tensor:
        """Tangents at `rows` after the block, from those before it and what attention reads at `positions` (or all)."""
        parts, at = self.parts, slice(None) if positions is None else positions
        d_qkv = self.stream_norm.pushed(read, at) @ self.folded.attention.T
        branch = self._attention_pushed(d_qkv, rows, positions, frozen) @ parts.o.weight.T
        if self.post_attention is not None:
            branch = self.post_attention.pushed(branch, rows) * self.post_attention.weight
        middle = own + branch
        branch = self.feed_forward.pushed(self.mlp_norm.pushed(own if parts.parallel else middle, rows), rows)
        if self.post_mlp is not None:
            branch = self.post_mlp.pushed(branch, rows) * self.post_mlp.weight
        return middle.add_(branch)

    def _attention_pushed(self, d_qkv: Tensor, rows: slice, positions: Tensor | None, frozen: bool) -> Tensor:
        """Tangents of the heads' outputs at `rows`, [K, B, rows, H c], from those of q, k, v at `positions` (or all).

        Per head: dS = dQ K^T + Q dK^T, dO = (P dS) V - <P, dS> O + P dV.
        """
        count, batch = d_qkv.shape[:2]
        _, heads, length, c = self.query.shape
        kv, n_rows = heads // self.groups, rows.stop - rows.start
        dq, dk, dv = d_qkv.unflatten(-1, (-1, c)).transpose(2, 3).split([heads, kv, kv], 2)  # [K, B, heads, S, c]
        dq = dq[..., slice(rows.start, rows.stop) if positions is None else positions == rows.start, :]
        at = slice(None) if positions is None else positions
        if self.q_norm is not None and self.k_norm is not None:
            dq = self.q_norm.pushed(dq, (slice(None), rows)) * self.q_norm.weight
            dk = self.k_norm.pushed(dk, (slice(None), at)) * self.k_norm.weight
        if self.rotary is not None:
            cos, sin = self.rotary
            dq, dk = rotate(dq, cos[rows], sin[rows]), rotate(dk, cos[at], sin[at])
        dq = (dq * self.parts.scale).unflatten(2, (kv, self.groups)).permute(1, 2, 3, 4, 0, 5)  # [B, G, g, rows, K, c]
        dk, dv = dk.permute(1, 2, 3, 0, 4), dv.permute(1, 2, 3, 0, 4)  # [B, G, S, K, c]
        made = dq.new_empty(batch, kv, self.groups, n_rows, count, c)
        for queries, keys in self._bands(length, rows.start, n_rows):
            band = slice(queries.start - rows.start, queries.stop - rows.start)
            n, m = queries.stop - queries.start, keys.stop - keys.start
            logits, slope = self._logits(queries, keys)
            pattern = self._pattern(logits)  # [B, G, g, n, m]
            # Of the keys that the band sees, those that have tangents.
            seen = slice(None) if positions is None else positions - keys.start
            some = keys if positions is None else slice(None)
            weights = pattern[..., seen].flatten(2, 3)
            out = weights @ dv[:, :, some].flatten(3)
            out = out.view(batch, kv, self.groups, n, count, c)
            if not frozen:
                rise = dq[..., band, :, :].reshape(batch, kv, -1, c) @ self.key[:, :, keys].transpose(-1, -2)
                rise = rise.view(batch, kv, self.groups, n, count, m)
                query = self._grouped(self.query)[..., queries, :].reshape(batch, kv, -1, c)
                keyed = query @ dk[:, :, some].permute(0, 1, 4, 3, 2).flatten(3)  # [B, G, g n, K S]
                rise[..., seen] += keyed.view(batch, kv, self.groups, n, count, -1)
                rise *= (pattern if slope is None else pattern * slope).unsqueeze(-2)
                mixed = self._grouped(self.mixed)[..., queries, None, :]
                out -= rise.sum(-1, keepdim=True) * mixed
                out += (rise.view(batch, kv, -1, m) @ self.value[:, :, keys]).view_as(out)
            made[..., band, :, :] = out
        return made.permute(4, 0, 3, 1, 2, 5).flatten(3)

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


@dataclass(frozen=True)
class Folded:
    """First matrices of a block's branches (q, k, v; gate, up), stacked, the norms' weights folded in; none of experts.

    One pass over cotangents less; and it is the same for every prompt, so a block that is linearized at many streams
    needs it once.
    """

    mlp: Float[Tensor, "features d"] | None  # None: experts', which are too many to copy
    attention: Float[Tensor, "projected d"]

    @classmethod
    @torch.no_grad()
    def of(cls, parts: Parts) -> Folded:
        def stacked(norm: Norm | None, *first: Linear | None) -> Tensor:
            matrices = torch.cat([linear.weight for linear in first if linear is not None])
            return matrices if norm is None else matrices * norm.weight

        mlp = None if parts.routing is not None else stacked(parts.mlp_norm, parts.gate, parts.up)
        return cls(mlp, stacked(parts.attention_norm, parts.q, parts.k, parts.v))


def flops(parts: Parts, *, length: int, rows: int | None = None) -> int:
    """Floating-point operations of matrix products in one direction's `vjp` over one prompt, as performed."""
    rows = length if rows is None else rows
    visited = 0
    for at in range(length - rows, length, QUERY_BAND):
        stop = min(at + QUERY_BAND, length)
        visited += (stop - at) * (stop - (0 if parts.window is None else max(0, at - parts.window + 1)))
    features = parts.q.weight.shape[0]  # H c; once per row for <dO, O>
    mlp, qkv = _sizes(parts)
    return 2 * (rows * (mlp + parts.o.weight.numel() + features) + length * qkv + 4 * features * visited)


def own_flops(parts: Parts, *, length: int, positions: int) -> int:
    """The same for one direction's `own_jvp`."""
    mlp, qkv = _sizes(parts)
    features = parts.q.weight.shape[0]
    visible = length if parts.window is None else min(length, parts.window)
    return 2 * (mlp + parts.o.weight.numel() + positions * qkv + 2 * features * (visible + positions))


def _sizes(parts: Parts) -> tuple[int, int]:
    """Multiply-adds of one position in the feed-forward and in the projections of attention's input."""
    mlp = sum(0 if linear is None else linear.weight.numel() for linear in (parts.gate, parts.up, parts.down))
    if parts.routing is not None:
        route, width = parts.routing, parts.down.weight.shape[-2]
        mlp = mlp * route.chosen // len(route.weight) + route.weight.numel() + route.chosen * width  # weighing outputs
    return mlp, parts.q.weight.numel() + parts.k.weight.numel() + parts.v.weight.numel()
