"""Heads that write nothing, and attention whose sink is taken away or held: views that every probe can be run on.

`ablated` answers "what if head 18.8 were not there?". `reweighed` acts on what a head's softmax makes of its logits s_ij, to
tell what position 0 is for: `log Z_i = log sum_j exp(s_ij)` depends on the query's position through the number of keys, and
position 0's own term steadies it.

Sources: science of the measurement, sections 9 and 12; [Ruscio], arXiv 2606.06160, whose referees asked for the isolation of
log Z.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import InputError
from ..run.memory import batches
from ..run.precision import double, precise
from .checks import check_tokens
from .edited import Change, Edited
from .fused import query_blocks
from .load import takes_model
from .view import Attention, Edit, Reweigh, View

How: TypeAlias = Literal["zero", "mean"]
Weights: TypeAlias = Literal["without-0", "without-value-0", "constant-sink", "held-log-z"]
WITHOUT: tuple[Weights, ...] = ("without-0", "without-value-0")  # what needs no means
Head: TypeAlias = tuple[int, int]  # (layer, head)
TINY = 1e-12  # of what is divided by


@takes_model
def ablated(
    model: View, heads: Sequence[Head], how: How = "zero", *, reference: Int[Tensor, "prompt position"] | None = None
) -> Edited:
    """The same model without what some heads write, as a view that every probe can be run on.

    The heads still attend: what a probe says of such a head itself (`probes.sinks`) is what it would write.

    Args:
        model: any view; it is not changed.
        heads: (block, head) of each, counted from 0.
        how: "zero": the head's output `sum_j A_ij v_j` is 0; "mean": it is the mean over `reference`, at position 0 and over
            the positions behind it.
        reference: prompts that the mean is taken over.

    Raises:
        InputError: no such head or way, a head given twice, or no prompts to take a mean over.
    """
    if how not in get_args(How):
        raise InputError(f"how '{how}' is unknown; give {', '.join(get_args(How))}")
    by_layer = _by_layer(model, heads)
    if how == "mean":
        check_reference(model, reference)

    def edits(model: View, means: Any, embeddings: Tensor) -> list[Edit]:
        if how == "zero":
            return [Edit("output", layer, partial(_put, at, 0.0)) for layer, at in by_layer.items()]
        places = ((1, None), (0, 0))  # behind position 0, then at it
        return [
            Edit("output", layer, partial(_put, at, means[layer][n, at]), position)
            for layer, at in by_layer.items()
            for n, position in places
        ]

    said = f"{_named(by_layer)} {how}"
    return Edited(model, Change(said, edits, lambda model: _outputs(model, by_layer, reference, how)))


def _by_layer(model: View, heads: Sequence[Head]) -> dict[int, list[int]]:
    """Heads by their block."""
    chosen = [(int(layer), int(head)) for layer, head in heads]
    blocks, count = model.spec.blocks, model.spec.heads
    for layer, head in chosen:
        if not (0 <= layer < blocks and 0 <= head < count):
            raise InputError(
                f"head {layer}.{head} does not exist; {model.identity.name} has blocks 0 to {blocks - 1} with heads 0 to "
                f"{count - 1}"
            )
    if not chosen:
        raise InputError("heads name none; give some, as in 18.8,26.2")
    if twice := [f"{layer}.{head}" for layer, head in chosen if chosen.count((layer, head)) > 1]:
        raise InputError(f"head {twice[0]} is named twice; give each once, as in 18.8,26.2")
    return {layer: [head for at, head in chosen if at == layer] for layer, _ in chosen}


def _named(by_layer: Mapping[int, Sequence[int]]) -> str:
    return " ".join(f"{layer}.{head}" for layer, heads in by_layer.items() for head in heads)


def _outputs(model: View, layers: Any, reference: Tensor | None, how: How) -> dict[int, Tensor]:
    """Mean outputs of every head at position 0 and behind it, [2, H, 1, c], by block."""
    if how != "mean" or reference is None:
        return {}
    sums: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    def add(layer: int, output: Float[Tensor, "row head position c"]) -> Tensor:
        sums[layer].append(double(torch.stack([output[:, :, 0], output[:, :, 1:].mean(2)], 1)))
        return output

    edits = [Edit("output", layer, partial(add, layer)) for layer in sums]
    for some in batches(range(len(reference)), model, reference.shape[1]):
        model.residual(model.embed(reference[some]), edits=edits)
    return {layer: torch.cat(found).mean(0)[:, :, None] for layer, found in sums.items()}


def _put(heads: list[int], value: Tensor | float, output: Float[Tensor, "batch head position c"]) -> Tensor:
    changed = output.clone()
    changed[:, heads] = value.to(output) if isinstance(value, Tensor) else value
    return changed


def _of_0(queries: Tensor, keys: Tensor) -> Tensor:
    """Where a later query meets key 0."""
    return (keys == 0) & (queries > 0)


def parse_heads(value: str) -> tuple[Head, ...]:
    """Read "18.8,26.2", blocks and heads."""
    heads = []
    for part in value.split(","):
        if (written := re.fullmatch(r" *([0-9]{1,6})\.([0-9]{1,6}) *", part)) is None:
            raise InputError(f"heads '{value}' are not written BLOCK.HEAD; give them as in 18.8,26.2")
        heads.append((int(written[1]), int(written[2])))
    return tuple(heads)


def check_reference(model: View, reference: Tensor | None) -> None:
    if reference is None:
        raise InputError("means are taken over prompts; give reference=probes.prompts(model)")
    check_tokens(model, reference)


# ------------------------------------------------------------------------------------------------------------- weights


@takes_model
def reweighed(
    model: View,
    how: Weights,
    *,
    layer: int = 0,
    heads: Sequence[Head] | None = None,
    reference: Int[Tensor, "prompt position"] | None = None,
) -> Edited:
    """The same model with other attention weights in all heads from a block on, as a view that every probe can be run on.

    Query 0, which sees itself alone, keeps its weight. A learned sink logit (gpt-oss) counts as one of a query's logits: it
    takes its share of what key 0 loses, and is in `log Z_i`.

    Args:
        model: any view; it is not changed.
        how: "without-0": no later query sees key 0, the other keys share its weight. "without-value-0": later queries keep
            all their weights, and that on key 0 gives nothing, `A_i0 v_0` = 0; weights then sum to `1 - A_i0`.
            "constant-sink": key 0's logit is its mean over queries, as a learned sink logit would be. "held-log-z":
            `log Z_i` loses its trend, a straight line through its mean in the log of the number of keys that i sees, and
            keeps what texts make of it; weights then no longer sum to 1.
        layer: the first block that is changed.
        heads: (block, head) of those that are changed, of these blocks; all unless given.
        reference: prompts that means are taken over, of each head by itself.

    Raises:
        InputError: no such way, block or head, or no prompts to take means over.
    """
    if how not in get_args(Weights):
        raise InputError(f"how '{how}' is unknown; give {', '.join(get_args(Weights))}")
    if not 0 <= layer < model.spec.blocks:
        raise InputError(f"layer={layer} does not exist; the model has blocks 0 to {model.spec.blocks - 1}")
    if how not in WITHOUT:
        check_reference(model, reference)
    chosen = None if heads is None else _by_layer(model, heads)
    layers = [n for n in range(layer, model.spec.blocks) if chosen is None or n in chosen]
    change: Any = {"constant-sink": _constant_sink, "held-log-z": _held}.get(how, _without_0)

    def edits(model: View, means: Any, embeddings: Tensor) -> list[Edit]:
        of_layer = {n: partial(change, *((how == "without-0",) if means is None else means[n])) for n in layers}
        if chosen is not None:
            numbers = torch.arange(model.spec.heads)[:, None, None]
            picked = {n: torch.isin(numbers, torch.tensor(chosen[n])).to(model.device) for n in layers}
            of_layer = {n: partial(_of_heads, picked[n], function) for n, function in of_layer.items()}
        return [Edit("logits", n, function) for n, function in of_layer.items()]

    given = None if how in WITHOUT else reference
    said = f"{how} from block {layer}" if chosen is None else f"{how} in {_named(chosen)} from block {layer}"
    return Edited(model, Change(said, edits, lambda model: None if given is None else _means(model, how, given)))


def _means(model: View, how: Weights, reference: Tensor) -> dict[int, tuple[Any, ...]]:
    """Of every head [H, 1, 1], by block, over the queries from 1 on: the mean of s_i0.

    For "held-log-z", the slope of log Z_i by the log of the number of keys that i sees, that log's mean, and the window.
    """
    sums: dict[int, list[Tensor]] = {}
    keys = torch.arange(2, reference.shape[1] + 1, dtype=torch.float64, device=precise(model.device))
    x = [keys.clamp(1, window).log() for window in model.spec.windows]  # by which log Z_i grows

    def watch(layer: int, attention: Attention) -> None:
        rows = []
        for start, stop in query_blocks(attention):
            logits, log_z = attention.weighed(start, stop)
            first = logits[..., :1] if attention.first_key(start) == 0 else torch.full_like(log_z, float("-inf"))
            rows.append((log_z if how == "held-log-z" else first)[..., 0])
        every = double(torch.cat(rows, 2)[..., 1:])  # [prompt, H, query]
        if how == "held-log-z":
            centred = x[layer] - x[layer].mean()
            mean = (every @ centred) / centred.square().sum().clamp_min(TINY)
        else:
            seen = torch.isfinite(every)  # behind a window nobody sees key 0
            mean = every.where(seen, 0).sum(-1) / seen.sum(-1).clamp_min(1)
        sums.setdefault(layer, []).append(mean)

    with model.watching(watch):
        for some in batches(range(len(reference)), model, reference.shape[1]):
            model.residual(model.embed(reference[some]))
    means = {layer: torch.cat(found).mean(0)[:, None, None] for layer, found in sums.items()}
    more = [(float(x.mean()), window) for x, window in zip(x, model.spec.windows, strict=True)]
    return {layer: (mean, *more[layer]) if how == "held-log-z" else (mean,) for layer, mean in means.items()}


def _of_heads(
    chosen: Tensor, change: Reweigh, logits: Tensor, log_z: Tensor, queries: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor]:
    """A change of some heads alone, `chosen` [H, 1, 1]."""
    changed, new = change(logits, log_z, queries, keys)
    chosen = chosen.to(logits.device)  # blocks may lie on several
    return torch.where(chosen, changed, logits), torch.where(chosen, new, log_z)


def _without_0(anew: bool, logits: Tensor, log_z: Tensor, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Key 0 has no weight; the others share it `anew`, or it is gone. Query 0, which sees key 0 alone, keeps it."""
    logits = logits.masked_fill(_of_0(queries, keys), float("-inf"))
    return logits, logits.logsumexp(-1, keepdim=True) if anew else log_z


def _constant_sink(
    level: Tensor, logits: Tensor, log_z: Tensor, queries: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor]:
    seen = _of_0(queries, keys) & torch.isfinite(logits)
    logits = torch.where(seen, level.to(logits), logits)
    return logits, logits.logsumexp(-1, keepdim=True)


def _held(
    slope: Tensor, middle: float, window: int | None, logits: Tensor, log_z: Tensor, queries: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor]:
    trend = slope.to(log_z) * ((queries.to(log_z) + 1).clamp(1, window).log() - middle)
    return logits, torch.where(queries > 0, log_z - trend, log_z)
