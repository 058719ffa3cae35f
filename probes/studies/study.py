"""The study behind `headwater jacobian` and `headwater theory`: models x conditions x seeds.

A unit is one condition of a model with one seed. At the end a model's units become one result.

Predictions stand beside the measurement in the same result, as variables `theory_NAME` [prompt, position].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xarray as xr
from torch import Tensor

from ..errors import InputError
from ..figures import jacobian_figure, theory_figure
from ..measures.jacobian import Method, jacobian
from ..models.initialization import CONFIG, Rule, check_rule
from ..models.pullback import Pathway, Readout
from ..models.view import View
from ..results.curves import band, relative_error, rms_log_error, rms_profiles, spearman
from ..results.dataset import combine, drawn_from, options_of, quickly
from ..results.profiles import profiles, shapes
from ..results.statistics import Interval
from ..results.tables import interval, number
from ..results.ushape import SHORTEST, Shape
from ..run.progress import Advance
from ..run.store import Store
from ..theory import kernel
from ..theory.cesaro import fit_alpha
from ..theory.kernel import second_moment_from_config
from .runner import (
    Loading,
    Prompts,
    Results,
    Study,
    Subject,
    Tell,
    Told,
    Unit,
    Untouched,
    run,
    write_results,
)

Condition = Literal["init", "pretrained"]
Theory = Literal["uniform", "values", "score_path", "config"]


@dataclass(frozen=True, kw_only=True)
class Settings(Prompts):
    """What is measured on every model; most fields are options of `headwater jacobian`."""

    conditions: tuple[Condition, ...] = ("init", "pretrained")
    no_rope: bool = False
    seeds: int = 3
    prompts: int = 16
    method: Method = "sketch"
    products: int | Literal["auto"] | None = None
    relative_error: float = 0.02
    readout: Readout = "residual"
    query: int = -1
    from_layer: int = 0
    pathway: Pathway = "total"
    theories: tuple[Theory, ...] | None = None  # None: what belongs to the pathway, for models that can be taken apart
    by_path: bool = False  # measure the value and the score path, too
    initialization: Rule = CONFIG  # what fresh weights, and the theory from the config alone, are drawn from

    def __post_init__(self) -> None:
        for condition in self.conditions:
            if condition not in ("init", "pretrained"):
                raise InputError(f"condition '{condition}' does not exist; use init and pretrained")
        if self.pathway == "all":
            raise InputError(
                "pathway 'all' is three curves in one; give total, value or score, or by_path=True with one"
            )
        if not self.conditions or len(set(self.conditions)) < len(self.conditions):
            raise InputError(f"conditions '{','.join(self.conditions)}' name none or one twice; as in init,pretrained")
        if self.length < SHORTEST:
            raise InputError(f"length={self.length} leaves no middle to compare with; give at least {SHORTEST}")
        at = self.query + self.length if self.query < 0 else self.query
        if 0 <= at < SHORTEST - 1:
            raise InputError(f"query={self.query} leaves no middle to compare with; give at least {SHORTEST - 1}")
        if self.seeds < 1:
            raise InputError(f"seeds={self.seeds} leaves no fresh model; give at least 1")
        at_end = self.query in (-1, self.length - 1) and self.from_layer == 0 and self.readout == "residual"
        if "config" in (self.theories or ()) and not at_end:
            raise InputError("the theory 'config' knows the last position's residual stream only; leave it out")
        check_rule(self.initialization)
        if self.initialization != CONFIG and not ("init" in self.conditions or "config" in (self.theories or ())):
            raise InputError(f"initialization '{self.initialization!s:.40}' has no use without fresh weights; add init")
        if self.no_rope and "init" not in self.conditions:
            raise InputError("--no-rope repeats the init condition, which is not among the conditions; add init")

    def runs(self) -> list[tuple[str, int | None]]:
        """(condition, seed of the fresh weights) in the order they are measured."""
        fresh = [*(["init"] if "init" in self.conditions else []), *(["init-nope"] if self.no_rope else [])]
        trained: list[tuple[str, int | None]] = [("pretrained", None)] if "pretrained" in self.conditions else []
        return trained + [(condition, seed) for condition in fresh for seed in range(self.seeds)]


@dataclass(frozen=True)
class Row:
    """One line of the summary: a condition of a model."""

    model: str
    condition: str
    seeds: int
    shape: Shape
    error: float  # relative standard error of the mean profile, rms over positions (first seed)


def study(
    sources: Sequence[str],
    out: str | Path,
    settings: Settings = Settings(),
    *,
    name: Literal["jacobian", "theory"] = "jacobian",
    advance: Advance | None = None,
    told: Told | None = None,
    finish: Callable[[Results], object] = lambda results: None,
    write: Callable[[Results], object] | None = None,
    **loading: Any,
) -> Results:
    """Measure every model under every condition, write results and the figure, return the results by model name.

    Writes `NAME.nc` for one model or `NAME-MODEL.nc` for each of several, `NAME.png` and `NAME.svg`, where NAME is the
    figure's; all of it at the end. `advance(label, done, total)` hears of products done, `told` in one line which runs
    are there from a study that was interrupted, and for every model what it will take. `finish` is called with the
    results while they are written, in one process, and may write more beside them; `write` writes them instead, and no
    figure is made. `loading` has fields of `Loading`.

    Raises:
        InputError: bad input.
    """
    out = Path(out)

    def check(model: View, called: str, tokens: Tensor) -> None:
        if tokens.shape[1] < SHORTEST:
            raise InputError(f"prompts of {tokens.shape[1]} tokens leave no middle to compare with; give longer ones")
        if settings.from_layer >= model.spec.blocks:  # another model may have it, and would be measured first
            raise InputError(
                f"from_layer {settings.from_layer} does not exist in {model.identity.name}; "
                f"it has blocks 0 to {model.spec.blocks - 1}"
            )
        with suppress(Untouched.Reached):
            _profile(Untouched(model), tokens, settings)

    def write_all(results: Results) -> None:
        (write or partial(write_results, out=out, name=name, figure=FIGURES[name]))(results)
        finish(results)

    declared = Study(
        name,
        lambda model, called, tokens: [_unit(called, run, settings) for run in settings.runs()],
        write_all,
        check=check,
        joined=lambda model, runs: _with_fits(combine(runs), model),
    )
    return run(declared, sources, out, settings, Loading(**loading), advance=advance, told=told)


FIGURES = {"jacobian": jacobian_figure, "theory": theory_figure}


def _with_fits(result: xr.Dataset, model: View) -> xr.Dataset:
    """Add [Chowdhury]'s N^L, alpha fitted to the mean profile: `theory_cesaro` [condition, position] and its `alpha`."""
    at, lowest = options_of(result)["query"], options_of(result)["from_layer"]
    windows = model.spec.windows[lowest:]
    curves = np.full((result.sizes["condition"], result.sizes["position"]), np.nan, dtype=np.float32)
    alphas = np.full(result.sizes["condition"], np.nan)
    found = rms_profiles(result)
    for place, condition in enumerate(result["condition"].values):
        mean = band([run.mean for run in found[str(condition)]]).centre
        if np.count_nonzero(mean[: at + 1]) >= SHORTEST:
            fit = fit_alpha(mean, len(windows), window=windows, query=at)
            curves[place], alphas[place] = fit.curve, fit.alpha
    result["theory_cesaro"] = ("condition", "position"), curves, {"long_name": "N^L, fitted", "units": "1"}
    result["alpha"] = ("condition",), alphas, {"long_name": "alpha of N^L", "units": "1"}
    return result


