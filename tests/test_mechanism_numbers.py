"""What is said of a mechanism's numbers: correlations, slopes and pooled values against slow ones."""

import math
from typing import Any

import numpy as np
import pytest
import xarray as xr

from probes.measures.retrieval import context, numbers
from probes.results.curves import spearman
from probes.results.statistics import Interval, jackknifed


def result(draw: np.random.Generator, *, couples: int = 8) -> xr.Dataset:
    """Answers whose log p is twice the log norm, less twice log distance, and noise."""
    contexts, depths = 2 * couples, np.arange(10)
    scores, place = draw.normal(size=(contexts, 10)), 10 * depths + 5
    log_p = 2 * scores - 2 * np.log(105 - place) + 0.5 * draw.normal(size=scores.shape)
    by_depth = ("context", "depth")
    variables: dict[str, Any] = {name: (by_depth, log_p) for name in ("log_p", "gain")} | {"place": ("depth", place)}
    variables |= {"profile": (("profile_prompt", "depth"), (1 + depths) ** 2.0 * np.exp(draw.normal(size=(7, 10))))}
    variables |= {"norm_profile": (("traced", "depth"), np.exp(scores))}
    return xr.Dataset(
        variables, {"context": range(contexts), "depth": depths, "traced": range(contexts)}, {"query": 105}
    )


def test_statements_find_what_is_there_and_have_no_interval_from_few_couples():
    draw = np.random.default_rng(2)
    ds = result(draw, couples=16)
    said = numbers.statements(ds)
    by_distance = said["rank correlation over depth of gain with log distance"]
    assert by_distance.high < 0
    assert by_distance.value == pytest.approx(spearman(ds["gain"].mean("context"), np.log(105 - ds["place"])))
    within = said["slope on the log norm of gain, given list and depth"]
    assert within.low < 2 < within.high
    two = numbers.statements(result(draw, couples=2))
    assert all(np.isnan([one.low, one.high]).all() for one in two.values())
    assert "partial rank correlation over depth of gain with the profile at initialization" not in two


def out_of(curves: np.ndarray, features: list[np.ndarray]) -> np.ndarray:
    """What least squares leaves of each row of ranks, or of one curve."""
    x = np.array([np.ones(len(features[0])), *features])
    return curves - curves @ x.T @ np.linalg.inv(x @ x.T) @ x


def test_partial_correlations_over_depth_resample_both_curves():
    """Prompts of other text add in quadrature; of the lists themselves a couple leaves both at once."""
    ds = result(np.random.default_rng(3), couples=12)
    gain, unit = ds["gain"].values, np.arange(24) // 2
    curves, norms = ds["profile"].values, ds["norm_profile"].values
    place = ds["place"].values

    def partial(some: np.ndarray, of: np.ndarray) -> float:
        two = np.array([some.mean(0), np.log(of).mean(0)]).round(12)[:, :, None]  # a shift has ties
        ranks = (two > two.swapaxes(1, 2)).sum(-1) + (two == two.swapaxes(1, 2)).sum(-1) / 2
        return float(np.arctanh(np.corrcoef(out_of(ranks, [np.log(105 - place), np.log(place)]))[0, 1]))

    rho, null = context.follows(ds, "profile")
    parts = (
        jackknifed(lambda some: partial(some, curves), gain, unit),
        jackknifed(lambda of: partial(gain, of), curves, np.arange(7)),
    )
    assert math.atanh(rho.value) == pytest.approx(partial(gain, curves))
    assert np.ptp(np.arctanh(rho[1:3])) / 2 == pytest.approx(math.hypot(*(part.high - part.value for part in parts)))
    turned = [np.roll([*curves.T, *curves.T[::-1]], n, 0)[:10].T for n in range(20)]
    assert null.p == np.mean([abs(partial(gain, one)) >= abs(partial(gain, curves)) - 1e-9 for one in turned])
    both = jackknifed(lambda some: partial(some[:, :10], some[:, 10:]), np.concatenate([gain, norms], 1), unit)
    assert np.arctanh(context.follows(ds, "norm_profile")[0][:3]) == pytest.approx(both[:3])
    fewer = ds.isel(traced=slice(0, 14))
    assert math.atanh(context.follows(fewer, "norm_profile")[0].value) == pytest.approx(partial(gain, norms[:14]))
    wave = ds.assign(gain=ds["gain"] + 3 * np.sin(ds["depth"]))
    assert context.reliability(wave, "gain") > 0.95
    assert context.reliability(ds, "gain") < 0.7  # noise about log distance
    shared = ds.assign(norm_profile=(("traced", "depth"), np.exp(3 * gain)))  # the same lists' noise in both
    assert context.follows(shared, "norm_profile")[0].value > 0.99 > 0.7 > context.crosswise(shared)
    both = wave.assign(norm_profile=ds["norm_profile"] * np.exp(3 * np.sin(ds["depth"])))
    assert context.crosswise(both) > 0.9


