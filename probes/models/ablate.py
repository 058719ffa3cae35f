"""Heads that write nothing, and attention whose sink is taken away, taken apart or held: views that every probe runs on.

`ablated` answers "what if head 18.8 were not there?". `reweighed` acts on what a head's softmax makes of its logits s_ij, to
tell what a key is for: `log Z_i = log sum_j exp(s_ij)` depends on the query's position through the number of keys, and
position 0's own term steadies it. A query reads `A_i0 v_0 + (1 - A_i0) o_i`, o_i what it would read without key 0: a sink is
a *bias*, the first term, and a *brake* on the second.

Sources: science of the measurement, sections 9, 12 and 18; [Ruscio], arXiv 2606.06160, whose referees asked for the
isolation of log Z.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import InputError
from ..run.memory import batches
from ..run.precision import double
from .checks import check_tokens
from .edited import Change, Edited
from .load import takes_model
from .view import Edit, Reweigh, View

How: TypeAlias = Literal["zero", "mean"]
Head: TypeAlias = tuple[int, int]  # (layer, head)
Group: TypeAlias = Literal["sinks", "others"]
WAYS = ("without-0", "without-value-0", "released", "gain", "constant-sink", "held-log-z", "unmasked")
EVERY_KEY = 1 << 31  # a prefix longer than any text
SINK = 0.3  # mean weight on a key above which it is a head's sink; [Gu]'s eps
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
    """Heads by their block.

    Raises:
        InputError: none, one twice, or one that does not exist.
    """
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


def check_reference(model: View, reference: Tensor | None) -> None:
    if reference is None:
        raise InputError("means are taken over prompts; give reference=probes.prompts(model), or bos-swap --replace")
    check_tokens(model, reference)


# ------------------------------------------------------------------------------------------------------------- weights


@takes_model
def reweighed(
    model: View,
    how: str,
    *,
    layer: int = 0,
    heads: Sequence[Head] | Group | None = None,
    factor: float | None = None,
    reference: Int[Tensor, "prompt position"] | None = None,
) -> Edited:
    """The same model with other attention weights in all heads from a block on, as a view that every probe can be run on.

    Queries up to the key keep their weights. A learned sink logit (gpt-oss) counts as one of a query's logits: it takes its
    share of what a key loses, and is in `log Z_i`.

    Args:
        model: any view; it is not changed.
        how: of a key, as its number in the name says, 0 where there is none. "without-0": no later query sees it, the other
            keys share its weight. "without-value-0": later queries keep all their weights, and that on the key gives
            nothing; weights then sum to `1 - A_i0`. "released": its brake is off; the other keys have the weights that they
            would have without it, and it keeps its own, so that weights sum to `1 + A_i0`. "gain": weights on other keys
            times a constant. Of key 0: "constant-sink": its logit is its mean over queries, as a learned sink logit would
            be. "held-log-z": `log Z_i` loses its trend, a straight line through its mean in the log of the number of keys
            that i sees, and keeps what texts make of it; weights then no longer sum to 1. "unmasked": all
            queries see all keys, without causal mask or windows, in all blocks and heads; "unmasked-N": all see the first N
            keys, and behind these what they did. That is foreign to a causal model.
        layer: the first block that is changed.
        heads: (block, head) of those that are changed, of these blocks; "sinks", heads whose mean weight on the key is above
            0.3, or "others"; all unless given.
        factor: of "gain"; unless given, one for each head, with which the weights on its other keys sum to 1 on average over
            queries, as they do at every query under "released".
        reference: prompts that means are taken over, of each head by itself.

    Raises:
        InputError: no such way, block or head, a factor that is not positive, or no prompts to take means over.
    """
    written = WAY.fullmatch(how)
    if written is None:
        raise InputError(f"how '{how}' is unknown; give {', '.join(WAYS)}")
    if written[3]:
        if layer or heads is not None:
            raise InputError("unmasked is of all blocks and heads; give it without a block and a group")
        prefix = int(written[4] or EVERY_KEY)
        masks = [Edit("mask", n, lambda length: min(prefix, length)) for n in range(model.spec.blocks)]
        return Edited(model, Change(how, lambda model, prepared, embeddings: masks, prefix=prefix))
    if not 0 <= layer < model.spec.blocks:
        raise InputError(f"layer={layer} does not exist; the model has blocks 0 to {model.spec.blocks - 1}")
    if factor is not None and not 0 < factor < math.inf:
        raise InputError(f"factor={factor:g} is out of range; give a positive number")
    way, key = written[1] or how, int(written[2] or 0)
    means = way in MEANS and factor is None
    if means or isinstance(heads, str):
        check_reference(model, reference)
    chosen = None if heads is None or isinstance(heads, str) else _by_layer(model, heads)
    layers = [n for n in range(layer, model.spec.blocks) if chosen is None or n in chosen]
    change = partial(CHANGES[way], key)

    def prepared(model: View) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """What the change takes besides, and which heads [H, 1, 1] it is of, by block."""
        known: dict[int, Tensor] = {}
        if means and reference is not None:
            known = MEANS[way](model, key, reference)
        elif factor is not None:
            known = dict.fromkeys(layers, torch.tensor(math.log(factor), dtype=torch.float64))
        if chosen is not None:
            numbers = torch.arange(model.spec.heads)[:, None, None]
            return known, {n: torch.isin(numbers, torch.tensor(chosen[n])) for n in layers}
        if heads is None or reference is None:
            return known, {}
        weights = _means(model, reference, lambda n, s, log_z, i, j: _weight(key, s, log_z, i, j))
        return known, {n: (weight > SINK) == (heads == "sinks") for n, weight in weights.items()}

    def edits(model: View, prepared: Any, embeddings: Tensor) -> list[Edit]:
        known, of = prepared
        of_layer = {n: partial(change, *([known[n]] if known else [])) for n in layers}
        return [Edit("logits", n, partial(_of_heads, of[n], f) if of else f) for n, f in of_layer.items()]

    named = _named(chosen) if chosen else heads
    where = f"from block {layer}" if heads is None else f"in {named} from block {layer}"
    said = how if factor is None else f"{how} {factor:g}"
    return Edited(model, Change(f"{said} {where}", edits, prepared))


def _means(model: View, reference: Tensor, of: Callable[..., Tensor]) -> dict[int, Float[Tensor, "head one one"]]:
    """Of every head, by block, means over queries from 1 on of `of(block, logits, log_z, queries, keys)` [B, H, query, 1].

    Where that is minus infinity it does not count: behind a window nobody sees key 0.
    """
    sums: dict[int, Tensor] = {}

    def watch(layer: int, logits: Tensor, log_z: Tensor, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        values = double(of(layer, logits, log_z, queries, keys))
        seen = torch.isfinite(values) & (queries > 0).to(values.device)
        both = torch.stack([values.where(seen, 0).sum((0, 2)), seen.sum((0, 2)).to(values)])
        sums[layer] = both if layer not in sums else sums[layer] + both
        return logits, log_z

    edits = [Edit("logits", layer, partial(watch, layer)) for layer in range(model.spec.blocks)]
    for some in batches(range(len(reference)), model, reference.shape[1]):
        model.residual(model.embed(reference[some]), edits=edits)
    return {layer: (total / count.clamp_min(1))[:, None] for layer, (total, count) in sums.items()}


def _levels(model: View, key: int, reference: Tensor) -> dict[int, Tensor]:
    """Mean logits of the key."""
    return _means(model, reference, lambda n, logits, log_z, i, j: _alone(key, logits, i, j))


def _weight(key: int, logits: Tensor, log_z: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Later queries' weights on the key, 0 where a window hides it."""
    return (_alone(key, logits, queries, keys) - log_z).exp().where(queries > key, -math.inf)


