"""Measured profiles beside theory: the second-moment kernel in four forms, and [Chowdhury]'s N^L with its best alpha.

The kernel predicts a mean square, so that profiles here are root mean squares over prompts and geometric means over seeds.
Errors are over the positions up to the query. `uniform`, `values` and `score_path` are the kernel of these weights with
uniform attention, with the measured patterns held constant, and with their dependence on queries and keys; `config` is the
kernel from the config alone. On pretrained weights the kernel is the random-matrix baseline: what departs from it was
learned. `value` and `score` are the paths on which patterns are held constant, and the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..charts import CYCLE, DASHED, THEORY, Panel, Series, curves, level, panels, position_axis
from ..measure import Headline, Measure
from ..models.view import View
from ..results.curves import band, relative_error, rms_log_error, rms_profiles
from ..results.dataset import drawn_from, options_of
from ..results.tables import Table, number
from ..theory.kernel import second_moment
from . import jacobian as profiles
from .jacobian.chart import LOOKS

THEORIES = ("uniform", "values", "score_path", "config")
SAID = {
    "uniform": "kernel, uniform attention",
    "values": "kernel, patterns held",
    "score_path": "kernel",
    "config": "kernel of the config alone",
    "cesaro": "N^L, alpha fitted",
}
CAPTION = (
    "Root mean square over prompts, geometric mean over seeds. Below 1: the theory predicts less than is measured; cut at a "
    "factor of 2. Last panel: how far training moves away from the kernel of random matrices."
)
FRAME = (0.5, 2.0)  # of ratios: words at a curve far outside would leave its panel no room
HIDDEN = ("readout", "pathway", "query", "from_layer", "no_rope")


@dataclass(frozen=True)
class Options(profiles.Options):
    """Compare measured profiles with theory: the second-moment kernel in four forms, and N^L with its best alpha.

    Writes theory.nc, theory.md and the chart: each kernel's mean relative error over positions, how far its shape and that
    of N^L are off (RMS log error, free scale), and the shares of the value path (patterns held constant) and of the score
    path in the norm. On pretrained weights the kernel is the random-matrix baseline. There is no --backend: only the
    modules of transformers can be taken apart block by block.

    Examples:
      headwater theory tiny-llama
      headwater theory tiny-llama tiny-qwen2 --conditions init --seeds 5 --method exact
      headwater theory ./checkpoint --prompts 2 --length 512
    """

    def values(self) -> dict[str, Any]:
        """As `jacobian`'s, with all theories and both paths."""
        return super().values() | {"theories": THEORIES, "by_path": True}


def measured(ds: xr.Dataset, condition: str, variable: str = "sensitivity") -> Float[np.ndarray, " position"]:
    """A condition's mean profile up to the query, of the measurement, a path or a theory."""
    end = int(options_of(ds)["query"]) + 1
    if variable == "theory_cesaro":
        return ds[variable].sel(condition=condition).values[:end].astype(np.float64)
    return band([run.mean[:end] for run in rms_profiles(ds, variable)[condition]]).centre


def theories(ds: xr.Dataset) -> dict[str, str]:
    """The theories in a result: name and variable."""
    return {name: f"theory_{name}" for name in SAID if f"theory_{name}" in ds}


def _errors(ds: xr.Dataset, *, shape: bool) -> xr.DataArray:
    """By condition and theory: mean relative error over positions, or of the `shape`, RMS log error with a free scale."""
    if "theory_uniform" not in ds and "theory_score_path" not in ds:
        raise KeyError("theory")
    conditions = list(map(str, ds["condition"].values))
    names = [name for name in theories(ds) if shape or name != "cesaro"]

    def error(condition: str, name: str) -> float:
        predicted, curve = measured(ds, condition, f"theory_{name}"), measured(ds, condition)
        if not shape:
            return relative_error(predicted, curve)
        seen = (curve > 0) & (predicted > 0)  # float32 rounds what is far out in a window's reach to zero
        return rms_log_error(predicted[seen], curve[seen], free_scale=True) if seen.sum() > 1 else np.nan

    values = [[error(condition, name) for name in names] for condition in conditions]
    coords = {"condition": conditions, "theory": [SAID[name] for name in names]}
    return xr.DataArray(values, coords, ("condition", "theory"))


def shares(ds: xr.Dataset) -> xr.DataArray:
    """Mean over positions of each path's norm against the whole [condition, path]; their norms do not add."""
    conditions, paths = list(map(str, ds["condition"].values)), ["value", "score"]
    if "value" not in ds:
        raise KeyError("value")

    def share(condition: str, path: str) -> float:
        whole = measured(ds, condition)
        return float(np.mean(measured(ds, condition, path)[whole > 0] / whole[whole > 0]))

    values = [[share(condition, path) for path in paths] for condition in conditions]
    return xr.DataArray(values, {"condition": conditions, "path": ["value path", "score path"]}, ("condition", "path"))


