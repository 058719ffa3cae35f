"""The page: charts hold the results' numbers, every text is escaped, nothing is fetched, what is missing is said."""

from __future__ import annotations

import base64
import json
import math
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pages
import pytest
import xarray as xr
from markupsafe import Markup
from PIL import Image

from probes.cli import main as cli
from probes.errors import InputError
from probes.figures.palette import CYCLE, model_colors
from probes.figures.series import SINK
from probes.figures.style import facts
from probes.measures.agreement import averaged
from probes.measures.leakage import resolved
from probes.measures.matched import samples
from probes.report import build, cards, charts, formulas, heads, plotting, toy_charts
from probes.report.heads import heads_data
from probes.report.measuring import QUICK_PROMPTS, measure
from probes.report.sections import Section, choice, sections
from probes.results.collected import Collected, collect
from probes.results.curves import band, smooth_between
from probes.results.dataset import drawn_from, load, save
from probes.results.profiles import mean_profiles
from probes.studies.reports import sinks_report


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pages.shared(tmp_path_factory) / "models"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pages.shared(tmp_path_factory) / "report"


@pytest.fixture(scope="module")
def collected(root: Path) -> Collected:
    return collect(root)


@pytest.fixture(scope="module")
def html(collected: Collected, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("page")
    picture = out / "first.png"
    Image.new("RGB", (40, 30), "#0072B2").save(picture)
    said = ["One <em>sentence</em>.", "Another."]
    path = build(
        collected, pages.claims(), out, command="headwater report", picture=picture, sentences=said, remarks=["A <b>."]
    )
    assert path == out / "index.html"
    return path.read_text(encoding="utf-8")


def trace(figure: Any, **meta: Any) -> Any:
    """The one trace with these values that has a name (bands have none)."""
    (found,) = [
        one
        for one in plotting.traces(figure)
        if one.name and all((one.meta or {}).get(key) == value for key, value in meta.items())
    ]
    return found


def numbers(values: Any) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values])


# --------------------------------------------------------------------------------------------------------- numbers


def test_numbers_keep_four_digits_and_none_stands_for_what_json_cannot_say():
    assert plotting.rounded([1.23456, -1234567.0, 0.0]) == [1.235, -1235000.0, 0.0]
    assert plotting.rounded(np.array([math.nan, math.inf, -math.inf])) == [None, None, None]
    assert plotting.rounded(np.float32(0.1)) == [0.1]


def test_long_curves_keep_their_ends():
    assert plotting.positions(300).tolist() == list(range(300))
    at = plotting.positions(5000)
    assert len(at) <= plotting.POINTS
    assert at[:64].tolist() == list(range(64))
    assert at[-64:].tolist() == list(range(4936, 5000))
    assert np.all(np.diff(at) > 0)
    assert np.diff(at).max() < 20


def test_models_have_the_colours_of_the_other_figures():
    names = [f"m{n}" for n in range(9)]
    assert list(model_colors(names).values()) == [*CYCLE, CYCLE[0], CYCLE[1]]


# ---------------------------------------------------------------------------------------------------------- charts


def test_sensitivity_is_the_result_s(collected):
    results = collected["jacobian"]
    figure = charts.sensitivity(results, collected["scalar"])
    for name, ds in results.items():
        runs = mean_profiles(ds)
        fresh = band([run.mean for run in runs["init"]])
        each = trace(figure, model=name, condition="init", curve=charts.MEASURED, detail=charts.EACH)
        np.testing.assert_allclose(numbers(each.y), fresh.centre, rtol=1e-3)
        np.testing.assert_allclose([float(low) for low, _ in each.customdata], fresh.low, rtol=1e-3)
        assert list(each.x) == list(range(pages.LENGTH))
        smoothed = trace(figure, model=name, condition="init", curve=charts.MEASURED, detail=charts.SMOOTHED)
        np.testing.assert_allclose(numbers(smoothed.y), smooth_between(fresh.centre), rtol=1e-3)
        kernel = trace(figure, model=name, condition="init", curve=charts.called("score_path"))
        predicted = band([run.mean for run in mean_profiles(ds, "theory_score_path")["init"]]).centre
        np.testing.assert_allclose(numbers(kernel.y), predicted, rtol=1e-3)
        surrogate = trace(figure, model=name, curve=charts.SCALAR)
        scalar = mean_profiles(collected["scalar"][name])["pretrained"][0].mean
        np.testing.assert_allclose(numbers(surrogate.y), scalar, rtol=1e-3)
        assert each.line.color == model_colors(results)[name]
        assert each.meta["last"] == pages.LENGTH - 1


def test_positions_beyond_a_window_s_reach_are_zero_and_have_no_band(collected):
    ds = collected["jacobian"]["ape"].copy(deep=True)
    ds["sensitivity"][..., :5] = ds["elasticity"][..., :5] = 0.0
    figure = charts.sensitivity({"w": ds})
    each = trace(figure, condition="init", curve=charts.MEASURED, detail=charts.EACH)
    assert list(each.y[:5]) == [0.0] * 5
    bands = [one for one in plotting.traces(figure) if one.name is None and one.meta.get("detail") == charts.EACH]
    assert bands
    assert all(min(one.x) == 5 and min(one.y) > 0 for one in bands)


