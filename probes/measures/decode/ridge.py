r"""A linear reader of log(1 + i): ridge regression on the residual stream, from sums that do not grow with the prompts.

Of streams x_n (positions of a band, of all prompts of a training set) with targets z_n = log(1 + i),

    w = (S + lambda I)^{-1} c,   S = \sum (x - x̄)(x - x̄)^T,   c = \sum (x - x̄)(z - z̄),   z^ = z̄ + w . (x - x̄),

which needs no more of the streams than their moments, the sum of (1, x, z)(1, x, z)^T. The strength lambda is the best of
`STRENGTHS` times the mean eigenvalue of S: the training set has two parts, of different documents; each strength is fitted
on either part and tried on the other one in a second pass, and with the best of them the whole set is fitted.

Readers of bands, and what counts beyond a band's range, are those of `docs/probes/decode.md`. Without that clipping a single
token with a massive activation, of a kind that the training set lacks, would decide over strength and R^2 (-12 in the middle
of SmolLM2-135M, 32 prompts of 128 tokens). Two more targets are the nulls (`TARGETS`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...models.checks import not_finite
from ...models.edited import passing
from ...models.erase import log_position
from ...models.view import View
from ...run.memory import batches, block_numbers
from ...run.precision import double, precise
from ...run.store import Piece

STRENGTHS = 10.0 ** np.arange(-9, 4)
TARGETS = ("position", "shuffled", "shuffled within octaves")
Bands: TypeAlias = Mapping[str, slice]  # rows of positions from 1 on, by the positions' name
# (number of the layer, streams [prompt, position, d] from position 1 on, targets [prompt, position, target], first prompt)
Look: TypeAlias = Callable[[int, Tensor, Tensor, int], None]
Looked: TypeAlias = Callable[[Sequence[int], Look], None]  # calls it for streams of these prompts, some at a time


def bands_of(length: int) -> Bands:
    """All positions from 1 on, "1-127", and their octaves of two positions or more, "2-3", "4-7", ..., "64-127"."""
    starts = [2**n for n in range(1, (length - 2).bit_length())]
    ends = [(1, length), *((start, min(2 * start, length)) for start in starts)]
    return {f"{start}-{stop - 1}": slice(start - 1, stop - 1) for start, stop in ends}


def targets(
    length: int, prompts: Sequence[int], seed: int, device: torch.device
) -> Float[Tensor, "prompt position target"]:
    """log(1 + i) of the positions from 1 on, and the same in orders of each prompt's own."""
    places, octaves = np.arange(length - 1), [*bands_of(length).values()][1:]

    def orders(prompt: int) -> np.ndarray:
        draw, within = np.random.default_rng([seed, prompt]), places.copy()
        whole = draw.permutation(places)
        for octave in octaves:
            within[octave] = draw.permutation(places[octave])
        return np.stack([places, whole, within], -1)

    order = torch.from_numpy(np.stack([orders(n) for n in prompts])).to(device)
    return log_position(length, device)[order]


def looked_at(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    layers: range,
    seed: int,
    report: Callable[[int], object],
    prompts: Sequence[int],
    look: Look,
) -> None:
    """`Looked` by a pass, of these layers: of as many prompts at a time as go through the model together."""
    length, start = tokens.shape[1], 0
    for some in batches(prompts, model, length):
        z = targets(length, some, seed, precise(model.device))

        def each(layer: int, streams: Tensor, z: Tensor = z, start: int = start) -> None:
            if layer in layers:
                look(layer - layers.start, double(streams[:, 1:]), z, start)

        passing(model, tokens[some], each)
        report(len(some))
        start += len(some)


