"""The sources' statements about language models, one module per source: what is claimed beside the rule that decides it."""

from __future__ import annotations

from ..results.collected import Collected
from . import chowdhury, gu, liu, ruscio, wu
from .claim import Claim

STATED = (*chowdhury.STATED, *ruscio.STATED, *gu.STATED, *wu.STATED, *liu.STATED)


def claims(collected: Collected) -> list[Claim]:
    """All claims about language models, judged by a folder's results, in the order of the sources' modules.

    Those about toys are with the toys: `toy.experiments.experiment.claims_of`.
    """
    rows = []
    for statement, rule in STATED:
        found = rule(collected)
        if found is None:
            rows.append(statement.judged())
        else:
            rows.append(
                statement.judged(
                    found.measured, found.verdict, model=found.model, command=found.command, tiny=found.tiny
                )
            )
    return rows
