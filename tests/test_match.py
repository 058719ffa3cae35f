"""Toys beside models: what is measured, its layout, agreement, tables and sentences from the result alone, files."""

import json
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
from probes.measures.agreement import agreement, shape, taken_at
from probes.measures.jacobian import jacobian
from probes.models.load import load
from probes.options import Prompts
from probes.results.dataset import load as load_result
from probes.results.tables import interval
from toy import match as layout
from toy import match_result as told
from toy.match import MEASURE, Options, match
from toy.matching import QUICK, Matching, Settings, frequencies, strength
from toy.model import initial
from toy.view import Toy

pytestmark = pytest.mark.slow

LENGTH, PROMPTS, BLOCKS = 24, 4, 2
SETTINGS = replace(SMALL, steps=4, targets=2)


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
    measured_by(MEASURE, models, out, Options(seeds=2, changed=changed), read)
    return out, {name: load_result(out / f"match-{name}.nc") for name in ("ape", "bee")}


def test_files_and_the_layout_that_the_module_states(done):
    out, results = done
    assert listed(out) == ["match-ape.nc", "match-bee.nc", "match.md", "match.png", "match.svg"]
    for name, ds in results.items():
        ablations = ["no residual", "no causal mask", "no positions", *(["no window"] if name == "bee" else [])]
        assert list(ds.variant.values) == ["matched", *ablations]
        assert list(ds.training.values) == ["init", "retrieval"]
        assert ds.toy_elasticity.dims == ("variant", "training", "toy_seed", "toy_prompt", "point")
        assert [told.points_of(ds, training) for training in ds.training.values] == [LENGTH, 9]
        assert all(one.attrs["long_name"] and one.attrs["units"] for one in ds.data_vars.values())
    ape, bee = results["ape"], results["bee"]
    assert np.nanmin(ape.toy_target) == 1  # the first token, which all share, counts as BOS
    assert np.nanmin(bee.toy_target) == 0
    assert np.isnan(ape.toy_elasticity.sel(training="retrieval", variant="no residual")).all()  # ablations are fresh
    reach = BLOCKS * (families.WINDOW - 1)
    assert (bee.model_sensitivity.sel(state="pretrained", seed=0)[:, : LENGTH - 1 - reach] == 0).all()
    toys = bee.toy_elasticity.sel(variant="matched", training="init")
    assert (toys[..., : LENGTH - 1 - reach] == 0).all()  # fresh ones reach as far as the model
    assert (toys[..., LENGTH - 1 - reach :] > 0).all()


@pytest.fixture(scope="module")
def ape(folder: Path) -> tuple[Any, torch.Tensor]:
    """The model and the prompts that it is measured on."""
    model = load(str(folder / "ape"))
    return model, prompts(model, n=PROMPTS, length=LENGTH, text=str(folder / "text.txt"))


def test_models_and_toys_are_measured_as_by_the_probes(ape, tmp_path, done):
    (model, tokens), ds, maker = ape, done[1]["ape"], Matching(SETTINGS, "cpu")
    for state, seed, view in (("pretrained", 0, model), ("init", 1, model.reinitialized(1))):
        expected = jacobian(view, tokens)
        for name in ("sensitivity", "elasticity"):
            np.testing.assert_allclose(ds[f"model_{name}"].sel(state=state, seed=seed), expected[name], rtol=1e-4)
    assert np.isnan(ds.model_sensitivity.sel(state="pretrained", seed=1)).all()
    toys = maker.toys(layout.planned(model, tokens, maker), tmp_path)
    members = [one for one in toys[told.MATCHED, "retrieval"] if one.seed == 1]
    each = [jacobian(one.view, one.prompts).elasticity.values for one in members if one.prompts is not None]
    found = ds.toy_elasticity.sel(variant=told.MATCHED, training="retrieval").isel(toy_seed=1, toy_prompt=slice(4))[
        :, :9
    ]
    np.testing.assert_allclose(found, np.prod(each, axis=0) ** (1 / len(each)), rtol=1e-4)
    fresh = toys["no positions", "init"][0]
    found = ds.toy_elasticity.sel(variant="no positions", training="init").isel(toy_seed=0)
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
    half = model.spec.head_dim // 2
    turned = np.array(frequencies(model, tokens), dtype=float)
    np.testing.assert_allclose(turned, [10_000 ** (-np.arange(half) / half)] * BLOCKS, rtol=1e-4)


