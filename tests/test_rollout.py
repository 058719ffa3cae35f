"""Rollouts of attention patterns: products entry by entry, bounds and peaks; `test_toy_rollout` has patterns within them."""

import itertools
import math
import re

import numpy as np
import pytest

from probes.errors import InputError
from probes.theory.rollout import (
    causal_bound,
    decay_bounds,
    decay_peak,
    decay_rollout,
    rollout,
    rope_peak,
    shares,
    turned_bounds,
    turned_loss,
    turned_rates,
    visible,
    window_bound,
)


def test_visible_masks():
    for i, j in itertools.product(range(9), range(9)):
        assert visible(9)[i, j] == (j <= i)
        assert visible(9, window=4)[i, j] == (i - 4 < j <= i)
        assert visible(9, prefix=3)[i, j] == (j <= i or j < 3)


def test_rollout_is_every_partial_product():
    entries = np.random.default_rng(0).uniform(1, 2, (4, 6, 6)) * visible(6)
    patterns = entries / entries.sum(-1, keepdims=True)
    for alpha in (None, 0.3):
        found = rollout(patterns.astype(np.float32), alpha=alpha)
        assert found.dtype == np.float64
        share, expected = 1.0 if alpha is None else alpha, np.eye(6)
        for layer, pattern in enumerate(patterns):
            expected = ((1 - share) * np.eye(6) + share * pattern) @ expected
            np.testing.assert_allclose(found[layer], expected, atol=1e-6)


def test_causal_bound_is_attained():
    length, layers, eps = 6, 5, 0.1
    lazy = eps * np.tril(np.ones((length, length)), -1)  # every query rests where it is, as far as eps allows
    lazy += np.diag(1 - lazy.sum(axis=1))
    mass = rollout(np.stack([lazy] * layers))[..., ::-1].cumsum(-1)[..., ::-1]  # P(z_i >= j)
    bound = causal_bound(length, layers, eps)
    for j in range(length):
        np.testing.assert_allclose(mass[:, j, j], bound[:, j], rtol=1e-12)


