"""How much attention depends on where a query stands, and which party tells it: tables, chart and answer.

Definition and derivation are in `compute`; `samples` takes what is needed of attention, `forms` makes variances and
covariances of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ... import options
from ...charts import BLUE, DASHED, DOTTED, GREEN, GREY, INK, PURPLE, SKY, Panel, Series, blocks, dots, panels
from ...measure import Headline, Measure
from ...results.curves import estimate, with_interval
from ...results.tables import Table, estimated, interval, number, variance
from .compute import ALL, NULLS, PARTIES, QUANTILES
from .compute import leakage as leakage

LINES = (SKY, DASHED), (PURPLE, DOTTED), (BLUE, DASHED), (GREY, DOTTED)
OF_NULLS = dict(zip(NULLS, LINES, strict=True))
# Entries of the symmetric matrix, in words.
ENTRIES = {
    **{party: (party, party) for party in PARTIES},
    **{f"{one} & {other}": (one, other) for n, one in enumerate(PARTIES) for other in PARTIES[n + 1 :]},
    "all nine": (ALL, ALL),
}
FAR = 10.0  # times the upper quartile over blocks: an axis does not follow what goes beyond
NOTE = (
    "Parties: their covariances, medians over all heads, which do not add up (those of two enter V(l) twice), 95 % "
    "intervals over documents; dashed: V(l) of uniform attention."
)
SURELY = {side: f"surely_{side}_null_of_model" for side in ("below", "above")}
KNOWS = "of absolute position than the mask alone would tell it"


@dataclass(frozen=True)
class Options(options.Bands):
    """Measure how much attention depends on absolute position, and split it between the number of keys, the constant sink
    and the residual stream.

    Writes leakage.nc, leakage.md and the chart: for every band of queries median and quartiles over heads beside their
    nulls, the share of log-attention's variance that position explains, the covariances of the three parties, with
    intervals; the null checks; every block. If interrupted, the same command resumes.

    Examples:
      headwater leakage tiny-llama tiny-llama-ntk tiny-mistral-window
      headwater leakage tiny-qwen2 --bands 9-31 --lags 1,2,4 --prompts 128
    """

    fresh: int | None = options.option(
        "Prompts of the null with fresh weights; 0 for none; if not given, 64, or 0 where memory cannot hold a second copy."
    )
    unmasked: bool = options.flag("--unmasked", "Repeat with the same weights, every query seeing every key.")


def null_fails(ds: xr.Dataset, band: str) -> bool:
    """Whether block 0, whose streams carry no position, has a residual component whose interval excludes 0.

    One that position 0's own term accounts for is none: BOS has logits of its own there, which is no noise. Nor is one of
    a hybrid, whose recurrent layers tell the first queries their places.
    """
    if "unmeasured_layers" in ds.attrs:
        return False
    first = {"layer": ds["layer"].values[0], "band": band}
    _, low, high = estimate(ds, "log_stream_by_block", **first)
    _, own_low, own_high = estimate(ds, "log_sink_by_block", **first)
    return high < 0 or (low > 0 and not (own_low > 0 and own_high >= low))


# ------------------------------------------------------------------------------------------------- headlines and tables


def _over_heads(ds: xr.Dataset, name: str, quantile: str = "median") -> xr.DataArray:
    """One of a variable's quantiles over heads [estimate, band]."""
    return with_interval(ds, name).sel(quantile=quantile, drop=True)


def _entries(ds: xr.Dataset) -> xr.DataArray:
    """The matrix's six different entries and their sum, medians over heads [estimate, entry, band]."""
    medians = with_interval(ds, "parties_of_heads")
    found = [medians.sel(party=one, other=other, drop=True) for one, other in ENTRIES.values()]
    return xr.concat(found, xr.Variable("entry", list(ENTRIES))).transpose("estimate", "entry", "band")


