"""Experiment rollout: toys' patterns and walks against slow twins, bounds that can fail, and the claims' rules both ways."""

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
from probes.theory.rollout import decay_bounds, decay_peak, rollout, rope_peak
from toy.experiments import experiment
from toy.experiments import rollout as experiment_of_rollout
from toy.experiments.rollout import Case, Settings, cases, theta
from toy.experiments.rollout_bounds import Look, check, decays_hold, look_at, path_peaks
from toy.experiments.rollout_claims import claims, crossing, decay_stars, rates, rope_stars, tables
from toy.figures.rollout import rollout_figure
from toy.model import Architecture, initial
from toy.view import Toy

TINY = [
    *("length=6", "layers=8", "width=8", "seeds=2", "sequences=3", "scales=0.1,1", "windows=3", "prefixes=2"),
    *("decays=0.3", "trained-blocks=2", "trained-cases=causal,decay 0.3", "trained-width=4", "trained-steps=20"),
    *("batch=8", "vocabulary=4", "peak-length=40", "peak-layers=4", "peak-decays=0.3,0.7", "planes=11,13"),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    out = tmp_path_factory.mktemp("rollout")
    ds, report, files = experiment.run("rollout", out, given=TINY, device="cpu")
    return ds, report, files, out


SMALL = Settings(
    length=6,
    layers=3,
    width=8,
    sequences=2,
    peak_length=24,
    peak_layers=3,
    windows=(3,),
    prefixes=(2,),
    trained_blocks=(),
)
SMALL_CASES = cases(SMALL)


# ------------------------------------------------------------------------------------------------ patterns and products


@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.name)
def test_patterns_make_the_reference_pass(case):
    """Streams of the reference's own pass are the patterns times its values, block by block."""
    toy, inputs = experiment_of_rollout._fresh(SMALL, case, 1.0, 0)
    look = look_at(toy, inputs)
    assert look.patterns.shape == (2, 3, 6, 6)
    weights = {name: tensor[0] for name, tensor in toy._weights.items()}
    streams, _ = reference.toy_pass(toy.architecture, weights, inputs[0])
    for layer in range(3):
        x = streams[layer]
        n = x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-5)
        mixed = torch.tensor(look.patterns[0, layer]) @ n @ weights[f"{layer}.v"] @ weights[f"{layer}.o"]
        torch.testing.assert_close(mixed, streams[layer + 1])


def test_last_is_the_chance_of_walks(tiny):
    """`last` against a sum over all walks, one by one, through patterns of the same toys."""
    ds = tiny[0]
    s = Settings(length=6, layers=8, width=8, sequences=3, prefixes=(2,), windows=(3,), trained_blocks=())
    toy, inputs = experiment_of_rollout._fresh(s, Case("prefix 2", "prefix", prefix=2), 1.0, 1)
    patterns = look_at(toy, inputs).patterns[:, :3].tolist()
    for end in range(6):
        chance = np.mean([reference.walk_chance(one, 5, end) for one in patterns])
        found = ds["last"].sel(case="prefix 2", source="fresh, logits 1", seed=1, layer=2, key=end)
        assert float(found) == pytest.approx(chance, rel=1e-5)
    mass = ds["last"].sel(key=slice(2, None)).sum("key")
    np.testing.assert_allclose(
        mass.sel(case="prefix 2", source="fresh, logits 1"),
        ds["outside"].sel(case="prefix 2", source="fresh, logits 1"),
        rtol=1e-5,
    )


def test_fresh_logits_have_the_size_asked_for():
    s = Settings(length=17, width=32, layers=1, sequences=16, trained_blocks=())
    for scale in (0.1, 1.0, 3.0):
        deviations = []
        for seed in range(8):
            logits = look_at(*experiment_of_rollout._fresh(s, Case("causal"), scale, seed)).logits
            deviations.append(logits[np.isfinite(logits)].std())
        assert np.mean(deviations) == pytest.approx(scale, rel=0.25)


