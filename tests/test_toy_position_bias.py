"""Experiment position-bias: the grid, a tiny run through the frame, the claims' rules both ways, figures."""

import math
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from pages import held
from PIL import Image

from probes.errors import InputError
from probes.results.dataset import dataset, load, made_with
from toy.experiments import experiment
from toy.experiments import position_bias as module
from toy.experiments.position_bias import (
    DIMS,
    ITEMS,
    ORDERS,
    PAIRS,
    QUICK,
    Case,
    Settings,
    accuracies,
    cases,
    check_steps,
    in_grid,
    parts,
    switches_of,
)
from toy.experiments.position_bias_claims import RULES, claims, kinds, over_seeds, scaled, tables
from toy.figures.position_bias import draw
from toy.train import logits, train

TINY = [
    *("depths=1,2", "positional=none,decay,rope,sinusoidal", "residual=off,on", "training=unbiased,first-and-last"),
    *("data=gaussian", "scales=text", "seeds=2", "steps=6", "tests=60", "checks=2", "course-tests=100"),
    *("width=8", "batch=8"),
]
LARGEST = 300_000


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    out = tmp_path_factory.mktemp("position-bias")
    return *experiment.run("position-bias", out, given=TINY, device="cpu"), out


@pytest.fixture(scope="module")
def everything():
    return made_up()


def made_up(change=None, settings=None) -> xr.Dataset:
    """A result in which everything that was published holds; `change` may alter `gap(case)` [pair]."""
    s = settings or Settings(seeds=3, steps=1000, checks=1)
    values = (s.scales, s.data, s.depths, s.masks, s.positional, s.residual, s.training, tuple(range(s.seeds)))
    grid = tuple(map(len, values))
    gap = np.full((*grid, len(PAIRS)), np.nan)
    curve = np.full((*grid, ITEMS), np.nan)
    for case in cases(s):
        at = tuple(known.index(getattr(case, dim)) for known, dim in zip(values, DIMS, strict=True))
        found = published(case)
        gap[at] = (found if change is None else change(case, found)) + 1e-3 * case.seed
        dip = 0.2 if case.training == "first-and-last" else 0.0
        curve[at] = 0.5 + dip * np.abs(np.linspace(-1, 1, ITEMS))
    accuracy = np.stack([0.8 + gap / 2, 0.8 - gap / 2], -1)
    steps = check_steps(s)
    course = np.repeat(accuracy[..., None], len(steps), -1)
    return dataset(
        {
            "accuracy": ((*DIMS, "pair", "order"), accuracy),
            "gap": ((*DIMS, "pair"), gap),
            "accuracy_by_position": ((*DIMS, "position"), curve),
            "course_accuracy": ((*DIMS, "pair", "order", "step"), course),
            "course_gap": ((*DIMS, "pair", "step"), course[..., 0, :] - course[..., 1, :]),
            "training_loss": ((*DIMS, "step"), np.where(np.isnan(gap[..., :1]), np.nan, 1.0).repeat(len(steps), -1)),
        },
        coords=dict(zip(DIMS, map(list, values), strict=True))
        | {"pair": list(PAIRS), "order": list(ORDERS), "position": np.arange(ITEMS), "step": steps},
        attrs=described(s),
    )


def published(case: Case) -> np.ndarray:
    even = {"none": 0.2, "decay": -0.2, "rope": -0.15, "sinusoidal": 0.1}[case.positional] + 0.03 * case.depth
    even *= 0.5 if case.residual == "on" else 1.0
    gap = even * np.array([0.6, 1.0, 0.5])
    return (
        gap
        + {
            "unbiased": np.zeros(3),
            "first": np.array([0.3, 0.3, 0.0]),
            "middle": np.array([-0.5, 0.0, 0.5]),
            "last": np.array([0.0, -0.3, -0.3]) * (case.positional != "none"),
            "first-and-last": np.array([0.5, 0.0, -0.5]),
        }[case.training]
    )


