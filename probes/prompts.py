"""Token batches for probing: windows of a text, cut at random offsets, or conversations.

Text comes from a file, a `datasets` name or is the bundled held-out text.

Documents are joined in a seeded random order, with the tokenizer's end-of-text id between them where it has one and
nothing otherwise. A special token that a text spells out is that token, as the model's own tokenizer has it. Windows begin
at independent uniform offsets (without replacement), so that what stands at a position says nothing about the position;
they may overlap, and `draw` tells by how much. What stands at position 0 is the first-token policy: Qwen has no BOS, Llama
was trained with one, and sinks depend on it; the policy is therefore explicit and recorded.

Text is tokenized only until there is `MARGIN` times as much as the prompts hold, and its ids wait on disk: many prompts take
no more memory than themselves. The seed alone decides which documents
are read and where the windows begin: the same under every policy, so that two policies can be compared on one text.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO, Any, Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from .chat import Chat, conversations, named, rendered
from .errors import InputError
from .models.given import takes_model
from .models.view import View
from .text import BUNDLED, HELDOUT, Document, dataset_reader, read_documents, stream_dataset, text_files

FirstToken = Literal["auto", "bos", "none"]

MARGIN = 8  # tokens read per token used: one in eight stands in two windows, and a long text is not tokenized whole
NOTABLE_OVERLAP = 2 / MARGIN  # above it, it is said: twice the share that a long text gives
NAMED = 5  # special tokens in a remark
SKIP = 256  # a stream cannot be shuffled; skipping up to this many documents lets the seed choose where reading begins
CHARACTERS_PER_TOKEN = 16  # a generous bound on ordinary text, to cut what is read of one very long document
AT_ONCE = 1 << 20  # characters tokenized together; ids take some thirty times their memory until they are written down
IN_MEMORY = 1 << 24  # bytes of ids kept in memory; more go to a temporary file
ID = np.dtype("<i4")
LONGEST_WORD = 100  # characters within which that passage looks for the beginning of a word


@dataclass(frozen=True)
class Drawn:
    """Prompts, and what there is to say about them."""

    tokens: Int[Tensor, "prompt position"]
    # For a result: `text_source` names the text or chat, `first_policy` is "bos", "none", "id" ("auto" resolved) or "chat
    # template", `first_id` the id at position 0 if all prompts have the same by that policy, `prompts_seed` the seed,
    # `windows_overlap` the share of tokens that stand in another window, too, and `special_tokens` (JSON) how many of
    # each the text spells out, if it does.
    attributes: dict[str, str | int | float]
    remarks: tuple[str, ...]  # a line each, for those who asked for these prompts


@takes_model
def prompts(
    model: View,
    *,
    n: int = 16,
    length: int = 256,
    text: str | Path | None = None,
    dataset: str | None = None,
    split: str = "train",
    column: str = "text",
    chat: Chat | None = None,
    first: FirstToken | int = "auto",
    seed: int = 0,
) -> Int[Tensor, "prompt position"]:
    """Cut `n` windows of `length` tokens out of a text, or take the beginnings of conversations; int64 on the CPU.

    Warns where more than a quarter of the tokens stand in several windows, and of special tokens that the text spells out,
    which are read as such.

    Args:
        model: whose tokenizer, BOS, vocabulary and longest input decide; or what `probes.load` makes one of.
        n: prompts.
        length: positions per prompt, the first token included.
        text: a text file, a `.jsonl` file or a folder, or "prose" or "code", which are bundled (100 documents each). Without
            text, dataset and chat: the bundled held-out text, code that the bundled models were not trained on.
        dataset: in its place a `datasets` name, streamed; `split` and `column` say which part of it.
        chat: in its place conversations, written by the model's chat template: a user's question, a JSON file, or what it
            holds, a list of {"role": ..., "content": ...} or of such lists. `n` and `length` are then upper bounds: as
            many conversations as there are, and as many of their tokens as they have in common. Without `first`.
        first: what stands at position 0. "bos": the model's BOS, then `length - 1` tokens of text. "none": text. An id:
            that id, then text. "auto": "bos" where the model has one (its tokenizer puts it first), else "none".
        seed: decides documents and offsets; the windows' text begins at the same offsets under every policy.

    Raises:
        InputError: a value out of range, a model without a tokenizer, or without the BOS or chat template asked for, a
            text or chat that is unreadable or too short, or a tokenizer with ids the model has no embedding for.
    """
    source: dict[str, Any] = {"text": text, "dataset": dataset, "split": split, "column": column, "chat": chat}
    drawn = draw(model, n=n, length=length, **source, first=first, seed=seed)
    if chat is None:  # that there were fewer or shorter conversations is seen in the shape
        for line in drawn.remarks:
            warnings.warn(line, stacklevel=3)
    return drawn.tokens


def draw(
    model: View,
    *,
    n: int,
    length: int,
    text: str | Path | None = None,
    dataset: str | None = None,
    split: str = "train",
    column: str = "text",
    chat: Chat | None = None,
    first: FirstToken | int = "auto",
    seed: int = 0,
) -> Drawn:
    """`prompts` with what there is to say about them, for results and the command line.

    Raises:
        InputError: as `prompts` does.
    """
    if n < 1:
        raise InputError(f"n={n} prompts is too few; ask for at least 1")
    if length < 2:
        raise InputError(f"length={length} is too short; ask for at least 2 positions")
    if chat is None and model.spec.max_length is not None and length > model.spec.max_length:
        raise InputError(
            f"length={length} is more than the {model.spec.max_length} positions of {model.identity.name}; "
            f"ask for at most {model.spec.max_length}"
        )
    if seed < 0:
        raise InputError(f"seed={seed} is negative; give 0 or more")
    check_source(text=text, dataset=dataset, chat=chat, first=first)
    if model.tokenizer is None:
        raise InputError(
            f"{model.identity.name} has no tokenizer; pass token ids [prompt, position] directly, "
            "or load the model with one (probes.load(model, tokenizer=...))"
        )
    if chat is not None:
        return _openings(model, chat, n=n, length=length)
    return _windows(model, n, length, text, dataset, split, column, first_policy(model, first), seed)


def check_source(
    *,
    text: str | Path | None = None,
    dataset: str | None = None,
    chat: Chat | None = None,
    first: FirstToken | int = "auto",
    **_: Any,
) -> None:
    """Refuse what can be refused before a model is read: a file that is not there, two sources, a policy for a chat.

    Raises:
        InputError: one of these.
    """
    given = [f"text '{text}'"] if text is not None else []
    given += [f"dataset '{dataset}'"] if dataset is not None else []
    given += [named(chat)] if chat is not None else []
    if len(given) > 1:
        raise InputError(f"both {' and '.join(given)} are given; give one of them")
    if chat is not None and first != "auto":
        raise InputError(f"first={first} has no use with a chat, whose template says what stands first; leave it out")
    if text is not None and str(text) not in BUNDLED:
        text_files(text)
    if dataset is not None:
        dataset_reader(dataset)
    if chat is not None:
        conversations(chat)


def first_policy(model: View, first: FirstToken | int) -> dict[str, str | int]:
    """The attributes `first_policy` and, unless that is "none", `first_id` of a result.

    Raises:
        InputError: the first-token policy cannot be followed on this model.
    """
    first_id = _first_id(model, first)
    if first_id is None:
        return {"first_policy": "none"}
    return {"first_policy": "id" if isinstance(first, int) else "bos", "first_id": first_id}


def check_highest(model: View, highest: int) -> None:
    """Check that the model has an embedding for the highest id of a tokenized text.

    Raises:
        InputError: it has none.
    """
    if highest >= model.spec.vocabulary:
        raise InputError(
            f"the tokenizer gives id {highest}, but {model.identity.name} has {model.spec.vocabulary} embeddings; "
            "load the tokenizer that belongs to the model"
        )


def overlap(starts: Int[np.ndarray, " window"], length: int) -> float:
    """The share of tokens of windows of one length that stand in another of them, too."""
    # Of windows of one length, all that a window shares with others it shares with its neighbours.
    shared = np.maximum(length - np.diff(np.sort(starts)), 0)
    before, behind = np.concatenate([[0], shared]), np.concatenate([shared, [0]])
    return float(np.minimum(before + behind, length).mean() / length)


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
            tokenizer, name = model.tokenizer, model.identity.name
            token = getattr(tokenizer, "bos_token_id", None)
            if tokenizer is None or token is None:
                raise InputError(f"first=bos, but {name} has no BOS token; use --first none or a token id")
            raise InputError(
                f"first=bos, but the tokenizer of {name} never puts '{tokenizer.bos_token}' first; "
                f"use --first none, or --first {token}"
            )
        return model.bos
    raise InputError(f"first token '{first}' is unknown; give auto, bos, none or a token id")


def _windows(
    model: View,
    n: int,
    length: int,
    text: str | Path | None,
    dataset: str | None,
    split: str,
    column: str,
    policy: dict[str, str | int],
    seed: int,
) -> Drawn:
    random = np.random.default_rng(seed)
    budget = MARGIN * n * length  # not length - 1 under "bos": the offsets are the same under every policy
    if dataset is not None:
        documents = _skip_some(stream_dataset(dataset, split=split, column=column), random)
        source = f"dataset '{dataset}' (split {split}, column {column})"
    else:
        found = read_documents(HELDOUT if text is None else BUNDLED.get(str(text), text))
        documents = (found[i] for i in random.permutation(len(found)))
        given = "bundled held-out text" if text is None else f"text '{text}'"
        source = f"bundled {text}" if str(text) in BUNDLED else given
    with SpooledTemporaryFile(max_size=IN_MEMORY) as file, closing(documents):
        tokens, highest, special = _tokenize(model, documents, file, budget=budget, random=random)
        offsets = tokens - length + 1
        if offsets < n:
            raise InputError(
                f"{source} gives {tokens} tokens; {n} windows of {length} need at least {length + n - 1}: "
                "give more text, or ask for fewer or shorter prompts"
            )
        check_highest(model, highest)
        windows = torch.empty(n, length, dtype=torch.int64)
        starts = random.choice(offsets, size=n, replace=False)
        for window, start in zip(windows, starts, strict=True):
            file.seek(int(start) * ID.itemsize)
            window[:] = torch.from_numpy(np.frombuffer(file.read(length * ID.itemsize), dtype=ID).astype(np.int64))
    if "first_id" in policy:
        windows = torch.cat([torch.full((n, 1), int(policy["first_id"])), windows[:, :-1]], dim=1)
    share = overlap(starts, length - ("first_id" in policy))
    attributes: dict[str, str | int | float] = {"text_source": source, **policy, "prompts_seed": seed}
    attributes["windows_overlap"] = share
    remarks = []
    if share > NOTABLE_OVERLAP:
        remarks.append(
            f"{model.identity.name}: {share:.0%} of the tokens stand in more than one of the {n} windows of {length} "
            f"({tokens} tokens were read), so that windows are no independent samples, as intervals take them to be; "
            "give more text, or ask for fewer or shorter prompts"
        )
    if special:
        attributes["special_tokens"] = json.dumps(special, ensure_ascii=False)
        counts = [f"{token} ({count})" for token, count in special.items()]
        told = ", ".join(counts[:NAMED]) + (", ..." if len(counts) > NAMED else "")
        remarks.append(f"{model.identity.name}: special tokens that the text spells out are read as such: {told}")
    return Drawn(windows, attributes, tuple(remarks))


def _openings(model: View, chat: Chat, *, n: int, length: int) -> Drawn:
    """The beginnings of conversations: of as many as asked for, as many tokens as they all have."""
    ids = [encoded(model.tokenizer, text) for text in rendered(model, chat)]
    check_highest(model, max((max(one, default=0) for one in ids), default=0))
    count = min(n, len(ids))
    common = min(length, model.spec.max_length or length, sorted(map(len, ids), reverse=True)[count - 1])
    if common < 2:
        raise InputError(f"{named(chat)} gives prompts of {common} token; give longer conversations")
    tokens = torch.tensor([one[:common] for one in ids if len(one) >= common][:count])
    attributes: dict[str, str | int | float] = {"text_source": named(chat), "first_policy": "chat template"}
    if (tokens[:, 0] == tokens[0, 0]).all():
        attributes["first_id"] = int(tokens[0, 0])
    if (count, common) == (n, length):
        return Drawn(tokens, attributes, ())
    return Drawn(
        tokens,
        attributes,
        (
            f"{model.identity.name}: {named(chat)} gives {count} prompt{'s' * (count > 1)} of {common} tokens, "
            f"instead of {n} of {length}; more or longer conversations give more",
        ),
    )


def encoded(tokenizer: Any, text: str, **options: Any) -> Any:
    """What a tokenizer makes of a text, nothing put before it: the ids, or with options all of its answer.

    Special tokens that the text spells out become these tokens, whatever the tokenizer was told elsewhere.
    """
    read = tokenizer(text, add_special_tokens=False, split_special_tokens=False, verbose=False, **options)
    return read if options else read["input_ids"]


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
) -> tuple[int, int, dict[str, int]]:
    """Write the documents' token ids, joined, until there are `budget` of them.

    Returns: how many there are, the highest, and how often the documents spell out each special token.
    """
    tokenizer: Any = model.tokenizer
    end = getattr(tokenizer, "eos_token_id", None)
    known: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    unknown = getattr(
        tokenizer, "unk_token_id", None
    )  # what a text holds that the vocabulary does not spells out nothing
    special = {id: str(token) for id, token in known.items() if token.special and id != unknown}
    tokens, written, highest = 0, 0, -1  # of text; and with what stands between documents
    spelled: Counter[str] = Counter()
    for document in documents:
        if tokens >= budget:
            break
        passage = _passage(document.text, characters=CHARACTERS_PER_TOKEN * (budget - tokens), random=random)
        begun = False
        for some in _slices(passage):
            ids = encoded(tokenizer, some)
            if not len(ids):
                continue
            tokens += len(ids)
            spelled.update(special[id] for id in ids if id in special)
            if written and not begun and end is not None:
                ids = [end, *ids]
            begun = True
            file.write(np.asarray(ids, dtype=ID).tobytes())
            written, highest = written + len(ids), max(highest, *ids)
    return written, highest, dict(spelled.most_common())


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
