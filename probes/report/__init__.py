"""The page: all results under a folder as one HTML file, from their answers, charts, tables and the verdicts.

`page` writes the file with its template and style; `measuring` runs the measures of a report.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import xarray as xr

from ..charts import image, save
from ..claims.claim import Claim
from ..claims.evidence import is_real
from ..headlines import tables
from ..measure import Measure, measure, questions
from ..results.dataset import quickly, recorded
from ..results.folder import Collected
from ..results.tables import Table, write_report
from .page import Page as Page
from .page import Section as Section
from .page import write as write

SENTENCES = 5  # on the first screen
PICTURED = "jacobian"  # whose figure stands there
Results: TypeAlias = Mapping[str, xr.Dataset]

# The kinds that have a section, in the order of the page; measures of the registry that are not named here follow.
ORDER = (
    *("leakage", "sinks", "trajectory", "jacobian", "theory", "bos-swap", "interventions/bos-swap"),
    *("retrieval", "mechanism/retrieval", "decode", "map", "match"),
)


def page_of(
    collected: Collected,
    claims: Sequence[Claim],
    *,
    first: Sequence[str] = (),
    command: str,
    remarks: Sequence[str] = (),
    files: bool = False,
    more: Sequence[Section] = (),
    others: Sequence[Measure] = (),
) -> Page:
    """The page of all results; its picture, that of position sensitivity, is written beside it as overview.png and .svg.

    Models named `first` stand first; if none is, real language models do. `remarks` are what a reader has to know of this
    report as a whole, a model that a measure refused above all. With `files` figures and tables of the models that stand
    first are written beside their results, too. `more` are sections behind those of the measures, `others` measures that the
    registry does not know.
    """
    parts = [*sections_of(collected, first, files=files, more=others), *more]
    pictured = PICTURED if collected[PICTURED] else ""
    if pictured:
        save(measure(pictured).chart(leading(collected[pictured], first)), collected.root / "overview")
    (figures,) = [part.figures for part in parts if part.name == pictured] or [()]
    parts = [replace(part, figures=()) if part.name == pictured else part for part in parts]
    answers = [answer.partition(": ") for part in parts for answer in part.answers]
    names = Counter(name for name, _, _ in answers)
    model = max(names, key=lambda name: names[name], default="")
    sentences = [sentence[0].upper() + sentence[1:] for name, _, sentence in answers if name == model]
    return Page(
        model,
        sentences[:SENTENCES],
        "".join(figures),
        parts,
        claims,
        provenance(collected),
        command,
        [*quick_remarks(collected), *remarks],
    )


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
        name = Path(kind).name
        one, ahead = known.get(name) or measure(name), leading(collected[kind], first)
        report, figure = tables(one, {**ahead, **collected[kind]}), one.chart(ahead)
        if files and not set(ahead).isdisjoint(first):
            write_report(report, collected.root / kind / f"{name}.md")
            save(figure, collected.root / kind / name)
        anchor, title = kind.replace("/", "-"), kind.replace("-", " ").replace("/", ": ").capitalize()
        told = (one.question, one.answer(ahead), [image(figure)], report.tables, report.described)
        parts.append(Section(anchor, title, *told))
    return parts


# ---------------------------------------------------------------------------------------------------------- provenance

HASH = 12  # characters of a hash that are shown
COLUMNS = ("result", "position 0 holds", "command", "when (UTC)", "with", "on", "weights", "tokens")


def _first(ds: xr.Dataset) -> str:
    policy, token = ds.attrs.get("first_policy", "-"), ds.attrs.get("first_ids", ds.attrs.get("first_id"))
    words = {"bos": f"BOS, id {token}", "none": "text", "-": "-"}
    return words.get(policy, f"a chosen token, id {token}")


def provenance(collected: Collected) -> Table:
    """What made every result."""
    rows = []
    for kind in collected:
        for name, ds in collected[kind].items():
            packages = [package for package in ("headwater", "torch", "transformers") if package in ds.attrs]
            place = recorded(ds, "hardware") or [v for key in ("backend", "dtype", "device") for v in recorded(ds, key)]
            rows.append(
                [
                    f"{kind}: {name}",
                    _first(ds),
                    str(ds.attrs.get("command", "")) or "called from Python",
                    max(recorded(ds, "created"), default="").replace("T", " ").removesuffix("+00:00"),
                    ", ".join(f"{package} {ds.attrs[package]}" for package in packages),
                    ", ".join(dict.fromkeys(place)),
                    ", ".join(value[:HASH] for value in recorded(ds, "weights") if value),
                    str(ds.attrs.get("tokens_sha256", ""))[:HASH],
                ]
            )
    return Table("What made each result; hashes are of weights and of token ids", COLUMNS, rows)


def quick_remarks(collected: Collected) -> list[str]:
    """A sentence where some of the results are of a quick report: which, and how they are measured in full."""
    quick: dict[str, list[str]] = {}
    for kind in collected:
        for name, ds in collected[kind].items():
            if kind != "match" and quickly([ds]):  # a match is quick in a way of its own
                quick.setdefault(name, []).append(kind)
    which = "; ".join(f"{', '.join(kinds)} of {name}" for name, kinds in quick.items())
    return [f"Quick: few prompts, wide intervals ({which}). headwater report without --quick measures in full."] * bool(
        quick
    )
