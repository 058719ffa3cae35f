"""What a result of position-bias says: its tables, and the statements of [Wu], section 5; those of sinks are beside it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise, product
from typing import Any

import numpy as np
import xarray as xr

from probes.claims.claim import Claim, Verdict
from probes.claims.rules import SURE, Test, above, below, every, nothing, some, told
from probes.results.gate import TRAINED
from probes.results.statistics import Interval, over_runs
from probes.results.tables import Table

from . import sinks_claims
from .learnt import PASSED, STREAMS, by_stream, gate, learning, name_of, remade, scaled, untrained
from .position_bias import FIRST, LAST, MIDDLE, PAIRS, SCALES, TRAINING
from .rules import (
    Judged,
    Lacks,
    at,
    by_parts,
    decided,
    each_above,
    judge,
    known,
    need,
    over_each,
    places,
)

FEWEST = 3  # seeds from which on an interval by Student's t says something (that of two is 13 times their range)
SAME = 0.01  # of accuracy; a smaller change of a gap is nothing
EVEN = 0.02  # of accuracy; a smaller gap is no bias: of three runs' 10,000 sequences chance alone gives half of that
SCALED = re.compile(rf"-({'|'.join(SCALES)})(-\d+)?$")  # what ids of a scale, or of a scale and a depth, end in
GATE = f"{PASSED}, whatever data they were trained on"


def tables(ds: xr.Dataset) -> list[Table]:
    """Gaps, and what the models had learned, a row per model of the grid; its training data are columns."""
    trainings = tuple(map(str, ds["training"].values))
    dims = ("scale", "data", "mask", "depth", "positional", "residual")
    gaps, levels = [], []
    for labels, cell in places(ds[["gap", "accuracy_by_position", "training_loss"]], *dims):
        if cell["gap"].notnull().any():
            by_training = [cell.sel(training=name) for name in trainings]
            gaps.append([*map(str, labels), *(_signed(one["gap"].mean("seed").values) for one in by_training)])
            levels.append([*map(str, labels), *map(_level, by_training)])
    title = "Accuracy where the answer is the first, middle, last item, and loss at the end of training (means)"
    found = [
        Table(f"Gap ({', '.join(PAIRS)}; mean over seeds), by training data", (*dims, *trainings), gaps),
        Table(title, (*dims, *trainings), levels),
    ]
    found += [learning(ds)] if "course_novel" in ds else []
    return [*found, *sinks_claims.tables(ds)]


def _signed(values: np.ndarray) -> str:
    return "-" if np.isnan(values).any() else ", ".join(f"{value:+.3f}" for value in values)


def _level(cell: xr.Dataset) -> str:
    if not cell["gap"].notnull().any():
        return "-"
    ends = cell["accuracy_by_position"].mean("seed").sel(position=[FIRST, MIDDLE, LAST]).values
    loss = float(cell["training_loss"].isel(step=-1).mean("seed"))
    return f"{', '.join(f'{value:.2f}' for value in ends)}; {loss:.2f}"


def over_seeds(values: np.ndarray) -> tuple[float, float, float]:
    """Mean over seeds and an interval: 95 % by Student's t from `FEWEST` seeds on, their range below it, NaN of one."""
    known = values[np.isfinite(values)]
    if 1 < known.size < FEWEST:
        return float(known.mean()), float(known.min()), float(known.max())
    return over_runs(known)[:3]


def claims(ds: xr.Dataset) -> list[Claim]:
    """The statements, for each scale of the data by itself; the paper's residual streams are off unless named."""
    ds = ds[[name for name, values in ds.items() if {"step", "query"}.isdisjoint(values.dims)]]  # what rules read
    accuracy, states = gate(ds)
    scales = [{"scale": scale, "scaled": scaled(scale)} for scale in ds["scale"].values.tolist()]
    shared: dict[str, Any] = {
        "done": ds.where(states == "trained"),
        "untrained": untrained(ds, accuracy, states),
        "command": remade(ds),
    }
    return _once([*judge(__name__, ds, lists={"scale": scales}, **shared), *sinks_claims.claims(ds, **shared)])


