"""The numbers behind `probes.sinks`, taken while a model runs: one block of one prompt at a time, no whole pattern.

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
from ...run.memory import Retry, shares
from ...run.precision import double, precise, total
from ...run.store import Piece, Store, groups
from ..attention import ALL, column_statistics, columns, normalizers, outputs, part_of, pattern_blocks, run_watched
from .collectors import counted

THRESHOLD = 0.3  # [Gu]'s eps
TAU = 0.2  # [Wu]'s
NORMS = ("value_norm", "key_norm")
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
        report: called after every block.
    """

    model: View
    tokens: Int[Tensor, "prompt position"]
    chosen: tuple[int, ...] | None
    report: Callable[[], Any]

    def __post_init__(self) -> None:
        self.spec, (self.prompts, self.length) = self.model.spec, self.tokens.shape
        self.by_prompt = {*MEANS, *SIZES, "by_key" if self.chosen is None else "alpha"}
        self.keys = range(self.length) if self.chosen is None else self.chosen
        self.grams = [_gram(self.model.output_weights(layer)) for layer in range(self.spec.blocks)]
        self.by_stream, self.ahead = torch.empty(0), None
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
        together = groups(self.prompts)

        @torch.no_grad()
        def of_group(group: int) -> Piece:
            prompts = (self.tokens[n : n + 1] for n in together[group])
            # Side by side, so that both patterns of a block exist together.
            piece = _joined([self.of_prompt(torch.cat([view.embed(prompt) for view in views])) for prompt in prompts])
            return {name: x if name in self.by_prompt else x.sum(0, keepdims=True) for name, x in piece.items()}

        pieces = store.each("sinks", len(together), lambda group: retry(lambda: of_group(group)))
        found = _joined(list(pieces))
        sums = {name: found.pop(name).sum(0) for name in [*found] if name not in self.by_prompt}
        rate, over = sums.pop("sinks") / (self.prompts * self.spec.heads), sums.pop("over") / self.prompts
        with np.errstate(invalid="ignore"):  # a head that writes nothing
            reads = np.sqrt(sums.pop("own") / sums.pop("whole"))
        uniform = [uniform_alpha(self.length, self.keys, window, self.spec.prefix) for window in self.spec.windows]
        found = {name: np.sqrt(x) if name in SIZES else x for name, x in found.items()}
        found |= {name: x / self.prompts if name in NORMS else x for name, x in sums.items()}
        found |= {"reads": reads, "sink_rate": rate, "sink_rate_of_model": rate.mean(0), "uniform": np.stack(uniform)}
        return found | {"over_tau": over, "over_tau_of_model": over.mean((0, 1))}

    def of_prompt(self, embeddings: Float[Tensor, "batch position d"]) -> Piece:
        """The numbers of one prompt [1, layer, head, ...].

        A second row of the embeddings is the same prompt with another embedding at position 0: what it changes is measured.
        """
        blocks: list[dict[str, Tensor]] = []

        def stream(x: Float[Tensor, "batch position d"]) -> Float[Tensor, "batch position d"]:
            """Keep `1 / |x_i|^2` of what the next block reads, to take sizes beside it; 0 where the stream is zero."""
            squares = double(x[0]).square().sum(-1)
            self.by_stream = torch.where(squares > 0, 1 / squares, 0)
            return x

        def watch(layer: int, attention: Attention) -> None:
            heads = [ALL] if attention.reweigh else shares(self.spec.heads)  # edits of logits take all heads
            parts = [self._of_heads(layer, some, part_of(attention, heads=some)) for some in heads]
            block = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            block["sinks"] = (block["alpha"] > THRESHOLD).sum(0, dtype=torch.float64)
            if self.chosen is None:  # means over heads, of keys that may count as collectors
                block["by_key"] = block["alpha"][:, : counted(self.length)].sum(0) / self.spec.heads
                block["alpha"] /= self.prompts
            blocks.append(block)
            self.report()

        run_watched(self.model, embeddings, watch, [Edit("residual", n, stream) for n in range(self.spec.blocks)])
        return {name: torch.stack([block[name] for block in blocks])[None].cpu().numpy() for name in blocks[0]}

    def _of_heads(self, layer: int, heads: slice, attention: Attention) -> dict[str, Tensor]:
        """Numbers of some heads of a block, [head, ...]."""
        reach, gram = self.reaches[layer], self.grams[layer][heads]
        by_stream, found = self.by_stream[1:reach], dict[str, Tensor]()
        if len(attention.query) > 1:
            found["reacts"] = _reactions(part_of(attention, positions=slice(reach))) / max(0, reach - 2)
            one, other = outputs(attention)[:, :, 1:reach]
            found["reacts_output"] = (_squares(one - other, gram) * by_stream).mean(-1)
            attention = part_of(attention, prompts=slice(1))
        if self.chosen is None:
            weights = columns(attention, (0,))[0, ..., 0]  # those on position 0
            on_keys, over = (x[0] for x in column_statistics(attention, TAU))
        else:
            keys = self.chosen if 0 in self.chosen else (*self.chosen, 0)
            each = columns(attention, keys)[0]  # [H, T, K]
            weights, each = each[..., keys.index(0)], each[..., : len(self.chosen)]
            over = (each > TAU).sum(-2).to(self.until_end.device)
            on_keys = total(each if self.ahead is None else each.masked_fill(self.ahead, 0), -2)
        found |= {"alpha": on_keys / self.until_end, "over": over / self.seeing[layer]}

        value, output = attention.value[0].to(gram.dtype), outputs(attention)[0]
        written_0 = _squares(value[:, :1], gram)
        norm = torch.linalg.vector_norm
        norms = (norm(value, dim=-1), norm(attention.key[0], dim=-1, dtype=gram.dtype))
        for name, sizes in zip(NORMS, norms, strict=True):
            found[name] = torch.stack([double(sizes[:, 0]), double(sizes[:, 1:]).mean(-1)], -1)
        if self.spec.sink_logits and attention.sink is not None:
            log_z = double(normalizers(attention)[0, :, 1:])
            found["sink_logit_share"] = (attention.sink.to(log_z)[:, None] - log_z).exp().mean(-1)

        weights, whole = double(weights[:, 1:reach]), _squares(output[:, 1:reach], gram)
        elsewhere = whole  # behind a window of 1 no query sees position 0, and nothing has a size
        if reach > 1:
            elsewhere = _squares(outputs(_behind_0(attention, reach))[0], gram)
        own = weights.square() * written_0
        return found | {
            "attends": weights.mean(-1),
            "written": (own * by_stream).mean(-1),
            "output": (whole * by_stream).mean(-1),
            "output_own": (weights * whole).sum(-1) / (weights * elsewhere).sum(-1),
            "own": double(own.sum(-1)),
            "whole": double(whole.sum(-1)),
        }


