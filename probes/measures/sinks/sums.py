"""The sums over prompts behind `probes.sinks`, taken while a model runs: one block of one prompt at a time, no whole
pattern.

Sizes behind the output projection are quadratic forms, `|x W_O|^2 = x G x` with each head's Gram matrix `G = W_O W_O^T`
[c, c], made once for all prompts. What a head would write if it attended elsewhere comes from one more pass of the
attention kernel over the positions behind 0 among themselves: no `1 - A_i0` is divided by, which is 0 in float32 where
position 0 takes everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ...models.fused import query_blocks
from ...models.view import Attention, View
from ...run.memory import shares
from ...run.precision import double, precise, total
from ...run.store import Piece, Pieces
from ..attention import column_statistics, columns, normalizers, outputs
from .collectors import counted

NORMS = ("value_norm", "key_norm", "written_norm")
# Kept of every prompt [prompt, layer, head]: of means, and of sizes whose squares are averaged.
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


class Sums:
    """What is summed over some prompts, in float64, as each block attends. Numbers are [layer, head] unless said otherwise.

    `begin` starts a sum anew, `piece` is what it has come to, `results` puts all pieces together.
    """

    def __init__(
        self,
        model: View,
        tokens: Tensor,
        chosen: tuple[int, ...] | None,  # None: all
        threshold: float,
        tau: float,
        separate: bool,
        reacting: bool,
    ) -> None:
        self.spec, self.prompts, self.length = model.spec, tokens.shape[0], tokens.shape[1]
        self.chosen, self.threshold, self.tau = chosen, threshold, tau
        self.separate, self.reacting = separate, reacting
        self.device = device = precise(model.device)
        self.grams = [_gram(model.output_weights(layer)) for layer in range(model.spec.blocks)]
        self.keys = range(self.length) if chosen is None else chosen
        k = torch.tensor(self.keys, device=device)
        self.until_end = (self.length - k).double()  # queries from the key on
        # The queries that see position 0 are those before `reaches`; those that see each key number `seeing` [K].
        self.reaches = [self.length if w is None else min(w, self.length) for w in model.spec.windows]
        self.seeing = [self.until_end.clamp_max(reach) for reach in self.reaches]
        prefix, self.ahead = model.spec.prefix, None
        if prefix is not None:
            self.seeing = [torch.where(k < prefix, self.length, queries) for queries in self.seeing]
            self.reaches = [self.length] * model.spec.blocks
            # [query, key]: queries before a key, which count in `over` alone.
            self.ahead = (torch.arange(self.length, device=device)[:, None] < k).to(model.device)

    def begin(self, prompts: int) -> None:
        """Start sums over this many prompts."""
        heads, keys = (self.spec.blocks, self.spec.heads), len(self.keys)
        shapes = {
            "alpha": (*[prompts] * self.separate, *heads, keys),
            "sinks": (self.spec.blocks, keys),
            "over": (*heads, keys),
            # Of position 0: its weights' squares times |v_0 W_O|^2, its share along the output, the output.
            **dict.fromkeys(("own", "along", "whole", "among"), heads),
            **dict.fromkeys(NORMS, (*heads, 2)),
            **dict.fromkeys((*MEANS, *SIZES), (prompts, *heads)),  # of sizes the squares
        }
        if self.chosen is None:  # means over heads, of keys that may count as collectors
            shapes["by_key"] = (prompts, self.spec.blocks, counted(self.length))
        self.sums = {
            name: torch.zeros(shape, dtype=torch.float64, device=self.device) for name, shape in shapes.items()
        }

    def piece(self) -> Piece:
        """The sums since `begin`."""
        return {name: x.cpu().numpy() for name, x in self.sums.items()}

    def watch_stream(self, stream: Float[Tensor, "batch position d"]) -> Float[Tensor, "batch position d"]:
        """Keep `1 / |x_i|^2` of what the next block reads, to take sizes beside it; 0 where the stream is zero."""
        squares = double(stream[0]).square().sum(-1)
        self.by_stream = torch.where(squares > 0, 1 / squares, 0)
        return stream

    def add(self, prompt: int, layer: int, attention: Attention) -> None:
        """One block of one prompt; where reactions are measured, of the prompt and its twin."""
        for heads in [slice(None)] if attention.reweigh else shares(self.spec.heads):  # edits of logits take all heads
            self._add_heads(prompt, (layer, heads), _of_heads(attention, heads))

    def _add_heads(self, prompt: int, at: tuple[int, slice], attention: Attention) -> None:
        """Some heads of a block, which `at` says."""
        layer, reach, sums = at[0], self.reaches[at[0]], self.sums
        if self.reacting:
            moved, among = _reactions(_cut(attention, reach))
            sums["reacts"][prompt, *at] = moved / max(0, reach - 2)
            sums["among"][at] += among
            one, other = outputs(attention)[:, :, 1:reach]
            change = _squares(one - other, self.grams[layer][at[1]]) * self.by_stream[1:reach]
            sums["reacts_output"][prompt, *at] = change.mean(-1)
            attention = _each(attention, lambda x: x[:1])
        if self.chosen is None:
            of_0 = columns(attention, (0,))[0, ..., 0]
            whole, over = (x[0] for x in column_statistics(attention, self.tau))
        else:
            whole, over, of_0 = self._of_chosen(self.chosen, attention)
        alpha = whole / self.until_end
        sums["sinks"][layer] += (alpha > self.threshold).sum(0)
        sums["over"][at] += over / self.seeing[layer]
        if self.chosen is None:
            sums["by_key"][prompt, layer] += alpha[:, : sums["by_key"].shape[-1]].sum(0) / self.spec.heads
        if self.separate:
            sums["alpha"][prompt, *at] = alpha
        else:
            sums["alpha"][at] += alpha / self.prompts
        self._add_writing(prompt, at, attention, of_0)

    def _of_chosen(self, chosen: tuple[int, ...], attention: Attention) -> tuple[Tensor, Tensor, Tensor]:
        """Of every chosen key the sum of the weights on it and the number above tau, [H, K]; weights on position 0."""
        totals, over, of_0 = [], [], None
        for some in shares(len(chosen)):
            keys = chosen[some]
            picked = keys if of_0 is not None or 0 in keys else (*keys, 0)
            weights = columns(attention, picked)[0]  # [H, T, K]
            of_0 = weights[..., picked.index(0)] if of_0 is None else of_0
            weights = weights[..., : len(keys)]
            over.append((weights > self.tau).sum(-2).to(self.device))
            counted = weights if self.ahead is None else weights.masked_fill(self.ahead[:, some], 0)
            totals.append(total(counted, -2))
        assert of_0 is not None
        return torch.cat(totals, -1), torch.cat(over, -1), of_0

    def _add_writing(
        self, prompt: int, at: tuple[int, slice], attention: Attention, weights: Float[Tensor, "head query"]
    ) -> None:
        """What is written; `weights` are those on position 0."""
        layer, heads = at
        gram, value, output = self.grams[layer][heads], attention.value[0], outputs(attention)[0]
        value = value.to(gram.dtype)
        imaged = value @ gram  # [H, T, c]
        from_0 = imaged[:, 0, :].clone()  # <v_0 W_O, x W_O> = <from_0, x>
        written = imaged.mul_(value).sum(-1).clamp_min_(0)  # rounding may leave a tiny negative number
        for name, sizes in (
            ("value_norm", torch.linalg.vector_norm(value, dim=-1)),
            ("key_norm", torch.linalg.vector_norm(attention.key[0], dim=-1, dtype=gram.dtype)),
            ("written_norm", written.sqrt()),
        ):
            self.sums[name][*at, 0] += double(sizes[:, 0])
            self.sums[name][*at, 1] += double(sizes[:, 1:]).mean(-1)
        if attention.sink is not None:
            log_z = double(normalizers(attention)[0, :, 1:])
            self.sums["sink_logit_share"][prompt, *at] = (attention.sink.to(log_z)[:, None] - log_z).exp().mean(-1)
        reach = self.reaches[layer]
        near, output = weights[:, 1:reach].to(gram.dtype), output[:, 1:reach].to(gram.dtype)
        weights = double(weights[:, 1:reach])
        whole, by_stream = _squares(output, gram), self.by_stream[1:reach]
        elsewhere = whole  # behind a window of 1 no query sees position 0, and nothing has a size
        if reach > 1:
            elsewhere = _squares(outputs(_behind_0(_cut(attention, reach)))[0], gram)
        own = weights.square() * double(written[:, :1])
        for name, each in (
            ("attends", weights.mean(-1)),
            ("written", (own * by_stream).mean(-1)),
            ("output", (whole * by_stream).mean(-1)),
            ("output_own", (weights * whole).sum(-1) / (weights * elsewhere).sum(-1)),
        ):
            self.sums[name][prompt, *at] = each
        taken = (near[:, None, :] @ output)[:, 0]  # sum_i A_i0 o_i
        for name, added in (("own", own), ("whole", whole), ("along", taken * from_0)):
            self.sums[name][at] += double(added.sum(-1))

    def results(self, pieces: Pieces) -> dict[str, np.ndarray]:
        """What is reported, of all pieces in their order."""
        self.begin(0)
        sums = self.sums
        kept = (*MEANS, *SIZES, *["alpha"] * self.separate, *["by_key"] * (self.chosen is None))
        by_prompt = {name: [sums[name].cpu().numpy()] for name in kept}
        for piece in pieces:
            for name, values in piece.items():
                if name in by_prompt:
                    by_prompt[name].append(values)
                else:
                    sums[name].add_(torch.from_numpy(values).to(self.device))
        each = {name: np.concatenate(some) for name, some in by_prompt.items()}
        reacting = torch.tensor([max(0, reach - 2) for reach in self.reaches], device=self.device)[:, None]
        rate, over = sums["sinks"] / (self.prompts * self.spec.heads), sums["over"] / self.prompts
        found = {
            "alpha": sums["alpha"],
            "sink_rate": rate,
            "sink_rate_of_model": rate.mean(0),
            "over_tau": over,
            "over_tau_of_model": over.mean((0, 1)),
            "reads": (sums["own"] / sums["whole"]).sqrt(),
            "reads_along": sums["along"] / sums["whole"],
            **{name: sums[name] / self.prompts for name in NORMS},
        }
        if self.reacting:
            found["reacts_among_others"] = sums["among"] / (reacting * self.prompts)
        windows, prefix = self.spec.windows, self.spec.prefix
        uniform = np.stack([uniform_alpha(self.length, self.keys, window, prefix) for window in windows])
        each = {name: np.sqrt(x) if name in SIZES else x for name, x in each.items()}
        absent = ["reacts", "reacts_output"] * (not self.reacting) + ["sink_logit_share"] * (not self.spec.sink_logits)
        each = {name: x for name, x in each.items() if name not in absent}
        return {name: x.cpu().numpy() for name, x in found.items()} | {"uniform": uniform, **each}


def _gram(weights: Float[Tensor, "head c d"]) -> Float[Tensor, "head c c"]:
    exact = weights.to(torch.promote_types(weights.dtype, torch.float32))
    return exact @ exact.mT


def _reactions(attention: Attention) -> Float[Tensor, "two head"]:
    """Sums over queries i >= 2 of total variation over keys >= 1, between the two prompts: as is, and renormalized."""
    found = torch.zeros((2, attention.query.shape[1]), dtype=torch.float64, device=precise(attention.query.device))
    for start, stop in query_blocks(attention):
        start = max(start, 2)
        if start >= stop:
            continue
        logits = attention.logits(start, stop)  # [2, H, rows, keys]
        # The rest against position 0, without the 1 - A_i0 that cancels where the sink takes almost everything.
        rest, first = logits[..., 1:].logsumexp(-1, keepdim=True), logits[..., :1]
        if attention.sink is not None:
            first = torch.logaddexp(first, attention.sink.to(first)[:, None, None])
        shares = logits[..., 1:].sub_(rest).exp_()
        rest = (rest - first).sigmoid_()
        found[1] += total((shares[0] - shares[1]).abs_(), (-2, -1)) / 2
        shares.mul_(rest)
        found[0] += total((shares[0] - shares[1]).abs_(), (-2, -1)) / 2
    return found


def _of_heads(attention: Attention, heads: slice) -> Attention:
    """Of some heads alone."""
    own = {name: None if x is None else x[heads] for name in ("slopes", "sink") for x in [getattr(attention, name)]}
    return replace(_each(attention, lambda x: x[:, heads]), **own)


def _behind_0(attention: Attention) -> Attention:
    """Of the positions from 1 on among themselves, attended anew, unedited: what a head does where position 0 is hidden."""
    rest = _each(replace(attention, output=None, normalizer=None, reweigh=()), lambda x: x[:, :, 1:])
    prefix = attention.prefix
    return replace(rest, prefix=None if prefix is None or prefix < 2 else prefix - 1)


def _squares(x: Float[Tensor, "head query c"], gram: Float[Tensor, "head c c"]) -> Float[Tensor, "head query"]:
    """`|x W_O|^2`; rounding may leave a tiny negative number, which is 0."""
    x = x.to(gram.dtype)
    return total((x @ gram).mul_(x), -1).clamp_min_(0)


def _cut(attention: Attention, stop: int) -> Attention:
    """Of the positions before `stop` alone, which do not depend on what follows."""
    return attention if stop >= attention.query.shape[2] else _each(attention, lambda x: x[:, :, :stop])


def _each(attention: Attention, function: Callable[[Tensor], Tensor]) -> Attention:
    names = ("query", "key", "value", "output", "normalizer")
    found = {name: getattr(attention, name) for name in names}
    return replace(attention, **{name: None if x is None else function(x) for name, x in found.items()})
