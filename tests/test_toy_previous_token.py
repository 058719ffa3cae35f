"""Experiment previous-token: readers without positions, spikes, separation, tiny losses."""

import math
from dataclasses import replace

import numpy as np
import pytest
import reference_toys
import torch

from toy.experiments import copied, previous_token
from toy.experiments.copied import bag, evaluated, spikes
from toy.experiments.previous_token import BEST, BOUND, Settings, reader, separation
from toy.model import Architecture, initial
from toy.tasks import Copying
from toy.train import Run, Trained, seed_of


@pytest.mark.parametrize("asked", [0, 2])
def test_separation_is_the_best_of_all_directions(asked):
    generator = np.random.default_rng(asked)
    found = 0
    for _ in range(12):
        points = generator.normal(size=(4, 2))
        direction = separation(points, asked)
        best, along = reference_toys.widest_margin(points.tolist(), asked)
        if best <= 0:
            assert np.isnan(direction).all()
            continue
        found += 1
        others = np.delete(points, asked, 0) - points[asked]
        assert (others @ direction).min() == pytest.approx(best, abs=1e-3)
        assert direction @ np.array(along) == pytest.approx(1, abs=1e-3)
    assert 0 < found < 12
    points = np.array([[-1.0, 0, 0], [1, 0, 0], [1, 3, 0], [1, 0, 5]])  # three equal supports
    np.testing.assert_allclose(separation(points, 0), [1, 0, 0], atol=1e-9)


def curve(*pieces: tuple[float, int]) -> np.ndarray:
    return np.concatenate([np.full(length, value) for value, length in pieces])


@pytest.mark.parametrize(
    ("losses", "count"),
    [
        (curve((3.4, 400)), 0),  # never fell
        (curve((3.4, 200), (0.01, 400), (0.5, 80), (0.01, 300), (0.5, 80), (0.01, 100)), 2),
        (curve((3.4, 200), (0.01, 400), (0.025, 300)), 0),  # less than three floors
        (curve((3.4, 200), (1.2, 400), (2.0, 100), (1.2, 100)), 0),  # less than a nat above
        (curve((3.4, 200), (1.2, 400), (2.6, 100), (1.2, 100)), 1),  # more, though not three floors
        (curve((3.4, 200), (2.0, 400), (6.0, 100), (2.0, 100)), 0),  # had not fallen to half of a guesser's loss
        (curve((3.4, 200), (0.01, 400), *[(0.5, 30), (0.3, 10)] * 6, (0.01, 200)), 1),  # ragged, but one
        (curve((3.4, 200), (0.01, 400), (0.5, 1), (0.01, 200)), 0),  # one batch is no spike
    ],
)
def test_spikes_of_made_up_curves(losses, count):
    found = spikes(losses, 30)
    assert len(found) == count
    if count:
        start = 600  # after the two first pieces, where the rise begins
        assert start <= found[0] < start + copied.SPIKE_SMOOTH


def made(architecture: Architecture, seed: int = 0) -> Trained:
    task = Copying(architecture.vocabulary or 2, architecture.length, -2, 8)
    return Trained(Run(architecture, task, seed=seed), torch.zeros(1), initial(architecture, seed))


def test_relative_perplexity_is_that_of_the_reference_pass():
    architecture = Architecture(width=4, length=4, vocabulary=5, outputs=5, positional="learned", residual=False)
    models = [made(architecture), made(replace(architecture, residual=True), 1)]
    found, right = evaluated(models, 40)
    generator = torch.Generator().manual_seed(seed_of(0, -1))
    ids = torch.randint(5, (1, 40, 4), generator=generator)[0]
    for model, value, share in zip(models, found, right, strict=True):
        losses, leads = [], []
        for sequence in ids:
            _, logits = reference_toys.toy_pass(model.run.architecture, model.weights, sequence)
            losses.append(float(logits.logsumexp(0) - logits[sequence[-2]]))
            leads.append(float(logits[sequence[-2]]) >= float(logits[sequence].max()))
        assert value == pytest.approx((math.exp(np.mean(losses)) - 1) / 5, rel=1e-6)
        assert share == np.mean(leads)


def test_losses_keep_their_digits_far_below_float32():
    logits = torch.tensor([[[40.0, 0, 0], [0.0, 40, 0]], [[2.0, 0, 0], [0.0, 0, 800]]], dtype=torch.float64)
    losses = copied.losses(logits, torch.tensor([0, 1]))
    assert losses[0].tolist() == pytest.approx([2 * math.exp(-40)] * 2, rel=1e-12)
    assert losses[1].tolist() == pytest.approx([math.log1p(2 * math.exp(-2)), 800])


def test_the_main_variant_is_measured_in_everything(tiny):
    ds = tiny.ds
    assert ds["step"].values[[0, 1, -1]].tolist() == [0, 1, 30]
    assert ds["position"].values.tolist() == [-3, -2, -1, 0]
    of_post = ds["relative_published"].notnull()  # in the main variant alone, at both batch sizes
    assert of_post["batch"].values.tolist() == [16, 64]
    assert (of_post == ((of_post["residual"] == "off") & (of_post["projection"] == "on"))).all()
    assert all(np.isfinite(ds[name]).all() for name in ("relative_by_size", "relative_by_target", "perplexity"))
    assert (ds["blind_perplexity"] > 2).all()
    main = ds.sel(residual="off", projection="on", seed=1)
    fresh = made(Architecture(width=2, length=4, vocabulary=5, outputs=5, positional="learned", residual=False), 1)
    begun = 1 + 5 * evaluated([fresh], 16)[0][0]
    assert float(main["perplexity"].sel(positional="learned", step=0)) == pytest.approx(begun, rel=1e-12)
    np.testing.assert_array_equal(main["positions"].sel(step=0), fresh.weights["positions"])
    # What readers without positions have.
    assert float(reader(ds, BOUND)) == pytest.approx(5 * 2 / 3)
    assert float(reader(ds, BEST)) == pytest.approx(math.exp(bag(5, 3)))


def test_where_the_embeddings_of_a_model_lie():
    places = np.array([[1.0, 1.0], [0.9, 1.2], [-1.0, -1.0], [1.1, 0.8]])  # of -3, -2, -1, 0
    model = made(previous_token.run_of(Settings(vocabulary=5), 0).architecture)
    model.recorded = {30: dict(model.weights), 0: {"positions": torch.ones(4, 2)}}
    model.weights["positions"] = torch.tensor(places)
    placed = previous_token._placed(model)
    assert placed["positions"].shape == (2, 4, 2)
    assert (placed["positions"][0] == 1).all()  # in the order of steps
    s, w = placed["separation"], {name: tensor.double().numpy() for name, tensor in model.weights.items()}
    np.testing.assert_array_equal(s, separation(places, 2))
    expected = sum(s[i] * w["0.q"][i, k] * w["0.k"][j, k] * s[j] for i in range(2) for j in range(2) for k in range(2))
    assert placed["bilinear"] == pytest.approx(expected, rel=1e-9)
