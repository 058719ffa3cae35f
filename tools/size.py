"""How large the code is: `make size`.

    python tools/size.py [--of CHECKOUT] [--no-times]

Prints lines and statements by package and part, files over 450 lines, and import times. Which way imports point is held by
`tests/test_layers.py`.
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
RUNS = 5  # of each command whose time is taken; the best one counts
TIMED = {"import probes": ["-c", "import probes"], "headwater --help": ["-m", "probes", "--help"]}


def sizes(root: Path) -> dict[str, tuple[int, int]]:
    """(lines, statements of the syntax tree) of every source file by its path; data of bundled models are left out."""
    counted = {}
    for file in sorted(file for package in PACKAGES for file in (root / package).rglob("*")):
        name = file.relative_to(root)
        if file.suffix == ".py" or (file.suffix in TEXT and "checkpoints" not in name.parts):
            text = file.read_text(encoding="utf-8")
            tree = ast.walk(ast.parse(text)) if file.suffix == ".py" else ()
            counted[str(name)] = (len(text.splitlines()), sum(isinstance(node, ast.stmt) for node in tree))
    return counted


def milliseconds(root: Path, words: list[str]) -> float:
    """The best of several runs."""
    times = []
    for _ in range(RUNS):
        began = time.perf_counter()
        subprocess.run([sys.executable, *words], cwd=root, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - began)
    return 1000 * min(times)


def report(root: Path) -> list[str]:
    """What is printed, but for times."""
    files, parts = sizes(root), defaultdict(lambda: [0, 0])
    for name, size in files.items():
        package, *inside = Path(name).parts
        parents = [package, *([f"  {package}/{inside[0]}"] if package in ("probes", "toy") and len(inside) > 1 else [])]
        for part in [*parents, *(["all but tests"] if package != "tests" else [])]:
            parts[part] = [total + number for total, number in zip(parts[part], size, strict=True)]
    order = sorted(parts, key=lambda part: (part == "all but tests", part.strip()))
    lines = [f"{'':24}{'lines':>8}{'statements':>12}"]
    lines += [f"{part:24}{parts[part][0]:8,}{parts[part][1]:12,}" for part in order]
    long = {name: size[0] for name, size in files.items() if size[0] > LONG}
    return [
        *lines,
        "",
        f"{len(long)} files over {LONG} lines",
        *(f"  {size:5,}  {name}" for name, size in long.items()),
    ]


def main() -> None:
    """Print it all."""
    options = argparse.ArgumentParser(description="How large the code is.")
    options.add_argument("--of", type=Path, default=Path(__file__).resolve().parent.parent, help="another checkout")
    options.add_argument("--no-times", action="store_true", help="import nothing")
    given = options.parse_args()
    print("\n".join(report(given.of)), flush=True)
    for name, words in () if given.no_times else TIMED.items():
        print(f"{name}: {milliseconds(given.of, words):,.0f} ms", flush=True)


if __name__ == "__main__":
    main()
