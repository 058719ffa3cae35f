"""Tables and sentences of surveys: what is not as usual, what decides, what is too uncertain to be printed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from probes.cli.console import print_report
from probes.results.dataset import load
from probes.results.tables import Report, Table, interval, markdown, number, ranges
from probes.studies.bos_report import bos_report
from probes.studies.survey import PROBES

REPORTED = Path(__file__).resolve().parent.parent / "reports" / "llm"


def committed(folder: str) -> dict[str, xr.Dataset]:
    """Results of the repository, in the order of their table."""
    written = next((REPORTED / folder).glob("*.md")).read_text(encoding="utf-8")
    results = {ds.attrs["model"]: ds for ds in map(load, (REPORTED / folder).glob("*.nc.xz"))}
    return dict(sorted(results.items(), key=lambda item: written.index(f"| {item[0]} |")))


@pytest.mark.parametrize("folder", ["bos-swap"])
def test_committed_tables_are_those_of_the_committed_results(folder):
    results, kind = committed(folder), folder.rpartition("/")[2]
    report = PROBES[kind].report(results)
    written = (REPORTED / folder / f"{kind}.md").read_text(encoding="utf-8")
    lines = [report.title, report.described, *report.lines]
    lines += [line for table in report.tables for line in markdown(table)]
    assert [line for line in lines if line not in written] == []
    assert len(lines) > 20


def test_swaps_that_are_not_as_usual():
    name, ds = next(iter(committed("bos-swap").items()))
    removed, left_in, effects = bos_report({name: ds}).tables
    single = ds.isel(replacement=1, drop=True).assign_attrs(replacement=str(ds["replacement"].values[1]))
    alone = bos_report({name: single})
    for table, whole in zip(alone.tables, (removed, left_in, effects), strict=True):
        assert table.rows == [row for row in whole.rows if row[1] == single.attrs["replacement"]]
    old = bos_report({name: single.drop_vars([name for name in single if "steady" in str(name)])}).tables
    assert all(row[3:] == ["-"] * 3 for row in old[0].rows)  # made before the constant sink was told apart
    assert old[1].rows == alone.tables[1].rows != alone.tables[0].rows


def test_what_is_printed_is_narrow_enough_to_read(capsys):
    described = "Mean norms, " + "and what they are, " * 20 + "end."
    table = Table("Means", ("model", "mean"), [["ape", "1"]])
    print_report(Report("Sizes", described, [replace(table, title="First"), table], ["ape: one"]))
    lines = capsys.readouterr().out.splitlines()
    at = [lines.index(line) for line in ("Sizes", "First:", "Means:", "ape: one")]
    assert at == sorted(at)
    assert (at[0], at[-1]) == (0, len(lines) - 1)
    assert " ".join(lines[1 : at[1]]).split() == described.split()
    assert max(map(len, lines)) <= 120


def test_numbers_as_text():
    said = {(): "", (4,): "4", (3, 4): "3-4", (3, 4, 5, 9, 12, 13): "3-5, 9, 12-13", (0, 2, 4): "0, 2, 4"}
    assert {numbers: ranges(numbers) for numbers in said} == said
    values = (0.12345, -2, math.nan, np.float32(1e-7), 0, 999.6, -25_123, 1.2e6)
    assert [number(value) for value in values] == ["0.123", "-2", "-", "1e-07", "0", "1,000", "-25,100", "1.2e+06"]
    assert number(-0.125, ".0%") == "-12%"
    assert interval(0.5, 0.25, 0.75) == "0.5 [0.25, 0.75]"
    assert interval(-0.5, -1.25, 0.75, form=".0%") == "-50% [-125%, 75%]"
    assert interval(0.5) == interval(0.5, math.nan, 0.75) == "0.5"
    assert interval(math.nan, 0.25, 0.75) == "-"
    for low, high in ((-math.inf, math.inf), (-math.inf, 0.3), (0.1, math.inf)):
        assert interval(0.17, low, high, form=".0%") == "?"
