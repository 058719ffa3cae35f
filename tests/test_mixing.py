"""The theories of averaging: against exact fractions, integrals, and rollouts of patterns drawn at random."""

from __future__ import annotations

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
from probes.theory.rollout import (
    causal_bound,
    decay_bounds,
    decay_peak,
    decay_rollout,
    prefix_bounds,
    rollout,
    rope_bounds,
    rope_peak,
    rope_rollout,
    visible,
    window_bound,
)

SLACK = 1 + 1e-12  # rounding of sums and products of positive float64 numbers, some hundreds of them

# -------------------------------------------------------------------------------------------- slow twins, from formulas


def row_twin(length: int, alpha: float, windows: list[int | None], query: int, *, exact: bool = True) -> np.ndarray:
    """Row `query` of N(top) ... N(lowest) from whole matrices, of fractions or in float64."""
    share: Any = (
        Fraction(alpha) if exact else alpha
    )  # a float is a fraction, too: exactly the number the fast code is given
    i, j = np.indices((length, length)).astype(object if exact else float)
    row = share * 0 + (j[0] == query % length)
    for window in reversed(windows):
        width = length if window is None else window
        row = row @ ((1 - share) * (i == j) + share * ((j <= i) & (i < j + width)) / np.minimum(i + 1, width))
    return row.astype(float)


def density_twin(x: float, blocks: int, alpha: float) -> float:
    """The continuous part of the limit, term by term."""

    def term(k: int) -> float:
        chance = math.comb(blocks, k) * (1 - alpha) ** (blocks - k) * alpha**k
        return chance * math.log(1 / x) ** (k - 1) / math.factorial(k - 1)

    return sum(map(term, range(1, blocks + 1)))


def softmax_patterns(logits: np.ndarray, loss: np.ndarray) -> np.ndarray:
    """Causal softmax of logits [layer, query, key], less a loss by distance [distance]."""
    weights = np.exp(logits) * falling(loss)
    return weights / weights.sum(-1, keepdims=True)


def falling(loss: np.ndarray) -> np.ndarray:
    """e^{-loss(i-j)} on and below the diagonal."""
    i, j = np.indices((len(loss), len(loss)))
    return np.where(j <= i, np.exp(-loss[i - j]), 0.0)


def random_patterns(mask: np.ndarray, layers: int, seed: int) -> np.ndarray:
    """Row-stochastic patterns [layer, query, key] with nothing outside the mask, entries of a row within a factor 2."""
    entries = np.random.default_rng(seed).uniform(1, 2, (layers, *mask.shape)) * mask
    return entries / entries.sum(axis=-1, keepdims=True)


def at_or_above(products: np.ndarray) -> np.ndarray:
    """P(z_i >= j) [layer, query, key] from P(z_i = j)."""
    return np.cumsum(products[..., ::-1], axis=-1)[..., ::-1]


def decays(loss: np.ndarray, layers: int) -> np.ndarray:
    """Last row, by distance, of the product of `layers` equal matrices e^{-loss(i-j)}, not normalized."""
    return np.linalg.matrix_power(falling(loss), layers)[-1, ::-1]


# ---------------------------------------------------------------------------------------------------- uniform attention


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


@pytest.mark.parametrize(("window", "alpha"), [(None, 1.0), (40, 0.3), ([None, 7, 30, 1] * 6, 1.0)])
def test_small_entries_of_a_deep_row_keep_their_digits(window, alpha):
    length, blocks = 300, 24
    windows = window if isinstance(window, list) else [window] * blocks
    row = row_twin(length, alpha, windows, -1, exact=False)
    found = cesaro_row(length, blocks, alpha=alpha, window=window)
    np.testing.assert_allclose(found, row, rtol=1e-12)
    if alpha == 1:
        assert row[row > 0].min() < 1e-18  # where differences of running sums would leave nothing but rounding


def test_cesaro_row_of_known_values():
    harmonic = [sum(1 / (i + 1) for i in range(j, 6)) / 6 for j in range(6)]
    np.testing.assert_allclose(cesaro_row(6, 2), harmonic)
    assert cesaro_row(100, 6)[-1] == pytest.approx(100.0**-6)
    assert cesaro_row(100, 6, alpha=0.25)[-1] == pytest.approx((0.75 + 0.25 / 100) ** 6)
    # The top block takes half of the query to the position before it, the bottom one spreads that; and vice versa.
    np.testing.assert_allclose(cesaro_row(4, 2, window=[None, 2]), [7 / 24, 7 / 24, 7 / 24, 1 / 8])
    np.testing.assert_allclose(cesaro_row(4, 2, window=[2, None]), [1 / 4 + 1 / 8, 1 / 4, 1 / 4, 1 / 8])


