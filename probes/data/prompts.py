"""Token batches for probing: windows of a text, cut at random offsets, or conversations; `docs/prompts.md` says how.

The seed alone decides which documents are read and where the windows begin: the same under every first-token policy, so that
two policies can be compared on one text.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..errors import InputError, plural
from ..models.checks import check_id, check_length, lacks_bos
from ..models.load import takes_model
from ..models.view import View
from .chat import Chat, conversations, named, rendered
from .documents import BUNDLED, CHECKPOINTS, READERS, Document, bundled, read_documents, stream_dataset, text_files
from .windows import cut, encoded, tokenize

FirstToken = Literal["auto", "bos", "none"]
Attributes = dict[str, str | int | float]

POLICIES = "give auto, bos, none or a token id"


class Batch(TypedDict):
    """Texts of different lengths, padded behind each; a mask that is true where text stands."""

    tokens: Int[Tensor, "text position"]
    attention_mask: Bool[Tensor, "text position"]


@dataclass(frozen=True)
class Drawn:
    """Prompts, with attributes for results and remarks for the caller.

    Attributes:
        tokens: the prompts.
        attributes: for a result. `text_source` names the text or chat, `first_policy` is "bos", "none", "id" ("auto"
            resolved) or "chat template", `first_id` the id at position 0 if all prompts have the same by that policy,
            `first_ids` (JSON) all ids that stand before the text if they are several, `prompts_seed` the seed, and
            `windows_overlap` the share of tokens that are in several windows.
        remarks: one line each, for the caller.
        documents: the name of each prompt's document; None for conversations.
    """

    tokens: Int[Tensor, "prompt position"]
    attributes: Attributes
    remarks: tuple[str, ...]
    documents: tuple[str, ...] | None = None


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

    `probes.batch` takes whole texts of different lengths.

    Args:
        model: whose tokenizer, BOS, vocabulary and longest input decide; or what `probes.load` makes one of.
        n: prompts.
        length: positions per prompt, the first token included.
        text: a text file, a `.jsonl` file or a folder, or "prose" or "code", which are bundled (100 documents each), or
            "long": the prose, four documents at a time joined to one. Without text, dataset and chat: prose, or code for
            the bundled models, which were trained on code (but not on this).
        dataset: in its place a `datasets` name, streamed; `split` and `column` say which part of it.
        chat: in its place conversations, written by the model's chat template: a user's question, a JSON file, or what it
            holds, a list of {"role": ..., "content": ...} or of such lists. `n` and `length` are then upper bounds: as
            many conversations as there are, and as many of their tokens as they have in common. Without `first`.
        first: what stands at position 0. "bos": the model's BOS (or all that its tokenizer puts first), then text. "none":
            text. An id: that id, then text. "auto": "bos" where the tokenizer puts something first, else "none".
        seed: decides documents and offsets; the windows' text begins at the same offsets under every policy.

    Raises:
        InputError: a value out of range, a model without a tokenizer, or without the BOS or chat template asked for, a
            text or chat that is unreadable or too short, or a tokenizer with ids the model has no embedding for.
    """
    source: dict[str, Any] = {"text": text, "dataset": dataset, "split": split, "column": column, "chat": chat}
    return draw(model, n=n, length=length, **source, first=first, seed=seed).tokens


@takes_model
def batch(
    model: View,
    texts: Sequence[str] | Path | None = None,
    *,
    chat: Chat | None = None,
    length: int | None = None,
    first: FirstToken | int = "auto",
) -> Batch:
    """Whole texts or conversations of different lengths, as measures take them: `probes.loss(model, **batch)`.

    Args:
        model: whose tokenizer, BOS, vocabulary and longest input decide; or what `probes.load` makes one of.
        texts: strings; or the path of a text file, a `.jsonl` file or a folder, whose documents are taken.
        chat: in their place conversations, as in `probes.prompts`.
        length: where longer ones are cut, the first token included; not at all if not given.
        first: what stands at each text's position 0, as in `probes.prompts`.

    Returns:
        `tokens` (int64 on the CPU, padded behind each text) and `attention_mask` (bool), both [text, position].

    Raises:
        InputError: as `prompts`; a text of fewer than 2 tokens, or longer than the model was made for.
    """
    if (texts is None) == (chat is None) or isinstance(texts, str):
        raise InputError("texts come as a list of strings, or as the Path of documents; give that, or a chat")
    if length is not None and length < 2:
        raise InputError(f"length={length} is too short; ask for at least 2 positions")
    check_source(chat=chat, first=first)
    _check_tokenizer(model)
    if chat is not None:
        before, given, what = [], rendered(model, chat), "conversation"
    else:
        held = [document.text for document in read_documents(texts)] if isinstance(texts, Path) else [*(texts or ())]
        before, given, what = put_first(first_policy(model, first)), held, "text"
    if not given:
        raise InputError("there are no texts; give at least one")
    rows = [_beginning(model, before, text, length, f"{what} {n}") for n, text in enumerate(given)]
    for n, row in enumerate(rows):
        if len(row) < 2:
            raise InputError(f"{what} {n} has {plural(len(row), 'token')}; give at least 2")
    pad = getattr(model.tokenizer, "pad_token_id", None) or 0
    mask = pad_sequence([torch.ones(len(row), dtype=torch.bool) for row in rows], batch_first=True)
    return Batch(tokens=pad_sequence(rows, batch_first=True, padding_value=pad), attention_mask=mask)