def _once(found: Sequence[Claim]) -> list[Claim]:
    """Statement by statement, without rows on what was not measured at one scale or depth, where another has one."""
    rows: dict[str, list[Claim]] = {}
    for claim in found:
        rows.setdefault(SCALED.sub("", claim.id), []).append(claim)
    return [
        claim for same in rows.values() for claim in [one for one in same if one.verdict != "not measured"] or same[:1]
    ]


def world(ds: xr.Dataset, scale: str, data: str = "gaussian", mask: str = "causal") -> xr.Dataset:
    """The models of one kind of data under one mask."""
    return at(ds, scale=scale, data=data, mask=mask)


def gap_of(
    ds: xr.Dataset, scale: str, positional: str, training: str, mask: str = "causal", data: str = "gaussian"
) -> xr.DataArray:
    """[depth, seed, pair] of the depths that are there."""
    found = at(world(ds, scale, data, mask)["gap"], positional=positional, training=training)
    found = found.transpose("depth", "seed", "pair").dropna("depth", how="all")
    need(found.size)
    return found


def learns(ds: xr.Dataset, scale: str) -> Judged:
    """Every kind of toy on unbiased data, under a causal mask, passes the gate."""
    need("novel_accuracy" in ds)
    accuracy = at(world(ds, scale)["novel_accuracy"], training="unbiased")
    dims = ("residual", "positional", "depth")
    found = {
        name_of(dict(zip(dims, labels, strict=True))): over_runs(one.values)
        for labels, one in places(accuracy, *dims)
        if one.notnull().any()
    }
    need(found)
    measured = "; ".join(f"{name} {told(one.within(0, 1), '.3f')}" for name, one in found.items())
    return decided(measured, *(above(one, TRAINED) for one in found.values()))


def by_depth(values: xr.DataArray, most: float = 1) -> str:
    """[depth, seed] in words; a gap is 1 at the most, a difference of two gaps 2."""
    return "; ".join(f"depth {depth}: {_told(one, most)}" for (depth,), one in places(values, "depth"))


def _told(values: xr.DataArray, most: float = 1) -> str:
    return told(over_runs(values.values.ravel()).within(-most, most), "+.3f")


@by_stream
def earlier(
    ds: xr.Dataset,
    scale: str,
    training: str,
    pairs: list[str],
    positional: str = "none",
    data: str = "gaussian",
    or_even: bool = False,
) -> Judged:
    """The earlier item is preferred, or neither is."""
    gap = gap_of(ds, scale, positional, training, data=data).sel(pair=pairs)
    said = ". ".join(f"{pair}: {by_depth(one)}" for (pair,), one in places(gap, "pair"))
    return decided(said, each_above(gap, -EVEN if or_even else 0))


@by_stream
def smallest(ds: xr.Dataset, scale: str, pair: str, positional: str = "none", data: str = "gaussian") -> Judged:
    """The gap of a pair is nearer to 0 than those of the others."""
    gap = gap_of(ds, scale, positional, "unbiased", data=data)
    rest = abs(gap.sel(pair=[name for name in PAIRS if name != pair])) - abs(gap.sel(pair=pair, drop=True))
    said = ". ".join(f"{name}: {by_depth(one)}" for (name,), one in places(rest, "pair"))
    return decided(f"distance from 0 beyond that of {pair}, {said}", each_above(rest))


@by_stream
def grows(ds: xr.Dataset, scale: str, positional: str) -> Judged:
    """The bias toward earlier items is larger in the deepest models than in the shallowest."""
    mean = gap_of(ds, scale, positional, "unbiased").mean("pair").sortby("depth")
    need(mean.sizes["depth"] > 1)
    rise = mean.isel(depth=-1, drop=True) - mean.isel(depth=0, drop=True)
    return decided(f"mean of the three gaps: {by_depth(mean)}", each_above(rise))


@by_stream
def recency(ds: xr.Dataset, scale: str, positional: str, than: str = "none") -> Judged:
    """One encoding moves the bias toward recent items, against another or none."""
    plain, other = (gap_of(ds, scale, name, "unbiased") for name in (than, positional))
    less = (plain - other).mean("pair").dropna("depth", how="all")
    need(less.size)
    return decided(
        f"mean of the three gaps with {than} less that with {positional}: {by_depth(less, 2)}", each_above(less)
    )


