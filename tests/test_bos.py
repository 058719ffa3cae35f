"""Position 0 swapped: what stands there, that nothing else changed, and what is reported before and after."""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from families import VOCABULARY, WIDTH
from measured import complete, drawn_tokens, error, refused, view
from torch import Tensor
from torch.nn import functional

import probes
from probes.headlines import numbers
from probes.measures import consequences
from probes.measures.bos_swap import MEASURE, bos_swap
from probes.measures.bos_swap.compute import anchored, anchoring, kept, share
from probes.measures.leakage import leakage
from probes.measures.leakage.forms import splits
from probes.measures.sinks import sinks
from probes.models import swap as swap_module
from probes.models.ablate import reweighed
from probes.models.swap import mean_embedding, swapped
from probes.results.statistics import jackknifed
from probes.run.store import Store

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
        if re.match("component_(removed|share)|.*_change|kl_", one):
            finite = values[~np.isnan(values)]
            assert (finite == 0).all(), one
            assert finite.size, one
        elif "before" in one:
            assert np.array_equal(values, found[one.replace("before", "after")], equal_nan=True), one
    assert np.isnan(found["loss_change"]).sum() == 1
    assert ds.sel(definition="V(X)").component_removed.notnull().all()


def test_before_and_after_are_what_the_probes_say(monkeypatch):
    monkeypatch.setattr(consequences, "LOGITS_AT_ONCE", 5 * VOCABULARY)  # 23 predictions in pieces of 5
    model, tokens, documents = view("llama"), some_tokens(6), list("aabbcd")
    found = bos_swap(model, tokens, replacement="mean", seed=3, documents=documents, **SMALL)
    sides = {"before": model, "after": swapped(model, "mean", seed=3)}
    rates, by_prompt = {}, {}
    for when, seen in sides.items():
        leak = leakage(seen, tokens, lags=(1, 2, 3), bootstrap=20, seed=3, documents=documents)
        component = found[f"component_{when}"].isel(band=0)
        for name, theirs in (
            ("V(X), mean over heads", "steady"),
            ("V(X), mean over heads, the constant sink left in", "log"),
        ):
            expected = leak[f"{theirs}_stream_by_block"].mean("layer")
            np.testing.assert_allclose(component.sel(definition=name), expected[0], rtol=1e-9, atol=1e-12)
        forms = splits(seen, tokens, [(4, 23)], (1, 2, 3), torch.ones(1, 6, dtype=torch.int64), pieces=Store())
        np.testing.assert_allclose(component.sel(definition="V(X)"), np.median(forms["steady_stream"]), rtol=1e-9)
        sink = sinks(seen, tokens, keys=range(8))
        rates[when] = (sink.alpha > 0.3).mean(("layer", "head"))
        np.testing.assert_allclose(found[f"sink_rate_{when}"], sink.sink_rate[:, 0])
        np.testing.assert_allclose(found[f"sink_rate_{when}_of_model"], sink.sink_rate_of_model)
        np.testing.assert_allclose(found[f"sink_rate_{when}_by_prompt"], rates[when])
        weight = component.sel(definition="weight on position 0")
        np.testing.assert_allclose(weight, sink.alpha.sel(key=0).mean(), rtol=1e-6)
        jacobian = probes.jacobian(seen, tokens[:2], method="sketch", products=16, seed=3)
        profile = np.exp(np.log(jacobian.sensitivity).mean("prompt"))
        np.testing.assert_allclose(found[f"sensitivity_{when}"], profile)
        logits = seen.unembed(seen.norm(seen.residual(seen.embed(tokens)))).detach().double()
        losses = functional.cross_entropy(logits[:, :-1].mT, tokens[:, 1:], reduction="none")
        by_prompt[when] = losses[:, 1:].mean(1)
        np.testing.assert_allclose(found[f"loss_{when}_by_prompt"], by_prompt[when], rtol=1e-5)
    moved = sinks(model, tokens, reacts="mean").reacts.mean()
    np.testing.assert_allclose(found.component_share.sel(definition="pattern over other keys")[0], moved, rtol=1e-6)
    change = (by_prompt["after"] - by_prompt["before"]).numpy()
    expected = jackknifed(np.mean, change, np.array([0, 0, 1, 1, 2, 3]))  # the same documents before and after
    for end, value in zip(("", "_low", "_high"), expected[:3], strict=True):
        np.testing.assert_allclose(found[f"loss_change_of_model{end}"], value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.loss_change_of_model, found.loss_change[1:-1].mean(), atol=1e-12)
    others = rates["after"].mean("prompt")[1:]
    expected = {"sink rate, before": rates["before"].sel(key=0).mean(), "loss, change (nat)": change.mean()}
    expected["largest sink rate of another first key, after"] = others.max()
    headlines = {number.name: number.interval for number in numbers(MEASURE, found)}
    for name, value in expected.items():
        assert headlines[name].value == pytest.approx(float(value), rel=1e-5)
    assert all(np.isfinite(interval[1:3]).all() for interval in headlines.values())


def test_shares_and_what_is_kept_by_hand():
    before = np.array([[2.0, 2.0, -1.0, 0.5, 1.0]] + [[2.0, 2.0, 1.0, (-1.0) ** n, 1.0] for n in range(40)])
    after = np.array([[1.0, 2.0, 0.5, 0.1, 3.0]] + [[1.0, 2.0, 0.5, 0.1, 3.0]] * 40)
    # Half of the resamples of the fourth have nothing to remove; the third is no number that its resamples know.
    expected = [[0.5, 0, math.nan, math.nan, -2]] * 3
    np.testing.assert_allclose(share(before, after), expected)
    assert np.isnan(share(before[:1], after[:1])).all()
    rates = np.array([[0.6, 0.3], [0.4, 0.2], [0.5, 0.4]])
    value, low, high = kept(*rates.T, np.arange(3))
    without = np.array([0.6 / 0.9, 0.7 / 1.1, 0.5])
    reach = 4.3027 * np.sqrt(2 / 3 * ((without - without.mean()) ** 2).sum())  # Student's t, two degrees of freedom
    np.testing.assert_allclose((value, low, high), (0.6, 0.6 - reach, 0.6 + reach), rtol=1e-4)
    assert kept(rates[:, 0], 0 * rates[:, 0], np.arange(3)) == (0, 0, 0)


