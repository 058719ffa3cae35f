"""Experiment retrieval: the information limits exactly, a tiny run against its models, the claims' rules both ways."""

import math
from functools import partial

import numpy as np
import pytest
import reference_toys
import torch
import xarray as xr
from tiny_runs import made_up as made_of
from tiny_runs import put, questioned, ran
from tiny_runs import verdicts as verdicts_of

from toy.experiments import experiment, retrieval
from toy.experiments.copied import bag
from toy.experiments.retrieval import DIMS, PUBLISHED, STILL, Settings, limits, of_targets, roughness
from toy.tasks import Copying
from toy.train import logits

verdicts = partial(verdicts_of, "retrieval", prefix="liu7-retrieval-")
# Ids of claims, without the experiment's part.
KIND = "two-layers-see-order-width"
SPIKED = "depth-3-width-10-residual-feed-forward"
OPEN = {"three-layers-lost-in-the-middle-width-10"}  # false of the published curves themselves


def made_up(change=None, *, settings=None) -> xr.Dataset:
    """A result in which everything that was published holds in every seed."""
    loss = np.full((3, 2, 2, 2, 3, 10), 2.25)
    loss[..., 9] = 0.0
    loss[0, 1, :, :, :, :9] = 1.9
    for (layers, width, *parts), curve in PUBLISHED.items():
        loss[layers - 1, (2, 10).index(width), *parts] = curve
    if change is not None:
        change(loss)
    readers, switch = limits(10, 10), np.array([0, 1], np.int8)
    axes = dict(zip(DIMS, ([1, 2, 3], [2, 10], switch, switch, range(3), range(10)), strict=True))
    return made_of(
        axes | {"reader": list(readers)},
        settings or Settings(seeds=3),
        loss=(" ".join(DIMS), loss),
        loss_error=(" ".join(DIMS), 0.005),
        loss_first=(" ".join(DIMS), loss + 0.1),
        fall=(" ".join(DIMS), 0.01),
        trained=(" ".join(DIMS), np.array([5000, 10_000, 20_000])[:, None]),
        limit=("reader target", list(readers.values())),
    )


@pytest.mark.parametrize(("vocabulary", "length"), [(2, 2), (3, 5), (4, 4)])
def test_limits_are_those_of_going_through_all_sequences(vocabulary, length):
    found = limits(vocabulary, length)
    for target in range(length):
        expected = reference_toys.best_reader(vocabulary, length, target, last_apart=True)
        assert found["bag and last"][target] == pytest.approx(expected, abs=1e-12)
    assert found["nothing"] == [math.log(vocabulary)] * length
    assert limits(10, 10)["bag and last"] == [bag(10, 9)] * 9 + [0.0]
    assert bag(10, 9) == pytest.approx(1.71, abs=0.005)  # as published


def test_those_that_still_fell_are_trained_anew_once_and_no_other(tmp_path_factory):
    ds, *_ = ran("retrieval", tmp_path_factory)
    assert ds["loss"].dims == ds["fall"].dims == DIMS
    assert ds["loss"].shape == (2, 1, 2, 1, 2, 3)
    assert ds["residual"].values.tolist() == [0, 1]
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
        target = model.run.task.target
        chances = logits([model], tokens)[0].double().log_softmax(-1)
        own = -chances[torch.arange(2500), tokens[:, target]]
        assert float(models["loss"][n]) == pytest.approx(float(own.mean()), abs=1e-5)
        assert float(models["loss_error"][n]) == pytest.approx(float(own.std(correction=0)) / 50, rel=1e-4)
        fall = model.losses[42:45].mean() - model.losses[57:].mean()  # a twentieth of the training is three steps
        assert float(models["fall"][n]) == pytest.approx(float(fall), abs=1e-6)


def test_published_setting_is_the_whole_grid():
    runs = Settings(attention="sigmoid").runs()
    assert len(runs) == 1200 == 3 * 2 * 2 * 2 * 5 * 10
    assert {(run.architecture.positional, run.architecture.attention) for run in runs} == {("none", "sigmoid")}


