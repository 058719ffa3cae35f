"""How much memory a Jacobian takes, known before it begins.

What is counted are the numbers alive at the moment when most are, from the shapes of the model: width d, heads H,
key heads G of width c, feed-forward f (twice, where it has a gate), T positions, L blocks, K directions at once. The counts
follow `probes.models.linear` line by line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import InputError
from ..run.memory import available, out_of_memory, own_memory
from .fused import BLOCK_NUMBERS
from .linear import QUERY_BAND
from .view import View

CPU_ROWS = 4096  # rows of a matrix product; fewer would remake patterns for too few directions from T = 1,024 on
KEPT_SHARE = 0.5  # of the memory there is, for a prompt's blocks; above it they are made again for every chunk
CHUNK_SHARE = 0.25  # of a GPU's, for the directions on their way
KEPT_FREE = 1.3  # resident against living bytes: what the allocator keeps of tensors that are gone, as measured


@dataclass
class Pace:
    """Directions at once, and whether a prompt's linearized blocks are kept or made again for every chunk.

    Making them again is gradient checkpointing: the streams between blocks are what is kept.
    """

    chunk: int
    keep: bool

    def slow_down(self, error: Exception, model: View, length: int) -> None:
        """Take less memory from now on.

        Raises:
            InputError: less is not possible.
            RuntimeError: the error, where it was no lack of memory.
        """
        if not out_of_memory(error):
            raise error
        if self.chunk == 1 and not self.keep:
            raise InputError(
                f"a prompt of {length} positions of '{model.identity.name}' does not fit into memory, a product at a time; "
                "give a shorter length, dtype bfloat16, or a device map"
            ) from None
        self.chunk, self.keep = max(1, self.chunk // 2), False


@dataclass(frozen=True)
class Sizes:
    """Of one block, in numbers per position; and of the model."""

    width: int
    heads: int
    queries: int  # H c
    keys: int  # G c
    features: int
    gated: bool
    blocks: int
    itemsize: int
    apart: bool  # whether the blocks can be taken apart
    wide: bool  # norms per head (q and k)
    post_norm: bool

    @classmethod
    def of(cls, model: View) -> Sizes:
        """The model's, from its first block."""
        spec, parts = model.spec, model.parts(0)
        experts = 1 if parts is None or parts.routing is None else parts.routing.chosen
        return cls(
            width=spec.width,
            heads=spec.heads,
            queries=spec.heads * spec.head_dim,
            keys=spec.kv_heads * spec.head_dim,
            features=4 * spec.width if parts is None else experts * parts.down.weight.shape[-1],
            gated=parts is None or parts.gate is not None,
            blocks=spec.blocks,
            itemsize=model.dtype.itemsize,
            apart=parts is not None,
            wide=parts is not None and parts.q_norm is not None,
            post_norm=spec.post_norm,
        )

    @property
    def first(self) -> int:
        """Features of the feed-forward's first products: gate and up."""
        return self.features * (2 if self.gated else 1)

    def folded(self) -> int:
        """Bytes of one block's stacked matrices, the norms folded in."""
        return (self.first + self.queries + 2 * self.keys) * self.width * self.itemsize

    def linearized(self, length: int) -> int:
        """Bytes of one block, linearized at a prompt, while it is kept.

        Norms' units and outputs (4 d), the stream in the middle and after (2 d), queries and what attention gave (2 H c),
        keys and values, the feed-forward's slopes.
        """
        row = 6 * self.width + 2 * self.queries + 2 * self.keys + self.first
        row += (self.queries + self.keys) * 2 * self.wide + 4 * self.width * self.post_norm
        return row * length * self.itemsize

    def product(self, length: int) -> int:
        """Bytes of one direction on its way through one block, at the moment when most is alive.

        In attention: the cotangents above and in the middle (2 d), those of the feed-forward's first products and hidden
        (f and `first`), of heads' outputs (twice, once by head), of q, k, v (as they are, rotated, and side by side),
        and of a band's pattern, twice.
        """
        projected = self.queries + 2 * self.keys
        band = 2 * self.heads * min(QUERY_BAND, length)
        attention = self.features + self.first + 2 * self.queries + 2 * projected + band
        return (3 * self.width + attention) * length * self.itemsize

    def passing(self, length: int) -> int:
        """Bytes of a pass without gradients: streams before and after, and the wider of attention and feed-forward."""
        attention = 2 * (self.queries + 2 * self.keys) + 3 * self.queries
        feed = (3 if self.gated else 2) * self.features
        return round(KEPT_FREE * (5 * self.width + max(attention, feed)) * length * self.itemsize)

    def patterns(self, length: int) -> int:
        """Bytes of a block of queries' patterns, of which three are alive."""
        rows = max(1, min(length, BLOCK_NUMBERS // (self.heads * length)))
        return round(KEPT_FREE * 3 * 4 * self.heads * rows * length)


def paced(model: View, length: int, lowest: int = 0, chunk: int | None = None) -> Pace:
    """How a Jacobian of a prompt of `length` positions is taken: full-rate products on a CPU, bounded memory on a GPU.

    `chunk` directions at once where that is given.
    """
    sizes, free = Sizes.of(model), available(model.device)
    keep = not model.offloaded and (sizes.blocks - lowest) * sizes.linearized(length) <= KEPT_SHARE * free
    fitting = CPU_ROWS // length
    if own_memory(model.device):
        fitting = min(sizes.width, int(CHUNK_SHARE * free) // (sizes.product(length) if sizes.apart else 1 << 28))
    return Pace(chunk or max(1, fitting), keep)


def weights_of(model: View) -> int:
    """Bytes of the weights behind a view, where it has any to show."""
    held: Any = getattr(model, "original", model)
    module = getattr(held, "_model", None)
    return 0 if module is None else sum(p.numel() * p.element_size() for p in module.parameters())