@by_stream
def follows(
    ds: xr.Dataset,
    scale: str,
    training: Mapping[str, Mapping[str, int]],
    positional: Sequence[str] = (),
    mask: str = "causal",
) -> Judged:
    """Biased data shift gaps in these directions, against unbiased data, whatever the encoding."""
    found = []
    for name in positional or ds["positional"].values.tolist():
        for answers, signs in training.items():
            with suppress(Lacks):
                change = gap_of(ds, scale, name, answers, mask) - gap_of(ds, scale, name, "unbiased", mask)
                for pair, sign in signs.items():
                    shift = change.sel(pair=pair).dropna("depth", how="all")
                    need(shift.size)
                    found.append((f"{name}, {answers}, {pair}: {by_depth(shift, 2)}", each_above(sign * shift)))
    return by_parts(found, before="shift of the gap: ", between=". ")


@by_stream
def even(ds: xr.Dataset, scale: str, mask: str, positional: Sequence[str]) -> Judged:
    """No gap of unbiased training differs from 0 by more than a margin."""
    found = []
    for name in positional:
        with suppress(Lacks):
            gap = gap_of(ds, scale, name, "unbiased", mask)
            tests = [nothing(one, EVEN) for one in over_each(gap)]
            said = "; ".join(f"{pair} {by_depth(one)}" for (pair,), one in places(gap, "pair"))
            found.append((f"{name}: {said}", every(tests)))
    return by_parts(found, between=". ")


Differences = Callable[[xr.DataArray, xr.DataArray], list[xr.DataArray]]


def by_kind(
    ds: xr.Dataset, scale: str, differences: Differences, training: Sequence[str]
) -> Iterator[tuple[str, Test]]:
    """In words, and whether all these differences are above 0: for every encoding, kind of answers and depth.

    `differences` [depth, seed] are of gaps [depth, seed, pair] and accuracies [depth, seed, position].
    """
    for positional, answers in product(ds["positional"].values.tolist(), training):
        with suppress(Lacks):
            gap = gap_of(ds, scale, positional, answers)
            which = {"positional": positional, "training": answers}
            found = differences(gap, world(ds, scale)["accuracy_by_position"].sel(which))
            for depth in gap["depth"].values:
                values = [one.sel(depth=depth) for one in found]
                said = f"{positional}, {answers}, depth {depth}: {' and '.join(map(_told, values))}"
                yield said, every([each_above(one) for one in values])


@by_stream
def in_some(ds: xr.Dataset, scale: str, differences: Differences, training: Sequence[str]) -> Judged:
    """Under some encoding and depth, trained on such answers, all these differences are above 0."""
    found = list(by_kind(ds, scale, differences, training))
    need(found)
    return Judged("; ".join(said for said, _ in found), some([test for _, test in found])(SURE))


def lost(gap: xr.DataArray, _: xr.DataArray) -> list[xr.DataArray]:
    """By how much the first wins over the middle, and the last."""
    return [gap.sel(pair="first-middle"), -gap.sel(pair="middle-last")]


def lost_in_the_middle_gaps(ds: xr.Dataset, scale: str, training: Sequence[str]) -> Judged:
    """By gaps: the first wins over the middle, the last too."""
    return in_some(ds, scale=scale, differences=lost, training=training)


def middle_never_lost(ds: xr.Dataset, scale: str, training: Sequence[str]) -> Judged:
    """Under no encoding and depth, with or without residual stream, does the middle lose against both ends."""
    found = []
    for residual, words in STREAMS.items():
        with suppress(Lacks):
            each = by_kind(at(ds, residual=residual), scale, lost, training)
            found += [(f"{words}, {said}", test) for said, test in each]
    need(found)
    verdict = some([test for _, test in found])(SURE)
    other: dict[Verdict, Verdict] = {"holds": "does not hold", "does not hold": "holds"}
    return Judged("; ".join(said for said, _ in found), other.get(verdict, verdict))


def lost_in_the_middle_accuracy(ds: xr.Dataset, scale: str, training: Sequence[str]) -> Judged:
    """By accuracy: the middle items are answered worse than either end."""

    def worse(_: xr.DataArray, curve: xr.DataArray) -> list[xr.DataArray]:
        inner = curve.sel(position=[MIDDLE - 1, MIDDLE]).mean("position")
        return [curve.sel(position=end) - inner for end in (FIRST, LAST)]

    return in_some(ds, scale=scale, differences=worse, training=training)


