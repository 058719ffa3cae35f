"""Rules for [Ruscio], arXiv 2606.06160, "Where does Absolute Position come from in decoder-only Transformers?"."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import xarray as xr

from ..measures.leakage import null_fails, overflow, resolved
from ..measures.roles import LARGE, REACTS
from ..results.curves import spearman
from ..results.folder import Collected
from ..results.statistics import Interval, apart, units
from ..results.tables import interval, number, variance
from .claim import Judged
from .rules import (
    Results,
    Summed,
    Tell,
    Test,
    Tested,
    Told,
    above,
    below,
    combinator,
    estimated,
    every,
    having,
    in_real,
    listed,
    near,
    never_refuted,
    nothing,
    of_models,
    of_runs,
    over_training,
    some,
    told,
    variances,
)

STREAM = "steady_stream_of_model"  # V(X), the constant sink on the mask's side
COMPONENTS: dict[str, tuple[str, dict[str, str]]] = {
    "M": ("log_form_of_model", {"part": "mask"}),
    "X": (STREAM, {}),
    "X with the constant sink": ("log_stream_of_model", {}),
}
LEAKING = ("log_form_of_model", "log_source_of_model", STREAM)
SHAPLEY = ("steady_source_of_model", "log_stream_by_block", "log_sink_by_block")  # what shares are resolved by
leaking = partial(of_models, "leakage", *LEAKING)


def _early(ds: xr.Dataset) -> str:
    return str(ds["band"].values[0])


def _at_early(ds: xr.Dataset, variable: str, **where: str) -> Interval:
    return estimated(ds, variable, band=_early(ds), **where)


# -------------------------------------------------------------------------------------------------------- the two sources


@leaking()
def absolute_position_leaks(ds: xr.Dataset) -> Told:
    total = _at_early(ds, "log_form_of_model", part="total")
    null = float(ds["null_shuffled"].sel(band=_early(ds))) if "null_shuffled" in ds else 0.0
    return f"{variance(*total[:3])} nat² at queries {_early(ds)} (shuffled {number(null)})", above(total, null)


@leaking()
def components(ds: xr.Dataset, parts: Sequence[str]) -> Told | None:
    """Components of leakage, each of which has to be above 0."""
    if not all(COMPONENTS[part][0] in ds for part in parts):
        return None
    found = {part: _at_early(ds, variable, **where) for part in parts for variable, where in [COMPONENTS[part]]}
    said = ", ".join(f"V({part[0]}) {variance(*one[:3])} nat²" for part, one in found.items())
    return said, every(above(one, 0) for one in found.values())


@leaking(*SHAPLEY)
def residual_stream_adds(ds: xr.Dataset) -> Told:
    if not resolved(ds, "log", _early(ds)):
        return "not resolved", None
    own = _at_early(ds, "steady_source_of_model", source="residual")
    return f"{told(own)} of {told(_at_early(ds, 'log_form_of_model', part='total'))} nat²", above(own, 0)


# ---------------------------------------------------------------------------------------------------- controlled training

BY_BLOCK = "steady_stream_by_block"
trained = partial(of_runs, "leakage", *LEAKING)


def _of_runs(results: Results, variable: str, **where: str) -> list[float]:
    """A variable at early queries, of each run."""
    return [float(ds[variable].sel({"band": _early(ds), **where})) for ds in results.values()]


@trained()
def stream_rises(found: list[Results], models: Sequence[str]) -> Summed:
    """Whether the residual component rises from model to model."""
    values = [_of_runs(one, STREAM) for one in found]
    steps = [above(over_training(after, before), 0) for before, after in pairwise(values)]
    said = ", ".join(f"{name} {variances(own)}" for name, own in zip(models, values, strict=True))
    return f"V(X) {said} nat²", steps


@trained()
def both_in_all_architectures(found: list[Results], models: Sequence[str]) -> Summed:
    said, tests = [], []
    for name, one in zip(models, found, strict=True):
        own = {part: _of_runs(one, variable, **where) for part in "MX" for variable, where in [COMPONENTS[part]]}
        said.append(f"{name} " + ", ".join(f"V({part}) {variances(values)}" for part, values in own.items()))
        tests += [above(over_training(values), 0) for values in own.values()]
    return f"{'; '.join(said)} nat²", tests


@trained(BY_BLOCK)
def window_grows_with_depth(found: list[Results]) -> Summed | None:
    blocks = [ds[BY_BLOCK].sel(band=_early(ds)).values for ds in found[0].values()]
    if len(blocks[0]) < 2:
        return None
    ranks = [spearman(np.arange(len(one), dtype=float), one) for one in blocks]
    steps = [float(one[-1] - one[0]) for one in blocks]
    said = f"rank correlation {listed(ranks)}; last block less first {listed(steps, '.3g')} nat²"
    return said, [above(over_training(values), 0) for values in (ranks, steps)]


# ------------------------------------------------------------------------------------------------------ position 0 swapped


def _replacements(ds: xr.Dataset) -> list[tuple[str, xr.Dataset]]:
    if "replacement" in ds.dims:
        return [(str(name), ds.sel(replacement=name)) for name in ds["replacement"].values]
    return [(str(ds.attrs.get("replacement", "replaced")), ds)]


def _removed(ds: xr.Dataset, band: str, variable: str = "removed_of_model") -> Interval | None:
    """The fraction with its interval; None where it takes more prompts to know it."""
    found = estimated(ds, variable, band=band)
    return found if np.all(np.isfinite(found[:3])) else None


def _share_told(found: Interval | None) -> str:
    return told(found, ".0%") if found else "?"


@combinator
def of_swaps(
    collected: Collected, tell: Tell, first: str, folder: str = "bos-swap", only: str | None = None
) -> Judged | None:
    """For what one result of a swap says, in prompts that begin with `first`, "bos" or "none" (text); "" for any."""
    found = {name: ds for name, ds in having(collected[folder], "removed_of_model").items() if only in (None, name)}
    return in_real({name: ds for name, ds in found.items() if first in ("", ds.attrs.get("first_policy"))}, tell)


@of_swaps
def removes(ds: xr.Dataset, variable: str, fraction: float) -> Told | None:
    """Whether every replacement removes this fraction at early queries; 0: anything at all."""
    if variable not in ds:
        return None
    found = {name: _removed(one, _early(one), variable) for name, one in _replacements(ds)}
    said = ", ".join(f"{_share_told(one)} ({name})" for name, one in found.items())
    return said, every(near(one, fraction) if fraction else above(one, 0) for one in found.values() if one)


@of_swaps
def protocol_replacement(ds: xr.Dataset) -> Told:
    found = {name: _removed(one, _early(one)) for name, one in _replacements(ds)}
    said = ", ".join(f"{name} {_share_told(one)}" for name, one in found.items())
    known = [one for one in found.values() if one]
    if len(known) < 2:
        return said, None
    middle = float(np.mean([one.value for one in known]))
    return said, every(near(one, middle) for one in known)


@of_swaps
def protocol_band(ds: xr.Dataset) -> Told:
    said: list[str] = []
    tests: list[Test] = []
    for name, one in _replacements(ds):
        found = {str(band): _removed(one, str(band)) for band in one["band"].values}
        said.append(", ".join(f"{band}: {_share_told(x)}" for band, x in found.items()) + f" ({name})")
        first, *later = found.values()
        tests += [below(apart(first, x), 0) for x in later if x and first]
    return "; ".join(said), every(tests)


def _fraction(one: xr.Dataset, name: str, **where: str) -> float | None:
    """1 - after / before, means over blocks; None where there is nothing above 0 to take a fraction of."""
    if f"{name}_before" not in one:
        return None
    before, after = (float(one[f"{name}_{when}"].sel(where).mean()) for when in ("before", "after"))
    return 1 - after / before if before > 0 else None


FORMS = {  # other things that "residual component" may be read as: variable, place
    "V(X) without the constant sink": ("residual_steady", {}),
    "logits' V(S)": ("leakage", {"part": "logits"}),
    "denominators' V(D)": ("leakage", {"part": "denominator"}),
    "Shapley value of the log form": ("source", {"source": "residual"}),
    "Shapley value of the weight form": ("weight", {"source": "residual"}),
}


@of_swaps
def protocol_form(ds: xr.Dataset) -> Told:
    all_of_them = _replacements(ds)
    own = {name: _removed(one, _early(one)) for name, one in all_of_them}
    said = ["V(X) " + ", ".join(f"{_share_told(x)} ({name})" for name, x in own.items())]
    tests = []
    for form, (variable, where) in FORMS.items():
        fractions = {name: _fraction(one, variable, band=_early(one), **where) for name, one in all_of_them}
        known = {name: fraction for name, fraction in fractions.items() if fraction is not None}
        said.append(f"{form} {', '.join(f'{x:.0%} ({name})' for name, x in known.items()) or 'not above 0 before'}")
        tests += [near(x, fraction) for name, fraction in known.items() if (x := own[name])]
    return "; ".join(said), every(tests)


@of_swaps
def sinks_stabilize(ds: xr.Dataset) -> Told | None:
    names = [f"leakage_{name}" for name in ("before", "after", "change", "change_low", "change_high")]
    if not set(names) <= set(ds):
        return None
    said, tests = [], []
    for name, one in _replacements(ds):
        # Of single blocks alone there are intervals; their mean's is no wider than the mean of theirs.
        at = one[names].sel(part="total", band=_early(one)).mean()
        before, after, *change = (float(at[of]) for of in names)
        said.append(f"{variance(before)} to {variance(after)} nat² ({name})")
        tests.append(above(Interval(*change), 0))
    return ", ".join(said), every(tests)


# ----------------------------------------------------------------------------------------------- position 0 and its readers

FOLLOWED = ("later_difference", "cosine")


@of_models("trajectory", *FOLLOWED)
def position_0_closed(ds: xr.Dataset) -> Told:
    later = float(ds["later_difference"].max())
    return f"largest change by other text {later:.3g}", later == 0


@of_models("trajectory", *FOLLOWED)
def fingerprint_constant(ds: xr.Dataset) -> Told | None:
    return position_0_closed.tell(ds.sel(first="bos")) if "bos" in ds["first"].values else None


@of_models("trajectory", *FOLLOWED)
def fingerprint_varies(ds: xr.Dataset, apart: float) -> Told:
    at = ds.isel(place=0, layer=-1)
    found = Interval(*(float(at[name]) if name in at else np.nan for name in ("cosine", "cosine_low", "cosine_high")))
    return f"cosine {told(found, '.2f')} (90 % of pairs)", below(found, apart)


def _heads_above(ds: xr.Dataset, name: str, threshold: float) -> tuple[str, Tested]:
    """Whether a number of heads is above a threshold in some head; and how many are, surely or not, with the largest.

    A threshold of ours can confirm what a source says, which gives none, and not refute it.
    """
    low, high = (ds[f"{name}_{end}"].values.ravel() for end in ("low", "high"))
    values, freedom = ds[name].values.ravel(), len(np.unique(units(ds))) - 1 if "prompt" in ds.sizes else np.inf
    tests = [
        above(Interval(*map(float, one))._replace(freedom=float(freedom)), threshold)
        for one in zip(values, low, high, strict=True)
        if np.isfinite(one).all()
    ]
    first = int(np.nanargmax(values))
    said = (
        f"{int((values > threshold).sum())} of {values.size} heads ({int((low > threshold).sum())} surely), "
        f"at most {interval(values[first], low[first], high[first])}"
    )
    return said, never_refuted(some(tests))


@of_models("sinks", "written", "written_low")
def sink_reading_heads(ds: xr.Dataset) -> Told:
    said, test = _heads_above(ds, "written", LARGE)
    if "effect" in ds and np.isfinite(ds["effect"]).any():
        said += f"; largest effect on the next token {number(ds['effect'].max())} nat"
    return said, test


@of_models("sinks", "reacts", "reacts_low")
def heads_react(ds: xr.Dataset) -> Told:
    return _heads_above(ds, "reacts", REACTS)


# ---------------------------------------------------------------------------------------------------- the channels isolated


@leaking("log_neither", "weight_source_of_model", "weight_form_of_model", "weight_share_of_model", "log_sink_by_block")
def isolation_design(ds: xr.Dataset, rounding: float, sums: float) -> Told:
    neither = float(np.abs(ds["log_neither"]).max())
    parts = ds["weight_source_of_model"].sel(band=_early(ds))
    whole = float(ds["weight_form_of_model"].sel(cell="both", band=_early(ds)))
    off = abs(float(parts.sum()) - whole) / max(float(np.abs(parts).max()), abs(whole))
    if overflow(ds).sel(band=_early(ds)).any():  # the parts' sum says nothing
        return f"both off {neither:.1g} nat²; weights without the mask overflow", None
    shares = "shares not resolved"
    if resolved(ds, "weight", _early(ds)):
        of_source = {one: _at_early(ds, "weight_share_of_model", source=one) for one in map(str, ds["source"].values)}
        shares = ", ".join(f"{source} {_share_told(share)}" for source, share in of_source.items())
    return f"both off {neither:.1g} nat², sum off by {off:.1g}; {shares}", neither < rounding and off < sums


@leaking(*SHAPLEY)
def isolation_mask_dominates(ds: xr.Dataset) -> Told:
    if not resolved(ds, "log", _early(ds)):
        return "not resolved", None
    mask, stream = (_at_early(ds, "steady_source_of_model", source=source) for source in ("mask", "residual"))
    return f"mask {told(mask)}, residual stream {told(stream)} nat²", above(apart(stream, mask), 0)


@of_models("leakage", "log_form_of_model", "log_stream_by_block", "log_sink_by_block")
def isolation_null(ds: xr.Dataset, margin: float) -> Told:
    first = ds["layer"].values[0]
    said: list[str] = []
    tests: list[Tested] = []
    for band in map(str, ds["band"].values):
        own = estimated(ds, "log_stream_by_block", layer=first, band=band)
        total = float(ds["log_form_of_model"].sel(part="total", band=band))
        fails = null_fails(ds, band)
        said.append(f"{told(own)} at {band}" + " (fails)" * fails)
        if fails or own.low > 0:
            tests.append(not fails)
        elif total > 0:
            tests.append(nothing(Interval(*(end / total for end in own[:3])), margin))
    return ", ".join(said), every(tests)


# ----------------------------------------------------------------------------------------- what position 0 is needed for


def _under(ds: xr.Dataset, variable: str, replacement: str) -> Interval | None:
    """A number of one intervention; None where the result lacks it."""
    there = "replacement" in ds.dims and replacement in ds["replacement"].values
    return estimated(ds, variable, replacement=replacement) if there else None


@of_models("interventions/bos-swap", "loss_change_of_model")
def loss_rises(ds: xr.Dataset, replacement: str) -> Told | None:
    found = _under(ds, "loss_change_of_model", replacement)
    return None if found is None else (f"{told(found, '+.3f')} nat", above(found, 0))


@of_models("interventions/bos-swap", "kl_of_model")
def matters_less(ds: xr.Dataset, replacement: str, than: str) -> Told | None:
    one, other = (_under(ds, "kl_of_model", name) for name in (replacement, than))
    if one is None or other is None:
        return None
    # Both are of the same documents, so that the interval of two independent numbers is too wide if anything.
    return f"{told(one, '.3f')} against {told(other, '.3f')} nat", below(apart(other, one), 0)
