"""What stands on the page, section by section, from results alone: sentences, charts with their switches, tables.

A section whose results are missing says which command makes them. Templates decide how all of it looks.
"""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

import plotly.graph_objects as go
import xarray as xr

from ..figures.style import condition_style
from ..measures.matched import judged
from ..results import theory_map
from ..results.collected import Collected
from ..results.curves import band, profiles, rms_log_error, spearman
from ..results.dataset import quickly, recorded
from ..results.tables import Table, number
from ..studies.matched import match_report
from ..studies.reports import bos_report, leakage_report, sinks_report, trajectory_report
from ..studies.study import AGREEMENT_COLUMNS, COLUMNS, agreement_cells, agreements, cells, described, summarize
from . import charts

Results: TypeAlias = Mapping[str, xr.Dataset]


@dataclass(frozen=True)
class Option:
    """One value of a choice; `color` and `dash` draw its sample line."""

    value: str
    label: str
    shown: bool
    color: str = ""
    dash: str = ""


@dataclass(frozen=True)
class Choice:
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


@dataclass(frozen=True)
class Picture:
    """A figure of an experiment, drawn beforehand."""

    title: str
    kind: str  # and name of the result, as in "toy/sinks"
    file: str  # its stem


@dataclass(frozen=True)
class Section:
    """One part of the page."""

    name: str
    title: str
    question: str
    lead: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    missing: tuple[str, ...] = field(default=())  # commands that fill it


def sections(collected: Collected) -> list[Section]:
    """All sections that show results, in the order of the page."""
    return [
        _jacobian(collected),
        _theory(collected),
        _sinks(collected),
        _trajectory(collected),
        _leakage(collected),
        _bos_swap(collected),
        _match(collected),
        _toys(collected),
    ]


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
    values = list(dict.fromkeys(str(meta[key]) for meta in charts.metas(figure) if key in meta))
    chosen = [value for value in values if shown is None or value in shown]
    if not several:
        chosen = chosen[:1] or values[:1]
    options = tuple(
        Option(
            value,
            (labels or {}).get(value, value),
            value in chosen,
            (colors or {}).get(value, ""),
            (dashes or {}).get(value, ""),
        )
        for value in values
    )
    return Choice(key, label, several, options)


def _models(figure: go.Figure, results: Results, *, several: bool = True) -> Choice:
    return choice(figure, "model", "Model", several=several, colors=charts.model_colors(results) if several else None)


def _of(*choices: Choice) -> tuple[Choice, ...]:
    """Those that leave anything to choose; one value stays where its sample line is the legend."""
    return tuple(
        one for one in choices if len(one.options) > 1 or any(option.color or option.dash for option in one.options)
    )


# ------------------------------------------------------------------------------------------------------------ jacobian


def _jacobian(collected: Collected) -> Section:
    results, scalar = collected["jacobian"], collected["scalar"]
    question = "How strongly does the last position's residual stream depend on each input position?"
    if not results:
        return Section(
            "jacobian", "Position sensitivity", question, missing=(_command(collected, "jacobian", "jacobian"),)
        )
    figure = charts.sensitivity(results, scalar)
    conditions = dict.fromkeys(meta["condition"] for meta in charts.metas(figure))
    chart = Chart(
        "sensitivity",
        "Sensitivity by input position",
        figure,
        "A line is the geometric mean over prompts and fresh models; the band reaches from the smallest fresh model to "
        "the largest, or two standard errors over documents around a single run. Zero, which lies beyond a sliding "
        "window's reach, has no place on a logarithmic axis.",
        _of(
            _models(figure, results),
            choice(
                figure,
                "condition",
                "Weights",
                several=True,
                labels={condition: condition_style(condition).label for condition in conditions},
                dashes=charts.DASHES,
            ),
            choice(
                figure,
                "curve",
                "Curves",
                several=True,
                shown=(charts.MEASURED,),
                dashes={
                    charts.KERNEL: charts.THEORY_DASHES["score_path"],
                    charts.CESARO: charts.THEORY_DASHES["cesaro"],
                },
            ),
            choice(figure, "detail", "Detail"),
        ),
        log=True,
        fraction=True,
        tall=True,
    )
    tables = [Table("The profiles in numbers", COLUMNS, [list(cells(row)) for row in summarize(results)])]
    compared = _surrogate(results, scalar)
    if compared:
        columns = ("model", "condition", "rank correlation", "RMS log error, free scale", "prompts")
        tables.append(Table("The one-product surrogate against the whole norm", columns, compared))
    lead = (
        *(f"{words}." for words in quickly(results.values())),
        "At birth (fresh weights of the same configuration) the profile is the architecture's own; the difference to "
        "the pretrained curve is what training did. Primacy compares the first 5 % of positions with the middle "
        "half, recency the last position with it.",
    )
    missing = () if scalar else (_command(collected, "jacobian", "scalar", "--method scalar --conditions pretrained"),)
    return Section("jacobian", "Position sensitivity", question, lead, (chart,), tuple(tables), missing=missing)


