"""All benchmarks side by side, one page: `make bench`.

    python benchmarks/run.py [--quick] [--device cuda] [--only jacobian,attention] [--time-limit S] [--stop-after S]

Writes OUT/benchmarks.md with figures and all rows as JSON in OUT/benchmarks/. Rows are kept as they are measured: the same
command again goes on where it was stopped; `--again` measures the chosen cases anew, `--page` only writes the page from the
rows that are there. OUT is `reports`; of `--quick` (two minutes, small sizes, to see that everything runs) `runs/quick`.

nnsight is measured where the running interpreter can import it. It is no dependency of this package.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from harness import Job, Rows, Settings, run_job, serve
from machine import GIB, available, identity, installed

# By the names that --only takes: modules, in the order in which they are run.
CASES = {
    "jacobian": "jacobian",
    "attention": "attention",
    "toys": "toy_steps",
    "scaling": "scaling",
    "rates": "rates",
    "prompts": "prompts_memory",
    "planner": "planner",
}
ROOT = Path(__file__).resolve().parent.parent


def case(name: str) -> Any:
    """A case's module."""
    return importlib.import_module(CASES[name])


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, about two minutes")
    parser.add_argument("--full", action="store_true", help="10,000 prompts, too")
    parser.add_argument("--device", default="cpu", help="cpu, cuda")
    parser.add_argument("--only", type=lambda s: s.split(","), default=list(CASES), help=f"of {','.join(CASES)}")
    parser.add_argument("--program", type=Path, help="folder with the published program of [Wu]")
    parser.add_argument(
        "--memory-limit", type=float, help="GiB a contender may have; 80 %% of what is free unless given"
    )
    parser.add_argument("--time-limit", type=float, default=600.0, help="seconds for one point of one contender")
    parser.add_argument("--stop-after", type=float, default=float("inf"), help="seconds after which the run stops")
    parser.add_argument("--again", action="store_true", help="measure the chosen cases anew")
    parser.add_argument("--page", action="store_true", help="only write the page, from the rows that are there")
    parser.add_argument("--readme", type=Path, help="a page that gets the head table, too, between its two marks")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    unknown = [name for name in given.only if name not in CASES]
    if unknown:
        parser.error(f"--only {unknown[0]} does not exist; use {', '.join(CASES)}")
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here; leave it out")
    if given.readme is not None and not given.readme.is_file():
        parser.error(f"--readme {given.readme} is no file; name one that has the two marks")
    given.out = given.out or Path("runs/quick" if given.quick else "reports")
    return given


def commit() -> str:
    """The checked-out commit, with a plus where files differ from it."""
    try:
        asked: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "check": True}
        name = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], **asked).stdout.strip()
        changed = subprocess.run(["git", "status", "--porcelain", "--", "probes", "toy", "benchmarks"], **asked).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + ("+" if changed.strip() else "")


def main() -> None:
    """Measure what is not there yet, then write the page."""
    given = parsed()
    if given.child is not None:
        order = json.loads(given.child)
        job = Job(**order["job"])
        serve(case(job.case), job, Settings(**order["settings"]))
        return
    from page import write_headlines, write_page  # not above: a child draws nothing

    limit = 0.8 * available(given.device) if given.memory_limit is None else given.memory_limit * GIB
    program = None if given.program is None else str(given.program.resolve())
    settings = Settings(given.device, given.quick, given.full, program, int(limit), given.time_limit)
    machine = identity(given.device) | {"sizes": "quick" if given.quick else "usual"}
    kept = given.out / "benchmarks" / f"{given.device.split(':')[0]}.json"
    if given.page and not kept.exists():
        raise SystemExit(f"'{kept}' is not there; leave --page out to measure")
    rows = Rows(kept, None if given.page else machine)
    if rows.differs:
        print(f"rows that are there are of another run and are measured anew: {'; '.join(rows.differs)}")
    if given.again:
        rows.drop(given.only)
    began, failures = time.monotonic(), []
    until = began + given.stop_after
    if not given.page:
        asked = [word for word in sys.argv[1:] if word != str(given.program)]
        if given.program is not None:
            asked.insert(asked.index("--program") + 1, "FOLDER")
        stamp = {
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "commit": commit(),
            "command": shlex.join(["python", "benchmarks/run.py", *asked]),
        }
        for name in given.only:
            print(f"{name} (after {time.monotonic() - began:.0f} s)", flush=True)
            for job in case(name).jobs(settings):
                if time.monotonic() < until and not run_job(job, rows, settings, stamp, until):
                    failures.append(f"{name}, {job.name}")
    written = write_page(given.out, rows, settings, {name: case(name) for name in CASES})
    if given.readme is not None:
        write_headlines(given.readme, rows, settings, {name: case(name) for name in CASES})
    print(f"wrote {written} after {time.monotonic() - began:.0f} s")
    if installed("nnsight") is None:
        print("nnsight is not installed here; its rows say so")
    if failures:
        raise SystemExit(f"failed, see above: {'; '.join(failures)}")


if __name__ == "__main__":
    main()
