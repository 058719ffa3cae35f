"""Profile and attention of one view in one call, and how far two curves over position agree: a model's and its toys'.

Agreement and its intervals are defined in `docs/probes/match.md`.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import InputError
from ..models.load import takes_model
from ..models.view import View
from ..results.curves import rms_log_error, spearman
from ..results.dataset import Variable, dataset, labelled, provenance
from ..results.statistics import jackknife, jackknife_of_two, unit_of
from ..results.ushape import SHORTEST, Shape, shape_over, typical
from ..run.progress import Progress, part
from ..run.store import Store
from .jacobian import PRODUCTS, jacobian
from .sinks import THRESHOLD, sinks

EXACT_WIDTH = 64  # up to it the Jacobian is taken exactly: no more products than a sketch has
_CURVE = ("prompt", "position")
VARIABLES = {
    "sensitivity": Variable(_CURVE, "||J_j||_F / sqrt(d)"),
    "elasticity": Variable(_CURVE, "sensitivity * rms(x) / rms(h)"),
    "alpha": Variable(_CURVE, "mean weight on the position over the queries from it on [Gu]"),
    "sink_rate": Variable(_CURVE, f"share of heads with alpha > {THRESHOLD:g}"),
    "uniform": Variable(("position",), "alpha of uniform attention"),
}

Samples = Float[np.ndarray, "_ _ _"]  # [seed, prompt, position]; two curves differ in all three


class Agreement(NamedTuple):
    """How alike two curves are.

    NaN: too few points where both are above zero, or one is flat; ends, too, of a single document or run.
    """

    spearman: float
    spearman_low: float
    spearman_high: float
    error: float
    error_low: float
    error_high: float
    apart: float


# ------------------------------------------------------------------------------------------------------- one view


@takes_model
def portrait(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    *,
    products: int = PRODUCTS,
    seed: int = 0,
    pieces: Store | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """The profile of one view, and its sinks by position.

    Args:
        model: any view, a pretrained model's or a toy's; it is not changed.
        tokens: ids [prompt, position]; of other lengths with `attention_mask` (`docs/prompts.md`).
        products: of the Jacobian's sketch, per prompt; up to width 64 it is exact.
        seed: of the sketch.
        pieces: where parts are kept for an interrupted call (`probes.run.store`); in memory unless given.
        progress: called with (share done, 1).

    Returns:
        Dataset with `sensitivity`, `elasticity`, `alpha`, mean weight over blocks and heads, and `sink_rate`, share of heads
        above the threshold, each [prompt, position]; `uniform` [position]. Attributes: what made it.

    Raises:
        InputError: tokens or options that cannot be used; values that are not finite.

    Source: science of the measurement, sections 1 and 3.
    """
    exact, pieces = model.spec.width <= EXACT_WIDTH, pieces or Store()
    how: dict[str, Any] = {"method": "exact"} if exact else {"method": "sketch", "products": products}
    profile = jacobian(model, tokens, seed=seed, pieces=pieces, progress=part(progress, 0.0, 0.8), **how)
    seen = sinks(model, tokens, keys=range(tokens.shape[1]), pieces=pieces, progress=part(progress, 0.8, 1.0))
    alpha = seen["alpha"].transpose("prompt", "layer", "head", "key").values
    values = {name: profile[name].values for name in ("sensitivity", "elasticity")}
    values |= {"alpha": alpha.mean((1, 2)), "sink_rate": (alpha > THRESHOLD).mean((1, 2))}
    values["uniform"] = seen["uniform"].values.mean(0)
    return dataset(
        labelled(VARIABLES, values),
        coords={"position": range(tokens.shape[1])},
        attrs=provenance(model, tokens, measurement="portrait", seed=seed, **how),
    )


# ------------------------------------------------------------------------------------------------------ two curves


def fractions(length: int) -> Float[np.ndarray, " position"]:
    """x = j / (T - 1) of every position."""
    return np.arange(length) / max(1, length - 1)


def averaged(values: Samples, *, squares: bool = False) -> Float[np.ndarray, " position"]:
    """One curve of [seed, prompt, position]: the geometric mean; with `squares` of root mean squares over prompts."""
    found = _checked(values)
    return typical(np.sqrt(np.mean(found**2, axis=1)) if squares else found)


def taken_at(curve: Float[np.ndarray, " position"], points: int) -> Float[np.ndarray, " point"]:
    """A curve at `points` even fractions from 0 to 1, interpolated in the logarithm; see the module's text on zeros."""
    if points == len(curve):
        return np.array(curve, dtype=np.float64)
    at = fractions(points) * (len(curve) - 1)
    low = np.minimum(np.floor(at).astype(int), len(curve) - 2)
    share = at - low
    left, right = np.asarray(curve, dtype=np.float64)[low], np.asarray(curve, dtype=np.float64)[low + 1]
    with np.errstate(divide="ignore", invalid="ignore"):
        between = np.exp((1 - share) * np.log(left) + share * np.log(right))
    return np.where((left > 0) & (right > 0), between, np.where(share < 0.5, left, right))


