"""What a result of position-bias says: tables, who has learnt the task, and the statements of [Wu], section 5."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import xarray as xr

from probes.claims.claim import Claim, Verdict
from probes.claims.rules import SURE, Test, above, below, every, nothing, some
from probes.results.gate import TRAINED, blind_reader, learnt
from probes.results.statistics import Interval, over_runs
from probes.results.tables import Table, number

from ..tasks import InContext
from .position_bias import DIMS, FIRST, LAST, MIDDLE, PAIRS
from .rules import (
    OVER_RUNS,
    Judged,
    Lacks,
    at,
    by_parts,
    decided,
    each_above,
    judge,
    need,
    over_each,
    over_told,
    places,
)

FEWEST = 3  # seeds from which on an interval by Student's t says something (that of two is 13 times their range)
SAME = 0.01  # of accuracy; a smaller change of a gap is nothing
PASSED = f"Only toys with an accuracy on novel classes of {TRAINED:g} or more count, {OVER_RUNS}"
GATE = f"{PASSED}; of biased data, where those of unbiased data have it"
BLIND = blind_reader(InContext.items // InContext.burst, InContext.labels)


def kinds(ds: xr.Dataset) -> list[dict[str, str]]:
    """Kinds of data and masks that were trained, each as {scale, data, mask}."""
    dims = ("scale", "data", "mask")
    return [dict(zip(dims, names, strict=True)) for names, one in places(ds["gap"], *dims) if one.notnull().any()]


def tables(ds: xr.Dataset) -> list[Table]:
    """Gaps, and what the models had learned, a row per model of the grid; its training data are columns."""
    trainings = tuple(map(str, ds["training"].values))
    dims = ("scale", "data", "mask", "depth", "positional", "residual")
    gaps, levels = [], []
    for labels, cell in places(ds, *dims):
        if cell["gap"].notnull().any():
            by_training = [cell.sel(training=name) for name in trainings]
            gaps.append([*map(str, labels), *(_signed(one["gap"].median("seed").values) for one in by_training)])
            levels.append([*map(str, labels), *map(_level, by_training)])
    title = "Accuracy where the answer is the first, middle, last item, and loss at the end of training (medians)"
    found = [
        Table(f"Gap ({', '.join(PAIRS)}; median over seeds), by training data", (*dims, *trainings), gaps),
        Table(title, (*dims, *trainings), levels),
    ]
    return [*found, learning(ds)] if "course_novel" in ds else found


def learning(ds: xr.Dataset) -> Table:
    """Who has learnt to retrieve, and when: a row per kind of model, its seeds side by side."""
    states, dims = gate(ds)[1], tuple(dim for dim in DIMS if dim != "seed")
    columns = (
        "accuracy",
        f"step of {TRAINED:g}",
        "a label of the context",
        "on right items",
        "on right labels",
        "state",
    )
    rows = []
    for labels, cell in places(ds, *dims):
        cell = cell.isel(seed=np.flatnonzero(cell["novel_accuracy"].notnull()))
        if cell.sizes["seed"]:
            of: dict[Any, Any] = dict(zip(dims, labels, strict=True))
            end = cell.isel(step=-1).sel(layer=int(of["depth"]) - 1)
            on = [_each(end["course_match"].sel(part=part)) for part in ("item", "label")]
            kind = str(states.sel({dim: of[dim] for dim in states.dims}).item())
            numbers = (_each(cell["novel_accuracy"]), _reached(cell), _each(end["course_copied"]), *on)
            rows.append([*map(str, labels), *numbers, kind])
    title = (
        f"Retrieval of novel classes, each seed: accuracy (blind to content: {BLIND:.3f}), the check from which on it is "
        f"{TRAINED:g} or more, share of answers that are any label of the context, the last block's weights from the query"
    )
    return Table(title, (*dims, *columns), rows)


def _each(values: xr.DataArray) -> str:
    return ", ".join(number(value, ".3f") for value in values.values)


def _reached(cell: xr.Dataset) -> str:
    """The step of the first check from which on accuracy stays at the gate or above."""
    steps, told = cell["step"].values, []
    for course in cell["course_novel"].transpose("seed", "step").values:
        below = np.flatnonzero(course < TRAINED)
        first = 0 if not below.size else int(below[-1]) + 1
        told.append(str(steps[first]) if first < steps.size else "-")
    return ", ".join(told)


def _signed(values: np.ndarray) -> str:
    return "-" if np.isnan(values).any() else ", ".join(f"{value:+.3f}" for value in values)


def _level(cell: xr.Dataset) -> str:
    if not cell["gap"].notnull().any():
        return "-"
    ends = cell["accuracy_by_position"].median("seed").sel(position=[FIRST, MIDDLE, LAST]).values
    loss = float(cell["training_loss"].isel(step=-1).median("seed"))
    return f"{', '.join(f'{value:.2f}' for value in ends)}; {loss:.2f}"


def over_seeds(values: np.ndarray) -> tuple[float, float, float]:
    """Mean over seeds and an interval: 95 % by Student's t from `FEWEST` seeds on, their range below it, NaN of one."""
    known = values[np.isfinite(values)]
    if 1 < known.size < FEWEST:
        return float(known.mean()), float(known.min()), float(known.max())
    return over_runs(known)[:3]


