"""Is what the residual stream knows of position used? Position read off it, and the same taken out of it (`compute`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ... import options
from ...charts import GREY, VERMILLION, Panel, Series, dots, panels
from ...errors import InputError
from ...measure import Headline, Measure
from ...models.erase import RANK, Where
from ...results.curves import ESTIMATE, with_interval
from ...results.statistics import Interval, jackknifed, one_more, over_runs, units
from ...results.tables import Table, estimated, interval, number, range_told, variance
from .compute import CONTROLS, NONE, decode

CAPTION = (
    "R^2 within octaves of position, block chosen on other documents; 0: knows the octave alone. Then what is erased before "
    "the named blocks. Bars: 95 % over documents, of recall over pairs of lists; of controls, where one more would lie."
)
ERASED = {
    "means": "position means",
    "random": "random, same rank and size",
    "direction": "direction of log(1 + i)",
    "cosines": "of other smooth functions, same size",
}
SHOWN, AGAINST = ("R^2", "null"), ("model", "blocks", "controls", "times taken", "direction", "one control", "beyond")
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

    Writes decode.nc, decode.md and the chart: R^2 of log(1 + i) within each octave of position, on documents held out from
    the fit and from the choice of the block, and what happens to next-token loss, leakage and recall when the span of the
    position means, a random subspace, or the one direction that moves with position is taken out of the stream, beside
    directions of other functions that are as smooth and as large. If interrupted, the same command resumes.

    Examples:
      headwater decode tiny-llama
      headwater decode tiny-llama tiny-qwen2 --erase all,2 --recall 0
      headwater decode ./checkpoint --erase off --prompts 64
    """

    erase: str = options.option(
        "Where position is erased: all (blocks together), single blocks, or both, as in all,0,12; or off.", "all"
    )
    rank: int = options.option("Most dimensions that are erased.", RANK, min=1)
    controls: int = options.option("Smooth directions that the one of position is held against; 0: none.", CONTROLS)
    leakage: bool = options.option("Whether the residual component of leakage is measured.", True)
    recall: int = options.option(
        "Lists that recall is measured on under every erasure, a multiple of 4; 0: none.", 16, min=0
    )

    def values(self) -> dict[str, Any]:
        """As `decode` takes them."""
        return super().values() | {"erase": parse_erase(self.erase)}


def parse_erase(value: str) -> tuple[Where, ...]:
    """Read from the command line: "off", or places as in "all,0,12"."""
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
    """The result without the model as it is and interventions that erase nothing."""
    names = [name for name in ds["intervention"].values if name != NONE]
    return ds.sel(intervention=[name for name in names if not erases_nothing(ds.sel(intervention=name))])


def controls(ds: xr.Dataset, place: str) -> tuple[Interval, Interval]:
    """Of the controls of "direction" at a place, in nats: where one more would lie, and what it costs beyond them."""
    costs = ds["control_loss_change_by_prompt"].sel(place=place).transpose("prompt", "control").values
    loss = ds["loss_by_prompt"]
    own = (loss.sel(intervention=f"direction {place}") - loss.sel(intervention=NONE)).values
    return beyond(own, costs, units(ds))


def beyond(
    own: Float[np.ndarray, " prompt"], costs: Float[np.ndarray, "prompt control"], unit: Int[np.ndarray, " prompt"]
) -> tuple[Interval, Interval]:
    """Where one more control would lie, and what `own` costs beyond these."""
    one = one_more(over_runs(costs.mean(0)))
    more = jackknifed(lambda some: float(some[:, 0].mean() - some[:, 1:].mean()), np.column_stack([own, costs]), unit)
    reach = math.hypot(more.high - more.value, one.high - one.value)
    return one, Interval(more.value, more.value - reach, more.value + reach)


def _beyond(ds: xr.Dataset) -> xr.DataArray:
    """What "direction" costs beyond its controls [place, estimate]."""
    places = [str(place) for place in ds["place"].values]
    of = [controls(ds, place)[1][:3] for place in places]
    return xr.DataArray(of, {"place": places, "estimate": list(ESTIMATE)}, ("place", "estimate"))


def _at_layer(ds: xr.Dataset, layer: int) -> xr.DataArray:
    """R^2 by prompt and octave, without that over all positions."""
    return ds["r2_by_prompt"].sel(octave=ds["octave"].values[1:]).isel(layer=layer, drop=True)


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
        of = [f"{octave} {estimated(ds, 'r2_chosen', octave=octave)}" for octave in ds["octave"].values]
        said = f"R^2 of log(1 + i) at positions {', '.join(of)}"
        for name in map(str, ds["intervention"].values) if "intervention" in ds.coords else ():
            if name.startswith("direction"):
                said += f"; without the {name.replace(' all', ' in all blocks')} {_against_control(ds, name)}"
        lines.append(f"{model}: {said}.")
    return lines


def _against_control(ds: xr.Dataset, name: str) -> str:
    """What an erasure costs beside its controls."""
    at, place = ds.sel(intervention=name), name.partition(" ")[2]
    if erases_nothing(at):
        return "nothing is erased: no direction is more than noise on these documents"
    said = f"the loss changes by {estimated(at, 'loss_change', '+.3g')} nat"
    if "control_loss_change" not in ds:
        return said
    one, more = controls(ds, place)
    verdict = "more than a control" if more.low > 0 else "less" if more.high < 0 else "not clearly more than a control"
    return f"{said}, {verdict} ({interval(*one[:3], form='+.3g')}): {interval(*more[:3], form='+.3g')}"


