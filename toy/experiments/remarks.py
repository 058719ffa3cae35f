"""Two remarks of [Liu-4] that the post leaves untried, on its previous-token task (`docs/probes/match.md`).

With a distance readout either kernel can do the task at width 1 (tests/test_toy_remarks.py has the weights): what training
finds is another question. For rates by frequency the post gives no rule. Everything else is the main variant of
`previous_token`: no residual stream, an output projection.
"""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import xarray as xr
from jaxtyping import Float
from matplotlib.figure import Figure

from probes.charts import CYCLE, dots, sheet
from probes.claims.claim import Claim
from probes.claims.ledger import Source
from probes.claims.rules import Told, above, below, near, some
from probes.measure import Headline
from probes.results.curves import spearman

from .. import checks
from ..model import Kernel
from ..tasks import Copying
from ..train import Run, Trained
from . import previous_token
from .copied import evaluated, scored
from .experiment import Work
from .reading import WELCH, courses, each, judge, label, learnt, need, places, ranged, setting, together, versus
from .sweep import Measure, Part, axes, filled, sweep


class Case(NamedTuple):
    """A model's width, the axes that positions are added to (None: all), and its kernels."""

    width: int
    position_width: int | None = None
    kernel: Kernel = "inner"
    readout: Kernel = "inner"


CASES = {
    "width 1": Case(1),
    "width 1 with distance attention": Case(1, None, "distance"),
    "width 1 with distance readout": Case(1, None, "inner", "distance"),
    "width 1 with both by distance": Case(1, None, "distance", "distance"),
    "width 2": Case(2),
    "width 2 with positions on 1 axis": Case(2, 1),
    "width 2 with positions on 1 axis and distance attention": Case(2, 1, "distance"),
    "width 10": Case(10),
    "width 10 with positions on 1 axis": Case(10, 1),
    "width 10 with positions on 1 axis and distance attention": Case(10, 1, "distance"),
}


@dataclass(frozen=True)
class Settings(checks.Settings):
    """The post's sizes and learning rates; cases, exponents and seeds are ours."""

    LEAST: ClassVar = {"vocabulary": 3, "share_vocabulary": 3, "context": 3}
    CHOICES: ClassVar = {"case": tuple(CASES)}
    case: tuple[str, ...] = tuple(CASES)
    learning_rate: tuple[float, ...] = (0.01, 0.1)
    vocabulary: int = 30
    steps: int = 3000
    by_share: tuple[float, ...] = (-0.5, 0.0, 0.5)
    share_vocabulary: int = 100
    share_steps: int = 10_000
    context: int = 4
    seeds: int = 5
    batch: int = 128
    test: int = 16_384  # fresh sequences


QUICK = Settings(seeds=2, steps=800, share_vocabulary=30, share_steps=1500, test=4096)


def measure(s: Settings, work: Work) -> xr.Dataset:
    """Train models of every case, and models whose tokens have unequal shares with rates by those shares."""
    coords = axes(s, "case", "learning_rate", "by_share", "seed")
    cells = list(product(s.case, s.learning_rate, range(s.seeds)))
    trained = work.train("cases", [_run(s, CASES[case], rate, seed) for case, rate, seed in cells], s.steps)
    relative = {"relative": Measure(f"(perplexity - 1) / V after {s.steps} steps")}
    found = filled(cells, relative=evaluated(trained, s.test)[0])
    return sweep(coords, Part(("case", "learning_rate", "seed"), relative, found), _shares(s, work))


def _shares(s: Settings, work: Work) -> Part:
    cells = list(product(s.by_share, s.learning_rate, range(s.seeds)))
    plain = [_run(s, CASES["width 2"], rate, seed, vocabulary=s.share_vocabulary) for _, rate, seed in cells]
    runs = [
        replace(run, task=replace(cast(Copying, run.task), zipf=1.0), by_share=power)
        for run, (power, *_) in zip(plain, cells, strict=True)
    ]
    trained = work.train("shares", runs, s.share_steps)
    even = [replace(model, run=run) for model, run in zip(trained, plain, strict=True)]
    (drawn, picked), (alike, _) = (scored(models, s.test) for models in (trained, even))
    measures = {
        "share_loss": Measure("loss on sequences of tokens with unequal shares", "nat"),
        "even_loss": Measure("loss on sequences of tokens with equal shares", "nat"),
        "picked": Measure("share of right answers among the tokens of the sequence"),
        "length_rank": Measure("Spearman's correlation of share and distance from the mean embedding"),
    }
    lengths = [length_rank(model) for model in trained]
    losses = {"share_loss": drawn.mean(1), "even_loss": alike.mean(1)}
    found = filled(cells, picked=picked.mean(1), length_rank=lengths, **losses)
    return Part(("by_share", "learning_rate", "seed"), measures, found)


def _run(s: Settings, case: Case, rate: float, seed: int, **fields: Any) -> Run:
    usual = previous_token.Settings(vocabulary=s.vocabulary, context=s.context, batch=s.batch)
    run = previous_token.run_of(usual, seed, width=case.width, learning_rate=rate, **fields)
    return replace(run, architecture=replace(run.architecture, **case._asdict()))


def length_rank(model: Trained) -> float:
    """Spearman's correlation over tokens of the share with the distance from the mean embedding."""
    task: Any = model.run.task
    rows: Float[np.ndarray, "token axis"] = model.weights["embedding"].double().numpy()
    return spearman(task.shares.double().numpy(), np.linalg.norm(rows - rows.mean(0), axis=1))


# -- what a result says

