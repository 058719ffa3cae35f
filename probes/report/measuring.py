"""What `headwater report MODEL...` measures: a plain loop over models and studies, by the functions of the single commands.

Results lie under the report's folder, `KIND/FILE-MODEL.nc`, where `headwater report` without models looks for them, too.
A result that is there under the same key (options, weights, tokens, version) is kept; what an interrupted report had begun
is taken up. Models that came with earlier reports stay beside them.

The studies that take least come first. A quick report has studies that are shorter (`shortened`): its results say so by
their attribute `quick`, it keeps the full ones that are there, and a full report measures again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xarray as xr

from ..data.prompts import draw as drawn
from ..errors import InputError
from ..loop import run
from ..measure import measure as registered
from ..measures.jacobian import PRODUCTS
from ..models.initialization import CONFIG, Rule, check_rule
from ..models.view import View
from ..options import Prompts
from ..results.dataset import QUICK, save, tokens_hash
from ..results.folder import Collected, collect
from ..results.ushape import SHORTEST
from ..run.files import file_name, remove_cut_short, require_writable
from ..run.progress import Advance, Part, announce
from ..studies.runner import Given, Results, Subject, Told, holding, subjects

SCRATCH = ".measuring"  # of the report's folder: studies under way; `collect` does not look into hidden folders
KEY = "report_key"  # attribute of results: what they depend on
FILES = ("index", "claims", "overview")  # of the page
SWAPS = "mean,zero,random"  # what is put at position 0
# Of a quick report: prompts by study, and options of any study; intervals get as wide as they get.
QUICK_PROMPTS = {"scalar": 1, "trajectory": 4, "sinks": 8, "theory": 1, "jacobian": 4, "leakage": 8, "bos-swap": 4}
QUICK_PRODUCTS = 8
QUICK_OPTIONS = {"starts": 8, "replace": "mean", "profile_prompts": 1, "products": QUICK_PRODUCTS}


@dataclass(frozen=True, kw_only=True)
class Source(Given):
    """Where prompts and models come from, for all studies; how many prompts each takes it says itself."""

    initialization: Rule = CONFIG


@dataclass(frozen=True)
class Study:
    """One study of the report: the folder of its results, what their files begin with, its usual size and its options."""

    kind: str
    file: str
    prompts: int
    options: Mapping[str, Any]
    full: Study | None = None  # of a quick report's study, the one it stands for

    @property
    def fresh(self) -> bool:
        """Whether the study measures fresh weights, too."""
        return self.file in ("jacobian", "theory") and "init" in self.options.get("conditions", "init")

    def asked(self, source: Source, count: int | None, length: int) -> Source:
        """The study's own prompts, and what runs the models: only transformers' modules can be taken apart."""
        backend = "transformers" if self.kind == "theory" else source.backend
        return replace(source, prompts=self.prompts if count is None else count, length=length, backend=backend)


def shortened(one: Study) -> Study:
    """The study as a quick report has it: few prompts and products, one fresh model, one replacement at position 0."""
    less = {name: value for name, value in QUICK_OPTIONS.items() if name in one.options}
    if one.file in ("jacobian", "theory"):
        less = {"seeds": 1} | ({} if one.options.get("method") == "scalar" else {"products": str(QUICK_PRODUCTS)})
    return replace(one, prompts=QUICK_PROMPTS[one.kind], options={**one.options, **less}, full=one)


def studies(seed: int = 0) -> tuple[Study, ...]:
    """All studies of a report, those that take fewest passes first."""
    swap = {"replace": SWAPS, "bootstrap": 400, "profile_prompts": 4, "products": PRODUCTS}
    return (
        Study("sinks", "sinks", 32, options={"threshold": 0.3, "tau": 0.2, "reacts": "mean", "pictures": 3}),
        Study("trajectory", "trajectory", 32, options={"starts": 64}),
        Study("scalar", "jacobian", 16, options={"method": "scalar", "conditions": "pretrained"}),
        Study("leakage", "leakage", 256, options={}),
        Study("theory", "theory", 2, options={}),
        Study("bos-swap", "bos-swap", 128, options=swap),
        Study("jacobian", "jacobian", 16, options={}),
    )


def measure(
    models: Sequence[str],
    out: str | Path,
    *,
    count: int | None = None,
    length: int = 256,
    source: Source = Source(),
    fresh: bool = False,
    quick: bool = False,
    chosen: Sequence[Study] | None = None,
    advance: Advance | None = None,
    told: Told | None = None,
) -> tuple[list[str], list[str], dict[Path, xr.Dataset]]:
    """Measure every model by every study, as far as it was not done before.

    Args:
        models: as `probes.load` takes them.
        out: the report's folder.
        count: prompts of every study; each study's own number if not given.
        length: tokens per prompt.
        source: of prompts and models.
        fresh: measure again what is there.
        quick: measure less (`shortened`), unless there are full results.
        chosen: studies; all of them if not given.
        advance: hears (which study of which model is running, done, in all).
        told: hears in one line each what was kept or refused, and how long each study takes.

    Returns:
        The models' names, what studies refused to measure, a sentence each, and what was measured, by file.

    Raises:
        InputError: bad input, found before anything is measured; results in `out` that cannot be read; or every study
            refused every model.
    """
    out, said = Path(out), told or (lambda line: None)
    chosen = studies(source.seed) if chosen is None else tuple(chosen)
    chosen = tuple(shortened(one) for one in chosen if one.kind != "scalar") if quick else chosen  # which no page shows
    if length < SHORTEST:
        raise InputError(f"length={length} leaves no middle to compare with; give at least {SHORTEST}")
    check_rule(source.initialization)
    require_writable(out)
    for folder, name in [*((out, name) for name in FILES), *((out / one.kind, one.file) for one in chosen)]:
        remove_cut_short(folder, name)  # by a kill while they were written
    before = collect(out) if out.is_dir() else Collected(out)
    asked = {one.kind: one.asked(source, count, length) for one in chosen}
    most = replace(source, prompts=max(one.prompts for one in asked.values()), length=length)
    # Studies check for themselves, each when its turn comes: what one refuses, another may measure.
    found = subjects(models, source.loading(), most, lambda *_: None)
    refused: list[str] = []
    measured: dict[Path, xr.Dataset] = {}
    announce(advance, [_label(one, subject) for subject in found for one in chosen])
    for subject in found:
        model, kept = subject.model(), []
        with holding(source.loading(), subject.source, model):
            for one in chosen:
                key = _key(one, model, asked[one.kind])
                if not fresh and _known(one, model, subject.name, before, asked[one.kind]):
                    kept.append(one.kind)
                else:
                    try:
                        measured |= _measure(one, subject, out, before, asked[one.kind], key, advance, said)
                    except InputError as error:
                        refused.append(f"{one.kind} was not measured on {subject.name}: {error}")
                        said(refused[-1])
                if advance is not None:
                    advance(_label(one, subject), 1.0, 1.0)
        if kept:
            said(f"{subject.name}: kept {', '.join(kept)}, made with the same options (--fresh measures again)")
    if len(refused) == len(found) * len(chosen):
        raise InputError(f"nothing could be measured; the first reason: {refused[0]}")
    return [subject.name for subject in found], refused, measured


def _label(one: Study, subject: Subject) -> str:
    return f"{subject.name}: {one.kind}"


def _measure(
    one: Study,
    subject: Subject,
    out: Path,
    before: Collected,
    asked: Source,
    key: str,
    advance: Advance | None,
    told: Told,
) -> dict[Path, xr.Dataset]:
    """One study of one model, in a folder of its own until it is done; an older result of the same model then goes."""
    # An unfinished full study waits while a quick one is made.
    scratch = out / SCRATCH / (f"{one.kind}-{QUICK}" if one.full else one.kind) / file_name(subject.name)
    file = out / one.kind / f"{one.file}-{file_name(subject.name)}.nc"

    made: dict[Path, xr.Dataset] = {}

    def write(results: Results) -> None:
        (ds,) = results.values()
        made[file] = ds.assign_attrs({KEY: key} | ({QUICK: 1} if one.full else {}))
        save(made[file], file)

    part = Part(advance, _label(one, subject))
    measured, chosen = registered(one.file), asked.chosen()
    rule = {"initialization": asked.initialization} if one.fresh else {}
    model, options = subject.model(), measured.options(**one.options, **rule)
    how: dict[str, Any] = {"load": lambda name: model, "advance": part, "remark": told}
    prompts = Prompts(**chosen | {"text": chosen["text"] and Path(chosen["text"]), "first": str(chosen["first"])})
    run(measured, [subject.source], scratch, options, prompts, **how, finish=lambda _, results, __: write(results))
    older = before.files.get((one.kind, subject.name), file)
    if older != file:
        older.unlink(missing_ok=True)
    shutil.rmtree(scratch, ignore_errors=True)
    for folder in (scratch.parent, scratch.parent.parent):
        with suppress(OSError):  # another study's unfinished work is in it
            folder.rmdir()
    return made


def _key(one: Study, model: View, asked: Source) -> str:
    """A hash of all that a result depends on: the study's options, weights, tokens and version."""
    made = {
        "options": one.options,
        "initialization": asked.initialization if one.fresh else CONFIG,
        "loading": [asked.backend, model.identity.dtype, model.identity.weights, version("headwater")],
        "tokens": tokens_hash(drawn(model, **asked.asked()).tokens),
    }
    return hashlib.sha256(json.dumps(made, sort_keys=True, default=str).encode()).hexdigest()


def _known(one: Study, model: View, name: str, before: Collected, asked: Source) -> bool:
    """Whether the result is there under its key; a quick study is content with the full one."""
    ds = before[one.kind].get(name)
    if ds is None or KEY not in ds.attrs:
        return False
    full = one.full and _key(one.full, model, replace(asked, prompts=max(asked.prompts, one.full.prompts)))
    return ds.attrs[KEY] in (_key(one, model, asked), full)
