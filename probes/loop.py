"""The one loop: a measure on every model, unit by unit, resumed where it was interrupted, written whole or not at all.

A unit is what is measured in one go (`probes.measure.Unit`). It is kept in `OUT/unfinished` under everything that its
numbers depend on, piece by piece and then as a whole, until all units are done.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from io import StringIO
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

import torch
import xarray as xr
from rich.console import Console
from rich.text import Text
from torch import Tensor

from .charts import save as save_chart
from .data.prompts import Drawn
from .errors import InputError, TooFew
from .headlines import TEXT, texts_of, write_tables
from .measure import Measure, Unit
from .models.ragged import side_by_side
from .models.view import View
from .options import Loading, Options, Prompts
from .results.dataset import attributes, kept, provenance, replaced, save
from .run import processes
from .run.files import atomic, file_name, together
from .run.progress import Advance, announce
from .run.store import RESULT, Store, going_on, unfinished

Results: TypeAlias = dict[str, xr.Dataset]
Remark: TypeAlias = Callable[[str], object]

LINE = 110  # characters of a line of a page
CHARTED = 4  # texts of a chart, of those that are measured alone
# Of the provenance: what numbers depend on.
KEY = ("weights", "backend", "dtype", "changed", "tokens_sha256", "headwater")


@dataclass(frozen=True)
class Subject:
    """A model that passed all checks, and its prompts, or one of several texts that are measured alone."""

    source: str
    name: str  # in results
    key: dict[str, Any]  # what of the model and its prompts the numbers depend on
    drawn: Drawn | None
    load: Callable[[], View]
    text: str | None = None  # its name, where each is measured alone

    @property
    def title(self) -> str:
        """In results by name, and of the progress."""
        return self.name if self.text is None else f"{self.name}, {self.text}"

    @property
    def tokens(self) -> Tensor:
        """Its prompts [prompt, position]; none for a measure that makes its own."""
        return torch.zeros(0, 0, dtype=torch.int64) if self.drawn is None else self.drawn.tokens

    def store(self, root: Path, unit: Unit, seed: int) -> Store:
        """Where a unit of it is kept."""
        return Store(root, label(self.title, unit), self.key | {"options": dict(unit.options), "seed": seed})

    def described(self, ds: xr.Dataset) -> xr.Dataset:
        """The result with what there is to say of its prompts and, as `loaded_from`, of how the model was named.

        Where prompts are windows of documents, `document` [prompt] names them.
        """
        said = {} if self.drawn is None else self.drawn.attributes
        ds = ds.assign_attrs(said | {"loaded_from": self.source} | ({} if self.text is None else {TEXT: self.text}))
        if self.drawn is None or self.drawn.documents is None or ds.sizes.get("prompt") != len(self.tokens):
            return ds
        names = xr.Variable("prompt", list(self.drawn.documents), {"long_name": "document of a prompt"})
        return ds.assign_coords(document=names)


def run(
    measure: Measure,
    sources: Sequence[str],
    out: str | Path,
    options: Options | None = None,
    prompts: Prompts = Prompts(),
    loading: Loading = Loading(),
    *,
    load: Callable[[str], View] | None = None,
    advance: Advance | None = None,
    remark: Remark = lambda line: None,
    finish: Callable[[Measure, Results, Path], object] | None = None,
) -> Results:
    """Measure every model and write NAME.nc (NAME-MODEL.nc for each of several), NAME.md, and the chart as PNG and SVG.

    `options` are of the measure's own type; its defaults if not given. `load` loads a model in another way, such as one that
    is in memory already. `remark` hears in one line what there is to say about prompts, resuming and older results. `finish`
    writes the results instead.

    Returns:
        The results by model name; those of whole texts by the text's name behind it.
    """
    out, values = Path(out), (options or measure.options()).values()
    with unfinished(out, measure.name) as root:
        models = subjects(measure, sources, prompts, load or loading.load, remark)
        units = list(measure.units(values))
        stores = {label(one.title, unit): one.store(root, unit, prompts.seed) for one in models for unit in units}
        files = result_files(measure, dict.fromkeys(one.name for one in models), out)
        if line := going_on(stores):
            remark(line)
        for line in [] if finish is not None else replaced(files):
            remark(line)
        announce(advance, [said for said, store in stores.items() if not store.has(RESULT)])
        results: Results = {}
        for _, texts in groupby(models, lambda one: one.source):
            model = None
            for one in texts:
                model = one.load() if model is None else model
                at = [(unit, stores[label(one.title, unit)]) for unit in units]
                parts = [_unit(measure, unit, model, one, store, prompts.seed, advance) for unit, store in at]
                made = attributes({"measure": measure.name})
                results[one.title] = one.described(measure.joined(parts, model)).assign_attrs(made)
        if processes.first():
            (finish or write)(measure, results, out)
    return results


def label(name: str, unit: Unit) -> str:
    """A model's unit in words."""
    return f"{name} {unit.label}".rstrip()


