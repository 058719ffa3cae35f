"""[Chowdhury], arXiv 2603.10123, "Lost in the Middle at Birth", and the two objections raised in public against it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import xarray as xr

from ..results.collected import Collected
from ..results.curves import rms_log_error, smooth, spearman
from ..results.profiles import typical
from ..results.statistics import Interval, jackknifed, units
from ..results.tables import number
from ..results.theory_map import Row
from ..results.ushape import UShape
from ..theory.cesaro import cesaro_bins
from .claim import Judged, Kind
from .rules import (
    RANKS,
    Results,
    Source,
    Stated,
    Told,
    above,
    below,
    commands,
    curves,
    ends_told,
    every,
    having,
    in_each,
    in_real,
    map_command,
    near,
    nothing,
    of_profile,
    of_profiles,
    on_map,
    place_told,
    places,
    prompted,
    range_told,
    root_mean_square,
    roughly,
    seen_whole,
    shape,
    told,
)

STATED: Stated = []
of_source = Source("chowdhury", "[Chowdhury]", STATED)

WEAK, MIDDLING, STRONG = THRESHOLDS = 1.25, 1.5, 2.0  # of both ends against the middle: ours, [Chowdhury] names none
SAME = 0.99  # published rank correlation
EXACT = 0.05  # RMS log error up to which a theory of a curve may be called exact
ALMOST_ALL = 0.95  # share of the norm that the value path has where the score path counts as vanished
ALIKE = 0.9  # rank correlation of smoothed profiles from which on one is the baseline of the other
ISOLATED = 2.0  # the last position against the mean of the 5 % before it
STEADY = 1.5  # factor within which a height counts as not depending on the text's length
LOGIT_SCALE = 0.36  # d σ² of Qwen2-0.5B
NEAR = 0.05  # of a d σ² in a map
RISING = 0.9  # rank correlation with ln 1/x over the first quarter, from which on a profile climbs as the theory has it
ORDER = 10.0  # factor within which a number is "of the order of" another
SCALAR_ERROR = 0.1  # RMS log error up to which a surrogate counts as sound
SCALAR_RANKS = 0.95  # and rank correlation from which on
TINY = 1e-12  # stands for no error at all
EDGE = 0.05  # share of the text at either end in which a trough is no valley
PROFILES = "headwater jacobian {} --length {} --out runs/{}"
USUAL = ("GPT-2", "Qwen2.5-0.5B")
USUALLY = "fresh GPT-2 and Qwen2.5-0.5B configurations"


def _u(ends: list[Interval], factor: float) -> Callable[..., Any]:
    """Both ends, as logarithms, stand `factor` times above the middle."""
    return every([above(end, float(np.log(factor))) for end in ends])


def _ends(found: UShape) -> list[Interval]:
    return [roughly(found.primacy), roughly(found.recency)]


def _told_ends(found: UShape) -> str:
    return f"primacy {number(found.primacy)}, recency {number(found.recency)}"


def _with_shapes(results: Results, condition: str, variable: str = "sensitivity") -> dict[str, xr.Dataset]:
    """Models whose queries see the whole text, with a profile that has ends and a middle."""
    return {
        name: ds
        for name, ds in seen_whole(results).items()
        if any(shape(typical(values)) is not None for values in prompted(ds, condition, variable))
    }


# ------------------------------------------------------------------------------------------------------- the U at birth


def _u_of_map(factor: float, where: Mapping[str, Any], collected: Collected) -> Judged | None:
    found = {
        place_told(row): (_told_ends(row.shape), _u(_ends(row.shape), factor)) for row in places(collected, **where)
    }
    return on_map(
        collected, found, f"{len(found)} fresh configurations" if "name" not in where else f"fresh {where['name']}"
    )


def _u_under_window(factor: float, collected: Collected) -> Judged | None:
    windows = sorted({row["window"] for row in places(collected)} - {0})
    found = [row for width in windows for row in places(collected, window=width)]
    each: dict[str, Told] = {place_told(row): (_told_ends(row.shape), _u(_ends(row.shape), factor)) for row in found}
    return on_map(collected, each, f"{len(each)} configurations")


def _u_everywhere(factor: float, collected: Collected) -> Judged | None:
    found = places(collected, window=0)
    judged = on_map(
        collected,
        {str(n): ("", _u(_ends(row.shape), factor)) for n, row in enumerate(found)},
        f"{len(found)} fresh configurations",
    )
    if judged is None:
        return None
    least = [min(row.shape.primacy, row.shape.recency) for row in found]
    said = [f"{sum(one >= factor for one in least)} of {len(found)} at {factor:g}" for factor in THRESHOLDS]
    without = [row["strength"] for row, one in zip(found, least, strict=True) if not one >= STRONG]
    past = f"; below {STRONG:g} from d σ² = {min(without):.2g} on" if without else ""
    return judged._replace(measured=f"both ends stand above the middle {', '.join(said)} times{past}")


def _u_of_fresh(factor: float, collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        said, ends = ends_told(ds, "init")
        return said, _u(ends, factor)

    return in_each(_with_shapes(collected["jacobian"], "init"), judge)


def _persists(factor: float, only: str | None, collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        said, ends = ends_told(ds, "pretrained")
        return said, _u(ends, factor)

    found = _with_shapes(collected["jacobian"], "pretrained")
    return in_real({name: ds for name, ds in found.items() if only in (None, name)}, judge)


for _suffix, _called, _factor, _strongly in (("", "U-shape", WEAK, False), ("-strong", "strong U-shape", STRONG, True)):
    _rule = f"primacy and recency are both at least {_factor:g}"
    for _id, _name, _about in (
        ("gpt2", "GPT-2", "GPT-2 has"),
        ("qwen2", "Qwen2.5-0.5B", "Qwen2-0.5B has"),
        ("7b", "Llama-7B width", "a model as wide as those in use, 4096, has"),
    ):
        of_source(
            f"u-at-birth-{_id}{_suffix}",
            "abstract",
            f"With fresh weights {_about} the {_called}.",
            f"{_rule} in the fresh profile",
            "initialization",
            "map",
            kind="ours" if _strongly or _id == "7b" else "published",
            model=f"fresh {_name} configuration",
        )(partial(_u_of_map, _factor, {"name": _name}))
    _ours: Kind = "ours" if _strongly else "published"
    of_source(
        f"u-at-birth-bundled{_suffix}",
        "abstract",
        f"The {_called} of sensitivity is there in fresh models, before any training.",
        f"{_rule} in every fresh model of every architecture without window",
        "initialization",
        "jacobian",
        kind="ours",
    )(partial(_u_of_fresh, _factor))
    of_source(
        f"u-at-birth-window{_suffix}",
        "abstract",
        f"Causal decoders with a sliding window are born with the {_called} as well.",
        f"{_rule} at every place of the map with a window",
        "initialization",
        "map",
        kind="ours",
    )(partial(_u_under_window, _factor))
    of_source(
        f"u-at-birth-everywhere{_suffix}",
        "abstract",
        f"The {_called} at birth is a property of causal decoders with residual streams as such.",
        f"{_rule} at every place of the map without window, at any logit scale",
        "initialization",
        "map",
        kind=_ours,
    )(partial(_u_everywhere, _factor))
    of_source(
        f"u-persists{_suffix}",
        "abstract",
        f"The {_called} persists through pretraining.",
        f"{_rule} in the pretrained profile of every model without window",
        "pretrained",
        "jacobian",
        kind=_ours,
    )(partial(_persists, _factor, None))
    for _id, _model, _length in (("qwen2-0.5b", "Qwen/Qwen2-0.5B", 2048), ("gpt2", "openai-community/gpt2", 1024)):
        of_source(
            f"u-persists-{_id}{_suffix}",
            "experiments",
            f"The {_called} persists in the pretrained {_model.partition('/')[2]}.",
            f"{_rule} in its pretrained profile",
            "pretrained",
            PROFILES.format(_model, _length, _id),
            kind=_ours,
            model=_model,
        )(partial(_persists, _factor, _model))


# -------------------------------------------------------------------------------------------------- with and without RoPE

SIZES = ("strength", "width", "blocks", "length", "residual_scale", "window", "name")


def _pairs(collected: Collected) -> list[tuple[Row, Row]]:
    """Places without rotation, each with its twin that has it."""
    found = places(collected)
    twins = {tuple(row[size] for size in SIZES): row for row in found if row["rope"]}
    bare = ((tuple(row[size] for size in SIZES), row) for row in found if not row["rope"])
    return [(row, twins[sizes]) for sizes, row in bare if sizes in twins]


def _ranks(one: np.ndarray, other: np.ndarray) -> Told:
    """Rank correlation of the smoothed curves, and of the curves as they are.

    The first decides: what single texts and weights make of single positions is no shape.
    """
    smoothed, plain = spearman(smooth(one), smooth(other)), spearman(one, other)
    said = f"{number(smoothed, '.3f')} (not smoothed: {number(plain, '.3f')})"
    return said, near(Interval(smoothed, smoothed, smoothed), SAME, correlation=True)


def _same_without_rope(at: float | None, collected: Collected) -> Judged | None:
    pairs = [(row, twin) for row, twin in _pairs(collected) if at is None or abs(row["strength"] - at) < NEAR]
    found = {f"d σ² = {row['strength']:.2g}": _ranks(row["measured"], twin["measured"]) for row, twin in pairs}
    return on_map(collected, found, "fresh models with and without RoPE")


_within = f"rank correlation of the two profiles, smoothed by us, within 0.01 of {SAME:g}"
for _id, _where, _at in (
    ("", f", at the logit scale of Qwen2-0.5B (d σ² = {LOGIT_SCALE:g})", LOGIT_SCALE),
    ("-at-any-scale", ", whatever the logit scale", None),
):
    of_source(
        f"same-without-rope{_id}",
        "experiments",
        f"The U-shape at birth is the same with and without RoPE{_where}.",
        _within,
        "initialization",
        "map",
        kind="ours" if _id else "published",
        published="0.99",
        model="fresh models with and without RoPE",
    )(partial(_same_without_rope, _at))


@of_source(
    "same-without-rope-bundled",
    "experiments",
    "Fresh models of the bundled architectures have the same profile with and without RoPE.",
    f"{_within} in every architecture",
    "initialization",
    "no-rope",
    kind="ours",
    published="0.99",
    model="bundled models, fresh weights",
)
def _bundled_without_rope(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        both = zip(prompted(ds, "init"), prompted(ds, "init-nope"), strict=False)
        whole = [one for one in both if np.all(np.isfinite(one))]
        found = of_profiles(whole, lambda a, b: spearman(smooth(a), smooth(b)), units(ds))
        return told(found, ".3f"), near(found, SAME, correlation=True)

    there = {**collected["jacobian"], **collected["no-rope"]}
    return in_each(
        {name: ds for name, ds in there.items() if prompted(ds, "init") and prompted(ds, "init-nope")}, judge
    )


# ------------------------------------------------------------------------------------------------ N^L against measurement


def _of_usual(collected: Collected, tell: Callable[[Row], Told]) -> Judged | None:
    found = {name: tell(row) for name in USUAL for row in places(collected, name=name)}
    return on_map(collected, found, f"fresh {', '.join(found)} configurations")


@of_source(
    "cesaro-ranks",
    "experiments",
    "The last row of the Cesàro power N^L orders the positions as the Jacobian norm of fresh models does.",
    "rank correlation of the profile (mean of the fresh models) with N^L at its best alpha, both smoothed by us, within "
    f"0.01 of {SAME:g} in both models",
    "initialization",
    "map",
    published="0.99",
    model=USUALLY,
)
def _cesaro_ranks(collected: Collected) -> Judged | None:
    return _of_usual(collected, lambda row: _ranks(row["cesaro"], row["measured"]))


def _exact(error: float) -> Told:
    return number(error), below(roughly(max(error, TINY)), float(np.log(EXACT)))


@of_source(
    "cesaro-exact",
    "title",
    "The Cesàro power N^L is an exact theory of the sensitivity profile at birth.",
    f"RMS log error of N^L at its best alpha and scale at most {EXACT:g} in both models",
    "initialization",
    "map",
    model=USUALLY,
)
def _cesaro_exact(collected: Collected) -> Judged | None:
    return _of_usual(collected, lambda row: _exact(row.cesaro_error))


@of_source(
    "continuous-limit",
    "abstract",
    "The closed-form density of the continuous limit of N^L describes the sensitivity profile at birth.",
    f"RMS log error of the density's mass per token, at the alpha of N^L and the best scale, at most {EXACT:g}",
    "initialization",
    "map",
    model=USUALLY,
)
def _continuous(collected: Collected) -> Judged | None:
    def tell(row: Row) -> Told:
        density = cesaro_bins(int(row["length"]), int(row["blocks"]), alpha=float(row["alpha"]))
        return _exact(rms_log_error(density, row["measured"], free_scale=True))

    return _of_usual(collected, tell)


OBJECTION = "objection in public"


def _errors(measured: np.ndarray, *theories: np.ndarray) -> list[float]:
    """RMS log errors of theories' shapes, where all of them reach."""
    seen = np.all(np.stack([measured, *theories]) > 0, axis=0)
    if np.count_nonzero(seen) < 2:
        return [np.nan] * len(theories)
    return [rms_log_error(curve[seen], measured[seen], free_scale=True) for curve in theories]


