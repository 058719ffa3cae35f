"""A text coloured by what its tokens matter to the prediction: in a terminal, and as a page; from a result alone.

Colour says by which factor a token's sensitivity differs from the baseline, in steps of a factor of two to either side:
blue below, vermillion above, a pair that colour-blind readers can tell apart, and nothing where it does not differ.
Where there is no colour (a pipe, NO_COLOR) the same stands there in numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import xarray as xr

from ..errors import InputError
from ..results.dataset import number_types
from ..run.files import atomic

Row: TypeAlias = tuple[str, ...]

TOP = 12  # tokens in the table
EDGES = tuple(
    2.0**n for n in (-2, -1, -0.5, 0.5, 1, 2)
)  # ratios between which a class lies; the middle one is not coloured
LABELS = ("below 1/4", "1/4 to 1/2", "1/2 to 0.7", "0.7 to 1.4", "1.4 to 2", "2 to 4", "above 4")
PLAIN = len(EDGES) // 2
# (background, letters) of each class, blends of the house's blue and vermillion with white.
COLORS = (
    ("#0072b2", "#ffffff"),
    ("#72b2d8", "#000000"),
    ("#c9e2f1", "#000000"),
    None,
    ("#fadcc5", "#000000"),
    ("#f0a46c", "#000000"),
    ("#d55e00", "#ffffff"),
)
# The same on dark paper, where what does not differ has to be dark.
DARK = (
    ("#56b4e9", "#000000"),
    ("#1f6a9c", "#ffffff"),
    ("#1b3d54", "#ffffff"),
    None,
    ("#533520", "#ffffff"),
    ("#9c5518", "#ffffff"),
    ("#f59a4f", "#000000"),
)
COLUMNS = ("position", "token", "sensitivity", "baseline", "ratio")
PART_COLUMNS = ("part", "positions", "share of the squared sensitivity", "of the squared baseline")
TREND = 0.5  # rank correlation of ratio and position from which it is worth a sentence
FAR = 1e-4  # of the largest value: what lies lower is left out of the page's chart
WIDTH, HEIGHT, LEFT, BELOW = 860, 190, 44, 22  # of that chart, in its own units


class Line(NamedTuple):
    """A curve of the chart: its name, its style's name, and SVG points of its unbroken stretches."""

    label: str
    style: str
    points: list[str]


def ratio_class(ratio: float) -> int | None:
    """The class of a ratio, 0 (least) to 6 (most); None where there is none."""
    return None if math.isnan(ratio) else int(np.searchsorted(EDGES, ratio, side="right"))


def top_rows(ds: xr.Dataset, top: int = TOP) -> list[Row]:
    """The `top` tokens between sink and recency with the highest ratio, with `COLUMNS`."""
    ratio = ds["ratio"].values
    rest = np.flatnonzero((ds["part_of"].values == "rest") & ~np.isnan(ratio))
    return [_cells(ds, int(at)) for at in rest[np.argsort(-ratio[rest], kind="stable")][:top]]


def all_rows(ds: xr.Dataset) -> list[Row]:
    """Every position, with `COLUMNS` and the part it belongs to."""
    return [(*_cells(ds, at), str(ds["part_of"].values[at])) for at in range(ds.sizes["position"])]


def part_rows(ds: xr.Dataset) -> list[Row]:
    """What sink, recency and the rest have of the whole, with `PART_COLUMNS`."""
    rows = []
    for part in ("sink", "recency", "rest"):
        at = np.flatnonzero(ds["part_of"].values == part)
        ends = "-" if not len(at) else str(at[0]) if len(at) == 1 else f"{at[0]}-{at[-1]}"
        shares = [f"{float(ds[name].sel(part=part)):.1%}" for name in ("share", "baseline_share")]
        if _options(ds)["baseline"] == "none":
            shares[1] = "-"
        rows.append((part, ends, *shares))
    return rows


