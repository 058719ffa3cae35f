"""Theorems 4.1 to 4.7 of [Wu] on a result of rollout, and what goes beyond them."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import xarray as xr

from probes.claims.claim import Claim
from probes.claims.ledger import Source
from probes.claims.rules import QUARTER, SURE, between, every, range_told

from ..rules import Judged, at, decided, each_above, judged, need, over_each, places, variable
from .bounds import SUMMED, TINY
from .tables import BELOW, FLOOR, counted, crossing, decay_stars, fresh, learnt, peaks, rates, top_of

CONVERGED = 0.05  # mass that is left when "all" has gone
FALLEN = 0.9  # what is left at most, after the first crossing of the text, of a mass that is falling
STEADY = 1.5  # factor within which the rates of two halves of a course are one: exponential
INSIDE = 0.5  # of the text, up to which peaks are compared: beyond, the beginning of the text gathers mass of its own
EXACT = 1  # token that a peak may be off: two distances are equally good where x* is a whole number
theorem, further = Source("[Wu]", "wu-thm"), Source("[Wu]", "wu")
NO_NUMBER = (
    "no number of any toy is beyond its bound, with the eps (least entry) and B (deviation of logits) measured in "
    "that toy"
)
INTERVALS = "by 95 % intervals over runs"
HALF = "within the first half of the text"


def claims(ds: xr.Dataset) -> list[Claim]:
    """Theorems 4.1 to 4.7, their bounds on all toys and their statements on fresh ones, and what goes beyond."""
    ds = learnt(ds)
    return [*judged(theorem, ds), *judged(further, ds)]


def bounded(ds: xr.Dataset, of: str) -> Judged:
    """No number beyond its bound."""
    beyond, compared = counted(ds, of)
    need(compared)
    return Judged(f"{beyond:,} of {compared:,} numbers beyond", beyond == 0)


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
for number_of, text in BOUNDS.items():
    identity = f"{number_of.replace(' ', '-')}-bound"
    theorem(identity, f"Thm {number_of}", text, rule=NO_NUMBER, kind="theorem", of=number_of)(bounded)
further(
    "app-i-planes-bound",
    "App. I",
    "RoPE in several planes has bounds as one plane has: with f(x) what a logit loses over the distance x and a and b the "
    "least and largest f(x) / x^2, rollouts lie between C(t+x, x) e^-b x^2 and C(t+x, x) e^-a x^2 / (t+1), within "
    "constants, for queries and keys of any directions.",
    rule=NO_NUMBER,
    kind="theorem",
    of="App. I",
)(bounded)


def of_fresh(ds: xr.Dataset, kind: str) -> xr.Dataset:
    """Fresh toys of the cases of a kind, as [case, source, seed, ...]."""
    cases = [str(case) for case in ds["case"].values if str(case).startswith(kind)] if fresh(ds) else []
    need(cases)
    return ds.sel(case=cases, source=fresh(ds)).transpose("case", "source", "seed", ...)


def told_by_case(values: xr.DataArray) -> str:
    """Medians and ranges, case by case."""
    return ", ".join(f"{case}: {range_told(one)}" for (case,), one in places(values, "case"))


@theorem(
    "4.1-limit",
    "Thm 4.1",
    rule=f"in fresh toys of every logit size less than {CONVERGED:g} of the mass is beyond the first token at the top, and "
    f"the rates of both halves of its course over layers agree within a factor of {STEADY:g}, {INTERVALS}",
)
def converges(ds: xr.Dataset) -> Judged:
    """Under a causal mask all mass of the rollout goes to the first token, exponentially in depth."""
    here = at(of_fresh(ds, "causal"), case="causal")["outside"]
    last = top_of(here)
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


@theorem(
    "4.2-limit",
    "Thm 4.2",
    rule="under every window that the toys are deep enough for, the mass beyond the first token has fallen by a tenth or "
    f"more since the text was first crossed, {INTERVALS} of its logarithm",
)
def same_limit(ds: xr.Dataset) -> Judged:
    """Under a sliding window the limit is that of the causal mask: all mass of the rollout goes to the first token."""
    here = of_fresh(ds, "window")["outside"]
    last = top_of(ds.sel(source=fresh(ds))["outside"])
    measured, tests = [], []
    for (case,), one in places(here, "case"):
        width, top = int(case.split()[1]), one.isel(layer=last)
        measured.append(f"w = {width}: {range_told(top)}")
        # What narrow windows leave after few layers says nothing about the limit: it has to be falling.
        if one.sizes["layer"] > 2 * (crossed := crossing(ds, width)):
            tests.append(each_above(xr.ufuncs.log(one.isel(layer=crossed) / top.clip(TINY)), -math.log(FALLEN)))
    return decided(f"mass beyond after {last + 1} layers {', '.join(measured)}", *tests)


@theorem(
    "4.2-rate",
    "Thm 4.2",
    rule="the rate per layer of fresh toys is higher under every window that takes fewer steps, "
    f"{INTERVALS} of the difference",
)
def slower(ds: xr.Dataset) -> Judged:
    """Under a sliding window of w tokens the rollout's mass goes to the first token the more slowly, the more steps
    ceil((N-1)/(w-1)) it takes to cross the text.
    """
    first = of_fresh(ds, "window")["outside"].isel(source=0)
    by_width = {int(case.split()[1]): [rates(run) for run in one.values] for (case,), one in places(first, "case")}
    known = {w: xr.DataArray(values, dims="seed") for w, values in by_width.items() if np.isfinite(values).all()}
    need(len(known) > 1)
    shown = ", ".join(f"{float(rate.mean()):.3f} at {crossing(ds, w)} (w = {w})" for w, rate in known.items())
    pairs = [(a, b) for a, b in pairwise(sorted(known)) if crossing(ds, a) != crossing(ds, b)]
    rising = every([each_above(known[b] - known[a]) for a, b in pairs])
    return Judged(f"rate per layer {shown}, {fresh(ds)[0]}", rising(SURE))


@theorem(
    "4.3-limit",
    "Thm 4.3",
    rule=f"in fresh toys of every logit size less than {CONVERGED:g} of the mass is outside the prefix at the top, "
    f"{INTERVALS}",
)
def to_prefix(ds: xr.Dataset) -> Judged:
    """With a prefix of K tokens all mass of the rollout goes to those K tokens."""
    here = of_fresh(ds, "prefix")["outside"]
    left = here.isel(layer=top_of(here))
    return decided(f"mass outside at the top {told_by_case(left)}", each_above(-left, -CONVERGED))


@theorem(
    "4.3-shares",
    "Thm 4.3",
    rule="the least share of a prefix token at the top is above that of the middle layer divided by "
    f"{STEADY:g}, and above eps, {INTERVALS} of the ratios' logarithms",
)
def shares(ds: xr.Dataset) -> Judged:
    """With a prefix of K tokens each of them keeps a share of the rollout that does not vanish with depth."""
    here = of_fresh(ds, "prefix")
    top = top_of(here["outside"])
    least, before = here["share"].isel(layer=top), here["share"].isel(layer=top // 2)
    kept = each_above(xr.ufuncs.log(least / before), -math.log(STEADY))
    measured = f"least share of any query at the top {told_by_case(least)}"
    return decided(measured, kept, each_above(xr.ufuncs.log(least / here["eps"])))


def _near_stars(ds: xr.Dataset) -> tuple[xr.DataArray, xr.DataArray]:
    """The theorem's peaks under decay, and whether they are within the part of the text where peaks are compared."""
    stars = variable(ds, "decay_paths").transpose("decay", "peak_layer").copy(data=decay_stars(ds))
    return stars, stars < INSIDE * ds.sizes["distance"]


