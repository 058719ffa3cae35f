"""What the commands show: progress and remarks on stderr, tables and sentences on stdout."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import processes

if TYPE_CHECKING:
    from .studies.tables import Report, Table

WIDEST = 120  # columns of running text


@contextmanager
def progress() -> Iterator[Callable[[str, float, float], None]]:
    """A bar per label, shown once there is something to show, so that bad input ends in a single line.

    Of several processes the first shows its own.
    """
    if not processes.first():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    shown = Progress(*columns, console=Console(stderr=True))
    tasks: dict[str, Any] = {}

    def advance(label: str, done: float, total: float) -> None:
        shown.start()
        if label not in tasks:
            tasks[label] = shown.add_task(label)
        shown.update(tasks[label], completed=done, total=total)

    try:
        yield advance
    finally:
        if tasks:
            shown.stop()


def remark(line: str) -> None:
    """One line on stderr, from the first process."""
    if processes.first():
        print("headwater:", line, file=sys.stderr)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table, every line of it whole, also in a pipe or a narrow terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    widths = [max(map(len, cells)) + 2 for cells in zip(columns, *rows, strict=True)]
    Console(width=sum(widths) + 2).print(table)


def print_report(report: Report, *, sentences: bool = False) -> None:
    """What was measured and what the columns are, then tables, and the sentences last, where a long table ends.

    `sentences`: the last table's cells are sentences, too long for columns; its rows are printed one below the other.
    """
    print(report.title)
    print(_wrapped(report.described))
    *above, last = report.tables
    for table in above if sentences else report.tables:
        _print_titled(table)
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


def _print_titled(table: Table) -> None:
    print(f"\n{table.title}:")
    print_table(table.columns, table.rows)


def print_written(files: Sequence[Path]) -> None:
    """Which files a command has written."""
    print(f"wrote {', '.join(map(str, files))}")
