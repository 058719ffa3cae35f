"""What all figures share: colours, line styles, axes, legends, small print, and how a figure is saved."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from PIL import Image

from ..errors import InputError
from ..results.dataset import by_name, number_types, options_of, quickly
from ..run.files import atomic
from .layout import Layout, broken
from .palette import (  # noqa: F401
    BLACK,
    BLUE,
    CYCLE,
    FAINT,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SIGNED,
    SKY,
    VERMILLION,
    WEIGHTS,
    YELLOW,
    depth_color,
)

DECADES = 4  # what the axis spans at most: the rim of a sliding window's reach fades to nothing and is cut off
ALIKE = 0.012  # of an axis's height, about the width of a line: points no further apart are drawn upon each other
MOST_ALIKE = 0.95  # of two curves' points in every panel: the curves coincide
NOTES = "*†‡§"  # one for each group of such curves in a legend
PRINT = 7  # points of small print
LINES = 3  # of it, for which figures have room; more make them taller
WIDEST = 1500  # pixels across a figure of many curves and columns, for 300 kB
FADED = 0.3  # opacity of toys that have not learnt their task
LARGEST = 300_000  # bytes of a saved file of many panels, so that a report of several stays light
COARSE = 72  # of what is an image in an SVG that is too large otherwise
DPI = 170  # a two-column figure stays sharp at full page width and below 300 kB
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "axes.facecolor": "none",  # the page's paper may be dark, and its ink white
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), BLACK),
    "svg.hashsalt": "headwater",  # the same figure gives the same file
}


def save_figure(figure: Figure, path: str | Path, *, dpi: int = DPI, largest: int | None = None) -> tuple[Path, Path]:
    """Save as PNG and SVG next to each other; whatever suffix `path` has is replaced. Returns both paths.

    What comes out larger than `largest` bytes is made smaller: a PNG by having 256 colours, an SVG by rounded coordinates,
    letters that the reader's own fonts draw, and coarser images.

    Raises:
        InputError: the folder cannot be written to.
    """
    path = Path(path)
    base = path.with_suffix("") if path.suffix in (".png", ".svg") else path
    saved = base.with_name(base.name + ".png"), base.with_name(base.name + ".svg")
    with matplotlib.rc_context(STYLE):
        with atomic(saved[0]) as temporary:
            figure.savefig(temporary, format="png", dpi=dpi)
            if largest is not None and temporary.stat().st_size > largest:
                reduce_colors(temporary)
        with atomic(saved[1]) as temporary:
            figure.savefig(temporary, format="svg", metadata={"Date": None})
            for image_dpi in (dpi, COARSE):
                if largest is not None and temporary.stat().st_size > largest:
                    with matplotlib.rc_context({"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}):
                        figure.savefig(temporary, format="svg", metadata={"Date": None}, dpi=image_dpi)
                    temporary.write_text(_squeezed(temporary.read_text(encoding="utf-8")), encoding="utf-8")
    return saved


def reduce_colors(path: Path) -> None:
    """Replace a PNG by one of 256 colours, among them the house's own, so that rare ones do not become others."""
    house = [BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, BLACK, YELLOW, GREY, FAINT, "#ffffff"]
    with Image.open(path) as opened:
        image = opened.convert("RGB")
    found = image.quantize(256 - len(house), dither=Image.Dither.NONE).getpalette() or []
    own = [int(color[n : n + 2], 16) for color in house for n in (1, 3, 5)]
    palette = np.array([*own, *found], dtype=np.int32)[: 3 * 256].reshape(-1, 3)
    # The nearest of each colour there is; Pillow's own assignment is a coarse one and greys the paper.
    pixels = np.asarray(image, dtype=np.int32) @ np.array([1 << 16, 1 << 8, 1], dtype=np.int32)
    colors, which = np.unique(pixels, return_inverse=True)
    parts = np.stack([colors >> 16, colors >> 8 & 255, colors & 255], -1)
    nearest = [np.square(some[:, None] - palette).sum(-1).argmin(-1) for some in np.array_split(parts, 64)]
    reduced = Image.fromarray(np.concatenate(nearest).astype(np.uint8)[which].reshape(pixels.shape), mode="P")
    reduced.putpalette(palette.astype(np.uint8).tobytes())
    reduced.save(path, format="png", optimize=True)


