"""Tests of intervals, and who counts for which population: on known answers."""

import math
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from scipy.stats import norm, t, ttest_ind

from probes.claims.evidence import runs_of
from probes.claims.readings import of_profiles, over_training
from probes.claims.rules import (
    SURE,
    above,
    below,
    beside_null,
    between,
    drawn,
    every,
    near,
    nothing,
    some,
    sure,
)
from probes.results.curves import ShiftNull
from probes.results.folder import Collected
from probes.results.statistics import Interval, between_runs, one_more, over_runs
from probes.results.ushape import shape_of


def test_an_interval_on_one_side_decides():
    for found, verdict in (
        (Interval(1.5, 1.1, 2), "holds"),
        (Interval(0.7, 0.5, 0.9), "does not hold"),
        (Interval(1, 0.9, 1.1), "undecided"),
        (Interval(1.5, math.nan, math.nan), "undecided"),
        (Interval(math.nan, math.nan, math.nan), "not measured"),
        (Interval(1, 1, 1), "does not hold"),  # strictly above
    ):
        assert above(found, 1)(SURE) == verdict
        assert below(Interval(-found.value, -found.high, -found.low), -1)(SURE) == verdict
    assert between(Interval(1, 1, 2), 1, 2)(SURE) == "holds"  # ends belong to it


def test_a_number_is_met_within_a_quarter_and_a_correlation_within_a_hundredth():
    for number, low, high, verdict in (
        *((0.4, 0.31, 0.49, "holds"), (0.4, 0.29, 0.4, "undecided"), (0.4, 0.6, 0.7, "does not hold")),
        *((0.99, 0.985, 0.995, "holds"), (0.99, 0.97, 0.99, "undecided"), (0.99, 0.9, 0.95, "does not hold")),
        (0.99, 0.999, 1.001, "holds"),
    ):
        assert near(Interval(low, low, high), number, correlation=number > 0.9)(SURE) == verdict


def test_a_published_run_is_met_where_it_could_be_one_of_ours():
    run = one_more(over_runs([1.0, 2.0, 4.0, 5.0]))
    reach = t.ppf(0.975, 3) * np.std([1, 2, 4, 5], ddof=1) * math.sqrt(1 + 1 / 4)
    assert run[:3] == pytest.approx((3, 3 - reach, 3 + reach))
    for off, verdict in ((reach - 0.01, "holds"), (reach + 0.09, "holds"), (reach + 0.11, "does not hold")):
        assert {drawn(run, 3 + way * off, 0.1, 13.0)(SURE) for way in (-1, 1)} == {verdict}
    assert drawn(run, 3.0, 0.1, 12.0)(SURE) == "undecided"  # 2 * 6.4 wide
    assert drawn(run, 3 + 1.1 * reach, 0.1, 13.0)(0.99) == "holds"
    assert drawn(one_more(over_runs([1.0])), 1.0, 0.1, 9.0)(SURE) == "undecided"


def test_a_correlation_is_decided_where_interval_and_shifts_agree():
    for low, p, verdict in ((0.1, 0.05, "holds"), (0.1, 0.06, "undecided"), (-0.1, 0.01, "undecided")):
        assert beside_null(above(Interval(0.5, low, 0.9), 0), ShiftNull(p, 0.4))(SURE) == verdict
        assert beside_null(below(Interval(-0.5, -0.9, -low), 0), ShiftNull(p, 0.4))(SURE) == verdict
    assert beside_null(above(Interval(-0.5, -0.9, -0.1), 0), ShiftNull(0.03, 0.4))(SURE) == "does not hold"


def test_nothing_there_takes_the_90_percent_interval():
    margin = 0.3
    wide = margin * float(norm.ppf(0.975) / norm.ppf(0.95)) * 0.999  # 95 % reaches beyond the margin, 90 % just not
    assert nothing(Interval(0.0, -wide, wide), margin)(SURE) == "holds"
    assert nothing(Interval(0.0, -1.01 * wide, 1.01 * wide), margin)(SURE) == "undecided"
    assert nothing(Interval(0.5, 0.4, 0.6), margin)(SURE) == "does not hold"
    assert nothing(Interval(0.35, 0.295, 0.405), margin)(SURE) == "undecided"


