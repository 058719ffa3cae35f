"""What all studies have in common: check all models first, measure unit by unit, resume, write what came out.

A study is a declaration (`Study`): its name, the units of a model, what becomes of them. `run` does the rest. A unit is what
is measured in one go: a model under one condition, or with one replacement at position 0. Units that are done wait in
`OUT/unfinished` (`probes.run.store`) until all of them are; the same command then reads them and resumes.

A unit's key says what it was measured with: the options, and the hash of the prompts instead of what chose them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import xarray as xr
from torch import Tensor

from ..data.prompts import Drawn, FirstToken, check_source, draw
from ..errors import InputError
from ..measures.consequences import consequences
from ..models.ablate import Head, How, ablated
from ..models.edited import Edited
from ..models.load import Backend, DType, load
from ..models.view import View
from ..results.dataset import from_bytes, provenance, save, to_bytes
from ..run import processes
from ..run.files import file_name, together
from ..run.progress import Advance, announce
from ..run.store import RESULT, Piece, Store, going_on, unfinished

Results: TypeAlias = dict[str, xr.Dataset]
Told: TypeAlias = Callable[[str], object]

CHOOSING = ("prompts", "length", "text", "dataset", "split", "column", "chat", "first")
HASH = "tokens_sha256"
COMPARED = 8  # prompts on which the loss of a changed model is told


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How models are loaded, as in `probes.load`."""

    backend: Backend = "transformers"
    device: str = "auto"
    dtype: DType = "auto"
    split_over: Mapping[str, Any] | None = None  # device_map, max_memory, offload_folder: more than one device
    beyond: bool = False  # texts longer than the model was made for
    ablate: tuple[Sequence[Head], How] | None = None  # heads that are taken out, and how (`probes.ablated`)

    def load(self, source: str) -> View:
        """The model; the one at hand where it is (`holding`).

        Raises:
            InputError: as `probes.load` does.
        """
        if (held := _held.get()) is not None and held[:2] == (self, source):
            return held[2]
        how: Any = {"device": self.device, "dtype": self.dtype, "beyond": self.beyond}
        model = load(source, self.backend, **how, **self.split_over or {})
        return model if self.ablate is None else ablated(model, *self.ablate)


_held: ContextVar[tuple[Loading, str, View] | None] = ContextVar("headwater_held", default=None)


@contextmanager
def holding(loading: Loading, source: str, model: View) -> Iterator[None]:
    """Within it, a model that is loaded in this way is this one: several studies of a model load it once."""
    token = _held.set((loading, source, model))
    try:
        yield
    finally:
        _held.reset(token)


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Which prompts are drawn, as in `probes.prompts`: so many windows of `length` tokens of a text."""

    prompts: int = 32
    length: int = 256
    text: str | None = None
    dataset: str | None = None
    split: str = "train"
    column: str = "text"
    chat: str | None = None
    first: FirstToken | int = "auto"
    seed: int = 0

    def chosen(self) -> dict[str, Any]:
        """All of it by name, a part of a unit's key."""
        return {name: getattr(self, name) for name in (*CHOOSING, "seed")}

    def asked(self) -> dict[str, Any]:
        """As `prompts.draw` takes it."""
        chosen = self.chosen()
        return {"n": chosen.pop("prompts"), **chosen}

    def check(self) -> None:
        """Refuse what can be refused without a model."""
        check_source(**self.asked())

    def drawn(self, model: View) -> Drawn:
        """The prompts of a model."""
        return draw(model, **self.asked())


@dataclass(frozen=True, kw_only=True)
class Given(Prompts, Loading):
    """What the commands of all studies take: prompts, and how models are loaded."""

    def loading(self) -> Loading:
        """How models are loaded, alone."""
        return Loading(**{one.name: getattr(self, one.name) for one in fields(Loading)})


@dataclass(frozen=True)
class Subject:
    """A model that passed all checks, and its prompts."""

    source: str
    name: str  # in results
    drawn: Drawn
    loading: Loading
    kept: View | None  # a single model; several are loaded one after another, two large ones need not fit into memory

    @property
    def tokens(self) -> Tensor:
        """Its prompts, [prompt, position]."""
        return self.drawn.tokens

    def described(self, result: xr.Dataset) -> xr.Dataset:
        """The result with what there is to say of its prompts and, as `loaded_from`, of how the model was named.

        Where prompts are windows of documents, `document` [prompt] names them.
        """
        result = result.assign_attrs(self.drawn.attributes | {"loaded_from": self.source})
        if self.drawn.documents is None or result.sizes.get("prompt") != len(self.tokens):
            return result
        names = xr.Variable("prompt", list(self.drawn.documents), {"long_name": "document of a prompt"})
        return result.assign_coords(document=names)

    def model(self) -> View:
        """The model itself."""
        return self.loading.load(self.source) if self.kept is None else self.kept


