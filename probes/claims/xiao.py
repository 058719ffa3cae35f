"""[Xiao], arXiv 2309.17453, "Efficient Streaming Language Models with Attention Sinks" (StreamingLLM)."""

from __future__ import annotations

from collections.abc import Callable

import xarray as xr

from ..results.statistics import Interval
from .evidence import real
from .ledger import Source
from .readings import over_documents
from .rules import Test, Told, above, below, estimated, every, told

COST = "evict_loss_change"
FAILS = 1.0  # nat; ours
TENTH = 0.1  # of the loss that no first keys cost; ours
FOUR = 4  # first keys
EVERY = "with every number of last keys measured, in every model, at positions whose cache has lost keys"

xiao = Source(
    "[Xiao]",
    "xiao",
    real(
        "evict/sinks",
        f"{COST}_by_prompt",
        options="--prompts 12 --length 1024 --reacts off --pictures 0 --evict 0,1,4 --keep 64,128,256",
    ),
)


def by_last(ds: xr.Dataset, tell: Callable[[xr.Dataset], Interval], test: Callable[[Interval], Test]) -> Told:
    """What is told of each number of last keys, where caches have lost keys; the test has to hold for all."""
    cut = ds.sel(cache="cut")
    costs = {int(last): tell(cut.sel(last_keys=last)) for last in ds["last_keys"].values}
    return ", ".join(f"{told(one, '.3f')} nat at {last}" for last, one in costs.items()), every(
        map(test, costs.values())
    )


def has(ds: xr.Dataset, *first: int) -> bool:
    """Whether these numbers of first keys were measured."""
    return {*first} <= {*ds["first_keys"].values.tolist()}


@xiao(
    "window-attention-fails",
    "abstract, Fig. 1",
    "Window attention, whose cache holds the last keys alone, fails once the text is longer than the cache.",
    rule=f"without first keys the next-token loss rises by more than {FAILS:g} nat {EVERY}",
    published="perplexity 5,158, and 5.40 with four initial tokens (Llama-2-13B)",
)
def _(ds: xr.Dataset) -> Told | None:
    if not has(ds, 0):
        return None
    return by_last(ds, lambda at: estimated(at, COST, first_keys=0, numbering="text"), lambda cost: above(cost, FAILS))


@xiao(
    "first-keys-recover",
    "abstract, Table 1",
    "Keeping four initial tokens largely recovers the performance that window attention loses.",
    rule=f"what {FOUR} first keys cost in loss, less a tenth of what none cost (the number measured), is below 0 {EVERY}",
    published="perplexity 5.40 instead of 5,158 (Llama-2-13B)",
    other={"first_keys": 0, "numbering": "cache"},
    share=TENTH,
)
@xiao(
    "one-is-not-enough",
    "Table 2",
    "One initial token does not suffice in models that were not trained with a single sink token; four do better.",
    rule=f"the loss with {FOUR} first keys less that with 1 is below 0 {EVERY}",
    other={"first_keys": 1, "numbering": "cache"},
)
@xiao(
    "positions-within-the-cache",
    "3.1, 3.2",
    "Positions have to be counted within the cache and not by the text.",
    rule=f"the loss with {FOUR} first keys and positions by the cache less that with positions by the text is below 0 "
    + EVERY,
    other={"first_keys": FOUR, "numbering": "text"},
)
def _(ds: xr.Dataset, other: dict[str, int | str], share: float = 1.0) -> Told | None:
    """Four first keys cost less than (a share of) what another cache costs, prompt by prompt."""
    if not has(ds, FOUR, int(other["first_keys"])):
        return None

    def change(at: xr.Dataset) -> Interval:
        costs = at[f"{COST}_by_prompt"]
        return over_documents(at, costs.sel(first_keys=FOUR, numbering="cache") - share * costs.sel(other))

    return by_last(ds, change, lambda found: below(found, 0))
