"""What a result of rollout says: rates and peaks, tables, theorems 4.1 to 4.7 of [Wu], and what goes beyond them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
import xarray as xr

from probes.claims.claim import Claim
from probes.claims.ledger import Source
from probes.claims.rules import QUARTER, Told, above, between
from probes.measure import Headline
from probes.results.tables import Table
from probes.theory.rollout import decay_peak, rope_peak, turned_rates
from probes.theory.unnormalized import even_shares

from ..reading import (
    OVER_RUNS,
    TINY,
    Bound,
    each,
    judge,
    need,
    over,
    places,
    setting,
    state,
    tables_of,
    together,
    under,
    within,
)
from .bounds import ROUNDING, SUMMED

BELOW, FLOOR = 0.5, 1e-9  # masses between which a rate is fitted: after the start, before rounding
LEARNT = -math.log(0.75)  # nats: a trained toy above it has not learnt its task, and is left out
CONVERGED = 0.05  # mass that is left when "all" has gone
FALLEN = 0.9  # what is left at most, after the first crossing of the text, of a mass that is falling
STEADY = 1.5  # factor within which the rates of two halves of a course are one: exponential
INSIDE = 0.5  # of the text, up to which peaks are compared: beyond, the beginning of the text gathers mass of its own
EXACT = 1  # token that a peak may be off: two distances are equally good where x* is a whole number
# What theorems are about: cases, by the beginnings of their names, or variables by theirs. 4.1's argument is about any
# causal mask.
CASES = {"4.1": ("causal", "decay", "rope"), "4.2": ("window",), "4.3": ("prefix",)}
VARIABLES = {"4.4 and 4.5": ("decay_", "decay_peak_"), "4.6 and 4.7": ("rope_",), "App. I": ("planes_",)}


def learnt(ds: xr.Dataset) -> xr.Dataset:
    """Without what was measured on trained toys that failed at their task; their losses stay."""
    of_toys = [name for name in ds if name != "loss" and {"case", "source", "seed"} <= set(ds[name].dims)]
    return ds.assign({name: ds[name].where(~(ds["loss"] > LEARNT)) for name in of_toys})


def fresh(ds: xr.Dataset, *kinds: str) -> xr.Dataset:
    """Fresh toys, small logits first; of cases that begin so, if given."""
    ds = ds.sel(source=[str(source) for source in ds["source"].values if str(source).startswith("fresh")])
    need(ds.sizes["source"])
    if not kinds:
        return ds
    cases = [str(case) for case in ds["case"].values if str(case).startswith(kinds)]
    need(cases)
    return ds.sel(case=cases)


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


def promised(bound: np.ndarray) -> float:
    """Rate per layer that a bound [layer] promises."""
    known = bound[np.isfinite(bound)]
    return max(0.0, float(-np.log(max(known[-1], TINY)) / len(known))) if len(known) else math.nan


def top(masses: xr.DataArray) -> xr.DataArray:
    """At the last layer that a toy has."""
    return by_course(lambda mass: mass[np.isfinite(mass)][-1] if np.isfinite(mass).any() else np.nan, masses)


def crossing(ds: xr.Dataset, window: int) -> int:
    """ceil((N-1) / (w-1)): blocks that it takes to come from the last position to the first."""
    return -(-(ds.sizes["key"] - 1) // (window - 1))


def decay_stars(ds: xr.Dataset) -> xr.DataArray:
    """floor(t / (e^m - 1)) [decay, peak_layer]; a whole x* is given with rounding's help."""
    layers, decays = range(ds.sizes["peak_layer"]), ds["decay"].values
    stars = [[math.floor(decay_peak(t, float(m)) + ROUNDING) for t in layers] for m in decays]
    return xr.DataArray(stars, {"decay": decays, "peak_layer": ds["peak_layer"].values}, ("decay", "peak_layer"))


def rope_stars(ds: xr.Dataset) -> xr.DataArray:
    """Peaks of the theorem's curve [theta, peak_layer]."""
    c, layers = float(setting(ds, "turning")) / 2, range(ds.sizes["peak_layer"])
    stars = [[rope_peak(t, c, float(angle), ds.sizes["distance"]) for t in layers] for angle in ds["theta"].values]
    coords = {"theta": ds["theta"].values, "peak_layer": ds["peak_layer"].values}
    return xr.DataArray(stars, coords, ("theta", "peak_layer"))


def peaks(ds: xr.Dataset, name: str) -> xr.DataArray:
    """Distance at which measured curves are largest."""
    return ds[f"{name}_curve"].argmax("distance")


