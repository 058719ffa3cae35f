"""Passes that continue contexts: their keys and values are computed once, and many continuations attend to them.

A row of a pass holds tokens that stand behind a context. They need not be one text: `places` says how far behind the
context's end each of them stands, and `seen` which of the row's tokens it attends to, so that a question and several
answers that begin alike share their beginnings (a tree). All rows of a context read the same keys and values, which are not
copied: per block, products with a context are one matrix product over its rows. Contexts of one length go together, each
with as many rows, which stand in the order of their contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Protocol, TypeAlias, TypeGuard

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from ..run.memory import block_numbers, parts
from ..run.precision import double
from .view import Attention, Edit, View

LOGITS_AT_ONCE = 1 << 24  # in float64: 128 MiB
# (tokens, places, seen) -> the stream after the last block, [row, token, d].
Continuation: TypeAlias = Callable[..., Float[Tensor, "row token d"]]


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
    """`Continues.behind` of any view; one that cannot continue a context runs the whole text for every end of a row.

    A text's last token, which is predicted there, counts where rotations depend on its length: one stands behind every end.
    """
    if continues(model):
        return model.behind(embeddings, edits=edits)
    length = embeddings.shape[1]
    context = torch.zeros(length, dtype=torch.long)  # ids of no meaning, so that those behind them get their places

    def run(tokens: Tensor, places: Tensor, seen: Tensor) -> Tensor:
        rows, each = [], len(tokens) // len(embeddings)
        for n, (ids, sees) in enumerate(zip(tokens, seen, strict=True)):
            own_context = embeddings[n // each][None]
            streams: dict[int, Tensor] = {}
            for end in range(len(ids) - 1, -1, -1):
                if end not in streams:  # no later token of the row follows it
                    path = sees[end].nonzero()[:, 0]
                    own = model.embed(torch.cat([context, ids[path], ids[:1]])[None]).detach()[:, length:]
                    whole = model.residual(torch.cat([own_context, own], 1), edits=edits)
                    streams |= dict(zip(path.tolist(), whole[0, length:-1], strict=True))
            rows.append(torch.stack([streams[n] for n in range(len(ids))]))
        return torch.stack(rows)

    return run


@dataclass(frozen=True)
class Past:
    """What a pass behind contexts knows of them, and where its own tokens stand.

    Keys and values have one entry per block, `[context, G, T, c]`, keys after rotation; `places` count from a context's
    end.
    """

    keys: tuple[Float[Tensor, "context group position c"], ...]
    values: tuple[Float[Tensor, "context group position c"], ...]
    places: Int[Tensor, "row token"]
    seen: Bool[Tensor, "row token token"]

    @cached_property
    def positions(self) -> Int[Tensor, "row token"]:
        """Where the tokens stand in the whole text."""
        return self.keys[0].shape[-2] + self.places

    @cached_property
    def _masks(self) -> dict[torch.device, tuple[Tensor, Tensor, Tensor]]:
        """Positions of queries and of keys, and which keys of the row a token does not see; on every device that asked."""
        return {}

    def _masks_on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        if device not in self._masks:
            length, places = self.keys[0].shape[-2], self.positions.to(device)
            keys = torch.cat([torch.arange(length, device=device).expand(len(places), -1), places], 1)
            hidden = functional.pad(~self.seen.to(device), (length, 0))
            self._masks[device] = places[:, None, :, None], keys[:, None, None], hidden[:, None]
        return self._masks[device]

    def attend(self, layer: int, attention: Attention) -> Attention:
        """The attention of the pass's own tokens `[row, H, token, c]` over context and row, with its output."""
        query, exact = attention.query, torch.promote_types(attention.query.dtype, torch.float32)
        groups = query.shape[1] // self.keys[layer].shape[1]
        past_key, past_value = (x[layer].to(query).repeat_interleave(groups, 1) for x in (self.keys, self.values))
        contexts, length = len(past_key), past_key.shape[-2]
        at, keys, hidden = self._masks_on(query.device)
        scaled = (query * attention.scale).to(exact)
        before = torch.einsum("brhtc,bhkc->brhtk", scaled.unflatten(0, (contexts, -1)), past_key.to(exact))
        products = torch.cat([before.flatten(0, 1), scaled @ attention.key.to(exact).mT], -1)
        logits = attention.logits_of(products, at, keys).masked_fill_(hidden, float("-inf"))
        logits, log_z = attention.edited(logits, at, keys)
        weights = (logits - log_z).exp().to(query.dtype)
        of_context = weights[..., :length].unflatten(0, (contexts, -1))
        read = torch.einsum("brhtk,bhkc->brhtc", of_context, past_value).flatten(0, 1)
        return replace(attention, output=read + weights[..., length:] @ attention.value)


