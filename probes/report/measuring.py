"""What `headwater report MODEL...` measures: every study on every model, by the functions that the single commands use.

Results lie under the report's folder, `KIND/FILE-MODEL.nc`, where `headwater report` without models and `make report` look
for them, too. A result that is there and was made with the same options, on the same weights and tokens and by the same
version, is kept; what an interrupted report had begun is taken up. Models that came with earlier reports stay beside them.

The studies that take least come first. A quick report has studies that are shorter (`shortened`): its results say so by
their attribute `quick`, it keeps the full ones that are there, and a full report measures again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypeAlias

import xarray as xr

from ..data.prompts import draw as drawn
from ..errors import InputError
from ..measures.jacobian import PRODUCTS
from ..measures.leakage import LAGS, usual_bands
from ..measures.sinks import FIRST_KEYS
from ..models.initialization import CONFIG, Rule, check_rule
from ..models.load import born
from ..models.view import View
from ..results.dataset import QUICK, recorded, save, tokens_hash
from ..results.folder import Collected, collect
from ..results.tables import write_report
from ..results.ushape import SHORTEST
from ..run.files import file_name, remove_cut_short, require_writable, write_table
from ..run.progress import Advance, Part, announce
from ..studies.runner import HASH, Given, Results, Subject, Told, holding, subjects
from ..studies.study import AGREEMENT_COLUMNS, FIGURES, Settings, agreement_cells, agreements, described, study
from ..studies.survey import PROBES, survey
from .cards import pretrained_weights

Between: TypeAlias = Callable[[Sequence[str]], object]

SCRATCH = ".measuring"  # of the report's folder: studies under way; `collect` does not look into hidden folders
FILES = ("index", "claims", "overview")  # of the page
SWAPS = ("mean", "zero", "random")  # what is put at position 0
# Of a quick report: prompts by study, and options of any study; intervals get as wide as they get.
QUICK_PROMPTS = {"scalar": 1, "trajectory": 4, "sinks": 8, "theory": 1, "jacobian": 4, "leakage": 16, "bos-swap": 4}
QUICK_PRODUCTS = 8
QUICK_OPTIONS = {"starts": 8, "replacement": ["mean"], "profile_prompts": 1, "products": QUICK_PRODUCTS}


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
    settings: Settings | None = None  # of `probes.studies.study.study`; the others are surveys
    options: Mapping[str, Any] | None = None
    full: Study | None = None  # of a quick report's study, the one it stands for

    @property
    def fresh(self) -> bool:
        """Whether the study measures fresh weights, too."""
        return self.settings is not None and "init" in self.settings.conditions

    def asked(self, source: Source, count: int | None, length: int) -> Source:
        """The study's own prompts, and what runs the models: only transformers' modules can be taken apart."""
        backend = "transformers" if self.kind == "theory" else source.backend
        return replace(source, prompts=self.prompts if count is None else count, length=length, backend=backend)


def shortened(one: Study) -> Study:
    """The study as a quick report has it: few prompts and products, one fresh model, one replacement at position 0."""
    prompts = QUICK_PROMPTS[one.kind]
    if one.settings is None:
        options = one.options or {}
        less = {name: value for name, value in QUICK_OPTIONS.items() if name in options}
        return replace(one, prompts=prompts, options={**options, **less}, full=one)
    products = QUICK_PRODUCTS if one.settings.method == "sketch" else None
    return replace(one, prompts=prompts, settings=replace(one.settings, seeds=1, products=products), full=one)


def studies(seed: int = 0) -> tuple[Study, ...]:
    """All studies of a report, those that take fewest passes first."""
    theory = Settings(theories=("uniform", "values", "score_path", "config"), by_path=True)
    lags = {"lags": LAGS, "bootstrap": 400, "seed": seed}
    swap = {"replacement": list(SWAPS), **lags, "profile_prompts": 4, "products": PRODUCTS}
    return (
        Study("sinks", "sinks", 32, options={"threshold": 0.3, "tau": 0.2, "reacts": "mean", "pictures": 3}),
        Study("trajectory", "trajectory", 32, options={"starts": 64, "seed": seed}),
        Study("scalar", "jacobian", 16, settings=Settings(method="scalar", conditions=("pretrained",))),
        Study("leakage", "leakage", 256, options=lags),
        Study("theory", "theory", 2, settings=theory),
        Study("bos-swap", "bos-swap", 128, options=swap),
        Study("jacobian", "jacobian", 16, settings=Settings()),
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
    between: Between | None = None,
) -> list[str]:
    """Measure every model by every study, as far as it was not done before; write results, figures and tables.

    Studies that take least come first. Figures and tables are drawn after each.

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
        told: hears in one line each what is going to be measured, what was kept, taken up or refused, and how long each
            study takes.
        between: hears, with what was refused so far, of each study of the first model and of each further model as
            soon as its figures are drawn, while there is more to measure.

    Returns: what studies refused to measure, a sentence each.

    Raises:
        InputError: bad input, found before anything is measured; results in `out` that cannot be read; or every study
            refused every model.
    """
    out, said = Path(out), told or (lambda line: None)
    chosen = studies(source.seed) if chosen is None else tuple(chosen)
    chosen = tuple(map(shortened, chosen)) if quick else chosen
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
    todo: list[list[Study]] = []  # by subject
    stale = {one.kind for one in chosen if not (out / one.kind / f"{one.file}.png").is_file()}  # figures and tables
    for subject in found:
        model = subject.model()
        there = [one for one in chosen if not fresh and _kept(one, model, subject.name, before, asked[one.kind])]
        left = [one for one in chosen if one not in there]
        del model
        if there:
            kinds = ", ".join(one.kind for one in there)
            said(f"{subject.name}: kept {kinds}, made with the same options (--fresh measures again)")
        if left:
            kinds = ", ".join(one.kind for one in left)
            said(f"{subject.name}: {QUICK + ' ' if quick else ''}studies to come: {kinds}")
        todo.append(left)
    announce(advance, [_label(one, subject) for subject, own in zip(found, todo, strict=True) for one in own])
    for number, (subject, own) in enumerate(zip(found, todo, strict=True)):
        with holding(source.loading(), subject.source, subject.model()) if own else nullcontext():
            for one in own:
                try:
                    _measure(one, subject, out, before, asked[one.kind], advance, said)
                except InputError as error:
                    refused.append(f"{one.kind} was not measured on {subject.name}: {error}")
                    said(refused[-1])
                    continue
                finally:
                    if advance is not None:
                        advance(_label(one, subject), 1.0, 1.0)
                draw(out, [one.kind])
                stale.discard(one.kind)
                last = one is own[-1]
                if between is not None and ((number == 0 and not last) or (last and any(todo[number + 1 :]))):
                    between(refused)
    if len(refused) == len(found) * len(chosen):
        raise InputError(f"nothing could be measured; the first reason: {refused[0]}")
    draw(out, sorted(stale))
    return refused


def _label(one: Study, subject: Subject) -> str:
    return f"{subject.name}: {one.kind}"


def draw(out: Path, kinds: Sequence[str]) -> None:
    """Figures and tables of all results of these kinds, from the results alone."""
    collected = collect(out)
    for one in studies():
        results = collected[one.kind]
        if one.kind not in kinds or not results:
            continue
        folder = out / one.kind
        if one.settings is None:
            PROBES[one.kind].figure(results, path=folder / f"{one.file}.png")
            write_report(PROBES[one.kind].report(results), folder / f"{one.file}.md")
            continue
        FIGURES[one.file](results, path=folder / f"{one.file}.png")
        if one.kind == "theory":
            rows = [list(agreement_cells(row)) for row in agreements(results)]
            lines = [described(results)]
            title = "Theories against measured profiles"
            write_table(folder / "theory.md", title, lines, AGREEMENT_COLUMNS, rows)


def _measure(
    one: Study, subject: Subject, out: Path, before: Collected, asked: Source, advance: Advance | None, told: Told
) -> None:
    """One study of one model, in a folder of its own until it is done; an older result of the same model then goes.

    Figures are made afterwards, of all models together (`draw`).
    """
    quick = one.full is not None
    # An unfinished full study waits while a quick one is made.
    scratch = out / SCRATCH / (f"{one.kind}-{QUICK}" if quick else one.kind) / file_name(subject.name)
    file = out / one.kind / f"{one.file}-{file_name(subject.name)}.nc"

    def write(results: Results) -> None:
        (ds,) = results.values()
        save(ds.assign_attrs({QUICK: 1}) if quick else ds, file)

    running = {"told": told, "write": write, "advance": Part(advance, _label(one, subject))}
    if one.settings is not None:
        rule = {"initialization": asked.initialization} if one.fresh else {}
        settings = replace(one.settings, **asked.chosen(), **rule)
        name: Literal["jacobian", "theory"] = "theory" if one.file == "theory" else "jacobian"
        study([subject.source], scratch, settings, name=name, **running, **vars(asked.loading()))
    else:
        given = {**asked.chosen(), **vars(asked.loading())}
        survey([subject.source], scratch, PROBES[one.kind], options=one.options, **running, **given)
    older = before.files.get((one.kind, subject.name), file)
    if older != file:
        older.unlink(missing_ok=True)
    shutil.rmtree(scratch, ignore_errors=True)
    for folder in (scratch.parent, scratch.parent.parent):
        with suppress(OSError):  # another study's unfinished work is in it
            folder.rmdir()


def _kept(one: Study, model: View, name: str, before: Collected, asked: Source) -> bool:
    """Whether there is a result made with the same options, on the same weights and tokens, by the same version.

    A quick study is content with a full one of the same text and length, of as many prompts or more; not the other way.
    """
    ds = before[one.kind].get(name)
    if ds is None or (QUICK in ds.attrs and one.full is None):
        return False
    if one.full is not None and QUICK not in ds.attrs:
        count = ds.sizes.get("prompt", 0)
        return count >= asked.prompts and _kept(one.full, model, name, before, replace(asked, prompts=count))
    tokens = drawn(model, **asked.asked()).tokens
    dtype, hashed = model.identity.dtype, tokens_hash(tokens)
    same = {"headwater": version("headwater"), "backend": asked.backend, "dtype": dtype, HASH: hashed}
    if any(recorded(ds, key) != [value] for key, value in same.items()):
        return False
    if model.identity.weights not in pretrained_weights(ds) or not _complete(one, ds):
        return False
    if one.fresh:
        rules, rule = recorded(ds, "initialization"), asked.initialization
        if rules != [born(model, initialization=rule).initialization] and (rules or rule != CONFIG):
            return False  # results that do not say are from before there were other rules
    wanted = json.loads(json.dumps(_options(one, tokens.shape[1], asked.seed)))
    made = [json.loads(options) for options in recorded(ds, "options")]
    return bool(made) and all(options.get(key) == value for options in made for key, value in wanted.items())


def _complete(one: Study, ds: xr.Dataset) -> bool:
    """Whether a study with settings has all conditions, fresh models and theories."""
    if one.settings is None:
        return True
    conditions = set(map(str, ds["condition"].values)) if "condition" in ds.dims else set()
    if conditions != set(one.settings.conditions):
        return False
    if "init" in conditions and int(ds["runs"].sel(condition="init")) != one.settings.seeds:
        return False
    return all(f"theory_{theory}" in ds for theory in one.settings.theories or ())


def _options(one: Study, length: int, seed: int) -> dict[str, Any]:
    """The options that a result of this study records."""
    if one.settings is not None:
        pathway = "all" if one.settings.by_path else one.settings.pathway
        wanted = {name: getattr(one.settings, name) for name in ("method", "readout", "from_layer")}
        wanted |= {"pathway": pathway, "query": length - 1, "seed": seed}
        return wanted | ({"products": one.settings.products or PRODUCTS} if one.settings.method == "sketch" else {})
    wanted = dict(one.options or {})
    if one.kind == "sinks":
        wanted["keys"] = FIRST_KEYS[:length]
    if len(wanted.get("replacement", ())) == 1:  # which is then no dimension of the result
        (wanted["replacement"],) = wanted["replacement"]
    if "lags" in wanted:
        wanted["bands"] = usual_bands(length, wanted["lags"])
    return wanted
