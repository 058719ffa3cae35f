"""Statements and their verdicts: what was claimed, what was measured, and whether it holds, by a rule over intervals.

A verdict is never typed in: the function of a statement (`probes.claims.ledger`) gives what was measured, and the test that
decides. Where results lack what it needs, the claim is "not measured" and names the command that will measure it.

A statement speaks of one population, and only that population decides it: fresh weights of any size; language models
that others trained, of about 100 million parameters and more; controlled training, where one ingredient differs; toys that
do their task.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from ..errors import plural
from ..results.tables import Report, Table

Verdict = Literal["holds", "does not hold", "undecided", "not measured", "not trained"]
# A source said it; its reviewers or readers asked for it; we add it; it follows from definitions, and checks the code.
Kind = Literal["published", "request", "ours", "theorem"]
Population = Literal["initialization", "pretrained", "controlled", "toys"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
DECIDED: tuple[Verdict, ...] = ("holds", "does not hold")
POPULATIONS: dict[Population, str] = {
    "initialization": "models at initialization",
    "pretrained": "pretrained language models",
    "toys": "toys",
    "controlled": "controlled training",
}
APART = {  # kinds that are no sentences of the sources
    "request": "asked by reviewers and readers",
    "ours": "our own generalisations and controls",
    "theorem": "theorems and what is true by construction, which test the code",
}
IN = " in the"  # behind a verdict, before the models
COLUMNS = (
    *("id", "kind", "population", "source", "claim", "published"),
    *("measured", "tiny", "model", "verdict", "rule", "command"),
)


class Judged(NamedTuple):
    """What results say of a statement."""

    measured: str
    verdict: Verdict
    model: str
    command: str  # of the results; empty where they were made from Python
    tiny: str = "-"


def verdict_of(holds: bool | None) -> Verdict:
    """Of what no interval is needed for: a theorem's curve, one bit compared with another. None: it cannot be told."""
    return "undecided" if holds is None else DECIDED[not holds]


@dataclass(frozen=True)
class Claim:
    """One row, one sentence: what a source says and how it is decided; where it was judged, what was measured, the verdict.

    `id` is lower case with hyphens and never changes, so that a row can be referred to. `model` and `command` are those of
    the results that judged it, else of a measurement still to be made.
    """

    id: str
    source: str  # as in "[Wu] Fig. 4"
    claim: str  # one sentence
    rule: str  # what decides, with its threshold
    published: str = "-"  # the number, "-" where there is none
    model: str = "-"
    command: str = ""
    kind: Kind = "published"
    population: Population = "toys"
    measured: str = "-"  # the value with its interval, in words; "-" where there is none
    verdict: Verdict = "not measured"
    tiny: str = "-"  # the same of models too small to decide

    @property
    def standing(self) -> str:
        """The verdict; of language models that a statement in general holds for, how many they are."""
        models = len(self.model.split(", "))
        general = self.verdict == "holds" and self.population == "pretrained" and self.kind != "theorem"
        return f"{self.verdict}{IN} {plural(models, 'model')} judged" if general else self.verdict

    def judged(
        self,
        measured: str = "-",
        verdict: Verdict | bool | None = None,
        model: str = "",
        command: str = "",
        tiny: str = "-",
    ) -> Claim:
        """The statement with its verdict, or with what `verdict_of` makes of a bool; without any it is not measured.

        What was not decided keeps the command that will decide it.
        """
        if not isinstance(verdict, str):
            verdict = "not measured" if verdict is None and measured in ("", "-") else verdict_of(verdict)
        command = command or self.command if verdict in DECIDED else self.command or command
        model = model or self.model
        return replace(self, measured=measured, verdict=verdict, model=model, command=command, tiny=tiny)


def merged(claims: Iterable[Claim]) -> list[Claim]:
    """One list out of several that may judge the same statement.

    Per id, what was decided goes before what was not, and that before what nothing is known of; where several results
    decided it all stay, from the second on with "-2", "-3", ... behind the id. The order is that of the ids' first
    appearance.
    """
    by_id: dict[str, list[Claim]] = {}
    for claim in claims:
        by_id.setdefault(claim.id, []).append(claim)
    rows = []
    for name, same in by_id.items():
        decided = [claim for claim in same if claim.verdict in DECIDED]
        known = [claim for claim in same if claim.measured != "-"]
        for number, claim in enumerate(decided or (known or same)[:1], start=1):
            rows.append(claim if number == 1 else replace(claim, id=f"{name}-{number}"))
    return rows


