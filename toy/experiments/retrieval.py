"""Loss of retrieving the token at one position, against that position [Liu-7].

Ten random tokens, and a model of its own for each position k that is trained to predict the k-th of them behind the last
one; no positional encoding, one causal head. What a model cannot know shows as a loss that stays up: the post's curves are
single runs, here each point has several seeds.

Who has converged (`STILL`, `rounds`) stands in `docs/probes/match.md`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, ClassVar, cast

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from probes.charts import BLUE, GREEN, VERMILLION, Series, curves, level, sheet
from probes.claims.claim import Claim
from probes.claims.ledger import Source
from probes.errors import InputError, plural
from probes.measure import Headline
from probes.results.curves import ESTIMATE, spearman
from probes.results.statistics import one_more, over_runs

from .. import checks
from ..model import Architecture, AttentionSwitch
from ..tasks import Copying
from ..train import Run
from . import reading as read
from .copied import bag, scored
from .experiment import Work
from .sweep import Measure, Part, axes, filled, sweep

PARTS = 20  # of a training, whose losses' means tell whether it has converged
STILL = 0.05  # nats; what a loss that has converged does not fall by in the last quarter of the training
TEST_SEED = 2**32  # of the fresh sequences; runs have smaller ones
RATE = 1e-2  # in the beginning
SIZE = 10  # of the vocabulary and of the context
KIND = ("layers", "width", "residual", "feed_forward")
DIMS = (*KIND, "seed", "target")


@dataclass(frozen=True)
class Settings(checks.Settings):
    """The published setting: ten tokens of ten, depths 1 to 3, widths 2 and 10.

    "Trained to convergence", says the post, and neither optimizer nor steps: Adam here, batch 128, a rate that falls along
    half a cosine. Five seeds stand where the post has one run.
    """

    LEAST: ClassVar = {"target": 0, "rounds": 0, "steps": PARTS}
    layers: tuple[int, ...] = (1, 2, 3)
    width: tuple[int, ...] = (2, 10)
    residual: tuple[bool, ...] = (False, True)
    feed_forward: tuple[bool, ...] = (False, True)
    seeds: int = 5
    target: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
    steps: int = 5000
    rounds: int = 2  # of training anew those that have not converged, with twice the steps each time
    batch: int = 128
    attention: str = "softmax"  # or sigmoid, relu: what becomes of the lost middle where weights do not sum to 1
    sequences: int = 16_384  # fresh ones for the final loss; its standard error is then 0.006 nats at most

    def __post_init__(self) -> None:
        super().__post_init__()
        if (k := max(self.target)) >= SIZE:
            raise InputError(f"target {k} is no position of {SIZE}; give from 0 to {SIZE - 1}")
        self.runs()  # architectures refuse what cannot be

    def cells(self) -> list[Any]:
        """All models, as values of `DIMS`."""
        return list(product(self.layers, self.width, self.residual, self.feed_forward, range(self.seeds), self.target))

    def runs(self) -> list[Run]:
        """The training of every cell."""
        sizes: Any = {"length": SIZE, "vocabulary": SIZE, "outputs": SIZE}
        sizes["attention"] = cast(AttentionSwitch, self.attention)
        return [
            Run(
                Architecture(blocks=layers, width=width, residual=residual, feed_forward=feed_forward, **sizes),
                Copying(SIZE, SIZE, target, self.batch),
                seed=seed,
                learning_rate=RATE,
                schedule="cosine",
            )
            for layers, width, residual, feed_forward, seed, target in self.cells()
        ]


QUICK = Settings((1, 2), (2, 10), (False,), (False,), 2, (0, 1, 4, 8, 9), steps=1500, rounds=0, sequences=4096)


def measure(s: Settings, work: Work) -> xr.Dataset:
    """Train every model of the grid and give its loss on fresh sequences, which are the same for all models."""
    runs = s.runs()
    values = trained_once(runs, s.steps, s, work)
    values |= {"loss_first": values["loss"].copy(), "trained": np.full(len(runs), s.steps)}
    for times in (2**n for n in range(1, s.rounds + 1)):
        if not (still := np.flatnonzero(values["fall"] > STILL)).size:
            break
        again = trained_once([runs[i] for i in still.tolist()], s.steps * times, s, work, f" {times} times")
        values["trained"][still] = s.steps * times
        for name in ("loss", "loss_error", "fall"):
            values[name][still] = again[name]
    readers = limits(SIZE, SIZE)
    single = np.float32
    measures = {
        "loss": Measure("loss on fresh sequences", "nat", dtype=single),
        "loss_error": Measure("standard error of the loss", "nat", dtype=single),
        "loss_first": Measure("loss on fresh sequences after the first training", "nat", dtype=single),
        "fall": Measure("fall of the training loss in the last quarter of the last training", "nat", dtype=single),
        "trained": Measure("steps of the last training", dtype=np.int32),
    }
    of_readers = [((reader,), {"limit": [least[k] for k in s.target]}) for reader, least in readers.items()]
    return sweep(
        axes(s, *DIMS) | {"reader": list(readers)},
        Part(DIMS, measures, filled(s.cells(), **values)),
        Part(("reader",), {"limit": Measure("least loss of a reader of this kind", "nat", ("target",))}, of_readers),
    )


def trained_once(runs: Sequence[Run], steps: int, s: Settings, work: Work, label: str = "") -> dict[str, np.ndarray]:
    """Train every run for so many steps: its loss with the standard error, and what it falls by in the last quarter."""
    models = work.train(f"retrieval{label}", runs, steps)
    losses, _ = scored(models, s.sequences, seed=TEST_SEED)
    parts = [model.losses.tensor_split(PARTS) for model in models]
    fall = np.array([float(of[-1 - PARTS // 4].mean() - of[-1].mean()) for of in parts])
    return {"loss": losses.mean(1), "loss_error": losses.std(1) / math.sqrt(s.sequences), "fall": fall}


def limits(vocabulary: int, context: int) -> dict[str, list[float]]:
    """Least losses in nats by target, of readers who know the sequence but for something.

    "nothing": has not seen it, `ln V`. "bag and last": sees which tokens stand before the last one and how often, not
    where, and that one apart; one causal layer without positional encoding knows no more, of whatever width.
    """
    return {
        "nothing": [math.log(vocabulary)] * context,
        "bag and last": [bag(vocabulary, context - 1)] * (context - 1) + [0.0],
    }


# -- what a result says

# Read off [Liu-7]'s figures, by `KIND`: loss by target, ten of ten tokens.
PUBLISHED: dict[tuple[int, int, int, int], tuple[float, ...]] = {
    (1, 2, 0, 0): (2.19, 2.19, 2.19, 2.19, 2.19, 2.19, 2.19, 2.19, 2.19, 0.00),
    (2, 2, 0, 0): (1.13, 2.06, 2.15, 2.18, 2.19, 2.19, 2.19, 2.19, 2.19, 0.00),
    (2, 10, 0, 0): (0.00, 1.65, 1.88, 1.97, 1.95, 1.95, 1.98, 2.00, 1.96, 0.00),
    (3, 2, 0, 0): (0.03, 2.05, 2.23, 2.25, 2.24, 2.25, 2.25, 2.24, 2.24, 1.64),
    (3, 10, 0, 0): (0.00, 1.56, 1.91, 2.00, 2.00, 2.05, 2.09, 2.11, 2.20, 1.62),
    (3, 10, 1, 0): (0.00, 0.06, 0.95, 1.22, 1.68, 1.71, 1.78, 1.56, 0.55, 0.00),
    (3, 10, 1, 1): (0.00, 0.05, 0.14, 0.29, 0.32, 1.51, 0.92, 0.04, 0.00, 0.00),
}
AGREES = 0.05  # nats; what can be read off a figure: a published value is known that well
WIDEST = math.log(SIZE) / 2  # nats; half of what a reader who knows nothing loses: more holds nearly all curves
NORMAL = 1.96  # standard errors to either end of a 95 % interval over sequences
BREAKS = 0.1  # nats; what a plateau that is broken falls by at least: some five times what its targets differ by


def softmax(ds: xr.Dataset) -> bool:
    """Whether a result's models have softmax attention, as those of the source do."""
    return read.setting(ds, "attention", "softmax") == "softmax"


