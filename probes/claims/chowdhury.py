"""Rules for [Chowdhury], arXiv 2603.10123, "Lost in the Middle at Birth", and two objections raised to it in public."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import xarray as xr

from ..results.curves import rms_log_error, smooth, spearman
from ..results.folder import Collected
from ..results.statistics import Interval, jackknifed, units
from ..results.tables import number, range_told
from ..results.theory_map import Row
from ..results.ushape import SHORTEST
from ..theory.cesaro import cesaro_bins
from .claim import Judged
from .readings import (
    alike,
    both_above,
    courses,
    ends_told,
    numbered,
    of_profile,
    of_profiles,
    on_map,
    place_told,
    places,
    primacy_by_depth,
    prompted,
    root_mean_square,
    roughly,
    shaped,
    strength_told,
)
from .rules import (
    Results,
    Tell,
    Test,
    Told,
    above,
    below,
    combinator,
    every,
    in_each,
    in_real,
    judging,
    near,
    nothing,
    of_models,
    told,
)

USUAL = ("GPT-2", "Qwen2.5-0.5B")
NEAR = 0.05  # of a d σ² in a map
EDGE = 0.05  # share of the text at either end in which a trough is no valley


# ----------------------------------------------------------------------------------------------- the U at initialization


def _u(row: Row, factor: float) -> Test:
    return both_above((roughly(row.shape.primacy), roughly(row.shape.recency)), factor)


def _u_told(row: Row, factor: float) -> Told:
    return f"primacy {number(row.shape.primacy)}, recency {number(row.shape.recency)}", _u(row, factor)


def u_of_configuration(collected: Collected, configuration: str, factor: float) -> Judged | None:
    found = {place_told(row): _u_told(row, factor) for row in places(collected, name=configuration)}
    return on_map(collected, found, f"fresh {configuration}")


def u_under_window(collected: Collected, factor: float) -> Judged | None:
    windowed = sorted((row for row in places(collected) if row["window"]), key=lambda row: row["window"])
    found = {place_told(row): _u_told(row, factor) for row in windowed}
    return on_map(collected, found, f"{len(found)} configurations")


def u_everywhere(collected: Collected, factor: float, factors: Sequence[float]) -> Judged | None:
    found = places(collected, window=0)
    least = [min(row.shape.primacy, row.shape.recency) for row in found]
    said = ", ".join(f"{sum(one >= limit for one in least)} of {len(found)} at {limit:g}" for limit in factors)
    said = f"both ends stand above the middle {said} times"
    without = [row["strength"] for row, one in zip(found, least, strict=True) if not one >= factors[-1]]
    said += f"; below {factors[-1]:g} from d σ² = {min(without):.2g} on" if without else ""
    tests = numbered(_u(row, factor) for row in found)
    return on_map(collected, tests, f"{len(found)} fresh configurations", said)


@of_models("jacobian")
def u_of_models(ds: xr.Dataset, condition: str, factor: float) -> Told | None:
    """Of the models' own profiles, of one model alone if it is named."""
    if not shaped(ds, condition):
        return None
    said, ends = ends_told(ds, condition)
    return said, both_above(ends, factor)


# -------------------------------------------------------------------------------------------------- with and without RoPE


def _ranks(one: np.ndarray, other: np.ndarray, same: float) -> Told:
    """Rank correlation of the smoothed curves, and of the curves as they are.

    The first decides: what single texts and weights make of single positions is no shape.
    """
    smoothed, plain = spearman(smooth(one), smooth(other)), spearman(one, other)
    said = f"{number(smoothed, '.3f')} (not smoothed: {number(plain, '.3f')})"
    return said, near(Interval(smoothed, smoothed, smoothed), same, correlation=True)


def same_without_rope(collected: Collected, same: float, strength: float | None = None) -> Judged | None:
    """Places of the map without rotation, each against its twin that has it; at one logit scale if it is given."""
    rotated = [row for row in places(collected) if row["rope"]]
    found: dict[str, Told] = {}
    for row in places(collected, rope=False):
        twins = [twin for twin in rotated if alike(row, [twin])]
        if twins and (strength is None or abs(row["strength"] - strength) < NEAR):
            found[strength_told(row["strength"])] = _ranks(row["measured"], twins[-1]["measured"], same)
    return on_map(collected, found, "fresh models with and without RoPE")


def same_without_rope_bundled(collected: Collected, same: float) -> Judged | None:
    def tell(ds: xr.Dataset) -> Told | None:
        both = list(zip(prompted(ds, "init"), prompted(ds, "init-nope"), strict=False))
        if not both:
            return None
        whole = [one for one in both if np.all(np.isfinite(one))]
        found = of_profiles(whole, lambda a, b: spearman(smooth(a), smooth(b)), units(ds))
        return told(found, ".3f"), near(found, same, correlation=True)

    return in_each({**collected["jacobian"], **collected["no-rope"]}, tell)


