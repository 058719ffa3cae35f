"""What a model does without its first token: something else at position 0, or nothing there (`compute`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from ... import options
from ...charts import (
    BLUE,
    CYCLE,
    DOTTED,
    GREY,
    INK,
    TEXT,
    Panel,
    Series,
    blocks,
    curves,
    dots,
    numeral,
    panels,
    wrapped,
)
from ...measure import Headline, Measure
from ...results.curves import estimate, relative_error, with_interval
from ...results.tables import Table, estimated, interval, number, variance
from ..jacobian import PRODUCTS
from .compute import PROFILE_PROMPTS, bos_swap
from .compute import removed as removed

EFFECTS = {  # by variable: a number for each replacement, how it is called, and how it is written
    "loss_change_of_model": ("loss, change (nat)", "+.4f"),
    "kl_of_model": ("KL (nat)", ".4f"),
    "recall_log_p_change": ("log p of values, change (nat)", "+.2f"),
    "recall_exact_change": ("exact answers, change", "+.2f"),
}
RECALL = {
    "recall_log_p_before": ("log p of values", ".2f"),
    "recall_log_p_after": ("after", ".2f"),
    "recall_exact_before": ("exact answers", ".2f"),
    "recall_exact_after": ("after", ".2f"),
}
COMPONENTS = {"_steady": "", "": ", the constant sink left in"}  # of the residual component: what is said of each

CAPTION = (
    "Intervals: 95 % over documents, of recall over lists; bands of the loss: means of the positions' own intervals."
)
FEW = 6  # replacements that have a colour each; more of them have a line each
SMALL = 0.1  # nats; the axis of the loss is linear below: first positions lose a hundred times what later ones do
OUTCOMES = {  # of many replacements, by variable: the panel's words, and up to where its axis is linear
    "sink_rate_after": ("sink rate after; dotted: before", 1.0),
    "loss_change_of_model": ("change of loss (nat)", 0.01),
    "kl_of_model": ("KL of the next token (nat)", 0.01),
    "recall_log_p_change": ("change of recall, log p (nat)", 1.0),
}
LINE = 0.17  # inches of a replacement's line
ACROSS = 1.6  # inches of words below a panel, one of four side by side


@dataclass(frozen=True)
class Options(options.Bands):
    """Put something else at position 0, or take it out of attention, and see what changes.

    Writes bos-swap.nc, bos-swap.md and the chart: for every replacement the fraction of the residual component of leakage
    that it removes in each band, and sink rate, loss, KL divergence, recall and Jacobian profile before and after. If
    interrupted, the same command resumes.

    Examples:
      headwater bos-swap tiny-llama
      headwater bos-swap tiny-llama tiny-qwen2 --replace mean,zero,random,17
      headwater bos-swap ./checkpoint --bands 9-31 --profile-prompts 2
      headwater bos-swap smollm2-135m --replace "mean@4,mean:keys,mean*0.4,without-0@8,held-log-z" --recall 12
    """

    replace: str = options.option(
        "What to do at position 0, one after another: mean, zero, random, drawn, token ids, each with @BLOCK, :PART (keys, "
        "values, both), *DOSE if wanted; without-0, constant-sink, held-log-z, each with @BLOCK if wanted.",
        "mean",
    )
    profile_prompts: int = options.option("Prompts of the Jacobian profile; 0: none.", PROFILE_PROMPTS)
    products: int = options.option("Products of the profile's sketch, per prompt.", PRODUCTS, max=options.MOST_PRODUCTS)
    recall: int = options.option("Lists of keys and values that recall is measured on; 0: none.", 0)

    def values(self) -> dict[str, Any]:
        """As `bos_swap` takes them."""
        values = super().values()
        chosen = values.pop("replace").split(",")
        return values | {"replacement": chosen if chosen[1:] else chosen[0]}


# ------------------------------------------------------------------------------------------------------------- numbers


def of_several(ds: xr.Dataset) -> xr.Dataset:
    """With the dimension `replacement` in front, of length one where the result is of a single one."""
    if "replacement" in ds.dims or "replacement" not in ds.attrs:
        return ds
    return ds.drop_vars("tokens", errors="ignore").expand_dims(replacement=[str(ds.attrs["replacement"])])


def each(ds: xr.Dataset) -> Iterator[tuple[str, xr.Dataset]]:
    """(replacement, its result)."""
    several = of_several(ds)
    yield from ((name, several.sel(replacement=name)) for name in map(str, several["replacement"].values))


def _own(ds: xr.Dataset, name: str) -> xr.DataArray:
    """A variable of each replacement with its interval."""
    return with_interval(of_several(ds), name)


def _sink_rate(ds: xr.Dataset, when: str = "after") -> xr.DataArray:
    return of_several(ds)[f"sink_rate_{when}"].mean("layer")


def _profile_change(ds: xr.Dataset) -> float:
    """|after / before - 1| of the Jacobian profile, mean over positions from 1 on; at position 0 stands something else."""
    before, after = (ds[f"sensitivity_{when}"].values[1:] for when in ("before", "after"))
    return relative_error(after, before)


def answer(results: Mapping[str, xr.Dataset]) -> list[str]:
    """What becomes of sinks, loss and V(X) under the first replacement, and how many replacements cost loss."""
    lines = []
    for model, whole in results.items():
        ds = of_several(whole)
        first = ds.isel(replacement=0)
        before, after = (float(_sink_rate(ds, when)[0]) for when in ("before", "after"))
        said = f"with {first['replacement'].item()} at position 0 the sink rate goes from {before:.0%} to {after:.0%}"
        said += f", and the loss changes by {estimated(first, 'loss_change_of_model', '+.3g')} nat"
        said += f"; {_component(first.isel(band=0))}"
        if (count := ds.sizes["replacement"]) > 1 and "loss_change_of_model_low" in ds:
            costly = int((ds["loss_change_of_model_low"] > 0).sum())
            said += f"; {costly or 'none'} of {count} replacements clearly cost loss"
        lines.append(f"{model}: {said}.")
    return lines


def _component(ds: xr.Dataset) -> str:
    """What becomes of the residual component in a band, or that it is undecided."""
    value, low, high = estimate(ds, "removed_steady_of_model")
    component = f"the residual component of leakage (queries {ds['band'].item()})"
    if 0 < low < high < np.inf:
        return f"{component} falls by {interval(value, low, high, '.0%')}"
    if -np.inf < low < high < 0:
        return f"{component} grows by {interval(-value, -high, -low, '.0%')}"
    return f"whether {component} changes is undecided"


# -------------------------------------------------------------------------------------------------------------- tables


def tables(results: Mapping[str, xr.Dataset]) -> list[Table]:
    """What each replacement does to sinks and behaviour, and what it removes in every band."""
    at = ("model", "replacement")
    shown = {name: words for name, words in (EFFECTS | RECALL).items() if any(name in ds for ds in results.values())}
    words = ("sink rate", "after", "loss", "after", "profile", *(words for words, _ in shown.values()))
    effects, components = [], []
    for model, name, ds in ((model, *one) for model, whole in results.items() for one in each(whole)):
        means = [ds[f"sink_rate_{when}"].mean() for when in ("before", "after")]
        means += [ds[f"loss_{when}"][1:].mean() for when in ("before", "after")]  # a NaN at the last is left out
        profile = number(_profile_change(ds), ".1%") if "sensitivity_before" in ds else "-"
        more = [estimated(ds, one, form) if one in ds else "-" for one, (_, form) in shown.items()]
        effects.append([model, name, *(number(mean, ".3f") for mean in means), profile, *more])
        for band in ds["band"].values:
            cells, of = [], ds.sel(band=band)
            for sink in COMPONENTS:
                cells += [
                    estimated(of, f"residual{sink}_{when}_of_model", said=variance) for when in ("before", "after")
                ]
                cells.append(estimated(of, f"removed{sink}_of_model", ".0%"))
            components.append([model, name, str(band), *cells])
    sides = ("before", "after", "removed")
    title = "Residual component: the constant sink taken out, and left in"
    return [
        Table("Sinks and behaviour", (*at, *words), effects),
        Table(title, (*at, "band", *sides, *sides), components),
    ]


# --------------------------------------------------------------------------------------------------------------- chart


def chart(results: Mapping[str, xr.Dataset]) -> Figure:
    """What a swap does to loss and sinks; of many, the outcomes of each, line by line."""
    several = {model: of_several(ds) for model, ds in results.items()}
    most = max(ds.sizes["replacement"] for ds in several.values())
    rows = [Panel("change of loss (nat)", _losses), Panel("sink rate of position 0", _sink_rates, share=True)]
    if most > FEW:
        names = [name for name in OUTCOMES if all(name in ds for ds in several.values())]
        rows = [Panel("", partial(_outcome, name=name), height=LINE * most + 0.6) for name in names]
    return panels(several, rows, CAPTION)


def _losses(cell: Axes, ds: xr.Dataset) -> None:
    """Changes of the loss, means over positions 1, 2-3, 4-7, ...; the last position predicts nothing that is known."""
    first = 2 ** np.arange(int(np.log2(ds.sizes["position"] - 2)) + 1)
    drawn = []
    for (name, at), color in zip(each(ds), CYCLE, strict=False):
        parts = np.split(with_interval(at, "loss_change").values[:, :-1], first, axis=1)[1:]
        y, low, high = np.stack([part.mean(1) for part in parts], 1)
        drawn.append(Series(name, y, color, low, high, first, marker="o"))
    curves(cell, drawn)
    cell.axhline(0, color=GREY, linewidth=0.8, zorder=1)
    cell.set_yscale("symlog", linthresh=SMALL, linscale=0.6)
    cell.set_xscale("log", base=2)
    for axis in (cell.xaxis, cell.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: numeral(value)))
    cell.set_xlabel("query, means up to the next mark")


def _sink_rates(cell: Axes, ds: xr.Dataset) -> None:
    """Sink rates by block, before and after."""
    x = ds["layer"].values
    drawn = [Series("as it is", ds["sink_rate_before"].isel(replacement=0), INK, x=x)]
    drawn += [Series(name, at["sink_rate_after"], c, x=x) for (name, at), c in zip(each(ds), CYCLE, strict=False)]
    blocks(cell, drawn)
    cell.set_ylim(-0.03, 1.03)


def _outcome(cell: Axes, ds: xr.Dataset, name: str) -> None:
    """One outcome of every replacement, in their order."""
    words, linear = OUTCOMES[name]
    at = ds.mean("layer") if name == "sink_rate_after" else ds
    y, low, high = with_interval(at, name).values
    dots(cell, list(map(str, ds["replacement"].values)), [Series("", y, BLUE, low, high)])
    if name == "sink_rate_after":
        cell.axvline(float(ds["sink_rate_before"].mean()), color=INK, linewidth=0.9, linestyle=DOTTED)
        cell.set_xlim(-0.03, 1.03)
    else:
        cell.set_xscale("symlog", linthresh=linear)
        cell.xaxis.set_major_formatter(FuncFormatter(lambda value, _: numeral(value)))
        if not (ds[name] < -linear).any():
            cell.set_xlim(left=-linear / 2)
    cell.set_xlabel(wrapped(words, ACROSS, TEXT))


RESAMPLED = {"bootstrap": 50}
MEASURE = Measure(
    name="bos-swap",
    question="What changes when something else stands at position 0?",
    compute=bos_swap,
    options=Options,
    headlines=(
        Headline("sink rate, after", _sink_rate),
        *(
            Headline(words, partial(_own, name=name), ratio=name == "kl_of_model", form=form)
            for name, (words, form) in EFFECTS.items()
        ),
        *(
            Headline(f"residual component removed{words}", partial(_own, name=f"removed{sink}_of_model"), form=".0%")
            for sink, words in COMPONENTS.items()
        ),
    ),
    answer=answer,
    tables=tables,
    chart=chart,
    defaults={"prompts": 128},
    trials={
        "bos-swap, mean@1:keys": partial(
            bos_swap, replacement="mean@1:keys", profile_prompts=1, products=32, recall=2, **RESAMPLED
        ),
        "bos-swap, held-log-z": partial(bos_swap, replacement="held-log-z", profile_prompts=0, **RESAMPLED),
    },
)
