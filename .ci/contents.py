"""What a release has to hold, and must not: `python .ci/contents.py SDIST WHEEL`, exit code 1 and one line per fault."""

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("probes", "toy")
DATA = (".safetensors", ".xz", ".json", ".jsonl", ".md", ".txt", ".j2", ".js", ".css")  # beside Python in `probes`


def faults(sdist: str, wheel: str) -> list[str]:
    with tarfile.open(sdist) as archive:
        source = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        built = set(archive.namelist())
    wanted = {
        str(file.relative_to(ROOT))
        for package in PACKAGES
        for file in (ROOT / package).rglob("*")
        if file.is_file() and (file.suffix == ".py" or (package == "probes" and file.suffix in DATA))
    }
    found = [f"sdist lacks {name}" for name in sorted({*wanted, "LICENSE", "README.md", "pyproject.toml"} - source)]
    found += [f"wheel lacks {name}" for name in sorted(wanted - built)]
    if not any(name.endswith("/licenses/LICENSE") for name in built):
        found.append("wheel lacks the licence")
    tops = {name.partition("/")[0] for name in built}
    extra = sorted(top for top in tops - set(PACKAGES) if not top.endswith(".dist-info"))
    return found + [f"wheel holds {top}/, which is not to be installed" for top in extra]


if __name__ == "__main__":
    said = faults(*sys.argv[1:])
    print("\n".join(said), end="\n" if said else "", file=sys.stderr)
    sys.exit(bool(said))
