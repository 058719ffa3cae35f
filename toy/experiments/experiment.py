"""What all experiments share: settings, unfinished work, provenance, files, the table of published statements.

An experiment is three modules of one name, with underscores:

- `toy.experiments.NAME`: `Settings`, a frozen dataclass whose defaults are the published setting; `QUICK`, settings that
  take about a minute on two cores; and `measure(settings, work) -> xr.Dataset`, all that is trained or computed;
- `toy.experiments.NAME_claims`: `tables(ds) -> list[Table]`, the numbers, and `claims(ds) -> list[Claim]`, the statements of
  `NAME.toml` judged by rules over intervals over runs (`claims_of` adds on what they were measured, and the command);
- `toy.figures.NAME`: `draw(ds, path) -> list[Path]`, the figures.

The last two use the result alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
import xarray as xr

from probes.claims.claim import Claim
from probes.errors import InputError
from probes.results.dataset import attributes, commands_in, made_with, save
from probes.results.tables import Report, Table, write_report
from probes.run.files import remove_cut_short, require_writable, together
from probes.run.hardware import hardware

from ..checks import usable_device
from ..train import Run, Trained, forget, train

# In the order of the sources' figures.
EXPERIMENTS = (
    "retrieval",
    "previous-token",
    "exchanges",
    "remarks",
    "position-bias",
    "rollout",
    "petroglyph",
    "births",
)
# Theorems, an exact statement and an open question: their sources train nothing.
OWN_SETTINGS = ("rollout", "petroglyph", "births")
NAMED = 3  # settings that differ, in a caption; more are in the report
KINDS: dict[Any, str] = {int: "a whole number", float: "a number like 0.5", bool: "yes or no"}
LISTS: dict[Any, str] = {int: "whole numbers like 2,4", float: "numbers like 0.5,1", bool: "no,yes"}
Advance = Callable[[str, float, float], None]  # (label, done, total)


@dataclass
class Clock:
    """Seconds of training: all that is in a result, interrupted calls included, and those of this call alone."""

    spent: float = 0.0
    now: float = 0.0


@dataclass
class Work:
    """Where an experiment trains, and whom it tells how far it is."""

    device: torch.device
    folder: Path  # of unfinished work
    advance: Advance
    told: Callable[[str], None] = lambda line: None  # hears in one line what is there already
    clock: Clock = field(default_factory=Clock)  # shared with copies of this that tell their progress in another way

    def train(self, label: str, runs: Sequence[Run], steps: int, **options: Any) -> list[Trained]:
        """`toy.train.train`, resumable under this label, its progress shown."""
        done, total = 0, float(len(runs) * steps)

        def count(more: int) -> None:
            nonlocal done
            done += more
            self.advance(label, float(done), total)

        began = time.monotonic()
        folder = self.folder / label.replace(" ", "-")
        found = train(runs, steps, device=self.device, folder=folder, advance=count, **options)
        self.clock.now += time.monotonic() - began
        self.clock.spent += sum(one.seconds for one in found)
        return found


def experiment(name: str, part: str = "experiments.{}") -> Any:
    """The module that measures an experiment, or another part of it.

    Raises:
        InputError: there is none of that name.
    """
    if name not in EXPERIMENTS:
        near = "".join(f" (did you mean {one}?)" for one in get_close_matches(name, EXPERIMENTS, 1))
        raise InputError(f"there is no experiment '{name}'{near}; give one of {', '.join(EXPERIMENTS)}, or all")
    return import_module(f"toy.{part.format(name.replace('-', '_'))}")


def reading(name: str) -> Any:
    """The module with an experiment's tables and claims; raises as `experiment`."""
    return experiment(name, "experiments.{}_claims")


def draw(name: str, ds: xr.Dataset, path: Path) -> list[Path]:
    """Draw an experiment's figures; the files written. Raises as `experiment`."""
    return experiment(name, "figures.{}").draw(ds, path)


def settings_of(name: str, *, quick: bool, given: Sequence[str] = ()) -> Any:
    """An experiment's settings: published or quick ones, with changes given as "field=value" (lists as "2,4").

    Raises:
        InputError: no such experiment or field, a field given twice, or a value of another type.
    """
    module = experiment(name)
    return changed(module.QUICK if quick else module.Settings(), given, name)


def changed(settings: Any, given: Sequence[str], name: str) -> Any:
    """Settings with changes given as "field=value"; `name` is whose they are.

    Raises:
        InputError: no such field, a field given twice, or a value of another type.
    """
    types = get_type_hints(type(settings))
    changes = {}
    for text in given:
        key, _, value = text.partition("=")
        key = key.strip().replace("-", "_")
        if key in types and not value.strip():
            raise InputError(f"--with '{text}' has no value; give {key}=VALUE")
        if key not in types:
            known = [f.name for f in fields(settings)]
            near = "".join(f" (did you mean {one}?)" for one in get_close_matches(key, known, 1))
            raise InputError(
                f"--with '{text}': '{name}' has no setting '{key}'{near}; give FIELD=VALUE with one of {', '.join(known)}"
            )
        if key in changes:
            raise InputError(f"--with '{text}' gives {key} a second time; give each field once, lists as in 2,4")
        changes[key] = _read(text, value.strip(), types[key])
    return replace(settings, **changes)