def test_turning_toys_have_the_logits_of_the_lemma():
    s = Settings(peak_length=24, peak_layers=3, sequences=2, planes=(13,), trained_blocks=())
    toy, inputs = experiment_of_rollout._turning(s, 13, 0.0, 0)
    look = look_at(toy, inputs)
    x = np.arange(24)[:, None] - np.arange(24)
    expected = s.turning * np.cos(x * 10_000 ** (-26 / 64))
    seen = np.isfinite(look.logits)
    assert (seen == (x >= 0)).all()
    np.testing.assert_allclose(look.logits[seen], np.broadcast_to(expected, look.logits.shape)[seen], rtol=1e-5)
    assert theta(s, 13) == pytest.approx(10_000 ** (-26 / 64))


# ---------------------------------------------------------------------------------------------------------------- bounds


def random_look(case: Case, *, layers: int = 5, length: int = 7, scale: float = 1.0) -> Look:
    generator = np.random.default_rng(3)
    logits = generator.normal(size=(2, layers, length, length)) * scale
    i, j = np.indices((length, length))
    seen = (j <= i) & (i - j < (case.window or length)) | (j < (case.prefix or 0))
    logits = np.where(seen, logits - (case.decay or 0.0) * (i - j), -np.inf)
    shares = np.exp(logits)
    return Look(logits, shares / shares.sum(-1, keepdims=True))


KINDS = [Case("causal"), Case("window 3", "window", window=3), Case("prefix 2", "prefix", prefix=2)]


@pytest.mark.parametrize("case", KINDS, ids=lambda case: case.name)
def test_check_counts_what_is_beyond_the_bounds(case):
    look = random_look(case)
    products = np.stack([rollout(one) for one in look.patterns])
    found = check(case.window, case.prefix, look, products)
    assert found.violations == 0
    assert found.checked >= 2 * 5 * 7 * 7
    entries = look.patterns[np.isfinite(look.logits)]
    assert found.eps == entries.min()
    first = case.prefix or 1
    np.testing.assert_allclose(found.outside, products[:, :, -1, first:].sum(-1).mean(0))
    # Walks that never come down are beyond every bound that says something, at all positions above the ground.
    stay = np.broadcast_to(np.eye(7), products.shape)
    assert check(case.window, case.prefix, look, stay).violations > 0
    assert (check(case.window, case.prefix, look, stay).outside >= found.bound - 1e-12).all()


def test_a_prefix_without_a_share_is_beyond_its_bound():
    case = KINDS[2]
    look = random_look(case)
    products = np.stack([rollout(one) for one in look.patterns])
    products[0, 4, 6, 1] = 0.0
    assert check(case.window, case.prefix, look, products).violations == 1


def test_decay_bounds_use_the_measured_spread_and_can_fail():
    case = Case("decay", positional="decay", decay=0.4)
    look = random_look(case, scale=0.2)
    products = np.stack([rollout(one) for one in look.patterns])
    lost = 0.4 * np.arange(7)

    def bounds(t, spread):
        return decay_bounds(7, t, 0.4, spread)

    found = decays_hold(look, products, lost, bounds)
    assert found.violations == 0
    assert found.checked == 2 * 2 * 5 * 28
    rest = look.logits + 0.4 * (np.arange(7)[:, None] - np.arange(7))
    spans = [np.ptp(row[: i + 1]) / 2 for sequence in rest for layer in sequence for i, row in enumerate(layer)]
    assert found.spread == pytest.approx(max(spans))
    # Constants per query are none of content's.
    shifted = Look(look.logits + np.arange(7.0)[:, None], look.patterns)
    assert decays_hold(shifted, products, lost, bounds).spread == pytest.approx(found.spread)
    assert decays_hold(look, products, lost, lambda t, spread: decay_bounds(7, t, 0.4, 0.1 * spread)).violations > 0
    assert decays_hold(look, products**2, lost, bounds).violations > 0


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_path_peaks_are_those_of_all_paths(layers):
    for lost in (0.25 * np.arange(14.0), 0.02 * np.arange(14.0) ** 2, 3 * (1 - np.cos(0.2 * np.arange(14)))):
        weights = [reference.paths_weight(lost.tolist(), layers, x) for x in range(14)]
        assert path_peaks(lost, layers)[-1] == int(np.argmax(weights))


