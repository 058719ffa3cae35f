"""The formulas of the methods section: LaTeX in a file, MathML on the page, which browsers draw without any library."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from markupsafe import Markup, escape

# Each method has a title, a source, a remark on what to beware of, and formulas: LaTeX, with what a sentence says before.
METHODS: list[dict[str, Any]] = tomllib.loads(
    (Path(__file__).parent / "templates" / "formulas.toml").read_text(encoding="utf-8")
)["methods"]


def displayed(latex: str) -> Markup:
    """A formula as MathML, safe to stand in a page: its LaTeX comes from the package alone."""
    return Markup(convert(latex, display="block"))


def mathematical(sentence: str) -> Markup:
    """A sentence with LaTeX between dollar signs, which becomes MathML; the rest is text and escaped."""
    words = sentence.split("$")
    return Markup("").join(Markup(convert(word)) if n % 2 else escape(word) for n, word in enumerate(words))
