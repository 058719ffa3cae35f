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
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xarray as xr
from scipy.special import gammaln

from probes.claims.claim import Claim, read_statements
from probes.claims.rules import SURE, above, below, between, every, near, range_told, some
from probes.results.statistics import between_runs, over_runs
from probes.results.tables import Table, number

from .rules import NOT_THERE, Judged, Rule, decided, each_above, has, judge, over_each, over_told, setting

STATEMENTS = read_statements(Path(__file__).with_name("previous_token.toml"))
TINY = float(np.finfo(np.float64).tiny)
PLATEAUS = (25.0, 20.6)  # perplexities without positions at which the post's curve stalls, one after the other
NEAR = 0.05  # relative: how near a plateau has to be to a published one; the figure's axis resolves no less
STALLED = 1.5  # factor in steps over which a perplexity stays near a plateau, to count as one
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
    def slug(self) -> str:
        """The setting in its statement's id."""
        return f"v{self.vocabulary}-c{self.context}-width-{self.width}-lr-{self.learning_rate:g}"


PUBLISHED = (
    Cell(30, 4, 2, 0.01, 3000, 2.5e-4),
    Cell(30, 10, 2, 0.01, 3000, 3e-3),
    Cell(100, 10, 10, 0.01, 3000, 4e-7),
    Cell(30, 4, 2, 0.1, 3000, 4e-6),
    Cell(100, 4, 2, 0.01, 10_000, 4e-3),
    Cell(100, 4, 2, 0.1, 10_000, 1.3e-2),
)


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


def of_variant(ds: xr.Dataset, name: str) -> xr.DataArray | None:
    """A variable in the main variant, None where the result lacks it."""
    v = main_variant(ds)._asdict()
    return ds[name].sel(v) if name in ds and has(ds, **v) else None


