"""How much attention depends on where a query stands, and which source tells it: tables, chart and answer.

Definition and derivation are in `compute`; `samples` takes what is needed of attention, `forms` makes the parts and sources
of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ... import options
from ...charts import (
    BLUE,
    DASHED,
    DOTTED,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    Panel,
    Series,
    blocks,
    dots,
    panels,
    stacks,
)
from ...measure import Headline, Measure
from ...results.curves import estimate, with_interval
from ...results.tables import Table, estimated, interval, number, variance
from .compute import NULLS
from .compute import PARTS as PARTS
from .compute import SOURCES as SOURCES
from .compute import leakage as leakage

BOUND = 0.25  # no number in [0, 1], which a weight is, varies by more
OF_SOURCES = {"mask": ("mask and constant sink", BLUE), "residual": ("residual stream", VERMILLION)}
OF_PARTS = {"logits": VERMILLION, "mask": BLUE, "denominator": ORANGE, "covariance": GREEN}
OF_NULLS = {"null_uniform": (SKY, DASHED), "null_fresh": (PURPLE, DOTTED), "null_shuffled": (GREY, DOTTED)}
SHARES = (-0.5, 1.5)  # of a total: of one within its noise they lie anywhere, and the axis ends here
FAR = 10.0  # times the upper quartile over blocks: an axis does not follow what goes beyond
CAPTION = (
    "By block: means over heads at the first band of queries; intervals: 95 % over documents; axes follow most blocks, and "
    "parts leave position 0's constant logit in the denominator. Shares: of the model, where its total is surely above 0."
)


@dataclass(frozen=True)
class Options(options.Bands):
    """Split the absolute position in attention patterns into the causal mask's part and the residual stream's.

    Writes leakage.nc, leakage.md and the chart: for every band of queries the total beside its nulls, each source's share
    of it and the residual component, with intervals; the null checks; the log form block by block. If interrupted, the same
    command resumes.

    Examples:
      headwater leakage tiny-llama tiny-llama-ntk tiny-mistral-window
      headwater leakage tiny-qwen2 --bands 9-31 --lags 1,2,4 --prompts 128
    """

    fresh: int | None = options.option(
        "Prompts of the null with fresh weights; 0 for none; if not given, 64, or 0 where memory cannot hold a second copy."
    )


# ------------------------------------------------------------------------------------------- what results may be read for


def resolved(ds: xr.Dataset, form: str, band: str) -> bool:
    """Whether shares of this band's total ("log", "steady" or "weight" form) mean anything.

    Not where the total may be zero, of which they would be any number, nor where the null check of block 0 fails, nor where
    the form's "weights" are none.
    """
    whole = {"part": "total"} if form != "weight" else {"cell": "both"}
    value, low, _ = estimate(ds, f"{'weight' if form == 'weight' else 'log'}_form_of_model", band=band, **whole)
    overflown = form == "weight" and bool(overflow(ds).sel(band=band).any())
    return value > 0 and not low <= 0 and not null_fails(ds, band) and not overflown


def overflow(ds: xr.Dataset) -> xr.DataArray:
    """Where the weight form says nothing, since some head of the block may hold a variance above `BOUND` [layer, band].

    Without the mask every query has the same log Z. A query whose logits reach far above that has "weights" far above 1,
    10^40 and more where logits are of hundreds.
    """
    cells, sources = (ds.sizes.get("head", 1) * abs(ds[f"weight_{what}_by_block"]) for what in ("form", "source"))
    return (cells > BOUND).any("cell") | (sources > BOUND).any("source")


def null_fails(ds: xr.Dataset, band: str) -> bool:
    """Whether block 0, whose streams carry no position, has a residual component whose interval excludes 0.

    One that position 0's own term V(K) accounts for is none: BOS has logits of its own there, which is no noise.
    """
    first = {"layer": ds["layer"].values[0], "band": band}
    _, low, high = estimate(ds, "log_stream_by_block", **first)
    _, own_low, own_high = estimate(ds, "log_sink_by_block", **first)
    return high < 0 or (low > 0 and not (own_low > 0 and own_high >= low))


# ------------------------------------------------------------------------------------------------- headlines and tables


def _of_model(ds: xr.Dataset, name: str, **where: str) -> xr.DataArray:
    """A variable of the whole model with its interval [estimate, band]."""
    return with_interval(ds, f"{name}_of_model").sel(where, drop=True)


def _share(ds: xr.Dataset, form: str, source: str) -> xr.DataArray:
    """A source's share of the total where shares mean anything [estimate, band]."""
    known = [resolved(ds, form, str(band)) for band in ds["band"].values]
    return _of_model(ds, f"{form}_share", source=source).where(xr.DataArray(known, dims="band"))


def answer(results: Mapping[str, xr.Dataset]) -> list[str]:
    """How much attention of early queries depends on their place, and how much of it each source supplies."""
    lines = []
    for model, ds in results.items():
        band = str(ds["band"].values[0])
        nulls = [f"{said} {estimated(ds, null, band=band)}" for null, said in NULLS.items() if null in ds]
        total = estimated(ds, "log_form_of_model", part="total", band=band)
        said = f"at queries {band} log-attention varies with their place by {total} nat² ({', '.join(nulls)})"
        if null_fails(ds, band):
            found = (
                "undecided, since block 0, whose stream holds no position, does not pass the check: take more prompts"
            )
        elif not resolved(ds, "steady", band):
            found = f"undecided whether it does at all, with {ds.sizes['prompt']} prompts"
        else:
            of_band = partial(estimated, ds, "steady_share_of_model", ".0%", band=band)
            mask, stream = (of_band(source=source) for source in ("mask", "residual"))
            found = f"{mask} of it comes from the mask and the constant sink, {stream} from the residual stream"
        lines.append(f"{model}: {said}; {found}.")
    return lines


