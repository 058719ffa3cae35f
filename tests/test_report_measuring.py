"""What `headwater report` measures, keeps and measures again, and the command itself."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pages
import pytest
import xarray as xr
from commands import call

from probes.errors import InputError
from probes.report.measuring import KEY, QUICK_PROMPTS, measure
from probes.results.dataset import load, save
from probes.results.folder import collect


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pages.shared(tmp_path_factory) / "models"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pages.shared(tmp_path_factory) / "report"


@pytest.fixture
def again(checkpoints: Path) -> Callable[..., list[str]]:
    """Measures the first model by studies of these kinds, in a folder, as the shared report was or with changes."""
    usual = {"count": pages.PROMPTS, "length": pages.LENGTH, "source": pages.source(checkpoints)}

    def run(out: Path, *kinds: str, **changes: Any) -> list[str]:
        return measure([str(checkpoints / "ape")], out, **usual | {"chosen": pages.small(*kinds)} | changes)[1]

    return run


def stamps(root: Path) -> dict[str, int]:
    return {str(file.relative_to(root)): file.stat().st_mtime_ns for file in root.rglob("*.nc")}


def test_all_kinds_are_written_and_then_kept(root, again, checkpoints, tmp_path):
    out = shutil.copytree(root, tmp_path / "report")
    assert set(pages.KINDS) <= set(collect(out))
    for kind in pages.KINDS:
        assert (out / kind / f"{'jacobian' if kind == 'scalar' else kind}-ape.nc").is_file()
    assert not list(out.rglob("unfinished"))
    lines: list[str] = []
    before = stamps(out)
    assert again(out, remark=lines.append) == []
    assert stamps(out) == before
    (line,) = lines
    assert all(kind in line for kind in pages.KINDS)
    again(out, "jacobian", "scalar", source=replace(pages.source(checkpoints), initialization="1/24"))
    changed = {name for name, stamp in stamps(out).items() if stamp != before[name]}
    assert changed == {"jacobian/jacobian-ape.nc"}  # fresh weights by another rule; there are none in the other


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"length": 20}, {"fresh": True}])
def test_a_result_of_another_making_is_measured_anew(root, again, tmp_path, changes):
    file = tmp_path / "sinks" / "sinks.nc"  # as `headwater sinks` names that of a single model
    known = load(root / "sinks" / "sinks-ape.nc")
    save(known if changes else known.drop_attrs(deep=False).assign_attrs({**known.attrs, KEY: "another"}), file)
    again(tmp_path, "sinks", **changes)
    assert not file.exists()
    new = load(tmp_path / "sinks" / "sinks-ape.nc")
    assert new.attrs["weights"] == known.attrs["weights"]
    if not changes:
        xr.testing.assert_allclose(new["attends"], known["attends"])


@pytest.mark.slow
def test_what_a_study_refuses_is_said_and_the_rest_is_measured(again, tmp_path):
    lines: list[str] = []
    refused = again(tmp_path, "sinks", "leakage", remark=lines.append, count=2)
    assert [line.partition(":")[0] for line in refused] == ["leakage was not measured on ape"]
    assert set(refused) <= set(lines)
    assert set(collect(tmp_path)) == {"sinks"}
    with pytest.raises(InputError, match="nothing could be measured; the first reason: leakage"):
        again(tmp_path, "leakage", count=2)


def test_bad_input_is_refused_before_anything_is_measured(checkpoints, tmp_path):
    for models, length, says in ((["ape", "nowhere"], pages.LENGTH, "nowhere"), (["ape"], 4, "leaves no middle")):
        with pytest.raises(InputError, match=says):
            measure([str(checkpoints / name) for name in models], tmp_path, length=length)
    assert not list(tmp_path.rglob("*.nc"))


def test_quick_results_say_so_and_serve_no_full_report_but_full_ones_serve_a_quick_one(again, tmp_path):
    file, lines = tmp_path / "trajectory" / "trajectory-ape.nc", []
    usual = {"chosen": [replace(full, prompts=6) for full in pages.small("trajectory")], "remark": lines.append}
    results: list[tuple[int, Any, int]] = []
    for quick in (True, False, True):
        again(tmp_path, quick=quick, count=None, **usual)
        ds, before = load(file), stamps(tmp_path)
        results.append((ds.sizes["prompt"], ds.attrs.get("quick"), json.loads(ds.attrs["options"])["starts"]))
        again(tmp_path, quick=quick, count=None, **usual)
        assert stamps(tmp_path) == before
        assert lines[-1].startswith("ape: kept trajectory")
    assert results == [(QUICK_PROMPTS["trajectory"], 1, 8), (6, None, 64), (6, None, 64)]
    again(tmp_path, quick=True, count=7, **usual)  # more than the full one has
    assert load(file).sizes["prompt"] == 7


def test_report_from_the_command_line(monkeypatch, capsys, checkpoints, tmp_path):
    out, options = tmp_path / "report", ["--length", str(pages.LENGTH), "--text", str(checkpoints / "text.txt")]
    monkeypatch.setattr("probes.report.measuring.studies", lambda: tuple(pages.small("sinks", "trajectory")))
    assert call(monkeypatch, "report", str(checkpoints / "ape"), "--quick", "--out", str(out), *options) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("Quick: few prompts")
    assert lines[-1] == f"wrote {out / 'index.html'}, {out / 'claims.md'}"  # without profiles there is no picture
    html = (out / "index.html").read_text(encoding="utf-8")
    assert "--length 24" in html
    assert {file.name for file in (out / "sinks").iterdir()} == {
        f"sinks{x}" for x in ("-ape.nc", ".md", ".png", ".svg")
    }
    assert call(monkeypatch, "report", "--out", str(out)) == 0  # the page alone, of what is there
    assert capsys.readouterr().out.splitlines()[1:] == lines[1:]
    # Toys have sections with their charts and tables.
    save(load(pages.REPORTS / "toy" / "remarks.nc"), out / "toy" / "remarks.nc")
    assert call(monkeypatch, "report", "--out", str(out)) == 0
    html = (out / "index.html").read_text(encoding="utf-8")
    section = html[html.index('<section id="toy-remarks">') : html.index('<section id="statements">')]
    assert section.count("<img") == 1
    assert (out / "toy" / "remarks.md").is_file()
