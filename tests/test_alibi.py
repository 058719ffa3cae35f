"""ALiBi: blocks whose logits lose a slope per head and position of distance, differentiated and predicted.

No supported family has them yet, so that blocks are made here from their parts.
"""

from typing import Any

import numpy as np
import pytest
import reference
import torch
from measured import error, randn
from reference_theory import second_moment_step

from probes.models.linear import LinearizedBlock
from probes.models.view import Linear, Norm, Parts
from probes.theory.block import MeasuredBlock, Moments, contentless_patterns

SLOPES = torch.tensor((0.5, 0.25, 0.125, 0.0625), dtype=torch.float64)
NORM = Norm("rms", torch.ones(32, dtype=torch.float64), None, 1e-6)
SIZES = {"q": (32, 32), "k": (16, 32), "v": (16, 32), "o": (32, 32), "gate": (48, 32), "up": (48, 32), "down": (32, 48)}
MATRICES = {name: Linear(0.2 * randn(*size, seed=n), None) for n, (name, size) in enumerate(SIZES.items())}
WAYS: Any = {"activation": torch.nn.functional.silu, "head_dim": 8, "scale": 8**-0.5, "window": 4, "slopes": SLOPES}
PARTS = Parts(NORM, NORM, **MATRICES, **WAYS)


def test_output_and_derivative_are_the_twins(monkeypatch):
    monkeypatch.setattr("probes.models.linear.QUERY_BAND", 5)  # several bands, the last one short
    stream, cotangent = randn(12, 32, seed=11).requires_grad_(), randn(12, 32, seed=12)
    block = LinearizedBlock(PARTS, stream.detach()[None], None)
    for frozen in (False, True):
        twin = reference.block(PARTS, stream, None, frozen=frozen)
        assert error(block.output[0], twin.detach()) < 1e-11  # float64 in another order
        (expected,) = torch.autograd.grad(twin, stream, cotangent)
        assert error(block.vjp(cotangent[None, None], frozen=frozen)[0, 0], expected) < 1e-11


def test_patterns_without_content():
    i, j = np.indices((9, 9))
    for slope, pattern in zip(SLOPES.numpy(), contentless_patterns(9, 4, SLOPES), strict=True):
        weights = np.where((i - 4 < j) & (j <= i), np.exp(-slope * (i - j)), 0.0)
        np.testing.assert_allclose(pattern, weights / weights.sum(1, keepdims=True), atol=1e-15)
    (uniform,) = contentless_patterns(5, None, None)
    np.testing.assert_allclose(uniform, np.tril(np.ones((5, 5))) / np.arange(1, 6)[:, None], atol=1e-15)


@pytest.mark.parametrize(("how", "scores"), [("uniform", False), ("measured", True)])
def test_a_kernels_step_is_the_twins(how, scores):
    rows, stream = randn(6, 12, seed=13), randn(6, 32, seed=14)
    gram, radial = rows @ rows.T, rows[:, 0].abs()
    expected = second_moment_step(PARTS, stream, None, gram, radial, measured=how == "measured", scores=scores)
    block = LinearizedBlock(PARTS, stream[None], None)
    got = MeasuredBlock(block, block.output[0], how, scores).down(Moments(gram, radial))
    assert error(got.gram, expected[0]) < 1e-11
    assert error(got.radial, expected[1]) < 1e-11
