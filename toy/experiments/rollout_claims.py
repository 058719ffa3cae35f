"""What a result of rollout says: rates, predicted and measured peaks, tables, and theorems 4.1 to 4.7 of [Wu]."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import xarray as xr

from probes.claims.claim import Claim, read_statements
from probes.claims.rules import QUARTER, SURE, between, every, range_told
from probes.results.tables import Table, number
from probes.theory.rollout import decay_peak, rope_peak

from .rollout_bounds import ROUNDING, TINY
from .rules import NOT_THERE, Judged, Rule, decided, each_above, has, judge, over_each, setting

STATEMENTS = read_statements(Path(__file__).with_name("rollout.toml"))
BELOW, FLOOR = 0.5, 1e-9  # masses between which a rate is fitted: after the start, before rounding
CONVERGED = 0.05  # mass that is left when "all" has gone
STEADY = 1.5  # factor within which the rates of two halves of a course are one: exponential
INSIDE = 0.5  # of the text, up to which peaks are compared: beyond, the beginning of the text gathers mass of its own
EXACT = 1  # token that a peak may be off: two distances are equally good where x* is a whole number
# Which cases a theorem is about, by the beginnings of their names; 4.1's argument is about any causal mask.
THEOREMS = {
    "4.1": ("causal", "decay", "rope"),
    "4.2": ("window",),
    "4.3": ("prefix",),
    "4.4 and 4.5": "decay",
    "4.6 and 4.7": "rope",
}


def fresh(ds: xr.Dataset) -> list[str]:
    """Sources that are fresh toys, small logits first."""
    return [str(x) for x in ds["source"].values if str(x).startswith("fresh")] if "source" in ds else []


def rates(outside: np.ndarray, *, part: slice = slice(None)) -> float:
    """Exponential rate per layer of a mass [layer], by least squares of its logarithm; NaN for fewer than three layers.

    `part` of the layers whose mass is between `FLOOR` and `BELOW`.
    """
    layers = np.flatnonzero((outside < BELOW) & (outside > FLOOR))[part]
    if len(layers) < 3:
        return math.nan
    return float(-np.polyfit(layers, np.log(outside[layers]), 1)[0])


def bound_rate(bound: np.ndarray) -> float:
    """Rate per layer that a bound [layer] promises."""
    known = bound[np.isfinite(bound)]
    return max(0.0, float(-np.log(max(known[-1], TINY)) / len(known))) if len(known) else math.nan


def crossing(ds: xr.Dataset, window: int) -> int:
    """ceil((N-1) / (w-1)): blocks that it takes to come from the last position to the first."""
    return -(-(ds.sizes["key"] - 1) // (window - 1))


def decay_stars(ds: xr.Dataset) -> np.ndarray:
    """floor(t / (e^m - 1)) [decay, peak_layer]; a whole x* is given with rounding's help."""
    layers = range(ds.sizes["peak_layer"])
    return np.array([[math.floor(decay_peak(t, float(m)) + ROUNDING) for t in layers] for m in ds["decay"].values])


def rope_stars(ds: xr.Dataset) -> np.ndarray:
    """Peaks of the theorem's curve [theta, peak_layer]."""
    c = float(setting(ds, "turning")) / 2
    layers, length = range(ds.sizes["peak_layer"]), ds.sizes["distance"]
    return np.array([[rope_peak(t, c, float(angle), length) for t in layers] for angle in ds["theta"].values])


def peaks(ds: xr.Dataset, name: str) -> xr.DataArray:
    """Distance at which measured curves are largest."""
    return ds[name].argmax("distance")


def tables(ds: xr.Dataset) -> list[Table]:
    """All numbers, medians over seeds with their range."""
    found = [_checked_table(ds)]
    if "outside" in ds:
        found += [_limit_table(ds), *_prefix_tables(ds)]
        if "loss" in ds:
            rows = [
                [str(one["case"].values), str(one["source"].values), range_told(one)]
                for row in ds["loss"]
                for one in row
                if np.isfinite(one).any()
            ]
            found.append(Table("Trained toys: loss, nats", ("case", "source", "median (range)"), rows))
    if "decay_curve" in ds:
        found.append(_peak_table(ds, "decay_curve", "decay", "scale", decay_stars(ds), ds["decay_paths"].values))
    if "rope_curve" in ds:
        found.append(_peak_table(ds, "rope_curve", "theta", "noise", rope_stars(ds), ds["rope_paths"].values))
    return found


