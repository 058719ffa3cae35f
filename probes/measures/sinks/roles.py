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

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float

from ...results.statistics import Interval, jackknife, numbered
from ...results.tables import number
from .sums import SIZES

ATTENDS = 0.3  # [Gu]'s eps again, on the mean over prompts; eight times uniform attention at 128 positions
REACTS = 0.1  # a tenth of a query's attention moves, while nothing but position 0 was changed from outside
LARGE = 0.1  # of the stream's size: what a head takes from position 0, or what follows another embedding there
SMALL = 0.3  # of the size of a head's own output if it attended elsewhere
BESIDE = ("written", "output", "reacts_output")  # the stream; not known where a norm follows
WITHHELD = (
    "roles of heads and sizes relative to the stream are withheld: a norm follows the attention's output, and sizes are "
    "measured before it"
)
ROLES = ("reads", "parks", "reacts", "ignores")
PLACES = ("sink", "rest")  # position 0; the mean over all others
# Columns of a table of heads, and their variables.
NUMBERS = {name: name for name in ("effect", "attends", "written", "output")} | {"own output": "output_own"}
NUMBERS |= {"reads": "reads", "reacts": "reacts"}
COLUMNS = ("block", "head", "role", *NUMBERS, "value 0/rest")


def estimates(
    found: Mapping[str, Float[np.ndarray, "prompt ..."]], documents: Sequence[str] | None
) -> dict[str, Interval]:
    """Estimates, as [layer, head], of what was kept of the first prompts, with intervals over documents, else prompts."""
    intervals: dict[str, Interval] = {}
    for name, each in found.items():
        unit = np.arange(len(each)) if documents is None else numbered(documents[: len(each)])
        power, least = 2 if name in SIZES else 1, -np.inf if name.endswith("loss_change") else 0
        whole, low, high = jackknife(lambda x, p=power: (x**p).mean(0) ** (1 / p), each, unit)
        intervals[name] = Interval(whole, np.maximum(low, least), high)  # type: ignore[arg-type] - arrays of them
    return intervals


def assigned(
    found: Mapping[str, Interval],
) -> tuple[Bool[np.ndarray, "role layer head"], Bool[np.ndarray, "layer head"]]:
    """Each head's role, one true of `ROLES`, and whether it is sure; see the module's text."""

    def beyond(name: str, limit: float, sign: int = 1) -> Bool[np.ndarray, "three layer head"]:
        """Whether a size is above (below with -1) a limit by the estimate, surely, and possibly.

        Comparisons with NaN are false: of what is not known nothing holds, nothing surely, and anything possibly.
        """
        value, low, high = (sign * np.asarray(x) for x in (found[name][0], *found[name][1:3][::sign]))
        return np.stack([value > sign * limit, low > sign * limit, ~(high < sign * limit)])

    rules = [beyond("written", LARGE), beyond("attends", ATTENDS) & beyond("output_own", SMALL, -1)]
    if "reacts" in found:
        rules.append(beyond("reacts", REACTS) | beyond("reacts_output", LARGE))
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
    """Each head's role by name [layer, head]; "-" where roles are withheld."""
    if "has_role" not in ds:
        return np.full(ds["attends"].shape, "-")
    return ds["role"].values.astype(str)[ds["has_role"].transpose("role", "layer", "head").values.argmax(0)]


def counts(ds: xr.Dataset) -> dict[str, int]:
    """How many heads have each role; nothing where roles are withheld."""
    return {role: int(ds["has_role"].sel(role=role).sum()) for role in ROLES} if "has_role" in ds else {}


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
        role = roles[at] + "?" * bool("role_sure" in ds and not ds["role_sure"].values[at])
        values = {name: ds[name].values[at] if name in ds else np.nan for name in NUMBERS.values()}
        cells = [number(value, ".3g" if name == "effect" else ".3f") for name, value in values.items()]
        rows.append([*map(str, at), role, *cells, number(ratio[at])])
    return rows
