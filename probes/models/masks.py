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
    at = torch.arange(length, device=device)
    queries, keys = at[:, None], at[None, :]
    rates = torch.zeros(1, dtype=torch.float64, device=device) if slopes is None else slopes.to(device)
    logits = -rates[:, None, None] * (queries - keys)
    logits = logits.masked_fill(~sees(queries, keys, window), float("-inf"))
    if sink is not None:
        logits, sink = logits.expand(len(sink), -1, -1), sink[:, None, None]
    return softmax(logits, sink)


def softmax(logits: Tensor, sink: Tensor | None) -> Tensor:
    """Weights; those of learned sink logits, which broadcast to the rows and read nothing, are left out."""
    if sink is None:
        return logits.softmax(-1)
    learned = sink.to(logits).expand(*logits.shape[:-1], 1)
    return torch.cat([logits, learned], -1).softmax(-1)[..., :-1]


def sees(query: Tensor, key: Tensor, window: int | None, prefix: int | None = None) -> Tensor:
    """Boolean, broadcast: whether queries at these positions may look at keys at those.

    Every query sees the first `prefix` keys, those after it among them; else keys up to itself, the last `window` of them.
    """
    seen = key <= query
    if window is not None:
        seen = seen & (key > query - window)
    return seen if prefix is None else seen | (key < prefix)
