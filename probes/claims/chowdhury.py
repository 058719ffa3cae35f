"""[Chowdhury], arXiv 2603.10123, "Lost in the Middle at Birth"."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from ..measures.map import Row
from ..results.curves import rms_log_error, smooth, spearman, wasserstein
from ..results.statistics import Interval, jackknifed, units
from ..results.tables import number, range_told
from ..results.ushape import SHORTEST, shape
from ..theory.cesaro import cesaro_bins
from . import readings as read
from .evidence import fresh, places, real
from .ledger import Source
from .readings import prompted, rising, roughly, strength_told
from .rules import Lacks, Test, Told, above, below, every, near, nothing, told

chowdhury = Source("[Chowdhury]", "chowdhury", places(), "abstract")
ours = chowdhury.but(kind="ours")
Rows = Sequence[Row]

# ----------------------------------------------------------------------------------------------------------- the U-shape

WEAK, STRONG = 1.25, 2.0  # of both ends against the middle: ours, the source names none


def u_of(row: Row, factor: float) -> Test:
    """Whether both ends of a place's profile stand so many times above its middle."""
    return above(roughly(row.weaker), float(np.log(factor)))


def u_of_places(rows: Rows) -> dict[str, Told]:
    by_place: dict[str, Told] = {}
    for row in rows:
        words = f"primacy {number(row.shape.primacy)}, last {number(row.shape.last)}"
        by_place[str(row["label"])] = words, u_of(row, WEAK)
    return by_place


def u_everywhere(rows: Rows, factor: float) -> Told:
    """Of all places, counted."""
    there = sum(row.weaker >= factor for row in rows)
    words = f"{there} of {len(rows)} places; the lower end {range_told([row.weaker for row in rows])} times the middle"
    return words, every(u_of(row, factor) for row in rows)


def u_of_model(ds: xr.Dataset, condition: str = "pretrained", factor: float = WEAK) -> Told:
    """Of a model's mean profile: its primacy, and the source's anchor at the last position."""
    read.with_middle(ds, condition)
    numbers = shape(ds, condition)
    ends = {"primacy": numbers.primacy, "last": numbers.last}
    words = (f"{name} {told(end)}" if end.value > 0 else f"{name}: no middle" for name, end in ends.items())
    with np.errstate(divide="ignore"):
        logs = [Interval(*map(float, np.log(end[:3])))._replace(freedom=end.freedom) for end in ends.values()]
    return ", ".join(words), every(above(end, float(np.log(factor))) for end in logs)


BOTH = f"primacy (positions 1 to 16) and the last position are both at least {WEAK:g} times the middle"
USUAL = ("GPT-2", "Qwen2.5-0.5B")
MODELS = places("fresh GPT-2 and Qwen2.5-0.5B configurations", group="model")


@chowdhury("u-at-birth", rule=f"{BOTH} in both models' fresh profiles", needs=MODELS)
def _(rows: Rows) -> dict[str, Told]:
    """With fresh weights GPT-2 and Qwen2-0.5B have the U-shape."""
    return u_of_places([row for row in rows if row["name"] in USUAL])


PAIR, TENTHS = "in Qwen2-0.5B and GPT-2", "known within a tenth, at every place of the map without window"
for source, end, u, factor in ((chowdhury, "", "U-shape", WEAK), (ours, "-strong", "strong U-shape", STRONG)):
    both = BOTH.replace(f"{WEAK:g}", f"{factor:g}")
    everywhere, persisting = source.but(needs=places(window=0)), source.but(needs=real("jacobian"), published=PAIR)
    claim = f"Fresh causal decoders as such have the {u}."
    everywhere(f"u-at-birth-everywhere{end}", claim=claim, rule=f"{both}, {TENTHS}", factor=factor)(u_everywhere)
    claim, rule = f"The {u} persists through pretraining.", f"{both} in every pretrained model without window"
    persisting(f"u-persists{end}", claim=claim, rule=rule, factor=factor)(u_of_model)


