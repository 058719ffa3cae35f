"""Imports point one way, read from the source text of every module."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ADAPTERS = {"probes.models.huggingface", "probes.models.lens"}
LOADING = {"probes.models.load", "probes.models.named", "probes.models.gguf_config"}  # may import adapters
READERS = {"probes.models.gguf_tensors", "probes.models.gguf_tokenizer"}  # of what only transformers can read
MAY_IMPORT_TRANSFORMERS = ADAPTERS | LOADING | READERS
TOY_MAY_IMPORT = {
    "probes.models.view",
    "probes.models.fused",
    "probes.models.initialization",
    "probes.models.checkpoint",
    "probes.text",
    "probes.files",
    "probes.errors",
}
# What runs an experiment and draws it makes results and figures as the probes do, and judges by their theory.
EXPERIMENTS_MAY_IMPORT = TOY_MAY_IMPORT | {
    "probes.claims",
    "probes.gate",
    "probes.mixing",
    "probes.plots",
    "probes.plots.style",
    "probes.profiles",
    "probes.results",
    "probes.sinks",
    "probes.sources.judging",
    "probes.statistics",
    "probes.studies",
    "probes.studies.survey",
    "probes.studies.tables",
    "probes.summary",
}


def imported(source: str, module: str, *, package: bool) -> set[str]:
    """Full names of all modules that `source` imports, at the top or inside functions, relative ones resolved.

    `from a import b` counts as both `a` and `a.b`, since b may be a module.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".") if package else module.split(".")[:-1]
                parents = parents[: len(parents) - (node.level - 1)]
                base = ".".join([*parents, *([base] if base else [])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return found


def modules(folder: str) -> dict[str, set[str]]:
    found = {}
    for file in sorted((ROOT / folder).rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if package else parts)
        found[name] = imported(file.read_text(encoding="utf-8"), name, package=package)
    return found


def known(names: set[str], graph: dict[str, set[str]]) -> set[str]:
    """Those of `names` that are modules; `probes.errors.InputError` is none."""
    return names & set(graph)


def imports_package(names: set[str], *packages: str) -> bool:
    return any(name.split(".")[0] in packages for name in names)


PROBES, TOY = modules("probes"), modules("toy")


def test_reader_of_imports_sees_every_form():
    lines = ["import a.b", "from c import d", "from . import e", "from .f import g", "from ..h import i"]
    source = "\n".join([*lines, "def f():", "    from j import k"])
    expected = {"a.b", "c", "c.d", "p.q", "p.q.e", "p.q.f", "p.q.f.g", "p.h", "p.h.i", "j", "j.k"}
    assert imported(source, "p.q.r", package=False) == expected
    assert imported("from .f import g", "p.q", package=True) == {"p.q.f", "p.q.f.g"}


def test_all_modules_were_found():
    assert {"probes", "probes.__main__", "probes.models.view", "probes.models.huggingface"} <= set(PROBES)
    assert {"toy", "toy.pretrain", "toy.recipes"} <= set(TOY)
    assert "probes.errors" in PROBES["probes.files"]


@pytest.mark.parametrize("module", sorted(PROBES))
def test_probes_module_imports_downwards_only(module):
    names = PROBES[module]
    if module != "probes.__main__":
        assert not imports_package(names, "toy")
        assert "probes.__main__" not in names
    if module not in MAY_IMPORT_TRANSFORMERS:
        assert not imports_package(names, "transformers", "transformer_lens")
    if (
        module == "probes.models.lens"
    ):  # a bridge runs a transformers decoder: its view is one of that, hooked elsewhere
        assert names & ADAPTERS == {"probes.models.huggingface"}
    elif module not in LOADING:
        assert not names & ADAPTERS
    assert not imports_package(names, "tests", "notebooks", "benchmarks", "reports", "reference", "conftest")


def test_view_stands_alone():
    assert known(PROBES["probes.models.view"], PROBES) == {"probes.models.initialization"}
    assert known(PROBES["probes.models.initialization"], PROBES) == {"probes.errors"}


@pytest.mark.parametrize("module", sorted(TOY))
def test_toy_module_imports_only_what_it_may_of_probes(module):
    names = TOY[module]
    of_probes = known(names, PROBES) - {"probes", "probes.models"}
    allowed = EXPERIMENTS_MAY_IMPORT if module.startswith(("toy.experiments", "toy.plots")) else TOY_MAY_IMPORT
    assert of_probes <= allowed
    beneath = {name for name in names if name.startswith("probes.")} - {"probes.models"}
    assert all(any(name == may or name.startswith(f"{may}.") for may in allowed) for name in beneath)
    if not module.startswith(("toy.experiments", "toy.plots")):
        assert not any(name.startswith(("toy.experiments", "toy.plots")) for name in names)
    assert "probes" not in {name for name in names if not any(other.startswith(f"{name}.") for other in names)}
    assert not imports_package(names, "tests", "notebooks", "benchmarks", "reports", "reference", "conftest")
