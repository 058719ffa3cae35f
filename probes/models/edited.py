"""Views of a model in whose passes something is changed: another vector at position 0, heads that write nothing, ...

An `Edited` view is a view like any other, so that every probe runs on it unchanged. The model itself stays as it is.
Changes add up: `swapped`, `ablated` and the others can be applied to each other's views. What a change has to find out by
passes (a mean, another token's keys) it finds in the model that the changes before it left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .behind import Continuation, continues
from .initialization import CONFIG, Rule
from .view import Edit, Identity, Parts, Trace, View


@dataclass(frozen=True)
class Change:
    """What an edited view does otherwise than the model it was made from.

    `edits(model, prepared, embeddings)` gives the edits of a pass over these embeddings. `prepared(model)` makes, once for
    a model, what they need of passes; no watcher is told of those. `embedded(model, prepared, tokens)` is what block 0
    reads instead. `said` says in a few words what is changed, and is empty where results say it as `replacement`, which
    changes of position 0 have. `prefix`: as in the `Spec` of the changed model.
    """

    said: str
    edits: Callable[[View, Any, Tensor], Sequence[Edit]]
    prepared: Callable[[View], Any] = lambda model: None
    embedded: Callable[[View, Any, Tensor], Tensor] | None = None
    replacement: int | str | None = None
    prefix: int | None = None


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
        self.change = change
        self.original: View = model.original if isinstance(model, Edited) else model
        self.changes: tuple[Change, ...] = (*model.changes, change) if isinstance(model, Edited) else (change,)
        self.spec, self.tokenizer, self.first_ids, self.bos = model.spec, model.tokenizer, model.first_ids, model.bos
        self.device, self.dtype, self.offloaded = model.device, model.dtype, model.offloaded
        self.watching, self.norm, self.unembed = model.watching, model.norm, model.unembed
        self.output_weights, self.output_norm = model.output_weights, model.output_norm
        if change.prefix is not None:
            self.spec = replace(self.spec, prefix=change.prefix)
        if not continues(self.original) or self.spec.prefix is not None:
            self.behind = None  # type: ignore[assignment, method-assign]

    @cached_property
    def prepared(self) -> Any:
        """What the last change found out about the model before it."""
        with unheard(self.before):
            return self.change.prepared(self.before)

    @property
    def said(self) -> str:
        """What is changed, in a few words; empty for another embedding at position 0, which results say otherwise."""
        return ", ".join(change.said for change in self.changes if change.said)

    @property
    def identity(self) -> Identity:
        original = self.original.identity
        return replace(original, name=f"{original.name} ({self.said})") if self.said else original

    @property
    def replacement(self) -> int | str | None:
        """What stands at position 0 instead of the prompt's own token, if anything does and `said` does not say it."""
        return next((c.replacement for c in self.changes if c.replacement is not None and not c.said), None)

    def embed(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position d"]:
        if self.change.embedded is None:
            return self.before.embed(tokens)
        return self.change.embedded(self.before, self.prepared, tokens)

    def edits(self, embeddings: Float[Tensor, "batch position d"]) -> list[Edit]:
        """Of a pass over these embeddings."""
        earlier = self.before.edits(embeddings) if isinstance(self.before, Edited) else []
        return [*earlier, *self.change.edits(self.before, self.prepared, embeddings)]

    def residual(
        self, embeddings: Float[Tensor, "batch position d"], *, edits: Sequence[Edit] = ()
    ) -> Float[Tensor, "batch position d"]:
        return self.original.residual(embeddings, edits=[*self.edits(embeddings), *edits])

    def behind(self, embeddings: Float[Tensor, "context position d"], *, edits: Sequence[Edit] = ()) -> Continuation:
        """As `Continues`."""
        assert continues(self.original)
        return self.original.behind(embeddings, edits=[*self.edits(embeddings), *edits])

    @torch.no_grad()
    def trace(
        self, embeddings: Float[Tensor, "batch position d"], *, attention: bool = False, edits: Sequence[Edit] = ()
    ) -> Trace:
        """As `View` says, but a change of the stream belongs to the block that reads it: derivatives pass through it.

        `residual[l]` is then what enters that change.
        """
        changes = self.edits(embeddings)
        of_stream: dict[int, list[Edit]] = {}
        for edit in changes:
            if edit.site == "residual":
                of_stream.setdefault(edit.layer, []).append(edit)
        entering: dict[int, Tensor] = {}

        def keep(layer: int, stream: Tensor) -> Tensor:
            entering[layer] = stream
            return stream

        def changed(block: Callable[[Tensor], Tensor], first: Sequence[Edit], stream: Tensor) -> Tensor:
            for edit in first:
                stream = edit(stream)
            return block(stream)

        keeping = [Edit("residual", layer, partial(keep, layer)) for layer in of_stream]
        traced = self.original.trace(embeddings, attention=attention, edits=[*keeping, *changes, *edits])
        blocks = [partial(changed, block, of_stream.get(n, ())) for n, block in enumerate(traced.blocks)]
        residual = [entering.get(n, stream) for n, stream in enumerate(traced.residual)]
        return replace(traced, blocks=tuple(blocks), residual=tuple(residual))

    def parts(self, layer: int) -> Parts | None:
        """None for a block that is changed: its parts do not say what it does."""
        return None if layer in self._changed else self.original.parts(layer)

    @cached_property
    def _changed(self) -> set[int]:
        """Blocks that are changed, whatever the pass."""
        return {edit.layer for edit in self.edits(self.original.embed(torch.zeros(1, 2, dtype=torch.long)))}

    def reinitialized(self, seed: int, *, positional: bool = True, initialization: Rule = CONFIG) -> Edited:
        """Fresh weights, changed in the same way: a mean is the fresh weights' own."""
        fresh: Any = self.original.reinitialized(seed, positional=positional, initialization=initialization)
        for change in self.changes:
            fresh = Edited(fresh, change)
        return fresh


@torch.no_grad()
def passing(model: View, tokens: Int[Tensor, "prompt position"], look: Callable[[int, Tensor], None]) -> None:
    """One pass in which `look(layer, streams [prompt, T, d])` sees what every block reads, then the last; none is kept."""

    def seen(layer: int, streams: Tensor) -> Tensor:
        look(layer, streams)
        return streams

    edits = [Edit("residual", layer, partial(seen, layer)) for layer in range(model.spec.blocks)]
    seen(model.spec.blocks, model.residual(model.embed(tokens), edits=edits))
