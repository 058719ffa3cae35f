"""What queries may look at: causal masks, windows, prefixes, and the patterns of logits without content."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def contentless_patterns(
    length: int,
    window: int | None,
    slopes: Float[Tensor, " H"] | None,
    sink: Float[Tensor, " H"] | None = None,
    device: torch.device | str = "cpu",
) -> Float[Tensor, "H query key"]:
    """Patterns of logits without content: uniform over what the mask shows, one for all; under ALiBi each head's decay.

    With learned sink logits, each head's own, or one for all: the visible keys share what these leave.
    """
    mask = causal_mask(length, window, device)
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None, :]
    rates = torch.zeros(1, dtype=torch.float64, device=device) if slopes is None else slopes.to(device)
    return softmax((-rates[:, None, None] * distance).masked_fill(~mask, float("-inf")), sink)


def softmax(logits: Float[Tensor, "*heads query key"], sink: Float[Tensor, " H"] | None) -> Tensor:
    """Weights; those of learned sink logits, which read nothing, are left out."""
    if sink is None:
        return logits.softmax(-1)
    learned = sink.to(logits)[:, None, None].expand(-1, logits.shape[-2], 1)
    weights = torch.cat([logits.expand(len(sink), *logits.shape[-2:]), learned], -1).softmax(-1)[..., :-1]
    return weights.reshape(logits.shape) if weights.numel() == logits.numel() else weights


def causal_mask(length: int, window: int | None, device: torch.device | str = "cpu") -> Tensor:
    """Boolean [query, key], true where the query may look: keys up to itself, the last `window` of them if given."""
    positions = torch.arange(length, device=device)
    return sees(positions[:, None], positions[None, :], window)


def sees(query: Tensor, key: Tensor, window: int | None, prefix: int | None = None) -> Tensor:
    """Boolean, broadcast: whether queries at these positions may look at keys at those.

    Every query sees the first `prefix` keys, those after it among them; else keys up to itself, the last `window` of them.
    """
    seen = key <= query
    if window is not None:
        seen = seen & (key > query - window)
    return seen if prefix is None else seen | (key < prefix)
