"""Position bias of in-context retrieval [Wu, section 5]: of two identical items, does the earlier or the later one count?

Models of some depth, mask, positional encoding and residual switch learn to name the label of a query's class from eight
pairs of an item and its label. They are trained on queries whose answer stands anywhere, or always at certain items. They
are then asked about classes they never saw, with two identical items of which one carries the right label: gap(a, b) =
accuracy where a is right minus accuracy where b is right. A positive gap of an earlier a and a later b is a bias toward the
earlier.

All models that can share a seed's data and fresh weights do; all models of one world share its test sequences. Models of
unbiased data are read by `sinks` as well [Wu, K.4].

Results add up: what the result in the folder holds of the same trainings stays, and only other models are trained.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import xarray as xr

from probes.errors import InputError
from probes.measures.sinks import TAU
from probes.results.dataset import load, made_with, stored

from ..checks import one_of
from ..model import Architecture, Mask, initial
from ..tasks import InContext
from ..train import Run, Trained
from .experiment import Work
from .in_context import PARTS, accuracies, first_of, novel_test, pair_tests, retrieved, single_tests
from .sinks import looked_at
from .sweep import Cells, Measure, Part, each_at_least, products, sweep

DECAY = -math.log(0.8)  # nats per token: what is one token further off weighs 0.8 times as much [Wu, section 5]
ITEMS = 8
FIRST, MIDDLE, LAST = 0, ITEMS // 2, ITEMS - 1  # "middle" is item n/2 counted from 0, as in the published program
PAIRS = {"first-middle": (FIRST, MIDDLE), "first-last": (FIRST, LAST), "middle-last": (MIDDLE, LAST)}
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
SCALES = ("text", "program")
FIRST_CHECK = 100  # steps; the published program measures as often; ours lie ever further apart
RESULT = "position-bias.nc"
DIMS = ("scale", "data", "depth", "mask", "positional", "residual", "training", "seed")
LISTS = ("scales", "data", "depths", "masks", "positional", "residual", "training")  # the settings of all but the last
MEASURES = {
    "accuracy": Measure("accuracy by which item is right", "1", ("pair", "order"), np.float32),
    "gap": Measure("accuracy gap", "1", ("pair",), np.float32),
    "accuracy_by_position": Measure("accuracy by the answer's item", "1", ("position",), np.float32),
    "course_accuracy": Measure(
        "accuracy by which item is right, during training", "1", ("pair", "order", "step"), np.float32
    ),
    "course_gap": Measure("accuracy gap during training", "1", ("pair", "step"), np.float32),
    "training_loss": Measure("training loss since the step before", "nat", ("step",), np.float32),
    "novel_accuracy": Measure("accuracy on sequences of novel classes", "1", (), np.float32),
    "course_novel": Measure("accuracy on sequences of novel classes, during training", "1", ("step",), np.float32),
    "course_copied": Measure("share of answers that are a label of the context", "1", ("step",), np.float32),
    "course_match": Measure(
        "weight of the last position on items with the right label, and on those labels",
        "1",
        ("layer", "part", "step"),
        np.float32,
    ),
    "by_heart": Measure("share of answers from training where the context has labels changed", "1", (), np.float32),
    "over_tau": Measure(
        "share of the queries that see a key which give it more than tau", "1", ("layer", "key"), np.float32
    ),
    "alpha": Measure("mean weight over the queries from the key on", "1", ("layer", "key"), np.float32),
    "fresh": Measure("over_tau before training, mean over blocks", "1", ("key",), np.float32),
    "pattern": Measure("attention of the first sequence, seed 0", "1", ("layer", "query", "key"), np.float32),
}
# What the settings' lists may hold.
ALLOWED = {"positional": POSITIONAL, "residual": RESIDUAL, "training": tuple(TRAINING), "data": DATA, "scales": SCALES}
# The contrasts of [Wu, section 5 and K.4]: each line is the product of these values and of the settings' lists where it
# names none. The main residual switch is the first of `residual`.
CAUSAL: dict[str, Sequence[Any]] = {"depth": (2,), "data": ("gaussian",), "mask": ("causal",), "residual": ("main",)}
CONTRASTS: tuple[dict[str, Sequence[Any]], ...] = (
    CAUSAL,
    CAUSAL | {"mask": ("full",), "training": ("unbiased", "first", "last")},
    CAUSAL
    | {
        "mask": ("window-5", "window-9", "window-13", "prefix-2", "prefix-4", "prefix-6"),
        "positional": ("none",),
        "training": ("unbiased",),
    },
    CAUSAL | {"residual": ("main", "other"), "training": ("unbiased",)},
    CAUSAL | {"depth": (4,), "training": ("unbiased",), "seed": (0, 1)},
    CAUSAL | {"data": ("fixed",), "positional": ("none", "rope"), "training": ("unbiased",)},
)
PLANS = ("product", "contrasts")
GRID = ("plan", "depths", "positional", "residual", "training", "data", "scales", "masks", "seeds")  # may grow


@dataclass(frozen=True)
class Settings:
    """The grid is the full product of the lists, or (`plan`) `CONTRASTS` alone; [Wu] has sinusoids on biased data alone.

    `masks`: causal, full, window-N, prefix-N (decay goes with causal and window-N alone). `seeds`, `steps`, `checks`: their
    number; a check measures gaps on `course_tests` sequences, the trained model's are of `tests`, for each pair and order.
    `tau`: the weight above which a query counts for a sink.
    """

    depths: tuple[int, ...] = (2, 4, 6)
    positional: tuple[str, ...] = POSITIONAL
    residual: tuple[str, ...] = RESIDUAL
    training: tuple[str, ...] = tuple(TRAINING)
    data: tuple[str, ...] = DATA
    scales: tuple[str, ...] = SCALES
    masks: tuple[str, ...] = ("causal", "full")
    plan: str = "product"
    seeds: int = 5
    steps: int = 100_000
    tests: int = 10_000
    checks: int = 10
    course_tests: int = 2_000
    width: int = 64
    batch: int = 128
    learning_rate: float = 1e-3
    weight_decay: float = 1e-6
    tau: float = TAU

    def __post_init__(self) -> None:
        for name, allowed in ALLOWED.items():
            for value in getattr(self, name):
                if value not in allowed:
                    raise InputError(f"{name}: '{value}' is unknown; give some of {', '.join(allowed)}")
        for name in ("depths", *ALLOWED, "masks"):
            given = getattr(self, name)
            if not given or len(set(given)) < len(given):
                raise InputError(f"{name}={','.join(map(str, given))} is no list of distinct values; give each once")
        one_of("plan", self.plan, PLANS)
        if not 0 < self.tau < 1:
            raise InputError(f"tau={self.tau} is no threshold of a weight; give a number between 0 and 1")
        each_at_least(self, 1, "seeds", "steps", "tests", "checks", "course_tests", "batch")
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


def axes_of(settings: Settings) -> dict[str, Any]:
    """The lists as axes."""
    lists = (*(getattr(settings, name) for name in LISTS), range(settings.seeds))
    return {dim: list(values) for dim, values in zip(DIMS, lists, strict=True)}


def cases(settings: Settings) -> list[Case]:
    """All models, in the order in which they are trained: what an interruption leaves is whole seeds of whole depths."""
    axes = axes_of(settings)
    order = ("scale", "data", "depth", "seed", "training", "mask", "positional", "residual")
    found = (Case(**dict(zip(order, values, strict=True))) for values in product(*(axes[dim] for dim in order)))
    return [case for case in found if in_grid(case) and in_plan(case, settings)]


def in_grid(case: Case) -> bool:
    """Whether a combination is trained at all."""
    return case.positional != "decay" or case.mask == "causal" or case.mask.startswith("window")


def in_plan(case: Case, settings: Settings) -> bool:
    """Whether a combination belongs to the settings' plan."""
    own = case._asdict() | {"residual": "main" if case.residual == settings.residual[0] else "other"}
    lines = CONTRASTS if settings.plan == "contrasts" else ({},)
    return any(all(own[dim] in values for dim, values in line.items()) for line in lines)


