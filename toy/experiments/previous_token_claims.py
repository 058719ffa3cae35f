"""What a result of previous-token says: readers without positions, the published numbers, tables and statements.

What readers without positions can reach, for the plateau without positional encoding:

- Without positions attention sees the query and a bag of tokens. A reader of the bag of the first C - 1 tokens (it may
  know which one is the query, and leave that out) says each with its share, `count / (C - 1)`; the answer is one of them,
  each as likely as the other. Its loss is `E[log((C - 1) / count)]`, count - 1 being Binomial(C - 2, 1/V): no reader
  without positions is better. Its perplexity is nearly C - 1, far from what the post sees (`blind_limit`).
- The published V (C - 2) / (C - 1) is a mean of perplexities: a reader that bets on one of the C - 1 tokens has perplexity
  near 0 (really 1) once in C - 1 times and V else. As a mean of losses the same bet is V^((C-2)/(C-1)), and its exact
  arithmetic mean is larger by 1 / (C - 1). It bounds nothing: the limit is far below, and what holds a model of width 2
  near 20 is that two numbers do not carry a bag of three tokens. Hence models without positions are trained at several
  widths. The same bet among all C tokens, the query among them, is V (C - 1) / C.
"""

from __future__ import annotations

import math
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
import xarray as xr
from scipy.special import gammaln

from probes.claims.claim import Claim
from probes.claims.rules import SURE, above, below, between, every, near, range_told, some
from probes.results.statistics import between_runs, over_runs
from probes.results.tables import Table, number

from .rules import (
    Judged,
    at,
    by_parts,
    decided,
    each_above,
    judge,
    known,
    need,
    over_each,
    over_told,
    places,
    setting,
    variable,
)

GRID = {"vocabulary": [10, 30, 100], "context": [4, 10]}
SAID = {"vocabulary": "V", "context": "C"}
TINY = float(np.finfo(np.float64).tiny)
STALL = 25.0  # perplexity without positions at which the post's curve stalls first
ENDS = {"none": 20.6, "learned": 1.0}  # perplexities at which its curves end
NEAR = 0.05  # relative: how near a plateau has to be to a published one; the figure's axis resolves no less
STALLED = 1.5  # factor in steps over which a perplexity stays near a plateau, to count as one
WIDTHS = (2, 10)  # of the post's sizes
WITHIN = 3.0  # factor within which a relative perplexity agrees: half a decade of the post's logarithmic axis
PUBLISHED_FORM = ((-0.41, 1.35), (0.19, -2.25))  # W_Q W_K^T; with s = (1, 1) the post has s W_Q W_K^T s = -1.1


class Cell(NamedTuple):
    """A relative perplexity that is read off a figure of [Liu-4]."""

    vocabulary: int
    context: int
    width: int
    learning_rate: float
    steps: int
    value: float

    @property
    def name(self) -> str:
        """Its coordinate in results."""
        return f"V={self.vocabulary} C={self.context} width {self.width} lr {self.learning_rate:g}"

    @property
    def said(self) -> str:
        """The setting in its statement."""
        return f"V = {self.vocabulary}, C = {self.context}, width {self.width}, learning rate {self.learning_rate:g}"


PUBLISHED = (
    Cell(30, 4, 2, 0.01, 3000, 2.5e-4),
    Cell(30, 10, 2, 0.01, 3000, 3e-3),
    Cell(100, 10, 10, 0.01, 3000, 4e-7),
    Cell(30, 4, 2, 0.1, 3000, 4e-6),
    Cell(100, 4, 2, 0.01, 10_000, 4e-3),
    Cell(100, 4, 2, 0.1, 10_000, 1.3e-2),
)
BY_NAME = {cell.name: cell for cell in PUBLISHED}


class Switch(NamedTuple):
    """What the post leaves open."""

    residual: str
    projection: str


