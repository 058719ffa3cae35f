"""[Xiao], arXiv 2309.17453, "Efficient Streaming Language Models with Attention Sinks" (StreamingLLM)."""

from collections.abc import Callable
from functools import partial

import xarray as xr

from ..results.statistics import Interval
from .evidence import Results, real
from .ledger import Source
from .readings import estimated, over_documents
from .rules import Test, Told, above, below, every, told

NOT = "not counted, as caches are smaller or texts shorter than the source's: "
FAILS, TENTH = 1.0, 0.1  # nat; of the loss that no first keys cost: ours
FOUR = {"first_keys": 4, "numbering": "cache"}
CACHE, TEXT = 1020, 8192  # last keys beside four first ones, tokens: the source's texts are many times its cache
COUNTS = f"with {CACHE:,} last keys or more, in texts of 8 caches or more"
EVERY = f"{COUNTS}, in every model, at positions whose cache has lost keys"
PERPLEXITY = "perplexity 5,158, and 5.40 with four initial tokens (Llama-2-13B)"
OPTIONS = f"--prompts 8 --length {TEXT} --text long --reacts off --evict 0,1,4 --keep {CACHE}"
EVICTED = partial(real, "t8192/evict/sinks", "evict/sinks", options=OPTIONS)
xiao = Source("[Xiao]", "xiao", EVICTED())
FAILING = f"without first keys the loss rises by more than {FAILS:g} nat"
CACHED = "the loss with four first keys, positions by the cache less positions by the text, is below 0"
FEWER = f"the loss with four first keys less that with one is below 0 {EVERY.replace('model', 'model without a BOS')}"
LITTLE = f"what four first keys cost in loss, less {TENTH:g} of what none cost (the number measured), is below 0"


def by_last(kinds: Results, tell: Callable[[xr.Dataset], Interval], test: Callable[[Interval], Test]) -> Told:
    """What is told of each number of last keys, where caches have lost keys; the test has to hold for all that count."""
    words, others, tests = list[str](), list[str](), list[Test]()
    for ds in kinds.values():
        for last in map(int, ds["last_keys"].values):
            cost, length = tell(ds.sel(cache="cut", last_keys=last)), ds.sizes["position"]
            said = f"{told(cost, '.3f')} nat with {last:,} of {length:,}"
            if last >= CACHE and length >= TEXT // CACHE * last:
                words.append(said)
                tests.append(test(cost))
            else:
                others.append(said)
    return " ".join([", ".join(words), f"({NOT}{', '.join(others)})" * bool(others)]).strip(), every(tests)


def four_cost_less(kinds: Results, first_keys: int, numbering: str = "cache", share: float = 1.0) -> Told:
    """Whether four first keys cost less than (a share of) what another cache costs, prompt by prompt."""

    def change(at: xr.Dataset) -> Interval:
        costs = at["evict_loss_change_by_prompt"]
        return over_documents(at, costs.sel(FOUR) - share * costs.sel(first_keys=first_keys, numbering=numbering))

    return by_last(kinds, change, lambda cost: below(cost, 0))


@xiao("window-attention-fails", "abstract, Fig. 1", rule=f"{FAILING} {EVERY}", published=PERPLEXITY)
def _(kinds: Results) -> Told:
    """Window attention, whose cache holds the last keys alone, fails once the text is longer than the cache."""

    def cost(at: xr.Dataset) -> Interval:
        return estimated(at, "evict_loss_change", first_keys=0, numbering="text")

    return by_last(kinds, cost, lambda cost: above(cost, FAILS))


@xiao("first-keys-recover", "abstract, Table 1", rule=f"{LITTLE} {EVERY}", published=PERPLEXITY)
def _(kinds: Results) -> Told:
    """Keeping four initial tokens largely recovers the performance that window attention loses."""
    return four_cost_less(kinds, 0, share=TENTH)


@xiao("one-is-not-enough", "Table 2", rule=FEWER, needs=EVICTED(first="none"))
def _(kinds: Results) -> Told:
    """One initial token does not suffice in models that were not trained with a single sink token; four do better."""
    return four_cost_less(kinds, 1)


@xiao("positions-within-the-cache", "3.1, 3.2", rule=f"{CACHED} {EVERY}")
def _(kinds: Results) -> Told:
    """Positions have to be counted within the cache and not by the text."""
    return four_cost_less(kinds, 4, "text")
