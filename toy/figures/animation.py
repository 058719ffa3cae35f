"""Animated pictures of points in a plane, as GIF files with one palette."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from probes.figures.style import FAINT, STYLE
from probes.run.files import atomic

FRAME = (3.5, 3.2)  # inches of a picture
FRAME_DPI = 100
SHADES = 6  # of each colour of the palette, from itself to white: edges are smoothed
TURN, HOLD = 110, 2000  # milliseconds of a frame, and of the last one

Picture = Callable[[Axes, int], None]  # draws the frame of a number


def animate(path: Path, frames: Sequence[tuple[Picture, int]], colors: Sequence[str]) -> Path:
    """Write a GIF of these frames, in greys and these colours; returns its path.

    Raises:
        InputError: the path cannot be written to.
    """
    images: list[Image.Image] = []
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=FRAME, dpi=FRAME_DPI)
        figure.set_layout_engine("none")  # its axes stand where they are put
        canvas = FigureCanvasAgg(figure)
        for picture, n in frames:
            figure.clear()
            picture(figure.add_axes((0.12, 0.11, 0.85, 0.79)), n)
            canvas.draw()
            images.append(Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB"))
    palette = _palette(colors)
    indexed = [_indexed(image, palette) for image in images]
    content = io.BytesIO()
    durations = [TURN] * (len(indexed) - 1) + [HOLD]
    indexed[0].save(
        content, format="GIF", save_all=True, append_images=indexed[1:], duration=durations, loop=0, optimize=True
    )
    with atomic(path) as temporary:
        temporary.write_bytes(content.getvalue())
    return path


def plane(cell: Axes, reach: float) -> None:
    """Square axes through the origin."""
    cell.axhline(0, color=FAINT, linewidth=0.8, zorder=0)
    cell.axvline(0, color=FAINT, linewidth=0.8, zorder=0)
    cell.set(xlim=(-reach, reach), ylim=(-reach, reach))
    cell.set_aspect("equal", adjustable="box")


def _palette(colors: Sequence[str]) -> np.ndarray:
    """[color, 3]: greys, and each of the colours in shades. One for all frames, so that nothing flickers."""
    shares = np.linspace(0, 1, SHADES, endpoint=False)[:, None]
    own = [np.array([int(color[n : n + 2], 16) for n in (1, 3, 5)]) for color in dict.fromkeys(colors)]
    shaded = [(1 - shares) * color + shares * 255 for color in own]
    greys = np.repeat(np.linspace(0, 255, 18)[:, None], 3, 1)
    return np.concatenate([greys, *shaded]).round().astype(np.int32)


def _indexed(image: Image.Image, palette: np.ndarray) -> Image.Image:
    """The nearest colour of the palette for each pixel (Pillow's own search is a coarse one)."""
    pixels = np.asarray(image, dtype=np.int32) @ np.array([1 << 16, 1 << 8, 1], dtype=np.int32)
    colors, which = np.unique(pixels, return_inverse=True)
    parts = np.stack([colors >> 16, colors >> 8 & 255, colors & 255], -1)
    nearest = np.square(parts[:, None] - palette).sum(-1).argmin(-1)
    found = Image.fromarray(nearest.astype(np.uint8)[which].reshape(pixels.shape), mode="P")
    found.putpalette(palette.astype(np.uint8).tobytes())
    return found