def _surrogate(results: Results, scalar: Results) -> list[list[str]]:
    """The scalar probe beside the norm of the same model, condition and length."""
    rows = []
    for name, ds in scalar.items():
        whole = profiles(results[name]) if name in results else {}
        for condition, runs in profiles(ds).items():
            if condition not in whole or len(whole[condition][0].mean) != len(runs[0].mean):
                continue
            one, other = (band([run.mean for run in found]).centre for found in (runs, whole[condition]))
            same = ds.attrs.get("tokens_sha256") == results[name].attrs.get("tokens_sha256")
            correlation, error = spearman(one, other), rms_log_error(one, other, free_scale=True)
            label = condition_style(condition).label
            rows.append(
                [name, label, number(correlation, ".3f"), number(error, ".3f"), "the same" if same else "others"]
            )
    return rows


# -------------------------------------------------------------------------------------------------------------- theory


def _theory(collected: Collected) -> Section:
    results, maps = collected["theory"], collected["map"]
    question = "Can the profile be predicted from the architecture, without fitting anything?"
    missing = () if results else (_command(collected, "theory", "theory"),)
    if not maps:
        missing += (f"headwater map --out {collected.root / 'theory'}",)
    shown, tables, lead = [], [], []
    if results:
        figure = charts.theories(results)
        colors = {style.label: style.color for style in charts.THEORIES.values()}
        colors |= {charts.CESARO: charts.THEORIES["cesaro"].color}
        labels = {condition: condition_style(condition).label for condition in ("pretrained", "init", "init-nope")}
        dashes = {style.label: charts.THEORY_DASHES[name] for name, style in charts.THEORIES.items()}
        dashes[charts.CESARO] = charts.THEORY_DASHES["cesaro"]
        conditions = ("init",) if any("init" in profiles(ds) for ds in results.values()) else None
        shown.append(
            Chart(
                "theories",
                "Predictions beside measurement",
                figure,
                "Kernels predict the height of the curve, too. N^L has a fitted α and a free scale. On pretrained "
                "weights the kernels are baselines: what random directions of the same sizes would give.",
                _of(
                    _models(figure, results, several=False),
                    choice(figure, "condition", "Weights", shown=conditions, labels=labels),
                    choice(figure, "curve", "Curves", several=True, colors=colors, dashes=dashes),
                ),
                log=True,
                fraction=True,
                tall=True,
            )
        )
        lead.append(described(results))
        rows = [list(agreement_cells(row)) for row in agreements(results)]
        tables.append(Table("How far each theory is off", AGREEMENT_COLUMNS, rows))
    for name, ds in maps.items():
        figure = charts.birth(ds)
        colors = {f"{blocks} blocks": color for blocks, color in charts.DEPTH_COLORS.items()}
        colors |= {"other changes": charts.GREY, "usual models": charts.PURPLE}
        shown.append(
            Chart(
                f"birth-{name}",
                "Where the U-shape at birth holds",
                figure,
                "Each mark is a fresh model. Attention is uniform at birth only while logits are small, and their "
                "deviation is about d σ². An end counts when it stands above the dotted line; a U has both. Windows "
                "too short for the first positions to reach the end have next to nothing there, below the frame.",
                _of(
                    choice(figure, "end", "End", labels={"primacy": "first positions", "recency": "last position"}),
                    choice(figure, "places", "Models", several=True, colors=colors),
                ),
                log=True,
                tall=True,
            )
        )
        lead.append(f"The map: {theory_map.described(ds)}")
        places = [list(theory_map.cells(row)) for row in theory_map.rows(ds)]
        tables.append(Table("Every place of the map", theory_map.COLUMNS, places))
    return Section("theory", "Theory", question, tuple(lead), tuple(shown), tuple(tables), missing=missing)


# --------------------------------------------------------------------------------------------------------------- sinks


