"""Windows of tokens within documents: which documents are read, how much of each, and where the windows begin.

Documents come in a seeded random order (of a stream, 256 at a time). As many are read as there are windows, or all; a
document that is shorter than a window is skipped. Of a long document one passage is read, from a random place, `MARGIN`
times as long as its windows. How windows are spread over documents stands in `docs/prompts.md`. Where a document has no room
for its windows side by side, their starts are uniform without replacement.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from ..errors import InputError, plural
from ..models.view import View
from .documents import Document

MARGIN = 4  # tokens read of a document per token used: the rest lets the seed choose which
SHORT = 10_000  # documents of a stream in a row that are too short for a window, after which reading stops
CHARACTERS_PER_TOKEN = 8  # twice that of ordinary text: a passage that long holds its windows, with room to spare
ID = np.dtype("<i4")
LONGEST_WORD = 100  # characters within which a passage looks for the beginning of a word


class Tokenized(NamedTuple):
    """A document that holds a window."""

    name: str
    ids: Int[np.ndarray, " token"]


def tokenize(
    model: View,
    documents: Iterator[Document],
    *,
    source: str,
    wanted: int,
    n: int,
    length: int,
    random: np.random.Generator,
) -> list[Tokenized]:
    """`wanted` documents that hold a window of `length`, or all there are."""
    budget = MARGIN * length * -(-n // wanted)  # tokens of a document
    kept, longest, short = [], 0, 0
    for name, text in documents:
        passage = passage_of(text, characters=CHARACTERS_PER_TOKEN * budget, random=random)
        ids = np.asarray(encoded(model.tokenizer, passage), dtype=ID)[:budget]
        longest = max(longest, len(ids))
        if len(ids) >= length:
            kept.append(Tokenized(name, ids))
        short = 0 if len(ids) >= length else short + 1
        if len(kept) == wanted or short == SHORT:
            break
    if not kept:
        raise InputError(
            f"no document of {source} has {length} tokens (the longest has {longest}), and a window lies within one; "
            "ask for shorter prompts, give longer documents, or take whole texts (--whole, in Python probes.batch)"
        )
    return kept


def cut(
    documents: Sequence[Tokenized], n: int, length: int, random: np.random.Generator, source: str
) -> tuple[Int[np.ndarray, "window position"], list[int], float]:
    """Windows, the number of each one's document, and the share of their tokens that are in several windows."""
    room = [len(ids) - length + 1 for _, ids in documents]  # starts
    if sum(room) < n:
        tokens = sum(len(ids) for _, ids in documents)
        raise InputError(
            f"{source} gives {tokens} tokens in {plural(len(room), 'document')}, which hold {plural(sum(room), 'window')} "
            f"of {length}, and {n} are asked for; give more text, ask for fewer or shorter prompts, or take whole texts "
            "(--whole, in Python probes.batch)"
        )
    half, middle = n // 2, len(room) // 2
    if half and sum(room[:middle]) >= half and sum(room[middle:]) >= n - half:
        places = _in_turn(room[:middle], half) + [middle + place for place in _in_turn(room[middle:], n - half)]
    else:
        places = _in_turn(room, n)
    windows, several = np.empty((n, length), dtype=np.int64), 0
    for place in dict.fromkeys(places):
        ids = documents[place].ids
        rows = [row for row, other in enumerate(places) if other == place]
        at = _starts(len(ids), length, len(rows), random)[:, None] + np.arange(length)  # [window, position]
        windows[rows] = ids[at]
        several += int((np.bincount(at.ravel())[at] > 1).sum())
    return windows, places, several / windows.size


def encoded(tokenizer: Any, text: str, **options: Any) -> Any:
    """The ids of a text, nothing put before it; with options everything that the tokenizer returns.

    Special tokens that the text spells out become these tokens, whatever the tokenizer's own settings.
    """
    read = tokenizer(text, add_special_tokens=False, split_special_tokens=False, verbose=False, **options)
    return read if options else read["input_ids"]


def _in_turn(room: Sequence[int], n: int) -> list[int]:
    """The document of each of `n` windows: one after the other takes one, as long as it has room."""
    places: list[int] = []
    taken = 0
    while len(places) < n:
        places += [place for place, most in enumerate(room) if most > taken]
        taken += 1
    return places[:n]


def _starts(size: int, length: int, count: int, random: np.random.Generator) -> Int[np.ndarray, " window"]:
    """Where `count` windows of a document begin, in random order."""
    free = size - count * length
    if free < 0:
        return random.choice(size - length + 1, size=count, replace=False)
    gaps = np.sort(random.choice(free + count, size=count, replace=False)) - np.arange(count)
    return random.permutation(gaps + length * np.arange(count))


def passage_of(text: str, *, characters: int, random: np.random.Generator) -> str:
    """The text, or if it is longer than `characters`, that much of it from a random place where a word begins."""
    if len(text) <= characters:
        return text
    start = int(random.integers(len(text) - characters + 1))
    places = range(start, min(start + LONGEST_WORD, len(text)))
    begins = (at for at in places if at == 0 or text[at - 1].isspace())
    start = next(begins, start)  # a script without spaces has none
    return text[start : start + characters]
