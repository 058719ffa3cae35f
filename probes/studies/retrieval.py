"""The study behind `headwater retrieval`: what models recall by depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xarray as xr
from torch import Tensor

from ..data.prompts import Drawn
from ..data.recall import Maker, Rung, read_template
from ..figures.retrieval import retrieval_figure
from ..measures import mechanism_numbers
from ..measures import retrieval as measure
from ..measures.recall_numbers import Recall, repeats, shape
from ..models.view import View
from ..results.dataset import options_of
from ..results.tables import Report, Table, interval, write_report
from ..results.ushape import SHORTEST
from ..run.progress import Advance
from ..run.store import Store
from .runner import Loading, Prompts, Results, Study, Subject, Tell, Told, Unit, planned, run, write_results

NAME = "retrieval"
BY_DEPTH = (
    "model",
    "depth",
    "pair",
    "key not there",
    "other pairs",
    "position 0",
    "through attention to position 0",
    "norm",
)
COLUMNS = ("model", "recall of", "exact", "log p (nat)", "gain (nat)", "primacy", "recency", "least at")
SHOWN = ("pair", "control", "others", "position 0", "through_first", "norm")
MECHANISM = (
    " Sensitivity: of the value's log odds against the others (nat), per relative change of the embeddings of the pair's "
    "line, of it behind a list without the key, of another line, of position 0; the pair's paths through the weights on "
    "position 0; norm: of the stream, whatever the answer. Geometric means over contexts. Nothing: the 90 % interval lies "
    "within margins fixed beforehand (rank correlation 0.3, AUC 0.35 to 0.65, explained variance 0.02); effect: the 95 % "
    "interval excludes it."
)


@dataclass(frozen=True, kw_only=True)
class Lists(Prompts):
    """Contexts of key-value pairs in the place of windows of text; `options` are those of the measure."""

    options: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        measure.check(**self.options)
        self._form()

    def drawn(self, model: View) -> Drawn:
        """The first couple of the easiest rung, by which a resumed run knows that it is the same."""
        chosen = self.options
        how = {name: chosen[name] for name in ("first", "chat", "orders")}
        maker = Maker(model, self._rungs()[0], self._form(), **how)
        return Drawn(torch.tensor(maker.couple(chosen["seed"], 0).contexts), dict(maker.policy), ())

    def _rungs(self) -> list[Any]:
        return measure.ladder(*(self.options[name] for name in ("pairs", "keys", "digits")))

    def _form(self) -> Any:
        self._rungs()
        return read_template(self.options["template"])


def retrieval(
    sources: Sequence[str],
    out: str | Path,
    options: Mapping[str, Any],
    *,
    advance: Advance | None = None,
    told: Told | None = None,
    **loading: Any,
) -> Results:
    """Measure recall of every model; write results, figure and table, return the results by model name.

    Writes `retrieval.nc` for one model or `retrieval-MODEL.nc` for each of several, `retrieval.png`, `retrieval.svg` and
    `retrieval.md`, all of it at the end. After an interruption it resumes with what was measured.

    Args:
        sources: models, as `probes.load` takes them.
        out: folder.
        options: of `probes.retrieval`, all of them but `progress`.
        advance, told: as in `runner.run`.
        loading: fields of `runner.Loading`.

    Raises:
        InputError: bad input, found before anything is measured.
    """
    out, options = Path(out), dict(options)

    def units(model: View, name: str, tokens: Tensor) -> list[Unit]:
        def made(model: View, subject: Subject, tell: Tell, pieces: Store) -> xr.Dataset:
            return measure.retrieval(model, pieces=pieces, progress=tell, **options)

        return [Unit(f"{name} {NAME}", options | {"template": _content(options["template"])}, made)]

    def line(model: View, one: Subject) -> str:
        length, mechanism = one.tokens.shape[1], bool(options.get("mechanism"))
        climbed = len(measure.ladder(*(options[name] for name in ("pairs", "keys", "digits")))) > 1
        needed = measure.memory(model, length, length, mechanism=mechanism)
        return planned(one.name, model, needed, " for the easiest lists" * climbed)

    def write(results: Results) -> None:
        write_results(results, out, NAME, retrieval_figure)
        write_report(retrieval_report(results), out / f"{NAME}.md")

    study = Study(NAME, units, write, line=line, files=[f"{NAME}.md"])
    return run(study, sources, out, Lists(options=options), Loading(**loading), advance=advance, told=told)


def _content(template: str) -> str:
    """A template's name, or what its file holds: another file of that name is another template."""
    path = Path(template)
    return path.read_text(encoding="utf-8") if path.is_file() else template


