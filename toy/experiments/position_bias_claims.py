"""What a result of position-bias says: tables, who has learnt the task, and the statements of [Wu], section 5."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import xarray as xr

from probes.claims.claim import Claim, Verdict, read_statements
from probes.claims.rules import SURE, Test, above, below, every, nothing, some
from probes.results.gate import TRAINED, Learnt, blind_reader, learnt
from probes.results.statistics import Interval, over_runs
from probes.results.tables import Table, number

from ..tasks import InContext
from .position_bias import DIMS, FIRST, LAST, MIDDLE, PAIRS
from .rules import NOT_THERE, OVER_RUNS, Judged, Rule, by_parts, decided, each_above, has, over_each, over_told

STATEMENTS = read_statements(Path(__file__).with_name("position_bias.toml"))
FEWEST = 3  # seeds from which on an interval by Student's t says something (that of two is 13 times their range)
SAME = 0.01  # of accuracy; a smaller change of a gap is nothing
PASSED = f"Only toys with an accuracy on novel classes of {TRAINED:g} or more count, {OVER_RUNS}"
GATE = f"{PASSED}; of biased data, where those of unbiased data have it"
BLIND = blind_reader(InContext.items // InContext.burst, InContext.labels)


def kinds(ds: xr.Dataset) -> list[dict[str, str]]:
    """Kinds of data and masks that were trained, each as {scale, data, mask}."""
    dims = ("scale", "data", "mask")
    found: list[dict[str, str]] = [
        dict(zip(dims, names, strict=True)) for names in product(*(map(str, ds[dim].values) for dim in dims))
    ]
    return [at for at in found if bool(ds["gap"].sel(at).notnull().any())]


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


def claims(ds: xr.Dataset) -> list[Claim]:
    """The statements, for each scale of the data by itself; the paper's residual streams are off unless named."""
    accuracy, states = gate(ds)
    done = ds.where(states == "trained")

    def judged(name: str, rule: Rule, scale: str | None = None) -> Claim:
        """By trained toys alone; "not trained" where the rule finds something without the gate, and nothing behind it."""
        said, found = STATEMENTS[name], rule(done)
        if scale is not None:
            said = replace(said, id=f"{said.id}-{scale}", claim=said.claim.format(scale=scaled(scale)))
        if found is NOT_THERE and rule(ds) is not NOT_THERE:
            found = Judged(gate_told(accuracy, states), "not trained")
        return replace(said, rule=f"{said.rule}. {GATE}").judged(*found)

    found = []
    for scale in ds["scale"].values.tolist():
        found += [judged(name, partial(_in_world, rule, scale), scale) for name, rule in RULES.items()]
        fixed = _alike({"scale": scale}, {"scale": scale, "data": "fixed"})
        found.append(judged("wu-toy-fixed-vocabulary", fixed, scale))
    return [*found, judged("wu-toy-text-and-program", _alike({"scale": "text"}, {"scale": "program"}))]


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


def _in_world(rule: Rule, scale: str, ds: xr.Dataset) -> Judged:
    """The rule on the Gaussian data of one scale."""
    world = _world(ds, scale)
    return NOT_THERE if world is None else rule(world)


def _gap(world: xr.Dataset, positional: str, training: str) -> xr.DataArray | None:
    """[depth, seed, pair] of the depths that are there, without residual stream; None if such models were not trained."""
    at = {"positional": positional, "training": training, "residual": "off"}
    if not has(world, **at):
        return None
    gap = world["gap"].sel(at).transpose("depth", "seed", "pair").dropna("depth")
    return gap if gap.size else None


def _by_depth(values: xr.DataArray) -> str:
    """[depth, seed] in words."""
    return "; ".join(f"depth {depth}: {_told(values.sel(depth=depth))}" for depth in values["depth"].values)


def _told(values: xr.DataArray) -> str:
    return over_told(values, "+.3f")


def _earlier(training: str, *pairs: str) -> Rule:
    """The earlier item is preferred without encoding."""

    def rule(world: xr.Dataset) -> Judged:
        if (gap := _gap(world, "none", training)) is None:
            return NOT_THERE
        told = ". ".join(f"{pair}: {_by_depth(gap.sel(pair=pair))}" for pair in pairs)
        return decided(told, each_above(gap.sel(pair=list(pairs))))

    return rule


def _grows(positional: str) -> Rule:
    def rule(world: xr.Dataset) -> Judged:
        gap = _gap(world, positional, "unbiased")
        if gap is None or gap.sizes["depth"] < 2:
            return NOT_THERE
        mean = gap.mean("pair").sortby("depth")
        rise = mean.isel(depth=-1, drop=True) - mean.isel(depth=0, drop=True)
        return decided(f"mean of the three gaps: {_by_depth(mean)}", each_above(rise))

    return rule


def _recency(positional: str) -> Rule:
    def rule(world: xr.Dataset) -> Judged:
        plain, other = _gap(world, "none", "unbiased"), _gap(world, positional, "unbiased")
        if plain is None or other is None or not (less := (plain - other).mean("pair")).size:
            return NOT_THERE
        return decided(f"mean of the three gaps without it less those with it: {_by_depth(less)}", each_above(less))

    return rule


def _follows(training: str, signs: Mapping[str, int]) -> Rule:
    """Biased data shift each of these gaps in this direction, against unbiased data, whatever the encoding."""

    def rule(world: xr.Dataset) -> Judged:
        found = []
        for positional in world["positional"].values.tolist():
            even, biased = _gap(world, positional, "unbiased"), _gap(world, positional, training)
            if even is None or biased is None:
                continue
            for pair, sign in signs.items():
                shift = (biased - even).sel(pair=pair)
                found.append((f"{positional}, {pair}: {_by_depth(shift)}", each_above(sign * shift)))
        return by_parts(found, before="shift of the gap: ", between=". ")

    return rule


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


def _residuals(world: xr.Dataset, gap: xr.DataArray) -> list[xr.DataArray]:
    """Gaps without and with residual stream, where both were trained."""
    if not has(world, residual=["off", "on"]):
        return []
    return [gap.sel(residual=residual, drop=True) for residual in ("off", "on")]


def _same_with_residual(world: xr.Dataset) -> Judged:
    return _agreement(*found) if (found := _residuals(world, world["gap"])) else NOT_THERE


def _other_with_residual(world: xr.Dataset) -> Judged:
    if not has(world, training="unbiased"):
        return NOT_THERE
    sizes = _residuals(world, abs(world["gap"].sel(training="unbiased").mean("pair")))
    found = over_each(sizes[1] - sizes[0]) if sizes else []
    if not found:
        return NOT_THERE
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


RULES: dict[str, Rule] = {
    "wu-toy-causal-favours-earlier": _earlier("unbiased", *PAIRS),
    "wu-toy-causal-grows-with-depth": _grows("none"),
    "wu-toy-decay-favours-recent": _recency("decay"),
    "wu-toy-rope-favours-recent": _recency("rope"),
    "wu-toy-decay-depth-favours-earlier": _grows("decay"),
    "wu-toy-rope-depth-favours-earlier": _grows("rope"),
    "wu-toy-data-first": _follows("first", {"first-middle": 1, "first-last": 1}),
    "wu-toy-data-middle": _follows("middle", {"first-middle": -1, "middle-last": 1}),
    "wu-toy-data-last": _earlier("last", "first-last", "middle-last"),
    "wu-toy-lost-in-the-middle-gaps": _middle_loses,
    "wu-toy-lost-in-the-middle-accuracy": _dips("first-and-last"),
    "wu-toy-residual-same-sign": _same_with_residual,
    "wu-toy-residual-weaker": _other_with_residual,
}
