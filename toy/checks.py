"""Checks of settings that toys and pretraining share; each message names the value and says what to give."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from probes.errors import InputError


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
    if not 0 <= weight_decay < math.inf:
        raise InputError(f"weight_decay={weight_decay} is no decay; give 0 or more")
    if not 0 <= seed < 2**32:
        raise InputError(f"seed={seed} is out of range; give a whole number from 0 to {2**32 - 1}")


def usable_device(name: str) -> str:
    """The device of a name, cpu or cuda; auto is CUDA where there is any.

    Raises:
        InputError: another name, or CUDA where there is none.
    """
    there = torch.cuda.is_available()
    if name not in ("auto", "cpu", "cuda"):
        raise InputError(f"device '{name}' is unknown; give auto, cpu or cuda")
    if name == "cuda" and not there:
        raise InputError("device 'cuda' is not there; give cpu or auto")
    return ("cuda" if there else "cpu") if name == "auto" else name
