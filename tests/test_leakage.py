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

import probes
from probes.headlines import numbers
from probes.measures.attention import part_of
from probes.measures.leakage import BOUND, MEASURE, PARTS, SOURCES, leakage, overflow, resolved
from probes.measures.leakage import forms as FORMS
from probes.measures.leakage import samples as SAMPLES
from probes.measures.leakage.compute import CELLS, usual_bands
from probes.measures.leakage.forms import resampling
from probes.measures.leakage.forms import split as split_of
from probes.measures.leakage.samples import halves_of, lag_means_of, sampled
from probes.models.load import load
from probes.models.masks import causal_mask
from probes.models.view import Attention

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
    return {name: x[0] for name, x in split_of(halves(attention), bands or (BAND,), LAGS, drawn).items()}


NAMES = {  # the twin's, by variable and entry
    "log_form": ("total", "logits", "mask", "denominator", "covariance"),
    "log_stream": ("stream",),
    "log_source": ("log mask", "log residual"),
    "log_noise": ("noise",),
    "log_sink": ("sink",),
    "sink_constant": ("sink constant",),
    "sink_varying": ("sink varying",),
    "steady_stream": ("steady stream",),
    "steady_source": ("steady mask", "steady residual"),
    "log_rest": ("rest",),
    "weight_form": ("both", "only mask", "only residual", "neither"),
    "weight_source": ("weight mask", "weight residual"),
}


# --------------------------------------------------------------------------------------------- against the definition


@pytest.mark.parametrize(("window", "at_once"), [(None, 1), (6, 1000), (6, 1 << 20)])  # prompts one by one, some, all
def test_split_is_the_definition_entry_by_entry(window, at_once, monkeypatch):
    generator, bands = torch.Generator().manual_seed(1), (BAND, (9, 17))
    logits = torch.randn(7, 2, 18, 18, generator=generator, dtype=torch.float64) * 1.5
    monkeypatch.setattr(SAMPLES, "LOGITS_AT_ONCE", at_once)
    found = split(made_of(logits, window=window), *bands)
    hidden = logits.masked_fill(~causal_mask(18, window), -math.inf)
    for head, (n, band) in product(range(2), enumerate(bands)):
        expected = reference_heads.leakage(hidden[:, head], *band, LAGS)
        assert set().union(*NAMES.values()) == set(expected)
        for name, entries in NAMES.items():
            known = [expected[entry] for entry in entries]
            assert found[name][: len(known), head, n].tolist() == pytest.approx(known, rel=1e-9, abs=1e-12), name


