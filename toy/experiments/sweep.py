"""Grids of toys: what each cell gives, filled into one labelled result.

A part of an experiment is a grid of named axes, what is measured in each of its cells, and an iterable that measures: it
yields a cell's coordinates with its arrays, by name. Training inside that iterable goes through `Work.train`, which resumes
and shows its progress.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from probes.results.dataset import dataset

from .experiment import Work


class Measure(NamedTuple):
    """One variable of a result."""

    long_name: str
    units: str = "1"
    dims: tuple[str, ...] = ()  # behind those of the grid
    dtype: Any = np.float64


Cells = Iterable[tuple[Sequence[Any], Mapping[str, Any]]]  # coordinates, and arrays by name


class Part(NamedTuple):
    """One grid of an experiment: `found` yields (coordinates along `axes`, arrays by name)."""

    axes: tuple[str, ...]
    measures: Mapping[str, Measure]
    found: Cells


def sweep(coords: Mapping[str, Any], *parts: Part) -> xr.Dataset:
    """Measure all cells of all parts.

    An array that is shorter than its dimensions fills their beginning. What no cell fills is NaN, or 0 in whole numbers; a
    variable that no cell gives is left out, and so are coordinates of dimensions without one.
    """
    values = {dim: np.asarray(x[1] if isinstance(x, tuple) else x).tolist() for dim, x in coords.items()}
    variables: dict[str, tuple[Any, ...]] = {}
    for axes, measures, found in parts:
        arrays: dict[str, np.ndarray] = {}
        for cell, measured in found:
            at = tuple(values[dim].index(value) for dim, value in zip(axes, cell, strict=True))
            for name, value in measured.items():
                if name not in arrays:
                    kind = np.dtype(measures[name].dtype)
                    size = [len(values[dim]) for dim in (*axes, *measures[name].dims)]
                    arrays[name] = np.full(size, np.nan if kind.kind == "f" else 0, kind)
                whole = np.asarray(value)
                arrays[name][(*at, *map(slice, whole.shape))] = whole
        for name, measure in measures.items():
            if name in arrays:
                described = {"long_name": measure.long_name, "units": measure.units}
                variables[name] = ((*axes, *measure.dims), arrays[name], described)
    used = {dim for dims, *_ in variables.values() for dim in dims}
    return dataset(variables, coords={dim: x for dim, x in coords.items() if dim in used})


def computed(
    work: Work,
    label: str,
    coords: Mapping[str, Any],
    axes: tuple[str, ...],
    measures: Mapping[str, Measure],
    of: Callable[..., Mapping[str, Any]],
) -> Part:
    """A whole grid of cells that a function computes of their coordinates; how many are done is shown under the label."""
    cells = list(product(*(coords[axis] for axis in axes)))

    def found() -> Cells:
        for done, cell in enumerate(cells, start=1):
            yield cell, of(*cell)
            work.advance(label, float(done), float(len(cells)))

    return Part(axes, measures, found())


def filled(cells: Iterable[Sequence[Any]], **arrays: Any) -> Cells:
    """Every cell with its row of each array [cell, ...], for `Part.found`."""
    for n, cell in enumerate(cells):
        yield cell, {name: array[n] for name, array in arrays.items()}


def axes(settings: Any, *names: str) -> dict[str, Any]:
    """The axes of a grid that are fields of the settings, switches as 0 and 1; those of "seed" are numbered."""
    values = {name: list(range(settings.seeds) if name == "seed" else getattr(settings, name)) for name in names}
    return {name: np.array(x, np.int8) if isinstance(x[0], bool) else x for name, x in values.items()}
