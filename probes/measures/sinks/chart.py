"""How sinks, and the heads that read position 0, are drawn."""

from __future__ import annotations

from collections.abc import Mapping

import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...charts import BLUE, DASHED, GREEN, GREY, INK, ORANGE, VERMILLION, Panel, Series, curves, heat, panels
from .roles import role_names

ROLES = {"reads": VERMILLION, "parks": GREEN, "reacts": ORANGE}
CAPTION = (
    "A key is a sink in a head where its alpha, the mean weight on it, is above the threshold. Dots: what heads do with "
    "position 0. Grey: uniform attention."
)


def chart(results: Mapping[str, xr.Dataset]) -> Figure:
    """Which heads attend to position 0 and what they do with it, and which keys are sinks."""
    rows = [
        Panel("block", _heads, height=3.0),
        Panel("alpha, mean over heads", _alphas),
        Panel("share", _rates, share=True),
    ]
    return panels(results, rows, CAPTION)


def _heads(cell: Axes, ds: xr.Dataset) -> None:
    roles = role_names(ds)
    heat(cell, ds["attends"], "mean weight on position 0", {role: (roles == role, ROLES[role]) for role in ROLES})


def _alphas(cell: Axes, ds: xr.Dataset) -> None:
    alpha = ds["alpha"].mean([dim for dim in ds["alpha"].dims if dim not in ("layer", "key")])
    low, high = alpha.min("layer"), alpha.max("layer")
    uniform = Series("uniform", ds["uniform"].mean("layer"), GREY, x=ds["key"], line=DASHED)
    curves(cell, [uniform, Series("mean, range of blocks", alpha.mean("layer"), INK, low, high, x=ds["key"])], log=True)
    _key_axis(cell, ds)


def _rates(cell: Axes, ds: xr.Dataset) -> None:
    marker = "o" if ds.sizes["key"] <= 16 else ""
    rate = Series("of heads: alpha above the threshold", ds["sink_rate_of_model"], INK, x=ds["key"], marker=marker)
    over = Series("of queries: weight above tau", ds["over_tau_of_model"], BLUE, x=ds["key"], marker=marker)
    curves(cell, [rate, over])
    _key_axis(cell, ds)


def _key_axis(cell: Axes, ds: xr.Dataset) -> None:
    if ds.sizes["key"] > 16:
        cell.set_xscale("symlog", linthresh=1)
    else:
        cell.set_xticks(ds["key"].values)
    cell.set_xlabel("key position")
