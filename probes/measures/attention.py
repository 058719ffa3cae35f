"""Statistics of attention patterns that never hold a pattern, let alone one for every head and block.

Two ways, both exact up to rounding:

- A few entries: `A_ij = exp(s_ij - log Z_i)` with the log-sum-exp `log Z_i` that the fused kernel returns while the model
  runs (`View.watching`). Any few columns or diagonals of a pattern cost T numbers each, beside a plain forward pass.
- All entries: block of queries by block of queries (`pattern_blocks`), each of a few MiB, reduced before the next is made.

Leakage subtracts means over prompts. `by_layer` therefore runs all prompts through one block at a time, chunk by chunk, and
holds the queries and keys of one chunk only.

Sources: science of the measurement, sections 3 and 4; sinks in `probes.sinks`, leakage in `probes.leakage`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from ..models.fused import attend, query_blocks
from ..models.view import Attention, Edit, View
from ..run.precision import precise, wide


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
    found = attention.normalizer if attention.normalizer is not None else attend(attention, normalizer=True).normalizer
    assert found is not None
    return found


def outputs(attention: Attention) -> Float[Tensor, "batch head query c"]:
    """`sum_j A_ij v_j`: the kernel's own where it gave one, else from another pass of it."""
    found = attention.output if attention.output is not None else attend(attention).output
    assert found is not None
    return found


def completed(attention: Attention) -> Attention:
    """The attention with output and log-sum-exp, so that neither is computed twice."""
    if attention.output is not None and attention.normalizer is not None:
        return attention
    return attend(attention, normalizer=True)


def pairs(
    attention: Attention, queries: Sequence[int] | Tensor, keys: Sequence[int] | Tensor
) -> Float[Tensor, "batch head pair"]:
    """Logits of (query, key) pairs, as in `Attention.logits`; what the query does not see is minus infinity."""
    i, j = (torch.as_tensor(x, dtype=torch.long, device=attention.query.device) for x in (queries, keys))
    if attention.reweigh:  # edits take whole rows
        return attention.logits()[..., i, j]
    products = (wide(attention.query[..., i, :]) * wide(attention.key[..., j, :])).sum(-1)
    return attention.logits_of(products * attention.scale, i, j)


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


def diagonals(attention: Attention, lags: Sequence[int]) -> Float[Tensor, "batch head lag query"]:
    """Logits `s_{i, i - lag}`, minus infinity where there is no such key or the query does not see it."""
    length = attention.query.shape[-2]
    i = torch.arange(length, device=attention.query.device)
    found = []
    for lag in lags:
        before, after = max(lag, 0), max(-lag, 0)  # queries without such a key
        logits = pairs(attention, i[before : max(0, length - after)], i[after : max(0, length - before)])
        edges = (min(before, length), min(after, length))
        found.append(functional.pad(logits, edges, value=float("-inf")))
    return torch.stack(found, -2)


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

    In one pass over the pattern. Under a prefix, queries before a key may see it; only the second counts those.
    """
    shape, log_z = attention.query.shape[:-1], normalizers(attention)
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


def by_layer(model: View, streams: MutableMapping[Any, Tensor]) -> Iterator[tuple[int, Iterator[Attention]]]:
    """Run prompts through block after block, chunk by chunk: (block, the attention of one chunk after the other).

    `streams` holds the embeddings [B, T, d] of every chunk, in whatever order the mapping has, and the streams behind each
    block after it. What is given of attention is queries, keys and log-sum-exps, no values and outputs.
    """

    def through(block: Callable[[Tensor], Tensor]) -> Iterator[Attention]:
        for name in list(streams):
            found: list[Attention] = []
            watch = model.watching(lambda _, attention, found=found: found.append(_without_values(attention)))
            with watch, torch.no_grad():
                streams[name] = block(streams[name])
            yield found.pop()

    for layer, block in enumerate(model.trace(next(iter(streams.values()))[:1]).blocks):
        running = through(block)
        yield layer, running
        for _ in running:  # what the caller did not ask for
            pass


def run_watched(
    model: View,
    embeddings: Float[Tensor, "prompt position d"],
    watcher: Callable[[int, Attention], None],
    edits: Sequence[Edit] = (),
) -> None:
    """One pass without gradients, edited, in which `watcher` sees every block's attention, with log-sum-exp and output."""
    with model.watching(lambda layer, attention: watcher(layer, completed(attention))), torch.no_grad():
        model.residual(embeddings, edits=edits)


def _without_values(attention: Attention) -> Attention:
    log_z = normalizers(attention)
    # A slice of the values would keep all of them in memory. One NaN in their shape cannot be mistaken for a value.
    nothing = attention.value.new_full((1,), float("nan")).expand_as(attention.value)
    return replace(attention, value=nothing, output=None, normalizer=log_z)
