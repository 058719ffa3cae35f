"""Experiment exchanges: circles, dates of exchanges and losses against slow twins, chance."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import reference_toys
import torch

from toy.experiments import exchanges as module
from toy.experiments.exchanges import Exchange, Settings, circle, exchanges, on_fresh, passing
from toy.model import initial
from toy.tasks import Copying
from toy.train import Trained, seed_of

rng = np.random.default_rng(0)


def turned(angles: np.ndarray, centre: tuple[float, float] = (0.0, 0.0), radius: float = 1.0) -> np.ndarray:
    """Points [step, token, axis] at these angles."""
    return np.stack([np.cos(angles), np.sin(angles)], -1) * radius + np.array(centre)


def test_a_circle_is_found_wherever_it_lies():
    even = np.linspace(0, 2 * math.pi, 12, endpoint=False)
    moved = turned(np.stack([even, even + 0.3]), (5.0, -3.0), 2.0)
    roundness, spread, angles = circle(moved)
    np.testing.assert_allclose([roundness, spread], 0, atol=1e-9)
    np.testing.assert_allclose(np.exp(1j * angles[1]), np.exp(1j * (even + 0.3)), atol=1e-9)
    # Deviations are those of the radius and of the gaps themselves.
    uneven = np.sort(rng.uniform(0, 2 * math.pi, 12))
    gaps = np.diff(np.append(uneven, uneven[0] + 2 * math.pi))
    _, (spread,), _ = circle(turned(uneven[None]))
    assert spread == pytest.approx(gaps.std() / gaps.mean(), rel=1e-9)
    both = np.concatenate([turned(even[None]), turned(even[None], radius=3.0)], 1)  # two circles around one centre
    (roundness,), _, _ = circle(both)
    assert roundness == pytest.approx(1 / 2, rel=1e-9)


def test_an_exchange_is_dated_between_and_jostling_is_none():
    steps = 41
    angles = np.tile(np.linspace(0, 2 * math.pi, 8, endpoint=False), (steps, 1))
    gap = 2 * math.pi / 8
    path = np.linspace(0, 1.5 * gap, steps)
    angles[:, 0] += path  # passes token 1, which moves back by less than half a gap
    angles[:, 1] -= path / 6
    angles[:, 4] += 0.45 * gap * np.sin(np.arange(steps))  # never half a gap beyond a neighbour
    angles[:, 5] = angles[:, 4] + 0.4 * gap * np.where(np.arange(steps) % 2, 1, -1)
    (found,) = exchanges(angles)
    assert (found.one, found.other) == (0, 1)
    assert angles[found.at, 0] == pytest.approx(angles[found.at, 1], abs=0.15 * gap)


def test_who_goes_round_passes_everyone_once():
    angles = np.tile(np.linspace(0, 2 * math.pi, 8, endpoint=False), (400, 1))
    angles[:, 3] += np.linspace(0, 2 * math.pi, 400)
    found = exchanges(angles % (2 * math.pi))
    assert [one.other if one.one == 3 else one.one for one in found] == [4, 5, 6, 7, 0, 1, 2]
    # Half a circle away, who is ahead of whom turns round without any exchange.
    angles = np.tile(np.linspace(0, 2 * math.pi, 8, endpoint=False), (400, 1))
    angles[:, 3] += np.linspace(0, 0.4 * math.pi / 8, 400)
    assert exchanges(angles) == []


def test_losses_by_token_are_means_over_the_sequences_that_ask_for_it():
    run = Settings(vocabulary=6, batch=64).runs()[0]
    weights = {step: initial(run.architecture, step) for step in (0, 100)}
    losses, right = on_fresh(Trained(run, torch.zeros(1), {}, weights), np.array([0, 100]), 100)
    tokens = Copying(6, 4, batch=100).draw(None, torch.Generator().manual_seed(seed_of(0, -1)), 1).inputs[0]
    for n, step in enumerate((0, 100)):
        logits = torch.stack([reference_toys.toy_pass(run.architecture, weights[step], ids)[1] for ids in tokens])
        own = -logits.log_softmax(-1)[torch.arange(100), tokens[:, -2]]
        by_token = [float(own[tokens[:, -2] == token].mean()) for token in range(6)]
        assert losses[n].tolist() == pytest.approx(by_token, rel=1e-6)
        leads = [float(row[ids[-2]]) == float(row[ids].max()) for row, ids in zip(logits, tokens, strict=True)]
        assert right[n] == np.mean(leads)


def test_what_passing_costs():
    losses = np.ones((50, 4))
    losses[20, [1, 2]] = 3.0
    lags = np.arange(-4, 5)
    curves = passing([Exchange(20, 1, 2), Exchange(2, 0, 1), Exchange(47, 0, 1)], losses, lags)
    np.testing.assert_allclose(curves, [[1, 1, 1, 1, 3, 1, 1, 1, 1], [1] * 9])
    # The other exchanges stand too near to an end.
    assert np.isnan(passing([], losses, lags)).all()


def test_exchanges_near_spikes_are_told_from_chance(monkeypatch):
    """Two tokens change places in the middle of the training, and another pair before any circle is there."""
    s = Settings(
        vocabulary=8, seeds=1, steps=4000, every=10, residual=("on",), learning_rate=(0.1,), schedule=("constant",)
    )
    kept = np.arange(0, 4001, 10)
    angles = np.tile(np.linspace(0, 2 * math.pi, 8, endpoint=False), (len(kept), 1))
    for token, at in ((0, 200), (4, 40)):
        angles[:, token] += np.where(np.arange(len(kept)) < at, 0, 1.5 * 2 * math.pi / 8)
        angles[:, token + 1] -= np.where(np.arange(len(kept)) < at, 0, 0.4 * 2 * math.pi / 8)
    rows = torch.tensor(turned(angles)).float()
    recorded = {int(step): {"unembedding": of.T, "embedding": of} for step, of in zip(kept, rows, strict=True)}
    losses = torch.full((4000,), 0.5)
    losses[[*range(495, 545), *range(1960, 2010)]] = 3.0
    model = Trained(s.runs()[0], losses, {}, recorded)
    by_token = np.ones((len(kept), 8))
    by_token[199, [0, 1]] = 3.0
    monkeypatch.setattr(module, "on_fresh", lambda *_: (by_token, np.linspace(0, 1, len(kept))))
    work: Any = SimpleNamespace(train=lambda *_, **__: [model], advance=lambda *_: None)
    points, lags = np.array([100, 400]), np.arange(-3, 4)
    ((cell, found),) = module._followed(s, kept, points, lags, work)
    assert cell == ("on", 0.1, "constant", 0)
    assert found["exchanges"].tolist() == [1, 1]  # by the two points
    assert found["rate"] == [1000 / 3200, 1000 / 3200]  # of the embedding, of the unembedding
    assert (found["spikes"], found["spiked"]) == (1, 1.0)
    (_, begun) = module.spikes(losses.numpy(), 8)
    near = sum(abs(step - begun) <= 50 for step in range(800, 4001, 10))
    assert found["spiked_chance"] == near / 321
    assert found["picked"].tolist() == [0.25, 1]
    np.testing.assert_allclose(found["loss"], 1)
    assert found["passing"][0].tolist() == [1, 1, 1, 3, 1, 1, 1]