@runtime_checkable
class Tell(Protocol):
    """Hears how far a unit is, or a part of it that has a name."""

    def __call__(self, done: float | int, total: float | int, part: str = "") -> None: ...


@dataclass(frozen=True)
class Unit:
    """What is measured in one go.

    `key` is what beside label, model and prompts the result depends on; `weights` makes the model that is measured of the
    one that was loaded, where it is another.
    """

    label: str
    key: Mapping[str, Any]
    measure: Callable[[View, Subject, Tell, Store], xr.Dataset]
    weights: Callable[[View], View] | None = None


@dataclass(frozen=True)
class Study:
    """What is special to a study.

    Args:
        name: of the files.
        units: of a model, from its name and prompts.
        write: writes all results, in one process.
        check: raises what the study has against a model and prompts.
        joined: one result of a model's units; there is one unit unless given.
        prepare: hears of all models before the first is measured.
        files: written beside results and figure.
    """

    name: str
    units: Callable[[View, str, Tensor], Sequence[Unit]]
    write: Callable[[Results], object]
    check: Callable[[View, str, Tensor], object] = lambda model, name, tokens: None
    joined: Callable[[View, Sequence[xr.Dataset]], xr.Dataset] = lambda model, units: units[0]
    prepare: Callable[[Sequence[Subject]], object] = lambda models: None
    files: Sequence[str] = ()


def run(
    study: Study,
    sources: Sequence[str],
    out: Path,
    asked: Prompts,
    loading: Loading,
    *,
    advance: Advance | None = None,
    told: Told | None = None,
) -> Results:
    """Measure every model by a study, write what came out, return the results by model name.

    Args:
        study: what is measured.
        sources: models, as `probes.load` takes them.
        out: folder.
        asked: which prompts.
        loading: how models are loaded.
        advance: hears (what is running, done, in all).
        told: hears in one line which units are there already.

    Raises:
        InputError: bad input, found before anything is measured.
    """
    said = told or (lambda line: None)
    stores: dict[str, Store] = {}
    with unfinished(out, study.name) as root:

        def check(model: View, name: str, tokens: Tensor) -> None:
            study.check(model, name, tokens)
            for unit in study.units(model, name, tokens):  # fresh weights follow from the unit's label and key
                stores[unit.label] = Store(root, unit.label, {**measured_on(model, tokens), **unit.key})

        models = subjects(sources, loading, asked, check, told)
        require_free(written_files([one.name for one in models], out, study.name, *study.files))
        if line := going_on(stores):
            said(line)
        study.prepare(models)
        left = [label for label, store in stores.items() if not store.has(RESULT)]
        announce(advance, left)
        results: Results = {}
        for one in models:
            model = one.model()
            units = study.units(model, one.name, one.tokens)
            if isinstance(model, Edited) and one.tokens.shape[1] > 2:
                said(consequence(model, one.tokens))
            measured = [_unit(unit, model, one, stores[unit.label], advance) for unit in units]
            results[one.name] = study.joined(model, measured)
        if processes.first():
            with together():
                study.write(results)
    return results


def _unit(unit: Unit, model: View, subject: Subject, store: Store, advance: Advance | None) -> xr.Dataset:
    def tell(done: float | int, total: float | int, part: str = "") -> None:
        if advance is not None:
            advance(f"{unit.label} {part}".rstrip(), float(done), float(total))

    def measure(pieces: Store) -> xr.Dataset:
        weights = model if unit.weights is None else unit.weights(model)
        return subject.described(unit.measure(weights, subject, tell, pieces))

    return kept(store, measure)


def kept(store: Store, measure: Callable[[Store], xr.Dataset]) -> xr.Dataset:
    """A unit's result as it was measured before, or as it is measured and kept now."""

    def packed() -> Piece:
        return {RESULT: np.frombuffer(to_bytes(measure(store)), np.uint8)}

    return from_bytes(store.once(packed)[RESULT].tobytes())


