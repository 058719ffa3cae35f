"""How plotly draws lines, bands and bars on the page."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import plotly.graph_objects as go
from numpy.typing import ArrayLike

from ..figures.palette import BLACK, GREY

Axis: TypeAlias = Mapping[str, Any] | None

DIGITS = 4  # significant, of every number on the page
POINTS = 480  # of a curve over positions; a chart is not much wider in pixels
ENDS = 64  # positions at either end that are always kept: that is where the curves turn


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


def empty(
    x: str,
    y: str,
    *,
    log: bool = False,
    decades: int | None = None,
    bars: bool = False,
    across: Axis = None,
    up: Axis = None,
) -> go.Figure:
    """Axes and nothing on them yet; `across` and `up` say more of them than their titles. Bars stand beside each other.

    A logarithmic axis ends `decades` below the largest value shown, if given.
    """
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
    if bars:
        figure.update_layout(barmode="group").update_xaxes(showgrid=False)
    return figure.update_xaxes(**across or {}).update_yaxes(**up or {})


def ink(color: str) -> dict[str, Any]:
    """What a trace's `meta` says of its colour: black is the colour of text, which the page's scheme decides."""
    return {"ink": True} if color == BLACK else {}


def line(
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
    """A curve; its number shows on hovering."""
    return go.Scatter(
        x=np.asarray(x).tolist(),
        y=rounded(y),
        name=text(name),
        mode=mode,
        line={"color": color, "dash": dash, "width": width},
        marker={"color": color, "size": 6},
        meta=dict(meta) | ink(color),
        hovertemplate="%{y:.4~g}",
    )


def bar(
    x: Sequence[str],
    y: ArrayLike,
    low: ArrayLike | None,
    high: ArrayLike | None,
    *,
    name: str,
    color: str,
    meta: Mapping[str, Any],
) -> go.Bar:
    """Bars with their intervals."""
    look: dict[str, Any] = {"marker": {"color": color}, "meta": dict(meta) | ink(color)}
    return go.Bar(x=list(x), y=rounded(y), error_y=errors(y, low, high), name=text(name), **look)


def band(
    figure: go.Figure,
    x: np.ndarray,
    centre: np.ndarray,
    low: np.ndarray | None,
    high: np.ndarray | None,
    *,
    color: str,
    meta: Mapping[str, Any],
) -> None:
    """Add two traces with the area between them filled.

    Of a curve without negative values, zeros have none: the axis may be logarithmic, and an end that would reach zero
    stops at a tenth of the smallest value.
    """
    if low is None or high is None or np.array_equal(low, high, equal_nan=True):
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


def errors(values: ArrayLike, lows: ArrayLike | None, highs: ArrayLike | None) -> dict[str, Any]:
    """Whiskers from the lows to the highs; of length 0 where there is no interval."""
    centre = np.asarray(values, dtype=np.float64)
    low, high = (np.full(centre.shape, np.nan) if one is None else np.asarray(one, np.float64) for one in (lows, highs))
    up, down = ([one or 0.0 for one in rounded(length)] for length in (high - centre, centre - low))
    return {"type": "data", "array": up, "arrayminus": down, "thickness": 1.2, "width": 3}


def beside_line(figure: go.Figure, y: float, said: str, *, at: float | None = None) -> None:
    """A dotted horizontal line, and at its right end what it stands for; `at` in decades on a logarithmic axis."""
    figure.add_hline(y=y, line={"color": GREY, "dash": "dot", "width": 1})
    look: Any = {"showarrow": False, "xanchor": "right", "yanchor": "bottom", "font": {"size": 11}}
    figure.add_annotation(x=1, y=y if at is None else at, xref="paper", yref="y", text=said, **look)
