"""What leakage needs of attention: a block's logits of all prompts, made Toeplitz in the mean.

All prompts go through one block before the next, a chunk at a time, because means over half of the prompts are subtracted
from each prompt's logits. Their streams, and queries and keys of one block, wait in files, or on a GPU that has room for
them (`probes.run.memory.aside`). A few heads of a block are read and sampled together: memory holds their queries and keys,
and patterns of a few prompts; of all of them where a device has memory of its own.

Definitions, names and sources are those of `probes.leakage`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from ...models.view import Attention, View
from ...run.memory import CPU_NUMBERS, aside, prompts_at_once
from ...run.precision import double, total
from ..attention import normalizers, part_of

TOKENS_AT_ONCE = 2048  # of prompts run through a block together, a chunk, on a processor
LEAST_PROMPTS = 4  # two in each half, or no prompt has a deviation of its own
HELD = ("query", "key", "normalizer")  # what is put aside of a block's attention

Band = tuple[int, int]  # first and last query


# ---------------------------------------------------------------------------------------------------- block by block


def halves_of(count: int) -> tuple[slice, slice]:
    """The two halves of the prompts."""
    return slice(0, count // 2), slice(count // 2, count)


class Course:
    """All prompts on their way through the blocks, in chunks that lie within the halves; what waits lies in `folder`."""

    def __init__(self, model: View, tokens: Int[Tensor, "prompt position"], folder: Path | None) -> None:
        self._model, self._folder = model, folder
        self._streams, self._held = dict[tuple[int, int], Tensor](), dict[Any, Tensor]()
        length = tokens.shape[1]
        size = max(1, TOKENS_AT_ONCE // length, prompts_at_once(model, length))
        for half, prompts in enumerate(halves_of(len(tokens))):
            for n, chunk in enumerate(tokens[prompts].split(size)):
                self._streams[half, n] = aside(model.embed(chunk), folder)
        first = model.embed(tokens[:1])
        self._device, self._blocks = first.device, model.trace(first).blocks

    @torch.no_grad()
    def through(self, layer: int) -> Iterator[tuple[tuple[int, int], Attention]]:
        """Run a chunk after the other through a block, watched whoever needs it: kernels differ in their last digits."""
        seen, device = list[Attention](), self._device
        for at in list(self._streams):
            with self._model.watching(lambda _, attention: seen.append(attention)):
                stream = self._blocks[layer](self._streams[at].to(device))
            self._streams[at], self._device = aside(stream, self._folder), stream.device
            yield at, seen.pop()

    @torch.no_grad()
    def attention(self, layer: int, size: int) -> Iterator[list[Attention]]:
        """Run all prompts through a block; then its attention by half, of so many heads after the other, without values.

        Edits of logits take all heads.
        """
        self._held.clear()
        last: list[Attention] = []
        for at, attention in self.through(layer):
            attention = replace(attention, normalizer=normalizers(attention), output=None)
            for name in HELD:
                self._held[at, name] = aside(getattr(attention, name), self._folder)
            last = [attention]
        count = last[0].query.shape[1]
        step = count if last[0].reweigh else size
        for heads in (slice(start, start + step) for start in range(0, count, step)):
            yield [self._of_half(half, heads, part_of(last[0], heads=heads)) for half in (0, 1)]

    def _of_half(self, half: int, heads: slice, like: Attention) -> Attention:
        chunks, device = [at for at in self._streams if at[0] == half], like.query.device
        parts = {name: torch.cat([self._held[at, name][:, heads].to(device) for at in chunks]) for name in HELD}
        nothing = parts["key"].new_full((1,), float("nan"))  # cannot be mistaken for a value
        return replace(like, **parts, value=nothing.expand_as(parts["key"]))


# ---------------------------------------------------------------------------------------------------- one half


@dataclass(frozen=True)
class Half:
    """One block's samples of the prompts of a half, at the queries of a band."""

    shift: Float[Tensor, "head lag query"]  # t(lag) - E s_{i, i-lag}: added to a prompt's logits it makes them s~
    logits: Float[Tensor, "prompt head lag query"]  # s_{i, i-lag}
    normalizer: Float[Tensor, "prompt head query"]  # log Z_i
    of_mask: Float[Tensor, "prompt head query"]  # log Z~_i
    # The same by what stands at position 0, with what the prompt adds to it, to first order, through the means that all
    # prompts are shifted by (`E s_ij - t`; of a constant logit, its distance from the band's mean): mean 0.
    moved_mask: Float[Tensor, "prompt head query"]  # Toeplitz logits, as at all other keys
    moved_sink: Float[Tensor, "prompt head query"]  # its own logits
    moved_constant: Float[Tensor, "prompt head query"]  # logits with a constant mean over the band


