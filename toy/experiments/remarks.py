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

from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple, cast

import numpy as np
import xarray as xr
from jaxtyping import Float

from probes.errors import InputError
from probes.results.curves import spearman

from ..model import Kernel
from ..tasks import Copying
from ..train import Run, Trained
from . import previous_token
from .experiment import Work
from .previous_token import picked, relative_perplexity
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
