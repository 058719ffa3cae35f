"""What a result of rollout says: rates, predicted and measured peaks, tables, theorems 4.1 to 4.7 of [Wu] and beyond."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import xarray as xr

from probes.claims.claim import Claim
from probes.claims.rules import QUARTER, SURE, between, every, near, range_told
from probes.results.tables import Table, number
from probes.theory.rollout import decay_peak, rope_peak, turned_rates
from probes.theory.unnormalized import even_shares

from .rollout_bounds import ROUNDING, SUMMED, TINY
from .rules import Judged, at, decided, each_above, judge, need, over_each, places, setting, variable

BELOW, FLOOR = 0.5, 1e-9  # masses between which a rate is fitted: after the start, before rounding
CONVERGED = 0.05  # mass that is left when "all" has gone
FALLEN = 0.9  # what is left at most, after the first crossing of the text, of a mass that is falling
LEARNT = -math.log(0.75)  # nats: a trained toy above it has not learnt its task, and is left out
STEADY = 1.5  # factor within which the rates of two halves of a course are one: exponential
INSIDE = 0.5  # of the text, up to which peaks are compared: beyond, the beginning of the text gathers mass of its own
EXACT = 1  # token that a peak may be off: two distances are equally good where x* is a whole number
# What theorems are about: cases, by the beginnings of their names, or all toys of an encoding. 4.1's argument is about any
# causal mask.
ENDS = ("violations", "checked")
THEOREMS: dict[str, tuple[str, ...] | str] = {
    "4.1": ("causal", "decay", "rope"),
    "4.2": ("window",),
    "4.3": ("prefix",),
    "4.4 and 4.5": "decay",
    "4.6 and 4.7": "rope",
    "App. I": "planes",
}


def fresh(ds: xr.Dataset) -> list[str]:
    """Sources that are fresh toys, small logits first."""
    return [str(x) for x in ds["source"].values if str(x).startswith("fresh")] if "source" in ds else []


def learnt(ds: xr.Dataset) -> xr.Dataset:
    """Without what was measured on trained toys that failed at their task; their losses stay."""
    if "loss" not in ds:
        return ds
    runs = [name for name in ds if name != "loss" and {"case", "source", "seed"} <= set(ds[name].dims)]
    return ds.assign({name: ds[name].where(~(ds["loss"] > LEARNT)) for name in runs})


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
    return variable(ds, name).argmax("distance")


def _top(outside: xr.DataArray) -> int:
    """Index of the last layer that a source has."""
    known = np.isfinite(outside.transpose(..., "layer").values).any(tuple(range(outside.ndim - 1)))
    return int(np.flatnonzero(known)[-1])


def tables(ds: xr.Dataset) -> list[Table]:
    """All numbers, medians over seeds with their range; of trained toys, those that learnt their task."""
    ds = learnt(ds)
    counts = {name: counted for name in THEOREMS if (counted := _counted(ds, name))[1]}
    rows = [[name, f"{compared:,}", f"{beyond:,}"] for name, (beyond, compared) in counts.items()]
    found = [Table("Bounds with the measured eps and B", ("theorem", "compared", "beyond"), rows)]
    if "outside" in ds:
        found += [_limit_table(ds), *_prefix_tables(ds)]
        if "loss" in ds:
            losses = places(ds["loss"], "case", "source")
            rows = [
                [*labels, range_told(one), f"{int((one <= LEARNT).sum())} of {one.size}"]
                for labels, one in losses
                if np.isfinite(one).any()
            ]
            columns = ("case", "source", "median (range)", f"learnt, {LEARNT:.2f} or less")
            found.append(Table("Trained toys: loss, nats; those that did not learn are left out", columns, rows))
    if "decay_curve" in ds:
        found.append(_peak_table(ds, "decay_curve", "decay", "scale", decay_stars(ds), ds["decay_paths"].values))
    if "rope_curve" in ds:
        found.append(_peak_table(ds, "rope_curve", "theta", "noise", rope_stars(ds), ds["rope_paths"].values))
    if "planes_lost" in ds:
        low, high = plane_rates(ds)
        rows = [[kind, range_told(least), range_told(most)] for (kind,), least, most in _by_kind(low, high)]
        columns = ("directions", "least f(x) / x^2", "largest")
        found.append(Table("Several planes: what logits lose, nats per squared token", columns, rows))
    if "gone" in ds and fresh(ds):
        found.append(_other_table(ds))
    return found


def plane_rates(ds: xr.Dataset) -> tuple[xr.DataArray, xr.DataArray]:
    """Least and largest f(x) / x^2 of the drawn directions, [turned, seed]; noise changes neither."""
    lost = variable(ds, "planes_lost").isel(noise=0).transpose("turned", "seed", "distance")
    rates = np.array([[turned_rates(one) for one in kind] for kind in lost.values])
    low, high = (lost.isel(distance=0).copy(data=rates[..., n]) for n in range(2))
    return low, high


def _by_kind(low: xr.DataArray, high: xr.DataArray) -> Iterator[tuple[tuple[str], np.ndarray, np.ndarray]]:
    for ((kind,), least), (_, most) in zip(places(low, "turned"), places(high, "turned"), strict=True):
        yield (str(kind),), least.values, most.values


def _other_table(ds: xr.Dataset) -> Table:
    top = _top(ds["gone"])
    layers = sorted({top // 6, top // 3, top // 2, top})
    rows = []
    for labels, here in places(ds[["beyond", "gone"]].sel(source=fresh(ds)), "attention", "source"):
        cells = []
        for layer in layers:
            beyond, gone = (here[name].isel(layer=layer).values for name in ("beyond", "gone"))
            told = range_told(beyond[np.isfinite(beyond)]) if np.isfinite(beyond).any() else "-"
            cells.append(told + (f"; nothing in {np.median(gone):.0%}" if gone.any() else ""))
        rows.append([*labels, *cells])
    even = even_beyond(ds)
    rows.append(["equal weights, as they are", "theory", *(number(even[layer], ".3g") for layer in layers)])
    columns = ("attention", "source", *(f"{layer + 1} layers" for layer in layers))
    return Table("Attention other than softmax: share of the last query's row beyond the first token", columns, rows)


def even_beyond(ds: xr.Dataset) -> np.ndarray:
    """(T - 1) / (t + T) by layer t: the share beyond the first token if all weights are equal and not normalized."""
    return np.array([even_shares(ds.sizes["key"], t)[:-1].sum() for t in range(_top(ds["gone"]) + 1)])


def _counted(ds: xr.Dataset, theorem: str) -> tuple[int, int]:
    """(beyond, compared)."""
    kinds = THEOREMS[theorem]
    names = ("",) if not isinstance(kinds, str) else (f"{kinds}_", *(["decay_peak_"] if kinds == "decay" else []))
    found = [ds[[f"{name}violations", f"{name}checked"]] for name in names if f"{name}violations" in ds]
    if not isinstance(kinds, str):
        found = [
            one.sel(case=[str(case) for case in one["case"].values if str(case).startswith(kinds)]) for one in found
        ]
    beyond, compared = (
        sum(int(one[name].sum()) for one in found for name in one if str(name).endswith(end)) for end in ENDS
    )
    return beyond, compared


def _limit_table(ds: xr.Dataset) -> Table:
    rows = []
    for labels, here in places(ds, "case", "source"):
        if np.isfinite(here["eps"]).any():
            here = here.dropna("seed", subset=["eps"])
            last = [one[np.isfinite(one)][-1] for one in here["outside"].values if np.isfinite(one).any()]
            measured = [rates(one) for one in here["outside"].values]
            promised = [bound_rate(one) for one in here["outside_bound"].values]
            rows.append([*labels, *map(range_told, (here["eps"].values, last, measured, promised))])
    columns = ("case", "source", "eps", "mass beyond the first token (prefix) at the top", "rate per layer", "bound's")
    return Table("Where the mass goes: median (range) over seeds", columns, rows)


def _prefix_tables(ds: xr.Dataset) -> list[Table]:
    windows, prefixes = [], []
    for (case, source), here in places(ds, "case", "source"):
        kind, _, size = case.partition(" ")
        if source not in fresh(ds):
            continue
        if kind == "window":
            measured = range_told([rates(one) for one in here["outside"].values])
            windows.append([size, str(crossing(ds, int(size))), source, measured])
        if kind == "prefix":
            top = here.isel(layer=_top(here["outside"]))
            shares = top["last"].sel(key=range(int(size))).median("seed").values
            told = ", ".join(number(x, ".3f") for x in shares)
            prefixes.append([size, source, told, range_told(top["share"].values), range_told(here["eps"].values)])
    columns = ("w", "ceil((N-1)/(w-1))", "source", "rate per layer")
    found = [Table("Windows: the last query's mass beyond the first token", columns, windows)]
    columns = ("K", "source", "shares of the prefix at the top", "least of any query", "eps, its bound")
    return [table for table in (*found, Table("Prefixes", columns, prefixes)) if table.rows]


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


def claims(ds: xr.Dataset) -> list[Claim]:
    """Theorems 4.1 to 4.7, their bounds on all toys and their statements on fresh ones."""
    return judge(__name__, learnt(ds))


def bounded(ds: xr.Dataset, theorem: str) -> Judged:
    """No number beyond its bound."""
    beyond, compared = _counted(ds, theorem)
    need(compared)
    return Judged(f"{beyond:,} of {compared:,} numbers beyond", beyond == 0)


def of_fresh(ds: xr.Dataset, kind: str) -> xr.Dataset:
    """Fresh toys of the cases of a kind, as [case, source, seed, ...]."""
    cases = [str(case) for case in ds["case"].values if str(case).startswith(kind)] if fresh(ds) else []
    need(cases)
    return ds.sel(case=cases, source=fresh(ds)).transpose("case", "source", "seed", ...)


def told_by_case(values: xr.DataArray) -> str:
    """Medians and ranges, case by case."""
    return ", ".join(f"{case}: {range_told(one)}" for (case,), one in places(values, "case"))


def converges(ds: xr.Dataset) -> Judged:
    """Every fresh toy, however large its logits."""
    here = at(of_fresh(ds, "causal"), case="causal")["outside"]
    last = _top(here)
    courses = here.isel(layer=slice(last + 1)).values.reshape(-1, last + 1)
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
    top = here.isel(layer=last)
    steady = [between(found, 1 / STEADY, STEADY) for found in over_each(top.copy(data=ratio.reshape(top.shape)))]
    return decided(measured, each_above(-top, -CONVERGED), *steady)


def same_limit(ds: xr.Dataset) -> Judged:
    """The mass goes under every window."""
    here = of_fresh(ds, "window")["outside"]
    last = _top(ds.sel(source=fresh(ds))["outside"])
    measured, tests = [], []
    for (case,), one in places(here, "case"):
        width, top = int(case.split()[1]), one.isel(layer=last)
        measured.append(f"w = {width}: {range_told(top)}")
        # What narrow windows leave after few layers says nothing about the limit: it has to be falling.
        if one.sizes["layer"] > 2 * (crossed := crossing(ds, width)):
            tests.append(each_above(xr.ufuncs.log(one.isel(layer=crossed) / top.clip(TINY)), -math.log(FALLEN)))
    return decided(f"mass beyond after {last + 1} layers {', '.join(measured)}", *tests)


def slower(ds: xr.Dataset) -> Judged:
    """Windows that take fewer steps have higher rates."""
    first = of_fresh(ds, "window")["outside"].isel(source=0)
    found = {int(case.split()[1]): [rates(run) for run in one.values] for (case,), one in places(first, "case")}
    found = {w: xr.DataArray(values, dims="seed") for w, values in found.items() if np.isfinite(values).all()}
    need(len(found) > 1)
    shown = ", ".join(f"{float(rate.mean()):.3f} at {crossing(ds, w)} (w = {w})" for w, rate in found.items())
    pairs = [(a, b) for a, b in pairwise(sorted(found)) if crossing(ds, a) != crossing(ds, b)]
    rising = every([each_above(found[b] - found[a]) for a, b in pairs])
    return Judged(f"rate per layer {shown}, {fresh(ds)[0]}", rising(SURE))


def to_prefix(ds: xr.Dataset) -> Judged:
    """Next to nothing is left outside a prefix."""
    here = of_fresh(ds, "prefix")["outside"]
    left = here.isel(layer=_top(here))
    return decided(f"mass outside at the top {told_by_case(left)}", each_above(-left, -CONVERGED))


def shares(ds: xr.Dataset) -> Judged:
    """The least share of a prefix stays, and stays above eps."""
    here = of_fresh(ds, "prefix")
    top = _top(here["outside"])
    least, before = here["share"].isel(layer=top), here["share"].isel(layer=top // 2)
    kept = each_above(xr.ufuncs.log(least / before), -math.log(STEADY))
    measured = f"least share of any query at the top {told_by_case(least)}"
    return decided(measured, kept, each_above(xr.ufuncs.log(least / here["eps"])))


def stars(ds: xr.Dataset) -> tuple[xr.DataArray, xr.DataArray]:
    """The theorem's peaks under decay, and whether they are within the part of the text where peaks are compared."""
    found = variable(ds, "decay_paths").transpose("decay", "peak_layer").copy(data=decay_stars(ds))
    return found, found < INSIDE * ds.sizes["distance"]


