"""Experiment petroglyph: the exact test against a plain twin, the task, a tiny run whose blind models stay at one half."""

from itertools import permutations

import numpy as np
import pytest
import reference_toys
import torch

from toy.experiments import petroglyph
from toy.experiments.petroglyph import ROUNDING, Settings, differences, distinct_tokens, exact_outputs, prefix_orders
from toy.model import initial
from toy.tasks import WhichFirst, mirrored
from toy.train import stacked


def test_orders_are_all_permutations_of_prefixes_without_repeats():
    orders = prefix_orders(5).tolist()
    assert orders[0] == [0, 1, 2, 3, 4]
    assert sorted(map(tuple, orders)) == sorted((*p, 4) for p in permutations(range(4)))
    tokens = distinct_tokens(7, 6, 20).tolist()
    assert {len(set(row)) for row in tokens} == {6}
    assert len({tuple(row) for row in tokens}) > 15


def test_outputs_are_the_twins():
    architecture = Settings().architecture(layers=2, mask="causal", positional="decay", residual=False)
    weights, tokens = initial(architecture, 3), distinct_tokens(10, 6, 2)
    found = exact_outputs(architecture, stacked([weights]), tokens)[0]
    twins = torch.stack([reference_toys.toy_pass(architecture, weights, row)[1] for row in tokens])
    torch.testing.assert_close(found, twins, rtol=1e-12, atol=1e-14)


def test_differences_are_largest_and_least_over_permutations_and_sequences():
    architecture = Settings().architecture(layers=2, mask="causal", positional="none", length=4)
    weights = stacked([initial(architecture, seed) for seed in (0, 1)])
    tokens, orders = distinct_tokens(10, 4, 3), prefix_orders(4)
    largest, least = differences(architecture, weights, tokens, orders)
    for model in range(2):
        own = {name: x[model : model + 1] for name, x in weights.items()}
        outputs = [[exact_outputs(architecture, own, row[order][None])[0, 0] for order in orders] for row in tokens]
        size = max(float(out.abs().max()) for row in outputs for out in row)
        changes = [float((out - row[0]).abs().max()) for row in outputs for out in row[1:]]
        assert largest[model] * petroglyph.EPS == pytest.approx(max(changes) / size, rel=1e-9)
        assert least[model] * petroglyph.EPS == pytest.approx(min(changes) / size, rel=1e-9)


def test_task_answers_which_marked_token_stands_first():
    task = WhichFirst(vocabulary=5, length=6, batch=500)
    drawn = task.draw(None, torch.Generator().manual_seed(1), 2)
    places = set()
    for row, answer in zip(drawn.inputs.flatten(0, 1).tolist(), task.answers(drawn).flatten().tolist(), strict=True):
        assert row.count(0) == row.count(1) == 1
        assert row[-1] > 1
        assert max(row) < 5
        assert next(token for token in row if token < 2) == answer
        places.add((row.index(0), row.index(1)))
    assert len(places) == 5 * 4  # every pair of places before the last one
    assert float(task.answers(drawn).double().mean()) == pytest.approx(0.5, abs=0.08)
    tokens = torch.tensor([[3, 0, 4, 1, 2], [1, 2, 2, 0, 3]])
    assert mirrored(tokens).tolist() == [[3, 1, 4, 0, 2], [0, 2, 2, 1, 3]]


def test_blind_models_are_right_in_exactly_one_half_whatever_they_learned(tiny):
    ds = tiny.ds
    impossible = ds["difference"].sel(mask="full", positional="decay")
    assert int(np.isnan(impossible).sum()) == impossible.size == int(np.isnan(ds["difference"]).sum())
    for layers, mask in ((1, "causal"), (1, "full"), (2, "full")):
        here = ds.sel(layers=layers, mask=mask, trained_positional="none")
        assert (here["accuracy"] == 0.5).all()
        assert (here["trained_difference"] < ROUNDING).all()
    # They did train, and those that see order are not at one half.
    here = ds.sel(layers=2, mask="causal", trained_positional="none")
    assert (here["accuracy"].isel(step=-1) != 0.5).all()
