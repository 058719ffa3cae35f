"""Passes that continue a context: its keys and values are computed once, and many continuations attend to them.

A row of a pass holds tokens that stand behind the context. They need not be one text: `places` says how far behind the
context's end each of them stands, and `seen` which of the row's tokens it attends to, so that a question and several
answers that begin alike share their beginnings (a tree). All rows read the same keys and values, which are not copied:
per block, products with the context are one matrix product over all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias, TypeGuard

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from ..run.precision import double
from .view import Attention, Edit, View

# (tokens, places, seen) -> the stream after the last block, [row, token, d].
Continuation: TypeAlias = Callable[..., Float[Tensor, "row token d"]]


class Continues(View, Protocol):
    """A view that can run many continuations behind one context; others have None there, or nothing (`continues`)."""

    def behind(self, embeddings: Float[Tensor, "1 position d"], *, edits: Sequence[Edit] = ()) -> Continuation:
        """What runs tokens behind a context that block 0 reads; differentiable with respect to `embeddings`.

        Edits act on the context and on what follows it; those of one position, which is the context's, on that alone.
        """
        ...


def continues(model: View) -> TypeGuard[Continues]:
    """Whether a view can continue a context."""
    return getattr(model, "behind", None) is not None


def behind(model: View, embeddings: Float[Tensor, "1 position d"], *, edits: Sequence[Edit] = ()) -> Continuation:
    """`Continues.behind` of any view; one that cannot continue a context runs the whole text for every end of a row.

    A text's last token, which is predicted there, counts where rotations depend on its length: one stands behind every end.
    """
    if continues(model):
        return model.behind(embeddings, edits=edits)
    length = embeddings.shape[1]
    context = torch.zeros(length, dtype=torch.long)  # ids of no meaning, so that those behind them get their places

    def run(tokens: Tensor, places: Tensor, seen: Tensor) -> Tensor:
        rows = []
        for ids, sees in zip(tokens, seen, strict=True):
            streams: dict[int, Tensor] = {}
            for end in range(len(ids) - 1, -1, -1):
                if end not in streams:  # no later token of the row follows it
                    path = sees[end].nonzero()[:, 0]
                    own = model.embed(torch.cat([context, ids[path], ids[:1]])[None]).detach()[:, length:]
                    whole = model.residual(torch.cat([embeddings, own], 1), edits=edits)
                    streams |= dict(zip(path.tolist(), whole[0, length:-1], strict=True))
            rows.append(torch.stack([streams[n] for n in range(len(ids))]))
        return torch.stack(rows)

    return run


@dataclass(frozen=True)
class Past:
    """What a pass behind a context knows of it, and where its own tokens stand.

    Keys and values have one entry per block, `[G, T, c]`, keys after rotation; `places` count from the context's end.
    """

    keys: tuple[Float[Tensor, "group position c"], ...]
    values: tuple[Float[Tensor, "group position c"], ...]
    places: Int[Tensor, "row token"]
    seen: Bool[Tensor, "row token token"]

    @property
    def positions(self) -> Int[Tensor, "row token"]:
        """Where the tokens stand in the whole text."""
        return self.keys[0].shape[1] + self.places

    def attend(self, layer: int, attention: Attention) -> Attention:
        """The attention of the pass's own tokens `[row, H, token, c]` over context and row, with its output."""
        query, exact = attention.query, torch.promote_types(attention.query.dtype, torch.float32)
        groups = query.shape[1] // len(self.keys[layer])
        past_key, past_value = (x[layer].repeat_interleave(groups, 0).to(query) for x in (self.keys, self.values))
        length, places = past_key.shape[1], self.positions.to(query.device)
        at = places[:, None, :, None]
        keys = torch.cat([torch.arange(length, device=query.device).expand(len(places), -1), places], 1)[:, None, None]
        scaled = (query * attention.scale).to(exact)
        before = torch.einsum("rhtc,hkc->rhtk", scaled, past_key.to(exact))
        products = torch.cat([before, scaled @ attention.key.to(exact).mT], -1)
        hidden = functional.pad(~self.seen[:, None].to(query.device), (length, 0))
        logits = attention.logits_of(products, at, keys).masked_fill(hidden, float("-inf"))
        logits, log_z = attention.edited(logits, at, keys)
        weights = (logits - log_z).exp().to(query.dtype)
        read = torch.einsum("rhtk,hkc->rhtc", weights[..., :length], past_value)
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

    def padded(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """(tokens, places, seen); what is filled up sees itself alone and is read by nobody."""
        places, seen = torch.zeros(size, dtype=torch.long), torch.eye(size, dtype=torch.bool)
        for n, parent in enumerate(self.parents):
            if parent >= 0:
                places[n] = places[parent] + 1
                seen[n] |= seen[parent]
        tokens = torch.zeros(size, dtype=torch.long)
        tokens[: len(self.tokens)] = torch.tensor(self.tokens)
        return tokens, places, seen

    def log_p(self, model: View, stream: Float[Tensor, "token d"]) -> tuple[Float[Tensor, " answer"], bool]:
        """Log probabilities of the answers, and whether the first is the greedy one, from the row's streams."""
        start = len(self.asked.question) - 1
        logits = double(model.unembed(model.norm(stream[start : len(self.tokens)]))).log_softmax(-1)
        at = [[self.nodes[answer[:n]] - start for n in range(len(answer))] for answer in self.asked.answers]
        picked = logits[torch.tensor(at), torch.tensor(self.asked.answers)]  # [answer, token]
        best = logits[torch.tensor(at[0])].argmax(-1).tolist()
        return picked.sum(-1), best == list(self.asked.answers[0])