def test_path_peaks_of_decay_are_the_theorem_s():
    for m in (0.1, 0.5, 1.0):
        expected = [math.floor(decay_peak(t, m) + 1e-9) for t in range(6)]
        assert path_peaks(m * np.arange(120), 6) == expected


def test_path_peaks_with_rope_lie_at_or_beyond_the_theorem_s():
    lost = 25 * (0.0133 * np.arange(128)) ** 2
    found = path_peaks(lost, 6)
    curve = [rope_peak(t, 25.0, 0.0133, 128) for t in range(6)]
    assert all(a >= b for a, b in zip(found, curve, strict=True))
    assert found[3] > curve[3]


def test_rates_are_those_of_exponentials():
    course = np.minimum(1, 3 * np.exp(-0.7 * np.arange(20)))
    assert rates(course) == pytest.approx(0.7)
    assert math.isnan(rates(np.ones(20)))
    assert math.isnan(rates(course[:4]))
    assert rates(np.append(course, np.nan)) == pytest.approx(0.7)


# -------------------------------------------------------------------------------------------------- the run and its files


def test_run_keeps_every_bound(tiny):
    ds, report, _, out = tiny
    for name in ("violations", "decay_violations", "decay_peak_violations", "rope_violations"):
        assert int(ds[name].sum()) == 0
    for name in ("checked", "decay_checked", "decay_peak_checked", "rope_checked"):
        assert int(ds[name].sum()) > 1000
    assert set(ds["case"].values) == {"causal", "window 3", "prefix 2", "decay 0.3", "rope"}
    assert list(ds["source"].values) == ["fresh, logits 0.1", "fresh, logits 1", "trained, 2 blocks"]
    np.testing.assert_allclose(ds["last"].sum("key", skipna=False).isel(source=0), 1, rtol=1e-5)
    trained = ds.sel(source="trained, 2 blocks")
    assert np.isfinite(trained["outside"].sel(case="causal").isel(layer=[0, 1])).all()
    assert np.isnan(trained["outside"].isel(layer=2)).all()
    assert np.isnan(trained["eps"].sel(case="rope")).all()
    assert int(trained["checked"].sel(case="rope").sum()) == 0
    # Next to no content: peaks are the theorem's.
    found = ds["decay_curve"].argmax("distance").sel(scale=0.01)
    assert (np.abs(found - xr.DataArray(decay_stars(ds), dims=("decay", "peak_layer"))) <= 1).all()
    assert all("seed" in ds[name].dims for name in ds if not name.endswith("_paths"))
    assert all(ds[name].attrs["long_name"] for name in ds)
    xr.testing.assert_identical(load(out / "rollout.nc").drop_attrs(), ds.drop_attrs())
    verdict = {row[1]: row[3] for row in report.tables[-1].rows}
    assert [verdict[text] for text in verdict if "P(z_i >= j) <=" in text] == ["holds", "holds"]


def test_run_writes_a_figure(tiny):
    files, out = tiny[2:]
    for file in (out / "rollout.png", out / "rollout.svg"):
        assert file in files
        assert file.stat().st_size < 300_000
    with Image.open(out / "rollout.png") as image:
        assert image.size[0] > 1000


@pytest.mark.slow
def test_subset_runs_have_tables_claims_and_figures(tmp_path, monkeypatch):
    base = replace(SMALL, seeds=1, rope=False)
    for n, less in enumerate(
        (
            replace(base, scales=(), decays=(), planes=()),
            replace(base, peak_decays=(), planes=(), windows=(), prefixes=(), decays=()),
        )
    ):
        monkeypatch.setattr(experiment_of_rollout, "QUICK", less)
        ds, report, files = experiment.run("rollout", tmp_path / str(n), quick=True, device="cpu")
        assert ("outside" in ds) == bool(n)
        assert ("decay_curve" in ds) != bool(n)
        assert len(files) == 4
        assert "not measured" in {row[3] for row in report.tables[-1].rows}


