"""Estimates of ||J_j||_F^2 at every position from few products.

With p Haar-random orthonormal probes z_k among the d directions of the readout

    ||J_j||_F^2  ~  (d/p) sum_k ||z_k^T J_j||^2

is unbiased, and exact with p = d. With S_kl = z_k^T J_j J_j^T z_l its variance is estimated without bias by
2 d (d - p)/p times the mean of S_kl^2 over pairs k < l, which uses p (p - 1)/2 numbers where the probes' own scatter has p
(the fourth moments of Haar frames: Var = 2 d (d - p)/(p (d - 1)(d + 2)) ||A - tr A/d||_F^2 for A = J J^T, and
E S_kl^2 = ||A - tr A/d||_F^2/((d - 1)(d + 2))). A variance estimated from few probes is often too small, so the standard
error is widened as for Student's t, by t_{p-1}(0.975)/1.96 (1.21 at 8 probes, 1.09 at 16).

The relative error depends on the effective rank of J_j J_j^T, not on d: a few percent at 64 products (`docs/findings.md`).
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

KEPT_BYTES = 1 << 28  # of pulled probes per prompt, so that pairs across chunks count too
ENGINES = ("autograd", "parts")


@dataclass
class Estimate:
    """The estimate of ||J_j||_F^2 for one prompt, [source, position]."""

    width: int
    seed: int
    squared: Tensor = field(default_factory=lambda: torch.zeros(()))
    variance: Tensor | float = 0.0  # of `squared`; NaN where nothing tells

    def piece(self, prompt: Prompt) -> Piece:
        """What is kept of the prompt."""
        return {
            "squared": self.squared.numpy(),
            "variance": (torch.zeros_like(self.squared) + self.variance).numpy(),
            "engines": np.array([engine in prompt.used for engine in ENGINES]),
            "scales": prompt.scales().numpy(),
        }

    def take_all(self, prompt: Prompt, report: Tally) -> None:
        """By all directions: exact."""
        for pulled in self._pull(prompt, torch.eye(self.width, dtype=torch.float64), report):
            self.squared = self.squared + total(wide(pulled).pow(2), (1, 3)).cpu()

    def take_scalar(self, prompt: Prompt, report: Tally) -> None:
        """By the sum of the readout's entries alone; its gradient's squared norm stands for the whole."""
        self.variance = math.nan
        self.squared = total(wide(prompt.pull(prompt.ones())).pow(2), (1, 3)).cpu()
        report(1)

    def take_probes(self, prompt: Prompt, count: int, report: Tally) -> None:
        """By `count` Haar-random probes, with their variance; that is estimated itself, and widened for it."""
        probed: Tensor | int = 0
        pairs: Tensor | int = 0  # sum over pairs of S_kl^2
        pair_count, kept = 0, list[Tensor]()  # pulled probes, for pairs across chunks
        for pulled in self._pull(prompt, haar(self.width, count, self.seed), report):
            probed = probed + total(wide(pulled).pow(2), (1, 3)).cpu()
            # Pairs within the chunk (each once) and with earlier chunks: Gram matrices at every layer and position.
            within = _gram_squares(pulled, pulled) - double(pulled).pow(2).sum(-1).pow(2).sum(1).cpu()
            pairs = pairs + within / 2 + sum(_gram_squares(pulled, earlier.to(pulled)) for earlier in kept)
            size, before = pulled.shape[1], sum(earlier.shape[1] for earlier in kept)
            pair_count += size * (size - 1) // 2 + size * before
            if (before + size) * pulled[:, 0].numel() * 4 <= KEPT_BYTES:
                kept.append(pulled.cpu())
        self.squared, self.variance = probed * torch.tensor(self.width / count), math.nan
        if pair_count:
            widening = float(stdtrit(count - 1, 0.975) / ndtri(0.975))
            self.variance = 2 * self.width * (self.width - count) / count * pairs / pair_count * widening**2

    def _pull(self, prompt: Prompt, directions: Tensor, report: Tally) -> Iterator[Tensor]:
        """Pull directions [d, m] of the readout back, [layer, k, position, d] at a time."""
        top = prompt.top
        # Even chunks: a last chunk of one probe would have no pairs.
        for piece in torch.tensor_split(directions, math.ceil(directions.shape[1] / prompt.pace.chunk), dim=1):
            yield prompt.pull(piece.T.to(top) @ top)
            report(piece.shape[1])


def _gram_squares(a: Tensor, b: Tensor) -> Float[Tensor, "layer position"]:
    """Sum over k, m of (a_k . b_m)^2 at every layer and position, of [layer, k, position, d] each."""
    return double(torch.einsum("lkpd,lmpd->lpkm", wide(a), wide(b))).pow(2).sum((-2, -1)).cpu()


def haar(width: int, count: int, seed: int) -> Float[Tensor, "d count"]:
    """Haar-distributed orthonormal columns."""
    drawn = torch.randn(width, count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    columns, upper = torch.linalg.qr(drawn)
    return columns * upper.diagonal().sign()  # Householder's signs are not Haar's
