"""Verdicts on the page of the sources' figures: each id in a row's last cell gets its verdict from `reports/claims.md`."""

import re
from pathlib import Path
from typing import Any

PAGE = "figures.md"
LEDGER = Path(__file__).resolve().parents[2] / "reports" / "claims.md"
SOURCES = ("[Chowdhury]", "[Wu]", "[Ruscio]", "[Liu-4]", "[Liu-7]")


def judged(page: str, ledger: str) -> str:
    """The page with verdicts; an id that the ledger lacks raises, as does a row of the sources that the page lacks."""
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in ledger.splitlines()]
    columns = next(row for row in rows if row[:1] == ["id"])
    known = {row[0]: dict(zip(columns, row, strict=True)) for row in rows if row and row[0].startswith("`")}
    named: set[str] = set()

    def with_verdict(found: re.Match[str]) -> str:
        named.add(found[0])
        if found[0] not in known:
            raise ValueError(f"{PAGE} names {found[0]}, which is no row of {LEDGER.name}")
        return f"{found[0]} *{known[found[0]]['verdict']}*"

    def with_verdicts(row: re.Match[str]) -> str:
        return row[1] + re.sub(r"`[^`]+`", with_verdict, row[2])

    page = re.sub(r"(?m)^(\|.*\|)([^|\n]*\|)$", with_verdicts, page)
    published = [i for i, row in known.items() if row["source"].startswith(SOURCES) and row["kind"] != "ours"]
    if missing := sorted(set(published) - named):
        raise ValueError(f"{PAGE} lacks {', '.join(missing)}")
    return page


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return judged(markdown, LEDGER.read_text(encoding="utf-8")) if page.file.src_uri == PAGE else markdown
