"""How far absolute position reaches, and what carries it (`compute`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ... import options
from ...charts import BLUE, CYCLE, DASHED, GREY, VERMILLION, Panel, Series, curves, level, panels
from ...measure import Headline, Measure
from ...results.curves import ESTIMATE, with_interval
from ...results.statistics import units
from ...results.tables import Table, estimated, interval, number
from ..decode import beyond
from .compute import ARMS, AS_IT_IS, READ
from .compute import horizon as horizon


def horizons(ds: xr.Dataset) -> xr.DataArray:
    """The last position of the last octave that is read, [arm, estimate]; low: surely above `READ`, high: it may be."""
    octaves = list(map(str, ds["octave"].values[1:]))
    stops = np.array([int(name.rpartition("-")[2]) for name in octaves])
    low, high = (
        ds[f"r2_chosen_{end}"].sel(octave=octaves).transpose("arm", "octave").values for end in ("low", "high")
    )
    sure, may = ((ends > READ) * stops for ends in (low, high))
    found = np.stack([sure.max(1), sure.max(1), np.maximum(sure, may).max(1)], -1)
    return xr.DataArray(found, {"arm": ds["arm"].values, "estimate": list(ESTIMATE)}, ("arm", "estimate"))


def erasures(ds: xr.Dataset) -> xr.DataArray:
    """What erasing an octave's direction costs within it beyond a control, [erased_octave, estimate]."""
    unit = units(ds)[: ds.sizes["erased_prompt"]]
    own = ds["loss_change"].transpose("erased_octave", "erased_prompt").values
    costs = ds["control_loss_change"].transpose("erased_octave", "erased_prompt", "control").values
    of = [beyond(one, other, unit)[1][:3] for one, other in zip(own, costs, strict=True)]
    coords = {"erased_octave": ds["erased_octave"].values, "estimate": list(ESTIMATE)}
    return xr.DataArray(of, coords, ("erased_octave", "estimate"))


def answer(results: Mapping[str, xr.Dataset]) -> list[str]:
    """How far position is read under each arm, and whether it is used there."""
    lines = []
    for model, ds in results.items():
        last, said = int(ds.sizes["position"]) - 1, []
        for arm, (value, _, high) in zip(map(str, ds["arm"].values), horizons(ds).values, strict=True):
            more = f", undecided up to {high:.0f}" if high > value else ""
            end = " (the end of the text)" if value == last else ""
            said.append(f"{arm}: {f'up to {value:.0f}{end}' if value else 'nowhere'}{more}")
        line = f"{model}: position is read (R^2 above {READ:g}) {'; '.join(said)}"
        for octave, costs in (
            zip(map(str, ds["erased_octave"].values), erasures(ds).values, strict=True) if _uses(ds) else ()
        ):
            verdict = "more than a control" if costs[1] > 0 else "not clearly more than a control"
            line += f"; erased at {octave} it costs {verdict}, {interval(*costs, form='+.3g')} nat"
        if (count := len(np.unique(units(ds)))) < ENOUGH:
            line += f"; readers of few documents ({count} here) read less than there is"
        lines.append(line + ".")
    return lines


def _uses(ds: xr.Dataset) -> bool:
    return "control_loss_change" in ds


