"""Attention of random queries and keys under every mask, its logits by the twin, and how far rounding takes them."""

from typing import Any

import reference
import torch
from torch import Tensor

from probes.models.view import Attention

HEADS, HEAD = 2, 16
CAP = 4.0  # logits here have a spread of 3: most are bent
SINKS = torch.tensor([1.5, -2.0], dtype=torch.float64)
SLOPES = torch.tensor([0.5, 0.0625], dtype=torch.float64)
ROUGH_EXP = 1e-4  # the CPU's kernel takes exponentials of 16-bit inputs to 14 bits: measured, 6e-5 of a log-sum-exp
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
KINDS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 8},
    "softcap": {"softcap": CAP},
    "slopes": {"slopes": SLOPES},
    "softcap, slopes and window": {"softcap": CAP, "slopes": SLOPES, "window": 8},
    "full": {"prefix": 10_000},
    "prefix and window": {"prefix": 5, "window": 8},
    "learned sinks": {"sink": SINKS},
    "learned sinks and window": {"sink": SINKS, "window": 8},
}


def drawn(
    length: int,
    *,
    prompts: int = 2,
    heads: int = HEADS,
    head: int = HEAD,
    dtype: torch.dtype = torch.float64,
    spread: float = 1.7,
    seed: int = 0,
    **more: Any,
) -> Attention:
    """Normal queries, keys and values; logits have the standard deviation `spread` squared."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(prompts, heads, length, head, generator=generator).double() for _ in range(3))
    given: dict[str, Any] = {"softcap": None, "window": None} | more
    return Attention((spread * query).to(dtype), (spread * key).to(dtype), value.to(dtype), head**-0.5, **given)


def logits_of(attention: Attention) -> Tensor:
    """The twin's, of exactly the numbers that are given, in float64 on the CPU."""
    return twin_logits(*(x.detach().cpu().double() for x in (attention.query, attention.key)), attention)


def weights_of(logits: Tensor, attention: Attention) -> Tensor:
    """The twin's weights, `exp(s_j) / (exp(sink) + sum_k exp(s_k))` where heads have a learned sink logit."""
    return (logits - sums_of(logits, attention)[..., None]).exp()


def sums_of(logits: Tensor, attention: Attention) -> Tensor:
    """Their log-sum-exps."""
    found = logits.logsumexp(-1)
    return found if attention.sink is None else torch.logaddexp(found, attention.sink.cpu()[:, None])


def twin_logits(query: Tensor, key: Tensor, attention: Attention) -> Tensor:
    """Of these queries and keys, under the mask, soft-cap and slopes of `attention`."""
    slopes = None if attention.slopes is None else attention.slopes.cpu()
    more: dict[str, Any] = {"softcap": attention.softcap, "window": attention.window, "slopes": slopes}
    return reference.masked_logits(query, key, attention.scale, **more, prefix=attention.prefix)


def keys_of(attention: Attention, start: int, stop: int) -> tuple[int, int]:
    """The first key that queries from `start` to `stop` see, and the last one plus 1, found by asking for each."""
    window, prefix, length = attention.window, attention.prefix, attention.query.shape[-2]
    seen = [j for j in range(length) for i in range(start, stop) if reference.looks_at(i, j, window, prefix)]
    return min(seen), max(seen) + 1


def rounding(attention: Attention) -> float:
    """Of logits, for queries and keys taken as they are: eps of float32 or better times the products that are summed.

    An error e of a logit is a factor exp(e) of a weight: this is the relative error of patterns, too.
    """
    eps = torch.finfo(torch.promote_types(attention.query.dtype, torch.float32)).eps
    q, k = (x.detach().double().abs() for x in (attention.query, attention.key))
    largest = float((q @ k.transpose(-1, -2)).max()) * attention.scale
    slopes = 0.0 if attention.slopes is None else float(attention.slopes.max()) * attention.query.shape[-2]
    rough = ROUGH_EXP if attention.query.dtype in (torch.bfloat16, torch.float16) else 0.0
    return 4 * eps * (1 + largest + slopes) + rough


def same(found: Tensor | None, expected: Tensor, noise: float) -> None:
    """Equal within `noise`, of values above 1 relative to them; devices and dtypes aside."""
    assert found is not None
    torch.testing.assert_close(found.detach().cpu().double(), expected.double(), rtol=noise, atol=noise)