def tables(results: Mapping[str, xr.Dataset]) -> list[Table]:
    """Null checks of every band, then parts block by block in the first band."""
    checks, logs = [], []
    for name, ds in results.items():
        for band in map(str, ds["band"].values):
            at = ds.sel(band=band)
            first = [estimated(at.isel(layer=0), f"log_{part}_by_block") for part in ("stream", "sink")]
            passed = "NO: take more prompts" if null_fails(ds, band) else "yes"
            checks.append([name, band, *first, passed, f"{float(np.abs(at['log_neither']).max()):.1g}"])
        for layer in ds["layer"].values:
            at = ds.isel(band=0).sel(layer=layer)
            said = {part: interval if part == "covariance" else variance for part in PARTS}  # which may be negative
            parts = [estimated(at, "log_form_by_block", said=said[part], part=part) for part in PARTS]
            streams = [estimated(at, f"{form}_stream_by_block", said=variance) for form in ("steady", "log")]
            logs.append([name, str(layer), *parts, number(at["log_noise_by_block"], ".2g"), *streams])
    checked = ("V(X), first block", "V(K) there", "passed", "both sources removed")
    streams = ("residual component V(X)", "V(X), constant sink left in")
    return [
        Table("Null checks", ("model", "band", *checked), checks),
        Table("Blocks, log form, first band", ("model", "block", *PARTS, "noise", *streams), logs),
    ]


# --------------------------------------------------------------------------------------------------------------- chart


def chart(results: Mapping[str, xr.Dataset]) -> Figure:
    """Total and residual component by block beside the nulls, shares of the total by band, and its parts by block."""
    rows = [
        Panel("leakage (nat²)", _leaks),
        Panel("band of queries", _share_dots),
        Panel("parts of the total (nat²)", _parts),
    ]
    return panels(results, rows, CAPTION)


def _leaks(cell: Axes, ds: xr.Dataset) -> None:
    early, x = ds.isel(band=0), ds["layer"].values
    total = with_interval(early, "log_form_by_block").sel(part="total")
    stream = with_interval(early, "steady_stream_by_block")
    shown = {"total": (total, INK), "residual component": (stream, VERMILLION)}
    series = [Series(label, y[0], color, y[1], y[2], x) for label, (y, color) in shown.items()]
    nulls = [
        Series(NULLS[null], [early[null]], color, line=line) for null, (color, line) in OF_NULLS.items() if null in ds
    ]
    blocks(cell, series, nulls)
    if reach := _reach(np.fmax(*(abs(one).max("estimate").values for one in (total, stream)))):
        cell.set_ylim(-0.1 * reach, reach)
    cell.set_xlabel(f"block, queries {early['band'].values}")


def _parts(cell: Axes, ds: xr.Dataset) -> None:
    early = ds["log_form_by_block"].isel(band=0)
    parts = early.sel(part=list(OF_PARTS))
    reach = _reach(np.fmax(parts.clip(min=0).sum("part").values, -parts.clip(max=0).sum("part").values))
    series = [Series(part, early.sel(part=part), color, x=ds["layer"]) for part, color in OF_PARTS.items()]
    stacks(cell, series, limit=reach)
    cell.set_xlabel(f"block, queries {early['band'].values}")


def _reach(sizes: np.ndarray) -> float | None:
    """How far an axis reaches that follows most blocks; None where none goes far beyond the others."""
    usual = FAR * np.quantile(sizes, 0.75)
    return 1.1 * float(sizes[sizes <= usual].max()) if (sizes > usual).any() and usual > 0 else None


def _share_dots(cell: Axes, ds: xr.Dataset) -> None:
    series = []
    for source, (label, color) in OF_SOURCES.items():
        share, low, high = _share(ds, "steady", source).values
        series.append(Series(label, share, color, low, high))
    dots(cell, list(map(str, ds["band"].values)), series, limits=SHARES)
    cell.axvline(1, color=GREY, linewidth=0.7, zorder=1)
    cell.set_xlabel("share of the total")


MEASURE = Measure(
    name="leakage",
    question="How much does attention depend on where a query stands, and does the mask or the residual stream tell it?",
    compute=leakage,
    options=Options,
    headlines=(
        Headline("total (nat²)", partial(_of_model, name="log_form", part="total"), ratio=True),
        *(Headline(f"null of {words} (nat²)", partial(with_interval, name=null)) for null, words in NULLS.items()),
        Headline("share of mask and constant sink", partial(_share, form="steady", source="mask"), form=".0%"),
        Headline("share of the residual stream", partial(_share, form="steady", source="residual"), form=".0%"),
        Headline("residual component V(X) (nat²)", partial(_of_model, name="steady_stream"), ratio=True),
        Headline("share of the mask, constant sink left in", partial(_share, form="log", source="mask"), form=".0%"),
        Headline("V(X), constant sink left in (nat²)", partial(_of_model, name="log_stream"), ratio=True),
        Headline("constant sink (nat²)", partial(_of_model, name="sink_constant"), ratio=True),
        Headline("varying sink (nat²)", partial(_of_model, name="sink_varying"), ratio=True),
        Headline("total, weight form", partial(_of_model, name="weight_form", cell="both"), ratio=True),
    ),
    answer=answer,
    tables=tables,
    chart=chart,
    defaults={"prompts": 256},
    trials={"leakage": partial(leakage, bootstrap=50)},
)
