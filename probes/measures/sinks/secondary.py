"""Secondary sinks: positions whose stream turns, for some blocks, into the direction of position 0's.

[Wong], arXiv 2512.22213, calls a token a sink at a block where its hidden state has a cosine of more than 0.9, of either
sign, with that of the first sink, and a secondary sink where that lasts for some blocks only. Where all streams have a large
part in common (Gemma 3) nearly every position passes that rule. Here the mean stream of the prompt's positions from 1 on is
taken out first: with `x_j` the stream that a block reads at position j, and `m` that mean, position j >= 1 is *aligned*
where

    cos(x_j - m, x_0 - m) > 0.9.

The rule as published is counted beside it. Block 0 is left out: it reads embeddings, and a token that stands at position 0,
too, has the same one. A *level* is the block where an alignment arises and the number of blocks that it lasts, [Wong]'s
coordinates; levels in fewer than `LEAST` prompts are left out. The excess of a level is the mean weight on its keys above
that of uniform attention, over heads, in the blocks of its life, and of the same keys in all other blocks; as in
`collectors`, keys up to T/2 count. Intervals (95 %) are jackknifed over documents.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...results.dataset import Variable
from ...results.statistics import jackknife, unit_of
from ...results.tables import estimated, number
from .collectors import LEAST, means, shown

COSINE = 0.9  # [Wong]'s
RULES = ("mean taken out", "as published")
LEVELS, TOKENS = 6, 3  # the most frequent that are kept
COLUMNS = (
    "arises in",
    "blocks",
    "positions",
    "prompts",
    "tokens",
    "norm",
    "excess",
    "excess elsewhere",
    "position 0's weight",
)
DIMS = ("level",)
TABLE = {
    "aligned_share": Variable(
        ("prompt", "rule", "layer"), "share of positions from 1 on that are aligned with position 0"
    ),
    "level_block": Variable(DIMS, "block where the alignment arises"),
    "level_blocks": Variable(DIMS, "number of blocks that it lasts"),
    "level_positions": Variable(DIMS, "positions of the level, in all prompts"),
    "level_prompts": Variable(DIMS, "prompts with a position of the level"),
    "level_norm": Variable(DIMS, "norm of the stream beside position 0's, mean over positions and blocks"),
    **{
        f"level_{name}{end}": Variable(DIMS, f"mean weight above uniform attention's {where}{said}")
        for name, where in (("excess", "in these blocks"), ("elsewhere", "on the same keys in the other blocks"))
        for end, said in (("", ""), ("_low", ", low end of its 95 % interval"), ("_high", ", high end"))
    },
}


def aligned(streams: Float[Tensor, "prompt position d"]) -> Bool[Tensor, "prompt rule position"]:
    """Which positions have position 0's direction, by both of `RULES`; position 0 itself does not count."""
    streams = streams.float()
    centred = streams - streams[:, 1:].mean(1, keepdim=True)
    cosines = [torch.nn.functional.cosine_similarity(x, x[:, :1], dim=-1) for x in (centred, streams)]
    found = torch.stack([cosines[0], cosines[1].abs()], 1) > COSINE
    found[..., 0] = False
    return found


def runs(there: Bool[np.ndarray, "prompt layer position"]) -> list[tuple[int, int, int, int]]:
    """(block where it arises, blocks that it lasts, prompt, position) of every alignment."""
    edges = np.diff(np.pad(there, ((0, 0), (1, 1), (0, 0))).astype(np.int8), axis=1)
    begun, ended = (np.argwhere(np.moveaxis(edges, 1, 2) == sign) for sign in (1, -1))  # in the same order
    return [(int(a[2]), int(b[2] - a[2]), int(a[0]), int(a[1])) for a, b in zip(begun, ended, strict=True)]


def secondary(
    there: Bool[np.ndarray, "prompt layer rule position"],
    norms: Float[np.ndarray, "prompt layer position"],
    alpha: Float[np.ndarray, "prompt layer counted"],
    uniform: Float[np.ndarray, "layer key"],
    tokens: Int[np.ndarray, "prompt position"],
    tokenizer: Any | None,
    documents: Sequence[str] | None,
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The variables of `TABLE`, `alpha` being means over heads, and each level's most frequent tokens in words."""
    there[:, 0] = False
    prompts, counted = len(alpha), alpha.shape[-1]
    levels = defaultdict[tuple[int, int], list[tuple[int, int]]](list)
    for block, blocks, prompt, position in runs(there[:, :, 0]):
        levels[block, blocks].append((prompt, position))
    often = {level: at for level, at in levels.items() if len({prompt for prompt, _ in at}) >= LEAST}
    kept = sorted(sorted(often, key=lambda level: -len(often[level]))[:LEVELS])
    excess, unit = alpha - uniform[:, :counted], unit_of(prompts, documents)
    rows, words = list[list[Any]](), list[str]()
    for block, blocks in kept:
        at = np.array(often[block, blocks])
        life = np.zeros(alpha.shape[1], dtype=bool)
        life[block : block + blocks] = True
        # Over a prompt's keys: means over the blocks of its life and over the others, and how many keys.
        sums = np.zeros((prompts, 2, 2))
        for prompt, key in at[at[:, 1] < counted]:
            both = [excess[prompt, blocks, key].mean() if blocks.any() else np.nan for blocks in (life, ~life)]
            sums[prompt] += np.stack([both, np.ones(2)], -1)
        ends = np.stack(jackknife(means, sums, unit))  # [estimate, life or elsewhere]
        beside = norms[at[:, 0], :, at[:, 1]][:, life] / norms[at[:, 0], :, 0][:, life]
        rows.append([block, blocks, len(at), len({*at[:, 0].tolist()}), beside.mean(), *ends[:, 0], *ends[:, 1]])
        common = Counter(tokens[at[:, 0], at[:, 1]].tolist()).most_common(TOKENS)
        words.append(", ".join(f"{shown(tokenizer, token)} {times}" for token, times in common))
    names = [name for name in TABLE if name != "aligned_share"]
    found = dict(zip(names, np.array(rows, dtype=np.float64).reshape(-1, len(names)).T, strict=True))
    return found | {"aligned_share": there[..., 1:].mean(-1).swapaxes(1, 2)}, np.array(words, dtype=str)


def most(shares: Float[np.ndarray, "prompt rule layer"]) -> Float[np.ndarray, " rule"]:
    """Of the block with the largest mean share."""
    return shares.mean(0).max(-1)


def level_rows(ds: xr.Dataset) -> list[list[str]]:
    """The levels with `COLUMNS`, the first to arise first; none where a result lacks them."""
    rows = []
    for level in range(ds.sizes.get("level", 0)):
        at = ds.isel(level=level)
        whole = [str(int(at[f"level_{name}"])) for name in ("block", "blocks", "positions", "prompts")]
        sizes = [estimated(at, f"level_{name}", "+.3f") for name in ("excess", "elsewhere")]
        life = slice(int(at["level_block"]), int(at["level_block"] + at["level_blocks"]))
        first = number(ds["alpha"].sel(key=0).isel(layer=life).mean(), ".3f")
        rows.append([*whole, str(at["level_token"].item()), number(at["level_norm"], ".2f"), *sizes, first])
    return rows
