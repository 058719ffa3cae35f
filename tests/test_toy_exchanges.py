"""Experiment exchanges: circles, dates of exchanges, chance."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

from toy.experiments import exchanges as module
from toy.experiments.exchanges import Settings, circle, exchanges
from toy.train import Trained

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
    ((at, *pair),) = exchanges(angles)
    assert pair == [0, 1]
    assert angles[at, 0] == pytest.approx(angles[at, 1], abs=0.15 * gap)


def test_who_goes_round_passes_everyone_once():
    angles = np.tile(np.linspace(0, 2 * math.pi, 8, endpoint=False), (400, 1))
    angles[:, 3] += np.linspace(0, 2 * math.pi, 400)
    found = exchanges(angles % (2 * math.pi))[:, 0]
    np.testing.assert_allclose(found, np.arange(1, 8) * 399 / 8, atol=1)
    # Half a circle away, who is ahead of whom turns round without any exchange.
    angles = np.tile(np.linspace(0, 2 * math.pi, 8, endpoint=False), (400, 1))
    angles[:, 3] += np.linspace(0, 0.4 * math.pi / 8, 400)
    assert exchanges(angles).size == 0


def test_exchanges_near_spikes_are_told_from_chance(monkeypatch):
    """Two tokens change places in the middle of the training, and another pair before any circle is there."""
    one: Any = {"seeds": 1, "residual": ("on",), "learning_rate": (0.1,), "schedule": ("constant",)}
    s = Settings(vocabulary=8, test=4, steps=4000, every=10, **one)
    kept = np.arange(0, 4001, 10)
    angles = np.tile(np.linspace(0, 2 * math.pi, 8, endpoint=False), (len(kept), 1))
    for token, at in ((0, 200), (4, 40)):
        angles[:, token] += np.where(np.arange(len(kept)) < at, 0, 1.5 * 2 * math.pi / 8)
        angles[:, token + 1] -= np.where(np.arange(len(kept)) < at, 0, 0.4 * 2 * math.pi / 8)
    rows = torch.tensor(turned(angles)).float()
    recorded = {int(step): {"unembedding": of.T, "embedding": of} for step, of in zip(kept, rows, strict=True)}
    losses = torch.full((4000,), 0.5)
    losses[[*range(495, 545), *range(1960, 2010)]] = 3.0
    positions = torch.tensor([[0.0, 2.0], [0.0, 3.0], [1.0, -1.0], [0.0, 4.0]])  # the third is asked for
    model = Trained(s.runs()[0], losses, {"positions": positions}, recorded)
    picks = np.array([[True, False, False, False], [True] * 4])
    monkeypatch.setattr(module, "scored", lambda models, test: (np.arange(4.0 * len(models)).reshape(-1, 4), picks))
    monkeypatch.setattr(module, "fresh", lambda task, test: (None, torch.tensor([0, 1, 5, 0])))
    work: Any = SimpleNamespace(train=lambda *_, **__: [model], advance=lambda *_: None)
    ((cell, found),) = module._followed(s, kept, np.array([100, 400]), work)
    assert cell == ("on", 0.1, "constant", 0)
    assert found["exchanges"].tolist() == [1, 1]  # by the two points
    assert found["rate"] == [1000 / 3200, 1000 / 3200]  # of the embedding, of the unembedding
    assert (found["spikes"], found["spiked"]) == (1, 1.0)
    assert found["wrong"] == [1 / 3, 0]  # of losses 0 to 3 that of the last, about token 0, is above log 8
    s = np.array([-1.0, 3.0]) / math.sqrt(10)  # towards the nearest of the others
    assert found["parted"] == pytest.approx(-positions[2].numpy() @ s, rel=1e-6)
    assert found["order"].tolist() == np.argsort(circle(turned(angles))[2][-1]).tolist()
    (_, begun) = module.spikes(losses.numpy(), 8)
    near = sum(abs(step - begun) <= 50 for step in range(800, 4001, 10))
    assert found["spiked_chance"] == near / 321
    assert (found["picked"].tolist(), found["loss"].tolist()) == ([0.25, 1], [1.5, 5.5])


def test_orders_are_compared_up_to_turns_and_reflections():
    one = np.arange(9)
    orders = np.stack([one, np.roll(one[::-1], 4), one * 2 % 9]).reshape(
        1, 1, 1, 3, 9
    )  # the last: no common neighbours
    ds = xr.Dataset({"order": ((*module.DIMS, "token"), orders)})
    np.testing.assert_allclose(module.shared(ds).values.ravel(), np.array([1 / 2, 1 / 2, 0]) - 2 / 8)
