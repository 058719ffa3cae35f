"""Measured profiles beside theory: the second-moment kernel in four forms, and what other theories make of the same model.

Those are [Chowdhury]'s N^L with its best alpha, and the rollout with measured attention strength of arXiv 2602.16837. They
predict a shape alone. The kernel predicts a mean square, so that profiles here are root mean squares over prompts and
geometric means over seeds. The forms and paths are those of `docs/probes/theory.md`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..charts import CYCLE, GREY, Panel, Series, curves, level, panels, position_axis
from ..measure import Headline, Measure
from ..results.curves import band, by_condition, relative_error, rms_log_error, rms_profiles, spearman, wasserstein
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
    "rollout": "rollout, uniform attention",
    "rollout_patterns": "rollout, measured patterns",
}
CAPTION = (
    "Root mean square over prompts, geometric mean over seeds. Below 1: the theory predicts less than is measured; cut at a "
    "factor of 2; rollout at its best scale. Measured / kernel: how far training moves away from random matrices."
)
FRAME = (0.5, 2.0)  # of ratios: words at a curve far outside would leave its panel no room
LARGEST = 1 - 1e-12  # rank correlation: that of 1 has an infinite z
SHAPE, RANKS, DISTANCE = "shape's RMS log error", "rank correlation", "Wasserstein distance"
FORMS = (".3g", ".3f", ".3g")  # of these three
COLUMNS = ("model", "condition", "theory", "error (%)", SHAPE, RANKS, DISTANCE, "alpha")
PARTS = ("model", "condition", "value path", "score path", "attention strength", "of the first block", "of the last")


@dataclass(frozen=True)
class Options(profiles.Options):
    """Compare measured profiles with theory: the second-moment kernel in four forms, N^L with its best alpha, and rollout.

    Writes theory.nc, theory.md and the chart: each kernel's mean relative error over positions, how far its shape, that of
    N^L and that of the rollout with measured attention strength are off (RMS log error with a free scale, rank correlation,
    Wasserstein distance), and the shares of the value path (patterns held constant) and of the score path in the norm. On
    pretrained weights the kernel is the random-matrix baseline. There is no --backend: only the modules of transformers
    can be taken apart block by block.

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


def compared(
    ds: xr.Dataset, of: profiles.Agreement, scale: profiles.Scale = profiles.LOGARITHM, *, kernels: bool = False
) -> xr.DataArray:
    """A number of each predicted profile and the measured one [condition, theory, estimate] (`jacobian.misfit`)."""
    shapes = () if kernels else ("cesaro", "rollout", "rollout_patterns")  # which predict no size
    names = [name for name in theories(ds) if name in (*THEORIES, *shapes)]
    if not {*names} & {*THEORIES}:
        raise KeyError("theory")
    found = [profiles.misfit(ds, f"theory_{name}", of, scale) for name in names]
    return xr.concat(found, xr.Variable("theory", [SAID[name] for name in names])).transpose("condition", "theory", ...)


def shape_error(predicted: np.ndarray, measured: np.ndarray) -> float:
    """RMS log error with a free scale, where both are above 0: float32 rounds what is far out of a window's reach to 0."""
    seen = (measured > 0) & (predicted > 0)
    return rms_log_error(predicted[seen], measured[seen], free_scale=True) if seen.sum() > 1 else np.nan


def fisher(rho: float) -> float:
    """Fisher's z of a rank correlation, finite for 1, too."""
    return float(np.arctanh(np.clip(rho, -LARGEST, LARGEST)))


errors = partial(compared, of=relative_error, kernels=True)
shape_errors, distances = (partial(compared, of=of) for of in (shape_error, wasserstein))
ranks = partial(compared, of=spearman, scale=(fisher, np.tanh))  # no end above 1


