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
from ...run.precision import double, precise
from ...run.store import Piece

STRENGTHS = 10.0 ** np.arange(-9, 4)
TARGETS = ("position", "shuffled")


def targets(length: int, prompt: int, seed: int, device: torch.device) -> Float[Tensor, "position target"]:
    """log(1 + i) of the positions from 1 on, and the same in an order of this prompt's own."""
    logs = log_position(length, device)
    order = torch.from_numpy(np.random.default_rng([seed, prompt]).permutation(length - 1)).to(device)
    return torch.stack([logs, logs[order]], 1)


def looked_at(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    prompt: int,
    layers: range,
    seed: int,
    look: Callable[[int, Tensor, Tensor], None],
) -> None:
    """Call `look` with (number among these layers, stream [position, d], targets [position, target]) of a prompt."""
    z = targets(tokens.shape[1], prompt, seed, precise(model.device))

    def each(layer: int, streams: Tensor) -> None:
        if layer in layers:
            look(layer - layers.start, double(streams[0, 1:]), z)

    passing(model, tokens[prompt : prompt + 1], each)


def fitted(
    moments: Float[Tensor, "row row"],
) -> tuple[Float[Tensor, "target strength d"], Float[Tensor, "target strength"]]:
    """Readers of one layer, w and what is added to w . x, for every target and strength; rows are 1, x and z."""
    x, z, n = slice(1, -len(TARGETS)), slice(-len(TARGETS), None), moments[0, 0]
    mean, level = moments[0, x] / n, moments[0, z] / n
    sizes, vectors = torch.linalg.eigh(moments[x, x] - n * torch.outer(mean, mean))
    sizes.clamp_(min=0)  # rounding
    along = vectors.T @ (moments[x, z] - n * torch.outer(mean, level))  # [d, target]
    unit = sizes.mean().clamp_min(torch.finfo(torch.float64).tiny)
    below = sizes + torch.from_numpy(STRENGTHS).to(sizes)[:, None] * unit  # [strength, d]
    weights = (along.T[:, None] / below) @ vectors.T
    return weights, level[:, None] - weights @ mean


def error(
    weights: Float[Tensor, "target ... d"],
    constants: Float[Tensor, "target ..."],
    x: Float[Tensor, "position d"],
    z: Float[Tensor, "position target"],
) -> Float[Tensor, "target ..."]:
    """Sum over positions of squared errors, of predictions within the range of the prompt's targets."""
    predicted = weights @ x.T + constants[..., None]  # [target, ..., position], of any strengths
    truth = z.T if weights.ndim == 2 else z.T[:, None]
    return (truth - predicted.clamp(z.min(), z.max())).square().sum(-1)


def trained(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    halves: tuple[Sequence[int], Sequence[int]],
    layers: range,
    seed: int,
    report: Callable[[], object],
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

    def add(moments: Tensor, at: int, x: Tensor, z: Tensor) -> None:
        row = torch.cat([torch.ones_like(x[:, :1]), x, z], 1)
        moments[at].addmm_(row.T, row)

    def test(readers: list[tuple[Tensor, Tensor]], at: int, x: Tensor, z: Tensor) -> None:
        errors[at] += error(*readers[at], x, z)

    for moments, prompts in zip(parts, halves, strict=True):
        for n in prompts:
            looked_at(model, tokens, n, layers, seed, partial(add, moments))
            report()
    if not torch.isfinite(parts).all():
        raise not_finite(model, "residual streams")
    for moments, prompts in zip(parts, halves[::-1], strict=True):  # fitted on one part, tried on the other
        readers = [fitted(of_layer) for of_layer in moments]
        for n in prompts:
            looked_at(model, tokens, n, layers, seed, partial(test, readers))
            report()
    found: dict[str, list[np.ndarray]] = {"weights": [], "constant": []}
    for moments, tried in zip(parts.sum(0), errors.cpu().numpy(), strict=True):
        best = len(STRENGTHS) - 1 - tried[:, ::-1].argmin(-1)
        for name, values in zip(found, fitted(moments), strict=True):
            found[name].append(values[range(len(TARGETS)), best].cpu().numpy())
    return {name: np.stack(values) for name, values in found.items()}


def explained(
    model: View, tokens: Int[Tensor, "prompt position"], prompt: int, readers: Piece, layers: range, seed: int
) -> Float[np.ndarray, "layer target"]:
    """R^2 of readers on one prompt: 1 - left / sum over its positions of (z - mean z)^2."""
    weights, constants = (
        torch.from_numpy(np.array(readers[name])).to(precise(model.device)) for name in ("weights", "constant")
    )
    found = np.zeros((len(layers), len(TARGETS)))

    def look(at: int, x: Tensor, z: Tensor) -> None:
        left = error(weights[at], constants[at], x, z)
        found[at] = (1 - left / (z - z.mean(0)).square().sum(0)).cpu().numpy()

    looked_at(model, tokens, prompt, layers, seed, look)
    return found