def sampled(
    attention: Attention,
    lag_means: Float[Tensor, "prompt head distance"],
    band: Band,
    lags: Int[Tensor, " lag"],
    numbers: int = CPU_NUMBERS,
) -> Half:
    """The samples of the attention of a half's prompts; its `lag_means` are those of `lag_means_of`.

    Nothing here is read by the host, and `lags` lie on the attention's device.

    Args:
        numbers: logits that are held at once, of prompts, heads, queries and keys.
    """
    first, stop, device, place = band[0], band[1] + 1, lag_means.device, attention.query.device
    queries, (count, heads) = torch.arange(first, stop, device=place), attention.query.shape[:2]
    size = max(1, numbers // (heads * len(queries) * stop))
    together = [slice(n, n + size) for n in range(0, count, size)]

    def made(some: slice) -> Float[Tensor, "prompt head query key"]:
        """Logits of some prompts against keys from 0 on, which a window may hide; later keys than the band's left out."""
        block = part_of(attention, prompts=some).logits(first, stop)[..., : stop - attention.first_key(first)]
        return functional.pad(block, (attention.first_key(first), 0), value=float("-inf"))

    whole = made(together[0]) if len(together) == 1 else None  # what fits into one block is made once
    at_lags = (queries - first, queries - lags[:, None])
    t = lag_means.mean(0)  # [head, lag]
    mean: Any = 0  # [head, query, key]
    lagged: Any = []
    for some in together:
        block = made(some) if whole is None else whole
        mean = mean + total(block, 0)
        lagged.append(double(block[..., *at_lags]))
    mean, lagged = mean / count, torch.cat(lagged)
    hidden = torch.isinf(mean[0])
    distance = (queries[:, None] - torch.arange(stop, device=place)).clamp_min(0).to(device)
    # A hidden entry stays hidden: minus infinity and a finite shift.
    shift = (t[:, distance] - mean).masked_fill_(hidden, 0)
    # Position 0's mean logit without position in any stream: b t(i) plus a constant, b = 0 or 1, whichever is nearer to it.
    own_t, hides = t[:, first:stop], hidden[:, 0]
    steady = _steadied(mean[..., 0], torch.stack([torch.zeros_like(own_t), own_t]), hides)
    flat, toeplitz = steady.square().sum(-1, keepdim=True)
    b = toeplitz < flat
    constant = torch.where(b, steady[1], steady[0])
    # By what is added to the logits on position 0: of the mask alone, their own, with a constant mean.
    by = torch.stack([shift[..., 0], torch.zeros_like(constant), constant])[:, None]  # [what, one, head, query]

    log_z: list[Tensor] = []
    patterns: list[Any] = [0] * len(by)  # means over prompts
    for some in together:
        block = made(some) if whole is None else whole
        rows = block + shift.to(block)
        rest = rows[..., 1:].logsumexp(-1)
        if attention.sink is not None:  # a learned logit: one more term, the same for all queries
            rest = torch.logaddexp(rest, attention.sink.to(rest)[:, None])
        own = block[..., 0] + by.to(block)
        z = torch.logaddexp(rest, own)
        log_z.append(double(z))
        for n, (on_first, of_all) in enumerate(zip(own, z, strict=True)):
            rows[..., 0] = on_first
            patterns[n] += total((rows - of_all[..., None]).exp_(), 0) / count
    moved_z: list[Tensor] = []
    for n, some in enumerate(together):
        block, moved = made(some) if whole is None else whole, lag_means[some] - t
        away = (block - mean.to(block)).masked_fill_(hidden.to(block.device), 0)
        added = moved.to(block)[..., distance] - away
        constant = _steadied(double(away[..., 0]), b * moved[..., first:stop], hides).to(block)
        through: list[Tensor] = []
        for pattern, own in zip(patterns, (added[..., 0], 0 * constant, constant), strict=True):
            weights = pattern.to(block)
            through.append((weights[..., 1:] * added[..., 1:]).sum(-1) + weights[..., 0] * own)
        moved_z.append(log_z[n] + double(torch.stack(through)))
    moved_mask, moved_sink, moved_constant = torch.cat(moved_z, 1)
    return Half(
        shift=t[:, lags.to(device), None] - lagged.mean(0),
        logits=lagged,
        normalizer=double(normalizers(attention)[..., first:stop]),
        of_mask=torch.cat([z[0] for z in log_z]),
        moved_mask=moved_mask,
        moved_sink=moved_sink,
        moved_constant=moved_constant,
    )


def _steadied(
    mean: Float[Tensor, "*some head query"], t: Float[Tensor, "*more head query"], hidden: Bool[Tensor, " query"]
) -> Tensor:
    """What is added to a logit on position 0 of this mean to make it t(i) plus a constant of the band, [..., head, query].

    0 at queries that do not see position 0.
    """
    away = (mean - t).masked_fill(hidden, 0)
    return (away.sum(-1, keepdim=True) / (~hidden).sum().clamp_min(1) - away).masked_fill(hidden, 0)


def lag_means_of(attention: Attention, numbers: int = CPU_NUMBERS) -> Float[Tensor, "prompt head distance"]:
    """Each prompt's mean logit over all queries and keys other than 0, for every lag below T; `t(lag)` is their mean.

    The longest lags have one pair or none; those without any take the last one that has. `numbers` as in `sampled`.
    """
    count, heads, length, _ = attention.query.shape
    size, means = max(1, numbers // (heads * length**2)), []
    for n in range(0, count, size):
        block = part_of(attention, prompts=slice(n, n + size)).logits()  # [prompt, head, query, key]
        seen = torch.isfinite(block[0, 0])
        seen[:, 0] = False
        pairs_of_lag = _diagonal_sums(double(seen))
        of_lags = _diagonal_sums(double(block.masked_fill_(~seen, 0))) / pairs_of_lag.clamp_min(1)
        every = torch.arange(length, device=of_lags.device)
        longest = torch.where(pairs_of_lag > 0, every, 0).amax()
        means.append(of_lags[..., torch.minimum(every, longest)])
    return torch.cat(means)


def _diagonal_sums(block: Float[Tensor, "*some query key"]) -> Float[Tensor, "*some lag"]:
    """Sums along the diagonals of lags 0 to T - 1.

    Columns turned round and rows shifted by their number, by reading them with a row length of one less: a diagonal becomes
    a column, and its sum has the same order on every device.
    """
    length = block.shape[-1]
    width = 2 * length - 1
    turned = functional.pad(block.flip(-1), (0, length))  # [..., query, width + 1]
    return turned.flatten(-2)[..., : length * width].unflatten(-1, (length, width)).sum(-2)[..., length - 1 :]