def _unit(name: str, run: tuple[str, int | None], settings: Settings) -> Unit:
    condition, seed = run

    def weights(model: View) -> View:
        positional, rule = condition != "init-nope", settings.initialization
        return model if seed is None else model.reinitialized(seed, positional=positional, initialization=rule)

    def measure(model: View, subject: Subject, tell: Tell, pieces: Store) -> xr.Dataset:
        result = _measure(model, subject.tokens, settings, pieces, tell)
        return result if seed is None else result.assign_attrs(seed=seed)

    return Unit(
        f"{name} {condition}" + ("" if seed is None else f" {seed}"),
        {option: getattr(settings, option) for option in MEASURING},
        measure,
        None if seed is None else weights,
    )


PLACE = ("readout", "query", "from_layer")


def _profile(
    model: View,
    tokens: Tensor,
    settings: Settings,
    pieces: Store | None = None,
    progress: Callable[[float, float], None] | None = None,
) -> xr.Dataset:
    options = {name: getattr(settings, name) for name in ("method", "products", "relative_error", "seed", *PLACE)}
    pathway: Pathway = "all" if settings.by_path else settings.pathway
    return jacobian(model, tokens, pathway=pathway, pieces=pieces, progress=progress, **options)


def _measure(
    model: View, tokens: Tensor, settings: Settings, pieces: Store, progress: Callable[[float, float], None]
) -> xr.Dataset:
    """The measurement of one model with its theories; progress is in products."""
    theories, products, each = _theories(model, settings), 0.0, float(AS_PRODUCTS * len(tokens))

    def counted(done: float, total: float) -> None:
        nonlocal products
        products = total
        progress(done, total + each * len(theories))

    result = _profile(model, tokens, settings, pieces, counted)
    if settings.by_path:
        apart = {path: result.sel(pathway=path, drop=True) for path in ("value", "score")}
        result = result.sel(pathway=settings.pathway, drop=True)
        for path, ds in apart.items():
            result[path] = ds["sensitivity"].assign_attrs(long_name=f"||J_j||_F / sqrt(d), {path} path")
    for before, name in enumerate(theories):

        def share(done: float, total: float, before: int = before) -> None:
            progress(products + each * (before + done / total), products + each * len(theories))

        if name == "config":
            predicted = second_moment_from_config(model, tokens=tokens, initialization=settings.initialization)
        else:
            place: dict[str, Any] = {name: getattr(settings, name) for name in PLACE}
            predicted = kernel.second_moment(
                model, tokens, pieces=pieces.within(name), **KERNELS[name], **place, progress=share
            )
        share(1.0, 1.0)
        result[f"theory_{name}"] = predicted["sensitivity"].astype(np.float32)
    return result


