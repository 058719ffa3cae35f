"""What a head's reading of position 0 does: the next token's distribution with exactly the term `A_i0 v_0 W_O` removed.

Of one head, at all queries i >= 1 that see position 0, the rest of the block unchanged. What follows (the block's
feed-forward and later blocks, their patterns included) runs on the changed stream. Query 0 keeps what it writes, which makes
the stream at position 0 and does not read it. Compared with the model as it is, in nats:

- `effect`: `KL(p_i || p'_i)` of the next token, mean over the queries i >= 1.
- `loss_change`: change of `-log p` of the token that follows, mean over the queries i >= 1 but the last.

One pass keeps a prompt's streams. Heads are a batch that runs through the blocks and grows: each head joins it with the
stream that its block reads. The mean head costs half a pass, and next-token logits at every position.

All of it in float32, on a GPU, too: in TF32 `loss_change` would be 1e-4 nats off (SmolLM2, TF32 imitated on a CPU), and
effects of 1e-3 are looked at.

Source: science of the measurement, section 9, "Roles of heads at the sink".

What the sink is worth to a cache (`evictions`): next-token loss and KL divergence with the first s and last w keys alone.

For every s and w, and both numberings of positions (`probes.models.evict`), against the model with all keys, in nats, means
over the positions i from 1 on but the last:

- `evict_loss_change`: change of `-log p` of the token at i + 1; `evict_loss_before` is the loss with all keys.
- `evict_kl`: `KL(p_i || p'_i)` of the next token.

Positions whose cache has lost something, i >= s + w ("cut"), are kept apart from those before ("whole"), where both are 0
but for rounding. Intervals (95 %) are jackknifed over documents. Where no key is evicted, s + w >= T, nothing is run.

Source of this part: [Xiao], arXiv 2309.17453.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...models.checks import not_finite
from ...models.evict import evicted, fixed
from ...models.view import Attention, Edit, View
from ...run.memory import Retry, batches, prompts_at_once, share_of
from ...run.store import Piece, Store
from ..attention import columns
from ..consequences import check_losses, compared, known_mean

ROWS = 4096  # positions of heads in a batch, of a processor's; on a GPU there may be more
EFFECTS = ("effect", "loss_change")


def effects(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    heads: Sequence[tuple[int, int]],
    retry: Retry,
    report: Callable[[int], Any],
    pieces: Store,
) -> dict[str, Float[np.ndarray, "prompt layer head"]]:
    """`effect` and `loss_change` of these heads on every prompt, NaN of all others.

    Args:
        model: any view that takes edits of a head's output; it is not changed.
        tokens: the prompts.
        heads: (layer, head) whose terms are removed, one at a time.
        retry: goes on in smaller batches where memory runs out.
        report: hears how many blocks were run.
        pieces: keeps what each prompt gave.
    """
    ordered = sorted(heads)
    by_prompt = pieces.each(
        "effect", len(tokens), lambda n: retry(lambda: _of_prompt(model, tokens[n : n + 1], ordered, report))
    )
    found = {name: by_prompt.stacked(name) for name in EFFECTS}
    if not all(np.isfinite(found["effect"][:, layer, head]).all() for layer, head in heads):
        raise not_finite(model, "logits")
    return found


@torch.no_grad()
def _of_prompt(
    model: View, tokens: Int[Tensor, "one position"], heads: Sequence[tuple[int, int]], report: Callable[[int], Any]
) -> Piece:
    """Of heads in the order of their blocks."""
    blocks, length = model.spec.blocks, tokens.shape[1]
    found = {name: np.full((blocks, model.spec.heads), np.nan) for name in EFFECTS}
    layers, numbers = np.array(heads).T
    on_device = torch.from_numpy(numbers.copy()).to(model.device)
    terms: dict[int, Tensor] = {}  # `A_i0 v_0` of the queries i >= 1, by block, [H, T, c]
    removed = on_device[:0]  # a head for each of the batch's last rows; while there is none, nothing is removed

    def watch(layer: int, attention: Attention) -> None:
        weights = columns(attention, (0,))[0]  # [H, T, 1]
        weights[:, 0] = 0
        value = attention.value[0, :, :1]
        terms[layer] = (weights * value.to(weights.dtype)).to(value.dtype)

    def without(layer: int, output: Float[Tensor, "row head position c"]) -> Tensor:
        if count := len(removed):
            output = output.clone()
            rows = torch.arange(len(output) - count, len(output), device=output.device)
            output[rows, removed] -= terms[layer][removed]
        return output

    with model.watching(watch):
        edits = [Edit("output", layer, partial(without, layer)) for layer in range(blocks)]
        trace = model.trace(model.embed(tokens), edits=edits)
    report(blocks)
    start = 0
    while start < len(heads):
        size = max(share_of(max(1, ROWS // length)), prompts_at_once(model, length))
        batch = slice(start, min(start + size, len(heads)))
        stream = trace.residual[0][:0]
        for layer in range(layers[batch][0], blocks):
            own = slice(*np.searchsorted(layers, (layer, layer + 1)).clip(batch.start, batch.stop))
            if own.start < own.stop:
                stream = torch.cat([stream, trace.residual[layer].expand(own.stop - own.start, -1, -1)])
            removed = on_device[own]  # from this block alone
            stream = trace.blocks[layer](stream)
        removed = on_device[:0]
        normed = model.norm(torch.cat([trace.residual[-1], stream]))
        loss, kl = compared(model, normed, tokens[0].roll(-1))  # the last one's loss is left out
        found["effect"][layers[batch], numbers[batch]] = kl[1:, 1:].mean(1)
        found["loss_change"][layers[batch], numbers[batch]] = known_mean((loss[1:] - loss[0])[:, 1:-1])
        report(int((blocks - layers[batch]).sum()))
        start = batch.stop
    return found


KEEP = (64, 128, 256)  # last keys, unless told; of shorter prompts, those below their length
NUMBERINGS = ("text", "cache")
CACHES = ("whole", "cut")
DIMS = ("first_keys", "last_keys", "numbering", "cache")
NAMES = ("evict_loss_before", "evict_loss_change", "evict_kl")

Cache: TypeAlias = tuple[int, int, bool]  # first and last keys, and whether positions are numbered by the cache


def caches(
    model: View, length: int, first: Sequence[int], last: Sequence[int]
) -> dict[tuple[int, int, int], Cache | None]:
    """By its place along the first three of `DIMS`, each cache; None where it loses nothing.

    Without first keys both numberings are the same. Places that are missing cannot be measured.
    """
    numberings = range(2 if fixed(model.spec, length) is None else 1)
    return {
        (a, b, c): (s, w, bool(c and s)) if s + w < length else None
        for (a, s), (b, w), c in product(enumerate(first), enumerate(last), numberings)
    }


def evictions(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    first: Sequence[int],
    last: Sequence[int],
    retry: Retry,
    report: Callable[[int], Any],
    pieces: Store,
) -> dict[str, Float[np.ndarray, "prompt first_keys last_keys numbering cache"]]:
    """Variables by the names in `NAMES`, of every prompt; NaN where there is no such position or numbering.

    Args:
        model: any view that takes edits of logits; it is not changed.
        tokens: the prompts.
        first, last: numbers of keys that are kept.
        retry: goes on in smaller blocks of queries where memory runs out.
        report: hears how many blocks were run.
        pieces: keeps what each prompt gave.
    """
    places = caches(model, tokens.shape[1], first, last)
    rows = list(dict.fromkeys([None, *places.values()]))
    views = [model if kept is None else evicted(model, kept[0], kept[1], renumbered=kept[2]) for kept in rows]

    length = tokens.shape[1]
    beside = len(views) * length * model.spec.width

    @torch.no_grad()
    def measured(numbers: Sequence[int]) -> list[Piece]:
        found = []
        for some in batches(numbers, model, length, beside):
            normed = []
            for view in views:
                normed.append(view.norm(view.residual(view.embed(tokens[some])))[:, :-1].flatten(0, 1))
                report(len(some) * model.spec.blocks)
            loss, kl = compared(model, torch.stack(normed), tokens[some, 1:].flatten())
            each = (x.reshape(len(views), len(some), -1).swapaxes(0, 1) for x in (loss, kl))
            found += [{"loss": loss, "kl": kl} for loss, kl in zip(*each, strict=True)]
        return found

    at_once = prompts_at_once(model, length, beside)
    by_prompt = pieces.together("evict", len(tokens), lambda some: retry(lambda: measured(some)), at_once)
    loss, kl = by_prompt.stacked("loss"), by_prompt.stacked("kl")  # [prompt, row, predicted]
    check_losses(model, loss)
    found = {name: np.full((len(tokens), len(first), len(last), 2, 2), np.nan) for name in NAMES}
    at = np.arange(loss.shape[2])
    for (a, b, c), kept in places.items():
        row, cut = rows.index(kept), at >= first[a] + last[b]
        numbers = zip(NAMES, (loss[:, 0], loss[:, row] - loss[:, 0], kl[:, row]), strict=True)
        for (name, values), (d, chosen) in product(numbers, enumerate((~cut, cut))):
            found[name][:, a, b, c, d] = known_mean(values[:, chosen & (at >= 1)])
    return found
