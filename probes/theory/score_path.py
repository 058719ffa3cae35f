"""The score path of the second-moment kernel, head by head: what comes down through logits. `kernel` derives it.

With W_O^T W_O = L L^T and scale^2 W_Q W_Q^T = B B^T (Cholesky), a_ij = x_i.W_O (v_j - o_i) / |x_i|, and R and P the rotation
and the derivative of a norm of queries and keys, a head adds to the diagonal of G, before 1 / (d r_j^2),

    through keys     sum_i A_ij^2 (G_ii (|L^T (v_j - o_i)|^2 - a_ij^2) + S_i a_ij^2) |W_K^T P_j R_j^T q_i|^2   at j,
    through queries  G_ii |L^T C_i Z_i|_F^2 + (S_i - G_ii) |sum_m A_im a_im k_m^T Z_i|^2,  Z_i = R_i P_i B      at i.

The keys' last factor is a quadratic form in q_i: one matrix product of all pairs of its components, each pair once, with
those of R_j P_j W_K W_K^T P_j R_j^T. C_i = sum_m A_im (v_m - o_i) k_m^T is one of the pattern with all products of a value's
component and a key's; L is applied to the values beforehand. Per head these are T^2 c^2 / 2 and T^2 c^2 multiply-adds, and
T c^3 for Z_i. Causal patterns halve the first two: keys that no query of a band sees are left out. Positions come last,
[c, ..., T], since rotations, norms and centring act on each position alone and then run along memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from ..models.linear import LinearizedBlock, Normalized
from ..run.memory import share_of
from ..run.precision import double

QUERIES = 64  # in a band: shorter ones make matrix products slow, longer ones have more keys that a query does not see
NUMBERS = 1 << 17  # of C_i in a band at once: half a MiB of float32, which stays in the cache
RIDGE = 1e-12  # of a Gram matrix's mean diagonal, in double: lets a root of one without full rank be taken


def roots(grams: Float[Tensor, "n c c"]) -> Float[Tensor, "n c c"]:
    """Lower triangular L, L L^T = X, of positive semidefinite matrices in double precision."""
    diagonal = grams.diagonal(dim1=-2, dim2=-1)
    ridge = RIDGE * diagonal.mean(-1, keepdim=True) + torch.finfo(grams.dtype).tiny
    return torch.linalg.cholesky(grams + torch.diag_embed(ridge.expand_as(diagonal)))


class ScorePath:
    """The score path of one block at one recorded stream.

    Args:
        block: linearized at a single prompt's stream.
        out: W_O of every head, [H, d, c], with a norm's weight behind it folded in.
        inner: W_O^T W_O of every head, in double precision.
        direction: of the stream that attention is added to give, of length 1.
        gram: G's diagonal above the branch.
        radial: S there.
    """

    def __init__(
        self,
        block: LinearizedBlock,
        out: Float[Tensor, "H d c"],
        inner: Float[Tensor, "H c c"],
        direction: Float[Tensor, "position d"],
        gram: Float[Tensor, " position"],
        radial: Float[Tensor, " position"],
    ) -> None:
        self.block, self.gram, self.radial, self.dtype = block, gram, radial, out.dtype
        self.width = out.shape[-1]
        self.along = direction @ out  # [H, T, c]
        self.out_root = roots(inner).to(out)
        q, k, _ = block.qkv.split([len(out) * self.width, *[block.key.shape[1] * self.width] * 2])
        q, k = (double(w).unflatten(0, (-1, self.width)) for w in (q, k))  # [heads, c, d]
        self.query_root = roots(q @ q.mT).to(out) * block.parts.scale
        self.key_gram = (k @ k.mT).to(out)
        self.first, self.second = torch.triu_indices(self.width, self.width, device=out.device)
        self.rotary = [x.to(self.dtype).T.contiguous() for x in block.rotary or ()]  # cos and sin, where there are any
        self.queries = min(len(gram), share_of(QUERIES))
        self.components = min(self.width, max(1, NUMBERS // (self.width * self.queries)))
        self.visible = list(self._bands())
        self.buffers = out.new_empty(2, self.width * self.components * self.queries)

    def metric(self, own: int) -> Float[Tensor, "pairs position"]:
        """R_j P_j W_K W_K^T P_j R_j^T of a key head, every pair of components once."""
        length, norm = len(self.gram), self.block.k_norm
        metric = self.key_gram[own, :, :, None].expand(-1, -1, length)
        for _ in range(2):  # its rows, and then its columns
            if not norm.absent:
                metric = self._across(metric, norm, own, slice(0, length)) * self._weight(norm, own)
            room = torch.empty(metric.shape, dtype=self.dtype, device=metric.device)
            metric = self._rotated(metric, slice(0, length), 1, room).transpose(0, 1)
        twice = torch.where(self.first == self.second, 1.0, 2.0).to(self.dtype)[:, None]
        return metric[self.first, self.second].mul_(twice)

    def through(
        self, head: int, pattern: Float[Tensor, "query key"], metric: Float[Tensor, "pairs position"]
    ) -> Float[Tensor, " position"]:
        """What one head adds to the diagonal; `pattern` includes a soft-cap's slope, `metric` is its key head's."""
        block, own = self.block, head // self.block.groups
        read = (block.query[0, head], block.mixed[0, head], block.key[0, own], block.value[0, own])
        query, mixed, key, value = (x.to(self.dtype).T.contiguous() for x in read)  # [c, T]
        along, gram, radial, root = self.along[head], self.gram, self.radial, self.out_root[head].T
        rooted, centre = root @ value, root @ mixed  # L^T v_j, L^T o_i
        lengths, middle = rooted.pow(2).sum(0), centre.pow(2).sum(0)
        reached = torch.linalg.vecdot(along, mixed.T)
        squares = query.index_select(0, self.first).mul_(query.index_select(0, self.second))  # [pairs, T]
        total, queries = torch.zeros_like(gram), torch.zeros_like(gram)
        means, leaning = torch.zeros_like(query), torch.zeros_like(query)  # sum_m A_im k_m, sum_m A_im a_im k_m
        for rows, keys in self.visible:
            seen = pattern[rows, keys]
            lean = (along[rows] @ value[:, keys]).sub_(reached[rows, None])  # a_ij
            means[:, rows], leaning[:, rows] = key[:, keys] @ seen.T, key[:, keys] @ (seen * lean).T
            felt = (centre[:, rows].T @ rooted[:, keys]).mul_(-2).add_(lengths[keys]).add_(middle[rows, None])
            felt.sub_(lean.pow_(2)).clamp_min_(0).mul_(gram[rows, None]).addcmul_(lean, radial[rows, None])
            total[keys] += felt.mul_(seen).mul_(seen).mul_(squares[:, rows].T @ metric[:, keys]).sum(0)
        for start in range(0, self.width, self.components):
            part = slice(start, start + self.components)
            pairs = key[:, None] * rooted[part]  # [c, part, T]
            for rows, keys in self.visible:
                shape = (*pairs.shape[:2], rows.stop - rows.start)
                covariance, room = (buffer[: math.prod(shape)].view(shape) for buffer in self.buffers)
                torch.mm(pairs[..., keys].flatten(0, 1), pattern[rows, keys].T, out=covariance.view(-1, shape[-1]))
                covariance.addcmul_(means[:, None, rows], centre[part, rows], value=-1)
                queries[rows] += self._pulled(covariance, head, rows, room).pow_(2).sum((0, 1))
        shape = (self.width, 1, len(gram))
        ahead = self._pulled(leaning[:, None], head, slice(0, len(gram)), gram.new_empty(shape)).pow_(2).sum((0, 1))
        return total.addcmul_(gram, queries).addcmul_(radial - gram, ahead)

    def _bands(self) -> Iterator[tuple[slice, slice]]:
        """(queries, the keys that any of them can see), without those that nothing comes down to: at the top all but one."""
        length, window = len(self.gram), self.block.parts.window
        for start in range(0, length, self.queries):
            rows = slice(start, min(start + self.queries, length))
            if self.gram[rows].any() or self.radial[rows].any():
                yield rows, slice(0 if window is None else max(0, start - window + 1), rows.stop)

    def _pulled(
        self, x: Float[Tensor, "c n rows"], head: int, rows: slice, room: Float[Tensor, "c n rows"]
    ) -> Float[Tensor, "c n rows"]:
        """Z_i^T on the first axis; `x` and `room` are overwritten."""
        turned, norm = self._rotated(x, rows, -1, room), self.block.q_norm
        if not norm.absent:
            turned = self._across(turned * self._weight(norm, head), norm, head, rows)
        torch.mm(self.query_root[head].T, turned.flatten(1), out=(room if turned is x else x).view(self.width, -1))
        return room if turned is x else x

    def _rotated(
        self, x: Float[Tensor, "c n rows"], rows: slice, sign: int, room: Float[Tensor, "c n rows"]
    ) -> Float[Tensor, "c n rows"]:
        """R_i on the first axis, or its transpose with `sign` -1, in `room`; `x` itself where there is no rotation."""
        if not self.rotary:
            return x
        cos, sin = (table[:, None, rows] for table in self.rotary)
        end, half = len(cos), len(cos) // 2
        torch.mul(x[:end], cos, out=room[:end])
        room[:half].addcmul_(x[half:end], sin[:half] if sign > 0 else sin[half:], value=-sign)
        room[half:end].addcmul_(x[:half], sin[half:] if sign > 0 else sin[:half], value=sign)
        room[end:] = x[end:]
        return room

    def _across(
        self, x: Float[Tensor, "c n rows"], norm: Normalized, head: int, rows: slice
    ) -> Float[Tensor, "c n rows"]:
        """The norm's (I - unit unit^T / c) / rms on the first axis; of one over all heads, this head's own block."""
        unit = norm.unit[0, head, rows].to(self.dtype).T[:, None]
        inverse = norm.inverse[0, head if norm.inverse.shape[1] > 1 else 0, rows, 0].to(self.dtype)
        return (x - unit * (x * unit).sum(0) / norm.size) * inverse

    def _weight(self, norm: Normalized, head: int) -> Tensor:
        """The norm's weight on one head, [c, 1, 1]."""
        weight = norm.weight if norm.weight.ndim == 1 else norm.weight[head, 0]
        return weight.to(self.dtype)[:, None, None]