def tables(results: Mapping[str, xr.Dataset]) -> list[Table]:
    """What every erasure changes, beside controls; V(X) by band; R^2 by octave beside its null, and of every layer."""
    outcomes, against, components, octaves, layers = [], [], [], [], []
    for model, ds in results.items():
        named = [str(octave) for octave in ds["octave"].values]
        for place in map(str, ds["place"].values) if "control_loss_change" in ds else ():
            both = (interval(*one[:3], form="+.3g") for one in controls(ds, place))
            scale = ds["control_scale"].sel(place=place)
            own = estimated(ds, "loss_change", "+.3g", intervention=f"direction {place}")
            against.append([model, place, str(scale.size), range_told(scale.values, ".2g"), own, *both])
        for octave in named:
            at = int(ds["chosen"].sel(octave=octave).min()), int(ds["chosen"].sel(octave=octave).max())
            values = (estimated(ds, one, octave=octave) for one in ("r2_chosen", "r2_chosen_shuffled"))
            octaves.append([model, octave, *values, "-".join(map(str, dict.fromkeys(at)))])
        for name in map(str, ds["intervention"].values) if "intervention" in ds.coords else ():
            at = ds.sel(intervention=name)
            sizes = [number(np.nanmean(at[one])) if np.isfinite(at[one]).any() else "-" for one in ("rank", "removed")]
            known = [one in ds and not erases_nothing(at) for one in OUTCOMES]
            cells = [estimated(at, one) if there else "-" for one, there in zip(OUTCOMES, known, strict=True)]
            outcomes.append([model, name, *sizes, *cells])
            for band in map(str, ds["band"].values) if "residual" in ds else ():
                left = estimated(at, "residual", said=variance, band=band)
                components.append([model, name, band, left, estimated(at, "residual_change", band=band)])
        for octave, layer in product(named, ds["layer"].values):
            both = (estimated(ds, one, layer=layer, octave=octave) for one in ("r2", "r2_shuffled"))
            layers.append([model, octave, str(layer), *both])
        if why := ds.attrs.get("not_measured"):
            components.append([model, f"not measured: {why}", "", "", ""])
    found = [
        Table("What each erasure changes", ("model", "erased", "rank", "removed", *OUTCOMES.values()), outcomes),
        Table("Loss without the direction, and without others as smooth and as large (nat)", AGAINST, against),
        Table("Residual component of leakage, V(X)", ("model", "erased", "band", "nat²", "change"), components),
        Table(
            "Position in the stream, block chosen on other documents", ("model", "positions", *SHOWN, "layers"), octaves
        ),
        Table("Position in the stream by layer", ("model", "positions", "layer", *SHOWN), layers),
    ]
    return [table for table in found if table.rows]


def chart(results: Mapping[str, xr.Dataset]) -> Figure:
    """R^2 of position by octave beside its null, and what each erasure changes."""

    def read(cell: Axes, ds: xr.Dataset) -> None:
        looks = {"r2_chosen_shuffled": ("null: shuffled", GREY), "r2_chosen": ("position", VERMILLION)}
        ends = {name: [ds[f"{name}{end}"].values for end in ("", "_low", "_high")] for name in looks}
        drawn = [Series(looks[name][0], y, looks[name][1], low, high) for name, (y, low, high) in ends.items()]
        dots(cell, [f"positions {octave}" for octave in ds["octave"].values], drawn)
        cell.locator_params("x", nbins=4)

    def erased(cell: Axes, ds: xr.Dataset, name: str) -> None:
        at = acting(ds)
        y, low, high = (at[one].values for one in (name, f"{name}_low", f"{name}_high"))
        kinds = [str(one).partition(" ") for one in at["intervention"].values]
        if name == "loss_change" and "control_loss_change" in ds:
            places = [str(place) for place in ds["place"].values]
            of = np.array([controls(ds, place)[0][:3] for place in places])
            y, low, high = (np.append(one, more) for one, more in zip((y, low, high), of.T, strict=True))
            kinds += [("cosines", " ", place) for place in places]
        labels = [f"{ERASED[what]}, {'all blocks' if at == 'all' else f'block {at}'}" for what, _, at in kinds]
        dots(cell, labels, [Series("", y, VERMILLION, low, high)])
        cell.locator_params("x", nbins=4)

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
        Headline("R^2 at positions, block chosen on other documents", lambda ds: ds["r2_chosen_by_prompt"]),
        Headline("loss without position's direction, beyond a control (nat)", _beyond, form="+.3g"),
        Headline("loss, change (nat)", partial(_by_prompt, name="loss", change=True), form="+.3g"),
        Headline("KL (nat)", partial(_own, name="kl"), by_prompt=partial(_by_prompt, name="kl"), ratio=True),
        Headline("R^2 at positions, embeddings", partial(_at_layer, layer=0)),
        Headline("R^2 at positions, last layer", partial(_at_layer, layer=-1)),
        Headline("R^2 at the last layer, anew", partial(_by_prompt, name="r2_last")),
        Headline("V(X), mean over heads, change (nat²)", partial(_own, name="residual_change"), form="+.3g"),
        Headline("log p of values, change (nat)", partial(_own, name="recall_log_p_change"), form="+.3g"),
        Headline("exact answers, change", partial(_own, name="recall_exact_change"), form="+.3g"),
    ),
    answer=answer,
    tables=tables,
    chart=chart,
    # Recall and leakage of a changed model are measured in bos-swap.
    trials={"decode": partial(decode, controls=2, recall=0, leakage=False)},
)