def test_theories_stand_beside_what_they_predict(collected):
    figure = charts.theories(collected["theory"])
    shown = {one.meta["curve"] for one in plotting.traces(figure)}
    assert {charts.MEASURED, "second-moment kernel", "kernel, uniform attention", charts.CESARO} <= shown
    ds = collected["theory"]["ape"]
    fitted = trace(figure, model="ape", condition="init", curve=charts.CESARO)
    np.testing.assert_allclose(numbers(fitted.y), ds["theory_cesaro"].sel(condition="init"), rtol=1e-3)


def test_map_shows_both_ends_and_leaves_out_what_has_none(collected):
    figure = charts.birth(collected["map"]["map"])
    line = trace(figure, end="primacy", places="8 blocks")
    assert list(line.x) == [0.1, 0.5, 1.0]
    np.testing.assert_allclose(line.y, [4, 2, 1], rtol=1e-3)
    assert list(trace(figure, end="primacy", places="usual models").text) == ["Some-7B"]
    assert not [one for one in plotting.traces(figure) if one.meta == {"end": "primacy", "places": "other changes"}]
    np.testing.assert_allclose(trace(figure, end="recency", places="other changes").y, [3], rtol=1e-3)


def test_keys_and_heads_are_the_result_s(collected):
    ds = collected["sinks"]["ape"]
    figure = charts.keys(collected["sinks"])
    alpha = [
        one
        for one in plotting.traces(figure)
        if one.meta["quantity"] == charts.QUANTITIES["alpha"] and one.name == "ape"
    ]
    np.testing.assert_allclose(alpha[0].y, ds["alpha"].mean(["prompt", "layer", "head"]), rtol=1e-3)
    shade = trace(charts.heads(collected["sinks"]), model="ape", metric=charts.METRICS["reads"])
    np.testing.assert_allclose(np.array(shade.z, dtype=float), ds["reads"], rtol=1e-3)
    assert len(shade.y) == ds.sizes["layer"]


def test_a_head_s_numbers_and_pattern_come_back(collected):
    ds = collected["sinks"]["ape"]
    found = heads.pattern_bytes(ds)
    assert len(found) == ds.sizes["picture"]
    (layer, head), values = next(iter(found.items()))
    assert (layer, head) == (int(ds["picture_layer"][0]), int(ds["picture_head"][0]))
    np.testing.assert_allclose((values / 255.0) ** 2, ds["pattern"].values[0], atol=0.005)
    rows = dict(heads.head_numbers(ds)[layer, head])
    value, low, high = (float(ds[f"attends{end}"][layer, head]) for end in ("", "_low", "_high"))
    assert rows[heads.NAMES["attends"]] == f"{value:.3f} [{low:.3g}, {high:.3g}]"
    chosen = [str(rule) for rule in ds["rule"].values if int(ds["selected"].sel(rule=rule)[layer, head])]
    assert rows["selected by the rules"] == (", ".join(chosen) or "none")
    assert heads.pattern_bytes(ds.drop_vars("pattern")) == {}
    without = heads.head_numbers(ds.drop_vars(["reacts", "reacts_among_others"]))
    assert heads.NAMES["reacts"] not in dict(without[layer, head])


def test_steps_stand_in_their_order(collected):
    ds = collected["steps"]["ape"]
    course = charts.steps({"m@step1000": ds, "m": ds, "m@step0": ds, "alone": ds, "m@step300": ds})
    assert [label for label, _ in course["m"]] == ["0", "300", "1000", "final"]
    assert list(course) == ["m"]
    figure = charts.training(collected["steps"])
    alpha = [
        one
        for one in plotting.traces(figure)
        if one.name == "ape" and one.meta["quantity"] == charts.QUANTITIES["alpha"]
    ]
    assert list(alpha[0].x) == ["0", "final"]
    assert alpha[0].y[0] == pytest.approx(alpha[0].y[1] / 2, rel=1e-3)


def test_trajectory_is_the_result_s(collected):
    ds = collected["trajectory"]["ape"]
    norm = trace(charts.norms(collected["trajectory"]), model="ape", first="BOS at position 0", where="position 0")
    np.testing.assert_allclose(norm.y, ds["norm_first"].sel(first="bos"), rtol=1e-3)
    figure = charts.cosines(collected["trajectory"])
    cosine = trace(figure, model="ape", place="position 0")
    np.testing.assert_allclose(numbers(cosine.y), ds["cosine"].sel(place="position 0"), rtol=1e-3, atol=1e-6)