def _sinks(collected: Collected) -> Section:
    results, course = collected["sinks"], collected["steps"]
    question = "Which heads look at position 0, which of them use what is there, and what happens to the others?"
    shown, tables, lead = [], [], []
    missing = () if results else (_command(collected, "sinks", "sinks"),)
    if results:
        report = sinks_report(results)
        lead.append(report.described)
        figure = charts.keys(results)
        shown.append(
            Chart(
                "keys",
                "Which keys are sinks",
                figure,
                "Means over prompts, blocks and heads. Dotted: what uniform attention under the same masks would "
                "give. A sink is decided per prompt, before averaging.",
                _of(_models(figure, results), choice(figure, "quantity", "Quantity")),
            )
        )
        figure = charts.heads(results)
        shown.append(
            Chart(
                "heads",
                "Head by head",
                figure,
                "Choose a cell, or a head from the list, for all of its numbers, and for its pattern where the "
                "result holds one.",
                _of(_models(figure, results, several=False), choice(figure, "metric", "Shade")),
                tall=True,
                heads=heads_data(results),
            )
        )
        tables += report.tables
    if charts.steps(course):
        figure = charts.training(course)
        shown.append(
            Chart(
                "training",
                "Through training",
                figure,
                "The same measurement on weights kept along the way; step 0 is before training. Dotted: uniform "
                "attention.",
                _of(
                    choice(figure, "model", "Model", several=True, colors=charts.model_colors(charts.steps(course))),
                    choice(figure, "quantity", "Quantity"),
                ),
            )
        )
    else:
        steps = f"headwater sinks MODEL@step0 MODEL@step100 MODEL --out {collected.root / 'steps'}"
        missing += (steps,)
    return Section("sinks", "Sinks", question, tuple(lead), tuple(shown), tuple(tables), missing=missing)


def heads_data(results: Results) -> dict[str, Any]:
    """By model: numbers of every head by "block.head", patterns as bytes in base64, and which command keeps more of them."""
    found = {}
    for name, ds in results.items():
        patterns = {
            f"{layer}.{head}": {"size": len(values), "bytes": base64.b64encode(values.tobytes()).decode("ascii")}
            for (layer, head), values in charts.pattern_bytes(ds).items()
        }
        numbers = {f"{layer}.{head}": rows for (layer, head), rows in charts.head_numbers(ds).items()}
        more = shlex.join(["headwater", "sinks", _loaded_from(ds, name), "--pictures", str(ds["attends"].size)])
        best = ds["attends"].transpose("layer", "head").stack(cell=("layer", "head")).argmax("cell").item()
        layer, head = divmod(best, ds.sizes["head"])
        first = f"{ds['layer'].values[layer]}.{ds['head'].values[head]}"
        found[name] = {"heads": numbers, "patterns": patterns, "more": more, "first": first}
    return found


# ---------------------------------------------------------------------------------------------------------- trajectory


def _trajectory(collected: Collected) -> Section:
    results = collected["trajectory"]
    question = "Position 0 sees nothing but itself: what becomes of it, block by block?"
    if not results:
        return Section("trajectory", "Position 0", question, missing=(_command(collected, "trajectory", "trajectory"),))
    report = trajectory_report(results)
    norm, cosine = charts.norms(results), charts.cosines(results)
    shown = (
        Chart(
            "norms",
            "Norm of the stream",
            norm,
            "Medians over prompts (and, for the others, positions). Layer l is what block l reads, the last one what "
            "the final norm reads.",
            _of(
                _models(norm, results),
                choice(norm, "where", "Where", several=True, dashes={"position 0": "solid", "others": "dash"}),
                choice(norm, "first", "Prompts"),
            ),
            log=True,
        ),
        Chart(
            "cosines",
            "Do different first tokens come to one path?",
            cosine,
            "Mean cosine over pairs of first tokens; 1 means that the token no longer matters.",
            _of(
                _models(cosine, results),
                choice(cosine, "place", "Starts at"),
                choice(cosine, "shaded", "Shaded", several=True, shown=(), dashes={charts.QUANTILES: "solid"}),
            ),
        ),
    )
    lead = (report.described, *report.lines)
    return Section("trajectory", "Position 0", question, lead, shown, tuple(report.tables))


# ------------------------------------------------------------------------------------------------------------- leakage


