"""What an interval says: tests at a level of confidence, verdicts over several of them, and numbers in words.

A statement **holds** where the whole 95 % interval lies on its side, **does not hold** where it lies on the other, and is
**undecided** otherwise. A statement about models in general holds if it holds in each model by that model's own 95 %
interval, and fails if it fails in one of m at level 1 - 0.05/m (`every`); "in some model" is the reverse (`some`). A number
is met within a quarter of it, a correlation within 0.01 (`near`). A published run is met where it lies inside the prediction
interval of our runs (`drawn`). "There is nothing" holds where the 90 % interval lies
within margins fixed beforehand (`nothing`).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np

from ..results.curves import ShiftNull
from ..results.statistics import Interval
from ..results.tables import interval
from ..results.tables import range_told as range_told
from .claim import Verdict, verdict_of

Test: TypeAlias = Callable[[float], Verdict]  # at a level of confidence
Tested: TypeAlias = Test | bool | None  # a bool where no interval is needed; None: nothing is known
Told: TypeAlias = tuple[str, Tested]  # what was measured, in words, and its test

SURE = 0.95
QUARTER, HUNDREDTH = 0.25, 0.01  # how far from a published number, from a published correlation
LISTED = 8  # numbers that a reader takes in one by one


class Lacks(KeyError):
    """The result has not what a statement needs."""


def between(estimate: Interval, low: float | int, high: float | int) -> Test:
    """Holds where the interval lies within [low, high], fails where it lies outside."""

    def test(level: float) -> Verdict:
        if math.isnan(estimate.value):
            return "not measured"
        least, most = estimate.at(level)
        if low <= least and most <= high:
            return "holds"
        return "does not hold" if most < low or least > high else "undecided"

    return test


def above(estimate: Interval, threshold: float | int) -> Test:
    """Holds where the whole interval lies above, fails where none of it does."""
    return between(estimate, math.nextafter(threshold, math.inf), math.inf)


def below(estimate: Interval, threshold: float | int) -> Test:
    """The reverse."""
    return between(estimate, -math.inf, math.nextafter(threshold, -math.inf))


def near(estimate: Interval, published: float, *, correlation: bool = False) -> Test:
    """Within a quarter of a number, or 0.01 of a correlation."""
    if not correlation:
        return between(estimate, published - abs(QUARTER * published), published + abs(QUARTER * published))
    low, high = published - HUNDREDTH, published + HUNDREDTH
    # An interval's end may lie beyond what a correlation can be.
    return between(estimate, -math.inf if low <= -1 else low, math.inf if high >= 1 else high)


def drawn(run: Interval, published: float, margin: float, widest: float) -> Test:
    """Whether a published run could be one of ours: inside the prediction interval `run` (`one_more`), or that near to it.

    An interval at 95 % that is wider than `widest` holds what is not alike, too, and leaves it undecided.
    """

    def test(level: float) -> Verdict:
        least, most = run.at(level)
        if math.isnan(least):  # of a single run
            return "not measured" if math.isnan(run.value) else "undecided"
        if not least - margin <= published <= most + margin:
            return "does not hold"
        low, high = run.at(SURE)
        return "holds" if high - low <= widest else "undecided"

    return test


def nothing(estimate: Interval, margin: float) -> Test:
    """Equivalence by two one-sided tests: at 95 % the 90 % interval lies within the margin."""
    inside = between(estimate, -margin, margin)

    def test(level: float) -> Verdict:
        if inside(2 * level - 1) == "holds":
            return "holds"
        return "undecided" if inside(level) == "holds" else inside(level)

    return test


def sure(holds: bool | None) -> Test:
    """A test without an interval, such as bits that are compared. None: nothing is known."""
    return lambda level: "not measured" if holds is None else verdict_of(holds)


def beside_null(test: Test, null: ShiftNull) -> Test:
    """Decides where both do: the test, and shifts that give as much in a share of 1 - level at most."""
    return lambda level: test(level) if test(level) == "not measured" or null.p <= 1 - level else "undecided"


def every(tests: Iterable[Tested]) -> Test:
    """All have to hold; those not measured do not count."""
    return _several(tests, of_all="holds", of_one="does not hold")


def some(tests: Iterable[Tested]) -> Test:
    """One has to hold; those not measured do not count."""
    return _several(tests, of_all="does not hold", of_one="holds")


def _several(tests: Iterable[Tested], of_all: Verdict, of_one: Verdict) -> Test:
    """`of_all` where all tests give it; `of_one` where one of m does at level 1 - (1 - level) / m."""
    each = [test if callable(test) else sure(test) for test in tests]

    def test(level: float) -> Verdict:
        known = [each_test for each_test in each if each_test(level) != "not measured"]
        if not known:
            return "not measured"
        if all(known_test(level) == of_all for known_test in known):
            return of_all
        stricter = 1 - (1 - level) / len(known)
        return of_one if any(known_test(stricter) == of_one for known_test in known) else "undecided"

    return test


def told(estimate: Interval, form: str = ".3g", change: Callable[[float], float] = float) -> str:
    """An estimate with its interval in words; `change` undoes a logarithm."""
    return interval(*(change(end) for end in estimate[:3]), form=form)


def listed(values: Sequence[float] | np.ndarray, form: str = ".2f") -> str:
    """A few numbers as they are; of more their median, range and count, "0.3 (0.2 to 0.5 in 12 heads)"."""
    if len(values) > LISTED:
        return f"{range_told(values, form)[:-1]} in {len(values)} heads)"
    return ", ".join(format(value, form) for value in values)
