"""The study of toys beside models: what is measured, its layout, agreement and report from the result alone, files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
import xarray as xr
from commands import call
from kept import listed
from made_toys import MATCHED as SMALL

from probes.data.prompts import prompts
from probes.errors import InputError
from probes.loop import run as measured_by
from probes.measures.agreement import agreement
from probes.measures.jacobian import jacobian
from probes.models.load import load
from probes.models.strength import frequencies, strength
from probes.models.swap import swapped
from probes.options import Prompts
from probes.results.dataset import load as load_result
from toy import match as layout
from toy.match import MEASURE, Options, match, over_seeds
from toy.match_result import MATCHED, STATES, clean, judged, others_of, points_of, samples, toys_learnt
from toy.match_shown import swap_change, tables
from toy.matching import QUICK, Matching, Settings

pytestmark = pytest.mark.slow

LENGTH, PROMPTS, BLOCKS = 24, 4, 2
SETTINGS = replace(SMALL, steps=4, in_context_steps=4, targets=2)
COMMITTED = Path(__file__).resolve().parent.parent / "reports" / "match"


@pytest.fixture(scope="module", autouse=True)
def few_toy_prompts() -> Iterator[None]:
    """Toys are measured on as few prompts as the models are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("toy.match.TOY_PROMPTS", PROMPTS)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny checkpoints, "ape" (full attention, BOS) and "bee" (a window), and a text for them."""
    made = tmp_path_factory.mktemp("models")
    families.checkpoints(made, ape=("llama", "prepended"), bee=("mistral", "none"))
    for name, family in (("ape", "llama"), ("bee", "mistral")):  # again with fewer blocks, as their toys then have, too
        config = families.FAMILIES[family]()
        config.num_hidden_layers = BLOCKS
        families.build(config).save_pretrained(made / name)
    return made


@pytest.fixture(scope="module")
def done(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, xr.Dataset]]:
    out, usual = tmp_path_factory.mktemp("out"), vars(Settings())
    changed = [f"{name}={value}" for name, value in vars(SETTINGS).items() if value != usual[name]]
    read = Prompts(prompts=PROMPTS, length=LENGTH, text=folder / "text.txt")
    models = [str(folder / name) for name in ("ape", "bee")]
    measured_by(MEASURE, models, out, Options(seeds=2, bootstrap=10, changed=changed), read)
    return out, {name: load_result(out / f"match-{name}.nc") for name in ("ape", "bee")}


def test_files_and_the_layout_that_the_module_states(done):
    out, results = done
    assert listed(out) == ["match-ape.nc", "match-bee.nc", "match.md", "match.png", "match.svg"]
    assert (out / "match.png").stat().st_size < 300_000
    assert "Which ingredient makes which feature" in (out / "match.md").read_text(encoding="utf-8")
    ablations = ["no residual", "no causal mask", "no positions"]
    for name, ds in results.items():
        assert list(ds.variant.values) == ["matched", *ablations, *(["no window"] if name == "bee" else [])]
        assert list(ds.state.values) == list(STATES)
        assert list(ds.training.values) == ["init", "retrieval", "in-context"]
        assert ds.model_sensitivity.dims == ("state", "seed", "prompt", "position")
        assert ds.toy_elasticity.dims == ("variant", "training", "toy_seed", "toy_prompt", "point")
        assert (ds.sizes["position"], ds.sizes["point"], ds.sizes["prompt"]) == (LENGTH, LENGTH, PROMPTS)
        assert [points_of(ds, training) for training in ds.training.values] == [LENGTH, 9, 9]
        assert ds.attrs["measurement"] == "match"
        assert json.loads(ds.attrs["toys"])["steps"] == 4
        assert all(one.attrs["long_name"] and one.attrs["units"] for one in ds.data_vars.values())
    ape, bee = results["ape"], results["bee"]
    assert np.nanmin(ape.toy_target) == 1  # the first token, which all share, counts as BOS
    assert np.nanmin(bee.toy_target) == 0
    found = ape.toy_elasticity.sel(training="retrieval").isel(toy_prompt=0, point=8)
    assert np.isfinite(found.sel(variant="matched")).all()
    assert np.isfinite(found.sel(variant="no residual")).sum() == 1  # ablations have one seed
    reach = BLOCKS * (families.WINDOW - 1)
    assert (bee.model_sensitivity.sel(state="pretrained", seed=0)[:, : LENGTH - 1 - reach] == 0).all()
    assert (bee.toy_elasticity.sel(variant="matched", training="retrieval")[..., 8] > 0).all()
    toys = bee.toy_elasticity.sel(variant="matched", training="init")
    assert (toys[..., : LENGTH - 1 - reach] == 0).all()  # fresh ones reach as far as the model
    assert (toys[..., LENGTH - 1 - reach :] > 0).all()


@pytest.fixture(scope="module")
def ape(folder: Path) -> tuple[Any, torch.Tensor]:
    """The model and the prompts that it is measured on."""
    model = load(str(folder / "ape"))
    return model, prompts(model, n=PROMPTS, length=LENGTH, text=str(folder / "text.txt"))


def test_model_is_measured_as_by_the_probes(ape, done):
    (model, tokens), ds = ape, done[1]["ape"]
    for state, seed, view in (("pretrained", 0, model), ("init", 1, model.reinitialized(1))):
        expected = jacobian(view, tokens)
        for name in ("sensitivity", "elasticity"):
            np.testing.assert_allclose(ds[f"model_{name}"].sel(state=state, seed=seed), expected[name], rtol=1e-4)
        each = jacobian(swapped(view, "mean"), tokens).elasticity.values
        found = ds.model_swapped.sel(state=state, seed=seed)
        np.testing.assert_allclose(found, np.prod(each, axis=0) ** (1 / PROMPTS), rtol=1e-4)
    assert np.isnan(ds.model_sensitivity.sel(state="pretrained", seed=1)).all()


def test_toys_are_measured_as_by_the_probes(ape, tmp_path, done):
    (model, tokens), maker = ape, Matching(SETTINGS, "cpu")
    toys = maker.toys(layout.planned(model, tokens, maker), tmp_path)
    members = toys[MATCHED, "retrieval"]
    each = [
        jacobian(one.view, one.prompts(PROMPTS)).elasticity.values for one in members if one.prompts and one.seed == 1
    ]
    found = done[1]["ape"].toy_elasticity.sel(variant=MATCHED, training="retrieval").isel(toy_seed=1)[:, :9]
    np.testing.assert_allclose(found, np.prod(each, axis=0) ** (1 / len(each)), rtol=1e-4)
    fresh = toys["no positions", "init"][0]
    found = done[1]["ape"].toy_elasticity.sel(variant="no positions", training="init").isel(toy_seed=0)
    np.testing.assert_allclose(found, jacobian(fresh.view, tokens).elasticity, rtol=1e-4)  # on the model's prompts


def test_strengths_and_frequencies_are_those_of_the_weights(ape):
    """Of fresh weights of deviation s and width d: values sqrt(d H c) s^2, logits d s^2; RoPE's base, scaled or not."""
    model, tokens = ape
    config = families.FAMILIES["llama"]()
    config.num_hidden_layers, config.initializer_range, config.hidden_size = 6, 0.05, 64
    view = load(families.build(config).eval())
    found, spec = strength(view.reinitialized(0), tokens % view.spec.vocabulary), view.spec
    assert found is not None
    assert found.embedding == pytest.approx(0.05, rel=0.1)
    assert found.values == pytest.approx((64 * spec.heads * spec.head_dim) ** 0.5 * 0.05**2, rel=0.1)
    assert found.logits == pytest.approx(64 * 0.05**2, rel=0.1)
    turned = frequencies(model, tokens)
    assert turned is not None
    half = model.spec.head_dim // 2
    np.testing.assert_allclose(turned, 10_000 ** (-np.arange(half) / half), rtol=1e-4)


