"""Leakage of absolute position: against the definition entry by entry, patterns of known answer, and the null tests."""

import math
from itertools import product
from pathlib import Path

import families
import numpy as np
import pytest
import reference_heads
import torch
import xarray as xr
from commands import call
from measured import drawn_tokens, refused
from sim import ONE, Launched, Simulated

import probes
from probes.headlines import numbers
from probes.measures.attention import part_of
from probes.measures.leakage import BOUND, MEASURE, leakage, overflow, resolved
from probes.measures.leakage import forms as FORMS
from probes.measures.leakage import samples as SAMPLES
from probes.measures.leakage.compute import usual_bands
from probes.measures.leakage.forms import resampling
from probes.measures.leakage.forms import split as split_of
from probes.measures.leakage.samples import halves_of, lag_means_of, sampled
from probes.models.load import load
from probes.models.view import Attention, sees

REPORTS = Path(__file__).parent.parent / "reports" / "llm" / "leakage"
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
    """Both forms, without resampling: [entry, head, band]."""
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


def test_parts_and_sources_add_up_exactly():
    tokens, config = text(16, 40), families.FAMILIES["llama"]()
    config.initializer_range = 0.1  # cells of wild logits are millions, and rounding hides their differences
    ds = leakage(load(families.build(config)), tokens, bootstrap=20)
    assert list(ds.band.values) == ["9-31", "32-39"]
    np.testing.assert_allclose(ds.log_source.sum("source"), ds.log_form.sel(part="total"), rtol=1e-5, atol=1e-9)
    cells = ds.weight_form
    rounding = 4e-15 * float(abs(cells).max())  # Shapley values are differences of cells
    np.testing.assert_allclose(ds.weight_source.sum("source"), cells.sel(cell="both"), rtol=0, atol=rounding)
    np.testing.assert_allclose(ds.weight_share_of_model.sum("source").dropna("band"), 1, rtol=1e-9)
    np.testing.assert_allclose(ds.log_form_of_model, ds.log_form.mean(("layer", "head")), rtol=1e-12)
    assert float(((ds.log_form_low <= ds.log_form) & (ds.log_form <= ds.log_form_high)).mean()) > 0.8
    # In bfloat16 streams are rounded to 3 digits in every block: a few per cent of the largest part.
    rounded = leakage(load(families.build(config), dtype="bfloat16"), tokens, bootstrap=0)
    assert "log_form_low" not in rounded
    assert abs(rounded.log_form_of_model - ds.log_form_of_model).max() < 0.1 * abs(ds.log_form_of_model).max()


# ------------------------------------------------------------------------------------------------------ known answers


def test_nulls_stand_beside_the_total():
    model = families.model("llama")
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.q_proj.weight.zero_()
    ds = leakage(load(model), text(6, 24), bands=[BAND], lags=LAGS, bootstrap=0)
    np.testing.assert_allclose(ds.null_uniform, ds.log_form_of_model.sel(part="total"), rtol=1e-5)
    assert ((ds.null_shuffled > 0) & (ds.null_shuffled < 0.8 * ds.null_uniform)).all()  # labels carry all there is
    logs = np.log(np.arange(BAND[0], BAND[1] + 1) + 1)  # the mask is all there is
    np.testing.assert_allclose(ds.log_source.sel(source="mask"), np.var(logs), rtol=1e-5)
    np.testing.assert_allclose(ds.log_source.sel(source="residual"), 0, atol=1e-6)
    np.testing.assert_allclose(ds.weight_share_of_model.isel(band=0), [1, 0, 0], atol=1e-5)


def test_the_null_of_fresh_weights_is_their_total_on_the_first_prompts_of_each_half():
    model, tokens = load(families.model("qwen2")), text(11, 24)
    given = {"bands": [BAND], "lags": LAGS, "bootstrap": 30, "seed": 3}
    seen: list[float] = []
    ds = leakage(model, tokens, fresh=6, **given, progress=lambda done, _: seen.append(done))
    assert (seen, seen[-1], len(seen)) == (sorted(seen), 1, 2 * families.BLOCKS)
    alone = leakage(model.reinitialized(3), tokens[[0, 1, 2, 5, 6, 7]], fresh=0, **given)
    for end in ("", "_low", "_high"):
        assert ds[f"null_fresh{end}"].item() == alone[f"log_form_of_model{end}"].sel(part="total").item()


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
    assert found["log_source"][:, 0, 0].tolist() == pytest.approx([total, 0, 0], abs=1e-12)
    both = float(found["weight_form"][0, 0, 0])
    assert found["weight_source"][:, 0, 0].tolist() == pytest.approx([both, 0, 0], abs=1e-12)
    # A window leaks nothing once it is full.
    found = split(made_of(logits.expand(4, 1, -1, -1), window=5), (5, 19))
    assert found["log_form"].abs().max() < 1e-12
    assert found["weight_source"].abs().max() < 1e-12


