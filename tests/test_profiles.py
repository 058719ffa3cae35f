"""Profiles that conditions are compared by: elasticity, geometric means over prompts, intervals over documents."""

import math

import numpy as np
import pytest
import xarray as xr
from commands import call
from measured import refused

import probes
from probes.headlines import numbers
from probes.measures import theory
from probes.measures.jacobian import MEASURE, misfit
from probes.results.statistics import jackknifed, units
from probes.results.ushape import NUMBERS, change, elasticities, profiles, shape, shapes, typical


def made(length: int = 40, prompts: int = 12, documents: int = 6, unit=(2.0, 0.25), seed: int = 0) -> xr.Dataset:
    """Fresh weights (two seeds) and trained ones: known shapes times log-normal prompts of documents; units differ."""
    random = np.random.default_rng(seed)
    of = np.arange(prompts) % documents
    shapes = {"init": 1 + 9 * (np.arange(length) == 0), "pretrained": 0.5 + 4.5 * (np.arange(length) == length - 1)}
    values = np.full((2, 2, prompts, length), np.nan)
    for c, curve in enumerate(shapes.values()):
        noise = random.normal(size=documents)[of][:, None] + 0.3 * random.normal(size=(prompts, length))
        values[c, : 2 - c] = curve * np.exp(noise)
    dims = ("condition", "seed", "prompt", "position")
    raw = values * np.array(unit)[:, None, None, None]
    return xr.Dataset(
        {"elasticity": (dims, values), "sensitivity": (dims, raw), "theory_score_path": (dims, 3 * raw)},
        coords={"condition": ["init", "pretrained"], "document": ("prompt", [f"d{n}" for n in of])},
        attrs={"options": f'{{"query": {length - 1}}}'},
    )


def test_units_of_conditions_do_not_count():
    one, other = made(), made(unit=(1e-3, 7e4))
    for condition, values in elasticities(one).items():
        np.testing.assert_array_equal(values, elasticities(other)[condition])
        theory = elasticities(one, "theory_score_path")[condition]
        np.testing.assert_allclose(theory, 3 * values, rtol=1e-12)
    assert [len(runs) for runs in elasticities(one).values()] == [2, 1]
    old = one.drop_vars("elasticity")
    np.testing.assert_array_equal(elasticities(old)["init"], old["sensitivity"].values[0])
    assert change(old) == {}


def test_python_and_the_command_give_the_same_numbers(tmp_path, monkeypatch):
    how = ["--prompts", "2", "--length", "40", "--seeds", "1", "--method", "scalar"]
    assert call(monkeypatch, "jacobian", "tiny-llama", *how, "--out", str(tmp_path)) == 0
    ds, model = probes.load_result(tmp_path / "jacobian.nc"), probes.load("tiny-llama")
    printed = {(n.name, n.where): n.interval[:3] for n in numbers(MEASURE, ds)}
    tokens = probes.prompts(model, n=2, length=40)
    for condition, view in {"init": model.reinitialized(seed=0), "pretrained": model}.items():
        own = probes.shape(probes.jacobian(view, tokens, method="scalar"))
        for name in NUMBERS:
            assert getattr(own, name)[:3] == pytest.approx(printed[name, condition], rel=1e-4)
            assert getattr(shape(ds, condition), name)[:3] == pytest.approx(printed[name, condition], rel=1e-4)
            after = getattr(shape(ds, condition, "elasticity_normed"), name)[:3]
            assert after == pytest.approx(printed[f"{name} after the final norm", condition], rel=1e-4)
    assert "over 9 positions each, not 16" in MEASURE.tables({"tiny": ds})[0].title


def test_a_kernel_three_times_too_large_is_off_by_two_whatever_the_documents():
    np.testing.assert_allclose(misfit(made()), 2.0)
    ds = made()
    ds["theory_score_path"][1] *= np.where(units(ds) == 0, 2.0, 1.0)[:, None]  # one document's
    value, low, high = misfit(ds).sel(condition="pretrained").values
    assert low < value < high
    assert value > 2


def test_a_shape_that_is_moved_is_as_far_off_as_it_is_moved_and_has_no_size():
    ds = made(unit=(1.0, 1.0)).isel(seed=[0])
    ds["theory_uniform"] = ds["theory_score_path"]
    ds["theory_rollout"] = 0 * ds["sensitivity"] + np.roll(ds["sensitivity"], 3, axis=-1)
    assert list(theory.errors(ds).theory) == ["kernel, uniform attention", "kernel"]
    off, order = theory.distances(ds).sel(condition="pretrained"), theory.ranks(ds).sel(condition="pretrained")
    np.testing.assert_allclose(off.sel(theory="kernel", estimate="value"), 0, atol=1e-12)
    measured = np.sqrt((ds["sensitivity"].sel(condition="pretrained").isel(seed=0) ** 2).mean("prompt")).values
    moved = np.abs(np.cumsum(measured - np.roll(measured, 3))).sum() / measured.sum() / 39  # by distribution functions
    assert off.sel(theory="rollout, uniform attention", estimate="value").item() == pytest.approx(moved)
    assert order.sel(theory="kernel", estimate="value").item() == pytest.approx(1)
    low, high = order.sel(theory="rollout, uniform attention", estimate=["low", "high"]).values
    assert -1 < low < high < 1


def test_a_shape_is_of_one_condition():
    ds = made()
    assert shape(ds.sel(condition=["init"]))[:6] == shapes(ds)["init"][:6]
    with refused("profiles of init, pretrained; name one"):
        shape(ds)
    with refused("fewer than 8 positions"):
        shape(ds.isel(position=slice(7)), "init")


def test_what_a_window_cuts_off_stays_zero():
    ds = made()
    ds["elasticity"][..., :35] = 0
    curve = typical(elasticities(ds)["init"])
    assert (curve[:35] == 0).all()
    assert (curve[35:] > 0).all()
    assert math.isnan(shape(ds, "init").primacy.value)
    assert all((run.stderr[:35] == 0).all() and (run.stderr[35:] > 0).all() for run in profiles(ds)["init"])


def test_standard_errors_are_those_of_the_jackknife():
    ds = made(length=9)
    (run,) = profiles(ds)["pretrained"]
    log = np.log(ds["elasticity"].values[1, 0])
    for j in range(9):
        found = jackknifed(np.mean, log[:, j], units(ds))
        assert run.mean[j] == pytest.approx(math.exp(found.value))
        assert run.stderr[j] * 2.570582 == pytest.approx(run.mean[j] * (found.high - found.value))  # t, 5 degrees
    assert np.isnan(profiles(ds.isel(prompt=[0]))["pretrained"][0].stderr).all()


def test_change_is_paired_by_prompt():
    """Documents that move both conditions alike do not widen the interval of their ratio."""
    ds = made()
    for name, found in change(ds).items():
        value = getattr(shape(ds, "pretrained"), name).value / getattr(shape(ds, "init"), name).value
        assert found.value == pytest.approx(value)
    same = ds.copy(deep=True)
    same["elasticity"][1, 0] = 3 * same["elasticity"][0].mean("seed")
    same["elasticity"][0, :] = same["elasticity"][0].mean("seed")
    assert change(same)["middle"][:3] == pytest.approx((3, 3, 3))
    assert shape(same, "init").middle.high / shape(same, "init").middle.low > 1.5
    assert change(ds.sel(condition=["init"])) == {}
