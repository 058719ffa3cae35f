"""Experiment rollout: toys' patterns and walks against slow twins, bounds that can fail, and the claims' rules both ways."""

import json
import math
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import pytest
import reference_toys
import torch
import xarray as xr
from tiny_runs import changed, put, questioned, verdicts
from tiny_runs import made_up as made_of

from probes.theory.rollout import decay_bounds, decay_peak, rollout, rope_peak
from toy.experiments import rollout as experiment_of_rollout
from toy.experiments.rollout import Settings, cases, theta
from toy.experiments.rollout.bounds import (
    SUMMED,
    Look,
    beyond_first,
    check,
    decays_hold,
    directions,
    look_at,
    path_peaks,
)
from toy.experiments.rollout.statements import crossing, decay_stars, learnt, rates, rope_stars, tables

SMALL = Settings(6, 3, 8, sequences=2, windows=(3,), prefixes=(2,), trained_cases=("causal",))


def fresh(s: Settings, case: str, scale: float, seed: int):
    architecture = experiment_of_rollout._architecture(s, cases(s)[case], s.length, s.layers)
    return experiment_of_rollout._fresh(architecture, s.sequences, scale, seed)


@pytest.mark.parametrize("case", cases(SMALL))
def test_patterns_make_the_reference_pass(case):
    """Streams of the reference's own pass are the patterns times its values, block by block."""
    toy, inputs = fresh(SMALL, case, 1.0, 0)
    look = look_at(toy, inputs)
    assert look.patterns.shape == (2, 3, 6, 6)
    weights = {name: tensor[0] for name, tensor in toy._weights.items()}
    streams, _ = reference_toys.toy_pass(toy.architecture, weights, inputs[0])
    for layer in range(3):
        x = streams[layer]
        n = x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-5)
        mixed = torch.tensor(look.patterns[0, layer]) @ n @ weights[f"{layer}.v"] @ weights[f"{layer}.o"]
        torch.testing.assert_close(mixed, streams[layer + 1])


def test_last_is_the_chance_of_walks(tiny):
    """`last` against a sum over all walks, one by one, through patterns of the same toys."""
    patterns = look_at(*fresh(replace(SMALL, layers=8, sequences=3), "prefix 2", 1.0, 1)).patterns[:, :3].tolist()
    own = tiny.ds.sel(case="prefix 2", source="fresh, logits 1")
    chances = [np.mean([reference_toys.walk_chance(one, 5, end) for one in patterns]) for end in range(6)]
    np.testing.assert_allclose(own["last"].sel(seed=1, layer=2), chances, rtol=1e-5)
    np.testing.assert_allclose(own["last"].sel(key=slice(2, None)).sum("key"), own["outside"], rtol=1e-5)


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
def test_fresh_logits_have_the_size_asked_for(scale):
    s = Settings(layers=1)
    logits = [look_at(*fresh(s, "causal", scale, seed)).logits for seed in range(8)]
    assert np.mean([x[np.isfinite(x)].std() for x in logits]) == pytest.approx(scale, rel=0.25)


@pytest.mark.parametrize("kind", ["one plane", *Settings.turned])
def test_turning_toys_lose_what_their_directions_say(kind):
    s = Settings(peak_length=24, peak_layers=2, sequences=2, planes=(13,))
    angles, x = np.array([theta(s, plane) for plane in range(32)]), np.arange(24)
    assert angles[13] == pytest.approx(10_000 ** (-26 / 64))
    if kind == "one plane":
        look = look_at(*experiment_of_rollout._one_plane(s, theta(s, 13), 0.0, 0)[:2])
        lost = s.turning * (1 - np.cos(x * angles[13]))
    else:
        query, key, lost = directions(kind, angles, 24, s.turning, torch.Generator().manual_seed(3))
        look = look_at(*experiment_of_rollout._turning(s, query, key, 0.0, 0))
        slow, aligned = kind.startswith("slow"), kind.endswith("aligned")
        planes = np.hypot(*query.numpy().reshape(2, 32)) > 0
        assert planes.all() if not slow else (planes == (angles * 23 <= math.pi)).all()
        assert torch.equal(query, key) == aligned == (look.logits[0, 0, 0, 0] == pytest.approx(s.turning))
        again = directions(kind.replace("slow", "all"), angles, 24, s.turning, torch.Generator().manual_seed(3))[0]
        ratio = (again / query)[query != 0]
        torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))  # the same directions, of another size
    i, j = np.tril_indices(24)
    logits = look.logits[:, :, i, j]
    np.testing.assert_allclose(logits, np.broadcast_to(logits[..., :1] - lost[i - j], logits.shape), atol=1e-5)
    assert not np.isfinite(look.logits[:, :, j, i][:, :, i > j]).any()


