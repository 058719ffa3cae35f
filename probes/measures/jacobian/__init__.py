"""How strongly the output depends on each input position, with fresh and with trained weights: a profile and its ends.

The norm of the Jacobian, its estimators and its pathways are in `compute`; first, primacy, recency, last and trough of a
profile in `probes.results.ushape`. A unit of work is a condition of the model with one seed of fresh weights. Beside every
profile stand that of the readout after the final norm, what the second-moment kernel of the same weights predicts, and
[Chowdhury]'s N^L with its best alpha.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal, TypeAlias

import numpy as np
import xarray as xr
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from ... import options
from ...charts import DASHED, FRESH, PURPLE, THEORY, TRAINED, Panel, Series, curves, panels, position_axis
from ...errors import InputError
from ...measure import Headline, Measure, Unit
from ...models.initialization import CONFIG, check_rule
from ...models.view import View
from ...results.curves import ESTIMATE, band, by_condition, relative_error, rms_profiles
from ...results.dataset import combine, drawn_from, options_of
from ...results.statistics import jackknife
from ...results.statistics import units as units_of
from ...results.tables import Table
from ...results.ushape import ARM, NUMBERS, SHORTEST, arm, numbers, profiles, troughs
from ...run.progress import Progress, part
from ...run.store import Store
from ...theory import kernel
from ...theory.cesaro import fit_alpha
from .compute import NORMED
from .compute import PATHWAYS as PATHWAYS
from .compute import PRODUCTS as PRODUCTS
from .compute import Method as Method
from .compute import jacobian as jacobian

CONDITIONS = ("init", "pretrained")
# Theories, as `kernel.second_moment` takes them; "config" is from the config alone.
KERNELS: dict[str, dict[str, Any]] = {
    "uniform": {"attention": "uniform"},
    "values": {"attention": "measured"},
    "score_path": {"attention": "measured", "score_path": True},
}
# The rollouts that are made from the same patterns as a kernel.
ROLLOUTS = {"uniform": "rollout", "score_path": "rollout_patterns"}

CAPTION = (
    "Geometric mean over prompts and seeds of ||J||/sqrt(d) rms(x)/rms(h), h centred. Bands: smallest to largest seed, or "
    "two standard errors over documents of a single run."
)
LOOKS = {
    "init": ("fresh weights", FRESH),
    "init-nope": ("fresh, no positions", PURPLE),
    "pretrained": ("pretrained", TRAINED),
}


@dataclass(frozen=True)
class Options(options.Options):
    """Measure how strongly the output depends on each input position, at initialization and after pretraining.

    Writes jacobian.nc, jacobian.md and the chart. Against the middle half's median: first (position 0), primacy
    (positions 1 to 16), recency (the 16 before the query), last (the query's own); the same after the final norm, and the
    kernel's error. If interrupted, the same command resumes.

    Examples:
      headwater jacobian tiny-llama
      headwater jacobian tiny-llama tiny-qwen2 --no-rope --out runs/two
      headwater jacobian tiny-llama@step0 tiny-llama@step300 tiny-llama --conditions pretrained
      headwater jacobian Qwen/Qwen2.5-0.5B --prompts 8 --length 1024 --text book.txt
      headwater jacobian ./checkpoint --method exact --readout logits --first none
    """

    conditions: str = options.option("init (fresh weights of the same config), pretrained, or both.", "init,pretrained")
    no_rope: bool = options.flag("--no-rope", "Repeat init without rotation (or without learned positions).")
    seeds: int = options.option("Models with fresh weights per model.", 3, min=1, max=options.MOST_SEEDS)
    initialization: str = options.initialization()
    method: Literal["exact", "sketch", "scalar"] = options.option(
        "All products, few with an error bar, or a single one.", "sketch"
    )
    products: int | None = options.option(
        "Products of the sketch per prompt; 64 if not given.", None, min=2, max=options.MOST_PRODUCTS
    )
    readout: Literal["residual", "normed", "logits"] = options.option(
        "Before or after the final norm, or the logits.", "residual"
    )
    query: int = options.option("The position read out; negative counts from the end.", -1)

    def values(self) -> dict[str, Any]:
        """As `profile` takes them, with `conditions`, `seeds` and `no_rope` for `units`."""
        conditions = [part.strip() for part in self.conditions.split(",") if part.strip()]
        if not conditions or not set(conditions) <= set(CONDITIONS) or len(set(conditions)) < len(conditions):
            raise InputError(f"conditions '{self.conditions}' are not init, pretrained or both; as in init,pretrained")
        check_rule(self.initialization)
        if "init" not in conditions and (self.no_rope or self.initialization != CONFIG):
            needs = "--no-rope" if self.no_rope else f"initialization '{self.initialization!s:.40}'"
            raise InputError(f"{needs} has no use without fresh weights; add init to the conditions")
        return vars(self) | {"conditions": conditions}


def units(values: Mapping[str, Any]) -> list[Unit]:
    """A unit for each condition, and for each seed of fresh weights."""
    measured = {name: value for name, value in values.items() if name not in ("conditions", "seeds", "no_rope")}
    rule = values["initialization"]
    found = [Unit("pretrained", measured)] if "pretrained" in values["conditions"] else []
    fresh = ["init"] * ("init" in values["conditions"]) + ["init-nope"] * values["no_rope"]
    for condition in fresh:
        for seed in range(values["seeds"]):
            drawn = {"seed": seed, "positional": condition == "init", "initialization": rule}
            weights = partial(lambda how, model: model.reinitialized(**how), drawn)
            found.append(Unit(f"{condition} {seed}", measured, weights, {"seed": seed}))
    return found


def profile(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    *,
    theories: Sequence[str] | None = None,
    by_path: bool = False,
    initialization: Any = CONFIG,
    pieces: Store | None = None,
    progress: Progress | None = None,
    **how: Any,
) -> xr.Dataset:
    """`jacobian` of one model with its theories beside it, and with the readout after the final norm beside the stream.

    Args:
        model, tokens, pieces, progress: as of `jacobian`; so are all of `how`.
        theories: names of `KERNELS`, or "config"; "score_path" if not given, where the model's blocks can be taken apart.
        by_path: also the value and the score path, as the variables `value` and `score`; then of the stream alone. And the
            rollouts of `ROLLOUTS` beside the kernels, with the `strength` [prompt, layer] of attention in them.
        initialization: what "config" draws from.

    Returns:
        The result of `jacobian` with `theory_NAME` [prompt, position].

    Raises:
        InputError: as `jacobian`; fewer than 8 positions up to the query, which have no middle.
    """
    at = how.get("query", -1)
    if 0 <= (at + tokens.shape[1] if at < 0 else at) < SHORTEST - 1:
        raise InputError(f"{tokens.shape[1]} tokens, query {at}: no middle to compare with; give at least {SHORTEST}")
    pieces, pathway = pieces or Store(), "all" if by_path else "total"
    place = {name: how[name] for name in ("readout", "query") if name in how}
    if theories is None:
        layers = range(1 if model.offloaded else model.spec.blocks)  # the first stands for all that are fetched
        theories = ("score_path",) if all(model.parts(layer) is not None for layer in layers) else ()
    tell = [part(progress, n / (1 + len(theories)), (n + 1) / (1 + len(theories))) for n in range(1 + len(theories))]
    beside = not by_path and how.get("readout", "residual") == "residual"
    ds = jacobian(model, tokens, pathway=pathway, beside=beside, pieces=pieces, progress=tell[0], **how)
    if by_path:
        paths, ds = ds["sensitivity"], ds.sel(pathway="total", drop=True)
        for path in ("value", "score"):
            ds[path] = paths.sel(pathway=path, drop=True).assign_attrs(long_name=f"||J_j||_F / sqrt(d), {path} path")
    for name, told in zip(theories, tell[1:], strict=True):
        if name == "config":
            predicted = kernel.second_moment_from_config(model, tokens=tokens, initialization=initialization)
        else:
            work = pieces.within(name)
            predicted = kernel.second_moment(model, tokens, pieces=work, **KERNELS[name], **place, progress=told)
        ds[f"theory_{name}"] = predicted["sensitivity"].astype(np.float32)
        if by_path and name in ROLLOUTS:
            ds[f"theory_{ROLLOUTS[name]}"], ds["strength"] = (
                predicted[x].astype(np.float32) for x in ("rollout", "strength")
            )
    if progress is not None:
        progress(1.0, 1.0)
    return ds


def joined(results: Sequence[xr.Dataset], model: View) -> xr.Dataset:
    """All conditions and seeds, and [Chowdhury]'s N^L: `theory_cesaro` [condition, position] with its best `alpha`."""
    ds = combine(results)
    at, windows = options_of(ds)["query"], model.spec.windows
    curves = np.full((ds.sizes["condition"], ds.sizes["position"]), np.nan, dtype=np.float32)
    alphas = np.full(ds.sizes["condition"], np.nan)
    measured = rms_profiles(ds)
    for place, condition in enumerate(map(str, ds["condition"].values)):
        mean = band([run.mean for run in measured[condition]]).centre
        if np.count_nonzero(mean[: at + 1]) >= SHORTEST:
            fit = fit_alpha(mean, len(windows), window=windows, query=at)
            curves[place], alphas[place] = fit.curve, fit.alpha
    ds["theory_cesaro"] = ("condition", "position"), curves, {"long_name": "N^L, fitted", "units": "1"}
    ds["alpha"] = ("condition",), alphas, {"long_name": "alpha of N^L", "units": "1"}
    return ds


# ------------------------------------------------------------------------------------------------------------- headlines


def logs(ds: xr.Dataset, variable: str = "elasticity") -> xr.DataArray:
    """Logarithms of the elasticity up to the query, means over seeds [prompt, condition, ..., position]; -inf for a zero."""
    ds = by_condition(ds, variable)
    values = ds[variable].isel(position=slice(int(options_of(ds)["query"]) + 1))
    values = values.isel(layer=0, drop=True) if "layer" in values.dims else values
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = xr.apply_ufunc(np.log, values.astype(np.float64)).mean("seed")
    return mean.transpose("prompt", "condition", ..., "position")


def of_curve(values: Float[np.ndarray, "prompt *where position"], *, name: str) -> Float[np.ndarray, " *where"]:
    """One of the numbers of the geometric mean over prompts (`probes.results.ushape`)."""
    return np.apply_along_axis(lambda curve: numbers(curve)[name], -1, np.exp(values.mean(0)))


def trough(values: Float[np.ndarray, "prompt *where position"]) -> Float[np.ndarray, " *where"]:
    """Position of the smoothed mean's minimum."""
    every = np.moveaxis(values, 0, -2)  # [*where, prompt, position]
    flat = every.reshape(-1, *every.shape[-2:])
    return np.array([troughs(one, np.ones((1, len(one))))[0] for one in flat]).reshape(every.shape[:-2])


Agreement: TypeAlias = Callable[[np.ndarray, np.ndarray], float]  # of a predicted profile and the measured one
Scale: TypeAlias = tuple[Callable[[float], float], Callable[[np.ndarray], np.ndarray]]
LOGARITHM: Scale = (np.log, np.exp)


def misfit(
    ds: xr.Dataset, theory: str = "theory_score_path", of: Agreement = relative_error, scale: Scale = LOGARITHM
) -> xr.DataArray:
    """How far a theory is off, by condition, with an interval over documents.

    Both profiles are root mean squares over prompts, which the kernel predicts, and geometric means over seeds. What the
    sketch is off counts, too.

    Args:
        ds: a result of `profile`.
        theory: the variable [..., prompt, position]; without a dimension `prompt` it is held in the interval.
        of: what is told of predicted and measured profile; unless given the mean of |predicted / measured - 1|.
        scale: on which the interval is symmetric, and back.
    """
    ds, unit = by_condition(ds[["sensitivity", theory]], "sensitivity"), units_of(ds)
    end, found = int(options_of(ds)["query"]) + 1, []

    def off(both: np.ndarray) -> float:
        with np.errstate(divide="ignore"):
            measured, predicted = np.exp(np.log(both.mean(0)).mean(1) / 2)
            told = of(predicted, measured) if np.isfinite(predicted).all() else np.nan
            return float(scale[0](told))

    for condition in ds["condition"].values:
        pair = ds.sel(condition=condition).isel(position=slice(end))
        curves = [
            x.transpose("prompt", "seed", "position").values for x in xr.broadcast(pair["sensitivity"], pair[theory])
        ]
        both = np.stack(curves, 1)
        there = ~np.isnan(both[:, 0]).all((0, 2))
        found.append(jackknife(off, both[:, :, there].astype(np.float64) ** 2, unit))
    coords = {"condition": list(map(str, ds["condition"].values)), "estimate": list(ESTIMATE)}
    return xr.DataArray(scale[1](np.reshape(found, (-1, 3))), coords, ("condition", "estimate"))


READOUTS = {"elasticity": "", f"elasticity{NORMED}": " after the final norm"}
HEADLINES = [
    Headline(f"{name}{said}", partial(logs, variable=variable), partial(of_curve, name=name), ratio=True)
    for variable, said in READOUTS.items()
    for name in NUMBERS
]


def verdict(primacy: Sequence[float], recency: Sequence[float]) -> str:
    """Whether both arms stand above the middle, by their intervals (value, low, high)."""
    lows, highs = (min(primacy[1], recency[1]), min(primacy[2], recency[2]))
    return "may be a U or not" if np.isnan(lows) or lows <= 1 < highs else "is a U" if lows > 1 else "is no U"


def answer(results: Mapping[str, xr.Dataset]) -> list[str]:
    """By condition, how far the arms of the profile and its two end positions stand above its middle."""
    from ...headlines import numbers as numbers_of

    lines = []
    for model, ds in results.items():
        found = {(n.name, n.where): n for n in numbers_of(MEASURE, ds)}
        conditions = dict.fromkeys(where for name, where in found if name == "primacy")
        parts = [
            f"the {condition} profile {verdict(*(found[x, condition].interval[:3] for x in ('primacy', 'recency')))} "
            f"({', '.join(f'{x} {found[x, condition].text}' for x in NUMBERS[:4])})"
            for condition in conditions
        ]
        lines.append(f"{model}: {'; '.join(parts) or 'no profile has a middle'}.")
    return lines


COLUMNS = ("model", "condition", "readout", "seeds", *NUMBERS, "trough", "kernel's error", "sketch's error")


def tables(results: Mapping[str, xr.Dataset]) -> list[Table]:
    """Every number of every condition and readout."""
    from ...headlines import numbers as numbers_of

    rows = []
    for model, ds in results.items():
        found = {(n.name, n.where): n.text for n in numbers_of(MEASURE, ds)}
        places = product(rms_profiles(ds).items(), READOUTS.items()) if "pathway" not in ds.dims else ()
        for (condition, runs), (variable, said) in places:
            if variable in ds or not said:
                texts = [found.get((f"{name}{said}", condition), "no middle") for name in NUMBERS]
                texts += [found.get((name, condition), "-") if not said else "-" for name in COLUMNS[-3:-1]]
                readout = said.strip() or options_of(ds).get("readout", "residual")
                rows.append([model, condition, readout, str(len(runs)), *texts, _sketch_error(ds, condition, variable)])
    title = "Profiles" + f"; fresh weights: {drawn_from(results)}" * bool(drawn_from(results))
    for near in sorted({arm(int(options_of(ds)["query"]) + 1) for ds in results.values()} - {ARM}):
        title += f"; primacy and recency over {near} positions each, not {ARM}: prompts are short"
    return [Table(title, COLUMNS, rows)]


def _sketch_error(ds: xr.Dataset, condition: str, variable: str) -> str:
    """Root mean square over positions of the first seed's standard error over its sensitivity."""
    names = [variable.replace("elasticity", name) for name in ("sensitivity", "stderr")]
    if not {*names} <= {*ds.data_vars}:
        return "-"
    both = by_condition(ds[names], names[0]).rename(dict(zip(names, ("sensitivity", "stderr"), strict=True)))
    first = rms_profiles(both)[condition][0]
    seen = first.mean > 0
    error = float(np.sqrt(np.mean((first.stderr[seen] / first.mean[seen]) ** 2)))
    return "-" if np.isnan(error) else f"{error:.2%}"


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
        if predicted := profile_series(ds, "theory_score_path").get("init"):
            label = "predicted by the kernel"
            drawn.append(Series(label, predicted.y, THEORY, x=predicted.x, line=DASHED, width=1.2))
        curves(cell, drawn, log=True)
        position_axis(cell)

    return panels(results, [Panel("relative sensitivity to the input", draw, share=True, height=2.8)], CAPTION)


TRIAL: Any = {"method": "sketch", "products": 32}
MEASURE = Measure(
    name="jacobian",
    question="How strongly does the output depend on each input position, fresh and trained?",
    compute=profile,
    options=Options,
    units=units,
    joined=joined,
    headlines=(
        *HEADLINES[: len(NUMBERS)],
        Headline("kernel's error", misfit, ratio=True),
        *HEADLINES[len(NUMBERS) :],
        Headline("trough", logs, trough, jumps=True),
    ),
    answer=answer,
    tables=tables,
    chart=chart,
    defaults={"prompts": 16},
    trials={
        "jacobian, exact": lambda model, tokens: jacobian(model, tokens[:1], readout="logits"),
        "jacobian, sketch": lambda model, tokens: jacobian(
            model, tokens[:2], **TRIAL, beside=True, pathway="all", from_layer="all"
        ),
        "jacobian, fresh weights": lambda model, tokens: jacobian(model.reinitialized(0), tokens[:2], **TRIAL),
    },
)
