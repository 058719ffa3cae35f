"""Checks of settings that toys and pretraining share; each message names the value and says what to give."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from types import NoneType
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import torch

from probes.errors import InputError
from probes.run.hardware import named


class Checked:
    """The base of a dataclass whose fields are checked by their types, where they are not None.

    Whole numbers are 1 or more and other numbers 0 or more and finite, unless `LEAST` has another bound; a seed is below
    2^32; names are those of their `Literal`. Raises InputError.
    """

    LEAST: ClassVar[Mapping[str, float]] = {}

    def __post_init__(self) -> None:
        for name, kind in _types(type(self)).items():
            value = getattr(self, name)
            if value is None:
                continue
            least = self.LEAST.get(name, 0 if kind is float else 1)
            if get_origin(kind) is Literal:
                one_of(name, value, get_args(kind))
            elif name == "seed":
                if not 0 <= value < 2**32:
                    raise InputError(f"seed={value} is out of range; give a whole number from 0 to {2**32 - 1}")
            elif kind is int:
                at_least(name, value, least)
            elif kind is float and not least <= value < math.inf:
                raise InputError(f"{name}={value} is out of range; give a finite number of {least} or more")


@cache
def _types(kind: type) -> dict[str, Any]:
    """By field, its type, without None."""
    hints = get_type_hints(kind)
    types = {field.name: (hints[field.name], get_args(hints[field.name])) for field in fields(kind)}
    return {name: of[of[0] is NoneType] if NoneType in of else hint for name, (hint, of) in types.items()}


def refuse(reasons: Mapping[str, object]) -> None:
    """Raise InputError with the first reason whose value is true."""
    for reason, holds in reasons.items():
        if holds:
            raise InputError(reason)


def at_least(name: str, value: float, least: float) -> None:
    """Raise InputError where `value` is less."""
    if value < least:
        raise InputError(f"{name}={value} is too few; give at least {least}")


def one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raise InputError where `value` is none of those."""
    if value not in allowed:
        raise InputError(f"{name}={value!r} is unknown; give one of {', '.join(allowed)}")


def above_zero(name: str, value: float) -> None:
    """Raise InputError where `value` is not a finite number above 0."""
    if not 0 < value < math.inf:
        raise InputError(f"{name}={value} is not positive; give a number above 0")


def usable_device(name: str) -> str:
    """The device of a name; auto is CUDA where there is any.

    Raises:
        InputError: no such device.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return str(named(name))