def test_figure_wants_this_result():
    with pytest.raises(InputError, match="give one of headwater toy rollout"):
        rollout_figure(made_up()[["eps"]])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seeds": 0}, "seeds=0 is too few; give at least 1"),
        ({"length": 2}, "length=2 is too few; give at least 3"),
        ({"windows": (1,)}, "windows=1 is too few; give at least 2"),
        ({"prefixes": (18,)}, "prefixes=18 does not fit 17 positions; give at most 17"),
        ({"planes": (32,)}, "planes=32 is no plane of 64 dimensions; give from 0 to 31"),
        ({"scales": (-1.0,)}, "scales=-1.0 is out of range; give finite numbers, 0 or more"),
        ({"turning": 0.0}, "turning=0.0 is out of range; give a number above 0"),
    ],
)
def test_settings_refuse(given, message):
    with pytest.raises(InputError) as error:
        replace(Settings(), **given)
    assert str(error.value) == message


def test_trained_cases_are_cases():
    with pytest.raises(
        InputError, match="trained_cases='window 4' is not among the cases; give some of causal, window 2"
    ):
        replace(Settings(), trained_cases=("window 4",))


# ---------------------------------------------------------------------------------------------------------------- claims


def made_up() -> xr.Dataset:
    """A result in which every theorem holds."""
    s = Settings(seeds=3)
    names = ["causal", "window 3", "window 5", "prefix 2"]
    slopes, seeds, layers = np.array([0.6, 0.2, 0.4, 0.9]), 3, 24
    t = np.arange(1, layers + 1)
    outside = np.exp(-slopes[:, None] * t)[:, None, None] * np.array([0.99, 1, 1.01])[:, None]
    outside = np.broadcast_to(outside, (4, 1, seeds, layers))
    distance = np.arange(128)
    angles = np.array([theta(s, plane) for plane in (13, 15)])
    made = dataset({}, coords={"decay": [0.2, 1.0], "theta": angles, "peak_layer": range(4), "distance": distance})
    made.attrs["settings"] = json.dumps(asdict(s))

    def peaked(at: np.ndarray) -> np.ndarray:
        curves = np.exp(-np.abs(distance - at[..., None]))
        return np.broadcast_to(curves[:, None, None], (len(at), 2, seeds, *curves.shape[1:]))

    whole = np.zeros((4, 1, seeds), dtype=int)
    counts = {
        name: (("case", "source", "seed"), whole + (1000 if "checked" in name else 0))
        for name in ("violations", "checked", "decay_violations", "decay_checked")
    }
    counts |= {
        f"{name}{kind}": ((dim, noise, "seed"), np.zeros((2, 2, seeds), dtype=int) + size)
        for name, dim, noise in (("decay_peak_", "decay", "scale"), ("rope_", "theta", "noise"))
        for kind, size in (("violations", 0), ("checked", 100))
    }
    return dataset(
        {
            "last": (("case", "source", "seed", "layer", "key"), np.full((4, 1, seeds, layers, 17), 1 / 17)),
            "outside": (("case", "source", "seed", "layer"), outside),
            "outside_bound": (("case", "source", "seed", "layer"), outside**0.1),
            "share": (("case", "source", "seed", "layer"), np.full(outside.shape, 0.3)),
            "eps": (("case", "source", "seed"), whole + 0.01),
            "decay_curve": (("decay", "scale", "seed", "peak_layer", "distance"), peaked(decay_stars(made))),
            "decay_paths": (("decay", "peak_layer"), decay_stars(made)),
            "rope_curve": (("theta", "noise", "seed", "peak_layer", "distance"), peaked(rope_stars(made))),
            "rope_paths": (("theta", "peak_layer"), rope_stars(made)),
        }
        | counts,
        coords={
            "case": names,
            "source": ["fresh, logits 0.1"],
            "seed": range(seeds),
            "layer": range(layers),
            "key": range(17),
            "decay": [0.2, 1.0],
            "scale": [0.01, 1.0],
            "theta": angles,
            "noise": [0.001, 0.02],
            "peak_layer": range(4),
            "distance": distance,
        },
        attrs={"settings": asdict(s)},
    )


def failing(ds: xr.Dataset) -> set[str]:
    return {f"{claim.source} {claim.claim}" for claim in claims(ds) if held(claim) is False}


