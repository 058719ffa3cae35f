"""One prompt, token by token: a text, a conversation or ids, and how each token is shown."""

import unicodedata
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ..data.chat import Chat, beginning, contents, conversations, named, rendered
from ..data.prompts import FirstToken, check_highest, check_source, first_policy, put_first
from ..data.windows import encoded
from ..errors import InputError
from ..models.checks import check_length, check_tokens
from ..models.view import View
from ..results.ushape import SHORTEST

# Of one prompt, with or without a dimension for it.
Ids: TypeAlias = Sequence[int] | Int[Tensor, "*prompt position"] | Int[np.ndarray, "*prompt position"]

FURTHER = "·"  # a token that holds only a further part of the character before it
TEMPLATE = "template"  # whose words a token is of that no message says


def read_prompt(
    model: View, prompt: str | Ids | None, chat: Chat | None, first: FirstToken | int
) -> tuple[list[int], list[str], list[str], str | None, dict[str, str | int]]:
    """One text, conversation or list of ids, as `probes.inspect` takes it.

    Returns: its ids, what each of them stands for in the text, in a conversation whose words each of them is of (a role, or
        `TEMPLATE`; empty where that is not known), that text (None for ids without a tokenizer), and the attributes that say
        where position 0 comes from.
    """
    if (prompt is None) == (chat is None):
        raise InputError(f"{'no prompt is' if prompt is None else 'both prompt and chat are'} given; give one of them")
    name, tokenizer = model.identity.name, model.tokenizer
    text: str | None
    roles: list[str] = []
    if tokenizer is None and (chat is not None or isinstance(prompt, str)):
        raise InputError(
            f"{name} has no tokenizer; put its tokenizer's files beside the weights, "
            "or in Python give tokenizer=..., or token ids in place of a text"
        )
    if chat is not None:
        check_source(chat=chat, first=first)
        texts = rendered(model, chat)
        if len(texts) > 1:
            raise InputError(f"the chat holds {len(texts)} conversations, and one is inspected; give that one")
        text, what = texts[0], "conversation"
        spans = contents(model, conversations(chat)[0], text)
        ids, pieces, roles = _tokenized(tokenizer, text, spans)
        origin: dict[str, str | int] = {"text_source": named(chat), "first_policy": "chat template"}
        origin |= {"first_id": ids[0]} if ids else {}
    elif isinstance(prompt, str):
        text, what = prompt, "text"
        origin = {"text_source": f"text '{visible(beginning(prompt))}'"} | first_policy(model, first)
        ids, pieces, _ = _tokenized(tokenizer, prompt)
        before = put_first(origin)
        if origin["first_policy"] != "bos" or ids[: len(before)] != before:
            ids, pieces = [*before, *ids], [*(token_name(tokenizer, one) for one in before), *pieces]
    else:
        what, ids = "prompt", _given_ids(model, prompt, first)
        origin = {"text_source": "token ids", "first_policy": "given ids", "first_id": ids[0]}
        text = None if tokenizer is None else tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        again, pieces, _ = ([], [], []) if text is None else _tokenized(tokenizer, text)
        if again != ids:  # no text of these ids that would be read as them
            pieces = [token_name(tokenizer, i) for i in ids]
    if len(ids) < SHORTEST:
        counted = f"{len(ids)} token{'s' if len(ids) != 1 else ''}, the first one included"
        raise InputError(
            f"the {what} gives {counted}; between sink and recency it takes at least {SHORTEST}: give more"
        )
    check_length(model, len(ids), f"the {what} gives {len(ids)} tokens", "shorten it")
    check_highest(model, max(ids))
    return ids, pieces, roles, text, origin


def _tokenized(
    tokenizer: Any, text: str, spans: Sequence[tuple[str, int, int]] = ()
) -> tuple[list[int], list[str], list[str]]:
    """The ids of a text, what each of them adds to the text before it, so that nothing is lost or shown twice, and its role.

    A token has the role of the span (role, start, stop) that it reaches into.
    """
    if not getattr(tokenizer, "is_fast", False):
        ids = [int(i) for i in encoded(tokenizer, text)]
        return ids, [token_name(tokenizer, i) for i in ids], []
    read = encoded(tokenizer, text, return_offsets_mapping=True)
    pieces, roles, end = [], [], 0
    for start, stop in read["offset_mapping"]:
        pieces.append(visible(text[end:stop]) or FURTHER)
        roles.append(next((role for role, first, last in spans if start < last and first < stop), TEMPLATE))
        end = max(end, int(stop))
    if pieces:
        pieces[-1] += visible(text[end:])
    return [int(i) for i in read["input_ids"]], pieces, roles if spans else []


def _given_ids(model: View, prompt: Any, first: FirstToken | int) -> list[int]:
    if first != "auto":
        raise InputError(f"first={first} has no use with token ids, which say what stands first; leave it out")
    try:
        tokens = torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"the prompt is a {type(prompt).__name__}; give a text, or token ids in a list") from None
    tokens = tokens[None] if tokens.ndim == 1 else tokens
    check_tokens(model, tokens)
    if len(tokens) > 1:
        raise InputError(f"the ids of {len(tokens)} prompts are given, and one is inspected; give one row")
    return tokens[0].tolist()


def visible(text: str) -> str:
    """The text with a sign for every character that would not be seen, or would do something to a terminal."""

    def hidden(character: str) -> bool:
        return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in _JOINERS

    return "".join(_SIGNS.get(x) or (x.encode("unicode_escape").decode() if hidden(x) else x) for x in text)


def token_name(tokenizer: Any, token: int) -> str:
    """A token by itself, visible; its name in the vocabulary where it is no text of its own, its id without a tokenizer."""
    if tokenizer is None:
        return str(token)
    text = tokenizer.decode([token])
    if not text or "\ufffd" in text or token in tokenizer.all_special_ids:
        text = str(tokenizer.convert_ids_to_tokens(token))
    return visible(text)


def one_token(model: View, text: str) -> int:
    """The id of a text that is exactly one token; else the line of the error names its tokens."""
    if model.tokenizer is None:
        raise InputError(f"{model.identity.name} has no tokenizer to read '{text}' with; give a token id")
    ids = [int(one) for one in encoded(model.tokenizer, text)]
    if len(ids) == 1 and (ids[0] != model.tokenizer.unk_token_id or text == model.tokenizer.unk_token):
        return ids[0]
    named = " and ".join(f"'{token_name(model.tokenizer, one)}' (id {one})" for one in ids)
    but = f"'{visible(text)}' is not one token of {model.identity.name}, but {named or 'none'}"
    raise InputError(f"{but}; give a text that is, or a token id")


_SIGNS = {"\n": "⏎", "\t": "⇥"}
_JOINERS = "\u200c\u200d"  # within scripts and emoji
