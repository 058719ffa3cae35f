"""The forms that all figures are drawn with: matplotlib, one style, words at the curves instead of legends.

A chart function takes results by their model's name and returns a `Figure`; it saves nothing:

    def chart(results):
        return panels(results, [Panel("norm of the stream", lambda cell, ds: curves(cell, [Series("all", ds.norm)]))], "...")

`panels` lays results of models out; `sheet` gives empty panels to a figure of another shape. The forms are `curves` (over
positions, blocks or anything else, with bands), `blocks` (a quantity by block, with intervals and nulls), `heat` (blocks by
heads) and `dots` (with intervals, by category).
"""

import base64
import io
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize, to_rgba
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Annotation
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from .run.files import atomic

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


def level(cell: Axes, value: float, label: str = "") -> None:
    """A horizontal line to compare with, and its words at the right."""
    cell.axhline(value, color=GREY, linestyle=DASHED, linewidth=0.9, zorder=1)
    if label:
        words(cell, label, value, GREY)


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
    note: str = ""  # for the caption


def panels(results: Mapping[str, xr.Dataset], rows: Sequence[Panel], caption: str = "") -> Figure:
    """A figure of at most four panels in two columns: of one model all quantities, of several the first ones.

    Two models have two quantities; three, side by side, and four have one; of more, the first four are drawn, and the title
    says so. An odd number of quantities of one model stand below each other.

    Args:
        results: by the model's name.
        rows: what is drawn of each, the most important first.
        caption: what a reader has to know; notes of the rows that are drawn stand behind it. At most two lines.
    """
    shown = list(results.items())[:MOST_PANELS]
    alone, rows = len(shown) == 1, rows[: MOST_PANELS // len(shown)]
    drawn = [(panel, name, ds) for panel in rows for name, ds in shown]
    across = 3 if len(shown) == 3 else 1 if alone and len(rows) % 2 else 2
    width = WIDTH if across < 3 else 1.4 * WIDTH
    heights = [max(panel.height for panel, _, _ in drawn[n : n + across]) for n in range(0, len(drawn), across)]
    first: dict[str, Axes] = {}
    with matplotlib.rc_context(STYLE):
        figure = blank((width, sum(heights) + 0.3), " ".join(filter(None, (caption, *(row.note for row in rows)))))
        grid = figure.add_gridspec(len(heights), across, height_ratios=heights)
        for n, (panel, name, ds) in enumerate(drawn):
            share = first.get(panel.label) if panel.share else None
            cell = figure.add_subplot(grid[n // across, n % across], sharey=share)
            first.setdefault(panel.label, cell)
            panel.draw(cell, ds)
            if alone or n % across == 0:
                cell.set_ylabel(wrapped(panel.label, 0.75 * panel.height, TEXT))
            if panel is rows[0] and not alone:
                cell.set_title(wrapped(name, width / across - 1.5, TEXT))
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


def save(figure: Figure, path: str | Path) -> tuple[Path, Path]:
    """Save as PNG and SVG next to each other; whatever suffix `path` has is replaced. Returns both paths.

    Text in the SVG is text, which readers can search and edit.
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


CATEGORY = 1.6  # inches of a category's words
Values: TypeAlias = Any  # [point], an array or a DataArray


@dataclass(frozen=True)
class Series:
    """One quantity along an axis."""

    label: str  # words at its end; "" for none
    y: Values  # [point]
    color: str = BLUE
    low: Values = None  # [point], the interval's ends
    high: Values = None
    x: Values = None  # [point]; 0, 1, 2, ... if not given
    line: Any = "-"  # matplotlib's line style; "" draws marks with their intervals
    width: float = 1.5
    marker: str = ""
    filled: bool = True
    alpha: float = 1.0

    def points(self) -> tuple[np.ndarray, np.ndarray]:
        y = np.atleast_1d(np.asarray(self.y, dtype=float))
        return (np.arange(len(y), dtype=float) if self.x is None else np.asarray(self.x, dtype=float)), y

    def interval(self) -> tuple[np.ndarray, np.ndarray] | None:
        if self.low is None or self.high is None:
            return None
        low, high = (np.atleast_1d(np.asarray(end, dtype=float)) for end in (self.low, self.high))
        return low, high


def curves(cell: Axes, series: Iterable[Series], *, log: bool = False, decades: float | None = DECADES) -> None:
    """Draw lines with their bands, or marks with their intervals, and write each label at its curve's end.

    Args:
        cell: where.
        series: what; NaN is left out, and so is what is not above zero on a logarithmic axis.
        log: the vertical axis is logarithmic.
        decades: what a logarithmic axis spans at most; None for all.
    """
    cell.autoscale(axis="y")  # where curves were drawn before
    for one in series:
        x, y = one.points()
        if log:
            y = np.where(y > 0, y, np.nan)
        look: dict[str, Any] = {"color": one.color, "alpha": one.alpha}
        if (interval := one.interval()) is not None:
            low, high = interval
            if one.line:
                where: Any = np.isfinite(y) & (low > 0) if log else None
                cell.fill_between(x, low, high, where=where, color=one.color, alpha=0.2, linewidth=0)
            else:
                cell.vlines(x, low, high, linewidth=1.1, **look)
        look |= {"marker": one.marker or ("" if one.line else "o"), "markersize": 4}
        look |= {"markerfacecolor": one.color if one.filled else "none"}
        cell.plot(x, y, linestyle=one.line, linewidth=one.width, zorder=3, **look)
        if one.label and np.isfinite(y).any():
            words(cell, one.label, float(y[np.isfinite(y)][-1]), one.color)
    if log:
        log_axis(cell, decades)
    cell.grid(axis="y", color=FAINT, linewidth=0.6)
    cell.set_axisbelow(True)


def blocks(cell: Axes, series: Sequence[Series], nulls: Sequence[Series] = ()) -> None:
    """Draw quantities by block, as lines with bands; `x` holds their numbers where they do not begin at 0.

    Nulls are what there would be without an effect, one value for all blocks, with an interval or without.
    """
    numbers = series[0].points()[0]
    for null in nulls:
        (_, y), interval = null.points(), null.interval()
        cell.axhline(y[0], color=null.color, linestyle=null.line, linewidth=1.1, alpha=null.alpha, zorder=1)
        if interval is not None:
            cell.axhspan(interval[0][0], interval[1][0], color=null.color, alpha=0.15, linewidth=0)
        words(cell, null.label, float(y[0]), null.color)
    curves(cell, series, decades=None)
    block_axis(cell, numbers)


def heat(cell: Axes, values: Values, label: str, marks: Mapping[str, tuple[Values, str]] | None = None) -> None:
    """Draw a heat map of blocks by heads, its scale below it, marks on cells and their words beside it.

    Args:
        cell: where.
        values: [block, head]; NaN is left empty.
        label: of the scale.
        marks: by words, which cells [block, head] have a dot and its colour.
    """
    values = np.asarray(values, dtype=float)
    limits = Normalize(0, np.nanmax(values) or 1)
    image = cell.imshow(values, WEIGHTS, limits, aspect="auto", interpolation="none")
    for n, (name, (where, color)) in enumerate((marks or {}).items()):
        block, head = np.nonzero(np.asarray(where))
        if len(block):
            cell.plot(head, block, "o", color=color, markersize=3, markeredgewidth=0)
            words(cell, name, 1 - 0.1 * n, color, fraction=True)
    cell.spines[:].set_visible(False)
    cell.tick_params(length=0)
    for axis in (cell.xaxis, cell.yaxis):
        axis.set_major_locator(MaxNLocator(8, integer=True))
    cell.set_xlabel("head")
    bar = cell.figure.colorbar(image, ax=cell, location="bottom", shrink=0.7, aspect=30, label=label)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    bar.ax.xaxis.label.set_fontsize(SMALL)
    bar.ax.tick_params(labelsize=7, length=2)


def dots(
    cell: Axes,
    categories: Sequence[str],
    series: Sequence[Series],
    *,
    zero: bool = True,
    limits: tuple[float, float] | None = None,
) -> None:
    """Draw dots with intervals along the horizontal axis, one line per category, from the top down.

    Args:
        cell: where.
        categories: words, one for each point.
        series: `y` is the value of each category; several have a colour each.
        zero: draw the line of no effect.
        limits: how far the axis reaches; what lies beyond is an arrowhead at its edge.
    """
    low, high = limits or (-np.inf, np.inf)
    reach = 0.1 * (len(series) - 1)
    for n, one in enumerate(series):
        _, value = one.points()
        place = np.arange(len(categories)) + (2 * reach * n / (len(series) - 1) - reach if reach else 0)
        if (interval := one.interval()) is not None:
            cell.hlines(place, *np.clip(interval, low, high), color=one.color, linewidth=1.3, alpha=one.alpha)
        look: Any = {"color": one.color, "markersize": 4.5, "alpha": one.alpha, "clip_on": False}
        look |= {"markerfacecolor": one.color if one.filled else "none"}
        inside = (value >= low) & (value <= high)
        for chosen, marker in ((inside, one.marker or "o"), (value < low, "<"), (value > high, ">")):
            if chosen.any():
                cell.plot(np.clip(value[chosen], low, high), place[chosen], marker, **look)
        if one.label:
            words(cell, one.label, 1 - 0.12 * n, one.color, fraction=True)
    cell.set_yticks(range(len(categories)), [wrapped(name, CATEGORY, SMALL) for name in categories])
    cell.set_ylim(len(categories) - 0.5, -0.5)
    if limits is not None:
        cell.set_xlim(limits)
    cell.tick_params(axis="y", length=0, labelsize=SMALL)
    cell.xaxis.set_major_locator(MaxNLocator(5))
    cell.grid(axis="x", color=FAINT, linewidth=0.6)
    cell.set_axisbelow(True)
    if zero:
        cell.axvline(0, color=GREY, linewidth=0.8, zorder=1)