def blind_limit(vocabulary: int, context: int) -> float:
    """Perplexity of the best reader that knows the query and the bag of the other tokens: exp E[log((C-1) / count)].

    Of the C - 1 tokens before the query one is the answer, each as likely; count says how often the answer stands among
    them, so count - 1 is Binomial(C - 2, 1/V).
    """
    others = context - 2
    k = np.arange(others + 1.0)
    ways = gammaln(others + 1) - gammaln(k + 1) - gammaln(others - k + 1)
    chance = np.exp(ways - k * math.log(vocabulary) + (others - k) * math.log1p(-1 / vocabulary))
    return math.exp(float(chance @ np.log((context - 1) / (k + 1))))


def betting(vocabulary: int, context: int) -> dict[str, float]:
    """What betting on one of the earlier tokens gives, by kind of mean: see the module's text."""
    v, c = vocabulary, context
    return {
        "published": v * (c - 2) / (c - 1),
        "arithmetic": (v * (c - 2) + 1) / (c - 1),
        "geometric": v ** ((c - 2) / (c - 1)),
        "with the query": v * (c - 1) / c,
    }


def main_variant(ds: xr.Dataset) -> Switch:
    """The variant of which everything was trained: what figures show."""
    return Switch(setting(ds, "residual"), setting(ds, "projection"))


def of_variant(ds: xr.Dataset, name: str) -> xr.DataArray:
    """A variable in the main variant."""
    return variable(ds, name, **main_variant(ds)._asdict())


