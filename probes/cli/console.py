"""What commands show: progress and remarks on stderr, tables and sentences on stdout."""

from __future__ import annotations

import io
import os
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..run import processes
from ..run.progress import Advance, Course, duration

if TYPE_CHECKING:
    from ..results.tables import Report

WIDEST = 120  # columns of running text
EVERY = 30.0  # seconds between two lines of progress, where there is no terminal
SHOWN_AFTER = 2.0  # seconds until the time that is left is shown: that of shorter work is seen soon enough


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
def progress(*, alike: bool = True, clock: Callable[[], float] = time.monotonic) -> Iterator[Advance]:
    """How far a command is, on stderr: a bar in a terminal, elsewhere a line each `EVERY` seconds.

    It appears with the first call, so that bad input ends in a single line. Of several processes only the first shows it.
    `alike`: as of `Course`.
    """
    if not processes.first():
        yield lambda *_: None
        return
    shown = _Shown(alike=alike, clock=clock)
    try:
        yield shown
    finally:
        if shown.bar is not None:
            shown.bar.stop()


class _Shown(Course):
    """A `Course` that shows itself."""

    bar: Any = None  # of rich, in a terminal
    _last: float | None = None  # when a line was printed

    def __call__(self, label: str, done: float | int, total: float | int) -> None:
        super().__call__(label, done, total)
        # A part of a unit has a label of its own, and no time that is known.
        share, left = (self.done, self.left) if label in self.units else (done / total if total else 1.0, None)
        time_left = f", about {duration(left)} left" if left and self.spent >= SHOWN_AFTER else ""
        if sys.stderr.isatty():
            self._show(label, share, time_left.removeprefix(", "))
        elif self._clock() - (self._last or self._start) >= EVERY:
            self._last = self._clock()
            remark(f"{label}: {share:.0%} done{time_left}")

    def _show(self, label: str, share: float, time_left: str) -> None:
        if self.bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[left]}"),
            )
            self.bar = Progress(*columns, console=Console(stderr=True))
            self.bar.add_task(label, total=1.0, left="")
            self.bar.start()
        self.bar.update(self.bar.task_ids[0], description=label, completed=share, left=time_left)


def given() -> str:
    """This command line, as it would be typed."""
    return shlex.join(["headwater", *sys.argv[1:]])


def remark(line: str) -> None:
    """Print one line on stderr, in the first process."""
    if processes.first():
        print("headwater:", line, file=sys.stderr)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; its lines are never broken.

    In a terminal that is too narrow, columns follow in further tables, each beside those that tell the rows apart. Elsewhere
    (in a file, a pipe) it is one table of any width.
    """
    from rich.box import SIMPLE_HEAD
    from rich.cells import cell_len
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    widths = [max(map(cell_len, cells)) + 2 for cells in zip(columns, *rows, strict=True)]
    room = shutil.get_terminal_size().columns - 2 if sys.stdout.isatty() else sum(widths)
    names = next((n for n in range(1, len(columns)) if len({tuple(row[:n]) for row in rows}) == len(rows)), 1)
    for chosen in _side_by_side(widths, room, names if sum(widths[:names]) < room / 2 else 1):
        table = Table(*(Column(columns[i], no_wrap=True) for i in chosen), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for row in rows:
            table.add_row(*(escape(row[i]) for i in chosen))
        Console(width=sum(widths[i] for i in chosen) + 2).print(table)


def _side_by_side(widths: Sequence[int], room: int, names: int) -> list[list[int]]:
    """Which columns stand in each table: the first `names` in all of them, and as many others as fit, at least one."""
    found: list[list[int]] = [[*range(names)]]
    for i, width in enumerate(widths[names:], names):
        if len(found[-1]) > names and sum(widths[k] for k in found[-1]) + width > room:
            found.append([*range(names)])
        found[-1].append(i)
    return found


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


def print_written(files: Sequence[Path]) -> None:
    """Print which files a command has written."""
    print(f"wrote {', '.join(map(str, files))}")
