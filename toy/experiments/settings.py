"""Settings of an experiment: a frozen dataclass whose fields are checked by their types, and read from FIELD=VALUE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import cache
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

from probes.errors import InputError

from ..checks import at_least, one_of

BOOLS = {"yes": True, "no": False, "true": True, "false": False}
# What to give for a field, and for one that is a list.
WANTED: dict[Any, tuple[str, str]] = {
    int: ("a whole number", "whole numbers like 2,4"),
    float: ("a number like 0.5", "numbers like 0.5,1"),
    bool: ("yes or no", "no,yes"),
    str: ("a name", "names like some,names"),
}


class Settings:
    """The base: whole numbers are 1 or more, unless `LEAST` says otherwise, and lists hold one or more different values.

    `CHOICES` has what a name may be. Raises InputError.
    """

    LEAST: ClassVar[Mapping[str, float]] = {}
    CHOICES: ClassVar[Mapping[str, Sequence[str]]] = {}

    def __post_init__(self) -> None:
        for name, (kind, listed) in kinds(type(self)).items():
            value = getattr(self, name)
            if listed and (not value or len(set(value)) != len(value)):
                raise InputError(f"{name}={','.join(map(str, value)) or 'nothing'}; give one or more different values")
            for entry in value if listed else (value,):
                if kind is int or name in self.LEAST:
                    at_least(name, entry, self.LEAST.get(name, 1))
                if name in self.CHOICES:
                    one_of(name, entry, self.CHOICES[name])


@cache
def kinds(settings: type) -> dict[str, tuple[Any, bool]]:
    """By field: the type of its value, or of a list's values, and whether it is a list."""
    hints = get_type_hints(settings)
    types = {field.name: hints[field.name] for field in fields(settings)}
    return {name: (get_args(x)[0], True) if get_origin(x) is tuple else (x, False) for name, x in types.items()}


def changed(settings: Any, given: Sequence[str], name: str) -> Any:
    """Settings with changes given as "field=value"; `name` is whose they are.

    Raises:
        InputError: no such field, a field given twice, or a value of another type.
    """
    known, changes = kinds(type(settings)), {}
    for text in given:
        key, _, value = text.partition("=")
        key, value, option = key.strip().replace("-", "_"), value.strip(), f"--with '{text}'"
        if key not in known:
            possible = f"give FIELD=VALUE with one of {', '.join(known)}"
            raise InputError(f"{option}: '{name}' has no setting '{key}'{near(key, [*known])}; {possible}")
        if not value:
            raise InputError(f"{option} has no value; give {key}=VALUE")
        if key in changes:
            raise InputError(f"{option} gives {key} a second time; give each field once, lists as in 2,4")
        kind, listed = known[key]
        try:
            parts = [_read(part.strip(), kind) for part in (value.removesuffix(",").split(",") if listed else [value])]
        except (ValueError, KeyError):
            raise InputError(f"{option} cannot be read; give {WANTED[kind][listed]}") from None
        changes[key] = tuple(parts) if listed else parts[0]
    return replace(settings, **changes)


def _read(value: str, kind: Any) -> Any:
    if not value:
        raise ValueError("nothing between two commas")
    return BOOLS[value.lower()] if kind is bool else kind(value)


def near(name: str, known: Sequence[str]) -> str:
    """The name that was perhaps meant, as a question; empty without any."""
    return "".join(f" (did you mean {match}?)" for match in get_close_matches(name, known, 1))
