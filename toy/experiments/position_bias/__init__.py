"""Position bias of in-context retrieval [Wu, section 5]: of two identical items, does the earlier or the later one count?

Models of some depth, mask, positional encoding and residual switch learn to name the label of a query's class from eight
pairs of an item and its label. They are trained on queries whose answer stands anywhere, or always at certain items. They
are then asked about classes they never saw, with two identical items of which one carries the right label: gap(a, b) =
accuracy where a is right minus accuracy where b is right. A positive gap of an earlier a and a later b is a bias toward the
earlier.

All models that can share a seed's data and fresh weights do; all models of one world share its test sequences. Models of
unbiased data are read by `sinks` as well [Wu, K.4].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar, NamedTuple

import numpy as np
import xarray as xr

from probes.errors import InputError
from probes.measures.sinks import TAU

from ...model import initial
from ...tasks import InContext
from ...train import Run, Trained
from .. import settings
from ..experiment import Work
from ..in_context import (
    ITEMS,
    PARTS,
    accuracies,
    architecture_of,
    first_of,
    looked_at,
    novel_test,
    pair_tests,
    retrieved,
    single_tests,
)
from ..sweep import Cells, Measure, Part, sweep
from .chart import charts as charts
from .statements import BLIND as BLIND
from .statements import DIMS, FIRST, LAST, MIDDLE, PAIRS, SCALES
from .statements import claims as claims
from .statements import tables as tables

ORDERS = ("earlier", "later")  # which of the two is right
TRAINING: dict[str, tuple[int, ...] | None] = {
    "unbiased": None,
    "first": (FIRST,),
    "middle": (MIDDLE,),
    "last": (LAST,),
    "first-and-last": (FIRST, LAST),
}
POSITIONAL = ("none", "decay", "rope", "sinusoidal")
RESIDUAL = ("off", "on")
DATA = ("gaussian", "fixed")
FIRST_CHECK = 100  # steps; the published program measures as often; ours lie ever further apart


def _variable(long_name: str, *dims: str, units: str = "1") -> Measure:
    return Measure(long_name, units, dims, np.float32)


MEASURES = {
    "accuracy": _variable("accuracy by which item is right", "pair", "order"),
    "gap": _variable("accuracy gap", "pair"),
    "accuracy_by_position": _variable("accuracy by the answer's item", "position"),
    "course_accuracy": _variable("accuracy by which item is right, during training", "pair", "order", "step"),
    "course_gap": _variable("accuracy gap during training", "pair", "step"),
    "training_loss": _variable("training loss since the step before", "step", units="nat"),
    "novel_accuracy": _variable("accuracy on sequences of novel classes"),
    "course_novel": _variable("accuracy on sequences of novel classes, during training", "step"),
    "course_copied": _variable("share of answers that are a label of the context", "step"),
    "course_match": _variable(
        "weight of the last position on items with the right label, and on those labels", "layer", "part", "step"
    ),
    "by_heart": _variable("share of answers from training where the context has labels changed"),
    "over_tau": _variable("share of the queries that see a key which give it more than tau", "layer", "key"),
    "alpha": _variable("mean weight over the queries from the key on", "layer", "key"),
    "fresh": _variable("over_tau before training, mean over blocks", "key"),
    "pattern": _variable("attention of the first sequence, seed 0", "layer", "query", "key"),
}
# What the settings' lists may hold.
ALLOWED = {"positional": POSITIONAL, "residual": RESIDUAL, "training": tuple(TRAINING), "data": DATA, "scales": SCALES}
ALLOWED |= {"plan": ("product", "contrasts")}
# The contrasts of [Wu, section 5 and K.4]: each line is the product of these values and of the settings' lists where it
# names none. The main residual switch is the first of `residual`.
CAUSAL: dict[str, Sequence[Any]] = {"depth": (2,), "data": ("gaussian",), "mask": ("causal",), "residual": ("main",)}
OTHER_MASKS = ("window-5", "window-9", "window-13", "prefix-2", "prefix-4", "prefix-6")
CONTRASTS: tuple[dict[str, Sequence[Any]], ...] = (
    CAUSAL,
    CAUSAL | {"mask": ("full",), "training": ("unbiased", "first", "last")},
    CAUSAL | {"mask": OTHER_MASKS, "positional": ("none",), "training": ("unbiased",)},
    CAUSAL | {"residual": ("main", "other"), "training": ("unbiased",)},
    CAUSAL | {"depth": (4,), "training": ("unbiased",), "seed": (0, 1)},
    CAUSAL | {"data": ("fixed",), "positional": ("none", "rope"), "training": ("unbiased",)},
)


@dataclass(frozen=True)
class Settings(settings.Settings):
    """The grid is the full product of the lists, or (`plan`) `CONTRASTS` alone; [Wu] has sinusoids on biased data alone."""

    CHOICES: ClassVar = ALLOWED
    depths: tuple[int, ...] = (2, 4, 6)
    positional: tuple[str, ...] = POSITIONAL
    residual: tuple[str, ...] = RESIDUAL
    training: tuple[str, ...] = tuple(TRAINING)
    data: tuple[str, ...] = DATA
    scales: tuple[str, ...] = SCALES  # of the vectors: 1/sqrt(d) as in the paper's text, 1/d as in its program
    masks: tuple[str, ...] = ("causal", "full")  # window-N and prefix-N, too; decay goes with causal and window-N alone
    plan: str = "product"
    seeds: int = 5
    steps: int = 100_000
    tests: int = 10_000  # sequences of the trained model's gaps, for each pair and order
    checks: int = 10  # during training
    course_tests: int = 2_000  # sequences of a check
    width: int = 64
    batch: int = 128
    learning_rate: float = 1e-3
    weight_decay: float = 1e-6
    tau: float = TAU  # the weight above which a query counts for a sink

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.tau < 1:
            raise InputError(f"tau={self.tau} is no threshold of a weight; give a number between 0 and 1")
        if not cases(self):
            raise InputError(
                "nothing is left of the grid: decay goes with masks causal and window-N alone, and plan=contrasts has "
                "combinations of its own; give other lists"
            )
        for case in cases(self):
            if case.seed == 0:
                run_of(case, self)  # raises what cannot be


class Case(NamedTuple):
    """One model of the grid; its fields, in order, are the leading dimensions of the result."""

    scale: str
    data: str
    depth: int
    mask: str
    positional: str
    residual: str
    training: str
    seed: int

    @property
    def world(self) -> tuple[str, str, int]:
        """Of what test sequences are made."""
        return self.scale, self.data, self.seed


def axes_of(s: Settings) -> dict[str, list[Any]]:
    """The settings' lists as axes, in the order of `DIMS`."""
    lists = (s.scales, s.data, s.depths, s.masks, s.positional, s.residual, s.training, range(s.seeds))
    return {dim: list(values) for dim, values in zip(DIMS, lists, strict=True)}


