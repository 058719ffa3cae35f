"""[Liu+], arXiv 2307.03172, "Lost in the Middle": accuracies of large instructed models, which this suite does not measure.

What its probes can say of an open model is how strongly the answer depends on each position; the rows give that command.
"""

from __future__ import annotations

from ..results.collected import Collected
from .claim import Judged
from .rules import Source, Stated

STATED: Stated = []
of_source = Source("liu", "[Liu+]", STATED)

RULE = (
    "decided by accuracy in multi-document question answering, which is not among this suite's measurements; "
    "the command measures how strongly the next token depends on every position instead"
)
NEAREST = "headwater jacobian {} --readout logits --length 4096 --out runs/lost-in-the-middle"


def _not_measured(collected: Collected) -> Judged | None:
    """No result that this suite makes holds such an accuracy."""
    return None


for _id, _place, _claim, _published, _model, _open in (
    (
        "gpt3.5-u",
        "Table 6",
        "GPT-3.5-Turbo answers best when the document with the answer stands first or last of 20.",
        "75.8 % first, 53.8 % tenth, 63.2 % last",
        "GPT-3.5-Turbo (no weights published)",
        "lmsys/longchat-13b-16k",
    ),
    (
        "gpt3.5-below-closed-book",
        "2.3",
        "With the answer in the middle GPT-3.5-Turbo does worse than without any documents.",
        "53.8 % against 56.1 %",
        "GPT-3.5-Turbo (no weights published)",
        "lmsys/longchat-13b-16k",
    ),
    (
        "longchat-13b",
        "Table 6",
        "LongChat-13B (16K) answers best when the document with the answer stands first of 20.",
        "68.6 % first, 55.3 % tenth, 55.0 % last",
        "lmsys/longchat-13b-16k",
        "lmsys/longchat-13b-16k",
    ),
    (
        "llama2-7b-recency-only",
        "Appendix E, Fig. 16",
        "Llama-2 7B has recency alone; the U-shape needs 13 billion parameters.",
        "-",
        "meta-llama/Llama-2-7b-hf",
        "meta-llama/Llama-2-7b-hf",
    ),
):
    of_source(
        _id,
        _place,
        _claim,
        RULE,
        "pretrained",
        NEAREST.format(_open),
        published=_published,
        model=_model,
    )(_not_measured)
