"""Models and matched toys, read from a result of `match`: their profiles side by side, and how well they agree."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import xarray as xr

from probes.measures.agreement import BOOTSTRAP, SHAPES, Samples, agreement, shape
from probes.results.gate import Learnt, blind_reader, learnt

from .matching import MATCHED as MATCHED

CURVES = ("sensitivity", "alpha")
STATES = ("init", "pretrained")
TRAININGS = ("init", "retrieval", "in-context")
TASKS = ("retrieval", "in-context")
ENDS = ("", "_low", "_high")
FIELDS = (*(f"{field}{end}" for field in ("spearman", "error") for end in ENDS), "apart")
SAID = {
    "spearman": "rank correlation of a curve of the model and another's, by position fraction",
    "error": "RMS log error of the two, free scale, where both are above zero",
    "apart": "share of points where one of the two is zero and the other is not",
    "primacy": "first 5 % of positions against the middle half's median",
    "recency": "last position against the middle half's median",
    "trough": "place of the smoothed curve's minimum, as a fraction",
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
        for task in TASKS if variant == MATCHED else TASKS[:1]:
            if state == "pretrained":
                others[f"{prefix}{task} toy"] = (variant, task)
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


def judged(ds: xr.Dataset, *, bootstrap: int = BOOTSTRAP) -> xr.Dataset:
    """The result with agreements and shapes added; what was added before is replaced.

    A model and toys are compared by elasticities, geometric means over prompts; a model and theory by sensitivities, root
    mean squares over prompts. Toys that have not learnt their task have neither agreement nor shape.
    """
    documents = list(map(str, ds["document"].values)) if "document" in ds.coords else None
    states = [str(state) for state in ds["state"].values]
    names = list(dict.fromkeys(name for state in states for name in others_of(ds, state)))
    fields = {field: np.full((len(CURVES), len(states), len(names)), np.nan) for field in FIELDS}
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
    variables |= _shapes(ds, bootstrap, documents)
    ds = ds.drop_vars([name for name in (*variables, "curve", "other") if name in ds])
    return ds.assign(variables).assign_coords(curve=list(CURVES), other=names)


def _said(name: str) -> dict[str, str]:
    bare, _, end = name.partition("_")
    return {"long_name": SAID[bare] + (f", {end} end of the 95 % interval" if end else ""), "units": "1"}


def _shapes(ds: xr.Dataset, bootstrap: int, documents: Sequence[str] | None) -> dict[str, Any]:
    """Primacy, recency and trough of the model in every state, over documents, and of toys, over runs."""
    variables: dict[str, Any] = {}
    variants, trainings, states = (list(map(str, ds[name].values)) for name in ("variant", "training", "state"))
    all_of = {
        "model": (("state",), [("model", state) for state in states], documents),
        "toy": (("variant", "training"), list(product(variants, trainings)), None),
    }
    for whose, (dims, places, over) in all_of.items():
        values = np.full((len(places), len(SHAPES), len(ENDS)), np.nan)
        for n, of in enumerate(places):
            own = samples(ds, "sensitivity", of, "")
            if own is not None and toys_learnt(ds, *of) == "trained":
                of_own = shape(own, runs=whose == "toy", documents=over, bootstrap=bootstrap)
                values[n] = [number[:3] for number in (of_own.primacy, of_own.recency, of_own.trough_fraction)]
        columns = values.reshape([ds.sizes[dim] for dim in dims] + [-1])
        for n, name in enumerate(f"{name}{end}" for name in SHAPES for end in ENDS):
            variables[f"{whose}_{name}"] = (dims, columns[..., n], _said(name))
    return variables


def points_of(ds: xr.Dataset, training: str) -> int:
    """How many positions toys of a training have."""
    return int((~np.isnan(ds["toy_uniform"].sel(training=training).values)).any(0).sum())


def guess(ds: xr.Dataset, task: str) -> float:
    """How often a guess is right: among all tokens, or, in context, among the labels that a sequence shows."""
    toys = json.loads(str(ds.attrs["toys"]))
    if task == "retrieval":
        return 1 / toys["vocabulary"]
    return blind_reader(toys["items"] // toys["burst"], toys["labels"])


def toys_learnt(ds: xr.Dataset, variant: str, training: str) -> Learnt:
    """Whether toys do their task, by their accuracy on unseen sequences over runs; of fresh toys, models, theory "trained".

    A run is a seed: retrieval toys of one seed, each asked for another position, count by their mean.
    """
    if training not in TASKS:
        return "trained"
    toys = ds.sel(variant=variant, training=training)
    accuracy = toys["toy_accuracy"].values[~np.isnan(toys["toy_loss"].values)]
    target = toys["toy_target"].values
    asked = max(1, len(np.unique(target[~np.isnan(target)])))
    return learnt(accuracy.reshape(-1, asked).mean(1), guess(ds, training))
