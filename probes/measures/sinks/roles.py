"""What heads do with position 0: the rules by which `probes.sinks` gives each head one of four roles.

A head that attends to position 0 need not use what is there: the value may be tiny, and what the head writes almost nothing.
Sizes, roles and thresholds stand on the measure's page (`docs/probes/sinks.md`). Sizes are taken beside the residual stream
that the block of query i reads, over the queries i >= 1 that see position 0, and averaged (root mean square) first over
queries, then over prompts; `reads` is the root of a ratio of sums over both. All are taken behind W_O and behind the norm on
the branch's output where there is one (`probes.measures.sinks.sums`).

`output_own` is 1 - A_i0 where v_0 = 0, 1 where the head does not attend to position 0, and known where A_i0 is 1.000, since
the output with position 0 hidden is attended anew and not found by dividing by `1 - A_i0`.

Each head has the first role that fits; the thresholds are ours. The second half of *reads*, a size, keeps out heads that
write next to nothing. Intervals (95 %) are jackknifed over documents, where they are given, else over prompts. A role is
*sure* where no interval that it was decided by contains its threshold: all rules before it surely fail, and its own surely
holds. With a single document or prompt nothing is sure.

What a role does not say is whether the model needs it: that is the effect, `probes.measures.sinks.effect`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float

from ...results.statistics import Interval, ends, jackknife, resampling, unit_of
from ...results.tables import number
from .sums import SIZES

ATTENDS = 0.3  # [Gu]'s eps again, on the mean over prompts; eight times uniform attention at 128 positions
REACTS = 0.1  # a tenth of a query's attention moves, while nothing but position 0 was changed from outside
LARGE = 0.1  # of the stream's size: what follows another embedding at position 0
SMALL = 0.3  # of the size of a head's own output if it attended elsewhere
SHARE = 0.3  # of a head's own output, in size: what comes from position 0
# Of the block's median head output, but for rounding, which alone parts the two where one head writes.
AS_LARGE = 1 - 1e-6
ABOVE, BELOW = 1, -1  # the side of a threshold where a rule holds
# By role, whether all its conditions have to hold or one, and by variable the threshold and its side.
RULES: Mapping[str, tuple[Any, Mapping[str, tuple[float, int]]]] = {
    "reads": (np.all, {"reads": (SHARE, ABOVE), "written_median": (AS_LARGE, ABOVE)}),
    "parks": (np.all, {"attends": (ATTENDS, ABOVE), "output_own": (SMALL, BELOW)}),
    "reacts": (np.any, {"reacts": (REACTS, ABOVE), "reacts_output": (LARGE, ABOVE)}),
}
ROLES = (*RULES, "ignores")
SHARES, MEDIANS = (0.2, SHARE, 0.5), (0.5, 1.0, 2.0)  # thresholds of *reads* that are tried
SENSITIVITY = ("reads above", *(f"written >= {of:g} median" for of in MEDIANS))  # a table's columns
DRAWS = 400  # resamples for intervals of `role_share`
PLACES = ("sink", "rest")  # position 0; the mean over all others
# Columns of a table of heads, and their variables.
NUMBERS = {name: name for name in ("attends", "reads", "written")} | {"written / median": "written_median"}
NUMBERS |= {"output": "output", "own output": "output_own", "reacts": "reacts"}
COLUMNS = ("block", "head", "role", *NUMBERS, "value 0/rest")


def estimates(
    found: Mapping[str, Float[np.ndarray, "prompt ..."]], documents: Sequence[str] | None
) -> dict[str, Interval]:
    """Estimates, as [layer, head], of what was kept of the first prompts, with intervals over documents, else prompts."""
    intervals: dict[str, Interval] = {}
    for name, each in found.items():
        whole, low, high = jackknife(partial(estimate, name), each, unit_of(len(each), documents))
        low = low if name.endswith("loss_change") else np.maximum(low, 0)
        intervals[name] = Interval(whole, low, high)  # type: ignore[arg-type] - arrays of them
    return intervals


def estimate(name: str, each: Float[np.ndarray, "prompt ..."]) -> Float[np.ndarray, "..."]:
    """Of any choice of prompts their mean, of sizes the root mean square, of `PAIRS` [prompt, two, ...] a ratio."""
    if name not in PAIRS:
        return np.sqrt(np.mean(each**2, 0)) if name in SIZES else each.mean(0)
    with np.errstate(divide="ignore", invalid="ignore"):  # a head that writes nothing
        one, other = each.mean(0)
        return np.sqrt(one / (other if name == "reads" else np.median(other, -1, keepdims=True)))


PAIRS = ("reads", "written_median")  # made of squares: what comes from position 0, and all that heads write


def role_shares(found: Mapping[str, Float[np.ndarray, "prompt ..."]], documents: Sequence[str] | None) -> Interval:
    """The share of heads that have each role [role], with an interval over documents, else prompts."""
    prompts = len(found["attends"])
    drawn = resampling(prompts, DRAWS, 0, documents=documents)
    shares = []
    for chosen in (np.repeat(np.arange(prompts), times) for times in drawn):
        values = {name: estimate(name, each[chosen]) for name, each in found.items()}
        known: Any = {name: Interval(x, x, x) for name, x in values.items()}  # type: ignore[arg-type] - arrays of them
        shares.append(assigned(known)[0].mean((1, 2)))
    low, high = ends(np.stack(shares)) if prompts > 1 else np.full((2, len(ROLES)), np.nan)
    return Interval(shares[0], low, high)  # type: ignore[arg-type] - arrays of them


def assigned(
    found: Mapping[str, Interval],
) -> tuple[Bool[np.ndarray, "role layer head"], Bool[np.ndarray, "layer head"]]:
    """Each head's role, one true of `ROLES`, and whether it is sure; see the module's text."""

    def beyond(name: str, limit: float, sign: int) -> Bool[np.ndarray, "three layer head"]:
        """Whether a size is above (below with -1) a limit by the estimate, surely, and possibly.

        Comparisons with NaN are false: of what is not known nothing holds, nothing surely, and anything possibly.
        """
        value, low, high = (sign * np.asarray(x) for x in (found[name][0], *found[name][1:3][::sign]))
        return np.stack([value > sign * limit, low > sign * limit, ~(high < sign * limit)])

    rules = [
        of(np.stack([beyond(name, *threshold) for name, threshold in conditions.items()]), 0)
        for of, conditions in RULES.values()
        if found.keys() >= conditions.keys()  # reactions are measured on request
    ]
    roles = np.zeros((len(ROLES), *rules[0].shape[1:]), dtype=bool)
    free, sure, earlier = np.ones_like(roles[0]), np.zeros_like(roles[0]), np.ones_like(roles[0])
    for role, (holds, surely, possibly) in zip(roles, rules, strict=False):
        role[:] = free & holds
        sure |= role & earlier & surely
        earlier &= ~possibly
        free &= ~holds
    roles[-1] = free
    return roles, sure | (free & earlier)


def role_names(ds: xr.Dataset) -> np.ndarray:
    """Each head's role by name [layer, head]."""
    return ds["role"].values.astype(str)[ds["has_role"].transpose("role", "layer", "head").values.argmax(0)]


