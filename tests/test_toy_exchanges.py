"""Experiment exchanges: circles, dates of exchanges and losses against slow twins, chance, the rules both ways."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import changed, claims, made_up, put, questioned, verdicts

from toy.experiments import exchanges as module
from toy.experiments.circles import Exchange, circle, exchanges, passing
from toy.experiments.exchanges import Settings, on_fresh
from toy.train import logits, train

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


def tiny(**given: Any) -> Settings:
    return Settings(vocabulary=6, seeds=1, steps=400, every=100, points=4, batch=64, test=100, **given)


def test_losses_and_picks_are_those_of_the_sequences():
    s = tiny(residual=("on",), learning_rate=(0.1,), schedule=("constant",))
    kept = np.array([0, 100, 400])
    names = ("embedding", "positions", "0.q", "0.k", "0.v", "0.o", "unembedding")
    (model,) = train(s.runs(), s.steps, record=kept.tolist(), recorded=names)
    found, right = on_fresh(model, kept, s.test)
    assert (found.shape, right.shape) == ((3, 6), (3,))
    task: Any = model.run.task
    drawn = task.draw(None, torch.Generator().manual_seed(module.seed_of(0, module.TEST_BLOCK)), 2)
    inputs = drawn.inputs.flatten(0, 1)[:100]
    said = logits([model], inputs)[0].double().log_softmax(-1)
    for token in range(6):
        own = [-float(row[token]) for row, ids in zip(said, inputs.tolist(), strict=True) if ids[-2] == token]
        assert own
        assert found[-1, token] == pytest.approx(np.mean(own), rel=1e-5, abs=1e-7)
    assert found[0].mean() > found[-1].mean()
    leads = [row[ids[-2]] == max(row[ids]) for row, ids in zip(said, inputs.tolist(), strict=True)]
    assert right[-1] == np.mean(leads)
    assert right[0] < right[-1]


def test_what_passing_costs():
    losses = np.ones((50, 4))
    losses[20, [1, 2]] = 3.0
    lags = np.arange(-4, 5)
    curves, costs = passing([Exchange(20, 1, 2), Exchange(2, 0, 1), Exchange(47, 0, 1)], losses, lags)
    np.testing.assert_allclose(curves, [[1, 1, 1, 1, 3, 1, 1, 1, 1], [1] * 9])
    np.testing.assert_allclose(costs, [2.0, np.nan, np.nan])  # the others stand too near to an end
    assert np.isnan(passing([], losses, lags)[0]).all()


def test_high_losses_at_exchanges_are_told_from_chance():
    s = Settings(seeds=1, steps=10_000)
    kept = np.arange(0, s.steps + 1, s.every)
    dates = np.arange(500, 1900, 100)
    loss = np.ones(len(kept))
    loss[dates] += 1.0

    class Model:
        losses = torch.ones(s.steps)

    found = [Exchange(int(at), 0, 1) for at in dates]
    model: Any = Model()
    beside = module._beside(found, loss, model, kept, s, np.random.default_rng(0))
    assert beside["excess"] == pytest.approx(1.0)
    # The shifted dates meet the same peaks together or not at all: once in 100 shifts.
    assert beside["excess_chance"] < 0.1
    assert (beside["spikes"], beside["spiked"], beside["spiked_chance"]) == (0, 0, 0)
    flat = module._beside(found, np.ones(len(kept)), model, kept, s, np.random.default_rng(0))
    assert (flat["excess"], flat["excess_chance"], flat["excess_scatter"]) == (0, 0, 0)
    assert module._beside([], loss, model, kept, s, np.random.default_rng(0)) == {"spikes": 0}
    # One spike, and every exchange at it: chance has a 101st of 8,000 steps.
    model.losses = torch.full((s.steps,), 0.5)
    model.losses[4990:5040] = 3.0
    (begun,) = module.spikes(model.losses.numpy(), s.vocabulary)
    told = module._beside([Exchange(begun // s.every, 0, 1)] * 9, loss, model, kept, s, np.random.default_rng(0))
    assert (told["spikes"], told["spiked"]) == (1, 1.0)
    assert told["spiked_chance"] == pytest.approx(
        101 / 8000, abs=4 * 0.112 / math.sqrt(s.shifts)
    )  # four standard errors


@pytest.fixture(scope="module")
def everything():
    """A result in which all statements hold."""
    s = Settings(seeds=3, points=2)
    coords = {
        "residual": s.residual,
        "learning_rate": s.learning_rate,
        "schedule": s.schedule,
        "seed": range(3),
        "table": module.TABLES,
        "point": [5000, 10_000],
        "who": ["the two", "others"],
        "lag": [-100, -50, 0, 50, 100],
    }
    dims = "residual learning_rate schedule seed"
    seeds = np.array([0.001, 0.002, 0.003])
    return made_up(
        {name: list(values) for name, values in coords.items()},
        s,
        roundness=(f"{dims} table point", (0.02 + seeds)[:, None, None]),
        gap_spread=(f"{dims} table point", np.array([0.08, 0.05])[:, None, None, None] + seeds[:, None, None]),
        rate=(f"{dims} table", np.array([100, 50])[:, None, None] + seeds[:, None]),
        spikes=(dims, 3 + 0 * seeds),
        spiked=(dims, 0.9 + seeds),
        spiked_chance=(dims, 0.1 + seeds / 2),
        excess=(dims, 0.1 + seeds),
        excess_chance=(dims, 0.01 + seeds / 2),
        loss=(f"{dims} point", 1 + seeds[:, None]),
        picked=(f"{dims} point", 0.9 + seeds[:, None]),
        passing=(f"{dims} who lag", np.array([1.0, 1.0, 1.5, 1.0, 1.0]) + seeds[:, None, None]),
    )


def test_all_statements_hold_where_they_do(everything):
    found = verdicts("exchanges", everything, prefix="liu4-exchanges-")
    assert [name for name, holds in found.items() if holds is not True] == []
    assert len(found) == 7


@pytest.mark.parametrize(
    ("name", "change", "fails"),
    [
        ("roundness", lambda x: x + 0.5, {"circle", "circle-of-embeddings"}),
        ("rate", lambda x: x * [-1, 1], {"change-places"}),
        ("rate", lambda x: x[:, :, ::-1], {"decay-fewer-exchanges"}),
        ("spiked_chance", lambda x: x + 0.9, {"at-spikes"}),
        ("gap_spread", lambda x: x[:, :, :1] + 0 * x, {"decay-more-even"}),
    ],
)
def test_statements_fail_where_they_do_not_hold(everything, name, change, fails):
    assert questioned("exchanges", changed(everything, name, change), "liu4-exchanges-") == fails


def test_toys_blind_to_order_are_not_judged(everything):
    """Toys at the constant rate of 0.1 know the order in one of two settings, then in none."""
    at = (0, 1, 0)  # without residual stream, at the constant rate of 0.1
    one = changed(everything, "picked", put(*at, to=0.4))
    found = {claim.id: claim for claim in claims("exchanges", one)}
    assert {claim.verdict for claim in found.values()} == {"holds"}
    assert found["liu4-exchanges-circle"].measured.startswith("on 0.022")
    found = {claim.id: claim for claim in claims("exchanges", changed(one, "picked", put(slice(None), 1, 0, to=0.4)))}
    assert {claim.verdict for claim in found.values()} == {"not trained"}


def test_other_settings_are_not_judged(everything):
    slow = verdicts("exchanges", everything.sel(learning_rate=[0.01]), prefix="liu4-exchanges-")
    assert set(slow.values()) == {None}
