"""matplotlib's constrained layout, in which every text has room: too wide ones are broken, crowded ones thinned."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

PLACES = 6  # of a panel's place, as a share of the figure: 1/1000 point
PASSES = 4  # broken texts move panels, which gives the texts another room
BESIDE, ACROSS = 2.0, 90  # pixels between two ticks' labels; degrees of a text that reads upwards
EVENER = (0.6, 0.7, 0.8, 0.9)  # shares of the room, tried for lines of more even length
TALLER = 1.15  # times its panel, which a vertical label may reach into the gap between two panels
TILTED: Any = {"rotation": 25, "ha": "right", "rotation_mode": "anchor"}
# Where a line may be broken: behind these, formulas and ranges like 9-31 staying whole.
PIECES = re.compile(r"(?:\$[^$]*\$|(?<=\d)-(?=\d)|[^\s_/$-])*(?:[\s_/-]+|$)")
NUMBER = re.compile(r"\$.*|[−\d.,]+")
CORNERS = ((3, 2, "left", "bottom"), (-3, 2, "right", "bottom"), (3, -2, "left", "top"), (-3, -2, "right", "top"))
NAME = "name"  # the gid of annotations that name a point where there is room, and are left out elsewhere
POINT = 3.0  # pixels around a point that no other's name may cover


class Layout(ConstrainedLayoutEngine):
    """Constrained layout with room for every text, and rounded places.

    Titles and labels of axes are broken where they are longer than their panel, entries of a legend beside panels where
    they are wider than its room. Of numbers along an axis that would touch, only every second, third, ... is left; words are
    tilted. Of the names of points, those are left that cover no other.

    matplotlib's solver sums in the order in which its variables lie in memory, so that the last bits of every place, and
    the names of clipping regions made of them, would change from run to run.
    """

    def __init__(self, **options: Any):
        super().__init__(**options)
        self._said: WeakKeyDictionary[Text, tuple[str, str]] = WeakKeyDictionary()  # as it was given, and broken

    def execute(self, fig: Any) -> Any:
        """Lay out the figure's panels."""
        panels, found = [cell for cell in fig.axes if cell.get_visible()], None
        for number in range(PASSES):
            changed = [self._broken(text, room) for text, room in (*_labels(panels), *_entries(panels))]
            if number:
                changed += [_thinned(axis) for cell in panels if cell.axison for axis in (cell.xaxis, cell.yaxis)]
                if not any(changed):
                    break
            found = super().execute(fig)
        for cell in fig.axes:
            cell.set_position(np.round(cell.get_position(original=True).bounds, PLACES), which="original")
            cell.set_in_layout(True)  # as before it was moved by hand
        for cell in panels:
            _named(cell)
        return found

    def _broken(self, text: Text, room: float) -> bool:
        """Break a text into lines of at most so many pixels; whether that changed it."""
        given, shown = self._said.get(text, ("", ""))
        if text.get_text() != shown:
            given = shown = text.get_text()
        now = broken(text, given, room)
        self._said[text] = given, now
        text.set_text(now)
        return now != shown


def broken(text: Text, said: str, room: float) -> str:
    """What a text says, in lines of at most so many pixels, as even as can be; within a word only where it must be."""
    if not said.strip() or _length(text, said) <= room:
        return said
    pieces = [PIECES.findall(line) for line in said.split("\n")]
    whole = [[[one] if "$" in one or _length(text, one.rstrip()) <= room else one for one in some] for some in pieces]
    found = _packed(text, whole, room)
    evener = (_packed(text, whole, share * room) for share in EVENER)
    return "\n".join(next((lines for lines in evener if len(lines) == len(found)), found))


def _packed(text: Text, pieces: Iterable[Iterable[Iterable[str]]], room: float) -> list[str]:
    """Pieces of each line, in lines of at most so many pixels."""
    lines: list[str] = []
    for some in pieces:
        now = ""
        for part in chain.from_iterable(some):
            if now and _length(text, (now + part).rstrip()) > room:
                lines.append(now.rstrip())
                now = ""
            now += part
        lines.append(now.rstrip())
    return lines


def _length(text: Text, said: str) -> float:
    """Pixels along the line if the text said this."""
    before = text.get_text()
    text.set_text(said)
    width, height = text.get_window_extent().size
    text.set_text(before)
    return height if text.get_rotation() == ACROSS else width


def _labels(panels: Iterable[Axes]) -> Iterator[tuple[Text, float]]:
    """Titles and labels of axes, with the pixels that each has along its line."""
    for cell in panels:
        width, height = cell.bbox.size
        yield cell.title, width
        if cell.axison:
            yield from ((cell.xaxis.label, width), (cell.yaxis.label, TALLER * height))


def _entries(panels: Iterable[Axes]) -> Iterator[tuple[Text, float]]:
    """Those of legends in panels that hold nothing else."""
    for cell in panels:
        if not cell.axison and (legend := cell.get_legend()) is not None:
            title, *texts = legend.get_title(), *legend.get_texts()
            lengths = legend.handlelength + legend.handletextpad + 2 * legend.borderpad  # in sizes of the font
            beside = lengths * float(texts[0].get_fontsize()) * cell.figure.dpi / 72
            yield from ((text, cell.bbox.width - beside * (text is not title)) for text in (title, *texts))


def _thinned(axis: Axis) -> bool:
    """Leave out numbers along an axis that would touch, or tilt its words; whether there are any."""
    axis.get_majorticklabels()  # puts them where they belong
    low, high = sorted(axis.get_view_interval())
    labels = [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    labels = [
        label for label in labels if label.get_visible() and label.get_text().strip() and not label.get_rotation()
    ]
    labels.sort(key=lambda label: tuple(label.get_window_extent().min))
    boxes = [label.get_window_extent().padded(BESIDE) for label in labels]
    every = next(
        (n for n in range(1, len(boxes)) if not any(a.overlaps(b) for a, b in pairwise(boxes[::n]))), len(boxes)
    )
    if every <= 1:
        return False
    tilted = axis is axis.axes.xaxis and not all(NUMBER.fullmatch(label.get_text()) for label in labels)
    for n, label in enumerate(labels):
        if tilted:
            label.set(**TILTED)
        elif n % every:
            label.set_visible(False)
    return True


def _named(cell: Axes) -> None:
    """Put the names of points at a corner where they cover nothing, and leave out those that have none."""
    names = [text for text in cell.texts if isinstance(text, Annotation) and text.get_gid() == NAME]
    points = [cell.transData.transform(name.xy) for name in names]
    taken = {n: Bbox.from_extents(*(point - POINT), *(point + POINT)) for n, point in enumerate(points)}
    written: list[Bbox] = []
    for n, name in enumerate(names):
        others = [box for m, box in taken.items() if m != n]
        for x, y, ha, va in CORNERS:
            name.set(position=(x, y), ha=ha, va=va, visible=True)
            box = name.get_window_extent()
            inside = (
                cell.bbox.x0 <= box.x0 and box.x1 <= cell.bbox.x1 and cell.bbox.y0 <= box.y0 and box.y1 <= cell.bbox.y1
            )
            if inside and not any(box.overlaps(other) for other in (*others, *written)):
                written.append(box)
                break
        else:
            name.set_visible(False)