def test_nothing_comes_from_beyond_the_windows():
    row = cesaro_row(60, 3, alpha=0.5, window=[5, 9, 2], query=40)
    assert np.flatnonzero(row).tolist() == list(range(40 - (4 + 8 + 1), 41))


@pytest.mark.parametrize(("blocks", "alpha"), [(1, 1.0), (5, 1.0), (12, 0.8)])
def test_density_is_its_sum_of_terms(blocks, alpha):
    x = np.array([[1e-9, 0.01, 0.3], [0.5, 0.999, 1.0]])
    expected = np.array([[density_twin(value, blocks, alpha) for value in row] for row in x])
    np.testing.assert_allclose(cesaro_density(x, blocks, alpha=alpha), expected, rtol=1e-11)


def test_density_of_known_values():
    assert cesaro_density(math.exp(-20), 64) == pytest.approx(math.exp(63 * math.log(20) - math.lgamma(64)))
    assert cesaro_density([0.0, 1.0], 1).tolist() == [1, 1]
    assert cesaro_density([0.0, 1.0], 3).tolist() == [math.inf, 0]
    assert cesaro_density([0.0, 0.5, 1.0], 3, alpha=0.0).tolist() == [0, 0, 0]
    # Without residuals there is nothing at the query; with them one block of three has averaged.
    assert cesaro_density([0.0, 1.0], 3, alpha=0.25) == pytest.approx([math.inf, 3 * 0.75**2 * 0.25])
    assert [cesaro_point_mass(*of) for of in ((3, 0.5), (2, 1.0), (7, 0.0))] == [1 / 8, 0, 1]


@pytest.mark.parametrize(("blocks", "alpha"), [(1, 1.0), (6, 1.0), (4, 0.6)])
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


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(1, 64), st.floats(0, 1))
def test_bins_sum_to_one(length, blocks, alpha):
    bins = cesaro_bins(length, blocks, alpha=alpha)
    assert bins.min() >= 0
    assert bins.sum() == pytest.approx(1, abs=1e-12)


def test_bins_of_known_values():
    # The integral of ln(1/x) is x + x ln(1/x).
    below = [0, *(b + b * math.log(1 / b) for b in (0.25, 0.5, 0.75, 1))]
    np.testing.assert_allclose(cesaro_bins(4, 2), np.diff(below))
    # ln(1/x) is between u and u (1 + 1/T) for u = 1/T in the last bin, which integrates to u^24 / 24! within that.
    log = 24 * math.log(1 / 1024) - math.lgamma(25)
    assert math.log(cesaro_bins(1024, 24)[-1]) == pytest.approx(log, abs=24 / 1024)


def test_rows_of_long_texts_approach_the_limit():
    rows = {length: cesaro_row(length, 8, alpha=0.3) for length in (100, 1000, 10000)}
    bins = {length: cesaro_bins(length, 8, alpha=0.3) for length in rows}
    off = [np.abs(np.cumsum(rows[length]) - np.cumsum(bins[length])).max() for length in rows]
    assert off[1] < off[0] / 3
    assert off[2] < min(off[1] / 3, 1e-3)


# -------------------------------------------------------------------------------------------------------- fitting alpha


@pytest.mark.parametrize(
    ("blocks", "alpha", "window", "scale"),
    [
        (4, 1e-3, None, 1.0),
        (12, 0.97, None, 2e5),
        (24, 0.6, None, 3e-7),
        (4, 0.4, 9, 2e5),
        (6, 0.8, [5, None, 7, 7, None, 12], 1.0),
    ],
)
def test_fit_recovers_the_share_of_attention(blocks, alpha, window, scale):
    profile = scale * cesaro_row(80, blocks, alpha=alpha, window=window)
    found = fit_alpha(profile, blocks, window=window)
    assert found.alpha == pytest.approx(alpha, rel=1e-6)
    assert found.error < 1e-6
    np.testing.assert_allclose(found.curve, profile, rtol=1e-5)


