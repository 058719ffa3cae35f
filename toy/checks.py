"""Settings of toys and of pretraining, and their checks; each message names the value and says what to give."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from types import NoneType
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from probes.errors import InputError, near

BOOLS = {"yes": True, "no": False, "true": True, "false": False}


class Settings:
    """The base of a dataclass whose fields are checked by their types, where they are not None.

    Whole numbers are 1 or more and other numbers finite and, outside of lists, 0 or more, unless `LEAST` has another bound.
    A seed is below 2^32. Names are those of their `Literal` or of `CHOICES`. A list holds different values, and at least one
    unless it is empty by default. Raises InputError.
    """

    LEAST: ClassVar[Mapping[str, float]] = {}
    CHOICES: ClassVar[Mapping[str, Sequence[str]]] = {}

    def __post_init__(self) -> None:
        for name, (kind, listed) in kinds(type(self)).items():
            value = getattr(self, name)
            if value is None:
                continue
            if listed and (len(set(value)) != len(value) or not (value or getattr(type(self), name, None) == ())):
                raise InputError(f"{name}={','.join(map(str, value)) or 'nothing'}; give one or more different values")
            least = self.LEAST.get(name, 1 if kind is int else -math.inf if listed else 0)
            for entry in value if listed else (value,):
                if choices := get_args(kind) if get_origin(kind) is Literal else self.CHOICES.get(name):
                    if entry not in choices:
                        raise InputError(f"{name}={entry!r} is unknown; give one of {', '.join(choices)}")
                elif name == "seed" and not 0 <= entry < 2**32:
                    raise InputError(f"seed={entry} is out of range; give a whole number from 0 to {2**32 - 1}")
                elif kind is int and name != "seed":
                    at_least(name, entry, least)
                elif kind is float and not (least <= entry and math.isfinite(entry)):
                    raise InputError(f"{name}={entry} is out of range; give a finite number of {least} or more")


@cache
def kinds(settings: type) -> dict[str, tuple[Any, bool]]:
    """By field: the type of its value, or of a list's values, and whether it is a list; None is left out."""
    hints, found = get_type_hints(settings), {}
    for field in fields(settings):
        kind = hints[field.name]
        if NoneType in get_args(kind):
            kind = next(of for of in get_args(kind) if of is not NoneType)
        listed = get_origin(kind) is tuple
        found[field.name] = (get_args(kind)[0] if listed else kind, listed)
    return found


def changed(settings: Any, given: Sequence[str], name: str) -> Any:
    """Settings with changes given as "field=value"; `name` is whose they are."""
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


def refuse(reasons: Mapping[str, object]) -> None:
    """Raise InputError with the first reason whose value is true."""
    for reason, holds in reasons.items():
        if holds:
            raise InputError(reason)


def at_least(name: str, value: float, least: float) -> None:
    """Raise InputError where `value` is less."""
    if value < least:
        raise InputError(f"{name}={value} is too few; give at least {least}")


def above_zero(name: str, value: float) -> None:
    """Raise InputError where `value` is not a finite number above 0."""
    if not 0 < value < math.inf:
        raise InputError(f"{name}={value} is not positive; give a number above 0")


def usable_device(name: str) -> str:
    """The device of a name; auto is CUDA where there is any."""
    import torch

    from probes.run.hardware import named

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return str(named(name))
