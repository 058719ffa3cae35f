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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..loop import Remark, Results, Subject, run, subjects
from ..measure import Measure
from ..measure import measure as registered
from ..models.initialization import CONFIG, Rule, check_rule
from ..models.view import View
from ..options import Loading, Prompts
from ..results.dataset import QUICK, save, tokens_hash
from ..results.folder import Collected, collect
from ..results.ushape import SHORTEST
from ..run.files import file_name, remove_cut_short, require_writable
from ..run.progress import Advance, Part, announce

KEY = "report_key"  # attribute of results: what they depend on
FILES = ("index", "claims", "overview")  # of the page
# Of a quick report: prompts by study, and options of any study; intervals get as wide as they get.
QUICK_PROMPTS = {"scalar": 1, "trajectory": 4, "sinks": 8, "theory": 1, "jacobian": 4, "leakage": 8, "bos-swap": 4}
QUICK_OPTIONS = {"starts": 8, "replace": "mean", "profile_prompts": 1, "products": 8, "seeds": 1}


@dataclass(frozen=True)
class Source:
    """Where prompts and models come from, for all studies; how many prompts each takes it says itself."""

    prompts: Prompts = Prompts()
    loading: Loading = Loading()
    initialization: Rule = CONFIG


@dataclass(frozen=True)
class Study:
    """One study of the report: the folder of its results, what their files begin with, its usual size and its options."""

    kind: str
    file: str
    prompts: int
    options: Mapping[str, Any] = field(default_factory=dict)
    full: Study | None = None  # of a quick report's study, the one it stands for

    @property
    def fresh(self) -> bool:
        """Whether the study measures fresh weights, too."""
        return self.file in ("jacobian", "theory") and "init" in self.options.get("conditions", "init")

    def asked(self, source: Source, count: int | None, length: int) -> Source:
        """The study's own prompts, and what runs the models: only transformers' modules can be taken apart."""
        loading = replace(source.loading, backend="transformers") if self.kind == "theory" else source.loading
        prompts = replace(source.prompts, prompts=self.prompts if count is None else count, length=length)
        return replace(source, prompts=prompts, loading=loading)


def shortened(one: Study) -> Study:
    """The study as a quick report has it: few prompts and products, one fresh model, one replacement at position 0."""
    known = {option.name for option in fields(registered(one.file).options)}
    less = {name: value for name, value in QUICK_OPTIONS.items() if name in known}
    return replace(one, prompts=QUICK_PROMPTS[one.kind], options={**one.options, **less}, full=one)


def studies() -> tuple[Study, ...]:
    """All studies of a report, those that take fewest passes first."""
    return (
        Study("sinks", "sinks", 32),
        Study("trajectory", "trajectory", 32),
        Study("scalar", "jacobian", 16, {"method": "scalar", "conditions": "pretrained"}),
        Study("leakage", "leakage", 256),
        Study("theory", "theory", 2),
        Study("bos-swap", "bos-swap", 128),
        Study("jacobian", "jacobian", 16),
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
    remark: Remark = lambda line: None,
) -> tuple[list[str], list[str]]:
    """Measure every model by every study (or those `chosen`), as far as it was not done before or `fresh` asks for it anew.

    `count` stands in the place of each study's own number of prompts. `quick` measures less (`shortened`), unless there are
    full results. `remark` hears in one line each what was kept or refused.

    Returns:
        The models' names, and what studies refused to measure, a sentence each.

    Raises:
        InputError: bad input, found before anything is measured; results in `out` that cannot be read; or every study
            refused every model.
    """
    out = Path(out)
    chosen = studies() if chosen is None else tuple(chosen)
    chosen = tuple(shortened(one) for one in chosen if one.kind != "scalar") if quick else chosen  # which no page shows
    if length < SHORTEST:
        raise InputError(f"length={length} leaves no middle to compare with; give at least {SHORTEST}")
    check_rule(source.initialization)
    require_writable(out)
    for folder, name in [*((out, name) for name in FILES), *((out / one.kind, one.file) for one in chosen)]:
        remove_cut_short(folder, name)  # by a kill while they were written
    before = collect(out) if out.is_dir() else Collected(out)
    asked = {one.kind: one.asked(source, count, length) for one in chosen}
    most = replace(source.prompts, prompts=max(one.prompts.prompts for one in asked.values()), length=length)
    # Studies check for themselves, each when its turn comes: what one refuses, another may measure.
    found = subjects(registered("sinks"), models, most, source.loading.load, lambda line: None)
    refused: list[str] = []
    announce(advance, [_label(one, subject) for subject in found for one in chosen])
    for subject in found:
        model, kept = subject.load(), []
        for one in chosen:
            if not fresh and _known(one, model, subject.name, before, asked[one.kind]):
                kept.append(one.kind)
            else:
                key, loading = _key(one, model, asked[one.kind]), asked[one.kind].loading
                how: dict[str, Any] = {"advance": Part(advance, _label(one, subject)), "remark": remark}
                try:
                    own = model if loading == source.loading else loading.load(subject.source)
                    file = _measure(one, subject, own, out / one.kind, asked[one.kind], key, **how)
                    if (older := before.files.get((one.kind, subject.name), file)) != file:  # of the same model
                        older.unlink(missing_ok=True)
                except InputError as error:
                    refused.append(f"{one.kind} was not measured on {subject.name}: {error}")
                    remark(refused[-1])
            if advance is not None:
                advance(_label(one, subject), 1.0, 1.0)
        if kept:
            remark(f"{subject.name}: kept {', '.join(kept)}, made with the same options (--fresh measures again)")
    if len(refused) == len(found) * len(chosen):
        raise InputError(f"nothing could be measured; the first reason: {refused[0]}")
    return [subject.name for subject in found], refused


def _label(one: Study, subject: Subject) -> str:
    return f"{subject.name}: {one.kind}"


def _measure(one: Study, subject: Subject, model: View, folder: Path, asked: Source, key: str, **how: Any) -> Path:
    """The file of one study of one model."""
    file, measured = folder / f"{one.file}-{file_name(subject.name)}.nc", registered(one.file)

    def write(_: Measure, results: Results, __: Path) -> None:
        (ds,) = results.values()
        save(ds.assign_attrs({KEY: key} | ({QUICK: 1} if one.full else {})), file)

    options = measured.options(**one.options, **({"initialization": asked.initialization} if one.fresh else {}))
    run(measured, [subject.source], folder, options, asked.prompts, load=lambda source: model, finish=write, **how)
    return file


def _key(one: Study, model: View, asked: Source) -> str:
    """A hash of all that a result depends on: the study's options, weights, tokens and version."""
    made = {
        "options": one.options,
        "initialization": asked.initialization if one.fresh else CONFIG,
        "loading": [asked.loading.backend, model.identity.dtype, model.identity.weights, version("headwater")],
        "tokens": tokens_hash(asked.prompts.drawn(model).tokens),
    }
    return hashlib.sha256(json.dumps(made, sort_keys=True, default=str).encode()).hexdigest()


def _known(one: Study, model: View, name: str, before: Collected, asked: Source) -> bool:
    """Whether the result is there under its key; a quick study is content with the full one."""
    ds = before[one.kind].get(name)
    if ds is None or KEY not in ds.attrs:
        return False
    count = max(asked.prompts.prompts, one.full.prompts if one.full else 0)
    more = replace(asked.prompts, prompts=count)
    full = one.full and _key(one.full, model, replace(asked, prompts=more))
    return ds.attrs[KEY] in (_key(one, model, asked), full)
