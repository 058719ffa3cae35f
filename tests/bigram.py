"""Views written out by hand: a base for them, and a model without blocks for what concerns text, tokens and results only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from probes.data.documents import Document
from probes.models.checks import first_ids
from probes.models.view import Edit, Identity, Parts, Spec, Trace, Watcher
from toy.corpus import train_tokenizer

TEXT = "the cat sat on a mat and one dog ran over some red hill while two birds sang of rain in early spring"
WORDS = TEXT.split()


@dataclass
class ByHand:
    """A view of blocks that nothing can be taken apart of; here there are none."""

    spec: Spec
    identity: Identity
    embedding: Tensor
    tokenizer: Any = None
    first_ids: tuple[int, ...] = ()
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable
    dtype: torch.dtype = torch.float32
    offloaded: bool = False

    @property
    def bos(self) -> int | None:
        return self.first_ids[0] if self.first_ids else None

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding[tokens]

    def block(self, x: Tensor) -> Tensor:
        raise IndexError("there is no block")

    def trace(self, embeddings: Tensor, *, attention: bool = False, edits: Sequence[Edit] = ()) -> Trace:
        streams = [embeddings]
        for _ in range(self.spec.blocks):
            streams.append(self.block(streams[-1]))
        return Trace(tuple(streams), (self.block,) * self.spec.blocks, (None,) * self.spec.blocks)

    def residual(self, embeddings: Tensor, *, edits: Sequence[Edit] = ()) -> Tensor:
        return self.trace(embeddings).residual[-1]

    def watching(self, watcher: Watcher) -> AbstractContextManager[None]:
        return nullcontext()  # there is no attention to be seen

    def output_weights(self, layer: int) -> Tensor:
        raise IndexError(f"there is no block {layer}")

    def norm(self, residual: Tensor) -> Tensor:
        return residual

    def unembed(self, normed: Tensor) -> Tensor:
        return normed @ self.embedding.T

    def parts(self, layer: int) -> Parts | None:
        return None

    def reinitialized(self, seed: int, *, positional: bool = True, initialization: Any = "config") -> ByHand:
        fresh = torch.randn(self.embedding.shape, generator=torch.Generator().manual_seed(seed))
        condition = "init" if positional else "init-nope"
        identity = replace(self.identity, condition=condition, weights=f"{condition} {seed}")
        return replace(self, embedding=fresh, identity=identity)


def identity(name: str, **more: str) -> Identity:
    told = {"config": "{}", "backend": "tests", "dtype": "float32", "device": "cpu"} | more
    return Identity(name, None, "pretrained", "0" * 64, **told)


def bigram(*, bos: bool, max_length: int | None = None, vocabulary: int | None = None) -> ByHand:
    """Logits depend on the last token alone; its byte-level tokenizer knows `WORDS`; BOS, if there is one, has id 0."""
    tokenizer = train_tokenizer([Document("words", " ".join(WORDS * 3))], vocabulary=300, bos=bos)
    ids = len(tokenizer) if vocabulary is None else vocabulary
    spec = Spec("bigram", 0, 0, 0, 0, 4, ids, (), (), max_length, None)
    embedding = torch.randn(ids, 4, generator=torch.Generator().manual_seed(99))
    made = identity("bigram", config=json.dumps({"width": 4}))
    return ByHand(spec, made, embedding, tokenizer, first_ids(tokenizer))