def test_shares_are_shown_where_they_mean_something(collected):
    ds = collected["leakage"]["ape"]
    name = str(ds["band"].values[0])
    certain, noise = ds.copy(deep=True), ds.copy(deep=True)
    for form, at in (("log", {"part": "total"}), ("weight", {"cell": "both"}), ("terms", {"cell": "both"})):
        for one, ends in ((certain, (1.0, 0.5, 1.5)), (noise, (1.0, -0.5, 1.5))):
            for end, value in zip(("", "_low", "_high"), ends, strict=True):
                one[f"{form}_form_of_model{end}"].loc[{**at, "band": name}] = value
    for one in (certain, noise):
        for form, value in (("steady", 0.75), ("log", 1.25)):
            one[f"{form}_share_of_model"].loc[{"source": "mask", "band": name}] = value
        one["log_stream_by_block_low"][0] = -1.0  # the null check is passed
        one["log_stream_by_block_high"][0] = 1.0
    assert resolved(certain, "log", name)
    figure = charts.sources({"certain": certain, "noise": noise})
    for form, value in (("log form", 0.75), ("log form, the constant sink left in", 1.25)):
        mask = trace(figure, form=form, band=name, source="mask")
        assert list(mask.x) == ["certain", "noise"]
        assert list(mask.y) == [value, None]
    old = charts.sources({"old": certain.drop_vars([name for name in certain if "steady" in str(name)])})
    assert plotting.traces(old)[0].meta["form"] == "log form, the constant sink left in"
    line = trace(charts.depth({"ape": ds}), part="logits", band=name)
    np.testing.assert_allclose(line.y, ds["log_form_by_block"].sel(part="logits", band=name), rtol=1e-3)
    nulls = [one for one in plotting.traces(charts.depth({"ape": ds})) if one.name.startswith("ape, ")]
    assert {one.name: one.y[0] for one in nulls if one.meta["band"] == name} == {
        f"ape, {style.label}": pytest.approx(float(ds[null].sel(band=name)), rel=1e-3)
        for null, style in charts.NULLS.items()
    }


def test_removed_shares_without_an_end_are_not_drawn(collected):
    ds = collected["bos-swap"]["ape"].copy(deep=True)
    assert list(charts.by_replacement({"ape": ds})) == ["mean", "zero", "random"]
    for end, value in (("", 0.8), ("_low", 0.6), ("_high", 0.9)):
        for component in ("", "_steady"):
            ds[f"removed{component}_of_model{end}"][0] = value - (component == "_steady") / 2
    ds["removed_of_model_high"][1] = math.inf
    figure = charts.removed({"ape": ds})
    assert trace(figure, replacement="mean", sink="taken out").y[0] == 0.3
    bar = trace(figure, replacement="mean", sink="left in")
    assert bar.y[0] == 0.8
    assert bar.error_y.array[0] == pytest.approx(0.1)
    assert bar.error_y.arrayminus[0] == pytest.approx(0.2)
    assert trace(figure, replacement="zero", sink="left in").y[0] is None
    loss = trace(charts.losses({"ape": ds}), replacement="zero")
    change = ds["loss_change"].sel(replacement="zero").values
    np.testing.assert_allclose(loss.y, change[np.isfinite(change)], rtol=1e-3)
    for component, sink in SINK.items():
        after = trace(charts.components({"ape": ds}), replacement="zero", when="after", sink=sink)
        expected = ds[f"residual{component}_after_of_model"].sel(replacement="zero")
        np.testing.assert_allclose(numbers(after.y), expected, rtol=1e-3)


def test_a_single_replacement_needs_no_dimension(collected):
    ds = collected["bos-swap"]["ape"].sel(replacement="zero", drop=True).assign_attrs(replacement="zero")
    assert list(charts.by_replacement({"ape": ds})) == ["zero"]


def test_toys_are_the_results(collected):
    ds = collected["toy"]["retrieval"]
    figure = toy_charts.retrieval(ds)
    line = trace(figure, layers="1 layer", variant="residual", width="width 10")
    loss = ds["loss"].sel(layers=1, residual=1, feed_forward=0, width=10)
    np.testing.assert_allclose(line.y, loss.median("seed"), rtol=1e-3)
    assert not [one for one in plotting.traces(figure) if one.name == "width 10" and one.meta["layers"] == "2 layers"]
    gap = collected["toy"]["position-bias"]
    bar = trace(toy_charts.gaps(gap), training="last", positional="rope", setting="depth 4")
    one = gap["gap"].sel(depth=4, training="last", positional="rope")
    np.testing.assert_allclose(bar.y, one.mean("seed"), rtol=1e-3)
    np.testing.assert_allclose(np.add(bar.y, bar.error_y.array), one.max("seed"), rtol=1e-3, atol=1e-3)


