"""A model that looks things up by attention, built by hand: at every position, what followed the same tokens before."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from probes.models.view import Identity, Parts, Spec, Trace, Watcher

SURE = 50.0  # logits per token that agrees: one token less, and the weight is e^-50 of it


class Lookup:
    """One head. Its query is the last `memory` tokens, a key those before a position, the value that position's token."""

    def __init__(self, tokenizer: Any, *, memory: int = 16, window: int | None = None) -> None:
        size = len(tokenizer)
        self.tokenizer, self.memory, self.window = tokenizer, memory, window
        self.spec = Spec("lookup", 1, 1, 1, size, size, size, ("none",), (window,), None, None)
        self.identity = Identity("lookup", None, "pretrained", "0" * 64, "{}", "tests", "float64", "cpu")
        self.device, self.dtype, self.offloaded = torch.device("cpu"), torch.float64, False
        self.bos, self.first_ids = None, ()

    def embed(self, tokens: Tensor) -> Tensor:
        return functional.one_hot(tokens, self.spec.vocabulary).double()

    def residual(self, embeddings: Tensor, *, edits: Any = ()) -> Tensor:
        """The attention's output alone: the distribution of the next token, up to its smallest entries."""
        ids, length = embeddings.argmax(-1), embeddings.shape[1]
        agree = torch.zeros(len(ids), length, length, dtype=torch.float64)
        for back in range(self.memory):
            asked = functional.pad(ids, (back, 0), value=-1)[:, :length]
            stored = functional.pad(ids, (back + 1, 0), value=-2)[:, :length]
            agree += SURE * (asked[:, :, None] == stored[:, None, :]) * (agree == SURE * back)
        at = torch.arange(length)
        seen = at[None, :] <= at[:, None]
        if self.window is not None:
            seen &= at[None, :] > at[:, None] - self.window
        return agree.masked_fill(~seen, float("-inf")).softmax(-1) @ embeddings

    def trace(self, embeddings: Tensor, *, attention: bool = False, edits: Any = ()) -> Trace:
        return Trace((embeddings, self.residual(embeddings)), (), ())

    def watching(self, watcher: Watcher) -> AbstractContextManager[None]:
        return nullcontext()

    def output_weights(self, layer: int) -> Tensor:
        raise IndexError(f"there is no block {layer}")

    def output_norm(self, layer: int) -> None:
        raise IndexError(f"there is no block {layer}")

    def norm(self, residual: Tensor) -> Tensor:
        return residual

    def unembed(self, normed: Tensor) -> Tensor:
        return (normed + 1e-12).log()

    def parts(self, layer: int) -> Parts | None:
        return None

    def reinitialized(self, seed: int, *, positional: bool = True, initialization: Any = "config") -> Lookup:
        raise NotImplementedError
