"""Do the tests fail where the code is wrong? Small faults are put into it, one at a time, and tests run until one fails.

    python tools/mutants.py --draw mutants.jsonl --count 100 --seed 0
    python tools/mutants.py --run mutants.jsonl --out outcomes.jsonl [--first 3] [--limit 900] [--contexts .coverage]

A mutant flips a comparison, swaps + and - or * and /, moves a number by one, swaps `and` and `or`, drops a `not`, turns the
sign of a returned value, or changes an argument's default; as many of each kind are drawn. Annotations, docstrings, messages
(`raise`, f-strings), `__init__` files and what only type checkers read stay as they are. A mutant is kept as module,
definition, statement and changed statement, so that it is found again after code has moved.

Mutants run in copies of the checkout, two at a time. The test files nearest to the mutant's file by imports come first.
With coverage data (`pytest --cov --cov-context=test` leaves `.coverage`), the tests that reach the mutant's lines, or else
its function, run instead, those of the nearest file first. A test that fails without the mutant, too, does not count. A
stopped run resumes.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

from coverage import CoverageData
from size import imports, named

ROOT = Path(__file__).resolve().parent.parent
WORKERS = 2
PYTEST = ["-m", "pytest", "-xq", "-n", "0", "-p", "no:randomly", "-p", "no:cacheprovider", "-m", "not slow"]
COMPARED = {"Lt": ast.LtE, "LtE": ast.Lt, "Gt": ast.GtE, "GtE": ast.Gt, "Eq": ast.NotEq, "NotEq": ast.Eq}
COMPARED |= {"Is": ast.IsNot, "IsNot": ast.Is, "In": ast.NotIn, "NotIn": ast.In}
SWAPPED = {"Add": ast.Sub, "Sub": ast.Add, "Mult": ast.Div, "Div": ast.Mult, "And": ast.Or, "Or": ast.And}
SIGNED = re.compile(r"^(Tensor|Float|float|int|np\.ndarray|xr\.DataArray)\b")  # annotations of results that have a sign
BODIES = ("body", "orelse", "handlers", "finalbody")
UNSEEN = ("annotation", "returns", "decorator_list", *BODIES)  # of a statement, what is no expression to be changed


class Mutant(NamedTuple):
    """One fault: the statement `before` of a definition becomes `after`."""

    kind: str
    module: str
    definition: str
    before: str
    after: str
    span: tuple[int, int, int, int] = (0, 0, 0, 0)  # what is replaced: line, column, last line, last column, in bytes
    text: str = ""  # by what


def changed(node: ast.AST, signed: bool) -> tuple[str, ast.expr, ast.expr] | None:
    """(kind, what is replaced, by what) for one expression or `return`; `signed`: its function returns numbers."""
    new: Any = copy.deepcopy(node)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        new.ops = [COMPARED[type(node.ops[0]).__name__]()]
        return "comparison", node, new
    if isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op).__name__ in SWAPPED:
        new.op = SWAPPED[type(node.op).__name__]()
        return "arithmetic" if isinstance(node, ast.BinOp) else "and, or", node, new
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return "number", node, ast.Constant(node.value + 1)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return "not", node, new.operand
    if isinstance(node, ast.Return) and signed and node.value is not None:
        return "sign", node.value, ast.UnaryOp(ast.USub(), new.value)
    return None


def defaults(node: ast.FunctionDef) -> Iterator[tuple[str, ast.Constant]]:
    """Names and values of the arguments whose default is a number or a flag."""
    every = [*node.args.posonlyargs, *node.args.args]
    given = every[len(every) - len(node.args.defaults) :]
    values = [*node.args.defaults, *node.args.kw_defaults]
    for argument, value in zip([*given, *node.args.kwonlyargs], values, strict=True):
        if isinstance(value, ast.Constant) and type(value.value) in (bool, int, float):
            yield argument.arg, value


def inner(node: ast.AST) -> Iterator[ast.AST]:
    """A statement and its own expressions."""
    yield node
    for name, value in ast.iter_fields(node):
        if name not in UNSEEN and not isinstance(node, ast.JoinedStr):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from inner(child)


def faults(node: ast.stmt, signed: bool) -> Iterator[tuple[str, str, str, ast.expr, ast.expr]]:
    """(kind, before, after, what is replaced, by what) of a statement without those inside it."""
    if isinstance(node, ast.FunctionDef):
        for name, old in defaults(node):
            new = ast.Constant(not old.value if isinstance(old.value, bool) else old.value + 1)  # type: ignore[operator]
            yield "default", f"{name}={ast.unparse(old)}", f"{name}={ast.unparse(new)}", old, new
    elif not isinstance(node, ast.ClassDef):
        own = copy.copy(node)
        for name in set(BODIES) & set(own._fields):
            setattr(own, name, [])
        for part in inner(own):
            if found := changed(part, signed):
                kind, old, new = found
                before, kept = ast.unparse(own), (old.__class__, old.__dict__)
                old.__class__, old.__dict__ = new.__class__, new.__dict__  # where it stands, until it is written down
                after = ast.unparse(own)
                old.__class__, old.__dict__ = kept
                yield kind, before, after, old, new


def mutants(tree: ast.AST, module: str, definition: str = "", signed: bool = False) -> Iterator[Mutant]:
    """All that can be made of a module, or of what is inside a definition."""
    for node in ast.iter_child_nodes(tree):
        skipped = (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)
        if isinstance(node, skipped) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
            continue
        name, sign = definition, signed
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            name = f"{definition}.{node.name}".lstrip(".")
            sign = isinstance(node, ast.FunctionDef) and bool(node.returns and SIGNED.search(ast.unparse(node.returns)))
        if isinstance(node, ast.stmt):
            for kind, before, after, old, new in faults(node, sign):
                span = (old.lineno, old.col_offset, old.end_lineno or 0, old.end_col_offset or 0)
                yield Mutant(kind, module, name, before, after, span, f"({ast.unparse(new)})")
        yield from mutants(node, module, name, sign)


def every(root: Path) -> list[Mutant]:
    """The mutants of `probes` and `toy`."""
    files = sorted(file for package in ("probes", "toy") for file in (root / package).rglob("*.py"))
    names = {file: ".".join(file.relative_to(root).with_suffix("").parts) for file in files if file.stem != "__init__"}
    return [mutant for file, name in names.items() for mutant in mutants(ast.parse(file.read_bytes()), name)]


def drawn(found: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """As many of each kind, by a fixed seed."""
    chance, kinds = random.Random(seed), sorted({mutant.kind for mutant in found})
    queues = [[mutant for mutant in found if mutant.kind == kind] for kind in kinds]
    for queue in queues:
        chance.shuffle(queue)
    return [mutant for at in range(count) for queue in queues for mutant in queue[at : at + 1]][:count]


def located(mutant: Mutant, found: list[Mutant]) -> Mutant | None:
    """The same mutant in a tree that may have moved it; a definition of that name goes first, then that module."""
    last = mutant.definition.rpartition(".")[2]
    same = [one for one in found if one[3:5] == mutant[3:5] and (last in one.definition or mutant.kind != "default")]

    def strange(one: Mutant) -> tuple[bool, bool, bool]:
        return one.definition.rpartition(".")[2] != last, one.module != mutant.module, one[:5] != mutant[:5]

    return min(same, key=strange, default=None)


def applied(mutant: Mutant, source: bytes) -> bytes:
    """The file's text with the mutant in it."""
    lines, (first, column, last, end) = source.splitlines(keepends=True), mutant.span
    before, behind = [*lines[: first - 1], lines[first - 1][:column]], [lines[last - 1][end:], *lines[last:]]
    return b"".join([*before, mutant.text.encode(), *behind])