def tables(results: Mapping[str, xr.Dataset]) -> list[Table]:
    """Horizons, R^2 by octave beside its null with d', behind a second sink, leakage, erasures, R^2 of every layer."""
    reach, octaves, behind, leaks, costs, layers = [], [], [], [], [], []
    for model, ds in results.items():
        for arm, ends in zip(map(str, ds["arm"].values), horizons(ds).values, strict=True):
            surely, most = (f"{end:.0f}" if end else "none" for end in ends[::2])
            reach.append([model, arm, surely, most, str(ds.sizes["position"] - 1)])
            at = ds.sel(arm=arm)
            for octave in map(str, ds["octave"].values):
                where: dict[str, Any] = {"octave": octave}
                chosen = at["chosen"].sel(where).values
                values = (estimated(at, name, **where) for name in ("r2_chosen", "r2_chosen_shuffled", "d_prime"))
                octaves.append([model, arm, octave, *values, "-".join(map(str, sorted({chosen.min(), chosen.max()})))])
                every = (estimated(at, "r2", layer=layer, **where) for layer in ds["layer"].values)
                layers.append([model, arm, octave, *every])
            if "behind_r2" in ds and np.isfinite(at["behind_r2"]).any():
                place, shares = ds["key"].values[1], ", ".join(f"{x:.1%}" for x in at["attending"].values)
                for distance in map(str, ds["distance"].values):
                    both = (
                        estimated(at, f"behind_{name}", distance=distance)
                        for name in ("r2_chosen", "r2_chosen_shuffled")
                    )
                    behind.append([model, arm, str(place), shares, distance, *both])
        for octave in map(str, ds["octave"].values) if "leakage" in ds else ():
            if np.isfinite(ds["leakage"].sel(octave=octave)):
                null = number(ds["leakage_null"].sel(octave=octave))
                leaks.append([model, octave, estimated(ds, "leakage", octave=octave), null])
        for octave, ends in zip(ds["erased_octave"].values, erasures(ds).values, strict=True) if _uses(ds) else ():
            means = (ds[name].sel(erased_octave=octave).mean() for name in ("loss_change", "control_loss_change"))
            costs.append([model, str(octave), *(number(one, "+.3g") for one in means), interval(*ends, form="+.3g")])
    of, numbers = ("model", "arm"), max((ds["layer"].values.tolist() for ds in results.values()), key=len)
    found = [
        Table("Horizon: last position that is read", (*of, "surely", "at most", "text ends at"), reach),
        Table("Within octaves", (*of, "positions", "R^2", "null", "d' of i and 2i", "layers"), octaves),
        Table(
            "Behind the second sink: log(1 + i - place)",
            (*of, "place", "heads that attend to 0, to the place", "tokens behind", "R^2", "null"),
            behind,
        ),
        Table("Leakage, median head (nat²)", ("model", "positions", "leakage", "uniform attention"), leaks),
        Table("Loss without the octave's direction (nat)", ("model", "positions", "own", "controls", "beyond"), costs),
        Table("R^2 by layer", (*of, "positions", *(f"layer {n + 1}" for n in range(len(numbers)))), layers),
    ]
    return [table for table in found if table.rows]


ENOUGH = 24  # documents; SmolLM2's R^2 at 64 to 127 is 0.17 with 24 of them and 0.27 with 96
LEAST = -0.25  # a reader that misses by more says no more about the stream
OF_FIGURE = (("sink held", "hidden", "second sink"), ("log Z held", "unmasked", "fresh"))  # a row of panels each
CAPTION = (
    "R^2 within octaves, block chosen on other documents; 0: knows the octave alone. Bands: 95 % over documents. "
    f"Below {LEAST} is not drawn."
)


