"""One text, token by token: which of them the next-token prediction depends on, position's own part divided out.

`compute` says what is measured and what it is divided by, `reading` how a text becomes tokens. In a terminal the text is
coloured: by which factor a token's sensitivity differs from the baseline, in steps of a factor of two to either side, blue
below and vermillion above, a pair that colour-blind readers can tell apart, and nothing where it does not differ.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.style import Style
from rich.text import Text

from ... import options
from ...charts import DOTTED, GREY, THEORY, TRAINED, Panel, Series, curves, panels
from ...data.chat import conversations
from ...data.documents import read_documents
from ...data.prompts import parse_first
from ...errors import InputError, plural
from ...measure import Headline, Measure
from ...options import MOST_PRODUCTS, MOST_SEEDS, option
from ...results.dataset import options_of
from ...results.tables import Table, number
from .compute import BASELINES as BASELINES
from .compute import inspect as inspect

TEXT = "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, depth):\n    return"
EDGES = (0.25, 0.5, 0.5**0.5, 2**0.5, 2.0, 4.0)  # ratios between which a class lies; the middle one is not coloured
LABELS = ("below 1/4", "1/4 to 1/2", "1/2 to 0.7", "0.7 to 1.4", "1.4 to 2", "2 to 4", "above 4")
# Background of each class, a blend of the figures' blue and vermillion with white; letters on the darkest are white.
COLORS = ("#0072b2", "#72b2d8", "#c9e2f1", None, "#fadcc5", "#f0a46c", "#d55e00")
COLUMNS = ("model", "position", "token", "sensitivity", "baseline", "ratio", "part")
UNITS = ("model", "positions", "text", "share of the squared sensitivity", "of the squared baseline", "ratio")
BLANK = " ⏎⇥"  # spaces, line ends and tabs, as tokens show them
KINDS: dict[str, tuple[str, ...]] = {
    "Words": tuple(BLANK),
    "Lines": ("⏎",),
    "Paragraphs": ("⏎⏎",),
    "Turns": (),  # of a chat
}  # what they stand behind
WIDEST = 60  # characters of a unit that are shown
ANSWER = "▶"  # before what the model wrote
MOST = 3  # tokens that an answer names
CAPTION = "The sensitivity{} to each token{}. Grey: sink and recency."
BESIDE = ", and what the baseline says of its position, scaled to it"


@dataclass(frozen=True)
class Options(options.Options):
    """Show a text in colour: how much the next-token prediction depends on each token, position's own part divided out.

    Writes inspect.nc, inspect.md (every token with its numbers; words, lines, paragraphs, turns of a chat), inspect.html
    (the text in colour, which a terminal shows as well) and the chart. Without a text an example is read.

    Examples:
      headwater inspect tiny-llama --prompt "def area(width, height): return width *"
      headwater inspect tiny-qwen2 --text notes.txt --baseline text --out runs/notes
      headwater inspect ./checkpoint --chat "Why is the sky blue?" --of top --method exact
      headwater inspect smollm2-135m --prompt "The capital of Italy is the city of" --of '" Rome"-" Paris"'
    """

    prompt: str | None = option("What the model reads.")
    text: Path | None = option("Instead: a file that holds it.")
    chat: str | None = options.chat()
    answer: int | None = option("Tokens that the model writes after it, and that are read as well.", min=1)
    of: str = option(
        "What depends on the tokens: prediction, logits, top (log p of the most probable), a token (an id, or its text "
        "in double quotes), or the difference of the logits of two, as in '1234-567' or '\" Paris\"-\" Rome\"'.",
        "prediction",
    )
    baseline: Literal["init", "kernel", "text", "none"] = option(
        "What is divided out: the architecture's bias at initialization; the random-matrix baseline of the weights; "
        "the model's mean profile over other texts; nothing.",
        "init",
    )
    method: Literal["exact", "sketch"] = option("All products, or few.", "sketch")
    products: int | None = option("Products of the sketch; 64 if not given.", max=MOST_PRODUCTS)
    seeds: int = option("Fresh models of the baseline init.", 3, max=MOST_SEEDS)
    initialization: str = options.initialization()
    first: str = options.first()
    seed: int = options.seed()

    def values(self) -> dict[str, Any]:
        """As `inspect` takes them, files read."""
        values = {name: value for name, value in vars(self).items() if name != "text"}
        values |= {"first": parse_first(self.first)}
        several = [f"--{name}" for name in ("prompt", "text", "chat") if getattr(self, name) is not None]
        if len(several) > 1:
            raise InputError(f"both {' and '.join(several)} are given; give one of --prompt, --text and --chat")
        if self.chat is not None:
            return values | {"chat": conversations(self.chat)}
        if self.text is not None:
            documents = read_documents(self.text)
            if len(documents) > 1:
                raise InputError(
                    f"'{self.text}' holds {len(documents)} texts, and one is inspected; give a file of that one"
                )
            return values | {"prompt": documents[0].text}
        return values | {"prompt": TEXT if self.prompt is None else self.prompt}


def outstanding(ds: xr.Dataset) -> np.ndarray:
    """Positions between sink and recency that have a ratio, the highest first."""
    ratio = ds["ratio"].values
    rest = np.flatnonzero((ds["part_of"].values == "rest") & ~np.isnan(ratio))
    return rest[np.argsort(-ratio[rest], kind="stable")]


def answer(results: Mapping[str, xr.Dataset]) -> list[str]:
    """What comes next, and which tokens stand out most."""
    lines = []
    for model, ds in results.items():
        tokens, ratio = ds["token"].values, ds["ratio"].values
        first = ", ".join(f"'{tokens[at]}' {number(ratio[at])}" for at in outstanding(ds)[:MOST])
        likely = zip(ds["next_token"].values, ds["probability"].values, strict=True)
        second = ", ".join(f"'{name}' {p:.1%}" for name, p in likely)
        of = f"what baseline {options_of(ds)['baseline']} gives their positions"
        against = "the geometric mean of their sensitivities" if _bare(ds) else of
        said = "" if _readout(ds) == "the prediction" else f"for {_readout(ds)}, "
        wrote = (
            f" The model wrote the last {plural(count, 'token')}." if (count := options_of(ds).get("answer")) else ""
        )
        where = f"{against} stand out most between sink and recency"
        lines.append(f"{model}: {said}{first} times {where}; next comes {second}.{wrote}")
    return lines


def tables(results: Mapping[str, xr.Dataset]) -> list[Table]:
    """Every token with its numbers, those that stand out most first; sink and recency at the end."""
    rows = []
    for model, ds in results.items():
        ahead = outstanding(ds)
        for at in (*ahead, *np.setdiff1d(np.arange(ds.sizes["position"]), ahead)):
            sensitivity, baseline, ratio = (number(ds[name][at]) for name in ("sensitivity", "baseline", "ratio"))
            token, part = (str(ds[name].values[at]) for name in ("token", "part_of"))
            rows.append([model, str(at), token, sensitivity, "-" if _bare(ds) else baseline, ratio, part])
    several = [
        Table(f"{kind}, the largest share first", UNITS, units)
        for kind in KINDS
        if len(units := [[model, *row] for model, ds in results.items() for row in _units(ds, kind)]) > len(results)
    ]
    return [Table("Tokens", COLUMNS, rows), *several]


def _units(ds: xr.Dataset, kind: str) -> list[list[str]]:
    """Words, lines, paragraphs or turns: squared sensitivities add up over tokens; the ratio is the root of sums' ratio."""
    tokens, text, starts = ds["token"].values.astype(str), "", [0]
    turns = [""] * len(tokens)
    if kind == "Turns":
        if "turn" not in ds.coords:
            return []
        turns = ds["turn"].values.astype(str)
    for at, token in enumerate(tokens):
        lead = text + token[: len(token) - len(token.lstrip(BLANK))]
        ends = lead.rstrip(" ⇥") if kind != "Words" else lead
        alone = at == 1 and ds.attrs.get("first_policy") in ("bos", "id")  # what was put first is no part of the text
        if at and (turns[at] != turns[at - 1] or alone or (token.strip(BLANK) and ends.endswith(KINDS[kind]))):
            starts.append(at)
        text += token
    squares = {name: np.square(np.nan_to_num(ds[name].values)) for name in ("sensitivity", "baseline")}
    sums = {name: np.add.reduceat(each, starts) for name, each in squares.items()}
    rows = []
    for n in np.argsort(-sums["sensitivity"], kind="stable"):
        here = slice(starts[n], [*starts, len(tokens)][n + 1])
        shares = [number(sums[name][n] / sums[name].sum(), ".1%") for name in sums]
        ratio = np.sqrt(sums["sensitivity"][n] / sums["baseline"][n]) if sums["baseline"][n] else np.nan
        said = f"{turns[here.start]}: ".removeprefix(": ") + "".join(tokens[here])
        said = said if len(said) <= WIDEST else f"{said[: WIDEST // 2]} ... {said[-WIDEST // 2 :]}"
        rows.append([f"{here.start}-{here.stop - 1}", said, *shares, number(ratio)])
    return rows


