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
from typing import Any, Literal, TypeAlias

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
from ..run import processes
from ..run.files import together
from ..run.progress import Advance, announce
from .plan import PASSES, operations, plan
from .plan import PROBES as PLANNED
from .reports import bos_report, leakage_report, sinks_report, trajectory_report
from .runs import Loading, Subject, Untouched, require_free, subjects, write_results, written_files
from .unfinished import kept_units, measured_on

Name: TypeAlias = Literal["sinks", "trajectory", "leakage", "bos-swap"]
Results: TypeAlias = dict[str, xr.Dataset]


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
    unfinished = kept_units(out, chosen.name)
    split_up = _units(chosen, options)
    sizes: dict[str, float] = {}
    source: dict[str, Any] = {
        "text": text,
        "dataset": dataset,
        "split": split,
        "column": column,
        "chat": chat,
        "first": first,
        "seed": seed,
    }
    choosing = {"prompts": prompts, "length": length, **source}

    def label(model: str, value: str) -> str:
        return " ".join(word for word in (model, chosen.name, value) if word)

    def key(model: View, tokens: Tensor, given: Mapping[str, Any]) -> dict[str, Any]:
        return measured_on(model, tokens) | choosing | dict(given)

    def check(model: View, name: str, tokens: Tensor) -> None:
        for value, given in split_up.items():
            with suppress(Untouched.Reached):
                chosen.measure(Untouched(model), tokens, **given)
            if unfinished.has(label(name, value)):
                unfinished.check(label(name, value), key(model, tokens, given))
            passes = len(tokens) * PASSES.get(chosen.name, 1.0)
            if chosen.name == "sinks":
                passes += passes_in_all(model, len(tokens), **given)
            sizes[label(name, value)] = passes * operations(model, tokens.shape[1])

    asked = {"n": prompts, "length": length, **source}
    models = subjects(sources, Loading(backend, device, dtype, split_over), asked, check, told)
    require_free(written_files([one.name for one in models], out, chosen.name, f"{chosen.name}.md"))
    found = unfinished.going_on([label(one.name, value) for one in models for value in split_up])
    if told is not None and found is not None:
        told(found)
    left = {name: size for name, size in sizes.items() if not unfinished.done(name)}
    if chosen.shared is not None and len(split_up) > 1:  # measured with the first unit of a model, and about as large
        firsts = [next((at for v in split_up if (at := label(one.name, v)) in left), None) for one in models]
        left |= {f"{at} {chosen.shared[0]}": left[at] for at in firsts if at is not None}
    announce(advance, left)
    results: Results = {}
    for one in models:
        model, units = one.model(), []
        missing = any(label(one.name, value) in left for value in split_up)
        if told is not None and missing and chosen.name in PLANNED:
            asked = next(iter(split_up.values()))
            told(plan(model, len(one.tokens), one.tokens.shape[1], chosen.name, **asked).line(one.name))
        common: dict[str, Any] = {}
        for value, given in split_up.items():
            running = label(one.name, value)

            def measure(
                model: View = model,
                tokens: Tensor = one.tokens,
                given: Mapping[str, Any] = given,
                running: str = running,
                common: dict[str, Any] = common,
                subject: Subject = one,
                resampled: Mapping[str, Any] = {"documents": one.drawn.documents} if chosen.resamples else {},
            ) -> xr.Dataset:
                def progress(done: float | int, total: float | int, running: str = running) -> None:
                    if advance is not None:
                        advance(running, float(done), float(total))

                if chosen.shared is not None and len(split_up) > 1 and not common:
                    name, make = chosen.shared
                    own = {option: x for option, x in given.items() if option != chosen.along}
                    told_of = partial(progress, running=f"{running} {name}")
                    common[name] = make(model, tokens, progress=told_of, **own, **resampled)
                made = chosen.measure(model, tokens, progress=progress, **given, **resampled, **common)
                return subject.described(made)

            units.append(unfinished.unit(running, key(model, one.tokens, given), measure, advance=advance))
        results[one.name] = units[0] if len(units) == 1 else _joined(str(chosen.along), list(split_up), units)
    if processes.first():
        with together():
            if write is None:
                write_results(results, out, chosen.name, chosen.figure)
                write_report(chosen.report(results, **(reporting or {})), out / f"{chosen.name}.md")
            else:
                write(results)
    unfinished.clear()
    return results


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
