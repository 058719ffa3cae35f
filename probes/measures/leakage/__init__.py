"""How much attention depends on where a query stands, and which source tells it: tables, chart and answer.

Definition and derivation are in `compute`; `samples` takes what is needed of attention, `forms` makes the parts and sources
of it, `nulls` what the total is held against.
"""

from __future__ import annotations

import math
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
from ...results.curves import estimate, spearman, with_interval
from ...results.tables import Table, estimated, number, variance
from .compute import PARTS as PARTS
from .compute import SOURCES as SOURCES
from .compute import leakage as leakage

BOUND = 0.25  # no number in [0, 1], which a weight is, varies by more
MILLION = 1_000_000  # squared weights are tiny: in millionths their tables are narrow enough to read
NULLS = {"null_uniform": "uniform attention", "null_fresh": "fresh weights", "null_shuffled": "shuffled labels"}
SINK = {"steady": "taken out", "log": "left in"}  # position 0's constant logit, of the residual stream's side
TERMS = {
    "sink_constant": "position 0's constant",
    "sink_varying": "its varying part",
    "log_rest": "the other keys",
}
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
    of it and the residual component, with intervals; the null checks; both forms block by block. If interrupted, the same
    command resumes.

    Examples:
      headwater leakage tiny-llama tiny-llama-ntk tiny-mistral-window
      headwater leakage tiny-qwen2 --bands 9-31 --lags 1,2,4 --prompts 128
    """

    fresh: int | None = options.option(
        "Prompts of the null with fresh weights; 0 for none; if not given, 64 where memory holds the weights twice."
    )
    initialization: str = options.initialization()


# ------------------------------------------------------------------------------------------- what results may be read for


def resolved(ds: xr.Dataset, form: str, band: str) -> bool:
    """Whether shares of this band's total ("log", "steady", "weight" or "terms" form) mean anything.

    Not where the total may be zero, of which they would be any number, nor where the null check of block 0 fails, nor where
    the form's "weights" are none.
    """
    log = form in SINK
    where = {"part": "total"} if log else {"cell": "both"}
    total = estimate(ds, f"{'log' if log else form}_form_of_model", band=band, **where)
    overflown = not log and overflow(ds, form).sel(band=band).any()
    return total[0] > 0 and not total[1] <= 0 and not null_fails(ds, band) and not overflown


def overflow(ds: xr.Dataset, form: str = "weight") -> xr.DataArray:
    """Where a form's parts say nothing, since they hold a variance above `BOUND`: [layer, band], or [band] without blocks.

    Without the mask every query has the same log Z. A query whose logits reach far above that has "weights" far above 1,
    10^40 and more where logits are of hundreds. Of a result without numbers by head, where some head's may be above it.
    """
    above: list[xr.DataArray] = []
    for level, times in (("", 1), ("_by_block", ds.sizes.get("head", 1)), ("_of_model", 1)):
        held = [ds[name] for what in ("form", "source") if (name := f"{form}_{what}{level}") in ds]
        apart = ("layer", "band")
        above = above or [(times * abs(one) > BOUND).any([dim for dim in one.dims if dim not in apart]) for one in held]
    return above[0] | above[-1]


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
        said = f"at queries {band} log-attention varies with their place by {total} nat^2 ({', '.join(nulls)})"
        if null_fails(ds, band):
            found = (
                "undecided, since block 0, whose stream holds no position, does not pass the check: take more prompts"
            )
        elif not resolved(ds, "steady", band):
            found = f"undecided whether it does at all, with {ds.sizes['prompt']} prompts"
        else:
            mask, stream = _shares(ds, "steady", band)
            found = f"{mask} of it comes from the mask and the constant sink, {stream} from the residual stream"
        lines.append(f"{model}: {said}; {found}.")
    return lines


def tables(results: Mapping[str, xr.Dataset]) -> list[Table]:
    """Totals, sources and checks of every band, then parts block by block in the first band."""
    totals, sources, terms, weights, checks = ([] for _ in range(5))
    for name, band, ds in ((name, str(band), one) for name, one in results.items() for band in one["band"].values):
        head, say = [name, band], partial(estimated, ds, band=band)
        size = partial(say, said=variance)
        totals.append([*head, size("log_form_of_model", part="total"), *map(say, NULLS)])
        for form, sink in SINK.items():
            sources.append([*head, sink, *_shares(ds, form, band), size(f"{form}_stream_of_model")])
        terms.append([*head, *(size(f"{term}_of_model") for term in TERMS)])
        for form, mask in (("weight", "denominator"), ("terms", "terms")):
            total = size(f"{form}_form_of_model", scale=MILLION, cell="both")
            weights.append([*head, mask, total, *_shares(ds, form, band)])
        checks.append([*head, *_checks(ds, band)])
    at, own = ("model", "band"), ("mask", "residual", "residual component")
    checked = ("V(X), first block", "V(K) there", "passed", "both sources removed", "V(X) with depth")
    return [
        Table("Total beside its nulls, log form (nat^2)", (*at, "total", *NULLS.values()), totals),
        Table("Sources, log form", (*at, "constant sink", *own), sources),
        Table("What moves denominators beside the number of keys, log form", (*at, *TERMS.values()), terms),
        Table("Sources, weight form (10^-6)", (*at, "mask as", "total", *SOURCES), weights),
        Table("Null checks, and rank correlation of V(X) with depth", (*at, *checked), checks),
        *_by_block(results),
    ]


def _shares(ds: xr.Dataset, form: str, band: str) -> list[str]:
    """The share of each source, "-" where shares mean nothing; in the log form there is no spread."""
    sources = SOURCES[: 2 if form in SINK else 3]
    if not resolved(ds, form, band):
        return ["-"] * len(sources)
    return [estimated(ds, f"{form}_share_of_model", ".0%", source=source, band=band) for source in sources]


def _checks(ds: xr.Dataset, band: str) -> list[str]:
    """What should be 0 in a band: V(X) in the first block, and the log form without both sources."""
    at, depth, layer = ds.sel(band=band), ds.sizes["layer"], ds["layer"].values[0]
    stream, own = (estimated(at, f"log_{name}_by_block", layer=layer) for name in ("stream", "sink"))
    passed = "NO: take more prompts" if null_fails(ds, band) else "yes"
    order = spearman(range(depth), at["steady_stream_by_block"]) if depth > 1 else math.nan
    return [stream, own, passed, f"{float(np.abs(at['log_neither']).max()):.1g}", number(order, ".2f")]


def _by_block(results: Mapping[str, xr.Dataset]) -> list[Table]:
    logs, weights = [], []
    for name, ds in results.items():
        early, beyond = ds.isel(band=0), overflow(ds).isel(band=0).values
        for n, layer in enumerate(map(str, ds["layer"].values)):
            at = early.isel(layer=n)
            bare = "positional" in at.coords and at["positional"] == "none"
            head = [name, f"{layer}, no rotation" if bare else layer]
            parts = map(variance, at["log_form_by_block"].sel(part=list(PARTS)))
            streams = [estimated(at, f"{form}_stream_by_block", said=variance) for form in SINK]
            logs.append([*head, *parts, number(at["log_noise_by_block"], ".2g"), *streams])
            total = MILLION * at["weight_form_by_block"].sel(cell="both")
            shapley = MILLION * at["weight_source_by_block"].sel(source=list(SOURCES))
            weights.append([*head, variance(total), *(["-"] * 3 if beyond[n] else map(number, shapley))])
    at, left_in = ("model", "block"), "V(X), constant sink left in"
    return [
        Table("Blocks, log form, first band", (*at, *PARTS, "noise", "residual component V(X)", left_in), logs),
        Table("Blocks, weight form, first band (10^-6)", (*at, "total", *SOURCES), weights),
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
        Headline("total (nat^2)", partial(_of_model, name="log_form", part="total"), ratio=True),
        Headline("share of mask and constant sink", partial(_share, form="steady", source="mask"), form=".0%"),
        Headline("share of the residual stream", partial(_share, form="steady", source="residual"), form=".0%"),
        Headline("residual component V(X) (nat^2)", partial(_of_model, name="steady_stream"), ratio=True),
        Headline("share of the mask, constant sink left in", partial(_share, form="log", source="mask"), form=".0%"),
        Headline("V(X), constant sink left in (nat^2)", partial(_of_model, name="log_stream"), ratio=True),
        Headline("constant sink (nat^2)", partial(_of_model, name="sink_constant"), ratio=True),
        Headline("varying sink (nat^2)", partial(_of_model, name="sink_varying"), ratio=True),
        Headline("total, weight form", partial(_of_model, name="weight_form", cell="both"), ratio=True),
    ),
    answer=answer,
    tables=tables,
    chart=chart,
    caption=CAPTION,
    defaults={"prompts": 256},
    trials={"leakage": partial(leakage, bootstrap=50)},
)