def published(ds: xr.Dataset) -> xr.DataArray:
    """The published curves [*KIND, target], NaN where there is none; a `KeyError` for other attention."""
    read.need(softmax(ds))
    values = xr.full_like(ds["loss"].isel(seed=0, drop=True), np.nan, float)
    for kind, _ in read.places(values.isel(target=0), *KIND):
        if kind in PUBLISHED:
            values.loc[dict(zip(KIND, kind, strict=True))] = np.array(PUBLISHED[kind])[ds["target"].values]
    return values


def roughness(loss: xr.DataArray, shared: bool = False) -> xr.DataArray:
    """The mean size of second differences over k between the first token and the last, nats, of losses [..., seed, target].

    `shared`: counted with the sign that the mean of the other seeds has; what is scatter of the seeds averages out.
    """
    read.need(loss.sizes["target"] == SIZE)
    bends = loss.sortby("target").isel(target=slice(1, -1)).diff("target", 2)
    return (bends * np.sign(bends.sum("seed") - bends)).mean("target") if shared else abs(bends).mean("target")


def of_targets(ds: xr.Dataset, run: bool) -> xr.DataArray:
    """At how many targets the published value is that of the median, or could be that of one more `run`."""
    off = ds["loss"] - published(ds)
    given: Any = {"input_core_dims": [["seed"]], "output_core_dims": [[], []], "vectorize": True}
    ends = partial(xr.apply_ufunc, lambda runs: one_more(over_runs(runs))[1:3], off, **given)
    least, most = ends() if run else [off.median("seed")] * 2
    return ((least <= AGREES) & (most >= -AGREES)).sum("target").where(off.notnull().any(("seed", "target")))


