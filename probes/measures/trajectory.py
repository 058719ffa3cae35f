"""Position 0 as a closed system: under a causal mask it sees only itself. Definitions: `docs/probes/trajectory.md`.

Tokens are drawn without replacement from those of the prompts. Streams are read one layer at a time, as they pass, of one
prompt or, on a GPU, of as many as go through it together. Source: [Sun], arXiv 2402.17762, section 2 (massive activations).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from .. import options
from ..charts import BLUE, DASHED, GREEN, INK, VERMILLION, Panel, Series, block_axis, curves, level, panels
from ..errors import InputError
from ..measure import Headline, Measure
from ..models.checks import check_tokens, not_finite
from ..models.edited import passing
from ..models.load import takes_model
from ..models.swap import unswapped
from ..models.view import View
from ..results.curves import with_interval
from ..results.dataset import Variable, dataset, labelled, provenance
from ..results.statistics import jackknife
from ..results.tables import Table, number
from ..run.memory import Retry, batches, prompts_at_once
from ..run.precision import double
from ..run.progress import Progress, Tally
from ..run.store import Piece, Store

STARTS = 64  # 2,016 pairs
RANKS = 5  # dimensions named per layer; [Sun] finds at most four massive ones
PLACES = ("position 0", "position 1 behind BOS")
MASSIVE, MEDIANS = "over 100 and 1000 medians", "30 medians"
# By name: (least magnitude, least multiple of the median), both strict; the first is [Sun]'s.
RULES = {MASSIVE: (100.0, 1000.0), MEDIANS: (0.0, 30.0)}
# Of the largest entry: experts' products round by how many positions chose them, which is less than that in float32.
SAME = 1e-5


_AT = ("first", "layer")
_COSINE = "cosine of streams that started from different tokens"
VARIABLES = {
    "later_difference": Variable(_AT, "largest change of an entry at position 0 by other text behind it"),
    "norm_first": Variable(_AT, "|h|_2 at position 0, median over prompts"),
    "norm_others": Variable(_AT, "|h|_2 at other positions, median over positions and prompts"),
    "massive": Variable((*_AT, "rule"), "massive activations at position 0, mean over prompts", "dimensions"),
    "top_dimension": Variable((*_AT, "rank"), "dimension of the largest magnitude at position 0", "index"),
    "top_ratio": Variable((*_AT, "rank"), "its magnitude, mean over prompts, against the median"),
    "cosine": Variable(("place", "layer"), f"{_COSINE}, mean"),
    "cosine_low": Variable(("place", "layer"), f"{_COSINE}, low end over tokens"),
    "cosine_high": Variable(("place", "layer"), f"{_COSINE}, high end over tokens"),
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
            "id" where several prompts all begin with one other id, else "text". Of other lengths with `attention_mask`
            (`docs/prompts.md`).
        starts: tokens whose paths are compared, drawn from those in `tokens`; all, if there are fewer. BOS, end-of-text,
            padding and other special ids are not among them. Of a view whose position 0 is replaced
            (`probes.models.swap.swapped`) the view without that is taken for this part.
        seed: which tokens these are.
        pieces: where parts are kept for an interrupted call (`probes.run.store`); in memory unless given.
        progress: called with (passes done, passes in all).

    Returns:
        Dataset; `layer` runs from 0 to the number of blocks.
        [first, layer]: `later_difference`, the largest difference of any entry of position 0's stream when the text behind
        it is another prompt's (0 for a causal model; what is below `SAME` counts as that); `norm_first` and `norm_others`,
        medians of |h|_2 at position 0 over prompts and elsewhere over positions and prompts.
        [first, layer, rule]: `massive`, number of dimensions at position 0, mean over prompts.
        [first, layer, rank]: `top_dimension`, those largest at position 0 by mean magnitude over prompts, and `top_ratio`,
        that magnitude / median, which is the mean over prompts of that of |h| over positions and dimensions.
        [place, layer]: `cosine` of pairs of starts, mean, `cosine_low`, `cosine_high`; place is "position 0" and, for models
        with BOS, "position 1 behind BOS". Attributes say what made it and which tokens the starts were (`start_ids`).

    Raises:
        InputError: tokens the model cannot take, less than 2 starts or prompts with fewer than 2 ids for them, a negative
            seed, streams that are not finite.

    Source: [Sun], arXiv 2402.17762, section 2, for massive activations; the rest is ours, see the module's text.
    """
    check_tokens(model, tokens)
    batches = _firsts(model, tokens)
    # A replacement at position 0 would be the same for all starts, and their cosines 1.
    unchanged: View = unswapped(model)
    ids = drawn_starts(unchanged, tokens, starts, seed)
    report = Tally(progress, sum(2 * len(batch) for batch in batches.values()) + 2)
    pieces = pieces or Store()
    found = [_along(model, batch, report, pieces.within(first)) for first, batch in batches.items()]
    values = {name: np.stack([one[name] for one in found]) for name in found[0]}
    begun = {PLACES[0]: ids[:, None]}
    if model.first_ids:
        begun[PLACES[1]] = torch.cat([ids.new_tensor(model.first_ids).expand(len(ids), -1), ids[:, None]], 1)
    cosines = [pair_cosines(streams_at(unchanged, behind, behind.shape[1] - 1).cpu()) for behind in begun.values()]
    values |= zip(("cosine", "cosine_low", "cosine_high"), map(np.stack, zip(*cosines, strict=True)), strict=True)
    report.finish()
    return dataset(
        labelled(VARIABLES, values),
        tokens=tokens,
        coords={
            "first": list(batches),
            "layer": range(model.spec.blocks + 1),
            "rule": list(RULES),
            "rank": range(values["top_ratio"].shape[-1]),
            "place": list(begun),
        },
        attrs=provenance(model, tokens, measurement="trajectory", starts=starts, seed=seed)
        | {"start_ids": ids.tolist()},
    )