def before(settings: Settings, file: Path) -> xr.Dataset | None:
    """The result that is there, of the same trainings and tests.

    Raises:
        InputError: it was made with other settings than those of the grid.
    """
    if not stored(file).exists():
        return None
    ds = load(file)
    made = json.loads(ds.attrs["settings"])
    for name, value in asdict(settings).items():
        if name not in GRID and made.get(name) != value:
            raise InputError(
                f"'{file}' was made with {name}={made.get(name, '-')}, not {value}; give the same to add to it, "
                "another --out, or remove it"
            )
    return ds


def measured_in(ds: xr.Dataset) -> list[Case]:
    """The models of a result."""
    there = ds["gap"].transpose(*DIMS, "pair").notnull().all("pair")
    axes = [there[dim].values.tolist() for dim in DIMS]
    return [Case(*(axis[i] for axis, i in zip(axes, place, strict=True))) for place in np.argwhere(there.values)]


def commands(found: Iterable[Case], settings: Mapping[str, Any], like: str) -> str:
    """What trains these models, one command for each product of lists; they write to where the command `like` writes."""
    out = re.search(r" --out[ =]('[^']*'|[^\s;]+)", like)
    same = {
        name: value for name, value in settings.items() if name not in GRID and value != getattr(Settings, name, value)
    }
    told, in_order = [], sorted(found, key=lambda case: (case.seed, case))
    for lists in products(in_order):
        given = dict(zip((*LISTS, "seeds"), (*lists[:-1], (len(lists[-1]),)), strict=True))
        given |= {name: (value,) for name, value in same.items()}
        words = (f"--with {name.replace('_', '-')}={','.join(map(str, x))}" for name, x in given.items())
        told.append(f"headwater toy position-bias {' '.join(words)}{out[0] if out else ''}")
    return "; ".join(told) if like else ""


