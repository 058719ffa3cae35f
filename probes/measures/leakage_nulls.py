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
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import InputError
from ..models.initialization import Rule
from ..models.memory import weights_of
from ..models.view import View
from ..results.statistics import INTERVAL
from ..run.memory import available
from ..run.progress import Progress
from ..run.store import Store
from .leakage_forms import resampling, splits
from .leakage_samples import LEAST_PROMPTS, Band, halves_of

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
        fits = not model.offloaded and weights_of(model) < available(model.device)
        asked = FRESH_PROMPTS if fits else 0
    if isinstance(asked, bool) or not isinstance(asked, int) or (asked != 0 and asked < LEAST_PROMPTS):
        raise InputError(
            f"fresh={asked} prompts cannot be split in two halves of several; give at least {LEAST_PROMPTS}, or 0 for no "
            "null of fresh weights"
        )
    return min(asked, prompts)


def fresh(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    bands: Sequence[Band],
    lags: Sequence[int],
    prompts: int,
    *,
    seed: int,
    initialization: Rule,
    bootstrap: int,
    documents: Sequence[str] | None = None,
    progress: Progress | None = None,
    pieces: Store,
) -> tuple[Float[np.ndarray, "resample band"], str]:
    """The total of fresh weights under each resampling of its prompts, and what they were drawn from, in words.

    The prompts are the first of each half, since the halves share no document. The second copy of the weights is gone
    when this returns.

    Raises:
        InputError: no such rule, or values that are not finite.
    """
    halves = halves_of(len(tokens))
    sizes = (own.stop - own.start for own in halves_of(prompts))
    chosen: list[int] = [half.start + n for size, half in zip(sizes, halves, strict=True) for n in range(size)]
    named = None if documents is None else [documents[n] for n in chosen]
    twin = model.reinitialized(seed, initialization=initialization)
    drawn = resampling(prompts, bootstrap, seed, named)
    found = splits(twin, tokens[torch.tensor(chosen)], bands, lags, drawn, progress, pieces=pieces)
    rule = twin.identity.initialization
    said = f"fresh weights ({'' if rule is None else f'{rule}; '}seed {seed}, {prompts} prompts)"
    return found["log_form"][:, 0].mean((1, 2)), said