def test_window_bound_waits_for_the_crossing():
    bound = window_bound(7, 9, 0.25, 4)  # two steps of 3 from one end to the other
    for t, j in itertools.product(range(9), range(7)):
        assert bound[t, j] == pytest.approx((1 - j * 0.25**2) ** ((t + 1) // 2))
    assert window_bound(1, 3, 0.5, 4).tolist() == [[1], [1], [1]]


def test_curves_of_the_theorems():
    x = np.array([[0, 1, 2], [5, 30, 200]])
    ways = np.array([[math.comb(7 + k, k) for k in row] for row in x.tolist()])
    np.testing.assert_allclose(decay_rollout(x, 7, 0.3), ways * np.exp(-0.3 * x), rtol=1e-11)
    assert decay_rollout(10**6, 200, 0.0) == math.inf  # of the order of 10^825


@pytest.mark.parametrize("aligned", [True, False])
def test_turned_queries_and_keys_lose_what_planes_say_and_fall_if_they_are_aligned(aligned):
    generator, theta = np.random.default_rng(5), 0.4 * 10.0 ** -np.arange(4)
    query = generator.normal(size=4) + 1j * generator.normal(size=4)
    key = query if aligned else generator.normal(size=4) + 1j * generator.normal(size=4)
    turned = [np.real(np.conj(query * np.exp(1j * theta * x)) * key).sum() for x in range(14)]
    loss = turned_loss(14, abs(query) * abs(key), theta, np.angle(query / key))
    np.testing.assert_allclose(turned[0] - np.array(turned), loss, atol=1e-12)
    low, high = turned_rates(loss)
    assert low < high
    assert (low > 0) == aligned


def test_planes_that_turn_little_are_one_plane_and_logits_that_rise_have_no_upper_bound():
    x = np.arange(9)
    small = turned_loss(9, [2.0, 3.0], [0.001, 0.002])
    np.testing.assert_allclose(turned_rates(small), (2 * 0.001**2 + 3 * 0.002**2) / 2, rtol=1e-4)
    assert turned_rates(np.zeros(1)) == (0, 0)
    rising = turned_bounds(-0.01 * x**2, 2, 0.0)  # logits that grow with distance
    np.testing.assert_allclose(
        rising.low, decay_rollout(x, 2, 0.0) * np.exp(0.01 * x**2 / 3) / np.exp(0.01 * x**2).sum() ** 3
    )
    assert np.all(rising.high == 1)


def test_shares_are_those_of_the_rows_of_products():
    weights = np.random.default_rng(4).uniform(0, 1, (5, 6, 6)) * visible(6)
    weights[2, 3] = 0  # query 3 of this layer reads nothing
    product, found = np.eye(6), shares(weights)
    for t, weight in enumerate(weights):
        product = weight @ product
        sums = product.sum(1, keepdims=True)
        np.testing.assert_allclose(found[t], np.divide(product, sums, where=sums > 0, out=np.zeros_like(product)))
    tiny = shares(np.stack([1e-200 * weights[0]] * 9))
    np.testing.assert_allclose(tiny[-1], shares(np.stack([weights[0]] * 9))[-1], rtol=1e-9)


def test_equal_weights_leave_the_first_token_slowly():
    found = shares(np.stack([0.5 * np.tril(np.ones((7, 7)))] * 41))[-1, -1]
    paths = np.array([math.comb(40 + x, x) for x in range(7)])
    np.testing.assert_allclose(found[::-1], paths / paths.sum(), rtol=1e-11)
    assert found[0] == pytest.approx(41 / 47)


def test_constants_of_the_bounds():
    x = np.arange(12)
    low, high = (math.exp(-0.2) / sum(math.exp(-0.9 * k) for k in range(12))) ** 4, math.exp(0.8)
    found = decay_bounds(12, 3, 0.9, 0.1)
    np.testing.assert_allclose(found.low, low * decay_rollout(x, 3, 0.9), rtol=1e-11)
    np.testing.assert_allclose(found.high, np.minimum(high * decay_rollout(x, 3, 0.9), 1), rtol=1e-11)
    assert found.high[-1] < 0.1  # not all of it is cut off at 1
    low = (math.exp(-0.2) / sum(math.exp(-0.5 * k**2) for k in range(12))) ** 4
    found, ways = turned_bounds(0.5 * x**2, 3, 0.1), decay_rollout(x, 3, 0.0)
    np.testing.assert_allclose(found.low, low * ways * np.exp(-0.5 * x**2), rtol=1e-11)
    # A fourth of the turning: four equal steps.
    np.testing.assert_allclose(found.high, np.minimum(high * ways * np.exp(-0.5 * x**2 / 4), 1), rtol=1e-11)
    assert found.high[-1] < 0.1
    # Without a distance all logits are the same, and one layer is between e^-2B / T and 1:
    np.testing.assert_allclose(decay_bounds(5, 0, 0.0, 0.5).low, math.exp(-1) / 5)


@pytest.mark.parametrize("t", [0, 1, 7, 30])
@pytest.mark.parametrize("rate", [0.05, 0.3, 2.0])
def test_peaks_are_where_the_curves_peak(t, rate):
    assert decay_peak(t, 0.0) == math.inf
    at = math.floor(decay_peak(t, rate))
    curve = decay_rollout(np.arange(at + 60), t, rate)
    assert curve[at] >= curve.max() * (1 - 1e-11)
    assert curve[at] > curve[at + 2]
    for length in (3, 80):
        at = rope_peak(t, 2.0, rate, length)
        logs = [math.log(math.comb(t + x, x)) - 2.0 * rate**2 * x**2 for x in range(length)]
        assert logs[at] == pytest.approx(max(logs), abs=1e-10)
        assert type(at) is int


ROWS = np.full((2, 3, 3), 1 / 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: visible(4, prefix=5), "prefix is 5 for 4 tokens; give from 1 to 4"),
        (lambda: rollout(ROWS[:, :2]), "patterns have shape [2, 2, 3]; give [layer, query, key]"),
        (lambda: rollout(ROWS * [[[1]], [[1.001]]]), "row 0 of layer 1 has entries from 0.333667 and sum 1.001"),
        (lambda: rollout(ROWS + [[0.0], [0], [1]] * np.array([-1, 1, 0])), "row 2 of layer 0 has entries from -0.66"),
        (lambda: window_bound(9, 1, 0.4, 3), "eps is 0.4; give the smallest visible entry, above 0 and at most 1/3"),
        (lambda: decay_rollout([1, -2], 3, 0.1), "distance is -2.0; give tokens, 0 or more"),
        (lambda: decay_bounds(4, 3, math.inf, 0.5), "m is inf; give a finite number"),
        (lambda: shares(-ROWS), "some weights are negative or not finite; give numbers, 0 or more"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(InputError, match=re.escape(message)):
        call()