def switches_of(mask: str) -> dict[str, Any]:
    """The fields of `Architecture` that a mask's name stands for: causal, full, window-N or prefix-N.

    Raises:
        InputError: no such mask.
    """
    kind, _, number = mask.partition("-")
    numbered = kind in ("window", "prefix")
    if kind not in get_args(Mask) or numbered != number.isdecimal() or (number and not numbered):
        raise InputError(f"mask '{mask}' is unknown; give causal, full, window-N or prefix-N")
    return {"mask": kind} | ({kind: int(number)} if numbered else {})


def architecture_of(depth: int, mask: str, positional: Any, residual: str, width: int) -> Architecture:
    """The transformer of [Wu, section 5]: one head, no output projection, a ReLU head on the last position."""
    return Architecture(
        blocks=depth,
        width=width,
        length=2 * ITEMS + 1,
        vocabulary=None,
        outputs=InContext.labels,
        positional=positional,
        decay=DECAY if positional == "decay" else None,
        residual=residual == "on",
        output_projection=False,
        head="mlp",
        **switches_of(mask),
    )


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


def parts(found: Sequence[Case], device: str) -> list[list[Case]]:
    """What is trained in one call: on a CPU what shares its data, on a GPU everything of one depth."""
    by_key: dict[Any, list[Case]] = {}
    for case in found:
        fine = () if device == "cuda" else (case.scale, case.data, case.seed, case.training)
        by_key.setdefault((case.depth, *fine), []).append(case)
    return list(by_key.values())


def measure(settings: Settings, work: Work) -> xr.Dataset:
    """Train what the result in the folder has not, and test it; the models of both are in the new result.

    Returns:
        `accuracy [..., pair, order]`, `gap [..., pair]`, `accuracy_by_position [..., position]` of the trained models, over
        the dimensions of `DIMS` (NaN for what is not part of the grid); `course_accuracy [..., pair, order, step]`,
        `course_gap [..., pair, step]` and `training_loss [..., step]` (mean since the step before) over training;
        `novel_accuracy` and, over training, `course_novel`, `course_copied [..., step]`, `course_match [..., layer, part,
        step]`: `in_context.Retrieved` on sequences made as in training, of novel classes, unbiased whatever the training.
        `by_heart`: `tasks.InContext.relabelled`.
        Of models trained on unbiased data what `sinks.looked_at` gives.
    """
    steps, asked = check_steps(settings), cases(settings)
    old = before(settings, work.folder.with_name(RESULT))
    have = measured_in(old) if old is not None else []
    left = [case for case in asked if case not in have]
    if old is not None:
        there = len(asked) - len(left)
        file = work.folder.with_name(RESULT)
        work.told(f"'{file}' holds {there} of the {len(asked)} models asked for, and {len(have) - there} others")
    every = {*have, *asked}
    whole = settings if every == {*asked} or old is None else _union(json.loads(old.attrs["settings"]), settings)
    axes = {
        dim: [value for value in values if any(getattr(case, dim) == value for case in every)]
        for dim, values in axes_of(whole).items()
    }
    coords = axes | {
        "pair": list(PAIRS),
        "order": list(ORDERS),
        "position": (("position",), np.arange(ITEMS), {"long_name": "item that holds the answer", "units": "1"}),
        "layer": np.arange(max(axes["depth"])),
        "part": list(PARTS),
        "step": (("step",), np.array(steps), {"long_name": "updates of the weights", "units": "1"}),
        "query": np.arange(2 * ITEMS + 1),
        "key": (("key",), np.arange(2 * ITEMS + 1), {"long_name": "position of the key", "units": "1"}),
    }
    found = _measured(settings, left, steps, work)
    attrs: dict[str, Any] = {}
    if old is not None:
        found = chain(_kept(old, have), found)
        work.clock.spent += float(old.attrs["seconds"])
        if whole is not settings:  # one command does not make all of it
            attrs = {"settings": asdict(whole), "command": commands(every, vars(whole), str(made_with()["command"]))}
    return sweep(coords, Part(DIMS, MEASURES, found), attrs=attrs)


