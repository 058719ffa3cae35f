"""Do the tests fail where the code is wrong? Small faults are put into it, one at a time, and tests run until one fails.

    python tools/mutants.py --draw mutants.jsonl --count 100 --seed 0
    pytest --cov --cov-context=test      # which tests reach which lines, into .coverage
    python tools/mutants.py --run mutants.jsonl --out outcomes.jsonl [--contexts .coverage]

A mutant flips a comparison, swaps + and - or * and /, moves a number by one, swaps `and` and `or`, drops a `not`, turns the
sign of a returned value, or changes an argument's default; as many of each kind are drawn. Annotations, docstrings, messages
(`raise`, f-strings), `__init__` files and what only type checkers read stay as they are. A mutant is kept as module,
definition, statement and changed statement, so that it is found again after code has moved.

Each mutant runs in a copy of the tracked files, two at a time. The tests that reach its lines run, or else those that reach
its function; a file that bears the module's name goes first. A test that fails without the mutant, too, does not count. A
stopped run resumes.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from coverage import CoverageData

ROOT = Path(__file__).resolve().parent.parent
WORKERS = 2
LIMIT = 900.0  # seconds for one mutant
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
    positional = [*node.args.posonlyargs, *node.args.args]
    with_default = positional[len(positional) - len(node.args.defaults) :]
    for argument, value in (*zip(with_default, node.args.defaults), *zip(node.args.kwonlyargs, node.args.kw_defaults)):  # noqa: B905
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


def fallen(folder: str, tests: list[str], seconds: float) -> str:
    """The first test that fails; "" if none does, "time" if none did in time."""
    command = ["env", f"PYTHONPATH={folder}", "PYTHONDONTWRITEBYTECODE=1", sys.executable, *PYTEST, *tests]
    try:
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        return "time"
    test = re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
    # 5: no tests were run; a fault may break pytest itself.
    return test[1] if test else "" if run.returncode in (0, 5) else "pytest"


def judged(mutant: Mutant, tests: list[str]) -> dict[str, Any]:
    """Run tests until one fails that passes without the mutant."""
    until, left = time.monotonic() + LIMIT, list(tests)
    with tempfile.TemporaryDirectory() as folder:
        copy_files = f"git ls-files -z | tar -c --null -T - --ignore-failed-read | tar -x -C {folder}"
        subprocess.run(copy_files, shell=True, cwd=ROOT, check=True, stderr=subprocess.DEVNULL)
        file = Path(folder, f"{mutant.module.replace('.', '/')}.py")
        source = file.read_bytes()
        while left:
            file.write_bytes(applied(mutant, source))
            by = fallen(folder, left, until - time.monotonic())
            file.write_bytes(source)
            if by == "time":
                return {"outcome": "time", "by": f"{len(left)} tests"}
            if by and not fallen(folder, left if by == "pytest" else [by], LIMIT):
                return {"outcome": "killed", "by": by}
            if by not in left:  # none failed, or what failed cannot be left out
                break
            left.remove(by)
    return {"outcome": "survived", "by": f"{len(tests)} tests"}


def tests_of(mutant: Mutant, contexts: CoverageData) -> list[str]:
    """The tests that reach the mutant's lines; none of them is a line that runs alone on import: then its function's."""
    file = f"{mutant.module.replace('.', '/')}.py"
    reached = contexts.contexts_by_lineno(str(ROOT / file)) or contexts.contexts_by_lineno(file)
    functions = [node for node in ast.walk(ast.parse((ROOT / file).read_bytes())) if isinstance(node, ast.FunctionDef)]
    spans = [(mutant.span[0], mutant.span[2]), *((node.lineno, node.end_lineno or 0) for node in functions)]
    around = [(first, last) for first, last in spans if first <= mutant.span[0] <= last]
    for first, last in (around[0], around[-1]):
        tests = {name.split("|")[0] for line in range(first, last + 1) for name in reached.get(line, []) if name}
        # Some may have moved since.
        if tests := {test for test in tests if (ROOT / test.split("::")[0]).is_file()}:
            bears = mutant.module.rpartition(".")[2]
            return sorted(tests, key=lambda test: (bears not in test.split("::")[0], test))
    return []


def run(wanted: list[Mutant], out: Path, contexts: CoverageData) -> Counter[str]:
    """Outcomes, counted; those of mutants in the file `out` are taken from there."""
    kept = map(json.loads, out.read_text(encoding="utf-8").splitlines() if out.exists() else [])
    outcomes = {Mutant(*outcome["mutant"]): outcome for outcome in kept}
    there, left = every(ROOT), [mutant for mutant in wanted if mutant not in outcomes]

    def judge(mutant: Mutant) -> dict[str, Any]:
        here = located(mutant, there)
        return {"outcome": "lost"} if here is None else judged(here, tests_of(here, contexts))

    with ThreadPoolExecutor(WORKERS) as pool, out.open("a", encoding="utf-8") as file:
        for mutant, outcome in zip(left, pool.map(judge, left), strict=True):
            outcomes[mutant] = outcome
            file.write(json.dumps({"mutant": mutant[:5], **outcome}) + "\n")
            file.flush()
            print(f"{outcome['outcome']} ({mutant.kind}): {mutant.module}, {mutant.definition} ({outcome.get('by')})")
            if outcome["outcome"] != "killed":
                print(f"- {mutant.before}\n+ {mutant.after}", flush=True)
    return Counter(outcomes[mutant]["outcome"] for mutant in wanted)


def main() -> None:
    """Draw, or run and print what was not killed."""
    options = argparse.ArgumentParser(description="Small faults, and whether tests find them.")
    options.add_argument("--draw", type=Path, help="file for mutants, a JSON line each")
    options.add_argument("--count", type=int, default=100)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--run", type=Path, help="file with mutants")
    options.add_argument("--out", type=Path, default=Path("outcomes.jsonl"), help="file for outcomes")
    options.add_argument("--contexts", type=Path, default=Path(".coverage"), help="coverage data with contexts")
    given = options.parse_args()
    if given.draw:
        lines = [json.dumps(mutant[:5]) + "\n" for mutant in drawn(every(ROOT), given.count, given.seed)]
        given.draw.write_text("".join(lines), encoding="utf-8")
    if given.run:
        wanted = [Mutant(*json.loads(line)) for line in given.run.read_text(encoding="utf-8").splitlines()]
        contexts = CoverageData(str(given.contexts))
        contexts.read()
        print(dict(run(wanted, given.out, contexts)))


if __name__ == "__main__":
    main()