def _checked_table(ds: xr.Dataset) -> Table:
    rows = []
    for name, kinds in THEOREMS.items():
        if (counted := _counted(ds, kinds)) is not None:
            rows.append([name, f"{counted[1]:,}", f"{counted[0]:,}"])
    return Table("Bounds with the measured eps and B", ("theorem", "compared", "beyond"), rows)


# Which cases a theorem is about, by the beginnings of their names; 4.1's argument is about any causal mask.
THEOREMS = {
    "4.1": ("causal", "decay", "rope"),
    "4.2": ("window",),
    "4.3": ("prefix",),
    "4.4 and 4.5": "decay",
    "4.6 and 4.7": "rope",
}


def _counted(ds: xr.Dataset, kinds: tuple[str, ...] | str) -> tuple[int, int] | None:
    """(beyond, compared); None where nothing was compared."""
    if isinstance(kinds, tuple):
        if "violations" not in ds:
            return None
        chosen = [str(case) for case in ds["case"].values if str(case).startswith(kinds)]
        here = ds[["violations", "checked"]].sel(case=chosen)
        counted = int(here["violations"].sum()), int(here["checked"].sum())
    else:
        names = {"decay": ("decay_violations", "decay_peak_violations"), "rope": ("rope_violations",)}[kinds]
        pairs = [(name, name.replace("violations", "checked")) for name in names if name in ds]
        counted = sum(int(ds[one].sum()) for one, _ in pairs), sum(int(ds[other].sum()) for _, other in pairs)
    return counted if counted[1] else None


def _limit_table(ds: xr.Dataset) -> Table:
    rows = []
    for case in ds["case"].values:
        for source in ds["source"].values:
            here = ds.sel(case=case, source=source)
            if not np.isfinite(here["eps"]).any():
                continue
            last = [one[np.isfinite(one)][-1] for one in here["outside"].values if np.isfinite(one).any()]
            measured = [rates(one) for one in here["outside"].values]
            promised = [bound_rate(one) for one in here["outside_bound"].values]
            rows.append(
                [str(case), str(source), *(range_told(x) for x in (here["eps"].values, last, measured, promised))]
            )
    columns = ("case", "source", "eps", "mass beyond the first token (prefix) at the top", "rate per layer", "bound's")
    return Table("Where the mass goes: median (range) over seeds", columns, rows)


def _prefix_tables(ds: xr.Dataset) -> list[Table]:
    windows, prefixes = [], []
    for case in map(str, ds["case"].values):
        for source in fresh(ds):
            here = ds.sel(case=case, source=source)
            if case.startswith("window"):
                width = int(case.split()[1])
                measured = range_told([rates(one) for one in here["outside"].values])
                windows.append([str(width), str(crossing(ds, width)), source, measured])
            if case.startswith("prefix"):
                k = int(case.split()[1])
                top = here["last"].isel(layer=_top(here))
                shares = ", ".join(number(x, ".3f") for x in top.sel(key=range(k)).median("seed").values)
                least = here["share"].isel(layer=_top(here)).values
                prefixes.append([str(k), source, shares, range_told(least), range_told(here["eps"].values)])
    found = []
    if windows:
        columns = ("w", "ceil((N-1)/(w-1))", "source", "rate per layer")
        found.append(Table("Windows: the last query's mass beyond the first token", columns, windows))
    if prefixes:
        columns = ("K", "source", "shares of the prefix at the top", "least of any query", "eps, its bound")
        found.append(Table("Prefixes", columns, prefixes))
    return found


def _peak_table(ds: xr.Dataset, name: str, dim: str, noise: str, stars: np.ndarray, paths: np.ndarray) -> Table:
    found, rows = peaks(ds, name), []
    layers = [f"t = {int(t)}" for t in ds["peak_layer"].values]
    for n, value in enumerate(ds[dim].values):
        title = f"{dim} {value:.3g}"
        rows.append([title, "theorem's curve", *map(str, stars[n])])
        if not np.array_equal(stars[n], paths[n]):
            rows.append([title, "products of decays", *map(str, paths[n])])
        for size in ds[noise].values:
            one = found.sel({dim: value, noise: size})
            label = "logits" if noise == "scale" else "inputs' noise"
            rows.append(
                [
                    title,
                    f"measured, {label} {size:g}",
                    *(range_told(one.sel(peak_layer=t), "g") for t in one["peak_layer"]),
                ]
            )
    return Table(f"Distance of the largest share, tokens: {name.split('_')[0]}", ("", "", *layers), rows)