def _powers_on_map(powers: str, amplitudes: str, collected: Collected) -> Judged | None:
    there = [row for row in places(collected) if powers in row and amplitudes in row]
    errors = [_errors(row["measured"], row[powers], row[amplitudes]) for row in there]
    errors = [both for both in errors if np.all(np.isfinite(both))]
    smaller = sum(one < other for one, other in errors)
    each: dict[str, Told] = {str(n): ("", one < other) for n, (one, other) in enumerate(errors)}  # of the same profile
    judged = on_map(collected, each, f"{len(errors)} fresh configurations")
    said = (
        f"powers nearer at {smaller} of {len(errors)} places: {range_told([one for one, _ in errors])}, "
        f"amplitudes {range_told([other for _, other in errors])}"
    )
    return judged and judged._replace(measured=said)


of_source(
    "objection-powers-map",
    OBJECTION,
    "The Cesàro power N^L is the wrong quantity at birth: powers of paths add up, not amplitudes.",
    "with the same coefficients, per block from the configuration, and the addition alone changed, adding powers has the "
    "smaller RMS log error (best scale) at every place of the map whose branches are not scaled",
    "initialization",
    "map",
    kind="request",
)(partial(_powers_on_map, "config", "amplitudes"))
of_source(
    "objection-powers-map-fitted",
    OBJECTION,
    "Adding up powers of paths, with nothing fitted, is nearer to the profile at birth than amplitudes with one fitted "
    "number.",
    "the second-moment kernel has a smaller RMS log error (best scale) than N^L with its best alpha at every "
    "place of the map",
    "initialization",
    "map",
    kind="request",
)(partial(_powers_on_map, "score_path", "cesaro"))


