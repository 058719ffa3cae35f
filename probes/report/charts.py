"""Interactive charts, each made by one function from results alone; nothing here measures, and nothing is typed in.

Every function gives a plotly `Figure`. What a reader can switch is written on the traces: `meta` says which model,
condition, quantity, ... a trace is of, and the page shows those whose values are all chosen. Three entries of `meta` are the
page's own: `ink` for what is drawn in the colour of text, `scale` for heat maps whose zero is the paper, `last` for the
position that counts as 1 on an axis of position fractions. Numbers keep four significant digits.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from numpy.typing import ArrayLike

from ..figures.bos import PUBLISHED
from ..figures.jacobian import theory_curve
from ..figures.leakage import SOURCES as SOURCE_COLORS
from ..figures.map import DEPTH_COLORS
from ..figures.match import MODEL, TOYS
from ..figures.style import BLACK, CYCLE, DECADES, GREY, PURPLE, THEORIES, condition_style
from ..measures.agreement import averaged, taken_at
from ..measures.leakage import resolved
from ..measures.matched import others_of, samples
from ..measures.roles import LARGE, role_names
from ..measures.sinks import RULES
from ..results.curves import band, profiles, smooth_between
from ..results.profiles import comparable, mean_profiles
from ..results.theory_map import rows as map_rows

Results: TypeAlias = Mapping[str, xr.Dataset]

DIGITS = 4  # significant, of every number on the page
MAP_DECADES = 3  # of the map's axis; a window that cuts the first positions off has nothing there, and is cut off, too
POINTS = 480  # of a curve over positions; a chart is not much wider in pixels
ENDS = 64  # positions at either end that are always kept: that is where the curves turn
DASHES = {"pretrained": "solid", "init": "dash", "init-nope": "dot"}
THEORY_DASHES = {
    "score_path": "dot",
    "values": "dashdot",
    "uniform": "longdash",
    "config": "dash",
    "cesaro": "longdashdot",
}
MEASURED, KERNEL, CESARO, SCALAR = "measured", "second-moment kernel", "N^L, best α", "one-product surrogate"
QUANTILES = "5 to 95 % of pairs"
EACH, SMOOTHED = "each position", "smoothed over 5 %"
REMOVED = (-1.0, 1.5)  # where the axis ends at most: an interval far beyond says nothing
MOST_TICKS = 16  # of heads or blocks along an axis
BESIDE = {"sensitivity": "sensitivity", "alpha": "mean weight α"}
MARKED = 64  # positions up to which each has a mark
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
# Position 0's logit, as far as it is the same for all queries: with the mask, or with the residual stream.
SINK = {"_steady": "taken out", "": "left in"}
NULLS = {"null_uniform": ("uniform attention", "dot"), "null_fresh": ("fresh weights", "dash")}
NULLS["null_shuffled"] = ("shuffled labels", "dashdot")


def model_colors(names: Iterable[str]) -> dict[str, str]:
    """A colour for every model, the one it has in the figures of one panel; of more than seven, colours come again."""
    return {name: CYCLE[n % len(CYCLE)] for n, name in enumerate(names)}


def rounded(values: ArrayLike) -> list[float | None]:
    """Numbers with four significant digits; None for what is not finite, which JSON has no form for."""
    return [
        None if not math.isfinite(value) else float(f"{value:.{DIGITS}g}")
        for value in np.asarray(values, dtype=np.float64).ravel().tolist()
    ]


def metas(figure: go.Figure) -> list[dict[str, Any]]:
    """What each trace is of."""
    return [trace.meta or {} for trace in traces(figure)]


def traces(figure: go.Figure) -> list[Any]:
    """The traces, whose kinds differ in what they have."""
    return list(figure.data)


def positions(length: int) -> np.ndarray:
    """Positions that are drawn: all of a short curve; of a long one both ends whole and every so many between."""
    if length <= POINTS:
        return np.arange(length)
    middle = np.linspace(ENDS, length - ENDS - 1, POINTS - 2 * ENDS).round().astype(int)
    return np.concatenate([np.arange(ENDS), np.unique(middle), np.arange(length - ENDS, length)])


def text(name: str) -> str:
    """A name as plotly takes it, which reads some HTML in texts."""
    return html.escape(name, quote=False)


# ------------------------------------------------------------------------------------------------------------ jacobian


def sensitivity(results: Results, scalar: Results | None = None) -> go.Figure:
    """Sensitivity by input position: models by colour, conditions by line, with the theories of each and the scalar probe.

    Geometric means over prompts of the scale-free sensitivity. Bands reach from the smallest to the largest seed, or two
    standard errors over documents around a single run.
    """
    free = " · rms(x) / rms(h)" * all(map(comparable, results.values()))
    label = f"sensitivity  ‖J<sub>j</sub>‖<sub>F</sub> / √d{free}"
    figure = _figure("input position j", label, log=True, decades=DECADES)
    colors = model_colors(results)
    for name, ds in results.items():
        for condition, runs in mean_profiles(ds).items():
            label = condition_style(condition).label
            of = {"model": name, "condition": condition, "last": len(runs[0].mean) - 1}
            centre, low, high = band([run.mean for run in runs])
            what = "seeds"
            if len(runs) == 1:
                reach = np.exp(2 * np.divide(runs[0].stderr, centre, out=np.zeros_like(centre), where=centre > 0))
                low, high, what = centre / reach, centre * reach, "±2 standard errors:"
            at = positions(len(centre))
            for detail, ends in ((EACH, (low, centre, high)), (SMOOTHED, map(smooth_between, (low, centre, high)))):
                bottom, middle, top = (curve[at] for curve in ends)
                meta = of | {"curve": MEASURED, "detail": detail}
                _band(figure, at, middle, bottom, top, color=colors[name], meta=meta)
                figure.add_trace(
                    go.Scatter(
                        x=at.tolist(),
                        y=rounded(middle),
                        customdata=list(zip(rounded(bottom), rounded(top), strict=True)),
                        name=text(f"{name}, {label}"),
                        line={"color": colors[name], "dash": DASHES.get(condition, "dashdot"), "width": 2},
                        mode="lines",
                        meta=meta | _ink(colors[name]),
                        hovertemplate=f"%{{y:.4~g}}  ({what} %{{customdata[0]:.3~g}} to %{{customdata[1]:.3~g}})",
                    )
                )
            for theory, called in (("score_path", KERNEL), ("cesaro", CESARO)):
                curve = _told(ds, theory, condition, centre)
                if curve is not None:
                    figure.add_trace(
                        _line(
                            at,
                            curve[at],
                            name=f"{name}, {label}: {called}",
                            color=colors[name],
                            dash=THEORY_DASHES[theory],
                            width=1.4,
                            meta=of | {"curve": called},
                        )
                    )
    for name, ds in (scalar or {}).items():
        for condition, runs in mean_profiles(ds).items():
            curve = band([run.mean for run in runs]).centre
            at = positions(len(curve))
            figure.add_trace(
                _line(
                    at,
                    curve[at],
                    name=f"{name}, {condition_style(condition).label}: {SCALAR}",
                    color=colors.get(name, GREY),
                    width=1.0,
                    meta={"model": name, "condition": condition, "curve": SCALAR, "last": len(curve) - 1},
                )
            )
    return figure


def _told(ds: xr.Dataset, theory: str, condition: str, measured: np.ndarray) -> np.ndarray | None:
    """A theory's curve beside a measured one; of N^L, whose scale is free, at its height."""
    if f"theory_{theory}" not in ds:
        return None
    if theory != "cesaro":
        return band([run.mean for run in mean_profiles(ds, f"theory_{theory}")[condition]]).centre
    curve = theory_curve(ds, theory, condition)[: len(measured)]
    seen = (curve > 0) & (measured > 0)
    if not np.any(seen):
        return None
    return curve * np.exp(np.mean(np.log(measured[seen] / curve[seen])))


