"""Position 0 as a closed system: under a causal mask it sees only itself.

The stream at position 0 is a function of the first token and nothing else: later text cannot reach it. Its attention has
one key and weight 1 on it, so that every block adds W_O W_V of its own stream and a feed-forward of that. `trajectory`
checks the first (`later_difference`) and follows the stream through the blocks: how far its norm leaves those of other
positions, in which dimensions (massive activations), and how quickly the paths of different tokens become
one, so that position 0 looks the same to the blocks above whatever token stands there. "Layer" l is the stream that block
l reads; the last one is what the final norm reads.

**Massive activations** ([Sun], arXiv 2402.17762, section 2): |h| above 100 and above 1,000 times the median |h| of the
stream. The first number belongs to models of a few billion parameters; for tiny ones the count above 30 medians alone is
given too. The median is over prompts, positions and dimensions of one layer's stream. It is read off a
histogram of magnitudes with bins 0.1 to 0.2 % wide, since all streams of all prompts at once are more than a machine holds.

**Convergence**: tokens drawn without replacement from those of the prompts (of the vocabulary, where these are few) each
stand alone at position 0, and the cosines of their streams are taken pair by pair at every layer. For models with a BOS the
same tokens behind it, at position 1, are the control: blocks that move any token there are not what makes position 0
special. Pairs are not independent; `cosine_low` and `cosine_high` are the 5 and 95 % quantiles of the pairs, no interval for
the mean.

Streams are read one prompt and one layer at a time, as they pass.

Source: science of the measurement, section 4, "Position 0 as a closed system".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from ... import options
from ...errors import InputError
from ...measure import Headline, Measure
from ...models.checks import check_tokens, not_finite
from ...models.edited import passing
from ...models.load import takes_model
from ...models.swap import unswapped
from ...models.view import View
from ...results.dataset import dataset, provenance
from ...results.tables import Table, number
from ...results.variables import Variable, labelled
from ...run.memory import Retry, shares
from ...run.precision import double
from ...run.progress import Progress, Tally
from ...run.store import Piece, Pieces, Store, groups
from .chart import CAPTION, chart
from .convergence import PLACES, drawn_starts, pair_statistics, paths, streams_at, with_bos

STARTS = 64  # 2,016 pairs
RANKS = 5  # dimensions named per layer; [Sun] finds at most four massive ones
MAGNITUDE, MEDIANS = 100.0, 1000.0  # [Sun]'s two thresholds
# By name: (least magnitude, least multiple of the median), both strict.
MASSIVE = "over 100 and 1000 medians"  # the rule of [Sun]
RULES = {
    MASSIVE: (MAGNITUDE, MEDIANS),
    "30 medians": (0.0, 30.0),
}
BITS = 17  # of a float32's magnitude that tell the bins apart: 8 of exponent, 9 of mantissa
# Of the largest entry: experts' products round by how many positions chose them, which is less than that in float32.
SAME = 1e-5


_AT = ("first", "layer")
_COSINE = "cosine of streams that started from different tokens"
VARIABLES = {
    "later_difference": Variable(_AT, "largest change of an entry at position 0 by other text behind it"),
    "norm_first": Variable(_AT, "|h|_2 at position 0, median over prompts"),
    "norm_others": Variable(_AT, "|h|_2 at other positions, median over positions and prompts"),
    "median_magnitude": Variable(_AT, "median of |h| over prompts, positions and dimensions"),
    "massive": Variable(
        (*_AT, "rule"), "dimensions of massive activations at position 0, mean over prompts", "dimensions"
    ),
    "top_dimension": Variable((*_AT, "rank"), "dimension of the largest magnitude at position 0", "index"),
    "top_value": Variable((*_AT, "rank"), "its value, mean over prompts"),
    "top_ratio": Variable((*_AT, "rank"), "its magnitude, mean over prompts, against the median of |h|"),
    "cosine": Variable(("place", "layer"), f"{_COSINE}, mean"),
    "cosine_low": Variable(("place", "layer"), f"{_COSINE}, 5 % quantile"),
    "cosine_high": Variable(("place", "layer"), f"{_COSINE}, 95 % quantile"),
    "cosine_with_bos": Variable(("layer",), "mean cosine of other tokens' streams at position 0 with BOS's"),
}


@takes_model
def trajectory(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    *,
    starts: int = STARTS,
    seed: int = 0,
    pieces: Store | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """The stream at position 0 through the blocks: what it depends on, how large it is, and what it converges to.

    Args:
        model: any view; it is not changed.
        tokens: ids [prompt, position], position 0 included. Where all begin with the model's BOS they are measured as they
            are (`first` "bos") and without it ("text"), so that text stands at position 0. Otherwise there is one `first`:
            "id" where several prompts all begin with one other id, else "text".
        starts: tokens whose paths are compared. They are drawn from those in `tokens` where these are enough, else from
            the vocabulary; BOS, end-of-text, padding and other special ids are not among them, nor ids that block 0
            reads as zero. Of a view whose position 0 is replaced (`probes.models.swap.swapped`) the view without
            that is taken for this part.
        seed: which tokens these are.
        pieces: where parts are kept for an interrupted call (`probes.run.store`); in memory unless given.
        progress: called with (passes done, passes in all).

    Returns:
        Dataset; `layer` runs from 0 to the number of blocks.
        [first, layer]: `later_difference`, the largest difference of any entry of position 0's stream when the text behind
        it is another prompt's (0 for a causal model; what is below `SAME` counts as that); `norm_first` and `norm_others`,
        medians of |h|_2 at position 0 over prompts and elsewhere over positions and prompts; `median_magnitude`, of |h|.
        [first, layer, rule]: `massive`, number of dimensions at position 0, mean over prompts.
        [first, layer, rank]: `top_dimension`, those largest at position 0 by mean magnitude over prompts, their `top_value`
        (mean) and `top_ratio` (mean magnitude / median).
        [place, layer]: `cosine` of pairs of starts, mean, `cosine_low`, `cosine_high`; place is "position 0" and, for models
        with BOS, "position 1 behind BOS". `cosine_with_bos [layer]`: mean cosine of a start at position 0 with BOS there,
        NaN without BOS. Attributes say what made it and which tokens the starts were (`start_ids`).

    Raises:
        InputError: tokens the model cannot take, less than 2 starts or more than there are ids for, a negative seed,
            streams that are not finite.

    Source: [Sun], arXiv 2402.17762, section 2, for massive activations; the rest is ours, see the module's text.
    """
    check_tokens(model, tokens)
    batches = _firsts(model, tokens)
    # A replacement at position 0 would be the same for all starts, and their cosines 1.
    unchanged: View = unswapped(model)
    ids = drawn_starts(unchanged, tokens, starts, seed)
    report = Tally(progress, sum(2 * len(batch) for batch in batches.values()) + 3)
    pieces = pieces or Store()
    found = [_along(model, batch, report, pieces.within(first)) for first, batch in batches.items()]
    values = {name: np.stack([one[name] for one in found]) for name in found[0]}
    places = paths(unchanged, ids, report)
    cosines = [pair_statistics(streams) for streams in places.values()]
    values |= zip(("cosine", "cosine_low", "cosine_high"), map(np.stack, zip(*cosines, strict=True)), strict=True)
    values["cosine_with_bos"] = with_bos(unchanged, places[PLACES[0]])
    report.finish()
    return dataset(
        labelled(VARIABLES, values),
        tokens=tokens,
        coords={
            "first": list(batches),
            "layer": range(model.spec.blocks + 1),
            "rule": list(RULES),
            "rank": range(values["top_value"].shape[-1]),
            "place": list(places),
        },
        attrs=provenance(model, tokens, measurement="trajectory", starts=starts, seed=seed)
        | {"start_ids": ids.tolist()},
    )


# ---------------------------------------------------------------------------------------------------- along the blocks


def _along(model: View, tokens: Int[Tensor, "prompt position"], report: Tally, store: Store) -> dict[str, np.ndarray]:
    """The variables of one `first`, by name, but for those of convergence."""
    count, length = tokens.shape
    layers, width = model.spec.blocks + 1, model.spec.width
    together = groups(count)
    retry = Retry(f"a prompt of {length} positions of '{model.identity.name}'", report)

    def passed(some: range) -> Piece:
        norms = np.zeros((len(some), layers, length))
        zero = torch.zeros(len(some), layers, width, dtype=torch.float64)
        counts = [torch.zeros(1 << BITS, dtype=torch.int64, device=model.device) for _ in range(layers)]
        for at, n in enumerate(some):

            def look(layer: int, stream: Float[Tensor, "position d"], at: int = at) -> None:
                for rows in shares(length):
                    norms[at, layer, rows] = double(stream[rows]).norm(dim=-1).cpu().numpy()
                    counts[layer] += _bins(stream[rows].float().abs())
                zero[at, layer] = stream[0].cpu().double()

            passing(model, tokens[n : n + 1], look)
            report()
        found = {"norms": norms, "zero": zero.numpy()}
        for layer, own in enumerate(one.cpu().numpy() for one in counts):
            found[f"bins {layer}"] = bins = own.nonzero()[0]
            found[f"counts {layer}"] = own[bins]
        return found

    pieces = store.each("trajectory", len(together), lambda group: retry(lambda: passed(together[group])))
    norms = np.zeros((count, layers, length))
    counts = np.zeros((layers, 1 << BITS), dtype=np.int64)
    value, magnitude = np.zeros((layers, width)), np.zeros((layers, width))
    for some, piece in zip(together, pieces, strict=True):
        norms[some.start : some.stop] = piece["norms"]
        value += piece["zero"].sum(0)
        magnitude += np.abs(piece["zero"]).sum(0)
        for layer, own in enumerate(counts):
            own[piece[f"bins {layer}"]] += piece[f"counts {layer}"]
    if not np.isfinite(norms).all():
        raise not_finite(model, "residual streams")

    median = np.array([_median(own) for own in counts])
    top = torch.from_numpy(magnitude / count).topk(min(RANKS, width), dim=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = top.values.numpy() / median[:, None]
    return {
        "later_difference": _later(model, tokens, together, pieces, retry, store),
        "norm_first": np.median(norms[:, :, 0], axis=0),
        "norm_others": np.median(norms[:, :, 1:], axis=(0, 2)),
        "median_magnitude": median,
        "massive": np.sum([_counts(np.abs(piece["zero"]), median) for piece in pieces], axis=0) / count,
        "top_dimension": top.indices.numpy(),
        "top_value": np.take_along_axis(value / count, top.indices.numpy(), 1),
        "top_ratio": ratio,
    }


def _counts(
    magnitudes: Float[np.ndarray, "prompt layer d"], median: Float[np.ndarray, " layer"]
) -> Float[np.ndarray, "layer rule"]:
    """How many magnitudes each rule takes, summed over prompts."""
    thresholds = [np.maximum(least, medians * median)[:, None] for least, medians in RULES.values()]
    return np.stack([(magnitudes > one).sum((0, -1)).astype(np.float64) for one in thresholds], -1)


def _bins(magnitude: Float[Tensor, "position d"]) -> Int[Tensor, " bin"]:
    """A histogram of magnitudes by the leading bits of their float32, which rise with the value: 512 bins per doubling."""
    bits = magnitude.flatten().view(torch.int32) >> (31 - BITS)  # the sign's bit is 0
    return torch.bincount(bits, minlength=1 << BITS)


def _median(counts: Int[np.ndarray, " bin"]) -> float:
    """Of the magnitudes in a histogram, interpolated within its bin."""
    reached = counts.cumsum()
    half = int(reached[-1]) / 2
    at = int((reached < half).sum())
    low, high = (torch.tensor(edge << (31 - BITS), dtype=torch.int32).view(torch.float32) for edge in (at, at + 1))
    share = (half - int(reached[at] - counts[at])) / int(counts[at])
    return float(low + (high - low) * share)


def _later(
    model: View, tokens: Tensor, together: Sequence[range], pieces: Pieces, retry: Retry, store: Store
) -> Float[np.ndarray, " layer"]:
    """The largest difference when the next prompt's text (a single prompt's own, backwards) comes after position 0."""
    others = tokens.roll(-1, 0) if len(tokens) > 1 else tokens.flip(1).roll(1, 1)
    changed = torch.cat([tokens[:, :1], others[:, 1:]], 1)
    known = {prompt.numpy().tobytes(): at for at, prompt in enumerate(tokens.cpu())}
    size = len(together[0])

    @lru_cache(maxsize=1)  # neighbouring prompts are in one piece
    def zeros(group: int) -> np.ndarray:
        return pieces[group]["zero"]

    def zero(n: int) -> Tensor:
        return torch.from_numpy(zeros(n // size)[n % size])

    def compared(some: range) -> Piece:
        largest = np.zeros(model.spec.blocks + 1)
        for n in some:
            same = known.get(changed[n].cpu().numpy().tobytes())  # behind one first token it is that other prompt
            streams = zero(same) if same is not None else streams_at(model, changed[n : n + 1], 0)[0]
            moved, size_of = (x.abs().amax(-1) for x in (streams - zero(n), streams))
            largest = np.maximum(largest, moved.where(moved > SAME * size_of, 0).numpy())
            retry.report()
        return {"later": largest}

    found = store.each("position 0", len(together), lambda group: retry(lambda: compared(together[group])))
    return np.stack([piece["later"] for piece in found]).max(0)


# ----------------------------------------------------------------------------------------------------------- passes


def _firsts(model: View, tokens: Int[Tensor, "prompt position"]) -> dict[str, Tensor]:
    """The prompts by what stands at position 0."""
    begin = tokens[:, 0].unique().tolist()
    first = model.first_ids
    if first and (tokens[:, : len(first)] == tokens.new_tensor(first[: tokens.shape[1]])).all():
        if tokens.shape[1] < len(first) + 2:
            raise InputError(
                f"tokens have {tokens.shape[1]} positions, BOS among them; give at least {len(first) + 2}, so that text "
                "has something after it"
            )
        return {"bos": tokens, "text": tokens[:, len(first) :]}
    return {"id" if len(begin) == 1 and len(tokens) > 1 else "text": tokens}


# -------------------------------------------------------------------------------------------------------- what is shown

TOGETHER = 0.99  # mean cosine from which the streams of different tokens count as one
LARGEST = ("dimension", "value", "/ median")
COLUMNS = ("model", "first", "layer", "|h_0|", "|h|, others", "massive", "> 30", *LARGEST, "cosine", "behind BOS")


@dataclass(frozen=True)
class Options(options.Options):
    """Follow position 0, which no later token can influence, through the blocks.

    Writes trajectory.nc, trajectory.md and the chart: block by block its norm against other positions, its massive
    activations, and how alike different first tokens, drawn from the prompts, have become.

    Examples:
      headwater trajectory tiny-llama
      headwater trajectory tiny-llama tiny-qwen2 --starts 128 --out runs/two
    """

    starts: int = options.option("Tokens whose paths from position 0 are compared.", STARTS)


def rows(results: Mapping[str, xr.Dataset]) -> list[Table]:
    """Position 0 layer by layer, a row for each model, `first` and layer."""
    cells = []
    for model, ds in results.items():
        top = ds.isel(rank=0)
        cosines = [ds.cosine.sel(place=place) if place in ds.place else ds.cosine[0] * np.nan for place in PLACES]
        for first, layer in product(ds["first"].values, ds.layer.values):
            at, most = ds.sel(first=first, layer=layer), top.sel(first=first, layer=layer)
            numbers = [at.norm_first, at.norm_others, at.massive.sel(rule=MASSIVE), at.massive.sel(rule="30 medians")]
            numbers += [most.top_dimension, most.top_value, most.top_ratio]
            alike = [number(cosine.sel(layer=layer), ".3f") for cosine in cosines]
            cells.append([model, str(first), str(layer), *map(number, numbers), *alike])
    return [Table("Position 0 layer by layer", COLUMNS, cells)]


def answer(results: Mapping[str, xr.Dataset]) -> list[str]:
    """How large position 0's stream becomes, whether later text reaches it, and where different tokens become one."""
    lines = []
    for model, ds in results.items():
        times = (ds.norm_first / ds.norm_others).isel(first=0)
        later = float(ds.later_difference.max())
        reached = "no later token changes it" if later == 0 else f"later tokens change an entry by up to {later:.3g}"
        lines.append(
            f"{model}: position 0 has {number(times.max())} times the norm of other positions in layer "
            f"{int(times.layer[int(times.values.argmax())])}; {reached}; there, different tokens have a cosine of "
            f"{number(ds.cosine[0, 0], '.3f')} at the embeddings and {number(ds.cosine[0, -1], '.3f')} before the final "
            f"norm, {_together(ds.cosine[0].values)}."
        )
    return lines