def shares(ds: xr.Dataset) -> xr.DataArray:
    """Mean over positions of each path's norm against the whole [condition, path]; their norms do not add."""
    conditions, paths = list(map(str, ds["condition"].values)), [path for path in ("value", "score") if path in ds]

    def share(condition: str, path: str) -> float:
        whole = measured(ds, condition)
        return float(np.mean(measured(ds, condition, path)[whole > 0] / whole[whole > 0]))

    values = [[share(condition, path) for path in paths] for condition in conditions]
    names = [f"{path} path" for path in paths]
    return xr.DataArray(values, {"condition": conditions, "path": names}, ("condition", "path"))


def strengths(ds: xr.Dataset) -> xr.DataArray:
    """Attention's strength by block, mean over prompts and seeds [condition, layer]."""
    return by_condition(ds, "strength")["strength"].mean(("prompt", "seed")).transpose("condition", "layer")


def answer(results: Mapping[str, xr.Dataset]) -> list[str]:
    """How far the kernel is from what is measured."""
    lines = []
    for model, ds in results.items():
        off = errors(ds).sel(estimate="value")
        name = SAID["score_path"] if SAID["score_path"] in off.theory else str(off.theory[0].item())
        known = {str(c): 100 * off.sel(theory=name, condition=c) for c in off.condition.values}
        parts = [f"{number(value)} % ({c})" for c, value in known.items() if np.isfinite(value)]
        said = f"the {name} is {', '.join(parts)} off the measured profile, mean over positions" if parts else ""
        lost = [f"the {name} is not finite ({c})" for c, value in known.items() if not np.isfinite(value)]
        lines.append(f"{model}: {'; '.join(filter(None, [said, *lost]))}.")
    return lines


def tables(results: Mapping[str, xr.Dataset]) -> list[Table]:
    """Errors by theory and condition, with alpha of N^L; the paths' shares, and attention's strength."""
    rows, parts = list[list[str]](), list[list[str]]()
    for model, ds in results.items():
        off, of_shapes, paths = errors(ds), [of(ds) for of in (shape_errors, ranks, distances)], shares(ds)
        for condition in off.condition.values:
            for theory in of_shapes[0].theory.values:
                at = {"theory": theory, "condition": condition}
                error = interval(*100 * off.sel(at).values) if theory in off.theory.values else "-"
                alpha = number(ds["alpha"].sel(condition=condition)) if theory == SAID["cesaro"] else "-"
                shapes = [
                    interval(*values.sel(at).values, form=form) for values, form in zip(of_shapes, FORMS, strict=True)
                ]
                rows.append([model, condition, theory, error, *shapes, alpha])
            strong = strengths(ds).sel(condition=condition).values if "strength" in ds else np.full(1, np.nan)
            shared = [*paths.sel(condition=condition).values, strong.mean(), strong[0], strong[-1]]
            parts.append([model, condition, *(number(value, ".3f") for value in shared)])
    said = f"; fresh weights: {drawn_from(results)}" * bool(drawn_from(results))
    beside = "Shares of the norm by path, and attention's strength |a| / (|x| + |a|)"
    return [Table(f"Theories against measured profiles{said}", COLUMNS, rows), Table(beside, PARTS, parts)]


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
        drawn = [
            (name, variable) for name, variable in theories(ds).items() if name != "rollout"
        ]  # at birth both are one
        every = list[tuple[str, np.ndarray, str]]()
        for (name, variable), color in zip(drawn, (*CYCLE[2:], GREY), strict=False):
            ratio = over(ds, condition, variable, "sensitivity")
            seen = ratio[np.isfinite(ratio) & (ratio > 0)]
            scale = np.exp(-np.log(seen).mean()) if name == "rollout_patterns" and len(seen) else 1.0
            every.append((SAID[name], scale * ratio, color))
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
        Headline(SHAPE, shape_errors, form=".3g"),
        Headline(RANKS, ranks, form=".3f"),
        Headline(DISTANCE, distances, form=".3g"),
        Headline("share of the norm", shares, form=".3f"),
        Headline("alpha of N^L", lambda ds: ds["alpha"], form=".3f"),
        Headline("attention strength, mean over blocks", lambda ds: strengths(ds).mean("layer"), form=".3f"),
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
