"""Experiment rollout: toys' patterns and walks against slow twins, bounds that can fail, and a tiny run."""

import math

import numpy as np
import pytest
import reference_toys
import torch
import xarray as xr

from probes.theory.rollout import decay_bounds, decay_peak
from toy.experiments import walks as toys
from toy.experiments.rollout import Settings, crossing, decay_stars, least_rates, rates


def normed(x):
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-5)


@pytest.mark.parametrize("case", ["window 3", "prefix 2", "decay 0.2231", "rope"])
def test_patterns_make_the_reference_pass(case):
    """Streams of the reference's own pass are the patterns times its values, block by block."""
    toy = toys.fresh(6, 3, 2, 1.0, 0, **Settings().cases()[case])
    patterns = toy.patterns()
    assert patterns.shape == (2, 3, 6, 6)
    streams, _ = reference_toys.toy_pass(toy.architecture, dict(toy.weights), toy.inputs[0])
    for layer in range(3):
        x = streams[layer]
        mixed = torch.tensor(patterns[0, layer]) @ normed(x) @ toy.weights[f"{layer}.v"] @ toy.weights[f"{layer}.o"]
        torch.testing.assert_close(mixed, streams[layer + 1], atol=1e-7, rtol=1e-6)  # decay is a float32 number


def test_fresh_logits_have_the_size_asked_for():
    spread = []
    for seed in range(8):
        toy = toys.fresh(17, 1, 16, 3.0, seed)
        q, k = (normed(toy.inputs) @ toy.weights[name] for name in ("0.q", "0.k"))
        spread.append(float((q @ k.mT / 32**0.5).std()))
    assert np.mean(spread) == pytest.approx(3.0, rel=0.2)


@pytest.mark.parametrize("kind", ["one plane", "slow aligned", "all random"])
def test_turning_toys_lose_what_their_directions_say(kind):
    s, theta, x = Settings(peak_length=24, peak_layers=2, sequences=2), toys.angles(), np.arange(24)
    assert theta[13] == pytest.approx(10_000 ** (-26 / 64))
    if kind == "one plane":
        toy, lemma, _ = toys.in_one_plane(s, float(theta[13]), 0.0, 0)
        lost = toys.TURNING * (1 - np.cos(x * theta[13]))
        np.testing.assert_allclose(lemma, toys.TURNING / 2 * (x * theta[13]) ** 2)
    else:
        toy, lost, _ = toys.in_planes(s, kind, 0.0, 3)
        query, key, _ = toys.directions(kind, 24, 3)
        sizes = [np.hypot(*vector.numpy().reshape(2, 32)) for vector in (query, key)]
        assert (sizes[0] * sizes[1]).sum() / 8 == pytest.approx(toys.TURNING)
        assert ((sizes[0] > 0) == ((theta * 23 <= math.pi) | kind.startswith("all"))).all()
        assert torch.equal(query, key) == kind.endswith("aligned")
    i, j = np.tril_indices(24)
    with np.errstate(divide="ignore"):
        logits = np.log(toy.patterns())
    np.testing.assert_allclose(logits[..., i, j] - logits[..., i, i], np.zeros((2, 2, 1)) - lost[i - j], atol=1e-5)


@pytest.mark.parametrize("attention", ["sigmoid", f"relu{toys.SUMMED}"])
def test_other_attention_against_products_of_weights_written_out(attention):
    name = attention.removesuffix(toys.SUMMED)
    toy = toys.fresh(6, 3, 8, 2.0, 0, attention=name)
    found = toys.beyond_first(toy.patterns(), summed=name != attention)
    beyond, gone = np.zeros((2, 3, 8))
    for n, vectors in enumerate(toy.inputs):
        streams, _ = reference_toys.toy_pass(toy.architecture, dict(toy.weights), vectors)
        product = np.eye(6)
        for layer in range(3):
            q, k = (normed(streams[layer]) @ toy.weights[f"{layer}.{of}"] for of in "qk")
            logits = q @ k.T / 32**0.5
            own = np.tril((1 / (1 + (-logits).exp()) if name == "sigmoid" else logits.clamp(min=0)).numpy())
            sums = own.sum(1, keepdims=True)
            product = (own / np.where(sums > 0, sums, 1) if name != attention else own) @ product
            last = product[-1]
            gone[layer, n] = not last.any()
            beyond[layer, n] = np.nan if not last.any() else last[1:].sum() / last.sum()
    np.testing.assert_allclose(found["beyond"], np.nanmean(beyond, -1), rtol=1e-6)
    np.testing.assert_allclose(found["gone"], gone.mean(-1))
    assert gone[-1].any() == (name == "relu")


def random_patterns(rest, window=7, prefix=0, decay=0.0):
    """Patterns of logits `rest`, less a loss by distance."""
    i, j = np.indices((7, 7))
    seen = (j <= i) & (i - j < window) | (j < prefix)
    shares = np.exp(np.where(seen, rest - decay * (i - j), -np.inf))
    return shares / shares.sum(-1, keepdims=True)


