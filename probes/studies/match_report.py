"""What a result of `headwater match` says: agreement of curves, shapes and their ingredients, from the result alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import product

import numpy as np
import xarray as xr

from ..measures.match_result import (
    CURVES,
    MATCHED,
    TASKS,
    guess,
    judged,
    others_of,
    points_of,
    swap_ratio,
    toys_learnt,
)
from ..results.curves import estimate
from ..results.dataset import drawn_from, options_of
from ..results.gate import TRAINED
from ..results.tables import Report, Table, interval, number

ENDS = ("", "_low", "_high")
FEATURES = {"primacy": ".3g", "recency": ".3g", "trough": ".2f"}


# ------------------------------------------------------------------------------------------------------------- report


def match_report(results: Mapping[str, xr.Dataset]) -> Report:
    """Toys beside models, by model name; what `judged` adds is found anew."""
    results = {name: judged(ds) for name, ds in results.items()}
    return Report("Toys beside models", _described(results), tables(results), list(sentences(results)))


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
            "Sinks, leakage, and another embedding at position 0",
            ("model", "whose", *sinks, "reacts", "profile changes by"),
            _attention,
        ),
        ("Training of the toys", ("model", "toy", "task", *training), _training),
    ]
    found = [
        Table(title, columns, [row for name, ds in results.items() for row in rows(name, ds)])
        for title, columns, rows in parts
    ]
    return [*found, _ingredients(results)]


def _described(results: Mapping[str, xr.Dataset]) -> str:
    ds = next(iter(results.values()))
    options, toys = options_of(ds), json.loads(str(ds.attrs["toys"]))
    drawn = f" ({drawn_from(results)})" if drawn_from(results) else ""
    kind = "QUICK setting: small toys, hardly trained. " if ds.attrs.get("quick") else ""
    trained = f"{toys['seeds']} seeds (ablations {toys['ablation_seeds']})"
    return (
        f"{kind}Models: T = {ds.sizes['position']}, {ds.sizes['prompt']} prompts ({options['prompts']} for leakage), "
        f"{options['seeds']} fresh seeds{drawn}, {ds.attrs['dtype']}, {ds.attrs['device']}. Fresh toys: "
        f"{points_of(ds, 'init')} positions, the model's prompts, {toys['fresh_seeds']} seeds. Trained toys: {trained}; "
        f"retrieval: {points_of(ds, 'retrieval')} positions, {toys['steps']} steps, a toy for each position asked for; in "
        f"context: {points_of(ds, 'in-context')} positions, {toys['in_context_steps']} steps, matched toys alone. Profiles "
        "are elasticities, geometric means; beside theory sensitivities, root mean squares over prompts. They meet on the "
        "position fraction; RMS log error has a free scale, over points that both reach; apart: share of points that one "
        "reaches. 95 % intervals: jackknife over documents and over seeds of toys, in quadrature; of the trough and of a "
        f"model's leakage percentiles over resamples. Leakage: log form, queries {ds.attrs['band']} at lags "
        f"{ds.attrs['lags']}, of trained toys {ds.attrs['toy_band']} at {ds.attrs['toy_lags']}. Removed, reacts: by the "
        "mean embedding at position 0; profile changes by: RMS log change from position 1 on. Trained toys have an accuracy "
        f"of {TRAINED:g} or more by the 95 % interval over runs; only these have an agreement and a shape."
    )


def sentences(results: Mapping[str, xr.Dataset]) -> Iterator[str]:
    """What toys do not match, how streams grow, who comes nearest, and what toys have not learnt."""
    for name, ds in results.items():
        for note in json.loads(str(ds.attrs["notes"])):
            yield f"{name}: {note}"
    for name, ds in results.items():
        model, toy = (float(ds[f"{whose}_growth"]) for whose in ("model", "toy"))
        yield f"{name}: the stream of fresh weights grows {model:.3g}-fold, that of fresh toys {toy:.3g}-fold"
    for name, ds in results.items():
        yield f"{name}: {_best(ds)}"
    for name, ds in results.items():
        if toys_learnt(ds, MATCHED, "retrieval") != "trained":
            remedy = "fewer blocks (--with deepest=3) and more steps (--with steps=2000) may teach them"
            yield f"{name}: the matched toys have not learnt retrieval; {remedy}"
    yield "in-context toys have no leakage here: items and labels take turns, so that content depends on the position"


def _best(ds: xr.Dataset) -> str:
    """Who comes nearest to the profile, at initialization and trained."""
    said = []
    for state, label in (("init", "at init"), ("pretrained", "pretrained")):
        errors = ds["agreement_error"].sel(curve="sensitivity", state=state)
        wanted = {other: of for other, of in others_of(ds, state).items() if of[0] in ("theory", MATCHED)}
        found = {_named(ds, other, of): float(errors.sel(other=other)) for other, of in wanted.items()}
        known = {other: error for other, error in found.items() if not math.isnan(error)}
        ordered = sorted(known.items(), key=lambda item: item[1])
        said.append(f"{label} " + ", ".join(f"{other} {error:.2f}" for other, error in ordered))
    return "RMS log error of the profile, " + "; ".join(said)


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
    found = []
    for end in ("", "_low", "_high"):
        full = f"{kind}_{name}{end}"
        values = ds[full].sel(dict(where)).values if full in ds else np.array(math.nan)
        known = values[~np.isnan(values)]
        found.append(float(known.mean()) if known.size else math.nan)
    return found[0], found[1], found[2]


def swap_change(ds: xr.Dataset, kind: str, where: Mapping[str, str]) -> float:
    """RMS over positions from 1 on of the logarithm of the profile after the swap against before; where both reach."""
    ratio = swap_ratio(ds, kind, where)
    logs = np.array([]) if ratio is None else np.log(ratio[~np.isnan(ratio)])
    return float(np.sqrt(np.mean(logs**2))) if len(logs) else math.nan


def _ingredients(results: Mapping[str, xr.Dataset]) -> Table:
    variants = list(dict.fromkeys(str(v) for ds in results.values() for v in ds["variant"].values))
    columns = ("feature", "model", "weights", "of the model", *("matched toy" if v == MATCHED else v for v in variants))
    rows = []
    for feature, form in FEATURES.items():
        for name, ds in results.items():
            for training in map(str, ds["training"].values):
                state = "init" if training == "init" else "pretrained"
                own = _shown(*estimate(ds, f"model_{feature}", state=state), form=form)
                cells = []
                for variant in variants:
                    where = {"variant": variant, "training": training}
                    there = variant in ds["variant"].values and bool(np.isfinite(ds["toy_uniform"].sel(where)).any())
                    state_of = toys_learnt(ds, variant, training) if there else "trained"
                    shown = _shown(*estimate(ds, f"toy_{feature}", **where), form=form) if there else "-"
                    cells.append(shown if state_of == "trained" else state_of)
                rows.append([feature, name, training, own, *cells])
    return Table("Which ingredient makes which feature of the profile: toys with and without it", columns, rows)


def _shown(value: float, low: float, high: float, *, form: str) -> str:
    """A number with its interval; ratios to a middle that a window cuts off have no number."""
    return "no middle" if math.isinf(value) else interval(value, low, high, form=form)


def _training(name: str, ds: xr.Dataset) -> Iterator[list[str]]:
    for variant in map(str, ds["variant"].values):
        for task in TASKS:
            loss, accuracy = (ds[f"toy_{n}"].sel(variant=variant, training=task).values for n in ("loss", "accuracy"))
            known = ~np.isnan(loss)
            if not known.any():
                continue
            least, depth = int(np.nanargmin(accuracy)), json.loads(ds.attrs["toy_blocks"])[task]
            of_all = "" if depth == int(ds.attrs["blocks"]) else f" of {ds.attrs['blocks']}"
            target = float(ds["toy_target"].sel(variant=variant, training=task).values[least])
            where = "" if math.isnan(target) else f" (position {target:.0f})"
            found = (loss[known].mean(), accuracy[known].mean(), accuracy[least], guess(ds, task))
            mean, right, worst, guessed = (number(value, ".2f") for value in found)
            toys = str(int(known.sum()))
            learnt = toys_learnt(ds, variant, task)
            yield [name, variant, task, f"{depth}{of_all}", toys, mean, right, worst + where, guessed, learnt]


def _named(ds: xr.Dataset, name: str, of: tuple[str, str]) -> str:
    """What a model is compared with, in words; of toys that have not learnt their task this, too."""
    state = toys_learnt(ds, *of)
    return name if state == "trained" else f"{name} ({state})"
