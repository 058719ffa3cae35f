"""LaTeX between dollar signs becomes MathML while the site is built, so that pages need no script to show formulas."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

# What arithmatex makes of $...$ and $$...$$.
INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
DISPLAYED = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)


def mathml(page: str) -> str:
    """The page's HTML with its formulas drawn; one that is not LaTeX raises."""
    page = INLINE.sub(lambda found: convert(html.unescape(found[1])), page)
    return DISPLAYED.sub(
        lambda found: f'<div class="formula">{convert(html.unescape(found[1]), display="block")}</div>', page
    )


def on_page_content(content: str, **_: Any) -> str:
    return mathml(content)
