"""What a tokenizer puts before a text, and whether something is a tokenizer at all."""

from __future__ import annotations

from typing import Any

from ..errors import InputError, reason

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


def check_tokenizer(tokenizer: Any) -> None:
    """Check that something can be used as a tokenizer of transformers is.

    Raises:
        InputError: it cannot.
    """
    try:
        for special in (True, False):
            _ids(tokenizer, SHORT_TEXTS[0], special=special)
        tokenizer.decode([0])
        tokenizer.convert_ids_to_tokens(0)
        iter(tokenizer.all_special_ids)
    except Exception as error:  # whatever another object does with these calls
        raise InputError(
            f"a {type(tokenizer).__name__} is no tokenizer of transformers ({reason(error)}); give one that "
            "AutoTokenizer.from_pretrained gives, or a folder with tokenizer.json"
        ) from None


def _ids(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    return [int(i) for i in tokenizer(text, add_special_tokens=special)["input_ids"]]
