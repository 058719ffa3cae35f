"""[Liu+], arXiv 2307.03172, "Lost in the Middle": accuracies of large instructed models, which this suite does not measure.

What its probes can say of an open model is how strongly the answer depends on each position; those statements give that
command. Its other task, recall of key-value pairs, is measured on the language models at hand; those statements are ours.
"""

from __future__ import annotations

import xarray as xr

from ..measures.retrieval.numbers import edges, follows
from ..results.dataset import options_of
from .evidence import real, unmeasured
from .ledger import Source
from .rules import Told, above, beside_null, every, told

UNMEASURED = "accuracy over documents, not measured here; the command: how the next token depends on positions"
PROFILE = "headwater jacobian {} --readout logits --length 4096 --out runs/lost-in-the-middle"
GPT, LONGCHAT, LLAMA2 = "GPT-3.5-Turbo (no weights published)", "lmsys/longchat-13b-16k", "meta-llama/Llama-2-7b-hf"

liu = Source("[Liu+]", "liu", unmeasured(PROFILE.format(LONGCHAT), GPT))
recall = liu.but(where="3", kind="ours", needs=real("retrieval"))
tracing = real("mechanism/retrieval", more="--mechanism 24 --initialization smollm2-135m")
traced = recall.but(name="[Chowdhury]", where="discussion", needs=tracing)


OPEN, SMALL = unmeasured(PROFILE.format(LONGCHAT), LONGCHAT), unmeasured(PROFILE.format(LLAMA2), LLAMA2)
ACCURACIES = "first, tenth, last: 75.8, 53.8, 63.2 % (GPT-3.5-Turbo); 68.6, 55.3, 55.0 % (LongChat-13B)"
END = "the document with the answer stands first or last of 20"
for name, where, published, needs, claim in (
    ("u", "Table 6", ACCURACIES, OPEN, f"GPT-3.5-Turbo and LongChat-13B (16K) answer best when {END}."),
    (
        *("gpt3.5-below-closed-book", "2.3", "53.8 % against 56.1 %", liu.needs),
        "With the answer in the middle GPT-3.5-Turbo does worse than without any documents.",
    ),
    (
        *("llama2-7b-recency-only", "Appendix E, Fig. 16", "", SMALL),
        "Llama-2 7B has recency alone; the U-shape needs 13 billion parameters.",
    ),
):
    liu(name, where, claim, rule=UNMEASURED, published=published, needs=needs)(lambda ds: None)


# -------------------------------------------------------------------------------- key-value recall, ours; and the profile


def end_recalled(ds: xr.Dataset, end: int) -> Told:
    """Whether pairs at one end are recalled better than those in the middle half."""
    better = {name: edges(ds, variable)[end] for name, variable in (("exact", "exact"), ("log p", "log_p"))}
    words, asked = ", ".join(f"{name} {told(by, '+.2f')}" for name, by in better.items()), options_of(ds)
    return f"{words} ({asked['pairs']} pairs, keys {asked['keys']})", every(above(by, 0) for by in better.values())


for end, (name, pairs) in enumerate((("primacy", "first pair"), ("recency", "last pair"))):
    claim = f"Small language models recall the {pairs} of a list better than those in the middle."
    rule = (
        f"{pairs} above the median of the middle half, by exact answers and by log probability, over couples of lists"
    )
    recall(f"recall-{name}", claim=claim, rule=rule, end=end)(end_recalled)


def recall_follows(ds: xr.Dataset, profile: str) -> Told:
    """Whether gain by depth is ranked as a profile is, whose part in distance and position is taken out."""
    rho, null = follows(ds, profile)
    words = f"{told(rho, '+.2f')}, deviation under shifts {null.spread:.2f}, p {null.p:.3f}"
    return words, beside_null(above(rho, 0), null)


for short, profile, word in (
    ("profile", "profile", "the model's own profile of sensitivity behind ordinary text"),
    ("birth", "profile_init", "the profile at initialization"),
    ("distance", "log_distance", "log distance alone"),
):
    claim = f"What language models recall, by depth, follows {word}."
    rule = (
        f"{'' if short == 'distance' else 'partial '}rank correlation over depth of the mean gain with the profile"
        f"{'' if short == 'distance' else ', given log distance and log position'}, interval over couples of lists and over "
        "what the profile is of, above 0, and as far from it in at most 5 % of the shifts of one curve against the other"
    )
    traced(f"recall-follows-{short}", claim=claim, rule=rule, profile=profile)(recall_follows)
