"""Notebooks: committed as they ran, fit to be read without running them, and still running from top to bottom."""

import ast
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

nbformat: Any = pytest.importorskip("nbformat")
NotebookClient: Any = pytest.importorskip("nbclient").NotebookClient

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MACHINE = re.compile(r"(?<![\w.])/(?:tmp|home|work|root|Users)\b")  # where absolute paths begin
SKETCH = re.compile(r'method="sketch"(, products=\d+)?')
SHOWING = {"display", "print", "show"}

# What the run from top to bottom replaces, besides the number of products, so that it takes seconds: sizes, and nothing
# else. What the committed outputs show is of the sizes in the file; HEADWATER_FULL_NOTEBOOKS=1 runs those.
SMALLER = {
    "11-how-far-position-reaches": "n=48, length=64 > n=8, length=16",
    "1-birth-and-training": "n=2, length=128 > n=1, length=24 | LENGTH, PROMPTS = 128, 3 > LENGTH, PROMPTS = 24, 1"
    " | n=2 > n=1",
    "2-sink-reading-heads": "n=8, length=96 > n=2, length=32 | starts=24 > starts=8 | effect_prompts=4 > effect_prompts=1"
    ' | n=32, length=64 > n=4, length=48 | "products": 32 > "products": 16 | "bootstrap": 200 > "bootstrap": 20',
    "3-where-absolute-position-comes-from": "n=192, length=64 > n=16, length=64 | n=192, length=48 > n=8, length=48"
    ' | "bootstrap": 200 > "bootstrap": 20',
    "4-toys-beside-models": "LENGTH, PROMPTS, SEEDS = 128, 4, 2 > LENGTH, PROMPTS, SEEDS = 32, 2, 2 | n=64 > n=16"
    " | bootstrap=100 > bootstrap=10 | steps=150 > steps=20 | TOY_SEEDS = 4 > TOY_SEEDS = 2 | batch=64 > batch=8",
    "5-your-own-checkpoint": "LENGTH = 96 > LENGTH = 48 | n=16 > n=6 | bootstrap=200 > bootstrap=20 | starts=16 > starts=8",
    "6-why-is-the-middle-lost": "",
    "7-retrieval-without-positions": '"steps": 1000, "sequences": 2048 > "steps": 40, "sequences": 64',
    "8-a-previous-token-head": '"steps": 3000, "test": 512 > "steps": 1500, "test": 64',
    "9-position-bias-in-context": '"steps": 200, "tests": 200 > "steps": 5, "tests": 20',
    "10-sensitivity-in-context": "",
    "12-brake-and-bias": "n=8, length=64 > n=2, length=24",
    "theory": "draws=300 > draws=20 | range(32) > range(4) | (1, 4, 32) > (1, 2, 4) | ratio[32:96] > ratio[8:24]"
    " | WIDTH, BLOCKS, LENGTH, SEEDS = 128, 6, 64, 6 > WIDTH, BLOCKS, LENGTH, SEEDS = 32, 3, 32, 2"
    " | n=2, length=128 > n=1, length=32",
}

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def source_of(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def shows_something(source: str) -> bool:
    """Does the code end in an expression, or call `display`, `print` or `show` outside the functions it defines?"""
    body = ast.parse(source).body
    nodes = [node for part in body if not isinstance(part, ast.FunctionDef) for node in ast.walk(part)]
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    shown = any(isinstance(function, ast.Name) and function.id in SHOWING for function in calls)
    return shown or (bool(body) and isinstance(body[-1], ast.Expr))


def sizes(name: str) -> list[tuple[str, str]]:
    """Those of a notebook's file, and of its quick run."""
    parted = (one.partition(" > ") for one in SMALLER[name].split(" | ") if one)
    return [(size, small) for size, _, small in parted]


def smaller(source: str, name: str) -> str:
    """A cell's source with its sizes replaced."""
    for size, small in sizes(name):
        source = source.replace(size, small)
    return SKETCH.sub('method="sketch", products=16', source)


@every_notebook
def test_committed_as_it_ran_without_traces_of_a_machine(path):
    """Every cell was run, in order and once; what shows something has its output; nothing failed or warned."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        types = {out["output_type"] for out in cell["outputs"]}
        assert "error" not in types, cell["id"]
        assert not any(out.get("name") == "stderr" for out in cell["outputs"]), cell["id"]
        assert bool(types) == shows_something(source_of(cell)), cell["id"]
    assert path.stat().st_size < 1_000_000
    # But for its figures' bytes, in which anything might be spelled.
    assert MACHINE.findall(re.sub(r'"image/[^"]*": ("[^"]*"|\[[^]]*\])', "", json.dumps(notebook))) == []
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert "version" not in notebook["metadata"].get("language_info", {})  # of the Python that happened to run it
    assert not any("execution" in cell["metadata"] for cell in notebook["cells"])  # times of day


@pytest.mark.slow
def test_run_from_top_to_bottom(tmp_path, monkeypatch):
    """Smaller copies in an empty folder: none fails, none writes there, each shows what the file shows, tables word by word.

    One process runs them all, names forgotten in between: to import everything takes longer than the cells do.
    """
    empty, home = tmp_path / "empty", tmp_path / "home"
    for folder in (empty, home):
        folder.mkdir()
    for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(variable, str(home / variable.lower()))
    full = os.environ.get("HEADWATER_FULL_NOTEBOOKS") == "1"
    every, committed = nbformat.v4.new_notebook(), []
    assert SMALLER.keys() == {path.stem for path in NOTEBOOKS}
    for n, path in enumerate(NOTEBOOKS):
        cells = code_cells(json.loads(path.read_text(encoding="utf-8")))
        whole = "\n".join(map(source_of, cells))
        assert all(size in whole for size, _ in sizes(path.stem))
        for cell in cells:
            source = source_of(cell) if full else smaller(source_of(cell), path.stem)
            every.cells.append(nbformat.v4.new_code_cell(source, id=f"{n}-{cell['id']}"))
            committed.append((path.stem, cell))
        every.cells.append(nbformat.v4.new_code_cell("%reset -f", id=f"{n}-forget"))
    NotebookClient(every, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(empty)}}).execute()
    assert list(empty.iterdir()) == []
    ran = [cell for cell in code_cells(every) if not cell["id"].endswith("-forget")]
    same = dict.fromkeys(SMALLER, True)  # until a size was replaced, tables of committed results are today's
    for (name, before), after in zip(committed, ran, strict=True):
        same[name] &= source_of(before) == source_of(after)
        shown = [
            [(out["output_type"], *sorted(data), same[name] and "".join(data.get("text/markdown", "")))
             for out in cell["outputs"] for data in [out.get("data", {})]] for cell in (before, after)
        ]  # fmt: skip
        assert shown[0] == shown[1], (name, before["id"])
