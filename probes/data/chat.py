"""Conversations, written by the chat template of a model."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import InputError, reason
from ..models.view import View
from ..run.files import what_is

Message: TypeAlias = Mapping[str, str]  # {"role": "user", "content": "..."}
Conversation: TypeAlias = Sequence[Message]
# A question, a JSON file, or what such a file holds.
Chat: TypeAlias = str | Path | Conversation | Sequence[Conversation]

SHOWN = 60  # characters of a question in names and messages
MESSAGES = '{"role": ..., "content": ...}'
MARK = "\ue000"  # for private use: in the place of what a message says


def conversations(chat: Chat) -> list[list[dict[str, str]]]:
    """The conversations that a question, a JSON file or a list of messages holds; no model is needed.

    A string is one question of a user, unless it ends in `.json` or a file of that name exists.

    Raises:
        InputError: the file does not exist or is no JSON, or the list is none of messages {"role": ..., "content": ...}
            nor of such lists.
    """
    name = named(chat)
    held: Any = _read(chat) if isinstance(chat, (str, Path)) else chat
    if isinstance(held, Sequence) and held and isinstance(held[0], Mapping):
        held = [held]
    if not isinstance(held, Sequence) or isinstance(held, str) or not held:
        raise InputError(f"{name} holds no conversations; give a list of {MESSAGES}, or several")
    checked = []
    for number, conversation in enumerate(held, start=1):
        try:
            checked.append([dict(message) for message in conversation])
            for message in checked[-1]:  # JSON can spell half a character; no tokenizer takes it
                (message["role"] + message["content"]).encode()
            if not checked[-1]:
                raise ValueError
        except (TypeError, KeyError, ValueError, AttributeError):
            raise InputError(
                f"conversation {number} of {name} is no list of {MESSAGES} with text in both; mend it"
            ) from None
    return checked


def rendered(model: View, chat: Chat) -> list[str]:
    """Every conversation as the model's chat template writes it, special tokens spelled out.

    A conversation whose last message is not the assistant's ends where the template lets the assistant begin.
    """
    tokenizer: Any = model.tokenizer
    held = conversations(chat)
    if not getattr(tokenizer, "chat_template", None):
        lacks = "tokenizer" if tokenizer is None else "chat template"
        raise InputError(
            f"{model.identity.name} has no {lacks}; give plain text instead, or load a chat model's tokenizer"
        )
    texts = []
    for number, conversation in enumerate(held, start=1):
        begin = conversation[-1]["role"] != "assistant"
        try:
            texts.append(str(tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=begin)))
        except Exception as error:  # templates are programs, and raise what they like
            raise InputError(
                f"the chat template of {model.identity.name} refuses conversation {number} of {named(chat)} "
                f"({reason(error)}); mend that conversation"
            ) from None
    return texts


def contents(model: View, conversation: Conversation, text: str) -> list[tuple[str, int, int]]:
    """(role, start, stop) of what every message says in the text that the chat template made of the conversation.

    Empty where the template does more than to write what the messages say, but for the spaces around it.
    """
    marks = [f"{MARK}{n}{MARK}" for n in range(len(conversation))]
    try:
        (behind,) = rendered(
            model, [[{**message, "content": mark} for message, mark in zip(conversation, marks, strict=True)]]
        )
    except InputError:
        return []
    found, at = [], 0
    for message, mark in zip(conversation, marks, strict=True):
        before, _, behind = behind.partition(mark)
        until = behind.partition(MARK)[0]
        for said in (message["content"], message["content"].strip()):
            if text.startswith(before + said + until, at):
                break
        else:
            return []
        at += len(before) + len(said)
        found.append((message["role"], at - len(said), at))
    return found if text[at:] == behind else []


def named(chat: Chat) -> str:
    """How results and messages name a chat: by its file, or by what is said first."""
    if not isinstance(chat, (str, Path)):
        try:
            message: Any = chat[0] if isinstance(chat[0], Mapping) else chat[0][0]
            return f"chat '{beginning(message['content'])}'"
        except (TypeError, KeyError, IndexError, AttributeError):  # which `conversations` refuses
            return "chat from Python"
    return f"chat '{chat if _is_file(chat) else beginning(str(chat))}'"


def beginning(text: str) -> str:
    """As much of a text as names and messages show."""
    text = " ".join(text.split())
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def _is_file(chat: str | Path) -> bool:
    return isinstance(chat, Path) or chat.endswith(".json") or what_is(chat) != "nothing"


def _read(chat: str | Path) -> Any:
    """What a file holds, or a conversation of one question."""
    if not str(chat).strip():
        raise InputError("the question is empty; give one, or a JSON file of conversations")
    if not _is_file(chat):
        return [{"role": "user", "content": chat}]
    try:
        return json.loads(Path(chat).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = f"cannot be read ({getattr(error, 'strerror', None) or 'no JSON in UTF-8'})"
        why = "does not exist" if isinstance(error, FileNotFoundError) else why
        raise InputError(f"{named(chat)} {why}; give a JSON file of conversations, or a question") from None