def beside(claims: Sequence[Claim], file: Path) -> tuple[list[Claim], list[str]]:
    """What an earlier table of claims knew and these results do not have: (the rows, the ids of those that are kept).

    A row is kept where now nothing was measured for it, or less: fewer models, of any size; and only if its rule was
    today's.
    """
    earlier = {cells[0].strip("`"): dict(zip(COLUMNS, cells, strict=True)) for cells in _rows(file)}
    by_id = {claim.id: claim for claim in claims}
    parted = {name: name.rpartition("-") for name in earlier if name not in by_id}
    several = {name: base for name, (base, _, number) in parted.items() if base in by_id and number.isdigit()}
    rows, kept = [], []
    for claim in [*claims, *(replace(by_id[base], id=name) for name, base in several.items())]:
        before = earlier.get(claim.id, {})
        known = {name: before.get(name, "-").strip("`") for name in ("measured", "tiny", "model", "verdict", "command")}
        known["verdict"] = known["verdict"].partition(IN)[0]
        less = any(getattr(claim, name) == "-" != known[name] for name in ("measured", "tiny"))
        less |= any(_models(getattr(claim, name)) < _models(known[name]) for name in ("tiny", "model"))
        ruled = before.get("rule") == claim.rule.strip()  # no verdict by a rule of then stands beside that of today
        if ruled and known["verdict"] in VERDICTS and (less or claim.id in several):
            claim = replace(claim, **known)
            kept.append(claim.id)
        rows.append(claim)
    return rows, kept


def _rows(file: Path) -> Iterator[list[str]]:
    """The cells of a table as `claims_table` is written; of another file, or where there is none, nothing."""
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == len(COLUMNS) and cells[0].startswith("`"):
            yield cells


def _models(cell: str) -> set[str]:
    """Who is spoken of, as in "a: 1 [0, 2]; b: 3" and "a, b"."""
    return set(re.findall(r"(?:^|; |, )([\w./@-]+)(?=: |, |; |$)", cell))


def claims_table(claims: Sequence[Claim]) -> Report:
    """The table of claims.md, sorted by source; above it how the sentences of each source fare.

    Write it with `probes.results.tables.write_report`.
    """
    ordered = sorted(claims, key=lambda claim: (claim.source.partition("]")[0], claim.source, claim.id))
    rows = [[f"`{c.id}`", *(str(getattr(c, name)) for name in COLUMNS[1:-1]), f"`{c.command}`"] for c in ordered]
    for row, claim in zip(rows, ordered, strict=True):
        row[COLUMNS.index("verdict")] = claim.standing
    described = (
        "Each row is one sentence, whose verdict its rule computes from the results in this folder; where a row has several "
        "numbers the rule is over all of them. Brackets hold 95 % intervals: "
        "over documents, or by Student's t over runs (fresh models, controlled training, toys). Medians have their range in "
        "parentheses, 0.3 (0.2 to 0.5). A statement holds where the whole interval lies on its side, does not hold where it "
        "lies on the other, and is undecided otherwise. Numbers without an interval count as known within a tenth (places "
        "of the map) or a quarter (sizes of sinks). A number in a rule that the source does not give is our threshold. "
        "Statements about pretrained language models are judged on models of "
        "100 million parameters and more, which the column model names; the column tiny has what our models of 1 million "
        "say, which decides nothing. Not measured: the command in the row will measure it."
    )
    return Report("Published claims, measured again", described, [Table("Claims", COLUMNS, rows)], headline(claims))


def headline(claims: Sequence[Claim]) -> list[str]:
    """How sentences fare, by source, and on which models; apart, what reviewers asked, our own, and theorems."""
    groups: dict[str, list[Claim]] = {}
    for kind in ("published", *APART):
        for claim in (claim for claim in claims if claim.kind == kind):
            groups.setdefault(APART.get(kind) or origin(claim), []).append(claim)
    return [f"{name}: {plural(len(of), 'sentence')}, {fared(of)}" for name, of in groups.items()]


def fared(claims: Sequence[Claim]) -> str:
    """How many hold, fail and are open, and on what they were judged."""
    hold, fail = ([claim for claim in claims if claim.verdict == verdict] for verdict in DECIDED)
    left = [claim for claim in claims if claim.verdict not in DECIDED]
    told = [f"{len(hold)} hold" + "s" * (len(hold) == 1), f"{len(fail)} do{'es' * (len(fail) == 1)} not hold"]
    told += [f"{len(left)} open" + f" ({counted(left)})" * bool(left)]
    judged = [claim for claim in claims if claim.measured != "-"]
    known = [name for c in judged if c.population == "pretrained" for name in c.model.split(", ")]
    others = {c.population for c in judged} - {"pretrained"}
    known += [words for population, words in POPULATIONS.items() if population in others]
    return f"{', '.join(told)}{'; judged on ' * bool(known)}{', '.join(dict.fromkeys(known))}"


def counted(claims: Sequence[Claim]) -> str:
    """Their verdicts: "3 hold, 1 does not hold, 2 undecided"; those that none has are left out."""
    counts = Counter(claim.verdict for claim in claims)
    plural = {"holds": "hold", "does not hold": "do not hold"}
    verdicts = {verdict: counts[verdict] for verdict in VERDICTS if counts[verdict]}
    return ", ".join(f"{n} {plural.get(word, word) if n != 1 else word}" for word, n in verdicts.items())


def origin(claim: Claim) -> str:
    """The source without the place in it: "[Gu]" of "[Gu] Table 1"."""
    name = re.search(r"\[[^]]+\]", claim.source)
    return name.group() if name else claim.source