def test_parts_and_sources_add_up_exactly():
    tokens = text(16, 40)
    config = families.FAMILIES["llama"]()
    config.initializer_range = 0.1  # cells of wild logits are millions, and rounding hides their differences
    ds = leakage(load(families.build(config)), tokens, bootstrap=20)
    assert list(ds.band.values) == ["9-31", "32-39"]
    parts, sources = ds.log_form, ds.log_source
    np.testing.assert_allclose(parts[1:].sum("part"), parts.sel(part="total"), rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(sources.sum("source"), parts.sel(part="total"), rtol=1e-5, atol=1e-9)
    cells = ds.weight_form
    rounding = 4e-15 * float(abs(cells).max())  # Shapley values are differences of cells
    np.testing.assert_allclose(ds.weight_source.sum("source"), cells.sel(cell="both"), rtol=0, atol=rounding)
    np.testing.assert_allclose(ds.weight_share_of_model.sum("source").dropna("band"), 1, rtol=1e-9)
    np.testing.assert_allclose(ds.log_form_by_block, ds.log_form.mean("head"), rtol=1e-12)
    np.testing.assert_allclose(ds.log_form_of_model, ds.log_form.mean(("layer", "head")), rtol=1e-12)
    for name in ("log_form", "log_source_by_block", "weight_source_of_model"):
        inside = (ds[f"{name}_low"] <= ds[name]) & (ds[name] <= ds[f"{name}_high"])
        assert float(inside.mean()) > 0.8
    # In bfloat16 streams are rounded to 3 digits in every block: a few per cent of the largest part.
    rounded = leakage(load(families.build(config), dtype="bfloat16"), tokens, bootstrap=0)
    assert "log_form_low" not in rounded
    off = abs(rounded.log_form_of_model - ds.log_form_of_model).max()
    assert off < 0.1 * abs(ds.log_form_of_model).max()


# ------------------------------------------------------------------------------------------------------ known answers


def test_nulls_stand_beside_the_total():
    model = families.model("llama")
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.q_proj.weight.zero_()
    ds = leakage(load(model), text(6, 24), bands=[BAND], lags=LAGS, bootstrap=0)
    np.testing.assert_allclose(ds.null_uniform, ds.log_form_of_model.sel(part="total"), rtol=1e-5)
    assert (ds.null_shuffled < 0.8 * ds.null_uniform).all()  # labels carry all there is
    assert (ds.null_shuffled > 0).all()
    logs = torch.arange(BAND[0], BAND[1] + 1, dtype=torch.float64).add(1).log()  # the mask is all there is
    np.testing.assert_allclose(ds.log_source.sel(source="mask"), float(logs.var(correction=0)), rtol=1e-5)
    np.testing.assert_allclose(ds.log_source.sel(source="residual"), 0, atol=1e-6)
    np.testing.assert_allclose(ds.weight_share_of_model.isel(band=0), [1, 0, 0], atol=1e-5)


def test_the_null_of_fresh_weights_is_their_total_on_the_first_prompts_of_each_half():
    model, tokens = load(families.model("qwen2")), text(11, 24)
    given = {"bands": [BAND], "lags": LAGS, "bootstrap": 30, "seed": 3}
    ds = leakage(model, tokens, fresh=6, **given)
    assert '"fresh": 6' in ds.attrs["options"]
    assert '"lags": [1, 2, 3]' in ds.attrs["options"]
    assert ds.tokens.shape == (11, 24)
    twin = model.reinitialized(3)
    alone = leakage(twin, tokens[[0, 1, 2, 5, 6, 7]], fresh=0, **given)
    for end in ("", "_low", "_high"):
        assert ds[f"null_fresh{end}"].item() == alone[f"log_form_of_model{end}"].sel(part="total").item()
    seen: list[tuple[float, float]] = []
    found = leakage(model, tokens, **given, progress=lambda *step: seen.append(step))
    assert "null_fresh" in found  # unless told otherwise
    assert [done for done, _ in seen] == pytest.approx(np.arange(1, len(seen) + 1) / len(seen))
    assert len(seen) == 2 * families.BLOCKS  # the fresh weights' blocks go ahead


def test_documents_are_resampled_together():
    model, tokens = load(families.model("llama")), text(12, 24)
    names = ["a", "a", "b", "b", "c", "c", "x", "x", "y", "y", "z", "z"]
    alike = tokens[[0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10]]  # as alike as prompts of one document can be
    alone, together = (
        leakage(model, alike, bands=[BAND], lags=LAGS, documents=given, seed=1) for given in (None, names)
    )
    width = [float((ds.log_stream_of_model_high - ds.log_stream_of_model_low)[0]) for ds in (alone, together)]
    assert width[1] > 1.2 * width[0]
    with refused("2 documents are named for 12 prompts"):
        leakage(model, tokens, bands=[BAND], lags=LAGS, documents=["a", "b"])


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


def test_an_absolute_bias_under_fixed_denominators_is_all_residual():
    length = 20
    bias = torch.sin(torch.arange(length).double())  # by the query's place
    logits = (bias[:, None] - 40).expand(length, length).clone()
    logits.fill_diagonal_(0.0)  # holds all of the denominator: log Z_i = 1e-16
    found = split(made_of(logits.expand(4, 1, -1, -1)))
    expected = float(bias[BAND[0] : BAND[1] + 1].var(correction=0))
    total, from_logits, mask, denominator, _ = found["log_form"][:, 0, 0].tolist()
    assert (total, from_logits) == pytest.approx((expected, expected), rel=1e-9)
    assert (mask, denominator) == pytest.approx((0, 0), abs=1e-12)
    assert found["log_source"][:, 0, 0].tolist() == pytest.approx([0, expected, 0], abs=1e-9)
    both = float(found["weight_form"][0, 0, 0])
    assert both > 0
    assert found["weight_source"][:, 0, 0].tolist() == pytest.approx([0, both, 0], rel=1e-6, abs=1e-9 * both)


def test_a_constant_sink_is_the_masks():
    logits, level = torch.zeros(4, 1, 32, 32, dtype=torch.float64), 2.0
    logits[..., 0] = level
    found = split(made_of(logits), (9, 31))
    i = torch.arange(9, 32).double()
    expected = float((i + math.exp(level)).log().var(correction=0))  # 0.064 at 2: the number of other keys grows
    assert found["log_form"][0, 0, 0].item() == pytest.approx(expected, rel=1e-12)
    assert found["steady_source"][:, 0, 0].tolist() == pytest.approx([expected, 0, 0], rel=1e-12, abs=1e-15)
    assert abs(found["sink_varying"][0, 0, 0]) < 1e-30
    constant = float(((i + math.exp(level)).log() - (i + 1).log()).var(correction=0))
    assert found["sink_constant"][0, 0, 0].item() == pytest.approx(constant, rel=1e-9)
    whole = found["log_source"][:, 0, 0]
    assert whole.sum().item() == pytest.approx(expected, rel=1e-9)
    assert whole[1].abs() > 1e-3


def test_a_sink_whose_logit_grows_is_residual_by_its_growth_alone():
    logits, i = torch.zeros(4, 1, 32, 32, dtype=torch.float64), torch.arange(32).double()
    logits[..., 0] = 1 + i / 8
    found = split(made_of(logits), (9, 31))
    i, own = i[9:], logits[0, 0, 9:, 0]
    plain, steady, whole = (i + 1).log(), (i + own.mean().exp()).log(), (i + own.exp()).log()
    shared = float(((steady - steady.mean()) * (whole - steady)).mean())  # of the constant's part and of what varies
    mask, added, varying = (float(x.var(correction=0)) for x in (plain, whole - plain, whole - steady))
    names = ("log_sink", "log_rest", "sink_varying", "steady_stream")
    assert [found[name][0, 0, 0].item() for name in names] == pytest.approx([added, 0, varying, varying], rel=1e-9)
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
    assert (abs(block.log_rest_by_block) < noise).all()
    if first == "none":  # behind BOS, position 0 is no token like the others, in block 0 as anywhere
        assert (abs(block.log_form_by_block.sel(part="denominator")) < noise).all()
        assert (abs(block.log_source_by_block.sel(source="residual")) < 2 * noise).all()
    deeper = ds.log_form.sel(part="denominator").isel(layer=slice(1, None)).max()
    assert float(deeper) > 3 * float(noise.max())  # so that the limits above mean something
    assert abs(ds.log_neither).max() < 1e-10


def test_heads_and_chunks_may_be_taken_apart(monkeypatch):
    model, tokens = load(families.model("mistral"), dtype="float64"), text(7, 20)
    whole = leakage(model, tokens, bands=[BAND], lags=LAGS, bootstrap=10, fresh=0)
    monkeypatch.setattr(FORMS, "NUMBERS_AT_ONCE", 1)
    monkeypatch.setattr(SAMPLES, "TOKENS_AT_ONCE", 40)
    for name, values in leakage(model, tokens, bands=[BAND], lags=LAGS, bootstrap=10, fresh=0).items():
        np.testing.assert_allclose(values, whole[name], rtol=1e-9, atol=1e-12)


def test_intervals_hold_the_truth_as_often_as_they_say():
    generator, bias = torch.Generator().manual_seed(5), torch.sin(torch.arange(20).double())
    truth, inside = float(bias[BAND[0] : BAND[1] + 1].var(correction=0)), []
    for seed in range(10):  # 100 draws each
        noise = torch.randn(24, 100, 20, 20, generator=generator, dtype=torch.float64)
        found = split_of(halves(made_of(bias[:, None] + noise)), [BAND], LAGS, resampling(24, 200, seed))["log_form"]
        low, high = np.percentile(found[1:, 1, :, 0], [2.5, 97.5], axis=0)
        inside.append(np.mean((low <= truth) & (truth <= high)))
    assert 0.92 <= np.mean(inside) <= 0.98  # of 1,000: the share itself is known to 0.7 %


@pytest.mark.slow
def test_resamples_carry_the_means_that_all_prompts_are_shifted_by():
    generator = torch.Generator().manual_seed(8)
    logits = 2 * torch.randn(40, 1, 20, 20, generator=generator, dtype=torch.float64)
    drawn = resampling(40, 300, 0)
    quick = split_of(halves(made_of(logits)), [BAND], LAGS, drawn)
    brute = {"log_form": [], "log_stream": [], "log_rest": [], "sink_constant": [], "steady_stream": []}
    for resample in drawn[1:]:  # the prompts drawn, measured from the beginning
        found = split(made_of(logits[torch.arange(40).repeat_interleave(resample.long())]))
        for name, values in brute.items():
            values.append(found[name][2 if name == "log_form" else 0, 0, 0])
    for name, values in brute.items():
        spread = float(torch.stack(values).std())
        entry = 2 if name == "log_form" else 0  # the mask's part
        assert float(quick[name][1:, entry, 0, 0].std()) == pytest.approx(spread, rel=0.3), name
    for half in halves(made_of(logits)):
        samples = sampled(half, lag_means_of(half), BAND, LAGS)
        assert (samples.moved_mask - samples.of_mask).mean(0).abs().max() < 1e-9


# ------------------------------------------------------------------------------------------------------------- options


def test_usual_bands_double():
    assert usual_bands(256, range(1, 9)) == ((9, 31), (32, 63), (64, 127), (128, 255))
    assert usual_bands(33, range(1, 9)) == ((9, 31),)  # a single query has no variance


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lags": (0, 1)}, "below 1"),
        ({"lags": range(1, 9)}, "window of 8"),
        ({"bands": [(3, 10)]}, "band 3-10"),
        ({"fresh": 3}, "fresh=3 prompts .* at least 4, or 0"),
    ],
)
def test_what_does_not_fit_is_refused(options, said):
    model = load(families.model("mistral"))
    options = {"lags": LAGS} | options
    tokens = text(options.pop("n", 6), options.pop("length", 20))
    with refused(said):
        leakage(model, tokens, **options)