def test_fit_of_another_query():
    profile = cesaro_row(50, 5, alpha=0.35, query=30)
    profile[40:] = 7.0  # after the query: none of its business
    found = fit_alpha(profile, 5, query=-20)
    assert found.alpha == pytest.approx(0.35, rel=1e-6)
    assert not found.curve[31:].any()
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
    window = 6  # three blocks reach back 15 positions
    profile = np.random.default_rng(4).uniform(0.5, 2, 50) * cesaro_row(50, 3, alpha=0.7, window=window)
    assert np.flatnonzero(profile)[0] == 34
    plain = fit_alpha(profile, 3, window=window)
    leaky = profile.copy()
    leaky[:34] = 1e-9  # a value where the theory has none
    assert fit_alpha(leaky, 3, window=window).alpha == pytest.approx(plain.alpha, rel=1e-6)
    assert fit_alpha(leaky, 3, window=window).error == pytest.approx(plain.error, rel=1e-9)
    # Not watered down by positions out of reach:
    assert plain.error == pytest.approx(rms_log_error(plain.curve[34:], profile[34:]), rel=1e-9)


# -------------------------------------------------------------------------------------------- rollouts and their limits


def test_visible_masks():
    assert visible(3).tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    for i, j in itertools.product(range(9), range(9)):
        assert visible(9)[i, j] == (j <= i)
        assert visible(9, window=4)[i, j] == (i - 4 < j <= i)
        assert visible(9, prefix=3)[i, j] == (j <= i or j < 3)


def test_rollout_is_every_partial_product():
    patterns = random_patterns(visible(6), 4, seed=0)
    found = rollout(patterns)
    residual = rollout(patterns, alpha=0.3)
    assert found.shape == (4, 6, 6)
    for t in range(4):
        plain, mixed = np.eye(6), np.eye(6)
        for layer in range(t + 1):
            plain = patterns[layer] @ plain
            mixed = (0.7 * np.eye(6) + 0.3 * patterns[layer]) @ mixed
        np.testing.assert_allclose(found[t], plain, atol=1e-14)
        np.testing.assert_allclose(residual[t], mixed, atol=1e-14)
    np.testing.assert_array_equal(rollout(patterns, alpha=1.0), found)
    rounded = rollout(patterns.astype(np.float32))
    assert rounded.dtype == np.float64
    np.testing.assert_allclose(rounded, found, atol=1e-6)


def test_rollout_of_uniform_attention_is_the_cesaro_row():
    uniform = visible(7) / visible(7).sum(axis=1, keepdims=True)
    windowed = visible(7, window=3) / visible(7, window=3).sum(axis=1, keepdims=True)
    found = rollout(np.stack([windowed, uniform, windowed]), alpha=0.4)
    np.testing.assert_allclose(found[2, -1], cesaro_row(7, 3, alpha=0.4, window=[3, None, 3]))
    np.testing.assert_allclose(found[1, 5], cesaro_row(7, 2, alpha=0.4, window=[3, None], query=5))


def test_causal_mass_goes_to_the_first_token_at_least_as_fast_as_the_bound():
    length, layers = 9, 60
    patterns = random_patterns(visible(length), layers, 0)
    eps = float(patterns[:, visible(length)].min())
    mass = at_or_above(rollout(patterns))
    bound = causal_bound(length, layers, eps)
    assert bound.shape == (layers, length)
    assert np.all(mass <= bound[:, None, :] * SLACK)
    assert bound[-1, 1] < 0.05  # of 1: the bound says something, even of the slowest position
    assert np.all(mass[-1, :, 1] < 0.05)
    assert np.all(rollout(patterns)[-1, :, 0] > 0.95)


def test_causal_bound_is_attained():
    length, layers, eps = 6, 5, 0.1
    lazy = eps * np.tril(np.ones((length, length)), -1)  # every query rests where it is, as far as eps allows
    lazy += np.diag(1 - lazy.sum(axis=1))
    mass = at_or_above(rollout(np.stack([lazy] * layers)))
    bound = causal_bound(length, layers, eps)
    for j in range(length):
        np.testing.assert_allclose(mass[:, j, j], bound[:, j], rtol=1e-12)


@pytest.mark.parametrize(("length", "window"), [(6, 2), (6, 3), (7, 4), (5, 5), (5, 9)])
def test_mass_under_a_window_goes_to_the_first_token(length, window):
    layers = 400
    mask = visible(length, window=window)
    patterns = random_patterns(mask, layers, window)
    eps = float(patterns[:, mask].min())
    mass = at_or_above(rollout(patterns))
    bound = window_bound(length, layers, eps, window)
    assert np.all(mass <= bound[:, None, :] * SLACK)
    assert np.all(mass[-1, :, 1] < 0.001)
    if window > 2:  # eps^5 is so small that the theorem takes more layers than these
        assert bound[-1, -1] < 0.1


