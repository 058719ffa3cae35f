"""Imports point one way, down the folders, read from the source text of every module; those inside functions count, too."""

import ast
from importlib.util import resolve_name
from pathlib import Path

ROOT = Path(__file__).parent.parent
# From the ground up. Folders of one row know nothing of each other; a folder may import those of the rows below it.
LAYERS = (
    ("probes.errors",),
    ("probes.run",),
    ("probes.models", "probes.results"),
    ("probes.data", "probes.theory"),
    ("probes.charts",),
    ("probes.measure", "probes.options"),
    ("probes.headlines",),
    ("probes.measures",),
    ("probes.compare",),
    ("probes.loop", "probes.selftest"),
    ("probes.claims",),
    ("toy",),
    ("probes.report",),
    ("probes.cli",),
    ("probes.__main__",),
)
CONTENTS = "probes"  # the table of contents: it names modules of every layer and imports none before it is asked
ADAPTERS = {"probes.models.huggingface", "probes.models.lens"}
BELOW_ADAPTERS = {"probes.models.fresh"}
LOADING = {"probes.models.load", "probes.models.named"}  # may import adapters
READERS = {f"probes.models.gguf.{name}" for name in ("config", "tensors")}  # of what only it can read
MAY_IMPORT_TRANSFORMERS = ADAPTERS | BELOW_ADAPTERS | LOADING | READERS
KNOW_TOY = ("probes.cli", "probes.__main__", "toy")


def imported(source: str, module: str, *, package: bool) -> set[str]:
    """Full names of all modules that `source` imports, at the top or inside functions, relative ones resolved.

    `from a import b` counts as both `a` and `a.b`, since b may be a module.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            own = module if package else module.rpartition(".")[0]
            base = resolve_name("." * node.level + (node.module or ""), own)
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return found


def modules(*folders: str) -> dict[str, set[str]]:
    """By module, the modules it imports."""
    found = {}
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if package else parts)
            found[name] = imported(file.read_text(encoding="utf-8"), name, package=package)
    return found


MODULES = modules("probes", "toy")


def folder_of(module: str) -> str:
    """The folder of `LAYERS` that a module is in."""
    (folder,) = (name for row in LAYERS for name in row if f"{module}.".startswith(f"{name}."))
    return folder


def layer_of(module: str) -> int:
    """The row of `LAYERS` that a module is in."""
    return next(n for n, row in enumerate(LAYERS) if folder_of(module) in row)


def known(module: str) -> set[str]:
    """The modules of ours that a module imports; `from .a import b` is `a.b` where that is a module, else `a`."""
    names = MODULES[module] & set(MODULES) - {module, CONTENTS}
    return {name for name in names if not any(other.startswith(f"{name}.") for other in names)}


def test_modules_import_downwards_only():
    for module, names in MODULES.items():
        if module == CONTENTS:
            continue
        for name in sorted(known(module)):
            assert layer_of(name) < layer_of(module) or folder_of(name) == folder_of(module), f"{module} -> {name}"
        unknown = {"tests", "notebooks", "benchmarks", "tools", "reports", "reference", "conftest"}
        if not module.startswith(KNOW_TOY):
            unknown |= {"toy"}
        if module.startswith("probes") and module not in MAY_IMPORT_TRANSFORMERS:
            unknown |= {"transformers", "transformer_lens"}
        assert not {name.split(".")[0] for name in names} & unknown, module
        # A bridge runs a transformers decoder, and its view is one of that, hooked elsewhere.
        allowed = {"probes.models.huggingface"} if module == "probes.models.lens" else set()
        assert module in LOADING or names & ADAPTERS == allowed, module


def test_no_modules_import_each_other_in_a_circle():
    assert {"probes", "probes.__main__", "probes.models.view", "toy", "toy.pretrain"} <= set(MODULES)
    graph = {module: known(module) for module in MODULES if module != CONTENTS}
    while leaves := [module for module, names in graph.items() if not names & set(graph)]:
        graph = {module: names for module, names in graph.items() if module not in leaves}
    # What is left are the circles and those above them; without those that nothing left imports, the circles alone.
    while tops := [module for module in graph if not any(module in names for names in graph.values())]:
        graph = {module: names for module, names in graph.items() if module not in tops}
    assert not {module: sorted(names & set(graph)) for module, names in graph.items()}


def test_views_stand_alone_and_toys_are_trained_without_results_or_figures():
    assert known("probes.models.view") == {"probes.models.initialization"}
    assert known("probes.models.initialization") == {"probes.errors"}
    for module in MODULES:
        if module.startswith("toy.") and not module.startswith(("toy.experiments", "toy.match")):
            below = {name for name in known(module) if name.startswith("probes.")} - {"probes.options"}
            assert all(layer_of(name) <= layer_of("probes.data") for name in below), module
            assert not any(name.startswith("toy.experiments") for name in known(module)), module