def _squeezed(svg: str) -> str:
    """Coordinates to 1/100 point, no indentation, no comments."""

    def rounded(found: re.Match[str]) -> str:
        return re.sub(r"(\.\d\d)\d+", r"\1", found[0])

    svg = re.sub(r' (?:d|x|y)="[^"]*"|(?:translate|rotate)\([^)]*\)', rounded, svg)
    svg = re.sub(r"<!-- .*? -->\n", "", svg)
    return re.sub(r"\n\s+", "\n", svg)


def legend_columns(handles: Sequence[Line2D], width: float) -> int:
    """As many columns as fit side by side; matplotlib fills them one after the other, as evenly as it can."""
    inches = [0.072 * len(str(handle.get_label())) + 0.6 for handle in handles]
    for columns in range(len(inches), 1, -1):
        if sum(max(column) for column in np.array_split(inches, columns)) <= width:
            return columns
    return 1


def position_axis(cell: Axes, *, below: bool) -> None:
    cell.set_xlim(-0.02, 1.02)
    cell.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "1/4", "1/2", "3/4", "1"])
    cell.grid(axis="y", which="major", color="#dddddd", linewidth=0.6)
    cell.set_axisbelow(True)
    if below:
        cell.tick_params(labelbottom=True)
        cell.set_xlabel("input position  $j / (T-1)$")


def log_axis(cell: Axes, spans: int | None = DECADES) -> None:
    """Label decades, and between them 2 and 5, or 2, 3 and 5, while there is room; the axis `spans` so many decades."""
    cell.set_yscale("log")
    low, high = cell.get_ylim()
    if spans is not None and low < high / 10**spans:
        low = high / 10**spans
        cell.set_ylim(low, high)
    decades = np.log10(high / low)
    labelled = (1, 2, 3, 5) if decades < 1.2 else (1, 2, 5) if decades < 2.2 else (1,)
    cell.yaxis.set_major_locator(LogLocator(base=10, subs=labelled))
    cell.yaxis.set_major_formatter(FuncFormatter(lambda value, _: numeral(value)))
    cell.yaxis.set_minor_locator(LogLocator(base=10, subs=tuple(range(2, 10)), numticks=50))
    cell.yaxis.set_minor_formatter(NullFormatter())


def numeral(value: float) -> str:
    """A tick's label: 0.01, 10,000; powers of ten beyond."""
    if value and not 1e-4 <= abs(value) < 1e5:
        factor, power = f"{value:.0e}".split("e")
        return rf"${'' if factor == '1' else factor + chr(92) + 'cdot '}10^{{{int(power)}}}$"
    return f"{value:,.12g}".replace("-", "−")


def side_legend(side: Axes, handles: Sequence[Any], title: str | None = None, *, loc: Any = "center left") -> None:
    """A row's legend, to the right of its last panel."""
    look: Any = {"fontsize": 8, "title_fontsize": 8, "alignment": "left", "borderaxespad": 0, "handlelength": 1.6}
    side.legend(handles=handles, title=title, loc=loc, **look).set_in_layout(False)  # takes no room from the panels


def mark(label: str, marker: str, color: str, *, filled: bool = True, size: float = 4.5) -> Line2D:
    """A legend's entry of a marker without a line."""
    face = color if filled else "none"
    return Line2D([], [], marker=marker, linestyle="", color=color, markerfacecolor=face, markersize=size, label=label)


def spread(count: int) -> np.ndarray:
    """Where `count` marks stand beside each other around 0."""
    return np.linspace(-1, 1, count) * min(0.3, 0.07 * count) if count > 1 else np.zeros(1)


def coinciding(cells: Sequence[Axes], handles: Sequence[Any]) -> list[str]:
    """Put a sign behind the labels of curves that lie upon each other in all of `cells`; which signs were used.

    Curves are known by their labels, which are those of their legend's `handles`; axes have their limits by now.
    """
    for cell in cells:
        cell.get_ylim()  # which takes in what was drawn last
    groups: list[list[Any]] = []
    for one in handles:
        known = next((group for group in groups if _alike(cells, group[0].get_label(), one.get_label())), None)
        groups.append([one]) if known is None else known.append(one)
    found = [group for group in groups if len(group) > 1]
    for sign, group in zip(NOTES, found, strict=False):
        for one in group:
            one.set_label(f"{one.get_label()}{sign}")
    return list(NOTES[: len(found)])


