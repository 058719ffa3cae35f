"""Experiment births: slopes against algebra, the flat kernel, kept runs, measurements against the probes'."""

import json
import math
import shutil
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from commands import bad_input
from tiny_runs import TINY, ran

from probes.measures.jacobian import jacobian
from probes.models.load import fresh, load
from probes.results.ushape import shape_of
from probes.run.files import write_json
from toy.experiments import births
from toy.experiments.births import Settings, fitted, kernel, rule_of
from toy.experiments.experiment import run

rng = np.random.default_rng(0)


def by_inverse(y: np.ndarray, columns: Sequence[np.ndarray]) -> tuple[float, float]:
    """The first column's coefficient and its standard error, by the normal equations; a constant comes on top."""
    design = np.column_stack([*columns, np.ones_like(y)])
    inverse = np.linalg.inv(design.T @ design)
    fit = inverse @ design.T @ y
    left = y - design @ fit
    return float(fit[0]), math.sqrt(float(left @ left) / (len(y) - design.shape[1]) * inverse[0, 0])


def test_a_slope_among_covariates_is_that_of_the_normal_equations():
    x, sigma = rng.normal(size=18), rng.normal(size=18)
    loss = 0.8 * x + 0.6 * rng.normal(size=18)
    y = 0.3 * x - 2 * sigma + loss + 0.1 * rng.normal(size=18) + 4
    for others, freedom, t in (((), 16, 2.1199), ((sigma, loss), 14, 2.1448)):  # Student's 97.5 %, from a printed table
        slope, error = by_inverse(y, (x, *others))
        fit, _ = fitted(y, x, *others)
        assert fit == pytest.approx((slope, slope - t * error, slope + t * error, freedom), rel=1e-4)
    # One covariate: the inflation is that of two correlated predictors.
    assert fitted(y, x, loss)[1] == pytest.approx(1 / (1 - np.corrcoef(x, loss)[0, 1] ** 2), rel=1e-9)
    same, _ = fitted(y, x, np.full(18, 3.0))  # a constant is no covariate, and takes no freedom
    assert tuple(same) == pytest.approx(tuple(fitted(y, x)[0]))
    for few in ((y[:8], x[:8], 2 * x[:8] + 1), (y[:2], x[:2]), (y[:8], np.ones(8))):
        assert math.isnan(fitted(*few)[0].value)  # covariates say it all, or few runs


def test_the_flat_kernel_is_flatter_by_theory_and_by_the_exact_jacobian():
    s = Settings(width=32, blocks=4, length=48, vocabulary=64)
    flat, uniform = (rule_of(kind, s) for kind in ("flat-0.36", "uniform-0.36"))
    spreads, ends = [], []
    for rule in (flat, uniform):
        view = fresh(s.config(), 7, initialization=rule)  # not one of the draws that the search has seen
        measured = jacobian(view, torch.randperm(64)[None, :48], method="exact")["sensitivity"].values[0]
        curves = [kernel(s.config(), rule, s.length), measured]
        spreads.append([math.log(curve.max() / curve.min()) for curve in curves])
        ends.append([abs(math.log(end)) for end in shape_of(measured)[1:4:2]])
    assert np.all(np.array([spreads, ends])[:, 0] < 0.5 * np.array([spreads, ends])[:, 1])
    # What is scaled: those kinds of matrices alone, each group by one power of two; the rest keeps d sigma^2.
    for names in births.GROUPS:
        (factor,) = {getattr(flat, name) / getattr(uniform, name) for name in names}
        assert math.log2(factor) == pytest.approx(round(math.log2(factor)), abs=1e-9)
    changed = {name for name in births.KINDS if getattr(flat, name) != getattr(uniform, name)}
    assert changed <= set(sum(births.GROUPS, ()))
    assert 32 * flat.v**2 == pytest.approx(0.36)


@pytest.mark.slow
def test_models_are_kept_and_used_by_later_calls_with_other_kinds(tmp_path_factory, tmp_path):
    first = ran("births", tmp_path_factory)
    shutil.copytree(first.out / "births-runs", tmp_path / "births-runs")
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "births-runs").rglob("*.*") if file.is_file()}
    given = [one for one in TINY["births"] if not one.startswith(("kinds=", "prompts="))] + ["kinds=flat-0.36"]
    kept = first.ds["elasticity"].sel(kind=["flat-0.36"])
    for prompts, same in ((2, True), (1, False)):  # other prompts: measured anew, not trained
        ds, *_ = run("births", tmp_path, given=[*given, f"prompts={prompts}"], device="cpu")
        assert np.array_equal(ds["elasticity"], kept) == same
        assert {file: file.stat().st_mtime_ns for file in files} == files
    for other, says in (("steps=9", "a model with other steps"), ("checkpoints=0,2", "has no checkpoint 2")):
        rest = [one for one in TINY["births"] if one.split("=")[0] != other.split("=")[0]]
        with bad_input(says):
            run("births", tmp_path, given=[*rest, other], device="cpu")
    trained = tmp_path / "births-runs/flat-0.36-0/training.json"
    write_json(trained, json.loads(trained.read_text()) | {"data": "another"})
    with bad_input("trained on different texts"):
        run("births", tmp_path, given=TINY["births"], device="cpu")


def test_what_is_measured_of_a_checkpoint_is_what_probes_measure_of_its_folder(tmp_path_factory):
    tiny = ran("births", tmp_path_factory)
    one = tiny.ds.sel(kind="flat-0.36", seed=0)
    view = load(tiny.out / "births-runs/flat-0.36-0/step4")
    tokens = births.draw(view, n=2, length=32, text="code", seed=0).tokens
    exact = jacobian(view, tokens, method="exact")["elasticity"].values
    # 8 products of 16 directions: a sketch, not the exact norm.
    np.testing.assert_allclose(one["elasticity"].sel(step=4), np.exp(np.log(exact).mean(0)), rtol=0.35)
    shape = shape_of(one["elasticity"].sel(step=4).values)
    ends = births.with_ends(tiny.ds).sel(kind="flat-0.36", seed=0, step=4)
    assert [float(ends[name]) for name in births.SHOWN] == pytest.approx(shape[:4], rel=1e-5)
    report = json.loads((tiny.out / "births-runs/flat-0.36-0/training.json").read_text())
    # But for last targets.
    assert float(one["loss"].isel(step=-1)) == pytest.approx(report["validation_loss"], rel=0.01)
    assert float(one["strength"]) == 0.36