def test_what_is_not_admitted_is_nan_and_said(done):
    ds = done[1]["ape"]
    refused = json.loads(ds.attrs["toy_refused"])
    assert "prefix" in refused["no causal mask, retrieval"]["leakage"]
    assert "depends on the position" in refused["matched, in-context"]["leakage"]
    assert refused["matched, retrieval"] == {}
    assert np.isnan(ds.toy_leakage_total.sel(training="in-context")).all()
    assert np.isfinite(ds.toy_leakage_total.sel(variant="matched", training="retrieval"))


def test_agreement_with_toys_is_that_of_elasticities_in_the_result(done):
    ds = done[1]["ape"]
    own = ds.model_elasticity.sel(state="pretrained").values[:1].astype(float)
    toys = ds.toy_elasticity.sel(variant="matched", training="retrieval").values.astype(float)[..., :9]
    expected = agreement(own, toys)
    where = {"curve": "sensitivity", "state": "pretrained", "other": "retrieval toy"}
    assert math.isnan(float(ds.agreement_error.sel(where)))  # after four steps
    ds = judged(knowing(ds, "retrieval"), bootstrap=10)
    for field, value in expected._asdict().items():
        assert float(ds[f"agreement_{field}"].sel(where)) == pytest.approx(value)


def knowing(ds: xr.Dataset, training: str) -> xr.Dataset:
    """The result as if its toys of one training had learnt their task."""
    at = ds.training == training
    return ds.assign(toy_accuracy=ds.toy_accuracy.where(~at | ds.toy_accuracy.isnull(), 0.9))


