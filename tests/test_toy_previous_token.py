"""Experiment previous-token: readers without positions, spikes, separation, tiny losses, the claims' rules both ways."""

import itertools
import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import reference
import torch
import xarray as xr
from pages import held
from PIL import Image

from probes.errors import InputError
from probes.results.dataset import dataset, load
from toy.experiments import experiment, previous_token
from toy.experiments.previous_token import QUICK, Settings, relative_perplexity, separations, spikes
from toy.experiments.previous_token_claims import (
    PUBLISHED,
    PUBLISHED_FORM,
    agreements,
    betting,
    blind_limit,
    claims,
    signs,
    tables,
    typical_seed,
)
from toy.figures.previous_token import previous_token_figure, previous_token_hyperparameters_figure
from toy.model import Architecture, initial
from toy.tasks import Copying
from toy.train import Run, Trained, seed_of

TINY = [
    *("vocabulary=5", "steps=30", "seeds=2", "batch=16", "grid-vocabularies=5,6", "grid-contexts=4", "grid-widths=2"),
    *("rate-vocabularies=5", "rate-steps=60", "rate-points=6", "blind-widths=2,3", "offset-contexts=3,4", "points=5"),
    *("test=64", "curve-test=64", "batches=16,32", "large-seeds=1"),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    out = tmp_path_factory.mktemp("previous-token")
    ds, report, files = experiment.run("previous-token", out, given=TINY, device="cpu")
    return ds, report, files, out


# ----------------------------------------------------------------------------------------------------- what is known


@pytest.mark.parametrize(("vocabulary", "context"), [(3, 4), (4, 4), (5, 3), (2, 6)])
def test_blind_limit_is_the_best_that_counting_finds(vocabulary, context):
    found = reference.best_reader(vocabulary, context, context - 2, last_apart=True)
    assert math.log(blind_limit(vocabulary, context)) == pytest.approx(found, rel=1e-12)


def test_published_bound_is_a_mean_of_perplexities_of_no_reader():
    bets = betting(30, 4)
    hits = [1.0, 30.0, 30.0]  # perplexity of betting on one of three tokens, by where the answer is
    assert bets["published"] == 20
    assert bets["arithmetic"] == pytest.approx(np.mean(hits))
    assert bets["geometric"] == pytest.approx(math.exp(np.mean(np.log(hits))))
    assert blind_limit(30, 4) < 3 < bets["geometric"] < bets["published"] < bets["with the query"]


@pytest.mark.parametrize("asked", [0, 2])
def test_separation_is_the_best_of_all_directions(asked):
    generator = np.random.default_rng(asked)
    found = 0
    for _ in range(12):
        points = generator.normal(size=(4, 2))
        (direction,), (margin,) = separations(points[None], asked)
        best, along = reference.widest_margin(points.tolist(), asked)
        if best <= 0:
            assert np.isnan(direction).all()
            assert np.isnan(margin)
            continue
        found += 1
        assert margin == pytest.approx(best, abs=1e-3)
        assert direction @ np.array(along) == pytest.approx(1, abs=1e-3)
    assert 0 < found < 12


def test_separation_in_more_dimensions_has_equal_supports():
    points = np.array([[-1.0, 0, 0], [1, 0, 0], [1, 3, 0], [1, 0, 5]])
    directions, margins = separations(points[None], 0)
    np.testing.assert_allclose(directions, [[1, 0, 0]], atol=1e-9)
    np.testing.assert_allclose(margins, [2])


def curve(*pieces: tuple[float, int]) -> np.ndarray:
    return np.concatenate([np.full(length, value) for value, length in pieces])


@pytest.mark.parametrize(
    ("losses", "count"),
    [
        (curve((3.4, 400)), 0),  # never fell
        (curve((3.4, 200), (0.01, 400)), 0),
        (curve((3.4, 200), (0.01, 400), (0.5, 80), (0.01, 300)), 1),
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
        assert start <= found[0] < start + previous_token.SPIKE_SMOOTH


def made(architecture: Architecture, *, seed: int = 0, scale: float = 1.0) -> Trained:
    weights = initial(architecture, seed)
    weights["unembedding"] *= scale
    task = Copying(architecture.vocabulary or 2, architecture.length, -2, 8)
    return Trained(Run(architecture, task, seed=seed), torch.zeros(1), weights)


def test_relative_perplexity_is_that_of_the_reference_pass():
    architecture = Architecture(width=4, length=4, vocabulary=5, outputs=5, positional="learned", residual=False)
    models = [made(architecture), made(replace(architecture, residual=True), seed=1)]
    found = relative_perplexity(models, 40)
    generator = torch.Generator().manual_seed(seed_of(0, previous_token.TEST_BLOCK))
    ids = torch.randint(5, (1, 40, 4), generator=generator)[0]
    for model, value in zip(models, found, strict=True):
        losses = []
        for sequence in ids:
            _, logits = reference.toy_pass(model.run.architecture, model.weights, sequence)
            losses.append(float(logits.logsumexp(0) - logits[sequence[-2]]))
        assert value == pytest.approx((math.exp(np.mean(losses)) - 1) / 5, rel=1e-6)


def test_losses_keep_their_digits_far_below_float32():
    logits = torch.tensor([[[40.0, 0, 0], [0.0, 40, 0]], [[2.0, 0, 0], [0.0, 0, 800]]], dtype=torch.float64)
    losses = previous_token._losses(logits, torch.tensor([0, 1]))
    assert losses[0].tolist() == pytest.approx([2 * math.exp(-40)] * 2, rel=1e-12)
    assert losses[1].tolist() == pytest.approx([math.log1p(2 * math.exp(-2)), 800])


# -------------------------------------------------------------------------------------------------- the run and its files


def test_run_gives_all_variables_with_their_seeds(tiny):
    ds, report, _, out = tiny
    sizes = ds.sizes
    assert ds["perplexity"].dims == ("positional", "residual", "projection", "seed", "step")
    assert (sizes["positional"], sizes["residual"], sizes["projection"], sizes["seed"]) == (2, 2, 2, 2)
    assert ds["step"].values[[0, 1, -1]].tolist() == [0, 1, 30]
    assert ds["position"].values.tolist() == [-3, -2, -1, 0]
    np.testing.assert_allclose(ds["perplexity"], 1 + 5 * ds["relative"])
    assert all("seed" in ds[name].dims for name in ds)
    assert all(ds[name].attrs["long_name"] for name in ds)
    last, first = ds["query_key"].isel(step=-1), ds["query_key"].isel(step=0)
    assert not np.allclose(last, first)
    s = ds["separation"].rename(axis="row")
    again = (s * ds["query_key"] * ds["separation"].rename(axis="column")).sum(("row", "column"), skipna=False)
    np.testing.assert_allclose(again, ds["bilinear"], rtol=1e-4, atol=1e-5)
    assert np.isfinite(ds["relative_published"].sel(batch=16)).all()
    large = ds["relative_published"].sel(batch=32)
    assert np.isfinite(large.isel(seed=0, cell=[0, 3, 4, 5])).all()
    assert np.isnan(large.isel(cell=[1, 2])).all()
    assert np.isnan(large.isel(seed=1)).all()
    targets = ds["relative_by_target"].sel(offset_context=3)
    assert np.isnan(targets.sel(target=-4)).all()
    assert np.isfinite(targets.sel(target=[-3, -2])).all()
    xr.testing.assert_identical(load(out / "previous-token.nc").drop_attrs(), ds.drop_attrs())
    assert report.tables[-1].title.startswith("Published statements; brackets hold 95 % intervals")


@pytest.mark.slow
def test_run_writes_figures_and_an_animation(tiny):
    ds, _, files, out = tiny
    names = {file.name for file in files}
    stems = ("previous-token", "previous-token-hyperparameters")
    assert {f"{stem}{suffix}" for stem in stems for suffix in (".png", ".svg")} <= names
    for file in files:
        assert file.stat().st_size < 300_000 or file.suffix == ".nc"
    with Image.open(out / "previous-token.png") as image:
        assert image.size[0] > 1000
    with Image.open(out / "previous-token-paths.gif") as moving:
        assert getattr(moving, "n_frames", 1) == ds.sizes["step"]
        before = np.asarray(moving.convert("RGB")).copy()
        moving.seek(ds.sizes["step"] - 1)
        assert (np.asarray(moving.convert("RGB")) != before).any()
    assert not (out / ".unfinished-previous-token").exists()


def test_curves_at_step_zero_are_those_of_fresh_weights(tiny):
    ds = tiny[0]
    architecture = Architecture(width=2, length=4, vocabulary=5, outputs=5, positional="learned", residual=False)
    fresh = made(architecture, seed=1)
    found = ds["relative"].sel(positional="learned", residual="off", projection="on", seed=1, step=0)
    assert float(found) == pytest.approx(relative_perplexity([fresh], 64)[0], rel=1e-12)
    np.testing.assert_array_equal(
        ds["positions"].sel(residual="off", projection="on", seed=1, step=0), fresh.weights["positions"]
    )


@pytest.mark.slow
def test_subset_runs_have_tables_claims_and_figures(tmp_path, monkeypatch):
    less = Settings(variants=False, cells=False, seeds=1, steps=20, batch=8, points=3, test=32, curve_test=32)
    less = replace(less, grid_widths=(), rates=(), blind_widths=(), offset_contexts=())
    monkeypatch.setattr(previous_token, "QUICK", less)
    ds, report, files = experiment.run("previous-token", tmp_path, quick=True, device="cpu")
    assert set(ds) >= {"perplexity", "positions"}
    assert "relative_published" not in ds
    assert not [file for file in files if "hyperparameters" in file.name]
    verdicts = {row[1]: row[3] for row in report.tables[-1].rows}
    assert "not measured" in verdicts.values()
    assert previous_token_hyperparameters_figure(ds) is None


def test_figures_want_this_result():
    with pytest.raises(InputError, match=r"give one of headwater toy previous-token"):
        previous_token_figure(made_up().drop_vars("positions"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seeds": 0}, "seeds=0 is too few; give at least 1"),
        ({"context": 2}, "context=2 is too few; give at least 3"),
        ({"grid_contexts": (4, 2)}, "grid_contexts=2 is too few; give at least 3"),
        ({"residual": "maybe"}, "residual=maybe is no switch; give on or off"),
        ({"rate_steps": 10}, "rate_steps=10 are fewer than rate_points=500; give at least as many"),
    ],
)
def test_settings_refuse(given, message):
    with pytest.raises(InputError) as error:
        replace(Settings(), **given)
    assert str(error.value) == message


def test_quick_settings_train_every_part():
    assert QUICK.variants
    assert QUICK.cells
    assert QUICK.grid_vocabularies
    assert QUICK.rates
    assert QUICK.blind_widths
    assert QUICK.offset_contexts


# -------------------------------------------------------------------------------------------------------------- claims


def made_up(**changes) -> xr.Dataset:
    """A result in which everything that was published holds in all of three seeds, in the variant off, on."""
    settings = Settings(seeds=3)
    steps, seeds, switch = [0, 1, 10, 20, 100, 1000, 3000], 3, ["off", "on"]
    rough = np.array([30.0, 30, 25, 25, 22, 20.6, 20.6])
    smooth = np.array([30.0, 30, 20, 10, 2, 1.1, 1.0075])
    perplexity = np.broadcast_to(
        np.stack([rough, smooth])[:, None, None, None], (2, 2, 2, seeds, len(steps))
    ) * np.linspace(0.999, 1.001, seeds).reshape(seeds, 1)
    places = np.array([[1.0, 1.0], [0.9, 1.2], [-1.0, -1.0], [1.1, 0.8]])  # of -3, -2, -1, 0
    positions = np.broadcast_to(places, (2, 2, seeds, len(steps), 4, 2))
    directions, margins = separations(positions, 2)
    form = np.broadcast_to(np.array(PUBLISHED_FORM), (2, 2, seeds, len(steps), 2, 2))
    bilinear = np.einsum("...i,...ij,...j->...", directions, form, directions)
    published = np.full((1, len(PUBLISHED), 2, 2, seeds), np.nan)
    for n, cell in enumerate(PUBLISHED):
        published[0, n] = cell.value * np.array([0.9, 1, 1.1])
    published[0, :, 1] *= 50  # with residual streams nothing agrees
    counts = np.zeros((1, 2, 2, seeds, 10), dtype=np.int16)
    counts[0, 1, 0, :, 5] = 1
    dims = ("residual", "projection", "seed", "step")
    values = {
        "perplexity": (("positional", *dims), perplexity),
        "relative": (("positional", *dims), (perplexity - 1) / 30),
        "positions": ((*dims, "position", "axis"), positions),
        "tokens": ((*dims, "token", "axis"), np.zeros((2, 2, seeds, len(steps), 30, 2))),
        "query_key": ((*dims, "row", "column"), form),
        "separation": ((*dims, "axis"), directions),
        "margin": (dims, margins),
        "bilinear": (dims, bilinear),
        "relative_published": (("batch", "cell", "residual", "projection", "seed"), published),
        "blind_perplexity": (("blind_width", "seed"), np.full((2, seeds), 20.6)),
        "relative_by_target": (("offset_context", "target", "seed"), np.full((1, 3, seeds), 1e-3)),
        "spikes": (("rate_vocabulary", "learning_rate", "schedule", "seed", "rate_step"), counts),
    }
    values |= changes
    return dataset(
        values,
        coords={
            "positional": ["none", "learned"],
            "residual": switch,
            "projection": switch,
            "step": steps,
            "seed": range(seeds),
            "position": [-3, -2, -1, 0],
            "batch": [128],
            "cell": [cell.name for cell in PUBLISHED],
            "blind_width": [2, 10],
            "offset_context": [4],
            "target": [-4, -3, -2],
            "rate_vocabulary": [100],
            "learning_rate": [0.01, 0.1],
            "schedule": ["constant", "cosine"],
            "rate_step": range(1000, 11_000, 1000),
        },
        attrs={"settings": asdict(settings)},
    )


def verdicts(ds: xr.Dataset) -> dict[str, bool | None]:
    return {claim.claim: held(claim) for claim in claims(ds)}


def test_claims_hold_for_a_result_like_the_published_one():
    found = verdicts(made_up())
    assert len(found) == 4 + 2 + len(PUBLISHED) + 6
    assert all(c.claim[0].isupper() and c.claim.endswith(".") for c in claims(made_up()))  # read alone
    assert set(found.values()) == {True}


def changed(key: str, change) -> xr.Dataset:
    ds = made_up()
    ds[key] = ds[key].copy(data=change(ds[key].values.copy()))
    return ds


def failing(ds: xr.Dataset) -> set[str]:
    return {text for text, holds in verdicts(ds).items() if holds is False}


def set_at(index, value):
    def change(values):
        values[index] = value
        return values

    return change


@pytest.mark.parametrize(
    ("key", "change", "text"),
    [
        ("perplexity", set_at((0, 0, 1, slice(None), slice(2, 5)), 30.0), "stalls at about 25"),
        ("perplexity", set_at((0, 0, 1, slice(None), -1), 14.0), "then stalls at about 20.6"),
        ("perplexity", set_at((1, 0, 1, slice(None), -1), 1.6), "falls to about 1"),
        ("blind_perplexity", set_at(1, 7.0), "bounds the perplexity"),
        ("bilinear", lambda x: -x, "s W_Q W_K^T s < 0"),
        ("positions", lambda x: x + 3, "p_-1, is negative"),
        ("relative_published", set_at((0, 0), 1e-2), "= 2.5e-04 after"),
        ("relative_published", set_at((0, 1), 1e-6), "larger at C = 10"),
        ("relative_published", set_at((0, 2), 1e-2), "width 10 does far better"),
        ("relative_published", set_at((0, 3), 1e-2), "0.1 does better than 0.01 at V = 30"),
        ("relative_published", set_at((0, 5), 1e-6), "0.1 does worse than 0.01 at V = 100"),
        ("spikes", lambda x: x * 0, "has a spike"),
        ("relative_by_target", set_at((0, 0), 0.5), "Any fixed offset other than"),
    ],
)
def test_each_claim_can_fail(key, change, text):
    assert any(text in name for name in failing(changed(key, change)))


@pytest.mark.parametrize(
    ("key", "change", "id"),
    [
        ("relative_published", set_at((0, 0, 0, 1), [1e-5, 1e-2, 1e-1]), "v30-c4-width-2-lr-0.01"),
        ("relative_published", set_at((0, 1, 0, 1), [1e-5, 3e-3, 1e-1]), "longer"),
        ("perplexity", set_at((0, 0, 1, 0, slice(2, 5)), 30.0), "stalls"),  # in two of three
        ("bilinear", set_at((0, 1, 0, -1), 9.0), "bilinear-form"),  # coin flips
        ("spikes", set_at((0, 1, 0, slice(0, 2)), 0), "spike"),
    ],
)
def test_runs_that_disagree_leave_it_open(key, change, id):
    (found,) = (claim for claim in claims(changed(key, change)) if claim.id == f"liu4-previous-token-{id}")
    assert found.verdict == "undecided"


def test_shorter_runs_do_not_judge_published_numbers():
    ds = made_up()
    ds.attrs["settings"] = json.dumps(asdict(Settings(seeds=3, steps=1000)))
    found = verdicts(ds)
    early = [cell for cell in PUBLISHED if cell.steps == 3000]
    assert sum(holds is None for holds in found.values()) == len(early)


def test_claims_without_what_they_need_are_not_judged():
    ds = made_up().drop_vars(["relative_published", "blind_perplexity", "relative_by_target", "spikes", "bilinear"])
    assert set(verdicts(ds).values()) == {True, None}
    assert len(tables(ds)) >= 2


def test_agreement_names_the_variant_that_is_near():
    rows = agreements(made_up())
    assert rows[0].variant.residual == "off"
    assert rows[0].error == pytest.approx(0, abs=1e-9)
    assert rows[-1].variant.residual == "on"
    assert rows[-1].error == pytest.approx(math.log10(50))
    assert rows[0].plateau == pytest.approx(20.6)


def test_signs_know_that_positions_have_no_zero_of_their_own():
    ds = made_up()
    shift = np.array([3.0, 3.0])
    moved = ds.copy()
    moved["positions"] = ds["positions"] + xr.DataArray(shift, dims="axis")
    moved["tokens"] = ds["tokens"] - xr.DataArray(shift, dims="axis")
    before, after = signs(ds), signs(moved)
    assert before is not None
    assert after is not None
    assert before.own == [True] * 3
    assert after.own == [False] * 3
    assert after.shifted == [True] * 3
    np.testing.assert_allclose(after.lead, before.lead, rtol=1e-6)
    assert (before.lead > 0).all()


def test_published_form_along_its_direction():
    form = np.array(PUBLISHED_FORM)
    assert np.ones(2) @ form @ np.ones(2) == pytest.approx(-1.12)  # "-1.1"


def test_typical_seed_is_the_median_one():
    ds = made_up()
    ds["relative"][{"positional": 1, "residual": 0, "projection": 1, "step": -1}] = [3.0, 1.0, 2.0]
    assert typical_seed(ds) == 2


def test_grids_of_steps_are_increasing():
    for steps, points in itertools.product((2, 30, 3000), (2, 5, 60)):
        grid = previous_token._log_grid(steps, points)
        assert (np.diff(grid) > 0).all()
        assert (grid[0], grid[-1]) == (0, steps)
        ends = previous_token._bin_ends(steps, min(points, steps))
        assert (np.diff(ends) > 0).all()
        assert ends[-1] == steps
