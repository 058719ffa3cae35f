"""ALiBi: blocks whose logits lose a slope per head and position of distance, differentiated and predicted.

No supported family has them yet, so that blocks are made here from their parts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference
import torch
from reference_theory import second_moment_step

from probes.models.linear import LinearizedBlock
from probes.models.masks import contentless_patterns
from probes.models.view import Linear, Norm, Parts
from probes.theory.block import MeasuredBlock, Moments

WIDTH, HEADS, FEATURES = 32, 4, 48
SLOPES = (0.5, 0.25, 0.125, 0.0625)


def parts(seed: int, sigma: float, *, window: int | None = None, kv: int = HEADS) -> Parts:
    """A block with independent normal weights."""
    generator, c = torch.Generator().manual_seed(seed), WIDTH // HEADS

    def linear(outputs: int, inputs: int) -> Linear:
        return Linear(sigma * torch.randn(outputs, inputs, generator=generator, dtype=torch.float64), None)

    norm = Norm("rms", torch.ones(WIDTH, dtype=torch.float64), None, 1e-6)
    matrices = {"q": (WIDTH, WIDTH), "k": (kv * c, WIDTH), "v": (kv * c, WIDTH), "o": (WIDTH, WIDTH)}
    matrices |= {"gate": (FEATURES, WIDTH), "up": (FEATURES, WIDTH), "down": (WIDTH, FEATURES)}
    more: dict[str, Any] = {name: linear(*shape) for name, shape in matrices.items()}
    more |= {"window": window, "slopes": torch.tensor(SLOPES, dtype=torch.float64)}
    return Parts(norm, norm, **more, activation=torch.nn.functional.silu, head_dim=c, scale=c**-0.5)


@pytest.mark.parametrize(("window", "kv"), [(None, HEADS), (4, 2)])
def test_output_and_derivative_are_the_twins(window, kv, monkeypatch):
    monkeypatch.setattr("probes.models.linear.QUERY_BAND", 5)  # several bands, the last one short
    made = parts(0, 0.2, window=window, kv=kv)
    stream = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    block = LinearizedBlock(made, stream.detach()[None], None)
    for frozen in (False, True):
        twin = reference.block(made, stream, None, frozen=frozen)
        # float64 in another order
        assert float((block.output[0] - twin).detach().abs().max()) < 1e-11 * float(twin.detach().abs().max())
        cotangent = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        (expected,) = torch.autograd.grad(twin, stream, cotangent)
        found = block.vjp(cotangent[None, None], frozen=frozen)[0, 0]
        assert float((found - expected).abs().max()) < 1e-11 * float(expected.abs().max())


def test_patterns_without_content():
    patterns = contentless_patterns(9, 4, torch.tensor(SLOPES, dtype=torch.float64))
    for head, slope in enumerate(SLOPES):
        for i in range(9):
            weights = np.array([np.exp(-slope * (i - j)) if i - 4 < j <= i else 0.0 for j in range(9)])
            np.testing.assert_allclose(patterns[head, i], weights / weights.sum(), atol=1e-15)
    (uniform,) = contentless_patterns(5, None, None)
    np.testing.assert_allclose(uniform, np.tril(np.ones((5, 5))) / np.arange(1, 6)[:, None], atol=1e-15)


@pytest.mark.parametrize(("measured", "scores"), [(False, False), (True, True)])
def test_a_kernels_step_is_the_twins(measured, scores):
    made, generator = parts(3, 0.2, window=4, kv=2), torch.Generator().manual_seed(4)
    rows, stream = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((6, 12), (6, WIDTH)))
    gram, radial = rows @ rows.T, rows[:, 0].abs()
    expected = second_moment_step(made, stream, None, gram, radial, measured=measured, scores=scores)
    block = LinearizedBlock(made, stream[None], None)
    how = "measured" if measured else "uniform"
    got = MeasuredBlock(block, block.output[0], how, scores).down(Moments(gram, radial))
    assert float((got.gram - expected[0]).abs().max()) < 1e-11 * float(expected[0].abs().max())
    assert float((got.radial - expected[1]).abs().max()) < 1e-11 * float(expected[1].abs().max())
