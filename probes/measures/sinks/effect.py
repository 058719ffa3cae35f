"""What a head's reading of position 0 does: the next token's distribution with exactly the term `A_i0 v_0 W_O` removed.

What is removed and what the numbers are stands on the measure's page (`docs/probes/sinks.md`): of one head (`effects`), of
all heads of a group at once (`joint`), and of what caches lose (`evictions`).

Of one head: one pass keeps a prompt's streams. Heads are a batch that runs through the blocks and grows: each head joins it
with the stream that its block reads. The mean head costs half a pass, and next-token logits at every position.

All of that in float32, on a GPU, too: in TF32 `loss_change` would be 1e-4 nats off (SmolLM2, TF32 imitated on a CPU), and
effects of 1e-3 are looked at.

Positions whose cache has lost something, i >= s + w ("cut"), are kept apart from those before ("whole"), where changes are 0
but for rounding. Where no key is evicted, s + w >= T, nothing is run.

Sources: [Xiao], arXiv 2309.17453 (caches); Holm, Scandinavian Journal of Statistics 6 (1979), 65.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...models.ablate import reweighed
from ...models.checks import not_finite
from ...models.evict import evicted, fixed
from ...models.view import Attention, Edit, View
from ...run.memory import Retry, batches, prompts_at_once, share_of
from ...run.store import Piece, Store
from ..attention import columns
from ..consequences import check_losses, compared, known_mean
from .roles import ATTENDS

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
    """`effect` and `loss_change` of these heads (layer, head) on every prompt, NaN of all others.

    Their terms are removed one at a time; `report` hears how many blocks were run.
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


# What is removed of a group's reading, and the name by which `reweighed` knows it.
REMOVED = {"value": "without-value-0", "value and weight": "without-0"}
GROUPS = ("sink heads", "other heads")


def joint(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    attends: Float[np.ndarray, "layer head"],
    retry: Retry,
    report: Callable[[int], Any],
    pieces: Store,
) -> dict[str, np.ndarray]:
    """`joint_loss_change` and `joint_kl` [prompt, group, removed], and `group_heads` [group], how many there are.

    NaN of a group without heads. Arguments are those of `effects`; `attends` are weights on position 0.
    """
    sink = attends > ATTENDS
    groups = [[(int(layer), int(head)) for layer, head in np.argwhere(some)] for some in (sink, ~sink)]
    places = [(a, b) for a, b in product(range(len(GROUPS)), range(len(REMOVED))) if groups[a]]
    ways = tuple(REMOVED.values())
    views = [model, *(reweighed(model, ways[b], heads=groups[a]) for a, b in places)]
    loss, kl = _of_views("joint", views, tokens, retry, report, pieces)
    found = {
        f"joint_{name}": np.full((len(tokens), len(GROUPS), len(REMOVED)), np.nan) for name in ("loss_change", "kl")
    }
    for n, place in enumerate(places, 1):
        found["joint_loss_change"][:, *place] = known_mean(loss[:, n, 1:] - loss[:, 0, 1:])
        found["joint_kl"][:, *place] = known_mean(kl[:, n, 1:])
    return found | {"group_heads": np.array([len(some) for some in groups])}


def _of_views(
    stage: str,
    views: Sequence[View],
    tokens: Int[Tensor, "prompt position"],
    retry: Retry,
    report: Callable[[int], Any],
    pieces: Store,
) -> tuple[Float[np.ndarray, "prompt view predicted"], Float[np.ndarray, "prompt view predicted"]]:
    """Losses of the next token, and its divergence from that of the first view, which is the model as it is."""
    model, length = views[0], tokens.shape[1]
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
    by_prompt = pieces.together(stage, len(tokens), lambda some: retry(lambda: measured(some)), at_once)
    loss = by_prompt.stacked("loss")
    check_losses(model, loss)
    return loss, by_prompt.stacked("kl")


KEEP = (64, 128, 256)  # last keys, unless told; of shorter prompts, those below their length
NUMBERINGS = ("text", "cache")
CACHES = ("whole", "cut")
DIMS = ("first_keys", "last_keys", "numbering", "cache")


class Cache(NamedTuple):
    """First and last keys, whether positions are numbered by the cache, and whether it keeps the value of key 0."""

    first: int
    last: int
    renumbered: bool
    value_0: bool = True


def caches(
    model: View, length: int, first: Sequence[int], last: Sequence[int]
) -> dict[tuple[str, tuple[int, ...]], Cache]:
    """Each cache by the name of its variables and its place along their dimensions but the last.

    Without first keys both numberings are the same. Places that are missing cannot be measured.
    """
    numberings = range(2 if fixed(model.spec, length) is None else 1)
    kept = {
        ("evict", (a, b, c)): Cache(s, w, bool(c and s))
        for (a, s), (b, w), c in product(enumerate(first), enumerate(last), numberings)
    }
    lone = product(enumerate(last), numberings) if 1 in first else ()
    return kept | {("evict_value", (b, c)): Cache(1, w, bool(c), value_0=False) for (b, w), c in lone}


def losing(kept: Iterable[Cache], length: int) -> list[Cache]:
    """Each of them once that loses something of a prompt."""
    return list(dict.fromkeys(one for one in kept if one.first + one.last < length))


def evictions(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    first: Sequence[int],
    last: Sequence[int],
    retry: Retry,
    report: Callable[[int], Any],
    pieces: Store,
) -> dict[str, Float[np.ndarray, "prompt ... last_keys numbering cache"]]:
    """`evict_...` [prompt, first_keys, last_keys, numbering, cache], and of the value alone without `first_keys`.

    NaN where there is no such position or numbering. Arguments are those of `effects`, and numbers of keys that are kept.
    """
    places = caches(model, tokens.shape[1], first, last)
    rows = losing(places.values(), tokens.shape[1])
    views = [evicted(model, one.first, one.last, renumbered=one.renumbered, value_0=one.value_0) for one in rows]
    loss, kl = _of_views("evict", [model, *views], tokens, retry, report, pieces)
    at, found = np.arange(loss.shape[2]), dict[str, np.ndarray]()
    sizes = {"evict": (len(first), len(last), 2, 2), "evict_value": (len(last), 2, 2)}
    for (name, place), kept in places.items():
        row, cut = rows.index(kept) + 1 if kept in rows else 0, at >= kept.first + kept.last
        values = {"loss_change": loss[:, row] - loss[:, 0], "kl": kl[:, row]}
        values |= {"loss_before": loss[:, 0]} if name == "evict" else {}
        for (what, each), (d, chosen) in product(values.items(), enumerate((~cut, cut))):
            whole = found.setdefault(f"{name}_{what}", np.full((len(tokens), *sizes[name]), np.nan))
            whole[:, *place, d] = known_mean(each[:, chosen & (at >= 1)])
    return found
