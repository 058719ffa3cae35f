"""The page: what stands first, that its numbers are the results', that it needs nothing beside it and trusts nobody."""

import re
from dataclasses import replace
from pathlib import Path

import pages
import pytest
import xarray as xr
from markupsafe import escape

from probes import report
from probes.headlines import tables
from probes.measure import measure
from probes.measures.map import MAP
from probes.report import HASH, provenance, quick_remarks
from probes.results.dataset import load
from probes.results.folder import Collected, collect
from toy.match import MEASURE as MATCH

LLM = Path(__file__).resolve().parent.parent / "reports" / "llm"


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Collected:
    return collect(pages.shared(tmp_path_factory) / "report")


@pytest.fixture(scope="module")
def page(collected: Collected, tmp_path_factory: pytest.TempPathFactory) -> report.Page:
    there = replace(collected, root=tmp_path_factory.mktemp("page"))
    return report.page_of(there, pages.claims(), command="", remarks=["A <b>."], others=(MATCH, MAP))


@pytest.fixture(scope="module")
def html(page: report.Page, tmp_path_factory: pytest.TempPathFactory) -> str:
    return report.write(page, tmp_path_factory.mktemp("html")).read_text(encoding="utf-8")


def test_the_page_needs_nothing_beside_it(html):
    ids = re.findall(r' id="([^"]*)"', html)
    assert len(ids) == len(set(ids))
    addresses = re.findall(r' (?:src|href|action)="((?!data:)[^"]*)"', html)
    assert addresses
    assert set(addresses) <= {f"#{name}" for name in ids}
    assert not re.search(r"@import|url\((?!#)", html)
    assert len(html) < 3_000_000


def test_names_and_texts_of_others_are_text(html):
    assert pages.ROGUE not in html
    assert escape(pages.ROGUE) in html
    assert "<b>" not in html
    assert "Sinks are &lt;b&gt;everywhere&lt;/b&gt;." in html
    assert html.count("<script>") == 1


def test_models_that_are_named_stand_first_alone_in_figures(collected, tmp_path):
    chosen = report.page_of(replace(collected, root=tmp_path), [], first=["ape"], command="", files=True)
    assert chosen.model == "ape"
    for section in chosen.sections:
        assert {answer.partition(": ")[0] for answer in section.answers} <= {"ape"}
    (sinks,) = (section for section in chosen.sections if section.name == "sinks")
    own = tables(measure("sinks"), {name: collected["sinks"][name] for name in ("ape", pages.ROGUE)})
    assert [table.rows for table in sinks.tables] == [table.rows for table in own.tables]
    assert {path.suffix for path in (tmp_path / "sinks").iterdir()} == {".png", ".svg", ".md"}
    assert (tmp_path / "overview.png").is_file()


def test_real_language_models_stand_before_small_ones():
    real, small = load(LLM / "sinks" / "sinks-smollm2-135m.nc"), xr.Dataset(attrs={"condition": "pretrained"})
    assert list(report.leading({"small": small, "real": real})) == ["real"]
    assert list(report.leading({"small": small, "real": real}, ["small"])) == ["small"]
    assert list(report.leading({"a": small, "b": small}, ["other"])) == ["a", "b"]


def test_what_made_results(collected):
    known = collected["sinks"]["ape"].attrs
    made = provenance(collected)
    assert len(made.rows) == sum(len(collected[kind]) for kind in collected)
    (row,) = (row for row in made.rows if row[0] == "sinks: ape")
    assert row[1].startswith("BOS, id ")
    assert row[6:] == [known[name][:HASH] for name in ("weights", "tokens_sha256")]
    assert quick_remarks(collected) == []
    quick = replace(collected, results={"sinks": {"ape": collected["sinks"]["ape"].assign_attrs(quick=1)}})
    assert "sinks of ape" in quick_remarks(quick)[0]
