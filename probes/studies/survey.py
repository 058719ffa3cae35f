"""The study behind `headwater bos-swap`: one probe on models, unit by unit.

A unit is a model, or a model with one replacement at position 0. What each probe needs of this module is in `PROBES`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import xarray as xr
from torch import Tensor

from ..errors import InputError
from ..figures.bos import bos_figure
from ..measures import bos_swap
from ..models.view import View
from ..results.dataset import options_of
from ..results.tables import Report, write_report
from ..run.progress import Advance
from ..run.store import Store
from .bos_report import bos_report
from .runner import Given, Results, Study, Subject, Tell, Told, Unit, Untouched, run, write_results

Name: TypeAlias = Literal["bos-swap"]


@dataclass(frozen=True)
class Probe:
    """What can be surveyed: `measure(model, tokens, progress=..., **options)`, its figure and its report."""

    name: str  # of the files
    measure: Callable[..., xr.Dataset]
    figure: Callable[..., Any]
    report: Callable[..., Report]  # of results by model, with options of its own
    along: str | None = None  # an option that may have several values: a unit each, and a dimension of the result
    # What those units have in common, measured once per model: an option of `measure` and the function that makes it, which
    # takes the same arguments but for `along`.
    shared: tuple[str, Callable[..., Any]] | None = None
    resamples: bool = False  # whether it takes `documents`, to resample them


PROBES: dict[str, Probe] = {
    "bos-swap": Probe(
        "bos-swap",
        bos_swap.bos_swap,
        bos_figure,
        bos_report,
        along="replacement",
        shared=("before", bos_swap.state),
        resamples=True,
    ),
}


def survey(
    sources: Sequence[str],
    out: str | Path,
    probe: Name | Probe,
    *,
    options: Mapping[str, Any] | None = None,
    reporting: Mapping[str, Any] | None = None,
    advance: Advance | None = None,
    told: Told | None = None,
    write: Callable[[Results], object] | None = None,
    **given: Any,
) -> Results:
    """Run one probe on every model, write results, figure and table, return the results by model name.

    Writes `NAME.nc` for one model or `NAME-MODEL.nc` for each of several, `NAME.png`, `NAME.svg`, `NAME.md` and the probe's
    further files, all of it at the end. Units of an interrupted survey are read from `unfinished` in the same folder.

    Args:
        sources: models, as `probes.load` takes them.
        out: folder.
        probe: its name, or a `Probe` of one's own.
        options: of the probe, beside `progress`. "bos-swap" takes several replacements as a list; its results then have
            the leading dimension `replacement`, text, in that order.
        reporting: options of the table: `top` heads, `layers` and `heads`, for "sinks".
        advance: hears (what is running, done, in all).
        told: hears in one line which units are there already, and for every model what it will take.
        write: writes the results instead, in one process; neither figure nor table is made.
        given: fields of `Given`: which prompts, and how models are loaded.

    Raises:
        InputError: bad input, found before anything is measured.
    """
    out, asked = Path(out), Given(**given)
    chosen = PROBES[probe] if isinstance(probe, str) else probe
    split_up = _units(chosen, dict(options or {}))

    def check(model: View, name: str, tokens: Tensor) -> None:
        for own in split_up.values():
            with suppress(Untouched.Reached):
                chosen.measure(Untouched(model), tokens, **own)

    def units(model: View, name: str, tokens: Tensor) -> list[Unit]:
        common: dict[str, Any] = {}  # what the units share, measured with the first of them that is missing

        def measure(own: Mapping[str, Any], model: View, subject: Subject, tell: Tell, pieces: Store) -> xr.Dataset:
            resampled: dict[str, Any] = {"documents": subject.drawn.documents} if chosen.resamples else {}
            resampled["pieces"] = pieces
            if chosen.shared is not None and len(split_up) > 1 and not common:
                called, make = chosen.shared
                alike = {option: x for option, x in own.items() if option != chosen.along}
                common[called] = make(model, subject.tokens, progress=partial(tell, part=called), **alike, **resampled)
            return chosen.measure(model, subject.tokens, progress=tell, **own, **resampled, **common)

        return [
            Unit(f"{name} {chosen.name} {value}".rstrip(), {"seed": asked.seed, **own}, partial(measure, own))
            for value, own in split_up.items()
        ]

    def write_all(results: Results) -> None:
        write_results(results, out, chosen.name, chosen.figure)
        write_report(chosen.report(results, **(reporting or {})), out / f"{chosen.name}.md")

    study = Study(
        chosen.name,
        units,
        write or write_all,
        check=check,
        joined=lambda model, units: units[0] if len(units) == 1 else _joined(str(chosen.along), list(split_up), units),
        files=[f"{chosen.name}.md"],
    )
    return run(study, sources, out, asked, asked.loading(), advance=advance, told=told)


def _units(probe: Probe, options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Options of every unit by what tells it from the model's others: "" where there is one unit per model."""
    if probe.along is None or probe.along not in options:
        return {"": options}
    values = options[probe.along]
    values = list(values) if isinstance(values, (list, tuple)) else [values]
    names = [str(value) for value in values]
    if not names:
        raise InputError(f"{probe.along} names none; give one or more")
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"{probe.along} '{twice[0]}' is named twice; give each once")
    return {name: {**options, probe.along: value} for name, value in zip(names, values, strict=True)}


def _joined(dim: str, names: Sequence[str], units: Sequence[xr.Dataset]) -> xr.Dataset:
    """Units along a leading dimension; prompts, which they share, stay as they are."""
    first = units[0]
    plain = [ds.drop_vars(["tokens", dim], errors="ignore").drop_attrs(deep=False) for ds in units]
    joined = xr.concat(plain, xr.Variable((dim,), list(names)), data_vars="all", coords="minimal", compat="equals")
    joined = joined.assign_coords({dim: list(names)})
    if "tokens" in first:
        joined["tokens"] = first["tokens"]
    attrs = {name: value for name, value in first.attrs.items() if name != dim}
    return joined.assign_attrs(attrs | {"options": json.dumps(options_of(first) | {dim: list(names)})})