def described(settings: Settings) -> dict:
    own = {"settings": asdict(settings), "published_settings": asdict(Settings())}
    return own | {"quick": 0, "hardware": "made up", "seconds": 1.0} | made_with()


def verdict(ds: xr.Dataset, words: str, scale: str = "text"):
    (found,) = [c for c in claims(ds) if words in c.claim and (scaled(scale) in c.claim or "1/d" in words)]
    return found


# -- the grid


def test_published_grid_leaves_out_sinusoidal_on_unbiased_data_alone():
    found = cases(Settings())
    assert len(set(found)) == len(found) == 2 * 2 * 3 * 2 * 5 * (4 * 5 - 1)
    assert not [c for c in found if c.positional == "sinusoidal" and c.training == "unbiased"]


def test_decay_needs_a_mask_that_looks_back():
    case = Case("text", "gaussian", 2, "prefix-4", "decay", "off", "unbiased", 0)
    assert not in_grid(case)
    assert in_grid(replace(case, mask="window-4"))
    assert in_grid(replace(case, positional="none"))


def test_a_cpu_trains_together_what_shares_its_data_and_a_gpu_a_whole_depth():
    settings = Settings()
    found = cases(settings)
    for part in parts(found, "cpu"):
        assert len({(c.scale, c.data, c.depth, c.seed, c.training) for c in part}) == 1
        assert len({module.run_of(c, settings).task for c in part}) == 1
    assert [len(part) for part in parts(found, "cuda")] == [len(found) // 3] * 3
    assert sorted(repr(c) for part in parts(found, "cpu") for c in part) == sorted(map(repr, found))


def test_whole_seeds_of_whole_depths_come_first():
    order = [(c.scale, c.data, c.depth, c.seed) for c in cases(Settings())]
    assert order == sorted(order, key=lambda x: (x[0] == "program", x[1] == "fixed", *x[2:]))


def test_checks_run_to_the_last_step():
    assert check_steps(Settings())[0] == 100
    assert check_steps(Settings())[-1] == 100_000
    assert check_steps(replace(QUICK, checks=1)) == [600]
    assert check_steps(Settings(steps=3)) == [3]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("causal", {"mask": "causal"}),
        ("full", {"mask": "full"}),
        ("window-5", {"mask": "window", "window": 5}),
        ("prefix-2", {"mask": "prefix", "prefix": 2}),
    ],
)
def test_masks_by_name(name, fields):
    assert switches_of(name) == fields


@pytest.mark.parametrize("name", ["causal-5", "window", "window-", "window-x", "window--1", "", "sliding-5"])
def test_unknown_masks_are_refused(name):
    with pytest.raises(InputError, match=r"unknown; give causal, full, window-N"):
        switches_of(name)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"positional": ("alibi",)}, "'alibi' is unknown; give some of none"),
        ({"training": ("second",)}, "'second' is unknown"),
        ({"scales": ()}, "no list of distinct values"),
        ({"depths": (2, 2)}, "depths=2,2 is no list"),
        ({"depths": (0,)}, "blocks=0"),
        ({"seeds": 0}, "seeds=0 is too few"),
        ({"tests": 0}, "tests=0 is too few"),
        ({"masks": ("window-18",)}, "window=18 does not fit"),
        ({"positional": ("sinusoidal",), "training": ("unbiased",)}, "nothing is left of the grid"),
        ({"positional": ("decay",), "masks": ("full",)}, "nothing is left of the grid"),
    ],
)
def test_bad_settings_are_refused_in_one_line(fields, message):
    with pytest.raises(InputError, match=message) as error:
        Settings(**fields)
    assert "\n" not in str(error.value)


# -- a run