def _joined(parts: Sequence[Piece]) -> Piece:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _gram(weights: Float[Tensor, "head c d"]) -> Float[Tensor, "head c c"]:
    exact = weights.to(torch.promote_types(weights.dtype, torch.float32))
    return exact @ exact.mT


def _squares(x: Float[Tensor, "head query c"], gram: Float[Tensor, "head c c"]) -> Float[Tensor, "head query"]:
    """`|x W_O|^2`; rounding may leave a tiny negative number, which is 0."""
    x = x.to(gram.dtype)
    return total((x @ gram).mul_(x), -1).clamp_min_(0)


def _reactions(attention: Attention) -> Float[Tensor, " head"]:
    """Sums over queries i >= 2, which all see position 0, of total variation over keys >= 1 between the two prompts."""
    moved = torch.zeros(attention.query.shape[1], dtype=torch.float64, device=precise(attention.query.device))
    for block in pattern_blocks(attention):
        one, other = block.weights[:, :, max(0, 2 - block.start) :, 1:]
        moved += total((one - other).abs_(), (-2, -1)) / 2
    return moved


def _behind_0(attention: Attention, reach: int) -> Attention:
    """Of the positions 1 to `reach` among themselves, attended anew, unedited: what a head does with position 0 hidden."""
    prefix = None if attention.prefix is None or attention.prefix < 2 else attention.prefix - 1
    anew = replace(attention, output=None, normalizer=None, reweigh=(), prefix=prefix)
    return part_of(anew, positions=slice(1, reach))
