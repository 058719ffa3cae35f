"""The numbers of a result of rollout: rates, predicted and measured peaks, and tables."""

from __future__ import annotations

import math

import numpy as np
import xarray as xr

from probes.claims.rules import range_told
from probes.results.tables import Table, number
from probes.theory.rollout import decay_peak, rope_peak, turned_rates
from probes.theory.unnormalized import even_shares

from ..rules import places, setting, variable
from .bounds import ROUNDING, TINY

BELOW, FLOOR = 0.5, 1e-9  # masses between which a rate is fitted: after the start, before rounding
LEARNT = -math.log(0.75)  # nats: a trained toy above it has not learnt its task, and is left out
# What theorems are about: cases, by the beginnings of their names, or variables by theirs. 4.1's argument is about any
# causal mask.
CASES = {"4.1": ("causal", "decay", "rope"), "4.2": ("window",), "4.3": ("prefix",)}
VARIABLES = {"4.4 and 4.5": ("decay_", "decay_peak_"), "4.6 and 4.7": ("rope_",), "App. I": ("planes_",)}


def fresh(ds: xr.Dataset) -> list[str]:
    """Sources that are fresh toys, small logits first."""
    return [str(x) for x in ds["source"].values if str(x).startswith("fresh")] if "source" in ds else []


def learnt(ds: xr.Dataset) -> xr.Dataset:
    """Without what was measured on trained toys that failed at their task; their losses stay."""
    if "loss" not in ds:
        return ds
    of_toys = [name for name in ds if name != "loss" and {"case", "source", "seed"} <= set(ds[name].dims)]
    return ds.assign({name: ds[name].where(~(ds["loss"] > LEARNT)) for name in of_toys})


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


def even_beyond(ds: xr.Dataset) -> np.ndarray:
    """(T - 1) / (t + T) by layer t: the share beyond the first token if all weights are equal and not normalized."""
    return np.array([even_shares(ds.sizes["key"], t)[:-1].sum() for t in range(top_of(ds["gone"]) + 1)])


def plane_rates(ds: xr.Dataset) -> tuple[xr.DataArray, xr.DataArray]:
    """Least and largest f(x) / x^2 of the drawn directions, [turned, seed]; noise changes neither."""
    lost = variable(ds, "planes_lost").isel(noise=0).transpose("turned", "seed", "distance")
    both = np.array([[turned_rates(draw) for draw in kind] for kind in lost.values])
    low, high = (lost.isel(distance=0).copy(data=both[..., n]) for n in range(2))
    return low, high


def top_of(outside: xr.DataArray) -> int:
    """Index of the last layer that a source has."""
    known = np.isfinite(outside.transpose(..., "layer").values).any(tuple(range(outside.ndim - 1)))
    return int(np.flatnonzero(known)[-1])


def counted(ds: xr.Dataset, theorem: str) -> tuple[int, int]:
    """(beyond, compared)."""
    if theorem in CASES:
        ds = (
            ds.sel(case=[case for case in ds["case"].values.tolist() if case.startswith(CASES[theorem])])
            if "case" in ds
            else ds
        )
    names = [name for name in VARIABLES.get(theorem, ("",)) if f"{name}violations" in ds]
    return sum(int(ds[f"{name}violations"].sum()) for name in names), sum(
        int(ds[f"{name}checked"].sum()) for name in names
    )


