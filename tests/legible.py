"""What cannot be read in a figure, and results of models as large and with names as long as figures must take."""

from __future__ import annotations

import matplotlib.text
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.path import Path
from matplotlib.text import Text
from matplotlib.transforms import Affine2D

LONG = ("some-laboratory-model-0.5b-instruct-a", "another.house_s_language-model-q4_k_m")  # of 37 characters each


def faults(figure: Figure, within: float = 1.0) -> list[str]:
    """Texts that leave the canvas, or cover each other, by more than `within` pixels.

    Texts are those that matplotlib draws, which leaves out ticks beyond an axis's ends.
    """
    shown: list[Text] = []
    with pytest.MonkeyPatch.context() as patch:
        plain = Text.draw
        patch.setattr(Text, "draw", lambda text, renderer: (shown.append(text), plain(text, renderer))[1])
        FigureCanvasAgg(figure)
        figure.draw_without_rendering()
    shown = list(dict.fromkeys(text for text in shown if text.get_visible() and text.get_text().strip()))
    boxes, (width, height) = [_outline(text, within) for text in shown], figure.bbox.size
    found = []
    for n, (text, box) in enumerate(zip(shown, boxes, strict=True)):
        (left, low), (right, high) = box.vertices.min(0), box.vertices.max(0)
        if left < 0 or low < 0 or right > width or high > height:
            found.append(f"leaves the canvas: {text.get_text()!r}")
        others = zip(shown[:n], boxes[:n], strict=True)
        found += [
            f"{text.get_text()!r} covers {one.get_text()!r}" for one, other in others if box.intersects_path(other)
        ]
    return found


def _outline(text: Text, within: float) -> Path:
    """The corners of a text's box, which may be turned, `within` pixels inside it."""
    place, angle = matplotlib.text.Text.get_window_extent(text), text.get_rotation()
    text.set_rotation(0)
    flat = matplotlib.text.Text.get_window_extent(text).padded(-within)
    text.set_rotation(angle)
    corners = Affine2D().rotate_deg(angle).transform(flat.corners()[[0, 1, 3, 2, 0]])
    middle = (corners.min(0) + corners.max(0)) / 2
    return Path(corners - middle + [(place.x0 + place.x1) / 2, (place.y0 + place.y1) / 2])
