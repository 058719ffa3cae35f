"""What the command line prints of a probe's results and NAME.md holds: tables and sentences, from results alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TypeAlias

import numpy as np
import xarray as xr

from ..measures.leakage import PARTS, SOURCES, null_fails, resolved, within_bound
from ..measures.trajectory import MEASURE
from ..results.curves import estimate, spearman
from ..results.dataset import quickly
from ..results.tables import Report, Table, estimated, number, variance
from ..table import tables

Results: TypeAlias = Mapping[str, xr.Dataset]

KEYS_SHOWN = 8
MILLION = 1_000_000  # squared weights are tiny: in millionths their tables are narrow enough to read


def measured(results: Results) -> str:
    """Prompts, their length, dtype and device; the same for all models but for the dtype of models in memory."""
    ds = next(iter(results.values()))
    found = [*quickly(results.values()), f"{ds.sizes['prompt']} prompt{'s' * (ds.sizes['prompt'] != 1)}"]
    found += [f"T = {ds.sizes['position']}", *(ds.attrs[name] for name in ("backend", "dtype", "device"))]
    return ", ".join(found)


# --------------------------------------------------------------------------------------------------------------- sinks


# ---------------------------------------------------------------------------------------------------------- trajectory


def trajectory_report(results: Results) -> Report:
    """Position 0's stream block by block, and whether it is a system of its own."""
    return tables(MEASURE, results)


# ------------------------------------------------------------------------------------------------------------- leakage


# The residual component V(X), by what is said of the constant sink (see `probes.leakage`): the headline first.
COMPONENTS = {"steady": "residual component", "log": "residual component, the constant sink left in"}


def leakage_report(results: Results) -> Report:
    """Sources of leakage per band, parts block by block in the early band, the order of the models, and the null checks.

    In the log form first with position 0's constant logit on the mask's side, then as part of the residual stream.
    """
    early_band = str(next(iter(results.values()))["band"].values[0])
    described = (
        f"{measured(results)}. Log form in squared nats, weight form in millionths of squared weights, the mask taken "
        "as all of the denominator or as its number of terms alone; 95 % bootstrap intervals over documents. Nulls: the "
        "total of uniform attention under the same mask, of fresh weights, and of the model under shuffled query labels "
        "(97.5 % quantile). Constant sink: a logit of position 0 that is the same for all queries is no position in any "
        "stream, so that it counts with the mask; left in, it counts with the residual stream. mask, residual, spread: each "
        "source's Shapley value as a share of the total, where the total's own interval is above 0 and the null check is "
        "passed, and in the weight form no part has a variance above 1/4, which no weight can have: with denominators held, "
        "logits of hundreds make numbers far above 1. Residual component: V(X), how far the residual stream alone moves "
        "log-weights. "
        f"Blocks: band {early_band}, means over heads; noise: what an uncorrected variance would have added."
    )
    tables = [*_by_band(results), *_by_block(results)]
    lines = [line for form in COMPONENTS for line in _order(results, form)]
    lines += [line for name, ds in results.items() for line in _by_positional(name, ds)]
    lines += [f"{name}: {line}" for name, ds in results.items() for line in _null(ds)]
    return Report("Leakage of absolute position into attention patterns", described, tables, lines)


def _by_positional(name: str, ds: xr.Dataset) -> list[str]:
    """Means over the blocks with and without positional encoding, side by side, in the first band."""
    if "positional" not in ds.coords:
        return []
    mean, said = ds.isel(band=0).groupby("positional").mean(), []
    for kind in map(str, mean["positional"].values):
        at, blocks = mean.sel(positional=kind), int((ds["positional"] == kind).sum())
        total, stream = (
            variance(one) for one in (at["log_form_by_block"].sel(part="total"), at["steady_stream_by_block"])
        )
        where = {"none": "without rotation", "rope": "with rotation"}.get(kind, f"with {kind} positions")
        said.append(f"{where} (blocks: {blocks}) total {total}, residual component {stream}")
    return [f"{name}, means over blocks: {'; '.join(said)} nat²"]


def _by_band(results: Results) -> list[Table]:
    """Totals and sources of every model in every band."""
    totals, steady, left_in, own, weights = ([] for _ in range(5))
    for name, band, ds in ((name, str(band), one) for name, one in results.items() for band in one["band"].values):
        head, say = [name, band], partial(estimated, ds, band=band)
        none = partial(say, said=variance)
        totals.append([*head, none("log_form_of_model", part="total"), *(say(f"null_{null}") for null in NULLS)])
        for form, found in (("steady", steady), ("log", left_in)):
            found.append([*head, *_shares(ds, form, band), none(f"{form}_stream_of_model")])
        own.append([*head, *(none(f"{term}_of_model") for term in OWN_TERMS.values())])
        for form, mask in (("weight", "denominator"), ("terms", "terms")):
            total = none(f"{form}_form_of_model", scale=MILLION, cell="both")
            weights.append([*head, mask, total, *_shares(ds, form, band)])
    at, sources, last = ("model", "band"), "Sources, log form, the constant sink", ("residual", "residual component")
    return [
        Table("Total beside its nulls, log form", (*at, "total", *NULLS.values()), totals),
        Table(f"{sources} taken out of the residual stream", (*at, "mask and constant sink", *last), steady),
        Table(f"{sources} left in", (*at, "mask", *last), left_in),
        Table("What moves denominators beside the number of keys, log form", (*at, *OWN_TERMS), own),
        Table("Sources, weight form", (*at, "mask as", "total", *SOURCES), weights),
    ]