def test_anchors_on_all_sides():
    there, nan = (0.6, 0.55, 0.65), math.nan
    for before, shares, verdict in (
        (there, [(0.9, 0.8, 1.0), (0.6, 0.51, 0.7)], "place-anchored"),
        (there, [(0.9, 0.8, 1.0), (0.6, 0.49, 0.7)], "mixed"),
        (there, [(0.9, 0.8, 1.0), (0.0, 0.0, 0.0)], "mixed"),
        (there, [(0.05, 0.01, 0.11), (0.0, 0.0, 0.0)], "mixed"),
        (there, [(0.05, 0.01, 0.09), (0.0, 0.0, 0.0)], "token-anchored"),
        ((0.06, 0.04, 0.08), [(0.9, 0.8, 1.0), (0.9, 0.8, 1.0)], "no sink to anchor"),
        ((0.0, 0.0, 0.0), [(nan, nan, nan)] * 2, "no sink to anchor"),
        ((0.6, nan, nan), [(0.9, nan, nan)] * 2, "undecided: it takes two documents"),
    ):
        assert anchored(before, shares) == verdict
    rates = np.array([0.5, 0.6, 0.4, 0.5])
    for by, verdict in ((0.9, "place-anchored"), (0.0, "token-anchored"), (0.3, "mixed")):
        ratios = np.stack([kept(rates, share * rates, np.arange(4)) for share in (by, by)], 1)
        made = {
            f"sink_rate_kept{end}": ("replacement", x) for end, x in zip(("", "_low", "_high"), ratios, strict=True)
        }
        ends = zip(("", "_low", "_high"), there, strict=True)
        made |= {f"sink_rate_before_of_model{end}": (("replacement", "key"), [[x]] * 2) for end, x in ends}
        ds = xr.Dataset(made, {"replacement": ["mean", "random"], "key": [0]})
        assert anchoring(ds) == verdict
        assert anchoring(ds.isel(replacement=[0])) == ""


@pytest.mark.parametrize("backend", ["transformers", "transformer_lens"])
def test_left_out_is_the_text_without_its_first_token(backend):
    """Where logits depend on distances alone; the sink is then looked for at key 1."""
    tokens = some_tokens(6)
    for name, same in (("llama", True), ("mistral", True), ("gpt2", False)):
        model = view(name, backend, dtype="float64")
        without, shorter = reweighed(model, "without-0"), tokens[:, 1:]
        one, two = (m.residual(m.embed(ids)).detach() for m, ids in ((without, tokens), (model, shorter)))
        assert (error(one[:, 1:], two) < 1e-4) == same  # RMS norms compute in float32
        if same:
            found = bos_swap(model, tokens, replacement="without-0", **(SMALL | {"profile_prompts": 0}))
            rates = sinks(model, shorter, keys=range(7)).sink_rate_of_model
            np.testing.assert_allclose(found.sink_rate_after_of_model[1:], rates)
            headlines = {number.name: number.interval.value for number in numbers(MEASURE, found)}
            assert headlines["sink rate of the first token left"] == pytest.approx(float(rates[0]))
            assert np.isnan(found.component_after.sel(definition="V(X)")).all()


def test_result_is_complete(tmp_path):
    model, tokens, done = view("mistral"), some_tokens(), []
    found = bos_swap(model, tokens, replacement="zero", progress=lambda *at: done.append(at), **SMALL)
    assert found.attrs["replacement"] == "zero"
    assert found.band.values.tolist() == ["4-23"]
    assert done == sorted(done)
    assert done[-1] == (1.0, 1.0)
    complete(found, tmp_path / "found.nc")
    plain = bos_swap(model, tokens, replacement="zero", **(SMALL | {"bootstrap": 0}))
    assert np.isnan(plain.component_removed_low.sel(definition="V(X)")).all()  # leakage alone is resampled
    assert np.isfinite(plain.loss_change_of_model_low)
    both = bos_swap(model, tokens, replacement=["zero", "without-0@1"], **SMALL)  # the model as it is, measured once
    alone = bos_swap(model, tokens, replacement="without-0@1", **SMALL)
    for name, single in (("zero", found), ("without-0@1", alone)):
        xr.testing.assert_identical(both.sel(replacement=name, drop=True).drop_attrs(), single.drop_attrs())
    anchors = bos_swap(model, tokens, replacement=["mean", "random"], **SMALL)
    assert anchors.attrs["anchoring"] == anchoring(anchors)


def test_bad_replacements_and_options_are_refused():
    model, tokens = view("llama"), some_tokens()
    other: Any
    for other, says in ((-1, "id -1 "), (VOCABULARY, f"id {VOCABULARY} "), (True, "'True'"), (1.0, "'1.0'")):
        with refused(f"replacement {says}"):
            swapped(model, other)
    with refused("give one or more, each once"):
        bos_swap(model, tokens, replacement=["mean", 17, "17"])
    for name, value in (("seed", -1), ("products", 1), ("recall", -2)):
        with refused(f"{name}={value} "):
            bos_swap(model, tokens, **{name: value})
