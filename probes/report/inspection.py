"""A text coloured by what its tokens matter to the prediction: in a terminal, and as a page; from a result alone.

Colour says by which factor a token's sensitivity differs from the baseline, in steps of a factor of two to either side:
blue below, vermillion above, a pair that colour-blind readers can tell apart, and nothing where it does not differ.
Where there is no colour (a pipe, NO_COLOR) the same stands there in numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import xarray as xr
from markupsafe import Markup

from ..errors import InputError
from ..results.dataset import number_types, options_of
from ..results.tables import Table, number
from ..run.files import atomic
from .page import environment

Row: TypeAlias = tuple[str, ...]

TOP = 12  # tokens in the table
EDGES = (0.25, 0.5, 0.5**0.5, 2**0.5, 2.0, 4.0)  # ratios between which a class lies; the middle one is not coloured
LABELS = ("below 1/4", "1/4 to 1/2", "1/2 to 0.7", "0.7 to 1.4", "1.4 to 2", "2 to 4", "above 4")
# Background of each class, a blend of the figures' blue and vermillion with white; letters on the darkest are white.
COLORS = ("#0072b2", "#72b2d8", "#c9e2f1", None, "#fadcc5", "#f0a46c", "#d55e00")
COLUMNS = ("position", "token", "sensitivity", "baseline", "ratio")
PART_COLUMNS = ("part", "positions", "share of the squared sensitivity", "of the squared baseline")
WIDEST = 10_000  # characters of a printed line: none is broken
TREND = 0.5  # rank correlation of ratio and position from which it is worth a sentence


def ratio_class(ratio: float) -> int | None:
    """The class of a ratio, 0 (least) to 6 (most); None where there is none."""
    return None if math.isnan(ratio) else int(np.searchsorted(EDGES, ratio, side="right"))


def color_of(ratio: float) -> tuple[str, str] | None:
    """Background and letters of a ratio; None where it is not coloured."""
    kind = ratio_class(ratio)
    ground = None if kind is None else COLORS[kind]
    return None if ground is None else (ground, "#ffffff" if kind in (0, len(COLORS) - 1) else "#000000")


def all_rows(ds: xr.Dataset) -> list[Row]:
    """Every position, with `COLUMNS` and the part it belongs to."""
    rows = []
    for at in range(ds.sizes["position"]):
        baseline = math.nan if _bare(ds) else ds["baseline"].values[at]
        numbers = (ds["sensitivity"].values[at], baseline, ds["ratio"].values[at])
        rows.append((str(at), str(ds["token"].values[at]), *map(number, numbers), str(ds["part_of"].values[at])))
    return rows


def top_rows(ds: xr.Dataset, top: int = TOP) -> list[Row]:
    """The `top` tokens between sink and recency with the highest ratio, with `COLUMNS`."""
    ratio, rows = ds["ratio"].values, all_rows(ds)
    rest = np.flatnonzero((ds["part_of"].values == "rest") & ~np.isnan(ratio))
    return [rows[at][:-1] for at in rest[np.argsort(-ratio[rest], kind="stable")][:top]]


def part_rows(ds: xr.Dataset) -> list[Row]:
    """What sink, recency and the rest have of the whole, with `PART_COLUMNS`."""
    rows = []
    for part in ("sink", "recency", "rest"):
        at = np.flatnonzero(ds["part_of"].values == part)
        ends = "-" if not len(at) else str(at[0]) if len(at) == 1 else f"{at[0]}-{at[-1]}"
        share, baseline = (f"{float(ds[name].sel(part=part)):.1%}" for name in ("share", "baseline_share"))
        rows.append((part, ends, share, "-" if _bare(ds) else baseline))
    return rows


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
    lines = [
        f"{ds.attrs['model']} reads {ds.sizes['position']} tokens. Next: {best} (entropy {float(ds.attrs['entropy']):.2f} "
        "nats).",
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
    return shown


def legend() -> Any:
    """What the colours and marks mean, as rich's `Text`."""
    from rich.style import Style
    from rich.text import Text

    shown = Text("ratio ")
    for label, ratio in zip(LABELS, (0.0, *EDGES), strict=True):
        ground, letters = color_of(ratio) or (None, None)
        shown.append(f" {label} ", Style(bgcolor=ground, color=letters))
    return shown.append("   ").append("[sink]", "bold").append("  ").append("recency", "underline")


