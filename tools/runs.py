"""Two recipes' runs against each other, every number of every measurement, with the run as the unit.

    python tools/runs.py runs/learned tiny-no-sink-logits tiny-sink-logits --out reports/controlled/learned-sinks.md

FOLDER holds results by measurement, FOLDER/sinks/sinks-RECIPE-seed0.nc and so on. Runs of one seed are a pair: they saw the
same text in the same order. Of each pair comes B / A or B - A, as in `headwater compare`; of the pairs, the mean (of
logarithms where it is a ratio) with Student's t.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from probes.results.statistics import over_runs
from probes.results.tables import Report, Table, interval, number, write_report
from probes.studies.compare import Row, compare_results

COLUMNS = ("measurement", "of", "number", "A", "B", "B against A")


def compared(folder: Path, a: str, b: str) -> dict[tuple[str, str, str], list[Row]]:
    """By measurement, what it is of and its name: that number in every pair of runs."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for file in sorted(folder.glob(f"*/*-{a}-seed*.nc")):
        both = compare_results(file, file.with_name(file.name.replace(f"-{a}-", f"-{b}-")))
        for row in both.rows:
            found.setdefault((both.measurement, row.of, row.name), []).append(row)
    return found


def cells(rows: list[Row]) -> Iterator[str]:
    """A's mean, B's, and the change, over the pairs that have both; what is the same in all of them, as a difference between
    fresh weights of one draw, has no interval.
    """
    known = [row for row in rows if np.isfinite(row.change.value)]
    a, b = (np.array([getattr(row, side) for row in known]) for side in ("a", "b"))
    yield from (number(float(side.mean())) for side in (a, b))
    ratio = all(row.ratio for row in known)
    changes = np.log(b / a) if ratio else b - a
    change = (
        (changes[0], math.nan, math.nan) if np.allclose(changes, changes[0], 1e-6, 1e-12) else over_runs(changes)[:3]
    )
    yield f"x {interval(*map(float, np.exp(change)), form='#.3g')}" if ratio else interval(*change, form="+.3g")


def main() -> None:
    """Write the table."""
    given = argparse.ArgumentParser(description="Two recipes' runs against each other.")
    given.add_argument("folder", type=Path)
    given.add_argument("recipes", nargs=2, metavar="RECIPE")
    given.add_argument("--out", type=Path, required=True)
    asked = given.parse_args()
    found = compared(asked.folder, *asked.recipes)
    if not found:
        raise SystemExit(
            f"'{asked.folder}' has no results named KIND/KIND-{asked.recipes[0]}-seedN.nc; give the folder above the kinds"
        )
    pairs = max(map(len, found.values()))
    described = (
        f"A: {asked.recipes[0]}, B: {asked.recipes[1]}; {pairs} pairs of runs, one seed each. x: ratio B / A, + and -: "
        "difference B - A, means over pairs; brackets: 95 % intervals by Student's t over pairs."
    )
    known = {key: rows for key, rows in found.items() if any(np.isfinite(row.change.value) for row in rows)}
    table = Table("B against A", COLUMNS, [[*key, *cells(rows)] for key, rows in known.items()])
    report = Report("Controlled runs against each other", described, [table], [])
    write_report(report, asked.out, f"python tools/runs.py {asked.folder} {' '.join(asked.recipes)} --out {asked.out}")


if __name__ == "__main__":
    main()
