"""What commands show: progress and remarks on stderr, tables and sentences on stdout."""

from __future__ import annotations

import io
import os
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..run import processes
from ..run.progress import Advance, Course

if TYPE_CHECKING:
    from rich.text import Text

    from ..results.tables import Report

WIDEST = 120  # columns of running text
EVERY = 30.0  # seconds between two lines of progress, where there is no terminal
PACE = 300.0  # seconds over which the pace is taken that tells how much time is left


class Standing:
    """A standard stream that no write fails on, so that a command ends with its files, whoever stopped listening.

    What an encoding lacks is written in escapes. After the first error nothing more is written, and `error` is it.
    """

    def __init__(self, stream: Any) -> None:
        # The first file that is opened would take the number of a stream that was closed before the program began.
        self._stream = Path(os.devnull).open("w", encoding="utf-8") if stream is None else stream  # noqa: SIM115
        self.error: OSError | None = None
        if isinstance(self._stream, io.TextIOWrapper):
            self._stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As a stream."""
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """As a stream."""
        self._try(self._stream.flush)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            if self.error is None:
                act()
        except OSError as error:
            self.error = error
            nothing = os.open(os.devnull, os.O_WRONLY)  # what is still in its buffer goes there when the program ends
            os.dup2(nothing, self._stream.fileno())
            os.close(nothing)


@contextmanager
def standing() -> Iterator[Standing]:
    """Within it, the standard streams are `Standing`; gives stdout."""
    before = sys.stdout, sys.stderr
    out, told = Standing(sys.stdout), Standing(sys.stderr)
    sys.stdout, sys.stderr = out, told  # type: ignore[assignment]
    try:
        yield out
    finally:
        out.flush()
        told.flush()
        sys.stdout, sys.stderr = before


@contextmanager
def progress(clock: Callable[[], float] = time.monotonic) -> Iterator[Advance]:
    """How far a command is, on stderr: a bar in a terminal, elsewhere a line each `EVERY` seconds.

    It appears with the first call, so that bad input ends in a single line. Of several processes only the first shows it.
    """
    if not processes.first():
        yield lambda *_: None
        return
    shown = _Shown(clock)
    try:
        yield shown
    finally:
        if shown.bar is not None and shown.bar.live.is_started:
            shown.bar.stop()


class _Shown(Course):
    """A `Course` that shows itself; rich estimates the time that is left."""

    bar: Any = None  # of rich, from the first call on

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock, self._last = clock, clock()

    def __call__(self, label: str, done: float | int, total: float | int) -> None:
        super().__call__(label, done, total)
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        if self.bar is None:
            columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
            self.bar = Progress(
                *columns, console=Console(stderr=True), get_time=self._clock, speed_estimate_period=PACE
            )
            self.bar.add_task(label, total=1.0)
            if sys.stderr.isatty():
                self.bar.start()
        (task,) = self.bar.tasks
        self.bar.update(task.id, description=label, completed=self.done)
        if not sys.stderr.isatty() and self._clock() - self._last >= EVERY:
            self._last = self._clock()
            left = f", about {duration(task.time_remaining)} left" if task.time_remaining else ""
            remark(f"{label}: {self.done:.0%} done{left}")


def duration(seconds: float | int) -> str:
    """Rounded: "8 s", "4 min", "2.0 h"."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def given() -> str:
    """This command line, as it would be typed."""
    return shlex.join(["headwater", *sys.argv[1:]])


def remark(line: str) -> None:
    """Print one line on stderr, in the first process."""
    if processes.first():
        print("headwater:", line, file=sys.stderr)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; its lines are never broken."""
    from rich.box import SIMPLE_HEAD
    from rich.cells import cell_len
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    table = Table(*(Column(name, no_wrap=True) for name in columns), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in rows:
        table.add_row(*map(escape, row))
    width = sum(max(map(cell_len, cells)) + 2 for cells in zip(columns, *rows, strict=True))
    Console(width=width + 2).print(table)


def print_report(report: Report) -> None:
    """Print title and description of a report, its tables, and last its sentences, where a reader of a long table stops."""
    print(report.title)
    print(_wrapped(report.described))
    for table in report.tables:
        print(f"\n{table.title}:")
        print_table(table.columns, table.rows)
    for line in report.lines:
        print(line)


def _wrapped(text: str, *, indent: str = "") -> str:
    width = min(max(shutil.get_terminal_size().columns, 40), WIDEST)
    return textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def print_lines(lines: Sequence[str]) -> None:
    """Print sentences, a line each, broken where the terminal ends."""
    for line in lines:
        print(_wrapped(line, indent="  "))


def print_colored(texts: Iterable[Text]) -> None:
    """Print texts in colour, where the terminal has colours; elsewhere nothing."""
    from rich.console import Console

    console = Console(highlight=False, emoji=False)
    if console.color_system is not None and not console.no_color:
        for text in texts:
            console.print(text, "", soft_wrap=True, sep="\n")


def print_written(files: Sequence[Path]) -> None:
    """Print which files a command has written."""
    print(f"wrote {', '.join(map(str, files))}")