def typical_seed(ds: xr.Dataset) -> int:
    """Index of the seed whose last relative perplexity with positions is the (lower) median."""
    last = of_variant(ds, "relative").sel(positional="learned").isel(step=-1).values
    return int(np.argsort(last, kind="stable")[(len(last) - 1) // 2])


class Agreement(NamedTuple):
    """How near a variant comes to the published relative perplexities."""

    batch: int
    variant: Switch
    error: float  # rms over cells of log10(median over seeds / published)
    cells: int
    plateau: float  # perplexity without positions, median over seeds; NaN for batches whose curves were not trained


def agreements(ds: xr.Dataset) -> list[Agreement]:
    """All variants that were trained, the best first for each batch size."""
    published = np.array([BY_NAME[str(name)].value for name in ds["cell"].values])
    found = []
    for batch, v in product(ds["batch"].values.tolist(), variants(ds)):
        medians = ds["relative_published"].sel(batch=batch, **v._asdict()).median("seed").values
        there = np.isfinite(medians)
        ratio = np.log10(np.maximum(medians[there], TINY) / published[there])
        curve = ds["perplexity"].sel(positional="none", **v._asdict())
        plateau = float(curve.isel(step=-1).median()) if batch == setting(ds, "batch") else math.nan
        if there.any():
            found.append(Agreement(batch, v, float(np.sqrt(np.mean(ratio**2))), int(there.sum()), plateau))
    batches = ds["batch"].values.tolist()
    return sorted(found, key=lambda row: (batches.index(row.batch), row.error))


def variants(ds: xr.Dataset) -> list[Switch]:
    """All variants of a result."""
    return [Switch(*v) for v in product(ds["residual"].values.tolist(), ds["projection"].values.tolist())]


class Signs(NamedTuple):
    """On which sides of zero the positions lie along s, at the end, by seed; NaN for seeds that nothing separates."""

    own: (
        np.ndarray
    )  # the least of -s p_-1 and s p of the others: above 0 where p_-1 is negative and all others positive
    shifted: np.ndarray  # the same with the mean token embedding added
    bilinear: np.ndarray
    lead: (
        np.ndarray
    )  # by how many nats the mean token's query prefers p_-1 to the best of the others, p alone; never NaN


def signs(ds: xr.Dataset) -> Signs:
    """Of the main variant."""
    names = ("positions", "separation", "tokens", "query_key", "bilinear")
    p, s, tokens, matrix, bilinear = (of_variant(ds, name).isel(step=-1) for name in names)
    mean = tokens.mean("token")
    asking = (p.sel(position=0) + mean).rename(axis="row")
    asked_for = (asking * matrix).sum("row").rename(column="axis")
    logits = (asked_for * p).sum("axis") / math.sqrt(p.sizes["axis"])
    lead = logits.sel(position=-1) - logits.drop_sel(position=-1).max("position")

    def apart(where: xr.DataArray) -> np.ndarray:
        along = (where * s).sum("axis", skipna=False)
        return along.where(along["position"] != -1, -along).min("position", skipna=False).values

    return Signs(apart(p), apart(p + mean), bilinear.values, lead.values)


def tables(ds: xr.Dataset) -> list[Table]:
    """All numbers, medians over seeds with their range."""
    found = _plateau_tables(ds)
    if "relative_published" in ds:
        found += _published_tables(ds)
    if (side := known(signs, ds)) is not None:
        found.append(_signs_table(ds, side))
    median = "median (range)"
    if "relative_by_size" in ds:
        sizes = places(ds["relative_by_size"], "vocabulary", "context", "width")
        rows = [[*map(str, labels), range_told(one)] for labels, one in sizes]
        found.append(Table("(perplexity - 1) / V by size", ("V", "C", "width", median), rows))
    if "rate_relative" in ds:
        rows = [
            [
                str(v),
                f"{rate:g}",
                schedule,
                range_told(one["rate_relative"]),
                range_told(one["spikes"].sum("rate_step"), "g"),
            ]
            for (v, rate, schedule), one in places(
                ds[["rate_relative", "spikes"]], "rate_vocabulary", "learning_rate", "schedule"
            )
        ]
        columns = ("V", "learning rate", "schedule", "(perplexity - 1) / V", "spikes")
        found.append(Table("Learning rates: median (range)", columns, rows))
    if "relative_by_target" in ds:
        targets = places(ds["relative_by_target"], "offset_context", "target")
        rows = [[str(c), str(target + 1), range_told(one)] for (c, target), one in targets if np.isfinite(one).any()]
        found.append(Table("(perplexity - 1) / V by offset", ("C", "offset", median), rows))
    main = main_variant(ds)
    note = f" (residual {main.residual}, W_O {main.projection})"
    return [Table(t.title + note if "residual" not in t.columns else t.title, t.columns, t.rows) for t in found]


def _plateau_tables(ds: xr.Dataset) -> list[Table]:
    last, (v, c) = ds["perplexity"].isel(step=-1), _sizes(ds)
    rows = [[*names, range_told(one)] for names, one in places(last, "residual", "projection", "positional")]
    title = f"Perplexity, V = {v}, C = {c}: last step"
    found = [Table(title, ("residual", "W_O", "positions", "median (range)"), rows)]
    bets = betting(v, c)
    limits = {
        "exp E[log((C-1)/count)], the best without positions": blind_limit(v, c),
        "V (C-2)/(C-1), published bound": bets["published"],
        "mean perplexity of a bet on one of the C-1 earlier tokens": bets["arithmetic"],
        "perplexity of its mean loss, V^((C-2)/(C-1))": bets["geometric"],
        "V (C-1)/C, the bet among all C tokens": bets["with the query"],
    }
    rows = [[name, number(limit, ".3f")] for name, limit in limits.items()]
    found.append(Table("Readers without positions: perplexity", ("reader", "perplexity"), rows))
    if "blind_perplexity" in ds:
        rows = [[str(width), range_told(one)] for (width,), one in places(ds["blind_perplexity"], "blind_width")]
        found.append(Table("Perplexity without positions, by width", ("width", "median (range)"), rows))
    return found


def _signs_table(ds: xr.Dataset, side: Signs) -> Table:
    rows = []
    for n, ((seed,), one) in enumerate(places(of_variant(ds, "query_key").isel(step=-1), "seed")):
        matrix = ", ".join(number(x, ".2f") for x in one.values.flat)
        told = ("-" if np.isnan(x[n]) else "yes" if x[n] > 0 else "no" for x in (side.own, side.shifted))
        rows.append([str(seed), matrix, number(side.bilinear[n], ".2f"), number(side.lead[n], ".2f"), *told])
    columns = ("seed", "W_Q W_K^T, row by row", "s W_Q W_K^T s", "lead of p_-1, nats", "signs as published")
    return Table("Separation, last step", (*columns, "with mean token added"), rows)


def _published_tables(ds: xr.Dataset) -> list[Table]:
    rows = [
        [str(a.batch), *a.variant, number(a.error, ".2f"), str(a.cells), number(a.plateau, ".1f")]
        for a in agreements(ds)
    ]
    columns = ("batch", "residual", "W_O", "rms log10 error", "settings", "plateau without positions")
    found = [Table("Which variant the post's numbers agree with, the best first", columns, rows)]
    rows = []
    for (cell, batch), one in places(ds["relative_published"], "cell", "batch"):
        if np.isfinite(one).any():
            shown = [range_told(x) if np.isfinite(x := one.sel(v._asdict())).any() else "-" for v in variants(ds)]
            rows.append([cell, str(batch), number(BY_NAME[cell].value, ".1e"), *shown])
    names = [f"residual {r}, W_O {p}" for r, p in variants(ds)]
    found.append(Table("(perplexity - 1) / V in the post's settings", ("setting", "batch", "published", *names), rows))
    return found


def claims(ds: xr.Dataset) -> list[Claim]:
    """Statements of [Liu-4], judged in the main variant unless they say otherwise."""
    cells = [{"cell": c, "said": c.said} | c._asdict() for c in PUBLISHED]
    return judge(__name__, ds, lists={"cell": cells, "width": [{"width": width} for width in WIDTHS]})


def curve(ds: xr.Dataset, positional: str) -> xr.DataArray:
    """The perplexity curve [seed, step] in the published setting."""
    need(_sizes(ds) == (30, 4))
    return of_variant(ds, "perplexity").sel(positional=positional)


def stalls(ds: xr.Dataset) -> Judged:
    """The curve without positions stays near a level for a while."""
    long = [_stay(one, STALL) for _, one in places(curve(ds, "none"), "seed")]
    logs = np.log(long)
    measured = (
        f"it stays within {NEAR:.0%} of it over a factor of {over_told(logs, '.2f', math.exp)} in steps, in "
        f"{sum(x >= STALLED for x in long)} of {len(long)} seeds over {STALLED:g} or more"
    )
    return decided(measured, above(over_runs(logs), math.log(STALLED)))


def _stay(one: xr.DataArray, level: float) -> float:
    """The factor in steps over which a curve stays near a level, at its longest; 1 if it never does."""
    longest, start = 1.0, None
    for step, inside in zip(one["step"].values, np.abs(one.values / level - 1) < NEAR, strict=True):
        start = (start or step) if inside and step else None
        longest = max(longest, step / start) if start else longest
    return float(longest)


def ends_near(ds: xr.Dataset, positional: str) -> Judged:
    """A curve ends where the post's does."""
    last = curve(ds, positional).isel(step=-1)
    return decided(f"{over_told(last)} after {int(last['step'])} steps", near(over_runs(last.values), ENDS[positional]))


def bound(ds: xr.Dataset) -> Judged:
    """No width gets below the published bound."""
    curve(ds, "none")
    widths, sizes = variable(ds, "blind_perplexity"), _sizes(ds)
    best = ", ".join(f"{over_told(one)} at width {width}" for (width,), one in places(widths, "blind_width"))
    told = f"{best}; the best reader blind to order gets {blind_limit(*sizes):.2f}. It is the mean perplexity of betting on "
    return decided(f"{told}one token", each_above(widths, betting(*sizes)["published"]))


def separation(ds: xr.Dataset) -> Judged:
    """One direction parts the position asked for from the others."""
    own, shifted, *_ = signs(ds)
    measured = (
        f"{(own > 0).sum()} of {len(own)} seeds; {(shifted > 0).sum()} with the mean token embedding added; "
        f"{np.isnan(own).sum()} not separated; least {over_told(own)}"
    )
    return decided(measured, above(over_runs(own), 0))


def bilinear_form(ds: xr.Dataset) -> Judged:
    """Queries prefer the position asked for."""
    *_, bilinear, lead = signs(ds)
    measured = (
        f"{over_told(bilinear)}; below 0 in {(bilinear < 0).sum()} of {len(lead)} seeds; "
        f"the mean token's query prefers p_-1 in {(lead > 0).sum()} of {len(lead)} seeds"
    )
    return decided(measured, below(over_runs(bilinear), 0))


def cell_logs(ds: xr.Dataset, cell: Cell) -> dict[int, xr.DataArray]:
    """Logarithms, over which seeds spread by decades, of relative perplexities [seed] of a published setting, by batch."""
    one = at(of_variant(ds, "relative_published"), cell=cell.name)
    return {b: xr.ufuncs.log(x.dropna("seed").clip(TINY)) for (b,), x in places(one, "batch") if np.isfinite(x).any()}


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


def is_less(ds: xr.Dataset, few: str, many: str) -> Judged:
    """Of two settings, as they are said, the one does better: logarithms of both groups of runs, at the first batch size."""
    cells = [next(cell for cell in PUBLISHED if cell.said == said) for said in (few, many)]
    logs = [cell_logs(ds, cell) for cell in cells]
    first = int(ds["batch"][0])
    need(*(first in one for one in logs))
    less, more = (one[first] for one in logs)
    told = [f"{over_told(one, change=math.exp)} at {cell.name}" for one, cell in zip((less, more), cells, strict=True)]
    return decided(", ".join(told), below(between_runs(less.values, more.values), 0))


def grows(ds: xr.Dataset, dim: str, width: int) -> Judged:
    """From each size to the next, along vocabulary or context, at every value of the other, by logarithms."""
    logs = xr.ufuncs.log(variable(ds, "relative_by_size", width=width, **{dim: GRID[dim]}).clip(TINY))
    (other,) = GRID.keys() - {dim}
    found = []
    for (fixed,), line in places(logs, other):
        sizes = list(places(line, dim))
        told = ", ".join(f"{over_told(x, '.2g', math.exp)} at {size}" for (size,), x in sizes)
        tests = [above(between_runs(more.values, less.values), 0) for (_, less), (_, more) in pairwise(sizes)]
        found.append((f"{SAID[other]} = {fixed}: {told}", every(tests)))
    return by_parts(found, before=f"by {SAID[dim]}: ")


def width_helps(ds: xr.Dataset) -> Judged:
    """The larger width does better at every size."""
    logs = xr.ufuncs.log(variable(ds, "relative_by_size", width=list(WIDTHS)).clip(TINY))
    found = []
    for (v, c), one in places(logs, "vocabulary", "context"):
        small, large = (one.sel(width=width).values for width in WIDTHS)
        told = " to ".join(over_told(x, ".2g", math.exp) for x in (small, large))
        found.append((f"V = {v}, C = {c}: {told}", below(between_runs(large, small), 0)))
    return by_parts(found)


def spike(ds: xr.Dataset) -> Judged:
    """The loss has spikes at the larger learning rate."""
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


def offsets(ds: xr.Dataset) -> Judged:
    """Every token of the context can be asked for."""
    here = variable(ds, "relative_by_target", offset_context=4).dropna("target", how="all")
    perplexity = 1 + _sizes(ds)[0] * here
    shown = ", ".join(f"{over_told(one)} at offset {target + 1}" for (target,), one in places(perplexity, "target"))
    return Judged(f"perplexity {shown}", every([near(one, 1.0) for one in over_each(perplexity)])(SURE))


def _sizes(ds: xr.Dataset) -> tuple[int, int]:
    return int(setting(ds, "vocabulary")), int(setting(ds, "context"))