def tables(ds: xr.Dataset) -> list[Table]:
    """All numbers, medians over seeds with their range; of trained toys, those that learnt their task."""
    ds = learnt(ds)
    counts = {theorem: counted(ds, theorem) for theorem in (*CASES, *VARIABLES)}
    rows = [[theorem, f"{compared:,}", f"{beyond:,}"] for theorem, (beyond, compared) in counts.items() if compared]
    found = [Table("Bounds with the measured eps and B", ("theorem", "compared", "beyond"), rows)]
    if "outside" in ds:
        found += [_limit_table(ds), *_prefix_tables(ds)]
    if "loss" in ds:
        losses = [(labels, loss) for labels, loss in places(ds["loss"], "case", "source") if np.isfinite(loss).any()]
        rows = [[*labels, range_told(x), f"{int((x <= LEARNT).sum())} of {x.size}"] for labels, x in losses]
        columns = ("case", "source", "median (range)", f"learnt, {LEARNT:.2f} or less")
        found.append(Table("Trained toys: loss, nats; those that did not learn are left out", columns, rows))
    if "decay_curve" in ds:
        found.append(_peak_table(ds, "decay_curve", "decay", "scale", decay_stars(ds), ds["decay_paths"].values))
    if "rope_curve" in ds:
        found.append(_peak_table(ds, "rope_curve", "theta", "noise", rope_stars(ds), ds["rope_paths"].values))
    if "planes_lost" in ds:
        low, high = plane_rates(ds)
        rows = [
            [kind, range_told(low.sel(turned=kind)), range_told(high.sel(turned=kind))] for kind in low["turned"].values
        ]
        columns = ("directions", "least f(x) / x^2", "largest")
        found.append(Table("Several planes: what logits lose, nats per squared token", columns, rows))
    return [*found, *([_other_table(ds)] if "gone" in ds and fresh(ds) else [])]


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
    for (case, source), here in places(ds.sel(source=fresh(ds)), "case", "source"):
        kind, _, size = case.partition(" ")
        if kind == "window":
            measured = range_told([rates(one) for one in here["outside"].values])
            windows.append([size, str(crossing(ds, int(size))), source, measured])
        if kind == "prefix":
            top = here.isel(layer=top_of(here["outside"]))
            shares = top["last"].sel(key=range(int(size))).median("seed").values
            told = ", ".join(number(x, ".3f") for x in shares)
            prefixes.append([size, source, told, range_told(top["share"].values), range_told(here["eps"].values)])
    columns = ("w", "ceil((N-1)/(w-1))", "source", "rate per layer")
    found = [Table("Windows: the last query's mass beyond the first token", columns, windows)]
    columns = ("K", "source", "shares of the prefix at the top", "least of any query", "eps, its bound")
    return [table for table in (*found, Table("Prefixes", columns, prefixes)) if table.rows]


def _peak_table(ds: xr.Dataset, name: str, dim: str, noise: str, stars: np.ndarray, paths: np.ndarray) -> Table:
    rows, label = [], "logits" if noise == "scale" else "inputs' noise"
    for n, ((value,), here) in enumerate(places(peaks(ds, name), dim)):
        title = f"{dim} {value:.3g}"
        rows.append([title, "theorem's curve", *map(str, stars[n])])
        if not np.array_equal(stars[n], paths[n]):
            rows.append([title, "products of decays", *map(str, paths[n])])
        for (size,), measured in places(here, noise):
            by_layer = [range_told(x, "g") for _, x in places(measured, "peak_layer")]
            rows.append([title, f"measured, {label} {size:g}", *by_layer])
    layers = [f"t = {int(t)}" for t in ds["peak_layer"].values]
    return Table(f"Distance of the largest share, tokens: {name.split('_')[0]}", ("", "", *layers), rows)


def _other_table(ds: xr.Dataset) -> Table:
    top = top_of(ds["gone"])
    layers = sorted({top // 6, top // 3, top // 2, top})
    rows = []
    for labels, here in places(ds[["beyond", "gone"]].sel(source=fresh(ds)), "attention", "source"):
        cells = []
        for layer in layers:
            beyond, gone = (here[name].isel(layer=layer).values for name in ("beyond", "gone"))
            cells.append(range_told(beyond) + (f"; nothing in {np.median(gone):.0%}" if gone.any() else ""))
        rows.append([*labels, *cells])
    even = even_beyond(ds)
    rows.append(["equal weights, as they are", "theory", *(number(even[layer], ".3g") for layer in layers)])
    columns = ("attention", "source", *(f"{layer + 1} layers" for layer in layers))
    return Table("Attention other than softmax: share of the last query's row beyond the first token", columns, rows)
