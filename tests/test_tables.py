"""Numbers as text, and reports as they are printed."""

import math
from dataclasses import replace

import numpy as np

from probes.cli.console import print_report
from probes.results.tables import Report, Table, interval, number, ranges


def test_a_report_is_printed_with_its_sentences_last(capsys):
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