def test_in_every_model_and_in_some_where_a_failure_among_several_has_to_be_the_surer():
    yes, no, open_ = sure(True), sure(False), above(Interval(0, -1, 1), 0)
    in_every = {"holds": ([yes, yes], [sure(None), yes]), "undecided": ([yes, open_],), "does not hold": ([open_, no],)}
    assert all(every(tests)(SURE) == verdict for verdict, several in in_every.items() for tests in several)
    in_some = {"holds": [open_, yes], "undecided": [no, open_], "does not hold": [no, no], "not measured": [sure(None)]}
    assert all(some(tests)(SURE) == verdict for verdict, tests in in_some.items())
    assert every([])(SURE) == "not measured"
    needed = float(norm.ppf(1 - 0.025 / 5) / norm.ppf(0.975))  # at level 1 - 0.05 / 5, of an interval that reaches 1
    for off, verdict in ((0.99 * needed, "undecided"), (1.01 * needed, "does not hold")):
        found = Interval(-off, -off - 1, -off + 1)
        assert above(found, 0)(SURE) == "does not hold"
        assert every([*[above(Interval(5, 4, 6), 0)] * 4, above(found, 0)])(SURE) == verdict


def test_intervals_over_runs_are_student_s_at_any_level_and_welch_s_of_three_of_each():
    values = np.array([1.0, 2.0, 4.0, 5.0])
    reach = t.ppf(0.995, 3) * values.std(ddof=1) / 2
    assert over_runs(values).at(0.99) == pytest.approx((3 - reach, 3 + reach))
    low, high = Interval(2.0, 0.0, 1.0).at(0.99)  # an estimate that its resamples do not reach
    assert (low < 0, high) == (True, 1.0)
    a, b = [1.0, 1.2, 0.9, 1.4], [2.0, 2.6, 1.9]
    assert over_training(a, b)[1:3] == pytest.approx(tuple(ttest_ind(a, b, equal_var=False).confidence_interval()))
    assert between_runs([1.0, 1.0], [2.0, 2.0])[:3] == (-1, -1, -1)
    assert all(math.isnan(x.low) for x in (between_runs(a, b[:1]), over_training(a[:2]), over_training(a, b[:2])))
    assert over_training(a)[:3] == over_runs(a)[:3]


def test_runs_are_the_bundled_model_and_its_other_seeds():
    of = {"leakage": ("tiny-llama", "tiny-llama-ntk"), "controlled/leakage": ("runs/tiny-llama-seed1", "tiny-llama-x")}
    collected = Collected(Path(), {kind: dict.fromkeys(names, xr.Dataset()) for kind, names in of.items()})
    assert list(runs_of(collected, "leakage", "tiny-llama")) == ["tiny-llama", "runs/tiny-llama-seed1"]


def test_a_number_of_a_profile_has_documents_as_units():
    random, curve = np.random.default_rng(0), 1 + 9 * np.exp(-np.arange(64) / 2)
    noise = np.repeat(random.normal(0, 0.1, (12, 64)), 2, axis=0)  # of twelve documents of two prompts
    values = curve * np.exp(noise + random.normal(0, 2, (24, 1)))

    def primacy(unit: np.ndarray, *seeds: np.ndarray) -> Interval:
        return of_profiles(lambda curve: math.log(shape_of(curve).primacy), unit, seeds)

    found, alone = primacy(np.arange(24) // 2, values), primacy(np.arange(24), values)
    assert found.freedom == 11
    # A prompt's own scale moves no geometric mean's shape.
    assert found.low < math.log(shape_of(curve).primacy) < found.high
    assert alone.high - alone.low < found.high - found.low
    # Fresh models are units themselves.
    assert primacy(np.arange(8), values[:8], values[8:16], values[16:]).freedom == 2