def test_window_bound_waits_for_the_crossing():
    bound = window_bound(7, 9, 0.25, 4)  # two steps of 3 from one end to the other
    for t, j in itertools.product(range(9), range(7)):
        assert bound[t, j] == pytest.approx((1 - j * 0.25**2) ** ((t + 1) // 2))
    wide = window_bound(7, 9, 0.125, 7)
    np.testing.assert_allclose(wide, causal_bound(7, 9, 0.125))
    assert window_bound(1, 3, 0.5, 4).tolist() == [[1], [1], [1]]


@pytest.mark.parametrize("prefix", [1, 3, 8])
def test_mass_under_a_prefix_mask_goes_to_the_prefix(prefix):
    length, layers = 8, 40
    mask = visible(length, prefix=prefix)
    patterns = random_patterns(mask, layers, prefix)
    eps = float(patterns[:, mask].min())
    products = rollout(patterns)
    found = prefix_bounds(length, layers, eps, prefix)
    assert np.all(at_or_above(products) <= found.outside[:, None, :] * SLACK)
    assert np.all(found.outside[:, :prefix] == 1)
    assert np.all(products[:, :, :prefix] * SLACK >= found.share)
    assert found.share == eps
    if prefix < length:
        assert found.outside[-1, prefix] < 0.1
        assert np.all(products[-1, :, prefix:].sum(axis=-1) < 0.1)
    if prefix > 1:
        assert products[-1, :, 0].max() < 0.9  # not to the first token alone, as under a causal mask


# ------------------------------------------------------------------------------------------------------- decay and RoPE


def test_paths_are_counted():
    for t, x in itertools.product(range(4), range(6)):
        stops = itertools.product(range(x + 1), repeat=t)  # the positions after each step but the last
        count = sum(all(a >= b for a, b in itertools.pairwise((x, *path, 0))) for path in stops)
        assert decay_rollout(x, t, 0.0) == rope_rollout(x, t, 1.0, 0.0) == pytest.approx(count, rel=1e-12)


def test_curves_of_the_theorems():
    x = np.array([[0, 1, 2], [5, 30, 200]])
    ways = np.array([[math.comb(7 + k, k) for k in row] for row in x.tolist()])
    np.testing.assert_allclose(decay_rollout(x, 7, 0.3), ways * np.exp(-0.3 * x), rtol=1e-11)
    np.testing.assert_allclose(rope_rollout(x, 7, 0.3, 0.05), ways * np.exp(-0.3 * 0.05**2 * x**2), rtol=1e-11)
    np.testing.assert_array_equal(rope_rollout(x, 7, 0.3, -0.05), rope_rollout(x, 7, 0.3, 0.05))
    assert decay_rollout(10**6, 200, 0.0) == math.inf  # of the order of 10^825
    x = np.arange(25)
    np.testing.assert_allclose(decay_rollout(x, 4, 0.3), decays(0.3 * x, 5), rtol=1e-11)


@pytest.mark.parametrize(
    ("t", "B", "m", "turning"),  # a decay m per token, or c and theta of RoPE
    [
        (3, 0.2, 0.0, None),
        (1, 0.0, 0.0, None),
        (0, 1.0, 0.2, None),
        (5, 0.5, 1.0, None),
        (2, 2.0, 3.0, None),
        (2, 0.2, 0.0, (1.0, 0.0)),
        (0, 1.0, 0.0, (1.0, 0.1)),
        (3, 0.3, 0.0, (2.0, 0.2)),
        (5, 0.5, 0.0, (1.0, 1.0)),
    ],
)
def test_bounds_hold(t, B, m, turning):
    length = 14
    x = np.arange(length)
    loss = m * x if turning is None else turning[0] * turning[1] ** 2 * x**2
    logits = np.random.default_rng(0).uniform(-B, B, (t + 1, length, length))
    product = rollout(softmax_patterns(logits, loss))[-1]
    found = decay_bounds(length, t, m, B) if turning is None else rope_bounds(length, t, turning[0], turning[1], B)
    for i in range(length):
        entries = product[i, i::-1]  # by distance
        assert np.all(found.low[: i + 1] <= entries * SLACK)
        assert np.all(entries <= found.high[: i + 1] * SLACK)


def test_constants_of_the_bounds():
    x = np.arange(12)
    low, high = (math.exp(-0.2) / sum(math.exp(-0.9 * k) for k in range(12))) ** 4, math.exp(0.8)
    found = decay_bounds(12, 3, 0.9, 0.1)
    np.testing.assert_allclose(found.low, low * decay_rollout(x, 3, 0.9), rtol=1e-11)
    np.testing.assert_allclose(found.high, np.minimum(high * decay_rollout(x, 3, 0.9), 1), rtol=1e-11)
    assert found.high[-1] < 0.1  # not all of it is cut off at 1
    low = (math.exp(-0.2) / sum(math.exp(-0.5 * k**2) for k in range(12))) ** 4
    found = rope_bounds(12, 3, 2.0, 0.5, 0.1)
    np.testing.assert_allclose(found.low, low * rope_rollout(x, 3, 2.0, 0.5), rtol=1e-11)
    # A fourth of the turning: four equal steps.
    np.testing.assert_allclose(found.high, np.minimum(high * rope_rollout(x, 3, 2.0 / 4, 0.5), 1), rtol=1e-11)
    assert found.high[-1] < 0.1
    # Without a distance all logits are the same, and one layer is between e^-2B / T and 1:
    np.testing.assert_allclose(decay_bounds(5, 0, 0.0, 0.5).low, math.exp(-1) / 5)


def test_bounds_of_wild_logits_are_trivial_not_errors():
    found = decay_bounds(50, 60, 0.1, 20.0)
    assert not found.low.any()
    assert np.all(found.high == 1)


@pytest.mark.parametrize(("t", "m"), [(0, 0.11), (1, 0.9), (3, 2.1), (8, 0.3)])
def test_decay_peak_is_where_the_product_of_the_decays_peaks(t, m):
    peak = decay_peak(t, m)
    assert peak == pytest.approx(t / (math.exp(m) - 1), rel=1e-12)
    x = np.arange(int(peak) + 30)
    assert math.floor(peak) == np.argmax(decays(m * x, t + 1))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.floats(0.05, 3))
def test_decay_peak_is_where_the_curve_peaks(t, m):
    at = math.floor(decay_peak(t, m))
    curve = decay_rollout(np.arange(at + 60), t, m)
    assert curve[at] >= curve.max() * (1 - 1e-11)
    assert curve[at] > curve[at + 2]


def test_decay_peak_of_known_values():
    assert decay_peak(6, math.log(2)) == pytest.approx(6)  # and distance 5 is as good
    np.testing.assert_allclose(*decay_rollout([5, 6], 6, math.log(2)), rtol=1e-12)
    assert decay_peak(0, 0.5) == 0
    assert decay_peak(3, 0.0) == math.inf
    assert decay_peak(3, 1000.0) == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 30), st.floats(0.1, 5), st.floats(0, 1), st.integers(1, 80))
