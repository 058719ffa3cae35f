"""Curves of every result as plain data: computed here once, drawn by matplotlib into files and by plotly on the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import xarray as xr

from ..measures.retrieval import mechanism_numbers
from ..results.curves import Profile, band
from ..results.profiles import profiles
from ..results.statistics import couples, jackknife
from .palette import (
    BEFORE,
    DECODED,
    MECHANISM,
    RECALL,
    TOTAL_COLOR,
    Style,
    condition_style,
    replacement_colors,
    replacement_label,
    theory_style,
)

Kind: TypeAlias = Literal["line", "points", "bars", "level", "steps"]
Profiles: TypeAlias = Callable[..., Mapping[str, Sequence[Profile]]]
Ends: TypeAlias = tuple[np.ndarray | None, np.ndarray | None]

MEASURED = "measured"
SEEDS, ERRORS = "seeds", "±2 standard errors:"  # what the band of a profile is
STREAM_LEFT_IN = "constant sink left in"
# Position 0's logit, as far as it is the same for all queries, counts with the mask or with the residual stream.
SINK = {"_steady": "taken out", "": "left in"}
MATCHED = "matched"
BESIDE_THEORIES = {"kernel": "score_path", "cesaro": "cesaro"}  # as results of toys beside models name them


@dataclass(frozen=True)
class Curve:
    """One quantity along an axis, with its interval where it has one, and its look by role."""

    x: np.ndarray  # [point]
    y: np.ndarray  # [point]
    style: Style
    low: np.ndarray | None = None  # [point]
    high: np.ndarray | None = None
    kind: Kind = "line"
    label: str = ""  # in a legend; an empty one has no entry
    of: Mapping[str, Any] = field(default_factory=dict)  # what it is of: condition, theory, part, ...
    band: str = ""  # what reaches from low to high
    count: int = 1  # runs behind it
    texts: Sequence[str] = ()  # what each point is
    width: float = 1.3
    alpha: float = 1.0
    filled: bool = True  # marks, hollow otherwise
    ends: str = ""  # matplotlib's mark at both ends
    marked: float = 0.0  # size of a mark at every point of a line


def having(curves: Iterable[Curve], **of: Any) -> list[Curve]:
    """Those that are of the given things, as in `having(curves, condition="init")`."""
    return [curve for curve in curves if all(curve.of.get(key) == value for key, value in of.items())]


def ends(ds: xr.Dataset, name: str, **at: Any) -> Ends:
    """Both ends of a variable's interval; None of a result without intervals."""
    low, high = (ds[f"{name}_{end}"].sel(at).values if f"{name}_{end}" in ds else None for end in ("low", "high"))
    return low, high


# ------------------------------------------------------------------------------------------------------------ profiles


def profile(runs: Sequence[Profile], style: Style, **of: Any) -> Curve:
    """Geometric mean over seeds; the band is their range, or two standard errors (of the logarithm) of a single run."""
    centre, low, high = band([run.mean for run in runs])
    if len(runs) == 1:
        reach = np.exp(2 * np.divide(runs[0].stderr, centre, out=np.zeros_like(centre), where=centre > 0))
        low, high = centre / reach, centre * reach
    x = np.arange(len(centre), dtype=float)
    what = SEEDS if len(runs) > 1 else ERRORS
    return Curve(x, centre, style, low, high, of={"curve": MEASURED} | of, count=len(runs), band=what)


def profiles_with(ds: xr.Dataset, theories: Iterable[str] = (), by: Profiles = profiles) -> list[Curve]:
    """The profile of each condition, followed by the theories of it; `by` takes means over prompts."""
    found, theories = [], [theory for theory in theories if f"theory_{theory}" in ds]
    told = {theory: by(ds, f"theory_{theory}") for theory in theories if theory != "cesaro"}
    for condition, runs in by(ds).items():
        found.append(profile(runs, condition_style(condition), condition=condition))
        for theory in theories:
            if theory == "cesaro":
                y = ds["theory_cesaro"].sel(condition=condition).values
            else:
                y = band([run.mean for run in told[theory][condition]]).centre
            of = {"condition": condition, "curve": theory}
            found.append(Curve(np.arange(len(y), dtype=float), y, theory_style(theory, condition), of=of))
    return found


# --------------------------------------------------------------------------------------------------------------- sinks


def key_curves(ds: xr.Dataset) -> dict[str, Curve]:
    """Over keys, of the whole model: mean weight, weight if attention were uniform, [Gu]'s and [Wu]'s shares of sinks."""
    alpha = ds["alpha"].mean([dim for dim in ds["alpha"].dims if dim != "key"])
    found = {"alpha": alpha, "uniform": ds["uniform"].mean("layer")}
    found |= {name: ds[name] for name in ("sink_rate_of_model", "over_tau_of_model")}
    return {name: Curve(ds["key"].values, values.values, Style("", TOTAL_COLOR)) for name, values in found.items()}


