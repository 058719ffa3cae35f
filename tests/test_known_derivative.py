"""The Jacobian of a model of known derivative, a view written out by hand, against its closed form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import reference
import torch
from measured import close
from torch import Tensor

from probes import jacobian
from probes.models.view import Edit, Identity, Parts, Spec, Trace, Watcher


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


@dataclass
class LinearStack:
    """x_i -> x_i + sum_j mixing_ij W x_j, the same in every block; nothing can be taken apart."""

    mixing: Tensor
    weight: Tensor
    spec: Spec
    identity: Identity
    tokenizer: Any = None
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable
    dtype: torch.dtype = torch.float64
    offloaded: bool = False
    bos: int | None = None

    def block(self, x: Tensor) -> Tensor:
        return x + self.mixing[: x.shape[1], : x.shape[1]] @ x @ self.weight.T

    def embed(self, tokens: Tensor) -> Tensor:
        table = torch.randn(self.spec.vocabulary, self.spec.width, generator=torch.Generator().manual_seed(3))
        return table.double()[tokens]

    def trace(self, embeddings: Tensor, *, attention: bool = False, edits: Sequence[Edit] = ()) -> Trace:
        streams = [embeddings]
        for _ in range(self.spec.blocks):
            streams.append(self.block(streams[-1]))
        return Trace(tuple(streams), (self.block,) * self.spec.blocks, (None,) * self.spec.blocks)

    def residual(self, embeddings: Tensor, *, edits: Sequence[Edit] = ()) -> Tensor:
        return self.trace(embeddings).residual[-1]

    def watching(self, watcher: Watcher) -> AbstractContextManager[None]:
        return nullcontext()  # there is no attention to be seen

    def output_weights(self, layer: int) -> Tensor:
        return self.weight.T[None]  # one head, whose values are the stream itself

    def norm(self, residual: Tensor) -> Tensor:
        return 3 * residual

    def unembed(self, normed: Tensor) -> Tensor:
        return torch.cat([normed, 2 * normed[..., :1]], -1)

    def parts(self, layer: int) -> Parts | None:
        return None

    def reinitialized(self, seed: int, *, positional: bool = True, initialization: Any = "config") -> LinearStack:
        return self


def linear_stack() -> LinearStack:
    generator = torch.Generator().manual_seed(1)
    mixing = torch.rand(7, 7, generator=generator, dtype=torch.float64).tril()
    weight = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    spec = Spec("linear", 4, 1, 1, 5, 5, 11, ("none",) * 4, (None,) * 4, None, None)
    identity = Identity("linear", None, "pretrained", "0" * 64, "{}", "tests", "float64", "cpu")
    return LinearStack(mixing, weight, spec, identity)


def test_a_linear_model_has_its_closed_form():
    stack = linear_stack()
    tokens = torch.arange(7)[None]
    every = jacobian(stack, tokens, from_layer="all")
    assert every.attrs["engine"] == "autograd"
    for layer in range(4):
        expected = norms(stack.mixing, stack.weight, 4 - layer) / 5**0.5
        got = jacobian(stack, tokens, from_layer=layer)
        close(got.sensitivity[0], expected, 1e-12)  # rounding alone
        close(every.sensitivity[0, layer], expected, 1e-12)
        close(jacobian(stack, tokens, from_layer=layer, readout="normed").sensitivity[0], 3 * expected, 1e-12)
    close(jacobian(stack, tokens).sensitivity, jacobian(stack, tokens, method="sketch").sensitivity, 1e-12)
    # The logits repeat the first output at twice the size: that row of J counts 1 + 4 times, all of them tripled.
    x = stack.embed(tokens).requires_grad_()
    outputs = stack.unembed(stack.norm(stack.residual(x)))[0, -1]
    logits = reference.jacobian_norms(outputs, x) / 5**0.5
    close(
        jacobian(stack, tokens, readout="logits").sensitivity[0], logits, 1e-7
    )  # through a square root of eigenvalues
