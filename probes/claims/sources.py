"""The sources' statements about language models: a TOML file says what is claimed, a module of its name holds the rules.

A table of `SOURCE.toml` is a statement, and its header the id. Its keys are:

- `where` in the source, `claim`, `rule` in words, `population`, `kind`, `published`, `model`: the fields of `Statement`;
- `command`: see `probes.claims.commands.command`;
- `judge`: the rule's name in the source's module; without it the id behind the source's name, `-` as `_`;
- any others: parameters of the rule, which is given those that it names, and words for the texts. `{name}` in a text
  stands for a value or for a constant of the rules, so that a threshold is written once;
- `each`: names of lists of tables. Every combination of their entries makes a statement, the last list's fastest;
- `like`: headers of tables whose values serve where the table has none; with several it makes a statement like each.

Values above the first table are those of every table that does not set its own.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

from ..results.folder import Collected
from . import chowdhury, gu, ruscio
from . import rules as common
from .claim import Claim, Rule, Statement
from .commands import REAL, command
from .liu import liu
from .wu import wu
from .xiao import xiao

USUAL = {"kind": "published", "published": "-", "each": (), "models": ()}


class _Values(dict[str, Any]):
    """Values by name; braces in a text are filled in with other values. `used` are the names asked for."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.used.add(name)
        return self._filled(super().__getitem__(name))

    def _filled(self, value: Any) -> Any:
        if isinstance(value, str):
            return value.format_map(self)
        if isinstance(value, list):
            return [self._filled(one) for one in value]
        return {name: self._filled(one) for name, one in value.items()} if isinstance(value, dict) else value


def stated(rules: ModuleType) -> Iterator[tuple[Statement, Rule]]:
    """The statements of a source, each with its rule, in the file's order.

    Raises:
        ValueError: a key that no field, rule or text uses; otherwise as `Statement`.
        AttributeError: no such rule.
        KeyError: a text names a value that is not there.
    """
    name = rules.__name__.rpartition(".")[2]
    read = tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8"))
    shared = {key: value for key, value in read.items() if not isinstance(value, dict)}
    tables = {header: table for header, table in read.items() if isinstance(table, dict)}
    constants = {key: value for key, value in {**vars(common), **vars(rules)}.items() if key.isupper()}
    for header, table in tables.items():
        for like in table.get("like", [header]):
            usual = constants | USUAL | {"judge": like.partition("-")[2].replace("-", "_")}
            own = usual | shared | _inherited(like, tables) | table | {"id": header, "like": like}
            for chosen in product(*(own[of] for of in own["each"])):
                values = _Values(own)
                for one in chosen:
                    values.update(one)
                rule = getattr(rules, values["judge"])
                yield _statement(values), partial(rule, **common.named(rule, values))
                if unused := table.keys() - values.used - {"each", "like", *own["each"]}:
                    raise ValueError(f"{name}.toml: nothing uses {', '.join(sorted(unused))} of '{header}'")


def _inherited(header: str, tables: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A table's values over those of the one that it is like."""
    own = tables[header]
    return (_inherited(own["like"][0], tables) if "like" in own else {}) | own


def _statement(values: _Values) -> Statement:
    population = values["population"]
    values.setdefault("model", REAL if population == "pretrained" else ", ".join(values["models"]) or "fresh models")
    return Statement(
        source=f"{values['source']} {values['where']}",
        command=command(values["command"], population, values["models"]),
        **{name: values[name] for name in ("id", "claim", "rule", "published", "model", "kind", "population")},
    )


STATED = [one for module in (chowdhury, ruscio, gu) for one in stated(module)]


def claims(collected: Collected) -> list[Claim]:
    """All claims about language models, judged by a folder's results, in the order of the sources' files.

    Those about toys are with the toys: `toy.experiments.experiment.claims_of`.
    """
    rows = []
    for statement, rule in STATED:
        found = rule(collected)
        rows.append(statement.judged(**found._asdict()) if found else statement.judged())
    return rows + [one.judged(collected) for source in (wu, liu, xiao) for one in source.statements]
