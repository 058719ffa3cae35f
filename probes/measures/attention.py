"""Statistics of attention patterns that never hold a pattern, let alone one for every head and block.

Two ways, both exact up to rounding:

- A few entries: `A_ij = exp(s_ij - log Z_i)` with the log-sum-exp `log Z_i` that the fused kernel returns while the model
  runs (`View.watching`). Any few columns of a pattern cost T numbers each, beside a plain forward pass.
- All entries: block of queries by block of queries (`pattern_blocks`), each of a few MiB, reduced before the next is made.

Sources: science of the measurement, sections 3 and 4; sinks in `probes.sinks`, leakage in `probes.leakage`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..models.fused import attend, query_blocks
from ..models.passes import kernels_there
from ..models.view import Attention, Edit, View
from ..run.precision import double, precise, wide

ALL = slice(None)


class PatternBlock(NamedTuple):
    """Rows `start` to `stop` of a pattern: `weights [B, H, rows, keys]` of keys `first` to `last`; no query sees others.

    `last` is `stop`, or the end of a prefix that all queries see.
    """

    start: int
    stop: int
    first: int
    weights: Float[Tensor, "batch head query key"]

    @property
    def last(self) -> int:
        return self.first + self.weights.shape[-1]


def normalizers(attention: Attention) -> Float[Tensor, "batch head query"]:
    """`log Z_i`, the log-sum-exp of a query's logits: the kernel's own where it gave one, else from another pass of it."""
    found: Any = attend(attention, normalizer=True) if attention.normalizer is None else attention
    return found.normalizer


def outputs(attention: Attention) -> Float[Tensor, "batch head query c"]:
    """`sum_j A_ij v_j`: the kernel's own where it gave one, else from another pass of it."""
    found: Any = attend(attention) if attention.output is None else attention
    return found.output


def part_of(attention: Attention, *, prompts: slice = ALL, heads: slice = ALL, positions: slice = ALL) -> Attention:
    """Of some prompts, heads and positions alone; the first positions do not depend on what follows."""
    names, of_heads = ("query", "key", "value", "output", "normalizer", "gate"), ("slopes", "sink")
    parts = {name: getattr(attention, name) for name in (*names, *of_heads)}
    at = dict.fromkeys(names, (prompts, heads, positions)) | dict.fromkeys(of_heads, (heads,))
    return replace(attention, **{name: None if x is None else x[at[name]] for name, x in parts.items()})


def columns(attention: Attention, keys: Sequence[int]) -> Float[Tensor, "batch head query chosen"]:
    """The pattern's columns of the chosen keys, zero where a query does not see one."""
    j = torch.tensor(list(keys), dtype=torch.long, device=attention.query.device)
    if attention.reweigh:  # edits take whole rows
        logits = attention.logits()[..., j]
    else:
        # Scaling the few keys instead of the many queries spares a copy of the queries.
        products = wide(attention.query) @ (wide(attention.key[..., j, :]) * attention.scale).mT  # [B, H, T, K]
        i = torch.arange(attention.query.shape[-2], device=j.device)
        logits = attention.logits_of(products, i[:, None], j[None, :])
    return logits.sub_(normalizers(attention)[..., None]).exp_()


def pattern_blocks(attention: Attention) -> Iterator[PatternBlock]:
    """The pattern in blocks of queries; at most one is alive at a time."""
    log_z = normalizers(attention)
    for start, stop in query_blocks(attention):
        weights = attention.logits(start, stop).sub_(log_z[..., start:stop, None]).exp_()
        yield PatternBlock(start, stop, attention.first_key(start), weights)


def column_statistics(
    attention: Attention, threshold: float
) -> tuple[Float[Tensor, "batch head key"], Float[Tensor, "batch head key"]]:
    """Of every column the sum of the weights, of the queries from the key on, and the number of weights above `threshold`.

    In one pass over the pattern, on CUDA by a kernel of its own where it knows the attention. Under a prefix, queries before
    a key may see it; only the second counts those.
    """
    shape, log_z = attention.query.shape[:-1], normalizers(attention)
    plain = (
        attention.softcap is None and attention.slopes is None and attention.prefix is None and not attention.reweigh
    )
    if plain and log_z.device.type == "cuda" and attention.query.dtype != torch.float64 and kernels_there():
        from ..models.kernels import column_sums  # needs Triton, which not every build of PyTorch brings along

        total, over = column_sums(attention, log_z, threshold)
        return double(total), double(over)
    total, over = (torch.zeros(shape, dtype=torch.float64, device=precise(log_z.device)) for _ in range(2))
    for block in pattern_blocks(replace(attention, normalizer=log_z)):
        start, stop, first, weights = block
        ones, seen = weights.new_ones(1, stop - start), slice(first, block.last)
        ahead = attention.last_key(start + 1) > start + 1  # some query of the block sees keys behind it
        counted = weights.tril(start - first) if ahead else weights
        # A product with ones is the fastest sum over rows there is; float32 counts exactly up to 2^24.
        total[..., seen] += (ones @ counted).squeeze(-2).to(total.device)
        over[..., seen] += (ones @ weights.gt_(threshold)).squeeze(-2).to(over.device)
    return total, over


def run_watched(
    model: View,
    embeddings: Float[Tensor, "prompt position d"],
    watcher: Callable[[int, Attention], None],
    edits: Sequence[Edit] = (),
) -> None:
    """One pass without gradients, edited, in which `watcher` sees every block's attention, with log-sum-exp and output."""

    def completed(layer: int, attention: Attention) -> None:  # so that neither is computed twice
        known = attention.output is not None and attention.normalizer is not None
        watcher(layer, attention if known else attend(attention, normalizer=True))

    with model.watching(completed), torch.no_grad():
        model.residual(embeddings, edits=edits)