def color_of(ratio: float) -> tuple[str, str] | None:
    """Background and letters of a ratio; None where it is not coloured."""
    kind = len(EDGES) // 2 if math.isnan(ratio) else int(np.searchsorted(EDGES, ratio, side="right"))
    ground = COLORS[kind]
    return None if ground is None else (ground, "#ffffff" if kind in (0, len(COLORS) - 1) else "#000000")


def colored_text(ds: xr.Dataset) -> Text:
    """The text with its legend: tokens on colours, the sink in brackets, recency underlined, `ANSWER` before an answer."""
    shown, wrote = Text(), options_of(ds).get("answer")
    rows = zip(*(ds[name].values for name in ("token", "ratio", "part_of")), strict=True)
    for at, (piece, ratio, part) in enumerate(rows):
        shown.append(ANSWER * (wrote is not None and at == ds.sizes["position"] - wrote), "bold")
        ground, letters = color_of(float(ratio)) or (None, None)
        look = Style(bgcolor=ground, color=letters, bold=part == "sink", underline=part == "recency")
        shown.append("[" * (part == "sink"), Style(bold=True))
        *broken, last = str(piece).split("⏎")
        for line in broken:
            shown.append(f"{line}⏎", look).append("\n")
        shown.append(last, look)
        shown.append("]" * (part == "sink"), Style(bold=True))
    shown.append("\n\nratio ")
    for label, edge in zip(LABELS, (0.0, *EDGES), strict=True):
        ground, letters = color_of(edge) or (None, None)
        shown.append(f" {label} ", Style(bgcolor=ground, color=letters))
    shown.append("   ").append("[sink]", "bold").append("  ").append("recency", "underline")
    shown.append(f"  {ANSWER}" * bool(wrote), "bold").append(" what the model wrote" * bool(wrote)).append("\n")
    against = "than on the others" if _bare(ds) else "than its position alone would give"
    return shown.append(f"Orange: {_readout(ds)} depends more on the token {against}. Blue: less.")


