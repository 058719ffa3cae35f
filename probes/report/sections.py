"""What stands on the page, section by section, from results alone: sentences, charts with their switches, tables.

A section whose results are missing says which command makes them. Templates decide how all of it looks.
"""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import plotly.graph_objects as go
import xarray as xr

from ..figures.interventions import KINDS
from ..figures.palette import (
    CYCLE,
    DECODED,
    DEPTH_COLORS,
    MODEL,
    NAMED_COLOR,
    OTHERS_COLOR,
    RECALL,
    SOURCES,
    THEORIES,
    TOYS,
    condition_style,
    model_colors,
)
from ..measures.match_result import judged
from ..results import theory_map
from ..results.curves import band, rms_log_error, rms_profiles, spearman
from ..results.dataset import quickly
from ..results.folder import Collected
from ..results.tables import Report, Table, number
from ..studies.bos_report import bos_report
from ..studies.decode import decode_report
from ..studies.match_report import match_report
from ..studies.reports import leakage_report, sinks_report, trajectory_report
from ..studies.retrieval import retrieval_report
from ..studies.study import AGREEMENT_COLUMNS, COLUMNS, agreement_cells, agreements, cells, described, summarize
from . import behaviour_charts, charts, toy_charts
from .heads import heads_data, loaded_from
from .plotting import metas

Results: TypeAlias = Mapping[str, xr.Dataset]
Given: TypeAlias = tuple[str, str, dict[str, Any]]  # a key of the traces' `meta`, its label, and how `choice` is made

TEXTS = tomllib.loads((Path(__file__).parent / "templates" / "texts.toml").read_text(encoding="utf-8"))
ONE_MODEL: Given = ("model", "Model", {})
SEVERAL: dict[str, Any] = {"several": True}
SCALAR = "--method scalar --conditions pretrained"
# What the other experiments show is drawn by their own figures.
DRAWN = {
    "previous-token": ("previous-token", "previous-token-hyperparameters"),
    "exchanges": ("exchanges", "exchanges-circles"),
    "remarks": ("remarks",),
    "position-bias": ("position-bias-sinks",),
    "rollout": ("rollout", "rollout-masks"),
    "petroglyph": ("petroglyph",),
    "births": ("births", "births-profiles"),
}


class Option(NamedTuple):
    """One value of a choice; `color` and `dash` draw its sample line."""

    value: str
    label: str
    shown: bool
    color: str = ""
    dash: str = ""


class Choice(NamedTuple):
    """What a reader can switch on a chart: a key of the traces' `meta`, several of its values at once or one."""

    key: str
    label: str
    several: bool
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Chart:
    """A figure with its switches, and words for those who do not see it."""

    name: str
    title: str
    figure: go.Figure
    reads: str  # how to read it
    choices: tuple[Choice, ...] = ()
    log: bool = False  # the vertical axis can be switched
    fraction: bool = False  # the horizontal axis can be switched to position fractions
    tall: bool = False
    heads: dict[str, Any] | None = None  # of the heat map, what a click shows

    @property
    def plot(self) -> dict[str, Any]:
        """What plotly draws, as plain data."""
        return json.loads(str(self.figure.to_json()))


class Picture(NamedTuple):
    """A figure of an experiment, drawn beforehand."""

    title: str
    kind: str  # and name of the result, as in "toy/sinks"
    file: str  # its stem


class Section(NamedTuple):
    """One part of the page."""

    name: str
    title: str
    question: str
    lead: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    missing: tuple[str, ...] = ()  # commands that fill it


def sections(collected: Collected) -> list[Section]:
    """All sections that show results, in the order of the page."""
    own = [_jacobian(collected), _theory(collected), _sinks(collected)]
    return [*own, *(_reported(collected, name, *made) for name, made in REPORTED.items()), _toys(collected)]