def chart(results: Mapping[str, xr.Dataset]) -> Figure:
    """R^2 by octave and arm beside its null; of one model leakage and the cost of erasing, too."""

    def axis(cell: Axes, names: Any, label: str) -> None:
        cell.set_xticks(range(len(names)), [str(name).partition("-")[0] for name in names])
        cell.set_xlim(-0.3, len(names) - 0.7)
        cell.set_xlabel(label)

    def read(cell: Axes, ds: xr.Dataset, among: Sequence[str] = ARMS, before: str = "", along: str = "octave") -> None:
        at, drawn = ds.isel({along: slice(1, None)}), []
        arms = [arm for arm in among if arm in ds["arm"] and np.isfinite(at[f"{before}r2_chosen"].sel(arm=arm)).any()]
        for arm in arms:
            ends = [at[f"{before}r2_chosen{end}"].sel(arm=arm).values for end in ("", "_low", "_high")]
            drawn.append(Series(arm, ends[0], CYCLE[ARMS.index(arm)], ends[1], ends[2], marker="o"))
        null = at[f"{before}r2_chosen_shuffled"].sel(arm=arms[0]).values
        curves(cell, [*drawn, Series("null: shuffled", null, GREY, line=DASHED)])
        cell.set_ylim(bottom=max(LEAST, cell.get_ylim()[0]))
        axis(cell, at[along].values, "octave, from position" if not before else "octave, tokens behind the place")

    def leak(cell: Axes, ds: xr.Dataset) -> None:
        at = ds.dropna("octave", subset=["leakage"])
        ends = [at[f"leakage{end}"].values for end in ("", "_low", "_high")]
        null = Series("uniform attention", at["leakage_null"].values, GREY, line=DASHED)
        curves(cell, [Series("median head", ends[0], BLUE, ends[1], ends[2], line=""), null])
        axis(cell, at["octave"].values, "octave, from position")

    def cost(cell: Axes, ds: xr.Dataset) -> None:
        value, low, high = erasures(ds).values.T
        curves(cell, [Series("", value, VERMILLION, low, high, line="")])
        level(cell, 0.0, "as a control")
        axis(cell, ds["erased_octave"].values, "octave, from position")

    there = {str(arm) for ds in results.values() for arm in ds["arm"].values}
    groups = [group for group in OF_FIGURE if there & set(group)] or [()]
    left_out = ", ".join(sorted(there & set(groups[-1]))) if len(groups) > 1 and len(results) > 2 else ""
    note = f"In the table alone: {left_out}." if left_out else ""
    rows = [
        Panel("R^2 of log(1 + i)", partial(read, among=(AS_IT_IS, *own)), note=note, share=True, height=2.9)
        for own in groups
    ]
    more = {
        "behind_r2": Panel("R^2 of log(1 + i - place)", partial(read, before="behind_", along="distance")),
        "leakage": Panel("leakage (nat²)", leak),
        "control_loss_change": Panel("loss without the octave's direction, beyond controls (nat)", cost),
    }
    rows += [panel for name, panel in more.items() if all(name in ds for ds in results.values())]
    return panels(results, rows, CAPTION)


@dataclass(frozen=True)
class Options(options.Options):
    """Read absolute position off the residual stream octave by octave, and see what carries it.

    Writes horizon.nc, horizon.md and the chart: R^2 of log(1 + i) within each octave of positions beside its null, for the
    model as it is and with a source of position taken away; d', leakage by octave, and what erasing each octave's own
    direction costs. If interrupted, the same command resumes.

    Examples:
      headwater horizon tiny-llama --prompts 16 --length 64
      headwater horizon smollm2-135m --prompts 96 --length 512 --leakage 32
      headwater horizon smollm2-135m --arms all --prompts 64
    """

    arms: str = options.option(f"A comma list of {', '.join(ARMS)}; or all.", AS_IT_IS)
    every: int = options.option("Blocks from one whose stream is read to the next.", 5, min=1)
    place: int | None = options.option("Of the second sink; half of the length if not given.")
    leakage: int = options.option("Prompts on which leakage by octave is measured; 0: none.", 0, min=0)
    erase: int = options.option("Prompts on which each octave's own direction is erased; 0: none.", 0, min=0)
    controls: int = options.option("Smooth directions that it is held against.", 4, min=2)
    initialization: str = options.initialization()

    def values(self) -> dict[str, Any]:
        """As `horizon` takes them."""
        arms = ARMS if self.arms == "all" else tuple(arm.strip() for arm in self.arms.split(","))
        return vars(self) | {"arms": arms}


MEASURE = Measure(
    name="horizon",
    question="How far does absolute position reach, and what carries it?",
    compute=horizon,
    options=Options,
    headlines=(
        Headline("horizon, last position that is read (0: none)", horizons, form=".0f"),
        Headline("R^2 at positions, block chosen on other documents", lambda ds: ds["r2_chosen_by_prompt"]),
        Headline("d' of positions i and 2i", partial(with_interval, name="d_prime")),
        Headline("leakage, median head (nat²)", partial(with_interval, name="leakage")),
        Headline("loss without the octave's direction, beyond a control (nat)", erasures, form="+.3g"),
        Headline("R^2 behind the place of a second sink", partial(with_interval, name="behind_r2_chosen")),
    ),
    answer=answer,
    tables=tables,
    chart=chart,
    trials={"horizon": partial(horizon, arms=(AS_IT_IS, "unmasked"), every=1)},
)
