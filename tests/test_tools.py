"""The scripts in tools/: every step of `make llm` is a command that exists; noise, sizes and mutants are what they say."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from transformers import AutoModelForCausalLM
from typer.main import get_command

import probes
from probes.cli.main import app
from probes.errors import InputError
from probes.models.load import CHECKPOINTS
from probes.models.packed import unpacked
from probes.results import dataset as results
from probes.results.folder import collect

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "tools"


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch):
    """Scripts import each other by their bare names, as those of one folder do."""
    monkeypatch.syspath_prepend(str(TOOLS))
    yield
    for name in ("size", "slim"):
        sys.modules.pop(name, None)


def tool(name: str):
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_steps_are_commands_with_results_of_their_own():
    steps = tool("llm").STEPS
    assert len({step.name for step in steps}) == len({step.result for step in steps}) == len(steps)
    commands = get_command(app).commands  # type: ignore[attr-defined]
    for step in steps:
        if step.kind == "paths":
            assert (TOOLS.parent / step.arguments[0]).is_file()
            continue
        _, _, command, *arguments = step.arguments
        commands[command].make_context(command, arguments)  # raises for an option or a value that does not exist


def test_noise_is_uniform_within_half_a_step_and_what_is_not_quantized_stays():
    noisy, random = tool("noise").noisy, np.random.default_rng(0)
    weights = random.normal(size=(64, 256)).astype(np.float32)
    for kind in (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0):
        data = quantize(weights, kind)
        values = dequantize(data, kind).reshape(-1, 32)
        step = np.array([np.diff(np.unique(block)).min() for block in values])[:, None]
        moved = (noisy(data, kind, random).reshape(-1, 32) - values) / step
        assert 0.48 < np.abs(moved).max() < 0.51  # values are multiples of the step, up to float16
        assert abs(moved.std() - 12**-0.5) < 0.005
    np.testing.assert_array_equal(noisy(weights, GGMLQuantizationType.F32, random), weights)


def test_sigmoid_attention_looks_back_with_weights_of_each_key_alone():
    sigmoid, random = tool("sigmoid"), torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 5, 3, generator=random, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, 5, 3, generator=random, dtype=torch.float64)
    output, weights = sigmoid.sigmoid_attention(None, query, key, value, None, scaling=0.5)
    for head in range(4):
        for i in range(5):
            logits = key[1, head // 2, : i + 1] @ query[1, head, i] / 2
            expected = 1 / (1 + 128 * torch.exp(-logits))  # e^-b is the length of training
            torch.testing.assert_close(weights[1, head, i, : i + 1], expected)
            torch.testing.assert_close(output[1, i, head], expected @ value[1, head // 2, : i + 1])
    assert not weights.triu(1).any()


def test_both_attentions_are_measured_as_probes_measure():
    sigmoid = tool("sigmoid")
    view = probes.load("tiny-llama")
    with unpacked(CHECKPOINTS / "tiny-llama", "tiny-llama", None, lasting=False) as folder:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokens = torch.randint(view.spec.vocabulary, (16, 128), generator=torch.Generator().manual_seed(0))
    exact = probes.jacobian(view, tokens[:1, :32])["elasticity"].values[0]
    np.testing.assert_allclose(sigmoid.elasticity(model, tokens[0, :32]), exact, rtol=1e-3)
    gains = sigmoid.gains(model, tokens)
    assert (gains[:-1] > 0.1).all()  # a trained model copies
    np.testing.assert_allclose(
        sigmoid.gains(model, tokens[:1].expand(4, -1)), 0, atol=1e-12
    )  # all passages are the same


def test_a_folder_without_runs_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["runs", str(tmp_path), "a", "b", "--out", str(tmp_path / "table.md")])
    with pytest.raises(SystemExit, match=r"has no results named KIND/KIND-a-seedN.nc"):
        tool("runs").main()
    assert not list(tmp_path.iterdir())


TREE = {
    "probes/__init__.py": "from .report.page import page\n",  # the table of contents does not count
    "probes/errors.py": "class Error(ValueError):\n    pass\n",
    "probes/run/__init__.py": "",
    "probes/run/files.py": "import json\nfrom ..errors import Error\n",
    "probes/report/__init__.py": "",
    "probes/report/page.py": "def page():\n    from ..run import files\n\n    return files\n",
    "probes/report/page.css": "a {\n}\n",
    "probes/checkpoints/tiny/config.json": "{}\n",
    "toy/__init__.py": "",
    "toy/one.py": "from typing import TYPE_CHECKING\nfrom probes import errors\nfrom .two import b\na = 1\n",
    "toy/two.py": "def b():\n    from .one import a\n    return a\n",
    "toy/three.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .four import d\nc = 1\n",
    "toy/four.py": "from .three import c\nd = c\n",
    "tests/test_all.py": "x = 1\n" * 451,
}


def test_size_counts_a_tree(tmp_path):
    size = tool("size")
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert size.counted(size.files(tmp_path, "probes")) == (11, 8)
    graph = size.imports(tmp_path)
    assert graph["probes.report.page"] == {"probes.run.files"}
    assert [group for group in size.components(graph) if len(group) > 1] == [["toy.one", "toy.two"]]
    assert size.floors(size.rooms(graph)) == 3  # errors, run, report; toy stands beside run
    assert size.floors({"a": {"b"}, "b": {"a", "c"}, "c": set()}) == 2
    said = "\n".join(size.report(tmp_path))
    assert "1 files over 450 lines\n    451  tests/test_all.py" in said
    assert "4 rooms on 3 floors\n1 circles\n  toy.one, toy.two" in said
    assert size.milliseconds(tmp_path, ["-c", "pass"]) > 0


FAULTY = """
def area(width: float, height: float = 2, *, flat: bool = False) -> float:
    \"\"\"Not 1, not `a < b`.\"\"\"
    if not flat and width < 3:
        raise ValueError(f"{width + 1} is not 2" + str(4))
    return width * height
