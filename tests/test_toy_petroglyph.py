"""Experiment petroglyph: the exact test against a plain twin, the task, a tiny run, the rules both ways."""

from itertools import permutations

import numpy as np
import pytest
import reference_toys
import torch
import xarray as xr
from tiny_runs import questioned, verdicts

from toy.experiments import petroglyph
from toy.experiments.petroglyph import ROUNDING, Settings, differences, distinct_tokens, exact_outputs, prefix_orders
from toy.model import initial
from toy.tasks import WhichFirst, mirrored
from toy.train import stacked


def solved(ds: xr.Dataset) -> xr.Dataset:
    """The same, as if the models that can tell order apart had learned to."""
    ds = ds.copy(deep=True)
    blind = abs(ds["accuracy"] - 0.5).max("step") == 0
    ds["accuracy"] = ds["accuracy"].where(blind | (ds["step"] < ds["step"].max()), 0.99)
    return ds


def test_orders_are_all_permutations_of_prefixes_without_repeats():
    orders = prefix_orders(5)
    assert orders.shape == (24, 5)
    assert orders[0].tolist() == [0, 1, 2, 3, 4]
    assert {tuple(order) for order in orders.tolist()} == {(*p, 4) for p in permutations(range(4))}
    tokens = distinct_tokens(7, 6, 20).tolist()
    assert {len(set(row)) for row in tokens} == {6}
    assert len({tuple(row) for row in tokens}) > 15


@pytest.mark.parametrize(
    ("layers", "mask", "residual", "positional"),
    [(1, "causal", True, "none"), (2, "causal", False, "decay"), (2, "full", True, "none")],
)
def test_outputs_are_the_twins(layers, mask, residual, positional):
    architecture = Settings().architecture(layers=layers, mask=mask, positional=positional, residual=residual)
    weights = initial(architecture, 3)
    tokens = distinct_tokens(10, 6, 2)
    found = exact_outputs(architecture, stacked([weights]), tokens)[0]
    assert found.dtype == torch.float64
    for row, out in zip(tokens, found.tolist(), strict=True):
        assert out == pytest.approx(
            reference_toys.toy_pass(architecture, weights, row)[1].tolist(), rel=1e-12, abs=1e-14
        )


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
    assert drawn.inputs.shape == (2, 500, 6)
    places = set()
    for row, answer in zip(drawn.inputs.flatten(0, 1).tolist(), task.answers(drawn).flatten().tolist(), strict=True):
        assert row.count(0) == row.count(1) == 1
        assert row[-1] > 1
        assert next(token for token in row if token < 2) == answer
        assert max(row) < 5
        places.add((row.index(0), row.index(1)))
    assert len(places) == 5 * 4  # every pair of places before the last one
    assert float(task.answers(drawn).double().mean()) == pytest.approx(0.5, abs=0.08)


def test_mirror_images_exchange_the_marked_tokens_and_nothing_else():
    tokens = torch.tensor([[3, 0, 4, 1, 2], [1, 2, 2, 0, 3]])
    assert mirrored(tokens).tolist() == [[3, 1, 4, 0, 2], [0, 2, 2, 1, 3]]


def test_blind_models_are_right_in_exactly_one_half_whatever_they_learned(tiny):
    ds = tiny.ds
    assert ds["difference"].dims == ("layers", "mask", "positional", "residual", "feed_forward", "norm", "seed")
    assert ds["accuracy"].dims == ("layers", "mask", "trained_positional", "seed", "step")
    impossible = ds["difference"].sel(mask="full", positional="decay")
    assert np.isnan(impossible).all()
    assert int(np.isnan(ds["difference"]).sum()) == impossible.size
    for layers, mask in ((1, "causal"), (1, "full"), (2, "full")):
        here = ds.sel(layers=layers, mask=mask, trained_positional="none")
        assert (here["accuracy"] == 0.5).all()
        assert (here["trained_difference"] < ROUNDING).all()
    # They did train, and those that see order are not at one half.
    here = ds.sel(layers=2, mask="causal", trained_positional="none")
    assert (here["accuracy"].isel(step=-1) != 0.5).all()


def test_exact_statements_hold_in_the_tiny_run_and_learning_is_judged(tiny):
    found = verdicts("petroglyph", solved(tiny.ds), "petroglyph-")
    assert set(found.values()) == {True}, found
    assert len(found) == 9
    assert verdicts("petroglyph", tiny.ds)["petroglyph-two-layers-learn"] is False  # in 40 steps


ONE = {"layers": 1, "mask": "causal", "positional": "none"}
TWO = {"layers": 2, "mask": "causal", "positional": "none"}
FULL = {"layers": 2, "mask": "full", "positional": "none"}


@pytest.mark.parametrize(
    ("name", "where", "value", "refuted"),
    [
        ("difference", ONE, 1e4, ["one-layer-blind"]),
        ("least_difference", TWO, 1e8, ["two-layers-see"]),
        ("difference", FULL, 1e4, ["full-mask-blind"]),
        ("least_difference", ONE | {"positional": "rope"}, 2.0, ["encoding-sees"]),
        ("trained_difference", ONE, 1e10, ["trained"]),
        ("trained_difference", TWO, 3.0, ["trained"]),
        ("trained_difference", FULL, 1e10, ["trained"]),
        ("accuracy", ONE, 0.53, ["one-layer-cannot-learn"]),
        ("accuracy", TWO, 0.9, ["two-layers-learn"]),
        ("accuracy", FULL, 0.48, ["full-mask-cannot-learn"]),
        ("accuracy", ONE | {"positional": "learned"}, 0.6, ["encoding-learns"]),
    ],
)
def test_each_rule_can_fail(tiny, name, where, value, refuted):
    ds = solved(tiny.ds)
    place = {("trained_positional" if d == "positional" and d not in ds[name].dims else d): v for d, v in where.items()}
    if "residual" in ds[name].dims:  # one variant and seed of many
        place |= {"residual": 1, "feed_forward": 0, "norm": "rms", "seed": 1}
    ds[name].loc[place] = value
    assert questioned("petroglyph", ds, "petroglyph-") == set(refuted)
