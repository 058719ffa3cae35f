"""What a result of exchanges says: tables, and the statements of [Liu-4] on tokens that change places."""

from __future__ import annotations

import numpy as np
import xarray as xr

from probes.claims.claim import Claim
from probes.claims.rules import above, below
from probes.results.statistics import over_runs
from probes.results.tables import Table, number

from . import exchanges
from .learnt import in_order
from .rules import Judged, by_parts, judge, need, over_told, places, setting

ROUND = 0.1  # roundness of what counts as a circle, ours
EVEN = 0.1  # spread of gaps of what counts as even, ours; random angles have about 1
MOST = 0.5  # share of exchanges
FAST, VOCABULARY = 0.1, 100
KINDS = ("residual", "learning_rate", "schedule")
NEAR, SETTLED = exchanges.NEAR, exchanges.SETTLED  # also named by the statements


def tables(ds: xr.Dataset) -> list[Table]:
    """The circles, and what exchanges have to do with the loss: medians over seeds."""
    circles, beside = [], []
    for labels, one in places(ds, *KINDS):
        end, said = one.isel(point=-1), [str(label) for label in labels]
        both = [
            [end[name].sel(table=table) for table in ("embedding", "unembedding")]
            for name in ("roundness", "gap_spread")
        ]
        known = [_median(end[name]) for name in ("loss", "picked") if name in end]
        circles.append([*said, *known, *(_median(x) for row in both for x in row)])
        rates = [one["rate"].sel(table=table) for table in exchanges.TABLES]
        more = [*rates, *(one[name] for name in ("spikes", "spiked", "spiked_chance", "excess", "excess_chance"))]
        beside.append([*said, *map(_median, more), over_told(_passing_cost(one), "+.3f")])
    picked = ["right of its own tokens"] if "picked" in ds else []
    columns = ("loss, nat", *picked, *(f"{of}, {table}" for of in ("radius", "gaps") for table in exchanges.TABLES))
    title = (
        "Circles at the end of training: deviation over mean of the radius and of neighbours' gaps (medians over seeds)"
    )
    names = (
        *(f"per 1,000 steps, {table}" for table in exchanges.TABLES),
        *("spikes", "near a spike", "at shifted times", "loss over its median", "at shifted times"),
    )
    late = f"Exchanges after {SETTLED:.0%} of the training (medians over seeds; the cost to the two tokens: mean over runs)"
    return [
        Table(title, (*KINDS, *columns), circles),
        Table(late, (*KINDS, *names, "cost to the two, nat"), beside),
    ]


def _median(values: xr.DataArray) -> str:
    known = values.values[np.isfinite(values.values)]
    return number(np.median(known), ".3g") if known.size else "-"


def _passing_cost(ds: xr.Dataset) -> xr.DataArray:
    """[..., seed]: what the two tokens lose on the day, over the outer half of the window."""
    own = ds["passing"].sel(who="the two")
    return own.sel(lag=0) - own.where(abs(own["lag"]) > own["lag"].max() / 2).mean("lag")


def claims(ds: xr.Dataset) -> list[Claim]:
    """The statements, judged in every setting whose toys know the order of their tokens."""
    return judge(__name__, ds, **in_order(ds))


def _fast(ds: xr.Dataset) -> xr.Dataset:
    """The post's setting with spikes: learning rate 0.1, constant."""
    need(
        FAST in ds["learning_rate"].values, "constant" in ds["schedule"].values, setting(ds, "vocabulary") == VOCABULARY
    )
    return ds.sel(learning_rate=FAST, schedule="constant")


def _by_residual(values: xr.DataArray, form: str = ".3g") -> list[tuple[str, xr.DataArray]]:
    return [
        (f"residual stream {residual}: {over_told(one, form)}", one)
        for (residual,), one in places(values.dropna("residual", how="all"), "residual")
    ]


def circles(ds: xr.Dataset, table: str) -> Judged:
    """The points of a table lie on a circle at the end."""
    values = _fast(ds)["roundness"].sel(table=table).isel(point=-1)
    return by_parts([(said, below(over_runs(one.values), ROUND)) for said, one in _by_residual(values)])


def changes(ds: xr.Dataset, table: str) -> Judged:
    """Tokens change places."""
    rate = _fast(ds)["rate"].sel(table=table)
    return by_parts([(said, above(over_runs(one.values), 0)) for said, one in _by_residual(rate)])


def each_a_spike(ds: xr.Dataset) -> Judged:
    """Most exchanges stand at a spike."""
    return by_parts([(said, above(over_runs(one.values), MOST)) for said, one in _by_residual(_fast(ds)["spiked"])])


def at_spikes(ds: xr.Dataset) -> Judged:
    """In runs with spikes, more exchanges stand at them than chance has."""
    fast = _fast(ds)
    more = (fast["spiked"] - fast["spiked_chance"]).where(fast["spikes"] > 0)
    found = [(said, one.dropna("seed")) for said, one in _by_residual(more, "+.3f")]
    return by_parts([(f"{said} in {one.size} runs", above(over_runs(one.values), 0)) for said, one in found])


def loss_high(ds: xr.Dataset) -> Judged:
    """At exchanges the loss is higher than at shifted times."""
    fast = _fast(ds)
    more = fast["excess"] - fast["excess_chance"]
    return by_parts([(f"{said} nat", above(over_runs(one.values), 0)) for said, one in _by_residual(more, "+.3f")])


def cost(ds: xr.Dataset) -> Judged:
    """The two tokens lose while they pass."""
    values = _passing_cost(_fast(ds))
    return by_parts([(f"{said} nat", above(over_runs(one.values), 0)) for said, one in _by_residual(values, "+.3f")])


def decay_lowers(ds: xr.Dataset, name: str) -> Judged:
    """With a rate that falls, less than with a constant one, seed by seed."""
    constant = _fast(ds)
    need("cosine" in ds["schedule"].values)
    falling = ds.sel(learning_rate=FAST, schedule="cosine")
    ends = [one[name].sel(table="unembedding").isel(point=-1, missing_dims="ignore") for one in (constant, falling)]
    found = []
    for (residual,), less in places((ends[1] - ends[0]).dropna("residual", how="all"), "residual"):
        said = " to ".join(over_told(one.sel(residual=residual)) for one in ends)
        found.append((f"residual stream {residual}: {said}", below(over_runs(less.values), 0)))
    return by_parts(found)


def even(ds: xr.Dataset, schedule: str) -> Judged:
    """The angles between neighbours are even at the end."""
    need(schedule in ds["schedule"].values, setting(ds, "vocabulary") == VOCABULARY)
    values = ds["gap_spread"].sel(table="unembedding", schedule=schedule).isel(point=-1)
    found = []
    for (rate,), at in places(values, "learning_rate"):
        found += [(f"rate {rate:g}, {said}", below(over_runs(one.values), EVEN)) for said, one in _by_residual(at)]
    return by_parts(found)
