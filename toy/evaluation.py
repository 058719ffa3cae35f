"""What is measured on a pretrained model: losses on held-out text, attention on position 0, a sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional

from .corpus import Windows

PSEUDOCOUNTS = (1.0, 3.0, 10.0, 30.0, 100.0)  # k of the bigram model


@torch.no_grad()
def validation_loss(model: Any, windows: Windows, *, batch: int = 32) -> float:
    """Mean next-token loss in nats over the windows side by side."""
    starts, total = windows.side_by_side(), 0.0
    for at in range(0, len(starts), batch):
        inputs, targets = (tokens.to(model.device) for tokens in windows.at(starts[at : at + batch]))
        logits = model(input_ids=inputs, use_cache=False).logits.float()
        total += functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
    return total / (len(starts) * windows.length)


def bigram_loss(training: Int[np.ndarray, " token"], heldout: Windows, vocabulary: int) -> float:
    """Nats per token of the best bigram model on the held-out windows' targets.

    Counts from the training stream, interpolated with the unigram: p(b|a) = (n_ab + k p_b) / (n_a + k). The k is the
    one that does best on the held-out text itself, which favours the bigram, not us.
    """
    # Pairs as single numbers: a full table would hold V V counts, nearly all of them zero.
    pairs, counts = np.unique(training[:-1] * vocabulary + training[1:], return_counts=True)
    unigram = (np.bincount(training, minlength=vocabulary) + 1) / (len(training) + vocabulary)
    cut = heldout.cut(heldout.side_by_side())
    before, after = cut[:, :-1].ravel(), cut[:, 1:].ravel()
    wanted = before * vocabulary + after
    place = np.searchsorted(pairs, wanted).clip(max=len(pairs) - 1)
    together = np.where(pairs[place] == wanted, counts[place], 0)
    totals = np.bincount(training[:-1], minlength=vocabulary)
    losses = [-np.log((together + k * unigram[after]) / (totals[before] + k)).mean() for k in PSEUDOCOUNTS]
    return float(min(losses))


@torch.no_grad()
def position0_weights(model: Any, inputs: Int[Tensor, "window length"]) -> list[list[float]]:
    """Mean attention weight on position 0, [layer][head], over the queries after 0 that may look at it."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")  # this is our own model, fresh from training, and it is set back
    try:
        patterns = model(input_ids=inputs.to(model.device), use_cache=False, output_attentions=True).attentions
    finally:
        model.set_attn_implementation(before)
    window = getattr(model.config, "sliding_window", None) or inputs.shape[1]
    return [layer[:, :, 1:window, 0].float().mean((0, 2)).tolist() for layer in patterns]


@torch.no_grad()
def sample(model: Any, tokenizer: Any, *, length: int, seed: int, temperature: float = 0.7) -> str:
    """Text of `length` tokens drawn from the model, started from BOS (from EOS where there is none)."""
    generator = torch.Generator().manual_seed(seed)
    ids = [tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id]
    for _ in range(length):
        logits = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0, -1].float().cpu()
        ids.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)))
    return tokenizer.decode(ids[1:])
