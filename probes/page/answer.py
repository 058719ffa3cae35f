"""The answer in five sentences, each built from the numbers of the results at hand.

Where a probe has not been run the sentence names the command that runs it. Ranges go over models; a model that has no such
number (a window too short for a middle, no residual component to remove) is left out and counted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import xarray as xr

from ..claims import VERDICTS, Claim
from ..leakage import resolved
from ..studies.collected import Collected
from ..summary import band, estimate, profiles, rms_log_error, ushape

Results = Mapping[str, xr.Dataset]


def sentences(collected: Collected, claims: Sequence[Claim]) -> list[str]:
    """Five sentences: birth, training, mask against residual stream, position 0, and how the published claims fare."""
    return [
        _birth(collected["jacobian"]),
        _training(collected["jacobian"]),
        _sources(collected["leakage"]),
        _position_zero(collected["bos-swap"], collected["sinks"], collected["trajectory"]),
        _claims(claims),
    ]


def _birth(results: Results) -> str:
    primacy, recency, errors, born = [], [], [], 0
    for ds in results.values():
        curve = _curve(ds, "init")
        if curve is None:
            continue
        born += 1
        shape = ushape(curve)
        if math.isfinite(shape.primacy) and shape.primacy > 0:
            primacy.append(shape.primacy)
            recency.append(shape.recency)
        if "theory_score_path" in ds:
            runs = profiles(ds, "theory_score_path").get("init", [])
            errors.append(rms_log_error(_upto(ds, band([run.mean for run in runs]).centre), curve))
    if not born:
        return "At birth: not measured here (headwater jacobian MODEL)."
    said = "At birth no model's attention reaches back from the last position to the first"
    if primacy:
        said = (
            f"At birth the ends stand out: sensitivity to the first positions is {over(primacy)} times that to the middle, "
            f"to the last position {over(recency)} times ({_of(len(primacy), born)} whose attention reaches back that far)"
        )
    finite = [error for error in errors if math.isfinite(error)]
    if finite:
        said += f"; a theory without fitted parameters gives the profile within {over(finite, '.1%')} (rms log error)"
    return f"{said}."


def _training(results: Results) -> str:
    first, last, count = [], [], 0
    for ds in results.values():
        before, after = _curve(ds, "init"), _curve(ds, "pretrained")
        if before is None or after is None:
            continue
        count += 1
        one, other = ushape(before), ushape(after)
        if all(math.isfinite(x) and x > 0 for x in (one.primacy, other.primacy)):
            first.append((one.primacy, other.primacy))
            last.append((one.recency, other.recency))
    if not first:
        return (
            "After training: not measured here on a model that reaches back to position 0 (headwater jacobian MODEL)."
        )
    moves = ["lowers" if b < a else "raises" for a, b in first], ["raises" if b > a else "lowers" for a, b in last]
    one, other = (next(iter(m)) if len(set(m)) == 1 else "moves" for m in moves)
    courses = [f"from {over(a for a, _ in ends)} to {over(b for _, b in ends)}" for ends in (first, last)]
    return (
        f"Training {one} the first end, {courses[0]} times the middle, and {other} the last, {courses[1]} "
        f"({_of(len(first), count)})."
    )


def _sources(results: Results) -> str:
    if not results:
        return "Absolute position in attention patterns: not measured here (headwater leakage MODEL)."
    mask, total = [], []
    roles: dict[str, list[float]] = {"works against it": [], "adds to it": [], "cannot be told from nothing": []}
    first = next(iter(results.values()))
    name, lags = str(first["band"].values[0]), json.loads(str(first.attrs["options"]))["lags"]
    for ds in results.values():
        at = str(ds["band"].values[0])
        if resolved(ds, "log", at):
            total.append(estimate(ds, "log_form_of_model", part="total", band=at)[0])
            mask.append(estimate(ds, "log_share_of_model", source="mask", band=at)[0])
            value, low, high = estimate(ds, "log_share_of_model", source="residual", band=at)
            against, along, unknown = roles.values()
            (against if high < 0 else along if low > 0 else unknown).append(value)
    if not total:
        return f"Absolute position in attention patterns is within noise at queries {name}: it takes more prompts."
    said = [f"{role} in {_of(len(x), len(results))} ({over(x, '.0%')})" for role, x in roles.items() if x]
    return (
        f"How much attention goes {min(lags)} to {max(lags)} tokens back depends on where the query stands (queries {name}: "
        f"{over(total, '.2g')} nat²); the causal mask accounts for {over(mask, '.0%')} of that, and the residual stream "
        f"{', '.join(said)}."
    )


def _position_zero(swaps: Results, sinks: Results, trajectories: Results) -> str:
    removed, nothing = [], 0
    for ds in swaps.values():
        one = (ds.isel(replacement=0) if "replacement" in ds.dims else ds).isel(band=0)
        value, low, high = estimate(one, "removed_of_model")
        if math.isfinite(low) and math.isfinite(high):
            removed.append(value)
        else:
            nothing += 1
    parts = []
    if removed:
        parts.append(
            f"Swapping the embedding at position 0 removes {over(removed, '.0%')} of what the residual stream does there "
            f"({_of(len(removed), len(swaps))} in which it does anything that these prompts tell from noise)"
        )
    elif swaps:
        parts.append("What the residual stream does there is within noise before position 0 is swapped")
    else:
        parts.append("What position 0 carries: not measured here (headwater bos-swap MODEL)")
    if sinks:
        heads = sum(ds["attends"].size for ds in sinks.values())
        attend = sum(int(ds["selected"].sel(rule="attends").sum()) for ds in sinks.values())
        both = sum(int(ds["selected"].sel(rule="sink-reading").sum()) for ds in sinks.values())
        parts.append(f"{attend} of {heads} heads attend to it by our rule, {both} of them also read it")
    if trajectories:
        same = [float(ds["later_difference"].max()) == 0 for ds in trajectories.values()]
        parts.append(
            f"its own path through the blocks is the same, bit for bit, under any text in {_of(sum(same), len(same))}"
        )
    return "; ".join(parts) + "."


def _claims(claims: Sequence[Claim]) -> str:
    count = {holds: sum(claim.holds is holds for claim in claims) for holds in VERDICTS}
    return (
        f"Of {len(claims)} published claims {count[True] + count[False]} were measured here: {count[True]} hold, "
        f"{count[False]} do not; the other {count[None]} want weights or runs that are not here, and say which command "
        "measures them."
    )


def over(values: Iterable[float], form: str = ".3g") -> str:
    """A range over models, "1.3–2.9"; one number where they agree as printed."""
    numbers = sorted(values)
    percent = " %" * form.endswith("%")
    ends = dict.fromkeys(format(number, form).removesuffix("%") for number in (numbers[0], numbers[-1]))
    return (" to " if numbers[0] < 0 else "–").join(ends) + percent


def _of(some: int, every: int) -> str:
    return f"{some} of {every} models" if every != 1 else "one model" if some else "not this model"


def _curve(ds: xr.Dataset, condition: str) -> np.ndarray | None:
    runs = profiles(ds).get(condition)
    return None if runs is None else _upto(ds, band([run.mean for run in runs]).centre)


def _upto(ds: xr.Dataset, curve: np.ndarray) -> np.ndarray:
    """Over the positions up to the query."""
    options = ds.attrs.get("options")
    return curve if options is None else curve[: int(json.loads(str(options))["query"]) + 1]
