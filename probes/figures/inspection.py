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

from ..errors import InputError
from ..results.dataset import number_types, options_of
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
        f"{ds.attrs['model']} reads {ds.sizes['position']} tokens. Next: {best} "
        f"(entropy {float(ds.attrs['entropy']):.2f} nats).",
        f"Sensitivity of {what} to each token, divided by {against}; "
        "geometric mean 1 over what is neither sink nor recency.",
        f"{rule[0].upper()}{rule[1:]}.",
    ]
    if abs(trend) > TREND:
        line = f"The ratio {'rises' if trend > 0 else 'falls'} with position (rank correlation {trend:.2f})"
        remedy = "; baseline text divides out what position the model has learned"
        lines.append(f"{line}{remedy * (options['baseline'] != 'text')}.")
    return lines


# ------------------------------------------------------------------------------------------------------- the terminal


def colored_text(ds: xr.Dataset) -> Any:
    """The text as rich's `Text`: tokens on their colours, the sink in brackets, the recency part underlined."""
    from rich.style import Style
    from rich.text import Text

    shown = Text()
    for piece, ratio, part in zip(*(ds[name].values for name in ("token", "ratio", "part_of")), strict=True):
        kind = ratio_class(float(ratio))
        ground, letters = (None if kind is None else COLORS[kind]) or (None, None)
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
    for label, color in zip(LABELS, COLORS, strict=True):
        shown.append(f" {label} ", Style(bgcolor=color[0], color=color[1]) if color else Style())
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
    classes = zip(range(len(LABELS)), LABELS, COLORS, DARK, strict=True)
    best = zip(*(ds[name].values.tolist() for name in ("next_token", "next_id", "probability")), strict=True)
    made = (
        f"headwater {ds.attrs['headwater']}",
        str(ds.attrs["backend"]),
        " / ".join(number_types(ds)),
        str(ds.attrs["device"]),
        f"method {options_of(ds)['method']}",
        f"weights {str(ds.attrs['weights'])[:12]}",
    )
    return environment.from_string(source).render(
        model=str(ds.attrs["model"]),
        sentences=sentences(ds),
        tokens=tokens,
        classes=[dict(zip(("number", "label", "color", "dark"), one, strict=True)) for one in classes],
        plain=PLAIN,
        predictions=[dict(zip(("token", "id", "p"), one, strict=True)) for one in best],
        part_columns=PART_COLUMNS,
        part_rows=part_rows(ds),
        columns=COLUMNS,
        top_rows=top_rows(ds, top),
        chart=_chart(ds),
        command=str(ds.attrs["command"]),
        made=made,
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
    names = ("sensitivity",) if _bare(ds) else ("sensitivity", "baseline")
    curves = {name: ds[name].values.astype(float) for name in names}
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
        stretches = np.split(np.arange(length), np.flatnonzero(np.diff(drawn)) + 1)  # unbroken ones
        places = [[f"{x(j):.1f},{y(math.log10(curve[j])):.1f}" for j in one] for one in stretches if drawn[one[0]]]
        lines.append({"style": name, "points": list(map(" ".join, places))})
    step = next(step for n in range(9) for k in (1, 2, 5) if (step := k * 10**n) * 8 >= length - 1)
    start = float(x(np.flatnonzero(ds["part_of"].values == "recency")[0] - 0.5))
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "left": LEFT,
        "bottom": y(bottom),
        "lines": lines,
        "decades": [{"y": y(decade), "label": f"{10.0**decade:g}"} for decade in range(bottom, top + 1)],
        "ticks": [{"x": x(j), "label": str(j)} for j in range(0, length, step)],
        "sink": max(3.0, x(0.5) - x(0)),
        "recency": {"x": start, "width": WIDTH - 6 - start},
    }


def _cells(ds: xr.Dataset, at: int) -> Row:
    names = ("sensitivity", "baseline", "ratio")
    numbers = [math.nan if name == "baseline" and _bare(ds) else float(ds[name].values[at]) for name in names]
    return str(at), str(ds["token"].values[at]), *("-" if math.isnan(n) else f"{n:.3g}" for n in numbers)


def _bare(ds: xr.Dataset) -> bool:
    """Whether it was divided by nothing."""
    return options_of(ds)["baseline"] == "none"
