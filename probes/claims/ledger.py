"""Statements of sources: a function below a decorator that says what is claimed and by which rule it is judged.

    xiao = Source("[Xiao]", "xiao", needs=real("evict/sinks"))

    @xiao("one-is-not-enough", "Table 2", rule="the loss with four first keys less that with one is below 0")
    def _(ds):
        "One initial token does not suffice; four do better."
        change = over_documents(ds, ...)
        return f"{told(change)} nat", below(change, 0)

The function is handed what the statement's evidence selects (`probes.claims.evidence`) and says what was measured, in
words, with the test that decides (`probes.claims.rules`); None where its argument is no case. Thresholds in texts come from
the constants that the function uses. Parameters of the function that differ between statements are given to the decorator,
behind its own; decorators may be stacked, and called in a loop: `source("id", ...)(function)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..results.folder import Collected
from .claim import Claim, Kind
from .evidence import TOYS, Evidence, Tell


@dataclass(frozen=True)
class Stated:
    """A statement with the function that reads its evidence; `given` are the parameters that the decorator gave it."""

    statement: Claim  # not judged
    needs: Evidence
    function: Tell
    given: dict[str, Any]

    def judged(self, collected: Collected) -> Claim:
        """By a folder's results."""
        judged = self.needs.judge(collected, partial(self.function, **self.given))
        return self.statement.judged(*judged) if judged else self.statement


@dataclass(frozen=True)
class Source:
    """Who says something, and what its statements have in common where they do not say otherwise."""

    name: str  # in brackets: "[Xiao]"
    prefix: str  # of the ids
    needs: Evidence = TOYS
    where: str = ""
    kind: Kind = "published"
    published: str = "-"
    suffix: str = ""  # of the ids
    statements: list[Stated] = field(default_factory=list)

    def but(self, **other: Any) -> Source:
        """The same source with other fields; its statements come into the same list."""
        return replace(self, **other)

    def __call__(
        self,
        name: str,
        where: str = "",
        claim: str = "",
        *,
        rule: str,
        published: str = "",
        needs: Evidence | None = None,
        kind: Kind | None = None,
        **given: Any,
    ) -> Callable[[Tell], Tell]:
        """Decorate the function that judges a statement.

        Args:
            name: the id behind the prefix; it never changes.
            where: in the source.
            claim: one sentence that can be read alone; the function's docstring where none is given.
            rule: what decides, in words, with its threshold.
            published: the number.
            needs: what decides.
            kind: who asks for it.
            given: parameters of the function.
        """
        needs = needs or self.needs

        def state(function: Tell) -> Tell:
            statement = Claim(
                id="-".join(filter(None, (self.prefix, name, self.suffix))),
                source=f"{self.name} {where or self.where}".strip(),
                claim=claim or " ".join(str(function.__doc__).split()),
                rule=rule,
                published=published or self.published,
                model=needs.model,
                command=needs.command,
                kind=kind or self.kind,
                population=needs.population,
            )
            self.statements.append(Stated(statement, needs, function, given))
            return function

        return state