def counts(ds: xr.Dataset) -> dict[str, int]:
    """How many heads have each role."""
    return {role: int(ds["has_role"].sel(role=role).sum()) for role in ROLES}


def sensitivity_rows(ds: xr.Dataset) -> list[list[str]]:
    """How many heads would read position 0 by other thresholds, with `SENSITIVITY`."""
    written = ds["written"] / ds["output"].median("head")
    return [
        [f"{share:g}", *(str(int(((ds["reads"] > share) & (written >= of * AS_LARGE)).sum())) for of in MEDIANS)]
        for share in SHARES
    ]


def strongest(values: Any, n: int | None = None) -> list[tuple[int, int]]:
    """(layer, head) of the `n` largest values; all, unless told. Unknown is 0."""
    values = np.nan_to_num(np.asarray(values, dtype=np.float64))
    places = np.argsort(-values, axis=None, kind="stable")[:n]
    return [(int(at // values.shape[1]), int(at % values.shape[1])) for at in places]


def head_rows(ds: xr.Dataset) -> list[list[str]]:
    """All heads, the strongest sinks first, with `COLUMNS`; a role that is not sure has a question mark."""
    roles, sink, rest = role_names(ds), *(ds["value_norm"].sel(place=place).values for place in PLACES)
    with np.errstate(divide="ignore", invalid="ignore"):  # NaN or infinite where the rest is nothing
        ratio = sink / rest
    rows = []
    for at in strongest(ds["attends"]):
        role = roles[at] + "?" * (not ds["role_sure"].values[at])
        values = {name: ds[name].values[at] if name in ds else np.nan for name in NUMBERS.values()}
        cells = [number(value, ".3f") for value in values.values()]
        rows.append([*map(str, at), role, *cells, number(ratio[at])])
    return rows
