"""What leakage needs of attention: every block's logits of all prompts, made Toeplitz in the mean.

All prompts go through one block before the next (`by_block`), a chunk at a time, because means over half of the prompts are
subtracted from each prompt's logits. Chunks lie within the halves and depend only on the number of prompts and their length,
so the order of sums does not depend on the number of processes. Streams, queries, keys and samples of all prompts wait in
files (`probes.run.spool`); memory holds what one chunk needs.

Definitions, names and sources are those of `probes.leakage`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...errors import InputError
from ...models.view import Attention, View
from ...run import processes
from ...run.memory import trim
from ...run.precision import double, precise
from ...run.progress import Progress, Tally
from ...run.spool import Spool
from ...run.store import Piece, Store
from ..attention import by_layer, diagonals, normalizers, pairs

TOKENS_AT_ONCE = 2048  # of prompts run through a block together: a chunk
LOGITS_AT_ONCE = 1 << 21  # of prompts, heads and keys: 8 MiB in float32, near the cache
LEAST_PROMPTS = 4  # two in each half, or no prompt has a deviation of its own
LEAST_ROWS = 16  # queries whose logits are held for all prompts of a half; where fewer fit they are made again

Band = tuple[int, int]  # first and last query


@dataclass(frozen=True)
class Samples:
    """One block and some prompts of one half, prompt by prompt, at all queries of the bands."""

    logits: Float[Tensor, "prompt head lag query"]  # s_{i, i-lag}
    normalizer: Float[Tensor, "prompt head query"]  # log Z_i
    of_mask: Float[Tensor, "prompt head query"]  # log Z~_i
    # The same by what stands at position 0, with what the prompt adds to it, to first order, through the means that all
    # prompts are shifted by (`E s_ij - t`; of a constant logit, its distance from the band's mean): mean 0.
    moved_mask: Float[Tensor, "prompt head query"]  # Toeplitz logits, as at all other keys
    moved_sink: Float[Tensor, "prompt head query"]  # its own logits
    moved_constant: Float[Tensor, "prompt head band query"]  # logits with a constant mean over the band


@dataclass(frozen=True)
class Half:
    """What the prompts of a half have in common in one block, and how to read their samples."""

    shift: Float[Tensor, "head lag query"]  # t(lag) - E s_{i, i-lag}: added to a prompt's logits it makes them s~
    normalizer: Float[Tensor, "head query"]  # E log Z_i
    of_mask: Float[Tensor, "head query"]  # E log Z~_i
    chunks: Sequence[Samples]


@dataclass(frozen=True)
class Sampled:
    """The samples of one block, whose first query is `first`."""

    first: int
    halves: tuple[Half, ...]


class Read(Sequence[Any]):
    """A sequence whose entries are made when they are asked for."""

    def __init__(self, numbers: range, read: Callable[[int], Any]) -> None:
        self._numbers, self._read = numbers, read

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, n: Any) -> Any:
        return self._read(self._numbers[n])


# ---------------------------------------------------------------------------------------------------- block by block


def halves_of(count: int) -> tuple[slice, slice]:
    """The two halves of the prompts."""
    return slice(0, count // 2), slice(count // 2, count)


def chunks_of(count: int, length: int) -> tuple[list[slice], ...]:
    """The prompts that are run together, half by half."""
    size = max(1, TOKENS_AT_ONCE // length)
    return tuple(
        [slice(start, min(start + size, half.stop)) for start in range(half.start, half.stop, size)]
        for half in halves_of(count)
    )


def by_block(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    bands: Sequence[Band],
    lags: Sequence[int],
    summed_up: Callable[[Sampled], dict[str, Tensor]],
    progress: Progress | None = None,
    *,
    pieces: Store,
) -> list[Piece]:
    """`summed_up` of every block's samples; all prompts run through a block before the next.

    Each process runs a share of the chunks and hands queries, keys and log-sum-exps of a block to one process, which
    makes the block's samples. Processes take turns.
    """
    report = Tally(progress, model.spec.blocks)

    def measured(shares: Sequence[Sequence[int]]) -> Iterator[tuple[int, Piece]]:
        owner = {layer: process for process, share in enumerate(shares) for layer in share}
        if not owner:
            return
        rounds = sorted(owner)[len(shares) - 1 :: len(shares)]  # after these blocks everybody has one
        with ExitStack() as ends:
            streams, held, aside = (
                ends.enter_context(closing(Spool.beside(model.device, pieces.folder))) for _ in range(3)
            )
            gathered, mine = _Gathered(model, tokens, streams, held), None
            for layer, attentions in by_layer(model, streams):
                if layer in owner and gathered.take(attentions, owner[layer]):
                    mine = layer
                last = layer == max(owner)
                if mine is not None and (layer in rounds or last):
                    sampled = samples_of(gathered.halves(), bands, lags, aside)
                    trim()
                    made = {name: x.cpu().numpy() for name, x in summed_up(sampled).items()}
                    aside.clear()
                    yield mine, made
                    mine = None
                report()
                if last:
                    return

    found = list(pieces.shared("leakage", model.spec.blocks, measured))
    report.finish()
    return found


GIVEN = ("query", "key", "normalizer")  # what is gathered of an attention


class _Gathered:
    """The attention of one block on all prompts, in the process that samples it."""

    def __init__(self, model: View, tokens: Int[Tensor, "prompt position"], streams: Spool, held: Spool) -> None:
        """Embed this process's chunks into `streams`; what is gathered later goes to `held`."""
        halves = chunks_of(*tokens.shape)
        chunks = [chunk for half in halves for chunk in half]
        count, self._first = processes.count(), len(halves[0])
        self._shares = [range(len(chunks) * r // count, len(chunks) * (r + 1) // count) for r in range(count)]
        self._own, self._held = self._shares[processes.number()], held
        for n in self._own or [0]:  # one without a share has something to go through the blocks with
            streams[n] = torch.cat([model.embed(prompt[None]) for prompt in tokens[chunks[n]]])
        self._like: Attention | None = None

    def take(self, attentions: Iterator[Attention], to: int) -> bool:
        """Hand what this process has of a block to process `to`; whether this is the one."""
        receiving = processes.number() == to
        if receiving:
            self._held.clear()
        attention: Attention | None = None
        for turn in range(max(map(len, self._shares))):
            attention = next(attentions, attention)
            assert attention is not None
            count = len(attention.query) if turn < len(self._own) else 0
            for name, tensor in zip(GIVEN, (attention.query, attention.key, normalizers(attention)), strict=True):
                parts = processes.handed(tensor[:count], to)
                for share, part in zip(self._shares, parts or (), strict=parts is not None):
                    if turn < len(share):
                        self._held[share[turn], name] = part
            if receiving:
                nothing = {name: getattr(attention, name)[:0] for name in ("query", "key", "value")}
                self._like = replace(attention, **nothing, normalizer=None)
        return receiving

    def halves(self) -> list[Sequence[Attention]]:
        """The chunks of each half."""
        last = self._shares[-1].stop
        return [Read(range(self._first), self._read), Read(range(self._first, last), self._read)]

    def _read(self, n: int) -> Attention:
        assert self._like is not None
        given = {name: self._held[n, name] for name in GIVEN}
        nothing = given["query"].new_full((1,), float("nan"))  # values, which nothing needs
        return replace(self._like, **given, value=nothing.expand(len(given["query"]), *self._like.value.shape[1:]))


# ---------------------------------------------------------------------------------------------------- one block


def samples_of(
    halves: Sequence[Sequence[Attention]], bands: Sequence[Band], lags: Sequence[int], aside: Spool
) -> Sampled:
    """The samples of one block from the attention of its prompts, chunk by chunk of each half; they are put `aside`."""
    first = min(a for a, _ in bands)
    return Sampled(first, tuple(_half(half, n, bands, lags, aside) for n, half in enumerate(halves)))


def _half(attentions: Sequence[Attention], half: int, bands: Sequence[Band], lags: Sequence[int], aside: Spool) -> Half:
    """The samples of one half's prompts, of all queries from the first band's to the last's."""
    first, stop = min(a for a, _ in bands), max(b for _, b in bands) + 1
    trim()
    means = {name: _Mean() for name in ("means", "log_z", "logits", "sink")}
    sizes = []
    for n, attention in enumerate(attentions):
        sizes.append(len(attention.query))
        found = {
            "means": _lag_means(attention),
            "log_z": double(normalizers(attention)[..., first:stop]),
            "logits": double(diagonals(attention, lags)[..., first:stop]),
            "sink": double(pairs(attention, range(first, stop), [0] * (stop - first))),  # of position 0
        }
        for name, values in found.items():
            means[name].add(values)
            aside[half, n, name] = values
    t = means["means"].value  # [head, lag]
    blocks, held = blocks_of(sizes, len(t), first, stop)
    steady = Steady.of(means["sink"].value, t, bands, first)
    of_mask = [_toeplitz(attentions, half, at, steady, aside, held=held) for at in blocks]

    def samples(n: int) -> Samples:
        def read(what: str, name: str | int) -> Tensor:
            known = [name if name == "mask" or name in steady.rows(*at) else "sink" for at in blocks]
            return torch.cat([aside[half, n, what, one, at[0]] for one, at in zip(known, blocks, strict=True)], -1)

        constant = torch.stack([read("moved", band) for band in range(len(bands))], 2)
        moved = (read("moved", "mask"), read("moved", "sink"), constant)
        return Samples(aside[half, n, "logits"], aside[half, n, "log_z"], read("log_z", "mask"), *moved)

    shift = t[:, torch.tensor(lags, device=t.device), None] - means["logits"].value
    return Half(shift, means["log_z"].value, torch.cat(of_mask, -1), Read(range(len(sizes)), samples))


@dataclass(frozen=True)
class Steady:
    """Position 0's mean logit as it would be without position in any stream: Toeplitz or not, plus a constant of the band.

    For each head and band the mean over prompts E s_i0 becomes b t(i) + constant, b = 0 or 1, whichever is nearer to it.
    """

    first: int  # query
    mean: Float[Tensor, "head query"]  # E s_i0; minus infinity where a window hides position 0
    t: Float[Tensor, "head lag"]
    seen: Sequence[slice]  # of each band: its queries that see position 0, counted from `first`
    toeplitz: Float[Tensor, "band head"]  # b

    @classmethod
    def of(cls, mean: Float[Tensor, "head query"], t: Tensor, bands: Sequence[Band], first: int) -> Steady:
        sees = int(torch.isfinite(mean[0]).sum())  # a window hides it from the later queries
        seen = [slice(a - first, max(a - first, min(b + 1 - first, sees))) for a, b in bands]
        nothing = mean.new_zeros(len(bands), len(mean))
        # The shift to a constant, and the one to Toeplitz: the smaller one is nearer.
        plain, toeplitz = (cls(first, mean, t, seen, nothing + b) for b in (0, 1))
        spreads = ([one.shift(n, t, mean).pow(2).sum(-1) for n in range(len(bands))] for one in (toeplitz, plain))
        return cls(first, mean, t, seen, torch.stack([a < b for a, b in zip(*spreads, strict=True)]).to(mean))

    def shift(self, band: Any, t: Float[Tensor, "*some head lag"], mean: Float[Tensor, "*some head query"]) -> Tensor:
        """What is added to a logit of mean `mean` at the band's queries that see position 0, [*some, head, query]."""
        at, b = self.seen[band], self.toeplitz[band][:, None]
        away = mean[..., at] - b * t[..., self.first + at.start : self.first + at.stop]
        return away.sum(-1, keepdim=True) / max(1, away.shape[-1]) - away

    def rows(self, start: int, end: int) -> dict[int | str, tuple[slice, slice]]:
        """By band: its queries from `start` to `end` that see position 0, counted from `start`, and from its own first."""
        found = {}
        for band, at in enumerate(self.seen):
            own = self.first + at.start
            low, high = max(own, start), min(self.first + at.stop, end)
            if low < high:
                found[band] = slice(low - start, high - start), slice(low - own, high - own)
        return found


def blocks_of(sizes: Sequence[int], heads: int, first: int, stop: int) -> tuple[list[tuple[int, int]], bool]:
    """(start, end) of the queries taken together, and whether the logits of all chunks (prompts in each) are held.

    They are held as long as that leaves enough queries at once. Otherwise each chunk's logits are computed three times.
    """
    held = LOGITS_AT_ONCE // (sum(sizes) * heads * stop)
    alone = max(1, LOGITS_AT_ONCE // (max(sizes) * heads * stop))
    rows = held if held >= min(LEAST_ROWS, alone) else alone
    return [(start, min(start + rows, stop)) for start in range(first, stop, rows)], rows == held


def _toeplitz(
    attentions: Sequence[Attention], half: int, at: tuple[int, int], steady: Steady, aside: Spool, *, held: bool
) -> Float[Tensor, "head query"]:
    """log Z~ at some queries, as it is and moved, by what stands at position 0; the mean over prompts of the mask's.

    That is: its own logits ("sink"), Toeplitz ones ("mask"), or constant ones of a band that sees it (the band's number).
    """
    (start, end), t = at, steady.t

    @lru_cache(maxsize=None if held else 0)
    def logits(n: int) -> Float[Tensor, "prompt head query key"]:
        return attentions[n].logits(start, end)

    mean_of_logits, mean_of_mask = _Mean(), _Mean()
    for n in range(len(attentions)):
        mean_of_logits.add(logits(n))
    mean = mean_of_logits.value
    left, device = end - mean.shape[-1], mean.device
    distance = (torch.arange(start, end)[:, None] - torch.arange(left, end)[None, :]).clamp_min(0).to(device)
    # A hidden entry stays hidden: minus infinity and a finite shift. Its own mean is no number, so it has none.
    hidden = torch.isinf(mean[0])
    shift = (t[:, distance] - mean).masked_fill_(hidden, 0)
    bands = steady.rows(start, end)
    towards = {band: steady.shift(band, t, steady.mean)[:, own] for band, (_, own) in bands.items()}
    weights: dict[str | int, _Mean] = {name: _Mean() for name in ("sink", "mask", *bands)}
    for n in range(len(attentions)):
        block = logits(n)
        made = block + shift.to(block)
        others = made[..., 1 if left == 0 else 0 :].logsumexp(-1)
        if (learned := attentions[n].sink) is not None:  # one more term, the same for all queries
            others = torch.logaddexp(others, learned.to(others)[:, None])
        for name, weight in weights.items():
            log_z, by_key = others, made
            if left == 0:
                own = (made if name == "mask" else block)[..., 0]
                log_z, by_key = torch.logaddexp(others, own), made.clone()
                by_key[..., 0] = own
            if name in bands:
                rows, _ = bands[name]
                level = block[..., rows, 0] + towards[name].to(block)
                log_z[..., rows] = torch.logaddexp(others[..., rows], level)
                by_key[..., rows, 0] = level
            aside[half, n, "log_z", name, start] = double(log_z)
            weight.add((by_key - log_z[..., None]).exp_())
            if name == "mask":
                mean_of_mask.add(double(log_z))
    for n in range(len(attentions)):
        block = logits(n)
        moved = aside[half, n, "means"] - t
        added = moved.to(block)[..., distance] - (block - mean.to(block)).masked_fill_(hidden.to(block.device), 0)
        for name, weight in weights.items():
            changed = added
            if left == 0 and name != "mask":
                changed = added.clone()
                changed[..., 0] = 0  # of its own logits nothing is shifted
                if name in bands:
                    rows, own = bands[name]
                    away = steady.shift(name, moved, aside[half, n, "sink"] - steady.mean)
                    changed[..., rows, 0] = away[..., own].to(block)
            through = double((weight.value.to(block) * changed).sum(-1))
            aside[half, n, "moved", name, start] = aside[half, n, "log_z", name, start] + through
    return mean_of_mask.value


class _Mean:
    """A mean over prompts, added chunk by chunk, in double precision."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._count = 0

    def add(self, values: Tensor) -> None:
        """Of [prompt, ...]."""
        own = double(values.sum(0))
        self._sum = own if self._sum is None else self._sum.add_(own)
        self._count += len(values)

    @property
    def value(self) -> Tensor:
        assert self._sum is not None
        return self._sum / self._count


def _lag_means(attention: Attention) -> Float[Tensor, "prompt head lag"]:
    """Each prompt's mean logit over all queries and keys other than 0, for every lag below T; `t(lag)` is their mean.

    The longest lags have one pair or none; those without any take the last one that has.
    """
    count, heads, length, _ = attention.query.shape
    device = attention.query.device
    sums = torch.zeros(count, heads, length, dtype=torch.float64, device=precise(device))
    counts = torch.zeros(length, dtype=torch.float64, device=precise(device))
    step = max(1, LOGITS_AT_ONCE // (count * heads * length))
    for start in range(1, length, step):
        end = min(start + step, length)
        left = attention.first_key(start)
        block = attention.logits(start, end)  # [prompt, head, query, key]
        seen = torch.isfinite(block[0, 0]) & (torch.arange(left, end, device=device) > 0)
        ahead = end - 1 - start  # diagonals of lags below 0
        by_lag = _diagonal_sums(double(block.masked_fill_(~seen, 0)))[..., ahead:]
        sums[..., : by_lag.shape[-1]] += by_lag
        counts[: by_lag.shape[-1]] += _diagonal_sums(double(seen))[ahead:]
    if not counts.any():
        raise InputError("attention scores are not finite; check the model's weights, or use dtype float32 or float64")
    longest = int(counts.nonzero().max())
    means = sums / counts.clamp_min(1)
    means[..., longest + 1 :] = means[..., longest : longest + 1]
    return means


def _diagonal_sums(block: Float[Tensor, "*some query key"]) -> Float[Tensor, "*some diagonal"]:
    """Sums along diagonals, from the last column of the first row to the first column of the last row.

    Columns turned round and rows shifted by their number, by reading them with a row length of one less: a diagonal becomes
    a column, and its sum has the same order on every device.
    """
    rows, columns = block.shape[-2:]
    width = rows + columns - 1
    turned = torch.nn.functional.pad(block.flip(-1), (0, width + 1 - columns))  # [..., rows, width + 1]
    return turned.flatten(-2)[..., : rows * width].unflatten(-1, (rows, width)).sum(-2)
