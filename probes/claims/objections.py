"""Two objections to [Chowdhury] that were raised in public: which quantity adds up, and what the surrogate is worth."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from ..measures.map import Row
from ..results.curves import rms_log_error, spearman
from ..results.statistics import units
from ..results.tables import range_told
from .chowdhury import chowdhury
from .evidence import Results, fresh, places, real
from .readings import of_profiles, prompted, root_mean_square
from .rules import Lacks, Told, above, below, every, told

objection = chowdhury.but(where="objection in public", kind="request", needs=places())
NEARER = (
    "adding powers has the smaller RMS log error (best scale) at every place of the map: with coefficients alike where no "
    "branch is scaled, and the kernel, nothing fitted, against N^L with its best alpha"
)
ERROR, RANK = 0.1, 0.95  # of the surrogate: ours
FRESH = fresh("theory", options="--prompts 2")
SCALAR = fresh("scalar-init", "scalar", "jacobian", options="--method scalar --conditions init")


def errors(measured: np.ndarray, *theories: np.ndarray) -> list[float]:
    """RMS log errors of theories' shapes, where all of them reach."""
    seen = np.all(np.stack([measured, *theories]) > 0, axis=0)
    if np.count_nonzero(seen) < 2:
        return [np.nan] * len(theories)
    return [rms_log_error(curve[seen], measured[seen], free_scale=True) for curve in theories]


def powers_nearer(rows: Sequence[Row], powers: str, amplitudes: str) -> Told:
    """Whether the theory that adds up powers is nearer than the one that adds up amplitudes, at every place."""
    there = [row for row in rows if powers in row and amplitudes in row]
    known = [errors(row["measured"], row[powers], row[amplitudes]) for row in there]
    known = [both for both in known if np.all(np.isfinite(both))]
    nearer = [one < other for one, other in known]  # of the same profile
    of_powers, of_amplitudes = (range_told([both[at] for both in known]) for at in (0, 1))
    words = f"powers nearer at {sum(nearer)} of {len(known)} places: {of_powers}, amplitudes {of_amplitudes}"
    return words, every(nearer)


@objection("objection-powers-map", rule=NEARER)
def _(rows: Sequence[Row]) -> dict[str, Told]:
    """The Cesàro power N^L is the wrong quantity at initialization: powers of paths add up, not amplitudes."""
    pairs = {"coefficients alike": ("config", "amplitudes"), "against the fitted N^L": ("score_path", "cesaro")}
    return {name: powers_nearer(rows, *of) for name, of in pairs.items()}


def powers_in_model(ds: xr.Dataset, condition: str) -> Told:
    """The same of a model's own profile."""
    cesaro = ds["theory_cesaro"]
    fitted = (cesaro.sel(condition=condition) if "condition" in cesaro.dims else cesaro).values.astype(float)

    def ratio(measured: np.ndarray, kernel: np.ndarray) -> float:
        one, other = errors(measured, kernel, fitted[: len(measured)])
        return float(np.log(one / other)) if one > 0 and other > 0 else np.nan

    both = prompted(ds, condition), prompted(ds, condition, "theory_score_path")
    error = of_profiles(ratio, units(ds), *both, mean=root_mean_square)
    return f"error {told(error, change=np.exp)} times that of N^L", below(error, 0)


def surrogate(kinds: Results, condition: str) -> Told:
    """Whether the scalar probe stands in for the Jacobian norm, on the same prompts."""
    whole = kinds["jacobian"]
    scalar = kinds["scalar-init"] if "scalar-init" in kinds else kinds["scalar"]
    if scalar.attrs.get("tokens_sha256") != whole.attrs.get("tokens_sha256"):
        raise Lacks("tokens")

    def rank(one: np.ndarray, other: np.ndarray) -> float:
        seen = (one > 0) & (other > 0)
        return spearman(one[seen], other[seen]) if np.count_nonzero(seen) > 1 else np.nan

    both, mean = (prompted(scalar, condition), prompted(whole, condition)), root_mean_square
    error = of_profiles(lambda one, other: errors(other, one)[0], units(scalar), *both, mean=mean)
    rho = of_profiles(rank, units(scalar), *both, mean=mean)
    words = f"RMS log error {told(error, '.2f')}, rank correlation {told(rho, '.3f')}"
    return words, every([below(error, ERROR), above(rho, RANK)])


for condition, word, theory, scalar in (
    ("init", "fresh", FRESH, SCALAR),
    ("pretrained", "pretrained", real("theory"), real("scalar", "jacobian")),
):
    claim = f"In {word} models adding up powers of paths, nothing fitted, beats adding up amplitudes with one fitted number."
    rule = "RMS log error (best scale) of the second-moment kernel below that of N^L with its best alpha in every model"
    stated = objection(f"objection-powers-{condition}", claim=claim, rule=rule, needs=theory, condition=condition)
    stated(powers_in_model)
    claim = f"The one-pass scalar surrogate is a sound stand-in for the Jacobian norm of {word} models."
    rule = f"on the same prompts RMS log error at most {ERROR:g} and rank correlation at least {RANK:g} in every model"
    objection(f"objection-surrogate-{condition}", claim=claim, rule=rule, needs=scalar, condition=condition)(surrogate)
