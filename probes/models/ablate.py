"""Heads that write nothing, and attention whose sink is taken away or held: views that every probe can be run on.

`ablated` answers "what if head 18.8 were not there?". `reweighed` acts on what a head's softmax makes of its logits s_ij, to
tell what position 0 is for: `log Z_i = log sum_j exp(s_ij)` depends on the query's position through the number of keys, and
position 0's own term steadies it.

Sources: science of the measurement, sections 9 and 12; [Ruscio], arXiv 2606.06160, whose referees asked for the isolation of
log Z.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeAlias, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import InputError
from ..run.precision import double
from .checks import check_tokens
from .edited import Edited, unheard
from .fused import query_blocks
from .given import takes_model
from .view import Attention, Edit, View

How: TypeAlias = Literal["zero", "mean", "from position 0"]
Weights: TypeAlias = Literal["without 0", "constant sink", "held log Z", "equal log Z"]
Head: TypeAlias = tuple[int, int]  # (layer, head)
HOTTEST = 16.0  # the largest factor on a query's logits by which its log Z is made equal
HALVINGS, REFINED, STEPS = 8, 4, 12
FLAT = 1e-3  # of the deviation of a query's logits: a slope of log Z below it counts as 0
TINY = 1e-12  # of what is divided by


@dataclass(frozen=True)
class Heads:
    """A `Change` of what heads write; see `ablated`."""

    heads: tuple[Head, ...]
    how: How
    reference: Tensor | None
    made: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False, compare=False)  # means by block

    @property
    def said(self) -> str:
        """Which heads, and how."""
        return f"{' '.join(f'{layer}.{head}' for layer, head in self.heads)} {self.how}"

    def embedded(self, model: View, tokens: Int[Tensor, "batch position"]) -> None:
        """The model's own embeddings."""

    def edits(self, model: View, embeddings: Float[Tensor, "batch position d"]) -> list[Edit]:
        by_layer = {layer: [head for at, head in self.heads if at == layer] for layer, _ in self.heads}
        if self.how == "from position 0":
            return [Edit("logits", layer, partial(_without_term, own)) for layer, own in by_layer.items()]
        if self.how == "zero":
            return [Edit("output", layer, partial(_put, own, 0.0)) for layer, own in by_layer.items()]
        if not self.made:
            with unheard(model):
                self.made.update(self._means(model, by_layer))
        found = []
        for layer, own in by_layer.items():
            first, others = (mean[own] for mean in self.made[layer])
            found += [
                Edit("output", layer, partial(_put, own, others)),
                Edit("output", layer, partial(_put, own, first), 0),
            ]
        return found

    def on(self, fresh: View) -> Heads:
        return replace(self, made={})

    def _means(self, model: View, by_layer: dict[int, list[int]]) -> dict[int, tuple[Tensor, Tensor]]:
        """Mean outputs of every head at position 0 and at the others, [H, 1, c], by block."""
        assert self.reference is not None
        sums: dict[int, list[Tensor]] = {layer: [] for layer in by_layer}

        def add(layer: int, output: Float[Tensor, "one head position c"]) -> Tensor:
            sums[layer].append(double(torch.stack([output[0, :, 0], output[0, :, 1:].mean(1)])))
            return output

        for row in self.reference:
            model.residual(model.embed(row[None]), edits=[Edit("output", layer, partial(add, layer)) for layer in sums])
        means = {layer: torch.stack(found).mean(0)[:, :, None] for layer, found in sums.items()}
        return {layer: (mean[0], mean[1]) for layer, mean in means.items()}


def _put(heads: list[int], value: Tensor | float, output: Float[Tensor, "batch head position c"]) -> Tensor:
    changed = output.clone()
    changed[:, heads] = value.to(output) if isinstance(value, Tensor) else value
    return changed


def _without_term(
    heads: list[int], logits: Tensor, log_z: Tensor, queries: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor]:
    """`A_i0 v_0` gone, all other weights as they are; query 0, which makes position 0's stream, keeps it."""
    chosen = torch.zeros(logits.shape[1], 1, 1, dtype=torch.bool, device=logits.device)
    chosen[heads] = True
    return logits.masked_fill(chosen & _of_0(queries, keys), float("-inf")), log_z


def _of_0(queries: Tensor, keys: Tensor) -> Tensor:
    """Where a later query meets key 0."""
    return (keys == 0) & (queries > 0)


@takes_model
def ablated(
    model: View,
    heads: Sequence[Head],
    how: How = "zero",
    *,
    reference: Int[Tensor, "prompt position"] | None = None,
) -> Edited:
    """The same model without what some heads write, as a view that every probe can be run on.

    The heads still attend: what a probe says of such a head itself (`probes.sinks`) is what it would write.

    Args:
        model: any view; it is not changed.
        heads: (block, head) of each, counted from 0.
        how: "zero": the head's output `sum_j A_ij v_j` is 0; "mean": it is the mean over `reference`, at position 0 and over
            the positions behind it; "from position 0": of the queries from 1 on the term `A_i0 v_0` alone is 0.
        reference: prompts that the mean is taken over.

    Raises:
        InputError: no such head or way, a head given twice, or no prompts to take a mean over.
    """
    if how not in get_args(How):
        raise InputError(f"how '{how}' is unknown; give {', '.join(get_args(How))}")
    chosen = tuple((int(layer), int(head)) for layer, head in heads)
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
    if how == "mean":
        check_reference(model, reference)
    return Edited(model, Heads(chosen, how, reference))