def sentences(ds: xr.Dataset) -> list[str]:
    """What was read, what is measured, what it is divided by, and the rule of the parts."""
    options = _options(ds)
    name, length, of = str(ds.attrs["model"]), ds.sizes["position"], options["of"]
    best = ", ".join(
        f"'{token}' {p:.1%}" for token, p in zip(ds["next_token"].values, ds["probability"].values, strict=True)
    )
    what = {
        "prediction": "the next-token distribution (Fisher's metric)",
        "logits": "all next-token logits",
        "top": f"log p of '{ds['next_token'].values[0]}'",
    }.get(of, f"log p of token {of}")
    fresh = f"fresh weights, {options['seeds']} seed{'s' if options['seeds'] != 1 else ''}"
    fresh += f", {ds.attrs['initialization']}" if "initialization" in ds.attrs else ""
    how = "second-moment kernel" if ds.attrs["baseline_by"] == "theory" else "measured"
    against = {
        "init": f"the architecture's own bias at initialization ({how}, {fresh})",
        "text": "the model's mean profile over other texts",
        "kernel": "the second-moment kernel of its own weights and patterns",
        "none": "nothing",
    }[options["baseline"]]
    lines = [
        f"{name} reads {length} tokens. Next: {best} (entropy {float(ds.attrs['entropy']):.2f} nats).",
        f"Sensitivity of {what} to each token, divided by {against}; "
        "geometric mean 1 over what is neither sink nor recency.",
        f"{str(ds.attrs['rule'])[0].upper()}{str(ds.attrs['rule'])[1:]}.",
    ]
    trend = float(ds.attrs["trend"])
    if abs(trend) > TREND:
        course = "rises" if trend > 0 else "falls"
        line = f"The ratio {course} with position (rank correlation {trend:.2f})"
        remedy = "; baseline text divides out what position the model has learned"
        lines.append(f"{line}{remedy if options['baseline'] != 'text' else ''}.")
    return lines


# ------------------------------------------------------------------------------------------------------- the terminal


def colored_text(ds: xr.Dataset) -> Any:
    """The text as rich's `Text`: tokens on their colours, the sink in brackets, the recency part underlined."""
    from rich.style import Style
    from rich.text import Text

    shown = Text()
    for at, (piece, ratio) in enumerate(zip(ds["token"].values, ds["ratio"].values, strict=True)):
        part, color = ds["part_of"].values[at], _color(float(ratio))
        look = Style(
            bgcolor=color[0] if color else None,
            color=color[1] if color else None,
            bold=part == "sink",
            underline=part == "recency",
        )
        lines = str(piece).split("⏎")
        if part == "sink":
            shown.append("[", Style(bold=True))
        for n, line in enumerate(lines):
            shown.append(f"{line}⏎" if n < len(lines) - 1 else line, look)
            if n < len(lines) - 1:
                shown.append("\n")
        if part == "sink":
            shown.append("]", Style(bold=True))
    return shown


def legend() -> Any:
    """What the colours and marks mean, as rich's `Text`."""
    from rich.style import Style
    from rich.text import Text

    shown = Text("ratio ")
    for label, color in zip(LABELS, COLORS, strict=True):
        shown.append(f" {label} ", Style(bgcolor=color[0], color=color[1]) if color else Style())
    shown.append("   ")
    shown.append("[sink]", Style(bold=True))
    shown.append("  ")
    shown.append("recency", Style(underline=True))
    return shown


def print_inspection(ds: xr.Dataset, *, top: int = TOP, console: Any = None) -> None:
    """Print the coloured text with its legend, or every token with its numbers where there are no colours; then tables."""
    from rich.console import Console

    check_top(top)
    console = console or Console(highlight=False, emoji=False)
    for line in sentences(ds):
        console.print(line, markup=False)
    console.print()
    if console.color_system is not None and not console.no_color:
        console.print(colored_text(ds), soft_wrap=True)
        console.print()
        console.print(legend(), soft_wrap=True)
    else:
        _print_rows(console, (*COLUMNS, "part"), all_rows(ds))
    _print_rows(console, PART_COLUMNS, part_rows(ds))
    if top:
        console.print("Tokens between sink and recency that stand out most:")
        _print_rows(console, COLUMNS, top_rows(ds, top))


