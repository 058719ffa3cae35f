"""Who has learnt to retrieve: the gate that toys of in-context retrieval pass before statements about them are judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

import numpy as np
import xarray as xr

from probes.claims.rules import told
from probes.results.gate import TRAINED, blind_reader, learnt
from probes.results.statistics import over_runs
from probes.results.tables import Table, number

from ..tasks import InContext
from .rules import OVER_RUNS, Judged, Lacks, Untrained, at, places, setting

DIMS = ("scale", "data", "depth", "mask", "positional", "residual", "training", "seed")  # of a result of position-bias
PASSED = f"Only toys with an accuracy on novel classes of {TRAINED:g} or more count, {OVER_RUNS}"
BLIND = blind_reader(InContext.items // InContext.burst, InContext.labels)
ENCODINGS = {"none": "no encoding", "decay": "decay mask", "rope": "RoPE", "sinusoidal": "sinusoidal"}
STREAMS = {"off": "without residual stream", "on": "with residual stream"}
NAMED = 4  # kinds of toys that a verdict of "not trained" names


def gate(ds: xr.Dataset) -> tuple[xr.DataArray, xr.DataArray]:
    """Accuracies [..., seed] on novel classes, and what each kind of model has learnt, over `DIMS`.

    Answers of its sequences stand anywhere, whatever a model was trained on: who copies the label of one place is blind to
    content.
    """
    accuracy = ds["novel_accuracy"].transpose(*DIMS)
    return accuracy, _states(accuracy, BLIND)


def _states(accuracy: xr.DataArray, blind: float) -> xr.DataArray:
    """What each kind has learnt, by its accuracies [..., seed]."""
    state = partial(learnt, blind=blind)
    return xr.apply_ufunc(state, accuracy, input_core_dims=[["seed"]], vectorize=True, output_dtypes=[object])


def name_of(kind: Mapping[str, Any]) -> str:
    """A kind of toys in words, by what it has of `DIMS`."""
    words = {
        "positional": ENCODINGS.get,
        "residual": STREAMS.get,
        "depth": "{} blocks".format,
        "mask": "{} mask".format,
        "data": "{} data".format,
        "training": "answers {}".format,
    }
    usual = {"mask": "causal", "data": "gaussian", "training": "unbiased"}
    return ", ".join(str(word(kind[dim])) for dim, word in words.items() if dim in kind and kind[dim] != usual.get(dim))


def untrained(ds: xr.Dataset, accuracy: xr.DataArray, states: xr.DataArray) -> Untrained:
    """For `judge`, of a result of position-bias."""
    counts = states == "trained"
    done = ds.where(counts)
    measured: list[tuple[dict[str, Any], xr.DataArray]] = [
        (dict(zip(DIMS, labels, strict=False)), one)
        for labels, one in places(accuracy, *DIMS[:-1])
        if one.notnull().any()
    ]

    def changed(kind: Mapping[str, Any]) -> tuple[xr.Dataset, xr.Dataset]:
        """What counts, with this kind; and everything, without it."""
        one = xr.zeros_like(counts)
        one.loc[kind] = True
        return ds.where(counts | one), ds.where(~one)

    def say(given: Mapping[str, Any], tells: Callable[[xr.Dataset], Judged | None] | None) -> str:
        now = (tells(done), tells(ds)) if tells else None
        read = [(kind, one) for kind, one in measured if _read(kind, given)]
        found = [
            f"{name_of(kind)} {told(over_runs(one.values).within(0, 1), '.3f')}"
            for kind, one in read
            if states.sel(kind).item() != "trained" and (tells is None or now != tuple(map(tells, changed(kind))))
        ]
        more = f"; and {len(found) - NAMED} more" if len(found) > NAMED else ""
        if not found:
            return ""
        who = "settings that have" if tells else f"{len(found)} of {len(read)} settings have"
        return (
            f"{who} not learnt after {setting(ds, 'steps'):,} steps; accuracy on novel classes "
            f"(blind to content: {BLIND:.3f}): {'; '.join(found[:NAMED])}{more}"
        )

    return say


def _is(kind: Mapping[str, Any], which: Mapping[str, Any]) -> bool:
    return all(kind[dim] == value for dim, value in which.items())


def _read(kind: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Whether a rule with these parameters reads a kind of toys."""
    asked = given.get("positional") or kind["positional"]
    names = {asked} if isinstance(asked, str) else {*asked}
    answers = given.get("training", "unbiased")
    trained = {answers} if isinstance(answers, str) else {*answers}
    if isinstance(answers, Mapping):  # shifts, against unbiased data
        trained.add("unbiased")
    compared = [given[side] for side in ("one", "other") if side in given] or [{}]
    return (
        all((given.get(dim) or kind[dim]) == kind[dim] for dim in ("scale", "depth"))
        and any(_is(kind, {"data": given.get("data", "gaussian")} | which) for which in compared)
        and kind["training"] in trained
        and str(kind["mask"]).startswith(str(given.get("mask", "causal")))
        and kind["positional"] in names | {given.get("than")}
    )


