"""Peak memory of the commands over the number of prompts, which stream from a file through `datasets`.

    python benchmarks/run.py --only prompts [--full]

Each command runs as a user would run it, `python -m probes ...`, in a process of its own, whose peak resident memory is read
from the system until it ends. The text is made on the spot from the bundled held-out text. `--full` adds 10,000 prompts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from harness import Headline, Job, Row, Rows, Section, Settings, table
from machine import MIB, status

from probes.data.documents import HELDOUT, read_documents

TITLE = "Memory over the number of prompts"
LENGTH = 64
MODEL = "tiny-llama"
COMMANDS = {
    "jacobian": ["--conditions", "pretrained", "--method", "sketch", "--products", "16"],
    "sinks": ["--reacts", "off", "--pictures", "0"],
    "trajectory": [],
    "leakage": [],
}
LINE = 2000  # characters of a document that is made
CHARACTERS = (
    8 * LENGTH * 8
)  # of text per prompt: the reader takes 8 times what prompts hold, a token is under 8 characters
POLL = 0.02  # seconds between looks at the process


def jobs(settings: Settings) -> list[Job]:
    counts = (4, 16) if settings.quick else (10, 100, 1000, *([10_000] if settings.full else []))
    points = {f"{count:,} prompts": {"count": count} for count in counts}
    return [Job("prompts", name, points) for name in (["sinks"] if settings.quick else COMMANDS)]


def measure(job: Job, settings: Settings) -> Iterator[tuple[str, Row]]:
    """Rows with peak bytes and seconds of the whole command."""
    with tempfile.TemporaryDirectory() as folder:
        for label, point in job.points.items():
            text = Path(folder) / f"{point['count']}.jsonl"
            write_text(text, point["count"])
            command = [sys.executable, "-m", "probes", job.name, MODEL, *COMMANDS[job.name]]
            command += ["--prompts", str(point["count"]), "--length", str(LENGTH), "--dataset", str(text)]
            command += ["--device", settings.device, "--out", str(Path(folder) / label)]
            peak, seconds = peak_of(command)
            yield label, {"peak": peak, "seconds": [seconds], "count": point["count"]}


def write_text(path: Path, prompts: int) -> None:
    """JSON lines of text enough for so many prompts: passages of the held-out text, drawn with a fixed seed."""
    documents = [document.text for document in read_documents(HELDOUT) if len(document.text) > LINE]
    random = np.random.default_rng(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(1000 + prompts * CHARACTERS // LINE):  # the reader skips some documents first
            document = documents[random.integers(len(documents))]
            start = int(random.integers(len(document) - LINE))
            file.write(json.dumps({"text": document[start : start + LINE]}) + "\n")


def peak_of(command: list[str]) -> tuple[int, float]:
    """(peak resident bytes, seconds) of a command.

    The system's own account of an ended child starts from what its parent had when it was made, hence looking on.

    Raises:
        RuntimeError: the command failed.
    """
    began, peak = time.perf_counter(), 0
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            while process.poll() is None:
                try:
                    peak = max(peak, status("VmHWM", process.pid))
                except (OSError, StopIteration):  # it has just ended
                    break
                time.sleep(POLL)
            _, errors = process.communicate()
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {errors.strip()[-500:]}")
    return peak, time.perf_counter() - began


def section(rows: Rows, settings: Settings) -> Section:
    body: list[list[str]] = []
    heads: list[tuple[float, Headline]] = []
    every = jobs(replace(settings, full=True))  # what was measured with --full stays on the page
    labels = [label for label in every[0].points if any(label in rows.of(job) for job in every)]
    for job in every:
        found = rows.of(job)
        cells = [f"{found[label]['peak'] / MIB:,.0f}" if label in found else "" for label in labels]
        measured = sorted(found.values(), key=lambda row: row["count"])
        more = ""
        if len(measured) > 1:
            few, many = measured[0], measured[-1]
            more = f"{(many['peak'] - few['peak']) / (many['count'] - few['count']) / 1024:.1f}"
            grown = many["peak"] / few["peak"]
            what = f"peak memory of `headwater {job.name}`: {many['count']:,} prompts against {few['count']}"
            sizes = (f"{row['peak'] / MIB:,.0f} MiB" for row in (many, few))
            heads.append((grown, Headline(what, *sizes, f"{grown:.2f}")))
        body.append([f"`headwater {job.name}`", *cells, more])
    lines = [
        f"Peak resident memory of the whole process, MiB: `headwater COMMAND {MODEL} --length {LENGTH} --dataset FILE "
        "--prompts N`, the file streamed through `datasets`. The last column is the slope from the first to the last.",
        "",
        *table(["", *labels, "KiB per further prompt"], body),
    ]
    return Section([max(heads)[1]] if heads else [], lines)