def _print_rows(console: Any, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """A table, every line of it whole; cells may hold brackets, which are no markup, and wide characters."""
    from rich.box import SIMPLE_HEAD
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    for column in columns:
        table.add_column(column, no_wrap=True, justify="left" if column in ("token", "part") else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    widths = [max(map(cell_len, cells)) + 3 for cells in zip(columns, *rows, strict=True)]
    Console(file=console.file, width=sum(widths) + 2).print(table)


# -------------------------------------------------------------------------------------------------------------- a page


def inspection_page(ds: xr.Dataset, *, top: int = TOP) -> str:
    """The same as one self-contained HTML page, light or dark as its reader has it; numbers show on hovering.

    Raises:
        InputError: `top` is negative.
    """
    import jinja2

    check_top(top)
    source = Path(__file__).with_name("inspection.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    tokens = []
    for row, ratio in zip(all_rows(ds), ds["ratio"].values, strict=True):
        position, token, sensitivity, baseline, shown, part = row
        said = f"position {position} ({part}): sensitivity {sensitivity}, baseline {baseline}, ratio {shown}"
        kind = ratio_class(float(ratio))
        tokens.append({"pieces": token.split("⏎"), "part": part, "says": said, "kind": "no" if kind is None else kind})
    options = _options(ds)
    return environment.from_string(source).render(
        model=str(ds.attrs["model"]),
        sentences=sentences(ds),
        tokens=tokens,
        classes=[
            {"number": n, "label": label, "color": color, "dark": dark}
            for n, (label, color, dark) in enumerate(zip(LABELS, COLORS, DARK, strict=True))
        ],
        plain=PLAIN,
        predictions=[
            {"token": str(token), "id": int(i), "p": float(p)}
            for token, i, p in zip(ds["next_token"].values, ds["next_id"].values, ds["probability"].values, strict=True)
        ],
        part_columns=PART_COLUMNS,
        part_rows=part_rows(ds),
        columns=COLUMNS,
        top_rows=top_rows(ds, top),
        chart=_chart(ds),
        command=str(ds.attrs["command"]),
        made=[
            f"headwater {ds.attrs['headwater']}",
            str(ds.attrs["backend"]),
            " / ".join(number_types(ds)),
            str(ds.attrs["device"]),
            f"method {options['method']}",
            f"weights {str(ds.attrs['weights'])[:12]}",
        ],
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


def _chart(ds: xr.Dataset) -> dict[str, Any]:
    """Sensitivity and baseline over positions, on a logarithmic axis of whole decades, as SVG points."""
    curves = {"sensitivity": ds["sensitivity"].values.astype(float)}
    if _options(ds)["baseline"] != "none":
        curves["baseline"] = ds["baseline"].values.astype(float)
    seen = np.concatenate([curve[curve > 0] for curve in curves.values()])
    top = math.ceil(math.log10(seen.max()))
    bottom = min(top - 1, math.floor(math.log10(max(seen.min(), seen.max() * FAR))))
    length = ds.sizes["position"]

    def x(position: Any) -> Any:
        return LEFT + (WIDTH - LEFT - 6) * position / (length - 1)

    def y(decade: Any) -> Any:
        return 6 + (HEIGHT - BELOW - 6) * (top - decade) / (top - bottom)

    lines = []
    for name, curve in curves.items():
        drawn = curve >= 10.0**bottom
        stretches = np.split(np.arange(length), np.flatnonzero(np.diff(drawn)) + 1)
        points = [
            " ".join(f"{x(j):.1f},{y(math.log10(curve[j])):.1f}" for j in stretch)
            for stretch in stretches
            if drawn[stretch[0]]
        ]
        lines.append(Line(name, name, points))
    recency = np.flatnonzero(ds["part_of"].values == "recency")
    start = float(x(recency[0] - 0.5))
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "left": LEFT,
        "bottom": y(bottom),
        "lines": lines,
        "decades": [{"y": y(decade), "label": f"{10.0**decade:g}"} for decade in range(bottom, top + 1)],
        "ticks": [{"x": x(j), "label": str(j)} for j in _ticks(length)],
        "sink": max(3.0, x(0.5) - x(0)),
        "recency": {"x": start, "width": WIDTH - 6 - start},
    }


def _ticks(length: int) -> Sequence[int]:
    step = next(step for n in range(9) for k in (1, 2, 5) if (step := k * 10**n) * 8 >= length - 1)
    return range(0, length, step)


def _color(ratio: float) -> tuple[str, str] | None:
    kind = ratio_class(ratio)
    return None if kind is None else COLORS[kind]


def _cells(ds: xr.Dataset, at: int) -> Row:
    numbers = [float(ds[name].values[at]) for name in ("sensitivity", "baseline", "ratio")]
    if _options(ds)["baseline"] == "none":
        numbers[1] = math.nan
    return str(at), str(ds["token"].values[at]), *("-" if math.isnan(n) else f"{n:.3g}" for n in numbers)


def _options(ds: xr.Dataset) -> dict[str, Any]:
    return json.loads(str(ds.attrs["options"]))
