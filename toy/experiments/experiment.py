"""What all experiments share: unfinished work, provenance, files, the table of published statements.

An experiment is one module, `toy.experiments.NAME` with underscores:

- `Settings`, a frozen dataclass (`checks.Settings`) whose defaults are the full setting, which is the source's where that
  gives one, and `QUICK`, settings that take about a minute on two cores;
- `measure(settings, work) -> xr.Dataset`, all that is trained or computed;
- `HEADLINES`, whose tables are the report's; from the result alone `claims(ds) -> list[Claim]`, its statements judged
  (`reading`), and `charts(ds) -> dict[str, Figure]`, by what follows the experiment's name in the file's.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import xarray as xr

from probes import charts
from probes.claims.claim import Claim, counted
from probes.errors import InputError, near
from probes.results.dataset import attributes, commands_in, made_with, replaced, save
from probes.results.tables import Report, Table, write_report
from probes.run.files import remove_cut_short, require_writable, together
from probes.run.hardware import hardware

from ..checks import changed, usable_device
from ..train import Run, Trained, forget, train
from .reading import tables_of

# In the order of the sources' figures.
EXPERIMENTS = (
    *("retrieval", "previous-token", "exchanges", "remarks", "position-bias", "rollout", "petroglyph", "births"),
)
SHOWN = 5  # statements that do not hold, at the end of a command
Advance = Callable[[str, float, float], None]  # (label, done, total)


@dataclass
class Work:
    """Where an experiment trains, and whom it tells how far it is."""

    device: torch.device
    folder: Path  # of unfinished work
    advance: Advance
    told: Callable[[str], None] = lambda line: None  # hears in one line what is there already
    spent: float = 0.0  # seconds of training: all that is in a result, interrupted calls included
    now: float = 0.0  # those of this call alone

    def train(self, label: str, runs: Sequence[Run], steps: int, **options: Any) -> list[Trained]:
        """`toy.train.train`, resumable under this label, its progress shown."""
        done, total = 0, float(len(runs) * steps)

        def count(more: int) -> None:
            nonlocal done
            done += more
            self.advance(label, float(done), total)

        began = time.monotonic()
        folder = self.folder / label.replace(" ", "-")
        trained = train(runs, steps, device=self.device, folder=folder, advance=count, **options)
        self.now += time.monotonic() - began
        self.spent += sum(model.seconds for model in trained)
        return trained


def experiment(name: str) -> Any:
    """The module of an experiment."""
    if name not in EXPERIMENTS:
        raise InputError(
            f"there is no experiment '{name}'{near(name, EXPERIMENTS)}; give one of {', '.join(EXPERIMENTS)}, or all"
        )
    return import_module(f"toy.experiments.{name.replace('-', '_')}")


def draw(name: str, ds: xr.Dataset, path: Path) -> list[Path]:
    """Draw an experiment's figures; the files written. Raises as `experiment`."""
    figures = {path.with_name(path.name + end): figure for end, figure in experiment(name).charts(ds).items()}
    return [file for base, figure in figures.items() for file in charts.save(figure, base)]


def settings_of(name: str, *, quick: bool, given: Sequence[str] = ()) -> Any:
    """An experiment's settings: full or quick ones, with changes given as "field=value" (lists as "2,4")."""
    module = experiment(name)
    return changed(module.QUICK if quick else module.Settings(), given, name)


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
    for line in replaced([out / f"{name}.nc"]):
        told(line)
    began = time.monotonic()
    ds = module.measure(settings, work)
    provenance = {
        "experiment": name,
        "quick": int(quick),
        "settings": asdict(settings),
        "published_settings": asdict(module.Settings()),
        "device": str(where),
        "hardware": hardware(where),
        "seconds": round(time.monotonic() - began - work.now + work.spent, 1),
        "dtype": "float32",
    }
    ds.attrs = attributes(provenance | made_with() | dict(ds.attrs))
    with together():
        save(ds, out / f"{name}.nc")
        written = [out / f"{name}.nc", *draw(name, ds, out / name), out / f"{name}.md"]
        report = report_of(name, ds)
        write_report(report, out / f"{name}.md", str(ds.attrs["command"]))
    for folder in (*work.folder.glob("*"), work.folder):
        forget(folder)
    remove_cut_short(out, name)
    return ds, report, written


def report_of(name: str, ds: xr.Dataset) -> Report:
    """A result's numbers and the table of published statements about it, from the result alone."""
    module = experiment(name)
    rows = [[c.source, c.claim, c.measured, c.verdict] for c in module.claims(ds)]
    title = "Published statements; brackets hold 95 % intervals over runs"
    table = Table(title, ("source", "published", "measured", "verdict"), rows)
    return Report(f"headwater toy {name}", extent(ds), [*tables_of(module.HEADLINES, ds), table], [])


def claims_of(name: str, ds: xr.Dataset) -> list[Claim]:
    """The published statements as rows of the table of all claims: with what they were measured on, and the command.

    What the result does not measure has the command of the full run.
    """
    seeds, command = ds.sizes.get("seed", 1), str(ds.attrs.get("command", ""))
    up_to = "up to " * (len(commands_in(command)) > 1)  # settings that several commands trained may have fewer seeds
    model = f"{ds.attrs.get('models', 'toys')}, {up_to}{seeds} seed{'s' if seeds > 1 else ''}, {_kind(ds).lower()}"
    full = f"headwater toy {name} --out runs/toy"
    return [
        replace(c, model=model, command=full if c.verdict == "not measured" else c.command or command or full)
        for c in experiment(name).claims(ds)
    ]


def summary(name: str, ds: xr.Dataset) -> list[str]:
    """What becomes of the statements, in a few lines: how many have which verdict, and some of those that do not hold."""
    claims = experiment(name).claims(ds)
    refuted = [f"does not hold: {claim.claim}" for claim in claims if claim.verdict == "does not hold"]
    more = [f"... and {len(refuted) - SHOWN} more"] if len(refuted) > SHOWN else []
    return [f"{name}: {len(claims)} statements, {counted(claims)}", *refuted[:SHOWN], *more]


def extent(ds: xr.Dataset) -> str:
    """How large a run was, against the full setting, on what and how long: a report's first lines."""
    settings, full = (json.loads(ds.attrs[name]) for name in ("settings", "published_settings"))
    less = [
        f"{name.replace('_', ' ')} {_shown(value)} (full: {_shown(full.get(name))})"
        for name, value in settings.items()
        if value != full.get(name)
    ]
    measured = f"{ds.attrs['hardware']}, {float(ds.attrs['seconds']) / 60:.3g} min, torch {ds.attrs['torch']}"
    return f"{': '.join(filter(None, (_kind(ds), '; '.join(less))))}. {measured}."


def _kind(ds: xr.Dataset) -> str:
    if ds.attrs["settings"] == ds.attrs["published_settings"]:
        return "Full run"
    return "Quick run" if ds.attrs["quick"] else "Part of the full run"


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
