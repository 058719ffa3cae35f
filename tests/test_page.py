"""The page: charts hold the results' numbers, every text is escaped, nothing is fetched, what is missing is said."""

from __future__ import annotations

import base64
import json
import math
import re
import shutil
import sys
from collections.abc import Callable
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
from probes.measures.match_result import samples
from probes.report import build, cards, charts, formulas, heads, plotting, toy_charts
from probes.report.heads import heads_data
from probes.report.measuring import QUICK_PROMPTS, measure
from probes.report.page import SOURCES
from probes.report.sections import choice, sections
from probes.results.curves import band, smooth_between
from probes.results.dataset import drawn_from, load, save
from probes.results.folder import Collected, collect
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


def trace(figure: Any, name: str = "", **meta: Any) -> Any:
    """The one trace with these values that has this name, or any (bands have none)."""
    (found,) = [one for one in traced(figure, **meta) if one.name and name in ("", one.name)]
    return found


def traced(figure: Any, **meta: Any) -> list[Any]:
    """All traces with these values."""
    return [one for one in plotting.traces(figure) if meta.items() <= (one.meta or {}).items()]


def close(one: Any, expected: Any) -> None:
    """A trace has these heights, to the digits that the page keeps; None stands for NaN."""
    found = np.array([np.nan if value is None else value for value in one.y])
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)


# --------------------------------------------------------------------------------------------------------- numbers


def test_numbers_keep_four_digits_and_long_curves_their_ends():
    assert plotting.rounded([1.23456, -1234567.0, 0.0]) == [1.235, -1235000.0, 0.0]
    assert plotting.rounded(np.array([math.nan, math.inf, -math.inf])) == [None, None, None]  # JSON has no such numbers
    assert plotting.rounded(np.float32(0.1)) == [0.1]
    assert plotting.positions(300).tolist() == list(range(300))
    at = plotting.positions(5000)
    assert len(at) <= plotting.POINTS
    assert at[:64].tolist() == list(range(64))
    assert at[-64:].tolist() == list(range(4936, 5000))
    assert np.all(np.diff(at) > 0)
    assert np.diff(at).max() < 20


# ---------------------------------------------------------------------------------------------------------- charts


def test_sensitivity_is_the_result_s(collected):
    results = collected["jacobian"]
    figure = charts.sensitivity(results, collected["scalar"])
    assert list(model_colors([f"m{n}" for n in range(9)]).values()) == [*CYCLE, CYCLE[0], CYCLE[1]]
    for name, ds in results.items():
        fresh, predicted = (
            band([run.mean for run in mean_profiles(ds, variable)["init"]])
            for variable in ("elasticity", "theory_score_path")
        )
        each, smoothed = (
            trace(figure, model=name, condition="init", curve=charts.MEASURED, detail=detail)
            for detail in (charts.EACH, charts.SMOOTHED)
        )
        close(each, fresh.centre)
        close(smoothed, smooth_between(fresh.centre))
        np.testing.assert_allclose([float(low) for low, _ in each.customdata], fresh.low, rtol=1e-3)
        assert list(each.x) == list(range(pages.LENGTH))
        assert each.line.color == model_colors(results)[name]
        assert each.meta["last"] == pages.LENGTH - 1
        close(trace(figure, model=name, condition="init", curve=charts.called("score_path")), predicted.centre)
        scalar = mean_profiles(collected["scalar"][name])["pretrained"][0].mean
        close(trace(figure, model=name, curve=charts.SCALAR), scalar)


def test_positions_beyond_a_window_s_reach_are_zero_and_have_no_band(collected):
    ds = collected["jacobian"]["ape"].copy(deep=True)
    ds["sensitivity"][..., :5] = ds["elasticity"][..., :5] = 0.0
    figure = charts.sensitivity({"w": ds})
    each = trace(figure, condition="init", curve=charts.MEASURED, detail=charts.EACH)
    assert list(each.y[:5]) == [0.0] * 5
    bands = [one for one in traced(figure, detail=charts.EACH) if one.name is None]
    assert bands
    assert all(min(one.x) == 5 and min(one.y) > 0 for one in bands)


