"""What a result of remarks says: tables, and what [Liu-4] remarks of one axis and of rates by frequency."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import xarray as xr

from probes.claims.claim import Claim
from probes.claims.rules import SURE, Test, above, below, every, near, range_told, some
from probes.results.statistics import between_runs, over_runs
from probes.results.tables import Table

from .learnt import in_order
from .rules import Judged, at, judge, need, over_told, places, setting, variable

POST = (30, 4)  # the post's vocabulary and context
SHARES = (100, 4)


def tables(ds: xr.Dataset) -> list[Table]:
    """Perplexity by case, losses by exponent: medians over seeds with their range."""
    rates = [f"rate {rate:g}" for rate in ds["learning_rate"].values]
    perplexity = 1 + setting(ds, "vocabulary") * ds["relative"]
    rows = [
        [name, *(range_told(x) for _, x in places(one, "learning_rate"))] for (name,), one in places(perplexity, "case")
    ]
    found = [Table("Perplexity: median over seeds (range)", ("model", *rates), rows)]
    if "share_loss" in ds:
        names = {
            "share_loss": "loss, nats",
            "even_loss": "loss, all tokens alike",
            "picked": "right of its own tokens",
            "length_rank": "rank correlation of share and length",
        }
        names = {name: words for name, words in names.items() if name in ds}
        both = product(places(ds[[*names]], "by_share"), ds["learning_rate"].values)
        rows = [
            [f"{power:g}", f"{rate:g}", *(range_told(one[name].sel(learning_rate=rate), ".3f") for name in names)]
            for ((power,), one), rate in both
        ]
        columns = ("power of the share", "rate", *names.values())
        found.append(Table("Learning rate by a token's share: median over seeds (range)", columns, rows))
    return found


def claims(ds: xr.Dataset) -> list[Claim]:
    """The statements."""
    return judge(__name__, ds, **in_order(ds))


def suffices(ds: xr.Dataset, cases: list[str]) -> Judged:
    """The task is done in all of these cases, at the better of the learning rates."""
    need((setting(ds, "vocabulary"), setting(ds, "context")) == POST)
    said, tests = [], []
    for (name,), one in places(1 + POST[0] * variable(ds, "relative", case=cases), "case"):
        found = [(rate, x) for (rate,), x in places(one, "learning_rate")]
        said.append(f"{name}: " + ", ".join(f"{over_told(x)} at rate {rate:g}" for rate, x in found))
        tests.append(some([near(over_runs(x.values), 1.0) for _, x in found]))
    return Judged("; ".join(said), every(tests)(SURE))


def lengths(ds: xr.Dataset) -> Judged:
    """Frequent tokens lie further out than rare ones, or less far."""
    said, tests = [], []
    for (rate,), one in places(_shares(ds, "length_rank").sel(by_share=0.0), "learning_rate"):
        found = over_runs(one.values)
        said.append(f"{over_told(one, '+.2f')} at rate {rate:g}")
        tests.append(some([above(found, 0), below(found, 0)]))
    return Judged("; ".join(said), every(tests)(SURE))


def rates(ds: xr.Dataset, loss: str) -> Judged:
    """Some power of the share does better than none."""
    values = _shares(ds, loss)
    said: list[str] = []
    tests: list[Test] = []
    for (rate,), one in places(values, "learning_rate"):
        told = [f"power {power:g}: {over_told(x, '.3f')}" for (power,), x in places(one, "by_share")]
        said.append(f"rate {rate:g}: {', '.join(told)}")
        equal = one.sel(by_share=0.0).values
        tests += [
            below(between_runs(x.values, equal), 0)
            for (power,), x in places(one, "by_share")
            if not math.isclose(power, 0)
        ]
    need(tests)
    return Judged(f"{'; '.join(said)} nats", some(tests)(SURE))


def _shares(ds: xr.Dataset, name: str) -> xr.DataArray:
    need((setting(ds, "share_vocabulary"), setting(ds, "context")) == SHARES)
    values = variable(ds, name).dropna("learning_rate", how="any")  # rates at which toys of some power failed
    need(values.size)
    return at(values, by_share=[0.0, *np.setdiff1d(ds["by_share"].values, 0.0)])