def test_documents_are_what_intervals_leave_out(done):
    """Two documents of two prompts each: two estimates, each without one of them."""
    ds = done[1]["ape"].assign_coords(document=("prompt", ["a", "b", "a", "b"]))
    own, kernel = (
        ds[name].sel(state="pretrained").values[0].astype(float) for name in ("model_sensitivity", "theory_kernel")
    )
    logs = []
    for rows in ([0, 2], [1, 3]):
        ratio = [np.log((curve[rows] ** 2).mean(0)) / 2 for curve in (own, kernel)]
        logs.append(math.log(np.std(ratio[0] - ratio[1])))
    where = {"curve": "sensitivity", "state": "pretrained", "other": "second-moment kernel"}
    found = [float(judged(ds, bootstrap=0)[f"agreement_error{end}"].sel(where)) for end in ("", "_high")]
    assert math.log(found[1] / found[0]) == pytest.approx(12.706 * abs(logs[0] - logs[1]) / 2, rel=1e-4)


def test_curves_that_were_not_measured_are_none(done):
    ds = done[1]["ape"]
    assert "retrieval toy" not in others_of(ds, "init")  # fresh weights are held against fresh toys alone
    others = {"retrieval toy", "toy init", "model at init", "in-context toy", "no residual, retrieval toy"}
    assert others <= set(others_of(ds, "pretrained"))
    assert samples(ds, "sensitivity", ("no residual", "in-context"), "init") is None
    assert samples(ds, "alpha", ("theory", "kernel"), "init") is None
    some = np.arange(1.0, 25).reshape(2, 3, 4)  # beside longer and more
    np.testing.assert_array_equal(clean(np.pad(some, ((0, 1), (0, 2), (0, 3)), constant_values=np.nan)), some)


def test_swap_change_is_the_log_ratio_of_the_profiles(done):
    ds = done[1]["ape"]
    before = np.log(ds.model_elasticity.sel(state="pretrained").values[0].astype(float)).mean(0)
    change = (np.log(ds.model_swapped.sel(state="pretrained").values[0].astype(float)) - before)[1:]
    assert swap_change(ds, "model", {"state": "pretrained"}) == pytest.approx(np.sqrt(np.mean(change**2)), rel=1e-5)
    assert math.isnan(swap_change(ds, "toy", {"variant": "no residual", "training": "in-context"}))


def test_members_are_averaged_and_seeds_resampled():
    """The jackknife's ends from what each of two seeds gives alone; what is not finite does not count."""
    for estimate, values, seeds, whole, apart in (
        (layout._mean, [1.0, 3.0, np.nan, 6.0, np.inf, 2.0], [0, 0, 0, 1, 1, 1], 3, 2 - 4),
        (layout._shares, [[2.0, -1.0], [4.0, 1.0], [np.nan, np.nan]], [0, 1, 2], [1, 0], 2 - 0.8),
        (layout._removed, [[1.0, 0.5], [3.0, 0.5], [np.nan, 1.0]], [0, 1, 1], 0.75, 0.5 - 5 / 6),
    ):
        value, low, high = over_seeds(estimate, np.array(values), seeds)
        np.testing.assert_allclose(value, whole, atol=1e-12)
        np.testing.assert_allclose(high - value, 12.706 * abs(apart) / 2, rtol=1e-4)
        np.testing.assert_allclose(value - low, high - value)
    assert np.isnan(over_seeds(layout._mean, np.array([np.nan]), [0])).all()
    single = over_seeds(layout._mean, np.array([2.0, 4.0]), [0, 0])
    assert single[0] == 3
    assert np.isnan(single[1])
    assert np.isnan(over_seeds(layout._shares, np.array([[-1.0, 0.5]]), [0])[0]).all()
    assert over_seeds(layout._shares, np.full((1, 2), np.nan), [0])[0].shape == (2,)
    assert math.isnan(over_seeds(layout._removed, np.array([[-1.0, 0.5], [0.5, 0.2]]), [0, 1])[0])


