"""Published claims, each with the rule that decides it over results: what was claimed, what was measured, which verdict.

A verdict is never typed in. A `Statement` is what a source says with the rule in words; beside it, in the source's module of
`probes.sources` (or in the toy experiment that redoes its figure), stands the rule itself, a function of results that gives
what was measured and whether the statement holds. Where the results lack what a rule needs, the claim is "not measured here"
and says which command will measure it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .studies.collected import Collected
from .studies.tables import Report, Table

VERDICTS = {True: "holds", False: "does not hold", None: "not measured here"}
SEVERAL = {True: "hold", False: "do not hold", None: "not measured here"}  # behind a number of claims
COLUMNS = ("id", "source", "claim", "published", "measured", "model", "verdict", "rule", "command")
SLUG = re.compile(r"[a-z0-9.]+(-[a-z0-9.]+)*")


@dataclass(frozen=True)
class Claim:
    """One row: a statement, judged or not."""

    id: str
    source: str  # as in "[Wu] Fig. 4"
    claim: str  # one sentence
    published: str  # the number, "-" where there is none
    measured: str  # the value with its interval, in words; "-" where there is none
    model: str  # on what it was measured, or is to be
    rule: str  # what decides, with its threshold
    holds: bool | None  # None: the results do not hold what the rule needs
    command: str  # that gives the row, or that will

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`."""
        return VERDICTS[self.holds]


class Judged(NamedTuple):
    """What a rule found in results."""

    measured: str
    holds: bool | None
    model: str
    command: str  # of the results; empty where they were made from Python


@dataclass(frozen=True)
class Statement:
    """What a source says, and how it is decided; `model` and `command` are those of a measurement still to be made.

    `id` is lower case with hyphens and never changes, so that a row can be referred to.
    """

    id: str
    source: str
    claim: str
    rule: str
    published: str = "-"
    model: str = "-"
    command: str = ""

    def __post_init__(self) -> None:
        if not SLUG.fullmatch(self.id):
            raise ValueError(f"id '{self.id}' is no slug; give lower case letters, digits and single hyphens")

    def judged(self, measured: str = "-", holds: bool | None = None, *, model: str = "", command: str = "") -> Claim:
        """The statement with its verdict. What was not decided keeps the command that will decide it."""
        return Claim(
            self.id,
            self.source,
            self.claim,
            self.published,
            measured,
            model or self.model,
            self.rule,
            holds,
            self.command if holds is None else command or self.command,
        )


Rule = Callable[[Collected], Judged | None]  # None: nothing there to judge


def claims(collected: Collected) -> list[Claim]:
    """All claims about language models, judged by a folder's results, in the order of the sources' modules.

    Those about toys are with the toys: `toy.experiments.experiment.claims_of`.
    """
    from . import sources  # not above: they are stated in this module's terms

    rows = []
    for statement, rule in sources.STATED:
        found = rule(collected)
        if found is None:
            rows.append(statement.judged())
        else:
            rows.append(statement.judged(found.measured, found.holds, model=found.model, command=found.command))
    return rows


def merged(found: Iterable[Claim]) -> list[Claim]:
    """One list out of several that may judge the same statement.

    Per id, what was decided goes before what was not, and that before what nothing is known of; where several results
    decided it all stay, from the second on with "-2", "-3", ... behind the id. The order is that of the ids' first
    appearance.
    """
    by_id: dict[str, list[Claim]] = {}
    for claim in found:
        by_id.setdefault(claim.id, []).append(claim)
    rows = []
    for name, same in by_id.items():
        decided = [claim for claim in same if claim.holds is not None]
        known = [claim for claim in same if claim.measured != "-"]
        for number, claim in enumerate(decided or (known or same)[:1], start=1):
            rows.append(claim if number == 1 else replace(claim, id=f"{name}-{number}"))
    return rows


def claims_table(found: Sequence[Claim]) -> Report:
    """The table of claims.md, sorted by source; how many have which verdict above it.

    Write it with `probes.studies.survey.write_report`.
    """
    ordered = sorted(found, key=lambda claim: (claim.source.partition("]")[0], claim.source, claim.id))
    rows = [
        [
            f"`{claim.id}`",
            claim.source,
            claim.claim,
            claim.published,
            claim.measured,
            claim.model,
            claim.verdict,
            claim.rule,
            f"`{claim.command}`",
        ]
        for claim in ordered
    ]
    lines = [_counted("all", found)]
    for source in dict.fromkeys(origin(claim) for claim in ordered):
        lines.append(_counted(source, [claim for claim in ordered if origin(claim) == source]))
    described = (
        "Each verdict is computed from the results in this folder by the rule in its row. Brackets hold 95 % intervals or, "
        "over fresh models and toys, the range of the seeds. Not measured here: the command in the row will measure it."
    )
    return Report("Published claims, measured again", described, [Table("Claims", COLUMNS, rows)], lines)


def origin(claim: Claim) -> str:
    """The source without the place in it: "[Gu]" of "[Gu] Table 1"."""
    found = re.search(r"\[[^]]+\]", claim.source)
    return found.group() if found else claim.source


def _counted(name: str, found: Sequence[Claim]) -> str:
    counts = Counter(claim.holds for claim in found)
    return f"{name}: {len(found)} claims, " + ", ".join(f"{counts[holds]} {said}" for holds, said in SEVERAL.items())
