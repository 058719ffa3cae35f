"""What a result of `headwater match` says, from the result alone: agreements and shapes, tables, sentences and the chart."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from probes.charts import FRESH, GREEN, ORANGE, THEORY, TRAINED, Series, curves, position_axis, sheet
from probes.measures.agreement import Agreement, Samples, agreement, averaged, fractions, shape, taken_at
from probes.results.curves import ESTIMATE
from probes.results.gate import TRAINED as LEARNT
from probes.results.gate import Learnt, learnt
from probes.results.tables import Table, interval, number

from .matching import MATCHED

STATES = {"init": "at initialization", "pretrained": "after training"}
TRAININGS = ("init", "retrieval")
FEATURES = ("first", "primacy", "recency", "last")  # numbers of the profile, `probes.results.ushape`


def others_of(ds: xr.Dataset, state: str) -> dict[str, tuple[str, str]]:
    """What a model's curve in a state is held against, by name: ("theory", which), ("model", state) or (variant, training).

    Fresh weights against fresh toys; trained ones against fresh weights, fresh toys and trained ones.
    """
    kernel = {"second-moment kernel": ("theory", "kernel")} if "theory_kernel" in ds else {}
    others = kernel | {"N^L, best alpha": ("theory", "cesaro")}
    if state == "pretrained":
        others["model at init"] = ("model", "init")
    for variant in map(str, ds["variant"].values):
        prefix = "" if variant == MATCHED else f"{variant}, "
        others[f"{prefix}toy init"] = (variant, "init")
        if state == "pretrained" and variant == MATCHED:
            others["retrieval toy"] = (MATCHED, "retrieval")
    return others


def samples(ds: xr.Dataset, of: tuple[str, str], state: str, *, raw: bool = False) -> Samples | None:
    """A profile as [seed, prompt, position], seeds that were not run left out; None where the result has none.

    `of` as in `others_of`; `state` is the model's, which theories belong to. It is the elasticity; of a model `raw` gives
    the sensitivity, which theories predict.
    """
    kind, which = of
    if kind == "theory":
        if f"theory_{which}" not in ds:
            return None
        values = ds[f"theory_{which}"]
        values = (values.sel(state=state) if "state" in values.dims else values).values
        values = values.reshape((1,) * (3 - values.ndim) + values.shape)
    elif kind == "model":
        values = ds["model_sensitivity" if raw else "model_elasticity"].sel(state=which).values
    else:
        values = ds["toy_elasticity"].sel(variant=kind, training=which).values
    return clean(values)


def clean(values: np.ndarray) -> np.ndarray | None:
    """[seed, prompt, position] without seeds, prompts and positions that are not there; None where none is left."""
    known = ~np.isnan(values)
    there = values[known.any((1, 2))][:, known.any((0, 2))][..., known.any((0, 1))].astype(np.float64)
    return there if there.size and not np.isnan(there).any() else None


def agreements(ds: xr.Dataset, state: str) -> dict[str, Agreement]:
    """How a model's profile in a state agrees with `others_of`, by name.

    A model and toys are compared by elasticities, geometric means over prompts; a model and theory by sensitivities, root
    mean squares over prompts. Toys that have not learnt their task are left out.
    """
    held = {}
    for name, of in others_of(ds, state).items():
        squares = of[0] == "theory"
        own, other = samples(ds, ("model", state), state, raw=squares), samples(ds, of, state)
        if own is not None and other is not None and toys_learnt(ds, *of) == "trained":
            paired = of == ("theory", "kernel") or of[0] == "model"
            held[name] = agreement(own, other, paired=paired, squares=squares, documents=documents_of(ds))
    return held


def documents_of(ds: xr.Dataset) -> list[str] | None:
    """What each prompt is a window of, if the result says so."""
    return list(map(str, ds["document"].values)) if "document" in ds.coords else None


def errors(ds: xr.Dataset) -> xr.DataArray:
    """RMS log errors of the profile [state, other, estimate]; NaN where nothing is compared."""
    coords = {"state": list(STATES), "other": list(others_of(ds, "pretrained")), "estimate": list(ESTIMATE)}
    found = xr.DataArray(np.nan, coords, tuple(coords))
    for state in STATES:
        for other, held in agreements(ds, state).items():
            found.loc[state, other] = [held.error, held.error_low, held.error_high]
    return found


def points_of(ds: xr.Dataset, training: str) -> int:
    """How many positions toys of a training have."""
    return int(ds["toy_elasticity"].sel(training=training).notnull().any(("variant", "toy_seed", "toy_prompt")).sum())


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
    agreeing = ("Spearman", "RMS log error", "apart")
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
    for state in STATES:
        held = agreements(ds, state)
        for other, of in others_of(ds, state).items():
            if other in held:
                a = held[other]
                rank, error = (a.spearman, a.spearman_low, a.spearman_high), (a.error, a.error_low, a.error_high)
                cells = [interval(*rank, form=".2f"), interval(*error, form=".2f"), number(a.apart, ".2f")]
            elif toys_learnt(ds, *of) != "trained":
                cells = ["-"] * 3
            else:
                continue
            yield [name, state, _named(ds, other, of), *cells]


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
    for feature, (name, ds), training in product(FEATURES, results.items(), TRAININGS):
        state = "init" if training == "init" else "pretrained"
        cells = [_feature(ds, of, feature) for of in (("model", state), *((variant, training) for variant in variants))]
        rows.append([feature, name, training, *cells])
    return Table("Which ingredient makes which feature of the profile: toys with and without it", columns, rows)


def _feature(ds: xr.Dataset, of: tuple[str, str], feature: str) -> str:
    """A ratio with its interval, of a model over documents and of toys over runs; a window may cut off the middle."""
    there = of[0] == "model" or of[0] in ds["variant"].values
    own = samples(ds, of, "") if there else None
    if own is None:
        return "-"
    if (learnt := toys_learnt(ds, *of)) != "trained":
        return learnt
    ratio = getattr(shape(own, runs=of[0] != "model", documents=documents_of(ds)), feature)
    return "no middle" if math.isnan(ratio[0]) else interval(*ratio[:3])


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
        others = others_of(ds, state)
        wanted = {
            other: held for other, held in agreements(ds, state).items() if others[other][0] in ("theory", MATCHED)
        }
        known = {_named(ds, other, others[other]): held.error for other, held in wanted.items()}
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
        values = samples(ds, of, state)
        if values is not None and toys_learnt(ds, *of) == "trained":
            lines.append((look, averaged(values)))
    shortest = min(points for training in TRAININGS if (points := points_of(ds, training)))
    coarse = np.stack([taken_at(curve, min(shortest, len(curve))) for _, curve in lines])
    common = np.all(coarse > 0, 0)
    means = np.exp(np.log(coarse[:, common]).mean(1)) if common.any() else np.ones(len(lines))
    return [
        replace(look, y=curve / mean, x=fractions(len(curve))) for (look, curve), mean in zip(lines, means, strict=True)
    ]
