"""A text coloured by what its tokens matter to the prediction: in a terminal, and as a page; from a result alone.

Colour says by which factor a token's sensitivity differs from the baseline, in steps of a factor of two to either side:
blue below, vermillion above, a pair that colour-blind readers can tell apart, and nothing where it does not differ.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import xarray as xr
from markupsafe import Markup

from ..charts import DOTTED, GREY, THEORY, TRAINED, Series, curves, sheet, svg
from ..results.dataset import number_types, options_of
from ..results.tables import Table, number
from .page import environment

EDGES = (0.25, 0.5, 0.5**0.5, 2**0.5, 2.0, 4.0)  # ratios between which a class lies; the middle one is not coloured
LABELS = ("below 1/4", "1/4 to 1/2", "1/2 to 0.7", "0.7 to 1.4", "1.4 to 2", "2 to 4", "above 4")
# Background of each class, a blend of the figures' blue and vermillion with white; letters on the darkest are white.
COLORS = ("#0072b2", "#72b2d8", "#c9e2f1", None, "#fadcc5", "#f0a46c", "#d55e00")
COLUMNS = ("position", "token", "sensitivity", "baseline", "ratio", "part")
PART_COLUMNS = ("part", "positions", "share of the squared sensitivity", "of the squared baseline")
TREND = 0.5  # rank correlation of ratio and position from which it is worth a sentence


def color_of(ratio: float) -> tuple[str, str] | None:
    """Background and letters of a ratio; None where it is not coloured."""
    kind = len(EDGES) // 2 if math.isnan(ratio) else int(np.searchsorted(EDGES, ratio, side="right"))
    ground = COLORS[kind]
    return None if ground is None else (ground, "#ffffff" if kind in (0, len(COLORS) - 1) else "#000000")


LEGEND = [(label, color_of(ratio)) for label, ratio in zip(LABELS, (0.0, *EDGES), strict=True)]


def rows(ds: xr.Dataset) -> list[list[str]]:
    """Every position, with `COLUMNS`."""
    numbers = zip(*(map(number, ds[name].values) for name in ("sensitivity", "baseline", "ratio")), strict=True)
    names = zip(map(str, ds["token"].values), numbers, map(str, ds["part_of"].values), strict=True)
    bare = _bare(ds)
    return [
        [str(at), token, sensitivity, "-" if bare else baseline, ratio, part]
        for at, (token, (sensitivity, baseline, ratio), part) in enumerate(names)
    ]


def tables(ds: xr.Dataset, top: int) -> list[Table]:
    """What sink, recency and the rest have of the whole, and the `top` tokens of the rest with the highest ratio."""
    parts = []
    for part in ("sink", "recency", "rest"):
        at = np.flatnonzero(ds["part_of"].values == part)
        ends = "-".join(map(str, dict.fromkeys((at[0], at[-1])))) if len(at) else "-"
        share, baseline = (f"{float(ds[name].sel(part=part)):.1%}" for name in ("share", "baseline_share"))
        parts.append([part, ends, share, "-" if _bare(ds) else baseline])
    ratio, every = ds["ratio"].values, rows(ds)
    rest = np.flatnonzero((ds["part_of"].values == "rest") & ~np.isnan(ratio))
    first = [every[at][:-1] for at in rest[np.argsort(-ratio[rest], kind="stable")][:top]]
    shares = Table("Sink, recency, and the rest", PART_COLUMNS, parts)
    return [shares, Table("Tokens between sink and recency that stand out most", COLUMNS[:-1], first)][
        : 1 + bool(first)
    ]


def sentences(ds: xr.Dataset) -> list[str]:
    """What was read, what is measured, what it is divided by, and the rule of the parts."""
    options, tokens = options_of(ds), ds["next_token"].values
    best = ", ".join(f"'{token}' {p:.1%}" for token, p in zip(tokens, ds["probability"].values, strict=True))
    what = {
        "prediction": "the next-token distribution (Fisher's metric)",
        "logits": "all next-token logits",
        "top": f"log p of '{tokens[0]}'",
    }.get(options["of"], f"log p of token {options['of']}")
    fresh = f"fresh weights, {options['seeds']} seed{'s' * (options['seeds'] != 1)}"
    fresh += f", {ds.attrs['initialization']}" if "initialization" in ds.attrs else ""
    how = "second-moment kernel" if ds.attrs["baseline_by"] == "theory" else "measured"
    against = {
        "init": f"the architecture's own bias at initialization ({how}, {fresh})",
        "text": "the model's mean profile over other texts",
        "kernel": "the second-moment kernel of its own weights and patterns",
        "none": "nothing",
    }[options["baseline"]]
    rule, trend = str(ds.attrs["rule"]), float(ds.attrs["trend"])
    entropy = f"(entropy {float(ds.attrs['entropy']):.2f} nats)"
    lines = [
        f"{ds.attrs['model']} reads {ds.sizes['position']} tokens. Next: {best} {entropy}.",
        f"Sensitivity of {what} to each token, divided by {against}; "
        "geometric mean 1 over what is neither sink nor recency.",
        f"{rule[0].upper()}{rule[1:]}.",
    ]
    if abs(trend) > TREND:
        line = f"The ratio {'rises' if trend > 0 else 'falls'} with position (rank correlation {trend:.2f})"
        remedy = "; baseline text divides out what position the model has learned"
        lines.append(f"{line}{remedy * (options['baseline'] != 'text')}.")
    return lines


def colored_text(ds: xr.Dataset) -> Any:
    """The text as rich's `Text`: tokens on their colours, the sink in brackets, the recency part underlined."""
    from rich.style import Style
    from rich.text import Text

    shown = Text()
    for piece, ratio, part in zip(*(ds[name].values for name in ("token", "ratio", "part_of")), strict=True):
        ground, letters = color_of(float(ratio)) or (None, None)
        look = Style(bgcolor=ground, color=letters, bold=part == "sink", underline=part == "recency")
        shown.append("[" * (part == "sink"), Style(bold=True))
        *broken, last = str(piece).split("⏎")
        for line in broken:
            shown.append(f"{line}⏎", look).append("\n")
        shown.append(last, look)
        shown.append("]" * (part == "sink"), Style(bold=True))
    shown.append("\n\nratio ")
    for label, color in LEGEND:
        ground, letters = color or (None, None)
        shown.append(f" {label} ", Style(bgcolor=ground, color=letters))
    return shown.append("   ").append("[sink]", "bold").append("  ").append("recency", "underline")