def chart(results: Mapping[str, xr.Dataset]) -> Figure:
    """Sensitivity and baseline by position, sink and recency shaded."""

    def draw(cell: Axes, ds: xr.Dataset) -> None:
        series = [Series("sensitivity", ds["sensitivity"], TRAINED)]
        if not _bare(ds):
            series.append(Series("baseline", ds["baseline"], THEORY, line=DOTTED))
        curves(cell, series, log=True)
        for part in ("sink", "recency"):
            at = np.flatnonzero(ds["part_of"].values == part)
            cell.axvspan(at[0] - 0.5, at[-1] + 0.5, color=GREY, alpha=0.15, linewidth=0)
        cell.set_xlabel("position in the prompt")

    said = {_readout(ds) for ds in results.values()}
    of = f" of {said.pop()}" if len(said) == 1 else ""
    caption = CAPTION.format(of or " of what was asked for", "" if all(map(_bare, results.values())) else BESIDE)
    return panels(results, [Panel(f"sensitivity{of}", draw, height=2.8)], caption)


def _readout(ds: xr.Dataset) -> str:
    """What depends on the tokens, in words."""
    return str(ds.attrs.get("readout", "the prediction"))


def _baseline_share(ds: xr.Dataset) -> xr.DataArray:
    if _bare(ds):
        raise KeyError("baseline")
    return ds["baseline_share"]


def _bare(ds: xr.Dataset) -> bool:
    """Whether it was divided by nothing."""
    return options_of(ds)["baseline"] == "none"


MEASURE = Measure(
    name="inspect",
    question="Which tokens of a text matter to the prediction, once position is divided out?",
    compute=inspect,
    options=Options,
    headlines=(
        Headline("share of the squared sensitivity", lambda ds: ds["share"], form=".1%"),
        Headline("share of the squared baseline", _baseline_share, form=".1%"),
        Headline("entropy of the prediction (nats)", lambda ds: xr.DataArray(ds.attrs["entropy"])),
        Headline("rank correlation of ratio and position", lambda ds: xr.DataArray(ds.attrs["trend"]), form=".2f"),
    ),
    answer=answer,
    tables=tables,
    chart=chart,
    shown=colored_text,
    prompted=False,
    trials={"inspect": lambda model, tokens: inspect(model, TEXT, seeds=1, products=32)},
)
