"""The page's charts of toys: two of their experiments, and toys beside the models they match."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from ..figures.palette import CYCLE, GREY, condition_style, model_colors
from ..figures.series import beside as beside_curves
from ..figures.series import over_mean
from ..figures.style import DECADES, FADED
from ..measures.match_result import fewest_points, others_of
from ..results.gate import learnt
from .charts import called
from .plotting import band, bar, empty, errors, ink, line, metas, positions, rounded, text

Results: TypeAlias = Mapping[str, xr.Dataset]

BESIDE = {"sensitivity": "sensitivity", "alpha": "mean weight α"}
MARKED = 64  # positions up to which each has a mark
BLIND = "what a reader without order can have"


def retrieval(ds: xr.Dataset) -> go.Figure:
    """[Liu-7]'s positional retrieval: loss by target, median and range of the seeds, beside the limits of blind readers."""
    figure = empty("target position", "loss, nats", across={"tickformat": "d"}, up={"rangemode": "tozero"})
    targets, widths = ds["target"].values, ds["width"].values.tolist()
    axes = (ds[name].values.tolist() for name in ("residual", "feed_forward"))
    for layers, width, residual, feed_forward in product(ds["layers"].values.tolist(), widths, *axes):
        at = ds["loss"].sel(layers=layers, width=width, residual=residual, feed_forward=feed_forward)
        loss = at.transpose("seed", "target").values
        if np.all(np.isnan(loss)):
            continue
        variant = " and ".join(["residual"] * bool(residual) + ["feed-forward"] * bool(feed_forward))
        depth = f"{int(layers)} layer{'s' if layers != 1 else ''}"
        meta = {"layers": depth, "variant": variant or "attention alone", "width": f"width {int(width)}"}
        centre, color = np.nanmedian(loss, axis=0), CYCLE[widths.index(width) % len(CYCLE)]
        band(figure, targets, centre, np.nanmin(loss, axis=0), np.nanmax(loss, axis=0), color=color, meta=meta)
        figure.add_trace(line(targets, centre, name=meta["width"], color=color, mode="lines+markers", meta=meta))
    for reader in ds["reader"].values if "limit" in ds else ():
        look: dict[str, Any] = {"color": GREY, "dash": "dot", "width": 1.2, "meta": {"width": BLIND}}
        figure.add_trace(line(targets, ds["limit"].sel(reader=reader).values, name=f"reader of {reader}", **look))
    return figure


def gaps(ds: xr.Dataset) -> go.Figure:
    """[Wu]'s position bias: accuracy when the earlier item is right less that when the later one is, and seeds' range.

    Bars of toys that do not pass the gate are pale.
    """
    figure = empty("pair of items", "accuracy gap, earlier less later", bars=True, up={"zeroline": True})
    colors = model_colors([str(one) for one in ds["positional"].values])
    apart = [dim for dim in ds["gap"].dims if dim not in ("positional", "training", "seed", "pair")]
    both = ds[[name for name in ("gap", "novel_accuracy") if name in ds]]  # results of before lack the second
    stacked = both.stack(setting=apart) if apart else both.expand_dims("setting")
    for index in range(stacked.sizes["setting"]):
        one = stacked.isel(setting=index)
        setting = ", ".join(f"{dim} {one[dim].item()}" for dim in map(str, apart) if ds.sizes[dim] > 1)
        for training, (positional, color) in product(map(str, ds["training"].values), colors.items()):
            place = {"training": training, "positional": positional}
            cell = one.sel(place).dropna("seed", how="all", subset=["gap"])
            if not cell.sizes["seed"]:
                continue
            values = cell["gap"].transpose("seed", "pair").values
            ends, x = (values.min(axis=0), values.max(axis=0)), [str(pair) for pair in ds["pair"].values]
            trace = bar(x, values.mean(axis=0), *ends, name=positional, color=color, meta=place | {"setting": setting})
            fails = "novel_accuracy" in cell and learnt(cell["novel_accuracy"].values, blind=0.0) != "trained"
            trace.opacity = FADED if fails else 1
            said = "<br>has not learnt to retrieve" * fails
            trace.hovertemplate = f"{text(positional)}, %{{x}}<br>gap %{{y:.3f}}{said}<extra></extra>"
            figure.add_trace(trace)
    return figure


def beside(results: Results) -> go.Figure:
    """Curves of each model, of its theory and of its toys over the position fraction; `quantity` tells them apart.

    Elasticities are divided by their geometric mean over as many even fractions as the shortest toys have positions, since a
    toy's unit is its own; mean weights are divided by those of uniform attention.
    """
    label = "against the curve's own mean, or uniform"
    figure = empty("position fraction, j / (T − 1)", label, log=True, decades=DECADES)
    every = ((name, ds, curve) for name, ds in results.items() for one in BESIDE for curve in beside_curves(ds, one))
    for name, ds, curve in every:
        kind, state, quantity = (curve.of[key] for key in ("kind", "state", "quantity"))
        meta = {"model": name, "quantity": BESIDE[quantity], "curve": curve.label}
        if kind == "theory":
            said = f"{called(curve.of['theory'])}, {condition_style(state).label}"
            meta |= {"curve": said, "theory": state}
        if kind == "toy":
            meta |= {"variant": curve.of["variant"]}
        y = over_mean(curve, fewest_points(ds)).y if quantity == "sensitivity" else curve.y
        at = positions(len(y))
        look: dict[str, Any] = {"dash": {"model": "solid", "theory": "dot", "toy": "dash"}[kind], "meta": meta}
        look["mode"] = "lines" if len(y) > MARKED else "lines+markers"
        figure.add_trace(line(at / (len(y) - 1), y[at], name=meta["curve"], color=curve.style.color, **look))
    return figure


def of_theory(figure: go.Figure) -> list[str]:
    """Names of the curves in `beside` that are theory's."""
    return list(dict.fromkeys(meta["curve"] for meta in metas(figure) if "theory" in meta))


def agreements_of(results: Results) -> go.Figure:
    """How far toys and theory are from each model's profile: RMS log error with a free scale, 95 % intervals."""
    figure = empty("RMS log error of the profile", "", across={"rangemode": "tozero"})
    figure.update_layout(barmode="group")
    figure.update_yaxes(autorange="reversed", showgrid=False, type="category")
    for name, color in model_colors(results).items():
        ds = results[name]
        for state in map(str, ds["state"].values):
            others = [other for other in others_of(ds, state) if other in ds["other"].values]
            at = ds.sel(curve="sensitivity", state=state, other=others)
            ends = [at[f"agreement_error{end}"].values for end in ("", "_low", "_high")]
            known = np.isfinite(ends[0])
            figure.add_trace(
                go.Bar(
                    y=[text(other) for other, there in zip(others, known, strict=True) if there],
                    x=rounded(ends[0][known]),
                    error_x=errors(*(end[known] for end in ends)),
                    orientation="h",
                    name=text(name),
                    marker={"color": color},
                    meta={"model": name, "state": state} | ink(color),
                    hovertemplate=f"{text(name)}<br>%{{y}}: %{{x:.3f}}<extra></extra>",
                )
            )
    return figure
