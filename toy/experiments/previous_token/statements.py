"""The statements of [Liu-4] about the token before the last, judged in the main variant unless they say otherwise."""

from __future__ import annotations

import math
from itertools import pairwise, product

import numpy as np
import xarray as xr

from probes.claims.claim import Claim
from probes.claims.ledger import Source
from probes.claims.rules import SURE, above, below, between, every, near, some
from probes.results.statistics import between_runs, over_runs

from ..rules import (
    Judged,
    at,
    by_parts,
    decided,
    each_above,
    judged,
    need,
    over_each,
    over_told,
    places,
    setting,
    variable,
)
from .tables import ENDS, PUBLISHED, STALL, TINY, Cell, betting, blind_limit, of_variant, signs, sizes

GRID = {"vocabulary": [10, 30, 100], "context": [4, 10]}
SYMBOLS = {"vocabulary": "V", "context": "C"}
NEAR = 0.05  # relative: how near a plateau has to be to a published one; the figure's axis resolves no less
STALLED = 1.5  # factor in steps over which a perplexity stays near a plateau, to count as one
WIDTHS = (2, 10)  # of the post's sizes
WITHIN = 3.0  # factor within which a relative perplexity agrees: half a decade of the post's logarithmic axis

liu = Source("[Liu-4]", "liu4-previous-token")
TASK, RELATIVE = "In the previous-token task", "(perplexity - 1) / V"
BLIND = "Without positional embeddings the previous-token task's perplexity"
SMALL = "(V = 30, C = 4, width 2)"
WELCH = "by the 95 % interval of Welch's t over runs of"


def claims(ds: xr.Dataset) -> list[Claim]:
    """The statements of [Liu-4], judged."""
    return judged(liu, ds)


def curve(ds: xr.Dataset, positional: str) -> xr.DataArray:
    """The perplexity curve [seed, step] in the published setting."""
    need(sizes(ds) == (30, 4))
    return of_variant(ds, "perplexity").sel(positional=positional)


@liu(
    "stalls",
    rule=f"the factor in steps over which the perplexity stays within {NEAR:.0%} of {STALL:g} is above {STALLED:g}, by the "
    "95 % interval over runs of its logarithm",
    published=f"{STALL:g}",
)
def _(ds: xr.Dataset) -> Judged:
    """Without positional embeddings the previous-token task's perplexity at first stalls at about 25 (V = 30, C = 4, width
    2).
    """
    long = [_stay(x, STALL) for _, x in places(curve(ds, "none"), "seed")]
    logs = np.log(long)
    measured = (
        f"it stays within {NEAR:.0%} of it over a factor of {over_told(logs, '.2f', math.exp)} in steps, in "
        f"{sum(x >= STALLED for x in long)} of {len(long)} seeds over {STALLED:g} or more"
    )
    return decided(measured, above(over_runs(logs), math.log(STALLED)))


def _stay(perplexity: xr.DataArray, level: float) -> float:
    """The factor in steps over which a curve stays near a level, at its longest; 1 if it never does."""
    longest, start = 1.0, None
    inside = np.abs(perplexity.values / level - 1) < NEAR
    for step, near_it in zip(perplexity["step"].values, inside, strict=True):
        start = (start or step) if near_it and step else None
        longest = max(longest, step / start) if start else longest
    return float(longest)


def ends_near(ds: xr.Dataset, positional: str) -> Judged:
    """A curve ends where the post's does."""
    last = curve(ds, positional).isel(step=-1)
    return decided(f"{over_told(last)} after {int(last['step'])} steps", near(over_runs(last.values), ENDS[positional]))


FALLS = "With learned positional embeddings the previous-token task's perplexity falls to about"
for _name, _positional, _text in (("plateau", "none", f"{BLIND} then stalls at about"), ("solved", "learned", FALLS)):
    _level = f"{ENDS[_positional]:g}"
    _rule = f"the 95 % interval over runs of the perplexity at the end lies within a quarter of {_level}"
    liu(_name, "", f"{_text} {_level} {SMALL}.", rule=_rule, published=_level, positional=_positional)(ends_near)


@liu(
    "bound",
    rule="95 % intervals over runs of the perplexity without positions lie above V (C-2)/(C-1) at every width",
    published="20",
)
def _(ds: xr.Dataset) -> Judged:
    """In the previous-token task V (C-2)/(C-1) = 20 bounds the perplexity that can be had without positions (V = 30,
    C = 4).
    """
    curve(ds, "none")
    widths = variable(ds, "blind_perplexity")
    best = ", ".join(f"{over_told(x)} at width {width}" for (width,), x in places(widths, "blind_width"))
    limit = f"the best reader blind to order gets {blind_limit(*sizes(ds)):.2f}"
    measured = f"{best}; {limit}. It is the mean perplexity of betting on one token"
    return decided(measured, each_above(widths, betting(*sizes(ds))["published"]))