def test_lines_and_shades_are_the_results(collected):
    theory, sinks, trajectory = (collected[kind]["ape"] for kind in ("theory", "sinks", "trajectory"))
    figure = charts.theories(collected["theory"])
    shown = {one.meta["curve"] for one in plotting.traces(figure)}
    assert {charts.MEASURED, "second-moment kernel", "kernel, uniform attention", charts.CESARO} <= shown
    fitted = trace(figure, model="ape", condition="init", curve=charts.CESARO)
    close(fitted, theory["theory_cesaro"].sel(condition="init"))
    alpha = trace(charts.keys(collected["sinks"]), "ape", quantity=charts.QUANTITIES["alpha"])
    close(alpha, sinks["alpha"].mean(["prompt", "layer", "head"]))
    shade = trace(charts.heads(collected["sinks"]), model="ape", metric=charts.METRICS["reads"])
    np.testing.assert_allclose(np.array(shade.z, dtype=float), sinks["reads"], rtol=1e-3)
    assert len(shade.y) == sinks.sizes["layer"]
    norm = trace(charts.norms(collected["trajectory"]), model="ape", first="BOS at position 0", where="position 0")
    close(norm, trajectory["norm_first"].sel(first="bos"))
    cosine = trace(charts.cosines(collected["trajectory"]), model="ape", place="position 0")
    close(cosine, trajectory["cosine"].sel(place="position 0"))


def test_map_shows_both_ends_and_leaves_out_what_has_none(collected):
    figure = charts.birth(collected["map"]["map"])
    line = trace(figure, end="primacy", places="8 blocks")
    assert list(line.x) == [0.1, 0.5, 1.0]
    close(line, [4, 2, 1])
    assert list(trace(figure, end="primacy", places="usual models").text) == ["Some-7B"]
    assert not traced(figure, end="primacy", places="other changes")
    close(trace(figure, end="recency", places="other changes"), [3])


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
    alpha = trace(figure, "ape", quantity=charts.QUANTITIES["alpha"])
    assert list(alpha.x) == ["0", "final"]
    assert alpha.y[0] == pytest.approx(alpha.y[1] / 2, rel=1e-3)


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
    close(line, ds["log_form_by_block"].sel(part="logits", band=name))
    nulls = [one for one in traced(charts.depth({"ape": ds}), band=name) if one.name.startswith("ape, ")]
    assert {one.name: one.y[0] for one in nulls} == {
        f"ape, {style.label}": pytest.approx(float(ds[null].sel(band=name)), rel=1e-3)
        for null, style in charts.NULLS.items()
    }


def test_removed_shares_without_an_end_are_not_drawn(collected):
    ds = collected["bos-swap"]["ape"].copy(deep=True)
    assert list(charts.by_replacement({"ape": ds})) == ["mean", "zero", "random"]
    single = ds.sel(replacement="zero", drop=True).assign_attrs(replacement="zero")
    assert list(charts.by_replacement({"ape": single})) == ["zero"]
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
    change = ds["loss_change"].sel(replacement="zero").values
    close(trace(charts.losses({"ape": ds}), replacement="zero"), change[np.isfinite(change)])
    for component, sink in SINK.items():
        after = trace(charts.components({"ape": ds}), replacement="zero", when="after", sink=sink)
        close(after, ds[f"residual{component}_after_of_model"].sel(replacement="zero"))


def test_toys_are_the_results(collected):
    ds = collected["toy"]["retrieval"]
    figure = toy_charts.retrieval(ds)
    line = trace(figure, layers="1 layer", variant="residual", width="width 10")
    close(line, ds["loss"].sel(layers=1, residual=1, feed_forward=0, width=10).median("seed"))
    assert not traced(figure, layers="2 layers", width="width 10")
    gap = collected["toy"]["position-bias"]
    bar = trace(toy_charts.gaps(gap), training="last", positional="rope", setting="depth 4")
    one = gap["gap"].sel(depth=4, training="last", positional="rope")
    close(bar, one.mean("seed"))
    np.testing.assert_allclose(np.add(bar.y, bar.error_y.array), one.max("seed"), rtol=1e-3, atol=1e-3)


