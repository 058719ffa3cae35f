"""What rollouts of toys' patterns say: rates and peaks, theorems 4.1 to 4.7 of [Wu], and what goes beyond them.

The toys, and how they are measured, are those of `walks`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from probes.charts import BLUE, CYCLE, DASHED, DOTTED, ORANGE, Panel, Series, curves, depth_color, panels
from probes.claims.claim import Claim
from probes.claims.ledger import Source
from probes.claims.rules import QUARTER, Told, above, between
from probes.measure import Headline
from probes.theory.rollout import decay_peak, rope_peak, turned_rates

from . import reading as read
from .walks import QUICK as QUICK
from .walks import ROUNDING, SUMMED, TURNING, directions, path_peaks
from .walks import Settings as Settings
from .walks import measure as measure

# -- headlines

BELOW, FLOOR = 0.5, 1e-9  # masses between which a rate is fitted: after the start, before rounding
CONVERGED = 0.05  # mass that is left when "all" has gone
FALLEN = 0.9  # what is left at most, after the first crossing of the text, of a mass that is falling
STEADY = 1.5  # factor within which the rates of two halves of a course are one: exponential
INSIDE = 0.5  # of the text, up to which peaks are compared: beyond, the beginning of the text gathers mass of its own
EXACT = 1  # token that a peak may be off: two distances are equally good where x* is a whole number


def fresh(ds: xr.Dataset, *kinds: str) -> xr.Dataset:
    """Fresh toys, small logits first, the only ones there are today; of cases that begin so, if given."""
    for dim, starts in {"source": ("fresh",), "case": kinds}.items():
        if starts:
            ds = ds.sel({dim: [name for name in ds[dim].values.tolist() if name.startswith(tuple(starts))]})
            read.need(ds.sizes[dim])
    return ds


def rates(outside: np.ndarray, *, part: slice = slice(None)) -> float:
    """Exponential rate per layer of a mass [layer], by least squares of its logarithm; NaN for fewer than three layers.

    `part` of the layers whose mass is between `FLOOR` and `BELOW`.
    """
    layers = np.flatnonzero((outside < BELOW) & (outside > FLOOR))[part]
    if len(layers) < 3:
        return math.nan
    return float(-np.polyfit(layers, np.log(outside[layers]), 1)[0])


def halves(outside: np.ndarray) -> float:
    """The first half's rate over the second's."""
    half = int(((outside < BELOW) & (outside > FLOOR)).sum()) // 2
    return rates(outside, part=slice(half)) / rates(outside, part=slice(half, None))


def by_course(function: Callable[[np.ndarray], float], masses: xr.DataArray) -> xr.DataArray:
    """A number of every course over layers."""
    return xr.apply_ufunc(function, masses, input_core_dims=[["layer"]], vectorize=True)


def crossing(ds: xr.Dataset, window: int) -> int:
    """ceil((N-1) / (w-1)): blocks that it takes to come from the last position to the first."""
    return -(-(read.setting(ds, "length") - 1) // (window - 1))


def top(masses: xr.DataArray) -> xr.DataArray:
    """At the last layer."""
    return masses.isel(layer=-1, drop=True)


def decay_stars(ds: xr.Dataset) -> xr.DataArray:
    """floor(t / (e^m - 1)) [decay, peak_layer]; a whole x* is given with rounding's help."""
    return _by_layer(ds, "decay", lambda t, m: math.floor(decay_peak(t, m) + ROUNDING))


def rope_stars(ds: xr.Dataset) -> xr.DataArray:
    """Peaks of the theorem's curve [theta, peak_layer]."""
    return _by_layer(ds, "theta", lambda t, theta: rope_peak(t, TURNING / 2, theta, ds.sizes["distance"]))


def rope_paths(ds: xr.Dataset) -> xr.DataArray:
    """Peaks of the products of the decays themselves, not of the lemma's square [theta, peak_layer]."""
    lost = {theta: TURNING * (1 - np.cos(np.arange(ds.sizes["distance"]) * theta)) for theta in ds["theta"].values}
    every = {theta: path_peaks(of, ds.sizes["peak_layer"]) for theta, of in lost.items()}
    return _by_layer(ds, "theta", lambda t, theta: every[theta][t])


def _by_layer(ds: xr.Dataset, dim: str, peak: Callable[[int, float], float]) -> xr.DataArray:
    layers = range(ds.sizes["peak_layer"])
    values = [[peak(t, value) for t in layers] for value in ds[dim].values.tolist()]
    return xr.DataArray(values, {name: ds[name].values for name in (dim, "peak_layer")}, (dim, "peak_layer"))