def test_a_tiny_run_has_every_model_of_its_grid_and_no_other(tiny):
    ds, _, _, out = tiny
    assert ds["gap"].dims == (*DIMS, "pair")
    there = ds["gap"].notnull().all("pair")
    assert (there == ds["gap"].notnull().any("pair")).all()
    assert int(there.sum()) == 2 * 2 * (4 * 2 - 1) * 2
    assert not there.sel(positional="sinusoidal", training="unbiased").any()
    for name in ("accuracy", "accuracy_by_position", "course_accuracy", "training_loss"):
        others = [dim for dim in ds[name].dims if dim not in DIMS]
        assert (ds[name].notnull().all(others) == there).all()
    saved = load(out / "position-bias.nc")
    xr.testing.assert_identical(saved["gap"], ds["gap"])


def test_gap_is_the_difference_of_accuracies_and_the_last_check_is_the_trained_model(tiny):
    ds = tiny[0]
    np.testing.assert_array_equal(ds["gap"], ds["accuracy"].sel(order="earlier") - ds["accuracy"].sel(order="later"))
    # As many sequences in both.
    np.testing.assert_array_equal(ds["course_accuracy"].isel(step=-1), ds["accuracy"])
    assert ds["step"].values.tolist() == [6]  # checks begin at step 100, or at the end of shorter training


def test_numbers_of_a_run_are_those_of_its_models(tiny):
    ds = tiny[0]
    settings = experiment.settings_of("position-bias", quick=False, given=TINY)
    case = Case("text", "gaussian", 2, "causal", "rope", "on", "first-and-last", 1)
    (model,) = train([module.run_of(case, settings)], settings.steps)
    task: Any = model.run.task
    world = task.world(1, "cpu")
    here = ds.sel({dim: getattr(case, dim) for dim in DIMS})
    for n, (earlier, later) in enumerate(PAIRS.values()):
        for m, (right, wrong) in enumerate(((earlier, later), (later, earlier))):
            generator = module.generator_of(torch.device("cpu"), "pairs", 1, n, m)
            drawn = task.pairs(world, generator, settings.tests, right, wrong)
            hit = logits([model], drawn.inputs[0])[0].argmax(-1) == drawn.hidden[0]
            assert float(here["accuracy"][n, m]) == pytest.approx(float(hit.float().mean()), abs=1.01 / settings.tests)
    assert float(here["training_loss"][-1]) == pytest.approx(float(model.losses.mean()), rel=1e-5)


def test_accuracy_does_not_depend_on_how_sequences_are_cut(monkeypatch):
    settings = Settings(depths=(2,), width=8, batch=8, steps=5, seeds=1)
    some = [c for c in cases(settings) if (c.scale, c.data, c.training) == ("text", "gaussian", "first")]
    models = train([module.run_of(c, settings) for c in some], 5)
    task: Any = models[0].run.task
    drawn = task.single(task.world(0, "cpu"), torch.Generator().manual_seed(1), 101, 3)
    expected = [float((logits([m], drawn.inputs[0])[0].argmax(-1) == drawn.hidden[0]).float().mean()) for m in models]
    for chunk in (1, 4000, 1 << 30):
        monkeypatch.setitem(module.CHUNK, "cpu", chunk)
        found = accuracies([(m.run.architecture, m.weights) for m in models], drawn, torch.device("cpu"))
        np.testing.assert_allclose(found, expected, atol=1.01 / 101)  # a tie of logits at most


def test_test_sets_depend_on_the_world_alone():
    settings = Settings(width=8)
    one, other, elsewhere = (
        module.run_of(Case(scale, "gaussian", depth, "causal", "none", "off", training, 3), settings)
        for scale, depth, training in (("text", 2, "first"), ("text", 4, "unbiased"), ("program", 2, "first"))
    )
    sets = [list(module._pair_tests(run, 9, torch.device("cpu"))) for run in (one, other, elsewhere)]
    for (a, b, x), (c, d, y), (_, _, z) in zip(*sets, strict=True):
        assert (a, b) == (c, d)
        assert torch.equal(x.inputs, y.inputs)
        assert torch.equal(x.hidden, y.hidden)
        assert not torch.equal(x.inputs, z.inputs)
    assert not torch.equal(sets[0][0][2].inputs, sets[0][1][2].inputs)


