"""What `toy.pretrain` writes to and reads from its folder: models, the log, and the state that a killed run resumes from."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from probes.errors import InputError
from probes.run.files import atomic, require_writable, system_error
from probes.run.store import RESULT, Store

STATE, UNIT = "state", "pretrain"  # folder of an unfinished run, and what is kept there
PROGRESS = "progress"  # array of what is kept beside tensors


def check_folder(out: Path) -> None:
    """Refuse a folder that is neither new nor empty nor an unfinished run."""
    require_writable(out)
    if (out / "training.json").exists():
        raise InputError(f"'{out}' holds a finished model; give another folder, or remove this one to train it again")
    names = sorted(entry.name for entry in out.iterdir()) if out.is_dir() else []
    if names and not any(name == STATE or re.fullmatch(r"step\d+", name) for name in names):
        raise InputError(f"'{out}' holds other files ('{names[0]}' is one); give a new or an empty folder")


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
    tied = getattr(model, "_tied_weights_keys", None) if model.config.tie_word_embeddings else None
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name not in (tied or ())
    }
    with atomic(folder / "model.safetensors") as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})


def write_log(out: Path, rows: list[dict[str, Any]]) -> None:
    """Write the log, a line of JSON per row."""
    with atomic(out / "log.jsonl") as temporary:
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def save_state(out: Path, identity: Mapping[str, Any], progress: Any, tensors: Mapping[str, Tensor]) -> None:
    """Keep what a killed run resumes from in place of what was kept before; `progress` is JSON."""
    arrays = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
    arrays[PROGRESS] = np.frombuffer(json.dumps([identity, progress]).encode(), np.uint8)
    Store(out / STATE, UNIT).put(RESULT, arrays)


def load_state(out: Path, identity: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor]] | None:
    """(progress, tensors) of an unfinished run in `out`; None where there is none.

    Raises:
        InputError: the run there has another identity, which the message names: its checkpoints are in `out`, too.
    """
    arrays = Store(out / STATE, UNIT).get(RESULT)
    if arrays is None:
        return None
    before, progress = json.loads(arrays.pop(PROGRESS).tobytes())
    for part, value in json.loads(json.dumps(identity)).items():
        was = before.get(part)
        if was != value:
            both = isinstance(value, dict) and isinstance(was, dict)
            changed = sorted(k for k in {*value, *was} if was.get(k) != value.get(k)) if both else [part]
            raise InputError(
                f"'{out}' holds an unfinished run with other {', '.join(changed)}; "
                "give the same settings to continue it, or another folder"
            )
    return progress, {name: torch.from_numpy(array) for name, array in arrays.items()}
