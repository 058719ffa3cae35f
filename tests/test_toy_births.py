"""Experiment births: slopes against algebra, the flat kernel, one order of the data, kept runs, the rules both ways."""

import json
import math
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from commands import bad_input
from test_pretrain import SMALL, interrupted, small_config, train
from tiny_runs import TINY, changed, made_up, ran, verdicts

from probes.errors import InputError
from probes.measures.jacobian import jacobian
from probes.models.fresh import fresh_model, initialization_of
from probes.models.load import fresh, load
from probes.results.ushape import shape_of
from toy.experiments import births
from toy.experiments.births import Settings, fitted, kernel, regressed, rule_of, slopes
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
    for others in ((), (sigma,), (sigma, loss)):
        slope, error = by_inverse(y, (x, *others))
        fit, _ = fitted(y, x, *others)
        freedom = 18 - 2 - len(others)
        assert fit.value == pytest.approx(slope, rel=1e-9)
        assert fit.freedom == freedom
        reach = {16: 2.1199, 15: 2.1314, 14: 2.1448}[freedom] * error  # Student's 97.5 %, from a printed table
        assert (fit.low, fit.high) == pytest.approx((slope - reach, slope + reach), rel=1e-4)
    # One covariate: the inflation is that of two correlated predictors.
    assert fitted(y, x, loss)[1] == pytest.approx(1 / (1 - np.corrcoef(x, loss)[0, 1] ** 2), rel=1e-9)
    assert fitted(y, x)[1] == pytest.approx(1)
    same, _ = fitted(y, x, np.full(18, 3.0))  # a constant is no covariate, and takes no freedom
    assert tuple(same) == pytest.approx(tuple(fitted(y, x)[0]))
    for few in (
        (y[:8], x[:8], 2 * x[:8] + 1),
        (y[:2], x[:2]),
        (y[:8], np.ones(8)),
    ):  # covariates say it all, or few runs
        assert math.isnan(fitted(*few)[0].value)


def test_the_flat_kernel_is_flatter_by_theory_and_by_the_exact_jacobian():
    s = Settings(width=32, blocks=4, length=48, pairs=2, vocabulary=64)
    flat, uniform = rule_of("flat-0.36", s), rule_of("uniform-0.36", s)
    spreads, ends = {}, {}
    for name, rule in {"flat": flat, "uniform": uniform}.items():
        view = fresh(s.config(), 7, initialization=rule)  # not one of the draws that the search has seen
        measured = jacobian(view, torch.randperm(64)[None, :48], method="exact")["sensitivity"].values[0]
        curves = [kernel(s.config(), rule, s.length), measured]
        spreads[name] = [math.log(curve.max() / curve.min()) for curve in curves]
        ends[name] = [abs(math.log(end)) for end in shape_of(measured)[3:6:2]]
    assert np.all(np.array(spreads["flat"]) < 0.5 * np.array(spreads["uniform"]))
    assert np.all(np.array(ends["flat"]) < 0.5 * np.array(ends["uniform"]))
    # What is scaled: those kinds of matrices alone, each group by one power of two; the rest keeps d sigma^2.
    for names in births.GROUPS:
        (factor,) = {getattr(flat, name) / getattr(uniform, name) for name in names}
        assert math.log2(factor) == pytest.approx(round(math.log2(factor)), abs=1e-9)
    changed_kinds = {name for name in births.KINDS if getattr(flat, name) != getattr(uniform, name)}
    assert changed_kinds <= set(sum(births.GROUPS, ()))
    assert 32 * flat.v**2 == pytest.approx(0.36)


def test_all_runs_read_the_same_text_in_the_same_order(tmp_path):
    read: dict[str, list[torch.Tensor]] = {}
    config = small_config()
    for name, (seed, factor) in {"one": (0, 1.0), "other": (5, 3.0)}.items():

        def made(given: Any, name: str = name, seed: int = seed, factor: float = factor) -> Any:
            model = fresh_model(given, seed, initialization_of(given, factor * 0.1))
            told: list[torch.Tensor] = read.setdefault(name, [])
            model.register_forward_pre_hook(
                lambda module, args, kwargs: told.append(kwargs["input_ids"]) if module.training else None,
                with_kwargs=True,
            )
            return model

        train(tmp_path / name, config=config, fresh=made, told={"drawn": {"seed": seed}})
    assert len(read["one"]) == SMALL.steps
    assert all(torch.equal(*pair) for pair in zip(read["one"], read["other"], strict=True))
    drawn = [json.loads((tmp_path / name / "training.json").read_text())["drawn"] for name in read]
    assert drawn == [{"seed": 0}, {"seed": 5}]


def test_a_resumed_run_of_other_fresh_weights_is_refused(tmp_path):
    interrupted(tmp_path / "model", told={"drawn": {"seed": 0}})
    with pytest.raises(InputError, match="unfinished run with other seed"):
        train(tmp_path / "model", save_every=10, told={"drawn": {"seed": 1}})


@pytest.mark.slow
def test_models_are_kept_and_used_by_later_calls_with_other_kinds(tmp_path_factory, tmp_path):
    first = ran("births", tmp_path_factory)
    shutil.copytree(first.out / "births-runs", tmp_path / "births-runs")
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "births-runs").rglob("*.*")}
    assert len(files) > 20
    given = [one for one in TINY["births"] if not one.startswith(("kinds=", "prompts="))]
    ds, *_ = run("births", tmp_path, given=[*given, "kinds=flat-0.36", "prompts=2"], device="cpu")
    np.testing.assert_array_equal(ds["elasticity"], first.ds["elasticity"].sel(kind=["flat-0.36"]))
    assert {file: file.stat().st_mtime_ns for file in files} == files  # nothing was trained or measured again
    # Other prompts: measured anew, not trained.
    ds, *_ = run("births", tmp_path, given=[*given, "kinds=flat-0.36", "prompts=1"], device="cpu")
    assert not np.array_equal(ds["elasticity"], first.ds["elasticity"].sel(kind=["flat-0.36"]))
    assert (tmp_path / "births-runs/flat-0.36-0/model.safetensors").stat().st_mtime_ns in files.values()
    for other, says in (("steps=9", "a model with other steps"), ("checkpoints=0,2", "has no checkpoint 2")):
        rest = [one for one in TINY["births"] if one.split("=")[0] != other.split("=")[0]]
        with bad_input(says):
            run("births", tmp_path, given=[*rest, other], device="cpu")