def test_toys_stand_beside_their_model(collected):
    ds = collected["match"]["ape"]
    figure = toy_charts.beside(collected["match"])
    uniform = ds["toy_uniform"].sel(variant="no residual").values
    toy = trace(figure, quantity="mean weight α", variant="no residual", curve="retrieval toy")
    alpha = samples(ds, "alpha", ("no residual", "retrieval"), "")
    assert alpha is not None
    np.testing.assert_allclose(toy.y, averaged(alpha) / uniform, rtol=1e-3)
    np.testing.assert_allclose(toy.x, np.linspace(0, 1, 12))
    own = trace(figure, quantity="sensitivity", curve="model, pretrained")
    known = samples(ds, "sensitivity", ("model", "pretrained"), "pretrained")
    assert known is not None
    np.testing.assert_allclose(np.divide(own.y, own.y[0]), averaged(known) / averaged(known)[0], rtol=2e-3)
    assert len(own.x) == 24
    assert "second-moment kernel, init" in toy_charts.of_theory(figure)
    bars = trace(toy_charts.agreements_of(collected["match"]), state="pretrained")
    errors = ds["agreement_error"].sel(curve="sensitivity", state="pretrained")
    for other, error in zip(bars.y, bars.x, strict=True):
        assert error == pytest.approx(float(errors.sel(other=other)), rel=1e-3)
    assert {"toy init", "retrieval toy", "no residual, retrieval toy", "N^L, best alpha"} <= set(bars.y)


def test_choices_are_what_traces_are_of(collected):
    figure = charts.sensitivity(collected["jacobian"])
    several = choice(figure, "condition", "Weights", several=True)
    assert [(one.value, one.shown) for one in several.options] == [("pretrained", True), ("init", True)]
    one = choice(figure, "condition", "Weights", shown=("init",))
    assert [option.value for option in one.options if option.shown] == ["init"]
    nothing = choice(figure, "condition", "Weights", shown=("elsewhere",))
    assert [option.shown for option in nothing.options] == [True, False]


# ------------------------------------------------------------------------------------------------------------ page


def test_page_needs_nothing_beside_it(html):
    before = html[: html.index('<script type="application/json" id="charts">')]
    assert len(html.encode()) < 8_000_000
    assert not re.search(r"<(script|img|iframe|source|video)[^>]+src=[\"'](?!data:)", before)
    assert [link for link in re.findall(r"<link [^>]+>", before) if "data:," not in link] == []
    assert "@import" not in before
    assert not re.search(r"url\((?!#)", before)
    assert set(re.findall(r'href="(?!#|data:)([^"]+)"', before)) == {
        address for _, address in __import__("probes.report.page", fromlist=["SOURCES"]).SOURCES.values()
    }


@pytest.mark.slow
def test_every_section_has_its_charts_and_tables(html, collected):
    for name in ("models", "claims", *(one.name for one in sections(collected)), "methods", "provenance"):
        assert f'<section id="{name}"' in html
        assert f'<a href="#{name}"' in html
    data = json.loads(html[html.index('id="charts">') + 12 :].split("</script>")[0])
    names = {chart.name for one in sections(collected) for chart in one.charts}
    assert {"sensitivity", "theories", "birth-map", "keys", "heads", "training", "norms", "cosines"} <= names
    assert {"sources", "depth", "removed", "components", "losses", "retrieval", "gaps-toy"} <= names
    assert set(data) == names
    assert all(one["plot"]["data"] for one in data.values())
    assert "NaN" not in html[html.index('id="charts">') :].split("</script>")[0]
    pattern = next(iter(data["heads"]["heads"]["ape"]["patterns"].values()))
    assert len(base64.b64decode(pattern["bytes"])) == pattern["size"] ** 2


def test_names_are_text_and_never_markup(html):
    assert "alert(&#39;x&#39;)" in html
    assert "<script>alert" not in html
    assert "<b>everywhere" not in html
    assert "<em>sentence" not in html
    assert "&lt;b&gt;everywhere" in html


def test_claims_have_their_verdict_rule_and_command(html):
    rows = dict(re.findall(r'<tbody id="claim-([^"]+)"(.*?)</tbody>', html, re.DOTALL))
    assert list(rows) == ["b-second", "a-first", "c-third"]
    assert 'data-verdict="0"' in rows["a-first"]
    assert "does not hold" in rows["b-second"]
    assert 'data-source="[Gu]"' in rows["b-second"]
    assert all("the number is above 0.3" in row for row in rows.values())
    assert "To measure it" in rows["c-third"]
    assert "Measured by" in rows["a-first"]
    assert re.search(r"<b>1</b> holds.*<b>1</b> does not hold.*<b>1</b> not measured", html, re.DOTALL)


@pytest.mark.slow
def test_provenance_says_what_made_every_result(collected, html):
    found = cards.provenance(collected)
    assert len(found) == sum(len(collected[kind]) for kind in collected)
    one = next(made for made in found if (made.kind, made.name) == ("sinks", "ape"))
    ds = collected["sinks"]["ape"]
    assert one.weights == [ds.attrs["weights"]]
    assert one.tokens == ds.attrs["tokens_sha256"]
    assert one.file == "sinks/sinks-ape.nc"
    assert ds.attrs["torch"] in one.versions
    assert all(part in one.device for part in ("transformers", "float32", "cpu"))
    assert one.tokens in html