def _union(old: dict[str, Any], new: Settings) -> Settings:
    """Settings whose lists hold those of an earlier result as well."""
    lists: dict[str, Any] = {}
    for name in ("depths", "masks", *ALLOWED):
        both = dict.fromkeys([*old[name], *getattr(new, name)])
        lists[name] = tuple(both if name == "masks" else sorted(both, key=ALLOWED.get(name, sorted(both)).index))
    return replace(new, plan="product", seeds=max(old["seeds"], new.seeds), **lists)


def _kept(old: xr.Dataset, have: Sequence[Case]) -> Cells:
    """What an earlier result has of its models."""
    for case in have:
        one = old.sel(case._asdict())
        yield case, {name: one[name].transpose(*MEASURES[name].dims).values for name in MEASURES if name in one}


def _measured(s: Settings, found: Sequence[Case], steps: Sequence[int], work: Work) -> Cells:
    """World by world, since models of one world share its test sequences."""
    device = work.device
    for part, models in trained(s, found, steps, work):
        for world in dict.fromkeys(case.world for case in part):
            chosen = [(case, model) for case, model in zip(part, models, strict=True) if case.world == world]
            first, final = chosen[0][1].run, [(model.run.architecture, model.weights) for _, model in chosen]
            then = [[(one.run.architecture, one.recorded[step]) for _, one in chosen] for step in steps[:-1]]
            then.append(final)
            accuracy = np.empty((len(chosen), len(PAIRS), len(ORDERS)), np.float32)
            course = np.empty((*accuracy.shape, len(steps)), np.float32)
            for a, b, drawn in pair_tests(first, PAIRS.values(), s.tests, device):
                accuracy[:, a, b] = accuracies(final, drawn, device)
                some = first_of(drawn, s.course_tests)
                for n, models_then in enumerate(then):
                    course[:, a, b, n] = accuracies(models_then, some, device)
            single = np.stack(
                [accuracies(final, drawn, device) for _, drawn in single_tests(first, s.tests, device)], -1
            )
            classes, unseen, known = novel_test(first, s.tests, device)
            novel, heart = accuracies(final, unseen, device), accuracies(final, known, device)
            told = [retrieved(one, classes, first_of(unseen, s.course_tests), device) for one in then]
            for n, (case, model) in enumerate(chosen):
                losses = [float(model.losses[a:b].mean()) for a, b in zip([0, *steps], steps, strict=False)]
                gaps = accuracy[n, :, 0] - accuracy[n, :, 1], course[n, :, 0] - course[n, :, 1]
                learning = [np.stack([values[n] for values in one], -1) for one in zip(*told, strict=True)]
                values = (accuracy[n], gaps[0], single[n], course[n], gaps[1], losses, novel[n], *learning, heart[n])
                sinks = looked_at(model, s.tests, s.tau, device) if case.training == "unbiased" else {}
                yield case, dict(zip(MEASURES, values, strict=False)) | sinks


def trained(
    settings: Settings, found: Sequence[Case], steps: Sequence[int], work: Work
) -> Iterator[tuple[list[Case], list[Trained]]]:
    """Part by part; one bar of progress for each (scale, data, depth)."""
    device = work.device.type

    def bar(case: Case) -> str:
        return f"depth {case.depth}" if device == "cuda" else f"{case.scale} scale, {case.data}, depth {case.depth}"

    totals, done = Counter(map(bar, found)), Counter[str]()
    for part in parts(found, device):
        first, label = part[0], bar(part[0])
        runs = [run_of(case, settings) for case in part]

        def advance(_: str, now: float, __: float, label: str = label) -> None:
            work.advance(label, done[label] * settings.steps + now, float(totals[label] * settings.steps))

        name = f"depth {first.depth}"
        if device != "cuda":
            name += f" {first.scale} {first.data} seed {first.seed} {first.training}"
        weights = tuple(initial(runs[0].architecture, 0))
        models = replace(work, advance=advance).train(name, runs, settings.steps, record=steps[:-1], recorded=weights)
        done[label] += len(part)
        yield part, models
