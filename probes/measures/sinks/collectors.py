"""Which keys behind position 0 collect attention, and which tokens stand there: delimiters, a second BOS.

Of all keys, alpha [Gu] as mean over the heads of a block, prompt by prompt, beside that of uniform attention under the
block's mask: the *excess* is what alpha has above it, which does not flatter early keys. Keys 1 to T/2 alone count. A later
key is seen by fewer than half of the queries, most of them near it, and alpha would say who its neighbours are.

- `strong_...`: the single (prompt, key) with the largest excess of each block.
- `token_...`: the tokens with the largest mean excess over their occurrences, of those that stand in `LEAST` prompts or
  more. Intervals (95 %) are jackknifed over documents, a token's occurrences and their number taken together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float, Int

from ...results.statistics import jackknife, numbered
from ...results.tables import estimated, number
from ...results.variables import Variable
from ..reading import token_name

STRONG, TOKENS = 3, 5  # keys and tokens of a block that are kept
LEAST = 3  # prompts that a token stands in
KEY_COLUMNS = ("model", "block", "token", "id", "prompt", "key", "alpha", "uniform")
TOKEN_COLUMNS = ("model", "block", "token", "id", "times", "prompts", "alpha", "excess over uniform")

_KEY, _TOKEN = ("layer", "strong"), ("layer", "collector")
TABLE = {
    "strong_alpha": Variable(_KEY, "mean weight on the key, mean over heads"),
    "strong_uniform": Variable(_KEY, "the same of uniform attention under the block's mask"),
    "strong_prompt": Variable(_KEY, "number of the prompt"),
    "strong_key": Variable(_KEY, "position of the key"),
    "strong_id": Variable(_KEY, "token id at the key"),
    "token_alpha": Variable(_TOKEN, "mean weight on the token, mean over heads and occurrences"),
    "token_excess": Variable(_TOKEN, "the same above that of uniform attention under the block's mask"),
    "token_excess_low": Variable(_TOKEN, "low end of its 95 % interval"),
    "token_excess_high": Variable(_TOKEN, "high end of its 95 % interval"),
    "token_id": Variable(_TOKEN, "token id"),
    "token_times": Variable(_TOKEN, "how often the token stands at a key that counts"),
    "token_prompts": Variable(_TOKEN, "in how many prompts it does"),
}


def counted(length: int) -> int:
    """How many keys from 0 on may count: those up to T/2."""
    return length // 2 + 1


def collectors(
    alpha: Float[np.ndarray, "prompt layer counted"],
    uniform: Float[np.ndarray, "layer key"],
    tokens: Int[np.ndarray, "prompt position"],
    documents: Sequence[str] | None,
) -> dict[str, np.ndarray]:
    """The variables of `TABLE`, of `alpha` as means over heads; ids are -1, and numbers NaN, where there are fewer."""
    prompts, blocks, count = alpha.shape
    keys = count - 1
    alpha, even = alpha[:, :, 1:], uniform[:, 1:count]
    excess, ids = alpha - even, tokens[:, 1:count]
    kinds, place = np.unique(ids, return_inverse=True)
    place = place.reshape(ids.shape)
    each = np.zeros((prompts, len(kinds)))
    np.add.at(each, (np.arange(prompts)[:, None], place), 1.0)
    often = (each > 0).sum(0)
    unit = np.arange(prompts) if documents is None else numbered(documents)
    found = {name: np.full((blocks, STRONG if v.dims == _KEY else TOKENS), np.nan) for name, v in TABLE.items()}
    for layer in range(blocks):
        order = np.argsort(-excess[:, layer].ravel(), kind="stable")[:STRONG]
        prompt, key = np.unravel_index(order, (prompts, keys))
        strong = {"alpha": alpha[prompt, layer, key], "uniform": even[layer, key], "prompt": prompt, "key": key + 1}
        for name, values in (strong | {"id": ids[prompt, key]}).items():
            found[f"strong_{name}"][layer, : len(order)] = values
        sums = np.zeros((2, prompts, len(kinds)))
        for n, of in enumerate((excess, alpha)):
            np.add.at(sums[n], (np.arange(prompts)[:, None], place), of[:, layer])
        mean = np.where(often >= LEAST, sums[0].sum(0) / each.sum(0), -np.inf)
        best = np.argsort(-mean, kind="stable")[:TOKENS]
        best = best[np.isfinite(mean[best])]
        whole, low, high = jackknife(_ratio, np.stack([sums[0][:, best], each[:, best]], -1), unit)
        some = {"excess": whole, "excess_low": low, "excess_high": high, "id": kinds[best], "prompts": often[best]}
        some |= {"alpha": sums[1][:, best].sum(0) / each[:, best].sum(0), "times": each[:, best].sum(0)}
        for name, values in some.items():
            found[f"token_{name}"][layer, : len(best)] = values
    whole_numbers = ("prompt", "key", "id", "times", "prompts")
    return {n: np.nan_to_num(x, nan=-1).astype(np.int64) if n.endswith(whole_numbers) else x for n, x in found.items()}


def _ratio(sums: Float[np.ndarray, "prompt token two"]) -> Float[np.ndarray, " token"]:
    """Means over occurrences; NaN where a document that is left out had all of them."""
    whole, count = sums.sum(0).T
    return np.divide(whole, count, out=np.full(len(whole), np.nan), where=count > 0)


def named(found: dict[str, np.ndarray], tokenizer: Any | None) -> dict[str, Any]:
    """Coordinates that name the tokens, spaces made visible."""

    def name(token: int) -> str:
        return "" if token < 0 else token_name(tokenizer, token).replace(" ", "␣")

    dims = {"strong": _KEY, "token": _TOKEN}
    return {
        coordinate: (
            dims[of],
            np.vectorize(name, otypes=[str])(found[f"{of}_id"]),
            {"long_name": "token", "units": "1"},
        )
        for coordinate, of in (("strong_token", "strong"), ("collector_token", "token"))
    }


def key_rows(name: str, ds: xr.Dataset) -> list[list[str]]:
    """The strongest keys of every block, with `KEY_COLUMNS`; none where a result lacks them."""
    rows = []
    for at in _places(ds, "strong"):
        told = [str(at[of].item()) for of in ("layer", "strong_token", "strong_id", "strong_prompt", "strong_key")]
        rows.append([name, *told, *(number(at[f"strong_{of}"], ".3f") for of in ("alpha", "uniform"))])
    return rows


def token_rows(name: str, ds: xr.Dataset) -> list[list[str]]:
    """The tokens that collect most in every block, with `TOKEN_COLUMNS`; none where a result lacks them."""
    rows = []
    for at in _places(ds, "collector"):
        told = [str(at[of].item()) for of in ("layer", "collector_token", "token_id", "token_times", "token_prompts")]
        rows.append([name, *told, number(at["token_alpha"], ".3f"), estimated(at, "token_excess", ".3f")])
    return rows


def _places(ds: xr.Dataset, dim: str) -> list[xr.Dataset]:
    """A result at every block and rank that holds a token."""
    variable = {"strong": "strong_id", "collector": "token_id"}[dim]
    if variable not in ds:
        return []
    return [ds.isel({"layer": a, dim: b}) for a, b in np.argwhere(ds[variable].values >= 0)]