def theories(results: Results) -> go.Figure:
    """Measured profiles with every theory's prediction, by model and condition."""
    figure = _figure("input position j", "sensitivity  ‖J<sub>j</sub>‖<sub>F</sub> / √d", log=True, decades=DECADES)
    for name, ds in results.items():
        for condition, runs in profiles(ds).items():
            of = {"model": name, "condition": condition, "last": len(runs[0].mean) - 1}
            measured = band([run.mean for run in runs]).centre
            at = positions(len(measured))
            color = condition_style(condition).color
            figure.add_trace(
                _line(at, measured[at], name=MEASURED, color=color, width=2.4, meta=of | {"curve": MEASURED})
            )
            for theory, style in THEORIES.items():
                if f"theory_{theory}" not in ds:
                    continue
                curve = theory_curve(ds, theory, condition)
                if np.any(np.isfinite(curve)):
                    label = CESARO if theory == "cesaro" else style.label
                    figure.add_trace(
                        _line(
                            at,
                            curve[at],
                            name=label,
                            color=style.color,
                            dash=THEORY_DASHES[theory],
                            width=1.6,
                            meta=of | {"curve": label},
                        )
                    )
    return figure


def birth(ds: xr.Dataset) -> go.Figure:
    """How far the ends of a fresh model's profile stand above its middle, over the logits' deviation d sigma^2."""
    figure = _figure("d σ²  (width × initializer range squared)", "end / middle", log=True, decades=MAP_DECADES)
    found = map_rows(ds)
    ticks = sorted({row["strength"] for row in found if row["group"] == "depth"})
    figure.update_xaxes(type="log", tickvals=rounded(ticks), ticktext=[f"{tick:g}" for tick in ticks])
    factor = float(ds.attrs["factor"])
    for end in ("primacy", "recency"):
        lines = [row for row in found if row["group"] == "depth"]
        for blocks in sorted({row["blocks"] for row in lines}):
            of_depth = sorted((row for row in lines if row["blocks"] == blocks), key=lambda row: row["strength"])
            _places(figure, of_depth, end, f"{blocks} blocks", DEPTH_COLORS.get(blocks, GREY), "lines+markers")
        others = [row for row in found if row["group"] != "depth"]
        named = [row for row in others if row["name"]]
        _places(figure, [row for row in others if not row["name"]], end, "other changes", GREY, "markers")
        _places(figure, named, end, "usual models", PURPLE, "markers", symbol="star", size=11)
    figure.add_hline(y=factor, line={"color": GREY, "dash": "dot", "width": 1})
    _beside_line(figure, math.log10(factor), f"{factor:g} times the middle")
    return figure