def test_a_model_s_card_says_what_its_config_does(collected):
    one = next(card for card in cards.cards(collected) if card.name == "ape")
    facts = dict(one.facts)
    assert facts["family"] == "llama"
    assert (facts["blocks"], facts["width"], facts["heads"]) == ("3", "64", "4, keys and values of 2")
    assert facts["position 0 holds"].startswith("BOS, id")
    assert one.weights == [collected["sinks"]["ape"].attrs["weights"]]
    assert set(one.kinds) >= set(pages.KINDS)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}, "RoPE, base 10,000"),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0}},
            "RoPE, base 500,000, llama3 scaling by 8",
        ),
        ({"model_type": "gpt2"}, "learned"),
        ({"model_type": "bloom"}, "ALiBi"),
        ({"model_type": "unheard-of"}, ""),
    ],
)
def test_positional_encodings_in_words(config, says):
    assert cards.positional(config) == says


@pytest.mark.parametrize(
    ("cell", "number"),
    [
        ("0.3 [0.2, 0.4]", True),
        ("12%", True),
        ("-", True),
        ("1,024", True),
        ("1,530%", True),
        ("tiny", False),
        ("9-31", False),
    ],
)
def test_cells_that_are_numbers(cell, number):
    assert cards.is_number(cell) is number


def test_formulas_are_mathml():
    for method in formulas.METHODS:
        assert method.formulas
        for formula in method.formulas:
            assert formula.mathml.startswith("<math")
            assert "\\" not in formula.mathml
            assert "\\" not in formulas.mathematical(formula.says)
        assert "$" not in formulas.mathematical(method.remark)
    assert formulas.mathematical("a < b & $x_1$") == Markup("a &lt; b &amp; ") + formulas.mathematical("$x_1$")
    assert "<msub>" in formulas.mathematical("$x_1$")


def test_nothing_measured_says_which_commands_measure(tmp_path):
    empty = Collected(tmp_path)
    for one in sections(empty):
        assert isinstance(one, Section)
        assert not one.charts
        assert all(line.startswith("headwater ") for line in one.missing)
        assert one.missing
    html = build(empty, [], tmp_path, command="", picture=None, sentences=[]).read_text(encoding="utf-8")
    assert html.count("Not measured yet") == 2 + sum(len(one.missing) for one in sections(empty))
    assert f"headwater leakage MODEL --out {tmp_path}/leakage" in html
    assert "No claims were judged" in html


FILLED = {
    "scalar": "jacobian",
    "steps": "sinks",
    "map": "theory",
    "toy": "toys",
}  # sections by kinds that have others' names


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*pages.KINDS, "steps", "map", "match", "toy"])
def test_any_kind_may_be_missing(collected, kind):
    results = {name: results for name, results in collected.results.items() if name != kind}
    less = sections(Collected(collected.root, results, collected.files))
    assert [one.name for one in less if one.missing] == [FILLED.get(kind, kind)]


def test_commands_name_models_as_they_were_given(collected, checkpoints, tmp_path):
    """A folder's last part is what its results are called, and nothing that a command finds again."""
    results = {"sinks": {"ape": collected["sinks"]["ape"]}}
    (leakage,) = (one for one in sections(Collected(tmp_path / "a b", results)) if one.name == "leakage")
    assert leakage.missing == (f"headwater leakage {checkpoints / 'ape'} --out '{tmp_path}/a b/leakage'",)
    assert heads_data(results["sinks"])["ape"]["more"].startswith(f"headwater sinks {checkpoints / 'ape'} --pictures ")
    older = collected["sinks"]["ape"].copy()
    del older.attrs["loaded_from"]
    assert heads_data({"ape": older})["ape"]["more"].startswith("headwater sinks ape --pictures ")


def test_one_kind_alone_makes_a_page(collected, tmp_path):
    alone = Collected(collected.root, {"sinks": {"ape": collected["sinks"]["ape"]}})
    html = build(alone, [], tmp_path, command="c", picture=None, sentences=[]).read_text(encoding="utf-8")
    assert 'data-chart="heads"' in html


@pytest.mark.slow
def test_pictures_are_embedded_or_refused(collected, tmp_path):
    given: dict[str, Any] = {"command": "c", "sentences": []}
    svg = tmp_path / "p.svg"
    svg.write_text("<svg xmlns='http://www.w3.org/2000/svg'/>", encoding="utf-8")
    html = build(collected, [], tmp_path, picture=svg, **given).read_text(encoding="utf-8")
    assert "data:image/svg+xml;base64," in html
    with pytest.raises(InputError, match=r"'elsewhere\.png' cannot be read .*draw it first"):
        build(collected, [], tmp_path, picture="elsewhere.png", **given)
    with pytest.raises(InputError, match=r"'p\.gif' is no PNG or SVG"):
        build(collected, [], tmp_path, picture="p.gif", **given)


