"""How a result of `headwater match` is laid out: samples by their place, NaN where there is nothing; see `studies.match`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import xarray as xr

from ..measures.bos_swap import removed
from ..models.view import View
from ..results.curves import rms_profile
from ..results.profiles import typical
from ..results.statistics import jackknife
from ..results.ushape import SHORTEST
from ..theory.cesaro import fit_alpha

CURVES = ("elasticity", "alpha", "sink_rate")
SCALARS = ("leakage_total", "removed", "reacts", "leakage_share")
ENDS = ("", "_low", "_high")
STATES = ("init", "pretrained")
TRAININGS = ("init", "retrieval", "in-context")
Row: TypeAlias = Mapping[str, np.ndarray]  # what is known of one model, or of the toys of a variant and training
Variables: TypeAlias = dict[str, tuple[Any, ...]]


SAID = {
    "sensitivity": "||J_j||_F / sqrt(d)",
    "elasticity": "||J_j||_F / sqrt(d) * rms(x) / rms(h)",
    "alpha": "mean weight on the position over the queries from it on [Gu], mean over blocks and heads",
    "sink_rate": "share of heads with alpha > 0.3",
    "uniform": "alpha of uniform attention under the mask",
    "leakage_total": "leakage of the early band, log form, mean over blocks and heads",
    "leakage_share": "share of each source in it",
    "removed": "fraction of its residual component that the swap at position 0 removes",
    "reacts": "attention to keys >= 1 changed by the swap at position 0, total variation, mean over blocks and heads",
}


def _described(name: str, of: str) -> dict[str, str]:
    if name.endswith(ENDS[1:]):
        name, _, end = name.rpartition("_")
        of = f"{of}, {end} end of the 95 % interval"
    if name == "swapped":
        name, of = "elasticity", f"{of}, position 0 swapped, geometric mean over prompts"
    return {"long_name": f"{SAID[name]}, {of}", "units": "nat^2" if name == "leakage_total" else "1"}


def _filled(sizes: Sequence[int], values: Mapping[tuple[int, ...], np.ndarray], dtype: Any) -> np.ndarray:
    """Values by their place in an array [*sizes, ...]; NaN where there is none, and behind shorter ones."""
    longest = np.max([value.shape for value in values.values()], axis=0).astype(int)
    found = np.full((*sizes, *longest), np.nan, dtype)
    for place, value in values.items():
        found[(*place, *map(slice, value.shape))] = value
    return found


def _laid_out(
    rows: Mapping[tuple[int, ...], Row], sizes: Sequence[int], dims: Mapping[str, tuple[str, ...]], of: str
) -> Variables:
    """The variables of rows by their place, in the order of `dims`, which holds the dimensions of each."""
    found: Variables = {}
    for name, own in dims.items():
        values = {place: row[name] for place, row in rows.items()}
        exact = of == "toys" and name not in (*CURVES, "swapped")
        found[name] = own, _filled(sizes, values, np.float64 if exact else np.float32), _described(name, of)
    return found


def of_model(
    model: View,
    portraits: Mapping[tuple[str, int], xr.Dataset],
    kernels: Mapping[tuple[str, int], np.ndarray],
    seeds: int,
) -> Variables:
    one, at, sizes = portraits["pretrained", 0], ("state", "seed"), (len(STATES), seeds)
    numbers = [f"{name}{end}" for name in SCALARS for end in ENDS if f"{name}{end}" in one]
    dims = {name: (*at, "prompt", "position") for name in ("sensitivity", *CURVES)} | {"swapped": (*at, "position")}
    dims |= {name: (*at, "source") if "share" in name else at for name in numbers}
    rows = {
        (STATES.index(state), n): {"swapped": typical(ds["elasticity_swapped"].values)}
        | {name: ds[name].values for name in dims if name != "swapped"}
        for (state, n), ds in portraits.items()
    }
    found = {f"model_{name}": variable for name, variable in _laid_out(rows, sizes, dims, "the model").items()}
    found["model_uniform"] = (("position",), one["uniform"].values, _described("alpha", "uniform attention"))
    if kernels:
        values = {(STATES.index(state), n): value for (state, n), value in kernels.items()}
        said = {"long_name": "second-moment kernel, measured patterns, score path", "units": "1"}
        found["theory_kernel"] = ((*at, "prompt", "position"), _filled(sizes, values, np.float32), said)
    curves, alphas = np.full((len(STATES), one.sizes["position"]), np.nan, np.float32), np.full(len(STATES), np.nan)
    for n, state in enumerate(STATES):
        means = [rms_profile(ds["sensitivity"].values).mean for (of, _), ds in portraits.items() if of == state]
        mean = np.sqrt(np.mean(np.square(means), 0))
        if np.count_nonzero(mean) >= SHORTEST:
            fit = fit_alpha(mean, model.spec.blocks, window=model.spec.windows)
            curves[n], alphas[n] = fit.curve, fit.alpha
    found["theory_cesaro"] = (("state", "position"), curves, {"long_name": "N^L, fitted", "units": "1"})
    found["theory_alpha"] = (("state",), alphas, {"long_name": "alpha of N^L", "units": "1"})
    return found


def of_runs(seeds: Sequence[int], found: Sequence[xr.Dataset]) -> dict[str, np.ndarray]:
    """What portraits of toys say together: curves of every seed, numbers with their intervals over seeds."""

    def stack(name: str, number: int) -> np.ndarray:
        return np.stack([ds[name].values for n, ds in zip(seeds, found, strict=True) if n == number])

    numbers = sorted(set(seeds))
    row = {name: np.stack([stack(name, number).mean(0) for number in numbers]) for name in ("alpha", "sink_rate")}
    each = [stack("elasticity", number).swapaxes(0, 1) for number in numbers]  # prompt, run, point
    row["uniform"] = found[0]["uniform"].values
    row["elasticity"] = np.stack([np.stack([typical(prompt) for prompt in one]) for one in each])
    row["swapped"] = np.stack([typical(stack("elasticity_swapped", number)) for number in numbers])
    streams = np.array([[float(ds[name]) for name in ("residual", "residual_swapped")] for ds in found])
    for name, estimate, values in (
        *((name, _mean, np.array([ds[name].values for ds in found])) for name in ("leakage_total", "reacts")),
        ("removed", _removed, streams),
        ("leakage_share", _shares, np.array([ds["leakage_source"].values for ds in found])),
    ):
        row |= dict(zip((f"{name}{end}" for end in ENDS), over_seeds(estimate, values, seeds), strict=True))
    return row


def of_toys(variants: Sequence[str], runs: Mapping[tuple[str, str], Row]) -> Variables:
    at, sizes = ("variant", "training"), (len(variants), len(TRAININGS))
    dims = {name: (*at, "toy_seed", "toy_prompt", "point") for name in CURVES} | {"swapped": (*at, "toy_seed", "point")}
    dims |= {"uniform": (*at, "point")}
    dims |= {f"{name}{end}": (*at, "source") if "share" in name else at for name in SCALARS for end in ENDS}
    rows = {(variants.index(variant), TRAININGS.index(training)): row for (variant, training), row in runs.items()}
    found = {f"toy_{name}": variable for name, variable in _laid_out(rows, sizes, dims, "toys").items()}
    for name, said, units in (
        ("loss", "loss at the end of training", "nat"),
        ("accuracy", "accuracy on unseen sequences", "1"),
        ("log_p", "log p of the right answer on unseen sequences, mean", "nat"),
        ("target", "position asked for", "1"),
    ):
        each = {place: row[name] for place, row in rows.items() if name in row}
        attrs = {"long_name": said, "units": units}
        found[f"toy_{name}"] = ((*at, "member"), _filled(sizes, each, np.float64), attrs)
    return found


def over_seeds(
    estimate: Callable[[np.ndarray], Any], values: np.ndarray, seeds: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`jackknife` over seeds of an estimate from members [member, ...]; those that are not finite do not count."""
    known = np.isfinite(values).reshape(len(values), -1).all(1)
    if not known.any():
        nothing = np.full(values.shape[1:], np.nan) if estimate is _shares else np.array(np.nan)
        return nothing, nothing, nothing
    return jackknife(estimate, values[known], np.asarray(seeds)[known])


def _mean(values: np.ndarray) -> float:
    return float(values.mean())


def _removed(streams: np.ndarray) -> float:
    """Of residual components [member, before and after]: the fraction that is gone of their sum."""
    sums = streams.sum(0, keepdims=True)
    return float(removed(sums[:, :1], sums[:, 1:])[0][0])


def _shares(parts: np.ndarray) -> np.ndarray:
    """Of parts [member, source]: each source's share of the sum over members; a single toy's may be next to nothing."""
    whole = parts.sum()
    return parts.sum(0) / whole if whole > 0 else np.full(parts.shape[1], np.nan)
