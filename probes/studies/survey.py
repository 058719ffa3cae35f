"""The study behind `headwater sinks`, `trajectory`, `leakage` and `bos-swap`: one probe on models, kept unit by unit.

A unit is a model, or a model with one replacement at position 0. What each probe needs of this module is in `PROBES`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import xarray as xr
from torch import Tensor

from ..data.prompts import FirstToken
from ..errors import InputError
from ..figures.bos import bos_figure
from ..figures.leakage import leakage_figure
from ..figures.sinks import sinks_figure
from ..figures.trajectory import trajectory_figure
from ..measures.bos_swap import bos_swap, state
from ..measures.effect import passes_in_all
from ..measures.leakage import leakage
from ..measures.sinks import sinks
from ..measures.trajectory import trajectory
from ..models.load import Backend, DType
from ..models.view import View
from ..results.dataset import options_of
from ..results.tables import Report, write_report
from ..run.progress import Advance
from .plan import PASSES, operations, plan
from .plan import PROBES as PLANNED
from .plan import Name as Planned
from .reports import bos_report, leakage_report, sinks_report, trajectory_report
from .runner import Loading, Results, Study, Subject, Tell, Unit, Untouched, run, write_results

Name: TypeAlias = Literal["sinks", "trajectory", "leakage", "bos-swap"]


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
    "sinks": Probe("sinks", sinks, sinks_figure, sinks_report, resamples=True),
    "trajectory": Probe("trajectory", trajectory, trajectory_figure, trajectory_report),
    "leakage": Probe("leakage", leakage, leakage_figure, leakage_report, resamples=True),
    "bos-swap": Probe(
        "bos-swap", bos_swap, bos_figure, bos_report, along="replacement", shared=("before", state), resamples=True
    ),
}


def survey(
    sources: Sequence[str],
    out: str | Path,
    probe: Name | Probe,
    *,
    options: Mapping[str, Any] | None = None,
    reporting: Mapping[str, Any] | None = None,
    prompts: int = 32,
    length: int = 256,
    text: str | None = None,
    dataset: str | None = None,
    split: str = "train",
    column: str = "text",
    chat: str | None = None,
    first: FirstToken | int = "auto",
    seed: int = 0,
    backend: Backend = "transformers",
    device: str = "auto",
    dtype: DType = "auto",
    split_over: Mapping[str, Any] | None = None,
    advance: Advance | None = None,
    told: Callable[[str], object] | None = None,
    write: Callable[[Results], object] | None = None,
) -> Results:
    """Run one probe on every model, write results, figure and table, return the results by model name.

    Writes `NAME.nc` for one model or `NAME-MODEL.nc` for each of several, `NAME.png`, `NAME.svg` and `NAME.md`, all of it at
    the end. Units of an interrupted survey are read from `unfinished` in the same folder.

    Args:
        sources: models, as `probes.load` takes them.
        out: folder.
        probe: its name, or a `Probe` of one's own.
        options: of the probe, beside `progress`. "bos-swap" takes several replacements as a list; its results then have
            the leading dimension `replacement`, text, in that order.
        reporting: options of the table: `top` heads, for "sinks".
        prompts: windows of text; the arguments up to `seed` are those of `probes.prompts`.
        length: positions per prompt.
        backend: who runs the models; as `device` and `dtype`, see `probes.load`.
        split_over: `device_map`, `max_memory`, `offload_folder` of `probes.load`, for models larger than one device.
        advance: hears (what is running, done, in all).
        told: hears in one line which units are there already, and for every model what it will take.
        write: writes the results instead, in one process; neither figure nor table is made.

    Raises:
        InputError: bad input, found before anything is measured, or an unfinished survey with other settings in `out`.
    """
    out, options = Path(out), dict(options or {})
    chosen = PROBES[probe] if isinstance(probe, str) else probe
    split_up = _units(chosen, options)
    source = dict(text=text, dataset=dataset, split=split, column=column, chat=chat, first=first, seed=seed)

    def check(model: View, name: str, tokens: Tensor) -> None:
        for given in split_up.values():
            with suppress(Untouched.Reached):
                chosen.measure(Untouched(model), tokens, **given)

    def label(model: str, value: str) -> str:
        return " ".join(word for word in (model, chosen.name, value) if word)

    def units(model: View, name: str, tokens: Tensor) -> list[Unit]:
        common: dict[str, Any] = {}  # what the units share, measured with the first of them that is missing

        def unit(value: str, given: Mapping[str, Any]) -> Unit:
            def measure(model: View, subject: Subject, tell: Tell) -> xr.Dataset:
                resampled = {"documents": subject.drawn.documents} if chosen.resamples else {}
                if chosen.shared is not None and len(split_up) > 1 and not common:
                    called, make = chosen.shared
                    own = {option: x for option, x in given.items() if option != chosen.along}
                    common[called] = make(
                        model, subject.tokens, progress=partial(tell, part=called), **own, **resampled
                    )
                return chosen.measure(model, subject.tokens, progress=tell, **given, **resampled, **common)

            key = {"prompts": prompts, "length": length, **source, **given}
            return Unit(label(name, value), key, measure, _size(chosen, model, tokens, given))

        return [unit(value, given) for value, given in split_up.items()]

    def parts(left: Mapping[str, float]) -> dict[str, float]:
        if chosen.shared is None or len(split_up) == 1:
            return {}
        labels = [[at for value in split_up if (at := label(name, value)) in left] for name in names]
        return {f"{own[0]} {chosen.shared[0]}": left[own[0]] for own in labels if own}  # about as large as a unit

    def joined(model: View, units: Sequence[xr.Dataset]) -> xr.Dataset:
        return units[0] if len(units) == 1 else _joined(str(chosen.along), list(split_up), units)

    def line(model: View, one: Subject) -> str:
        given, name = next(iter(split_up.values())), cast(Planned, chosen.name)
        return plan(model, len(one.tokens), one.tokens.shape[1], name, **given).line(one.name)

    def write_all(results: Results) -> None:
        write_results(results, out, chosen.name, chosen.figure)
        write_report(chosen.report(results, **(reporting or {})), out / f"{chosen.name}.md")

    names: list[str] = []
    study = Study(
        chosen.name,
        units,
        write or write_all,
        check=check,
        joined=joined,
        line=line if chosen.name in PLANNED else None,
        parts=parts,
        prepare=lambda models: names.extend(one.name for one in models),
        files=[f"{chosen.name}.md"],
    )
    asked = {"n": prompts, "length": length, **source}
    return run(study, sources, out, asked, Loading(backend, device, dtype, split_over), advance=advance, told=told)


def _size(probe: Probe, model: View, tokens: Tensor, options: Mapping[str, Any]) -> float:
    passes = len(tokens) * PASSES.get(probe.name, 1.0)
    if probe.name == "sinks":
        passes += passes_in_all(model, len(tokens), **options)
    return passes * operations(model, tokens.shape[1])


def _units(probe: Probe, options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Options of every unit by what tells it from the model's others: "" where there is one unit per model."""
    if probe.along is None or probe.along not in options:
        return {"": dict(options)}
    values = options[probe.along]
    values = list(values) if isinstance(values, (list, tuple)) else [values]
    names = [str(value) for value in values]
    if not names or len(set(names)) < len(names):
        raise InputError(f"{probe.along} '{','.join(names)}' names none or one twice; give each once")
    return {name: {**options, probe.along: value} for name, value in zip(names, values, strict=True)}


def _joined(dim: str, names: Sequence[str], units: Sequence[xr.Dataset]) -> xr.Dataset:
    """Units along a leading dimension; prompts, which they share, stay as they are."""
    first = units[0]
    plain = [ds.drop_vars(["tokens", dim], errors="ignore").drop_attrs(deep=False) for ds in units]
    joined = xr.concat(plain, xr.Variable((dim,), list(names)), data_vars="all", coords="minimal", compat="equals")
    joined = joined.assign_coords({dim: list(names)})
    if "tokens" in first:
        joined["tokens"] = first["tokens"]
    options = options_of(first)
    options[dim] = list(names)
    attrs = {name: value for name, value in first.attrs.items() if name != dim}
    return joined.assign_attrs(attrs | {"options": json.dumps(options)})
