"""Uniform attention's averages: against exact fractions, integrals, and curves of known share of attention."""

import itertools
import math
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad

from probes.errors import InputError
from probes.results.curves import rms_log_error
from probes.theory.cesaro import cesaro_bins, cesaro_density, cesaro_point_mass, cesaro_row, fit_alpha


def row_twin(length: int, alpha: float, windows: list[int | None], query: int) -> np.ndarray:
    """Row `query` of N(top) ... N(lowest) from whole matrices of fractions."""
    share: Any = Fraction(alpha)  # a float is a fraction, too, exactly
    i, j = np.indices((length, length)).astype(object)
    row = share * 0 + (j[0] == query % length)
    for window in reversed(windows):
        width = length if window is None else window
        row = row @ ((1 - share) * (i == j) + share * ((j <= i) & (i < j + width)) / np.minimum(i + 1, width))
    return row.astype(float)


def density_twin(x: float, blocks: int, alpha: float) -> float:
    """The continuous part of the limit, term by term."""
    chances = {k: math.comb(blocks, k) * (1 - alpha) ** (blocks - k) * alpha**k for k in range(1, blocks + 1)}
    return sum(p * math.log(1 / x) ** (k - 1) / math.factorial(k - 1) for k, p in chances.items())


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_cesaro_row_is_a_row_of_the_product(data):
    length = data.draw(st.integers(1, 8))
    window = st.none() | st.integers(1, 9)
    blocks = data.draw(st.integers(0, 4))
    windows = data.draw(window | st.lists(window, min_size=blocks, max_size=blocks))
    query = data.draw(st.integers(-length, length - 1))
    alpha = data.draw(st.sampled_from([0.0, 1.0]) | st.floats(0.01, 1))
    found = cesaro_row(length, blocks, alpha=alpha, window=windows, query=query)
    listed = windows if isinstance(windows, list) else [windows] * blocks
    # Only relative errors: an entry that is exactly zero has to be exactly zero.
    np.testing.assert_allclose(found, row_twin(length, alpha, listed, query), rtol=1e-13)
    assert found.sum() == pytest.approx(1, abs=1e-14)


def test_density_is_its_sum_of_terms_with_its_ends_and_the_point_mass():
    x = np.array([[1e-9, 0.01, 0.3], [0.5, 0.999, 1.0]])
    for blocks, alpha in ((1, 1.0), (12, 0.8)):
        expected = [[density_twin(value, blocks, alpha) for value in row] for row in x]
        np.testing.assert_allclose(cesaro_density(x, blocks, alpha=alpha), expected, rtol=1e-11)
    assert cesaro_density([0.0, 1.0], 1).tolist() == [1, 1]
    assert cesaro_density([0.0, 1.0], 3).tolist() == [math.inf, 0]
    assert cesaro_density([0.0, 0.5, 1.0], 3, alpha=0.0).tolist() == [0, 0, 0]
    # Without residuals there is nothing at the query; with them one block of three has averaged.
    assert cesaro_density([0.0, 1.0], 3, alpha=0.25) == pytest.approx([math.inf, 3 * 0.75**2 * 0.25])
    assert [cesaro_point_mass(*of) for of in ((3, 0.5), (2, 1.0), (7, 0.0))] == [1 / 8, 0, 1]


@pytest.mark.parametrize(("blocks", "alpha"), [(6, 1.0), (4, 0.6)])
def test_bins_are_integrals_of_the_density(blocks, alpha):
    length = 10
    bins = cesaro_bins(length, blocks, alpha=alpha)
    # By ln 1/x = u: the density is infinite at the beginning.
    edges = [200, *(math.log(length / j) for j in range(1, length + 1))]
    expected = [
        quad(lambda u: density_twin(math.exp(-u), blocks, alpha) * math.exp(-u), low, high, epsabs=0, epsrel=1e-11)[0]
        for high, low in itertools.pairwise(edges)
    ]
    expected[-1] += (1 - alpha) ** blocks
    np.testing.assert_allclose(bins, expected, rtol=1e-9)
    assert cesaro_bins(300, 64, alpha=alpha).sum() == pytest.approx(1, abs=1e-12)
    # ln(1/x) is between u and u (1 + 1/T) for u = 1/T in a last bin, which integrates to u^24 / 24! within that.
    log = 24 * math.log(1 / 1024) - math.lgamma(25)
    assert math.log(cesaro_bins(1024, 24)[-1]) == pytest.approx(log, abs=24 / 1024)


