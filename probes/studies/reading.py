"""The study behind `headwater inspect`: one text, read by one model, taken up again where it was interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import xarray as xr

from ..data.chat import Chat, conversations
from ..measures.inspect import inspect
from ..models.view import View
from ..run.progress import Advance
from .runner import kept_units, measured_on


class Reading:
    """A text being inspected; what is done of it waits in the output's folder until `finish`.

    Raises:
        InputError: the folder cannot be written to.
    """

    def __init__(self, out: str | Path) -> None:
        self._unfinished = kept_units(out, "inspect")

    def read(
        self, model: View, prompt: Any, *, chat: Chat | None = None, advance: Advance | None = None, **options: Any
    ) -> xr.Dataset:
        """`probes.inspect(model, prompt, chat=chat, **options)`, or what is missing of it.

        Raises:
            InputError: as `probes.inspect` does, or another text or other options were begun in this folder.
        """
        label = f"{model.identity.name} inspect"
        # Its letters as ids: the hash tells texts apart.
        said = str(prompt if chat is None else conversations(chat))
        letters = torch.tensor([[ord(letter) for letter in said]], dtype=torch.int64)
        key = measured_on(model, letters) | options

        def measure() -> xr.Dataset:
            def progress(done: float | int, total: float | int) -> None:
                if advance is not None:
                    advance(label, float(done), float(total))

            return inspect(model, prompt, chat=chat, progress=progress, **options)

        return self._unfinished.unit(label, key, measure)

    def finish(self) -> None:
        """All is written down."""
        self._unfinished.clear()
