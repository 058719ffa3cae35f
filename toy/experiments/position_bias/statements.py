"""What a result of position-bias says: its tables, and the statements of [Wu], section 5; those of sinks are beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

import numpy as np
import xarray as xr

from probes.claims.claim import Claim, Kind, Verdict
from probes.claims.ledger import Source
from probes.claims.rules import SURE, Test, above, below, every, nothing, some, told
from probes.results.gate import TRAINED
from probes.results.statistics import Interval, over_runs
from probes.results.tables import Table

from .. import sinks_claims
from ..learnt import PASSED, STREAMS, by_stream, gate, learning, name_of, scaled, untrained
from ..rules import Judged, Lacks, at, by_parts, decided, each_above, judged, known, need, over_each, places
from .training import FIRST, LAST, MIDDLE, PAIRS, SCALES, TRAINING

SAME = 0.01  # of accuracy; a smaller change of a gap is nothing
EVEN = 0.02  # of accuracy; a smaller gap is no bias: of three runs' 10,000 sequences chance alone gives half of that


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
    return [
        Table(f"Gap ({', '.join(PAIRS)}; mean over seeds), by training data", (*dims, *trainings), gaps),
        Table(title, (*dims, *trainings), levels),
        learning(ds),
        *sinks_claims.tables(ds),
    ]


def _signed(values: np.ndarray) -> str:
    return "-" if np.isnan(values).any() else ", ".join(f"{value:+.3f}" for value in values)


def _level(cell: xr.Dataset) -> str:
    if not cell["gap"].notnull().any():
        return "-"
    ends = cell["accuracy_by_position"].mean("seed").sel(position=[FIRST, MIDDLE, LAST]).values
    loss = float(cell["training_loss"].isel(step=-1).mean("seed"))
    return f"{', '.join(f'{value:.2f}' for value in ends)}; {loss:.2f}"


# -- statements, for each scale of the data by itself; the paper's residual streams are off unless named

wu = Source("[Wu]", "wu-toy")
TASK = "In the in-context retrieval task"
GAP = "gap (accuracy with the earlier of two identical items right, less that with the later right)"
INTERVAL = "by the 95 % interval over runs"
GATE = f"{PASSED}, whatever data they were trained on"
RISES = f"the mean {GAP} rises from the least to the largest depth, {INTERVAL}. {GATE}"
LOWER = f"the mean {GAP} is lower than without positional encoding, {INTERVAL}, at every depth. {GATE}"
SHIFTS = (
    f"against unbiased data the {GAP} shifts that way, {INTERVAL}, under every encoding and depth whose toys pass. "
    f"{GATE}"
)
SAME_SIGN = (
    f"in both kinds of models every {GAP} has the same sign, {INTERVAL}, or lies within {EVEN:g} of 0, by the 90 % "
    f"interval. {GATE}"
)


def stated(
    name: str, where: str, claim: str, *, rule: str, kind: Kind = "published", **given: Any
) -> Callable[[Callable[..., Judged]], Callable[..., Judged]]:
    """Decorate the rule that judges a statement at every scale of the data, each by itself."""

    def state(function: Callable[..., Judged]) -> Callable[..., Judged]:
        for scale in SCALES:
            text, place = f"{TASK} {claim} ({scaled(scale)}).", f"section 5{where and ', '}{where}"
            wu(f"{name}-{scale}", place, text, rule=rule, kind=kind, scale=scale, **given)(function)
        return function

    return state


def claims(ds: xr.Dataset) -> list[Claim]:
    """The statements; one that was not measured at one scale has no row there if the other has one."""
    ds = ds[[name for name, values in ds.items() if {"step", "query"}.isdisjoint(values.dims)]]  # what rules read
    accuracy, states = gate(ds)
    shared: dict[str, Any] = {"done": ds.where(states == "trained"), "untrained": untrained(ds, accuracy, states)}
    rows: dict[str, list[Claim]] = {}
    for claim in [*judged(wu, ds, **shared), *sinks_claims.claims(ds, **shared)]:
        words = [word for word in claim.id.split("-") if word not in SCALES and not word.isdecimal()]
        rows.setdefault("-".join(words), []).append(claim)
    measured = [[claim for claim in same if claim.verdict != "not measured"] or same[:1] for same in rows.values()]
    return [claim for same in measured for claim in same]


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


@stated(
    "learns",
    "setting",
    "toys under a causal mask learn to retrieve from unbiased data, with every encoding, with and without residual stream",
    rule=f"accuracy on novel classes is {TRAINED:g} or more, {INTERVAL}, in every setting",
    kind="ours",
    gated=False,
)
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


@stated(
    "causal-favours-earlier",
    "no encoding",
    "a causal mask alone favours earlier items, also after unbiased training",
    rule=f"the {GAP} is above 0, {INTERVAL}, for every pair of positions and every depth. {GATE}",
    positional="none",
    training="unbiased",
    pairs=list(PAIRS),
)
@stated(
    "data-last",
    "biased data",
    "a causal mask without positional encoding cannot follow answers that stand last in training",
    rule=f"trained so, the {GAP} does not fall below -{EVEN:g}, {INTERVAL}, for first and last and for middle and last, at "
    f"every depth: neither the first nor the middle item loses to the last. {GATE}",
    positional="none",
    training="last",
    pairs=["first-last", "middle-last"],
    or_even=True,
)
@by_stream
def earlier(
    ds: xr.Dataset, scale: str, training: str, pairs: list[str], positional: str = "none", or_even: bool = False
) -> Judged:
    """The earlier item is preferred, or neither is."""
    gap = gap_of(ds, scale, positional, training).sel(pair=pairs)
    words = ". ".join(f"{pair}: {by_depth(one)}" for (pair,), one in places(gap, "pair"))
    return decided(words, each_above(gap, -EVEN if or_even else 0))


BACK = "more depth moves the bias back to earlier items"
GROWS = "the bias of a causal mask alone toward earlier items grows with depth"


@stated("causal-grows-with-depth", "no encoding", GROWS, rule=RISES, positional="none")
@stated("decay-depth-favours-earlier", "decay mask", f"under a decay mask {BACK}", rule=RISES, positional="decay")
@stated("rope-depth-favours-earlier", "RoPE", f"with RoPE {BACK}", rule=RISES, positional="rope")
@by_stream
def grows(ds: xr.Dataset, scale: str, positional: str) -> Judged:
    """The bias toward earlier items is larger in the deepest models than in the shallowest."""
    mean = gap_of(ds, scale, positional, "unbiased").mean("pair").sortby("depth")
    need(mean.sizes["depth"] > 1)
    rise = mean.isel(depth=-1, drop=True) - mean.isel(depth=0, drop=True)
    return decided(f"mean of the three gaps: {by_depth(mean)}", each_above(rise))


RECENT = "moves the bias toward recent items"


@stated("decay-favours-recent", "decay mask", f"a decay mask {RECENT}", rule=LOWER, positional="decay", than="none")
@stated("rope-favours-recent", "RoPE", f"RoPE {RECENT}", rule=LOWER, positional="rope", than="none")
@by_stream
def recency(ds: xr.Dataset, scale: str, positional: str, than: str = "none") -> Judged:
    """One encoding moves the bias toward recent items, against another or none."""
    plain, other = (gap_of(ds, scale, name, "unbiased") for name in (than, positional))
    less = (plain - other).mean("pair").dropna("depth", how="all")
    need(less.size)
    return decided(
        f"mean of the three gaps with {than} less that with {positional}: {by_depth(less, 2)}", each_above(less)
    )


FOLLOWED = {
    "first": {"first": {"first-middle": 1, "first-last": 1}},
    "middle": {"middle": {"first-middle": -1, "middle-last": 1}},
}
STAND_FIRST = "answers that stand first in training pull the bias to the first item"
STAND_MIDDLE = "answers that stand in the middle in training pull the bias to the middle"


@stated("data-first", "biased data", STAND_FIRST, rule=SHIFTS, training=FOLLOWED["first"])
@stated("data-middle", "biased data", STAND_MIDDLE, rule=SHIFTS, training=FOLLOWED["middle"])
@by_stream
def follows(ds: xr.Dataset, scale: str, training: Mapping[str, Mapping[str, int]]) -> Judged:
    """Biased data shift gaps in these directions, against unbiased data, whatever the encoding."""
    parts = []
    for name, (answers, signs) in product(ds["positional"].values.tolist(), training.items()):
        with suppress(Lacks):
            change = gap_of(ds, scale, name, answers) - gap_of(ds, scale, name, "unbiased")
            for pair, sign in signs.items():
                shift = change.sel(pair=pair).dropna("depth", how="all")
                need(shift.size)
                parts.append((f"{name}, {answers}, {pair}: {by_depth(shift, 2)}", each_above(sign * shift)))
    return by_parts(parts, before="shift of the gap: ", between=". ")


@stated(
    "full-even",
    "full mask",
    "a full mask without positional encoding has no position bias",
    rule=f"after unbiased training the 90 % interval over runs of every {GAP} lies within {EVEN:g}. {GATE}",
    kind="ours",
    mask="full",
    positional=["none"],
)
@stated(
    "full-even-encoded",
    "full mask",
    "a full mask has no position bias after unbiased training, with sinusoidal encodings and with RoPE",
    rule=f"the 90 % interval over runs of every {GAP} lies within {EVEN:g}. {GATE}",
    kind="ours",
    mask="full",
    positional=["sinusoidal", "rope"],
)
@by_stream
def even(ds: xr.Dataset, scale: str, mask: str, positional: Sequence[str]) -> Judged:
    """No gap of unbiased training differs from 0 by more than a margin."""
    parts = []
    for name in positional:
        with suppress(Lacks):
            gap = gap_of(ds, scale, name, "unbiased", mask)
            tests = [nothing(one, EVEN) for one in over_each(gap)]
            words = "; ".join(f"{pair} {by_depth(one)}" for (pair,), one in places(gap, "pair"))
            parts.append((f"{name}: {words}", every(tests)))
    return by_parts(parts, between=". ")


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
                words = f"{positional}, {answers}, depth {depth}: {' and '.join(map(_told, values))}"
                yield words, every([each_above(one) for one in values])


@by_stream
def in_some(ds: xr.Dataset, scale: str, differences: Differences, training: Sequence[str]) -> Judged:
    """Under some encoding and depth, trained on such answers, all these differences are above 0."""
    found = list(by_kind(ds, scale, differences, training))
    need(found)
    return Judged("; ".join(words for words, _ in found), some([test for _, test in found])(SURE))


def lost(gap: xr.DataArray, _: xr.DataArray) -> list[xr.DataArray]:
    """By how much the first wins over the middle, and the last."""
    return [gap.sel(pair="first-middle"), -gap.sel(pair="middle-last")]


@stated(
    "lost-in-the-middle-gaps",
    "lost in the middle",
    "the middle loses against both ends after training on answers first or last, under some encodings",
    rule=f"the {GAP} is against the middle item, {INTERVAL}, both with the first and with the last, under some encoding and "
    f"depth. {GATE}",
    training=["first-and-last"],
)
def lost_by_gaps(ds: xr.Dataset, scale: str, training: Sequence[str]) -> Judged:
    """The first wins over the middle, the last too."""
    return in_some(ds, scale=scale, differences=lost, training=training)


@stated(
    "lost-in-the-middle-accuracy",
    "lost in the middle",
    "the middle items are answered worse than both ends after training on answers first or last, under some encodings",
    rule=f"accuracy at the middle items is below that at either end, {INTERVAL}, under some encoding and depth. {GATE}",
    training=["first-and-last"],
)
def lost_by_accuracy(ds: xr.Dataset, scale: str, training: Sequence[str]) -> Judged:
    """The middle items are answered worse than either end."""

    def worse(_: xr.DataArray, curve: xr.DataArray) -> list[xr.DataArray]:
        inner = curve.sel(position=[MIDDLE - 1, MIDDLE]).mean("position")
        return [curve.sel(position=end) - inner for end in (FIRST, LAST)]

    return in_some(ds, scale=scale, differences=worse, training=training)


@stated(
    "lost-in-the-middle-two-ends",
    "lost in the middle",
    "the middle does not lose against both ends unless answers stand at both ends in training",
    rule=f"trained on answers that stand anywhere, first, in the middle or last, the {GAP} is never against the middle item "
    f"with both the first and the last, {INTERVAL}, under a causal mask with every encoding and depth, with and without "
    f"residual stream. {GATE}",
    kind="ours",
    training=["unbiased", "first", "middle", "last"],
)
def never_lost(ds: xr.Dataset, scale: str, training: Sequence[str]) -> Judged:
    """Under no encoding and depth, with or without residual stream, does the middle lose against both ends."""
    parts = []
    for residual, words in STREAMS.items():
        with suppress(Lacks):
            parts += [
                (f"{words}, {one}", test) for one, test in by_kind(at(ds, residual=residual), scale, lost, training)
            ]
    need(parts)
    verdict = some([test for _, test in parts])(SURE)
    other: dict[Verdict, Verdict] = {"holds": "does not hold", "does not hold": "holds"}
    return Judged("; ".join(words for words, _ in parts), other.get(verdict, verdict))


@stated(
    "residual-weaker",
    "residual",
    "residual streams amplify or reduce the position bias after unbiased training",
    rule=f"with them the mean {GAP} is further from 0 or nearer to it, {INTERVAL}, under some encoding and depth where no "
    f"gap changes its sign; it does not hold where all 90 % intervals lie within {SAME:g}. {GATE}",
)
def residual_weaker(ds: xr.Dataset, scale: str) -> Judged:
    """Residual streams change the size of some bias; where a gap changes its sign they do something else."""
    changes: list[Interval] = []
    turned = 0
    for _, gap in places(at(world(ds, scale)["gap"], training="unbiased"), "positional", "depth"):
        without, those = (at(gap, residual=residual).drop_vars("residual") for residual in STREAMS)
        same_signs = known(agreement, without, those)
        if same_signs is not None and same_signs.verdict == "does not hold":
            turned += 1
        elif same_signs is not None:
            changes += over_each(abs(those.mean("pair")) - abs(without.mean("pair")))
    need(changes or turned)
    more, less = ([test(change, 0) for change in changes] for test in (above, below))
    up, down = (sum(test(SURE) == "holds" for test in tests) for tests in (more, less))
    measured = (
        f"kinds of models: {len(changes) + turned}; mean gap further from 0 with residual streams: {up}, nearer: {down}; "
        f"a gap changes its sign: {turned}"
    )
    if not changes:
        return Judged(measured, "undecided")
    same = every([nothing(change, SAME) for change in changes])(SURE) == "holds"
    return Judged(measured, "does not hold" if same else some([*more, *less])(SURE))


VECTORS = (
    "vectors of standard deviation 1/sqrt(d), as in the paper's text, and 1/d, as in its program, give the same position "
    "biases"
)


@stated(
    "fixed-vocabulary",
    "",
    "a fixed vocabulary with anisotropy 0.75 gives the same position biases as Gaussian data",
    rule=SAME_SIGN,
    one={"data": "gaussian"},
    other={"data": "fixed"},
)
@wu(
    "text-and-program",
    "section 5, text and program",
    f"{TASK} {VECTORS}.",
    rule=SAME_SIGN,
    kind="ours",
    one={"scale": "text"},
    other={"scale": "program"},
)
def alike(
    ds: xr.Dataset,
    one: dict[str, str],
    other: dict[str, str],
    scale: str = "",
    training: Sequence[str] = tuple(TRAINING),
) -> Judged:
    """Two kinds of data give the same biases."""
    gaps = (world(ds, **{"scale": scale} | which)["gap"] for which in (one, other))
    return agreement(*(gap.sel(training=gap["training"].isin(training)) for gap in gaps))


def agreement(one: xr.DataArray, other: xr.DataArray) -> Judged:
    """Whether every gap has the same sign in both, or is none in both."""
    both = one.notnull().any("seed") & other.notnull().any("seed")
    need(bool(both.any()))
    tests = [same_sign(*ends) for ends in zip(over_each(one.where(both)), over_each(other.where(both)), strict=True)]
    same, turned = (sum(test(SURE) == verdict for test in tests) for verdict in ("holds", "does not hold"))
    measured = f"gaps: {len(tests)}; same sign in both, or near 0 in both: {same}; opposite signs: {turned}"
    return Judged(measured, every(tests)(SURE))


def same_sign(one: Interval, other: Interval) -> Test:
    """Whether both lie on the same side of 0, or both near it."""
    near = every([nothing(end, EVEN) for end in (one, other)])

    def test(level: float) -> Verdict:
        if near(level) == "holds":
            return "holds"
        ways = [[side(end, 0)(level) == "holds" for side in (above, below)] for end in (one, other)]
        return "undecided" if [False, False] in ways else "holds" if ways[0] == ways[1] else "does not hold"

    return test
