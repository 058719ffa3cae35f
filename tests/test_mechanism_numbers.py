"""What is said of a mechanism's numbers: statements of known answers, counts, verdicts from intervals."""

import math
from typing import Any

import numpy as np
import pytest
import xarray as xr

from probes.measures.retrieval import context, mechanism, numbers
from probes.results.curves import spearman
from probes.results.statistics import Interval, jackknifed


def result(draw: np.random.Generator, *, couples: int = 8, strength: float = 2.0, distance: float = 1.0) -> xr.Dataset:
    """Answers whose log p is `strength` times log sensitivity, `distance` times log distance, and noise."""
    contexts, depths, chosen = 2 * couples, np.arange(10), np.array([0, 4, 9])
    scores = draw.normal(size=(contexts, 10))
    place = 10 * depths + 5
    log_p = strength * scores - distance * np.log(105 - place) + 0.5 * draw.normal(size=scores.shape)
    sensitivity = np.stack([np.exp(scores[:, chosen])] * 3, -1)
    by_depth, traced_by = ("context", "depth"), ("traced", "traced_depth", "part")
    variables: dict[str, Any] = {name: (by_depth, log_p) for name in ("log_p", "gain")}
    variables |= {"exact": (by_depth, (log_p > np.median(log_p)).astype(float)), "place": ("depth", place)}
    variables |= {"profile": (("profile_prompt", "depth"), (1 + depths) ** 2.0 * np.exp(draw.normal(size=(7, 10))))}
    variables |= {"norm_profile": (("traced", "depth"), np.exp(scores)), "sensitivity": (traced_by, sensitivity)}
    variables |= {"norm": (traced_by, np.exp(draw.normal(size=sensitivity.shape)))}
    coords = {"context": range(contexts), "depth": depths, "traced": range(contexts), "traced_depth": chosen}
    return xr.Dataset(variables, coords | {"part": list(mechanism.PARTS)}, {"query": 105})


def test_auc_counts_pairs_within_a_depth():
    ds = result(np.random.default_rng(0))
    exact, score = ds["exact"].sel(depth=ds["traced_depth"]).values, ds["sensitivity"].sel(part="pair").values
    score[:6] = np.round(score[:6])  # ties
    ds["sensitivity"].loc[{"part": "pair"}] = score
    wins, pairs = 0.0, 0
    for place in range(3):
        for one in np.flatnonzero(exact[:, place]):
            for other in np.flatnonzero(1 - exact[:, place]):
                a, b = score[one, place], score[other, place]
                wins, pairs = wins + (1.0 if a > b else 0.5 if a == b else 0.0), pairs + 1
    found = numbers.auc(ds)
    assert found.value == pytest.approx(wins / pairs)
    assert found.low > 0.5
    ds["exact"] = 0 * ds["exact"]
    assert np.isnan(numbers.auc(ds).value)


def test_explained_variance_is_of_couples_left_out():
    ds = result(np.random.default_rng(1), couples=4)
    found = numbers.explained(ds)
    log_p = ds["log_p"].sel(depth=ds["traced_depth"]).values
    distance = np.tile(np.log(105 - ds["place"].sel(depth=ds["traced_depth"]).values), (8, 1))
    score = np.log(ds["sensitivity"].sel(part="pair").values)
    shares = []
    for columns in ([distance], [distance, score]):
        errors = plain = 0.0
        for left in range(4):
            inside = np.arange(8) // 2 != left
            features = [np.ones(inside.sum() * 3), *(column[inside].ravel() for column in columns)]
            fit = np.linalg.solve(np.array(features) @ np.array(features).T, np.array(features) @ log_p[inside].ravel())
            for one in np.flatnonzero(~inside):
                for place in range(3):
                    guess = fit @ [1, *(column[one, place] for column in columns)]
                    errors += (log_p[one, place] - guess) ** 2
                    plain += (log_p[one, place] - log_p[inside].mean()) ** 2
        shares.append(1 - errors / plain)
    assert found[""].value == pytest.approx(shares[0])
    assert found[", more with the pair's sensitivity"].value == pytest.approx(shares[1] - shares[0])
    ds["sensitivity"].loc[{"part": "pair", "traced": 1}] = 0.0  # cut off by a window: out of all fits
    assert np.isfinite(numbers.explained(ds)[", more with the pair's sensitivity"].value)


def test_statements_find_what_is_there_and_have_no_interval_from_few_couples():
    draw = np.random.default_rng(2)
    auc, more = "AUC of the pair's sensitivity for exact answers", "more with the pair's sensitivity"
    explained, distance = f"variance of log p explained by log distance, {more}", "gain with log distance"
    ds = result(draw, couples=16, distance=2)
    said = numbers.statements(ds)
    by_distance = said[f"rank correlation over depth of {distance}"]
    assert by_distance.high < 0
    assert by_distance.value == pytest.approx(spearman(ds["gain"].mean("context"), np.log(105 - ds["place"])))
    assert said[auc].low > 0.5
    assert said[explained].low > 0
    two = numbers.statements(result(draw, couples=2))
    assert all(np.isnan([one.low, one.high]).all() for one in two.values())
    assert "rank correlation over depth of gain with the profile at initialization" not in two


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
        cells.append(ds.assign(norm_shocked=(by, changes), log_p_shocked=(by, after)))

    def fitted(kept: np.ndarray, kind: str) -> float:
        rows = []
        for cell, ds in enumerate(cells):
            norm, log_p = np.log(ds["norm_profile"].values), ds["log_p"].values
            for n, k in np.ndindex(norm.shape):
                if n // 2 in kept and kind == "within":
                    rows.append((ds["gain"].values[n, k], norm[n, k], f"{cell} {n}", f"{cell} depth {k}"))
                for shock in (0, 1):
                    y = ds["log_p_shocked"].values[shock, n, k] - log_p[n, k]
                    x = np.log(ds["norm_shocked"].values[shock, n, k]) - norm[n, k]
                    known = f"{cell} {shock} {n}", f"{cell} {shock} depth {k}" if kind == "shocks, depth" else "all"
                    if n // 2 in kept and kind != "within" and k > 0:
                        rows.append((y, x, *known))
        y, x, *labels = zip(*rows, strict=True)
        dummies = [np.array(column) == one for column in labels for one in sorted(set(column))]
        return float(np.linalg.lstsq(np.column_stack([x, *dummies]).astype(float), np.array(y), rcond=None)[0][0])

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