# ---------------------------------------------------------------------------------------------------------- trajectory


def recall_curves(ds: xr.Dataset, *names: str) -> list[Curve]:
    """Means over contexts by the depth of the pair, with intervals over couples of contexts."""
    unit, found = couples(ds), []
    for name in names:
        mean, low, high = jackknife(lambda some: some.mean(0), ds[name].values, unit)
        look: dict[str, Any] = {"label": RECALL[name].label, "of": {"variable": name}, "band": "95 %"}
        found.append(Curve(ds["fraction"].values, mean, RECALL[name], low, high, marked=2.5, **look))
    return found


def mechanism_curves(ds: xr.Dataset, *names: str) -> list[Curve]:
    """What the log odds depend on at the traced depths: geometric means over contexts, intervals over couples.

    None of a result without a mechanism.
    """
    if "sensitivity" not in ds:
        return []
    x, found = ds["fraction"].sel(depth=ds["traced_depth"].values).values, []
    for name in names:
        mean, low, high = mechanism_numbers.by_depth(ds, name)
        look: dict[str, Any] = {"label": MECHANISM[name].label, "of": {"variable": name}, "band": "95 %"}
        found.append(Curve(x, mean, MECHANISM[name], low, high, marked=3.5, **look))
    return found


def decoded_curves(ds: xr.Dataset) -> list[Curve]:
    """R^2 by layer of positions, and of permuted ones."""
    found = []
    for name, style in DECODED.items():
        found.append(Curve(ds["layer"].values, ds[name].values, style, *ends(ds, name), label=style.label, marked=2.5))
    return found


# ------------------------------------------------------------------------------------------------------------ BOS swap


def of_several(ds: xr.Dataset) -> xr.Dataset:
    """With the dimension `replacement` in front, of length one where the result is of a single one."""
    if "replacement" in ds.dims or "replacement" not in ds.attrs:
        return ds
    found = ds.drop_vars("tokens", errors="ignore").expand_dims(replacement=[str(ds.attrs["replacement"])])
    return found.assign_attrs({name: value for name, value in ds.attrs.items() if name != "replacement"})


def _swapped(ds: xr.Dataset, colors: Mapping[str, str] | None) -> Iterable[tuple[xr.Dataset, str, Style]]:
    """One replacement at a time, with its name and look."""
    names = [str(name) for name in ds["replacement"].values]
    colors = colors or replacement_colors(names)
    for name in names:
        yield ds.sel(replacement=name), name, Style(replacement_label(name), colors[name])


def swap_bands(ds: xr.Dataset, quantity: str, colors: Mapping[str, str] | None = None) -> list[Curve]:
    """By band: "removed", the removed fraction of the residual component, or "residual", it before and after the swap."""
    x, found = np.arange(ds.sizes["band"], dtype=float), []
    for at, replacement, style in _swapped(ds, colors):
        for component, sink in SINK.items():
            for when in ("",) if quantity == "removed" else ("_before", "_after"):
                name = f"{quantity}{component}{when}_of_model"
                if name not in ds:
                    continue
                look = Style("before", TOTAL_COLOR, marker="D") if when == "_before" else style
                of = {"replacement": replacement, "sink": sink, "when": when[1:]}
                filled = component != "" or f"{quantity}_steady{when}_of_model" not in ds
                more: dict[str, Any] = {"kind": "points", "label": look.label, "of": of, "filled": filled}
                found.append(Curve(x, at[name].values, look, *ends(at, name), **more))
    return found


def loss_curves(ds: xr.Dataset, colors: Mapping[str, str] | None = None) -> list[Curve]:
    """Change of the next-token loss by position."""
    x, name = ds["position"].values, "loss_change"
    return [
        Curve(x, at[name].values, style, *ends(at, name), label=style.label, of={"replacement": which}, width=1.1)
        for at, which, style in _swapped(ds, colors)
    ]


def swapped_profiles(ds: xr.Dataset, colors: Mapping[str, str] | None = None) -> list[Curve]:
    """Sensitivity by input position: before the swap, then after each."""
    x = ds["position"].values.astype(float)
    before = Curve(x, ds["sensitivity_before"].isel(replacement=0).values, BEFORE, label="before", width=2.6, ends="o")
    after = [(at["sensitivity_after"].values, style) for at, _, style in _swapped(ds, colors)]
    return [before, *(Curve(x, y, style, label=style.label, width=0.8, ends="o") for y, style in after)]


# ------------------------------------------------------------------------------------------------- toys beside models