@ours("u-at-birth-bundled", rule=f"{BOTH} in every fresh model without window", needs=fresh("jacobian"))
def _(ds: xr.Dataset) -> Told:
    """The U-shape of sensitivity is there in fresh models, before any training."""
    return u_of_model(ds, "init")


# -------------------------------------------------------------------------------------------------- with and without RoPE

SAME, STRENGTH, NEAR = 0.99, 0.36, 0.05  # published rank correlation; d σ² of Qwen2-0.5B, and how near to it
RANKS = f"rank correlation of the two profiles, smoothed by us, within 0.01 of {SAME:g}"
same = chowdhury.but(where="experiments", published=f"{SAME:g}", needs=places("fresh models with and without RoPE"))


def smooth_ranks(curve: np.ndarray, other: np.ndarray) -> float:
    """Rank correlation of the smoothed curves: what single texts and weights make of single positions is no shape."""
    return spearman(smooth(curve), smooth(other))


def ranked(curve: np.ndarray, other: np.ndarray) -> Told:
    """Whether two curves have the published rank correlation."""
    rho = smooth_ranks(curve, other)
    words = f"{number(rho, '.3f')} (not smoothed: {number(spearman(curve, other), '.3f')})"
    return words, near(Interval(rho, rho, rho), SAME, correlation=True)


@same("same-without-rope-at-any-scale", rule=RANKS, kind="ours")
def without_rope(rows: Rows) -> dict[str, Told]:
    """The U-shape at initialization is the same with and without RoPE, whatever the logit scale."""
    by_place: dict[str, Told] = {}
    for row in (row for row in rows if not row["rope"]):
        if twins := [twin for twin in rows if twin["rope"] and read.alike(row, [twin])]:
            by_place[strength_told(row["strength"])] = ranked(row["measured"], twins[-1]["measured"])
    return by_place


@same("same-without-rope", rule=RANKS)
def _(rows: Rows) -> dict[str, Told]:
    """The U-shape at initialization is the same with and without RoPE, at the logit scale of Qwen2-0.5B, d σ² = 0.36."""
    return without_rope([row for row in rows if abs(row["strength"] - STRENGTH) < NEAR])


# ------------------------------------------------------------------------------------------------ N^L against measurement

NEAREST, BEST = 0.025, "at N^L's best alpha"  # what rounds to the published distance, and less
DISTANCE = f"the distance of the two profiles, each of sum 1, positions from 0 to 1, is below {NEAREST:g}"
EXACT = 0.05  # RMS log error up to which a theory of a curve may be called exact: ours
ERRORS = "RMS log errors of N^L at its best alpha, and of its continuous limit at that alpha (best scales)"
usual = chowdhury.but(needs=places("fresh GPT-2 and Qwen2.5-0.5B configurations", USUAL, group="model"))


@usual("cesaro-ranks", "experiments", published=f"{SAME:g}", rule=f"{RANKS} in both models, {BEST}")
def _(row: Row) -> Told:
    """The last row of the Cesàro power N^L orders the positions as the Jacobian norm of fresh models does."""
    return ranked(row["cesaro"], row["measured"])


@usual("cesaro-wasserstein", "others' notes", published="0.02", rule=f"{DISTANCE} in both models, {BEST}")
def _(row: Row) -> Told:
    """Between the Cesàro power N^L and the Jacobian norm of fresh models the Wasserstein distance is 0.02."""
    distance = wasserstein(row["measured"], row["cesaro"])
    return number(distance, ".3f"), below(Interval(distance, distance, distance), NEAREST)


@usual("cesaro-exact", "title, abstract", rule=f"{ERRORS}, each at most {EXACT:g} in both models")
def _(row: Row) -> Told:
    """The Cesàro power N^L, in closed form in the continuous limit, is an exact theory of the profile at initialization."""
    density = cesaro_bins(int(row["length"]), int(row["blocks"]), alpha=float(row["alpha"]))
    errors = row.error("cesaro"), rms_log_error(density, row["measured"], free_scale=True)
    words = f"{number(errors[0])}, continuous limit {number(errors[1])}"
    return words, every(below(roughly(max(error, 1e-12)), float(np.log(EXACT))) for error in errors)