def test_slopes_are_those_of_regressions_on_dummies():
    """Of two forms and two shocks: a column for each list, depth and shock of each cell, as names say."""
    draw, cells = np.random.default_rng(4), []
    for _ in range(2):
        ds, shape = result(draw, couples=6), (2, 12, 10)
        changes = ds["norm_profile"].values * np.exp(draw.normal(size=shape) + draw.normal(size=(2, 12, 1)))
        after = ds["log_p"].values + draw.normal(size=shape) + np.log(changes / ds["norm_profile"].values)
        by = ("shock", "traced", "depth")
        gain = ds["log_p"] - ds["norm_profile"].values * draw.normal(size=(12, 10))
        cells.append(ds.assign(norm_shocked=(by, changes), log_p_shocked=(by, after), gain=gain))

    def fitted(kept: np.ndarray, kind: str) -> float:
        rows = []
        for cell, ds in enumerate(cells):
            norm, log_p = np.log(ds["norm_profile"].values), ds["log_p"].values
            for n, k in np.ndindex(norm.shape):
                if n // 2 in kept and not kind.startswith("shocks"):
                    gain = ds["gain"].values[n, k]
                    control = log_p[n, k] - gain if kind == "log p, control" else 0.0
                    y = gain if kind == "within" else log_p[n, k]
                    rows.append((y, norm[n, k], control, f"{cell} {n}", f"{cell} depth {k}"))
                for shock in (0, 1):
                    y = ds["log_p_shocked"].values[shock, n, k] - log_p[n, k]
                    x = np.log(ds["norm_shocked"].values[shock, n, k]) - norm[n, k]
                    known = f"{cell} {shock} {n}", f"{cell} {shock} depth {k}" if kind == "shocks, depth" else "all"
                    if n // 2 in kept and kind.startswith("shocks") and (k > 0 or kind == "shocks, first"):
                        rows.append((y, x, 0.0, *known))
        y, x, control, *labels = zip(*rows, strict=True)
        dummies = [np.array(column) == one for column in labels for one in sorted(set(column))]
        columns = np.column_stack([x, control, *dummies]).astype(float)
        return float(np.linalg.lstsq(columns, np.array(y), rcond=None)[0][0])

    found, couple = context.slopes(cells), np.arange(6)
    assert list(found) == list(context.SLOPES)
    for kind, slope in found.items():
        assert slope == pytest.approx(jackknifed(lambda kept, kind=kind: fitted(kept, kind), couple, couple))


def test_pooled_correlations_have_random_effects():
    """DerSimonian and Laird's numbers by hand, intervals of Knapp and Hartung unless those are narrower."""
    t = 2.5705818366147395  # 97.5 % of Student's with 5 degrees of freedom
    # Weights 100, 25, 100: mean 0.5, Q = 32, tau^2 = 30 / (225 - 20625 / 225). Then 100, 100, 4: Q = 200 / 51, and
    # Knapp and Hartung's interval is the wider one.
    for z, error, tau2 in (
        ([0.1, 0.5, 0.9], [0.1, 0.2, 0.1], 0.225),
        ([0.0, 0.0, 1.0], [0.1, 0.1, 0.5], 98 / 51 / (204 - 20016 / 204)),
    ):
        found, between = context.random_effects(
            [Interval(a, a - t * s, a + t * s, 5) for a, s in zip(z, error, strict=True)]
        )
        weight = 1 / (np.square(error) + tau2)
        mean = weight @ z / weight.sum()
        spread = [weight @ (z - mean) ** 2 / 2, 1.0]
        assert np.argmax(spread) == (z[1] > 0)
        assert (between, found.value) == pytest.approx((tau2**0.5, mean))
        assert found.high - mean == pytest.approx(4.302652729911275 * (max(spread) / weight.sum()) ** 0.5)


def test_cells_are_told_by_model_by_other_controls_and_by_norms_of_their_own_form():
    draw, cells = np.random.default_rng(5), dict[str, xr.Dataset]()
    for model, form in ((m, f) for m in "xyz" for f in ("json", "announced")):
        wave = np.sin((3 if form == "json" else 5) * np.arange(10))  # what all models share in a form
        ds = result(draw).assign_attrs(model=model, options=f'{{"template": "{form}"}}')
        ds = ds.assign(norm_profile=ds["norm_profile"] * np.exp(3 * wave), gain=ds["gain"] + 3 * wave)
        cells[f"{model}, {form}"] = ds
    found = context.pooled(cells)
    z = {name: np.arctanh(context.follows(ds, "norm_profile")[0].value) for name, ds in cells.items()}
    means = np.array([(z[f"{m}, json"] + z[f"{m}, announced"]) / 2 for m in "xyz"])
    assert np.arctanh(found.by_model[:3]) == pytest.approx(jackknifed(np.mean, means, np.arange(3))[:3])
    assert found.rho.value > found.exchanged > 0.8
    assert found.exchanges > 0.05 >= found.shifts  # what a form's models share is no evidence of their own
    others = context.otherwise(cells)
    assert others["without x"].rho == context.pooled({n: ds for n, ds in cells.items() if n[0] != "x"}).rho
    curves = np.array([ds["gain"].mean("context").values, np.log(ds["norm_profile"]).mean("traced").values])
    d, p = np.log(105 - ds["place"].values), np.log(ds["place"].values)
    left = out_of(curves.argsort(1).argsort(1), [d, p, d**2, p**2])
    assert context.given(ds, "these and their squares")(*curves) == pytest.approx(np.corrcoef(left)[0, 1])
