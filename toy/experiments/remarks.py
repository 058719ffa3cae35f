"""Two remarks of [Liu-4] that the post leaves untried, on its previous-token task.

- "Ideally, a 1D positional embedding should suffice if the attention kernel is chosen appropriately." Models whose positions
  lie along one axis of the stream, and models of width 1, with attention by inner products or by distances
  (`model.Architecture`: `kernel`, `readout`). At width 1 a linear readout can name two tokens at most, the outermost ones; a
  distance readout can name them all. With it either kernel can do the task (tests/test_toy_remarks.py has the weights):
  what training finds is another question.
- Tokens of different frequency may need different learning rates. Tokens are drawn with shares of 1 / rank, and the rate of
  a token's rows in embedding and unembedding is multiplied by its share, over the mean share, to a power: 0 is the usual
  training, above 0 rare tokens learn more slowly, below 0 faster. The post gives no rule.

Everything else is the main variant of `previous_token`: no residual stream, an output projection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple, cast

import numpy as np
import xarray as xr
from jaxtyping import Float
from matplotlib.figure import Figure

from probes.charts import CYCLE, curves, dots, sheet
from probes.claims.claim import Claim
from probes.claims.ledger import Source
from probes.claims.rules import SURE, Test, above, below, every, near, range_told, some
from probes.errors import InputError
from probes.results.curves import spearman
from probes.results.statistics import between_runs, over_runs
from probes.results.tables import Table

from ..model import Kernel
from ..tasks import Copying
from ..train import Run, Trained
from . import previous_token
from .experiment import Work
from .learnt import in_order
from .previous_token import picked, relative_perplexity
from .rules import Judged, at, judged, need, over_told, places, ranged, setting, variable
from .sweep import Measure, Part, each, each_at_least, each_distinct, sweep


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
class Settings:
    """The post's sizes and learning rates; cases, exponents and seeds are ours."""

    case: tuple[str, ...] = tuple(CASES)
    learning_rate: tuple[float, ...] = (0.01, 0.1)
    vocabulary: int = 30
    steps: int = 3000
    by_share: tuple[float, ...] = (-0.5, 0.0, 0.5)
    zipf: float = 1.0
    share_vocabulary: int = 100
    share_steps: int = 10_000
    context: int = 4
    seeds: int = 5
    batch: int = 128
    test: int = 16_384  # fresh sequences

    def __post_init__(self) -> None:
        each_distinct(self, "case", "learning_rate", "by_share")
        each_at_least(self, 1, "steps", "share_steps", "seeds", "batch", "test")
        each_at_least(self, 3, "vocabulary", "share_vocabulary", "context")
        for name in self.case:
            if name not in CASES:
                raise InputError(f"case '{name}' is unknown; give some of: {'; '.join(CASES)}")


QUICK = Settings(seeds=2, steps=800, share_vocabulary=30, share_steps=1500, test=4096)


def measure(settings: Settings, work: Work) -> xr.Dataset:
    """Train all models.

    Returns:
        `relative [case, learning_rate, seed]`: (perplexity - 1) / V on fresh sequences. With tokens of unequal shares, over
        `[by_share, learning_rate, seed]`: `share_loss` on sequences drawn as in training, `even_loss` on sequences in which
        all tokens are as frequent, in nats; `picked` on the former (`previous_token.picked`); `length_rank`, Spearman's
        correlation of a token's share with the distance of its embedding from the mean one.
    """
    s = settings
    coords = {"case": list(s.case), "learning_rate": list(s.learning_rate), "by_share": list(s.by_share)}
    return sweep(coords | {"seed": list(range(s.seeds))}, _cases(s, work), _shares(s, work))


def _cases(s: Settings, work: Work) -> Part:
    cells = list(product(s.case, s.learning_rate, range(s.seeds)))
    trained = work.train("cases", [_run(s, CASES[case], rate, seed) for case, rate, seed in cells], s.steps)
    measures = {"relative": Measure(f"(perplexity - 1) / V after {s.steps} steps")}
    return Part(("case", "learning_rate", "seed"), measures, each(cells, relative=relative_perplexity(trained, s.test)))


