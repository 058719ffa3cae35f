"""Slow twins of what heads do: sinks, what they write and how they react, leakage."""

import itertools
import math
from collections.abc import Sequence

import torch
from reference import normalized, sinks_of_keys
from torch import Tensor

from probes.models.view import Norm

# ------------------------------------------------------------------------------------------- sinks (probes.sinks)


def sinks(
    patterns: Sequence[Sequence[Tensor]],
    keys: Sequence[Sequence[Tensor]],
    values: Sequence[Sequence[Tensor]],
    weights: Sequence[Tensor],
    windows: Sequence[int | None],
    behind: Sequence[Sequence[Tensor]],
    *,
    chosen: Sequence[int],
    threshold: float,
    tau: float,
) -> dict[str, Tensor]:
    """Sink metrics and reading of position 0, entry by entry: patterns, keys, values by prompt and block, W_O by block.

    `behind` by prompt and block as from `derivatives`.
    """
    length, by_key = patterns[0][0].shape[-1], sinks_of_keys(patterns, windows, None, threshold=threshold, tau=tau)
    names = ("attends", "reads", "value_norm", "key_norm")
    shape = (len(weights), len(weights[0]))
    found = {n: torch.zeros(*shape, *[2] * n.endswith("norm"), dtype=torch.float64) for n in names}
    for at in itertools.product(*map(range, shape)):
        layer, head = at
        a, k, v = (torch.stack([prompt[layer][head] for prompt in x]).double() for x in (patterns, keys, values))
        written, queries = v @ weights[layer][head].double(), slice(1, min(length, windows[layer] or length))
        of_0, output = a[:, queries, :1] * written[:, :1], (a @ written)[:, queries]  # [prompt, query, d]
        norms = torch.stack([prompt[layer] for prompt in behind])[:, queries]  # [prompt, query, d, d]
        of_0, output = (torch.einsum("pide,pie->pid", norms, x) for x in (of_0, output))
        found["attends"][at] = a[:, queries, 0].mean()
        found["reads"][at] = (of_0.pow(2).sum() / output.pow(2).sum()).sqrt()
        for name, rows in (("value_norm", v), ("key_norm", k)):
            sizes = rows.norm(dim=-1)
            found[name][at] = torch.stack([sizes[:, 0].mean(), sizes[:, 1:].mean()])
    alpha, over, rate = (by_key[name][..., list(chosen)] for name in ("alpha", "over_tau", "sink_rate"))
    of_model = {"over_tau_of_model": over.mean((0, 1)), "sink_rate_of_model": rate.mean(0)}
    return found | {"alpha": alpha, "over_tau": over, "sink_rate": rate} | of_model


def derivatives(norm: Norm | None, branch: Tensor) -> Tensor:
    """That of the norm on a branch's output at every position [T, d, d]; without one the identity."""
    return torch.stack([torch.autograd.functional.jacobian(lambda x: normalized(norm, x), row) for row in branch])


def written_beside(
    pattern: Tensor,
    written: Tensor,
    stream: Tensor,
    window: int | None,
    swapped: Tensor,
    learned: Tensor,
    behind: Tensor,
) -> dict[str, float]:
    """One head's sizes beside the stream over queries i >= 1 that see position 0, its values written as `written` [T, d].

    `learned` [T]: weights on the learned sink logit, which stays where position 0 is hidden.
    `swapped` [T, d]: what it writes with another embedding at position 0. `behind` [T, d, d] as from `derivatives`.
    """
    taken, whole, change, here, elsewhere = [], [], [], 0.0, 0.0
    for i in range(1, min(len(stream), window or len(stream))):
        beside, weight, output = stream[i].norm().item(), pattern[i, 0].item(), pattern[i] @ written
        hidden = pattern[i, 1:] / (pattern[i, 1:].sum() + learned[i]) @ written[1:]
        sizes = [(behind[i] @ x).norm().item() ** 2 for x in (weight * written[0], output, output - swapped[i], hidden)]
        for found, size in zip((taken, whole, change), sizes, strict=False):
            found.append(size / beside**2)
        here += weight * sizes[1]
        elsewhere += weight * sizes[3]
    squares = {"written": taken, "output": whole, "reacts_output": change}
    return {name: math.sqrt(sum(x) / len(x)) for name, x in squares.items()} | {
        "output_own": math.sqrt(here / elsewhere)
    }