# ---------------------------------------------------------------------------------------------------- along the blocks


def _along(model: View, tokens: Int[Tensor, "prompt position"], report: Tally, store: Store) -> dict[str, np.ndarray]:
    """The variables of one `first`, by name, but for those of convergence."""
    (count, length), layers = tokens.shape, model.spec.blocks + 1
    # Behind position 0 comes the next prompt's text; a single prompt's own, backwards.
    others = tokens.roll(-1, 0) if count > 1 else tokens.flip(1).roll(1, 1)
    changed = torch.cat([tokens[:, :1], others[:, 1:]], 1)
    retry = Retry(f"a prompt of {length} positions of '{model.identity.name}'", report)
    kept = 2 * layers * (length + model.spec.width)  # float32 numbers, of norms and of position 0's streams in float64

    def passed(some: list[int]) -> list[Piece]:
        norms, median, zero = list[Tensor](), list[Tensor](), list[Tensor]()

        def look(layer: int, streams: Float[Tensor, "prompt position d"]) -> None:
            norms.append(double(streams).norm(dim=-1))
            median.append(double(streams.float().abs().flatten(1).median(1).values))
            zero.append(double(streams[:, 0]))

        passing(model, tokens[some], look)
        report(len(some))
        at_0, again = torch.stack(zero, 1), streams_at(model, changed[some], 0)
        report(len(some))
        moved, size = (x.abs().amax(-1) for x in (again - at_0, again))
        found = {"norms": torch.stack(norms, 1), "median": torch.stack(median, 1), "zero": at_0}
        found["later"] = moved.where(moved > SAME * size, 0)
        arrays = {name: x.cpu().numpy() for name, x in found.items()}
        return [{name: x[n] for name, x in arrays.items()} for n in range(len(some))]

    def measured(numbers: Sequence[int]) -> list[Piece]:
        return retry(lambda: [piece for some in batches(numbers, model, length, kept) for piece in passed(some)])

    pieces = store.together("trajectory", count, measured, prompts_at_once(model, length, kept))
    norms, median, zero = (pieces.stacked(name) for name in ("norms", "median", "zero"))  # [prompt, layer, ...]
    if not np.isfinite(norms).all():
        raise not_finite(model, "residual streams")
    sizes, median = np.abs(zero), median.mean(0)
    limits = [np.maximum(least, medians * median)[:, None] for least, medians in RULES.values()]
    top = torch.from_numpy(sizes.mean(0)).topk(min(RANKS, model.spec.width), dim=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = top.values.numpy() / median[:, None]
    return {
        "later_difference": pieces.stacked("later").max(0),
        "norm_first": np.median(norms[:, :, 0], axis=0),
        "norm_others": np.median(norms[:, :, 1:], axis=(0, 2)),
        "massive": np.stack([(sizes > limit).sum(-1).mean(0) for limit in limits], -1),
        "top_dimension": top.indices.numpy(),
        "top_ratio": ratio,
    }


# ------------------------------------------------------------------------------------------- first tokens and their paths


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


def drawn_starts(model: View, tokens: Int[Tensor, "prompt position"], starts: int, seed: int) -> Int[Tensor, " start"]:
    """Drawn from the ids that occur in `tokens`, special ones left out; all of them where they are fewer."""
    if seed < 0:
        raise InputError(f"seed={seed} is negative; give 0 or more")
    ends = (getattr(model.tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "unk"))
    special = {*model.first_ids, *ends, *getattr(model.tokenizer, "all_special_ids", ())}
    pool = [token for token in tokens.unique().tolist() if token not in special]
    if min(starts, len(pool)) < 2:
        raise InputError(
            f"starts={starts} of {len(pool)} ids in the prompts cannot be compared; give 2 or more of both"
        )
    drawn = np.random.default_rng(seed).choice(pool, size=min(starts, len(pool)), replace=False)
    return torch.from_numpy(drawn).long()


def streams_at(model: View, tokens: Int[Tensor, "prompt position"], position: int) -> Float[Tensor, "prompt layer d"]:
    """Every layer's stream at one position in float64."""
    streams = list[Tensor]()
    passing(model, tokens, lambda _, passed: streams.append(double(passed[:, position])))
    return torch.stack(streams, 1)


def pair_cosines(streams: Float[Tensor, "start layer d"]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The pairs' mean cosine with its interval over starts, each [layer]."""
    directions = (streams / streams.norm(dim=-1, keepdim=True)).numpy()

    def mean(some: np.ndarray) -> np.ndarray:  # |sum of directions|^2 = n + n (n - 1) mean
        n = len(some)
        return (np.square(some.sum(0)).sum(-1) - n) / (n * (n - 1)) if n > 1 else np.full(some.shape[1], np.nan)

    value, low, high = (end.clip(-1, 1) for end in jackknife(mean, directions, np.arange(len(directions))))
    return value, low, high


# -------------------------------------------------------------------------------------------------------- what is shown

LARGEST = ("dimension", "/ median")
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
            numbers = [at.norm_first, at.norm_others, at.massive.sel(rule=MASSIVE), at.massive.sel(rule=MEDIANS)]
            numbers += [most.top_dimension, most.top_ratio]
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
            "norm."
        )
    return lines


# What stands at position 0, and where starts stand.
FIRSTS = {"bos": ("BOS", VERMILLION), "id": ("the prompts' one id", VERMILLION), "text": ("text", BLUE)}
STOOD = {PLACES[0]: ("at position 0", INK), PLACES[1]: ("at position 1, behind BOS", GREEN)}
COSINES = "Cosines: each token alone at its position; bands: 95 % over tokens."


def chart(results: Mapping[str, xr.Dataset]) -> Figure:
    """How the stream at position 0 grows, how soon different tokens become alike there, and which dimension carries it."""
    rows = [
        Panel("norm of the residual stream", _norms, note="Dashed: the same at other positions, median."),
        Panel("cosine of streams that started from different tokens", _cosines, share=True, note=COSINES),
        Panel("largest dimension at position 0, in medians of all", _largest),
    ]
    return panels(results, rows, "The last stream is what the final norm reads.")


def _norms(cell: Axes, ds: xr.Dataset) -> None:
    for first in map(str, ds["first"].values):
        (name, color), at, x = FIRSTS[first], ds.sel(first=first), ds["layer"]
        here = Series(f"at position 0: {name}", at["norm_first"], color, x=x)
        there = Series(f"elsewhere, {name} at 0", at["norm_others"], color, x=x, line=DASHED)
        curves(cell, [there, here], log=True, decades=None)
    _streams(cell, ds)


def _cosines(cell: Axes, ds: xr.Dataset) -> None:
    x = ds["layer"]
    for place in map(str, ds["place"].values):
        (name, color), at = STOOD[place], ds.sel(place=place)
        curves(cell, [Series(name, at["cosine"], color, at["cosine_low"], at["cosine_high"], x=x)])
    _streams(cell, ds)


def _largest(cell: Axes, ds: xr.Dataset) -> None:
    for first in map(str, ds["first"].values):
        (name, color), at = FIRSTS[first], ds.sel(first=first)
        curves(cell, [Series(name, at["top_ratio"].isel(rank=0), color, x=ds["layer"])], log=True, decades=None)
    level(cell, RULES[MASSIVE][1], "massive: 1,000 medians")
    _streams(cell, ds)


def _streams(cell: Axes, ds: xr.Dataset) -> None:
    block_axis(cell, ds["layer"].values, "block that reads the stream")


MEASURE = Measure(
    name="trajectory",
    question="What becomes of position 0, which sees only itself, through the blocks?",
    compute=trajectory,
    options=Options,
    headlines=(
        Headline(
            "norm at 0 / elsewhere, largest", lambda ds: (ds.norm_first / ds.norm_others).max("layer"), ratio=True
        ),
        Headline("massive dimensions at 0, most", lambda ds: ds.massive.sel(rule=list(RULES)).max("layer")),
        Headline("change at 0 by later text", lambda ds: ds.later_difference.max("layer")),
        Headline(
            "cosine of different tokens, last layer",
            lambda ds: with_interval(ds, "cosine").isel(layer=-1, drop=True),
            form=".3f",
        ),
    ),
    answer=answer,
    tables=rows,
    chart=chart,
    trials={"trajectory": partial(trajectory, starts=16)},
)
