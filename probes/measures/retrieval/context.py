"""Whether the norm behind lists tells what is recalled of them (`docs/sensitivity-in-context.md`).

A *cell* is a result of `retrieval` with a mechanism: one model, one form of lists. Between depths, ranks of the mean gain
and of a profile are correlated after log distance and log position are taken out of both by least squares. (These enter as
numbers: their ranks are each other's mirror image.) Within a depth and list, gain is regressed on the log norm with an
effect of each list and each depth. Under shocks, the change of log p is regressed on that of the log norm with an effect of
each list under each shock. Intervals are the jackknife's over couples; a couple leaves all cells of a model at once, since
forms share their pairs.

Source: ours. Pooling: DerSimonian and Laird, Controlled Clinical Trials 7 (1986), 177; intervals by Knapp and Hartung,
Statistics in Medicine 22 (2003), 2693, nowhere narrower than those of the former.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Float
from matplotlib.figure import Figure
from scipy.stats import rankdata
from scipy.stats import t as student

from ...charts import GREY, VERMILLION, Series, dots, sheet
from ...results.curves import Correlation, ShiftNull, shift_null, shifted, spearman
from ...results.statistics import Interval, couples, freedom, jackknife_of_two, jackknifed
from ...results.tables import interval
from ...results.ushape import typical

UNKNOWN = Interval(math.nan, math.nan, math.nan)
PROFILES = {
    "profile": "the pretrained profile",
    "profile_init": "the profile at initialization",
    "norm_profile": "the norm behind the lists",
    "log_distance": "log distance",
}
FEWEST = 6  # couples, for an interval of what the mechanism tells
CLOSEST = 0.999999  # Fisher's z of a correlation of 1 is infinite
MARGIN = 0.3  # a partial correlation that is smaller counts as none
DRAWS, SPLITS = 10_000, 200  # of profiles dealt to cells; halves of couples
SLOPES = {  # of recall on the log norm, in nat, by name
    "within": "gain, given list and depth",
    "log p": "log p, given list and depth",
    "log p, control": "log p, given list, depth and log p behind the other list",
    "shocks": "log p under shocks, given list and shock",
    "shocks, first": "log p under shocks, given list and shock, first pair included",
    "shocks, depth": "log p under shocks, given list, depth and shock",
}
CONTROLS = {  # of log distance d, log position p and depth k, from -1 to 1; the first are the claim's
    "straight lines in log distance and log position": lambda d, p, k: (d, p),
    "these and depth": lambda d, p, k: (d, p, k),
    "these and their squares": lambda d, p, k: (d, p, d**2, p**2),
    "depth up to its fourth power": lambda d, p, k: (k, k**2, k**3, k**4),
}
DRAWN = ("within", "log p, control", "shocks")  # of slopes
CLAIMED = next(iter(CONTROLS))


def log_distance(ds: xr.Dataset) -> Float[np.ndarray, " depth"]:
    """Logarithm of how many tokens before the place of its prediction each value begins."""
    return np.log(ds.attrs["query"] - ds["place"].values)


def if_enough(found: Interval, unit: np.ndarray) -> Interval:
    """Without ends where there are fewer than `FEWEST` units."""
    return found if len(np.unique(unit)) >= FEWEST else found._replace(low=math.nan, high=math.nan)


def given(ds: xr.Dataset, controls: str = CLAIMED) -> Correlation:
    """Of two curves' ranks, `CONTROLS` taken out of both; NaN where nothing is left of one."""
    count = ds.sizes["depth"]
    of = CONTROLS[controls](log_distance(ds), np.log(ds["place"].values), np.linspace(-1, 1, count))
    known = np.column_stack([np.ones(count), *of])

    def partial(a: np.ndarray, b: np.ndarray) -> float:
        ranks = np.column_stack([rankdata(a), rankdata(b)])
        left = ranks - known @ np.linalg.lstsq(known, ranks, rcond=None)[0]
        sizes = np.linalg.norm(left, axis=0)
        return float(left[:, 0] @ left[:, 1] / sizes.prod()) if (sizes > 1e-9 * len(a)).all() else math.nan

    return partial


