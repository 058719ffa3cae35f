"""The numbers of a result of previous-token: readers without positions, the published ones, and tables.

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
from itertools import product
from typing import NamedTuple

import numpy as np
import xarray as xr
from scipy.special import gammaln

from probes.claims.rules import range_told
from probes.results.tables import Table, number

from ..rules import known, places, setting, variable

TINY = float(np.finfo(np.float64).tiny)
STALL = 25.0  # perplexity without positions at which the post's curve stalls first
ENDS = {"none": 20.6, "learned": 1.0}  # perplexities at which its curves end
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
    def words(self) -> str:
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


def agreements(ds: xr.Dataset) -> list[list[str]]:
    """How near each variant comes to the published relative perplexities, the best first for each batch size, in words.

    The error is the rms over settings of log10(median over seeds / published).
    """
    published = np.array([BY_NAME[str(name)].value for name in ds["cell"].values])
    rows = []
    for n, batch in enumerate(ds["batch"].values.tolist()):
        for v in variants(ds):
            medians = ds["relative_published"].sel(batch=batch, **v._asdict()).median("seed").values
            there = np.isfinite(medians)
            ratio = np.log10(np.maximum(medians[there], TINY) / published[there])
            curve = ds["perplexity"].sel(positional="none", **v._asdict())
            # Of other batches no curves were trained.
            plateau = float(curve.isel(step=-1).median()) if batch == setting(ds, "batch") else math.nan
            if there.any():
                error = float(np.sqrt(np.mean(ratio**2)))
                words = [str(batch), *v, number(error, ".2f"), str(there.sum()), number(plateau, ".1f")]
                rows.append(((n, error), words))
    return [words for _, words in sorted(rows, key=lambda row: row[0])]


def variants(ds: xr.Dataset) -> list[Switch]:
    """All variants of a result."""
    return [Switch(*v) for v in product(ds["residual"].values.tolist(), ds["projection"].values.tolist())]


class Signs(NamedTuple):
    """On which sides of zero the positions lie along s, at the end, by seed; NaN for seeds that nothing separates."""

    # The least of -s p_-1 and s p of the others: above 0 where p_-1 is negative and all others positive.
    own: np.ndarray
    shifted: np.ndarray  # the same with the mean token embedding added
    bilinear: np.ndarray
    # By how many nats the mean token's query prefers p_-1 to the best of the others, p alone; never NaN.
    lead: np.ndarray


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
    by_size, by_offset, relative = "relative_by_size", "relative_by_target", "(perplexity - 1) / V"
    if by_size in ds:
        rows = _ranges(ds[by_size], "vocabulary", "context", "width")
        found.append(Table(f"{relative} by size", ("V", "C", "width", MEDIAN), rows))
    if "rate_relative" in ds:
        columns = ("V", "learning rate", "schedule")
        rows = [
            [str(v), f"{rate:g}", schedule, range_told(here["rate_relative"]), range_told(here["spikes"], "g")]
            for (v, rate, schedule), here in places(
                ds[["rate_relative", "spikes"]].sum("rate_step"), "rate_vocabulary", "learning_rate", "schedule"
            )
        ]
        found.append(Table(f"Learning rates: {MEDIAN}", (*columns, relative, "spikes"), rows))
    if by_offset in ds:
        from_last = ds[by_offset].assign_coords(target=ds["target"] + 1)
        found.append(
            Table(f"{relative} by offset", ("C", "offset", MEDIAN), _ranges(from_last, "offset_context", "target"))
        )
    main = main_variant(ds)
    note = f" (residual {main.residual}, W_O {main.projection})"
    return [Table(t.title + note if "residual" not in t.columns else t.title, t.columns, t.rows) for t in found]


MEDIAN = "median (range)"


def _ranges(values: xr.DataArray, *dims: str) -> list[list[str]]:
    """A row for each place that has values: its labels, median and range."""
    return [[*map(str, labels), range_told(x)] for labels, x in places(values, *dims) if np.isfinite(x).any()]


def _plateau_tables(ds: xr.Dataset) -> list[Table]:
    v, c = sizes(ds)
    rows = _ranges(ds["perplexity"].isel(step=-1), "residual", "projection", "positional")
    found = [Table(f"Perplexity, V = {v}, C = {c}: last step", ("residual", "W_O", "positions", MEDIAN), rows)]
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
        rows = _ranges(ds["blind_perplexity"], "blind_width")
        found.append(Table("Perplexity without positions, by width", ("width", MEDIAN), rows))
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
    columns = ("batch", "residual", "W_O", "rms log10 error", "settings", "plateau without positions")
    best = Table("Which variant the post's numbers agree with, the best first", columns, agreements(ds))
    rows = []
    for (cell, batch), here in places(ds["relative_published"], "cell", "batch"):
        if np.isfinite(here).any():
            by_variant = [range_told(here.sel(v._asdict())) for v in variants(ds)]
            rows.append([cell, str(batch), number(BY_NAME[cell].value, ".1e"), *by_variant])
    names = [f"residual {r}, W_O {p}" for r, p in variants(ds)]
    columns = ("setting", "batch", "published", *names)
    return [best, Table("(perplexity - 1) / V in the post's settings", columns, rows)]


def sizes(ds: xr.Dataset) -> tuple[int, int]:
    return int(setting(ds, "vocabulary")), int(setting(ds, "context"))
