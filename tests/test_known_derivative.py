"""The Jacobian of a model of known derivative, a view written out by hand, against its closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass

import reference
import torch
from bigram import ByHand, identity
from measured import close
from torch import Tensor

from probes import jacobian
from probes.models.view import Spec


def norms(mixing: Tensor, weight: Tensor, blocks: int) -> Tensor:
    """||J_j||_F of x_i -> x_i + sum_j mixing_ij W x_j, `blocks` times: J_j = sum_k C(L, k) (mixing^k)_{T-1, j} W^k."""
    norms = []
    for j in range(len(mixing)):
        matrix = torch.zeros_like(weight)
        for k in range(blocks + 1):
            paths = torch.linalg.matrix_power(mixing, k)[-1, j]
            matrix += math.comb(blocks, k) * paths * torch.linalg.matrix_power(weight, k)
        norms.append(torch.linalg.matrix_norm(matrix))
    return torch.stack(norms)


GENERATOR = torch.Generator().manual_seed(1)
MIXING = torch.rand(7, 7, generator=GENERATOR, dtype=torch.float64).tril()
WEIGHT = torch.randn(5, 5, generator=GENERATOR, dtype=torch.float64)


@dataclass
class LinearStack(ByHand):
    """x_i -> x_i + sum_j MIXING_ij WEIGHT x_j, the same in every block."""

    dtype: torch.dtype = torch.float64

    def block(self, x: Tensor) -> Tensor:
        return x + MIXING[: x.shape[1], : x.shape[1]] @ x @ WEIGHT.T

    def output_weights(self, layer: int) -> Tensor:
        return WEIGHT.T[None]  # one head, whose values are the stream itself

    def norm(self, residual: Tensor) -> Tensor:
        return 3 * residual

    def unembed(self, normed: Tensor) -> Tensor:
        return torch.cat([normed, 2 * normed[..., :1]], -1)


def test_a_linear_model_has_its_closed_form():
    spec = Spec("linear", 4, 1, 1, 5, 5, 11, ("none",) * 4, (None,) * 4, None, None)
    embedding = torch.randn(11, 5, generator=torch.Generator().manual_seed(3)).double()
    stack = LinearStack(spec, identity("linear", dtype="float64"), embedding)
    tokens = torch.arange(7)[None]
    every = jacobian(stack, tokens, from_layer="all")
    assert every.attrs["engine"] == "autograd"
    for layer in range(4):
        expected = norms(MIXING, WEIGHT, 4 - layer) / 5**0.5
        got = jacobian(stack, tokens, from_layer=layer)
        close(got.sensitivity[0], expected, 1e-12)  # rounding alone
        close(every.sensitivity[0, layer], expected, 1e-12)
        close(jacobian(stack, tokens, from_layer=layer, readout="normed").sensitivity[0], 3 * expected, 1e-12)
    close(jacobian(stack, tokens).sensitivity, jacobian(stack, tokens, method="sketch").sensitivity, 1e-12)
    # The logits repeat the first output at twice the size: that row of J counts 1 + 4 times, all of them tripled.
    x = stack.embed(tokens).requires_grad_()
    outputs = stack.unembed(stack.norm(stack.residual(x)))[0, -1]
    logits = reference.jacobian_norms(outputs, x) / 5**0.5
    # through a square root of eigenvalues
    close(jacobian(stack, tokens, readout="logits").sensitivity[0], logits, 1e-7)