def reaching(root: Path) -> dict[str, list[str]]:
    """By module, the test files that import it, the nearest by imports first, of these the one that bears its name."""
    contents = ast.parse((root / "probes" / "__init__.py").read_bytes())
    nodes = [node for node in ast.walk(contents) if isinstance(node, ast.ImportFrom) and node.level]
    public = {one.asname or one.name: f"probes.{node.module}" for node in nodes for one in node.names}
    graph, near = imports(root), {}
    for file in sorted((root / "tests").glob("*.py")):  # `probes.NAME` in them imports the module that has it
        used = re.findall(r"\bprobes\.(\w+)", text := file.read_text(encoding="utf-8"))
        graph[file.stem] = named(ast.parse(text), file.stem, False) | {public[name] for name in used if name in public}
    for test in (name for name in graph if name.startswith("test_")):
        distances, ring = {test: 0}, {test}
        while ring := {name for one in ring for name in graph[one] if name in graph and name not in distances}:
            distances |= dict.fromkeys(ring, max(distances.values()) + 1)
        for module, distance in distances.items():
            strange = module.rpartition(".")[2] not in test
            near.setdefault(module, []).append((distance, strange, f"tests/{test}.py"))
    return {module: [test for _, _, test in sorted(tests)] for module, tests in near.items()}