def fitted(
    sums: Float[Tensor, "layer band row row"],
) -> tuple[Float[Tensor, "layer band target strength d"], Float[Tensor, "layer band target strength"]]:
    """Readers of every layer and band, w and what is added to w . x, by target and strength; rows are 1, x and z."""
    moments = sums.flatten(0, 1)
    found, size = list[tuple[Tensor, Tensor]](), max(1, block_numbers(moments.device) // moments[0].numel())
    x, z = slice(1, -len(TARGETS)), slice(-len(TARGETS), None)
    for some in moments.split(size):
        n = some[:, :1, :1]
        mean, level = some[:, 0, x] / n[..., 0], some[:, 0, z] / n[..., 0]
        sizes, vectors = torch.linalg.eigh(some[:, x, x] - n * (mean[:, :, None] * mean[:, None]))
        sizes.clamp_(min=0)  # rounding
        along = vectors.mT @ (some[:, x, z] - n * (mean[:, :, None] * level[:, None]))  # [layer, d, target]
        unit = sizes.mean(-1).clamp_min(torch.finfo(torch.float64).tiny)[:, None, None]
        below = sizes[:, None] + torch.from_numpy(STRENGTHS).to(sizes)[:, None] * unit  # [layer, strength, d]
        weights = (along.mT[:, :, None] / below[:, None]) @ vectors.mT[:, None]
        found.append((weights, level[..., None] - (weights @ mean[:, None, :, None])[..., 0]))
    weights, constants = (torch.cat(each).unflatten(0, sums.shape[:2]) for each in zip(*found, strict=True))
    return weights, constants


def error(
    weights: Float[Tensor, "target ... d"],
    constants: Float[Tensor, "target ..."],
    x: Float[Tensor, "prompt position d"],
    z: Float[Tensor, "prompt position target"],
) -> Float[Tensor, "prompt target ..."]:
    """Sums over positions of squared errors, of predictions within the range of the band's positions."""
    each = weights.unsqueeze(1) if weights.ndim == 2 else weights  # [target, strength, d]
    predicted = torch.einsum("tsd,npd->ntsp", each, x) + constants.reshape(each.shape[:2])[..., None]
    truth, (lowest, highest) = z.mT[:, :, None], z[0, :, 0].aminmax()  # all prompts have the same positions
    left = (truth - predicted.clamp(lowest, highest)).square().sum(-1)
    return left.reshape(len(x), *constants.shape)


def trained(
    model: View, looked: Looked, halves: tuple[Sequence[int], Sequence[int]], count: int, bands: Bands
) -> Piece:
    """Readers of so many layers and these bands, fitted on prompts in two parts of different documents.

    Of strengths whose errors are equal the greatest is taken.

    Returns:
        `weights` [layer, band, target, d], `constant` [layer, band, target].
    """
    rows, device = 1 + model.spec.width + len(TARGETS), precise(model.device)
    parts = torch.zeros(2, count, len(bands), rows, rows, dtype=torch.float64, device=device)
    errors = torch.zeros(count, len(bands), len(TARGETS), len(STRENGTHS), dtype=torch.float64, device=device)

    def of_halves(start: int, count: int) -> list[tuple[int, slice]]:
        """Which prompts of a batch are of which half."""
        middle = min(max(len(halves[0]) - start, 0), count)
        owns = (slice(0, middle), slice(middle, count))
        return [(half, own) for half, own in enumerate(owns) if own.start < own.stop]

    def add(at: int, x: Tensor, z: Tensor, start: int) -> None:
        rows = torch.cat([torch.ones_like(x[..., :1]), x, z], -1)
        for half, own in of_halves(start, len(rows)):
            for n, band in enumerate(bands.values()):
                flat = rows[own, band].flatten(0, 1)
                parts[half, at, n].addmm_(flat.T, flat)

    def test(readers: Sequence[tuple[Tensor, Tensor]], at: int, x: Tensor, z: Tensor, start: int) -> None:
        for half, own in of_halves(start, len(x)):
            weights, constants = readers[half]
            for n, band in enumerate(bands.values()):
                errors[at, n] += error(weights[at, n], constants[at, n], x[own, band], z[own, band]).sum(0)

    prompts = [*halves[0], *halves[1]]
    looked(prompts, add)
    if not torch.isfinite(parts).all():
        raise not_finite(model, "residual streams")
    readers = [fitted(parts[1]), fitted(parts[0])]  # fitted on one part, tried on the other
    looked(prompts, partial(test, readers))
    best = len(STRENGTHS) - 1 - errors.flip(-1).argmin(-1)  # [layer, band, target]
    found = _at(best, *fitted(parts.sum(0)))
    found = _scaled([_at(best, *reader) for reader in readers], found, parts, errors.amin(-1))
    return dict(zip(("weights", "constant"), (each.cpu().numpy() for each in found), strict=True))


Reader: TypeAlias = tuple[Float[Tensor, "layer band target d"], Float[Tensor, "layer band target"]]


def _at(best: Int[Tensor, "layer band target"], weights: Tensor, constants: Tensor) -> Reader:
    """Readers of the best strengths."""
    own = weights.take_along_dim(best[..., None, None], -2)[..., 0, :]
    return own, constants.take_along_dim(best[..., None], -1)[..., 0]


def _scaled(
    readers: Sequence[Reader],
    found: Reader,
    parts: Float[Tensor, "half layer band row row"],
    least: Float[Tensor, "layer band target"],
) -> Reader:
    """Bands that the reader of all positions, scaled and moved, reads better than their own ones read through it.

    Its scale in a band is fitted to what it predicts of documents that it was not fitted on.
    """
    (weights, constants), d = found, found[0].shape[-1]
    sums = list[Tensor]()
    for (w, c), moments in zip(readers, parts, strict=True):  # each part by the reader that the other one made
        reader = torch.cat([c[:, :1, :, None], w[:, :1]], -1)
        u = reader.expand(-1, moments.shape[1], -1, -1)  # [layer, band, target, 1 + d]
        read, n = moments[:, :, : 1 + d], moments[:, :, 0, 0, None]
        along = u @ read  # sums of predictions times every row [layer, band, target, row]
        p, z = along[..., 0], moments[:, :, 0, 1 + d :]
        squares = (along[..., : 1 + d] * u).sum(-1) - p**2 / n
        products = along[..., 1 + d :].diagonal(dim1=-2, dim2=-1) - p * z / n
        own = moments[:, :, 1 + d :, 1 + d :].diagonal(dim1=-2, dim2=-1) - z**2 / n
        sums.append(torch.stack([squares, products, own]))
    squares, products, own = torch.stack(sums).sum(0)
    scale = (products / squares.clamp_min(torch.finfo(squares.dtype).tiny)).clamp_min(0)
    better = own - scale * products < least
    better[:, 0] = False
    whole = parts.sum(0)
    mean, level = (whole[:, :, 0, rows] / whole[:, :, 0, :1] for rows in (slice(1, 1 + d), slice(1 + d, None)))
    other = scale[..., None] * weights[:, :1]
    moved = level - (other @ mean[..., None])[..., 0]
    return torch.where(better[..., None], other, weights), torch.where(better, moved, constants)


def explained(
    model: View,
    looked: Looked,
    prompts: Sequence[int],
    readers: Sequence[Piece],
    which: Sequence[int],
    count: int,
    bands: Bands,
) -> Float[np.ndarray, "chosen layer band target"]:
    """R^2 on some prompts: 1 - left / sum over a prompt's positions of a band of (z - their mean)^2.

    `which` says by which of the readers each prompt is read.
    """
    device, found = precise(model.device), list[Tensor]()
    weights, constants = (
        torch.from_numpy(np.stack([piece[name] for piece in readers])).to(device) for name in ("weights", "constant")
    )

    def look(at: int, x: Tensor, z: Tensor, start: int) -> None:
        of_bands = list[Tensor]()
        for n, band in enumerate(bands.values()):
            own, truth = x[:, band], z[:, band]
            left = torch.stack(
                [error(*one, own, truth) for one in zip(weights[:, at, n], constants[:, at, n], strict=True)]
            )
            of_bands.append(1 - left / (truth - truth.mean(1, keepdim=True)).square().sum(1))
        found.append(torch.stack(of_bands, 2))

    looked(prompts, look)
    # [batch of layers][reader, prompt, band, target]
    each = [torch.stack(found[n : n + count], 2) for n in range(0, len(found), count)]
    return torch.cat(each, 1).cpu().numpy()[list(which), range(len(prompts))]