@dataclass(frozen=True)
class Asked:
    """One question behind a context: its ids, and the answers that are scored, the right one first."""

    question: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]


class Row:
    """A question and the tree of its answers: every beginning of an answer that another token follows is one node."""

    def __init__(self, asked: Asked) -> None:
        self.asked, count = asked, len(asked.question)
        self.tokens, self.parents = list(asked.question), [*range(-1, count - 1)]
        nodes: dict[tuple[int, ...], int] = {(): count - 1}
        for answer in asked.answers:
            for n in range(1, len(answer)):
                if answer[:n] not in nodes:
                    nodes[answer[:n]] = len(self.tokens)
                    self.tokens.append(answer[n - 1])
                    self.parents.append(nodes[answer[: n - 1]])
        self.nodes = nodes


def padded(rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, places, seen) of rows; what is filled up sees itself alone and is read by nobody."""
    size = max(len(row.tokens) for row in rows)
    tokens = np.zeros((len(rows), size), dtype=np.int64)
    for n, row in enumerate(rows):
        tokens[n, : len(row.tokens)] = row.tokens
    places, seen = zip(*(_tree(tuple(row.parents), size) for row in rows), strict=True)
    return torch.from_numpy(tokens), torch.from_numpy(np.stack(places)), torch.from_numpy(np.stack(seen))


@lru_cache(maxsize=64)  # questions of one kind have one tree
def _tree(parents: tuple[int, ...], size: int) -> tuple[np.ndarray, np.ndarray]:
    places, seen = np.zeros(size, dtype=np.int64), np.eye(size, dtype=bool)
    for n, parent in enumerate(parents):
        if parent >= 0:
            places[n] = places[parent] + 1
            seen[n] |= seen[parent]
    return places, seen


def log_p(
    model: View, rows: Sequence[Row], streams: Float[Tensor, "row token d"]
) -> tuple[Float[Tensor, "row answer"], Bool[Tensor, "row answer"]]:
    """Log probabilities of all answers, and which of them a greedy reader says, from the rows' streams.

    Rows have one number of answers; these may differ in length.
    """
    most = max(len(row.nodes) for row in rows)
    numbers = max(LOGITS_AT_ONCE, block_numbers(model.device))  # few rows would read the head's weights again and again
    size = max(1, numbers // (parts() * most * model.spec.vocabulary))
    chunks = range(0, len(rows), size)
    found = [_log_p(model, rows[start : start + size], streams[start : start + size]) for start in chunks]
    values, greedy = (torch.cat(each) for each in zip(*found, strict=True))
    return values, greedy


def _log_p(model: View, rows: Sequence[Row], streams: Float[Tensor, "row token d"]) -> tuple[Tensor, Tensor]:
    answers = [answer for row in rows for answer in row.asked.answers]
    longest, width, nodes = max(map(len, answers)), streams.shape[1], list[int]()
    at, tokens = np.zeros((2, len(answers), longest), dtype=np.int64)
    known, n = np.zeros(at.shape, dtype=bool), 0
    for number, row in enumerate(rows):
        start, first = len(row.asked.question) - 1, len(nodes)
        nodes += range(number * width + start, number * width + len(row.tokens))
        for answer in row.asked.answers:
            at[n, : len(answer)] = [first + row.nodes[answer[:end]] - start for end in range(len(answer))]
            tokens[n, : len(answer)], known[n, : len(answer)] = answer, True
            n += 1
    normed = model.norm(streams.flatten(0, 1)[torch.tensor(nodes, device=streams.device)])
    logits = double(model.unembed(normed)).log_softmax(-1)
    place = logits.device
    of, said, counted = (torch.from_numpy(x).to(place) for x in (at, tokens, known))
    picked = logits[of, said].masked_fill(~counted, 0)  # [answer of all rows, token]
    best = (logits.argmax(-1)[of] == said) | ~counted
    return picked.sum(-1).unflatten(0, (len(rows), -1)), best.all(-1).unflatten(0, (len(rows), -1))