def claims(ds: xr.Dataset) -> list[Claim]:
    """The statements, for each scale of the data by itself; the paper's residual streams are off unless named."""
    accuracy, states = gate(ds)
    scales = [{"scale": scale, "scaled": scaled(scale)} for scale in ds["scale"].values.tolist()]
    done = ds.where(states == "trained")
    return judge(__name__, ds, lists={"scale": scales}, done=done, untrained=gate_told(accuracy, states))


def gate(ds: xr.Dataset) -> tuple[xr.DataArray, xr.DataArray]:
    """Accuracies [..., seed] on novel classes, and what each kind of model has learnt, over `DIMS`.

    Of biased data no accuracy tells: who always copies the first label is right where answers stand first, and wrong
    elsewhere. Those models have what the same ones have learnt from unbiased data, where there are such. Results of before
    have no accuracy but that of the paired tests, which a reader blind to content answers as well.
    """
    accuracy = ds["novel_accuracy"] if "novel_accuracy" in ds else ds["accuracy"].mean(("pair", "order"))
    if "unbiased" in ds["training"].values:
        accuracy = accuracy.sel(training="unbiased", drop=True).where(accuracy.notnull()).combine_first(accuracy)
    accuracy = accuracy.transpose(*DIMS)
    return accuracy, learnt_by_kind(accuracy)


def learnt_by_kind(accuracy: xr.DataArray) -> xr.DataArray:
    """`probes.results.gate.learnt` of accuracies [..., seed] on the task's two classes per sequence."""
    state = partial(learnt, blind=BLIND)
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


def world(ds: xr.Dataset, scale: str, data: str = "gaussian") -> xr.Dataset:
    """The causal models of one kind of data."""
    return at(ds, scale=scale, data=data, mask="causal")


def gap_of(ds: xr.Dataset, scale: str, positional: str, training: str) -> xr.DataArray:
    """[depth, seed, pair] of the depths that are there, of Gaussian data, without residual stream."""
    found = at(world(ds, scale)["gap"], positional=positional, training=training, residual="off")
    found = found.transpose("depth", "seed", "pair").dropna("depth")
    need(found.size)
    return found


def by_depth(values: xr.DataArray) -> str:
    """[depth, seed] in words."""
    return "; ".join(f"depth {depth}: {_told(one)}" for (depth,), one in places(values, "depth"))


def _told(values: xr.DataArray) -> str:
    return over_told(values, "+.3f")


def earlier(ds: xr.Dataset, scale: str, training: str, pairs: list[str]) -> Judged:
    """The earlier item is preferred without encoding."""
    gap = gap_of(ds, scale, "none", training).sel(pair=pairs)
    return decided(". ".join(f"{pair}: {by_depth(one)}" for (pair,), one in places(gap, "pair")), each_above(gap))


def grows(ds: xr.Dataset, scale: str, positional: str) -> Judged:
    """The bias toward earlier items is larger in the deepest models than in the shallowest."""
    mean = gap_of(ds, scale, positional, "unbiased").mean("pair").sortby("depth")
    need(mean.sizes["depth"] > 1)
    rise = mean.isel(depth=-1, drop=True) - mean.isel(depth=0, drop=True)
    return decided(f"mean of the three gaps: {by_depth(mean)}", each_above(rise))


def recency(ds: xr.Dataset, scale: str, positional: str) -> Judged:
    """An encoding moves the bias toward recent items."""
    plain, other = (gap_of(ds, scale, name, "unbiased") for name in ("none", positional))
    less = (plain - other).mean("pair")
    need(less.size)
    return decided(f"mean of the three gaps without it less those with it: {by_depth(less)}", each_above(less))


