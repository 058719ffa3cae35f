"""The page: all results under a folder as one HTML file, from their answers, charts, tables and the verdicts.

`sections` gathers what is said of every measure, `models` which models and what made the results, `page` writes the file
with its template and style; `measuring` runs the measures of a report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ..charts import save
from ..claims.claim import Claim
from ..measure import Measure, measure
from ..results.folder import Collected
from . import models
from .page import Page as Page
from .page import Section as Section
from .page import write as write
from .sections import leading as leading
from .sections import sections_of

SENTENCES = 5  # on the first screen
PICTURED = "jacobian"  # whose figure stands there


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

    Args:
        collected: results by kind and name.
        claims: the rows of the table of claims.
        first: models whose results stand first; if not given, real language models do.
        command: what made the page.
        remarks: what a reader has to know of this report as a whole, a model that a measure refused above all.
        files: figures and tables of the models that stand first are written beside their results, too.
        more: sections behind those of the measures.
        others: measures that the registry does not know.
    """
    parts = [*sections_of(collected, first, files=files, more=others), *more]
    pictured = PICTURED if collected[PICTURED] else ""
    if pictured:
        save(measure(pictured).chart(leading(collected[pictured], first)), collected.root / "overview")
    ((picture, caption),) = [(part.figure, part.caption) for part in parts if part.name == pictured] or [("", "")]
    parts = [replace(part, figure="") if part.name == pictured else part for part in parts]
    answers = [answer.partition(": ") for part in parts for answer in part.answers]
    names = Counter(name for name, _, _ in answers)
    model = max(names, key=lambda name: names[name], default="")
    sentences = [sentence[0].upper() + sentence[1:] for name, _, sentence in answers if name == model]
    return Page(
        model,
        sentences[:SENTENCES],
        picture,
        caption,
        parts,
        claims,
        models.models(collected),
        models.provenance(collected),
        command,
        [*models.quick_remarks(collected), *remarks],
    )
