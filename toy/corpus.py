"""The text that `toy.pretrain` trains on: sources, what is held out, the tokenizer, and windows in a fixed order."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from probes.data.documents import Document, read_documents, split_heldout, stdlib_documents, stdlib_name, stream_dataset
from probes.errors import InputError

from .checks import at_least

BOS, EOS = "<|bos|>", "<|eos|>"  # ids 0 and 1; EOS stands between packed documents
SMALLEST_VOCABULARY = 256 + 2  # byte-level BPE before its first merge, with BOS and EOS
DATASET_CHARACTERS = 50_000_000  # some 12 million tokens; the default training sees 10 million


def find_text(
    *,
    text: str | Path | None = None,
    dataset: str | None = None,
    split: str | None = None,
    column: str | None = None,
    characters: int | None = None,
) -> tuple[list[Document], str]:
    """The documents of the source that is given, else of the standard library, and what to call them."""
    if text is not None and dataset is not None:
        raise InputError("--text and --dataset given; give one source of text")
    if dataset is None:
        for name, value in (("split", split), ("column", column), ("characters", characters)):
            if value is not None:
                raise InputError(f"{name}={value} is for --dataset only; leave it out or give --dataset NAME")
        return (
            (stdlib_documents(), stdlib_name()) if text is None else (read_documents(text), f"text '{Path(text).name}'")
        )
    limit = DATASET_CHARACTERS if characters is None else characters
    at_least("characters", limit, 1)
    split, column = split or "train", column or "text"
    documents, size = [], 0
    with closing(stream_dataset(dataset, split=split, column=column)) as stream:
        for document in stream:
            documents.append(document)
            size += len(document.text)
            if size >= limit:
                break
    if not size:
        raise InputError(f"dataset '{dataset}' has only empty text in '{column}'; name another column")
    return documents, f"dataset '{dataset}', split '{split}'"


def hold_out(documents: list[Document], *, characters: int) -> tuple[list[Document], list[Document]]:
    """(training, held out): whole documents where enough of them are short, else pieces of documents."""
    at_least("heldout_characters", characters, 1)
    for candidates in (documents, [piece for document in documents for piece in _pieces(document, characters // 10)]):
        training, heldout = split_heldout(candidates, characters=characters)
        kept, held = (sum(len(document.text) for document in part) for part in (training, heldout))
        if held >= characters / 2 and kept >= characters:
            return training, heldout
    total = sum(len(document.text) for document in documents)
    raise InputError(
        f"text of {total} characters is too short to hold out heldout_characters={characters}; "
        "give more text or hold out less"
    )


def _pieces(document: Document, size: int) -> list[Document]:
    """Cut a document into pieces of at most `size` characters, at line ends where there are any."""
    pieces, start = [], 0
    while start < len(document.text):
        end = start + max(1, size)
        if end < len(document.text):
            end = document.text.rfind("\n", start + size // 2, end) + 1 or end
        pieces.append(Document(f"{document.name}#{len(pieces)}", document.text[start:end]))
        start = end
    return pieces


def train_tokenizer(documents: Sequence[Document], *, vocabulary: int, bos: bool) -> Any:
    """Byte-level BPE over `documents`, wrapped for transformers; with `bos`, encoding starts with BOS, as in Llama."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer=trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
        )
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS if bos else None, eos_token=EOS)
    if len(made) != vocabulary:
        raise InputError(
            f"the text yields {len(made)} tokens, the config wants vocab_size={vocabulary}; "
            "give more text or a config with the smaller vocabulary"
        )
    return made


def pack(tokenizer: Any, documents: Sequence[Document]) -> Int[np.ndarray, " token"]:
    """All documents as one stream of token ids, int64, EOS after each document."""
    encoded = tokenizer(
        [document.text for document in documents], add_special_tokens=False, return_attention_mask=False, verbose=False
    )
    return np.concatenate([np.asarray([*ids, tokenizer.eos_token_id], dtype=np.int64) for ids in encoded["input_ids"]])


class Windows:
    """The training windows in their fixed order: a function of seed and step, the same for models with and without BOS.

    Each pass over the stream cuts it at a fresh random phase into windows of `length`, and shuffles them. With BOS the
    input is BOS and all but the last token of a window; without BOS it is the window itself. Both predict `length` tokens.
    """

    def __init__(self, stream: np.ndarray, *, length: int, seed: int, bos: int | None) -> None:
        self.per_pass = (len(stream) - 1) // length - 1
        if self.per_pass < 1:
            raise InputError(
                f"text of {len(stream)} tokens is too short for windows of length={length}; "
                "give more text or smaller windows"
            )
        self.stream, self.length, self.seed, self.bos = stream, length, seed, bos

    def starts(self, first: int, count: int) -> list[int]:
        """Where windows number `first` to `first + count` begin in the stream."""
        found = []
        for index in range(first, first + count):
            epoch, place = divmod(index, self.per_pass)
            random = np.random.default_rng([self.seed, epoch])
            phase = int(random.integers(self.length))
            found.append(phase + self.length * int(random.permutation(self.per_pass)[place]))
        return found

    def side_by_side(self) -> list[int]:
        """Where windows begin that cover the whole stream: what validation reads, with and without BOS."""
        return list(range(0, len(self.stream) - self.length - 1, self.length))

    def cut(self, starts: Sequence[int]) -> Int[np.ndarray, "window length_and_1"]:
        """Windows and the token after each."""
        return np.stack([self.stream[start : start + self.length + 1] for start in starts])

    def at(self, starts: Sequence[int]) -> tuple[Int[Tensor, "window length"], Int[Tensor, "window length"]]:
        """(inputs, targets)."""
        cut = torch.from_numpy(self.cut(starts))
        if self.bos is None:
            return cut[:, :-1], cut[:, 1:]
        first = torch.full((len(starts), 1), self.bos)
        return torch.cat([first, cut[:, : self.length - 1]], dim=1), cut[:, : self.length]
