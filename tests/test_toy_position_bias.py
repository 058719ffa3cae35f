"""Experiment position-bias: the grid, a tiny run through the frame against its models, agreement of two kinds of models."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from tiny_runs import TINY

from probes.claims.rules import SURE
from probes.errors import InputError
from toy.experiments import experiment
from toy.experiments import position_bias as module
from toy.experiments.in_context import generator_of, switches_of
from toy.experiments.position_bias import DIMS, PAIRS, QUICK, Case, Settings, cases
from toy.experiments.position_bias.statements import agreement, kept_from
from toy.train import logits, train


def test_grid_is_every_combination_that_there_is_and_a_plan_the_contrasts_of_the_paper():
    s = Settings()
    grid = cases(s)
    assert len(set(grid)) == len(grid) == 2 * 2 * 3 * 2 * 5 * (4 + 3) * 5
    assert not [c for c in grid if c.positional == "decay" and c.mask == "full"]
    order = [(c.scale == "program", c.data == "fixed", c.depth, c.seed) for c in grid]
    assert order == sorted(order)  # whole seeds of whole depths
    parts = module.parts(grid, "cpu").values()
    assert all(len({module.run_of(c, s).task for c in part}) == 1 for part in parts)
    assert [len(part) for part in module.parts(grid, "cuda").values()] == [len(grid) // 3] * 3
    assert sorted(repr(c) for part in parts for c in part) == sorted(map(repr, grid))
    masks = ("causal", "full", *module.OTHER_MASKS)
    grid = cases(
        Settings(plan="contrasts", masks=masks, residual=("on", "off"), scales=("text",), depths=(2, 4), seeds=3)
    )
    assert len(grid) == len({*grid}) == 3 * (4 * 5 + 3 * 3 + 6 + 4 + 2) + 2 * 4
    assert {(c.mask, c.training) for c in grid if c.residual == "off"} == {("causal", "unbiased")}
    assert {c.positional for c in grid if c.data == "fixed"} == {"none", "rope"}
    assert {c.seed for c in grid if c.depth == 4} == {0, 1}


def test_checks_and_masks_are_what_the_settings_say():
    steps = module.check_steps(Settings())
    assert (steps[0], steps[-1], len(steps)) == (100, 100_000, 10)
    assert module.check_steps(replace(QUICK, checks=1)) == [600]
    assert module.check_steps(Settings(steps=3)) == [3]
    assert switches_of("window-5") == {"mask": "window", "window": 5}
    for name in ("causal-5", "window", "window--1", "sliding-5"):
        with pytest.raises(InputError, match=r"unknown; give causal, full, window-N"):
            switches_of(name)


def test_a_tiny_run_has_every_model_of_its_grid_and_the_numbers_of_its_models(tiny):
    ds, s = tiny.ds, experiment.settings_of("position-bias", quick=False, given=TINY["position-bias"])
    there = ds["gap"].notnull().all("pair")
    assert int(there.sum()) == len(cases(s))
    assert all(bool(there.sel(case._asdict())) for case in cases(s))
    for name in ("accuracy_by_position", "training_loss"):
        assert (ds[name].notnull().all([dim for dim in ds[name].dims if dim not in DIMS]) == there).all()
    # The last check is the trained model, on as many sequences.
    np.testing.assert_array_equal(ds["course_novel"].isel(step=-1), ds["novel_accuracy"])
    assert ds["step"].values.tolist() == [6]  # checks begin at step 100, or at the end of shorter training
    case = Case("text", "gaussian", 2, "causal", "rope", "off", "first-and-last", 1)
    (model,) = train([module.run_of(case, s)], s.steps)
    task: Any = model.run.task
    world, here, cpu = task.world(1, "cpu"), ds.sel(case._asdict()), torch.device("cpu")

    def share(drawn):
        right = logits([model], drawn.inputs[0])[0].argmax(-1) == drawn.hidden[0]
        return float(right.float().mean())

    few = 2.01 / s.tests  # ties of logits at most
    for n, (earlier, later) in enumerate(PAIRS.values()):
        first, second = (
            share(task.pairs(world, generator_of(cpu, "pairs", 1, n, m), s.tests, right, wrong))
            for m, (right, wrong) in enumerate(((earlier, later), (later, earlier)))
        )
        assert float(here["gap"][n]) == pytest.approx(first - second, abs=few)
    drawn = task.single(world, generator_of(cpu, "single", 1, 5), s.tests, 5)
    assert float(here["accuracy_by_position"][5]) == pytest.approx(share(drawn), abs=few)
    unbiased = replace(task, biased=None)
    own, changed = (getattr(unbiased, of)(world, generator_of(cpu, of, 1), s.tests) for of in ("novel", "relabelled"))
    assert float(here["novel_accuracy"]) == pytest.approx(share(own), abs=few)
    assert float(here["by_heart"]) == pytest.approx(share(changed), abs=few)
    assert float(here["training_loss"][-1]) == pytest.approx(float(model.losses.mean()), rel=1e-5)


def test_learning_is_told_by_the_step_from_which_on_it_stays():
    course = xr.DataArray([[0.5, 0.9, 0.8], [0.9, 0.7, 0.6]], {"step": [100, 316, 1000]}, ("seed", "step"))
    np.testing.assert_array_equal(kept_from(xr.Dataset({"course_novel": course})), [316, np.nan])


def test_the_same_biases_are_the_same_in_every_gap():
    def found(*means: float) -> str:
        runs = (np.add.outer(gaps, [-0.001, 0.0, 0.001]) for gaps in ((0.3, 0.2, 0.0), means))
        _, test = agreement(*(xr.DataArray(x, dims=("pair", "seed")) for x in runs))
        assert test is not None
        return test(SURE)

    assert found(0.1, 0.4, 0.01) == "holds"  # the last is none in both
    assert (found(0.1, 0.4, 0.1), found(0.1, -0.4, 0.1)) == ("undecided", "does not hold")
