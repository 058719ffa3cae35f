"""What a result of births says: tables, and whether trained profiles follow from those at initialization.

Regressions are least squares of logarithms, over runs. Runs of one kind of initialization start from nearly the same
profile: between kinds there is nearly all that the slope is told from, and with few kinds a covariate can stand for it.
So the tables also have the slope's variance inflation, 1 / (1 - R^2) of the initial profile on the covariates, and
slopes over the means of kinds, whose intervals are the ones that hold for other kinds of initialization.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Float
from scipy.stats import t as student

from probes.claims.claim import Claim
from probes.claims.rules import Test, above, nothing, told
from probes.results.statistics import INTERVAL, Interval, over_runs
from probes.results.tables import Table, interval, number
from probes.results.ushape import numbers

from .births import ENDS
from .rules import Judged, by_parts, decided, judge, need, over_told, places

MATRICES = ("embedding", "q", "k", "v", "o", "gate", "up", "down")  # RoPE: no learned positions
MARGIN = 0.1  # of a slope that counts as none
COVARIATES: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "log sigma": ("log sigma",),
    "log sigma, loss": ("log sigma", "loss"),
}
BEHIND = "primacy behind 0"  # position 0 holds BOS, the other positions text
SHOWN = (*ENDS, BEHIND)
MEASURED = ("loss", "sink_rate", "sink_weight", "gain", "exact")  # beside the ends
_COURSE = ("kind", "step", *SHOWN, "loss, nat", "sink rate", "weight on 0", "recall gain, nat", "recalled exactly")
FEWEST = 1e-8  # of the predictor's square that covariates and the constant have to leave


def with_behind(ds: xr.Dataset) -> xr.Dataset:
    """The result with `BEHIND` of its elasticities beside the ends."""
    found = xr.apply_ufunc(
        lambda curve: numbers(curve)["primacy_behind_0"],
        ds["elasticity"],
        input_core_dims=[["position"]],
        vectorize=True,
    )
    return ds.assign({BEHIND: found})


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


def tables(ds: xr.Dataset) -> list[Table]:
    """Each kind before and after training; slopes; checkpoint by checkpoint."""
    ds = with_behind(ds)
    first, last = ds.isel(step=0), ds.isel(step=-1)
    rows = []
    for kind in map(str, ds["kind"].values):
        ends = [over_told(np.log(of[end].sel(kind=kind)), ".3g", math.exp) for end in SHOWN for of in (first, last)]
        other = [over_told(last[name].sel(kind=kind), ".3g") for name in ("loss", "sink_rate", "gain", "exact")]
        rows.append([kind, *ends, *other])
    columns = tuple(f"{end} {when}" for end in SHOWN for when in ("at initialization", "trained"))
    title = "Kinds of initialization: means over runs, geometric ones of the ends"
    slopes = [
        [end, "kinds" if kinds else "runs", name, *_cells(regressed(ds, end, -1, given, kinds=kinds))]
        for end in SHOWN
        for kinds in (False, True)
        for name, given in COVARIATES.items()
    ]
    what = ("end", "unit", "covariates", "slope [95 %]", "90 % interval", "variance inflation", "number")
    said = "Slopes of logarithms, trained on initial; only branches-* and flat-* tell the profile apart from sigma"
    return [
        Table(title, ("kind", *columns, "loss, nat", "sink rate", "recall gain, nat", "recalled exactly"), rows),
        Table(said, what, slopes),
        Table("The memory of initialization: slopes over runs, no covariates", ("step", *SHOWN), _memory(ds)),
        Table("Checkpoint by checkpoint: means over runs, geometric ones of the ends", _COURSE, _course(ds)),
        Table("Deviations of fresh weights (the unembedding is the embedding)", ("kind", *MATRICES), _deviations(ds)),
    ]


def _memory(ds: xr.Dataset) -> list[list[str]]:
    return [
        [str(int(step)), *(told(regressed(ds, end, n).slope) for end in SHOWN)]
        for n, step in enumerate(ds["step"].values)
        if n
    ]


def _course(ds: xr.Dataset) -> list[list[str]]:
    rows = []
    for (kind, step), one in places(ds, "kind", "step"):
        ends = [number(math.exp(np.log(one[end]).mean())) for end in SHOWN]
        rows.append([kind, str(step), *ends, *(number(one[name].mean()) for name in MEASURED)])
    return rows


def _deviations(ds: xr.Dataset) -> list[list[str]]:
    found = ds["deviation"].sel(matrix=list(MATRICES))
    return [[str(kind), *(number(x) for x in found.sel(kind=kind).values)] for kind in ds["kind"].values]


def _cells(fit: Fit) -> list[str]:
    low, high = fit.slope.at(0.9)
    ends = "-" if np.isnan(low) else f"[{number(low)}, {number(high)}]"
    return [interval(*fit.slope[:3]), ends, number(fit.inflation), str(fit.units)]


def claims(ds: xr.Dataset) -> list[Claim]:
    """The statements, for both ends, and for the first without position 0."""
    early = int(ds["step"].values[1])
    ends = [{"end": end, "name": end.replace(" ", "-"), "early": early} for end in SHOWN]
    return judge(__name__, with_behind(ds), lists={"end": ends})


def follows(ds: xr.Dataset, end: str, point: int) -> Judged:
    """The end at a point follows from that at initialization."""
    fit = regressed(ds, end, point, COVARIATES["log sigma, loss"])
    need(np.isfinite(fit.slope.value))
    plain, kinds = regressed(ds, end, point), regressed(ds, end, point, kinds=True)
    said = f"{told(fit.slope)} (variance inflation {number(fit.inflation)}); without covariates {told(plain.slope)}"
    return decided(f"{said}, over {kinds.units} kinds {told(kinds.slope)}", _remembered(fit.slope))


def _remembered(slope: Interval) -> Test:
    """Whether a slope is above 0; not where it is equivalent to 0."""
    return lambda level: "does not hold" if nothing(slope, MARGIN)(level) == "holds" else above(slope, 0)(level)


def from_flat(ds: xr.Dataset, end: str) -> Judged:
    """Models of a flat initialization have the end after training, each kind of them."""
    flat = [str(kind) for kind in ds["kind"].values if str(kind).startswith("flat")]
    need(flat)
    each = [(kind, np.log(ds[end].isel(step=-1).sel(kind=kind).values)) for kind in flat]
    need(np.isfinite([runs for _, runs in each]).any())
    return by_parts([(f"{kind}: {over_told(x, change=math.exp)}", above(over_runs(x), 0)) for kind, x in each])