def test_report_is_made_from_results_alone(done):
    every = tables(done[1])
    agreeing, attention, training, ingredients = every
    assert all(len(row) == len(table.columns) for table in every for row in table.rows)
    assert {(row[2], row[-2]) for row in training.rows} == {("retrieval", "0.25"), ("in-context", "0.62")}
    learnt = {row[-1] for row in training.rows if row[2] == "in-context"}
    assert learnt <= {"not trained", "partly trained"}  # in so few steps
    idle = [row for row in agreeing.rows if "in-context" in row[2]]
    assert learnt == {row[2].partition(" (")[2][:-1] for row in idle}
    assert all(cell == "-" for row in idle for cell in row[3:])
    assert {row[4] for row in ingredients.rows if row[2] == "in-context"} <= learnt
    assert {row[5] for row in ingredients.rows if row[2] == "in-context"} == {"-"}  # matched toys alone
    assert ingredients.columns[4:] == ("matched toy", "no residual", "no causal mask", "no positions", "no window")
    assert {row[-1] for row in ingredients.rows if row[1] == "ape"} == {"-"}  # which has no window
    whose = {row[1].partition(" (")[0] for row in attention.rows}
    assert whose >= {"model, init", "model, pretrained", "matched toy, init", "matched toy, retrieval"}
    assert {row[3] for row in training.rows} == {str(BLOCKS)}
    ds = knowing(done[1]["ape"], "in-context")
    assert toys_learnt(ds, "matched", "in-context") == "trained"  # and are compared
    rows = tables({"ape": judged(ds, bootstrap=0)})[0].rows
    assert [row[3] == "-" for row in rows if row[2] == "in-context toy"] == [False]


def test_committed_table_is_that_of_the_committed_results():
    written = (COMMITTED / "match.md").read_text(encoding="utf-8")
    files = sorted(COMMITTED.glob("match-*.nc.xz"))
    results = {file.name.removeprefix("match-").removesuffix(".nc.xz"): judged(load_result(file)) for file in files}
    assert len(results) >= 4
    rows = ["| " + " | ".join(row) + " |" for table in tables(results) for row in table.rows]
    assert [row for row in rows if row not in written] == []


def test_figure_draws_profiles_at_initialization_and_after_training(done):
    figure = MEASURE.chart(done[1])
    assert [cell.get_title() for cell in figure.axes[:2]] == ["ape\nat initialization", "ape\nafter training"]
    assert len(figure.axes) == 2 * 2
    assert all(LENGTH in {len(np.atleast_1d(line.get_xdata())) for line in cell.get_lines()} for cell in figure.axes)


@pytest.mark.parametrize(
    ("change", "says"),
    [({"seeds": 0}, "seeds=0"), ({"bootstrap": -1}, "bootstrap=-1"), ({"tokens": 3}, "prompts=3 of length=24")],
)
def test_bad_input_is_refused_before_anything_is_trained(ape, change, says):
    model, tokens = ape
    with pytest.raises(InputError, match=says):
        match(model, tokens[: change.pop("tokens", None)], **change)


def test_command_measures_in_the_quick_setting(folder, tmp_path, monkeypatch, capsys):
    """The command's own part: options arrive, results are marked, and the report is printed."""
    setting = replace(QUICK, steps=3, in_context_steps=2, targets=2, sequences=8)
    monkeypatch.setattr("toy.match.QUICK", setting)
    given = f"match {folder / 'ape'} --quick --text {folder / 'text.txt'} --out {tmp_path} --prompts 4 --length 16"
    assert call(monkeypatch, *given.split(), *["--seeds", "1", "--bootstrap", "10", "--device", "cpu"]) == 0
    made, ds = capsys.readouterr().out, load_result(tmp_path / "match.nc")
    assert ds.attrs["quick"] == 1
    assert json.loads(ds.attrs["toys"]) == asdict(setting)
    assert ds.attrs["command"].startswith("headwater match")
    assert list(ds.variant.values) == ["matched"]
    assert "match.md" in made
