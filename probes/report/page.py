"""`index.html`, rendered from results, claims and sentences; one file that needs nothing beside it."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image
from plotly.offline import get_plotlyjs

from ..claims.claim import DECIDED, POPULATIONS, VERDICTS, Claim, headline, origin, said
from ..errors import InputError
from ..figures.style import BLACK
from ..results.folder import Collected
from ..run.files import atomic, waiting
from . import cards, formulas, sections

NAME = "index.html"
TEMPLATES = Path(__file__).parent / "templates"
QUESTION = "Where does a pretrained language model’s sense of position come from?"
PICTURES = 1_500_000  # bytes of embedded figures in all; the page with plotly (4.8 MB) and data then stays below 8 MB
SOURCES = {
    "Chowdhury": ("arXiv 2603.10123", "https://arxiv.org/abs/2603.10123"),
    "Wu": ("arXiv 2502.01951", "https://arxiv.org/abs/2502.01951"),
    "Ruscio": ("arXiv 2606.06160", "https://arxiv.org/abs/2606.06160"),
    "Gu": ("arXiv 2410.10781", "https://arxiv.org/abs/2410.10781"),
    "Liu+": ("Lost in the Middle, arXiv 2307.03172", "https://arxiv.org/abs/2307.03172"),
    "Liu-4, Liu-7": ("Sparse attention 4 and 7, kindxiaoming.github.io", "https://kindxiaoming.github.io"),
}


def build(
    collected: Collected,
    claims: Sequence[Claim],
    out: str | Path,
    *,
    command: str,
    picture: str | Path | None,
    sentences: Sequence[str],
    remarks: Sequence[str] = (),
) -> Path:
    """Write `index.html` into the folder `out` and return its path.

    Args:
        collected: results by kind and name; whatever is missing is named on the page with the command that makes it.
        claims: the rows of the table of claims, in its first order.
        out: folder.
        command: what made the page.
        picture: PNG or SVG of the first screen; none if not given.
        sentences: the answer, on the first screen.
        remarks: what a reader has to know of this report as a whole, a model that a study refused above all.

    Raises:
        InputError: the folder cannot be written to, or the picture is none or not there.
    """
    out, parts = Path(out), sections.sections(collected)
    first = _embedded(Path(picture)) if picture is not None else ""
    charts = {chart.name: {"plot": chart.plot, "heads": chart.heads} for part in parts for chart in part.charts}
    page = (
        _environment()
        .get_template("page.html.j2")
        .render(
            question=QUESTION,
            sentences=list(sentences),
            remarks=[*cards.quick_remarks(collected), *remarks],
            picture=first,
            command=command,
            cards=cards.cards(collected),
            claims=list(claims),
            counts=Counter(claim.verdict for claim in claims),
            headline=headline(claims),
            verdicts=VERDICTS,
            decided=DECIDED,
            populations=POPULATIONS,
            sources=list(dict.fromkeys(map(origin, claims))),
            references=SOURCES,
            sections=parts,
            pictures=_of_toys(collected, [one for part in parts for one in part.pictures], PICTURES - len(first)),
            methods=formulas.METHODS,
            provenance=cards.provenance(collected),
            charts=charts,
            plotly=Markup(get_plotlyjs()),
            black=BLACK,
        )
    )
    path = out / NAME
    with atomic(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return path


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.tests["a_number"] = cards.is_number
    environment.filters["short_hash"] = lambda value: value[: cards.HASH]
    environment.filters["mathematical"] = formulas.mathematical
    environment.filters["displayed"] = formulas.displayed
    environment.globals["asset"] = lambda name: Markup((TEMPLATES / name).read_text(encoding="utf-8"))
    environment.globals |= {"said": said, "origin": origin, "searched": _searched}
    return environment


def _searched(claim: Claim) -> str:
    """What of a claim the filter finds words in."""
    fields = (
        *(claim.id, claim.kind, POPULATIONS[claim.population], claim.source, claim.claim),
        *(claim.published, claim.measured, claim.tiny, claim.model, claim.rule),
    )
    return " ".join(fields).lower()


def _embedded(file: Path) -> str:
    """A figure as a `data:` URI.

    Raises:
        InputError: there is no such file, or it is no PNG or SVG.
    """
    kinds = {".png": "image/png", ".svg": "image/svg+xml"}
    if file.suffix not in kinds:
        raise InputError(f"picture '{file}' is no PNG or SVG; give one")
    try:
        content, kind = waiting(file).read_bytes(), kinds[file.suffix]
    except OSError as error:
        raise InputError(f"picture '{file}' cannot be read ({error.strerror}); draw it first") from None
    if file.suffix == ".png":
        smaller = io.BytesIO()
        with Image.open(io.BytesIO(content)) as image:
            image.save(smaller, format="webp", lossless=True, method=4)
        if len(smaller.getvalue()) < len(content):
            content, kind = smaller.getvalue(), "image/webp"
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


def _of_toys(collected: Collected, pictures: Sequence[sections.Picture], room: int) -> dict[str, str]:
    """Toys' figures that lie beside their results, as far as there is room for them; the rest stay files."""
    found: dict[str, str] = {}
    for one in pictures:
        result = collected.files.get(("toy", one.kind))
        files = [result.with_name(one.file + end) for end in (".png", ".svg")] if result else []
        file = next((file for file in files if file.is_file() and file.stat().st_size * 4 // 3 <= room), None)
        if file is not None:
            found[one.file] = _embedded(file)
            room -= len(found[one.file])
    return found
