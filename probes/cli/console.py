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
from ..run.progress import TOLD_AFTER, TOLD_SHARE, Advance, Course, duration

if TYPE_CHECKING:
    from rich.progress import Progress

    from ..results.tables import Report

WIDEST = 120  # columns of running text
ALL = "all"  # the bar of everything


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
def progress(
    prompts: int | None = None, *, alike: bool = True, clock: Callable[[], float] = time.monotonic
) -> Iterator[Advance]:
    """Progress bars on stderr, one per label, from the first call on, so that bad input ends in a single line.

    Several units also have a bar together, with the time that is left for all of them. Once the first of `prompts` is
    measured, one line says how long everything takes, or that unit if no others were announced. Of units that take very
    different times (`alike=False`) no time is said. Of several processes only the first shows its progress.
    """
    if not processes.first():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[left]}"))
    bars = _Bars(Progress(*columns, console=Console(stderr=True)), prompts, clock, alike)
    try:
        yield bars
    finally:
        if bars.tasks:
            bars.shown.stop()


class _Bars(Course):
    def __init__(self, shown: Progress, prompts: int | None, clock: Callable[[], float], alike: bool) -> None:
        super().__init__(clock)
        self.shown, self.tasks, self._alike, self._told = shown, dict[str, Any](), alike, set[str]()
        self._first = processes.count() / prompts if prompts else TOLD_SHARE
        self._measured = "on the first prompt" if prompts else "so far"

    def __call__(self, label: str, done: float | int, total: float | int) -> None:
        super().__call__(label, done, total)
        self.shown.start()
        left = self.left if self._alike else None
        said = f"{duration(left)} left" if left else ""
        if len(self.units) > 1:
            self._show(ALL, self.done, 1.0, said)
            said = ""
        for other in self.tasks.keys() - {ALL, label}:
            self.shown.update(self.tasks[other], left="")
        self._show(label, done, total, said)
        of = "" if self._expected else f"{label}: "  # what nobody expected is followed, and told, by itself
        new = of not in self._told and not self._before  # resumed trainings come in leaps, and tell nothing
        if new and left and self.spent >= TOLD_AFTER and self.share(label) >= self._first:
            self._told.add(of)
            remark(f"{of}about {duration(self.spent + left)} in all, as measured {self._measured}")

    def _show(self, label: str, done: float | int, total: float | int, left: str) -> None:
        if label not in self.tasks:
            self.tasks[label] = self.shown.add_task(label, left="")
        self.shown.update(self.tasks[label], completed=done, total=total, left=left if done < total else "")


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


def print_report(report: Report, *, sentences: bool = False) -> None:
    """Print title and description of a report, its tables, and last its sentences, where a reader of a long table stops.

    `sentences`: the cells of the last table are sentences, too long for columns; they are printed one below the other.
    """
    print(report.title)
    print(_wrapped(report.described))
    *above, last = report.tables
    for table in above if sentences else report.tables:
        print(f"\n{table.title}:")
        print_table(table.columns, table.rows)
    if sentences:
        print(f"\n{last.title}:")
        for row in last.rows:
            print()
            for name, cell in zip(last.columns, row, strict=True):
                print(_wrapped(f"{name}: {cell}", indent="    "))
        print()
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
