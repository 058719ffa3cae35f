"""The page: charts hold the results' numbers, every text is escaped, nothing is fetched, what is missing is said."""

from __future__ import annotations

import base64
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pages
import pytest
from markupsafe import Markup
from PIL import Image

from probes.errors import InputError
from probes.figures.palette import CYCLE, model_colors
from probes.figures.series import SINK
from probes.figures.style import facts
from probes.measures.agreement import averaged
from probes.measures.leakage import resolved
from probes.measures.match_result import samples
from probes.report import build, cards, charts, formulas, heads, plotting, toy_charts
from probes.report.heads import heads_data
from probes.report.page import SOURCES
from probes.report.sections import sections
from probes.results.curves import band, smooth_between
from probes.results.dataset import load
from probes.results.folder import Collected, collect
from probes.results.profiles import profiles
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


def test_numbers_keep_four_digits_and_long_curves_their_ends():
    assert plotting.rounded(np.array([1.23456, -1234567.0, 0.0])) == [1.235, -1235000.0, 0.0]
    assert plotting.rounded(np.float32(0.1)) == [0.1]
    assert plotting.rounded(np.array([math.nan, math.inf, -math.inf])) == [None, None, None]  # JSON has no such numbers
    assert plotting.positions(300).tolist() == list(range(300))
    at = plotting.positions(5000)
    assert len(at) <= plotting.POINTS
    assert [*at[:64], *at[-64:]] == [*range(64), *range(4936, 5000)]
    assert 0 < np.diff(at).min() <= np.diff(at).max() < 20


def test_sensitivity_is_the_result_s(collected):
    results = collected["jacobian"]
    figure = charts.sensitivity(results, collected["scalar"])
    assert list(model_colors([f"m{n}" for n in range(9)]).values()) == [*CYCLE, CYCLE[0], CYCLE[1]]
    for name, ds in results.items():
        fresh, predicted = (
            band([run.mean for run in profiles(ds, variable)["init"]])
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
        scalar = profiles(collected["scalar"][name])["pretrained"][0].mean
        close(trace(figure, model=name, curve=charts.SCALAR), scalar)


def test_positions_beyond_a_window_s_reach_are_zero_and_have_no_band(collected):
    ds = collected["jacobian"]["ape"].copy(deep=True)
    ds["sensitivity"][..., :5] = ds["elasticity"][..., :5] = 0.0
    figure = charts.sensitivity({"w": ds})
    assert list(trace(figure, condition="init", curve=charts.MEASURED, detail=charts.EACH).y[:5]) == [0.0] * 5
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
    for accuracy, opacity in ((0.6, toy_charts.FADED), (0.9, 1)):
        judged = toy_charts.gaps(gap.assign(novel_accuracy=0 * gap["gap"].isel(pair=0, drop=True) + accuracy))
        assert {bar.opacity for bar in judged.data} == {opacity}


def test_toys_stand_beside_their_model(collected):
    ds = collected["match"]["ape"]
    figure = toy_charts.beside(collected["match"])
    uniform = ds["toy_uniform"].sel(variant="matched", training="retrieval").values
    uniform = uniform[np.isfinite(uniform)]
    toy = trace(figure, quantity="mean weight α", variant="matched", curve="retrieval toy")
    alpha = samples(ds, "alpha", ("matched", "retrieval"), "")
    assert alpha is not None
    close(toy, averaged(alpha) / uniform)
    np.testing.assert_allclose(toy.x, np.linspace(0, 1, len(uniform)))
    own = trace(figure, quantity="sensitivity", curve="model, pretrained")
    known = samples(ds, "sensitivity", ("model", "pretrained"), "pretrained")
    assert known is not None
    np.testing.assert_allclose(np.divide(own.y, own.y[0]), averaged(known) / averaged(known)[0], rtol=2e-3)
    assert len(own.x) == ds.sizes["position"]
    assert "second-moment kernel, init" in toy_charts.of_theory(figure)
    bars = trace(toy_charts.agreements_of(collected["match"]), state="pretrained")
    errors = ds["agreement_error"].sel(curve="sensitivity", state="pretrained")
    np.testing.assert_allclose(bars.x, errors.sel(other=list(bars.y)), rtol=1e-3)
    assert {"toy init", "N^L, best alpha"} <= set(bars.y)


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
    for kind in set(collected) - {"scalar"}:  # which is drawn beside another
        alone = sections(Collected(collected.root, {kind: dict(collected[kind])}, collected.files))
        assert any(one.charts for one in alone), kind
        assert len([one for one in alone if one.missing]) >= len(alone) - 2
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        build(empty, [], tmp_path / "file", **given)


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
    result = Path(shutil.copy(root / "toy" / "retrieval.nc", tmp_path / "rollout.nc"))
    Image.new("RGB", (60, 60), "#D55E00").save(tmp_path / "rollout.png")
    found = Collected(tmp_path, {"toy": {"rollout": load(result)}}, {("toy", "rollout"): result})
    svg = tmp_path / "p.svg"
    svg.write_text("<svg xmlns='http://www.w3.org/2000/svg'/>", encoding="utf-8")

    def built(picture: Path | None = None) -> str:
        return build(found, [], tmp_path, command="c", sentences=[], picture=picture).read_text(encoding="utf-8")

    assert "data:image/svg+xml;base64," in built(svg)
    assert "figure of headwater toy rollout" in built()
    monkeypatch.setattr("probes.report.page.PICTURES", 10)
    assert "<code>toy/rollout.png</code>" in built()
    assert "figure of headwater toy rollout" not in built()
    with pytest.raises(InputError, match=r"'elsewhere\.png' cannot be read .*draw it first"):
        built(Path("elsewhere.png"))
    with pytest.raises(InputError, match=r"'p\.gif' is no PNG or SVG"):
        built(Path("p.gif"))


def test_a_quick_page_and_its_figures_say_so(collected):
    plain = {"ape": collected["sinks"]["ape"]}
    quick = {"ape": plain["ape"].assign_attrs(quick=1)}
    assert facts(quick) == ["QUICK measurement", *facts(plain)]
    assert cards.quick_remarks(Collected(collected.root, {"sinks": plain})) == []
    (said,) = cards.quick_remarks(Collected(collected.root, {"sinks": quick, "trajectory": plain}))
    assert "wide intervals: sinks of ape." in said
    assert sinks_report(quick).described == f"QUICK measurement, {sinks_report(plain).described}"