def test_a_sink_whose_logit_grows_is_residual_by_its_growth_alone():
    logits, i = torch.zeros(4, 1, 32, 32, dtype=torch.float64), torch.arange(32).double()
    logits[..., 0] = 1 + i / 8
    found = split(made_of(logits), (9, 31))
    i, own = i[9:], logits[0, 0, 9:, 0]
    plain, steady, whole = (i + 1).log(), (i + own.mean().exp()).log(), (i + own.exp()).log()
    shared = float(((steady - steady.mean()) * (whole - steady)).mean())  # of the constant's part and of what varies
    mask, added, varying = (float(x.var(correction=0)) for x in (plain, whole - plain, whole - steady))
    names = ("log_sink", "sink_varying", "steady_stream")
    assert [found[name][0, 0, 0].item() for name in names] == pytest.approx([added, varying, varying], rel=1e-9)
    assert found["log_form"][2:4, 0, 0].tolist() == pytest.approx([mask, added], rel=1e-9)
    constant = float(steady.var(correction=0))
    assert found["steady_source"][:2, 0, 0].tolist() == pytest.approx([constant + shared, varying + shared], rel=1e-9)


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
        assert (abs(block.log_source_by_block.sel(source="residual")) < 2 * noise).all()
    deeper = ds.log_form.sel(part="denominator").isel(layer=slice(1, None)).max()
    assert float(deeper) > 3 * float(noise.max())  # so that the limits above mean something
    assert abs(ds.log_neither).max() < 1e-10


def test_heads_and_chunks_may_be_taken_apart(monkeypatch):
    model, tokens = load(families.model("mistral"), dtype="float64"), text(7, 20)
    whole = leakage(model, tokens, bands=[BAND], lags=LAGS, bootstrap=10, fresh=0)
    monkeypatch.setattr(FORMS, "block_numbers", lambda device: 1)
    monkeypatch.setattr(SAMPLES, "TOKENS_AT_ONCE", 40)
    for name, values in leakage(model, tokens, bands=[BAND], lags=LAGS, bootstrap=10, fresh=0).items():
        np.testing.assert_allclose(values, whole[name], rtol=1e-9, atol=1e-12)


def test_on_a_gpu_prompts_go_together_and_the_host_waits_once_a_block():
    def launched(blocks: int, prompts: int) -> Launched:
        view = load(families.build(families.small("llama", num_hidden_layers=blocks)), device=str(ONE))
        assert view.identity  # which reads the weights
        with Launched() as counted:
            leakage(view, text(prompts, 40), bootstrap=5, fresh=0)
        return counted

    with Simulated():
        _, few, many, deep = (
            launched(1, 8),
            launched(1, 8),
            launched(1, 24),
            launched(3, 8),
        )  # orders of labels are kept
    assert many.operations == few.operations
    assert many.reads == few.reads
    assert (deep.operations - few.operations) / 2 < 1200
    assert (deep.reads - few.reads) / 2 == 2  # all forms, and the shuffled ones


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
        if not str(name).startswith("weight"):  # exp of wild logits
            np.testing.assert_allclose(found[name], values, rtol=0, atol=1e-9 * float(abs(values).max()) + 1e-12)


@pytest.mark.slow
def test_resamples_carry_the_means_that_all_prompts_are_shifted_by():
    generator = torch.Generator().manual_seed(8)
    logits = 2 * torch.randn(40, 1, 20, 20, generator=generator, dtype=torch.float64)
    drawn = resampling(40, 300, 0)
    quick = split_of(halves(made_of(logits)), [BAND], torch.tensor(LAGS), drawn)
    brute = {"log_form": [], "log_stream": [], "sink_constant": [], "steady_stream": []}
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
        ({"fresh": 3}, "fresh=3 prompts .* at least 4, or 0"),
        ({"documents": ["a", "b"]}, "2 documents are named for 6 prompts"),
    ):
        with refused(said):
            leakage(model, tokens, **{"lags": LAGS} | options)


