"""What a result of `headwater match` says, from the result alone: agreements and shapes, tables, sentences and the chart."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from probes.charts import FRESH, GREEN, ORANGE, THEORY, TRAINED, Series, curves, position_axis, sheet
from probes.measures.agreement import Agreement, Samples, agreement, averaged, fractions, shape, taken_at
from probes.results.curves import estimate
from probes.results.gate import TRAINED as LEARNT
from probes.results.gate import Learnt, learnt
from probes.results.tables import Table, interval, number

from .matching import MATCHED

CURVES = ("sensitivity", "alpha")
STATES = {"init": "at initialization", "pretrained": "after training"}
TRAININGS = ("init", "retrieval")
ENDS = ("", "_low", "_high")
FIELDS = {
    "spearman": "rank correlation of a curve of the model and another's, by position fraction",
    "error": "RMS log error of the two, free scale, where both are above zero",
    "apart": "share of points where one of the two is zero and the other is not",
}
FEATURES = {
    "primacy": "first 5 % of positions against the middle half's median",
    "recency": "last position against the middle half's median",
}


def others_of(ds: xr.Dataset, state: str) -> dict[str, tuple[str, str]]:
    """What a model's curve in a state is held against, by name: ("theory", which), ("model", state) or (variant, training).

    Fresh weights against fresh toys; trained ones against fresh weights, fresh toys and trained ones.
    """
    kernel = {"second-moment kernel": ("theory", "kernel")} if "theory_kernel" in ds else {}
    others = kernel | {"N^L, best alpha": ("theory", "cesaro"), "uniform attention": ("theory", "uniform")}
    if state == "pretrained":
        others["model at init"] = ("model", "init")
    for variant in map(str, ds["variant"].values):
        prefix = "" if variant == MATCHED else f"{variant}, "
        others[f"{prefix}toy init"] = (variant, "init")
        if state == "pretrained" and variant == MATCHED:
            others["retrieval toy"] = (MATCHED, "retrieval")
    return others


def samples(ds: xr.Dataset, curve: str, of: tuple[str, str], state: str, *, raw: bool = False) -> Samples | None:
    """A curve as [seed, prompt, position], seeds that were not run left out; None where the result has none.

    `of` as in `others_of`; `state` is the model's, which theories belong to. "sensitivity" is the elasticity; of a model
    `raw` gives what theories predict.
    """
    kind, which = of
    if curve == "sensitivity" and not raw:
        curve = "elasticity"
    if kind == "theory":
        name = {"kernel": "theory_kernel", "cesaro": "theory_cesaro", "uniform": "model_uniform"}[which]
        if name not in ds or (which == "uniform") != (curve == "alpha"):
            return None
        values = (ds[name].sel(state=state) if "state" in ds[name].dims else ds[name]).values
        values = values.reshape((1,) * (3 - values.ndim) + values.shape)
    elif kind == "model":
        values = ds[f"model_{curve}"].sel(state=which).values
    else:
        values = ds[f"toy_{curve}"].sel(variant=kind, training=which).values
    return clean(values)


def clean(values: np.ndarray) -> np.ndarray | None:
    """[seed, prompt, position] without seeds, prompts and positions that are not there; None where none is left."""
    known = ~np.isnan(values)
    there = values[known.any((1, 2))][:, known.any((0, 2))][..., known.any((0, 1))].astype(np.float64)
    return there if there.size and not np.isnan(there).any() else None


def judged(ds: xr.Dataset) -> xr.Dataset:
    """The result with agreements and shapes added; what was added before is replaced.

    A model and toys are compared by elasticities, geometric means over prompts; a model and theory by sensitivities, root
    mean squares over prompts. Toys that have not learnt their task have neither agreement nor shape.
    """
    ds = ds.sel(training=list(TRAININGS))
    documents = list(map(str, ds["document"].values)) if "document" in ds.coords else None
    states = list(map(str, ds["state"].values))
    names = list(dict.fromkeys(name for state in states for name in others_of(ds, state)))
    nothing = np.full((len(CURVES), len(states), len(names)), np.nan)
    fields = {field: nothing.copy() for field in Agreement._fields}
    for (c, curve), (s, state) in product(enumerate(CURVES), enumerate(states)):
        for name, of in others_of(ds, state).items():
            squares = of[0] == "theory" and curve == "sensitivity"
            own = samples(ds, curve, ("model", state), state, raw=squares)
            other = samples(ds, curve, of, state)
            if own is None or other is None or toys_learnt(ds, *of) != "trained":
                continue
            same = of == ("theory", "kernel") or of[0] == "model"
            held = agreement(own, other, paired=same, squares=squares, documents=documents)
            for field, value in held._asdict().items():
                fields[field][c, s, names.index(name)] = value
    dims = ("curve", "state", "other")
    variables: dict[str, Any] = {f"agreement_{name}": (dims, values, _said(name)) for name, values in fields.items()}
    variables |= _shapes(ds, documents)
    ds = ds.drop_vars([name for name in (*variables, "curve", "other") if name in ds])
    return ds.assign(variables).assign_coords(curve=list(CURVES), other=names)


def _said(name: str) -> dict[str, str]:
    bare, _, end = name.partition("_")
    return {"long_name": (FIELDS | FEATURES)[bare] + (f", {end} end of the 95 % interval" if end else ""), "units": "1"}


def _shapes(ds: xr.Dataset, documents: Sequence[str] | None) -> dict[str, Any]:
    """Primacy and recency of the model in every state, over documents, and of toys, over runs."""
    variables: dict[str, Any] = {}
    variants, states = (list(map(str, ds[name].values)) for name in ("variant", "state"))
    places_of = {
        "model": (("state",), [("model", state) for state in states], documents),
        "toy": (("variant", "training"), list(product(variants, TRAININGS)), None),
    }
    for whose, (dims, places, over) in places_of.items():
        values = np.full((len(places), len(FEATURES), len(ENDS)), np.nan)
        for n, of in enumerate(places):
            own = samples(ds, "sensitivity", of, "")
            if own is not None and toys_learnt(ds, *of) == "trained":
                shown = shape(own, runs=whose == "toy", documents=over)
                values[n] = [getattr(shown, feature)[:3] for feature in FEATURES]
        columns = values.reshape([*(ds.sizes[dim] for dim in dims), -1])
        for n, (feature, end) in enumerate(product(FEATURES, ENDS)):
            variables[f"{whose}_{feature}{end}"] = (dims, columns[..., n], _said(f"{feature}{end}"))
    return variables


def points_of(ds: xr.Dataset, training: str) -> int:
    """How many positions toys of a training have."""
    return int((~np.isnan(ds["toy_uniform"].sel(training=training).values)).any(0).sum())


def guess(ds: xr.Dataset) -> float:
    """How often a guess among all tokens is right."""
    return 1 / json.loads(str(ds.attrs["toys"]))["vocabulary"]


def toys_learnt(ds: xr.Dataset, variant: str, training: str) -> Learnt:
    """Whether toys do their task, by their accuracy on unseen sequences over runs; of fresh toys, models, theory "trained".

    A run is a seed: toys of one seed, each asked for another position, count by their mean.
    """
    if training != "retrieval":
        return "trained"
    toys = ds.sel(variant=variant, training=training)
    accuracy = toys["toy_accuracy"].values[~np.isnan(toys["toy_loss"].values)]
    target = toys["toy_target"].values
    asked = max(1, len(np.unique(target[~np.isnan(target)])))
    return learnt(accuracy.reshape(-1, asked).mean(1), guess(ds))


# ------------------------------------------------------------------------------------------------------------- tables


def tables(results: Mapping[str, xr.Dataset]) -> list[Table]:
    """Agreement, training, and what the ingredients do."""
    agreeing = ("Spearman", "RMS log error", "apart", "alpha: Spearman", "alpha: error")
    training = ("blocks", "toys", "loss, nat", "accuracy", "least accurate", "guess", "learnt")
    return [
        Table(
            "How the matching toys agree with the model, and theory beside them",
            ("model", "weights", "compared with", *agreeing),
            [row for name, ds in results.items() for row in _agreements(name, ds)],
        ),
        Table(
            f"Training of the toys; learnt: an accuracy of {LEARNT:g} or more by the interval over runs",
            ("model", "toy", *training),
            [row for name, ds in results.items() for row in _training(name, ds)],
        ),
        _ingredients(results),
    ]


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


def _training(name: str, ds: xr.Dataset) -> Iterator[list[str]]:
    for variant in map(str, ds["variant"].values):
        loss, accuracy, target = (
            ds[f"toy_{part}"].sel(variant=variant, training="retrieval").values
            for part in ("loss", "accuracy", "target")
        )
        known = ~np.isnan(loss)
        if not known.any():
            continue
        least, depth = int(np.nanargmin(accuracy)), json.loads(ds.attrs["toy_blocks"])["retrieval"]
        of_all = "" if depth == int(ds.attrs["blocks"]) else f" of {ds.attrs['blocks']}"
        numbers = (loss[known].mean(), accuracy[known].mean(), accuracy[least], guess(ds))
        mean, right, worst, guessed = (number(value, ".2f") for value in numbers)
        worst += f" (position {target[least]:.0f})"
        learnt = toys_learnt(ds, variant, "retrieval")
        yield [name, variant, f"{depth}{of_all}", str(int(known.sum())), mean, right, worst, guessed, learnt]


def _ingredients(results: Mapping[str, xr.Dataset]) -> Table:
    variants = list(dict.fromkeys(str(v) for ds in results.values() for v in ds["variant"].values))
    columns = ("feature", "model", "weights", "of the model", *("matched toy" if v == MATCHED else v for v in variants))
    rows = []
    for feature, (name, ds) in product(FEATURES, results.items()):
        for training in TRAININGS:
            state = "init" if training == "init" else "pretrained"
            cells = [_feature(*estimate(ds, f"model_{feature}", state=state))]
            for variant in variants:
                where = {"variant": variant, "training": training}
                if variant not in ds["variant"].values or bool(np.isnan(ds["toy_uniform"].sel(where)).all()):
                    cells.append("-")
                elif (learnt := toys_learnt(ds, variant, training)) != "trained":
                    cells.append(learnt)
                else:
                    cells.append(_feature(*estimate(ds, f"toy_{feature}", **where)))
            rows.append([feature, name, training, *cells])
    return Table("Which ingredient makes which feature of the profile: toys with and without it", columns, rows)


def _feature(value: float, low: float, high: float) -> str:
    """A ratio with its interval; where a window cuts off the middle there is none."""
    return "no middle" if math.isinf(value) else interval(value, low, high)


def _named(ds: xr.Dataset, name: str, of: tuple[str, str]) -> str:
    """What a model is compared with, in words; of toys that have not learnt their task this, too."""
    state = toys_learnt(ds, *of)
    return name if state == "trained" else f"{name} ({state})"


def sentences(results: Mapping[str, xr.Dataset]) -> list[str]:
    """Who comes nearest, and what toys have not learnt or do not match."""
    lines = []
    for name, ds in results.items():
        lines.append(f"{name}: {_nearest(ds)}")
        if toys_learnt(ds, MATCHED, "retrieval") != "trained":
            remedy = "fewer blocks (--with deepest=3) and more steps (--with steps=2000) may teach them"
            lines.append(f"{name}: the matched toys have not learnt retrieval; {remedy}")
        lines += [f"{name}: {note}" for note in json.loads(str(ds.attrs["notes"]))]
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
    shortest = min(points for training in TRAININGS if (points := points_of(ds, training)))
    coarse = np.stack([taken_at(curve, min(shortest, len(curve))) for _, curve in lines])
    common = np.all(coarse > 0, 0)
    means = np.exp(np.log(coarse[:, common]).mean(1)) if common.any() else np.ones(len(lines))
    return [
        replace(look, y=curve / mean, x=fractions(len(curve))) for (look, curve), mean in zip(lines, means, strict=True)
    ]
