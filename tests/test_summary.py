"""The numbers that stand for a curve: against slow twins, known answers, and invariances."""

import math

import numpy as np
import pytest
import reference
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from probes.errors import InputError
from probes.results import curves
from probes.results.ushape import NUMBERS, numbers, shape_of


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-3, 1e3), min_size=8, max_size=200))
def test_shape_matches_its_definition(curve):
    found, expected = shape_of(curve), reference.ushape(curve)
    for name in NUMBERS:
        assert getattr(found, name) == pytest.approx(expected[name], rel=1e-12)
    smoothed = curves.smooth(curve)  # two minima equal up to rounding may be told apart either way
    assert smoothed[found.trough] == pytest.approx(smoothed[int(expected["trough"])], rel=1e-12)
    assert found.trough_fraction == found.trough / (len(curve) - 1)


def test_shape_of_a_known_curve():
    curve = np.full(100, 2.0)
    curve[0], curve[1:17], curve[83:99], curve[-1], curve[60:65] = 18.0, 8.0, 4.0, 6.0, 1.0
    assert shape_of(curve)[:5] == (9.0, 4.0, 2.0, 3.0, 2.0)
    assert shape_of(curve).trough == 62  # the middle of the dip: a window of 5 lies wholly in it
    assert [shape_of(np.linspace(a, 6 - a, 200)).trough for a in (5, 1)] == [199, 0]
    beyond = shape_of(np.repeat([0.0, 1.0], [90, 10]))  # a window cuts the middle off
    assert np.isnan(beyond[:4]).all()
    assert shape_of(np.repeat([0.0, 1.0], [17, 83])).primacy == 0
    assert np.isnan(list(numbers(np.ones(7)).values())).all()
    for length, arm in ((20, 4), (64, 15), (67, 15), (68, 16), (4096, 16)):  # what lies just outside does not count
        curve = np.ones(length)
        curve[[0, arm + 1, -2 - arm, -1]] = 0.0, 50.0, 50.0, 0.0
        assert (shape_of(curve).arm, shape_of(curve).primacy, shape_of(curve).recency) == (arm, 1, 1), length
        curve[1], curve[-2] = 1 + arm, 1 + 2 * arm
        assert (shape_of(curve).primacy, shape_of(curve).recency) == (2, 3), length


def test_smoothing_averages_about_a_twentieth_and_leaves_lines_alone():
    spike = np.zeros(256)
    spike[100] = 13.0
    assert np.flatnonzero(curves.smooth(spike)).tolist() == list(range(94, 107))
    np.testing.assert_allclose(curves.smooth(spike)[94:107], 1.0)
    np.testing.assert_allclose(curves.smooth(np.arange(256.0)), np.arange(256.0))
    inside = np.random.default_rng(0).uniform(1, 2, 98)
    np.testing.assert_allclose(curves.smooth_between([50, *inside, 80]), [50, *curves.smooth(inside), 80])
    np.testing.assert_array_equal(curves.smooth_between([3.0, 4.0]), [3, 4])


def test_curves_of_other_lengths_or_with_gaps_are_not_compared():
    with pytest.raises(InputError, match="2 and 3 points"):
        curves.spearman([1.0, 2.0], [1.0, 2.0, 3.0])
    for compared in (curves.spearman, curves.rms_log_error):
        with pytest.raises(InputError, match="not finite"):
            compared([1.0, math.nan], [1.0, 2.0])
    assert math.isnan(curves.relative_error([1.0, math.nan], [1.0, 2.0]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=2, max_size=30))
def test_spearman_is_the_correlation_of_ranks(pairs):
    a, b = (list(map(float, values)) for values in zip(*pairs, strict=True))
    if len(set(a)) == 1 or len(set(b)) == 1:
        assert math.isnan(curves.spearman(a, b))
    else:
        assert curves.spearman(a, b) == pytest.approx(spearmanr(a, b).statistic, abs=1e-12)


def test_rms_log_error_of_known_curves():
    a = np.array([1.0, 2.0, 4.0, 8.0])
    for one, other, free, error in (
        (a, a, False, 0),
        (2 * a, a, False, math.log(2)),
        (a, [1.0, 2.0, 4.0, 4.0], False, math.log(2) / 2),
        (a, [1.0, 2.0, 4.0, 4.0], True, math.log(2) * math.sqrt(3) / 4),
        ([0.0, 1.0], [0.0, 1.0], False, 0),
        ([0.0, 1.0], [0.5, 1.0], False, math.inf),
        # The scale is fitted where there is something to fit: 2 at two positions of three, agreement at the third.
        ([0.0, 2.0, 4.0], [0.0, 1.0, 2.0], True, 0),
        ([0.0, 0.0], [0.0, 0.0], True, 0),
    ):
        assert curves.rms_log_error(one, other, free_scale=free) == pytest.approx(error, abs=1e-12)


def test_rms_profile_averages_squares():
    found = curves.rms_profile([[3.0, 0.0], [4.0, 0.0]], [[0.1, 0.2], [0.2, 0.0]])
    mean = math.sqrt((9 + 16) / 2)
    np.testing.assert_allclose(found.mean, [mean, 0])
    np.testing.assert_allclose(found.stderr, [math.hypot(0.3, 0.8) / (2 * mean), 0])
    np.testing.assert_allclose(found.spread, [math.sqrt(0.5), 0])
    assert np.isnan(curves.rms_profile([[3.0, 0.0]]).spread).all()
    assert not curves.rms_profile([[3.0, 0.0]]).stderr.any()


def test_band():
    found = curves.band([[1.0, 0.0, 5.0], [math.nan] * 3, [4.0, 2.0, 5.0]])
    np.testing.assert_allclose(found, [[2, 0, 5], [1, 0, 5], [4, 2, 5]])


def test_profiles_come_by_condition_and_seed():
    values = np.full((2, 3, 4, 9), np.nan)
    values[0, 0], values[1] = 1.0, np.arange(1, 4)[:, None, None]
    dims = ("condition", "seed", "prompt", "position")
    coords = {"condition": ["pretrained", "init"], "seed": [5, 6, 7]}
    both = xr.Dataset({"sensitivity": (dims, values), "stderr": (dims, values / 10)}, coords=coords)
    found = curves.rms_profiles(both)
    assert {condition: len(runs) for condition, runs in found.items()} == {"pretrained": 1, "init": 3}
    np.testing.assert_allclose([run.mean[0] for run in found["init"]], [1, 2, 3])
    np.testing.assert_allclose(found["init"][1].stderr, 0.2 / math.sqrt(4))
    for one in (both.sel(condition="init"), both.sel(condition="init").isel(seed=2), both.isel(seed=2)):
        np.testing.assert_allclose(curves.rms_profiles(one)["init"][-1].mean, 3)
    single = xr.Dataset({"sensitivity": (dims[2:], np.ones((2, 9)))}, attrs={"condition": "init", "seed": 4})
    assert {condition: len(runs) for condition, runs in curves.rms_profiles(single).items()} == {"init": 1}
