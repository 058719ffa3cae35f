"""What is said of a mechanism's numbers: statements of known answers, counts, verdicts from intervals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import xarray as xr

from probes.measures.retrieval import mechanism, numbers
from probes.results.curves import shift_null, spearman
from probes.results.statistics import jackknifed


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
            for context in np.flatnonzero(~inside):
                for place in range(3):
                    guess = fit @ [1, *(column[context, place] for column in columns)]
                    errors += (log_p[context, place] - guess) ** 2
                    plain += (log_p[context, place] - log_p[inside].mean()) ** 2
        shares.append(1 - errors / plain)
    assert found[""].value == pytest.approx(shares[0])
    assert found[", more with the pair's sensitivity"].value == pytest.approx(shares[1] - shares[0])
    ds["sensitivity"].loc[{"part": "pair", "traced": 1}] = 0.0  # cut off by a window: out of all fits
    assert np.isfinite(numbers.explained(ds)[", more with the pair's sensitivity"].value)


def test_statements_find_what_is_there_and_have_no_interval_from_few_couples():
    draw = np.random.default_rng(2)
    auc, more = "AUC of the pair's sensitivity for exact answers", "more with the pair's sensitivity"
    explained, distance = f"variance of log p explained by log distance, {more}", "gain with log distance"
    ds = result(draw, couples=16)
    said = numbers.statements(ds)
    by_distance = said[f"rank correlation over depth of {distance}"]
    assert by_distance.high < 0
    assert by_distance.value == pytest.approx(spearman(ds["gain"].mean("context"), np.log(105 - ds["place"])))
    assert said[auc].low > 0.5
    assert said[explained].low > 0
    two = numbers.statements(result(draw, couples=2))
    assert all(np.isnan([one.low, one.high]).all() for one in two.values())
    assert "rank correlation over depth of gain with the profile at initialization" not in two


def test_both_curves_of_a_rank_correlation_over_depth_are_resampled():
    """Prompts of other text add in quadrature; of the lists themselves a couple leaves both at once."""
    ds = result(np.random.default_rng(3), couples=12)
    gain, unit = ds["gain"].values, np.arange(24) // 2
    curves, norms = ds["profile"].values, ds["norm_profile"].values

    def ranked(some: np.ndarray, of: np.ndarray) -> float:
        return spearman(some.mean(0), np.exp(np.log(of).mean(0)))

    rho, null = numbers.follows(ds, "profile")
    parts = (
        jackknifed(lambda some: ranked(some, curves), gain, unit),
        jackknifed(lambda of: ranked(gain, of), curves, np.arange(7)),
    )
    assert rho.high - rho.value == pytest.approx(math.hypot(*(part.high - part.value for part in parts)))
    assert null == shift_null(gain.mean(0), np.exp(np.log(curves).mean(0)))
    both = jackknifed(lambda some: ranked(some[:, :10], some[:, 10:]), np.concatenate([gain, norms], 1), unit)
    assert numbers.follows(ds, "norm_profile")[0] == pytest.approx(both)
    fewer = ds.isel(traced=slice(0, 14))
    assert numbers.follows(fewer, "norm_profile")[0].low < ranked(gain, norms[:14]) < 1