@pytest.mark.parametrize(("blocks", "alpha", "window"), [(4, 1e-3, None), (6, 0.8, [5, None, 7, 7, None, 12])])
def test_fit_recovers_the_share_of_attention(blocks, alpha, window):
    profile = 2e5 * cesaro_row(80, blocks, alpha=alpha, window=window, query=70)
    profile[75:] = 7.0  # after the query: none of its business
    found = fit_alpha(profile, blocks, window=window, query=-10)
    assert found.alpha == pytest.approx(alpha, rel=1e-6)
    assert found.error < 1e-6
    np.testing.assert_allclose(found.curve[:75], profile[:75], rtol=1e-5)
    assert not found.curve[71:].any()
    assert fit_alpha(cesaro_row(40, 3), 3).alpha == 1  # no residuals


def test_fit_of_a_noisy_curve_is_the_best_there_is():
    noise = np.exp(0.3 * np.random.default_rng(0).standard_normal(60))
    profile = noise * cesaro_row(60, 6, alpha=0.4)
    found = fit_alpha(profile, 6)

    def error(alpha: float) -> float:
        return rms_log_error(cesaro_row(60, 6, alpha=alpha), profile, free_scale=True)

    assert found.error == pytest.approx(error(found.alpha), rel=1e-12)
    assert found.error == pytest.approx(rms_log_error(found.curve, profile), rel=1e-12)  # the scale is the best one
    assert 0.1 < found.error < min(error(found.alpha * 0.99), error(found.alpha * 1.01))
    assert found.error <= min(error(alpha) for alpha in np.linspace(0.01, 1, 100).tolist())


def test_fit_finds_the_lower_of_two_minima():
    profile = np.exp(-3 * np.linspace(0, 1, 20))
    profile[0], profile[-1] = 1e6, 1e4
    error = [rms_log_error(cesaro_row(20, 4, alpha=a), profile, free_scale=True) for a in (2.5e-4, 0.1, 0.5, 0.9)]
    assert error[0] < error[2] < min(error[1], error[3])  # there are two, and the one in the middle is the worse
    found = fit_alpha(profile, 4)
    assert found.alpha == pytest.approx(2.5e-4, rel=0.05)
    assert found.error <= error[0]


def test_fit_compares_where_both_are_positive():
    profile = np.random.default_rng(4).uniform(0.5, 2, 50) * cesaro_row(50, 3, alpha=0.7, window=6)
    assert np.flatnonzero(profile)[0] == 34  # three blocks reach back 15 positions
    plain = fit_alpha(profile, 3, window=6)
    profile[:34] = 1e-9  # a value where the theory has none
    leaky = fit_alpha(profile, 3, window=6)
    assert (leaky.alpha, leaky.error) == pytest.approx((plain.alpha, plain.error), rel=1e-6)
    # Not watered down by positions out of reach:
    assert plain.error == pytest.approx(rms_log_error(plain.curve[34:], profile[34:]), rel=1e-9)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cesaro_row(5, 2, alpha=1.5), "alpha is 1.5; give a share of attention from 0 to 1"),
        (lambda: cesaro_row(5, 2, window=[3, -1]), "window is -1; give at least 1"),
        (lambda: cesaro_row(5, 2, query=5), "query is 5 for 5 tokens; give from -5 to 4"),
        (lambda: fit_alpha([1.0, -2.0, 1.0, 1.0], 2), "the value -2.0 at position 1"),
        (lambda: fit_alpha([0.0, 0.0, 1.0, 1.0], 2), "both positive at 2 positions; give a profile with at least 3"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(InputError, match=re.escape(message)):
        call()