# ------------------------------------------------------------------------------------------------------- what is shown


def constructed(stream: list[float], *, band: str = "9-31") -> xr.Dataset:
    """A result in which the mask leaks 0.1 and the stream so much by block, every end of an interval 0.05 away."""
    at = np.array(stream)
    sources = np.stack([np.full(len(at), 0.1), at, 0 * at])  # [source, layer]
    found: dict[str, tuple[tuple[str, ...], np.ndarray]] = {}

    def add(name: str, dims: tuple[str, ...], values: np.ndarray) -> None:
        levels = {f"{name}_by_block": ((*dims, "layer"), values), f"{name}_of_model": (dims, values.mean(-1))}
        for level, (of, x) in levels.items():
            for end, by in (("", 0.0), ("_low", -0.05), ("_high", 0.05)):
                found[f"{level}{end}"] = ((*of, "band"), (x + by)[..., None])

    parts = np.stack([sources.sum(0), at, sources[0], 0 * at, 0 * at])
    cells = 0.5 * parts[:4]  # no weight varies by more than 1/4
    for form, entry, values in (("log", "part", parts), ("weight", "cell", cells)):
        add(f"{form}_form", (entry,), values)
    for form in ("log", "steady", "weight"):
        add(f"{form}_source", ("source",), 0.5 * sources)
        add(f"{form}_share", ("source",), sources / sources.mean(1).sum())
        add(f"{form}_stream", (), at)
    for name in ("log_noise", "log_rest", "log_sink", "sink_constant", "sink_varying"):
        add(name, (), 0 * at)
    found["log_neither"] = (("layer", "band"), 0 * at[:, None])
    found["null_uniform"] = (("band",), np.array([0.117]))
    coords = {"part": list(PARTS), "source": list(SOURCES), "cell": list(CELLS), "band": [band]}
    return xr.Dataset(found, coords | {"layer": range(len(at)), "prompt": range(8)})


