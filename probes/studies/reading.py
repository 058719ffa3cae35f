"""The study behind `headwater inspect`: one text, read by one model, resumed where it was interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xarray as xr

from ..data.chat import Chat, conversations
from ..measures.inspect import inspect
from ..models.view import View
from ..run import processes
from ..run.files import together
from ..run.progress import Advance
from ..run.store import Store, unfinished
from .runner import kept, measured_on


def read(
    model: View,
    prompt: Any,
    out: str | Path,
    write: Callable[[xr.Dataset], object],
    *,
    chat: Chat | None = None,
    advance: Advance = lambda label, done, total: None,
    **options: Any,
) -> xr.Dataset:
    """`probes.inspect(model, prompt, chat=chat, **options)`, or what is missing of it in the folder; `write` writes it.

    Raises:
        InputError: as `probes.inspect` does, or the folder cannot be written to.
    """
    label = f"{model.identity.name} inspect"
    # Its letters as ids: the hash tells texts apart.
    letters = torch.tensor(
        [[ord(letter) for letter in str(prompt if chat is None else conversations(chat))]], dtype=torch.int64
    )

    def progress(done: float | int, total: float | int) -> None:
        advance(label, float(done), float(total))

    def measure(pieces: Store) -> xr.Dataset:
        return inspect(model, prompt, chat=chat, pieces=pieces, progress=progress, **options)

    with unfinished(Path(out), "inspect") as root:
        result = kept(Store(root, label, measured_on(model, letters) | options), measure)
        if processes.first():
            with together():
                write(result)
    return result