def test_toys_stand_beside_their_model(collected):
    ds = collected["match"]["ape"]
    figure = toy_charts.beside(collected["match"])
    uniform = ds["toy_uniform"].sel(variant="no residual").values
    toy = trace(figure, quantity="mean weight α", variant="no residual", curve="retrieval toy")
    alpha = samples(ds, "alpha", ("no residual", "retrieval"), "")
    assert alpha is not None
    close(toy, averaged(alpha) / uniform)
    np.testing.assert_allclose(toy.x, np.linspace(0, 1, 12))
    own = trace(figure, quantity="sensitivity", curve="model, pretrained")
    known = samples(ds, "sensitivity", ("model", "pretrained"), "pretrained")
    assert known is not None
    np.testing.assert_allclose(np.divide(own.y, own.y[0]), averaged(known) / averaged(known)[0], rtol=2e-3)
    assert len(own.x) == 24
    assert "second-moment kernel, init" in toy_charts.of_theory(figure)
    bars = trace(toy_charts.agreements_of(collected["match"]), state="pretrained")
    errors = ds["agreement_error"].sel(curve="sensitivity", state="pretrained")
    np.testing.assert_allclose(bars.x, errors.sel(other=list(bars.y)), rtol=1e-3)
    assert {"toy init", "retrieval toy", "no residual, retrieval toy", "N^L, best alpha"} <= set(bars.y)


def test_choices_are_what_traces_are_of(collected):
    figure = charts.sensitivity(collected["jacobian"])
    for given, shown in (
        ({"several": True}, {"pretrained": True, "init": True}),
        ({"shown": ("init",)}, {"pretrained": False, "init": True}),
        ({"shown": ("elsewhere",)}, {"pretrained": True, "init": False}),
    ):
        options = choice(figure, "condition", "Weights", **given).options
        assert {option.value: option.shown for option in options} == shown


# ------------------------------------------------------------------------------------------------------------ page


def test_page_needs_nothing_beside_it(html):
    before = html[: html.index('<script type="application/json" id="charts">')]
    assert len(html.encode()) < 8_000_000
    assert not re.search(r"<(script|img|iframe|source|video)[^>]+src=[\"'](?!data:)", before)
    assert [link for link in re.findall(r"<link [^>]+>", before) if "data:," not in link] == []
    assert "@import" not in before
    assert not re.search(r"url\((?!#)", before)
    assert set(re.findall(r'href="(?!#|data:)([^"]+)"', before)) == {address for _, address in SOURCES.values()}


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


def test_names_are_text_and_claims_have_their_verdict_rule_and_command(html):
    assert "alert(&#39;x&#39;)" in html
    assert "&lt;b&gt;everywhere" in html
    assert not any(markup in html for markup in ("<script>alert", "<b>everywhere", "<em>sentence"))
    rows = dict(re.findall(r'<tbody id="claim-([^"]+)"(.*?)</tbody>', html, re.DOTALL))
    assert list(rows) == ["b-second", "a-first", "c-third"]
    assert all("the number is above 0.3" in row for row in rows.values())
    assert 'data-verdict="0"' in rows["a-first"]
    assert "Measured by" in rows["a-first"]
    assert "does not hold" in rows["b-second"]
    assert 'data-source="[Gu]"' in rows["b-second"]
    assert "To measure it" in rows["c-third"]
    assert re.search(r"<b>1</b> holds.*<b>1</b> does not hold.*<b>1</b> not measured", html, re.DOTALL)