"""


def test_mutants_of_a_function_are_all_there_apply_and_are_found_after_a_move():
    mutants = tool("mutants")
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
        here = mutants.located(mutant, there)
        assert here.definition == "Shape.area"
        changed = mutants.applied(here, moved.encode()).decode()
        again = list(mutants.mutants(ast.parse(changed), "toy.two"))
        assert any(mutant.after in (one.before, f"{one.before}:") for one in again)
    assert mutants.located(found[0]._replace(before="height=5"), there) is None
    assert mutants.applied(there[0], moved.encode()).decode().startswith("x = 'é'; y = (2)\n")
    assert mutants.drawn(found, 6, seed=0) == mutants.drawn(found, 6, seed=0)
    assert len({mutant.kind for mutant in mutants.drawn(found, 6, seed=0)}) == 6


def test_test_files_come_in_the_order_of_their_distance():
    reach = tool("mutants").reaching(TOOLS.parent)
    assert reach["probes.measures.sinks"][0] == "tests/test_sinks.py"
    assert reach["toy.train"].index("tests/test_toy_train.py") < reach["toy.train"].index("tests/test_tools.py")


def tracked() -> list[str]:
    found = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return [name for name in found.split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout")
def test_a_checkout_is_small_and_holds_the_pictures_that_its_pages_name():
    names = tracked()
    assert sum((ROOT / name).stat().st_size for name in names) < 25 * 2**20
    assert sum(tool("size").tracked(ROOT).values()) == sum((ROOT / name).stat().st_size for name in names)
    pictures = {name for name in names if name.startswith("reports/") and name.endswith((".png", ".svg", ".gif"))}
    named = set()
    for page in (name for name in names if name.endswith((".md", ".ipynb")) and name != "CHANGELOG.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        named |= {name for name in re.findall(r"reports/[\w./@-]+\.(?:png|svg|gif)", text) if "*" not in name}
        beside = re.findall(r"!\[[^\]]*\]\((?!https?:|data:)([^)]+)\)", text)
        named |= {str((ROOT / page).parent.joinpath(link).resolve().relative_to(ROOT)) for link in beside}
    assert pictures == {name for name in named if name.startswith("reports/")}
    assert all((ROOT / name).is_file() for name in named)


def test_a_slim_result_is_read_in_the_place_of_the_whole_one_and_says_what_it_lacks(tmp_path):
    slim, values = tool("slim"), np.array([1 / 3, -1e-7, 0, np.nan, np.inf, *np.geomspace(1e-9, 123456.789, 95)])
    variables = {
        "attends": (("layer",), values),
        "over_tau": (("layer",), values),
        "large": (("layer",), values * 1e200),
        "count": (("layer",), np.arange(100)),
        "share": (("head",), np.arange(13) / 12),
        "pattern": (("picture", "layer"), values[None]),
    }
    coords = {"picture_head": (("picture",), [3]), "document": (("prompt",), ["a", "ä"])}
    whole = results.dataset(
        variables, tokens=torch.ones(2, 3, dtype=torch.long), coords=coords, attrs={"headwater": "1"}
    )
    folder = tmp_path / "sinks"
    results.save(whole, folder / "sinks-ape.nc")
    (written,) = slim.made(folder / "sinks-ape.nc")
    assert collect(tmp_path)["sinks"]["ape"].identical(results.load(folder / "sinks-ape.nc"))  # the whole one
    (folder / "sinks-ape.nc").unlink()
    small = results.load(folder / "sinks-ape.nc")
    assert list(collect(tmp_path).files.values()) == [folder / "sinks-ape.nc"]
    assert written.stat().st_size < 3000
    assert small.attrs["left_out"] == "over_tau, pattern, tokens"
    assert set(small.data_vars) == {"attends", "large", "count", "share"}
    assert set(small.coords) == {"document", "prompt", "position"}
    assert list(small["document"].values) == ["a", "ä"]
    for name, scale in (("attends", 1), ("large", 1e200)):
        np.testing.assert_allclose(small[name], values * scale, rtol=2.0**-18)
    for name in ("count", "share"):  # few different values, and whole numbers, are exact
        np.testing.assert_array_equal(small[name], whole[name])
    written.write_bytes(written.read_bytes()[:100])
    with pytest.raises(InputError, match="cannot be read"):
        results.load(folder / "sinks-ape.nc")
