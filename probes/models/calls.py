"""How a block was called: the stream among its arguments, and the block as a function of its stream alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]


def with_hidden(stream: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    return ((stream, *args[1:]), kwargs) if args else ((), kwargs | {"hidden_states": stream})


def recorded_block(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
    """(the stream it read, the block as a function of its stream, its rotation), taken and given on that device."""
    recorded = hidden(args, kwargs).detach().to(device)
    args, kwargs = with_hidden(recorded.new_empty(0), args, kwargs)  # so that a kept block does not keep its stream

    def block(stream: Tensor) -> Tensor:
        given, named = with_hidden(stream, args, kwargs)
        output = module(*given, **named)
        return (output[0] if isinstance(output, tuple) else output).to(device)

    pair = kwargs.get("position_embeddings")
    rotation = None if pair is None else (pair[0][0].to(recorded), pair[1][0].to(recorded))  # OLMo's are in float32
    return recorded, block, rotation