def agreement(
    one: Samples, other: Samples, *, paired: bool = False, squares: bool = False, documents: Sequence[str] | None = None
) -> Agreement:
    """How alike two curves over position are, on the shorter one's fractions.

    Args:
        one: a model's, [seed, prompt, position], zero or more; its unit is the document.
        other: the same of toys, whose unit is the seed, or a single curve [1, 1, position], which is held.
        paired: both have the same prompts, and one unit.
        squares: means are root mean squares over prompts: beside the kernel, which predicts them.
        documents: what each prompt of `one` is a window of; its prompts are units where that is missing.

    Raises:
        InputError: curves that cannot be compared.
    """
    a, b = _checked(one), _checked(other)
    points, seeds = min(a.shape[-1], b.shape[-1]), len(a)

    def alike(x: Samples, y: Samples) -> tuple[float, float, float]:
        return _alike(*(taken_at(averaged(values, squares=squares), points) for values in (x, y)))

    def estimate(by_prompt: np.ndarray, y: Samples) -> np.ndarray:
        rank, error, _ = alike(by_prompt.swapaxes(0, 1), y)
        return np.array([rank, math.log(error) if error > 0 else -math.inf if error == 0 else math.nan])

    def together(by_prompt: np.ndarray) -> np.ndarray:
        return estimate(by_prompt[:, :seeds], by_prompt[:, seeds:].swapaxes(0, 1))

    unit = unit_of(a.shape[1], documents)
    mine = a.swapaxes(0, 1), unit
    if paired:
        if a.shape[1] != b.shape[1]:
            raise InputError(f"{a.shape[1]} and {b.shape[1]} prompts cannot be paired; give the same, or paired=False")
        found = jackknife(together, np.concatenate([a, b]).swapaxes(0, 1), unit)
    elif b.shape[:2] == (1, 1):
        found = jackknife(lambda some: estimate(some, b), *mine)
    else:
        found = jackknife_of_two(estimate, mine, (b, np.arange(len(b))))
    (rank, low, high), errors = ([float(end[n]) for end in found] for n in (0, 1))
    return Agreement(rank, max(low, -1.0), min(high, 1.0), *map(math.exp, errors), apart=alike(a, b)[2])


def shape(values: Samples, *, runs: bool = False, documents: Sequence[str] | None = None) -> Shape:
    """The shape of a curve [seed, prompt, position], with intervals.

    Args:
        values: zero or more.
        runs: seeds are the units (toys); else documents are.
        documents: what each prompt is a window of; prompts are units where that is missing.

    Raises:
        InputError: values that are no curve, or fewer than 8 positions.
    """
    found = _checked(values)
    if found.shape[-1] < SHORTEST:
        raise InputError(f"a curve of {found.shape[-1]} positions has no middle; give at least {SHORTEST}")
    by_unit = found if runs else found.swapaxes(0, 1)
    unit = unit_of(len(by_unit), None if runs else documents)
    with np.errstate(divide="ignore"):  # a zero stays one: exp(-inf)
        return shape_over(np.log(by_unit), unit)


def _alike(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    both = (x > 0) & (y > 0)
    error = rms_log_error(x[both], y[both], free_scale=True) if np.count_nonzero(both) > 1 else math.nan
    return spearman(x, y), error, float(np.mean((x > 0) != (y > 0)))


def _checked(values: Samples) -> Samples:
    found = np.asarray(values, dtype=np.float64)
    if found.ndim != 3 or found.size == 0 or found.shape[-1] < 2:
        raise InputError(f"a curve has shape {list(found.shape)}; give [seed, prompt, position], at least 2 positions")
    if not np.all(np.isfinite(found) & (found >= 0)):
        raise InputError("a curve has values that are negative or not finite; give sensitivities or weights")
    return found
