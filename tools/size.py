"""How large the code is and how it hangs together: `make size`.

    python tools/size.py [--of CHECKOUT] [--no-times]

Prints lines and statements by package, files over 450 lines, sizes of what git tracks, circles of files that import each
other, floors, and import times. A room is a folder of `probes`, a file directly in `probes`, or `toy`; the floors are the
longest chain of rooms by imports. Imports inside functions count. Those for type checkers do not, and neither does
`probes/__init__.py`, which names modules of every layer. Rooms in a circle share a floor. Only the standard library is
needed; for times, the packages that the code imports.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

PACKAGES = ("probes", "toy", "benchmarks", "tools", "tests")
TEXT = (".toml", ".j2", ".html", ".js", ".css")  # counted in lines beside Python
LONG = 450  # lines
MIB = 1 << 20
RUNS = 5  # of each command whose time is taken; the best one counts
TIMED = {"import probes": ["-c", "import probes"], "headwater --help": ["-m", "probes", "--help"]}


def files(root: Path, package: str) -> list[Path]:
    """The package's source files, data folders with models left out."""
    found = sorted(file for file in (root / package).rglob("*") if file.suffix in (".py", *TEXT))
    return [file for file in found if "checkpoints" not in file.parts or file.suffix == ".py"]


def counted(paths: list[Path]) -> tuple[int, int]:
    """(lines, statements of the syntax tree)."""
    sources = {path: path.read_text(encoding="utf-8") for path in paths}
    trees = [ast.parse(source) for path, source in sources.items() if path.suffix == ".py"]
    statements = sum(isinstance(node, ast.stmt) for tree in trees for node in ast.walk(tree))
    return sum(len(source.splitlines()) for source in sources.values()), statements


def named(tree: ast.AST, module: str, package: bool) -> set[str]:
    """Full names of what a module imports; `from a import b` counts as `a` and as `a.b`."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: None if package else -1]
            parents = parents[: len(parents) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        else:
            found |= named(node, module, package)
    return found


def imports(root: Path) -> dict[str, set[str]]:
    """By module of `probes` and `toy`, the modules of these that it imports."""
    found = {}
    for file in (file for package in ("probes", "toy") for file in files(root, package) if file.suffix == ".py"):
        parts = file.relative_to(root).with_suffix("").parts
        package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if package else parts)
        if module != "probes":
            found[module] = named(ast.parse(file.read_text(encoding="utf-8")), module, package)
    for module, names in found.items():
        names = (names & set(found)) - {module}
        # A package that is named only on the way to its module is not what is imported.
        found[module] = {name for name in names if not any(other.startswith(f"{name}.") for other in names)}
    return found


def room(module: str) -> str:
    """The folder or file that a module stands in."""
    return "toy" if module.split(".")[0] == "toy" else ".".join(module.split(".")[:2])


def rooms(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Imports between rooms."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, names in graph.items():
        found[room(module)] |= {room(name) for name in names} - {room(module)}
    return dict(found)


def components(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components, those that are imported first."""
    reach: dict[str, set[str]] = {}
    for node in graph:
        seen, ring = set(), {node}
        while ring:
            seen |= ring
            ring = {other for one in ring for other in graph[one]} - seen
        reach[node] = seen
    groups = {frozenset(other for other in reach[node] if node in reach[other]) for node in graph}
    # Whoever imports a component reaches all that it reaches, and more.
    return sorted((sorted(group) for group in groups), key=lambda group: (len(reach[group[0]]), group))


def floors(graph: dict[str, set[str]]) -> int:
    """Rooms on the longest chain of imports; those of a circle count once."""
    height: dict[str, int] = {}
    for group in components(graph):
        below = [height[name] for member in group for name in graph[member] if name not in group]
        height |= dict.fromkeys(group, 1 + max(below, default=0))
    return max(height.values(), default=0)


def milliseconds(root: Path, words: list[str]) -> float:
    """The best of several runs."""
    times = []
    for _ in range(RUNS):
        began = time.perf_counter()
        subprocess.run([sys.executable, *words], cwd=root, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - began)
    return 1000 * min(times)


def tracked(root: Path) -> dict[str, int]:
    """Bytes of the files that git tracks, by the folder at the top; nothing outside a checkout."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=False).stdout
    found: dict[str, int] = defaultdict(int)
    for name in filter(None, listed.split("\0")):
        if (root / name).is_file():
            found[name.partition("/")[0] if "/" in name else "."] += (root / name).stat().st_size
    return dict(found)


def report(root: Path) -> list[str]:
    """What is printed, but for times."""
    sizes = {package: counted(files(root, package)) for package in PACKAGES}
    without = [sum(sizes[package][n] for package in PACKAGES if package != "tests") for n in range(2)]
    lines = [f"{'':20}{'lines':>8}{'statements':>12}"]
    lines += [f"{name:20}{size[0]:8,}{size[1]:12,}" for name, size in [*sizes.items(), ("all but tests", without)]]
    long = {file: counted([file])[0] for package in PACKAGES for file in files(root, package)}
    long = {file: size for file, size in sorted(long.items(), key=lambda item: -item[1]) if size > LONG}
    lines += ["", f"{len(long)} files over {LONG} lines"]
    lines += [f"  {size:5,}  {file.relative_to(root)}" for file, size in long.items()]
    bytes_of = tracked(root)
    lines += ["", f"{sum(bytes_of.values()) / MIB:.2f} MiB in files that git tracks"]
    lines += [f"  {size / MIB:6.2f}  {name}" for name, size in sorted(bytes_of.items(), key=lambda one: -one[1])]
    graph = imports(root)
    circles = [group for group in components(graph) if len(group) > 1]
    lines += ["", f"{len(rooms(graph))} rooms on {floors(rooms(graph))} floors", f"{len(circles)} circles"]
    return lines + [f"  {', '.join(group)}" for group in circles]


def main() -> None:
    """Print it all."""
    given = argparse.ArgumentParser(description="How large the code is and how it hangs together.")
    given.add_argument("--of", type=Path, default=Path(__file__).resolve().parent.parent, help="another checkout")
    given.add_argument("--no-times", action="store_true", help="import nothing")
    asked = given.parse_args()
    print("\n".join(report(asked.of)), flush=True)
    for name, words in () if asked.no_times else TIMED.items():
        print(f"{name}: {milliseconds(asked.of, words):,.0f} ms", flush=True)


if __name__ == "__main__":
    main()
