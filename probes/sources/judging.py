"""What the rules of all sources share: results that hold what is needed, one verdict for several models, intervals.

A statement about models in general is judged model by model and holds if it holds in each of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import xarray as xr

from ..claims import Judged, Rule, Statement
from ..studies.atlas import FACTOR, Row, rows
from ..studies.collected import Collected
from ..studies.tables import interval, number
from ..summary import SHORTEST, UShape, band, profiles, ushape

Results: TypeAlias = Mapping[str, xr.Dataset]
Stated: TypeAlias = list[tuple[Statement, Rule]]
Told: TypeAlias = tuple[str, bool | None]  # of one model: what was measured, and whether the statement holds

BUNDLED = "tiny-llama tiny-llama-ntk tiny-mistral-window tiny-qwen2"
COMMANDS = {  # as `make report` gives them
    "jacobian": f"headwater jacobian {BUNDLED} --out reports/jacobian",
    "scalar": f"headwater jacobian {BUNDLED} --method scalar --out reports/scalar",
    "theory": f"headwater theory {BUNDLED} --prompts 2 --out reports/theory",
    "map": "headwater map --out reports/theory",
    "sinks": f"headwater sinks {BUNDLED} --out reports/sinks",
    "steps": "headwater sinks tiny-llama@step0 tiny-llama@step100 tiny-llama@step300 tiny-llama@step1000 tiny-llama "
    "--reacts off --pictures 0 --prompts 16 --out reports/steps",
    "trajectory": f"headwater trajectory {BUNDLED} --out reports/trajectory",
    "leakage": f"headwater leakage {BUNDLED} --prompts 1024 --length 128 --out reports/leakage",
    "bos-swap": f"headwater bos-swap {BUNDLED} --replace mean,zero,random --prompts 256 --length 128 "
    "--out reports/bos-swap",
}
LISTED = 8  # numbers that a reader takes in one by one
DRAWS = 200  # of the bootstrap over prompts; ends of 95 % intervals are then good to a tenth of their width
ENDS = (2.5, 97.5)


def stated(statement: Statement, among: Stated) -> Callable[[Rule], Rule]:
    """Puts a rule beside its statement, in a source's list."""

    def keep(rule: Rule) -> Rule:
        among.append((statement, rule))
        return rule

    return keep


def listed(values: Sequence[float] | np.ndarray, form: str = ".2f") -> str:
    """A few numbers as they are; of more their median, range and count."""
    if len(values) <= LISTED:
        return ", ".join(format(value, form) for value in values)
    middle, low, high = (format(float(end), form) for end in (np.median(values), np.min(values), np.max(values)))
    return f"{middle} [{low} to {high} in {len(values)} heads]"


def having(results: Results, *names: str) -> dict[str, xr.Dataset]:
    """Those that hold all of these variables."""
    return {name: ds for name, ds in results.items() if all(one in ds for one in names)}


def in_each(results: Results, judge: Callable[[xr.Dataset], Told]) -> Judged | None:
    """One verdict for all models: the statement has to hold in each in which it can be judged. None without any."""
    if not results:
        return None
    found = {name: judge(ds) for name, ds in results.items()}
    known = [holds for _, holds in found.values() if holds is not None]
    said = "; ".join(f"{name}: {told}" for name, (told, _) in found.items())
    return Judged(said, all(known) if known else None, ", ".join(found), commands(results.values()))


def commands(results: Iterable[xr.Dataset]) -> str:
    """The commands that made results, each once; empty where one was made from Python."""
    found = [str(ds.attrs.get("command", "")) for ds in results]
    return " && ".join(dict.fromkeys(found)) if all(found) else ""


def with_bos(results: Results) -> dict[str, xr.Dataset]:
    """Those whose prompts begin with the model's BOS."""
    return {name: ds for name, ds in results.items() if ds.attrs.get("first_policy") == "bos"}


def options(ds: xr.Dataset) -> dict[str, Any]:
    """What the measurement was given."""
    return json.loads(str(ds.attrs.get("options", "{}")))


def config(ds: xr.Dataset) -> dict[str, Any]:
    """Of the model."""
    return json.loads(str(ds.attrs.get("config", "{}")))