def _beginning(
    model: View, before: Sequence[int], text: str, length: int | None, what: str
) -> Int[Tensor, " position"]:
    """A text behind the ids that stand before it, cut at `length`."""
    row = torch.tensor([*before, *encoded(model.tokenizer, text)], dtype=torch.long)[:length]
    if len(row) == 0:
        return row
    check_length(model, len(row), f"{what} has {len(row)} tokens", "cut it with length=...")
    check_highest(model, int(row.max()))
    return row


@takes_model
def whole(
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
) -> list[Drawn]:
    """Up to `n` whole texts or conversations, of longer ones the first `length` tokens: one prompt each, by its own name.

    Arguments are those of `prompts`. Of more texts than `n` the seed chooses, and their order is kept. A text of fewer than
    2 tokens is left out, and a remark says so. Texts of one name are numbered.

    Raises:
        InputError: as `batch` does.
    """
    _check(model, n=n, length=length, text=text, dataset=dataset, chat=chat, first=first, seed=seed)
    policy: Attributes = {"first_policy": "chat template"} if chat is not None else {**first_policy(model, first)}
    if chat is not None:
        source, there = named(chat), [Document(f"conversation {k}", one) for k, one in enumerate(rendered(model, chat))]
    elif dataset is not None:
        source = _dataset(dataset, split, column)
        with closing(stream_dataset(dataset, split=split, column=column, seed=seed)) as documents:
            there = [*islice(documents, n)]
    else:
        source, there = _text(model, text)
    found, short, names = [], [], [document.name.strip() for document in there]
    for at in sorted(np.random.default_rng(seed).permutation(len(there))[:n]):
        name = names[at] if names[at] and names.count(names[at]) == 1 else f"{names[at]} [{at}]".lstrip()
        tokens = _beginning(model, put_first(policy), there[at].text, length, name)[None]
        if tokens.shape[1] < 2:
            short.append(name)
            continue
        attributes: Attributes = {"text_source": source, **policy, "prompts_seed": seed}
        attributes |= {"first_id": int(tokens[0, 0])} if chat is not None else {}
        found.append(Drawn(tokens, attributes, tuple(filter(None, [lacks_bos(model, tokens)])), (name,)))
    if not found:
        raise InputError(f"no text of {source} has 2 tokens; give longer ones")
    left = (f"{model.identity.name}: left out, for fewer than 2 tokens: {', '.join(short)}",) if short else ()
    return [replace(found[0], remarks=found[0].remarks + left), *found[1:]]


@takes_model
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
    """`prompts` with documents, attributes for a result and remarks. Arguments are the same.

    Raises:
        InputError: as `prompts` does.
    """
    _check(model, n=n, length=length, text=text, dataset=dataset, chat=chat, first=first, seed=seed)
    if chat is not None:
        return _openings(model, chat, n=n, length=length)
    check_length(model, length, f"length={length}", "ask for fewer")
    policy, random = first_policy(model, first), np.random.default_rng(seed)
    if dataset is not None:
        documents, wanted = stream_dataset(dataset, split=split, column=column, seed=seed), n
        source = _dataset(dataset, split, column)
    else:
        source, there = _text(model, text)
        documents = (there[i] for i in random.permutation(len(there)))
        wanted = min(n, max(1, sum(len(document.text) >= length for document in there)))
    with closing(documents):
        read = tokenize(model, documents, source=source, wanted=wanted, n=n, length=length, random=random)
    check_highest(model, max(int(ids.max()) for _, ids in read))
    windows, places, overlap = cut(read, n, length, random, source)
    before = put_first(policy)
    windows = torch.from_numpy(windows)[:, : length - len(before)]
    tokens = torch.cat([torch.tensor(before, dtype=torch.long).expand(n, -1), windows], dim=1)
    attributes: Attributes = {"text_source": source, **policy, "prompts_seed": seed, "windows_overlap": overlap}
    said = filter(None, [lacks_bos(model, tokens)])
    return Drawn(tokens, attributes, tuple(said), tuple(read[place].name for place in places))


def _dataset(dataset: str, split: str, column: str) -> str:
    """How results name a dataset."""
    return f"dataset '{dataset}' (split {split}, column {column})"


def _text(model: View, text: str | Path | None) -> tuple[str, list[Document]]:
    """The documents of a text, or of the one that a model is given without any, and how results name it."""
    of_bundled = (CHECKPOINTS / model.identity.name / "config.json").is_file()  # which were trained on code
    name = str(text) if text is not None else "code" if of_bundled else "prose"
    return (f"bundled {name}", bundled(name)) if name in BUNDLED else (f"text '{name}'", read_documents(name))