def inspection_page(ds: xr.Dataset, top: int) -> str:
    """The same as one self-contained HTML page, light or dark as its reader has it; numbers show on hovering."""
    tokens = []
    for (position, token, sensitivity, baseline, shown, part), ratio in zip(rows(ds), ds["ratio"].values, strict=True):
        says = f"position {position} ({part}): sensitivity {sensitivity}, baseline {baseline}, ratio {shown}"
        tokens.append({"text": token.replace("⏎", "⏎\n"), "part": part, "says": says, "color": color_of(float(ratio))})
    origin = [str(ds.attrs[name]) for name in ("backend", "device")]
    origin = [f"headwater {ds.attrs['headwater']}", *origin, *number_types(ds), f"method {options_of(ds)['method']}"]
    return (
        environment()
        .get_template("inspection.html.j2")
        .render(
            model=str(ds.attrs["model"]),
            sentences=sentences(ds),
            tokens=tokens,
            legend=LEGEND,
            tables=tables(ds, top),
            figure=Markup(svg(chart(ds))),
            command=str(ds.attrs["command"]),
            made=", ".join([*origin, f"weights {str(ds.attrs['weights'])[:12]}"]),
        )
    )


def chart(ds: xr.Dataset) -> Any:
    """Sensitivity and baseline by position, sink and recency shaded."""
    figure, cells = sheet(1, 1)
    cell = cells[0, 0]
    series = [Series("sensitivity", ds["sensitivity"], TRAINED)]
    if not _bare(ds):
        series.append(Series("baseline, scaled to it", ds["baseline"], THEORY, line=DOTTED))
    curves(cell, series, log=True)
    for part in ("sink", "recency"):
        at = np.flatnonzero(ds["part_of"].values == part)
        if len(at):
            cell.axvspan(at[0] - 0.5, at[-1] + 0.5, color=GREY, alpha=0.15, linewidth=0)
    cell.set_xlabel("position (grey: sink and recency)")
    return figure


def _bare(ds: xr.Dataset) -> bool:
    """Whether it was divided by nothing."""
    return options_of(ds)["baseline"] == "none"
