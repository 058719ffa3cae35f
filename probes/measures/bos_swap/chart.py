"""How swaps of position 0 are drawn: what each does to loss, sinks and profile, or, of many, their outcomes in lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from ...charts import (
    BLUE,
    CYCLE,
    DOTTED,
    GREY,
    INK,
    Panel,
    Series,
    blocks,
    curves,
    dots,
    numeral,
    panels,
    position_axis,
    wrapped,
)
from ...charts.style import TEXT
from ...results.curves import with_interval

CAPTION = "Bars: 95 % over documents, of recall over lists; bands of the loss: means of the positions' own intervals."
FEW = 6  # replacements that have a colour each; more of them have a line each
SMALL = 0.1  # nats; the axis of the loss is linear below: first positions lose a hundred times what later ones do
HIGHEST = 3.0  # times the largest sensitivity before: a norm of a zero vector is as steep as its epsilon allows
OUTCOMES = {  # of many replacements, by variable: the panel's words, and up to where its axis is linear
    "sink_rate_after": ("sink rate after; dotted: before", 1.0),
    "loss_change_of_model": ("change of loss (nat)", 0.01),
    "kl_of_model": ("KL of the next token (nat)", 0.01),
    "recall_log_p_change": ("change of recall, log p (nat)", 1.0),
}
LINE = 0.17  # inches of a replacement's line
ACROSS = 1.6  # inches of words below a panel, one of four side by side


def of_several(ds: xr.Dataset) -> xr.Dataset:
    """With the dimension `replacement` in front, of length one where the result is of a single one."""
    if "replacement" in ds.dims or "replacement" not in ds.attrs:
        return ds
    return ds.drop_vars("tokens", errors="ignore").expand_dims(replacement=[str(ds.attrs["replacement"])])


def chart(results: Mapping[str, xr.Dataset]) -> Figure:
    """What a swap does to loss, sinks and profile; of many, the outcomes of each, line by line."""
    several = {model: of_several(ds) for model, ds in results.items()}
    most = max(ds.sizes["replacement"] for ds in several.values())
    if most > FEW:
        names = [name for name in OUTCOMES if all(name in ds for ds in several.values())]
        rows = [Panel("", partial(outcome, name=name), height=LINE * most + 0.6) for name in names]
    else:
        rows = [
            Panel("change of loss (nat)", losses),
            Panel("sink rate of position 0", sink_rates, share=True),
            Panel("sensitivity to the input", profiles),
        ]
        rows = rows if all("sensitivity_after" in ds for ds in several.values()) else rows[:-1]
    return panels(several, rows, CAPTION)


def _each(ds: xr.Dataset) -> Iterator[tuple[xr.Dataset, str, str]]:
    """(result, words, colour) of each replacement."""
    for n, name in enumerate(map(str, ds["replacement"].values)):
        yield ds.sel(replacement=name), f"token {name}" if name.isdigit() else name, CYCLE[n]


def losses(cell: Axes, ds: xr.Dataset) -> None:
    """Changes of the loss, means over positions 1, 2-3, 4-7, ...; the last position predicts nothing that is known."""
    first = 2 ** np.arange(int(np.log2(ds.sizes["position"] - 2)) + 1)
    drawn = []
    for at, label, color in _each(ds):
        parts = np.split(with_interval(at, "loss_change").values[:, :-1], first, axis=1)[1:]
        y, low, high = np.stack([part.mean(1) for part in parts], 1)
        drawn.append(Series(label, y, color, low, high, first, marker="o"))
    curves(cell, drawn)
    cell.axhline(0, color=GREY, linewidth=0.8, zorder=1)
    cell.set_yscale("symlog", linthresh=SMALL, linscale=0.6)
    cell.set_xscale("log", base=2)
    for axis in (cell.xaxis, cell.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: numeral(value)))
    cell.set_xlabel("query, means up to the next mark")


def sink_rates(cell: Axes, ds: xr.Dataset) -> None:
    """Sink rates by block, before and after."""
    x = ds["layer"].values
    before = Series("as it is", ds["sink_rate_before"].isel(replacement=0), INK, x=x)
    blocks(cell, [before, *(Series(label, at["sink_rate_after"], color, x=x) for at, label, color in _each(ds))])
    cell.set_ylim(-0.03, 1.03)


def profiles(cell: Axes, ds: xr.Dataset) -> None:
    """Sensitivities before and after; what is beyond `HIGHEST` is left out."""
    before = ds["sensitivity_before"].isel(replacement=0).values
    x = np.linspace(0, 1, len(before))
    drawn = [Series("as it is", before, INK, x=x)]
    for at, label, color in _each(ds):
        y = at["sensitivity_after"].values
        drawn.append(Series(label, np.where(y <= HIGHEST * before.max(), y, np.nan), color, x=x, width=0.8))
    curves(cell, drawn, log=True)
    position_axis(cell)


def outcome(cell: Axes, ds: xr.Dataset, name: str) -> None:
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
