"""The model card of a pretrained folder: what `training.json` says, as Markdown for readers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from probes.run.files import atomic, table_lines

SHAPE_TERMS = {
    "num_hidden_layers": "blocks",
    "hidden_size": "wide",
    "num_attention_heads": "query heads",
    "num_key_value_heads": "key-value heads",
    "vocab_size": "tokens in the vocabulary",
}
PYTHON_LICENCE = "[PSF License Agreement](https://docs.python.org/3/license.html)"
CARD = """# {name}

A small language model pretrained from fresh weights with `headwater pretrain`, to be measured, not used.{difference}

{table}

Losses and attention were measured with the weights in this folder, rounded to bfloat16, on held-out text cut into windows \
side by side. `training.json` has configuration, options and these numbers for every head, `log.jsonl` the training loss. A \
folder `stepN` holds the weights before step N's update; `step0` is the true start, since weights were rounded to bfloat16 \
before the first step. Read the tokenizer with `PreTrainedTokenizerFast`: for some model types `AutoTokenizer` splits text \
by the family's own rules instead of the file's.

Made by

{command}

## A sample

Drawn at temperature 0.7, seed {seed}, from the start token:

{sample}

## Licence of the training text

{licence}
"""


def write_card(folder: Path, training: dict[str, Any]) -> None:
    """Write `README.md` of a model; `training` is what its `training.json` holds."""
    text = training["data_description"]
    licence = f"The text ({text}) keeps its own licence; look it up before passing this model on."
    if re.match(r"CPython \S+ standard library$", text):
        licence = (
            f"The text is the source of the {text}, copyright Python Software Foundation, under the {PYTHON_LICENCE}."
        )
    card = CARD.format(
        name=folder.resolve().name,
        difference=f" What sets it apart: {training['difference']}." if training["difference"] else "",
        table="\n".join(table_lines(("", ""), list(_rows(training).items()))),
        command=_fenced(training["command"] or "a call from Python"),
        seed=training["options"]["seed"],
        sample=_fenced(training["sample"]),
        licence=licence,
    )
    with atomic(folder / "README.md") as temporary:
        temporary.write_text(card, encoding="utf-8")


def uniform_position0(length: int, window: int | None) -> float:
    """The mean weight on position 0 if attention were uniform: query t sees t + 1 positions."""
    queries = range(1, min(window or length, length))
    return sum(1 / (query + 1) for query in queries) / len(queries)


def _rows(training: dict[str, Any]) -> dict[str, str]:
    """What the card's table says, by label."""
    config, options = training["config"], training["options"]
    weights = training["position0_weight"]
    weight, block, head = max((w, layer, n) for layer, row in enumerate(weights) for n, w in enumerate(row))
    shape = ", ".join(f"{config[key]} {term}" for key, term in SHAPE_TERMS.items() if key in config)
    seen, text = training["tokens_seen"], training["training_tokens"]
    uniform = uniform_position0(options["length"], config.get("sliding_window"))
    return {
        "Architecture": f"`{config['model_type']}`: {shape}; {training['parameters']:,} parameters",
        "Position 0": "BOS first in every window" if options["bos"] else "no BOS: position 0 holds ordinary text",
        "Training text": f"{training['data_description']}: {training['training_documents']:,} documents, {text:,} tokens; "
        f"held out {training['heldout_documents']:,} documents, {training['heldout_tokens']:,} tokens",
        "Training": f"{options['steps']:,} steps of {options['batch']} windows of {options['length']} tokens, {seen:,} "
        f"tokens seen, {seen / text:.1f} passes; AdamW (0.9, 0.95), peak learning rate {options['peak_lr']:g} after "
        f"{options['warmup']} steps of warm-up, cosine decay to a tenth, weight decay {options['weight_decay']:g} on "
        f"matrices, gradients clipped at {options['clip']:g}, compute in {options['compute']}, seed {options['seed']}",
        "Tokenizer": "byte-level BPE trained on the training text",
        "Validation loss": f"{training['validation_loss']:.4f} nats per token; a bigram model: "
        f"{training['bigram_validation_loss']:.4f}",
        "Attention on position 0": f"largest mean weight {weight:.4f}, in block {block}, head {head} (counted from 0); "
        f"uniform attention would give {uniform:.4f}",
        "Made with": f"{', '.join(map(' '.join, training['versions'].items()))}, on {training['device']}",
    }


def _fenced(text: str) -> str:
    """A code block whose fence is longer than any run of backticks in it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"
