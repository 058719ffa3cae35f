"""Position bias of in-context retrieval [Wu, section 5]: of two identical items, is the earlier believed or the later?

Models of some depth, mask, positional encoding and residual switch learn to name the label of a query's class from eight
pairs of an item and its label. They are trained on queries whose answer stands anywhere, or always at certain items, and
asked about classes they never saw, with two identical items of which one carries the right label: gap(a, b) = accuracy
where a is right minus accuracy where b is right. A positive gap of an earlier a and a later b is a bias toward the earlier.

Data of a seed and its fresh weights are the same for all models that can share them, test sequences for all of one world.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from probes.claims.claim import Claim, Kind, Statement, Verdict
from probes.claims.rules import SURE, Test, above, below, every, nothing, some
from probes.errors import InputError
from probes.results.dataset import dataset
from probes.results.gate import TRAINED, Learnt, blind_reader, learnt
from probes.results.statistics import Interval, over_runs
from probes.results.tables import Table, number

from ..model import Architecture, Mask, Switches, forward, initial
from ..tasks import Drawn, InContext
from ..train import Run, Trained, stacked
from .experiment import Work, each_above, over_each, over_told

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
FIRST_CHECK = (
    100  # steps; how often the published program measures, and the first of ours, which lie ever further apart
)
CHUNK = {"cpu": 1 << 19, "cuda": 1 << 28}  # numbers in a stream of a test pass: what fits the cache, or the memory
FEWEST = 3  # seeds from which on an interval by Student's t says something (that of two is 13 times their range)
DIMS = ("scale", "data", "depth", "mask", "positional", "residual", "training", "seed")


@dataclass(frozen=True)
class Settings:
    """The grid is the full product of the lists; "sinusoidal" is trained on biased data alone, as published.

    `masks`: causal, full, window-N, prefix-N (decay goes with causal and window-N alone). `seeds`, `steps`, `checks`: their
    number; a check measures gaps on `course_tests` sequences, the trained model's are of `tests`, for each pair and order.
    """

    depths: tuple[int, ...] = (2, 4, 6)
    positional: tuple[str, ...] = POSITIONAL
    residual: tuple[str, ...] = RESIDUAL
    training: tuple[str, ...] = tuple(TRAINING)
    data: tuple[str, ...] = DATA
    scales: tuple[str, ...] = SCALES
    masks: tuple[str, ...] = ("causal",)
    seeds: int = 5
    steps: int = 100_000
    tests: int = 10_000
    checks: int = 10
    course_tests: int = 2_000
    width: int = 64
    batch: int = 128
    learning_rate: float = 1e-3
    weight_decay: float = 1e-6

    def __post_init__(self) -> None:
        for name, allowed in (
            ("positional", POSITIONAL),
            ("residual", RESIDUAL),
            ("training", tuple(TRAINING)),
            ("data", DATA),
            ("scales", SCALES),
        ):
            for value in getattr(self, name):
                if value not in allowed:
                    raise InputError(f"{name}: '{value}' is unknown; give some of {', '.join(allowed)}")
        for name in ("depths", "positional", "residual", "training", "data", "scales", "masks"):
            given = getattr(self, name)
            if not given or len(set(given)) < len(given):
                raise InputError(f"{name}={','.join(map(str, given))} is no list of distinct values; give each once")
        for name in ("seeds", "steps", "tests", "checks", "course_tests", "batch"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} is too few; give at least 1")
        if not cases(self):
            raise InputError(
                "nothing is left of the grid: sinusoidal goes with biased training alone, decay with masks causal and "
                "window-N alone; give another positional"
            )
        for case in cases(self):
            if case.seed == 0:
                run_of(case, self)  # raises what cannot be


@dataclass(frozen=True)
class Case:
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


def cases(settings: Settings) -> list[Case]:
    """All models, in the order in which they are trained: what an interruption leaves is whole seeds of whole depths."""
    s = settings
    found = [
        Case(scale, data, depth, mask, positional, residual, training, seed)
        for scale, data, depth, seed, training, mask, positional, residual in product(
            s.scales, s.data, s.depths, range(s.seeds), s.training, s.masks, s.positional, s.residual
        )
    ]
    return [case for case in found if in_grid(case)]


def in_grid(case: Case) -> bool:
    """Whether a combination is trained at all."""
    if case.positional == "sinusoidal" and case.training == "unbiased":
        return False  # it was published for biased data alone
    return case.positional != "decay" or case.mask == "causal" or case.mask.startswith("window")


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
    scale: Any = case.scale
    data: Any = case.data
    task = InContext(
        items=ITEMS,
        width=settings.width,
        scale=scale,
        data=data,
        biased=TRAINING[case.training],
        batch=settings.batch,
    )
    architecture = architecture_of(case.depth, case.mask, case.positional, case.residual, settings.width)
    return Run(
        architecture,
        task,
        seed=case.seed,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
    )


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

    def key(case: Case) -> tuple[Any, ...]:
        fine = () if device == "cuda" else (case.scale, case.data, case.seed, case.training)
        return (case.depth, *fine)

    by_key: dict[Any, list[Case]] = {}
    for case in found:
        by_key.setdefault(key(case), []).append(case)
    return list(by_key.values())


def measure(settings: Settings, work: Work) -> xr.Dataset:
    """Train the grid and test it.

    Returns:
        `accuracy [..., pair, order]`, `gap [..., pair]`, `accuracy_by_position [..., position]` of the trained models, over
        the dimensions of `DIMS` (NaN for what is not part of the grid); `course_accuracy [..., pair, order, step]`,
        `course_gap [..., pair, step]` and `training_loss [..., step]` (mean since the step before) over training.
    """
    s, steps, found = settings, check_steps(settings), cases(settings)
    coords: dict[str, Any] = {
        "scale": s.scales,
        "data": s.data,
        "depth": s.depths,
        "mask": s.masks,
        "positional": s.positional,
        "residual": s.residual,
        "training": s.training,
        "seed": tuple(range(s.seeds)),
    }
    grid = tuple(len(coords[dim]) for dim in DIMS)
    accuracy = np.full((*grid, len(PAIRS), 2), np.nan, np.float32)
    course = np.full((*grid, len(PAIRS), 2, len(steps)), np.nan, np.float32)
    single = np.full((*grid, ITEMS), np.nan, np.float32)
    losses = np.full((*grid, len(steps)), np.nan, np.float32)

    for part, models in trained(settings, found, steps, work):
        places = [tuple(coords[dim].index(getattr(case, dim)) for dim in DIMS) for case in part]
        for place, model in zip(places, models, strict=True):
            losses[place] = [float(model.losses[a:b].mean()) for a, b in zip([0, *steps], steps, strict=False)]
        for world in dict.fromkeys(case.world for case in part):
            here = [
                (place, model) for case, place, model in zip(part, places, models, strict=True) if case.world == world
            ]
            final = [(model.run.architecture, model.weights) for _, model in here]
            for a, b, drawn in _pair_tests(here[0][1].run, s.tests, work.device):
                for (place, _), value in zip(here, accuracies(final, drawn, work.device), strict=True):
                    accuracy[(*place, a, b)] = value
                some = Drawn(drawn.inputs[:, : s.course_tests], drawn.hidden[:, : s.course_tests])
                for n, step in enumerate(steps):
                    then = [
                        (model.run.architecture, model.recorded[step] if step < s.steps else model.weights)
                        for _, model in here
                    ]
                    for (place, _), value in zip(here, accuracies(then, some, work.device), strict=True):
                        course[(*place, a, b, n)] = value
            for at, drawn in _single_tests(here[0][1].run, s.tests, work.device):
                for (place, _), value in zip(here, accuracies(final, drawn, work.device), strict=True):
                    single[(*place, at)] = value

    share = {"units": "1"}
    return dataset(
        {
            "accuracy": ((*DIMS, "pair", "order"), accuracy, {"long_name": "accuracy by which item is right"} | share),
            "gap": ((*DIMS, "pair"), accuracy[..., 0] - accuracy[..., 1], {"long_name": "accuracy gap"} | share),
            "accuracy_by_position": (
                (*DIMS, "position"),
                single,
                {"long_name": "accuracy by the answer's item"} | share,
            ),
            "course_accuracy": (
                (*DIMS, "pair", "order", "step"),
                course,
                {"long_name": "accuracy by which item is right, during training"} | share,
            ),
            "course_gap": (
                (*DIMS, "pair", "step"),
                course[..., 0, :] - course[..., 1, :],
                {"long_name": "accuracy gap during training"} | share,
            ),
            "training_loss": (
                (*DIMS, "step"),
                losses,
                {"long_name": "training loss since the step before", "units": "nat"},
            ),
        },
        coords={name: list(values) for name, values in coords.items()}
        | {
            "pair": list(PAIRS),
            "order": list(ORDERS),
            "position": (("position",), np.arange(ITEMS), {"long_name": "item that holds the answer", "units": "1"}),
            "step": (("step",), np.array(steps), {"long_name": "updates of the weights", "units": "1"}),
        },
    )


def trained(
    settings: Settings, found: Sequence[Case], steps: Sequence[int], work: Work
) -> Iterator[tuple[list[Case], list[Trained]]]:
    """Part by part; one bar of progress for each (scale, data, depth)."""
    totals: dict[str, int] = {}
    done: dict[str, int] = {}
    device = work.device.type

    def bar(case: Case) -> str:
        return f"depth {case.depth}" if device == "cuda" else f"{case.scale} scale, {case.data}, depth {case.depth}"

    for case in found:
        totals[bar(case)] = totals.get(bar(case), 0) + settings.steps
    for part in parts(found, device):
        first, label = part[0], bar(part[0])
        runs = [run_of(case, settings) for case in part]
        before = done.get(label, 0)

        def advance(_: str, now: float, __: float, label: str = label, before: int = before) -> None:
            work.advance(label, before + now, totals[label])

        name = f"depth {first.depth}"
        if device != "cuda":
            name += f" {first.scale} {first.data} seed {first.seed} {first.training}"
        models = replace(work, advance=advance).train(
            name, runs, settings.steps, record=steps[:-1], recorded=tuple(initial(runs[0].architecture, 0))
        )
        done[label] = before + len(part) * settings.steps
        yield part, models


def _pair_tests(run: Run, n: int, device: torch.device) -> Iterator[tuple[int, int, Drawn]]:
    """(number of the pair, of the order, n sequences); they depend on the world alone, not on how a model was trained."""
    task: Any = run.task
    world = task.world(run.seed, device)
    for a, (earlier, later) in enumerate(PAIRS.values()):
        for b, (right, wrong) in enumerate(((earlier, later), (later, earlier))):
            yield a, b, task.pairs(world, generator_of(device, "pairs", run.seed, a, b), n, right, wrong)


def _single_tests(run: Run, n: int, device: torch.device) -> Iterator[tuple[int, Drawn]]:
    """(the item that is right, n sequences)."""
    task: Any = run.task
    world = task.world(run.seed, device)
    for at in range(ITEMS):
        yield at, task.single(world, generator_of(device, "single", run.seed, at), n, at)


def generator_of(device: torch.device, *what: str | int) -> torch.Generator:
    """Its own for each test set, none of them one of training's."""
    text = " ".join(map(str, ("test", *what)))
    return torch.Generator(device).manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7]))


