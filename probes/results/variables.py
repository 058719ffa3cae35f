"""What the variables of a result are: a measure declares each once, by name, beside the arrays that it makes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jaxtyping import Float
from numpy import ndarray

from .statistics import ends


class Variable(NamedTuple):
    """A variable's dimensions, its name in words (none where it is empty) and its unit."""

    dims: tuple[str, ...]
    long_name: str
    units: str = "1"

    def of(self, values: Any) -> tuple[Any, ...]:
        """As `dataset` takes it."""
        named = {"long_name": self.long_name} if self.long_name else {}
        return self.dims, values, named | {"units": self.units}


def labelled(table: Mapping[str, Variable], values: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """The table's variables that have values, in the table's order, as `dataset` takes them."""
    return {name: variable.of(values[name]) for name, variable in table.items() if name in values}


def with_low_high(name: str, variable: Variable, interval: Iterable[ndarray]) -> dict[str, tuple[Any, ...]]:
    """An estimate, and the low and high ends of its interval as `NAME_low` and `NAME_high`."""
    return {f"{name}{end}": variable.of(values) for end, values in zip(("", "_low", "_high"), interval, strict=True)}


def with_ends(name: str, variable: Variable, resamples: Float[ndarray, "resample ..."]) -> dict[str, tuple[Any, ...]]:
    """`with_low_high` of the estimate and its resamples; the estimate alone where there are none."""
    if len(resamples) == 1:
        return {name: variable.of(resamples[0])}
    return with_low_high(name, variable, (resamples[0], *ends(resamples)))
