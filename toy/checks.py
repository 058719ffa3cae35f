"""Checks of settings that toys and pretraining share; each message names the value and says what to give."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from probes.errors import InputError
from probes.run.hardware import named


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


def seed_and_decay(seed: int, weight_decay: float) -> None:
    """Raise InputError where a training's seed or weight decay cannot be used."""
    refuse(
        {
            f"weight_decay={weight_decay} is no decay; give 0 or more": not 0 <= weight_decay < math.inf,
            f"seed={seed} is out of range; give a whole number from 0 to {2**32 - 1}": not 0 <= seed < 2**32,
        }
    )


def usable_device(name: str) -> str:
    """The device of a name; auto is CUDA where there is any.

    Raises:
        InputError: no such device.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return str(named(name))