def _reported(
    collected: Collected, name: str, report: Callable[[Results], Report], drawn: Callable[[Results], Sequence[Chart]]
) -> Section:
    """The section of one kind of results, with the sentences and tables of its own report."""
    if not (results := collected[name]):
        return _section(name, missing=(_command(collected, name, name),))
    said = report(results)
    shown, tables = [*drawn(results)], [*said.tables]
    if name in IN_DEPTH and (more := collected[f"{IN_DEPTH[name][0]}/{name}"]):
        variant, others, wanted = IN_DEPTH[name]
        shown += others(more)
        some = [table for table in report(more).tables if table.title.startswith(wanted)]
        tables += [replace(table, title=f"{variant.capitalize()}: {table.title}") for table in some]
    return _section(name, shown, lead=(said.described, *said.lines), tables=tuple(tables))


def _section(name: str, charts_: Sequence[Chart] = (), **parts: Any) -> Section:
    """A section with its title and question."""
    return Section(name, **TEXTS["sections"][name], charts=tuple(charts_), **parts)


def _chart(name: str, figure: go.Figure, *choices: Given, **look: Any) -> Chart:
    """A chart with those of its choices that leave anything to choose; one value stays where its line is the legend."""
    made = [choice(figure, key, label, **given) for key, label, given in choices]
    kept = [one for one in made if len(one.options) > 1 or any(option.color or option.dash for option in one.options)]
    return Chart(name, figure=figure, choices=tuple(kept), **TEXTS["charts"][name], **look)


def _models(results: Mapping[str, Any]) -> Given:
    return "model", "Model", SEVERAL | {"colors": model_colors(results)}


def choice(
    figure: go.Figure,
    key: str,
    label: str,
    *,
    several: bool = False,
    shown: Sequence[str] | None = None,
    colors: Mapping[str, str] | None = None,
    dashes: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
) -> Choice:
    """The values that a figure's traces have under `key`: all are shown, or `shown`; of one at a time the first."""
    values = list(dict.fromkeys(str(meta[key]) for meta in metas(figure) if key in meta))
    chosen = [value for value in values if shown is None or value in shown]
    if not several:
        chosen = chosen[:1] or values[:1]
    looks = (labels or {}, colors or {}, dashes or {})
    options = []
    for value in values:
        label_, color, dash = (look.get(value, other) for look, other in zip(looks, (value, "", ""), strict=True))
        options.append(Option(value, label_, value in chosen, color, dash))
    return Choice(key, label, several, tuple(options))


def _jacobian(collected: Collected) -> Section:
    results, scalar = collected["jacobian"], collected["scalar"]
    if not results:
        return _section("jacobian", missing=(_command(collected, "jacobian", "jacobian"),))
    figure = charts.sensitivity(results, scalar)
    styles = {condition: condition_style(condition) for condition in (meta["condition"] for meta in metas(figure))}
    weights = {
        "labels": {condition: style.label for condition, style in styles.items()},
        "dashes": {condition: style.dash for condition, style in styles.items()},
    }
    dashes = {charts.called(theory): THEORIES[theory].dash for theory in ("score_path", "cesaro")}
    chart = _chart(
        "sensitivity",
        figure,
        _models(results),
        ("condition", "Weights", SEVERAL | weights),
        ("curve", "Curves", SEVERAL | {"shown": (charts.MEASURED,), "dashes": dashes}),
        ("detail", "Detail", {}),
        log=True,
        fraction=True,
        tall=True,
    )
    tables = [Table("The profiles in numbers", COLUMNS, [list(cells(row)) for row in summarize(results)])]
    if compared := _surrogate(results, scalar):
        columns = ("model", "condition", "rank correlation", "RMS log error, free scale", "prompts")
        tables.append(Table("The one-product surrogate against the whole norm", columns, compared))
    lead = (
        *(f"{words}." for words in quickly(results.values())),
        "At initialization (fresh weights of the same configuration) the profile is the architecture's own; the "
        "difference to the pretrained curve is what training did. Primacy compares the first 5 % of positions with the "
        "middle half, recency the last position with it.",
    )
    missing = () if scalar else (_command(collected, "jacobian", "scalar", SCALAR),)
    return _section("jacobian", [chart], lead=lead, tables=tuple(tables), missing=missing)


