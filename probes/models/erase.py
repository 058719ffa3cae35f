"""What the residual stream says of position, erased: views that every probe can be run on.

An erasure is x - (x - m) B A^T at every position but 0, with m the mean stream, at what one block reads or at what every
block reads. "means": A = B, the leading principal directions of the position means of the stream around m. "permuted":
those of means whose positions were permuted in every prompt, which hold as much text and no position. "random": as many
orthonormal directions that are drawn. "direction": least-squares concept erasure of t = log(1 + i), with S the
stream's covariance and c its covariance with t: A = c, B = S^-1 c / (c^T S^-1 c). No linear function of the stream then
covaries with t, and no other erasure that achieves this changes the stream less, in the metric of S^-1.

Position 0 keeps its stream: it is told from all others by far more than its place.

Source: the closed form is that of LEACE, Belrose et al., arXiv 2306.03819; science of the measurement, section 12.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeAlias, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import InputError
from .checks import check_tokens
from .edited import Edited, unheard
from .given import takes_model
from .view import Edit, View

What: TypeAlias = Literal["means", "permuted", "random", "direction"]
WHATS: tuple[What, ...] = get_args(What)
LEAST = 1e-8  # of the largest eigenvalue of the covariance; below it a direction counts as not there


@dataclass
class Moments:
    """Sums over the positions from 1 on of streams: enough for means, covariances and regressions on log(1 + i)."""

    count: int
    first: Float[Tensor, " d"]  # sum of x
    second: Float[Tensor, "d d"]  # of x x^T
    along: Float[Tensor, "d targets"]  # of x t, for every target t
    by_position: Float[Tensor, "position d"]  # of x over prompts
    permuted: Float[Tensor, "position d"]  # the same, every prompt's positions permuted
    targets: Float[Tensor, "moment targets"]  # of t, and of t^2

    @classmethod
    def of(
        cls, stream: Float[Tensor, "position d"], targets: Float[Tensor, "position targets"], seed: int = 0
    ) -> Moments:
        """Of one prompt, position 0 left out, in float64; `seed` is its permutation's."""
        x, t = stream[1:].double().cpu(), targets[1:]
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        return cls(len(x), x.sum(0), x.T @ x, x.T @ t, x, x[order], torch.stack([t.sum(0), t.square().sum(0)]))

    def __add__(self, other: Moments) -> Moments:
        return Moments(*(one + two for one, two in zip(vars(self).values(), vars(other).values(), strict=True)))

    @property
    def mean(self) -> Float[Tensor, " d"]:
        """Of the stream."""
        return self.first / self.count

    @property
    def covariance(self) -> Float[Tensor, "d d"]:
        """Of the stream."""
        return self.second / self.count - torch.outer(self.mean, self.mean)

    @property
    def with_targets(self) -> Float[Tensor, "d targets"]:
        """Covariance of the stream with every target."""
        return self.along / self.count - torch.outer(self.mean, self.targets[0] / self.count)


def place(length: int) -> Float[Tensor, "position one"]:
    """The target: log(1 + i)."""
    return torch.arange(length, dtype=torch.float64).log1p()[:, None]


def moments(model: View, tokens: Iterable[Tensor], layers: Iterable[int]) -> dict[int, Moments]:
    """Of what these blocks read, by block; one pass per prompt."""
    layers, found = list(layers), {}
    for n, row in enumerate(tokens):
        streams = model.trace(model.embed(row[None])).residual
        own = {layer: Moments.of(streams[layer][0], place(len(row)), n) for layer in layers}
        found = {layer: found[layer] + one for layer, one in own.items()} if found else own
    return found


@dataclass(frozen=True)
class Erasure:
    """A `Change` of streams; see `erased`."""

    what: What
    layer: int | None
    reference: Tensor
    rank: int
    seed: int
    made: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def said(self) -> str:
        """What, and where."""
        where = "every block" if self.layer is None else f"block {self.layer}"
        rank = "" if self.what == "direction" else f" {self.rank}"
        return f"position erased at {where}: {self.what}{rank}"

    def embedded(self, model: View, tokens: Int[Tensor, "batch position"]) -> None:
        """The model's own embeddings."""

    def edits(self, model: View, embeddings: Float[Tensor, "batch position d"]) -> list[Edit]:
        layers = range(model.spec.blocks) if self.layer is None else [self.layer]
        if not self.made:
            with unheard(model):
                found = moments(model, self.reference, layers)
            self.made.update({n: directions(one, self.what, self.rank, self.seed + n) for n, one in found.items()})
        return [edit for layer in layers for edit in self._at(layer)]

    def _at(self, layer: int) -> list[Edit]:
        first: list[Tensor] = []

        def keep(own: Tensor) -> Tensor:
            first[:] = [own]
            return own

        return [
            Edit("residual", layer, keep, position=0),
            Edit("residual", layer, partial(projected, *self.made[layer])),
            Edit("residual", layer, lambda _: first[0], position=0),
        ]

    def on(self, fresh: View) -> Erasure:
        return replace(self, made={})


def directions(found: Moments, what: What, rank: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(m, B, A) of an erasure, in float64: [d], [d, rank], [d, rank]."""
    width = len(found.mean)
    if what == "random":
        drawn = torch.randn(width, rank, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        basis = torch.linalg.qr(drawn).Q
        return found.mean, basis, basis
    if what in ("means", "permuted"):
        means = found.by_position if what == "means" else found.permuted
        means = means * (len(means) / found.count)  # sums over prompts of equal length
        basis = torch.linalg.svd(means - means.mean(0), full_matrices=False).Vh[:rank].T
        return found.mean, basis, basis
    values, vectors = torch.linalg.eigh(found.covariance)
    inverse = torch.where(values > LEAST * values[-1], 1 / values, 0)
    along = found.with_targets[:, :1]
    reading = vectors @ (inverse[:, None] * (vectors.T @ along))
    size = (along * reading).sum()
    return found.mean, reading / size if size > 0 else torch.zeros_like(reading), along


def projected(mean: Tensor, reading: Tensor, writing: Tensor, stream: Tensor) -> Tensor:
    """x - (x - m) B A^T."""
    mean, reading, writing = (one.to(stream) for one in (mean, reading, writing))
    return stream - (stream - mean) @ reading @ writing.T


@takes_model
def erased(
    model: View,
    what: What = "means",
    *,
    reference: Int[Tensor, "prompt position"],
    layer: int | None = None,
    rank: int = 8,
    seed: int = 0,
) -> Edited:
    """The same model without what its stream says of position, as a view that every probe can be run on.

    Args:
        model: any view; it is not changed.
        what: "means", "random" or "direction", see the module's text.
        reference: prompts that means and covariances are taken over, best of other documents than are measured on.
        layer: the block whose input is changed; None: every block's, each by the statistics of the model as it is.
        rank: directions of all but "direction".
        seed: of "random".

    Raises:
        InputError: no such erasure or block, or a rank that the stream does not have.
    """
    check_tokens(model, reference)
    if what not in WHATS:
        raise InputError(f"what '{what}' is unknown; give {', '.join(WHATS)}")
    if layer is not None and not 0 <= layer < model.spec.blocks:
        raise InputError(f"layer={layer} does not exist; the model has blocks 0 to {model.spec.blocks - 1}")
    most = min(model.spec.width, reference.shape[1] - 2)
    if not 1 <= rank <= most:
        raise InputError(f"rank={rank} is out of range; give 1 to {most}")
    return Edited(model, Erasure(what, layer, reference, rank, seed))
