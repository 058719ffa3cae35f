"""The one exception that stands for bad input.

The command line prints its message as a single line and exits with code 2; every message names the offending value and
what to do about it. Everything else that escapes is a defect of the suite and keeps its traceback.
"""


class InputError(ValueError):
    """Something the caller gave cannot be used; the message names the value and the remedy."""


class TooFew(InputError):
    """Fewer prompts than a measure needs at once."""


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InputError(f"{name} '{value}' does not exist; use {', '.join(choices)}")


def reason(error: BaseException) -> str:
    """What another library's error says, as part of a line; its type where it says nothing."""
    return " ".join(str(error).split())[:200] or type(error).__name__