def test_what_a_run_writes(tiny):
    ds, report, files, out = tiny
    names = {"position-bias.nc", "position-bias.md"}
    names |= {f"position-bias{part}{kind}" for part in ("", "-curves") for kind in (".png", ".svg")}
    assert {file.name for file in files} == {file.name for file in out.iterdir()} == names
    for file in files:
        assert 0 < file.stat().st_size < LARGEST
        if file.suffix == ".png":
            with Image.open(file) as image:
                assert image.width > 600
    assert len(report.tables[0].rows) == 2 * 4 * 2  # a row per depth, encoding and residual switch
    assert report.tables[0].rows[6][-2] == "-"  # sinusoidal, unbiased
    assert len(report.tables[-1].rows) == len(claims(ds))


@pytest.mark.slow
def test_an_interrupted_run_goes_on_and_gives_the_same(tmp_path):
    other = {"course-tests": "20", "depths": "2", "residual": "off", "positional": "none"}
    given = [f"{name}={value}" for name, value in (dict(text.split("=") for text in TINY) | other).items()]
    plain, _, _ = experiment.run("position-bias", tmp_path / "plain", given=given, device="cpu")

    def stop(label, done, total):
        if done > 0.6 * total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        experiment.run("position-bias", tmp_path / "cut", given=given, device="cpu", advance=stop)
    kept = list((tmp_path / "cut" / ".unfinished-position-bias").iterdir())
    assert 1 < len(kept) <= 4
    ds, _, _ = experiment.run("position-bias", tmp_path / "cut", given=given, device="cpu")
    xr.testing.assert_identical(ds.drop_attrs(), plain.drop_attrs())
    assert not (tmp_path / "cut" / ".unfinished-position-bias").exists()


# -- statements


def test_intervals_over_seeds():
    middle, low, high = over_seeds(np.array([1.0, 2.0, 3.0]))
    assert (middle, high - 2) == (2.0, pytest.approx(4.302653 / math.sqrt(3), rel=1e-6))
    assert low == pytest.approx(4 - high)
    assert over_seeds(np.array([1.0, np.nan, 3.0])) == (2.0, 1.0, 3.0)
    assert over_seeds(np.array([2.0]))[0] == 2.0
    assert np.isnan(over_seeds(np.array([2.0]))[1:]).all()
    assert np.isnan(over_seeds(np.array([np.nan]))).all()


def test_all_statements_hold_where_they_do(everything):
    found = claims(everything)
    assert [c.claim for c in found if held(c) is not True] == []
    assert all(c.claim[0].isupper() and c.claim.endswith(".") for c in found)  # read alone
    assert len(found) == 2 * (len(RULES) + 1) + 1


def at_deep(case, gap):
    return gap - 0.06 * case.depth


def only(positional, training=None, by: Any = 0.0, depth=None):
    def change(case, gap):
        mine = case.positional == positional and training in (None, case.training) and depth in (None, case.depth)
        return gap + by if mine else gap

    return change


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("a causal mask alone favours", only("none", "unbiased", np.array([0, 0, -0.2]), depth=4)),
        ("earlier items grows with depth", at_deep),
        ("a decay mask moves the bias toward recent", only("decay", "unbiased", 0.5, depth=6)),
        ("RoPE moves the bias toward recent", only("rope", "unbiased", 0.5, depth=2)),
        ("answers that stand first in", only("rope", "first", -0.4, depth=2)),
        ("answers that stand in the middle", only("none", "middle", np.array([0.6, 0, 0]))),
        ("cannot follow", only("none", "last", -0.6, depth=6)),
        ("the middle loses", lambda case, gap: np.abs(gap)),
        ("turn none round", lambda case, gap: -gap if case.residual == "on" else gap),
        ("amplify or reduce the position bias after", lambda case, gap: gap * 2 if case.residual == "on" else gap),
        ("a fixed vocabulary", lambda case, gap: -gap if case.data == "fixed" else gap),
        ("1/d, as in its program", lambda case, gap: -gap if case.scale == "program" else gap),
    ],
)
def test_statements_fail_where_they_do_not_hold(words, change, everything):
    assert held(verdict(everything, words)) is True
    assert held(verdict(made_up(change), words)) is False