@pytest.mark.parametrize(
    ("stream", "shares", "says"),
    [
        ([0.0, 0.2], True, "by 0.2 [0.15, 0.25] nat^2 (uniform attention 0.117); 50% [45%, 55%] of it"),
        ([0.0, -0.18], False, "undecided whether"),
        ([0.06, 0.14], False, "undecided, since block 0"),
    ],
)
def test_shares_of_nothing_are_not_shown(stream, shares, says):
    ds = constructed(stream)
    assert says in MEASURE.answer({"ape": ds})[0]
    known = {(n.name, n.where): n.interval[:3] for n in numbers(MEASURE, ds)}
    value, component = 0.1 + np.mean(stream), np.mean(stream)
    assert known["total (nat^2)", "9-31"] == pytest.approx((value, value - 0.05, value + 0.05))
    assert known["null of uniform attention (nat^2)", "9-31"][0] == 0.117
    for name in ("residual component V(X) (nat^2)", "V(X), constant sink left in (nat^2)"):
        assert known[name, "9-31"] == pytest.approx((component, component - 0.05, component + 0.05))
    for name in ("mask and constant sink", "the residual stream", "the mask, constant sink left in"):
        share = known.get((f"share of {name}", "9-31"))
        assert (share is None) if not shares else share == pytest.approx((0.5, 0.45, 0.55))


