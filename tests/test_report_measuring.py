"""What `headwater report` measures, keeps and measures again, and the command itself."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pages
import pytest
import xarray as xr
from commands import call
from kept import Stop

from probes.errors import InputError
from probes.report.measuring import QUICK_PROMPTS, measure
from probes.results.dataset import drawn_from, load, save
from probes.results.folder import collect


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pages.shared(tmp_path_factory) / "models"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pages.shared(tmp_path_factory) / "report"


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
    for quick in (True, False, True):
        again(tmp_path, quick=quick, count=None, **usual)
        ds, before = load(file), stamps(tmp_path)
        made.append((ds.sizes["prompt"], ds.attrs.get("quick"), json.loads(ds.attrs["options"])["starts"]))
        again(tmp_path, quick=quick, count=None, **usual)
        assert stamps(tmp_path) == before
        assert said[-1].startswith("ape: kept trajectory")
    assert made == [(QUICK_PROMPTS["trajectory"], 1, 8), (6, None, 64), (6, None, 64)]
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


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_cheap_studies_come_first_and_each_is_heard_of_before_the_next_begins(checkpoints, given, tmp_path):
    found: list[set[str]] = []
    said: list[str] = []
    heard: dict[str, Any] = {"told": said.append, "between": lambda refused: found.append(set(collect(tmp_path)))}
    chosen = pages.small("scalar", "trajectory", "sinks")
    both = [str(checkpoints / name) for name in ("ape", "bee")]
    measure(both, tmp_path, chosen=chosen, **given | heard | {"count": 3})
    (order,) = (line.removeprefix(start) for line in said if line.startswith(start := "ape: studies to come: "))
    first, second, third = order.split(", ")
    assert first == "sinks"
    assert found == [{first}, {first, second}, {first, second, third}]  # none after the last of all


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_an_interrupted_report_goes_on(again, tmp_path):
    def stop(label: str, done: float, total: float) -> None:
        assert label == "ape: jacobian"
        if done > 2 / 3 * total + 1e-9:
            raise Stop

    with pytest.raises(Stop):
        again(tmp_path, "jacobian", advance=stop)
    assert collect(tmp_path)["jacobian"] == {}
    said: list[str] = []
    again(tmp_path, "jacobian", told=said.append)
    assert any("going on with" in line and "2 of 3 are done" in line for line in said)
    assert set(collect(tmp_path)["jacobian"]) == {"ape"}
    assert not (tmp_path / ".measuring").exists()


def test_report_from_the_command_line(monkeypatch, capsys, checkpoints, root, tmp_path):
    out = tmp_path / "report"
    shutil.copytree(root, out, ignore=shutil.ignore_patterns("toy", "match", "map.nc", "*script*"))
    options = ["--prompts", str(pages.PROMPTS), "--length", str(pages.LENGTH), "--text", str(checkpoints / "text.txt")]
    monkeypatch.setattr("probes.report.measuring.studies", lambda seed=0: tuple(pages.small("sinks", "trajectory")))
    assert call(monkeypatch, "report", str(checkpoints / "ape"), "--out", str(out), *options) == 0
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
    assert call(monkeypatch, "report", "--out", str(tmp_path)) == 0
    assert "overview.png" not in capsys.readouterr().out  # without profiles there is no such picture
    assert 'data-chart="heads"' in (tmp_path / "index.html").read_text(encoding="utf-8")
