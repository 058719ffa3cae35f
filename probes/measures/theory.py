"""Measured profiles beside theory: the second-moment kernel in four forms, and [Chowdhury]'s N^L with its best alpha.

The kernel predicts a mean square, so that profiles here are root mean squares over prompts and geometric means over seeds.
The forms and paths are those of `docs/probes/theory.md`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..charts import CYCLE, Panel, Series, curves, level, panels, position_axis
from ..measure import Headline, Measure
from ..results.curves import band, rms_log_error, rms_profiles
from ..results.dataset import drawn_from, options_of
from ..results.tables import Table, interval, number
from ..theory.kernel import second_moment
from . import jacobian as profiles

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
    "factor of 2. Measured / kernel: how far training moves away from random matrices."
)
FRAME = (0.5, 2.0)  # of ratios: words at a curve far outside would leave its panel no room
COLUMNS = ("model", "condition", "theory", "error (%)", "shape's RMS log error", "alpha", "value path", "score path")


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
    runs = rms_profiles(ds, variable).get(condition)
    if runs is None:  # trained weights can take a kernel beyond what float32 holds (Gemma 3)
        return np.full(end, np.nan)
    return band([run.mean[:end] for run in runs]).centre


def theories(ds: xr.Dataset) -> dict[str, str]:
    """The theories in a result: name and variable."""
    return {name: f"theory_{name}" for name in SAID if f"theory_{name}" in ds}


def _by_condition(ds: xr.Dataset, dim: str, labels: Mapping[str, str], of: Callable[[str, str], float]) -> xr.DataArray:
    """A number of every condition and name [condition, dim]."""
    conditions = list(map(str, ds["condition"].values))
    values = [[of(condition, name) for name in labels] for condition in conditions]
    return xr.DataArray(values, {"condition": conditions, dim: list(labels.values())}, ("condition", dim))


def errors(ds: xr.Dataset) -> xr.DataArray:
    """Each kernel's mean relative error over positions [condition, theory, estimate] (`jacobian.misfit`)."""
    found = {SAID[name]: profiles.misfit(ds, variable) for name, variable in theories(ds).items() if name != "cesaro"}
    if not found:
        raise KeyError("theory")
    return xr.concat(list(found.values()), xr.Variable("theory", list(found))).transpose("condition", "theory", ...)


def shape_errors(ds: xr.Dataset) -> xr.DataArray:
    """RMS log error of each theory's shape, with a free scale [condition, theory]."""

    def error(condition: str, name: str) -> float:
        predicted, curve = measured(ds, condition, f"theory_{name}"), measured(ds, condition)
        seen = (curve > 0) & (predicted > 0)  # float32 rounds what is far out in a window's reach to zero
        return rms_log_error(predicted[seen], curve[seen], free_scale=True) if seen.sum() > 1 else np.nan

    if "theory_uniform" not in ds and "theory_score_path" not in ds:
        raise KeyError("theory")
    return _by_condition(ds, "theory", {name: SAID[name] for name in theories(ds)}, error)


def shares(ds: xr.Dataset) -> xr.DataArray:
    """Mean over positions of each path's norm against the whole [condition, path]; their norms do not add."""

    def share(condition: str, path: str) -> float:
        whole = measured(ds, condition)
        return float(np.mean(measured(ds, condition, path)[whole > 0] / whole[whole > 0]))

    return _by_condition(ds, "path", {name: f"{name} path" for name in ("value", "score") if name in ds}, share)


def answer(results: Mapping[str, xr.Dataset]) -> list[str]:
    """How far the kernel is from what is measured."""
    lines = []
    for model, ds in results.items():
        off = errors(ds).sel(estimate="value")
        name = SAID["score_path"] if SAID["score_path"] in off.theory else str(off.theory[0].item())
        parts = [f"{number(100 * off.sel(theory=name, condition=c))} % ({c})" for c in off.condition.values]
        lines.append(f"{model}: the {name} is {', '.join(parts)} off the measured profile, mean over positions.")
    return lines


def tables(results: Mapping[str, xr.Dataset]) -> list[Table]:
    """Errors by theory and condition, with alpha of N^L and the paths' shares."""
    rows = []
    for model, ds in results.items():
        off, shaped, parts = errors(ds), shape_errors(ds), shares(ds)
        for condition in shaped.condition.values:
            for theory in shaped.theory.values:
                known = theory in off.theory.values
                error = interval(*100 * off.sel(theory=theory, condition=condition).values) if known else "-"
                alpha = number(ds["alpha"].sel(condition=condition)) if theory == SAID["cesaro"] else "-"
                rows.append(
                    [model, condition, theory, error, number(shaped.sel(theory=theory, condition=condition)), alpha]
                    + [number(parts.sel(condition=condition, path=path), ".3f") for path in parts.path.values]
                )
    title = "Theories against measured profiles"
    return [Table(title + f"; fresh weights: {drawn_from(results)}" * bool(drawn_from(results)), COLUMNS, rows)]


def chart(results: Mapping[str, xr.Dataset]) -> Figure:
    """Every theory over the fresh profile, and the profiles over the kernel of the same weights."""

    def draw(cell: Axes, lines: Sequence[tuple[str, np.ndarray, str]]) -> None:
        drawn = [Series(label, y, color, x=np.arange(len(y)) / max(1, len(y) - 1)) for label, y, color in lines]
        curves(cell, drawn, log=True)
        level(cell, 1.0)
        position_axis(cell)

    def over(ds: xr.Dataset, condition: str, above: str, below: str) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            return measured(ds, condition, above) / measured(ds, condition, below)

    def ratios(cell: Axes, ds: xr.Dataset) -> None:
        condition = str(ds["condition"].values[-1]) if "init" not in ds["condition"].values else "init"
        named = zip(theories(ds).items(), CYCLE[2:], strict=False)
        every = [(SAID[name], over(ds, condition, variable, "sensitivity"), color) for (name, variable), color in named]
        draw(cell, [(label, np.clip(ratio, *FRAME), color) for label, ratio, color in every])
        cell.set_ylim(*FRAME)

    def departures(cell: Axes, ds: xr.Dataset) -> None:
        conditions = map(str, ds["condition"].values if "theory_score_path" in ds else ())
        looks = {condition: profiles.LOOKS[condition] for condition in conditions}
        draw(
            cell,
            [(label, over(ds, c, "sensitivity", "theory_score_path"), color) for c, (label, color) in looks.items()],
        )

    return panels(results, [Panel("predicted / measured", ratios), Panel("measured / kernel", departures)], CAPTION)


MEASURE = Measure(
    name="theory",
    question="How well do second moments of the weights predict the profile?",
    compute=profiles.profile,
    options=Options,
    units=profiles.units,
    joined=profiles.joined,
    headlines=(
        Headline("mean relative error", errors, ratio=True, form=".3f"),
        Headline("shape's RMS log error", shape_errors, form=".3f"),
        Headline("share of the norm", shares, form=".3f"),
        Headline("alpha of N^L", lambda ds: ds["alpha"], form=".3f"),
    ),
    answer=answer,
    tables=tables,
    chart=chart,
    defaults={"prompts": 4},
    without=("readout", "query", "no_rope", "backend", "ablate"),
    trials={
        "theory": lambda m, tokens: second_moment(m, tokens[:2], **profiles.KERNELS["score_path"], from_layer="all")
    },
)
