"""Rotations whose frequencies depend on how long the whole text is: LongRoPE and dynamic NTK.

transformers takes a pass for the whole text, and keeps the frequencies of the longest text it has seen. Here every pass
has those of its own length, as in a model that has seen no other, or of a length that is given: a context whose keys are
kept has the rotations of the text that will follow it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

_length: ContextVar[int | None] = ContextVar("headwater_text_length", default=None)


def depend_on_length(model: nn.Module) -> bool:
    """Whether rotations of this model depend on the text's length."""
    return bool(_dependent(model))


def follow_length(shadow: nn.Module) -> None:
    """Make the rotations of a shadow those of each pass's length; it gets frequencies of its own."""
    for module in _dependent(shadow):
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.clone(), persistent=False)
        module.register_forward_pre_hook(_begin, with_kwargs=True)
        module.register_forward_hook(_end)


@contextmanager
def of_text(length: int | None) -> Iterator[None]:
    """Within it, passes have the rotations of a text of so many tokens; None: of the tokens they read."""
    token = _length.set(length)
    try:
        yield
    finally:
        _length.reset(token)


def _dependent(model: nn.Module) -> list[nn.Module]:
    def kinds(module: nn.Module) -> list[str]:
        found = vars(module).get("rope_type", "")
        return [*found.values()] if isinstance(found, dict) else [found]

    return [one for one in model.modules() if any("dynamic" in kind or kind == "longrope" for kind in kinds(one))]


def _begin(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A text of one token first, which makes transformers forget a longer one; then one of the length that is wanted."""
    named = dict(zip(("x", "position_ids", "layer_type"), args, strict=False)) | kwargs
    places, length = named["position_ids"], _length.get()
    module.forward(**named | {"position_ids": torch.zeros_like(places[:, :1])})
    if length is not None:
        places = torch.cat([places, torch.full_like(places[:, :1], length - 1)], 1)
    return (), named | {"position_ids": places}


def _end(module: Any, args: Any, output: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...] | None:
    return None if _length.get() is None else tuple(part[:, :-1] for part in output)
