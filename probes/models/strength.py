"""How strongly the blocks of a model write to its stream and look at it: what a small model must share to be like it.

The second-moment kernel of a fresh model depends on its width through ratios alone: what a block adds to the stream against
what is there, the feed-forward's part of it, and how far logits are from equal. They are measured on independent random
rows of size 1, root mean squares over rows and blocks: attention then has nothing to average over, and width plays no part.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional

from ..run.precision import double
from .linear import LinearizedBlock
from .view import View

ROWS = 256


class Strength(NamedTuple):
    """Root mean squares: of what block 0 reads, and of what a normalized input makes in a block."""

    embedding: float  # position 0 left out
    logits: float
    values: float  # W_O W_V n, without averaging
    feed_forward: float


@torch.no_grad()
def strength(model: View, tokens: Int[Tensor, "prompt position"], *, seed: int = 0) -> Strength | None:
    """The four numbers of a model with fresh weights; None where its blocks cannot be taken apart."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(1, ROWS, model.spec.width, generator=generator).to(model.device, model.dtype)
    found = []
    for layer in range(model.spec.blocks):
        parts = model.parts(layer)
        if parts is None:
            return None
        block = LinearizedBlock(parts, rows, None)
        key, value = (x.repeat_interleave(block.groups, 1) for x in (block.key, block.value))
        written = functional.linear(value.transpose(1, 2).flatten(2), parts.o.weight)
        found.append([_square(x) for x in (block.query @ key.mT, written, block.output - block.middle)])
    blocks = torch.tensor(found).mean(0).sqrt().tolist()
    return Strength(_square(model.embed(tokens)[:, 1:]) ** 0.5, *blocks)


def _square(x: Tensor) -> float:
    return float(double(x).square().mean())


@torch.no_grad()
def frequencies(model: View, tokens: Int[Tensor, "prompt position"]) -> tuple[float, ...] | None:
    """Radians per position of RoPE's planes in block 0, scaling included, 0 for those it leaves alone; None without RoPE.

    They are read from the rotation of a pass over the first prompt: whatever rule made it, this is what acted.
    """
    rotation = model.trace(model.embed(tokens[:1])).rotary[0]
    if rotation is None:
        return None
    cos, sin = (double(part[1]).chunk(2)[0] for part in rotation)
    turned = torch.atan2(sin, cos).tolist()
    return (*turned, *[0.0] * (model.spec.head_dim // 2 - len(turned)))
