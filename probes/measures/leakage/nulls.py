"""Nulls for the total of leakage (`probes.leakage`): what patterns leak that have learnt nothing about position.

Each null is the total of the log form, mean over blocks and heads, per band, in squared nats:

- *uniform*: attention that weighs all visible keys alike, under the model's masks. Closed form.
- *fresh*: the model with fresh weights of the same configuration, on some of the same prompts. At usual deviations logits
  are small at initialization and this is near the uniform one; where it is not, the architecture leaks by itself.
- *shuffled*: the model as it is, one half's queries under each other's labels (97.5 % quantile): what the estimate shows
  where nothing depends on the query.

A total below the uniform null says that training has made patterns depend on the query's place less than the mask alone
would have them.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from ...errors import InputError
from ...models.view import View
from ...results.statistics import INTERVAL
from ...run.memory import available
from .samples import LEAST_PROMPTS, Band, halves_of

FRESH_PROMPTS = 64  # of the null of fresh weights: its mean over all heads is known to 1 % with them


def uniform(model: View, length: int, bands: Sequence[Band]) -> Float[np.ndarray, " band"]:
    """V(log number of visible keys) over each band's queries, mean over blocks: what the mask alone leaks."""
    i = np.arange(length)
    seen = [np.log(i + 1 if w is None else np.minimum(i + 1, w)) for w in model.spec.windows]
    return np.array([np.mean([x[first : last + 1].var() for x in seen]) for first, last in bands])


def shuffled(totals: Float[np.ndarray, "shuffle layer head band"]) -> Float[np.ndarray, " band"]:
    """The end of the interval over shuffles of query labels."""
    return np.percentile(totals.mean((1, 2)), INTERVAL[1], axis=0)


def fresh_prompts(model: View, asked: int | None, prompts: int) -> int:
    """How many prompts fresh weights are measured on; 0 for no such null.

    `asked`, or as many as there are. If not given, `FRESH_PROMPTS` where memory has room for a second copy of the weights.

    Raises:
        InputError: too few for two halves of several.
    """
    if asked is None:
        fits = not model.offloaded and _bytes(model) < available(model.device)
        asked = FRESH_PROMPTS if fits else 0
    if isinstance(asked, bool) or not isinstance(asked, int) or (asked != 0 and asked < LEAST_PROMPTS):
        raise InputError(
            f"fresh={asked} prompts cannot be split in two halves of several; give at least {LEAST_PROMPTS}, or 0 for no "
            "null of fresh weights"
        )
    return min(asked, prompts)


def _bytes(model: View) -> int:
    """Of the weights behind a view, where it has any to show."""
    module = getattr(getattr(model, "original", model), "_model", None)
    return 0 if module is None else sum(p.numel() * p.element_size() for p in module.parameters())


def first_of_halves(prompts: int, fresh: int) -> list[int]:
    """The `fresh` prompts that fresh weights are measured on: the first of each half, since the halves share no document."""
    pairs = zip(halves_of(prompts), halves_of(fresh), strict=True)
    return [n for half, own in pairs for n in range(half.start, half.start + own.stop - own.start)]