def _alike(cells: Sequence[Axes], one: object, other: object) -> bool:
    """Whether the lines of two labels are in the same panels, and next to nowhere further apart than `ALIKE`."""
    farthest = -1.0
    for cell in cells:
        height = cell.transScale + cell.transLimits
        curves = [
            [np.asarray(height.transform(line.get_xydata()))[:, 1] for line in cell.lines if line.get_label() == name]
            for name in (one, other)
        ]
        if [len(curve) for curve in curves[0]] != [len(curve) for curve in curves[1]]:
            return False
        for first, second in zip(*curves, strict=True):
            both = np.isfinite(first) & np.isfinite(second)
            apart = np.abs(np.clip(first[both], 0, 1) - np.clip(second[both], 0, 1))
            farthest = max(farthest, float(np.quantile(apart, MOST_ALIKE)) if apart.size else 0)
    return 0 <= farthest < ALIKE


def of_coinciding(signs: Sequence[str]) -> list[str]:
    """What the signs of `coinciding` say, for small print."""
    return [
        f"{', '.join(dict.fromkeys(signs))}: curves that coincide at {100 * MOST_ALIKE:g} % of their points"
    ] * bool(signs)


def thinned(x: np.ndarray, *rows: np.ndarray, most: int = 96, exact: int = 32) -> tuple[np.ndarray, ...]:
    """Curves over positions as few points: the first `exact` as they are, then means over bins that grow with position.

    Each of `rows` is [..., position]; bins are the same for all, and their place is the mean position. Means leave NaN out.
    """
    if x.size <= most:
        return (x, *rows)
    edges = np.geomspace(exact, x.size, most - exact + 1).round().astype(int)
    starts = np.concatenate([np.arange(exact), np.unique(edges)[:-1]])
    counts = np.diff([*starts, x.size])
    found = [np.add.reduceat(x.astype(float), starts) / counts]
    for row in rows:
        good = np.isfinite(row)
        number = np.add.reduceat(good, starts, axis=-1, dtype=float)
        total = np.add.reduceat(np.where(good, row, 0.0), starts, axis=-1)
        found.append(np.divide(total, number, out=np.full_like(total, np.nan), where=number > 0))
    return tuple(found)


def results_of(
    results: xr.Dataset | Mapping[str, xr.Dataset], command: str, needs: Mapping[str, Sequence[str]]
) -> dict[str, xr.Dataset]:
    """Results by their model's name; every one of them has the variables `needs`, over the dimensions given there.

    Raises:
        InputError: no results, or one of another probe.
    """
    found = by_name(results)
    if not found:
        raise InputError("no results to draw; give at least one")
    for name, ds in found.items():
        for variable, dims in needs.items():
            if variable not in ds or ds[variable].dims != tuple(dims):
                raise InputError(
                    f"the result of '{name}' has no {variable} [{', '.join(dims)}]; give one of headwater {command}"
                )
    return found


def option(ds: xr.Dataset, name: str) -> Any:
    """An option that the result was made with; None where it does not say."""
    return options_of(ds).get(name)


def either(values: Iterable[Any]) -> str:
    """The different values, in their order."""
    return " / ".join(dict.fromkeys(map(str, values)))


def facts(results: Mapping[str, xr.Dataset], methods: Iterable[str] = ()) -> list[str]:
    """What results rest on, for small print; values that differ between results are all given, in their order."""
    every = list(results.values())
    lengths, prompts = (either(ds.sizes[dim] for ds in every if dim in ds.sizes) for dim in ("position", "prompt"))
    found = [f"T = {lengths}"] * bool(lengths)
    found += [f"{prompts} prompt{'s' * (prompts != '1')}"] * bool(prompts)
    types = either(dtype for ds in every for dtype in number_types(ds))
    return [*quickly(every), *found, *filter(None, (either(methods), types))]


def blank(size: tuple[float, float], dpi: int) -> Figure:
    """A figure of so many inches across and down, in which every text has room."""
    return Figure(figsize=size, dpi=dpi, layout=Layout())


def small_print(figure: Figure | SubFigure, texts: Sequence[str]) -> None:
    """Below a figure, as wide as it is."""
    text = figure.supxlabel(said := "; ".join(texts), fontsize=PRINT, color="#555555")
    text.set_text(broken(text, said, 0.98 * figure.bbox.width))
    if isinstance(figure, Figure):
        more = text.get_text().count("\n") + 1 - LINES
        figure.set_figheight(figure.get_figheight() + max(0, more) * 1.2 * PRINT / 72)
