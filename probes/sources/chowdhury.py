"""[Chowdhury], arXiv 2603.10123, "Lost in the Middle at Birth", and the two objections raised in public against it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import xarray as xr

from ..claims import Judged, Statement
from ..mixing import cesaro_bins
from ..studies.atlas import FACTOR, Row
from ..studies.collected import Collected
from ..studies.tables import number
from ..summary import rms_log_error, smooth, spearman
from .judging import (
    COMMANDS,
    Results,
    Stated,
    Told,
    commands,
    curves,
    ends_told,
    having,
    in_each,
    is_u,
    map_command,
    place_told,
    places,
    range_told,
    resampled,
    seen_whole,
    shape,
    stated,
    together,
)

SOURCE = "[Chowdhury]"
OBJECTION = "[Chowdhury], objection in public"
STATED: Stated = []

SAME = 0.985  # rank correlation that is rounded to the published 0.99
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
EDGE = 0.05  # share of the text at either end in which a trough is no valley
SURE = 0.95  # of resamples
PROFILES = "headwater jacobian {} --length 2048 --out runs/{}"


# ------------------------------------------------------------------------------------------------------- the U at birth


def _u_of_map(name: str, collected: Collected) -> Judged | None:
    found = places(collected, name=name)
    if not found:
        return None
    shapes = [row.shape for row in found]
    said = "; ".join(f"primacy {number(one.primacy)}, recency {number(one.recency)}" for one in shapes)
    return Judged(said, all(map(is_u, shapes)), f"fresh {name} configuration", map_command(collected))


for _id, _name, _about in (
    ("gpt2", "GPT-2", "GPT-2 has"),
    ("qwen2", "Qwen2.5-0.5B", "Qwen2-0.5B has"),
    ("7b", "Llama-7B width", "a model as wide as those in use, 4096, has"),
):
    stated(
        Statement(
            f"chowdhury-u-at-birth-{_id}",
            f"{SOURCE} abstract",
            f"With fresh weights {_about} the U-shape.",
            f"primacy and recency of the fresh profile are both at least {FACTOR:g}",
            model=f"fresh {_name} configuration",
            command=COMMANDS["map"],
        ),
        STATED,
    )(partial(_u_of_map, _name))


@stated(
    Statement(
        "chowdhury-u-at-birth-bundled",
        f"{SOURCE} abstract",
        "The U-shape of sensitivity is there in fresh models, before any training.",
        f"primacy and recency are both at least {FACTOR:g} in every fresh model of every architecture without window",
        model="bundled models, fresh weights",
        command=COMMANDS["jacobian"],
    ),
    STATED,
)
def _u_of_bundled(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        said, shapes = ends_told(ds, "init")
        return said, all(map(is_u, shapes))

    return in_each(_with_shapes(collected["jacobian"], "init"), judge)


def _with_shapes(results: Results, condition: str) -> dict[str, xr.Dataset]:
    """Models whose queries see the whole text, with a profile that has ends and a middle."""
    return {
        name: ds
        for name, ds in seen_whole(results).items()
        if any(shape(curve) is not None for curve in curves(ds, condition))
    }


@stated(
    Statement(
        "chowdhury-u-at-birth-window",
        f"{SOURCE} abstract",
        "Causal decoders with a sliding window are born with the U-shape as well.",
        f"primacy and recency are at least {FACTOR:g} at every place of the map with a window",
        model="fresh models with a sliding window",
        command=COMMANDS["map"],
    ),
    STATED,
)
def _u_under_window(collected: Collected) -> Judged | None:
    found = [row for row in places(collected) if row["window"]]
    if not found:
        return None
    said = "; ".join(
        f"{place_told(row)}: primacy {number(row.shape.primacy)}, recency {number(row.shape.recency)}" for row in found
    )
    return Judged(said, all(is_u(row.shape) for row in found), f"{len(found)} configurations", map_command(collected))


@stated(
    Statement(
        "chowdhury-u-at-birth-everywhere",
        f"{SOURCE} abstract",
        "The U-shape at birth is a property of causal decoders with residual streams as such.",
        f"primacy and recency are at least {FACTOR:g} at every place of the map without window, at any logit scale",
        model="fresh models over the map",
        command=COMMANDS["map"],
    ),
    STATED,
)
def _u_everywhere(collected: Collected) -> Judged | None:
    found = places(collected, window=0)
    if not found:
        return None
    without = [row for row in found if not is_u(row.shape)]
    said = f"U at {len(found) - len(without)} of {len(found)} places"
    if without:
        said += f"; without it from d σ² = {min(row['strength'] for row in without):.2g} on"
    return Judged(said, not without, f"{len(found)} fresh configurations", map_command(collected))


# -------------------------------------------------------------------------------------------------- with and without RoPE

SIZES = ("strength", "width", "blocks", "length", "residual_scale", "window", "name")


def _pairs(collected: Collected) -> list[tuple[Row, Row]]:
    """Places without rotation, each with its twin that has it."""
    found = places(collected)
    twins = {tuple(row[size] for size in SIZES): row for row in found if row["rope"]}
    bare = ((tuple(row[size] for size in SIZES), row) for row in found if not row["rope"])
    return [(row, twins[sizes]) for sizes, row in bare if sizes in twins]


def _same_without_rope(collected: Collected, *, at: float | None) -> Judged | None:
    pairs = [(row, twin) for row, twin in _pairs(collected) if at is None or abs(row["strength"] - at) < NEAR]
    if not pairs:
        return None
    found = {row["strength"]: _ranks(row["measured"], twin["measured"]) for row, twin in pairs}
    said = "; ".join(f"d σ² = {strength:.2g}: {told}" for strength, (told, _) in found.items())
    model = f"fresh models of {pairs[0][0]['blocks']} blocks, width {pairs[0][0]['width']}"
    return Judged(said, all(bool(same) for _, same in found.values()), model, map_command(collected))


def _ranks(one: np.ndarray, other: np.ndarray) -> Told:
    """Rank correlation of the smoothed curves, and of the curves as they are.

    The first decides: what single texts and weights make of single positions is no shape.
    """
    smoothed, plain = spearman(smooth(one), smooth(other)), spearman(one, other)
    return f"{number(smoothed, '.3f')} (not smoothed: {number(plain, '.3f')})", smoothed >= SAME


for _id, _where, _at in (
    ("", f", at the logit scale of Qwen2-0.5B (d σ² = {LOGIT_SCALE:g})", LOGIT_SCALE),
    ("-at-any-scale", ", whatever the logit scale", None),
):
    stated(
        Statement(
            f"chowdhury-same-without-rope{_id}",
            f"{SOURCE} experiments",
            f"The U-shape at birth is the same with and without RoPE{_where}.",
            f"rank correlation of the two smoothed profiles at least {SAME:g}",
            published="0.99",
            model="fresh models with and without RoPE",
            command=COMMANDS["map"],
        ),
        STATED,
    )(partial(_same_without_rope, at=_at))


@stated(
    Statement(
        "chowdhury-same-without-rope-bundled",
        f"{SOURCE} experiments",
        "Fresh models of the bundled architectures have the same profile with and without RoPE.",
        f"rank correlation of the smoothed mean profiles at least {SAME:g} in every architecture",
        published="0.99",
        model="bundled models, fresh weights",
        command=COMMANDS["jacobian"].replace(" --out reports/jacobian", " --no-rope --out runs/no-rope"),
    ),
    STATED,
)
def _bundled_without_rope(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        one, other = (together(curves(ds, condition)) for condition in ("init", "init-nope"))
        if one is None or other is None:
            return "-", None
        return _ranks(one, other)

    both = {name: ds for name, ds in collected["jacobian"].items() if curves(ds, "init") and curves(ds, "init-nope")}
    return in_each(both, judge)


# ------------------------------------------------------------------------------------------------ N^L against measurement

USUAL = ("GPT-2", "Qwen2.5-0.5B")


def _usual(collected: Collected) -> list[Row]:
    return [row for name in USUAL for row in places(collected, name=name)]


def _of_usual(collected: Collected, tell: Callable[[Row], Told]) -> Judged | None:
    found = [(row["name"], *tell(row)) for row in _usual(collected)]
    if not found:
        return None
    said = "; ".join(f"{name}: {told}" for name, told, _ in found)
    known = [holds for *_, holds in found if holds is not None]
    names = ", ".join(dict.fromkeys(name for name, *_ in found))
    return Judged(said, all(known) if known else None, f"fresh {names} configurations", map_command(collected))


@stated(
    Statement(
        "chowdhury-cesaro-ranks",
        f"{SOURCE} experiments",
        "The last row of the Cesàro power N^L orders the positions as the Jacobian norm of fresh models does.",
        f"rank correlation of the profile with N^L at its best alpha, both smoothed, at least {SAME:g} in both models",
        published="0.99",
        model="fresh GPT-2 and Qwen2.5-0.5B configurations",
        command=COMMANDS["map"],
    ),
    STATED,
)
def _cesaro_ranks(collected: Collected) -> Judged | None:
    return _of_usual(collected, lambda row: _ranks(row["cesaro"], row["measured"]))


@stated(
    Statement(
        "chowdhury-cesaro-exact",
        f"{SOURCE} title",
        "The Cesàro power N^L is an exact theory of the sensitivity profile at birth.",
        f"RMS log error of N^L at its best alpha and scale at most {EXACT:g} in both models",
        model="fresh GPT-2 and Qwen2.5-0.5B configurations",
        command=COMMANDS["map"],
    ),
    STATED,
)
def _cesaro_exact(collected: Collected) -> Judged | None:
    return _of_usual(collected, lambda row: (number(row.cesaro_error), row.cesaro_error <= EXACT))


@stated(
    Statement(
        "chowdhury-continuous-limit",
        f"{SOURCE} abstract",
        "The closed-form density of the continuous limit of N^L describes the sensitivity profile at birth.",
        f"RMS log error of the density's mass per token, at the alpha of N^L and the best scale, at most {EXACT:g}",
        model="fresh GPT-2 and Qwen2.5-0.5B configurations",
        command=COMMANDS["map"],
    ),
    STATED,
)
def _continuous(collected: Collected) -> Judged | None:
    def tell(row: Row) -> Told:
        density = cesaro_bins(int(row["length"]), int(row["blocks"]), alpha=float(row["alpha"]))
        error = rms_log_error(density, row["measured"], free_scale=True)
        return number(error), error <= EXACT

    return _of_usual(collected, tell)


def _kernel_and_cesaro(measured: np.ndarray, kernel: np.ndarray, cesaro: np.ndarray) -> tuple[float, float]:
    """RMS log errors of both shapes, where all three reach."""
    seen = (measured > 0) & (kernel > 0) & (cesaro > 0)
    if np.count_nonzero(seen) < 2:
        return np.nan, np.nan
    first, second = (rms_log_error(curve[seen], measured[seen], free_scale=True) for curve in (kernel, cesaro))
    return first, second


@stated(
    Statement(
        "chowdhury-objection-powers-map",
        OBJECTION,
        "The bottom row of the Cesàro power N^L is the wrong quantity at birth: powers of paths add up, not "
        "amplitudes.",
        "the second-moment kernel, with nothing fitted, has a smaller RMS log error (best scale) than N^L with its best "
        "alpha at every place",
        model="fresh models over the map",
        command=COMMANDS["map"],
    ),
    STATED,
)
def _powers_on_map(collected: Collected) -> Judged | None:
    found = places(collected)
    if not found:
        return None
    errors = [_kernel_and_cesaro(row["measured"], row["score_path"], row["cesaro"]) for row in found]
    smaller = sum(kernel < cesaro for kernel, cesaro in errors)
    said = (
        f"smaller at {smaller} of {len(errors)} places: kernel {range_told(kernel for kernel, _ in errors)}, "
        f"N^L {range_told(cesaro for _, cesaro in errors)}"
    )
    return Judged(said, smaller == len(errors), f"{len(errors)} fresh configurations", map_command(collected))


def _powers(condition: str, collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        measured, kernel, alone = (
            together(curves(ds, condition, name)) for name in ("sensitivity", "theory_score_path", "theory_values")
        )
        if measured is None or kernel is None or alone is None:
            return "-", None
        cesaro = ds["theory_cesaro"].values
        if "condition" in ds["theory_cesaro"].dims:
            cesaro = ds["theory_cesaro"].sel(condition=condition).values
        error, other = _kernel_and_cesaro(measured, kernel, cesaro[: len(measured)].astype(np.float64))
        if np.isnan(error):
            return "-", None
        return f"kernel {number(error)}, N^L {number(other)}", error < other

    needed = ("theory_score_path", "theory_values", "theory_cesaro")
    those = {name: ds for name, ds in having(collected["theory"], *needed).items() if curves(ds, condition)}
    return in_each(those, judge)


for _condition, _told in (("init", "fresh"), ("pretrained", "pretrained")):
    stated(
        Statement(
            f"chowdhury-objection-powers-{_condition}",
            OBJECTION,
            f"In {_told} models adding up powers of paths describes the sensitivity profile better than adding up "
            "amplitudes.",
            "RMS log error (best scale) of the second-moment kernel below that of N^L with its best alpha in every model",
            model=f"bundled models, {_told}",
            command=COMMANDS["theory"],
        ),
        STATED,
    )(partial(_powers, _condition))


# ---------------------------------------------------------------------------------------------- the three parts of the U


@stated(
    Statement(
        "chowdhury-primacy-tail",
        f"{SOURCE} abstract",
        "Influence diverges toward the start of the prompt as a polynomial in ln(1/x).",
        f"rank correlation of the profile with ln(1/x) over the first quarter at least {RISING:g} in both models",
        model="fresh GPT-2 and Qwen2.5-0.5B configurations",
        command=COMMANDS["map"],
    ),
    STATED,
)
def _primacy_tail(collected: Collected) -> Judged | None:
    def tell(row: Row) -> Told:
        quarter = row["measured"][: len(row["measured"]) // 4]
        rho = spearman(quarter, -np.arange(len(quarter), dtype=float))
        return f"{number(rho, '.3f')}, primacy {number(row.shape.primacy)}", rho >= RISING

    return _of_usual(collected, tell)


@stated(
    Statement(
        "chowdhury-primacy-tail-everywhere",
        f"{SOURCE} abstract",
        "The primacy tail of the profile at birth, a polynomial in ln(1/x), is there at any logit scale.",
        f"rank correlation of the profile with ln(1/x) over the first quarter at least {RISING:g} at every place "
        "without window",
        model="fresh models over the map",
        command=COMMANDS["map"],
    ),
    STATED,
)
def _primacy_tail_everywhere(collected: Collected) -> Judged | None:
    found = places(collected, window=0)
    if not found:
        return None
    ranks = {}
    for n, row in enumerate(found):
        quarter = row["measured"][: len(row["measured"]) // 4]
        ranks[n] = spearman(quarter, -np.arange(len(quarter), dtype=float))
    below = [found[n]["strength"] for n, rho in ranks.items() if not rho >= RISING]
    said = f"{len(found) - len(below)} of {len(found)} places; {range_told(ranks.values(), '.2f')}"
    said += f"; below from d σ² = {min(below):.2g} on" if below else ""
    return Judged(said, not below, f"{len(found)} fresh configurations", map_command(collected))


@stated(
    Statement(
        "chowdhury-recency-isolated",
        f"{SOURCE} abstract",
        "At birth the last position stands as an isolated anchor above its neighbours in the profile.",
        f"the last position is at least {ISOLATED:g} times the mean of the 5 % before it in both models",
        model="fresh GPT-2 and Qwen2.5-0.5B configurations",
        command=COMMANDS["map"],
    ),
    STATED,
)
def _isolated(collected: Collected) -> Judged | None:
    def tell(row: Row) -> Told:
        curve = row["measured"]
        ratio = float(curve[-1] / np.mean(curve[-1 - max(1, len(curve) // 20) : -1]))
        return f"{number(ratio)} times its neighbours", ratio >= ISOLATED

    return _of_usual(collected, tell)


@stated(
    Statement(
        "chowdhury-recency-order-one",
        f"{SOURCE} abstract",
        "The anchor at the last position of the profile at birth is O(1): its height does not depend on the text's "
        "length.",
        f"the last position's sensitivity stays within a factor of {STEADY:g} over all lengths, at every logit scale of "
        "the map with several",
        published="O(1)",
        model="fresh models of several text lengths",
        command=COMMANDS["map"],
    ),
    STATED,
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
    found = {strength: heights for strength, heights in by_strength.items() if len(heights) > 1}
    if not found:
        return None
    ratios = {strength: max(heights.values()) / min(heights.values()) for strength, heights in found.items()}
    said = ", ".join(f"factor {ratio:.2f} at d σ² = {strength:.2g}" for strength, ratio in sorted(ratios.items()))
    spans = [length for heights in found.values() for length in heights]
    model = f"fresh models, T = {min(spans)} to {max(spans)}"
    return Judged(said, all(ratio <= STEADY for ratio in ratios.values()), model, map_command(collected))


@stated(
    Statement(
        "chowdhury-residual-makes-recency",
        f"{SOURCE} abstract",
        "The anchor at the last position of the profile at birth is made by the residual stream.",
        "at every logit scale, recency rises as the branches beside the residual stream are made weaker",
        model="fresh models with scaled branches",
        command=COMMANDS["map"],
    ),
    STATED,
)
def _residual_makes_recency(collected: Collected) -> Judged | None:
    scaled = places(collected, group="residual")
    found: dict[float, dict[float, float]] = {}
    for row in places(collected):
        others = [size for size in SIZES if size != "residual_scale"]
        if row["rope"] and any(all(row[size] == one[size] for size in others) for one in scaled):
            found.setdefault(row["strength"], {})[row["residual_scale"]] = row.shape.recency
    found = {strength: by_scale for strength, by_scale in found.items() if len(by_scale) > 1}
    if not found:
        return None
    said = "; ".join(
        f"d σ² = {strength:.2g}: "
        + ", ".join(f"{number(by_scale[scale])} (branches times {scale:g})" for scale in sorted(by_scale))
        for strength, by_scale in sorted(found.items())
    )
    falls = all(
        all(np.diff([by_scale[scale] for scale in sorted(by_scale)]) < 0) for by_scale in found.values()
    )  # in the branches' strength
    return Judged(f"recency at {said}", falls, "fresh models with scaled branches", map_command(collected))


def _depths(collected: Collected) -> dict[int, float]:
    """Primacy by depth, at the smallest logit scale that has several depths."""
    found: dict[float, dict[int, float]] = {}
    for row in places(collected, group="depth"):
        found.setdefault(row["strength"], {})[int(row["blocks"])] = row.shape.primacy
    several = {strength: depths for strength, depths in found.items() if len(depths) > 1}
    return dict(sorted(several[min(several)].items())) if several else {}


def _depths_told(depths: dict[int, float]) -> str:
    return "middle / beginning " + ", ".join(f"{number(1 / one, '.2g')} at {n} blocks" for n, one in depths.items())


@stated(
    Statement(
        "chowdhury-dead-zone-deepens",
        f"{SOURCE} abstract",
        "The dead zone in the middle of the profile at birth deepens with the model's depth.",
        "the middle against the beginning falls at every step of depth, at the map's smallest logit scale",
        model="fresh models of several depths",
        command=COMMANDS["map"],
    ),
    STATED,
)
def _deepens(collected: Collected) -> Judged | None:
    depths = _depths(collected)
    if not depths:
        return None
    falls = bool(np.all(np.diff(list(depths.values())) > 0))
    return Judged(_depths_told(depths), falls, "fresh models of several depths", map_command(collected))


@stated(
    Statement(
        "chowdhury-dead-zone-factorial",
        f"{SOURCE} abstract",
        "The dead zone in the middle of the profile at birth is of the order 1/(H-1)!, with H the depth.",
        f"from the least to the largest depth the middle falls by (H-1)! within a factor of {ORDER:g}",
        published="1/(H-1)!",
        model="fresh models of several depths",
        command=COMMANDS["map"],
    ),
    STATED,
)
def _factorial(collected: Collected) -> Judged | None:
    depths = _depths(collected)
    if not depths:
        return None
    few, many = min(depths), max(depths)
    told = float(np.sum(np.log(np.arange(few, many, dtype=float))))  # ln (many-1)!/(few-1)!
    fell = float(np.log(depths[many] / depths[few]))
    said = f"{_depths_told(depths)}: falls {np.exp(fell):.3g}-fold, the factorials 10^{told / np.log(10):.1f}-fold"
    holds = abs(fell - told) <= np.log(ORDER)
    return Judged(said, bool(holds), "fresh models of several depths", map_command(collected))


# ------------------------------------------------------------------------------------------------------- the score path


@stated(
    Statement(
        "chowdhury-score-path-vanishes-bundled",
        f"{SOURCE} theory",
        "At initialization the part of the Jacobian through attention scores vanishes.",
        f"the value path alone has at least {ALMOST_ALL:.0%} of the norm, mean over positions, in every fresh model",
        model="bundled models, fresh weights",
        command=COMMANDS["theory"],
    ),
    STATED,
)
def _score_vanishes(collected: Collected) -> Judged | None:
    those = {name: ds for name, ds in having(collected["theory"], "value").items() if curves(ds, "init")}
    return in_each(those, partial(_value_share, "init"))


def _value_share(condition: str, ds: xr.Dataset) -> Told:
    whole, value = (together(curves(ds, condition, name)) for name in ("sensitivity", "value"))
    if whole is None or value is None or not np.any(whole > 0):
        return "-", None
    share = float(np.mean(value[whole > 0] / whole[whole > 0]))
    return f"value path {share:.3f}", share >= ALMOST_ALL


@stated(
    Statement(
        "chowdhury-score-path-vanishes-usual",
        f"{SOURCE} theory",
        "At initialization the part of the Jacobian through attention scores vanishes at the widths of models in use.",
        f"the value path alone has at least {ALMOST_ALL:.0%} of the norm in every usual configuration of the map",
        model="fresh GPT-2, Qwen2.5-0.5B, Llama-7B width",
        command=COMMANDS["map"],
    ),
    STATED,
)
def _score_vanishes_on_map(collected: Collected) -> Judged | None:
    found = [(row["name"], row.value_share, row["strength"]) for row in places(collected, group="model")]
    found = [one for one in found if np.isfinite(one[1])]
    if not found:
        return None
    said = "; ".join(f"{name} (d σ² = {strength:.2g}): {share:.3f}" for name, share, strength in found)
    model = f"fresh {', '.join(name for name, *_ in found)}"
    return Judged(
        f"value path {said}", all(share >= ALMOST_ALL for _, share, _ in found), model, map_command(collected)
    )


# ---------------------------------------------------------------------------------------------------------- after training


@stated(
    Statement(
        "chowdhury-u-persists",
        f"{SOURCE} abstract",
        "The U-shape persists through pretraining.",
        f"primacy and recency of the pretrained profile are both at least {FACTOR:g} in every model without window",
        model="bundled models, pretrained",
        command=COMMANDS["jacobian"],
    ),
    STATED,
)
def _persists(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        said, shapes = ends_told(ds, "pretrained")
        return said, all(map(is_u, shapes))

    return in_each(_with_shapes(collected["jacobian"], "pretrained"), judge)


@stated(
    Statement(
        "chowdhury-valley-persists",
        f"{SOURCE} abstract",
        "Standard training does not overcome the valley: the least of the profile stays between its ends.",
        "both ends of the pretrained profile stand above its middle in 95 % of resamples of the prompts, and its trough is "
        "not in the first or last 5 %, in every model without window",
        model="bundled models, pretrained",
        command=COMMANDS["jacobian"],
    ),
    STATED,
)
def _valley(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        said, shapes = ends_told(ds, "pretrained")
        drawn = list(resampled(ds, "pretrained")) or shapes
        above = np.mean([one.primacy > 1 and one.recency > 1 for one in drawn]) >= SURE
        inside = bool(above) and all(EDGE <= one.trough_fraction <= 1 - EDGE for one in shapes)
        return f"{said}, trough at {', '.join(f'{one.trough_fraction:.0%}' for one in shapes)} of the text", inside

    return in_each(_with_shapes(collected["jacobian"], "pretrained"), judge)


@stated(
    Statement(
        "chowdhury-baseline-persists",
        f"{SOURCE} abstract",
        "The profile at birth stays the baseline of the trained one; training adds local spikes.",
        f"rank correlation of the smoothed pretrained profile with the smoothed one at birth at least {ALIKE:g} in every "
        "model without window",
        model="bundled models",
        command=COMMANDS["jacobian"],
    ),
    STATED,
)
def _baseline(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        born, trained = (together(curves(ds, condition)) for condition in ("init", "pretrained"))
        if born is None or trained is None:
            return "-", None
        rho = spearman(smooth(trained), smooth(born))
        return number(rho, ".2f"), rho >= ALIKE

    return in_each(
        {name: ds for name, ds in _with_shapes(collected["jacobian"], "pretrained").items() if curves(ds, "init")},
        judge,
    )


def _of_checkpoint(model: str, collected: Collected) -> Judged | None:
    found = {name: ds for name, ds in collected["jacobian"].items() if name == model}

    def judge(ds: xr.Dataset) -> Told:
        said, shapes = ends_told(ds, "pretrained")
        return said, all(map(is_u, shapes)) if shapes else None

    return in_each(found, judge)


for _id, _model in (("qwen2-0.5b", "Qwen/Qwen2-0.5B"), ("gpt2", "openai-community/gpt2")):
    stated(
        Statement(
            f"chowdhury-u-persists-{_id}",
            f"{SOURCE} experiments",
            f"The U-shape persists in the pretrained {_model.partition('/')[2]}.",
            f"primacy and recency of its pretrained profile are both at least {FACTOR:g}",
            model=_model,
            command=PROFILES.format(_model, _id).replace("2048", "1024" if _id == "gpt2" else "2048"),
        ),
        STATED,
    )(partial(_of_checkpoint, _model))


# ---------------------------------------------------------------------------------------------------- one-pass surrogate


def _surrogate(condition: str, collected: Collected) -> Judged | None:
    whole = collected["jacobian"]
    pairs = {
        name: ds
        for name, ds in collected["scalar"].items()
        if name in whole and curves(ds, condition) and curves(whole[name], condition) and _same_prompts(ds, whole[name])
    }

    def judge(ds: xr.Dataset) -> Told:
        name = next(one for one, other in pairs.items() if other is ds)
        scalar, exact = curves(ds, condition), curves(whole[name], condition)
        errors, ranks = [], []
        for one, other in zip(scalar, exact, strict=False):  # the same fresh weights, seed by seed
            seen = (one > 0) & (other > 0)
            if np.count_nonzero(seen) > 1:
                errors.append(rms_log_error(one[seen], other[seen], free_scale=True))
                ranks.append(spearman(one[seen], other[seen]))
        if not errors:
            return "-", None
        said = f"RMS log error {range_told(errors, '.2f')}, rank correlation {range_told(ranks, '.3f')}"
        return said, max(errors) <= SCALAR_ERROR and min(ranks) >= SCALAR_RANKS

    found = in_each(pairs, judge)
    if found is None:
        return None
    both = commands([*pairs.values(), *(whole[name] for name in pairs)])
    return found._replace(command=both)


def _same_prompts(one: xr.Dataset, other: xr.Dataset) -> bool:
    return one.attrs.get("tokens_sha256") == other.attrs.get("tokens_sha256")


for _condition, _told in (("init", "fresh"), ("pretrained", "pretrained")):
    stated(
        Statement(
            f"chowdhury-objection-surrogate-{_condition}",
            OBJECTION,
            f"The one-pass scalar surrogate is a sound stand-in for the Jacobian norm of {_told} models.",
            f"on the same prompts its RMS log error (best scale) is at most {SCALAR_ERROR:g} and its rank correlation at "
            f"least {SCALAR_RANKS:g} in every model",
            model=f"bundled models, {_told}",
            command=COMMANDS["scalar"],
        ),
        STATED,
    )(partial(_surrogate, _condition))
