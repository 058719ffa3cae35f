"""What the sink is worth to a cache: next-token loss and KL divergence with the first s and the last w keys alone.

For every s and w, and both numberings of positions (`probes.models.evict`), against the model with all keys, in nats, means
over the positions i from 1 on but the last:

- `evict_loss_change`: change of `-log p` of the token at i + 1; `evict_loss_before` is the loss with all keys.
- `evict_kl`: `KL(p_i || p'_i)` of the next token.

Positions whose cache has lost something, i >= s + w ("cut"), are kept apart from those before ("whole"), where both are 0
but for rounding. Intervals (95 %) are jackknifed over documents. Where no key is evicted, s + w >= T, nothing is run.

Source: [Xiao], arXiv 2309.17453.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...models.evict import evicted, fixed
from ...models.view import View
from ...run.memory import Retry
from ...run.store import Piece, Store
from ..consequences import check_losses, compared, known_mean

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

    @torch.no_grad()
    def measured(n: int) -> Piece:
        def run(view: View) -> Tensor:
            report(model.spec.blocks)
            return view.norm(view.residual(view.embed(tokens[n : n + 1])))[0]

        loss, kl = retry(lambda: compared(model, [run(view) for view in views], tokens[n, 1:]))
        return {"loss": loss, "kl": kl}

    by_prompt = pieces.each("evict", len(tokens), measured)
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