def _together(course: Float[np.ndarray, " layer"]) -> str:
    """From which layer on streams count as one; streams of length zero have no cosine."""
    with np.errstate(invalid="ignore"):
        alike = (course > TOGETHER) | np.isnan(course)
    if not (course > TOGETHER).any():
        return f"never above {TOGETHER:g}"
    apart = np.flatnonzero(~alike)
    first = int(apart[-1]) + 1 if len(apart) else 0
    return (
        f"above {TOGETHER:g} from layer {first} on" if first < len(course) else f"above {TOGETHER:g} for a while only"
    )


MEASURE = Measure(
    name="trajectory",
    question="What becomes of position 0, which sees only itself, through the blocks?",
    compute=trajectory,
    options=Options,
    headlines=(
        Headline(
            "norm at 0 / elsewhere, largest", lambda ds: (ds.norm_first / ds.norm_others).max("layer"), ratio=True
        ),
        Headline("massive dimensions at 0, most", lambda ds: ds.massive.sel(rule=[MASSIVE, "30 medians"]).max("layer")),
        Headline("change at 0 by later text", lambda ds: ds.later_difference.max("layer")),
        Headline("cosine of different tokens, last layer", lambda ds: ds.cosine.isel(layer=-1, drop=True), form=".3f"),
    ),
    answer=answer,
    tables=rows,
    chart=chart,
    caption=CAPTION,
    trials={"trajectory": partial(trajectory, starts=16)},
)