def _top(ds: xr.Dataset) -> int:
    """Index of the last layer that a source has."""
    known = np.isfinite(ds["outside"].values).any(tuple(range(ds["outside"].ndim - 1)))
    return int(np.flatnonzero(known)[-1])


def claims(ds: xr.Dataset) -> list[Claim]:
    """Theorems 4.1 to 4.7, their bounds on all toys and their statements on fresh ones."""
    rules: dict[str, Rule] = {
        f"{name.replace(' ', '-')}-bound": partial(_bounded, kinds=k) for name, k in THEOREMS.items()
    }
    rules |= {
        "4.1-limit": _converges,
        "4.2-limit": _same_limit,
        "4.2-rate": _slower,
        "4.3-limit": _to_prefix,
        "4.3-shares": _shares,
        "4.5-peak": _at_star,
        "4.5-peak-moves": _star_moves,
        "4.7-peak-with-depth": partial(_turned, along="depth"),
        "4.7-peak-with-angle": partial(_turned, along="angle"),
    }
    return judge(ds, STATEMENTS, {f"wu-thm-{name}": rule for name, rule in rules.items()})


def _bounded(ds: xr.Dataset, *, kinds: tuple[str, ...] | str) -> Judged:
    counted = _counted(ds, kinds)
    return Judged(f"{counted[0]:,} of {counted[1]:,} numbers beyond", counted[0] == 0) if counted else NOT_THERE


