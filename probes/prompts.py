"""Token batches for probing: text from a file, a `datasets` name or the bundled held-out text, cut at random offsets.

Documents are joined in a seeded random order, with the tokenizer's end-of-text id between them where it has one and
nothing otherwise. Windows begin at independent uniform offsets (without replacement), so that what stands at a position
says nothing about the position. What stands at position 0 is the first-token policy: Qwen has no BOS, Llama was trained
with one, and sinks depend on it; the policy is therefore explicit and recorded.

Text is tokenized only until there is `MARGIN` times as much as the prompts hold, and its ids wait on disk: many prompts take
no more memory than themselves. The seed alone decides which documents
are read and where the windows begin: the same under every policy, so that two policies can be compared on one text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO, Any, Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from .errors import InputError
from .models.view import View
from .text import HELDOUT, Document, read_documents, stream_dataset

FirstToken = Literal["auto", "bos", "none"]

MARGIN = 8  # tokens read per token used: windows rarely overlap, and a long text is not tokenized whole
SKIP = 256  # a stream cannot be shuffled; skipping up to this many documents lets the seed choose where reading begins
CHARACTERS_PER_TOKEN = 16  # a generous bound on ordinary text, to cut what is read of one very long document
AT_ONCE = 1 << 20  # characters tokenized together; ids take some thirty times their memory until they are written down
IN_MEMORY = 1 << 24  # bytes of ids kept in memory; more go to a temporary file
ID = np.dtype("<i4")
LONGEST_WORD = 100  # characters within which that passage looks for the beginning of a word


def prompts(
    model: View,
    *,
    n: int = 16,
    length: int = 256,
    text: str | Path | None = None,
    dataset: str | None = None,
    split: str = "train",
    column: str = "text",
    first: FirstToken | int = "auto",
    seed: int = 0,
) -> Int[Tensor, "prompt position"]:
    """Cut `n` windows of `length` tokens out of a text; int64 on the CPU.

    Args:
        model: whose tokenizer, BOS, vocabulary and longest input decide.
        n: prompts.
        length: positions per prompt, the first token included.
        text: a text file, a `.jsonl` file or a folder; not together with `dataset`. Neither: the bundled held-out text.
        dataset: a `datasets` name, streamed; `split` and `column` say which part of it.
        first: what stands at position 0. "bos": the model's BOS, then `length - 1` tokens of text. "none": text. An id:
            that id, then text. "auto": "bos" where the model has one, else "none".
        seed: decides documents and offsets; the windows' text begins at the same offsets under every policy.

    Raises:
        InputError: a value out of range, a model without a tokenizer or without the BOS asked for, a text that is
            unreadable or too short, or a tokenizer with ids the model has no embedding for.
    """
    if n < 1:
        raise InputError(f"n={n} prompts is too few; ask for at least 1")
    if length < 2:
        raise InputError(f"length={length} is too short; ask for at least 2 positions")
    if model.spec.max_length is not None and length > model.spec.max_length:
        raise InputError(
            f"length={length} is more than the {model.spec.max_length} positions of {model.identity.name}; "
            f"ask for at most {model.spec.max_length}"
        )
    if seed < 0:
        raise InputError(f"seed={seed} is negative; give 0 or more")
    if text is not None and dataset is not None:
        raise InputError(f"both text '{text}' and dataset '{dataset}' are given; give one of them")
    if model.tokenizer is None:
        raise InputError(
            f"{model.identity.name} has no tokenizer; pass token ids [prompt, position] directly, "
            "or load the model with one (probes.load(model, tokenizer=...))"
        )
    first_id = _first_id(model, first)

    random = np.random.default_rng(seed)
    budget = MARGIN * n * length  # not length - 1 under "bos": the offsets are the same under every policy
    if dataset is not None:
        documents = _skip_some(stream_dataset(dataset, split=split, column=column), random)
    else:
        found = read_documents(HELDOUT if text is None else text)
        documents = (found[i] for i in random.permutation(len(found)))
    source = _source(text=text, dataset=dataset, split=split, column=column)
    with SpooledTemporaryFile(max_size=IN_MEMORY) as file, closing(documents):
        tokens, highest = _tokenize(model, documents, file, budget=budget, random=random)
        offsets = tokens - length + 1
        if offsets < n:
            raise InputError(
                f"{source} gives {tokens} tokens; {n} windows of {length} need at least {length + n - 1}: "
                "give more text, or ask for fewer or shorter prompts"
            )
        if highest >= model.spec.vocabulary:
            raise InputError(
                f"the tokenizer gives id {highest}, but {model.identity.name} has {model.spec.vocabulary} embeddings; "
                "load the tokenizer that belongs to the model"
            )
        windows = torch.empty(n, length, dtype=torch.int64)
        for window, start in zip(windows, random.choice(offsets, size=n, replace=False), strict=True):
            file.seek(int(start) * ID.itemsize)
            window[:] = torch.from_numpy(np.frombuffer(file.read(length * ID.itemsize), dtype=ID).astype(np.int64))
    if first_id is None:
        return windows
    return torch.cat([torch.full((n, 1), first_id), windows[:, :-1]], dim=1)


def describe(
    model: View,
    *,
    text: str | Path | None = None,
    dataset: str | None = None,
    split: str = "train",
    column: str = "text",
    first: FirstToken | int = "auto",
    seed: int = 0,
) -> dict[str, str | int]:
    """What the same options of `prompts` mean for this model, for a result's attributes.

    `text_source` names the text, `first_policy` is "bos", "none" or "id" ("auto" resolved), `first_id` the id at
    position 0 (absent under "none"), `prompts_seed` the seed.

    Raises:
        InputError: the first-token policy cannot be followed on this model.
    """
    first_id = _first_id(model, first)
    described: dict[str, str | int] = {
        "text_source": _source(text=text, dataset=dataset, split=split, column=column),
        "first_policy": "none" if first_id is None else "id" if isinstance(first, int) else "bos",
        "prompts_seed": seed,
    }
    if first_id is not None:
        described["first_id"] = first_id
    return described


def parse_first(value: str) -> FirstToken | int:
    """Read a first-token policy from the command line: "auto", "bos", "none", or a token id in digits.

    Raises:
        InputError: it is none of these.
    """
    if value == "auto" or value == "bos" or value == "none":
        return value
    try:
        return int(value)
    except ValueError:
        raise InputError(f"first token '{value}' is unknown; give auto, bos, none or a token id") from None


def check_tokens(model: View, tokens: object) -> None:
    """Check that `tokens` is an int64 tensor [prompt, position] that the model can read.

    Raises:
        InputError: another type, dtype or number of dimensions; no prompt; fewer than 2 positions, or more than the
            model was made for; an id outside the vocabulary.
    """
    if not isinstance(tokens, Tensor):
        raise InputError(f"tokens are a {type(tokens).__name__}; give a torch tensor of int64 [prompt, position]")
    if tokens.dtype != torch.int64:
        raise InputError(f"tokens have dtype {str(tokens.dtype).removeprefix('torch.')}; convert them with .long()")
    shape = list(tokens.shape)
    if tokens.ndim != 2:
        raise InputError(f"tokens have shape {shape}; give two dimensions, [prompt, position]")
    if shape[0] < 1 or shape[1] < 2:
        raise InputError(f"tokens have shape {shape}; give at least 1 prompt of at least 2 positions")
    if model.spec.max_length is not None and shape[1] > model.spec.max_length:
        raise InputError(
            f"tokens have {shape[1]} positions, {model.identity.name} was made for {model.spec.max_length}; "
            "give shorter prompts"
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= model.spec.vocabulary:
        raise InputError(
            f"token id {low if low < 0 else high} is outside the vocabulary of {model.identity.name}; "
            f"ids run from 0 to {model.spec.vocabulary - 1}"
        )


def tokens_hash(tokens: Int[Tensor, "prompt position"]) -> str:
    """SHA-256 (hex) over the shape and the ids as little-endian int64: the same on every device and machine."""
    values = tokens.detach().cpu().numpy().astype("<i8")
    return hashlib.sha256(json.dumps(list(values.shape)).encode() + values.tobytes()).hexdigest()


def _first_id(model: View, first: FirstToken | int) -> int | None:
    """The id at position 0, or None for text. Ids are compared with None, never by truth: a BOS may have id 0."""
    if isinstance(first, bool):
        raise InputError(f"first={first} is no token id; give auto, bos, none or a token id")
    if isinstance(first, int):
        if not 0 <= first < model.spec.vocabulary:
            raise InputError(
                f"first token id {first} is outside the vocabulary of {model.identity.name}; "
                f"ids run from 0 to {model.spec.vocabulary - 1}"
            )
        return first
    if first == "none":
        return None
    if first == "auto":
        return model.bos
    if first == "bos":
        if model.bos is None:
            raise InputError(f"first=bos, but {model.identity.name} has no BOS token; use --first none or a token id")
        return model.bos
    raise InputError(f"first token '{first}' is unknown; give auto, bos, none or a token id")


def _source(*, text: str | Path | None, dataset: str | None, split: str, column: str) -> str:
    if dataset is not None:
        return f"dataset '{dataset}' (split {split}, column {column})"
    return "bundled held-out text" if text is None else f"text '{text}'"


def _skip_some(documents: Iterator[Document], random: np.random.Generator) -> Generator[Document, None, None]:
    """Begin after a random number of documents; those skipped come last, for data sets with no more than that."""
    skip = int(random.integers(SKIP))
    skipped = []
    for document in documents:
        if len(skipped) < skip:
            skipped.append(document)
        else:
            yield document
    yield from skipped


def _tokenize(
    model: View, documents: Iterator[Document], file: IO[bytes], *, budget: int, random: np.random.Generator
) -> tuple[int, int]:
    """Write the documents' token ids, joined, until there are `budget` of them: (how many there are, the highest)."""
    tokenizer: Any = model.tokenizer
    end = getattr(tokenizer, "eos_token_id", None)
    tokens, written, highest = 0, 0, -1  # of text; and with what stands between documents
    for document in documents:
        if tokens >= budget:
            break
        passage = _passage(document.text, characters=CHARACTERS_PER_TOKEN * (budget - tokens), random=random)
        begun = False
        for some in _slices(passage):
            # Special tokens spelled out in a text stay text: HTML's <s> is no BOS in the middle of a window.
            ids = tokenizer(some, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
            if not len(ids):
                continue
            tokens += len(ids)
            if written and not begun and end is not None:
                ids = [end, *ids]
            begun = True
            file.write(np.asarray(ids, dtype=ID).tobytes())
            written, highest = written + len(ids), max(highest, *ids)
    return written, highest


def _slices(text: str) -> Iterator[str]:
    """The text, or if it is very long, one passage of it after another, cut where words begin."""
    start = 0
    while len(text) - start > AT_ONCE:
        cut = start + AT_ONCE
        found = next((at for at in range(cut, max(start, cut - LONGEST_WORD), -1) if text[at].isspace()), cut)
        yield text[start:found]
        start = found
    yield text[start:]


def _passage(text: str, *, characters: int, random: np.random.Generator) -> str:
    """The text, or if it is longer than `characters`, that much of it from a random place where a word begins."""
    if len(text) <= characters:
        return text
    start = int(random.integers(len(text) - characters + 1))
    for begin in range(start, min(start + LONGEST_WORD, len(text))):
        if begin == 0 or text[begin - 1].isspace():
            return text[begin : begin + characters]
    return text[start : start + characters]  # a script without spaces