LOSS = Headline("loss, nats", lambda ds: ds["loss"].sortby("target"), form=".2f")
HEADLINES = (
    *(LOSS, Headline("least loss of a reader who knows", lambda ds: ds["limit"].sortby("target"), form=".3f")),
    Headline("models trained on", lambda ds: (ds["trained"] > read.setting(ds, "steps")).sum("target"), form=".0f"),
    Headline("models whose loss still falls", lambda ds: (ds["fall"] > STILL).sum("target"), form=".0f"),
    Headline("change of the loss by longer training", lambda ds: (ds["loss"] - ds["loss_first"]).mean("target")),
    Headline("roughness of a run", lambda ds: roughness(ds["loss"]), form=".2f"),
    Headline("of which seeds share", lambda ds: roughness(ds["loss"], shared=True), form=".2f"),
    Headline(f"targets within {AGREES:g} of the published, by the median", partial(of_targets, run=False)),
    Headline("by one more run's prediction interval", partial(of_targets, run=True)),
)


COLORS = {1: VERMILLION, 2: BLUE, 3: GREEN}
CAPTION = "Loss by position: medians of {} seeds on fresh sequences, and their range. Rings: single runs of [Liu-7]."


def charts(ds: xr.Dataset) -> dict[str, Figure]:
    """Loss against the position asked for, a panel for every width without residual stream and with all there is."""
    ends = {tuple(int(ds[dim][end]) for dim in KIND[2:]) for end in (0, -1)}
    shown = list(product(ds["width"].values.tolist()[:2], sorted(ends)))
    figure, cells = sheet(-(-len(shown) // 2), min(2, len(shown)), caption=CAPTION.format(ds.sizes["seed"]))
    curve: Any = read.known(published, ds)
    for cell, (width, (residual, feed_forward)) in zip(cells.flat, shown, strict=False):
        at = {"width": width, "residual": residual, "feed_forward": feed_forward}
        names = {n: plural(n, "layer") for n in ds["layers"].values.tolist()}
        colors = [COLORS.get(n, BLUE) for n in names]
        read.courses(cell, LOSS.of(ds).sel(at), "target", "layers", names, colors=colors, marker="o")
        for n, color in zip(names, colors, strict=True) if curve is not None else ():
            ring = cast(Any, curve).sel(at | {"layers": n})
            curves(cell, [Series("", ring, color, x=ring["target"], line="", marker="o", filled=False)])
        for reader, words in (("nothing", "knows nothing"), ("bag and last", "blind to order")):
            level(cell, float(ds["limit"].sel(reader=reader).max()), words)
        cell.set(
            xlabel="position asked for", ylabel="loss (nats)", ylim=(-0.08, max(2.5, 1.06 * float(ds["limit"].max())))
        )
        parts = [f"{'no ' * (not on)}{part}" for part, on in (("residual", residual), ("feed-forward", feed_forward))]
        cell.set_title(f"width {width}, {', '.join(parts)}", fontsize=9)
    return {"": figure}


# -- statements

liu: Any = Source("[Liu-7]", "liu7-retrieval")
TASK = "In the retrieval task (token k of 10)"
DEEP = {"layers": 3, "width": 10}
PLAIN, STREAM, BOTH = ({"residual": r, "feed_forward": f} for r, f in ((0, 0), (1, 0), (1, 1)))


def claims(ds: xr.Dataset) -> list[Claim]:
    """Statements of [Liu-7] about its curves; of other attention than softmax it says nothing."""
    return read.judge(liu, ds if softmax(ds) else ds.drop_vars("loss"))


def before_last(ds: xr.Dataset) -> xr.DataArray:
    """Losses at the targets before the last position, rising."""
    rising = np.sort(ds["target"][ds["target"] < SIZE - 1])
    read.need(rising.size > 1)
    return ds["loss"].sel(target=rising)


def between_ends(ds: xr.Dataset) -> xr.DataArray:
    """Those behind the first of them."""
    return before_last(ds).isel(target=slice(1, None))


def beyond_blind(ds: xr.Dataset) -> xr.DataArray:
    """What every model loses beyond the best reader blind to order, with intervals over sequences [..., estimate]."""
    loss = before_last(ds) - ds["limit"].sel(reader="bag and last").max()
    reach = NORMAL * ds["loss_error"].sel(target=loss["target"])
    return xr.concat([loss, loss - reach, loss + reach], xr.Variable("estimate", list(ESTIMATE)))


def off_published(ds: xr.Dataset) -> xr.DataArray:
    """Losses less the published ones at every k: of the first training, since what trains on loses the published peaks."""
    return (ds["loss_first"] - published(ds)).sel(target=list(range(SIZE)))


def with_k(ds: xr.Dataset) -> xr.DataArray:
    """Spearman's correlation of the loss and k, of the tokens before the last."""
    loss = before_last(ds)
    ranked = partial(spearman, loss["target"].values.astype(float))
    return xr.apply_ufunc(ranked, loss, input_core_dims=[["target"]], vectorize=True)


def lost(ds: xr.Dataset) -> xr.DataArray:
    """The least loss between first and last, less those of the first and the last [..., target]."""
    return between_ends(ds).min("target") - ds["loss"].sel(target=[0, SIZE - 1])


BEYOND = Headline("a model's loss, k <= 8, less that of the best reader blind to order", beyond_blind)
OFF = Headline("the loss of the first training less the published one at every k", off_published)
SEES = Headline(
    "the loss at k = 0 less that of the best reader blind to order",
    lambda ds: (ds["loss"] - ds["limit"].sel(reader="bag and last")).sel(target=0, drop=True),
)
FIRST = Headline(
    "the least loss after k = 0 and before the last less that at k = 0",
    lambda ds: between_ends(ds).min("target") - ds["loss"].sel(target=0, drop=True),
)
GROWS = Headline("the rank correlation of loss and k before the last", with_k)
LOST = Headline("the least loss between first and last token less that of either", lost)
MIDDLE = Headline("the mean loss between first and last token", lambda ds: between_ends(ds).mean("target"))
SHARED = Headline(
    "the mean size of second differences over k, with the sign that the other seeds' mean has,",
    lambda ds: roughness(ds["loss"], shared=True),
)

_claim = (
    "In the retrieval task (which token stands at position k of 10) 1 layer without positional encoding cannot tell apart "
    "the tokens before the last, so it cannot retrieve any k <= 8."
)
_blind = read.lies(BEYOND, read.over(-AGREES), {"layers": 1}, by="by 95 % intervals over sequences")
read.state(liu, "one-layer-blind", _claim, _blind, kind="theorem")
for (_depth, _width, *_switches), _curve in PUBLISHED.items():
    _number = ", ".join(f"{loss:.2f}" for loss in _curve)
    _named = [name for name, on in zip(("residual", "feed-forward"), _switches, strict=True) if on]
    _parts = [f"a {name.replace('residual', 'residual stream')}" for name in _named]
    _models = f"{plural(_depth, 'layer')} of width {_width}"
    _models += f" with {' and '.join(_parts)}" * bool(_parts) + (" have" if _depth > 1 else " has")
    _id, _claim = "-".join([f"depth-{_depth}-width-{_width}", *_named]), f"{TASK} {_models} the published loss over k."
    _at: Any = dict(zip(KIND, (_depth, _width, *_switches), strict=True))
    _agrees = read.lies(OFF, read.as_drawn(0, AGREES, WIDEST), _at, read.ONE_RUN)
    read.state(liu, _id, _claim, _agrees, published=f"{_number} nats")
_at = {"layers": 2} | PLAIN
_two, _easier = f"{TASK} 2 layers of width 2 and 10", "the first and the last token are easier than any between."
_claim = f"{_two} differ in kind from 1 layer: they tell positions apart (k = 0)."
read.state(liu, "two-layers-see-order", _claim, read.lies(SEES, read.under(0), _at))
_claim = f"{_two} find the first token the easiest of those before the last, and their loss grows with k."
read.state(liu, "primacy", _claim, read.lies((FIRST, GROWS), read.over(0), _at))
read.state(liu, "lost-in-the-middle", f"{_two} are lost in the middle: {_easier}", read.lies(LOST, read.over(0), _at))
_claim = f"{TASK} 3 layers of width 2 and 10 are lost in the middle as 2 are: {_easier}"
read.state(liu, "three-layers-lost-in-the-middle", _claim, read.lies(LOST, read.over(0), _at | {"layers": 3}))
_claim = f"{TASK} residual streams, then a feed-forward, break the plateau of the loss over k (3 layers, width 10)."
_falls = [read.change(MIDDLE, *sides) for sides in ((PLAIN, STREAM), (STREAM, BOTH))]
_broken = [read.lies(fall, read.under(-BREAKS), DEEP) for fall in _falls]
read.state(liu, "plateau-broken", _claim, *_broken)
_claim = f"{TASK} residual streams and a feed-forward give the curve of loss over k spikes where it had a plateau"
read.state(liu, "spiky", f"{_claim} (3 layers, width 10).", read.grows(SHARED, [PLAIN, BOTH], DEEP))