def answer(results: Mapping[str, xr.Dataset]) -> list[str]:
    """How far the kernel is from what is measured."""
    lines = []
    for model, ds in results.items():
        errors = _errors(ds, shape=False)
        name = SAID["score_path"] if SAID["score_path"] in errors.theory else str(errors.theory[0].item())
        parts = [f"{number(100 * errors.sel(theory=name, condition=c))} % ({c})" for c in errors.condition.values]
        lines.append(f"{model}: the {name} is {', '.join(parts)} off the measured profile, mean over positions.")
    return lines


def tables(results: Mapping[str, xr.Dataset]) -> list[Table]:
    """Errors by theory and condition, with alpha of N^L and the paths' shares."""
    rows = []
    for model, ds in results.items():
        off, shaped, parts = _errors(ds, shape=False), _errors(ds, shape=True), shares(ds)
        for condition in shaped.condition.values:
            for theory in shaped.theory.values:
                known = theory in off.theory.values
                error = number(100 * off.sel(theory=theory, condition=condition)) if known else "-"
                alpha = number(ds["alpha"].sel(condition=condition)) if theory == SAID["cesaro"] else "-"
                rows.append(
                    [model, condition, theory, error, number(shaped.sel(theory=theory, condition=condition)), alpha]
                    + [number(parts.sel(condition=condition, path=path), ".3f") for path in parts.path.values]
                )
    columns = (
        "model",
        "condition",
        "theory",
        "error (%)",
        "shape's RMS log error",
        "alpha",
        "value path",
        "score path",
    )
    title = "Theories against measured profiles"
    return [Table(title + f"; fresh weights: {drawn_from(results)}" * bool(drawn_from(results)), columns, rows)]


def chart(results: Mapping[str, xr.Dataset]) -> Figure:
    """The fresh profile with theories, every theory over it, and the trained profile over its kernel."""

    def series(ds: xr.Dataset, label: str, y: np.ndarray, color: str, **look: Any) -> Series:
        return Series(label, y, color, x=np.arange(len(y)) / max(1, len(y) - 1), **look)

    def above(cell: Axes, ds: xr.Dataset) -> None:
        condition = str(ds["condition"].values[-1]) if "init" not in ds["condition"].values else "init"
        drawn = [series(ds, LOOKS[condition][0], measured(ds, condition), LOOKS[condition][1], width=2.2)]
        drawn += [
            series(ds, SAID[name], measured(ds, condition, f"theory_{name}"), color, line=DASHED)
            for name, color in (("score_path", THEORY), ("cesaro", CYCLE[3]))
            if name in theories(ds)
        ]
        curves(cell, drawn, log=True)
        position_axis(cell)

    def ratios(cell: Axes, ds: xr.Dataset) -> None:
        condition = str(ds["condition"].values[-1]) if "init" not in ds["condition"].values else "init"
        with np.errstate(divide="ignore", invalid="ignore"):
            drawn = [
                series(
                    ds, SAID[name], np.clip(measured(ds, condition, variable) / measured(ds, condition), *FRAME), color
                )
                for (name, variable), color in zip(theories(ds).items(), CYCLE[2:], strict=False)
            ]
        curves(cell, drawn, log=True)
        _framed(cell)

    def departures(cell: Axes, ds: xr.Dataset) -> None:
        with np.errstate(divide="ignore", invalid="ignore"):
            drawn = [
                series(ds, LOOKS[c][0], measured(ds, c) / measured(ds, c, "theory_score_path"), LOOKS[c][1])
                for c in map(str, ds["condition"].values)
                if "theory_score_path" in ds
            ]
        curves(cell, drawn, log=True)
        level(cell, 1.0)
        position_axis(cell)

    rows = [Panel("sensitivity", above), Panel("predicted / measured", ratios), Panel("measured / kernel", departures)]
    return panels(results, rows, CAPTION)


def _framed(cell: Axes) -> None:
    level(cell, 1.0)
    cell.set_ylim(*FRAME)
    position_axis(cell)


def _trial(model: View, tokens: Any) -> xr.Dataset:
    return second_moment(model, tokens[:2], attention="measured", score_path=True, from_layer="all")


MEASURE = Measure(
    name="theory",
    question="How well do second moments of the weights predict the profile?",
    compute=profiles.profile,
    options=Options,
    units=profiles.units,
    joined=profiles.joined,
    headlines=(
        Headline("mean relative error", partial(_errors, shape=False), form=".3f"),
        Headline("shape's RMS log error", partial(_errors, shape=True), form=".3f"),
        Headline("share of the norm", shares, form=".3f"),
        Headline("alpha of N^L", lambda ds: ds["alpha"], form=".3f"),
    ),
    answer=answer,
    tables=tables,
    chart=chart,
    caption=CAPTION,
    defaults={"prompts": 4},
    without=(*HIDDEN, "backend", "ablate", "ablate_how"),
    trials={"theory": _trial},
)