# ---------------------------------------------------------------------------------------------- the three parts of the U

RISING = 0.9  # rank correlation with ln 1/x over the first quarter from which on a profile climbs as the theory has it
ISOLATED, STEADY, ORDER = 2.0, 1.5, 10.0  # times the neighbours; factors of the anchor's height and of 1/(H-1)!: ours
CLIMBS = f"rank correlation with ln(1/x) over the first quarter at least {RISING:g} (ours)"
LENGTHS = f"the last position's sensitivity stays within a factor of {STEADY:g} over all lengths, at every logit scale"
WEAKER = "at every logit scale, last over middle, known within a tenth, rises with every weakening of the branches"
FACTORIAL = f"from the least to the largest depth the middle falls by (H-1)! within a factor of {ORDER:g}"
DEPTHS = places("fresh models of several depths", group="depth")


def climb(row: Row) -> float:
    """Rank correlation with ln 1/x over the first quarter."""
    quarter = row["measured"][: len(row["measured"]) // 4]
    return spearman(quarter, -np.arange(len(quarter), dtype=float))


def misfits(row: Row) -> tuple[float, float]:
    """RMS relative error over the first quarter of the best quadratic in ln(1/x), and of the best one in x."""
    quarter = row["measured"][: len(row["measured"]) // 4]
    if not np.all(quarter > 0):  # beyond a window's reach
        return np.nan, np.nan
    x, misfits = np.arange(1, len(quarter) + 1) / len(row["measured"]), []
    for of in (np.log(1 / x), x):
        terms = np.vander(of, 3) / quarter[:, None]
        misfits.append(float(np.sqrt(np.mean((terms @ np.linalg.lstsq(terms, np.ones(len(x)))[0] - 1) ** 2))))
    return misfits[0], misfits[1]


@usual("primacy-tail", rule=f"{CLIMBS}, and a quadratic in ln(1/x) fits with less than half the error of one in x")
def _(row: Row) -> Told:
    """Influence diverges toward the start of the prompt as a polynomial in ln(1/x)."""
    rho, (by_logarithm, by_place) = climb(row), misfits(row)
    words = f"{number(rho, '.3f')}, errors {number(by_logarithm, '.1%')} and {number(by_place, '.1%')}"
    return f"{words}, primacy {number(row.shape.primacy)}", rho >= RISING and by_logarithm < by_place / 2


@ours("primacy-tail-everywhere", rule=f"{CLIMBS} at every place without window", needs=places(window=0))
def _(rows: Rows) -> Told:
    """The primacy tail of the profile at initialization, a polynomial in ln(1/x), is there at any logit scale."""
    ranks = np.array([climb(row) for row in rows])
    words = f"{(ranks >= RISING).sum()} of {len(rows)} places; {range_told(ranks, '.2f')}"
    return words, every(map(bool, ranks >= RISING))


@usual("recency-isolated", rule=f"the last position is at least {ISOLATED:g} times the mean of the 16 before it")
def _(row: Row) -> Told:
    """At birth the last position stands as an isolated anchor above its neighbours in the profile."""
    ratio = row.shape.last / row.shape.recency
    return f"{number(ratio)} times its neighbours", above(roughly(ratio), float(np.log(ISOLATED)))


@chowdhury("recency-order-one", rule=LENGTHS, published="O(1)", needs=places("fresh models of several text lengths"))
def _(rows: Rows) -> dict[str, Told]:
    """The anchor at the last position of the fresh profile is O(1): its height does not depend on the text's length."""
    lengths, by_place = [row for row in rows if row["group"] == "length"], dict[str, Told]()
    same = [row for row in rows if row["group"] == "depth" and read.alike(row, lengths, "length")]
    heights = read.courses([*lengths, *same], "length", lambda row: float(row["measured"][-1]))
    for strength, by_length in heights.items():
        ratio = max(by_length.values()) / min(by_length.values())
        by_place[strength_told(strength)] = f"factor {ratio:.2f}", below(roughly(ratio), float(np.log(STEADY)))
    return by_place


@chowdhury("residual-makes-recency", rule=WEAKER, needs=places("fresh models with scaled branches", rope=True))
def _(rows: Rows) -> dict[str, Told]:
    """The anchor at the last position of the profile at initialization is made by the residual stream."""
    scaled = [row for row in rows if row["group"] == "residual"]
    comparable, by_place = [row for row in rows if read.alike(row, scaled, "residual_scale")], dict[str, Told]()
    anchors = read.courses(comparable, "residual_scale", lambda row: row.shape.last)
    for strength, by_scale in anchors.items():
        words = ", ".join(f"{number(anchor)} (branches times {scale:g})" for scale, anchor in by_scale.items())
        by_place[f"last at {strength_told(strength)}"] = words, rising(list(by_scale.values())[::-1])
    return by_place


@chowdhury("dead-zone-factorial", rule=FACTORIAL, published="1/(H-1)!", needs=DEPTHS)
def _(rows: Rows) -> Told | None:
    """The dead zone in the middle of the profile at initialization is of the order 1/(H-1)!, with H the depth."""
    for depths in read.courses(rows, "blocks").values():  # at the smallest logit scale
        few, many = int(min(depths)), int(max(depths))
        factorials = float(np.sum(np.log(np.arange(few, many, dtype=float))))  # ln (many-1)!/(few-1)!
        fell = float(np.log(depths[many] / depths[few]))
        words = ", ".join(f"{number(1 / primacy, '.2g')} at {n} blocks" for n, primacy in depths.items())
        words += f": falls {np.exp(fell):.3g}-fold, the factorials 10^{factorials / np.log(10):.1f}-fold"
        off = float(np.exp(min(abs(fell - factorials), 700)))
        return f"middle / beginning {words}", below(roughly(off), float(np.log(ORDER)))
    return None


# ------------------------------------------------------------------------------------------------------- the score path

FRESH = fresh("theory", options="--prompts 2")
SHARE = 0.95  # of the norm that the value path has where the score path counts as vanished: ours
VALUE = f"the value path alone has at least {SHARE:.0%} of the norm"


@chowdhury("score-path-vanishes-usual", "theory", rule=f"{VALUE} in both models", needs=MODELS)
def _(rows: Rows) -> dict[str, Told]:
    """At initialization the part of the Jacobian through attention scores vanishes."""
    by_place: dict[str, Told] = {}
    for row in (row for row in rows if row["name"] in USUAL):
        share = row.value_share
        by_place[f"{row['name']} ({strength_told(row['strength'])})"] = f"value path {share:.3f}", share >= SHARE
    return by_place


@ours("score-path-vanishes-bundled", "theory", rule=f"{VALUE} (mean over positions) in every fresh model", needs=FRESH)
def _(ds: xr.Dataset) -> Told:
    """At initialization the part of the Jacobian through attention scores vanishes in real architectures."""

    def of_value(whole: np.ndarray, value: np.ndarray) -> float:
        seen = whole > 0
        return float(np.mean(value[seen] / whole[seen])) if np.any(seen) else np.nan

    both = prompted(ds, "init"), prompted(ds, "init", "value")
    share = read.of_profiles(of_value, units(ds), *both, mean=read.root_mean_square)
    return f"value path {told(share, '.3f')}", above(share, SHARE)


# ---------------------------------------------------------------------------------------------------------- after training

EDGE = 0.05  # share of the text at either end in which a trough is no valley
ALIKE, CONTENT = 0.9, 0.3  # rank correlation; margin of a mean correlation: ours
after = chowdhury.but(needs=real("jacobian"))
LEAST = "the smoothed profile's least in its first and last 5 % is above the least between, without window"
ELASTICITY = "rank correlation of smoothed elasticities, pretrained and at initialization (geometric means), at least"
MORE = "a prompt's log profile varies more around its moving average (5 % of positions, without ends) after"
APART = f"the mean correlation of different prompts' spikes lies within {CONTENT:g} of 0 in every model without window"


@after("valley-persists", rule=LEAST)
def _(ds: xr.Dataset) -> Told:
    """Standard training does not overcome the valley: the least of the profile stays between its ends."""

    def depth(curve: np.ndarray) -> float:
        if len(curve) < SHORTEST:
            return np.nan
        values, edge = smooth(curve), max(1, int(EDGE * len(curve)))
        outer, inner = min(values[:edge].min(), values[-edge:].min()), values[edge:-edge].min()
        return float(np.log(outer / inner)) if min(outer, inner) > 0 else np.nan

    deep = read.of_profiles(depth, units(ds), read.with_middle(ds, "pretrained"))
    return f"ends {told(deep, change=np.exp)} times the least between", above(deep, 0)


def elasticities(ds: xr.Dataset) -> tuple[list[np.ndarray], np.ndarray]:
    """Fresh seeds' and the pretrained profiles [prompt, position] of a model without window, on the same prompts."""
    both = prompted(ds, "init", "elasticity"), read.with_middle(ds, "pretrained", "elasticity")
    fresh, trained = (
        [values for values in profiles if np.all(np.isfinite(values) & (values > 0))] for profiles in both
    )
    if not (fresh and trained):
        raise Lacks("elasticity")
    return fresh, trained[0]


@after("baseline-persists", rule=f"{ELASTICITY} {ALIKE:g} (ours)")
def _(ds: xr.Dataset) -> Told:
    """The profile at initialization stays the baseline of the trained one."""
    fresh, trained = elasticities(ds)

    def rank(trained: np.ndarray, *fresh: np.ndarray) -> float:
        rho = smooth_ranks(trained, np.exp(np.mean(np.log(np.stack(fresh)), axis=0)))
        return float(np.arctanh(np.clip(rho, -0.999999, 0.999999)))  # of which errors are nearly normal

    rho = read.of_profiles(rank, units(ds), *([values] for values in (trained, *fresh)))
    return told(rho, ".2f", np.tanh), above(rho, float(np.arctanh(ALIKE)))


def spikes(values: np.ndarray) -> np.ndarray:
    """What a moving average leaves of log profiles [prompt, position] without both ends' 5 %; it has to span points."""
    edge, logs = max(1, int(EDGE * values.shape[1])), np.log(values)
    averages = np.stack([smooth(log) for log in logs])
    if np.array_equal(averages, logs):
        raise Lacks("positions")
    return (logs - averages)[:, edge:-edge]


@after("training-adds-spikes", "experiments", rule=f"{MORE} training, in every model without window")
def _(ds: xr.Dataset) -> Told:
    """Pretraining adds local spikes to the profile."""
    fresh, trained = elasticities(ds)
    before, after = (np.mean([np.log(spikes(x).var(axis=1)) for x in curves], axis=0) for curves in (fresh, [trained]))
    ratio = jackknifed(lambda values: float(values.mean()), after - before, units(ds))
    words = f"variance {np.exp(after.mean()):.2g} after, {np.exp(before.mean()):.2g} before"
    return f"{words}: {told(ratio, change=np.exp)} times", above(ratio, 0)


@after("spikes-are-content", "experiments", rule=f"{APART} (90 % interval)", kind="ours")
def _(ds: xr.Dataset) -> Told:
    """The spikes that pretraining adds to the profile follow the text, not the position."""

    def mean_correlation(spikes: np.ndarray) -> float:
        if len(spikes) < 2:
            return np.nan
        normed = (spikes - spikes.mean(1, keepdims=True)) / spikes.std(1, keepdims=True)
        return float((len(normed) * (normed.mean(0) ** 2).mean() - 1) / (len(normed) - 1))  # over pairs of prompts

    rho = jackknifed(mean_correlation, spikes(elasticities(ds)[1]), units(ds))
    return told(rho, ".2f"), nothing(rho, CONTENT)
