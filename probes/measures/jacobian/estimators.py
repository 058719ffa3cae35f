"""Estimates of ||J_j||_F^2 at every position from few products: an exact part on a basis Q, a probed one on the rest.

Unbiased whatever Q is, as long as it depends on no probe: with m basis directions and p Haar-random orthonormal probes z_k
of their complement, of dimension D = d - m,

    ||J_j||_F^2  ~  sum over Q of ||q^T J_j||^2  +  (D/p) sum_k ||z_k^T J_j||^2.

With S_kl = z_k^T J_j J_j^T z_l the second part's variance is estimated without bias by 2 D (D - p)/p times the mean of
S_kl^2 over pairs k < l, which uses p (p - 1)/2 numbers where the probes' own scatter has p (the fourth moments of Haar
frames: Var = 2 D (D - p)/(p (D - 1)(D + 2)) ||A - tr A/D||_F^2 for A = J J^T, and
E S_kl^2 = ||A - tr A/D||_F^2/((D - 1)(D + 2))). At m + p = d nothing is left to estimate. A variance estimated from few
probes is often too small, so the standard error is widened as for Student's t, by t_{p-1}(0.975)/1.96 (1.21 at 8
probes, 1.09 at 16).

Q decides the error. The sum of J_j J_j^T over positions has a low effective rank (9 to 17 of 576 on SmolLM2-135M): positions
share their leading directions, but those differ from prompt to prompt. They are found in two steps:

1. Every path from an earlier position enters the query position through some block's attention and then follows the query's
   *own* path to the top, which involves one position instead of T. Random tangents, pushed along it, cost little (2.7 of 64
   products at T = 32 on SmolLM2-135M, 0.3 at T = 256); the leading directions E of their images are exact directions already
   (`Prompt.own_path`).
2. One round of subspace iteration: V_j = E^T J_j is there at all positions from E's own products; the forward-mode products
   Y = sum_j J_j w_j V_j^T, w_j = 1/||V_j||_F^2 so that every position counts alike, turn towards what E has missed. Y, made
   orthonormal to E, is the rest of Q.

A product forward counts as one, as a product backward does; of `budget` products 3 m/2, and the own path's images, go to
finding m directions and taking them exactly. `docs/findings.md` has its errors beside those of plain probes.

Where a model's blocks cannot be taken apart, E is random, and the products forward are central differences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float
from scipy.special import ndtri, stdtrit
from torch import Tensor

from ...models.pullback import Prompt
from ...run.precision import double, total, wide
from ...run.progress import Tally
from ...run.store import Piece

BASIS_SHARE = 0.1875  # of the budget, in directions of either step: 12 of 64; the error is flat from 8 to 16
OWN_COLUMNS = 40  # random images of the own path: at 64 products three times the directions that are taken from them
OWN_SHARE = 0.06  # of the budget, at most, for those images; reached by short prompts with few products
NEGLIGIBLE = 1e-5  # of columns of length 1, a direction as short as this is rounding in float32
LEAST_PROBES = 8  # below it the standard error rests on too few pairs
KEPT_BYTES = 1 << 28  # of pulled probes per prompt, so that pairs across chunks count too; of E's, to be pushed
ENGINES = ("autograd", "parts")


@dataclass
class Estimate:
    """The estimate of ||J_j||_F^2 for one prompt, [source, position]: an exact part, and one that probes give."""

    width: int
    generator: torch.Generator
    basis: Tensor  # [d, m]: exact directions
    squared: Tensor = field(default_factory=lambda: torch.zeros(()))
    variance: Tensor | float = 0.0  # of `squared`; NaN where nothing tells
    products: float = 0.0

    @classmethod
    def of(cls, width: int, seed: int) -> Estimate:
        """Without any product."""
        return cls(width, torch.Generator().manual_seed(seed), torch.zeros(width, 0, dtype=torch.float64))

    def piece(self, prompt: Prompt) -> Piece:
        """What is kept of the prompt."""
        return {
            "squared": self.squared.numpy(),
            "variance": (torch.zeros_like(self.squared) + self.variance).numpy(),
            "products": np.array(self.products),
            "engines": np.array([engine in prompt.used for engine in ENGINES]),
            "scales": prompt.scales().numpy(),
        }

    def add_exact(self, prompt: Prompt, directions: Tensor, report: Tally, *, keep: bool = False) -> Tensor | None:
        """Add orthonormal directions [d, m] of the readout to the exact part.

        With `keep` the pulled ones come back, [source, k, position, d]: as many as `KEPT_BYTES` hold, one at least.
        """
        self.basis = torch.cat([self.basis, directions], 1) if self.basis.shape[1] else directions
        kept: list[Tensor] = []
        for pulled in self._pull(prompt, directions, report):
            self.squared = self.squared + total(wide(pulled).pow(2), (1, 3)).cpu()
            room = KEPT_BYTES // (pulled[:, 0].numel() * pulled.element_size()) - sum(x.shape[1] for x in kept)
            if keep and (room > 0 or not kept):
                kept.append(pulled[:, : max(room, 1)])
        return torch.cat(kept, 1) if kept else None

    def searched(self, products: float | int, report: Tally) -> None:
        """Count what finding directions has cost."""
        self.products += products
        report(products)

    def add_scalar(self, prompt: Prompt, report: Tally) -> None:
        """The sum of the readout's entries alone; its gradient's squared norm stands for the whole."""
        self.products, self.variance = 1.0, math.nan
        self.squared = total(wide(prompt.pull(prompt.ones())).pow(2), (1, 3)).cpu()
        report(1)

    def add_probes(self, prompt: Prompt, count: int, report: Tally) -> None:
        """Add the part that Haar-random probes estimate, orthonormal to the basis and to each other, with its variance.

        That is estimated itself, and widened for it.
        """
        probes = _orthonormal_to(self.basis.contiguous(), count, self.generator)
        probed: Tensor | int = 0
        pairs: Tensor | int = 0  # sum over pairs of S_kl^2
        pair_count, kept = 0, list[Tensor]()  # pulled probes, for pairs across chunks
        for pulled in self._pull(prompt, probes, report):
            probed = probed + total(wide(pulled).pow(2), (1, 3)).cpu()
            # Pairs within the chunk (each once) and with earlier chunks: Gram matrices at every layer and position.
            within = _gram_squares(pulled, pulled) - double(pulled).pow(2).sum(-1).pow(2).sum(1).cpu()
            found = within / 2
            for earlier in kept:
                found = found + _gram_squares(pulled, earlier.to(pulled))
            pairs = pairs + found
            size, before = pulled.shape[1], sum(earlier.shape[1] for earlier in kept)
            pair_count += size * (size - 1) // 2 + size * before
            if (before + size) * pulled[:, 0].numel() * 4 <= KEPT_BYTES:
                kept.append(pulled.cpu())
        dimension = self.width - self.basis.shape[1]
        self.squared, self.variance = self.squared + probed * dimension / count, math.nan
        if pair_count:
            widening = float(stdtrit(count - 1, 0.975) / ndtri(0.975))
            self.variance = 2 * dimension * (dimension - count) / count * pairs / pair_count * widening**2

    def _pull(self, prompt: Prompt, directions: Tensor, report: Tally) -> Iterator[Tensor]:
        """Pull directions [d, m] of the readout back, [layer, k, position, d] at a time."""
        top = prompt.top()
        # Even chunks: a last chunk of one probe would have no pairs.
        count = directions.shape[1]
        pieces = math.ceil(count / prompt.pace.chunk)
        for piece in torch.tensor_split(directions, pieces, dim=1) if pieces else ():
            self.products += piece.shape[1]
            yield prompt.pull(piece.T.to(top) @ top)
            report(piece.shape[1])


def _gram_squares(a: Tensor, b: Tensor) -> Float[Tensor, "layer position"]:
    """Sum over k, m of (a_k . b_m)^2 at every layer and position, of [layer, k, position, d] each."""
    return double(torch.einsum("lkpd,lmpd->lpkm", wide(a), wide(b))).pow(2).sum((-2, -1)).cpu()


def _orthonormal_to(known: Float[Tensor, "d m"], count: int, generator: torch.Generator) -> Float[Tensor, "d count"]:
    """Haar-distributed orthonormal columns in the complement of `known` (orthonormal columns)."""
    fresh = torch.randn(len(known), count, generator=generator, dtype=torch.float64)
    for _ in range(2):  # twice: one projection leaves rounding of the order of what it removed
        fresh = fresh - known @ (known.T @ fresh)
        fresh, upper = torch.linalg.qr(fresh)
        fresh = fresh * upper.diagonal().sign()  # Householder's signs are not Haar's
    return fresh


def sketch(estimate: Estimate, prompt: Prompt, budget: int, report: Tally) -> None:
    """Spend `budget` products on one prompt: on a basis, found as the module's text says, and on probes."""
    if budget >= estimate.width:
        estimate.add_exact(prompt, torch.eye(estimate.width, dtype=torch.float64), report)
        return
    size = min(round(BASIS_SHARE * budget), int((1 - OWN_SHARE) * budget - LEAST_PROBES) // 3)
    if size > 0:
        start = _start(estimate, prompt, size, OWN_SHARE * budget, report)
        kept = estimate.add_exact(prompt, start, report, keep=True)
        assert kept is not None
        paths = len(estimate.squared) // len(prompt.layers)
        squares = estimate.squared[::paths, None, :, None].to(kept)
        tangents = torch.where((squares > 0) & squares.isfinite(), kept[::paths] / squares, 0)
        images = []
        for piece in tangents.split(prompt.pace.chunk, dim=1):
            images.append(prompt.push(piece).cpu().double())
            estimate.searched(piece.shape[1], report)
        estimate.add_exact(prompt, _leading(torch.cat(images).T, size, start), report)
    estimate.add_probes(prompt, budget - math.ceil(estimate.products), report)


def _start(estimate: Estimate, prompt: Prompt, size: int, most: float, report: Tally) -> Float[Tensor, "d m"]:
    """Leading directions of the query's own path, or random ones where that would cost more than `most` products."""
    found = prompt.own_path(OWN_COLUMNS, most, estimate.generator)
    if found is not None:
        images, cost = found
        estimate.searched(cost, report)
        start = _leading(images.cpu().double().T, size, estimate.basis)
        if start.shape[1] > 0:
            return start
    return _orthonormal_to(estimate.basis, size, estimate.generator)


def _leading(images: Float[Tensor, "d k"], size: int, known: Float[Tensor, "d m"]) -> Float[Tensor, "d some"]:
    """At most `size` orthonormal leading directions of these columns, made equally long, in the complement of `known`."""
    images = images / images.norm(dim=0).clamp_min(torch.finfo(images.dtype).tiny)
    for _ in range(2):  # twice: as in `_orthonormal_to`
        images = images - known @ (known.T @ images)
        left, values, _ = torch.linalg.svd(images, full_matrices=False)
        images = left[:, :size][:, values[:size] > NEGLIGIBLE]
    return images