def _gains(model: View, key: int, reference: Tensor) -> dict[int, Tensor]:
    """`-log` of the mean of `1 - A_i0` over all later queries, as a gain is of all: 0 where a window hides the key."""

    def left(n: int, logits: Tensor, log_z: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (_others(key, logits, i, j) - log_z).exp().where(i > key, -math.inf)

    return {n: -mean.clamp_min(TINY).log() for n, mean in _means(model, reference, left).items()}


def _trends(model: View, key: int, reference: Tensor) -> dict[int, Tensor]:
    """[3, H, 1, 1]: slopes of log Z_i by the log of the number of keys that i sees, that log's mean, the most keys seen."""
    found = {}
    for layer, window in enumerate(model.spec.windows):
        x = torch.arange(2, reference.shape[1] + 1, dtype=torch.float64).clamp(1, window).log()
        found[layer] = [float(x.mean()), math.inf if window is None else float(window), float(x.var(correction=0))]

    def along(layer: int, logits: Tensor, log_z: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        middle, most, spread = found[layer]
        return double(log_z) * ((double(queries) + 1).clamp(1, most).log() - middle) / max(spread, TINY)

    slopes = _means(model, reference, along)
    return {n: torch.stack([slope, *(torch.full_like(slope, x) for x in found[n][:2])]) for n, slope in slopes.items()}


def _of_heads(
    chosen: Tensor, change: Reweigh, logits: Tensor, log_z: Tensor, queries: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor]:
    """A change of some heads alone, `chosen` [H, 1, 1]."""
    changed, new = change(logits, log_z, queries, keys)
    chosen = chosen.to(logits.device)  # blocks may lie on several
    return torch.where(chosen, changed, logits), torch.where(chosen, new, log_z)


def _of_key(key: int, queries: Tensor, keys: Tensor) -> Tensor:
    """Where a later query meets the key."""
    return (keys == key) & (queries > key)


def _alone(key: int, logits: Tensor, queries: Tensor, keys: Tensor) -> Float[Tensor, "batch head query one"]:
    """The key's own logits; minus infinity where a query does not see it."""
    return logits.masked_fill(~_of_key(key, queries, keys), -math.inf).logsumexp(-1, keepdim=True)


def _others(key: int, logits: Tensor, queries: Tensor, keys: Tensor) -> Float[Tensor, "batch head query one"]:
    """The log-sum-exp without the key, never by way of `1 - A_i0`, which is 0 in float32 where a head parks."""
    return logits.masked_fill(_of_key(key, queries, keys), -math.inf).logsumexp(-1, keepdim=True)


def _without(key: int, logits: Tensor, log_z: Tensor, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    logits, log_z = _without_value(key, logits, log_z, queries, keys)
    return logits, torch.where(queries > key, logits.logsumexp(-1, keepdim=True), log_z)


def _without_value(key: int, logits: Tensor, log_z: Tensor, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    return logits.masked_fill(_of_key(key, queries, keys), -math.inf), log_z


def _released(key: int, logits: Tensor, log_z: Tensor, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    others = torch.where(queries > key, _others(key, logits, queries, keys), log_z)
    return torch.where(_of_key(key, queries, keys), logits + (others - log_z), logits), others


def _gained(
    key: int, level: Tensor, logits: Tensor, log_z: Tensor, queries: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.where((keys != key) & (queries > key), logits + level.to(logits), logits), log_z


def _constant_sink(
    key: int, level: Tensor, logits: Tensor, log_z: Tensor, queries: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor]:
    seen = _of_key(key, queries, keys) & torch.isfinite(logits)
    logits = torch.where(seen, level.to(logits), logits)
    return logits, logits.logsumexp(-1, keepdim=True)


def _held(
    key: int, line: Tensor, logits: Tensor, log_z: Tensor, queries: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor]:
    slope, middle, most = line.to(log_z)
    trend = slope * (torch.minimum(queries.to(log_z) + 1, most).log() - middle)
    return logits, torch.where(queries > key, log_z - trend, log_z)


# Of which key a way is says the number behind its name.
WAY = re.compile(
    r"(without|without-value|released|gain)(?:-([0-9]{1,7}))?|constant-sink|held-log-z|(unmasked)(?:-([1-9][0-9]{0,6}))?"
)
CHANGES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "without": _without,
    "without-value": _without_value,
    "released": _released,
    "gain": _gained,
    "constant-sink": _constant_sink,
    "held-log-z": _held,
}
MEANS = {"gain": _gains, "constant-sink": _levels, "held-log-z": _trends}
