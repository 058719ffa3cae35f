"""What the residual stream knows of position, erased: a view in which a block reads the stream without a subspace of it.

`x -> x - write (read (x - mean))` at every position but 0, with `mean` the stream's mean over these positions. What each
erasure is for stands in `docs/probes/decode.md`.

- "means": an orthogonal projection. Means of few prompts are noise, too, whose leading directions are those of the tokens'
  own variance. So the span is estimated where that noise is alike in all directions, on the whitened stream, and from the
  covariance of the means over positions between the two halves of the reference: noise has no part in its expectation, and
  makes eigenvalues of either sign. Leading directions are taken that hold `SHARE` of its trace, at most `rank` of them, and
  only those whose eigenvalue is above `NOISE` times the size of the most negative one. There may be none.
- "direction": least-squares concept erasure [Belrose]: `x - W^+ P W (x - mean)`, with W the whitening of the stream and P
  the projection onto the whitened covariance with log(1 + i). That covariance, c, is one vector here, so that with S the
  stream's covariance the change is `c (c^T S^+ (x - mean)) / (c^T S^+ c)`.
- "random" and "cosines" are their controls, the latter with one function of i at all blocks. They are matched in size: they
  take as much of the stream's variance out of a block, for which what they find is taken `scale` times.

Everything is estimated on `reference`, under the changes that a view has already. Where several blocks are
changed, the stream that a block reads has passed the changes of those before it, in the estimates as in the view.

Source: [Belrose], LEACE, arXiv 2306.03819, theorem 4.3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import InputError
from ..run.memory import batches
from ..run.precision import double, wide
from .ablate import check_reference
from .edited import Change, Edited
from .load import takes_model
from .view import Edit, View

What: TypeAlias = Literal["means", "random", "direction", "cosines"]
CONTROLS: dict[What, What] = {"random": "means", "cosines": "direction"}
Where: TypeAlias = int | str  # a block, or "all"
RANK = 8  # directions at most
SHARE = 0.95  # of the variance of the position means
NOISE = 1.5  # a factor of 1 would take a direction of pure noise every other time


@dataclass(frozen=True)
class Eraser:
    """The change at one block, in float64: `x - ((x - mean) @ read) @ write`."""

    mean: Float[Tensor, " d"]
    read: Float[Tensor, "d rank"]
    write: Float[Tensor, "rank d"]
    removed: float  # share of the reference's variance
    scale: float = 1.0  # times what was found, to take that share

    def sized(self, share: float) -> Eraser:
        """The same direction, taken so often that this share of the variance goes; nothing if it has none."""
        scale = math.sqrt(share / self.removed) if self.removed > 0 else 0.0
        return Eraser(self.mean, self.read, scale * self.write, share * (scale > 0), scale)

    @property
    def rank(self) -> int:
        """Dimensions that are erased."""
        return self.read.shape[1]

    def __call__(self, stream: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
        exact = wide(stream)
        mean, read, write = (x.to(exact) for x in (self.mean, self.read, self.write))
        return (exact - ((exact - mean) @ read) @ write).to(stream)


Erasers: TypeAlias = dict[int, Eraser]  # by block


def _estimated(
    model: View,
    what: What,
    layers: Sequence[int],
    reference: Tensor,
    rank: int,
    seed: int,
    at: slice,
    like: Erasers | None = None,
) -> Erasers:
    """By block. A pass of the reference, block by block; at the blocks that are changed its streams are held together."""
    if what in CONTROLS:
        like = like or _estimated(model, CONTROLS[what], layers, reference, rank, seed, at)
    ranks = dict.fromkeys(layers, rank) | {layer: one.rank for layer, one in (like or {}).items()}
    erasers, z = Erasers(), log_position(reference.shape[1])[at.start - 1 : at.stop and at.stop - 1]
    blocks = model.trace(model.embed(reference[:1])).blocks
    parts = list(batches(range(len(reference)), model, reference.shape[1]))
    streams = torch.cat([model.embed(reference[some]) for some in parts])
    for layer in range(max(layers) + 1):
        if layer in layers:
            eraser = _of_block(what, streams[:, at], z, ranks[layer], seed, layer)
            erasers[layer] = eraser = eraser.sized(like[layer].removed) if like else eraser
            streams = _within(at, eraser, streams)
        if layer < max(layers):
            streams = torch.cat([blocks[layer](streams[some[0] : some[-1] + 1]) for some in parts])
    return erasers


def _within(
    at: slice, eraser: Eraser, streams: Float[Tensor, "prompt position d"]
) -> Float[Tensor, "prompt position d"]:
    changed = streams.clone()
    changed[:, at] = eraser(streams[:, at])
    return changed


def _of_block(
    what: What, streams: Float[Tensor, "prompt erased d"], z: Float[Tensor, " erased"], rank: int, seed: int, layer: int
) -> Eraser:
    exact = double(streams)
    mean, half = exact.mean((0, 1)), len(exact) // 2
    around = exact - mean
    flat = around.flatten(0, 1)
    cov = flat.T @ flat / len(flat)
    if what in ("direction", "cosines"):
        z = (cosines(z, seed) if what == "cosines" else z - z.mean()).to(cov)
        return Eraser(mean, *_direction(cov, z @ around.mean(0) / len(z)))
    if what == "means":
        one, other = (some.mean(0) - some.mean((0, 1)) for some in (exact[:half], exact[half:]))
        basis = _span(cov, (one.T @ other + other.T @ one) / (2 * len(one)), rank)
    else:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + layer)
        drawn = torch.randn(len(mean), rank, generator=generator, dtype=torch.float64)
        basis = torch.linalg.qr(drawn.to(mean.device)).Q
    removed = torch.einsum("dr,de,er->", basis, cov, basis) / cov.trace()
    return Eraser(mean, basis, basis.T.contiguous(), float(removed))


def log_position(length: int, device: Any = None) -> Float[Tensor, " position"]:
    """log(1 + i) of the positions from 1 on, in float64."""
    return torch.arange(1, length, dtype=torch.float64, device=device).log1p()


def cosines(z: Float[Tensor, " position"], seed: int) -> Float[Tensor, " position"]:
    """A function as smooth as z: cosines of its amplitudes with random phases, around 0 and uncorrelated with z."""
    n, phases = len(z), torch.Generator().manual_seed(seed)
    angle = torch.pi * torch.arange(n).double()[:, None] * (torch.arange(n).double() + 0.5) / n  # [frequency, position]
    amplitude, around = (angle.cos() @ z).abs(), z - z.mean()
    drawn = 2 * torch.pi * torch.rand(n, generator=phases, dtype=torch.float64)
    y = amplitude[1:] @ (angle + drawn[:, None]).cos()[1:] * (2 / n)
    y = y - y.mean()
    return y - around * (y @ around) / (around @ around)


def _span(cov: Float[Tensor, "d d"], between: Float[Tensor, "d d"], most: int) -> Float[Tensor, "d rank"]:
    """An orthonormal basis of the span of position means that stands above the noise; it may be empty."""
    own, axes = torch.linalg.eigh(cov)
    alive = own > len(own) * torch.finfo(own.dtype).eps * own[-1]
    first = len(own) - int(alive.sum())  # they ascend
    deviations, axes = own[first:].sqrt(), axes[:, first:]
    whitened = (axes.T @ between @ axes) / deviations[:, None] / deviations
    sizes, directions = torch.linalg.eigh(whitened)
    sizes, directions = sizes.flip(0), directions.flip(1)
    above = sizes > NOISE * sizes[-1].clamp(max=0).abs()
    rounding = sizes > len(sizes) * torch.finfo(sizes.dtype).eps * sizes[0]
    before = sizes.cumsum(0) < SHARE * sizes.sum()  # the last one that is needed
    counts = torch.stack([above.sum(), rounding.sum(), before.sum() + 1]).tolist()  # read once
    count = min(*counts, most)
    return torch.linalg.qr((axes * deviations) @ directions[:, :count]).Q


def _direction(
    cov: Float[Tensor, "d d"], c: Float[Tensor, " d"]
) -> tuple[Float[Tensor, "d one"], Float[Tensor, "one d"], float]:
    """What reads a function of i with covariance c, what is taken away with it, and the share of the variance that goes.

    `read` is S^+ c and `write` is c / (c^T S^+ c): the covariance left is `c - c (c^T S^+ c) / (c^T S^+ c) = 0`.
    """
    read = torch.linalg.pinv(cov, hermitian=True) @ c
    known = c @ read
    write = torch.where(known > 0, c / known, 0)  # a stream without any position: nothing to erase
    removed = known * write.square().sum() / cov.trace()  # of variance c^T S^+ c is what `read` finds
    return read[:, None], write[None], float(removed)


@takes_model
def erased(
    model: View,
    what: What = "means",
    *,
    layer: Where = "all",
    reference: Int[Tensor, "prompt position"],
    rank: int = RANK,
    seed: int = 0,
    like: Edited | None = None,
    positions: tuple[int, int] | None = None,
) -> Edited:
    """The same model, in which blocks read the stream without what it knows of position; a view for every probe.

    Every position but 0 is changed, or some alone, each by itself.

    Args:
        model: any view; it is not changed.
        what: "means", the span of the means of the stream by position, at most `rank` directions; "random", a random
            subspace of as many; "direction", the one direction that moves with log(1 + i); "cosines", one that moves with
            another smooth function of i. See the module's text.
        layer: the block that reads the changed stream, or "all".
        reference: prompts [prompt, position] that everything is estimated on; give others than those you measure on. Their
            streams at one block are held together.
        rank: directions at most; nothing for "direction" and "cosines", which have one.
        seed: of the random subspaces and phases.
        like: for the controls, the view whose "means" ("random") or "direction" ("cosines") is erased at the same place, by
            the same reference and rank; without it that is estimated anew.
        positions: first and last of those that are estimated on and changed, two or more, from 1 on; all others stay.

    Raises:
        InputError: no such erasure or block, a rank below 1, a negative seed, or a reference
            of one prompt or that the model cannot take.
    """
    if what not in get_args(What):
        raise InputError(f"erasure '{what}' is unknown; give {', '.join(get_args(What))}")
    if like is not None and what not in CONTROLS:
        raise InputError(f"like does nothing with '{what}'; give it with {' or '.join(CONTROLS)}, or leave it out")
    if rank < 1 or seed < 0:
        raise InputError(f"rank={rank}, seed={seed}: give a rank of 1 or more and a seed of 0 or more")
    check_reference(model, reference)
    if len(reference) < 2 or reference.shape[1] < 3:
        raise InputError(
            f"reference has shape {list(reference.shape)}; give at least 2 prompts of at least 3 positions"
        )
    if positions is not None and not 0 < positions[0] < positions[1] < reference.shape[1]:
        raise InputError(
            f"positions={positions} do not lie within 1 to {reference.shape[1] - 1}; give a first and a last"
        )
    layers = check_where(model, layer)
    at = slice(1, None) if positions is None else slice(positions[0], positions[1] + 1)

    def edits(model: View, erasers: Erasers, embeddings: Tensor) -> list[Edit]:
        if positions is not None:
            return [Edit("residual", layer, partial(_within, at, eraser)) for layer, eraser in erasers.items()]
        # Position 0 is put back. Behind a context there is none, and edits of one position act on the context alone.
        first: dict[int, Tensor] = {}

        def keep(layer: int, stream: Float[Tensor, "batch one d"]) -> Tensor:
            first[layer] = stream
            return stream

        def give(layer: int, stream: Float[Tensor, "batch one d"]) -> Tensor:
            return first.pop(layer)

        steps = ((keep, 0), (None, None), (give, 0))
        return [
            Edit("residual", layer, eraser if function is None else partial(function, layer), position)
            for layer, eraser in erasers.items()
            for function, position in steps
        ]

    def prepared(model: View) -> Erasers:
        known = like.prepared if like is not None and like.before is model else None  # fresh weights have their own
        return _estimated(model, what, layers, reference, rank, seed, at, known)

    said = f"{what} erased at {'all blocks' if layer == 'all' else f'block {layers[0]}'}"
    if positions is None:
        return Edited(model, Change(said, edits, prepared))
    view = Edited(model, Change(f"{said}, positions {positions[0]} to {positions[1]}", edits, prepared))
    view.behind = None  # type: ignore[assignment, method-assign]  # a continuation has other places
    return view


def check_where(model: View, layer: Any) -> tuple[int, ...]:
    """The blocks of a place."""
    blocks = model.spec.blocks
    if layer == "all":
        return tuple(range(blocks))
    if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < blocks:
        raise InputError(
            f"layer '{layer}' does not exist; {model.identity.name} has blocks 0 to {blocks - 1}, or give all"
        )
    return (layer,)
