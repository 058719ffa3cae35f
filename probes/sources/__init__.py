"""The sources' statements about language models, one module per source: what is claimed beside the rule that decides it."""

from __future__ import annotations

from . import chowdhury, gu, liu, ruscio, wu

STATED = (*chowdhury.STATED, *ruscio.STATED, *gu.STATED, *wu.STATED, *liu.STATED)