@pytest.mark.parametrize("source", ["decay mask", "RoPE"])
def test_growth_with_depth_is_judged_for_each_encoding(source, everything):
    def found(ds):
        return [held(c) for c in claims(ds) if c.source.endswith(source) and "more depth" in c.claim]

    assert found(everything) == [True, True]
    assert found(made_up(at_deep)) == [False, False]


def test_a_dip_by_accuracy_needs_a_dip(everything):
    ds = everything.copy(deep=True)
    assert held(verdict(ds, "answered worse than both ends")) is True
    ds["accuracy_by_position"][:] = ds["accuracy_by_position"] * 0 + 0.5
    assert held(verdict(ds, "answered worse than both ends")) is False


def test_what_was_not_run_is_not_judged():
    few = Settings(depths=(2,), positional=("none",), residual=("on",), training=("unbiased",), data=("fixed",))
    for settings in (few, replace(few, residual=("off",), data=("gaussian",), seeds=1), replace(few, masks=("full",))):
        ds = made_up(settings=replace(settings, steps=10, checks=1))
        judged = {c.claim: held(c) for c in claims(ds)}
        assert all(holds is None for words, holds in judged.items() if "grows" in words or "decay" in words)
        assert len(tables(ds)) == 2
    ds = made_up(settings=replace(few, residual=("off",), data=("gaussian",)))
    assert held(verdict(ds, "a causal mask alone favours")) is True


def test_a_gap_within_the_spread_of_runs_is_undecided():
    s = replace(QUICK, seeds=3)  # gaps of the three differ by 0.001 each
    for gap, found in ((-0.01, "does not hold"), (0.0, "undecided"), (0.01, "holds")):
        ds = made_up(lambda case, _, gap=gap: np.full(3, gap), settings=s)
        assert verdict(ds, "a causal mask alone favours").verdict == found


def test_toys_that_do_not_retrieve_are_not_judged(everything):
    ds = everything.copy(deep=True)
    ds["accuracy"].loc[{"positional": "rope", "training": "unbiased"}] -= 0.29
    assert verdict(ds, "RoPE moves").verdict == "not trained"
    assert "blind to content 0.516" in verdict(ds, "RoPE moves").measured
    assert verdict(ds, "a decay mask moves").verdict == "holds"
    # Those of biased data are left out with those of unbiased data, of which they have what they learnt.
    assert "rope" not in verdict(ds, "stand first in").measured
    ds["accuracy"].loc[{"training": "unbiased"}] = [0.9, 0.6]  # 0.75 on average, and hardly surely
    ds["accuracy"].loc[{"training": "unbiased", "seed": 0}] += 0.01
    assert verdict(ds, "a causal mask alone favours").verdict == "not trained"
    assert {c.verdict for c in claims(ds.sel(training=["last"]))} <= {"holds", "undecided", "not measured"}


# -- figures


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        Settings(
            depths=(2, 4), training=("unbiased", "first"), seeds=2, scales=("text",), data=("gaussian",), checks=3
        ),
        Settings(depths=(2,), data=("gaussian",), masks=("full",), training=("unbiased",), seeds=2, checks=2),
        Settings(
            depths=(4,), scales=("program",), data=("fixed",), residual=("on",), training=("last",), seeds=1, checks=1
        ),
    ],
)
def test_figures_of_any_part_of_the_grid(settings, tmp_path):
    ds = made_up(settings=settings)
    files = draw(ds, tmp_path / "position-bias")
    assert len(files) == len(set(files)) == 4 * len(kinds(ds))
    for file in files:
        assert 0 < file.stat().st_size < LARGEST
