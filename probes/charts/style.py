"""What all figures share: colours, style, axes, and a layout in which every word has room."""

from __future__ import annotations

import textwrap
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Annotation
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

# Okabe and Ito's colours, which colour-blind readers can tell apart. INK is text, axes and black curves
BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY = "#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#56b4e9"
INK, GREY, FAINT = "#1a1a1a", "#777777", "#dddddd"  # FAINT: grids
CYCLE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, INK)
FRESH, TRAINED, THEORY = BLUE, VERMILLION, INK  # conditions and predictions, wherever they are drawn
DASHED, DOTTED = (0, (4, 1.5)), (0, (1, 1.3))
# Zero is the paper: the opacity of the colour grows.
WEIGHTS = LinearSegmentedColormap.from_list("weights", [to_rgba(BLUE, 0), to_rgba(BLUE, 1)])
DEPTHS = LinearSegmentedColormap.from_list("depths", [SKY, BLUE, "#00324f"])  # blocks in one panel, first to last

TEXT, SMALL, TITLE = 9.0, 7.5, 10.0  # points of text, of captions and words at curves, of a figure's title
STYLE: Any = {
    "font.size": TEXT,
    "axes.titlesize": TEXT,
    "axes.labelsize": TEXT,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "figure.titlesize": TITLE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "svg.hashsalt": "headwater",
}
DPI = 170  # of a PNG: sharp at the full width of a page
WIDTH = 7.4  # inches of a figure, as wide as a page's text
DECADES = 4.0  # that a logarithmic axis spans at most: the rim of a window's reach fades to nothing
LETTER = 0.55  # width of a letter in sizes of its font, on average
WORDS = 1.15  # inches across of words at the end of a curve
PASSES = 2  # words that are moved apart change no width, but the first pass places the axes they are moved along
NAME = "words at the end of a curve"  # the gid of these annotations


# --------------------------------------------------------------------------------------------------------------- axes


def position_axis(cell: Axes) -> None:
    """Positions along the horizontal axis, fractions j / (T - 1)."""
    cell.set_xlim(-0.02, 1.02)
    cell.set_xticks([0, 0.25, 0.5, 0.75, 1], ["first", "1/4", "1/2", "3/4", "last"])
    cell.set_xlabel("position in the prompt")


def block_axis(cell: Axes, numbers: Any, label: str = "block") -> None:
    """Numbers of blocks along the horizontal axis."""
    cell.set_xlim(float(numbers[0]) - 0.6, float(numbers[-1]) + 0.6)
    cell.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    cell.set_xlabel(label)


def log_axis(cell: Axes, decades: float | None = DECADES) -> None:
    """A vertical axis with decades labelled, and 2 and 5 between them where there is room."""
    cell.set_yscale("log")
    low, high = cell.get_ylim()
    if decades is not None:
        low = max(low, high / 10**decades)
        cell.set_ylim(low, high)
    spans = np.log10(high / low)
    labelled = (1, 2, 3, 5) if spans < 1.2 else (1, 2, 5) if spans < 2.2 else (1,)
    cell.yaxis.set_major_locator(LogLocator(subs=labelled))
    cell.yaxis.set_major_formatter(FuncFormatter(lambda value, _: numeral(value)))
    cell.yaxis.set_minor_locator(LogLocator(subs=tuple(range(2, 10)), numticks=50))
    cell.yaxis.set_minor_formatter(NullFormatter())


def numeral(value: float) -> str:
    """A tick's label: 0.01, 10,000; powers of ten beyond."""
    if value and not 1e-4 <= abs(value) < 1e5:
        factor, power = f"{value:.0e}".split("e")
        return rf"${'' if factor == '1' else factor + chr(92) + 'cdot '}10^{{{int(power)}}}$"
    return f"{value:,.12g}".replace("-", "−")


def level(cell: Axes, value: float, label: str = "", color: str = GREY, line: Any = DASHED) -> None:
    """A horizontal line to compare with, and its words at the right."""
    cell.axhline(value, color=color, linestyle=line, linewidth=0.9, zorder=1)
    if label:
        words(cell, label, value, color)


def words(cell: Axes, text: str, at: float, color: str, *, fraction: bool = False) -> None:
    """Write words to the right of a panel at a height of its axis, or at a fraction of it; the layout moves them apart."""
    coordinates: Any = ("axes fraction", "axes fraction" if fraction else "data")
    place: Any = {"xytext": (4, 0), "textcoords": "offset points", "va": "top" if fraction else "center"}
    look: Any = {"fontsize": SMALL, "color": color, "annotation_clip": False, "gid": NAME}
    cell.annotate(wrapped(text, WORDS, SMALL), (1, at), xycoords=coordinates, **place, **look)


def depth_color(block: int, of: int) -> Any:
    """The colour of a block's curve where all of them are in one panel."""
    return DEPTHS(block / max(1, of - 1))


def wrapped(text: str, inches: float, points: float) -> str:
    """A text in lines of at most about so many inches, broken within a word only where it is longer than a line."""
    letters = max(1, int(72 * inches / (LETTER * points)))
    return "\n".join("\n".join(textwrap.wrap(line, letters)) for line in text.split("\n"))


# -------------------------------------------------------------------------------------------------------------- layout


class _Layout(ConstrainedLayoutEngine):
    """Constrained layout that moves words at the ends of curves apart."""

    def execute(self, fig: Any) -> Any:
        for _ in range(PASSES):
            super().execute(fig)
            for cell in fig.axes:
                _apart(cell)


def _apart(cell: Axes) -> None:
    """Move words beside a panel up and down until none covers another, within the panel's height where they fit."""
    names = [text for text in cell.texts if isinstance(text, Annotation) and text.get_gid() == NAME]
    if not names:
        return
    for name in names:
        name.set_position((4, 0))
    boxes = [name.get_window_extent() for name in names]
    order = sorted(range(len(names)), key=lambda n: (boxes[n].y0 + boxes[n].y1, -n))
    gap, lowest = cell.figure.dpi / 72, cell.bbox.y0
    bottoms = []
    for n in order:  # upwards
        bottoms.append(lowest := max(lowest, min(boxes[n].y0, cell.bbox.y1 - boxes[n].height)))
        lowest += boxes[n].height + gap
    highest = max(cell.bbox.y1, cell.bbox.y0 + sum(boxes[n].height + gap for n in order))
    for k in reversed(range(len(order))):  # downwards, from the top
        bottoms[k] = min(bottoms[k], highest - boxes[order[k]].height)
        highest = bottoms[k] - gap
    for n, bottom in zip(order, bottoms, strict=True):
        names[n].set_position((4, (bottom - boxes[n].y0) * 72 / cell.figure.dpi))


def blank(size: tuple[float, float], caption: str = "") -> Figure:
    """A figure without panels, of so many inches across and down, with a caption of at most two lines below them."""
    with matplotlib.rc_context(STYLE):
        text = wrapped(caption, size[0] - 0.2, SMALL)
        figure = Figure((size[0], size[1] + 0.16 * (text.count("\n") + 1)), layout=_Layout(w_pad=0.1, h_pad=0.06))
        if text:
            figure.supxlabel(text, x=0.01, ha="left", fontsize=SMALL, color=GREY)
    return figure