@theorem(
    "4.5-peak",
    "Thm 4.5",
    rule=f"peaks {HALF} are within {EXACT} token or a quarter of x*, {INTERVALS}, at the least logits",
)
def at_star(ds: xr.Dataset) -> Judged:
    """Under a decay mask of rate m the rollout is largest at the distance x* = t / (e^m - 1), t being the depth."""
    stars, compared = _near_stars(ds)
    off = (peaks(ds, "decay_curve") - stars).where(compared)
    shown = "; ".join(
        f"logits {scale:g}: within {EXACT} token in {float((abs(one) <= EXACT).sum() / one.notnull().sum()):.0%}, "
        f"off by {float(abs(one).max()):g} at most"
        for (scale,), one in places(off, "scale")
    )
    least = off.isel(scale=0)
    exact = [between(one, -1, 1) for one in over_each(least / np.maximum(EXACT, QUARTER * stars))]
    return decided(f"{int(least.notnull().sum())} peaks of each; {shown}", *exact)


@theorem(
    "4.5-peak-moves",
    "Thm 4.5",
    rule=f"peaks {HALF} do not come nearer to the query from any depth to the next, nor move away from any m to the next, "
    f"{INTERVALS}, at the least logits",
)
def star_moves(ds: xr.Dataset) -> Judged:
    """Under a decay mask of rate m the rollout's peak moves away from the query with depth t, and comes nearer as m
    grows.
    """
    least, compared = peaks(ds, "decay_curve").isel(scale=0), _near_stars(ds)[1]
    steps = least.diff("peak_layer").where(compared), -least.diff("decay", label="lower").where(compared)
    medians = least.median("seed").transpose("decay", "peak_layer")
    layers = medians.sizes["peak_layer"]
    ends = [f"{one[1]:g} to {one[-1]:g} at m = {m:g}" for (m,), one in places(medians, "decay") if layers > 1]
    moves = [between(one, 0, math.inf) for step in steps for one in over_each(step)]
    measured = f"from t = 1 to {layers - 1}: {', '.join(ends) or '-'} (medians, least logits)"
    return decided(measured, *(moves if all(over_each(step) for step in steps) else ()))


