r"""A linear reader of log(1 + i): ridge regression on the residual stream, from sums that do not grow with the prompts.

Of streams x_n (positions from 1 on of all prompts of a training set) with targets z_n = log(1 + i),

    w = (S + lambda I)^{-1} c,   S = \sum (x - x̄)(x - x̄)^T,   c = \sum (x - x̄)(z - z̄),   z^ = z̄ + w . (x - x̄),

which needs no more of the streams than \sum x, \sum x x^T and \sum x z. The strength lambda is the best of `STRENGTHS`
times the mean eigenvalue of S: the training set has two parts, of different documents; each strength is fitted on either
part and tried on the other one in a second pass, and with the best of them the whole set is fitted.

What is predicted beyond the prompt's own range of log(1 + i) counts as its nearer end, here and in R^2. Without that, a
single token with a massive activation, of a kind that the training set lacks, would decide over strength and R^2 (-12 in
the middle of SmolLM2-135M, 32 prompts of 128 tokens).

A second target is the null: the same numbers in another order in every prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass
class Sums:
    """Of the streams of some layers over positions: everything that a regression needs."""

    count: int
    x: Float[Tensor, "layer d"]
    xx: Float[Tensor, "layer d d"]
    xz: Float[Tensor, "layer d target"]
    z: Float[Tensor, " target"]
    zz: Float[Tensor, " target"]

    @classmethod
    def zero(cls, layers: int, width: int, device: torch.device) -> Sums:
        """Of nothing."""
        shapes = ((layers, width), (layers, width, width), (layers, width, len(TARGETS)), len(TARGETS), len(TARGETS))
        return cls(0, *(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))

    def add(self, layer: int, x: Float[Tensor, "position d"], z: Float[Tensor, "position target"]) -> None:
        """One prompt's stream at one layer; the targets are added with the first."""
        x = double(x)
        self.x[layer] += x.sum(0)
        self.xx[layer].addmm_(x.T, x)
        self.xz[layer].addmm_(x.T, z)
        if layer == 0:
            self.count, self.z, self.zz = self.count + len(x), self.z + z.sum(0), self.zz + z.square().sum(0)

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(one + two for one, two in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass
class Solved:
    """The regressions of one layer for every strength: eigenvectors and what they hold of the targets."""

    sums: Sums
    layer: int

    def __post_init__(self) -> None:
        s, n = self.sums, self.sums.count
        self.mean, self.level = s.x[self.layer] / n, s.z / n
        covariance = s.xx[self.layer] - n * torch.outer(self.mean, self.mean)
        self.sizes, self.vectors = torch.linalg.eigh(covariance)
        self.sizes.clamp_(min=0)  # rounding
        self.along = self.vectors.T @ (s.xz[self.layer] - n * torch.outer(self.mean, self.level))  # [d, target]

    def weights(self, strengths: Float[np.ndarray, " strength"], target: int) -> Float[Tensor, "strength d"]:
        """By strength."""
        mean = self.sizes.mean().clamp_min(torch.finfo(torch.float64).tiny)
        below = self.sizes + torch.from_numpy(strengths).to(self.sizes)[:, None] * mean
        return (self.along[:, target] / below) @ self.vectors.T

    def constants(self, weights: Float[Tensor, "strength d"], target: int) -> Float[Tensor, " strength"]:
        """What is added to `weights @ x`, by strength."""
        return self.level[target] - weights @ self.mean


def fitted(whole: Sums, errors: Float[np.ndarray, "layer target strength"]) -> Piece:
    """Readers of every layer and target: `weights` [layer, target, d], `constant` [layer, target].

    Of strengths whose errors are equal the greatest is taken.
    """
    layers, width = whole.x.shape
    shape = (layers, len(TARGETS))
    found: Piece = {"constant": np.zeros(shape), "weights": np.zeros((*shape, width))}
    for layer in range(layers):
        solved = Solved(whole, layer)
        for target in range(len(TARGETS)):
            best = len(STRENGTHS) - 1 - int(errors[layer, target, ::-1].argmin())
            w = solved.weights(STRENGTHS[best : best + 1], target)
            found["weights"][layer, target] = w[0].cpu().numpy()
            found["constant"][layer, target] = float(solved.constants(w, target)[0])
    return found


def targets(length: int, prompt: int, seed: int, device: torch.device) -> Float[Tensor, "position target"]:
    """log(1 + i) of the positions from 1 on, and the same in an order of this prompt's own."""
    logs = log_position(length, device)
    order = torch.from_numpy(np.random.default_rng([seed, prompt]).permutation(length - 1)).to(device)
    return torch.stack([logs, logs[order]], 1)


def trained(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    halves: tuple[Sequence[int], Sequence[int]],
    layers: range,
    seed: int,
    report: Callable[[], object],
) -> Piece:
    """Readers of these layers, fitted on prompts in two parts of different documents.

    Raises:
        InputError: streams that are not finite.
    """
    width, device = model.spec.width, precise(model.device)
    parts = (Sums.zero(len(layers), width, device), Sums.zero(len(layers), width, device))
    for sums, prompts in zip(parts, halves, strict=True):
        for n in prompts:
            z = targets(tokens.shape[1], n, seed, device)

            def look(layer: int, stream: Tensor, z: Tensor = z, sums: Sums = sums) -> None:
                if layer in layers:
                    sums.add(layer - layers.start, stream[1:], z)

            passing(model, tokens[n : n + 1], look)
            report()
    if not all(torch.isfinite(sums.xx).all() for sums in parts):
        raise not_finite(model, "residual streams")
    errors = torch.zeros(len(layers), len(TARGETS), len(STRENGTHS), dtype=torch.float64, device=device)
    for sums, prompts in zip(parts, halves[::-1], strict=True):  # fitted on one part, tried on the other
        solved = [Solved(sums, layer) for layer in range(len(layers))]
        tried = [[one.weights(STRENGTHS, target) for target in range(len(TARGETS))] for one in solved]
        for n in prompts:
            z = targets(tokens.shape[1], n, seed, device)

            def test(layer: int, stream: Tensor, z: Tensor = z, solved: Any = solved, tried: Any = tried) -> None:
                if layer in layers:
                    at = layer - layers.start
                    for target, w in enumerate(tried[at]):
                        predicted = double(stream[1:]) @ w.T + solved[at].constants(w, target)  # [position, strength]
                        errors[at, target] += (z[:, target, None] - ended(predicted, z[:, target])).square().sum(0)

            passing(model, tokens[n : n + 1], test)
            report()
    return fitted(parts[0] + parts[1], errors.cpu().numpy())


def ended(predicted: Tensor, z: Tensor) -> Tensor:
    """Predictions within the range of a prompt's targets."""
    return predicted.clamp(z.min(), z.max())


def explained(
    model: View, tokens: Int[Tensor, "prompt position"], prompt: int, readers: Piece, layers: range, seed: int
) -> Float[np.ndarray, "layer target"]:
    """R^2 of readers on one prompt: 1 - left / sum over its positions of (z - mean z)^2."""
    device = precise(model.device)
    z = targets(tokens.shape[1], prompt, seed, device)
    whole = (z - z.mean(0)).square().sum(0)
    weights, constant = (torch.from_numpy(np.array(readers[name])).to(device) for name in ("weights", "constant"))
    found = np.zeros((len(layers), len(TARGETS)))

    def look(layer: int, stream: Tensor) -> None:
        if layer in layers:
            at = layer - layers.start
            predicted = double(stream[1:]) @ weights[at].T + constant[at]
            left = z - ended(predicted, z)
            found[at] = (1 - left.square().sum(0) / whole).cpu().numpy()

    passing(model, tokens[prompt : prompt + 1], look)
    return found
