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

SAME = 1.1  # factor up to which nothing is said to have changed


def sentences(collected: Collected, claims: Sequence[Claim]) -> list[str]:
    """Five sentences: mask against residual stream, position 0, birth, training, and how the published claims fare."""
    return [
        _sources(collected["leakage"]),
        _position_zero(collected["bos-swap"], collected["sinks"], collected["trajectory"]),
        _birth(collected["jacobian"]),
        _training(collected["jacobian"]),
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
            f"At birth the last position's output is most sensitive to the ends of the text: to the first positions "
            f"{over(primacy)} times as much as to the middle, to the last {over(recency)} times (in "
            f"{_of(len(primacy), born, 'those whose attention reaches back that far')})"
        )
    finite = [error for error in errors if math.isfinite(error)]
    if finite:
        said += f"; a theory without fitted parameters gives the profile within {over(finite, '.1%')} (rms log error)"
    return f"{said}."


def _training(results: Results) -> str:
    factors: dict[str, list[float]] = {"the middle": [], "the first positions": [], "the last one": []}
    first, last, count = [], [], 0
    for ds in results.values():
        before, after = _curve(ds, "init"), _curve(ds, "pretrained")
        if before is None or after is None:
            continue
        count += 1
        one, other = ushape(before), ushape(after)
        if all(math.isfinite(x) and x > 0 for x in (one.primacy, other.primacy)):
            first.append(other.primacy)
            last.append(other.recency)
            middle = other.middle / one.middle
            grown = (middle, middle * other.primacy / one.primacy, middle * other.recency / one.recency)
            for found, factor in zip(factors.values(), grown, strict=True):
                found.append(factor)
    if not first:
        return (
            "After training: not measured here on a model that reaches back to position 0 (headwater jacobian MODEL)."
        )
    said = [f"sensitivity to {what} {_changed(found)}" for what, found in factors.items()]
    return (
        f"After training, {', '.join(said)}, so that the first positions now stand {over(first)} times above "
        f"the middle and the last {over(last)} times (in {_of(len(first), count)})."
    )


def _changed(factors: Sequence[float]) -> str:
    """What became of something in all models; a tenth up or down is no change."""
    if max(factors) < 1 / SAME:
        return f"falls to {over(factors, '.2g')} of what it was"
    if min(factors) > SAME:
        return f"rises {over(factors, '.2g')}-fold"
    if min(factors) >= 1 / SAME and max(factors) <= SAME:
        return "stays as it was"
    return f"becomes {over(factors, '.2g')} times what it was"


def _sources(results: Results) -> str:
    if not results:
        return "Absolute position in attention patterns: not measured here (headwater leakage MODEL)."
    mask, total = [], []
    against, along, unknown = [], [], 0
    first = next(iter(results.values()))
    name, lags = str(first["band"].values[0]), json.loads(str(first.attrs["options"]))["lags"]
    for ds in results.values():
        at = str(ds["band"].values[0])
        if resolved(ds, "log", at):
            total.append(estimate(ds, "log_form_of_model", part="total", band=at)[0])
            mask.append(estimate(ds, "log_share_of_model", source="mask", band=at)[0])
            value, low, high = estimate(ds, "log_share_of_model", source="residual", band=at)
            if high < 0:
                against.append(-value)
            elif low > 0:
                along.append(value)
            else:
                unknown += 1
    if not total:
        return f"Absolute position in attention patterns is within noise at queries {name}: it takes more prompts."
    said = []
    if against:
        said.append(f"takes {over(against, '.0%')} off again in {_of(len(against), len(results))}")
    if along:
        said.append(f"adds {over(along, '.0%')} in {_of(len(along), len(results))}")
    if unknown:
        said.append(f"cannot be told from nothing in {_of(unknown, len(results))}")
    return (
        f"Where a query stands shows in its attention ({over(total, '.2g')} nat² in the log-weights of the tokens "
        f"{min(lags)} to {max(lags)} back, queries {name}), and that comes from the causal mask: it accounts for "
        f"{over(mask, '.0%')}, while the residual stream {', '.join(said)}."
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
            f"Another embedding at position 0 removes {over(removed, '.0%')} of what the residual stream does to these "
            f"queries (in {_of(len(removed), len(swaps), 'those where these prompts show that it does anything')})"
        )
    elif swaps:
        parts.append("What the residual stream does to these queries is within noise before position 0 is swapped")
    else:
        parts.append("What position 0 carries: not measured here (headwater bos-swap MODEL)")
    if sinks:
        heads = sum(ds["attends"].size for ds in sinks.values())
        attend = sum(int(ds["selected"].sel(rule="attends").sum()) for ds in sinks.values())
        both = sum(int(ds["selected"].sel(rule="sink-reading").sum()) for ds in sinks.values())
        reading = "" if not attend else f", {both or 'none'} of which also read{'' if both > 1 else 's'} what is there"
        parts.append(f"{attend or 'none'} of {heads} heads attend{'' if attend > 1 else 's'} to position 0{reading}")
    if trajectories:
        same = [float(ds["later_difference"].max()) == 0 for ds in trajectories.values()]
        parts.append(
            f"its own path through the blocks is the same, bit for bit, under any text (in {_of(sum(same), len(same))})"
        )
    return "; ".join(parts) + "."


def _claims(claims: Sequence[Claim]) -> str:
    count = {holds: sum(claim.holds is holds for claim in claims) for holds in VERDICTS}
    return (
        f"Of {len(claims)} statements (published claims, objections to them, reviewers' requests) "
        f"{count[True] + count[False]} were judged on these results: {count[True]} hold, {count[False]} do not; the other "
        f"{count[None]} want weights or runs that are not here, and say which command measures them."
    )


def over(values: Iterable[float], form: str = ".3g") -> str:
    """A range over models, "1.3–2.9"; one number where they agree as printed."""
    numbers = sorted(values)
    percent = " %" * form.endswith("%")
    ends = dict.fromkeys(format(number, form).removesuffix("%") for number in (numbers[0], numbers[-1]))
    return (" to " if numbers[0] < 0 else "–").join(ends) + percent


def _of(some: int, every: int, which: str = "") -> str:
    """Some of the models, `which`; a model that is alone needs no telling from others."""
    if every == 1:
        return "one model" if some else "not this model"
    return f"{some} of {every} models{f', {which}' if which else ''}"


def _curve(ds: xr.Dataset, condition: str) -> np.ndarray | None:
    runs = profiles(ds).get(condition)
    return None if runs is None else _upto(ds, band([run.mean for run in runs]).centre)


def _upto(ds: xr.Dataset, curve: np.ndarray) -> np.ndarray:
    """Over the positions up to the query."""
    options = ds.attrs.get("options")
    return curve if options is None else curve[: int(json.loads(str(options))["query"]) + 1]
