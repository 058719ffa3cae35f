"""Statements of this suite's own studies, fixed before they were run (`docs/probes`)."""

from __future__ import annotations

import xarray as xr

from ..measures.sink_factorial import ARMS, LOSS, SETS, beyond, judged, recalled
from .evidence import real
from .ledger import Source
from .rules import Told, above, below, told

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
    ("brake-by-query", "constant gain", "That they do is due to the brake by query, not to louder heads."),
    ("brake-of-the-sink", "key 1", "That they do is particular to position 0: key 1 shows less of it."),
):
    rule = f"{AT}, less that of the control '{control}', below 0"
    controlled(name, claim=claim, rule=rule, control=control)(less_than_control)


@own("brake-off-helps-recall", rule="log p of other pairs than the first, block chosen on other couples: rises")
def _(ds: xr.Dataset) -> Told:
    """With the brake of position 0 off a model recalls more of a list than as it is."""
    block, found = recalled(ds, ARMS[1])
    return f"{told(found, '+.3g')} nat from block {block} on", above(found, 0)
