"""What a result of `headwater match` says: tables, sentences and the chart, from the result alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from probes.charts import FRESH, GREEN, ORANGE, PURPLE, THEORY, TRAINED, Series, curves, position_axis, sheet
from probes.measures.agreement import averaged, fractions, taken_at
from probes.results.curves import estimate
from probes.results.gate import TRAINED as LEARNT
from probes.results.tables import Table, interval, number

from .match_result import CURVES, MATCHED, TASKS, clean, guess, others_of, points_of, samples, toys_learnt

FEATURES = {"primacy": ".3g", "recency": ".3g", "trough": ".2f"}
STATES = {"init": "at initialization", "pretrained": "after training"}


# ------------------------------------------------------------------------------------------------------------- tables


def tables(results: Mapping[str, xr.Dataset]) -> list[Table]:
    """Agreement, leakage and the swap, training, and what the ingredients do."""
    agreeing = ("Spearman", "RMS log error", "apart", "alpha: Spearman", "alpha: error")
    sinks = ("alpha of 0 / uniform", "sink rate of 0", "leakage, nat^2", "mask's share", "stream's share", "removed")
    training = ("blocks", "toys", "loss, nat", "accuracy", "least accurate", "guess", "learnt")
    parts: list[tuple[str, tuple[str, ...], Callable[[str, xr.Dataset], Iterator[list[str]]]]] = [
        (
            "How the matching toys agree with the model, and theory beside them",
            ("model", "weights", "compared with", *agreeing),
            _agreements,
        ),
        (
            "Sinks, leakage (none in context: items and labels take turns), and another embedding at position 0",
            ("model", "whose", *sinks, "reacts", "profile changes by"),
            _attention,
        ),
        (
            f"Training of the toys; learnt: an accuracy of {LEARNT:g} or more by the interval over runs",
            ("model", "toy", "task", *training),
            _training,
        ),
    ]
    every = [
        Table(title, columns, [row for name, ds in results.items() for row in rows(name, ds)])
        for title, columns, rows in parts
    ]
    return [*every, _ingredients(results)]


def _agreements(name: str, ds: xr.Dataset) -> Iterator[list[str]]:
    for state in map(str, ds["state"].values):
        for other, of in others_of(ds, state).items():
            shown = []
            for curve in CURVES:
                place = {"curve": curve, "state": state, "other": other}
                shown.append([estimate(ds, f"agreement_{field}", **place) for field in ("spearman", "error")])
            apart = float(ds["agreement_apart"].sel(curve=CURVES[0], state=state, other=other))
            cells = [[interval(*rank, form=".2f"), interval(*error, form=".2f")] for rank, error in shown]
            nothing = all(math.isnan(error[0]) and math.isnan(rank[0]) for rank, error in shown)
            if nothing and toys_learnt(ds, *of) == "trained":
                continue
            yield [name, state, _named(ds, other, of), *cells[0], number(apart, ".2f"), *cells[1]]


def _attention(name: str, ds: xr.Dataset) -> Iterator[list[str]]:
    whose = [(f"model, {state}", "model", {"state": state}) for state in map(str, ds["state"].values)]
    for of in product(map(str, ds["variant"].values), map(str, ds["training"].values)):
        label = _named(ds, f"{of[0]} toy, {of[1]}", of)
        whose.append((label, "toy", {"variant": of[0], "training": of[1]}))
    for label, kind, where in whose:
        point = "position" if kind == "model" else "point"
        alpha = ds[f"{kind}_alpha"].sel(where).isel({point: 0})
        if bool(np.isnan(alpha).all()):
            continue
        uniform = ds[f"{kind}_uniform"].sel(where if kind == "toy" else {})
        rate = float(ds[f"{kind}_sink_rate"].sel(where).isel({point: 0}).mean())
        numbers = [_scalar(ds, kind, scalar, where) for scalar in ("leakage_total", "removed", "reacts")]
        shares = [_scalar(ds, kind, "leakage_share", where | {"source": source}) for source in ("mask", "residual")]
        nothing = numbers[0][1] <= 0  # leakage that may be none has no shares
        yield [
            name,
            label,
            number(float(alpha.mean()) / float(uniform.isel({point: 0})), ".2f"),
            number(rate, ".3f"),
            interval(*numbers[0]),
            *("-" if nothing else interval(*share, form=".2f") for share in shares),
            interval(*numbers[1], form=".2f"),
            interval(*numbers[2]),
            number(swap_change(ds, kind, where), ".2f"),
        ]


def _scalar(ds: xr.Dataset, kind: str, name: str, where: Mapping[str, str]) -> tuple[float, float, float]:
    """A number with its interval; of fresh models the mean over seeds, with the mean ends."""

    def mean(full: str) -> float:
        values = ds[full].sel(dict(where)).values if full in ds else np.array(math.nan)
        known = values[~np.isnan(values)]
        return float(known.mean()) if known.size else math.nan

    return mean(f"{kind}_{name}"), mean(f"{kind}_{name}_low"), mean(f"{kind}_{name}_high")


def swap_change(ds: xr.Dataset, kind: str, where: Mapping[str, str]) -> float:
    """RMS of the logarithm of the profile after the swap against before, where both reach; NaN without a run.

    Position 0 is left out: its input is another.
    """
    before = clean(ds[f"{kind}_elasticity"].sel(dict(where)).values)
    after = clean(ds[f"{kind}_swapped"].sel(dict(where)).values[:, None])
    if before is None or after is None:
        return math.nan
    profiles = np.stack([averaged(after), averaged(before)])[:, 1:]
    logs = np.log(profiles[:, (profiles > 0).all(0)])
    return float(np.sqrt(np.mean((logs[0] - logs[1]) ** 2))) if logs.size else math.nan


def _training(name: str, ds: xr.Dataset) -> Iterator[list[str]]:
    for variant, task in product(map(str, ds["variant"].values), TASKS):
        loss, accuracy, target = (
            ds[f"toy_{part}"].sel(variant=variant, training=task).values for part in ("loss", "accuracy", "target")
        )
        known = ~np.isnan(loss)
        if not known.any():
            continue
        least, depth = int(np.nanargmin(accuracy)), json.loads(ds.attrs["toy_blocks"])[task]
        of_all = "" if depth == int(ds.attrs["blocks"]) else f" of {ds.attrs['blocks']}"
        where = "" if math.isnan(target[least]) else f" (position {target[least]:.0f})"
        numbers = (loss[known].mean(), accuracy[known].mean(), accuracy[least], guess(ds, task))
        mean, right, worst, guessed = (number(value, ".2f") for value in numbers)
        toys, learnt = str(int(known.sum())), toys_learnt(ds, variant, task)
        yield [name, variant, task, f"{depth}{of_all}", toys, mean, right, worst + where, guessed, learnt]


def _ingredients(results: Mapping[str, xr.Dataset]) -> Table:
    variants = list(dict.fromkeys(str(v) for ds in results.values() for v in ds["variant"].values))
    columns = ("feature", "model", "weights", "of the model", *("matched toy" if v == MATCHED else v for v in variants))
    rows = []
    for (feature, form), (name, ds) in product(FEATURES.items(), results.items()):
        for training in map(str, ds["training"].values):
            state = "init" if training == "init" else "pretrained"
            cells = [_feature(*estimate(ds, f"model_{feature}", state=state), form=form)]
            for variant in variants:
                where = {"variant": variant, "training": training}
                if variant not in ds["variant"].values or bool(np.isnan(ds["toy_uniform"].sel(where)).all()):
                    cells.append("-")
                elif (learnt := toys_learnt(ds, variant, training)) != "trained":
                    cells.append(learnt)
                else:
                    cells.append(_feature(*estimate(ds, f"toy_{feature}", **where), form=form))
            rows.append([feature, name, training, *cells])
    return Table("Which ingredient makes which feature of the profile: toys with and without it", columns, rows)


def _feature(value: float, low: float, high: float, *, form: str) -> str:
    """A number with its interval; ratios to a middle that a window cuts off have no number."""
    return "no middle" if math.isinf(value) else interval(value, low, high, form=form)


def _named(ds: xr.Dataset, name: str, of: tuple[str, str]) -> str:
    """What a model is compared with, in words; of toys that have not learnt their task this, too."""
    state = toys_learnt(ds, *of)
    return name if state == "trained" else f"{name} ({state})"


def sentences(results: Mapping[str, xr.Dataset]) -> list[str]:
    """Who comes nearest, what toys have not learnt or do not match, and how streams grow."""
    lines = []
    for name, ds in results.items():
        lines.append(f"{name}: {_nearest(ds)}")
        if toys_learnt(ds, MATCHED, "retrieval") != "trained":
            remedy = "fewer blocks (--with deepest=3) and more steps (--with steps=2000) may teach them"
            lines.append(f"{name}: the matched toys have not learnt retrieval; {remedy}")
        lines += [f"{name}: {note}" for note in json.loads(str(ds.attrs["notes"]))]
        model, toy = (float(ds[f"{whose}_growth"]) for whose in ("model", "toy"))
        lines.append(f"{name}: the stream of fresh weights grows {model:.3g}-fold, that of fresh toys {toy:.3g}-fold")
    return lines


def _nearest(ds: xr.Dataset) -> str:
    """RMS log errors of the profile against toys and theory, the nearest first, at initialization and trained."""
    parts = []
    for state, label in (("init", "at init"), ("pretrained", "pretrained")):
        errors = ds["agreement_error"].sel(curve="sensitivity", state=state)
        wanted = {other: of for other, of in others_of(ds, state).items() if of[0] in ("theory", MATCHED)}
        known = {_named(ds, other, of): float(errors.sel(other=other)) for other, of in wanted.items()}
        ordered = sorted((error, other) for other, error in known.items() if not math.isnan(error))
        parts.append(f"{label} " + ", ".join(f"{other} {error:.2f}" for error, other in ordered))
    return "RMS log error of the profile, " + "; ".join(parts)


# --------------------------------------------------------------------------------------------------------------- chart

MODELS = 2  # rows; four panels are what a figure shows
WIDE = 7.0  # decades of an axis: a window's models and toys are that far apart
# What is drawn in each state of a model beside it: as in `others_of`, with words, colour and line.
BESIDE = {
    "init": (
        ((MATCHED, "init"), Series("fresh toys", (), GREEN)),
        (("theory", "kernel"), Series("second-moment kernel", (), THEORY, line=":")),
        (("theory", "cesaro"), Series("N^L", (), THEORY, line="--", width=1.0)),
    ),
    "pretrained": (
        ((MATCHED, "retrieval"), Series("retrieval toys", (), ORANGE, marker="o")),
        ((MATCHED, "in-context"), Series("in-context toys", (), PURPLE, marker="o")),
        (("theory", "kernel"), Series("second-moment kernel", (), THEORY, line=":")),
    ),
}
CAPTION = (
    "Elasticity, geometric means over prompts and seeds, each curve over its own geometric mean: a toy's unit is its own. "
    "Trained toys are drawn where they pass the gate."
)


def chart(results: Mapping[str, xr.Dataset]) -> Figure:
    """Elasticity of the first two models and of the toys that match them over the position fraction, and theory."""
    shown = list(results.items())[:MODELS]
    figure, cells = sheet(len(shown), len(STATES), height=2.5, caption=CAPTION)
    for row, (name, ds) in zip(cells, shown, strict=True):
        for cell, (state, title) in zip(row, STATES.items(), strict=True):
            curves(cell, profiles(ds, state), log=True, decades=WIDE)
            position_axis(cell)
            cell.set_title(f"{name}\n{title}", fontsize=9)  # in one line long names leave the sheet
        row[0].set_ylabel("sensitivity (scale free)")
    return figure


def profiles(ds: xr.Dataset, state: str) -> list[Series]:
    """The model in a state, matched toys that do their task, and theory; each over its mean where all are above zero."""
    model = ("model", state), Series("model", (), FRESH if state == "init" else TRAINED)
    lines: list[tuple[Series, np.ndarray]] = []
    for of, look in (model, *BESIDE[state]):
        values = samples(ds, "sensitivity", of, state)
        if values is not None and toys_learnt(ds, *of) == "trained":
            lines.append((look, averaged(values)))
    shortest = min(points for training in map(str, ds["training"].values) if (points := points_of(ds, training)))
    coarse = np.stack([taken_at(curve, min(shortest, len(curve))) for _, curve in lines])
    common = np.all(coarse > 0, 0)
    means = np.exp(np.log(coarse[:, common]).mean(1)) if common.any() else np.ones(len(lines))
    return [
        replace(look, y=curve / mean, x=fractions(len(curve))) for (look, curve), mean in zip(lines, means, strict=True)
    ]
