"""What a model can be asked: tokens, a query, blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from .view import View


def check_tokens(model: View, tokens: object) -> None:
    """Check that `tokens` is an int64 tensor [prompt, position] that the model can read.

    Raises:
        InputError: another type, dtype or number of dimensions; no prompt; fewer than 2 positions, or more than the
            model was made for; an id outside the vocabulary.
    """
    if not isinstance(tokens, Tensor):
        raise InputError(f"tokens are a {type(tokens).__name__}; give a torch tensor of int64 [prompt, position]")
    if tokens.dtype != torch.int64:
        raise InputError(f"tokens have dtype {str(tokens.dtype).removeprefix('torch.')}; convert them with .long()")
    shape = list(tokens.shape)
    if tokens.ndim != 2:
        raise InputError(f"tokens have shape {shape}; give two dimensions, [prompt, position]")
    if shape[0] < 1 or shape[1] < 2:
        raise InputError(f"tokens have shape {shape}; give at least 1 prompt of at least 2 positions")
    if model.spec.max_length is not None and shape[1] > model.spec.max_length:
        raise InputError(
            f"tokens have {shape[1]} positions, {model.identity.name} was made for {model.spec.max_length}; "
            "give shorter prompts"
        )
    for token in (int(tokens.min()), int(tokens.max())):
        check_id(model, token)


def check_id(model: View, token: int, what: str = "token id") -> None:
    """Check that the model has an embedding for an id; `what` is what an error calls it.

    Raises:
        InputError: it has none.
    """
    if not 0 <= token < model.spec.vocabulary:
        raise InputError(
            f"{what} {token} is outside the vocabulary of {model.identity.name}; "
            f"ids run from 0 to {model.spec.vocabulary - 1}"
        )


@torch.no_grad()
def check_logits(model: View) -> None:
    """Check that the model gives next-token logits, before what needs them begins.

    Raises:
        InputError: it has no output head.
    """
    model.unembed(torch.zeros(1, model.spec.width, device=model.device, dtype=model.dtype))


def check_place(model: View, tokens: Any, query: int, from_layer: Any) -> tuple[int, list[int]]:
    """(the query counted from the front, the source blocks in rising order).

    Raises:
        InputError: tokens, query or block that the model cannot take.
    """
    check_tokens(model, tokens)
    blocks, length = model.spec.blocks, tokens.shape[1]
    at = query + length if query < 0 else query
    if not 0 <= at < length:
        raise InputError(f"query {query} is outside the prompt of {length} tokens; give {-length} to {length - 1}")
    if from_layer != "all" and not (isinstance(from_layer, int) and 0 <= from_layer < blocks):
        raise InputError(
            f"from_layer {from_layer} does not exist; the model has blocks 0 to {blocks - 1}, or give 'all'"
        )
    return at, list(range(blocks)) if from_layer == "all" else [from_layer]


def not_finite(model: View, what: str) -> InputError:
    """The error for values of a model that are infinite or no numbers."""
    return InputError(
        f"model '{model.identity.name}' gives {what} with values that are not finite; "
        "check its weights, or use dtype float32 or float64"
    )
