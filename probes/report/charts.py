"""The page's interactive charts: the curves of `probes.figures.series`, drawn by plotly; nothing here measures.

Every function gives a plotly `Figure`. What a reader can switch is written on the traces: `meta` says which model,
condition, quantity, ... a trace is of, and the page shows those whose values are all chosen. Three entries of `meta` are the
page's own: `ink` for what is drawn in the colour of text, `scale` for heat maps whose zero is the paper, `last` for the
position that counts as 1 on an axis of position fractions. Numbers keep four significant digits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from ..figures.bos import PUBLISHED
from ..figures.palette import GREY, NULLS, SOURCES, THEORIES, condition_style, model_colors
from ..figures.series import (
    MEASURED,
    Curve,
    at_height,
    cosine_curves,
    having,
    key_curves,
    log_form_curves,
    loss_curves,
    map_ends,
    norm_curves,
    null_curves,
    of_several,
    profiles_with,
    share_curves,
    swap_bands,
)
from ..figures.style import DECADES
from ..measures.roles import LARGE
from ..results.curves import rms_profiles, smooth_between
from ..results.profiles import comparable
from .plotting import band, bar, beside_line, empty, errors, line, positions, rounded, text, traces

Results: TypeAlias = Mapping[str, xr.Dataset]

MAP_DECADES = 3  # of the map's axis; a window that cuts the first positions off has nothing there, and is cut off, too
CESARO, SCALAR = "N^L, best α", "one-product surrogate"
SENSITIVITY = "sensitivity  ‖J<sub>j</sub>‖<sub>F</sub> / √d"
QUANTILES = "5 to 95 % of pairs"
EACH, SMOOTHED = "each position", "smoothed over 5 %"
UNKNOWN = "another embedding"  # of results that do not say which
REMOVED = (-1.0, 1.5)  # where the axis ends at most: an interval far beyond says nothing
WHOLE = {"tickformat": "d"}  # of an axis of integers
MOST_TICKS = 16  # of heads or blocks along an axis
METRICS = {
    "attends": "attends",
    "written": "written, beside the stream",
    "output_own": "output beside its own with 0 hidden",
    "effect": "effect (nat)",
    "reads": "reads, of its output",
    "reacts": "reacts",
}
FLOORS = {"written": LARGE, "effect": 1e-6}  # of a shade's end, where other sizes are usual
QUANTITIES = {"alpha": "mean weight α", "sink_rate_of_model": "sink rate [Gu]", "over_tau_of_model": "over τ [Wu]"}
FORMS = {
    "steady": "log form",
    "log": "log form, the constant sink left in",
    "weight": "weight form",
    "terms": "weight form, the mask as its number of terms",
}
STREAMS = {"steady": "residual component V(X)", "log": "residual component, the constant sink left in"}


def called(theory: str) -> str:
    """A theory's name on the page."""
    return CESARO if theory == "cesaro" else THEORIES[theory].label


# ------------------------------------------------------------------------------------------------------------ jacobian


def sensitivity(results: Results, scalar: Results | None = None) -> go.Figure:
    """Sensitivity by input position: models by colour, conditions by line, with the theories of each and the scalar probe.

    Geometric means over prompts of the scale-free sensitivity. Bands reach from the smallest to the largest seed, or two
    standard errors over documents around a single run.
    """
    free = " · rms(x) / rms(h)" * all(map(comparable, results.values()))
    figure, colors = empty("input position j", f"{SENSITIVITY}{free}", log=True, decades=DECADES), model_colors(results)
    for name, ds in results.items():
        measured: Any = None
        for curve in profiles_with(ds, ("score_path", "cesaro")):
            of = {"model": name, "condition": curve.of["condition"]}
            if (theory := curve.of["curve"]) == MEASURED:
                measured = curve
                _with_band(figure, curve, colors[name], of)
            elif (told := at_height(curve, measured) if theory == "cesaro" else curve) is not None:
                _by_position(
                    figure, told, of, called(theory), color=colors[name], dash=THEORIES[theory].dash, width=1.4
                )
    for name, ds in (scalar or {}).items():
        for curve in profiles_with(ds):
            of = {"model": name, "condition": curve.of["condition"]}
            _by_position(figure, curve, of, SCALAR, color=colors.get(name, GREY), width=1.0)
    return figure


