"""All benchmarks, one page: `make bench`.

    python benchmarks/run.py [--quick] [--only jacobian,sinks] [--out reports/benchmarks.md]

Runs one script after the other and puts what each prints in the place of its section, as soon as it is there: a stopped run
goes on with --only and the names that are left. Each script prints its section alone, too.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from common import parser

SCRIPTS = ("jacobian", "sinks", "toys", "costs", "gpu")
HEAD = (
    "# Benchmarks\n\nContenders take turns and are compared round by round: medians, with quartiles in parentheses. The "
    "machine is shared, so that seconds hold for it and for that hour. Quote ratios. A GPU's numbers are in `reports/gpu`."
)


def merged(page: str, section: str) -> str:
    """The page with this section in the place of the one with the same heading, or at the end."""
    head, *sections = (page or HEAD).rstrip().split("\n## ")
    new = section.strip().removeprefix("## ")
    titles = [old.partition("\n")[0] for old in sections]
    title = new.partition("\n")[0]
    at = titles.index(title) if title in titles else len(titles)
    sections[at : at + 1] = [new]
    return "\n\n## ".join(part.rstrip() for part in [head, *sections]) + "\n"


def main() -> None:
    """Run the scripts; the exit code is 1 where one fails."""
    options = parser(__doc__)
    here = [name for name in SCRIPTS if name != "gpu" or torch.cuda.is_available()]
    options.add_argument("--only", type=lambda names: names.split(","), default=here, help=",".join(SCRIPTS))
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    if unknown := set(given.only) - set(SCRIPTS):
        options.error(f"--only {', '.join(sorted(unknown))} does not exist; give some of {', '.join(SCRIPTS)}")
    out = given.out or Path("runs/quick/benchmarks.md" if given.quick else "reports/benchmarks.md")
    out.parent.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in given.only:
        print(f"{name} ...", flush=True)
        command = [sys.executable, str(Path(__file__).with_name(f"{name}.py")), *["--quick"] * given.quick]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if run.returncode:
            failed.append(name)
            continue
        print(run.stdout, flush=True)
        page = out.read_text(encoding="utf-8") if out.is_file() else ""
        beside = out.with_suffix(".part")
        beside.write_text(merged(page, run.stdout), encoding="utf-8")
        beside.replace(out)
    if failed:
        raise SystemExit(f"failed, see above: {', '.join(failed)}")


if __name__ == "__main__":
    main()
