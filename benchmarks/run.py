"""All benchmarks side by side, one page: `make bench`.

    python benchmarks/run.py [--quick] [--device cuda] [--only jacobian,attention] [--time-limit S] [--stop-after S]

Writes OUT/benchmarks.md with figures, and all rows as JSON in OUT/benchmarks/. Rows are kept as they are measured, and the
same command resumes a stopped run. `--again` measures the chosen cases anew; `--page` only writes the page. OUT is
`reports`; of `--quick` (minutes, small sizes, to see that everything runs) it is `runs/quick`. nnsight is no dependency: it
is measured where the running interpreter can import it.
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
from machine import GIB, available, identity

# Modules, by the names that --only takes, in the order in which they are run.
CASES = {name: name for name in ("jacobian", "attention", "toys", "scaling", "rates", "prompts", "planner")}
CASES["prompts"] = "prompts_memory"
ROOT = Path(__file__).resolve().parent.parent


def case(name: str) -> Any:
    """A case's module."""
    return importlib.import_module(CASES[name])


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--quick", action="store_true", help="small sizes, minutes")
    option("--full", action="store_true", help="10,000 prompts, too")
    option("--device", default="cpu", help="cpu, cuda")
    option("--only", type=lambda s: s.split(","), default=list(CASES), help=f"of {','.join(CASES)}")
    option("--program", type=Path, help="folder with the published program of [Wu]")
    option("--memory-limit", type=float, help="GiB a contender may have; 80 %% of what is free unless given")
    option("--time-limit", type=float, default=600.0, help="seconds for one point of one contender")
    option("--stop-after", type=float, default=float("inf"), help="seconds after which the run stops")
    option("--again", action="store_true", help="measure the chosen cases anew")
    option("--page", action="store_true", help="only write the page, from the rows that are there")
    option("--out", type=Path)
    option("--child", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    unknown = [name for name in given.only if name not in CASES]
    if unknown:
        parser.error(f"--only {unknown[0]} does not exist; use {', '.join(CASES)}")
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here; leave it out")
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
        serve(case(job.case), job, Settings(**order["settings"]), order["until"])
        return
    from page import write_page  # not above: a child draws nothing

    limit = 0.8 * available(given.device) if given.memory_limit is None else given.memory_limit * GIB
    program = None if given.program is None else str(given.program.resolve())
    settings = Settings(given.device, given.quick, given.full, program, int(limit), given.time_limit)
    machine = identity(given.device) | {"sizes": "quick" if given.quick else "usual"}
    kept = given.out / "benchmarks" / f"{given.device.split(':')[0]}.json"
    if given.page and not kept.exists():
        raise SystemExit(f"'{kept}' is not there; leave --page out to measure")
    rows = Rows(kept, None if given.page else machine)
    if rows.differs:
        print(f"the rows of another run are measured anew: {'; '.join(rows.differs)}")
    if given.again:
        rows.drop(given.only)
    began, failures = time.time(), []
    shown = ["FOLDER" if word == str(given.program) else word for word in sys.argv[1:]]
    stamp = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": commit()}
    stamp["command"] = shlex.join(["python", "benchmarks/run.py", *shown])
    for name in [] if given.page else given.only:
        print(f"{name} (after {time.time() - began:.0f} s)", flush=True)
        for job in case(name).jobs(settings):
            until = began + given.stop_after
            if time.time() < until and not run_job(job, rows, settings, stamp, until):
                failures.append(f"{name}, {job.name}")
    written = write_page(given.out, rows, settings, {name: case(name) for name in CASES})
    print(f"wrote {written} after {time.time() - began:.0f} s")
    if failures:
        raise SystemExit(f"failed, see above: {'; '.join(failures)}")


if __name__ == "__main__":
    main()