def measured(model: str = "smollm2-135m", **changes: float) -> xr.Dataset:
    """A result of early queries, of 30 blocks, with another total of the model, or numbers of block 0, each by 0.05."""
    (path,) = REPORTS.glob(f"leakage-{model}.nc*")
    ds = probes.load_result(path).isel(band=[0])
    for name, value in changes.items():
        for end, by in (("", 0.0), ("_low", -0.05), ("_high", 0.05)):
            ds[f"{name}{end}"][0] = value + by
    return ds


@pytest.mark.parametrize(
    ("total", "stream", "sink", "says"),
    [
        (0.2, 0.04, 0.0, "by 0.2 [0.15, 0.25] nat² (uniform attention "),
        (0.2, 0.06, 0.06, "by 0.2 [0.15, 0.25] nat² (uniform attention "),  # position 0 accounts for it
        (0.2, 0.06, 0.04, "undecided, since block 0"),
        (0.02, 0.04, 0.0, "undecided whether"),
    ],
)
def test_shares_of_nothing_are_not_shown_and_a_null_check_that_fails_is_named(total, stream, sink, says):
    ds = measured(log_form_of_model=total, log_stream_by_block=stream, log_sink_by_block=sink)
    (answered,) = MEASURE.answer({"ape": ds})
    assert says in answered
    shown = "undecided" not in says
    assert resolved(ds, "log", "9-31") == shown
    known = {n.name: n.interval[:3] for n in numbers(MEASURE, ds) if n.where == "9-31"}
    assert known["total (nat²)"] == pytest.approx((total, total - 0.05, total + 0.05))
    for name, words in {
        "steady_stream": "residual component V(X)",
        "log_stream": "V(X), constant sink left in",
    }.items():
        expected = [ds[f"{name}_of_model{end}"].item() for end in ("", "_low", "_high")]
        assert known[f"{words} (nat²)"] == pytest.approx(tuple(expected))
    for source, words in (("mask", "mask and constant sink"), ("residual", "the residual stream")):
        if shown:
            share = ds["steady_share_of_model"].sel(source=source).item()
            assert known[f"share of {words}"][0] == pytest.approx(share)
            assert f"{share:.0%} [" in answered
        else:
            assert f"share of {words}" not in known
    (row,) = MEASURE.tables({"ape": ds})[0].rows
    assert row[2] == f"{stream:.3g} [{stream - 0.05:.3g}, {stream + 0.05:.3g}]"
    assert (row[4] == "yes") == ("block 0" not in says)


def test_a_weight_form_that_no_weight_can_have_is_left_out():
    """A number in [0, 1] has a variance of at most 1/4. Qwen2.5's key biases make logits of hundreds beside a held log Z."""
    qwen = measured("qwen2.5-coder-0.5b-instruct-q4_k_m")
    cells = np.abs(qwen["weight_form_by_block"].isel(band=0))
    assert float(cells.sel(cell=["both", "mask"]).max()) < BOUND  # where weights are normalized
    beyond = [int(layer) for layer in qwen["layer"] if float(cells.sel(layer=layer).max()) > BOUND]
    assert {0, 1, 4, 8} <= set(beyond) <= set(np.flatnonzero(overflow(qwen).isel(band=0)).tolist())
    assert not resolved(qwen, "weight", "9-31")
    assert not any("e+" in cell for table in MEASURE.tables({"qwen": qwen}) for row in table.rows for cell in row)
    assert MEASURE.tables({"qwen": qwen})[1].rows[0][6].startswith("-71")  # a covariance may be below 0


def test_the_chart_shows_totals_and_shares_and_follows_most_blocks():
    ds = measured()
    ds["log_form_by_block"][:, 6] = 900.0
    leaks, shares, parts = MEASURE.chart({"ape": ds}).axes
    for cell in (leaks, parts):
        assert 0.05 < cell.get_ylim()[1] < 2
    total, stream = (line.get_ydata() for line in leaks.lines if len(line.get_ydata()) == ds.sizes["layer"])
    np.testing.assert_allclose(total, ds["log_form_by_block"][0, :, 0])
    np.testing.assert_allclose(stream, ds["steady_stream_by_block"][:, 0])
    drawn = [float(x) for line in shares.lines if line.get_marker() == "o" for x in line.get_xdata()]
    np.testing.assert_allclose(drawn, ds["steady_share_of_model"][:2, 0])


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
