"""How large the code is: `make size`.

    python tools/size.py [CHECKOUT]

Prints lines and statements by package and part, and files over 450 lines.
"""

import ast
import sys
from collections import defaultdict
from pathlib import Path

PACKAGES = ("probes", "toy", "benchmarks", "tools", "tests")
TEXT = (".toml", ".j2", ".html", ".js", ".css")  # counted in lines beside Python
LONG = 450  # lines


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


def report(root: Path) -> list[str]:
    """What is printed."""
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


if __name__ == "__main__":
    print("\n".join(report(Path(sys.argv[1] if sys.argv[1:] else "."))))
