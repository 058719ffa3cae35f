"""Rollouts of attention patterns: products entry by entry, and the bounds of theorems on patterns drawn at random."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probes.errors import InputError
from probes.theory.rollout import (
    causal_bound,
    decay_bounds,
    decay_peak,
    decay_rollout,
    rollout,
    rope_peak,
    rope_rollout,
    turned_bounds,
    turned_loss,
    turned_rates,
    visible,
    window_bound,
)
from probes.theory.unnormalized import even_shares, shares

SLACK = 1 + 1e-12  # rounding of sums and products of positive float64 numbers, some hundreds of them


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


# -------------------------------------------------------------------------------------------- rollouts and their limits


def test_visible_masks():
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


@pytest.mark.parametrize(
    ("length", "layers", "mask"),
    [
        (9, 60, {}),
        *((length, 400, {"window": window}) for length, window in [(6, 2), (6, 3), (7, 4), (5, 9)]),
        (8, 40, {"prefix": 3}),
    ],
)
def test_mass_goes_to_the_first_token_or_the_prefix(length, layers, mask):
    seen, prefix = visible(length, **mask), mask.get("prefix", 0)
    patterns = random_patterns(seen, layers, 0)
    eps, products = float(patterns[:, seen].min()), rollout(patterns)
    bound = window_bound(length, layers, eps, mask["window"]) if "window" in mask else causal_bound(length, layers, eps)
    bound[:, :prefix] = 1
    assert np.all(products[:, :, :prefix] * SLACK >= eps)
    assert bound.shape == (layers, length)
    assert np.all(at_or_above(products) <= bound[:, None, :] * SLACK)
    beyond = max(prefix, 1)
    assert np.all(products[-1, :, beyond:].sum(-1) < 0.1)
    if mask != {"window": 2}:  # eps^5 is so small that the theorem takes more layers than these
        assert bound[-1, beyond:].max() < 0.6 if mask == {"window": 3} else 0.1  # of 1: the bound says something
    if prefix:
        assert products[-1, :, 0].max() < 0.9  # not to the first token alone, as under a causal mask


def test_causal_bound_is_attained():
    length, layers, eps = 6, 5, 0.1
    lazy = eps * np.tril(np.ones((length, length)), -1)  # every query rests where it is, as far as eps allows
    lazy += np.diag(1 - lazy.sum(axis=1))
    mass = at_or_above(rollout(np.stack([lazy] * layers)))
    bound = causal_bound(length, layers, eps)
    for j in range(length):
        np.testing.assert_allclose(mass[:, j, j], bound[:, j], rtol=1e-12)


def test_window_bound_waits_for_the_crossing():
    bound = window_bound(7, 9, 0.25, 4)  # two steps of 3 from one end to the other
    for t, j in itertools.product(range(9), range(7)):
        assert bound[t, j] == pytest.approx((1 - j * 0.25**2) ** ((t + 1) // 2))
    wide = window_bound(7, 9, 0.125, 7)
    np.testing.assert_allclose(wide, causal_bound(7, 9, 0.125))
    assert window_bound(1, 3, 0.5, 4).tolist() == [[1], [1], [1]]


# ------------------------------------------------------------------------------------------------------- decay and RoPE


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
        (0, 1.0, 0.2, None),
        (5, 0.5, 1.0, None),
        (0, 1.0, 0.0, (1.0, 0.1)),
        (3, 0.3, 0.0, (2.0, 0.2)),
    ],
)
def test_bounds_hold(t, B, m, turning):
    length = 14
    x = np.arange(length)
    loss = m * x if turning is None else turning[0] * turning[1] ** 2 * x**2
    logits = np.random.default_rng(0).uniform(-B, B, (t + 1, length, length))
    product = rollout(softmax_patterns(logits, loss))[-1]
    found = decay_bounds(length, t, m, B) if turning is None else turned_bounds(loss, t, B)
    for i in range(length):
        entries = product[i, i::-1]  # by distance
        assert np.all(found.low[: i + 1] <= entries * SLACK)
        assert np.all(entries <= found.high[: i + 1] * SLACK)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("slow", [True, False])
def test_bounds_of_several_planes_hold_for_random_directions(aligned, slow):
    """Logits of queries and keys that are turned, vector by vector; one of two cases has bounds that decay."""
    length, t, B, generator = 14, 3, 0.2, np.random.default_rng(5)
    theta = 0.4 * 10.0 ** -np.arange(4) if slow else 2.0 ** -np.arange(4.0)
    query = generator.normal(size=4) + 1j * generator.normal(size=4)
    key = query if aligned else generator.normal(size=4) + 1j * generator.normal(size=4)
    turned = [np.real(np.conj(query * np.exp(1j * theta * x)) * key).sum() for x in range(length)]
    loss = turned_loss(length, abs(query) * abs(key), theta, np.angle(query / key))
    np.testing.assert_allclose(turned[0] - np.array(turned), loss, atol=1e-12)
    rest = generator.uniform(-B, B, (t + 1, length, length))
    product = rollout(softmax_patterns(rest, loss))[-1]
    found = turned_bounds(loss, t, B)
    for i in range(length):
        entries = product[i, i::-1]
        assert np.all(found.low[: i + 1] <= entries * SLACK)
        assert np.all(entries <= found.high[: i + 1] * SLACK)
    low, high = turned_rates(loss)
    assert low < high
    assert (low > 0) == aligned
    # The exact sum over paths lies between, too: the bounds are those of what paths lose.
    exact, constants = decays(loss, t + 1), np.exp(-(t + 1) * (2 * B + np.log(np.exp(-loss).sum())))
    assert np.all(found.low <= constants * exact * SLACK)
    assert np.all(np.minimum(exact * math.exp(2 * B * (t + 1)), 1) <= found.high * SLACK)


def test_several_planes_add_up_and_one_alone_is_that_of_one_plane():
    x = np.arange(9)
    np.testing.assert_allclose(turned_loss(9, [2.0, 3.0], [0.1, 0.7]), 5 - 2 * np.cos(0.1 * x) - 3 * np.cos(0.7 * x))
    small = turned_loss(9, [2.0, 3.0], [0.001, 0.002])
    np.testing.assert_allclose(turned_rates(small), (2 * 0.001**2 + 3 * 0.002**2) / 2, rtol=1e-4)
    assert turned_rates(np.zeros(1)) == (0, 0)
    rising = turned_bounds(-0.01 * x**2, 2, 0.0)  # logits that grow with distance
    np.testing.assert_allclose(
        rising.low, decay_rollout(x, 2, 0.0) * np.exp(0.01 * x**2 / 3) / np.exp(0.01 * x**2).sum() ** 3
    )
    assert np.all(rising.high == 1)


# -------------------------------------------------------------------------------------------- rows that do not sum to 1


def test_shares_are_those_of_the_rows_of_products():
    weights = np.random.default_rng(4).uniform(0, 1, (5, 6, 6)) * visible(6)
    weights[2, 3] = 0  # query 3 of this layer reads nothing
    product, found = np.eye(6), shares(weights)
    for t, weight in enumerate(weights):
        product = weight @ product
        sums = product.sum(1, keepdims=True)
        np.testing.assert_allclose(found[t], np.divide(product, sums, where=sums > 0, out=np.zeros_like(product)))
    patterns = random_patterns(visible(6), 4, 0)
    np.testing.assert_allclose(shares(patterns), rollout(patterns))
    tiny = shares(np.stack([1e-200 * weights[0]] * 9))
    np.testing.assert_allclose(tiny[-1], shares(np.stack([weights[0]] * 9))[-1], rtol=1e-9)


@pytest.mark.parametrize("t", [0, 40])
def test_equal_weights_leave_the_first_token_slowly(t):
    found = shares(np.stack([0.5 * np.tril(np.ones((7, 7)))] * (t + 1)))[-1, -1]
    np.testing.assert_allclose(found[::-1], even_shares(7, t), rtol=1e-11)
    assert found[0] == pytest.approx((t + 1) / (t + 7))


def test_constants_of_the_bounds():
    x = np.arange(12)
    low, high = (math.exp(-0.2) / sum(math.exp(-0.9 * k) for k in range(12))) ** 4, math.exp(0.8)
    found = decay_bounds(12, 3, 0.9, 0.1)
    np.testing.assert_allclose(found.low, low * decay_rollout(x, 3, 0.9), rtol=1e-11)
    np.testing.assert_allclose(found.high, np.minimum(high * decay_rollout(x, 3, 0.9), 1), rtol=1e-11)
    assert found.high[-1] < 0.1  # not all of it is cut off at 1
    low = (math.exp(-0.2) / sum(math.exp(-0.5 * k**2) for k in range(12))) ** 4
    found = turned_bounds(2.0 * 0.5**2 * x**2, 3, 0.1)
    np.testing.assert_allclose(found.low, low * rope_rollout(x, 3, 2.0, 0.5), rtol=1e-11)
    # A fourth of the turning: four equal steps.
    np.testing.assert_allclose(found.high, np.minimum(high * rope_rollout(x, 3, 2.0 / 4, 0.5), 1), rtol=1e-11)
    assert found.high[-1] < 0.1
    # Without a distance all logits are the same, and one layer is between e^-2B / T and 1:
    np.testing.assert_allclose(decay_bounds(5, 0, 0.0, 0.5).low, math.exp(-1) / 5)


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


# ------------------------------------------------------------------------------------------------------------ bad input

ROWS = np.full((2, 3, 3), 1 / 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: visible(4, prefix=5), "prefix is 5 for 4 tokens; give from 1 to 4"),
        (lambda: visible(4, window=2, prefix=1), "a window of 2 and a prefix of 1 are both given; give one of them"),
        (lambda: rollout(ROWS[:, :2]), "patterns have shape [2, 2, 3]; give [layer, query, key]"),
        (lambda: rollout(ROWS * [[[1]], [[1.001]]]), "row 0 of layer 1 has entries from 0.333667 and sum 1.001"),
        (lambda: rollout(ROWS + [[0.0], [0], [1]] * np.array([-1, 1, 0])), "row 2 of layer 0 has entries from -0.66"),
        (lambda: rollout(ROWS * math.nan), "row 0 of layer 0 has entries from nan"),
        (lambda: window_bound(4, 1, 0.1, 1), "window is 1; give at least 2"),
        (lambda: window_bound(9, 1, 0.4, 3), "eps is 0.4; give the smallest visible entry, above 0 and at most 1/3"),
        (lambda: decay_rollout([1, -2], 3, 0.1), "distance is -2.0; give tokens, 0 or more"),
        (lambda: decay_bounds(4, 3, math.inf, 0.5), "m is inf; give a finite number"),
        (lambda: rope_rollout(1, 3, 1.0, math.nan), "theta is nan; give finite radians per token"),
        (lambda: turned_loss(3, -1.0, 0.1), "strength, theta and phase are not all finite, or a strength is negative"),
        (lambda: turned_bounds(np.ones(3), 1, 0.1), "loss is not finite, or not 0 at distance 0"),
        (lambda: shares(-ROWS), "some weights are negative or not finite; give numbers, 0 or more"),
    ],
)
def test_bad_input_is_named(call, message, unchecked):
    with pytest.raises(InputError, match=re.escape(message)):
        call()
