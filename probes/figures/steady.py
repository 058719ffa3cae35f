"""The same figure gives the same file: what rounds differently from run to run, or between processors, is cut off."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

DIGITS = 3  # significant; float32 agrees to more of them between processors, and 1/10 point on most axes is less
PLACES = 6  # of a panel's place, as a share of the figure: 1/1000 point


class SteadyLayout(ConstrainedLayoutEngine):
    """matplotlib's constrained layout with rounded places.

    Its solver sums in the order in which its variables lie in memory, so that the last bits of every place, and the names
    of clipping regions made of them, would change from run to run.
    """

    def execute(self, fig: Any) -> Any:
        """Lay out the figure's panels."""
        found = super().execute(fig)
        for cell in fig.axes:
            cell.set_position(np.round(cell.get_position(original=True).bounds, PLACES), which="original")
            cell.set_in_layout(True)  # as before it was moved by hand
        return found


def settle(figure: Figure) -> None:
    """Give a figure of constrained layout places that do not change from run to run."""
    engine = figure.get_layout_engine()
    if isinstance(engine, ConstrainedLayoutEngine) and not isinstance(engine, SteadyLayout):
        figure.set_layout_engine(SteadyLayout(**engine.get()))


def steady(ds: xr.Dataset) -> xr.Dataset:
    """A result to `DIGITS` digits, for figures that draw numbers as one processor rounded them, and no means of many."""

    def rounded(values: np.ndarray) -> np.ndarray:
        found = values.copy()
        some = np.isfinite(values) & (values != 0)
        steps = 10.0 ** (np.floor(np.log10(np.abs(values[some]))) - (DIGITS - 1))
        found[some] = np.round(values[some] / steps) * steps
        return found

    return ds.assign({name: ds[name].copy(data=rounded(ds[name].values)) for name in ds if ds[name].dtype.kind == "f"})