def _turned(ds: xr.Dataset) -> tuple[xr.DataArray, xr.DataArray]:
    """Peaks under RoPE [seed, theta, peak_layer], large angles first, and whether they are where peaks are compared."""
    need("rope_curve" in ds)
    order = np.argsort(-ds["theta"].values)
    found = peaks(ds, "rope_curve").isel(noise=0, theta=order).transpose("seed", "theta", "peak_layer")
    return found, ds["rope_paths"].isel(theta=order) < INSIDE * ds.sizes["distance"]


@theorem(
    "4.7-peak-with-depth",
    "Thm 4.7",
    rule=f"the peak's distance, {HALF}, rises with every layer, {INTERVALS}",
)
def turned_with_depth(ds: xr.Dataset) -> Judged:
    """Under RoPE the rollout's peak x* moves away from the query with depth t."""
    found, compared = _turned(ds)
    step = found.diff("peak_layer").where(compared)
    medians = found.median("seed").transpose("theta", "peak_layer")
    ends = ", ".join(
        f"{one.values[0]:g} to {one.values[-1]:g} at {angle:.3g}" for (angle,), one in places(medians, "theta")
    )
    measured = f"from t = 0 to {medians.sizes['peak_layer'] - 1}: {ends} rad per token"
    return decided(measured, *([each_above(step)] if over_each(step) else []))


@theorem(
    "4.7-peak-with-angle",
    "Thm 4.7",
    rule=f"the peak's distance, {HALF}, rises with every smaller angle, from two layers on, {INTERVALS}",
)
def turned_with_angle(ds: xr.Dataset) -> Judged:
    """Under RoPE the rollout's peak x* comes nearer to the query as the angle theta_1 grows."""
    found, compared = _turned(ds)
    # Before two layers have been walked the peak is at the query itself, whatever the angle.
    farther = (
        found.diff("theta").where(compared & compared.shift(theta=1, fill_value=False)).isel(peak_layer=slice(1, None))
    )
    middle = found.sizes["peak_layer"] // 2
    medians = found.isel(peak_layer=middle).median("seed")
    ends = ", ".join(f"{float(one):g} at {angle:.3g}" for (angle,), one in places(medians, "theta"))
    return decided(f"at t = {middle}: {ends} rad per token", *([each_above(farther)] if over_each(farther) else []))


def _other(ds: xr.Dataset, *attention: str) -> xr.Dataset:
    """Fresh toys of these kinds of attention at their top layer, [attention, source, seed]."""
    need("gone" in ds, fresh(ds))
    here = at(ds[["beyond", "gone"]], attention=list(attention)).sel(source=fresh(ds))
    return here.isel(layer=top_of(here["gone"])).transpose("attention", "source", "seed")


@further(
    "other-attention",
    rule=f"under a causal mask, in fresh toys of every logit size, more than {CONVERGED:g} of the last query's row of the "
    f"product, divided by its sum, is beyond the first token at the top, {INTERVALS}; a sequence counts whole if "
    "nothing arrives",
)
def need_not(ds: xr.Dataset) -> Judged:
    """With attention other than softmax, sigmoid or ReLU, the rollout need not converge to the first token."""
    here = _other(ds, "sigmoid", "relu")
    away = here["gone"] + (1 - here["gone"]) * here["beyond"].fillna(0)
    lines = [
        f"{name}: {range_told(one['beyond'].values.ravel())} beyond the first token, "
        f"nothing arrives in {float(one['gone'].mean()):.0%} of the sequences"
        for (name,), one in places(here, "attention")
    ]
    return decided("; ".join(lines), each_above(away, CONVERGED))


@further(
    "other-attention-summed",
    rule=f"in fresh toys of every logit size less than {CONVERGED:g} of the mass is beyond the first token at the top, "
    f"{INTERVALS}",
    kind="ours",
)
def summed_converges(ds: xr.Dataset) -> Judged:
    """It is rows that sum to 1 that take the mass to the first token, not the exponential: sigmoid attention with its rows
    divided by their sums converges as softmax does.
    """
    beyond = _other(ds, f"sigmoid{SUMMED}")["beyond"]
    return decided(f"{range_told(beyond.values.ravel())} beyond", each_above(-beyond, -CONVERGED))
