"""What a killed training resumes from: one safetensors file, replaced whole, with a description that must match."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from probes.errors import InputError
from probes.run.files import atomic


class State(NamedTuple):
    """Where a training stands. `described`: what a resumed training must share with this one, as JSON has it."""

    described: dict[str, Any]
    step: int
    seconds: float
    tensors: dict[str, Tensor]


def save(file: Path, state: State) -> None:
    """Write it in place of an earlier one."""
    metadata = {
        "described": json.dumps(state.described, sort_keys=True),
        "step": str(state.step),
        "seconds": str(state.seconds),
    }
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors.items()}
    with atomic(file) as temporary:
        save_file(tensors, temporary, metadata=metadata)


def load(file: Path) -> State | None:
    """What was saved; None where there is no file.

    Raises:
        InputError: the file is damaged, or is none of ours.
    """
    if not file.exists():
        return None
    try:
        with safe_open(file, "pt") as opened:
            metadata: Mapping[str, str] = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        described = dict(json.loads(metadata["described"]))
        return State(described, int(metadata["step"]), float(metadata["seconds"]), tensors)
    except Exception as error:  # whatever a damaged or foreign file brings up
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise InputError(f"'{file}' cannot be read ({reason}); remove it to start anew") from None


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first thing in which two descriptions differ, in words; None if they are the same."""
    for name in dict.fromkeys((*now, *before)):
        one, other = before.get(name), now.get(name)
        if one == other:
            continue
        if isinstance(one, dict) and isinstance(other, dict) and (inner := difference(one, other)) is not None:
            return inner
        if name == "runs" and isinstance(one, list) and isinstance(other, list):
            if len(one) != len(other):
                return f"{len(one)} runs side by side, not {len(other)}"
            at, *_ = (n for n, both in enumerate(zip(one, other, strict=True)) if both[0] != both[1])
            return f"{difference(one[at], other[at])}, in run {at}"
        return f"{name} {one}, not {other}"
    return None
