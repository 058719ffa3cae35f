"""[Liu+], arXiv 2307.03172, "Lost in the Middle": accuracies of large instructed models, which this suite does not measure.

What its probes can say of an open model is how strongly the answer depends on each position; those statements give that
command. Its other task, recall of key-value pairs, is measured on the language models at hand; those statements are ours.
"""

from __future__ import annotations

from dataclasses import replace

import xarray as xr

from ..measures.mechanism_numbers import auc, follows
from ..measures.recall_numbers import edges
from ..results.dataset import options_of
from .evidence import real, unmeasured
from .ledger import Source
from .rules import Told, above, told

CHANCE = 0.5
LONGCHAT, LLAMA2 = "lmsys/longchat-13b-16k", "meta-llama/Llama-2-7b-hf"
GPT = "GPT-3.5-Turbo (no weights published)"


def profile_of(model: str) -> str:
    """The command that measures how the answer depends on each position."""
    return f"headwater jacobian {model} --readout logits --length 4096 --out runs/lost-in-the-middle"


liu = Source(
    "[Liu+]",
    "liu",
    unmeasured(profile_of(LONGCHAT), GPT),
    rule="decided by accuracy in multi-document question answering, which is not among this suite's measurements; the "
    "command measures how strongly the next token depends on every position instead",
)


@liu(
    "gpt3.5-u",
    "Table 6",
    "GPT-3.5-Turbo answers best when the document with the answer stands first or last of 20.",
    published="75.8 % first, 53.8 % tenth, 63.2 % last",
)
@liu(
    "gpt3.5-below-closed-book",
    "2.3",
    "With the answer in the middle GPT-3.5-Turbo does worse than without any documents.",
    published="53.8 % against 56.1 %",
)
@liu(
    "longchat-13b",
    "Table 6",
    "LongChat-13B (16K) answers best when the document with the answer stands first of 20.",
    published="68.6 % first, 55.3 % tenth, 55.0 % last",
    model=LONGCHAT,
)
@liu(
    "llama2-7b-recency-only",
    "Appendix E, Fig. 16",
    "Llama-2 7B has recency alone; the U-shape needs 13 billion parameters.",
    needs=unmeasured(profile_of(LLAMA2), LLAMA2),
)
def _(ds: xr.Dataset) -> None:
    """No result holds such an accuracy."""


# ------------------------------------------------------------------------------------------------- key-value recall, ours


def end_recalled(ds: xr.Dataset, variable: str, end: int) -> Told:
    """Whether pairs at one end are recalled better than those in the middle half."""
    above_middle, asked = edges(ds, variable)[end], options_of(ds)
    words = f"{('first', 'last')[end]} {told(above_middle, '+.2f')} ({asked['pairs']} pairs, keys {asked['keys']})"
    return words, above(above_middle, 0)


recall = replace(liu, kind="ours", needs=real("retrieval", "log_p", "exact"))
for short, variable, word in (("exact", "exact", "exact answers"), ("probability", "log_p", "log probability")):
    for number, (end, pairs, share) in enumerate(
        (("primacy", "first pairs", "first 5 % of the pairs"), ("recency", "last pair", "last pair"))
    ):
        recall(
            f"recall-{end}-{short}",
            "3",
            f"Small language models recall the {pairs} of a list better than those in the middle, by {word}.",
            rule=f"{share} above the median of the middle half, over couples of lists",
            variable=variable,
            end=number,
        )(end_recalled)

# ------------------------------------------------------------------------------------ recall and the profile of sensitivity

traced = replace(
    recall,
    name="[Chowdhury]",
    needs=real(
        "mechanism/retrieval", "exact", "gain", "sensitivity", more="--mechanism 24 --initialization smollm2-135m"
    ),
)


def recall_follows(ds: xr.Dataset, profile: str) -> Told:
    """Whether gain by depth is ranked as a profile is."""
    if profile != "log_distance" and profile not in ds:
        return "-", None
    rho = follows(ds, profile)
    return told(rho, "+.2f"), above(rho, 0)


for short, profile, word in (
    ("profile", "profile", "the model's own profile of sensitivity behind ordinary text"),
    ("birth", "profile_init", "the profile at initialization"),
    ("distance", "log_distance", "log distance alone"),
):
    traced(
        f"recall-follows-{short}",
        "discussion",
        f"What language models recall, by depth, follows {word}.",
        rule="rank correlation of the mean gain with the profile over depth, interval over couples of lists, above 0",
        profile=profile,
    )(recall_follows)


@traced(
    "recall-predicted",
    "discussion",
    "How strongly an answer depends on the pair asked for tells, at one depth, whether it is recalled.",
    rule="AUC of the pair's sensitivity for exact answers, interval over couples of lists, above 0.5",
)
def _(ds: xr.Dataset) -> Told:
    area = auc(ds)
    return told(area, ".2f"), above(area, CHANCE)
