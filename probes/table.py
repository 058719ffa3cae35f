"""What a command prints of its results and NAME.md holds: headlines first, the full tables behind them, answers last."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import xarray as xr

from .headlines import headline_table
from .measure import Measure
from .results.dataset import number_types, options_of, quickly, recorded
from .results.tables import Report, Table, write_report

SHOWN = 12  # rows of headlines in the terminal


def described(measure: Measure, results: Mapping[str, xr.Dataset]) -> str:
    """What results rest on, in one line: prompts, their length, text, number types and the options."""
    every = list(results.values())
    sizes = {name: [str(ds.sizes[dim]) for ds in every if dim in ds.sizes] for dim, name in DIMS.items()}
    parts = [*quickly(every), *(f"{' / '.join(dict.fromkeys(n))} {name}" for name, n in sizes.items() if n)]
    for name in ("text_source", "backend", "device"):
        parts += [" / ".join(dict.fromkeys(value for ds in every for value in recorded(ds, name)))]
    parts.append(" / ".join(dict.fromkeys(kind for ds in every for kind in number_types(ds))))
    options = {name: value for name, value in options_of(every[0]).items() if name != "measurement"}
    parts += [f"{name.replace('_', ' ')} {value}" for name, value in options.items() if value is not None]
    return ", ".join(filter(None, parts))


DIMS = {"prompt": "prompts", "position": "tokens each", "context": "lists"}


def tables(measure: Measure, results: Mapping[str, xr.Dataset]) -> Report:
    """Everything there is to tell of results."""
    found = [headlines(measure, results), *measure.tables(results)]
    return Report(measure.question, described(measure, results), found, measure.answer(results))


def headlines(measure: Measure, results: Mapping[str, xr.Dataset], most: int | None = None) -> Table:
    """The headlines, `most` of them at most; what is left out is counted in a last row."""
    table = headline_table(measure, results)
    left = len(table.rows) - (most or len(table.rows))
    if left <= 1:
        return table
    more = [f"... {left} more in {measure.name}.md", *([""] * (len(table.columns) - 1))]
    return Table(table.title, table.columns, [*table.rows[:most], more])


def write_tables(measure: Measure, results: Mapping[str, xr.Dataset], path: Path) -> None:
    """NAME.md: the answers, the headlines, the full tables, under the command that made them."""
    write_report(tables(measure, results), path)
