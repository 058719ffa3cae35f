"""What rules read out of results: profiles over positions with the ends of their U, and places of the map of theory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from ..results.curves import by_condition
from ..results.dataset import options_of
from ..results.folder import Collected
from ..results.profiles import shape, typical
from ..results.statistics import Interval, jackknifed, over_runs, units
from ..results.theory_map import Row, rows
from ..results.ushape import SHORTEST
from .claim import Judged
from .rules import Test, Told, above, commands, config, every, one_verdict, told

TENTH = 0.1  # within which a place of the map is known


# -------------------------------------------------------------------------------------------------------------- curves


def over_documents(ds: xr.Dataset, values: xr.DataArray) -> Interval:
    """The mean of values [prompt] with its interval over the documents of a result's prompts."""
    return jackknifed(lambda some: float(some.mean()), values.values, units(ds))


def prompted(ds: xr.Dataset, condition: str, variable: str = "sensitivity") -> list[np.ndarray]:
    """Profiles [prompt, position] up to the query, one array per seed; none where the result lacks the condition."""
    if variable not in ds or not {"prompt", "position"} <= set(ds[variable].dims):
        return []
    ds, query = by_condition(ds, variable), options_of(ds).get("query")
    if condition not in ds["condition"].values:
        return []
    arrays = ds[variable].sel(condition=condition).transpose("seed", "prompt", "position").values.astype(float)
    return [values[:, : None if query is None else int(query) + 1] for values in arrays if not np.isnan(values).all()]


def root_mean_square(values: np.ndarray) -> np.ndarray:
    """[position] of [prompt, position]."""
    return np.sqrt(np.mean(values**2, axis=0))


def of_profiles(
    found: Sequence[Sequence[np.ndarray]],
    tell: Callable[..., float],
    unit: np.ndarray,
    mean: Callable[[np.ndarray], np.ndarray] = typical,
) -> Interval:
    """A number of mean profiles: over fresh models where there are several, else over documents.

    Args:
        found: by seed the profiles [prompt, position], as many as `tell` takes.
        tell: gives a number of the mean profiles [position], NaN where they have no such number.
        unit: of every prompt.
        mean: over prompts.
    """
    if len(found) > 1:
        return over_runs([tell(*map(mean, profiles)) for profiles in found])
    if not found:
        return Interval(math.nan, math.nan, math.nan)
    together = np.stack([np.asarray(values) for values in found[0]], axis=1)
    return jackknifed(lambda values: float(tell(*(mean(one) for one in np.moveaxis(values, 1, 0)))), together, unit)


def of_profile(
    ds: xr.Dataset, condition: str, tell: Callable[[np.ndarray], float], variable: str = "sensitivity"
) -> Interval:
    """The same of one result's profile, geometric over prompts."""
    return of_profiles([[values] for values in prompted(ds, condition, variable)], tell, units(ds))


def shaped(ds: xr.Dataset, condition: str, variable: str = "sensitivity") -> bool:
    """Whether a model without sliding window has a profile with ends and a middle."""
    model = config(ds)
    windowed = bool(model.get("sliding_window") and model.get("use_sliding_window", True))
    found = prompted(ds, condition, variable)
    return not windowed and any(values.shape[1] >= SHORTEST and np.isfinite(typical(values)).all() for values in found)


def ends_told(ds: xr.Dataset, condition: str) -> tuple[str, list[Interval]]:
    """Primacy and recency of the mean profile in words, as `headwater jacobian` prints them, and their logarithms."""
    found = shape(ds, condition)
    ends = {"primacy": found.primacy, "recency": found.recency}
    said = (f"{name} {told(end)}" if end.value > 0 else f"{name}: no middle" for name, end in ends.items())
    with np.errstate(divide="ignore"):
        logs = [Interval(*map(float, np.log(end[:3])))._replace(freedom=end.freedom) for end in ends.values()]
    return ", ".join(said), logs


def both_above(ends: Iterable[Interval], factor: float) -> Test:
    """Whether both ends, given as logarithms, stand `factor` times above the middle."""
    return every(above(end, float(np.log(factor))) for end in ends)


# ----------------------------------------------------------------------------------------------------------------- map

SIZES = ("strength", "width", "blocks", "length", "residual_scale", "window", "name")


def places(collected: Collected, **where: Any) -> list[Row]:
    """The places of all maps with these coordinates."""
    found = []
    for ds in collected["map"].values():
        fits = np.ones(ds.sizes["place"], dtype=bool)
        for name, value in where.items():
            fits &= ds[name].values == value
        found += rows(ds.isel(place=np.flatnonzero(fits)))
    return found


def place_told(row: Row) -> str:
    """What is moved at a place of a map, with the logit scale written as in claims."""
    return str(row["label"]).replace("d sigma^2", "d σ²")


def strength_told(strength: float) -> str:
    """A logit scale."""
    return f"d σ² = {strength:.2g}"


def on_map(collected: Collected, found: Mapping[str, Told], model: str, said: str = "") -> Judged | None:
    """The verdict over places of the map, `said` in place of what each says; None for none."""
    judged = one_verdict(found, model, commands(collected["map"].values()))
    return judged and judged._replace(measured=said or judged.measured)


def numbered(tests: Iterable[Any]) -> dict[str, Told]:
    """Tests of places that are not told one by one."""
    return {str(number): ("", test) for number, test in enumerate(tests)}


def alike(row: Row, others: Iterable[Row], *but: str) -> bool:
    """Whether some other place has all sizes of this one but those named."""
    return any(all(row[size] == other[size] for size in SIZES if size not in but) for other in others)


def courses(
    found: Iterable[Row], by: str | Callable[[Row], float], value: Callable[[Row], float]
) -> dict[float, dict[Any, float]]:
    """By logit scale a value by another size, ascending; logit scales with one value are left out."""
    courses: dict[float, dict[Any, float]] = {}
    for row in found:
        courses.setdefault(row["strength"], {})[row[by] if isinstance(by, str) else by(row)] = value(row)
    return {strength: dict(sorted(one.items())) for strength, one in sorted(courses.items()) if len(one) > 1}


def primacy_by_depth(collected: Collected) -> dict[float, dict[Any, float]]:
    """By logit scale and number of blocks."""
    return courses(places(collected, group="depth"), "blocks", lambda row: row.shape.primacy)


def roughly(value: float, share: float = TENTH) -> Interval:
    """The logarithm of a ratio that has no interval, taken as known within `share` of it.

    The map keeps the mean of each place's two fresh models alone: a tenth is more than their scatter in primacy, 4 % in
    the bundled models. A sink's sizes and [Wu]'s measure are kept as means over prompts: a quarter.
    """
    log = math.log(value) if 0 < value < math.inf else math.nan
    return Interval(log, log - math.log1p(share), log + math.log1p(share))