def at_star(ds: xr.Dataset) -> Judged:
    """Peaks are where the theorem says."""
    there, looked = stars(ds)
    off = (peaks(ds, "decay_curve") - there).where(looked)
    shown = "; ".join(
        f"logits {scale:g}: within {EXACT} token in {float((abs(one) <= EXACT).sum() / one.notnull().sum()):.0%}, "
        f"off by {float(abs(one).max()):g} at most"
        for (scale,), one in places(off, "scale")
    )
    least = off.isel(scale=0)
    exact = [between(one, -1, 1) for one in over_each(least / np.maximum(EXACT, QUARTER * there))]
    return decided(f"{int(least.notnull().sum())} peaks of each; {shown}", *exact)


def star_moves(ds: xr.Dataset) -> Judged:
    """Peaks move away with depth, and come nearer with the rate."""
    least, looked = peaks(ds, "decay_curve").isel(scale=0), stars(ds)[1]
    steps = least.diff("peak_layer").where(looked), -least.diff("decay", label="lower").where(looked)
    medians = least.median("seed").transpose("decay", "peak_layer")
    layers = medians.sizes["peak_layer"]
    ends = [f"{one[1]:g} to {one[-1]:g} at m = {m:g}" for (m,), one in places(medians, "decay") if layers > 1]
    moves = [between(one, 0, math.inf) for step in steps for one in over_each(step)]
    measured = f"from t = 1 to {layers - 1}: {', '.join(ends) or '-'} (medians, least logits)"
    return decided(measured, *(moves if all(over_each(step) for step in steps) else ()))