def _beside_line(figure: go.Figure, y: float, said: str) -> None:
    """What a horizontal line stands for, at its right end; `y` as the axis counts, in decades on a logarithmic one."""
    look: Any = {"showarrow": False, "xanchor": "right", "yanchor": "bottom", "font": {"size": 11}}
    figure.add_annotation(x=1, y=y, xref="paper", yref="y", text=said, **look)


def _places(
    figure: go.Figure, places: Sequence[Any], end: str, label: str, color: str, mode: str, **marker: Any
) -> None:
    shown = [row for row in places if math.isfinite(getattr(row.shape, end)) and getattr(row.shape, end) > 0]
    if shown:
        figure.add_trace(
            go.Scatter(
                x=rounded([row["strength"] for row in shown]),
                y=rounded([getattr(row.shape, end) for row in shown]),
                text=[text(row.label) for row in shown],
                name=label,
                mode=mode,
                line={"color": color, "width": 1.6},
                marker={"color": color, "size": 7} | marker,
                meta={"end": end, "places": label} | _ink(color),
                hovertemplate=f"%{{text}}<br>{end} %{{y:.3~g}}<extra></extra>",
            )
        )


# --------------------------------------------------------------------------------------------------------------- sinks


def keys(results: Results) -> go.Figure:
    """Mean weight on each key, sink rate and [Wu]'s fraction, means over blocks and heads, beside uniform attention."""
    figure = _figure("key position", "", log=False)
    figure.update_yaxes(rangemode="tozero")
    colors = model_colors(results)
    for name, ds in results.items():
        at = ds["key"].values
        alpha = ds["alpha"].mean([dim for dim in ds["alpha"].dims if dim != "key"])
        found = {"alpha": alpha} | {q: ds[q] for q in QUANTITIES if q != "alpha"}
        for quantity, values in found.items():
            figure.add_trace(
                _line(
                    at,
                    values.values,
                    name=name,
                    color=colors[name],
                    mode="lines+markers",
                    meta={"model": name, "quantity": QUANTITIES[quantity]},
                )
            )
        figure.add_trace(
            _line(
                at,
                ds["uniform"].mean("layer").values,
                name=f"{name}, uniform attention",
                color=colors[name],
                dash="dot",
                width=1.2,
                meta={"model": name, "quantity": QUANTITIES["alpha"]},
            )
        )
    return figure


def heads(results: Results) -> go.Figure:
    """Every head of every model: how much it attends to, reads, and reacts to position 0; one is shown at a time."""
    figure = _figure("head", "block", log=False)
    for metric, label in METRICS.items():
        having = {name: ds for name, ds in results.items() if metric in ds}
        most = max((float(np.nanmax(np.nan_to_num(ds[metric].values))) for ds in having.values()), default=1.0)
        for name, ds in having.items():
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
    figure.update_yaxes(autorange="reversed")
    return figure


def training(results: Results) -> go.Figure:
    """Sinks at several steps of training of one or more models, the last weights at the end."""
    figure = _figure("step of training", "", log=False)
    figure.update_xaxes(type="category")
    figure.update_yaxes(rangemode="tozero")
    courses = steps(results)
    colors = model_colors(courses)
    for name, course in courses.items():
        labels = [label for label, _ in course]
        first = [ds.isel(key=0) if "key" in ds.dims else ds for _, ds in course]
        dims = [[dim for dim in ds["alpha"].dims if dim != "key"] for ds in first]
        curves = {
            QUANTITIES["alpha"]: [float(ds["alpha"].mean(dim)) for ds, dim in zip(first, dims, strict=True)],
            QUANTITIES["sink_rate_of_model"]: [float(ds["sink_rate_of_model"]) for ds in first],
            "highest mean weight of a head": [float(ds["attends"].max()) for ds in first],
        }
        for quantity, values in curves.items():
            figure.add_trace(
                _line(
                    labels,
                    values,
                    name=name,
                    color=colors[name],
                    mode="lines+markers",
                    meta={"model": name, "quantity": quantity},
                )
            )
        figure.add_trace(
            _line(
                labels,
                [float(ds["uniform"].mean()) for ds in first],
                name=f"{name}, uniform attention",
                color=colors[name],
                dash="dot",
                meta={"model": name, "quantity": QUANTITIES["alpha"]},
            )
        )
    return figure