def _shares(s: Settings, work: Work) -> Part:
    cells = list(product(s.by_share, s.learning_rate, range(s.seeds)))
    plain = [_run(s, Case(2), rate, seed, vocabulary=s.share_vocabulary) for _, rate, seed in cells]
    runs = [
        replace(run, task=replace(cast(Copying, run.task), zipf=s.zipf), by_share=power)
        for run, (power, *_) in zip(plain, cells, strict=True)
    ]
    trained = work.train("shares", runs, s.share_steps)
    even = [replace(model, run=run) for model, run in zip(trained, plain, strict=True)]
    losses = [np.log1p(s.share_vocabulary * relative_perplexity(models, s.test)) for models in (trained, even)]
    measures = {
        "share_loss": Measure("loss on sequences of tokens with unequal shares", "nat"),
        "even_loss": Measure("loss on sequences of tokens with equal shares", "nat"),
        "picked": Measure("share of right answers among the tokens of the sequence"),
        "length_rank": Measure("Spearman's correlation of share and distance from the mean embedding"),
    }
    lengths = [length_rank(model) for model in trained]
    right = picked(trained, s.test)
    found = each(cells, share_loss=losses[0], even_loss=losses[1], picked=right, length_rank=lengths)
    return Part(("by_share", "learning_rate", "seed"), measures, found)


def _run(s: Settings, case: Case, rate: float, seed: int, **given: Any) -> Run:
    usual = previous_token.Settings(vocabulary=s.vocabulary, context=s.context, batch=s.batch)
    run = previous_token.run_of(usual, seed, width=case.width, learning_rate=rate, **given)
    special = case._asdict() | {"width": case.width}
    return replace(run, architecture=replace(run.architecture, **special))


def length_rank(model: Trained) -> float:
    """Spearman's correlation over tokens of the share with the distance from the mean embedding."""
    task: Any = model.run.task
    rows: Float[np.ndarray, "token axis"] = model.weights["embedding"].double().numpy()
    return spearman(task.shares.double().numpy(), np.linalg.norm(rows - rows.mean(0), axis=1))


# -- what a result says

SHARES = {
    "share_loss": "loss, nats",
    "even_loss": "loss, all tokens alike",
    "picked": "right of its own tokens",
    "length_rank": "rank correlation of share and length",
}


def tables(ds: xr.Dataset) -> list[Table]:
    """Perplexity by case, losses by exponent: medians over seeds with their range."""
    rates = [f"rate {rate:g}" for rate in ds["learning_rate"].values]
    perplexity = 1 + setting(ds, "vocabulary") * ds["relative"]
    rows = [
        [name, *(range_told(x) for _, x in places(of, "learning_rate"))] for (name,), of in places(perplexity, "case")
    ]
    names = [name for name in SHARES if name in ds]
    shares = [
        [f"{power:g}", f"{rate:g}", *(range_told(of[name], ".3f") for name in names)]
        for (power, rate), of in places(ds[names], "by_share", "learning_rate")
    ]
    columns = ("power of the share", "rate", *(SHARES[name] for name in names))
    return [
        Table("Perplexity: median over seeds (range)", ("model", *rates), rows),
        Table("Learning rate by a token's share: median over seeds (range)", columns, shares),
    ]


CAPTION = "Medians of {} seeds and their range, on fresh sequences; perplexities are cut off at {:g} above 1."
LEAST = 1e-12  # of a relative perplexity


