"""What a result of births says: trained ends of the profile regressed on initial ones, by least squares of logarithms.

Runs of one kind start from nearly the same profile: a slope is told from what is between kinds, and with few kinds a
covariate can stand for it. So the tables have the slope's variance inflation, 1 / (1 - R^2) of the initial profile on the
covariates, and slopes over the means of kinds, whose intervals hold for other kinds of initialization. Only branches-* and
flat-* tell the profile apart from sigma.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from scipy.stats import t as student

from probes.charts import CYCLE, GREY, INK, Series, curves, depth_color, level, numeral, sheet
from probes.claims.claim import Claim
from probes.claims.evidence import TOYS
from probes.claims.ledger import Source
from probes.claims.rules import Test, Told, above, nothing, told
from probes.measure import Headline
from probes.results.curves import ESTIMATE
from probes.results.statistics import INTERVAL, Interval
from probes.results.tables import Table, number
from probes.results.ushape import middle_of, numbers

from ..reading import judge, need, over, state, tables_of
from .training import ENDS

COVARIATES: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "log sigma": ("log sigma",),
    "log sigma, loss": ("log sigma", "loss"),
}
MARGIN = 0.1  # of a slope that counts as none
BEHIND = "primacy behind 0"  # position 0 holds BOS, the other positions text
SHOWN = (*ENDS, BEHIND)
MEASURED = {"loss": "loss, nat", "sink_rate": "sink rate", "sink_weight": "weight on 0", "gain": "recall gain, nat"}
MEASURED |= {"exact": "recalled exactly"}
FEWEST = 1e-8  # of the predictor's square that covariates and the constant have to leave


def with_behind(ds: xr.Dataset) -> xr.Dataset:
    """The result with `BEHIND` of its elasticities beside the ends."""
    behind = xr.apply_ufunc(
        lambda curve: numbers(curve)["primacy_behind_0"],
        ds["elasticity"],
        input_core_dims=[["position"]],
        vectorize=True,
    )
    return ds.assign({BEHIND: behind})


class Fit(NamedTuple):
    """A slope among covariates."""

    slope: Interval
    inflation: float  # of its variance, by covariates
    units: int  # runs or kinds


def fitted(y: Float[np.ndarray, " n"], x: Float[np.ndarray, " n"], *covariates: Float[np.ndarray, " n"]) -> Fit:
    """Least squares of y on x, the covariates and a constant: the slope of x with its interval by Student's t.

    NaN where covariates leave nothing of x, or no degree of freedom is left.
    """
    others = np.column_stack([np.ones_like(x), *covariates])
    left, spared = (one - others @ np.linalg.lstsq(others, one)[0] for one in (x, y))
    spread, alone = float(left @ left), float(np.square(x - x.mean()).sum())
    freedom = len(x) - int(np.linalg.matrix_rank(others)) - 1
    if freedom < 1 or spread <= FEWEST * float(x @ x):
        return Fit(Interval(np.nan, np.nan, np.nan), np.nan, len(x))
    value = float(left @ spared) / spread
    error = float(np.sqrt(np.square(spared - value * left).sum() / freedom / spread))
    reach = float(student.ppf(INTERVAL[1] / 100, freedom)) * error
    return Fit(Interval(value, value - reach, value + reach, freedom), alone / spread, len(x))


def regressed(ds: xr.Dataset, end: str, point: int, covariates: tuple[str, ...] = (), *, kinds: bool = False) -> Fit:
    """The slope of log `end` at one of the points on that at initialization, over runs or over means of kinds."""
    values = {
        "y": np.log(ds[end].isel(step=point)),
        "x": np.log(ds[end].isel(step=0)),
        "log sigma": np.log(ds["strength"]) / 2 + xr.zeros_like(ds[end].isel(step=0)),
        "loss": ds["loss"].isel(step=point),
    }
    table = np.stack([values[name].transpose("kind", "seed").values for name in ("y", "x", *covariates)])
    by_kind = [one[:, np.isfinite(one).all(0)] for one in table.swapaxes(0, 1)]
    return fitted(*np.hstack([one.mean(1, keepdims=True) if kinds else one for one in by_kind if one.size]))


def slopes(ds: xr.Dataset, *, inflation: bool = False) -> xr.DataArray:
    """Slopes at the last step [end, unit, covariates, estimate], or their variance inflation."""
    ds, coords = with_behind(ds), {"end": list(SHOWN), "unit": ["runs", "kinds"], "covariates": list(COVARIATES)}
    fits = [
        regressed(ds, end, -1, COVARIATES[by], kinds=unit == "kinds") for end, unit, by in product(*coords.values())
    ]
    values = np.array([[fit.inflation, *fit.slope[:3]] for fit in fits]).reshape(*map(len, coords.values()), 4)
    found = xr.DataArray(values, coords, (*coords, "estimate"))
    return found[..., 0] if inflation else found[..., 1:].assign_coords(estimate=list(ESTIMATE))


def memory(ds: xr.Dataset) -> xr.DataArray:
    """Slopes over runs without covariates, by checkpoint [step, end, estimate]."""
    ds = with_behind(ds)
    values = [[regressed(ds, end, n).slope[:3] for end in SHOWN] for n in range(1, ds.sizes["step"])]
    coords = {"step": ds["step"].values[1:], "end": list(SHOWN), "estimate": list(ESTIMATE)}
    return xr.DataArray(np.reshape(values, [*map(len, coords.values())]), coords, tuple(coords))


def of_flat(ds: xr.Dataset, end: str) -> xr.DataArray:
    """An end at the last step, of kinds of flat initialization."""
    flat = [str(kind) for kind in ds["kind"].values if str(kind).startswith("flat")]
    need(flat)
    return with_behind(ds)[end].isel(step=-1, drop=True).sel(kind=flat)


HEADLINES = (
    *(Headline(end, lambda ds, end=end: with_behind(ds)[end]) for end in SHOWN),
    *(Headline(words, lambda ds, name=name: ds[name]) for name, words in MEASURED.items()),
    Headline("slope of logarithms, trained on initial", slopes),
    Headline("its variance inflation", partial(slopes, inflation=True)),
    Headline("memory of initialization: slope over runs", memory),
    Headline("standard deviation of fresh weights", lambda ds: ds["deviation"]),
)


def tables(ds: xr.Dataset) -> list[Table]:
    """Each kind at every checkpoint; slopes; deviations of fresh weights."""
    return tables_of(HEADLINES, ds)


CAPTION = (
    "Left: runs, by initialization and d sigma^2. Right: slopes of logarithms, 95 % intervals; grey: as good as none."
)


def charts(ds: xr.Dataset) -> dict[str, Figure]:
    """Trained ends of the profile against initial ones, and the slope at every checkpoint; profiles by checkpoint."""
    colors = dict(zip(map(str, ds["kind"].values), CYCLE * len(ds["kind"]), strict=False))
    figure, cells = sheet(2, 2, caption=CAPTION)
    for (left, right), end in zip(cells, ENDS, strict=True):
        initial, trained = ds[end].isel(step=0), ds[end].isel(step=-1)
        dots = [
            Series(kind, trained.sel(kind=kind), color, x=initial.sel(kind=kind), line="")
            for kind, color in colors.items()
        ]
        curves(left, dots, log=True)
        left.set(xlabel=f"{end} at initialization", ylabel=f"{end}, trained")
        _plain(left)
        value, low, high = memory(ds).sel(end=end).transpose("estimate", "step").values
        curves(right, [Series("", value, low=low, high=high, x=ds["step"].values[1:], line="")])
        right.axhspan(-MARGIN, MARGIN, color=GREY, alpha=0.25, linewidth=0)
        level(right, 1.0, "as at initialization")
        steps = ds["step"].values  # without a slope there is nothing that the axis could be made for
        right.set(xlabel="step", ylabel=f"slope of {end}", xlim=(steps[1] / 1.3, steps[-1] * 1.3))
        _plain(right)
    return {"": figure, "-profiles": _profiles(ds, list(colors))}


def _plain(cell: Axes) -> None:
    """A logarithmic horizontal axis whose ticks are numbers."""
    cell.set_xscale("log")
    cell.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    cell.xaxis.set_major_formatter(FuncFormatter(lambda value, _: numeral(value)))
    cell.xaxis.set_minor_formatter(NullFormatter())


def _profiles(ds: xr.Dataset, kinds: list[str]) -> Figure:
    """Profiles over positions at every checkpoint: of the first kind, and of the last one of every profile."""
    last = {kind.rpartition("-")[0]: kind for kind in kinds}
    shown = list(dict.fromkeys([kinds[0], *last.values()]))
    caption = (
        "Elasticity over the middle half's median: geometric means over prompts and seeds. Dotted: theory at step 0."
    )
    figure, cells = sheet(-(-len(shown) // 2), min(2, len(shown)), caption=caption)
    for cell, kind in zip(cells.flat, shown, strict=False):
        runs = ds["elasticity"].sel(kind=kind).dropna("seed", how="all").transpose("step", "seed", "position")
        profiles = np.exp(np.log(runs.values).mean(1))
        lines = [
            Series(f"step {step:,}", profile / middle_of(profile), to_hex(depth_color(n, len(profiles))))
            for n, (step, profile) in enumerate(zip(ds["step"].values.tolist(), profiles, strict=True))
        ]
        theory = ds["kernel"].sel(kind=kind).values
        curves(cell, [*lines, Series("", theory / middle_of(theory), INK, line=":")], log=True)
        cell.set_title(kind, fontsize=9)
        cell.set(xlabel="position", ylabel="over the middle")
    return figure


# -- statements: no source trains; these are what the question comes to

births: Any = Source("[Chowdhury] discussion", "births", replace(TOYS, population="controlled"), kind="ours")
MODELS = "1 M-parameter language models"
SLOPE = (
    "the slope of log {end} at the last step on log {end} at initialization, run by run, log sigma and loss as covariates, "
    "is above 0 by its 95 % interval; it does not hold where the slope is equivalent to 0: its 90 % interval lies within "
    f"{MARGIN:g} of it"
)


def claims(ds: xr.Dataset) -> list[Claim]:
    """The statements, for both ends, and for the first without position 0."""
    return judge(births, ds)


def follows(ds: xr.Dataset, end: str) -> Told:
    """The end of trained profiles follows from that at initialization."""
    fit = regressed(with_behind(ds), end, -1, COVARIATES["log sigma, loss"])
    need(np.isfinite(fit.slope.value))
    return f"{told(fit.slope)} (variance inflation {number(fit.inflation)})", _remembered(fit.slope)


def _remembered(slope: Interval) -> Test:
    """Whether a slope is above 0; not where it is equivalent to 0."""
    return lambda level: "does not hold" if nothing(slope, MARGIN)(level) == "holds" else above(slope, 0)(level)


for _end in SHOWN:
    _name = _end.replace(" ", "-")
    _claim = f"The {_end} of trained {MODELS} follows from the {_end} that they were initialized with."
    births(f"follows-{_name}", "", _claim, rule=SLOPE.format(end=_end), end=_end)(follows)
    _claim = f"Training gives {MODELS} that start from a flat profile one with {_end}."
    _flat = Headline(f"{_end} at the last step of flat kinds", partial(of_flat, end=_end), ratio=True)
    state(births, f"from-flat-{_name}", _claim, _flat, over(1))