def steps(results: Results) -> dict[str, list[tuple[str, xr.Dataset]]]:
    """Results "MODEL@stepN" by model, in the order of their steps; "MODEL" itself is the last, "final"."""
    found: dict[str, list[tuple[float, str, xr.Dataset]]] = {}
    for name, ds in results.items():
        model, at, step = name.rpartition("@step")
        if at and step.isdigit():
            found.setdefault(model, []).append((float(step), step, ds))
        else:
            found.setdefault(name, []).append((math.inf, "final", ds))
    courses = {model: sorted(course, key=lambda one: one[0]) for model, course in found.items() if len(course) > 1}
    return {model: [(label, ds) for _, label, ds in course] for model, course in courses.items()}


# ---------------------------------------------------------------------------------------------------------- trajectory


def norms(results: Results) -> go.Figure:
    """Norm of the residual stream by layer: position 0, and the median of the others."""
    figure = _figure("layer", "norm of the stream", log=True)
    colors = model_colors(results)
    for name, ds in results.items():
        for first in ds["first"].values:
            at = ds.sel(first=first)
            for variable, label, dash in (("norm_first", "position 0", "solid"), ("norm_others", "others", "dash")):
                figure.add_trace(
                    _line(
                        ds["layer"].values,
                        at[variable].values,
                        name=f"{name}, {label}",
                        color=colors[name],
                        dash=dash,
                        mode="lines+markers",
                        meta={"model": name, "first": _first(str(first)), "where": label},
                    )
                )
    figure.update_xaxes(tickformat="d")
    return figure


def cosines(results: Results) -> go.Figure:
    """How alike the streams of different first tokens are, by layer: mean over pairs, with 5 and 95 % quantiles."""
    figure = _figure("layer", "cosine between starts", log=False)
    colors = model_colors(results)
    for name, ds in results.items():
        for place in ds["place"].values:
            at = ds.sel(place=place)
            x, centre = ds["layer"].values, at["cosine"].values
            of = {"model": name, "place": str(place)}
            low, high, spread = at["cosine_low"].values, at["cosine_high"].values, of | {"shaded": QUANTILES}
            _band(figure, x, centre, low, high, color=colors[name], meta=spread)
            figure.add_trace(_line(x, centre, name=name, color=colors[name], mode="lines+markers", meta=of))
    figure.update_xaxes(tickformat="d")
    return figure


def _first(first: str) -> str:
    return {"bos": "BOS at position 0", "text": "text at position 0"}.get(first, first)


# ------------------------------------------------------------------------------------------------------------- leakage


def sources(results: Results) -> go.Figure:
    """Where leakage comes from: Shapley value of each source per model, band and form, with 95 % intervals.

    Shares are left out where the total may be zero or the null check of block 0 fails (`probes.measures.leakage.resolved`).
    """
    figure = _figure("", "share of the leakage", log=False)
    figure.update_layout(barmode="group")
    for form, label in FORMS.items():
        for band_name in dict.fromkeys(str(b) for ds in results.values() for b in ds["band"].values):
            share, log = f"{form}_share_of_model", form in ("steady", "log")
            having = {name: ds for name, ds in results.items() if share in ds and band_name in ds["band"].values}
            for source in ("mask", "residual", "spread") if having else ():
                if log and source == "spread":  # zero in the log form
                    continue
                at = {"source": source, "band": band_name}
                values, lows, highs = [], [], []
                for ds in having.values():
                    known = resolved(ds, "log" if log else form, band_name)
                    for found, end in ((values, ""), (lows, "_low"), (highs, "_high")):
                        variable = f"{share}{end}"
                        found.append(float(ds[variable].sel(at)) if known and variable in ds else math.nan)
                figure.add_trace(
                    go.Bar(
                        x=[text(name) for name in having],
                        y=rounded(values),
                        error_y=_errors(values, lows, highs),
                        name=source,
                        marker={"color": SOURCE_COLORS[source]},
                        meta={"form": label, "band": band_name, "source": source},
                        hovertemplate=f"%{{x}}<br>{source} %{{y:.1%}}<extra></extra>",
                    )
                )
    figure.update_xaxes(showgrid=False)
    figure.update_yaxes(tickformat=".0%", zeroline=True)
    return figure


def depth(results: Results) -> go.Figure:
    """Leakage and its parts block by block, mean over heads, with 95 % intervals, in squared nats; nulls of the total."""
    figure = _figure("block", "nat²", log=False)
    colors = model_colors(results)
    for name, ds in results.items():
        for band_name in map(str, ds["band"].values):
            at = ds.sel(band=band_name)
            found = (
                {"residual component V(X)": ("steady_stream_by_block", at)} if "steady_stream_by_block" in ds else {}
            )
            found["residual component, the constant sink left in"] = ("log_stream_by_block", at)
            found |= {str(part): ("log_form_by_block", at.sel(part=part)) for part in ds["part"].values}
            for part, (variable, where) in found.items():
                values = where[variable].values
                lows, highs = (
                    where[f"{variable}{end}"].values if f"{variable}{end}" in where else np.full(len(values), np.nan)
                    for end in ("_low", "_high")
                )
                trace = _line(
                    ds["layer"].values,
                    values,
                    name=name,
                    color=colors[name],
                    mode="lines+markers",
                    meta={"model": name, "band": band_name, "part": part},
                )
                trace.error_y = _errors(values, lows, highs)
                figure.add_trace(trace)
            meta = {"model": name, "band": band_name, "part": "total"}
            for null, (said, dash) in NULLS.items():
                if null in ds:
                    level = np.full(ds.sizes["layer"], float(at[null]))
                    look: Any = {"color": colors[name], "dash": dash, "width": 1.2}
                    figure.add_trace(_line(ds["layer"].values, level, name=f"{name}, {said}", meta=meta, **look))
    figure.update_xaxes(tickformat="d")
    figure.update_yaxes(zeroline=True)
    return figure