def charts(ds: xr.Dataset) -> dict[str, Figure]:
    """(perplexity - 1) / V of every case, and losses against the power of a token's share; a colour per learning rate."""
    figure, (cells,) = sheet(1, 2, height=4.2, caption=CAPTION.format(ds.sizes["seed"], LEAST))
    rates = dict(zip(ds["learning_rate"].values.tolist(), CYCLE, strict=False))
    relative = ds["relative"].clip(LEAST).transpose("seed", ...)
    cases = [
        ranged(f"rate {rate:g}", relative.sel(learning_rate=rate), color, marker="o") for rate, color in rates.items()
    ]
    dots(cells[0], [str(name) for name in ds["case"].values], cases, zero=False)
    cells[0].set(xscale="log", xlabel="(perplexity - 1) / V")
    losses = [
        ranged(f"rate {rate:g}, {words}", ds[name].sel(learning_rate=rate).transpose("seed", ...), color, line=line)
        for (name, words, line) in (("share_loss", "as drawn", "-"), ("even_loss", "all tokens alike", ":"))
        for rate, color in rates.items()
    ]
    curves(cells[1], [replace(loss, x=ds["by_share"].values, marker="o") for loss in losses])
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
LENGTHS = f"{UNEQUAL} tokens of different frequency have embeddings of different length."
RATES = f"{UNEQUAL} learning rates that follow the tokens' frequency do better than one rate for all"
DIFFERS = (
    "Spearman's correlation of a token's share and its embedding's distance from the mean embedding differs from 0, by the "
    "95 % interval over runs, at every learning rate"
)
BETTER = (
    "for some power of the share and some learning rate, the loss is below that with one rate for all at the same learning "
    "rate, by the 95 % interval of Welch's t over runs"
)


def claims(ds: xr.Dataset) -> list[Claim]:
    """The statements, judged by toys that know the order of their tokens."""
    return judged(liu, ds, **in_order(ds))


@liu(
    "one-axis",
    "",
    f"{AXIS} if the attention kernel is chosen appropriately: by distances.",
    rule=NEAR_1,
    cases=[f"{x} and distance attention" for x in ON_AXIS],
)
@liu("one-axis-inner", "", f"{AXIS} with the usual inner product, too.", rule=NEAR_1, kind="ours", cases=ON_AXIS)
def suffices(ds: xr.Dataset, cases: list[str]) -> Judged:
    """The task is done in all of these cases, at the better of the learning rates."""
    need((setting(ds, "vocabulary"), setting(ds, "context")) == POST)
    words, tests = [], []
    for (name,), of in places(1 + POST[0] * variable(ds, "relative", case=cases), "case"):
        by_rate = [(rate, runs) for (rate,), runs in places(of, "learning_rate")]
        words.append(f"{name}: " + ", ".join(f"{over_told(runs)} at rate {rate:g}" for rate, runs in by_rate))
        tests.append(some([near(over_runs(runs.values), 1.0) for _, runs in by_rate]))
    return Judged("; ".join(words), every(tests)(SURE))


@liu("lengths", "", LENGTHS, rule=DIFFERS)
def lengths(ds: xr.Dataset) -> Judged:
    """Frequent tokens lie further out than rare ones, or less far."""
    words, tests = [], []
    for (rate,), of in places(_shares_of(ds, "length_rank").sel(by_share=0.0), "learning_rate"):
        words.append(f"{over_told(of, '+.2f')} at rate {rate:g}")
        tests.append(some([above(over_runs(of.values), 0), below(over_runs(of.values), 0)]))
    return Judged("; ".join(words), every(tests)(SURE))


EVEN = f"the same of the loss on sequences of tokens with equal shares: {BETTER}"


@liu("rates", "", f"{RATES}.", rule=BETTER, loss="share_loss")
@liu("rates-even", "", f"{RATES} where all tokens count alike.", rule=EVEN, kind="ours", loss="even_loss")
def rates(ds: xr.Dataset, loss: str) -> Judged:
    """Some power of the share does better than none."""
    words: list[str] = []
    tests: list[Test] = []
    for (rate,), of in places(_shares_of(ds, loss), "learning_rate"):
        by_power = [(power, runs) for (power,), runs in places(of, "by_share")]
        shown = ", ".join(f"power {power:g}: {over_told(runs, '.3f')}" for power, runs in by_power)
        words.append(f"rate {rate:g}: {shown}")
        equal = of.sel(by_share=0.0).values
        tests += [below(between_runs(runs.values, equal), 0) for power, runs in by_power if not math.isclose(power, 0)]
    need(tests)
    return Judged(f"{'; '.join(words)} nats", some(tests)(SURE))


def _shares_of(ds: xr.Dataset, name: str) -> xr.DataArray:
    need((setting(ds, "share_vocabulary"), setting(ds, "context")) == SHARED)
    values = variable(ds, name).dropna("learning_rate", how="any")  # rates at which toys of some power failed
    need(values.size)
    return at(values, by_share=[0.0, *np.setdiff1d(ds["by_share"].values, 0.0)])