def test_claims_hold_where_the_theorems_do():
    found = claims(made_up())
    assert len(found) == 5 + 5 + 2 + 2
    assert {held(claim) for claim in found} == {True}
    assert all(c.claim[0].isupper() and c.claim.endswith(".") for c in found)  # read alone


@pytest.mark.parametrize(
    ("key", "change", "text"),
    [
        ("violations", lambda x: x + np.array([1, 0, 0, 0])[:, None, None], "4.1 Under a causal mask the"),
        ("violations", lambda x: x + np.array([0, 1, 0, 0])[:, None, None], "4.2 Under a window of w"),
        ("violations", lambda x: x + np.array([0, 0, 0, 1])[:, None, None], "4.3 With a prefix of K tokens the"),
        ("decay_peak_violations", lambda x: x + 1, "4.4 and 4.5"),
        ("rope_violations", lambda x: x + 1, "4.6 and 4.7"),
        ("outside", lambda x: np.maximum(x, 0.1), "4.1 Under a causal mask all mass"),
        # The mass goes, but not exponentially.
        ("outside", lambda x: 1 / np.arange(1, 25) ** 2 + 0 * x, "4.1 Under a causal mask all mass"),
        ("outside", lambda x: np.maximum(x, 0.4), "4.2 Under a sliding window the limit"),
        ("outside", lambda x: x[[0, 2, 1, 3]], "4.2 Under a sliding window of w tokens the rollout's mass"),
        ("outside", lambda x: np.maximum(x, 0.1), "4.3 With a prefix of K tokens all mass"),
        ("share", lambda x: x * np.exp(-0.2 * np.arange(24)), "4.3 With a prefix of K tokens each"),
        ("decay_curve", lambda x: np.roll(x, 3, -1), "4.5 Under a decay mask of rate m the rollout is largest"),
        ("decay_curve", lambda x: x[:, :, :, ::-1], "4.5 Under a decay mask of rate m the rollout's peak moves"),
        ("rope_curve", lambda x: x[:, :, :, ::-1], "4.7 Under RoPE the rollout's peak x* moves"),
        ("rope_curve", lambda x: x[::-1], "4.7 Under RoPE the rollout's peak x* comes nearer"),
    ],
)
def test_each_claim_can_fail(key, change, text):
    ds = made_up()
    ds[key] = ds[key].copy(data=change(ds[key].values))
    assert any(text in name for name in failing(ds))


def test_peaks_that_runs_place_differently_leave_it_open():
    ds = made_up()
    moved = np.stack(
        [np.roll(one, by, -1) for one, by in zip(ds["decay_curve"].values.swapaxes(0, 2), (0, 1, 4), strict=True)]
    )
    ds["decay_curve"] = ds["decay_curve"].copy(data=moved.swapaxes(0, 2))
    (found,) = (claim for claim in claims(ds) if claim.id == "wu-thm-4.5-peak")
    assert found.verdict == "undecided"


def test_claims_without_what_they_need_are_not_judged():
    ds = made_up()
    assert {held(claim) for claim in claims(ds[["eps", "outside"]].isel(source=slice(0)))} == {None}
    few = ds.isel(layer=slice(3), case=[0, 1])
    assert {held(claim) for claim in claims(few) if "exponentially" in claim.claim} == {None}
    assert len(tables(ds)) >= 4


def test_windows_cross_in_as_many_steps_as_the_theorem_says():
    ds = made_up()
    assert [crossing(ds, w) for w in (2, 3, 5, 9, 17)] == [16, 8, 4, 2, 1]


def test_trained_toys_are_looked_at_with_their_own_weights():
    architecture = Architecture(blocks=2, width=4, length=5, vocabulary=3, outputs=3, residual=False)
    weights = {name: tensor.double() for name, tensor in initial(architecture, 0).items()}
    ids = torch.tensor([[0, 1, 2, 1, 0]])
    look = look_at(Toy(architecture, weights), ids)
    x = weights["embedding"][ids[0]]
    logits = (x @ weights["0.q"]) @ (x @ weights["0.k"]).T / 2
    expected = logits.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    np.testing.assert_allclose(look.logits[0, 0], expected)
    np.testing.assert_allclose(look.patterns.sum(-1), 1)
