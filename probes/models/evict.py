"""Attention with a key-value cache that keeps the first and the last keys alone, as a view that probes can be run on.

[Xiao], StreamingLLM, arXiv 2309.17453, section 3.2; what is kept and how it is numbered: `docs/probes/sinks.md`, "Eviction".
Rotations belong to a pass, which is why the angles are read from one.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from .edited import Change, Edited, unheard
from .linear import rotate
from .view import Attention, Edit, Spec, View


class _Block(NamedTuple):
    """What logits of a block are made by: (cos, sin) of unit rotations [T, rotated], or None; scale, soft-cap, slopes."""

    rotation: tuple[Tensor, Tensor] | None
    attention: Attention


@dataclass(frozen=True)
class _Kept:
    """The edit of one block's logits in one pass; `block` where positions are numbered by the cache."""

    first: int
    last: int
    block: _Block | None = None
    value_0: bool = True  # whether the value of key 0 is kept
    seen: dict[str, Tensor] = field(default_factory=dict)  # the pass's queries and keys

    def __call__(self, logits: Tensor, log_z: Tensor, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        if self.block is not None and self.first:
            moved = self._moved(self.block, queries).to(logits)
            at_first = torch.where(queries >= self.first + self.last, moved, logits[..., : self.first])
            logits = torch.cat([at_first, logits[..., self.first :]], -1)
        logits = logits.masked_fill((keys >= self.first) & (keys <= queries - self.last), float("-inf"))
        log_z = logits.logsumexp(-1, keepdim=True)
        if not self.value_0:  # its weight is in log Z, and gives nothing
            logits = logits.masked_fill((keys == 0) & (queries >= self.first + self.last), float("-inf"))
        return logits, log_z

    def hidden(self, start: int, keys: Tensor) -> Tensor:
        """Keys that no query from `start` on keeps: they are left out where attention is written out."""
        return (keys >= self.first) & (keys <= start - self.last)

    def _moved(self, block: _Block, queries: Tensor) -> Tensor:
        """Logits of the first keys, of these queries as the last of a full cache."""
        queries = queries.to(self.seen["query"].device)  # of a model over several devices blocks have their own
        attention, at = block.attention, queries[:, 0]
        end = min(self.first + self.last, self.seen["query"].shape[-2]) - 1
        query, key = self.seen["query"][..., at, :], self.seen["key"][..., : self.first, :]
        if block.rotation is not None:
            cos, sin = (part.to(query) for part in block.rotation)
            query = rotate(rotate(query, cos[at], sin[at], back=True), cos[end : end + 1], sin[end : end + 1])
        exact = torch.promote_types(query.dtype, torch.float32)
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1).to(exact)
        keys = torch.arange(key.shape[-2], device=key.device)[None]
        products = query.to(exact) * attention.scale @ key.mT
        return attention.logits_of(products, torch.full_like(queries, end), keys)


def _keep(seen: dict[str, Tensor], name: str, tensor: Tensor) -> Tensor:
    seen[name] = tensor
    return tensor


def _blocks(model: View, length: int) -> list[_Block]:
    """Of a pass over that many positions: rotations depend on no token, and of some rules on the length."""
    tokens = torch.zeros(1, length, dtype=torch.long)
    rotary = model.trace(model.embed(tokens)).rotary
    short = model.trace(model.embed(tokens[:, :2]), attention=True).attention  # queries and keys of it are not needed
    found = []
    for rotation, attention in zip(rotary, short, strict=True):
        if rotation is not None:
            size = torch.hypot(*rotation)  # some rules scale rotations, which queries have been by already
            rotation = (rotation[0] / size, rotation[1] / size)
        found.append(_Block(rotation, attention))
    return found


def fixed(spec: Spec, length: int) -> str | None:
    """Why positions of prompts of that length cannot be numbered anew; None where they can."""
    if "learned" in spec.positional:
        return "its positions are learned and added to the embeddings"
    if "shared rope" in spec.positional:
        return "its heads share one rotated key, a part of theirs"
    if spec.prefix is not None or any(window is not None and window < length for window in spec.windows):
        return "some blocks have a sliding window or a prefix, which hides keys by their distance in the text"
    return None


def evicted(model: View, first: int, last: int, *, renumbered: bool = False, value_0: bool = True) -> Edited:
    """The same model with a cache of the first and the last keys, as a view that probes of whole prompts can be run on.

    Behind a window of the model's own, a key has to be within that window as well.

    Args:
        model: any view; it is not changed.
        first: keys that are never evicted, from position 0 on.
        last: of the others those that are kept, the query's own among them.
        renumbered: positions are counted within the cache, see the module's text.
        value_0: False: a full cache has lost the value of key 0 as well, but not the key. Weights stay those of the cache
            with it, and that on key 0 gives nothing.

    Raises:
        InputError: fewer than 0 first or 1 last, or no key 0 whose value could go; in a pass, positions that cannot be
            numbered anew.
    """
    if first < (0 if value_0 else 1) or last < 1:
        least = "0 or more" if value_0 else "1 or more"
        raise InputError(f"a cache of the first {first} and last {last} keys cannot be kept; give {least}, 1 or more")
    layers = range(model.spec.blocks)

    def edits(model: View, blocks: dict[int, list[_Block]], embeddings: Tensor) -> list[Edit]:
        length = embeddings.shape[-2]
        if not (renumbered and first):
            return [Edit("logits", layer, _Kept(first, last, value_0=value_0)) for layer in layers]
        if (why := fixed(model.spec, length)) is not None:
            raise InputError(f"{model.identity.name} cannot be numbered anew: {why}; number positions by the text")
        if length not in blocks:
            with unheard(model):
                blocks[length] = _blocks(model, length)
        found = []
        for layer, block in zip(layers, blocks[length], strict=True):
            kept = _Kept(first, last, block, value_0)
            found += [Edit("query", layer, partial(_keep, kept.seen, "query"))]
            found += [Edit("key", layer, partial(_keep, kept.seen, "key")), Edit("logits", layer, kept)]
        return found

    said = f"first {first} and last {last} keys{', numbered in the cache' * renumbered}"
    said += "" if value_0 else ", without the value of key 0"
    return Edited(model, Change(said, edits, lambda model: {}))
