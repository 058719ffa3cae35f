"""The map of theory, read from its result: one row per place, and what each row says."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import xarray as xr

from ..errors import InputError
from .curves import relative_error, rms_log_error
from .tables import number
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
    found = [ds.isel(place=i) for i in range(ds.sizes["place"])]
    return [Row(one) for one in found if all(one[name].item() == value for name, value in where.items())]


COLUMNS = ("place", "primacy", "recency", "U", "uniform", "values", "score path", "config", "N^L", "value share")


def described(ds: xr.Dataset) -> str:
    """What the rows of a map's table are."""
    usual = usual_places(ds)[0]
    return (
        f"{ds.attrs['seeds']} fresh models per place, sketch of {ds.attrs['products']} products, float32, random tokens; "
        f"width {usual['width']}, {usual['blocks']} blocks and T = {usual['length']} unless the place says otherwise. "
        "Primacy and recency: the ends against the middle of root mean squares over models, which kernels predict; U: both "
        f"at least {ds.attrs['factor']:g}. Kernels: mean over positions of |predicted / measured - 1|; N^L: RMS log error "
        "with its best alpha and a free scale."
    )


def usual_places(ds: xr.Dataset) -> list[Row]:
    """The places where only d sigma^2 is moved, in its order: those of the deepest column of at most 12 blocks.

    Raises:
        InputError: there are none.
    """
    depths = [row for row in rows(ds, group="depth") if row["blocks"] <= BLOCKS]
    if not depths:
        raise InputError(
            "the map has no places of group 'depth' with 12 blocks or fewer; there is no curve to start from"
        )
    base = max(row["blocks"] for row in depths)
    return sorted((row for row in depths if row["blocks"] == base), key=lambda row: row["strength"])


def cells(row: Row) -> Iterator[str]:
    """A place as text, in the order of `COLUMNS`; "U" where both ends stand `FACTOR` times above the middle."""
    shape = row.shape
    yield row.label
    for value in (shape.primacy, shape.recency):
        yield "no middle" if not math.isfinite(value) else f"{value:.3g}"
    yield "U" if min(shape.primacy, shape.recency) >= FACTOR else "-"
    yield from (number(row.error(theory), ".1%") for theory in ("uniform", "values", "score_path", "config"))
    yield f"{row.cesaro_error:.1%}"
    yield number(row.value_share, ".3f")
