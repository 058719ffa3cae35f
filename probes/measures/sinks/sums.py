"""The numbers behind `probes.sinks`, taken while a model runs, without any whole pattern: on a processor one block of one
prompt at a time, on a GPU many prompts together, and the heads of many blocks side by side.

Sizes behind the output projection are quadratic forms, `|x W_O|^2 = x G x` with each head's Gram matrix `G = W_O W_O^T`
[c, c], made once for all prompts. What a head would write if it attended elsewhere comes from one more pass of the
attention kernel over the positions behind 0 among themselves: no `1 - A_i0` is divided by, which is 0 in float32 where
position 0 takes everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...models.view import Attention, Edit, View
from ...run.memory import Retry, batches, block_numbers, own_memory, parts, prompts_at_once, shares
from ...run.precision import double, precise, total
from ...run.store import Piece, Store, groups
from ..attention import ALL, column_statistics, columns, normalizers, outputs, part_of, pattern_blocks, run_watched
from .collectors import counted

THRESHOLD = 0.3  # [Gu]'s eps
TAU = 0.2  # [Wu]'s
NORMS = ("value_norm", "key_norm")
HELD = 5  # tensors of the queries' size that a block's attention is
# Kept of every prompt [prompt, layer, head]: means, and sizes whose squares are averaged.
MEANS, SIZES = ("attends", "reacts", "sink_logit_share"), ("written", "output", "output_own", "reacts_output")


def uniform_alpha(
    length: int, keys: Sequence[int], window: int | None, prefix: int | None = None
) -> Float[np.ndarray, " key"]:
    """alpha of uniform attention, where every query spreads evenly over the keys that it sees."""
    reach = length if window is None else min(window, length)
    everyone = 0 if prefix is None else min(prefix, length)  # keys that all queries see
    after = np.arange(length) + 1
    # Keys up to the query, or to the prefix's end, less those between that end and the window's first.
    shares = 1 / (np.maximum(after, everyone) - np.maximum(after - reach - everyone, 0))
    total = np.concatenate([[0.0], np.cumsum(shares)])  # total[i]: of the queries before i
    k = np.asarray(keys, dtype=np.int64)
    end = np.where(k < everyone, length, np.minimum(k + reach, length))
    return (total[end] - total[k]) / (length - k)


@dataclass(eq=False)
class Sums:
    """Takes the numbers of prompts, and sums them up, in float64.

    Args:
        model: any view.
        tokens: the prompts.
        chosen: the keys; None for all.
        report: called with the number of blocks that a prompt went through.
    """

    model: View
    tokens: Int[Tensor, "prompt position"]
    chosen: tuple[int, ...] | None
    report: Callable[[int], Any]

    def __post_init__(self) -> None:
        self.spec, (self.prompts, self.length) = self.model.spec, self.tokens.shape
        self.by_prompt = {*MEANS, *SIZES, "by_key" if self.chosen is None else "alpha"}
        self.keys = range(self.length) if self.chosen is None else self.chosen
        self.grams = [_gram(self.model.output_weights(layer)) for layer in range(self.spec.blocks)]
        self.ahead = None
        k = torch.tensor(self.keys, device=precise(self.model.device))
        self.until_end = (self.length - k).double()  # queries from the key on
        # The queries that see position 0 are those before `reaches`; those that see each key number `seeing` [K].
        self.reaches = [self.length if w is None else min(w, self.length) for w in self.spec.windows]
        self.seeing = [self.until_end.clamp_max(reach) for reach in self.reaches]
        if (prefix := self.spec.prefix) is not None:
            self.seeing = [torch.where(k < prefix, self.length, queries) for queries in self.seeing]
            self.reaches = [self.length] * self.spec.blocks
            # [query, key]: queries before a key, which count in `over` alone.
            self.ahead = (torch.arange(self.length, device=k.device)[:, None] < k).to(self.model.device)

    def measured(self, views: Sequence[View], retry: Retry, store: Store) -> dict[str, np.ndarray]:
        """What is reported, of all prompts; the second view has another embedding at position 0, if there are two."""
        together, kept = groups(self.prompts), 8 * self.spec.blocks * self.spec.heads * len(self.keys)
        length = len(views) * self.length

        @torch.no_grad()
        def of_groups(numbers: Sequence[int]) -> list[Piece]:
            prompts = [n for number in numbers for n in together[number]]
            each = batches(prompts, self.model, length, kept)
            # Views side by side, so that both patterns of a block exist together.
            found = [self.of_prompts(torch.stack([view.embed(self.tokens[some]) for view in views])) for some in each]
            ends = np.cumsum([len(together[number]) for number in numbers])[:-1]
            parts = {name: np.split(x, ends) for name, x in _joined(found).items()}
            return [
                {name: x[n] if name in self.by_prompt else _sum(x[n])[None] for name, x in parts.items()}
                for n in range(len(numbers))
            ]

        count = max(1, prompts_at_once(self.model, length, kept) // len(together[0]))
        pieces = store.together("sinks", len(together), lambda numbers: retry(lambda: of_groups(numbers)), count)
        found = _joined(list(pieces))
        sums = {name: _sum(found.pop(name)) for name in [*found] if name not in self.by_prompt}
        rate, over = sums.pop("sinks") / (self.prompts * self.spec.heads), sums.pop("over") / self.prompts
        with np.errstate(invalid="ignore"):  # a head that writes nothing
            reads = np.sqrt(sums.pop("own") / sums.pop("whole"))
        uniform = [uniform_alpha(self.length, self.keys, window, self.spec.prefix) for window in self.spec.windows]
        found = {name: np.sqrt(x) if name in SIZES else x for name, x in found.items()}
        found |= {name: x / self.prompts if name in NORMS else x for name, x in sums.items()}
        found |= {"reads": reads, "sink_rate": rate, "sink_rate_of_model": rate.mean(0), "uniform": np.stack(uniform)}
        return found | {"over_tau": over, "over_tau_of_model": over.mean((0, 1))}

    def of_prompts(self, embeddings: Float[Tensor, "view prompt position d"]) -> Piece:
        """The numbers of some prompts [prompt, layer, head, ...].

        Of a second view come the same prompts with another embedding at position 0: what it changes is measured.
        """
        prompts, device = embeddings.shape[1], self.model.device
        norms, waiting, found = list[Tensor](), dict[int, Attention](), list[dict[str, Tensor]]()
        # Where operations are launched one by one, as many blocks are worked on together as there is room for.
        room = 0 if own_memory(device) is None else block_numbers(device) // parts()

        def stream(x: Float[Tensor, "row position d"]) -> Float[Tensor, "row position d"]:
            """Keep the sizes of what the next block reads."""
            norms.append(torch.linalg.vector_norm(x[:prompts].to(precise(device)), dim=-1, dtype=torch.float64))
            return x

        def watch(layer: int, attention: Attention) -> None:
            if waiting and _kind(attention) != _kind(next(iter(waiting.values()))):
                work()
            waiting[layer] = attention
            if len(waiting) * HELD * attention.query.numel() >= room:
                work()

        def work() -> None:
            found.append(self._of_blocks(list(waiting), list(waiting.values()), norms, prompts))
            self.report(prompts * len(waiting))
            waiting.clear()

        edits = [Edit("residual", n, stream) for n in range(self.spec.blocks)]
        run_watched(self.model, embeddings.flatten(0, 1), watch, edits)
        if waiting:
            work()
        return {name: torch.cat([some[name] for some in found], 1).cpu().numpy() for name in found[0]}

    def _of_blocks(
        self, layers: list[int], attentions: list[Attention], norms: list[Tensor], prompts: int
    ) -> dict[str, Tensor]:
        """Numbers of some blocks of one kind, [prompt, layer, ...]: all their heads side by side."""
        attention, heads = _side_by_side(attentions), self.spec.heads
        gram = torch.cat([self.grams[layer] for layer in layers])
        squares = torch.stack([norms[layer] for layer in layers], 1).square()
        by_stream = torch.where(squares > 0, 1 / squares, 0).repeat_interleave(heads, 1)  # [P, heads, T]
        reach, seeing = self.reaches[layers[0]], self.seeing[layers[0]]
        every = [ALL] if attention.reweigh else shares(len(gram))  # edits of logits take all heads
        each = [
            self._of_heads(part_of(attention, heads=some), gram[some], by_stream[:, some, 1:reach], reach, prompts)
            for some in every
        ]
        found = {name: torch.cat([part[name] for part in each], 1).unflatten(1, (-1, heads)) for name in each[0]}
        found["over"] = found["over"] / seeing
        found["sinks"] = (found["alpha"] > THRESHOLD).sum(2, dtype=torch.float64)
        if self.chosen is None:  # means over heads, of keys that may count as collectors
            found["by_key"] = found["alpha"][..., : counted(self.length)].sum(2) / heads
            found["alpha"] /= self.prompts
        return found

    def _of_heads(
        self, attention: Attention, gram: Tensor, by_stream: Tensor, reach: int, prompts: int
    ) -> dict[str, Tensor]:
        """Numbers of some heads, [prompt, head, ...]; `by_stream` [prompt, head, query], of the queries 1 to `reach`."""
        found = dict[str, Tensor]()
        if len(attention.query) > prompts:
            found["reacts"] = _reactions(part_of(attention, positions=slice(reach)), prompts) / max(0, reach - 2)
            first, other = outputs(attention)[:, :, 1:reach].split(prompts)
            found["reacts_output"] = (_squares(first - other, gram) * by_stream).mean(-1)
            attention = part_of(attention, prompts=slice(prompts))
        if self.chosen is None:
            weights = columns(attention, (0,))[..., 0]  # those on position 0
            on_keys, over = column_statistics(attention, TAU)
        else:
            keys = self.chosen if 0 in self.chosen else (*self.chosen, 0)
            each = columns(attention, keys)  # [P, H, T, K]
            weights, each = each[..., keys.index(0)], each[..., : len(self.chosen)]
            over = (each > TAU).sum(-2).to(self.until_end.device)
            on_keys = total(each if self.ahead is None else each.masked_fill(self.ahead, 0), -2)
        found |= {"alpha": on_keys / self.until_end, "over": over}

        value, output = attention.value, outputs(attention)
        written_0 = _squares(value[..., :1, :], gram)
        for name, x in zip(NORMS, (value, attention.key), strict=True):
            sizes = torch.linalg.vector_norm(x, dim=-1, dtype=gram.dtype)
            found[name] = torch.stack([double(sizes[..., 0]), double(sizes[..., 1:]).mean(-1)], -1)
        if self.spec.sink_logits and attention.sink is not None:
            log_z = double(normalizers(attention)[..., 1:])
            found["sink_logit_share"] = (attention.sink.to(log_z)[:, None] - log_z).exp().mean(-1)

        weights, whole = double(weights[..., 1:reach]), _squares(output[..., 1:reach, :], gram)
        elsewhere = whole  # behind a window of 1 no query sees position 0, and nothing has a size
        if reach > 1:
            elsewhere = _squares(outputs(_behind_0(attention, reach)), gram)
        own = weights.square() * written_0
        return found | {
            "attends": weights.mean(-1),
            "written": (own * by_stream).mean(-1),
            "output": (whole * by_stream).mean(-1),
            "output_own": (weights * whole).sum(-1) / (weights * elsewhere).sum(-1),
            "own": own.sum(-1),
            "whole": whole.sum(-1),
        }


def _kind(attention: Attention) -> tuple[Any, ...]:
    """What heads must have in common to be worked on side by side; edits of logits know their own block alone."""
    own = id(attention) if attention.reweigh else None
    return attention.scale, attention.softcap, attention.window, attention.prefix, attention.sink is None, own


def _side_by_side(attentions: list[Attention]) -> Attention:
    """The heads of several blocks of one kind, as those of one."""
    if len(attentions) == 1:
        return attentions[0]
    whole = dict[str, Tensor]()
    for name, first in vars(attentions[0]).items():
        if isinstance(first, Tensor):
            whole[name] = torch.cat([getattr(one, name) for one in attentions], 0 if first.dim() == 1 else 1)
    return replace(attentions[0], **whole)


def _joined(parts: Sequence[Piece]) -> Piece:
    return parts[0] if len(parts) == 1 else {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _sum(x: np.ndarray) -> np.ndarray:
    """Over prompts; of a single one, whose arrays of all keys may be large, no copy."""
    return x[0] if len(x) == 1 else x.sum(0)


def _gram(weights: Float[Tensor, "head c d"]) -> Float[Tensor, "head c c"]:
    exact = weights.to(torch.promote_types(weights.dtype, torch.float32))
    return exact @ exact.mT


def _squares(
    x: Float[Tensor, "prompt head query c"], gram: Float[Tensor, "head c c"]
) -> Float[Tensor, "prompt head query"]:
    """`|x W_O|^2`; rounding may leave a tiny negative number, which is 0."""
    x = x.to(gram.dtype)
    return total((x @ gram).mul_(x), -1).clamp_min_(0)


def _reactions(attention: Attention, prompts: int) -> Float[Tensor, "prompt head"]:
    """Sums over queries i >= 2, which all see position 0, of total variation over keys >= 1 between the two views."""
    moved = torch.zeros(prompts, attention.query.shape[1], dtype=torch.float64, device=precise(attention.query.device))
    for block in pattern_blocks(attention):
        one, other = block.weights[:, :, max(0, 2 - block.start) :, 1:].split(prompts)
        moved += total((one - other).abs_(), (-2, -1)) / 2
    return moved


def _behind_0(attention: Attention, reach: int) -> Attention:
    """Of the positions 1 to `reach` among themselves, attended anew, unedited: what a head does with position 0 hidden."""
    prefix = None if attention.prefix is None or attention.prefix < 2 else attention.prefix - 1
    anew = replace(attention, output=None, normalizer=None, reweigh=(), prefix=prefix)
    return part_of(anew, positions=slice(1, reach))
