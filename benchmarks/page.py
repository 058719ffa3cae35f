"""The page of all benchmarks, from rows alone: what was measured where, the head table, a section per case, figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import Row, Rows, Settings, table
from plots import draw

from probes.run.files import atomic


def write_page(out: Path, rows: Rows, settings: Settings, cases: Mapping[str, Any]) -> Path:
    """Write OUT/benchmarks.md (on a GPU OUT/benchmarks-cuda.md) and its figures; the page's path."""
    measured, absent = {}, []
    for name, case in cases.items():
        jobs = case.jobs(settings)
        if any(rows.get(job, label) is not None for job in jobs for label in job.points):
            measured[name] = case
        missing = [f"{job.name} at {label}" for job in jobs for label in rows.missing(job)]
        if missing:
            absent.append(f"{case.TITLE} ({'; '.join(missing) if name in measured else 'all'})")
    draw(out / "benchmarks", rows, settings, measured)
    sections = {name: case.section(rows, settings) for name, case in measured.items()}
    heads = [head for section in sections.values() for head in section.headlines]
    lines = ["# Benchmarks" + (" on a GPU" if settings.cuda else ""), "", *introduction(rows, settings)]
    lines += ["", "## In short", "", *table(["what", "ours", "the other", "ratio"], heads)]
    for name, section in sections.items():
        lines += ["", f"## {cases[name].TITLE}", "", *section.lines]
    if absent:
        lines += ["", f"Not run: {'. '.join(absent)}."]
    path = out / ("benchmarks-cuda.md" if settings.cuda else "benchmarks.md")
    with atomic(path) as temporary:
        temporary.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    return path


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
        "Contenders take turns in one process and are compared round by round; quartiles of the rounds stand in "
        "parentheses. The machine is shared: seconds hold for it and for that hour. Quote ratios.",
    ]
    if not settings.cuda:
        command = "`python benchmarks/run.py --device cuda`"
        lines += ["", f"Not measured on GPU ({command} would write `benchmarks-cuda.md`)."]
    if machine.get("sizes") == "quick":
        lines += ["", "**Small sizes (`--quick`): they show that everything runs, and say little about speed.**"]
    return lines


def _span(found: list[Row], name: str) -> str:
    return ", ".join(dict.fromkeys(str(row[name]) for row in found if name in row)) or "unknown"