def retrieval_report(results: Mapping[str, xr.Dataset]) -> Report:
    """Recall of every model, the U-shape of it, and the curve by depth."""
    rows, curve, lines = [], [], []
    for name, ds in results.items():
        found, options = shape(ds), options_of(ds)
        what = str(Rung(options["pairs"], options["keys"], options["digits"]))
        rows.append([name, what, *(interval(*one[:3]) for one in found)])
        lines.append(f"{name}: {_said(found)}")
        if "pair" in ds and ds.sizes["depth"] == options["pairs"]:
            again = interval(*repeats(ds)[:3])
            lines.append(
                f"{name}: log p of a pair against its own in another order, depth means taken out: r = {again}"
            )
        if ds.sizes["rung"]:
            climbed = zip(ds["rung"].values, ds["pilot_exact"].values, strict=True)
            lines.append(f"{name}, exact in the pilot: " + "; ".join(f"{rung}: {share:.2f}" for rung, share in climbed))
        for part in ds["depth"].values:
            at = ds.sel(depth=part)
            cells = [f"{float(at[one].mean()):.2f}" for one in ("log_p", "control", "exact")]
            curve.append([name, str(part), str(int(at["place"])), *cells])
    ds = next(iter(results.values()))
    made = ", ".join(ds.attrs[name] for name in ("backend", "dtype", "device"))
    described = (
        f"{ds.sizes['context']} contexts, template '{options_of(ds)['template']}', {made}. Exact: share of values of which "
        "every token is the most probable; gain: log p against the same question behind a list without the key; primacy, "
        "recency: probability (geometric mean) of the first 5 % of the pairs and of the last one against the median of the "
        "middle half; least at: where recall is lowest, from 0 (first) to 1 (last). 95 % intervals over couples of "
        "contexts, or over sets of couples with the same pairs."
    )
    tables = [
        Table("Recall by depth", ("model", "depth", "token", "log p", "log p without key", "exact"), curve),
        Table("Recall", COLUMNS, rows),
    ]
    if traced := {name: ds for name, ds in results.items() if "sensitivity" in ds}:
        described += MECHANISM
        tables[1:1] = _mechanism(traced)
    return Report("What is recalled, by the depth at which it stands", described, tables, lines)


def _mechanism(results: Results) -> list[Table]:
    """What the log odds depend on at the traced depths, and what that says, model by model."""
    rows, said = [], []
    for name, ds in results.items():
        columns = [mechanism_numbers.by_depth(ds, one) for one in SHOWN]
        for n, part in enumerate(ds["traced_depth"].values):
            rows.append([name, str(part), *(interval(*(end[n] for end in column)) for column in columns)])
        for one in mechanism_numbers.statements(ds):
            said.append([name, one.name, interval(*one.number[:3]), one.verdict])
    return [
        Table("Sensitivity of the value's log odds", BY_DEPTH, rows),
        Table("What it says of recall", ("model", "number", "value", "verdict"), said),
    ]


def _said(found: Recall) -> str:
    """Whether recall is a U, in a sentence."""
    sides = [("first pairs", found.primacy), ("last pair", found.recency)]
    if any(side.low != side.low for _, side in sides):
        return f"no U can be told; that takes {SHORTEST} depths and two couples of contexts (with other pairs), or more"
    ways = {name: "better" if side.low > 1 else "worse" if side.high < 1 else "" for name, side in sides}
    said = [f"the {name} {way} than the middle" for name, way in ways.items() if way]
    unclear = [f"the {name}" for name, way in ways.items() if not way]
    said += [f"no clear difference between {' or '.join(unclear)} and the middle"] * bool(unclear)
    return f"recall: {'; '.join(said)}: {'a U' if set(ways.values()) == {'better'} else 'not clearly a U'}"
