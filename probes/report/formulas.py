"""The formulas of the methods section: LaTeX in a file, MathML on the page, which browsers draw without any library."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from latex2mathml.converter import convert
from markupsafe import Markup, escape


class Formula(NamedTuple):
    """One displayed formula with a sentence before it."""

    says: str
    latex: str

    @property
    def mathml(self) -> Markup:
        """The formula as MathML, safe to stand in a page: its LaTeX comes from the package alone."""
        return Markup(convert(self.latex, display="block"))


@dataclass(frozen=True)
class Method:
    """What one quantity is, where it comes from, and what to beware of."""

    title: str
    source: str
    formulas: tuple[Formula, ...]
    remark: str = ""


def mathematical(sentence: str) -> Markup:
    """A sentence with LaTeX between dollar signs, which becomes MathML; the rest is text and escaped."""
    words = sentence.split("$")
    return Markup("").join(Markup(convert(word)) if n % 2 else escape(word) for n, word in enumerate(words))


def _methods() -> tuple[Method, ...]:
    file = Path(__file__).parent / "templates" / "formulas.toml"
    found = tomllib.loads(file.read_text(encoding="utf-8"))["methods"]
    return tuple(
        Method(**one | {"formulas": tuple(Formula(**formula) for formula in one["formulas"])}) for one in found
    )


METHODS = _methods()
