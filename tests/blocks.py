"""Blocks with independent normal weights, made of their parts."""

from __future__ import annotations

from typing import Any

import torch

from probes.models.view import Linear, Norm, Parts


def random_parts(
    generator: torch.Generator,
    width: int,
    features: int,
    *,
    sigma: float,
    logits: float | None = None,
    heads: int = 4,
    kv: int = 2,
    gated: bool = True,
    **more: Any,
) -> Parts:
    """In float64: sequential, gated and RMSNorm, or parallel, plain, LayerNorm; queries and keys of `logits`."""
    c, steep = width // heads, sigma if logits is None else logits

    def linear(outputs: int, inputs: int, deviation: float = sigma) -> Linear:
        return Linear(deviation * torch.randn(outputs, inputs, generator=generator, dtype=torch.float64), None)

    norm = Norm("rms" if gated else "layer", torch.ones(width, dtype=torch.float64), None, 1e-6)
    return Parts(
        attention_norm=norm,
        mlp_norm=norm,
        q=linear(width, width, steep),
        k=linear(kv * c, width, steep),
        v=linear(kv * c, width),
        o=linear(width, width),
        gate=linear(features, width) if gated else None,
        up=linear(features, width),
        down=linear(width, features),
        activation=torch.nn.functional.silu,
        head_dim=c,
        scale=c**-0.5,
        parallel=not gated,
        **more,
    )