def print_inspection(ds: xr.Dataset, *, top: int = TOP, console: Any = None) -> None:
    """Print the coloured text with its legend, or every token with its numbers where there are no colours; then tables."""
    from rich.console import Console

    check_top(top)
    console = console or Console(highlight=False, emoji=False)
    for line in sentences(ds):
        console.print(line, markup=False)
    console.print()
    if console.color_system is not None and not console.no_color:
        console.print(colored_text(ds), "", legend(), soft_wrap=True, sep="\n")
    else:
        _print_rows(console, (*COLUMNS, "part"), all_rows(ds))
    _print_rows(console, PART_COLUMNS, part_rows(ds))
    if top:
        console.print("Tokens between sink and recency that stand out most:")
        _print_rows(console, COLUMNS, top_rows(ds, top))


def _print_rows(console: Any, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """A table, every line of it whole; cells may hold brackets, which are no markup."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as Printed
    from rich.text import Text

    table = Printed(box=SIMPLE_HEAD, padding=(0, 1))
    for column in columns:
        table.add_column(column, no_wrap=True, justify="left" if column in ("token", "part") else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    Console(file=console.file, width=WIDEST).print(table)


def inspection_page(ds: xr.Dataset, *, top: int = TOP) -> str:
    """The same as one self-contained HTML page, light or dark as its reader has it; numbers show on hovering.

    Raises:
        InputError: `top` is negative.
    """
    check_top(top)
    tokens = []
    for (position, token, *numbers, part), ratio in zip(all_rows(ds), ds["ratio"].values, strict=True):
        sensitivity, baseline, shown = numbers
        said = f"position {position} ({part}): sensitivity {sensitivity}, baseline {baseline}, ratio {shown}"
        tokens.append({"text": token.replace("⏎", "⏎\n"), "part": part, "says": said, "color": color_of(float(ratio))})
    best = zip(*(ds[name].values.tolist() for name in ("next_token", "next_id", "probability")), strict=True)
    predictions = [[str(token), str(number), f"{p:.1%}"] for token, number, p in best]
    tables = [
        Table("What comes next", ("token", "id", "probability"), predictions),
        Table("Sink, recency, and the rest", PART_COLUMNS, list(map(list, part_rows(ds)))),
        Table("Tokens between sink and recency that stand out most", COLUMNS, list(map(list, top_rows(ds, top)))),
    ]
    made = (
        f"headwater {ds.attrs['headwater']}",
        *(str(ds.attrs[name]) for name in ("backend", "device")),
        *number_types(ds),
        f"method {options_of(ds)['method']}",
        f"weights {str(ds.attrs['weights'])[:12]}",
    )
    return (
        environment()
        .get_template("inspection.html.j2")
        .render(
            model=str(ds.attrs["model"]),
            sentences=sentences(ds),
            tokens=tokens,
            legend=[(label, color_of(ratio)) for label, ratio in zip(LABELS, (0.0, *EDGES), strict=True)],
            tables=[table for table in tables if table.rows],
            figure=Markup(_chart(ds)),
            command=str(ds.attrs["command"]),
            made=", ".join(made),
        )
    )


def write_page(ds: xr.Dataset, path: str | Path, *, top: int = TOP) -> None:
    """Write `inspection_page` atomically.

    Raises:
        InputError: the path cannot be written to, or `top` is negative.
    """
    page = inspection_page(ds, top=top)
    with atomic(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def check_top(top: int) -> None:
    """Raises: InputError: negative."""
    if top < 0:
        raise InputError(f"top={top} tokens cannot be listed; give 0 or more")


def _chart(ds: xr.Dataset) -> str:
    """Sensitivity and baseline by position, sink and recency shaded, as SVG."""
    from ..charts import DOTTED, GREY, THEORY, TRAINED, Series, curves, sheet, svg

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
    return svg(figure)


def _bare(ds: xr.Dataset) -> bool:
    """Whether it was divided by nothing."""
    return options_of(ds)["baseline"] == "none"