@liu(
    "separation",
    rule="the least of -s p_-1 and s p of the others is above 0, by the 95 % interval over runs",
)
def _(ds: xr.Dataset) -> Judged:
    """In the previous-token task (C = 4) the position asked for, p_-1, is negative along the separation direction s, and
    p_0, p_-2, p_-3 are positive (up to s -> -s).
    """
    own, shifted, *_ = signs(ds)
    measured = (
        f"{(own > 0).sum()} of {len(own)} seeds; {(shifted > 0).sum()} with the mean token embedding added; "
        f"{np.isnan(own).sum()} not separated; least {over_told(own)}"
    )
    return decided(measured, above(over_runs(own), 0))


@liu(
    "bilinear-form",
    rule="s W_Q W_K^T s is below 0, by the 95 % interval over runs",
    published="-1.1",
)
def _(ds: xr.Dataset) -> Judged:
    """In the previous-token task s W_Q W_K^T s < 0 along the separation direction s (-1.1 for s = (1, 1), which is -0.56 for
    the unit vector).
    """
    *_, bilinear, lead = signs(ds)
    measured = (
        f"{over_told(bilinear)}; below 0 in {(bilinear < 0).sum()} of {len(lead)} seeds; "
        f"the mean token's query prefers p_-1 in {(lead > 0).sum()} of {len(lead)} seeds"
    )
    return decided(measured, below(over_runs(bilinear), 0))


def cell_logs(ds: xr.Dataset, cell: Cell) -> dict[int, xr.DataArray]:
    """Logarithms, over which seeds spread by decades, of relative perplexities [seed] of a published setting, by batch."""
    here = at(of_variant(ds, "relative_published"), cell=cell.name)
    return {b: xr.ufuncs.log(x.dropna("seed").clip(TINY)) for (b,), x in places(here, "batch") if np.isfinite(x).any()}


def agrees(ds: xr.Dataset, cell: Cell) -> Judged:
    """Agreement at any batch size, on the logarithmic axis that the number was read off."""
    logs = cell_logs(ds, cell)
    need(logs)
    shown = "; ".join(f"batch {batch}: {over_told(x, change=math.exp)}" for batch, x in logs.items())
    steps = int(setting(ds, "rate_steps" if cell.steps > 3000 else "steps"))  # what stands for the post's
    if steps != cell.steps:
        return Judged(f"{shown}, after {steps:,} steps")
    ends = [math.log(cell.value) + way * math.log(WITHIN) for way in (-1, 1)]
    return Judged(shown, some([between(over_runs(x.values), *ends) for x in logs.values()])(SURE))


AGREES = (
    "at some batch size the 95 % interval over runs of its logarithm lies within a factor of "
    f"{WITHIN:g}, what can be read off a logarithmic axis, of the published number"
)
for _cell in PUBLISHED:
    _name = f"v{_cell.vocabulary}-c{_cell.context}-width-{_cell.width}-lr-{_cell.learning_rate:g}"
    _value = f"{_cell.value:.1e}"
    _text = f"{TASK} {RELATIVE} = {_value} after {_cell.steps:,} steps at {_cell.words}."
    liu(_name, "", _text, rule=AGREES, published=_value, cell=_cell)(agrees)


def is_less(ds: xr.Dataset, few: int, many: int) -> Judged:
    """Of two published settings the one does better: logarithms of both groups of runs, at the first batch size."""
    cells = [PUBLISHED[few], PUBLISHED[many]]
    logs = [cell_logs(ds, cell) for cell in cells]
    first = int(ds["batch"][0])
    need(*(first in by_batch for by_batch in logs))
    less, more = (by_batch[first] for by_batch in logs)
    told = [f"{over_told(x, change=math.exp)} at {cell.name}" for x, cell in zip((less, more), cells, strict=True)]
    return decided(", ".join(told), below(between_runs(less.values, more.values), 0))


def _less(name: str, text: str, few: int, many: int) -> None:
    better, worse = PUBLISHED[few].words, PUBLISHED[many].words
    rule = f"{RELATIVE} at {better} is below that at {worse}, {WELCH} their logarithms' difference"
    liu(name, "", f"{TASK} {text}.", rule=rule, few=few, many=many)(is_less)


