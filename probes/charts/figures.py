"""Figures of at most four panels, and how they are saved or put into a page."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..run.files import atomic
from .style import CYCLE, DPI, FAINT, GREY, INK, STYLE, TEXT, TITLE, WIDTH, blank, wrapped

MOST_PANELS = 4
FILES: Any = {**STYLE, "svg.fonttype": "none"}  # text in files is text
NO_DATE: Any = {"Date": None}  # the same figure gives the same file
LINE = 10.0  # points of a caption's line, which a page leaves away
LOOK = 'font-family="\'DejaVu Sans\', Verdana, sans-serif" stroke-linejoin="round"'  # Verdana is about as wide


@dataclass(frozen=True)
class Panel:
    """One quantity of a model."""

    label: str  # of the vertical axis
    draw: Callable[[Axes, xr.Dataset], object]
    share: bool = False  # models share the vertical axis, as of fractions; else each has its own scale
    height: float = 2.3  # inches


def panels(results: Mapping[str, xr.Dataset], rows: Sequence[Panel], caption: str) -> Figure:
    """A figure of at most four panels in two columns: of one model all quantities, of several the first ones.

    Two models have two quantities, three or four have one; of more, the first four are drawn, and the title says so. An odd
    number of quantities of one model stand below each other.

    Args:
        results: by the model's name.
        rows: what is drawn of each, the most important first.
        caption: what a reader has to know, at most two lines.
    """
    shown = list(results.items())[:MOST_PANELS]
    alone, rows = len(shown) == 1, rows[: MOST_PANELS // len(shown)]
    drawn = [(panel, name, ds) for panel in rows for name, ds in shown]
    across = 1 if alone and len(rows) % 2 else 2
    heights = [max(panel.height for panel, _, _ in drawn[n : n + across]) for n in range(0, len(drawn), across)]
    first: dict[str, Axes] = {}
    with matplotlib.rc_context(STYLE):
        figure = blank((WIDTH, sum(heights) + 0.3), caption)
        grid = figure.add_gridspec(len(heights), across, height_ratios=heights)
        for n, (panel, name, ds) in enumerate(drawn):
            share = first.get(panel.label) if panel.share else None
            cell = figure.add_subplot(grid[n // across, n % across], sharey=share)
            first.setdefault(panel.label, cell)
            panel.draw(cell, ds)
            if alone or n % across == 0:
                cell.set_ylabel(wrapped(panel.label, 0.75 * panel.height, TEXT))
            if panel is rows[0] and not alone:
                cell.set_title(wrapped(name, WIDTH / 2 - 1.5, TEXT))
        if alone:
            figure.suptitle(wrapped(shown[0][0], WIDTH - 0.4, TITLE))
        elif len(results) > len(shown):
            figure.suptitle(f"the first {len(shown)} of {len(results)} models")
    return figure


def sheet(
    rows: int, columns: int, *, height: float = 2.3, width: float = WIDTH, caption: str = ""
) -> tuple[Figure, Any]:
    """An empty figure and its panels [row, column]; `height` is a row's, `width` the figure's, in inches."""
    figure = blank((width, rows * height), caption)
    with matplotlib.rc_context(STYLE):
        return figure, figure.subplots(rows, columns, squeeze=False)


# ------------------------------------------------------------------------------------------------------------- files


def save(figure: Figure, path: str | Path) -> tuple[Path, Path]:
    """Save as PNG and SVG next to each other; whatever suffix `path` has is replaced. Returns both paths.

    Text in the SVG is text, which readers can search and edit.

    Raises:
        InputError: the folder cannot be written to.
    """
    path = Path(path)
    base = path.with_suffix("") if path.suffix in (".png", ".svg") else path
    saved = base.with_name(f"{base.name}.png"), base.with_name(f"{base.name}.svg")
    with matplotlib.rc_context(FILES), atomic(saved[0]) as picture, atomic(saved[1]) as drawing:
        figure.savefig(picture, format="png", dpi=DPI)
        figure.savefig(drawing, format="svg", metadata=NO_DATE)
    return saved


def svg(figure: Figure) -> str:
    """The figure as SVG in a page, see `inline`."""
    file = io.StringIO()
    with matplotlib.rc_context(FILES):
        figure.savefig(file, format="svg", metadata=NO_DATE)
    return inline(file.getvalue())


def inline(text: str) -> str:
    """A saved SVG as an element of a page: small, without its caption, and in the page's colours where it has others.

    Ink becomes `currentColor`, every other colour of this package `var(--c-0072b2, #0072b2)`. Ids are numbered, and begin
    with a hash of the picture, so that several pictures of one page do not meet. The same text gives the same element.
    """
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|\n\s*", "\n", text[text.index("<svg") :], flags=re.S)
    text = re.sub(r"\n+", "\n", text.replace("xlink:href", "href"))
    width, height = (float(size) for size in re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)[0])
    for paper in (rf'<g id="patch_1">\n<path d="M 0 {height:g}.*?</g>\n', r'<g id="caption">.*?</g>\n'):
        cut = re.search(paper, text, flags=re.S)
        if cut is not None:
            height -= LINE * cut[0].count("<text")
            text = text.replace(cut[0], "", 1)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" {LOOK}>'
    text = re.sub(r"<svg [^>]*>|<defs>\s*<style.*?</defs>\n| font-family: [^;\"]*;", "", text, flags=re.S)
    text = head + text
    text = re.sub(r'(?<=[\s"(,-])(-?\d*\.\d\d)\d+', r"\1", text)
    used = {name: str(n) for n, name in enumerate(dict.fromkeys(re.findall(r'(?:href="|url\()#([^")]*)', text)))}
    text = re.sub(r' id="([^"]*)"', lambda at: f' id="ID-{used[at[1]]}"' if at[1] in used else "", text)
    text = re.sub(r'(href="|url\()#([^")]*)', lambda at: f"{at[1]}#ID-{used[at[2]]}", text)
    text = text.replace(INK, "currentColor")
    for color in (*CYCLE[:-1], GREY, FAINT):
        text = text.replace(color, f"var(--c-{color[1:]}, {color})")
    return text.replace("ID-", f"f{hashlib.sha256(text.encode()).hexdigest()[:8]}-")
