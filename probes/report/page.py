"""`index.html`: one file that opens from disk without a network, on any screen, light or dark."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from ..claims.claim import POPULATIONS, VERDICTS, Claim, headline, origin
from ..results.tables import Table
from ..run.files import atomic

NAME = "index.html"
QUESTION = "Where does a language model’s sense of position come from?"
JUDGED = ("holds", "does not hold", "undecided")


@dataclass(frozen=True)
class Section:
    """What the page says of one measure."""

    name: str  # its anchor
    title: str
    question: str
    answers: Sequence[str] = ()  # "MODEL: a sentence.", above the figure
    figures: Sequence[str] = ()  # addresses of images
    tables: Sequence[Table] = ()  # folded
    note: str = ""  # what exactly was measured; folded, too


@dataclass(frozen=True)
class Page:
    """All that stands on it, from the first screen down."""

    model: str  # that the sentences are about
    sentences: Sequence[str]  # the answer, beside the picture
    picture: str  # the address of an image
    sections: Sequence[Section]
    claims: Sequence[Claim]
    provenance: Table
    command: str
    remarks: Sequence[str] = ()  # what a reader has to know of all of it: quick results, a model that was refused


def write(page: Page, out: str | Path) -> Path:
    """Write `index.html` into the folder `out` and return its path."""
    judged = [claim for claim in page.claims if claim.verdict in JUDGED]
    folder = Path(__file__).parent
    # Everything is text unless it is marked as ours.
    made = Environment(loader=FileSystemLoader(folder), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    text = made.get_template("page.html.j2").render(
        question=QUESTION,
        style=Markup((folder / "style.css").read_text(encoding="utf-8")),
        page=page,
        headline=headline(page.claims),
        judged=sorted(judged, key=lambda claim: (VERDICTS.index(claim.verdict), origin(claim))),
        counts=Counter(claim.verdict for claim in judged),
        populations=POPULATIONS,
    )
    path = Path(out) / NAME
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path