def parse_heads(value: str) -> tuple[Head, ...]:
    """Read "18.8,26.2", blocks and heads.

    Raises:
        InputError: not written like that.
    """
    found = []
    for part in value.split(","):
        layer, dot, head = part.strip().partition(".")
        if not (dot and layer.isascii() and layer.isdigit() and head.isascii() and head.isdigit() and len(part) < 20):
            raise InputError(f"heads '{value}' are not written BLOCK.HEAD; give them as in 18.8,26.2")
        found.append((int(layer), int(head)))
    return tuple(found)


def check_reference(model: View, reference: Tensor | None) -> None:
    if reference is None:
        raise InputError("means are taken over prompts; give reference=probes.prompts(model)")
    check_tokens(model, reference)


@dataclass(frozen=True)
class Softmax:
    """A `Change` of what a head makes of its logits; see `reweighed`."""

    how: Weights
    layer: int
    reference: Tensor | None
    made: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)  # by block, [H, 1, 1]

    @property
    def said(self) -> str:
        """What, and where."""
        return f"{self.how} from block {self.layer}"

    def embedded(self, model: View, tokens: Int[Tensor, "batch position"]) -> None:
        """The model's own embeddings."""

    def edits(self, model: View, embeddings: Float[Tensor, "batch position d"]) -> list[Edit]:
        layers = range(self.layer, model.spec.blocks)
        if self.how == "without 0":
            return [Edit("logits", layer, _without_0) for layer in layers]
        if not self.made:
            with unheard(model):
                self.made.update(self._means(model))
        held = partial(_held, self._middle())
        change = {"constant sink": _constant_sink, "held log Z": held, "equal log Z": _equal}[self.how]
        return [Edit("logits", layer, partial(change, self.made[layer])) for layer in layers]

    def on(self, fresh: View) -> Softmax:
        return replace(self, made={})

    def _means(self, model: View) -> dict[int, Tensor]:
        """Of every head, over the queries from 1 on of the reference: the mean of s_i0 or log Z_i, or log Z's slope."""
        assert self.reference is not None
        sums: dict[int, list[Tensor]] = {}

        def watch(layer: int, attention: Attention) -> None:
            found = []
            for start, stop in query_blocks(attention):
                logits, log_z = attention.weighed(start, stop)
                first = logits[..., :1] if attention.first_key(start) == 0 else torch.full_like(log_z, float("-inf"))
                found.append((first if self.how == "constant sink" else log_z)[0, :, :, 0])
            every = double(torch.cat(found, 1)[:, 1:])
            if self.how == "held log Z":
                x = logarithm(torch.arange(1, every.shape[1] + 1).to(every))
                x = x - x.mean()
                sums.setdefault(layer, []).append((every @ x) / x.square().sum().clamp_min(1e-12))
            else:
                known = torch.isfinite(every)  # behind a window nobody sees key 0
                sums.setdefault(layer, []).append(every.where(known, 0).sum(1) / known.sum(1).clamp_min(1))

        with model.watching(watch):
            for row in self.reference:
                model.residual(model.embed(row[None]))
        return {layer: torch.stack(found).mean(0)[:, None, None] for layer, found in sums.items()}

    def _middle(self) -> float:
        assert self.reference is not None
        return float(logarithm(torch.arange(1, self.reference.shape[1], dtype=torch.float64)).mean())


def logarithm(position: Tensor) -> Tensor:
    """log(1 + i), by which log Z_i grows with the number of keys where logits do not depend on position."""
    return torch.log1p(position)