def _check(model: View, *, n: int, length: int, chat: Chat | None, seed: int, **source: Any) -> None:
    """Refuse numbers out of range, a wrong source of text, a model that cannot read it."""
    if n < 1:
        raise InputError(f"n={n} prompts is too few; ask for at least 1")
    if length < 2:
        raise InputError(f"length={length} is too short; ask for at least 2 positions")
    if seed < 0:
        raise InputError(f"seed={seed} is negative; give 0 or more")
    check_source(chat=chat, **source)
    _check_tokenizer(model)


def _check_tokenizer(model: View) -> None:
    if model.tokenizer is None:
        raise InputError(
            f"{model.identity.name} has no tokenizer; put its tokenizer's files beside the weights, "
            "or in Python give tokenizer=..., or token ids in place of a text"
        )


def check_source(
    *,
    text: str | Path | None = None,
    dataset: str | None = None,
    chat: Chat | None = None,
    first: FirstToken | int = "auto",
    **_: Any,
) -> None:
    """Refuse what is wrong before a model is read: a file that does not exist, two sources, a policy for a chat."""
    several = [f"{kind} '{name}'" for kind, name in (("text", text), ("dataset", dataset)) if name is not None]
    several += [named(chat)] if chat is not None else []
    if len(several) > 1:
        raise InputError(f"both {' and '.join(several)} are given; give one of them")
    if chat is not None and first != "auto":
        raise InputError(f"first={first} has no use with a chat, whose template says what stands first; leave it out")
    if text is not None and str(text) not in BUNDLED:
        text_files(text)
    if dataset is not None and Path(dataset).suffix in READERS and not Path(dataset).exists():
        raise InputError(f"dataset file '{dataset}' does not exist; give a file, a folder or owner/name")
    if chat is not None:
        conversations(chat)


def first_policy(model: View, first: FirstToken | int) -> dict[str, str | int]:
    """A result's attributes `first_policy` and, unless that is "none", `first_id`; of several ids, also `first_ids`."""
    if isinstance(first, bool) or not isinstance(first, (int, str)):
        raise InputError(f"first={first} is no token id; {POLICIES}")
    if isinstance(first, int):
        check_id(model, first, "first token id")
        return {"first_policy": "id", "first_id": first}
    parse_first(first)
    if first == "none" or (first == "auto" and model.bos is None):
        return {"first_policy": "none"}
    if model.bos is None:
        raise InputError(
            f"first=bos, but the tokenizer of {model.identity.name} puts no BOS first; give none or a token id"
        )
    check_highest(model, max(model.first_ids))
    several = {"first_ids": json.dumps(model.first_ids)} if len(model.first_ids) > 1 else {}
    return {"first_policy": "bos", "first_id": model.bos, **several}  # which may be 0


def put_first(policy: Mapping[str, str | int | float]) -> list[int]:
    """The ids that stand before the text by a `first_policy`."""
    several = json.loads(str(policy.get("first_ids", "[]")))
    return several or ([int(policy["first_id"])] if "first_id" in policy else [])


def check_highest(model: View, highest: int) -> None:
    """Check that the model has an embedding for the highest id of a tokenized text."""
    if highest >= model.spec.vocabulary:
        raise InputError(
            f"the tokenizer gives id {highest}, but {model.identity.name} has {model.spec.vocabulary} embeddings; "
            "load the tokenizer that belongs to the model"
        )


def parse_first(value: str) -> FirstToken | int:
    """Read a first-token policy from the command line: "auto", "bos", "none", or a token id in digits."""
    if value == "auto" or value == "bos" or value == "none":
        return value
    try:
        return int(value)
    except ValueError:
        raise InputError(f"first token '{value}' is unknown; {POLICIES}") from None


def _openings(model: View, chat: Chat, *, n: int, length: int) -> Drawn:
    """The beginnings of conversations: of as many as asked for, as many tokens as they all have."""
    ids = [encoded(model.tokenizer, text) for text in rendered(model, chat)]
    check_highest(model, max((max(conversation, default=0) for conversation in ids), default=0))
    count = min(n, len(ids))
    common = min(length, model.spec.max_length or length, sorted(map(len, ids), reverse=True)[count - 1])
    if common < 2:
        raise InputError(f"{named(chat)} gives prompts of {common} token; give longer conversations")
    tokens = torch.tensor([conversation[:common] for conversation in ids if len(conversation) >= common][:count])
    attributes: Attributes = {"text_source": named(chat), "first_policy": "chat template"}
    if (tokens[:, 0] == tokens[0, 0]).all():
        attributes["first_id"] = int(tokens[0, 0])
    fewer = (
        f"{model.identity.name}: {named(chat)} gives {plural(count, 'prompt')} of {common} tokens, "
        f"instead of {n} of {length}; more or longer conversations give more"
    )
    said = filter(None, [fewer * ((count, common) != (n, length)), lacks_bos(model, tokens)])
    return Drawn(tokens, attributes, tuple(said))
