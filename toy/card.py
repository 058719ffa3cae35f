"""The model card of a pretrained folder: what `training.json` says, as Markdown for readers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from probes.errors import InputError
from probes.run.files import atomic, write_json

SHAPE_TERMS = {
    "num_hidden_layers": "blocks",
    "hidden_size": "wide",
    "num_attention_heads": "query heads",
    "num_key_value_heads": "key-value heads",
    "vocab_size": "tokens in the vocabulary",
}


def write_card(
    folder: str | Path, *, data: str | None = None, difference: str | None = None, command: str | None = None
) -> str:
    """Write `README.md` from the folder's `training.json` and return it.

    Args:
        folder: a folder that `pretrain` finished.
        data: what the training text is, such as `stdlib_name()` gives.
        difference: the one line that tells this model from its siblings.
        command: the call that made it.

    What is given is added to `training.json` (as `data_description`, `difference`, `command`), so that a later call
    needs none of it.

    Raises:
        InputError: there is no `training.json`, or it is not known from it or from `data` what the text was.
    """
    folder = Path(folder)
    try:
        training = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"'{folder}/training.json' is not readable ({error.strerror}); give a finished model"
        ) from None
    given = {"data_description": data, "difference": difference, "command": command}
    added = {key: value for key, value in given.items() if value is not None}
    if added:
        training |= added
        write_json(folder / "training.json", training)
    if "data_description" not in training:
        raise InputError(f"'{folder}/training.json' has no data_description; say what the training text was (data=...)")
    card = _card(folder.resolve().name, training)
    with atomic(folder / "README.md") as temporary:
        temporary.write_text(card, encoding="utf-8")
    return card


def largest_position0(weights: list[list[float]]) -> tuple[float, int, int]:
    """(weight, block, head) of the head that attends most to position 0."""
    return max((weight, layer, head) for layer, row in enumerate(weights) for head, weight in enumerate(row))


def uniform_position0(length: int, window: int | None) -> float:
    """What that mean would be if attention were uniform: query t sees t + 1 positions."""
    queries = range(1, min(window or length, length))
    return sum(1 / (query + 1) for query in queries) / len(queries)


def _card(name: str, training: dict[str, Any]) -> str:
    set_apart = f" What sets it apart: {training['difference']}." if training.get("difference") else ""
    table = "\n".join(["| | |", "|---|---|", *(f"| {label} | {_cell(value)} |" for label, value in _rows(training))])
    parts = [
        f"# {name}",
        "A small language model pretrained from fresh weights with `headwater pretrain`, to be measured, not used."
        + set_apart,
        table,
        "Both losses and the attention were measured with the weights in this folder, rounded to bfloat16, on held-out "
        "text cut into windows side by side. `training.json` holds the configuration, the options and these numbers "
        "for every head, `log.jsonl` the training loss. A folder `stepN` holds the weights before step N's update; "
        "`step0` is the true start, since weights were rounded to bfloat16 before the first step.",
        *(["Made by\n\n" + _fenced(training["command"])] if "command" in training else []),
        "## A sample",
        f"Drawn at temperature 0.7, seed {training['options']['seed']}, from the start token:",
        _fenced(training["sample"]),
        "## Licence of the training text",
        _licence(training["data_description"]),
    ]
    return "\n\n".join(parts) + "\n"


def _rows(training: dict[str, Any]) -> list[tuple[str, str]]:
    """(label, value) of the card's table."""
    config, options = training["config"], training["options"]
    weight, block, head = largest_position0(training["position0_weight"])
    uniform = uniform_position0(options["length"], config.get("sliding_window"))
    passes = training["tokens_seen"] / training["training_tokens"]
    shape = ", ".join(f"{config[key]} {term}" for key, term in SHAPE_TERMS.items() if key in config)
    rows = [
        ("Architecture", f"`{config['model_type']}`: {shape}; {training['parameters']:,} parameters"),
        ("Position 0", "BOS first in every window" if options["bos"] else "no BOS: position 0 holds ordinary text"),
        (
            "Training text",
            f"{training['data_description']}: {training['training_documents']:,} documents, "
            f"{training['training_tokens']:,} tokens",
        ),
        (
            "Training",
            f"{options['steps']:,} steps of {options['batch']} windows of {options['length']} tokens, "
            f"{training['tokens_seen']:,} tokens seen, {passes:.1f} passes",
        ),
        (
            "Optimizer",
            f"AdamW (0.9, 0.95), peak learning rate {options['peak_lr']:g} after {options['warmup']} steps of warm-up, "
            f"cosine decay to a tenth, weight decay {options['weight_decay']:g} on matrices, "
            f"gradients clipped at {options['clip']:g}, compute in {options['compute']}, seed {options['seed']}",
        ),
        (
            "Tokenizer",
            "byte-level BPE trained on the training text. Read it with `PreTrainedTokenizerFast`: for some model types "
            "`AutoTokenizer` splits text by the family's own rules instead of the file's",
        ),
        ("Held-out text", f"{training['heldout_documents']:,} documents, {training['heldout_tokens']:,} tokens"),
        (
            "Validation loss",
            f"{training['validation_loss']:.4f} nats per token; a bigram model: "
            f"{training['bigram_validation_loss']:.4f} nats per token",
        ),
        (
            "Attention on position 0",
            f"largest mean weight {weight:.4f}, in block {block}, head {head} (both counted from 0); "
            f"uniform attention would give {uniform:.4f}",
        ),
    ]
    if "versions" in training:
        versions = ", ".join(f"{package} {version}" for package, version in training["versions"].items())
        rows.append(("Made with", f"{versions}, on {training['device']}"))
    return rows


def _licence(description: str) -> str:
    if re.match(r"CPython \S+ standard library$", description):
        return (
            f"The text is the source of the {description}, copyright Python Software Foundation, under the "
            "[PSF License Agreement](https://docs.python.org/3/license.html)."
        )
    return f"The text ({description}) keeps its own licence; look it up before passing this model on."


def _cell(value: str) -> str:
    return " ".join(value.split()).replace("|", "\\|")


def _fenced(text: str) -> str:
    """A code block whose fence is longer than any run of backticks in it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"
