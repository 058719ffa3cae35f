"""A section for every measure that the folder has results of, from its question, answer, chart and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import xarray as xr
from matplotlib.figure import Figure

from ..charts import inline, save, svg
from ..claims.evidence import is_real
from ..headlines import tables
from ..measure import Measure, measure, questions
from ..results.folder import Collected
from ..results.tables import Report, write_report
from ..run.files import waiting
from .page import Section

Results: TypeAlias = Mapping[str, xr.Dataset]

# The kinds that have a section, in the order of the page; measures of the registry that are not named here follow.
TITLES = {
    "leakage": "Leakage",
    "sinks": "Sinks",
    "trajectory": "Position 0",
    "jacobian": "Position sensitivity",
    "theory": "Theory",
    "bos-swap": "Position 0 swapped",
    "interventions/bos-swap": "Interventions at position 0",
    "retrieval": "Recall",
    "mechanism/retrieval": "Recall, its mechanism",
    "decode": "Decoded position",
    "map": "Map of fresh models",
    "match": "Toys beside models",
}
ORDER = tuple(TITLES)


def leading(results: Results, first: Sequence[str] = ()) -> Results:
    """The results of the models named, else those of real language models, else all."""
    named = {name: ds for name, ds in results.items() if name in first}
    return named or {name: ds for name, ds in results.items() if is_real(ds)} or results


def sections_of(
    collected: Collected, first: Sequence[str] = (), *, files: bool = False, more: Sequence[Measure] = ()
) -> list[Section]:
    """A section of each kind of results: the figure of the leading models (`leading`), tables with those in front.

    `files`: figures and tables are written beside the results, too, of all that the models named have. `more`: measures that
    the registry does not know.
    """
    known = {one.name: one for one in more}
    kinds = [kind for kind in ORDER if collected[kind] and Path(kind).name in {*questions(), *known}]
    kinds += [kind for kind in collected if kind in questions() and kind not in ORDER]
    parts = []
    for kind in kinds:
        ahead = leading(collected[kind], first)
        section, figure, report = _shown(kind, ahead, {**ahead, **collected[kind]}, known)
        if files and not set(ahead).isdisjoint(first):
            drawn = inline(waiting(_write(collected, kind, figure, report)).read_text(encoding="utf-8"))
        else:
            drawn = svg(figure)
        parts.append(replace(section, figure=drawn))
    return parts


def _shown(kind: str, ahead: Results, results: Results, known: Mapping[str, Measure]) -> tuple[Section, Figure, Report]:
    """A kind's section but for its figure, that figure, and what is written into its table's file."""
    name, title = kind.replace("/", "-"), TITLES.get(kind, kind.replace("-", " ").capitalize())
    one = known.get(Path(kind).name) or measure(Path(kind).name)
    report = tables(one, results)
    section = Section(name, title, one.question, one.answer(ahead), "", one.caption, report.tables, [report.described])
    return section, one.chart(ahead), report


def _write(collected: Collected, kind: str, figure: Figure, report: Report) -> Path:
    """The figure's and the tables' files; returns the SVG."""
    name = Path(kind).name
    write_report(report, collected.root / kind / f"{name}.md")
    return save(figure, collected.root / kind / name)[1]