def consequence(model: Edited, tokens: Tensor) -> str:
    """What a change of a model does to its predictions, in one line: loss and KL on the first prompts."""
    some = tokens[:COMPARED]
    after, divergence = consequences(model, some, model.original)
    before, _ = consequences(model.original, some)
    assert divergence is not None
    said = f"loss {np.nanmean(after[:, 1:]):.4f}, was {np.nanmean(before[:, 1:]):.4f}; KL {divergence[:, 1:].mean():.4f} nat"
    return f"{model.identity.name}: {said} on {len(some)} prompt{'s' * (len(some) > 1)}"


def measured_on(model: View, tokens: Any) -> dict[str, Any]:
    """The part of a key that is the model's, the prompts' and the program's."""
    made = provenance(model, tokens)
    return {name: made[name] for name in ("weights", "backend", "dtype", "changed", HASH, "headwater") if name in made}


def subjects(
    sources: Sequence[str],
    loading: Loading,
    asked: Prompts,
    check: Callable[[View, str, Tensor], object],
    told: Told | None = None,
) -> list[Subject]:
    """Every model with its prompts, after everything that can be refused was: nothing is measured before.

    `check(model, name, tokens)` raises what a measurement has against a model; `told` hears what there is to say about
    prompts.

    Raises:
        InputError: no model, one that cannot be loaded, prompted or measured, or two of one name.
    """
    if not sources:
        raise InputError("no model given; name one, as tiny-llama")
    asked.check()
    found = []
    for source in sources:
        model = loading.load(source)
        name, revision = model.identity.name, model.identity.revision
        if "@" in source and revision is not None:  # a hub id has the commit as its revision, which names no curve
            name = f"{name}@{source.rpartition('@')[2]}"
        drawn = asked.drawn(model)
        check(model, name, drawn.tokens)
        found.append(Subject(source, name, drawn, loading, model if len(sources) == 1 else None))
    named: dict[str, str] = {}
    for one in found:
        other = named.setdefault(file_name(one.name), one.source)
        if other is not one.source:
            raise InputError(
                f"'{other}' and '{one.source}' are both called '{one.name}'; give each model once, or rename a folder"
            )
    if told is not None:
        for line in (line for one in found for line in one.drawn.remarks):
            told(line)
    return found


def result_files(models: Collection[str], out: Path, name: str) -> list[Path]:
    """Where the results of these models are written, in their order: NAME.nc, or NAME-MODEL.nc for each of several."""
    if len(models) == 1:
        return [out / f"{name}.nc"]
    return [out / f"{name}-{file_name(model)}.nc" for model in models]


def written_files(models: Collection[str], out: Path, name: str, *more: str) -> list[Path]:
    """All that is written: results, the figure as PNG and SVG, and `more` in the same folder."""
    return [*result_files(models, out, name), *(out / file for file in (f"{name}.png", f"{name}.svg", *more))]


def require_free(files: Sequence[Path]) -> None:
    """Check before long work that no folder has the name of a file to be written.

    Raises:
        InputError: one has.
    """
    for file in files:
        if file.is_dir():
            raise InputError(
                f"'{file}' is a folder, and a file is to be written there; move it, or give another folder"
            )


def write_results(results: Mapping[str, xr.Dataset], out: Path, name: str, figure: Callable[..., Any]) -> None:
    """Write `result_files` and the figure of all models, all of it or nothing."""
    with together():
        for result, file in zip(results.values(), result_files(results, out, name), strict=True):
            save(result, file)
        figure(results, path=out / f"{name}.png")


class Untouched:
    """A view of a model that is only looked at: a probe refuses what it has to refuse, and stops where it would begin.

    That way all models are checked with each probe's own checks before the first is measured.
    """

    class Reached(Exception):
        """The probe has come to where it needs the model itself."""

    def __init__(self, model: View) -> None:
        self.spec, self.tokenizer = model.spec, model.tokenizer
        self.device, self.dtype, self.offloaded = model.device, model.dtype, model.offloaded
        self.identity, self.first_ids, self.bos = model.identity, model.first_ids, model.bos

    def _reached(self, *_: Any, **__: Any) -> Any:
        raise self.Reached

    embed = trace = residual = watching = output_weights = norm = unembed = parts = reinitialized = _reached