def follows(ds: xr.Dataset, profile: str, controls: str = CLAIMED) -> tuple[Interval, ShiftNull]:
    """Partial rank correlation over depth of the mean gain with one of `PROFILES`, both resampled, and what shifts give.

    With log distance a plain one. Prompts of ordinary text are resampled apart from lists, half-widths of Fisher's z in
    quadrature.
    """
    gain, unit = ds["gain"].values, couples(ds)
    plain = profile == "log_distance"
    correlation: Correlation = spearman if plain else given(ds, controls)
    curves = np.atleast_2d(log_distance(ds) if plain else ds[profile].values)  # [sample, depth]

    def z(some: Float[np.ndarray, "context depth"], of: Float[np.ndarray, "sample depth"]) -> float:
        return math.atanh(np.clip(correlation(some.mean(0), typical(of)), -CLOSEST, CLOSEST)) if len(of) else math.nan

    if profile == "norm_profile":  # of the first ones of these lists: a couple leaves both at once
        own = couples(ds, "traced")
        number = np.unique(unit)
        found = jackknifed(lambda some: z(gain[np.isin(unit, some)], curves[np.isin(own, some)]), number, number)
        unit = own
    elif plain:
        found = jackknifed(lambda some: z(some, curves), gain, unit)
    else:
        both = jackknife_of_two(z, (gain, unit), (curves, np.arange(len(curves))))
        found = Interval(*(float(x) for x in both))._replace(freedom=freedom(unit))
    return if_enough(turned_into(math.tanh, found), unit), shift_null(gain.mean(0), typical(curves), correlation)


