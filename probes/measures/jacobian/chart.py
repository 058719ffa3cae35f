"""How profiles are drawn: relative sensitivity over position by condition, with what theory predicts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...charts import DASHED, DOTTED, FRESH, PURPLE, THEORY, TRAINED, Panel, Series, curves, panels, position_axis
from ...results.curves import band
from ...results.profiles import profiles

CAPTION = (
    "Geometric mean over prompts and seeds of ||J||/sqrt(d) rms(x)/rms(h). Bands: smallest to largest seed, or two "
    "standard errors over documents of a single run."
)
LOOKS = {
    "init": ("fresh weights", FRESH),
    "init-nope": ("fresh, no positions", PURPLE),
    "pretrained": ("pretrained", TRAINED),
}
PREDICTED = {"score_path": ("predicted by the kernel", DASHED), "values": ("kernel, values alone", DOTTED)}


def profile_series(ds: xr.Dataset, variable: str = "elasticity") -> dict[str, Series]:
    """By condition, the mean profile over fractions of the prompt."""
    found = {}
    for condition, runs in profiles(ds, variable).items():
        whole = band([run.mean for run in runs])
        low, high = whole.low, whole.high
        if len(runs) == 1:
            mean, error = runs[0].mean, runs[0].stderr
            low, high = (mean * np.exp(sign * error / np.where(mean > 0, mean, 1)) for sign in (-2, 2))
        label, color = LOOKS.get(condition, (condition, FRESH))
        x = np.arange(len(whole.centre)) / max(1, len(whole.centre) - 1)
        found[condition] = Series(label, whole.centre, color, low, high, x, width=2.2 if condition == "init" else 1.5)
    return found


def chart(results: Mapping[str, xr.Dataset]) -> Figure:
    """Relative sensitivity by input position, by condition; dashed what the kernel of fresh weights predicts."""

    def draw(cell: Axes, ds: xr.Dataset) -> None:
        drawn = list(profile_series(ds).values())
        for name, (label, line) in PREDICTED.items():
            series = profile_series(ds, f"theory_{name}").get("init")
            if series is not None:
                drawn.append(Series(label, series.y, THEORY, x=series.x, line=line, width=1.2))
        curves(cell, drawn, log=True)
        position_axis(cell)

    return panels(results, [Panel("relative sensitivity to the input", draw, share=True, height=2.8)], CAPTION)