def test_rope_peak_is_where_the_curve_peaks(t, c, theta, length):
    at = rope_peak(t, c, theta, length)
    logs = [math.log(math.comb(t + x, x)) - c * theta**2 * x**2 for x in range(length)]
    assert logs[at] == pytest.approx(max(logs), abs=1e-10)
    assert type(at) is int


@pytest.mark.parametrize(("t", "theta"), [(0, 0.2), (2, 0.2), (5, 0.1), (8, 0.3)])
def test_products_of_rope_decays_peak_there_or_further_back(t, theta):
    exact = int(np.argmax(decays(theta**2 * np.arange(80) ** 2, t + 1)))
    peak = rope_peak(t, 1.0, theta, 80)
    assert peak < exact if t else peak == exact == 0


# ------------------------------------------------------------------------------------------------------------ bad input

ROWS = np.full((2, 3, 3), 1 / 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cesaro_row(0, 2), "length is 0; give at least 1"),
        (lambda: cesaro_row(5, -1), "blocks is -1; give at least 0"),
        (lambda: cesaro_row(5, 2, alpha=1.5), "alpha is 1.5; give a share of attention from 0 to 1"),
        (lambda: cesaro_row(5, 2, window=0), "window is 0; give at least 1"),
        (lambda: cesaro_row(5, 2, window=[3, -1]), "window is -1; give at least 1"),
        (lambda: cesaro_row(5, 2, window=[3]), "there are 1 windows for 2 blocks"),
        (lambda: cesaro_row(5, 2, query=5), "query is 5 for 5 tokens; give from -5 to 4"),
        (lambda: cesaro_density([0.5, 1.25], 2), "x is 1.25; give fractions of the text"),
        (lambda: cesaro_density(0.5, 0), "blocks is 0; give at least 1"),
        (lambda: cesaro_point_mass(0, 0.5), "blocks is 0; give at least 1"),
        (lambda: cesaro_bins(0, 2), "length is 0; give at least 1"),
        (lambda: fit_alpha(np.ones((2, 5)), 2), "the profile has shape [2, 5]; give one dimension"),
        (lambda: fit_alpha([1.0, -2.0, 1.0, 1.0], 2), "the value -2.0 at position 1"),
        (lambda: fit_alpha([1.0, 1.0, math.inf, 1.0], 2), "the value inf at position 2"),
        (lambda: fit_alpha([0.0, 0.0, 1.0, 1.0], 2), "both positive at 2 positions; give a profile with at least 3"),
        (lambda: fit_alpha(np.ones(9), 2, window=1), "both positive at 1 positions"),
        (lambda: fit_alpha(np.ones(9), 0), "blocks is 0; give at least 1"),
        (lambda: visible(0), "length is 0; give at least 1"),
        (lambda: visible(4, window=0), "window is 0; give at least 1"),
        (lambda: visible(4, prefix=5), "prefix is 5 for 4 tokens; give from 1 to 4"),
        (lambda: visible(4, window=2, prefix=1), "a window of 2 and a prefix of 1 are both given; give one of them"),
        (lambda: rollout(ROWS[:, :2]), "patterns have shape [2, 2, 3]; give [layer, query, key]"),
        (lambda: rollout(ROWS[0]), "patterns have shape [3, 3]; give [layer, query, key]"),
        (lambda: rollout(ROWS[:0]), "patterns have shape [0, 3, 3]; give [layer, query, key]"),
        (lambda: rollout(ROWS * [[[1]], [[1.001]]]), "row 0 of layer 1 has entries from 0.333667 and sum 1.001"),
        (lambda: rollout(ROWS + [[0.0], [0], [1]] * np.array([-1, 1, 0])), "row 2 of layer 0 has entries from -0.66"),
        (lambda: rollout(ROWS, alpha=1.1), "alpha is 1.1; give"),
        (lambda: rollout(ROWS * math.nan), "row 0 of layer 0 has entries from nan"),
        (lambda: causal_bound(0, 1, 0.1), "length is 0; give at least 1"),
        (lambda: causal_bound(4, 0, 0.1), "layers is 0; give at least 1"),
        (lambda: causal_bound(4, 1, 0.0), "eps is 0.0; give the smallest visible entry, above 0 and at most 1/4"),
        (lambda: window_bound(4, 1, 0.1, 1), "window is 1; give at least 2"),
        (lambda: window_bound(9, 1, 0.4, 3), "eps is 0.4; give the smallest visible entry, above 0 and at most 1/3"),
        (lambda: prefix_bounds(4, 1, 0.1, 0), "prefix is 0 for 4 tokens; give from 1 to 4"),
        (lambda: decay_rollout([1, -2], 3, 0.1), "distance is -2.0; give tokens, 0 or more"),
        (lambda: decay_rollout(1, 3, -0.1), "m is -0.1; give a finite number, 0 or more"),
        (lambda: decay_bounds(0, 3, 0.1, 0.5), "length is 0; give at least 1"),
        (lambda: decay_bounds(4, -1, 0.1, 0.5), "t is -1; give at least 0"),
        (lambda: decay_bounds(4, 3, math.inf, 0.5), "m is inf; give a finite number"),
        (lambda: decay_peak(-1, 0.1), "t is -1; give at least 0"),
        (lambda: rope_rollout(math.inf, 3, 1.0, 0.1), "distance is inf; give tokens"),
        (lambda: rope_rollout(1, 3, -1.0, 0.1), "c is -1.0; give a finite number, 0 or more"),
        (lambda: rope_rollout(1, 3, 1.0, math.nan), "theta is nan; give finite radians per token"),
        (lambda: rope_bounds(0, 3, 1.0, 0.1, 0.5), "length is 0; give at least 1"),
        (lambda: rope_bounds(4, 3, 1.0, 0.1, math.inf), "B is inf; give a finite number"),
        (lambda: rope_peak(-1, 1.0, 0.1, 5), "t is -1; give at least 0"),
        (lambda: rope_peak(1, 1.0, 0.1, 0), "length is 0; give at least 1"),
    ],
)
def test_bad_input_is_named(call, message, unchecked):
    with pytest.raises(InputError, match=re.escape(message)):
        call()