def residuals(gap: xr.DataArray) -> list[xr.DataArray]:
    """Gaps without and with residual stream."""
    return [at(gap, residual=residual).drop_vars("residual") for residual in ("off", "on")]


def residual_same_sign(ds: xr.Dataset, scale: str, training: Sequence[str] = tuple(TRAINING)) -> Judged:
    """Residual streams turn no bias round."""
    return agreement(*residuals(_trained_on(ds, training, scale=scale)))


def _trained_on(ds: xr.Dataset, training: Sequence[str], **which: str) -> xr.DataArray:
    """Gaps of models of one kind of data, trained on such answers."""
    gap = world(ds, **which)["gap"]
    return gap.sel(training=gap["training"].isin(training))


def residual_weaker(ds: xr.Dataset, scale: str) -> Judged:
    """Residual streams change the size of some bias; where a gap changes its sign they do something else."""
    found: list[Interval] = []
    turned = 0
    for _, one in places(at(world(ds, scale)["gap"], training="unbiased"), "positional", "depth"):
        without, those = residuals(one)
        same_signs = known(agreement, without, those)
        if same_signs is not None and same_signs.verdict == "does not hold":
            turned += 1
        elif same_signs is not None:
            found += over_each(abs(those.mean("pair")) - abs(without.mean("pair")))
    need(found or turned)
    more, less = ([test(one, 0) for one in found] for test in (above, below))
    up, down = (sum(test(SURE) == "holds" for test in tests) for tests in (more, less))
    told = (
        f"kinds of models: {len(found) + turned}; mean gap further from 0 with residual streams: {up}, nearer: {down}; "
        f"a gap changes its sign: {turned}"
    )
    if not found:
        return Judged(told, "undecided")
    same = every([nothing(one, SAME) for one in found])(SURE) == "holds"
    return Judged(told, "does not hold" if same else some([*more, *less])(SURE))


def not_monotonic(ds: xr.Dataset, scale: str, positional: str) -> Judged:
    """With residual streams the bias rises between some depths that follow each other, and falls between others."""
    mean = gap_of(at(ds, residual="on"), scale, positional, "unbiased").mean("pair").sortby("depth")
    need(mean.sizes["depth"] > 2)
    steps = [
        mean.isel(depth=b, drop=True) - mean.isel(depth=a, drop=True) for a, b in pairwise(range(mean.sizes["depth"]))
    ]
    ways = [some([each_above(sign * step) for step in steps]) for sign in (1, -1)]
    return decided(f"mean of the three gaps: {by_depth(mean)}", *ways)


def alike(
    ds: xr.Dataset,
    one: dict[str, str],
    other: dict[str, str],
    scale: str = "",
    training: Sequence[str] = tuple(TRAINING),
) -> Judged:
    """Two kinds of data give the same biases."""
    return agreement(*(_trained_on(ds, training, **{"scale": scale} | which) for which in (one, other)))


def agreement(one: xr.DataArray, other: xr.DataArray) -> Judged:
    """Whether every gap has the same sign in both, or is none in both."""
    both = one.notnull().any("seed") & other.notnull().any("seed")
    need(bool(both.any()))
    tests = [same_sign(*ends) for ends in zip(over_each(one.where(both)), over_each(other.where(both)), strict=True)]
    same, turned = (sum(test(SURE) == verdict for test in tests) for verdict in ("holds", "does not hold"))
    told = f"gaps: {len(tests)}; same sign in both, or near 0 in both: {same}; opposite signs: {turned}"
    return Judged(told, every(tests)(SURE))


def same_sign(one: Interval, other: Interval) -> Test:
    """Whether both lie on the same side of 0, or both near it."""
    near = every([nothing(end, EVEN) for end in (one, other)])

    def test(level: float) -> Verdict:
        if near(level) == "holds":
            return "holds"
        ways = [[side(end, 0)(level) == "holds" for side in (above, below)] for end in (one, other)]
        return "undecided" if [False, False] in ways else "holds" if ways[0] == ways[1] else "does not hold"

    return test
