"""Figures of at most four panels, and how they are saved or put into a page."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..run.files import atomic
from .style import DPI, STYLE, TEXT, TITLE, WIDTH, blank, wrapped

MOST_PANELS = 4
FILES: Any = {**STYLE, "svg.fonttype": "none"}  # text in files is text
NO_DATE: Any = {"Date": None}  # the same figure gives the same file


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


def image(figure: Figure) -> str:
    """The figure as the address of an image in a page: its SVG, whole."""
    file = io.BytesIO()
    with matplotlib.rc_context(FILES):
        figure.savefig(file, format="svg", metadata=NO_DATE)
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"
