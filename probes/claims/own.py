"""Statements of this suite's own studies, fixed before they were run (`docs/probes`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import xarray as xr

from ..measures.retrieval.context import MARGIN, SLOPES, pooled, slopes
from ..measures.sink_factorial import ARMS, LOSS, REST, SETS, at_block, beyond, judged
from ..results.curves import ShiftNull
from ..results.statistics import Interval
from .evidence import cells, real
from .ledger import Source
from .rules import Told, above, below, beside_null, every, nothing, told

own = Source("[headwater]", "own", real("sink-factorial"), "sink-factorial", kind="ours")
controlled = own.but(needs=real("controls/sink-factorial", more="--lists 0 --sets all"))
CHOSEN = "at the block that the other half of the documents chose"
AT = f"interaction on the next-token loss {CHOSEN}"


@own("brake-and-bias", rule=f"{AT}, below 0")
def _(ds: xr.Dataset) -> Told:
    """Bias and brake of position 0, taken off together, cost less than the sum of what each costs alone."""
    block, found, _ = judged(ds)[LOSS, next(iter(SETS))]
    return f"{told(found, '+.3g')} nat from block {block} on", below(found, 0)


def less_than_control(ds: xr.Dataset, control: str) -> Told:
    """Whether the interaction at position 0 lies below a control's."""
    if not {next(iter(SETS)), control} <= set(ds["set"].values):
        raise KeyError(control)
    found = beyond(ds, control)
    return f"{told(found, '+.3g')} nat", below(found, 0)


for name, control, claim in (
    ("brake-by-query", "constant gain", "That they do is due to the brake by query: louder heads show less of it."),
    (
        "brake-of-the-sink",
        "key 1",
        "That they do is particular to position 0: key 1, of little weight, shows less of it.",
    ),
):
    rule = f"{AT}, less that of the control '{control}', below 0"
    controlled(name, claim=claim, rule=rule, control=control)(less_than_control)


@own("brake-off-helps-recall", rule="change of log p of other pairs than the first, at the loss's block, above 0")
def _(ds: xr.Dataset) -> Told:
    """With the brake of position 0 off a model recalls more of a list than as it is."""
    block, found = judged(ds)[LOSS, next(iter(SETS))][0], at_block(ds, outcome=REST).sel(arm=ARMS[1]).isel(set=0)
    change = Interval(*found.values)._replace(freedom=ds.sizes["list"] // 2 - 1)
    return f"{told(change, '+.3g')} nat from block {block} on", above(change, 0)


# --------------------------------------------------------------------------------------------- sensitivity in context

FORMS = tuple(f"context{form}/retrieval" for form in ("", "-json", "-nouns", "-announced", "-apart"))
LISTS = "--pairs 24 --keys alike --contexts 16 --mechanism 16 --profile-prompts 0"
context = own.but(needs=real(*FORMS, options=LISTS), where="sensitivity-in-context")


@context.but(needs=cells(context.needs, *FORMS))(
    "sensitivity-in-context",
    rule="partial rank correlation over depth of gain with the norm behind the lists, given log distance and log position, "
    f"mean over models and forms with random effects, above {MARGIN}, and as far from 0 in at most 5 % of the shifts and of "
    f"the exchanges between models in one form; does not hold where the 90 % interval lies within {MARGIN} of 0",
)
def _(of: Mapping[str, xr.Dataset]) -> Told | None:
    """What a model recalls of a list, by depth, follows the norm behind it, logs of distance and position taken out."""
    if (found := pooled(of)) is None:
        return None
    nulls = f"p of shifts {found.shifts:.2g}, of exchanges {found.exchanges:.2g}"
    words = f"{told(found.rho, '+.2f')} over {len(of)} cells, {nulls}"
    margin, chance = math.atanh(MARGIN), max(found.shifts, found.exchanges)
    follows, none = beside_null(above(found.z, margin), ShiftNull(chance, math.nan)), nothing(found.z, margin)
    return words, lambda level: "does not hold" if none(level) == "holds" else follows(level)


def slope_above(by_kind: Mapping[str, xr.Dataset], of: Sequence[str]) -> Told:
    """Whether recall rises with the log norm."""
    found = slopes(list(by_kind.values()))
    return ", ".join(f"{told(found[one], '+.2f')} nat" for one in of), every(above(found[one], 0) for one in of)


# Gain alone was the plan. Where the value is unlikely anyway the norm is larger, so that gain rises without recall.
WITHIN = ("within", "log p, control")
for short, names, claim in (
    ("sensitivity-within", WITHIN, "At one depth, lists behind which the norm is larger there are recalled better."),
    ("sensitivity-shocks", ("shocks",), "Given list and shock, lines whose norm rises more are recalled better."),
):
    rule = f"slope on the log norm, over couples of all forms, above 0: {'; and '.join(SLOPES[name] for name in names)}"
    context(short, claim=claim, rule=rule, of=names)(slope_above)
