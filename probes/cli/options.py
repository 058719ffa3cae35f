"""Options that several commands of `headwater` share, and how their values are read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ..errors import InputError

Out = Annotated[Path, typer.Option(help="Folder for results, figure and table; unfinished work there is continued.")]
OneDevice = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: cuda if there is one.")]


def steps(text: str) -> tuple[int, ...]:
    """Steps in a list, as in "0,100".

    Raises:
        InputError: something else.
    """
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise InputError(f"keep-steps '{text}' is not a list of steps; give whole numbers, as in 0,100") from None