def window(ds: xr.Dataset) -> int | None:
    """Positions a query of the model sees, itself included; None for all."""
    found = config(ds)
    width = found.get("sliding_window")
    return int(width) if width and found.get("use_sliding_window", True) else None


def decided(verdicts: Sequence[bool | None]) -> bool | None:
    """Of several models: false where it is in one, true where it is in all, else not known."""
    if any(verdict is False for verdict in verdicts):
        return False
    return True if verdicts and all(verdicts) else None


# -------------------------------------------------------------------------------------------------------------- curves


def curves(ds: xr.Dataset, condition: str, variable: str = "sensitivity") -> list[np.ndarray]:
    """Mean profiles [position] up to the query, one per seed; none where the result lacks the condition."""
    if variable not in ds or not {"prompt", "position"} <= set(ds[variable].dims):
        return []
    return [run.mean[: _end(ds)] for run in profiles(ds, variable).get(condition, [])]


def together(found: list[np.ndarray]) -> np.ndarray | None:
    """Several seeds' profiles as one, the geometric mean; None where there is none without gaps."""
    found = [curve for curve in found if np.all(np.isfinite(curve))]
    return band(np.stack(found)).centre if found else None


def shape(curve: np.ndarray) -> UShape | None:
    """None where a curve is too short or has gaps."""
    return ushape(curve) if len(curve) >= SHORTEST and np.all(np.isfinite(curve) & (curve >= 0)) else None


def is_u(found: UShape) -> bool:
    """Both ends stand `FACTOR` times above the middle. Nothing is known where a window cuts middle and beginning off."""
    return bool(found.primacy >= FACTOR and found.recency >= FACTOR)


def seen_whole(results: Results) -> dict[str, xr.Dataset]:
    """Those whose queries see all positions before them: no sliding window."""
    return {name: ds for name, ds in results.items() if window(ds) is None}


def resampled(ds: xr.Dataset, condition: str) -> Iterator[UShape]:
    """Shapes of the profile with prompts drawn again; none for a single prompt."""
    if "condition" in ds["sensitivity"].dims:
        ds = ds.sel(condition=condition).isel(seed=0)
    values = ds["sensitivity"].transpose("prompt", "position").values[:, : _end(ds)].astype(np.float64)
    if len(values) < 2:
        return
    drawn = np.random.default_rng(0).integers(len(values), size=(DRAWS, len(values)))
    for chosen in drawn:
        found = shape(np.sqrt(np.mean(values[chosen] ** 2, axis=0)))
        if found is not None:
            yield found


def ends_told(ds: xr.Dataset, condition: str) -> tuple[str, list[UShape]]:
    """Primacy and recency in words, with the range of fresh models, or the bootstrap's interval; and the shapes."""
    shapes = [found for curve in curves(ds, condition) if (found := shape(curve)) is not None]
    if not shapes:
        return "-", []
    around = shapes if len(shapes) > 1 else list(resampled(ds, condition))
    ends = (0, 100) if len(shapes) > 1 else ENDS
    said = []
    for name in ("primacy", "recency"):
        middle = float(np.median([getattr(one, name) for one in shapes]))
        spread = np.array([getattr(one, name) for one in around])
        low, high = np.percentile(spread, ends) if len(spread) and np.all(np.isfinite(spread)) else (np.nan, np.nan)
        said.append(f"{name} {interval(middle, low, high)}" if np.isfinite(middle) else f"{name}: no middle")
    return ", ".join(said), shapes


def range_told(values: Iterable[float], form: str = ".3g") -> str:
    """Median and range."""
    known = np.array([float(value) for value in values])
    known = known[np.isfinite(known)]
    if not len(known):
        return "-"
    return number(known[0], form) if len(known) == 1 else interval(np.median(known), known.min(), known.max(), form)


def _end(ds: xr.Dataset) -> int | None:
    query = options(ds).get("query")
    return None if query is None else int(query) + 1


# ----------------------------------------------------------------------------------------------------------------- map


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


def map_command(collected: Collected) -> str:
    """Of all maps."""
    return commands(collected["map"].values())