def answer(results: Mapping[str, xr.Dataset]) -> list[str]:
    """How much the median head's attention to early keys depends on its place, beside what the mask alone would make."""
    lines = []
    for model, ds in results.items():
        at: dict[str, Any] = {"band": str(ds["band"].values[0])}
        low, median, high = (estimated(ds, "log_form_of_heads", quantile=one, **at) for one in QUANTILES)
        nulls = (
            f"{NULLS[null]} {estimated(ds, f'null_{null}', quantile='median', **at)}"
            for null in NULLS
            if f"null_{null}" in ds
        )
        share = estimated(ds, "position_share_of_heads", ".1%", quantile="median", **at)
        below = estimate(ds, "below_null_of_model", **at)
        known = "less" if below[1] > 0.5 else "more" if below[2] < 0.5 else None
        found = f"attention knows {known} {KNOWS}" if known else f"undecided whether attention knows less {KNOWS}"
        lines.append(
            f"{model}: at queries {at['band']} the median head's log-attention varies with the query's place by {median} "
            f"nat² (quartiles {low} and {high}; {', '.join(nulls)}), {share} of its variance at a fixed lag; "
            f"{interval(*below, form='.0%')} of heads lie below uniform attention under the same mask: {found}."
        )
        if null_fails(ds, at["band"]):
            lines[-1] += " Which party makes it is undecided: block 0, whose stream holds no position, fails the check."
    return lines


def tables(results: Mapping[str, xr.Dataset]) -> list[Table]:
    """Null checks and matrices of every band, then block by block in the first band."""
    checks, matrices, rows = [], [], []
    for name, ds in results.items():
        for band in map(str, ds["band"].values):
            at = ds.sel(band=band)
            first = [estimated(at.isel(layer=0), f"log_{part}_by_block") for part in ("stream", "sink")]
            passed = (
                "NO: take more prompts"
                if null_fails(ds, band)
                else "yes"
                if "unmeasured_layers" not in ds.attrs
                else "none"
            )
            checks.append([name, band, *first, passed, f"{float(np.abs(at['log_neither']).max()):.1g}"])
            matrices += [[name, band, *row] for row in _matrix(at)]
        rows += [[name, *row] for row in _blocks(ds.isel(band=0))]
    checked = ("V(X), first block", "V(K) there", "passed", "all parties removed")
    heads = ("lower quartile", "median", "upper quartile", "uniform attention", "share of position")
    means = (*(f"V({party})" for party in PARTIES), "V(X), constant sink left in", "noise")
    return [
        Table("Null checks", ("model", "band", *checked), checks),
        Table("Covariances of the parties, nat²", ("model", "band", "over heads", "", *PARTIES, ALL), matrices),
        Table("Blocks, first band: over heads, then means", ("model", "block", *heads, *means), rows),
    ]


def _matrix(at: xr.Dataset) -> list[list[str]]:
    """Rows of the matrix of a band, medians and means over heads."""
    return [
        [words, party, *(estimated(at, name, party=party, other=other) for other in (*PARTIES, ALL))]
        for words, name in {"median": "parties_of_heads", "mean": "parties_of_model"}.items()
        for party in (*PARTIES, ALL)
    ]


def _blocks(at: xr.Dataset) -> list[list[str]]:
    """A row for each block of a band."""
    found = []
    quantiles = over_block(at["log_form"].sel(part="total"))
    for layer in at["layer"].values:
        here, own = at.sel(layer=layer), [number(one) for one in quantiles.sel(layer=layer)]
        null, share = number(here["null_uniform_by_block"]), f"{float(here['position_share'].median()):.1%}"
        variances = [estimated(here, "parties_by_block", said=variance, party=party, other=party) for party in PARTIES]
        stream, noise = estimated(here, "log_stream_by_block", said=variance), number(here["log_noise_by_block"], ".2g")
        found.append([str(layer), *own, null, share, *variances, stream, noise])
    return found


def over_block(values: xr.DataArray) -> xr.DataArray:
    """Quartiles and median over each block's heads [quantile, layer, ...]."""
    return values.quantile(list(QUANTILES.values()), "head")


# --------------------------------------------------------------------------------------------------------------- chart