@pytest.mark.slow
def test_figures_of_toys_are_embedded_while_there_is_room(collected, root, tmp_path, monkeypatch):
    there = tmp_path / "root"
    shutil.copytree(root, there)
    shutil.copy(there / "toy" / "retrieval.nc", there / "toy" / "sinks.nc")
    Image.new("RGB", (60, 60), "#D55E00").save(there / "toy" / "sinks.png")
    found, given = collect(there), {"command": "c", "picture": None, "sentences": []}
    found = Collected(there, {"toy": dict(found["toy"])}, found.files)
    assert "figure of headwater toy sinks" in build(found, [], tmp_path, **given).read_text(encoding="utf-8")
    monkeypatch.setattr("probes.report.page.PICTURES", 10)
    html = build(found, [], tmp_path, **given).read_text(encoding="utf-8")
    assert "<code>toy/sinks.png</code>" in html
    assert "figure of headwater toy sinks" not in html


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_refused(collected, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        build(collected, [], tmp_path / "file", command="c", picture=None, sentences=[])


# ------------------------------------------------------------------------------------------------------- measuring


@pytest.fixture
def given(checkpoints: Path) -> dict[str, Any]:
    return {"count": pages.PROMPTS, "length": pages.LENGTH, "source": pages.source(checkpoints)}


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without figures and tables, which take longer than measuring where there is little to measure."""
    monkeypatch.setattr("probes.report.measuring.draw", lambda out, kinds: None)
    pages.undraw(monkeypatch)


def stamps(root: Path) -> dict[str, int]:
    return {str(file.relative_to(root)): file.stat().st_mtime_ns for file in root.rglob("*.nc")}


def test_all_kinds_are_written_with_figures_and_tables(root):
    assert set(pages.KINDS) <= set(collect(root))
    for kind in pages.KINDS:
        stem = "jacobian" if kind == "scalar" else kind
        assert (root / kind / f"{stem}-ape.nc").is_file()
        assert (root / kind / f"{stem}.png").is_file()
        assert (root / kind / f"{stem}.md").is_file() == (stem != "jacobian")
    assert not (root / ".measuring").exists()


def test_what_is_there_with_the_same_options_is_kept(root, checkpoints, given, tmp_path):
    out, said = tmp_path / "report", []
    shutil.copytree(root, out)
    before = stamps(out)
    assert measure([str(checkpoints / "ape")], out, chosen=pages.small(), told=said.append, **given) == []
    assert stamps(out) == before
    (line,) = said
    assert all(kind in line for kind in pages.KINDS)
    assert "--fresh" in line


@pytest.mark.slow
def test_figures_are_drawn_where_something_is_new_or_they_are_missing(root, checkpoints, given, tmp_path):
    out = tmp_path / "report"
    shutil.copytree(root, out)
    (out / "trajectory" / "trajectory.png").unlink()
    (out / "scalar" / "jacobian-ape.nc").unlink()
    drawn = {kind: out / kind / f"{stem}.png" for kind, stem in (("scalar", "jacobian"), ("sinks", "sinks"))}
    before = {kind: file.stat().st_mtime_ns for kind, file in drawn.items()}
    chosen = pages.small("trajectory", "sinks", "scalar")
    measure([str(checkpoints / "ape")], out, chosen=chosen, **given)
    assert (out / "trajectory" / "trajectory.png").is_file()
    assert drawn["scalar"].stat().st_mtime_ns > before["scalar"]
    assert drawn["sinks"].stat().st_mtime_ns == before["sinks"]


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("change", "again"),
    [({"count": 5}, True), ({"length": 20}, True), ({"fresh": True}, True), ({}, False)],
)
def test_other_options_are_measured(root, checkpoints, given, tmp_path, change, again):
    out = tmp_path / "report"
    shutil.copytree(root, out)
    measure([str(checkpoints / "ape")], out, chosen=pages.small("trajectory"), **given | change)
    moved = {name for name, stamp in stamps(out).items() if stamp != stamps(root)[name]}
    assert ("trajectory/trajectory-ape.nc" in moved) is again
    assert sum(name.startswith("sinks") for name in moved) == sum(
        stamp != stamps(root)[name] for name, stamp in stamps(out).items() if name.startswith("sinks")
    )


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_fresh_weights_by_another_rule_are_measured_anew_and_those_of_older_versions_kept(
    root, checkpoints, given, tmp_path
):
    out, ape = tmp_path / "report", str(checkpoints / "ape")
    shutil.copytree(root, out)
    file = out / "jacobian" / "jacobian-ape.nc"
    older = load(file).drop_vars("initialization")  # which did not say
    save(older, file)
    before = stamps(out)
    measure([ape], out, chosen=pages.small("jacobian", "scalar"), **given)
    assert stamps(out) == before
    ruled = given | {"source": replace(given["source"], initialization="1/24")}
    measure([ape], out, chosen=pages.small("jacobian", "scalar"), **ruled)
    assert drawn_from({"ape": load(file)}) == "uniform 1/24"
    changed = {name for name, stamp in stamps(out).items() if stamp != before[name]}
    assert changed == {"jacobian/jacobian-ape.nc"}  # no fresh weights in the other
    after = stamps(out)
    measure([ape], out, chosen=pages.small("jacobian"), **ruled)
    assert stamps(out) == after
    measure([ape], out, chosen=pages.small("jacobian"), **given)
    assert drawn_from({"ape": load(file)}).startswith("initializer_range 0.5")


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    "edit",
    [
        lambda ds: ds.assign_attrs(headwater="0.0.0"),
        lambda ds: ds.assign_attrs(weights="of another model"),
        lambda ds: ds.assign_attrs(options=json.dumps({**json.loads(ds.attrs["options"]), "tau": 0.1})),
        lambda ds: ds.assign_attrs(tokens_sha256="of other text"),
    ],
)
def test_a_result_of_another_making_is_measured_anew(root, checkpoints, given, tmp_path, edit):
    out = tmp_path / "report"
    file = out / "sinks" / "sinks.nc"  # as `headwater sinks` names that of a single model
    save(edit(load(root / "sinks" / "sinks-ape.nc")), file)
    measure([str(checkpoints / "ape")], out, chosen=pages.small("sinks"), **given)
    assert not file.exists()
    new, old = load(out / "sinks" / "sinks-ape.nc"), load(root / "sinks" / "sinks-ape.nc")
    assert new.attrs["weights"] == old.attrs["weights"]
    xr.testing.assert_allclose(new["attends"], old["attends"])


@pytest.mark.slow
def test_models_of_earlier_reports_stay(checkpoints, given, tmp_path):
    for name in ("ape", "bee"):
        measure([str(checkpoints / name)], tmp_path, chosen=pages.small("sinks"), **given)
    assert set(collect(tmp_path)["sinks"]) == {"ape", "bee"}
    table = (tmp_path / "sinks" / "sinks.md").read_text(encoding="utf-8")
    assert "| ape |" in table
    assert "| bee |" in table


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_what_a_study_refuses_is_said_and_the_rest_is_measured(checkpoints, given, tmp_path):
    said: list[str] = []
    chosen = pages.small("sinks", "leakage")
    refused = measure([str(checkpoints / "ape")], tmp_path, chosen=chosen, told=said.append, **given | {"count": 2})
    (line,) = refused
    assert line.startswith("leakage was not measured on ape: ")
    assert said[0] == "ape: studies to come: sinks, leakage"
    assert [line for line in said[1:] if " above the model's " not in line] == refused
    assert set(collect(tmp_path)) == {"sinks"}
    with pytest.raises(InputError, match="nothing could be measured; the first reason: leakage"):
        measure([str(checkpoints / "ape")], tmp_path, chosen=pages.small("leakage"), **given | {"count": 2})


def test_bad_input_is_refused_before_anything_is_measured(checkpoints, given, tmp_path):
    with pytest.raises(InputError, match="nowhere"):
        measure([str(checkpoints / "ape"), "./nowhere"], tmp_path / "out", chosen=pages.small("sinks"), **given)
    assert not list(tmp_path.rglob("*.nc"))


@pytest.mark.usefixtures("undrawn")
def test_quick_results_say_so_and_serve_no_full_report_but_full_ones_serve_a_quick_one(checkpoints, given, tmp_path):
    one, file = str(checkpoints / "ape"), tmp_path / "trajectory" / "trajectory-ape.nc"
    given, chosen = given | {"count": None}, [replace(full, prompts=6) for full in pages.small("trajectory")]
    made: list[tuple[int, Any, int]] = []
    for quick in (True, True, False, True):
        measure([one], tmp_path, chosen=chosen, quick=quick, **given)
        ds = load(file)
        options = json.loads(ds.attrs["options"])
        made.append((ds.sizes["prompt"], ds.attrs.get("quick"), options["starts"]))
        made_at = file.stat().st_mtime_ns
        measure([one], tmp_path, chosen=chosen, quick=quick, **given)
        assert file.stat().st_mtime_ns == made_at
    assert made == [(QUICK_PROMPTS["trajectory"], 1, 8)] * 2 + [(6, None, 64)] * 2
    measure([one], tmp_path, chosen=chosen, quick=True, **given | {"count": 7})  # more than the full one has
    assert load(file).sizes["prompt"] == 7


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_what_a_quick_report_measured_is_kept_by_the_next(checkpoints, given, tmp_path):
    said: list[str] = []
    chosen, given = pages.small("jacobian", "bos-swap"), given | {"count": None}
    for _ in range(2):
        before = stamps(tmp_path)
        measure([str(checkpoints / "ape")], tmp_path, quick=True, chosen=chosen, told=said.append, **given)
    assert len(before) == 2
    assert stamps(tmp_path) == before
    assert said[-1].startswith("ape: kept jacobian, bos-swap")
    assert all(collect(tmp_path)[one.kind]["ape"].attrs["quick"] == 1 for one in chosen)


def test_a_quick_page_and_its_figures_say_so(collected):
    plain = {"ape": collected["sinks"]["ape"]}
    quick = {"ape": plain["ape"].assign_attrs(quick=1)}
    assert facts(quick) == ["QUICK measurement", *facts(plain)]
    assert cards.quick_remarks(Collected(collected.root, {"sinks": plain})) == []
    (said,) = cards.quick_remarks(Collected(collected.root, {"sinks": quick, "trajectory": plain}))
    assert "wide intervals: sinks of ape." in said
    assert sinks_report(quick).described == f"QUICK measurement, {sinks_report(plain).described}"


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_cheap_studies_come_first_and_each_is_heard_of_before_the_next_begins(checkpoints, given, tmp_path):
    found: list[list[str]] = []
    said: list[str] = []

    def between(refused: Any) -> None:
        found.append([kind for kind in collect(tmp_path) if kind in pages.KINDS])

    chosen = pages.small("scalar", "trajectory", "sinks")[::-1]
    both = [str(checkpoints / name) for name in ("ape", "bee")]
    measure(both, tmp_path, chosen=chosen, told=said.append, between=between, **given | {"count": 3})
    (line,) = (line for line in said if line.startswith("ape: studies to come: "))
    order = line.removeprefix("ape: studies to come: ").split(", ")
    assert sorted(order) == ["scalar", "sinks", "trajectory"]
    assert order[0] == "sinks"
    assert [set(kinds) for kinds in found] == [set(order[:count]) for count in (1, 2, 3)]  # none after the last of all


class Stop(Exception):
    """Pulls the plug."""


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_an_interrupted_report_goes_on(checkpoints, given, tmp_path):
    reached: list[str] = []

    def stopping(label: str, done: float, total: float) -> None:
        reached.append(label)
        if label == "jacobian: ape init 1":
            raise Stop

    one = str(checkpoints / "ape")
    with pytest.raises(Stop):
        measure([one], tmp_path, chosen=pages.small("jacobian"), advance=stopping, **given)
    assert collect(tmp_path)["jacobian"] == {}
    said: list[str] = []
    measure([one], tmp_path, chosen=pages.small("jacobian"), told=said.append, **given)
    assert any("going on with" in line and "2 of 3 are done" in line for line in said)
    assert set(collect(tmp_path)["jacobian"]) == {"ape"}
    assert not (tmp_path / ".measuring").exists()


# ----------------------------------------------------------------------------------------------------- command line


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of `headwater report ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["headwater", "report", *arguments])
    monkeypatch.setattr("probes.results.dataset._command", "")
    with pytest.raises(SystemExit) as raised:
        cli.main()
    assert isinstance(raised.value.code, int)
    return raised.value.code


def test_report_from_the_command_line(monkeypatch, capsys, checkpoints, root, tmp_path):
    out = tmp_path / "report"
    shutil.copytree(root, out, ignore=shutil.ignore_patterns("toy", "match", "map.nc", "*script*"))
    options = ["--prompts", str(pages.PROMPTS), "--length", str(pages.LENGTH), "--text", str(checkpoints / "text.txt")]
    monkeypatch.setattr("probes.report.measuring.studies", lambda seed=0: tuple(pages.small("sinks", "trajectory")))
    assert call(monkeypatch, str(checkpoints / "ape"), "--out", str(out), *options) == 0
    said = capsys.readouterr()
    assert "ape: kept trajectory, sinks" in said.err
    counts = [
        int(count) for count in re.findall(r"^(?:published|requests|our own).*: (\d+) statements", said.out, re.M)
    ]
    every = sum(counts)
    assert len(counts) > 3
    for name in ("index.html", "claims.md", "overview.png", "overview.svg"):
        assert str(out / name) in said.out
        assert (out / name).stat().st_size > 0
    html = (out / "index.html").read_text(encoding="utf-8")
    assert html.count('<tbody id="claim-') == every
    assert "--prompts 4" in html


def test_a_page_of_what_is_there_needs_no_model(monkeypatch, capsys, root, tmp_path):
    shutil.copytree(root / "sinks", tmp_path / "sinks", ignore=shutil.ignore_patterns("*script*"))
    assert call(monkeypatch, "--out", str(tmp_path)) == 0
    assert "overview.png" not in capsys.readouterr().out  # without profiles there is no such picture
    assert 'data-chart="heads"' in (tmp_path / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--out", "OUT/missing"], "is no folder"),
        (["--out", "OUT"], "holds no results to report; name a model"),
        (["./nowhere", "--out", "OUT"], "nowhere"),
        (["tiny-llama", "--length", "4", "--out", "OUT/new"], "length"),
    ],
)
def test_bad_input_to_report_is_one_line_and_exit_code_2(monkeypatch, capsys, tmp_path, arguments, says):
    assert call(monkeypatch, *(argument.replace("OUT", str(tmp_path)) for argument in arguments)) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("headwater: ")
    assert says in line
    assert not list(tmp_path.rglob("*.nc"))