@pytest.mark.parametrize("attention", Settings.others)
def test_other_attention_against_products_of_weights_written_out(attention):
    a = replace(experiment_of_rollout._architecture(SMALL, {}, 6, 3), attention=attention)
    weights, inputs = experiment_of_rollout._fresh_weights(a, 8, 2.0, 0)
    found = beyond_first(a, weights, inputs)
    beyond, gone = np.zeros((2, 3, 8)), np.zeros((2, 3, 8))
    for n, vectors in enumerate(inputs):
        streams, _ = reference_toys.toy_pass(a, weights, vectors)
        products = [np.eye(6), np.eye(6)]
        for layer in range(3):
            normed = streams[layer] / torch.sqrt((streams[layer] ** 2).mean(-1, keepdim=True) + 1e-5)
            logits = (normed @ weights[f"{layer}.q"]) @ (normed @ weights[f"{layer}.k"]).T / 8**0.5
            own = np.tril((1 / (1 + (-logits).exp()) if attention == "sigmoid" else logits.clamp(min=0)).numpy())
            sums = own.sum(1, keepdims=True)
            for rows, pattern in enumerate((own, own / np.where(sums > 0, sums, 1))):
                products[rows] = pattern @ products[rows]
                last = products[rows][-1]
                gone[rows, layer, n] = not last.any()
                beyond[rows, layer, n] = np.nan if not last.any() else last[1:].sum() / last.sum()
    for rows, name in enumerate(("", SUMMED)):
        np.testing.assert_allclose(found[name][0], np.nanmean(beyond[rows], -1), rtol=1e-6)
        np.testing.assert_allclose(found[name][1], gone[rows].mean(-1))
    assert (gone[0, -1].any(), gone[0, -1].all()) == (attention == "relu", False)


def random_look(window: int = 7, prefix: int = 0, decay: float = 0.0, scale: float = 1.0) -> Look:
    logits = np.random.default_rng(3).normal(size=(2, 5, 7, 7)) * scale
    i, j = np.indices((7, 7))
    seen = (j <= i) & (i - j < window) | (j < prefix)
    logits = np.where(seen, logits - decay * (i - j), -np.inf)
    shares = np.exp(logits)
    return Look(logits, shares / shares.sum(-1, keepdims=True))


@pytest.mark.parametrize(("window", "prefix"), [(None, None), (3, None), (None, 2)])
def test_check_counts_what_is_beyond_the_bounds(window, prefix):
    look = random_look(window or 7, prefix or 0)
    products = look.rollouts()
    found = check(window, prefix, look, products)
    assert found.violations == 0
    assert found.checked >= 2 * 5 * 7 * 7
    entries = look.patterns[np.isfinite(look.logits)]
    assert found.eps == entries.min()
    first = prefix or 1
    np.testing.assert_allclose(found.outside, products[:, :, -1, first:].sum(-1).mean(0))
    # Walks that never come down are beyond every bound that says something, at all positions above the ground.
    stay = np.broadcast_to(np.eye(7), products.shape)
    beyond = check(window, prefix, look, stay)
    assert beyond.violations > 0
    assert (beyond.outside >= found.outside_bound - 1e-12).all()
    if prefix:
        products[0, 4, 6, 1] = 0.0  # no share of the prefix
        assert check(window, prefix, look, products).violations == 1


def test_decay_bounds_use_the_measured_spread_and_can_fail():
    look = random_look(decay=0.4, scale=0.2)
    products = np.stack([rollout(one) for one in look.patterns])
    lost = 0.4 * np.arange(7)

    def bounds(t, spread):
        return decay_bounds(7, t, 0.4, spread)

    found = decays_hold(look, products, lost, bounds)
    assert found.violations == 0
    assert found.checked == 2 * 2 * 5 * 28
    rest = look.logits + 0.4 * (np.arange(7)[:, None] - np.arange(7))
    spans = [np.ptp(row[: i + 1]) / 2 for sequence in rest for layer in sequence for i, row in enumerate(layer)]
    assert found.spread == pytest.approx(max(spans))
    # Constants per query are none of content's.
    shifted = Look(look.logits + np.arange(7.0)[:, None], look.patterns)
    assert decays_hold(shifted, products, lost, bounds).spread == pytest.approx(found.spread)
    assert decays_hold(look, products, lost, lambda t, spread: decay_bounds(7, t, 0.4, 0.1 * spread)).violations > 0
    assert decays_hold(look, products**2, lost, bounds).violations > 0


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_path_peaks_are_those_of_all_paths(layers):
    for lost in (0.25 * np.arange(14.0), 0.02 * np.arange(14.0) ** 2, 3 * (1 - np.cos(0.2 * np.arange(14)))):
        weights = [reference_toys.paths_weight(lost.tolist(), layers, x) for x in range(14)]
        assert path_peaks(lost, layers)[-1] == int(np.argmax(weights))


