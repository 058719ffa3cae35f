"""Every probe on one view, and agreement of curves of different lengths."""

from __future__ import annotations

import json
import math
from typing import Any

import families
import numpy as np
import pytest
import torch

from probes.bos import bos_swap, swapped
from probes.compare import agreement, averaged, fractions, portrait, shape, taken_at, usual_lags
from probes.errors import InputError
from probes.jacobian import jacobian
from probes.leakage import SOURCES, leakage
from probes.models.load import load
from probes.sinks import sinks
from probes.summary import ushape
from toy.model import Architecture, initial
from toy.view import Toy

TOKENS = torch.randint(3, 100, (6, 24), generator=torch.Generator().manual_seed(1))
EXACT = 1e-6  # float32, the same sums


@pytest.fixture(scope="module")
def model():
    return load(families.model("llama"), tokenizer=families.tokenizer())


@pytest.fixture(scope="module")
def whole(model):
    return portrait(model, TOKENS, prompts=3, bootstrap=20)


def toy(**switches: Any) -> Toy:
    made = Architecture(
        blocks=2, heads=2, width=8, length=24, vocabulary=100, outputs=100, norm="rms", feed_forward=True, **switches
    )
    return Toy(made, initial(made, 0))


# ------------------------------------------------------------------------------------------------------- one view


def test_portrait_has_what_the_probes_give(model, whole):
    exact = jacobian(model, TOKENS[:3])
    np.testing.assert_allclose(whole.sensitivity, exact.sensitivity, rtol=EXACT)
    without = jacobian(swapped(model, "mean"), TOKENS[:3])
    np.testing.assert_allclose(whole.sensitivity_swapped, without.sensitivity, rtol=EXACT)
    seen = sinks(model, TOKENS[:3], keys="all", per_prompt=True, reacts="mean")
    np.testing.assert_allclose(whole.alpha, seen.alpha.mean(("layer", "head")), rtol=EXACT)
    np.testing.assert_allclose(whole.sink_rate.mean("prompt"), seen.sink_rate_of_model, atol=EXACT)
    np.testing.assert_allclose(whole.reacts, seen.reacts.mean(), rtol=EXACT)
    np.testing.assert_allclose(whole.uniform, seen.uniform.mean("layer"), rtol=EXACT)