def _whose(of: Mapping[str, Any]) -> str:
    return f"{of['model']}, {condition_style(of['condition']).label}"


def _by_position(
    figure: go.Figure, curve: Curve, of: Mapping[str, Any], what: str, *, alone: bool = False, **look: Any
) -> None:
    """A curve over input positions, thinned where it is long; its name says whose it is unless it stands `alone`."""
    at, name = positions(len(curve.y)), what if alone else f"{_whose(of)}: {what}"
    figure.add_trace(line(at, curve.y[at], name=name, meta={**of, "curve": what, "last": len(curve.y) - 1}, **look))


def _with_band(figure: go.Figure, curve: Curve, color: str, of: Mapping[str, Any]) -> None:
    """A measured profile, position by position and smoothed, each with its band."""
    at, ends = positions(len(curve.y)), (curve.low, curve.y, curve.high)
    for detail, curves in ((EACH, ends), (SMOOTHED, [smooth_between(end) for end in ends if end is not None])):
        low, middle, high = (np.asarray(one)[at] for one in curves)
        meta = {**of, "curve": MEASURED, "detail": detail, "last": len(curve.y) - 1}
        band(figure, at, middle, low, high, color=color, meta=meta)
        trace = line(at, middle, name=_whose(of), color=color, dash=condition_style(of["condition"]).dash, meta=meta)
        trace.customdata = list(zip(rounded(low), rounded(high), strict=True))
        trace.hovertemplate = f"%{{y:.4~g}}  ({curve.band} %{{customdata[0]:.3~g}} to %{{customdata[1]:.3~g}})"
        figure.add_trace(trace)


def theories(results: Results) -> go.Figure:
    """Measured profiles with every theory's prediction, by model and condition."""
    figure = empty("input position j", SENSITIVITY, log=True, decades=DECADES)
    for name, ds in results.items():
        for curve in profiles_with(ds, THEORIES, rms_profiles):
            of = {"model": name, "condition": curve.of["condition"]}
            if (which := curve.of["curve"]) == MEASURED:
                color = condition_style(of["condition"]).color
                _by_position(figure, curve, of, MEASURED, alone=True, color=color, width=2.4)
            elif np.any(np.isfinite(curve.y)):
                look: dict[str, Any] = {"color": THEORIES[which].color, "dash": THEORIES[which].dash, "width": 1.6}
                _by_position(figure, curve, of, called(which), alone=True, **look)
    return figure


def birth(ds: xr.Dataset) -> go.Figure:
    """How far the ends of a fresh model's profile stand above its middle, over the logits' deviation d sigma^2."""
    figure = empty("d σ²  (width × initializer range squared)", "end / middle", log=True, decades=MAP_DECADES)
    ticks: set[float] = set()
    for end in ("primacy", "recency"):
        for curve in having(map_ends(ds, end), told=False):
            label, lines = curve.of["places"], curve.of["places"].endswith("blocks")
            ticks |= set(curve.x.tolist()) if lines else set()
            seen = np.isfinite(curve.y) & (curve.y > 0)
            if not np.any(seen):
                continue
            look: dict[str, Any] = {"color": curve.style.color, "width": 1.6, "meta": {"end": end, "places": label}}
            look["mode"] = "lines+markers" if lines else "markers"
            trace = line(rounded(curve.x[seen]), curve.y[seen], name=label, **look)
            trace.update(marker={"symbol": "star", "size": 11} if label == "usual models" else {"size": 7})
            trace.text = [text(said) for said, there in zip(curve.texts, seen, strict=True) if there]
            trace.hovertemplate = f"%{{text}}<br>{end} %{{y:.3~g}}<extra></extra>"
            figure.add_trace(trace)
    figure.update_xaxes(type="log", tickvals=rounded(sorted(ticks)), ticktext=[f"{tick:g}" for tick in sorted(ticks)])
    factor = float(ds.attrs["factor"])
    beside_line(figure, factor, f"{factor:g} times the middle", at=math.log10(factor))
    return figure


# --------------------------------------------------------------------------------------------------------------- sinks