def test_a_null_check_that_fails_is_named_unless_position_0_accounts_for_it():
    sound, noisy = constructed([0.04, 0.2]), constructed([0.06, 0.2], band="128-255")
    both = xr.concat([sound, noisy], "band", data_vars="minimal")
    checks = next(table for table in MEASURE.tables({"ape": both}) if "Null checks" in table.title)
    assert [row[1:5:3] for row in checks.rows] == [["9-31", "yes"], ["128-255", "NO: take more prompts"]]
    assert [row[2] for row in checks.rows] == ["0.04 [-0.01, 0.09]", "0.06 [0.01, 0.11]"]
    assert [resolved(both, "log", band) for band in both.band.values] == [True, False]
    for end, value in (("", 0.05), ("_low", 0.02), ("_high", 0.08)):
        noisy[f"log_sink_by_block{end}"][:] = value
    assert resolved(noisy, "log", "128-255")


def test_a_weight_form_that_no_weight_can_have_is_left_out():
    """A number in [0, 1] has a variance of at most 1/4. Qwen2.5's key biases make logits of hundreds beside a held log Z."""
    qwen = probes.load_result("reports/llm/leakage/leakage-qwen2.5-coder-0.5b-instruct-q4_k_m.nc")
    cells = np.abs(qwen["weight_form_by_block"].isel(band=0))
    assert float(cells.sel(cell=["both", "mask"]).max()) < BOUND  # where weights are normalized
    beyond = [int(layer) for layer in qwen["layer"] if float(cells.sel(layer=layer).max()) > BOUND]
    assert {0, 1, 4, 8} <= set(beyond) <= set(np.flatnonzero(overflow(qwen).isel(band=0)).tolist())
    assert not resolved(qwen, "weight", "9-31")
    assert not any("e+" in cell for table in MEASURE.tables({"qwen": qwen}) for row in table.rows for cell in row)


def test_the_chart_follows_most_blocks():
    leaks, _, parts = MEASURE.chart({"ape": constructed([0.0, 0.2, 0.1, 0.15, 0.2, 0.1, 900.0, 0.1])}).axes
    for cell in (leaks, parts):
        assert 0.2 < cell.get_ylim()[1] < 1
    ds = constructed([0.0, 0.2, 0.1])
    leaks, shares, _ = MEASURE.chart({"ape": ds}).axes
    total = [line.get_ydata() for line in leaks.lines if line.get_marker() == "o"]
    np.testing.assert_allclose(total, [ds["log_form_by_block"][0, :, 0], ds["steady_stream_by_block"][:, 0]])
    drawn = [float(x) for line in shares.lines if line.get_marker() == "o" for x in line.get_xdata()]
    np.testing.assert_allclose(drawn, ds["steady_share_of_model"][:2, 0])


def test_the_command_measures_and_shows_what_the_library_does(monkeypatch, capsys, tmp_path):
    words = f"leakage tiny-llama --prompts 6 --length 40 --bands 9-31 --lags 1,2 --bootstrap 20 --out {tmp_path}"
    assert call(monkeypatch, *words.split(), "--device", "cpu") == 0
    ds = probes.load_result(tmp_path / "leakage.nc")
    model = probes.load("tiny-llama")
    drawn = probes.draw(model, n=6, length=40)
    given = {"bands": [(9, 31)], "lags": (1, 2), "bootstrap": 20, "documents": drawn.documents}
    own = probes.leakage(model, drawn.tokens, **given)
    for name in own.data_vars:
        np.testing.assert_array_equal(ds[name], own[name])
    (total, *_) = numbers(MEASURE, ds)
    expected = [own[f"log_form_of_model{end}"].values[0, 0] for end in ("", "_low", "_high")]
    assert list(total.interval[:3]) == pytest.approx(expected)
    assert total.text in capsys.readouterr().out
    assert total.text in (tmp_path / "leakage.md").read_text()
