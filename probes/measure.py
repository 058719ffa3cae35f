"""What a measure is: one object at the end of its file, from which command, table, figure, comparison and page follow.

A measure is a module `probes/measures/NAME.py` (or a folder of that name) that ends with `MEASURE = Measure(...)`. The
registry is that folder: a new file is a new command, a new section of the page, a new row of the self-test. Modules are
found by their text and imported when they are asked for, so that `headwater --help` stays quick.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import InputError

if TYPE_CHECKING:
    import numpy as np
    import xarray as xr
    from matplotlib.figure import Figure
    from rich.text import Text
    from torch import Tensor

    from .models.view import View
    from .results.tables import Table

FOLDER = Path(__file__).parent / "measures"
QUESTION = re.compile(r'^    question="(.+)",$', re.MULTILINE)


@dataclass(frozen=True)
class Headline:
    """One number of a result: what tables, comparison, page, README and statements read.

    Args:
        name: in words.
        of: of a result, an array over any places [*where], which are told apart by their coordinates. With a dimension
            `estimate` it brings its own interval. With a dimension `prompt` it holds values by prompt: the number is their
            mean, the interval is jackknifed over documents. With neither there is no interval.
        mean: the number, of values [prompt, *where, ...] of any choice of prompts, as an array [*where]; the mean over
            prompts if not given.
        by_prompt: values by prompt for a comparison, where `of` brings an interval of its own.
        ratio: a positive size, which is compared by its ratio.
        jumps: it jumps from one prompt to the next, as a place does: its interval is bootstrapped.
        form: how it is written.
    """

    name: str
    of: Callable[[xr.Dataset], xr.DataArray]
    mean: Callable[[np.ndarray], np.ndarray] | None = None
    by_prompt: Callable[[xr.Dataset], xr.DataArray] | None = None
    ratio: bool = False
    jumps: bool = False
    form: str = ".3g"


@dataclass(frozen=True)
class Unit:
    """What is measured of a model in one go, and kept until all is done; most measures have one unit.

    `options` are those of the measure's function, `weights` makes the model that is measured of the one that was loaded.
    """

    label: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    weights: Callable[[View], View] | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Measure:
    """What can be measured of a model.

    Args:
        name: of the command, the files and the folder of a report.
        question: what it answers.
        compute: `compute(model, tokens, **options)`; also gets those of `documents`, `pieces`, `progress` and `seed` that
            it takes.
        options: a dataclass, the command's options (`probes.options`); its docstring is the command's help.
        headlines: its numbers.
        answer: of results by model, a sentence for each that answers the question.
        chart: of results by model, with a caption of two lines at most.
        tables: of results by model, sorted by what the reader came for.
        shown: of one result, what a terminal with colours shows of it beside numbers.
        units: of the options' values, what is measured in one go each.
        joined: one result of a model's units, and the model.
        prompted: whether it measures prompts that are drawn from a text.
        defaults, without: options of all commands that have another default here, or are not offered.
        trials: by name, calls that touch all of it on a small model: for the self-test.
    """

    name: str
    question: str
    compute: Callable[..., xr.Dataset]
    options: type
    headlines: Sequence[Headline]
    answer: Callable[[Mapping[str, xr.Dataset]], list[str]]
    chart: Callable[[Mapping[str, xr.Dataset]], Figure]
    tables: Callable[[Mapping[str, xr.Dataset]], list[Table]] = lambda results: []
    shown: Callable[[xr.Dataset], Text] | None = None
    units: Callable[[Mapping[str, Any]], Sequence[Unit]] = lambda values: [Unit(options=values)]
    joined: Callable[[Sequence[xr.Dataset], View], xr.Dataset] = lambda results, model: results[0]
    prompted: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict)
    without: Collection[str] = ()
    trials: Mapping[str, Callable[[View, Tensor], xr.Dataset]] = field(default_factory=dict)


@cache
def questions() -> dict[str, str]:
    """What each measure answers, by its name, in alphabetical order; nothing is imported."""
    texts = {
        path.parent.name if path.name == "__init__.py" else path.stem: path.read_text(encoding="utf-8")
        for path in (*FOLDER.glob("*.py"), *FOLDER.glob("*/__init__.py"))
    }
    asked = {name: QUESTION.findall(text) for name, text in sorted(texts.items()) if "\nMEASURE = " in text}
    for name in (name for name, found in asked.items() if not found):
        raise ValueError(f'{FOLDER / name}: write the question as one line, question="...", as other measures do')
    return {name.replace("_", "-"): found[0] for name, found in asked.items()}


def measure(name: str) -> Measure:
    """The measure of a name."""
    if name not in questions():
        raise InputError(f"there is no measure '{name}'; give one of {', '.join(questions())}")
    return import_module(f"probes.measures.{name.replace('-', '_')}").MEASURE


def measure_of(ds: xr.Dataset) -> Measure | None:
    """The measure that made a result; None where it is none of them. Texts measured alone are refused."""
    from .results.dataset import check_prompts, options_of

    check_prompts(ds)
    command = str(ds.attrs.get("command", "")).split()[1:2]  # of results that name nothing else
    name = str(ds.attrs.get("measure", options_of(ds).get("measurement", "".join(command)))).replace("_", "-")
    return measure(name) if name in questions() else None


def chart(results: xr.Dataset | Mapping[str, xr.Dataset], *, path: str | Path | None = None) -> Figure:
    """The chart of a result, or of several of one measure by their model's name; saved as PNG and SVG if there is a path.

    Raises:
        InputError: no results, or one that no measure made.
    """
    from .charts import save
    from .results.dataset import by_name

    named = by_name(results)
    found = [measure_of(ds) for ds in named.values()]
    if not found or found[0] is None or any(one is not found[0] for one in found):
        raise InputError("no results of one measure to draw; give what a measure returned, or several by name")
    figure = found[0].chart(named)
    if path is not None:
        save(figure, path)
    return figure