def _converges(ds: xr.Dataset) -> Judged:
    """Every fresh toy, however large its logits."""
    if not fresh(ds) or not has(ds, case="causal"):
        return NOT_THERE
    here = ds.sel(case="causal", source=fresh(ds))
    courses = here["outside"].isel(layer=slice(_top(here) + 1)).values.reshape(-1, _top(here) + 1)
    whole = np.array([rates(one) for one in courses])
    half = [len(np.flatnonzero((one < BELOW) & (one > FLOOR))) // 2 for one in courses]
    ratio = np.array(
        [rates(one, part=slice(n)) / rates(one, part=slice(n, None)) for one, n in zip(courses, half, strict=True)]
    )
    measured = (
        f"mass beyond after {courses.shape[1]} layers {range_told(courses[:, -1])}; {range_told(whole, '.2f')} per layer, "
        f"first half's rate over second's {range_told(ratio, '.2f')}"
    )
    if not np.isfinite(ratio).all():
        return Judged(measured)
    top = here["outside"].isel(layer=_top(here))
    steady = [between(found, 1 / STEADY, STEADY) for found in over_each(top.copy(data=ratio.reshape(top.shape)))]
    return decided(measured, each_above(-top, -CONVERGED), *steady)


def _fresh_cases(ds: xr.Dataset, kind: str) -> list[str]:
    """Cases of a kind, where there are fresh toys."""
    return [str(case) for case in ds["case"].values if str(case).startswith(kind)] if fresh(ds) else []


def _same_limit(ds: xr.Dataset) -> Judged:
    if not (windows := _fresh_cases(ds, "window")):
        return NOT_THERE
    last = _top(ds.sel(source=fresh(ds)))
    measured, tests = [], []
    for case in windows:
        here, width = ds["outside"].sel(case=case, source=fresh(ds)), int(case.split()[1])
        top = here.isel(layer=last)
        measured.append(f"w = {width}: {range_told(top)}")
        # What narrow windows leave after few layers says nothing about the limit: it has to be falling.
        crossed = crossing(ds, width)
        if here.sizes["layer"] > 2 * crossed:
            tests.append(each_above(xr.ufuncs.log(here.isel(layer=crossed) / top.clip(TINY)), -math.log(0.9)))
    return decided(f"mass beyond after {last + 1} layers {', '.join(measured)}", *tests)


def _slower(ds: xr.Dataset) -> Judged:
    found = {}
    for case in _fresh_cases(ds, "window"):
        values = [rates(one) for one in ds["outside"].sel(case=case, source=fresh(ds)[0]).values]
        if np.isfinite(values).all():
            found[int(case.split()[1])] = xr.DataArray(values, dims="seed")
    if len(found) < 2:
        return NOT_THERE
    shown = ", ".join(f"{float(rate.mean()):.3f} at {crossing(ds, w)} (w = {w})" for w, rate in found.items())
    pairs = [(a, b) for a, b in pairwise(sorted(found)) if crossing(ds, a) != crossing(ds, b)]
    rising = every([each_above(found[b] - found[a]) for a, b in pairs])
    return Judged(f"rate per layer {shown}, {fresh(ds)[0]}", rising(SURE))


def _to_prefix(ds: xr.Dataset) -> Judged:
    if not (chosen := _fresh_cases(ds, "prefix")):
        return NOT_THERE
    here = ds.sel(case=chosen, source=fresh(ds))
    left = here["outside"].isel(layer=_top(here))
    shown = ", ".join(f"{case}: {range_told(left.sel(case=case))}" for case in chosen)
    return decided(f"mass outside at the top {shown}", each_above(-left, -CONVERGED))


def _shares(ds: xr.Dataset) -> Judged:
    if not (chosen := _fresh_cases(ds, "prefix")):
        return NOT_THERE
    here = ds.sel(case=chosen, source=fresh(ds))
    top = _top(here)
    least, before = here["share"].isel(layer=top), here["share"].isel(layer=top // 2)
    shown = ", ".join(f"{case}: {range_told(least.sel(case=case))}" for case in chosen)
    kept = each_above(xr.ufuncs.log(least / before), -math.log(STEADY))
    return decided(f"least share of any query at the top {shown}", kept, each_above(xr.ufuncs.log(least / here["eps"])))


def _stars(ds: xr.Dataset) -> tuple[xr.DataArray, xr.DataArray]:
    """The theorem's peaks under decay, and whether they are within the part of the text where peaks are compared."""
    stars = ds["decay_paths"].transpose("decay", "peak_layer").copy(data=decay_stars(ds))
    return stars, stars < INSIDE * ds.sizes["distance"]


def _at_star(ds: xr.Dataset) -> Judged:
    if "decay_curve" not in ds:
        return NOT_THERE
    stars, looked = _stars(ds)
    off = (peaks(ds, "decay_curve") - stars).where(looked)
    shown = "; ".join(
        f"logits {float(scale):g}: within {EXACT} token in {float((abs(one) <= EXACT).sum() / one.notnull().sum()):.0%}, "
        f"off by {float(abs(one).max()):g} at most"
        for scale, one in zip(ds["scale"], off.transpose("scale", ...), strict=True)
    )
    least = off.isel(scale=0)
    exact = [between(one, -1, 1) for one in over_each(least / np.maximum(EXACT, QUARTER * stars))]
    return decided(f"{int(least.notnull().sum())} peaks of each; {shown}", *exact)


def _star_moves(ds: xr.Dataset) -> Judged:
    if "decay_curve" not in ds:
        return NOT_THERE
    least, looked = peaks(ds, "decay_curve").isel(scale=0), _stars(ds)[1]
    steps = least.diff("peak_layer").where(looked), -least.diff("decay", label="lower").where(looked)
    medians = least.median("seed").transpose("decay", "peak_layer").values
    layers = medians.shape[1]
    ends = [
        f"{medians[n, 1]:g} to {medians[n, -1]:g} at m = {m:g}" for n, m in enumerate(ds["decay"].values) if layers > 1
    ]
    moves = [between(one, 0, math.inf) for step in steps for one in over_each(step)]
    measured = f"from t = 1 to {layers - 1}: {', '.join(ends) or '-'} (medians, least logits)"
    return decided(measured, *(moves if all(over_each(step) for step in steps) else ()))


def _turned(ds: xr.Dataset, *, along: str) -> Judged:
    """Whether the peak under RoPE moves away with depth, or with every smaller angle."""
    if "rope_curve" not in ds:
        return NOT_THERE
    order = np.argsort(-ds["theta"].values)
    found = peaks(ds, "rope_curve").isel(noise=0, theta=order).transpose("seed", "theta", "peak_layer")
    looked = ds["rope_paths"].isel(theta=order) < INSIDE * ds.sizes["distance"]
    medians, angles = found.median("seed").values, found["theta"].values
    if along == "depth":
        step = found.diff("peak_layer").where(looked)
        ends = ", ".join(f"{medians[n, 0]:g} to {medians[n, -1]:g} at {angle:.3g}" for n, angle in enumerate(angles))
        measured = f"from t = 0 to {medians.shape[1] - 1}: {ends} rad per token"
    else:
        # Before two layers have been walked the peak is at the query itself, whatever the angle.
        farther = found.diff("theta").where(looked & looked.shift(theta=1, fill_value=False))
        step, at = farther.isel(peak_layer=slice(1, None)), medians.shape[1] // 2
        ends = ", ".join(f"{medians[n, at]:g} at {angle:.3g}" for n, angle in enumerate(angles))
        measured = f"at t = {at}: {ends} rad per token"
    return decided(measured, *([each_above(step)] if over_each(step) else []))
