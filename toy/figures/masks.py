"""Attention masks as directed graphs, with their center nodes, as in Fig. 1 of [Wu]."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from probes.figures.style import BLUE, GREY, STYLE, VERMILLION, blank, save_figure, small_print
from probes.theory.rollout import centers, visible

TOKENS, WINDOW, PREFIX, DECAY = 6, 3, 2, 0.5  # DECAY in nats per token
WIDTH, HEIGHT, DPI = 10.2, 2.0, 210
THICK, OPAQUE = 2.0, 0.75  # of an edge of weight 1, in points
BEND = 0.55  # of an arrow, of its length
SHRINK = 7  # points between an arrow and the middle of its node
WEIGHTS = np.tril(np.exp(-DECAY * np.abs(np.subtract.outer(np.arange(TOKENS), np.arange(TOKENS)))))
MASKS = {  # by name, [query, key]
    "causal": visible(TOKENS).astype(float),
    f"window {WINDOW}": visible(TOKENS, window=WINDOW).astype(float),
    f"prefix {PREFIX}": visible(TOKENS, prefix=PREFIX).astype(float),
    "full": visible(TOKENS, prefix=TOKENS).astype(float),
    f"decay {DECAY:g}": WEIGHTS,
}


def masks_figure(*, path: str | Path | None = None) -> Figure:
    """One graph per mask: an arrow from every key to every query that sees it, center nodes filled.

    Decay hides no key: its graph is the causal one, and what an edge weighs is its width.

    Args:
        path: where to save; see `save_figure`.
    """
    with matplotlib.rc_context(STYLE):
        figure = blank((WIDTH, HEIGHT), DPI)
        cells = figure.subplots(1, len(MASKS))
        for cell, (name, weights) in zip(cells, MASKS.items(), strict=True):
            _graph(cell, name, weights)
        notes = [
            "arrows: from a key to a query that sees it (those to oneself are not drawn); filled, and in the title: center "
            "nodes, from which every token is reached along arrows",
        ]
        small_print(figure, notes)
        if path is not None:
            save_figure(figure, path, dpi=DPI)
    return figure


def _graph(cell: Axes, name: str, weights: np.ndarray) -> None:
    """Tokens on a line; arrows to later tokens above it, to earlier ones below."""
    found = centers(weights > 0)
    for query, key in np.argwhere(weights > 0):
        if query == key:
            continue
        weight = weights[query, key]
        color = VERMILLION if key in found else GREY
        look = {"linewidth": THICK * weight, "alpha": OPAQUE, "color": color}
        ends = {"arrowstyle": "-|>", "mutation_scale": 3 + 3 * weight, "shrinkA": SHRINK, "shrinkB": SHRINK}
        arrow = FancyArrowPatch((key, 0), (query, 0), connectionstyle=f"arc3,rad={-BEND}", **ends, **look)
        cell.add_patch(arrow)
    for token in range(len(weights)):
        center = token in found
        face = VERMILLION if center else "white"
        cell.plot(token, 0, "o", markersize=11, color=VERMILLION if center else BLUE, markerfacecolor=face, zorder=3)
        cell.annotate(str(token), (token, 0), ha="center", va="center", fontsize=7, color="white" if center else BLUE)
    half = (len(weights) - 1) * BEND / 2 + 0.3
    cell.set(xlim=(-0.6, len(weights) - 0.4), ylim=(-half, half))
    cell.set_title(f"{name}: {', '.join(map(str, found))}")
    cell.set_aspect("equal")
    cell.axis("off")
