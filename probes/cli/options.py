"""The options that several commands of `headwater` share, each declared once, and how their values are read.

A dataclass is a group of options: a command that takes one has an option for each field (`probes.cli.command`). A new
field of `Source` or `Running` is a new option of every command that measures models.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..errors import InputError
from ..models.initialization import PUBLISHED
from ..options import MOST_RESAMPLES, Loading, Prompts

Out = Annotated[Path, typer.Option(help="Folder for results, figure and table; unfinished work there is continued.")]
Initialization = Annotated[
    str,
    typer.Option(
        metavar="RULE",
        help="What fresh weights are drawn from: config, one deviation for all matrices (0.02, 1/24), or a published rule: "
        f"{', '.join(PUBLISHED)}.",
    ),
]
Bootstrap = Annotated[
    int, typer.Option(max=MOST_RESAMPLES, help="Resamples of the prompts for the intervals; 0 for none.")
]
OneDevice = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: cuda if there is one.")]


@dataclass(frozen=True)
class Source(Prompts):
    """`Prompts`, as studies take them."""

    def values(self) -> dict[str, Any]:
        """As `Options.values`, with the file's name as text and `first` read."""
        from ..data.prompts import parse_first

        text = None if self.text is None else str(self.text)
        return vars(self) | {"text": text, "first": parse_first(self.first)}


@dataclass(frozen=True)
class Running(Loading):
    """`Loading`, as studies take it."""

    def values(self) -> dict[str, Any]:
        """As `Options.values`, with `split_over` for models larger than one device, and `ablate` read.

        Raises:
            InputError: as `Loading.values` and `Loading.heads` do.
        """
        chosen, heads = super().values(), self.heads()
        spread = {name: chosen.pop(name) for name in ("device_map", "max_memory", "offload_folder") if name in chosen}
        if heads is not None:
            chosen["ablate"] = heads, {"zero": "zero", "from-0": "from position 0"}[self.ablate_how]
        return chosen | ({"split_over": spread} if spread else {})


def numbers(text: str | None, name: str) -> frozenset[int] | None:
    """Numbers and ranges of them, ends included, as in "3-7" or "0,4"; None for none given.

    Raises:
        InputError: something else.
    """
    from ..data.positions import read_ranges

    if text is None:
        return None
    ranges = read_ranges(text, name, "3-7 or 0,4")
    return frozenset(one for first, last in ranges for one in range(first, last + 1))


def steps(text: str) -> tuple[int, ...]:
    """Steps in a list, as in "0,100".

    Raises:
        InputError: something else.
    """
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise InputError(f"keep-steps '{text}' is not a list of steps; give whole numbers, as in 0,100") from None
