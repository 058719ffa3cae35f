"""Toys of every kind with random weights, for the tests of several files."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toy.matching import Settings
from toy.model import Architecture, Switches, initial
from toy.view import Toy

BLOCKS, HEADS, WIDTH, LENGTH, VOCABULARY = 2, 2, 4, 12, 9
EXACT, NOISE = 1e-12, 1e-11  # float64, sums in another order; of a view's pass, which takes more of them
# Cosines, sines and decays enter the pass as they were rounded to float32.
ROUNDED = 1e-6
TOKENS = torch.randint(VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(5))
MASKS: Any = ({"mask": "causal"}, {"mask": "window", "window": 4}, {"mask": "prefix", "prefix": 4}, {"mask": "full"})
POSITIONS: Any = [{"positional": name} for name in ("none", "learned", "sinusoidal", "rope")]
POSITIONS += [{"positional": "decay", "decay": 0.3}]
CAUSAL = [m | p for m in MASKS[:2] for p in POSITIONS]
AHEAD = [m | p for m in MASKS[2:] for p in POSITIONS[:4]]  # decay is a loss per token into the past
LOOKS = CAUSAL + AHEAD
# Every combination of the other switches; `residual` alternates against each of them.
STANDARD: dict[str, Any] = {"feed_forward": True, "norm": "rms"}
BANDS, LAGS = [(3, 6), (7, 11)], (1, 2)  # of leakage
OTHERS: list[dict[str, Any]] = [
    dict(zip(("feed_forward", "norm", "output_projection", "head"), switches, strict=True))
    | {"residual": bool((n + n // 2 + n // 4) % 2)}
    for n, switches in enumerate(product((False, True), ("none", "rms", "layer"), (True, False), ("linear", "mlp")))
]
POSTED: dict[str, Any] = STANDARD | {"output_projection": True, "head": "linear", "residual": True, "post_norm": True}
OTHERS += [POSTED | {"qk_norm": True}, POSTED | {"norm": "layer"}]
MATCHED = Settings(fresh_seeds=2, seeds=2, positions=9, targets=0, width=8, vocabulary=4, steps=3, batch=4, sequences=8)


def named(look: dict[str, Any]) -> str:
    return f"{look['mask']}, {look['positional']}"


def architecture(**switches: Any) -> Architecture:
    """Two blocks of two heads of width 2."""
    plain: dict[str, Any] = {"blocks": BLOCKS, "heads": HEADS, "width": WIDTH, "length": LENGTH}
    plain |= {"vocabulary": VOCABULARY, "outputs": VOCABULARY}
    return Architecture(**(plain | switches))


def moved(a: Architecture, seed: int = 0) -> dict[str, Tensor]:
    """Fresh weights, norms' ones and zeros moved and attention far from uniform, so that nothing hides; float64."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in initial(a, seed).items():
        wide = 4.0 if name.endswith((".q", ".k")) else 1.0
        alive = 1.0 if name.startswith("head.") and name.endswith(".bias") else 0.0  # of so few ReLUs all could be off
        found[name] = wide * tensor.double() + 0.2 * torch.randn(tensor.shape, generator=generator).double() + alive
    return found


def made(seed: int = 0, **switches: Any) -> Toy:
    """A toy in float64 whose attention is far from uniform."""
    a = architecture(**switches)
    return Toy(a, moved(a, seed))


def switches_of(*architectures: Architecture) -> Switches:
    """In float64."""
    found = Switches.of(architectures)
    tensors = {name: x.double() for name, x in vars(found).items() if x is not None}
    return replace(found, **tensors)


def logits(toy: Toy, tokens: Tensor) -> Tensor:
    return toy.unembed(toy.norm(toy.residual(toy.embed(tokens))))


def own(toy: Toy) -> dict[str, Tensor]:
    """Its weights, without the dimension of models."""
    return {name: w[0] for name, w in toy._weights.items()}


def close(found: Any, expected: Any, noise: float = NOISE) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=noise, atol=noise)


def tolerance(a: Architecture) -> float:
    return EXACT if a.positional in ("none", "learned") else ROUNDED
