"""Experiment previous-token: readers without positions, spikes, separation, tiny losses, the claims' rules both ways."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import reference_toys
import torch
import xarray as xr
from tiny_runs import changed, put, questioned
from tiny_runs import made_up as made_of
from tiny_runs import verdicts as verdicts_of

from toy.experiments import copied, previous_token
from toy.experiments.copied import bag, evaluated, spikes
from toy.experiments.previous_token import BEST, BOUND, PUBLISHED, Settings, reader, separation, signed
from toy.model import Architecture, initial
from toy.tasks import Copying
from toy.train import Run, Trained, seed_of


def test_readers_without_positions():
    assert float(reader(made_up(), BOUND)) == 20
    assert float(reader(made_up(), BEST)) == pytest.approx(math.exp(bag(30, 3)))


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
        (curve((3.4, 200), (0.01, 400), (0.5, 900)), 1),  # one that stays
        (curve((3.4, 200), (0.01, 400), (0.025, 300)), 0),  # less than three floors
        (curve((3.4, 200), (1.2, 400), (2.0, 100), (1.2, 100)), 0),  # less than a nat above
        (curve((3.4, 200), (1.2, 400), (2.6, 100), (1.2, 100)), 1),  # more, though not three floors
        (curve((3.4, 200), (2.0, 400), (6.0, 100), (2.0, 100)), 0),  # had not fallen to half of a guesser's loss
        (curve((3.4, 200), (0.01, 400), *[(0.5, 30), (0.3, 10)] * 6, (0.01, 200)), 1),  # ragged, but one
        (curve((3.4, 200), (0.01, 400), (0.5, 1), (0.01, 200)), 0),  # one batch is no spike
        (curve((3.4, 20)), 0),
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
    assert ds["perplexity"].dims == ("positional", "residual", "projection", "seed", "step")
    assert ds["perplexity"].shape[:4] == (2, 2, 2, 2)
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


PLACES = np.array([[1.0, 1.0], [0.9, 1.2], [-1.0, -1.0], [1.1, 0.8]])  # of -3, -2, -1, 0
COORDS: dict[str, Any] = {
    "positional": ["none", "learned"], "residual": ["off", "on"], "projection": ["off", "on"], "seed": range(3),
    "step": [0, 1, 10, 20, 100, 1000, 3000], "position": [-3, -2, -1, 0], "axis": range(2), "token": range(30),
    "batch": [128], "cell": [cell.name for cell in PUBLISHED], "vocabulary": [10, 30, 100], "context": [4, 10],
    "width": [2, 10], "blind_width": [2, 10], "offset_context": [4], "target": [-4, -3, -2], "rate_vocabulary": [100],
    "learning_rate": [0.01, 0.1], "schedule": ["constant"], "rate_step": range(1000, 11_000, 1000),
}  # fmt: skip


def test_where_the_embeddings_of_a_model_lie():
    model = made(previous_token.run_of(Settings(vocabulary=5), 0).architecture)
    model.recorded = {30: dict(model.weights), 0: {"positions": torch.ones(4, 2)}}
    model.weights["positions"] = torch.tensor(PLACES)
    placed = previous_token._placed(model)
    assert placed["positions"].shape == (2, 4, 2)
    assert (placed["positions"][0] == 1).all()  # in the order of steps
    s, w = placed["separation"], {name: tensor.double().numpy() for name, tensor in model.weights.items()}
    np.testing.assert_array_equal(s, separation(PLACES, 2))
    expected = sum(s[i] * w["0.q"][i, k] * w["0.k"][j, k] * s[j] for i in range(2) for j in range(2) for k in range(2))
    assert placed["bilinear"] == pytest.approx(expected, rel=1e-9)


def made_up(settings: Settings | None = None) -> xr.Dataset:
    """A result in which everything that was published holds in all of three seeds, in the variant off, on."""
    rough = [30.0, 30, 25, 25, 22, 20.6, 20.6]
    smooth = [30.0, 30, 20, 10, 2, 1.1, 1.0075]
    curves = np.stack([rough, smooth])[:, None, None, None] * np.linspace(0.999, 1.001, 3)[:, None]
    direction = separation(PLACES, 2)
    with_streams = np.array([1, 50])[:, None, None]  # nothing agrees
    published = np.array([value for _, value in PUBLISHED.values()])[:, None, None, None] * with_streams * [0.9, 1, 1.1]
    counts = np.zeros((2, 1, 10), dtype=np.int16)
    counts[1, 0, 5] = 1
    models = "residual projection seed step"
    by_size = np.exp([np.add.outer(np.add.outer([0, 1, 2.0], [0, 0.5]), [9, 0.0])])[0][..., None] * [
        0.9e-6,
        1e-6,
        1.1e-6,
    ]
    return made_of(
        COORDS,
        settings or Settings(seeds=3),
        perplexity=(f"positional {models}", curves),
        positions=(f"{models} position axis", PLACES),
        tokens=("residual projection seed token axis", 0.0),
        separation=("residual projection seed axis", direction),
        bilinear=("residual projection seed", -0.5),
        relative_published=("batch cell residual projection seed", published),
        relative_by_size=("vocabulary context width seed", by_size),
        blind_perplexity=("blind_width seed", 20.6),
        relative_by_target=("offset_context target seed", 1e-3),
        spikes=("rate_vocabulary learning_rate schedule seed rate_step", counts[:, None]),
    )


verdicts = partial(verdicts_of, "previous-token", prefix="liu4-previous-token-")


def test_claims_hold_for_a_result_like_the_published_one():
    found = verdicts(made_up())
    assert len(found) == 4 + 2 + len(PUBLISHED) + 5 + 6
    assert set(found.values()) == {True}


@pytest.mark.parametrize(
    ("key", "change", "refuted"),
    [
        ("perplexity", put(0, 0, 1, slice(None), slice(2, 5), to=30.0), "stalls"),
        ("perplexity", put(0, 0, 1, slice(None), -1, to=14.0), "plateau"),
        ("perplexity", put(1, 0, 1, slice(None), -1, to=1.6), "solved"),
        ("blind_perplexity", put(1, to=7.0), "bound"),
        ("positions", lambda x: x + 3, "separation"),
        ("relative_published", put(0, 0, to=1e-2), "v30-c4-width-2-lr-0.01"),
        ("relative_published", put(0, 1, to=1e-6), "longer"),
        ("relative_by_size", put(1, 1, 0, to=1e-7), "larger-vocabulary-width-2"),
        ("relative_by_size", put(1, 1, 1, to=1e-7), "longer-context-width-10"),
        ("relative_by_size", put(2, 0, 1, to=1.0), "width-helps"),
        ("relative_published", put(0, 5, to=1e-6), "fast-at-100"),
        ("spikes", put(..., to=0), "spike"),
        ("relative_by_target", put(0, 0, to=0.5), "offsets"),
        # Runs that disagree leave it open.
        ("relative_published", put(0, 0, 0, 1, to=[1e-5, 1e-2, 1e-1]), "v30-c4-width-2-lr-0.01?"),
        ("perplexity", put(0, 0, 1, 0, slice(2, 5), to=30.0), "stalls?"),  # in two of three
        ("bilinear", put(0, 1, 0, to=9.0), "bilinear-form?"),
    ],
)
def test_each_claim_can_fail(key, change, refuted):
    assert refuted in questioned("previous-token", changed(made_up(), key, change), "liu4-previous-token-")


def test_what_a_result_lacks_is_not_judged():
    found = verdicts(made_up(Settings(seeds=3, steps=1000)))  # shorter runs do not judge published numbers
    assert sum(holds is None for holds in found.values()) == sum(steps == 3000 for steps, _ in PUBLISHED.values())
    ds = made_up().drop_vars(["relative_published", "blind_perplexity", "relative_by_target", "spikes", "bilinear"])
    assert set(verdicts(ds).values()) == {True, None}
    assert len(previous_token.tables(ds)) >= 2


def test_signs_know_that_positions_have_no_zero_of_their_own():
    ds = made_up()
    before, after = (ds.assign(positions=ds["positions"] + n, tokens=ds["tokens"] - n) for n in (0.0, 3.0))
    assert (signed(before) > 0).all()
    assert (signed(after) < 0).all()
    np.testing.assert_allclose(signed(after, moved=True), signed(before, moved=True))
