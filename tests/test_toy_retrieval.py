"""Experiment retrieval: the information limits exactly, a tiny run against its models, roughness by hand."""

import math

import numpy as np
import pytest
import reference_toys
import torch
import xarray as xr

from toy.experiments import experiment, retrieval
from toy.experiments.copied import bag
from toy.experiments.retrieval import DIMS, STILL, Settings, limits, roughness
from toy.tasks import Copying
from toy.train import logits


@pytest.mark.parametrize(("vocabulary", "length"), [(2, 2), (3, 5)])
def test_limits_are_those_of_going_through_all_sequences(vocabulary, length):
    found = limits(vocabulary, length)
    expected = [reference_toys.best_reader(vocabulary, length, target, last_apart=True) for target in range(length)]
    assert found["bag and last"] == pytest.approx(expected, abs=1e-12)
    assert found["nothing"] == [math.log(vocabulary)] * length
    assert bag(10, 9) == pytest.approx(1.71, abs=0.005)  # as published


def test_those_that_still_fell_are_trained_anew_once_and_no_other(tiny):
    ds = tiny.ds
    assert ds["limit"].sel(reader="bag and last").values.tolist() == [0, bag(10, 9), bag(10, 9)]
    loss = ds["loss"].sel(layers=1, residual=1).squeeze()  # with a residual stream the last token is under way first
    assert (loss.sel(target=9) < loss.sel(target=0) - 0.05).all()
    fell = ds["trained"] == 120
    assert 0 < fell.sum() < fell.size
    assert (ds["trained"] == 60 * (1 + fell)).all()
    assert ((ds["loss"] != ds["loss_first"]) == fell).all()
    assert not ((ds["fall"] > STILL) & ~fell).any()


def test_numbers_of_a_run_are_those_of_each_model_on_its_own(tmp_path):
    settings = Settings(layers=(2,), width=(2,), seeds=1, target=(0, 9), steps=60, rounds=0, sequences=2500)
    work = experiment.Work(torch.device("cpu"), tmp_path, lambda *_: None)
    ds = retrieval.measure(settings, work)
    trained = work.train("again", settings.runs(), settings.steps)
    tokens = Copying(batch=2500).draw(None, torch.Generator().manual_seed(retrieval.TEST_SEED), 1).inputs[0]
    models = ds.stack(model=DIMS).transpose("model", ...)
    for n, model in enumerate(trained):
        chances = logits([model], tokens)[0].double().log_softmax(-1)
        own = -chances[torch.arange(2500), tokens[:, model.run.task.target]]
        assert float(models["loss"][n]) == pytest.approx(float(own.mean()), abs=1e-5)
        assert float(models["loss_error"][n]) == pytest.approx(float(own.std(correction=0)) / 50, rel=1e-4)
        fall = model.losses[42:45].mean() - model.losses[57:].mean()  # a twentieth of the training is three steps
        assert float(models["fall"][n]) == pytest.approx(float(fall), abs=1e-6)


def test_what_seeds_share_of_a_curves_roughness():
    axes, rng = {"target": range(10)}, np.random.default_rng(0)
    scatter = rng.normal(0, 0.5, (200, 10))
    peak = np.eye(10)[5] + 0 * scatter
    for loss, own, shared in ((peak, 4 / 6, 4 / 6), (scatter, 0.5 * np.sqrt(12 / np.pi), 0)):
        losses = xr.DataArray(loss, axes, ("seed", "target"))
        assert roughness(losses).mean() == pytest.approx(own, rel=0.05)  # 1,200 second differences: an error of 2 %
        assert roughness(losses, shared=True).mean() == pytest.approx(shared, abs=0.15)
