"""The page of all benchmarks, from rows alone: what was measured where, the head table, a section per case, figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import Job, Row, Rows, Section, Settings, table
from plots import draw

from probes.errors import InputError
from probes.run.files import atomic

BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"


def write_page(out: Path, rows: Rows, settings: Settings, cases: Mapping[str, Any]) -> Path:
    """Write OUT/benchmarks.md (on a GPU OUT/benchmarks-cuda.md) and its figures; the page's path."""
    folder = out / "benchmarks"
    sections: dict[str, tuple[Any, Section]] = {}
    absent: list[str] = []
    for name, case in cases.items():
        jobs = case.jobs(settings)
        measured = any(rows.get(job, label) is not None for job in jobs for label in job.points)
        if measured:
            sections[name] = (case, case.section(rows, settings, folder))
        missing = [f"{job.name} at {label}" for job in jobs for label in unmeasured(job, rows)]
        if missing:
            absent.append(f"{case.TITLE} ({'all' if not measured else '; '.join(missing)})")
    draw(folder, rows, settings, {name: case for name, (case, _) in sections.items()})
    lines = ["# Benchmarks" + (" on a GPU" if settings.cuda else ""), "", *introduction(rows, settings)]
    heads = [head for _, found in sections.values() for head in found.headlines]
    lines += ["", "## In short", "", *table(["what", "ours", "the other", "ratio"], heads)]
    for case, found in sections.values():
        lines += ["", f"## {case.TITLE}", "", *found.lines]
    if absent:
        lines += ["", f"Not run: {'. '.join(absent)}."]
    path = out / ("benchmarks-cuda.md" if settings.cuda else "benchmarks.md")
    with atomic(path) as temporary:
        temporary.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    return path


def write_headlines(readme: Path, rows: Rows, settings: Settings, cases: Mapping[str, Any]) -> None:
    """Put the head table between the two marks of a page.

    Raises:
        InputError: the page has no such marks.
    """
    text = readme.read_text(encoding="utf-8")
    before, found, rest = text.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise InputError(f"'{readme}' has no place for the table; put the lines {BEGIN} and {END} into it")
    heads = [
        head
        for case in cases.values()
        if any(rows.of(job) for job in case.jobs(settings))
        for head in case.section(rows, settings, readme.parent).headlines
    ]
    body = "\n".join(table(["what", "ours", "the other", "ratio"], heads))
    with atomic(readme) as temporary:
        temporary.write_text(f"{before}{BEGIN}\n{body}\n{END}{after}", encoding="utf-8")


def unmeasured(job: Job, rows: Rows) -> list[str]:
    """Labels without a row, but those that a shorter one that did not survive stands for."""
    if job.rising and any("failed" in (rows.get(job, label) or {}) for label in job.points):
        return []
    return [label for label in job.points if rows.get(job, label) is None]


def introduction(rows: Rows, settings: Settings) -> list[str]:
    """The command, the machine, how numbers are to be read."""
    machine, found = rows.machine, list(rows.found.values())
    commands = list(dict.fromkeys(row["command"] for row in found if "command" in row))
    lines = [f"`{command}`" + ("" if n == len(commands) - 1 else "  ") for n, command in enumerate(commands)]
    made = f"{_span(found, 'date')}, commit {_span(found, 'commit')}"
    versions = ", ".join(f"{name} {machine[name]}" for name in ("python", "torch", "transformers", "transformer-lens"))
    cores, threads = (f"{machine[name]} {name[:-1] if machine[name] == 1 else name}" for name in ("cores", "threads"))
    place = f"{machine['device']}, beside " if settings.cuda else ""
    lines += [
        "",
        f"{place}{machine['processor']}, {cores}, {threads}, {machine['system']}; {versions}; {made}. Rows as JSON, "
        f"with the times of every round: [`{rows.path.name}`](benchmarks/{rows.path.name}).",
        "",
        "A time is compared with that of what it was timed in turn with, in one process, round by round; quartiles of the "
        "rounds stand in parentheses. Such a machine is shared: seconds hold for it and for that hour, and what is to be "
        "quoted are ratios.",
    ]
    if not settings.cuda:
        lines += [
            "",
            "Not measured on GPU (`python benchmarks/run.py --device cuda` would write `benchmarks-cuda.md`).",
        ]
    if machine.get("sizes") == "quick":
        lines += ["", "**Small sizes (`--quick`): they show that everything runs, and say little about speed.**"]
    return lines


def _span(found: list[Row], name: str) -> str:
    return ", ".join(dict.fromkeys(str(row[name]) for row in found if name in row)) or "unknown"
