"""The one exception that stands for bad input.

The command line prints its message as a single line and exits with code 2; every message names the offending value and
what to do about it. Everything else that escapes is a defect of the suite and keeps its traceback.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class InputError(ValueError):
    """Something the caller gave cannot be used; the message names the value and the remedy."""


class TooFew(InputError):
    """Fewer prompts than a measure needs at once."""


def near(name: str, known: Iterable[str]) -> str:
    """The name that was perhaps meant, as a question; empty without any."""
    return "".join(f" (did you mean {match}?)" for match in get_close_matches(name, list(known), 1))


def plural(count: int, noun: str) -> str:
    """So many things in words: "1 prompt", "2 prompts"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InputError(f"{name} '{value}' does not exist; use {', '.join(choices)}")


def reason(error: BaseException) -> str:
    """What another library's error says, as part of a line; its type where it says nothing."""
    return " ".join(str(error).split())[:200] or type(error).__name__