def cases(settings: Settings) -> list[Case]:
    """All models, in the order in which they are trained: what an interruption leaves is whole seeds of whole depths."""
    axes = axes_of(settings)
    order = ("scale", "data", "depth", "seed", "training", "mask", "positional", "residual")
    grid = (Case(**dict(zip(order, values, strict=True))) for values in product(*(axes[dim] for dim in order)))
    return [case for case in grid if in_grid(case) and in_plan(case, settings)]


def in_grid(case: Case) -> bool:
    """Whether a combination is trained at all."""
    return case.positional != "decay" or case.mask == "causal" or case.mask.startswith("window")


def in_plan(case: Case, settings: Settings) -> bool:
    """Whether a combination belongs to the settings' plan."""
    values = case._asdict() | {"residual": "main" if case.residual == settings.residual[0] else "other"}
    lines = CONTRASTS if settings.plan == "contrasts" else ({},)
    return any(all(values[dim] in line[dim] for dim in line) for line in lines)


def run_of(case: Case, settings: Settings) -> Run:
    """A model of the grid and its training."""
    drawn: Any = {"scale": case.scale, "data": case.data, "biased": TRAINING[case.training]}
    task = InContext(items=ITEMS, width=settings.width, batch=settings.batch, **drawn)
    architecture = architecture_of(case.depth, case.mask, case.positional, case.residual, settings.width)
    rates: Any = {"learning_rate": settings.learning_rate, "weight_decay": settings.weight_decay}
    return Run(architecture, task, seed=case.seed, **rates)


def check_steps(settings: Settings) -> list[int]:
    """Numbers of updates after which gaps are measured, evenly on a logarithmic axis; the last is the end of training."""
    first = min(FIRST_CHECK, settings.steps)
    if settings.checks == 1:
        return [settings.steps]
    return sorted({round(step) for step in np.geomspace(first, settings.steps, settings.checks).tolist()})


QUICK = Settings(
    depths=(2,),
    positional=("none", "decay"),
    residual=("off",),
    training=("unbiased", "first"),
    data=("gaussian",),
    scales=("text",),
    seeds=2,
    steps=600,
    tests=2_000,
    checks=3,
    course_tests=1_000,
)


