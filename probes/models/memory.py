"""How many directions a Jacobian takes at once, known before it begins.

What is counted are the numbers alive at the moment when most are, from the shapes of the model: width d, heads H,
key heads G of width c, feed-forward f (twice, where it has a gate), T positions, K directions at once. The counts follow
`probes.models.linear` line by line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import InputError
from ..run.memory import available, out_of_memory, own_memory
from .linear import QUERY_BAND
from .view import View

CPU_ROWS = 4096  # rows of a matrix product; fewer would remake patterns for too few directions from T = 1,024 on
KEPT_SHARE = 0.5  # of the memory there is, for a prompt's blocks; above it they are made again for every chunk
CHUNK_SHARE = 0.25  # of a GPU's, for the directions on their way
WHOLE = 1 << 28  # bytes of a direction through a block that is not taken apart, about


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


def block_bytes(model: View, length: int) -> tuple[int, int]:
    """Bytes of one block, linearized at a prompt, while it is kept; and of one direction on its way through it.

    Kept are norms' units and outputs (4 d), the stream in the middle and after (2 d), queries and what attention gave
    (2 H c), keys and values, the feed-forward's slopes. A direction has most in attention: the cotangents above and in the
    middle (2 d), those of the feed-forward's first products and hidden, of heads' outputs (twice, once by head), of q, k, v
    (as they are, rotated, and side by side), and of a band's pattern, twice.
    """
    spec, parts = model.spec, model.parts(0)
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    experts = 1 if parts is None or parts.routing is None else parts.routing.chosen
    features = 4 * spec.width if parts is None else experts * parts.down.weight.shape[-1]
    first = features if parts is not None and parts.gate is None else 2 * features
    normed = parts is not None and parts.q_norm is not None
    kept = (6 + 4 * spec.post_norm) * spec.width + (1 + normed) * 2 * (queries + keys) + first
    band = 2 * spec.heads * min(QUERY_BAND, length)
    product = 3 * spec.width + features + first + 2 * queries + 2 * (queries + 2 * keys) + band
    row = length * model.dtype.itemsize
    return kept * row, WHOLE if parts is None else product * row


def paced(model: View, length: int, lowest: int = 0, chunk: int | None = None) -> Pace:
    """How a Jacobian of a prompt of `length` positions is taken: full-rate products on a CPU, bounded memory on a GPU.

    `chunk` directions at once where that is given.
    """
    (kept, product), free = block_bytes(model, length), available(model.device)
    fitting = CPU_ROWS // length
    if own_memory(model.device):
        fitting = min(model.spec.width, int(CHUNK_SHARE * free) // product)
    keep = not model.offloaded and (model.spec.blocks - lowest) * kept <= KEPT_SHARE * free
    return Pace(chunk or max(1, fitting), keep)


def weights_of(model: View) -> int:
    """Bytes of the weights behind a view, where it has any to show."""
    held: Any = getattr(model, "original", model)
    module = getattr(held, "_model", None)
    return 0 if module is None else sum(p.numel() * p.element_size() for p in module.parameters())
