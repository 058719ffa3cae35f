"""The score path of the second-moment kernel: what comes down through logits. `kernel` derives it.

With W_O^T W_O = L L^T and scale^2 W_Q W_Q^T = B B^T (Cholesky), a_ij = x_i.W_O (v_j - o_i) / |x_i|, and R and P the rotation
and the derivative of a norm of queries and keys, a head adds to the diagonal of G, before 1 / (d r_j^2),

    through keys     sum_i A_ij^2 (G_ii (|L^T (v_j - o_i)|^2 - a_ij^2) + S_i a_ij^2) |W_K^T P_j R_j^T q_i|^2   at j,
    through queries  G_ii |L^T C_i Z_i|_F^2 + (S_i - G_ii) |sum_m A_im a_im k_m^T Z_i|^2,  Z_i = R_i P_i B      at i.

The keys' last factor is a quadratic form in q_i: one matrix product of all pairs of its components with those of
R_j P_j W_K W_K^T P_j R_j^T. C_i = sum_m A_im (v_m - o_i) k_m^T is one of the pattern with all products of a value's
component and a key's; L is applied to the values beforehand. Per head these are T^2 c^2 multiply-adds each, and T c^3 for
Z_i. Causal patterns halve the first two: queries are taken in bands, and keys that no query of a band sees are left out.
Heads go one by one on a processor, together on a device with memory of its own, where few and large operations count.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from ..models.linear import LinearizedBlock, Normalized, rotate
from ..run.memory import block_numbers, own_memory, share_of
from ..run.precision import double

# Queries in a band: shorter ones make matrix products slow, longer ones have more keys that a query does not see. On a
# device with memory of its own, where few and large operations count, a band is as long as a block's numbers allow.
QUERIES = 64
RIDGE = 1e-12  # of a Gram matrix's mean diagonal, in double: lets a root of one without full rank be taken


def roots(grams: Float[Tensor, "n c c"]) -> Float[Tensor, "n c c"]:
    """Lower triangular L, L L^T = X, of positive semidefinite matrices in double precision; NaN where one is not."""
    diagonal = grams.diagonal(dim1=-2, dim2=-1)
    ridge = RIDGE * diagonal.mean(-1, keepdim=True) + torch.finfo(grams.dtype).tiny
    root, failed = torch.linalg.cholesky_ex(grams + torch.diag_embed(ridge.expand_as(diagonal)))
    return root.masked_fill(failed[..., None, None] != 0, torch.nan)  # said in the numbers: nothing waits for an error


class HeadWeights:
    """What the kernel needs of the weights of a block's heads; it is the same for all prompts.

    `out`: W_O of every head, with a norm's weight behind it folded in. Without `score_path` `strengths` alone.
    """

    def __init__(self, block: LinearizedBlock, out: Float[Tensor, "H d c"], score_path: bool) -> None:
        (heads, width, c), exact = out.shape, double(out)
        inner = exact.mT @ exact  # W_O^T W_O, [H, c, c]
        key_features = block.key.shape[1] * c
        q, k, v = (w.unflatten(0, (-1, c)) for w in block.qkv.split([heads * c, key_features, key_features]))
        v = v.to(out.dtype)
        values = double(v @ v.mT).repeat_interleave(block.groups, 0)
        self.strengths = ((inner * values).sum((-1, -2)) / width).to(out)  # ||W_O,h W_V,h||_F^2 / d
        if score_path:
            q, k = double(q), double(k)
            self.out_root = roots(inner).to(out)
            self.query_root = roots(q @ q.mT).to(out) * block.parts.scale
            self.key_gram = (k @ k.mT).to(out)


class ScorePath:
    """The score path of one block at one recorded stream.

    `direction`, of length 1, is that of the stream with attention added; `gram` is G's diagonal above the branch, and
    `radial` S there.
    """

    def __init__(
        self,
        block: LinearizedBlock,
        out: Float[Tensor, "H d c"],
        weights: HeadWeights,
        direction: Float[Tensor, "position d"],
        gram: Float[Tensor, " position"],
        radial: Float[Tensor, " position"],
    ) -> None:
        self.block, self.weights, self.gram, self.radial, self.dtype = block, weights, gram, radial, out.dtype
        self.along = direction @ out  # [H, T, c]
        # A host waits for this, and only a processor gains by it.
        own = own_memory(gram.device) is not None
        self.reached = [True] * len(gram) if own else ((gram != 0) | (radial != 0)).tolist()

    def metric(self, own: slice) -> Float[Tensor, "G position pairs"]:
        """R_j P_j W_K W_K^T P_j R_j^T of key heads, every pair of components."""
        norm, every = self.block.k_norm, slice(0, len(self.gram))
        metric = self.weights.key_gram[own, :, None].expand(-1, -1, len(self.gram), -1)  # [G, c, T, c]
        for _ in range(2):  # its columns, and then its rows
            if not norm.absent:
                metric = self._across(metric, norm, own, every) * self._weight(norm, own)
            metric = self._rotated(metric, every).transpose(1, 3)
        return metric.transpose(1, 2).flatten(2)

    def through(
        self, heads: slice, own: slice, pattern: Float[Tensor, "h query key"], metric: Float[Tensor, "G position pairs"]
    ) -> Float[Tensor, " position"]:
        """What some heads add to the diagonal: one, or all that read the key heads `own`.

        `pattern` includes a soft-cap's slope, `metric` is the key heads'.
        """
        block, root, groups = self.block, self.weights.out_root[heads], len(pattern) // len(metric)
        query, mixed = (x[0, heads].to(self.dtype).contiguous() for x in (block.query, block.mixed))  # [h, T, c]
        key, value = (x[0, own].to(self.dtype).repeat_interleave(groups, 0) for x in (block.key, block.value))
        along, gram, radial = self.along[heads], self.gram[:, None], self.radial[:, None]
        rooted, centre = value @ root, mixed @ root  # L^T v_j, L^T o_i
        pairs, total = (rooted[..., None] * key[:, :, None]).flatten(2), torch.zeros_like(self.gram)
        for rows, keys in self._bands(len(pattern)):
            seen, asked, middle = pattern[:, rows, keys], query[:, rows], centre[:, rows]
            lean = along[:, rows] @ value[:, keys].mT - torch.linalg.vecdot(along[:, rows], mixed[:, rows])[..., None]
            # That was a_ij; this is |L^T (v_j - o_i)|^2.
            felt = middle.pow(2).sum(2, keepdim=True) - 2 * middle @ rooted[:, keys].mT
            felt = felt + rooted[:, None, keys].pow(2).sum(3)
            felt = (felt - lean**2).clamp_min(0) * gram[rows] + radial[rows] * lean**2
            squares = (asked[..., None] * asked[:, :, None]).view(len(metric), -1, metric.shape[-1])
            lengths = (squares @ metric[:, keys].mT).view(seen.shape)
            total[keys] += (felt * seen**2 * lengths).sum((0, 1))
            covariance = (seen @ pairs[:, keys]).unflatten(2, (root.shape[-1], -1)).transpose(1, 2)  # [h, c, rows, c]
            covariance = covariance - middle.mT[..., None] * (seen @ key[:, keys])[:, None]
            both = torch.cat([covariance, ((seen * lean) @ key[:, keys])[:, None]], 1)
            both = self._pulled(both, heads, rows).pow(2).sum(-1)
            through_queries = gram[rows, 0] * both[:, :-1].sum((0, 1))
            total[rows] += through_queries + (self.radial - self.gram)[rows] * both[:, -1].sum(0)
        return total

    def _bands(self, heads: int) -> list[tuple[slice, slice]]:
        """(queries, the keys that any of them can see), without those that nothing comes down to: at the top all but one."""
        length, window, device, queries = len(self.gram), self.block.parts.window, self.gram.device, QUERIES
        if own_memory(device) is not None:
            queries = max(QUERIES, block_numbers(device) // (heads * (self.along.shape[-1] ** 2 + length)))
        queries, reach = share_of(queries), length if window is None else window - 1
        rows = [slice(start, min(start + queries, length)) for start in range(0, length, queries)]
        return [(some, slice(max(0, some.start - reach), some.stop)) for some in rows if any(self.reached[some])]

    def _pulled(self, x: Float[Tensor, "h n rows c"], heads: slice, rows: slice) -> Float[Tensor, "h n rows c"]:
        """Z_i^T on the last axis."""
        x, norm = self._rotated(x, rows, back=True), self.block.q_norm
        if not norm.absent:
            x = self._across(x * self._weight(norm, heads), norm, heads, rows)
        return (x.flatten(1, 2) @ self.weights.query_root[heads]).view(x.shape)

    def _rotated(
        self, x: Float[Tensor, "h n rows c"], rows: slice, *, back: bool = False
    ) -> Float[Tensor, "h n rows c"]:
        """R_i on the last axis, or its transpose; `x` itself where there is no rotation."""
        rotary = self.block.rotary
        return x if rotary is None else rotate(x, *(table[rows].to(self.dtype) for table in rotary), back=back)

    def _across(
        self, x: Float[Tensor, "h n rows c"], norm: Normalized, heads: slice, rows: slice
    ) -> Float[Tensor, "h n rows c"]:
        """The norm's (I - unit unit^T / c) / rms on the last axis; of one over all heads, each head's own block."""
        unit = norm.unit[0, heads, None, rows].to(self.dtype)
        inverse = norm.inverse[0, heads if norm.inverse.shape[1] > 1 else slice(None), None, rows].to(self.dtype)
        return (x - unit * (x * unit).sum(-1, keepdim=True) / norm.size) * inverse

    def _weight(self, norm: Normalized, heads: slice) -> Float[Tensor, " c"]:
        """The norm's weight on these heads, [c] or [h, 1, 1, c]."""
        return (norm.weight if norm.weight.ndim == 1 else norm.weight[heads, None]).to(self.dtype)
