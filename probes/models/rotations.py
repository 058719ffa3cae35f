"""Rotations whose frequencies depend on how long the whole text is: LongRoPE and dynamic NTK.

transformers keeps the frequencies of the longest text it has seen. Here every pass has those of its own length, as in a
model that has seen no other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def follow_length(shadow: nn.Module) -> bool:
    """Make the rotations of a shadow those of each pass's length, if they depend on it; it gets frequencies of its own."""
    dependent = [module for module in shadow.modules() if any(map(_depends, _kinds(module)))]
    for module in dependent:
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.clone(), persistent=False)
        module.register_forward_pre_hook(_forget, with_kwargs=True)
    return bool(dependent)


def _kinds(module: nn.Module) -> list[str]:
    kind = vars(module).get("rope_type", "")
    return [*kind.values()] if isinstance(kind, dict) else [kind]


def _depends(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _forget(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A text of one token first makes transformers forget a longer one."""
    named = dict(zip(("x", "position_ids", "layer_type"), args, strict=False)) | kwargs
    module.forward(**named | {"position_ids": torch.zeros_like(named["position_ids"][:, :1])})
