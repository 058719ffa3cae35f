"""Which tokens behind position 0 collect attention: delimiters, a second BOS.

Of all keys, alpha [Gu] as mean over the heads of a block, prompt by prompt, beside that of uniform attention under the
block's mask: the *excess* is what alpha has above it, which does not flatter early keys. Keys 1 to T/2 alone count. A later
key is seen by fewer than half of the queries, most of them near it, and alpha would say who its neighbours are.

The tokens with the largest mean excess over their occurrences are kept, of those that stand in `LEAST` prompts or more.
Intervals (95 %) are jackknifed over documents, a token's occurrences and their number taken together.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float, Int

from ...results.dataset import Variable
from ...results.statistics import jackknife, unit_of
from ...results.tables import estimated
from ..reading import token_name

TOKENS = 5  # of a block that are kept
LEAST = 3  # prompts that a token stands in
COLUMNS = ("block", "token", "id", "excess over uniform")
DIMS = ("layer", "collector")
TABLE = {
    "token_excess": Variable(DIMS, "mean weight on the token above uniform attention's, over heads and occurrences"),
    "token_excess_low": Variable(DIMS, "low end of its 95 % interval"),
    "token_excess_high": Variable(DIMS, "high end of its 95 % interval"),
    "token_id": Variable(DIMS, "token id"),
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
    ids = tokens[:, 1:count]
    kinds, place = np.unique(ids, return_inverse=True)
    at = (np.arange(prompts)[:, None], place.reshape(ids.shape))

    def by_token(values: Any) -> Float[np.ndarray, "prompt token"]:
        """Sums over the places where each token stands."""
        sums = np.zeros((prompts, len(kinds)))
        np.add.at(sums, at, values)
        return sums

    times = by_token(1.0)
    often = (times > 0).sum(0)
    unit = unit_of(prompts, documents)
    found = {name: np.full((blocks, TOKENS), np.nan) for name in TABLE}
    for layer in range(blocks):
        excess = by_token(alpha[:, layer, 1:] - uniform[layer, 1:count])
        mean = np.where(often >= LEAST, excess.sum(0) / times.sum(0), -np.inf)
        best = np.argsort(-mean, kind="stable")[:TOKENS]
        best = best[np.isfinite(mean[best])]
        ends = jackknife(means, np.stack([excess[:, best], times[:, best]], -1), unit)
        for name, row in zip(TABLE, (*ends, kinds[best]), strict=True):
            found[name][layer, : len(best)] = row
    return found | {"token_id": np.nan_to_num(found["token_id"], nan=-1).astype(np.int64)}


def means(sums: Float[np.ndarray, "prompt *of two"]) -> Float[np.ndarray, "*of"]:
    """Of sums and counts the means over prompts; NaN where a document that is left out had all there is."""
    whole, count = np.moveaxis(sums.sum(0), -1, 0)
    return np.divide(whole, count, out=np.full(whole.shape, np.nan), where=count > 0)


def shown(tokenizer: Any | None, token: int) -> str:
    """A token's name, spaces made visible."""
    return token_name(tokenizer, token).replace(" ", "␣")


def named(ids: Int[np.ndarray, "layer collector"], tokenizer: Any | None) -> tuple[Any, ...]:
    """A coordinate that names the tokens."""
    names = ["" if token < 0 else shown(tokenizer, token) for token in ids.ravel().tolist()]
    return DIMS, np.array(names, dtype=str).reshape(ids.shape), {"long_name": "token", "units": "1"}


def token_rows(ds: xr.Dataset) -> list[list[str]]:
    """The tokens that collect most in every block, with `COLUMNS`; none where a result lacks them."""
    rows = []
    for layer, rank in np.argwhere(ds["token_id"].values >= 0) if "token_id" in ds else ():
        at = ds.isel(layer=layer, collector=rank)
        cells = [str(at[of].item()) for of in ("layer", "collector_token", "token_id")]
        rows.append([*cells, estimated(at, "token_excess", ".3f")])
    return rows