def follows(ds: xr.Dataset, scale: str, training: str, signs: dict[str, int]) -> Judged:
    """Biased data shift each of these gaps in this direction, against unbiased data, whatever the encoding."""
    found = []
    for positional in ds["positional"].values.tolist():
        with suppress(Lacks):
            change = gap_of(ds, scale, positional, training) - gap_of(ds, scale, positional, "unbiased")
            for pair, sign in signs.items():
                shift = change.sel(pair=pair)
                found.append((f"{positional}, {pair}: {by_depth(shift)}", each_above(sign * shift)))
    return by_parts(found, before="shift of the gap: ", between=". ")


Differences = Callable[[xr.DataArray, xr.DataArray], list[xr.DataArray]]


def in_some(ds: xr.Dataset, scale: str, differences: Differences) -> Judged:
    """Whether under some encoding and depth, trained on answers first or last, all these differences are above 0.

    `differences` [depth, seed] are of gaps [depth, seed, pair] and accuracies [depth, seed, position].
    """
    told, tests = [], []
    for positional in ds["positional"].values.tolist():
        with suppress(Lacks):
            gap = gap_of(ds, scale, positional, "first-and-last")
            which = {"positional": positional, "training": "first-and-last", "residual": "off"}
            found = differences(gap, world(ds, scale)["accuracy_by_position"].sel(which))
            for depth in gap["depth"].values:
                values = [one.sel(depth=depth) for one in found]
                told.append(f"{positional}, depth {depth}: {' and '.join(map(_told, values))}")
                tests.append(every([each_above(one) for one in values]))
    need(told)
    return Judged("; ".join(told), some(tests)(SURE))


def lost_in_the_middle_gaps(ds: xr.Dataset, scale: str) -> Judged:
    """By gaps: the first wins over the middle, the last too."""
    return in_some(ds, scale, lambda gap, _: [gap.sel(pair="first-middle"), -gap.sel(pair="middle-last")])


def lost_in_the_middle_accuracy(ds: xr.Dataset, scale: str) -> Judged:
    """By accuracy: the middle items are answered worse than either end."""

    def lost(_: xr.DataArray, curve: xr.DataArray) -> list[xr.DataArray]:
        inner = curve.sel(position=[MIDDLE - 1, MIDDLE]).mean("position")
        return [curve.sel(position=end) - inner for end in (FIRST, LAST)]

    return in_some(ds, scale, lost)


def residuals(gap: xr.DataArray) -> list[xr.DataArray]:
    """Gaps without and with residual stream."""
    return [at(gap, residual=residual).drop_vars("residual") for residual in ("off", "on")]


def residual_same_sign(ds: xr.Dataset, scale: str) -> Judged:
    """Residual streams turn no bias round."""
    return agreement(*residuals(world(ds, scale)["gap"]))


def residual_weaker(ds: xr.Dataset, scale: str) -> Judged:
    """Residual streams change some bias."""
    without, those = residuals(abs(at(world(ds, scale)["gap"], training="unbiased").mean("pair")))
    found = over_each(those - without)
    need(found)
    more, less = ([test(one, 0) for one in found] for test in (above, below))
    up, down = (sum(test(SURE) == "holds" for test in tests) for tests in (more, less))
    told = f"mean gap further from 0 with residual streams in {up}, nearer in {down} of {len(found)} kinds of models"
    same = every([nothing(one, SAME) for one in found])(SURE) == "holds"
    return Judged(told, "does not hold" if same else some([*more, *less])(SURE))


def alike(ds: xr.Dataset, one: dict[str, str], other: dict[str, str], scale: str = "") -> Judged:
    """Two kinds of data give the same biases."""
    return agreement(*(world(ds, **{"scale": scale} | which)["gap"] for which in (one, other)))


def agreement(one: xr.DataArray, other: xr.DataArray) -> Judged:
    """Whether gaps that differ from 0 in both have the same sign."""
    both = one.notnull().any("seed") & other.notnull().any("seed")
    need(bool(both.any()))
    pairs = list(zip(over_each(one.where(both)), over_each(other.where(both)), strict=True))

    def same(a: Interval, b: Interval) -> Test:
        def test(level: float) -> Verdict:
            ways = [[side(end, 0)(level) == "holds" for side in (above, below)] for end in (a, b)]
            return "undecided" if [False, False] in ways else "holds" if ways[0] == ways[1] else "does not hold"

        return test

    counted = [test for a, b in pairs if (test := same(a, b))(SURE) != "undecided"]
    agreeing = sum(test(SURE) == "holds" for test in counted)
    told = f"same sign in {agreeing} of the {len(counted)} gaps that differ from 0 in both (of {len(pairs)})"
    return Judged(told, every(counted)(SURE) if counted else "undecided")
