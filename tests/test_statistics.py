"""Intervals against samples whose truth is known: heavy-tailed, clustered, with few units."""

import math

import numpy as np
import pytest
import xarray as xr
from scipy.stats import t as student

from probes.results.curves import shift_null, spearman
from probes.results.statistics import Interval, ends, holm, jackknifed, numbered, over_runs, resampling, units
from probes.results.ushape import shape_of

LENGTH = 64
PLACE = np.arange(LENGTH)
U = np.exp(np.exp(-PLACE / 3) + 1.5 * np.exp(-(LENGTH - 1 - PLACE) / 2))


def log_primacy(profiles: np.ndarray) -> float:
    return math.log(shape_of(np.exp(np.log(profiles).mean(0))).primacy)


def clustered(documents: int, each: int, random: np.random.Generator) -> np.ndarray:
    """Profiles [prompt, position] around `U`: Student's t with 3 degrees of freedom, shared by the prompts of a document."""
    early = np.exp(-PLACE / 5)
    of_document = 0.6 * random.standard_t(3, (documents, 1, 1)) + 0.4 * random.standard_t(3, (documents, 1, 1)) * early
    of_prompt = 0.3 * random.standard_t(3, (documents, each, 1)) * early
    noise = of_document + of_prompt + 0.5 * random.standard_t(3, (documents, each, LENGTH))
    return (U * np.exp(noise)).reshape(documents * each, LENGTH)


@pytest.mark.parametrize(("documents", "each"), [(16, 2), pytest.param(8, 2, marks=pytest.mark.slow)])
def test_intervals_of_primacy_cover_and_are_no_wider_than_they_need(documents, each):
    random, truth = np.random.default_rng(documents), math.log(shape_of(U).primacy)
    number = np.repeat(np.arange(documents), each)
    found = np.array([jackknifed(log_primacy, clustered(documents, each, random), number)[:3] for _ in range(500)])
    value, low, high = found.T
    assert 0.92 <= np.mean((low <= truth) & (truth <= high)) <= 0.98
    assert np.median(high - low) <= 1.3 * np.subtract(*np.percentile(value, (97.5, 2.5)))


def test_documents_are_units_drawn_whole_within_halves():
    drawn = resampling(8, 500, 0, (slice(0, 4), slice(4, 8)), list("aabcxyyy"))
    assert (drawn[0] == 1).all()
    assert (drawn[:, 0] == drawn[:, 1]).all()
    assert (drawn[:, 5] == drawn[:, 6]).all()
    assert (drawn[1:, [0, 2, 3]].sum(1) == 3).all()  # as many documents as the half has
    assert (drawn[1:, [4, 5]].sum(1) == 2).all()
    assert (drawn[1:, 0] != drawn[1:, 2]).any()
    prompts = resampling(4, 50, 0, None, ["a"] * 4)  # drawn where there is one document
    assert (prompts[1:].sum(1) == 4).all()
    assert (prompts[1:] != 1).any()
    ds = xr.Dataset({"x": ("prompt", [1.0, 2.0, 3.0])})
    assert units(ds).tolist() == [0, 1, 2]
    assert units(ds.assign_coords(document=("prompt", ["b", "a", "b"]))).tolist() == [0, 1, 0]
    assert numbered(["a", "a"]).tolist() == [0, 1]


def test_smooth_curves_of_no_relation_are_within_the_null_of_their_shifts():
    """Random walks: some 5 % lie outside, whose correlations have a deviation of 0.4; a curve and its own noisy copy do."""
    random = np.random.default_rng(0)
    walks = random.normal(size=(400, 2, 36)).cumsum(-1)
    nulls = [shift_null(*pair) for pair in walks]
    assert 0.02 <= np.mean([null.p <= 0.05 for null in nulls]) <= 0.08
    truth = np.std([spearman(*pair) for pair in walks])
    assert 0.35 < np.mean([null.spread for null in nulls]) < truth < 0.55
    assert np.mean([shift_null(one, one + 0.3 * random.normal(size=36)).p <= 0.05 for one, _ in walks[:50]]) > 0.8
    assert np.isnan(shift_null(np.arange(5.0), np.ones(5)).p)


def test_what_tells_nothing_has_no_interval():
    assert np.isnan(jackknifed(lambda x: float(x.mean()), np.ones((3, 2)), np.zeros(3, int))[1:3]).all()
    assert np.isnan(over_runs([1.0])[1:3]).all()
    assert np.isnan(over_runs([])[:3]).all()
    low, high = ends(np.array([[np.nan, 1.0, 1.0], [2.0, 0.0, np.nan], [3.0, 2.0, np.nan]]))
    assert np.isnan([low[[0, 2]], high[[0, 2]]]).all()
    assert (low[1], high[1]) == pytest.approx((0.05, 1.95))
    assert np.isnan(ends(np.ones((1, 2)))).all()


def test_holm_s_order():
    """The smallest p has to be at most 0.05 / 3, the next 0.05 / 2, the last 0.05; behind one that is not, none counts."""

    def of(*p: float) -> Interval:
        t = student.isf(np.array(p) / 2, 7)
        return Interval(t, t - student.ppf(0.975, 7), t + student.ppf(0.975, 7), 7)  # type: ignore[arg-type]

    assert holm(of(0.03, 0.01, 0.02), 7).tolist() == [True] * 3
    assert holm(of(0.04, 0.03, 0.018, np.nan), 7).tolist() == [False] * 4
    assert holm(of(0.04, 0.03, 0.016), 7).tolist() == [False, False, True]