# ------------------------------------------------------------------------------------------------------------ BOS swap


def by_replacement(results: Results) -> dict[str, dict[str, xr.Dataset]]:
    """Results of the swap by what was put at position 0, then by model."""
    found: dict[str, dict[str, xr.Dataset]] = {}
    for name, ds in results.items():
        several = [str(one) for one in ds["replacement"].values] if "replacement" in ds.dims else []
        for one in several or [str(ds.attrs.get("replacement", "another embedding"))]:
            found.setdefault(one, {})[name] = ds.sel(replacement=one) if several else ds
    return found


def removed(results: Results) -> go.Figure:
    """Fraction of the residual component that the swap removes, by query band, with 95 % intervals.

    Where a model has no component to remove, the interval has no end, and nothing is drawn.
    """
    figure = _figure("queries", "removed by the swap", log=False)
    colors = model_colors(results)
    for replacement, of in by_replacement(results).items():
        for name, (component, sink), ds in ((name, variant, ds) for name, ds in of.items() for variant in SINK.items()):
            variable = f"removed{component}_of_model"
            if variable not in ds:  # of an older result
                continue
            values, lows, highs = (
                ds[f"{variable}{end}"].values if f"{variable}{end}" in ds else np.full(ds.sizes["band"], np.nan)
                for end in ("", "_low", "_high")
            )
            values = np.where(np.isinf(lows) | np.isinf(highs), np.nan, values)
            figure.add_trace(
                go.Bar(
                    x=[str(one) for one in ds["band"].values],
                    y=rounded(values),
                    error_y=_errors(values, lows, highs),
                    name=text(name),
                    marker={"color": colors[name]},
                    meta={"model": name, "replacement": replacement, "sink": sink} | _ink(colors[name]),
                    hovertemplate=f"{text(name)}<br>queries %{{x}}: %{{y:.0%}}<extra></extra>",
                )
            )
    ends = [(y + up, y - down) for trace in traces(figure) for y, up, down in _whiskers(trace) if y is not None]
    low, high = (min((one[1] for one in ends), default=0.0), max((one[0] for one in ends), default=1.0))
    figure.update_layout(barmode="group")
    figure.update_xaxes(type="category", showgrid=False)
    limits = [max(min(low, 0.0), REMOVED[0]) - 0.05, min(max(high, 1.0), REMOVED[1]) + 0.05]
    figure.update_yaxes(tickformat=".0%", zeroline=True, range=limits)
    figure.add_hline(y=PUBLISHED, line={"color": GREY, "dash": "dot", "width": 1})
    _beside_line(figure, PUBLISHED, f"[Ruscio]: {PUBLISHED:.0%} at early queries")
    return figure


def _whiskers(trace: Any) -> list[tuple[float | None, float, float]]:
    return list(zip(trace.y, trace.error_y.array, trace.error_y.arrayminus, strict=True))


def components(results: Results) -> go.Figure:
    """The residual component before and after the swap, by query band, with 95 % intervals."""
    figure = _figure("queries", "residual component V(X), nat²", log=False)
    colors = model_colors(results)
    for replacement, of in by_replacement(results).items():
        for name, ds in of.items():
            looks = {"before": 0.45, "after": 1.0}
            for when, (component, sink) in ((when, variant) for variant in SINK.items() for when in looks):
                variable = f"residual{component}_{when}_of_model"
                if variable not in ds:
                    continue
                values, lows, highs = (
                    ds[f"{variable}{end}"].values if f"{variable}{end}" in ds else np.full(ds.sizes["band"], np.nan)
                    for end in ("", "_low", "_high")
                )
                figure.add_trace(
                    go.Bar(
                        x=[str(one) for one in ds["band"].values],
                        y=rounded(values),
                        error_y=_errors(values, lows, highs),
                        name=text(f"{name}, {when}"),
                        marker={"color": colors[name]},
                        opacity=looks[when],
                        meta={"model": name, "replacement": replacement, "when": when, "sink": sink}
                        | _ink(colors[name]),
                        hovertemplate=f"{text(name)}, {when}<br>queries %{{x}}: %{{y:.3~g}} nat²<extra></extra>",
                    )
                )
    figure.update_layout(barmode="group")
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_yaxes(zeroline=True)
    return figure