def measure(s: Settings, work: Work) -> xr.Dataset:
    """Train and test every model of the grid; models of unbiased data are looked at for sinks.

    NaN is what is not part of the grid. What stands for learning is measured on sequences made as in training, of novel
    classes, unbiased whatever the training.
    """
    steps, grid = check_steps(s), cases(s)
    coords: dict[str, Any] = {
        dim: [value for value in values if any(getattr(case, dim) == value for case in grid)]
        for dim, values in axes_of(s).items()
    }
    coords |= {
        "pair": list(PAIRS),
        "order": list(ORDERS),
        "position": (("position",), np.arange(ITEMS), {"long_name": "item that holds the answer", "units": "1"}),
        "layer": np.arange(max(coords["depth"])),
        "part": list(PARTS),
        "step": (("step",), np.array(steps), {"long_name": "updates of the weights", "units": "1"}),
        "query": np.arange(2 * ITEMS + 1),
        "key": (("key",), np.arange(2 * ITEMS + 1), {"long_name": "position of the key", "units": "1"}),
    }
    return sweep(coords, Part(DIMS, MEASURES, _measured(s, steps, work)))


def _measured(s: Settings, steps: Sequence[int], work: Work) -> Cells:
    """World by world, since models of one world share its test sequences."""
    for part, models in trained(s, steps, work):
        for world in dict.fromkeys(case.world for case in part):
            chosen = [(case, model) for case, model in zip(part, models, strict=True) if case.world == world]
            yield from _tested(s, [case for case, _ in chosen], [model for _, model in chosen], steps, work)


def _tested(s: Settings, grid: list[Case], trained: list[Trained], steps: Sequence[int], work: Work) -> Cells:
    """Models of one world, the trained ones and those of every check before."""
    device, run = work.device, trained[0].run
    final = [(model.run.architecture, model.weights) for model in trained]
    then = [[(model.run.architecture, model.recorded[step]) for model in trained] for step in steps[:-1]] + [final]
    accuracy = np.empty((len(grid), len(PAIRS), len(ORDERS)), np.float32)
    course = np.empty((*accuracy.shape, len(steps)), np.float32)
    for a, b, drawn in pair_tests(run, PAIRS.values(), s.tests, device):
        accuracy[:, a, b] = accuracies(final, drawn, device)
        few = first_of(drawn, s.course_tests)
        course[:, a, b] = np.stack([accuracies(models, few, device) for models in then], -1)
    single = np.stack([accuracies(final, drawn, device) for _, drawn in single_tests(run, s.tests, device)], -1)
    classes, unseen, known = novel_test(run, s.tests, device)
    novel, heart = accuracies(final, unseen, device), accuracies(final, known, device)
    by_step = [retrieved(models, classes, first_of(unseen, s.course_tests), device) for models in then]
    for n, (case, model) in enumerate(zip(grid, trained, strict=True)):
        losses = [float(model.losses[a:b].mean()) for a, b in zip([0, *steps], steps, strict=False)]
        gaps = accuracy[n, :, 0] - accuracy[n, :, 1], course[n, :, 0] - course[n, :, 1]
        learning = [np.stack([values[n] for values in kind], -1) for kind in zip(*by_step, strict=True)]
        values = (accuracy[n], gaps[0], single[n], course[n], gaps[1], losses, novel[n], *learning, heart[n])
        sinks = looked_at(model, s.tests, s.tau, device) if case.training == "unbiased" else {}
        yield case, dict(zip(MEASURES, values, strict=False)) | sinks


def parts(grid: Sequence[Case], device: str) -> dict[str, list[Case]]:
    """What is trained in one call, by its name: on a CPU what shares its data, on a GPU everything of one depth."""
    by_name: dict[str, list[Case]] = {}
    for case in grid:
        data = "" if device == "cuda" else f" {case.scale} {case.data} seed {case.seed} {case.training}"
        by_name.setdefault(f"depth {case.depth}{data}", []).append(case)
    return by_name


def trained(s: Settings, steps: Sequence[int], work: Work) -> Iterator[tuple[list[Case], list[Trained]]]:
    """Part by part, with the weights of every check."""
    grid, done = cases(s), 0.0
    for name, part in parts(grid, work.device.type).items():
        runs = [run_of(case, s) for case in part]

        def advance(_: str, now: float, __: float, before: float = done) -> None:
            work.advance("models", before + now, float(len(grid) * s.steps))

        weights = tuple(initial(runs[0].architecture, 0))
        models = replace(work, advance=advance).train(name, runs, s.steps, record=steps[:-1], recorded=weights)
        done += float(len(part) * s.steps)
        yield part, models
