"""Profile and attention of one view, and agreement of curves of different lengths."""

import itertools
import json
import math

import families
import numpy as np
import pytest
import torch
from scipy.stats import rankdata
from scipy.stats import t as student

from probes.measures.agreement import agreement, fractions, portrait, shape, taken_at
from probes.measures.jacobian import jacobian
from probes.measures.sinks import sinks
from probes.models.load import load
from probes.results.ushape import shape_of, shape_over

TOKENS = torch.randint(3, 100, (3, 24), generator=torch.Generator().manual_seed(1))
EXACT = 1e-6  # float32, the same sums


def test_portrait_has_what_the_probes_give():
    model = load(families.model("llama"), tokenizer=families.tokenizer())
    whole, exact = portrait(model, TOKENS), jacobian(model, TOKENS)
    np.testing.assert_allclose(whole.sensitivity, exact.sensitivity, rtol=EXACT)
    np.testing.assert_allclose(whole.elasticity, exact.elasticity, rtol=EXACT)
    seen = sinks(model, TOKENS, keys=range(TOKENS.shape[1]))
    np.testing.assert_allclose(whole.alpha, seen.alpha.mean(("layer", "head")), rtol=EXACT)
    np.testing.assert_allclose(whole.sink_rate.mean("prompt"), seen.sink_rate_of_model, atol=EXACT)
    np.testing.assert_allclose(whole.uniform, seen.uniform.mean("layer"), rtol=EXACT)


def test_wide_models_are_sketched_and_narrow_ones_exact():
    config = families.FAMILIES["llama"]()
    assert json.loads(portrait(load(families.build(config)), TOKENS[:1]).attrs["options"])["method"] == "exact"
    config.hidden_size, config.head_dim = 72, 18
    model = load(families.build(config))
    wide = portrait(model, TOKENS[:1], products=9, seed=2)
    assert json.loads(wide.attrs["options"])["method"] == "sketch"
    expected = jacobian(model, TOKENS[:1], method="sketch", products=9, seed=2)
    np.testing.assert_allclose(wide.sensitivity, expected.sensitivity, rtol=EXACT)


def test_curves_are_interpolated_in_the_logarithm():
    fine = np.exp(np.linspace(0, 3, 33))  # straight in the logarithm: interpolation is exact
    np.testing.assert_allclose(taken_at(fine, 7), np.exp(np.linspace(0, 3, 7)))
    np.testing.assert_array_equal(taken_at(fine, 33), fine)
    np.testing.assert_array_equal(fractions(5), [0, 0.25, 0.5, 0.75, 1])
    # Beside a zero the nearer position counts.
    curve = np.array([0.0, 0.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0])  # points at 0, 7/4, 7/2, 21/4, 7
    np.testing.assert_allclose(taken_at(curve, 5), [0, 4, 4, 4, 4])
    np.testing.assert_allclose(taken_at(curve, 6)[:2], [0, 0])  # at 1.4, nearer to the zero


