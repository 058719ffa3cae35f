"""Slow obvious twins: each written from its formula, in plain Python or float64, to test the fast code against."""

import math
from itertools import pairwise

# ----------------------------------------------------------------------------------------- pretraining (toy.pretrain)


def bigram_loss(training: list[int], held: list[int], *, length: int, vocabulary: int) -> float:
    """Nats per token of p(b|a) = (n_ab + k p_b) / (n_a + k), the best k of five, over side-by-side windows' targets."""
    pairs = [
        (held[start + offset], held[start + offset + 1])
        for start in range(0, len(held) - length - 1, length)
        for offset in range(length)
    ]
    losses = []
    for k in (1, 3, 10, 30, 100):
        total = 0.0
        for a, b in pairs:
            together = sum(x == a and y == b for x, y in pairwise(training))
            alone = sum(x == a for x in training[:-1])
            unigram = (sum(y == b for y in training) + 1) / (len(training) + vocabulary)
            total -= math.log((together + k * unigram) / (alone + k))
        losses.append(total / len(pairs))
    return min(losses)


# ---------------------------------------------------------------------------------------------- curves (summary)


def ushape(curve: list[float]) -> dict[str, float]:
    """The U-shape summary, term by term as science.md has it."""
    length = len(curve)
    middle = sorted(curve[j] for j in range(length) if length / 4 <= j < 3 * length / 4)
    half = len(middle) // 2
    median = middle[half] if len(middle) % 2 else (middle[half - 1] + middle[half]) / 2
    beginning = [curve[j] for j in range(length) if j < 0.05 * length]
    smoothed = []
    for j in range(length):
        reach = max(r for r in range(length) if 2 * r <= 0.05 * length and j - r >= 0 and j + r <= length - 1)
        smoothed.append(sum(curve[j - reach : j + reach + 1]) / (2 * reach + 1))
    return {
        "primacy": sum(beginning) / len(beginning) / median,
        "recency": curve[-1] / median,
        "middle": median,
        "trough": smoothed.index(min(smoothed)),
    }


def ranks(values: list[float]) -> list[float]:
    """1 for the smallest; of equal values each gets the mean of their places."""
    return [1 + sum(w < v for w in values) + (sum(w == v for w in values) - 1) / 2 for v in values]