def losses(results: Results) -> go.Figure:
    """What the swap does to the next-token loss, position by position."""
    figure = _figure("position", "change of the loss, nats", log=False)
    colors = model_colors(results)
    for replacement, of in by_replacement(results).items():
        for name, ds in of.items():
            change = ds["loss_change"].values
            at = positions(len(change))
            seen = at[np.isfinite(change[at])]
            meta = {"model": name, "replacement": replacement, "last": len(change) - 1}
            if "loss_change_low" in ds:
                low, high = ds["loss_change_low"].values, ds["loss_change_high"].values
                _band(figure, seen, change[seen], low[seen], high[seen], color=colors[name], meta=meta)
            figure.add_trace(_line(seen, change[seen], name=name, color=colors[name], width=1.6, meta=meta))
    figure.update_yaxes(zeroline=True)
    return figure


# ---------------------------------------------------------------------------------------------------------------- toys


def retrieval(ds: xr.Dataset) -> go.Figure:
    """[Liu-7]'s positional retrieval: loss by target, median and range of the seeds, beside the limits of blind readers."""
    figure = _figure("target position", "loss, nats", log=False)
    figure.update_yaxes(rangemode="tozero")
    widths = [int(width) for width in ds["width"].values]
    targets = ds["target"].values
    for layers in map(int, ds["layers"].values):
        for number, width in enumerate(widths):
            for residual in map(int, ds["residual"].values):
                for feed_forward in map(int, ds["feed_forward"].values):
                    at = ds["loss"].sel(layers=layers, width=width, residual=residual, feed_forward=feed_forward)
                    loss = at.transpose("seed", "target").values
                    if np.all(np.isnan(loss)):
                        continue
                    meta = {"layers": _count(layers, "layer"), "variant": _variant(residual, feed_forward)}
                    meta |= {"width": f"width {width}"}
                    centre = np.nanmedian(loss, axis=0)
                    color = CYCLE[number % len(CYCLE)]
                    low, high = np.nanmin(loss, axis=0), np.nanmax(loss, axis=0)
                    _band(figure, targets, centre, low, high, color=color, meta=meta)
                    figure.add_trace(
                        _line(targets, centre, name=f"width {width}", color=color, mode="lines+markers", meta=meta)
                    )
    for reader in ds["reader"].values if "limit" in ds else ():
        figure.add_trace(
            _line(
                targets,
                ds["limit"].sel(reader=reader).values,
                name=f"reader of {reader}",
                color=GREY,
                dash="dot",
                width=1.2,
                meta={"width": "what a reader without order can have"},
            )
        )
    figure.update_xaxes(tickformat="d")
    return figure


def gaps(ds: xr.Dataset) -> go.Figure:
    """[Wu]'s position bias: accuracy when the earlier item is right less that when the later one is, and seeds' range."""
    figure = _figure("pair of items", "accuracy gap, earlier less later", log=False)
    colors = model_colors([str(one) for one in ds["positional"].values])
    apart = [dim for dim in ds["gap"].dims if dim not in ("positional", "training", "seed", "pair")]
    stacked = ds["gap"].stack(setting=apart) if apart else ds["gap"].expand_dims("setting", axis=-1)
    for index in range(stacked.sizes["setting"]):
        one = stacked.isel(setting=index)
        setting = ", ".join(f"{dim} {one[dim].item()}" for dim in map(str, apart) if ds.sizes[dim] > 1)
        for training in map(str, ds["training"].values):
            for positional, color in colors.items():
                values = one.sel(training=training, positional=positional).transpose("seed", "pair").values
                values = values[~np.all(np.isnan(values), axis=1)]
                if not len(values):
                    continue
                centre = values.mean(axis=0)
                figure.add_trace(
                    go.Bar(
                        x=[str(pair) for pair in ds["pair"].values],
                        y=rounded(centre),
                        error_y=_errors(centre, values.min(axis=0), values.max(axis=0)),
                        name=text(positional),
                        marker={"color": color},
                        meta={"training": training, "positional": positional, "setting": setting} | _ink(color),
                        hovertemplate=f"{text(positional)}, %{{x}}<br>gap %{{y:.3f}}<extra></extra>",
                    )
                )
    figure.update_layout(barmode="group")
    figure.update_xaxes(showgrid=False)
    figure.update_yaxes(zeroline=True)
    return figure


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def _variant(residual: int, feed_forward: int) -> str:
    parts = ["residual"] * bool(residual) + ["feed-forward"] * bool(feed_forward)
    return " and ".join(parts) or "attention alone"


# ------------------------------------------------------------------------------------------------- toys beside models