def grows(ds: xr.Dataset, dim: str, width: int) -> Judged:
    """From each size to the next, along vocabulary or context, at every value of the other, by logarithms."""
    logs = xr.ufuncs.log(variable(ds, "relative_by_size", width=width, **{dim: GRID[dim]}).clip(TINY))
    (other,) = GRID.keys() - {dim}
    parts = []
    for (fixed,), line in places(logs, other):
        sizes = list(places(line, dim))
        told = ", ".join(f"{over_told(x, '.2g', math.exp)} at {size}" for (size,), x in sizes)
        tests = [above(between_runs(more.values, less.values), 0) for (_, less), (_, more) in pairwise(sizes)]
        parts.append((f"{SYMBOLS[other]} = {fixed}: {told}", every(tests)))
    return by_parts(parts, before=f"by {SYMBOLS[dim]}: ")


_less("longer", f"{RELATIVE} is larger at C = 10 than at C = 4 (V = 30, width 2)", 0, 1)
_less("wider", "width 10 does far better than width 2, even at V = 100, C = 10", 2, 0)
for _width, (_name, _dim, _rule) in product(
    WIDTHS,
    (
        ("larger-vocabulary", "vocabulary", "V = 10, 30 and 100, at every C"),
        ("longer-context", "context", "C = 4 and 10, at every V"),
    ),
):
    _rule = f"its logarithm grows from each to the next, {WELCH} the difference: {_rule}"
    _text = f"{TASK} {RELATIVE} grows with {SYMBOLS[_dim]} at width {_width}."
    liu(f"{_name}-width-{_width}", "", _text, rule=_rule, dim=_dim, width=_width)(grows)


@liu(
    "width-helps",
    rule=f"the logarithm is smaller at every V and C, {WELCH} the difference",
)
def _(ds: xr.Dataset) -> Judged:
    """In the previous-token task (perplexity - 1) / V is smaller at width 10 than at width 2, whatever V and C."""
    logs = xr.ufuncs.log(variable(ds, "relative_by_size", width=list(WIDTHS)).clip(TINY))
    parts = []
    for (v, c), here in places(logs, "vocabulary", "context"):
        small, large = (here.sel(width=width).values for width in WIDTHS)
        told = " to ".join(over_told(x, ".2g", math.exp) for x in (small, large))
        parts.append((f"V = {v}, C = {c}: {told}", below(between_runs(large, small), 0)))
    return by_parts(parts)


_less("fast-at-30", "learning rate 0.1 does better than 0.01 at V = 30", 3, 0)
_less("fast-at-100", "learning rate 0.1 does worse than 0.01 at V = 100", 4, 5)


@liu(
    "spike",
    rule="the number of spikes of the loss at the constant learning rate 0.1 is above 0, by the 95 % interval over runs",
    published="near step 6,000",
)
def _(ds: xr.Dataset) -> Judged:
    """In the previous-token task at V = 100, C = 4, width 2 the loss has a spike at learning rate 0.1 (near step 6,000)."""
    need("learning_rate" in ds, {0.1, 0.01} <= {round(float(rate), 6) for rate in ds.get("learning_rate", [])})
    spikes = variable(ds, "spikes", rate_vocabulary=100).sel(schedule="constant")
    fast, slow = (spikes.sum("rate_step").sel(learning_rate=rate) for rate in (0.1, 0.01))
    where = ds["rate_step"].values[spikes.sel(learning_rate=0.1).any("seed").values]
    where_told = f"from step {int(where.min()):,} to {int(where.max()):,}" if where.size else "none"
    measured = (
        f"{over_told(fast)} spikes per run at 0.1 ({where_told}), {over_told(slow)} at 0.01; "
        f"{int((fast > 0).sum())} of {fast.size} seeds have any at 0.1"
    )
    return decided(measured, each_above(fast))


@liu(
    "offsets",
    rule="95 % intervals over runs of the perplexity lie within a quarter of 1 at every offset",
)
def _(ds: xr.Dataset) -> Judged:
    """Any fixed offset other than the previous-token task's is learned as well (C = 4)."""
    here = variable(ds, "relative_by_target", offset_context=4).dropna("target", how="all")
    perplexity = 1 + sizes(ds)[0] * here
    shown = ", ".join(f"{over_told(x)} at offset {target + 1}" for (target,), x in places(perplexity, "target"))
    return Judged(f"perplexity {shown}", every([near(x, 1.0) for x in over_each(perplexity)])(SURE))
