"""Docstrings are plain text that is also Markdown; what only looks like HTML or a link in it is kept as it is written."""

import re
from typing import Any

from griffe import Extension, Object

TAG = re.compile(r"<(?=[A-Za-z/])")  # as in the inner product <a, b>
CODE = re.compile(r"(`+[^`]+`+)")


def escaped(text: str) -> str:
    """Angle brackets in prose as entities; code, indented or between backticks, stays."""
    return "\n".join(line if line.startswith("    ") else _prose(line) for line in text.split("\n"))


def _prose(line: str) -> str:
    return "".join(part if n % 2 else TAG.sub("&lt;", part) for n, part in enumerate(CODE.split(line)))


class Docstrings(Extension):
    """Applied by mkdocstrings to everything that it reads."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = escaped(obj.docstring.value)
