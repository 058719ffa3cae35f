"""Position 0 swapped: what stands there, that nothing else changed, and what is reported before and after."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from families import VOCABULARY, WIDTH
from measured import complete, drawn_tokens, refused, view
from torch import Tensor
from torch.nn import functional

import probes
from probes.headlines import numbers
from probes.measures import consequences
from probes.measures.bos_swap import MEASURE, bos_swap
from probes.measures.bos_swap.compute import removed
from probes.measures.leakage import leakage
from probes.measures.sinks import sinks
from probes.models import swap as swap_module
from probes.models.swap import mean_embedding, parse_replacement, swapped

LENGTH = 24
SMALL: dict[str, Any] = {"bootstrap": 20, "profile_prompts": 2, "products": 16, "lags": (1, 2, 3)}


def some_tokens(prompts: int = 4, length: int = LENGTH, first: int | None = 0) -> Tensor:
    return drawn_tokens(prompts, length, least=3, first=first)


@pytest.mark.parametrize(("name", "backend"), [("gpt2", "transformer_lens"), ("gemma", "transformers")])
def test_mean_is_over_every_token_at_position_0_however_they_are_cut(name, backend, monkeypatch):
    model = view(name, backend)
    every = torch.stack([model.embed(torch.tensor([[i]]))[0, 0].double() for i in range(VOCABULARY)])
    whole = mean_embedding(model)
    for given in (swapped(model, "mean").embed(some_tokens())[:, 0].double(), whole):
        torch.testing.assert_close(given, every.mean(0).expand_as(given), rtol=1e-5, atol=1e-6)
    for most in (3 * WIDTH + 1, 1):  # a wide model: at least one at a time
        monkeypatch.setattr(swap_module, "EMBEDDING_NUMBERS", most)
        torch.testing.assert_close(mean_embedding(model), whole, rtol=0, atol=1e-12)


def test_random_vectors_have_the_norm_of_what_they_replace():
    model, tokens = view("llama"), some_tokens(first=None)
    own = model.embed(tokens)[:, 0]
    found = swapped(model, "random", seed=3).embed(tokens)[:, 0]
    torch.testing.assert_close(found.norm(dim=-1), own.norm(dim=-1))
    directions = functional.normalize(found, dim=-1)
    torch.testing.assert_close(directions, directions[:1].expand_as(directions))  # in whatever company
    assert torch.equal(found[2:3], swapped(model, "random", seed=3).embed(tokens[2:3])[:, 0])
    assert not torch.equal(found, swapped(model, "random", seed=4).embed(tokens)[:, 0])


def test_a_token_for_itself_changes_no_number():
    """Resampled apart, a change of nothing would have an interval as wide as the loss's own spread between prompts."""
    ds = bos_swap(view("llama"), some_tokens(7), replacement=0, **SMALL)  # halves of unequal size
    found = {str(name): variable.values for name, variable in ds.drop_vars("tokens").items()}
    for one, values in found.items():
        if one.startswith("removed") or "change" in one:
            finite = values[~np.isnan(values)]
            assert (finite == 0).all(), one
            assert finite.size or one.startswith("removed"), one
        elif "before" in one:
            assert np.array_equal(values, found[one.replace("before", "after")], equal_nan=True), one
    assert np.isnan(found["loss_change"]).sum() == 1