def _surrogate(results: Results, scalar: Results) -> list[list[str]]:
    """The scalar probe beside the norm of the same model, condition and length."""
    rows = []
    for name, ds in scalar.items():
        whole = rms_profiles(results[name]) if name in results else {}
        for condition, runs in rms_profiles(ds).items():
            if condition not in whole or len(whole[condition][0].mean) != len(runs[0].mean):
                continue
            one, other = (band([run.mean for run in found]).centre for found in (runs, whole[condition]))
            same = ds.attrs.get("tokens_sha256") == results[name].attrs.get("tokens_sha256")
            correlation, error = spearman(one, other), rms_log_error(one, other, free_scale=True)
            label = condition_style(condition).label
            prompts = "the same" if same else "others"
            rows.append([name, label, number(correlation, ".3f"), number(error, ".3f"), prompts])
    return rows


def _theory(collected: Collected) -> Section:
    results, maps = collected["theory"], collected["map"]
    missing = () if results else (_command(collected, "theory", "theory"),)
    if not maps:
        missing += (f"headwater map --out {collected.root / 'theory'}",)
    shown, tables, lead = [], [], []
    if results:
        shown.append(_predictions(results))
        lead.append(described(results))
        rows = [list(agreement_cells(row)) for row in agreements(results)]
        tables.append(Table("How far each theory is off", AGREEMENT_COLUMNS, rows))
    for name, ds in maps.items():
        colors = {f"{blocks} blocks": color for blocks, color in DEPTH_COLORS.items()}
        colors |= {"other changes": OTHERS_COLOR, "usual models": NAMED_COLOR}
        ends = {"labels": {"primacy": "first positions", "recency": "last position"}}
        choices: list[Given] = [("end", "End", ends), ("places", "Models", SEVERAL | {"colors": colors})]
        shown.append(replace(_chart("birth", charts.birth(ds), *choices, log=True, tall=True), name=f"birth-{name}"))
        lead.append(f"The map: {theory_map.described(ds)}")
        places = [list(theory_map.cells(row)) for row in theory_map.rows(ds)]
        tables.append(Table("Every place of the map", theory_map.COLUMNS, places))
    return _section("theory", shown, lead=tuple(lead), tables=tuple(tables), missing=missing)


def _predictions(results: Results) -> Chart:
    curves = SEVERAL | {
        "colors": {charts.called(theory): style.color for theory, style in THEORIES.items()},
        "dashes": {charts.called(theory): style.dash for theory, style in THEORIES.items()},
    }
    labels = {condition: condition_style(condition).label for condition in ("pretrained", "init", "init-nope")}
    fresh = ("init",) if any("init" in rms_profiles(ds) for ds in results.values()) else None
    weights: Given = ("condition", "Weights", {"shown": fresh, "labels": labels})
    look: dict[str, Any] = {"log": True, "fraction": True, "tall": True}
    return _chart("theories", charts.theories(results), ONE_MODEL, weights, ("curve", "Curves", curves), **look)


def _sinks(collected: Collected) -> Section:
    results, course = collected["sinks"], charts.steps(collected["steps"])
    shown: list[Chart] = []
    parts: dict[str, Any] = {"missing": () if results else (_command(collected, "sinks", "sinks"),)}
    quantity: Given = ("quantity", "Quantity", {})
    if results:
        report = sinks_report(results)
        parts |= {"lead": (report.described,), "tables": tuple(report.tables)}
        shown.append(_chart("keys", charts.keys(results), _models(results), quantity))
        figure, choices = charts.heads(results), (ONE_MODEL, ("metric", "Shade", {}))
        shown.append(_chart("heads", figure, *choices, tall=True, heads=heads_data(results)))
    if course:
        shown.append(_chart("training", charts.training(collected["steps"]), _models(course), quantity))
    else:
        parts["missing"] += (f"headwater sinks MODEL@step0 MODEL@step100 MODEL --out {collected.root / 'steps'}",)
    return _section("sinks", shown, **parts)