def test_path_peaks_of_decay_are_the_theorem_s_and_with_rope_at_or_beyond_them():
    for m in (0.1, 0.5, 1.0):
        expected = [math.floor(decay_peak(t, m) + 1e-9) for t in range(6)]
        assert path_peaks(m * np.arange(120), 6) == expected
    found = path_peaks(25 * (0.0133 * np.arange(128)) ** 2, 6)
    curve = [rope_peak(t, 25.0, 0.0133, 128) for t in range(6)]
    assert all(a >= b for a, b in zip(found, curve, strict=True))
    assert found[3] > curve[3]


def test_rates_are_those_of_exponentials():
    course = np.minimum(1, 3 * np.exp(-0.7 * np.arange(20)))
    assert rates(course) == pytest.approx(0.7)
    assert math.isnan(rates(np.ones(20)))
    assert math.isnan(rates(course[:4]))
    assert rates(np.append(course, np.nan)) == pytest.approx(0.7)


def test_run_keeps_every_bound(tiny):
    ds, report, *_ = tiny
    for name in ("", "decay_", "decay_peak_", "rope_", "planes_"):
        assert int(ds[f"{name}violations"].sum()) == 0
        assert int(ds[f"{name}checked"].sum()) > 1000
    assert set(ds["case"].values) == {"causal", "window 3", "prefix 2", "decay 0.3", "rope"}
    assert list(ds["source"].values) == ["fresh, logits 0.1", "fresh, logits 1", "trained, 2 blocks"]
    np.testing.assert_allclose(ds["last"].sum("key", skipna=False).isel(source=0), 1, rtol=1e-5)
    trained = ds.sel(source="trained, 2 blocks")
    assert np.isfinite(trained["outside"].sel(case="causal").isel(layer=[0, 1])).all()
    assert np.isnan(trained["outside"].isel(layer=2)).all()
    assert np.isnan(trained["eps"].sel(case="rope")).all()
    assert int(trained["checked"].sel(case="rope").sum()) == 0
    # A toy above the limit is left out of tables, claims and figures, and keeps its loss.
    one = {"source": "trained, 2 blocks", "case": "causal"}
    kept, failed = (learnt(ds.assign(loss=ds["loss"] * 0 + loss)).sel(one) for loss in (0.1, 0.3))
    assert np.isfinite(kept["eps"]).all()
    assert np.isnan(failed["eps"]).all()
    assert (kept["checked"].sum() > 0, failed["checked"].sum(), failed["loss"].mean()) == (True, 0, 0.3)
    # Next to no content: peaks are the theorem's.
    found = ds["decay_curve"].argmax("distance").sel(scale=0.01)
    assert (abs(found - decay_stars(ds)) <= 1).all()
    assert all("seed" in ds[name].dims for name in ds if not name.endswith("_paths"))
    verdict = {row[1]: row[3] for row in report.tables[-1].rows}
    assert [verdict[text] for text in verdict if "P(z_i >= j) <=" in text] == ["holds", "holds"]


