"""What heads do with position 0: the rules by which `probes.sinks` gives each head one of four roles.

A head that attends to position 0 need not use what is there: the value may be tiny, and what the head writes almost nothing
beside the stream. So sizes are taken beside the residual stream `x_i` that the block of query i reads, over the queries
i >= 1 that see position 0, and averaged (root mean square) first over queries, then over prompts:

- `written`: `|A_i0 v_0 W_O| / |x_i|`, what the head takes from position 0.
- `output`: `|o_i W_O| / |x_i|`, all that it writes.
- `output_own`: its whole output beside its own if it attended elsewhere. `e_i` is the head's output with position 0 hidden:
  the same logits, the softmax over the other keys. The ratio of the sizes `|o_i W_O|` and `|e_i W_O|`, both root mean
  squares over queries weighted by `A_i0`, so that what it does where it does not look at position 0 does not count. It is 1
  - A_i0 where v_0 = 0, 1 where the head does not attend to position 0, and known where A_i0 is 1.000, since `e_i` is
  attended anew and not found by dividing by `1 - A_i0`.
- `reacts_output`, where another embedding was put at position 0: the change of `o_i W_O` beside `|x_i|`.

All are taken behind W_O. Where a norm follows on the branch's output (Gemma 2 and 3, OLMo 2 and 3), what is added to the
stream has another size: there `written`, `output`, `reacts_output` and roles are withheld.

Roles, of which each head has the first that fits; the thresholds are ours:

1. *reads*: `written` > 0.1. What it takes from position 0 is large beside the stream.
2. *parks*: attends > 0.3 and `output_own` < 0.3. It looks at position 0 and writes next to nothing: dormant, a no-op.
3. *reacts*: `reacts` > 0.1 or `reacts_output` > 0.1. Its pattern or its output follows what stands at position 0.
4. *ignores*: none of these. It may attend (`attends` says so), but what it takes is small beside the stream.

Intervals (95 %) are jackknifed over documents, where they are given, else over prompts. A role is *sure* where no interval
that it was decided by contains its threshold: all rules before it surely fail, and its own surely holds. With a single
document or prompt nothing is sure.

What a role does not say is whether the model needs it: that is the effect, `probes.measures.sinks.effect`.

Source: science of the measurement, section 9, "Roles of heads at the sink".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float

from ...errors import InputError
from ...results.statistics import Interval, jackknife, numbered
from .sums import SIZES

ATTENDS = 0.3  # [Gu]'s eps again, on the mean over prompts; eight times uniform attention at 128 positions
READS = 0.3  # of the output's size; where the parts are orthogonal, 0.3^2 = 9 % of its energy
REACTS = 0.1  # a tenth of a query's attention moves, while nothing but position 0 was changed from outside
LARGE = 0.1  # of the stream's size: what a head takes from position 0, or what follows another embedding there
SMALL = 0.3  # of the size of a head's own output if it attended elsewhere
BESIDE = ("written", "output", "reacts_output")  # the stream; not known where a norm follows
WITHHELD = (
    "roles of heads and sizes relative to the stream are withheld: a norm follows the attention's output, and sizes are "
    "measured before it"
)
ROLES = ("reads", "parks", "reacts", "ignores")
RULES = ("attends", "reads", "reacts", "sink-reading")  # of `selected`; the last is attends and reads both
FACTORS = (0.5, 1.0, 2.0)  # of the thresholds of reading and parking, at which heads are counted
PLACES = ("sink", "rest")  # position 0; the mean over all others

LIMITS = {"attends": ATTENDS, "reads": READS, "reacts": REACTS, "large": LARGE, "small": SMALL}
NUMBERS = ("effect", "attends", "written", "output", "output_own", "reads", "reacts")  # of a head in a table
COLUMNS = ("block", "head", "role", *NUMBERS[:4], "own output", "reads", "reacts", "value 0/rest")


class HeadRow(NamedTuple):
    """One head in numbers, as of the variables of their names; NaN where not measured.

    `role` is one of `ROLES`, or "-" (see `role_names`). `value_ratio` is |v_0| against the
    mean of the rest.
    """

    layer: int
    head: int
    role: str
    sure: bool
    effect: float
    attends: float
    written: float
    output: float
    output_own: float
    reads: float
    reacts: float
    value_ratio: float


def estimates(
    found: Mapping[str, Float[np.ndarray, "prompt ..."]], documents: Sequence[str] | None
) -> dict[str, Interval]:
    """Estimates, as [layer, head], of what was kept of every prompt, with intervals over documents, else over prompts."""
    made: dict[str, Interval] = {}
    for name, each in found.items():
        unit = np.arange(len(each)) if documents is None else numbered(documents)
        power, least = 2 if name in SIZES else 1, -np.inf if name.endswith("loss_change") else 0
        whole, low, high = jackknife(lambda x, p=power: (x**p).mean(0) ** (1 / p), each, unit)
        made[name] = Interval(whole, np.maximum(low, least), high)  # type: ignore[arg-type] - arrays of them
    return made


class _Said(NamedTuple):
    """Whether something holds, by the estimate, and whether surely so, or surely not.

    Comparisons with NaN are false: nothing holds of what is not known, and nothing is sure.
    """

    holds: Any
    surely: Any
    never: Any

    def __and__(self, other: _Said) -> _Said:
        return _Said(self.holds & other.holds, self.surely & other.surely, self.never | other.never)

    def __or__(self, other: _Said) -> _Said:
        return _Said(self.holds | other.holds, self.surely | other.surely, self.never & other.never)


def _above(x: Interval, limit: float) -> _Said:
    return _Said(x.value > limit, x.low > limit, x.high < limit)


def _below(x: Interval, limit: float) -> _Said:
    return _Said(x.value < limit, x.high < limit, x.low > limit)


def assigned(
    found: Mapping[str, Interval], large: float = LARGE
) -> tuple[Bool[np.ndarray, "role layer head"], Bool[np.ndarray, "layer head"]]:
    """Each head's role, one true of `ROLES`, and whether it is sure; see the module's text."""
    rules = [
        _above(found["written"], large),
        _above(found["attends"], ATTENDS) & _below(found["output_own"], SMALL),
    ]
    if "reacts" in found:
        rules.append(_above(found["reacts"], REACTS) | _above(found["reacts_output"], large))
    roles = np.zeros((len(ROLES), *np.shape(found["written"].value)), dtype=bool)
    free, sure, earlier = np.ones_like(roles[0]), np.zeros_like(roles[0]), np.ones_like(roles[0])
    for role, rule in zip(roles, rules, strict=False):
        role[:] = free & rule.holds
        sure |= role & earlier & rule.surely
        earlier &= rule.never
        free &= ~rule.holds
    roles[-1] = free
    return roles, sure | (free & earlier)


def selected(found: Mapping[str, Any]) -> Bool[np.ndarray, "rule layer head"]:
    """Which heads each of `RULES` selects by its threshold alone; comparisons with NaN are false."""
    attends, reads = found["attends"] > ATTENDS, found["reads"] > READS
    reacts = found["reacts"] > REACTS if "reacts" in found else np.zeros_like(attends)
    return np.stack([attends, reads, reacts, attends & reads])


def role_names(ds: xr.Dataset) -> np.ndarray:
    """Each head's role by name [layer, head]: "-" where it is withheld; of before there were roles "sink-reading" or "-"."""
    if withheld(ds):
        return np.full(ds["attends"].shape, "-")
    if "has_role" not in ds:
        return np.where(ds["selected"].sel(rule="sink-reading").values > 0, "sink-reading", "-")
    names, has = ds["role"].values.astype(str), ds["has_role"].transpose("role", "layer", "head").values
    return names[has.argmax(0)]


