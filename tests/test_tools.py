"""The scripts in tools/: steps of `make llm` are commands that exist; sizes, mutants and slim results are what they say."""

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coverage import CoverageData
from typer.main import get_command

from probes.cli.main import app
from probes.errors import InputError
from probes.results import dataset as results

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "tools"


def tool(name: str, monkeypatch):
    """A script's module; scripts import each other by their bare names, as those of one folder do."""
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.delitem(sys.modules, "slim", raising=False)
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    size = tool("size", monkeypatch)
    for name, text in {
        "probes/__init__.py": "from .report.page import page\n",
        "probes/report/page.py": "def page():\n    from ..run import files\n\n    return files\n",
        "probes/report/page.css": "a {\n}\n",
        "probes/checkpoints/tiny/config.toml": "a = 1\n",
        "tests/test_all.py": "x = 1\n" * 451,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    lines = [line.split() for line in size.report(tmp_path)]
    for words in ("probes 7 4", "probes/report 6 3", "all but tests 7 4", "451 tests/test_all.py"):
        assert words.split() in lines


FAULTY = """
def area(width: float, height: float = 2, *, flat: bool = False) -> float:
    \"\"\"Not 1, not `a < b`.\"\"\"
    if not flat and width < 3:
        raise ValueError(f"{width + 1} is not 2" + str(4))
    return width * height
"""


def test_mutants_of_a_function_are_all_there_apply_and_are_found_after_a_move(monkeypatch):
    mutants = tool("mutants", monkeypatch)
    found = list(mutants.mutants(ast.parse(FAULTY), "probes.one"))
    assert {(mutant.kind, mutant.before, mutant.after) for mutant in found} == {
        ("default", "height=2", "height=3"),
        ("default", "flat=False", "flat=True"),
        ("and, or", "if not flat and width < 3:", "if not flat or width < 3:"),
        ("not", "if not flat and width < 3:", "if flat and width < 3:"),
        ("comparison", "if not flat and width < 3:", "if not flat and width <= 3:"),
        ("number", "if not flat and width < 3:", "if not flat and width < 4:"),
        ("arithmetic", "return width * height", "return width / height"),
        ("sign", "return width * height", "return -(width * height)"),
    }
    moved = "x = 'é'; y = 1\n\n\nclass Shape:\n" + "\n".join(f"    {line}" for line in FAULTY.splitlines())
    there = list(mutants.mutants(ast.parse(moved), "toy.two"))
    for mutant in found:
        changed = mutants.applied(mutants.located(mutant, there), moved.encode()).decode()
        again = list(mutants.mutants(ast.parse(changed), "toy.two"))
        assert any(mutant.after in (one.before, f"{one.before}:") for one in again)
    assert mutants.located(found[0]._replace(before="height=5"), there) is None
    assert len({mutant.kind for mutant in mutants.drawn(found, 6, seed=0)}) == 6


CHECKOUT = {
    "probes/one.py": "def twice(x) -> float:\n    return abs(x)\n\n\ndef unseen(x) -> float:\n    return abs(x)\n",
    "tests/test_one.py": "from probes.one import twice, unseen\ndef test_one():\n    assert twice(3) == 3\n    unseen(1)\n",
    "tests/test_broken.py": "def test_broken():\n    raise AssertionError\n",
}


@pytest.mark.slow
def test_mutants_are_killed_by_tests_that_pass_without_them_and_a_stopped_run_resumes(tmp_path, monkeypatch):
    mutants, root, out = tool("mutants", monkeypatch), tmp_path / "checkout", tmp_path / "out.jsonl"
    for name, text in CHECKOUT.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    subprocess.run("git init -q && git add .", shell=True, cwd=root, check=True)
    monkeypatch.setattr(mutants, "ROOT", root)
    contexts = CoverageData(str(tmp_path / ".coverage"))
    for test in ("tests/test_broken.py::test_broken|run", "tests/test_one.py::test_one|run", "tests/gone.py::test|run"):
        contexts.set_context(test)
        contexts.add_lines({str(root / "probes/one.py"): [2, 6]})
    wanted = [mutants.Mutant(*mutant[:5]) for mutant in mutants.every(root)]
    assert [mutant.definition for mutant in wanted] == ["twice", "unseen"]
    assert mutants.run(wanted[:1], out, contexts) == {"killed": 1}
    assert mutants.run(wanted, out, contexts) == {"killed": 1, "survived": 1}
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [line["mutant"] for line in lines] == [[*mutant[:5]] for mutant in wanted]  # none twice
    assert lines[0]["by"] == "tests/test_one.py::test_one"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout")
def test_a_checkout_is_small_and_holds_the_pictures_that_its_pages_name(monkeypatch):
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    size = sum((ROOT / name).stat().st_size for name in names)
    assert size == sum(tool("size", monkeypatch).tracked(ROOT).values()) < 25 * 2**20
    pictures = {name for name in names if name.startswith("reports/") and name.endswith((".png", ".svg", ".gif"))}
    named = set()
    for page in (name for name in names if name.endswith((".md", ".ipynb")) and name != "CHANGELOG.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        named |= {name for name in re.findall(r"reports/[\w./@-]+\.(?:png|svg|gif)", text) if "*" not in name}
        beside = re.findall(r"!\[[^\]]*\]\((?!https?:|data:)([^)]+)\)", text)
        named |= {str((ROOT / page).parent.joinpath(link).resolve().relative_to(ROOT)) for link in beside}
    assert pictures == {name for name in named if name.startswith("reports/")}
    assert all((ROOT / name).is_file() for name in named)


def test_a_slim_result_is_read_in_the_place_of_the_whole_one_and_says_what_it_lacks(tmp_path, monkeypatch):
    slim, file = tool("slim", monkeypatch), tmp_path / "sinks" / "sinks-ape.nc"
    values = np.array([1 / 3, -1e-7, 0, np.nan, np.inf, *np.geomspace(1e-9, 123456.789, 95)])
    layer = {"attends": values, "over_tau": values, "large": values * 1e200, "count": np.arange(100)}
    variables = {name: (("layer",), each) for name, each in layer.items()} | {"share": (("head",), np.arange(13) / 12)}
    tokens = torch.ones(2, 3, dtype=torch.long)
    whole = results.dataset(
        variables, tokens=tokens, coords={"document": (("prompt",), ["a", "ä"])}, attrs={"headwater": "1"}
    )
    results.save(whole, file)
    (written,) = slim.made(file)
    assert results.load(file).identical(whole)
    file.unlink()
    small = results.load(file)
    assert written.stat().st_size < 3000
    assert small.attrs["left_out"] == "over_tau, tokens"
    assert set(small.data_vars) == {"attends", "large", "count", "share"}
    assert list(small["document"].values) == ["a", "ä"]
    for name in ("attends", "large"):
        np.testing.assert_allclose(small[name], layer[name], rtol=2.0**-18)
    for name in ("count", "share"):  # few different values, and whole numbers, are exact
        np.testing.assert_array_equal(small[name], whole[name])
    written.write_bytes(written.read_bytes()[:100])
    with pytest.raises(InputError, match="cannot be read"):
        results.load(file)