AS_PRODUCTS = 4  # what a theory takes, about as long as so many of a prompt's products
KERNELS: dict[str, dict[str, Any]] = {
    "uniform": {"attention": "uniform"},
    "values": {"attention": "measured"},
    "score_path": {"attention": "measured", "score_path": True},
}
OF_PATHWAY: dict[Pathway, tuple[Theory, ...]] = {"total": ("score_path",), "value": ("values",), "score": ()}


def _theories(model: View, settings: Settings) -> tuple[Theory, ...]:
    if settings.theories is not None:
        return settings.theories
    # Of a model that is fetched from elsewhere block by block, the first stands for all.
    layers = range(1 if model.offloaded else model.spec.blocks)
    apart = all(model.parts(layer) is not None for layer in layers)
    return OF_PATHWAY[settings.pathway] if apart else ()


MEASURING = (
    "method",
    "products",
    "relative_error",
    "readout",
    "query",
    "from_layer",
    "seed",
    "pathway",
    "theories",
    "by_path",
    "initialization",
)


def summarize(results: Mapping[str, xr.Dataset]) -> list[Row]:
    """The U-shape of every model's conditions, from results, over the positions up to the query."""
    rows = []
    for name, result in results.items():
        found = shapes(result)
        for condition, runs in rms_profiles(result).items():
            first, seen = runs[0], runs[0].mean > 0
            error = float(np.sqrt(np.mean((first.stderr[seen] / first.mean[seen]) ** 2)))
            rows.append(Row(name, condition, len(runs), found[condition], error))
    return rows


def rope_correlations(results: Mapping[str, xr.Dataset]) -> dict[str, float]:
    """Spearman's correlation of the fresh models' profiles with and without positional encoding, where both were run."""
    found = {}
    for name, result in results.items():
        runs = profiles(result)
        if "init-nope" in runs and "init" in runs:
            found[name] = spearman(*(band([run.mean for run in runs[c]]).centre for c in ("init", "init-nope")))
    return found


def cells(row: Row) -> Iterator[str]:
    """A summary row as text, in the order of `COLUMNS`."""
    yield from (row.model, row.condition, str(row.seeds))
    for name in SHAPE.values():
        found: Interval = getattr(row.shape, name)
        yield interval(*found[:3]) if np.isfinite(found.value) else "no middle"
    yield f"{row.shape.trough} ({row.shape.trough_fraction.value:.2f})"
    yield number(row.shape.middle.value)
    yield "-" if np.isnan(row.error) else f"{row.error:.2%}"