def test_portrait_has_leakage_of_the_early_band_as_the_probes_do(model, whole):
    assert (whole.attrs["lags"], whole.attrs["band"]) == ("1-5", "6-23")
    options = {"bands": [(6, 23)], "lags": range(1, 6), "bootstrap": 20}
    leak = leakage(model, TOKENS, **options).isel(band=0)
    swap = bos_swap(model, TOKENS, profile_prompts=1, products=2, **options).isel(band=0)
    assert list(whole.source.values) == list(SOURCES)
    for end in ("", "_low", "_high"):
        np.testing.assert_allclose(whole[f"leakage_total{end}"], leak[f"log_form_of_model{end}"][0], rtol=1e-5)
        np.testing.assert_allclose(whole[f"leakage_share{end}"], leak[f"log_share_of_model{end}"], rtol=1e-5)
        for name, when in (("residual", "before"), ("residual_swapped", "after")):
            expected = swap[f"residual_{when}_of_model{end}"]
            np.testing.assert_allclose(whole[f"{name}{end}"], expected, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(whole[f"removed{end}"], swap[f"removed_of_model{end}"], rtol=1e-4)
    assert json.loads(whole.attrs["refused"]) == {}


def test_wide_models_are_sketched_and_narrow_ones_exact(whole):
    assert json.loads(whole.attrs["options"])["method"] == "exact"
    config = families.FAMILIES["llama"]()
    config.hidden_size, config.head_dim = 72, 18
    wide = portrait(load(families.build(config)), TOKENS, prompts=1, bootstrap=0)
    assert json.loads(wide.attrs["options"])["method"] == "sketch"


def test_without_resamples_there_are_no_ends(model):
    ds = portrait(model, TOKENS, prompts=1, bootstrap=0)
    assert np.isfinite(ds.leakage_source).all()
    assert np.isnan(ds.leakage_source_low).all()
    assert np.isfinite(ds.leakage_total)
    assert np.isnan(ds.leakage_total_high)


@pytest.mark.parametrize(
    ("switches", "why"),
    [
        ({"mask": "full"}, "prefix"),
        ({"mask": "window", "window": 1}, "no lag fits"),
    ],
)
def test_what_a_mask_does_not_admit_is_nan_and_said(switches, why):
    ds = portrait(toy(**switches), TOKENS, prompts=2, bootstrap=5)
    assert why in json.loads(ds.attrs["refused"])["leakage"]
    for name in ("leakage_total", "leakage_share", "removed"):
        assert np.isnan(ds[name]).all()
    assert np.isfinite(ds.sensitivity).all()
    assert np.isfinite(ds.alpha).all()


def test_leakage_is_not_asked_of_prompts_whose_content_depends_on_position(model):
    ds = portrait(model, TOKENS, prompts=1, bootstrap=5, stationary=False)
    assert "depends on the position" in json.loads(ds.attrs["refused"])["leakage"]
    assert np.isnan(ds.leakage_total)


def test_lags_fit_prompts_and_windows(model):
    assert usual_lags(model, 256) == tuple(range(1, 9))
    assert usual_lags(model, 17) == (1, 2, 3, 4)
    assert usual_lags(toy(mask="window", window=3), 24) == (1, 2)
    assert usual_lags(model, 4) == ()


def test_progress_ends_at_one(model):
    told: list[float] = []
    portrait(model, TOKENS, prompts=1, bootstrap=0, progress=lambda done, total: told.append(done / total))
    assert told == sorted(told)
    assert told[-1] == 1
    assert len(told) > 2


# ------------------------------------------------------------------------------------------------------ two curves


def test_fractions_run_from_first_to_last_position():
    np.testing.assert_array_equal(fractions(5), [0, 0.25, 0.5, 0.75, 1])


def test_curves_are_interpolated_in_the_logarithm():
    fine = np.exp(np.linspace(0, 3, 33))  # straight in the logarithm: interpolation is exact
    np.testing.assert_allclose(taken_at(fine, 7), np.exp(np.linspace(0, 3, 7)))
    np.testing.assert_array_equal(taken_at(fine, 33), fine)


def test_beside_a_zero_the_nearer_position_counts():
    curve = np.array([0.0, 0.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0])  # points at 0, 7/4, 7/2, 21/4, 7
    np.testing.assert_allclose(taken_at(curve, 5), [0, 4, 4, 4, 4])
    np.testing.assert_allclose(taken_at(curve, 6)[:2], [0, 0])  # at 1.4, nearer to the zero


@pytest.mark.parametrize("points", [1, 9])
def test_points_that_are_not_there_are_refused(points):
    with pytest.raises(InputError, match=f"points={points}"):
        taken_at(np.ones(8), points)


def test_average_is_rms_over_prompts_and_geometric_over_seeds():
    values = np.array([[[3.0, 1.0], [4.0, 1.0]], [[2.0, 0.0], [2.0, 0.0]]])
    np.testing.assert_allclose(averaged(values), [math.sqrt(math.sqrt(12.5) * 2), 0])


def sampled(curve: np.ndarray, *, seeds: int = 2, prompts: int = 6, noise: float = 0.1, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return curve * np.exp(noise * random.normal(size=(seeds, prompts, len(curve))))


U = 1 + 3 * np.linspace(-1, 1, 129) ** 2


def test_same_shape_agrees_at_other_lengths_and_scales():
    found = agreement(sampled(U), 7 * sampled(U[::8], seed=1), bootstrap=100)
    assert found.spearman > 0.8
    assert found.error < 0.15
    assert found.apart == 0
    assert found.spearman_low <= found.spearman <= found.spearman_high
    assert found.error_low <= found.error_high


def test_opposite_shape_does_not():
    found = agreement(sampled(U), sampled(1 / U[::8], seed=1), bootstrap=100)
    assert found.spearman_high < -0.5
    assert found.error_low > 0.5


def test_exact_copy_has_no_error_and_paired_intervals_have_no_width():
    values = sampled(U[::8])
    found = agreement(values, 3 * values, paired=True, bootstrap=50)
    assert found.spearman == pytest.approx(1)
    assert found.error == pytest.approx(0, abs=1e-12)
    assert found.error_high == pytest.approx(0, abs=1e-12)
    assert found.spearman_low == pytest.approx(1)
    assert agreement(values, 3 * values, bootstrap=50).error_high > 0.01


def test_pairing_holds_where_only_one_of_both_has_seeds():
    values = sampled(U[::8], seeds=1)
    found = agreement(values, np.concatenate([values, values]), paired=True, bootstrap=50)
    assert found.error_high == pytest.approx(0, abs=1e-12)


def test_intervals_widen_with_the_scatter_of_prompts():
    wide, narrow = (
        agreement(sampled(U, noise=noise), sampled(U[::8], noise=noise, seed=1), bootstrap=200) for noise in (0.6, 0.02)
    )
    assert wide.error_high - wide.error_low > 4 * (narrow.error_high - narrow.error_low)


def test_zeros_agree_and_reaches_that_differ_are_counted():
    one, other = U[::8].copy(), U[::8].copy()
    one[:4], other[:5] = 0, 0
    found = agreement(sampled(one, noise=0), sampled(other, noise=0), bootstrap=0)
    assert found.error == pytest.approx(0, abs=1e-12)
    assert found.apart == pytest.approx(1 / 17)
    assert math.isnan(found.error_low)


def test_curves_that_cannot_be_compared_are_refused(unchecked):
    good = sampled(U[::8])
    for bad, said in (
        (good[0], "shape"),
        (-good, "negative"),
        (np.where(good > 3, np.nan, good), "not finite"),
    ):
        with pytest.raises(InputError, match=said):
            agreement(good, bad)
    with pytest.raises(InputError, match="6 and 5 prompts"):
        agreement(good, good[:, :5], paired=True)


def test_a_flat_curve_has_no_rank_correlation():
    found = agreement(np.ones((1, 2, 9)), sampled(U[::16]), bootstrap=10)
    assert math.isnan(found.spearman)
    assert math.isnan(found.spearman_low)
    assert found.error > 0


def test_shape_is_that_of_the_mean_curve_with_intervals():
    values = sampled(U, noise=0.3)
    found, whole = shape(values, bootstrap=200), ushape(averaged(values))
    assert found.primacy[0] == whole.primacy
    assert found.recency[0] == whole.recency
    assert found.trough[0] == whole.trough_fraction
    for value, low, high in found:
        assert low <= high
        assert low * 0.8 <= value <= high * 1.2


def test_shape_of_a_cut_off_middle_is_infinite():
    curve = np.zeros(16)
    curve[-2:] = 1
    found = shape(sampled(curve, noise=0), bootstrap=5)
    assert math.isinf(found.recency[0])
    assert math.isnan(found.primacy[0])
    with pytest.raises(InputError, match="7 positions"):
        shape(sampled(U[:7]))