def chart(results: Mapping[str, xr.Dataset]) -> Figure:
    """Leakage by block beside its nulls, the parties' covariances, and the share of position by block."""
    rows = [
        Panel("leakage V(l) (nat²)", partial(_by_block, name="log_form", null="null")),
        Panel("parties (median head)", _parties, note=NOTE),
        Panel("share of variance that position explains", partial(_by_block, name="position_share", null="null_share")),
    ]
    return panels(results, rows, "By block: median and quartiles over heads.")


def _by_block(cell: Axes, ds: xr.Dataset, name: str, null: str) -> None:
    early, x = ds.isel(band=0), ds["layer"].values
    values = early[name].sel(part="total") if name == "log_form" else early[name]
    low, median, high = over_block(values).values
    color = INK if name == "log_form" else GREEN
    nulls = [
        Series(NULLS[of], [early[f"{null}_{of}"].sel(quantile="median")], OF_NULLS[of][0], line=OF_NULLS[of][1])
        for of in NULLS
        if f"{null}_{of}" in ds
    ]
    blocks(cell, [Series("median head", median, color, low, high, x)], nulls)
    if reach := _reach(np.abs([low, high]).max(0)):
        cell.set_ylim(-0.1 * reach, reach)
    cell.set_xlabel(f"block, queries {early['band'].values}")


def _reach(sizes: np.ndarray) -> float | None:
    """How far an axis reaches that follows most blocks; None where none goes far beyond the others."""
    usual = FAR * np.quantile(sizes, 0.75)
    return 1.1 * float(sizes[sizes <= usual].max()) if (sizes > usual).any() and usual > 0 else None


def _parties(cell: Axes, ds: xr.Dataset) -> None:
    early = ds.isel(band=0)
    value, low, high = _entries(early.expand_dims("band")).isel(band=0).values
    dots(cell, list(ENTRIES), [Series("", value, BLUE, low, high)])
    cell.axvline(
        float(early["null_uniform"].sel(quantile="median")), color=SKY, linestyle=DASHED, linewidth=1.1, zorder=1
    )
    cell.locator_params(axis="x", nbins=3)
    cell.set_xlabel(f"nat², queries {early['band'].values}")


MEASURE = Measure(
    name="leakage",
    question="How much does attention depend on where a query stands, and which of mask, sink and residual stream tells it?",
    compute=leakage,
    options=Options,
    headlines=(
        Headline("leakage V(l), median head (nat²)", partial(_over_heads, name="log_form_of_heads"), ratio=True),
        Headline("null of uniform attention (nat²)", partial(_over_heads, name="null_uniform")),
        Headline("heads below uniform attention", partial(with_interval, name="below_null_of_model"), form=".0%"),
        Headline("share of position, median head", partial(_over_heads, name="position_share_of_heads"), form=".2%"),
        *(
            Headline(f"heads surely {side} uniform attention", lambda ds, name=name: ds[name], form=".0%")
            for side, name in SURELY.items()
        ),
        *(
            Headline(
                f"{words}, {quartile}", partial(_over_heads, name=f"{name}_of_heads", quantile=quartile), form=form
            )
            for words, name, form in (
                ("leakage (nat²)", "log_form", ".3g"),
                ("share of position", "position_share", ".2%"),
            )
            for quartile in ("lower quartile", "upper quartile")
        ),
        *(
            Headline(f"null of {NULLS[null]}{words}", partial(_over_heads, name=f"{what}_{null}"), form=form)
            for null in ("fresh", "unmasked", "shuffled")
            for what, words, form in (("null", " (nat²)", ".3g"), ("null_share", ", share", ".2%"))
        ),
        Headline("covariance of parties, median head (nat²)", _entries),
        Headline(
            "residual component V(X), mean over heads (nat²)", partial(with_interval, name="steady_stream_of_model")
        ),
    ),
    answer=answer,
    tables=tables,
    chart=chart,
    defaults={"prompts": 256},
    trials={"leakage": partial(leakage, bootstrap=50)},
)