def _leakage(collected: Collected) -> Section:
    results = collected["leakage"]
    question = (
        "How much does attention depend on where a query stands, and does the mask or the residual stream tell it?"
    )
    if not results:
        return Section("leakage", "Leakage", question, missing=(_command(collected, "leakage", "leakage"),))
    report = leakage_report(results)
    source, depth = charts.sources(results), charts.depth(results)
    labels = {"mask": "causal mask", "residual": "residual stream", "spread": "spread of prompts"}
    shown = (
        Chart(
            "sources",
            "Where it comes from",
            source,
            "Shapley values as shares of the leakage, with 95 % bootstrap intervals over prompts. A share may lie "
            "above 100 % or below 0 where the sources work against each other. Position 0's logit, as far as it is the "
            "same for all queries (the constant sink), is no position and counts with the mask; left in, it counts with "
            "the residual stream. No bar: the total is within noise, or the null check fails.",
            _of(
                choice(source, "form", "Form"),
                choice(source, "band", "Queries"),
                choice(source, "source", "Source", several=True, colors=charts.SOURCE_COLORS, labels=labels),
            ),
        ),
        Chart(
            "depth",
            "Block by block",
            depth,
            "Log form, means over heads, with 95 % intervals. In block 0 the residual component is a null check: "
            "streams carry no position there yet. Beside the total, its nulls over the whole model: uniform attention under "
            "the same mask, fresh weights, and query labels shuffled (97.5 % quantile).",
            _of(_models(depth, results), choice(depth, "part", "Part"), choice(depth, "band", "Queries")),
        ),
    )
    lead = (report.described, *report.lines)
    return Section("leakage", "Leakage", question, lead, shown, tuple(report.tables))


# ------------------------------------------------------------------------------------------------------------ BOS swap


def _bos_swap(collected: Collected) -> Section:
    results = collected["bos-swap"]
    question = "What changes when something else stands at position 0?"
    if not results:
        return Section(
            "bos-swap", "Position 0 swapped", question, missing=(_command(collected, "bos-swap", "bos-swap"),)
        )
    report = bos_report(results)
    removed, before, loss = charts.removed(results), charts.components(results), charts.losses(results)
    sink = ("sink", "Constant sink")
    shown = (
        Chart(
            "removed",
            "How much of the residual component goes",
            removed,
            "1 - after / before, with 95 % bootstrap intervals over prompts, which may reach beyond the frame; "
            "negative where the swap adds to it. No bar: these prompts do not tell the component from noise.",
            _of(_models(removed, results), choice(removed, "replacement", "Replaced by"), choice(removed, *sink)),
        ),
        Chart(
            "components",
            "Before and after",
            before,
            "The residual component V(X) of the log form: pale before the swap, full after it. The constant sink is "
            "position 0's logit as far as it is the same for all queries.",
            _of(_models(before, results), choice(before, "replacement", "Replaced by"), choice(before, *sink)),
        ),
        Chart(
            "losses",
            "What it costs in prediction",
            loss,
            "Change of the next-token loss, with its 95 % interval, by position of the token that predicts.",
            _of(_models(loss, results), choice(loss, "replacement", "Replaced by")),
            fraction=True,
        ),
    )
    return Section("bos-swap", "Position 0 swapped", question, (report.described,), shown, tuple(report.tables))


# ------------------------------------------------------------------------------------------------- toys beside models


def _match(collected: Collected) -> Section:
    question = "Does a small transformer of the same architecture, trained on a toy task, do the same with position?"
    title = "Toys beside models"
    if not collected["match"]:
        return Section("match", title, question, missing=(_command(collected, "match", "match"),))
    results = {name: judged(ds) for name, ds in collected["match"].items()}
    report = match_report(results)
    curves, errors = charts.beside(results), charts.agreements_of(results)
    styles = {style.label: style for style in (*charts.MODEL.values(), *charts.TOYS.values())}
    shown = [label for label in styles if label != charts.TOYS["in-context"].label]
    theory = {
        label: charts.THEORIES["cesaro" if charts.CESARO in label else "score_path"].color
        for label in charts.of_theory(curves)
    }
    charts_ = (
        Chart(
            "beside",
            "Model and toys on one axis",
            curves,
            "Solid: the model; dashed: toys of its depth, heads, mask and positional encoding, or of all but one of "
            "them. A sensitivity is drawn against its own geometric mean, a mean weight against uniform attention.",
            _of(
                _models(curves, results, several=False),
                choice(curves, "quantity", "Quantity"),
                choice(
                    curves,
                    "curve",
                    "Curves",
                    several=True,
                    shown=shown,
                    colors={label: style.color for label, style in styles.items()} | theory,
                    dashes={style.label: "dash" for style in charts.TOYS.values()} | dict.fromkeys(theory, "dot"),
                ),
                choice(curves, "variant", "Toys", labels={"matched": "matching"}),
            ),
            log=True,
            tall=True,
        ),
        Chart(
            "agreements",
            "How far from the model's profile",
            errors,
            "RMS log error with a free scale where both reach, with 95 % bootstrap intervals over prompts and seeds; "
            "shorter is nearer.",
            _of(_models(errors, results), choice(errors, "state", "Model's weights", labels={"init": "fresh"})),
            tall=True,
        ),
    )
    return Section("match", title, question, (report.described, *report.lines), charts_, tuple(report.tables))


