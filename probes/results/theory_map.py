"""The map of theory, read from its result: one row per place, and what each row says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import xarray as xr

from .curves import relative_error, rms_log_error
from .ushape import Shape, shape_of

BLOCKS = 12  # of places where depth is not what is moved
FACTOR = 2.0  # how far an end has to stand above the middle to count
CURVES = ("measured", "uniform", "values", "score_path", "config", "amplitudes", "cesaro", "value")


class Row(Mapping[str, Any]):
    """One place of a map, its curves cut to its length."""

    def __init__(self, ds: xr.Dataset) -> None:
        self._ds = ds

    def __getitem__(self, name: str) -> Any:
        value = self._ds[name].values
        return value[: int(self._ds["length"])] if value.ndim else value.item()

    def __iter__(self) -> Iterator[str]:
        return iter([*map(str, self._ds.data_vars), *map(str, self._ds.coords)])

    def __len__(self) -> int:
        return len(self._ds.variables)

    def error(self, theory: str) -> float:
        """Mean over positions of |predicted / measured - 1|; NaN where that theory was not computed."""
        return relative_error(self[theory], self["measured"])

    @property
    def cesaro_error(self) -> float:
        """RMS log error of N^L with its best alpha, free scale, where both reach."""
        fitted, measured = self["cesaro"], self["measured"]
        seen = (fitted > 0) & (measured > 0)
        return rms_log_error(fitted[seen], measured[seen], free_scale=True)

    @property
    def label(self) -> str:
        """What was moved at this place."""
        return str(self["label"])

    @property
    def shape(self) -> Shape:
        """Of the measured profile."""
        return shape_of(self["measured"])

    @property
    def predicted(self) -> Shape:
        """Of the second-moment kernel with its score path."""
        return shape_of(self["score_path"])

    @property
    def value_share(self) -> float:
        """Mean over positions of the value path's norm against the whole."""
        seen = self["measured"] > 0
        return float(np.mean(self["value"][seen] / self["measured"][seen]))


def rows(ds: xr.Dataset, **where: Any) -> list[Row]:
    """The places of a map with the given coordinates, as in `rows(ds, group="depth", blocks=12)`."""
    places = [ds.isel(place=i) for i in range(ds.sizes["place"])]
    return [Row(place) for place in places if all(place[name].item() == value for name, value in where.items())]