def beside(results: Results) -> go.Figure:
    """Curves of each model, of its theory and of its toys over the position fraction; `quantity` tells them apart.

    Sensitivities are divided by their geometric mean over as many even fractions as a toy has positions, since a toy's unit
    is its own; mean weights are divided by those of uniform attention.
    """
    figure = _figure(
        "position fraction, j / (T − 1)", "against the curve's own mean, or uniform", log=True, decades=DECADES
    )
    for name, ds in results.items():
        toys = [(str(variant), str(training)) for variant in ds["variant"].values for training in ds["training"].values]
        whose = [(("model", state), state, MODEL[state], {}) for state in map(str, ds["state"].values)]
        whose += [((v, t), "", TOYS[t], {"variant": v}) for v, t in toys]
        whose += [
            (("theory", which), state, THEORIES[style], {"theory": state})
            for state in map(str, ds["state"].values)
            for which, style in (("kernel", "score_path"), ("cesaro", "cesaro"))
        ]
        for of, state, style, where in whose:
            for curve, quantity in BESIDE.items():
                found = samples(ds, curve, of, state)
                if found is None or (of[0] == "theory" and curve != "sensitivity"):
                    continue
                label = CESARO if of == ("theory", "cesaro") else style.label
                values = averaged(found)
                if curve == "sensitivity":
                    scale = taken_at(values, min(ds.sizes["point"], len(values)))
                    values = values / np.exp(np.log(scale[scale > 0]).mean()) if np.any(scale > 0) else values
                else:
                    uniform = ds["model_uniform"] if of[0] == "model" else ds["toy_uniform"].sel(variant=of[0])
                    values = np.divide(
                        values, uniform.values, out=np.full(len(values), np.nan), where=uniform.values > 0
                    )
                at = positions(len(values))
                meta = {"model": name, "quantity": quantity, "curve": label} | where
                if of[0] == "theory":
                    meta["curve"] = f"{label}, {condition_style(state).label}"
                figure.add_trace(
                    _line(
                        at / (len(values) - 1),
                        values[at],
                        name=meta["curve"],
                        color=style.color,
                        dash="solid" if of[0] == "model" else "dot" if of[0] == "theory" else "dash",
                        mode="lines" if len(values) > MARKED else "lines+markers",
                        meta=meta,
                    )
                )
    return figure


def of_theory(figure: go.Figure) -> list[str]:
    """Names of the curves in `beside` that are theory's."""
    return list(dict.fromkeys(meta["curve"] for meta in metas(figure) if "theory" in meta))


def agreements_of(results: Results) -> go.Figure:
    """How far toys and theory are from each model's profile: RMS log error with a free scale, 95 % intervals."""
    figure = _figure("RMS log error of the profile", "", log=False)
    colors = model_colors(results)
    for name, ds in results.items():
        for state in map(str, ds["state"].values):
            others = [other for other in others_of(ds, state) if other in ds["other"].values]
            at = ds.sel(curve="sensitivity", state=state, other=others)
            ends = [at[f"agreement_error{end}"].values for end in ("", "_low", "_high")]
            known = np.isfinite(ends[0])
            errors = _errors(*(end[known] for end in ends))
            figure.add_trace(
                go.Bar(
                    y=[text(other) for other, there in zip(others, known, strict=True) if there],
                    x=rounded(ends[0][known]),
                    error_x=errors,
                    orientation="h",
                    name=text(name),
                    marker={"color": colors[name]},
                    meta={"model": name, "state": state} | _ink(colors[name]),
                    hovertemplate=f"{text(name)}<br>%{{y}}: %{{x:.3f}}<extra></extra>",
                )
            )
    figure.update_layout(barmode="group")
    figure.update_xaxes(rangemode="tozero")
    figure.update_yaxes(autorange="reversed", showgrid=False, type="category")
    return figure


# ------------------------------------------------------------------------------------------------------ a head in detail


def pattern_bytes(ds: xr.Dataset) -> dict[tuple[int, int], np.ndarray]:
    """The patterns that a result of `sinks` holds, by (block, head): square roots of weights as bytes [query, key].

    A byte holds small weights finely that way: w = (b / 255)^2.
    """
    if "pattern" not in ds or not ds.sizes.get("picture"):
        return {}
    found = {}
    for n in range(ds.sizes["picture"]):
        one = ds.isel(picture=n)
        weights = np.clip(np.nan_to_num(one["pattern"].values.astype(np.float64)), 0, 1)
        place = int(one["picture_layer"]), int(one["picture_head"])
        found[place] = np.round(255 * np.sqrt(weights)).astype(np.uint8)
    return found


def head_numbers(ds: xr.Dataset) -> dict[tuple[int, int], list[tuple[str, str]]]:
    """What a result of `sinks` says of every head, by (block, head): names and values as text."""
    scalars = [name for name in NAMES if name in ds]
    roles, ending = role_names(ds), [f"{name}_{end}" for name in NAMES for end in ("low", "high")]
    ending = {name for name in ending if name in ds}
    alpha = ds["alpha"].mean("prompt") if "prompt" in ds["alpha"].dims else ds["alpha"]
    found: dict[tuple[int, int], list[tuple[str, str]]] = {}
    for layer, block in enumerate(ds["layer"].values.tolist()):
        for number, head in enumerate(ds["head"].values.tolist()):
            at = ds.isel(layer=layer, head=number)
            rows = []
            if "has_role" in ds:
                sure = "" if int(at["role_sure"]) else ", not surely"
                rows.append(("role at position 0", f"{roles[layer, number]}{sure}"))
            for name in scalars:
                said = f"{float(at[name]):.3g}" if name in IN_NATS else f"{float(at[name]):.3f}"
                if f"{name}_low" in ending and np.isfinite(float(at[f"{name}_low"])):
                    said += f" [{float(at[f'{name}_low']):.3g}, {float(at[f'{name}_high']):.3g}]"
                rows.append((NAMES[name], said))
            for what, name in (("value_norm", "value"), ("written_norm", "head's output"), ("key_norm", "key")):
                sink, rest = (float(at[what].sel(place=place)) for place in ("sink", "rest"))
                ratio = f"{sink / rest:.3g}" if rest else "-"
                rows.append((f"size of the {name} at 0 / elsewhere", ratio))
            weights = alpha.isel(layer=layer, head=number).values.tolist()
            shown = zip(ds["key"].values.tolist(), weights, strict=True)
            listed = ", ".join(f"{key}: {value:.3f}" for key, value in list(shown)[:4])
            rows.append(("mean weight α by key", listed))
            chosen = [rule for rule in RULES if int(at["selected"].sel(rule=rule))]
            rows.append(("selected by the rules", ", ".join(chosen) or "none"))
            found[int(block), int(head)] = rows
    return found


