"""How recall by depth is drawn, and what the value's log odds depend on."""

from __future__ import annotations

from collections.abc import Mapping

import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...charts import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILLION, Panel, Series, curves, panels
from ...results.statistics import couples, jackknife
from . import mechanism_numbers

CAPTION = (
    "Bands: 95 % over couples of lists. Without key: the same question behind another list. Sensitivity: of the value's log "
    "odds, per relative change of embeddings."
)
RECALL = {"log_p": ("value", VERMILLION), "control": ("without key", GREY), "exact": ("", VERMILLION)}
PARTS = {
    "pair": ("the pair", VERMILLION),
    "control": ("its line, key not there", GREY),
    "others": ("other pairs", BLUE),
    "position 0": ("position 0", GREEN),
}
PATHS = {"cut": ("weights on 0 held", ORANGE), "through_first": ("through weights on 0", PURPLE)}


def recalled(cell: Axes, ds: xr.Dataset, names: tuple[str, ...]) -> None:
    """Means over lists by depth, with intervals."""
    x, drawn = ds["fraction"].values, []
    for name in names:
        mean, low, high = jackknife(lambda some: some.mean(0), ds[name].values, couples(ds))
        drawn.append(Series(*_look(RECALL[name], mean), low, high, x))
    curves(cell, drawn)
    _depths(cell)


def _look(look: tuple[str, str], y: object) -> tuple[str, object, str]:
    return look[0], y, look[1]


def traced(cell: Axes, ds: xr.Dataset, looks: Mapping[str, tuple[str, str]]) -> None:
    """What the log odds depend on at the traced depths: geometric means over lists."""
    x, drawn = ds["fraction"].sel(depth=ds["traced_depth"].values).values, []
    for name, look in looks.items():
        mean, low, high = mechanism_numbers.by_depth(ds, name)
        drawn.append(Series(*_look(look, mean), low, high, x, marker="o"))
    curves(cell, drawn, log=True)
    _depths(cell)


def _depths(cell: Axes) -> None:
    cell.set_xlim(-0.02, 1.02)
    cell.set_xlabel("depth of the pair, first to last")


def _exact(cell: Axes, ds: xr.Dataset) -> None:
    recalled(cell, ds, ("exact",))
    cell.set_ylim(-0.03, 1.03)


def chart(results: Mapping[str, xr.Dataset]) -> Figure:
    """Log probability of the value and exact answers over depth; with a mechanism, what the log odds depend on."""
    rows = [
        Panel("log p of the value (nat)", lambda cell, ds: recalled(cell, ds, ("log_p", "control"))),
        Panel("exact answers", _exact, share=True),
    ]
    if all("sensitivity" in ds for ds in results.values()):
        rows[1:1] = [Panel("sensitivity (nat)", lambda cell, ds: traced(cell, ds, PARTS))]
        rows.append(Panel("the pair's, by path (nat)", lambda cell, ds: traced(cell, ds, PATHS)))
    return panels(results, rows, CAPTION)