def _without_0(logits: Tensor, log_z: Tensor, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    # A query that sees key 0 alone keeps it: that is query 0.
    logits = logits.masked_fill(_of_0(queries, keys), float("-inf"))
    return logits, logits.logsumexp(-1, keepdim=True)


def _constant_sink(
    level: Tensor, logits: Tensor, log_z: Tensor, queries: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor]:
    seen = _of_0(queries, keys) & torch.isfinite(logits)
    logits = torch.where(seen, level.to(logits), logits)
    return logits, logits.logsumexp(-1, keepdim=True)


def _held(
    middle: float, slope: Tensor, logits: Tensor, log_z: Tensor, queries: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor]:
    trend = slope.to(log_z) * (logarithm(queries.to(log_z)) - middle)
    return logits, torch.where(_behind_0(queries, log_z), log_z - trend, log_z)


def _behind_0(queries: Tensor, log_z: Tensor) -> Tensor:
    """Which rows are not query 0, which sees itself alone and keeps its weight; broadcasts to log Z."""
    return (queries > 0).expand(*queries.shape[:-1], 1).expand_as(log_z)


def _equal(level: Tensor, logits: Tensor, log_z: Tensor, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Logits times a factor b_i per query, so that log sum_j exp(b_i s_ij) is `level`, or as near to it as it comes.

    The factor is searched for without derivatives and has those of the equation that it solves: of log Z = level where that
    is reached, of d log Z / db = 0 where log Z is least; none at either end of its range.
    """
    level = level.to(logits).expand_as(log_z)
    with torch.no_grad():
        found = torch.where(_behind_0(queries, log_z), _factor(level, logits), 1.0)
        _, slope, curvature = _slope(logits, found)
        inside = (found > 0) & (found < HOTTEST) & _behind_0(queries, log_z)
        reached = slope.abs() > FLAT * curvature.sqrt()
    value, falling, _ = _slope(logits, found)
    moved = torch.where(reached, (value - level) / slope.where(reached, 1), falling / curvature.clamp_min(TINY))
    moved = moved.where(inside, 0)
    logits = _times(logits, found - (moved - moved.detach()))
    return logits, logits.logsumexp(-1, keepdim=True)


def _factor(level: Tensor, logits: Tensor) -> Tensor:
    """From 0 to `HOTTEST`, per query.

    log sum_j exp(b s_j) is convex in b: it falls from 0 to where it is least and rises from there to `HOTTEST`, and Newton's
    steps from either end do not overshoot. Where both sides reach the level, b is the one nearer to 1.
    """
    none, hottest = torch.zeros_like(level), torch.full_like(level, HOTTEST)
    low, high = none, hottest
    for _ in range(HALVINGS):  # where the slope sum_j p_j s_j turns positive
        middle = (low + high) / 2
        rises = _slope(logits, middle)[1] > 0
        low, high = torch.where(rises, low, middle), torch.where(rises, middle, high)
    least = low
    for _ in range(REFINED):
        _, slope, curvature = _slope(logits, least)
        least = (least - slope / curvature.clamp_min(TINY)).clamp(low, high)
    left, right = none, hottest
    for _ in range(STEPS):
        value, slope, _ = _slope(logits, left)
        left = torch.minimum(least, left + (value - level).clamp_min(0) / (-slope).clamp_min(1e-6))
        value, slope, _ = _slope(logits, right)
        right = torch.maximum(least, right - (value - level).clamp_min(0) / slope.clamp_min(1e-6))
    at_none, at_hottest = _slope(logits, none)[0], _slope(logits, hottest)[0]
    nearer = torch.where((left - 1).abs() < (right - 1).abs(), left, right)
    factor = torch.where(at_hottest < level, left, torch.where(at_none < level, right, nearer))
    beyond = (at_none < level) & (at_hottest < level)
    return torch.where(beyond, torch.where(at_none < at_hottest, hottest, none), factor)


def _slope(logits: Tensor, factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`log sum_j exp(b s_j)` of every query, and its two derivatives with respect to b."""
    scaled = _times(logits, factor)
    value = scaled.logsumexp(-1, keepdim=True)
    weights, known = (scaled - value).exp(), logits.masked_fill(torch.isinf(logits), 0)
    slope = (weights * known).sum(-1, keepdim=True)
    return value, slope, (weights * (known - slope).square()).sum(-1, keepdim=True)


def _times(logits: Tensor, factor: Tensor) -> Tensor:
    """What is hidden stays hidden, also at a factor of 0, and gives the factor no derivative."""
    hidden = torch.isinf(logits)
    return (logits.masked_fill(hidden, 0) * factor).masked_fill(hidden, float("-inf"))


@takes_model
def reweighed(
    model: View,
    how: Weights,
    *,
    layer: int = 0,
    reference: Int[Tensor, "prompt position"] | None = None,
) -> Edited:
    """The same model with other attention weights in all heads from a block on, as a view that every probe can be run on.

    Query 0, which sees itself alone, keeps its weight. A learned sink logit (gpt-oss) counts as one of a query's logits: it
    takes its share of what key 0 loses, is in `log Z_i`, and is multiplied with the others.

    Args:
        model: any view; it is not changed.
        how: "without 0": no later query sees key 0. "constant sink": key 0's logit is its mean over queries, as a learned
            sink logit would be. "held log Z": `log Z_i` loses its trend, a straight line in log(1 + i) through its mean, and
            keeps what texts make of it; weights then no longer sum to 1. "equal log Z": each query's logits are multiplied
            by a factor (from 0 to 16) that makes `log Z_i` its mean, or brings it as near as a factor can.
        layer: the first block that is changed.
        reference: prompts that means are taken over, of each head by itself.

    Raises:
        InputError: no such way or block, or no prompts to take means over.
    """
    if how not in get_args(Weights):
        raise InputError(f"how '{how}' is unknown; give {', '.join(get_args(Weights))}")
    if not 0 <= layer < model.spec.blocks:
        raise InputError(f"layer={layer} does not exist; the model has blocks 0 to {model.spec.blocks - 1}")
    if how != "without 0":
        check_reference(model, reference)
    return Edited(model, Softmax(how, layer, reference))