def _by_block(results: Results) -> list[Table]:
    """Parts block by block, in the first band."""
    logs, components, weights = [], [], []
    early = {name: within_bound(ds).isel(band=0) for name, ds in results.items()}
    for name, layer, ds in ((name, layer, one) for name, one in early.items() for layer in one["layer"].values):
        at = ds.sel(layer=layer)
        bare = "positional" in at.coords and at["positional"] == "none"
        head = [name, f"{layer}, no rotation" if bare else str(layer)]
        parts = map(variance, at["log_form_by_block"].sel(part=list(PARTS)))
        logs.append([*head, *parts, number(at["log_noise_by_block"], ".2g")])
        components.append([*head, *(estimated(at, f"{form}_stream_by_block", said=variance) for form in COMPONENTS)])
        total, sources = (
            at["weight_form_by_block"].sel(cell="both"),
            at["weight_source_by_block"].sel(source=list(SOURCES)),
        )
        weights.append([*head, variance(MILLION * total), *(number(MILLION * one) for one in sources)])
    at = ("model", "block")
    return [
        Table("Blocks, log form", (*at, *PARTS, "noise"), logs),
        Table("Blocks, residual component", (*at, "residual component", "constant sink left in"), components),
        Table("Blocks, weight form", (*at, "total", *SOURCES), weights),
    ]


NULLS = {"uniform": "uniform attention", "fresh": "fresh weights", "shuffled": "shuffled labels"}
OWN_TERMS = {
    "position 0's constant": "sink_constant",
    "its varying part": "sink_varying",
    "the other keys": "log_rest",
}


def _shares(ds: xr.Dataset, form: str, band: str) -> list[str]:
    """The share of each source, "-" where shares mean nothing; in the log form there is no spread."""
    log = form in COMPONENTS
    means = resolved(ds, "log" if log else form, band)
    shares = (estimated(ds, f"{form}_share_of_model", ".0%", source=s, band=band) for s in SOURCES[: 2 if log else 3])
    return [share if means else "-" for share in shares]


def _null(ds: xr.Dataset) -> list[str]:
    """The null checks of every band, and a remark where one fails."""
    layer, bands = ds["layer"].values[0], [str(band) for band in ds["band"].values]
    found = [f"{estimated(ds, 'log_stream_by_block', layer=layer, band=band)} in {band}" for band in bands]
    lines = [
        "null check, should be 0: log form with both sources removed "
        f"{float(np.abs(ds['log_neither']).max()):.1g} nat^2 at most (rounding); "
        f"V(X) in block {layer}, where streams carry no position: {', '.join(found)}"
    ]
    failing = [band for band in bands if null_fails(ds, band)]
    if failing:
        which, its = ("band", "its") if len(failing) == 1 else ("bands", "their")
        lines.append(
            f"NOT 0 in {which} {', '.join(failing)}: more prompts are needed before {its} numbers mean anything"
        )
    for band in bands:
        at = {"layer": layer, "band": band}
        if estimate(ds, "log_stream_by_block", **at)[1] > 0 and band not in failing:
            own = estimated(ds, "log_sink_by_block", **at)
            lines.append(f"in band {band} position 0's own logits account for it, V(K) = {own}: no noise")
    return lines


def _order(results: Results, form: str) -> list[str]:
    """Which model has how much of the residual component, and how it changes with depth.

    Nothing of a form that older results lack.
    """
    found, of_model = {name: ds.isel(band=0) for name, ds in results.items()}, f"{form}_stream_of_model"
    if not all(of_model in ds for ds in found.values()):
        return []
    rising = sorted(found, key=lambda name: float(found[name][of_model]))
    depth = {name: _with_depth(ds[f"{form}_stream_by_block"].values) for name, ds in found.items()}
    correlations = ", ".join(f"{name} {number(rho, '.2f')}" for name, rho in depth.items())
    return [
        f"{COMPONENTS[form]}: {' < '.join(f'{name} {estimated(found[name], of_model)}' for name in rising)}",
        f"its rank correlation with depth: {correlations}",
    ]


def _with_depth(values: np.ndarray) -> float:
    return spearman(range(len(values)), values) if len(values) > 1 else math.nan


# ------------------------------------------------------------------------------------------------------------ BOS swap