# ------------------------------------------------------------------------------------------------ N^L against measurement


@combinator
def of_usual(collected: Collected, tell: Callable[..., Told]) -> Judged | None:
    """For what a place of the map says of fresh GPT-2 and Qwen2.5-0.5B configurations."""
    found = {name: tell(row) for name in USUAL for row in places(collected, name=name)}
    return on_map(collected, found, f"fresh {', '.join(found)} configurations")


@of_usual
def cesaro_ranks(row: Row, same: float) -> Told:
    return _ranks(row["cesaro"], row["measured"], same)


def _exact(error: float, most: float) -> Told:
    return number(error), below(roughly(max(error, 1e-12)), float(np.log(most)))


@of_usual
def cesaro_exact(row: Row, exact: float) -> Told:
    return _exact(row.cesaro_error, exact)


@of_usual
def continuous_limit(row: Row, exact: float) -> Told:
    density = cesaro_bins(int(row["length"]), int(row["blocks"]), alpha=float(row["alpha"]))
    return _exact(rms_log_error(density, row["measured"], free_scale=True), exact)


def _errors(measured: np.ndarray, *theories: np.ndarray) -> list[float]:
    """RMS log errors of theories' shapes, where all of them reach."""
    seen = np.all(np.stack([measured, *theories]) > 0, axis=0)
    if np.count_nonzero(seen) < 2:
        return [np.nan] * len(theories)
    return [rms_log_error(curve[seen], measured[seen], free_scale=True) for curve in theories]


def powers_on_map(collected: Collected, powers: str, amplitudes: str) -> Judged | None:
    """Whether the theory that adds up powers is nearer than the one that adds up amplitudes, at every place."""
    there = [row for row in places(collected) if powers in row and amplitudes in row]
    errors = [_errors(row["measured"], row[powers], row[amplitudes]) for row in there]
    errors = [both for both in errors if np.all(np.isfinite(both))]
    nearer = [one < other for one, other in errors]  # of the same profile
    own, others = (range_told([both[at] for both in errors]) for at in (0, 1))
    said = f"powers nearer at {sum(nearer)} of {len(errors)} places: {own}, amplitudes {others}"
    return on_map(collected, numbered(nearer), f"{len(errors)} fresh configurations", said)


@of_models("theory", "theory_score_path", "theory_cesaro")
def powers_in_models(ds: xr.Dataset, condition: str) -> Told | None:
    """The same of models' own profiles."""
    both = [prompted(ds, condition, name) for name in ("sensitivity", "theory_score_path")]
    if not both[0]:
        return None
    cesaro = ds["theory_cesaro"]
    fitted = (cesaro.sel(condition=condition) if "condition" in cesaro.dims else cesaro).values.astype(float)

    def ratio(measured: np.ndarray, kernel: np.ndarray) -> float:
        one, other = _errors(measured, kernel, fitted[: len(measured)])
        return float(np.log(one / other)) if one > 0 and other > 0 else np.nan

    found = of_profiles(list(zip(*both, strict=True)), ratio, units(ds), root_mean_square)
    return f"error {told(found, change=np.exp)} times that of N^L", below(found, 0)


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


@of_usual
def primacy_tail(row: Row, rising: float) -> Told:
    rho, (by_logarithm, by_place) = _climb(row), _misfits(row)
    said = f"{number(rho, '.3f')}, errors {number(by_logarithm, '.1%')} and {number(by_place, '.1%')}"
    return f"{said}, primacy {number(row.shape.primacy)}", rho >= rising and by_logarithm < by_place / 2


def primacy_tail_everywhere(collected: Collected, rising: float) -> Judged | None:
    found = places(collected, window=0)
    ranks = [_climb(row) for row in found]
    below_it = [row["strength"] for row, rho in zip(found, ranks, strict=True) if not rho >= rising]
    said = f"{len(found) - len(below_it)} of {len(found)} places; {range_told(ranks, '.2f')}"
    said += f"; below from d σ² = {min(below_it):.2g} on" if below_it else ""
    tests = numbered(bool(rho >= rising) for rho in ranks)
    return on_map(collected, tests, f"{len(found)} fresh configurations", said)


