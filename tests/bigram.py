"""A model without blocks: its logits depend on the last token alone. For what concerns text, tokens and results only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from probes.data.documents import Document
from probes.models.view import Edit, Identity, Parts, Spec, Trace, Watcher
from toy.corpus import train_tokenizer

TEXT = "the cat sat on a mat and one dog ran over some red hill while two birds sang of rain in early spring"
WORDS = TEXT.split()


@dataclass
class Bigram:
    """Embedding and unembedding of `spec.vocabulary` by `spec.width`, nothing between them."""

    spec: Spec
    identity: Identity
    tokenizer: Any
    embedding: Tensor
    bos: int | None
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable
    dtype: torch.dtype = torch.float32
    offloaded: bool = False

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding[tokens]

    def trace(self, embeddings: Tensor, *, attention: bool = False, edits: Sequence[Edit] = ()) -> Trace:
        return Trace((embeddings,), (), ())

    def residual(self, embeddings: Tensor, *, edits: Sequence[Edit] = ()) -> Tensor:
        return embeddings

    def watching(self, watcher: Watcher) -> AbstractContextManager[None]:
        return nullcontext()

    def output_weights(self, layer: int) -> Tensor:
        raise IndexError(f"there is no block {layer}")

    def norm(self, residual: Tensor) -> Tensor:
        return residual

    def unembed(self, normed: Tensor) -> Tensor:
        return normed @ self.embedding.T

    def parts(self, layer: int) -> Parts | None:
        return None

    def reinitialized(self, seed: int, *, positional: bool = True, initialization: Any = "config") -> Bigram:
        fresh = torch.randn(self.embedding.shape, generator=torch.Generator().manual_seed(seed))
        condition = "init" if positional else "init-nope"
        return replace(
            self, embedding=fresh, identity=replace(self.identity, condition=condition, weights=f"{condition} {seed}")
        )


def bigram(*, bos: bool, max_length: int | None = None, vocabulary: int | None = None) -> Bigram:
    """A model whose byte-level tokenizer knows `WORDS`; BOS, if there is one, has id 0."""
    tokenizer = train_tokenizer([Document("words", " ".join(WORDS * 3))], vocabulary=300, bos=bos)
    ids = len(tokenizer) if vocabulary is None else vocabulary
    spec = Spec("bigram", 0, 0, 0, 0, 4, ids, (), (), max_length, None)
    identity = Identity(
        name="bigram",
        revision=None,
        condition="pretrained",
        weights="0" * 64,
        config=json.dumps({"width": 4}),
        backend="tests",
        dtype="float32",
        device="cpu",
    )
    embedding = torch.randn(ids, 4, generator=torch.Generator().manual_seed(99))
    return Bigram(spec, identity, tokenizer, embedding, tokenizer.bos_token_id)