SHAPE = {"primacy": "primacy", "primacy behind 0": "primacy_behind_0", "recency": "recency"}
COLUMNS = ("model", "condition", "seeds", *SHAPE, "trough", "middle", "sketch's error")


@dataclass(frozen=True)
class Agreement:
    """How far theories are from the measured profile of one condition of a model; all profiles are means over seeds."""

    model: str
    condition: str
    errors: dict[str, float]  # by theory, mean over positions of |predicted / measured - 1|
    shapes: dict[str, float]  # by theory, RMS log error with a free scale; "cesaro": the best-fitting N^L
    alpha: float  # of that N^L
    shares: dict[str, float]  # by pathway, mean over positions of its norm against the whole


def agreements(results: Mapping[str, xr.Dataset]) -> list[Agreement]:
    """Theories against measurement, from the results of a study with theories, over the positions up to the query."""
    rows = []
    for name, result in results.items():
        end = options_of(result)["query"] + 1
        for place, (condition, runs) in enumerate(rms_profiles(result).items()):
            measured = band([run.mean[:end] for run in runs]).centre

            def mean(variable: str, condition: str = condition, end: int = end, result: xr.Dataset = result) -> Any:
                return band([run.mean[:end] for run in rms_profiles(result, variable)[condition]]).centre

            theories = [v for v in map(str, result.data_vars) if v.startswith("theory_") and v != "theory_cesaro"]
            curves = {v.removeprefix("theory_"): mean(v) for v in theories}
            errors = {theory: relative_error(curve, measured) for theory, curve in curves.items()}
            curves["cesaro"] = result["theory_cesaro"].values[place, :end].astype(np.float64)
            rows.append(
                Agreement(
                    name,
                    condition,
                    errors,
                    {theory: _shape_error(curve, measured) for theory, curve in curves.items()},
                    float(result["alpha"].values[place]),
                    {
                        path: float(np.mean(mean(path)[measured > 0] / measured[measured > 0]))
                        for path in ("value", "score")
                        if path in result
                    },
                )
            )
    return rows


def _shape_error(curve: np.ndarray, measured: np.ndarray) -> float:
    """Where both reach: float32 rounds a prediction far out in a window's reach to zero."""
    seen = (measured > 0) & (curve > 0)
    return rms_log_error(curve[seen], measured[seen], free_scale=True) if np.count_nonzero(seen) > 1 else float("nan")


AGREEMENT_COLUMNS = (
    "model",
    "condition",
    "uniform",
    "values",
    "score path",
    "config",
    "kernel's shape",
    "N^L's shape",
    "alpha",
    "value",
    "score",
)


def described(results: Mapping[str, xr.Dataset]) -> str:
    """What the rows of `agreements` are."""
    ds = next(iter(results.values()))
    seeds = int(ds["runs"].max())
    return (
        f"{', '.join([*quickly(results.values()), ''])}T = {ds.sizes['position']}, "
        f"{ds.sizes['prompt']} prompt{'s' * (ds.sizes['prompt'] != 1)}, "
        f"{seeds} fresh model{'s' * (seeds != 1)} each, {options_of(ds)['method']}, "
        f"{ds.attrs['dtype']}, {ds.attrs['device']}. Kernels: mean over positions of |predicted / measured - 1|. Shapes: "
        "RMS log error with a free scale, of the kernel with its score path and of N^L with its best alpha. Value and "
        "score: norm of that path against the whole, mean over positions. Means over prompts and seeds are taken first."
        + (f" Fresh weights: {drawn_from(results)}." if drawn_from(results) else "")
    )


def agreement_cells(row: Agreement) -> Iterator[str]:
    """A row as text, in the order of `AGREEMENT_COLUMNS`; shares of the paths come last."""
    yield from (row.model, row.condition)
    for theory in ("uniform", "values", "score_path", "config"):
        error = row.errors.get(theory, float("nan"))
        yield "-" if np.isnan(error) else f"{error:.1%}" if error < 10 else f"{error:,.0%}"
    for theory in ("score_path", "cesaro"):
        yield f"{row.shapes[theory]:.3f}" if theory in row.shapes else "-"
    yield f"{row.alpha:.2f}"
    for path in ("value", "score"):
        yield f"{row.shares[path]:.3f}" if path in row.shares else "-"