def copied(folder: Path) -> Path:
    """A copy of what git tracks; reports, which nothing writes, are a link."""
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        if (ROOT / name).is_file() and not name.startswith("reports/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / "reports").symlink_to(ROOT / "reports")
    return folder


def fallen(folder: Path, tests: list[str], seconds: float) -> str:
    """The first test that fails; "" if none does, "time" if none did in time."""
    command = ["env", f"PYTHONPATH={folder}", "PYTHONDONTWRITEBYTECODE=1", sys.executable, *PYTEST, *tests]
    try:
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        return "time"
    test = re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
    return (
        test[1] if test else "" if run.returncode in (0, 5) else "pytest"
    )  # 5: no tests; a fault may break pytest itself


def judged(mutant: Mutant, folder: Path, groups: list[list[str]], limit: float) -> dict[str, Any]:
    """Run test files, or single tests, until one fails that passes without the mutant."""
    file = folder / f"{mutant.module.replace('.', '/')}.py"
    source, until, broken = file.read_bytes(), time.monotonic() + limit, []
    for tests in groups:
        while True:
            file.write_bytes(applied(mutant, source))
            by = fallen(folder, [*tests, *(f"--deselect={name}" for name in broken)], until - time.monotonic())
            file.write_bytes(source)
            if by == "time":
                return {"outcome": "time", "by": tests[0]}
            if by and by not in broken and not fallen(folder, tests if by == "pytest" else [by], limit):
                return {"outcome": "killed", "by": by}
            if not by or by in broken:  # in spite of being left out: the file itself cannot be read
                break
            broken.append(by)
    return {"outcome": "survived", "by": f"{sum(map(len, groups))} tests or files of tests"}


def tests_of(mutant: Mutant, contexts: CoverageData) -> set[str]:
    """The tests that reach the mutant's lines; none of them is a line that runs alone on import: then its function's."""
    file = f"{mutant.module.replace('.', '/')}.py"
    reached = contexts.contexts_by_lineno(file)
    spans = [(mutant.span[0], mutant.span[2])]
    functions = (node for node in ast.walk(ast.parse((ROOT / file).read_bytes())) if isinstance(node, ast.FunctionDef))
    spans += [
        (one.lineno, one.end_lineno or 0) for one in functions if one.lineno <= spans[0][0] <= (one.end_lineno or 0)
    ]
    for first, last in (spans[0], spans[-1]):
        if found := {name for line in range(first, last + 1) for name in reached.get(line, []) if name}:
            found = {name.split("|")[0] for name in found}
            return {name for name in found if (ROOT / name.split("::")[0]).is_file()}  # some may have moved since
    return set()


def nearest_first(tests: list[str], files: list[str]) -> list[list[str]]:
    """Single tests in two groups, those of the nearest file first; every file by itself where there are no single tests."""
    if not tests:
        return [[file] for file in files]
    first = min(
        {test.split("::")[0] for test in tests}, key=lambda file: files.index(file) if file in files else len(files)
    )
    groups = [[test for test in tests if (test.split("::")[0] == first) == near] for near in (True, False)]
    return [group for group in groups if group]


def run(wanted: list[Mutant], out: Path, limit: float, contexts: CoverageData | None) -> dict[Mutant, dict[str, Any]]:
    """The outcome of each mutant; those in the file `out` are taken from there."""
    kept = map(json.loads, out.read_text(encoding="utf-8").splitlines() if out.exists() else [])
    outcomes = {Mutant(*one.pop("mutant")): one for one in kept}
    found, reach = every(ROOT), reaching(ROOT)
    free: Queue[Path] = Queue()

    def judge(mutant: Mutant) -> tuple[Mutant, dict[str, Any]]:
        if (here := located(mutant, found)) is None:
            return mutant, {"outcome": "lost"}
        tests = sorted(tests_of(here, contexts)) if contexts else []
        folder = free.get()
        try:
            return mutant, judged(here, folder, nearest_first(tests, reach.get(here.module, [])), limit)
        finally:
            free.put(folder)

    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(WORKERS) as pool:
        for n in range(WORKERS):
            free.put(copied(Path(scratch, str(n))))
        left = [pool.submit(judge, mutant) for mutant in wanted if mutant not in outcomes]
        for mutant, outcome in (future.result() for future in as_completed(left)):
            outcomes[mutant] = outcome
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"mutant": mutant[:5], **outcome}) + "\n")
            print(f"{outcome['outcome']}: {mutant.module}, {mutant.definition} ({outcome.get('by')})", flush=True)
    return {mutant: outcomes[mutant] for mutant in wanted}


def main() -> None:
    """Draw, or run and print what was not killed."""
    given = argparse.ArgumentParser(description="Small faults, and whether tests find them.")
    option = given.add_argument
    option("--draw", type=Path, help="file for mutants, a JSON line each")
    option("--count", type=int, default=100)
    option("--seed", type=int, default=0)
    option("--run", type=Path, help="file with mutants")
    option("--out", type=Path, default=Path("outcomes.jsonl"), help="file for outcomes")
    option("--first", type=int, help="how many to run")
    option("--limit", type=float, default=900.0, help="seconds for one mutant")
    option("--contexts", type=Path, help="coverage data with contexts")
    asked = given.parse_args()
    if asked.draw:
        lines = [json.dumps(mutant[:5]) + "\n" for mutant in drawn(every(ROOT), asked.count, asked.seed)]
        asked.draw.write_text("".join(lines), encoding="utf-8")
    if asked.run:
        wanted = [Mutant(*json.loads(line)) for line in asked.run.read_text(encoding="utf-8").splitlines()]
        contexts = CoverageData(str(asked.contexts)) if asked.contexts else None
        if contexts:
            contexts.read()
        found = run(wanted[: asked.first], asked.out, asked.limit, contexts)
        for mutant, outcome in found.items():
            if outcome["outcome"] != "killed":
                print(f"\n{outcome['outcome']} ({mutant.kind}): {mutant.module}, {mutant.definition}")
                print(f"- {mutant.before}\n+ {mutant.after}")
        print(dict(Counter(outcome["outcome"] for outcome in found.values())))


if __name__ == "__main__":
    main()