def accuracies(
    models: Sequence[tuple[Architecture, Mapping[str, Tensor]]], drawn: Drawn, device: torch.device
) -> list[float]:
    """The share of the n sequences that each model, all of one shape, answers rightly."""
    shape = models[0][0].shape
    numbers = shape.length * (shape.width + shape.heads * shape.length)  # of a sequence in one model
    most = max(1, CHUNK[device.type] // numbers)  # sequences of all models of one pass
    together = min(len(models), max(1, most // drawn.inputs.shape[1])) if device.type == "cuda" else 1
    found: list[float] = []
    with torch.no_grad():
        for at in range(0, len(models), together):
            some = models[at : at + together]
            switches = Switches.of([architecture for architecture, _ in some], device)
            weights = {name: tensor.to(device) for name, tensor in stacked([weights for _, weights in some]).items()}
            right = torch.zeros(len(some), device=device)
            each = max(1, most // together)
            for inputs, answers in zip(drawn.inputs[0].split(each), drawn.hidden[0].split(each), strict=True):
                right += (forward(shape, weights, switches, inputs[None]).argmax(-1) == answers).sum(1)
            found += (right / drawn.hidden.shape[1]).tolist()
    return found


def tables(ds: xr.Dataset) -> list[Table]:
    """Gaps, and what the models had learned, a row per model of the grid; its training data are columns."""
    trainings = [str(name) for name in ds["training"].values]
    gaps, levels = [], []
    for names, cell in _cells(ds):
        by_training = [cell.sel(training=name) for name in trainings]
        gaps.append([*names, *(_signed(one["gap"].median("seed").values) for one in by_training)])
        levels.append([*names, *(_level(one) for one in by_training)])
    dims = ("scale", "data", "mask", "depth", "positional", "residual")
    return [
        Table(f"Gap ({', '.join(PAIRS)}; median over seeds), by training data", (*dims, *trainings), gaps),
        Table(
            "Accuracy where the answer is the first, middle, last item, and loss at the end of training (medians)",
            (*dims, *trainings),
            levels,
        ),
    ]


def _cells(ds: xr.Dataset) -> Iterator[tuple[list[str], xr.Dataset]]:
    """What has been trained, by all dimensions but training data and seed."""
    dims = ("scale", "data", "mask", "depth", "positional", "residual")
    for values in product(*(ds[dim].values.tolist() for dim in dims)):
        cell = ds.sel(dict(zip(dims, values, strict=True)))
        if cell["gap"].notnull().any():
            yield list(map(str, values)), cell


def _signed(values: np.ndarray) -> str:
    return "-" if np.isnan(values).any() else ", ".join(f"{value:+.3f}" for value in values)


def _level(cell: xr.Dataset) -> str:
    if not cell["gap"].notnull().any():
        return "-"
    places = cell["accuracy_by_position"].median("seed").sel(position=[FIRST, MIDDLE, LAST]).values
    loss = float(cell["training_loss"].isel(step=-1).median("seed"))
    return f"{', '.join(f'{value:.2f}' for value in places)}; {loss:.2f}"


def over_seeds(values: np.ndarray) -> tuple[float, float, float]:
    """Mean over seeds and an interval: 95 % by Student's t from `FEWEST` seeds on, their range below it, NaN of one."""
    known = values[np.isfinite(values)]
    if 1 < known.size < FEWEST:
        return float(known.mean()), float(known.min()), float(known.max())
    return over_runs(known)[:3]


class Judged(NamedTuple):
    """What a rule found: the numbers, and the verdict."""

    measured: str = "-"
    verdict: Verdict = "not measured"


NOT_THERE = Judged()
GAP = "gap (accuracy with the earlier of two identical items right, less that with the later right)"
OVER_RUNS = "by the 95 % interval over runs"
PASSED = f"Only toys with an accuracy on novel classes of {TRAINED:g} or more count, {OVER_RUNS}"
GATE = f"{PASSED}; of biased data, where those of unbiased data have it"
BLIND = blind_reader(InContext.items // InContext.burst, InContext.labels)
SAME_SIGNS = f"wherever the {GAP} differs from 0 in both kinds of models, {OVER_RUNS}, it has the same sign"
Rule = Callable[[xr.Dataset], Judged]


def claims(ds: xr.Dataset) -> list[Claim]:
    """The statements, for each scale of the data by itself; the paper's residual streams are off unless named.

    Their texts say for which; in `STATEMENTS` they hence have no full stop yet.
    """
    accuracy, states = gate(ds)
    done = ds.where(states == "trained")

    def judged(statement: Statement, rule: Rule) -> Claim:
        """By trained toys alone; "not trained" where the rule finds something without the gate, and nothing behind it."""
        found = rule(done)
        if found is NOT_THERE and rule(ds) is not NOT_THERE:
            found = Judged(gate_told(accuracy, states), "not trained")
        return replace(statement, rule=f"{statement.rule}. {GATE}").judged(*found)

    found = []
    for scale in ds["scale"].values.tolist():
        for statement, rule in STATEMENTS:
            said = replace(statement, id=f"{statement.id}-{scale}", claim=f"{statement.claim} ({scaled(scale)}).")
            found.append(judged(said, _in_world(rule, scale)))
        said = Statement(
            f"wu-toy-fixed-vocabulary-{scale}",
            "[Wu] section 5",
            f"{IN} a fixed vocabulary with anisotropy 0.75 gives the same position biases as Gaussian data "
            f"({scaled(scale)}).",
            SAME_SIGNS,
        )
        found.append(judged(said, _alike({"scale": scale}, {"scale": scale, "data": "fixed"})))
    said = Statement(
        "wu-toy-text-and-program",
        "[Wu] section 5, text and program",
        f"{IN} vectors of standard deviation 1/sqrt(d), as in the paper's text, and 1/d, as in its program, give the "
        "same position biases.",
        SAME_SIGNS,
        kind="ours",
    )
    return [*found, judged(said, _alike({"scale": "text"}, {"scale": "program"}))]


def gate(ds: xr.Dataset) -> tuple[xr.DataArray, xr.DataArray]:
    """Accuracies [..., seed] that decide, and what each kind of model has learnt, over `DIMS`: means over paired tests.

    Of biased data no accuracy tells: who always copies the first label is right where answers stand first, and wrong
    elsewhere. Those models have what the same ones have learnt from unbiased data, where there are such.
    """
    accuracy = ds["accuracy"].mean(("pair", "order"))
    if "unbiased" in ds["training"].values:
        accuracy = accuracy.sel(training="unbiased", drop=True).where(accuracy.notnull()).combine_first(accuracy)
    accuracy = accuracy.transpose(*DIMS)
    return accuracy, learnt_by_kind(accuracy)


def learnt_by_kind(accuracy: xr.DataArray) -> xr.DataArray:
    """`probes.results.gate.learnt` of accuracies [..., seed] on the task's two classes per sequence."""

    def state(runs: np.ndarray) -> Learnt:
        return learnt(runs, BLIND)

    return xr.apply_ufunc(state, accuracy, input_core_dims=[["seed"]], vectorize=True, output_dtypes=[object])


def gate_told(accuracy: xr.DataArray, states: xr.DataArray, classes: str = "novel classes") -> str:
    """Accuracies [..., seed] in words, and how many kinds of toys have learnt what."""
    known = accuracy.notnull().any("seed")
    least, most = (number(end, ".3f") for end in (accuracy.min(), accuracy.max()))
    trained, partly = (int(((states == name) & known).sum()) for name in ("trained", "partly trained"))
    return (
        f"accuracy on {classes} {least} to {most}, of a reader blind to content {BLIND:.3f}; {trained} of "
        f"{int(known.sum())} kinds of toys trained, {partly} partly"
    )


def scaled(scale: str) -> str:
    """Which scale of the data a statement is about, in words."""
    return f"vectors scaled as in the paper's {scale}"


def _world(ds: xr.Dataset, scale: str, data: str = "gaussian") -> xr.Dataset | None:
    """The causal models of one kind of data; None if none were trained."""
    at = {"scale": scale, "data": data, "mask": "causal"}
    if any(value not in ds[dim].values for dim, value in at.items()):
        return None
    world = ds.sel(at)
    return world if bool(world["gap"].notnull().any()) else None


def _in_world(rule: Rule, scale: str) -> Rule:
    """The rule on the Gaussian data of one scale."""

    def of_all(ds: xr.Dataset) -> Judged:
        world = _world(ds, scale)
        return NOT_THERE if world is None else rule(world)

    return of_all


def _gap(world: xr.Dataset, positional: str, training: str, residual: str = "off") -> xr.DataArray | None:
    """[depth, seed, pair] of the depths that are there; None if such models were not trained."""
    at = {"positional": positional, "training": training, "residual": residual}
    if any(value not in world[dim].values for dim, value in at.items()):
        return None
    gap = world["gap"].sel(at).transpose("depth", "seed", "pair").dropna("depth")
    return gap if gap.size else None


def _by_depth(values: xr.DataArray) -> str:
    """[depth, seed] in words."""
    return "; ".join(f"depth {depth}: {_told(values.sel(depth=depth))}" for depth in values["depth"].values)


def _told(values: xr.DataArray) -> str:
    return over_told(values, "+.3f")


def _earlier_wins(world: xr.Dataset) -> Judged:
    gap = _gap(world, "none", "unbiased")
    if gap is None:
        return NOT_THERE
    told = ". ".join(f"{pair}: {_by_depth(gap.sel(pair=pair))}" for pair in PAIRS)
    return Judged(told, each_above(gap)(SURE))


def _grows(positional: str) -> Rule:
    def rule(world: xr.Dataset) -> Judged:
        gap = _gap(world, positional, "unbiased")
        if gap is None or gap.sizes["depth"] < 2:
            return NOT_THERE
        mean = gap.mean("pair").sortby("depth")
        rise = mean.isel(depth=-1, drop=True) - mean.isel(depth=0, drop=True)
        return Judged(f"mean of the three gaps: {_by_depth(mean)}", each_above(rise)(SURE))

    return rule


def _recency(positional: str) -> Rule:
    def rule(world: xr.Dataset) -> Judged:
        plain, other = _gap(world, "none", "unbiased"), _gap(world, positional, "unbiased")
        if plain is None or other is None or not (less := (plain - other).mean("pair")).size:
            return NOT_THERE
        told = f"mean of the three gaps without it less those with it: {_by_depth(less)}"
        return Judged(told, each_above(less)(SURE))

    return rule


def _follows(training: str, signs: Mapping[str, int]) -> Rule:
    """Biased data shift each of these gaps in this direction, against unbiased data, whatever the encoding."""

    def rule(world: xr.Dataset) -> Judged:
        told, tests = [], []
        for positional in world["positional"].values.tolist():
            even, biased = _gap(world, positional, "unbiased"), _gap(world, positional, training)
            if even is None or biased is None:
                continue
            for pair, sign in signs.items():
                shift = (biased - even).sel(pair=pair)
                told.append(f"{positional}, {pair}: {_by_depth(shift)}")
                tests.append(each_above(sign * shift))
        return Judged(f"shift of the gap: {'. '.join(told)}", every(tests)(SURE)) if told else NOT_THERE

    return rule


def _cannot_follow_last(world: xr.Dataset) -> Judged:
    """The last item is not preferred without encoding, whatever was trained."""
    gap = _gap(world, "none", "last")
    if gap is None:
        return NOT_THERE
    gap = gap.sel(pair=["first-last", "middle-last"])
    told = ". ".join(f"{pair}: {_by_depth(gap.sel(pair=pair))}" for pair in gap["pair"].values)
    return Judged(told, each_above(gap)(SURE))


def _in_some(
    world: xr.Dataset, training: str, differences: Callable[[xr.Dataset, xr.DataArray], Sequence[xr.DataArray]]
) -> Judged:
    """Whether under some encoding and depth all these differences [depth, seed] are above 0."""
    told, tests = [], []
    for positional in world["positional"].values.tolist():
        gap = _gap(world, positional, training)
        if gap is None:
            continue
        cell = world.sel(positional=positional, training=training, residual="off")
        found = differences(cell, gap)
        for depth in gap["depth"].values:
            values = [one.sel(depth=depth) for one in found]
            told.append(f"{positional}, depth {depth}: {' and '.join(map(_told, values))}")
            tests.append(every([each_above(one) for one in values]))
    return Judged("; ".join(told), some(tests)(SURE)) if told else NOT_THERE


def _middle_loses(world: xr.Dataset) -> Judged:
    """By gaps: the first wins over the middle, the last too."""

    def lost(_: xr.Dataset, gap: xr.DataArray) -> list[xr.DataArray]:
        return [gap.sel(pair="first-middle"), -gap.sel(pair="middle-last")]

    return _in_some(world, "first-and-last", lost)


def _dips(training: str) -> Rule:
    """By accuracy: the middle items are answered worse than either end."""

    def lost(cell: xr.Dataset, _: xr.DataArray) -> list[xr.DataArray]:
        curve = cell["accuracy_by_position"]
        inner = curve.sel(position=[MIDDLE - 1, MIDDLE]).mean("position")
        return [curve.sel(position=end) - inner for end in (FIRST, LAST)]

    return lambda world: _in_some(world, training, lost)


def _same_with_residual(world: xr.Dataset) -> Judged:
    if not {"off", "on"} <= set(world["residual"].values.tolist()):
        return NOT_THERE
    return _agreement(*(world["gap"].sel(residual=residual, drop=True) for residual in ("off", "on")))


def _other_with_residual(world: xr.Dataset) -> Judged:
    if not {"off", "on"} <= set(world["residual"].values.tolist()) or "unbiased" not in world["training"].values:
        return NOT_THERE
    sizes = abs(world["gap"].sel(training="unbiased").mean("pair"))
    change = sizes.sel(residual="on", drop=True) - sizes.sel(residual="off", drop=True)
    found = over_each(change)
    if not found:
        return NOT_THERE
    more, less = ([test(one, 0) for one in found] for test in (above, below))
    up, down = (sum(test(SURE) == "holds" for test in tests) for tests in (more, less))
    told = f"mean gap further from 0 with residual streams in {up}, nearer in {down} of {len(found)} kinds of models"
    same = every([nothing(one, SAME) for one in found])(SURE) == "holds"
    return Judged(told, "does not hold" if same else some([*more, *less])(SURE))


def _alike(one: Mapping[str, str], other: Mapping[str, str]) -> Rule:
    """Whether two kinds of data give the same biases."""

    def rule(ds: xr.Dataset) -> Judged:
        worlds = [world for at in (one, other) if (world := _world(ds, **at)) is not None]
        return _agreement(*(world["gap"] for world in worlds)) if len(worlds) == 2 else NOT_THERE

    return rule


def _agreement(one: xr.DataArray, other: xr.DataArray) -> Judged:
    """Whether gaps that differ from 0 in both have the same sign."""
    both = one.notnull().any("seed") & other.notnull().any("seed")
    if not bool(both.any()):
        return NOT_THERE
    pairs = list(zip(over_each(one.where(both)), over_each(other.where(both)), strict=True))

    def same(a: Interval, b: Interval) -> Test:
        def test(level: float) -> Verdict:
            ways = [[side(end, 0)(level) == "holds" for side in (above, below)] for end in (a, b)]
            return "undecided" if [False, False] in ways else "holds" if ways[0] == ways[1] else "does not hold"

        return test

    counted = [test for a, b in pairs if (test := same(a, b))(SURE) != "undecided"]
    alike = sum(test(SURE) == "holds" for test in counted)
    told = f"same sign in {alike} of the {len(counted)} gaps that differ from 0 in both (of {len(pairs)})"
    return Judged(told, every(counted)(SURE) if counted else "undecided")


IN = "In the in-context retrieval task"
FALLS = f"the mean {GAP} is lower than without positional encoding, {OVER_RUNS}, at every depth"
SAME = 0.01  # of accuracy; what a gap changes by less than is nothing
SHIFTS = f"against unbiased data the {GAP} shifts that way, {OVER_RUNS}, under every encoding and depth"
RISES = f"the mean {GAP} rises from the least to the largest depth, {OVER_RUNS}"


def _stated(id: str, place: str, claim: str, rule: str, kind: Kind = "published") -> Statement:
    return Statement(id, f"[Wu] section 5, {place}", f"{IN} {claim}", rule, kind=kind)


STATEMENTS: tuple[tuple[Statement, Rule], ...] = (
    (
        _stated(
            "wu-toy-causal-favours-earlier",
            "no encoding",
            "a causal mask alone favours earlier items, also after unbiased training",
            f"the {GAP} is above 0, {OVER_RUNS}, for every pair of positions and every depth",
        ),
        _earlier_wins,
    ),
    (
        _stated(
            "wu-toy-causal-grows-with-depth",
            "no encoding",
            "the bias of a causal mask alone toward earlier items grows with depth",
            RISES,
        ),
        _grows("none"),
    ),
    (
        _stated(
            "wu-toy-decay-favours-recent",
            "decay mask",
            "a decay mask moves the bias toward recent items",
            FALLS,
        ),
        _recency("decay"),
    ),
    (
        _stated("wu-toy-rope-favours-recent", "RoPE", "RoPE moves the bias toward recent items", FALLS),
        _recency("rope"),
    ),
    (
        _stated(
            "wu-toy-decay-depth-favours-earlier",
            "decay mask",
            "under a decay mask more depth moves the bias back to earlier items",
            RISES,
        ),
        _grows("decay"),
    ),
    (
        _stated(
            "wu-toy-rope-depth-favours-earlier",
            "RoPE",
            "with RoPE more depth moves the bias back to earlier items",
            RISES,
        ),
        _grows("rope"),
    ),
    (
        _stated(
            "wu-toy-data-first",
            "biased data",
            "answers that stand first in training pull the bias to the first item",
            SHIFTS,
        ),
        _follows("first", {"first-middle": 1, "first-last": 1}),
    ),
    (
        _stated(
            "wu-toy-data-middle",
            "biased data",
            "answers that stand in the middle in training pull the bias to the middle",
            SHIFTS,
        ),
        _follows("middle", {"first-middle": -1, "middle-last": 1}),
    ),
    (
        _stated(
            "wu-toy-data-last",
            "biased data",
            "a causal mask without positional encoding cannot follow answers that stand last in training",
            f"trained so, the {GAP} stays above 0, {OVER_RUNS}, for first and last and for middle and last, at every "
            "depth",
        ),
        _cannot_follow_last,
    ),
    (
        _stated(
            "wu-toy-lost-in-the-middle-gaps",
            "lost in the middle",
            "the middle loses against both ends after training on answers first or last, under some encodings",
            f"the {GAP} is against the middle item, {OVER_RUNS}, both with the first and with the last, under some "
            "encoding and depth",
        ),
        _middle_loses,
    ),
    (
        _stated(
            "wu-toy-lost-in-the-middle-accuracy",
            "lost in the middle",
            "the middle items are answered worse than both ends after training on answers first or last, under some "
            "encodings",
            f"accuracy at the middle items is below that at either end, {OVER_RUNS}, under some encoding and depth",
        ),
        _dips("first-and-last"),
    ),
    (
        _stated(
            "wu-toy-residual-same-sign",
            "residual",
            "residual streams amplify or reduce the position biases, and turn none round",
            SAME_SIGNS,
            kind="ours",
        ),
        _same_with_residual,
    ),
    (
        _stated(
            "wu-toy-residual-weaker",
            "residual",
            "residual streams amplify or reduce the position bias after unbiased training",
            f"with them the mean {GAP} is further from 0 or nearer to it, {OVER_RUNS}, under some encoding and depth; "
            f"it does not hold where all 90 % intervals lie within {SAME:g}",
        ),
        _other_with_residual,
    ),
)


def kinds(ds: xr.Dataset) -> list[dict[str, str]]:
    """Kinds of data and masks that were trained, each as {scale, data, mask}."""
    dims = ("scale", "data", "mask")
    values = product(*(map(str, ds[dim].values) for dim in dims))
    found: list[dict[str, str]] = [dict(zip(dims, names, strict=True)) for names in values]
    return [at for at in found if bool(ds["gap"].sel(at).notnull().any())]