# ---------------------------------------------------------------------------------------------------------------- toys

# What the other experiments show is drawn by their own figures.
DRAWN = {
    "previous-token": ("previous-token", "previous-token-hyperparameters"),
    "sinks": ("sinks",),
    "rollout": ("rollout",),
    "petroglyph": ("petroglyph",),
}


def _toys(collected: Collected) -> Section:
    question = "Small transformers trained here, in which one ingredient can be changed at a time."
    results = collected["toy"]
    missing = () if results else (f"headwater toy all --out {collected.root / 'toy'}",)
    shown = []
    if "retrieval" in results:
        ds = results["retrieval"]
        figure = charts.retrieval(ds)
        colors = {f"width {width}": charts.CYCLE[n % len(charts.CYCLE)] for n, width in enumerate(ds["width"].values)}
        shown.append(
            Chart(
                "retrieval",
                "Retrieving the token at a given position",
                figure,
                "One model per target; median over seeds, their range shaded. Where a line meets the dotted one the "
                "model knows which tokens are there, and not where.",
                _of(
                    choice(figure, "layers", "Depth"),
                    choice(figure, "variant", "With"),
                    choice(figure, "width", "Curves", several=True, colors=colors),
                ),
            )
        )
    for kind in ("toy", "toy/depth"):
        if "position-bias" not in collected[kind]:
            continue
        ds = collected[kind]["position-bias"]
        figure = charts.gaps(ds)
        shown.append(
            Chart(
                f"gaps-{kind.replace('/', '-')}",
                "Which item does in-context retrieval believe?" + (" By depth" if kind != "toy" else ""),
                figure,
                "Above zero the earlier item of the pair wins, below zero the later one. Bars are means over seeds, "
                "lines reach from the smallest to the largest.",
                _of(
                    choice(figure, "training", "Training answers"),
                    choice(figure, "setting", "Setting"),
                    choice(
                        figure,
                        "positional",
                        "Positions",
                        several=True,
                        colors=charts.model_colors([str(one) for one in ds["positional"].values]),
                        labels={"none": "no encoding", "decay": "decay mask", "rope": "RoPE"},
                    ),
                ),
            )
        )
    pictures = tuple(
        Picture(file.replace("-", " ").capitalize(), name, file)
        for name, files in DRAWN.items()
        if name in results
        for file in files
    )
    return Section("toys", "Toys", question, (), tuple(shown), (), pictures, missing)


def _loaded_from(ds: xr.Dataset, name: str) -> str:
    """How the model of a result was named when it was loaded; its own name where the result does not say."""
    return next(iter(recorded(ds, "loaded_from")), name)


def _command(collected: Collected, command: str, folder: str, options: str = "") -> str:
    """What makes results of a kind, for the models of the other kinds and with the settings those were made with."""
    kinds = ("jacobian", "theory", "sinks", "trajectory", "leakage", "bos-swap")
    found: dict[str, str] = {}
    settings: dict[str, set[str]] = {}
    for kind in kinds:
        for name, ds in collected[kind].items():
            found.setdefault(name, _loaded_from(ds, name))
            for option, value in _settings(ds, command).items():
                settings.setdefault(option, set()).add(value)
    names = list(found.values()) or ["MODEL"]
    same = [word for option, values in settings.items() if len(values) == 1 for word in (f"--{option}", *values)]
    return shlex.join(["headwater", command, *names, *same, *options.split(), "--out", str(collected.root / folder)])


def _settings(ds: xr.Dataset, command: str) -> dict[str, str]:
    """Options that the command which made a result was given, and which `command` takes, too."""
    try:
        words = shlex.split(str(ds.attrs.get("command", "")))
    except ValueError:
        return {}
    shared = ["length", "text", "dataset", "split", "column", "chat", "first", "dtype"]
    shared += ["initialization"] * (command in ("jacobian", "theory"))
    given = dict(pairwise(words))
    return {option: given[f"--{option}"] for option in shared if f"--{option}" in given}
