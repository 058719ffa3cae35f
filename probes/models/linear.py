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

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from ..run.memory import block_numbers, own_memory, share_of
from ..run.precision import products, wide
from .feedforward import affine, feed_forward, stacked
from .passes import along, grouped, scaled, turned_back
from .view import Linear, Norm, Parts, sees

# Queries per band on a CPU: bounds memory at B H band K T numbers, and skips what is above the diagonal for T much above it.
QUERY_BAND = 64
# On a device with memory of its own every operation is launched by itself, which takes as long as some million numbers: a
# band has so many cotangents of logits, as far as there is room, and more where there would be too many bands.
BAND_NUMBERS, MOST_BANDS = 1 << 27, 8
# Columns beside a value's c that take <dO, O> into the product with the values; on a device rows stay aligned with more.
BESIDE, BESIDE_ALIGNED = 1, 8
# The forward pass as taken apart may differ from the model's own by rounding only: transformers computes RMS norms in
# float32 even in float64 models, hence the third number.
OUTPUT_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float64: 1e-4, torch.float16: 2e-2}


class Normalized:
    """A norm at a recorded stream: the derivative's transpose, with the weight left to the caller.

    Heads' vectors [B, H, T, c] may have a norm of their own each, or one over all heads' features, whose weight is H c long.
    Without a norm (`absent`) the stream passes as it is. Cotangents are [B, rows, K, d], those of heads [B, rows, K, H, c].
    """

    def __init__(self, norm: Norm | None, stream: Tensor) -> None:
        self.absent = norm is None
        if norm is None:
            return
        self.layer = norm.kind == "layer"
        self.heads, self.own = stream.ndim == 4, norm.weight.numel() == stream.shape[-1]
        over: tuple[int, ...] = (-1,) if self.own else (-3, -1)
        self.weight = norm.weight if self.own else norm.weight.view(-1, 1, stream.shape[-1])
        self.size = norm.weight.numel()
        centred = stream - stream.mean(-1, keepdim=True) if self.layer else stream
        inverse = torch.rsqrt(wide(centred).pow(2).mean(over, keepdim=True) + norm.eps)
        self.inverse = inverse.to(stream.dtype)  # [B, T, 1] or [B, H or 1, T, 1]
        self.unit = (centred * inverse).to(stream.dtype)  # [B, T, d]
        self.along = self.unit * self.inverse

    def pullback(self, cotangent: Tensor, rows: slice = slice(None)) -> Tensor:
        """The whole derivative's transpose, weight included, into a new tensor; without a norm what is given."""
        if self.absent:
            return cotangent
        weighted = cotangent * (self.weight if self.own else self.weight.squeeze(1))
        if self.layer:
            weighted -= weighted.mean(-1, keepdim=True)
        unit, inverse, dots = self._at(weighted, rows)
        return weighted.mul_(inverse).addcmul_(dots, unit, value=-1 / self.size)

    def added(self, total: Tensor, weighted: Tensor, rows: slice = slice(None), out: Tensor | None = None) -> Tensor:
        """total + (g - unit <g, unit>/d [- mean g]) / rms, g the cotangent of `unit`; `weighted` may be overwritten."""
        if self.absent:
            return torch.add(total, weighted, out=out)
        if self.layer:
            weighted -= weighted.mean(-1, keepdim=True)
        made = along(total, weighted, self.unit[:, rows], self.inverse[:, rows], out)
        if made is not None:
            return made
        unit, inverse, dots = self._at(weighted, rows)
        return torch.addcmul(total, weighted, inverse, out=out).addcmul_(dots, unit, value=-1 / self.size)

    def _at(self, weighted: Tensor, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """On these rows unit, 1 / rms and <g, unit> / rms, which broadcast to the cotangents g."""
        unit, inverse, along = (
            (x.transpose(1, 2) if self.heads else x)[:, rows] for x in (self.unit, self.inverse, self.along)
        )
        # A product: it adds in float32 whatever the numbers are, and no copy of the cotangents is made for that.
        if not self.heads:
            dots = torch.einsum("btkd,btd->btk", weighted, along)
        elif self.own:
            dots = torch.einsum("btkhc,bthc->btkh", weighted, along)
        else:
            dots = torch.einsum("btkhc,bthc->btk", weighted, along).unsqueeze(-1)
        return unit.unsqueeze(2), inverse.unsqueeze(2), dots.unsqueeze(-1)


def normalized(norm: Norm | None, stream: Tensor) -> tuple[Normalized, Tensor]:
    """A norm at a stream, and what comes out of it."""
    made = Normalized(norm, stream)
    if norm is None:
        return made, stream
    output = made.unit * made.weight
    return made, output if norm.bias is None else output + norm.bias


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False, out: Tensor | None = None) -> Tensor:
    """Rotate the leading `cos.shape[-1]` features of x [..., T, c] as transformers does; `back` is the transpose."""
    width = cos.shape[-1]
    half = width // 2
    first, second = x[..., :half], x[..., half:width]
    out = torch.empty_like(x) if out is None else out
    near, far, sign = (sin[..., half:], sin[..., :half], 1) if back else (sin[..., :half], sin[..., half:], -1)
    torch.mul(first, cos[..., :half], out=out[..., :half]).addcmul_(second, near, value=sign)
    torch.mul(second, cos[..., half:], out=out[..., half:width]).addcmul_(first, far, value=-sign)
    if width < x.shape[-1]:
        out[..., width:] = x[..., width:]
    return out