PERPLEXITY = Headline("perplexity", lambda ds: 1 + setting(ds, "vocabulary") * ds["relative"])
HEADLINES = (
    PERPLEXITY,
    Headline("loss, nats", lambda ds: ds["share_loss"], form=".3f"),
    Headline("loss, all tokens alike", lambda ds: ds["even_loss"], form=".3f"),
    Headline("right of its own tokens", lambda ds: ds["picked"], form=".3f"),
    Headline("rank correlation of share and length", lambda ds: ds["length_rank"], form=".3f"),
)
LEAST = 1e-12  # of a relative perplexity that is drawn
CAPTION = f"Medians of {{}} seeds and their range, on fresh sequences; perplexities are cut off at {LEAST:g} above 1."


def charts(ds: xr.Dataset) -> dict[str, Figure]:
    """(perplexity - 1) / V of every case, and losses against the power of a token's share; a colour per learning rate."""
    figure, (cells,) = sheet(1, 2, height=4.2, caption=CAPTION.format(ds.sizes["seed"]))
    relative = places(ds["relative"].clip(LEAST).transpose("seed", ...), "learning_rate")
    cases = [
        ranged(label("rate", rate), of, color, marker="o")
        for ((rate,), of), color in zip(relative, CYCLE, strict=False)
    ]
    dots(cells[0], [str(name) for name in ds["case"].values], cases, zero=False)
    cells[0].set(xscale="log", xlabel="(perplexity - 1) / V")
    for name, words, line in (("share_loss", "as drawn", "-"), ("even_loss", "all tokens alike", ":")):
        names = {rate: f"rate {rate:g}, {words}" for rate in ds["learning_rate"].values.tolist()}
        courses(cells[1], ds[name], "by_share", "learning_rate", names, line=line, marker="o")
    cells[1].set(xlabel="power of the share", ylabel="loss (nats)", xticks=ds["by_share"].values)
    cells[1].set_ylim(bottom=0)
    return {"": figure}


# -- statements

liu: Any = Source("[Liu-4]", "liu4-remarks")
POST, SHARED = (30, 4), (100, 4)  # vocabulary and context of the post's main variant, and of tokens with unequal shares
AXIS = "In the previous-token task positions along one axis suffice (V = 30, C = 4)"
NEAR_1 = (
    "at some learning rate the 95 % interval over runs of the perplexity lies within a quarter of 1, at widths 2 and 10"
)
ON_AXIS = [f"width {width} with positions on 1 axis" for width in (2, 10)]
UNEQUAL = "In the previous-token task with tokens drawn by shares of 1 / rank (V = 100, C = 4, width 2)"
DIFFERS = (
    "Spearman's correlation of a token's share and its embedding's distance from the mean embedding differs from 0, by the "
    "95 % interval over runs, at every learning rate"
)
BETTER = (
    "for some power of the share and some learning rate, the loss is below that with one rate for all at the same learning "
    f"rate, {WELCH}"
)


def claims(ds: xr.Dataset) -> list[Claim]:
    """The statements, judged by toys that know the order of their tokens."""
    return judge(liu, ds, learnt(ds, ds["picked"]))


def suffices(ds: xr.Dataset, cases: list[str]) -> Told:
    """The task is done in all of these cases, at the better of the learning rates."""
    need((setting(ds, "vocabulary"), setting(ds, "context")) == POST)
    parts = {}
    for (name,), of in places(PERPLEXITY.of(ds).sel(case=cases), "case"):
        rates = {label("rate", rate): each(runs, near, 1.0) for (rate,), runs in places(of, "learning_rate")}
        parts[name] = together(rates, some)
    return together(parts)


_distance = [f"{case} and distance attention" for case in ON_AXIS]
_chosen = f"{AXIS} if the attention kernel is chosen appropriately: by distances."
liu("one-axis", "", _chosen, rule=NEAR_1, cases=_distance)(suffices)
_usual = f"{AXIS} with the usual inner product, too."
liu("one-axis-inner", "", _usual, rule=NEAR_1, kind="ours", cases=ON_AXIS)(suffices)


def _of_shares(ds: xr.Dataset, name: str) -> xr.DataArray:
    """Without the rates at which toys of some power failed."""
    need((setting(ds, "share_vocabulary"), setting(ds, "context")) == SHARED)
    return ds[name].dropna("learning_rate", how="any")


@liu("lengths", "", f"{UNEQUAL} tokens of different frequency have embeddings of different length.", rule=DIFFERS)
def _(ds: xr.Dataset) -> Told:
    """Frequent tokens lie further out than rare ones, or less far."""
    by_rate = places(_of_shares(ds, "length_rank").sel(by_share=0.0), "learning_rate")
    sides = {label("rate", rate): (each(of, above, 0, form="+.2f"), each(of, below, 0)) for (rate,), of in by_rate}
    return together({rate: (words, some([more, less])) for rate, ((words, more), (_, less)) in sides.items()})


def follows(ds: xr.Dataset) -> Told:
    """Some power of the share does better than none."""
    losses = _of_shares(ds, "share_loss")
    powers = {label("power", power): of for (power,), of in places(losses, "by_share") if power}
    one_rate = losses.sel(by_share=0.0)
    parts = {
        f"{power}, {label('rate', rate)}": versus(of, one_rate.sel(learning_rate=rate), below, 0)
        for power, runs in powers.items()
        for (rate,), of in places(runs, "learning_rate")
    }
    return together(parts, some)


_rates = f"{UNEQUAL} learning rates that follow the tokens' frequency do better than one rate for all"
liu("rates", "", f"{_rates}.", rule=BETTER)(follows)
