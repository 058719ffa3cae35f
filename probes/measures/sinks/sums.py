"""The numbers behind `probes.sinks`, taken while a model runs, without any whole pattern: on a processor one block of one
prompt at a time, on a GPU many prompts together, and the heads of many blocks side by side.

Sizes behind the output projection are quadratic forms, `|x W_O|^2 = x G x` with each head's Gram matrix `G = W_O W_O^T`
[c, c], made once for all prompts. What a head would write if it attended elsewhere comes from one more pass of the
attention kernel over the positions behind 0 among themselves: no `1 - A_i0` is divided by, which is 0 in float32 where
position 0 takes everything.

Where a norm follows on the branch's output a_i (Gemma 2 and 3, OLMo 2 and 3) a part p of it counts as the norm's derivative
at a_i makes it, `J_i p = g (p - u_i (u_i.p)) / r_i`: g the norm's weight, `r_i = sqrt(|a_i|^2 / d + eps)`, `u_i = a_i / (r_i
sqrt(d))`. That is what the Jacobian takes it for, and what the stream loses by it to first order. With `G = W_O g^2 W_O^T`
its square is a quadratic form, too, `(x G x - 2 (x.W_O u_i)(x.W_O g^2 u_i) + (x.W_O u_i)^2 |g u_i|^2) / r_i^2`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...models.ablate import SINK as THRESHOLD
from ...models.view import Attention, Edit, Norm, View
from ...run.memory import Retry, batches, block_numbers, own_memory, parts, prompts_at_once, shares
from ...run.precision import double, precise, total, wide
from ...run.store import Piece, Store, groups
from ..attention import ALL, column_statistics, columns, normalizers, outputs, part_of, pattern_blocks, run_watched
from .collectors import counted
from .secondary import aligned

TAU = 0.2  # [Wu]'s
NORMS = ("value_norm", "key_norm")
HELD = 5  # tensors of the queries' size that a block's attention is
# Kept of every prompt [prompt, layer, head]: means, and sizes whose squares are averaged.
MEANS, SIZES = ("attends", "reacts", "sink_logit_share"), ("written", "output", "output_own", "reacts_output")
SQUARES = ("own", "whole")  # sums over queries of the squared sizes of what comes from position 0, and of all


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


class Behind(NamedTuple):
    """The norm on a branch's output, linearized, as heads meet it at every query i; see the module's text."""

    along: Float[Tensor, "prompt head query c"]  # W_O u_i
    turned: Float[Tensor, "prompt head query c"]  # W_O g^2 u_i
    size: Float[Tensor, "prompt head query"]  # |g u_i|^2
    inverse: Float[Tensor, "prompt head query"]  # 1 / r_i^2


@dataclass(eq=False)
class Sums:
    """Takes the numbers of prompts, and sums them up, in float64."""

    model: View
    tokens: Int[Tensor, "prompt position"]
    chosen: tuple[int, ...] | None  # the keys; None for all
    report: Callable[[int], Any]  # hears how many blocks a prompt went through

    def __post_init__(self) -> None:
        self.spec, (self.prompts, self.length) = self.model.spec, self.tokens.shape
        self.by_prompt = {*MEANS, *SIZES, *SQUARES, "by_key" if self.chosen is None else "alpha", "aligned", "norms"}
        self.keys = range(self.length) if self.chosen is None else self.chosen
        self.norms = [self.model.output_norm(layer) for layer in range(self.spec.blocks)]
        self.grams, self.weights = list[Tensor](), dict[int, Tensor]()
        for layer, norm in enumerate(self.norms):
            weights = self.model.output_weights(layer)
            self.grams.append(_gram(weights, norm))
            if norm is not None and not self.model.offloaded:
                self.weights[layer] = weights
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
        uniform = [uniform_alpha(self.length, self.keys, window, self.spec.prefix) for window in self.spec.windows]
        found = {name: np.sqrt(x) if name in SIZES else x for name, x in found.items()}
        found |= {name: x / self.prompts if name in NORMS else x for name, x in sums.items()}
        found |= {"sink_rate": rate, "sink_rate_of_model": rate.mean(0), "uniform": np.stack(uniform)}
        return found | {"over_tau": over, "over_tau_of_model": over.mean((0, 1))}

    def of_prompts(self, embeddings: Float[Tensor, "view prompt position d"]) -> Piece:
        """The numbers of some prompts [prompt, layer, head, ...].

        Of a second view come the same prompts with another embedding at position 0: what it changes is measured.
        """
        prompts, device = embeddings.shape[1], self.model.device
        norms, waiting, found = list[Tensor](), dict[int, Attention](), list[dict[str, Tensor]]()
        directions = list[Tensor]()
        mixed: dict[int, Tensor] = {}  # what heads give, edits included, where a norm follows
        # Where operations are launched one by one, as many blocks are worked on together as there is room for.
        room = 0 if own_memory(device) is None else block_numbers(device) // parts()

        def stream(x: Float[Tensor, "row position d"]) -> Float[Tensor, "row position d"]:
            """Keep the sizes of what the next block reads."""
            norms.append(torch.linalg.vector_norm(x[:prompts].to(precise(device)), dim=-1, dtype=torch.float64))
            if self.chosen is None:
                directions.append(aligned(x[:prompts]))
            return x

        def watch(layer: int, attention: Attention) -> None:
            if waiting and self._kind(layer, attention) != self._kind(*next(iter(waiting.items()))):
                work()
            waiting[layer] = attention
            settle(attention.query)

        def keep(layer: int, output: Tensor) -> Tensor:
            mixed[layer] = output[:prompts]
            settle(output)
            return output

        def settle(query: Tensor) -> None:
            """Work where there is no more room, and all that wait have what they need."""
            known = all(layer in mixed for layer in waiting if self.norms[layer] is not None)
            if waiting and known and len(waiting) * HELD * query.numel() >= room:
                work()

        def work() -> None:
            found.append(self._of_blocks(list(waiting), list(waiting.values()), norms, mixed, prompts))
            self.report(prompts * len(waiting))
            waiting.clear()

        edits = [Edit("residual", n, stream) for n in range(self.spec.blocks)]
        edits += [Edit("output", n, partial(keep, n)) for n, norm in enumerate(self.norms) if norm is not None]
        run_watched(self.model, embeddings.flatten(0, 1), watch, edits)
        if waiting:
            work()
        whole = {name: torch.cat([some[name] for some in found], 1) for name in found[0]}
        if directions:
            whole |= {"aligned": torch.stack(directions, 1), "norms": torch.stack(norms, 1).float()}
        return {name: values.cpu().numpy() for name, values in whole.items()}

    def _kind(self, layer: int, a: Attention) -> tuple[Any, ...]:
        """What heads must have in common to be worked on side by side; edits of logits know their own block alone."""
        own = id(a) if a.reweigh else None
        return a.scale, a.softcap, a.window, a.prefix, a.sink is None, self.norms[layer] is None, own

    def _of_blocks(
        self,
        layers: list[int],
        attentions: list[Attention],
        norms: list[Tensor],
        mixed: dict[int, Tensor],
        prompts: int,
    ) -> dict[str, Tensor]:
        """Numbers of some blocks of one kind, [prompt, layer, ...]: all their heads side by side."""
        attention, heads = _side_by_side(attentions), self.spec.heads
        gram = torch.cat([self.grams[layer] for layer in layers])
        squares = torch.stack([norms[layer] for layer in layers], 1).square()
        by_stream = torch.where(squares > 0, 1 / squares, 0).repeat_interleave(heads, 1)  # [P, heads, T]
        reach, seeing = self.reaches[layers[0]], self.seeing[layers[0]]
        behind: Any = None
        if self.norms[layers[0]] is not None:
            each = zip(*(self._behind(layer, mixed.pop(layer)) for layer in layers), strict=True)
            behind = [torch.cat(of_blocks, 1)[:, :, 1:reach] for of_blocks in each]
        every = [ALL] if attention.reweigh else shares(len(gram))  # edits of logits take all heads
        each = [
            self._of_heads(
                part_of(attention, heads=some),
                partial(_squares, gram=gram[some], behind=behind and Behind(*(x[:, some] for x in behind))),
                by_stream[:, some, 1:reach],
                reach,
                prompts,
            )
            for some in every
        ]
        found = {name: torch.cat([part[name] for part in each], 1).unflatten(1, (-1, heads)) for name in each[0]}
        found["over"] = found["over"] / seeing
        found["sinks"] = (found["alpha"] > THRESHOLD).sum(2, dtype=torch.float64)
        if self.chosen is None:  # means over heads, of keys that may count as collectors
            found["by_key"] = found["alpha"][..., : counted(self.length)].sum(2) / heads
            found["alpha"] /= self.prompts
        return found

    def _behind(self, layer: int, mixed: Float[Tensor, "prompt head query c"]) -> Behind:
        """One block's norm on what the branch gives, from what its heads give."""
        known, held = self.norms[layer], self.weights.get(layer)
        assert known is not None
        (norm, bias), weights = known, wide(self.model.output_weights(layer) if held is None else held)
        branch = torch.einsum("phic,hcd->pid", mixed.to(weights.dtype), weights) + bias
        inverse = 1 / (branch.square().mean(-1, keepdim=True) + norm.eps)
        unit = branch * (inverse / branch.shape[-1]).sqrt()
        weighed = unit * norm.weight
        along, turned = (torch.einsum("pid,hcd->phic", x, weights) for x in (unit, weighed * norm.weight))
        sizes = (double(x)[:, None].expand(*along.shape[:-1]) for x in (weighed.square().sum(-1), inverse[..., 0]))
        return Behind(along, turned, *sizes)

    def _of_heads(
        self, attention: Attention, squares: Callable[[Tensor], Tensor], by_stream: Tensor, reach: int, prompts: int
    ) -> dict[str, Tensor]:
        """Numbers of some heads, [prompt, head, ...].

        `squares`: of what heads give the queries 1 to `reach`, the squared sizes of what they write; `by_stream`: 1 over
        that of the stream, [prompt, head, query]. One past the last query that sees position 0 is `reach`. Behind the
        `prompts` stand the second view's.
        """
        found = dict[str, Tensor]()

        def gated(x: Float[Tensor, "row head _ c"]) -> Float[Tensor, "row head _ c"]:
            """What W_O reads at the queries 1 to `reach`."""
            return x if attention.gate is None else x * attention.gate[:, :, 1:reach]

        if len(attention.query) > prompts:
            found["reacts"] = _reactions(part_of(attention, positions=slice(reach)), prompts) / max(0, reach - 2)
            first, other = gated(outputs(attention)[:, :, 1:reach]).split(prompts)
            found["reacts_output"] = (squares(first - other) * by_stream).mean(-1)
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
        written_0 = squares(gated(value[..., :1, :]))
        for name, x in zip(NORMS, (value, attention.key), strict=True):
            sizes = torch.linalg.vector_norm(x, dim=-1, dtype=wide(x).dtype)
            found[name] = torch.stack([double(sizes[..., 0]), double(sizes[..., 1:]).mean(-1)], -1)
        if self.spec.sink_logits and attention.sink is not None:
            log_z = double(normalizers(attention)[..., 1:])
            found["sink_logit_share"] = (attention.sink.to(log_z)[:, None] - log_z).exp().mean(-1)

        weights, whole = double(weights[..., 1:reach]), squares(gated(output[..., 1:reach, :]))
        elsewhere = whole  # behind a window of 1 no query sees position 0, and nothing has a size
        if reach > 1:
            elsewhere = squares(gated(outputs(_behind_0(attention, reach))))
        own = weights.square() * written_0
        return found | {
            "attends": weights.mean(-1),
            "written": (own * by_stream).mean(-1),
            "output": (whole * by_stream).mean(-1),
            "output_own": (weights * whole).sum(-1) / (weights * elsewhere).sum(-1),
            "own": own.sum(-1),
            "whole": whole.sum(-1),
        }


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


@torch.no_grad()
def _gram(weights: Float[Tensor, "head c d"], behind: tuple[Norm, Tensor] | None) -> Float[Tensor, "head c c"]:
    exact = wide(weights)
    exact = exact if behind is None else exact * behind[0].weight
    return exact @ exact.mT


def _squares(
    x: Float[Tensor, "prompt head _ c"], gram: Float[Tensor, "head c c"], behind: Behind | None
) -> Float[Tensor, "prompt head _"]:
    """`|x W_O|^2`, of every query or of one for all, behind the norm if there is one.

    Rounding may leave a tiny negative number, which is 0.
    """
    x = x.to(gram.dtype)
    squares = total((x @ gram).mul_(x), -1)
    if behind is not None:
        along, turned = (total(x * to, -1) for to in (behind.along, behind.turned))
        squares = behind.inverse * (squares + along * (along * behind.size - 2 * turned))
    return squares.clamp_min_(0)


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