def test_provenance_and_cards_say_what_made_every_result_and_what_configs_do(collected, html):
    found, ds = cards.provenance(collected), collected["sinks"]["ape"]
    assert len(found) == sum(len(collected[kind]) for kind in collected)
    one = next(made for made in found if (made.kind, made.name) == ("sinks", "ape"))
    assert (one.weights, one.tokens) == ([ds.attrs["weights"]], ds.attrs["tokens_sha256"])
    assert one.file == "sinks/sinks-ape.nc"
    assert ds.attrs["torch"] in one.versions
    assert all(part in one.device for part in ("transformers", "float32", "cpu"))
    assert one.tokens in html
    card = next(card for card in cards.cards(collected) if card.name == "ape")
    known = dict(card.facts)
    assert (known["family"], known["blocks"], known["width"]) == ("llama", "3", "64")
    assert known["heads"] == "4, keys and values of 2"
    assert known["position 0 holds"].startswith("BOS, id")
    assert card.weights == one.weights
    assert set(card.kinds) >= set(pages.KINDS)


def test_positional_encodings_in_words():
    rope = {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0}
    for config, says in (
        ({"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}, "RoPE, base 10,000"),
        ({"rope_parameters": rope}, "RoPE, base 500,000, llama3 scaling by 8"),
        ({"model_type": "gpt2"}, "learned"),
        ({"model_type": "bloom"}, "ALiBi"),
        ({"model_type": "unheard-of"}, ""),
    ):
        assert cards.positional(config) == says


def test_cells_that_are_numbers():
    assert all(cards.is_number(cell) for cell in ("0.3 [0.2, 0.4]", "12%", "-", "1,024", "1,530%"))
    assert not any(cards.is_number(cell) for cell in ("tiny", "9-31"))


def test_formulas_are_mathml():
    for method in formulas.METHODS:
        assert method["formulas"]
        for formula in method["formulas"]:
            assert formulas.displayed(formula["latex"]).startswith("<math")
            assert "\\" not in formulas.displayed(formula["latex"]) + formulas.mathematical(formula["says"])
        assert "$" not in formulas.mathematical(method["remark"])
    assert formulas.mathematical("a < b & $x_1$") == Markup("a &lt; b &amp; ") + formulas.mathematical("$x_1$")
    assert "<msub>" in formulas.mathematical("$x_1$")


def test_nothing_or_one_kind_measured_makes_a_page_that_says_which_commands_measure(collected, tmp_path):
    empty = Collected(tmp_path)
    for one in sections(empty):
        assert not one.charts
        assert all(line.startswith("headwater ") for line in one.missing)
        assert one.missing
    given: dict[str, Any] = {"command": "", "picture": None, "sentences": []}
    html = build(empty, [], tmp_path, **given).read_text(encoding="utf-8")
    assert html.count("Not measured yet") == 2 + sum(len(one.missing) for one in sections(empty))
    assert f"headwater leakage MODEL --out {tmp_path}/leakage" in html
    assert "No claims were judged" in html
    alone = Collected(collected.root, {"sinks": {"ape": collected["sinks"]["ape"]}})
    assert 'data-chart="heads"' in build(alone, [], tmp_path, **given).read_text(encoding="utf-8")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        build(empty, [], tmp_path / "file", **given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "sections_lacking"),
    [
        ("scalar map steps trajectory", "jacobian theory sinks trajectory"),
        ("jacobian theory sinks leakage bos-swap match toy", "jacobian theory sinks leakage bos-swap match toys"),
    ],
)
def test_any_kind_may_be_missing(collected, kinds, sections_lacking):
    results = {name: results for name, results in collected.results.items() if name not in kinds.split()}
    less = sections(Collected(collected.root, results, collected.files))
    assert [one.name for one in less if one.missing] == sections_lacking.split()


def test_commands_name_models_as_they_were_given(collected, checkpoints, tmp_path):
    """A folder's last part is what its results are called, and nothing that a command finds again."""
    results = {"sinks": {"ape": collected["sinks"]["ape"]}}
    (leakage,) = (one for one in sections(Collected(tmp_path / "a b", results)) if one.name == "leakage")
    assert leakage.missing == (f"headwater leakage {checkpoints / 'ape'} --out '{tmp_path}/a b/leakage'",)
    assert heads_data(results["sinks"])["ape"]["more"].startswith(f"headwater sinks {checkpoints / 'ape'} --pictures ")
    older = collected["sinks"]["ape"].copy()
    del older.attrs["loaded_from"]
    assert heads_data({"ape": older})["ape"]["more"].startswith("headwater sinks ape --pictures ")


@pytest.mark.slow
def test_pictures_are_embedded_while_there_is_room_or_refused(root, tmp_path, monkeypatch):
    result = Path(shutil.copy(root / "toy" / "retrieval.nc", tmp_path / "sinks.nc"))
    Image.new("RGB", (60, 60), "#D55E00").save(tmp_path / "sinks.png")
    found = Collected(tmp_path, {"toy": {"sinks": load(result)}}, {("toy", "sinks"): result})
    svg = tmp_path / "p.svg"
    svg.write_text("<svg xmlns='http://www.w3.org/2000/svg'/>", encoding="utf-8")

    def built(picture: Path | None = None) -> str:
        return build(found, [], tmp_path, command="c", sentences=[], picture=picture).read_text(encoding="utf-8")

    assert "data:image/svg+xml;base64," in built(svg)
    assert "figure of headwater toy sinks" in built()
    monkeypatch.setattr("probes.report.page.PICTURES", 10)
    assert "<code>toy/sinks.png</code>" in built()
    assert "figure of headwater toy sinks" not in built()
    with pytest.raises(InputError, match=r"'elsewhere\.png' cannot be read .*draw it first"):
        built(Path("elsewhere.png"))
    with pytest.raises(InputError, match=r"'p\.gif' is no PNG or SVG"):
        built(Path("p.gif"))


# ------------------------------------------------------------------------------------------------------- measuring


@pytest.fixture
def given(checkpoints: Path) -> dict[str, Any]:
    return {"count": pages.PROMPTS, "length": pages.LENGTH, "source": pages.source(checkpoints)}


@pytest.fixture
def again(checkpoints: Path, given: dict[str, Any]) -> Callable[..., list[str]]:
    """Measures the first model by studies of these kinds, in a folder, as the shared report was or with changes."""

    def run(out: Path, *kinds: str, **changes: Any) -> list[str]:
        return measure([str(checkpoints / "ape")], out, **given | {"chosen": pages.small(*kinds)} | changes)

    return run


@pytest.fixture
def out(root: Path, tmp_path: Path) -> Path:
    """A copy of the shared report."""
    return Path(shutil.copytree(root, tmp_path / "report"))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without figures and tables, which take longer than measuring where there is little to measure."""
    monkeypatch.setattr("probes.report.measuring.draw", lambda out, kinds: None)
    pages.undraw(monkeypatch)


def stamps(root: Path) -> dict[str, int]:
    return {str(file.relative_to(root)): file.stat().st_mtime_ns for file in root.rglob("*.nc")}


def test_all_kinds_are_written_with_figures_and_tables_and_then_kept(out, again):
    assert set(pages.KINDS) <= set(collect(out))
    for kind in pages.KINDS:
        stem = "jacobian" if kind == "scalar" else kind
        assert (out / kind / f"{stem}-ape.nc").is_file()
        assert (out / kind / f"{stem}.png").is_file()
        assert (out / kind / f"{stem}.md").is_file() == (stem != "jacobian")
    assert not (out / ".measuring").exists()
    said: list[str] = []
    before = stamps(out)
    assert again(out, told=said.append) == []
    assert stamps(out) == before
    (line,) = said
    assert all(kind in line for kind in pages.KINDS)
    assert "--fresh" in line


@pytest.mark.slow
def test_figures_are_drawn_where_something_is_new_or_they_are_missing(out, again):
    drawn = {kind: out / kind / f"{stem}.png" for kind, stem in (("scalar", "jacobian"), ("sinks", "sinks"))}
    before = {kind: file.stat().st_mtime_ns for kind, file in drawn.items()}
    for file in ("trajectory/trajectory.png", "trajectory/trajectory.md", "scalar/jacobian-ape.nc"):
        (out / file).unlink()
    again(out, "trajectory", "sinks", "scalar")
    assert (out / "trajectory" / "trajectory.png").is_file()
    table = (out / "trajectory" / "trajectory.md").read_text(encoding="utf-8")
    assert all(f"| {name} |" in table for name in ("ape", pages.ROGUE))  # which is of an earlier report
    assert drawn["scalar"].stat().st_mtime_ns > before["scalar"]
    assert drawn["sinks"].stat().st_mtime_ns == before["sinks"]


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_fresh_weights_by_another_rule_are_measured_anew_and_those_of_older_versions_kept(out, again, given):
    file = out / "jacobian" / "jacobian-ape.nc"
    save(load(file).drop_vars("initialization"), file)  # older versions did not say
    ruled = {"source": replace(given["source"], initialization="1/24")}
    for changes, changed, rule in (
        ({}, set(), ""),
        (ruled, {"jacobian/jacobian-ape.nc"}, "uniform 1/24"),  # no fresh weights in the other
        (ruled, set(), "uniform 1/24"),
        ({}, {"jacobian/jacobian-ape.nc"}, "initializer_range 0.5"),
    ):
        before = stamps(out)
        again(out, "jacobian", "scalar", **changes)
        assert {name for name, stamp in stamps(out).items() if stamp != before[name]} == changed
        assert drawn_from({"ape": load(file)}).startswith(rule)


def options_changed(ds: xr.Dataset) -> xr.Dataset:
    return ds.assign_attrs(options=json.dumps({**json.loads(ds.attrs["options"]), "tau": 0.1}))


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("edit", "changes"),
    [
        (lambda ds: ds.assign_attrs(headwater="0.0.0"), {}),
        (lambda ds: ds.assign_attrs(weights="of another model"), {}),
        (lambda ds: ds.assign_attrs(tokens_sha256="of other text"), {}),
        (options_changed, {}),
        (lambda ds: ds, {"count": 5}),
        (lambda ds: ds, {"length": 20}),
        (lambda ds: ds, {"fresh": True}),
    ],
)
def test_a_result_of_another_making_is_measured_anew(root, again, tmp_path, edit, changes):
    file = tmp_path / "sinks" / "sinks.nc"  # as `headwater sinks` names that of a single model
    save(edit(load(root / "sinks" / "sinks-ape.nc")), file)
    again(tmp_path, "sinks", **changes)
    assert not file.exists()
    new, old = load(tmp_path / "sinks" / "sinks-ape.nc"), load(root / "sinks" / "sinks-ape.nc")
    assert new.attrs["weights"] == old.attrs["weights"]
    if not changes:
        xr.testing.assert_allclose(new["attends"], old["attends"])


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_what_a_study_refuses_is_said_and_the_rest_is_measured(again, tmp_path):
    said: list[str] = []
    refused = again(tmp_path, "sinks", "leakage", told=said.append, count=2)
    assert [line.partition(":")[0] for line in refused] == ["leakage was not measured on ape"]
    assert said[0] == "ape: studies to come: sinks, leakage"
    assert [line for line in said[1:] if " above the model's " not in line] == refused
    assert set(collect(tmp_path)) == {"sinks"}
    with pytest.raises(InputError, match="nothing could be measured; the first reason: leakage"):
        again(tmp_path, "leakage", count=2)


def test_bad_input_is_refused_before_anything_is_measured(checkpoints, given, tmp_path):
    for models, changes, says in ((["ape", "nowhere"], {}, "nowhere"), (["ape"], {"length": 4}, "leaves no middle")):
        with pytest.raises(InputError, match=says):
            measure([str(checkpoints / name) for name in models], tmp_path, **given | changes)
    assert not list(tmp_path.rglob("*.nc"))


@pytest.mark.usefixtures("undrawn")
def test_quick_results_say_so_and_serve_no_full_report_but_full_ones_serve_a_quick_one(again, tmp_path):
    file, said = tmp_path / "trajectory" / "trajectory-ape.nc", []
    usual = {"chosen": [replace(full, prompts=6) for full in pages.small("trajectory")], "told": said.append}
    made: list[tuple[int, Any, int]] = []
    for quick in (True, True, False, True):
        again(tmp_path, quick=quick, count=None, **usual)
        ds = load(file)
        made.append((ds.sizes["prompt"], ds.attrs.get("quick"), json.loads(ds.attrs["options"])["starts"]))
        made_at = file.stat().st_mtime_ns
        again(tmp_path, quick=quick, count=None, **usual)
        assert file.stat().st_mtime_ns == made_at
        assert said[-1].startswith("ape: kept trajectory")
    assert made == [(QUICK_PROMPTS["trajectory"], 1, 8)] * 2 + [(6, None, 64)] * 2
    again(tmp_path, quick=True, count=7, **usual)  # more than the full one has
    assert load(file).sizes["prompt"] == 7


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_what_a_quick_report_measured_is_kept_by_the_next(again, tmp_path):
    for _ in range(2):
        before = stamps(tmp_path)
        again(tmp_path, "jacobian", "bos-swap", quick=True, count=None)
    assert len(before) == 2
    assert stamps(tmp_path) == before
    assert all(collect(tmp_path)[kind]["ape"].attrs["quick"] == 1 for kind in ("jacobian", "bos-swap"))


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
    found: list[set[str]] = []
    said: list[str] = []

    def between(refused: Any) -> None:
        found.append({kind for kind in collect(tmp_path) if kind in pages.KINDS})

    chosen = pages.small("scalar", "trajectory", "sinks")[::-1]
    both = [str(checkpoints / name) for name in ("ape", "bee")]
    measure(both, tmp_path, chosen=chosen, told=said.append, between=between, **given | {"count": 3})
    (line,) = (line for line in said if line.startswith("ape: studies to come: "))
    order = line.removeprefix("ape: studies to come: ").split(", ")
    assert sorted(order) == ["scalar", "sinks", "trajectory"]
    assert order[0] == "sinks"
    assert found == [set(order[:count]) for count in (1, 2, 3)]  # none after the last of all


class Stop(Exception):
    """Pulls the plug."""


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_an_interrupted_report_goes_on(again, tmp_path):
    def stopping(label: str, done: float, total: float) -> None:
        if label == "jacobian: ape init 1":
            raise Stop

    with pytest.raises(Stop):
        again(tmp_path, "jacobian", advance=stopping)
    assert collect(tmp_path)["jacobian"] == {}
    said: list[str] = []
    again(tmp_path, "jacobian", told=said.append)
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
    assert "ape: kept sinks, trajectory" in said.err
    counts = list(map(int, re.findall(r"^(?:published|requests|our own).*: (\d+) statements", said.out, re.M)))
    assert len(counts) > 3
    for name in ("index.html", "claims.md", "overview.png", "overview.svg"):
        assert str(out / name) in said.out
        assert (out / name).stat().st_size > 0
    html = (out / "index.html").read_text(encoding="utf-8")
    assert html.count('<tbody id="claim-') == sum(counts)
    assert "--prompts 4" in html


def test_a_page_of_what_is_there_needs_no_model(monkeypatch, capsys, root, tmp_path):
    shutil.copytree(root / "sinks", tmp_path / "sinks", ignore=shutil.ignore_patterns("*script*"))
    assert call(monkeypatch, "--out", str(tmp_path)) == 0
    assert "overview.png" not in capsys.readouterr().out  # without profiles there is no such picture
    assert 'data-chart="heads"' in (tmp_path / "index.html").read_text(encoding="utf-8")