def _powers(condition: str, collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        cesaro = ds["theory_cesaro"]
        fitted = (cesaro.sel(condition=condition) if "condition" in cesaro.dims else cesaro).values.astype(float)

        def ratio(measured: np.ndarray, kernel: np.ndarray) -> float:
            one, other = _errors(measured, kernel, fitted[: len(measured)])
            return float(np.log(one / other)) if one > 0 and other > 0 else np.nan

        both = [prompted(ds, condition, name) for name in ("sensitivity", "theory_score_path")]
        found = of_profiles(list(zip(*both, strict=True)), ratio, units(ds), root_mean_square)
        return f"error {told(found, change=np.exp)} times that of N^L", below(found, 0)

    there = having(collected["theory"], "theory_score_path", "theory_cesaro")
    those = {name: ds for name, ds in there.items() if prompted(ds, condition)}
    return (in_each if condition == "init" else in_real)(those, judge)


for _condition, _word in (("init", "fresh"), ("pretrained", "pretrained")):
    of_source(
        f"objection-powers-{_condition}",
        OBJECTION,
        f"In {_word} models adding up powers of paths, with nothing fitted, describes the sensitivity profile better than "
        "adding up amplitudes with one fitted number.",
        "RMS log error (best scale) of the second-moment kernel below that of N^L with its best alpha in every model",
        "initialization" if _condition == "init" else "pretrained",
        "theory",
        kind="request",
    )(partial(_powers, _condition))


# ---------------------------------------------------------------------------------------------- the three parts of the U


def _climb(row: Row) -> float:
    """Rank correlation with ln 1/x over the first quarter."""
    quarter = row["measured"][: len(row["measured"]) // 4]
    return spearman(quarter, -np.arange(len(quarter), dtype=float))


def _misfits(row: Row) -> tuple[float, float]:
    """RMS relative error over the first quarter of the best quadratic in ln(1/x), and of the best one in x."""
    quarter = row["measured"][: len(row["measured"]) // 4]
    if not np.all(quarter > 0):  # beyond a window's reach
        return np.nan, np.nan
    x = np.arange(1, len(quarter) + 1) / len(row["measured"])
    found = []
    for of in (np.log(1 / x), x):
        terms = np.vander(of, 3) / quarter[:, None]
        found.append(float(np.sqrt(np.mean((terms @ np.linalg.lstsq(terms, np.ones(len(x)))[0] - 1) ** 2))))
    return found[0], found[1]


_rising = f"rank correlation of the profile with ln(1/x) over the first quarter at least {RISING:g} (threshold ours)"


@of_source(
    "primacy-tail",
    "abstract",
    "Influence diverges toward the start of the prompt as a polynomial in ln(1/x).",
    "over the first quarter the profile falls (rank correlation with ln(1/x) at least "
    f"{RISING:g}, threshold ours), and a quadratic in ln(1/x) fits it with less than half the relative error of one in x, "
    "in both models",
    "initialization",
    "map",
    model=USUALLY,
)
def _primacy_tail(collected: Collected) -> Judged | None:
    def tell(row: Row) -> Told:
        rho, (by_logarithm, by_place) = _climb(row), _misfits(row)
        said = f"{number(rho, '.3f')}, errors {number(by_logarithm, '.1%')} and {number(by_place, '.1%')}"
        return f"{said}, primacy {number(row.shape.primacy)}", rho >= RISING and by_logarithm < by_place / 2

    return _of_usual(collected, tell)


@of_source(
    "primacy-tail-everywhere",
    "abstract",
    "The primacy tail of the profile at birth, a polynomial in ln(1/x), is there at any logit scale.",
    f"{_rising} at every place without window",
    "initialization",
    "map",
    kind="ours",
)
def _primacy_tail_everywhere(collected: Collected) -> Judged | None:
    found = places(collected, window=0)
    if not found:
        return None
    ranks = [_climb(row) for row in found]
    below_it = [row["strength"] for row, rho in zip(found, ranks, strict=True) if not rho >= RISING]
    said = f"{len(found) - len(below_it)} of {len(found)} places; {range_told(ranks, '.2f')}"
    said += f"; below from d σ² = {min(below_it):.2g} on" if below_it else ""
    each: dict[str, Told] = {str(n): ("", bool(rho >= RISING)) for n, rho in enumerate(ranks)}
    judged = on_map(collected, each, f"{len(found)} fresh configurations")
    return judged and judged._replace(measured=said)


@of_source(
    "recency-isolated",
    "abstract",
    "At birth the last position stands as an isolated anchor above its neighbours in the profile.",
    f"the last position is at least {ISOLATED:g} times the mean of the 5 % before it in both models",
    "initialization",
    "map",
    model=USUALLY,
)
def _isolated(collected: Collected) -> Judged | None:
    def tell(row: Row) -> Told:
        curve = row["measured"]
        ratio = float(curve[-1] / np.mean(curve[-1 - max(1, len(curve) // 20) : -1]))
        return f"{number(ratio)} times its neighbours", above(roughly(ratio), float(np.log(ISOLATED)))

    return _of_usual(collected, tell)


@of_source(
    "recency-order-one",
    "abstract",
    "The anchor at the last position of the profile at birth is O(1): its height does not depend on the text's length.",
    f"the last position's sensitivity stays within a factor of {STEADY:g} over all lengths, at every logit scale of the map "
    "with several",
    "initialization",
    "map",
    published="O(1)",
    model="fresh models of several text lengths",
)
def _order_one(collected: Collected) -> Judged | None:
    by_strength: dict[float, dict[int, float]] = {}
    lengths = places(collected, group="length")
    same = [
        row
        for row in places(collected, group="depth")
        if any(all(row[size] == other[size] for size in SIZES if size != "length") for other in lengths)
    ]
    for row in (*lengths, *same):
        by_strength.setdefault(row["strength"], {})[int(row["length"])] = float(row["measured"][-1])
    several = {strength: heights for strength, heights in sorted(by_strength.items()) if len(heights) > 1}
    found: dict[str, Told] = {}
    for strength, heights in several.items():
        ratio = max(heights.values()) / min(heights.values())
        found[f"d σ² = {strength:.2g}"] = f"factor {ratio:.2f}", below(roughly(ratio), float(np.log(STEADY)))
    spans = [length for heights in several.values() for length in heights]
    return on_map(collected, found, f"fresh models, T = {min(spans)} to {max(spans)}" if spans else "")


@of_source(
    "residual-makes-recency",
    "abstract",
    "The anchor at the last position of the profile at birth is made by the residual stream.",
    "at every logit scale, recency rises as the branches beside the residual stream are made weaker",
    "initialization",
    "map",
    model="fresh models with scaled branches",
)
def _residual_makes_recency(collected: Collected) -> Judged | None:
    scaled = places(collected, group="residual")
    by_strength: dict[float, dict[float, float]] = {}
    for row in places(collected):
        others = [size for size in SIZES if size != "residual_scale"]
        if row["rope"] and any(all(row[size] == one[size] for size in others) for one in scaled):
            by_strength.setdefault(row["strength"], {})[row["residual_scale"]] = row.shape.recency
    found: dict[str, Told] = {}
    for strength, by_scale in sorted(by_strength.items()):
        if len(by_scale) > 1:
            scales = sorted(by_scale)
            said = ", ".join(f"{number(by_scale[scale])} (branches times {scale:g})" for scale in scales)
            steps = [_rises(by_scale[b], by_scale[a]) for a, b in pairwise(scales)]
            found[f"recency at d σ² = {strength:.2g}"] = said, every(steps)
    return on_map(collected, found, "fresh models with scaled branches")


def _rises(before: float, after: float) -> Callable[..., Any]:
    """Two places of the map, either known within a tenth."""
    return above(roughly(after / before), 0.0)


def _depths(collected: Collected) -> dict[int, float]:
    """Primacy by depth, at the smallest logit scale that has several depths."""
    found: dict[float, dict[int, float]] = {}
    for row in places(collected, group="depth"):
        found.setdefault(row["strength"], {})[int(row["blocks"])] = row.shape.primacy
    several = {strength: depths for strength, depths in found.items() if len(depths) > 1}
    return dict(sorted(several[min(several)].items())) if several else {}


def _depths_told(depths: dict[int, float]) -> str:
    return "middle / beginning " + ", ".join(f"{number(1 / one, '.2g')} at {n} blocks" for n, one in depths.items())


@of_source(
    "dead-zone-deepens",
    "abstract",
    "The dead zone in the middle of the profile at birth deepens with the model's depth.",
    "the middle against the beginning falls from the least to the largest depth, at the map's smallest logit scale",
    "initialization",
    "map",
    kind="ours",
    model="fresh models of several depths",
)
def _deepens(collected: Collected) -> Judged | None:
    depths = _depths(collected)
    if not depths:
        return None
    falls = _rises(depths[min(depths)], depths[max(depths)])
    return Judged(_depths_told(depths), falls(0.95), "fresh models of several depths", map_command(collected))


@of_source(
    "dead-zone-factorial",
    "abstract",
    "The dead zone in the middle of the profile at birth is of the order 1/(H-1)!, with H the depth.",
    f"from the least to the largest depth the middle falls by (H-1)! within a factor of {ORDER:g}",
    "initialization",
    "map",
    published="1/(H-1)!",
    model="fresh models of several depths",
)
def _factorial(collected: Collected) -> Judged | None:
    depths = _depths(collected)
    if not depths:
        return None
    few, many = min(depths), max(depths)
    factorials = float(np.sum(np.log(np.arange(few, many, dtype=float))))  # ln (many-1)!/(few-1)!
    fell = float(np.log(depths[many] / depths[few]))
    off = abs(fell - factorials)
    said = (
        f"{_depths_told(depths)}: falls {np.exp(fell):.3g}-fold, the factorials 10^{factorials / np.log(10):.1f}-fold"
    )
    within = below(roughly(float(np.exp(min(off, 700)))), float(np.log(ORDER)))
    return Judged(said, within(0.95), "fresh models of several depths", map_command(collected))


# ------------------------------------------------------------------------------------------------------- the score path


def _value_share(condition: str, ds: xr.Dataset) -> Told:
    def share(whole: np.ndarray, value: np.ndarray) -> float:
        return float(np.mean(value[whole > 0] / whole[whole > 0])) if np.any(whole > 0) else np.nan

    both = [prompted(ds, condition, name) for name in ("sensitivity", "value")]
    found = of_profiles(list(zip(*both, strict=True)), share, units(ds), root_mean_square)
    return f"value path {told(found, '.3f')}", above(found, ALMOST_ALL)


@of_source(
    "score-path-vanishes-bundled",
    "theory",
    "At initialization the part of the Jacobian through attention scores vanishes.",
    f"the value path alone has at least {ALMOST_ALL:.0%} of the norm, mean over positions, in every fresh model",
    "initialization",
    "theory",
    kind="ours",
)
def _score_vanishes(collected: Collected) -> Judged | None:
    those = {name: ds for name, ds in having(collected["theory"], "value").items() if curves(ds, "init")}
    return in_each(those, partial(_value_share, "init"))


def _score_vanishes_on_map(usual: bool, collected: Collected) -> Judged | None:
    found: dict[str, Told] = {}
    for row in places(collected, group="model"):
        share = row.value_share
        if np.isfinite(share) and (row["name"] in USUAL) == usual:
            found[f"{row['name']} (d σ² = {row['strength']:.2g})"] = f"value path {share:.3f}", share >= ALMOST_ALL
    return on_map(collected, found, f"fresh {', '.join(found)}") if found else None


for _id, _models, _usual in (("usual", USUALLY, True), ("7b", "fresh Llama-7B width, few blocks", False)):
    of_source(
        f"score-path-vanishes-{_id}",
        "theory",
        "At initialization the part of the Jacobian through attention scores vanishes"
        + ("." if _usual else " at the width of a 7B model, too."),
        f"the value path alone has at least {ALMOST_ALL:.0%} of the norm in every such configuration of the map",
        "initialization",
        "map",
        kind="published" if _usual else "ours",
        model=_models,
    )(partial(_score_vanishes_on_map, _usual))


# ---------------------------------------------------------------------------------------------------------- after training


def _depth(curve: np.ndarray) -> float:
    """Logarithm of the least of the smoothed curve's first and last 5 %, against the least between."""
    if shape(curve) is None:
        return np.nan
    values, edge = smooth(curve), max(1, int(EDGE * len(curve)))
    outer, inner = min(values[:edge].min(), values[-edge:].min()), values[edge:-edge].min()
    return float(np.log(outer / inner)) if min(outer, inner) > 0 else np.nan


@of_source(
    "valley-persists",
    "abstract",
    "Standard training does not overcome the valley: the least of the profile stays between its ends.",
    "the least of the smoothed pretrained profile's first and last 5 % is above the least between, in every model without "
    "window",
    "pretrained",
    "jacobian",
)
def _valley(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        deep = of_profile(ds, "pretrained", _depth)
        return f"ends {told(deep, change=np.exp)} times the least between", above(deep, 0)

    return in_real(_with_shapes(collected["jacobian"], "pretrained"), judge)


def _both(collected: Collected) -> Iterator[tuple[str, xr.Dataset, list[np.ndarray], np.ndarray]]:
    """Models whose elasticity is known before and after training on the same prompts: fresh seeds, pretrained."""
    for name, ds in _with_shapes(having(collected["jacobian"], "elasticity"), "pretrained", "elasticity").items():
        born = [values for values in prompted(ds, "init", "elasticity") if np.all(np.isfinite(values) & (values > 0))]
        (trained,) = prompted(ds, "pretrained", "elasticity")
        if born and np.all(np.isfinite(trained) & (trained > 0)):
            yield name, ds, born, trained


def _compared(collected: Collected, judge: Callable[[xr.Dataset, list[np.ndarray], np.ndarray], Told]) -> Judged | None:
    found = {name: (ds, born, trained) for name, ds, born, trained in _both(collected)}
    by_ds = {id(ds): judge(ds, born, trained) for ds, born, trained in found.values()}
    return in_real({name: ds for name, (ds, *_) in found.items()}, lambda ds: by_ds[id(ds)])


@of_source(
    "baseline-persists",
    "abstract",
    "The profile at birth stays the baseline of the trained one.",
    f"rank correlation of the smoothed pretrained profile with the smoothed one at birth (elasticity, geometric means) at "
    f"least {ALIKE:g} (threshold ours) in every model without window",
    "pretrained",
    "jacobian",
)
def _baseline(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset, born: list[np.ndarray], trained: np.ndarray) -> Told:
        def rank(part: slice, trained: np.ndarray, *born: np.ndarray) -> float:
            before = smooth(np.exp(np.mean(np.log(np.stack(born)), axis=0)))
            rho = spearman(smooth(trained)[part], before[part])
            return float(np.arctanh(np.clip(rho, -0.999999, 0.999999)))  # of which errors are nearly normal

        middle = trained.shape[-1] // 2
        found, first, second = (
            of_profiles([[trained, *born]], partial(rank, part), units(ds))
            for part in (slice(None), slice(middle), slice(middle, None))
        )
        halves = f"halves {np.tanh(first.value):.2f}, {np.tanh(second.value):.2f}"
        return f"{told(found, '.2f', np.tanh)} ({halves})", above(found, float(np.arctanh(ALIKE)))

    return _compared(collected, judge)


def _spikes(values: np.ndarray) -> np.ndarray:
    """What a moving average over positions does not explain of log profiles [prompt, position], both ends' 5 % left out."""
    edge = max(1, int(EDGE * values.shape[1]))
    logs = np.log(values)
    return (logs - np.stack([smooth(one) for one in logs]))[:, edge:-edge]


def _averaged(values: np.ndarray) -> bool:
    """Whether a moving average takes in more than the position itself."""
    return not np.array_equal(smooth(values[0]), values[0])


@of_source(
    "training-adds-spikes",
    "experiments",
    "Pretraining adds local spikes to the profile.",
    "the variance over positions of a prompt's log profile around its moving average (5 % of the positions; the "
    "ends' 5 % left "
    "out) is larger after training than in fresh models, on the same prompts, in every model without window",
    "pretrained",
    "jacobian",
)
def _adds_spikes(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset, born: list[np.ndarray], trained: np.ndarray) -> Told:
        if not _averaged(trained):
            return "-", None
        before, after = (
            np.mean([np.log(_spikes(one).var(axis=1)) for one in runs], axis=0) for runs in (born, [trained])
        )
        found = jackknifed(lambda values: float(values.mean()), after - before, units(ds))
        said = f"variance {np.exp(after.mean()):.2g} after, {np.exp(before.mean()):.2g} before: "
        return f"{said}{told(found, change=np.exp)} times", above(found, 0)

    return _compared(collected, judge)


@of_source(
    "spikes-are-content",
    "experiments",
    "The spikes that pretraining adds to the profile follow the text, not the position.",
    f"the mean correlation of different prompts' spikes, position by position, lies within {RANKS:g} of 0 (90 % interval), "
    "in every model without window",
    "pretrained",
    "jacobian",
    kind="ours",
)
def _content(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset, born: list[np.ndarray], trained: np.ndarray) -> Told:
        def alike(spikes: np.ndarray) -> float:
            if len(spikes) < 2:
                return np.nan
            normed = (spikes - spikes.mean(1, keepdims=True)) / spikes.std(1, keepdims=True)
            return float((len(normed) * (normed.mean(0) ** 2).mean() - 1) / (len(normed) - 1))  # mean over pairs

        if not _averaged(trained):
            return "-", None
        found = jackknifed(alike, _spikes(trained), units(ds))
        return told(found, ".2f"), nothing(found, RANKS)

    return _compared(collected, judge)


# ---------------------------------------------------------------------------------------------------- one-pass surrogate


def _surrogate(condition: str, collected: Collected) -> Judged | None:
    whole = collected["jacobian"]
    scalar = {**collected["scalar"], **collected["scalar-init"]} if condition == "init" else collected["scalar"]
    pairs = {
        name: ds
        for name, ds in scalar.items()
        if name in whole
        and prompted(ds, condition)
        and prompted(whole[name], condition)
        and ds.attrs.get("tokens_sha256") == whole[name].attrs.get("tokens_sha256")
    }
    by_ds = {id(ds): whole[name] for name, ds in pairs.items()}

    def judge(ds: xr.Dataset) -> Told:
        both = list(zip(prompted(ds, condition), prompted(by_ds[id(ds)], condition), strict=False))

        def error(one: np.ndarray, other: np.ndarray) -> float:
            return _errors(other, one)[0]

        def ranks(one: np.ndarray, other: np.ndarray) -> float:
            seen = (one > 0) & (other > 0)
            return spearman(one[seen], other[seen]) if np.count_nonzero(seen) > 1 else np.nan

        off, rho = (of_profiles(both, tell, units(ds), root_mean_square) for tell in (error, ranks))
        said = f"RMS log error {told(off, '.2f')}, rank correlation {told(rho, '.3f')}"
        return said, every([below(off, SCALAR_ERROR), above(rho, SCALAR_RANKS)])

    found = (in_each if condition == "init" else in_real)(pairs, judge)
    return found and found._replace(command=commands([*pairs.values(), *(whole[name] for name in pairs)]))


for _condition, _word in (("init", "fresh"), ("pretrained", "pretrained")):
    of_source(
        f"objection-surrogate-{_condition}",
        OBJECTION,
        f"The one-pass scalar surrogate is a sound stand-in for the Jacobian norm of {_word} models.",
        f"on the same prompts its RMS log error (best scale) is at most {SCALAR_ERROR:g} and its rank correlation at least "
        f"{SCALAR_RANKS:g} in every model",
        "initialization" if _condition == "init" else "pretrained",
        "scalar",
        kind="request",
    )(partial(_surrogate, _condition))