def run(
    name: str,
    out: str | Path,
    *,
    quick: bool = False,
    given: Sequence[str] = (),
    device: str = "auto",
    advance: Advance = lambda label, done, total: None,
    told: Callable[[str], None] = lambda line: None,
) -> tuple[xr.Dataset, Report, list[Path]]:
    """Run one experiment and write NAME.nc, its figures and NAME.md with the table of published statements.

    Unfinished training is kept under `out` and taken up by the same call.

    Raises:
        InputError: bad settings, a device that is not there, a folder that cannot be written, other unfinished work there.
    """
    settings, module, out = settings_of(name, quick=quick, given=given), experiment(name), Path(out)
    require_writable(out)
    where = torch.device(usable_device(device))
    work = Work(where, out / f".unfinished-{name}", advance, told)
    if work.folder.is_dir():
        told(f"going on with the trainings in '{work.folder}'")
    began = time.monotonic()
    ds = module.measure(settings, work)
    made = {
        "experiment": name,
        "quick": int(quick),
        "settings": asdict(settings),
        "published_settings": asdict(module.Settings()),
        "device": str(where),
        "hardware": hardware(where),
        "seconds": round(time.monotonic() - began - work.clock.now + work.clock.spent, 1),
        "dtype": "float32",
    }
    ds.attrs = attributes(made | made_with() | dict(ds.attrs))
    with together():
        save(ds, out / f"{name}.nc")
        written = [out / f"{name}.nc", *draw(name, ds, out / name)]
        report = report_of(name, ds)
        write_report(report, out / f"{name}.md", str(ds.attrs["command"]))
    for folder in work.folder.glob("*"):
        forget(folder)
    forget(work.folder)
    remove_cut_short(out, name)
    return ds, report, [*written, out / f"{name}.md"]


def report_of(name: str, ds: xr.Dataset) -> Report:
    """A result's numbers and the table of published statements about it, from the result alone."""
    module = reading(name)
    rows = [[c.source, c.claim, c.measured, c.verdict] for c in module.claims(ds)]
    title = "Published statements; brackets hold 95 % intervals by Student's t over runs"
    table = Table(title, ("source", "published", "measured", "verdict"), rows)
    return Report(f"headwater toy {name}", extent(ds), [*module.tables(ds), table], [])


def claims_of(name: str, ds: xr.Dataset) -> list[Claim]:
    """The published statements as rows of the table of all claims: with what they were measured on, and the command.

    What the result does not measure has the command of the full run.

    Raises:
        InputError: there is no experiment of that name.
    """
    seeds = ds.sizes.get("seed", 1)
    parts = commands_in(str(ds.attrs.get("command", "")))  # settings that several trained may have fewer seeds
    seeds_told = f"{'up to ' * (len(parts) > 1)}{seeds} seed{'s' if seeds > 1 else ''}"
    model = f"{ds.attrs.get('models', 'toys')}, {seeds_told}, {_kind(ds).lower()}"
    full = f"headwater toy {name} --out runs/toy"
    made = str(ds.attrs.get("command", "")) or full
    return [
        replace(claim, model=model, command=full if claim.verdict == "not measured" else claim.command or made)
        for claim in reading(name).claims(ds)
    ]


def extent(ds: xr.Dataset, most: int | None = None) -> str:
    """How large a run was, against the published setting, on what and how long: a report's first lines.

    More settings than `most` that differ are only named.
    """
    less, whole = _reduced(ds), _whole(ds)
    details = "; ".join(less.values()) or (
        "the sources give no setting" if whole == "full" else "the published setting"
    )
    if most is not None and len(less) > most:
        details = f"{', '.join(less)} differ from the {whole} setting, see the table beside it"
    made = f"{ds.attrs['hardware']}, {_duration(float(ds.attrs['seconds']))}, torch {ds.attrs['torch']}"
    return f"{_kind(ds)}: {details}. {made}."


def in_short(ds: xr.Dataset) -> str:
    """`extent` for a figure's caption: many settings that differ are only named."""
    return extent(ds, NAMED)


def _reduced(ds: xr.Dataset) -> dict[str, str]:
    """The settings that differ from the published ones, by name: "seeds 3 (published: 5)"."""
    settings, full = json.loads(ds.attrs["settings"]), json.loads(ds.attrs["published_settings"])
    whole = _whole(ds)
    return {
        (said := name.replace("_", " ")): f"{said} {_shown(settings[name])} ({whole}: {_shown(full[name])})"
        for name in settings
        if settings[name] != full[name]
    }


def _whole(ds: xr.Dataset) -> str:
    return "full" if ds.attrs.get("experiment") in OWN_SETTINGS else "published"


def _kind(ds: xr.Dataset) -> str:
    if json.loads(ds.attrs["settings"]) == json.loads(ds.attrs["published_settings"]):
        return "Full run"
    return "Quick run" if ds.attrs["quick"] else "Part of the full run"


def _read(text: str, value: str, kind: Any) -> Any:
    """A field's value from text, by the field's type: int, float, str, bool or a tuple of one of them."""
    listed = get_args(kind) and get_args(kind)[-1] is ...
    try:
        if listed:
            return tuple(_one(part.strip(), get_args(kind)[0]) for part in value.removesuffix(",").split(","))
        return _one(value, kind)
    except (ValueError, KeyError, TypeError):
        asked = LISTS.get(get_args(kind)[0], "names like some,names") if listed else KINDS.get(kind, "a name")
        raise InputError(f"--with '{text}' cannot be read; give {asked}") from None


def _one(value: str, kind: Any) -> Any:
    if not value:
        raise ValueError("nothing between two commas")
    return {"yes": True, "no": False, "true": True, "false": False}[value.lower()] if kind is bool else kind(value)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(_shown, value)) if isinstance(value, list) else str(value)


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.1f} h"