def peaks(ds: xr.Dataset, name: str) -> xr.DataArray:
    """Distance at which measured curves are largest."""
    return ds[f"{name}_curve"].argmax("distance")


def least_rates(ds: xr.Dataset) -> xr.DataArray:
    """The least f(x) / x^2 of the drawn directions [turned, seed]: rollouts' bounds fall with distance if it is positive."""
    coords = {dim: ds[dim].values.tolist() for dim in ("turned", "seed")}
    drawn = [[directions(kind, ds.sizes["distance"], n)[2] for n in coords["seed"]] for kind in coords["turned"]]
    return xr.DataArray([[turned_rates(lost)[0] for lost in of] for of in drawn], coords, ("turned", "seed"))


def few_layers(of: xr.DataArray) -> xr.DataArray:
    """At a few layers."""
    last = int(of["layer"][-1])
    return of.sel(layer=sorted({last // 6, last // 3, last // 2, last}))


HEADLINES = (
    Headline("eps", lambda ds: fresh(ds)["eps"]),
    Headline("mass beyond the first token (prefix) at the top", lambda ds: top(fresh(ds)["outside"])),
    Headline("rate per layer", lambda ds: by_course(rates, fresh(ds)["outside"])),
    Headline("least share of the first tokens", lambda ds: top(fresh(ds)["share"])),
    Headline("peak under decay", lambda ds: peaks(ds, "decay"), form="g"),
    Headline("the theorem's peak", decay_stars, form="g"),
    Headline("peak with RoPE", lambda ds: peaks(ds, "rope"), form="g"),
    Headline("peak of the theorem's curve", rope_stars, form="g"),
    Headline("that of products", rope_paths, form="g"),
    Headline("several planes: least f(x) / x^2, nats", least_rates),
    Headline("other attention: share beyond the first token", lambda ds: few_layers(fresh(ds)["beyond"])),
    Headline("sequences of which nothing arrives", lambda ds: few_layers(fresh(ds)["gone"]), form=".0%"),
)


# -- statements

theorem, further = Source("[Wu]", "wu-thm", kind="theorem"), Source("[Wu]", "wu")
NO_NUMBER = (
    "no number of any toy is beyond its bound, with the eps (least entry) and B (deviation of logits) measured in "
    "that toy"
)
HALF = "within the first half of the text"


def claims(ds: xr.Dataset) -> list[Claim]:
    """Theorems 4.1 to 4.7, their bounds on all toys and their statements on fresh ones, and what goes beyond."""
    return [*read.judge(theorem, ds), *read.judge(further, ds)]


def bounded(ds: xr.Dataset, of: Sequence[str], cases: Sequence[str]) -> Told:
    """No number beyond its bound, of these variables under these masks and encodings."""
    ds = fresh(ds, *cases)
    beyond, compared = (int(sum(ds[f"{name}{what}"].sum() for name in of)) for what in ("violations", "checked"))
    read.need(compared)
    return f"{beyond:,} of {compared:,} numbers beyond", beyond == 0


# By theorem: variables, by the beginnings of their names; cases, by theirs (4.1 is about any causal mask); the statement.
BOUNDS: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "4.1": (
        ("",),
        ("causal", "decay", "rope"),
        "Under a causal mask the rollout's mass at token j and beyond is bounded: P(z_i >= j) <= (1 - j eps)^(t+1).",
    ),
    "4.2": (
        ("",),
        ("window",),
        "Under a window of w tokens the rollout's mass at token j and beyond is bounded: "
        "P(z_i >= j) <= (1 - j eps^m)^floor((t+1)/m), m = ceil((N-1)/(w-1)).",
    ),
    "4.3": (
        ("",),
        ("prefix",),
        "With a prefix of K tokens the rollout's mass outside it obeys the bound of the causal mask, and every share "
        "inside it is at least eps.",
    ),
    "4.4 and 4.5": (
        ("decay_", "decay_peak_"),
        (),
        "Under a decay mask of rate m attention entries go like e^-(i-j)m and rollouts like "
        "C(t+i-j, i-j) e^-(i-j)m, within the theorems' constants.",
    ),
    "4.6 and 4.7": (
        ("rope_",),
        (),
        "Under RoPE attention entries go like e^-c(i-j)^2 theta^2 and rollouts like C(t+i-j, i-j) times it, "
        "within the theorems' constants.",
    ),
}
for _thm, (_names, _kinds, _claim) in BOUNDS.items():
    _given: Any = {"rule": NO_NUMBER, "of": _names, "cases": _kinds}
    theorem(f"{_thm.replace(' ', '-')}-bound", f"Thm {_thm}", _claim, **_given)(bounded)
_claim = (
    "RoPE in several planes has bounds as one plane has: with f(x) what a logit loses over the distance x and a and b the "
    "least and largest f(x) / x^2, rollouts lie between C(t+x, x) e^-b x^2 and C(t+x, x) e^-a x^2 / (t+1), within "
    "constants, for queries and keys of any directions."
)
_given = {"rule": NO_NUMBER, "kind": "theorem", "of": ("planes_",), "cases": ()}
further("app-i-planes-bound", "App. I", _claim, **_given)(bounded)


@theorem(
    "4.1-limit",
    "Thm 4.1",
    rule=f"in fresh toys of every logit size less than {CONVERGED:g} of the mass is beyond the first token at the top, and "
    f"the rates of both halves of its course over layers agree within a factor of {STEADY:g}, {read.OVER_RUNS}",
)
def _(ds: xr.Dataset) -> Told:
    """Under a causal mask all mass of the rollout goes to the first token, exponentially in depth."""
    masses = fresh(ds).sel(case="causal", drop=True)["outside"]
    ratio = by_course(halves, masses)
    read.need(top(masses).notnull().any())
    left = read.each(-top(masses), above, -CONVERGED)
    if not np.isfinite(ratio).all():
        return left[0], None
    return read.together({"minus the mass": left, "rates' ratio": read.each(ratio, between, 1 / STEADY, STEADY)})


def windows(ds: xr.Dataset) -> dict[int, xr.DataArray]:
    """Masses [source, seed, layer] of fresh toys, by window."""
    return {int(case.split()[1]): of for (case,), of in read.places(fresh(ds, "window")["outside"], "case")}


@theorem(
    "4.2-limit",
    "Thm 4.2",
    rule="under every window that the toys are deep enough for, the mass beyond the first token has fallen by a tenth or "
    f"more since the text was first crossed, {read.OVER_RUNS} of its logarithm",
)
def _(ds: xr.Dataset) -> Told:
    """Under a sliding window the limit is that of the causal mask: all mass of the rollout goes to the first token."""
    # What narrow windows leave after few layers says nothing about the limit: it has to be falling.
    deep = {w: of for w, of in windows(ds).items() if of.sizes["layer"] > 2 * crossing(ds, w)}
    falls = {w: xr.ufuncs.log(of.isel(layer=crossing(ds, w)) / top(of).clip(read.TINY)) for w, of in deep.items()}
    return read.together(
        {f"fall at w = {w}": read.each(of, above, -math.log(FALLEN), change=math.exp) for w, of in falls.items()}
    )


@theorem(
    "4.2-rate",
    "Thm 4.2",
    rule="the rate per layer of fresh toys is higher under every window that takes fewer steps, "
    f"{read.OVER_RUNS} of the difference",
)
def _(ds: xr.Dataset) -> Told:
    """Under a sliding window of w tokens the rollout's mass goes to the first token the more slowly, the more steps
    ceil((N-1)/(w-1)) it takes to cross the text.
    """
    by_width = {w: by_course(rates, of.isel(source=0, drop=True)) for w, of in windows(ds).items()}
    known = {w: of for w, of in by_width.items() if np.isfinite(of).all()}
    read.need(len(known) > 1)
    pairs = [(a, b) for a, b in pairwise(sorted(known)) if crossing(ds, a) != crossing(ds, b)]
    return read.together({f"{a} to {b} tokens": read.each(known[b] - known[a], above, 0) for a, b in pairs})


def kept(ds: xr.Dataset) -> xr.DataArray:
    """The least share of a prefix token at the top, times `STEADY`, over that of the middle layer."""
    share = fresh(ds, "prefix")["share"]
    return STEADY * top(share) / share.isel(layer=(share.sizes["layer"] - 1) // 2)


LEFT = Headline(
    "the mass outside the prefix at the top, of fresh toys,", lambda ds: top(fresh(ds, "prefix")["outside"])
)
KEPT = Headline(
    f"{STEADY:g} times the least share of a prefix token at the top over that of the middle layer", kept, ratio=True
)
SHARE = Headline(
    "the least share over eps", lambda ds: top(fresh(ds, "prefix")["share"]) / fresh(ds, "prefix")["eps"], ratio=True
)
_text = "With a prefix of K tokens all mass of the rollout goes to those K tokens."
read.state(theorem, "4.3-limit", _text, read.lies(LEFT, read.under(CONVERGED)), where="Thm 4.3")
_text = "With a prefix of K tokens each of them keeps a share of the rollout that does not vanish with depth."
read.state(theorem, "4.3-shares", _text, read.lies((KEPT, SHARE), read.over(1)), where="Thm 4.3")


def near_stars(ds: xr.Dataset) -> tuple[xr.DataArray, xr.DataArray]:
    """Peaks under decay at the least logits where peaks are compared [decay, seed, peak_layer], and the theorem's."""
    stars = decay_stars(ds)
    compared = stars < INSIDE * ds.sizes["distance"]
    return peaks(ds, "decay").isel(scale=0, drop=True).where(compared), stars


def off_stars(ds: xr.Dataset) -> xr.DataArray:
    """How far peaks are off x*, over what they may be off."""
    at, stars = near_stars(ds)
    return (at - stars) / np.maximum(EXACT, QUARTER * stars)


def turned(ds: xr.Dataset) -> tuple[xr.DataArray, xr.DataArray]:
    """Peaks under RoPE [theta, seed, peak_layer], large angles first, and whether they are where peaks are compared."""
    order = np.argsort(-ds["theta"].values)
    compared = rope_paths(ds).isel(theta=order) < INSIDE * ds.sizes["distance"]
    return peaks(ds, "rope").isel(noise=0, drop=True).isel(theta=order), compared


def farther(ds: xr.Dataset, along: str) -> xr.DataArray:
    """How much farther peaks under RoPE are than those of the layer below, or of the next larger angle."""
    at, compared = turned(ds)
    if along == "peak_layer":
        return at.diff(along).where(compared)
    # Before two layers have been walked the peak is at the query itself, whatever the angle.
    both = compared & compared.shift(theta=1, fill_value=False)
    return at.diff(along).where(both).isel(peak_layer=slice(1, None))


NO_NEARER = read.Bound("is not below 0", between, (0.0, math.inf))
OFF = Headline(f"a peak's distance from x*, {HALF}, over {EXACT} token or a quarter of x*,", off_stars)
MOVES = (
    Headline(f"a peak's move, {HALF}, from a depth to the next", lambda ds: near_stars(ds)[0].diff("peak_layer")),
    Headline("its move from an m to the next smaller", lambda ds: -near_stars(ds)[0].diff("decay")),
)
LAYERS = Headline(f"a peak's move, {HALF}, from a layer to the next", partial(farther, along="peak_layer"))
ANGLES = Headline(f"a peak's move, {HALF}, from an angle to the next smaller", partial(farther, along="theta"))
_text = "Under a decay mask of rate m the rollout is largest at the distance x* = t / (e^m - 1), t being the depth."
_by = f"{read.OVER_RUNS}, at the least logits"
read.state(theorem, "4.5-peak", _text, read.lies(OFF, read.within(1.0), by=_by), where="Thm 4.5")
_text = "Under a decay mask of rate m the rollout's peak moves away from the query with depth t, and comes nearer as m"
_text = f"{_text} grows."
read.state(theorem, "4.5-peak-moves", _text, read.lies(MOVES, NO_NEARER, by=_by), where="Thm 4.5")
_text = "Under RoPE the rollout's peak x* moves away from the query with depth t."
read.state(theorem, "4.7-peak-with-depth", _text, read.lies(LAYERS, read.over(0)), where="Thm 4.7")
_text = "Under RoPE the rollout's peak x* comes nearer to the query as the angle theta_1 grows."
read.state(theorem, "4.7-peak-with-angle", _text, read.lies(ANGLES, read.over(0)), where="Thm 4.7")


def away(ds: xr.Dataset, *attention: str) -> xr.DataArray:
    """The share beyond the first token at the top, of fresh toys; a sequence counts whole if nothing arrives."""
    of = fresh(ds[["beyond", "gone"]]).sel(attention=list(attention))
    gone = top(of["gone"])
    return gone + (1 - gone) * top(of["beyond"].fillna(0))


ROW = "of the last query's row of the product, divided by its sum, what is beyond the first token at the top"
OTHER = Headline(f"{ROW}, where nothing arrives all,", lambda ds: away(ds, "sigmoid", "relu"))
_text = "With attention other than softmax, sigmoid or ReLU, the rollout need not converge to the first token."
read.state(further, "other-attention", _text, read.lies(OTHER, read.over(CONVERGED)))
ROWS = Headline(ROW, lambda ds: away(ds, f"sigmoid{SUMMED}"))
_text = (
    "It is rows that sum to 1 that take the mass to the first token, not the exponential: sigmoid attention with its rows "
    "divided by their sums converges as softmax does."
)
read.state(further, "other-attention-summed", _text, read.lies(ROWS, read.under(CONVERGED)), kind="ours")


# -- charts

LEAST = 1e-6  # of the axes of masses: what is left below says the same
TITLE = "Rollouts of attention against the theorems' bounds and peaks"
CAPTION = (
    "Medians over seeds and ranges. Masses: dashed lines are bounds. Peaks: lines are products of the decays alone (under "
    "decay the theorem's x*), dotted lines the theorem's curve."
)


def charts(ds: xr.Dataset) -> dict[str, Figure]:
    """Theorems 4.1, 4.2, 4.5 and 4.7 on toys with the smallest logits or noise."""
    decay, rope = peaks(ds, "decay").isel(scale=0), peaks(ds, "rope").isel(noise=0)
    products = {"-": rope_paths(ds), DOTTED: rope_stars(ds)}
    drawn = {
        "mass beyond the first token, causal mask": _masses,
        "mass beyond the first token, windows": _windows,
        "distance of the peak under decay": lambda cell, ds: _peaks(
            cell, decay, {"-": decay_stars(ds)}, "nats per token"
        ),
        "distance of the peak with RoPE": lambda cell, ds: _peaks(cell, rope, products, "rad per token"),
    }
    rows = [Panel(name, draw, height=2.7) for name, draw in drawn.items()]
    return {"": panels({TITLE: fresh(ds)}, rows, CAPTION)}


def _line(cell: Axes, values: xr.DataArray, name: str, color: str, **look: Any) -> None:
    """The median over seeds, by the number of layers."""
    values = values.median("seed") if "seed" in values.dims else values
    curves(cell, [Series(name, values, color, x=values["layer"] + 1, **look)], log=True, decades=None)
    cell.set(ylim=(LEAST, 2), xlabel="layers", xlim=(0, None))


def _masses(cell: Axes, ds: xr.Dataset) -> None:
    """Causal toys by the size of their logits, and attention whose rows do not sum to 1."""
    causal, beyond = ds.sel(case=ds["case"].values[0]), ds["beyond"].isel(source=0)
    _line(cell, causal["outside_bound"].isel(source=0), "bound", BLUE, line=DASHED, width=1.0)
    for source, color in zip(ds["source"].values, CYCLE, strict=False):
        _line(cell, causal["outside"].sel(source=source), str(source), color)
    _line(cell, beyond.sel(attention="sigmoid"), "sigmoid", ORANGE, width=3.0, alpha=0.6)
    _line(cell, beyond.sel(attention=f"sigmoid{SUMMED}"), f"sigmoid{SUMMED}", ORANGE, line=DASHED)


def _windows(cell: Axes, ds: xr.Dataset) -> None:
    """The same by window, for the smallest logits."""
    of = ds.isel(source=0)
    widths = sorted(int(case.split()[1]) for case in of["case"].values.tolist() if case.startswith("window"))
    cases = {f"window {w}": f"window of {w}: {crossing(ds, w)} layers cross the text" for w in widths}
    for n, (case, name) in enumerate(cases.items()):
        color = to_hex(depth_color(n, len(cases)))
        _line(cell, of["outside"].sel(case=case), name, color)
        _line(cell, of["outside_bound"].sel(case=case), "", color, line=DASHED, width=0.8)


def _peaks(cell: Axes, at: xr.DataArray, lines: Mapping[Any, xr.DataArray], unit: str) -> None:
    """Measured peaks [value, seed, peak_layer] by layer, with lines [value, peak_layer]."""
    dim = str(at.dims[0])
    for line, of in lines.items():
        for value, color in zip(at[dim].values, CYCLE, strict=False):
            name = f"{value:.2g} {unit}" if line == "-" else ""
            curves(cell, [Series(name, of.sel({dim: value}), color, x=of["peak_layer"], line=line, width=1.0)])
    read.courses(cell, at, "peak_layer", dim, dict.fromkeys(at[dim].values.tolist(), ""), line="")
    cell.set_xlabel("index t of the top layer")