def even_beyond(ds: xr.Dataset) -> xr.DataArray:
    """(T - 1) / (t + T) by layer t: the share beyond the first token if all weights are equal and not normalized."""
    shares = [even_shares(ds.sizes["key"], t)[:-1].sum() for t in ds["layer"].values.tolist()]
    return xr.DataArray(shares, {"layer": ds["layer"].values}, ("layer",))


def lost_by_planes(ds: xr.Dataset, which: int) -> xr.DataArray:
    """The least (0) or largest (1) f(x) / x^2 of the drawn directions, which noise does not change."""
    of = ds["planes_lost"].isel(noise=0, drop=True)
    return by_course(lambda lost: turned_rates(lost)[which], of.rename(distance="layer"))


def counted(ds: xr.Dataset, theorem: str, what: str) -> xr.DataArray:
    """How many numbers are "violations" of a theorem's bounds, or were "checked"."""
    if theorem in CASES:
        total = (
            ds[what].sel(case=[str(case) for case in ds["case"].values if str(case).startswith(CASES[theorem])]).sum()
        )
    else:
        total = sum(ds[f"{name}{what}"].sum() for name in VARIABLES[theorem])
    return xr.DataArray(float(total))


def some_layers(of: xr.DataArray) -> xr.DataArray:
    """At a few layers."""
    last = int(of["layer"][-1])
    return of.sel(layer=sorted({last // 6, last // 3, last // 2, last}))


THEOREMS = (*CASES, *VARIABLES)
TOP = Headline("mass beyond the first token (prefix) at the top", lambda ds: top(ds["outside"]))
RATE = Headline("rate per layer", lambda ds: by_course(rates, ds["outside"]))
HEADLINES = (
    *(Headline(f"{of}: compared", partial(counted, theorem=of, what="checked"), form=",.0f") for of in THEOREMS),
    *(Headline(f"{of}: beyond", partial(counted, theorem=of, what="violations"), form=",.0f") for of in THEOREMS),
    *(Headline("eps", lambda ds: ds["eps"]), TOP, RATE),
    Headline("the bound's rate", lambda ds: by_course(promised, ds["outside_bound"])),
    Headline("least share of the first tokens", lambda ds: top(ds["share"])),
    Headline(f"loss, nats (learnt: {LEARNT:.2f} or less)", lambda ds: ds["loss"]),
    Headline("peak under decay", lambda ds: peaks(ds, "decay"), form="g"),
    Headline("the theorem's peak", decay_stars, form="g"),
    Headline("that of products of decays", lambda ds: ds["decay_paths"], form="g"),
    Headline("peak with RoPE", lambda ds: peaks(ds, "rope"), form="g"),
    Headline("peak of the theorem's curve", rope_stars, form="g"),
    Headline("that of products", lambda ds: ds["rope_paths"], form="g"),
    Headline("several planes: least f(x) / x^2, nats", partial(lost_by_planes, which=0)),
    Headline("largest", partial(lost_by_planes, which=1)),
    Headline("other attention: share beyond the first token", lambda ds: some_layers(fresh(ds)["beyond"])),
    Headline("sequences of which nothing arrives", lambda ds: some_layers(fresh(ds)["gone"]), form=".0%"),
    Headline("equal weights, as they are, in theory", lambda ds: some_layers(even_beyond(ds))),
)


def tables(ds: xr.Dataset) -> list[Table]:
    """All numbers; of trained toys, those that learnt their task."""
    return tables_of(HEADLINES, learnt(ds))


# -- statements

theorem, further = Source("[Wu]", "wu-thm"), Source("[Wu]", "wu")
NO_NUMBER = (
    "no number of any toy is beyond its bound, with the eps (least entry) and B (deviation of logits) measured in "
    "that toy"
)
HALF = "within the first half of the text"


def claims(ds: xr.Dataset) -> list[Claim]:
    """Theorems 4.1 to 4.7, their bounds on all toys and their statements on fresh ones, and what goes beyond."""
    ds = learnt(ds)
    return [*judge(theorem, ds), *judge(further, ds)]


def bounded(ds: xr.Dataset, of: str) -> Told:
    """No number beyond its bound."""
    beyond, compared = (int(counted(ds, of, what)) for what in ("violations", "checked"))
    need(compared)
    return f"{beyond:,} of {compared:,} numbers beyond", beyond == 0


BOUNDS = {
    "4.1": "Under a causal mask the rollout's mass at token j and beyond is bounded: P(z_i >= j) <= (1 - j eps)^(t+1).",
    "4.2": "Under a window of w tokens the rollout's mass at token j and beyond is bounded: "
    "P(z_i >= j) <= (1 - j eps^m)^floor((t+1)/m), m = ceil((N-1)/(w-1)).",
    "4.3": "With a prefix of K tokens the rollout's mass outside it obeys the bound of the causal mask, and every share "
    "inside it is at least eps.",
    "4.4 and 4.5": "Under a decay mask of rate m attention entries go like e^-(i-j)m and rollouts like "
    "C(t+i-j, i-j) e^-(i-j)m, within the theorems' constants.",
    "4.6 and 4.7": "Under RoPE attention entries go like e^-c(i-j)^2 theta^2 and rollouts like C(t+i-j, i-j) times it, "
    "within the theorems' constants.",
}
for _of, _text in BOUNDS.items():
    _id = f"{_of.replace(' ', '-')}-bound"
    theorem(_id, f"Thm {_of}", _text, rule=NO_NUMBER, kind="theorem", of=_of)(bounded)
_text = (
    "RoPE in several planes has bounds as one plane has: with f(x) what a logit loses over the distance x and a and b the "
    "least and largest f(x) / x^2, rollouts lie between C(t+x, x) e^-b x^2 and C(t+x, x) e^-a x^2 / (t+1), within "
    "constants, for queries and keys of any directions."
)
further("app-i-planes-bound", "App. I", _text, rule=NO_NUMBER, kind="theorem", of="App. I")(bounded)


@theorem(
    "4.1-limit",
    "Thm 4.1",
    rule=f"in fresh toys of every logit size less than {CONVERGED:g} of the mass is beyond the first token at the top, and "
    f"the rates of both halves of its course over layers agree within a factor of {STEADY:g}, {OVER_RUNS}",
)
def _(ds: xr.Dataset) -> Told:
    """Under a causal mask all mass of the rollout goes to the first token, exponentially in depth."""
    masses = fresh(ds).sel(case="causal", drop=True)["outside"]
    ratio = by_course(halves, masses)
    need(top(masses).notnull().any())
    left = each(-top(masses), above, -CONVERGED)
    if not np.isfinite(ratio).all():
        return left[0], None
    return together({"minus the mass": left, "rates' ratio": each(ratio, between, 1 / STEADY, STEADY)})


def windows(ds: xr.Dataset) -> dict[int, xr.DataArray]:
    """Masses [source, seed, layer] of fresh toys, by window."""
    return {int(case.split()[1]): of for (case,), of in places(fresh(ds, "window")["outside"], "case")}


@theorem(
    "4.2-limit",
    "Thm 4.2",
    rule="under every window that the toys are deep enough for, the mass beyond the first token has fallen by a tenth or "
    f"more since the text was first crossed, {OVER_RUNS} of its logarithm",
)
def _(ds: xr.Dataset) -> Told:
    """Under a sliding window the limit is that of the causal mask: all mass of the rollout goes to the first token."""
    # What narrow windows leave after few layers says nothing about the limit: it has to be falling.
    deep = {w: of for w, of in windows(ds).items() if of.sizes["layer"] > 2 * crossing(ds, w)}
    falls = {w: xr.ufuncs.log(of.isel(layer=crossing(ds, w)) / top(of).clip(TINY)) for w, of in deep.items()}
    return together(
        {f"fall at w = {w}": each(of, above, -math.log(FALLEN), change=math.exp) for w, of in falls.items()}
    )


@theorem(
    "4.2-rate",
    "Thm 4.2",
    rule="the rate per layer of fresh toys is higher under every window that takes fewer steps, "
    f"{OVER_RUNS} of the difference",
)
def _(ds: xr.Dataset) -> Told:
    """Under a sliding window of w tokens the rollout's mass goes to the first token the more slowly, the more steps
    ceil((N-1)/(w-1)) it takes to cross the text.
    """
    by_width = {w: by_course(rates, of.isel(source=0, drop=True)) for w, of in windows(ds).items()}
    known = {w: of for w, of in by_width.items() if np.isfinite(of).all()}
    need(len(known) > 1)
    pairs = [(a, b) for a, b in pairwise(sorted(known)) if crossing(ds, a) != crossing(ds, b)]
    return together({f"{a} to {b} tokens": each(known[b] - known[a], above, 0) for a, b in pairs})


def kept(ds: xr.Dataset) -> xr.DataArray:
    """The least share of a prefix token at the top, times `STEADY`, over that of the middle layer."""
    share = fresh(ds, "prefix")["share"]
    return STEADY * top(share) / share.isel(layer=(int(share.notnull().any(("case", "source", "seed")).sum()) - 1) // 2)


LEFT = Headline(
    "the mass outside the prefix at the top, of fresh toys,", lambda ds: top(fresh(ds, "prefix")["outside"])
)
KEPT = Headline(
    f"{STEADY:g} times the least share of a prefix token at the top over that of the middle layer", kept, ratio=True
)
SHARE = Headline(
    "the least share over eps",
    lambda ds: top(fresh(ds, "prefix")["share"]) / fresh(ds, "prefix")["eps"],
    ratio=True,
)
_text = "With a prefix of K tokens all mass of the rollout goes to those K tokens."
state(theorem, "4.3-limit", _text, LEFT, under(CONVERGED), where="Thm 4.3")
_text = "With a prefix of K tokens each of them keeps a share of the rollout that does not vanish with depth."
state(theorem, "4.3-shares", _text, (KEPT, SHARE), over(1), where="Thm 4.3")


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
    compared = ds["rope_paths"].isel(theta=order) < INSIDE * ds.sizes["distance"]
    return peaks(ds, "rope").isel(noise=0, drop=True).isel(theta=order), compared


def farther(ds: xr.Dataset, along: str) -> xr.DataArray:
    """How much farther peaks under RoPE are than those of the layer below, or of the next larger angle."""
    at, compared = turned(ds)
    if along == "peak_layer":
        return at.diff(along).where(compared)
    # Before two layers have been walked the peak is at the query itself, whatever the angle.
    both = compared & compared.shift(theta=1, fill_value=False)
    return at.diff(along).where(both).isel(peak_layer=slice(1, None))


NO_NEARER = Bound("is not below 0", between, (0.0, math.inf))
OFF = Headline(f"a peak's distance from x*, {HALF}, over {EXACT} token or a quarter of x*,", off_stars)
MOVES = (
    Headline(f"a peak's move, {HALF}, from a depth to the next", lambda ds: near_stars(ds)[0].diff("peak_layer")),
    Headline("its move from an m to the next smaller", lambda ds: -near_stars(ds)[0].diff("decay")),
)
LAYERS = Headline(f"a peak's move, {HALF}, from a layer to the next", partial(farther, along="peak_layer"))
ANGLES = Headline(f"a peak's move, {HALF}, from an angle to the next smaller", partial(farther, along="theta"))
_text = "Under a decay mask of rate m the rollout is largest at the distance x* = t / (e^m - 1), t being the depth."
state(theorem, "4.5-peak", _text, OFF, within(1.0), where="Thm 4.5", by=f"{OVER_RUNS}, at the least logits")
_text = "Under a decay mask of rate m the rollout's peak moves away from the query with depth t, and comes nearer as m"
_text = f"{_text} grows."
state(theorem, "4.5-peak-moves", _text, MOVES, NO_NEARER, where="Thm 4.5", by=f"{OVER_RUNS}, at the least logits")
_text = "Under RoPE the rollout's peak x* moves away from the query with depth t."
state(theorem, "4.7-peak-with-depth", _text, LAYERS, over(0), where="Thm 4.7")
_text = "Under RoPE the rollout's peak x* comes nearer to the query as the angle theta_1 grows."
state(theorem, "4.7-peak-with-angle", _text, ANGLES, over(0), where="Thm 4.7")


def away(ds: xr.Dataset, *attention: str) -> xr.DataArray:
    """The share beyond the first token at the top, of fresh toys; a sequence counts whole if nothing arrives."""
    of = fresh(ds[["beyond", "gone"]]).sel(attention=list(attention))
    gone = top(of["gone"])
    return gone + (1 - gone) * top(of["beyond"].fillna(0).where(of["gone"].notnull()))


ROW = "of the last query's row of the product, divided by its sum, what is beyond the first token at the top"
OTHER = Headline(f"{ROW}, where nothing arrives all,", lambda ds: away(ds, "sigmoid", "relu"))
_text = "With attention other than softmax, sigmoid or ReLU, the rollout need not converge to the first token."
state(further, "other-attention", _text, OTHER, over(CONVERGED))
ROWS = Headline(ROW, lambda ds: away(ds, f"sigmoid{SUMMED}"))
_text = (
    "It is rows that sum to 1 that take the mass to the first token, not the exponential: sigmoid attention with its rows "
    "divided by their sums converges as softmax does."
)
state(further, "other-attention-summed", _text, ROWS, under(CONVERGED), kind="ours")