def sampled(curve: np.ndarray, *, seeds: int = 2, prompts: int = 6, noise: float = 0.1, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return curve * np.exp(noise * random.normal(size=(seeds, prompts, len(curve))))


U = 1 + 3 * np.linspace(-1, 1, 129) ** 2


def spread(without: list[float]) -> float:
    """The jackknife's standard error of an estimate, from what it is without each unit in turn, times Student's t."""
    count = len(without)
    square = (count - 1) / count * sum((one - sum(without) / count) ** 2 for one in without)
    return float(student.ppf(0.975, count - 1)) * math.sqrt(square)


def alike(one: np.ndarray, other: np.ndarray, squares: bool) -> tuple[float, float]:
    """Spearman's correlation and the logarithm of the error of samples [seed, prompt, position] of one length."""
    logs = []
    for values in (one, other):
        seeds = [[math.sqrt(np.mean(run[:, j] ** 2)) for j in range(values.shape[2])] for run in values]
        logs.append(np.mean(np.log(seeds if squares else values.reshape(-1, values.shape[2])), axis=0))
    return float(np.corrcoef([rankdata(one) for one in logs])[0, 1]), math.log(np.std(logs[0] - logs[1]))


@pytest.mark.parametrize("squares", [False, True])
def test_intervals_leave_out_documents_of_the_model_and_seeds_of_toys(squares):
    """The two independent spreads in quadrature, from the definition."""
    one, other = sampled(U[::8], noise=0.5), sampled(U[::8][::-1] + np.arange(17), seeds=3, noise=0.5, seed=1)
    documents = ["b", "a", "b", "c", "c", "a"]
    kept = [[n for n, name in enumerate(documents) if name != left] for left in "abc"]
    found = agreement(one, other, squares=squares, documents=documents)
    whole = alike(one, other, squares)
    reach = []
    for n in (0, 1):
        first = spread([alike(one[:, some], other, squares)[n] for some in kept])
        second = spread([alike(one, np.delete(other, seed, 0), squares)[n] for seed in range(3)])
        reach.append(math.hypot(first, second))
    ends = [whole[0] - reach[0], whole[0], whole[0] + reach[0]]
    np.testing.assert_allclose((found.spearman_low, found.spearman, found.spearman_high), np.clip(ends, -1, 1))
    expected = np.exp([whole[1] - reach[1], whole[1], whole[1] + reach[1]])
    np.testing.assert_allclose((found.error_low, found.error, found.error_high), expected)


def test_a_curve_is_held_and_a_single_run_has_no_interval():
    one, curve = sampled(U[::8], noise=0.5), U[None, None, ::8] + np.linspace(0, 3, 17)
    without = [alike(np.delete(one, n, 1), curve, squares=False)[1] for n in range(6)]
    found = agreement(one, curve)
    assert math.log(found.error_high / found.error) == pytest.approx(spread(without))
    # Paired curves leave out the same prompts.
    other = one[:1] * sampled(np.ones(17), seeds=1, noise=0.1, seed=1)
    found = agreement(one, other, paired=True)
    without = [alike(np.delete(one, n, 1), np.delete(other, n, 1), squares=False)[1] for n in range(6)]
    assert math.log(found.error_high / found.error) == pytest.approx(spread(without))
    assert math.log(found.error / found.error_low) == pytest.approx(spread(without))
    assert math.isnan(agreement(one, sampled(U[::8], seeds=1)).error_low)
    assert math.isnan(agreement(one[:, :1], curve).spearman_high)


def test_shapes_agree_at_other_lengths_and_scales_zeros_too_and_reaches_that_differ_are_counted():
    found = agreement(sampled(U), sampled(7 * U[::8], seed=1))
    assert found.spearman > 0.8
    assert found.error < 0.15
    one, other = U[::8].copy(), U[::8].copy()
    one[:4], other[:5] = 0, 0
    found = agreement(sampled(one, noise=0), sampled(other, noise=0))
    assert found.error == pytest.approx(0, abs=1e-12)
    assert found.apart == pytest.approx(1 / 17)


@pytest.mark.parametrize("runs", [False, True])
def test_shape_is_that_of_the_mean_curve_with_intervals(runs):
    values, documents = sampled(U, seeds=3, noise=0.3), ["b", "a", "b", "c", "c", "a"]
    found = shape(values, runs=runs, documents=documents)
    whole = shape_of(np.exp(np.log(values).mean((0, 1))))
    some = [values[np.arange(3) != n] for n in range(3)]
    if not runs:
        some = [values[:, [name != left for name in documents]] for left in "abc"]
    logs = [np.log(shape_of(np.exp(np.log(left).mean((0, 1))))[:5]) for left in some]
    for n, (value, low, high, _) in enumerate(found[:5]):
        assert value == pytest.approx(whole[n])
        assert math.log(high / value) == pytest.approx(spread([left[n] for left in logs]))
        assert math.log(value / low) == pytest.approx(spread([left[n] for left in logs]))
    assert (found.trough, found.trough_fraction.value, found.arm) == whole[5:]
    assert math.isnan(found.trough_fraction.low)
    by_unit, unit = (values, np.arange(3)) if runs else (values.swapaxes(0, 1), np.array([1, 0, 1, 2, 2, 0]))
    _, low, high, _ = shape_over(np.log(by_unit), unit, bootstrap=200).trough_fraction
    drawn = []  # every resample of three units, of which the percentiles' ends are some
    for chosen in itertools.product(range(3), repeat=3):
        log = np.concatenate([np.log(by_unit[unit == n]).reshape(-1, len(U)) for n in chosen])
        drawn.append(shape_of(np.exp(log.mean(0))).trough_fraction)
    assert min(drawn) <= low <= high <= max(drawn)
    assert len(set(drawn)) > 1