def _trajectory(results: Results) -> list[Chart]:
    models = _models(results)
    where: Given = ("where", "Where", SEVERAL | {"dashes": {"position 0": "solid", "others": "dash"}})
    shaded: Given = ("shaded", "Shaded", SEVERAL | {"shown": (), "dashes": {charts.QUANTILES: "solid"}})
    return [
        _chart("norms", charts.norms(results), models, where, ("first", "Prompts", {}), log=True),
        _chart("cosines", charts.cosines(results), models, ("place", "Starts at", {}), shaded),
    ]


def _leakage(results: Results) -> list[Chart]:
    labels = {"mask": "causal mask", "residual": "residual stream", "spread": "spread of prompts"}
    source: Given = ("source", "Source", SEVERAL | {"colors": SOURCES, "labels": labels})
    band_: Given = ("band", "Queries", {})
    return [
        _chart("sources", charts.sources(results), ("form", "Form", {}), band_, source),
        _chart("depth", charts.depth(results), _models(results), ("part", "Part", {}), band_),
    ]


def _bos_swap(results: Results) -> list[Chart]:
    replaced: tuple[Given, ...] = (_models(results), ("replacement", "Replaced by", {}))
    sink: Given = ("sink", "Constant sink", {})
    return [
        _chart("removed", charts.removed(results), *replaced, sink),
        _chart("components", charts.components(results), *replaced, sink),
        _chart("losses", charts.losses(results), *replaced, fraction=True),
    ]


def _retrieval(results: Results) -> list[Chart]:
    quantity: Given = ("quantity", "Quantity", {})
    asked: Given = ("asked", "Key", SEVERAL | {"dashes": {style.label: style.dash for style in RECALL.values()}})
    return [_chart("recall", behaviour_charts.recall(results), _models(results), quantity, asked)]


def _followed(results: Results) -> list[Chart]:
    return [_chart("followed", behaviour_charts.followed(results), _models(results), tall=True)]


def _interventions(results: Results) -> list[Chart]:
    looks = SEVERAL | {"colors": {style.label: style.color for style in KINDS.values()}}
    choices: list[Given] = [ONE_MODEL, ("quantity", "Quantity", {}), ("kind", "What is changed", looks)]
    return [_chart("interventions", behaviour_charts.interventions(results), *choices, tall=True)]


def _decode(results: Results) -> list[Chart]:
    kinds: Given = ("positions", "Positions", SEVERAL | {"dashes": {one.label: one.dash for one in DECODED.values()}})
    return [_chart("decoded", behaviour_charts.decoded(results), _models(results), kinds)]


def _match(results: Results) -> list[Chart]:
    state: Given = ("state", "Model's weights", {"labels": {"init": "fresh"}})
    results = {name: judged(ds) for name, ds in results.items()}
    agreements_ = _chart("agreements", toy_charts.agreements_of(results), _models(results), state, tall=True)
    return [_beside(results), agreements_]


REPORTED: dict[str, tuple[Callable[[Results], Report], Callable[[Results], Sequence[Chart]]]] = {
    "trajectory": (trajectory_report, _trajectory),
    "leakage": (leakage_report, _leakage),
    "bos-swap": (bos_report, _bos_swap),
    "retrieval": (retrieval_report, _retrieval),
    "decode": (decode_report, _decode),
    "match": (match_report, _match),
}


# By section: the variant whose results are shown beside its own, their charts, and how the titles of their tables begin.
IN_DEPTH: dict[str, tuple[str, Callable[[Results], Sequence[Chart]], tuple[str, ...]]] = {
    "retrieval": ("mechanism", _followed, ("Sensitivity of the value", "What it says of recall")),
    "bos-swap": ("interventions", _interventions, ("Sinks, loss, next token", "Removed under every definition")),
}


