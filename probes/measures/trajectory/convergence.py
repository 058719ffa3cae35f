"""Paths of different tokens through the blocks from one position: which tokens, their streams, how alike these become.

The second half of `probes.measures.trajectory`, whose text says what is compared and why.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...errors import InputError
from ...models.view import Edit, View
from ...run.progress import Tally

PLACES = ("position 0", "position 1 behind BOS")
TAILS = (0.05, 0.95)  # of the pairs' cosines
EMBEDDING_NUMBERS = 1 << 22  # of embeddings looked at together: 16 MiB in float32


def paths(model: View, ids: Int[Tensor, " start"], report: Tally) -> dict[str, Tensor]:
    """The starts' streams [start, layer, d] by place."""
    begun = {PLACES[0]: ids[:, None]}
    if model.first_ids:
        first = ids.new_tensor(model.first_ids).expand(len(ids), -1)
        begun[PLACES[1]] = torch.cat([first, ids[:, None]], 1)
    found = {}
    for place, tokens in begun.items():
        found[place] = streams_at(model, tokens, tokens.shape[1] - 1)
        report()
    return found


def pair_statistics(streams: Float[Tensor, "start layer d"]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean and 5 and 95 % quantiles of the pairs' cosines, each [layer]."""
    one, other = torch.triu_indices(len(streams), len(streams), offset=1)
    direction = streams / streams.norm(dim=-1, keepdim=True)
    products = torch.einsum("sld,tld->lst", direction, direction)
    cosines = products[:, one, other].clamp(-1, 1).numpy()
    low, high = np.quantile(cosines, TAILS, axis=1)
    return cosines.mean(1), low, high


def with_bos(model: View, streams: Float[Tensor, "start layer d"]) -> np.ndarray:
    if model.bos is None:
        return np.full(streams.shape[1], np.nan)
    own = streams_at(model, torch.tensor([[model.bos]]), 0)
    return torch.nn.functional.cosine_similarity(streams, own, dim=-1).mean(0).numpy()


def drawn_starts(model: View, tokens: Int[Tensor, "prompt position"], starts: int, seed: int) -> Int[Tensor, " start"]:
    """Drawn from the ids that occur in `tokens`, special ones left out, or from the vocabulary where those are too few.

    Ids that are only there to fill a matrix up have rows that were never trained; those of zeros have no direction.

    Raises:
        InputError: `starts` are less than 2 or more than there are, or a negative seed.
    """
    if seed < 0:
        raise InputError(f"seed={seed} is negative; give 0 or more")
    ends = (getattr(model.tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "unk"))
    special = {*model.first_ids, *ends, *getattr(model.tokenizer, "all_special_ids", ())}
    allowed = np.array([token for token in range(model.spec.vocabulary) if token not in special], dtype=np.int64)
    pool = _not_zero(model, np.intersect1d(allowed, tokens.cpu().numpy()))
    if not 2 <= starts <= len(pool):
        pool = _not_zero(model, allowed)
    if not 2 <= starts <= len(pool):
        raise InputError(f"starts={starts} tokens cannot be compared; give 2 to {len(pool)}, the ids of the vocabulary")
    return torch.from_numpy(np.random.default_rng(seed).choice(pool, size=starts, replace=False)).long()


@torch.no_grad()
def _not_zero(model: View, ids: Int[np.ndarray, " id"]) -> Int[np.ndarray, " some"]:
    """Those that block 0 does not read as zero at position 0, looked up some at a time."""
    some = torch.from_numpy(ids)[:, None].split(max(1, EMBEDDING_NUMBERS // model.spec.width))
    return ids[np.concatenate([model.embed(batch)[:, 0].ne(0).any(-1).cpu().numpy() for batch in some])]


@torch.no_grad()
def streams_at(model: View, tokens: Int[Tensor, "prompt position"], position: int) -> Float[Tensor, "prompt layer d"]:
    """Every layer's stream at one position, float64 on the CPU."""
    found: list[Tensor] = []

    def take(stream: Tensor) -> Tensor:
        found.append(stream[:, position].cpu().double())
        return stream

    edits = [Edit("residual", layer, take) for layer in range(model.spec.blocks)]
    take(model.residual(model.embed(tokens), edits=edits))
    return torch.stack(found, 1)
