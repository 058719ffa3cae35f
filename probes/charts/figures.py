"""Figures of at most four panels, and how they are saved or put into a page."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..run.files import atomic
from .style import CYCLE, DPI, FAINT, GREY, INK, NAME, STYLE, TEXT, TITLE, WIDTH, blank, wrapped

MOST_PANELS = 4
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
    """A figure of at most four panels: of one model all quantities, of several the first ones, a column per model.

    Two models have two rows, three or four have one; of more, the first four are drawn, and the title says so.

    Args:
        results: by the model's name.
        rows: what is drawn of each, the most important first.
        caption: what a reader has to know, at most two lines.
    """
    with matplotlib.rc_context(STYLE):
        return _one(*next(iter(results.items())), rows, caption) if len(results) == 1 else _many(results, rows, caption)


def _one(name: str, ds: xr.Dataset, rows: Sequence[Panel], caption: str) -> Figure:
    """All panels of one model in two columns; the first of three is as wide as both."""
    rows = rows[:MOST_PANELS]
    alone = len(rows) % 2
    lines = [rows[:1]] * alone + [rows[n : n + 2] for n in range(alone, len(rows), 2)]
    heights = [max(panel.height for panel in line) for line in lines]
    figure = blank((WIDTH, sum(heights) + 0.3), caption)
    grid = figure.add_gridspec(len(lines), 2, height_ratios=heights)
    for n, line in enumerate(lines):
        for column, panel in enumerate(line):
            _draw(figure.add_subplot(grid[n, :] if len(line) == 1 else grid[n, column]), panel, ds)
    figure.suptitle(wrapped(name, figure.get_figwidth() - 0.4, TITLE))
    return figure


def _many(results: Mapping[str, xr.Dataset], rows: Sequence[Panel], caption: str) -> Figure:
    """A column per model, as many rows as four panels allow."""
    shown = dict(list(results.items())[:MOST_PANELS])
    rows = rows[: max(1, MOST_PANELS // len(shown))]
    width = WIDTH if len(shown) == 2 else 1.4 * WIDTH
    heights = [panel.height for panel in rows]
    figure = blank((width, sum(heights) + 0.3), caption)
    grid = figure.add_gridspec(len(rows), len(shown), height_ratios=heights)
    for n, panel in enumerate(rows):
        line: list[Axes] = []
        for column, (name, ds) in enumerate(shown.items()):
            cell = figure.add_subplot(grid[n, column], sharey=line[0] if line and panel.share else None)
            _draw(cell, panel, ds, labelled=column == 0)
            if n == 0:
                cell.set_title(wrapped(name, (width - 3) / len(shown), TEXT))
            line.append(cell)
        _once(line)
    if len(results) > len(shown):
        figure.suptitle(f"the first {len(shown)} of {len(results)} models")
    return figure


def _draw(cell: Axes, panel: Panel, ds: xr.Dataset, *, labelled: bool = True) -> None:
    panel.draw(cell, ds)
    if labelled:
        cell.set_ylabel(wrapped(panel.label, 0.75 * panel.height, TEXT))


def _once(line: Sequence[Axes]) -> None:
    """Panels side by side say the same words once, at the right, and label the same vertical axis once, at the left."""
    seen: set[str] = set()
    for cell in reversed(line):
        for text in [text for text in cell.texts if text.get_gid() == NAME]:
            if text.get_text() in seen:
                text.remove()
            else:
                seen.add(text.get_text())
    ticks = [(cell.get_ylim(), [text.get_text() for text in cell.get_yticklabels()]) for cell in line]
    for before, cell, here in zip(ticks, line[1:], ticks[1:], strict=False):
        cell.tick_params(labelleft=here != before)


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
    with _settled(figure), atomic(saved[0]) as picture, atomic(saved[1]) as drawing:
        figure.savefig(picture, format="png", dpi=DPI)
        figure.savefig(drawing, format="svg", metadata=NO_DATE)
    return saved


def svg(figure: Figure) -> str:
    """The figure as SVG in a page, see `inline`."""
    file = io.StringIO()
    with _settled(figure):
        figure.savefig(file, format="svg", metadata=NO_DATE)
    return inline(file.getvalue())


@contextmanager
def _settled(figure: Figure) -> Iterator[None]:
    """Within it the layout is made once, and not again by every file that is written."""
    with matplotlib.rc_context({**STYLE, "svg.fonttype": "none"}):
        figure.draw_without_rendering()
        engine = figure.get_layout_engine()
        figure.set_layout_engine("none")
        try:
            yield
        finally:
            figure.set_layout_engine(engine)


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