def softmax(logits: Tensor, sink: Tensor | None) -> Tensor:
    """Weights; those of learned sink logits, which broadcast to the rows and read nothing, are left out."""
    if sink is None:
        return logits.softmax(-1)
    learned = sink.to(logits).expand(*logits.shape[:-1], 1)
    return torch.cat([logits, learned], -1).softmax(-1)[..., :-1]


def apart(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The largest difference, and the largest value that it is held against; they stay on their device."""
    return largest(a - b), largest(b)


def largest(x: Tensor) -> Tensor:
    """The largest size of a number, NaN where there is one."""
    return torch.linalg.vector_norm(x, math.inf)


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
    """A block's derivative from its parts, at the stream [B, T, d] that it read; `rotary` is (cos, sin), each [T, rotated].

    `output` is the block's own output, to be held against the recorded one.
    """

    @torch.no_grad()
    def __init__(self, parts: Parts, stream: Tensor, rotary: tuple[Tensor, Tensor] | None) -> None:
        self.parts, self.stream, self.rotary = parts, stream, rotary
        self.positions = torch.arange(stream.shape[1], device=stream.device)
        self.qkv = stacked(parts.attention_norm, parts.q, parts.k, parts.v)  # [projected, d]
        self.stream_norm, n1 = normalized(parts.attention_norm, stream)

        def split(linear: Linear) -> Tensor:  # [B, heads, T, c]
            return affine(linear, n1).unflatten(-1, (-1, parts.head_dim)).transpose(1, 2)

        (self.q_norm, q), (self.k_norm, k) = (
            normalized(parts.q_norm, split(parts.q)),
            normalized(parts.k_norm, split(parts.k)),
        )
        if rotary is not None:  # both at once
            q, k = rotate(torch.cat([q, k], 1), *rotary).split([q.shape[1], k.shape[1]], 1)
        self.key, self.groups = k.contiguous(), q.shape[1] // k.shape[1]
        # The scale rides on the query from here on. Heads of a group go next to each other: [B, G, T, H/G, c].
        grouped = q.unflatten(1, (-1, self.groups)).transpose(2, 3)
        self.queries = torch.mul(grouped, parts.scale, out=grouped.new_empty(grouped.shape))
        beside = BESIDE if own_memory(stream.device) is None else BESIDE_ALIGNED
        self.values = functional.pad(split(parts.v), (0, beside))  # [B, G, T, c and 1 or more]
        self.values[..., parts.head_dim] = -1
        self.mix = self._attend()  # [B, G, T, H/G, c]
        branch = affine(parts.o, self.mix.transpose(1, 2).flatten(2))
        self.post_attention, branch = normalized(parts.post_attention_norm, branch)
        self.middle = middle = stream + branch  # after attention
        self.mlp_norm, n2 = normalized(parts.mlp_norm, stream if parts.parallel else middle)
        self.feed_forward = feed_forward(parts, n2)
        self.post_mlp, made = normalized(parts.post_mlp_norm, self.feed_forward.output)
        self.output = middle + made

    def gives(self, after: Tensor) -> Bool[Tensor, ""]:
        """Is `after`, the stream that the model itself had after this block, what came out here, rounding aside?"""
        difference, size = apart(self.output, after)
        return difference <= OUTPUT_TOLERANCE[after.dtype] * size

    @property
    def query(self) -> Float[Tensor, "batch head position c"]:
        """Queries after rotation, times the scale."""
        return self.queries.transpose(2, 3).flatten(1, 2)

    @property
    def mixed(self) -> Float[Tensor, "batch head position c"]:
        """What each head's pattern makes of the values."""
        return self.mix.transpose(2, 3).flatten(1, 2)

    @property
    def value(self) -> Float[Tensor, "batch kv position c"]:
        return self.values[..., : self.parts.head_dim]

    # -- attention, band by band; heads of a group are rows beside each other against the group's keys: [B G, n H/G, m]

    def _bands(self, first: int, rows: int, count: int) -> list[tuple[slice, slice]]:
        """(queries, the keys any of them can see), for so many queries from `first` on and so many numbers per logit."""
        device, end, band = self.stream.device, first + rows, QUERY_BAND
        if own_memory(device) is not None:
            row = self.queries[:, :, 0, :, 0].numel() * end * count
            band = max(1, min(max(-(-rows // MOST_BANDS), BAND_NUMBERS // row), block_numbers(device) // row))
        bands, band = [], share_of(band)
        for at in range(first, end, band):
            stop = min(at + band, end)
            start = 0 if self.parts.window is None else max(0, at - self.parts.window + 1)
            bands.append((slice(at, stop), slice(start, stop)))
        return bands

    def _logits(self, queries: slice, keys: slice) -> tuple[Tensor, Tensor | None]:
        """Masked logits [B, G, queries, H/G, keys] of one band and, under a soft-cap, their slope; in float32 at least."""
        query, key = self.queries[:, :, queries], self.key[:, :, keys]
        logits, slope = wide(query.flatten(2, 3)) @ wide(key).transpose(-1, -2), None
        logits = logits.unflatten(2, (-1, self.groups))
        if self.parts.softcap is not None:
            squashed = torch.tanh(logits / self.parts.softcap)
            slope = 1 - squashed**2
            logits = squashed * self.parts.softcap
        i, j = self.positions[queries, None, None], self.positions[keys]
        if self.parts.slopes is not None:
            logits = logits - self.parts.slopes.view(-1, 1, self.groups, 1) * (i - j)
        hidden = j > i if self.parts.window is None else ~sees(i, j, self.parts.window)
        return logits.masked_fill_(hidden, float("-inf")), slope

    def _pattern(self, logits: Tensor) -> Tensor:
        """Weights of a band's logits; with a learned sink logit, which reads nothing, rows sum to less than 1."""
        sink = self.parts.sink
        return softmax(logits, None if sink is None else sink.view(-1, 1, self.groups, 1)).to(self.key.dtype)

    def _attend(self) -> Tensor:
        outputs = []
        for queries, keys in self._bands(0, self.queries.shape[2], 1):
            pattern = self._pattern(self._logits(queries, keys)[0])
            outputs.append((pattern.flatten(2, 3) @ self.value[:, :, keys]).unflatten(2, (-1, self.groups)))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)

    # A row of dS sums to 0: in TF32 what all keys have in common, such as a large bias, would not cancel.
    @products("ieee")
    def _attention_pullback(self, d_mixed: Tensor, first: int, frozen: bool) -> Tensor:
        """Cotangents of q, k, v before bias, [B, T, K, (H + 2 G) c], from those of the heads' outputs [B, rows, K, H c].

        Per head: dP = dO V^T, dS = P (dP - <dO, O>), dQ = dS K, dK = dS^T Q, dV = P^T dO. With `frozen`, dP counts as
        zero and dV alone is returned, [B, T, K, G c].
        """
        batch, rows, count, _ = d_mixed.shape
        _, kv, length, groups, c = self.queries.shape
        size = c if frozen else self.values.shape[-1]
        # Directions go next to the query rows, so that one product per head serves them all. <dO, O> goes beside dO, and
        # -1 is beside V: their product is dP - <dO, O>.
        d_out = grouped(d_mixed, self.mix[:, :, first : first + rows], size)
        d_out, key, values = (x.flatten(0, 1) for x in (d_out, self.key, self.values))
        dv = d_out.new_zeros(batch * kv, length, count * size)
        dq, dk = d_out.new_empty(0), d_out.new_empty(0)  # not used where the pattern is constant
        if not frozen:
            dq = d_out.new_empty(batch * kv, rows, groups, count, c)
            dk = d_out.new_zeros(batch * kv, length, count, c)
        for queries, keys in self._bands(first, rows, count):
            at, m = slice(queries.start - first, queries.stop - first), keys.stop - keys.start
            logits, slope = self._logits(queries, keys)
            pattern = self._pattern(logits)
            weights = pattern if slope is None else pattern * slope
            pattern, weights = (x.flatten(0, 1).flatten(1, 2) for x in (pattern, weights))  # [B G, n H/G, m]
            # All heads of a group write to the same keys: their query rows are one contraction.
            dv[:, keys].baddbmm_(pattern.mT, d_out[:, at].flatten(3).flatten(1, 2))
            if frozen:
                continue
            ds = d_out[:, at].flatten(1, 3) @ values[:, keys].mT  # [B G, n H/G K, m]
            scaled(ds.unflatten(1, (-1, count)), weights)
            dq[:, at].flatten(1, 3).baddbmm_(ds, key[:, keys], beta=0, alpha=self.parts.scale)
            # dK[j, k, c] = sum over rows of dS[row, k, j] Q[row, c]
            query = self.queries[:, :, queries].flatten(0, 1).flatten(1, 2)
            by_direction = ds.view(len(ds), -1, count * m).mT @ query
            dk[:, keys].add_(by_direction.view(-1, count, m, c).transpose(1, 2))
        made = (dq, dk, dv.unflatten(-1, (count, size))[..., :c])
        return self._projected(*(x.unflatten(0, (batch, kv)) for x in made[2 * frozen :]), first=first)

    def _projected(self, *made: Tensor, first: int) -> Tensor:
        """Cotangents of values [B, G, T, K, c] or those of queries [B, G, rows, H/G, K, c], keys [B, G, T, K, c] and values.

        They come back before rotation and norms, position by position: [B, T, K, (H + 2 G) c], or G c of values alone.
        """
        *others, dv = made
        batch, kv, length, count, c = dv.shape
        features = [kv * self.groups * c, kv * c, kv * c][-len(made) :]
        total = dv.new_empty(batch, length, count, sum(features))
        *into, values = total.split(features, -1)
        values.unflatten(-1, (kv, c)).copy_(dv.permute(0, 2, 3, 1, 4))
        if others:
            (dq, dk), rows = others, slice(first, first + others[0].shape[2])
            if dq.shape[2] < length:
                into[0].zero_()
            self._back(dq, self.q_norm, rows, into[0][:, rows])
            self._back(dk.unsqueeze(3), self.k_norm, slice(None), into[1])
        return total

    def _back(self, x: Tensor, norm: Normalized, rows: slice, out: Tensor) -> None:
        """Cotangents [B, G, rows, heads of a group, K, c] of rotated heads' vectors, to those before rotation and norm."""
        _, kv, _, groups, _, c = x.shape
        tables = None if self.rotary is None else [table[rows] for table in self.rotary]
        if tables is None or not turned_back(x, tables[0], tables[1], out):
            into = out.unflatten(-1, (kv, groups, c)).permute(0, 3, 1, 4, 2, 5)
            if tables is None:
                into.copy_(x)
            else:
                rotate(x, *(table[:, None, None] for table in tables), back=True, out=into)
        if not norm.absent:
            heads = out.unflatten(-1, (kv * groups, c))
            heads.copy_(norm.pullback(heads, rows))

    # -- the whole block

    @torch.no_grad()
    def vjp(
        self, cotangent: Float[Tensor, "k batch rows d"], first: int | None = None, *, frozen: bool = False
    ) -> Float[Tensor, "k batch position d"]:
        """G J for cotangents on all positions, or on the rows from position `first` on."""
        length, start = self.queries.shape[2], first or 0
        rows = slice(start, start + cotangent.shape[2])
        # Directions go inside of positions: what is multiplied there is a product for each position.
        middle, d_normed, d_attention = self._to_inputs(cotangent.permute(1, 2, 0, 3), rows, frozen)
        weighted = d_attention @ self.qkv[-d_attention.shape[-1] :]
        if cotangent.shape[2] < length:
            total = middle.new_zeros(len(middle), length, *middle.shape[2:])
            total[:, rows] = middle
            middle = total
        # What is given stays as it is; a parallel block hands it through.
        total = self.stream_norm.added(middle, weighted, out=None if self.parts.parallel else middle)
        if self.parts.parallel:
            self.mlp_norm.added(total[:, rows], d_normed, rows, out=total[:, rows])
        return total.permute(2, 0, 1, 3)

    def _to_inputs(self, cotangent: Tensor, rows: slice, frozen: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Cotangents of the stream after attention, of what the feed-forward reads, and of attention's first products.

        The last at all positions, of values alone if `frozen`; the others on the given rows. All are [B, position, K, ...].
        """
        parts = self.parts
        d_normed = self.feed_forward.pullback(self.post_mlp.pullback(cotangent, rows), rows)
        middle = cotangent if parts.parallel else self.mlp_norm.added(cotangent, d_normed, rows)
        d_branch = self.post_attention.pullback(middle, rows)
        return middle, d_normed, self._attention_pullback(d_branch @ parts.o.weight, rows.start, frozen)
