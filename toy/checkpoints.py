"""What `toy.pretrain` writes to and reads from its folder: models, the log, and the state that a killed run resumes from."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from probes.errors import InputError
from probes.run.files import atomic, require_writable, system_error

from . import state
from .state import State

STATE = "state/state.safetensors"


def check_folder(out: Path) -> None:
    """Refuse a folder that is neither new nor empty nor an unfinished run."""
    require_writable(out)
    if not out.is_dir():
        return
    if (out / "training.json").exists():
        raise InputError(f"'{out}' holds a finished model; give another folder, or remove this one to train it again")
    found = sorted(entry.name for entry in out.iterdir())
    if found and not any(name == "state" or re.fullmatch(r"step\d+", name) for name in found):
        raise InputError(f"'{out}' holds other files ('{found[0]}' is one); give a new or an empty folder")


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a transformers folder in bfloat16; weights go last, so that a folder with weights is a whole one."""
    config = model.config.to_dict() | {"dtype": "bfloat16"}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(folder)
        type(model.config).from_dict(config).save_pretrained(folder)
    except Exception as error:  # the tokenizer's own is no OSError
        if (reason := system_error(error)) is None:
            raise
        raise InputError(f"cannot write '{folder}' ({reason}); choose a folder with room") from error
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name not in tied
    }
    with atomic(folder / "model.safetensors") as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})


def read_log(file: Path, *, below: int) -> list[dict[str, Any]]:
    """The log's rows of steps before `below`."""
    if not file.exists():
        return []
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["step"] < below]


def write_log(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write the log, a line of JSON per row."""
    with atomic(file) as temporary:
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def save_state(
    out: Path, identity: Mapping[str, Any], step: int, seconds: float, tensors: Mapping[str, Tensor]
) -> None:
    """Keep what a killed run resumes from."""
    state.save(out / STATE, State(dict(identity), step, seconds, dict(tensors)))


def load_state(out: Path, identity: Mapping[str, Any]) -> tuple[int, float, dict[str, Tensor]]:
    """(step, seconds, tensors) of an unfinished run in `out`; (0, 0.0, {}) where there is none.

    Raises:
        InputError: the run there has another identity; the message names what differs.
    """
    found = state.load(out / STATE)
    if found is None:
        return 0, 0.0, {}
    for part, value in identity.items():
        previous = found.described[part]
        if previous == value:
            continue
        changed = [part]
        if isinstance(value, dict):
            changed = sorted(k for k in {*value, *previous} if previous.get(k) != value.get(k))
        raise InputError(
            f"'{out}' holds an unfinished run with other {', '.join(changed)}; "
            "give the same settings to continue it, or another folder"
        )
    return found.step, found.seconds, found.tensors


def remove_state(out: Path) -> None:
    """Remove it and its folder."""
    (out / STATE).unlink(missing_ok=True)
    if (out / STATE).parent.exists():
        (out / STATE).parent.rmdir()
