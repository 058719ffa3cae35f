"""Is what the residual stream knows of position used? Position read off it, and the same taken out of it (`compute`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ... import options
from ...charts import GREY, VERMILLION, Panel, Series, block_axis, curves, dots, panels
from ...errors import InputError
from ...measure import Headline, Measure
from ...models.erase import RANK, Where
from ...results.curves import estimate, with_interval
from ...results.tables import Table, estimated, number, variance
from .compute import NONE, decode

CAPTION = (
    "R^2 on documents held out; 0: no better than the mean. Dots: what is erased before the named blocks, at "
    "every position but 0; bars: 95 % over documents, or, of recall, over pairs of lists."
)
ERASED = {
    "means": "position means",
    "random": "random, same rank",
    "direction": "direction of position",
    "shuffled": "direction, shuffled positions",
}
OUTCOMES = {  # by variable
    "loss_change": "loss, change (nat)",
    "kl": "KL (nat)",
    "r2_last": "R^2 at the last layer",
    "recall_log_p_change": "log p of values, change (nat)",
    "recall_exact": "exact answers",
}


@dataclass(frozen=True)
class Options(options.Bands):
    """Read position off the residual stream, erase it, and see whether the model misses it.

    Writes decode.nc, decode.md and the chart: R^2 of log(1 + i) at every layer on documents held out, and what happens to
    next-token loss, leakage and recall when the span of the position means, a random subspace of the same rank, or the one
    direction that moves with position is taken out of the stream. If interrupted, the same command resumes.

    Examples:
      headwater decode tiny-llama
      headwater decode tiny-llama tiny-qwen2 --erase all,2 --recall 0
      headwater decode ./checkpoint --erase off --prompts 64
    """

    erase: str = options.option(
        "Where position is erased: all (blocks together), single blocks, or both, as in all,0,12; or off.", "all"
    )
    rank: int = options.option("Most dimensions that are erased.", RANK, min=1)
    leakage: bool = options.option("Whether the residual component of leakage is measured.", True)
    recall: int = options.option(
        "Lists that recall is measured on under every erasure, a multiple of 4; 0: none.", 16, min=0
    )

    def values(self) -> dict[str, Any]:
        """As `decode` takes them."""
        return super().values() | {"erase": parse_erase(self.erase)}


def parse_erase(value: str) -> tuple[Where, ...]:
    """Read from the command line: "off", or places as in "all,0,12".

    Raises:
        InputError: it is none of these.
    """
    if value.strip() == "off":
        return ()
    found: list[Where] = []
    for word in (word.strip() for word in value.split(",")):
        if word != "all" and not (word.isascii() and word.isdigit() and len(word) < 6):
            raise InputError(f"erase '{value}' names no blocks; give off, all, or blocks as in all,0,12")
        found.append(word if word == "all" else int(word))
    return tuple(found)


def erases_nothing(ds: xr.Dataset) -> bool:
    """Whether an intervention of a result erased no direction at all: its rank is 0 wherever it acts."""
    rank = ds["rank"].values
    return bool(np.isfinite(rank).any() and np.nanmax(rank) == 0)


def acting(ds: xr.Dataset) -> xr.Dataset:
    """The result without the model as it is and interventions that erase nothing.

    Raises:
        KeyError: nothing was erased.
    """
    names = [name for name in ds["intervention"].values if name != NONE]
    return ds.sel(intervention=[name for name in names if not erases_nothing(ds.sel(intervention=name))])


def _best(values: np.ndarray) -> np.ndarray:
    """The largest mean of any layer."""
    return np.asarray(values.mean(0).max())


def _by_prompt(ds: xr.Dataset, name: str, *, change: bool = False) -> xr.DataArray:
    values = ds[f"{name}_by_prompt"]
    if change:
        values = values - values.sel(intervention=NONE)
    return values.sel(intervention=acting(ds)["intervention"])


def _own(ds: xr.Dataset, name: str) -> xr.DataArray:
    return with_interval(acting(ds), name)


def answer(results: Mapping[str, xr.Dataset]) -> list[str]:
    """How well position is read, and whether the direction that moves with it costs more than its control."""
    lines = []
    for model, ds in results.items():
        best = int(ds["r2"].argmax("layer"))
        said = f"position is read best in layer {best}, R^2 {estimated(ds, 'r2', layer=best)}"
        said += f" (null {estimated(ds, 'r2_shuffled', layer=best)})"
        for name in map(str, ds["intervention"].values) if "intervention" in ds.coords else ():
            if name.startswith("direction"):
                said += f"; without the {name.replace(' all', ' in all blocks')} {_against_control(ds, name)}"
        lines.append(f"{model}: {said}.")
    return lines


def _against_control(ds: xr.Dataset, name: str) -> str:
    """What an erasure costs beside the control of shuffled positions."""
    at, shuffled = ds.sel(intervention=name), name.replace("direction", "shuffled")
    if erases_nothing(at):
        return "nothing is erased: no direction is more than noise on these documents"
    if shuffled not in ds["intervention"]:
        return f"the loss changes by {estimated(at, 'loss_change', '+.3g')} nat"
    control = ds.sel(intervention=shuffled)
    low, high = estimate(at, "loss_change")[1], estimate(control, "loss_change")[2]
    verdict = "more than its control" if low > high else "not clearly more than its control"
    costs = (estimated(one, "loss_change", "+.3g") for one in (at, control))
    return f"the loss changes by {next(costs)} nat, {verdict} ({next(costs)})"


def tables(results: Mapping[str, xr.Dataset]) -> list[Table]:
    """What every erasure changes, V(X) by band, and R^2 of every layer beside its null."""
    outcomes, components, layers = [], [], []
    for model, ds in results.items():
        for name in map(str, ds["intervention"].values) if "intervention" in ds.coords else ():
            at = ds.sel(intervention=name)
            sizes = [number(np.nanmean(at[one])) if np.isfinite(at[one]).any() else "-" for one in ("rank", "removed")]
            known = [one in ds and not erases_nothing(at) for one in OUTCOMES]
            cells = [estimated(at, one) if there else "-" for one, there in zip(OUTCOMES, known, strict=True)]
            outcomes.append([model, name, *sizes, *cells])
            for band in map(str, ds["band"].values) if "residual" in ds else ():
                left = estimated(at, "residual", said=variance, band=band)
                components.append([model, name, band, left, estimated(at, "residual_change", band=band)])
        layers += [
            [model, str(layer), *(estimated(ds, one, layer=layer) for one in ("r2", "r2_shuffled"))]
            for layer in ds["layer"].values
        ]
        if why := ds.attrs.get("not_measured"):
            components.append([model, f"not measured: {why}", "", "", ""])
    found = [
        Table("What each erasure changes", ("model", "erased", "rank", "removed", *OUTCOMES.values()), outcomes),
        Table("Residual component of leakage, V(X)", ("model", "erased", "band", "nat²", "change"), components),
        Table("Position in the stream", ("model", "layer", "R^2", "null"), layers),
    ]
    return [table for table in found if table.rows]


def chart(results: Mapping[str, xr.Dataset]) -> Figure:
    """R^2 of position over layers beside its null, and what each erasure changes."""

    def read(cell: Axes, ds: xr.Dataset) -> None:
        x = ds["layer"].values
        ends = {name: (ds[name], ds[f"{name}_low"], ds[f"{name}_high"]) for name in ("r2", "r2_shuffled")}
        looks = {"r2": ("position", VERMILLION), "r2_shuffled": ("null: shuffled", GREY)}
        drawn = [Series(looks[name][0], y, looks[name][1], low, high, x) for name, (y, low, high) in ends.items()]
        curves(cell, drawn)
        block_axis(cell, x, "block that reads the stream")

    def erased(cell: Axes, ds: xr.Dataset, name: str) -> None:
        at = acting(ds)
        y, low, high = (at[one].values for one in (name, f"{name}_low", f"{name}_high"))
        kinds = [str(one).partition(" ") for one in at["intervention"].values]
        labels = [f"{ERASED[what]}, {'all blocks' if at == 'all' else f'block {at}'}" for what, _, at in kinds]
        dots(cell, labels, [Series("", y, VERMILLION, low, high)])

    rows = [Panel("R^2 of log(1 + i)", read, share=True)]
    named = {name: label for name, label in OUTCOMES.items() if all(name in ds for ds in results.values())}
    rows += [Panel(label, partial(erased, name=name)) for name, label in named.items()]
    return panels(results, rows, CAPTION)


MEASURE = Measure(
    name="decode",
    question="Can position be read off the residual stream, and does the model miss it?",
    compute=decode,
    options=Options,
    headlines=(
        Headline("R^2, best layer", lambda ds: ds["r2_by_prompt"], _best),
        Headline("R^2, embeddings", lambda ds: ds["r2_by_prompt"].isel(layer=0)),
        Headline("R^2, last layer", lambda ds: ds["r2_by_prompt"].isel(layer=-1)),
        Headline("loss, change (nat)", partial(_by_prompt, name="loss", change=True), form="+.3g"),
        Headline("KL (nat)", partial(_own, name="kl"), by_prompt=partial(_by_prompt, name="kl"), ratio=True),
        Headline("R^2 at the last layer, anew", partial(_by_prompt, name="r2_last")),
        Headline("V(X), change (nat²)", partial(_own, name="residual_change"), form="+.3g"),
        Headline("log p of values, change (nat)", partial(_own, name="recall_log_p_change"), form="+.3g"),
        Headline("exact answers, change", partial(_own, name="recall_exact_change"), form="+.3g"),
    ),
    answer=answer,
    tables=tables,
    chart=chart,
    trials={"decode": partial(decode, recall=0, leakage=False)},  # both are measured of a changed model in bos-swap
)
