"""How cases are run: every job in a process of its own, every row kept as soon as it is there.

A case module says which jobs there are (`jobs`), measures one (`measure`, a generator of rows) and writes its section of the
page (`section`). A job is a contender, or contenders that take turns, with the points it is measured at, smallest first.
Rows go into one JSON file, from which a stopped run resumes; rows of another machine are not mixed in. A job that needs
more memory than it may have, or more time for one point than `time_limit`, did not survive there; where larger points are
more of the same (`Job.rising`), they are not tried.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from probes.run.files import table_lines, write_json

Row = dict[str, Any]
MARK = "row: "  # before a row in a child's output


@dataclass(frozen=True)
class Settings:
    """What a run was asked for."""

    device: str = "cpu"
    quick: bool = False
    full: bool = False
    program: str | None = None  # folder with [Wu]'s program
    memory_limit: int = 0  # bytes
    time_limit: float = 600.0  # seconds for one point of one job

    @property
    def cuda(self) -> bool:
        return self.device.startswith("cuda")

    def figure(self, name: str) -> str:
        """File name of a case's figure."""
        return f"{name}-cuda.png" if self.cuda else f"{name}.png"


@dataclass(frozen=True)
class Job:
    """What one child process measures."""

    case: str
    name: str
    points: dict[str, dict[str, Any]] = field(default_factory=dict)  # by label
    rising: bool = False  # points need ever more: none is tried behind one that did not survive

    def key(self, label: str) -> str:
        """Of a row."""
        return f"{self.case} | {self.name} | {label}"


class Headline(NamedTuple):
    """A line of the table at the top of the page."""

    what: str
    ours: str
    other: str
    ratio: str


class Section(NamedTuple):
    """What a case puts on the page: lines of its head table, and its own text and tables in Markdown."""

    headlines: list[Headline]
    lines: list[str]


class Rows:
    """The rows of a run, on disk after every change.

    Args:
        path: the JSON file; its rows are taken over if they were measured on the same machine with the same sizes.
        machine: what must be the same; None takes the rows as they are, and the machine they are of.
    """

    def __init__(self, path: Path, machine: Mapping[str, Any] | None) -> None:
        kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"machine": machine, "rows": {}}
        before = kept["machine"]
        self.path, self.machine = path, dict(before if machine is None else machine)
        names = [name for name in {**before, **self.machine} if before.get(name) != self.machine.get(name)]
        self.differs = [f"{name} {before.get(name)} is now {self.machine.get(name)}" for name in names]
        self.found: dict[str, Row] = {} if self.differs else kept["rows"]
        for key, row in list(self.found.items()):
            if str(row.get("failed", "")).startswith("not installed"):  # it may be by now
                del self.found[key]

    def get(self, job: Job, label: str) -> Row | None:
        return self.found.get(job.key(label))

    def put(self, key: str, row: Row) -> None:
        self.found[key] = row
        write_json(self.path, {"machine": self.machine, "rows": self.found})

    def drop(self, cases: Sequence[str]) -> None:
        """Forget the rows of these cases."""
        self.found = {key: row for key, row in self.found.items() if key.split(" | ")[0] not in cases}

    def of(self, job: Job) -> dict[str, Row]:
        """A job's rows that were measured and survived, by label."""
        found = {label: self.get(job, label) for label in job.points}
        return {label: row for label, row in found.items() if row is not None and "failed" not in row}

    def missing(self, job: Job) -> list[str]:
        """Labels without a row, but those that a shorter one that did not survive stands for."""
        labels = list(job.points)
        failed = [n for n, label in enumerate(labels) if "failed" in (self.get(job, label) or {})]
        labels = labels[: failed[0]] if job.rising and failed else labels
        return [label for label in labels if self.get(job, label) is None]