def test_what_is_measured_of_a_checkpoint_is_what_probes_measure_of_its_folder(tmp_path_factory):
    tiny = ran("births", tmp_path_factory)
    one = tiny.ds.sel(kind="flat-0.36", seed=0)
    view = load(tiny.out / "births-runs/flat-0.36-0/step4")
    tokens = births.draw(view, n=2, length=32, text="code", seed=0).tokens
    exact = jacobian(view, tokens, method="exact")["elasticity"].values
    expected = np.exp(np.log(exact).mean(0))
    # 8 products of 16 directions: a sketch, not the exact norm.
    np.testing.assert_allclose(one["elasticity"].sel(step=4), expected, rtol=0.35)
    shape = shape_of(one["elasticity"].sel(step=4).values)
    assert (one["primacy"].sel(step=4), one["recency"].sel(step=4)) == pytest.approx(shape[3:6:2], rel=1e-5)
    report = json.loads((tiny.out / "births-runs/flat-0.36-0/training.json").read_text())
    assert float(one["loss"].isel(step=-1)) == pytest.approx(
        report["validation_loss"], rel=0.01
    )  # but for last targets
    assert float(one["strength"]) == 0.36


@pytest.fixture(scope="module")
def everything():
    """A result in which trained profiles follow from those at initialization with slope 1."""
    s = Settings()
    coords = {"kind": list(s.kinds), "seed": list(s.seeds), "step": list(s.points())}
    coords["position"] = list(range(s.length))
    draws = np.random.default_rng(1)
    initial = np.log([18.0, 7, 2.6, 3, 8, 1.2])[:, None] + 0.05 * draws.normal(size=(6, 3))
    moved = 0.02 * draws.normal(size=(6, 3, 5))
    moved[..., 0] = 0
    dims = "kind seed step"
    elasticity = np.ones((6, 3, 5, 128))
    elasticity[..., 1:7] = np.exp(initial[..., None] + moved)[..., None]  # 5 % of the positions, without position 0
    return made_up(
        coords,
        s,
        elasticity=(f"{dims} position", elasticity),
        primacy=(dims, np.exp(initial[..., None] + moved)),
        recency=(dims, 2 * np.exp(initial[..., None] + moved[..., ::-1] * [0, 1, 1, 1, 1])),
        loss=(dims, 2 + 0.1 * draws.normal(size=(6, 3, 5))),
        sink_rate=(dims, 0.1),
        gain=(dims, 1.0),
        exact=(dims, 0.0),
        strength=("kind", [births.strength(kind) for kind in s.kinds]),
    )


IDS = {f"{x}-{end}" for x in ("follows", "from-flat") for end in (*births.ENDS, "primacy-behind-0")}


def test_all_statements_hold_where_they_do(everything):
    assert verdicts("births", everything, "births-") == dict.fromkeys(IDS, True)
    fit, inflation = regressed(everything, "primacy", -1, ("log sigma", "loss"))
    assert fit.low < 1 < fit.high
    assert inflation > 1.5  # most kinds differ in sigma
    table = slopes(everything)
    assert table.sizes == {"step": 4, "end": 3, "unit": 2, "covariates": 2, "estimate": 3}
    both = table.sel(step=2400, end="primacy", covariates="log sigma, loss")
    np.testing.assert_array_equal(both.sel(unit="runs"), fit[:3])
    over_kinds, _ = regressed(everything, "primacy", -1, ("log sigma", "loss"), kinds=True)
    np.testing.assert_array_equal(both.sel(unit="kinds"), over_kinds[:3])
    assert (fit.freedom, over_kinds.freedom) == (14, 2)  # of 18 runs, of six kinds
    first = table.sel(step=100, end="recency", unit="runs", covariates="none")
    np.testing.assert_array_equal(first, regressed(everything, "recency", 1)[0][:3])


def test_statements_fail_where_nothing_follows_and_are_open_where_noise_is_large(everything):
    draws = np.random.default_rng(2)

    def forgotten(size: float) -> Any:
        def change(values: np.ndarray) -> None:
            values[..., 1:] = np.exp(np.log(0.5) + size * draws.normal(size=values[..., 1:].shape))

        return change

    none = verdicts("births", changed(everything, "primacy", forgotten(0.01)), "births-")
    assert {name for name, holds in none.items() if holds is False} == {
        f"{x}-primacy" for x in ("follows", "from-flat")
    }
    noisy = verdicts("births", changed(everything, "recency", forgotten(2.0)), "births-")
    assert (noisy["follows-recency"], noisy["follows-primacy"]) == (None, True)


def test_what_was_not_trained_is_not_judged(everything):
    one = verdicts("births", everything.isel(kind=[0], seed=[0]), "births-")
    assert one == dict.fromkeys(IDS)
    missing = everything.where(everything["kind"] != "flat-0.36").assign(strength=everything["strength"])
    found = verdicts("births", missing, "births-")
    assert (found["from-flat-primacy"], found["follows-primacy"]) == (None, True)
    assert regressed(missing, "primacy", -1)[0].freedom == 13
