"""The scripts in tools/: steps of `make llm` are commands that exist; sizes and slim results are what they say."""

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.main import get_command

from probes.cli.main import app
from probes.errors import InputError
from probes.results import dataset as results

ROOT = Path(__file__).resolve().parent.parent


def tool(name: str, monkeypatch):
    """A script's module."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


def test_steps_are_commands_with_results_of_their_own(monkeypatch):
    steps = tool("llm", monkeypatch).STEPS
    assert len({step.result for step in steps}) == len(steps) > 40
    program: Any = get_command(app)
    for step in steps:  # an option or a value that does not exist is refused
        name, command, arguments = program.resolve_command(
            program.make_context("headwater", [], resilient_parsing=True), step.words
        )
        command.make_context(name, arguments)


def test_size_counts_a_tree(tmp_path, monkeypatch):
    (tmp_path / "probes" / "report").mkdir(parents=True)
    (tmp_path / "probes" / "report" / "page.py").write_text("def page():\n    import files\n\n    return files\n")
    (tmp_path / "probes" / "report" / "page.css").write_text("a {\n}\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_all.py").write_text("x = 1\n" * 451)
    lines = [line.split() for line in tool("size", monkeypatch).report(tmp_path)]
    for words in ("probes/report 6 3", "all but tests 6 3", "451 tests/test_all.py"):
        assert words.split() in lines


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout")
def test_a_checkout_is_small_and_holds_the_pictures_that_its_pages_name():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    assert sum((ROOT / name).stat().st_size for name in names) < 25 * 2**20
    pictures = {name for name in names if name.startswith("reports/") and name.endswith((".png", ".svg", ".gif"))}
    named = set()
    for page in (name for name in names if name.endswith((".md", ".ipynb")) and name != "CHANGELOG.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        named |= {name for name in re.findall(r"reports/[\w./@-]+\.(?:png|svg|gif)", text) if "*" not in name}
        beside = re.findall(r"!\[[^\]]*\]\((?!https?:|data:)([^)]+)\)", text)
        named |= {str((ROOT / page).parent.joinpath(link).resolve().relative_to(ROOT)) for link in beside}
    assert pictures == {name for name in named if name.startswith("reports/")}


def test_a_slim_result_is_read_in_the_place_of_the_whole_one_and_says_what_it_lacks(tmp_path, monkeypatch):
    slim, file = tool("slim", monkeypatch), tmp_path / "sinks" / "sinks-ape.nc"
    values = np.array([1 / 3, -1e-7, 0, np.nan, np.inf, *np.geomspace(1e-9, 123456.789, 95)])
    layer = {"attends": values, "over_tau": values, "large": values * 1e200, "count": np.arange(100)}
    variables = {name: (("layer",), each) for name, each in layer.items()} | {"share": (("head",), np.arange(13) / 12)}
    whole = results.dataset(variables, tokens=torch.ones(2, 3, dtype=torch.long), attrs={"headwater": "1"})
    results.save(whole, file)
    (written,) = slim.made(file)
    assert results.load(file).identical(whole)
    file.unlink()
    small = results.load(file)
    assert written.stat().st_size < 3000
    assert small.attrs["left_out"] == "over_tau, tokens"
    assert set(small.data_vars) == {"attends", "large", "count", "share"}
    for name in ("attends", "large"):
        np.testing.assert_allclose(small[name], layer[name], rtol=2.0**-18)
    for name in ("count", "share"):  # few different values, and whole numbers, are exact
        np.testing.assert_array_equal(small[name], whole[name])
    written.write_bytes(written.read_bytes()[:100])
    with pytest.raises(InputError, match="cannot be read"):
        results.load(file)


def test_every_folder_that_make_report_writes_holds_results_of_one_command():
    makefile = (Path(__file__).parents[1] / "Makefile").read_text(encoding="utf-8")
    folders = re.findall(r"headwater (?!report).* --out (reports/\S+)", makefile)
    assert len(set(folders)) == len(folders) > 8
