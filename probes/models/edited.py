"""Views of a model in whose passes something is changed: another vector at position 0, heads that write nothing, ...

An `Edited` view is a view like any other, so that every probe runs on it unchanged. The model itself stays as it is. What is
changed is a list of `Change`s, which act together: `swapped` and `ablated` (and `reweighed`) can be applied to each other's
views. What a change has to find out by passes of its own (a mean, another token's keys) is found under those before it: it
changes the model that the others left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .behind import Continuation, Continues
from .initialization import CONFIG, Rule
from .view import Edit, Identity, Parts, Trace, View


@runtime_checkable
class Change(Protocol):
    """What an edited view does otherwise than its model, which is the view that it was made from."""

    @property
    def said(self) -> str:
        """In a few words, for results; empty where results say it otherwise."""
        ...

    def embedded(self, model: View, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position d"] | None:
        """What block 0 reads instead; None: the model's own."""
        ...

    def edits(self, model: View, embeddings: Float[Tensor, "batch position d"]) -> Sequence[Edit]:
        """The edits of a pass."""
        ...

    def on(self, fresh: View) -> Change:
        """The same change of a model with fresh weights."""
        ...


@contextmanager
def unheard(model: View) -> Iterator[None]:
    """Passes inside it are a change's own: no watcher of the caller's is told of them, and no gradient is kept."""
    with model.watching(lambda layer, attention: None), torch.no_grad():
        yield


class Edited:
    """`View` of another view's model in whose passes something is changed.

    `before` is the view it was made from, `original` the one without any change, `changes` what is done to that. `identity`
    is the original's, but that its name says what was changed: the weights are the original's.
    """

    def __init__(self, model: View, change: Change) -> None:
        self.before: View = model
        self.original: View = model.original if isinstance(model, Edited) else model
        self.changes: tuple[Change, ...] = (*model.changes, change) if isinstance(model, Edited) else (change,)
        self.spec, self.tokenizer, self.first_ids, self.bos = model.spec, model.tokenizer, model.first_ids, model.bos
        self.device, self.dtype, self.offloaded = model.device, model.dtype, model.offloaded
        self.watching, self.norm, self.unembed = model.watching, model.norm, model.unembed
        self.output_weights = model.output_weights
        if isinstance(self.original, Continues):
            self.behind = self._behind

    @property
    def said(self) -> str:
        """What is changed, in a few words; empty for another embedding at position 0, which results say otherwise."""
        return ", ".join(change.said for change in self.changes if change.said)

    @property
    def identity(self) -> Identity:
        own = self.original.identity
        return replace(own, name=f"{own.name} ({self.said})") if self.said else own

    @property
    def replacement(self) -> int | str | None:
        """What stands at position 0 instead of the prompt's own token, if anything does."""
        found = [getattr(change, "replacement", None) for change in self.changes if not change.said]
        return next((one for one in found if one is not None), None)

    def embed(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position d"]:
        found = self.changes[-1].embedded(self.before, tokens)
        return self.before.embed(tokens) if found is None else found

    def edits(self, embeddings: Float[Tensor, "batch position d"]) -> list[Edit]:
        """Of a pass over these embeddings."""
        earlier = self.before.edits(embeddings) if isinstance(self.before, Edited) else []
        return [*earlier, *self.changes[-1].edits(self.before, embeddings)]

    def residual(
        self, embeddings: Float[Tensor, "batch position d"], *, edits: Sequence[Edit] = ()
    ) -> Float[Tensor, "batch position d"]:
        return self.original.residual(embeddings, edits=[*self.edits(embeddings), *edits])

    def _behind(self, embeddings: Float[Tensor, "1 position d"], *, edits: Sequence[Edit] = ()) -> Continuation:
        assert isinstance(self.original, Continues)
        return self.original.behind(embeddings, edits=[*self.edits(embeddings), *edits])

    @torch.no_grad()
    def trace(
        self,
        embeddings: Float[Tensor, "batch position d"],
        *,
        attention: bool = False,
        edits: Sequence[Edit] = (),
    ) -> Trace:
        """As `View` says, but a change of the stream belongs to the block that reads it: derivatives pass through it.

        `residual[l]` is then what enters that change.
        """
        own = self.edits(embeddings)
        changes: dict[int, list[Edit]] = {}
        for edit in own:
            if edit.site == "residual":
                changes.setdefault(edit.layer, []).append(edit)
        entering: dict[int, Tensor] = {}

        def keep(layer: int, stream: Tensor) -> Tensor:
            entering[layer] = stream
            return stream

        keeping = [Edit("residual", layer, partial(keep, layer)) for layer in changes]
        traced = self.original.trace(embeddings, attention=attention, edits=[*keeping, *own, *edits])

        def changed(block: Callable[[Tensor], Tensor], first: Sequence[Edit], stream: Tensor) -> Tensor:
            for edit in first:
                stream = edit(stream)
            return block(stream)

        blocks = [partial(changed, one, changes[n]) if n in changes else one for n, one in enumerate(traced.blocks)]
        residual = [entering.get(n, stream) for n, stream in enumerate(traced.residual)]
        return replace(traced, blocks=tuple(blocks), residual=tuple(residual))

    def parts(self, layer: int) -> Parts | None:
        """None for a block that is changed: its parts do not say what it does."""
        places = self.original.embed(torch.zeros(1, 2, dtype=torch.long))
        return None if any(edit.layer == layer for edit in self.edits(places)) else self.original.parts(layer)

    def reinitialized(self, seed: int, *, positional: bool = True, initialization: Rule = CONFIG) -> Edited:
        """Fresh weights, changed in the same way: a mean is the fresh weights' own."""
        fresh: Any = self.original.reinitialized(seed, positional=positional, initialization=initialization)
        for change in self.changes:
            fresh = Edited(fresh, change.on(fresh))
        return fresh
