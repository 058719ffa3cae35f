"""Settings of an experiment, a frozen dataclass (`toy.checks.Settings`), read from FIELD=VALUE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from probes.errors import InputError

from ..checks import Settings as Settings
from ..checks import kinds

BOOLS = {"yes": True, "no": False, "true": True, "false": False}


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
            now = getattr(settings, key)
            raise InputError(
                f"{option} cannot be read; give a value like {','.join(map(str, now)) if listed else now}"
            ) from None
        changes[key] = tuple(parts) if listed else parts[0]
    return replace(settings, **changes)


def _read(value: str, kind: Any) -> Any:
    if not value:
        raise ValueError("nothing between two commas")
    return BOOLS[value.lower()] if kind is bool else kind(value)


def near(name: str, known: Sequence[str]) -> str:
    """The name that was perhaps meant, as a question; empty without any."""
    return "".join(f" (did you mean {match}?)" for match in get_close_matches(name, known, 1))