def made_up() -> xr.Dataset:
    """A result in which every theorem holds."""
    s = Settings(seeds=3)
    distance = np.arange(128)
    coords = {
        "case": ["causal", "window 3", "window 5", "prefix 2"],
        "source": ["fresh, logits 0.1"],
        "seed": range(3),
        "layer": range(24),
        "key": range(17),
        "decay": [0.2, 1.0],
        "scale": [0.01, 1.0],
        "theta": [theta(s, plane) for plane in (13, 15)],
        "noise": [0.001, 0.02],
        "turned": list(s.turned),
        "attention": ["sigmoid", f"sigmoid{SUMMED}", "relu"],
        "peak_layer": range(4),
        "distance": distance,
    }
    slopes = np.array([0.6, 0.2, 0.4, 0.9])[:, None]
    outside = np.exp(-slopes * np.arange(1, 25))[:, None, None] * np.array([0.99, 1, 1.01])[:, None]
    bare = xr.Dataset(coords=coords, attrs={"settings": json.dumps(asdict(s))})
    stars = {"decay": decay_stars(bare).values, "rope": rope_stars(bare).values}
    curves = {name: np.exp(-np.abs(distance - at[..., None]))[:, None, None] for name, at in stars.items()}
    toys = "case source seed"
    kinds = {"": toys, "decay_": toys, "decay_peak_": "decay scale seed", "rope_": "theta noise seed"}
    kinds |= {"planes_": "turned noise seed"}
    falls = np.array([0.01, 0.02, -0.01, 0.01])[:, None, None, None] * distance**2 + 0 * np.arange(3)[:, None]
    falls[3, :, 1] -= 1.0 * (distance == 90)  # one random draw that does not fall
    even = 16 / (np.arange(24) + 17)
    shares = np.stack([even, np.exp(-0.6 * np.arange(24)), even])[:, None, None]
    counts = {f"{name}violations": (dims, 0) for name, dims in kinds.items()}
    counts |= {f"{name}checked": (dims, 1000) for name, dims in kinds.items()}
    return made_of(
        coords,
        s,
        last=(f"{toys} layer key", 1 / 17),
        outside=(f"{toys} layer", outside),
        outside_bound=(f"{toys} layer", outside**0.1),
        share=(f"{toys} layer", 0.3),
        eps=(toys, 0.01),
        loss=(toys, 0.1),
        decay_curve=("decay scale seed peak_layer distance", curves["decay"]),
        decay_paths=("decay peak_layer", stars["decay"]),
        rope_curve=("theta noise seed peak_layer distance", curves["rope"]),
        rope_paths=("theta peak_layer", stars["rope"]),
        planes_lost=("turned noise seed distance", falls),
        beyond=("attention source seed layer", shares),
        gone=("attention source seed layer", np.array([0.0, 0.0, 1.0])[:, None, None, None]),
        **counts,
    )


judged = partial(verdicts, "rollout", prefix="wu-thm-")


def test_claims_hold_where_the_theorems_do():
    found = judged(made_up())
    assert len(found) == 5 + 5 + 2 + 2 + 3
    assert set(found.values()) == {True}


@pytest.mark.parametrize(
    ("key", "change", "refuted"),
    [
        ("violations", put(0, to=1), "4.1-bound"),
        ("violations", put(1, to=1), "4.2-bound"),
        ("violations", put(3, to=1), "4.3-bound"),
        ("decay_peak_violations", put(..., to=1), "4.4-and-4.5-bound"),
        ("rope_violations", put(..., to=1), "4.6-and-4.7-bound"),
        ("outside", lambda x: np.maximum(x, 0.1), "4.1-limit"),
        # The mass goes, but not exponentially.
        ("outside", lambda x: 1 / np.arange(1, 25) ** 2 + 0 * x, "4.1-limit"),
        ("outside", lambda x: np.maximum(x, 0.4), "4.2-limit"),
        ("outside", lambda x: x[[0, 2, 1, 3]], "4.2-rate"),
        ("outside", lambda x: np.maximum(x, 0.1), "4.3-limit"),
        ("share", lambda x: x * np.exp(-0.2 * np.arange(24)), "4.3-shares"),
        ("decay_curve", lambda x: np.roll(x, 3, -1), "4.5-peak"),
        ("decay_curve", lambda x: x[:, :, :, ::-1], "4.5-peak-moves"),
        ("rope_curve", lambda x: x[:, :, :, ::-1], "4.7-peak-with-depth"),
        ("rope_curve", lambda x: x[::-1], "4.7-peak-with-angle"),
        ("planes_violations", put(..., to=1), "wu-app-i-planes-bound"),
        ("beyond", put(0, ..., slice(20, None), to=0.01), "wu-other-attention"),
        ("beyond", put(1, ..., 23, to=0.2), "wu-other-attention-summed"),
        # Runs that place peaks differently leave it open.
        ("decay_curve", lambda x: np.stack([np.roll(x[:, :, n], n**2, -1) for n in range(3)], 2), "4.5-peak?"),
    ],
)
def test_each_claim_can_fail(key, change, refuted):
    assert refuted in questioned("rollout", changed(made_up(), key, change), "wu-thm-")


def test_claims_without_what_they_need_are_not_judged():
    ds = made_up()
    assert set(judged(ds[["eps", "outside", "loss"]].isel(source=slice(0))).values()) == {None}
    assert judged(ds.isel(layer=slice(3), case=[0, 1]))["4.1-limit"] is None
    assert len(tables(ds)) >= 4
    assert [crossing(ds, w) for w in (2, 3, 5, 9, 17)] == [16, 8, 4, 2, 1]