def test_before_and_after_are_what_the_probes_say(monkeypatch):
    monkeypatch.setattr(consequences, "LOGITS_AT_ONCE", 5 * VOCABULARY)  # 23 predictions in pieces of 5
    model, tokens = view("llama"), some_tokens(6)
    found = bos_swap(model, tokens, replacement="mean", seed=3, **SMALL)
    given = {"lags": (1, 2, 3), "bootstrap": 20, "seed": 3}
    residual = {}
    for when, seen in (("before", model), ("after", swapped(model, "mean", seed=3))):
        leak = leakage(seen, tokens, **given)
        for ours, theirs in (("leakage", "log_form"), ("source", "log_source"), ("weight", "weight_source")):
            for end in ("", "_low", "_high"):
                expected = leak[f"{theirs}_by_block{end}"]
                np.testing.assert_allclose(found[f"{ours}_{when}{end}"], expected, rtol=1e-9, atol=1e-12)
        # V(X) is what is left of the total without V(M) and the covariance of both, V(l) = V(X) + V(M) - 2 C(X, M).
        total, v_m = leak.log_form_by_block.sel(part="total"), leak.log_form_by_block.sel(part="mask")
        c_xm = v_m - leak.log_source_by_block.sel(source="mask")
        residual[when] = (total - v_m + 2 * c_xm).values.mean(0)
        np.testing.assert_allclose(found[f"residual_{when}_of_model"], residual[when], atol=1e-9)
        steady = leak.steady_stream_of_model
        np.testing.assert_allclose(found[f"residual_steady_{when}_of_model"], steady, rtol=1e-9, atol=1e-12)
        sink = sinks(seen, tokens, keys=(0,))
        np.testing.assert_allclose(found[f"sink_rate_{when}"], sink.sink_rate[:, 0])
        jacobian = probes.jacobian(seen, tokens[:2], method="sketch", products=16, seed=3)
        profile = probes.rms_profile(jacobian.sensitivity, jacobian.stderr)
        np.testing.assert_allclose(found[f"sensitivity_{when}"], profile.mean)
        logits = seen.unembed(seen.norm(seen.residual(seen.embed(tokens)))).detach().double()
        losses = functional.cross_entropy(logits[:, :-1].mT, tokens[:, 1:], reduction="none")
        np.testing.assert_allclose(found[f"loss_{when}"][:-1], losses.mean(0), rtol=1e-5)
        assert np.isnan(found[f"loss_{when}"][-1])
    for ours in ("leakage_{}", "loss_{}"):
        before, after, change = (found[ours.format(when)] for when in ("before", "after", "change"))
        np.testing.assert_allclose(change, after - before, atol=1e-12)
    np.testing.assert_allclose(found.loss_change_of_model, found.loss_change[1:-1].mean(), atol=1e-12)
    low, high = (found[f"loss_change_{end}"].values[:-1] for end in ("low", "high"))
    assert (low < high).all()
    assert ((low <= found.loss_change[:-1]) & (found.loss_change[:-1] <= high)).mean() > 0.8
    ratio = 1 - residual["after"] / residual["before"]
    np.testing.assert_allclose(found.removed_of_model, np.where(residual["before"] > 0, ratio, np.nan))
    expected = {"sink rate, after": sink.sink_rate.mean(), "loss, change (nat)": found.loss_change[1:-1].mean()}
    expected["residual component removed, the constant sink left in"] = ratio[0]
    headlines = {number.name: number.interval.value for number in numbers(MEASURE, found)}
    for name, value in expected.items():
        assert headlines[name] == pytest.approx(float(value), rel=1e-5)
    effects = MEASURE.tables({"ape": found})[0]
    assert float(effects.rows[0][2]) == pytest.approx(float(found.sink_rate_before.mean()), abs=5e-4)


def test_fraction_removed_by_hand():
    before = np.array([[2.0, 2.0, -1.0, 0.5, 1.0]] + [[2.0, 2.0, 1.0, (-1.0) ** n, 1.0] for n in range(40)])
    after = np.array([[1.0, 2.0, 0.5, 0.1, 3.0]] + [[1.0, 2.0, 0.5, 0.1, 3.0]] * 40)
    estimate, low, high = removed(before, after)
    np.testing.assert_allclose(estimate, [0.5, 0, math.nan, 0.8, -2])
    np.testing.assert_allclose(low, [0.5, 0, math.nan, -math.inf, -2])  # half of the resamples have nothing to remove
    np.testing.assert_allclose(high, [0.5, 0, math.nan, math.inf, -2])
    assert np.isnan(removed(before[:1], after[:1])[1]).all()
    assert all((part == 0).all() for part in removed(before, before))


def test_result_is_complete(tmp_path):
    model, tokens, done = view("mistral"), some_tokens(), []
    found = bos_swap(model, tokens, replacement="zero", progress=lambda *at: done.append(at), **SMALL)
    assert found.attrs["replacement"] == "zero"
    assert found.band.values.tolist() == ["4-23"]
    assert done == sorted(done)
    assert done[-1] == (1.0, 1.0)
    complete(found, tmp_path / "found.nc")
    plain = bos_swap(model, tokens, replacement="zero", **(SMALL | {"bootstrap": 0}))
    assert not [name for name in plain if str(name).endswith(("_low", "_high"))]
    both = bos_swap(model, tokens, replacement=["zero", "without-0@1"], **SMALL)  # the model as it is, measured once
    alone = bos_swap(model, tokens, replacement="without-0@1", **SMALL)
    for name, single in (("zero", found), ("without-0@1", alone)):
        xr.testing.assert_identical(both.sel(replacement=name, drop=True).drop_attrs(), single.drop_attrs())


def test_bad_replacements_and_options_are_refused():
    assert [parse_replacement(value) for value in ("mean", "drawn", "0", "17")] == ["mean", "drawn", 0, 17]
    model, tokens = view("llama"), some_tokens()
    for value in ("", "Mean", "-1", "1.5", "²"):
        with refused(f"replacement '{value}'", "mean, zero, random, drawn or a token id"):
            parse_replacement(value)
    other: Any
    for other, says in ((-1, "id -1 "), (VOCABULARY, f"id {VOCABULARY} "), (True, "'True'"), (1.0, "'1.0'")):
        with refused(f"replacement {says}"):
            swapped(model, other)
    with refused("give one or more, each once"):
        bos_swap(model, tokens, replacement=["mean", 17, "17"])
    for name, value in (("seed", -1), ("products", 1), ("recall", -2)):
        with refused(f"{name}={value} "):
            bos_swap(model, tokens, **{name: value})
