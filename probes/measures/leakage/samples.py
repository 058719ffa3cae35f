"""What leakage needs of attention: a block's logits of all prompts, made Toeplitz in the mean.

All prompts go through one block before the next, a chunk at a time, because means over half of the prompts are subtracted
from each prompt's logits. Their streams, and queries and keys of one block, wait in files (`probes.run.memory.aside`). A few
heads of a block are read and sampled together: memory holds their queries and keys, and patterns of a few prompts.

Definitions, names and sources are those of `probes.leakage`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from ...errors import InputError
from ...models.view import Attention, View
from ...run.memory import aside
from ...run.precision import double, total
from ..attention import normalizers, part_of

TOKENS_AT_ONCE = 2048  # of prompts run through a block together: a chunk
LOGITS_AT_ONCE = 1 << 21  # of prompts, heads, queries and keys: 8 MiB in float32
LEAST_PROMPTS = 4  # two in each half, or no prompt has a deviation of its own
HELD = ("query", "key", "normalizer")  # what is put aside of a block's attention

Band = tuple[int, int]  # first and last query


# ---------------------------------------------------------------------------------------------------- block by block


def halves_of(count: int) -> tuple[slice, slice]:
    """The two halves of the prompts."""
    return slice(0, count // 2), slice(count // 2, count)


class Course:
    """All prompts on their way through the blocks, in chunks that lie within the halves.

    Args:
        model: any view.
        tokens: the prompts.
        folder: where their streams, and one block's attention, wait in files.
    """

    def __init__(self, model: View, tokens: Int[Tensor, "prompt position"], folder: Path | None) -> None:
        self._model, self._folder = model, folder
        self._streams, self._held = dict[tuple[int, int], Tensor](), dict[Any, Tensor]()
        size = max(1, TOKENS_AT_ONCE // tokens.shape[1])
        for half, prompts in enumerate(halves_of(len(tokens))):
            for n, chunk in enumerate(tokens[prompts].split(size)):
                self._streams[half, n] = aside(torch.cat([model.embed(prompt[None]) for prompt in chunk]), folder)
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


def sampled(attention: Attention, lag_means: Float[Tensor, "prompt head lag"], band: Band, lags: Sequence[int]) -> Half:
    """The samples of the attention of a half's prompts; its `lag_means` are those of `lag_means_of`."""
    first, stop, device = band[0], band[1] + 1, lag_means.device
    queries, (count, heads) = torch.arange(first, stop), attention.query.shape[:2]
    size = max(1, LOGITS_AT_ONCE // (heads * len(queries) * stop))
    together = [slice(n, n + size) for n in range(0, count, size)]

    def rows(some: slice) -> Float[Tensor, "prompt head query key"]:
        """Logits of some prompts against keys from 0 on, which a window may hide."""
        block = part_of(attention, prompts=some).logits(first, stop)
        return functional.pad(block, (attention.first_key(first), 0), value=float("-inf"))

    at_lags = (queries - first, queries - torch.tensor(lags)[:, None])
    t = lag_means.mean(0)  # [head, lag]
    mean: Any = sum(total(rows(some), 0) for some in together) / count  # [head, query, key]
    lagged = torch.cat([double(rows(some)[..., *at_lags]) for some in together])
    hidden = torch.isinf(mean[0])
    distance = (queries[:, None] - torch.arange(stop)).clamp_min(0).to(device)
    # A hidden entry stays hidden: minus infinity and a finite shift.
    shift = (t[:, distance] - mean).masked_fill_(hidden, 0)
    # Position 0's mean logit without position in any stream: b t(i) plus a constant, b = 0 or 1, whichever is nearer to it.
    own_t, hides = t[:, first:stop], hidden[:, 0]
    flat, toeplitz = (_steadied(mean[..., 0], b * own_t, hides).square().sum(-1, keepdim=True) for b in (0, 1))
    b = (toeplitz < flat).to(t)
    constant = _steadied(mean[..., 0], b * own_t, hides)
    by = {"mask": shift[..., 0], "sink": torch.zeros_like(shift[..., 0]), "constant": constant}

    log_z: dict[str, list[Tensor]] = {name: [] for name in by}
    patterns: dict[str, Any] = dict.fromkeys(by, 0)  # means over prompts
    for some in together:
        block = rows(some)
        made = (block + shift.to(block))[..., 1:]
        rest = made.logsumexp(-1)
        if attention.sink is not None:  # a learned logit: one more term, the same for all queries
            rest = torch.logaddexp(rest, attention.sink.to(rest)[:, None])
        for name, moved in by.items():
            own = block[..., 0] + moved.to(block)
            z = torch.logaddexp(rest, own)
            log_z[name].append(double(z))
            patterns[name] += total((torch.cat([own[..., None], made], -1) - z[..., None]).exp_(), 0) / count
    moved_z: dict[str, list[Tensor]] = {name: [] for name in by}
    for n, some in enumerate(together):
        block, moved = rows(some), lag_means[some] - t
        away = (block - mean.to(block)).masked_fill_(hidden.to(block.device), 0)
        added = moved.to(block)[..., distance] - away
        constant = _steadied(double(away[..., 0]), b * moved[..., first:stop], hides).to(block)
        for name, own in {"mask": added[..., 0], "sink": 0 * added[..., 0], "constant": constant}.items():
            weights = patterns[name].to(block)
            through = (weights[..., 1:] * added[..., 1:]).sum(-1) + weights[..., 0] * own
            moved_z[name].append(log_z[name][n] + double(through))
    return Half(
        shift=t[:, torch.tensor(lags, device=device), None] - lagged.mean(0),
        logits=lagged,
        normalizer=double(normalizers(attention)[..., first:stop]),
        of_mask=torch.cat(log_z["mask"]),
        **{f"moved_{name}": torch.cat(parts) for name, parts in moved_z.items()},
    )


def _steadied(
    mean: Float[Tensor, "*some head query"], t: Float[Tensor, "*some head query"], hidden: Bool[Tensor, " query"]
) -> Tensor:
    """What is added to a logit on position 0 of this mean to make it t(i) plus a constant of the band, [*some, head, query].

    0 at queries that do not see position 0.
    """
    away = (mean - t).masked_fill(hidden, 0)
    return (away.sum(-1, keepdim=True) / (~hidden).sum().clamp_min(1) - away).masked_fill(hidden, 0)


def lag_means_of(attention: Attention) -> Float[Tensor, "prompt head lag"]:
    """Each prompt's mean logit over all queries and keys other than 0, for every lag below T; `t(lag)` is their mean.

    The longest lags have one pair or none; those without any take the last one that has.
    """
    count, heads, length, _ = attention.query.shape
    size, means = max(1, LOGITS_AT_ONCE // (heads * length**2)), []
    for n in range(0, count, size):
        block = part_of(attention, prompts=slice(n, n + size)).logits()  # [prompt, head, query, key]
        seen = torch.isfinite(block[0, 0])
        seen[:, 0] = False
        pairs_of_lag = _diagonal_sums(double(seen))
        if not pairs_of_lag.any():
            raise InputError(
                "attention scores are not finite; check the model's weights, or use dtype float32 or float64"
            )
        of_lags = _diagonal_sums(double(block.masked_fill_(~seen, 0))) / pairs_of_lag.clamp_min(1)
        longest = int(pairs_of_lag.nonzero().max())
        of_lags[..., longest + 1 :] = of_lags[..., longest : longest + 1]
        means.append(of_lags)
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