@of_usual
def recency_isolated(row: Row, isolated: float) -> Told:
    curve = row["measured"]
    ratio = float(curve[-1] / np.mean(curve[-1 - max(1, len(curve) // 20) : -1]))
    return f"{number(ratio)} times its neighbours", above(roughly(ratio), float(np.log(isolated)))


def recency_order_one(collected: Collected, steady: float) -> Judged | None:
    lengths = places(collected, group="length")
    same = [row for row in places(collected, group="depth") if alike(row, lengths, "length")]
    found: dict[str, Told] = {}
    spans: list[float] = []
    for strength, heights in courses([*lengths, *same], "length", lambda row: float(row["measured"][-1])).items():
        ratio = max(heights.values()) / min(heights.values())
        found[strength_told(strength)] = f"factor {ratio:.2f}", below(roughly(ratio), float(np.log(steady)))
        spans += heights
    return on_map(collected, found, f"fresh models, T = {min(spans)} to {max(spans)}" if spans else "")


def residual_makes_recency(collected: Collected) -> Judged | None:
    scaled = places(collected, group="residual")
    rotated = [row for row in places(collected, rope=True) if alike(row, scaled, "residual_scale")]
    found: dict[str, Told] = {}
    for strength, by_scale in courses(rotated, "residual_scale", lambda row: row.shape.recency).items():
        said = ", ".join(f"{number(one)} (branches times {scale:g})" for scale, one in by_scale.items())
        steps = [_rises(stronger, weaker) for weaker, stronger in pairwise(by_scale.values())]
        found[f"recency at {strength_told(strength)}"] = said, every(steps)
    return on_map(collected, found, "fresh models with scaled branches")


def _rises(before: float, after: float) -> Test:
    """From one place of the map to another, each known within a tenth."""
    return above(roughly(after / before), 0.0)


@combinator
def of_depths(collected: Collected, tell: Callable[..., Told]) -> Judged | None:
    """For what primacy by depth says, ascending, at the smallest logit scale with several depths."""
    for depths in primacy_by_depth(collected).values():
        said = ", ".join(f"{number(1 / one, '.2g')} at {n} blocks" for n, one in depths.items())
        more, test = tell(depths)
        told = f"middle / beginning {said}{more}"
        return on_map(collected, {"": ("", test)}, "fresh models of several depths", told)
    return None


@of_depths
def dead_zone_deepens(depths: dict[Any, float]) -> Told:
    return "", _rises(depths[min(depths)], depths[max(depths)])


@of_depths
def dead_zone_factorial(depths: dict[Any, float], order: float) -> Told:
    few, many = min(depths), max(depths)
    factorials = float(np.sum(np.log(np.arange(few, many, dtype=float))))  # ln (many-1)!/(few-1)!
    fell = float(np.log(depths[many] / depths[few]))
    off = float(np.exp(min(abs(fell - factorials), 700)))
    said = f": falls {np.exp(fell):.3g}-fold, the factorials 10^{factorials / np.log(10):.1f}-fold"
    return said, below(roughly(off), float(np.log(order)))


# ------------------------------------------------------------------------------------------------------- the score path


@of_models("theory", "value")
def score_path_vanishes(ds: xr.Dataset, condition: str, share: float) -> Told | None:
    """By the value path's share of the norm."""
    both = [prompted(ds, condition, name) for name in ("sensitivity", "value")]
    if not both[1]:
        return None

    def of_value(whole: np.ndarray, value: np.ndarray) -> float:
        seen = whole > 0
        return float(np.mean(value[seen] / whole[seen])) if np.any(seen) else np.nan

    found = of_profiles(list(zip(*both, strict=True)), of_value, units(ds), root_mean_square)
    return f"value path {told(found, '.3f')}", above(found, share)


def score_path_vanishes_on_map(collected: Collected, share: float, usual: bool) -> Judged | None:
    """In the configurations of `USUAL`, or in the map's other ones."""
    found: dict[str, Told] = {}
    for row in places(collected, group="model"):
        own = row.value_share
        if np.isfinite(own) and (row["name"] in USUAL) == usual:
            found[f"{row['name']} ({strength_told(row['strength'])})"] = f"value path {own:.3f}", own >= share
    return on_map(collected, found, f"fresh {', '.join(found)}")


# ---------------------------------------------------------------------------------------------------------- after training


def _depth(curve: np.ndarray) -> float:
    """Logarithm of the least of the smoothed curve's first and last 5 %, against the least between."""
    if len(curve) < SHORTEST:
        return np.nan
    values, edge = smooth(curve), max(1, int(EDGE * len(curve)))
    outer, inner = min(values[:edge].min(), values[-edge:].min()), values[edge:-edge].min()
    return float(np.log(outer / inner)) if min(outer, inner) > 0 else np.nan


@of_models("jacobian")
def valley_persists(ds: xr.Dataset) -> Told | None:
    if not shaped(ds, "pretrained"):
        return None
    deep = of_profile(ds, "pretrained", _depth)
    return f"ends {told(deep, change=np.exp)} times the least between", above(deep, 0)


@combinator
def of_training(collected: Collected, tell: Tell) -> Judged | None:
    """For what one model's elasticities say, fresh seeds' and pretrained, on the same prompts."""

    def of_model(ds: xr.Dataset) -> Told | None:
        if not shaped(ds, "pretrained", "elasticity"):
            return None
        fresh, trained = (
            [values for values in prompted(ds, condition, "elasticity") if np.all(np.isfinite(values) & (values > 0))]
            for condition in ("init", "pretrained")
        )
        return tell(ds, fresh, trained[0]) if fresh and trained else None

    return in_real(collected["jacobian"], of_model)


@of_training
def baseline_persists(ds: xr.Dataset, fresh: list[np.ndarray], trained: np.ndarray, alike: float) -> Told:
    def rank(part: slice, trained: np.ndarray, *fresh: np.ndarray) -> float:
        before = smooth(np.exp(np.mean(np.log(np.stack(fresh)), axis=0)))
        rho = spearman(smooth(trained)[part], before[part])
        return float(np.arctanh(np.clip(rho, -0.999999, 0.999999)))  # of which errors are nearly normal

    middle = trained.shape[-1] // 2
    parts = (slice(None), slice(middle), slice(middle, None))
    found, first, second = (of_profiles([[trained, *fresh]], partial(rank, part), units(ds)) for part in parts)
    halves = f"halves {np.tanh(first.value):.2f}, {np.tanh(second.value):.2f}"
    return f"{told(found, '.2f', np.tanh)} ({halves})", above(found, float(np.arctanh(alike)))


def _spikes(values: np.ndarray) -> np.ndarray:
    """What a moving average leaves of log profiles [prompt, position] without both ends' 5 %."""
    edge = max(1, int(EDGE * values.shape[1]))
    logs = np.log(values)
    return (logs - np.stack([smooth(one) for one in logs]))[:, edge:-edge]


def _averaged(values: np.ndarray) -> bool:
    """Whether a moving average takes in more than the position itself."""
    return not np.array_equal(smooth(values[0]), values[0])


@of_training
def training_adds_spikes(ds: xr.Dataset, fresh: list[np.ndarray], trained: np.ndarray) -> Told:
    if not _averaged(trained):
        return "-", None
    before, after = (np.mean([np.log(_spikes(one).var(axis=1)) for one in some], axis=0) for some in (fresh, [trained]))
    found = jackknifed(lambda values: float(values.mean()), after - before, units(ds))
    said = f"variance {np.exp(after.mean()):.2g} after, {np.exp(before.mean()):.2g} before: "
    return f"{said}{told(found, change=np.exp)} times", above(found, 0)


@of_training
def spikes_are_content(ds: xr.Dataset, _: list[np.ndarray], trained: np.ndarray, margin: float) -> Told:
    def mean_correlation(spikes: np.ndarray) -> float:
        if len(spikes) < 2:
            return np.nan
        normed = (spikes - spikes.mean(1, keepdims=True)) / spikes.std(1, keepdims=True)
        return float((len(normed) * (normed.mean(0) ** 2).mean() - 1) / (len(normed) - 1))  # over pairs of prompts

    if not _averaged(trained):
        return "-", None
    found = jackknifed(mean_correlation, _spikes(trained), units(ds))
    return told(found, ".2f"), nothing(found, margin)


# ---------------------------------------------------------------------------------------------------- one-pass surrogate


def surrogate(collected: Collected, condition: str, error: float, ranks: float) -> Judged | None:
    """Whether the scalar probe stands in for the Jacobian norm, on the same prompts."""
    kinds = ("scalar", "scalar-init") if condition == "init" else ("scalar",)
    scalar = {name: ds for kind in kinds for name, ds in collected[kind].items() if prompted(ds, condition)}
    whole = {name: ds for name, ds in collected["jacobian"].items() if prompted(ds, condition)}
    both = {name: {"scalar": scalar[name], "whole": whole[name]} for name in scalar if name in whole}

    def rank(one: np.ndarray, other: np.ndarray) -> float:
        seen = (one > 0) & (other > 0)
        return spearman(one[seen], other[seen]) if np.count_nonzero(seen) > 1 else np.nan

    def tell(results: Results) -> Told | None:
        if len({ds.attrs.get("tokens_sha256") for ds in results.values()}) > 1:
            return None
        found = list(zip(*(prompted(results[kind], condition) for kind in ("scalar", "whole")), strict=False))
        apart = of_profiles(
            found, lambda one, other: _errors(other, one)[0], units(results["scalar"]), root_mean_square
        )
        rho = of_profiles(found, rank, units(results["scalar"]), root_mean_square)
        said = f"RMS log error {told(apart, '.2f')}, rank correlation {told(rho, '.3f')}"
        return said, every([below(apart, error), above(rho, ranks)])

    return judging(condition)(both, tell)