def turned(ds: xr.Dataset, *, along: str) -> Judged:
    """Whether the peak under RoPE moves away with depth, or with every smaller angle."""
    need("rope_curve" in ds)
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


def aligned_alone(ds: xr.Dataset) -> Judged:
    """Whether logits fall from distance 0 on, draw by draw."""
    least = plane_rates(ds)[0]
    falls = {str(kind): one.values > 0 for (kind,), one in places(least, "turned")}
    aligned, others = ([x for kind, x in falls.items() if kind.endswith("aligned") == same] for same in (True, False))
    need(aligned, others)
    measured = ", ".join(f"{kind}: {int(x.sum())} of {x.size}" for kind, x in falls.items())
    return Judged(f"draws that fall {measured}", bool(np.all(aligned)) and not np.all(others))


def _other(ds: xr.Dataset, *attention: str) -> xr.Dataset:
    """Fresh toys of these kinds of attention at their top layer, [attention, source, seed]."""
    need("gone" in ds, fresh(ds))
    here = at(ds[["beyond", "gone"]], attention=list(attention)).sel(source=fresh(ds))
    return here.isel(layer=_top(here["gone"])).transpose("attention", "source", "seed")


def need_not(ds: xr.Dataset) -> Judged:
    """Rows of which nothing arrives have not converged to the first token, either."""
    here = _other(ds, "sigmoid", "relu")
    away = here["gone"] + (1 - here["gone"]) * here["beyond"].fillna(0)
    said = []
    for (name,), one in places(here, "attention"):
        beyond, gone = (one[part].values.ravel() for part in ("beyond", "gone"))
        arrives = range_told(beyond[np.isfinite(beyond)]) if np.isfinite(beyond).any() else "-"
        said.append(f"{name}: {arrives} beyond the first token, nothing arrives in {gone.mean():.0%} of the sequences")
    return decided("; ".join(said), each_above(away, CONVERGED))


def summed_converges(ds: xr.Dataset) -> Judged:
    """As softmax does."""
    beyond = _other(ds, f"sigmoid{SUMMED}")["beyond"]
    return decided(f"{range_told(beyond.values.ravel())} beyond", each_above(-beyond, -CONVERGED))


def as_equal(ds: xr.Dataset) -> Judged:
    """Sigmoid's share at the top against that of equal weights."""
    beyond = _other(ds, "sigmoid")["beyond"]
    even = float(even_beyond(ds)[-1])
    told = ", ".join(f"{source}: {range_told(one)}" for (source,), one in places(beyond.isel(attention=0), "source"))
    return decided(f"{told}; equal weights {even:.3g}", *(near(one, even) for one in over_each(beyond)))
