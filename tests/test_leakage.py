"""Leakage of absolute position: against the definition entry by entry, patterns of known answer, and the null tests."""

import math
from itertools import product

import families
import numpy as np
import pytest
import reference_heads
import torch
import xarray as xr
from commands import call
from measured import drawn_tokens, refused
from sim import ONE, Simulated

import probes
from probes.headlines import numbers
from probes.measures.attention import part_of
from probes.measures.leakage import ALL, MEASURE, PARTIES, QUANTILES, leakage
from probes.measures.leakage import forms as FORMS
from probes.measures.leakage.compute import usual_bands
from probes.measures.leakage.forms import resampling
from probes.measures.leakage.forms import split as split_of
from probes.measures.leakage.samples import halves_of, lag_means_of, sampled
from probes.models.load import load
from probes.models.view import Attention, sees

LAGS = (1, 2, 3)
BAND = (5, 15)


def text(count: int, length: int, *, seed: int = 0, first: int | None = 0) -> torch.Tensor:
    """Random tokens: their statistics depend on position nowhere but at the first."""
    return drawn_tokens(count, length, least=3, first=first, seed=seed)


def made_of(logits: torch.Tensor, *, window: int | None = None) -> Attention:
    """An attention with just these logits [prompt, head, query, key]: queries are its rows, keys the unit vectors."""
    key = torch.eye(logits.shape[-1], dtype=logits.dtype).expand(*logits.shape[:2], -1, -1)
    return Attention(query=logits, key=key, value=key, scale=1.0, softcap=None, window=window)


def halves(attention: Attention) -> list[Attention]:
    return [part_of(attention, prompts=half) for half in halves_of(len(attention.query))]