def run_job(job: Job, rows: Rows, settings: Settings, stamp: Mapping[str, Any], until: float) -> bool:
    """Measure what `rows` lacks of the job; false if the child failed for a reason that is none of the limits.

    Args:
        job: what is to be measured.
        rows: where the rows go, each with `stamp`.
        settings: as given.
        stamp: when and with what code a row was made.
        until: `time.time()` after which nothing more is waited for; a later run measures what is missing then.
    """
    missing = rows.missing(job)
    if not missing:
        return True
    asked = Job(job.case, job.name, {label: job.points[label] for label in missing}, job.rising)
    order = json.dumps({"job": asdict(asked), "settings": asdict(settings), "until": until})
    command = [sys.executable, str(Path(__file__).with_name("run.py")), "--child", order]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith(MARK):
                    label, row = json.loads(line.removeprefix(MARK))
                    rows.put(job.key(label), {**row, **stamp})
                    missing.remove(label)
                    print(f"  {job.name}, {label}: {_short(row)}", flush=True)
            process.wait()
        finally:  # interrupted or not, nothing of ours keeps running
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode == -signal.SIGALRM and time.time() >= until:
        return True
    limits = {
        -signal.SIGALRM: f"time, limit {settings.time_limit:g} s",
        -signal.SIGKILL: "memory, killed by the system",
    }
    if missing and process.returncode in limits:
        rows.put(job.key(missing[0]), {"failed": limits[process.returncode], **stamp})
        return True
    return process.returncode == 0


def _short(row: Row) -> str:
    """A row for the terminal."""
    if "failed" in row:
        return f"did not survive ({row['failed']})"
    seconds = row.get("seconds") or {}
    times = seconds if isinstance(seconds, dict) else {"": seconds}
    return ", ".join(f"{name} {middle(each):.3g} s".lstrip() for name, each in times.items() if each) or "measured"


def serve(case: Any, job: Job, settings: Settings, until: float) -> None:
    """In the child: measure and print rows; an alarm that nobody handles ends what takes too long."""

    def wait() -> None:
        left = min(settings.time_limit, until - time.time())
        if left <= 0:
            signal.raise_signal(signal.SIGALRM)
        signal.setitimer(signal.ITIMER_REAL, left)

    wait()
    for label, row in case.measure(job, settings):
        print(MARK + json.dumps([label, row]), flush=True)
        wait()


# ------------------------------------------------------------------------------------------------------ statistics


def middle(times: Sequence[float]) -> float:
    """The median."""
    return float(np.median(times))


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper one."""
    low, high = np.quantile(values, [0.25, 0.75])
    return float(low), float(high)


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Round by round: what shared the machine in a round slowed both down."""
    return [a / b for a, b in zip(above, below, strict=True)]


def spread(values: Sequence[float], form: str = ".3g") -> str:
    """Median and quartiles; the median alone where there are less than three values."""
    numbers = [middle(values), *(quartiles(values) if len(values) > 2 else ())]
    said = [f"{value:,.0f}" if value >= 1000 else f"{value:{form}}" for value in numbers]
    return said[0] if len(said) == 1 else "{} ({} to {})".format(*said)


class Exponent(NamedTuple):
    """The slope of log y over log x, and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def exponent(x: Sequence[float], y: Sequence[float]) -> Exponent:
    """Least squares on logarithms; the interval is Student's, of n - 2 degrees, and infinite for two points.

    Raises:
        ValueError: less than two points, or values that have no logarithm.
    """
    if len(x) < 2 or min([*x, *y]) <= 0:
        raise ValueError(f"no exponent through {list(zip(x, y, strict=False))}")
    from scipy import stats  # not above: children fit nothing, and it takes long to import

    fit: Any = stats.linregress(np.log(x), np.log(y))
    half = float(stats.t.ppf(0.975, len(x) - 2) * fit.stderr) if len(x) > 2 else np.inf
    return Exponent(*(float(fit.slope + end) for end in (0, -half, half)))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Markdown.

    Raises:
        ValueError: a row of another width.
    """
    if wrong := [list(row) for row in rows if len(row) != len(columns)]:
        raise ValueError(f"row {wrong[0]} does not fit columns {list(columns)}")
    return table_lines(columns, rows)