def _beside(results: Results) -> Chart:
    figure = toy_charts.beside(results)
    styles = {style.label: style for style in (*MODEL.values(), *TOYS.values())}
    theory = {
        label: THEORIES["cesaro" if charts.CESARO in label else "score_path"].color
        for label in toy_charts.of_theory(figure)
    }
    curves = SEVERAL | {
        "shown": [label for label in styles if label != TOYS["in-context"].label],
        "colors": {label: style.color for label, style in styles.items()} | theory,
        "dashes": {style.label: style.dash for style in TOYS.values()} | dict.fromkeys(theory, "dot"),
    }
    quantity, variant = ("quantity", "Quantity", {}), ("variant", "Toys", {"labels": {"matched": "matching"}})
    return _chart("beside", figure, ONE_MODEL, quantity, ("curve", "Curves", curves), variant, log=True, tall=True)


OF_GAPS = {"toy": "", "toy/long": " After longer training"}


def _toys(collected: Collected) -> Section:
    results = collected["toy"]
    shown = []
    if (ds := results.get("retrieval")) is not None:
        colors = {f"width {width}": CYCLE[n % len(CYCLE)] for n, width in enumerate(ds["width"].values)}
        widths: Given = ("width", "Curves", SEVERAL | {"colors": colors})
        depth, variant = ("layers", "Depth", {}), ("variant", "With", {})
        shown.append(_chart("retrieval", toy_charts.retrieval(ds), depth, variant, widths))
    for kind in OF_GAPS:
        if (ds := collected[kind].get("position-bias")) is not None:
            shown.append(_gaps(kind, ds))
    pictures = tuple(
        Picture(file.replace("-", " ").capitalize(), name, file)
        for name, files in DRAWN.items()
        if name in results
        for file in files
    )
    missing = () if results else (f"headwater toy all --out {collected.root / 'toy'}",)
    return _section("toys", shown, pictures=pictures, missing=missing)


def _gaps(kind: str, ds: xr.Dataset) -> Chart:
    looks = {
        "colors": model_colors([str(one) for one in ds["positional"].values]),
        "labels": {"none": "no encoding", "decay": "decay mask", "rope": "RoPE"},
    }
    positional: Given = ("positional", "Positions", SEVERAL | looks)
    answers, setting = ("training", "Training answers", {}), ("setting", "Setting", {})
    chart = _chart("gaps", toy_charts.gaps(ds), answers, setting, positional)
    return replace(chart, name=f"gaps-{kind.replace('/', '-')}", title=chart.title + OF_GAPS[kind])


def _command(collected: Collected, command: str, folder: str, options: str = "") -> str:
    """What makes results of a kind, for the models of the other kinds and with the settings those were made with."""
    kinds = ("jacobian", "theory", "sinks", "trajectory", "leakage", "bos-swap")
    found: dict[str, str] = {}
    settings: dict[str, set[str]] = {}
    for kind in kinds:
        for name, ds in collected[kind].items():
            found.setdefault(name, loaded_from(ds, name))
            for option, value in _settings(ds, command).items():
                settings.setdefault(option, set()).add(value)
    names = list(found.values()) or ["MODEL"]
    same = [word for option, values in settings.items() if len(values) == 1 for word in (f"--{option}", *values)]
    return shlex.join(["headwater", command, *names, *same, *options.split(), "--out", str(collected.root / folder)])


def _settings(ds: xr.Dataset, command: str) -> dict[str, str]:
    """Options that the command which made a result was given, and which `command` takes, too."""
    shared = ["length", "text", "dataset", "split", "column", "chat", "first", "dtype"]
    shared += ["initialization"] * (command in ("jacobian", "theory"))
    given = dict(pairwise(shlex.split(str(ds.attrs.get("command", "")))))
    return {option: given[f"--{option}"] for option in shared if f"--{option}" in given}