def keys(results: Results) -> go.Figure:
    """Mean weight on each key, sink rate and [Wu]'s fraction, means over blocks and heads, beside uniform attention."""
    figure = empty("key position", "", up={"rangemode": "tozero"})
    for name, color in model_colors(results).items():
        curves = key_curves(results[name])
        for quantity, label in QUANTITIES.items():
            meta, curve = {"model": name, "quantity": label}, curves[quantity]
            figure.add_trace(line(curve.x, curve.y, name=name, color=color, mode="lines+markers", meta=meta))
        _uniform(figure, curves["uniform"].x, curves["uniform"].y, name, color, width=1.2)
    return figure


def _uniform(figure: go.Figure, x: Any, y: Any, name: str, color: str, *, width: float) -> None:
    """What mean weights would be under uniform attention."""
    meta = {"model": name, "quantity": QUANTITIES["alpha"]}
    figure.add_trace(line(x, y, name=f"{name}, uniform attention", color=color, dash="dot", width=width, meta=meta))


def heads(results: Results) -> go.Figure:
    """Every head of every model: how much it attends to, reads, and reacts to position 0; one is shown at a time."""
    figure = empty("head", "block", up={"autorange": "reversed"})
    for metric, label in METRICS.items():
        having_it = {name: ds for name, ds in results.items() if metric in ds}
        most = max((float(np.nanmax(np.nan_to_num(ds[metric].values))) for ds in having_it.values()), default=1.0)
        for name, ds in having_it.items():
            values = ds[metric].transpose("layer", "head").values
            gap = 2 if max(values.shape) <= MOST_TICKS else 1 if max(values.shape) <= 2 * MOST_TICKS else 0
            figure.add_trace(
                go.Heatmap(
                    z=[rounded(row) for row in values],
                    x=ds["head"].values.tolist(),
                    y=ds["layer"].values.tolist(),
                    zmin=0,
                    zmax=max(FLOORS.get(metric, 0.3), most),
                    xgap=gap,
                    ygap=gap,
                    name=text(name),
                    colorbar={"thickness": 10, "outlinewidth": 0, "len": 0.9},
                    meta={"model": name, "metric": label, "scale": "weights"},
                    hovertemplate=f"block %{{y}}, head %{{x}}<br>{label} %{{z:.3g}}<extra></extra>",
                )
            )
    for update, dim in ((figure.update_xaxes, "head"), (figure.update_yaxes, "layer")):
        most = max((ds.sizes[dim] for ds in results.values()), default=1)
        update(tick0=0, dtick=max(1, -(-most // MOST_TICKS)), showgrid=False, zeroline=False)
    return figure


def training(results: Results) -> go.Figure:
    """Sinks at several steps of training of one or more models, the last weights at the end."""
    figure = empty("step of training", "", across={"type": "category"}, up={"rangemode": "tozero"})
    courses = steps(results)
    for name, color in model_colors(courses).items():
        labels, every = zip(*courses[name], strict=True)
        first = [ds.isel(key=0) if "key" in ds.dims else ds for ds in every]
        curves = {
            QUANTITIES["alpha"]: [float(ds["alpha"].mean()) for ds in first],
            QUANTITIES["sink_rate_of_model"]: [float(ds["sink_rate_of_model"]) for ds in first],
            "highest mean weight of a head": [float(ds["attends"].max()) for ds in first],
        }
        for quantity, y in curves.items():
            meta = {"model": name, "quantity": quantity}
            figure.add_trace(line(labels, y, name=name, color=color, mode="lines+markers", meta=meta))
        _uniform(figure, labels, [float(ds["uniform"].mean()) for ds in first], name, color, width=2.0)
    return figure


def steps(results: Results) -> dict[str, list[tuple[str, xr.Dataset]]]:
    """Results "MODEL@stepN" by model, in the order of their steps; "MODEL" itself is the last, "final"."""
    found: dict[str, list[tuple[float, str, xr.Dataset]]] = {}
    for name, ds in results.items():
        model, at, step = name.rpartition("@step")
        known = bool(at) and step.isdigit()
        one = (float(step), step, ds) if known else (math.inf, "final", ds)
        found.setdefault(model if known else name, []).append(one)
    ordered = {model: sorted(course, key=lambda one: one[0]) for model, course in found.items() if len(course) > 1}
    return {model: [(label, ds) for _, label, ds in course] for model, course in ordered.items()}


# ---------------------------------------------------------------------------------------------------------- trajectory


def norms(results: Results) -> go.Figure:
    """Norm of the residual stream by layer: position 0, and the median of the others."""
    figure = empty("layer", "norm of the stream", log=True, across=WHOLE)
    for name, color in model_colors(results).items():
        for curve in norm_curves(results[name]):
            first, where = curve.of["first"], curve.of["where"]
            said = {"bos": "BOS at position 0", "text": "text at position 0"}.get(first, first)
            look: dict[str, Any] = {"color": color, "dash": curve.style.dash, "mode": "lines+markers"}
            look["meta"] = {"model": name, "first": said, "where": where}
            figure.add_trace(line(curve.x, curve.y, name=f"{name}, {where}", **look))
    return figure


def cosines(results: Results) -> go.Figure:
    """How alike the streams of different first tokens are, by layer: mean over pairs, with 5 and 95 % quantiles."""
    figure = empty("layer", "cosine between starts", across=WHOLE)
    for name, color in model_colors(results).items():
        for curve in cosine_curves(results[name]):
            if "place" not in curve.of:
                continue
            of = {"model": name, "place": curve.of["place"]}
            band(figure, curve.x, curve.y, curve.low, curve.high, color=color, meta=of | {"shaded": QUANTILES})
            figure.add_trace(line(curve.x, curve.y, name=name, color=color, mode="lines+markers", meta=of))
    return figure


# ------------------------------------------------------------------------------------------------------------- leakage


def sources(results: Results) -> go.Figure:
    """Where leakage comes from: Shapley value of each source per model, band and form, with 95 % intervals.

    Shares are left out where the total may be zero or the null check of block 0 fails (`probes.measures.leakage.resolved`).
    """
    figure = empty("", "share of the leakage", bars=True, up={"tickformat": ".0%", "zeroline": True})
    bands = {name: list(map(str, ds["band"].values)) for name, ds in results.items()}
    for form, label in FORMS.items():
        curves = {name: share_curves(ds, form) for name, ds in results.items()}
        for band_name in dict.fromkeys(one for of_model in bands.values() for one in of_model):
            there = [name for name in results if curves[name] and band_name in bands[name]]
            for source, color in SOURCES.items():
                chosen = [
                    (curve, bands[name].index(band_name))
                    for name in there
                    for curve in having(curves[name], source=source)
                ]
                if chosen:
                    meta = {"form": label, "band": band_name, "source": source}
                    found = np.transpose([_at(*one) for one in chosen])
                    trace = bar(list(map(text, there)), *found, name=source, color=color, meta=meta)
                    trace.hovertemplate = f"%{{x}}<br>{source} %{{y:.1%}}<extra></extra>"
                    figure.add_trace(trace)
    return figure


def _at(curve: Curve, place: int) -> tuple[float, float, float]:
    """One value of a curve with its interval; all NaN where it has none."""
    if curve.low is None or curve.high is None or math.isnan(curve.y[place]):
        return float(curve.y[place]), math.nan, math.nan
    return float(curve.y[place]), float(curve.low[place]), float(curve.high[place])


def depth(results: Results) -> go.Figure:
    """Leakage and its parts block by block, mean over heads, with 95 % intervals, in squared nats; nulls of the total."""
    figure = empty("block", "nat²", across=WHOLE, up={"zeroline": True})
    for name, color in model_colors(results).items():
        for band_name in map(str, results[name]["band"].values):
            at = results[name].sel(band=band_name)
            for curve in log_form_curves(at):
                part = STREAMS.get(curve.of["part"], curve.of["part"])
                meta = {"model": name, "band": band_name, "part": part}
                trace = line(curve.x, curve.y, name=name, color=color, mode="lines+markers", meta=meta)
                trace.error_y = errors(curve.y, curve.low, curve.high)
                figure.add_trace(trace)
            meta = {"model": name, "band": band_name, "part": "total"}
            for curve in null_curves(at):
                style = NULLS[curve.of["null"]]
                look: dict[str, Any] = {"color": color, "dash": style.dash, "width": 1.2, "meta": meta}
                figure.add_trace(line(curve.x, curve.y, name=f"{name}, {style.label}", **look))
    return figure


# ------------------------------------------------------------------------------------------------------------ BOS swap


def by_replacement(results: Results) -> dict[str, dict[str, xr.Dataset]]:
    """Results of the swap by what was put at position 0, then by model, each of that replacement alone."""
    found: dict[str, dict[str, xr.Dataset]] = {}
    for name, ds in results.items():
        several = of_several(ds if {"replacement"} & {*ds.dims, *ds.attrs} else ds.assign_attrs(replacement=UNKNOWN))
        for one in map(str, several["replacement"].values):
            found.setdefault(one, {})[name] = several.sel(replacement=[one])
    return found


def _bands(results: Results, quantity: str, label: str, hover: str) -> go.Figure:
    """Bars by query band of what `swap_bands` gives, without and with the constant sink."""
    figure = empty("queries", label, bars=True, across={"type": "category"}, up={"zeroline": True})
    colors = model_colors(results)
    swaps = [(name, ds) for models in by_replacement(results).values() for name, ds in models.items()]
    for name, ds in swaps:
        for curve in swap_bands(ds, quantity):
            when, y = curve.of["when"], curve.y
            if when == "" and curve.low is not None and curve.high is not None:
                y = np.where(np.isinf(curve.low) | np.isinf(curve.high), np.nan, y)
            meta = {"model": name, "replacement": curve.of["replacement"]} | ({"when": when} if when else {})
            said = f"{name}, {when}" if when else name
            look: dict[str, Any] = {"name": said, "color": colors[name], "meta": meta | {"sink": curve.of["sink"]}}
            trace = bar([str(one) for one in ds["band"].values], y, curve.low, curve.high, **look)
            trace.hovertemplate = f"{text(said)}{hover}<extra></extra>"
            trace.opacity = {"before": 0.45, "after": 1.0}.get(when)
            figure.add_trace(trace)
    return figure


def removed(results: Results) -> go.Figure:
    """Fraction of the residual component that the swap removes, by query band, with 95 % intervals.

    Where a model has no component to remove, the interval has no end, and nothing is drawn.
    """
    figure = _bands(results, "removed", "removed by the swap", "<br>queries %{x}: %{y:.0%}")
    whiskers = [w for t in traces(figure) for w in zip(t.y, t.error_y.array, t.error_y.arrayminus, strict=True)]
    ends = [(y + up, y - down) for y, up, down in whiskers if y is not None]
    low, high = (min((one[1] for one in ends), default=0.0), max((one[0] for one in ends), default=1.0))
    limits = [max(min(low, 0.0), REMOVED[0]) - 0.05, min(max(high, 1.0), REMOVED[1]) + 0.05]
    figure.update_yaxes(tickformat=".0%", range=limits)
    beside_line(figure, PUBLISHED, f"[Ruscio]: {PUBLISHED:.0%} at early queries")
    return figure


def components(results: Results) -> go.Figure:
    """The residual component before and after the swap, by query band, with 95 % intervals."""
    label = "residual component V(X), nat²"
    return _bands(results, "residual", label, "<br>queries %{x}: %{y:.3~g} nat²")


def losses(results: Results) -> go.Figure:
    """What the swap does to the next-token loss, position by position."""
    figure, colors = empty("position", "change of the loss, nats", up={"zeroline": True}), model_colors(results)
    for replacement, models in by_replacement(results).items():
        for name, ds in models.items():
            (curve,) = loss_curves(ds)
            at = positions(len(curve.y))
            seen = at[np.isfinite(curve.y[at])]
            meta = {"model": name, "replacement": replacement, "last": len(curve.y) - 1}
            if curve.low is not None and curve.high is not None:
                band(figure, seen, curve.y[seen], curve.low[seen], curve.high[seen], color=colors[name], meta=meta)
            figure.add_trace(line(seen, curve.y[seen], name=name, color=colors[name], width=1.6, meta=meta))
    return figure
