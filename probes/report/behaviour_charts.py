"""Charts on what models do: recall by depth and what it follows, interventions at position 0, decoded position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from ..figures.interventions import intervention_points
from ..figures.palette import model_colors
from ..figures.series import decoded_curves, recall_curves
from ..measures.mechanism_numbers import PROFILES, RANK_MARGIN, follows
from .plotting import band, empty, errors, line, rounded, text

Results: TypeAlias = Mapping[str, xr.Dataset]

WHOLE = {"tickformat": "d"}  # of an axis of integers
RECALLED = {"log p of the value (nat)": ("log_p", "control"), "share of exact answers": ("exact",)}
BEHAVIOUR = {  # what a chart calls it, by variable
    "kl_of_model": "KL of the next token (nat)",
    "loss_change_of_model": "change of loss (nat)",
    "recall_log_p_change": "change of recall, log p (nat)",
}


def recall(results: Results) -> go.Figure:
    """Recall by depth of the pair: log probability, with and without the key in the list, and exact answers; 95 % bands."""
    figure = empty("depth of the pair, first to last", "")
    for name, color in model_colors(results).items():
        for quantity, names in RECALLED.items():
            for curve in recall_curves(results[name], *names):
                of = {"model": name, "quantity": quantity, "asked": curve.label}
                band(figure, curve.x, curve.y, curve.low, curve.high, color=color, meta=of)
                look: dict[str, Any] = {"dash": curve.style.dash, "mode": "lines+markers", "meta": of}
                figure.add_trace(line(curve.x, curve.y, name=f"{name}, {curve.label}", color=color, **look))
    return figure


def decoded(results: Results) -> go.Figure:
    """R^2 of log(1 + i) from the stream, by layer, of positions and of permuted ones; 95 % bands."""
    figure = empty("layer", "R² of log(1 + i)", across=WHOLE)
    for name, color in model_colors(results).items():
        for curve in decoded_curves(results[name]):
            of = {"model": name, "positions": curve.label}
            band(figure, curve.x, curve.y, curve.low, curve.high, color=color, meta=of)
            look: dict[str, Any] = {"dash": curve.style.dash, "mode": "lines+markers", "meta": of}
            figure.add_trace(line(curve.x, curve.y, name=f"{name}, {curve.label}", color=color, **look))
    return figure


def followed(results: Results) -> go.Figure:
    """Rank correlation over depth of the gain with each profile and with log distance, 95 % intervals over couples of lists.

    Grey: within it, a correlation says that there is nothing (`mechanism_numbers.RANK_MARGIN`).
    """
    figure = empty("rank correlation with the gain, over depth", "", across={"range": [-1, 1], "zeroline": True})
    figure.update_yaxes(autorange="reversed", showgrid=False, type="category")
    figure.update_layout(scattermode="group")
    figure.add_vrect(-RANK_MARGIN, RANK_MARGIN, fillcolor="rgba(128,128,128,0.15)", line_width=0)
    for name, color in model_colors(results).items():
        ds = results[name]
        found = {said: follows(ds, of) for of, said in PROFILES.items() if of in ds or of == "log_distance"}
        ends = np.array([number[:3] for number in found.values()]).T
        figure.add_trace(
            go.Scatter(
                y=list(found),
                x=rounded(ends[0]),
                error_x=errors(*ends),
                mode="markers",
                marker={"color": color, "size": 8},
                name=text(name),
                meta={"model": name},
                hovertemplate=f"{text(name)}<br>%{{y}}: %{{x:.2f}}<extra></extra>",
            )
        )
    return figure


def interventions(results: Results) -> go.Figure:
    """What every intervention at position 0 does to behaviour, over the sink rate that it leaves; 95 % intervals."""
    figure = empty("sink rate of position 0 after it", "", across={"range": [-0.02, 1]}, up={"zeroline": True})
    for name, ds in results.items():
        for of, quantity in BEHAVIOUR.items():
            for points in intervention_points(ds, of) if of in ds else ():
                trace = go.Scatter(
                    x=rounded(points.x),
                    y=rounded(points.y),
                    error_y=errors(points.y, points.low, points.high),
                    mode="markers",
                    marker={
                        "color": points.style.color,
                        "size": 8,
                        "symbol": "circle" if points.filled else "circle-open",
                    },
                    text=[text(said) for said in points.of["names"]],
                    name=points.label,
                    meta={"model": name, "quantity": quantity, "kind": points.label},
                    hovertemplate="%{text}<br>sink rate %{x:.2f}: %{y:.3f}<extra></extra>",
                )
                figure.add_trace(trace)
    return figure
