"""A sentence that answers the measure's question, each number computed from its result."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import xarray as xr

from ..results.curves import band, relative_error, rms_profiles
from ..results.dataset import options_of
from ..results.profiles import shapes
from ..results.tables import estimated, interval, number, variance

STRONG, WEAK = 2.0, 1.25  # how many times the middle both ends stand in a strong and in a weak U


def _jacobian(ds: xr.Dataset) -> str:
    """How strongly the ends count beside the middle, after training and before."""
    conditions = shapes(ds)
    shape = conditions.get("pretrained", next(iter(conditions.values())))
    if not shape.primacy.value > 0:
        return "The last output does not depend on the first positions at all."
    least = min(shape.primacy.low, shape.recency.low)
    kind = "a strong U" if least >= STRONG else "a weak U" if least >= WEAK else "not clearly a U"
    fresh = ""
    if "pretrained" in conditions and "init" in conditions:
        fresh = f" (fresh weights: {number(conditions['init'].primacy.value)})"
    first, last = (interval(*end[:3]) for end in (shape.primacy, shape.recency))
    return (
        f"The last output depends {first} times as strongly on the first 5 % of positions as on the middle{fresh}, and "
        f"{last} times on the last position: {kind}."
    )


def _theory(ds: xr.Dataset) -> str:
    """How far the prediction from the architecture is off."""
    if "theory_score_path" not in ds or "init" not in rms_profiles(ds):
        return ""
    end = int(options_of(ds)["query"]) + 1
    predicted, measured = (
        band([run.mean[:end] for run in rms_profiles(ds, variable)["init"]]).centre
        for variable in ("theory_score_path", "sensitivity")
    )
    error = relative_error(predicted, measured)
    return f"A theory without fitted parameters predicts the profile of fresh weights to {error:.1%}."


def _bos_swap(ds: xr.Dataset) -> str:
    """What another embedding at position 0 does to sinks and to the residual component."""
    first = ds.isel(replacement=0) if "replacement" in ds.dims else ds
    put = str(first["replacement"].values if "replacement" in first.coords else ds.attrs.get("replacement", "another"))
    before, after = (float(first[f"sink_rate_{when}"].mean()) for when in ("before", "after"))
    form = "residual_steady" if "residual_steady_before_of_model" in first else "residual"
    stream = [estimated(first.isel(band=0), f"{form}_{when}_of_model", said=variance) for when in ("before", "after")]
    return (
        f"With the {put} embedding at position 0 the sink rate goes from {before:.0%} to {after:.0%}, and what the residual "
        f"stream alone leaks from {stream[0]} to {stream[1]} nat²."
    )


def _retrieval(ds: xr.Dataset) -> str:
    """How often the value asked for is the answer."""
    exact = ds["exact"].mean("context").values
    return (
        f"It answers {exact[0]:.0%} of questions for the first pair of a list exactly, {exact[-1]:.0%} for the last, "
        f"{exact.min():.0%} where it is worst."
    )


def _decode(ds: xr.Dataset) -> str:
    """How well position can be read off."""
    best = int(np.nanargmax(ds["r2"].values))
    r2 = estimated(ds.isel(layer=best), "r2", ".2f")
    return (
        f"Position can be read off with R² {r2} at best, from the stream that block {ds['layer'].values[best]} reads."
    )


ANSWERS: dict[str, Callable[[xr.Dataset], str]] = {
    "jacobian": _jacobian,
    "theory": _theory,
    "bos-swap": _bos_swap,
    "retrieval": _retrieval,
    "decode": _decode,
}
