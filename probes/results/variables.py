"""What the variables of a result are: a measure declares each once, by name, beside the arrays that it makes."""

from __future__ import annotations

from collections.abc import Mapping
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


def with_ends(
    name: str, variable: Variable, resamples: Float[ndarray, "resample ..."], *, said: bool = True
) -> dict[str, tuple[Any, ...]]:
    """A variable and, where it was resampled, the ends of its interval as `NAME_low` and `NAME_high`.

    Args:
        name, variable: of the estimate.
        resamples: the estimate, then the resamples, if there are any.
        said: whether the ends' names in words say what they are.
    """
    found = {name: variable.of(resamples[0])}
    if len(resamples) > 1:
        for end, values in zip(("low", "high"), ends(resamples), strict=True):
            more = f", {end} end of the 95 % interval" if said else ""
            found[f"{name}_{end}"] = variable._replace(long_name=variable.long_name + more).of(values)
    return found