def _unit(
    measure: Measure, unit: Unit, model: View, one: Subject, store: Store, seed: int, advance: Advance | None
) -> xr.Dataset:
    """A unit's result, measured where it is not there already."""
    said = label(one.title, unit)
    more = {"documents": one.drawn and one.drawn.documents, "pieces": store, "seed": seed}
    more["progress"] = partial(advance, said) if advance is not None else None
    taken = signature(measure.compute).parameters
    arguments = {name: value for name, value in more.items() if name in taken} | dict(unit.options)

    def compute() -> xr.Dataset:
        measured = model if unit.weights is None else unit.weights(model)
        prompted = (one.tokens,) if measure.prompted else ()
        try:
            return measure.compute(measured, *prompted, **arguments).assign_attrs(attributes(unit.attributes))
        except TooFew as error:
            alone = f"{measure.name} needs several prompts at once, and each text is alone; leave out --whole"
            raise InputError(str(error) if one.text is None else alone) from None

    return kept(store, compute)


def subjects(
    measure: Measure, sources: Sequence[str], prompts: Prompts, load: Callable[[str], View], remark: Remark
) -> list[Subject]:
    """Every model with its prompts, after everything that can be refused without measuring was.

    A single model stays in memory; several are loaded one after another, since two large ones need not fit.
    """
    if not sources:
        raise InputError("no model given; name one, as tiny-llama")
    if measure.prompted:
        prompts.check()
    models = []
    for source in sources:
        model = load(source)
        name, revision = model.identity.name, model.identity.revision
        if "@" in source and revision is not None:  # a hub id has the commit as its revision, which names no curve
            name = f"{name}@{source.rpartition('@')[2]}"
        again = partial(load, source) if len(sources) > 1 else lambda model=model: model
        for drawn in prompts.each(model) if measure.prompted else [None]:
            text = drawn.documents[0] if prompts.whole and drawn is not None and drawn.documents is not None else None
            models.append(Subject(source, name, {}, drawn, again, text))
            made = provenance(model, models[-1].tokens)
            models[-1].key.update((part, made[part]) for part in KEY if part in made)
    named: dict[str, str] = {}
    for one in models:
        other = named.setdefault(file_name(one.name), one.source)
        if other is not one.source:
            raise InputError(
                f"'{other}' and '{one.source}' are both called '{one.name}'; give each model once, or rename a folder"
            )
    for line in dict.fromkeys(line for one in models if one.drawn for line in one.drawn.remarks):
        remark(line)
    return models


def result_files(measure: Measure, models: Collection[str], out: Path) -> list[Path]:
    """Where the results of these models are written, in their order."""
    names = [""] if len(models) == 1 else [f"-{file_name(model)}" for model in models]
    return [out / f"{measure.name}{name}.nc" for name in names]


def written(measure: Measure, models: Collection[str], out: Path) -> list[Path]:
    """All that is written."""
    suffixes = ("png", "svg", "md", *["html"] * (measure.shown is not None))
    return [*result_files(measure, models, out), *(out / f"{measure.name}.{suffix}" for suffix in suffixes)]


def write(measure: Measure, results: Results, out: Path) -> None:
    """Write results, tables and chart, all of it or nothing. Whole texts are in one file by model, and the longest drawn."""
    texts, drawn, whole = texts_of(results), results, results
    if texts:
        whole = {model: side_by_side([*some.values()]) for model, some in texts.items()}
        whole = {model: ds.assign_coords({TEXT: ("text", [*texts[model]])}) for model, ds in whole.items()}
        most, size = max(1, CHARTED // len(texts)), lambda item: -item[1].sizes["position"]
        longest = {model: dict(sorted(some.items(), key=size)[:most]) for model, some in texts.items()}
        drawn = {f"{model}, {text}": ds for model, some in longest.items() for text, ds in some.items()}
    with together():
        for ds, file in zip(whole.values(), result_files(measure, whole, out), strict=True):
            save(ds, file)
        write_tables(measure, results, out / f"{measure.name}.md")
        save_chart(measure.chart(drawn), out / f"{measure.name}.png")
        if measure.shown is not None:
            with atomic(out / f"{measure.name}.html") as file:
                file.write_text(page(measure, results), encoding="utf-8")


def page(measure: Measure, results: Results) -> str:
    """What a terminal shows of a measure's results, as a page of HTML that needs no other file."""
    assert measure.shown is not None
    console = Console(record=True, file=StringIO(), width=LINE, color_system="truecolor", highlight=False, emoji=False)
    for said in (measure.question, *measure.answer(results)):
        console.print(said, "", markup=False, sep="\n")
    for name, ds in results.items():
        console.print(Text(name, "bold"), measure.shown(ds), "", sep="\n")
    return console.export_html(inline_styles=True)