def split(attention: Attention, *bands: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Without resampling: [entry, head, band]."""
    drawn = resampling(len(attention.query), 0, 0)
    return {name: x[0] for name, x in split_of(halves(attention), bands or (BAND,), torch.tensor(LAGS), drawn).items()}


# --------------------------------------------------------------------------------------------- against the definition


@pytest.mark.parametrize(("window", "at_once"), [(None, 1), (6, 1000)])  # prompts one by one, and some
def test_split_is_the_definition_entry_by_entry(window, at_once, monkeypatch):
    generator, bands = torch.Generator().manual_seed(1), (BAND, (9, 17))
    logits = torch.randn(7, 2, 18, 18, generator=generator, dtype=torch.float64) * 1.5
    monkeypatch.setattr(FORMS, "block_numbers", lambda device: at_once)
    found = split(made_of(logits, window=window), *bands)
    hidden = logits.masked_fill(~sees(torch.arange(18)[:, None], torch.arange(18), window), -math.inf)
    for head, (n, band) in product(range(2), enumerate(bands)):
        for name, known in reference_heads.leakage(hidden[:, head], *band, LAGS).items():
            assert found[name][: len(known), head, n].tolist() == pytest.approx(known, rel=1e-9, abs=1e-12), name


def test_parties_add_up_exactly_and_heads_are_told_by_quantiles():
    tokens, config = text(16, 40), families.FAMILIES["llama"]()
    config.initializer_range = 0.1
    ds = leakage(load(families.build(config)), tokens, bootstrap=20, fresh=4)
    assert list(ds.band.values) == ["9-31", "32-39"]
    total, nine = ds.log_form.sel(part="total"), ds.parties.sel(party=list(PARTIES), other=list(PARTIES))
    for whole in (nine.sum(("party", "other")), ds.parties.sel(party=ALL, other=ALL)):
        np.testing.assert_allclose(whole, total, rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(nine.sum("other"), ds.parties.sel(other=ALL, party=list(PARTIES)), rtol=1e-9)
    np.testing.assert_allclose(ds.log_form_of_model, ds.log_form.mean(("layer", "head")), rtol=1e-12)
    for name, values in {
        "log_form": total,
        "position_share": ds.position_share,
        "steady_stream": ds.steady_stream,
    }.items():
        expected = values.quantile(list(QUANTILES.values()), ("layer", "head"))
        np.testing.assert_allclose(ds[f"{name}_of_heads"], expected, rtol=1e-12)
    np.testing.assert_allclose(ds.parties_of_heads, ds.parties.median(("layer", "head")), rtol=1e-12)
    null = ds.null_uniform.sel(quantile="median")
    np.testing.assert_allclose(ds.below_null_of_model, (total < null).mean(("layer", "head")))
    np.testing.assert_allclose(ds.surely_below_null_of_model, (ds.log_form_high[0] < null).mean(("layer", "head")))
    assert {"null_fresh_low", "null_share_fresh", "null_share_shuffled", "below_null_of_model_high"} <= {*ds.data_vars}
    assert float(((ds.log_form_low <= ds.log_form) & (ds.log_form <= ds.log_form_high)).mean()) > 0.8
    # In bfloat16 streams are rounded to 3 digits in every block: a few per cent of the largest part.
    rounded = leakage(load(families.build(config), dtype="bfloat16"), tokens, bootstrap=0, fresh=0)
    assert "log_form_low" not in rounded
    assert abs(rounded.log_form_of_model - ds.log_form_of_model).max() < 0.1 * abs(ds.log_form_of_model).max()


# ------------------------------------------------------------------------------------------------------ known answers


def test_nulls_stand_beside_the_total():
    model = families.model("llama")
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.q_proj.weight.zero_()
    ds = leakage(load(model), text(6, 24), bands=[BAND], lags=LAGS, bootstrap=0, unmasked=True)
    np.testing.assert_allclose(ds.null_unmasked, 0, atol=1e-9)  # every query sees as many keys
    for name in ("null_uniform", "log_form_of_heads"):  # alike in all heads
        np.testing.assert_allclose(ds[name], ds.log_form_of_model.sel(part="total").item(), rtol=1e-5)
    assert ((ds.null_shuffled > 0) & (ds.null_shuffled < 0.8 * ds.null_uniform)).all()  # labels carry all there is
    np.testing.assert_allclose(ds.position_share, 1, rtol=1e-5)
    np.testing.assert_allclose(ds.null_share_shuffled, ds.null_shuffled / ds.null_uniform, rtol=1e-5)
    logs = np.log(np.arange(BAND[0], BAND[1] + 1) + 1)  # the mask is all there is
    np.testing.assert_allclose(ds.parties.sel(party="keys", other=["keys", ALL]), np.var(logs), rtol=1e-5)
    np.testing.assert_allclose(ds.parties.sel(party=["constant sink", "stream"]), 0, atol=1e-6)


def test_the_null_of_fresh_weights_is_their_total_on_the_first_prompts_of_each_half():
    model, tokens = load(families.model("qwen2")), text(11, 24)
    given = {"bands": [BAND], "lags": LAGS, "bootstrap": 30, "seed": 3}
    seen: list[float] = []
    ds = leakage(model, tokens, fresh=6, **given, progress=lambda done, _: seen.append(done))
    assert (seen, seen[-1], len(seen)) == (sorted(seen), 1, 2 * families.BLOCKS)
    alone = leakage(model.reinitialized(3), tokens[[0, 1, 2, 5, 6, 7]], fresh=0, **given)
    for end in ("", "_low", "_high"):
        for null, form in (("null", "log_form"), ("null_share", "position_share")):
            np.testing.assert_array_equal(ds[f"{null}_fresh{end}"], alone[f"{form}_of_heads{end}"])


def test_documents_are_resampled_together():
    model, alike = load(families.model("llama")), text(6, 24).repeat_interleave(2, 0)
    alone, together = (
        leakage(model, alike, bands=[BAND], lags=LAGS, documents=names, seed=1)
        for names in (None, list("aabbccxxyyzz"))
    )
    width = [float((ds.log_stream_of_model_high - ds.log_stream_of_model_low)[0]) for ds in (alone, together)]
    assert width[1] > 1.2 * width[0]


def test_toeplitz_logits_leak_by_the_mask_alone():
    distance = torch.arange(20)[:, None] - torch.arange(20)[None, :]
    logits = torch.cos(0.7 * distance).double() * 2 - 0.1 * distance.double()
    found = split(made_of(logits.expand(6, 1, -1, -1)))
    total, _, mask, _, _ = found["log_form"][:, 0, 0].tolist()
    assert mask == pytest.approx(total, rel=1e-9)
    assert total > 1e-3
    assert found["parties"][:, 0, 0].tolist() == pytest.approx([total, *[0] * 8], abs=1e-12)
    assert found["position_share"].item() == pytest.approx(1, rel=1e-9)  # all prompts follow one trend
    # A window leaks nothing once it is full, whatever prompts do.
    found = split(made_of(logits * torch.rand(4, 1, 1, 1).double(), window=5), (5, 19))
    assert found["log_form"].abs().max() < 1e-12
    assert found["position_share"].abs().max() < 1e-9


def test_what_position_explains_beside_what_prompts_do_is_a_share():
    """A sink that takes all attention makes log-weights what its logit is not: a trend of variance 4, and +-3 by prompt."""
    logits, trend = torch.zeros(4, 1, 20, 20, dtype=torch.float64), torch.randn(20).double()
    trend = 2 * (trend - trend[5:16].mean()) / trend[5:16].std(correction=0)
    logits[..., 0] = 60 + trend + 3 * torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None, None]
    found = split(made_of(logits))
    assert found["log_form"][0].item() == pytest.approx(4, rel=1e-9)
    assert found["position_share"].item() == pytest.approx(4 / (4 + 9), rel=1e-9)
    doubled = split(made_of(2 * logits))
    assert doubled["log_form"][0].item() == pytest.approx(16, rel=1e-9)
    assert doubled["position_share"].item() == pytest.approx(4 / 13, rel=1e-9)


def test_a_sink_whose_logit_grows_is_residual_by_its_growth_alone():
    logits, i = torch.zeros(4, 1, 32, 32, dtype=torch.float64), torch.arange(32).double()
    logits[..., 0] = 1 + i / 8
    found = split(made_of(logits), (9, 31))
    i, own = i[9:], logits[0, 0, 9:, 0]
    plain, steady, whole = (i + 1).log(), (i + own.mean().exp()).log(), (i + own.exp()).log()
    mask, added, varying = (float(x.var(correction=0)) for x in (plain, whole - plain, whole - steady))
    assert [found[name][0, 0, 0].item() for name in ("log_sink", "steady_stream")] == pytest.approx(
        [added, varying], rel=1e-9
    )
    assert found["log_form"][2:4, 0, 0].tolist() == pytest.approx([mask, added], rel=1e-9)
    moves = torch.stack([-plain, plain - steady, steady - whole])  # of keys, constant sink and stream, which sum to l
    assert found["parties"][:, 0, 0].tolist() == pytest.approx(moves.cov(correction=0).flatten().tolist(), rel=1e-9)
    assert found["parties"].sum().item() == pytest.approx(float(whole.var(correction=0)), rel=1e-9)


# --------------------------------------------------------------------------------------------------------- null tests


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("tiny-llama", "none"),
        pytest.param("tiny-llama", "auto", marks=pytest.mark.slow),
        pytest.param("tiny-mistral-window", "none", marks=pytest.mark.slow),
    ],
)
def test_block_0_has_no_position_in_its_residual_stream(name, first):
    model = probes.load(name)
    tokens = probes.prompts(model, n=256, length=64, first=first)
    ds = leakage(model, tokens, bootstrap=0, fresh=0)
    block = ds.sel(layer=0)
    noise = block.log_noise_by_block
    # Noise is what one draw of these prompts puts on a variance; what is left of it after halving has its size at most.
    assert (abs(block.log_form_by_block.sel(part="logits")) < noise).all()
    if first == "none":  # behind BOS, position 0 is no token like the others, in block 0 as anywhere
        assert (abs(block.log_form_by_block.sel(part="denominator")) < noise).all()
        assert (abs(block.parties_by_block.sel(party="stream", other=ALL)) < 2 * noise).all()
    deeper = ds.log_form.sel(part="denominator").isel(layer=slice(1, None)).max()
    assert float(deeper) > 3 * float(noise.max())  # so that the limits above mean something
    assert abs(ds.log_neither).max() < 1e-10


def test_what_does_not_fit_is_taken_in_parts(monkeypatch):
    tokens, given, heads = text(8, 40), {"lags": LAGS, "bootstrap": 5, "fresh": 0}, list[int]()
    whole = leakage(load(families.model("llama"), dtype="float64"), tokens, **given)

    def counted(halves: list[Attention], *of: object) -> dict[str, torch.Tensor]:
        heads.append(halves[0].query.shape[1])
        return split_of(halves, *of)

    monkeypatch.setattr(FORMS, "split", counted)
    with Simulated(largest=4 * families.HEADS * 40**2 * 8):  # all heads' logits of four prompts
        found = leakage(load(families.model("llama"), device=str(ONE), dtype="float64"), tokens, **given)
    assert max(heads) == families.HEADS > min(heads)
    for name, values in whole.items():
        np.testing.assert_allclose(found[name], values, rtol=0, atol=1e-9 * float(abs(values).max()) + 1e-12)


@pytest.mark.slow
def test_resamples_carry_the_means_that_all_prompts_are_shifted_by():
    generator = torch.Generator().manual_seed(8)
    logits = 2 * torch.randn(40, 1, 20, 20, generator=generator, dtype=torch.float64)
    drawn = resampling(40, 300, 0)
    quick = split_of(halves(made_of(logits)), [BAND], torch.tensor(LAGS), drawn)
    brute = {"log_form": [], "log_stream": [], "position_share": [], "steady_stream": []}
    for resample in drawn[1:]:  # the prompts drawn, measured from the beginning
        found = split(made_of(logits[torch.arange(40).repeat_interleave(resample.long())]))
        for name, values in brute.items():
            values.append(found[name][2 if name == "log_form" else 0, 0, 0])
    for name, values in brute.items():
        spread = float(torch.stack(values).std())
        entry = 2 if name == "log_form" else 0  # the mask's part
        assert float(quick[name][1:, entry, 0, 0].std()) == pytest.approx(spread, rel=0.3), name
    for half in halves(made_of(logits)):
        samples = sampled(half, lag_means_of(half), BAND, torch.tensor(LAGS))
        assert (samples.moved_mask - samples.of_mask).mean(0).abs().max() < 1e-9


# ------------------------------------------------------------------------------------------------- what is asked and shown


def test_usual_bands_double():
    assert usual_bands(256, range(1, 9)) == ((9, 31), (32, 63), (64, 127), (128, 255))
    assert usual_bands(33, range(1, 9)) == ((9, 31),)  # a single query has no variance


def test_what_does_not_fit_is_refused():
    model, tokens = load(families.model("mistral")), text(6, 20)
    for options, said in (
        ({"lags": range(1, 9)}, "window of 8"),
        ({"fresh": 3}, "fresh=3 is too few .* at least 4, or 0"),
        ({"documents": ["a", "b"]}, "2 documents named for 6 prompts"),
    ):
        with refused(said):
            leakage(model, tokens, **{"lags": LAGS} | options)


def made(**changes: float) -> xr.Dataset:
    """A small model's result at two bands, with numbers of early queries or block 0 in which medians lie, by 0.05."""
    ds = leakage(load(families.model("llama")), text(8, 40), bootstrap=20, fresh=4).copy(deep=True)
    for name, value in changes.items():
        for end, by in (("", 0.0), ("_low", -0.05), ("_high", 0.05)):
            ds[f"{name}{end}"][{"layer": 0} if "layer" in ds[name].dims else {"band": 0}] = value + by
    return ds


@pytest.mark.parametrize(
    ("below", "stream", "sink", "says"),
    [
        (0.8, 0.04, 0.0, "attention knows less of"),
        (0.2, 0.06, 0.06, "attention knows more of"),  # position 0 explains block 0's component
        (0.52, 0.04, 0.0, "undecided whether attention knows less of"),
        (0.8, 0.06, 0.0, "fails the check."),
    ],
)
def test_the_answer_names_what_attention_knows_and_a_null_check_that_fails(below, stream, sink, says):
    ds = made(log_form_of_heads=0.2, below_null_of_model=below, log_stream_by_block=stream, log_sink_by_block=sink)
    (answered,) = MEASURE.answer({"ape": ds})
    assert says in answered
    known = {n.name: n.interval[:3] for n in numbers(MEASURE, ds) if n.where == "9-31"}
    assert known["leakage V(l), median head (nat²)"] == pytest.approx((0.2, 0.15, 0.25))
    assert known["null of uniform attention (nat²)"][0] == pytest.approx(float(np.var(np.log(np.arange(10, 33)))))
    assert known["heads below uniform attention"] == pytest.approx((below, below - 0.05, below + 0.05))
    entries = {n.where: n.interval.value for n in numbers(MEASURE, ds) if n.name.startswith("covariance of parties")}
    expected = ds.parties_of_heads.sel(party="keys", other="stream", band="9-31").item()
    assert entries["keys & stream, 9-31"] == pytest.approx(expected)
    assert (MEASURE.tables({"ape": ds})[0].rows[0][4] == "yes") == ("fails the check" not in answered)


def test_a_mask_that_tells_nothing_has_no_heads_below_it():
    ds = leakage(load(families.model("mistral")), text(6, 40), bands=[(5, 7), (9, 38)], lags=LAGS, bootstrap=5, fresh=0)
    assert (ds.null_uniform_by_block.isel(band=1) == 0).all()  # a full window
    assert np.isfinite(ds.below_null_of_model.values).tolist() == [True, False]
    assert not [n for n in numbers(MEASURE, ds) if n.name.startswith("heads") and n.where == "9-38"]


def test_the_command_measures_what_the_library_does(monkeypatch, tmp_path):
    words = f"leakage tiny-llama --prompts 6 --length 40 --bands 9-31 --lags 1,2 --bootstrap 20 --out {tmp_path}"
    assert call(monkeypatch, *words.split(), "--device", "cpu") == 0
    ds, model = probes.load_result(tmp_path / "leakage.nc"), probes.load("tiny-llama")
    drawn = probes.draw(model, n=6, length=40)
    given = {"bands": [(9, 31)], "lags": (1, 2), "bootstrap": 20, "documents": drawn.documents}
    own = probes.leakage(model, drawn.tokens, **given)
    assert "null_fresh" in own  # unless told otherwise
    for name in own.data_vars:
        np.testing.assert_array_equal(ds[name], own[name])
