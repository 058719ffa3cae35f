"""Position bias of in-context retrieval [Wu, section 5]: of two identical items, does the earlier or the later one count?

Models of some depth, mask, positional encoding and residual switch learn to name the label of a query's class from eight
pairs of an item and its label. They are trained on queries whose answer stands anywhere, or always at certain items. They
are then asked about classes they never saw, with two identical items of which one carries the right label: gap(a, b) =
accuracy where a is right minus accuracy where b is right. A positive gap of an earlier a and a later b is a bias toward the
earlier.

All models that can share a seed's data and fresh weights do; all models of one world share its test sequences. Models of
unbiased data are read by `sinks` as well [Wu, K.4].
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar, NamedTuple

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from probes.charts import BLUE, ORANGE, SKY, dots, sheet
from probes.errors import InputError
from probes.measures.sinks import TAU

from ... import checks
from ...model import initial
from ...tasks import Drawn, InContext
from ...train import Run, Trained
from ..experiment import Work
from ..in_context import ITEMS, accuracies, architecture_of, copied, generator_of, looked_at
from ..reading import learnt, places, ranged
from ..sweep import Cells, Measure, Part, sweep
from .statements import BLIND as BLIND
from .statements import DIMS, FIRST, LAST, MIDDLE, PAIRS, SCALES, STREAMS
from .statements import HEADLINES as HEADLINES
from .statements import claims as claims

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
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 1e-6
FIRST_CHECK = 100  # steps; the published program measures as often; ours lie ever further apart


MEASURES = {
    name: Measure(long_name, units, dims, np.float32)
    for name, long_name, units, dims in (
        ("gap", "accuracy gap", "1", ("pair",)),
        ("accuracy_by_position", "accuracy by the answer's item", "1", ("position",)),
        ("training_loss", "training loss since the step before", "nat", ("step",)),
        ("novel_accuracy", "accuracy on sequences of novel classes", "1", ()),
        ("course_novel", "accuracy on sequences of novel classes, during training", "1", ("step",)),
        ("course_copied", "share of answers that are a label of the context", "1", ("step",)),
        ("by_heart", "share of answers from training where the context has labels changed", "1", ()),
        ("over_tau", "share of the queries that see a key which give it more than tau", "1", ("layer", "key")),
        ("alpha", "mean weight over the queries from the key on", "1", ("layer", "key")),
        ("fresh", "over_tau before training, mean over blocks", "1", ("key",)),
    )
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
class Settings(checks.Settings):
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

    def __post_init__(self) -> None:
        super().__post_init__()
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
    decays = ("causal", "window")  # masks that a loss per token into the past goes with
    return [c for c in grid if (c.positional != "decay" or c.mask.startswith(decays)) and in_plan(c, settings)]


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
    return Run(architecture, task, seed=case.seed, learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY)


def check_steps(settings: Settings) -> list[int]:
    """Numbers of updates after which gaps are measured, evenly on a logarithmic axis; the last is the end of training."""
    first = min(FIRST_CHECK, settings.steps)
    if settings.checks == 1:
        return [settings.steps]
    return sorted({round(step) for step in np.geomspace(first, settings.steps, settings.checks).tolist()})


SMALL: Any = ((2,), ("none", "decay"), ("off",), ("unbiased", "first"), ("gaussian",), ("text",))
QUICK = Settings(*SMALL, seeds=2, steps=600, tests=2_000, checks=3, course_tests=1_000)


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
        "position": (("position",), np.arange(ITEMS), {"long_name": "item that holds the answer", "units": "1"}),
        "layer": np.arange(max(coords["depth"])),
        "step": (("step",), np.array(steps), {"long_name": "updates of the weights", "units": "1"}),
        "key": (("key",), np.arange(2 * ITEMS + 1), {"long_name": "position of the key", "units": "1"}),
    }
    return sweep(coords, Part(DIMS, MEASURES, _measured(s, steps, work)))


def _measured(s: Settings, steps: Sequence[int], work: Work) -> Cells:
    """Part by part, and in it world by world, since models of one world share its test sequences."""
    for name, part in parts(cases(s), work.device.type).items():
        runs = [run_of(case, s) for case in part]
        weights = tuple(initial(runs[0].architecture, 0))
        models = dict(zip(part, work.train(name, runs, s.steps, record=steps[:-1], recorded=weights), strict=True))
        for world in dict.fromkeys(case.world for case in part):
            yield from _tested(s, {case: model for case, model in models.items() if case.world == world}, steps, work)


def _tested(s: Settings, trained: Mapping[Case, Trained], steps: Sequence[int], work: Work) -> Cells:
    """Models of one world, the trained ones and those of every check before."""
    device, run = work.device, next(iter(trained.values())).run
    task: Any = replace(run.task, biased=None)  # pyright: ignore[reportCallIssue, reportArgumentType]
    world = task.world(run.seed, device)

    def drawn(kind: str, *number: int, at: tuple[int, ...] = ()) -> Drawn:
        """Sequences that depend on the world alone, not on how a model was trained."""
        return getattr(task, kind)(world, generator_of(device, kind, run.seed, *number), s.tests, *at)

    final = [(model.run.architecture, model.weights) for model in trained.values()]
    then = [[(of.run.architecture, of.recorded[step]) for of in trained.values()] for step in steps[:-1]] + [final]
    gap = np.zeros((len(trained), len(PAIRS)))
    for pair, ends in enumerate(PAIRS.values()):
        for order, (right, wrong) in enumerate((ends, ends[::-1])):
            gap[:, pair] += (1 - 2 * order) * accuracies(final, drawn("pairs", pair, order, at=(right, wrong)), device)
    single = np.stack([accuracies(final, drawn("single", at, at=(at,)), device) for at in range(ITEMS)], -1)
    unseen, known = drawn("novel"), drawn("relabelled")
    few = Drawn(unseen.inputs[:, : s.course_tests], unseen.hidden[:, : s.course_tests])
    learning = np.stack([(accuracies(of, few, device), copied(of, world, few, device)) for of in then], -1)
    novel, heart = accuracies(final, unseen, device), accuracies(final, known, device)
    for n, (case, model) in enumerate(trained.items()):
        losses = [float(model.losses[a:b].mean()) for a, b in zip([0, *steps], steps, strict=False)]
        values = (gap[n], single[n], losses, novel[n], *learning[:, n], heart[n])
        sinks = looked_at(model, s.tests, TAU, device) if case.training == "unbiased" else {}
        yield case, dict(zip(MEASURES, values, strict=False)) | sinks


def parts(grid: Sequence[Case], device: str) -> dict[str, list[Case]]:
    """What is trained in one call, by its name: on a CPU what shares its data, on a GPU everything of one depth."""
    by_name: dict[str, list[Case]] = {}
    for case in grid:
        data = "" if device == "cuda" else f" {case.scale} {case.data} seed {case.seed} {case.training}"
        by_name.setdefault(f"depth {case.depth}{data}", []).append(case)
    return by_name


# -- the figure

COLORS = dict(zip(PAIRS, (BLUE, ORANGE, SKY), strict=True))
ENCODINGS = {"none": "no encoding", "decay": "decay mask", "rope": "RoPE", "sinusoidal": "sinusoidal"}
PALE = 0.4
ROW, PANEL = 0.3, 3.6  # inches of a kind of models, and of a panel
GAPS = (
    "Accuracy where the earlier of two identical items is right, less that where the later is: above 0 the earlier decides; "
    "medians and ranges of seeds. Pale: has not learnt to retrieve. Models {}."
)


def charts(ds: xr.Dataset) -> dict[str, Figure]:
    """Gaps after unbiased training under a causal mask, under other masks, and after biased training.

    Of Gaussian data at the first scale, if there are any, and of the residual switch that more models have.
    """
    first, done = (of["gap"].isel(scale=0, data=0) for of in (ds, learnt(ds, ds["novel_accuracy"])))
    many = first.notnull().sum([dim for dim in first.dims if dim != "residual"])
    residual = str(ds["residual"].values[int(many.values.argmax())])
    dims, panels = ("training", "mask", "positional", "depth"), defaultdict(list)
    for of, here in places(first.sel(residual=residual), *dims):
        if here.notnull().any():
            kind = dict(zip(dims, of, strict=True))
            answers = f"answers {'anywhere' if kind['training'] == 'unbiased' else 'at certain items'}, causal mask"
            panels[answers if kind["mask"] == "causal" else "other masks"].append(kind)
    size = {"height": 0.7 + ROW * max(map(len, panels.values())), "width": PANEL * len(panels)}
    figure, (cells,) = sheet(1, len(panels), caption=GAPS.format(STREAMS[residual]), **size)
    for cell, (title, kinds) in zip(cells, panels.items(), strict=True):
        for pale, part in ((False, done), (True, first)):
            series = []
            for pair, color in COLORS.items():
                name = pair.replace("-", " against ") if cell is cells[-1] and not pale else ""
                runs = np.array([part.sel({"residual": residual, "pair": pair} | kind).values for kind in kinds])
                series.append(ranged(name, runs.T, color, alpha=PALE if pale else 1.0))
            dots(cell, [_kind(kind) for kind in kinds], series, limits=(-1.0, 1.0))
        cell.set_title(title, fontsize=9)
    return {"": figure}


def _kind(kind: Mapping[str, Any]) -> str:
    """A kind of models in words."""
    mask = "" if kind["mask"] == "causal" else f"{kind['mask'].replace('-', ' of ')} mask"
    answers = "" if kind["training"] == "unbiased" else f"answers {kind['training'].replace('-and-', ' or ')}"
    return ", ".join(filter(None, (mask, ENCODINGS[kind["positional"]], answers, f"{kind['depth']} blocks")))