REST = np.random.default_rng(3).normal(size=(2, 5, 7, 7))


@pytest.mark.parametrize(("window", "prefix"), [(3, None), (None, 2)])
def test_limits_count_what_is_beyond_the_bounds(window, prefix):
    patterns = random_patterns(REST, window or 7, prefix or 0)
    products, first = toys.products_of(patterns), prefix or 1
    found = toys.limits(patterns, products, window, prefix)
    assert (found["violations"], found["checked"]) == (0, 2 * 5 * 7 * (7 + (prefix or 0)))
    assert found["eps"] == patterns[patterns > 0].min()
    walks = [[reference_toys.walk_chance(one[:3].tolist(), 6, end) for end in range(7)] for one in patterns]
    assert found["outside"][2] == pytest.approx(np.mean(walks, 0)[first:].sum())
    np.testing.assert_allclose(found["share"], products[..., :first].min((0, 2, 3)))
    # Walks that never come down are beyond every bound that says something, at all positions above the ground.
    beyond = toys.limits(patterns, np.broadcast_to(np.eye(7), products.shape), window, prefix)
    assert beyond["violations"] > 0
    assert (beyond["outside"] >= found["outside_bound"] - 1e-12).all()
    if prefix:
        products[0, 4, 6, 1] = 0.0  # no share of the prefix
        assert toys.limits(patterns, products, window, prefix)["violations"] == 1


def test_decay_bounds_use_the_measured_spread_and_can_fail():
    rest, lost = 0.2 * REST, 0.4 * np.arange(7)
    patterns = random_patterns(rest, decay=0.4)
    products, used = toys.products_of(patterns), []

    def violations(these, factor=1.0):
        def bounds(t, B):
            used.append((t, B))
            return decay_bounds(7, t, 0.4, factor * B)

        found = toys.beyond_bounds("x_", patterns, these, lost, bounds)
        assert found["x_checked"] == 2 * 2 * 5 * 28
        return found["x_violations"]

    assert violations(products) == 0
    assert {t for t, _ in used} == {*range(5)}
    spans = np.max([np.ptp(rest[:, :, i, : i + 1], axis=-1).max(1) / 2 for i in range(7)], 0)  # by sequence
    np.testing.assert_allclose(np.unique(np.round([B for _, B in used], 9)), np.sort(spans), atol=1e-8)
    assert violations(products, 0.1) > 0
    assert violations(products**2) > 0


def test_path_peaks_are_those_of_all_paths_and_of_decay_the_theorem_s():
    for lost in (0.25 * np.arange(14.0), 0.02 * np.arange(14.0) ** 2, 3 * (1 - np.cos(0.2 * np.arange(14)))):
        weights = [[reference_toys.paths_weight(lost.tolist(), n, x) for x in range(14)] for n in range(1, 5)]
        assert toys.path_peaks(lost, 4) == np.argmax(weights, 1).tolist()
    assert toys.path_peaks(0.1 * np.arange(120), 6) == [math.floor(decay_peak(t, 0.1) + 1e-9) for t in range(6)]


def test_rates_are_those_of_exponentials():
    course = np.minimum(1, 3 * np.exp(-0.7 * np.arange(20)))
    assert rates(course) == pytest.approx(0.7)
    assert math.isnan(rates(np.ones(20)))
    assert math.isnan(rates(course[:4]))
    ds = xr.Dataset(attrs={"settings": '{"length": 17}'})
    assert [crossing(ds, w) for w in (2, 3, 5, 9, 17)] == [16, 8, 4, 2, 1]


def test_run_keeps_every_bound(tiny):
    ds, report, *_ = tiny
    for name in ("", "decay_", "decay_peak_", "rope_", "planes_"):
        assert int(ds[f"{name}violations"].sum()) == 0
        assert int(ds[f"{name}checked"].sum()) > 1000
    patterns = toys.fresh(6, 8, 3, 1.0, 1, mask="prefix", prefix=2).patterns()
    own = ds.sel(case="prefix 2", source="fresh, logits 1", seed=1)
    for name, expected in toys.limits(patterns, toys.products_of(patterns), prefix=2).items():
        np.testing.assert_allclose(own[name], expected, rtol=1e-9)
    assert (ds["decay_checked"].sum(("seed", "source")) > 0).values.tolist() == [False, False, False, True, False]
    # Next to no content: peaks are the theorem's.
    peaks = ds["decay_curve"].argmax("distance").sel(scale=0.01)
    assert (abs(peaks - decay_stars(ds)) <= 1).all()
    np.testing.assert_allclose(ds["rope_curve"].sum("distance"), 1, rtol=1e-5)
    # Both kinds of aligned directions fall, and neither of the random ones.
    assert (least_rates(ds) > 0).all("seed").values.tolist() == [True, True, False, False]
    verdict = {row[1]: row[3] for row in report.tables[-1].rows}
    assert [verdict[text] for text in verdict if "P(z_i >= j) <=" in text] == ["holds", "holds"]