def crosswise(ds: xr.Dataset, name: str = "gain", other: str = "norm_profile") -> float:
    """Partial correlation of a curve in half of the couples with one in the other half, mean over random halves.

    Curves of the same lists share their noise; these do not.
    """

    def curve(of: str, kept: np.ndarray) -> np.ndarray:
        values = ds[of].values[np.isin(couples(ds, str(ds[of].dims[0])), kept)]
        return typical(values) if of == "norm_profile" else values.mean(0)

    draw, number, partial = np.random.default_rng(0), np.unique(couples(ds, "traced")), given(ds)
    found = []
    for _ in range(SPLITS if len(number) > 1 else 0):
        half, rest = np.split(draw.permutation(number), [len(number) // 2])
        found.append(partial(curve(name, half), curve(other, rest)))
    return float(np.mean(found)) if found else math.nan


def reliability(ds: xr.Dataset, name: str) -> float:
    """Partial correlation of "gain" or "norm_profile" with itself by `crosswise`, for all couples instead of half of them.

    By the formula of Spearman and Brown; 0 where halves do not agree.
    """
    r = crosswise(ds, name, name)
    return float(np.maximum(0, 2 * r / (1 + r)))  # NaN stays


def slopes(cells: Sequence[xr.Dataset]) -> dict[str, Interval]:
    """`SLOPES` of one model's cells, without the first pair under shocks: it stands beside position 0, which they change."""
    parts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}  # ([y or x or known, ..., list, depth], couples)
    for ds in cells:
        unit, own = couples(ds, "traced"), ds.sel(context=ds["traced"].values)
        with np.errstate(divide="ignore", invalid="ignore"):
            before, gain, log_p = np.log(ds["norm_profile"].values), own["gain"].values, own["log_p"].values
            of: dict[str, Sequence[np.ndarray]] = {"within": (gain, before), "log p": (log_p, before)}
            of |= {"log p, control": (log_p, before, log_p - gain)}
            if "shock" in ds.dims:
                change = ds["log_p_shocked"].values - log_p, np.log(ds["norm_shocked"].values) - before
                later = [one[..., 1:] for one in change]
                of |= {"shocks": later, "shocks, first": change, "shocks, depth": later}
        for name, values in of.items():
            parts.setdefault(name, []).append((np.stack(values), unit))

    def slope(kept: np.ndarray, of: str) -> float:
        sums: Any = 0.0
        for values, unit in parts[of]:
            norm = values[1]
            seen = np.isfinite(norm).all(tuple(range(norm.ndim - 1)))  # what a window cuts off has no logarithm
            left = values[..., np.isin(unit, kept), :][..., seen]
            left = left - left.mean(-1, keepdims=True)
            left = left if of in ("shocks", "shocks, first") else left - left.mean(-2, keepdims=True)
            flat = left.reshape(len(left), -1)
            sums = sums + flat @ flat.T
        return float(np.linalg.lstsq(sums[1:, 1:], sums[1:, 0], rcond=None)[0][0]) if sums[1, 1] > 0 else math.nan

    number = {of: np.unique(np.concatenate([unit for _, unit in some])) for of, some in parts.items()}
    return {
        of: if_enough(jackknifed(lambda kept, of=of: slope(kept, of), some, some), some) for of, some in number.items()
    }


class Pooled(NamedTuple):
    """Partial correlations of several cells as one."""

    z: Interval  # Fisher's, of the mean over the population of cells
    between: float  # standard deviation of z between cells
    shifts: float  # p of the mean z where all cells' profiles are turned alike
    exchanged: float  # mean correlation with the profiles of other models in the same form
    exchanges: float  # p of the mean z where profiles are dealt to cells of the same form
    by_model: Interval  # the mean of the models' means, whose number is the sample

    @property
    def rho(self) -> Interval:
        """The mean and its interval as a correlation."""
        return turned_into(math.tanh, self.z)


def turned_into(change: Callable[[float], float], found: Interval) -> Interval:
    """An estimate and its ends on another scale."""
    return Interval(*(change(end) for end in found[:3]))._replace(freedom=found.freedom)


def random_effects(found: Sequence[Interval]) -> tuple[Interval, float]:
    """The mean of independent estimates with intervals of Student's t, and the deviation between them."""
    z, low, high, freedom = (np.array(x) for x in zip(*found, strict=True))
    variance = ((high - low) / 2 / student.ppf(0.975, freedom)) ** 2
    count, weight = len(z), 1 / variance
    q = float((weight * (z - np.average(z, weights=weight)) ** 2).sum())
    tau2 = max(0.0, (q - count + 1) / float(weight.sum() - (weight**2).sum() / weight.sum()))
    weight = 1 / (variance + tau2)
    mean = float(np.average(z, weights=weight))
    spread = max(1.0, float((weight * (z - mean) ** 2).sum()) / (count - 1))
    reach = float(student.ppf(0.975, count - 1)) * math.sqrt(spread / float(weight.sum()))
    return Interval(mean, mean - reach, mean + reach, count - 1), math.sqrt(tau2)


def form_of(ds: xr.Dataset) -> str:
    """How the lists of a cell are worded."""
    said = json.loads(ds.attrs.get("options", "{}"))
    if (template := said.get("template", "sentences")) != "sentences":
        return template
    return str(said.get("keys")) if said.get("digits") else "nouns"


def pooled(cells: Mapping[str, xr.Dataset], controls: str = CLAIMED) -> Pooled | None:
    """Of cells whose partial correlation has an interval; None of fewer than two such cells.

    Nulls are over cells with as many depths as the first: their profiles turned as in `shift_null`, all by the same number
    of places, since cells share the shape of their curves; and profiles dealt at random to cells of the same form.
    """
    rhos = {name: follows(ds, "norm_profile", controls)[0] for name, ds in cells.items()}
    sure = {name: turned_into(math.atanh, rho) for name, rho in rhos.items() if np.isfinite(rho[:3]).all()}
    if len(sure) < 2:
        return None
    depths = cells[next(iter(sure))].sizes["depth"]
    same = [cells[name] for name in sure if cells[name].sizes["depth"] == depths]
    curves = [(ds["gain"].values.mean(0), typical(ds["norm_profile"].values), given(ds, controls)) for ds in same]
    rho = [
        [[of(gain, norm) for _, norm, _ in curves] for gain, _, of in curves],  # [cell, whose profile]
        [shifted(*one) for one in curves],  # [cell, shift]
    ]
    each, turned = (np.arctanh(np.nan_to_num(np.array(x)).clip(-CLOSEST, CLOSEST)) for x in rho)
    draw, real, form = np.random.default_rng(0), each.trace() / len(same), np.array([form_of(ds) for ds in same])
    alike = form[:, None] == form
    dealt = np.zeros(DRAWS)  # sums over cells
    for which in (np.flatnonzero(form == one) for one in np.unique(form)):
        dealt += each[which, draw.permuted(np.tile(which, (DRAWS, 1)), axis=1)].sum(1)
    nulls = turned.mean(0), np.append(real, dealt / len(same))
    shifts, exchanges = (float((np.abs(null) >= abs(real) - 1e-12).mean()) for null in nulls)
    others = each[alike & ~np.eye(len(same), dtype=bool)]
    of_model, z = (
        np.array([cells[name].attrs["model"] for name in sure]),
        np.array([one.value for one in sure.values()]),
    )
    means = np.array([z[of_model == model].mean() for model in np.unique(of_model)])
    by_model = turned_into(math.tanh, jackknifed(np.mean, means, np.arange(len(means))))
    exchanged = math.tanh(others.mean()) if others.size else math.nan
    return Pooled(*random_effects([*sure.values()]), shifts, exchanged, exchanges, by_model)


def otherwise(cells: Mapping[str, xr.Dataset]) -> dict[str, Pooled | None]:
    """The mean of cells under each of `CONTROLS`, and without each model."""
    found = {f"given {controls}": pooled(cells, controls) for controls in CONTROLS}
    models = dict.fromkeys(str(ds.attrs["model"]) for ds in cells.values())
    return found | {
        f"without {model}": pooled({name: ds for name, ds in cells.items() if ds.attrs["model"] != model})
        for model in models
    }


def answers(cells: Mapping[str, xr.Dataset]) -> list[str]:
    """What cells say together; nothing of a single one."""
    if (found := pooled(cells)) is None:
        return []
    low, high = (math.tanh(end) for end in found.z.at(0.9))
    return [
        f"Gain by depth with the norm behind the lists, {CLAIMED} taken out, over {len(cells)} cells: partial "
        f"rank correlation {interval(*found.rho[:3], form='+.2f')} (90 %: {low:+.2f} to {high:+.2f}; z between cells varies "
        f"by {found.between:.2f}); of models as the sample {interval(*found.by_model[:3], form='+.2f')}; p under shifts "
        f"{found.shifts:.2g}, under exchanges within a form {found.exchanges:.2g}; with the norms of other models in the "
        f"same form {found.exchanged:+.2f}."
    ]


def by_model(cells: Mapping[str, xr.Dataset]) -> dict[str, dict[str, Interval]]:
    """`slopes` of all cells of each model."""
    models = dict.fromkeys(str(ds.attrs["model"]) for ds in cells.values())
    return {model: slopes([ds for ds in cells.values() if ds.attrs["model"] == model]) for model in models}


def forest(cells: Mapping[str, xr.Dataset]) -> Figure:
    """Partial correlations of all cells and their mean, and the slopes of every model."""
    rhos = {name: follows(ds, "norm_profile")[0] for name, ds in cells.items()}
    rhos |= {"all cells": found.rho} if (found := pooled(cells)) else {}
    steep = {
        f"{model}: {SLOPES[one]}": every[one]
        for model, every in by_model(cells).items()
        for one in DRAWN
        if one in every
    }
    figure, (axes,) = sheet(1, 2, height=1 + 0.35 * max(len(rhos), len(steep)), caption="95 % over couples of lists.")
    for cell, of, label in zip(axes, (rhos, steep), ("partial rank correlation", "nat per log norm"), strict=True):
        value, low, high = (np.array([one[n] for one in of.values()]) for n in range(3))
        dots(cell, list(of), [Series("", value, VERMILLION, low, high)])
        cell.set_xlabel(label)
    axes[0].axvspan(-MARGIN, MARGIN, color=GREY, alpha=0.15, linewidth=0)
    return figure