def in_order(ds: xr.Dataset) -> dict[str, Any]:
    """For `judge`: the part of a previous-token result whose toys know the order of tokens, and what is said of others.

    The gate is `picked` at the end of training (`previous_token.rightly_picked`). Older results lack it; all their toys
    count.
    """
    if "picked" not in ds:
        return {}
    accuracy = ds["picked"].isel(point=-1, missing_dims="ignore", drop=True)
    dims = [str(dim) for dim in accuracy.dims if dim != "seed"]
    blind = 1 / (setting(ds, "context") - 1)  # who knows the last token is not the answer
    states = _states(accuracy, blind)
    mine = [name for name, values in ds.items() if {*dims} <= {*values.dims}]
    done = ds.assign(ds[mine].where(states == "trained"))

    def say(_: Mapping[str, Any], tells: Callable[[xr.Dataset], Judged | None] | None) -> str:
        if tells is not None and tells(done) == tells(ds):
            return ""
        found = [
            f"{', '.join(f'{dim} {label}'.replace('_', ' ') for dim, label in zip(dims, labels, strict=True))}: "
            f"{told(over_runs(one.values).within(0, 1), '.3f')}"
            for labels, one in places(accuracy.where(states != "trained"), *dims)
            if one.notnull().any()
        ]
        if not found:
            return ""
        return f"toys pick the right one of their tokens too rarely (blind to order: {blind:.3f}): {'; '.join(found)}"

    return {"done": done, "untrained": say}


def by_stream(rule: Callable[..., Judged]) -> Callable[..., Judged]:
    """A rule on toys without residual stream, as in the paper; on those with it where the others lack what it needs."""

    @wraps(rule)
    def judged(ds: xr.Dataset, **given: Any) -> Judged:
        for residual, words in STREAMS.items():
            try:
                found = rule(at(ds, residual=residual), **given)
            except Lacks:
                continue
            return found._replace(measured=f"{words}: {found.measured}") if residual == "on" else found
        raise Lacks

    return judged


def learning(ds: xr.Dataset) -> Table:
    """Who has learnt to retrieve, and when: a row per kind of model, its seeds side by side."""
    states, dims = gate(ds)[1], tuple(dim for dim in DIMS if dim != "seed")
    columns = (
        "accuracy",
        f"step of {TRAINED:g}",
        "a label of the context",
        "by heart",
        "on right items",
        "on right labels",
        "state",
    )
    rows, names = [], ["novel_accuracy", "course_novel", "course_copied", "course_match", "by_heart"]
    for labels, cell in places(ds[names], *dims):
        cell = cell.isel(seed=np.flatnonzero(cell["novel_accuracy"].notnull()))
        if cell.sizes["seed"]:
            of: dict[Any, Any] = dict(zip(dims, labels, strict=True))
            end = cell.isel(step=-1).sel(layer=int(of["depth"]) - 1)
            on = [_each(end["course_match"].sel(part=part)) for part in ("item", "label")]
            kind = str(states.sel({dim: of[dim] for dim in states.dims}).item())
            numbers = (*map(_each, (cell["novel_accuracy"], end["course_copied"], cell["by_heart"])), *on)
            rows.append([*map(str, labels), numbers[0], _reached(cell), *numbers[1:], kind])
    title = (
        f"Retrieval of novel classes, each seed: accuracy (blind to content: {BLIND:.3f}), the check from which on it is "
        f"{TRAINED:g} or more, share of answers that are any label of the context, share that are a known class's own label "
        "where two labels have changed places, the last block's weights from the query"
    )
    return Table(title, (*dims, *columns), rows)


def _each(values: xr.DataArray) -> str:
    return ", ".join(number(value, ".3f") for value in values.values)


def _reached(cell: xr.Dataset) -> str:
    """The step of the first check from which on accuracy stays at the gate or above."""
    steps, told = cell["step"].values, []
    for course in cell["course_novel"].transpose("seed", "step").values:
        below = np.flatnonzero(course < TRAINED)
        first = 0 if not below.size else int(below[-1]) + 1
        told.append(str(steps[first]) if first < steps.size else "-")
    return ", ".join(told)


def scaled(scale: str) -> str:
    """Which scale of the data a statement is about, in words."""
    return f"vectors scaled as in the paper's {scale}"
