"""What a model can be asked: tokens, a query, blocks."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, plural
from .view import View

# Of an id in a row are padding where nothing but a config's BOS or EOS says so, or custom (UNK; 0, which torch's
# pad_sequence puts, where the tokenizer never writes it so often); else 2.
GUESSED = 3


def check_tokens(model: View, tokens: object) -> None:
    """Check that `tokens` is an int64 tensor [prompt, position] that the model can read.

    Raises:
        InputError: another type, dtype or number of dimensions; no prompt; fewer than 2 positions, or more than the
            model was made for; an id outside the vocabulary; padding.
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
    check_length(model, shape[1], f"tokens have {shape[1]} positions", "give shorter prompts")
    for token in (int(tokens.min()), int(tokens.max())):
        check_id(model, token)
    _check_padding(model, tokens)


def check_documents(documents: Sequence[str] | None, count: int, what: str = "prompt") -> None:
    """Check that as many documents are named as there are texts, if any are."""
    if documents is not None and len(documents) != count:
        raise InputError(f"{plural(len(documents), 'document')} named for {plural(count, what)}; name one for each")


def check_length(model: View, length: int, what: str, remedy: str) -> None:
    """Check that a text is no longer than the model was made for, unless it was loaded for longer ones."""
    most = model.spec.max_length
    if most is not None and length > most:
        lifted = "learned" not in model.spec.positional and model.identity.backend != "toy"
        more = ", or go beyond: --beyond, in Python beyond=True" if lifted else ""
        raise InputError(f"{what}, but {model.identity.name} was made for {most}; {remedy}{more}")


def _check_padding(model: View, tokens: Tensor) -> None:
    """Raise InputError where a prompt begins or ends with padding, whatever the view's own tokenizer pads with.

    What the tokenizer puts before every text is none, nor is one EOS at an end, or a second BOS in front.
    """
    if (tokens[:, 1:] == tokens[:, 1:2]).all():  # one id behind position 0: there is no text to be padded
        return
    for pad, least in _pads(model):
        prefix = [*model.first_ids]
        own = next((n for n, token in enumerate(prefix) if token != pad), len(prefix))
        for edge, ids, usual in (("begins", tokens, own), ("ends", tokens.flip(1), 0)):
            for row, run in enumerate((ids == pad).long().cumprod(1).sum(1).tolist()):
                if run - usual >= least:
                    raise InputError(
                        f"prompt {row} {edge} with {plural(run - usual, 'pad')} (id {pad}), which would be read as text; "
                        "give an attention_mask that is 0 there, or texts of one length"
                    )


def _pads(model: View) -> Iterator[tuple[int, int]]:
    """Ids that a batch may be padded with, and how many of one are padding: one where it serves nothing else."""
    config, tokenizer = json.loads(model.identity.config), model.tokenizer

    def named(name: str) -> set[int]:
        ids = [getattr(tokenizer, f"{name}_token_id", None), config.get(f"{name}_token_id")]
        return {i for some in ids for i in (some if isinstance(some, list) else [some]) if isinstance(i, int)}

    own, ends, unknown = named("pad"), named("eos") | named("bos"), named("unk")
    zero = set() if tokenizer is None or writes(tokenizer, [0] * GUESSED) else {0}
    for pad in sorted(own | ends | unknown | zero):
        surely = pad in own or (tokenizer is not None and pad in ends)
        dedicated = pad in own - ends - unknown and pad in getattr(tokenizer, "all_special_ids", ())
        yield pad, 1 if dedicated else 2 if surely else GUESSED


def check_id(model: View, token: int, what: str = "token id") -> None:
    """Check that the model has an embedding for an id; `what` is what an error calls it."""
    if not 0 <= token < model.spec.vocabulary:
        raise InputError(
            f"{what} {token} is outside the vocabulary of {model.identity.name}; "
            f"ids run from 0 to {model.spec.vocabulary - 1}"
        )


@torch.no_grad()
def check_logits(model: View) -> None:
    """Check that the model gives next-token logits, before what needs them begins."""
    model.unembed(torch.zeros(1, model.spec.width, device=model.device, dtype=model.dtype))


def check_place(model: View, tokens: Any, query: int, from_layer: Any) -> tuple[int, list[int]]:
    """(the query counted from the front, the source blocks in rising order)."""
    check_tokens(model, tokens)
    blocks, length = model.spec.blocks, tokens.shape[1]
    at = query + length if query < 0 else query
    if not 0 <= at < length:
        raise InputError(f"query {query} is outside the prompt of {length} tokens; give {-length} to {length - 1}")
    if from_layer != "all" and not (isinstance(from_layer, int) and 0 <= from_layer < blocks):
        raise InputError(
            f"from_layer {from_layer} does not exist; the model has blocks 0 to {blocks - 1}, or give 'all'"
        )
    return at, list(range(blocks)) if from_layer == "all" else [from_layer]


def not_finite(model: View, what: str) -> InputError:
    """The error for values of a model that are infinite or no numbers."""
    return InputError(
        f"model '{model.identity.name}' gives {what} with values that are not finite; "
        "check its weights, or use dtype float32 or float64"
    )


def lacks_bos(model: View, tokens: Tensor) -> str:
    """A line that says how many prompts lack what the model's tokenizer puts before every text; empty where none does.

    Whether a model was trained with a BOS in front is what its tokenizer does, not whether it has a token of that name.
    """
    before = torch.tensor(model.first_ids, dtype=tokens.dtype)[: tokens.shape[1]]
    lacking = int((tokens[:, : len(before)].cpu() != before).any(1).sum())
    if not lacking:
        return ""
    tokenizer: Any = model.tokenizer
    said, count = "".join(tokenizer.convert_ids_to_tokens(list(model.first_ids))), len(tokens)
    return (
        f"{model.identity.name} was trained with {said} in front, and {lacking} of {count} prompts lack it: use "
        "--first bos, or in Python tokens that probes.prompts or the tokenizer itself makes of a text"
    )


SHORT_TEXTS = ("a", "1", "b a")  # one of which every vocabulary for text has tokens for


def first_ids(tokenizer: Any | None) -> tuple[int, ...]:
    """The ids that a tokenizer puts before every text, whatever it calls them: BOS, BOS twice, "[gMASK]<sop>", or none."""
    for text in SHORT_TEXTS if tokenizer is not None else ():
        whole, plain = (_ids(tokenizer, text, special=special) for special in (True, False))
        if plain:
            places = (n for n in range(len(whole)) if whole[n : n + len(plain)] == plain)
            return tuple(whole[: next(places, 0)])
    return ()


def writes(tokenizer: Any, ids: list[int]) -> bool:
    """Whether the tokenizer makes these ids of the text that they stand for."""
    return _ids(tokenizer, tokenizer.decode(ids), special=False) == ids


def _ids(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    return [int(i) for i in tokenizer(text, add_special_tokens=special)["input_ids"]]
