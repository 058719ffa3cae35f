"""What the sink is worth to a cache: next-token loss and KL divergence with the first s and the last w keys alone.

For every s and w, and both numberings of positions (`probes.models.evict`), against the model with all keys, in nats, means
over the positions i from 1 on but the last:

- `evict_loss_change`: change of `-log p` of the token at i + 1; `evict_loss_before` is the loss with all keys.
- `evict_kl`: `KL(p_i || p'_i)` of the next token.

Positions whose cache has lost something, i >= s + w ("cut"), are kept apart from those before ("whole"), where both are 0
but for rounding. Intervals (95 %) are jackknifed over documents. Where no key is evicted, s + w >= T, nothing is run.

Costs about a plain forward pass for each s, w and numbering, with next-token logits at every position.

Source: [Xiao], arXiv 2309.17453.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from numbers import Integral
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...errors import InputError
from ...models.evict import evicted, fixed
from ...models.view import Spec, View
from ...run.memory import Retry
from ...run.store import Piece, Store
from ..consequences import check_losses, compared

KEEP = (64, 128, 256)  # last keys, unless told; of shorter prompts, those below their length
NUMBERINGS = ("text", "cache")
CACHES = ("whole", "cut")
DIMS = ("first_keys", "last_keys", "numbering", "cache")
NAMES = ("evict_loss_before", "evict_loss_change", "evict_kl")


def check_evict(evict: Any, keep: Any, length: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of first and of last keys; none of either where nothing is asked for.

    Raises:
        InputError: no whole numbers, one given twice, fewer than 0 first or 1 last, as many last keys as a prompt has.
    """
    if evict is None:
        if keep is not None:
            raise InputError(f"keep={_told(keep)} has no use without evict; say how many first keys are kept")
        return (), ()
    first = _checked("evict", evict, 0, length)
    if keep is not None:
        return first, _checked("keep", keep, 1, length)
    if not (usual := tuple(one for one in KEEP if one < length)):
        raise InputError(f"prompts of {length} positions lose no key with the usual {KEEP[0]} kept; give keep")
    return first, usual


def _checked(name: str, given: Any, least: int, length: int) -> tuple[int, ...]:
    each = tuple(given) if isinstance(given, (tuple, list, range, np.ndarray)) else (given,)
    for one in each:
        if isinstance(one, bool) or not isinstance(one, Integral) or int(one) < least:
            raise InputError(f"{name}={one} cannot be kept; give whole numbers of keys, {least} or more")
        if int(one) >= length:
            raise InputError(f"{name}={one} evicts nothing from prompts of {length} positions; give fewer keys")
    if not each or len(set(each)) < len(each):
        raise InputError(f"{name}={_told(given)} names {'a number twice' if each else 'none'}; give each once")
    return tuple(int(one) for one in each)


def _told(given: Any) -> str:
    return ",".join(map(str, given)) if isinstance(given, (tuple, list, range, np.ndarray)) else str(given)


def parse_counts(text: str, name: str, example: str) -> tuple[int, ...]:
    """Read numbers of keys from the command line, as in "0,1,4".

    Raises:
        InputError: something else.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"{name} '{text:.60}' is no list of numbers of keys; give them as in {example}") from None


Kept: TypeAlias = tuple[int, int, bool]  # first and last keys, and whether positions are numbered by the cache


def planned(spec: Spec, length: int, first: Sequence[int], last: Sequence[int]) -> dict[tuple[int, ...], Kept | None]:
    """What is run, by its place along the first three of `DIMS`; None is the model as it is, where nothing is evicted.

    Without first keys both numberings are the same. Places that are missing cannot be measured.
    """
    count, found = 2 if fixed(spec, length) is None else 1, dict[tuple[int, ...], Kept | None]()
    for (a, s), (b, w), c in product(enumerate(first), enumerate(last), range(count)):
        found[a, b, c] = (s, w, bool(c and s)) if s + w < length else None
    return found


def evict_passes(model: View, prompts: int, length: int, evict: Any = None, keep: Any = None, **_: Any) -> float:
    """Forward passes that this takes, about; 0 where it is not asked for."""
    plan = planned(model.spec, length, *check_evict(evict, keep, length))
    return prompts * float(len({*plan.values(), None})) if plan else 0.0


def evictions(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    first: Sequence[int],
    last: Sequence[int],
    retry: Retry,
    report: Callable[[float], Any],
    expect: Callable[[float], None],
    pieces: Store,
) -> dict[str, Float[np.ndarray, "prompt first_keys last_keys numbering cache"]]:
    """Variables by the names in `NAMES`, of every prompt; NaN where there is no such position or numbering.

    Args:
        model: any view that takes edits of logits; it is not changed.
        tokens: the prompts.
        first, last: numbers of keys that are kept.
        retry: goes on in smaller blocks of queries where memory runs out.
        report: hears how many forward passes of a prompt were done.
        expect: hears before how many there will be in this process.
        pieces: keeps what each prompt gave.
    """
    length = tokens.shape[1]
    plan = planned(model.spec, length, first, last)
    rows = {kept: row for row, kept in enumerate(dict.fromkeys([None, *plan.values()]))}
    views = [model if kept is None else evicted(model, kept[0], kept[1], renumbered=kept[2]) for kept in rows]

    @torch.no_grad()
    def measured(n: int) -> Piece:
        one = tokens[n : n + 1]

        def run(view: View) -> Tensor:
            normed = view.norm(view.residual(view.embed(one)))[0]
            report(1.0)
            return normed

        loss, kl = retry(lambda: compared(model, [run(view) for view in views], one[0]))
        return {"loss": loss, "kl": kl}

    def before(share: Iterable[int]) -> None:
        expect(float(len(list(share)) * len(views)))

    by_prompt = pieces.each("evict", len(tokens), measured, before=before)
    loss, kl = by_prompt.stacked("loss"), by_prompt.stacked("kl")  # [prompt, row, predicted]
    check_losses(model, loss)
    found = {name: np.full((len(tokens), len(first), len(last), 2, 2), np.nan) for name in NAMES}
    at = np.arange(length - 1)
    for (a, b, c), kept in plan.items():
        cut, row = at >= first[a] + last[b], rows[kept]
        for d, chosen in enumerate(((at >= 1) & ~cut, (at >= 1) & cut)):
            own, other = loss[:, 0, chosen], loss[:, row, chosen]
            known = ~np.isnan(own + other)
            with np.errstate(invalid="ignore"):  # no such position
                for name, values in (("loss_before", own), ("loss_change", other - own), ("kl", kl[:, row, chosen])):
                    there = known if name != "kl" else np.ones_like(known)
                    found[f"evict_{name}"][:, a, b, c, d] = np.where(there, values, 0).sum(-1) / there.sum(-1)
    return found