def withheld(ds: xr.Dataset) -> str:
    """Why a result of `sinks` has no roles, or nothing."""
    return str(ds.attrs.get("roles_withheld", ""))


def counts(ds: xr.Dataset) -> dict[str, tuple[int, int]]:
    """By role: how many heads have it, and how many of them surely; nothing where the result knows no roles."""
    if "has_role" not in ds:
        return {}
    names, sure = role_names(ds), ds["role_sure"].values > 0
    return {role: (int((names == role).sum()), int(((names == role) & sure).sum())) for role in ROLES}


def reading_at(ds: xr.Dataset, factors: Sequence[float] = FACTORS) -> dict[float, int]:
    """How many heads read, by the threshold on `written`: its usual one times each factor."""
    return {LARGE * factor: int((ds["written"].values > LARGE * factor).sum()) for factor in factors}


def parking_at(ds: xr.Dataset, factors: Sequence[float] = FACTORS) -> dict[float, int]:
    """How many heads attend and do not read, with `output_own` under its usual threshold times each factor."""
    free = (ds["attends"].values > ATTENDS) & ~(ds["written"].values > LARGE)
    return {SMALL * factor: int((free & (ds["output_own"].values < SMALL * factor)).sum()) for factor in factors}


def best(found: Any, n: int | None = None) -> list[tuple[int, int]]:
    """(layer, head) of the `n` first heads; all, unless told.

    Those whose effect was measured come first, by it; the others by `written`, or by attends * reads where there is none
    (withheld, or of before there were roles). Unknown is 0.
    """
    by = found["written"] if "written" in found else found["attends"] * found["reads"]
    by = np.nan_to_num(np.asarray(by, dtype=np.float64))
    effect = np.asarray(found["effect"]) if "effect" in found else np.full(by.shape, np.nan)
    places = np.lexsort((-by.ravel(), -np.nan_to_num(effect).ravel(), np.isnan(effect).ravel()))[:n]
    return [(int(at // by.shape[1]), int(at % by.shape[1])) for at in places]


def ranked(ds: xr.Dataset, n: int | None = None) -> list[HeadRow]:
    """The heads of a result of `sinks`, ranked as by `best`; the first `n` of them if given.

    Raises:
        InputError: the result is another measurement's, or `n` is negative.
    """
    missing = [name for name in ("attends", "reads", "value_norm", "selected") if name not in ds]
    if missing or ds["attends"].ndim != 2:
        raise InputError(f"the result has no {missing[0] if missing else 'single run'}; give one of sinks")
    if n is not None and n < 0:
        raise InputError(f"n={n} heads cannot be listed; give 0 or more")
    unknown = np.full(ds["attends"].shape, np.nan)
    numbers = {name: ds[name].values if name in ds else unknown for name in NUMBERS}
    sink, rest = (ds["value_norm"].sel(place=place).values for place in PLACES)
    with np.errstate(divide="ignore", invalid="ignore"):  # NaN or infinite where the rest is nothing
        numbers["value_ratio"] = sink / rest
    roles, sure = role_names(ds), ds["role_sure"].values if "role_sure" in ds else np.ones_like(unknown)
    return [
        HeadRow(*at, str(roles[at]), bool(sure[at]), **{name: float(x[at]) for name, x in numbers.items()})
        for at in best(ds, n)
    ]


def cells(row: HeadRow) -> Iterator[str]:
    """A head as text, in the order of `COLUMNS`; a role that is not sure has a question mark."""
    yield from (str(row.layer), str(row.head), row.role if row.sure else f"{row.role}?")
    for name, value in zip(row._fields[4:], row[4:], strict=True):
        form = ".3g" if name in ("effect", "value_ratio") else ".3f"
        yield "-" if math.isnan(value) else format(value, form)
