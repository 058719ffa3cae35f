"""Passes that continue contexts: their keys and values are computed once, and many continuations attend to them.

A row of a pass holds tokens that stand behind a context, one behind the other. All rows of a context read the same keys and
values, which are not copied: per block, products with a context are one matrix product over its rows. Contexts of one length
go together, each with as many rows, which stand in the order of their contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, TypeGuard

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from ..errors import InputError
from ..run.memory import block_numbers, parts
from ..run.precision import double
from .checks import check_length, check_logits
from .view import Attention, Edit, View

LOGITS_AT_ONCE = 1 << 24  # in float64: 128 MiB
# Ids of rows -> the stream after the last block, as long as the longest row; behind a shorter one's end it means nothing.
Continuation: TypeAlias = Callable[[Sequence[Sequence[int]]], Float[Tensor, "row token d"]]


class Continues(View, Protocol):
    """A view that can run many continuations behind one context; others have None there, or nothing (`continues`)."""

    def behind(self, embeddings: Float[Tensor, "context position d"], *, edits: Sequence[Edit] = ()) -> Continuation:
        """What runs tokens behind contexts that block 0 reads; differentiable with respect to `embeddings`.

        Edits act on a context and on what follows it; those of one position, which is the context's, on that alone.
        """
        ...


def continues(model: View) -> TypeGuard[Continues]:
    """Whether a view can continue a context."""
    return getattr(model, "behind", None) is not None


def behind(model: View, embeddings: Float[Tensor, "context position d"], *, edits: Sequence[Edit] = ()) -> Continuation:
    """`Continues.behind` of any view; one that cannot continue a context runs the whole text of every row.

    A text's last token, which is predicted there, counts where rotations depend on its length: one stands behind every row.
    """
    if continues(model):
        return model.behind(embeddings, edits=edits)
    length = embeddings.shape[1]
    context = [0] * length  # ids of no meaning, so that those behind them get their places

    def run(rows: Sequence[Sequence[int]]) -> Tensor:
        streams, each, size = [], len(rows) // len(embeddings), max(map(len, rows))
        for n, ids in enumerate(rows):
            own = model.embed(torch.tensor([[*context, *ids, ids[0]]])).detach()[:, length:]
            whole = model.residual(torch.cat([embeddings[n // each][None], own], 1), edits=edits)
            streams.append(functional.pad(whole[0, length:-1], (0, 0, 0, size - len(ids))))
        return torch.stack(streams)

    return run


@torch.no_grad()
def continued(
    model: View, tokens: Int[Tensor, "prompt position"], count: int, report: Callable[[int], Any] = lambda blocks: None
) -> Int[Tensor, "prompt written"]:
    """The next `count` tokens of each prompt, each the most probable one, computed behind the prompt's keys and values.

    `report` hears how many blocks were run.

    Raises:
        InputError: fewer than 1 token, queries that see keys behind them, or more text than the model was made for.
    """
    length = tokens.shape[1]
    if count < 1:
        raise InputError(f"answer={count} tokens are too few; give 1 or more")
    if (model.spec.prefix or 0) > 1:
        raise InputError(
            f"in {model.identity.name} queries see keys behind them, so that it writes nothing; leave answer out"
        )
    check_length(model, length + count, f"prompts of {length} tokens and an answer of {count}", "ask for fewer")
    check_logits(model)
    run, rows = behind(model, model.embed(tokens[:, :-1])), tokens[:, -1:].tolist()
    for _ in range(count):
        best = model.unembed(model.norm(run(rows)[:, -1])).argmax(-1).tolist()
        rows = [[*row, token] for row, token in zip(rows, best, strict=True)]
        report(len(rows) * model.spec.blocks)
    return torch.tensor(rows)[:, 1:]


@dataclass(frozen=True)
class Past:
    """What a pass behind contexts knows of them: one entry per block, `[context, G, T, c]`, keys after rotation."""

    keys: tuple[Float[Tensor, "context group position c"], ...]
    values: tuple[Float[Tensor, "context group position c"], ...]

    def attend(self, layer: int, attention: Attention) -> Attention:
        """The attention of the pass's own tokens `[row, H, token, c]` over context and row, with its output."""
        query, exact = attention.query, torch.promote_types(attention.query.dtype, torch.float32)
        groups = query.shape[1] // self.keys[layer].shape[1]
        past_key, past_value = (x[layer].to(query).repeat_interleave(groups, 1) for x in (self.keys, self.values))
        contexts, length = len(past_key), past_key.shape[-2]
        keys = torch.arange(length + query.shape[-2], device=query.device)[None]
        at = keys.mT[length:]
        scaled = (query * attention.scale).to(exact)
        before = torch.einsum("brhtc,bhkc->brhtk", scaled.unflatten(0, (contexts, -1)), past_key.to(exact))
        products = torch.cat([before.flatten(0, 1), scaled @ attention.key.to(exact).mT], -1)
        logits = attention.logits_of(products, at, keys)
        logits, log_z = attention.edited(logits, at, keys)
        weights = (logits - log_z).exp().to(query.dtype)
        of_context = weights[..., :length].unflatten(0, (contexts, -1))
        read = torch.einsum("brhtk,bhkc->brhtc", of_context, past_value).flatten(0, 1)
        return replace(attention, output=read + weights[..., length:] @ attention.value)


@dataclass(frozen=True)
class Asked:
    """One question behind a context, in ids, and the answer that is scored."""

    question: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def row(self) -> tuple[int, ...]:
        """What a pass reads: all but the answer's last token."""
        return self.question + self.answer[:-1]


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Rows of one length; nothing that comes earlier sees what is filled up."""
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for own, ids in zip(tokens.numpy(), rows, strict=True):
        own[: len(ids)] = ids
    return tokens


def log_p(
    model: View, asked: Sequence[Asked], streams: Float[Tensor, "row token d"]
) -> tuple[Float[Tensor, " row"], Bool[Tensor, " row"]]:
    """Log probabilities of the answers, and which of them a greedy reader says, from the streams of their rows."""
    most = max(len(one.answer) for one in asked)
    numbers = max(LOGITS_AT_ONCE, block_numbers(model.device))  # few rows would read the head's weights again and again
    size = max(1, numbers // (parts() * most * model.spec.vocabulary))
    chunks = range(0, len(asked), size)
    found = [_log_p(model, asked[start : start + size], streams[start : start + size]) for start in chunks]
    values, greedy = (torch.cat(each) for each in zip(*found, strict=True))
    return values, greedy


def _log_p(model: View, asked: Sequence[Asked], streams: Float[Tensor, "row token d"]) -> tuple[Tensor, Tensor]:
    longest, width, nodes = max(len(one.answer) for one in asked), streams.shape[1], list[int]()
    at, tokens = np.zeros((2, len(asked), longest), dtype=np.int64)
    known = np.zeros(at.shape, dtype=bool)
    for n, one in enumerate(asked):
        count, start = len(one.answer), n * width + len(one.question) - 1
        at[n, :count], tokens[n, :count], known[n, :count] = range(len(nodes), len(nodes) + count), one.answer, True
        nodes += range(start, start + count)
    normed = model.norm(streams.flatten(0, 1)[torch.tensor(nodes, device=streams.device)])
    logits = double(model.unembed(normed)).log_softmax(-1)
    of, said, counted = (torch.from_numpy(x).to(logits.device) for x in (at, tokens, known))
    picked = logits[of, said].masked_fill(~counted, 0)  # [row, token]
    best = (logits.argmax(-1)[of] == said) | ~counted
    return picked.sum(-1), best.all(-1)
