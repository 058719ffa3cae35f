r"""A linear reader of log(1 + i): ridge regression on the residual stream, from sums that do not grow with the prompts.

Of streams x_n (positions from 1 on of all prompts of a training set) with targets z_n = log(1 + i),

    w = (S + lambda I)^{-1} c,   S = \sum (x - x̄)(x - x̄)^T,   c = \sum (x - x̄)(z - z̄),   z^ = z̄ + w . (x - x̄),

which needs no more of the streams than their moments, the sum of (1, x, z)(1, x, z)^T. The strength lambda is the best of
`STRENGTHS` times the mean eigenvalue of S: the training set has two parts, of different documents; each strength is fitted
on either part and tried on the other one in a second pass, and with the best of them the whole set is fitted.

What is predicted beyond the prompt's own range of log(1 + i) counts as its nearer end, here and in R^2. Without that, a
single token with a massive activation, of a kind that the training set lacks, would decide over strength and R^2 (-12 in
the middle of SmolLM2-135M, 32 prompts of 128 tokens).

A second target is the null: the same numbers in another order in every prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

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
TARGETS = ("position", "shuffled")


def targets(
    length: int, prompts: Sequence[int], seed: int, device: torch.device
) -> Float[Tensor, "prompt position target"]:
    """log(1 + i) of the positions from 1 on, and the same in an order of each prompt's own."""
    orders = np.stack([np.random.default_rng([seed, n]).permutation(length - 1) for n in prompts])
    logs, order = log_position(length, device), torch.from_numpy(orders).to(device)
    return torch.stack([logs.expand(order.shape), logs[order]], -1)


def looked_at(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    prompts: Sequence[int],
    layers: range,
    seed: int,
    look: Callable[[int, Tensor, Tensor, int], None],
    report: Callable[[int], object],
) -> None:
    """Call `look` with (number among these layers, streams [prompt, position, d], targets [prompt, position, two], start).

    These are of as many prompts as go through the model together, the first of which is the one at `start`.
    """
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
    moments: Float[Tensor, "layer row row"],
) -> tuple[Float[Tensor, "layer target strength d"], Float[Tensor, "layer target strength"]]:
    """Readers of every layer, w and what is added to w . x, for every target and strength; rows are 1, x and z."""
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
    weights, constants = (torch.cat(each) for each in zip(*found, strict=True))
    return weights, constants


def error(
    weights: Float[Tensor, "target ... d"],
    constants: Float[Tensor, "target ..."],
    x: Float[Tensor, "prompt position d"],
    z: Float[Tensor, "prompt position target"],
) -> Float[Tensor, "prompt target ..."]:
    """Sums over positions of squared errors, of predictions within the range of the prompt's targets."""
    each = weights.unsqueeze(1) if weights.ndim == 2 else weights  # [target, strength, d]
    predicted = torch.einsum("tsd,npd->ntsp", each, x) + constants.reshape(each.shape[:2])[..., None]
    truth, lowest, highest = z.mT[:, :, None], z.amin(), z.amax()  # all prompts have the same targets, in some order
    left = (truth - predicted.clamp(lowest, highest)).square().sum(-1)
    return left.reshape(len(x), *constants.shape)


def trained(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    halves: tuple[Sequence[int], Sequence[int]],
    layers: range,
    seed: int,
    report: Callable[[int], object],
) -> Piece:
    """Readers of these layers, fitted on prompts in two parts of different documents.

    Of strengths whose errors are equal the greatest is taken.

    Returns:
        `weights` [layer, target, d], `constant` [layer, target].

    Raises:
        InputError: streams that are not finite.
    """
    rows, count, device = 1 + model.spec.width + len(TARGETS), len(layers), precise(model.device)
    parts = torch.zeros(2, count, rows, rows, dtype=torch.float64, device=device)
    errors = torch.zeros(count, len(TARGETS), len(STRENGTHS), dtype=torch.float64, device=device)

    def of_halves(start: int, count: int) -> list[tuple[int, slice]]:
        """Which prompts of a batch are of which half."""
        middle = min(max(len(halves[0]) - start, 0), count)
        owns = (slice(0, middle), slice(middle, count))
        return [(half, own) for half, own in enumerate(owns) if own.start < own.stop]

    def add(at: int, x: Tensor, z: Tensor, start: int) -> None:
        rows = torch.cat([torch.ones_like(x[..., :1]), x, z], -1)
        for half, own in of_halves(start, len(rows)):
            flat = rows[own].flatten(0, 1)
            parts[half, at].addmm_(flat.T, flat)

    def test(readers: Sequence[tuple[Tensor, Tensor]], at: int, x: Tensor, z: Tensor, start: int) -> None:
        for half, own in of_halves(start, len(x)):
            weights, constants = readers[half]
            errors[at] += error(weights[at], constants[at], x[own], z[own]).sum(0)

    prompts = [*halves[0], *halves[1]]
    looked_at(model, tokens, prompts, layers, seed, add, report)
    if not torch.isfinite(parts).all():
        raise not_finite(model, "residual streams")
    readers = [fitted(parts[1]), fitted(parts[0])]  # fitted on one part, tried on the other
    looked_at(model, tokens, prompts, layers, seed, partial(test, readers), report)
    best = len(STRENGTHS) - 1 - errors.flip(-1).argmin(-1)  # [layer, target]
    place = torch.arange(count, device=device)[:, None], torch.arange(len(TARGETS), device=device), best
    weights, constants = (values[place].cpu().numpy() for values in fitted(parts.sum(0)))
    return {"weights": weights, "constant": constants}


def explained(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    prompts: Sequence[int],
    readers: Sequence[Piece],
    which: Sequence[int],
    layers: range,
    seed: int,
    report: Callable[[int], object],
) -> Float[np.ndarray, "chosen layer target"]:
    """R^2 on some prompts: 1 - left / sum over a prompt's positions of (z - mean z)^2.

    `which` says by which of the readers each prompt is read.
    """
    device, found = precise(model.device), list[Tensor]()
    weights, constants = (
        torch.from_numpy(np.stack([piece[name] for piece in readers])).to(device) for name in ("weights", "constant")
    )

    def look(at: int, x: Tensor, z: Tensor, start: int) -> None:
        left = torch.stack([error(*one, x, z) for one in zip(weights[:, at], constants[:, at], strict=True)])
        found.append(1 - left / (z - z.mean(1, keepdim=True)).square().sum(1))

    looked_at(model, tokens, prompts, layers, seed, look, report)
    # [batch of layers][reader, prompt, target]
    each = [torch.stack(found[n : n + len(layers)], 2) for n in range(0, len(found), len(layers))]
    return torch.cat(each, 1).cpu().numpy()[list(which), range(len(prompts))]