def test_all_statements_hold_where_the_published_curves_are_reproduced():
    ds = made_up()
    found = verdicts(ds)
    assert {name for name, holds in found.items() if holds is not True} == OPEN
    assert len(found) == 27
    near, inside = (of_targets(ds, how).stack(kind=retrieval.KIND).dropna("kind") for how in (False, True))
    assert near.size == len(PUBLISHED)
    assert (near == 10).all()
    assert (inside == 10).all()
    shared = roughness(ds["loss"], shared=True).sel(layers=3, width=10, feed_forward=[0, 1], residual=[0, 1])
    np.testing.assert_allclose(shared, roughness(ds["loss"].sel(shared.drop_vars("seed").coords)))  # all seeds alike
    np.testing.assert_allclose(shared[..., 0].values[[0, 1], [0, 1]], [0.08, 0.71], atol=0.005)
    again, still, gained = (of.of(ds).isel(layers=0, width=0) for of in retrieval.HEADLINES[2:5])
    np.testing.assert_array_equal([again[0, 0], still[0, 0]], [[0, 10, 10], [0, 0, 0]])
    np.testing.assert_allclose(gained, -0.1)


every = slice(None)


@pytest.mark.parametrize(
    ("change", "refuted"),
    [
        (put(0, 1, 1, 1, 2, 3, to=1.6), {"one-layer-blind"}),  # a single model below what is possible
        (put(0, 0, 0, 0, every, 4, to=2.25), {"depth-1-width-2-before-last"}),
        (put(0, 0, every, every, every, 9, to=0.6), {"depth-1-width-2-last"}),
        (put(1, 0, 0, 0, every, 0, to=1.8), {"depth-2-width-2-before-last", f"{KIND}-2"}),
        (put(2, 0, 0, 0, every, 9, to=2.2), {"depth-3-width-2-last", "three-layers-lost-in-the-middle-width-2"}),
        (put(2, 1, 1, 1, 0, slice(1, 9, 2), to=9.0), {"beyond-scatter?"}),
        (put(1, 1, 0, 0, every, 0, to=1.99),
            {"depth-2-width-10-before-last", f"{KIND}-10", "primacy-width-10", "lost-in-the-middle-width-10"}),
        (put(1, 1, 0, 0, every, 9, to=1.9), {"depth-2-width-10-last", "lost-in-the-middle-width-10"}),
        (put(2, 1, 1, 0, every, slice(1, 9), to=2.2), {"residual-breaks-plateau", "depth-3-width-10-residual-before-last"}),
        (put(2, 1, 1, 1, every, slice(1, 9), to=1.65),
            {"feed-forward-breaks-plateau", "spiky", "beyond-scatter", f"{SPIKED}-before-last"}),
        (put(1, 0, 0, 0, 0, 0, to=0.0), {"depth-2-width-2-before-last?"}),  # one seed apart leaves the number open
        (put(0, 0, every, every, 0, 9, to=0.6), {"depth-1-width-2-last?"}),
        (put(2, 1, 1, 0, 0, slice(1, 9), to=2.3), {"residual-breaks-plateau?"}),
        (put(1, 0, 0, 0, 0, 9, to=2.19), {"lost-in-the-middle-width-2?"}),
        (put(1, 1, 0, 0, 0, 0, to=2.1), {"primacy-width-10?"}),
    ],
)  # fmt: skip
def test_each_rule_can_fail(change, refuted):
    found = questioned("retrieval", made_up(change), "liu7-retrieval-")
    assert refuted <= found
    surely = {name for name in found if not name.endswith("?")}
    assert surely - refuted <= OPEN


def test_what_seeds_share_of_a_curves_roughness():
    axes, rng = {"target": range(10)}, np.random.default_rng(0)
    peak = np.array([0, 0, 0, 0, 0, 1, 0, 0, 0, 0.0])
    scatter = rng.normal(0, 0.5, (200, 10))
    for loss, own, shared in ((peak + 0 * scatter, 4 / 6, 4 / 6), (scatter, 0.5 * np.sqrt(12 / np.pi), 0)):
        losses = xr.DataArray(loss, axes, ("seed", "target"))
        rough = roughness(losses)
        assert rough.mean() == pytest.approx(own, rel=0.05)  # 1,200 second differences: a standard error of 2 %
        assert roughness(losses, shared=True).mean() == pytest.approx(shared, abs=0.15)


def test_what_a_result_lacks_is_not_judged():
    part = verdicts(made_up().sel(target=[0, 4]))  # which cannot confirm a curve
    assert part["depth-1-width-2-before-last"] is None
    others = verdicts(made_up(settings=Settings(vocabulary=20, seeds=3)))  # whose curves nobody has published
    assert others["depth-2-width-2-last"] is None
    assert set(verdicts(made_up(settings=Settings(seeds=3, attention="sigmoid"))).values()) == {None}
