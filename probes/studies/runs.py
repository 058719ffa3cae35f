"""What every command does with several models: check all of them first, measure one after another, write what came out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xarray as xr
from torch import Tensor

from ..data.prompts import Drawn, check_source, draw
from ..errors import InputError
from ..models.load import Backend, DType, load
from ..models.view import View
from ..results.dataset import save
from ..run.files import file_name, together


@dataclass(frozen=True)
class Loading:
    """How models are loaded, as in `probes.load`."""

    backend: Backend = "transformers"
    device: str = "auto"
    dtype: DType = "auto"
    split: Mapping[str, Any] | None = None  # device_map, max_memory, offload_folder, for models larger than one device

    def load(self, source: str) -> View:
        """The model; the one at hand where it is (`holding`).

        Raises:
            InputError: as `probes.load` does.
        """
        if (held := _held.get()) is not None and held[:2] == (self, source):
            return held[2]
        return load(source, self.backend, device=self.device, dtype=self.dtype, **self.split or {})


_held: ContextVar[tuple[Loading, str, View] | None] = ContextVar("headwater_held", default=None)


@contextmanager
def holding(loading: Loading, source: str, model: View) -> Iterator[None]:
    """Within it, a model that is loaded in this way is this one: several studies of a model load it once."""
    token = _held.set((loading, source, model))
    try:
        yield
    finally:
        _held.reset(token)


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


def subjects(
    sources: Sequence[str],
    loading: Loading,
    asked: Mapping[str, Any],
    check: Callable[[View, str, Tensor], object],
    told: Callable[[str], object] | None = None,
) -> list[Subject]:
    """Every model with its prompts, after everything that can be refused was: nothing is measured before.

    `asked` are the arguments of `prompts.draw`; `check(model, name, tokens)` raises what a measurement has against a model;
    `told` hears what there is to say about prompts.

    Raises:
        InputError: no model, one that cannot be loaded, prompted or measured, or two of one name.
    """
    if not sources:
        raise InputError("no model given; name one, as tiny-llama")
    check_source(**asked)
    found = []
    for source in sources:
        model = loading.load(source)
        name = _name(model, source)
        drawn = draw(model, **asked)
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


def _name(model: View, source: str) -> str:
    name, revision = model.identity.name, model.identity.revision
    given = "@" in source and revision is not None  # a hub id has the commit as its revision, which names no curve
    return f"{name}@{source.rpartition('@')[2]}" if given else name


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
        self.identity, self.bos = model.identity, model.bos

    def _reached(self, *_: Any, **__: Any) -> Any:
        raise self.Reached

    embed = trace = residual = watching = output_weights = norm = unembed = parts = reinitialized = _reached