def test_toys_of_gemma_3_have_its_norms_and_strengths(ape):
    config, tokens = families.small("gemma3_text", num_key_value_heads=1), ape[1]
    model = load(families.build(config).eval())
    plan = layout.planned(model, tokens, Matching(SETTINGS, "cpu"))
    a = plan.fresh[told.MATCHED]
    assert (a.kv_heads, a.norm, a.qk_norm, a.post_norm, a.window) == (1, "rms", True, True, None)
    assert [note.partition(";")[0] for note in plan.notes] == [
        "blocks with and without a window differ",
        "blocks differ in their wavelengths of RoPE",
    ]
    assert not any(
        "window" in note for note in layout.planned(model, tokens[:, : families.WINDOW], Matching(SETTINGS)).notes
    )
    wanted, found = strength(model.reinitialized(0), tokens), strength(Toy(a, initial(a, 0)), tokens)
    assert wanted is not None
    assert found is not None
    assert found[1:] == pytest.approx(wanted[1:], rel=0.01)  # norms give these sizes
    assert wanted.logits == pytest.approx((families.HEAD_DIM / 24) ** 0.5, rel=0.1)
    assert found.embedding == pytest.approx(wanted.embedding, rel=0.1)


def knowing(ds: xr.Dataset) -> xr.Dataset:
    """The result as if its trained toys had learnt their task."""
    at = ds.training == "retrieval"
    return ds.assign(toy_accuracy=ds.toy_accuracy.where(~at | ds.toy_accuracy.isnull(), 0.9))


def test_agreement_and_shape_of_toys_are_those_of_elasticities_in_the_result(done):
    ds = done[1]["ape"]
    own = ds.model_elasticity.sel(state="pretrained").values[:1].astype(float)
    toys = ds.toy_elasticity.sel(variant="matched", training="retrieval").values.astype(float)[..., :9]
    assert "retrieval toy" not in told.agreements(ds, "pretrained")  # after four steps
    ds = knowing(ds)
    held = told.agreements(ds, "pretrained")["retrieval toy"]
    assert held == pytest.approx(agreement(own, toys))
    (row,) = (row for row in told.tables({"": ds})[2].rows if row[0] == "last" and row[2] == "retrieval")
    assert row[3:5] == [interval(*shape(x, runs=x is toys).last[:3]) for x in (own, toys)]
    error = told.errors(ds).sel(state="pretrained", other="retrieval toy")
    assert error.values.tolist() == [held.error, held.error_low, held.error_high]


def test_fresh_weights_are_held_against_fresh_toys_and_what_is_not_there_is_left_out(done):
    ds = done[1]["ape"]
    assert "retrieval toy" not in told.others_of(ds, "init")
    assert {"retrieval toy", "toy init", "model at init", "no residual, toy init"} <= set(
        told.others_of(ds, "pretrained")
    )
    assert told.samples(ds, ("no residual", "retrieval"), "init") is None
    some = np.arange(1.0, 25).reshape(2, 3, 4)  # beside longer and more
    np.testing.assert_array_equal(told.clean(np.pad(some, ((0, 1), (0, 2), (0, 3)), constant_values=np.nan)), some)


def test_toys_that_have_not_learnt_are_not_compared(done):
    agreeing, training, ingredients = told.tables(done[1])
    learnt = {row[-1] for row in training.rows}
    assert learnt <= {"not trained", "partly trained"}  # in so few steps
    idle = [row for row in agreeing.rows if "retrieval" in row[2]]
    assert all(cell == "-" for row in idle for cell in row[3:])
    assert {row[4] for row in ingredients.rows if row[2] == "retrieval"} <= learnt
    assert sum("have not learnt retrieval" in line for line in told.sentences(done[1])) == 2
    ds = knowing(done[1]["ape"])
    assert told.toys_learnt(ds, "matched", "retrieval") == "trained"  # and are compared
    rows = told.tables({"ape": ds})[0].rows
    assert [row[3] == "-" for row in rows if row[2] == "retrieval toy"] == [False]
    for line in told.profiles(ds, "pretrained"):  # each over its geometric mean, at the points of the shortest
        assert np.log(taken_at(np.asarray(line.y), 9)).mean() == pytest.approx(0, abs=1e-9)


def test_bad_input_is_refused_before_anything_is_trained(ape):
    model, tokens = ape
    for given, says in ((tokens, "seeds=0"), (tokens[:, :7], "length=7")):
        with pytest.raises(InputError, match=says):
            match(model, given, seeds=2 * (given is not tokens))


def test_command_measures_in_the_quick_setting(folder, tmp_path, monkeypatch, capsys):
    setting = replace(QUICK, steps=3, targets=2, sequences=8)
    monkeypatch.setattr("toy.match.QUICK", setting)
    given = f"match {folder / 'ape'} --quick --text {folder / 'text.txt'} --out {tmp_path} --prompts 4 --length 16"
    assert call(monkeypatch, *given.split(), *["--seeds", "1", "--device", "cpu"]) == 0
    ds = load_result(tmp_path / "match.nc")
    assert ds.attrs["quick"] == 1
    assert json.loads(ds.attrs["toys"]) == asdict(setting)
    assert list(ds.variant.values) == ["matched"]
    assert "match.md" in capsys.readouterr().out
