"""Docstrings are plain text that is also Markdown; what only looks like HTML or a link in it is kept as it is written."""

import re
from typing import Any

from griffe import Extension, Object

TAG = re.compile(r"<(?=[A-Za-z/])")  # as in the inner product <a, b>
CODE = re.compile(r"(`+[^`]+`+)")


def escaped(text: str) -> str:
    """Angle brackets in prose as entities; code, indented or between backticks, stays."""
    lines = []
    for line in text.split("\n"):
        parts = [line] if line.startswith("    ") else CODE.split(line)
        lines.append("".join(part if n % 2 or line.startswith("    ") else TAG.sub("&lt;", part) for n, part in enumerate(parts)))
    return "\n".join(lines)


class Docstrings(Extension):
    """Applied by mkdocstrings to everything that it reads."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = escaped(obj.docstring.value)