IN_NATS = ("effect", "loss_change")
NAMES = {
    "effect": "effect: KL of the next token without what comes from 0 (nat)",
    "loss_change": "change of the loss without it (nat)",
    "attends": "attends: mean weight on position 0",
    "written": "written: size of what comes from 0 beside the stream",
    "output": "size of the whole output beside the stream",
    "output_own": "size of the output beside its own with 0 hidden",
    "reads": "reads: size of what comes from 0 against the output",
    "reads_along": "part of the output along what comes from 0",
    "reacts": "reacts: attention to other keys changed by a swap at 0",
    "reacts_among_others": "the same among the other keys alone",
    "reacts_output": "size of the output's change by that swap beside the stream",
}


# ------------------------------------------------------------------------------------------------------------ drawing


def _figure(x: str, y: str, *, log: bool, decades: int | None = None) -> go.Figure:
    """Axes and nothing on them yet. A logarithmic axis ends `decades` below the largest value shown, if given."""
    figure = go.Figure()
    if decades is not None:
        figure.update_layout(meta={"decades": decades})
    figure.update_layout(template={}, showlegend=False, hovermode="closest", font={"size": 13})
    figure.update_layout(margin={"l": 64, "r": 16, "t": 16, "b": 52}, hoverlabel={"align": "left", "namelength": -1})
    figure.update_layout(paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)")
    figure.update_xaxes(title={"text": x}, zeroline=False, automargin=True)
    figure.update_yaxes(title={"text": y}, zeroline=False, automargin=True, type="log" if log else "linear")
    if log:
        figure.update_yaxes(dtick=1, tickformat="~g", minor={"showgrid": False})
    return figure


def _ink(color: str) -> dict[str, Any]:
    return {"ink": True} if color == BLACK else {}


def _line(
    x: Any,
    y: ArrayLike,
    *,
    name: str,
    color: str,
    meta: Mapping[str, Any],
    dash: str = "solid",
    width: float = 2.0,
    mode: str = "lines",
) -> go.Scatter:
    return go.Scatter(
        x=np.asarray(x).tolist(),
        y=rounded(y),
        name=text(name),
        mode=mode,
        line={"color": color, "dash": dash, "width": width},
        marker={"color": color, "size": 6},
        meta=dict(meta) | _ink(color),
        hovertemplate="%{y:.4~g}",
    )


def _band(
    figure: go.Figure,
    x: np.ndarray,
    centre: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    *,
    color: str,
    meta: Mapping[str, Any],
) -> None:
    """Two traces with the area between them filled.

    Of a curve without negative values, zeros have none: the axis may be logarithmic, and an end that would reach zero
    stops at a tenth of the smallest value.
    """
    if np.array_equal(low, high, equal_nan=True):
        return
    seen = np.isfinite(low) & np.isfinite(high)
    if np.all(~(centre < 0)) and np.any(centre > 0):
        seen &= centre > 0
        low = np.maximum(low, float(centre[centre > 0].min()) / 10)
    if not np.any(seen):
        return
    common: dict[str, Any] = {"mode": "lines", "line": {"width": 0, "color": color}, "hoverinfo": "skip"}
    common |= {"x": np.asarray(x)[seen].tolist(), "meta": dict(meta)}
    shade = f"rgba({int(color[1:3], 16)},{int(color[3:5], 16)},{int(color[5:7], 16)},0.16)"
    figure.add_trace(go.Scatter(y=rounded(low[seen]), **common))
    figure.add_trace(go.Scatter(y=rounded(high[seen]), fill="tonexty", fillcolor=shade, **common))


def _errors(values: ArrayLike, lows: ArrayLike, highs: ArrayLike) -> dict[str, Any]:
    centre, low, high = (np.asarray(one, dtype=np.float64) for one in (values, lows, highs))
    up = [0.0 if one is None else one for one in rounded(high - centre)]
    down = [0.0 if one is None else one for one in rounded(centre - low)]
    return {"type": "data", "array": up, "arrayminus": down, "thickness": 1.2, "width": 3}