def reaction(before: Tensor, after: Tensor, window: int | None) -> float:
    """Mean total variation over keys >= 1 of one head's rows i >= 2 that see position 0."""
    rows = range(2, min(before.shape[-1], window or before.shape[-1]))
    return sum((before[i, 1:].double() - after[i, 1:].double()).abs().sum().item() / 2 for i in rows) / len(rows)


# -------------------------------------------------------------------------------------------------------- leakage


def _leakage_of_half(logits: Tensor, queries: Tensor, lags: Sequence[int]) -> dict[str, Tensor]:
    """Means over the prompts of a half by name, [lag, query]; the names are those of science.md."""
    mean, place = logits.mean(0), torch.arange(logits.shape[-1])
    lag, seen = place[:, None] - place, mean.isfinite()
    t = torch.zeros(len(place), dtype=torch.float64)
    for n in range(len(t)):
        of_lag = mean[(lag == n) & seen & (place > 0)]
        t[n] = of_lag.mean() if len(of_lag) else t[n - 1]
    toeplitz = logits - mean + t[lag]

    # Position 0's mean logit without position in any stream: a constant of the band, or t(i) and a constant.
    sees, steady = queries[seen[queries, 0]], torch.zeros_like(t)
    if len(sees):
        plain = [b * t + (mean[sees, 0] - b * t[sees]).mean() for b in (0, 1)]
        steady = min(plain, key=lambda one: float((mean[sees, 0] - one[sees]).pow(2).sum()))
    constant = logits - mean + steady[:, None]

    def log_sums(sink: Tensor, others: Tensor) -> Tensor:
        """Log-sum-exps [prompt, query] of logits of position 0 and of all others."""
        return torch.where(place == 0, sink, others).masked_fill(~seen, -math.inf)[:, queries].logsumexp(-1)

    z, m = log_sums(logits, logits), log_sums(toeplitz, toeplitz)
    mean_z, mean_m = z.mean(0), m.mean(0)
    mean_k, mean_c = log_sums(logits, toeplitz).mean(0), log_sums(constant, toeplitz).mean(0)
    rows = []
    for one in lags:
        s, own = mean[queries, queries - one], logits[:, queries, queries - one] - z
        values = {"S": s, "M": mean_m, "D": mean_z - mean_m, "l": s - mean_z, "X+": s - mean_z + mean_m}
        values |= {"K": mean_k - mean_m, "X": s - mean_z + mean_c, "-M": -mean_m, "-C": mean_m - mean_c}
        rows.append(values | {"own": own.mean(0), "square": own.square().mean(0)})
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def leakage(logits: Tensor, first: int, last: int, lags: Sequence[int]) -> dict[str, list[float]]:
    """All variables of one head, by name, from its logits [prompt, query, key].

    Hidden logits are minus infinity. Every Toeplitz average and log-sum-exp is of whole matrices; the two halves of the
    prompts are taken apart first.
    """
    queries, middle = torch.arange(first, last + 1), len(logits) // 2
    halves = [_leakage_of_half(half.double(), queries, lags) for half in (logits[:middle], logits[middle:])]

    def by_lag(x: str, y: str) -> Tensor:
        """Covariances over queries, of one half with the other [lag]."""
        one, other = ([half[name] - half[name].mean(-1, keepdim=True) for half in halves] for name in (x, y))
        return (one[0] * other[1] + one[1] * other[0]).mean(-1) / 2

    def covariance(x: str, y: str) -> float:
        return float(by_lag(x, y).mean())

    (own, square), (own_2, square_2) = ([half[name].mean(-1) for name in ("own", "square")] for half in halves)
    total, s, m, d, k, x, whole = (covariance(name, name) for name in ("l", "S", "M", "D", "K", "X", "X+"))
    uncorrected = float(((halves[0]["l"] + halves[1]["l"]) / 2).var(-1, correction=0).mean())
    return {
        "log_form": [total, s, m, d, 2 * (covariance("M", "D") - covariance("S", "M") - covariance("S", "D"))],
        "parties": [covariance(one, other) for one, other in itertools.product(("-M", "-C", "X"), repeat=2)],
        "position_share": [float((by_lag("l", "l") / ((square + square_2) / 2 - own * own_2)).mean())],
        "log_source": [m - covariance("X+", "M"), whole - covariance("X+", "M")],
        "log_stream": [whole],
        "steady_stream": [x],
        "log_noise": [uncorrected - total],
        "log_sink": [k],
    }