def typical_seed(ds: xr.Dataset) -> int:
    """Index of the seed whose last relative perplexity with positions is the (lower) median."""
    relative = of_variant(ds, "relative")
    assert relative is not None
    last = relative.sel(positional="learned").isel(step=-1).values
    return int(np.argsort(last, kind="stable")[(len(last) - 1) // 2])


class Agreement(NamedTuple):
    """How near a variant comes to the published relative perplexities."""

    batch: int
    variant: Switch
    error: float  # rms over cells of log10(median over seeds / published)
    cells: int
    plateau: float  # perplexity without positions, median over seeds; NaN for batches whose curves were not trained


def agreements(ds: xr.Dataset) -> list[Agreement]:
    """All variants, the best first for each batch size; empty where the result has no published cells."""
    found = []
    for b in ds["batch"].values if "relative_published" in ds else ():
        rows = []
        for v in variants(ds):
            medians = ds["relative_published"].sel(batch=b, **v._asdict()).median("seed").values
            known = np.isfinite(medians)
            ratio = np.log10(np.maximum(medians[known], TINY) / _values(ds)[known])
            plateau = math.nan
            if int(b) == int(setting(ds, "batch")):
                curve = ds["perplexity"].sel(positional="none", **v._asdict())
                plateau = float(curve.isel(step=-1).median())
            error = float(np.sqrt(np.mean(ratio**2))) if known.any() else math.nan
            rows.append(Agreement(int(b), v, error, int(known.sum()), plateau))
        found += sorted(rows, key=lambda row: math.inf if math.isnan(row.error) else row.error)
    return found


def variants(ds: xr.Dataset) -> list[Switch]:
    """All variants of a result."""
    return [Switch(str(r), str(p)) for r, p in product(ds["residual"].values, ds["projection"].values)]


def _values(ds: xr.Dataset) -> np.ndarray:
    by_name = {cell.name: cell.value for cell in PUBLISHED}
    return np.array([by_name[str(name)] for name in ds["cell"].values])


class Signs(NamedTuple):
    """On which sides of zero the positions lie along s, at the end, by seed; None for seeds that nothing separates."""

    own: list[bool | None]  # p_-1 negative and all others positive
    apart: np.ndarray  # [seed]; the least of -s p_-1 and s p of the others, above 0 where `own`; NaN as `bilinear`
    shifted: list[bool | None]  # the same with the mean token embedding added
    bilinear: np.ndarray  # [seed], NaN where nothing separates
    lead: np.ndarray  # [seed]; by how many nats the mean token's query prefers p_-1 to the best of the others, p alone


def signs(ds: xr.Dataset) -> Signs | None:
    """Of the main variant; None where the result lacks it."""
    positions, tokens, directions, form, matrix = (
        of_variant(ds, name) for name in ("positions", "tokens", "separation", "bilinear", "query_key")
    )
    if positions is None or tokens is None or directions is None or form is None or matrix is None:
        return None
    p, s = positions.isel(step=-1), directions.isel(step=-1)
    mean = tokens.isel(step=-1).mean("token")
    asking = (p.sel(position=0) + mean).rename(axis="row")
    asked_for = (asking * matrix.isel(step=-1)).sum("row").rename(column="axis")
    logits = (asked_for * p).sum("axis") / math.sqrt(p.sizes["axis"])
    others = logits.sel(position=[int(x) for x in logits["position"].values if x != -1])
    lead = logits.sel(position=-1) - others.max("position")

    def apart(places: xr.DataArray) -> np.ndarray:
        along = (places * s).sum("axis", skipna=False)
        return along.where(along["position"] != -1, -along).min("position", skipna=False).values

    def judged(least: np.ndarray) -> list[bool | None]:
        return [None if np.isnan(one) else bool(one > 0) for one in least]

    own = apart(p)
    return Signs(judged(own), own, judged(apart(p + mean)), form.isel(step=-1).values, lead.values)


def tables(ds: xr.Dataset) -> list[Table]:
    """All numbers, medians over seeds with their range."""
    main = main_variant(ds)
    found = [*_plateau_tables(ds)]
    if "relative_published" in ds:
        found += _published_tables(ds)
    if (side := signs(ds)) is not None:
        found.append(_signs_table(ds, side))
    if "relative_by_size" in ds:
        sizes = ds["relative_by_size"].stack(size=("vocabulary", "context", "width")).transpose("size", ...)
        rows = [[*(str(int(one[dim])) for dim in ("vocabulary", "context", "width")), range_told(one)] for one in sizes]
        found.append(Table("(perplexity - 1) / V by size", ("V", "C", "width", "median (range)"), rows))
    if "rate_relative" in ds:
        rows = []
        for v, rate, schedule in product(*(ds[d].values for d in ("rate_vocabulary", "learning_rate", "schedule"))):
            one = ds[["rate_relative", "spikes"]].sel(rate_vocabulary=v, learning_rate=rate, schedule=schedule)
            counts = range_told(one["spikes"].sum("rate_step"), "g")
            rows.append([str(int(v)), f"{float(rate):g}", str(schedule), range_told(one["rate_relative"]), counts])
        columns = ("V", "learning rate", "schedule", "(perplexity - 1) / V", "spikes")
        found.append(Table("Learning rates: median (range)", columns, rows))
    if "relative_by_target" in ds:
        rows = [
            [str(int(row["offset_context"])), str(int(one["target"]) + 1), range_told(one)]
            for row in ds["relative_by_target"]
            for one in row
            if np.isfinite(one).any()
        ]
        found.append(Table("(perplexity - 1) / V by offset", ("C", "offset", "median (range)"), rows))
    note = f" (residual {main.residual}, W_O {main.projection})"
    return [Table(t.title + note if "residual" not in t.columns else t.title, t.columns, t.rows) for t in found]


def _plateau_tables(ds: xr.Dataset) -> list[Table]:
    last, (v, c) = ds["perplexity"].isel(step=-1), _sizes(ds)
    rows = [
        [*variant, str(kind), range_told(last.sel(positional=kind, **variant._asdict()))]
        for variant in variants(ds)
        for kind in ds["positional"].values
    ]
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
        rows = [[str(int(one["blind_width"])), range_told(one)] for one in ds["blind_perplexity"]]
        found.append(Table("Perplexity without positions, by width", ("width", "median (range)"), rows))
    return found


def _signs_table(ds: xr.Dataset, side: Signs) -> Table:
    matrices = of_variant(ds, "query_key")
    assert matrices is not None
    rows = []
    for n, seed in enumerate(ds["seed"].values):
        matrix = ", ".join(number(x, ".2f") for x in matrices.isel(seed=n, step=-1).values.flat)
        told = ({True: "yes", False: "no", None: "-"}[x[n]] for x in (side.own, side.shifted))
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
    for (cell, value), b in product(zip(ds["cell"].values, _values(ds), strict=True), ds["batch"].values):
        one = ds["relative_published"].sel(cell=cell, batch=b)
        if np.isfinite(one).any():
            shown = [range_told(one.sel(v._asdict())) for v in variants(ds)]
            rows.append([str(cell), str(b), number(value, ".1e"), *shown])
    names = [f"residual {r}, W_O {p}" for r, p in variants(ds)]
    found.append(Table("(perplexity - 1) / V in the post's settings", ("setting", "batch", "published", *names), rows))
    return found


def claims(ds: xr.Dataset) -> list[Claim]:
    """Statements of [Liu-4], judged in the main variant unless they say otherwise."""
    short, long, wide, fast, large, large_fast = PUBLISHED
    rules: dict[str, Rule] = {
        "stalls": _stalls,
        "plateau": partial(_ends_near, kind="none", level=PLATEAUS[1]),
        "bound": _bound,
        "solved": partial(_ends_near, kind="learned", level=1.0),
        "separation": _separates,
        "bilinear-form": _negative,
        **{cell.slug: partial(_agrees, cell=cell) for cell in PUBLISHED},
        "longer": partial(_less, less=short, more=long),
        "wider": partial(_less, less=wide, more=short),
        "fast-at-30": partial(_less, less=fast, more=short),
        "fast-at-100": partial(_less, less=large, more=large_fast),
        "spike": _spike,
        "offsets": _offsets,
    }
    return judge(ds, STATEMENTS, {f"liu4-previous-token-{name}": rule for name, rule in rules.items()})


def _curve(ds: xr.Dataset, kind: str) -> xr.DataArray | None:
    """The perplexity curve [seed, step] in the published setting."""
    curve = of_variant(ds, "perplexity") if _sizes(ds) == (30, 4) else None
    return None if curve is None else curve.sel(positional=kind)


def _stalls(ds: xr.Dataset) -> Judged:
    if (curve := _curve(ds, "none")) is None:
        return NOT_THERE
    long = [_stay(curve.isel(seed=n), PLATEAUS[0]) for n in range(curve.sizes["seed"])]
    logs = np.log(long)
    measured = (
        f"it stays within {NEAR:.0%} of it over a factor of {over_told(logs, '.2f', math.exp)} in steps, in "
        f"{sum(x >= STALLED for x in long)} of {len(long)} seeds over {STALLED:g} or more"
    )
    return decided(measured, above(over_runs(logs), math.log(STALLED)))


def _stay(curve: xr.DataArray, level: float) -> float:
    """The factor in steps over which a curve stays near a level, at its longest; 1 if it never does."""
    steps, near = curve["step"].values, np.abs(curve.values / level - 1) < NEAR
    longest, start = 1.0, None
    for step, inside in zip(steps, near, strict=True):
        start = (start or step) if inside and step else None
        longest = max(longest, step / start) if start else longest
    return float(longest)


def _ends_near(ds: xr.Dataset, *, kind: str, level: float) -> Judged:
    if (curve := _curve(ds, kind)) is None:
        return NOT_THERE
    last = curve.isel(step=-1)
    return decided(f"{over_told(last)} after {int(last['step'])} steps", near(over_runs(last.values), level))


def _bound(ds: xr.Dataset) -> Judged:
    if _curve(ds, "none") is None or "blind_perplexity" not in ds:
        return NOT_THERE
    widths, sizes = ds["blind_perplexity"], _sizes(ds)
    best = ", ".join(f"{over_told(one)} at width {int(one['blind_width'])}" for one in widths)
    return decided(
        f"{best}; the best reader blind to order gets {blind_limit(*sizes):.2f}. It is the mean perplexity of betting on "
        "one token",
        each_above(widths, betting(*sizes)["published"]),
    )


def _separates(ds: xr.Dataset) -> Judged:
    if (side := signs(ds)) is None:
        return NOT_THERE
    right, shifted = (sum(x is True for x in found) for found in (side.own, side.shifted))
    measured = (
        f"{right} of {len(side.own)} seeds; {shifted} with the mean token embedding added; "
        f"{sum(x is None for x in side.own)} not separated; least {over_told(side.apart)}"
    )
    return decided(measured, above(over_runs(side.apart), 0))


def _negative(ds: xr.Dataset) -> Judged:
    if (side := signs(ds)) is None:
        return NOT_THERE
    seeds = len(side.own)
    measured = (
        f"{over_told(side.bilinear)}; below 0 in {int((side.bilinear < 0).sum())} of {seeds} seeds; "
        f"the mean token's query prefers p_-1 in {int((side.lead > 0).sum())} of {seeds} seeds"
    )
    return decided(measured, below(over_runs(side.bilinear), 0))


def _at(ds: xr.Dataset, cell: Cell) -> xr.DataArray | None:
    """Relative perplexities [batch, seed] of a published setting."""
    own = of_variant(ds, "relative_published")
    one = own.sel(cell=cell.name) if own is not None and cell.name in own["cell"].values else None
    return one if one is not None and np.isfinite(one).any() else None


def _agrees(ds: xr.Dataset, *, cell: Cell) -> Judged:
    """Agreement at any batch size, on the logarithmic axis that the number was read off."""
    if (one := _at(ds, cell)) is None:
        return NOT_THERE
    logs = [_logs(one.sel(batch=b)) for b in one["batch"].values if np.isfinite(one.sel(batch=b)).any()]
    shown = "; ".join(f"batch {int(x['batch'])}: {over_told(x, change=math.exp)}" for x in logs)
    steps = int(setting(ds, "rate_steps" if cell.steps > 3000 else "steps"))  # what stands for the post's
    if steps != cell.steps:
        return Judged(f"{shown}, after {steps:,} steps")
    ends = [math.log(cell.value) + way * math.log(WITHIN) for way in (-1, 1)]
    return Judged(shown, some([between(over_runs(x.values), *ends) for x in logs])(SURE))


def _logs(relative: xr.DataArray) -> xr.DataArray:
    """Logarithms, over which seeds spread by decades."""
    return xr.ufuncs.log(relative.dropna("seed").clip(TINY))


def _less(ds: xr.Dataset, *, less: Cell, more: Cell) -> Judged:
    """Logarithms of both groups of runs, at the first batch size."""
    found = [one.isel(batch=0) for cell in (less, more) if (one := _at(ds, cell)) is not None]
    if len(found) < 2 or not all(np.isfinite(one).any() for one in found):
        return NOT_THERE
    few, many = map(_logs, found)
    measured = f"{over_told(few, change=math.exp)} at {less.name}, {over_told(many, change=math.exp)} at {more.name}"
    return decided(measured, below(between_runs(few.values, many.values), 0))


def _spike(ds: xr.Dataset) -> Judged:
    if "spikes" not in ds or 100 not in ds["rate_vocabulary"].values:
        return NOT_THERE
    if not {0.1, 0.01} <= {round(float(rate), 6) for rate in ds["learning_rate"].values}:
        return NOT_THERE
    spikes = ds["spikes"].sel(rate_vocabulary=100, schedule="constant")
    fast, slow = (spikes.sum("rate_step").sel(learning_rate=rate) for rate in (0.1, 0.01))
    where = ds["rate_step"].values[spikes.sel(learning_rate=0.1).any("seed").values]
    where_told = f"from step {int(where.min()):,} to {int(where.max()):,}" if where.size else "none"
    measured = (
        f"{over_told(fast)} spikes per run at 0.1 ({where_told}), {over_told(slow)} at 0.01; "
        f"{int((fast > 0).sum())} of {fast.size} seeds have any at 0.1"
    )
    return decided(measured, each_above(fast))


def _offsets(ds: xr.Dataset) -> Judged:
    if "relative_by_target" not in ds or not has(ds, offset_context=4):
        return NOT_THERE
    here = ds["relative_by_target"].sel(offset_context=4).dropna("target", how="all")
    perplexity = 1 + _sizes(ds)[0] * here
    shown = ", ".join(f"{over_told(one)} at offset {int(one['target']) + 1}" for one in perplexity)
    return Judged(f"perplexity {shown}", every([near(one, 1.0) for one in over_each(perplexity)])(SURE))


def _sizes(ds: xr.Dataset) -> tuple[int, int]:
    return int(setting(ds, "vocabulary")), int(setting(ds, "context"))
