"""Every colour, line and mark of the figures and of the page's charts; what is changed here changes in both.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; lines and marks repeat what colours say.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from matplotlib.colors import LinearSegmentedColormap

BLUE, VERMILLION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
PURPLE, SKY, BLACK, YELLOW = "#CC79A7", "#56B4E9", "#1a1a1a", "#F0E442"
CYCLE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)  # for models in one panel; yellow is unreadable on white

GREY, FAINT, PALE = "#777777", "#dddddd", "#aaaaaa"  # reference lines; grids; what stands behind a curve
WEIGHTS = "Blues"  # attention weights: one hue, lightness alone tells them apart, zero is the paper
SIGNED = LinearSegmentedColormap.from_list("signed", (VERMILLION, "#ffffff", BLUE))  # for changes; zero is the paper
DEPTHS = LinearSegmentedColormap.from_list("depths", (SKY, BLUE, "#1a1a1a"))  # blocks in one panel, light to dark

# The page's names of lines, as matplotlib has them.
LINES: dict[str, Any] = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
DOTTED, DASHED = (0, (1, 1.3)), (0, (4, 1.5))


class Style(NamedTuple):
    """How a curve is drawn."""

    label: str
    color: str
    line: Any = "-"  # matplotlib's line style
    order: float = 3  # a higher one is drawn on top
    dash: str = "solid"  # the line on the page, where colours may stand for models
    marker: str = "o"


# The theories a figure may draw, in the order of its legend; `theory_` stands before their names in results.
THEORIES = {
    "score_path": Style("second-moment kernel", BLACK, DOTTED, 6, "dot"),
    "values": Style("kernel, values only", GREEN, (0, (3, 1, 1, 1)), 5, "dashdot"),
    "uniform": Style("kernel, uniform attention", ORANGE, DASHED, 5, "longdash"),
    "config": Style("kernel from the config alone", SKY, (0, (6, 1.5)), 4, "dash"),
    "cesaro": Style(r"$N^L$, best $\alpha$ [Chowdhury]", PURPLE, "-.", 4, "longdashdot"),
}
CONDITIONS = {
    "pretrained": Style("pretrained", VERMILLION, "-", 4, "solid"),
    "init": Style("init", BLUE, "-", 3, "dash"),
    "init-nope": Style("init, no positional encoding", BLACK, (0, (4, 2)), 2, "dot"),
}

# The map of fresh models.
DEPTH_COLORS = {4: SKY, 8: GREEN, 12: BLUE, 16: ORANGE, 32: VERMILLION}  # by number of blocks
STRENGTH_COLORS = (BLUE, GREEN, ORANGE, VERMILLION)
OTHERS_COLOR, NAMED_COLOR = GREY, PURPLE  # other changes; usual models
MODEL_MARKERS = {"*": 8.0, "D": 5.0, "s": 5.0}  # and their sizes, for the usual models in the map's order

# Sinks. Roles that are marked; "sink-reading" is in results from before there were any.
NORMS = {
    "value": Style("|value|", BLUE, marker="o"),
    "key": Style("|key|", ORANGE, marker="^"),
    "written": Style("|written|", GREEN, marker="s"),
}

# Position 0's residual stream.
FIRSTS = {
    "bos": Style("BOS at position 0", VERMILLION, "-", 3),
    "id": Style("one id at position 0", VERMILLION, "-", 3),
    "text": Style("text at position 0", BLUE, "-", 4),
}
PLACES = {
    "position 0": Style("at position 0", BLACK, "-", 4),
    "position 1 behind BOS": Style("at 1 behind BOS", GREEN, DASHED, 3),
}
WITH_BOS = Style("at 0, with BOS's own", VERMILLION, DOTTED, 5)

TOTAL_COLOR = BLACK
# Recall by depth.
RECALL = {
    "log_p": Style("asked for", VERMILLION, "-", 4),
    "control": Style("key not in the list", GREY, "--", 3, "dash"),
    "exact": Style("asked for", VERMILLION, "-", 4),
}
MECHANISM = {  # what the value's log odds depend on
    "pair": Style("the pair asked for", VERMILLION, "-", 5),
    "control": Style("its place, key not in the list", GREY, "--", 2, "dash"),
    "others": Style("another pair", BLUE, "-.", 3, "dashdot"),
    "position 0": Style("position 0", GREEN, ":", 4, "dot"),
    "cut": Style("weights on position 0 held", PURPLE, "-", 4),
    "through_first": Style("through these weights", GREEN, "--", 3, "dash"),
}

DECODED = {
    "r2": Style("positions", VERMILLION, "-", 4),
    "r2_shuffled": Style("permuted positions", GREY, "--", 3, "dash"),
}

# The swap of position 0: replacements by name; token ids take what is left.
REPLACEMENTS = {"mean": BLUE, "zero": VERMILLION, "random": GREEN}
OTHER_REPLACEMENTS = (ORANGE, PURPLE, SKY)
BEFORE = Style("before", "#bbbbbb", "-", 2)
PUBLISHED_STYLE = Style("[Ruscio], early", GREY, "--", 1, "dot")

# Toys beside a model.
MODEL = {
    "init": Style("model, init", BLUE, "-", 5),
    "pretrained": Style("model, pretrained", VERMILLION, "-", 6),
}
TOYS = {
    "init": Style("toy, init", SKY, DASHED, 7, "dash"),
    "retrieval": Style("retrieval toy", GREEN, DASHED, 7, "dash"),
    "in-context": Style("in-context toy", PURPLE, DOTTED, 7, "dash"),
}


def condition_style(condition: str) -> Style:
    return CONDITIONS.get(condition, Style(condition, PURPLE, "-.", 2, "dashdot"))


def theory_style(theory: str, condition: str) -> Style:
    """How a theory is drawn beside a condition's curve: in black where it predicts, in the curve's colour as a baseline."""
    style = THEORIES[theory]
    return style._replace(color=condition_style(condition).color) if condition == "pretrained" else style


def depth_color(layer: int, blocks: int) -> Any:
    return DEPTHS(layer / max(1, blocks - 1))


def model_colors(names: Iterable[str]) -> dict[str, str]:
    """A colour for every model, the same in all figures of one panel; beyond seven models, colours repeat."""
    return {name: CYCLE[n % len(CYCLE)] for n, name in enumerate(names)}


def replacement_label(replacement: str) -> str:
    return f"token {replacement}" if replacement.isdigit() else replacement


def replacement_colors(names: Iterable[str]) -> dict[str, str]:
    """A colour for every replacement at position 0, in the order given."""
    found = list(dict.fromkeys(names))
    others = [name for name in found if name not in REPLACEMENTS]
    return {
        name: REPLACEMENTS.get(name) or OTHER_REPLACEMENTS[others.index(name) % len(OTHER_REPLACEMENTS)]
        for name in found
    }
